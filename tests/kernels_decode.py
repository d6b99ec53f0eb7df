"""Attention of new tokens over a cache of keys and values, in plain loops: lengths and positions are numbers in memory."""

from __future__ import annotations

import numpy as np

import tilewright as tw


@tw.kernel
def one_length(q: tw.Array, k: tw.Array, v: tw.Array, length: tw.Array) -> tw.Array:
    """One token; the length ends the loops. Keys lie row by row, the heads of a token side by side."""
    H, D = q.shape
    G = H // k.shape[1]
    E = v.shape[2]
    scale = 1.0 / tw.sqrt(tw.f32(D))
    out = tw.empty((H, E), q.dtype)
    n = length[0]
    for h in tw.grid(H):
        m = -tw.inf
        for j in range(n):
            s = tw.f32(0)
            for d in range(D):
                s += q[h, d] * k[j, h // G, d]
            m = max(m, s * scale)
        total = tw.f32(0)
        for j in range(n):
            s = tw.f32(0)
            for d in range(D):
                s += q[h, d] * k[j, h // G, d]
            total += tw.exp(s * scale - m)
        for e in range(E):
            o = tw.f32(0)
            for j in range(n):
                s = tw.f32(0)
                for d in range(D):
                    s += q[h, d] * k[j, h // G, d]
                o += tw.exp(s * scale - m) * v[j, h // G, e]
            out[h, e] = o / total
    return out


@tw.kernel
def several_lengths(q: tw.Array, k: tw.Array, v: tw.Array, lengths: tw.Array, scale: tw.f32) -> tw.Array:
    """Several sequences, each with its own length; keys lie head by head, and columns are a parallel index."""
    B, H, D = q.shape
    G = H // k.shape[1]
    out = tw.empty((B, H, D), q.dtype)
    for b, h, e in tw.grid(B, H, D):
        m = -tw.inf
        for j in range(lengths[b]):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, d] * k[b, h // G, j, d]
            m = max(m, s * scale)
        total = tw.f32(0)
        for j in range(lengths[b]):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, d] * k[b, h // G, j, d]
            total += tw.exp(s * scale - m)
        o = tw.f32(0)
        for j in range(lengths[b]):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, d] * k[b, h // G, j, d]
            o += tw.exp(s * scale - m) / total * v[b, h // G, j, e]
        out[b, h, e] = o
    return out


@tw.kernel
def window(q: tw.Array, k: tw.Array, v: tw.Array, pos: tw.Array, size: int) -> tw.Array:
    """Some tokens, the first of them at `pos[0]`: each sees itself and at most `size` - 1 before it."""
    S, H, D = q.shape
    T = k.shape[0]
    G = H // k.shape[1]
    scale = 1.0 / tw.sqrt(tw.f32(D))
    out = tw.empty((S, H, D), q.dtype)
    for i, h in tw.grid(S, H):
        m = -tw.inf
        for j in range(T):
            if j <= pos[0] + i and j > pos[0] + i - size:
                s = tw.f32(0)
                for d in range(D):
                    s += q[i, h, d] * k[j, h // G, d]
                m = max(m, s * scale)
        total = tw.f32(0)
        for j in range(T):
            if j <= pos[0] + i and j > pos[0] + i - size:
                s = tw.f32(0)
                for d in range(D):
                    s += q[i, h, d] * k[j, h // G, d]
                total += tw.exp(s * scale - m)
        for e in range(D):
            o = tw.f32(0)
            for j in range(T):
                if j <= pos[0] + i and j > pos[0] + i - size:
                    s = tw.f32(0)
                    for d in range(D):
                        s += q[i, h, d] * k[j, h // G, d]
                    o += tw.exp(s * scale - m) * v[j, h // G, e]
            out[i, h, e] = o / total
    return out


@tw.kernel
def up_to_each(q: tw.Array, k: tw.Array, v: tw.Array, pos: tw.Array) -> tw.Array:
    """Some tokens, by ranges: the i-th sees all up to itself."""
    S, H, D = q.shape
    G = H // k.shape[1]
    scale = 1.0 / tw.sqrt(tw.f32(D))
    out = tw.empty((S, H, D), q.dtype)
    for i, h in tw.grid(S, H):
        n = pos[0] + i + 1
        m = -tw.inf
        for j in range(n):
            s = tw.f32(0)
            for d in range(D):
                s += q[i, h, d] * k[j, h // G, d]
            m = max(m, s * scale)
        total = tw.f32(0)
        for j in range(n):
            s = tw.f32(0)
            for d in range(D):
                s += q[i, h, d] * k[j, h // G, d]
            total += tw.exp(s * scale - m)
        for e in range(D):
            o = tw.f32(0)
            for j in range(n):
                s = tw.f32(0)
                for d in range(D):
                    s += q[i, h, d] * k[j, h // G, d]
                o += tw.exp(s * scale - m) * v[j, h // G, e]
            out[i, h, e] = o / total
    return out


@tw.kernel
def paged(q: tw.Array, k: tw.Array, v: tw.Array, table: tw.Array, lengths: tw.Array) -> tw.Array:
    """Keys and values in pages, which a table lists for each sequence."""
    B, H, D = q.shape
    P = k.shape[1]
    G = H // k.shape[2]
    scale = 1.0 / tw.sqrt(tw.f32(D))
    out = tw.empty((B, H, D), q.dtype)
    for b, h in tw.grid(B, H):
        n = lengths[b]
        m = -tw.inf
        for j in range(n):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, d] * k[table[b, j // P], j % P, h // G, d]
            m = max(m, s * scale)
        total = tw.f32(0)
        for j in range(n):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, d] * k[table[b, j // P], j % P, h // G, d]
            total += tw.exp(s * scale - m)
        for e in range(D):
            o = tw.f32(0)
            for j in range(n):
                s = tw.f32(0)
                for d in range(D):
                    s += q[b, h, d] * k[table[b, j // P], j % P, h // G, d]
                o += tw.exp(s * scale - m) * v[table[b, j // P], j % P, h // G, e]
            out[b, h, e] = o / total
    return out


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, low: int, high: int, scale: float | None = None) -> np.ndarray:
    """What one token, q [H, D], sees of keys [T, KH, D] from `low` to `high`, in float64; zeros where it sees none."""
    group = q.shape[0] // k.shape[1]
    low, high = max(low, 0), max(min(high, k.shape[0]), 0)
    out = np.zeros((q.shape[0], v.shape[2]))
    for h in range(q.shape[0] if high > low else 0):
        scores = k[low:high, h // group].astype(np.float64) @ q[h].astype(np.float64)
        scores = scores * (scale if scale is not None else q.shape[1] ** -0.5)
        weights = np.exp(scores - scores.max())
        out[h] = weights / weights.sum() @ v[low:high, h // group].astype(np.float64)
    return out
