"""Kernels so small that only what is around them counts."""

from __future__ import annotations

import tilewright as tw


@tw.kernel
def axpy(x: tw.Array, y: tw.Array, a: float) -> tw.Array:
    """Three arrays and a number, with the result."""
    out = tw.empty(x.shape, x.dtype)
    for i in range(x.shape[0]):
        out[i] = a * x[i] + y[i]
    return out


@tw.kernel
def sum17(
    a: tw.Array, b: tw.Array, c: tw.Array, d: tw.Array, e: tw.Array, f: tw.Array, g: tw.Array, h: tw.Array, i: tw.Array,
    j: tw.Array, k: tw.Array, r: tw.Array, m: tw.Array, n: tw.Array, o: tw.Array, p: tw.Array, q: tw.Array, u: float, v: float,
) -> tw.Array:  # fmt: skip
    """Twenty arguments, with the result."""
    out = tw.empty(a.shape, a.dtype)
    for z in range(a.shape[0]):
        ours = a[z] + b[z] + c[z] + d[z] + e[z] + f[z] + g[z] + h[z]
        out[z] = u * ours + v * (i[z] + j[z] + k[z] + r[z] + m[z] + n[z] + o[z] + p[z] + q[z])
    return out


@tw.kernel
def fill(x: tw.Array) -> tw.Array:
    """As good as nothing: one block, one number."""
    out = tw.empty(x.shape, x.dtype)
    for i in range(x.shape[0]):
        out[i] = 1.0
    return out
