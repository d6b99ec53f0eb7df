"""Products of matrices as a user writes them. The compiler recognises the contraction and computes it with the device's matrix units.

    tilewright inspect examples/matmul.py --args "a=bf16[4096,4096] b=bf16[4096,4096]" --target sm_90a
"""

from __future__ import annotations

import tilewright as tw


@tw.kernel
def matmul(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out
