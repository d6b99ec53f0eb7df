"""The contractions that are measured, as a user would write them: plain loop nests; the CPU and the GPU run the same ones.

`linear` takes its weights as PyTorch's layers keep them, one row per output; `matmul` as a plain product does.
"""

from __future__ import annotations

from typing import Any

import tilewright as tw

# -- products of matrices -------------------------------------------------------------------------------------------


@tw.kernel
def matmul(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += a[i, p] * b[p, j]
        out[i, j] = acc
    return out


@tw.kernel
def matmul_f64(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), tw.f64)
    for i, j in tw.grid(m, n):
        acc = tw.f64(0)
        for p in range(k):
            acc += a[i, p] * b[p, j]
        out[i, j] = acc
    return out


@tw.kernel
def matmul_batched(a: tw.Array, b: tw.Array) -> tw.Array:
    count, m, k = a.shape
    n = b.shape[2]
    out = tw.empty((count, m, n), a.dtype)
    for h, i, j in tw.grid(count, m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += a[h, i, p] * b[h, p, j]
        out[h, i, j] = acc
    return out


@tw.kernel
def linear(x: tw.Array, w: tw.Array) -> tw.Array:
    m, k = x.shape
    n = w.shape[0]
    out = tw.empty((m, n), x.dtype)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += x[i, p] * w[j, p]
        out[i, j] = acc
    return out


@tw.kernel
def linear_i8(x: tw.Array, w: tw.Array) -> tw.Array:
    m, k = x.shape
    n = w.shape[0]
    out = tw.empty((m, n), tw.i32)
    for i, j in tw.grid(m, n):
        acc = tw.i32(0)
        for p in range(k):
            acc += tw.i32(x[i, p]) * tw.i32(w[j, p])
        out[i, j] = acc
    return out


@tw.kernel
def linear_f8(x: tw.Array, w: tw.Array) -> tw.Array:
    m, k = x.shape
    n = w.shape[0]
    out = tw.empty((m, n), tw.bf16)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += x[i, p] * w[j, p]
        out[i, j] = acc
    return out


@tw.kernel
def linear_batched(x: tw.Array, w: tw.Array) -> tw.Array:
    count, m, k = x.shape
    n = w.shape[1]
    out = tw.empty((count, m, n), x.dtype)
    for h, i, j in tw.grid(count, m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += x[h, i, p] * w[h, j, p]
        out[h, i, j] = acc
    return out


@tw.kernel
def linear_gelu(x: tw.Array, w: tw.Array, bias: tw.Array, residual: tw.Array) -> tw.Array:
    m, k = x.shape
    n = w.shape[0]
    out = tw.empty((m, n), x.dtype)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += x[i, p] * w[j, p]
        out[i, j] = tw.gelu(acc + bias[j]) + residual[i, j]
    return out


# -- convolutions ---------------------------------------------------------------------------------------------------


@tw.kernel
def conv_nchw(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, height, width = x.shape
    k, _, kh, kw = w.shape
    out = tw.empty((n, k, height, width), x.dtype)
    for b, o, i, j in tw.grid(n, k, height, width):
        acc = tw.f32(0)
        for q in range(c):
            for r in range(kh):
                for s in range(kw):
                    y = i + r - 1
                    z = j + s - 1
                    if y >= 0 and y < height and z >= 0 and z < width:
                        acc += x[b, q, y, z] * w[o, q, r, s]
        out[b, o, i, j] = acc
    return out


@tw.kernel
def conv_nhwc(x: tw.Array, w: tw.Array) -> tw.Array:
    n, height, width, c = x.shape
    k, kh, kw, _ = w.shape
    out = tw.empty((n, height, width, k), x.dtype)
    for b, i, j, o in tw.grid(n, height, width, k):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                for q in range(c):
                    y = i + r - 1
                    z = j + s - 1
                    if y >= 0 and y < height and z >= 0 and z < width:
                        acc += x[b, y, z, q] * w[o, r, s, q]
        out[b, i, j, o] = acc
    return out


@tw.kernel
def pointwise_nchw(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, height, width = x.shape
    k = w.shape[0]
    out = tw.empty((n, k, height, width), x.dtype)
    for b, o, i, j in tw.grid(n, k, height, width):
        acc = tw.f32(0)
        for q in range(c):
            acc += x[b, q, i, j] * w[o, q]
        out[b, o, i, j] = acc
    return out


@tw.kernel
def pointwise_nhwc(x: tw.Array, w: tw.Array) -> tw.Array:
    n, height, width, c = x.shape
    k = w.shape[0]
    out = tw.empty((n, height, width, k), x.dtype)
    for b, i, j, o in tw.grid(n, height, width, k):
        acc = tw.f32(0)
        for q in range(c):
            acc += x[b, i, j, q] * w[o, q]
        out[b, i, j, o] = acc
    return out


@tw.kernel
def depthwise_nchw(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, height, width = x.shape
    _, kh, kw = w.shape
    out = tw.empty((n, c, height, width), x.dtype)
    for b, q, i, j in tw.grid(n, c, height, width):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                y = i + r - 1
                z = j + s - 1
                if y >= 0 and y < height and z >= 0 and z < width:
                    acc += x[b, q, y, z] * w[q, r, s]
        out[b, q, i, j] = acc
    return out


@tw.kernel
def depthwise_nhwc(x: tw.Array, w: tw.Array) -> tw.Array:
    n, height, width, c = x.shape
    kh, kw, _ = w.shape
    out = tw.empty((n, height, width, c), x.dtype)
    for b, i, j, q in tw.grid(n, height, width, c):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                y = i + r - 1
                z = j + s - 1
                if y >= 0 and y < height and z >= 0 and z < width:
                    acc += x[b, y, z, q] * w[r, s, q]
        out[b, i, j, q] = acc
    return out


# -- the same with another precision --------------------------------------------------------------------------------


def precise(kernel: Any, precision: str) -> Any:
    """The kernel with its products of f32 taken at this precision ("tf32", "3xtf32")."""
    make: Any = tw.kernel
    return make(precision=precision)(kernel.python)
