"""Steps of few rows over packed weights: norms are computed by the blocks of the products that read them, and by rotary positions. In the emulator, which runs the very kernels of a GPU,
against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from unit.graphs.test_few_rows import close, launches, normal, rms, wide


def packed(rows: int, columns: int, dtype: Any) -> tuple[Any, np.ndarray]:
    """A weight, and the numbers it stands for."""
    found = tw.quantize(normal(rows, columns), dtype)
    return found, wide(tw.dequantize(found))


@pytest.mark.parametrize(("dtype", "rows", "depth"), [(tw.q4_k, 1, 256), (tw.q8_0, 3, 96), (tw.q5_0, 1, 224), (tw.q6_k, 2, 512), (tw.q4_1, 1, 160)])
def test_a_norm_is_computed_by_the_blocks_of_a_packed_product(dtype: Any, rows: int, depth: int) -> None:
    x, gain = normal(rows, depth), (1 + normal(depth)).astype(np.float32)
    w, numbers = packed(37, depth, dtype)
    g = tw.TensorGraph("normed")
    h = g.op("RmsNorm", g.input("x", (rows, depth), tw.f32), gamma=gain, epsilon=1e-6, name="norm")
    g.output("y", g.op("MulMat", h, weight=g.weight("w", w), name="product"))
    close(g.run(x=x, device="emulator"), rms(wide(x), wide(gain)) @ numbers.T, np.float32)
    assert launches(g, x=(rows, depth)) == ["mul_mat"]
    assert "rms_norm: computed by what reads it" in g.explain("sm_90a", x=(rows, depth))


@pytest.mark.parametrize("rows", [1, 2])
def test_norms_around_packed_products_as_gemma_has_them(rows: int) -> None:
    """A norm of what a product makes, added to the stream, normed again for products of different formats: one launch, which writes the stream as well."""
    x, y = normal(rows, 256), normal(rows, 256)
    gains = [(1 + normal(256)).astype(np.float32) for _ in range(2)]
    weights = [packed(n, 256, dtype) for n, dtype in ((33, tw.q5_0), (8, tw.q8_0), (9, tw.q4_k))]
    g = tw.TensorGraph("gemma")
    stream = g.op("Add", g.input("x", (rows, 256), tw.f32), g.op("RmsNorm", g.input("y", (rows, 256), tw.f32), gamma=gains[0], epsilon=1e-6, name="post"), name="sum")
    h = g.op("RmsNorm", stream, gamma=gains[1], epsilon=1e-6, name="pre")
    for name, (w, _) in zip("qkv", weights, strict=True):
        g.output(name, g.op("MulMat", h, weight=g.weight(f"w{name}", w), name=f"to_{name}"))
    g.output("stream", stream)
    assert len(launches(g, x=(rows, 256), y=(rows, 256))) == 1
    found = g.run(x=x, y=y, device="emulator")
    wanted = wide(x) + rms(wide(y), gains[0])
    close(found["stream"], wanted, np.float32)
    for name, (_, numbers) in zip("qkv", weights, strict=True):
        close(found[name], rms(wanted, gains[1]) @ numbers.T, np.float32)


@pytest.mark.parametrize(("heads", "depth", "pairs"), [(4, 64, False), (3, 10, True), (2, 31 * 2, False)])
def test_norms_of_heads_turn_and_append_in_one_launch(heads: int, depth: int, pairs: bool) -> None:
    x, gain, frequencies = normal(1, heads, depth), (1 + normal(depth)).astype(np.float32), np.linspace(1, 0.01, depth // 2).astype(np.float32)
    g = tw.TensorGraph("turned")
    rows, position = g.input("x", (1, heads, depth), tw.f32), g.input("position", (1,), tw.i32)
    normed = g.op("RmsNorm", rows, gamma=gain, epsilon=1e-6, name="norm")
    turned = g.op("Rope", normed, position, frequencies, pairs=pairs, name="turn")
    g.output("cache", g.op("KVAppend", g.cache("keys", (7, heads, depth), tw.f16), g.op("Copy", turned, dtype=tw.f16), position))
    g.output("q", g.op("Copy", g.op("Rope", g.op("RmsNorm", rows, gamma=gain, epsilon=1e-6), position, frequencies, pairs=pairs), dtype=tw.f16))
    found = g.run(x=x, position=np.array([5], np.int32), device="emulator")
    n, angle = rms(wide(x), wide(gain)), 5 * wide(frequencies)
    wanted = np.empty_like(n)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if pairs else (slice(0, depth // 2), slice(depth // 2, None))
    wanted[..., first] = n[..., first] * np.cos(angle) - n[..., second] * np.sin(angle)
    wanted[..., second] = n[..., second] * np.cos(angle) + n[..., first] * np.sin(angle)
    np.testing.assert_allclose(wide(found["q"]), wanted, atol=2e-3 * np.abs(wanted).max())
    np.testing.assert_array_equal(np.asarray(found["cache"])[5], np.asarray(found["q"])[0])
    assert len(launches(g, x=(1, heads, depth), position=(1,))) == 1


def test_long_rows_and_many_rows_stay_kernels_of_their_own() -> None:
    for rows, depth in ((64, 256), (1, 8192)):
        g = tw.TensorGraph("wide")
        h = g.op("RmsNorm", g.input("x", (rows, depth), tw.f32), gamma=np.ones(depth, np.float32), epsilon=1e-6, name="norm")
        g.output("y", g.op("MulMat", h, weight=g.weight("w", packed(32, depth, tw.q8_0)[0]), name="product"))
        assert launches(g, x=(rows, depth))[0] == "rms_norm"
