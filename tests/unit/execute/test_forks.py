"""A process that forks while other threads compile: the child compiles, runs and uses its own threads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, threading, time
import numpy as np
import tilewright as tw
from tilewright.compile.isolate import compile_isolated

@tw.kernel
def plain(x: tw.Array):
    out = tw.empty_like(x)
    for i in tw.grid(len(x)):
        out[i] = x[i] * 2 + 1
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

def work():
    while not done:
        for dtype in (np.float32, np.float64, np.int32, np.int16, np.int8, np.uint8):
            for kernel in (plain, turning):
                kernel.compile(np.ones(10, dtype), target="cpu")
        from tilewright.compile.store import STORE
        STORE.forget()

done = False
big = np.ones(1 << 18, np.uint16)
plain(big)
threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
failed = 0
for turn in range(6):
    time.sleep(0.03)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        right = (plain(np.ones(10, np.uint16)) == 3).all() and (turning(np.zeros(10, np.uint16)) == 3).all() and (plain(big) == 3).all()
        os._exit(0 if right else 3)
    failed += os.waitpid(pid, 0)[1] != 0
done = True
assert plain(np.ones(4, np.uint8)).tolist() == [3] * 4
print("failed", failed)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_child_of_a_process_that_compiles_can_compile(tmp_path: Path) -> None:
    path = tmp_path / "forks.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=600, env={**os.environ, "TILEWRIGHT_CACHE": "0"}, check=False
    )
    assert done.stdout.strip() == "failed 0", done.stderr[-2000:]
