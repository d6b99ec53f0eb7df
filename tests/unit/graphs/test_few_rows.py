"""Steps of few rows as decoders have them: what becomes one kernel or one launch on a GPU, and that results are those of float64. In the emulator, which runs the very
kernels of a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw

BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(7)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (RNG.standard_normal(shape) / shape[-1] ** 0.5).astype(dtype)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def rms(x: np.ndarray, g: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def launches(g: tw.TensorGraph, target: str = "sm_90a", **shapes: tuple[int, ...]) -> list[str]:
    lines = [line.strip() for line in g.explain(target, **shapes).splitlines()]
    return [line.removeprefix("launch ").split("(")[0] for line in lines if line.startswith("launch ")]


def close(found: Any, wanted: np.ndarray, dtype: Any) -> None:
    np.testing.assert_allclose(wide(found), wanted, rtol=0, atol=(3e-2 if dtype is BF16 else 1e-5) * np.abs(wanted).max())


@pytest.mark.parametrize(("rows", "depth", "columns", "dtype"), [(1, 136, 7, np.float32), (1, 264, 33, BF16), (3, 131, 12, np.float32), (2, 520, 5, BF16)])
def test_a_norm_is_computed_in_the_product_that_reads_it(rows: int, depth: int, columns: int, dtype: Any) -> None:
    x, gain, w = normal(rows, depth, dtype=dtype), (1 + normal(depth)).astype(dtype), normal(columns, depth, dtype=dtype)
    g = tw.TensorGraph("normed")
    h = g.op("RmsNorm", g.input("x", (rows, depth), tw.bf16 if dtype is BF16 else tw.f32), gamma=gain, epsilon=1e-6, name="norm")
    g.output("y", g.op("MulMat", h, weight=w, name="product"))
    close(g.run(x=x, device="emulator"), rms(wide(x), wide(gain)) @ wide(w).T, dtype)
    assert launches(g, x=(rows, depth)) == ["mul_mat"]
    assert "rms_norm: computed by the products that read it" in g.explain("sm_90a", x=(rows, depth))


def test_a_layer_norm_and_a_residual_before_it() -> None:
    x, y, w = normal(1, 200), normal(1, 200), normal(9, 200)
    g = tw.TensorGraph("normed")
    total = g.op("Add", g.input("x", (1, 200), tw.f32), g.input("y", (1, 200), tw.f32), name="sum")
    h = g.op("LayerNorm", total, gamma=np.ones(200, np.float32), beta=np.zeros(200, np.float32), epsilon=1e-5)
    g.output("out", g.op("MulMat", h, weight=w, name="product"))
    s = wide(x) + wide(y)
    wanted = (s - s.mean(-1, keepdims=True)) / np.sqrt(s.var(-1, keepdims=True) + 1e-5) @ wide(w).T
    close(g.run(x=x, y=y, device="emulator"), wanted, np.float32)


@pytest.mark.parametrize(("op", "dtype", "rows"), [("Silu", np.float32, 1), ("Gelu", BF16, 1), ("Gelu", np.float32, 2)])
def test_gate_and_up_are_one_kernel(op: str, dtype: Any, rows: int) -> None:
    depth, hidden = 648, 1031
    form = {"approximate": True} if op == "Gelu" else {}
    x, gain = normal(rows, depth, dtype=dtype), (1 + normal(depth)).astype(dtype)
    gate, up = normal(hidden, depth, dtype=dtype), normal(hidden, depth, dtype=dtype)
    g = tw.TensorGraph("gated")
    h = g.op("RmsNorm", g.input("x", (rows, depth), tw.bf16 if dtype is BF16 else tw.f32), gamma=gain, epsilon=1e-6)
    acted = g.op(op, g.op("MulMat", h, weight=gate, name="gate"), name="act", **form)
    g.output("y", g.op("Mul", acted, g.op("MulMat", h, weight=up, name="up"), name="both"))
    assert len(launches(g, x=(rows, depth))) == 1
    small = tw.TensorGraph("gated")
    h = small.op("RmsNorm", small.input("x", (rows, depth), tw.bf16 if dtype is BF16 else tw.f32), gamma=gain, epsilon=1e-6)
    acted = small.op(op, small.op("MulMat", h, weight=gate[:13]), name="act", **form)
    small.output("y", small.op("Mul", acted, small.op("MulMat", h, weight=up[:13]), name="both"))
    n = rms(wide(x), wide(gain))
    a, b = n @ wide(gate[:13]).T, n @ wide(up[:13]).T
    wanted = (a / (1 + np.exp(-a)) if op == "Silu" else 0.5 * a * (1 + np.tanh((2 / np.pi) ** 0.5 * (a + 0.044715 * a**3)))) * b
    close(small.run(x=x, device="emulator"), wanted, dtype)


def test_queries_keys_and_values_of_different_widths_are_one_launch() -> None:
    x, weights = normal(1, 264), [normal(n, 264) for n in (21, 6, 6)]
    g = tw.TensorGraph("qkv")
    h = g.op("RmsNorm", g.input("x", (1, 264), tw.f32), gamma=np.ones(264, np.float32), epsilon=1e-6)
    for name, w in zip("qkv", weights, strict=True):
        g.output(name, g.op("MulMat", h, weight=w, name=f"to_{name}"))
    found = g.run(x=x, device="emulator")
    for name, w in zip("qkv", weights, strict=True):
        close(found[name], rms(wide(x), np.ones(264)) @ wide(w).T, np.float32)
    assert len(launches(g, x=(1, 264))) == 1
    assert len(launches(g, target="x86-64-avx512", x=(1, 264))) >= 3


def test_norms_after_products_as_gemma_has_them() -> None:
    """A norm of what a product makes, added to the stream, normed again for the next product."""
    x, one, two = normal(1, 136), normal(136, 136), normal(10, 136)
    gains = [1 + normal(136) for _ in range(2)]
    g = tw.TensorGraph("gemma")
    stream = g.input("x", (1, 136), tw.f32)
    after = g.op("RmsNorm", g.op("MulMat", stream, weight=one, name="mix"), gamma=gains[0].astype(np.float32), epsilon=1e-6, name="post")
    stream = g.op("Add", stream, after, name="sum")
    h = g.op("RmsNorm", stream, gamma=gains[1].astype(np.float32), epsilon=1e-6, name="pre")
    g.output("y", g.op("MulMat", h, weight=two, name="next"))
    g.output("stream", stream)
    found = g.run(x=x, device="emulator")
    wanted = wide(x) + rms(wide(x) @ wide(one).T, gains[0])
    close(found["stream"], wanted, np.float32)
    close(found["y"], rms(wanted, gains[1]) @ wide(two).T, np.float32)


def test_rows_that_are_needed_anyway_are_written() -> None:
    g = tw.TensorGraph("both")
    h = g.op("RmsNorm", g.input("x", (1, 136), tw.f32), gamma=np.ones(136, np.float32), epsilon=1e-6, name="norm")
    g.output("h", h)
    g.output("y", g.op("MulMat", h, weight=normal(9, 136), name="product"))
    assert launches(g, x=(1, 136)) == ["mul_mat"]  # the first block writes them
    assert "is a result, so it is written anyway" in g.explain("sm_90a", x=(1, 136))


def test_many_rows_stay_a_kernel_of_their_own() -> None:
    g = tw.TensorGraph("prefill")
    h = g.op("RmsNorm", g.input("x", ("rows", 256), tw.bf16), gamma=np.ones(256, BF16), epsilon=1e-6, name="norm")
    g.output("y", g.op("MulMat", h, weight=normal(512, 256, dtype=BF16), name="product"))
    assert launches(g, x=(512, 256))[0] == "rms_norm"
    assert launches(g, x=(1, 256)) == ["mul_mat"]
