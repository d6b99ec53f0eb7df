"""Barriers other than the block's: mbarriers, named barriers of some warps, and the cluster's.

Each arrival, each copied byte and each wait is counted; waiting hands a `Wait` to the scheduler. It is an error (TW050) to use
an mbarrier that nobody initialised, or somebody whose initialisation one cannot know of; to arrive more often than its count
allows; to arrive at a named barrier with different numbers of threads; to end with bytes expected but not copied, or copied but
not expected. What a warp did before it arrives is known to those that wait. Not noticed: a wait that is more than one phase
behind, which a parity cannot tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tilewright.ir.emulator.checks.clocks import KNOWN
from tilewright.ir.emulator.frames import LANE, SLOT, Frame
from tilewright.ir.emulator.machine import Results, Steps, Wait
from tilewright.ir.emulator.memory.memory import Memory, fault
from tilewright.ir.emulator.warps.thread import ThreadMachine
from tilewright.ir.nodes import Attrs, Op

Array = np.ndarray
_NAMED = 16
"""Named barriers of a block."""


def whole(attrs: Attrs, name: str, default: int = 0) -> int:
    """An attribute that is an integer."""
    value = attrs.get(name, default)
    assert isinstance(value, int)
    return value


def joined(one: Array | None, other: Array | None) -> Array | None:
    """Two clocks as one that knows what either does."""
    return other if one is None else one if other is None else np.maximum(one, other)


@dataclass(eq=False)
class Mbarrier:
    label: str
    count: int
    missing: int
    """Arrivals left in this phase."""
    made: Array | None = None
    """The clock of those who know that it was initialised."""
    bytes: int = 0
    """Bytes left to be copied in this phase."""
    phase: int = 0
    gathered: Array | None = None
    """The clock of those who arrived in this phase."""
    passed: Array | None = None
    """The clock that the ends of phases hand on."""

    def settle(self) -> None:
        """End the phase if nothing is left of it."""
        if self.missing == 0 and self.bytes == 0:
            self.phase += 1
            self.missing = self.count
            self.passed, self.gathered = joined(self.passed, self.gathered), None

    def gather(self, given: Array) -> None:
        self.gathered = joined(self.gathered, given)

    @property
    def state(self) -> str:
        return f"phase {self.phase}, {self.missing} of {self.count} arrivals and {self.bytes} bytes to come"


@dataclass(eq=False)
class BarrierMeeting:
    """A named barrier or a cluster's: `warps` of them meet, again and again."""

    warps: int
    arrived: int = 0
    round: int = 0
    gathered: Array | None = None
    passed: Array | None = None


class Barriers:
    """The barriers of one machine's blocks, and the ops on them."""

    def __init__(self, machine: ThreadMachine) -> None:
        self.machine = machine
        self.mbarriers: dict[tuple[Memory, int], Mbarrier] = {}
        self.meetings: dict[tuple[int, int], BarrierMeeting] = {}
        machine.simple |= {
            "mbarrier_init": self._init,
            "mbarrier_arrive": self._arrive,
            "mbarrier_expect": self._arrive,
            "raise_flag": self._raise_flag,
            "await_flag": self._await_flag,
        }
        machine.control |= {"mbarrier_wait": self._wait, "named_barrier": self._named, "cluster_sync": self._cluster}

    # -- mbarriers --------------------------------------------------------------------------------------------------

    def _places(self, op: Op, frame: Frame) -> Iterator[tuple[Memory, int, Array]]:
        """Each mbarrier the op is about, with the active lanes it is about."""
        memory = self.machine.memories[op.operands[0]]
        slot = frame.full(SLOT)
        if op.attrs.get("remote"):
            slot = self.machine.peer(op, frame, frame.full(op.operands[-1]).astype(np.int64))
        index = frame.full(op.operands[1]).astype(np.int64)
        bad = frame.active & ((index < 0) | (index >= memory.size))
        if bad.any():
            raise self.machine.fail_at(
                op, frame, bad, lambda p: f"{op.opcode} of {memory.label} at [{int(index[p[0]])}] is out of bounds"
            )
        place = slot * memory.size + index
        for one in np.unique(place[frame.active]):
            yield memory, int(one), np.flatnonzero(frame.active & (place == one))

    def at(self, op: Op, memory: Memory, place: int, warps: Array) -> Mbarrier:
        """The mbarrier that these warps use."""
        found = self.mbarriers.get((memory, place))
        if found is None:
            raise fault(
                f"{op.opcode} of mbarrier {memory.label}[{place % memory.size}], which was never initialised", op.span,
                "initialise it in one thread, then let the block pass a barrier",
            )  # fmt: skip
        clocks = self.machine.clocks
        if clocks is not None and found.made is not None and (clocks.now[KNOWN, warps] < found.made).any():
            raise fault(
                f"{op.opcode} of mbarrier {found.label}, which another warp initialised with nothing that orders the two",
                op.span,
                "put a barrier (of the cluster, if there is one) behind the initialisation",
            )  # fmt: skip
        return found

    def _init(self, op: Op, frame: Frame) -> Results:
        count = whole(op.attrs, "count")
        clocks = self.machine.clocks
        for memory, place, lanes in self._places(op, frame):
            label = f"{memory.label}[{place % memory.size}]"
            if count == 0:
                raise fault(f"mbarrier {label} would expect no arrival at all", op.span)
            made = None
            if clocks is not None:
                warp = self.machine.warp_of(frame.full(LANE)[lanes[0]])
                own = clocks.warp(warp)
                made = clocks.about(own, int(clocks.now[KNOWN, warp, own]))[KNOWN]
            self.mbarriers[memory, place] = Mbarrier(label, count, count, made)
        return ()

    def _arrive(self, op: Op, frame: Frame) -> Results:
        for memory, place, lanes in self._places(op, frame):
            mbarrier = self.at(op, memory, place, self.machine.warps_of(frame, lanes))
            if len(lanes) > mbarrier.missing:
                raise fault(
                    f"{len(lanes)} threads arrive at mbarrier {mbarrier.label}, which allows {mbarrier.missing} more in this "
                    f"phase ({mbarrier.state}), in {self.machine.describe(frame, int(lanes[0]))}", op.span,
                    "initialise it with the number of arrivals of a phase; every active thread counts as one",
                )  # fmt: skip
            mbarrier.missing -= len(lanes)
            mbarrier.bytes += whole(op.attrs, "bytes") * len(lanes)
            if self.machine.clocks is not None:
                mbarrier.gather(self.machine.clocks.release(self.machine.warps_of(frame, lanes)))
            mbarrier.settle()
            self.machine.changes += 1
        return ()

    def copied(self, mbarrier: Mbarrier, size: int, given: Array | None) -> None:
        """Bytes of a copy have arrived."""
        mbarrier.bytes -= size
        if given is not None:
            mbarrier.gather(given)
        mbarrier.settle()
        self.machine.changes += 1

    def _wait(self, op: Op, frame: Frame) -> Steps:
        if op.attrs.get("remote"):
            raise fault("mbarrier_wait for an mbarrier of another block, at which threads can only arrive", op.span)
        parity = frame.full(op.operands[2]).astype(np.int64)
        bad = frame.active & (parity != 0) & (parity != 1)
        if bad.any():
            raise self.machine.fail_at(
                op, frame, bad, lambda p: f"mbarrier_wait for parity {int(parity[p[0]])}, which is 0 or 1"
            )
        wanted: list[tuple[Mbarrier, int, Array]] = []
        for memory, place, lanes in self._places(op, frame):
            mbarrier = self.at(op, memory, place, self.machine.warps_of(frame, lanes))
            for one in np.unique(parity[lanes]):
                wanted.append((mbarrier, int(one), np.unique(frame.full(LANE)[lanes[parity[lanes] == one]] // self.machine.warp_size)))

        def missing() -> list[tuple[Mbarrier, int, Array]]:
            return [each for each in wanted if each[0].phase & 1 == each[1]]

        def text() -> str:
            return "for " + ", ".join(f"parity {p} of mbarrier {m.label} ({m.state})" for m, p, _ in missing())

        if missing():
            yield Wait(op.span, lambda: not missing(), text)
        if self.machine.clocks is not None:
            for mbarrier, _, warps in wanted:
                if mbarrier.passed is not None:
                    self.machine.clocks.acquire(warps, mbarrier.passed)
        self.machine.races.sync_warps(frame)
        return ()

    # -- named barriers, clusters -----------------------------------------------------------------------------------

    def _named(self, op: Op, frame: Frame) -> Steps:
        self.machine.require_whole_warps(op, frame)
        threads = whole(op.attrs, "threads")
        if threads % self.machine.warp_size or not threads:
            raise fault(
                f"a named barrier of {threads} threads: warps arrive as a whole, so it must be a multiple of {self.machine.warp_size}",
                op.span,
            )
        number = frame.full(op.operands[0]).astype(np.int64)
        bad = frame.active & ((number < 0) | (number >= _NAMED))
        if bad.any():
            raise self.machine.fail_at(
                op, frame, bad, lambda p: f"named barrier {int(number[p[0]])}, of 0 to {_NAMED - 1}"
            )
        key = frame.full(SLOT) * _NAMED + number
        keys = [
            (int(one), self.machine.warps_of(frame, frame.active & (key == one)))
            for one in np.unique(key[frame.active])
        ]
        meetings = [(f"named barrier {one % _NAMED}", (0, one), warps) for one, warps in keys]
        yield from self._meet(op, meetings, threads // self.machine.warp_size, bool(op.attrs.get("arrive")))
        self.machine.races.sync_warps(frame)
        return ()

    def _cluster(self, op: Op, frame: Frame) -> Steps:
        self.machine.require_whole_warps(op, frame)
        size = self.machine.cluster
        cluster = frame.full(SLOT) // size
        meetings = [
            (
                "the cluster's barrier",
                (1, int(one)),
                self.machine.warps_of(frame, frame.active & (cluster == one)),
            )
            for one in np.unique(cluster[frame.active])
        ]
        yield from self._meet(op, meetings, size * self.machine.warps, False)
        self.machine.races.sync_warps(frame)
        return ()

    def _meet(self, op: Op, meetings: list[tuple[str, tuple[int, int], Array]], count: int, leave: bool) -> Steps:
        met: list[tuple[str, BarrierMeeting, int, Array]] = []
        for label, key, warp in [(label, key, warp) for label, key, warps in meetings for warp in warps[:, None]]:
            meeting = self.meetings.setdefault(key, BarrierMeeting(count))
            if meeting.arrived == 0:
                meeting.warps = count
            if meeting.warps != count:
                raise fault(
                    f"{label} of {count * self.machine.warp_size} threads, where others wait for {meeting.warps * self.machine.warp_size} threads", op.span
                )
            met.append((label, meeting, meeting.round, warp))
            meeting.arrived += 1
            if self.machine.clocks is not None:
                meeting.gathered = joined(meeting.gathered, self.machine.clocks.release(warp))
            if meeting.arrived == count:
                meeting.arrived, meeting.round = 0, meeting.round + 1
                meeting.passed, meeting.gathered = joined(meeting.passed, meeting.gathered), None
            self.machine.changes += 1
        if leave:
            return ()

        def missing() -> list[tuple[str, BarrierMeeting, int, Array]]:
            return [each for each in met if each[1].round == each[2]]

        def text() -> str:
            found = {f"{label} ({m.arrived * self.machine.warp_size} of {m.warps * self.machine.warp_size} threads)": None for label, m, _, _ in missing()}
            return "at " + ", ".join(found)

        if missing():
            yield Wait(op.span, lambda: not missing(), text)
        if self.machine.clocks is not None:
            for _, meeting, _, warps in met:
                if meeting.passed is not None:
                    self.machine.clocks.acquire(warps, meeting.passed)
        return ()

    # -- flags ------------------------------------------------------------------------------------------------------

    def _flags(self, op: Op, frame: Frame) -> tuple[Memory, Array]:
        """The memory of flags, and the places of those the active lanes name."""
        memory = self.machine.memories[op.operands[0]]
        index = frame.full(op.operands[1]).astype(np.int64)
        places = self.machine.element_places(op, frame, memory, [index], frame.active)
        return memory, np.broadcast_to(places, (frame.lanes,))[frame.active]

    def _raise_flag(self, op: Op, frame: Frame) -> Results:
        memory, places = self._flags(op, frame)
        memory.write(places, np.ones((), memory.flat.dtype))
        self.machine.changes += 1
        return ()

    def _await_flag(self, op: Op, frame: Frame) -> Results:
        """Blocks run in the order of their numbers here, so what may be waited for has been raised."""
        memory, places = self._flags(op, frame)
        found = memory.read(places)
        if (found != 1).any():
            which = int(np.argmax(found != 1))
            state = "which no block before this one raises" if found[which] == 0 else "which nobody made 0 before"
            who = self.machine.describe(frame, int(np.flatnonzero(frame.active)[which]))
            raise fault(f"await_flag of {memory.label}[{int(places[which])}], {state}, in {who}", op.span)
        return ()

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Complain of what a kernel left behind."""
        for mbarrier in self.mbarriers.values():
            if mbarrier.bytes:
                raise fault(
                    f"the kernel ends with mbarrier {mbarrier.label} in {mbarrier.state}", self.machine.kernel.span
                )
