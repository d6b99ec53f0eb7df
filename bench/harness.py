"""How every benchmark is run: check all variants, then time them in interleaved rounds.

In: a `Case` that builds its data and variants, a `Clock` and a `Plan`. Out: a `Record`, one line of the result file. What holds
in between: outputs are poisoned before each check, so that a variant that writes nothing fails; a peer that computes something
wrong is reported and never compared with; the first variant is ours. All variants share the same buffers, so none of them has
luckier memory.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

OURS = "tilewright"

Run = Callable[[int], object]
"""One call on the buffers of a slot. GPU calls are only queued."""


@dataclass(frozen=True)
class Variant:
    """One way to compute the case."""

    name: str
    run: Run
    returns: bool = False
    """The result is what `run` returns; otherwise it is in the case's output buffer of that slot."""


@dataclass(frozen=True)
class Prepared:
    """A case with its data in memory."""

    variants: Sequence[Variant]
    poison: Callable[[], None]
    """Overwrites every output buffer."""
    verify: Callable[[int, object, Variant], str]
    """(slot, what the variant returned, the variant): what is wrong with the result, '' when nothing is."""
    slots: int = 1
    """Copies of the buffers; calls go round them so that a cache never holds the next input."""
    batch: int = 1
    """Calls in one sample: more than one where a single call is too short for the clock."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bar:
    """The ratio that is promised, against the best of `peers` (all when empty)."""

    ratio: float
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    op: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    """Bytes that have to move: inputs read once, outputs written once."""
    prepare: Callable[[], Prepared]
    bar: Bar | None = None

    @property
    def label(self) -> str:
        return f"{self.op} {'x'.join(map(str, self.shape))} {self.dtype}"


@dataclass(frozen=True)
class Plan:
    """How much to time."""

    rounds: int
    per_round: int
    warmups: int
    seconds: float
    """No new round of a case starts after this long, once there are three."""
    rest: float = 0.0
    """Seconds between two variants: threads of BLAS and OpenMP spin for a while after their work, on cores that others need."""


@dataclass(frozen=True)
class Setting:
    """Where and when: the same for every record of a run."""

    device: str
    commit: str
    date: str


@dataclass
class Record:
    """One line of a result file. Times are milliseconds, medians unless the name says otherwise."""

    op: str
    shape: list[int]
    dtype: str
    device: str
    ours_ms: float | None = None
    ours_min_ms: float | None = None
    peer: str | None = None
    """The fastest peer."""
    peer_ms: float | None = None
    ratio: float | None = None
    """peer_ms / ours_ms: above 1 we are faster."""
    ratio_min: float | None = None
    """The same of the fastest samples: steadier on a machine that is not quiet."""
    GBps: float | None = None
    of_copy: float | None = None
    """Our GB/s over those of a plain device copy of the same dtype."""
    peers: dict[str, float] = field(default_factory=dict)
    peers_min: dict[str, float] = field(default_factory=dict)
    bar: float | None = None
    bar_ratio: float | None = None
    """The ratio the bar speaks of, where it names its peers."""
    bar_ms: float | None = None
    load: float | None = None
    """Cores that other processes kept busy meanwhile: figures of a run with more than a few hundredths are doubtful."""
    notes: list[str] = field(default_factory=list)
    commit: str = ""
    date: str = ""
    error: str | None = None

    def line(self) -> str:
        return json.dumps({k: _rounded(v) for k, v in asdict(self).items()})

    @property
    def met(self) -> bool | None:
        """Whether the bar was reached; None where there is none, or nothing to hold against it."""
        if self.bar_ms is not None:
            return None if self.ours_ms is None else self.ours_ms <= self.bar_ms
        ratio = self.bar_ratio if self.bar_ratio is not None else self.ratio
        return None if self.bar is None or ratio is None else ratio >= self.bar


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return value


class Clock(Protocol):
    def sample(self, run: Run, slots: Iterable[int], batch: int) -> list[float]:
        """Milliseconds of a call, for each sample; `slots` has `batch` entries for each of them."""


class HostClock:
    """Wall time. Threads of OpenMP libraries keep spinning for a while after their work, on cores the next library wants: each
    variant waits them out, and its first calls, which wake its own threads again and bring data near, are not counted: two at least, and
    those of the first milliseconds. The wait is busy: an idle core would slow down."""

    def __init__(self, settle: float = 0.01, warm: float = 0.005) -> None:
        self.settle = settle
        self.warm = warm

    def sample(self, run: Run, slots: Iterable[int], batch: int) -> list[float]:
        order = list(slots)
        settled = time.perf_counter() + self.settle
        while time.perf_counter() < settled:
            pass
        warm, calls = time.perf_counter() + self.warm, 0
        while calls < 2 or time.perf_counter() < warm:
            run(order[0])
            calls += 1
        times = []
        for first in range(0, len(order), batch):
            start = time.perf_counter()
            for slot in order[first : first + batch]:
                run(slot)
            times.append((time.perf_counter() - start) * 1e3 / batch)
        return times


class LoadMeter:
    """How many cores other processes use, on average since it was made."""

    def __init__(self, statistics_file: Path = Path("/proc/stat")) -> None:
        self._file = statistics_file
        self._start = self._busy(), time.perf_counter(), time.process_time()

    def _busy(self) -> float | None:
        """Seconds all cores together have worked; None where the system does not say."""
        try:
            fields = self._file.read_text().split("\n", 1)[0].split()
            user, nice, system, _idle, _waiting, interrupt, soft = (int(f) for f in fields[1:8])
        except (OSError, ValueError):
            return None
        return (user + nice + system + interrupt + soft) / os.sysconf("SC_CLK_TCK")

    def read(self) -> float | None:
        before, since, ours = self._start
        after = self._busy()
        passed = time.perf_counter() - since
        if before is None or after is None or after == before or passed < 0.1:
            return None
        return max(0.0, (after - before) - (time.process_time() - ours)) / passed


def check(prepared: Prepared, variants: Iterable[Variant]) -> dict[str, str]:
    """What is wrong, by variant; no entry where everything is right."""
    problems: dict[str, str] = {}
    for variant in variants:
        for slot in range(prepared.slots):
            prepared.poison()
            try:
                problem = prepared.verify(slot, variant.run(slot), variant)
            except Exception as error:  # whatever a library throws: reported, and the others go on
                problem = f"{type(error).__name__}: {str(error).strip()[:600]}"
            if problem:
                problems[variant.name] = problem
                break
    return problems


def interleave(
    prepared: Prepared, variants: Sequence[Variant], clock: Clock, plan: Plan, now: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Samples of each variant, taken in turn: what slows the machine down for a while slows them all."""
    for variant in variants:
        for warmup in range(plan.warmups):
            variant.run(warmup % prepared.slots)
    samples: dict[str, list[float]] = {v.name: [] for v in variants}
    start, position = now(), 0
    calls = plan.per_round * prepared.batch
    for turn in range(plan.rounds):
        if turn >= 3 and now() - start > plan.seconds:
            break
        # The order turns and is reversed: nobody always runs after the same neighbour.
        shift = turn // 2 % len(variants)
        for variant in (*variants[shift:], *variants[:shift])[:: -1 if turn % 2 else 1]:
            order = [(position + i) % prepared.slots for i in range(calls)]
            if plan.rest:
                time.sleep(plan.rest)
            samples[variant.name] += clock.sample(variant.run, order, prepared.batch)
        position += calls
    return samples


def measure(case: Case, clock: Clock, plan: Plan, setting: Setting, copy_rate: float | None = None) -> Record:
    """Run one case. Never raises for what a variant does: the record says it in `error`."""
    record = Record(case.op, list(case.shape), case.dtype, setting.device, commit=setting.commit, date=setting.date)
    try:
        prepared = case.prepare()
    except Exception as error:  # no memory, a front-end error: the other cases still run
        record.error = f"cannot prepare: {type(error).__name__}: {str(error).strip()[:600]}"
        return record
    record.notes += prepared.notes
    problems = check(prepared, prepared.variants)
    sound = [v for v in prepared.variants if v.name not in problems]
    meter = LoadMeter()
    try:
        samples = interleave(prepared, sound, clock, plan) if sound else {}
    except Exception as error:  # a fault on the device, seen late
        samples = {}
        problems["timing"] = f"{type(error).__name__}: {str(error).strip()[:600]}"
    record.load = meter.read()
    ours = [v for v in sound if v.name == OURS]
    if samples and ours:
        # A result that was right once and is wrong now is a race.
        problems |= {f"{name} after timing": text for name, text in check(prepared, ours).items()}
    summarise(record, samples, case.nbytes, case.bar, copy_rate)
    if problems:
        record.error = "; ".join(f"{name}: {text}" for name, text in problems.items())
    return record


def summarise(
    record: Record, samples: Mapping[str, Sequence[float]], nbytes: int, bar: Bar | None, copy_rate: float | None = None
) -> None:
    """Fill in the figures from the samples."""
    medians = {name: statistics.median(times) for name, times in samples.items() if times}
    minima = {name: min(times) for name, times in samples.items() if times}
    record.peers = {n: t for n, t in medians.items() if n != OURS}
    record.peers_min = {n: t for n, t in minima.items() if n != OURS}
    record.ours_ms, record.ours_min_ms = medians.get(OURS), minima.get(OURS)
    record.bar = bar.ratio if bar else None
    # Another way to call ours ("tilewright, …") is shown among the peers, and is none.
    others = [name for name in record.peers if not name.startswith(OURS)]
    if others:
        record.peer = min(others, key=record.peers.__getitem__)
        record.peer_ms = record.peers[record.peer]
    if record.ours_ms is None or record.ours_min_ms is None:
        return
    if nbytes:
        record.GBps = nbytes / record.ours_ms / 1e6
        record.of_copy = record.GBps / copy_rate if copy_rate else None
    if record.peer_ms is not None:
        record.ratio = record.peer_ms / record.ours_ms
        record.ratio_min = min(record.peers_min[name] for name in others) / record.ours_min_ms
    named = [t for n, t in record.peers.items() if bar and n in bar.peers]
    if named:
        record.bar_ratio = min(named) / record.ours_ms
