"""Tuning: measure schedules of a kernel on the device itself and keep what was learnt.

In: a kernel and the arguments of a call; out: a `Tuning`, and a table on disk that later calls, also of other sizes, choose by
(`compile/tuning.py`). The search (`execute/tune_search.py`) first measures what the cost model lists, best first, then climbs to neighbours (other
tiles, stages, raster, waiting, turns). Of kernels without a contraction (maps, rows, reductions, windows, scans) it measures other numbers for the
parameters of their loop nests, those that make other code (`passes/schedules/loop_words.py`). Every result is compared with that of the model's first choice; a schedule that is wrong or fails is kept in
the table as such and never used.

On a GPU one thread compiles ahead while another schedule is measured (LLVM works outside Python's lock, one module at a time). On a CPU
nothing else runs while time is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from tilewright.base.errors import TilewrightError, UserError
from tilewright.base.target import Target
from tilewright.compile import tuning
from tilewright.compile.driver import Signature, compile_kernel, compiler_version, contraction_schedules, loop_schedules
from tilewright.compile.tuning import Extents
from tilewright.compile.tuning_folder import enabled
from tilewright.execute.arrays import to_device
from tilewright.execute.calls.arguments import ReadArgument
from tilewright.execute.calls.callable_kernel import TunableKernel
from tilewright.execute.calls.in_place import refuse_function
from tilewright.execute.calls.run import Runner
from tilewright.execute.devices import Device, array_device, default_device, device_of, find_device, kind_of, own_memory
from tilewright.execute.simt.kernels import GpuKernel
from tilewright.execute.simt.tuning import tune_kernel
from tilewright.execute.tune_search import Candidate, Report, TableLedger, Tuning, difference, search
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.tree.syntax import Function

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tilewright.base.artifact import Artifact
    from tilewright.passes.schedules.matrix import MatrixSchedule

_LOOKING = 0.3
"""Part of the budget after which no more ways to run loop nests are looked for."""


def tune(
    kernel: TunableKernel | GpuKernel[...] | Callable[..., object],
    *args: object,
    budget: float = 30.0,
    out: object = None,
    device: str | None = None,
    progress: Report | None = None,
) -> Tuning:
    """Measure schedules of the kernel for these arguments, at most about `budget` seconds, and keep the results for all later calls.

    `out` receives the kernel's result, as in a call. `progress` is called after each schedule. Of an explicit kernel, its `choices` are measured
    on the arguments, which are afterwards what they were. A primitive, such as `tw.scan`, is a plain function; any other function is refused.
    """
    if isinstance(kernel, GpuKernel):
        if out is not None:
            raise UserError.at("TW016", f"{kernel.__name__} is an explicit kernel, which has no result for out=", kernel.span, "leave out= out")
        return tune_kernel(kernel, args, budget, device, progress)
    from tilewright.execute.primitives.tuned_chunks import is_primitive, tune_primitive

    if is_primitive(kernel):
        if out is not None:
            raise UserError.at("TW016", f"{getattr(kernel, '__name__', 'it')} is a primitive, which has no result for out=", help="leave out= out")
        return tune_primitive(kernel, args, budget, device, progress)
    if not _is_tunable(kernel):
        name = getattr(kernel, "__name__", type(kernel).__name__)
        raise UserError.at("TW016", f"'{name}' is no kernel whose schedules can be measured", help="give a kernel of @tw.kernel, one of @tw.gpu with choices, or a primitive")
    values = kernel.bound(*args)
    place = find_device(device or kernel.device or device_of([*values.values(), out]) or default_device())
    if kernel.schedule:
        raise UserError.at("TW016", f"{kernel.__name__} has a fixed schedule: {kernel.schedule}", help="leave schedule= out to tune it")
    if kernel.launches:
        raise UserError.at("TW016", f"{kernel.__name__} is one launch, whose schedules are not measured", help="leave launches= out to tune it")
    found = tune_function(kernel.function, values, place, kernel.precision, budget, progress)
    kernel.take_tuned(place)
    if out is not None:
        kernel(*args, out=out, device=place.id)
    return found


def _is_tunable(kernel: TunableKernel | Callable[..., object]) -> TypeGuard[TunableKernel]:
    return hasattr(kernel, "bound")


def ensure_tuned(function: Function, values: Mapping[str, object], device: Device, precision: str, budget: float = 30.0) -> bool:
    """Tune unless it was done before for these extents; whether anything was measured. For `kernel(..., tune=True)`."""
    if kind_of(device).simulated or not enabled():
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
    start = clock()
    ranked: Sequence[Candidate] = contraction_schedules(function, signature, device.target, extents)
    around: Callable[[Any], list[Any]] = neighbourhood(device.target)
    if not ranked:
        loops = loop_schedules(function, signature, device.target, extents)
        ranked, around = loops.first(lambda: clock() - start > budget * _LOOKING), loops.around
        if len(ranked) == 1:
            from tilewright.passes.schedules.loop_words import words_of

            words = ", ".join(word.name for word in words_of(device.target))
            reason = f"no parameter of its schedule changes its code ({words})" if loops.complete else f"a budget of {budget:g} s is too short to find schedules to measure"
            return Tuning(function.name, device.id, reason=reason)
    if len(ranked) == 1 and not around(ranked[0]):
        return Tuning(function.name, device.id, reason="there is one schedule only")
    bench: _ArrayBench | _HostBench
    bench = (_HostBench if array_device(device) is None else _ArrayBench)(function, values, device, signature)
    key = tuning.kernel_key(function, signature.args, precision, device.target)
    ledger = TableLedger(key, function.name, device.target.name, extents, signature.divisors)
    try:
        return search(ranked, around, bench, ledger, Tuning(function.name, device.id), max(0.0, budget - (clock() - start)), progress, clock)
    finally:
        bench.close()


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
