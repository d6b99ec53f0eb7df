"""`tw.latency`: how long a critical function takes, as a distribution. In: the function and its arguments; out: a `Latency`.

The loop around the function is machine code (`codegen/critical/entry.py`), and so is the counter it reads: CNTVCT on AArch64, the time stamp counter on x86. The
thread is pinned to one core meanwhile. The counter's rate is compared with the system's clock, and its resolution is measured: the smallest step between
two readings. Where a call is shorter than ten such steps, calls are timed in batches, and percentiles are of batches. What the same loop takes around an
empty function is subtracted. States and arrays are copied first: measuring leaves them as they are.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.base.errors import UserError
from tilewright.base.source import NOWHERE
from tilewright.compile.critical_estimate import LatencyEstimate
from tilewright.execute.critical.function import CriticalFunction, critical, pinned_to
from tilewright.frontend.critical.state import NativeState
from tilewright.frontend.words.python_words import python_word

_TICKS = 10
"""Steps of the counter below which calls are timed in batches."""
_PERCENTILES = (50.0, 99.0, 99.9, 99.99)
_PYTHON_BATCH = 200
_MOST_SAMPLES = 2_000_000

clock: Any = python_word("clock")


@critical
def _empty() -> None:
    pass


@critical
def _ticks() -> int:
    return clock()  # type: ignore[no-any-return]


@critical(overflow="wrap")
def _chain(x: int, n: int) -> int:
    """Two cycles for each turn, on any core: the second operation waits for the first, and the next turn for it."""
    for k in range(n):
        x = (x ^ k) + k
    return x


@dataclass(frozen=True)
class Distribution:
    """Times of calls, in nanoseconds: one for each batch of `batch` calls, its mean."""

    times: np.ndarray
    batch: int

    def __repr__(self) -> str:
        return f"<{len(self.times)} batches of {self.batch} calls: p50 {self.p50:.1f} ns, p99 {self.p99:.1f}, most {self.most:.1f}>"

    def percentile(self, share: float) -> float:
        """The time that `share` percent of the batches do not exceed."""
        return float(np.percentile(self.times, share, method="higher"))

    @property
    def p50(self) -> float:
        return self.percentile(50)

    @property
    def p99(self) -> float:
        return self.percentile(99)

    @property
    def p99_9(self) -> float:
        return self.percentile(99.9)

    @property
    def p99_99(self) -> float:
        return self.percentile(99.99)

    @property
    def least(self) -> float:
        return float(self.times.min())

    @property
    def most(self) -> float:
        return float(self.times.max())

    @property
    def jitter(self) -> float:
        """From the median to the 99.9th percentile."""
        return self.p99_9 - self.p50

    def buckets(self) -> list[tuple[float, float, int]]:
        """A histogram as HdrHistogram has it: sixteen buckets for each doubling. From, to, and how many batches lie there; empty ones are left out."""
        found: dict[tuple[int, int], int] = {}
        values = np.maximum(self.times, 2.0**-4)
        powers = np.floor(np.log2(values)).astype(int)
        places = np.minimum(((values / 2.0**powers - 1) * 16).astype(int), 15)
        keys, counts = np.unique(powers * 16 + places, return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            found[divmod(key, 16)] = count
        return [(2.0**p * (1 + k / 16), 2.0**p * (1 + (k + 1) / 16), n) for (p, k), n in sorted(found.items())]


@dataclass(frozen=True)
class Latency:
    """What was measured of a critical function. `native`: called from machine code; `python`: called from Python."""

    name: str
    core: int
    tick_ns: float
    """Nanoseconds of one tick of the counter."""
    resolution_ns: float
    """The smallest step between two readings."""
    overhead_ns: float
    """What was subtracted from each batch."""
    calls: int
    faults: int
    """Calls that ended with a fault."""
    native: Distribution
    python: Distribution | None
    budget_ns: int | None
    """`max_latency_ns` of the function."""
    cycle_ns: float
    """Nanoseconds of a cycle of the core, measured."""
    estimate: LatencyEstimate | None
    """What a model of the core says of the function's longest way; None where Capstone is not installed."""

    @property
    def within(self) -> bool | None:
        """Whether the 99th percentile of native calls is within the budget; None where there is none."""
        return None if self.budget_ns is None else self.native.p99 <= self.budget_ns

    def __repr__(self) -> str:
        python = f", from Python {self.python.p50:.1f}" if self.python is not None else ""
        return f"<latency of {self.name}: native p50 {self.native.p50:.1f} ns, p99 {self.native.p99:.1f}{python}; {self.calls} calls>"

    def __str__(self) -> str:
        """The table and the histogram."""
        lines = [
            f"{self.name}: {self.calls} calls on core {self.core}; counter {1e3 / self.tick_ns:.1f} MHz, resolution {self.resolution_ns:.1f} ns, "
            f"{self.overhead_ns:.1f} ns subtracted from each batch"
        ]
        if self.faults:
            lines.append(f"{self.faults} calls ended with a fault: these are times of calls that fail")
        lines.append(f"{'ns per call':<14}{'batch':>7}{'least':>10}{'p50':>10}{'p99':>10}{'p99.9':>10}{'p99.99':>10}{'most':>12}{'jitter':>10}")
        for label, found in (("native", self.native), ("from Python", self.python)):
            if found is not None:
                values = (found.least, found.p50, found.p99, found.p99_9, found.p99_99)
                lines.append(f"{label:<14}{found.batch:>7}" + "".join(f"{v:>10.1f}" for v in values) + f"{found.most:>12.1f}{found.jitter:>10.1f}")
        if self.native.batch > 1:
            lines.append(f"a native call is shorter than {_TICKS} steps of the counter: percentiles are of batches of {self.native.batch} calls")
        if self.budget_ns is not None:
            word = "within" if self.within else "OVER"
            lines.append(f"max_latency_ns={self.budget_ns}: p99 is {self.native.p99:.1f} ns, {word} the budget (measured, not promised)")
        if self.estimate is not None:
            lines.append(
                f"static estimate of the longest way: {self.estimate.repeated:.1f} cycles, {self.estimate.repeated * self.cycle_ns:.1f} ns at {1 / self.cycle_ns:.2f} GHz (a model of {self.estimate.core})"
            )
        lines += self._bars()
        return "\n".join(lines)

    def _bars(self) -> list[str]:
        found = self.native.buckets()
        shown = found if len(found) <= 24 else found[:22]
        most = max(n for _, _, n in shown)
        lines = [f"{low:>10.1f} – {high:<8.1f}{n:>9} {'█' * max(1, round(30 * n / most))}" for low, high, n in shown]
        if len(found) > len(shown):
            rest = found[len(shown) :]
            lines.append(f"{rest[0][0]:>10.1f} – {rest[-1][1]:<8.1f}{sum(n for _, _, n in rest):>9} in {len(rest)} more buckets")
        return lines

    def plot(self, path: str | Path) -> Path:
        """Write the percentiles as a picture (SVG): times over how many batches in a thousand, ten thousand… are slower."""
        where = Path(path)
        try:
            where.write_text(_picture(self), encoding="utf-8")
        except OSError as error:
            raise UserError.at("TW007", f"'{where}' cannot be written: {error.strerror or error}") from None
        return where


def latency(
    function: CriticalFunction[..., Any], args: Sequence[object] = (), n: int = 1_000_000, *, cpu: int | None = None, python: bool = True
) -> Latency:
    """Measure `n` calls of a critical function with these arguments, from machine code and, unless `python=False`, from Python.

    The calling thread runs on core `cpu` meanwhile; without it on that of `@tw.critical(cpu=…)`, else on the last one that the process may use. States and
    arrays are copied, so calls do not change those given. `max_latency_ns` is compared with the 99th percentile, and the result says so.
    """
    if not isinstance(function, CriticalFunction):
        raise UserError.at("TW009", f"latency() takes a critical function, not a {type(function).__name__}", help="mark the function with @tw.critical")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UserError.at("TW016", f"n is {n!r}", help="give the number of calls, from 1 on")
    if cpu is not None and (isinstance(cpu, bool) or not isinstance(cpu, int)):
        raise UserError.at("TW016", f"cpu is {cpu!r}", help="give the number of a core")
    exact = [_copied(value) for value in function.exact(tuple(args), {})]
    core = cpu if cpu is not None else function.constraints.cpu_affinity
    if core is None:
        core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    with pinned_to(core, function.span if function.constraints.cpu_affinity is not None else NOWHERE):
        return _measured(function, exact, n, core, python)


def _measured(function: CriticalFunction[..., Any], exact: list[object], n: int, core: int, python: bool) -> Latency:
    tick, step = _calibrated(core)
    slots, kept = _slots(exact)
    run, empty = _timer(function), _timer(_empty)
    trial = np.zeros(32, np.int64)
    run(slots, 8, 64, trial)
    run(slots, 32, 256, trial)
    per_call = max(float(np.median(trial)) / 256, 1e-3)
    batch = 1 if per_call >= _TICKS * step else math.ceil(2 * _TICKS * step / per_call)
    batches = max(1, min(n // batch, _MOST_SAMPLES))
    base = np.zeros(min(batches, 10000), np.int64)
    empty(slots, len(base), batch, base)
    overhead = float(np.median(base))
    samples = np.zeros(batches, np.int64)
    faults = run(slots, batches, batch, samples)
    times = np.maximum(samples - overhead, 0.0) * tick / batch
    del kept
    from_python = _from_python(function, exact, min(n, 200_000)) if python else None
    return Latency(
        function.__name__, core, tick, step * tick, overhead * tick, batches * batch, faults, Distribution(times, batch), from_python,
        function.constraints.target_latency_ns, _cycle(core, tick), _estimate(function),
    )  # fmt: skip


def _timer(function: CriticalFunction[..., Any]) -> Callable[[Any, int, int, np.ndarray], int]:
    loop = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)(function.loaded.timer)

    def run(slots: Any, batches: int, calls: int, samples: np.ndarray) -> int:
        return int(loop(ctypes.addressof(slots), batches, calls, samples.ctypes.data))

    return run


@functools.cache
def _cycle(core: int, tick: float) -> float:
    """Nanoseconds of a cycle: of a chain whose cycles are known, the quickest of some."""
    turns = 2000
    samples = np.zeros(64, np.int64)
    slots, _ = _slots([1, turns])
    _timer(_chain)(slots, len(samples), 1, samples)
    return float(samples.min()) * tick / (2 * turns)


def _estimate(function: CriticalFunction[..., Any]) -> LatencyEstimate | None:
    try:
        return function.proof().estimate
    except UserError:
        return None  # there is no disassembler


@functools.cache
def _calibrated(core: int) -> tuple[float, int]:
    """Nanoseconds of a tick, and the smallest step between two readings of the counter, in ticks."""
    _ticks()
    begin, first = time.perf_counter_ns(), _ticks()
    time.sleep(0.05)
    while time.perf_counter_ns() - begin < 50_000_000:
        pass
    end, last = time.perf_counter_ns(), _ticks()
    tick = (end - begin) / max(last - first, 1)
    samples = np.zeros(20000, np.int64)
    slots, _ = _slots([])
    _timer(_empty)(slots, len(samples), 0, samples)
    steps = samples[samples > 0]
    return tick, int(steps.min()) if steps.size else 1


def _slots(exact: Sequence[object]) -> tuple[Any, list[object]]:
    """The arguments in slots of eight bytes, and what must live meanwhile."""
    words = (ctypes.c_uint64 * max(len(exact), 1))()
    for position, value in enumerate(exact):
        if isinstance(value, NativeState):
            words[position] = value.address
        elif isinstance(value, np.ndarray):
            words[position] = value.ctypes.data
        elif isinstance(value, float):
            ctypes.c_double.from_buffer(words, 8 * position).value = value
        else:
            assert isinstance(value, int)
            words[position] = value & ((1 << 64) - 1)
    return words, list(exact)


def _copied(value: object) -> object:
    if isinstance(value, NativeState | np.ndarray):
        return value.copy()
    return value


def _from_python(function: CriticalFunction[..., Any], exact: Sequence[object], n: int) -> Distribution | None:
    """Batches of calls from a loop of Python, less what the loop takes without them."""
    names = [f"a{k}" for k in range(len(exact))]
    made: dict[str, Any] = {}
    exec(f"def calls(turns, f, {', '.join(names)}):\n    for _ in turns: f({', '.join(names)})\ndef bare(turns, f, {', '.join(names)}):\n    for _ in turns: pass\n", made)
    batches = max(1, n // _PYTHON_BATCH)

    def measure(loop: Callable[..., object], count: int) -> np.ndarray:
        found = np.empty(count)
        for k in range(count):
            begin = time.perf_counter_ns()
            loop(itertools.repeat(None, _PYTHON_BATCH), function, *exact)
            found[k] = time.perf_counter_ns() - begin
        return found

    try:
        measure(made["calls"], 4)
        base = float(np.median(measure(made["bare"], min(batches, 200))))
        return Distribution(np.maximum(measure(made["calls"], batches) - base, 0.0) / _PYTHON_BATCH, _PYTHON_BATCH)
    except UserError:
        return None  # calls with these arguments fail; the native times say that they do


def _picture(found: Latency) -> str:
    """Percentiles over a logarithmic axis of rarity, as HdrHistogram draws them."""
    shares = [0.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99, 99.999, 100.0]
    width, height, left, top = 720, 360, 70, 40
    curves = [("native", "#1f77b4", found.native), ("from Python", "#ff7f0e", found.python)]
    shown = [(label, colour, [d.percentile(s) for s in shares]) for label, colour, d in curves if d is not None]
    high = max(max(values) for _, _, values in shown) or 1.0
    low = 10.0 ** math.floor(math.log10(max(min(min(values) for _, _, values in shown), 0.1)))
    decades = max(math.ceil(math.log10(high / low) - 1e-9), 1)
    span = float(decades)
    rarity = [min(-math.log10(max(1 - s / 100, 1e-6)), 6.0) for s in shares]

    def x(value: float) -> float:
        return left + (width - left - 40) * value / 6.0

    def y(value: float) -> float:
        return top + (height - top - 40) * (1 - math.log10(max(value, low) / low) / span)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="22" font-size="14">{found.name}: ns per call, {found.calls} calls</text>',
    ]
    for power in range(7):
        label = {0: "0 %", 1: "90 %", 2: "99 %"}.get(power, f"99.{'9' * (power - 2)} %")  # of batches that are no slower
        parts.append(f'<line x1="{x(power):.1f}" y1="{top}" x2="{x(power):.1f}" y2="{height - 40}" stroke="#ddd"/><text x="{x(power) - 12:.1f}" y="{height - 20}">{label}</text>')
    for k in range(decades + 1):
        value = low * 10.0**k
        parts.append(f'<line x1="{left}" y1="{y(value):.1f}" x2="{width - 40}" y2="{y(value):.1f}" stroke="#ddd"/><text x="8" y="{y(value) + 4:.1f}">{value:,.10g}</text>')
    for number, (label, colour, values) in enumerate(shown):
        points = " ".join(f"{x(r):.1f},{y(v):.1f}" for r, v in zip(rarity, values, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 12}" y="{top + 18 + 18 * number}" fill="{colour}">{label}</text>')
    if found.budget_ns is not None and low <= found.budget_ns <= high:
        parts.append(f'<line x1="{left}" y1="{y(found.budget_ns):.1f}" x2="{width - 40}" y2="{y(found.budget_ns):.1f}" stroke="#d62728" stroke-dasharray="5 4"/>')
    return "\n".join([*parts, "</svg>", ""])
