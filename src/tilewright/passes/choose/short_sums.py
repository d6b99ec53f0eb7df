"""Schedules for many short sums on a CPU: distances of points, products of small matrices, poolings. Vectors lie along the results, and a sum is written out.

In: a loop-stage kernel, the lanes of a vector, and sizes to steer by. Out: a `Schedule`, or None where sums are long, or vectors along the sum cost less.
What is counted are accesses: one for a vector whose elements are neighbours, one for each element of others. What does not change from row to row is
loaded once for the rows of a block, which then are the inner loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tilewright.analysis.affine import Affine, Forms, address, analyse
from tilewright.analysis.loop_nest import Nest, can_repeat, inner_sums
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.base.target import Target
from tilewright.ir.nodes import Block, Kernel, Op, Value, is_watched, walk
from tilewright.ir.types import INDEX
from tilewright.passes.schedules.loops import Schedule

MOST_TERMS = 512
"""Terms of a sum that is short."""
LONGEST = 16
"""How long a sum of one index is at most, if it is written out."""
FEW_STRIDES = 3
"""Elements so far apart are loaded as whole vectors, and sorted."""
ROW_GROUP = 4
"""Rows that are done together."""
SHARED_ROWS = 8
"""Rows among which what is loaded once is counted as shared."""


def short_schedule(kernel: Kernel, nest: Nest, target: Target, lanes: int, hints: Mapping[str, int]) -> Schedule | None:
    """The schedule, or None."""
    forms, body = analyse(kernel), nest.parallel.regions[0]
    terms = _terms(body, forms)
    if not terms or not nest.reductions or nest.sweeps or lanes < 2 or kernel.attrs.get("blocks") or kernel.attrs.get("in_order"):
        return None
    if any(op.opcode in ("for", "while", "atomic", "accumulate") for op in walk(body)) or not can_repeat(kernel):
        return None
    counted = list(_counted(body, terms, 1))
    extents = [_hint(extent, hints) for extent in nest.extents]
    best: tuple[float, int, int] | None = None
    for axis in reversed(range(len(extents))):
        if extents[axis] < lanes:
            continue
        for rows in (*(p for p in reversed(range(len(extents))) if p != axis), -1):
            cost = sum(count * _cost(op, forms, body, axis, rows, extents, lanes) for op, count in counted)
            if best is None or cost < best[0]:
                best = cost, axis, rows
    along = _along_sum(nest, counted, forms, lanes, terms)
    if best is None or (along is not None and along < best[0]):
        return None
    _, axis, rows = best
    inside = rows >= 0 and any(op.opcode == "load" and _is_shared(op, forms, body, axis, rows) for op, _ in counted)
    longest = max(terms.values())
    registers = 1 if inside and longest > 8 else 2
    costs = target.costs.caches
    if rows < 0:
        rows = next((p for p in reversed(range(len(extents))) if p != axis), -1)
    group = 1 if inside else row_group_of(kernel, nest, rows, hints)
    tiles = tuple(lanes * registers if p == axis else group if p == rows else 1 for p in range(len(extents)))
    return Schedule(
        tiles, 1, lanes, vector_index=axis, chunk=costs.columns, repeat=True, short=True, row_axis=rows,
        rows_per_block=costs.rows_per_block if rows >= 0 else 1, rows_inside=inside,
    )  # fmt: skip


def points_schedule(kernel: Kernel, nest: Nest, target: Target, lanes: int, chunk: int, hints: Mapping[str, int]) -> Schedule | None:
    """Vectors along points that each run through a long loop, as those of distances to all others do: what belongs to the point is loaded once before the loop,
    and what the loop walks over is the same for all points of a vector. The loop is around short sums, or meets pairs of records, whose elements lie apart. None for other nests."""
    if lanes < 2 or nest.sweeps or not nest.extents or kernel.attrs.keys() & {"blocks", "in_order", "dots"} or is_watched(kernel):
        return None
    if any(op.opcode == "while" for op in walk(nest.parallel.regions[0])):
        return None
    forms, rank = analyse(kernel), len(nest.extents)
    if not _around_short_sums(nest, forms) and not (_meets_records(nest, forms) and _hint(nest.extents[-1], hints) >= 2 * lanes):
        return None
    return Schedule(tuple(2 * lanes if p == rank - 1 else 1 for p in range(rank)), 1, lanes, vector_index=rank - 1, chunk=chunk)


def _around_short_sums(nest: Nest, forms: Forms) -> bool:
    """Whether long loops are around sums of a few terms, which read something of the point and something that is the same for all points."""
    sums, (*_, point) = inner_sums(nest), nest.parallel.regions[0].args
    lengths = [forms[bound] for op in sums for bound in op.operands if bound in forms]
    if len(lengths) != sum(len(op.operands) for op in sums) or any(n.factors or n.constant.constant is None or n.constant.constant > LONGEST for n in lengths):
        return False
    loads = [address(op, forms) for one in sums for op in walk(one.regions[0]) if op.opcode == "load"]
    return any(form.factor(point) == ZERO for form in loads) and any(form.factor(point) != ZERO for form in loads)


def _meets_records(nest: Nest, forms: Forms) -> bool:
    """Whether sums read something of the point alone, and elements that lie apart along the sum and are the same for all points."""
    point, indices = nest.parallel.regions[0].args[-1], [op.regions[0].args[0] for op in nest.reductions]
    inside = [op for one in nest.reductions for op in walk(one.regions[0])]
    if any(len(op.operands) != 1 or str(op.attrs["kind"]).startswith("arg") for op in nest.reductions) or any(op.regions and op.opcode != "if" for op in inside):
        return False
    loads = [op for op in inside if op.opcode == "load"]
    if not all(v in forms for op in loads for v in op.operands[1:]):
        return False
    places = [address(op, forms) for op in loads]
    steps = [(form.factor(point), next((f for i in indices if (f := form.factor(i)) != ZERO), ZERO)) for form in places]
    if any(own != ZERO and along != ZERO for own, along in steps):
        return False
    return any(own != ZERO for own, _ in steps) and any(along not in (ZERO, ONE) for _, along in steps)


def row_group_of(kernel: Kernel, nest: Nest, row_axis: int, hints: Mapping[str, int]) -> int:
    """Neighbouring rows whose sums are done together, so that one does not wait for its own last term; 1 where conditions on indices make rows differ."""
    if row_axis < 0 or _hint(nest.extents[row_axis], hints) < ROW_GROUP or kernel.attrs.keys() & {"blocks", "in_order"} or is_watched(kernel):
        return 1
    for op in walk(nest.parallel.regions[0]):
        if op.opcode in ("if", "for", "while", "atomic", "accumulate", "select") or str(op.attrs.get("kind", "")).startswith("arg"):
            return 1
        if op.opcode not in _PLAIN and any(v.type == INDEX for v in op.operands):
            return 1
    return ROW_GROUP


_PLAIN = frozenset({"load", "store", "add", "sub", "mul", "reduce", "cast"})
"""Ops on indices that are the same for all rows."""


def _known(size: Size, sizes: Mapping[str, int]) -> int | None:
    return size.evaluate(sizes) if size.names <= sizes.keys() else None


def _hint(size: Size, hints: Mapping[str, int]) -> int:
    found = _known(size, hints)
    return 1 << 20 if found is None else found


def _terms(body: Block, forms: Forms) -> dict[Value, int]:
    """How long the sums are, by their indices; nothing where one is not short."""
    found: dict[Value, int] = {}
    for op in walk(body):
        if op.opcode != "reduce":
            continue
        if str(op.attrs["kind"]).startswith("arg"):
            return {}
        lengths = [forms[v].constant.constant if v in forms and not forms[v].factors else None for v in op.operands]
        if not lengths or any(n is None or n < 1 for n in lengths) or prod(n or 0 for n in lengths) > MOST_TERMS:
            return {}
        if len(lengths) == 1 and (lengths[0] or 0) > LONGEST:
            return {}
        found.update((arg, n) for arg, n in zip(op.regions[0].args, lengths, strict=True) if n is not None)
    return found


def _counted(block: Block, terms: Mapping[Value, int], times: int) -> list[tuple[Op, int]]:
    """Every access, with how often it is made for a result."""
    found: list[tuple[Op, int]] = []
    for op in block.ops:
        if op.opcode in ("load", "store"):
            found.append((op, times))
        more = prod(terms[arg] for arg in op.regions[0].args) if op.opcode == "reduce" else 1
        for region in op.regions:
            found += _counted(region, terms, times * more)
    return found


def _step(op: Op, forms: Forms, index: Value) -> int | None:
    """By how many elements an access moves with an index; None where only a call can say."""
    place: Affine = address(op, forms)
    return place.factor(index).constant if all(v in forms for v in op.operands[1:2]) else None


def _is_shared(op: Op, forms: Forms, body: Block, axis: int, rows: int) -> bool:
    """Whether an access of elements that lie apart is the same for all rows."""
    return _step(op, forms, body.args[rows]) == 0 and _step(op, forms, body.args[axis]) not in (0, 1)


def _cost(op: Op, forms: Forms, body: Block, axis: int, rows: int, extents: list[int], lanes: int) -> float:
    step = _step(op, forms, body.args[axis])
    if step in (0, 1):
        return 1 / lanes
    cost = 2.5 / lanes if op.opcode == "load" and step is not None and 0 < step <= FEW_STRIDES else 1.0
    if op.opcode == "load" and rows >= 0 and _is_shared(op, forms, body, axis, rows):
        return max(1 / lanes, cost / min(SHARED_ROWS, max(1, extents[rows])))
    return cost


def _along_sum(nest: Nest, counted: list[tuple[Op, int]], forms: Forms, lanes: int, terms: Mapping[Value, int]) -> float | None:
    """What vectors along the innermost index of the sums cost, where all that is read lies along it."""
    inner = [op.regions[0].args[-1] for op in nest.reductions]
    length = min(terms[arg] for arg in inner)
    if length < lanes:
        return None
    steps = {next((s for arg in inner if (s := _step(op, forms, arg)) != 0), 0) for op, _ in counted if op.opcode == "load"}
    if not steps <= {0, 1}:
        return None
    vectors = length // lanes + length % lanes
    return sum(count * vectors / length for op, count in counted if op.opcode == "load") + 2 * lanes.bit_length() + 4
