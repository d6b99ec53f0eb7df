"""Runs the rows of a suite (`bench.contractions`, `bench.transformer`): checks, times in random order, and survives what a row
does to its process.

In: rows and a kind ("matmul" is on the GPU, "matmul-cpu" on the CPU; the table is `SUITES`). Out: one `ContractionRecord` each.
Rows run in a process of their own, which is started again after one that crashed, hung or left the device unusable: that row's
record says so and the others go on.

Every launch on a GPU has a random place in a queue that is filled while the device spins, and events around it; launches too
short for that are timed several together. Rows of a steady rate have a stretch of launches that are not counted before those that
are, in the same queue. Launches go round more buffers than any cache holds, whoever's they are.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import multiprocessing
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import ModuleType
from typing import TYPE_CHECKING

from bench.harness import OURS, Clock, LoadMeter, Record, Setting, summarise
from bench.peers import PeerMissing, cpp_compiler
from tilewright.base.errors import DeviceError

if TYPE_CHECKING:
    from bench.contractions import Place, Problem, Row, Thunk



@dataclass(frozen=True)
class Suite:
    """Where the rows of a kind come from: a module with `gpu_rows`, `cpu_rows`, `problem` and `companions`."""

    module: str
    gpu: bool
    row_seconds: float = 60.0
    """A row that takes longer is ended with its process."""

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


SUITES = {
    "matmul": Suite("bench.contractions", True),
    "matmul-cpu": Suite("bench.contractions", False),
    # Compiling the peers takes most of it.
    "transformer": Suite("bench.transformer", True, 240.0),
    "transformer-cpu": Suite("bench.transformer", False, 240.0),
}
KINDS = tuple(SUITES)
START_SECONDS = 180.0
"""For importing PyTorch and opening the device."""
BATCH_MS = 0.1
"""A sample lasts at least about this long on a GPU, or is `MOST_IN_BATCH` launches."""
MOST_IN_BATCH = 20
QUEUED = 200
"""Launches in the queue at a time: well below what the driver holds before it makes the host wait."""
STEADY_MS = 10.0
"""How long launches of a steady rate go on before they are timed, and then while they are."""
MOST_STEADY = 90


@dataclass
class ContractionRecord(Record):
    """One line of the result file; errors are distances from float64."""

    TFLOPS: float | None = None
    peer_TFLOPS: float | None = None
    weight_TBps: float | None = None
    """Bytes of weights over our time, for products of few rows."""
    peer_weight_TBps: float | None = None
    max_error: float | None = None
    peer_error: float | None = None
    """Of the fastest peer."""
    error_ratio: float | None = None
    """max_error / peer_error: below 1 ours is closer to float64."""
    of_rounded: float | None = None
    """Our rate of useful arithmetic over ours with every size rounded up."""
    of_plain: float | None = None
    """The time of our product alone over ours with what follows it."""
    samples: int | None = None
    launches: int | None = None
    """Kernels that one call of ours launches."""
    peer_launches: int | None = None
    """Of the fastest peer, where ours is several calls."""


@dataclass(frozen=True)
class Timed:
    """A variant that was right: one call for each slot."""

    name: str
    calls: Sequence[Thunk]
    steady: bool = False
    launches: int = 1
    """Kernels in a call, about."""


@dataclass(frozen=True)
class Turn:
    """One sample: launches of a variant one after another, after so many that are not counted."""

    variant: Timed
    batch: int
    warm: int = 0


def require(kind: str) -> None:
    """Raise PeerMissing when this kind of run cannot start."""
    name = kind.removesuffix("-cpu")
    if importlib.util.find_spec("torch") is None:
        raise PeerMissing(
            f"the {name} benchmarks compare with torch, and this Python has no torch\nhelp: run `pip install torch`"
        )
    if SUITES[kind].gpu:
        import torch

        if not torch.cuda.is_available():
            raise PeerMissing(
                f"the {name} benchmarks need an NVIDIA GPU that PyTorch sees; torch {torch.__version__} sees none\n"
                f"help: run them on a machine with a GPU and a CUDA build of PyTorch, or run {name}-cpu"
            )


def rows(kind: str) -> list[Row]:
    suite = SUITES[kind]
    found: list[Row] = suite.load().gpu_rows() if suite.gpu else suite.load().cpu_rows()
    return found


# -- timing -----------------------------------------------------------------------------------------------------------


Sampler = Callable[[Sequence[Timed], float], dict[str, list[float]]]
"""(variants, seconds to spend): milliseconds of a call, by variant."""


class DeviceSampler:
    """Samples on a GPU, with a clock of events. Results are held until their slot comes round again, so that a peer that makes
    new arrays does not find its last one in the cache."""

    def __init__(self, clock: Clock, most: int) -> None:
        self.clock = clock
        self.most = most
        self._position = 0
        self._held: dict[tuple[str, int], object] = {}

    def __call__(self, variants: Sequence[Timed], seconds: float) -> dict[str, list[float]]:
        try:
            return self._samples(variants, seconds)
        finally:
            self._held.clear()

    def _samples(self, variants: Sequence[Timed], seconds: float) -> dict[str, list[float]]:
        for variant in variants:
            self._sample([(variant, 1)] * 3)
        single = {v.name: min(self._sample([(v, 1)] * 3)) for v in variants}
        turns = {v.name: _turn(v, single[v.name]) for v in variants}
        round_ms = sum(single[name] * (turn.warm + turn.batch) for name, turn in turns.items())
        rounds = max(3, min(self.most, int(seconds * 1e3 / round_ms)))
        order: list[Turn] = []
        for _ in range(rounds):
            order += random.sample(list(turns.values()), len(turns))
        samples: dict[str, list[float]] = {v.name: [] for v in variants}
        for part in _parts(order, QUEUED):
            groups = [(turn.variant, count) for turn in part for count in (turn.warm, turn.batch) if count]
            times = iter(self._sample(groups))
            for turn in part:
                if turn.warm:
                    next(times)
                samples[turn.variant.name].append(next(times) / turn.batch)
        return samples

    def _sample(self, groups: Sequence[tuple[Timed, int]]) -> list[float]:
        """Milliseconds of each group of launches, in this order, queued together."""

        def launch(index: int) -> None:
            variant, batch = groups[index]
            for _ in range(batch):
                slot = self._position % len(variant.calls)
                self._held[variant.name, slot] = variant.calls[slot]()
                self._position += 1

        return self.clock.sample(launch, range(len(groups)), 1)


def _turn(variant: Timed, single_ms: float) -> Turn:
    """How many launches make a sample of a variant, one of which takes so long."""
    least_ms, most = (STEADY_MS, MOST_STEADY) if variant.steady else (BATCH_MS, MOST_IN_BATCH)
    batch = max(1, min(most, math.ceil(least_ms / max(single_ms, 1e-4))))
    return Turn(variant, batch, batch if variant.steady else 0)


def _parts(turns: Sequence[Turn], most: int) -> list[list[Turn]]:
    """The turns in stretches of at most so many launches."""
    parts: list[list[Turn]] = [[]]
    size = 0
    for turn in turns:
        launches = (turn.warm + turn.batch) * turn.variant.launches
        if size + launches > most and parts[-1]:
            parts.append([])
            size = 0
        parts[-1].append(turn)
        size += launches
    return parts


class HostSampler:
    """Wall time, with `HostClock`'s waiting out of other libraries' threads; calls that take long are not repeated to warm up."""

    SETTLE = 0.01
    LONG_MS = 50.0

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, variants: Sequence[Timed], seconds: float) -> dict[str, list[float]]:
        single = {v.name: self._one(v, 0) for v in variants}
        repeats = {name: 3 if ms < self.LONG_MS else 1 for name, ms in single.items()}
        round_ms = sum((2 * repeats[n] - 1) * ms + 1e3 * self.SETTLE for n, ms in single.items())
        rounds = max(3, min(self.most, int(seconds * 1e3 / round_ms)))
        samples: dict[str, list[float]] = {v.name: [] for v in variants}
        for turn in range(rounds):
            for variant in random.sample(list(variants), len(variants)):
                settled = time.perf_counter() + self.SETTLE
                while time.perf_counter() < settled:
                    pass
                count = repeats[variant.name]
                for _ in range(count - 1):
                    self._one(variant, turn)
                samples[variant.name] += [self._one(variant, turn * count + i) for i in range(count)]
        return samples

    @staticmethod
    def _one(variant: Timed, position: int) -> float:
        call = variant.calls[position % len(variant.calls)]
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3


# -- one row ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """What a process that runs rows holds."""

    place: Place
    sampler: Sampler
    seconds: float
    """To time one row."""
    setting: Setting
    suite: ModuleType
    copy_rate: Callable[[str], float] | None = None
    """GB/s of a plain copy of a dtype, for rows that are held against it."""

    def measure(self, row: Row) -> ContractionRecord:
        """Never raises for what a variant does: the record says it in `error`."""
        record = blank(row, self.setting)
        try:
            self._measure(row, record)
        except Exception as error:  # no memory, a fault on the device seen late
            record.error = _joined(record.error, f"{type(error).__name__}: {_short(error)}")
        return record

    def _measure(self, row: Row, record: ContractionRecord) -> None:
        main: Problem = self.suite.problem(row, self.place)
        others: dict[str, Problem] = self.suite.companions(row, self.place)
        problems: dict[str, str] = {}
        errors: dict[str, float] = {}
        timed: list[Timed] = []

        def admit(name: str, problem: Problem, bind: Callable[[], list[Thunk]], peer: bool) -> None:
            calls, wrong, distance = self._checked(problem, bind, peer)
            errors[name] = distance
            if wrong and peer and problem.optional and not calls:
                record.notes.append(f"{row.op} without {name}: {wrong}")
            elif wrong:
                problems[name] = wrong
            else:
                timed.append(Timed(name, calls, row.steady, row.launches))

        admit(OURS, main, main.our_calls, False)
        for name, problem in others.items():
            admit(name, problem, problem.our_calls, False)
        for name in main.peers:
            admit(name, main, lambda name=name: main.peer_calls(name), True)  # type: ignore[misc]
        record.error = _joined(*(f"{name}: {text}" for name, text in problems.items()))
        meter = LoadMeter()
        samples = self.sampler(timed, self.seconds * (2 if row.steady else 1)) if timed else {}
        record.load = None if self.place.gpu else meter.read()
        if OURS in samples:
            # A result that was right once and is wrong now is a race.
            ours = next(t.calls for t in timed if t.name == OURS)
            _, wrong, _ = self._checked(main, lambda: list(ours), False)
            record.error = _joined(record.error, f"{OURS} after timing: {wrong}" if wrong else None)
        copied = self.copy_rate(row.dtype) if self.copy_rate is not None and row.streams else None
        fill(record, row, main.nbytes, samples, errors, copied)
        if OURS in samples and main.launches is not None:
            record.launches = main.launches()
        # A profiler may leave later launches slower: only where there is more to count than one call's.
        if record.peer is not None and main.arrange is not None and self.place.gpu:
            calls = next(t.calls for t in timed if t.name == record.peer)
            record.peer_launches = device_launches(calls[0], self.place.synchronize)

    def _checked(self, problem: Problem, bind: Callable[[], list[Thunk]], peer: bool) -> tuple[list[Thunk], str, float]:
        """The calls, what is wrong with their results, and the largest distance from the reference."""
        largest = 0.0
        try:
            calls = bind()
            for slot in problem.references:
                problem.poison()
                got = calls[slot]()
                self.place.synchronize()
                wrong, distance = problem.judge(slot, got, peer)
                largest = max(largest, distance)
                if wrong:
                    return calls, wrong, largest
        except Exception as error:  # whatever a library throws: reported, and the others go on
            return [], f"{type(error).__name__}: {_short(error)}", math.inf
        return calls, "", largest


def blank(row: Row, setting: Setting) -> ContractionRecord:
    return ContractionRecord(row.op, list(row.shape), row.dtype, setting.device, commit=setting.commit, date=setting.date)


def fill(
    record: ContractionRecord, row: Row, nbytes: int, samples: dict[str, list[float]], errors: dict[str, float],
    copy_rate: float | None = None,
) -> None:  # fmt: skip
    """Fill in the figures from the samples and the distances from float64."""
    summarise(record, samples, nbytes, None, copy_rate)
    ours, peer = record.ours_ms, record.peer_ms
    record.samples = len(samples.get(OURS, [])) or None
    if ours is not None:
        record.TFLOPS = row.flops / ours / 1e9 if row.flops else None
        record.max_error = errors[OURS]
    if peer is not None and record.peer is not None:
        record.peer_TFLOPS = row.flops / peer / 1e9 if row.flops else None
        record.peer_error = errors[record.peer]
    if row.weight_bytes:
        record.weight_TBps = row.weight_bytes / ours / 1e9 if ours else None
        record.peer_weight_TBps = row.weight_bytes / peer / 1e9 if peer else None
    if record.max_error is not None and record.peer_error:
        record.error_ratio = record.max_error / record.peer_error
    beside = [statistics.median(times) for name, times in samples.items() if name.startswith(OURS) and name != OURS]
    if ours is not None and beside and row.rounded:
        record.of_rounded = (row.flops / ours) / (row.rounded_up().flops / beside[0])
    elif ours is not None and beside:
        record.of_plain = beside[0] / ours


def device_launches(call: Thunk, synchronize: Callable[[], None]) -> int | None:
    """What a call gives the device to do, counted by PyTorch's profiler; None where that does not work."""
    import torch
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return None
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            synchronize()
        return sum(event.device_type == DeviceType.CUDA for event in seen.events()) or None
    except Exception:  # a count is not worth a row
        return None


def _joined(*parts: str | None) -> str | None:
    return "; ".join(part for part in parts if part) or None


def _short(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:600]


# -- the process the rows run in ------------------------------------------------------------------------------------


def open_bench(kind: str, setting: Setting, quick: bool) -> Bench:
    import torch

    from bench import contractions

    suite = SUITES[kind]
    torch.set_grad_enabled(False)
    # A process that is not the first may have no children of its own.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    most = 15 if quick else 60
    if not suite.gpu:
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        # Outputs and inputs of the smaller rows stay in the caches: that is how a CPU's libraries are compared.
        compile = not quick and cpp_compiler() is not None
        place = contractions.Place("cpu", contractions.host_view, lambda: None, cold_bytes=0, compile=compile)
        return Bench(place, HostSampler(most), 0.7 if quick else 3.0, setting, suite.load())
    from bench import gpu
    from tilewright.execute.devices import find_device
    from tilewright.runtime.cuda import device as cuda

    find_device("cuda:0")
    clock, wrap = gpu.EventClock(), cuda.devices()[0].wrap
    place = contractions.Place("cuda", wrap, torch.cuda.synchronize, compile=not quick)
    copies = gpu.Session(gpu.Machine("cuda", wrap, clock, clock), setting, quick)
    return Bench(place, DeviceSampler(clock, most), 0.2 if quick else 0.6, setting, suite.load(), copies.copy_rate)


def serve(pipe: Connection, kind: str, setting: Setting, quick: bool) -> None:
    """Answer rows with records until the pipe closes. What it sends first is '' when it could start, else why it could not."""
    # Ctrl-C goes to the whole group: the parent closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        bench = open_bench(kind, setting, quick)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {_short(error)}")
        return
    pipe.send("")
    while True:
        try:
            row = pipe.recv()
        except EOFError:
            return
        record = bench.measure(row)
        pipe.send((record, _usable(bench)))


def _usable(bench: Bench) -> bool:
    """Give memory back, and say whether the device still works: a fault stays with the process."""
    import gc

    gc.collect()
    try:
        bench.place.synchronize()
        if bench.place.gpu:
            import torch

            torch.cuda.empty_cache()
    except Exception:  # of whatever type a library makes of the fault
        return False
    return True


class Runner:
    """Hands rows to a process, and starts another when one is lost."""

    def __init__(self, kind: str, setting: Setting, quick: bool, limit: float | None = None) -> None:
        self.kind, self.setting, self.quick = kind, setting, quick
        self.limit = SUITES[kind].row_seconds if limit is None else limit
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def measure(self, row: Row) -> ContractionRecord:
        record = blank(row, self.setting)
        try:
            pipe = self.start()
            pipe.send(row)
            if not pipe.poll(self.limit):
                record.error = f"no result after {self.limit:.0f} s"
                self.stop()
                return record
            found, usable = pipe.recv()
        except DeviceError as error:
            record.error = str(error)
            return record
        except (EOFError, OSError):
            record.error = f"the process ended with status {self._status()}"
            self.stop()
            return record
        if not usable:
            self.stop()
        assert isinstance(found, ContractionRecord)
        return found

    def start(self) -> Connection:
        """The pipe to the process; DeviceError when it cannot start."""
        if self._pipe is not None:
            return self._pipe
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self.kind, self.setting, self.quick), daemon=True)
        self._process.start()
        theirs.close()
        try:
            reason = self._pipe.recv() if self._pipe.poll(START_SECONDS) else f"no answer after {START_SECONDS:.0f} s"
        except (EOFError, OSError):
            reason = f"it ended with status {self._status()}"
        if reason:
            self.stop()
            raise DeviceError.at("TW032", f"the process of the benchmarks could not start: {reason}")
        return self._pipe

    def _status(self) -> int | None:
        if self._process is None:
            return None
        self._process.join(10)
        return self._process.exitcode

    def stop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            # One that waits inside a driver may outlive its end for a while.
            self._process.join(30)
        self._pipe = self._process = None


# -- the table ----------------------------------------------------------------------------------------------------------


def table(console: object, title: str, records: Sequence[Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    shown = Table(title=title)
    prefix, scale = ("T", 1.0) if any((r.GBps or 0.0) > 500 or (_peer_rate(r) or 0.0) > 3 for r in records) else ("G", 1e3)
    with_copy = any(r.of_copy is not None for r in records)
    headings = (
        "op", "shape", "dtype", "ours us", f"{prefix}FLOP/s", f"{prefix}B/s", *(["of copy"] if with_copy else []),
        "best peer", "its us", "ratio", "of min", "error", "against",
    )  # fmt: skip
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if number < 3 or heading == "best peer" else "right")
    for r in records:
        assert isinstance(r, ContractionRecord)
        rate = r.weight_TBps or (r.GBps / 1e3 if r.GBps else None)
        against = [f"{r.of_rounded:.2f} of rounded"] if r.of_rounded else [f"{r.of_plain:.2f} of plain"] if r.of_plain else []
        if r.launches is not None and r.launches > 1 and not against:
            against = [f"{r.launches} launches" + (f", {r.peer_launches}" if r.peer_launches else "")]
        shown.add_row(
            r.op, "x".join(map(str, r.shape)), r.dtype, _number(r.ours_ms, 1e3), _number(r.TFLOPS, scale), _number(rate, scale),
            *([f"{r.of_copy:.1%}" if r.of_copy else ""] if with_copy else []), r.peer or "", _number(r.peer_ms, 1e3),
            _number(r.ratio), _number(r.ratio_min), _number(r.error_ratio), *against,
            style="red" if r.error else None,
        )  # fmt: skip
    console.print(shown)
    for r in records:
        if r.error:
            shape = "x".join(map(str, r.shape))
            console.print(f"{r.op} {shape} {r.dtype}: {r.error}", markup=False, highlight=False, style="red")
    console.print("error: largest distance from float64, over the best peer's; bytes: of weights up to 64 rows, else of all")
    loads = [r.load for r in records if r.load is not None]
    if loads and max(loads) > 0.1:
        console.print(f"note: other processes kept up to {max(loads):.1f} cores busy: repeat on a quiet machine", highlight=False)
    for note in dict.fromkeys(note for r in records for note in r.notes):
        console.print(f"note: {note}", markup=False, highlight=False)


def _peer_rate(record: Record) -> float | None:
    return record.peer_TFLOPS if isinstance(record, ContractionRecord) else None


def _number(value: float | None, factor: float = 1.0) -> str:
    if value is None:
        return ""
    scaled = value * factor
    return f"{scaled:.0f}" if scaled >= 1000 else f"{scaled:.3g}"
