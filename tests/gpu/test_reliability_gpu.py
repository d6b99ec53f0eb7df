"""Faults, long runs and many threads on a real GPU. What ends a context runs in a process of its own."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import tilewright as tw
from tilewright.base import dtypes
from tilewright.runtime.cuda import device as cuda

pytestmark = pytest.mark.requires("cuda")

HEAD = """
import gc, os, sys
import numpy as np
import tilewright as tw
from tilewright.base.artifact import Artifact, Launch
from tilewright.base.errors import DeviceError
from tilewright.base.sizes import ONE
from tilewright.runtime.cuda import device as cuda

@tw.kernel
def gather(x: tw.Array, index: tw.Array) -> tw.Array:
    out = tw.empty(index.shape, x.dtype)
    for i in tw.grid(index.shape[0]):
        out[i] = x[index[i]]
    return out

@tw.kernel
def double(x: tw.Array) -> tw.Array:
    out = tw.empty(x.shape, x.dtype)
    for i in tw.grid(x.shape[0]):
        out[i] = 2.0 * x[i]
    return out

x = np.arange(64, dtype=np.float32)
"""


def in_child(tmp_path: Path, body: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "child.py"
    script.write_text(HEAD + body)
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=timeout, check=False)


GO_ON = dedent("""
    for use in (y.numpy, lambda: double(a), lambda: tw.to_device(x, "cuda"), cuda.devices()[0].synchronize):
        try:
            use()
            print("no error")
        except DeviceError as error:
            print(error.code)
    del y, a
    gc.collect()
    print(double(x).sum(), double(x, device="auto").sum())
""")


def test_a_bad_pointer_names_the_kernel_and_its_line(tmp_path: Path) -> None:
    done = in_child(tmp_path, dedent("""
        a = tw.to_device(x, "cuda")
        double(a).numpy()
        y = gather(a, tw.to_device(np.full(64, 1 << 40, np.int64), "cuda"))
        try:
            y.numpy()
        except DeviceError as error:
            print(error)
    """) + GO_ON)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout.splitlines()
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in printed[0]
    line = next(i for i, text in enumerate(HEAD.splitlines(), 1) if "tw.grid(index.shape[0])" in text)
    assert f"since the last synchronisation: tw_gather_0 ({tmp_path}/child.py:{line}:" in printed[0]
    assert printed[1].startswith("help: the device is lost to this process, which can go on with device='cpu'")
    assert printed[2:] == ["TW034"] * 4 + ["4032.0 4032.0"]


TRAP = dedent("""
    PTX = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .entry stop() { trap; }"
    launch = Launch("stop", (), (), (ONE,), place="model.py:12:5")
    loaded = cuda.devices()[0].load(Artifact("stop", "sm_80", "ptx", PTX, (), (), (), (launch,), (), ()))
    a = tw.to_device(x, "cuda")
    y = double(a)
    y.numpy()
    loaded.run({}, {}, {})
""")


def test_a_trap_names_the_kernel_and_its_line(tmp_path: Path) -> None:
    done = in_child(tmp_path, TRAP + dedent("""
        try:
            cuda.devices()[0].synchronize()
        except DeviceError as error:
            print(error)
    """) + GO_ON)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout.splitlines()
    assert "CUDA_ERROR_LAUNCH_FAILED (719)" in printed[0]
    assert "since the last synchronisation: stop (model.py:12:5)" in printed[0]
    assert printed[2:] == ["TW034"] * 4 + ["4032.0 4032.0"]


def test_a_fault_nobody_asked_about_lets_the_process_end(tmp_path: Path) -> None:
    done = in_child(tmp_path, TRAP + "print(double(x).sum())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "4032.0\n", "")


def test_a_forked_child_uses_the_cpu(tmp_path: Path) -> None:
    done = in_child(tmp_path, dedent("""
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        a = tw.to_device(x, "cuda")
        y = double(a)
        y.numpy()
        if os.fork() == 0:
            for use in (y.numpy, lambda: double(a), lambda: tw.to_device(x, "cuda")):
                try:
                    use()
                    print("no error")
                except DeviceError as error:
                    print("forked" in str(error))
            print(double(x).sum(), flush=True)
            os._exit(0)
        print(os.wait()[1], double(a).numpy().sum())
    """))  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["True", "True", "True", "4032.0", "0 4032.0"]


def test_a_watchdog_stops_a_loop_that_does_not_end(tmp_path: Path) -> None:
    done = in_child(tmp_path, dedent("""
        import time

        @tw.kernel(watchdog=0.5)
        def grow(x: tw.Array, count: tw.Array) -> tw.Array:
            out = tw.empty(x.shape, x.dtype)
            for i in tw.grid(x.shape[0]):
                v = x[i]
                for _ in range(count[i]):
                    v = v * 3.0 + 1.0
                out[i] = v
            return out

        a = tw.to_device(x, "cuda")
        few, many = (tw.to_device(np.full(64, n, np.int64), "cuda") for n in (3, 1 << 60))
        assert grow(a, few).numpy()[1] == 40.0
        start = time.perf_counter()
        y = grow(a, many)
        try:
            y.numpy()
        except DeviceError as error:
            print(error)
        print(time.perf_counter() - start)
    """) + GO_ON)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout.splitlines()
    script = (tmp_path / "child.py").read_text().splitlines()
    line = next(i for i, text in enumerate(script, 1) if "range(count[i])" in text)
    assert printed[0].startswith(f"error[TW035]: the watchdog stopped kernel tw_grow_0 at {tmp_path}/child.py:{line} after 0.5 s, on cuda:0")
    # Other processes may share the GPU, and its clock runs on while theirs run.
    assert 0.4 < float(printed[2]) < 30.0
    assert printed[3:] == ["TW034"] * 4 + ["4032.0 4032.0"]


# -- long runs ------------------------------------------------------------------------------------------------------


def make_add() -> Callable[..., object]:
    @tw.kernel
    def add(x: tw.Array, y: tw.Array, scale: float) -> tw.Array:
        out = tw.empty(x.shape, x.dtype)
        for i in tw.grid(x.shape[0]):
            out[i] = x[i] + scale * y[i]
        return out

    return add


ALONE = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"
"""Whether the device's free memory is this process's doing."""


def memory() -> tuple[int, int]:
    """Bytes the device has free (beside other test processes: that the pool has not), and the process's resident KiB."""
    device = cuda.devices()[0]
    device.synchronize()
    gc.collect()
    device.pool.flush()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize() >> 10
    return (device.free_memory()[0] if ALONE else -sum(device.pool.usage())), resident


def test_a_million_launches_leave_memory_where_it_was() -> None:
    add = make_add()
    x, y, out = (tw.to_device(np.full(256, i, np.float32), "cuda") for i in range(3))
    add(x, y, 2.0, out=out)
    for _ in range(20_000):
        add(x, y, 2.0, out=out)
    before = memory()
    start = time.perf_counter()
    for _ in range(1_000_000):
        add(x, y, 2.0, out=out)
    seconds = time.perf_counter() - start
    after = memory()
    print(f"1,000,000 launches in {seconds:.1f} s; free {before[0] - after[0]:+d} bytes less, resident {after[1] - before[1]:+d} KiB")
    assert before[0] - after[0] == 0
    assert after[1] - before[1] < 8 << 10
    np.testing.assert_array_equal(out.numpy(), np.full(256, 2, np.float32))


def test_a_hundred_thousand_allocations_leave_memory_where_it_was() -> None:
    add, device = make_add(), cuda.devices()[0]
    x = tw.to_device(np.ones(256, np.float32), "cuda")
    add(x, x, 1.0)
    for n in range(5_000):
        device.empty((1 + n % 5000,), dtypes.f32)
    before = memory()
    start = time.perf_counter()
    for n in range(90_000):
        device.empty((1 + n * 37 % 5000,), dtypes.f32)
    for _ in range(10_000):
        add(x, x, 1.0)
    seconds = time.perf_counter() - start
    after = memory()
    print(f"100,000 allocations in {seconds:.1f} s; free {before[0] - after[0]:+d} bytes less, resident {after[1] - before[1]:+d} KiB")
    assert before[0] - after[0] == 0
    assert after[1] - before[1] < 8 << 10


def test_sixteen_threads(request: pytest.FixtureRequest) -> None:
    """Each has a stream's worth of own arrays; every result is looked at. A minute with --soak, else a few seconds."""
    duration = 60.0 if request.config.getoption("--soak") else 4.0
    add = make_add()
    end = time.perf_counter() + duration
    counts, wrong = [0] * 16, []

    def work(number: int) -> None:
        try:
            values = np.full(1024 + 64 * (number % 3), number, np.float32)
            x, y = tw.to_device(values, "cuda"), tw.to_device(np.ones_like(values), "cuda")
            while time.perf_counter() < end:
                results = [add(x, y, float(step)) for step in range(20)]
                counts[number] += 20
                for step, result in enumerate(results):
                    if not (result.numpy() == number + step).all():  # type: ignore[attr-defined]
                        wrong.append((number, step))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{sum(counts)} launches by 16 threads in {duration:.0f} s")
    assert wrong == []
    assert min(counts) > 0


def test_assertions_of_kernels(tmp_path: Path) -> None:
    script = tmp_path / "asserting.py"
    script.write_text(
        dedent("""
            import numpy as np
            import tilewright as tw

            @tw.kernel
            def checked(x: tw.Array) -> float:
                total = 0.0
                for i in tw.grid(len(x)):
                    assert x[i] >= 0, "only {positive} numbers"
                    total += tw.sqrt(x[i])
                return total

            print(checked(np.array([4.0, 9.0]), device="cuda"))
            try:
                checked(np.array([4.0, -9.0, 1.0]), device="cuda")
            except tw.TilewrightError as error:
                print("asserting.py:9:9: only {positive} numbers" in str(error), error)
            print(checked(np.array([4.0, 9.0]), device="cpu"))
            """),
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    lines = done.stdout.splitlines()
    assert [lines[0], lines[1][:4], lines[-1]] == ["5.0", "True", "5.0"], done.stdout + done.stderr
