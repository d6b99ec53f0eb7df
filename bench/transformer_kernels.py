"""The layers of transformers that are measured, as a user would write them: plain loop nests, the same on the CPU and the GPU.

Rows are [row, column], attention is [batch, head, position, feature], rotary positions are [batch, position, head, feature]. The
kernels of a whole block are those of `examples/transformer.py`.
"""

from __future__ import annotations

import tilewright as tw

# -- rows -----------------------------------------------------------------------------------------------------------


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        most = -tw.inf
        for j in range(c):
            most = max(most, x[i, j])
        total = tw.f32(0)
        for j in range(c):
            total += tw.exp(x[i, j] - most)
        for j in range(c):
            out[i, j] = tw.exp(x[i, j] - most) / total
    return out


@tw.kernel
def layer_norm(x: tw.Array, gain: tw.Array, shift: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        total = tw.f32(0)
        for j in range(c):
            total += x[i, j]
        mean = total / c
        spread = tw.f32(0)
        for j in range(c):
            d = x[i, j] - mean
            spread += d * d
        inverse = 1 / tw.sqrt(spread / c + 1e-5)
        for j in range(c):
            out[i, j] = (x[i, j] - mean) * inverse * gain[j] + shift[j]
    return out


@tw.kernel
def rms_norm(x: tw.Array, gain: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        squares = tw.f32(0)
        for j in range(c):
            squares += tw.f32(x[i, j]) * x[i, j]
        inverse = 1 / tw.sqrt(squares / c + 1e-5)
        for j in range(c):
            out[i, j] = x[i, j] * inverse * gain[j]
    return out


@tw.kernel
def residual_norm_gate(x: tw.Array, residual: tw.Array, gain: tw.Array, gate: tw.Array) -> tw.Array:
    """rms_norm(x + residual) * gain * silu(gate)."""
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        squares = tw.f32(0)
        for j in range(c):
            t = tw.f32(x[i, j]) + residual[i, j]
            squares += t * t
        inverse = 1 / tw.sqrt(squares / c + 1e-5)
        for j in range(c):
            t = tw.f32(x[i, j]) + residual[i, j]
            z = tw.f32(gate[i, j])
            out[i, j] = t * inverse * gain[j] * (z / (1 + tw.exp(-z)))
    return out


@tw.kernel
def cross_entropy(x: tw.Array, label: tw.Array) -> tw.Array:
    """log(sum(exp(row))) - row[label], in f32."""
    n, c = x.shape
    out = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        most = -tw.inf
        for j in range(c):
            most = max(most, x[i, j])
        total = tw.f32(0)
        for j in range(c):
            total += tw.exp(x[i, j] - most)
        out[i] = tw.log(total) + most - x[i, label[i]]
    return out


# -- element by element ---------------------------------------------------------------------------------------------


@tw.kernel
def gelu(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i, j in tw.grid(n, c):
        out[i, j] = tw.gelu(x[i, j])
    return out


@tw.kernel
def rope(x: tw.Array, cos: tw.Array, sin: tw.Array) -> tw.Array:
    """Feature d turns with feature d + depth / 2, by the angle of the position."""
    batch, length, heads, depth = x.shape
    half = depth // 2
    out = tw.empty((batch, length, heads, depth), x.dtype)
    for b, s, h, d in tw.grid(batch, length, heads, half):
        low = tw.f32(x[b, s, h, d])
        high = tw.f32(x[b, s, h, d + half])
        out[b, s, h, d] = low * cos[s, d] - high * sin[s, d]
        out[b, s, h, d + half] = high * cos[s, d] + low * sin[s, d]
    return out


# -- attention ------------------------------------------------------------------------------------------------------


@tw.kernel
def attention(q: tw.Array, k: tw.Array, v: tw.Array, scale: tw.f32) -> tw.Array:
    batch, heads, length, depth = q.shape
    keys = k.shape[2]
    out = tw.empty((batch, heads, length, depth), q.dtype)
    for b, h, i in tw.grid(batch, heads, length):
        most = -tw.inf
        for j in range(keys):
            s = tw.f32(0)
            for d in range(depth):
                s += q[b, h, i, d] * k[b, h, j, d]
            most = max(most, s * scale)
        total = tw.f32(0)
        for j in range(keys):
            s = tw.f32(0)
            for d in range(depth):
                s += q[b, h, i, d] * k[b, h, j, d]
            total += tw.exp(s * scale - most)
        for e in range(depth):
            mixed = tw.f32(0)
            for j in range(keys):
                s = tw.f32(0)
                for d in range(depth):
                    s += q[b, h, i, d] * k[b, h, j, d]
                mixed += tw.exp(s * scale - most) * v[b, h, j, e]
            out[b, h, i, e] = mixed / total
    return out


@tw.kernel
def attention_causal(q: tw.Array, k: tw.Array, v: tw.Array, scale: tw.f32) -> tw.Array:
    """Each position sees those up to itself."""
    batch, heads, length, depth = q.shape
    keys = k.shape[2]
    out = tw.empty((batch, heads, length, depth), q.dtype)
    for b, h, i in tw.grid(batch, heads, length):
        most = -tw.inf
        for j in range(keys):
            if j <= i:
                s = tw.f32(0)
                for d in range(depth):
                    s += q[b, h, i, d] * k[b, h, j, d]
                most = max(most, s * scale)
        total = tw.f32(0)
        for j in range(keys):
            if j <= i:
                s = tw.f32(0)
                for d in range(depth):
                    s += q[b, h, i, d] * k[b, h, j, d]
                total += tw.exp(s * scale - most)
        for e in range(depth):
            mixed = tw.f32(0)
            for j in range(keys):
                if j <= i:
                    s = tw.f32(0)
                    for d in range(depth):
                        s += q[b, h, i, d] * k[b, h, j, d]
                    mixed += tw.exp(s * scale - most) * v[b, h, j, e]
            out[b, h, i, e] = mixed / total
    return out


@tw.kernel
def attention_grouped(q: tw.Array, k: tw.Array, v: tw.Array, scale: tw.f32) -> tw.Array:
    """Causal, and a head of keys serves several heads of queries."""
    batch, heads, length, depth = q.shape
    keys = k.shape[2]
    group = heads // k.shape[1]
    out = tw.empty((batch, heads, length, depth), q.dtype)
    for b, h, i in tw.grid(batch, heads, length):
        most = -tw.inf
        for j in range(keys):
            if j <= i:
                s = tw.f32(0)
                for d in range(depth):
                    s += q[b, h, i, d] * k[b, h // group, j, d]
                most = max(most, s * scale)
        total = tw.f32(0)
        for j in range(keys):
            if j <= i:
                s = tw.f32(0)
                for d in range(depth):
                    s += q[b, h, i, d] * k[b, h // group, j, d]
                total += tw.exp(s * scale - most)
        for e in range(depth):
            mixed = tw.f32(0)
            for j in range(keys):
                if j <= i:
                    s = tw.f32(0)
                    for d in range(depth):
                        s += q[b, h, i, d] * k[b, h // group, j, d]
                    mixed += tw.exp(s * scale - most) * v[b, h // group, j, e]
            out[b, h, i, e] = mixed / total
    return out


@tw.kernel
def attention_masked(q: tw.Array, k: tw.Array, v: tw.Array, mask: tw.Array, scale: tw.f32) -> tw.Array:
    """`mask[i, j]` says whether position i sees position j."""
    batch, heads, length, depth = q.shape
    keys = k.shape[2]
    out = tw.empty((batch, heads, length, depth), q.dtype)
    for b, h, i in tw.grid(batch, heads, length):
        most = -tw.inf
        for j in range(keys):
            s = tw.f32(0)
            for d in range(depth):
                s += q[b, h, i, d] * k[b, h, j, d]
            most = max(most, tw.where(mask[i, j] > 0, s * scale, -tw.inf))
        total = tw.f32(0)
        for j in range(keys):
            s = tw.f32(0)
            for d in range(depth):
                s += q[b, h, i, d] * k[b, h, j, d]
            total += tw.exp(tw.where(mask[i, j] > 0, s * scale, -tw.inf) - most)
        for e in range(depth):
            mixed = tw.f32(0)
            for j in range(keys):
                s = tw.f32(0)
                for d in range(depth):
                    s += q[b, h, i, d] * k[b, h, j, d]
                mixed += tw.exp(tw.where(mask[i, j] > 0, s * scale, -tw.inf) - most) * v[b, h, j, e]
            out[b, h, i, e] = mixed / total
    return out
