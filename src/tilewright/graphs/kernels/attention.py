"""Kernels of attention over a cache: rotary positions, appending rows, and queries against keys and values.

Arrays have a row for each token: queries are [sequence, token, group, head of the group, feature], keys and values [sequence, position, group, feature].
Positions lie in device memory: `positions[s]` is the position of the first token of sequence `s`. Pages: `table[s, j // size]` is the page that has
position `j`, and caches are [page, position in the page, group, feature].

Caches of packed blocks (`q8_0`) come as their bytes, [sequence, position, group, block, 34]: a scale in f16, then 32 numbers. They are written and read as such, so that
a program knows them as one array.
"""

from __future__ import annotations

import functools
from typing import Any

from tilewright.base.dtypes import DType, f16, f32, i8, u8, u16
from tilewright.execute.kernel import Kernel, kernel
from tilewright.frontend import words as tw


@kernel
def rope(x: tw.Array, positions: tw.Array, frequencies: tw.Array) -> tw.Array:
    """The first half of the features turned against the second half."""
    sequences, tokens, heads, depth = x.shape
    half = depth // 2
    out = tw.empty((sequences, tokens, heads, depth), x.dtype)
    for s, t, h, d in tw.grid(sequences, tokens, heads, depth):
        angle = tw.cast(positions[s] + t, f32) * frequencies[d % half]
        turned = x[s, t, h, (d + half) % depth] * tw.sin(angle)
        out[s, t, h, d] = x[s, t, h, d] * tw.cos(angle) + (turned if d >= half else -turned)
    return out


@kernel
def rope_pairs(x: tw.Array, positions: tw.Array, frequencies: tw.Array) -> tw.Array:
    """Neighbouring features turned against each other."""
    sequences, tokens, heads, depth = x.shape
    out = tw.empty((sequences, tokens, heads, depth), x.dtype)
    for s, t, h, d in tw.grid(sequences, tokens, heads, depth):
        angle = tw.cast(positions[s] + t, f32) * frequencies[d // 2]
        turned = x[s, t, h, d // 2 * 2 + (d + 1) % 2] * tw.sin(angle)
        out[s, t, h, d] = x[s, t, h, d] * tw.cos(angle) + (turned if d % 2 == 1 else -turned)
    return out


@kernel
def append(cache: tw.InOut, rows: tw.Array, positions: tw.Array) -> None:
    """Rows of new tokens go to their positions."""
    sequences, tokens, heads, depth = rows.shape
    for s, t, h, d in tw.grid(sequences, tokens, heads, depth):
        cache[s, positions[s] + t, h, d] = rows[s, t, h, d]


@kernel
def append_paged(cache: tw.InOut, rows: tw.Array, positions: tw.Array, table: tw.Array) -> None:
    """Rows of new tokens go to the pages of their positions."""
    sequences, tokens, heads, depth = rows.shape
    size = cache.shape[1]
    for h, d in tw.grid(heads, depth):
        for s in range(sequences):  # in order: nothing says that sequences have pages of their own
            for t in range(tokens):
                cache[table[s, (positions[s] + t) // size], (positions[s] + t) % size, h, d] = rows[s, t, h, d]


@kernel
def append_q8(cache: tw.InOut, rows: tw.Array, positions: tw.Array) -> None:
    """Rows of new tokens go to their positions, rounded block by block as `tw.quantize` does."""
    sequences, tokens = rows.shape[0], rows.shape[1]
    heads, blocks = cache.shape[2], cache.shape[3]
    for s, t, h, b in tw.grid(sequences, tokens, heads, blocks):
        most = 0.0
        for e in range(32):
            most = max(most, abs(tw.cast(rows[s, t, h, 32 * b + e], f32)))
        scale = most / 127.0
        inverse = 1.0 / scale if scale > 0.0 else 0.0
        bits = tw.bitcast(tw.cast(scale, f16), u16)
        cache[s, positions[s] + t, h, b, 0] = tw.cast(bits % 256, u8)
        cache[s, positions[s] + t, h, b, 1] = tw.cast(bits // 256, u8)
        for e in range(32):
            x = rows[s, t, h, 32 * b + e] * inverse
            down = tw.floor(abs(x))
            size = down + tw.floor(2.0 * (abs(x) - down))
            cache[s, positions[s] + t, h, b, e + 2] = tw.cast(tw.cast(size if x > 0.0 else -size, i8), u8)


@kernel
def append_q8_paged(cache: tw.InOut, rows: tw.Array, positions: tw.Array, table: tw.Array) -> None:
    """The same, to the pages of their positions."""
    sequences, tokens = rows.shape[0], rows.shape[1]
    size, heads, blocks = cache.shape[1], cache.shape[2], cache.shape[3]
    for h, b in tw.grid(heads, blocks):
        for s in range(sequences):  # in order: nothing says that sequences have pages of their own
            for t in range(tokens):
                most = 0.0
                for e in range(32):
                    most = max(most, abs(tw.cast(rows[s, t, h, 32 * b + e], f32)))
                scale = most / 127.0
                inverse = 1.0 / scale if scale > 0.0 else 0.0
                bits = tw.bitcast(tw.cast(scale, f16), u16)
                page, place = table[s, (positions[s] + t) // size], (positions[s] + t) % size
                cache[page, place, h, b, 0] = tw.cast(bits % 256, u8)
                cache[page, place, h, b, 1] = tw.cast(bits // 256, u8)
                for e in range(32):
                    x = rows[s, t, h, 32 * b + e] * inverse
                    down = tw.floor(abs(x))
                    number = down + tw.floor(2.0 * (abs(x) - down))
                    cache[page, place, h, b, e + 2] = tw.cast(tw.cast(number if x > 0.0 else -number, i8), u8)


@kernel
def attention(q: tw.Array, k: tw.Array, v: tw.Array, scale: float) -> tw.Array:
    """Every query sees all keys."""
    sequences, tokens, groups, heads, depth = q.shape
    length = k.shape[1]
    out = tw.empty((sequences, tokens, groups, heads, depth), q.dtype)
    for s, g, h, i in tw.grid(sequences, groups, heads, tokens):
        most = -tw.inf
        for j in range(length):
            score = 0.0
            for d in range(depth):
                score += q[s, i, g, h, d] * k[s, j, g, d]
            most = max(most, score * scale)
        total = 0.0
        for j in range(length):
            score = 0.0
            for d in range(depth):
                score += q[s, i, g, h, d] * k[s, j, g, d]
            total += tw.exp(score * scale - most)
        for e in range(depth):
            mixed = 0.0
            for j in range(length):
                score = 0.0
                for d in range(depth):
                    score += q[s, i, g, h, d] * k[s, j, g, d]
                mixed += tw.exp(score * scale - most) * v[s, j, g, e]
            out[s, i, g, h, e] = mixed / total
    return out


@kernel
def attention_causal(q: tw.Array, k: tw.Array, v: tw.Array, scale: float) -> tw.Array:
    """A query sees the keys up to its own place."""
    sequences, tokens, groups, heads, depth = q.shape
    out = tw.empty((sequences, tokens, groups, heads, depth), q.dtype)
    for s, g, h, i in tw.grid(sequences, groups, heads, tokens):
        most = -tw.inf
        for j in range(i + 1):
            score = 0.0
            for d in range(depth):
                score += q[s, i, g, h, d] * k[s, j, g, d]
            most = max(most, score * scale)
        total = 0.0
        for j in range(i + 1):
            score = 0.0
            for d in range(depth):
                score += q[s, i, g, h, d] * k[s, j, g, d]
            total += tw.exp(score * scale - most)
        for e in range(depth):
            mixed = 0.0
            for j in range(i + 1):
                score = 0.0
                for d in range(depth):
                    score += q[s, i, g, h, d] * k[s, j, g, d]
                mixed += tw.exp(score * scale - most) * v[s, j, g, e]
            out[s, i, g, h, e] = mixed / total
    return out


@kernel
def attention_cached(q: tw.Array, k: tw.Array, v: tw.Array, positions: tw.Array, scale: float) -> tw.Array:
    """A query sees the cache up to its own position."""
    sequences, tokens, groups, heads, depth = q.shape
    out = tw.empty((sequences, tokens, groups, heads, depth), q.dtype)
    for s, g, i, h in tw.grid(sequences, groups, tokens, heads):
        n = int(positions[s]) + i + 1
        most = -tw.inf
        for j in range(n):
            score = 0.0
            for d in range(depth):
                score += q[s, i, g, h, d] * k[s, j, g, d]
            most = max(most, score * scale)
        total = 0.0
        for j in range(n):
            score = 0.0
            for d in range(depth):
                score += q[s, i, g, h, d] * k[s, j, g, d]
            total += tw.exp(score * scale - most)
        for e in range(depth):
            mixed = 0.0
            for j in range(n):
                score = 0.0
                for d in range(depth):
                    score += q[s, i, g, h, d] * k[s, j, g, d]
                mixed += tw.exp(score * scale - most) * v[s, j, g, e]
            out[s, i, g, h, e] = mixed / total
    return out


@functools.cache
def attention_window(dtype: DType) -> Kernel[..., Any]:
    """A query sees its own position in the cache, and those before it: `window` in all. The result has that dtype."""

    @kernel
    def attended(q: tw.Array, k: tw.Array, v: tw.Array, positions: tw.Array, window: int, scale: float) -> tw.Array:
        """A query sees its own position in the cache, and those before it: `window` in all."""
        sequences, tokens, groups, heads, depth = q.shape
        length = k.shape[1]
        out = tw.empty((sequences, tokens, groups, heads, depth), dtype)
        for s, g, i, h in tw.grid(sequences, groups, tokens, heads):
            most = -tw.inf
            for j in range(length):
                if j <= positions[s] + i and j > positions[s] + i - window:
                    score = 0.0
                    for d in range(depth):
                        score += q[s, i, g, h, d] * k[s, j, g, d]
                    most = max(most, score * scale)
            total = 0.0
            for j in range(length):
                if j <= positions[s] + i and j > positions[s] + i - window:
                    score = 0.0
                    for d in range(depth):
                        score += q[s, i, g, h, d] * k[s, j, g, d]
                    total += tw.exp(score * scale - most)
            for e in range(depth):
                mixed = 0.0
                for j in range(length):
                    if j <= positions[s] + i and j > positions[s] + i - window:
                        score = 0.0
                        for d in range(depth):
                            score += q[s, i, g, h, d] * k[s, j, g, d]
                        mixed += tw.exp(score * scale - most) * v[s, j, g, e]
                out[s, i, g, h, e] = mixed / total
        return out

    return attended


@kernel
def attention_lengths(q: tw.Array, k: tw.Array, v: tw.Array, lengths: tw.Array, scale: float) -> tw.Array:
    """Every query sees the first keys of its sequence, as many as count."""
    sequences, tokens, groups, heads, depth = q.shape
    length = k.shape[1]
    out = tw.empty((sequences, tokens, groups, heads, depth), q.dtype)
    for s, g, h, i in tw.grid(sequences, groups, heads, tokens):
        most = -tw.inf
        for j in range(length):
            if j < lengths[s]:
                score = 0.0
                for d in range(depth):
                    score += q[s, i, g, h, d] * k[s, j, g, d]
                most = max(most, score * scale)
        total = 0.0
        for j in range(length):
            if j < lengths[s]:
                score = 0.0
                for d in range(depth):
                    score += q[s, i, g, h, d] * k[s, j, g, d]
                total += tw.exp(score * scale - most)
        for e in range(depth):
            mixed = 0.0
            for j in range(length):
                if j < lengths[s]:
                    score = 0.0
                    for d in range(depth):
                        score += q[s, i, g, h, d] * k[s, j, g, d]
                    mixed += tw.exp(score * scale - most) * v[s, j, g, e]
            out[s, i, g, h, e] = mixed / total
    return out


@kernel
def attention_paged(q: tw.Array, k: tw.Array, v: tw.Array, positions: tw.Array, table: tw.Array, scale: float) -> tw.Array:
    """A query sees the pages of its sequence up to its own position."""
    sequences, tokens, groups, heads, depth = q.shape
    size = k.shape[1]
    out = tw.empty((sequences, tokens, groups, heads, depth), q.dtype)
    for s, g, i, h in tw.grid(sequences, groups, tokens, heads):
        n = int(positions[s]) + i + 1
        most = -tw.inf
        for j in range(n):
            score = 0.0
            for d in range(depth):
                score += q[s, i, g, h, d] * k[table[s, j // size], j % size, g, d]
            most = max(most, score * scale)
        total = 0.0
        for j in range(n):
            score = 0.0
            for d in range(depth):
                score += q[s, i, g, h, d] * k[table[s, j // size], j % size, g, d]
            total += tw.exp(score * scale - most)
        for e in range(depth):
            mixed = 0.0
            for j in range(n):
                score = 0.0
                for d in range(depth):
                    score += q[s, i, g, h, d] * k[table[s, j // size], j % size, g, d]
                mixed += tw.exp(score * scale - most) * v[table[s, j // size], j % size, g, e]
            out[s, i, g, h, e] = mixed / total
    return out


@kernel
def attention_q8(q: tw.Array, k: tw.Array, v: tw.Array, positions: tw.Array, scale: float) -> tw.Array:
    """A query sees a packed cache up to its own position."""
    sequences, tokens, groups, heads, _ = q.shape
    depth = 32 * k.shape[3]
    out = tw.empty((sequences, tokens, groups, heads, depth), q.dtype)
    for s, g, i, h in tw.grid(sequences, groups, tokens, heads):
        n = int(positions[s]) + i + 1
        most = -tw.inf
        for j in range(n):
            score = 0.0
            for d in range(depth):
                bits = tw.cast(k[s, j, g, d // 32, 0], u16) + tw.cast(k[s, j, g, d // 32, 1], u16) * 256
                score += q[s, i, g, h, d] * (tw.cast(tw.cast(k[s, j, g, d // 32, d % 32 + 2], i8), f32) * tw.cast(tw.bitcast(bits, f16), f32))
            most = max(most, score * scale)
        total = 0.0
        for j in range(n):
            score = 0.0
            for d in range(depth):
                bits = tw.cast(k[s, j, g, d // 32, 0], u16) + tw.cast(k[s, j, g, d // 32, 1], u16) * 256
                score += q[s, i, g, h, d] * (tw.cast(tw.cast(k[s, j, g, d // 32, d % 32 + 2], i8), f32) * tw.cast(tw.bitcast(bits, f16), f32))
            total += tw.exp(score * scale - most)
        for e in range(depth):
            mixed = 0.0
            for j in range(n):
                score = 0.0
                for d in range(depth):
                    bits = tw.cast(k[s, j, g, d // 32, 0], u16) + tw.cast(k[s, j, g, d // 32, 1], u16) * 256
                    score += q[s, i, g, h, d] * (tw.cast(tw.cast(k[s, j, g, d // 32, d % 32 + 2], i8), f32) * tw.cast(tw.bitcast(bits, f16), f32))
                own = tw.cast(v[s, j, g, e // 32, 0], u16) + tw.cast(v[s, j, g, e // 32, 1], u16) * 256
                mixed += tw.exp(score * scale - most) * (tw.cast(tw.cast(v[s, j, g, e // 32, e % 32 + 2], i8), f32) * tw.cast(tw.bitcast(own, f16), f32))
            out[s, i, g, h, e] = mixed / total
    return out


@kernel
def attention_q8_paged(q: tw.Array, k: tw.Array, v: tw.Array, positions: tw.Array, table: tw.Array, scale: float) -> tw.Array:
    """A query sees packed pages of its sequence up to its own position."""
    sequences, tokens, groups, heads, _ = q.shape
    depth = 32 * k.shape[3]
    size = k.shape[1]
    out = tw.empty((sequences, tokens, groups, heads, depth), q.dtype)
    for s, g, i, h in tw.grid(sequences, groups, tokens, heads):
        n = int(positions[s]) + i + 1
        most = -tw.inf
        for j in range(n):
            score = 0.0
            for d in range(depth):
                bits = tw.cast(k[table[s, j // size], j % size, g, d // 32, 0], u16) + tw.cast(k[table[s, j // size], j % size, g, d // 32, 1], u16) * 256
                score += q[s, i, g, h, d] * (tw.cast(tw.cast(k[table[s, j // size], j % size, g, d // 32, d % 32 + 2], i8), f32) * tw.cast(tw.bitcast(bits, f16), f32))
            most = max(most, score * scale)
        total = 0.0
        for j in range(n):
            score = 0.0
            for d in range(depth):
                bits = tw.cast(k[table[s, j // size], j % size, g, d // 32, 0], u16) + tw.cast(k[table[s, j // size], j % size, g, d // 32, 1], u16) * 256
                score += q[s, i, g, h, d] * (tw.cast(tw.cast(k[table[s, j // size], j % size, g, d // 32, d % 32 + 2], i8), f32) * tw.cast(tw.bitcast(bits, f16), f32))
            total += tw.exp(score * scale - most)
        for e in range(depth):
            mixed = 0.0
            for j in range(n):
                score = 0.0
                for d in range(depth):
                    bits = tw.cast(k[table[s, j // size], j % size, g, d // 32, 0], u16) + tw.cast(k[table[s, j // size], j % size, g, d // 32, 1], u16) * 256
                    score += q[s, i, g, h, d] * (tw.cast(tw.cast(k[table[s, j // size], j % size, g, d // 32, d % 32 + 2], i8), f32) * tw.cast(tw.bitcast(bits, f16), f32))
                own = tw.cast(v[table[s, j // size], j % size, g, e // 32, 0], u16) + tw.cast(v[table[s, j // size], j % size, g, e // 32, 1], u16) * 256
                mixed += tw.exp(score * scale - most) * (tw.cast(tw.cast(v[table[s, j // size], j % size, g, e // 32, e % 32 + 2], i8), f32) * tw.cast(tw.bitcast(own, f16), f32))
            out[s, i, g, h, e] = mixed / total
    return out
