"""Products with few rows: which kernels are such, and that what they become is right at every stage, for odd sizes too."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import UserError
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk
from tilewright.passes.pipeline import Stages
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.text import parse_schedule

RNG = np.random.default_rng(5)
BF16 = ml_dtypes.bfloat16


def gemv(w: tw.Array, x: tw.Array) -> tw.Array:
    n, k = w.shape
    y = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        total = 0.0
        for j in range(k):
            total += w[i, j] * x[j]
        y[i] = total
    return y


def few(w: tw.Array, x: tw.Array) -> tw.Array:
    n, k = w.shape
    m = x.shape[0]
    y = tw.empty((m, n), tw.f32)
    for b, i in tw.grid(m, n):
        total = 0.0
        for j in range(k):
            total += x[b, j] * w[i, j]
        y[b, i] = total
    return y


def finished(w: tw.Array, x: tw.Array, bias: tw.Array) -> tw.Array:
    n, k = w.shape
    y = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        total = 0.0
        for j in range(k):
            total += w[i, j] * x[j]
        y[i] = max(total + bias[i], 0.0)
    return y


def gated(g: tw.Array, u: tw.Array, x: tw.Array) -> tw.Array:
    n, k = g.shape
    y = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        a = 0.0
        b = 0.0
        for j in range(k):
            a += g[i, j] * x[j]
            b += u[i, j] * x[j]
        y[i] = a * b
    return y


def matmul(x: tw.Array, w: tw.Array) -> tw.Array:
    return x @ w.T


def lowered(function: Callable[..., object], *arrays: np.ndarray, schedule: str = "", target: str = "sm_90a") -> Stages:
    return tw.kernel(schedule=schedule)(function).stages(*arrays, target=target).stages


def computed(stages: Stages, *arrays: np.ndarray) -> np.ndarray:
    """What the threads of the kernel compute, in the emulator."""
    inputs = dict(zip((a.name for a in stages.thread.inputs), arrays, strict=True))
    return run_program(stages.thread, inputs)[stages.thread.outputs[0].name]


def numbers(dtype: type, *shape: int) -> np.ndarray:
    if np.dtype(dtype).kind in "iu":
        return RNG.integers(-100, 100, shape).astype(dtype)
    return RNG.standard_normal(shape).astype(dtype)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def check(function: Callable[..., object], want: np.ndarray, *arrays: np.ndarray, schedule: str = "", target: str = "sm_90a") -> Stages:
    stages = lowered(function, *arrays, schedule=schedule, target=target)
    assert isinstance(stages.schedules[0], Gemv), stages.schedules
    got = wide(computed(stages, *arrays))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max(initial=1.0))
    return stages


@pytest.mark.parametrize(("n", "k"), [(1, 67), (31, 136), (33, 257), (64, 512), (7, 1030)])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_every_size(n: int, k: int, dtype: type) -> None:
    w, x = numbers(dtype, n, k), numbers(dtype, k)
    check(gemv, wide(w) @ wide(x), w, x)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, ml_dtypes.float8_e4m3fn])
def test_every_dtype(dtype: type) -> None:
    w, x = numbers(dtype, 12, 320), numbers(np.float32 if np.dtype(dtype).kind == "i" else dtype, 320)
    check(gemv, wide(w) @ wide(x), w, x)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
def test_few_rows(m: int) -> None:
    w, x = numbers(np.float32, 37, 160), numbers(np.float32, m, 160)
    check(few, wide(x) @ wide(w).T, w, x)
    assert isinstance(lowered(matmul, x, w).schedules[0], Gemv)


@pytest.mark.parametrize("words", ["n=4 k=256", "n=8 k=768 warps_n=4", "n=3 k=512 warps_k=2 warps_n=1", "n=4 k=2048 warps_n=2 warps_k=4", "n=1 k=256 resident=4 pdl=1"])
def test_every_schedule(words: str) -> None:
    w, x = numbers(BF16, 22, 1304), numbers(BF16, 1304)
    check(gemv, wide(w) @ wide(x), w, x, schedule=f"family=gemv m=1 {words}")
    rows = numbers(BF16, 3, 1304)
    check(few, wide(rows) @ wide(w).T, w, rows, schedule=f"family=gemv m=2 {words}")


def test_what_comes_after_the_sum() -> None:
    w, x, bias = numbers(BF16, 40, 512), numbers(BF16, 512), numbers(np.float32, 40)
    check(finished, np.maximum(wide(w) @ wide(x) + wide(bias), 0), w, x, bias)


def test_two_sums_side_by_side() -> None:
    g, u, x = numbers(BF16, 40, 512), numbers(BF16, 40, 512), numbers(BF16, 512)
    check(gated, (wide(g) @ wide(x)) * (wide(u) @ wide(x)), g, u, x)


def test_infinities_and_nan_stay() -> None:
    w, x = numbers(np.float32, 5, 300), numbers(np.float32, 300)
    w[1, 299], w[2, 0], x[7] = np.inf, np.nan, 2.0
    stages = lowered(gemv, w, x)
    got = computed(stages, w, x)
    assert np.isinf(got[1]) and np.isnan(got[2]) and np.isfinite(got[[0, 3, 4]]).all()


def test_sums_are_one_number_for_each_row() -> None:
    w, x = numbers(BF16, 64, 1536), numbers(BF16, 1536)
    stages = lowered(gemv, w, x, schedule="family=gemv m=1 n=8 k=768 warps_n=4")
    loop = next(op for op in walk(stages.thread.calls[0].kernel.body) if op.opcode == "for")
    assert [str(v.type) for v in loop.results] == ["f32", "f32"]
    widths = [op.attrs.get("width") for op in loop.regions[0].ops if op.opcode == "load"]
    assert widths == [8] * 9  # three vectors of two rows, and of x
    first = next(p for p, op in enumerate(loop.regions[0].ops) if op.opcode == "fma")
    assert all(op.opcode != "load" for op in loop.regions[0].ops[first:])


def test_what_is_no_such_product() -> None:
    few_results = lowered(gemv, numbers(np.float32, 1, 1 << 20), numbers(np.float32, 1 << 20))
    assert not any(isinstance(s, Gemv) for s in few_results.schedules)  # one row: the whole device shares it
    many = lowered(few, numbers(BF16, 256, 128), numbers(BF16, 64, 128))
    assert not isinstance(many.schedules[0], Gemv)


@pytest.mark.parametrize("words", ["n=6 k=256 warps_n=4", "n=8 k=100", "n=8 k=256 warps_n=3", "n=8 k=256 vector=3"])
def test_what_a_schedule_cannot_be(words: str) -> None:
    with pytest.raises(UserError, match="TW005"):
        parse_schedule(f"family=gemv m=1 {words}")


def test_text_of_a_schedule() -> None:
    schedule = Gemv(2, 8, 768, warps_n=4, resident=6, pdl=True)
    assert parse_schedule(schedule.describe()) == schedule
    with pytest.raises(UserError, match="no registers"):
        lowered(gemv, numbers(BF16, 64, 64 * 256), numbers(BF16, 64 * 256), schedule="family=gemv m=1 n=64 k=4096")


# -- packed rows --------------------------------------------------------------------------------------------------------


def packed(n: int, k: int, name: str) -> tuple[tw.PackedArray, np.ndarray]:
    """Packed weights, and what they stand for."""
    made = tw.quantize(numbers(np.float32, n, k), getattr(tw, name))
    return made, wide(np.asarray(tw.dequantize(made)))


def check_packed(function: Callable[..., object], want: np.ndarray, w: tw.PackedArray, x: np.ndarray, schedule: str = "") -> Stages:
    stages = lowered(function, w, x, schedule=schedule)  # type: ignore[arg-type]
    assert isinstance(stages.schedules[0], Gemv) and stages.schedules[0].unit > 1
    got = wide(computed(stages, w.blocks, x))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5 * np.abs(want).max())
    return stages


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "q6_k"])
def test_packed_rows(name: str) -> None:
    w, known = packed(5, 768, name)
    x, rows = numbers(np.float32, 768), numbers(BF16, 3, 768)
    stages = check_packed(gemv, known @ wide(x), w, x)
    # Bytes are read as words, and neighbours at once where they are aligned.
    loads = [op for call in stages.thread.calls for op in walk(call.kernel.body) if op.opcode == "load" and op.operands[0].name == "w"]
    assert {str(op.operands[0].type.dtype) for op in loads} == {"u32" if name == "q4_k" else "u16"}  # type: ignore[union-attr]
    assert {op.attrs.get("width") for op in loads} == {4 if name == "q4_k" else None}
    unit = stages.schedules[0].unit  # type: ignore[union-attr]
    check_packed(few, wide(rows) @ known.T, w, rows, f"family=gemv m=2 n=2 k={64 * unit} vector=1 unit={unit} warps_n=2 warps_k=2")


def test_blocks_of_extreme_numbers() -> None:
    """Scales of zero, the largest numbers of each format, and a row that is not finite."""
    plain = np.zeros((4, 256), np.float32)
    plain[1], plain[2, ::2], plain[3] = 3e4, -7.0, np.linspace(-5, 5, 256)
    for name in ("q8_0", "q6_k", "q4_k", "q4_0"):
        w = tw.quantize(plain, getattr(tw, name))
        x = numbers(np.float32, 256)
        check_packed(gemv, wide(np.asarray(tw.dequantize(w))) @ wide(x), w, x)
        x[3] = np.nan
        assert np.isnan(computed(lowered(gemv, w, x), w.blocks, x)).all()  # type: ignore[arg-type]


def test_what_is_done_to_an_element_first_is_not_taken_for_one() -> None:
    def moved(w: tw.Array, x: tw.Array) -> tw.Array:
        n, k = w.shape
        y = tw.empty((n,), tw.f32)
        for i in tw.grid(n):
            total = 0.0
            for j in range(k):
                total += (w[i, j] + 1.0) * x[j]
            y[i] = total
        return y

    w, known = packed(4, 256, "q8_0")
    x = numbers(np.float32, 256)
    stages = lowered(moved, w, x)  # type: ignore[arg-type]
    assert not isinstance(stages.schedules[0], Gemv)
    np.testing.assert_allclose(wide(computed(stages, w.blocks, x)), (known + 1) @ wide(x), rtol=1e-4, atol=1e-4)
