"""Choose how products with few rows are computed on a GPU: lanes along the rows of the long factor, which is read once.

In: a loop-stage kernel, the target and the sizes of the call. Out: schedules of family `gemv`, best first by a model of memory traffic: how
many bytes the warps of a multiprocessor have on their way, how evenly rows fall on multiprocessors, and how often a warp waits for memory.
`product_schedules` puts them beside those of matrix instructions.
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
from tilewright.ir.nodes import Kernel, Op
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.choose.matrix import matrix_schedules
from tilewright.passes.choose.row_dots import RowDots, find_row_dots
from tilewright.passes.packed.matrix_units import matrix_format
from tilewright.passes.packed.stage_units import can_stage
from tilewright.passes.packed.units import UNITS, packed_terms
from tilewright.passes.program.split_reductions import would_split
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.matrix import GpuProduct, MatrixSchedule

FEW_FOR_FMA = 4
"""Rows of x up to which plain arithmetic keeps up with memory; beyond them matrix instructions come first, where there are any."""
WIDE_UNIT = 32
"""Elements of a unit from which on the lanes of a warp read too far apart."""
REGISTERS = 65536
"""Of a multiprocessor."""
MATRIX_THREADS = 512
"""Threads of a multiprocessor that keep memory busy with packed rows, by matrix instructions."""
SHORTEST = 64
"""Terms of a sum below which a warp for each row has too little to do."""


def product_schedules(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """Schedules for the products a kernel computes, best first; none where it computes none."""
    matrix = matrix_schedules(kernel, target, sizes)
    rows = gemv_schedules(kernel, target, sizes)
    unpacked = any(isinstance(s, GpuProduct) and (s.unpack or s.b_copy == "packed") for s in matrix)
    if rows and (not matrix or unpacked or rows[0].m <= FEW_FOR_FMA or rows[0].matrix):
        return (*rows, *matrix)
    return (*matrix, *rows)


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
    by_matrix = _matrix_schedules(found, work, target) if found.formats and target.has("mma", "bf16") else ()
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
    plain = (*ranked[:1], *staged, *ranked[1:])
    # One row of f32 is three of bf16, which takes longer to make than plain arithmetic takes.
    return (*by_matrix, *plain) if work.m > 1 or _is_narrow(kernel) else (*plain, *by_matrix)


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
