"""Runs the warps of thread-stage blocks until all are done: barriers, forks, and finding out that nobody can go on.

A `Team` is some blocks that run together: a tree of tasks, each one generator over a frame of warps. A task goes until it
waits at a barrier or for something else, forks, pauses or ends. A barrier opens for a block when all its warps have arrived;
copies by the engine arrive only when nobody can go on without. Teams of a kernel that watches memory are started one after
another and take turns from then on, so that a block can wait for any other. A kernel with barriers of the grid is one team. Warps in one frame wait for each other where one of
them waits; if that is why nobody can go on, memory is put back and the blocks run again, more finely cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.ir.emulator.frames import BLOCK, LANE, Frame
from tilewright.ir.emulator.machine import Barrier, Event, Fork, GridBarrier, Pause, Results, Steps, Wait, launched_grid
from tilewright.ir.emulator.memory import fault
from tilewright.ir.emulator.thread import WARP, ThreadMachine, Waits, by_warp, warps_with
from tilewright.ir.emulator.watch import Watch, is_explicit
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.ops import OPS

Array = np.ndarray
Arguments = Sequence[Array | int | float | bool]
_ALONE = frozenset({"fence", "clock", "global_timer", "nanosleep", "prefetch"})
"""Ops that count as syncs but are of one thread."""
PATIENCE = 10_000
"""Rounds in which every warp only watches memory and nothing changes, before we call it a deadlock."""


class Stuck(Exception):
    """No warp of a team can go on. Never leaves this module."""


class Task:
    """Some warps on their way through a region."""

    def __init__(self, frame: Frame, steps: Steps, parent: Task | None = None) -> None:
        self.frame = frame
        self.steps = steps
        self.parent = parent
        self.event: Event | None = None
        self.children: list[Task] = []
        self.results: Results | None = None

    def is_done(self) -> bool:
        return self.results is not None

    def warps(self) -> Array:
        """Numbers of its warps that have an active thread, over all blocks of the team."""
        active = warps_with(self.frame.active)
        numbers: Array = by_warp(self.frame.full(LANE))[active, 0] // WARP
        return numbers


class Team:
    """The tasks of one machine's blocks."""

    def __init__(self, machine: ThreadMachine, apart: bool = False, single: bool = False) -> None:
        self.machine = machine
        self.root = Task(machine.root, machine.start(apart, single))
        self.ready: deque[Task] = deque([self.root])
        self.waiting: list[Task] = []

    def run(self) -> Iterator[None]:
        """Goes until all warps are done; hands out control after a round in which they only watched memory."""
        while not self.root.is_done():
            watched = self.machine.changes
            moved = False
            for _ in range(len(self.ready)):
                task = self.ready.popleft()
                self._advance(task)
                moved = moved or not isinstance(task.event, Pause)
            moved = self._open_barriers() or moved
            moved = self._open_grid_barrier() or moved
            moved = self._end_waits() or moved
            if self.root.is_done():
                break
            while not (self.ready and moved) and self.machine.copy_units.land():
                moved = self._end_waits()
            if not self.ready:
                raise Stuck
            if not moved and self.machine.changes == watched:
                yield
        self.machine.finish()

    def _advance(self, task: Task) -> None:
        parts = tuple(child.results or () for child in task.children)
        first = task.event is None
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
        if isinstance(event, Barrier | GridBarrier | Wait):
            self.waiting.append(task)
        elif isinstance(event, Fork):
            task.children = [Task(frame, steps, task) for frame, steps in event.children]
            self.ready.extend(task.children)
        else:
            self.ready.append(task)

    def _complete(self) -> Array:
        """Of each block, whether all its warps wait at a barrier."""
        arrived = np.zeros(self.machine.blocks * self.machine.warps, np.bool_)
        for task in self.waiting:
            if isinstance(task.event, Barrier):
                arrived[task.warps()] = True
        complete: Array = np.logical_and.reduce(arrived.reshape(-1, self.machine.warps), axis=1)
        return complete

    def _open_barriers(self) -> bool:
        here = [task for task in self.waiting if isinstance(task.event, Barrier)]
        if not here:
            return False
        opens = self._complete()
        blocks = [task.warps() // self.machine.warps for task in here]
        # A task goes on with all its blocks or not at all, and a block with all its tasks.
        held = True
        while held:
            held = False
            for own in blocks:
                if opens[own].any() and not opens[own].all():
                    opens[own] = False
                    held = True
        released = [task for task, own in zip(here, blocks, strict=True) if opens[own].all()]
        if self.machine.watcher is not None:
            self._require_one_barrier(released)
        self._release(released)
        self.machine.open_barriers(opens)
        return bool(released)

    def _require_one_barrier(self, tasks: Sequence[Task]) -> None:
        """Warps of a block must meet at one and the same barrier of the text."""
        if len({task.event.span for task in tasks if task.event is not None and not isinstance(task.event, Fork)}) <= 1:
            return
        met: dict[int, tuple[Span, int]] = {}
        per_block = self.machine.warps
        for task in tasks:
            assert isinstance(task.event, Barrier)
            for warp in task.warps().tolist():
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
                arrived[task.warps()] = True
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

    def _release(self, tasks: Sequence[Task]) -> None:
        self.waiting = [task for task in self.waiting if task not in tasks]
        self.ready.extend(tasks)

    # -- when nobody can go on ------------------------------------------------------------------------------------

    def _tasks(self, task: Task) -> Iterator[Task]:
        yield task
        for child in task.children:
            yield from self._tasks(child)

    @staticmethod
    def _kind(event: Barrier | GridBarrier | Wait | Pause) -> str:
        if isinstance(event, Wait):
            return event.text()
        if isinstance(event, GridBarrier):
            return "for all blocks at the grid_barrier"
        return "at the barrier" if isinstance(event, Barrier) else "for memory to change in the loop"

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
            where.update(dict.fromkeys((int(w) for w in task.warps()), text))
        per_block = self.machine.warps
        block = min(where) // per_block
        for stuck in np.flatnonzero(~self._complete()):
            if any(w // per_block == stuck for w in where):
                block = int(stuck)
                break
        lines = [f"warp {w % per_block} waits {text}" for w, text in sorted(where.items()) if w // per_block == block]
        first_block = int(self.machine.root.values[BLOCK][0])
        if self.machine.watcher is not None:
            ended = [w % per_block for w in range(block * per_block, (block + 1) * per_block) if w not in where]
            lines += [f"warp {w} has ended" for w in ended]
        gone = [b for b in range(self.machine.blocks) if not any(w // per_block == b for w in where)]
        if arrived.any() and gone:
            lines.append(f"{self.machine.block_text(first_block + gone[0])} has ended and will never come")
        return fault(
            f"deadlock in {self.machine.block_text(first_block + block)}: " + "; ".join(lines),
            span or self.machine.kernel.span,
        )


def launch(kernel: Kernel, sizes: Mapping[str, int], arguments: Arguments) -> None:
    """Run a thread-stage kernel."""
    waits = Waits.of(kernel)
    if not (waits.polling and is_explicit(kernel) and _threads_are_alone(kernel)):
        _launch(kernel, sizes, arguments, waits)
        return
    # Threads of a warp that wait for one another, as for a lock, need not run in step; on a GPU each of them gets its turn.
    before = [(a, a.copy()) for a in arguments if isinstance(a, np.ndarray) and a.flags.writeable]
    try:
        _launch(kernel, sizes, arguments, waits, patience=PATIENCE // 50)
    except Deadlock:
        for array, saved in before:
            array[...] = saved
        _launch(kernel, sizes, arguments, waits, single=True)


class Deadlock(UserError):
    """Nobody can go on, as each only watches memory."""


def _threads_are_alone(kernel: Kernel) -> bool:
    """Whether no op is one of a whole warp or block."""
    return all(OPS[op.opcode].effect != "sync" or op.opcode in _ALONE for op in walk(kernel.body))


def _launch(kernel: Kernel, sizes: Mapping[str, int], arguments: Arguments, waits: Waits, single: bool = False, patience: int = 0) -> None:
    grid = launched_grid(kernel, sizes)
    total = prod(grid)
    if grid and grid[0] % waits.cluster:
        raise fault(f"a grid of {grid[0]} blocks along x is not made of clusters of {waits.cluster}", kernel.span)
    at_once = waits.blocks_at_once(-(-kernel.threads // WARP) * WARP, total)
    watch = Watch(kernel, total, arguments, waits.clocked, waits.cluster) if is_explicit(kernel) else None
    pending = deque((first, min(at_once, total - first)) for first in range(0, total, at_once))
    active: list[tuple[Team, Iterator[None]]] = []
    idle = 0
    while pending or active:
        changes = sum(team.machine.changes for team, _ in active)
        finished = [pair for pair in active if next(pair[1], True) is True]
        if finished:
            active = [pair for pair in active if pair not in finished]
            idle = 0
        elif pending:
            first, blocks = pending.popleft()
            if not waits.polling and (waits.grid or waits.clocked or (blocks > 1 and waits.blocking)):
                if not _together(kernel, sizes, arguments, waits, first, blocks, watch):
                    finer = (kernel, sizes, arguments, waits)
                    whole = waits.clocked or waits.grid
                    parts = [(first, blocks)] if whole else [(block, 1) for block in range(first, first + blocks)]
                    for part in parts:
                        for _ in _alone(_team(*finer, *part, watch, apart=whole)):
                            pass
            else:
                team = _team(kernel, sizes, arguments, waits, first, blocks, watch, waits.clocked or waits.grid or single, single)
                active.append((team, _alone(team)))
        elif sum(team.machine.changes for team, _ in active) == changes:
            idle += 1
            if idle > (patience or PATIENCE):
                raise Deadlock(*active[0][0].deadlock().diagnostics)
        else:
            idle = 0


def _team(
    kernel: Kernel,
    sizes: Mapping[str, int],
    arguments: Arguments,
    waits: Waits,
    first: int,
    blocks: int,
    watch: Watch | None,
    apart: bool = False,
    single: bool = False,
) -> Team:
    machine = ThreadMachine(kernel, sizes, waits, first, blocks, watch)
    for param, argument in zip(kernel.params, arguments, strict=True):
        machine.bind(param, argument, machine.root)
    return Team(machine, apart, single)


def _alone(team: Team) -> Iterator[None]:
    try:
        yield from team.run()
    except Stuck:
        raise team.deadlock() from None


def _together(
    kernel: Kernel, sizes: Mapping[str, int], arguments: Arguments, waits: Waits, first: int, blocks: int, watch: Watch | None
) -> bool:
    """Run blocks in one team. Blocks that pass barriers differently can hold one another up there, which single blocks do
    not, and warps that wait for one another likewise: then memory is put back and the answer is no."""
    team = _team(kernel, sizes, arguments, waits, first, blocks, watch)
    memories = [m for m in team.machine.memories.values() if m.flat.flags.writeable]
    before = [memory.flat.copy() for memory in memories]
    try:
        for _ in team.run():
            pass
    except Stuck:
        for memory, saved in zip(memories, before, strict=True):
            memory.flat[:] = saved
        if watch is not None:
            watch.forget_blocks(first, blocks)
        return False
    return True
