"""Words with members, as Python sees them: arrays, the axes of threads and blocks, warps, clusters.

Inside kernels these names are read by the compiler, never executed. They exist so that editors and type checkers understand
kernels; using one elsewhere is an error that says so. Words that are plain functions are made from their rows: `python_words`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeAlias, TypeVar, overload

from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError

OBJECTS = ("Array", "GpuBuffer", "InOut", "block", "cluster", "device", "grid", "inf", "thread", "warp")
"""What `tilewright` offers of this module."""

T = TypeVar("T")
A = TypeVar("A", bound="KernelArray")
F = TypeVar("F", bound=Callable[..., object])
Index = int | tuple[int, ...]
Fragment = tuple[Any, ...]
"""Numbers in the registers of a warp's threads."""

inf = float("inf")
"""Infinity."""


def refuse(name: str, explicit: bool = False) -> NoReturn:
    """A word is used outside of a kernel."""
    where, mark = ("a GPU kernel", "gpu") if explicit else ("a kernel", "kernel")
    raise UserError.at("TW005", f"tilewright.{name} has a meaning only inside {where}", help=f"mark the function with @tilewright.{mark}")


Part: TypeAlias = "slice | Array | EllipsisType | None"
"""An index that leaves an axis, or makes one."""


if TYPE_CHECKING:
    import typing_extensions

    from tilewright.frontend.critical.state import NativeState

    D = typing_extensions.TypeVar("D", default=float)
    S = TypeVar("S", bound=NativeState)
    AnyDType: TypeAlias = DType | type[float] | type[int] | type[complex] | type[NativeState]
    """What type checkers take for a dtype: in annotations `tw.f32` is a number, so its name is a class to them."""
else:
    D = TypeVar("D")
    AnyDType = DType


class HostArray(Protocol):
    """What a call takes for an array: NumPy's, PyTorch's, CuPy's, JAX's and our own have these. Type checkers alone use it."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def size(self) -> Any: ...
    @property
    def T(self) -> Any: ...
    @property
    def tolist(self) -> Any: ...
    @property
    def reshape(self) -> Any: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def __setitem__(self, index: Any, value: Any, /) -> None: ...
    def __len__(self) -> int: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __radd__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __rsub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __rmul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...
    def __rtruediv__(self, other: Any, /) -> Any: ...
    def __floordiv__(self, other: Any, /) -> Any: ...
    def __mod__(self, other: Any, /) -> Any: ...
    def __pow__(self, other: Any, /) -> Any: ...
    def __and__(self, other: Any, /) -> Any: ...
    def __or__(self, other: Any, /) -> Any: ...
    def __xor__(self, other: Any, /) -> Any: ...
    def __matmul__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...
    def __neg__(self) -> Any: ...


class KernelArray(Generic[D]):
    """An array in a kernel: `x[i, j]` is an element, `x[i, a:b]` a part, `x.shape` its extents, `x.dtype` its element type.

    Elements are floats to a type checker, whatever the array holds but structs; so an element may be an index too, as in
    `x[places[i]]`. So is a row that is written without a slice, `x[i]` for `x[i, :]`.
    """

    shape: tuple[int, ...]
    dtype: DType
    size: int

    @property
    def real(self) -> KernelArray[D]:
        """The real parts of complex numbers."""
        refuse("Array")

    @property
    def imag(self) -> KernelArray[D]:
        """Their imaginary parts."""
        refuse("Array")

    def reshape(self, *shape: Any) -> KernelArray[D]:
        """The elements in another shape, without a copy."""
        refuse("Array")

    def tolist(self) -> Any:
        """Of a result: its elements in lists. Kernels have no lists."""
        refuse("Array")

    def conj(self) -> KernelArray[D]:
        """The numbers with the signs of their imaginary parts turned."""
        refuse("Array")

    if not TYPE_CHECKING:

        def __class_getitem__(cls, dtype: object) -> type[KernelArray]:
            """`tw.Array[tw.f32]`: an array of that dtype, of any rank."""
            return cls

    @overload
    def __getitem__(self: KernelArray[S], index: float | tuple[float, ...]) -> S: ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(self, index: float | tuple[float, ...]) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(self, index: Part | tuple[float | Part, ...]) -> Array: ...
    def __getitem__(self, index: float | Part | tuple[float | Part, ...]) -> Any:
        refuse("Array")

    def __setitem__(self, index: float | Part | tuple[float | Part, ...], value: complex | Array | NativeState) -> None:
        refuse("Array")

    def __len__(self) -> int:
        refuse("Array")

    def __add__(self, other: Array | float) -> Array:
        refuse("Array")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __add__
    __lt__ = __le__ = __gt__ = __ge__ = __add__

    def __iadd__(self: A, other: Array | float) -> A:
        refuse("Array")

    __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __iand__ = __ior__ = __ixor__ = __iadd__

    def __matmul__(self, other: Array | float) -> Array:
        refuse("Array")

    def numpy(self) -> Any:
        """Of a result on a GPU, outside of kernels: a copy of it on the host."""
        refuse("Array")

    @property
    def T(self) -> Array:
        refuse("Array")

    def __neg__(self) -> Array:
        refuse("Array")

    __invert__ = __neg__


if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = KernelArray[D] | HostArray
    InOut: TypeAlias = KernelArray[D] | HostArray

    class ResultArray(np.ndarray[tuple[Any, ...], np.dtype[Any]]):
        """What a call with NumPy arrays returns. A result on another device has members of its own, which are not checked."""

        def __getattr__(self, name: str) -> Any: ...
else:
    Array = KernelArray
    Array.__name__ = Array.__qualname__ = "Array"

    class InOut(Array):
        """A parameter that the kernel writes where it lies: `def append(cache: tw.InOut, row: tw.Array, position: int) -> None`."""


class Axes:
    """Three numbers of a thread in an explicit kernel, along x, y and z."""

    def __init__(self, word: str) -> None:
        self.__simt__ = word

    x: int
    y: int
    z: int

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"{self.__simt__}.{name}", explicit=True)

    def __repr__(self) -> str:
        return f"<tilewright.{self.__simt__} of explicit kernels>"


class SizedAxes(Axes):
    """The same with the extents along each axis."""

    size: Axes


class Grid(SizedAxes):
    """`for i, j in grid(rows, cols):` runs the body for every pair, in parallel.

    In an explicit kernel `grid.x` is the thread's index in the whole grid along x, and `grid.size.x` the number of blocks.
    """

    __name__ = "grid"

    @overload
    def __call__(self, n0: int | range, /) -> Iterator[int]: ...
    @overload
    def __call__(self, n0: int | range, n1: int | range, /) -> Iterator[tuple[int, int]]: ...
    @overload
    def __call__(self, n0: int | range, n1: int | range, n2: int | range, /) -> Iterator[tuple[int, int, int]]: ...
    @overload
    def __call__(self, n0: int | range, n1: int | range, n2: int | range, n3: int | range, /) -> Iterator[tuple[int, int, int, int]]: ...
    @overload
    def __call__(
        self, n0: int | range, n1: int | range, n2: int | range, n3: int | range, n4: int | range, /
    ) -> Iterator[tuple[int, int, int, int, int]]: ...
    @overload
    def __call__(
        self, n0: int | range, n1: int | range, n2: int | range, n3: int | range, n4: int | range, n5: int | range, /
    ) -> Iterator[tuple[int, int, int, int, int, int]]: ...
    def __call__(self, *extents: int | range) -> Iterator[int] | Iterator[tuple[int, ...]]:
        refuse("grid")


grid = Grid("grid")
"""`for i, j in tw.grid(rows, cols):` has iterations that may run in any order. In an explicit kernel: the thread's index in the whole grid; `grid.size`: its blocks along each axis."""
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
        refuse("GpuBuffer", explicit=True)

    def __setitem__(self, index: float, value: float) -> None:
        refuse("GpuBuffer", explicit=True)

    def __len__(self) -> int:
        refuse("GpuBuffer", explicit=True)


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


class _Cluster:
    """Blocks that run at once and reach each other's shared memory: `@tw.gpu(cluster=2)`."""

    __simt__ = "cluster"
    rank: int
    """This block's number in its cluster."""
    size: int
    """Blocks of a cluster."""

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"cluster.{name}", explicit=True)


warp = _Warp()
"""The thread's warp: `warp.size` is how many threads it has."""
cluster = _Cluster()
"""The thread block's cluster, on Hopper and later: its size, and this block's rank in it."""


def device(function: F) -> F:
    """Mark a function that kernels call. Its body takes the place of the call; plain functions are treated alike."""
    return function
