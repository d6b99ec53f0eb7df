"""Captured graphs on a real GPU. Skipped where there is none."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import tilewright as tw
from tilewright.runtime.cuda import device as cuda

pytestmark = pytest.mark.requires("cuda")


@tw.kernel
def scaled(x: tw.Array, factor: float) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows, cols), x.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = x[i, j] * factor
    return out


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows, cols), x.dtype)
    for i in tw.grid(rows):
        most = -tw.inf
        for j in range(cols):
            most = max(most, x[i, j])
        total = 0.0
        for j in range(cols):
            total += tw.exp(x[i, j] - most)
        for j in range(cols):
            out[i, j] = tw.exp(x[i, j] - most) / total
    return out


def on_gpu(values: np.ndarray) -> object:
    return tw.to_device(values, "cuda")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_replay_runs_what_was_captured() -> None:
    values = random(64, 128)
    x = on_gpu(values)
    # The first call of a kernel, inside a capture: code is loaded meanwhile.
    with tw.capture("cuda") as graph:
        y = scaled(x, 2.0)
        z = scaled(y, 3.0)
        del y
        w = softmax(z)
    assert graph.nodes == 3
    graph.replay()
    np.testing.assert_array_equal(np.asarray(z), values * 2 * 3)
    e = np.exp(values * 6 - (values * 6).max(1, keepdims=True))
    np.testing.assert_allclose(np.asarray(w), e / e.sum(1, keepdims=True), rtol=2e-6)
    x.copy_from(random(64, 128, seed=1))  # type: ignore[attr-defined]
    graph.replay()
    np.testing.assert_array_equal(np.asarray(z), random(64, 128, seed=1) * 2 * 3)


def test_inputs_change_in_place() -> None:
    a, b = random(64, 128), random(64, 128, seed=1)
    with tw.capture("cuda", x=on_gpu(a), factor=2.0) as graph:
        y = scaled(graph["x"], graph["factor"])
        z = scaled(y, 0.5)
    graph.replay()
    np.testing.assert_array_equal(np.asarray(z), a)
    graph.update(factor=4.0)
    graph.replay()
    np.testing.assert_array_equal(np.asarray(z), a * 2)
    graph.replay(x=on_gpu(b), factor=8.0)
    gc.collect()
    np.testing.assert_array_equal(np.asarray(z), b * 4)
    assert graph.instantiations == 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_products_with_tensor_maps_change_in_place(dtype: str) -> None:
    """Half precision goes through the copy engine: the map of the new array must be in the node."""
    a, b, c = (random(256, 256, seed=seed).astype(dtype) for seed in range(3))
    weights = on_gpu(b)
    with tw.capture("cuda", x=on_gpu(a)) as graph:
        y = product(graph["x"], weights)
        z = product(y, weights)
    tolerance = {"rtol": 2e-2, "atol": 0.5} if dtype == "float16" else {"rtol": 1e-3, "atol": 1e-2}
    for values in (a, c, a):
        graph.replay(x=on_gpu(values))
        first = (values.astype(np.float64) @ b.astype(np.float64)).astype(dtype)
        np.testing.assert_allclose(np.asarray(y).astype(np.float64), first.astype(np.float64), **tolerance)
        np.testing.assert_allclose(
            np.asarray(z).astype(np.float64),
            np.asarray(y).astype(np.float64) @ b.astype(np.float64),
            rtol=2e-2,
            atol=8 if dtype == "float16" else 0.05,
        )
    assert graph.instantiations == 1


def test_a_function_is_captured_again_when_needed() -> None:
    def step(x: object, factor: float) -> object:
        return softmax(scaled(x, 2 * factor))

    a = random(32, 64)
    graph = tw.graph(step, on_gpu(a), 0.25)
    graph.replay()
    first = graph.result

    def expected(values: np.ndarray, factor: float) -> np.ndarray:
        e = np.exp(values * factor - (values * factor).max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    np.testing.assert_allclose(np.asarray(first), expected(a, 0.5), rtol=2e-6)
    graph.replay(factor=1.0)
    assert graph.instantiations == 1
    assert graph.result.pointer == first.pointer
    np.testing.assert_allclose(np.asarray(first), expected(a, 2.0), rtol=2e-6)
    # In place, after the driver updated the graph from a second capture.
    for seed in range(5, 8):
        graph.replay(x=on_gpu(random(32, 64, seed=seed)))
        np.testing.assert_allclose(np.asarray(first), expected(random(32, 64, seed=seed), 2.0), rtol=2e-6)
    assert graph.instantiations == 1
    other = random(1000, 64, seed=3)
    graph.replay(x=on_gpu(other))
    np.testing.assert_allclose(np.asarray(graph.result), expected(other, 2.0), rtol=2e-6)


def test_work_of_torch_belongs_to_the_graph() -> None:
    torch = pytest.importorskip("torch")
    x, y = torch.ones(64, 64, device="cuda"), torch.empty(64, 64, device="cuda")
    torch.add(x, 1, out=y)
    with tw.capture("cuda") as graph:
        a = scaled(x, 3.0)
        with torch.cuda.stream(torch.cuda.ExternalStream(graph.stream.handle)):
            torch.add(a, 1.0, out=y)
        b = scaled(y, 2.0)
    assert graph.nodes == 3
    graph.input("late", x)
    with pytest.raises(tw.UserError, match="work of other libraries"):
        graph.update(late=torch.zeros(64, 64, device="cuda"))
    x.fill_(5.0)
    graph.replay()
    torch.cuda.synchronize()
    assert float(b[0, 0]) == 32.0
    # What the capture made belongs to the graph, also when nobody else holds it.
    del a
    noise = [torch.full((64, 64), -1.0, device="cuda") for _ in range(50)]
    x.fill_(1.0)
    graph.replay()
    torch.cuda.synchronize()
    assert float(b[0, 0]) == 8.0
    assert all(float(t[0, 0]) == -1.0 for t in noise)


def test_memory_goes_back() -> None:
    device = cuda.devices()[0]
    x = on_gpu(random(512, 512))
    scaled(x, 1.0)
    device.synchronize()
    gc.collect()
    before = device.pool.usage()[0]
    with tw.capture("cuda") as graph:
        y = x
        for _ in range(10):
            y = scaled(y, 1.01)
    # In a chain, two arrays take turns.
    assert graph.memory <= 3 * 512 * 512 * 4
    for _ in range(100):
        graph.replay()
    kept = np.asarray(y)
    graph.close()
    np.testing.assert_array_equal(np.asarray(y), kept)
    del y, graph
    gc.collect()
    device.synchronize()
    assert device.pool.usage()[0] == before


def test_a_graph_on_another_stream_and_in_a_future() -> None:
    x = on_gpu(random(256, 256))
    graph = tw.graph(lambda x: scaled(scaled(x, 2.0), 2.0), x)
    stream = tw.Stream("cuda")
    found = graph.replay(stream=stream, asynchronous=True).result()
    np.testing.assert_array_equal(np.asarray(found), np.asarray(x) * 4)
    with stream:
        graph.replay()
        y = scaled(graph.result, 2.0)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(x) * 8)


def test_a_graph_inside_a_graph() -> None:
    x = on_gpu(random(64, 64))
    inner = tw.graph(lambda x: scaled(x, 2.0), x)
    with tw.capture("cuda") as outer:
        inner.replay()
        y = scaled(inner.result, 5.0)
    del inner
    gc.collect()
    outer.replay()
    np.testing.assert_array_equal(np.asarray(y), np.asarray(x) * 10)


def test_two_streams_in_one_graph() -> None:
    x = on_gpu(random(64, 64))
    other = tw.Stream("cuda")
    with tw.capture("cuda") as graph:
        a = scaled(x, 2.0)
        other.wait(graph.stream)
        with other:
            b = scaled(a, 3.0)
        c = scaled(a, 5.0)
        graph.stream.wait(other)
        d = scaled(b, 7.0)
    for _ in range(3):
        graph.replay()
    np.testing.assert_array_equal(np.asarray(d), np.asarray(x) * 2 * 3 * 7)
    np.testing.assert_array_equal(np.asarray(c), np.asarray(x) * 10)


def test_what_cannot_be_captured_is_refused_and_the_capture_goes_on() -> None:
    x = on_gpu(random(64, 64))
    with tw.capture("cuda") as graph:
        y = scaled(x, 2.0)
        for attempt in (
            lambda: np.asarray(y),
            lambda: cuda.devices()[0].synchronize(),
            lambda: on_gpu(random(4, 4)),
            lambda: scaled(x, 2.0, asynchronous=True),
            lambda: graph.replay(),
            lambda: graph.stream.synchronize(),
        ):
            with pytest.raises(tw.TilewrightError) as raised:
                attempt()
            assert raised.value.code == "TW036"
            assert "test_graphs_gpu.py" in str(raised.value)
        z = scaled(y, 2.0)
    graph.replay()
    np.testing.assert_array_equal(np.asarray(z), np.asarray(x) * 4)


def test_an_error_inside_a_capture_leaves_the_device_usable() -> None:
    x = on_gpu(random(64, 64))
    with pytest.raises(ZeroDivisionError), tw.capture("cuda"):
        scaled(scaled(x, 2.0), 2.0 / 0)
    np.testing.assert_array_equal(np.asarray(scaled(x, 3.0)), np.asarray(x) * 3)
    with tw.capture("cuda") as graph:
        y = scaled(x, 4.0)
    graph.replay()
    np.testing.assert_array_equal(np.asarray(y), np.asarray(x) * 4)
