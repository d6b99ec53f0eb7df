import sys
which = sys.argv[1]
src = open("build/wt/block/build_gpu/blocktime.py").read()
exec(src.split("orig_run, orig_launch")[0].replace("ONLY = None", ""))
exec("B, L" + src.split("B, L", 1)[1].split("def graphed")[0].replace("gpu.wrap(t, S)", "gpu.wrap(t)"))
for name, kern, a, o in steps:
    if name == which:
        f = tw.tune(kern, *a, budget=float(sys.argv[2]))
        print(name, f)
        for t in f.ranking()[:6]: print("   ", round(t.seconds * 1e6, 2), t.schedule)
