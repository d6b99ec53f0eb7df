"""Kernels of attention over a cache: rotary positions, appending rows, and queries against keys and values.

Arrays have a row for each token: queries are [sequence, token, group, head of the group, feature], keys and values [sequence, position, group, feature].
Positions lie in device memory: `positions[s]` is the position of the first token of sequence `s`. Pages: `table[s, j // size]` is the page that has
position `j`, and caches are [page, position in the page, group, feature].
"""

from __future__ import annotations

from tilewright.base.dtypes import f32
from tilewright.execute.kernel import kernel
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


@kernel
def attention_window(q: tw.Array, k: tw.Array, v: tw.Array, positions: tw.Array, window: int, scale: float) -> tw.Array:
    """A query sees its own position in the cache, and those before it: `window` in all."""
    sequences, tokens, groups, heads, depth = q.shape
    length = k.shape[1]
    out = tw.empty((sequences, tokens, groups, heads, depth), q.dtype)
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
