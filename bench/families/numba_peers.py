"""The peers in Numba: each the nest as one writes it there, parallel where its loops allow. Imported only where Numba is."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

numba: Any = importlib.import_module("numba")
_parallel = numba.njit(parallel=True, fastmath=False)
_serial = numba.njit(fastmath=False)
prange = numba.prange


def heat(steps: int) -> Any:
    @_parallel  # type: ignore[untyped-decorator]
    def run(plate: Any) -> Any:
        now, after = plate.copy(), plate.copy()
        tenth, four = plate.dtype.type(0.1), plate.dtype.type(4.0)
        for _ in range(steps):
            for i in prange(1, plate.shape[0] - 1):
                for j in range(1, plate.shape[1] - 1):
                    after[i, j] = now[i, j] + tenth * (now[i - 1, j] + now[i + 1, j] + now[i, j - 1] + now[i, j + 1] - four * now[i, j])
            now, after = after, now
        return now

    return run


def elimination() -> Any:
    @_parallel  # type: ignore[untyped-decorator]
    def run(a: Any) -> Any:
        u = a.copy()
        n = u.shape[0]
        for k in range(n):
            for i in prange(k + 1, n):
                factor = u[i, k] / u[k, k]
                for j in range(k + 1, n):
                    u[i, j] -= factor * u[k, j]
                u[i, k] = factor
        return u

    return run


def shortest_paths() -> Any:
    @_parallel  # type: ignore[untyped-decorator]
    def run(weights: Any) -> Any:
        d = weights.copy()
        n = d.shape[0]
        for k in range(n):
            for i in prange(n):
                for j in range(n):
                    d[i, j] = min(d[i, j], d[i, k] + d[k, j])
        return d

    return run


def substitution() -> Any:
    @_serial  # type: ignore[untyped-decorator]
    def run(a: Any, b: Any) -> Any:
        x = b.copy()
        n, columns = b.shape
        for i in range(n):
            for k in range(i):
                for j in range(columns):
                    x[i, j] -= a[i, k] * x[k, j]
            for j in range(columns):
                x[i, j] /= a[i, i]
        return x

    return run


def distances() -> Any:
    @_parallel  # type: ignore[untyped-decorator]
    def run(x: Any, y: Any) -> Any:
        m, d = x.shape
        n = y.shape[0]
        out = np.empty((m, n), x.dtype)
        for i in prange(m):
            for j in range(n):
                total = x.dtype.type(0)
                for k in range(d):
                    away = x[i, k] - y[j, k]
                    total += away * away
                out[i, j] = np.sqrt(total)
        return out

    return run


def turned() -> Any:
    @_parallel  # type: ignore[untyped-decorator]
    def run(x: Any, w: Any) -> Any:
        n, m, _ = x.shape
        out = np.empty_like(x)
        for i in prange(n):
            for j in range(m):
                out[i, j, 0] = x[i, j, 0] * w[j, 0] - x[i, j, 1] * w[j, 1]
                out[i, j, 1] = x[i, j, 0] * w[j, 1] + x[i, j, 1] * w[j, 0]
        return out

    return run


def bordered() -> Any:
    @_parallel  # type: ignore[untyped-decorator]
    def run(x: Any) -> Any:
        rows, columns = x.shape
        out = np.empty_like(x)
        quarter = x.dtype.type(0.25)
        for i in prange(rows):
            for j in range(columns):
                if i > 0 and i < rows - 1 and j > 0 and j < columns - 1:
                    out[i, j] = quarter * (x[i - 1, j] + x[i + 1, j] + x[i, j - 1] + x[i, j + 1])
                else:
                    out[i, j] = x[i, j]
        return out

    return run


def box(r: int) -> Any:
    @_parallel  # type: ignore[untyped-decorator]
    def run(x: Any) -> Any:
        rows, columns = x.shape
        out = np.empty_like(x)
        share = x.dtype.type(1.0 / (2 * r + 1) ** 2)
        for i in prange(rows):
            for j in range(columns):
                total = x.dtype.type(0)
                for k in range(max(0, i - r), min(rows, i + r + 1)):
                    for m in range(max(0, j - r), min(columns, j + r + 1)):
                        total += x[k, m]
                out[i, j] = total * share
        return out

    return run


def scaled_into(view: Any) -> Any:
    @_parallel  # type: ignore[untyped-decorator]
    def write(x: Any, out: Any) -> None:
        two, one = x.dtype.type(2), x.dtype.type(1)
        for i in prange(x.shape[0]):
            for j in range(x.shape[1]):
                out[i, j] = x[i, j] * two + one

    def run(x: Any) -> Any:
        write(x, view)
        return view

    return run


def paths(steps: int) -> Any:
    @_parallel  # type: ignore[untyped-decorator]
    def run(start: Any, drift: Any) -> Any:
        out = np.empty_like(start)
        one, small = start.dtype.type(1), start.dtype.type(0.001)
        for i in prange(start.shape[0]):
            price = start[i]
            best = price
            for _ in range(steps):
                price = price * (one + drift[i]) / (one + small * price)
                if price > best:
                    best = price
            out[i] = best
        return out

    return run


def checksum() -> Any:
    @_serial  # type: ignore[untyped-decorator]
    def run(data: Any) -> Any:
        a, b = np.uint32(1), np.uint32(0)
        base = np.uint32(65521)
        for i in range(data.shape[0]):
            a = np.uint32(a + data[i]) % base
            b = np.uint32(b + a) % base
        return np.uint32(b * np.uint32(65536) + a)

    return run


def atax() -> Any:
    @_serial  # type: ignore[untyped-decorator]
    def run(a: Any, x: Any) -> Any:
        m, n = a.shape
        y = np.zeros(n, a.dtype)
        for i in range(m):
            product = a.dtype.type(0)
            for j in range(n):
                product += a[i, j] * x[j]
            for j in range(n):
                y[j] += a[i, j] * product
        return y

    return run


def nearest() -> Any:
    @_parallel  # type: ignore[untyped-decorator]
    def run(x: Any, centres: Any) -> Any:
        n, d = x.shape
        out = np.empty(n, x.dtype)
        for i in prange(n):
            best = x.dtype.type(1e30)
            for j in range(centres.shape[0]):
                total = x.dtype.type(0)
                for q in range(d):
                    away = x[i, q] - centres[j, q]
                    total += away * away
                if total < best:
                    best = total
            out[i] = best
        return out

    return run
