"""The table of kernels that every device must run: `CASES`, each with inputs of several sizes and its answer in NumPy.

`tests/run` runs it on the CPU and on every stage of the emulator, `tests/gpu` on a GPU. References compute in f64 (integers in
their own dtype, which wraps), results are compared in units of the result's last place.
"""

from __future__ import annotations

import itertools
import linecache
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import tilewright as tw
from support import as_wide, assert_close, data
from tilewright.base import dtypes
from tilewright.base.dtypes import DType, from_numpy
from tilewright.ir.ops import OPS

Arguments = tuple[object, ...]
Shape = tuple[int, ...]
VECTORS: tuple[Shape, ...] = ((0,), (1,), (33,), (97,))
LONG_VECTORS: tuple[Shape, ...] = ((31,), (257,), (5003,))
MATRICES: tuple[Shape, ...] = ((0, 5), (1, 1), (7, 33), (33, 5))
LONG_MATRICES: tuple[Shape, ...] = ((5, 0), (97, 129), (3, 5003), (1031, 3))
CUBES: tuple[Shape, ...] = ((2, 3, 5), (3, 1, 17))
LONG_CUBES: tuple[Shape, ...] = ((0, 2, 3), (13, 31, 33))


@dataclass(frozen=True)
class Case:
    """One kernel. `inputs` makes its arguments for a shape; `reference` gets them with floats widened to f64."""

    name: str
    kernel: tw.Kernel
    inputs: Callable[[np.random.Generator, Shape], Arguments]
    reference: Callable[..., object]
    shapes: tuple[Shape, ...] = VECTORS
    """Small enough for the emulator."""
    long_shapes: tuple[Shape, ...] = LONG_VECTORS
    """For real devices, besides."""
    ulp: float = 1.0
    scale: Callable[..., object] | None = None
    """The magnitude errors are relative to, where results can cancel: the sum of the terms' sizes."""

    def check(self, device: str, shape: Shape) -> None:
        """Run it and compare."""
        rng = np.random.default_rng(_seed(self.name, shape))
        arguments = self.inputs(rng, shape)
        with np.errstate(all="ignore"):
            wide = [as_wide(a) if isinstance(a, np.ndarray) else a for a in arguments]
            want = self.reference(*wide)
            scale = self.scale(*wide) if self.scale else None
        got = self.kernel(*arguments, device=device)
        found = got if isinstance(got, tuple) else (got,)
        wanted = want if isinstance(want, tuple) else (want,)
        assert len(found) == len(wanted)
        for position, (a, b) in enumerate(zip(found, wanted, strict=True)):
            dtype = from_numpy(np.asarray(a).dtype)
            assert dtype is not None
            assert_close(a, b, dtype, self.ulp, scale, f"{self.name}{list(shape)} on {device}, result {position}")


def _seed(name: str, shape: Shape) -> int:
    return sum(ord(c) * (k + 1) for k, c in enumerate(name)) + sum(s * 31**k for k, s in enumerate(shape))


_counter = itertools.count()


def from_text(text: str) -> tw.Kernel:
    """A kernel whose source is made up here; `inspect` finds it in the line cache, as it does for notebook cells."""
    path = f"<table {next(_counter)}>"
    source = "@tw.kernel\n" + text
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    names: dict[str, object] = {"tw": tw}
    exec(compile(source, path, "exec"), names)
    (found,) = (v for v in names.values() if isinstance(v, tw.Kernel))
    return found


def pointwise(expression: str, count: int, dtype: str = "x.dtype") -> tw.Kernel:
    """`out[i] = expression` of x, y, z at i."""
    names = "xyz"[:count]
    body = expression
    for name in names:
        body = body.replace(f"${name}", f"{name}[i]")
    return from_text(
        f"def point({', '.join(f'{n}: tw.Array' for n in names)}) -> tw.Array:\n"
        f"    (n,) = x.shape\n    out = tw.empty(n, {dtype})\n    for i in tw.grid(n):\n        out[i] = {body}\n    return out\n"
    )


def same(dtype: DType, count: int, scale: float = 2.0) -> Callable[[np.random.Generator, Shape], Arguments]:
    return lambda rng, shape: tuple(data(rng, shape, dtype, scale) for _ in range(count))


SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, -2.5, 3.0, 1e-3, -7.25)


def special(dtype: DType, count: int, positive: bool = False, scale: float = 2.0) -> Callable[[np.random.Generator, Shape], Arguments]:
    """Random floats with zeros, infinities and NaN among them."""

    def make(rng: np.random.Generator, shape: Shape) -> Arguments:
        made = []
        for number in range(count):
            values = rng.standard_normal(shape) * scale
            values = np.abs(values) if positive else values
            flat = values.reshape(-1)
            few = np.roll(np.array(SPECIAL), number * 5)[: flat.size // 2]
            flat[rng.permutation(flat.size)[: len(few)]] = few
            made.append(values.astype(dtype.numpy))
        return tuple(made)

    return make


CASES: list[Case] = []


def add(case: Case) -> None:
    assert all(c.name != case.name for c in CASES), case.name
    CASES.append(case)


INTEGERS = (dtypes.i8, dtypes.i16, dtypes.i32, dtypes.i64, dtypes.u8, dtypes.u16, dtypes.u32, dtypes.u64)
FLOATS = (dtypes.f16, dtypes.bf16, dtypes.f32, dtypes.f64)
EIGHTS = (dtypes.f8e4m3, dtypes.f8e5m2)

# -- arithmetic on every dtype ----------------------------------------------------------------------------------------

for _d in INTEGERS:

    def _three(rng: np.random.Generator, shape: Shape, dtype: DType = _d) -> Arguments:
        info = np.iinfo(dtype.numpy)
        return tuple(rng.integers(info.min, info.max, shape, dtype.numpy, endpoint=True) for _ in range(3))

    add(Case(
        f"integers_{_d}", pointwise("($x + $y) * $z - ($x ^ $y) + ($x & $z | ~$y)", 3), _three,
        lambda x, y, z: (x + y) * z - (x ^ y) + (x & z | ~y),
    ))  # fmt: skip
    add(Case(
        f"division_{_d}", from_text(
            "def division(x: tw.Array, y: tw.Array):\n    (n,) = x.shape\n    q = tw.empty(n, x.dtype)\n    r = tw.empty(n, x.dtype)\n"
            "    for i in tw.grid(n):\n        q[i] = x[i] // y[i]\n        r[i] = x[i] % y[i]\n    return q, r\n"
        ), lambda rng, shape, make=_three: make(rng, shape)[:2],
        lambda x, y: tuple(np.where(y == 0, 0, f(x, np.where(y == 0, 1, y))).astype(x.dtype) for f in (np.floor_divide, np.mod)),
    ))  # fmt: skip
    add(Case(
        f"shift_{_d}", pointwise("($x << $y) + ($x >> $y)", 2),
        lambda rng, shape, dtype=_d: (data(rng, shape, dtype), rng.integers(0, dtype.bits, shape).astype(dtype.numpy)),
        lambda x, y: (x << y) + (x >> y),
    ))  # fmt: skip
    add(Case(
        f"extremes_{_d}", pointwise("min($x, $y) if $x != $y else max($x, $z) - abs($z)", 3), _three,
        lambda x, y, z: np.where(x != y, np.minimum(x, y), np.maximum(x, z) - np.abs(z)),
    ))  # fmt: skip

for _d in FLOATS:
    add(Case(f"add_{_d}", pointwise("$x + $y", 2), special(_d, 2), lambda x, y: x + y, ulp=0.51))
    add(Case(f"subtract_{_d}", pointwise("$x - $y", 2), special(_d, 2), lambda x, y: x - y, ulp=0.51))
    add(Case(f"multiply_{_d}", pointwise("$x * $y", 2), special(_d, 2), lambda x, y: x * y, ulp=0.51))
    add(Case(f"divide_{_d}", pointwise("$x / $y", 2), special(_d, 2), lambda x, y: x / y, ulp=0.51))
    add(Case(f"fma_{_d}", pointwise("tw.fma($x, $y, $z)", 3), special(_d, 3), lambda x, y, z: x * y + z,
             ulp=1.0, scale=lambda x, y, z: np.where(np.isfinite(x * y), np.abs(x * y), 0)))  # fmt: skip
    add(Case(f"minimum_{_d}", pointwise("min($x, $y)", 2), special(_d, 2), np.minimum))
    add(Case(f"maximum_{_d}", pointwise("max($x, $y)", 2), special(_d, 2), np.maximum))
    add(Case(f"negate_{_d}", pointwise("-$x", 1), special(_d, 1), np.negative))
    add(Case(f"absolute_{_d}", pointwise("abs($x)", 1), special(_d, 1), np.abs))
    add(Case(f"rounding_{_d}", from_text(
        "def rounding(x: tw.Array):\n    (n,) = x.shape\n    a = tw.empty(n, x.dtype)\n    b = tw.empty(n, x.dtype)\n"
        "    c = tw.empty(n, x.dtype)\n    for i in tw.grid(n):\n        a[i] = tw.floor(x[i])\n        b[i] = tw.ceil(x[i])\n"
        "        c[i] = tw.trunc(x[i])\n    return a, b, c\n"
    ), special(_d, 1, scale=9.0), lambda x: (np.floor(x), np.ceil(x), np.trunc(x))))  # fmt: skip
    add(Case(f"floor_division_{_d}", pointwise("$x // $y", 2), same(_d, 2, 9.0), lambda x, y: np.floor(x / y)))
    add(Case(f"modulo_{_d}", pointwise("$x % $y", 2), same(_d, 2, 9.0), np.mod))
    add(Case(f"compare_{_d}", from_text(
        "def compare(x: tw.Array, y: tw.Array):\n    (n,) = x.shape\n"
        + "".join(f"    o{k} = tw.empty(n, tw.bool_)\n" for k in range(6)) + "    for i in tw.grid(n):\n"
        + "".join(f"        o{k} [i] = x[i] {op} y[i]\n" for k, op in enumerate(("<", "<=", ">", ">=", "==", "!=")))
        + "    return o0, o1, o2, o3, o4, o5\n"
    ), special(_d, 2), lambda x, y: (x < y, x <= y, x > y, x >= y, x == y, x != y)))  # fmt: skip
    add(Case(f"isnan_{_d}", pointwise("tw.isnan($x)", 1, "tw.bool_"), special(_d, 1), np.isnan))

for _d in EIGHTS:
    add(Case(f"scale_{_d}", pointwise("$x * 0.5 + $y", 2), same(_d, 2, 4.0), lambda x, y: x * 0.5 + y, ulp=0.51, scale=lambda x, y: np.abs(y)))
    add(Case(f"copy_{_d}", pointwise("$x", 1), same(_d, 1, 9.0), lambda x: x))

add(Case("logic", pointwise("($x and not $y) or $x == $z", 3), same(dtypes.bool_, 3), lambda x, y, z: (x & ~y) | (x == z)))

# -- conversions: from each dtype to each -----------------------------------------------------------------------------

_NUMBERS = (dtypes.bool_, *INTEGERS, *FLOATS, *EIGHTS)


def _converted(value: np.ndarray, target: DType, source: DType) -> np.ndarray:
    """What a conversion gives: floats truncate and saturate, integers wrap."""
    if target.is_bool:
        return value != 0
    if target.is_int and source.is_float:
        clean = np.nan_to_num(np.trunc(value), nan=0.0, posinf=np.inf, neginf=-np.inf)
        low, high = int(target.min_value), int(target.max_value)
        return np.array([max(low, min(high, int(v))) if np.isfinite(v) else (high if v > 0 else low) for v in clean.ravel()],
                        target.numpy).reshape(value.shape)  # fmt: skip
    return value.astype(target.numpy if target.is_int else np.float64)


def _cast_case(source: DType) -> Case:
    targets = [t for t in _NUMBERS if t is not source]
    text = "def casts(x: tw.Array):\n    (n,) = x.shape\n"
    for t in targets:
        text += f"    o_{t} = tw.empty(n, tw.{'bool_' if t.is_bool else t})\n"
    text += "    for i in tw.grid(n):\n"
    for t in targets:
        text += f"        o_{t}[i] = tw.cast(x[i], tw.{'bool_' if t.is_bool else t})\n"
    text += f"    return {', '.join(f'o_{t}' for t in targets)}\n"

    def make(rng: np.random.Generator, shape: Shape) -> Arguments:
        if source.is_int:
            info = np.iinfo(source.numpy)
            return (rng.integers(info.min, info.max, shape, source.numpy, endpoint=True),)
        if source.is_bool:
            return (data(rng, shape, source),)
        values = rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 4, shape)
        return (np.clip(values, -400, 400).astype(source.numpy) if source in EIGHTS else values.astype(source.numpy),)

    def reference(x: np.ndarray) -> tuple[np.ndarray, ...]:
        # What leaves the range of an f8 saturates or turns NaN as ml_dtypes has it; round once from the exact value.
        return tuple(
            _converted(x, t, source) if t not in EIGHTS else _exact(x).astype(t.numpy).astype(np.float64) for t in targets
        )

    return Case(f"casts_from_{source}", from_text(text), make, reference, shapes=((33,),), long_shapes=((257,),), ulp=0.5001)


def _exact(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if x.dtype.kind != "f" else x


for _d in _NUMBERS:
    add(_cast_case(_d))

# -- functions of the op table ----------------------------------------------------------------------------------------

_erf = np.vectorize(math.erf, otypes=[np.float64])
FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "tanh": np.tanh, "sinh": np.sinh, "cosh": np.cosh, "erf": _erf, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}  # fmt: skip
COMPOSED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0), "silu": lambda x: x / (1 + np.exp(-x)), "softplus": lambda x: np.logaddexp(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}  # fmt: skip
for _name, _function in FUNCTIONS.items():
    _bound = 1.0 if OPS[_name].bound == "exact" else float(OPS[_name].bound) + 1
    for _d in FLOATS:
        add(Case(f"{_name}_{_d}", pointwise(f"tw.{_name}($x)", 1), special(_d, 1, positive=_name in ("log", "log2", "sqrt", "rsqrt")),
                 _function, ulp=_bound, shapes=((1,), (33,))))  # fmt: skip
for _name, _function in COMPOSED.items():
    for _d in FLOATS:
        # Composed of several roundings; the left tails of gelu and silu cancel.
        add(Case(f"{_name}_{_d}", pointwise(f"tw.{_name}($x)", 1), same(_d, 1), _function, ulp=8.0,
                 scale=lambda x: np.ones_like(x), shapes=((33,),)))  # fmt: skip
for _d in FLOATS:
    add(Case(f"power_{_d}", pointwise("abs($x) ** $y", 2), same(_d, 2), lambda x, y: np.abs(x) ** y,
             ulp=float(OPS["pow"].bound) + 1, shapes=((33,),)))  # fmt: skip

_MORE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "tw.exp10(x[i])": lambda x, y: 10.0**x, "tw.expm1(x[i])": lambda x, y: np.expm1(x), "tw.log10(y[i])": lambda x, y: np.log10(y),
    "tw.log1p(y[i])": lambda x, y: np.log1p(y), "tw.asin(x[i])": lambda x, y: np.arcsin(x), "tw.acos(x[i])": lambda x, y: np.arccos(x),
    "tw.atan(x[i])": lambda x, y: np.arctan(x), "tw.asinh(x[i])": lambda x, y: np.arcsinh(x), "tw.acosh(y[i])": lambda x, y: np.arccosh(y),
    "tw.atanh(x[i])": lambda x, y: np.arctanh(x), "tw.cbrt(x[i])": lambda x, y: np.cbrt(x),
    "tw.erfc(x[i])": lambda x, y: np.vectorize(math.erfc, otypes=[np.float64])(x), "tw.tgamma(y[i])": lambda x, y: np.vectorize(math.gamma, otypes=[np.float64])(y),
    "tw.lgamma(y[i] + 3.0)": lambda x, y: np.vectorize(math.lgamma, otypes=[np.float64])(y + 3), "tw.atan2(x[i], y[i])": np.arctan2, "tw.hypot(x[i], y[i])": np.hypot,
    "tw.fmod(x[i], y[i])": np.fmod, "tw.copysign(y[i], x[i])": lambda x, y: np.copysign(y, x), "tw.ldexp(x[i], 3)": lambda x, y: 8 * x,
    "tw.frexp(x[i])[0]": lambda x, y: np.frexp(x)[0], "tw.sign(x[i])": lambda x, y: np.sign(x),
}  # fmt: skip


def _more_case(dtype: DType) -> Case:
    lines = [f"    o{k} = tw.empty(n, x.dtype)\n" for k in range(len(_MORE))] + ["    for i in tw.grid(n):\n"]
    lines += [f"        o{k}[i] = {text}\n" for k, text in enumerate(_MORE)]
    text = "def more(x: tw.Array, y: tw.Array):\n    (n,) = x.shape\n" + "".join(lines) + f"    return {', '.join(f'o{k}' for k in range(len(_MORE)))}\n"

    def make(rng: np.random.Generator, shape: Shape) -> Arguments:
        return rng.uniform(-0.95, 0.95, shape).astype(dtype.numpy), rng.uniform(1.05, 6, shape).astype(dtype.numpy)

    def reference(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(function(x, y) for function in _MORE.values())

    return Case(f"more_functions_{dtype}", from_text(text), make, reference, ulp=12.0 if dtype is dtypes.f64 else 6.0, shapes=((33,),))


for _d in FLOATS:
    add(_more_case(_d))

# -- shapes, strides and indices --------------------------------------------------------------------------------------


@tw.kernel
def add_matrices(x: tw.Array, y: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows, cols), tw.f32)
    for i, j in tw.grid(rows, cols):
        out[i, j] = x[i, j] + y[i, j]
    return out


@tw.kernel
def add_cubes(x: tw.Array, y: tw.Array) -> tw.Array:
    a, b, c = x.shape
    out = tw.empty((a, b, c), tw.f32)
    for i, j, k in tw.grid(a, b, c):
        out[i, j, k] = x[i, j, k] + y[i, j, k]
    return out


@tw.kernel
def add_four(x: tw.Array) -> tw.Array:
    a, b, c, d = x.shape
    out = tw.empty((a, b, c, d), tw.f32)
    for i, j, k, m in tw.grid(a, b, c, d):
        out[i, j, k, m] = x[i, j, k, m] + x[i, j, k, m]
    return out


@tw.kernel
def scale_columns(m: tw.Array, v: tw.Array) -> tw.Array:
    rows, cols = m.shape
    out = tw.empty((rows, cols), tw.f32)
    for i, j in tw.grid(rows, cols):
        out[i, j] = m[i, j] * v[j]
    return out


@tw.kernel
def scale_rows(m: tw.Array, v: tw.Array) -> tw.Array:
    rows, cols = m.shape
    out = tw.empty((rows, cols), tw.f32)
    for i, j in tw.grid(rows, cols):
        out[i, j] = m[i, j] * v[i]
    return out


@tw.kernel
def outer(x: tw.Array, y: tw.Array) -> tw.Array:
    (n,) = x.shape
    (m,) = y.shape
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        out[i, j] = x[i] * y[j]
    return out


@tw.kernel
def broadcast_middle(x: tw.Array, y: tw.Array) -> tw.Array:
    a, b, c = x.shape
    out = tw.empty((a, b, c), tw.f32)
    for i, j, k in tw.grid(a, b, c):
        out[i, j, k] = x[i, j, k] - y[i, k]
    return out


@tw.kernel
def transpose(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((cols, rows), tw.f32)
    for i, j in tw.grid(cols, rows):
        out[i, j] = x[j, i]
    return out


@tw.kernel
def reverse(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, tw.f32)
    for i in tw.grid(n):
        out[i] = x[n - 1 - i]
    return out


@tw.kernel
def difference(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n - 1, tw.f32)
    for i in tw.grid(n - 1):
        out[i] = x[i + 1] - x[i]
    return out


@tw.kernel
def blur(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows - 2, cols - 2), tw.f32)
    for i, j in tw.grid(rows - 2, cols - 2):
        total = 0.0
        for di in range(3):
            for dj in range(3):
                total += x[i + di, j + dj]
        out[i, j] = total / 9.0
    return out


@tw.kernel
def gather(x: tw.Array, where: tw.Array) -> tw.Array:
    (n,) = where.shape
    out = tw.empty(n, tw.f32)
    for i in tw.grid(n):
        out[i] = x[where[i]]
    return out


@tw.kernel
def gather_rows(x: tw.Array, where: tw.Array) -> tw.Array:
    (n,) = where.shape
    _, cols = x.shape
    out = tw.empty((n, cols), tw.f32)
    for i, j in tw.grid(n, cols):
        out[i, j] = x[where[i], j]
    return out


@tw.kernel
def every_second(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n // 2, tw.f32)
    for i in tw.grid(n // 2):
        out[i] = x[2 * i] + x[2 * i + 1]
    return out


@tw.kernel
def whole_arrays(x: tw.Array, y: tw.Array) -> tw.Array:
    return (x + y) * 2.0 - x / 4.0


f32, i64 = dtypes.f32, dtypes.i64


def _padded(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return data(rng, tuple(2 * s + 1 for s in shape), f32)


def _strided(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Every second element along each axis."""
    return _padded(rng, shape)[tuple(slice(0, 2 * s, 2) for s in shape)]


def _backwards(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return data(rng, shape, f32)[tuple(slice(None, None, -1) for _ in shape)]


def _column_major(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return data(rng, shape[::-1], f32).T


def _repeated(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return np.broadcast_to(data(rng, shape[-1:], f32), shape)


def _offset(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Contiguous, but not aligned to more than one element."""
    return data(rng, (int(np.prod(shape)) + 1,), f32)[1:].reshape(shape)


def _sum(*arrays: np.ndarray) -> np.ndarray:
    return np.sum(np.stack(arrays), 0)


for _name, _layout in (
    ("strided", _strided), ("backwards", _backwards), ("column_major", _column_major), ("repeated", _repeated), ("offset", _offset),
):  # fmt: skip
    add(Case(f"add_matrices_{_name}", add_matrices, lambda rng, s, make=_layout: (make(rng, s), data(rng, s, f32)),
             _sum, MATRICES, LONG_MATRICES))  # fmt: skip
    add(Case(f"add_cubes_{_name}", add_cubes, lambda rng, s, make=_layout: (data(rng, s, f32), make(rng, s)),
             _sum, CUBES, LONG_CUBES))  # fmt: skip
add(Case("add_matrices", add_matrices, same(f32, 2), _sum, MATRICES, LONG_MATRICES))
add(Case("add_cubes", add_cubes, same(f32, 2), _sum, CUBES, LONG_CUBES))
add(Case("add_four", add_four, same(f32, 1), lambda x: x + x, ((2, 3, 1, 5),), ((3, 5, 7, 11),)))
add(Case("scale_columns", scale_columns, lambda rng, s: (data(rng, s, f32), data(rng, s[1:], f32)), lambda m, v: m * v, MATRICES, LONG_MATRICES))
add(Case("scale_rows", scale_rows, lambda rng, s: (data(rng, s, f32), data(rng, s[:1], f32)), lambda m, v: m * v[:, None], MATRICES, LONG_MATRICES))
add(Case("outer", outer, lambda rng, s: (data(rng, s[:1], f32), data(rng, s[1:], f32)), np.outer, MATRICES, LONG_MATRICES))
add(Case("broadcast_middle", broadcast_middle, lambda rng, s: (data(rng, s, f32), data(rng, (s[0], s[2]), f32)),
         lambda x, y: x - y[:, None, :], CUBES, LONG_CUBES))  # fmt: skip
add(Case("transpose", transpose, same(f32, 1), np.transpose, MATRICES, LONG_MATRICES))
add(Case("reverse", reverse, same(f32, 1), lambda x: x[::-1]))
add(Case("difference", difference, same(f32, 1), lambda x: x[1:] - x[:-1], VECTORS[1:]))
add(Case("blur", blur, same(f32, 1), lambda x: sum(x[i : x.shape[0] - 2 + i, j : x.shape[1] - 2 + j] for i in range(3) for j in range(3)) / 9,
         ((3, 3), (7, 33)), ((97, 129), (5003, 4)), ulp=12, scale=lambda x: np.max(np.abs(x)) + 0 * x[2:, 2:]))  # fmt: skip
for _d in (dtypes.i32, dtypes.i64, dtypes.u8):
    add(Case(f"gather_{_d}", gather, lambda rng, s, d=_d: (data(rng, (50,), f32), rng.integers(0, 50, s).astype(d.numpy)),
             lambda x, w: x[w]))  # fmt: skip
add(Case("gather_rows", gather_rows, lambda rng, s: (data(rng, (9, s[1]), f32), rng.integers(0, 9, s[0])), lambda x, w: x[w], MATRICES[1:], LONG_MATRICES))
add(Case("every_second", every_second, same(f32, 1), lambda x: x[: x.size // 2 * 2 : 2] + x[1 : x.size // 2 * 2 : 2]))
add(Case("whole_arrays", whole_arrays, same(f32, 2), lambda x, y: (x + y) * 2 - x / 4, CUBES, LONG_CUBES, ulp=2, scale=lambda x, y: 2 * np.abs(x) + 2 * np.abs(y)))

# -- scalars, conditions, several results, serial loops ---------------------------------------------------------------


@tw.kernel
def scaled_sum(x: tw.Array, y: tw.Array, a: float, b: float) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, tw.f32)
    for i in tw.grid(n):
        out[i] = a * x[i] + b * y[i]
    return out


@tw.kernel
def shifted(x: tw.Array, by: int, flag: bool) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, tw.i64)
    for i in tw.grid(n):
        out[i] = x[i] + by if flag else x[i] - by
    return out


@tw.kernel
def pieces(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, tw.f32)
    for i in tw.grid(n):
        if x[i] < -1.0:
            out[i] = -1.0
        elif x[i] < 1.0:
            out[i] = x[i] * x[i]
        else:
            out[i] = tw.sqrt(x[i])
    return out


@tw.kernel
def edges(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, tw.f32)
    for i in tw.grid(n):
        left = x[i - 1] if i > 0 else 0.0
        right = x[i + 1] if i < n - 1 else 0.0
        out[i] = left + right
    return out


@tw.kernel
def sum_and_difference(x: tw.Array, y: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array]:
    (n,) = x.shape
    plus = tw.empty(n, tw.f32)
    minus = tw.empty(n, tw.f32)
    order = tw.empty(n, tw.i32)
    for i in tw.grid(n):
        plus[i] = x[i] + y[i]
        minus[i] = x[i] - y[i]
        order[i] = tw.cast(i, tw.i32)
    return plus, minus, order


@tw.kernel
def newton(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, tw.f64)
    for i in tw.grid(n):
        guess = 1.0 + x[i]
        for _ in range(6):
            guess = 0.5 * (guess + x[i] / guess)
        out[i] = guess
    return out


@tw.kernel
def triangle(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, tw.f32)
    for i in tw.grid(n):
        total = 0.0
        for j in range(i + 1):
            total += x[j]
        out[i] = total
    return out


@tw.kernel
def matrix_product(a: tw.Array, b: tw.Array) -> tw.Array:
    n, k = a.shape
    _, m = b.shape
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def row_range(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty(rows, tw.f32)
    for i in tw.grid(rows):
        low = tw.inf
        high = -tw.inf
        for j in range(cols):
            low = min(low, x[i, j])
            high = max(high, x[i, j])
        out[i] = high - low
    return out


@tw.kernel
def variance(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty(rows, tw.f32)
    for i in tw.grid(rows):
        total = 0.0
        for j in range(cols):
            total += x[i, j]
        mean = total / cols
        squares = 0.0
        for j in range(cols):
            squares += (x[i, j] - mean) * (x[i, j] - mean)
        out[i] = squares / cols
    return out


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows, cols), tw.f32)
    for i in tw.grid(rows):
        top = -tw.inf
        for j in range(cols):
            top = max(top, x[i, j])
        total = 0.0
        for j in range(cols):
            total += tw.exp(x[i, j] - top)
        for j in range(cols):
            out[i, j] = tw.exp(x[i, j] - top) / total
    return out


@tw.kernel
def nested(x: tw.Array) -> tw.Array:
    a, b, c = x.shape
    out = tw.empty(a, tw.f32)
    for i in tw.grid(a):
        best = -tw.inf
        for j in range(b):
            total = 0.0
            for k in range(c):
                total += x[i, j, k]
            best = max(best, total)
        out[i] = best
    return out


@tw.kernel
def root_mean_square(x: tw.Array) -> float:
    (n,) = x.shape
    total = 0.0
    for i in range(n):
        total += x[i] * x[i]
    return tw.sqrt(total / n)


@tw.kernel
def dot_product(x: tw.Array, y: tw.Array) -> float:
    (n,) = x.shape
    total = 0.0
    for i in range(n):
        total += x[i] * y[i]
    return total


@tw.kernel
def normalised(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    total = 0.0
    for i in range(n):
        total += x[i]
    out = tw.empty(n, tw.f32)
    for i in tw.grid(n):
        out[i] = x[i] / total
    return out


@tw.kernel
def conditional_sum(x: tw.Array, limit: float) -> float:
    (n,) = x.shape
    total = 0.0
    for i in range(n):
        if x[i] > limit:
            total += x[i]
    return total


def _all_sizes(*arrays: np.ndarray) -> np.ndarray:
    return np.sum([np.abs(a) for a in arrays], 0)


add(Case("scaled_sum", scaled_sum, lambda rng, s: (*same(f32, 2)(rng, s), 0.5, -3.0), lambda x, y, a, b: a * x + b * y,
         scale=lambda x, y, a, b: np.abs(a * x) + np.abs(b * y)))  # fmt: skip
add(Case("shifted_up", shifted, lambda rng, s: (data(rng, s, i64), 2**40, True), lambda x, by, flag: x + by))
add(Case("shifted_down", shifted, lambda rng, s: (data(rng, s, dtypes.i32), 17, False), lambda x, by, flag: x.astype(np.int64) - by))
add(Case("pieces", pieces, special(f32, 1), lambda x: np.where(x < -1, -1, np.where(x < 1, x * x, np.sqrt(x)))))
add(Case("edges", edges, same(f32, 1), lambda x: np.concatenate([[0], x])[: x.size] + np.concatenate([x[1:], [0]])[: x.size]))
add(Case("sum_and_difference", sum_and_difference, same(f32, 2), lambda x, y: (x + y, x - y, np.arange(x.size))))
add(Case("newton", newton, lambda rng, s: (np.abs(data(rng, s, dtypes.f64)),), lambda x: _newton(x), ulp=4))
add(Case("triangle", triangle, same(f32, 1), np.cumsum, VECTORS, ((257,),), ulp=64, scale=lambda x: np.cumsum(np.abs(x))))
add(Case("matrix_product", matrix_product, lambda rng, s: (data(rng, s, f32), data(rng, (s[1], 9), f32)), lambda a, b: a @ b,
         ((1, 1), (5, 33)), ((33, 257),), ulp=40, scale=lambda a, b: np.abs(a) @ np.abs(b)))  # fmt: skip
add(Case("row_range", row_range, same(f32, 1), lambda x: x.max(1) - x.min(1), MATRICES[1:], LONG_MATRICES[1:]))
add(Case("variance", variance, same(f32, 1), lambda x: x.var(1), MATRICES[1:], LONG_MATRICES[1:], ulp=64, scale=lambda x: x.var(1) + 1))
add(Case("softmax", softmax, same(f32, 1), lambda x: np.exp(x - x.max(1, keepdims=True)) / np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True),
         MATRICES[1:], LONG_MATRICES[1:], ulp=64))  # fmt: skip
add(Case("nested", nested, same(f32, 1), lambda x: x.sum(2).max(1), CUBES, LONG_CUBES[1:], ulp=32, scale=lambda x: np.abs(x).sum(2).max(1)))
add(Case("root_mean_square", root_mean_square, same(f32, 1), lambda x: np.sqrt(np.mean(x * x)), VECTORS[1:], ulp=32))
add(Case("dot_product", dot_product, same(f32, 2), lambda x, y: x @ y, ulp=32, scale=lambda x, y: np.abs(x) @ np.abs(y)))
add(Case("normalised", normalised, lambda rng, s: (np.abs(data(rng, s, f32)) + 1,), lambda x: x / x.sum(), VECTORS[1:], ulp=32))
add(Case("conditional_sum", conditional_sum, lambda rng, s: (data(rng, s, f32), 0.5), lambda x, limit: x[x > limit].sum(), ulp=64,
         scale=lambda x, limit: np.abs(x).sum()))  # fmt: skip


# -- indices that make arrays -----------------------------------------------------------------------------------------


@tw.kernel
def new_axes(x: tw.Array, y: tw.Array) -> tw.Array:
    gap = x[:, None] - y[None, :]
    return (gap * gap)[..., None] + 1


@tw.kernel
def with_steps(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    out = x * 1
    out[1::3] = 7
    return x[::-2] * 2, out


@tw.kernel
def index_arrays(x: tw.Array, rows: tw.Array, columns: tw.Array) -> tuple[tw.Array, tw.Array]:
    return x[rows] * 2, x[rows[:, None], columns]


@tw.kernel
def masked(x: tw.Array) -> tuple[tw.Array, float, int]:
    out = x * 1
    out[x > 0] *= 3
    out[~(x > 0)] = -1
    return out, tw.sum(x[x > 0]), tw.sum(x > 0)


@tw.kernel
def repeated(x: tw.Array, y: tw.Array, z: tw.Array) -> tw.Array:
    return tw.where(x > y, x * 2, y) - z


add(Case("new_axes", new_axes, lambda rng, s: (data(rng, s[:1], f32), data(rng, s[1:], f32)), lambda x, y: ((x[:, None] - y) ** 2)[..., None] + 1,
         MATRICES, LONG_MATRICES, ulp=4, scale=lambda x, y: ((np.abs(x)[:, None] + np.abs(y)) ** 2)[..., None] + 1))  # fmt: skip
add(Case("with_steps", with_steps, same(f32, 1), lambda x: (x[::-2] * 2, np.where(np.arange(x.size) % 3 == 1, 7, x))))
add(Case("index_arrays", index_arrays, lambda rng, s: (data(rng, (9, 4), f32), rng.integers(-9, 9, s[0]), rng.integers(-4, 4, s[1]).astype(np.int32)),
         lambda x, r, c: (x[r] * 2, x[r[:, None], c]), MATRICES, LONG_MATRICES))  # fmt: skip
add(Case("masked", masked, same(f32, 1), lambda x: (np.where(x > 0, 3 * x, -1), x[x > 0].sum(), (x > 0).sum()), MATRICES[1:], LONG_MATRICES[1:], ulp=64,
         scale=lambda x: np.abs(x).sum() + 1))  # fmt: skip
add(Case("repeated", repeated, lambda rng, s: (data(rng, s, f32), data(rng, (s[0], 1), f32), data(rng, (1, s[1]), f32)),
         lambda x, y, z: np.where(x > y, x * 2, y) - z, MATRICES, LONG_MATRICES, scale=lambda x, y, z: 2 * np.abs(x) + np.abs(y) + np.abs(z)))  # fmt: skip


def _newton(x: np.ndarray) -> np.ndarray:
    guess = 1.0 + x
    for _ in range(6):
        guess = 0.5 * (guess + x / guess)
    return guess


# -- reductions -------------------------------------------------------------------------------------------------------

REDUCTIONS: dict[str, Callable[..., object]] = {
    "sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max, "argmin": np.argmin, "argmax": np.argmax,
}  # fmt: skip


def reducing(name: str, axis: str) -> tw.Kernel:
    argument = f", axis={axis}" if axis else ""
    return from_text(f"def reduction(x: tw.Array):\n    return tw.{name}(x{argument})\n")


def _reduction_input(name: str, dtype: DType) -> Callable[[np.random.Generator, Shape], Arguments]:
    def make(rng: np.random.Generator, shape: Shape) -> Arguments:
        if name == "prod" and dtype.is_float:
            return ((1 + 0.02 * rng.standard_normal(shape)).astype(dtype.numpy),)
        values = data(rng, shape, dtype)
        if dtype.is_float and name != "sum" and values.size > 40 and rng.integers(2):
            values.reshape(-1)[rng.integers(0, values.size)] = np.nan
        return (values,)

    return make


def _add_reduction(
    name: str, dtype: DType, axis: str, shapes: Sequence[Shape], long_shapes: Sequence[Shape], suffix: str = ""
) -> None:  # fmt: skip
    function = REDUCTIONS[name]
    where = eval(axis) if axis else None
    kept = {"axis": where} if axis else {}

    def reference(x: np.ndarray) -> object:
        if name in ("sum", "prod") and x.dtype.kind in "biu":
            return function(x, dtype=np.uint64 if x.dtype.kind == "u" else np.int64, **kept)
        return function(x, **kept)

    def scale(x: np.ndarray) -> object:
        return np.sum(np.abs(x.astype(np.float64)), **kept) if name == "sum" else np.abs(np.asarray(reference(x), np.float64))

    label = f"{name}_{dtype}" + (f"_axis_{axis.strip('()').replace(', ', '_').replace('-', 'minus_')}" if axis else "_all") + suffix
    loose = 64.0 if dtype in (dtypes.f32, dtypes.f64) else 1.0
    add(Case(label, reducing(name, axis), _reduction_input(name, dtype), reference, tuple(shapes), tuple(long_shapes),
             ulp=loose if name in ("sum", "prod") else 0.5001, scale=scale))  # fmt: skip


add(Case("reshape_flat", from_text("def flat(x: tw.Array) -> tw.Array:\n    return x.reshape(-1) * 2\n"), same(f32, 1), lambda x: x.reshape(-1) * 2, (*MATRICES, *CUBES), (*LONG_MATRICES, *LONG_CUBES)))
add(Case("reshape_split", from_text("def split(x: tw.Array) -> tw.Array:\n    n, d = x.shape\n    return x.reshape(n, -1, 3).max(axis=1)\n"), same(f32, 1),
         lambda x: x.reshape(len(x), -1, 3).max(1), ((1, 3), (7, 33), (33, 6)), ((97, 129), (3, 5001), (1031, 3))))  # fmt: skip
add(Case("reshape_join_and_turn", from_text(
    "def join(x: tw.Array) -> tw.Array:\n    a, b, c = x.shape\n    y = x.reshape(a * b, c)\n    out = tw.empty((c, a * b), x.dtype)\n"
    "    for i, j in tw.grid(c, a * b):\n        out[i, j] = y[j, i] + 1\n    return out\n"
), same(f32, 1), lambda x: x.reshape(-1, x.shape[2]).T + 1, CUBES, LONG_CUBES))  # fmt: skip

def _added_at(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x)
    np.add.at(out, rows, x)
    return out


def _put_at(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x)
    out[rows] = x
    return out


add(Case("add_at_rows", from_text("def added(x: tw.Array, rows: tw.Array) -> tw.Array:\n    out = tw.zeros_like(x)\n    out[rows] += x\n    return out\n"),
         lambda rng, s: (data(rng, s, f32), rng.integers(-s[0], s[0], s[0])), _added_at, MATRICES[1:], LONG_MATRICES[1:], ulp=64,
         scale=lambda x, rows: _added_at(np.abs(x), rows)))  # fmt: skip
add(Case("put_at_rows", from_text("def put(x: tw.Array, rows: tw.Array) -> tw.Array:\n    out = tw.zeros_like(x)\n    out[rows] = x\n    return out\n"),
         lambda rng, s: (data(rng, s, f32), rng.integers(-s[0], s[0], s[0])), _put_at, MATRICES[1:], LONG_MATRICES[1:]))  # fmt: skip
add(Case("turned_stores", from_text("def turned(x: tw.Array) -> tw.Array:\n    out = tw.zeros_like(x)\n    out[::-1] = x\n    out[:, ::-1] += x\n    return out\n"),
         same(f32, 1), lambda x: x[::-1] + x[:, ::-1], MATRICES[1:], LONG_MATRICES[1:], ulp=2, scale=lambda x: np.abs(x[::-1]) + np.abs(x[:, ::-1])))  # fmt: skip

add(Case("median_rows", from_text("def middle(x: tw.Array) -> tw.Array:\n    return tw.median(x, axis=1)\n"), same(f32, 1), lambda x: np.median(x, axis=1), ((7, 4), (3, 5)), ((97, 129), (1031, 3))))

_FULL = ((1, 1), (7, 33), (33, 5))
_FULL_LONG = ((97, 129), (3, 5003), (1031, 3))
for _name in REDUCTIONS:
    _is_arg = _name.startswith("arg")
    for _axis in ("", "0", "1", "-1") if _is_arg else ("", "0", "1", "-1", "(0, 1)"):
        _add_reduction(_name, f32, _axis, _FULL, _FULL_LONG)
    for _axis in ("1", "-2") if _is_arg else ("1", "-2", "(0, 2)", "(0, 1, 2)"):
        _add_reduction(_name, f32, _axis, CUBES, LONG_CUBES[1:], "_of_cubes")
    for _d in (dtypes.i8, dtypes.u8, dtypes.i32, dtypes.i64, dtypes.u64, dtypes.f16, dtypes.bf16, dtypes.f64):
        _add_reduction(_name, _d, "", ((1,), (97,)), LONG_VECTORS)
        _add_reduction(_name, _d, "0", ((33, 5),), ((97, 129),))
add(Case("all_true", reducing("all", ""), lambda rng, s: (np.ones(s, np.bool_),), np.all, VECTORS))
add(Case("all_false_once", reducing("all", ""), lambda rng, s: (np.arange(s[0]) != s[0] // 2,), np.all, VECTORS))
add(Case("any_once", reducing("any", ""), lambda rng, s: (np.arange(s[0]) == s[0] - 1,), np.any, VECTORS))
add(Case("all_rows", reducing("all", "1"), lambda rng, s: (rng.random(s) < 0.9,), lambda x: x.all(1), MATRICES, LONG_MATRICES))
add(Case("any_columns", reducing("any", "0"), lambda rng, s: (rng.random(s) < 0.1,), lambda x: x.any(0), MATRICES, LONG_MATRICES))
add(Case("count_true", reducing("sum", ""), lambda rng, s: (rng.random(s) < 0.5,), lambda x: np.int64(x.sum()), VECTORS))
add(Case("sum_empty_rows", reducing("sum", "1"), same(f32, 1), lambda x: x.sum(1), ((0, 5), (5, 0)), ()))
add(Case("argmax_ties", reducing("argmax", ""), lambda rng, s: (rng.integers(0, 3, s).astype(np.float32),), np.argmax, VECTORS[1:]))
add(Case("argmin_ties_rows", reducing("argmin", "1"), lambda rng, s: (rng.integers(0, 3, s).astype(np.int32),), lambda x: x.argmin(1), _FULL, _FULL_LONG))
add(Case("argmax_all_lowest", reducing("argmax", ""), lambda rng, s: (np.full(s, -np.inf, np.float32),), np.argmax, VECTORS[1:]))
add(Case("sum_column_major", reducing("sum", "0"), lambda rng, s: (_column_major(rng, s),), lambda x: x.sum(0), _FULL, _FULL_LONG, ulp=64, scale=lambda x: np.abs(x).sum(0)))
add(Case("sum_strided", reducing("sum", "1"), lambda rng, s: (_strided(rng, s),), lambda x: x.sum(1), _FULL, _FULL_LONG, ulp=64, scale=lambda x: np.abs(x).sum(1)))
add(Case("max_backwards", reducing("max", ""), lambda rng, s: (_backwards(rng, s),), np.max, _FULL, _FULL_LONG))
add(Case("sum_repeated", reducing("sum", "1"), lambda rng, s: (_repeated(rng, s),), lambda x: x.sum(1), _FULL, _FULL_LONG, ulp=64, scale=lambda x: np.abs(x).sum(1)))

BY_NAME = {case.name: case for case in CASES}
