"""Launches whose blocks must all run at once. In: a kernel of the driver and its launch rule; out: how many blocks fit, and how
many a launch gets.

Blocks of a cooperative launch wait for each other, so one that does not fit beside the others would keep them waiting
forever. The driver refuses such a launch, with a bare number; here it is refused before anything is launched, with the
sizes. A persistent kernel's blocks share out its work among as many as there are: it gets what fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsInt

from tilewright.base.artifact import Launch
from tilewright.base.errors import TargetLimit

if TYPE_CHECKING:
    from tilewright.runtime.cuda.context import CudaContext

COOPERATIVE, PROGRAMMATIC_SERIALIZATION = 2, 6
"""Values of CUlaunchAttributeID."""


def attribute(launch: Launch) -> int:
    """The attribute the launch has, which is 1; 0 where it has none."""
    if launch.cooperative:
        return COOPERATIVE
    return PROGRAMMATIC_SERIALIZATION if launch.dependent else 0


def resident_blocks(device: CudaContext, function: SupportsInt, launch: Launch) -> int:
    """How many blocks of a kernel the device runs at once; 0 where nobody has to know. The context must be active."""
    if not (launch.cooperative or launch.persistent):
        return 0
    (blocks,) = device.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, launch.threads, launch.shared_bytes)
    return int(blocks) * device.multiprocessors


def fitting_grid(launch: Launch, grid: tuple[int, int, int], resident: int, label: str) -> tuple[int, int, int]:
    """The grid of a launch on a device that runs so many of its blocks at once. Raises TargetLimit where it does not fit."""
    x, y, z = grid
    if launch.persistent:
        return min(x, max(1, resident)), y, z
    if launch.cooperative and x * y * z > resident:
        raise TargetLimit.at(
            "TW020",
            f"kernel '{launch.entry}' waits for all its {x * y * z} blocks of {launch.threads} threads and "
            f"{launch.shared_bytes} bytes of dynamic shared memory, but {label} runs {resident} of them at once",
            help="give it a grid that fits, or let its blocks share out the work",
        )
    return grid
