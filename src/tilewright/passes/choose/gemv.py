"""Choose how products with few rows are computed on a GPU: lanes along the rows of the long factor, which is read once.

In: a loop-stage kernel, the target and the sizes of the call. Out: schedules of family `gemv`, best first by a model of memory traffic: how
many bytes the warps of a multiprocessor have on their way, how evenly rows fall on multiprocessors, and how often a warp waits for memory.
`product_schedules` (`products.py`) puts them beside those of matrix instructions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log2

from tilewright.analysis import divisors
from tilewright.base.dtypes import bf16, by_name, f16
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, Op, walk
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.choose.row_dots import RowDots, find_row_dots
from tilewright.passes.packed.matrix_units import matrix_format
from tilewright.passes.packed.stage_units import can_stage
from tilewright.passes.packed.units import FINE_UNITS, UNITS, packed_terms
from tilewright.passes.program.split_reductions import would_split
from tilewright.passes.schedules.gemv import Gemv

FEW_FOR_FMA = 4
"""Rows of x up to which plain arithmetic keeps up with memory; beyond them matrix instructions come first, where there are any."""
WIDE_UNIT = 32
"""Elements of a unit from which on the lanes of a warp read too far apart."""
REGISTERS = 65536
"""Of a multiprocessor."""
MATRIX_THREADS = 512
"""Threads of a multiprocessor that keep memory busy with packed rows, by matrix instructions."""
SHORT_WORK = 1 << 15
"""Elements of packed rows for each multiprocessor, up to which lanes have few of them."""
UNIT_INSTRUCTIONS = 70
"""Of a lane for 8 elements, with what it takes to make their scales."""
MANY_ROWS, SEVERAL = 12, 1
"""Rows for each multiprocessor beyond which a warp has several of each weight, where products are side by side, and how many."""
WARPS_TO_FILL = 2.5
"""Warps of a scheduler, below which it waits for results."""
MEETING = 150
"""Cycles that warps which share a row take to meet."""
THIN_MMA = "thin_mma"
"""A feature of targets for which products of a few rows go by matrix instructions of a warp: those of persistent kernels, which have no others."""
THIN_WARPS, THIN_MOST = 12, 8
"""Warps of a multiprocessor that work on such a product at once, and those that share a row at most."""
SHORTEST = 64
"""Terms of a sum below which a warp for each row has too little to do."""


def gemv_schedules(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> tuple[Gemv, ...]:
    """Schedules for a product with few rows; none for any other kernel, or where loops serve it as well."""
    if not target.simt or target.warp_size != 32:
        return ()
    found = find_row_dots(kernel, sizes)
    if found is None:
        return ()
    work = work_of(found, sizes, target)
    if work.length < SHORTEST or would_split(kernel, target, sizes):
        return ()
    vector, early = 1 if found.formats else _vector(kernel, found), "early" in target.features
    by_matrix = _matrix_schedules(found, work, target) if found.formats and target.has("mma", "bf16") else _thin_schedules(kernel, found, work, target)
    if short := _short_schedules(kernel, found, work, target):
        return (*short, *by_matrix)
    if any(name not in UNITS for name in found.formats):
        return by_matrix
    listed = [
        Gemv(work.m, rows * warps_n, 32 * warps_k * vector * vectors * found.unit, vector, warps_n, warps_k, found.m, found.n, found.unit, pdl=early)
        for rows in (1, 2, 4)
        for warps_k in (1, 2, 4, 8)
        for warps_n in (1, 2, 4, 8)
        for vectors in range(1, 9)
        if warps_n * warps_k <= 8
    ]
    fitting = [s for s in listed if s.has_room(target) and s.n <= max(1, work.n)]
    # Rows of few blocks leave lanes without work, and still that is better than to unpack elements one by one.
    fitting = [s for s in fitting if s.k < 2 * work.length or (s.unit > 1 and s.vectors == s.warps_k == 1)]
    fitting = [replace(s, resident=_resident(s, work, target)) for s in fitting]
    ranked = sorted((s for s in fitting if s.resident), key=lambda s: (not _is_usual(s), gemv_cost(s, work, target)))
    # Nobody has measured what laying out x first gains: the tuner may.
    staged = [replace(s, stage_x=True) for s in ranked[:1] if found.unit >= WIDE_UNIT and can_stage(kernel)]
    plain = (*_many_rows(found, work, target), *ranked[:1], *staged, *ranked[1:])
    # One row of f32 is three of bf16, which takes longer to make than plain arithmetic takes.
    return (*by_matrix, *plain) if work.m > 1 or _is_narrow(kernel) else (*plain, *by_matrix)


def _thin_schedules(kernel: Kernel, found: RowDots, work: GemvWork, target: Target) -> tuple[Gemv, ...]:
    """A few rows of x and rows of w, both bf16 or f16, by matrix instructions, for targets that ask for it. As many warps share a row as all find room at once, two at least: then no
    multiprocessor waits for a second round. Else few of them, where that leaves work for all multiprocessors. Steps that end where rows do are better."""
    if not target.has(THIN_MMA, "mma", "bf16") or not _has_narrow_factors(found) or found.m < 0 or not FEW_FOR_FMA < work.m <= 8 or _vector(kernel, found) != 8 or work.n < 16:
        return ()
    listed: list[tuple[tuple[float, ...], Gemv]] = []
    large = replace(target, max_threads=max(target.max_threads, THIN_MOST * target.warp_size))
    at_once = _power_below(min(THIN_MOST, THIN_WARPS * target.multiprocessors // (work.others * -(-work.n // 16))))
    for warps_n, warps_k in dict.fromkeys((*([(1, at_once)] if at_once > 1 else []), (4, 1), (2, 2), (1, 4))):
        tasks = work.others * -(-work.n // (16 * warps_n))
        for vectors in range(2, 9):
            way = Gemv(work.m, 16 * warps_n, 32 * warps_k * vectors, 8, warps_n, warps_k, found.m, found.n, matrix=True, lanes_n=8, resident=3)
            if not way.has_room(large) or way.k >= 2 * work.length:
                continue
            ragged = -(-work.length // way.k) * way.k / work.length
            fits = at_once > 1 and (warps_n, warps_k) == (1, at_once)  # else there are more rounds than one
            listed.append(((not fits, max(0.0, 2 * target.multiprocessors / tasks - 1), warps_k, round(ragged, 2), abs(vectors - (6.2 if warps_k >= 4 else 4.2))), way))
    return tuple(way for _, way in sorted(listed, key=lambda pair: pair[0]))


def _power_below(number: int) -> int:
    """The largest power of two up to a number; 0 where there is none."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def _has_narrow_factors(found: RowDots) -> bool:
    """Whether sums with rows of w are of products of two numbers that both were bf16, or f16."""
    weights = {load.result for load in found.weights}
    for reduction in found.reductions:
        ops = [op for region in reduction.regions for op in walk(region)]
        if not any(op.result in weights for op in ops if op.opcode == "load"):
            continue
        made = {result: op for op in ops for result in op.results}
        product = made.get(reduction.regions[0].yields[0])
        if product is None or product.opcode != "mul":
            return False
        narrow = [dtype_of(source.operands[0].type) for v in product.operands if (source := made.get(v)) is not None and source.opcode == "cast"]
        if len(narrow) != 2 or narrow[0] not in (bf16, f16) or narrow[0] is not narrow[1]:
            return False
    return bool(weights)


def _short_schedules(kernel: Kernel, found: RowDots, work: GemvWork, target: Target) -> tuple[Gemv, ...]:
    """One row of f32 times packed rows of which a lane has few elements: time is that of a lane's own instructions. All of a row is on its way at once; four warps share rows that are long
    and few."""
    if not found.formats or work.m > 1 or work.others * work.n * work.length * len(found.formats) > SHORT_WORK * target.multiprocessors or _is_narrow(kernel):
        return ()
    units = {(FINE_UNITS.get(name) or UNITS.get(name)) for name in found.formats}
    sizes = {way.elements if way is not None else 0 for way in units}
    if len(sizes) != 1 or 0 in sizes:
        return ()
    (unit,) = sizes
    listed: list[tuple[float, Gemv]] = []
    many = work.others * work.n > MANY_ROWS * target.multiprocessors and len(found.formats) > 1
    for warps_k in (1, 2, 4):
        rows = SEVERAL if many and warps_k == 1 else 1
        vectors = -(-work.length // (32 * warps_k * unit))
        way = Gemv(1, rows * 4 // warps_k, 32 * warps_k * unit * vectors, 1, 4 // warps_k, warps_k, found.m, found.n, unit, pdl="early" in target.features)
        if vectors > 4 or not way.has_room(target):
            continue
        filled = work.others * work.n * warps_k / (4 * target.multiprocessors)
        time = UNIT_INSTRUCTIONS * unit / 8 * vectors * len(found.formats) * max(filled, WARPS_TO_FILL) + MEETING * (warps_k > 1)
        listed.append((time, replace(way, resident=max(1, min(8, _resident(way, work, target))))))
    # Lanes that have nothing to read of a last step are not worth the warps that share a row.
    full = [pair for pair in listed if pair[1].k * 4 <= work.length * 5] or listed[:1]
    return tuple(way for _, way in sorted(full, key=lambda pair: pair[0]))


def _many_rows(found: RowDots, work: GemvWork, target: Target) -> tuple[Gemv, ...]:
    """Very many short rows, as the words of a vocabulary are: half a warp has a row, of which it leaves no lane without work, and rows come through shared memory."""
    fits = found.unit == 8 and work.m == 1 and work.length < 1024 and work.length % 128 == 0 and work.others * work.n >= 128 * target.multiprocessors
    if not fits or len(found.formats) != 1 or not target.has("cp.async"):
        return ()
    way = Gemv(1, 64, 128, 1, 4, 1, found.m, found.n, 8, lanes_n=2, stages=3, resident=4, pdl="early" in target.features)
    return (way,) if way.has_room(target) else ()


def _is_narrow(kernel: Kernel) -> bool:
    """Whether packed rows are multiplied with bf16 or f16."""
    for term in packed_terms(kernel):
        source = next((op for op in term.reduction.regions[0].ops if term.other in op.results), None)
        if source is None or source.opcode != "cast" or dtype_of(source.operands[0].type) not in (bf16, f16):
            return False
    return True


def _matrix_schedules(found: RowDots, work: GemvWork, target: Target) -> tuple[Gemv, ...]:
    """Packed rows by matrix instructions, which take two rows of a lane at once. The fewest warps share a row that fill the device; what is left of a
    last step is idle lanes."""
    formats = [matrix_format(name) for name in found.formats]
    lanes = {way.lanes for way in formats if way is not None}
    if None in formats or len(lanes) != 1:
        return ()
    (lanes_n,), early = lanes, "early" in target.features
    listed = [
        Gemv(
            work.m, rows * warps_n * lanes_n, 32 // lanes_n * warps_k * vectors * found.unit, 1, warps_n, warps_k, found.m, found.n, found.unit,
            matrix=True, lanes_n=lanes_n, pdl=early,
        )
        for rows in (2, 4) for warps_k in (1, 2, 4, 8) for warps_n in (1, 2, 4) for vectors in (1, 2, 4) if 4 <= warps_n * warps_k <= 8
    ]  # fmt: skip
    fitting = [s for s in listed if s.has_room(target) and (s.k < 2 * work.length or s.vectors == s.warps_k == 1)]
    fitting = [replace(s, resident=_matrix_resident(s, target)) for s in fitting]
    ranked = sorted(fitting, key=lambda s: matrix_cost(s, work, target))
    measured = _measured(replace(ranked[0], fetch=0), work, target) if ranked else None
    return (*((measured,) if measured is not None else ()), *(s for s in ranked if s != measured))


def _measured(like: Gemv, work: GemvWork, target: Target) -> Gemv | None:
    """What measured best on an H200 for rows of this kind and number; None where that does not fit."""
    way = _apart(work, target) if like.lanes_n == 8 else _together(like.unit, work, target)
    lanes_n, rows, warps_n, warps_k, vectors, stages, resident = way
    step = 32 // lanes_n * warps_k * vectors * like.unit
    found = replace(like, n=rows * warps_n * lanes_n, k=step, warps_n=warps_n, warps_k=warps_k, lanes_n=lanes_n, stages=stages)
    fits = found.has_room(target) and step < 2 * work.length and (stages == 1 or target.has("cp.async"))
    return replace(found, resident=resident) if fits else None


def _apart(work: GemvWork, target: Target) -> tuple[int, ...]:
    """Lanes with scales of their own: a warp has 32 rows where that leaves enough blocks, and 8 warps share rows that are long enough."""
    blocks = work.length // 256
    warps_k = 8 if blocks >= 8 else 4 if blocks >= 4 else 2 if blocks >= 2 else 1
    if work.weight_bytes > 0.6 and work.m == 1 and blocks >= 16:
        return 8, 2, 1, 4, 1, 4, 4  # q5_k: the fifth bits take registers; rows come through shared memory
    many = work.others * work.n // 32 * warps_k >= 15 * target.multiprocessors
    if work.m > 1:
        warps_k = min(warps_k, 4)
        return 8, 4 if many and work.m <= 4 else 2, 1, warps_k, 1, 1, (3 if work.m == 2 else 2) * 4 // warps_k
    return 8, 4 if many else 2, 1, warps_k, 1, 1, 16 // warps_k


def _together(unit: int, work: GemvWork, target: Target) -> tuple[int, ...]:
    """Lanes that share scales by fours."""
    rows = work.others * work.n
    if work.length < 1024 and work.length % 128 == 0 and unit == 8 and rows >= 128 * target.multiprocessors:
        return 2, 4, 4, 1, 1, 3, 6
    large = rows >= 48 * target.multiprocessors and work.length >= 4096
    if large and work.m > 1:
        return 1, 2, 4, 1, 2 if work.m <= 4 else 1, 3, 4 if unit == 8 else 3
    if large:
        if unit == 16:
            return 1, 2, 4, 1, 4, 2, 4
        if work.weight_bytes > 1:
            return 1, 4, 4, 1, 4, 3, 4
        return (1, 4, 4, 1, 2, 4, 4) if work.weight_bytes > 0.6 else (1, 2, 1, 4, 4, 1, 4)
    share = 32 * unit if unit == 16 else 64 * unit
    vectors = max((v for v in ((4, 3, 2, 1) if work.m == 1 else (2, 1) if work.m <= 4 else (1,)) if share * v <= work.length), key=lambda v: (work.length % (share * v) == 0, v), default=1)
    return (1, 2, 4, 1, vectors, 1, 4) if unit == 16 else (1, 2, 2, 2, vectors, 1, 5)


def _matrix_resident(schedule: Gemv, target: Target) -> int:
    """Blocks with room for the registers of the loads in flight, of x and of what is computed."""
    per_row = {64: 12, 16: 14}.get(schedule.unit, 5)
    words = schedule.vectors * (schedule.rows * per_row + schedule.unit // 2 * min(schedule.m, 2))
    registers = min(255, 40 + words + 4 * schedule.rows * schedule.m)
    return max(1, min(target.blocks_per_sm, target.threads_per_sm // schedule.threads, REGISTERS // (registers * schedule.threads)))


def matrix_cost(schedule: Gemv, work: GemvWork, target: Target) -> tuple[float, ...]:
    """Estimated microseconds, and what decides between equals: few warps that share a row, and four warps in a block."""
    costs = target.costs.gemv
    blocks = work.others * -(-work.m // schedule.m) * -(-work.n // schedule.n)
    filled = min(1.0, min(schedule.resident, blocks / target.multiprocessors) * schedule.threads / MATRIX_THREADS)
    uneven = -(-blocks // target.multiprocessors) / (blocks / target.multiprocessors) if blocks > target.multiprocessors else 1.0
    steps = -(-work.length // schedule.k)
    padded = steps * schedule.k / work.length
    total = work.others * work.n * work.length * work.weight_bytes
    reading = total / costs.stream * uneven / filled * (0.75 + 0.25 * padded)
    return (
        round(reading + 0.3 * (schedule.warps_k > 1) + 0.15 * (schedule.warps_k > 4) + 0.05 * steps, 2),
        abs(log2(schedule.vectors * schedule.unit / WIDE_UNIT)), abs(log2(schedule.warps_n * schedule.warps_k / 4)), schedule.rows,
    )  # fmt: skip


def _is_usual(schedule: Gemv) -> bool:
    """Whether blocks and lanes have as much of packed rows as measured best: four warps; 32 elements of two rows for a lane, or a wide unit of four."""
    if schedule.unit == 1:
        return True
    rows = 4 if schedule.unit > WIDE_UNIT else 2
    return (schedule.warps_n, schedule.warps_k, schedule.rows, schedule.vectors * schedule.unit) == (4, 1, rows, max(WIDE_UNIT, schedule.unit))


def _number(size: Size, hints: Mapping[str, int]) -> int:
    return size.evaluate(hints) if size.names <= hints.keys() else 1 << 14


def _vector(kernel: Kernel, found: RowDots) -> int:
    """Elements of the rows of w that lanes can read at once: whole 16 bytes where all rows begin at such."""
    widths: list[int] = []
    for load in found.weights:
        memory = load.operands[0].type
        assert isinstance(memory, Tensor)
        size = memory.dtype.itemsize
        width = max(1, 16 // size)
        while width > 1 and ((memory.align or size) % (width * size) or any(divisors.of_size(x, kernel.facts) % width for x in memory.strides[:-1])):
            width //= 2
        widths.append(width)
    return max(1, min(widths))


@record
class GemvWork:
    """What is to be computed: `m` rows of x, `n` rows of w, sums of `length` terms; bytes of an element of all w, and of all x; instructions that make
    a number of an element."""

    m: int
    n: int
    others: int
    length: int
    weight_bytes: float
    shared_bytes: int
    widen: float


def work_of(found: RowDots, sizes: Mapping[str, int], target: Target) -> GemvWork:
    m = _number(found.extents[found.m], sizes) if found.m >= 0 else 1
    n = _number(found.extents[found.n], sizes)
    others = 1
    for p, extent in enumerate(found.extents):
        others *= _number(extent, sizes) if p not in (found.m, found.n) else 1
    costs = target.costs.gemv
    widths = sum(by_name(name).block_bytes / by_name(name).block for name in found.formats) if found.formats else _bytes(found.weights)
    return GemvWork(m, n, others, _number(found.length, sizes), widths, _bytes(found.shared), costs.unpack if found.formats else costs.widen)


def _bytes(loads: Sequence[Op]) -> int:
    return sum(dtype_of(op.result.type).itemsize for op in loads)


def _resident(schedule: Gemv, work: GemvWork, target: Target) -> int:
    """Blocks that a multiprocessor has room for. A load in flight has its registers; sums and what is computed next have theirs."""
    words = schedule.vectors * schedule.vector * schedule.unit * (schedule.rows * work.weight_bytes + schedule.m * work.shared_bytes) / 4
    registers = target.costs.gemv.registers + words + schedule.m * schedule.rows
    if schedule.unit > 1:
        registers += 36 + 7 * schedule.rows  # sums are held apart by where numbers lie in words
    return min(target.blocks_per_sm, target.threads_per_sm // schedule.threads, int(REGISTERS / registers) // schedule.threads)


def gemv_cost(schedule: Gemv, work: GemvWork, target: Target) -> float:
    """Estimated microseconds."""
    costs, row = target.costs.gemv, work.length * work.weight_bytes
    blocks = work.others * -(-work.m // schedule.m) * -(-work.n // schedule.n)
    resident = schedule.resident
    share = -(-blocks // target.multiprocessors)
    in_flight = min(resident, share) * schedule.threads * schedule.rows * schedule.vectors * schedule.vector * schedule.unit * work.weight_bytes
    arriving = min(costs.arrive, costs.busy * in_flight / costs.latency)
    total = work.others * work.n * row
    reading = max(total / costs.stream, share * schedule.n * row / arriving)
    steps = -(-work.length // schedule.k)
    terms = work.others * work.n * schedule.k * steps
    beside = costs.far if schedule.unit >= WIDE_UNIT and not schedule.stage_x else 1.0
    each = work.widen + beside * costs.widen * work.m / schedule.rows + work.m
    computing = terms * each / (target.multiprocessors * costs.rate)
    meeting = costs.meeting * (schedule.warps_k > 1) * (1 + share / resident)
    rounds = -(-share // resident)
    # A last step that is not full goes through predicates, with lanes that have nothing to read.
    reading *= 1 + costs.ragged * (steps * schedule.k - work.length) / (steps * schedule.k) + costs.ragged * (work.length % schedule.k > 0) / steps
    # Measured: four warps in a block, and lanes with about a hundred bytes on their way, of one row or three vectors of two.
    lane = schedule.rows * schedule.vectors * schedule.vector * schedule.unit * work.weight_bytes
    warps = schedule.warps_n * schedule.warps_k
    if schedule.unit > 1:
        lane = costs.lane
    many = schedule.unit == 1 and (schedule.rows > 2 or (schedule.rows > 1 and schedule.vectors > 3))
    reading *= 1 + costs.uneven * (abs(log2(lane / costs.lane)) + abs(log2(warps / 4)) + 3 * many)
    return costs.latency + max(reading, computing) + 0.2 * min(reading, computing) + meeting + costs.step * min(steps - 1 + 0.25 * rounds, 5)
