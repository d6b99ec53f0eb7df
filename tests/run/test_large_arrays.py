"""Arrays with more than 2^31 elements: indices, offsets and block counts must not wrap."""

from __future__ import annotations

import os

import numpy as np
import pytest

import tilewright as tw

COUNT = 2**31 + 12345
NEEDED = 8 << 30


def free_memory() -> int:
    """Bytes that can be had without swapping; 0 where nobody says."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        free = int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 0
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            used = int(file.read())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, int(limit) - used)


pytestmark = pytest.mark.skipif(
    free_memory() < NEEDED or bool(os.environ.get("TILEWRIGHT_SKIP_LARGE")),
    reason=f"needs {NEEDED >> 30} GB of free memory, found {free_memory() / 2**30:.1f} (or TILEWRIGHT_SKIP_LARGE is set)",
)


@tw.kernel
def total(x: tw.Array) -> int:
    return tw.sum(x)


@tw.kernel
def shifted(x: tw.Array, by: int) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, tw.i8)
    for i in tw.grid(n):
        out[i] = x[i] + tw.cast(by, tw.i8)
    return out


@tw.kernel
def last_place(x: tw.Array) -> int:
    return tw.argmax(x)


@tw.kernel
def transposed_row(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty(cols, tw.i64)
    for j in tw.grid(cols):
        total = 0
        for i in range(rows):
            total += x[i, j]
        out[j] = total
    return out


@pytest.fixture(scope="module")
def huge() -> np.ndarray:
    x = np.zeros(COUNT, np.int8)
    x[-1], x[2**31], x[0] = 5, 3, 1
    return x


def test_sum(huge: np.ndarray) -> None:
    assert total(huge) == 9


def test_argmax(huge: np.ndarray) -> None:
    assert last_place(huge) == COUNT - 1


def test_elementwise(huge: np.ndarray) -> None:
    result = shifted(huge, 1)
    assert result.shape == (COUNT,)
    assert result[-1] == 6
    assert result[2**31] == 4
    assert result[0] == 2
    assert result[2**31 - 1] == result[2**31 + 1] == 1
    assert int(result[:: 2**20].astype(np.int64).sum()) == len(result[:: 2**20]) + 1 + 3


def test_strides_beyond_two_gigabytes(huge: np.ndarray) -> None:
    """Three rows with a pitch of half the memory: offsets of 2^31 and more."""
    pitch = 2**30
    rows = np.lib.stride_tricks.as_strided(huge, (3, 7), (pitch, 1))
    np.testing.assert_array_equal(transposed_row(rows), [1 + 3, 0, 0, 0, 0, 0, 0])
