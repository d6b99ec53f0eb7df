"""The search for the fastest of several ways to run a kernel: candidates in, a `Tuning` out.

`search` first measures what it is given, best guess first, then climbs: it tries the neighbours of the best so far, moves when one is faster, and
ends when none is or the time is up. A `Bench` runs and times candidates, a `Ledger` keeps what was measured; `execute/tune.py` has them for
schedules of contractions, `execute/simt/tuning.py` for launches of explicit kernels.

Machines slow down and speed up while a search runs, so a candidate is measured in turns with the first one that worked, call by call, and what
counts is their ratio. A short measurement may still be lucky, and the luckiest of many looks best: the few best and the first choice are
therefore measured once more at the end, longer and all in turns, and only that decides between them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np

from tilewright.base.dtypes import DType, from_numpy
from tilewright.base.errors import DeviceError, TilewrightError
from tilewright.base.record import record
from tilewright.compile import tuning
from tilewright.compile.driver import compiler_version
from tilewright.compile.tuning import Extents, Measurement, TuningTable

FINALISTS = 4
"""Schedules measured again at the end."""
_FINAL_SHARE = 0.15
"""Part of the budget kept for that."""
_ROUNDS = 4
"""How much longer that measurement is."""
_AHEAD = 3
"""Schedules compiled before their turn."""
UNFINISHED = "did not finish"
"""Of a schedule at which the process ended."""


@record
class Progress:
    """Where a search stands, after each schedule."""

    trials: tuple[Measurement, ...]
    latest: Measurement
    best: Measurement | None
    elapsed: float
    budget: float


@record
class Tuning:
    """What a search found. `trials` are in the order they were measured; `best` is None where nothing could be tuned, and `reason` says why."""

    kernel: str
    device: str
    trials: tuple[Measurement, ...] = ()
    best: Measurement | None = None
    default: Measurement | None = None
    """What runs without tuning."""
    table: TuningTable | None = None
    elapsed: float = 0.0
    reason: str = ""

    @property
    def speedup(self) -> float:
        """How much faster the best one is than what runs without tuning."""
        return self.default.seconds / self.best.seconds if self.best and self.default and self.default.ok else 1.0

    def ranking(self) -> tuple[Measurement, ...]:
        """What worked: those measured twice first, each part fastest first."""
        return tuning.in_order(m for m in self.trials if m.ok)

    def __repr__(self) -> str:
        return f"<tuning of {self}>"

    def __str__(self) -> str:
        if self.best is None:
            return f"{self.kernel} on {self.device}: nothing to tune: {self.reason}"
        return (
            f"{self.kernel} on {self.device}: {self.best.seconds * 1e6:.1f} µs with {self.best.schedule} "
            f"({self.speedup:.3f} × the default; {len(self.trials)} schedules in {self.elapsed:.1f} s)"
        )


Report = Callable[[Progress], None]


# -- searching -----------------------------------------------------------------------------------------------------


class Candidate(Protocol):
    """What can be measured: a schedule, or a way to launch."""

    def describe(self) -> str:
        """The text that stands for it in the table."""


S = TypeVar("S", bound=Candidate)


class Bench(Protocol):
    """What the search needs of a device. All may raise TilewrightError."""

    def ahead(self, schedules: Sequence[str]) -> None:
        """These come next: compile them if that disturbs nothing."""
        ...

    def check(self, schedule: str) -> str:
        """Run once; how the result differs from that of the first schedule checked, or nothing."""
        ...

    def seconds(self, schedules: Sequence[str], rounds: int = 1) -> list[float]:
        """The median time of a call of each, measured in turns."""
        ...

    def usable(self) -> bool:
        """Whether the device still works."""
        ...


class Ledger(Protocol):
    """Where measurements are kept."""

    def failed_before(self, schedule: str) -> str: ...

    def begin(self, schedule: str) -> None: ...

    def measured(self, schedule: str, seconds: float, error: str) -> Measurement: ...

    def abandon(self, schedule: str) -> None: ...

    def finish(self, measurements: Sequence[Measurement]) -> TuningTable | None: ...


def search(
    ranked: Sequence[S],
    around: Callable[[S], list[S]],
    bench: Bench,
    ledger: Ledger,
    empty: Tuning,
    budget: float,
    progress: Report | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuning:
    """Measure the ranked schedules, then climb from the best. The first one is measured whatever the budget."""
    start = clock()
    trials: dict[str, Measurement] = {}
    by_text = {s.describe(): s for s in ranked}
    listed = frozenset(by_text)
    queue = deque(by_text)
    climbed: set[str] = set()

    def climb(text: str) -> list[str]:
        """The neighbours of a schedule that were not thought of yet."""
        climbed.add(text)
        fresh = {s.describe(): s for s in around(by_text[text]) if s.describe() not in by_text}
        by_text.update(fresh)
        return list(fresh)

    while True:
        leader = _fastest(trials)
        if not queue and leader is not None and leader.schedule not in climbed:
            queue.extend(climb(leader.schedule))
        if not queue or (trials and clock() - start >= budget * (1 - _FINAL_SHARE)):
            break
        text = queue.popleft()
        bench.ahead([text, *list(queue)[:_AHEAD]])
        try:
            latest = trials[text] = _measure(text, _reference(trials), bench, ledger)
        except BaseException:
            ledger.abandon(text)
            ledger.finish(tuple(trials.values()))
            raise
        if latest.ok and text not in listed and (leader is None or latest.seconds < leader.seconds * tuning.CLEARLY):
            # A better place to climb from: its neighbours come first.
            queue.extendleft(reversed(climb(text)))
        if progress is not None:
            progress(Progress(tuple(trials.values()), latest, _fastest(trials), clock() - start, budget))
        if not bench.usable():
            ledger.finish(tuple(trials.values()))
            raise DeviceError.at(
                "TW032", f"the device failed while {text} was tried: {latest.error}", help="start a new process; that schedule is not tried again"
            )
    best = _play_off(trials, bench)
    table = ledger.finish(tuple(trials.values()))
    first = trials[ranked[0].describe()]
    reason = "" if best else f"no schedule worked: {first.error}"
    return replace(empty, trials=tuple(trials.values()), best=best, default=first, table=table, elapsed=clock() - start, reason=reason)


def _fastest(trials: Mapping[str, Measurement]) -> Measurement | None:
    return min((m for m in trials.values() if m.ok), key=lambda m: m.seconds, default=None)


def _reference(trials: Mapping[str, Measurement]) -> Measurement | None:
    """The first schedule that worked: all others are compared with it."""
    return next((m for m in trials.values() if m.ok), None)


def _measure(text: str, reference: Measurement | None, bench: Bench, ledger: Ledger) -> Measurement:
    before = ledger.failed_before(text)
    if before:
        return ledger.measured(text, 0.0, before)
    ledger.begin(text)
    seconds = 0.0
    try:
        error = bench.check(text)
        if not error and reference is None:
            (seconds,) = bench.seconds([text])
        elif not error and reference is not None:
            own, other = bench.seconds([text, reference.schedule])
            seconds = own / other * reference.seconds
    except TilewrightError as failure:
        error = str(failure).splitlines()[0][:300]
    return ledger.measured(text, seconds, error)


def _play_off(trials: dict[str, Measurement], bench: Bench) -> Measurement | None:
    """Measure the best few and the reference again, longer and in turns; the winner. Other times are put on the new scale.

    The reference wins unless another one is clearly faster.
    """
    reference = _reference(trials)
    if reference is None:
        return None
    top = sorted((m for m in trials.values() if m.ok), key=lambda m: m.seconds)[:FINALISTS]
    finalists = list(dict.fromkeys([reference.schedule, *(m.schedule for m in top)]))
    times = dict(zip(finalists, bench.seconds(finalists, _ROUNDS), strict=True))
    scale = times[reference.schedule] / reference.seconds
    for text, m in trials.items():
        if m.ok:
            again = text in times
            trials[text] = replace(m, seconds=times[text] if again else m.seconds * scale, rounds=1 + _ROUNDS if again else 1)
    winner = min(finalists, key=lambda text: times[text])
    if times[reference.schedule] * tuning.CLEARLY <= times[winner]:
        winner = reference.schedule
    return trials[winner]


class TableLedger:
    """Keeps measurements in the tables. What was begun and never ended, because the process died, is found as a failure next time."""

    def __init__(self, key: str, kernel: str, target: str, extents: Extents, divisors: Extents = ()) -> None:
        self.key, self.kernel, self.target = key, kernel, target
        self.extents, self.divisors = extents, divisors
        self.version = compiler_version()
        known = tuning.store().get(key)
        self.failures = {m.schedule: m.error for m in known.entries if m.version == self.version and m.error} if known else {}

    def failed_before(self, schedule: str) -> str:
        return self.failures.get(schedule, "")

    def begin(self, schedule: str) -> None:
        tuning.store().add(self.key, self.kernel, self.target, [self.measured(schedule, 0.0, UNFINISHED)])

    def measured(self, schedule: str, seconds: float, error: str) -> Measurement:
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return Measurement(self.extents, schedule, seconds, error, date, self.version, self.divisors)

    def abandon(self, schedule: str) -> None:
        """The user stopped it: that is not the schedule's failure."""
        tuning.store().remove(self.key, self.extents, schedule)

    def finish(self, measurements: Sequence[Measurement]) -> TuningTable | None:
        return tuning.store().add(self.key, self.kernel, self.target, measurements)


def difference(found: np.ndarray, expected: np.ndarray, what: str = "schedule") -> str:
    """How a result differs from what was expected beyond what another order of additions explains; nothing if it does not."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"the result is {found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}"
    a, b = np.ascontiguousarray(found).reshape(-1), np.ascontiguousarray(expected).reshape(-1)
    if np.array_equal(a.view(np.uint8), b.view(np.uint8)):
        return ""
    dtype = from_numpy(found.dtype)
    if dtype is None or not dtype.is_float:
        wrong = np.flatnonzero(a != b)
        return f"{wrong.size} of {a.size} results differ from the default {what}'s" if wrong.size else ""
    wide = np.float64 if dtype.bits > 32 else np.float32
    x, y = a.astype(wide), b.astype(wide)
    if not np.array_equal(np.isfinite(x), np.isfinite(y)):
        return f"results that are no numbers are in other places than with the default {what}"
    finite = np.isfinite(y)
    scale = float(np.max(np.abs(y[finite]), initial=0.0))
    worst = float(np.max(np.abs(x[finite] - y[finite]), initial=0.0))
    if worst <= _tolerance(dtype) * scale:
        return ""
    return f"results differ from the default {what}'s by up to {worst:.3g}, where the largest is {scale:.3g}"


def _tolerance(dtype: DType) -> float:
    """Relative to the largest result. Narrow results may round to the other side; sums in f32 in another order differ more than that."""
    if dtype.bits > 32:
        return 1e-11
    return max(2e-5, 4 * 2.0 ** -{"f16": 10, "bf16": 7, "f8e4m3": 3, "f8e5m2": 2}.get(dtype.name, 23))
