"""ONNX operators against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench.onnx_writer import graph, model, node, single, value

import tilewright as tw

RNG = np.random.default_rng(7)
A, B = RNG.standard_normal((3, 5)).astype(np.float32), RNG.standard_normal((3, 5)).astype(np.float32)
ROW = RNG.standard_normal(5).astype(np.float32)
IMAGE = RNG.standard_normal((1, 2, 5, 7)).astype(np.float32)


def run(op: str, *inputs: Any, device: str = "cpu", **keywords: Any) -> Any:
    data, arrays = single(op, inputs, **keywords)
    return tw.graph.from_onnx(data).run(arrays, device=device)


def near(found: Any, wanted: Any, rtol: float = 2e-6) -> None:
    wanted = np.asarray(wanted)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted.astype(np.float64), rtol=rtol, atol=1e-6)


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(axis=axis, keepdims=True))
    return np.asarray(e / e.sum(axis=axis, keepdims=True))


CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {
    "Add": ((A, ROW), {}, A + ROW),
    "Div integers": ((np.array([7, -7, 7], np.int32), np.array([2, 2, -2], np.int32)), {}, np.array([3, -3, -3])),
    "Sqrt of a number": ((np.float32(2.0),), {}, np.sqrt(2.0)),
    "Clip": ((A, np.float32(-0.5), np.float32(0.5)), {"constants": (1, 2)}, np.clip(A, -0.5, 0.5)),
    "Clip before 11": ((A,), {"opset": 10, "min": -0.5}, np.maximum(A, -0.5)),
    "Where": ((A > 0, A, B), {}, np.where(A > 0, A, B)),
    "Softmax": ((A,), {}, softmax(A)),
    "Softmax before 13": ((IMAGE,), {"opset": 12}, softmax(IMAGE.reshape(1, -1)).reshape(IMAGE.shape)),
    "ReduceSum": ((A, np.array([1])), {"constants": (1,), "keepdims": 0}, A.sum(1)),
    "ReduceSum before 13": ((A,), {"opset": 11, "axes": [0]}, A.sum(0, keepdims=True)),
    "ArgMax": ((A,), {"axis": 1, "keepdims": 0}, A.argmax(1)),
    "CumSum": ((A, np.array(1)), {"constants": (1,)}, A.cumsum(1)),
    "MatMul": ((A, B.T.copy()), {}, A.astype(np.float64) @ B.T),
    "MatMul of vectors": ((ROW, ROW), {}, ROW.astype(np.float64) @ ROW),
    "Gemm": ((A, B, ROW[:3]), {"transB": 1, "alpha": 0.5}, 0.5 * (A.astype(np.float64) @ B.T) + ROW[:3]),
    "LayerNormalization": ((A, ROW, ROW), {}, (A - A.mean(1, keepdims=True)) / np.sqrt(A.astype(np.float64).var(1, keepdims=True) + 1e-5) * ROW + ROW),
    "Gather": ((A, np.array([[2, -1]])), {}, A[[[2, -1]]]),
    "Slice": ((A, np.array([4]), np.array([0]), np.array([1]), np.array([-2])), {"constants": (1, 2, 3, 4)}, A[:, 4:0:-2]),
    "Concat": ((A, B), {"axis": 1}, np.concatenate([A, B], 1)),
    "Transpose": ((IMAGE,), {"perm": [0, 2, 3, 1]}, IMAGE.transpose(0, 2, 3, 1)),
    "Squeeze": ((IMAGE, np.array([0])), {"constants": (1,)}, IMAGE[0]),
    "Unsqueeze before 13": ((A,), {"opset": 12, "axes": [0, 3]}, A[None, ..., None]),
    "Expand": ((ROW, np.array([3, 5])), {}, np.broadcast_to(ROW, (3, 5))),
    "Tile": ((A, np.array([2, 1])), {"constants": (1,)}, np.tile(A, (2, 1))),
    "Pad": ((A, np.array([1, 0, 0, 2])), {"constants": (1,)}, np.pad(A, ((1, 0), (0, 2)))),
    "Pad reflect": ((A, np.array([1, 2, 1, 2])), {"constants": (1,), "mode": "reflect"}, np.pad(A, ((1, 1), (2, 2)), mode="reflect")),
    "Cast": ((A,), {"to": 6}, A.astype(np.int32)),
    "Cast to bool": ((A,), {"to": 9}, A != 0),
    "Trilu": ((A, np.array(1)), {"constants": (1,), "upper": 0}, np.tril(A, 1)),
    "GlobalAveragePool": ((IMAGE,), {}, IMAGE.astype(np.float64).mean((2, 3), keepdims=True)),
    "Einsum": ((A, B), {"equation": "ij,kj->ik"}, A.astype(np.float64) @ B.T),
    "Shape": ((IMAGE,), {}, np.array(IMAGE.shape)),
}


@pytest.mark.parametrize("name", CASES)
def test_against_numpy(name: str) -> None:
    inputs, keywords, wanted = CASES[name]
    near(run(name.split()[0], *inputs, **keywords), wanted)


def test_nothing_along_an_axis() -> None:
    empty = np.zeros((0, 5), np.float32)
    assert run("Add", empty, ROW).shape == (0, 5)
    near(run("ReduceSum", empty, np.array([0]), constants=(1,), keepdims=0), np.zeros(5))


def test_nan_and_infinities_pass() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0], np.float32)
    np.testing.assert_array_equal(run("Relu", x), [np.nan, np.inf, 0.0, 0.0])
    np.testing.assert_array_equal(run("Min", x, np.zeros(4, np.float32)), [np.nan, 0.0, -np.inf, 0.0])


def test_arrays_that_are_not_contiguous() -> None:
    data, _ = single("Add", (A, ROW))
    near(tw.graph.from_onnx(data).run(x0=np.asfortranarray(A), x1=np.repeat(ROW, 2)[::2]), A + ROW)


def test_top_k() -> None:
    found = run("TopK", A, np.array([2]), constants=(1,), outputs=2)
    order = np.argsort(-A, axis=1, kind="stable")[:, :2]
    near(found["y0"], np.take_along_axis(A, order, 1))
    np.testing.assert_array_equal(found["y1"], order)


@pytest.mark.parametrize("how", ["none", "add"])
def test_scatter_elements(how: str) -> None:
    places = np.array([[1, -1], [0, 1]])
    wanted = A.copy()
    for i in range(2):
        for j in range(2):
            wanted[i, places[i, j]] = (A[i, places[i, j]] if how == "add" else 0) + B[i, j]
    near(run("ScatterElements", A, places, B[:2, :2].copy(), axis=1, reduction=how), wanted)


def convolved(x: np.ndarray, w: np.ndarray, pads: int, stride: int, groups: int) -> np.ndarray:
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (pads, pads), (pads, pads)))
    high, wide = ((n - k) // stride + 1 for n, k in zip(x.shape[2:], w.shape[2:], strict=True))
    out = np.zeros((x.shape[0], w.shape[0], high, wide))
    each, several = w.shape[1], w.shape[0] // groups
    for f in range(w.shape[0]):
        part = x[:, f // several * each : (f // several + 1) * each]
        for i in range(high):
            for j in range(wide):
                out[:, f, i, j] = (part[:, :, i * stride : i * stride + w.shape[2], j * stride : j * stride + w.shape[3]] * w[f]).sum((1, 2, 3))
    return out


@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (2, 2)])
def test_convolution(groups: int, stride: int) -> None:
    w = RNG.standard_normal((4, 2 // groups, 3, 3)).astype(np.float32)
    bias = RNG.standard_normal(4).astype(np.float32)
    found = run("Conv", IMAGE, w, bias, constants=(1, 2), group=groups, strides=[stride, stride], pads=[1, 1, 1, 1])
    near(found, convolved(IMAGE, w, 1, stride, groups) + bias[None, :, None, None], 1e-5)


def test_pools() -> None:
    found = run("MaxPool", IMAGE, kernel_shape=[2, 2], strides=[2, 2])
    near(found, IMAGE[:, :, :4, :6].reshape(1, 2, 2, 2, 3, 2).max((3, 5)))
    ones = run("AveragePool", np.ones_like(IMAGE), kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    near(ones, np.ones_like(IMAGE))


def test_lstm_with_lengths() -> None:
    steps, batch, width, hidden = 3, 2, 4, 5
    x = RNG.standard_normal((steps, batch, width)).astype(np.float32)
    w = RNG.standard_normal((1, 4 * hidden, width)).astype(np.float32)
    r = RNG.standard_normal((1, 4 * hidden, hidden)).astype(np.float32)
    lengths = np.array([3, 2], np.int32)
    found = run("LSTM", x, w, r, None, lengths, outputs=3, hidden_size=hidden)
    h, c = np.zeros((batch, hidden)), np.zeros((batch, hidden))
    y = np.zeros((steps, 1, batch, hidden))
    for t in range(steps):
        i, o, f, g = np.split(x[t].astype(np.float64) @ w[0].T + h @ r[0].T, 4, 1)
        cell = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        state = np.tanh(cell) / (1 + np.exp(-o))
        alive = (t < lengths)[:, None]
        h, c = np.where(alive, state, h), np.where(alive, cell, c)
        y[t, 0] = np.where(alive, state, 0)
    near(found["y0"], y, 1e-5)
    near(found["y1"], h[None], 1e-5)
    near(found["y2"], c[None], 1e-5)


def test_packed_weights() -> None:
    columns, depth, block = 3, 40, 32
    numbers = RNG.integers(0, 16, (columns, 64)).astype(np.uint8)
    packed = (numbers[:, 0::2] | numbers[:, 1::2] << 4).reshape(columns, 2, 16)
    scales = RNG.standard_normal((columns, 2)).astype(np.float32)
    x = RNG.standard_normal((2, depth)).astype(np.float32)
    found = run("MatMulNBits", x, packed, scales, constants=(1, 2), domain="com.microsoft", N=columns, K=depth, bits=4, block_size=block)
    weights = (numbers.astype(np.float64) - 8) * np.repeat(scales, block, 1)
    near(found, x.astype(np.float64) @ weights[:, :depth].T, 1e-5)


def test_quantised_product() -> None:
    x = RNG.standard_normal((2, 8)).astype(np.float32)
    w = RNG.integers(-128, 128, (8, 3)).astype(np.int8)
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        node("MatMulInteger", ["q", "w", "zero"], ["sum"]),
        node("Cast", ["sum"], ["wide"], to=1),
        node("Mul", ["wide", "scale"], ["y"]),
    ]
    data = model(nodes, [value("x", np.float32, ["n", 8])], ["y"], {"w": w})
    scale = (max(x.max(), 0) - min(x.min(), 0)) / 255
    np.testing.assert_allclose(tw.graph.from_onnx(data).run(x=x), x @ w.astype(np.float32), atol=scale * 128 * 8)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats(dtype: Any) -> None:
    near(run("Mul", A.astype(dtype), B.astype(dtype)), A.astype(dtype).astype(np.float64) * B.astype(dtype), 1e-3 if dtype == np.float16 else 1e-15)


def test_on_the_emulator() -> None:
    near(run("Softmax", A, device="emulator"), softmax(A))


def test_choice_by_an_input() -> None:
    then = graph([node("Add", ["x", "x"], ["t"])], [], ["t"])
    otherwise = graph([node("Neg", ["x"], ["e"])], [], ["e"])
    nodes = [node("Equal", ["k", "one"], ["c"]), node("If", ["c"], ["y"], then_branch=then, else_branch=otherwise)]
    data = model(nodes, [value("x", np.float32, ["n"]), value("k", np.int64, [])], ["y"], {"one": np.array(1)})
    found = tw.graph.from_onnx(data)
    near(found.run(x=ROW, k=1), 2 * ROW)
    near(found.run(x=ROW, k=np.array(2)), -ROW)


def test_shapes_are_folded() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]), node("Gather", ["s", "zero"], ["n"]), node("Unsqueeze", ["n", "axis"], ["n1"]),
        node("Concat", ["n1", "rest"], ["shape"], axis=0), node("Reshape", ["x", "shape"], ["flat"]), node("Relu", ["flat"], ["y"]),
    ]  # fmt: skip
    weights = {"zero": np.array(0), "axis": np.array([0]), "rest": np.array([-1])}
    found = tw.graph.from_onnx(model(nodes, [value("x", np.float32, ["batch", 2, 3])], ["y"], weights))
    for batch in (1, 4):
        x = RNG.standard_normal((batch, 2, 3)).astype(np.float32)
        near(found.run(x=x), np.maximum(x, 0).reshape(batch, 6))
        assert [n.op for n in found.graph(x=x).nodes.values() if n.kind == "op"] == ["Loops"]
