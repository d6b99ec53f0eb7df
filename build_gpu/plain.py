import sys, importlib.util, statistics, torch, time
import tilewright as tw
from tilewright.runtime import cuda
gpu = cuda.devices()[0]
src = open("build/wt/block/build_gpu/blocktime.py").read()
exec(src.split("orig_run, orig_launch")[0].replace("ONLY = None", ""))
exec("B, L" + src.split("B, L", 1)[1].split("def graphed")[0].replace("gpu.wrap(t, S)", "gpu.wrap(t)"))
wx, wout = wrap(x), wrap(out)
def timed(fn, rounds=40):
    ts, hs = [], []
    for _ in range(5): fn()
    torch.cuda.synchronize()
    for _ in range(rounds):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(); a.record()
        t = time.perf_counter(); 
        for _ in range(6): fn()
        hs.append((time.perf_counter() - t) / 6e-6); b.record(); b.synchronize(); ts.append(a.elapsed_time(b) * 1e3 / 6)
    return f"{statistics.median(ts):7.2f} min {min(ts):7.2f} us, host {statistics.median(hs):6.1f}"
print("steps eager  ", timed(block))
print("example eager", timed(lambda: ex.block(wx, W, B, H, out=wout)))
print("torch eager  ", timed(lambda: layers(x, w)))
for name, kern, a, o in steps: print("  host of", name, timed(lambda: kern(*a, out=o)))
print("  host of views", timed(lambda: wrap(qkv).reshape(B, L, 3, H, D).transpose(2, 0, 3, 1, 4)[1]))
