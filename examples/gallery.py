"""The kernel gallery: elementwise kernels, reductions and contractions as a user writes them, each with what NumPy says it should give.

A kernel is an ordinary Python function over arrays; the first call compiles it. `GALLERY` and `CONTRACTIONS` list every kernel with inputs of
any size and a reference, which gives the exact result when it is called with float64 arrays. Run it with `tilewright demo`, or use it:

    import numpy as np
    from gallery import gelu

    y = gelu(np.linspace(-3, 3, 1000, dtype=np.float32))
"""

from __future__ import annotations

import functools
import operator
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


# -- contractions: sums of products, computed by the device's matrix units where it has them --------------------------


@tw.kernel
def matmul(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def linear(x: tw.Array, w: tw.Array, bias: tw.Array, residual: tw.Array) -> tw.Array:
    """A layer of a network, with all that follows it: `w` has a row for each output."""
    m, k = x.shape
    n = w.shape[0]
    out = tw.empty((m, n), x.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += x[i, p] * w[j, p]
        out[i, j] = tw.gelu(total + bias[j]) + residual[i, j]
    return out


@tw.kernel
def conv2d(x: tw.Array, w: tw.Array) -> tw.Array:
    """Images [batch, height, width, channels], windows [features, rows, columns, channels], one pixel of zeros around each image."""
    batch, height, width, channels = x.shape
    features, rows, columns, _ = w.shape
    out = tw.empty((batch, height - rows + 3, width - columns + 3, features), x.dtype)
    for b, i, j, f in tw.grid(batch, height - rows + 3, width - columns + 3, features):
        total = 0.0
        for r in range(rows):
            for s in range(columns):
                for c in range(channels):
                    y, z = i + r - 1, j + s - 1
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, y, z, c] * w[f, r, s, c]
        out[b, i, j, f] = total
    return out


# -- the lists ------------------------------------------------------------------------------------------------------

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
    operations: Callable[..., float] | None = None
    """Contractions: how many multiplications and additions the inputs take."""
    tolerance: float = 1e-5
    """Largest error that is right, in units of the largest magnitude in the result."""


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


def _side(n: int, arrays: int) -> int:
    """The side of square matrices with n elements in all; of larger ones a multiple of 16 or 64, as most are."""
    side = max(1, round((n / arrays) ** 0.5))
    return int(side if side < 16 else side // 16 * 16 if side < 256 else side // 64 * 64)


def _normal(random: np.random.Generator, *shape: int, dtype: type[np.floating] = np.float32) -> NDArray[np.generic]:
    return random.standard_normal(shape, np.float32).astype(dtype)


def _factors(random: np.random.Generator, n: int, dtype: type[np.floating] = np.float32) -> dict[str, Value]:
    side = _side(n, 3)
    return {"a": _normal(random, side, side, dtype=dtype), "b": _normal(random, side, side, dtype=dtype)}


def _half_factors(random: np.random.Generator, n: int) -> dict[str, Value]:
    return _factors(random, n, np.float16)


def _batch_of_factors(random: np.random.Generator, n: int) -> dict[str, Value]:
    side = _side(n, 12)
    return {"a": _normal(random, 4, side, side), "b": _normal(random, 4, side, side)}


def _layer(random: np.random.Generator, n: int) -> dict[str, Value]:
    side = _side(n, 4)
    x, w, residual = (_normal(random, side, side, dtype=np.float16) for _ in range(3))
    return {"x": x, "w": w, "bias": _normal(random, side, dtype=np.float16), "residual": residual}


def _image_sizes(n: int) -> tuple[int, int, int]:
    """Images, pixels along a side, and channels."""
    side, channels = (56, 64) if n >= 1 << 20 else (14, 64) if n >= 1 << 14 else (6, 8)
    return max(1, n // (2 * channels * side * side)), side, channels


def _image_and_windows(random: np.random.Generator, n: int) -> dict[str, Value]:
    batch, side, channels = _image_sizes(n)
    return {"x": _normal(random, batch, side, side, channels), "w": _normal(random, channels, 3, 3, channels)}


def _half_image_and_windows(random: np.random.Generator, n: int) -> dict[str, Value]:
    return {name: np.asarray(value, np.float16) for name, value in _image_and_windows(random, n).items()}


def _planes_and_windows(random: np.random.Generator, n: int) -> dict[str, Value]:
    batch, side, channels = _image_sizes(n)
    image, windows = _normal(random, batch, channels, side, side), _normal(random, channels, channels, 3, 3)
    return {"image": image, "weights": windows, "bias": _normal(random, channels)}


def _planes_and_window_each(random: np.random.Generator, n: int) -> dict[str, Value]:
    batch, side, channels = _image_sizes(n)
    return {"image": _normal(random, batch, channels, side, side), "windows": _normal(random, channels, 3, 3)}


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


def _gelu(x: NDArray[np.floating]) -> NDArray[np.floating]:
    return np.asarray(0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))))


def _sigmoid(x: NDArray[np.floating]) -> object:
    return 1 / (1 + np.exp(-x))


def _silu(x: NDArray[np.floating]) -> object:
    return x / (1 + np.exp(-x))


def _relu(x: NDArray[np.floating]) -> object:
    return np.maximum(x, 0)


def _axpy(a: float, x: NDArray[np.floating], y: NDArray[np.floating]) -> object:
    return a * x + y


def _wide(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """At least f32: NumPy has no fast product of halves."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


def _matmul(a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.floating]:
    return _wide(a) @ _wide(b)


def _batched(a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.floating]:
    return a @ b.swapaxes(1, 2)


def _linear(
    x: NDArray[np.floating], w: NDArray[np.floating], bias: NDArray[np.floating], residual: NDArray[np.floating]
) -> object:
    return _gelu(_wide(x) @ _wide(w).T + bias) + residual


def _conv2d(x: NDArray[np.floating], w: NDArray[np.floating]) -> NDArray[np.floating]:
    framed, windows = np.pad(_wide(x), ((0, 0), (1, 1), (1, 1), (0, 0))), _wide(w)
    _, rows, columns, _ = w.shape
    height, width = framed.shape[1] - rows + 1, framed.shape[2] - columns + 1
    parts = (framed[:, r : r + height, s : s + width] @ windows[:, r, s].T for r in range(rows) for s in range(columns))
    return functools.reduce(operator.add, parts)


def _conv2d_zyn(image: NDArray[np.floating], weights: NDArray[np.floating], bias: NDArray[np.floating]) -> object:
    full = _conv2d(np.ascontiguousarray(image.transpose(0, 2, 3, 1)), weights.transpose(0, 2, 3, 1))
    return (full[:, ::2, ::2] + bias).transpose(0, 3, 1, 2)


def _depthwise(image: NDArray[np.floating], windows: NDArray[np.floating]) -> object:
    _, rows, columns = windows.shape
    height, width = image.shape[2] - rows + 1, image.shape[3] - columns + 1
    places = [(r, s) for r in range(rows) for s in range(columns)]
    parts = (image[:, :, r : r + height, s : s + width] * windows[:, r, s, None, None] for r, s in places)
    return functools.reduce(operator.add, parts)


def _product_operations(a: NDArray[np.generic], b: NDArray[np.generic]) -> float:
    return float(2.0 * a.size * b.shape[1])


def _layer_operations(x: NDArray[np.generic], w: NDArray[np.generic], bias: object, residual: object) -> float:
    return float(2.0 * x.size * w.shape[0])


def _window_operations(x: NDArray[np.generic], w: NDArray[np.generic]) -> float:
    return float(2.0 * x.size * w.size / w.shape[-1])


def _strided_window_operations(image: NDArray[np.generic], weights: NDArray[np.generic], bias: object) -> float:
    return float(0.5 * image.size * weights.size / weights.shape[1])


Floats = NDArray[np.floating]


def _scaled(m: Floats, v: Floats) -> Floats:
    return np.asarray(m * v)


def _transposed(m: Floats) -> Floats:
    return np.ascontiguousarray(m.T)


def _row_sums(m: Floats) -> Floats:
    return np.asarray(np.sum(m, axis=1))


def _column_sums(m: Floats) -> Floats:
    return np.asarray(np.sum(m, axis=0))


def _root_mean_square(x: Floats) -> float:
    return float(np.sqrt(np.mean(x * x)))


def _mean_and_variance(x: Floats) -> tuple[float, float]:
    return float(np.mean(x)), float(np.var(x))


def _best_columns(m: Floats) -> object:
    return np.argmax(m, axis=1)


def _norm(x: Floats) -> float:
    return float(np.sqrt(np.sum(x * x)))


_HALF = 1e-3
"""f16 is rounded to 11 bits."""
_DATA = {"x": "data"}
_MATRIX = {"m": "matrix", "v": "vector"}
_ZYN = Path(__file__).parent / "zyn"

GALLERY: tuple[Example, ...] = (
    Example("relu", relu, _vector, _relu),
    Example("multiply_add", multiply_add, _vectors, _axpy),
    Example("scale", scale, _matrix_and_vector, _scaled),
    Example("gelu", gelu, _vector, _gelu),
    Example("silu", silu, _vector, _silu),
    Example("sigmoid", sigmoid, _vector, _sigmoid),
    Example("transpose", transpose, _matrix, _transposed),
    Example("total", total, _vector, np.sum),
    Example("row_sums", row_sums, _matrix, _row_sums),
    Example("column_sums", column_sums, _matrix, _column_sums),
    Example("root_mean_square", root_mean_square, _vector, _root_mean_square),
    Example("mean_and_variance", mean_and_variance, _vector, _mean_and_variance),
    Example("largest", largest, _vector, np.max),
    Example("smallest", smallest, _vector, np.min),
    Example("where_largest", where_largest, _vector, np.argmax),
    Example("best_columns", best_columns, _matrix, _best_columns),
    Example("any_set", any_set, _few_flags, np.any),
    Example("all_set", all_set, _most_flags, np.all),
    Example("relu.zyn", _ZYN / "relu.zyn", _vector, _relu, "y"),
    Example("axpy.zyn", _ZYN / "axpy.zyn", _vectors, _axpy, "result"),
    Example("scale.zyn", _ZYN / "scale.zyn", _renamed(_matrix_and_vector, _MATRIX), _scaled, "scaled"),
    Example("sum.zyn", _ZYN / "sum.zyn", _renamed(_vector, _DATA), np.sum, "total"),
    Example("max.zyn", _ZYN / "max.zyn", _renamed(_vector, _DATA), np.max, "largest"),
    Example("norm.zyn", _ZYN / "norm.zyn", _renamed(_vector, _DATA), _norm, "norm"),
    Example("row_sums.zyn", _ZYN / "row_sums.zyn", _renamed(_matrix, _MATRIX), _row_sums, "row_sums"),
    Example("argmax.zyn", _ZYN / "argmax.zyn", _renamed(_vector, _DATA), np.argmax, "where_largest"),
)

CONTRACTIONS: tuple[Example, ...] = (
    Example("matmul", matmul, _factors, _matmul, "", _product_operations),
    Example("matmul f16", matmul, _half_factors, _matmul, "", _product_operations, _HALF),
    Example("linear f16", linear, _layer, _linear, "", _layer_operations, _HALF),
    Example("conv2d", conv2d, _image_and_windows, _conv2d, "", _window_operations),
    Example("conv2d f16", conv2d, _half_image_and_windows, _conv2d, "", _window_operations, _HALF),
    Example("matmul.zyn", _ZYN / "matmul.zyn", _factors, _matmul, "product", _product_operations),
    Example("batched_matmul.zyn", _ZYN / "batched_matmul.zyn", _batch_of_factors, _batched, "products", _product_operations),
    Example("conv2d.zyn", _ZYN / "conv2d.zyn", _planes_and_windows, _conv2d_zyn, "features", _strided_window_operations),
    Example("depthwise.zyn", _ZYN / "conv2d_depthwise.zyn", _planes_and_window_each, _depthwise, "filtered"),
)
