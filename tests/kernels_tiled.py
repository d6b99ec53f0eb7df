"""Attention and products over tiles, with blocks, carried maxima and carried sums; the tests of rewriting and of running them share them."""

from __future__ import annotations

import tilewright as tw


@tw.kernel
def flash(q, k, v, scale: tw.f32):
    """Blocks of queries and of keys that do not divide each other."""
    batch, heads, length, width = q.shape
    keys = k.shape[2]
    out = tw.empty((batch, heads, length, width), q.dtype)
    for b, h, block in tw.grid(batch, heads, range(0, length, 48)):
        m = -tw.inf
        total = 0.0
        o = tw.zeros((48, width))
        for kv in range(0, keys, 32):
            s = q[b, h, block : block + 48] @ tw.transpose(k[b, h, kv : kv + 32]) * scale
            m_new = tw.maximum(m, tw.row_max(s))
            p = tw.exp(s - m_new)
            total = tw.exp(m - m_new) * total + tw.row_sum(p)
            o = tw.exp(m - m_new) * o + p @ v[b, h, kv : kv + 32]
            m = m_new
        out[b, h, block : block + 48] = o / total
    return out


@tw.kernel
def masked_flash(q, k, v, mask):
    """Other orders of factors, the new maximum written out, and scores that are -inf."""
    length, width = q.shape
    keys = k.shape[0]
    out = tw.empty((length, width), q.dtype)
    for block in tw.grid(range(0, length, 64)):
        m = -tw.inf
        total = 0.0
        o = tw.zeros((64, width))
        for kv in range(0, keys, 16):
            scores = q[block : block + 64] @ tw.transpose(k[kv : kv + 16]) * 0.125
            s = tw.where(mask[block : block + 64, kv : kv + 16], scores, -tw.inf)
            alpha = tw.exp(m - tw.maximum(m, tw.row_max(s)))
            m = tw.maximum(tw.row_max(s), m)
            total = tw.row_sum(tw.exp(s - m)) + total * alpha
            o = tw.exp(s - m) @ v[kv : kv + 16] + o * alpha
        out[block : block + 64] = o / total
    return out


@tw.kernel
def flash_with_logarithm(q, k, v):
    """A result of rows beside that of rows and columns."""
    length, width = q.shape
    keys = k.shape[0]
    out = tw.empty((length, width), q.dtype)
    logarithm = tw.empty((length,), tw.f32)
    for block in tw.grid(range(0, length, 64)):
        m = -tw.inf
        total = 0.0
        o = tw.zeros((64, width))
        for kv in range(0, keys, 64):
            s = q[block : block + 64] @ tw.transpose(k[kv : kv + 64]) * 0.125
            m_new = tw.maximum(m, tw.row_max(s))
            total = total * tw.exp(m - m_new) + tw.row_sum(tw.exp(s - m_new))
            o = o * tw.exp(m - m_new) + tw.exp(s - m_new) @ v[kv : kv + 64]
            m = m_new
        out[block : block + 64] = o / total
        logarithm[block : block + 64] = m + tw.log(total)
    return out, logarithm


@tw.kernel
def tiled_matmul(a, b):
    rows, depth = a.shape
    columns = b.shape[1]
    out = tw.empty((rows, columns), a.dtype)
    for i, j in tw.grid(range(0, rows, 64), range(0, columns, 48)):
        acc = tw.zeros((64, 48))
        for p in range(0, depth, 32):
            acc += a[i : i + 64, p : p + 32] @ b[p : p + 32, j : j + 48]
        out[i : i + 64, j : j + 48] = acc
    return out


@tw.kernel
def plain_matmul(a, b):
    rows, depth = a.shape
    columns = b.shape[1]
    out = tw.empty((rows, columns), a.dtype)
    for i, j in tw.grid(rows, columns):
        acc = 0.0
        for p in range(depth):
            acc += a[i, p] * b[p, j]
        out[i, j] = acc
    return out


@tw.kernel
def causal_rows(q, k, v):
    """One row at a time, weights used twice, up to where the row ends."""
    length, width = q.shape
    out = tw.empty((length, width), q.dtype)
    for i in tw.grid(length):
        scores = k[: i + 1] @ q[i] / tw.sqrt(width)
        weights = tw.exp(scores - tw.max(scores))
        out[i] = weights @ v[: i + 1] / tw.sum(weights)
    return out


@tw.kernel
def causal_flash(q, k, v, mask):
    """Keys up to the end of a block of queries; the mask hides more of them."""
    length, width = q.shape
    out = tw.empty((length, width), q.dtype)
    for block in tw.grid(range(0, length, 64)):
        m = -tw.inf
        total = 0.0
        o = tw.zeros((64, width))
        for kv in range(0, block + 64, 32):
            scores = q[block : block + 64] @ tw.transpose(k[kv : kv + 32]) * 0.125
            s = tw.where(mask[block : block + 64, kv : kv + 32], scores, -tw.inf)
            m_new = tw.maximum(m, tw.row_max(s))
            total = tw.exp(m - m_new) * total + tw.row_sum(tw.exp(s - m_new))
            o = tw.exp(m - m_new) * o + tw.exp(s - m_new) @ v[kv : kv + 32]
            m = m_new
        out[block : block + 64] = o / total
    return out


@tw.kernel
def block_causal_flash(q, k, v):
    """Queries of a block see the keys of blocks up to their own, of which there may be more or fewer."""
    batch, length, width = q.shape
    keys = k.shape[1]
    out = tw.empty((batch, length, width), q.dtype)
    for b, block in tw.grid(batch, range(0, length, 48)):
        m = -tw.inf
        total = 0.0
        o = tw.zeros((48, width))
        for kv in range(0, min(block + 48, keys), 48):
            s = q[b, block : block + 48] @ tw.transpose(k[b, kv : kv + 48]) * 0.125
            m_new = tw.maximum(m, tw.row_max(s))
            total = tw.exp(m - m_new) * total + tw.row_sum(tw.exp(s - m_new))
            o = tw.exp(m - m_new) * o + tw.exp(s - m_new) @ v[b, kv : kv + 48]
            m = m_new
        out[b, block : block + 48] = o / total
    return out


@tw.kernel
def block_causal_loops(q, k, v):
    """The same in plain loops."""
    batch, length, width = q.shape
    keys = k.shape[1]
    out = tw.empty((batch, length, width), q.dtype)
    for b, i in tw.grid(batch, length):
        m = -tw.inf
        for j in range(min(i // 48 * 48 + 48, keys)):
            m = max(m, tw.dot(q[b, i], k[b, j]) * 0.125)
        total = 0.0
        for j in range(min(i // 48 * 48 + 48, keys)):
            total += tw.exp(tw.dot(q[b, i], k[b, j]) * 0.125 - m)
        for e in range(width):
            o = 0.0
            for j in range(min(i // 48 * 48 + 48, keys)):
                o += tw.exp(tw.dot(q[b, i], k[b, j]) * 0.125 - m) * v[b, j, e]
            out[b, i, e] = o / total
    return out
