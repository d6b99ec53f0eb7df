"""Schedules of contractions for warp-level matrix instructions (`mma`, and those of AMD's waves) and plain multiply-adds (`fma`), on any GPU.

In: a contraction, its sizes and the target. Out: schedules, best first by a model that counts rounds of tiles: a
multiprocessor that has several blocks finishes them together, and the last round has as many blocks on each as are left. How many
blocks there is room for, and how fast they multiply, are the target's numbers from data sheets (`base/target.py`). Thin products
(a side of eight or fewer) are left to the reductions, which read each operand once.

Long sums are added up in levels (`sum_levels`), in stretches short enough that the results are no further off than those of libraries
that cut sums into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from tilewright.analysis import divisors
from tilewright.analysis.contraction import Contraction, Factor, plane
from tilewright.base.dtypes import DType, f32, f64
from tilewright.base.occupancy import occupancy
from tilewright.base.record import record
from tilewright.base.sizes import ONE
from tilewright.base.target import NVPTX, Target
from tilewright.ir.layouts import WaveInstruction, wave_instruction
from tilewright.ir.nodes import Kernel
from tilewright.ir.ops_matrix import MMA_SHAPES, accumulator_dtype
from tilewright.passes.schedules.matrix import Fma, MatrixSchedule, Mfma, Mma, WarpProduct, WaveProduct, Wmma3, Wmma4
from tilewright.passes.schedules.sum_levels import in_registers, stretches

THIN = 8
"""The longest side of a product that is left to the reductions."""
PART = 2048
"""Products that a part of a sum has at least."""
FEW, LONG, SHORT_PART, SIDE_BY_SIDE = 64, 512, 512, 4
"""The longest short side of a product whose time is that of reading the other factor, the shortest long one, products that a part of its sum has at least, and
blocks of one multiprocessor that it is cut for."""
DEEP = 16
"""A sum this many times as long as the sides of the results is long."""
MOST_PARTS = 256
"""Parts of a sum, at most: they are added up one by one."""
SHORT_WORD = 4
"""Bytes of a copy from which on it needs no register on its way."""
SHORTEST = 64
"""Products of a sum from which on parts of tf32 err no more than a chain of multiply-adds, unless a kernel asks for them."""
SHORT_TERMS = 1024
"""Products of a sum up to which that of the small parts counts as much as what is dropped."""
_SMALL = 1 << 12
"""Products below which nothing is gained by tiles."""


def mma_schedules(
    kernel: Kernel, found: Contraction, target: Target, batch: int, m: int, n: int, k: int
) -> tuple[WarpProduct, ...]:
    """Schedules, best first; none where ordinary loops serve the product as well."""
    if not target.has("tiles") or target.has("serial") or batch * m * n * k < _SMALL or found.accumulator.is_small_float:
        return ()
    if min(m, n) <= THIN and not _lies_across(kernel, found, target, m, n, k):
        return ()
    operand = found.a.dtype if found.a.dtype is found.b.dtype else found.accumulator
    precision = precision_of(kernel, operand, k)
    work = _work(kernel, found, batch, m, n, k)
    candidates: list[WarpProduct] = []
    wave = wave_instruction(target.features, operand, found.accumulator)
    if wave is not None:
        candidates += _wave(wave, operand)
    elif by_matrix(operand, found.accumulator, precision, target):
        in_vectors = all(reads_vectors(kernel, found, factor) for factor in (found.a, found.b))
        thin, few = _thin(operand, m, n), _few(work)
        if operand.itemsize == 2 and work.is_thin and not in_vectors:
            candidates.append(_thin_of_words(found, m, n))
        elif work.words:
            candidates += [s for s in _DEEP_OF_WORDS if s.m < m + 64 and s.n < n + 64]
        else:
            candidates += few or [s for s in _mma(operand, precision, in_vectors) if not thin or work.windows or s.m * s.n <= 32 * 32] + thin
    if not candidates or precision == "3xtf32":
        # Three products of tf32 are slower than one of f32 where matrix units are few.
        steps = (replace(s, k=min(s.k, _SHORT_STEP)) if target.has("rdna") else s for s in _fma(kernel, found))
        candidates += [_with_room(s, operand, found.accumulator, target) for s in steps]
    candidates = [in_levels(own, replace(work, k=-(-k // own.split_k)), target, k) for s in candidates for own in in_parts(s, found, work, target)]
    fitting = [s for s in candidates if shared_bytes(s, operand, found.accumulator) <= target.max_shared]
    return tuple(sorted(fitting, key=lambda s: cost(s, target, work, turned(found, s)) / (attained(s, kernel, found, work, target) or 1.0)))


def attained(schedule: WarpProduct, kernel: Kernel, found: Contraction, work: TileWork, target: Target) -> float | None:
    """The part of what the model says that products of f32 with images reach, whose places are several indices walked as one; None for all others."""
    axes = max(len(found.m), len(found.n))
    if axes == 1 or work.operand is not f32 or work.precision not in ("3xtf32", "ieee") or "wgmma" not in target.features:
        return None
    costs = target.costs.warps
    by_axes = costs.images if isinstance(schedule, Mma) else costs.images_fma
    in_vectors = all(reads_vectors(kernel, found, factor) for factor in (found.a, found.b))
    image, side = (found.a, found.m) if len(found.m) > 1 else (found.b, found.n)
    if not isinstance(schedule, Mma):
        # What lies along the sum is turned on its way.
        in_vectors = in_vectors and found.indices[side[-1]] in found.access(image)[-1].values
    reached = by_axes[0] if in_vectors else by_axes[min(axes, len(by_axes)) - 1]
    if isinstance(schedule, Mma) or schedule.inner < 0:
        return reached  # by warps' instructions, or terms that are brought by their number, whose neighbours lie anywhere
    return reached * costs.strided_fma[min(_stride_along(found, image, side), len(costs.strided_fma)) - 1]


def _stride_along(found: Contraction, factor: Factor, side: Sequence[int]) -> int:
    """How many elements of an image lie between those that neighbouring results read."""
    if factor.load is None:
        return 1
    return max(1, abs(found.access(factor)[-1].factor(found.indices[side[-1]]).constant or 1))


def _lies_across(kernel: Kernel, found: Contraction, target: Target, m: int, n: int, k: int) -> bool:
    """Whether the long factor of a product with very few rows runs across the sum: reductions would walk its columns one by one. Those of two-byte elements whose rows
    are words would have to be packed for warp groups."""
    factor = found.b if m <= n else found.a
    lies, tensor = plane(found, factor), factor.tensor
    if min(m, n) < 2 or not is_thin(m, n) or lies is None or tensor is None:
        return False
    if factor.dtype.itemsize == 2 and target.has("wgmma") and not reads_vectors(kernel, found, factor):
        words = all(divisors.of_size(stride, kernel.facts) % 2 == 0 for stride in tensor.strides[:-1]) and tensor.align >= 4
        return words and by_matrix(factor.dtype, found.accumulator, "ieee", target)
    if lies.row != tensor.rank - 1:
        return False
    return found.a.dtype is found.b.dtype is f32 and by_matrix(f32, found.accumulator, precision_of(kernel, f32, k), target)


def warp_time(listed: Sequence[MatrixSchedule], kernel: Kernel, found: Contraction, target: Target, batch: int, m: int, n: int, k: int) -> float:
    """Microseconds the first of these schedules is thought to take; infinity where there is none."""
    first = next((s for s in listed if isinstance(s, WarpProduct)), None)
    if first is None:
        return inf
    work = _work(kernel, found, batch, m, n, k)
    in_vectors = all(reads_vectors(kernel, found, factor) for factor in (found.a, found.b))
    reached = 1.0 if work.is_thin or work.words or _has_few(first) else target.costs.warps.reached if in_vectors else target.costs.warps.reached_loose
    return cost(first, target, work, turned(found, first)) / (attained(first, kernel, found, work, target) or reached)


def _work(kernel: Kernel, found: Contraction, batch: int, m: int, n: int, k: int) -> TileWork:
    """What a contraction of these sizes computes."""
    operand = found.a.dtype if found.a.dtype is found.b.dtype else found.accumulator
    plain = batch == 1 and len(found.k) == len(found.m) == len(found.n) == 1
    words = tuple(not reads_vectors(kernel, found, f) for f in (found.a, found.b))
    deep = plain and operand.itemsize == 2 and is_deep(m, n, k) and not is_thin(m, n)
    if not (deep and any(words) and all(in_words(kernel, f, SHORT_WORD) for f in (found.a, found.b))):
        words = ()
    along = all(runs_along(found, f) for f in (found.a, found.b))
    return TileWork(operand, found.accumulator, precision_of(kernel, operand, k), batch, m, n, k, len(found.k) > 1, along, words)


def in_words(kernel: Kernel, factor: Factor, word: int) -> bool:
    """Whether threads can bring a factor of two-byte elements in words of so many bytes: rows begin at such."""
    tensor = factor.tensor
    if tensor is None or tensor.dtype.itemsize != 2 or tensor.align < word or tensor.strides[-1] != ONE:
        return False
    return not any(divisors.of_size(x, kernel.facts) * tensor.dtype.itemsize % word for x in tensor.strides[:-1])


def precision_of(kernel: Kernel, operand: DType, k: int) -> str:
    """How factors may be multiplied where a sum has k products: as the kernel says, else f32 in parts of tf32 where sums are long enough."""
    said = kernel.attrs.get("precision")
    return str(said) if said is not None else "3xtf32" if operand is f32 and k >= SHORTEST else "ieee"


def in_parts(schedule: WarpProduct, found: Contraction, work: TileWork, target: Target) -> list[WarpProduct]:
    """The schedule, and where results are few and their sums very long the same with sums cut so that all multiprocessors take part."""
    tiles = work.batch * -(-work.m // schedule.m) * -(-work.n // schedule.n)
    if len(found.k) > 1:
        return [schedule]
    if _has_few(schedule):
        # So many that they fill the multiprocessors once, or twice: one block more would be a round of its own.
        places = target.multiprocessors * _together(schedule, work, target)
        most = min(MOST_PARTS, work.k // SHORT_PART)
        counts = {min(most, rounds * places // max(1, tiles)) for rounds in (1, 2)} | {1}
        return [replace(schedule, split_k=parts) for parts in sorted(counts) if parts > 0]
    if work.words:
        parts = min(MOST_PARTS, work.k // SHORT_PART, target.multiprocessors * _together(schedule, work, target) // max(1, tiles))
        return [replace(schedule, split_k=parts)] if parts > 1 else [schedule]
    if work.is_thin:
        # Reading the long side takes the time: as many bytes as possible are on their way.
        most = -(-SIDE_BY_SIDE * target.multiprocessors // max(1, tiles))
        if work.operand.itemsize == 2:
            # As many as run at once: those that come later would find memory idle.
            together = max(1, min(SIDE_BY_SIDE, target.shared_per_sm // shared_bytes(schedule, work.operand, work.total)))
            most = max(1, together * target.multiprocessors // max(1, tiles))
        parts = min(32, work.k // SHORT_PART, most)
        return [replace(schedule, split_k=parts)] if parts > 1 else [schedule]
    most = min(64, 2 * target.multiprocessors // max(1, tiles), work.k // PART)
    if 4 * tiles > target.multiprocessors or most < 4 or "pack" in (schedule.a_copy, schedule.b_copy):
        return [schedule]
    return [schedule, replace(schedule, split_k=most), replace(schedule, split_k=most // 2)]


@record
class TileWork:
    """What is to be computed."""

    operand: DType
    total: DType
    precision: str
    batch: int
    m: int
    n: int
    k: int
    windows: bool = False
    """Sums run over a window: what is read, each place comes several times and from a cache. Their time is that of multiplying, however few columns there are."""
    along: bool = False
    """Rows of both factors run along the sum."""
    words: tuple[bool, ...] = ()
    """Results are few, sums long, and threads bring elements of two bytes, which takes the time: of which factors in words, for their rows begin anywhere. Else nothing."""

    @property
    def is_thin(self) -> bool:
        """Whether reading one factor takes the time."""
        return not self.windows and is_thin(self.m, self.n)


def reads_vectors(kernel: Kernel, found: Contraction, factor: Factor) -> bool:
    """Whether a factor is a plain load whose neighbours in memory can be read 16 bytes at a time."""
    tensor = factor.tensor
    if tensor is None or tensor.align < 16 or tensor.strides[-1] != ONE:
        return False
    size = tensor.dtype.itemsize
    if any(divisors.of_size(stride, kernel.facts) * size % 16 for stride in tensor.strides[:-1]):
        return False
    last = found.access(factor)[-1]
    side = found.m if factor is found.a else found.n
    moving = [v for v in last.values if v in found.indices or v in found.k]
    if len(moving) != 1 or last.factor(moving[0]) != ONE:
        return False
    sides = (
        ([found.indices[p] for p in side], [found.extents[p] for p in side]),
        (list(found.k), list(found.reduce_extents)),
    )
    # Of several indices walked as one, neighbours are those along the innermost, as far as it goes.
    return any(
        moving == indices[-1:] and (len(indices) == 1 or divisors.of_size(extents[-1], kernel.facts) * size % 16 == 0)
        for indices, extents in sides
    )


def by_matrix(operand: DType, total: DType, precision: str, target: Target) -> bool:
    """Whether there is a matrix instruction that is faster than arithmetic."""
    if "bf16" not in target.features or operand.name not in MMA_SHAPES or accumulator_dtype(operand) is not total:
        return False
    if operand is f64:
        # Where there are few units for f64, matrix instructions have no more of them.
        return target.sm in (80, 90, 100)
    return operand is not f32 or precision != "ieee"


def shared_bytes(schedule: WarpProduct, operand: DType, total: DType) -> int:
    """Shared memory of the rings, with their padding, in whichever way the operands lie, and of sums that are kept there."""
    size = total.itemsize if isinstance(schedule, Fma) else operand.itemsize
    rows = max(
        (schedule.m + schedule.n) * (schedule.k * size + 16), schedule.k * ((schedule.m + schedule.n) * size + 64)
    )
    levels = len(stretches(schedule)) - in_registers(schedule, _words(schedule, total), _OTHERS)
    return schedule.stages * rows + levels * schedule.m * schedule.n * total.itemsize


# -- sums in levels -------------------------------------------------------------------------------------------------

_OTHERS = 80
"""Registers of a thread that hold no sums, about."""
_STRETCH, _STRETCHES = 32, 8
"""Terms added up at once, and, where registers have room for it, such sums in turn: nearly as good as adding in pairs."""
_LONG_STRETCH = 512
"""The same where sums fill the registers, and those of the level above lie in shared memory."""
_SHORT_STRETCH = 16
"""The same for matrix units, which drop bits when they add."""


def _words(schedule: WarpProduct, total: DType) -> int:
    """Registers of a thread's sums."""
    return schedule.m * schedule.n // schedule.threads * max(1, total.itemsize // 4)


def in_levels(schedule: WarpProduct, work: TileWork, target: Target, whole: int = 0) -> WarpProduct:
    """The schedule with its sum in levels, where that makes a difference: in f32 and f64. Sums of rounded products do not gain. `whole`: products of the
    sum of which this one is a part."""
    if not work.total.is_float or work.operand.itemsize < 4 or work.precision == "tf32":
        return schedule
    if isinstance(schedule, Mma) and work.operand is f32:
        # In short sums the product of the small parts counts as much as what is dropped. Where a thread has few sums, stretches are short: additions are
        # cheap there. Else the error goes with the stretch over the root of the length: this keeps it below that of a chain in f32.
        stretch, products = max(schedule.k, _SHORT_STRETCH), 4 if max(work.k, whole) < SHORT_TERMS else 3
        few = _words(schedule, work.total) <= 32 and not _has_few(schedule)
        while products == 3 and not few and stretch < 256 and stretch * stretch <= work.k:
            stretch *= 2
        upper = few and work.k > 2 * stretch * _STRETCHES
        return replace(schedule, chunk=stretch if work.k > stretch else 0, chunks=_STRETCHES if upper else 1, tf32_terms=products)
    if _words(schedule, work.total) > 64:
        # One chain, as libraries have it for large tiles, where shared memory would hold fewer blocks with the sums in it.
        kept = replace(schedule, chunk=_LONG_STRETCH)
        fits = 2 * (shared_bytes(kept, work.operand, work.total) + 1024) <= target.shared_per_sm
        return kept if fits and work.k > _LONG_STRETCH else schedule
    few = _words(schedule, work.total) <= 32
    tiles = work.batch * -(-work.m // schedule.m) * -(-work.n // schedule.n)
    if work.operand is f64 and not few and 2 * tiles > target.multiprocessors:
        return schedule  # a chain, as libraries have it where results are many: additions cost as much as matrix instructions
    stretch = max(schedule.k, _STRETCH if few or work.k < 512 else 2 * _STRETCH)
    if work.k <= stretch:
        return schedule
    return replace(schedule, chunk=stretch, chunks=_STRETCHES if few and work.k > 2 * stretch * _STRETCHES else 1)


# -- tiles ----------------------------------------------------------------------------------------------------------

_MMA = (
    Mma(128, 256, 32, stages=3, warps_m=2, warps_n=4, persistent=False),
    Mma(128, 128, 32, stages=4, warps_m=2, warps_n=2, persistent=False),
    Mma(128, 64, 32, stages=4, warps_m=2, warps_n=2, persistent=False),
    Mma(64, 128, 32, stages=4, warps_m=2, warps_n=2, persistent=False),
    Mma(64, 64, 32, stages=4, warps_m=2, warps_n=2, persistent=False),
    Mma(32, 32, 32, stages=4, warps_m=1, warps_n=2, persistent=False),
)
"""For elements of two bytes; `k` shrinks or grows with the element."""

_MMA_F64 = tuple(
    Mma(m, n, k, stages=stages, warps_m=down, warps_n=across, persistent=False)
    for m, n, k, stages, down, across in (
        (64, 64, 16, 4, 2, 2), (128, 128, 16, 3, 4, 2), (128, 64, 16, 3, 4, 2), (64, 128, 16, 3, 2, 4), (64, 96, 16, 4, 2, 2), (96, 64, 16, 4, 2, 2),
        (96, 96, 16, 3, 2, 2), (96, 128, 16, 3, 2, 4), (128, 96, 16, 3, 4, 2), (96, 192, 16, 3, 2, 4), (192, 96, 16, 3, 4, 2), (32, 32, 32, 3, 2, 2),
    )
)  # fmt: skip
"""Of tiles that are thought to take as long the first is taken. Those between the others leave fewer multiprocessors without work in the last round."""

_LOOSE = (
    Mma(128, 128, 16, stages=3, warps_m=2, warps_n=4, persistent=False),
    Mma(128, 64, 32, stages=3, warps_m=4, warps_n=2, persistent=False),
    Mma(64, 64, 32, stages=3, warps_m=4, warps_n=2, persistent=False),
    Mma(32, 32, 32, stages=3, warps_m=1, warps_n=2, persistent=False),
)
"""Where elements are brought one at a time: fewer for each thread."""

_LOOSE_NARROW = Mma(128, 128, 32, stages=4, warps_m=2, warps_n=4, persistent=False)
"""The same for elements of two bytes: more of them are on their way."""

_FMA = (
    Fma(128, 128, 8, stages=3, warps_m=2, warps_n=2, persistent=False),
    Fma(64, 64, 32, stages=2, warps_m=2, warps_n=2, persistent=False),
    Fma(32, 32, 32, stages=3, warps_m=2, warps_n=1, persistent=False),
    Fma(32, 64, 32, stages=2, warps_m=2, warps_n=2, persistent=False),
)
"""Long steps for small tiles: little else hides the time operands take to arrive."""
_FMA_IMAGES = (
    Fma(64, 128, 8, stages=3, warps_m=2, warps_n=2, persistent=False),
    Fma(32, 128, 16, stages=3, warps_m=1, warps_n=4, persistent=False),
    Fma(48, 128, 8, stages=3, warps_m=1, warps_n=4, persistent=False),
)
"""For images and few filters, with pixels along the longer side: a thread has many of them for each place of the window that it finds."""
_PATCH = (16, 32)
"""Results of f32 that the lanes of a warp share at once, down and across."""
_FMA_F64 = (
    Fma(64, 128, 8, stages=3, warps_m=4, warps_n=2, persistent=False),
    Fma(64, 64, 16, stages=2, warps_m=4, warps_n=2, persistent=False),
    Fma(32, 32, 16, stages=3, warps_m=2, warps_n=2, persistent=False),
)


def _mma(operand: DType, precision: str, in_vectors: bool) -> list[Mma]:
    if operand is f64:
        return list(_MMA_F64)
    tiles: tuple[Mma, ...] = _MMA if in_vectors else _LOOSE
    if operand is f32 and precision == "3xtf32":
        # Parts of both operands, and two levels of sums, are in registers: no room for the largest tile, and more warps for the next.
        tiles = tuple(replace(s, warps_n=4) if s.m * s.n == 128 * 128 else s for s in tiles if s.n <= 128)
    if operand.itemsize == 2 and not in_vectors:
        tiles = (_LOOSE_NARROW, *tiles)
    return [replace(s, k=2 * s.k // operand.itemsize) for s in tiles]


def is_thin(m: int, n: int) -> bool:
    """Whether a product has few rows, or few columns, and so many of the others that their factor takes the time."""
    return min(m, n) <= FEW and max(m, n) >= LONG


def _thin(operand: DType, m: int, n: int) -> list[Mma]:
    """Tiles for few rows, or few columns, and a long other side: warps lie along that side, so that its elements are taken apart once or twice."""
    few = min(m, n)
    if not is_thin(m, n) or operand is not f32 or 16 < few <= 32:
        return []
    found = Mma(16, 128, 16, stages=4, warps_m=1, warps_n=4, persistent=False) if few <= 16 else Mma(64, 128, 32, stages=3, warps_m=2, warps_n=4, persistent=False)
    return [found if m <= n else _turned_over(found)]


def is_deep(m: int, n: int, k: int) -> bool:
    """Whether results are few and their sums long: reading both factors takes a good part of the time, and only parts of sums fill a device."""
    return k > DEEP * max(m, n)


_FEW_RESULTS = tuple(
    Mma(m, n, k, stages=stages, warps_m=down, warps_n=across, persistent=False, levels_held=1)
    for m, n, k, stages, down, across in (
        (64, 128, 16, 4, 1, 4), (48, 128, 16, 4, 1, 4), (32, 128, 16, 4, 1, 4), (48, 192, 16, 3, 1, 4), (48, 96, 16, 4, 1, 2), (64, 64, 32, 3, 2, 2),
        (128, 128, 16, 3, 2, 4),
    )
)  # fmt: skip
"""For f32 in parts, where results are few: of a long side warps take stretches, so that its elements are taken apart once, and registers hold results of many
products of each part."""


def _has_few(schedule: WarpProduct) -> bool:
    """Whether it is one of these."""
    return isinstance(schedule, Mma) and schedule.levels_held >= 0


def _few(work: TileWork) -> list[Mma]:
    """Tiles for f32 with few rows, few columns, or few of both and long sums."""
    if work.operand is not f32 or work.precision != "3xtf32" or work.windows:
        return []
    if min(work.m, work.n) <= 16 if work.is_thin else not is_deep(work.m, work.n, work.k):
        return []
    both = [s for s in _FEW_RESULTS for s in ([s] if s.m == s.n else [s, _turned_over(s)])]
    return [s for s in both if s.m < work.m + 32 and s.n < work.n + 32]


def _turned_over(schedule: Mma) -> Mma:
    """The same for rows as columns."""
    return replace(schedule, m=schedule.n, n=schedule.m, warps_m=schedule.warps_n, warps_n=schedule.warps_m)


def _thin_of_words(found: Contraction, m: int, n: int) -> Mma:
    """The same for elements of two bytes whose rows begin anywhere: a thread brings a word or an element at a time, so that all that counts is how many are on
    their way, and that whole lines of memory are."""
    few = next(w for w in (16, 32, FEW) if w >= min(m, n))
    if runs_along(found, found.b if m <= n else found.a):
        tile = Mma(few, 64, 64, stages=4, warps_m=1, warps_n=4, persistent=False)
    else:
        tile = Mma(few, 256, 32, stages=4, warps_m=1, warps_n=8, persistent=False)
    return tile if m <= n else _turned_over(tile)


_DEEP_OF_WORDS = tuple(
    Mma(m, n, 64, stages=3, warps_m=down, warps_n=across, persistent=False)
    for m, n, down, across in ((128, 128, 2, 4), (128, 96, 4, 2), (96, 128, 2, 4), (128, 64, 4, 2), (64, 128, 2, 4), (64, 64, 4, 2), (128, 32, 8, 1), (32, 128, 1, 8))
)
"""For few results and long sums of elements of two bytes whose rows begin at words: two blocks of many warps, which ask for much at a time."""

_WAVE = (
    (128, 128, 32, 2, 2), (64, 128, 32, 2, 2), (64, 64, 32, 2, 2), (32, 64, 32, 1, 2), (32, 32, 32, 1, 1),
)  # fmt: skip
"""Tiles for instructions of AMD's waves: m, n, k of elements of two bytes, and waves along m and n."""


_SHORT_STEP = 8
"""The fewest terms of one step of plain multiply-adds. RDNA has no longer steps: LLVM moves the loads of a whole step to its start, and there are
256 registers."""


def _wave(found: WaveInstruction, operand: DType) -> list[WaveProduct]:
    kind = _FAMILIES[found.family]
    return [kind(m, n, 2 * k // operand.itemsize, stages=2, warps_m=down, warps_n=across, persistent=False) for m, n, k, down, across in _WAVE]


_FAMILIES: dict[str, type[WaveProduct]] = {kind.family: kind for kind in (Mfma, Wmma3, Wmma4)}


def _fma(kernel: Kernel, found: Contraction) -> list[Fma]:
    """Threads read rows that run across the sum; others are turned on their way, or by packing them first."""
    tiles: list[Fma] = list(_FMA_F64 if found.accumulator.itemsize == 8 else _FMA)
    if max(len(found.m), len(found.n)) > 1 and found.accumulator.itemsize < 8:
        images = [s if len(found.n) > 1 else replace(s, m=s.n, n=s.m, warps_m=s.warps_n, warps_n=s.warps_m) for s in _FMA_IMAGES]
        tiles += [s for s in images if s.m % (_PATCH[0] * s.warps_m) == s.n % (_PATCH[1] * s.warps_n) == 0]
    plain = len(found.k) == len(found.m) == len(found.n) == 1 and found.a.dtype is found.b.dtype is f32
    first, second = (plain and runs_along(found, f) and reads_vectors(kernel, found, f) for f in (found.a, found.b))
    if first or second:
        tiles.append(replace(tiles[0], a_copy="pack" if first else "tma", b_copy="pack" if second else "tma"))
    return tiles


def _with_room(schedule: Fma, operand: DType, total: DType, target: Target) -> Fma:
    """The tile with steps so short that its rings have room in shared memory: portable GPUs promise 16 KB."""
    while schedule.k > _SHORT_STEP and shared_bytes(schedule, operand, total) > target.max_shared:
        schedule = replace(schedule, k=schedule.k // 2)
    return schedule


def runs_along(found: Contraction, factor: Factor) -> bool:
    """Whether a factor's rows in memory run along the sum."""
    lies = plane(found, factor)
    return lies is not None and factor.tensor is not None and lies.k == factor.tensor.rank - 1


def turned(found: Contraction, schedule: WarpProduct) -> int:
    """How many factors' elements are turned on their way to shared memory."""
    if not isinstance(schedule, Fma):
        return 0
    ways = ((found.a, schedule.a_copy), (found.b, schedule.b_copy))
    return sum(1 for factor, way in ways if way != "pack" and runs_along(found, factor))


# -- the model ------------------------------------------------------------------------------------------------------

def rate(schedule: WarpProduct, work: TileWork, target: Target) -> float:
    """Multiply-adds of one multiprocessor in a microsecond, as its maker says."""
    name = work.operand.name if isinstance(schedule, Mma | WaveProduct) else work.total.name
    if isinstance(schedule, Mma) and work.operand is f32:
        name = "tf32"
    elif isinstance(schedule, Mma) and work.operand is f64 and target.peak("f64.matrix"):
        name = "f64.matrix"
    times = schedule.tf32_terms if isinstance(schedule, Mma) and work.operand is f32 and work.precision == "3xtf32" else 1
    known = NVPTX.get(target.name, target)
    return target.peak(name) * 1e6 / (2 * known.multiprocessors) / times or target.costs.warps.rate / times


def _together(schedule: WarpProduct, work: TileWork, target: Target) -> int:
    """Blocks side by side on one multiprocessor."""
    words = _words(schedule, work.total)
    levels = schedule.levels_held if isinstance(schedule, Mma) and _has_few(schedule) else in_registers(schedule, words, _OTHERS)
    registers = min(target.max_registers, words * (1 + levels) + _OTHERS)
    room = occupancy(target, schedule.threads, registers, shared_bytes(schedule, work.operand, work.total))
    return max(1, room.blocks if room is not None else 1)


def cost(schedule: WarpProduct, target: Target, work: TileWork, turning: int = 0) -> float:
    """Estimated microseconds, where so many factors are turned on their way."""
    costs = target.costs.warps
    tiles = work.batch * -(-work.m // schedule.m) * -(-work.n // schedule.n) * schedule.split_k
    area, size, k = schedule.m * schedule.n, work.operand.itemsize, -(-work.k // schedule.split_k)
    together = _together(schedule, work, target)
    # Small tiles read their operands more often.
    most = 1 / (1 + 24 * (1 / schedule.m + 1 / schedule.n))
    known = costs.f64_rates.get((schedule.m, schedule.n)) if work.operand is f64 and isinstance(schedule, Mma) and "wgmma" in target.features else None
    if work.operand is f64 and isinstance(schedule, Mma):
        # Instructions of f64 take as long as a warp reads 32x32 results' operands from shared memory; no tile gains beyond.
        most = 1 / max(1.0, 0.5 + 8 * (schedule.warps_m / schedule.m + schedule.warps_n / schedule.n))
    if known is not None:
        most = known[int(work.along)]
    reached = rate(schedule, work, target) / (1 + costs.transposing[turning])
    feed = costs.feed * target.bandwidth * 1e6 / target.multiprocessors

    def one_round(blocks: int) -> float:
        """The time of so many blocks side by side on one multiprocessor."""
        warps = blocks * schedule.threads / target.warp_size
        if work.words:
            brought = sum(side / (costs.words if apart else costs.vectors) for side, apart in zip((schedule.m, schedule.n), work.words, strict=True))
            return blocks * brought * (k + 128) * size / min(1.0, warps / (2 * costs.busy_warps))
        if _has_few(schedule):
            # Each warp takes apart what it multiplies, besides what all bring.
            taken = schedule.m * schedule.warps_n + schedule.n * schedule.warps_m
            each = area / reached + taken * costs.taken_apart + (schedule.m + schedule.n) * costs.brought
            return blocks * (k + 128) * each / min(1.0, warps / costs.busy_warps)
        busy = min(most, warps / costs.busy_warps)
        if known is not None and tiles > together * target.multiprocessors:
            busy = most  # blocks of the last round begin before those of the one before have ended
        computed = blocks * area * (k + 64) / (reached * busy)
        fed = blocks * (schedule.m + schedule.n) * k * size / feed if feed else 0.0
        return max(computed, fed)

    rounds, left = divmod(tiles, target.multiprocessors * together)
    total = rounds * one_round(together) + (one_round(-(-left // target.multiprocessors)) if left else 0.0)
    if target.bandwidth and (work.is_thin or work.words or _has_few(schedule)):
        # Memory takes the time; what arrives goes with what is on its way at once. Reading hides computing only so far.
        side_by_side = min(together, -(-tiles // target.multiprocessors))
        waiting = min(tiles, target.multiprocessors) * side_by_side * (schedule.stages - 1) * (schedule.m + schedule.n) * schedule.k * size
        read = work.batch * work.k * (work.m + work.n) * size
        reading = read / min(waiting / costs.latency, costs.streamed * target.bandwidth * 1e6)
        total = max(total, reading) + (0.0 if _has_few(schedule) else 0.25 * min(total, reading))
    if schedule.split_k > 1:
        # Parts of the results are written and read again.
        total += target.costs.launch.second + 3 * work.total.itemsize * schedule.split_k * work.batch * work.m * work.n / ((target.bandwidth or 0.1) * 1e6)
    for way, across in ((schedule.a_copy, work.m), (schedule.b_copy, work.n)):
        if way == "pack":
            # Rates are those of one chip of several; bytes that nobody knows the rate of are too many to pack.
            total += target.costs.launch.second + 2 * work.batch * across * work.k * size / (costs.packing * (target.bandwidth or 0.1) * 1e6)
    return total

