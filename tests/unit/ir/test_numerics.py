"""The NumPy semantics of the ops: exact where the op table says exact, silent, and one rounding where one is promised."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tilewright.base import dtypes
from tilewright.base.dtypes import DType, bf16, bool_, by_name, f16, f32, f64, i8, i32, i64, u32
from tilewright.ir.nodes import Attrs
from tilewright.ir.numerics import evaluate, fma
from tilewright.ir.ops import OPS

RANDOM = np.random.default_rng(7)
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def run(opcode: str, dtype: DType, *operands: object, to: DType | None = None) -> np.ndarray:
    attrs = {"dtype": to} if to else {}
    return evaluate(opcode, [np.array(o, dtype.numpy) for o in operands], attrs, dtype)


def cast(dtype: DType, target: DType, value: object) -> np.ndarray:
    return run("cast", dtype, value, to=target)


def bits(count: int, dtype: DType) -> np.ndarray:
    return RANDOM.integers(0, 2**dtype.bits, count, dtype=by_name(f"u{dtype.bits}").numpy).view(dtype.numpy)


PAIRS: dict[str, Attrs] = {"pair_bytes": {"high": 0x43}, "add_pairs": {"dtype": bf16}, "dot_pairs": {"dtype": bf16}}
"""Attributes of ops on words of two floats."""


# -- coverage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", [d.name for d in OPS.values() if d.group in ("elementwise", "function")])
def test_every_op_of_the_table_has_a_rule(opcode: str) -> None:
    from tilewright.ir.ops import TypeRuleError, result_types
    from tilewright.ir.types import Scalar

    tried = 0
    for dtype in dtypes.SCALARS:
        for count in (1, 2, 3, 4):
            types = [Scalar(dtype)] * count
            if opcode == "select":
                types = [Scalar(bool_), Scalar(dtype), Scalar(dtype)]
            elif opcode == "scale_by_power":
                types = [Scalar(dtype), Scalar(dtypes.i32)]
            attrs: Attrs = {"dtype": by_name(f"u{dtype.bits}")} if opcode in ("cast", "bitcast") else PAIRS.get(opcode, {})
            try:
                (result,) = result_types(opcode, types, attrs)
            except TypeRuleError:
                continue
            assert isinstance(result, Scalar)
            values = [np.ones((2, 3), t.dtype.numpy) for t in types]
            got = evaluate(opcode, values, attrs, types[0].dtype)
            assert got.dtype == result.dtype.numpy
            assert got.shape == (2, 3)
            one = evaluate(opcode, [v[0, 0] for v in values], attrs, types[0].dtype)
            assert one.shape == ()
            tried += 1
    assert tried


# -- integers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"])
def test_integers_follow_python_and_wrap(name: str) -> None:
    dtype = by_name(name)
    low, high = int(dtype.min_value), int(dtype.max_value)
    edge = [low, low + 1, high, high - 1, 0, 1, 3, 7, 5, high // 2]
    edge += [-1, -2, -7] if dtype.kind == "i" else []

    def wrap(value: int) -> int:
        return (value - low) % 2**dtype.bits + low

    rules: dict[str, Callable[[int, int], int]] = {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
        "floordiv": lambda a, b: a // b if b else 0, "mod": lambda a, b: a % b if b else 0,
        "shl": lambda a, b: a << (b % dtype.bits), "shr": lambda a, b: a >> (b % dtype.bits),
        "min": min, "max": max, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    }  # fmt: skip
    for opcode, rule in rules.items():
        for a in edge:
            for b in edge:
                assert int(run(opcode, dtype, a, b)) == wrap(rule(a, b)), (opcode, a, b)
    for a in edge:
        assert int(run("neg", dtype, a)) == wrap(-a)
        assert int(run("abs", dtype, a)) == wrap(abs(a))
        assert int(run("not", dtype, a)) == wrap(~a)


def test_bool_is_logical() -> None:
    assert run("not", bool_, [True, False]).tolist() == [False, True]
    assert run("min", bool_, [True, False], [True, True]).tolist() == [True, False]
    assert run("xor", bool_, [True, False], [True, True]).tolist() == [False, True]


# -- floats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "f64"])
def test_min_and_max_propagate_nan_and_order_zeros(name: str) -> None:
    dtype = by_name(name)
    for opcode in ("min", "max"):
        assert np.isnan(run(opcode, dtype, [NAN, 1.0, NAN], [1.0, NAN, NAN]).astype(np.float64)).all()
        signs = np.signbit(run(opcode, dtype, [0.0, -0.0], [-0.0, 0.0]).astype(np.float64))
        assert signs.tolist() == [opcode == "min"] * 2


def test_comparisons_with_nan() -> None:
    for opcode in ("eq", "lt", "le", "gt", "ge"):
        assert not run(opcode, f32, NAN, NAN)
    assert run("ne", f32, NAN, NAN)


def test_rounding_ops() -> None:
    value = [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, -0.2]
    assert run("round", f32, value).tolist() == [-2, -2, 0, 0, 2, 2, 0]
    assert run("floor", f32, value).tolist() == [-3, -2, -1, 0, 1, 2, -1]
    assert run("ceil", f32, value).tolist() == [-2, -1, 0, 1, 2, 3, 0]
    assert run("trunc", f32, value).tolist() == [-2, -1, 0, 0, 1, 2, 0]


def test_float_floordiv_is_the_floor_of_the_exact_quotient() -> None:
    a = (RANDOM.normal(size=2000) * 1e4).astype(np.float32)
    b = RANDOM.normal(size=2000).astype(np.float32)
    got, rest = run("floordiv", f32, a, b), run("mod", f32, a, b)
    for x, y, q, r in zip(a, b, got, rest, strict=True):
        exact = math.floor(Fraction(float(x)) / Fraction(float(y)))
        if abs(exact) < 2**24:
            assert float(q) == exact
        assert float(r) == np.float32(float(Fraction(float(x)) - exact * Fraction(float(y))))
    assert run("floordiv", f32, 1.0, 0.0) == INF
    assert np.isnan(run("mod", f32, 1.0, 0.0))


def nearest(exact: Fraction, got: np.floating) -> bool:
    """Whether no neighbour of `got` is nearer, and on a tie its last bit is zero."""
    distance = abs(Fraction(float(got)) - exact)
    for direction in (-INF, INF):
        neighbour = np.nextafter(got, got.dtype.type(direction))
        if not np.isfinite(neighbour):
            continue
        other = abs(Fraction(float(neighbour)) - exact)
        if other < distance or (other == distance and int(got.view(f"u{got.itemsize}")) & 1):
            return False
    return True


def operands(dtype: DType, kind: str) -> list[np.ndarray]:
    count = 1500
    if kind == "any bits":
        return [bits(count, dtype) for _ in range(3)]
    spread = 3 if kind == "short" else 40
    values = [np.ldexp(RANDOM.uniform(-1, 1, count), RANDOM.integers(-spread, spread, count)) for _ in range(3)]
    if kind == "short":  # few digits: many exact ties
        values = [np.round(v * 64) / 64 for v in values]
        values[1] = values[1] * 2.0 ** -(dtype.mantissa - 6)
    if kind == "tiny":
        low = -1040 if dtype is f64 else -140
        values = [np.ldexp(values[0], low // 2), np.ldexp(values[1], low // 2), np.ldexp(values[2], low)]
    a, b, c = (v.astype(dtype.numpy) for v in values)
    if kind == "cancel":
        c = -(a * b)
    return [a, b, c]


@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize("kind", ["any bits", "wide", "short", "cancel", "tiny"])
def test_fma_rounds_once(dtype: DType, kind: str) -> None:
    a, b, c = operands(dtype, kind)
    got = fma(a, b, c)
    checked = 0
    for x, y, z, r in zip(a, b, c, got, strict=True):
        if not all(map(np.isfinite, (x, y, z, r))):
            continue
        assert nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), r), (x, y, z, r)
        checked += 1
    assert checked > 300


def test_fma_specials() -> None:
    for dtype in (f32, f64):
        big = float(np.finfo(dtype.numpy).max)
        tiny = float(np.finfo(dtype.numpy).smallest_subnormal)
        assert run("fma", dtype, big, 2.0, -big) == big
        assert run("fma", dtype, big, big, 0.0) == INF
        assert run("fma", dtype, tiny, 0.5, 0.0) == 0
        assert run("fma", dtype, tiny, 0.75, 0.0) == tiny
        assert run("fma", dtype, tiny, 0.5, tiny) == 2 * tiny
        assert np.signbit(run("fma", dtype, -tiny, 0.25, 0.0))  # not zero before rounding, so the sign stays
        assert not np.signbit(run("fma", dtype, -0.0, 0.25, 0.0))
        assert run("fma", dtype, INF, 1.0, 1.0) == INF
        assert np.isnan(run("fma", dtype, INF, 0.0, 1.0))
        assert np.isnan(run("fma", dtype, INF, 1.0, -INF))
        assert np.isnan(run("fma", dtype, 1.0, NAN, 1.0))


# -- conversions ----------------------------------------------------------------------------------------------------


def test_float_to_integer_truncates_and_saturates() -> None:
    value = [1.9, -1.9, NAN, INF, -INF, 1e30, -1e30, 127.5, -128.5]
    assert cast(f32, i8, value).tolist() == [1, -1, 0, 127, -128, 127, -128, 127, -128]
    assert cast(f32, by_name("u8"), [-0.5, -3.0, 255.9, 256.0, NAN]).tolist() == [0, 0, 255, 255, 0]
    assert cast(f64, i64, [2.0**63, -(2.0**63), 2.0**63 - 1024, INF]).tolist() == [
        2**63 - 1, -(2**63), 2**63 - 1024, 2**63 - 1]  # fmt: skip
    assert cast(f64, by_name("u64"), [2.0**64, 2.0**63, 2.0**64 - 2048]).tolist() == [2**64 - 1, 2**63, 2**64 - 2048]
    assert cast(f32, i32, [2147483648.0, -2147483648.0, 2147483520.0]).tolist() == [2**31 - 1, -(2**31), 2147483520]


def test_integer_conversions() -> None:
    assert cast(i32, i8, [300, -129]).tolist() == [44, 127]
    assert cast(i32, by_name("u32"), -1) == 2**32 - 1
    assert cast(i32, bool_, [0, 5]).tolist() == [False, True]
    assert cast(f32, bool_, [0.0, -0.0, NAN, 1e-45]).tolist() == [False, False, True, True]
    assert cast(bool_, f32, [True, False]).tolist() == [1.0, 0.0]
    assert cast(by_name("f8e4m3"), bool_, [0.0, 2.0]).tolist() == [False, True]


@pytest.mark.parametrize("target", ["f16", "bf16", "f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("source", ["f64", "f32", "i64", "u64", "i32"])
def test_conversion_to_a_small_float_rounds_once(source: str, target: str) -> None:
    """Just above and below each midpoint of two neighbours, where rounding twice goes wrong."""
    origin, small = by_name(source), by_name(target)
    patterns = np.arange(0, 2**small.bits // 2 - 1, 1 if small.bits == 8 else 37).astype(f"u{small.bits // 8}")
    with np.errstate(invalid="ignore"):  # signalling NaN patterns, dropped below
        low = patterns.view(small.numpy).astype(np.float64)
        high = (patterns + patterns.dtype.type(1)).view(small.numpy).astype(np.float64)
    keep = np.isfinite(low) & np.isfinite(high)
    low, high = low[keep], high[keep]
    middle = (low + high) / 2  # exact
    even = np.where((patterns[keep] & 1) == 0, low, high)
    if origin.is_float:
        middle = middle.astype(origin.numpy)
        below, above = (np.nextafter(middle, origin.numpy.type(s)) for s in (-INF, INF))
        normal = middle > np.finfo(origin.numpy).tiny
    else:
        normal = (middle >= 2) & (middle < 2.0 ** (origin.bits - 2)) & (middle == np.floor(middle))
        middle = np.where(normal, middle, 0).astype(origin.numpy)
        below, above = middle - origin.numpy.type(1), middle + origin.numpy.type(1)
        assert normal.any()
    for value, expected in ((below, low), (middle, even), (above, high)):
        got = cast(origin, small, value).astype(np.float64)
        assert (got[normal] == expected[normal]).all()


def test_conversions_keep_specials() -> None:
    for name in ("f16", "bf16", "f8e5m2"):
        got = cast(f64, by_name(name), [INF, -INF, 1e300, NAN, -0.0]).astype(np.float64)
        assert got[0] == INF and got[1] == -INF and got[2] == INF and np.isnan(got[3]) and np.signbit(got[4])
        tiny = cast(f64, by_name(name), [1e-300, -1e-300]).astype(np.float64)
        assert tiny.tolist() == [0, 0]
        assert np.signbit(tiny).tolist() == [False, True]
    assert np.isnan(cast(f64, by_name("f8e4m3"), [INF, 1e5, NAN]).astype(np.float64)).all()
    assert cast(f64, by_name("f8e4m3"), 450.0).astype(np.float64) == 448


def test_bitcast() -> None:
    assert run("bitcast", f32, [1.0, -0.0], to=i32).tolist() == [0x3F800000, -(2**31)]
    assert run("bitcast", by_name("u16"), 0x3F80, to=by_name("bf16")) == ml_dtypes.bfloat16(1)
    # The lanes of a vec, first ones first; one lane is a scalar.
    bytes_ = np.array([[0, 0, 0x80, 0x3F], [0, 0, 0, 0x40]], np.uint8)
    assert evaluate("bitcast", [bytes_], {"dtype": f32}, by_name("u8")).tolist() == [1.0, 2.0]
    assert evaluate("bitcast", [bytes_], {"dtype": by_name("u16")}, by_name("u8")).tolist() == [[0, 0x3F80], [0, 0x4000]]


def test_select_takes_a_scalar_condition() -> None:
    values = [np.array(True), np.array([1, 2], np.int32), np.array([3, 4], np.int32)]
    assert evaluate("select", values, {}, bool_).tolist() == [1, 2]


# -- words of two floats --------------------------------------------------------------------------------------------


def words(dtype: DType, pairs: list[tuple[float, float]]) -> np.ndarray:
    low, high = (half.view(np.uint16).astype(np.uint32) for half in np.array(pairs).astype(dtype.numpy).T)
    return np.asarray(low | high << np.uint32(16))


def test_bytes_become_halves_of_words() -> None:
    word = [np.array([0x89ABCDEF, 0x12345678], np.uint32)]
    assert evaluate("pair_bytes", word, {"high": 0x43}, u32).tolist() == [0x43CD43EF, 0x43564378]
    assert evaluate("pair_bytes", word, {"high": 0xC3, "upper": True}, u32).tolist() == [0xC389C3AB, 0xC312C334]


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_pairs_are_added_and_multiplied(dtype: DType) -> None:
    attrs: Attrs = {"dtype": dtype}
    a, b = words(dtype, [(1.0, -2.5), (0.0, INF)]), words(dtype, [(0.5, 4.0), (-0.0, 1.0)])
    assert evaluate("add_pairs", [a, b], attrs, u32).tolist() == words(dtype, [(1.5, 1.5), (0.0, INF)]).tolist()
    # Half a unit in the last place goes to the even neighbour, a little more goes up.
    unit = 2.0**-dtype.mantissa
    ones, some = words(dtype, [(1.0, 1.0)]), words(dtype, [(unit / 2, unit * 0.75)])
    assert evaluate("add_pairs", [ones, some], attrs, u32).tolist() == words(dtype, [(1.0, 1 + unit)]).tolist()
    c, d = words(dtype, [(3.0, 0.25), (2.0, 1.0)]), words(dtype, [(-1.0, 8.0), (0.5, 3.0)])
    got = evaluate("dot_pairs", [a[:1], c[:1], b[:1], d[:1]], attrs, u32)
    assert got.dtype == np.float32
    assert got.tolist() == [1.0 * 0.5 - 2.5 * 4.0 + 3.0 * -1.0 + 0.25 * 8.0]


# -- functions ------------------------------------------------------------------------------------------------------


def test_functions_match_the_c_library() -> None:
    x = np.array([-3.5, -0.5, 1e-3, 0.7, 2.0, 11.0])
    for opcode in ("exp", "sin", "cos", "tan", "tanh", "sinh", "cosh", "erf"):
        exact = np.array([getattr(math, opcode)(float(v)) for v in x])
        assert np.abs(run(opcode, f64, x) / exact - 1).max() < 4e-16, opcode
        single = run(opcode, f32, x)
        exact = np.array([getattr(math, opcode)(float(v)) for v in x.astype(np.float32)])
        assert (single == exact.astype(np.float32)).all(), opcode


def test_erf_over_its_range() -> None:
    x = np.concatenate([np.linspace(-7, 7, 3001), np.ldexp(1.0, -np.arange(1074))])
    exact = np.array([math.erf(v) for v in x])
    assert (np.abs(run("erf", f64, x) - exact) <= np.spacing(np.abs(exact))).all()
    assert run("erf", f64, [INF, -INF, 0.0, -0.0]).tolist() == [1, -1, 0, 0]
    assert np.isnan(run("erf", f64, NAN))


def test_function_specials() -> None:
    assert run("sigmoid", f32, [INF, -INF, 0.0]).tolist() == [1, 0, 0.5]
    assert run("rsqrt", f32, [0.0, -0.0, INF, 4.0]).tolist() == [INF, -INF, 0, 0.5]
    assert run("pow", f32, [NAN, 1.0, -2.0, 0.0, -8.0], [0.0, NAN, 3.0, -1.0, 0.5])[:4].tolist() == [1, 1, -8, INF]
    assert run("exp2_approx", f32, [-127.0, -126.0, 3.0]).tolist() == [0, 2.0**-126, 8]
    assert run("exp", by_name("bf16"), 1.0) == ml_dtypes.bfloat16(math.e)
