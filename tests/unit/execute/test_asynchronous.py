"""Asynchronous calls, streams and events of the public API: on the CPU, the emulator and null GPUs of every order of work."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from null_cuda import NullCuda
from null_cuda.install import installed
from tilewright.runtime.core import streams
from tilewright.runtime.core.host_queue import HostQueue
from tilewright.runtime.cuda import device as cuda

MODES = ["lazy", "reverse", "random", "background"]


def make() -> tw.Kernel[Any, Any]:
    """A kernel of the test's own: what it loads belongs to the test's driver."""

    @tw.kernel
    def scaled(x: tw.Array, factor: float) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i] * factor
        return out

    return scaled


X = np.arange(40, dtype=np.float32)


@pytest.fixture(params=MODES)
def gpu(request: pytest.FixtureRequest) -> Iterator[NullCuda]:
    with installed(mode=request.param, count=2) as driver:
        yield driver
    # The thread that made a held call releases its stream a moment after the result is there.
    end = time.monotonic() + 60
    while streams.FAST_PATH_OFF.value and time.monotonic() < end:
        time.sleep(0.001)
    assert streams.STREAM_NAMED.value == streams.FAST_PATH_OFF.value == 0


@pytest.fixture(params=["cpu", "emulator"])
def host(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- the host -------------------------------------------------------------------------------------------------------


def test_calls_give_futures(host: str) -> None:
    scaled = make()
    future = scaled(X, 2.0, device=host, asynchronous=True)
    assert isinstance(future, tw.Future)
    np.testing.assert_array_equal(future.result(timeout=600), X * 2)
    out = np.empty_like(X)
    assert scaled(X, 3.0, device=host, out=out, asynchronous=True).result(timeout=600) is out
    np.testing.assert_array_equal(out, X * 3)


def test_futures_are_arguments(host: str) -> None:
    scaled = make()
    a = scaled(X, 2.0, device=host, asynchronous=True)
    with tw.Stream(host):
        b = scaled(a, 3.0, device=host, asynchronous=True)
    np.testing.assert_array_equal(scaled(x=b, factor=5.0, device=host), X * 30)


def test_a_kernel_can_be_asynchronous_by_itself() -> None:
    @tw.kernel(asynchronous=True)
    def scaled(x: tw.Array, factor: float) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i] * factor
        return out

    for _ in range(3):
        future = scaled(X, 2.0)
        assert isinstance(future, tw.Future)
        np.testing.assert_array_equal(future.result(timeout=600), X * 2)
        np.testing.assert_array_equal(scaled(X, 2.0, asynchronous=False), X * 2)


def test_a_parameter_may_be_called_stream() -> None:
    @tw.kernel
    def scaled(x: tw.Array, stream: float) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i] * stream
        return out

    np.testing.assert_array_equal(scaled(X, stream=2.0), X * 2)
    np.testing.assert_array_equal(scaled(X, stream=2.0, asynchronous=True).result(timeout=600), X * 2)


def test_plain_calls_stay_on_their_fast_way() -> None:
    scaled = make()
    scaled(X, 2.0)
    direct = scaled.__call__
    assert direct is not scaled._general
    np.testing.assert_array_equal(scaled(X, 2.0, asynchronous=True).result(timeout=600), X * 2)
    assert scaled.__call__ == direct


def test_errors_are_raised_where_they_are_awaited() -> None:
    scaled = make()
    future = scaled("text", 2.0, asynchronous=True)
    with pytest.raises(tw.UserError, match="'x'"):
        future.result(timeout=600)
    dependent = scaled(future, 2.0, asynchronous=True)
    with pytest.raises(tw.UserError, match="'x'"):
        dependent.result(timeout=600)
    with pytest.raises(tw.UserError, match="asynchronous= is a int"):
        scaled(X, 2.0, asynchronous=1)
    with pytest.raises(tw.UserError, match="device= is a int"):
        scaled(X, 2.0, device=3, asynchronous=True)


def test_calls_of_a_stream_run_in_order_and_can_be_cancelled() -> None:
    scaled = make()
    scaled(X, 1.0)
    gate: tw.Future[Any] = tw.Future()
    y = X.copy()
    with tw.Stream("cpu") as stream:
        stream.wait(gate)
        first = scaled(y, 2.0, out=y, asynchronous=True)
        dropped = scaled(y, 100.0, out=y, asynchronous=True)
        last = scaled(y, 3.0, out=y, asynchronous=True)
        assert not stream.done()
    assert dropped.cancel()
    assert not first.done()
    gate.set_result(None)
    np.testing.assert_array_equal(last.result(timeout=600), X * 6)
    with pytest.raises(CancelledError):
        dropped.result()
    stream.synchronize()
    assert stream.done()


def test_streams_wait_for_each_other() -> None:
    gate: tw.Future[Any] = tw.Future()
    first, second = tw.Stream("cpu"), tw.Stream("cpu")
    first.wait(gate)
    with first:
        a = make()(X, 2.0, asynchronous=True)
    second.wait(first)
    with second:
        b = make()(X, 3.0, asynchronous=True)
    event = second.record()
    time.sleep(0.02)
    assert not (a.done() or b.done() or event.done())
    gate.set_result(None)
    event.synchronize()
    assert a.done()
    assert b.done()


def test_asyncio(host: str) -> None:
    scaled = make()

    async def main() -> tuple[Any, Any, Any]:
        a, b = (scaled(X, k, device=host, asynchronous=True) for k in (2.0, 3.0))
        return await a, await tw.all_of(a, b), await tw.any_of(a, b)

    one, both, (first, index) = asyncio.run(main())
    np.testing.assert_array_equal(one, X * 2)
    np.testing.assert_array_equal(both[1], X * 3)
    np.testing.assert_array_equal(first, X * (2 + index))


def test_events_and_timers_of_the_host() -> None:
    start = tw.Event("cpu").record()
    with tw.timed("cpu") as timer:
        time.sleep(0.01)
        with pytest.raises(tw.UserError, match="after the 'with' block"):
            _ = timer.milliseconds
    stop = tw.Event("cpu").record()
    assert 10 <= timer.milliseconds <= start.elapsed(stop) < 10_000
    assert timer.seconds == timer.milliseconds / 1e3
    with pytest.raises(tw.UserError, match="the first event was not recorded"):
        tw.Event("cpu").elapsed(stop)
    with pytest.raises(tw.UserError, match="timing=False"):
        tw.Event("cpu", timing=False).record().elapsed(stop)
    with pytest.raises(tw.UserError, match="'cpu' and 'emulator:thread'"):
        start.elapsed(tw.Event("emulator").record())
    assert tw.Event("cpu").done()


def test_many_threads_on_the_host() -> None:
    scaled = make()
    scaled(X, 1.0)
    wrong: list[object] = []

    def work(number: int) -> None:
        with tw.Stream("cpu"):
            for k in range(50):
                a = scaled(X, 2.0, asynchronous=True)
                if not np.array_equal(scaled(a, float(number), asynchronous=True).result(timeout=600), X * 2 * number):
                    wrong.append((number, k))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_is_not_a_stream_is_refused() -> None:
    with pytest.raises(tw.UserError, match="a str is not a stream"):
        tw.stream("main")
    with pytest.raises(tw.UserError, match="no priorities"):
        tw.Stream("cpu", priority=-1)
    with pytest.raises(tw.UserError, match="priority is 'high'"):
        tw.Stream("cpu", priority="high")  # type: ignore[arg-type]
    with pytest.raises(tw.UserError, match="waits for events, streams and futures, not for int"):
        tw.Stream("cpu").wait(3)  # type: ignore[arg-type]
    with pytest.raises(tw.UserError, match="name the GPU"):
        tw.stream(0x1234, device="cpu")


def test_the_current_stream_of_the_host() -> None:
    default = tw.current_stream("cpu")
    assert tw.current_stream("cpu") == default
    with tw.Stream("cpu") as stream:
        assert tw.current_stream("cpu") == stream != default
        assert tw.current_stream("emulator") != stream
        inside: list[tw.Stream] = []
        thread = threading.Thread(target=lambda: inside.append(tw.current_stream("cpu")))
        thread.start()
        thread.join()
        assert inside == [default]
    assert tw.current_stream("cpu") == default
    assert not hasattr(stream, "__cuda_stream__")


# -- null GPUs ------------------------------------------------------------------------------------------------------


def test_gpu_calls_do_not_wait(gpu: NullCuda) -> None:
    scaled = make()
    x = tw.to_device(X, "cuda")
    future = scaled(x, 2.0, asynchronous=True)
    assert isinstance(future, tw.Future)
    if gpu.queue.mode == "lazy":
        assert gpu.programs.launched == []
    found = future.result()
    np.testing.assert_array_equal(np.asarray(found), X * 2)
    assert not future.cancel()


def test_gpu_futures_are_ordered_by_events(gpu: NullCuda) -> None:
    scaled = make()
    x = tw.to_device(X, "cuda")
    a = scaled(x, 2.0, asynchronous=True)
    for k in range(4):
        with tw.Stream("cuda"):
            b = scaled(a, float(k), asynchronous=True)
            c = scaled(b, 3.0)
        with tw.Stream("cuda") as last:
            d = scaled(b, 5.0, asynchronous=True)
        np.testing.assert_array_equal(np.asarray(c), X * 6 * k)
        last.synchronize()
        assert d.done()
        np.testing.assert_array_equal(np.asarray(d.result()), X * 10 * k)


def test_host_arrays_go_to_the_gpu_and_back(gpu: NullCuda) -> None:
    scaled = make()
    futures = [scaled(X, float(k), device="cuda:1", asynchronous=True) for k in range(3)]
    for k, found in enumerate(tw.all_of(futures).result()):
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, X * k)
    out = np.empty_like(X)
    assert scaled(X, 3.0, device="cuda", out=out, asynchronous=True).result() is out
    np.testing.assert_array_equal(out, X * 3)


def test_transfers_are_queued(gpu: NullCuda) -> None:
    scaled = make()
    with tw.Stream("cuda"):
        x = tw.transfer(X, "cuda")
        assert isinstance(x, tw.Future)
        y = scaled(x, 2.0, asynchronous=True)
    with tw.Stream("cuda"):
        back = tw.transfer(y, "cpu")
        also = tw.transfer(y.result(), "cpu", out=np.empty_like(X))
    np.testing.assert_array_equal(back.result(), X * 2)
    np.testing.assert_array_equal(also.result(), X * 2)
    device = cuda.devices()[0]
    pinned = device.empty_pinned((40,), tw.f32)
    pinned[...] = X
    target = device.empty_pinned((40,), tw.f32)
    z = scaled(tw.transfer(pinned, "cuda"), 3.0)
    assert tw.transfer(z, "cpu", out=target).result() is target
    np.testing.assert_array_equal(target, X * 3)
    gate: tw.Future[Any] = tw.Future()
    held = tw.transfer(gate, "cuda")
    behind = tw.transfer(X * 5, "cuda")
    threading.Timer(0.02, lambda: gate.set_result(X * 4)).start()
    np.testing.assert_array_equal(np.asarray(held.result(timeout=60)), X * 4)
    np.testing.assert_array_equal(np.asarray(behind.result(timeout=60)), X * 5)
    with pytest.raises(tw.UserError, match="is on a GPU already"):
        tw.transfer(z, "cuda")
    with pytest.raises(tw.UserError, match="a list cannot be copied"):
        tw.transfer([1.0], "cuda")
    with pytest.raises(tw.UserError, match="out= is"):
        tw.transfer(X, "cuda", out=np.empty_like(X))
    with pytest.raises(tw.UserError, match="out= is a list"):
        tw.transfer(z, "cpu", out=[])


def test_transfers_on_the_host() -> None:
    gate: tw.Future[Any] = tw.Future()
    copied, waiting = tw.transfer(X, "cpu"), tw.transfer(gate, "cpu")
    found = copied.result(timeout=60)
    assert found is not X
    np.testing.assert_array_equal(found, X)
    gate.set_result(X * 2)
    np.testing.assert_array_equal(waiting.result(timeout=60), X * 2)
    with pytest.raises(tw.UserError, match="out= does not fit"):
        tw.transfer(X, "cpu", out=np.empty(3)).result(timeout=60)


def test_await_on_the_gpu(gpu: NullCuda) -> None:
    scaled = make()
    x = tw.to_device(X, "cuda")

    async def main() -> tuple[Any, Any, Any]:
        a, b = scaled(x, 2.0, asynchronous=True), scaled(x, 3.0, asynchronous=True)
        return await b, await tw.all_of(a, b), await tw.any_of(a, b)

    one, both, (first, index) = asyncio.run(main())
    np.testing.assert_array_equal(np.asarray(one), X * 3)
    np.testing.assert_array_equal(np.asarray(both[0]), X * 2)
    np.testing.assert_array_equal(np.asarray(first), X * (2 + index))


def test_a_future_of_the_cpu_holds_a_gpu_call_back(gpu: NullCuda) -> None:
    scaled = make()
    x = tw.to_device(X, "cuda")
    gate: tw.Future[Any] = tw.Future()
    with tw.Stream("cuda") as stream:
        held = scaled(gate, 2.0, device="cuda", asynchronous=True)
        behind = scaled(x, 3.0, asynchronous=True)
        dropped = scaled(x, 4.0, asynchronous=True)
        assert streams.FAST_PATH_OFF.value
        assert not stream.done()
        assert not held.done()
        assert dropped.cancel()
        before = len(gpu.programs.launched)
        threading.Timer(0.05, lambda: gate.set_result(X)).start()
        # A plain call on the stream comes after those held back.
        plain = scaled(x, 5.0)
    np.testing.assert_array_equal(np.asarray(plain), X * 5)
    np.testing.assert_array_equal(held.result(timeout=60), X * 2)
    np.testing.assert_array_equal(np.asarray(behind.result(timeout=60)), X * 3)
    with pytest.raises(CancelledError):
        dropped.result()
    assert len(gpu.programs.launched) == before + 3
    assert stream.done()


def test_a_held_call_fails_with_what_it_waits_for(gpu: NullCuda) -> None:
    scaled = make()
    gate: tw.Future[Any] = tw.Future()
    held = scaled(gate, 2.0, device="cuda", asynchronous=True)
    gate.set_exception(ValueError("no array"))
    with pytest.raises(ValueError, match="no array"):
        held.result(timeout=60)
    end = time.monotonic() + 60
    while streams.FAST_PATH_OFF.value and time.monotonic() < end:
        time.sleep(0.001)
    np.testing.assert_array_equal(scaled(X, 2.0, device="cuda"), X * 2)


def test_a_stream_waits_for_the_host(gpu: NullCuda) -> None:
    scaled = make()
    x = tw.to_device(X, "cuda")
    gate: tw.Future[Any] = tw.Future()
    stream = tw.Stream("cuda")
    stream.wait(gate)
    with stream:
        future = scaled(x, 2.0, asynchronous=True)
    time.sleep(0.01)
    assert not future.done()
    gate.set_result(None)
    np.testing.assert_array_equal(np.asarray(future.result(timeout=60)), X * 2)


def test_stream_and_event_objects(gpu: NullCuda) -> None:
    scaled = make()
    x = tw.to_device(X, "cuda")
    first, second = tw.Stream("cuda"), tw.Stream("cuda", priority=-1)
    assert (first.device, second.priority) == ("cuda:0", -1)
    assert first.handle != second.handle != 0
    assert tw.current_stream("cuda").handle == 0
    with first:
        assert tw.current_stream("cuda") == first
        assert tw.current_stream("cuda:1").handle == 0
        start = tw.Event("cuda").record()
        y = scaled(x, 2.0)
        stop = first.record()
    second.wait(stop)
    z = scaled(y, 3.0, stream=second)
    assert start.elapsed(stop) >= 0
    np.testing.assert_array_equal(np.asarray(z), X * 6)
    assert first.__cuda_stream__() == (0, first.handle)
    with tw.timed("cuda") as timer:
        scaled(x, 2.0)
    assert timer.milliseconds >= 0
    with pytest.raises(tw.UserError, match="cannot be recorded on a stream of 'cuda:0'"):
        tw.Event("cuda:1").record(first)
    with pytest.raises(tw.UserError, match=r"priority is -77, but 'cuda:0' has -5 \(first\) to 0 \(last\)"):
        tw.Stream("cuda", priority=-77)


def test_streams_of_other_libraries(gpu: NullCuda) -> None:
    handle = cuda.devices()[1].create_stream()
    torch_like = SimpleNamespace(cuda_stream=handle, device_index=1)
    cupy_like = SimpleNamespace(ptr=handle, device_id=1)
    protocol = SimpleNamespace(__cuda_stream__=lambda: (0, handle))
    for foreign in (torch_like, cupy_like):
        found = tw.Stream.of(foreign)
        assert (found.device, found.handle) == ("cuda:1", handle)
    assert tw.stream(protocol, "cuda:1") == tw.stream(handle, "cuda:1") == tw.stream(torch_like)
    scaled = make()
    x = tw.to_device(X, "cuda:1")
    with tw.stream(cupy_like):
        y = scaled(x, 2.0)
        assert y.owner.stream == handle
    np.testing.assert_array_equal(np.asarray(y), X * 2)
    with pytest.raises(tw.DeviceError, match="stream 2 is not usable"):
        tw.stream(2, "cuda")


def test_streams_serve_again_and_nothing_is_left(gpu: NullCuda) -> None:
    scaled = make()
    x = tw.to_device(X, "cuda")
    handles = set()
    for _ in range(5):
        with tw.Stream("cuda") as stream:
            handles.add(stream.handle)
            future = scaled(x, 2.0, asynchronous=True)
            future.result()
        del stream, future
    assert len(handles) == 1
    del x, scaled
    gc.collect()
    device = cuda.devices()[0]
    device.release_idle()
    device.release_memory()
    device.synchronize()
    left = gpu.leaks()
    assert {kind: left.get(kind, 0) for kind in ("stream", "event", "pool memory")} == {"stream": 0, "event": 0, "pool memory": 0}


def test_events_between_devices(gpu: NullCuda) -> None:
    scaled = make()
    x, y = tw.to_device(X, "cuda:0"), tw.to_device(X, "cuda:1")
    with tw.Stream("cuda:0") as first:
        scaled(x, 2.0)
    with tw.Stream("cuda:1") as second:
        second.wait(first)
        z = scaled(y, 2.0)
    np.testing.assert_array_equal(np.asarray(z), X * 2)


def test_many_threads_on_the_gpu() -> None:
    with installed(mode="background"):
        scaled = make()
        x = tw.to_device(X, "cuda")
        scaled(x, 1.0)
        wrong: list[object] = []

        def work(number: int) -> None:
            try:
                with tw.Stream("cuda"):
                    for k in range(10):
                        a = scaled(x, 2.0, asynchronous=True)
                        found = scaled(a, float(number), asynchronous=True).result(timeout=600)
                        if not np.array_equal(np.asarray(found), X * 2 * number):
                            wrong.append((number, k))
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


@pytest.mark.parametrize("api", ["cuEventCreate", "cuEventRecord", "cuLaunchKernel"])
def test_failed_driver_calls_leave_nothing_behind(api: str) -> None:
    with installed(mode="lazy") as driver:
        scaled = make()
        x = tw.to_device(X, "cuda")
        with tw.Stream("cuda"):
            scaled(x, 1.0)
            driver.fail[api] = 999
            with pytest.raises(tw.DeviceError, match=api):
                scaled(x, 2.0, asynchronous=True)
            del driver.fail[api]
            assert tw.current_stream("cuda").handle
            np.testing.assert_array_equal(np.asarray(scaled(x, 2.0, asynchronous=True).result()), X * 2)


def test_names_are_there() -> None:
    for name in (
        "Stream",
        "Event",
        "Future",
        "Graph",
        "all_of",
        "any_of",
        "capture",
        "current_stream",
        "graph",
        "stream",
        "timed",
    ):
        assert name in tw.__all__
        assert getattr(tw, name) is not None
    assert HostQueue("x").idle()
