"""Loops that run in parallel by themselves, and the dependences for which others are refused."""

from __future__ import annotations

import re

import numpy as np
import pytest

import tilewright as tw
from null_cuda.install import installed
from tilewright.base.errors import UserError


@tw.auto_parallel(block=32)
def smooth(x, y):
    """Two loops, with statements between them."""
    n = len(x)
    for i in range(1, n - 1):
        y[i] = (x[i - 1] + x[i] + x[i + 1]) / 3
    last = n - 1
    for i in range(0, n, last):
        y[i] = x[i]
    return n


@tw.auto_parallel
def row_sums(a, out):
    for i in range(a.shape[0] - 1, -1, -1):
        total = 0.0
        for j in range(a.shape[1]):
            total += a[i, j]
        out[i] = total


@tw.auto_parallel
def interleaved(x):
    for i in range(len(x) // 2):
        x[2 * i] = x[2 * i + 1]


@tw.auto_parallel
def counted(keys, bins):
    for i in range(len(keys)):
        tw.atomic_add(bins, keys[i], 1)


@pytest.mark.parametrize("device", ["emulator", "cpu"])
def test_parallel_loops(device: str) -> None:
    x = np.arange(100, dtype=np.float32) ** 2
    y = np.zeros_like(x)
    assert smooth(x, y, device=device) == 100
    expected = x.copy()
    expected[1:-1] = (x[:-2] + x[1:-1] + x[2:]) / np.float32(3)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    a, out = np.arange(12, dtype=np.float64).reshape(3, 4), np.zeros(3)
    row_sums(a, out, device=device)
    assert np.array_equal(out, a.sum(1))
    pairs = np.arange(10, dtype=np.int32)
    interleaved(pairs, device=device)
    assert np.array_equal(pairs, np.arange(10) // 2 * 2 + 1)
    bins = np.zeros(3, np.int32)
    counted(np.int32([0, 1, 1, 2, 2, 2]), bins, device=device)
    assert np.array_equal(bins, [1, 2, 3])


def test_on_a_gpu() -> None:
    with installed():
        x = tw.to_device(np.arange(64, dtype=np.float32), "cuda")
        y = tw.to_device(np.zeros(64, np.float32), "cuda")
        smooth(x, y)
        assert np.array_equal(y.numpy(), np.arange(64))


@tw.auto_parallel(device="emulator")
def prefix(x):
    for i in range(1, len(x)):
        x[i] = x[i] + x[i - 1]


@tw.auto_parallel(device="emulator")
def ahead(x):
    for i in range(len(x) - 2):
        x[i] = x[i + 2]


@tw.auto_parallel(device="emulator")
def one_place(x, y):
    for i in range(len(x)):
        y[0] = x[i]


@tw.auto_parallel(device="emulator")
def scattered(x, where):
    for i in range(len(x)):
        x[where[i]] = 1.0


@tw.auto_parallel(device="emulator")
def total(x, s):
    for i in range(len(x)):
        s = s + x[i]
    return s


@tw.auto_parallel(device="emulator")
def searched(x, y):
    for i in range(len(x)):
        if x[i] > 2:
            break
        y[i] = 1.0


@tw.auto_parallel(device="emulator")
def columns(a):
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            a[j, i] = a[i, j]


def line(function: tw.AutoParallel, offset: int) -> str:
    return rf"test_auto_parallel\.py:{function.python.__code__.co_firstlineno + offset}"


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(8, dtype=np.float32), np.zeros(8, np.float32)


REFUSED = [
    (prefix, lambda: arrays()[:1], lambda: rf"{line(prefix, 3)}:9: .*the loop at .*{line(prefix, 2)}:5 is not parallel: 'x' is written here and read at .*{line(prefix, 3)}:23 by another iteration, 1 iteration apart"),
    (ahead, lambda: arrays()[:1], lambda: rf"'x' is written here and read at .*{line(ahead, 3)}:16 by another iteration, 2 iterations apart"),
    (one_place, arrays, lambda: rf"{line(one_place, 3)}.*'y' is written here by more than one iteration"),
    (scattered, lambda: (arrays()[0], np.zeros(8, np.int32)), lambda: "'x' is written here by more than one iteration"),
    (total, lambda: (arrays()[0], 0.0), lambda: rf"{line(total, 3)}:13.*'s' goes from one iteration to the next: read here, assigned at .*{line(total, 3)}:9"),
    (searched, arrays, lambda: rf"{line(searched, 4)}:13.*'break' here ends its later iterations"),
    (columns, lambda: (np.zeros((3, 3)),), lambda: rf"'a' is written here and read at .*{line(columns, 4)}:23 by another iteration"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused(number: int) -> None:
    function, arguments, text = REFUSED[number]
    with pytest.raises(UserError) as caught:
        function(*arguments())
    assert caught.value.code == "TW012"
    assert re.search(text(), str(caught.value), re.DOTALL), str(caught.value)


def test_arrays_that_overlap() -> None:
    x = np.arange(16, dtype=np.float32)
    with pytest.raises(UserError, match="'y', which it writes, overlaps 'x'"):
        smooth(x[:12], x[4:], device="emulator")


def test_not_over_a_range() -> None:
    @tw.auto_parallel
    def over(x):
        for v in x:
            print(v)

    with pytest.raises(UserError, match="this loop is not over a range with one index"):
        over(arrays()[0])
