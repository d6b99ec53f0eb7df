"""Attention that may leave rows without any key, in the ways people mask; the tests on each device share them."""

from __future__ import annotations

import numpy as np

import tilewright as tw


@tw.kernel
def hidden(q, k, v, mask):
    """Scores of -inf; the logarithm of the sum too."""
    heads, length, width = q.shape
    out = tw.empty((heads, length, width), q.dtype)
    logarithm = tw.empty((heads, length), tw.f32)
    for h, i in tw.grid(heads, length):
        m = -tw.inf
        for j in range(length):
            m = max(m, tw.where(mask[i, j], tw.dot(q[h, i], k[h, j]) * 0.125, -tw.inf))
        total = 0.0
        for j in range(length):
            total += tw.exp(tw.where(mask[i, j], tw.dot(q[h, i], k[h, j]) * 0.125, -tw.inf) - m)
        logarithm[h, i] = m + tw.log(total)
        for e in range(width):
            o = 0.0
            for j in range(length):
                o += tw.exp(tw.where(mask[i, j], tw.dot(q[h, i], k[h, j]) * 0.125, -tw.inf) - m) * v[h, j, e]
            out[h, i, e] = o / total
    return out, logarithm


@tw.kernel
def left_out(q, k, v, mask):
    """Conditions around the terms, which are divided before they are summed."""
    heads, length, width = q.shape
    out = tw.empty((heads, length, width), q.dtype)
    for h, i in tw.grid(heads, length):
        m = -tw.inf
        for j in range(length):
            if mask[i, j]:
                m = max(m, tw.dot(q[h, i], k[h, j]) * 0.125)
        total = 0.0
        for j in range(length):
            if mask[i, j]:
                total += tw.exp(tw.dot(q[h, i], k[h, j]) * 0.125 - m)
        for e in range(width):
            o = 0.0
            for j in range(length):
                if mask[i, j]:
                    o += tw.exp(tw.dot(q[h, i], k[h, j]) * 0.125 - m) / total * v[h, j, e]
            out[h, i, e] = o
    return out


@tw.kernel
def earlier(q, k, v):
    """Only keys before the row: none for the first. Multiplied by the inverse of the sum."""
    heads, length, width = q.shape
    out = tw.empty((heads, length, width), q.dtype)
    for h, i in tw.grid(heads, length):
        m = -tw.inf
        for j in range(i):
            m = max(m, tw.dot(q[h, i], k[h, j]) * 0.125)
        total = 0.0
        for j in range(i):
            total += tw.exp(tw.dot(q[h, i], k[h, j]) * 0.125 - m)
        for e in range(width):
            o = 0.0
            for j in range(i):
                o += tw.exp(tw.dot(q[h, i], k[h, j]) * 0.125 - m) * v[h, j, e]
            out[h, i, e] = o * (1.0 / total)
    return out


@tw.kernel
def tiled(q, k, v, mask):
    """Over tiles, with a running maximum."""
    heads, length, width = q.shape
    out = tw.empty((heads, length, width), q.dtype)
    for h, block in tw.grid(heads, range(0, length, 32)):
        m = -tw.inf
        total = 0.0
        o = tw.zeros((32, width))
        for kv in range(0, length, 32):
            scores = q[h, block : block + 32] @ tw.transpose(k[h, kv : kv + 32]) * 0.125
            s = tw.where(mask[block : block + 32, kv : kv + 32], scores, -tw.inf)
            m_new = tw.maximum(m, tw.row_max(s))
            total = tw.exp(m - m_new) * total + tw.row_sum(tw.exp(s - m_new))
            o = tw.exp(m - m_new) * o + tw.exp(s - m_new) @ v[h, kv : kv + 32]
            m = m_new
        out[h, block : block + 32] = o / total
    return out


@tw.kernel
def careful(q, k, v, mask):
    """What a careful author writes."""
    heads, length, width = q.shape
    out = tw.empty((heads, length, width), q.dtype)
    for h, i in tw.grid(heads, length):
        m = -tw.inf
        for j in range(length):
            m = max(m, tw.where(mask[i, j], tw.dot(q[h, i], k[h, j]) * 0.125, -tw.inf))
        shift = tw.where(m == -tw.inf, 0.0, m)
        total = 0.0
        for j in range(length):
            total += tw.exp(tw.where(mask[i, j], tw.dot(q[h, i], k[h, j]) * 0.125, -tw.inf) - shift)
        for e in range(width):
            o = 0.0
            for j in range(length):
                o += tw.exp(tw.where(mask[i, j], tw.dot(q[h, i], k[h, j]) * 0.125, -tw.inf) - shift) * v[h, j, e]
            out[h, i, e] = tw.where(total == 0.0, 0.0, o / total)
    return out


MASKED = (hidden, left_out, tiled, careful)
"""Those that take a mask."""


def problem(length: int, width: int, dtype: object, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys, values and a mask: its first row hides all, and so do others; a row with a NaN among its scores sees some."""
    rng = np.random.default_rng(1000 * seed + length)
    q, k, v = (rng.standard_normal((2, length, width)).astype(dtype) for _ in range(3))
    mask = rng.random((length, length)) < 0.3
    mask[::3] = False
    if length > 2:
        mask[1] = True
        q[0, 1, 0] = np.nan
    return q, k, v, mask


def wanted(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """In f64: zeros where nothing is seen."""
    score = np.where(mask, q.astype(np.float64) @ k.astype(np.float64).swapaxes(1, 2) * 0.125, -np.inf)
    top = score.max(-1, keepdims=True)
    weights = np.exp(score - np.where(top == -np.inf, 0.0, top))
    total = weights.sum(-1, keepdims=True)
    return weights @ v.astype(np.float64) / np.where(total == 0, 1.0, total)
