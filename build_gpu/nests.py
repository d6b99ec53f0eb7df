import sys; sys.argv = ["x"]
exec(open("build/wt/block/build_gpu/blocktime.py").read().split("if \"main\" in sys.argv")[0])
sys.path.insert(0, "build/wt/block/build_gpu")
from nestkernels1 import both
from nestkernels2 import cell, complex4
def go(kern, args, outs, label):
    try:
        o = tuple(wrap(t) for t in outs); o = o[0] if len(o) == 1 else o
        a = tuple(wrap(t) for t in args)
        kern(*a, out=o); torch.cuda.synchronize()
        print(f"  {label}", each(lambda: kern(*a, out=o), 8), "|", len(kern.last.launches), kern.last.schedule.replace("\n", " || ")[:170], flush=True)
    except Exception as e:
        print(" ", label, "ERROR", str(e)[:200], flush=True)
def err(o, ref): return ((o.double() - ref).abs().max() / ref.abs().max()).item()
n, kk, m = 4096, 768, 3072
x, g, u = r(n, kk), r(kk, m, f=kk**-.5), r(kk, m, f=kk**-.5); out = torch.empty(n, m, device="cuda", dtype=dt)
go(both, (x, g, u), (out,), "swiglu nest")
print("   error", err(out, F.silu(x.double() @ g.double()) * (x.double() @ u.double())))
h, wu, b = r(n, 1024), r(1024, m, f=1024**-.5), r(m)
go(cell, (x, h, g, wu, b), (out,), "cell")
print("   error", err(out, torch.tanh(x.double() @ g.double() + h.double() @ wu.double() + b.double())))
print("  torch cell", each(lambda: torch.tanh(torch.addmm(b, x, g) + h @ wu), 8))
y, v = r(n, kk), r(kk, m, f=kk**-.5); re, im = torch.empty_like(out), torch.empty_like(out)
go(complex4, (x, y, g, v), (re, im), "complex")
print("   error", err(re, x.double() @ g.double() - y.double() @ v.double()), err(im, x.double() @ v.double() + y.double() @ g.double()))
print("  torch complex", each(lambda: (x @ g - y @ v, x @ v + y @ g), 8))
for s in ((16, 8, 16), (64, 64, 64), (257, 129, 65)):
    n, k_, m = s
    x, h, g, wu, b = r(n, k_), r(n, k_ + 8), r(k_, m), r(k_ + 8, m), r(m); out = torch.empty(n, m, device="cuda", dtype=dt)
    go(cell, (x, h, g, wu, b), (out,), f"cell {s}")
    print("   error", err(out, torch.tanh(x.double() @ g.double() + h.double() @ wu.double() + b.double())))
