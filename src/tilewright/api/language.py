"""The words of the kernel language, as Python sees them.

Inside a function marked `@tilewright.kernel` these names are read by the compiler, never executed. They exist so that editors
and type checkers understand kernels; calling one elsewhere is an error that says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn, overload

from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError

inf = float("inf")


def _only_in_kernels(name: str) -> NoReturn:
    raise UserError.at("TW005", f"tilewright.{name} has a meaning only inside a kernel", help="mark the function with @tilewright.kernel")


class Array:
    """An array in a kernel: `x[i, j]` is an element, `x[i, a:b]` a part, `x.shape` its extents, `x.dtype` its element type.

    Elements are floats to a type checker, whatever the array holds; so an element may be an index too, as in `x[places[i]]`. So is
    a row that is written without a slice, `x[i]` for `x[i, :]`.
    """

    shape: tuple[int, ...]
    dtype: DType
    size: int

    @overload
    def __getitem__(self, index: float | tuple[float, ...]) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(self, index: slice | tuple[float | slice, ...]) -> Array: ...
    def __getitem__(self, index: float | slice | tuple[float | slice, ...]) -> float | Array:
        _only_in_kernels("Array")

    def __setitem__(self, index: float | slice | tuple[float | slice, ...], value: float | Array) -> None:
        _only_in_kernels("Array")

    def __len__(self) -> int:
        _only_in_kernels("Array")

    def __add__(self, other: Array | float) -> Array:
        _only_in_kernels("Array")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__

    def __matmul__(self, other: Array) -> Array:
        _only_in_kernels("Array")

    @property
    def T(self) -> Array:
        _only_in_kernels("Array")

    def __neg__(self) -> Array:
        _only_in_kernels("Array")


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
        raise UserError.at(
            "TW005", f"tilewright.{self.__simt__}.{name} has a meaning only inside a GPU kernel", help="mark the function with @tilewright.gpu"
        )

    def __repr__(self) -> str:
        return f"<tilewright.{self.__simt__} of explicit kernels>"


class Grid(Axes):
    """`for i, j in grid(rows, cols):` runs the body for every pair, in parallel.

    In an explicit kernel `grid.x` is the thread's index in the whole grid along x, and `grid.size.x` the number of blocks.
    """

    __name__ = "grid"
    size: Axes

    @overload
    def __call__(self, n0: int, /) -> Iterator[int]: ...
    @overload
    def __call__(self, n0: int, n1: int, /) -> Iterator[tuple[int, int]]: ...
    @overload
    def __call__(self, n0: int, n1: int, n2: int, /) -> Iterator[tuple[int, int, int]]: ...
    @overload
    def __call__(self, n0: int, n1: int, n2: int, n3: int, /) -> Iterator[tuple[int, int, int, int]]: ...
    def __call__(self, *extents: int) -> Iterator[int] | Iterator[tuple[int, ...]]:
        _only_in_kernels("grid")


grid = Grid("grid")


def empty(shape: int | tuple[int, ...], dtype: DType) -> Array:
    """A new array to be written and returned."""
    _only_in_kernels("empty")


def zeros(shape: int | tuple[int, ...], dtype: DType | None = None) -> Array:
    """A new array of zeros; inside a loop a tile of zeros, which needs no dtype."""
    _only_in_kernels("zeros")


def ones(shape: int | tuple[int, ...], dtype: DType | None = None) -> Array:
    """A new array of ones; inside a loop a tile of ones, which needs no dtype."""
    _only_in_kernels("ones")


def full(shape: int | tuple[int, ...], value: float, dtype: DType | None = None) -> Array:
    """A new array of one value; inside a loop a tile of it, which needs no dtype."""
    _only_in_kernels("full")


def shared(shape: int | tuple[int, ...], dtype: DType | None = None, align: int = 16) -> Array:
    """Inside a loop: an array that each iteration of the loops around has for itself. In an explicit kernel: an array that the threads of a
    block share, at a multiple of `align` bytes."""
    _only_in_kernels("shared")


def barrier() -> None:
    """What stands before it in the loop is done for all elements of shared arrays."""
    _only_in_kernels("barrier")


def dot(a: Array | float, b: Array | float) -> float:
    """The sum of products of two vectors: rows or slices of arrays."""
    _only_in_kernels("dot")


def matmul(a: Array | float, b: Array | float) -> Array:
    """`a @ b`"""
    _only_in_kernels("matmul")


def transpose(x: Array) -> Array:
    """The axes in reverse order."""
    _only_in_kernels("transpose")


def row_max(x: Array) -> Array:
    """The largest element of each row, as a column."""
    _only_in_kernels("row_max")


def row_min(x: Array) -> Array:
    """The smallest element of each row, as a column."""
    _only_in_kernels("row_min")


def row_sum(x: Array) -> Array:
    """The sum of each row, as a column."""
    _only_in_kernels("row_sum")


def empty_like(array: Array) -> Array:
    """A new array of the same shape and dtype."""
    _only_in_kernels("empty_like")


def zeros_like(array: Array) -> Array:
    """A new array of zeros of the same shape and dtype."""
    _only_in_kernels("zeros_like")


def cast(value: float, dtype: DType) -> float:
    """The value converted to a dtype."""
    _only_in_kernels("cast")


def where(condition: bool, a: float, b: float) -> float:
    """a where the condition holds, else b."""
    _only_in_kernels("where")


def fma(a: float, b: float, c: float) -> float:
    """a*b + c with one rounding."""
    _only_in_kernels("fma")


def clamp(x: float, low: float, high: float) -> float:
    """x kept between low and high."""
    _only_in_kernels("clamp")


@overload
def exp(x: float) -> float: ...
@overload
def exp(x: Array) -> Array: ...
def exp(x: float | Array) -> float | Array:
    """e to the x."""
    _only_in_kernels("exp")


@overload
def exp2(x: float) -> float: ...
@overload
def exp2(x: Array) -> Array: ...
def exp2(x: float | Array) -> float | Array:
    """2 to the x."""
    _only_in_kernels("exp2")


@overload
def log(x: float) -> float: ...
@overload
def log(x: Array) -> Array: ...
def log(x: float | Array) -> float | Array:
    """Natural logarithm."""
    _only_in_kernels("log")


@overload
def log2(x: float) -> float: ...
@overload
def log2(x: Array) -> Array: ...
def log2(x: float | Array) -> float | Array:
    """Logarithm to base 2."""
    _only_in_kernels("log2")


@overload
def sin(x: float) -> float: ...
@overload
def sin(x: Array) -> Array: ...
def sin(x: float | Array) -> float | Array:
    """Sine, radians."""
    _only_in_kernels("sin")


@overload
def cos(x: float) -> float: ...
@overload
def cos(x: Array) -> Array: ...
def cos(x: float | Array) -> float | Array:
    """Cosine, radians."""
    _only_in_kernels("cos")


@overload
def tan(x: float) -> float: ...
@overload
def tan(x: Array) -> Array: ...
def tan(x: float | Array) -> float | Array:
    """Tangent, radians."""
    _only_in_kernels("tan")


@overload
def tanh(x: float) -> float: ...
@overload
def tanh(x: Array) -> Array: ...
def tanh(x: float | Array) -> float | Array:
    """Hyperbolic tangent."""
    _only_in_kernels("tanh")


@overload
def sinh(x: float) -> float: ...
@overload
def sinh(x: Array) -> Array: ...
def sinh(x: float | Array) -> float | Array:
    """Hyperbolic sine."""
    _only_in_kernels("sinh")


@overload
def cosh(x: float) -> float: ...
@overload
def cosh(x: Array) -> Array: ...
def cosh(x: float | Array) -> float | Array:
    """Hyperbolic cosine."""
    _only_in_kernels("cosh")


@overload
def erf(x: float) -> float: ...
@overload
def erf(x: Array) -> Array: ...
def erf(x: float | Array) -> float | Array:
    """Error function."""
    _only_in_kernels("erf")


@overload
def sqrt(x: float) -> float: ...
@overload
def sqrt(x: Array) -> Array: ...
def sqrt(x: float | Array) -> float | Array:
    """Square root."""
    _only_in_kernels("sqrt")


@overload
def rsqrt(x: float) -> float: ...
@overload
def rsqrt(x: Array) -> Array: ...
def rsqrt(x: float | Array) -> float | Array:
    """1 / sqrt(x)."""
    _only_in_kernels("rsqrt")


@overload
def sigmoid(x: float) -> float: ...
@overload
def sigmoid(x: Array) -> Array: ...
def sigmoid(x: float | Array) -> float | Array:
    """1 / (1 + exp(-x))."""
    _only_in_kernels("sigmoid")


@overload
def floor(x: float) -> float: ...
@overload
def floor(x: Array) -> Array: ...
def floor(x: float | Array) -> float | Array:
    """Round down."""
    _only_in_kernels("floor")


@overload
def ceil(x: float) -> float: ...
@overload
def ceil(x: Array) -> Array: ...
def ceil(x: float | Array) -> float | Array:
    """Round up."""
    _only_in_kernels("ceil")


@overload
def trunc(x: float) -> float: ...
@overload
def trunc(x: Array) -> Array: ...
def trunc(x: float | Array) -> float | Array:
    """Round to zero."""
    _only_in_kernels("trunc")


@overload
def relu(x: float) -> float: ...
@overload
def relu(x: Array) -> Array: ...
def relu(x: float | Array) -> float | Array:
    """max(x, 0)."""
    _only_in_kernels("relu")


@overload
def silu(x: float) -> float: ...
@overload
def silu(x: Array) -> Array: ...
def silu(x: float | Array) -> float | Array:
    """x * sigmoid(x)."""
    _only_in_kernels("silu")


@overload
def gelu(x: float) -> float: ...
@overload
def gelu(x: Array) -> Array: ...
def gelu(x: float | Array) -> float | Array:
    """GELU, tanh form."""
    _only_in_kernels("gelu")


@overload
def softplus(x: float) -> float: ...
@overload
def softplus(x: Array) -> Array: ...
def softplus(x: float | Array) -> float | Array:
    """log(1 + exp(x))."""
    _only_in_kernels("softplus")


@overload
def abs(x: float) -> float: ...
@overload
def abs(x: Array) -> Array: ...
def abs(x: float | Array) -> float | Array:
    """The absolute value."""
    _only_in_kernels("abs")


@overload
def round(x: float) -> float: ...
@overload
def round(x: Array) -> Array: ...
def round(x: float | Array) -> float | Array:
    """The nearest integer, halves to even."""
    _only_in_kernels("round")


@overload
def pow(a: float, b: float) -> float: ...
@overload
def pow(a: Array, b: Array | float) -> Array: ...
def pow(a: float | Array, b: float | Array) -> float | Array:
    """a to the b."""
    _only_in_kernels("pow")


def isnan(x: float) -> bool:
    """Whether x is NaN."""
    _only_in_kernels("isnan")


def minimum(a: float, b: float) -> float:
    """The smaller; NaN if either is."""
    _only_in_kernels("minimum")


def maximum(a: float, b: float) -> float:
    """The larger; NaN if either is."""
    _only_in_kernels("maximum")


@overload
def reduce(op: str, x: Array) -> float: ...
@overload
def reduce(op: str, x: Array, axis: int | tuple[int, ...]) -> Array: ...
def reduce(op: str, x: Array, axis: int | tuple[int, ...] | None = None) -> float | Array:
    """All elements combined by `op`, one of + * min max and or argmin argmax, over an axis, several, or all."""
    _only_in_kernels("reduce")


@overload
def sum(x: Array) -> float: ...
@overload
def sum(x: Array, axis: int | tuple[int, ...]) -> Array: ...
def sum(x: Array, axis: int | tuple[int, ...] | None = None) -> float | Array:
    """Sum over an axis, several, or all."""
    _only_in_kernels("sum")


@overload
def prod(x: Array) -> float: ...
@overload
def prod(x: Array, axis: int | tuple[int, ...]) -> Array: ...
def prod(x: Array, axis: int | tuple[int, ...] | None = None) -> float | Array:
    """Product over an axis, several, or all."""
    _only_in_kernels("prod")


@overload
def min(x: Array) -> float: ...
@overload
def min(x: Array, axis: int | tuple[int, ...]) -> Array: ...
def min(x: Array, axis: int | tuple[int, ...] | None = None) -> float | Array:
    """Smallest element over an axis, several, or all."""
    _only_in_kernels("min")


@overload
def max(x: Array) -> float: ...
@overload
def max(x: Array, axis: int | tuple[int, ...]) -> Array: ...
def max(x: Array, axis: int | tuple[int, ...] | None = None) -> float | Array:
    """Largest element over an axis, several, or all."""
    _only_in_kernels("max")


@overload
def all(x: Array) -> bool: ...
@overload
def all(x: Array, axis: int | tuple[int, ...]) -> Array: ...
def all(x: Array, axis: int | tuple[int, ...] | None = None) -> bool | Array:
    """Whether all are true, over an axis, several, or all."""
    _only_in_kernels("all")


@overload
def any(x: Array) -> bool: ...
@overload
def any(x: Array, axis: int | tuple[int, ...]) -> Array: ...
def any(x: Array, axis: int | tuple[int, ...] | None = None) -> bool | Array:
    """Whether any is true, over an axis, several, or all."""
    _only_in_kernels("any")


@overload
def argmin(x: Array) -> int: ...
@overload
def argmin(x: Array, axis: int | tuple[int, ...]) -> Array: ...
def argmin(x: Array, axis: int | tuple[int, ...] | None = None) -> int | Array:
    """Index of the smallest element over an axis, several, or all."""
    _only_in_kernels("argmin")


@overload
def argmax(x: Array) -> int: ...
@overload
def argmax(x: Array, axis: int | tuple[int, ...]) -> Array: ...
def argmax(x: Array, axis: int | tuple[int, ...] | None = None) -> int | Array:
    """Index of the largest element over an axis, several, or all."""
    _only_in_kernels("argmax")
