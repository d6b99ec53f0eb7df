"""Small times: one call from Python, the import, a cold and a cached compile.

Calls are timed in long loops, alternating with the peer's. Import and compile times come from fresh processes, each of
which does one thing once (`bench.latency_child`); the first of a kind only warms the file cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.harness import OURS, Bar, HostClock, Plan, Prepared, Record, Setting, Variant, check, interleave, summarise

ROOT = Path(__file__).resolve().parent.parent
SMALL = 16
"""Elements of the small arrays: the call is all there is to it."""
CALLS = 20_000
OPS = ("call_out", "call_new", "import", "compile_cpu", "compile_ptx", "cached_cpu", "cached_ptx", "tiered_elementwise", "tiered_softmax")


def records(setting: Setting, wanted: Callable[[str], bool], quick: bool) -> Iterator[Record]:
    """Every latency that is wanted, one record each."""
    calls = CALLS // 5 if quick else CALLS
    if wanted("call_out"):
        yield call_time("call_out", 0.6e-3, setting, calls)
    if wanted("call_new"):
        yield call_time("call_new", 1.2e-3, setting, calls)
    if wanted("import"):
        yield import_time(setting, 3 if quick else 9)
    for target, cold, cached in (("cpu", 100.0, 10.0), ("ptx", 60.0, 10.0)):
        if wanted(f"compile_{target}") or wanted(f"cached_{target}"):
            both = compile_times(target, cold, cached, setting, 3 if quick else 7)
            yield from (r for r in both if wanted(r.op))
    for which in ("elementwise", "softmax"):
        if wanted(f"tiered_{which}"):
            yield tiered_time(which, 25.0, setting, 3 if quick else 7)


def call_time(op: str, bar_ms: float, setting: Setting, calls: int) -> Record:
    """A kernel that adds two small arrays, called from Python, against np.add."""
    from bench import kernels

    x, y, out = np.arange(SMALL, dtype=np.float32), np.ones(SMALL, np.float32), np.empty(SMALL, np.float32)
    add, reference = kernels.add, x + y
    if op == "call_out":
        ours, theirs = Variant(OURS, lambda _: add(x, y, out=out)), Variant("np.add", lambda _: np.add(x, y, out=out))
    else:
        ours, theirs = Variant(OURS, lambda _: add(x, y), True), Variant("np.add", lambda _: np.add(x, y), True)

    def verify(slot: int, returned: object, variant: Variant) -> str:
        got = returned if variant.returns else out
        return "" if np.array_equal(np.asarray(got), reference) else f"{got}, expected {reference}"

    record = _record(op, "f32", [SMALL], setting, bar_ms)
    prepared = Prepared([ours, theirs], lambda: out.fill(np.nan), verify)
    problems = check(prepared, prepared.variants)
    if problems:
        record.error = "; ".join(f"{name}: {text}" for name, text in problems.items())
        return record
    # `lambda _` would be a fifth of what is measured: the loops call the kernel itself.
    loops = [replace(v, run=loop) for v, loop in zip(prepared.variants, _loops(op, add, x, y, out, calls))]
    samples = interleave(prepared, loops, HostClock(), Plan(15, 1, 1, 10.0))
    summarise(record, {n: [t / calls for t in times] for n, times in samples.items()}, 0, None)
    return record


def _loops(
    op: str, add: Callable[..., object], x: np.ndarray, y: np.ndarray, out: np.ndarray, calls: int
) -> list[Callable[[int], object]]:
    def with_out(function: Callable[..., object]) -> Callable[[int], object]:
        def loop(_: int) -> None:
            for _ in range(calls):
                function(x, y, out=out)

        return loop

    def with_result(function: Callable[..., object]) -> Callable[[int], object]:
        def loop(_: int) -> None:
            for _ in range(calls):
                function(x, y)

        return loop

    chosen = with_out if op == "call_out" else with_result
    return [chosen(add), chosen(np.add)]


def import_time(setting: Setting, repeats: int) -> Record:
    """`import tilewright` in a fresh process, against importing numpy and llvmlite, which it cannot do without."""
    record = _record("import", "", [], setting, None)
    samples: dict[str, list[float]] = {OURS: [], "numpy + llvmlite": []}
    try:
        with tempfile.TemporaryDirectory() as cache:
            _child("import-ours", cache)  # bytecode and the file cache are warm after the first
            for _ in range(repeats):
                samples[OURS].append(_child("import-ours", cache))
                samples["numpy + llvmlite"].append(_child("import-base", cache))
    except subprocess.CalledProcessError as error:
        record.error = _failure(error)
        return record
    summarise(record, samples, 0, Bar(1 / 1.5))
    return record


def compile_times(target: str, cold_bar: float, cached_bar: float, setting: Setting, repeats: int) -> list[Record]:
    """An elementwise kernel compiled in a fresh process after the import: with an empty cache, then again with a full one."""
    cold = _record(f"compile_{target}", "f32", [SMALL], setting, cold_bar)
    cached = _record(f"cached_{target}", "f32", [SMALL], setting, cached_bar)
    first: list[float] = []
    again: list[float] = []
    try:
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as cache:
                first.append(_child(f"compile-{target}", cache))
                again.append(_child(f"compile-{target}", cache))
    except subprocess.CalledProcessError as error:
        cold.error = cached.error = _failure(error)
        return [cold, cached]
    for record, times in ((cold, first), (cached, again)):
        summarise(record, {OURS: times}, 0, None)
    return [cold, cached]


def tiered_time(which: str, bar_ms: float, setting: Setting, repeats: int) -> Record:
    """The first call of a kernel in tiers, on a million elements, in a fresh process with an empty cache that has compiled one other kernel."""
    record = _record(f"tiered_{which}", "f32", [1 << 20], setting, bar_ms)
    times: list[float] = []
    try:
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as cache:
                times.append(_child(f"tiered-{which}", cache))
    except subprocess.CalledProcessError as error:
        record.error = _failure(error)
        return record
    summarise(record, {OURS: times}, 0, None)
    return record


def _record(op: str, dtype: str, shape: list[int], setting: Setting, bar_ms: float | None) -> Record:
    return Record(op, shape, dtype, setting.device, commit=setting.commit, date=setting.date, bar_ms=bar_ms)


def _failure(error: subprocess.CalledProcessError) -> str:
    return f"a fresh process failed: {str(error.stderr).strip()[-600:]}"


def _child(what: str, cache: str) -> float:
    environment = {**os.environ, "TILEWRIGHT_CACHE_DIR": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # programs that are started again find bytecode
    paths = [str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    command = [sys.executable, "-m", "bench.latency_child", what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout.split()[-1])

