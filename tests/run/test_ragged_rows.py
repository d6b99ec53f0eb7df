"""Rows whose length data decide: sparse products, segment sums and their family, on the CPU and at every stage of the emulator, against float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import tilewright as tw
from support import CUDA

DEVICES = ("cpu", "emulator:loop", "emulator:tile", "emulator:thread", CUDA)
RNG = np.random.default_rng(31)


@tw.kernel
def csr(ptr: tw.Array, col: tw.Array, v: tw.Array, x: tw.Array) -> tw.Array:
    rows = ptr.shape[0] - 1
    out = tw.empty((rows,), v.dtype)
    for r in tw.grid(rows):
        total = 0.0
        for p in range(ptr[r], ptr[r + 1]):
            total += v[p] * x[col[p]]
        out[r] = total
    return out


@tw.kernel
def csr_times_dense(ptr: tw.Array, col: tw.Array, v: tw.Array, x: tw.Array) -> tw.Array:
    rows, d = ptr.shape[0] - 1, x.shape[1]
    out = tw.empty((rows, d), v.dtype)
    for r, j in tw.grid(rows, d):
        total = 0.0
        for p in range(ptr[r], ptr[r + 1]):
            total += v[p] * x[col[p], j]
        out[r, j] = total
    return out


@tw.kernel
def segments(ptr: tw.Array, x: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array]:
    rows = ptr.shape[0] - 1
    sums = tw.empty((rows,), x.dtype)
    largest = tw.empty((rows,), x.dtype)
    places = tw.empty((rows,), tw.i64)
    for r in tw.grid(rows):
        sums[r] = tw.sum(x[ptr[r] : ptr[r + 1]])
    for r in tw.grid(rows):
        best = -float("inf")
        for p in range(ptr[r], ptr[r + 1]):
            best = max(best, x[p])
        largest[r] = best
    for r in tw.grid(rows):
        places[r] = tw.argmax(x[ptr[r] : ptr[r + 1]]) if ptr[r + 1] > ptr[r] else -1
    return sums, largest, places


@tw.kernel
def segment_softmax(ptr: tw.Array, x: tw.Array) -> tw.Array:
    rows = ptr.shape[0] - 1
    out = tw.zeros(x.shape, x.dtype)
    for r in tw.grid(rows):
        largest = -float("inf")
        for p in range(ptr[r], ptr[r + 1]):
            largest = max(largest, x[p])
        total = 0.0
        for p in range(ptr[r], ptr[r + 1]):
            total += tw.exp(x[p] - largest)
        for p in range(ptr[r], ptr[r + 1]):
            out[p] = tw.exp(x[p] - largest) / total
    return out


def lengths(kind: str, rows: int) -> np.ndarray:
    if kind == "empty":
        return np.zeros(rows, int)
    if kind == "one long row":
        found = RNG.integers(0, 4, rows)
        found[rows // 2] = 1500
        return found
    return RNG.integers(0, 70, rows)


def offsets(kind: str, rows: int, dtype: type = np.int32) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths(kind, rows))]).astype(dtype)


CASES = [("mixed", 1), ("mixed", 33), ("one long row", 31), ("one long row", 37), ("empty", 5), ("mixed", 0)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "rows"), CASES)
def test_sparse_times_vector(device: str, kind: str, rows: int) -> None:
    for index, dtype in ((np.int32, np.float32), (np.int64, np.float64)):
        ptr = offsets(kind, rows, index)
        n = int(ptr[-1])
        col, v, x = RNG.integers(0, 50, n).astype(index), RNG.normal(size=n).astype(dtype), RNG.normal(size=50).astype(dtype)
        terms = v.astype(np.float64) * x.astype(np.float64)[col]
        wanted = np.array([terms[a:b].sum() for a, b in pairwise(ptr)])
        found = csr(ptr, col, v, x, device=device)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d", [1, 8, 33])
def test_sparse_times_dense(device: str, d: int) -> None:
    ptr = offsets("one long row", 19)
    n = int(ptr[-1])
    col, v, x = RNG.integers(0, 50, n).astype(np.int32), RNG.normal(size=n).astype(np.float32), RNG.normal(size=(50, d)).astype(np.float32)
    terms = v.astype(np.float64)[:, None] * x.astype(np.float64)[col]
    wanted = np.array([terms[a:b].sum(0) for a, b in pairwise(ptr)])
    np.testing.assert_allclose(csr_times_dense(ptr, col, v, x, device=device), wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["mixed", "one long row"])
@pytest.mark.parametrize("step", [1, -2])
def test_segments(device: str, kind: str, step: int) -> None:
    ptr = offsets(kind, 35)
    x = RNG.normal(size=int(ptr[-1]) * abs(step)).astype(np.float32)[::step]
    x[::97] = np.inf
    sums, largest, places = segments(ptr, x, device=device)
    parts = [x[a:b].astype(np.float64) for a, b in pairwise(ptr)]
    np.testing.assert_allclose(sums, [part.sum() for part in parts], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(largest, [part.max(initial=-np.inf) for part in parts])
    np.testing.assert_array_equal(places, [part.argmax() if part.size else -1 for part in parts])


@pytest.mark.parametrize("device", DEVICES)
def test_a_softmax_of_each_segment(device: str) -> None:
    for kind in ("mixed", "one long row"):
        ptr = offsets(kind, 35)
        x = RNG.normal(size=int(ptr[-1])).astype(np.float32)
        wanted = np.zeros(len(x))
        for a, b in pairwise(ptr):
            if b > a:
                own = np.exp(x[a:b].astype(np.float64) - x[a:b].max())
                wanted[a:b] = own / own.sum()
        np.testing.assert_allclose(segment_softmax(ptr, x, device=device), wanted, rtol=1e-4, atol=1e-7)
