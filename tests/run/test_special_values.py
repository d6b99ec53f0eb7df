"""Zeros of both signs, infinities, NaN, denormals, huge and tiny numbers, through every function and dtype, on every device.

References: NumPy in f64 for narrower floats, where it is as good as exact; for f64 itself one more unit than the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import NVPTX
from tilewright.compile.driver import Signature, compile_kernel
from tilewright.ir.reference.special_functions import erfc_of_wide, lgamma_of_wide, tgamma_of_wide
from tilewright.tree.typed import ArrayArg

FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64, "f8e4m3": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2}
EDGES = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 0.1, -0.1, 10, -10, -15, -17, -20, 20, 50, -50, 88.7,
    89, -87, -87.4, -88, -100, -103.9, -105, 128, -126, -127, -149, -150, 709.7, 710, -708, -745.1, -746, 1024, -1022, -1074, -1075, 1e-3, 1e-10, -1e-10,
    1e-20, 1e-38, 1e-40, 1e-300, 1e-310, 1e4, 1e5, -1e5, 1e10, 1e20, 1e38, 1e300, -1e300, math.pi / 2, math.pi, 1 - 2**-24, 1 + 2**-23, 2**22 + 0.5, 2.0**52 + 1,
]  # fmt: skip


def edges(dtype: type) -> np.ndarray:
    info = ml_dtypes.finfo(dtype)
    limits = [float(info.max), float(info.smallest_normal), float(info.smallest_subnormal), 3 * float(info.smallest_subnormal)]
    with np.errstate(all="ignore"):
        return np.array([*EDGES, *limits, *(-x for x in limits)]).astype(dtype)


def assert_same(got: np.ndarray, wanted: np.ndarray, units: float, *about: object) -> None:
    """NaN where NaN is wanted, zeros of the same sign, infinities where they are, and else no further off than so many units."""
    info = ml_dtypes.finfo(got.dtype)
    with np.errstate(all="ignore"):
        found, exact = got.astype(np.float64), wanted.astype(np.float64)
        rounded = exact.astype(got.dtype).astype(np.float64)
        same = (np.isnan(found) & np.isnan(rounded)) | ((found == rounded) & (np.signbit(found) == np.signbit(rounded)))
        exponent = np.maximum(np.frexp(np.where(np.isfinite(exact), exact, 1.0))[1] - 1, int(info.minexp)) - int(info.nmant)
        # An overflow next to the largest number is as good as the largest number.
        largest = np.ldexp(1.0, int(info.maxexp))
        near = np.where(np.isinf(found), np.copysign(largest, found), found)
        close = np.abs(near - np.where(np.isinf(rounded), np.copysign(largest, rounded), exact)) <= units * np.ldexp(1.0, exponent)
        close &= ~np.isnan(found) & ((found != 0) | (np.signbit(found) == np.signbit(exact)))
    wrong = np.flatnonzero(~(same | close))
    assert not len(wrong), (*about, [(int(k), float(found[k]), float(exact[k])) for k in wrong[:5]])


# -- functions ----------------------------------------------------------------------------------------------------------


@tw.kernel
def functions(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((17, n), x.dtype)
    for i in tw.grid(n):
        v = x[i]
        out[0, i] = tw.exp(v)
        out[1, i] = tw.exp2(v)
        out[2, i] = tw.log(v)
        out[3, i] = tw.log2(v)
        out[4, i] = tw.sin(v)
        out[5, i] = tw.cos(v)
        out[6, i] = tw.tan(v)
        out[7, i] = tw.tanh(v)
        out[8, i] = tw.sinh(v)
        out[9, i] = tw.cosh(v)
        out[10, i] = tw.erf(v)
        out[11, i] = tw.sqrt(v)
        out[12, i] = tw.rsqrt(v)
        out[13, i] = tw.sigmoid(v)
        out[14, i] = tw.softplus(v)
        out[15, i] = tw.pow(v, 3.5)
        out[16, i] = tw.silu(v)
    return out


_erf = np.vectorize(math.erf, otypes=[np.float64])
REFERENCES: list[tuple[str, float, Callable[[np.ndarray], np.ndarray]]] = [
    ("exp", 2, np.exp), ("exp2", 2, np.exp2), ("log", 2, np.log), ("log2", 2, np.log2), ("sin", 2, np.sin), ("cos", 2, np.cos), ("tan", 4, np.tan),
    ("tanh", 3, np.tanh), ("sinh", 4, np.sinh), ("cosh", 4, np.cosh), ("erf", 4, _erf), ("sqrt", 0.5, np.sqrt), ("rsqrt", 2, lambda x: 1 / np.sqrt(x)),
    ("sigmoid", 4, lambda x: 1 / (1 + np.exp(-x))), ("softplus", 4, lambda x: np.logaddexp(x, 0)), ("pow", 4, lambda x: np.power(x, 3.5)),
]  # fmt: skip


CASES = [*(("emulator:thread", name) for name in FLOATS), *((device, name) for device in ("cpu", "emulator:loop") for name in ("bf16", "f32", "f64"))]
"""Narrow floats are computed in f32 and rounded: on a CPU one of them stands for all, since compiling takes a second for each."""


@pytest.mark.parametrize(("device", "name"), CASES)
def test_functions(name: str, device: str) -> None:
    x = edges(FLOATS[name])
    found = functions(x, device=device)
    if device == "cpu":  # the loop's last, single elements, too
        singles = [functions(x[k : k + 1]) for k in range(0, len(x), 7)]
        np.testing.assert_array_equal(np.concatenate(singles, axis=1).astype(np.float64), found[:, ::7].astype(np.float64))
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        for row, (function, bound, reference) in enumerate(REFERENCES):
            exact = reference(wide)
            # A GPU's own power takes what is below 2^-126 for zero where the result is rounded to bf16.
            kept = (np.abs(exact) >= 2.0**-126) | (exact == 0) | np.isnan(exact) | (name != "bf16") | (device != "emulator:thread")
            units = bound + (1 if name == "f64" else 0) if name in ("f32", "f64") else 0.51
            assert_same(found[row][kept], exact[kept], units, function, name, device)
        # x times sigmoid(x), whose denormals have few digits; so -inf gives NaN.
        sigmoid = 1 / (1 + np.exp(-wide))
        usual = sigmoid > 2 * float(ml_dtypes.finfo(np.float64 if name == "f64" else np.float32).smallest_normal)
        assert_same(found[16][usual], (wide * sigmoid)[usual], 6 if name in ("f32", "f64") else 0.51, "silu", name, device)


@tw.kernel
def more_functions(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((22, n), x.dtype)
    for i in tw.grid(n):
        v = x[i]
        out[0, i] = tw.exp10(v)
        out[1, i] = tw.expm1(v)
        out[2, i] = tw.log10(v)
        out[3, i] = tw.log1p(v)
        out[4, i] = tw.asin(v)
        out[5, i] = tw.acos(v)
        out[6, i] = tw.atan(v)
        out[7, i] = tw.asinh(v)
        out[8, i] = tw.acosh(v)
        out[9, i] = tw.atanh(v)
        out[10, i] = tw.cbrt(v)
        out[11, i] = tw.erfc(v)
        out[12, i] = tw.tgamma(v)
        out[13, i] = tw.lgamma(abs(v))
        out[14, i] = tw.atan2(v, -2.5)
        out[15, i] = tw.hypot(3.0, v)
        out[16, i] = tw.fmod(v, 0.75)
        out[17, i] = tw.copysign(1.5, v)
        out[18, i] = tw.sign(v)
        fraction, exponent = tw.frexp(v)
        out[19, i] = tw.ldexp(fraction, exponent)
        out[20, i] = 1.0 if tw.isinf(v) else 0.0
        out[21, i] = 1.0 if tw.isfinite(v) else 0.0
    return out


def _wide(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: function(x.astype(np.longdouble)).astype(np.float64)


MORE_REFERENCES: list[tuple[str, float, Callable[[np.ndarray], np.ndarray]]] = [
    ("exp10", 2, lambda x: np.power(10.0, x)), ("expm1", 2, np.expm1), ("log10", 2, np.log10), ("log1p", 2, np.log1p), ("asin", 2, np.arcsin),
    ("acos", 2, np.arccos), ("atan", 2, np.arctan), ("asinh", 2, np.arcsinh), ("acosh", 2, np.arccosh), ("atanh", 2, np.arctanh), ("cbrt", 1, np.cbrt),
    ("erfc", 5, _wide(erfc_of_wide)), ("tgamma", 5, _wide(tgamma_of_wide)), ("lgamma", 5, lambda x: _wide(lgamma_of_wide)(np.abs(x))),
    ("atan2", 2, lambda x: np.arctan2(x, -2.5)), ("hypot", 1, lambda x: np.hypot(3.0, x)), ("fmod", 0.5, lambda x: np.fmod(x, 0.75)),
    ("copysign", 0.5, lambda x: np.copysign(1.5, x)), ("sign", 0.5, np.sign), ("frexp and ldexp", 0.5, lambda x: x),
    ("isinf", 0.5, lambda x: np.isinf(x).astype(np.float64)), ("isfinite", 0.5, lambda x: np.isfinite(x).astype(np.float64)),
]  # fmt: skip


@pytest.mark.parametrize(("device", "name"), CASES)
def test_more_functions(name: str, device: str) -> None:
    x = edges(FLOATS[name])
    found = more_functions(x, device=device)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        for row, (function, bound, reference) in enumerate(MORE_REFERENCES):
            exact = reference(wide)
            # Signs of NaN are nobody's, and a quotient of fmod from 2^300 on may give NaN.
            kept = ~np.isnan(wide) if function in ("copysign",) else np.abs(wide) < 2.0**299 if function == "fmod" else np.full(len(x), True)
            units = bound + (1 if name == "f64" and bound > 0.5 else 0) if name in ("f32", "f64") else 0.51
            assert_same(found[row][kept], exact[kept], units, function, name, device)


# -- zeros, and what is made of comparisons --------------------------------------------------------------------------------


@tw.kernel
def choices(x: tw.Array, y: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((24, n), x.dtype)
    for i in tw.grid(n):
        a = x[i]
        b = y[i]
        out[0, i] = min(a, b)
        out[1, i] = max(a, b)
        out[2, i] = tw.clamp(a, -1.0, b)
        out[3, i] = tw.relu(a)
        out[4, i] = min(0.0, a)
        out[5, i] = a if a < 0.0 else 0.0
        out[6, i] = tw.where(a > 0.0, a, 0.0)
        out[7, i] = tw.where(0.0 > a, a, 0.0)  # noqa: SIM300
        out[8, i] = tw.where(a >= 0.0, 0.0, a)
        out[9, i] = tw.where(a > 0.0, a, -0.0)
        out[10, i] = a if a < b else b
        out[11, i] = a**0
        out[12, i] = a**1
        out[13, i] = a**2
        out[14, i] = a**3
        out[15, i] = a**-1
        out[16, i] = a**-2
        out[17, i] = a**-3
        out[18, i] = a**16
        out[19, i] = a + 0.0
        out[20, i] = 0.0 - a
        out[21, i] = a * 0.0
        out[22, i] = abs(a)
        out[23, i] = tw.round(a)
    return out


def _least(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(a == b, np.where(np.signbit(a), a, b), np.where(np.isnan(a) | np.isnan(b), np.nan, np.where(a < b, a, b)))


def _most(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return -_least(-a, -b)


@pytest.mark.parametrize(("device", "name"), [*CASES, ("cpu", "f16"), ("cpu", "f8e4m3")])
def test_choices_and_powers(name: str, device: str) -> None:
    x = edges(FLOATS[name])
    x, y = np.repeat(x, 7), np.tile(np.array([0.0, -0.0, 1.0, -3.0, np.inf, -np.inf, np.nan]).astype(FLOATS[name]), len(x))
    with np.errstate(all="ignore"):
        a, b = x.astype(np.float64), y.astype(np.float64)
        zero, minus = np.zeros_like(a), -np.zeros_like(a)
        wanted = [
            _least(a, b), _most(a, b), _least(_most(a, zero - 1), b), _most(a, zero), _least(zero, a), np.where(a < 0, a, zero), np.where(a > 0, a, zero),
            np.where(zero > a, a, zero), np.where(a >= 0, zero, a), np.where(a > 0, a, minus), np.where(a < b, a, b), zero + 1, a, a * a, np.power(a, 3.0),
            1 / a, np.power(a, -2.0), np.power(a, -3.0), np.power(a, 16.0), a + 0.0, 0.0 - a, a * 0.0, np.abs(a), np.rint(a),
        ]  # fmt: skip
        found = choices(x, y, device=device)
        single = slice(3, None, 11)
        ones = np.concatenate([choices(x[k : k + 1], y[k : k + 1], device=device) for k in range(3, len(x), 11)], axis=1) if device == "cpu" else found[:, single]
    for row, exact in enumerate(wanted):
        units = 4 if name in ("f32", "f64") else 0.51
        rounds = units if 14 <= row <= 18 else 0
        assert_same(found[row], exact, rounds, row, name, device)
        assert_same(ones[row], exact[single], rounds, row, name, device, "single")


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_explicit_kernels(device: str) -> None:
    @tw.gpu
    def explicit(x: tw.GpuBuffer[tw.f64], y: tw.GpuBuffer[tw.f64], out: tw.GpuBuffer[tw.f64]) -> None:
        i = tw.gpu_thread_id()
        n = len(x)
        if i < n:
            out[i] = min(x[i], y[i])
            out[n + i] = max(x[i], y[i])
            out[2 * n + i] = x[i] ** 0
            out[3 * n + i] = x[i] if x[i] < 0.0 else 0.0

    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -2.0])
    x, y = np.repeat(values, 7), np.tile(values, 7)
    out = np.full(4 * len(x), 7.0)
    explicit[2, 32](x, y, out, device=device)
    with np.errstate(all="ignore"):
        wanted = [_least(x, y), _most(x, y), np.ones_like(x), np.where(x < 0, x, 0.0)]
    for row, exact in enumerate(wanted):
        assert_same(out.reshape(4, -1)[row], exact, 0, row, device)


# -- reductions -----------------------------------------------------------------------------------------------------------


@tw.kernel
def all_of(x: tw.Array) -> tuple[float, float, int, int]:
    return tw.min(x), tw.max(x), tw.argmin(x), tw.argmax(x)


@tw.kernel
def rows_of(x: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array, tw.Array]:
    return tw.min(x, axis=1), tw.max(x, axis=1), tw.argmin(x, axis=1), tw.argmax(x, axis=1)


@tw.kernel
def columns_of(x: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array, tw.Array]:
    return tw.min(x, axis=0), tw.max(x, axis=0), tw.argmin(x, axis=0), tw.argmax(x, axis=0)


def _reduced(rows: np.ndarray) -> list[np.ndarray]:
    wide = rows.astype(np.float64)
    low, high = wide.min(axis=1), wide.max(axis=1)
    any_minus = ((wide == 0) & np.signbit(wide)).any(axis=1)
    any_plus = ((wide == 0) & ~np.signbit(wide)).any(axis=1)
    low = np.where(low == 0, np.where(any_minus, -0.0, 0.0), low)
    high = np.where(high == 0, np.where(any_plus, 0.0, -0.0), high)
    return [low, high, np.argmin(wide, axis=1), np.argmax(wide, axis=1)]


@pytest.mark.parametrize(("device", "name"), [("cpu", "f16"), ("cpu", "f32"), ("cpu", "f64"), ("emulator:thread", "f32")])
def test_reductions(name: str, device: str) -> None:
    """One row, several, and so many that cores share them: the first place of the extreme value, NaN before all others."""
    random = np.random.default_rng(3)
    shapes = [(1, 1), (3, 5), (4, 70), (33, 8), (300, 513), (2, 60_000)] if device == "cpu" else [(4, 70)]
    kinds = [(0.0, -0.0), (-0.0,), (0.0, -0.0, -1.0), (0.0, -0.0, 1.0), (1.0, np.nan, -2.0), (1.0, np.inf, -np.inf, 2.0), (np.inf,), (-np.inf,), (np.nan, -0.0)]
    for shape in shapes:
        for kind in kinds:
            x = random.choice(np.array(kind), size=shape).astype(FLOATS[name])
            for kernel, rows in ((all_of, x.reshape(1, -1)), (rows_of, x), (columns_of, x.T)):
                if len(rows) > 1000:
                    continue
                for found, exact in zip(kernel(x, device=device), _reduced(rows), strict=True):
                    found = np.atleast_1d(np.asarray(found)).astype(np.float64)
                    assert_same(found, exact.astype(np.float64), 0, shape, kind, len(rows))


# -- what GPUs execute -------------------------------------------------------------------------------------------------------


@tw.kernel
def lower(x: tw.Array, y: tw.Array) -> tw.Array:
    out = tw.empty_like(x)
    for i in tw.grid(len(x)):
        out[i] = min(x[i], y[i]) + (x[i] if x[i] < 0.0 else 0.0)
    return out


@pytest.mark.parametrize(("target", "dtype", "wanted"), [("sm_90a", tw.f32, "min.NaN.f32"), ("sm_90a", tw.f64, "setp.nan.f64"), ("sm_75", tw.f32, "setp.nan.f32")])
def test_code_of_gpus(target: str, dtype: tw.DType, wanted: str) -> None:
    """NaN is looked for where the instruction does not propagate it; a choice between x and 0 is no minimum, which would give -0."""
    spec = ArrayArg(dtype, 1, None, 16)
    text = compile_kernel(lower.function, Signature((spec, spec)), NVPTX[target]).code.decode()
    assert wanted in text
    assert f"min.{dtype.name}" not in text or all("0f00000000" not in line and "0d0000000000000000" not in line for line in text.splitlines() if "min." in line)
    assert "selp" in text
