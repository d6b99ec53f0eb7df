"""What stays in memory of kernels that were compiled and dropped."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import gc, linecache, sys
import numpy as np
import tilewright as tw

x = np.ones(100, np.float32)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4

def compile_and_drop(number):
    text = f"@tw.kernel\\ndef q{number}(x: tw.Array):\\n    out = tw.empty_like(x)\\n    for i in tw.grid(len(x)):\\n        out[i] = x[i] * {number}.5\\n    return out\\n"
    name = f"<q{number}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope = {"tw": tw}
    exec(compile(text, name, "exec"), scope)
    scope[f"q{number}"](x)
    del linecache.cache[name]

first, count = int(sys.argv[1]), int(sys.argv[2])
for number in range(first):
    compile_and_drop(number)
gc.collect()
before = resident()
for number in range(first, first + count):
    compile_and_drop(number)
gc.collect()
print((resident() - before) / count)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the system does not tell how much memory a process has")
def test_a_dropped_kernel_leaves_less_than_ten_kilobytes() -> None:
    """The latest artifacts are kept on purpose: as many kernels come before those that are measured."""
    environment = {**os.environ, "TILEWRIGHT_CACHE": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, "240", "240"], capture_output=True, text=True, env=environment, check=True)
    assert float(done.stdout) < 10
