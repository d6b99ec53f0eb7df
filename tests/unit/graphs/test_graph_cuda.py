"""Tensor graphs on a CUDA driver without a GPU: arrays of the device, weights that stay there, one captured graph for all positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from null_cuda.driver import NullCuda
from null_cuda.install import installed
from tilewright.graphs import plan
from tilewright.runtime.memory.device_array import DeviceArray

RNG = np.random.default_rng(5)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[NullCuda]:
    monkeypatch.setattr(plan, "_runners", {})
    with installed() as found:
        yield found


def decoder() -> tw.TensorGraph:
    g = tw.TensorGraph("decoder")
    x, position = g.input("x", (1, 16), tw.f32), g.input("position", (1,), tw.i32)
    rng = np.random.default_rng(11)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    h = g.op("RmsNorm", x, gamma=np.ones(16, np.float32))
    qkv = g.op("MulMat", h, weight=weight(32, 16), name="qkv")
    q, k, v = qkv[:, :16].reshape(1, 2, 8), qkv[:, 16:24].reshape(1, 1, 8), qkv[:, 24:].reshape(1, 1, 8)
    q, k = g.op("Rope", q, position), g.op("Rope", k, position)
    keys = g.op("KVAppend", g.cache("keys", ("longest", 1, 8), tw.f32), k, position)
    values = g.op("KVAppend", g.cache("values", ("longest", 1, 8), tw.f32), v, position)
    mixed = g.op("Attention", q, keys, values, position).reshape(1, 16)
    g.output("y", g.op("Add", x, g.op("MulMat", mixed, weight=weight(16, 16)), name="y"))
    return g


def inputs(position: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(position).standard_normal((1, 16)).astype(np.float32), "position": np.array([position], np.int32)}


def test_one_captured_graph_equals_runs(driver: NullCuda) -> None:
    host, eager, captured = decoder(), decoder(), decoder()
    for g in (host, eager):
        g.capacity(longest=8)
    step = captured.capture("cuda", max_position=8, **inputs(0))
    assert step.captures == 1
    for position in range(3):
        given = inputs(position)
        replayed = step(**given)
        assert isinstance(replayed, DeviceArray)
        ran = eager.run(device="cuda", **given)
        assert np.array_equal(replayed.numpy(), ran)
        np.testing.assert_allclose(ran, host.run(device="cpu", **given), 1e-5, 1e-5)
    assert step.captures == 1
    step.close()


def test_arrays_of_the_device_give_such_arrays_and_weights_move_once(driver: NullCuda) -> None:
    g = tw.TensorGraph("once")
    x = g.input("x", ("n", 8), tw.f32)
    weight = RNG.standard_normal((8, 8)).astype(np.float32)
    g.output("y", g.op("Silu", g.op("MulMat", g.op("Exp", x), weight=g.weight("w", weight))))
    values = RNG.standard_normal((3, 8)).astype(np.float32)
    there = tw.to_device(values, "cuda")
    first, second = g.run(x=there), g.run(x=there)
    assert isinstance(first, DeviceArray)
    assert np.array_equal(first.numpy(), second.numpy())
    moved = [array for key, array in g.executor.weights.items() if key[0] == "w"]
    assert len(moved) == 1
    assert np.array_equal(g.run(x=values, device="cuda"), first.numpy())
    np.testing.assert_allclose(first.numpy(), g.run(x=values, device="cpu"), 1e-5, 1e-5)


def test_segments_share_a_workspace_of_the_device(driver: NullCuda) -> None:
    g = tw.TensorGraph("space")
    x = g.input("x", ("n", 4), tw.f32)
    y = g.op("Tanh", g.op("Exp", x, name="a"), name="b")
    g.output("y", g.op("Silu", y, name="c"))
    values = RNG.standard_normal((5, 4)).astype(np.float32)
    assert g.plan(fuse=False, x=values).peak_bytes == 512
    np.testing.assert_allclose(g.run(x=values, device="cuda", fuse=False), g.run(x=values, device="cpu"), 1e-6, 1e-6)
    profile = g.profile(x=values, device="cuda", runs=1)
    assert profile.launches == 3
