"""Kernels for tests of several devices. Made anew for every test: kernels keep what they loaded for a driver."""

from __future__ import annotations

from typing import Any

import tilewright as tw


def softmax_rows() -> Any:
    @tw.kernel
    def softmax_rows(x: tw.Array) -> tw.Array:
        n, m = x.shape
        out = tw.empty((n, m), x.dtype)
        for i in tw.grid(n):
            largest = -tw.inf
            for j in range(m):
                largest = tw.maximum(largest, x[i, j])
            total = 0.0
            for j in range(m):
                total += tw.exp(x[i, j] - largest)
            for j in range(m):
                out[i, j] = tw.exp(x[i, j] - largest) / total
        return out

    return softmax_rows


def shifted_exp() -> Any:
    @tw.kernel
    def shifted_exp(x: tw.Array, b: tw.Array) -> tw.Array:
        return tw.exp(x) + b

    return shifted_exp


def product() -> Any:
    @tw.kernel
    def product(a: tw.Array, b: tw.Array) -> tw.Array:
        n, k = a.shape
        m = b.shape[1]
        out = tw.empty((n, m), a.dtype)
        for i, j in tw.grid(n, m):
            total = 0.0
            for q in range(k):
                total += a[i, q] * b[q, j]
            out[i, j] = total
        return out

    return product


def column_sums() -> Any:
    @tw.kernel
    def column_sums(x: tw.Array) -> tw.Array:
        return tw.sum(x, 0)

    return column_sums


def extremes() -> Any:
    @tw.kernel
    def extremes(x: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array]:
        n = x.shape[0]
        low = tw.empty((1,), x.dtype)
        high = tw.empty((1,), x.dtype)
        smallest = tw.inf
        largest = -tw.inf
        for i in range(n):
            smallest = tw.minimum(smallest, x[i])
        for i in range(n):
            largest = tw.maximum(largest, x[i])
        low[0] = smallest
        high[0] = largest
        return low, high, tw.sum(x)

    return extremes


def two_ways() -> Any:
    """Two independent chains, which meet at the end."""

    @tw.kernel
    def two_ways(x: tw.Array, y: tw.Array, f: float) -> tuple[tw.Array, tw.Array]:
        n, m = x.shape[0], y.shape[0]
        a = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            a[i] = tw.exp(x[i]) * f
        s = tw.sum(a)
        b = tw.empty((m,), y.dtype)
        for i in tw.grid(m):
            b[i] = tw.sqrt(y[i])
        t = tw.max(b)
        c = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            c[i] = a[i] * s + t
        return c, b

    return two_ways
