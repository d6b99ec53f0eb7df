"""Recognise products with few rows: sums of products that walk the rows of one long array, each row against a few vectors, or one.

`find_row_dots(kernel, hints)` looks at a loop-stage kernel. In

    parallel m…, n… { acc = reduce k { yield w(n, k) * x(m, k) }; epilogue; store }

the rows of `w` lie along the sum, and there are few of x: time is that of reading w once. Either factor may be any expression of what it loads;
several such sums may stand side by side. What is summed without a factor that other rows share (a row's norm) is no such product.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.affine import Forms, address, analyse
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor
from tilewright.passes.packed.units import PackedTerm, packed_terms, unit_of

FEW = 8
"""Rows of x, at most: beyond them matrix instructions are needed to keep up with memory."""
UNKNOWN = 1 << 14
"""What an extent nobody knows is taken for."""


@record
class RowDots:
    """`m` and `n` are positions among the parallel indices; m is -1 where x has one row."""

    parallel: Op
    extents: tuple[Size, ...]
    reductions: tuple[Op, ...]
    length: Size
    """Terms of each sum."""
    m: int
    n: int
    weights: tuple[Op, ...]
    """Loads that differ from row to row of w."""
    shared: tuple[Op, ...]
    """Loads along the sum that rows of w share."""
    unit: int = 1
    """Elements of packed rows that lanes take together."""
    formats: tuple[str, ...] = ()
    """Of the packed rows, one for each sum."""


def find_row_dots(kernel: Kernel, hints: Mapping[str, int]) -> RowDots | None:
    """The product with few rows that the kernel is for these sizes, or None."""
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1 or not parallels[0].operands:
        return None
    parallel, forms = parallels[0], analyse(kernel)
    region = parallel.regions[0]
    reductions = tuple(op for op in region.ops if op.regions)
    if not reductions or not all(_is_plain_sum(op) for op in reductions):
        return None
    lengths = {forms[op.operands[0]].constant for op in reductions if not forms[op.operands[0]].factors}
    if len(lengths) != 1 or any(forms[v].factors for v in (*parallel.operands, *(op.operands[0] for op in reductions))):
        return None
    extents = tuple(forms[v].constant for v in parallel.operands)
    numbers = [e.evaluate(hints) if e.names <= hints.keys() else UNKNOWN for e in extents]
    loads = [(op, r.regions[0].args[0]) for r in reductions for op in r.regions[0].ops if op.opcode == "load"]
    if any(op.attrs.get("masked") or op.attrs.get("watch") for op, _ in loads):
        return None
    terms = packed_terms(kernel)
    unit = unit_of(terms) if terms else 1
    depends = _Dependence(kernel)
    walking = [(op, depends.of(op)) for op, k in loads if k in depends.of(op)]
    rows = [p for p, index in enumerate(region.args) if any(index in used for _, used in walking)]
    if not rows:
        return None
    n = max(rows, key=lambda p: (numbers[p], p))
    weights = tuple(op for op, used in walking if region.args[n] in used)
    shared = tuple(op for op, used in walking if region.args[n] not in used)
    if not shared or (not terms and not all(_lies_along(op, k, forms) for op, k in loads if op in weights)):
        return None
    if terms and not (unit and all(_is_of(op, terms) for op in weights)):
        return None
    others = {p for p in range(len(numbers)) if p != n and any(region.args[p] in used for op, used in walking if op in shared)}
    others -= {p for p in others if any(region.args[p] in used for op, used in walking if op in weights)}
    several = [p for p in others if numbers[p] > 1]
    if len(several) > 1 or any(numbers[p] > FEW for p in several):
        return None
    return RowDots(parallel, extents, reductions, lengths.pop(), several[0] if several else -1, n, weights, shared, unit, tuple(t.format for t in terms))


def _is_plain_sum(op: Op) -> bool:
    return (
        op.opcode == "reduce" and op.attrs["kind"] == "add" and len(op.results) == 1 and len(op.operands) == 1
        and not any(inner.regions for inner in walk(op.regions[0]))
    )  # fmt: skip


def _is_of(load: Op, terms: tuple[PackedTerm, ...]) -> bool:
    return any(load.operands[0] is term.tensor for term in terms)


def _lies_along(op: Op, k: Value, forms: Forms) -> bool:
    """Whether neighbours along the sum are neighbours in memory, or one element serves several of them."""
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    return memory.strides[-1] == ONE and address(op, forms).factor(k) == ONE


class _Dependence:
    """The loop indices that the indices of a load are made of."""

    def __init__(self, kernel: Kernel) -> None:
        self.made = {result: op for op in walk(kernel.body) for result in op.results}

    def of(self, load: Op) -> set[Value]:
        found, waiting = set[Value](), list(load.operands[1:])
        while waiting:
            value = waiting.pop()
            if value not in found:
                found.add(value)
                waiting += self.made[value].operands if value in self.made else ()
        return found
