"""Choose how a contraction is computed on a CPU: the tile of results in registers, and the blocks that stay in the caches.

One kernel serves all sizes, so nothing here depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis import ranges
from tilewright.analysis.contraction import Contraction, Factor
from tilewright.analysis.guard_safety import is_safe_without
from tilewright.analysis.ranges import Range
from tilewright.base.artifact import SMALL_EXTENT
from tilewright.base.cost_model import CacheCosts
from tilewright.base.dtypes import f32, f64, i32, i64, u32, u64
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, Value, walk
from tilewright.ir.ops_matrix import PANEL, PANEL_DTYPES
from tilewright.passes.choose.cpu.register_tiles import fitted_columns, fitted_tile, register_tile
from tilewright.passes.schedules.matrix import Amx, CpuPanels, CpuProduct
from tilewright.passes.to_tile.panels.sides import needed_ops, rows_lie
from tilewright.passes.triangles.symmetry import is_symmetric

ACCUMULATORS = (f32, f64, i32, i64, u32, u64)


def cpu_schedules(kernel: Kernel, found: Contraction, target: Target) -> tuple[CpuProduct, ...]:
    """The schedule for a contraction, or none where plain loops serve it."""
    dtype, costs = found.accumulator, target.costs.caches
    if dtype not in ACCUMULATORS or target.vector_bytes < 16:
        return ()
    if is_tiny(found):
        return ()
    known = ranges.analyse(kernel)
    if not all(_copyable(found, factor, known) for factor in (found.a, found.b)):
        return ()
    if any(op.opcode in ("atomic", "accumulate") for op in found.parallel.regions[0].ops):
        return ()
    lanes = target.vector_bytes // dtype.itemsize
    plain = not found.batch and len(found.m) == len(found.n) == 1
    # The pixels of a convolution, several indices, are many more than its channels.
    keep = "a" if len(found.n) > len(found.m) else "b"
    rows, vectors = register_tile(target) if plain else _fitted(found, target, keep, lanes)
    nr = vectors * lanes
    # Rows that are read where they lie come from far: the longer a stretch of the sum, the less often. Padded copies have no guards.
    lie = keep == "b" and not target.max_local and rows_lie(found.unguarded(), nr)
    depth = (_plain_depth(costs, rows) if plain else costs.lying_depth if lie else costs.window_depth) * 4 // max(4, dtype.itemsize)
    kept, sums = costs.kept_bytes, costs.sum_bytes
    if target.max_local:  # a thread's memory is what the device gives it
        kept, sums = min(kept, target.max_local // 2), min(sums, target.max_local // 4)
    most = kept // (depth * dtype.itemsize)
    if keep == "b":
        columns = max(1, most // nr) * nr
        height = max(1, sums // (columns * dtype.itemsize * rows)) * rows
    else:
        height = max(1, most // rows) * rows
        columns = max(1, sums // (height * dtype.itemsize * nr)) * nr
    plain_one = CpuPanels(height, columns, depth, mr=rows, nr=nr, vectors=vectors, keep=keep, half=keep == "b" and is_symmetric(found))
    return (*_unit_schedules(found, target, keep), plain_one)


def _fitted(found: Contraction, target: Target, keep: str, lanes: int) -> tuple[int, int]:
    """Rows and vectors of a tile for as many filters as a kernel has, where these are few."""
    filters = found.size(found.m if keep == "a" else found.n).constant
    if not filters or filters > SMALL_EXTENT:
        return register_tile(target)
    return fitted_tile(target, filters) if keep == "a" else fitted_columns(target, lanes, filters)


DEPTHS = 64
"""Stretches of the sum are multiples of this."""
TINY, TINY_WORK = 16, 64
"""Terms and columns up to which a product is computed as written, since panels would be copied for a few operations each; and their product, where one matrix
serves all rows."""


def is_tiny(found: Contraction) -> bool:
    """Whether sums are short, and one side of the results is too, for all calls; or it is a matrix times a vector."""
    terms, rows, columns = found.k_size.constant, found.size(found.m).constant, found.size(found.n).constant
    if not found.batch and 1 in (rows, columns):
        return True
    sides = [side for side in (rows, columns) if side is not None]
    if terms is None or terms > TINY or not sides or min(sides) > TINY:
        return False
    return bool(found.batch) or terms * min(sides) <= TINY_WORK


def _unit_schedules(found: Contraction, target: Target, keep: str) -> tuple[Amx, ...]:
    """The schedule for the CPU's matrix unit, where it has one for these dtypes."""
    if "amx" not in target.features or (found.a.dtype, found.b.dtype, found.accumulator) not in PANEL_DTYPES:
        return ()
    costs = target.costs.caches
    most = costs.kept_bytes // costs.unit_depth
    other = max(1, costs.sum_bytes // (most * 4 * PANEL)) * PANEL
    height, columns = (other, most) if keep == "b" else (most, other)
    depth = costs.unit_depth // found.a.dtype.itemsize
    return (Amx(height, columns, depth, mr=PANEL, nr=PANEL, vectors=2, keep=keep),)


def _copyable(found: Contraction, factor: Factor, known: Mapping[Value, Range]) -> bool:
    """Whether it can be computed by itself, and without the guard of the other factor."""
    wanted = [factor.value] if factor.guard is None else [factor.value, factor.guard]
    ops = needed_ops(found, wanted)
    other = (found.b if factor is found.a else found.a).guard
    if ops is None or other is None:
        return ops is not None
    made = {result: op for op in walk(found.parallel.regions[0]) for result in op.results}
    return all(is_safe_without(op, other, made, known) for op in ops if op.opcode == "load")


def _plain_depth(costs: CacheCosts, rows: int) -> int:
    """How long a stretch of the sum is, for elements of 4 bytes: no panel of rows is larger than its share of the nearest cache."""
    room = costs.panel_bytes // (4 * rows)
    return min(costs.depth, room - room % DEPTHS)
