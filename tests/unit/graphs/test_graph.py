"""Tensor graphs: errors, replaced kernels, order, plans, profiles, captures."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw

RNG = np.random.default_rng(3)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def mlp() -> tw.TensorGraph:
    g = tw.TensorGraph("mlp")
    x = g.input("x", ("batch", 16), tw.f32)
    h = g.op("RmsNorm", x, gamma=np.ones(16, np.float32), name="norm")
    gate, up = (g.op("MulMat", h, weight=normal(24, 16), name=n) for n in ("gate", "up"))
    y = g.op("MulMat", g.op("Mul", g.op("Silu", gate, name="silu"), up, name="mul"), weight=normal(16, 24), name="down")
    g.output("y", g.op("Add", x, y, name="sum"))
    return g


def fails(pattern: str, code: str = "") -> Any:
    return pytest.raises(tw.UserError, match=(rf"\[{code}\].*" if code else "") + pattern)


# -- errors -------------------------------------------------------------------------------------------------------


def test_errors_name_nodes() -> None:
    g = tw.TensorGraph("bad")
    x = g.input("x", ("n", 8), tw.f32)
    with fails(r"node 'fc' \(MulMat\): features of 'x' and columns of the weight 'fc.weight': 8 and 9 differ", "TW004"):
        g.op("MulMat", x, weight=np.zeros((4, 9), np.float32), name="fc")
    with fails(r"unknown op 'MulMta'", "TW002"):
        g.op("MulMta", x)
    with fails(r"node 'rms' \(RmsNorm\) is missing the input 'gamma'", "TW008"):
        g.op("RmsNorm", x, name="rms")
    with fails(r"has no parameter 'epsilom'", "TW016"):
        g.op("SoftMax", x, epsilom=1.0)
    with fails(r"'epsilon' is 'small', not float", "TW009"):
        g.op("RmsNorm", x, gamma=np.ones(8, np.float32), epsilon="small")
    with fails(r"has a node 'x' already", "TW016"):
        g.input("x", (1,), tw.f32)
    with fails(r"node 'cast' \(Add\): 'x' is f32\[n, 8\] and 'h' is f16\[n, 8\]: their dtypes differ", "TW006"):
        g.op("Add", x, g.input("h", ("n", 8), tw.f16), name="cast")
    with fails(r"no output", "TW008"):
        g.run(x=np.zeros((2, 8), np.float32), h=np.zeros((2, 8), np.float16))
    with fails(r"of another graph, 'other'", "TW009"):
        g.op("Add", x, tw.TensorGraph("other").input("x", (8,), tw.f32))
    with fails(r"writes 'x', which is no cache", "TW015"):
        h = tw.TensorGraph("w")
        rows = h.input("x", (4, 1, 8), tw.f32)
        h.output("y", h.op("KVAppend", rows, rows, h.input("p", (1,), tw.i32)))
        h.validate()


def test_errors_of_a_run() -> None:
    g = mlp()
    with fails(r"the graph 'mlp' is missing the input 'x', which node 'norm' reads", "TW008"):
        g.run(device="cpu")
    with fails(r"has no input 'z'", "TW008"):
        g.run(x=np.zeros((2, 16), np.float32), z=1, device="cpu")
    with fails(r"axis 1 of the input 'x' is 17, but the graph says 16", "TW004"):
        g.run(x=np.zeros((2, 17), np.float32), device="cpu")
    with fails(r"'x' is f32\[batch, 16\], and was given as f64", "TW006"):
        g.run(x=np.zeros((2, 16)), device="cpu")
    two = tw.TensorGraph("two")
    two.output("y", two.op("Add", two.input("a", ("n", 3), tw.f32), two.input("b", ("m", 3), tw.f32), name="sum"))
    with fails(r"node 'sum' \(Add\): axis 0 of 'a' and 'b': n = 2 and m = 4 differ", "TW004"):
        two.run(a=np.zeros((2, 3), np.float32), b=np.zeros((4, 3), np.float32), device="cpu")


def test_nodes_by_name_missing_ones_and_cycles() -> None:
    g = tw.TensorGraph("names")
    x = g.input("x", (3,), tw.f32)
    later = g.op("Add", x, "second", name="first")
    g.op("Mul", x, 2.0, name="second")
    g.output("y", later)
    assert g.run(x=np.ones(3, np.float32), device="cpu").tolist() == [3, 3, 3]
    g = tw.TensorGraph("cycle")
    x = g.input("x", (3,), tw.f32)
    g.op("Add", x, "b", name="a")
    g.op("Add", x, "a", name="b")
    with fails(r"cycle: (a -> b -> a|b -> a -> b)", "TW016"):
        g.output("y", "a")
    g = tw.TensorGraph("missing")
    y = g.op("Add", g.input("x", (3,), tw.f32), "nowhere", name="a")
    with fails(r"node 'a' \(Add\): there is no node 'nowhere'", "TW008"):
        g.output("y", y)


def test_a_cache_is_read_before_it_is_written_where_the_graph_says_so() -> None:
    g = tw.TensorGraph("order")
    p, rows = g.input("p", (1,), tw.i32), g.input("rows", (1, 1, 2), tw.f32)
    cache = g.cache("c", (3, 1, 2), tw.f32)
    after = g.op("KVAppend", cache, rows, p, name="append")
    g.output("after", g.op("Copy", after, name="new"))
    g.output("before", g.op("Copy", cache, name="old"))  # built later, and has to run first
    assert [n.name for n in g.validate() if n.kind == "op"] == ["old", "append", "new"]
    found = g.run(p=np.array([1], np.int32), rows=np.ones((1, 1, 2), np.float32), device="cpu")
    assert not found["before"].any()
    assert found["after"].reshape(3, 2).tolist() == [[0, 0], [1, 1], [0, 0]]


# -- replaced kernels ---------------------------------------------------------------------------------------------


@tw.kernel
def halved_silu(x: tw.Array) -> tw.Array:
    return tw.silu(x) * 0.5


@tw.kernel
def summed(x: tw.Array) -> tw.Array:
    return tw.sum(x, axis=1)


@tw.kernel
def narrow(x: tw.Array) -> tw.Array:
    return tw.cast(x, tw.f16)


def test_a_kernel_is_replaced_in_one_graph_or_all() -> None:
    g, x = mlp(), normal(3, 16)
    before = g.run(x=x, device="cpu")
    g.replace("Silu", halved_silu)
    after = g.run(x=x, device="cpu")
    np.testing.assert_allclose(after - x, (before - x) / 2, 1e-4, 1e-5)
    g.replace("Silu", None)
    assert np.array_equal(g.run(x=x, device="cpu"), before)
    tw.graph.register("Silu", halved_silu, node="silu")
    try:
        assert np.array_equal(g.run(x=x, device="cpu"), after)
    finally:
        tw.graph.register("Silu", None, node="silu")
    assert np.array_equal(g.run(x=x, device="cpu"), before)


def test_a_function_is_called_in_place_of_a_kernel() -> None:
    g, x, seen = mlp(), normal(3, 16), []

    def product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        seen.append(x.shape)
        return x @ weight.T

    before = g.run(x=x, device="cpu")
    g.replace("MulMat", product, node="down")
    np.testing.assert_allclose(g.run(x=x, device="cpu"), before, 1e-5, 1e-5)
    assert seen == [(3, 24)]
    assert "runs by itself: product" in g.explain(x=x)
    with fails("has no node 'sum' of op 'MulMat'", "TW002"):
        g.replace("MulMat", product, node="sum")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (summed, r"node 'silu' \(Silu\): summed makes f32\[3\], not f32\[3, 24\]"),
        (narrow, r"node 'silu' \(Silu\): narrow makes f16, not f32"),
        (lambda x: x[:1], r"node 'silu' \(Silu\): <lambda> gave f32\[1, 24\], not f32\[3, 24\]"),
        (lambda x: x.astype(np.float64), r"node 'silu' \(Silu\): <lambda> gave f64\[3, 24\], not f32"),
        (lambda x: None, r"node 'silu' \(Silu\): <lambda> gave 0 result\(s\), not 1"),
    ],
)
def test_wrong_replacements_are_errors_that_name_the_node(kernel: Any, message: str) -> None:
    g = mlp()
    g.replace("Silu", kernel)
    with fails(message):
        g.run(x=normal(3, 16), device="cpu")


def test_a_replacement_has_parameters_of_the_op() -> None:
    with fails("has a parameter 'w', which 'Silu' does not have", "TW016"):
        mlp().replace("Silu", lambda x, w: x)


def test_a_new_op() -> None:
    @tw.kernel
    def clipped(x: tw.Array, most: float) -> tw.Array:
        out = tw.empty_like(x)
        for i in tw.grid(len(x)):
            out[i] = min(x[i], most)
        return out

    if "TestClip" not in tw.graph.ops():
        tw.graph.register("TestClip", clipped, inputs=("x",), rule=lambda call: tw.TensorType(call["x"].shape, call["x"].dtype), params=(tw.OpParam("most", float, 1.0),))
    g = tw.TensorGraph("clip")
    g.output("y", g.op("TestClip", g.input("x", ("n",), tw.f32), most=2) * 10.0)
    assert g.run(x=np.array([1, 5], np.float32), device="cpu").tolist() == [10, 20]


# -- plans --------------------------------------------------------------------------------------------------------


def test_nodes_are_fused_and_explained() -> None:
    g = mlp()
    text = g.explain(x=(4, 16))
    assert "7 nodes in 1 segments" in text
    assert "computed right after it is made" in text
    assert "stays in memory" in text
    x = normal(4, 16)
    g.run(x=x, device="cpu")
    launches = len(g.plan(x=x).segments[0].runner.last.launches)
    assert launches <= 4


def test_dead_nodes_are_dropped_and_weights_are_folded() -> None:
    g = tw.TensorGraph("fold")
    x = g.input("x", ("n", 4), tw.f32)
    calls = []

    def counted(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        calls.append(1)
        return x * y

    weight = g.op("Mul", g.weight("w", normal(4, 4)), 2.0, name="double")
    weight = g.op("Mul", weight, g.weight("v", normal(4, 4)), name="folded")
    g.op("Exp", x, name="dead")
    g.output("y", g.op("MulMat", x, weight=weight))
    g.replace("Mul", counted, node="folded")
    plan = g.plan(x=(2, 4))
    assert plan.dropped == ("dead",)
    first, second = (g.run(x=np.ones((n, 4), np.float32), device="cpu") for n in (2, 2))
    assert np.array_equal(first, second)
    assert len(calls) == 1
    assert "computed once" in g.explain(x=(2, 4))


def layers(count: int) -> tw.TensorGraph:
    g = tw.TensorGraph("layers")
    x = g.input("x", ("n", 8), tw.f32)
    y = g.op("Exp", x)
    for layer in range(count):
        h = g.op("RmsNorm", y, gamma=np.ones(8, np.float32), name=f"norm{layer}")
        h = g.op("MulMat", h, weight=normal(8, 8), name=f"product{layer}")
        y = g.op("Add", g.op("Tanh", h, name=f"tanh{layer}"), y, name=f"sum{layer}")
    g.output("y", g.op("SoftMax", y))
    return g


def test_layers_are_one_program() -> None:
    g = layers(12)
    plan = g.plan(x=(3, 8))
    assert len(plan.calls) == 50
    assert plan.programs <= 3
    x = normal(3, 8)
    np.testing.assert_allclose(g.run(x=x, device="cpu"), g.run(x=x, device="cpu", fuse=False), 1e-5)


def test_the_workspace_is_little_more_than_what_is_needed_at_once() -> None:
    for fuse in (True, False):
        plan = layers(12).plan(fuse=fuse, x=(70, 8))
        assert plan.least_bytes <= plan.peak_bytes <= 1.25 * plan.least_bytes
        rooms = [(plan.offsets[i.value], plan.offsets[i.value] + i.room, i.first, i.last) for i in plan.lifetimes]
        for number, (start, end, first, last) in enumerate(rooms):
            for other in rooms[:number]:
                assert end <= other[0] or other[1] <= start or last < other[2] or other[3] < first
    assert plan.peak_bytes < sum(value.nbytes for value in plan.values) / 4


def test_empty_inputs_and_one_row() -> None:
    g = mlp()
    assert g.run(x=np.zeros((0, 16), np.float32), device="cpu").shape == (0, 16)
    x = normal(5, 16)
    np.testing.assert_allclose(g.run(x=x[:1], device="cpu"), g.run(x=x, device="cpu")[:1], 1e-4, 1e-5)


# -- profiles -----------------------------------------------------------------------------------------------------


def test_profile_and_trace(tmp_path: Path) -> None:
    profile = mlp().profile(x=normal(3, 16), device="cpu", runs=2)
    assert [row.nodes for row in profile.rows] == [("norm",), ("gate",), ("silu",), ("up",), ("mul",), ("down",), ("sum",)] or profile.launches == 7
    assert profile.seconds > 0
    assert re.search(r"down +MulMat +1 launches", str(profile))
    profile.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in spans} == {"norm", "gate", "up", "silu", "mul", "down", "sum"}
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in spans)
    with fails("cannot be written", "TW007"):
        profile.trace(tmp_path / "no" / "trace.json")


# -- captures -----------------------------------------------------------------------------------------------------


def decoder(longest: int | str) -> tw.TensorGraph:
    g = tw.TensorGraph("decoder")
    x, position = g.input("x", (1, 16), tw.f32), g.input("position", (1,), tw.i32)
    rng = np.random.default_rng(11)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    h = g.op("RmsNorm", x, gamma=np.ones(16, np.float32))
    qkv = g.op("MulMat", h, weight=weight(32, 16), name="qkv")
    q, k, v = qkv[:, :16].reshape(1, 2, 8), qkv[:, 16:24].reshape(1, 1, 8), qkv[:, 24:].reshape(1, 1, 8)
    q, k = g.op("Rope", q, position), g.op("Rope", k, position)
    keys = g.op("KVAppend", g.cache("keys", (longest, 1, 8), tw.f32), k, position)
    values = g.op("KVAppend", g.cache("values", (longest, 1, 8), tw.f32), v, position)
    mixed = g.op("Attention", q, keys, values, position).reshape(1, 16)
    g.output("y", g.op("Add", x, g.op("MulMat", mixed, weight=weight(16, 16)), name="y"))
    return g


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_one_capture_serves_all_positions_bit_for_bit(device: str) -> None:
    eager, captured = decoder(9), decoder(9)
    xs = [normal(1, 16) for _ in range(4)]
    step = captured.capture(device=device, x=xs[0], position=np.array([0], np.int32))
    for position, x in enumerate(xs):
        at = np.array([position], np.int32)
        assert np.array_equal(step(x=x, position=at), eager.run(x=x, position=at, device=device))
    assert step.captures == 1
    assert np.array_equal(captured.state("keys", device), eager.state("keys", device))


def test_passing_the_maximum_captures_again_and_says_so() -> None:
    eager, captured = decoder(16), decoder("longest")
    with fails("the extent longest of the cache 'keys' has no value", "TW014"):
        captured.run(x=normal(1, 16), position=np.zeros(1, np.int32), device="cpu")
    step = captured.capture(device="cpu", max_position=3, x=normal(1, 16), position=np.array([0], np.int32))
    for position in range(5):
        x, at = normal(1, 16), np.array([position], np.int32)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = step(x=x, position=at)
        assert any("grow from 3 to 6 positions" in str(w.message) for w in said) == (position == 3)
        np.testing.assert_allclose(found, eager.run(x=x, position=at, device="cpu"), 1e-6, 1e-6)
    assert step.captures == 2
    fixed = decoder(2).capture(device="cpu", x=normal(1, 16), position=np.array([0], np.int32))
    with fails("'position' is 2, and the cache 'keys' holds 2 positions", "TW013"):
        fixed(position=np.array([2], np.int32))
    with fails("max_position is 4, and the cache 'keys' holds 2", "TW004"):
        decoder(2).capture(device="cpu", max_position=4, x=normal(1, 16), position=np.array([0], np.int32))


def test_inputs_of_a_capture_keep_their_form() -> None:
    step = mlp().capture(device="cpu", x=normal(2, 16))
    with fails("was captured as f32\\[2, 16\\], and is now f32\\[3, 16\\]", "TW004"):
        step(x=normal(3, 16))
    with fails("has no input 'y'", "TW008"):
        step(y=1)


def test_attention_over_new_keys_begins_a_program() -> None:
    """Heads are places in rows of products: attention would not be recognised in the program that makes them."""
    g = tw.TensorGraph("encoder")
    x, lengths = g.input("x", (2, 5, 12), tw.f32), g.input("lengths", (2,), tw.i32)
    weights = {name: normal(12, 12) for name in "qkv"}
    q, k, v = (g.op("MulMat", x, weight=weights[name], name=name).reshape((2, 5, 3, 4)) for name in "qkv")
    g.output("y", g.op("Attention", q, k, v, lengths=lengths, scale=0.5, name="mixed"))
    arrays = {"x": normal(2, 5, 12), "lengths": np.array([5, 2], np.int32)}
    assert [[call.node.name for call in segment.calls] for segment in g.plan(**arrays).segments] == [["q", "k", "v"], ["mixed"]]
    q, k, v = ((arrays["x"].astype(np.float64) @ weights[name].T).reshape(2, 5, 3, 4) for name in "qkv")
    scores = np.where(np.arange(5) < arrays["lengths"][:, None, None, None], np.einsum("sigd,sjgd->sgij", q, k) * 0.5, -np.inf)
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("sgij,sjgd->sigd", chances / chances.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(g.run(device="cpu", **arrays), wanted, atol=1e-5)
