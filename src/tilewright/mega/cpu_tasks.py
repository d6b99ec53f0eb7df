"""The tasks of a megakernel on the threads of a CPU.

In: launches that were recorded for the CPU, each with the memory that it uses. Out: a `CpuTasks`: a static list of tasks (a launch's blocks, cut into parts), and
a `run` of it. A task waits for counters: one for each launch, which counts the parts that are done. Counters only go up; a run waits for the number of its own
epoch, so nothing is cleared between runs. Waits that others imply are left out. Machine code walks the list on the threads of the pool (`codegen/host/task_walk.py`).
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.base.errors import CompilerBug, DeviceError
from tilewright.base.forks import fork_safe_lock
from tilewright.base.target import host_cpu
from tilewright.codegen.host import task_walk
from tilewright.runtime.core.objects import ObjectCode
from tilewright.runtime.cpu import pool as cpu_pool
from tilewright.runtime.cpu.graphs import RecordedLaunch
from tilewright.runtime.cpu.pool import available_threads
from tilewright.runtime.cpu.program import raise_failed

PARALLEL_WORK = 1 << 14
"""Elements of a launch from which it is cut for several workers."""


@dataclass(frozen=True)
class ScheduledTask:
    """Some blocks of a launch."""

    number: int
    launch: int
    begin: int
    end: int
    waits: tuple[int, ...]
    """Launches that have to be done."""


@dataclass(frozen=True)
class TaskTime:
    """When a task ran."""

    processor: int
    """The worker of a CPU, or the block of a persistent kernel."""
    number: int
    """Of the launch, or of the op of an iteration."""
    title: str
    arrived: int
    """When its processor began to wait for others' results."""
    start: int
    end: int
    """Nanoseconds."""


class _UsedMemory:
    """One piece of memory: who wrote it last, and who has read it since."""

    def __init__(self) -> None:
        self.writer = -1
        self.readers: list[int] = []
        self.overlaps: list[_UsedMemory] = [self]


def _pieces(launches: Sequence[RecordedLaunch]) -> dict[object, _UsedMemory]:
    """The memory of all launches, each piece with those that overlap it."""
    found: dict[object, _UsedMemory] = {(low, high): _UsedMemory() for one in launches for low, high, _ in one.extents}
    written = {(low, high) for one in launches for low, high, w in one.extents if w}
    for low, high in written:
        for key, piece in found.items():
            assert isinstance(key, tuple)
            if key != (low, high) and key[0] < high and low < key[1]:
                piece.overlaps.append(found[low, high])
                if key not in written:
                    found[low, high].overlaps.append(piece)
    found.update({key: _UsedMemory() for one in launches for key in one.scratch})
    return found


def dependencies(launches: Sequence[RecordedLaunch]) -> list[tuple[int, ...]]:
    """For each launch, those before it that it has to wait for; what others imply is left out."""
    pieces = _pieces(launches)
    found: list[tuple[int, ...]] = []
    behind: list[int] = []
    """Bit by bit, all that a launch comes after."""
    barrier = -1
    for number, one in enumerate(launches):
        uses = [((low, high), written) for low, high, written in one.extents] + [(key, True) for key in one.scratch]
        direct = {barrier} if barrier >= 0 else set()
        if one.run is not None:  # nothing is known of it
            direct |= set(range(number))
            barrier = number
        for key, written in uses:
            for other in pieces[key].overlaps:
                direct.add(other.writer)
                if written:
                    direct.update(other.readers)
        for key, written in uses:
            piece = pieces[key]
            if written:
                piece.writer, piece.readers = number, []
            else:
                piece.readers.append(number)
        implied, needed = 0, []
        for other_number in sorted(direct - {-1, number}, reverse=True):
            if not implied >> other_number & 1:
                needed.append(other_number)
                implied |= 1 << other_number | behind[other_number]
        behind.append(implied)
        found.append(tuple(sorted(needed)))
    return found


def schedule(launches: Sequence[RecordedLaunch], workers: int) -> list[ScheduledTask]:
    """Tasks in the order of the launches; large launches are cut into a part for each worker."""
    waits = dependencies(launches)
    tasks: list[ScheduledTask] = []
    for number, one in enumerate(launches):
        blocks = one.job.blocks if one.job is not None else 1
        work = blocks * max(one.job.work, 1) if one.job is not None else 0
        parts = min(workers, blocks) if work >= PARALLEL_WORK else min(1, blocks)
        for part in range(parts):
            tasks.append(ScheduledTask(len(tasks), number, blocks * part // parts, blocks * (part + 1) // parts, waits[number]))
    return tasks


def check_schedule(tasks: Sequence[ScheduledTask], waits: Sequence[Sequence[int]], titles: Sequence[str]) -> None:
    """Every wait has a producer that comes earlier in the list: then some worker can always go on."""
    done: dict[int, int] = {}
    parts = {launch: sum(task.launch == launch for task in tasks) for launch in {task.launch for task in tasks}}
    for task in tasks:
        missing = [launch for launch in waits[task.launch] if launch not in task.waits and not _implied(launch, task.waits, waits)]
        for launch in task.waits:
            if done.get(launch, 0) < parts.get(launch, 0):
                raise CompilerBug.at("TW040", f"task {task.number} of '{titles[task.launch]}' waits for '{titles[launch]}', which comes later")
        if missing:
            raise CompilerBug.at("TW040", f"task {task.number} of '{titles[task.launch]}' does not wait for '{titles[missing[0]]}', whose results it uses")
        done[task.launch] = done.get(task.launch, 0) + 1


def _implied(launch: int, given: Sequence[int], waits: Sequence[Sequence[int]]) -> bool:
    return any(launch == other or _implied(launch, waits[other], waits) for other in given)


@functools.cache
def _walk() -> tuple[ObjectCode, int]:
    """The code that walks a list of tasks, and its address."""
    code = ObjectCode(task_walk.walk_object(host_cpu()))
    return code, code.address("tilewright_walk_tasks")


class CpuTasks:
    """A list of tasks that threads of the pool walk together; the calling thread is one of them."""

    def __init__(self, launches: Sequence[RecordedLaunch], titles: Sequence[str], workers: int | None = None) -> None:
        self.launches, self.titles = list(launches), list(titles)
        self.workers = workers or max(1, available_threads())
        self.waits = dependencies(self.launches)
        self.tasks = schedule(self.launches, self.workers)
        check_schedule(self.tasks, self.waits, self.titles)
        self.times: list[TaskTime] = []
        self._parts = [sum(task.launch == number for task in self.tasks) for number in range(len(self.launches))]
        self._threads = self.workers if any(parts > 1 for parts in self._parts) else 1
        """Where every launch is small, one thread is faster than several that wait for each other."""
        self._failing = [one for one in self.launches if one.job is not None and one.job.can_fail and one.artifact is not None]
        self._stopped = False
        self._one = fork_safe_lock()
        self._epoch = 0
        self._fill()

    def _fill(self) -> None:
        """The tables that machine code reads."""
        count = len(self.tasks)
        self._table = np.zeros((max(1, count), task_walk.TASK_WORDS), np.int64)
        waits: list[tuple[int, int]] = []
        for row, task in zip(self._table, self.tasks, strict=False):
            job = self.launches[task.launch].job
            if job is not None:
                row[:4] = job.entry, ctypes.addressof(job.slots), task.begin, task.end
            row[4:7] = task.launch, len(waits), len(task.waits)
            waits += [(launch, self._parts[launch]) for launch in task.waits]
        self._needed = np.array(waits or [(0, 0)], np.int64)
        self._counters = np.zeros((max(1, len(self.launches)), task_walk.COUNTER_WORDS), np.int64)
        self._stamps = np.zeros((max(1, count), task_walk.TIME_WORDS), np.int64)
        self._slots = np.zeros(task_walk.WORDS, np.int64)
        self._slots[[task_walk.TASKS, task_walk.WAITS, task_walk.COUNTERS]] = [array.ctypes.data for array in (self._table, self._needed, self._counters)]
        alone = [task.number for task in self.tasks if self.launches[task.launch].run is not None]
        ends = [*alone, count]
        self._stretches = list(zip([0, *(number + 1 for number in alone)], ends, strict=True))
        """Tasks between calls in Python, which run by themselves."""

    def run(self, clocks: bool = False) -> None:
        """All tasks once. With `clocks`, `times` says when each of them ran."""
        if self._stopped:
            raise DeviceError.at("TW033", "the tasks were used after they were closed")
        with self._one:
            self._run(clocks)

    def _run(self, clocks: bool) -> None:
        self._epoch += 1
        slots = self._slots
        slots[task_walk.EPOCH] = self._epoch
        slots[task_walk.TIMES] = self._stamps.ctypes.data if clocks else 0
        self.times = []
        try:
            for begin, end in self._stretches:
                if end > begin:
                    slots[task_walk.NEXT], slots[task_walk.END] = begin, end
                    # Every thread takes part until the list is walked; a claim is a thread.
                    cpu_pool.pool().launch(_walk()[1], slots.ctypes.data, self._threads, 1 << 20)
                if end < len(self.tasks):
                    self._call(self.tasks[end], clocks)
        except BaseException:
            self._counters[: len(self._parts), 0] = [self._epoch * parts for parts in self._parts]
            raise
        if clocks:
            self.times = [
                TaskTime(int(worker), task.launch, self.titles[task.launch], int(arrived), int(start), int(stop))
                for task, (worker, arrived, start, stop) in zip(self.tasks, self._stamps.tolist(), strict=False)
            ]
        for one in self._failing:
            assert one.job is not None
            assert one.artifact is not None
            raise_failed(one.job, one.artifact)

    def _call(self, task: ScheduledTask, clocks: bool) -> None:
        """A call in Python: all before it is done, and all after it waits for it."""
        run = self.launches[task.launch].run
        assert run is not None
        start = time.perf_counter_ns() if clocks else 0
        run()
        self._counters[task.launch, 0] += 1
        if clocks:
            self._stamps[task.number] = 0, start, start, time.perf_counter_ns()

    def close(self) -> None:
        """Nothing runs any more."""
        self._stopped = True
