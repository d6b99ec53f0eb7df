"""Attention in plain loops, written in the ways people write it; the tests of recognising and of running it share them."""

from __future__ import annotations

import math

import numpy as np

import tilewright as tw


@tw.kernel
def plain(q: tw.Array, k: tw.Array, v: tw.Array, scale: tw.f32) -> tw.Array:
    B, H, S, D = q.shape
    T = k.shape[2]
    E = v.shape[3]
    out = tw.empty((B, H, S, E), q.dtype)
    for b, h, i in tw.grid(B, H, S):
        m = -tw.inf
        for j in range(T):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, i, d] * k[b, h, j, d]
            m = max(m, s * scale)
        total = tw.f32(0)
        for j in range(T):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, i, d] * k[b, h, j, d]
            total += tw.exp(s * scale - m)
        for e in range(E):
            o = tw.f32(0)
            for j in range(T):
                s = tw.f32(0)
                for d in range(D):
                    s += q[b, h, i, d] * k[b, h, j, d]
                o += tw.exp(s * scale - m) * v[b, h, j, e]
            out[b, h, i, e] = o / total
    return out


@tw.kernel
def grouped_causal(q: tw.Array, k: tw.Array, v: tw.Array, scale: tw.f32) -> tw.Array:
    """Conditions around the terms, fewer heads of keys than of queries, weights divided before they are summed."""
    B, H, S, D = q.shape
    T = k.shape[2]
    E = v.shape[3]
    G = H // k.shape[1]
    out = tw.empty((B, H, S, E), q.dtype)
    for b, h, i in tw.grid(B, H, S):
        m = -tw.inf
        for j in range(T):
            if j <= i:
                s = tw.f32(0)
                for d in range(D):
                    s += q[b, h, i, d] * k[b, h // G, j, d]
                m = max(m, s * scale)
        total = tw.f32(0)
        for j in range(T):
            if j <= i:
                s = tw.f32(0)
                for d in range(D):
                    s += q[b, h, i, d] * k[b, h // G, j, d]
                total += tw.exp(s * scale - m)
        for e in range(E):
            o = tw.f32(0)
            for j in range(T):
                if j <= i:
                    s = tw.f32(0)
                    for d in range(D):
                        s += q[b, h, i, d] * k[b, h // G, j, d]
                    o += tw.exp(s * scale - m) / total * v[b, h // G, j, e]
            out[b, h, i, e] = o
    return out


@tw.kernel
def ranged(q: tw.Array, k: tw.Array, v: tw.Array) -> tw.Array:
    """The columns are one of the parallel indices, and rows end by the loop's range."""
    B, H, S, D = q.shape
    E = v.shape[3]
    scale = 1.0 / tw.sqrt(tw.f32(D))
    out = tw.empty((B, H, S, E), q.dtype)
    for b, h, i, e in tw.grid(B, H, S, E):
        m = -tw.inf
        for j in range(i + 1):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, i, d] * k[b, h, j, d]
            m = max(m, scale * s)
        total = tw.f32(0)
        for j in range(i + 1):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, i, d] * k[b, h, j, d]
            total += tw.exp(scale * s - m)
        o = tw.f32(0)
        for j in range(i + 1):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, i, d] * k[b, h, j, d]
            o += v[b, h, j, e] * tw.exp(s * scale - m)
        out[b, h, i, e] = o / total
    return out


@tw.kernel
def before(q: tw.Array, k: tw.Array, v: tw.Array) -> tw.Array:
    """Keys strictly before the row, which leaves none for the first: the text says what it gets then."""
    B, H, S, D = q.shape
    T = k.shape[2]
    E = v.shape[3]
    out = tw.empty((B, H, S, E), q.dtype)
    for b, h, i in tw.grid(B, H, S):
        m = -tw.inf
        for j in range(T):
            if j < i:
                s = tw.f32(0)
                for d in range(D):
                    s += q[b, h, i, d] * k[b, h, j, d]
                m = max(m, s)
        total = tw.f32(0)
        for j in range(T):
            if j < i:
                s = tw.f32(0)
                for d in range(D):
                    s += q[b, h, i, d] * k[b, h, j, d]
                total += tw.exp(s - m)
        for e in range(E):
            o = tw.f32(0)
            for j in range(T):
                if j < i:
                    s = tw.f32(0)
                    for d in range(D):
                        s += q[b, h, i, d] * k[b, h, j, d]
                    o += tw.exp(s - m) * v[b, h, j, e]
            out[b, h, i, e] = tw.where(total > 0, o / total, 7.0)
    return out


@tw.kernel
def masked(q: tw.Array, k: tw.Array, v: tw.Array, mask: tw.Array, scale: tw.f32) -> tw.Array:
    B, H, S, D = q.shape
    T = k.shape[2]
    E = v.shape[3]
    out = tw.empty((B, H, S, E), q.dtype)
    for b, h, i in tw.grid(B, H, S):
        m = -tw.inf
        for j in range(T):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, i, d] * k[b, h, j, d]
            m = max(m, tw.where(mask[i, j] > 0, s * scale, -tw.inf))
        total = tw.f32(0)
        for j in range(T):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, i, d] * k[b, h, j, d]
            total += tw.exp(tw.where(mask[i, j] > 0, s * scale, -tw.inf) - m)
        for e in range(E):
            o = tw.f32(0)
            for j in range(T):
                s = tw.f32(0)
                for d in range(D):
                    s += q[b, h, i, d] * k[b, h, j, d]
                o += tw.exp(tw.where(mask[i, j] > 0, s * scale, -tw.inf) - m) * v[b, h, j, e]
            out[b, h, i, e] = o / total
    return out


@tw.kernel
def biased(q: tw.Array, k: tw.Array, v: tw.Array, bias: tw.Array) -> tw.Array:
    B, H, S, D = q.shape
    T = k.shape[2]
    E = v.shape[3]
    scale = 1.0 / tw.sqrt(tw.f32(D))
    out = tw.empty((B, H, S, E), q.dtype)
    for b, h, i in tw.grid(B, H, S):
        m = -tw.inf
        for j in range(T):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, i, d] * k[b, h, j, d]
            m = max(m, s * scale + bias[h, i, j])
        total = tw.f32(0)
        for j in range(T):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, i, d] * k[b, h, j, d]
            total += tw.exp(s * scale + bias[h, i, j] - m)
        for e in range(E):
            o = tw.f32(0)
            for j in range(T):
                s = tw.f32(0)
                for d in range(D):
                    s += q[b, h, i, d] * k[b, h, j, d]
                o += tw.exp(s * scale + bias[h, i, j] - m) * v[b, h, j, e]
            out[b, h, i, e] = o / total
    return out


@tw.kernel
def with_logarithm(q: tw.Array, k: tw.Array, v: tw.Array, scale: tw.f32) -> tuple[tw.Array, tw.Array]:
    """The logarithm of the sum too, for which the maximum is needed itself."""
    B, H, S, D = q.shape
    T = k.shape[2]
    E = v.shape[3]
    out = tw.empty((B, H, S, E), q.dtype)
    lse = tw.empty((B, H, S), tw.f32)
    for b, h, i in tw.grid(B, H, S):
        m = -tw.inf
        for j in range(T):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, i, d] * k[b, h, j, d]
            m = max(m, s * scale)
        total = tw.f32(0)
        for j in range(T):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, i, d] * k[b, h, j, d]
            total += tw.exp(s * scale - m)
        lse[b, h, i] = m + tw.log(total)
        for e in range(E):
            o = tw.f32(0)
            for j in range(T):
                s = tw.f32(0)
                for d in range(D):
                    s += q[b, h, i, d] * k[b, h, j, d]
                o += tw.exp(s * scale - m) * v[b, h, j, e]
            out[b, h, i, e] = o / total
    return out, lse


@tw.kernel
def rows_first(q: tw.Array, k: tw.Array, v: tw.Array) -> tw.Array:
    """Heads side by side in a row, masked by the last thing done to the score, with a result of f32."""
    B, S, H, D = q.shape
    T = k.shape[1]
    E = v.shape[3]
    out = tw.empty((B, S, H, E), tw.f32)
    for b, h, i in tw.grid(B, H, S):
        m = -tw.inf
        for j in range(T):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, i, h, d] * k[b, j, h, d]
            m = max(m, tw.where(j <= i + 3, s / 8.0, -tw.inf))
        total = tw.f32(0)
        for j in range(T):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, i, h, d] * k[b, j, h, d]
            total += tw.exp(tw.where(j <= i + 3, s / 8.0, -tw.inf) - m)
        for e in range(E):
            o = tw.f32(0)
            for j in range(T):
                s = tw.f32(0)
                for d in range(D):
                    s += q[b, i, h, d] * k[b, j, h, d]
                o += tw.exp(tw.where(j <= i + 3, s / 8.0, -tw.inf) - m) * v[b, j, h, e]
            out[b, i, h, e] = o / total
    return out


def scores(q: np.ndarray, k: np.ndarray, scale: float | None = None) -> np.ndarray:
    """In f64, with as many heads as the queries have."""
    k = np.repeat(k.astype(np.float64), q.shape[1] // k.shape[1], 1)
    return np.einsum("bhid,bhjd->bhij", q.astype(np.float64), k) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)


def attend(score: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Softmax and weighted sum in f64, as the text has them."""
    v = np.repeat(v.astype(np.float64), score.shape[1] // v.shape[1], 1)
    with np.errstate(all="ignore"):
        p = np.exp(score - score.max(-1, keepdims=True, initial=-np.inf))
        return np.einsum("bhij,bhje->bhie", p, v) / p.sum(-1, keepdims=True)


def attend_in_chains(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Attention as loops in f32 have it: scores and weighted values are sums of multiply-adds, one after the other."""
    chain = np.zeros((*q.shape[:-1], k.shape[-2]), np.float32)
    for d in range(q.shape[-1]):
        chain = (chain + q[..., None, d].astype(np.float64) * k[:, :, None, :, d]).astype(np.float32)
    scaled = (chain * np.float32(scale)).astype(np.float32)
    weights = np.exp(scaled - scaled.max(-1, keepdims=True)).astype(np.float32)
    mixed, total = np.zeros((*q.shape[:-1], v.shape[-1]), np.float32), np.zeros((*q.shape[:-1], 1), np.float32)
    for j in range(k.shape[-2]):
        mixed = (mixed + weights[..., j, None].astype(np.float64) * v[:, :, None, j]).astype(np.float32)
        total += weights[..., j, None]
    return mixed / total
