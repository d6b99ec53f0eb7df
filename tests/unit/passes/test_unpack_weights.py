"""Products of packed weights with many rows: every format, dtype and odd size is right at the thread stage; what is unpacked, and where."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk
from tilewright.passes.routes import Stages
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.matrix import GpuProduct, Mma, Wgmma

BF16 = ml_dtypes.bfloat16
FORMATS = [*(d for d in dtypes.ALL if d.is_packed), tw.q4_group(32), tw.q4_group(16, scale=tw.f32, zero_point=True), tw.q8_group(64, zero_point=True)]


def product(x: tw.Array, w: tw.Array) -> tw.Array:
    m, k = x.shape
    n = w.shape[0]
    y = tw.empty((m, n), tw.f32)
    for b, i in tw.grid(m, n):
        total = 0.0
        for j in range(k):
            total += x[b, j] * w[i, j]
        y[b, i] = total
    return y


def finished(x: tw.Array, w: tw.Array, bias: tw.Array, r: tw.Array) -> tw.Array:
    m, k = x.shape
    n = w.shape[0]
    y = tw.empty((m, n), x.dtype)
    for b, i in tw.grid(m, n):
        total = 0.0
        for j in range(k):
            total += x[b, j] * w[i, j]
        y[b, i] = tw.silu(total + bias[i]) + r[b, i]
    return y


def gated(x: tw.Array, g: tw.Array, u: tw.Array) -> tw.Array:
    m, k = x.shape
    n = g.shape[0]
    y = tw.empty((m, n), tw.f32)
    for b, i in tw.grid(m, n):
        one = 0.0
        two = 0.0
        for j in range(k):
            one += x[b, j] * g[i, j]
            two += x[b, j] * u[i, j]
        y[b, i] = one * two
    return y


def columns(x: tw.Array, w: tw.Array) -> tw.Array:
    """Weights along the rows of the result, from a row on."""
    m, k = x.shape
    n = w.shape[0] - 5
    y = tw.empty((n, m), tw.f32)
    for i, b in tw.grid(n, m):
        total = 0.0
        for j in range(k):
            total += w[i + 5, j] * x[b, j]
        y[i, b] = total
    return y


def turned(x: tw.Array, w: tw.Array) -> tw.Array:
    return x @ w.T


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def lowered(function: Callable[..., object], *arrays: object, target: str = "sm_90a", **options: object) -> Stages:
    return tw.kernel(**options)(function).stages(*arrays, target=target).stages  # type: ignore[call-overload, no-any-return]


def computed(stages: Stages, *arrays: object) -> np.ndarray:
    """What the threads of the kernels compute, in the emulator."""
    memory = [a.blocks if isinstance(a, tw.PackedArray) else a for a in arrays]
    inputs = dict(zip((a.name for a in stages.thread.inputs), memory, strict=True))
    return run_program(stages.thread, inputs)[stages.thread.outputs[0].name]  # type: ignore[arg-type]


def rounded(w: tw.PackedArray, dtype: type) -> np.ndarray:
    """The weights as they are multiplied."""
    exact = np.asarray(tw.dequantize(w))
    return (exact if dtype is np.float32 else exact.astype(dtype)).astype(np.float64)


def check(stages: Stages, expected: np.ndarray, *arrays: object, tolerance: float = 3e-6) -> None:
    got = computed(stages, *arrays).astype(np.float64)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_format(dtype: DType) -> None:
    cols = max(64, 2 * dtype.block) if dtype.block < 256 else 256
    w, x = tw.quantize(normal(31, cols), dtype), normal(66, cols).astype(BF16)
    stages = lowered(product, x, w)
    assert isinstance(stages.schedules[1], Wgmma) and stages.schedules[1].unpack
    check(stages, x.astype(np.float64) @ rounded(w, BF16).T, x, w)
    wide = [op for op in walk(stages.thread.calls[0].kernel.body) if op.opcode == "store" and "vec" in str(op.operands[-1].type)]
    assert wide, "elements are stored together"


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_unpacked_on_the_way(dtype: DType) -> None:
    """Few rows: no scratch, nothing unpacked in memory."""
    cols = max(128, dtype.block)
    w, x = tw.quantize(normal(33, cols), dtype), normal(17, cols).astype(BF16)
    # Threads that unpack q6_k have too much to hold for it to be the choice.
    stages = lowered(product, x, w, schedule="family=mma m=32 n=64 k=128 stages=2 warps_m=2 warps_n=2 persistent=0 b_copy=packed" if dtype is tw.q6_k else "")
    assert isinstance(stages.schedules[0], Mma) and stages.schedules[0].b_copy == "packed" and not stages.loop.scratch
    check(stages, x.astype(np.float64) @ rounded(w, BF16).T, x, w)


@pytest.mark.parametrize(("target", "schedule"), [
    ("sm_90a", "family=mma m=64 n=64 k=64 stages=3 warps_m=2 warps_n=2 persistent=0 b_copy=packed split_k=3"),
    ("sm_80", "family=mma m=16 n=128 k=64 stages=2 warps_n=8 persistent=0 b_copy=packed"),
    ("sm_80", "family=mma m=32 n=64 k=32 stages=2 warps_n=4 b_copy=packed"),
])  # fmt: skip
def test_tiles_that_unpack_on_the_way(target: str, schedule: str) -> None:
    w, x = tw.quantize(normal(70, 640), tw.q4_1), normal(65, 640).astype(np.float16)
    check(lowered(product, x, w, target=target, schedule=schedule), x.astype(np.float64) @ rounded(w, np.float16).T, x, w)


def test_what_cannot_be_unpacked_on_the_way() -> None:
    w, x = tw.quantize(normal(40, 96), tw.q8_0), normal(16, 96)
    with pytest.raises(tw.UserError, match="b_copy=packed is for family=mma"):
        lowered(product, x.astype(BF16), w, schedule="family=mma m=16 n=32 k=64 stages=2 warps_n=2 persistent=0 b_copy=packed")
    stages = lowered(product, x.astype(BF16), w)
    assert isinstance(stages.schedules[1], Wgmma) and stages.schedules[1].unpack, "96 are no whole steps of 64"
    check(stages, x.astype(BF16).astype(np.float64) @ rounded(w, BF16).T, x.astype(BF16), w)
    assert lowered(product, x, w).loop.scratch, "f32 is not for matrix units"


@pytest.mark.parametrize(("target", "dtype", "family"), [("sm_90a", np.float16, Wgmma), ("sm_90a", np.float32, Mma), ("sm_80", BF16, Mma), ("sm_80", np.float32, Mma)])
@pytest.mark.parametrize(("m", "n"), [(70, 33)])
def test_dtypes_and_targets(target: str, dtype: type, family: type[GpuProduct], m: int, n: int) -> None:
    w, x = tw.quantize(normal(n, 256), tw.q4_k), normal(m, 256).astype(dtype)
    stages = lowered(product, x, w, target=target)
    assert isinstance(stages.schedules[1], family)
    (scratch,) = stages.loop.scratch
    assert scratch.type.dtype.numpy == np.dtype(dtype)
    check(stages, x.astype(np.float64) @ rounded(w, dtype).T, x, w)


def test_tf32_where_asked() -> None:
    w, x = tw.quantize(normal(64, 128), tw.q8_0), normal(64, 128)
    stages = lowered(product, x, w, precision="tf32")
    assert isinstance(stages.schedules[1], Wgmma)
    check(stages, x.astype(np.float64) @ rounded(w, np.float32).T, x, w, tolerance=2e-3)


@pytest.mark.parametrize("m", [20, 80])
def test_what_follows_the_sum(m: int) -> None:
    w, x = tw.quantize(normal(48, 256), tw.q6_k), normal(m, 256).astype(BF16)
    bias, r = normal(48), normal(m, 48).astype(BF16)
    total = x.astype(np.float64) @ rounded(w, BF16).T + bias
    check(lowered(finished, x, w, bias, r), total / (1 + np.exp(-total)) + r.astype(np.float64), x, w, bias, r, tolerance=8e-3)


def test_products_side_by_side() -> None:
    g, u, x = tw.quantize(normal(64, 256), tw.q4_k), tw.quantize(normal(64, 256) + 1, tw.q4_k), normal(64, 256).astype(BF16)
    stages = lowered(gated, x, g, u)
    assert len(stages.thread.calls) == 3 and len(stages.loop.scratch) == 2
    check(stages, (x.astype(np.float64) @ rounded(g, BF16).T) * (x.astype(np.float64) @ rounded(u, BF16).T), x, g, u, tolerance=1e-5)


def test_rows_of_the_result_and_rows_from_a_place_on() -> None:
    w, x = tw.quantize(normal(69, 64), tw.q4_0), normal(33, 64).astype(BF16)
    stages = lowered(columns, x, w)
    assert stages.loop.scratch[0].type.shape[0].evaluate({"w$0": 69}) == 64, "only rows that are read are unpacked"
    check(stages, (x.astype(np.float64) @ rounded(w, BF16).T).T[5:], x, w)


def test_a_transposed_view() -> None:
    """`x @ w.T` writes no transposed weights."""
    w, x = tw.quantize(normal(40, 256), tw.q5_k), normal(65, 256).astype(BF16)
    stages = lowered(turned, x, w)
    assert [str(a.type.dtype) for a in stages.loop.scratch] == ["bf16"] and len(stages.loop.calls) == 2
    check(stages, x.astype(np.float64) @ rounded(w, BF16).T, x, w)


def test_few_rows_are_not_unpacked() -> None:
    w = tw.quantize(normal(64, 512), tw.q4_k)
    stages = lowered(product, normal(2, 512).astype(BF16), w)
    assert len(stages.schedules) == 1 and isinstance(stages.schedules[0], Gemv) and not stages.loop.scratch


@pytest.mark.parametrize("dtype", [tw.q4_k, tw.q6_k, tw.q8_0], ids=str)
@pytest.mark.parametrize("m", [2, 37])
def test_on_a_cpu(dtype: DType, m: int) -> None:
    """Nothing is rounded; what has scales for parts of its blocks is unpacked by vectors first."""
    w, x = tw.quantize(normal(33, 512), dtype), normal(m, 512)
    expected = x.astype(np.float64) @ rounded(w, np.float32).T
    np.testing.assert_allclose(tw.kernel(product)(x, w), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    stages = lowered(product, x, w, target="x86-64-avx512")
    assert [a.type.dtype for a in stages.loop.scratch if "unpacked" in a.name] == ([] if dtype is tw.q8_0 else [tw.f32])
    check(stages, expected, x, w, tolerance=1e-5)


def test_products_side_by_side_on_a_cpu() -> None:
    g, u, x = tw.quantize(normal(40, 64), tw.q8_0), tw.quantize(normal(40, 64) + 1, tw.q8_0), normal(20, 64).astype(BF16)
    expected = (x.astype(np.float64) @ rounded(g, np.float32).T) * (x.astype(np.float64) @ rounded(u, np.float32).T)
    np.testing.assert_allclose(tw.kernel(gated)(x, g, u), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_a_schedule_that_is_asked_for() -> None:
    w, x = tw.quantize(normal(64, 256), tw.q4_k), normal(64, 256).astype(BF16)
    stages = lowered(product, x, w, schedule="family=mma m=32 n=32 k=32 stages=4 warps_m=1 warps_n=2 persistent=0")
    assert isinstance(stages.schedules[1], Mma) and stages.schedules[1].unpack
    check(stages, x.astype(np.float64) @ rounded(w, BF16).T, x, w)
    with pytest.raises(tw.UserError, match="family=gemv"):
        lowered(product, x, w, schedule="family=gemv m=1 n=4 k=512")
