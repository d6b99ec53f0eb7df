import numpy as np, ml_dtypes, tilewright as tw, sys
bf=ml_dtypes.bfloat16
@tw.kernel
def both(x: tw.Array, gate: tw.Array, up: tw.Array) -> tw.Array:
    n, k = x.shape
    m = gate.shape[1]
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        g = 0.0
        u = 0.0
        for p in range(k):
            g += x[i, p] * gate[p, j]
            u += x[i, p] * up[p, j]
        out[i, j] = tw.silu(g) * u
    return out
@tw.kernel
def two(x: tw.Array, gate: tw.Array, up: tw.Array) -> tw.Array:
    n, k = x.shape
    m = gate.shape[1]
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        g = 0.0
        for p in range(k):
            g += x[i, p] * gate[p, j]
        u = 0.0
        for p in range(k):
            u += x[i, p] * up[p, j]
        out[i, j] = tw.silu(g) * u
    return out
if __name__=="__main__":
    z=lambda *s: np.zeros(s,bf)
    from tilewright.ir.text import print_program
    for k in (both,two):
        d=k.stages(z(4096,768),z(768,3072),z(768,3072),target=sys.argv[1])
        print(print_program(d.stages.loop)[-1800:]); print([s.describe() for s in d.stages.schedules])
