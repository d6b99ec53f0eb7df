"""Loops that are scans: each turn combines what it carries with a term that does not depend on it.

In: a loop-stage kernel. Out: `find_scans` gives the one loop of its nest that is such a scan, with what is carried in an order in which it can be computed: a
running sum of running maxima has the maxima first. Proven: turns write different elements, and read nothing that other turns write.
`guarded_terms` turns a combination under a condition into one that is always there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.affine import Affine, Forms, address, analyse
from tilewright.analysis.loop_nest import Nest, nest_of
from tilewright.base.dtypes import DType
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, is_watched, walk
from tilewright.ir.rewrite import has_effects, rewrite
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.common.combine import Number, identities

KINDS = ("add", "mul", "min", "max")


def nothing(kind: str, dtype: DType) -> Number:
    """What combines with any value to that value; the sum of a negative zero and it is a negative zero."""
    return -0.0 if kind == "add" and dtype.is_float else identities(kind, [dtype])[0]


# -- terms under conditions -------------------------------------------------------------------------------------------


def guarded_terms(kernel: Kernel) -> Kernel:
    """The kernel where a turn that combines under a condition combines always, with a term that changes nothing where the condition does not hold:
    `if c { s = s + t }` is `s = s + (t if c else -0.0)`. Branches that combine in the same way, with different terms, choose the term."""

    def change(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode != "for" or len(op.operands) < 4:
            return None
        body = op.regions[0]
        inner = Builder(op.span)
        changed = False
        for one in body.ops:
            if one.opcode == "if" and one.results and _plain_branch(inner, one, body.args[1:], body.yields):
                changed = True
            else:
                inner.append(one)
        return b.append(replace(op, regions=(Block(body.args, tuple(inner.ops)),))) if changed else None

    return rewrite(kernel, change)


def _plain_branch(b: Builder, branch: Op, carried: Sequence[Value], yields: Sequence[Value]) -> bool:
    """Write an `if` that gives the next values of what is carried as one that gives terms, and the combinations behind it; False where that cannot be."""
    if any(has_effects(o) for r in branch.regions for o in walk(r) if o.opcode not in ("yield", "if")):
        return False
    steps: dict[int, tuple[str, Value]] = {}
    sides = [_Side(region) for region in branch.regions]
    for position, result in enumerate(branch.results):
        value = next((c for c, y in zip(carried, yields, strict=True) if y is result), None)
        if value is None:
            continue
        kinds = {kind for side in sides if (kind := side.take(position, value)) != "same"}
        if len(kinds) != 1 or "" in kinds:
            return False
        steps[position] = kinds.pop(), value
    if not steps or not all(side.is_free() for side in sides):
        return False
    regions = tuple(side.written(branch, steps) for side in sides)
    results = tuple(Value(r.type, "term") if k in steps else r for k, r in enumerate(branch.results))
    b.append(replace(branch, results=results, regions=regions))
    for position, (kind, value) in steps.items():
        b.append(Op(kind, (value, results[position]), (branch.results[position],), span=branch.span))
    return True


class _Side:
    """A region of an `if` that combines what is carried with terms."""

    def __init__(self, region: Block) -> None:
        self.region = region
        self.terms: dict[int, Value] = {}
        self.steps: list[Op] = []
        self.products: list[Op] = []

    def take(self, position: int, value: Value) -> str:
        """By what it combines a carried value: "same" where it leaves it as it is, nothing where it does something else."""
        given = self.region.yields[position]
        if given is value:
            return "same"
        step = next((o for o in self.region.ops if given in o.results), None)
        if step is None or sum(v is value for v in step.operands) != 1:
            return ""
        if step.opcode == "fma" and step.operands[2] is value:
            self.products.append(Op("mul", step.operands[:2], (Value(value.type, "term"),), span=step.span))
            self.terms[position] = self.products[-1].results[0]
        elif step.opcode in KINDS:
            self.terms[position] = next(v for v in step.operands if v is not value)
        self.steps.append(step)
        return "add" if step.opcode == "fma" else step.opcode if step.opcode in KINDS else ""

    def is_free(self) -> bool:
        """Whether nothing else there uses what is carried on."""
        made = {result for step in self.steps for result in step.results}
        return not any(v in made for o in walk(self.region) if o.opcode != "yield" for v in o.operands)

    def written(self, branch: Op, steps: Mapping[int, tuple[str, Value]]) -> Block:
        """The region that gives terms."""
        inner = Builder(branch.span)
        for o in (*(o for o in self.region.ops if o not in self.steps and o.opcode != "yield"), *self.products):
            inner.append(o)
        given = list(self.region.yields)
        for position, (kind, value) in steps.items():
            dtype = dtype_of(value.type)
            given[position] = self.terms[position] if position in self.terms else inner.const(nothing(kind, dtype), dtype)
        return Block((), (*inner.ops, Op("yield", tuple(given))))


# -- what a loop carries ----------------------------------------------------------------------------------------------


@record(identity=True)
class CarriedScan:
    """One value that a loop carries. `term`: what a turn combines it with (of an `fma`, its two factors); `slice`: ops of the body that compute it, without
    those that earlier values have."""

    carried: Value
    position: int
    kind: str
    term: tuple[Value, ...]
    slice: tuple[Op, ...]


@record(identity=True)
class ScanLoop:
    """A loop of a nest that is a scan of each value it carries."""

    nest: Nest
    loop: Op
    scans: tuple[CarriedScan, ...]
    crosswise: bool
    """Whether neighbours in memory belong to different lines."""
    forms: Forms


def find_scans(kernel: Kernel) -> ScanLoop | None:
    """The loop of a kernel that is a scan, beside which nothing else is done in loops."""
    if not any(op.opcode == "parallel" for op in kernel.body.ops):
        return None
    region = next(op for op in kernel.body.ops if op.opcode == "parallel").regions[0]
    loops = [op for op in region.ops if op.opcode in ("for", "while", "reduce")]
    if len(loops) != 1 or loops[0].opcode != "for" or len(loops[0].operands) < 4:
        return None
    (loop,) = loops
    beside = [op for op in region.ops if op is not loop and op.opcode != "yield"]
    if any(op.regions or (has_effects(op) and op.opcode != "store") for op in beside):
        return None
    inside = {op.operands[0] for op in walk(loop.regions[0]) if op.opcode == "store"}
    if any(op.operands[0] in inside for op in beside if op.opcode == "store"):
        return None  # whichever comes last would count
    nest, forms = nest_of(kernel), analyse(kernel)
    if forms[loop.operands[2]].factors or forms[loop.operands[2]].constant != ONE or not _is_apart(kernel, loop) or not writes_apart(loop, forms):
        return None
    scans = _scans(loop)
    if scans is None:
        return None
    accesses = [op for op in walk(loop.regions[0]) if op.opcode in ("load", "store")]
    along = sum(address(op, forms).factor(loop.regions[0].args[0]) == ONE for op in accesses)
    across = sum(any(address(op, forms).factor(index) == ONE for index in region.args) for op in accesses)
    return ScanLoop(nest, loop, scans, across > along, forms)


def scanned_by_blocks(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> ScanLoop | None:
    """The scan of a kernel whose lines are walked by the threads of a block together: on a GPU, where memory lies along lines that are not short."""
    if not target.simt or not target.has_warps or target.has("serial") or kernel.attrs.get("in_order") or is_watched(kernel):
        return None
    scan = find_scans(kernel)
    if scan is None or scan.crosswise:
        return None
    return scan if scan_length(kernel, scan, hints) >= 2 * target.warp_size else None


def scan_length(kernel: Kernel, scan: ScanLoop, hints: Mapping[str, int]) -> int:
    """How long lines are in the call at hand; a large number where that is not known."""
    declared = kernel.attrs.get("reduce_extent")
    low, high = (scan.forms[v] for v in scan.loop.operands[:2])
    extent = declared if isinstance(declared, Size) else high.constant - low.constant if not (low.factors or high.factors) else None
    return extent.evaluate(hints) if extent is not None and extent.names <= hints.keys() else 1 << 20


def loads_inside(kernel: Kernel, scan: ScanLoop) -> set[int]:
    """Loads of the loop that stay inside their arrays in every turn, so that no condition has to be asked first: their ids."""
    low, high = (scan.forms[v] for v in scan.loop.operands[:2])
    declared = kernel.attrs.get("line_extent")
    end = declared if isinstance(declared, Size) else high.constant if not high.factors else None
    begins = isinstance(declared, Size) or (not low.factors and (low.constant.constant or 0) >= 0 and low.constant.constant is not None)
    indices = dict(zip(scan.nest.parallel.regions[0].args, scan.nest.extents, strict=True))

    def inside(place: Affine, extent: Size) -> bool:
        own = next((v for v in indices if place.is_just(v)), None)
        if own is not None:
            return indices[own] == extent
        if end is None or not begins or place.values != (scan.loop.regions[0].args[0],) or end != extent:
            return False
        factor = place.factor(place.values[0])
        return (factor == ONE and place.constant == ZERO) or (factor.constant == -1 and place.constant == end - 1)

    found: set[int] = set()
    for op in walk(scan.loop.regions[0]):
        if op.opcode == "load":
            memory = op.operands[0].type
            assert isinstance(memory, Tensor)
            places = [scan.forms.get(v) for v in op.operands[1 : 1 + memory.rank]]
            if all(place is not None and inside(place, extent) for place, extent in zip(places, memory.shape, strict=True)):
                found.add(id(op))
    return found


def _is_apart(kernel: Kernel, loop: Op) -> bool:
    """Whether the loop's body has no loops of its own, and only reads what the kernel does not write, or what the same turn writes afterwards."""
    inside = list(walk(loop.regions[0]))
    if any(op.opcode in ("for", "while", "reduce") or (has_effects(op) and op.opcode not in ("store", "yield", "if")) for op in inside):
        return False
    stores = [op for op in walk(kernel.body) if op.opcode == "store"]
    places = {op.operands[0]: op.operands[1:-1] for op in stores}
    top = list(loop.regions[0].ops)
    for op in walk(kernel.body):
        if op.opcode != "load" or op.operands[0] not in places:
            continue
        memory = op.operands[0]
        own = [store for store in stores if store.operands[0] is memory]
        same = len(own) == 1 and own[0] in top and op in top and op.operands[1:] == places[memory]
        if not same or top.index(op) > top.index(own[0]):
            return False
    return True


def writes_apart(loop: Op, forms: Mapping[Value, Affine]) -> bool:
    """Whether no two turns write the same element."""
    index = loop.regions[0].args[0]
    stores = [op for op in walk(loop.regions[0]) if op.opcode == "store"]
    arrays = [op.operands[0] for op in stores]
    if not stores or len(set(arrays)) != len(arrays):
        return False
    for store in stores:
        memory = store.operands[0].type
        assert isinstance(memory, Tensor)
        places = [forms.get(v) for v in store.operands[1 : 1 + len(memory.shape)]]
        if not any(form is not None and form.factor(index).constant not in (None, 0) for form in places):
            return False
    return True


def _scans(loop: Op) -> tuple[CarriedScan, ...] | None:
    """What each carried value is combined with, in an order in which terms depend on earlier values alone."""
    body = loop.regions[0]
    made = {result: op for op in body.ops for result in op.results}
    left = dict(enumerate(body.args[1:]))
    found: list[CarriedScan] = []
    done: set[int] = set()
    while left:
        ready = [(position, scan) for position in left if (scan := _term(body, position, made, left, done)) is not None]
        if not ready:
            return None
        position, scan = ready[0]
        found.append(scan)
        done |= {id(op) for op in scan.slice}
        del left[position]
    return tuple(found)


def _term(body: Block, position: int, made: Mapping[Value, Op], left: Mapping[int, Value], done: set[int]) -> CarriedScan | None:
    """By what a turn combines a value it carries with what term, and the ops that compute the term."""
    carried, step = body.args[1 + position], made.get(body.yields[position])
    if step is None:
        return None
    kind, dtype = ("add" if step.opcode == "fma" else step.opcode), dtype_of(carried.type)
    # A narrow float is rounded at every step: a scan would be rounded elsewhere.
    if kind not in KINDS or dtype.is_bool or (dtype.is_float and dtype.bits < 32 and kind in ("add", "mul")):
        return None
    if step.opcode == "fma":
        term = step.operands[:2] if step.operands[2] is carried else ()
    else:
        term = tuple(v for v in step.operands if v is not carried) if sum(v is carried for v in step.operands) == 1 else ()
    if not term:
        return None
    unknown = set(left.values())
    needed: set[int] = set()
    waiting = list(term)
    while waiting:
        value = waiting.pop()
        if value in unknown:
            return None
        op = made.get(value)
        if op is not None and id(op) not in needed and id(op) not in done:
            needed.add(id(op))
            waiting += [v for inner in (op, *(o for region in op.regions for o in walk(region))) for v in inner.operands]
            if any(inner.opcode == "store" for region in op.regions for inner in walk(region)):
                return None
    return CarriedScan(carried, position, kind, term, tuple(op for op in body.ops if id(op) in needed))
