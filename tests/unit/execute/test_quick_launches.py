"""Launches of explicit kernels on the CPU that go from Python straight to machine code."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.codegen.host.interpreter import stubs_work
from tilewright.execute.simt import kernels

pytestmark = [pytest.mark.requires("cpu"), pytest.mark.skipif(not stubs_work(), reason="this interpreter takes no entry stubs")]


@tw.gpu(device="cpu")
def axpy(x: tw.Array, y: tw.Array, a: float) -> None:
    i = tw.block.x * 32 + tw.thread.x
    if i < y.shape[0]:
        y[i] += a * x[i]


@tw.cpu
def serial(x: tw.Array, y: tw.Array, n: int, a: float = 2.0) -> None:
    for i in range(n):
        y[i] += a * x[i]


@tw.gpu
def anywhere(x: tw.Array, y: tw.Array) -> None:
    y[tw.thread.x] = x[tw.thread.x] + 1


@contextmanager
def straight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launch inside takes the way through Python."""

    def fail(*values: object, **named: object) -> None:
        raise AssertionError("the launch went through Python")

    with monkeypatch.context() as patch:
        patch.setattr(kernels.GpuKernel, "launch", fail)
        yield


def numbers(n: int = 64, dtype: Any = np.float32) -> tuple[Any, Any]:
    return np.arange(n).astype(dtype), np.zeros(n, dtype)


def test_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = numbers(70)
    for _ in range(3):
        axpy[3, 32](x, y, 1.0)
        axpy[1, 32](x, y, 1.0)
    y[:] = 0
    with straight(monkeypatch):
        axpy[3, 32](x, y, 2.0)
        np.testing.assert_array_equal(y, 2 * x)
        axpy[1, 32](x, y, 1.0)
        np.testing.assert_array_equal(y[:32], 3 * x[:32])
        np.testing.assert_array_equal(y[32:], 2 * x[32:])


def test_threads_beyond_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = numbers(70)
    for _ in range(3):
        tw.gpu_launch(axpy, 50, 32, x, y, 1.0)
    y[:] = 0
    with straight(monkeypatch):
        tw.gpu_launch(axpy, 50, 32, x, y, 1.0)
    np.testing.assert_array_equal(y[:50], x[:50])
    assert not y[50:].any()


def test_serial_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = numbers()
    for _ in range(3):
        serial(x, y, 64, 1.0)
    y[:] = 0
    with straight(monkeypatch):
        serial(x, y, 60, 3.0)
    np.testing.assert_array_equal(y[:60], 3 * x[:60])
    assert not y[60:].any()
    serial(x, y, a=1.0, n=64)  # keywords and defaults, by the general path
    serial(x, y, 64)
    np.testing.assert_array_equal(y[:60], 6 * x[:60])


def test_other_arguments() -> None:
    x, y = numbers()
    for _ in range(4):
        serial(x, y, 64, 1.0)
    for dtype in (np.float64, np.float32):
        a, b = numbers(dtype=dtype)
        serial(a, b, 64, 1.0)
        np.testing.assert_array_equal(b, a)
    wide, target = numbers(128)[0][::2], numbers(128)[1]
    for _ in range(4):
        serial(wide, target[::2], 64, 1.0)
    np.testing.assert_array_equal(target[::2], 4 * wide)
    assert not target[1::2].any()
    serial(y, y, 64, 1.0)  # one array, read and written
    np.testing.assert_array_equal(y, 8 * x)
    serial(y[:32], y[32:], 32, 0)  # a whole number where a float is


def said(function: Any, *given: Any) -> str:
    with pytest.raises(tw.UserError) as error:
        function(*given)
    return str(error.value)


def test_errors_are_the_same() -> None:
    x, y = numbers()
    wrong = [(x[:3], y, 64, 1.0), (x, y, 65, 1.0), (x, y, 1.5, 1.0), (x, y, 64, "a"), (x, y, 1 << 70, 1.0), (x, 3.0, 64, 1.0), (x,), (x, y, 1, 1.0, 5)]
    readonly = np.zeros(64, np.float32)
    readonly.flags.writeable = False
    wrong.append((x, readonly, 64, 1.0))
    fresh = [said(tw.cpu(serial.kernel.python), *given) for given in wrong]
    for given, text in zip(wrong, fresh, strict=True):
        for _ in range(4):
            serial(x, y, 64, 1.0)
        assert said(serial, *given) == text
    for _ in range(4):
        axpy[2, 32](x, y, 1.0)
    text = said(axpy[2, 32], x[:40], y, 1.0)
    assert "load of 'x' at [40] is out of bounds: index 40, extent 40, in block" in text


def test_debugging_and_profiles() -> None:
    x, y = numbers()
    for _ in range(4):
        serial(x, y, 64, 1.0)
    with tw.debug(serial.kernel, record=True) as seen:
        serial(x, y, 2, 1.0)
    assert seen.stops


def test_another_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = numbers(32)
    for _ in range(4):
        anywhere[1, 32](x, y)
    ran = anywhere.last
    assert ran is not None
    if not ran.target.startswith(("x86", "aarch")):
        pytest.skip("this machine has a GPU")
    before = tw.default_device()
    tw.set_default_device("emulator")
    try:
        anywhere[1, 32](x, y)
        assert anywhere.last is not ran or anywhere.last is None
    finally:
        tw.set_default_device(before)
    anywhere[1, 32](x, y, device="emulator")
    np.testing.assert_array_equal(y, x + 1)


def test_threads_and_memory() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        x, y = numbers()
        x[:] = seed
        for count in range(1, 200):
            serial(x, y, 64, 1.0)
            if y[-1] != seed * count:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    own = tw.cpu(serial.kernel.python)
    x, y = numbers()
    for _ in range(5):
        own(x, y, 64, 1.0)
    known = weakref.ref(own)
    del own
    gc.collect()
    assert known() is None
