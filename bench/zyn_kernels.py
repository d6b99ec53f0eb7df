"""The compute blocks of examples/zyn as Python kernels, line by line: what `bench/zyn.py` holds programs against."""

from __future__ import annotations

import tilewright as tw
from bench.kernels import relu, row_sums, scale, total
from bench.transformer_kernels import cross_entropy, layer_norm, softmax

__all__ = [
    "argmax", "attention", "axpy", "batched_matmul", "conv2d", "cross_entropy", "depthwise", "flash", "largest", "layer_norm", "matmul",
    "norm", "relu", "rms_norm", "rope", "row_sums", "scale", "softmax", "total",
]  # fmt: skip


@tw.kernel
def axpy(a: float, x: tw.Array, y: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = a * x[i] + y[i]
    return out


@tw.kernel(reduce="argmax")
def argmax(x: tw.Array):  # type: ignore[no-untyped-def]
    for i in tw.grid(len(x)):
        yield x[i], i


@tw.kernel(reduce="max")
def largest(x: tw.Array):  # type: ignore[no-untyped-def]
    for i in tw.grid(len(x)):
        yield x[i]


@tw.kernel
def norm(x: tw.Array) -> float:
    return tw.sqrt(tw.sum(x * x))


@tw.kernel
def matmul(a: tw.Array, b: tw.Array) -> tw.Array:
    m, depth = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        acc = 0.0
        for k in range(depth):
            acc += a[i, k] * b[k, j]
        out[i, j] = acc
    return out


@tw.kernel
def batched_matmul(a: tw.Array, b: tw.Array) -> tw.Array:
    batch, m, depth = a.shape
    n = b.shape[1]
    out = tw.empty((batch, m, n), a.dtype)
    for p, i, j in tw.grid(batch, m, n):
        acc = 0.0
        for k in range(depth):
            acc += a[p, i, k] * b[p, j, k]
        out[p, i, j] = acc
    return out


@tw.kernel
def conv2d(image: tw.Array, weights: tw.Array, bias: tw.Array) -> tw.Array:
    batch, channels, height, width = image.shape
    results, _, rows, cols = weights.shape
    out = tw.empty((batch, results, (height + 2 - rows) // 2 + 1, (width + 2 - cols) // 2 + 1), image.dtype)
    for b, o, y, x in tw.grid(batch, results, (height + 2 - rows) // 2 + 1, (width + 2 - cols) // 2 + 1):
        acc = bias[o]
        for c in range(channels):
            for r in range(rows):
                for s in range(cols):
                    ih = y * 2 + r - 1
                    iw = x * 2 + s - 1
                    if ih >= 0 and ih < height and iw >= 0 and iw < width:
                        acc += image[b, c, ih, iw] * weights[o, c, r, s]
        out[b, o, y, x] = acc
    return out


@tw.kernel
def depthwise(image: tw.Array, windows: tw.Array) -> tw.Array:
    batch, channels, height, width = image.shape
    _, rows, cols = windows.shape
    out = tw.empty((batch, channels, height - rows + 1, width - cols + 1), image.dtype)
    for b, c, y, x in tw.grid(batch, channels, height - rows + 1, width - cols + 1):
        acc = 0.0
        for r in range(rows):
            for s in range(cols):
                acc += image[b, c, y + r, x + s] * windows[c, r, s]
        out[b, c, y, x] = acc
    return out


@tw.kernel
def rms_norm(x: tw.Array, gain: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows, cols), x.dtype)
    for i in tw.grid(rows):
        squares = 0.0
        for j in range(cols):
            squares += x[i, j] * x[i, j]
        for j in range(cols):
            out[i, j] = x[i, j] * tw.rsqrt(squares / cols + 1e-5) * gain[j]
    return out


@tw.kernel
def rope(x: tw.Array, cosines: tw.Array, sines: tw.Array) -> tw.Array:
    batch, heads, seq, depth = x.shape
    out = tw.empty((batch, heads, seq, depth), x.dtype)
    for b, h, t, d in tw.grid(batch, heads, seq, depth // 2):
        x0 = x[b, h, t, d * 2]
        x1 = x[b, h, t, d * 2 + 1]
        out[b, h, t, d * 2] = x0 * cosines[t, d] - x1 * sines[t, d]
        out[b, h, t, d * 2 + 1] = x0 * sines[t, d] + x1 * cosines[t, d]
    return out


@tw.kernel
def attention(q: tw.Array, k: tw.Array, v: tw.Array, mask: tw.Array) -> tw.Array:
    batch, heads, seq, depth = q.shape
    out = tw.empty((batch, heads, seq, depth), q.dtype)
    for b, h, i in tw.grid(batch, heads, seq):
        most = -tw.inf
        for j in range(seq):
            if mask[i, j]:
                most = max(most, tw.dot(q[b, h, i], k[b, h, j]) / tw.sqrt(depth))
        total = 0.0
        for j in range(seq):
            if mask[i, j]:
                total += tw.exp(tw.dot(q[b, h, i], k[b, h, j]) / tw.sqrt(depth) - most)
        for d in range(depth):
            acc = 0.0
            for j in range(seq):
                if mask[i, j]:
                    acc += tw.exp(tw.dot(q[b, h, i], k[b, h, j]) / tw.sqrt(depth) - most) / total * v[b, h, j, d]
            out[b, h, i, d] = acc
    return out


@tw.kernel
def flash(q: tw.Array, k: tw.Array, v: tw.Array) -> tw.Array:
    batch, heads, seq, depth = q.shape
    out = tw.empty((batch, heads, seq, depth), q.dtype)
    for b, h, block in tw.grid(batch, heads, range(0, seq, 64)):
        m = -tw.inf
        total = 0.0
        o = tw.zeros((64, depth))
        for kv in range(0, seq, 64):
            s = q[b, h, block : block + 64] @ tw.transpose(k[b, h, kv : kv + 64]) / tw.sqrt(depth)
            m_new = tw.maximum(m, tw.row_max(s))
            l_new = tw.exp(m - m_new) * total + tw.row_sum(tw.exp(s - m_new))
            o = tw.exp(m - m_new) * o + tw.exp(s - m_new) @ v[b, h, kv : kv + 64]
            m = m_new
            total = l_new
        out[b, h, block : block + 64] = o / total
    return out
