"""Recorded graphs of the CPU and the emulator. In: calls bound to their arrays; out: one object that runs them all again.

Recording runs nothing, as on a GPU: results are arrays that a replay writes. Launches of CPU programs that follow each other
become one table, which machine code walks; what else was recorded (copies, emulated programs) is called between such tables.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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

    def jobs(self) -> list[Job]:
        return self.program.jobs(self.arrays, self.numbers)

    def extents(self) -> list[tuple[int, int, bool]]:
        """Memory it uses, and whether it writes there."""
        return [(*_bounds(array), name in self.written) for name, array in self.arrays.items()]

    def moved(self, spans: Sequence[tuple[int, int, int]]) -> dict[str, np.ndarray]:
        """Those of its arrays whose memory is exchanged, where it is then."""
        found: dict[str, np.ndarray] = {}
        for name, array in self.arrays.items():
            low, high = _bounds(array)
            shift = next((shift for first, last, shift in spans if first <= low < last), 0)
            if shift:
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
        self._memory: list[object] = []
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
            ready: list[Run] = []
            jobs: list[Job] = []
            memory: list[object] = []
            for step in [*self._steps, None]:
                if isinstance(step, _Program):
                    jobs += step.jobs()
                    continue
                if jobs:
                    ready.append(_launcher(jobs, self._steps, memory))
                    jobs = []
                if step is not None:
                    ready.append(step.run)
            self._ready, self._memory = ready, memory
        return self._ready

    # -- other arguments ----------------------------------------------------------------------------------------

    def conflict(self, arrays: Sequence[tuple[np.ndarray, np.ndarray]]) -> bool:
        """Whether after the exchange something would be written that something else uses and did not before."""
        spans = [(*_bounds(old), _bounds(new)[0] - _bounds(old)[0]) for old, new in arrays]
        return conflicts([x for step in self._steps if isinstance(step, _Program) for x in step.extents()], spans)

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
                self._steps[index] = replace(step, arrays={**step.arrays, **moved}, numbers={**step.numbers, **changed})
                count += len(step.program.artifact.launches)
        self._ready = None
        return count

    def close(self) -> None:
        self._steps, self._ready, self._memory = [], None, []
        self.closed = True


def _launcher(jobs: list[Job], steps: Sequence[_Program | _Call], memory: list[object]) -> Run:
    """The jobs as a table that machine code walks."""
    table = (ctypes.c_int64 * (4 * len(jobs)))()
    for index, job in enumerate(jobs):
        table[4 * index : 4 * index + 4] = [job.entry, ctypes.addressof(job.slots), job.blocks, job.work]
    memory += [table, jobs]
    pool = next(step.program.pool for step in steps if isinstance(step, _Program))
    address, count = ctypes.addressof(table), len(jobs)
    return lambda: pool.launch_all(address, count)


def conflicts(extents: Sequence[tuple[int, int, bool]], spans: Sequence[tuple[int, int, int]]) -> bool:
    """Whether moving memory by `spans` lets something written overlap something else that it did not overlap before."""

    def moved(low: int) -> int:
        return low + next((shift for first, last, shift in spans if first <= low < last), 0)

    after = [(moved(low), moved(low) + high - low, written, moved(low) != low, low) for low, high, written in extents]
    for low, high, written, moves, was in after:
        if not moves:
            continue
        for other_low, other_high, other_written, _, other_was in after:
            apart = low >= other_high or other_low >= high
            if not apart and (written or other_written) and low - other_low != was - other_was:
                return True
    return False


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """The address of the first byte of an array and the one behind its last."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(max(high, low + 1))
