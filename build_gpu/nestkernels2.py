import numpy as np, ml_dtypes, tilewright as tw, sys
bf=ml_dtypes.bfloat16
@tw.kernel
def cell(x: tw.Array, h: tw.Array, w: tw.Array, u: tw.Array, bias: tw.Array) -> tw.Array:
    n, k = x.shape
    l = h.shape[1]
    m = w.shape[1]
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        total = bias[j]
        for p in range(k):
            total += x[i, p] * w[p, j]
        for p in range(l):
            total += h[i, p] * u[p, j]
        out[i, j] = tw.tanh(total)
    return out
@tw.kernel
def complex_product(ar: tw.Array, ai: tw.Array, br: tw.Array, bi: tw.Array) -> tuple[tw.Array, tw.Array]:
    n, k = ar.shape
    m = br.shape[1]
    re = tw.empty((n, m), ar.dtype)
    im = tw.empty((n, m), ar.dtype)
    for i, j in tw.grid(n, m):
        r = 0.0
        s = 0.0
        for p in range(k):
            r += ar[i, p] * br[p, j] - ai[i, p] * bi[p, j]
            s += ar[i, p] * bi[p, j] + ai[i, p] * br[p, j]
        re[i, j] = r
        im[i, j] = s
    return re, im
@tw.kernel
def complex4(ar: tw.Array, ai: tw.Array, br: tw.Array, bi: tw.Array) -> tuple[tw.Array, tw.Array]:
    n, k = ar.shape
    m = br.shape[1]
    re = tw.empty((n, m), ar.dtype)
    im = tw.empty((n, m), ar.dtype)
    for i, j in tw.grid(n, m):
        r = 0.0
        s = 0.0
        t = 0.0
        u = 0.0
        for p in range(k):
            r += ar[i, p] * br[p, j]
            s += ai[i, p] * bi[p, j]
            t += ar[i, p] * bi[p, j]
            u += ai[i, p] * br[p, j]
        re[i, j] = r - s
        im[i, j] = t + u
    return re, im
if __name__=="__main__":
    rng=np.random.default_rng(0)
    r=lambda *s,dt=bf: rng.standard_normal(s).astype(np.float32).astype(dt)
    from tilewright.ir.text import print_program
    for t in ("sm_90a","sm_80","x86-64-avx512"):
        for kern,args in ((cell,(r(1024,512),r(1024,256),r(512,2048),r(256,2048),r(2048))),(complex4,(r(512,256),r(512,256),r(256,512),r(256,512))),(complex_product,(r(512,256),r(512,256),r(256,512),r(256,512)))):
            d=kern.stages(*args,target=t)
            print(t,kern.__name__,[s.describe()[:90] for s in d.stages.schedules], d.fusion.before, d.fusion.after, [(f.array,f.how) for f in d.fusion.fused],[f.reason for f in d.fusion.refused])
    x,h,w,u,b=r(70,40,dt=np.float32),r(70,24,dt=np.float32),r(40,50,dt=np.float32),r(24,50,dt=np.float32),r(50,dt=np.float32)
    for dev in ("cpu","emulator"):
        print(dev,np.abs(cell(x,h,w,u,b,device=dev)-np.tanh(x@w+h@u+b)).max())
        a=[r(40,32,dt=np.float32),r(40,32,dt=np.float32),r(32,36,dt=np.float32),r(32,36,dt=np.float32)]
        z=(a[0]+1j*a[1])@(a[2]+1j*a[3])
        re,im=complex4(*a,device=dev); print(np.abs(re-z.real).max(),np.abs(im-z.imag).max())
