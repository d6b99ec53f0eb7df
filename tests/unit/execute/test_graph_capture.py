"""Captured graphs of the public API: on the CPU, the emulator and null GPUs of every order of work."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from null_cuda import NullCuda
from null_cuda.install import installed
from tilewright.runtime.core import streams
from tilewright.runtime.cuda import device as cuda

TESTS = Path(__file__).parents[2]


def make() -> tw.Kernel[Any, Any]:
    @tw.kernel
    def scaled(x: tw.Array, factor: float) -> tw.Array:
        n, m = x.shape
        out = tw.empty((n, m), x.dtype)
        for i, j in tw.grid(n, m):
            out[i, j] = x[i, j] * factor
        return out

    return scaled


def make_sum() -> tw.Kernel[Any, Any]:
    """Scratch memory between two kernels, and a result of rank 0."""

    @tw.kernel
    def total(x: tw.Array) -> tw.Array:
        n, m = x.shape
        rows = tw.empty((n,), tw.f32)
        for i in tw.grid(n):
            s = 0.0
            for j in range(m):
                s += x[i, j]
            rows[i] = s
        out = tw.empty((n, m), tw.f32)
        for i, j in tw.grid(n, m):
            s = 0.0
            for k in range(n):
                s += rows[k]
            out[i, j] = s
        return out

    return total


X = np.arange(24, dtype=np.float32).reshape(4, 6)
Y = X[::-1].copy() + 1


@pytest.fixture(params=["cpu", "emulator", "lazy", "reverse", "random", "background"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device to capture on."""
    if request.param in ("cpu", "emulator"):
        yield request.param
    else:
        with installed(mode=request.param):
            yield "cuda"
    assert streams.STREAM_NAMED.value == streams.FAST_PATH_OFF.value == 0
    assert not streams.recorders


@pytest.fixture(params=["lazy", "random"])
def gpu(request: pytest.FixtureRequest) -> Iterator[NullCuda]:
    with installed(mode=request.param) as driver:
        yield driver
    assert streams.STREAM_NAMED.value == streams.FAST_PATH_OFF.value == 0


def on(device: str, values: np.ndarray) -> Any:
    return tw.to_device(values, device) if device == "cuda" else values.copy()


def call(kernel: Any, device: str, *args: Any, **keywords: Any) -> Any:
    return kernel(*args, device=device, **keywords)


# -- on every device ------------------------------------------------------------------------------------------------


def test_a_replay_runs_what_was_recorded(device: str) -> None:
    scaled, x = make(), on(device, X)
    with tw.capture(device) as graph:
        y = call(scaled, device, x, 2.0)
        z = call(scaled, device, y, 3.0)
    assert graph.nodes == 2
    for _ in range(2):
        graph.replay()
        np.testing.assert_array_equal(np.asarray(z), X * 6)
    # A kernel called outside runs as ever.
    np.testing.assert_array_equal(np.asarray(call(scaled, device, x, 5.0)), X * 5)


def test_nothing_runs_while_recording() -> None:
    scaled = make()
    scaled(X, 1.0)
    out = np.full_like(X, -1)
    with tw.capture("cpu") as graph:
        assert scaled(X, 2.0, out=out) is out
    assert (out == -1).all()
    graph.replay()
    np.testing.assert_array_equal(out, X * 2)


def test_scratch_memory(device: str) -> None:
    total, x = make_sum(), on(device, X)
    with tw.capture(device) as graph:
        found = [call(total, device, x) for _ in range(3)]
    graph.replay()
    for array in found:
        np.testing.assert_allclose(np.asarray(array), X.sum(), rtol=1e-6)


def test_named_inputs_are_exchanged(device: str) -> None:
    scaled = make()
    with tw.capture(device, x=on(device, X), factor=2.0) as graph:
        y = call(scaled, device, graph["x"], graph["factor"])
        z = call(scaled, device, y, 3.0)
    if device == "emulator":
        with pytest.raises(tw.UserError, match="copies in it"):
            graph.update(x=on(device, Y))
        return
    assert graph.inputs == ("x", "factor")
    graph.replay()
    np.testing.assert_array_equal(np.asarray(z), X * 6)
    graph.replay(factor=4.0)
    np.testing.assert_array_equal(np.asarray(z), X * 12)
    graph.update(x=on(device, Y), factor=1.0)
    gc.collect()
    assert graph.replay() is None
    np.testing.assert_array_equal(np.asarray(y), Y)
    np.testing.assert_array_equal(np.asarray(z), Y * 3)
    assert graph.instantiations == 1


def test_views_of_an_input_move_with_it() -> None:
    scaled = make()
    big = np.arange(48, dtype=np.float32).reshape(8, 6)
    with tw.capture("cpu", x=big) as graph:
        low, high = scaled(big[:4], 2.0), scaled(big[4:], 3.0)
    for k in range(20):
        # Nobody else holds the array.
        graph.replay(x=big * k)
        np.testing.assert_array_equal(low, big[:4] * k * 2)
        np.testing.assert_array_equal(high, big[4:] * k * 3)


def test_a_function_is_recorded(device: str) -> None:
    scaled = make()

    def step(x: Any, factor: float = 2.0) -> Any:
        return call(scaled, device, call(scaled, device, x, factor), 2 * factor)

    graph = tw.graph(step, on(device, X), factor=3.0, device=device)
    np.testing.assert_array_equal(np.asarray(graph.replay()), X * 18)
    # It computes with the number, so it is recorded again.
    np.testing.assert_array_equal(np.asarray(graph.replay(factor=1.0)), X * 2)
    np.testing.assert_array_equal(np.asarray(graph.replay(x=on(device, Y))), Y * 2)
    larger = np.ones((40, 50), np.float32)
    np.testing.assert_array_equal(np.asarray(graph.replay(x=on(device, larger))), larger * 2)
    np.testing.assert_array_equal(np.asarray(graph(x=on(device, X), factor=2.0)), X * 8)


def test_a_result_that_is_an_input_moves_with_it(device: str) -> None:
    scaled = make()

    def in_place(x: Any, y: Any) -> Any:
        return {"both": (call(scaled, device, x, 2.0, out=x), y), "y": call(scaled, device, x, 1.0, out=y)}

    def slice_of(x: Any) -> Any:
        call(scaled, device, x, 2.0, out=x)
        return x[1:]

    first, second, y = on(device, X.copy()), on(device, X + 1), on(device, X.copy())
    graph = tw.graph(in_place, first, y, device=device)
    graph.replay()
    result = graph.replay(x=second)
    assert result["both"][0] is second and result["both"][1] is y and result["y"] is y
    np.testing.assert_array_equal(np.asarray(result["both"][0]), (X + 1) * 2)
    np.testing.assert_array_equal(np.asarray(y), (X + 1) * 2)
    np.testing.assert_array_equal(np.asarray(first), X * 2)
    graph = tw.graph(slice_of, first, device=device)
    graph.replay()
    np.testing.assert_array_equal(np.asarray(graph.replay(x=second)), (X[1:] + 1) * 4)
    np.testing.assert_array_equal(np.asarray(first), X * 4)


def test_a_kernel_is_a_function() -> None:
    graph = tw.graph(make(), X, 2.0, device="cpu")
    np.testing.assert_array_equal(graph.replay(), X * 2)
    np.testing.assert_array_equal(graph.replay(factor=5.0), X * 5)


def test_a_recording_that_fails_leaves_the_graph_as_it_was(device: str) -> None:
    scaled = make()

    def step(x: Any, factor: float) -> Any:
        y = call(scaled, device, x, factor)
        if factor < 0:
            raise ValueError("negative")
        return y

    graph = tw.graph(step, on(device, X), 2.0, device=device)
    result = graph.replay()
    with pytest.raises(ValueError, match="negative"):
        graph.update(factor=-1.0)
    assert graph.replay() is result
    np.testing.assert_array_equal(np.asarray(result), X * 2)
    np.testing.assert_array_equal(np.asarray(graph.replay(factor=3.0)), X * 3)


def test_asynchronous_replay(device: str) -> None:
    scaled = make()
    graph = tw.graph(lambda x: call(scaled, device, x, 2.0), on(device, X), device=device)
    np.testing.assert_array_equal(np.asarray(graph.replay(asynchronous=True).result(timeout=600)), X * 2)
    stream = tw.Stream(device)
    np.testing.assert_array_equal(np.asarray(graph.replay(stream=stream, asynchronous=True).result(timeout=600)), X * 2)
    np.testing.assert_array_equal(np.asarray(graph.replay(stream=stream)), X * 2)


def test_a_graph_inside_a_graph(device: str) -> None:
    scaled = make()
    inner = tw.graph(lambda x: call(scaled, device, x, 2.0), on(device, X), device=device)
    with tw.capture(device) as outer:
        inner.replay()
        y = call(scaled, device, inner.result, 3.0)
    del inner
    gc.collect()
    assert outer.nodes == 2
    outer.replay()
    np.testing.assert_array_equal(np.asarray(y), X * 6)


def test_mistakes(device: str) -> None:
    scaled, x = make(), on(device, X)
    with pytest.raises(tw.UserError, match="nothing was captured"), tw.capture(device):
        pass
    with tw.capture(device, x=x, factor=2.0) as graph:
        y = call(scaled, device, graph["x"], graph["factor"])
        with pytest.raises(tw.DeviceError, match="still being captured") as raised:
            graph.replay()
        assert "test_graph_capture.py" in str(raised.value)
        with pytest.raises(tw.DeviceError, match="inside a capture"), tw.capture(device):
            pass
        with pytest.raises(tw.DeviceError, match="an asynchronous call of scaled"):
            call(scaled, device, x, 2.0, asynchronous=True)
        with pytest.raises(tw.UserError, match="has an input 'x' already"):
            graph.input("x", x)
        with pytest.raises(tw.UserError, match="is a str, not an array or a number"):
            graph.input("name", "text")
        with pytest.raises(tw.UserError, match="the name of an input"):
            graph.input("1x", x)
        with pytest.raises(tw.UserError, match="no input 'z'"):
            graph["z"]
    graph.replay()
    np.testing.assert_array_equal(np.asarray(y), X * 2)
    with pytest.raises(tw.UserError, match="no input 'z'"):
        graph.update(z=x)
    with pytest.raises(tw.UserError, match="number of type float, not int"):
        graph.update(factor=3)
    with pytest.raises(tw.UserError, match="is an array, not float"):
        graph.update(x=3.0)
    if device != "emulator":
        with pytest.raises(tw.UserError, match=r"'x' was f32|'x' was float32"):
            graph.update(x=on(device, X[:2]))
        with pytest.raises(tw.UserError, match="share memory with something the graph writes"):
            graph.update(x=y)
    graph.close()
    with pytest.raises(tw.DeviceError, match="after it was closed"):
        graph.replay()
    np.testing.assert_array_equal(np.asarray(y), X * 2)
    with pytest.raises(tw.UserError, match="did nothing"):
        tw.graph(lambda: None, device=device)
    with pytest.raises(tw.UserError, match="do not fit"):
        tw.graph(lambda x: x, device=device)
    with pytest.raises(tw.UserError, match="cannot be recorded"):
        tw.graph(3)  # type: ignore[arg-type]


def test_inputs_may_swap_and_be_shared() -> None:
    scaled = make()
    a, b = X.copy(), Y.copy()
    with tw.capture("cpu", a=a, b=b) as graph:
        y, z = scaled(graph["a"], 2.0), scaled(graph["b"], 3.0)
    graph.replay(a=b, b=a)
    np.testing.assert_array_equal(y, Y * 2)
    np.testing.assert_array_equal(z, X * 3)
    graph.replay(a=a, b=a)
    np.testing.assert_array_equal(y, X * 2)
    np.testing.assert_array_equal(z, X * 3)


def test_calls_on_another_device_are_refused(device: str) -> None:
    scaled, x = make(), on(device, X)
    other = "emulator" if device == "cpu" else "cpu"
    with tw.capture(device) as graph:
        y = call(scaled, device, x, 2.0)
        with pytest.raises(tw.DeviceError, match="would not be recorded") as raised:
            scaled(X, 3.0, device=other)
        assert raised.value.code == "TW036"
    graph.replay()
    np.testing.assert_array_equal(np.asarray(y), X * 2)


def test_other_threads_are_not_recorded(device: str) -> None:
    scaled, x = make(), on(device, X)
    call(scaled, device, x, 1.0)
    found: list[np.ndarray] = []
    with tw.capture(device) as graph:
        y = call(scaled, device, x, 2.0)
        thread = threading.Thread(target=lambda: found.append(np.asarray(call(scaled, device, x, 7.0))))
        thread.start()
        thread.join()
    assert graph.nodes == 1
    np.testing.assert_array_equal(found[0], X * 7)
    graph.replay()
    np.testing.assert_array_equal(np.asarray(y), X * 2)


def test_many_threads_replay_one_graph(device: str) -> None:
    scaled, x = make(), on(device, X)
    graph = tw.graph(lambda x: call(scaled, device, call(scaled, device, x, 2.0), 3.0), x, device=device)
    wrong: list[object] = []

    def work() -> None:
        try:
            with tw.Stream(device):
                for _ in range(5):
                    graph.replay(asynchronous=True).result(timeout=600)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    np.testing.assert_array_equal(np.asarray(graph.result), X * 6)


# -- the CPU --------------------------------------------------------------------------------------------------------


def test_converted_arguments_are_refused() -> None:
    scaled = make()
    record = np.zeros((4, 6), dtype=[("a", "<f4"), ("b", "u1")])
    with pytest.raises(tw.UserError, match="must be converted first"), tw.capture("cpu"):
        scaled(record["a"], 2.0)


def test_results_that_alias_inputs() -> None:
    @tw.kernel
    def turned(x: tw.Array) -> tw.Array:
        n, m = x.shape
        out = tw.empty((m, n), x.dtype)
        for i, j in tw.grid(m, n):
            out[i, j] = x[j, i]
        return out

    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    with tw.capture("cpu", x=x) as graph:
        turned(x, out=x)
    graph.replay()
    np.testing.assert_array_equal(x, np.arange(16).reshape(4, 4).T)
    graph.replay()
    np.testing.assert_array_equal(x, np.arange(16).reshape(4, 4))
    with pytest.raises(tw.UserError, match="copies in it"):
        graph.update(x=x.copy())


# -- null GPUs ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_captured_is_refused_and_the_capture_goes_on(gpu: NullCuda) -> None:
    scaled, x = make(), tw.to_device(X, "cuda")
    with tw.capture("cuda") as graph:
        y = scaled(x, 2.0)
        attempts = [
            lambda: np.asarray(y), lambda: cuda.devices()[0].synchronize(), lambda: tw.to_device(X, "cuda"),
            lambda: scaled(X, 2.0, device="cuda"),
            lambda: graph.stream.synchronize(), lambda: graph.stream.done(), lambda: tw.Event("cuda").record().synchronize(),
        ]  # fmt: skip
        for attempt in attempts:
            with pytest.raises(tw.DeviceError) as raised:
                attempt()
            assert raised.value.code == "TW036"
        with pytest.raises(tw.DeviceError, match=r"timed\(\)"), tw.timed("cuda"):
            pass
        z = scaled(y, 2.0)
    graph.replay()
    np.testing.assert_array_equal(np.asarray(z), X * 4)


def test_memory_of_a_chain_takes_turns_and_goes_back(gpu: NullCuda) -> None:
    scaled, device = make(), cuda.devices()[0]
    x = tw.to_device(np.ones((64, 64), np.float32), "cuda")
    scaled(x, 1.0)
    gc.collect()
    before = device.pool.usage()[0]
    with tw.capture("cuda") as graph:
        y = x
        for _ in range(6):
            y = scaled(y, 2.0)
    size = 64 * 64 * 4
    assert 2 * size <= graph.memory <= 3 * size
    for _ in range(3):
        graph.replay()
        # Memory of others never comes from the graph's.
        noise = [scaled(x, -1.0) for _ in range(8)]
    np.testing.assert_array_equal(np.asarray(y), np.full((64, 64), 64.0))
    for array in noise:
        assert (np.asarray(array) == -1).all()
    device.pool.flush()
    graph.replay()
    np.testing.assert_array_equal(np.asarray(y), np.full((64, 64), 64.0))
    del noise, array
    graph.close()
    np.testing.assert_array_equal(np.asarray(y), np.full((64, 64), 64.0))
    del y, graph
    gc.collect()
    assert device.pool.usage()[0] == before


def test_inputs_stay_as_long_as_the_graph(gpu: NullCuda) -> None:
    scaled = make()
    x = tw.to_device(X, "cuda")
    graph = tw.graph(lambda x: scaled(x, 2.0), x)
    x.free()
    noise = [tw.to_device(X * -1, "cuda") for _ in range(8)]
    np.testing.assert_array_equal(np.asarray(graph.replay()), X * 2)
    del x, noise
    gc.collect()
    used = cuda.devices()[0].pool.usage()[0]
    graph.close()
    assert cuda.devices()[0].pool.usage()[0] < used


def test_arrays_that_were_exchanged_are_let_go(gpu: NullCuda) -> None:
    scaled, device = make(), cuda.devices()[0]
    with tw.capture("cuda", x=tw.to_device(X, "cuda")) as graph:
        y = scaled(graph["x"], 2.0)
        z = scaled(graph["x"][1:], 3.0)
    graph.replay()
    gc.collect()
    used = device.pool.usage()[0]
    for k in range(20):
        graph.replay(x=tw.to_device(X * k, "cuda"))
        np.testing.assert_array_equal(np.asarray(y), X * k * 2)
        np.testing.assert_array_equal(np.asarray(z), X[1:] * k * 3)
    gc.collect()
    assert device.pool.usage()[0] == used


def test_updates_set_only_the_nodes_concerned(gpu: NullCuda) -> None:
    scaled = make()
    with_inputs = {"x": tw.to_device(X, "cuda"), "factor": 2.0}
    with tw.capture("cuda", **with_inputs) as graph:
        y = scaled(graph["x"], graph["factor"])
        for _ in range(4):
            y = scaled(y, 1.0)
    before = len(gpu.calls("cuGraphExecKernelNodeSetParams"))
    graph.update(factor=3.0)
    assert len(gpu.calls("cuGraphExecKernelNodeSetParams")) == before + 1
    graph.update(x=with_inputs["x"])
    assert len(gpu.calls("cuGraphExecKernelNodeSetParams")) == before + 1
    graph.update(x=tw.to_device(Y, "cuda"))
    assert len(gpu.calls("cuGraphExecKernelNodeSetParams")) == before + 2
    assert len(gpu.calls("cuGraphInstantiate")) == 1
    graph.replay()
    np.testing.assert_array_equal(np.asarray(y), Y * 3)


def test_results_stay_where_they_are_when_recorded_again(gpu: NullCuda) -> None:
    scaled = make()
    graph = tw.graph(lambda x, f: scaled(scaled(x, f), 2 * f), tw.to_device(X, "cuda"), 2.0)
    first, memory = graph.result, graph.memory
    graph.update(f=3.0)
    assert graph.result.pointer == first.pointer
    assert graph.memory == memory
    graph.replay()
    np.testing.assert_array_equal(np.asarray(first), X * 18)
    # Exchanging in place reaches the nodes of the executable, not those of the later capture.
    graph.replay(x=tw.to_device(Y, "cuda"))
    np.testing.assert_array_equal(np.asarray(first), Y * 18)
    assert len(gpu.calls("cuGraphInstantiate")) == 1
    # Another topology: the driver has to build it anew.
    deep = tw.graph(lambda x, n: [scaled(x, float(k)) for k in range(n)], tw.to_device(X, "cuda"), 2)
    deep.update(n=4)
    assert deep.instantiations >= 1
    assert deep.nodes == 4
    deep.replay()
    np.testing.assert_array_equal(np.asarray(deep.result[3]), X * 3)


def test_memory_waits_for_streams_that_read_results(gpu: NullCuda) -> None:
    """A result read on another stream, then the graph is dropped: its memory may be used again only after that read."""
    scaled, x = make(), tw.to_device(X, "cuda")
    scaled(x, 1.0)
    for _ in range(5):
        graph = tw.graph(lambda x: (scaled(x, 2.0), scaled(x, 3.0)), x)
        first, second = graph.replay()
        other = tw.Stream("cuda")
        other.wait(tw.current_stream("cuda"))
        with other:
            found = [scaled(first, 10.0), scaled(second, 10.0)]
        graph.close()
        del graph, first, second
        gc.collect()
        noise = [scaled(x, -1.0) for _ in range(4)]
        # First what took the memory over: without an order it would run before the read.
        assert all((np.asarray(array) == -X).all() for array in noise)
        np.testing.assert_array_equal(np.asarray(found[0]), X * 20)
        np.testing.assert_array_equal(np.asarray(found[1]), X * 30)


def test_two_streams_in_one_capture(gpu: NullCuda) -> None:
    scaled, x = make(), tw.to_device(X, "cuda")
    other = tw.Stream("cuda")
    with tw.capture("cuda") as graph:
        a = scaled(x, 2.0)
        other.wait(graph.stream)
        with other:
            b = scaled(a, 3.0)
        c = scaled(a, 5.0)
        graph.stream.wait(other)
        d = scaled(b, 7.0)
    for _ in range(2):
        graph.replay()
    np.testing.assert_array_equal(np.asarray(d), X * 42)
    np.testing.assert_array_equal(np.asarray(c), X * 10)
    with other:
        np.testing.assert_array_equal(np.asarray(scaled(x, 2.0)), X * 2)


def test_a_stream_that_is_not_joined_again_spoils_the_capture(gpu: NullCuda) -> None:
    scaled, x = make(), tw.to_device(X, "cuda")
    other = tw.Stream("cuda")

    def step(x: Any) -> None:
        scaled(x, 2.0)
        other.wait(tw.current_stream("cuda"))
        scaled(x, 3.0, stream=other)

    with pytest.raises(tw.DeviceError, match="was spoilt") as raised:
        tw.graph(step, x)
    assert raised.value.code == "TW036"
    with tw.capture("cuda") as graph:
        y = scaled(x, 4.0)
    graph.replay()
    np.testing.assert_array_equal(np.asarray(y), X * 4)


def test_replays_come_after_what_was_queued(gpu: NullCuda) -> None:
    scaled, x = make(), tw.to_device(X, "cuda")
    with tw.Stream("cuda") as stream:
        y = scaled(x, 2.0)
        with tw.capture("cuda") as graph:
            z = scaled(y, 3.0)
    # On another stream than the one it took the place of.
    with tw.Stream("cuda"):
        graph.replay()
    np.testing.assert_array_equal(np.asarray(z), X * 6)
    stream.synchronize()


@pytest.mark.parametrize(
    "api",
    [
        "cuStreamBeginCapture",
        "cuStreamEndCapture",
        "cuGraphInstantiate",
        "cuGraphGetNodes",
        "cuStreamGetCaptureInfo",
        "cuLaunchKernel",
    ],
)
def test_failed_driver_calls_leave_nothing_behind(api: str) -> None:
    with installed(mode="lazy") as driver:
        scaled, x = make(), tw.to_device(X, "cuda")
        scaled(x, 2.0)
        gc.collect()
        used = cuda.devices()[0].pool.usage()[0]
        driver.fail[api] = 999
        with pytest.raises(tw.DeviceError, match=api):
            tw.graph(lambda x: scaled(x, 2.0), x)
        del driver.fail[api]
        gc.collect()
        assert not streams.recorders
        assert cuda.devices()[0].pool.usage()[0] == used
        left = driver.leaks()
        # A capture whose end failed keeps the graph inside the driver.
        assert left.get("executable graph", 0) == 0
        if api != "cuStreamEndCapture":
            assert left.get("graph", 0) == 0
            np.testing.assert_array_equal(np.asarray(tw.graph(lambda x: scaled(x, 2.0), x).replay()), X * 2)


def test_an_update_that_fails_says_so(gpu: NullCuda) -> None:
    scaled = make()
    x = tw.to_device(X, "cuda")
    with tw.capture("cuda", factor=2.0) as graph:
        y = scaled(x, graph["factor"])
    gpu.fail["cuGraphExecKernelNodeSetParams"] = 1
    with pytest.raises(tw.DeviceError, match="cuGraphExecKernelNodeSetParams"):
        graph.update(factor=3.0)
    del gpu.fail["cuGraphExecKernelNodeSetParams"]
    graph.replay(factor=4.0)
    np.testing.assert_array_equal(np.asarray(y), X * 4)


EXIT = """
    import sys
    sys.path.insert(0, {tests!r})
    import numpy as np
    import tilewright as tw
    from null_cuda.install import install
    install(mode="lazy")

    @tw.kernel
    def scaled(x: tw.Array, factor: float) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i] * factor
        return out

    x = tw.to_device(np.ones(8, np.float32), "cuda")
    graph = tw.graph(lambda x: scaled(x, 2.0), x)
    graph.replay()
    stream = tw.Stream("cuda")
    stream.__enter__()
    pending = scaled(x, 3.0, asynchronous=True)
    pending.add_done_callback(lambda done: None)
    event = stream.record()
    held = scaled(tw.Future(), 2.0, device="cuda", asynchronous=True)
    host = scaled(tw.Future(), 2.0, device="cpu", asynchronous=True)
    print("leaving", flush=True)
"""


def test_at_exit_everything_may_be_alive(tmp_path: Path) -> None:
    script = tmp_path / "leave.py"
    script.write_text(textwrap.dedent(EXIT.format(tests=str(TESTS))), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("leaving\n", "", 0)


class _Tensor:
    """As much of a tensor in host memory as calls look at."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.device = SimpleNamespace(type="cpu")
        self.requires_grad = self.is_cuda = False
        self.is_cpu, self.dtype = True, array.dtype.type

    def __dlpack__(self, **keywords: object) -> object:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def numpy(self) -> np.ndarray:
        return self.array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numel(self) -> int:
        return self.array.size

    def view(self, kind: object) -> _Tensor:
        return _Tensor(self.array.view(kind))


def test_tensors_of_pytorch_give_tensors_in_captures_as_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=_Tensor, from_numpy=_Tensor, float32=np.float32, int64=np.int64))
    _compare_tensors(_Tensor, lambda tensor: tensor.array)


def test_real_tensors_in_captures() -> None:
    torch = pytest.importorskip("torch")
    _compare_tensors(torch.from_numpy, lambda tensor: tensor.numpy())


def _compare_tensors(tensor: Any, read: Any) -> None:
    x, scaled = tensor(np.arange(4, dtype=np.float32).reshape(2, 2)), make()
    outside = scaled(x, 2.0)
    with tw.capture("cpu", x=x) as graph:
        inside = scaled(graph["x"], 2.0)
        again = scaled(inside, 3.0)
    assert type(inside) is type(outside) is type(x) and type(again) is type(x)
    graph.replay()
    np.testing.assert_array_equal(read(inside), read(outside))
    np.testing.assert_array_equal(read(again), 6 * read(x))
    graph.replay(x=tensor(np.ones((2, 2), np.float32)))
    np.testing.assert_array_equal(read(again), 6)
    whole = tw.graph(scaled, x, 2.0, device="cpu")
    whole.replay()
    assert type(whole.result) is type(x)
    np.testing.assert_array_equal(read(whole.result), read(outside))
