"""Runs the rows of `bench.contractions`: checks, times in random order, and survives what a row does to its process.

In: rows and a kind of device ("matmul" is the GPU, "matmul-cpu" the CPU). Out: one `ContractionRecord` each. Rows run in a
process of their own, which is started again after one that crashed, hung or left the device unusable: that row's record says so
and the others go on.

Every launch on a GPU has a random place in a queue that is filled while the device spins, and events around it; launches too
short for that are timed several together. Launches go round more buffers than any cache holds, whoever's they are.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING

from bench.harness import OURS, Clock, LoadMeter, Record, Setting, summarise
from bench.peers import PeerMissing
from tilewright.base.errors import DeviceError

if TYPE_CHECKING:
    from bench.contractions import Place, Problem, Row, Thunk

KINDS = ("matmul", "matmul-cpu")
START_SECONDS = 180.0
"""For importing PyTorch and opening the device."""
ROW_SECONDS = 60.0
"""A row that takes longer is ended with its process."""
BATCH_MS = 0.1
"""A sample lasts at least about this long on a GPU, or is `MOST_IN_BATCH` launches."""
MOST_IN_BATCH = 20
QUEUED = 200
"""Launches in the queue at a time: well below what the driver holds before it makes the host wait."""


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


@dataclass(frozen=True)
class Timed:
    """A variant that was right: one call for each slot."""

    name: str
    calls: Sequence[Thunk]


def require(kind: str) -> None:
    """Raise PeerMissing when this kind of run cannot start."""
    if importlib.util.find_spec("torch") is None:
        raise PeerMissing("the matmul benchmarks compare with torch, and this Python has no torch\nhelp: run `pip install torch`")
    if kind == "matmul":
        import torch

        if not torch.cuda.is_available():
            raise PeerMissing(
                f"the matmul benchmarks need an NVIDIA GPU that PyTorch sees; torch {torch.__version__} sees none\n"
                "help: run them on a machine with a GPU and a CUDA build of PyTorch, or run matmul-cpu"
            )


def rows(kind: str) -> list[Row]:
    from bench import contractions

    return contractions.gpu_rows() if kind == "matmul" else contractions.cpu_rows()


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
        batches = {name: max(1, min(MOST_IN_BATCH, math.ceil(BATCH_MS / max(ms, 1e-4)))) for name, ms in single.items()}
        round_ms = sum(single[v.name] * batches[v.name] for v in variants)
        rounds = max(3, min(self.most, int(seconds * 1e3 / round_ms)))
        groups: list[tuple[Timed, int]] = []
        for _ in range(rounds):
            groups += random.sample([(v, batches[v.name]) for v in variants], len(variants))
        samples: dict[str, list[float]] = {v.name: [] for v in variants}
        for part in _parts(groups, QUEUED):
            for (variant, batch), ms in zip(part, self._sample(part), strict=True):
                samples[variant.name].append(ms / batch)
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


def _parts(groups: Sequence[tuple[Timed, int]], most: int) -> list[list[tuple[Timed, int]]]:
    """The groups in stretches of at most so many launches."""
    parts: list[list[tuple[Timed, int]]] = [[]]
    size = 0
    for group in groups:
        if size + group[1] > most and parts[-1]:
            parts.append([])
            size = 0
        parts[-1].append(group)
        size += group[1]
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

    def measure(self, row: Row) -> ContractionRecord:
        """Never raises for what a variant does: the record says it in `error`."""
        record = blank(row, self.setting)
        try:
            self._measure(row, record)
        except Exception as error:  # no memory, a fault on the device seen late
            record.error = _joined(record.error, f"{type(error).__name__}: {_short(error)}")
        return record

    def _measure(self, row: Row, record: ContractionRecord) -> None:
        from bench import contractions

        main = contractions.problem(row, self.place)
        others = contractions.companions(row, self.place)
        problems: dict[str, str] = {}
        errors: dict[str, float] = {}
        timed: list[Timed] = []

        def admit(name: str, problem: Problem, bind: Callable[[], list[Thunk]], peer: bool) -> None:
            calls, wrong, distance = self._checked(problem, bind, peer)
            errors[name] = distance
            if wrong:
                problems[name] = wrong
            else:
                timed.append(Timed(name, calls))

        admit(OURS, main, main.our_calls, False)
        for name, problem in others.items():
            admit(name, problem, problem.our_calls, False)
        for name in main.peers:
            admit(name, main, lambda name=name: main.peer_calls(name), True)  # type: ignore[misc]
        record.error = _joined(*(f"{name}: {text}" for name, text in problems.items()))
        meter = LoadMeter()
        samples = self.sampler(timed, self.seconds) if timed else {}
        record.load = None if self.place.gpu else meter.read()
        if OURS in samples:
            # A result that was right once and is wrong now is a race.
            ours = next(t.calls for t in timed if t.name == OURS)
            _, wrong, _ = self._checked(main, lambda: list(ours), False)
            record.error = _joined(record.error, f"{OURS} after timing: {wrong}" if wrong else None)
        fill(record, row, main.nbytes, samples, errors)

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
    record: ContractionRecord, row: Row, nbytes: int, samples: dict[str, list[float]], errors: dict[str, float]
) -> None:
    """Fill in the figures from the samples and the distances from float64."""
    summarise(record, samples, nbytes, None)
    ours, peer = record.ours_ms, record.peer_ms
    record.samples = len(samples.get(OURS, [])) or None
    if ours is not None:
        record.TFLOPS = row.flops / ours / 1e9
        record.max_error = errors[OURS]
    if peer is not None and record.peer is not None:
        record.peer_TFLOPS = row.flops / peer / 1e9
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


def _joined(*parts: str | None) -> str | None:
    return "; ".join(part for part in parts if part) or None


def _short(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:600]


# -- the process the rows run in ------------------------------------------------------------------------------------


def open_bench(kind: str, setting: Setting, quick: bool) -> Bench:
    import torch

    from bench import contractions

    torch.set_grad_enabled(False)
    most = 15 if quick else 60
    if kind == "matmul-cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        # Outputs and inputs of the smaller rows stay in the caches: that is how a CPU's libraries are compared.
        place = contractions.Place("cpu", contractions.host_view, lambda: None, cold_bytes=0)
        return Bench(place, HostSampler(most), 0.7 if quick else 3.0, setting)
    from bench import gpu
    from tilewright.api.devices import find_device
    from tilewright.runtime import cuda

    find_device("cuda:0")
    place = contractions.Place("cuda", cuda.devices()[0].wrap, torch.cuda.synchronize)
    return Bench(place, DeviceSampler(gpu.EventClock(), most), 0.2 if quick else 0.6, setting)


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

    def __init__(self, kind: str, setting: Setting, quick: bool, limit: float = ROW_SECONDS) -> None:
        self.kind, self.setting, self.quick, self.limit = kind, setting, quick, limit
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
    headings = (
        "op", "shape", "dtype", "ours us", f"{prefix}FLOP/s", f"{prefix}B/s", "best peer", "its us", "ratio", "of min", "error",
        "against",
    )  # fmt: skip
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if number < 3 or heading == "best peer" else "right")
    for r in records:
        assert isinstance(r, ContractionRecord)
        rate = r.weight_TBps or (r.GBps / 1e3 if r.GBps else None)
        against = [f"{r.of_rounded:.2f} of rounded"] if r.of_rounded else [f"{r.of_plain:.2f} of plain"] if r.of_plain else []
        shown.add_row(
            r.op, "x".join(map(str, r.shape)), r.dtype, _number(r.ours_ms, 1e3), _number(r.TFLOPS, scale), _number(rate, scale),
            r.peer or "", _number(r.peer_ms, 1e3), _number(r.ratio), _number(r.ratio_min), _number(r.error_ratio), *against,
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


def _peer_rate(record: Record) -> float | None:
    return record.peer_TFLOPS if isinstance(record, ContractionRecord) else None


def _number(value: float | None, factor: float = 1.0) -> str:
    if value is None:
        return ""
    scaled = value * factor
    return f"{scaled:.0f}" if scaled >= 1000 else f"{scaled:.3g}"
