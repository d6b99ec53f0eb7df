"""Products with few rows: which kernels are such, and that what they become is right at every stage, for odd sizes too."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import by_name
from tilewright.base.errors import UserError
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk
from tilewright.passes.packed.units import FINE_UNITS, UNITS
from tilewright.passes.routes import Stages
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
    assert {op.attrs.get("width") for op in loads} == ({4, None} if name == "q4_k" else {None})  # q4_k: the scales of a block, and one word of a row
    unit = UNITS[name].elements
    check_packed(few, wide(rows) @ known.T, w, rows, f"family=gemv m=2 n=2 k={64 * unit} vector=1 unit={unit} warps_n=2 warps_k=2")


@pytest.mark.parametrize(("name", "unit"), [("q4_k", 64), ("q8_0", 8)])
def test_x_is_laid_out_first(name: str, unit: int) -> None:
    w, known = packed(6, 1280, name)
    words = f"family=gemv m=1 n=4 k={32 * unit} vector=1 unit={unit} warps_n=2 stage_x=1"
    x, rows = numbers(BF16, 1280), numbers(np.float32, 3, 1280)
    for function, own, want in ((gemv, x, known @ wide(x)), (few, rows, wide(rows) @ known.T)):
        stages = lowered(function, w, own, schedule=words)  # type: ignore[arg-type]
        assert len(stages.thread.calls) == 2
        got = wide(computed(stages, w.blocks, own))
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5 * np.abs(want).max())
        loads = [op for op in walk(stages.thread.calls[1].kernel.body) if op.opcode == "load" and "staged" in op.operands[0].name]
        assert {op.attrs.get("width") for op in loads} == {4}


@pytest.mark.parametrize(("name", "words"), [("q6_k", "k=512 vector=1 unit=16 stage_x=1"), ("q4_k", "k=2048 vector=8 unit=8"), ("q8_0", "k=256 vector=8")])
def test_units_are_those_of_the_format(name: str, words: str) -> None:
    w, _ = packed(6, 1280, name)
    with pytest.raises(UserError, match="lanes take"):
        lowered(gemv, w, numbers(BF16, 1280), schedule=f"family=gemv m=1 n=4 {words}")  # type: ignore[arg-type]


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


# -- by matrix instructions ---------------------------------------------------------------------------------------------


def packed_as(n: int, k: int, name: str) -> tuple[tw.PackedArray, np.ndarray]:
    made = tw.quantize(numbers(np.float32, n, k), by_name(name))
    return made, wide(np.asarray(tw.dequantize(made)))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "q4_g32_f16", "q4_g64_f32_z", "q8_g32_f32", "q8_g128_f16_z"])
def test_packed_rows_by_matrix_instructions(name: str) -> None:
    w, known = packed_as(19, 768, name)
    for x in (numbers(BF16, 768), numbers(np.float16, 768), numbers(np.float32, 768)):
        stages = check_packed(gemv, known @ wide(x), w, x)
        opcodes = [op.opcode for op in walk(stages.thread.calls[0].kernel.body)]
        assert ("mma" in opcodes) == stages.schedules[0].matrix and "dot_pairs" not in opcodes  # type: ignore[union-attr]
        assert stages.schedules[0].matrix == (x.dtype != np.float32 or name not in UNITS | FINE_UNITS)  # type: ignore[union-attr]
    if name in ("q4_1", "q5_0", "q5_1"):  # three bf16 for each f32
        check_packed(gemv, known @ wide(x), w, x, "family=gemv m=1 n=8 k=512 vector=1 unit=8 warps_n=2 warps_k=2 matrix=1")
    rows = numbers(BF16, 3, 768)
    check_packed(few, wide(rows) @ known.T, w, rows)


@pytest.mark.parametrize(("name", "words"), [
    ("q4_k", "m=1 n=32 k=256 unit=64 warps_n=2 lanes_n=8"), ("q5_k", "m=2 n=8 k=512 unit=64 warps_k=2 lanes_n=8"), ("q4_k", "m=1 n=24 k=512 unit=64 lanes_n=8 fetch=2 pdl=1"),
    ("q8_0", "m=1 n=6 k=512 unit=8 warps_n=2 warps_k=2"), ("q6_k", "m=2 n=1 k=1024 unit=16"), ("q5_0", "m=1 n=4 k=256 unit=8 fetch=1 pdl=1"),
])  # fmt: skip
def test_matrix_schedules(name: str, words: str) -> None:
    w, known = packed_as(21, 1280, name)
    x, rows = numbers(BF16, 1280), numbers(np.float32, 5, 1280)
    schedule = f"family=gemv vector=1 matrix=1 {words}"
    assert parse_schedule(parse_schedule(schedule).describe()) == parse_schedule(schedule)
    if "m=1" in words:
        check_packed(gemv, known @ wide(x), w, x, schedule)
    check_packed(few, wide(rows) @ known.T, w, rows, schedule)


@pytest.mark.parametrize("k", [32, 96, 640])
def test_short_packed_rows(k: int) -> None:
    for name in ("q8_0", "q5_0"):
        w, known = packed_as(33, k, name)
        x = numbers(BF16, k)
        stages = lowered(gemv, w, x)  # type: ignore[arg-type]
        got = wide(computed(stages, w.blocks, x))
        np.testing.assert_allclose(got, known @ wide(x), rtol=2e-5, atol=1e-5 * np.abs(known @ wide(x)).max())


def test_infinities_of_x_meet_packed_rows() -> None:
    w, known = packed_as(9, 512, "q8_0")
    for dtype in (BF16, np.float32):
        x = numbers(dtype, 512)
        x[100] = np.inf
        with np.errstate(invalid="ignore"):
            want = known @ wide(x)
        np.testing.assert_array_equal(wide(computed(lowered(gemv, w, x), w.blocks, x)), want)  # type: ignore[arg-type]


@pytest.mark.parametrize(("words", "said"), [("unit=64 lanes_n=8", "lanes_n=8: 1, or up to 8"), ("unit=64 lanes_n=16 matrix=1", "1, or up to 8"), ("unit=64 stages=9", "1 to 8"), ("unit=64 fetch=17", "0 to 16")])
def test_what_a_matrix_schedule_cannot_be(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_schedule(f"family=gemv m=1 n=8 k=2048 vector=1 {words}")


@pytest.mark.parametrize(("words", "said"), [
    ("n=8 k=2048 unit=64 matrix=1", "not walked so"), ("n=8 k=2048 unit=64 stage_x=1 matrix=1", "with x as it lies"), ("n=8 k=2048 unit=64 fetch=1", "needs pdl=1"),
])  # fmt: skip
def test_what_matrix_schedules_are_refused(words: str, said: str) -> None:
    w, _ = packed_as(8, 2048, "q4_k")
    with pytest.raises(UserError, match=said):
        lowered(gemv, w, numbers(BF16, 2048), schedule=f"family=gemv m=1 vector=1 {words}")  # type: ignore[arg-type]


def test_rows_are_fetched_before_the_wait() -> None:
    w, _ = packed_as(64, 2048, "q4_k")
    stages = lowered(gemv, w, numbers(BF16, 2048), schedule="family=gemv m=1 n=16 k=1024 vector=1 unit=64 warps_k=4 lanes_n=8 matrix=1 pdl=1 fetch=2")  # type: ignore[arg-type]
    ops = [op.opcode for op in stages.thread.calls[0].kernel.body.ops]
    wait = ops.index("wait_previous")
    assert ops.index("release_next") < ops.index("prefetch") < wait and "prefetch" not in ops[wait:] and "load" not in ops[:wait]


def test_other_gpus_have_no_such_instructions() -> None:
    w, _ = packed_as(8, 512, "q8_0")
    stages = lowered(gemv, w, numbers(BF16, 512), target="sm_75")  # type: ignore[arg-type]
    assert not any(getattr(s, "matrix", False) for s in stages.schedules)
    w, _ = packed_as(8, 512, "q5_0")
    assert not any(isinstance(s, Gemv) for s in lowered(gemv, w, numbers(BF16, 512), target="sm_75").schedules)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "words"), [("q8_0", "n=16 k=128 lanes_n=2 warps_n=4 stages=3"), ("q4_0", "n=8 k=64 lanes_n=4"), ("q5_0", "n=2 k=256 warps_n=2"), ("q5_k", "n=1 k=1024 warps_k=4"), ("q4_1", "n=4 k=512 warps_n=2")])
def test_rows_by_plain_arithmetic_in_units_of_8(name: str, words: str) -> None:
    w, known = packed_as(19, 768, name)
    x = numbers(np.float32, 768)
    check_packed(gemv, known @ wide(x), w, x, f"family=gemv m=1 vector=1 unit=8 {words}")
