"""Processes killed at any moment, and several at once: caches and tuning tables stay readable, nothing is lost, nobody stays behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tilewright.compile.cache import DiskCache
from tilewright.compile.tuning import TuningStore

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
HERE = Path(__file__).parent
KEY = "cd" * 32


def start(tmp_path: Path, body: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A process that runs `body` after it said it is ready."""
    script = tmp_path / f"child_{random.getrandbits(48):x}.py"
    script.write_text(textwrap.dedent(body))
    own = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(tmp_path / "cache"), **environment}
    path = os.pathsep.join([str(HERE), *sys.path])
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**own, "PYTHONPATH": path}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def kill(process: subprocess.Popen[str], after: float) -> None:
    time.sleep(after)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


CACHE_WRITER = """
    import sys
    from pathlib import Path
    from test_cache import make
    from tilewright.compile.cache import DiskCache
    cache = DiskCache(Path(sys.argv[1]))
    print("ready", flush=True)
    for round in range(100000):
        cache.put(f"{round % 8:064x}", make(bytes([round % 8]) * (200_000 + round % 1000)))
"""


def test_killed_while_writing_to_the_cache(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    generator = random.Random(5)
    left = 0
    for _ in range(5):
        kill(start(tmp_path, CACHE_WRITER, str(root)), generator.uniform(0, 0.05))
        cache = DiskCache(root)
        for number in range(8):
            found = cache.get(f"{number:064x}")
            assert found is None or set(found.code) == {number}
        assert cache._usable(create=True)
        left = len(list(root.glob("v1/.tmp-*")))
    assert DiskCache(root).clear() > 0
    assert list(root.glob("v1/.tmp-*")) == [], f"{left} temporary files were left by those killed"


COMPILER = """
    import numpy as np
    import tilewright as tw

    @tw.kernel
    def one(x: tw.Array) -> tw.Array:
        out = tw.empty(x.shape, x.dtype)
        for i in tw.grid(x.shape[0]):
            out[i] = tw.exp(x[i]) + 1.0
        return out

    @tw.kernel
    def two(x: tw.Array) -> tw.Array:
        rows, cols = x.shape
        out = tw.empty((rows,), x.dtype)
        for i in tw.grid(rows):
            total = 0.0
            for j in tw.grid(cols):
                total += x[i, j] * x[i, j]
            out[i] = total
        return out

    print("ready", flush=True)
    x = np.ones((8, 16), np.float32)
    assert abs(float(one(x[0])[0]) - 3.718281828) < 1e-5
    assert float(two(x)[0]) == 16.0
    print("done")
"""


@pytest.mark.parametrize("isolate", ["never", "always"])
def test_killed_while_compiling(tmp_path: Path, isolate: str) -> None:
    generator = random.Random(7)
    for _ in range(3):
        process = start(tmp_path, COMPILER, TILEWRIGHT_ISOLATE=isolate)
        kill(process, generator.uniform(0.0, 0.6))
        # A compiler that worked for it in another process ends too.
        for _ in range(100):
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.1)
        else:
            pytest.fail("a worker outlived the process it worked for")
    for _ in range(2):
        last = start(tmp_path, COMPILER, TILEWRIGHT_ISOLATE=isolate)
        output, printed = last.communicate(timeout=600)
        assert (last.returncode, output, printed) == (0, "done\n", "")


TUNER = """
    import sys
    import time
    from pathlib import Path
    from test_tuning import TEXTS, measured
    from tilewright.compile.tuning import TuningStore
    store = TuningStore(Path(sys.argv[1]))
    print("ready", flush=True)
    while not Path(sys.argv[1], "go").exists():
        time.sleep(0.001)
    for number in range(int(sys.argv[2]), int(sys.argv[3])):
        store.add("cd" * 32, "matmul", "sm_90a", [measured(number, TEXTS[0], 1.0 + number)])
"""


def test_two_processes_tuning_one_kernel_keep_each_others_measurements(tmp_path: Path) -> None:
    processes = [start(tmp_path, TUNER, str(tmp_path), str(first), str(first + 60)) for first in (1, 61, 121)]
    (tmp_path / "go").touch()
    for process in processes:
        _, printed = process.communicate(timeout=600)
        assert (process.returncode, printed) == (0, "")
    found = TuningStore(tmp_path).get(KEY)
    assert found is not None
    assert sorted(m.extents[0][2] for m in found.entries) == list(range(1, 181))
    assert {m.extents[0][2]: m.seconds for m in found.entries}[77] == 78.0


def test_killed_while_tuning(tmp_path: Path) -> None:
    generator = random.Random(11)
    highest = 0
    (tmp_path / "go").touch()
    for _ in range(4):
        kill(start(tmp_path, TUNER, str(tmp_path), str(highest + 1), "100000"), generator.uniform(0.02, 0.15))
        found = TuningStore(tmp_path).get(KEY)
        assert found is not None
        numbers = sorted(m.extents[0][2] for m in found.entries)
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= highest
        highest = len(numbers)
    assert highest > 6
    TuningStore(tmp_path).add(KEY, "matmul", "sm_90a", [])  # nobody holds the lock
