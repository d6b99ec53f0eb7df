"""Choose how attention is computed on a GPU: rows of a block, keys of a step, and who starts
when.

In: a loop-stage kernel, the target and the sizes of the call. Out: schedules, best first: for Hopper `family=attention`, then,
as for every GPU whose warps multiply matrices and copy asynchronously, `family=attention_mma`. None where the kernel is no
attention, or where operands are not what the copies and the matrix units take: two-byte floats (or 8-bit ones, which `widen_operands`
copies), or f32, which is multiplied in parts of tf32 (`tf32_terms`) unless the kernel says `precision="ieee"`; rows that begin at whole 16 bytes, up to
256 terms and columns, both known when the code is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from tilewright.analysis import divisors
from tilewright.analysis.attention import Attention, find_attention
from tilewright.base.dtypes import bf16, f16, f32
from tilewright.base.errors import UserError
from tilewright.base.sizes import ONE, Size
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, Op, is_watched, walk
from tilewright.ir.types import dtype_of
from tilewright.passes.choose.cpu.attention import cpu_attention_schedules, has_few_rows, numbers_of
from tilewright.passes.common.split_form import SplitForm, find_split
from tilewright.passes.program.widen_operands import can_widen, operand_dtype, widened
from tilewright.passes.schedules.attention import CHUNK, TERMS, GpuAttention, MmaAttention, WgmmaAttention
from tilewright.passes.schedules.matrix import MatrixSchedule
from tilewright.passes.schedules.text import parse_schedule

MOST = 256
"""Terms of a score and columns of the values, at most."""
BLOCK = 64
"""Elements of 128 bytes: what is swizzled together."""
SHARED = 200 << 10
"""Bytes of shared memory for operands."""
STEP_BYTES = 16 << 10
"""Keys and values of one step, where there are few rows."""
AT_ONCE = 2
"""Blocks of a multiprocessor then."""
TF32_TERMS = 4
"""Products of parts of f32: scores are short sums, in which the product of the small parts counts as much as rounding does."""


def fixed_sizes(kernel: Kernel, target: Target, extents: Mapping[str, int]) -> dict[str, int]:
    """Sizes that must be part of the code: the terms of a score and the columns of the values; for few queries the numbers of heads, too. Of few queries
    only those that matrix attention takes; many become three kernels where it does not (`stage_attention`)."""
    if not _has_mma(target):
        return {}
    found = find_attention(kernel)
    few = found is None or found.count is not None or found.gathers or is_watched(kernel) or has_few_rows(found, extents)
    form = find_split(kernel, known=False) if few else None
    found = form.found if form is not None else found
    if found is None:
        return {}
    names = [name for s in (found.depth, found.column_extent) for name in ([s.name] if s.name is not None else sorted(s.names) if found.computed else [])]
    groups = [size for size in found.extents if size.name is None] if form is not None else []
    names += [name for size in groups for name in sorted(size.names)]
    return {name: extents[name] for name in names if name in extents and (extents[name] <= MOST or not few)}


def attention_schedules(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """Schedules for the attention the kernel is, best first."""
    found = find_attention(kernel)
    if not target.simt:
        return cpu_attention_schedules(kernel, found, target, hints)
    if not _has_mma(target):
        return ()
    if found is None or found.count is not None or found.gathers or is_watched(kernel):
        return _split_schedules(kernel, target, hints)
    if not _operands_fit(kernel, found):
        return ()
    few = _split_schedules(kernel, target, hints) if has_few_rows(found, hints) else ()
    hopper = _hopper_schedules(found, target, hints) if "wgmma" in target.features and operand_dtype(found) is not f32 and _fits_engine(found) else ()
    in_terms = _terms_schedules(kernel, found, target, hints)
    terms = _tf32_terms(kernel, found)
    chunk = CHUNK // 2 if terms else CHUNK
    whole = found.depth.divisible_by(chunk, kernel.facts) and found.column_extent.divisible_by(chunk, kernel.facts)
    others = _mma_schedules(found, target, hints, terms) if whole else ()
    if in_terms:
        return (*in_terms, *others) if _gains_in_terms(in_terms[0], found, target, hints) else (*others, *in_terms)
    # Where there are warp-group instructions others are far behind: one is listed, for those who ask for it.
    return (*few, *hopper, *(others[:1] if hopper else others))


BRINGING = 4
"""Warps of a block whose rows one warp could compute."""


def _split_schedules(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> tuple[MmaAttention, ...]:
    """For few rows: parts of the keys side by side, as many as the device has room for. How many depends on how many keys there can be, never on how
    many there are."""
    form = find_split(kernel)
    if form is None or not _can_split(form):
        return ()
    found = form.found
    depth, width = (_padded(size, TERMS) for size in (found.depth, found.column_extent))
    batch, rows, keys = numbers_of(found, hints)
    warps = 1 if rows <= TERMS else 2 if rows <= 2 * TERMS else 4
    tiles = batch * -(-rows // (TERMS * warps))
    # Steps of about 16 KiB, of which three are on their way. Two blocks for each multiprocessor keep memory busy; more would only leave more parts to add up.
    best = max(32, min(64, STEP_BYTES // (2 * (depth + width)) // 16 * 16))
    made: list[MmaAttention] = []
    # What is computed is there as soon as it is brought: two stages suffice, and as many blocks as there is room for hide that they wait for it.
    few = keys * tiles < 32 * 6 * target.multiprocessors
    computed = ((16, 2), (32, 2)) if few else ((32, 2), (16, 2))
    steps = computed if found.computed else ((best, 4), (best, 3), (best, 2), (32, 3), (16, 4), (16, 3), (64, 2))
    if not found.computed and tiles * -(-keys // 16) <= target.multiprocessors and warps == 1:
        # A part for each multiprocessor and some left over: the shorter each is, the sooner all are done. One warp would take longer to bring keys than to use them, so more of them do that.
        steps, warps = ((16, 2), (16, 3), *steps), BRINGING
    # Where blocks have little room, the smallest step and no more warps than there are rows for.
    least = min(warps, 1 if rows <= TERMS else 2 if rows <= 2 * TERMS else 4)
    for n, stages, group in (*((n, stages, warps) for n, stages in steps), (16, 2, least)):
        schedule = MmaAttention(
            TERMS * group, n, depth, stages=stages, warps_m=group, head_dim_v=width, persistent=False, a_copy="rs" if depth <= 128 else "cp_async",
            prefetch=0 if found.computed or depth < BLOCK else 128,
        )  # fmt: skip
        longest = max(1, -(-keys // n))
        wanted = target.multiprocessors * (schedule.blocks_at_once(target) if found.computed else min(AT_ONCE, schedule.blocks_at_once(target)))
        own = replace(schedule, splits=max(1, min(wanted // max(1, tiles), longest)))
        if schedule.has_room(target) and own not in made:
            made.append(own)
    return tuple(sorted(made, key=lambda s: s.blocks_at_once(target) < AT_ONCE))


def _can_split(form: SplitForm) -> bool:
    found = form.found
    whole = all(size.constant is not None and size.constant % CHUNK == 0 for size in (found.depth, found.column_extent))
    loads = [op for op in (found.query, found.key, found.value) if op.opcode == "load"]
    return whole and all(dtype_of(op.result.type).itemsize == 2 for op in loads) and _operands_fit(form.kernel, found)


def _has_mma(target: Target) -> bool:
    return {"bf16", "cp.async"} <= target.features


def _hopper_schedules(found: Attention, target: Target, hints: Mapping[str, int]) -> tuple[WgmmaAttention, ...]:
    depth, width = (_padded(size, BLOCK) for size in (found.depth, found.column_extent))
    terms = _padded(found.depth, TERMS)  # of those that shared memory has, instructions multiply what there is
    batch, rows, keys = numbers_of(found, hints)
    more = _reads_more(found)
    work = 2 * batch * rows * keys * (depth + width) / (1 if found.reach is None else 2)
    costs = target.costs.attention
    short = keys <= costs.short and not more
    candidates = [
        WgmmaAttention(
            64 * groups, _step(n, keys) if short and groups == 2 and found.reach is None else n, terms,
            stages=3 if blocks > 1 else _stages(groups, n, depth + width), math_warpgroups=groups, head_dim_v=width, blocks=blocks,
            a_copy="rs" if short and depth <= 128 and (groups == 2 or blocks > 1) else "tma", pdl=work < costs.early_to,
        )
        for groups, n, blocks in _shapes(max(depth, width), more, short, found.reach is not None)
    ]  # fmt: skip
    if found.reach is not None:
        # Tiles of different length: sorted all together where there are few; else fetched, those of a few batch points at a time.
        small = work < costs.counted_from
        raster = batch if small else min(batch, costs.together, costs.cached // max(1, keys * (depth + width) * 2))
        candidates = [replace(s, raster=max(1, raster), dynamic=not small, pdl=small) for s in candidates]
    return tuple(sorted(candidates, key=lambda s: _cost(s, batch, rows, keys, found.reach is not None, target)))


TERM_STEPS = (64, 48, 32)
"""Keys of a step of terms; the first for which there is room."""
MOST_IN_TERMS = 128
"""Terms of a score and columns of the values, at most, for which queries and two steps of keys and values have room as terms of bf16."""


def _terms_schedules(kernel: Kernel, found: Attention, target: Target, hints: Mapping[str, int]) -> tuple[WgmmaAttention, ...]:
    """For f32, each as three terms of bf16: two groups that compute, and as many keys of a step as there is room for."""
    if "wgmma" not in target.features or operand_dtype(found) is not f32 or kernel.attrs.get("precision") is not None or found.computed:
        return ()
    loads = (found.query, found.key, found.value)
    depth, width = _padded(found.depth, TERMS), _padded(found.column_extent, 32 if _stores_words(kernel) else BLOCK)
    if max(depth, width) > MOST_IN_TERMS or any(widened(found, op.operands[0]).rank > 4 for op in loads):
        return ()
    batch, rows, keys = numbers_of(found, hints)
    schedule = WgmmaAttention(128, TERM_STEPS[0], depth, stages=2, math_warpgroups=2, head_dim_v=width, bf16_terms=6)
    if found.reach is not None:
        costs = target.costs.attention
        small = 2 * batch * rows * keys * (depth + width) / 2 < costs.counted_from
        raster = batch if small else min(batch, costs.together, costs.cached // max(1, keys * (schedule.key_columns + schedule.value_columns) * 2))
        schedule = replace(schedule, raster=max(1, raster), dynamic=not small)
    # Scores made of further arrays have these in registers, too.
    more = 2 if _reads_more(found) else 1
    fitting = (replace(schedule, n=n) for n in TERM_STEPS if n * more <= TERM_STEPS[0])
    return tuple(s for s in fitting if s.has_room(target))[:1]


def _stores_words(kernel: Kernel) -> bool:
    """Whether results have four bytes: pieces of 128 bytes are 32 columns then."""
    return all(dtype_of(op.operands[0].type).itemsize == 4 for op in walk(kernel.body) if op.opcode == "store")


def _gains_in_terms(schedule: WgmmaAttention, found: Attention, target: Target, hints: Mapping[str, int]) -> bool:
    """Whether terms are faster than parts of tf32: they are written by kernels of their own, and tiles have more rows."""
    costs, s = target.costs, schedule
    batch, rows, keys = numbers_of(found, hints)
    limited = found.reach is not None
    tiles = batch * -(-rows // s.m) / target.multiprocessors
    rounds = max(1.0, tiles) if limited else math.ceil(tiles)
    each = (keys + s.m + s.n) / 2 if limited else -(-keys // s.n) * s.n
    multiplied = rounds * s.m * each * 2 * (s.k + s.head_dim_v) * target.multiprocessors / costs.attention.terms_rate
    moved = 2 * batch * (rows * s.key_columns + keys * (s.key_columns + s.value_columns)) / costs.wgmma.turn
    parts = batch * rows * (keys / 2 if limited else keys) * 2 * (s.k + s.head_dim_v) / costs.attention.parts_rate
    return multiplied + moved + 3 * costs.launch.second < parts


def _tf32_terms(kernel: Kernel, found: Attention) -> int:
    """Products of parts of tf32 that operands of f32 take, as the kernel says; 0 of others."""
    if operand_dtype(found) is not f32:
        return 0
    return 1 if kernel.attrs.get("precision") == "tf32" else TF32_TERMS


def _mma_schedules(found: Attention, target: Target, hints: Mapping[str, int], terms: int = 0) -> tuple[MmaAttention, ...]:
    """Warps of 16 or 32 rows. Blocks are as many as tiles: where these take different times, the longest are launched first."""
    depth, width = (_padded(size, TERMS) for size in (found.depth, found.column_extent))
    batch, rows, keys = numbers_of(found, hints)
    raster = max(1, min(batch, target.costs.attention.cached // max(1, keys * (depth + width) * 2))) if found.reach is not None else 8
    candidates = [
        MmaAttention(
            rows_of_warp * warps, n, depth, stages=stages, warps_m=warps, head_dim_v=width, persistent=False,
            raster=raster, a_copy=copy, tf32_terms=terms,
        )
        for rows_of_warp, warps in (((16, 4), (16, 8)) if terms else ((16, 4), (16, 8), (32, 4))) for n in ((32, 16) if terms else (64, 32, 16)) for stages in (2, 3)
        for copy in ("rs", "cp_async")
    ]  # fmt: skip
    more, limited = _reads_more(found), found.reach is not None
    fitting = [
        s for s in candidates
        if s.shared_bytes <= target.max_shared and _mma_registers(s, more, limited) <= target.max_registers
    ]  # fmt: skip
    # Queries that registers have room for do not stay in shared memory.
    there = {replace(s, a_copy="cp_async") for s in fitting if s.a_copy == "rs"}
    fitting = [s for s in fitting if s not in there]
    return tuple(sorted(fitting, key=lambda s: _mma_cost(s, batch, rows, target, found.reach is not None)))


def _mma_registers(schedule: MmaAttention, more: bool, limited: bool) -> int:
    """Registers of a thread as ptxas has them at the most: steps with limits and deeper rings take some, further arrays too."""
    s = schedule
    return s.registers - 6 + (s.n // 4 if more else 0) + ((30 if not s.tf32_terms else 50 if s.k <= BLOCK else 0) if limited else 0) + 14 * (s.stages - 2)


def _mma_cost(schedule: MmaAttention, batch: int, rows: int, target: Target, uneven: bool) -> float:
    """Rows of the busiest multiprocessor. Shared memory is read while matrices are multiplied, and hardly faster; few warps leave
    the matrix units idle; short steps have more to do beside them; small tiles read keys and values more often."""
    s = schedule
    tiles = batch * -(-rows // s.m)
    busiest = -(-tiles // target.multiprocessors)
    blocks = max(1, min(s.blocks_at_once(target), busiest))
    together = s.bands
    reads = s.k * s.n + s.n * s.head_dim_v + (0 if s.a_copy == "rs" else together * 16 * s.k)
    products = 2 * together * s.n * (s.k + s.head_dim_v)
    # An ldmatrix takes as long as two matrix instructions where those are many times as fast as other arithmetic, else as one.
    fast = target.peak("bf16") > 8 * target.peak("f32")
    rate = 1 / (1 + (1.0 if fast else 0.5) * reads * 2 / products)
    rate *= math.sqrt(math.sqrt(min(1.0, blocks * s.m / (16 * 12)))) * {64: 1.0, 32: 0.95}.get(s.n, 0.7)
    rate *= (1.0 if s.stages == 2 else 0.99) * (1.0 if s.m > 64 else 0.97)
    return (max(1.0, tiles / target.multiprocessors) if uneven else busiest) * s.m / rate


def forced_attention(text: str, listed: tuple[MatrixSchedule, ...], kernel: Kernel, target: Target) -> MatrixSchedule:
    """The schedule somebody asked for, where it can be used."""
    asked = parse_schedule(text)
    like = next((s for s in listed if s.family == asked.family), listed[0])
    rows = [f"k={like.k} head_dim_v={like.head_dim_v}"] if isinstance(like, GpuAttention) else []
    reason = asked.refusal(target, f32) if asked.family == like.family else f"it is family={asked.family} that does not fit"
    if isinstance(asked, GpuAttention) and isinstance(like, GpuAttention) and not (_has_terms_of(asked, like) and asked.head_dim_v == like.head_dim_v):
        reason = reason or "rows have other lengths"
    splits = getattr(asked, "splits", 0)
    if bool(splits) != bool(getattr(like, "splits", 0)) and (not splits or find_split(kernel) is None):
        rows.append("splits=…" if not splits else "no splits")
        reason = reason or ("its keys are in parts" if not splits else "its keys cannot be in parts")
    if reason:
        needs = " ".join([f"family={like.family}", *rows])
        raise UserError.at("TW020", f"schedule '{text}' does not fit {kernel.name}", kernel.span, f"it needs {needs}; {reason}")
    return asked


def _has_terms_of(asked: GpuAttention, like: GpuAttention) -> bool:
    """Whether a schedule multiplies all terms of a score: as many as there are, or those of whole blocks."""
    if isinstance(asked, WgmmaAttention) and isinstance(like, WgmmaAttention) and not like.bf16_terms:
        return like.k <= asked.k <= like.key_columns
    return asked.k == like.k


def _shapes(columns: int, more: bool, short: bool, limited: bool) -> list[tuple[int, int, int]]:
    """Computing groups, keys of a step, and blocks at once, for which registers and shared memory suffice: fewer where scores need further
    arrays. Rows with few keys that end where they stand have small steps, which waste fewer; blocks of their own let rows with few
    keys and columns begin and end apart."""
    few = 64 if short and limited else 128
    if columns <= 64:
        shapes = [(2, 128, 1)] if more else [(3, 128, 1), (4, 64, 1), (2, few, 1), *([(1, 64, 3)] if short else [])]
        return [*shapes, (1, 128, 1)]
    if columns <= 128:
        return [(2, 96, 1), (1, 96, 1)] if more else [(2, few, 1), (1, 128, 1)]
    return [(2, 64, 1), (1, 64, 1)]


def _step(n: int, keys: int) -> int:
    """Keys of a step, up to n: fewer where the last step would be far from full."""
    best = min((n, n - 16, n - 32, n - 48), key=lambda x: -(-keys // x) * x)
    return best if best > 0 and -(-keys // best) * best * 20 <= -(-keys // n) * n * 19 else n


def _reads_more(found: Attention) -> bool:
    """Whether scores are made of further arrays."""
    known = [found.query, *found.loads(found.key)]
    return any(op.opcode == "load" and op not in known for op in walk(found.maximum.regions[0]))


def _stages(groups: int, n: int, columns: int) -> int:
    """Steps whose keys and values are there at once: four where they leave room, and they are short or two groups' rows are, else two."""
    queries = 64 * groups * columns
    fits = queries + 4 * n * columns * 2 <= SHARED
    return 4 if fits and ((groups < 3 and columns <= 128) or n == 64) else 2




def _cost(schedule: WgmmaAttention, batch: int, rows: int, keys: int, limited: bool, target: Target) -> float:
    """Rounds of tiles, each as long as it has rows and they have keys; few groups leave the matrix units idle."""
    s, costs = schedule, target.costs.attention
    tiles = batch * -(-rows // s.m)
    at_once = target.multiprocessors * s.blocks
    rounds = tiles / at_once if s.dynamic else -(-tiles // at_once)
    # Of rows that end where they stand half the keys count, and those that a group's rows and steps along the limit add.
    each = (keys + 64 + s.n) / 2 if limited else keys
    # Of rows that are no whole tiles the longest tiles have groups without any.
    whole = limited and s.math_warpgroups == 4 and rows % s.m == 0
    rate, ends = costs.group_rates[s.math_warpgroups] * (1.1 if whole else 1.0), costs.group_ends[s.math_warpgroups]
    beside = min(s.blocks, -(-tiles // target.multiprocessors))
    if s.blocks > 1:
        rate, ends = costs.block_rates[min(3, max(1, beside))]
    return max(1.0, rounds) * s.m * beside * (each + ends) / rate


def _padded(size: Size, to: int) -> int:
    assert size.constant is not None
    return -(-size.constant // to) * to


def _operands_fit(kernel: Kernel, found: Attention) -> bool:
    """Whether matrix units multiply the operands, and 16 bytes at a time can be copied."""
    depth, width = found.depth.constant, found.column_extent.constant
    if depth is None or width is None or not 8 <= depth <= MOST or not 8 <= width <= MOST:
        return False
    loads = (found.query, found.key, found.value)
    dtype = operand_dtype(found)
    if dtype not in (f16, bf16, f32) or not can_widen(kernel, found) or (dtype is f32 and kernel.attrs.get("precision") == "ieee"):
        return False
    d = found.score.regions[0].args[0]
    columns = (found.axis(found.query, d), found.axis(found.key, d), found.axis(found.value, found.column))
    return all(op.opcode != "load" or _copyable(kernel, found, op, column) for op, column in zip(loads, columns, strict=True))


def _fits_engine(found: Attention) -> bool:
    """Whether the copy engine can bring them: at most four axes, and zeros beyond the last term."""
    loads = (found.query, found.key, found.value)
    if found.computed or any(widened(found, op.operands[0]).rank > 4 for op in loads):
        return False
    if found.depth.constant is not None and found.depth.constant % BLOCK:
        d = found.score.regions[0].args[0]
        columns = (found.axis(found.query, d), found.axis(found.key, d))
        # Beyond the last term both operands must be zero.
        shapes = [widened(found, op.operands[0]).shape[axis] for op, axis in zip(loads[:2], columns, strict=True)]
        if any(size != found.depth for size in shapes):
            return False
    return True


def _copyable(kernel: Kernel, found: Attention, load: Op, column: int) -> bool:
    """Whether it can be copied 16 bytes at a time: neighbours along the last axis, from its first, everything else 16 bytes apart."""
    tensor = widened(found, load.operands[0])
    if tensor.align < 16 or column != tensor.rank - 1 or tensor.strides[-1] != ONE:
        return False
    form = found.forms[load.operands[1 + column]]
    if len(form.factors) != 1 or form.constant.constant != 0:
        return False
    return all(divisors.of_size(x, kernel.facts) * tensor.dtype.itemsize % 16 == 0 for x in tensor.strides[:-1])
