"""Recorded graphs of the CPU and the emulator. In: calls bound to their arrays; out: one object that runs them all again.

Recording runs nothing, as on a GPU: results are arrays that a replay writes. Launches of CPU programs that follow each other
become one table, which machine code walks; what else was recorded (copies, emulated programs) is called between such tables.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.base.artifact import FAILURE, Artifact
from tilewright.base.errors import UserError
from tilewright.base.forks import fork_safe_lock
from tilewright.runtime.core.call_list import CallList, Extent, Move, Number
from tilewright.runtime.core.graph import RecordedGraph
from tilewright.runtime.cpu.program import CpuProgram, LaunchJob, raise_failed

Run = Callable[[], None]


@dataclass(frozen=True)
class _Program:
    """A run of a CPU program. Its slots are its arrays, then its numbers, in the order of their names here."""

    program: CpuProgram
    arrays: Mapping[str, np.ndarray]
    numbers: Mapping[str, Number]
    written: frozenset[str]
    names: Mapping[str, str]
    """Numbers that have a name, by parameter."""

    @cached_property
    def values(self) -> list[Number]:
        return [*map(_address, self.arrays.values()), *self.numbers.values()]

    @property
    def array_count(self) -> int:
        return len(self.arrays)

    @property
    def scalars(self) -> dict[int, str]:
        return {slot: self.names[name] for slot, name in enumerate(self.numbers, len(self.arrays)) if name in self.names}

    @property
    def extents(self) -> list[Extent]:
        return [(*_bounds(array), name in self.written) for name, array in self.arrays.items()]

    @cached_property
    def jobs(self) -> list[LaunchJob]:
        return self.program.jobs(self.arrays, self.numbers)

    def with_values(self, values: Sequence[Number]) -> _Program:
        """The same with other memory and numbers."""
        arrays = {name: _at(array, int(value)) for (name, array), value in zip(self.arrays.items(), values, strict=False)}
        numbers = dict(zip(self.numbers, values[len(arrays) :], strict=True))
        return _Program(self.program, arrays, numbers, self.written, self.names)


@dataclass(frozen=True)
class _RecordedCall:
    """Anything else, in Python."""

    run: Run
    label: str


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch of a recorded program, or (without a job) one call in Python, and the memory that it uses."""

    label: str
    artifact: Artifact | None
    job: LaunchJob | None
    extents: tuple[Extent, ...]
    """Memory by address; what a call in Python uses is not known."""
    scratch: frozenset[tuple[int, str]]
    """Memory of the program itself, by the program's number and name; some launch writes it."""
    run: Run | None = None
    program: int = -1
    """Which of the recorded programs it belongs to."""


class HostGraph(RecordedGraph):
    """A graph of the CPU or the emulator."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._lock = fork_safe_lock()
        self.names: Mapping[str, str] = {}
        """Names of the numbers of the call under way, by parameter; set by whoever makes the call."""
        self.shaped: set[str] = set()
        self._programs: CallList[_Program] = CallList()
        self._steps: list[int | _RecordedCall] = []
        """In order; a number is that of a program."""
        self._ready: list[Run] | None = None
        self._tables: dict[int, tuple[ctypes.Array[ctypes.c_int64], int]] = {}
        """Where the launches of each program are, once there are tables."""
        self._closed = False

    # -- recording ----------------------------------------------------------------------------------------------

    def check_arguments(self, read: Mapping[str, object], given: Mapping[str, object]) -> None:
        """Refuse an array that had to be converted: a replay would see what it was, not what it is."""
        for name, value in read.items():
            if isinstance(value, np.ndarray) and value.size and isinstance(given[name], np.ndarray) and not np.shares_memory(value, given[name]):
                raise UserError.at(
                    "TW036", f"argument '{name}' is an array that must be converted first, which a replay would not do again",
                    help="convert it before the capture",
                )  # fmt: skip

    def add_program(
        self, program: CpuProgram, arrays: Mapping[str, np.ndarray], numbers: Mapping[str, Number], written: frozenset[str]
    ) -> None:
        names = {parameter: name for parameter, name in self.names.items() if parameter in numbers}
        self.shaped |= {name for parameter, name in names.items() if parameter in program.artifact.shaping}
        if names:
            self.names = {}
        self._steps.append(len(self._programs))
        self._programs.append(_Program(program, dict(arrays), dict(numbers), written, names))

    def add_copy(self, target: np.ndarray, source: np.ndarray) -> None:
        self._steps.append(_RecordedCall(lambda: np.copyto(target, source), "copy"))

    def add_emulated(
        self,
        program: Any,
        arrays: Mapping[str, Any],
        numbers: Mapping[str, Number],
        outputs: Mapping[str, Any],
        run: Callable[..., Any],
    ) -> None:
        def emulate() -> None:
            found = run(program, {**arrays, **numbers})
            for name, target in outputs.items():
                target[...] = found[name]

        self._steps.append(_RecordedCall(emulate, "emulated program"))

    def add_graph(self, graph: HostGraph) -> None:
        """Another graph, as a part of this one."""
        self._steps.append(_RecordedCall(graph.replay, "graph"))

    def launches(self) -> list[RecordedLaunch]:
        """Everything that a replay runs, launch by launch, in order."""
        found: list[RecordedLaunch] = []
        for step in self._steps:
            if isinstance(step, _RecordedCall):
                found.append(RecordedLaunch(step.label, None, None, (), frozenset(), step.run))
                continue
            program = self._programs[step]
            for job in program.jobs:
                names = [name for name in job.launch.args if name in program.arrays]
                extents = tuple((*_bounds(program.arrays[name]), name in program.written) for name in names)
                own = frozenset((step, name) for name in job.launch.args if name not in program.arrays and name not in program.numbers and name != FAILURE)
                found.append(RecordedLaunch(job.launch.entry, program.program.artifact, job, extents, own, None, step))
        return found

    @property
    def node_count(self) -> int:
        return sum(len(self._programs[step].program.artifact.launches) if isinstance(step, int) else 1 for step in self._steps)

    @property
    def knows_all(self) -> bool:
        """Whether exchanging an array reaches every use of it."""
        return all(isinstance(step, int) for step in self._steps)

    # -- replay -------------------------------------------------------------------------------------------------

    def replay(self) -> None:
        """Run all of it, on this thread and those of the pool. A second replay at the same time comes after."""
        with self._lock:
            for run in self._prepared():
                run()

    def _prepared(self) -> list[Run]:
        if self._ready is None:
            self._ready, self._tables = [], {}
            following: list[int] = []
            for step in [*self._steps, None]:
                if isinstance(step, int):
                    following.append(step)
                    continue
                if following:
                    self._ready.append(self._launcher(following))
                    following = []
                if step is not None:
                    self._ready.append(step.run)
        return self._ready

    def _launcher(self, numbers: list[int]) -> Run:
        """Programs that follow each other, as a table that machine code walks."""
        programs = [self._programs[number] for number in numbers]
        count = sum(len(program.jobs) for program in programs)
        table = (ctypes.c_int64 * (4 * count))()
        first = 0
        for number, program in zip(numbers, programs, strict=True):
            self._tables[number] = (table, first)
            _fill(table, first, program.jobs)
            first += len(program.jobs)
        pool, address = programs[0].program.pool, ctypes.addressof(table)
        failing = [number for number, program in zip(numbers, programs, strict=True) if any(job.can_fail for job in program.jobs)]
        if not failing:
            return lambda: pool.launch_all(address, count)

        def run() -> None:
            pool.launch_all(address, count)
            for number in failing:
                again = self._programs[number]
                for job in again.jobs:
                    raise_failed(job, again.program.artifact)

        return run

    # -- other arguments ----------------------------------------------------------------------------------------

    def conflict(self, arrays: Sequence[tuple[np.ndarray, np.ndarray]]) -> bool:
        """Whether after the exchange something would be written that something else uses and did not before."""
        return self._programs.conflict(_moves(arrays))

    def overlap(self, one: np.ndarray, other: np.ndarray) -> bool:
        return np.may_share_memory(one, other)

    def exchange(self, arrays: Sequence[tuple[np.ndarray, np.ndarray]], numbers: Mapping[str, Number]) -> int:
        """Use the second array of a pair, of the same form, in place of the first, and other named numbers; how many launches.

        The caller keeps the new arrays as long as they are in use.
        """
        with self._lock:
            count = 0
            for number, values in self._programs.exchange(_moves(arrays), numbers).items():
                program = self._programs[number] = self._programs[number].with_values(values)
                count += len(program.jobs)
                if number in self._tables:
                    _fill(*self._tables[number], program.jobs)
            return count

    def close(self) -> None:
        self._programs, self._steps, self._ready, self._tables = CallList(), [], None, {}
        self._closed = True

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def nodes(self) -> int:
        return self.node_count


def _fill(table: ctypes.Array[ctypes.c_int64], first: int, jobs: Sequence[LaunchJob]) -> None:
    for index, job in enumerate(jobs, first):
        table[4 * index : 4 * index + 4] = [job.entry, ctypes.addressof(job.slots), job.blocks, job.work]


def _moves(arrays: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Move]:
    """Of each pair: the memory of the first, and how far away that of the second is."""
    return [(*_bounds(old), _bounds(new)[0] - _bounds(old)[0]) for old, new in arrays]


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _at(array: np.ndarray, address: int) -> np.ndarray:
    """An array of the same form whose first element is at an address; the caller keeps the memory."""
    before = _address(array)
    if before == address:
        return array
    low, high = _bounds(array)
    memory = (ctypes.c_char * (high - low)).from_address(low + address - before)
    return np.ndarray(array.shape, array.dtype, memoryview(memory), before - low, array.strides)


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """The address of the first byte of an array and the one behind its last."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(max(high, low + 1))
