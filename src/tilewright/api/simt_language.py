"""The words of explicit kernels, as Python sees them.

Inside a function marked `@tilewright.gpu` (and in functions it calls) these names are read by the compiler, never executed. They exist
so that editors and type checkers understand kernels; calling one elsewhere is an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar, overload

from tilewright.api.language import Axes
from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError

T = TypeVar("T")


def _only_in_kernels(name: str) -> NoReturn:
    raise UserError.at("TW005", f"tilewright.{name} has a meaning only inside a GPU kernel", help="mark the function with @tilewright.gpu")


class SizedAxes(Axes):
    """The same with the extents along each axis."""

    size: Axes


thread = Axes("thread")
"""The thread's index in its block."""
block = SizedAxes("block")
"""The block's index in the grid; `block.size`: threads of a block along each axis."""


class GpuBuffer(Generic[T]):
    """An array of one axis in a kernel's parameters: `x: tw.GpuBuffer[tw.f32]`. Arrays of more axes are seen as one long row."""

    __simt__ = "GpuBuffer"
    size: int
    shape: tuple[int, ...]
    dtype: DType

    def __class_getitem__(cls, item: object) -> Any:
        return _Buffer(item)

    def __getitem__(self, index: float) -> float:
        _only_in_kernels("GpuBuffer")

    def __setitem__(self, index: float, value: float) -> None:
        _only_in_kernels("GpuBuffer")

    def __len__(self) -> int:
        _only_in_kernels("GpuBuffer")


class _Buffer:
    """`GpuBuffer[f32]`, where Python evaluates annotations."""

    __simt__ = "GpuBuffer"

    def __init__(self, dtype: object) -> None:
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"GpuBuffer[{self.dtype}]"


class _Warp:
    """What a warp is."""

    __simt__ = "warp"
    size = 32
    """Threads of a warp."""


warp = _Warp()
F = TypeVar("F", bound=Callable[..., object])


def device(function: F) -> F:
    """Mark a function that kernels call. Its body takes the place of the call; plain functions are treated alike."""
    return function


def gpu_thread_id() -> int:
    """The thread's number in the whole grid."""
    _only_in_kernels("gpu_thread_id")


def lane_id() -> int:
    """The thread's number in its warp."""
    _only_in_kernels("lane_id")


def warp_id() -> int:
    """The number of the thread's warp in its block."""
    _only_in_kernels("warp_id")


def local(shape: int | tuple[int, ...], dtype: DType) -> Any:
    """An array that each thread has for itself."""
    _only_in_kernels("local")


def shared_dynamic(dtype: DType) -> Any:
    """The shared memory that the launch asked for, as an array of one axis."""
    _only_in_kernels("shared_dynamic")


def unrolled(values: range) -> range:
    """`for i in tw.unrolled(range(4)):` has the body four times, with a constant for i."""
    _only_in_kernels("unrolled")


def warp_sync(lanes: int | None = None) -> None:
    """Every thread of the warp arrives before any leaves."""
    _only_in_kernels("warp_sync")


def fence(scope: str = "device") -> None:
    """Accesses before it are seen before those after it, at scope thread, block, device or system."""
    _only_in_kernels("fence")


@overload
def shuffle(value: int, lane: int, width: int = 32, lanes: int | None = None) -> int: ...
@overload
def shuffle(value: float, lane: int, width: int = 32, lanes: int | None = None) -> float: ...
def shuffle(value: float, lane: int, width: int = 32, lanes: int | None = None) -> float:
    """The value of another lane of the warp."""
    _only_in_kernels("shuffle")


def shuffle_up(value: float, delta: int, width: int = 32, lanes: int | None = None) -> float:
    """The value of the lane `delta` below."""
    _only_in_kernels("shuffle_up")


def shuffle_down(value: float, delta: int, width: int = 32, lanes: int | None = None) -> float:
    """The value of the lane `delta` above."""
    _only_in_kernels("shuffle_down")


def shuffle_xor(value: float, mask: int, width: int = 32, lanes: int | None = None) -> float:
    """The value of the lane whose number differs in these bits."""
    _only_in_kernels("shuffle_xor")


def vote_any(predicate: object, lanes: int | None = None) -> bool:
    """Whether the predicate holds in any lane of the warp."""
    _only_in_kernels("vote_any")


def vote_all(predicate: object, lanes: int | None = None) -> bool:
    """Whether the predicate holds in all lanes of the warp."""
    _only_in_kernels("vote_all")


def ballot(predicate: object, lanes: int | None = None) -> int:
    """A bit for each lane of the warp: whether the predicate holds there."""
    _only_in_kernels("ballot")


def rsqrt_approx(x: float) -> float:
    """1 / sqrt(x) by the device's own instruction: f32 only, to two bits or so, denormals are zero."""
    _only_in_kernels("rsqrt_approx")


def bitcast(x: float, dtype: DType) -> float:
    """The same bits as another type of the same size."""
    _only_in_kernels("bitcast")


def atomic_add(
    array: Any, index: int | tuple[int, ...], value: float, scope: str = "device", order: str = "relaxed", rank: int | None = None
) -> float:
    """Add in one step for all threads; gives the old value."""
    _only_in_kernels("atomic_add")


def atomic_sub(
    array: Any, index: int | tuple[int, ...], value: float, scope: str = "device", order: str = "relaxed", rank: int | None = None
) -> float:
    """Subtract in one step for all threads; gives the old value."""
    _only_in_kernels("atomic_sub")


def atomic_min(
    array: Any, index: int | tuple[int, ...], value: float, scope: str = "device", order: str = "relaxed", rank: int | None = None
) -> float:
    """Keep the smaller in one step for all threads; gives the old value."""
    _only_in_kernels("atomic_min")


def atomic_max(
    array: Any, index: int | tuple[int, ...], value: float, scope: str = "device", order: str = "relaxed", rank: int | None = None
) -> float:
    """Keep the larger in one step for all threads; gives the old value."""
    _only_in_kernels("atomic_max")


def atomic_and(
    array: Any, index: int | tuple[int, ...], value: int, scope: str = "device", order: str = "relaxed", rank: int | None = None
) -> int:
    """Bitwise and in one step for all threads; gives the old value."""
    _only_in_kernels("atomic_and")


def atomic_or(
    array: Any, index: int | tuple[int, ...], value: int, scope: str = "device", order: str = "relaxed", rank: int | None = None
) -> int:
    """Bitwise or in one step for all threads; gives the old value."""
    _only_in_kernels("atomic_or")


def atomic_xor(
    array: Any, index: int | tuple[int, ...], value: int, scope: str = "device", order: str = "relaxed", rank: int | None = None
) -> int:
    """Bitwise exclusive or in one step for all threads; gives the old value."""
    _only_in_kernels("atomic_xor")


def atomic_exchange(
    array: Any, index: int | tuple[int, ...], value: float, scope: str = "device", order: str = "relaxed", rank: int | None = None
) -> float:
    """Put a value there; gives the old one."""
    _only_in_kernels("atomic_exchange")


def atomic_cas(
    array: Any, index: int | tuple[int, ...], expected: float, value: float, scope: str = "device", order: str = "relaxed", rank: int | None = None
) -> float:
    """Put a value there if the old one is as expected; gives the old one."""
    _only_in_kernels("atomic_cas")


def atomic_inc(
    array: Any, index: int | tuple[int, ...], value: int, scope: str = "device", order: str = "relaxed", rank: int | None = None
) -> int:
    """One more, or 0 where the old value is `value` or above; gives the old one."""
    _only_in_kernels("atomic_inc")


def atomic_dec(
    array: Any, index: int | tuple[int, ...], value: int, scope: str = "device", order: str = "relaxed", rank: int | None = None
) -> int:
    """One less, or `value` where the old one is 0 or above `value`; gives the old one."""
    _only_in_kernels("atomic_dec")
