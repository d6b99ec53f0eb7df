"""The kernel gallery: elementwise kernels and reductions as a user writes them, each with what NumPy says it should give.

A kernel is an ordinary Python function over arrays; the first call compiles it. `GALLERY` lists every kernel with inputs of any
size and a reference, which gives the exact result when it is called with float64 arrays. Run it with `tilewright demo`, or use it:

    import numpy as np
    from gallery import gelu

    y = gelu(np.linspace(-3, 3, 1000, dtype=np.float32))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import tilewright as tw

# -- elementwise ----------------------------------------------------------------------------------------------------


@tw.kernel
def relu(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = tw.relu(x[i])
    return out


@tw.kernel
def multiply_add(a: float, x: tw.Array, y: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = a * x[i] + y[i]
    return out


@tw.kernel
def scale(m: tw.Array, v: tw.Array) -> tw.Array:
    rows, cols = m.shape
    out = tw.empty((rows, cols), m.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = m[i, j] * v[j]
    return out


@tw.kernel
def gelu(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        inner = 0.7978845608028654 * (x[i] + 0.044715 * x[i] * x[i] * x[i])
        out[i] = 0.5 * x[i] * (1.0 + tw.tanh(inner))
    return out


@tw.kernel
def silu(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = tw.silu(x[i])
    return out


@tw.kernel
def sigmoid(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = 1.0 / (1.0 + tw.exp(-x[i]))
    return out


@tw.kernel
def transpose(m: tw.Array) -> tw.Array:
    rows, cols = m.shape
    out = tw.empty((cols, rows), m.dtype)
    for i, j in tw.grid(cols, rows):
        out[i, j] = m[j, i]
    return out


# -- reductions -----------------------------------------------------------------------------------------------------


@tw.kernel
def total(x: tw.Array) -> float:
    return tw.sum(x)


@tw.kernel
def row_sums(m: tw.Array) -> tw.Array:
    return tw.sum(m, axis=1)


@tw.kernel
def column_sums(m: tw.Array) -> tw.Array:
    return tw.sum(m, axis=0)


@tw.kernel
def root_mean_square(x: tw.Array) -> float:
    (n,) = x.shape
    squares = 0.0
    for i in range(n):
        squares += x[i] * x[i]
    return tw.sqrt(squares / n)


@tw.kernel
def mean_and_variance(x: tw.Array) -> tuple[float, float]:
    (n,) = x.shape
    mean = tw.sum(x) / n
    squares = 0.0
    for i in range(n):
        squares += (x[i] - mean) * (x[i] - mean)
    return mean, squares / n


@tw.kernel
def largest(x: tw.Array) -> float:
    return tw.max(x)


@tw.kernel
def smallest(x: tw.Array) -> float:
    return tw.min(x)


@tw.kernel
def where_largest(x: tw.Array) -> int:
    return tw.argmax(x)


@tw.kernel
def best_columns(m: tw.Array) -> tw.Array:
    return tw.argmax(m, axis=1)


@tw.kernel
def any_set(flags: tw.Array) -> bool:
    return tw.any(flags)


@tw.kernel
def all_set(flags: tw.Array) -> bool:
    return tw.all(flags)


# -- the list -------------------------------------------------------------------------------------------------------

Value = NDArray[np.generic] | float
Make = Callable[[np.random.Generator, int], dict[str, Value]]
"""Inputs by name, of about this many elements in all."""


@dataclass(frozen=True)
class Example:
    """One kernel of the gallery, in Python or ZynML."""

    name: str
    program: Callable[..., object] | Path
    """A Python kernel, or the file of a ZynML program."""
    make: Make
    reference: Callable[..., object]
    """The result with NumPy: exact on float64 arrays, and what NumPy does in the same time on others."""
    result: str = ""
    """ZynML: the name of the result."""


def _vector(random: np.random.Generator, n: int) -> dict[str, Value]:
    return {"x": random.standard_normal(n, np.float32)}


def _vectors(random: np.random.Generator, n: int) -> dict[str, Value]:
    return {"a": 2.5, "x": random.standard_normal(n, np.float32), "y": random.standard_normal(n, np.float32)}


def _matrix(random: np.random.Generator, n: int) -> dict[str, Value]:
    cols = max(1, round(n**0.5))
    return {"m": random.standard_normal((max(1, n // cols), cols), np.float32)}


def _matrix_and_vector(random: np.random.Generator, n: int) -> dict[str, Value]:
    made = _matrix(random, n)
    m = made["m"]
    assert isinstance(m, np.ndarray)
    return {"m": m, "v": random.standard_normal(m.shape[1], np.float32)}


def _few_flags(random: np.random.Generator, n: int) -> dict[str, Value]:
    flags = np.zeros(n, np.bool_)
    flags[-1] = True
    return {"flags": flags}


def _most_flags(random: np.random.Generator, n: int) -> dict[str, Value]:
    flags = np.ones(n, np.bool_)
    flags[-1] = False
    return {"flags": flags}


def _renamed(make: Make, names: dict[str, str]) -> Make:
    return lambda random, n: {names[name]: value for name, value in make(random, n).items()}


def _gelu(x: NDArray[np.floating]) -> object:
    return 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def _sigmoid(x: NDArray[np.floating]) -> object:
    return 1 / (1 + np.exp(-x))


def _silu(x: NDArray[np.floating]) -> object:
    return x / (1 + np.exp(-x))


def _relu(x: NDArray[np.floating]) -> object:
    return np.maximum(x, 0)


def _axpy(a: float, x: NDArray[np.floating], y: NDArray[np.floating]) -> object:
    return a * x + y


_DATA = {"x": "data"}
_MATRIX = {"m": "matrix", "v": "vector"}
_ZYN = Path(__file__).parent / "zyn"

GALLERY: tuple[Example, ...] = (
    Example("relu", relu, _vector, _relu),
    Example("multiply_add", multiply_add, _vectors, _axpy),
    Example("scale", scale, _matrix_and_vector, lambda m, v: m * v),
    Example("gelu", gelu, _vector, _gelu),
    Example("silu", silu, _vector, _silu),
    Example("sigmoid", sigmoid, _vector, _sigmoid),
    Example("transpose", transpose, _matrix, lambda m: np.ascontiguousarray(m.T)),
    Example("total", total, _vector, np.sum),
    Example("row_sums", row_sums, _matrix, lambda m: np.sum(m, axis=1)),
    Example("column_sums", column_sums, _matrix, lambda m: np.sum(m, axis=0)),
    Example("root_mean_square", root_mean_square, _vector, lambda x: np.sqrt(np.mean(x * x))),
    Example("mean_and_variance", mean_and_variance, _vector, lambda x: (np.mean(x), np.var(x))),
    Example("largest", largest, _vector, np.max),
    Example("smallest", smallest, _vector, np.min),
    Example("where_largest", where_largest, _vector, np.argmax),
    Example("best_columns", best_columns, _matrix, lambda m: np.argmax(m, axis=1)),
    Example("any_set", any_set, _few_flags, np.any),
    Example("all_set", all_set, _most_flags, np.all),
    Example("relu.zyn", _ZYN / "relu.zyn", _vector, _relu, "y"),
    Example("axpy.zyn", _ZYN / "axpy.zyn", _vectors, _axpy, "result"),
    Example("scale.zyn", _ZYN / "scale.zyn", _renamed(_matrix_and_vector, _MATRIX), lambda m, v: m * v, "scaled"),
    Example("sum.zyn", _ZYN / "sum.zyn", _renamed(_vector, _DATA), np.sum, "total"),
    Example("max.zyn", _ZYN / "max.zyn", _renamed(_vector, _DATA), np.max, "largest"),
    Example("norm.zyn", _ZYN / "norm.zyn", _renamed(_vector, _DATA), lambda x: np.sqrt(np.sum(x * x)), "norm"),
    Example("row_sums.zyn", _ZYN / "row_sums.zyn", _renamed(_matrix, _MATRIX), lambda m: np.sum(m, axis=1), "row_sums"),
    Example("argmax.zyn", _ZYN / "argmax.zyn", _renamed(_vector, _DATA), np.argmax, "where_largest"),
)
