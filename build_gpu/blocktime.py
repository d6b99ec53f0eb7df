"""Times the block, each launch, torch eager and graphs. argv: what"""
import sys, importlib.util, time, statistics
import torch
from torch.nn import functional as F
import tilewright as tw
from tilewright.runtime import cuda_program
from tilewright.runtime.cuda_program import CudaProgram
root = "build/wt/block/"
spec = importlib.util.spec_from_file_location("ex", root + "examples/transformer.py"); ex = importlib.util.module_from_spec(spec); spec.loader.exec_module(ex)
from tilewright.runtime import cuda
gpu = cuda.devices()[0]
torch.manual_seed(0)
side = torch.cuda.Stream()
S = side.cuda_stream
ONLY = None
orig_run, orig_launch = CudaProgram.run, CudaProgram._launch
def run(self, arrays, scalars, sizes, stream=0, on_error=None): return orig_run(self, arrays, scalars, sizes, S, None)
def launch(self, steps, stream):
    if ONLY is not None: steps = steps[ONLY:ONLY + 1]
    return orig_launch(self, steps, stream)
CudaProgram.run, CudaProgram._launch = run, launch
B, L, C, H, HID = 8, 512, 768, 12, 3072
N, D = B * L, C // H
dt = torch.bfloat16
def r(*s, f=1.0): return (torch.randn(*s, device="cuda") * f).to(dt)
x = r(N, C)
w = dict(qkv=r(C, 3*C, f=C**-.5), qkv_bias=r(3*C, f=.1), out=r(C, C, f=C**-.5), out_bias=r(C, f=.1), up=r(C, HID, f=C**-.5), up_bias=r(HID, f=.1),
         down=r(HID, C, f=HID**-.5), down_bias=r(C, f=.1), gain1=1+r(C, f=.1), shift1=r(C, f=.1), gain2=1+r(C, f=.1), shift2=r(C, f=.1))
qkv, mixed, seen, wider, out = (torch.empty(N, c, device="cuda", dtype=dt) for c in (3*C, C, C, HID, C))
wrap = lambda t: gpu.wrap(t, S)
q, k, v = qkv.view(B, L, 3, H, D).permute(2, 0, 3, 1, 4)
W = {n: wrap(t) for n, t in w.items()}
steps = [
    ("qkv", ex.project, (wrap(x), W["qkv"], W["qkv_bias"]), wrap(qkv)),
    ("attend", ex.attend, (wrap(q), wrap(k), wrap(v), D**-.5), wrap(mixed.view(B, L, H, D))),
    ("outnorm", ex.project_add_norm, (wrap(mixed), W["out"], W["out_bias"], wrap(x), W["gain1"], W["shift1"]), wrap(seen)),
    ("up", ex.project_gelu, (wrap(seen), W["up"], W["up_bias"]), wrap(wider)),
    ("downnorm", ex.project_add_norm, (wrap(wider), W["down"], W["down_bias"], wrap(seen), W["gain2"], W["shift2"]), wrap(out)),
]
def block():
    for _, kern, a, o in steps: kern(*a, out=o)
def layers(x, w):
    parts = torch.addmm(w["qkv_bias"], x, w["qkv"]).view(B, L, 3, H, D).permute(2, 0, 3, 1, 4)
    m = F.scaled_dot_product_attention(parts[0], parts[1], parts[2]).transpose(1, 2).reshape(N, C)
    s = F.layer_norm(torch.addmm(w["out_bias"], m, w["out"]) + x, (C,), w["gain1"], w["shift1"])
    u = F.gelu(torch.addmm(w["up_bias"], s, w["up"]), approximate="tanh")
    return F.layer_norm(torch.addmm(w["down_bias"], u, w["down"]) + s, (C,), w["gain2"], w["shift2"])
def graphed(fn, copies):
    with torch.cuda.stream(side):
        for _ in range(3): fn()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=side, capture_error_mode="relaxed"):
        for _ in range(copies): fn()
    return g
def timed(fn, rounds=20, per=1):
    ts = []
    with torch.cuda.stream(side):
        for _ in range(3): fn()
        for _ in range(rounds):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(side); fn(); b.record(side); b.synchronize(); ts.append(a.elapsed_time(b) * 1e3 / per)
    return f"{statistics.median(ts):7.2f} min {min(ts):7.2f} us"
def each(fn, copies=20):
    g = graphed(fn, copies)
    return timed(g.replay, 12, copies)
import tilewright.base.errors as _e
def forced(base, sched):
    return tw.kernel(schedule=sched)(base.python)
if "main" in sys.argv:
    block(); torch.cuda.synchronize()
    ref = layers(x.double(), {n: t.double() for n, t in w.items()})
    mine, theirs = (out.double() - ref).abs().max().item(), (layers(x, w).double() - ref).abs().max().item()
    print(f"error ours {mine:.4f} torch {theirs:.4f}")
    for name, kern, a, o in steps:
        kern(*a, out=o)
        print(name, "|", kern.last.schedule.replace("\n", " || "), "|", [l.dependent for l in kern.last.launches])
    print("torch eager     ", timed(lambda: layers(x, w), 30))
    print("torch graph     ", each(lambda: layers(x, w), 8))
    print("ours eager      ", timed(block, 30))
    print("ours graph x8   ", each(block, 8))
    print("ours graph x1   ", each(block, 1))
    wx = wrap(x); wout = wrap(out)
    try:
        print("example eager   ", timed(lambda: ex.block(wx, W, B, H, out=wout), 30))
        print("example graph x8", each(lambda: ex.block(wx, W, B, H, out=wout), 8))
        print("  error", (out.double() - ref).abs().max().item())
    except Exception as e: print("example", repr(e)[:300])
    for name, kern, a, o in steps:
        kern(*a, out=o)
        for i in range(len(kern.last.launches)):
            ONLY = i
            print(f"  {name}[{i}]", each(lambda: kern(*a, out=o)))
        ONLY = None
        if len(kern.last.launches) > 1: print(f"  {name} both", each(lambda: kern(*a, out=o)))
    print("torch qkv ", each(lambda: torch.addmm(w["qkv_bias"], x, w["qkv"])))
    print("torch attn", each(lambda: F.scaled_dot_product_attention(q, k, v)))
    print("torch out ", each(lambda: torch.addmm(w["out_bias"], mixed, w["out"])))
    print("torch norm", each(lambda: F.layer_norm(mixed, (C,), w["gain1"], w["shift1"])))
    print("torch up  ", each(lambda: torch.addmm(w["up_bias"], seen, w["up"])))
    print("torch down", each(lambda: torch.addmm(w["down_bias"], wider, w["down"])))
TRY = {
  "outnorm": ["m=128 n=192 k=64 stages=4 groups=2 turns=1 wait=1 buffers=3 early=1", "m=64 n=192 k=64 stages=6 groups=2 turns=1 wait=1 early=1", "m=128 n=192 k=64 stages=5 groups=2 buffers=1 early=1",
              "m=128 n=192 k=64 stages=4 groups=2 buffers=3 early=1", "m=64 n=128 k=64 stages=8 groups=2 turns=1 wait=1 early=1", "m=64 n=256 k=64 stages=4 groups=1 early=1"],
  "downnorm": ["m=128 n=192 k=64 stages=4 groups=2 turns=1 wait=1 buffers=3 early=1", "m=64 n=192 k=64 stages=6 groups=2 turns=1 wait=1 early=1", "m=128 n=192 k=64 stages=5 groups=2 buffers=1 early=1",
               "m=128 n=192 k=64 stages=4 groups=2", "m=128 n=192 k=64 stages=4 groups=2 raster=4 early=1", "m=128 n=192 k=64 stages=4 groups=2 raster=16 early=1", "m=128 n=192 k=64 stages=4 groups=2 wait=1 early=1"],
}
if "try" in sys.argv:
    for name, kern, a, o in steps:
        for sched in TRY.get(name, ()):
            if sys.argv[2:] and name not in sys.argv[2:]: continue
            try:
                f = forced(kern, "family=wgmma " + sched)
                f(*a, out=o)
                ONLY = 0
                print(f"  {name}[0]", each(lambda: f(*a, out=o)), "|", f.last.schedule.split("\n")[0])
            except Exception as e:
                print(" ", name, sched, "ERROR", str(e)[:150])
            ONLY = None
