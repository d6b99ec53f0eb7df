"""Choose how a contraction is computed on a GPU: a short list of schedules, and a cost model that ranks them by the sizes at hand.

The model counts what decides: how many rounds of tiles the multiprocessors take (a last round that is nearly empty costs as much as a
full one), the rate each tile shape reaches, and what finishing a tile costs where nothing overlaps it. Its constants were fitted to
measurements on an H200. The tuner measures the best ranked; without it the first one is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright.analysis import divisors
from tilewright.analysis.contraction import Contraction, Factor, find_contraction, plane
from tilewright.base.dtypes import f32
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.ir.ops_matrix import MATRIX_DTYPES, accumulator_dtype
from tilewright.passes.choose_contraction_cpu import cpu_schedules
from tilewright.passes.schedule_matrix import MatrixSchedule

LARGE = 1 << 14
"""What an extent nobody knows is taken for."""


@record
class Shape:
    """The sizes of one contraction."""

    batch: int
    m: int
    n: int
    k: int


def shape_of(found: Contraction, hints: Mapping[str, int]) -> Shape:
    def number(size: Size) -> int:
        return size.evaluate(hints) if size.names <= hints.keys() else LARGE

    return Shape(number(found.size(found.batch)), number(found.size(found.m)), number(found.size(found.n)), number(found.k_size))


def matrix_schedules(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """Schedules for the contraction the kernel is, best first; none where it is not one, or where plain loops serve it."""
    found = find_contraction(kernel)
    if found is None:
        return ()
    if not target.is_gpu:
        return cpu_schedules(found, target, hints)
    if "wgmma" in target.features and _by_copy_engine(kernel, found, str(kernel.attrs.get("precision", "ieee"))):
        shape = shape_of(found, hints)
        return tuple(sorted(_wgmma(found), key=lambda s: cost(s, shape, target, found)))
    return ()


# -- Hopper ---------------------------------------------------------------------------------------------------------


def _by_copy_engine(kernel: Kernel, found: Contraction, precision: str) -> bool:
    """Whether the copy engine can bring both operands and warp-group instructions multiply them."""
    dtype = found.a.dtype
    if dtype is not found.b.dtype or dtype not in MATRIX_DTYPES or accumulator_dtype(dtype) is not found.accumulator:
        return False
    if dtype is f32 and precision == "ieee":
        return False
    return all(_copyable(kernel, found, factor) for factor in (found.a, found.b))


def _copyable(kernel: Kernel, found: Contraction, factor: Factor) -> bool:
    lies, tensor = plane(found, factor), factor.tensor
    if lies is None or tensor is None or tensor.rank > 5 or tensor.align % 16 or tensor.strides[-1] != ONE:
        return False
    last = tensor.rank - 1
    if lies.k != last and (lies.row != last or tensor.dtype.itemsize != 2):
        return False
    size = tensor.dtype.itemsize
    return all(divisors.of_size(x, kernel.facts) * size % 16 == 0 for x in tensor.strides[:-1])


_RATES: dict[str, tuple[float, MatrixSchedule]] = {
    "128x256": (1.000, MatrixSchedule("wgmma", 128, 256, 64, stages=4, groups=2)),
    "128x192 turns": (1.020, MatrixSchedule("wgmma", 128, 192, 64, stages=4, groups=2, turns=True, wait=1, buffers=3)),
    "128x128 turns": (0.985, MatrixSchedule("wgmma", 128, 128, 64, stages=6, groups=2, turns=True, wait=1)),
    "192x192": (0.985, MatrixSchedule("wgmma", 192, 192, 64, stages=4, groups=3, buffers=1)),
    "64x128 turns": (0.850, MatrixSchedule("wgmma", 64, 128, 64, stages=8, groups=2, turns=True, wait=1)),
}
"""Tile shapes worth having, and the rate each reaches relative to the first when all multiprocessors are busy."""


def _wgmma(found: Contraction) -> list[MatrixSchedule]:
    size = found.a.dtype.itemsize
    # A row of 128 bytes is one step, whatever the element.
    return [replace(s, k=128 // size) for _, s in _RATES.values()]


def cost(schedule: MatrixSchedule, shape: Shape, target: Target, found: Contraction) -> float:
    """Estimated time, in arbitrary units."""
    rate = next((r for r, s in _RATES.values() if (s.m, s.n, s.turns) == (schedule.m, schedule.n, schedule.turns)), 0.8)
    tiles = shape.batch * -(-shape.m // schedule.m) * -(-shape.n // schedule.n)
    rounds = -(-tiles // target.multiprocessors)
    area = schedule.m * schedule.n
    finish = 64 * area * (1 if schedule.turns else rounds)
    return rounds * shape.k * area / rate + finish
