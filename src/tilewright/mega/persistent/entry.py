"""A step of a graph as one launch: `PersistentStep`.

In: an executor, a plan, a device and the arrays of inputs and caches. Out: a step that is launched again and again; every launch fills the same outputs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.base.artifact import FAILURE_EXTENT, FAILURE_INDEX, FAILURE_SITE, Artifact, index_error
from tilewright.base.dtypes import i64, u8, u32
from tilewright.base.errors import DeviceError, TargetLimit, UserError
from tilewright.base.target import Target
from tilewright.compile.build import build_artifact
from tilewright.compile.driver import package_version
from tilewright.compile.store import STORE
from tilewright.execute.device import Device, array_device
from tilewright.execute.places import ArrayPlace
from tilewright.graphs.executor import Executor
from tilewright.graphs.graph import TensorGraph
from tilewright.graphs.lower import PlannedValue, Ref
from tilewright.graphs.plan import GraphPlan
from tilewright.graphs.workspace import ALIGNMENT
from tilewright.ir.emulator import run_program
from tilewright.ir.emulator.memory.addresses import register
from tilewright.ir.needs import shared_places
from tilewright.ir.nodes import Attr
from tilewright.ir.ops_simt import BULK_CACHES
from tilewright.ir.program import Program
from tilewright.ir.text import print_program
from tilewright.ir.verify import verify_program
from tilewright.mega.persistent.collect import collect
from tilewright.mega.persistent.emit import STAMPS, WAIT_POLLS, counter_words, emit, task_threads
from tilewright.mega.persistent.invariant import MOST_WORDS
from tilewright.mega.persistent.kept import KeptPlan, KeptStep, keep_step
from tilewright.mega.persistent.order import check, plan_waits, wait_count
from tilewright.mega.persistent.records import ArraySlot, StepPlan
from tilewright.mega.persistent.ring import WARP, RingPlan, check_shared, chosen_ring, plan_ring
from tilewright.mega.persistent.stream import NEXT_BYTES, plan_stream
from tilewright.runtime.core import streams
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.packed_array import PackedArray

THREADS_OF_BLOCK = 384
"""Of a block on a GPU: one block on each multiprocessor, since every block looks at counters, and registers for products that keep their row."""
PAUSE = 32
"""Nanoseconds between two looks at a counter: blocks that look all the time hold up those that count."""
REGISTERS = 96
"""Registers of a thread that products need, so that what they read next stays in them."""
EMULATED_BLOCKS = 3
"""Blocks of the emulator: few, so that each has several tasks."""


def plan_step(executor: Executor, plan: GraphPlan, target: Target, many: bool = False) -> StepPlan:
    """The ops of a plan with their waits, proved to be enough. `many`: for launches of several steps."""
    step = collect(executor, plan, target)
    step.many = many
    plan_waits(step)
    return step


def compile_persistent(graph: TensorGraph, plan: GraphPlan, target: Target, executor: Executor | None = None, ring_bytes: int | None = None) -> Artifact:
    """The artifact of a plan, from the cache or freshly compiled. No device is needed. `executor` is the one that made the plan, where it is not the graph's."""
    step = plan_step(executor or graph.executor, plan, target)
    ring = step_ring(step, target, target.multiprocessors, THREADS_OF_BLOCK, ring_bytes)
    program = emit(step, target.multiprocessors, attrs={"min_blocks": 1}, threads=THREADS_OF_BLOCK, pause=PAUSE, ring=ring)
    check_shared(step, ring, shared_bytes(program), target.max_shared, target.name)
    return _artifact(step, program, target)


def step_ring(step: StepPlan, target: Target, blocks: int, threads: int, ring_bytes: int | None, slot_bytes: int = 0, flight: int = 0, cache: str = BULK_CACHES[0]) -> RingPlan:
    """The ring of a step on a target; where its bytes are None, one that pays. Where there are no bulk copies, there is none."""
    if ring_bytes is None:
        if "tma" not in target.features:
            return RingPlan()
        return chosen_ring(step, blocks, task_threads(step, threads, True) // WARP, target.max_shared, cache)
    if ring_bytes and "tma" not in target.features:
        raise TargetLimit.at("TW020", f"a ring of {ring_bytes:,} bytes for the weights of '{step.name}': {target.name} has no bulk copies", help="leave ring_bytes out")
    return plan_ring(step, blocks, task_threads(step, threads, True) // WARP, ring_bytes, slot_bytes, flight, cache)


def shared_bytes(program: Program) -> int:
    """Shared memory of the kernel of a program."""
    return shared_places(program.calls[0].kernel)[1]


def blocks_per_processor(step: StepPlan, target: Target) -> int:
    """As many blocks as shared memory allows, and as leave each thread registers enough."""
    shared = max((shared_places(op.kernel)[1] for op in step.bodies), default=0)
    if shared > target.max_shared:
        worst = max(step.bodies, key=lambda op: shared_places(op.kernel)[1])
        raise TargetLimit.at("TW020", f"op '{worst.title}' needs {shared:,} bytes of shared memory, and a block of {target.name} has {target.max_shared:,}")
    threads = max(op.kernel.threads for op in step.bodies)
    by_shared = target.shared_per_sm // (shared + 1024) if shared else target.blocks_per_sm
    by_registers = target.registers_per_sm // (threads * REGISTERS)
    return max(1, min(by_shared, by_registers, target.threads_per_sm // threads))


def _artifact(step: StepPlan, program: Program, target: Target) -> Artifact:
    # Its kernels have been through all passes: only loops and waits were added.
    key = hashlib.sha256("\0".join(("persistent", print_program(program), target.key(), package_version())).encode()).hexdigest()

    def built() -> Artifact:
        verify_program(program)
        return build_artifact(program, target, key, entry=False)

    return STORE.get_or_build(key, built)


@dataclass(frozen=True)
class TaskGroup:
    """An op of a step as others see it."""

    number: int
    title: str
    nodes: str
    blocks: int
    iterations: int
    bytes: int
    """Of the arrays that it touches."""
    after: tuple[int, ...]
    """Numbers of the ops that it waits for."""


class PersistentStep:
    """A plan bound to a device. `launch` queues one launch of `steps` steps; `outputs` are arrays that every launch fills.

    What else can be said is for measurements: `waits=False` leaves out waits, and results are wrong; `ahead` is how many bytes of weights a block asks for ahead of what it reads;
    `per_processor` blocks of `threads` threads stay on each multiprocessor; `keep`, `early_loads`, `pause`, `idle`, `delays`, `polls`, `copies` and `next_bytes` are those of `emit`; `clocks` fills `stamps()`. `ring_bytes` of shared memory are a ring by which weights come (chosen where none are given, 0 is no ring), in slots
    of `ring_slot` bytes, of which `ring_flight` bytes are on their way at most: 0 chooses; `ring_cache` is what its copies tell the second-level cache. `kept` is the step as the cache
    has it (`kept.find_step`), with its `plan`; `keep_as` is the key under which the cache gets it."""

    def __init__(
        self, executor: Executor, plan: GraphPlan | KeptPlan, place: Device, arrays: Mapping[str, Any], *, steps: int = 1, watchdog: float = 0.0, waits: bool = True,
        blocks: int = 0, ahead: int = 0, per_processor: int = 1, keep: int = MOST_WORDS,
        clocks: bool = False, threads: int = -1, early_loads: bool = True, pause: int = PAUSE, idle: int = 0, planned: StepPlan | None = None, workspace: Any = None,
        ring_bytes: int | None = None, ring_slot: int = 0, ring_flight: int = 0, ring_cache: str = BULK_CACHES[0], polls: str = WAIT_POLLS[0], copies: int = 1,
        kept: KeptStep | None = None, keep_as: str = "", delays: int = 0, next_bytes: int = NEXT_BYTES,
    ) -> None:  # fmt: skip
        if steps < 1:
            raise UserError.at("TW009", f"a launch of {steps} steps", help="give a whole number above 0")
        if place.target.is_host:
            raise UserError.at("TW020", f"a persistent kernel of '{plan.name}' on '{place.id}': only GPUs and the emulator run one")
        if polls not in WAIT_POLLS or not 1 <= copies <= WARP:
            raise UserError.at("TW009", f"polls={polls!r}, copies={copies}", help=f"polls is one of {', '.join(WAIT_POLLS)}, copies a number from 1 to {WARP}")
        if ring_bytes and (ahead or idle):
            raise UserError.at("TW016", f"ring_bytes={ring_bytes} and {'ahead' if ahead else 'idle'}={ahead or idle}: weights come by a ring, or are asked for ahead", help="give one of them")
        self.executor, self.plan, self.place, self.steps, self.copies = executor, plan, place, steps, copies
        self.gpu = array_device(place)
        self.closed = False
        self.ring = RingPlan()
        """What comes by the ring; `ring.left` says what does not, and why. Of a step from the cache nothing is known."""
        if kept is not None:
            self.step, self.blocks, self.clocks, self.ring = kept.step, kept.blocks, clocks, RingPlan(total=kept.ring_slots)
            self._bind(dict(arrays), workspace)
            self._load(kept)
            return
        assert isinstance(plan, GraphPlan)
        executor.prepare(plan, place, dict(arrays))
        self.step = planned or plan_step(executor, plan, place.target, steps > 1)
        each = min(per_processor, blocks_per_processor(self.step, place.target)) if per_processor else blocks_per_processor(self.step, place.target)
        threads = (THREADS_OF_BLOCK if array_device(place) is not None else 0) if threads < 0 else threads
        most = each * place.multiprocessors if self.gpu is not None else EMULATED_BLOCKS
        attrs: dict[str, Attr] = {"min_blocks": each}
        if watchdog:
            attrs |= {"watchdog": int(watchdog * 1e9), "watchdog_number": 0}
        self.stream = plan_stream(self.step, blocks or most, ahead if "tma" in place.target.features else 0)
        if ring_bytes is None and (self.gpu is None or ahead or idle or each > 1):
            ring_bytes = 0  # one block of a multiprocessor has all of its shared memory
        self.ring = step_ring(self.step, place.target, blocks or most, threads, ring_bytes, ring_slot, ring_flight, ring_cache)
        self.program = emit(self.step, blocks or most, waits, attrs, self.stream, keep, clocks, threads, early_loads, pause, idle, self.ring, polls, copies, delays, next_bytes)
        check_shared(self.step, self.ring, each * shared_bytes(self.program), place.target.max_shared, place.target.name)
        self.blocks, self.clocks = blocks or most, clocks
        check(self.step, blocks or most)
        self._bind(dict(arrays), workspace)
        self._load()
        if keep_as:
            keep_step(keep_as, plan, self.step, self.blocks, self.artifact, self.program, self.ring.total)

    # -- memory ---------------------------------------------------------------------------------------------------

    def _new(self, nbytes: int, dtype: Any = u8) -> Any:
        """Memory of the device that is zero."""
        count = -(-max(1, nbytes) // dtype.itemsize)
        if self.gpu is None:
            room = np.zeros(count * dtype.itemsize + ALIGNMENT, np.uint8)
            self._kept.append(room)
            at = -room.ctypes.data % ALIGNMENT
            return room[at : at + count * dtype.itemsize].view(dtype.numpy)
        made = self.gpu.empty((count,), dtype, streams.current(self.gpu.ordinal) or 0)
        made.fill(0)
        return made

    def _bind(self, arrays: dict[str, Any], workspace: Any) -> None:
        """Find the address of everything that the kernel touches. A workspace of the caller may hold the inputs too."""
        self._kept: list[Any] = []
        executor, plan = self.executor, self.plan
        self.workspace = workspace if workspace is not None else self._new(plan.peak_bytes)
        self.scratch = {name: self._new(nbytes) for name, (nbytes, _) in self.step.scratch.items()}
        self.values: dict[int, Any] = {}
        for segment in plan.segments:
            for value in () if segment.constant else segment.results:
                offset = plan.offsets.get(value.number)
                if offset is None:
                    self.values[value.number] = self._shaped(self._new(value.nbytes), 0, value)
                else:
                    self.values[value.number] = self._shaped(self.workspace, offset, value)
        self.table = np.zeros(max(1, self.step.entries), np.uint64)
        for loop in self.step.loops:
            for iteration, programs in enumerate(loop.slots):
                for column, (position, name) in enumerate(loop.columns):
                    self.table[loop.first_entry + iteration * len(loop.columns) + column] = self._address(programs[position][name], name, arrays)
        self.counters = self._new(4 * counter_words(self.step, self.copies), u32)
        if self.clocks:
            self.times = self._new(8 * STAMPS * self.blocks * self.step.length, i64)
        self.outputs = {name: executor.array(ref, self.values, arrays, plan, self.place) for name, ref in plan.outputs.items()}
        if self.gpu is not None:
            self.addresses = self.gpu.from_numpy(self.table)

    def _shaped(self, room: Any, offset: int, value: PlannedValue) -> Any:
        if isinstance(room, DeviceArray):
            return DeviceArray.at(room.device, room.owner, room.offset + offset, value.memory, value.dtype)
        return room[offset : offset + value.nbytes].view(value.dtype.numpy).reshape(value.memory)

    def _address(self, slot: ArraySlot, name: str, arrays: dict[str, Any]) -> int:
        source = slot.source
        array: Any
        if isinstance(source, int):
            return source
        if isinstance(source, str):
            array = self.scratch[source]
        elif isinstance(source, PlannedValue):
            array = self.values[source.number]
        else:
            assert isinstance(source, Ref)
            array = self.executor.array(source, self.values, arrays, self.plan, self.place)
        if isinstance(array, PackedArray):
            array = array.blocks
        self._kept.append(array)
        if isinstance(array, DeviceArray):
            address = array.pointer
        else:
            address = int(array.__array_interface__["data"][0])
            base = array
            while isinstance(base.base, np.ndarray):
                base = base.base
            self._kept.append(base)
            register(base if base.flags.c_contiguous else np.ascontiguousarray(base))
        if slot.nbytes and slot.align and address % slot.align:
            raise UserError.at("TW018", f"the array for '{name}' of '{self.plan.name}' lies at an address that is no multiple of {slot.align}", help="give a copy of it")
        return address

    # -- code -----------------------------------------------------------------------------------------------------

    def _load(self, kept: KeptStep | None = None) -> None:
        if kept is not None and kept.program is not None:
            self.program = kept.program
        self.artifact: Artifact | None = None
        if self.gpu is None:
            self.finished = self.program
            return
        self.artifact = kept.artifact if kept is not None and kept.artifact is not None else _artifact(self.step, self.program, self.place.target)
        self.loaded = self.gpu.load(self.artifact)

    def launch(self, steps: int = 0) -> None:
        """Make one launch of so many steps, as many as the step was made for where none are given. On a GPU it is queued on the current stream."""
        if self.closed:
            raise UserError.at("TW016", f"the step of '{self.plan.name}' is closed")
        count = steps or self.steps
        if count < 1 or (count > 1 and not self.step.many):
            raise UserError.at("TW009", f"a launch of {count} steps of '{self.plan.name}', which was made for {self.steps}", help="make it with steps=2 or more")
        if count * self.ring.total >= 1 << 31:
            raise UserError.at("TW009", f"a launch of {count} steps of '{self.plan.name}': the slots of its ring could not be counted", help="make more launches of fewer steps")
        if self.gpu is None:
            times = {"times": self.times} if self.clocks else {}
            run_program(self.finished, {"table": self.table, "counters": self.counters, "steps": count, **times}, {}, self.place.target)
            self.check_failures()
            return
        with self._named():
            self._queue(count)

    def _queue(self, count: int) -> None:
        place = ArrayPlace(self.place, [self.addresses]).place
        arrays = {"table": self.addresses, "counters": self.counters, **({"times": self.times} if self.clocks else {})}
        self.loaded.run(arrays, {"steps": count}, {}, place.stream, take=place.workspace())

    def synchronize(self) -> None:
        """Wait for the launches so far. A watchdog that stopped one says which op waited for which."""
        if self.gpu is not None:
            with self._named():
                self.gpu.synchronize()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Inside, what a watchdog says names ops."""
        try:
            yield
        except DeviceError as error:
            text = self.waiting(str(error))
            if not text:
                raise
            first = error.diagnostics[0]
            raise DeviceError.at(first.code, f"{first.message}: {text}", first.span, first.help) from None

    def waiting(self, text: str) -> str:
        """Which op waited for which, by what a watchdog says of the kernel; empty where it says nothing of it."""
        found = re.search(r"kernel tw_persistent_0 at \S*:(\d+) after", text)
        number = int(found[1]) - 1 if found else -1
        ops = {op.number: f"'{op.title}' of {loop.titles[op.position]}" for loop in self.step.loops for op in loop.ops}
        waits, other = divmod(number, len(ops))
        return f"op {ops[waits]} waited for op {ops[other]}" if number >= 0 and waits in ops else ""

    def check_failures(self) -> None:
        """Raise what index checks found; on a GPU this waits for the launches so far."""
        for name, program in self.step.failures.items():
            room = self.scratch[name]
            cell = (room.numpy() if isinstance(room, DeviceArray) else room).view(np.int64)
            if program.sites and cell[FAILURE_SITE]:
                raise index_error(program.sites, int(cell[FAILURE_SITE]), int(cell[FAILURE_INDEX]), int(cell[FAILURE_EXTENT]))

    # -- time -----------------------------------------------------------------------------------------------------

    def stamps(self) -> np.ndarray | None:
        """Of the last step, in nanoseconds: for each block and each op of each iteration, when the block came to it, when it had waited, and when it had ended
        its tasks; zeros where it had none. None where the step was made without `clocks`."""
        if not self.clocks:
            return None
        times = self.times.numpy() if isinstance(self.times, DeviceArray) else self.times
        return np.asarray(times).reshape(self.blocks, self.step.length, STAMPS)

    def timeline(self) -> list[tuple[int, str, int, int]] | None:
        """What each block ran when in the last step: (block, title, start, end), in nanoseconds from the first start on."""
        times = self.stamps()
        if times is None:
            return None
        begin = int(times[times > 0].min()) if (times > 0).any() else 0
        titles = [title for _, title in self.instance_titles()]
        return [
            (block, titles[number], int(row[1]) - begin, int(row[2]) - begin) for block in range(self.blocks) for number, row in enumerate(times[block]) if row[2]
        ]

    def instance_titles(self) -> list[tuple[int, str]]:
        """The number and the title of each op of each iteration."""
        return [
            (op.number, f"{op.title} {iteration}" if loop.count > 1 else op.title)
            for loop in self.step.loops for iteration in range(loop.count) for op in loop.ops
        ]  # fmt: skip

    # -- what is known of it --------------------------------------------------------------------------------------

    @property
    def tasks(self) -> list[TaskGroup]:
        """Its ops, those of a loop once."""
        found: list[TaskGroup] = []
        for loop in self.step.loops:
            for op in loop.ops:
                slots = loop.slots[0][op.position]
                nbytes = sum(slots[name].nbytes for name in op.reads | op.writes)
                waits = loop.rest[op.number] if loop.count > 1 else loop.first[op.number]
                found.append(TaskGroup(op.number, op.title, loop.titles[op.position], op.tasks, loop.count, nbytes, tuple(wait.op for wait in waits)))
        return found

    @property
    def waits(self) -> int:
        """Waits that a block comes by in a step."""
        return wait_count(self.step)

    def close(self) -> None:
        """Give up what it holds."""
        self.closed = True
        self._kept = []
        self.values, self.scratch = {}, {}

    def __repr__(self) -> str:
        return f"<persistent {self.plan.name} on {self.place.id}: {len(self.step.ops)} ops, {self.waits} waits a step>"
