"""Functions that a kernel computes for a sum along a row and once more for the row it stores, as softmax does its exponentials.

`find_recomputed(kernel)` looks at a loop-stage kernel:

    parallel i { s = sum_j f(i, j); for j { out[i, j] = g(f(i, j), s) } }

Where f has a function such as exp in it and is of the result's dtype, the sum may leave it in `out`, where the loop finds it. Nothing else
may read or write that array; whether an output may lie over an input is asked elsewhere (`analysis/alias.py`), and rows are never safe there.
"""

from __future__ import annotations

from tilewright.analysis.affine import Forms, analyse
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import dtype_of

FUNCTIONS = frozenset({
    "exp", "exp2", "log", "log2", "sin", "cos", "tan", "tanh", "sinh", "cosh", "sigmoid", "erf", "pow", "div", "sqrt",
})  # fmt: skip
"""What takes longer to compute than to load."""
Key = tuple[object, ...]


@record
class Recomputed:
    """`first`, in the sum, and `again`, in the loop, compute the same; `store` is where the loop stores its result."""

    sum: Op
    loop: Op
    first: Op
    again: Op
    store: Op


def find_recomputed(kernel: Kernel) -> Recomputed | None:
    """What is computed twice, or None. Of several such values in a loop the last, which the others lead to."""
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1:
        return None
    ops = parallels[0].regions[0].ops
    loops = [op for op in ops if op.opcode == "for" and op.attrs.get("independent") and len(op.operands) == 3]
    if not loops or not any(op.opcode == "reduce" for op in ops):
        return None
    forms = analyse(kernel)
    for loop in loops:
        before = ops[: ops.index(loop)]
        sums = [op for op in before if op.opcode == "reduce" and op.attrs["kind"] == "add" and _same_range(op, loop, forms)]
        for total in reversed(sums):
            found = _in_both(kernel, parallels[0], total, loop)
            if found is not None:
                return found
    return None


def _same_range(total: Op, loop: Op, forms: Forms) -> bool:
    low, high, step = (forms[v] for v in loop.operands)
    if len(total.operands) != 1 or low.factors or step.factors or (low.constant, step.constant) != (ZERO, ONE):
        return False
    extent = forms[total.operands[0]]
    return not extent.factors and not high.factors and extent.constant == high.constant


def _in_both(kernel: Kernel, parallel: Op, total: Op, loop: Op) -> Recomputed | None:
    store = _own_store(kernel, parallel, loop)
    if store is None:
        return None
    dtype = dtype_of(store.operands[0].type)
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")}
    summed = {}
    keys = Keys(total.regions[0].args[0], total, written)
    for op in total.regions[0].ops:
        key = keys.of(op.results[0]) if len(op.results) == 1 else None
        if key is not None:
            summed[key] = op
    keys = Keys(loop.regions[0].args[0], loop, written)
    for op in reversed(loop.regions[0].ops):
        if len(op.results) != 1 or dtype_of(op.results[0].type) is not dtype or not keys.has_function(op.results[0]):
            continue
        key = keys.of(op.results[0])
        if key is not None and key in summed:
            return Recomputed(total, loop, summed[key], op, store)
    return None


def _own_store(kernel: Kernel, parallel: Op, loop: Op) -> Op | None:
    """The loop's store to an array that nothing else uses, at a place of its own for each index of rows and loop."""
    places = {*parallel.regions[0].args, loop.regions[0].args[0]}
    for op in loop.regions[0].ops:
        if op.opcode != "store" or op.attrs.get("masked"):
            continue
        uses = [other for other in walk(kernel.body) if op.operands[0] in other.operands]
        indices = op.operands[1:-1]
        if uses == [op] and {*indices} == places and len(indices) == len(places):
            return op
    return None


class Keys:
    """Values that are the same function of the row and of the index along it have equal keys; None for what is not known to be one."""

    def __init__(self, index: Value, loop: Op, written: set[Value]) -> None:
        self.index, self.written = index, written
        self.made = {result: op for op in loop.regions[0].ops for result in op.results}

    def of(self, value: Value) -> Key | None:
        if value is self.index:
            return ("index",)
        op = self.made.get(value)
        if op is None:
            return ("value", id(value))
        if op.regions or len(op.results) != 1 or (op.opcode == "load" and op.operands[0] in self.written):
            return None
        operands = [self.of(v) for v in op.operands]
        if None in operands:
            return None
        return (op.opcode, tuple(sorted((name, str(attr)) for name, attr in op.attrs.items())), *operands)

    def has_function(self, value: Value) -> bool:
        op = self.made.get(value)
        return op is not None and (op.opcode in FUNCTIONS or any(self.has_function(v) for v in op.operands))
