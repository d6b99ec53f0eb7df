"""Indices outside their arrays on GPUs: nothing is written there, the next wait says so, and the device goes on."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from null_cuda.install import installed
from tilewright.runtime.cuda import device as cuda

NUMBERS = np.arange(100, dtype=np.float32)
SAID = "place writes 'out' at index {}, but its extent there is 100 (at "


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    cuda._forget()
    yield
    cuda._forget()


def kernel(**options: object) -> Callable[..., tw.DeviceArray]:
    """A kernel of the test's own: it keeps what it loaded for a device."""

    def place(at: tw.Array, v: tw.Array, y: tw.Array):
        out = tw.zeros((len(y),), v.dtype)
        for i in range(len(at)):
            out[at[i]] = v[i]
        return out

    return tw.kernel(place, **options)  # type: ignore[call-overload,no-any-return]


def arguments(device: str, *wrong: int) -> tuple[tw.DeviceArray, ...]:
    at = np.arange(10)
    at[: len(wrong)] = wrong
    return tuple(tw.to_device(a, device) for a in (at, NUMBERS[:10] + 1, NUMBERS))


def said(error: pytest.ExceptionInfo[tw.UserError], index: int) -> None:
    assert error.value.code == "TW050"
    assert SAID.format(index) in str(error.value)


@pytest.mark.parametrize("stage", ["tile", "thread"])
@pytest.mark.parametrize("mode", ["lazy", "random", "eager"])
def test_the_next_wait_raises_and_later_calls_work(mode: str, stage: str) -> None:
    place = kernel()
    on_cpu = kernel()
    with pytest.raises(tw.UserError) as wanted:
        on_cpu(np.arange(-3, 7), NUMBERS[:10], NUMBERS, device="cpu")
    with installed(mode=mode, stage=stage) as driver:
        right, wrong = arguments("cuda"), arguments("cuda", -3)
        for _ in range(4):  # the general path, then launches from machine code
            result = place(*wrong)
            with pytest.raises(tw.UserError) as caught:
                result.numpy()
            said(caught, -3)
            # What is inside was written, and nothing else.
            np.testing.assert_array_equal(result.numpy(), [0, *range(2, 11), *[0] * 90])
            np.testing.assert_array_equal(place(*right).numpy()[:10], NUMBERS[:10] + 1)
    assert str(caught.value) == str(wanted.value)  # word for word as on a CPU
    assert driver.violations == []


def test_every_kind_of_wait() -> None:
    place = kernel()
    with installed(mode="lazy") as driver:
        device = cuda.devices()[0]
        wrong, right = arguments("cuda", 100), arguments("cuda")
        place(*right)
        stream = tw.Stream("cuda")

        def on_stream(wait: Callable[[tw.Event], object]) -> Callable[[], object]:
            def run() -> object:
                with stream:
                    place(*wrong)
                return wait(stream.record())

            return run

        def polled(event: tw.Event) -> None:
            assert not event.done()
            with driver.queue.lock:
                driver.queue.finish_all()
            event.done()

        waits: list[Callable[[], object]] = [
            lambda: (place(*wrong), device.synchronize()), lambda: (place(*wrong), device.synchronize(0)),
            on_stream(lambda event: event.synchronize()), on_stream(lambda event: stream.synchronize()), on_stream(polled),
            lambda: place(*wrong).numpy(), lambda: np.asarray(place(*wrong)),
        ]  # fmt: skip
        for wait in waits:
            with pytest.raises(tw.UserError) as caught:
                wait()
            said(caught, 100)
            device.synchronize()  # it was said once
    assert driver.violations == []


def test_two_streams_and_two_devices_keep_their_errors_apart() -> None:
    place, other = kernel(), kernel()
    with installed(mode="lazy", count=2) as driver:
        devices = cuda.devices()
        for number, one in enumerate((place, other)):
            one(*arguments(f"cuda:{number}")).numpy()
        place(*arguments("cuda:0", 200))
        other(*arguments("cuda:1"))
        devices[1].synchronize()
        with pytest.raises(tw.UserError) as caught:
            devices[0].synchronize()
        said(caught, 200)
        # Of two programs of a device one is named, and both are forgotten.
        wrong = arguments("cuda:0", -1)
        first, second = tw.Stream("cuda:0"), tw.Stream("cuda:0")
        with first:
            place(*wrong)
        with second:
            kernel()(*wrong)
        with pytest.raises(tw.UserError) as caught:
            devices[0].synchronize()
        said(caught, -1)
        devices[0].synchronize()
    assert driver.violations == []


def test_graphs_check_every_replay() -> None:
    place = kernel()
    with installed(mode="lazy") as driver:
        right, wrong = arguments("cuda"), arguments("cuda", 101)
        at = tw.to_device(np.arange(10), "cuda")
        place(*right)
        with tw.capture(device="cuda") as graph:
            out = place(at, *right[1:])
        graph.replay()
        np.testing.assert_array_equal(out.numpy()[:10], NUMBERS[:10] + 1)
        at.copy_from(wrong[0].numpy())
        for _ in range(2):
            graph.replay()
            with pytest.raises(tw.UserError) as caught:
                cuda.devices()[0].synchronize()
            said(caught, 101)
        at.copy_from(right[0].numpy())
        graph.replay()
        cuda.devices()[0].synchronize()
    assert driver.violations == []


def test_reads_with_check_are_0_and_said() -> None:
    @tw.kernel(check=True)
    def pick(x: tw.Array, at: tw.Array):
        out = tw.empty((len(at),), x.dtype)
        for i in tw.grid(len(at)):
            out[i] = x[at[i]] + 1
        return out

    at = np.arange(70)
    at[[3, 69]] = -1, 5000
    with installed(mode="lazy", stage="thread") as driver:
        result = pick(tw.to_device(NUMBERS, "cuda"), tw.to_device(at, "cuda"))
        with pytest.raises(tw.UserError, match=r"pick reads 'x' at index (-1|5000), but its extent there is 100"):
            result.numpy()
        at[[3, 69]] = -1, -1
        np.testing.assert_array_equal(result.numpy(), np.where(at < 0, 1, NUMBERS[at] + 1))
    assert driver.violations == []


def test_a_program_that_is_gone_is_heard_and_leaves_its_record_to_the_next() -> None:
    with installed(mode="lazy") as driver:
        device = cuda.devices()[0]
        kernel()(*arguments("cuda")).numpy()
        device.synchronize()
        reports = device.faults.indices
        place = kernel()
        place(*arguments("cuda", 300))
        del place
        with pytest.raises(tw.UserError) as caught:
            cuda.devices()[0].synchronize()
        said(caught, 300)
        addresses = set()
        for _ in range(300):
            addresses.add(reports.record(device, ()))
            reports.drop(max(addresses))
            reports.settle(reports.dropped())
        assert len(addresses) < 300
    assert driver.violations == []


def test_several_kernels_in_one_launch() -> None:
    @tw.kernel(launches=1)
    def both(at: tw.Array, v: tw.Array):
        (n,) = at.shape
        a = tw.zeros((n,), v.dtype)
        for i in range(n):
            a[at[i]] = v[i]
        b = tw.zeros((n,), v.dtype)
        for i in range(n):
            b[at[n - 1 - i]] = a[i]
        return a, b

    with installed(mode="lazy", stage="thread") as driver:
        at = np.arange(40)
        given = tw.to_device(at, "cuda"), tw.to_device(NUMBERS[:40], "cuda")
        a, b = both(*given)
        np.testing.assert_array_equal(b.numpy(), NUMBERS[:40][::-1])
        at[7] = 40
        a, b = both(tw.to_device(at, "cuda"), given[1])
        with pytest.raises(tw.UserError, match="both writes 'a' at index 40, but its extent there is 40"):
            b.numpy()
        assert a.numpy()[7] == 0
    assert driver.violations == []


def test_exported_code_says_so_too(tmp_path: Path) -> None:
    with installed(mode="lazy", stage="thread", exported=True) as driver:
        tw.export(kernel(), np.arange(10), NUMBERS[:10], NUMBERS, target="sm_90a", folder=tmp_path)
        header = (tmp_path / "place.h").read_text()
        assert re.search(r"\$failure is 4 int64_t that must be 0 before the launch.*\n.*\n   1: place writes 'out' outside its extent", header)
        loader = runpy.run_path(str(tmp_path / "place.py"))
        exported = loader["Program"]({**loader["DESCRIPTION"], "code": ("place.ptx",)})
        out = tw.to_device(np.zeros(100, np.float32), "cuda")
        exported(*arguments("cuda"), out=out)
        with pytest.raises(IndexError, match=r"place writes 'out' .*: index 100, extent 100"):
            exported(*arguments("cuda", 100), out=out)
        assert out.numpy()[9] == 10
    assert driver.violations == []


def test_an_array_without_memory_is_refused_and_not_launched() -> None:
    """Also by launches from machine code; an empty array need not have any."""

    @tw.kernel
    def twice(x: tw.Array):
        out = tw.empty_like(x)
        for i in tw.grid(len(x)):
            out[i] = x[i] * 2
        return out

    with installed(mode="lazy") as driver:
        x, empty = tw.to_device(NUMBERS, "cuda"), tw.to_device(NUMBERS[:0], "cuda")
        for _ in range(4):
            np.testing.assert_array_equal(twice(x).numpy(), NUMBERS * 2)
        launched = len(driver.programs.launched)
        address, x._pointer = x._pointer, 0
        for _ in range(2):
            with pytest.raises(tw.UserError, match=r"an array of shape \[100\] has no memory"):
                twice(x)
        assert len(driver.programs.launched) == launched
        x._pointer = address
        np.testing.assert_array_equal(twice(x).numpy(), NUMBERS * 2)
        for _ in range(4):
            assert twice(empty).shape == (0,)
    assert driver.violations == []


def test_a_program_first_loaded_in_a_capture() -> None:
    place = kernel()
    with installed(mode="lazy") as driver:
        right = arguments("cuda")
        at = tw.to_device(np.arange(10) - 1, "cuda")
        with tw.capture(device="cuda") as graph:
            out = place(at, *right[1:])
        graph.replay()
        with pytest.raises(tw.UserError) as caught:
            out.numpy()
        said(caught, -1)
        at.copy_from(np.arange(10))
        graph.replay()
        np.testing.assert_array_equal(out.numpy()[:10], NUMBERS[:10] + 1)
    assert driver.violations == []


def test_zynml_pipelines_say_so_in_every_replay() -> None:
    text = """
pipeline pick(x: tensor[n], at: tensor[n]) -> tensor[n]:
    let a = compute(x, at) {
        for i in 0..n: out[i] = 0.0
        for i in 0..n: out[at[i]] += x[i]
    }
    return a
"""
    with installed(mode="lazy") as driver:
        program = tw.load(text)
        x, at = tw.to_device(NUMBERS, "cuda"), np.arange(100)
        right, wrong = tw.to_device(at, "cuda"), tw.to_device(np.where(at == 41, 100, at), "cuda")
        for _ in range(4):  # statements, a trace, replays
            np.testing.assert_array_equal(program.pick(x, right).numpy(), NUMBERS)
            result = program.pick(x, wrong)
            with pytest.raises(tw.UserError, match="'out' at index 100, but its extent there is 100"):
                result.numpy()
            np.testing.assert_array_equal(result.numpy(), np.where(at == 41, 0, NUMBERS))
    assert driver.violations == []
