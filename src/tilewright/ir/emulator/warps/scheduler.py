"""Runs the warps of thread-stage blocks until all are done: barriers, forks, and finding out that nobody can go on.

A `Team` is some blocks that run together: a tree of tasks, each one generator over a frame of warps. A task goes until it
waits at a barrier or for something else, forks, pauses or ends. A barrier opens for a block when all its warps have arrived;
copies by the engine arrive only when nobody can go on without. Teams of a kernel that watches memory are started one after
another and take turns from then on, so that a block can wait for any other. A kernel with barriers of the grid is one team. Warps in one frame wait for each other where one of
them waits; if that is why nobody can go on, memory is put back and the blocks run again, more finely cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np

from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.ir.emulator.checks.detector import LaunchRaces, is_explicit
from tilewright.ir.emulator.frames import BLOCK, LANE, Frame
from tilewright.ir.emulator.machine import (
    BarrierReached,
    Event,
    Fork,
    GridBarrier,
    Pause,
    Results,
    Steps,
    Wait,
    launched_grid,
)
from tilewright.ir.emulator.memory.memory import fault
from tilewright.ir.emulator.memory.panels import Panels
from tilewright.ir.emulator.warps.barriers import Barriers
from tilewright.ir.emulator.warps.bulk import Bulk
from tilewright.ir.emulator.warps.copies import Copies
from tilewright.ir.emulator.warps.counts import Counts
from tilewright.ir.emulator.warps.lanes import Lanes
from tilewright.ir.emulator.warps.matrix import Matrix
from tilewright.ir.emulator.warps.simt_ops import SimtOps
from tilewright.ir.emulator.warps.stepping import Stepping
from tilewright.ir.emulator.warps.thread import ThreadMachine, Waits
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.ops import OPS

Array = np.ndarray
Arguments = Sequence[Array | int | float | bool]
_ALONE = frozenset({"fence", "clock", "global_timer", "nanosleep", "prefetch"})
"""Ops that count as syncs but are of one thread."""
PATIENCE = 10_000
"""Rounds in which every warp only watches memory and nothing changes, before we call it a deadlock."""


CHOICE: list[Callable[[int], int]] = []
"""While somebody chooses who goes on: the last one is asked for one of so many."""


@contextmanager
def chosen_by(choose: Callable[[int], int]) -> Iterator[None]:
    """Inside, `choose(n)` says which of n pieces of work that could go on does so next. Blocks that wait for each other may run in any order."""
    CHOICE.append(choose)
    try:
        yield
    finally:
        CHOICE.pop()


class Stuck(Exception):
    """No warp of a team can go on. Never leaves this module."""


class WarpTask:
    """Some warps on their way through a region."""

    def __init__(self, frame: Frame, steps: Steps, parent: WarpTask | None = None) -> None:
        self.frame = frame
        self.steps = steps
        self.parent = parent
        self.event: Event | None = None
        self.children: list[WarpTask] = []
        self.results: Results | None = None

    def is_done(self) -> bool:
        return self.results is not None


class Team:
    """The tasks of one machine's blocks."""

    def __init__(self, machine: ThreadMachine, apart: bool = False, single: bool = False) -> None:
        self.machine = machine
        self.barriers = Barriers(machine)
        self.copies = Copies(machine, self.barriers)
        Bulk(machine, self.barriers, self.copies)
        self.counts = Counts(machine)
        for unit in (Matrix, Panels, Lanes, SimtOps, Stepping):
            unit(machine)
        self.root = WarpTask(machine.root, machine.start(apart, single))
        self.ready: deque[WarpTask] = deque([self.root])
        self.waiting: list[WarpTask] = []

    def run(self) -> Iterator[None]:
        """Goes until all warps are done; hands out control after a round in which they only watched memory."""
        while not self.root.is_done():
            watched = self.machine.changes
            moved = False
            for _ in range(1 if CHOICE and self.ready else len(self.ready)):
                if CHOICE:
                    self.ready.rotate(-(CHOICE[-1](len(self.ready)) % len(self.ready)))
                task = self.ready.popleft()
                self._advance(task)
                moved = moved or not isinstance(task.event, Pause)
            moved = self._open_barriers() or moved
            moved = self._open_grid_barrier() or moved
            moved = self._end_waits() or moved
            if self.root.is_done():
                break
            while not (self.ready and moved) and self.copies.land():
                moved = self._end_waits()
            if not self.ready:
                raise Stuck
            if not moved and self.machine.changes == watched:
                yield
        self.copies.finish()
        self.barriers.finish()

    def _warps(self, task: WarpTask) -> Array:
        """The numbers of a task's warps that have an active thread, over all blocks of the team."""
        active = self.machine.warps_with(task.frame.active)
        numbers: Array = self.machine.by_warp(task.frame.full(LANE))[active, 0] // self.machine.warp_size
        return numbers

    def _advance(self, task: WarpTask) -> None:
        parts = tuple(child.results or () for child in task.children)
        first = task.event is None
        self.counts.enter(task.frame)
        task.event, task.children = None, []
        try:
            event = next(task.steps) if first else task.steps.send(parts)
        except StopIteration as stop:
            results: Results = stop.value
            task.results = results
            parent = task.parent
            if parent is not None and all(child.results is not None for child in parent.children):
                self.ready.append(parent)
            return
        task.event = event
        if isinstance(event, BarrierReached | GridBarrier | Wait):
            self.waiting.append(task)
        elif isinstance(event, Fork):
            task.children = [WarpTask(frame, steps, task) for frame, steps in event.children]
            self.ready.extend(task.children)
        else:
            self.ready.append(task)

    def _complete(self) -> Array:
        """Of each block, whether all its warps wait at a barrier."""
        arrived = np.zeros(self.machine.blocks * self.machine.warps, np.bool_)
        for task in self.waiting:
            if isinstance(task.event, BarrierReached):
                arrived[self._warps(task)] = True
        complete: Array = np.logical_and.reduce(arrived.reshape(-1, self.machine.warps), axis=1)
        return complete

    def _open_barriers(self) -> bool:
        here = [task for task in self.waiting if isinstance(task.event, BarrierReached)]
        if not here:
            return False
        opens = self._complete()
        blocks = [self._warps(task) // self.machine.warps for task in here]
        # A task goes on with all its blocks or not at all, and a block with all its tasks.
        held = True
        while held:
            held = False
            for own in blocks:
                if opens[own].any() and not opens[own].all():
                    opens[own] = False
                    held = True
        released = [task for task, own in zip(here, blocks, strict=True) if opens[own].all()]
        if self.machine.races.launch.explicit:
            self._require_one_barrier(released)
        self._release(released)
        self.machine.open_barriers(opens)
        return bool(released)

    def _require_one_barrier(self, tasks: Sequence[WarpTask]) -> None:
        """Warps of a block must meet at one and the same barrier of the text."""
        if len({task.event.span for task in tasks if task.event is not None and not isinstance(task.event, Fork)}) <= 1:
            return
        met: dict[int, tuple[Span, int]] = {}
        per_block = self.machine.warps
        for task in tasks:
            assert isinstance(task.event, BarrierReached)
            for warp in self._warps(task).tolist():
                span, other = met.setdefault(warp // per_block, (task.event.span, warp))
                if span != task.event.span:
                    block = int(self.machine.root.values[BLOCK][0]) + warp // per_block
                    raise fault(
                        f"divergent barrier: warp {warp % per_block} of {self.machine.block_text(block)} waits here, "
                        f"warp {other % per_block} at {span.place()}",
                        task.event.span, "all threads of a block must come to the same barrier; move it out of the condition",
                    )  # fmt: skip

    def _at_grid_barrier(self) -> Array:
        """Of each warp, whether it waits for all blocks."""
        arrived = np.zeros(self.machine.blocks * self.machine.warps, np.bool_)
        for task in self.waiting:
            if isinstance(task.event, GridBarrier):
                arrived[self._warps(task)] = True
        return arrived

    def _open_grid_barrier(self) -> bool:
        here = [task for task in self.waiting if isinstance(task.event, GridBarrier)]
        if not here or not self._at_grid_barrier().all():
            return False
        self._release(here)
        self.machine.open_grid_barrier()
        return True

    def _end_waits(self) -> bool:
        released = [task for task in self.waiting if isinstance(task.event, Wait) and task.event.ready()]
        self._release(released)
        return bool(released)

    def _release(self, tasks: Sequence[WarpTask]) -> None:
        self.waiting = [task for task in self.waiting if task not in tasks]
        self.ready.extend(tasks)

    # -- when nobody can go on ------------------------------------------------------------------------------------

    def _tasks(self, task: WarpTask) -> Iterator[WarpTask]:
        yield task
        for child in task.children:
            yield from self._tasks(child)

    @staticmethod
    def _kind(event: BarrierReached | GridBarrier | Wait | Pause) -> str:
        if isinstance(event, Wait):
            return event.text()
        if isinstance(event, GridBarrier):
            return "for all blocks at the grid_barrier"
        return "at the barrier" if isinstance(event, BarrierReached) else "for memory to change in the loop"

    def deadlock(self) -> UserError:
        """The error that says where each warp of the first stuck block waits."""
        where: dict[int, str] = {}
        span: Span | None = None
        arrived = self._at_grid_barrier()
        for task in self._tasks(self.root):
            if task.results is not None or task.event is None:
                continue
            if isinstance(task.event, Fork):
                op = task.event.op
                if op is None:
                    continue
                text = f"for other warps at the end of the `{op.opcode}` at {op.span.place()}"
            else:
                span = span or task.event.span
                text = f"{self._kind(task.event)} at {task.event.span.place()}"
            where.update(dict.fromkeys((int(w) for w in self._warps(task)), text))
        per_block = self.machine.warps
        block = min(where) // per_block
        for stuck in np.flatnonzero(~self._complete()):
            if any(w // per_block == stuck for w in where):
                block = int(stuck)
                break
        lines = [f"warp {w % per_block} waits {text}" for w, text in sorted(where.items()) if w // per_block == block]
        first_block = int(self.machine.root.values[BLOCK][0])
        if self.machine.races.launch.explicit:
            ended = [w % per_block for w in range(block * per_block, (block + 1) * per_block) if w not in where]
            lines += [f"warp {w} has ended" for w in ended]
        gone = [b for b in range(self.machine.blocks) if not any(w // per_block == b for w in where)]
        if arrived.any() and gone:
            lines.append(f"{self.machine.block_text(first_block + gone[0])} has ended and will never come")
        return fault(
            f"deadlock in {self.machine.block_text(first_block + block)}: " + "; ".join(lines),
            span or self.machine.kernel.span,
        )


@dataclass(frozen=True, eq=False)
class EmulatedLaunch:
    """A kernel with what one launch gives it."""

    kernel: Kernel
    sizes: Mapping[str, int]
    arguments: Arguments
    warp_size: int
    waits: Waits

    def races(self, blocks: int) -> LaunchRaces:
        """What the blocks of the launch know of one another."""
        waits = self.waits
        return LaunchRaces(self.kernel, blocks, self.arguments, self.warp_size, waits.clocked, waits.cluster, waits.grid)

    def run(self, single: bool = False, patience: int = 0) -> None:
        """Run all blocks; `single`: each thread on its own."""
        waits, grid = self.waits, launched_grid(self.kernel, self.sizes)
        total = prod(grid)
        if grid and grid[0] % waits.cluster:
            raise fault(f"a grid of {grid[0]} blocks along x is not made of clusters of {waits.cluster}", self.kernel.span)
        at_once = waits.blocks_at_once(-(-self.kernel.threads // self.warp_size) * self.warp_size, total)
        races = self.races(total)
        pending = deque((first, min(at_once, total - first)) for first in range(0, total, at_once))
        active: list[tuple[Team, Iterator[None]]] = []
        apart = waits.clocked or waits.grid
        idle = 0
        while pending or active:
            changes = sum(team.machine.changes for team, _ in active)
            finished = [pair for pair in active if next(pair[1], True) is True]
            if finished:
                active = [pair for pair in active if pair not in finished]
                idle = 0
            elif pending:
                first, blocks = pending.popleft()
                if waits.polling or not (apart or (blocks > 1 and waits.blocking)):
                    team = self.team(first, blocks, races, apart or single, single)
                    active.append((team, _alone(team)))
                elif not self._together(first, blocks, races):
                    for part in [(first, blocks)] if apart else [(block, 1) for block in range(first, first + blocks)]:
                        for _ in _alone(self.team(*part, races, apart)):
                            pass
            elif sum(team.machine.changes for team, _ in active) == changes:
                idle += 1
                if idle > (patience or PATIENCE):
                    raise Deadlock(*active[0][0].deadlock().diagnostics)
            else:
                idle = 0

    def team(self, first: int, blocks: int, races: LaunchRaces, apart: bool = False, single: bool = False) -> Team:
        """The blocks from `first` on, ready to run; `apart`: each warp on its own from the start; `single`: each thread."""
        machine = ThreadMachine(self.kernel, self.sizes, self.waits, first, blocks, self.warp_size, races)
        for param, argument in zip(self.kernel.params, self.arguments, strict=True):
            machine.bind(param, argument, machine.root)
        return Team(machine, apart, single)

    def _together(self, first: int, blocks: int, races: LaunchRaces) -> bool:
        """Run blocks in one team. Blocks that pass barriers differently can hold one another up there, which single blocks do
        not, and warps that wait for one another likewise: then memory is put back and the answer is no."""
        team = self.team(first, blocks, races)
        memories = [m for m in team.machine.memories.values() if m.flat.flags.writeable]
        before = [memory.flat.copy() for memory in memories]
        try:
            for _ in team.run():
                pass
        except Stuck:
            for memory, saved in zip(memories, before, strict=True):
                memory.flat[:] = saved
            races.forget_blocks(first, blocks)
            return False
        return True


def launch(kernel: Kernel, sizes: Mapping[str, int], arguments: Arguments, warp_size: int) -> None:
    """Run a thread-stage kernel, in warps of that size."""
    run = EmulatedLaunch(kernel, sizes, arguments, warp_size, Waits.of(kernel))
    if not (run.waits.polling and is_explicit(kernel) and _threads_are_alone(kernel)):
        run.run()
        return
    # Threads of a warp that wait for one another, as for a lock, need not run in step; on a GPU each of them gets its turn.
    before = [(a, a.copy()) for a in arguments if isinstance(a, np.ndarray) and a.flags.writeable]
    try:
        run.run(patience=PATIENCE // 50)
    except Deadlock:
        for array, saved in before:
            array[...] = saved
        run.run(single=True)


class Deadlock(UserError):
    """Nobody can go on, as each only watches memory."""


def _threads_are_alone(kernel: Kernel) -> bool:
    """Whether no op is one of a whole warp or block."""
    return all(OPS[op.opcode].effect != "sync" or op.opcode in _ALONE for op in walk(kernel.body))


def _alone(team: Team) -> Iterator[None]:
    try:
        yield from team.run()
    except Stuck:
        raise team.deadlock() from None
