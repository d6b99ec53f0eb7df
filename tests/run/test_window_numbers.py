"""Whole numbers of a call that say how windows lie, such as steps and paddings, are part of a CPU's code; each call has its own."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.frontend.python.kernels import parse_function
from tilewright.frontend.window_numbers import window_numbers, with_numbers

Array = np.ndarray[Any, np.dtype[Any]]
RNG = np.random.default_rng(5)


def convolution(x: tw.Array, w: tw.Array, stride: int = 1, pad: int = 0) -> tw.Array:
    n, channels, height, width = x.shape
    filters, _, kh, kw = w.shape
    rows = (height + 2 * pad - kh) // stride + 1
    columns = (width + 2 * pad - kw) // stride + 1
    out = tw.empty((n, filters, rows, columns), x.dtype)
    for b, f, i, j in tw.grid(n, filters, rows, columns):
        total = x.dtype(0)
        for c in range(channels):
            for p in range(kh):
                for q in range(kw):
                    y = i * stride + p - pad
                    z = j * stride + q - pad
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, c, y, z] * w[f, c, p, q]
        out[b, f, i, j] = total
    return out


KERNEL = tw.kernel(convolution)


def wanted(x: Array, w: Array, stride: int, pad: int) -> Array:
    a = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (pad, pad), (pad, pad))) if pad >= 0 else x.astype(np.float64)[:, :, -pad : x.shape[2] + pad, -pad : x.shape[3] + pad]
    windows = np.lib.stride_tricks.sliding_window_view(a, w.shape[2:], (2, 3))[:, :, ::stride, ::stride]
    return np.einsum("bcijpq,fcpq->bfij", windows, w.astype(np.float64))


def test_each_call_has_its_numbers() -> None:
    kernel = tw.kernel(convolution)
    x, w = RNG.standard_normal((2, 5, 23, 19)).astype(np.float32), RNG.standard_normal((7, 5, 3, 3)).astype(np.float32)
    for stride, pad in [(1, 1), (1, 1), (2, 1), (1, 1), (1, 0), (3, 2), (2, 1), (2, -1), (1, 70), (1, 1), (2, 1)]:
        for _ in range(2):
            found = kernel(x, w, stride, pad=pad)
            np.testing.assert_allclose(found, wanted(x, w, stride, pad), rtol=2e-5, atol=2e-4)
    np.testing.assert_allclose(kernel(x, w), wanted(x, w, 1, 0), rtol=2e-5, atol=2e-4)
    np.testing.assert_allclose(kernel(x, w, np.int64(2), np.int32(1)), wanted(x, w, 2, 1), rtol=2e-5, atol=2e-4)
    out = np.full((2, 7, 12, 10), np.nan, np.float32)
    assert kernel(x, w, 2, 1, out=out) is out
    np.testing.assert_allclose(out, wanted(x, w, 2, 1), rtol=2e-5, atol=2e-4)


def test_more_numbers_than_there_is_code_for() -> None:
    kernel = tw.kernel(convolution)
    x, w = RNG.standard_normal((1, 2, 40, 40)), RNG.standard_normal((3, 2, 3, 3))
    for stride in [*range(1, 14), 2, 1]:
        np.testing.assert_allclose(kernel(x, w, stride, 1), wanted(x, w, stride, 1), rtol=1e-12, atol=1e-12)


def test_several_threads_with_numbers_of_their_own() -> None:
    kernel = tw.kernel(convolution)
    x, w = RNG.standard_normal((1, 2, 17, 17)), RNG.standard_normal((3, 2, 3, 3))
    wrong: list[int] = []

    def calls(stride: int) -> None:
        expected = wanted(x, w, stride, 1)
        wrong.extend(stride for _ in range(40) if not np.allclose(kernel(x, w, stride, 1), expected))

    threads = [threading.Thread(target=calls, args=(stride,)) for stride in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_convolution_is_one_whatever_its_step_is_called() -> None:
    x, w = RNG.standard_normal((1, 32, 28, 28)).astype(np.float32), RNG.standard_normal((32, 32, 3, 3)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tw.PerformanceWarning)
        kernel = tw.kernel(convolution)
        kernel(x, w, 2, 1)


@tw.kernel
def scattered(x: tw.Array, w: tw.Array, stride: int) -> tw.Array:
    n, channels, width = x.shape
    _, filters, kw = w.shape
    out = tw.zeros((n, filters, (width - 1) * stride + kw), x.dtype)
    for b, f, j in tw.grid(n, filters, width):
        for q in range(kw):
            for c in range(channels):
                out[b, f, j * stride + q] += x[b, c, j] * w[c, f, q]
    return out


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_scattered_by_a_number(device: str) -> None:
    x, w = RNG.standard_normal((2, 3, 9)), RNG.standard_normal((3, 4, 3))
    for stride in (1, 2, 3, 5, 2):
        expected = np.zeros((2, 4, 8 * stride + 3))
        for q in range(3):
            expected[:, :, q : q + 8 * stride + 1 : stride] += np.einsum("bcj,cf->bfj", x, w[:, :, q])
        np.testing.assert_allclose(scattered(x, w, stride, device=device), expected, rtol=1e-12, atol=1e-12)


@tw.kernel
def blurred(x: tw.Array, radius: int) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in range(n):
        total = x.dtype(0)
        for p in range(-radius, radius + 1):
            if 0 <= i + p < n:
                total += x[i + p]
        out[i] = total
    return out


def test_windows_by_a_radius() -> None:
    x = RNG.standard_normal(300)
    for radius in (0, 1, 2, 70, 5, -1, 1):
        expected = np.convolve(x, np.ones(2 * radius + 1))[radius : radius + 300] if radius >= 0 else np.zeros(300)
        np.testing.assert_allclose(blurred(x, radius), expected, rtol=1e-12, atol=1e-12)


@tw.kernel
def moved(x: tw.Array, step: int) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in range(n):
        total = x.dtype(0)
        for p in range(3):
            total += x[i // step + p]
        out[i] = total
    return out


def test_errors_are_those_of_the_kernel() -> None:
    x = RNG.standard_normal(10)
    w = RNG.standard_normal((3, 2, 3, 3))
    for stride, said in ((0, "divides by stride, which is 0"), (1, "extent")):
        for _ in range(2):
            with pytest.raises(tw.TilewrightError, match=said) as caught:
                KERNEL(RNG.standard_normal((1, 2, 9, 1)), w, stride, 0)
            assert "assertion" not in str(caught.value)
    for step in (1, 2):
        for _ in range(2):
            with pytest.raises(tw.TilewrightError) as caught:
                moved(x[: 10 if step < 2 else 2], step)
            assert "test_window_numbers.py" in str(caught.value)
            assert "assertion" not in str(caught.value)


def lag(x: tw.Array, by: int) -> tw.Array:
    (n,) = x.shape
    out = tw.zeros((n,), x.dtype)
    for i in range(64, n):
        out[i] = x[i] - x[i - by]
    return out


def steps(x: tw.Array, count: int) -> tw.Array:
    (n,) = x.shape
    out = tw.zeros((n,), x.dtype)
    for t in range(count):
        for i in range(n):
            out[i] = out[i] + x[i] * t
    return out


def changed(x: tw.Array, stride: int) -> tw.Array:
    (n,) = x.shape
    stride = stride + 1
    out = tw.zeros((n,), x.dtype)
    for i in range(n // 8):
        for p in range(3):
            out[i] += x[i * stride + p]
    return out


def test_which_numbers_say_how_windows_lie() -> None:
    found = {f.__name__: window_numbers(parse_function(f, ())) for f in (convolution, scattered.python, blurred.python, moved.python, lag, steps, changed)}
    assert found == {
        "convolution": {"stride": True, "pad": False}, "scattered": {"stride": False}, "blurred": {"radius": False}, "moved": {"step": True},
        "lag": {}, "steps": {}, "changed": {},
    }  # fmt: skip


def test_a_kernel_with_its_numbers() -> None:
    own = with_numbers(parse_function(convolution, ()), {"pad": -1})
    assert len(own.body) == len(parse_function(convolution, ()).body) + 1
    assert "'pad'" in repr(own.body[0])
    assert "'pad'" not in repr(own.body[1:])
    assert "'stride'" in repr(own.body[1:])


def shifted(x, w, shift: int):  # type: ignore[no-untyped-def]
    (n,) = x.shape
    (k,) = w.shape
    y = tw.zeros_like(x)
    for i in tw.grid(n):
        s = 0.0
        for p in range(k):
            if i + p - shift >= 0 and i + p - shift < n:
                s += x[i + p - shift] * w[p]
        y[i] = s
    return y


def test_a_graph_may_be_given_other_numbers() -> None:
    x, w = RNG.standard_normal(50), RNG.standard_normal(5)
    kernel = tw.kernel(shifted)

    def right(shift: int) -> np.ndarray:
        around = np.pad(x, 10)
        return np.array([around[10 + i - shift :][:5] @ w for i in range(50)])

    kernel(x, w, 2)
    with tw.capture("cpu", x=x, shift=2) as graph:
        exchanged, fixed = kernel(graph["x"], w, graph["shift"]), kernel(graph["x"], w, 3)
    for shift in (2, 4, -1, 2):
        x[:] = RNG.standard_normal(x.shape)
        graph.replay(shift=shift)
        np.testing.assert_allclose(exchanged, right(shift), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(fixed, right(3), rtol=1e-12, atol=1e-12)


def test_numbers_that_decide_shapes() -> None:
    x, w = RNG.standard_normal((1, 2, 9, 9)), RNG.standard_normal((3, 2, 3, 3))
    kernel = tw.kernel(convolution)
    graph = tw.graph(lambda x, w, stride: kernel(x, w, stride, 1), x, w, 2)
    for stride in (2, 1, 3, 2):
        np.testing.assert_allclose(graph.replay(stride=stride), wanted(x, w, stride, 1), rtol=1e-12, atol=1e-12)


def test_on_a_part_of_the_cores() -> None:
    part = "cpu:0/1"
    kernel = tw.kernel(convolution)
    x, w = RNG.standard_normal((1, 2, 9, 9)), RNG.standard_normal((3, 2, 3, 3))
    keys = set()
    for stride in (1, 2, 1):
        np.testing.assert_allclose(kernel(x, w, stride, 1, device=part), wanted(x, w, stride, 1), rtol=1e-12, atol=1e-12)
        assert kernel.last is not None
        keys.add(kernel.last.key)
    assert len(keys) == 2
    with pytest.raises(tw.TilewrightError):
        kernel(x, w, 0, 1, device=part)


@tw.kernel
def scaled(x: tw.Array, w: tw.Array, step: int) -> tw.Array:
    n = x.shape[0]
    out = tw.zeros(n, tw.i64)
    for i in range(n):
        for j in range(w.shape[0]):
            if i * step + j < n:
                out[i] += x[i * step + j] * step - (step - 5) * w[j]
    return out


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_numbers_in_the_code_have_the_dtype_of_arguments(dtype: type) -> None:
    x, w = RNG.integers(90, 120, 70).astype(dtype), RNG.integers(0, 9, 5).astype(dtype)
    for step in (1, 2, 64, 65, 2):
        places = np.arange(70)[:, None] * step + np.arange(5)
        terms = np.append(x.astype(np.int64), [0] * 5000)[places] * step - (step - 5) * w.astype(np.int64)
        np.testing.assert_array_equal(np.asarray(scaled(x, w, step)), np.where(places < 70, terms, 0).sum(1))
