"""Times of the host's own work: reading long texts, loading code, caches, the compiler's process, the emulator.

In: a setting. Out: one `Record` per row with the bar it is held against. No peer takes part. Tests check what these rows
compute; how long it takes is checked here.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import tilewright as tw
from bench.harness import OURS, Record, Setting, summarise

BLOCK = """\
let y{0} = compute(x{1}) {{
    @kernel elementwise
    for i in 0..rows, j in 0..cols:
        let t = x{1}[i, j] * {0}.0 + 1.0
        let u = t if t > 0 else exp(t)
        out[i, j] = u * u
}}
let z{0} = y{0} + 1
fn f{0}(a, b): return a * b + {0}
let w{0} = f{0}(z{0}, y{0})
"""
LONG = "".join(BLOCK.format(number, number % 7) for number in range(1000))
"""Ten thousand lines."""
SMALL = """target datalayout = "e-p6:32:32-i64:64-i128:128-i256:256-v16:16-v32:32-n16:32:64"
target triple = "nvptx64-nvidia-cuda"
define ptx_kernel void @k(ptr addrspace(1) %x) {
  store float 1.0, ptr addrspace(1) %x
  ret void
}
"""

Work = Callable[[], object]


@tw.kernel
def add(x: tw.Array, y: tw.Array) -> tw.Array:
    return x + y


@tw.gpu
def busy(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(1024, tw.f32)
    t = tw.thread.x
    value = x[t]
    for _ in range(77):
        value = value * 0.5 + x[t]
        tile[t] = value
        tw.gpu_sync()
        other = tile[t ^ 1]
        tw.gpu_sync()
        value = value + other if value < other else value - other
    y[t] = value


@contextlib.contextmanager
def parse_zyn() -> Iterator[Work]:
    """Ten thousand lines of ZynML become a tree."""
    from tilewright.frontend.zyn.parse import parse_module

    yield lambda: parse_module(LONG)


@contextlib.contextmanager
def check_zyn() -> Iterator[Work]:
    """`tilewright check` of ten thousand lines."""
    from tilewright.cli.commands.check import check

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.zyn"
        path.write_text(LONG, encoding="utf-8")

        def run() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                assert check([str(path)], "", False)

        yield run


@contextlib.contextmanager
def load_cpu() -> Iterator[Work]:
    """Machine code that is compiled becomes a program that can be called."""
    from tilewright.runtime.cpu import program

    artifact = add.compile(np.ones(16, np.float32), np.ones(16, np.float32), target="cpu")
    yield lambda: program.load(artifact)


@contextlib.contextmanager
def cache_get() -> Iterator[Work]:
    """A compiled kernel comes from the cache on disk."""
    from tilewright.compile.cache import DiskCache

    artifact = add.compile(np.ones(16, np.float32), np.ones(16, np.float32), target="sm_90a")
    with tempfile.TemporaryDirectory() as folder:
        cache = DiskCache(Path(folder))
        cache.put("0" * 64, artifact)
        yield lambda: cache.get("0" * 64)


@contextlib.contextmanager
def isolated_compile() -> Iterator[Work]:
    """LLVM in a process of its own compiles a small module."""
    from tilewright.compile.isolate import compile_isolated

    emit = "tilewright.compile.isolate:emit_assembly"
    yield lambda: compile_isolated(emit, SMALL, "nvptx64-nvidia-cuda", "sm_90a", "+ptx83")


@contextlib.contextmanager
def assign_element() -> Iterator[Work]:
    """Two thousand assignments to elements of an array of four million."""
    module = tw.load("var a = zeros(count)\nfor k in 0..2000: a[k] = k\n")
    yield lambda: module.run(count=4_000_000)


@contextlib.contextmanager
def emulate_kernel() -> Iterator[Work]:
    """The emulator adds a hundred thousand elements."""
    x = np.ones(100_000, np.float32)
    yield lambda: add(x, x, device="emulator")


@contextlib.contextmanager
def emulate_threads() -> Iterator[Work]:
    """The emulator executes about a thousand instructions of a thousand threads."""
    x, y = np.arange(1024, dtype=np.float32), np.zeros(1024, np.float32)
    yield lambda: busy[1, 1024](x, y, device="emulator")


ROWS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[Work]], float, int]] = {
    "parse_zyn": (parse_zyn, 5000.0, 1),
    "check_zyn": (check_zyn, 6000.0, 1),
    "load_cpu": (load_cpu, 5.0, 10),
    "cache_get": (cache_get, 1.0, 20),
    "isolated_compile": (isolated_compile, 10.0, 20),
    "assign_element": (assign_element, 100.0, 3),
    "emulate_kernel": (emulate_kernel, 1000.0, 3),
    "emulate_threads": (emulate_threads, 200.0, 5),
}
"""What prepares a row, its bar in milliseconds, and how often it is measured."""


def record(name: str, setting: Setting) -> Record:
    """The row's time after one round that does not count."""
    prepare, bar_ms, rounds = ROWS[name]
    result = Record(name, [], "", setting.device, commit=setting.commit, date=setting.date, bar_ms=bar_ms)
    times: list[float] = []
    with prepare() as work:
        work()
        for _ in range(rounds):
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e3)
    summarise(result, {OURS: times}, 0, None)
    return result
