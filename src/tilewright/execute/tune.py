"""Tuning: measure schedules of a contraction on the device itself and keep what was learnt.

In: a kernel and the arguments of a call; out: a `Tuning`, and a table on disk that later calls, also of other sizes, choose by
(`compile/tuning.py`). The search first measures what the cost model lists, best first, then climbs: it tries the neighbours of the best
schedule so far (other tiles, stages, raster, waiting, turns), moves when one is faster, and ends when none is or the time is up. Every
result is compared with that of the model's first choice; a schedule that is wrong or fails is kept in the table as such and never used.

Machines slow down and speed up while a search runs, so a schedule is measured in turns with the model's first choice, call by call, and what
counts is their ratio. A short measurement may still be lucky, and the luckiest of many looks best: the few best and the first choice are
therefore measured once more at the end, longer and all in turns, and only that decides between them.

On a GPU one thread compiles ahead while another schedule is measured (LLVM works outside Python's lock, one module at a time). On a CPU
nothing else runs while time is taken.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tilewright.base.dtypes import DType, from_numpy
from tilewright.base.errors import DeviceError, TilewrightError, UserError
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.compile import tuning
from tilewright.compile.driver import Signature, compile_kernel, compiler_version, contraction_schedules
from tilewright.compile.tuning import Extents, Measurement, TuningTable
from tilewright.execute.arrays import to_device
from tilewright.execute.calls.arguments import ReadArgument
from tilewright.execute.calls.callable_kernel import TunableKernel
from tilewright.execute.calls.in_place import refuse_function
from tilewright.execute.calls.run import Runner
from tilewright.execute.devices import Device, array_device, default_device, device_of, find_device, kind_of, own_memory
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.tree.syntax import Function

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tilewright.base.artifact import Artifact
    from tilewright.passes.schedules.matrix import MatrixSchedule

FINALISTS = 4
"""Schedules measured again at the end."""
_FINAL_SHARE = 0.15
"""Part of the budget kept for that."""
_ROUNDS = 4
"""How much longer that measurement is."""
_AHEAD = 3
"""Schedules compiled before their turn."""
_UNFINISHED = "did not finish"


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

    def __str__(self) -> str:
        if self.best is None:
            return f"{self.kernel} on {self.device}: nothing to tune: {self.reason}"
        return (
            f"{self.kernel} on {self.device}: {self.best.seconds * 1e6:.1f} µs with {self.best.schedule} "
            f"({self.speedup:.3f} × the default; {len(self.trials)} schedules in {self.elapsed:.1f} s)"
        )


Report = Callable[[Progress], None]


def tune(
    kernel: TunableKernel,
    *args: object,
    budget: float = 30.0,
    out: object = None,
    device: str | None = None,
    progress: Report | None = None,
) -> Tuning:
    """Measure schedules of the kernel for these arguments, at most about `budget` seconds, and keep the results for all later calls.

    `out` receives the kernel's result, as in a call. `progress` is called after each schedule.
    """
    values = kernel.bound(*args)
    place = find_device(device or kernel.device or device_of([*values.values(), out]) or default_device())
    if kernel.schedule:
        raise UserError.at("TW016", f"{kernel.__name__} has a fixed schedule: {kernel.schedule}", help="leave schedule= out to tune it")
    if kernel.launches:
        raise UserError.at("TW016", f"{kernel.__name__} is one launch, whose schedules are not measured", help="leave launches= out to tune it")
    found = tune_function(kernel.function, values, place, kernel.precision, budget, progress)
    kernel.forget_programs()
    if out is not None:
        kernel(*args, out=out, device=place.id)
    return found


def ensure_tuned(function: Function, values: Mapping[str, object], device: Device, precision: str, budget: float = 30.0) -> bool:
    """Tune unless it was done before for these extents; whether anything was measured. For `kernel(..., tune=True)`."""
    if kind_of(device).simulated or not tuning.enabled():
        return False
    runner = Runner(function, precision)
    arguments = runner.arguments(values, device.target.is_gpu)
    signature = runner.signature(arguments, device.target.is_gpu)
    table = tuning.look_up(tuning.kernel_key(function, signature.args, precision, device.target))
    extents = extents_of(arguments)
    if table is not None and any(m.ok and m.version == compiler_version() for m in table.at(extents)):
        return False
    return bool(tune_function(function, values, device, precision, budget).trials)


def extents_of(arguments: Iterable[ReadArgument]) -> Extents:
    return tuple((a.name, axis, extent) for a in arguments for axis, extent in enumerate(a.shape))


def tune_function(
    function: Function,
    values: Mapping[str, object],
    device: Device,
    precision: str = "auto",
    budget: float = 30.0,
    progress: Report | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuning:
    """`tune` for the tree of a kernel and arguments by name."""
    refuse_function(function, "and tuning would run it again and again", "tune a kernel that returns its results")
    if kind_of(device).simulated:
        raise UserError.at("TW030", "the emulator has no speed to tune", help="use device='cpu' or a GPU")
    gpu = device.target.is_gpu
    if array_device(device) is not None:
        values = {n: to_device(v, device.id) if isinstance(v, np.ndarray) else v for n, v in values.items()}
    runner = Runner(function, precision)
    arguments = runner.arguments(values, gpu)
    signature = runner.signature(arguments, gpu)
    extents = extents_of(arguments)
    ranked = contraction_schedules(function, signature, device.target, extents)
    if not ranked:
        return Tuning(function.name, device.id, reason="it is not a contraction with schedules to choose from")
    around = neighbourhood(device.target)
    if len(ranked) == 1 and not around(ranked[0]):
        return Tuning(function.name, device.id, reason="there is one schedule only")
    bench: _ArrayBench | _HostBench
    bench = (_HostBench if array_device(device) is None else _ArrayBench)(function, values, device, signature)
    ledger = _Ledger(tuning.kernel_key(function, signature.args, precision, device.target), function.name, device.target.name, extents, signature)
    try:
        return search(ranked, around, bench, ledger, Tuning(function.name, device.id), budget, progress, clock)
    finally:
        bench.close()


# -- the search -----------------------------------------------------------------------------------------------------


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
    ranked: Sequence[MatrixSchedule],
    around: Callable[[MatrixSchedule], list[MatrixSchedule]],
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


class _Ledger:
    """Keeps measurements in the tables. What was begun and never ended, because the process died, is found as a failure next time."""

    def __init__(self, key: str, kernel: str, target: str, extents: Extents, signature: Signature) -> None:
        self.key, self.kernel, self.target = key, kernel, target
        self.extents, self.divisors = extents, signature.divisors
        self.version = compiler_version()
        known = tuning.store().get(key)
        self.failures = {m.schedule: m.error for m in known.entries if m.version == self.version and m.error} if known else {}

    def failed_before(self, schedule: str) -> str:
        return self.failures.get(schedule, "")

    def begin(self, schedule: str) -> None:
        tuning.store().add(self.key, self.kernel, self.target, [self.measured(schedule, 0.0, _UNFINISHED)])

    def measured(self, schedule: str, seconds: float, error: str) -> Measurement:
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return Measurement(self.extents, schedule, seconds, error, date, self.version, self.divisors)

    def abandon(self, schedule: str) -> None:
        """The user stopped it: that is not the schedule's failure."""
        tuning.store().remove(self.key, self.extents, schedule)

    def finish(self, measurements: Sequence[Measurement]) -> TuningTable | None:
        return tuning.store().add(self.key, self.kernel, self.target, measurements)


# -- neighbours -----------------------------------------------------------------------------------------------------


def neighbourhood(target: Target) -> Callable[[MatrixSchedule], list[MatrixSchedule]]:
    """Schedules one step away that the target has room for."""
    from tilewright.passes.choose.neighbours import neighbours

    def around(schedule: MatrixSchedule) -> list[MatrixSchedule]:
        found = {s.describe(): s for s in neighbours(schedule) if s.has_room(target)}
        found.pop(schedule.describe(), None)
        return list(found.values())

    return around


# -- devices --------------------------------------------------------------------------------------------------------


def _median(times: Sequence[float]) -> float:
    return float(np.median(times))


class _DeviceBench:
    """One program per schedule, the arguments of the call, and arrays for the results."""

    def __init__(self, function: Function, values: Mapping[str, object], device: Device, signature: Signature) -> None:
        self.function, self.values, self.device, self.signature = function, values, device, signature
        self.runners: dict[str, Runner] = {}
        self.expected: list[np.ndarray] | None = None

    def runner(self, schedule: str) -> Runner:
        if schedule not in self.runners:
            self.runners[schedule] = Runner(self.function, self.signature.precision, schedule)
        return self.runners[schedule]

    def compare(self, found: list[np.ndarray]) -> str:
        if self.expected is None:
            self.expected = found
            return ""
        return next((d for d in map(difference, found, self.expected) if d), "")

    def usable(self) -> bool:
        return True

    def ahead(self, schedules: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        self.runners.clear()


class _HostBench(_DeviceBench):
    _SECONDS = 0.4
    _MOST = 50

    def __init__(self, function: Function, values: Mapping[str, object], device: Device, signature: Signature) -> None:
        super().__init__(function, values, device, signature)
        self.values = {n: v.numpy() if isinstance(v, DeviceArray) else v for n, v in values.items()}
        self.out: list[np.ndarray] = []

    def check(self, schedule: str) -> str:
        runner = self.runner(schedule)
        if not self.out:
            made = runner.run(self.values, self.device)
            self.out = [np.array(r) for r in (made if isinstance(made, tuple) else (made,))]
        for array in self.out:
            array.view(np.uint8 if array.ndim else array.dtype).fill(255 if array.ndim else 0)
        runner.run(self.values, self.device, self._given())
        return self.compare([array.copy() for array in self.out])

    def seconds(self, schedules: Sequence[str], rounds: int = 1) -> list[float]:
        runners, out = [self.runner(text) for text in schedules], self._given()
        times: list[list[float]] = [[] for _ in runners]
        end = time.perf_counter() + self._SECONDS * rounds
        while len(times[0]) < 3 or (len(times[0]) < self._MOST * rounds and time.perf_counter() < end):
            for runner, own in zip(runners, times, strict=True):
                start = time.perf_counter()
                runner.run(self.values, self.device, out)
                own.append(time.perf_counter() - start)
        return [_median(own) for own in times]

    def _given(self) -> object:
        return self.out[0] if len(self.out) == 1 else tuple(self.out)


class _ArrayBench(_DeviceBench):
    _BATCH_SECONDS = 5e-4
    """Work queued between two events: the host's own time must not show."""
    _REPEATS = 7

    def __init__(self, function: Function, values: Mapping[str, object], device: Device, signature: Signature) -> None:
        from concurrent.futures import ThreadPoolExecutor

        super().__init__(function, values, device, signature)
        self.gpu = own_memory(device)
        self.out: list[DeviceArray] = []
        self.poison: list[DeviceArray] = []
        self.compiler = ThreadPoolExecutor(1, "tilewright-tune")
        self.compiled: dict[str, Future[Artifact]] = {}

    def ahead(self, schedules: Sequence[str]) -> None:
        for text in schedules:
            if text not in self.compiled:
                wanted = replace(self.signature, schedule=text)
                self.compiled[text] = self.compiler.submit(compile_kernel, self.function, wanted, self.device.target)

    def check(self, schedule: str) -> str:
        runner = self.runner(schedule)
        self.ahead([schedule])
        self.compiled[schedule].result()
        if not self.out:
            made = runner.run(self.values, self.device)
            for item in made if isinstance(made, tuple) else (made,):
                result = self.gpu.wrap(item)
                self.out.append(result)
                host = np.empty(result.shape, result.dtype.numpy)
                host.reshape(-1).view(np.uint8).fill(255)
                self.poison.append(self.gpu.from_numpy(host, result.dtype))
        # Memory still holds the result of the schedule before: one that writes nothing must not pass.
        for array, poison in zip(self.out, self.poison, strict=True):
            self.gpu.copy(array, poison)
        runner.run(self.values, self.device, self._given())
        self.gpu.synchronize()
        return self.compare([array.numpy() for array in self.out])

    def seconds(self, schedules: Sequence[str], rounds: int = 1) -> list[float]:
        calls = [self._call(text) for text in schedules]
        once = [min(self.gpu.time(call, repeats=3)) / 1e3 for call in calls]
        counts = [max(1, min(50, round(self._BATCH_SECONDS / max(seconds, 1e-6)))) for seconds in once]
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(self._REPEATS * rounds):
            for call, count, own in zip(calls, counts, times, strict=True):
                (milliseconds,) = self.gpu.time(_repeated(call, count), repeats=1, warmup=1)
                own.append(milliseconds / 1e3 / count)
        return [_median(own) for own in times]

    def _call(self, schedule: str) -> Callable[[], None]:
        runner, out, args = self.runner(schedule), self._given(), tuple(self.values.values())

        def call() -> None:
            if len(self.out) > 1 or runner.quick(self.device, args, out) is NotImplemented:
                runner.run(self.values, self.device, out)

        return call

    def usable(self) -> bool:
        try:
            self.gpu.synchronize()
        except TilewrightError:
            return False
        return True

    def close(self) -> None:
        for waiting in self.compiled.values():
            waiting.cancel()
        self.compiler.shutdown(wait=True, cancel_futures=True)
        super().close()

    def _given(self) -> object:
        return self.out[0] if len(self.out) == 1 else tuple(self.out)


def _repeated(call: Callable[[], None], count: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(count):
            call()

    return several


def difference(found: np.ndarray, expected: np.ndarray) -> str:
    """How a result differs from what was expected beyond what another order of additions explains; nothing if it does not."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"the result is {found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}"
    a, b = np.ascontiguousarray(found).reshape(-1), np.ascontiguousarray(expected).reshape(-1)
    if np.array_equal(a.view(np.uint8), b.view(np.uint8)):
        return ""
    dtype = from_numpy(found.dtype)
    if dtype is None or not dtype.is_float:
        wrong = np.flatnonzero(a != b)
        return f"{wrong.size} of {a.size} results differ from the default schedule's" if wrong.size else ""
    wide = np.float64 if dtype.bits > 32 else np.float32
    x, y = a.astype(wide), b.astype(wide)
    if not np.array_equal(np.isfinite(x), np.isfinite(y)):
        return "results that are no numbers are in other places than with the default schedule"
    finite = np.isfinite(y)
    scale = float(np.max(np.abs(y[finite]), initial=0.0))
    worst = float(np.max(np.abs(x[finite] - y[finite]), initial=0.0))
    if worst <= _tolerance(dtype) * scale:
        return ""
    return f"results differ from the default schedule's by up to {worst:.3g}, where the largest is {scale:.3g}"


def _tolerance(dtype: DType) -> float:
    """Relative to the largest result. Narrow results may round to the other side; sums in f32 in another order differ more than that."""
    if dtype.bits > 32:
        return 1e-11
    return max(2e-5, 4 * 2.0 ** -{"f16": 10, "bf16": 7, "f8e4m3": 3, "f8e5m2": 2}.get(dtype.name, 23))
