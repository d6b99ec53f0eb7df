"""The kernels that are measured, as a user would write them; the CPU and the GPU run the same ones."""

from __future__ import annotations

import tilewright as tw


@tw.kernel
def relu(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = tw.relu(x[i])
    return out


@tw.kernel
def relu_rows(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows, cols), x.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = tw.relu(x[i, j])
    return out


@tw.kernel
def add(x: tw.Array, y: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] + y[i]
    return out


@tw.kernel
def multiply_add(x: tw.Array, y: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] * y[i] + 1.0
    return out


@tw.kernel
def exp(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = tw.exp(x[i])
    return out


@tw.kernel
def sigmoid(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = tw.sigmoid(x[i])
    return out


@tw.kernel
def gelu(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = tw.gelu(x[i])
    return out


@tw.kernel
def scale(m: tw.Array, v: tw.Array) -> tw.Array:
    rows, cols = m.shape
    out = tw.empty((rows, cols), m.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = m[i, j] * v[j]
    return out


@tw.kernel
def total(x: tw.Array) -> float:
    return tw.sum(x)


@tw.kernel
def row_sums(x: tw.Array) -> tw.Array:
    return tw.sum(x, axis=1)


@tw.kernel
def column_sums(x: tw.Array) -> tw.Array:
    return tw.sum(x, axis=0)


@tw.kernel
def argmax(x: tw.Array) -> int:
    return tw.argmax(x)
