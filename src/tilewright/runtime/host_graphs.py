"""Recorded graphs of the CPU and the emulator. In: calls bound to their arrays; out: one object that runs them all again.

Recording runs nothing, as on a GPU: results are arrays that a replay writes. Launches of CPU programs that follow each other
become one table, which machine code walks; what else was recorded (copies, emulated programs) is called between such tables.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.base.errors import UserError
from tilewright.runtime.cpu import CpuProgram, Job

Number = int | float | bool
Run = Callable[[], None]


@dataclass(frozen=True)
class _Program:
    """A run of a CPU program."""

    program: CpuProgram
    arrays: Mapping[str, np.ndarray]
    numbers: Mapping[str, Number]
    written: frozenset[str]
    names: Mapping[str, str]
    """Numbers that have a name, by parameter."""

    @cached_property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """The memory of each array."""
        return {name: _bounds(array) for name, array in self.arrays.items()}

    @cached_property
    def jobs(self) -> list[Job]:
        return self.program.jobs(self.arrays, self.numbers)

    def moved(self, spans: Sequence[tuple[int, int, int]]) -> dict[str, np.ndarray]:
        """Those of its arrays whose memory is exchanged, where it is then."""
        found: dict[str, np.ndarray] = {}
        for name, (low, high) in self.bounds.items():
            shift = shift_of(low, spans)
            if shift:
                array = self.arrays[name]
                memory = (ctypes.c_char * (high - low)).from_address(low + shift)
                offset = array.__array_interface__["data"][0] - low
                found[name] = np.ndarray(array.shape, array.dtype, memoryview(memory), offset, array.strides)
        return found


@dataclass(frozen=True)
class _Call:
    """Anything else, in Python."""

    run: Run
    label: str


class HostGraph:
    """A graph of the CPU or the emulator."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._lock = threading.Lock()
        self.names: Mapping[str, str] = {}
        """Names of the numbers of the call under way, by parameter; set by whoever makes the call."""
        self._steps: list[_Program | _Call] = []
        self._ready: list[Run] | None = None
        self._tables: dict[int, tuple[ctypes.Array[ctypes.c_int64], int]] = {}
        """Where the launches of each program are, once there are tables."""
        self.closed = False

    # -- recording ----------------------------------------------------------------------------------------------

    def check_arguments(self, read: Mapping[str, object], given: Mapping[str, object]) -> None:
        """Refuse an array that had to be converted: a replay would see what it was, not what it is."""
        for name, value in read.items():
            if isinstance(value, np.ndarray) and isinstance(given[name], np.ndarray) and not np.shares_memory(value, given[name]):
                raise UserError.at(
                    "TW036", f"argument '{name}' is an array that must be converted first, which a replay would not do again",
                    help="convert it before the capture",
                )  # fmt: skip

    def add_program(
        self, program: CpuProgram, arrays: Mapping[str, np.ndarray], numbers: Mapping[str, Number], written: frozenset[str]
    ) -> None:
        names = {parameter: name for parameter, name in self.names.items() if parameter in numbers}
        if names:
            self.names = {}
        self._steps.append(_Program(program, dict(arrays), dict(numbers), written, names))

    def add_copy(self, target: np.ndarray, source: np.ndarray) -> None:
        self._steps.append(_Call(lambda: np.copyto(target, source), "copy"))

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

        self._steps.append(_Call(emulate, "emulated program"))

    def add_graph(self, graph: HostGraph) -> None:
        """Another graph, as a part of this one."""
        self._steps.append(_Call(graph.replay, "graph"))

    @property
    def node_count(self) -> int:
        return sum(len(step.program.artifact.launches) if isinstance(step, _Program) else 1 for step in self._steps)

    @property
    def knows_all(self) -> bool:
        """Whether exchanging an array reaches every use of it."""
        return all(isinstance(step, _Program) for step in self._steps)

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
            for index, step in enumerate([*self._steps, None]):
                if isinstance(step, _Program):
                    following.append(index)
                    continue
                if following:
                    self._ready.append(self._launcher(following))
                    following = []
                if step is not None:
                    self._ready.append(step.run)
        return self._ready

    def _launcher(self, indices: list[int]) -> Run:
        """Programs that follow each other, as a table that machine code walks."""
        programs = [step for index in indices if isinstance(step := self._steps[index], _Program)]
        count = sum(len(program.jobs) for program in programs)
        table = (ctypes.c_int64 * (4 * count))()
        first = 0
        for index, program in zip(indices, programs, strict=True):
            self._tables[index] = (table, first)
            _fill(table, first, program.jobs)
            first += len(program.jobs)
        pool, address = programs[0].program.pool, ctypes.addressof(table)
        return lambda: pool.launch_all(address, count)

    # -- other arguments ----------------------------------------------------------------------------------------

    def conflict(self, arrays: Sequence[tuple[np.ndarray, np.ndarray]]) -> bool:
        """Whether after the exchange something would be written that something else uses and did not before."""
        spans = [(*_bounds(old), _bounds(new)[0] - _bounds(old)[0]) for old, new in arrays]
        extents: dict[tuple[int, int], bool] = {}
        for step in self._steps:
            if isinstance(step, _Program):
                for name, bounds in step.bounds.items():
                    extents[bounds] = name in step.written or extents.get(bounds, False)
        return conflicts([(low, high, written) for (low, high), written in extents.items()], spans)

    @staticmethod
    def overlap(one: np.ndarray, other: np.ndarray) -> bool:
        return np.may_share_memory(one, other)

    def exchange(self, arrays: Sequence[tuple[np.ndarray, np.ndarray]], numbers: Mapping[str, Number]) -> int:
        """Use the second array of a pair, of the same form, in place of the first, and other named numbers; how many launches.

        The caller keeps the new arrays as long as they are in use.
        """
        spans = [(*_bounds(old), _bounds(new)[0] - _bounds(old)[0]) for old, new in arrays]
        with self._lock:
            return self._exchange(spans, numbers)

    def _exchange(self, spans: Sequence[tuple[int, int, int]], numbers: Mapping[str, Number]) -> int:
        count = 0
        for index, step in enumerate(self._steps):
            if not isinstance(step, _Program):
                continue
            moved = step.moved(spans)
            changed = {p: numbers[label] for p, label in step.names.items() if label in numbers}
            if moved or changed:
                new = replace(step, arrays={**step.arrays, **moved}, numbers={**step.numbers, **changed})
                self._steps[index] = new
                count += len(new.jobs)
                if index in self._tables:
                    _fill(*self._tables[index], new.jobs)
        return count

    def close(self) -> None:
        self._steps, self._ready, self._tables = [], None, {}
        self.closed = True


def _fill(table: ctypes.Array[ctypes.c_int64], first: int, jobs: Sequence[Job]) -> None:
    for index, job in enumerate(jobs, first):
        table[4 * index : 4 * index + 4] = [job.entry, ctypes.addressof(job.slots), job.blocks, job.work]


def conflicts(extents: Sequence[tuple[int, int, bool]], spans: Sequence[tuple[int, int, int]]) -> bool:
    """Whether moving memory by `spans` lets something written overlap something else that it did not overlap before."""
    shifts = [shift_of(low, spans) for low, _, _ in extents]
    after = [(low + shift, high + shift, written, shift) for (low, high, written), shift in zip(extents, shifts, strict=True)]
    for low, high, written, shift in after:
        if not shift:
            continue
        for other_low, other_high, other_written, other_shift in after:
            apart = low >= other_high or other_low >= high
            if not apart and (written or other_written) and shift != other_shift:
                return True
    return False


def shift_of(address: int, spans: Sequence[tuple[int, int, int]]) -> int:
    """How far memory at an address moves by `spans`: first address, the one behind the last, and how far."""
    for low, high, shift in spans:
        if low <= address < high:
            return shift
    return 0


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """The address of the first byte of an array and the one behind its last."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(max(high, low + 1))
