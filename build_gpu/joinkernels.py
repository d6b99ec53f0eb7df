import tilewright as tw
@tw.kernel
def swiglu(x: tw.Array, gate: tw.Array, up: tw.Array) -> tw.Array:
    n, k = x.shape
    m = gate.shape[1]
    opened = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * gate[p, j]
        opened[i, j] = total
    wide = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * up[p, j]
        wide[i, j] = total
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        out[i, j] = tw.silu(opened[i, j]) * wide[i, j]
    return out
@tw.kernel
def qkv(x: tw.Array, wq: tw.Array, wk: tw.Array, wv: tw.Array):
    n, k = x.shape
    m = wq.shape[1]
    q = tw.empty((n, m), x.dtype)
    kk = tw.empty((n, m), x.dtype)
    v = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * wq[p, j]
        q[i, j] = total
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * wk[p, j]
        kk[i, j] = total
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * wv[p, j]
        v[i, j] = total
    return q, kk, v
