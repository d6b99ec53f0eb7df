"""The shared LLVM writer: literals, and ops whose edge cases LLVM would leave undefined."""

from __future__ import annotations

import numpy as np
import pytest

from support import array, cast_kernel, loop_kernel, map_kernel, program, run_cpu, run_stages
from tilewright.base.dtypes import SCALARS, DType, bf16, bool_, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64
from tilewright.codegen.llvm.emitter import literal, llvm_type, memory_type
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Scalar, Vec

INTEGERS = (i8, i16, i32, i64, u8, u16, u32, u64)


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (1.0, f32, "0x3FF0000000000000"), (0.1, f32, "0x3FB99999A0000000"), (0.1, f64, "0x3FB999999999999A"),
        (float("nan"), f64, "0x7FF8000000000000"), (float("-inf"), f32, "0xFFF0000000000000"), (-0.0, f32, "0x8000000000000000"),
        (1.0, f16, "0xH3C00"), (1.0, bf16, "0xR3F80"), (True, bool_, "true"), (0, bool_, "false"),
        (200, i8, "-56"), (-1, u8, "-1"), (255, u8, "-1"), (2**63, u64, "-9223372036854775808"), (7, i64, "7"),
    ],
)  # fmt: skip
def test_literals(value: float, dtype: DType, text: str) -> None:
    assert literal(value, dtype) == text


def test_types() -> None:
    assert llvm_type(Scalar(bool_)) == "i1"
    assert memory_type(bool_) == "i8"
    assert llvm_type(Vec(bf16, 8)) == "<8 x bfloat>"
    assert memory_type(u16, 4) == "<4 x i16>"


def _edge_values(dtype: DType) -> np.ndarray:
    info = np.iinfo(dtype.numpy)
    return np.array([info.min, info.max, 0, 1, 2, 3, 7, info.max // 2, *((-1, -2, -3, -7) if dtype.kind == "i" else ())], dtype.numpy)


def _pairs(dtype: DType) -> dict[str, np.ndarray]:
    values = _edge_values(dtype)
    return {"a": np.repeat(values, len(values)), "b": np.tile(values, len(values))}


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("opcode", ["floordiv", "mod", "shl", "shr", "min", "max"])
def test_integer_edges(opcode: str, dtype: DType) -> None:
    """Division by zero gives zero, the smallest integer over -1 wraps, shift counts are taken modulo the bits."""
    kernel, inputs = program(map_kernel(opcode, dtype, 2)), _pairs(dtype)
    expected = run_stages(kernel, inputs)
    native = run_cpu(kernel, inputs)["o"]
    a, b = (inputs[n].astype(object) for n in "ab")
    if opcode in ("floordiv", "mod"):
        exact = [0 if y == 0 else (x // y if opcode == "floordiv" else x % y) for x, y in zip(a, b, strict=True)]
        wrapped = np.array([_wrap(v, dtype) for v in exact], dtype.numpy)
        np.testing.assert_array_equal(native, wrapped)
    for stage, outputs in expected.items():
        np.testing.assert_array_equal(outputs["o"], native, stage)


def _wrap(value: int, dtype: DType) -> int:
    value &= (1 << dtype.bits) - 1
    return value - (1 << dtype.bits) if dtype.kind == "i" and value >> (dtype.bits - 1) else value


@pytest.mark.parametrize("dtype", [i8, i32, u16, u64], ids=str)
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 8, 64, -1, -2, -8])
def test_division_by_constants(dtype: DType, divisor: int) -> None:
    """Constants take shorter code, powers of two the shortest; vectors and the scalar rest must agree."""
    if divisor < 0 and dtype.kind == "u":
        pytest.skip("no negative divisors")
    x, q, r = array("x", dtype, "n"), array("q", dtype, "n"), array("r", dtype, "n")

    def body(b: Builder, i: Value) -> None:
        value = b.op("load", x, i)
        b.multi("store", q, i, b.op("floordiv", value, b.const(divisor, dtype)))
        b.multi("store", r, i, b.op("mod", value, b.const(divisor, dtype)))

    values = np.tile(_edge_values(dtype), 13)
    outputs = run_cpu(program(loop_kernel("divide", [x, q, r], ["n"], body), ("q", "r")), {"x": values})
    exact = [(_wrap(v // divisor, dtype), _wrap(v % divisor, dtype)) for v in values.astype(object)]
    np.testing.assert_array_equal(outputs["q"], np.array([e[0] for e in exact], dtype.numpy))
    np.testing.assert_array_equal(outputs["r"], np.array([e[1] for e in exact], dtype.numpy))


@pytest.mark.parametrize("source", [f16, bf16, f32, f64], ids=str)
def test_float_to_integer_saturates(source: DType) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.9, -0.9, 127.5, 128, -128.9, 255.4, 256, 3e9, 65504.0] * 5)
    with np.errstate(all="ignore"):
        values = values.astype(source.numpy)
    outputs = run_cpu(cast_kernel(source, INTEGERS), {"a": values})
    for target in INTEGERS:
        native = outputs[f"o_{target}"]
        low, high = int(target.min_value), int(target.max_value)
        exact = [0 if np.isnan(v) else max(low, min(high, int(v))) if np.isfinite(v) else (high if v > 0 else low) for v in values.astype(float)]
        np.testing.assert_array_equal(native, np.array(exact, target.numpy), str(target))


@pytest.mark.parametrize("opcode", ["min", "max"])
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_extremes_propagate_nan(opcode: str, dtype: DType) -> None:
    nan, inf = float("nan"), float("inf")
    values = np.array([nan, inf, -inf, 1.0, -1.0], dtype.numpy)
    inputs = {"a": np.repeat(values, 5), "b": np.tile(values, 5)}
    expected = (np.minimum if opcode == "min" else np.maximum)(inputs["a"], inputs["b"])
    np.testing.assert_array_equal(run_cpu(program(map_kernel(opcode, dtype, 2)), inputs)["o"], expected)


def test_bools_are_any_nonzero_byte() -> None:
    """Memory of another library may hold true as any nonzero byte; what we write is 1."""
    raw = np.array([0, 1, 2, 255, 0, 128, 7, 0, 3], np.uint8)
    kernel = program(map_kernel("or", bool_, 2))
    result = run_cpu(kernel, {"a": raw.view(np.bool_), "b": np.zeros(9, np.bool_)})["o"]
    np.testing.assert_array_equal(result.view(np.uint8), (raw != 0).astype(np.uint8))


@pytest.mark.parametrize("source", SCALARS, ids=str)
def test_every_conversion_matches_the_reference(source: DType) -> None:
    rng = np.random.default_rng(3)
    if source.is_bool:
        values = rng.integers(0, 2, 77).astype(np.bool_)
    elif source.is_int:
        info = np.iinfo(source.numpy)
        values = np.concatenate([_edge_values(source), rng.integers(info.min, info.max, 64, source.numpy)])
    else:
        values = np.concatenate([rng.standard_normal(64) * 10.0 ** rng.integers(-6, 3, 64), [0.0, -0.0, 448.0, 1e-7, 464.0]]).astype(source.numpy)
    targets = [t for t in SCALARS if t is not source]
    kernel = cast_kernel(source, targets)
    native, stages = run_cpu(kernel, {"a": values}), run_stages(kernel, {"a": values})
    for target in targets:
        found = native[f"o_{target}"]
        for stage in ("source", "thread"):
            wanted = stages[stage][f"o_{target}"]
            bits = f"u{target.itemsize}"
            same = (found.view(bits) == wanted.view(bits)) | (np.isnan(found.astype(float)) & np.isnan(wanted.astype(float)))
            assert same.all(), f"{source} -> {target}, {stage}: {values[~same][:3]} gave {found[~same][:3]}, not {wanted[~same][:3]}"
