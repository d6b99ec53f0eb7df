"""What a run needs by its sizes: bytes of scratch arrays, blocks of launches. In: an artifact and a number for every size name; out: numbers
that 64 bits hold. What no machine has is refused here, in Python's exact integers, before anything is allocated or launched.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.base.artifact import ArrayParam, Artifact, Launch
from tilewright.base.errors import DeviceError, TargetLimit, TilewrightError

MOST_BYTES = (1 << 63) - (1 << 20)
"""More than this no address space holds; room is left for alignment."""
_MOST = (1 << 63) - 1


def scratch_bytes(artifact: Artifact, param: ArrayParam, sizes: Mapping[str, int], device: str = "cpu") -> int:
    """Bytes of one scratch array; one of a negative extent, over which no loop runs, has none."""
    elements = 1
    for size in param.shape:
        elements *= max(0, size.evaluate(sizes))
    nbytes = elements // param.dtype.block * param.dtype.itemsize
    if nbytes > MOST_BYTES:
        raise no_scratch(artifact, param, sizes, device)
    return nbytes


def no_scratch(artifact: Artifact, param: ArrayParam, sizes: Mapping[str, int], device: str = "cpu") -> TilewrightError:
    """The error for scratch memory that cannot be had."""
    shape = [size.evaluate(sizes) for size in param.shape]
    nbytes = param.dtype.itemsize
    for extent in shape:
        nbytes *= extent
    return DeviceError.at(
        "TW031", f"out of memory on {device}: {nbytes // param.dtype.block} bytes for '{_plain(param.name)}', {param.dtype}{shape}, "
        f"which {_place(artifact)} keeps between its loops",
        help="work on smaller pieces, or keep less between loops",
    )  # fmt: skip


def block_count(artifact: Artifact, launch: Launch, sizes: Mapping[str, int]) -> int:
    """Blocks of a launch on a CPU, which numbers them in 64 bits."""
    grid = [size.evaluate(sizes) for size in launch.grid]
    count = 1
    for extent in grid:
        count *= extent
    if count > _MOST:
        raise TargetLimit.at(
            "TW020", f"{_place(artifact)} has a grid of {' x '.join(map(str, grid))} blocks, more than 64 bits count", help="work on smaller pieces"
        )
    return max(0, count)


def bounded(amount: int) -> int:
    """An amount of work, which only steers: the largest number where 64 bits do not hold it."""
    return min(amount, _MOST)


def _plain(name: str) -> str:
    return name.partition("$")[0] or name


def _place(artifact: Artifact) -> str:
    where = next((launch.place for launch in artifact.launches if launch.place), "")
    return f"'{artifact.name}' ({where})" if where else f"'{artifact.name}'"
