"""Contractions by warp-level matrix instructions and by plain multiply-adds: every layout, dtype and edge, thread by thread."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import f16, f32, f64, i8, i32, i64, u64
from tilewright.base.errors import UserError
from tilewright.base.target import parse_target
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import Block, Kernel, Op, Stage, walk
from tilewright.ir.types import dtype_of
from tilewright.passes.choose.mma import by_matrix
from tilewright.passes.common.unsigned import unsigned_divisions
from tilewright.passes.routes import Stages
from tilewright.passes.to_thread.stage_operand import TallTile, ThreadTile, shared_layout

RNG = np.random.default_rng(11)
BF16 = ml_dtypes.bfloat16
FMA = "family=fma m=64 n=64 k=8 stages=3 warps_m=2 warps_n=1 persistent=0"


def mma(k: int, **changes: int) -> str:
    words = {"m": 64, "n": 64, "k": k, "stages": 3, "warps_m": 2, "warps_n": 2, "persistent": 0, **changes}
    return "family=mma " + " ".join(f"{name}={value}" for name, value in words.items())


# -- kernels ----------------------------------------------------------------------------------------------------------


def nn(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += a[i, p] * b[p, j]
        out[i, j] = acc
    return out


def nt(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[0]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += a[i, p] * b[j, p]
        out[i, j] = acc
    return out


def tn(a: tw.Array, b: tw.Array) -> tw.Array:
    k, m = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += a[p, i] * b[p, j]
        out[i, j] = acc
    return out


def nn64(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        acc = tw.f64(0)
        for p in range(k):
            acc += a[i, p] * b[p, j]
        out[i, j] = acc
    return out


def whole(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), tw.i32)
    for i, j in tw.grid(m, n):
        acc = tw.i32(0)
        for p in range(k):
            acc += tw.i32(a[i, p]) * tw.i32(b[p, j])
        out[i, j] = acc
    return out


def whole_turned(a: tw.Array, b: tw.Array) -> tw.Array:
    k, m = a.shape
    n = b.shape[0]
    out = tw.empty((m, n), tw.i32)
    for i, j in tw.grid(m, n):
        acc = tw.i32(0)
        for p in range(k):
            acc += tw.i32(a[p, i]) * tw.i32(b[j, p])
        out[i, j] = acc
    return out


def dressed(a: tw.Array, b: tw.Array, scale: tw.Array, bias: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += (tw.f32(a[i, p]) * scale[i] + 1.0) * tw.f32(b[p, j])
        out[i, j] = tw.max(acc + bias[j], 0.0)
    return out


def gathered(a: tw.Array, b: tw.Array, rows: tw.Array) -> tw.Array:
    m = rows.shape[0]
    k = a.shape[1]
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += a[rows[i], p] * b[p, j]
        out[i, j] = acc
    return out


def several(a: tw.Array, b: tw.Array) -> tw.Array:
    g, m, k = a.shape
    n = b.shape[2]
    out = tw.empty((g, m, n), a.dtype)
    for q, i, j in tw.grid(g, m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += a[q, i, p] * b[q, p, j]
        out[q, i, j] = acc
    return out


def conv_nchw(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, height, width = x.shape
    k, _, kh, kw = w.shape
    out = tw.empty((n, k, height, width), x.dtype)
    for b, o, i, j in tw.grid(n, k, height, width):
        acc = tw.f32(0)
        for q in range(c):
            for r in range(kh):
                for s in range(kw):
                    y = i + r - 1
                    z = j + s - 1
                    if y >= 0 and y < height and z >= 0 and z < width:
                        acc += x[b, q, y, z] * w[o, q, r, s]
        out[b, o, i, j] = acc
    return out


def conv_nhwc(x: tw.Array, w: tw.Array) -> tw.Array:
    n, height, width, c = x.shape
    k, kh, kw, _ = w.shape
    out = tw.empty((n, height, width, k), x.dtype)
    for b, i, j, o in tw.grid(n, height, width, k):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                for q in range(c):
                    y = i + r - 1
                    z = j + s - 1
                    if y >= 0 and y < height and z >= 0 and z < width:
                        acc += x[b, y, z, q] * w[o, r, s, q]
        out[b, i, j, o] = acc
    return out


# -- running ----------------------------------------------------------------------------------------------------------


def lowered(
    function: Callable[..., tw.Array],
    *arrays: np.ndarray,
    schedule: str = "",
    precision: str = "ieee",
    target: str = "sm_80",
) -> Stages:
    return tw.kernel(schedule=schedule, precision=precision)(function).stages(*arrays, target=target).stages


def computed(stages: Stages, *arrays: np.ndarray) -> np.ndarray:
    """What the threads of the kernel compute, in the emulator."""
    inputs = dict(zip((a.name for a in stages.thread.inputs), arrays, strict=True))
    return run_program(stages.thread, inputs)[stages.thread.outputs[0].name]


def ops(stages: Stages) -> list[Op]:
    return [op for call in stages.thread.calls for op in walk(call.kernel.body)]


def count(stages: Stages, opcode: str) -> int:
    return sum(op.opcode == opcode for op in ops(stages))


def numbers(dtype: type, *shape: int) -> np.ndarray:
    if np.dtype(dtype).kind in "iu":
        return RNG.integers(0 if np.dtype(dtype).kind == "u" else -100, 100, shape).astype(dtype)
    return RNG.standard_normal(shape).astype(dtype)


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, relative to the largest number."""
    return float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


PRODUCTS = [(np.float32, FMA, "ieee", 5e-7), (BF16, mma(32), "ieee", 4e-3), (np.float16, mma(32), "ieee", 5e-4),
            (np.float32, mma(16), "tf32", 2e-3), (np.float32, mma(16), "3xtf32", 1e-6)]  # fmt: skip


@pytest.mark.parametrize("shape", [(70, 90, 37), (72, 80, 48), (65, 129, 8)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "schedule", "precision", "bound"), PRODUCTS, ids=["fma", "bf16", "f16", "tf32", "3xtf32"]
)
@pytest.mark.parametrize("order", [nn, nt, tn])
def test_floats(
    order: Callable[..., tw.Array],
    dtype: type,
    schedule: str,
    precision: str,
    bound: float,
    shape: tuple[int, int, int],
) -> None:
    m, n, k = shape
    a = numbers(dtype, *((k, m) if order is tn else (m, k)))
    b = numbers(dtype, *((n, k) if order is nt else (k, n)))
    stages = lowered(order, a, b, schedule=schedule, precision=precision)
    want = (wide(a).T if order is tn else wide(a)) @ (wide(b).T if order is nt else wide(b))
    assert error(computed(stages, a, b), want) < bound
    assert bool(count(stages, "mma")) == (schedule is not FMA)


@pytest.mark.parametrize("shape", [(70, 90, 37), (47, 100, 64), (17, 129, 133)], ids=str)
@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("order", [nn, nt, tn])
def test_tiles_that_are_no_powers_of_two(order: Callable[..., tw.Array], held: int, shape: tuple[int, int, int]) -> None:
    """48 rows and 96 columns, with the sums of one level in registers or in shared memory."""
    m, n, k = shape
    a = numbers(np.float32, *((k, m) if order is tn else (m, k)))
    b = numbers(np.float32, *((n, k) if order is nt else (k, n)))
    stages = lowered(order, a, b, schedule=mma(16, m=48, n=96, warps_m=1, chunk=32, levels_held=held), precision="3xtf32")
    want = (wide(a).T if order is tn else wide(a)) @ (wide(b).T if order is nt else wide(b))
    assert error(computed(stages, a, b), want) < 1e-6
    kept = [op for op in ops(stages) if op.opcode == "alloc" and op.results[0].name == "sums0"]
    assert len(kept) == 1 - held


@pytest.mark.parametrize("function", [whole, whole_turned])
@pytest.mark.parametrize("shape", [(70, 90, 37), (80, 64, 96)], ids=str)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_bytes_are_exact(dtype: type, shape: tuple[int, int, int], function: Callable[..., tw.Array]) -> None:
    m, n, k = shape
    turned = function is whole_turned
    a, b = numbers(dtype, *((k, m) if turned else (m, k))), numbers(dtype, *((n, k) if turned else (k, n)))
    stages = lowered(function, a, b, schedule=mma(64))
    left, right = (a.T, b.T) if turned else (a, b)
    np.testing.assert_array_equal(computed(stages, a, b), left.astype(np.int32) @ right.astype(np.int32))
    assert count(stages, "mma")


@pytest.mark.parametrize(("schedule", "target"), [(mma(16), "sm_80"), (FMA, "sm_89")])
def test_f64(schedule: str, target: str) -> None:
    a, b = numbers(np.float64, 70, 37), numbers(np.float64, 37, 90)
    stages = lowered(nn64, a, b, schedule=schedule, target=target)
    assert error(computed(stages, a, b), a @ b) < 1e-15


def test_f32_adds_up_in_order() -> None:
    a, b = numbers(np.float32, 40, 50), numbers(np.float32, 50, 40)
    got = computed(lowered(nn, a, b, schedule=FMA), a, b)
    want = np.zeros((40, 40), np.float32)
    for p in range(50):
        want = (wide(a)[:, p, None] * wide(b)[None, p] + want).astype(np.float32)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("schedule", "precision"), [(FMA, "ieee"), (mma(16), "tf32"), (mma(16), "3xtf32")])
def test_infinities_and_nan_stay_in_their_rows(schedule: str, precision: str) -> None:
    a, b = np.abs(numbers(np.float32, 66, 20)) + 1, np.abs(numbers(np.float32, 20, 70)) + 1
    a[3, 5], a[7, 2], b[4, 9] = np.inf, np.nan, np.inf
    got = computed(lowered(nn, a, b, schedule=schedule, precision=precision), a, b)
    with np.errstate(all="ignore"):
        want = wide(a) @ wide(b)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isposinf(got), np.isposinf(want))


@pytest.mark.parametrize("schedule", [FMA, mma(16)])
def test_a_sum_of_nothing_is_zero(schedule: str) -> None:
    a, b = np.zeros((70, 0), np.float32), np.zeros((0, 80), np.float32)
    some = lowered(
        nn,
        numbers(np.float32, 70, 3),
        numbers(np.float32, 3, 80),
        schedule=schedule,
        precision="tf32" if "mma" in schedule else "ieee",
    )
    np.testing.assert_array_equal(computed(some, a, b), np.zeros((70, 80), np.float32))


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("k", [16, 64])
def test_rings_of_any_depth(stages: int, k: int) -> None:
    a, b = numbers(BF16, 130, 200), numbers(BF16, 200, 72)
    found = lowered(nn, a, b, schedule=mma(k, stages=stages))
    assert error(computed(found, a, b), wide(a) @ wide(b)) < 4e-3


@pytest.mark.parametrize("schedule", [mma(32, persistent=1, m=32), FMA.replace("persistent=0", "persistent=1")])
def test_blocks_that_compute_several_tiles(schedule: str) -> None:
    dtype = BF16 if "mma" in schedule else np.float32
    a, b = numbers(dtype, 600, 40), numbers(dtype, 40, 700)
    found = lowered(nn, a, b, schedule=schedule)
    assert error(computed(found, a, b), wide(a) @ wide(b)) < 4e-3


def test_several_products() -> None:
    a, b = numbers(np.float32, 3, 70, 40), numbers(np.float32, 3, 40, 50)
    assert error(computed(lowered(several, a, b), a, b), wide(a) @ wide(b)) < 5e-7


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_factors_and_results_that_are_computed(dtype: type) -> None:
    a, b, scale, bias = numbers(dtype, 70, 33), numbers(dtype, 33, 50), numbers(np.float32, 70), numbers(np.float32, 50)
    got = computed(lowered(dressed, a, b, scale, bias), a, b, scale, bias)
    want = np.maximum((wide(a) * scale[:, None] + 1) @ wide(b) + bias, 0)
    assert error(got, want) < (5e-7 if dtype is np.float32 else 4e-3)


@pytest.mark.parametrize("target", ["sm_75", "sm_80"])
def test_rows_from_anywhere_are_still_read_in_vectors(target: str) -> None:
    a, b, rows = numbers(BF16, 70, 64), numbers(BF16, 64, 48), RNG.integers(0, 70, 55)
    stages = lowered(gathered, a, b, rows, target=target)
    assert error(computed(stages, a, b, rows), wide(a)[rows] @ wide(b)) < 4e-3
    if target == "sm_80":
        copies = [op.attrs["bytes"] for op in ops(stages) if op.opcode == "copy_async"]
        assert copies
        assert set(copies) == {16}


def convolved(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Of [n, c, h, w] and [k, c, 3, 3]."""
    padded = np.pad(wide(x), ((0, 0), (0, 0), (1, 1), (1, 1)))
    height, width = x.shape[2:]
    taps = [(r, s) for r in range(3) for s in range(3)]
    return np.sum(
        [np.einsum("nchw,kc->nkhw", padded[:, :, r : r + height, s : s + width], wide(w)[:, :, r, s]) for r, s in taps],
        axis=0,
    )


@pytest.mark.parametrize("target", ["sm_75", "sm_80"])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_convolution(dtype: type, target: str) -> None:
    x, w = numbers(dtype, 2, 5, 9, 11), numbers(dtype, 20, 5, 3, 3)
    got = computed(lowered(conv_nchw, x, w, target=target), x, w)
    assert error(got, convolved(x, w)) < (1e-6 if dtype is np.float32 else 4e-3)


@pytest.mark.parametrize(("channels", "vectors"), [(64, True), (7, False)])
def test_convolution_of_channels_reads_vectors_where_they_fill_a_step(channels: int, vectors: bool) -> None:
    x, w = numbers(BF16, 2, 6, 7, channels), numbers(BF16, 24, 3, 3, channels)
    stages = lowered(conv_nhwc, x, w)
    want = convolved(x.transpose(0, 3, 1, 2), w.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
    assert error(computed(stages, x, w), want) < 4e-3
    assert {op.attrs["bytes"] for op in ops(stages) if op.opcode == "copy_async"} == ({16} if vectors else set())


# -- how operands are brought -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("copy", "bytes_"), [("threads", set()), ("cp_async", {4, 16})])
def test_a_schedule_says_who_copies(copy: str, bytes_: set[int]) -> None:
    a, b = numbers(np.float32, 64, 64), numbers(np.float32, 64, 64)
    stages = lowered(nn, a, b, schedule=f"{FMA} a_copy={copy} b_copy={copy}")
    assert {op.attrs["bytes"] for op in ops(stages) if op.opcode == "copy_async"} == bytes_
    assert error(computed(stages, a, b), wide(a) @ wide(b)) < 5e-7


def test_unaligned_rows_are_not_read_in_vectors() -> None:
    a, b = numbers(BF16, 70, 37), numbers(BF16, 37, 91)
    stages = lowered(nn, a, b)
    loads = [op for op in ops(stages) if op.opcode == "load" and op.operands[0].name in "ab" and op.operands[0].name]
    assert loads
    assert not any(op.attrs.get("width") for op in loads)


@pytest.mark.parametrize("shape", [(128, 8), (64, 16), (32, 128), (48, 32), (32, 96)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("vector", [1, 2, 4])
@pytest.mark.parametrize("across", [False, True])
def test_every_element_has_one_thread(shape: tuple[int, int], axis: int, vector: int, across: bool) -> None:
    layout = shared_layout(shape, axis, vector, 128, across)
    assert layout is not None
    assert layout.threads == 128
    steps = layout.registers(shape)
    places = [
        layout.coordinate(shape, warp, lane, (r, c), (v, 0) if axis == 0 else (0, v))
        for warp in range(4) for lane in range(32) for r in range(steps[0]) for c in range(steps[1]) for v in range(vector)
    ]  # fmt: skip
    assert sorted(places) == [(r, c) for r in range(shape[0]) for c in range(shape[1])]


def test_a_tile_too_small_for_its_threads_has_no_layout() -> None:
    assert shared_layout((8, 8), 1, 4, 128) is None


@pytest.mark.parametrize("kind", [ThreadTile, TallTile])
def test_rows_of_a_patch_are_registers(kind: type[ThreadTile]) -> None:
    layout = kind((4, 4), (4, 8), (2, 1))
    rows, columns = layout.registers((64, 64))
    assert rows * columns * 4 * layout.threads == 64 * 64
    other = 1 - kind.wide
    assert [layout.offset(other, r) for r in range(5)] == [0, 1, 2, 3, layout.span(other)]


# -- choosing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operand", "total", "precision", "target", "wanted"), [
    (f16, f32, "ieee", "sm_80", True), (f16, f32, "ieee", "sm_75", False), (f32, f32, "ieee", "sm_80", False),
    (f32, f32, "3xtf32", "sm_120", True), (i8, i32, "ieee", "sm_89", True), (i8, i64, "ieee", "sm_89", False),
    (f64, f64, "ieee", "sm_90", True), (f64, f64, "ieee", "sm_86", False),
])  # fmt: skip
def test_matrix_instructions_where_there_are_any(
    operand: object, total: object, precision: str, target: str, wanted: bool
) -> None:
    assert by_matrix(operand, total, precision, parse_target(target)) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
def test_thin_products_are_left_to_reductions(target: str) -> None:
    stages = lowered(nn, numbers(np.float32, 4, 512), numbers(np.float32, 512, 512), target=target)
    assert not any(hasattr(s, "family") for s in stages.schedules)


def test_a_large_product_has_large_tiles() -> None:
    found = [
        lowered(nn, np.zeros((n, n), np.float32), np.zeros((n, n), np.float32), target="sm_90a").schedules[-1]
        for n in (512, 4096)
    ]
    assert found[0].m * found[0].n < found[1].m * found[1].n  # type: ignore[union-attr]


@pytest.mark.parametrize("schedule", [mma(24), mma(32, m=80), mma(32, m=72), mma(32, m=16, warps_m=2), mma(16, n=16, m=32, warps_n=4),
                                      "family=fma m=16 n=64 k=8 warps_m=2 persistent=0"])  # fmt: skip
def test_a_schedule_that_cannot_be_is_refused(schedule: str) -> None:
    dtype = BF16 if "mma" in schedule else np.float32
    with pytest.raises(UserError, match="TW005"):
        lowered(nn, numbers(dtype, 64, 64), numbers(dtype, 64, 64), schedule=schedule)


def test_no_matrix_instruction_for_ieee_f32() -> None:
    with pytest.raises(UserError, match="cannot be computed with family=mma"):
        lowered(nn, numbers(np.float32, 64, 64), numbers(np.float32, 64, 64), schedule=mma(16))


# -- divisions --------------------------------------------------------------------------------------------------------


def test_only_what_is_never_negative_is_divided_unsigned() -> None:
    b = Builder()
    thread = b.op("thread_id")
    b.op("floordiv", b.add(thread, b.index(3)), b.index(7))
    b.op("floordiv", b.sub(thread, b.index(3)), b.index(7))
    kernel = Kernel("k", Stage.THREAD, (), Block((), tuple(b.ops)), threads=32)
    divisions = [op for op in walk(unsigned_divisions(kernel).body) if op.opcode == "floordiv"]
    assert [dtype_of(op.result.type) for op in divisions] == [u64, i64]


def test_a_schedule_for_what_is_no_contraction_is_refused() -> None:
    def halve(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i] * 0.5
        return out

    kernel = tw.kernel(schedule="family=mma m=64 n=64 k=16")(halve)
    with pytest.raises(UserError, match="nothing in halve is computed by tiles of a matrix"):
        kernel.compile(np.zeros(64, np.float32), target="sm_90a")
