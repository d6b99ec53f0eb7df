"""A process whose memory is limited gets an error where it would need more, and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, resource, signal, sys
import numpy as np
import tilewright as tw

@tw.kernel
def plain(x: tw.Array):
    out = tw.empty_like(x)
    for i in tw.grid(len(x)):
        out[i] = x[i] * 2 + 1
    return out

@tw.kernel
def product(a: tw.Array, b: tw.Array):
    n, k = a.shape
    m = b.shape[1]
    out = tw.empty((n, m), a.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out

@tw.kernel
def turning(x: tw.Array):
    out = tw.empty_like(x)
    for i in tw.grid(len(x)):
        v = x[i]
        while v < 3:
            v = v + 1
        out[i] = v
    return out

@tw.gpu
def explicit(x, out):
    i = tw.thread.x
    out[i] = x[i] + x[i]

plain(np.ones(3, np.float32))
square = np.ones((40, 40))
row = np.ones(32, np.int32)
calls = (
    lambda: product(square, square), lambda: turning(np.ones(3, np.int64)), lambda: explicit[1, 32](row, row.copy(), device="cpu"),
    lambda: plain.compile(np.ones(3, np.int16), target="sm_90a"),
)
kinds = {"as": (resource.RLIMIT_AS, 0), "data": (resource.RLIMIT_DATA, 5)}
for kind, (limit, column) in kinds.items():
    for extra in (0, 4, 100):
        pid = os.fork()
        if pid:
            code = os.waitpid(pid, 0)[1]
            print(kind, extra, code, flush=True)
            continue
        signal.alarm(60)
        used = int(open("/proc/self/statm").read().split()[column]) * os.sysconf("SC_PAGE_SIZE")
        for call in calls:
            resource.setrlimit(limit, (used + (extra << 20), resource.RLIM_INFINITY))
            try:
                call()
            except (MemoryError, tw.DeviceError):
                pass
        resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for call in calls:
            call()
        os._exit(0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems limit memory in other ways")
def test_limits_on_memory_give_errors(tmp_path: Path) -> None:
    path = tmp_path / "limits.py"
    path.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "TILEWRIGHT_CACHE": "0"}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=600, env=environment, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 6, done.stderr[-2000:]
    assert all(line.endswith(" 0") for line in lines), done.stdout + done.stderr[-2000:]
