"""Choose how a chain of reductions around two products is computed on a GPU: rows of a block, keys of a step, and who starts
when.

In: a loop-stage kernel, the target and the sizes of the call. Out: schedules, best first: for Hopper `family=attention`, then,
as for every GPU whose warps multiply matrices and copy asynchronously, `family=attention_mma`. None where the kernel is no such
chain, or where operands are not what the copies and the matrix units take: two-byte floats, rows that begin at whole 16 bytes,
up to 256 terms and columns, both known when the code is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tilewright.analysis import divisors
from tilewright.analysis.online import Online, find_online
from tilewright.base.dtypes import bf16, f16
from tilewright.base.errors import UserError
from tilewright.base.sizes import ONE, Size
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, Op, walk
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.choose_attention_cpu import cpu_attention_schedules, forced_on_cpu
from tilewright.passes.lower_mma_chain import bands, blocks_at_once, registers_needed, shared_elements
from tilewright.passes.schedule_matrix import MatrixSchedule, parse_schedule

MOST = 256
"""Terms of a score and columns of the values, at most."""
TERMS = 16
"""Terms of one matrix instruction, and rows of a warp."""
CHUNK = 8
"""Elements of 16 bytes, which one copy of a thread brings."""
BLOCK = 64
"""Elements of 128 bytes: what is swizzled together."""
CACHED = 32 << 20
"""Bytes of keys and values that are walked together, so that they stay in the L2 cache."""
SHORT = 1024
"""Up to this many keys a tile is over soon, and queries that leave shared memory at once make room for the next."""
SMALL = 2e10
"""Operations up to which a second launch, which sets a counter, costs more than it brings."""
SHARED = 200 << 10
"""Bytes of shared memory for operands."""
LARGE = 1 << 12


def fixed_sizes(kernel: Kernel, target: Target) -> tuple[str, ...]:
    """Sizes that must be part of the code: the terms of a score and the columns of the values."""
    if not _has_mma(target):
        return ()
    found = find_online(kernel)
    return () if found is None else tuple(s.name for s in (found.depth, found.column_extent) if s.name is not None)


def attention_schedules(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """Schedules for the chain the kernel is, best first."""
    if not target.is_gpu:
        return cpu_attention_schedules(kernel, target)
    if not _has_mma(target):
        return ()
    found = find_online(kernel)
    if found is None or not _operands_fit(kernel, found):
        return ()
    hopper = _hopper_schedules(found, target, hints) if "wgmma" in target.features and _fits_engine(found) else ()
    whole = found.depth.divisible_by(CHUNK, kernel.facts) and found.column_extent.divisible_by(CHUNK, kernel.facts)
    others = _mma_schedules(found, target, hints) if whole else ()
    # Where there are warp-group instructions others are far behind: one is listed, for those who ask for it.
    return (*hopper, *(others[:1] if hopper else others))


def _has_mma(target: Target) -> bool:
    return {"bf16", "cp.async"} <= target.features


def _hopper_schedules(found: Online, target: Target, hints: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    depth, width = (_padded(size, BLOCK) for size in (found.depth, found.column_extent))
    batch, rows, keys = _numbers(found, hints)
    more = _reads_more(found)
    candidates = [
        MatrixSchedule(
            "attention", 64 * groups, n, depth, stages=_stages(groups, n, depth + width), groups=groups, wide=width,
            a_copy="registers" if groups == 2 and 64 < depth <= 128 and keys <= SHORT and not more else "tma",
        )
        for groups, n in _shapes(max(depth, width), more)
    ]  # fmt: skip
    if found.reach is not None:
        # Tiles of different length: sorted all together where there are few; else fetched, those of a few batch points at a time.
        small = 2 * batch * rows * keys * (depth + width) / 2 < SMALL
        raster = batch if small else min(batch, CACHED // max(1, keys * (depth + width) * 2))
        candidates = [replace(s, raster=max(1, raster), dynamic=not small) for s in candidates]
    return tuple(sorted(candidates, key=lambda s: _cost(s, batch, rows, target)))


def _mma_schedules(found: Online, target: Target, hints: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """Warps of 16 or 32 rows. Blocks are as many as tiles: where these take different times, the longest are launched first."""
    depth, width = (_padded(size, TERMS) for size in (found.depth, found.column_extent))
    batch, rows, keys = _numbers(found, hints)
    raster = max(1, min(batch, CACHED // max(1, keys * (depth + width) * 2))) if found.reach is not None else 8
    candidates = [
        MatrixSchedule(
            "attention_mma", rows_of_warp * warps, n, depth, stages=stages, warps_m=warps, wide=width, persistent=False,
            raster=raster, a_copy=copy,
        )
        for rows_of_warp, warps in ((16, 4), (16, 8), (32, 4)) for n in (64, 32, 16) for stages in (2, 3)
        for copy in ("registers", "async")
    ]  # fmt: skip
    more, limited = _reads_more(found), found.reach is not None
    fitting = [
        s for s in candidates
        if 2 * shared_elements(s) <= target.max_shared and _mma_registers(s, more, limited) <= target.max_registers
    ]  # fmt: skip
    # Queries that registers have room for do not stay in shared memory.
    there = {replace(s, a_copy="async") for s in fitting if s.a_copy == "registers"}
    fitting = [s for s in fitting if s not in there]
    return tuple(sorted(fitting, key=lambda s: _mma_cost(s, batch, rows, target, found.reach is not None)))


def _mma_registers(schedule: MatrixSchedule, more: bool, limited: bool) -> int:
    """Registers of a thread as ptxas has them at the most: steps with limits and deeper rings take some, further arrays too."""
    s = schedule
    return registers_needed(s) - 6 + (s.n // 4 if more else 0) + (30 if limited else 0) + 14 * (s.stages - 2)


def _mma_cost(schedule: MatrixSchedule, batch: int, rows: int, target: Target, uneven: bool) -> float:
    """Rows of the busiest multiprocessor. Shared memory is read while matrices are multiplied, and hardly faster; few warps leave
    the matrix units idle; short steps have more to do beside them; small tiles read keys and values more often."""
    s = schedule
    tiles = batch * -(-rows // s.m)
    busiest = -(-tiles // target.multiprocessors)
    blocks = max(1, min(blocks_at_once(s, target), busiest))
    together = bands(s)
    reads = s.k * s.n + s.n * s.wide + (0 if s.a_copy == "registers" else together * 16 * s.k)
    products = 2 * together * s.n * (s.k + s.wide)
    # An ldmatrix takes as long as two matrix instructions where those are many times as fast as other arithmetic, else as one.
    fast = target.peak("bf16") > 8 * target.peak("f32")
    rate = 1 / (1 + (1.0 if fast else 0.5) * reads * 2 / products)
    rate *= math.sqrt(math.sqrt(min(1.0, blocks * s.m / (16 * 12)))) * {64: 1.0, 32: 0.95}.get(s.n, 0.7)
    rate *= (1.0 if s.stages == 2 else 0.99) * (1.0 if s.m > 64 else 0.97)
    return (max(1.0, tiles / target.multiprocessors) if uneven else busiest) * s.m / rate


def _numbers(found: Online, hints: Mapping[str, int]) -> tuple[int, int, int]:
    """Batch points, rows and keys of the call."""

    def number(size: Size) -> int:
        return size.evaluate(hints) if size.names <= hints.keys() else LARGE

    batch = 1
    for position in found.batch:
        batch *= number(found.extents[position])
    return batch, number(found.extents[found.row]), number(found.keys)


def forced_attention(text: str, found: tuple[MatrixSchedule, ...], kernel: Kernel) -> MatrixSchedule:
    """The schedule somebody asked for, where it can be used."""
    asked = parse_schedule(text)
    like = next((s for s in found if s.family == asked.family), found[0])
    if like.family == "cpu_attention":
        return forced_on_cpu(asked, like, text, kernel)
    if like.family == "attention_mma":
        return _forced_mma(text, asked, like, kernel)
    fits = asked.m == 64 * asked.groups and 1 <= asked.groups <= 3 and asked.n % 16 == 0 and 16 <= asked.n <= 256
    if not fits or asked.family != "attention" or (asked.k, asked.wide) != (like.k, like.wide):
        raise UserError.at(
            "TW020", f"schedule '{text}' does not fit {kernel.name}", kernel.span,
            f"it needs family=attention k={like.k} wide={like.wide}, m = 64 * groups, up to 3 of them, and n a multiple of 16 up to 256",
        )  # fmt: skip
    return asked


def _forced_mma(text: str, asked: MatrixSchedule, like: MatrixSchedule, kernel: Kernel) -> MatrixSchedule:
    fits = asked.m in (TERMS * asked.warps_m, 2 * TERMS * asked.warps_m) and asked.warps_m in (1, 2, 4, 8, 16) and asked.warps_n == 1 and asked.stages in (2, 3, 4)
    fits = fits and asked.n % TERMS == 0 and 16 <= asked.n <= 256 and not asked.dynamic
    if not fits or asked.family != like.family or (asked.k, asked.wide) != (like.k, like.wide):
        raise UserError.at(
            "TW020", f"schedule '{text}' does not fit {kernel.name}", kernel.span,
            f"it needs family=attention_mma k={like.k} wide={like.wide}, m = 16 or 32 * warps_m, which is a power of two, 2 to 4 stages, and n a "
            "multiple of 16",
        )  # fmt: skip
    return asked


def neighbours(schedule: MatrixSchedule) -> Iterator[MatrixSchedule]:
    """Schedules one step away, for a search."""
    s = schedule
    for stages in (s.stages - 1, s.stages + 1):
        yield replace(s, stages=stages)
    for n in (s.n // 2, s.n - 32, s.n - 16, s.n + 16, s.n + 32, s.n * 2):
        yield replace(s, n=n)
    if s.family == "attention":
        for groups in (1, 2, 3):
            yield replace(s, m=64 * groups, groups=groups)
        yield replace(s, a_copy="tma" if s.a_copy == "registers" else "registers")
        yield replace(s, dynamic=not s.dynamic)
    else:
        for rows in (16, 32):
            for warps in (2, 4, 8):
                yield replace(s, m=rows * warps, warps_m=warps)
        yield replace(s, a_copy="async" if s.a_copy == "registers" else "registers")
        yield replace(s, persistent=not s.persistent)


def has_room(schedule: MatrixSchedule, target: Target) -> bool:
    """Whether registers and shared memory suffice and the parts fit together."""
    s = schedule
    if s.stages < 2 or s.n % 16 or not 16 <= s.n <= 256:
        return False
    if s.family == "attention_mma":
        return s.stages <= 4 and 2 * shared_elements(s) <= target.max_shared and registers_needed(s) <= target.max_registers
    # Sums, scores, and the weights of the step before are in registers.
    most = {1: 180, 2: 180, 3: 130}[s.groups]
    out = s.groups * s.buffers * 64 * 128
    operands = 2 * (s.m * s.k + s.stages * s.n * (s.k + s.wide))
    return s.wide // 2 + s.n * 3 // 4 <= most and operands + out + 2048 <= target.max_shared


def _shapes(columns: int, more: bool) -> list[tuple[int, int]]:
    """Computing groups and keys of a step for which registers and shared memory suffice, fewer where scores need further arrays."""
    if columns <= 64:
        return [(2, 128), (1, 128)] if more else [(3, 128), (2, 128), (1, 128)]
    if columns <= 128:
        return [(2, 96), (1, 96)] if more else [(2, 128), (1, 128)]
    return [(2, 64), (1, 64)]


def _reads_more(found: Online) -> bool:
    """Whether scores are made of further arrays."""
    return any(op.opcode == "load" and op not in (found.query, found.key) for op in walk(found.maximum.regions[0]))


def _stages(groups: int, n: int, columns: int) -> int:
    """Steps whose keys and values are there at once: four where two groups of short rows leave room, else two."""
    queries = 64 * groups * columns
    return 4 if groups < 3 and columns <= 128 and queries + 4 * n * columns * 2 <= SHARED else 2


def _cost(schedule: MatrixSchedule, batch: int, rows: int, target: Target) -> float:
    """Rounds of tiles, each as long as it has rows; few groups leave the matrix units idle."""
    tiles = batch * -(-rows // schedule.m)
    rate = {1: 0.55, 2: 0.9, 3: 1.0}[schedule.groups]
    rounds = tiles / target.multiprocessors if schedule.dynamic else -(-tiles // target.multiprocessors)
    return max(1.0, rounds) * schedule.m / rate


def _padded(size: Size, to: int) -> int:
    assert size.constant is not None
    return -(-size.constant // to) * to


def _operands_fit(kernel: Kernel, found: Online) -> bool:
    """Whether matrix units multiply the operands, and 16 bytes at a time can be copied."""
    depth, width = found.depth.constant, found.column_extent.constant
    if depth is None or width is None or not 8 <= depth <= MOST or not 8 <= width <= MOST:
        return False
    loads = (found.query, found.key, found.value)
    dtype = dtype_of(found.query.result.type)
    if dtype not in (f16, bf16) or any(dtype_of(op.result.type) is not dtype for op in loads):
        return False
    d, j = found.score.regions[0].args[0], found.weighted.regions[0].args[0]
    columns = (found.axis(found.query, d), found.axis(found.key, d), found.axis(found.value, found.column))
    if not all(_copyable(kernel, found, op, column) for op, column in zip(loads, columns, strict=True)):
        return False
    return found.axis(found.value, j) >= 0


def _fits_engine(found: Online) -> bool:
    """Whether the copy engine can bring them: at most four axes, and zeros beyond the last term."""
    loads = (found.query, found.key, found.value)
    if any(_tensor(op).rank > 4 for op in loads):
        return False
    if found.depth.constant is not None and found.depth.constant % BLOCK:
        d = found.score.regions[0].args[0]
        columns = (found.axis(found.query, d), found.axis(found.key, d))
        # Beyond the last term both operands must be zero.
        shapes = [_tensor(op).shape[axis] for op, axis in zip(loads[:2], columns, strict=True)]
        if any(size != found.depth for size in shapes):
            return False
    return True


def _tensor(load: Op) -> Tensor:
    tensor = load.operands[0].type
    assert isinstance(tensor, Tensor)
    return tensor


def _copyable(kernel: Kernel, found: Online, load: Op, column: int) -> bool:
    """Whether it can be copied 16 bytes at a time: neighbours along the last axis, from its first, everything else 16 bytes apart."""
    tensor = _tensor(load)
    if tensor.align < 16 or column != tensor.rank - 1 or tensor.strides[-1] != ONE:
        return False
    form = found.forms[load.operands[1 + column]]
    if len(form.factors) != 1 or form.constant.constant != 0:
        return False
    return all(divisors.of_size(x, kernel.facts) * tensor.dtype.itemsize % 16 == 0 for x in tensor.strides[:-1])
