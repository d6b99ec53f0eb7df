"""Kernels that read packed blocks: on the CPU and at every stage of the emulator, the numbers are those of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.ir.nodes import walk
from tilewright.ir.text import print_kernel

DEVICES = ["cpu", "emulator:loop", "emulator:tile", "emulator:thread"]
FORMATS = [*(d for d in dtypes.ALL if d.is_packed), tw.q4_group(32), tw.q4_group(16, scale=tw.f32, zero_point=True), tw.q8_group(64, zero_point=True)]


@tw.kernel
def unpack(w: tw.Array) -> tw.Array:
    rows, cols = w.shape
    out = tw.empty((rows, cols), w.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = w[i, j]
    return out


@tw.kernel
def product(w: tw.Array, x: tw.Array) -> tw.Array:
    rows, cols = w.shape
    out = tw.empty((rows,), tw.f32)
    for i in tw.grid(rows):
        total = 0.0
        for k in range(cols):
            total += w[i, k] * x[k]
        out[i] = total
    return out


@tw.kernel
def matrices(x: tw.Array, w: tw.Array) -> tw.Array:
    return x @ w.T


@tw.kernel
def columns(w: tw.Array, x: tw.Array) -> tw.Array:
    rows, cols = w.shape
    out = tw.empty((cols,), tw.f32)
    for j in tw.grid(cols):
        total = 0.0
        for i in range(rows):
            total += w[i, j] * x[i]
        out[j] = total
    return out


@tw.kernel
def gather(w: tw.Array, rows: tw.Array, places: tw.Array) -> tw.Array:
    out = tw.empty((len(rows), len(places)), tw.f32)
    for i, j in tw.grid(len(rows), len(places)):
        out[i, j] = w[rows[i], places[j]]
    return out


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def close(found: object, expected: np.ndarray, terms: int) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2e-6, atol=1e-6 * terms**0.5 * 4)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_elements_and_sums(dtype: DType) -> None:
    rows, cols = 3, 2 * dtype.block
    w, x = tw.quantize(normal(rows, cols), dtype), normal(cols)
    expected = tw.dequantize(w)
    for device in DEVICES:
        np.testing.assert_array_equal(unpack(w, device=device), expected)
        close(product(w, x, device=device), expected.astype(np.float64) @ x, cols)


@pytest.mark.parametrize("dtype", [tw.q8_0, tw.q4_k, tw.q6_k], ids=str)
def test_any_place(dtype: DType) -> None:
    """Elements that no loop walks, and columns."""
    w = tw.quantize(normal(5, 512), dtype)
    expected = tw.dequantize(w)
    rows, places = np.array([4, 0, 3]), np.array([0, 511, 255, 256, 31, 32, 33, 129])
    x = normal(5)
    for device in ("cpu", "emulator:thread"):
        np.testing.assert_array_equal(gather(w, rows, places, device=device), expected[np.ix_(rows, places)])
        close(columns(w, x, device=device), x.astype(np.float64) @ expected, 5)


@pytest.mark.parametrize("m", [1, 3, 33])
def test_products_of_matrices(m: int) -> None:
    w, x = tw.quantize(normal(31, 512), tw.q4_k), normal(m, 512)
    expected = x.astype(np.float64) @ tw.dequantize(w).astype(np.float64).T
    for device in ("cpu", "emulator:thread"):
        close(matrices(x, w, device=device), expected, 512)


def test_several_formats_in_one_kernel() -> None:
    @tw.kernel
    def both(a: tw.Array[tw.q8_0], b: tw.Array[tw.q4_k], x: tw.Array) -> tw.Array:
        rows, cols = a.shape
        out = tw.empty((rows,), tw.f32)
        for i in tw.grid(rows):
            total = 0.0
            for k in range(cols):
                total += (a[i, k] - b[i, k]) * x[k]
            out[i] = total
        return out

    values, x = normal(4, 512), normal(512)
    a, b = tw.quantize(values, tw.q8_0), tw.quantize(values, tw.q4_k)
    expected = (tw.dequantize(a).astype(np.float64) - tw.dequantize(b)) @ x
    for device in DEVICES:
        close(both(a, b, x, device=device), expected, 512)
    with pytest.raises(tw.UserError, match="'b' must be q4_k, got q8_0"):
        both(a, a, x)


def test_views_of_rows() -> None:
    w = tw.quantize(normal(2, 7, 64), tw.q4_0)
    expected, x = tw.dequantize(w), normal(64)
    assert w.shape == (2, 7, 64) and w[1].shape == (7, 64) and w[1, 2:6].shape == (4, 64) and w[..., :].shape == w.shape
    for view, part in ((w[1], expected[1]), (w[0, 1::2], expected[0, 1::2]), (w[:, 3], expected[:, 3])):
        np.testing.assert_array_equal(tw.dequantize(view), part)
        for device in ("cpu", "emulator:thread"):
            np.testing.assert_array_equal(unpack(view, device=device), part)
            close(product(view, x, device=device), part.astype(np.float64) @ x, 64)
    with pytest.raises(tw.UserError, match="lies in blocks of 32 and cannot be indexed or cut"):
        w[0, 0, 3]
    with pytest.raises(tw.UserError, match="lies in blocks of 32 and cannot be indexed or cut"):
        w[0, :, 32:]


def test_empty_arrays() -> None:
    empty, none = tw.quantize(np.empty((0, 64), np.float32), tw.q4_0), tw.quantize(np.empty((3, 0), np.float32), tw.q4_0)
    assert product(empty, normal(64)).shape == (0,)
    assert product(none, np.empty(0, np.float32)).tolist() == [0, 0, 0]
    assert tw.dequantize(none).shape == (3, 0)


def test_scales_that_are_not_finite() -> None:
    w = tw.quantize(normal(1, 64), tw.q8_0)
    w.blocks[0, 0, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    w.blocks[0, 1, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    w.blocks[0, 0, 2] = 0
    for device in DEVICES:
        np.testing.assert_array_equal(unpack(w, device=device), tw.dequantize(w))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", [np.float16, np.float32])
@pytest.mark.parametrize("zero_points", [False, True])
def test_groups_of_onnx(bits: int, scale: type, zero_points: bool) -> None:
    random = np.random.default_rng(3)
    n, groups, block = 5, 3, 32
    numbers = random.integers(0, 256, (n, groups, block * bits // 8)).astype(np.uint8)
    scales = random.standard_normal((n, groups)).astype(scale)
    width = -(-groups * bits // 8)
    zeros = random.integers(0, 256, (n, width)).astype(np.uint8) if zero_points else None
    w = tw.packed_array(numbers, scales, zeros, bits=bits)
    assert w.shape == (n, groups * block)
    q = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(n, groups, block) if bits == 4 else numbers
    zero = np.full((n, groups), 1 << bits - 1)
    if zeros is not None:
        zero = (np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(n, -1) if bits == 4 else zeros)[:, :groups]
    expected = ((q.astype(np.float32) - zero[..., None].astype(np.float32)) * scales.astype(np.float32)[..., None]).reshape(w.shape)
    np.testing.assert_array_equal(tw.dequantize(w), expected)
    for device in ("cpu", "emulator:thread"):
        np.testing.assert_array_equal(unpack(w, device=device), expected)


PIPELINE = """
pipeline f(w: tensor[n, k, q4_k], x: tensor[k]) -> tensor:
    let y = compute(w, x) {
        @kernel custom
        for i in 0..n {
            var s = 0.0
            for j in 0..k { s += w[i, j] * x[j] }
            out[i] = s
        }
    }
    let z = compute(y) {
        @kernel elementwise
        for i in 0..n { out[i] = y[i] * 2.0 }
    }
    return z

let r = f(w, x)
"""


def test_zynml() -> None:
    module = tw.load(PIPELINE)
    w, x = tw.quantize(normal(5, 512), tw.q4_k), normal(512)
    for _ in range(3):
        close(module.run(w=w, x=x)["r"], 2 * tw.dequantize(w).astype(np.float64) @ x, 512)
    with pytest.raises(tw.UserError, match="'w' must be q4_k, got q8_0") as error:
        module.run(w=tw.quantize(normal(5, 512), tw.q8_0), x=x)
    assert len(error.value.diagnostics) == 1
    eight = tw.load(PIPELINE.replace("@kernel custom", "@kernel custom\n        @activations(q8)"))
    close(eight.run(w=w, x=x)["r"], 2 * tw.dequantize(w).astype(np.float64) @ eight_bits(x, 256), 512)


# -- activations of eight bits -----------------------------------------------------------------------------------------


@tw.kernel(activations="q8")
def rounded(w: tw.Array, x: tw.Array) -> tw.Array:
    rows, cols = w.shape
    out = tw.empty((rows,), tw.f32)
    for i in tw.grid(rows):
        total = 0.0
        for k in range(cols):
            total += w[i, k] * x[k]
        out[i] = tw.max(total, -1e30)
    return out


@tw.kernel(activations="q8")
def rounded_batch(w: tw.Array, x: tw.Array) -> tw.Array:
    rows, cols = w.shape
    out = tw.empty((len(x), rows), tw.f32)
    for m, i in tw.grid(len(x), rows):
        total = 0.0
        for k in range(cols):
            total += w[i, k] * x[m, k]
        out[m, i] = total
    return out


def eight_bits(x: np.ndarray, block: int) -> np.ndarray:
    """What activations are rounded to."""
    parts = x.astype(np.float32).reshape(-1, block)
    step = np.abs(parts).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.where(step == 0, 0, 1 / np.where(step == 0, 1, step)).astype(np.float32)
    return (np.rint(parts * inverse).astype(np.float64) * step).reshape(x.shape)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_rounded_activations(dtype: DType) -> None:
    """Sums of integers are exact: what is left is the rounding of activations, which is known."""
    cols = 3 * dtype.block
    w, x = tw.quantize(normal(5, cols), dtype), normal(cols)
    x[: dtype.block] = 0
    expected = tw.dequantize(w).astype(np.float64) @ eight_bits(x, dtype.block)
    for device in ("cpu", "emulator:loop", "emulator:thread"):
        close(rounded(w, x, device=device), expected, cols)


@pytest.mark.parametrize("dtype", [tw.f16, tw.bf16], ids=str)
def test_rounded_rows_of_narrow_floats(dtype: DType) -> None:
    w, x = tw.quantize(normal(31, 512), tw.q4_k), normal(3, 512).astype(dtype.numpy)
    expected = eight_bits(x, 256) @ tw.dequantize(w).astype(np.float64).T
    for device in ("cpu", "emulator:tile"):
        close(rounded_batch(w, x, device=device), expected, 512)


@pytest.mark.parametrize("dtype", [tw.q4_0, tw.q5_1, tw.q5_k, tw.q6_k, tw.q8_group(64, zero_point=True)], ids=str)
def test_rounded_rows_and_columns_together(dtype: DType) -> None:
    """Some rows of weights and of activations are multiplied together, those that are left one by one."""
    cols = 2 * dtype.block
    w, x = tw.quantize(normal(6, cols), dtype), normal(7, cols)
    expected = eight_bits(x, dtype.block) @ tw.dequantize(w).astype(np.float64).T
    for device in ("cpu", "emulator:tile"):
        close(rounded_batch(w, x, device=device), expected, cols)


def test_rounded_products_of_slices_and_nothing() -> None:
    """Rows that are not neighbours, experts, a part of the rows, no rows and no columns."""

    @tw.kernel(activations="q8")
    def experts(w: tw.Array, x: tw.Array) -> tw.Array:
        count, rows, cols = w.shape
        out = tw.empty((count, rows), tw.f32)
        for e, i in tw.grid(count, rows):
            total = 0.0
            for k in range(cols):
                total += w[e, i, k] * x[e, k]
            out[e, i] = total
        return out

    w, x = tw.quantize(normal(3, 9, 64), tw.q5_0), normal(3, 64)
    expected = np.einsum("erk,ek->er", tw.dequantize(w).astype(np.float64), eight_bits(x, 32))
    for device in ("cpu", "emulator:tile", "emulator:thread"):
        close(experts(w, x, device=device), expected, 64)
    whole, one = tw.quantize(normal(19, 512), tw.q4_k), normal(512)
    close(rounded(whole[2:15:3], one), tw.dequantize(whole[2:15:3]).astype(np.float64) @ eight_bits(one, 256), 512)
    assert rounded(whole[:0], one).shape == (0,)
    assert rounded_batch(whole, np.zeros((0, 512), np.float32)).shape == (0, 19)


def test_plain_rows_on_arm_are_taken_together() -> None:
    """Without rounding too, rows of whole blocks are multiplied four at a time: with activations of narrow floats, and NaN."""

    @tw.kernel
    def rows(w: tw.Array, x: tw.Array) -> tw.Array:
        count, cols = w.shape
        out = tw.empty((count,), tw.f32)
        for i in tw.grid(count):
            total = 0.0
            for k in range(cols):
                total += w[i, k] * x[k]
            out[i] = total
        return out

    for dtype, floats in ((tw.q5_1, tw.f16), (tw.q4_k, tw.f32)):
        w, x = tw.quantize(normal(6, 512), dtype), normal(512).astype(floats.numpy)
        stages = rows.stages(w, x, target="aarch64-neon").stages
        assert [op.attrs["rows"] for call in stages.tile.calls for op in walk(call.kernel.body) if op.opcode == "packed_dots"] == [4, 1]
        expected = tw.dequantize(w).astype(np.float64) @ x.astype(np.float64)
        for device in ("cpu", "emulator:tile", "emulator:thread"):
            close(rows(w, x, device=device), expected, 512)
        x[7] = np.nan
        assert np.isnan(rows(w, x)).all()


def test_rounding_is_said_and_refused_where_there_is_none() -> None:
    w, x = tw.quantize(normal(4, 512), tw.q4_k), normal(512)
    assert any('activations = "q8"' in print_kernel(call.kernel) for call in rounded.stages(w, x).stages.loop.calls)
    assert "@activations(q8)" in rounded.metadata.lines()
    with pytest.raises(tw.UserError, match="has nothing to round"):
        rounded(normal(4, 512), x)
    with pytest.raises(tw.UserError, match="activations='q4'"):
        tw.kernel(activations="q4")(rounded.python)
    found = rounded(w, np.full(512, np.nan, np.float32))
    assert np.isnan(found).all()


def test_arm_multiplies_bytes_by_dot_products() -> None:
    w, x = tw.quantize(normal(4, 512), tw.q4_k), normal(512)
    stages = rounded.stages(w, x, target="aarch64-neon").stages
    rows = [op.attrs["rows"] for call in stages.tile.calls for op in walk(call.kernel.body) if op.opcode == "packed_dots"]
    assert rows == [4, 1]
    assert sum(op.opcode == "dot_lanes" for call in stages.thread.calls for op in walk(call.kernel.body)) == 16 * 5
    for target in ("x86-64-avx2", "x86-64-avx512", "sm_90a"):
        assert rounded.compile(w, x, target=target).code


def test_loops_over_blocks_are_vectors() -> None:
    """On CPUs the default reads whole vectors of bytes, and no index is tested."""
    for dtype in (tw.q8_0, tw.q4_k, tw.q6_k):
        thread = product.stages(tw.quantize(normal(4, 512), dtype), normal(512), target="x86-64-avx512").stages.thread
        ops = [op for call in thread.calls for op in walk(call.kernel.body)]
        assert not any("watch" in op.attrs or op.opcode == "report" for op in ops)
        assert any(op.opcode == "load" and int(op.attrs.get("width", 1)) >= 16 and op.results[0].type.dtype is tw.u8 for op in ops)  # type: ignore[union-attr, arg-type]


# -- what is refused ------------------------------------------------------------------------------------------------------


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(tw.UserError, match="the last axis has 300 elements, and q4_k has blocks of 256"):
        tw.quantize(normal(2, 300), tw.q4_k)
    with pytest.raises(tw.UserError, match="a number cannot be packed"):
        tw.quantize(np.float32(3), tw.q4_0)
    w = tw.quantize(normal(2, 64), tw.q4_0)
    with pytest.raises(tw.UserError, match="axis 0 of 'x' is 33"):
        product(w, normal(33))

    @tw.kernel
    def fixed(w: q4_0[n, 48]) -> float:  # type: ignore[name-defined]  # noqa: F821
        return tw.sum(w)

    with pytest.raises(tw.UserError, match="48 elements, and q4_0 has blocks of 32"):
        fixed(w)


def test_values_that_do_not_fit() -> None:
    for bad in (np.nan, np.inf):
        with pytest.raises(tw.UserError, match="NaN or infinity"):
            tw.quantize(np.full((1, 32), bad, np.float32), tw.q4_0)
    with pytest.raises(tw.UserError, match="takes a packed dtype"):
        tw.quantize(normal(1, 32), tw.f16)
    with pytest.raises(tw.UserError, match="is packed already"):
        tw.quantize(tw.quantize(normal(1, 32), tw.q4_0), tw.q4_0)
    with pytest.raises(tw.UserError, match="takes a packed array"):
        tw.dequantize(normal(1, 32))  # type: ignore[arg-type]
    with pytest.raises(tw.UserError, match="no groups of 33"):
        tw.q4_group(33)
    with pytest.raises(TypeError, match="packed blocks"):
        np.asarray(tw.quantize(normal(1, 32), tw.q4_0))


def test_packed_arrays_are_not_written() -> None:
    @tw.kernel
    def stored(w: tw.Array) -> tw.Array:
        out = tw.zeros((2,), tw.f32)
        w[0, 0] = 1.0
        return out

    @tw.kernel
    def in_place(w: tw.InOut) -> None:
        for i, j in tw.grid(*w.shape):
            w[i, j] = 0.0

    w = tw.quantize(normal(2, 64), tw.q4_0)
    for kernel in (stored, in_place):
        with pytest.raises(tw.UserError, match=r"holds packed blocks \(q4_0\), which kernels read and do not write"):
            kernel(w)
    with pytest.raises(tw.UserError, match="holds packed blocks, which kernels do not write"):
        product(w, normal(64), out=w)


def test_plain_bytes_are_not_taken_for_blocks() -> None:
    """Code for packed blocks is not used for the bytes alone."""
    w, x = tw.quantize(normal(2, 64), tw.q4_0), normal(64)
    first = product(w, x)
    with pytest.raises(tw.UserError):
        product(w.blocks, x)
    np.testing.assert_array_equal(product(w, x), first)
    np.testing.assert_array_equal(product(tw.dequantize(w), np.zeros(64, np.float32)), np.zeros(2))


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    values = torch.from_numpy(normal(3, 64))
    w = tw.quantize(values, tw.q8_0)
    assert isinstance(w.blocks, torch.Tensor) and w.shape == (3, 64)
    np.testing.assert_array_equal(tw.dequantize(w).numpy(), tw.dequantize(tw.quantize(values.numpy(), tw.q8_0)))
    found = product(w, torch.ones(64))
    assert isinstance(found, torch.Tensor)
    close(found.numpy(), tw.dequantize(w).numpy().astype(np.float64).sum(axis=1), 64)


@pytest.mark.parametrize("dtype", [tw.q8_0, tw.q5_0, tw.q6_k], ids=str)
def test_bytes_are_multiplied_by_the_instructions_of_a_cpu(dtype: DType) -> None:
    """Four rows at a time and one at a time: a product of 16 bytes is one op, and one instruction of the CPU's name."""
    w, x = tw.quantize(normal(4, 512), dtype), normal(512)
    for target, unit in (("aarch64-neon", "sdot"), ("x86-64-amx", "vnni"), ("x86-64-avx512", "maddubs"), ("x86-64-sse4.1", "maddubs")):
        stages = rounded.stages(w, x, target=target).stages
        units = [op.attrs["unit"] for call in stages.thread.calls for op in walk(call.kernel.body) if op.opcode == "dot_lanes"]
        assert units == [unit] * (dtype.block // 16 * 5)
    assert b"vpdpbusd" not in rounded.compile(w, x, target="x86-64-avx512").code
