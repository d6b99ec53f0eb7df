"""Futures and the queues of the host: order, waiting, cancelling, errors, callbacks, asyncio, fork and exit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest

from tilewright.base.errors import UserError
from tilewright.runtime.core.futures import Future, GpuFuture, Relayed, all_of, any_of
from tilewright.runtime.core.host_queue import HostQueue


class Flag:
    """An event that is reached when somebody says so."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: Exception | None = None

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.reached.is_set()

    def synchronize(self) -> None:
        self.reached.wait(60)
        if self.error is not None:
            raise self.error


def done_with(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


# -- one future -----------------------------------------------------------------------------------------------------


def test_a_result_is_waited_for() -> None:
    future: Future[int] = Future()
    threading.Timer(0.02, lambda: future.set_result(7)).start()
    assert not future.done()
    assert future.result() == 7
    assert future.done()
    assert future.exception() is None
    assert repr(future) == "<Future done>"


def test_a_timeout_gives_the_default_or_an_error() -> None:
    future: Future[int] = Future()
    assert future.result(timeout=0.01, default=-1) == -1
    assert future.result(timeout=0, default=None) is None  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match=r"not there after 0\.01 s"):
        future.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0)
    future.set_result(3)
    assert future.result(timeout=0) == 3


@pytest.mark.parametrize("timeout", [-1, "1", True, float("nan")])
def test_a_bad_timeout_is_refused(timeout: Any) -> None:
    with pytest.raises(UserError, match="timeout is"):
        done_with(1).result(timeout=timeout)


def test_an_error_is_raised_where_it_is_asked_for() -> None:
    future: Future[int] = Future()
    future.set_exception(ValueError("no"))
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            future.result()
    assert isinstance(future.exception(), ValueError)
    assert repr(future) == "<Future failed with ValueError>"
    future.set_result(1)
    assert isinstance(future.exception(), ValueError)


def test_cancelling() -> None:
    future: Future[int] = Future()
    assert future.cancel()
    assert future.cancelled()
    assert not future.begin()
    with pytest.raises(CancelledError):
        future.result()
    begun: Future[int] = Future()
    assert begun.begin()
    assert begun.running()
    assert not begun.cancel()


def test_callbacks_are_called_once_each() -> None:
    future: Future[int] = Future()
    heard: list[object] = []
    future.add_done_callback(heard.append)
    future.set_result(1)
    future.add_done_callback(heard.append)
    assert heard == [future, future]


def test_work_on_a_gpu_is_done_when_its_event_is_reached() -> None:
    flag, finished = Flag(), []
    future = GpuFuture("arrays", flag, 5, lambda: finished.append(1) or "on the host")
    assert future.pending == "arrays"
    assert future.running()
    assert not future.cancel()
    assert future.result(timeout=0.005, default="late") == "late"
    assert finished == []
    flag.reached.set()
    assert future.done()
    assert finished == []
    assert future.result() == "on the host"
    assert future.result() == "on the host"
    assert finished == [1]


def test_a_fault_of_the_gpu_is_the_futures_error() -> None:
    flag = Flag()
    future, heard = GpuFuture("arrays", flag, 0), []
    future.add_done_callback(lambda done: heard.append(done.exception()))
    flag.error = RuntimeError("fault")
    with pytest.raises(RuntimeError, match="fault"):
        future.result(timeout=60)
    end = time.monotonic() + 60
    while not heard and time.monotonic() < end:
        time.sleep(0.001)
    assert heard == [flag.error]


def test_an_error_while_the_result_is_taken_is_the_futures_error() -> None:
    flag = Flag()
    flag.reached.set()
    future = GpuFuture("arrays", flag, 0, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        future.result()


def test_the_watcher_tells_of_events() -> None:
    flags = [Flag() for _ in range(5)]
    futures = [GpuFuture(index, flag, 0) for index, flag in enumerate(flags)]
    heard: list[int] = []
    for future in futures:
        future.add_done_callback(lambda done: heard.append(done.result()))
    for index in (3, 0, 4, 1, 2):
        flags[index].reached.set()
        end = time.monotonic() + 60
        while index not in heard and time.monotonic() < end:
            time.sleep(0.001)
    assert heard == [3, 0, 4, 1, 2]


def test_a_call_held_back_becomes_work_of_the_gpu() -> None:
    flag, outer = Flag(), Relayed[str]()
    heard: list[str] = []
    outer.add_done_callback(lambda done: heard.append(done.result()))
    assert outer.on_device() is None
    assert outer.result(timeout=0.001, default="late") == "late"
    inner = GpuFuture("arrays", flag, 0)
    outer.relay(inner)
    assert outer.on_device() is inner
    assert not outer.done()
    flag.reached.set()
    assert outer.result(timeout=60) == "arrays"
    end = time.monotonic() + 60
    while not heard and time.monotonic() < end:
        time.sleep(0.001)
    assert heard == ["arrays"]


# -- several --------------------------------------------------------------------------------------------------------


def test_all_of() -> None:
    first: Future[int] = Future()
    both = all_of(first, done_with(2))
    assert not both.done()
    assert both.result(timeout=0.001, default=[]) == []
    first.set_result(1)
    assert both.done()
    assert both.result() == [1, 2]
    assert all_of([done_with(1)], done_with(2)).result() == [1, 2]
    assert all_of().result() == []


def test_all_of_raises_the_first_error_once_all_have_ended() -> None:
    parts: list[Future[int]] = [Future() for _ in range(3)]
    together = all_of(parts)
    parts[2].set_exception(ValueError("third"))
    assert not together.done()
    parts[1].set_exception(ValueError("second"))
    parts[0].set_result(1)
    with pytest.raises(ValueError, match="second"):
        together.result(timeout=60)


def test_any_of() -> None:
    parts: list[Future[str]] = [Future() for _ in range(3)]
    first = any_of(*parts)
    assert first.result(timeout=0.001, default=("none", -1)) == ("none", -1)
    parts[1].set_result("b")
    parts[0].set_result("a")
    assert first.result() == ("b", 1)
    failing: Future[str] = Future()
    failing.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        any_of(failing, Future()).result()


def test_several_are_cancelled_together() -> None:
    queued: Future[int] = Future()
    begun: Future[int] = Future()
    begun.begin()
    assert all_of(queued, begun).cancel()
    assert queued.cancelled()
    assert not any_of(Future(), begun).cancel()


def test_what_is_not_a_future_is_refused() -> None:
    with pytest.raises(UserError, match="all_of takes futures, not int"):
        all_of(done_with(1), 3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="any_of was given no future"):
        any_of()


# -- asyncio --------------------------------------------------------------------------------------------------------


def test_await() -> None:
    flag = Flag()

    async def main() -> list[object]:
        threading.Timer(0.02, flag.reached.set).start()
        later: Future[str] = Future()
        threading.Timer(0.01, lambda: later.set_result("host")).start()
        failing: Future[str] = Future()
        threading.Timer(0.01, lambda: failing.set_exception(ValueError("no"))).start()
        found: list[object] = [await later, await GpuFuture("gpu", flag, 0), await done_with("at once")]
        try:
            await failing
        except ValueError as error:
            found.append(str(error))
        found.append(await all_of(done_with(1), done_with(2)))
        found.append(await any_of(Future(), done_with(2)))
        return found

    assert asyncio.run(main()) == ["host", "gpu", "at once", "no", [1, 2], (2, 1)]


def test_a_cancelled_task_cancels_what_has_not_begun() -> None:
    async def main() -> Future[int]:
        future: Future[int] = Future()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)
        return future

    assert asyncio.run(main()).cancelled()


def test_the_loop_may_end_before_the_future() -> None:
    flag = Flag()
    future = GpuFuture("value", flag, 0)

    async def main() -> None:
        task = asyncio.ensure_future(_waits_for(future))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    flag.reached.set()
    assert future.result(timeout=60) == "value"


async def _waits_for(future: Future[Any]) -> Any:
    return await future


# -- queues ---------------------------------------------------------------------------------------------------------


def test_a_queue_runs_in_order() -> None:
    queue, seen = HostQueue("test"), []
    futures = [queue.submit(lambda k=k: seen.append(k) or k) for k in range(200)]
    assert all_of(futures).result(timeout=60) == list(range(200))
    assert seen == list(range(200))
    assert queue.idle()


def test_queues_run_at_once() -> None:
    meeting = threading.Barrier(3)
    futures = [HostQueue(f"test {k}").submit(lambda: meeting.wait(60)) for k in range(3)]
    assert sorted(all_of(futures).result(timeout=60)) == [0, 1, 2]


def test_a_call_waits_for_futures_without_holding_a_thread() -> None:
    first: Future[int] = Future()
    # More than there are threads: if each held one, the last could not run.
    held = [HostQueue(f"held {k}").submit(lambda: 1, [first]) for k in range(100)]
    assert HostQueue("free").submit(lambda: "ran").result(timeout=60) == "ran"
    assert not any(future.done() for future in held)
    first.set_result(1)
    assert all_of(held).result(timeout=60) == [1] * 100


def test_what_waits_for_a_failure_fails() -> None:
    queue, failing = HostQueue("test"), Future[int]()
    ran: list[int] = []
    after = queue.submit(lambda: ran.append(1), [failing])
    later = queue.submit(lambda: "next")
    failing.set_exception(ValueError("first"))
    with pytest.raises(ValueError, match="first"):
        after.result(timeout=60)
    assert later.result(timeout=60) == "next"
    cancelled: Future[int] = Future()
    dropped = queue.submit(lambda: ran.append(2), [cancelled])
    cancelled.cancel()
    with pytest.raises(CancelledError):
        dropped.result(timeout=60)
    assert ran == []


def test_what_has_not_begun_is_cancelled() -> None:
    queue, gate, ran = HostQueue("test"), threading.Event(), []
    running = queue.submit(lambda: gate.wait(60))
    waiting = queue.submit(lambda: ran.append("waiting"))
    last = queue.submit(lambda: "last")
    while not running.running():
        time.sleep(0.001)
    assert waiting.cancel()
    assert not running.cancel()
    gate.set()
    assert last.result(timeout=60) == "last"
    assert ran == []


def test_errors_do_not_stop_a_queue() -> None:
    queue = HostQueue("test")
    bad = queue.submit(lambda: 1 // 0)
    assert queue.submit(lambda: 2).result(timeout=60) == 2
    with pytest.raises(ZeroDivisionError):
        bad.result()
    queue.synchronize()


def test_many_threads_fill_one_queue() -> None:
    queue, seen = HostQueue("test"), []

    def fill(number: int) -> None:
        for k in range(200):
            queue.submit(lambda k=k: seen.append((number, k)))

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.synchronize()
    assert len(seen) == 1600
    for number in range(8):
        assert [k for n, k in seen if n == number] == list(range(200))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_queues_of_its_own() -> None:
    script = """
        import os, threading, time
        from tilewright.base.errors import DeviceError
        from tilewright.runtime.core.host_queue import HostQueue
        queue, gate = HostQueue("test"), threading.Event()
        running = queue.submit(lambda: gate.wait(60))
        waiting = queue.submit(lambda: 1)
        while not running.running():
            time.sleep(0.001)
        child = os.fork()
        if not child:
            lost = 0
            for future in (running, waiting):
                try:
                    future.result(timeout=60)
                except DeviceError as error:
                    lost += "forked" in str(error)
            fine = lost == 2 and queue.submit(lambda: "child").result(timeout=60) == "child"
            os._exit(0 if fine else 1)
        gate.set()
        assert waiting.result(timeout=60) == 1
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = _run(script)
    assert done.stdout == "0\n", done.stderr


def test_at_exit_what_runs_ends_and_the_rest_is_dropped() -> None:
    script = """
        import time
        from tilewright.runtime.core.host_queue import HostQueue
        queue = HostQueue("test")
        def slow():
            time.sleep(0.2)
            print("ended", flush=True)
        first = queue.submit(slow)
        second = queue.submit(lambda: print("never"))
        while not first.running():
            time.sleep(0.001)
    """
    done = _run(script)
    assert (done.stdout, done.stderr, done.returncode) == ("ended\n", "", 0)


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_forgets_what_other_threads_had_open() -> None:
    script = """
        import os, threading
        from tilewright.runtime.core import streams
        ready, leave = threading.Event(), threading.Event()
        def other():
            with streams.use(0, 7), streams.capturing("device", "cuda:0", 0), streams.held_back(0, 7, lambda: None):
                ready.set()
                leave.wait(60)
        thread = threading.Thread(target=other)
        thread.start()
        ready.wait(60)
        with streams.use(0, 9):
            assert (streams.STREAM_NAMED.value, streams.FAST_PATH_OFF.value) == (3, 2)
            child = os.fork()
            if not child:
                fine = (streams.STREAM_NAMED.value, streams.FAST_PATH_OFF.value, streams.current(0)) == (1, 0, 9)
                os._exit(0 if fine else 1)
        leave.set()
        thread.join()
        assert (streams.STREAM_NAMED.value, streams.FAST_PATH_OFF.value) == (0, 0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = _run(script)
    assert done.stdout == "0\n", done.stderr
