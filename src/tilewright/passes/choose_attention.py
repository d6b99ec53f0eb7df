"""Choose how a chain of reductions around two products is computed on Hopper: rows of a block, keys of a step, and who starts
when.

In: a loop-stage kernel, the target and the sizes of the call. Out: schedules (`family=attention`), best first; none where the
kernel is no such chain, or where operands are not what the copy engine and the matrix units take: two-byte floats, rows that
begin at whole 16 bytes, up to 256 terms and columns, both known when the code is made.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from tilewright.passes.schedule_matrix import MatrixSchedule, parse_schedule

MOST = 256
"""Terms of a score and columns of the values, at most."""
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
    if "wgmma" not in target.features:
        return ()
    found = find_online(kernel)
    return () if found is None else tuple(s.name for s in (found.depth, found.column_extent) if s.name is not None)


def attention_schedules(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """Schedules for the chain the kernel is, best first."""
    if not target.is_gpu:
        return cpu_attention_schedules(kernel, target)
    if "wgmma" not in target.features:
        return ()
    found = find_online(kernel)
    if found is None or not _fits(kernel, found):
        return ()
    depth, width = (_padded(size) for size in (found.depth, found.column_extent))

    def number(size: Size) -> int:
        return size.evaluate(hints) if size.names <= hints.keys() else LARGE

    rows, keys, batch = number(found.extents[found.row]), number(found.keys), 1
    for position in found.batch:
        batch *= number(found.extents[position])
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


def forced_attention(text: str, found: tuple[MatrixSchedule, ...], kernel: Kernel) -> MatrixSchedule:
    """The schedule somebody asked for, where it can be used."""
    asked = parse_schedule(text)
    like = found[0]
    if like.family == "cpu_attention":
        return forced_on_cpu(asked, like, text, kernel)
    fits = asked.m == 64 * asked.groups and 1 <= asked.groups <= 3 and asked.n % 16 == 0 and 16 <= asked.n <= 256
    if not fits or asked.family != "attention" or (asked.k, asked.wide) != (like.k, like.wide):
        raise UserError.at(
            "TW020", f"schedule '{text}' does not fit {kernel.name}", kernel.span,
            f"it needs family=attention k={like.k} wide={like.wide}, m = 64 * groups, up to 3 of them, and n a multiple of 16 up to 256",
        )  # fmt: skip
    return asked


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


def _padded(size: Size) -> int:
    assert size.constant is not None
    return -(-size.constant // BLOCK) * BLOCK


def _fits(kernel: Kernel, found: Online) -> bool:
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
    if depth % BLOCK:
        # Beyond the last term both operands must be zero.
        shapes = [_tensor(op).shape[axis] for op, axis in zip(loads[:2], columns[:2], strict=True)]
        if any(size != found.depth for size in shapes):
            return False
    return found.axis(found.value, j) >= 0


def _tensor(load: Op) -> Tensor:
    tensor = load.operands[0].type
    assert isinstance(tensor, Tensor)
    return tensor


def _copyable(kernel: Kernel, found: Online, load: Op, column: int) -> bool:
    """Whether the copy engine can read it: neighbours along the last axis, from its first, everything else 16 bytes apart."""
    tensor = _tensor(load)
    if tensor.align < 16 or tensor.rank > 4 or column != tensor.rank - 1 or tensor.strides[-1] != ONE:
        return False
    form = found.forms[load.operands[1 + column]]
    if len(form.factors) != 1 or form.constant.constant != 0:
        return False
    return all(divisors.of_size(x, kernel.facts) * tensor.dtype.itemsize % 16 == 0 for x in tensor.strides[:-1])
