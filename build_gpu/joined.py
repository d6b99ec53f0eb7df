import sys; sys.argv = ["x"]
exec(open("build/wt/block/build_gpu/blocktime.py").read().split("if \"main\" in sys.argv")[0])
sys.path.insert(0, "build/wt/block/build_gpu")
from joinkernels import swiglu, qkv as qkv3
import torch._dynamo
def go(kern, args, outs, label, sched=None):
    try:
        f = tw.kernel(schedule=sched)(kern.python) if sched else kern
        o = tuple(wrap(t) for t in outs); o = o[0] if len(o) == 1 else o
        a = tuple(wrap(t) for t in args)
        f(*a, out=o); torch.cuda.synchronize()
        t = each(lambda: f(*a, out=o), 8)
        print(f"  {label}", t, "|", len(f.last.launches), f.last.schedule.replace("\n", " || ")[:150], flush=True)
    except Exception as e:
        print(" ", label, sched, "ERROR", str(e)[:200], flush=True)
for n, kk, m in ((4096, 4096, 11008), (4096, 768, 3072), (8192, 2048, 5632)):
    x, g, u = r(n, kk), r(kk, m, f=kk**-.5), r(kk, m, f=kk**-.5)
    out = torch.empty(n, m, device="cuda", dtype=dt)
    print("swiglu", n, kk, m)
    go(swiglu, (x, g, u), (out,), "default")
    ref = F.silu(x.double() @ g.double()) * (x.double() @ u.double())
    print("   error", ((out.double() - ref).abs().max() / ref.abs().max()).item())
    del ref
    go(swiglu, (x, g, u), (out,), "coop 128x128x2", "family=wgmma m=128 n=128 k=64 stages=4 groups=2 beside=2 early=1")
    go(swiglu, (x, g, u), (out,), "turns 128x64x2", "family=wgmma m=128 n=64 k=64 stages=6 groups=2 turns=1 wait=1 beside=2 early=1")
    go(swiglu, (x, g, u), (out,), "apart 192", "family=wgmma m=128 n=192 k=64 stages=4 groups=2 turns=1 wait=1 buffers=3 early=1")
    if n == 4096 and m == 11008: go(swiglu, (x, g, u), (out,), "apart 256", "family=wgmma m=128 n=256 k=64 stages=4 groups=2 early=1")
    print("  torch", each(lambda: F.silu(x @ g) * (x @ u), 8))
x = r(4096, 768); ws = [r(768, 768, f=768**-.5) for _ in range(3)]
outs = [torch.empty(4096, 768, device="cuda", dtype=dt) for _ in range(3)]
print("qkv of three weights")
go(qkv3, (x, *ws), outs, "default")
print("   errors", [(o.double() - x.double() @ w_.double()).abs().max().item() for o, w_ in zip(outs, ws)])
go(qkv3, (x, *ws), outs, "apart", "family=wgmma m=128 n=192 k=64 stages=4 groups=2 turns=1 wait=1 buffers=3 early=1")
go(qkv3, (x, *ws), outs, "3x64 coop", "family=wgmma m=128 n=64 k=64 stages=4 groups=2 beside=3 early=1")
print("  torch", each(lambda: [x @ w_ for w_ in ws], 8))
