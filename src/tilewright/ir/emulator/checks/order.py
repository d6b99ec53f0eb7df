"""The race detector's one question: does the later of two accesses know of the earlier one?

In: the reads, writes and atomics of shared and global memory, in the order the emulator makes them, and the syncs between them.
Out: the first access that races, with the earlier one it races with.

Two accesses of one element race if one of them writes, not both are atomics, they are of two agents, and nothing orders them.
Writing the value that is there already changes nothing and is let pass. What orders differs:

`BarrierOrder`: agents are threads, warps or blocks (`Grain`). Ordered are an agent's own accesses; those of threads of a warp by a
`warp_sync`, of a block by a `barrier`, of all by a `grid_barrier`; and, across the grid, by a fence followed by an atomic of the
earlier side which an atomic of the later side comes after. That last kind is told from too little rather than too much: a fence
counts for its whole block, and an atomic tells of all that was released before it. Each element remembers its last write, and two
reads and two atomics that no barrier has ordered. Two are enough: whoever comes next differs from one of them. They are taken from
different blocks, or else different warps, where there are such.

`ClockOrder`: agents are warps, the copy engine and matrix units; vector clocks (`clocks`) say what is known. Each element
remembers its last write, and the last read of each agent.

`CountOrder`: agents are blocks that wait for counters; clocks of blocks say what is known. Histories are those of `ClockOrder`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from tilewright.ir.emulator.checks.clocks import FENCED, KNOWN, Clocks
from tilewright.ir.emulator.checks.history import Access, AccessSlot, History
from tilewright.ir.nodes import Op

Array = np.ndarray
THREADS = 10
"""A thread of the launch is the number of its block, shifted by this, and its own in the block."""
EPOCH = 32
"""A time is the barriers a block has passed, shifted by this, and the syncs its warp has."""
RELEASES = frozenset({"release", "acq_rel"})
"""Orders of atomics that are a fence too."""


class Grain(Enum):
    """Who is told apart."""

    THREAD = "thread"
    WARP = "warp"
    BLOCK = "block"


@dataclass(frozen=True)
class Race:
    """The access number `at` of an op races with an earlier one."""

    at: int
    who: int
    op: Op


class Order(ABC):
    """What tells races from accesses in order."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._numbers: dict[Op, int] = {}

    def number(self, op: Op) -> int:
        """The op as the histories keep it."""
        found = self._numbers.get(op)
        if found is None:
            found = self._numbers[op] = len(self.ops)
            self.ops.append(op)
        return found

    @abstractmethod
    def unordered(self, slot: AccessSlot, places: Array, access: Access) -> Array:
        """Which accesses are of another agent than the slot's, with nothing that orders the two."""

    @abstractmethod
    def note(self, history: History, slots: dict[int, AccessSlot], places: Array, access: Access) -> None:
        """Remember reads or atomics, which may be several for one element."""

    def clashing(self, one: Array, other: Array) -> Array:
        """Which of these pairs of agents race when they write one element by one op."""
        return np.asarray(one != other)

    def read(self, history: History, places: Array, access: Access) -> Race | None:
        race = self._first(places, access, ([] if history.written is None else [history.written]) + list(history.updated.values()))
        if race is None:
            self.note(history, history.read, places, access)
        return race

    def write(self, history: History, places: Array, access: Access, current: Array, values: Array) -> Race | None:
        changed = bits(current) != bits(values)
        race = self._first(places, access, history.slots(), changed) or self._clash(places, access, values)
        if race is None:
            self.note_write(history, places, access)
        return race

    def note_write(self, history: History, places: Array, access: Access) -> None:
        if history.written is None:
            history.written = AccessSlot(history.size)
        history.written.note(places, access)

    def _first(
        self, places: Array, access: Access, slots: Iterable[AccessSlot], counts: Array | None = None
    ) -> Race | None:
        for slot in slots:
            bad = self.unordered(slot, places, access)
            race = self._race(slot, places, bad if counts is None else bad & counts)
            if race is not None:
                return race
        return None

    def _race(self, slot: AccessSlot, places: Array, bad: Array) -> Race | None:
        if not bad.any():
            return None
        at = int(np.argmax(bad))
        return Race(at, int(slot.who[places[at]]), self.ops[slot.op[places[at]]])

    def _clash(self, places: Array, access: Access, values: Array) -> Race | None:
        """Two agents that have different values for one place by one op."""
        order = np.argsort(places, kind="stable")
        there = places[order]
        bad = there[1:] == there[:-1]
        if not bad.any():
            return None
        who, what = access.who[order], bits(values)[order]
        bad &= self.clashing(who[1:], who[:-1]) & (what[1:] != what[:-1])
        if not bad.any():
            return None
        at = int(np.argmax(bad))
        return Race(int(order[at + 1]), int(who[at]), self.ops[access.op])


class BarrierOrder(Order):
    """Barriers, syncs of warps, fences and atomics. `apart`: what warps of a cluster do to each other is not looked at."""

    def __init__(self, grain: Grain, blocks: int, warp_size: int, apart: bool = False, cluster: int = 1) -> None:
        super().__init__()
        self.grain, self.apart, self.cluster = grain, apart, cluster
        self.lane_bits = warp_size.bit_length() - 1
        self.phase = np.zeros(blocks, np.int32)
        """How often each block has fenced."""
        self.stamp = 0
        """Counts atomics."""
        self.releases: dict[int, list[tuple[int, int]]] = {}
        """Of each block, in order: the accesses of phases before this were released at that stamp."""
        apart_by = (0, self.lane_bits, THREADS)
        self._nearness = apart_by if grain is Grain.THREAD else apart_by[:1]
        """By which bits two agents can be near one another, the nearest first."""

    def agents(self, threads: Array) -> Array:
        """The agents that threads of the launch are."""
        if self.grain is Grain.THREAD:
            return threads
        cut = self.lane_bits if self.grain is Grain.WARP else THREADS
        return threads >> cut << cut

    # -- fences and atomics -----------------------------------------------------------------------------------------

    def fence(self, blocks: Array) -> None:
        self.phase[np.unique(blocks)] += 1

    def synchronise(self, op: Op, blocks: Array) -> Array:
        """Atomics of threads of these blocks, one after another; gives the stamp up to which each then knows."""
        if op.attrs.get("order") in RELEASES:
            self.fence(blocks)
        stamps = self.stamp + 1 + np.arange(len(blocks))
        self.stamp += len(blocks)
        found, first = np.unique(blocks, return_index=True)
        for block, at in () if op.opcode == "atomic_load" else zip(found.tolist(), first.tolist(), strict=True):
            phase, known = int(self.phase[block]), self.releases.setdefault(block, [])
            if phase and (not known or known[-1][0] < phase):
                known.append((phase, int(stamps[at])))
        return stamps

    def _was_released(self, who: int, phase: int, acquired: int) -> bool:
        known = self.releases.get(who >> THREADS, [])
        after = bisect_right(known, (phase, 1 << 62))
        return after < len(known) and known[after][1] <= acquired

    # -- which accesses are ordered ---------------------------------------------------------------------------------

    def unordered(self, slot: AccessSlot, places: Array, access: Access) -> Array:
        who = slot.who[places]
        bad: Array = (who >= 0) & (who != access.who)
        if not bad.any():
            return bad
        at = np.flatnonzero(bad)
        before, now = who[at], access.who[at]
        then, time = slot.time[places[at]], access.time[at]
        apart = before ^ now
        ordered = then >> EPOCH < time >> EPOCH
        if self.grain is Grain.THREAD:
            ordered |= (apart >> self.lane_bits == 0) & (then < time)
        if self.apart:
            ordered |= apart >> self.lane_bits != 0
            ordered &= (before >> THREADS) // self.cluster == (now >> THREADS) // self.cluster
        else:
            ordered &= apart >> THREADS == 0
        if self.releases and slot.phase is not None and access.acquired is not None:
            for each in np.flatnonzero(~ordered):
                phase = int(slot.phase[places[at[each]]])
                ordered[each] = self._was_released(int(before[each]), phase, int(access.acquired[at[each]]))
        bad[at] = ~ordered
        return bad

    def clashing(self, one: Array, other: Array) -> Array:
        differ = one != other
        return np.asarray(differ & (one >> self.lane_bits == other >> self.lane_bits) if self.apart else differ)

    def update(self, history: History, places: Array, access: Access) -> Race | None:
        """Atomics. Those of block scope order nothing for other blocks."""
        race = self._first(places, access, ([] if history.written is None else [history.written]) + list(history.read.values()))
        narrow = np.asarray([op.attrs.get("scope") == "block" for op in self.ops], np.bool_)
        if race is None and narrow.any():
            for slot in history.updated.values():
                apart = self.unordered(slot, places, access) & (slot.who[places] >> THREADS != access.who >> THREADS)
                race = race or self._race(slot, places, apart & (narrow[slot.op[places]] | narrow[access.op]))
            if race is None and narrow[access.op]:
                race = self._clash(places, access, access.who >> THREADS)
        if race is None:
            self.note(history, history.updated, places, access)
        return race

    def note(self, history: History, slots: dict[int, AccessSlot], places: Array, access: Access) -> None:
        first, second = history.slot(slots, 0), history.slot(slots, 1)
        kept = self.unordered(first, places, access)
        first.note(places, access, np.flatnonzero(~kept) if kept.any() else None)
        others = np.flatnonzero(first.who[places] != access.who)
        if not others.size:
            return
        there, mine = places[others], access.who[others]
        own = first.who[there]
        replaced = ~self.unordered(second, there, access.chosen(others))
        held = second.who[there]
        for shift in self._nearness:
            nearer = (held >= 0) & (held >> shift == own >> shift) & (mine >> shift != own >> shift)
            second.note(places, access, others[replaced | nearer])
            held = second.who[there]
            replaced = np.zeros(replaced.shape, np.bool_)


class ClockOrder(Order):
    """Vector clocks."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self.clocks = clocks

    def by_warps(self, op: Op, warps: Array) -> Access:
        """Ordinary accesses of these warps, now."""
        own = self.clocks.own[warps]
        return Access(self.number(op), own, self.clocks.now[KNOWN, warps, own])

    def by_engine(self, op: Op, actor: int, access: int, known: Array) -> Access:
        """The accesses of number `access` of the copy engine or a matrix unit, started by someone who knows `known`."""
        return Access(self.number(op), np.asarray(actor), np.asarray(access), known=known)

    def unordered(self, slot: AccessSlot, places: Array, access: Access) -> Array:
        who, known = slot.who[places], access.known
        seen = known[KNOWN, who] if known is not None else self.clocks.now[KNOWN, self.clocks.warp_of[access.who], who]
        return np.asarray((who >= 0) & (slot.time[places] > seen))

    def unfenced(self, slot: AccessSlot | None, places: Array, known: Array) -> Array:
        """Which places hold an ordinary write that no fence has made visible to the copy engine and matrix units."""
        if slot is None:
            return np.zeros(places.shape, np.bool_)
        who = slot.who[places]
        return np.asarray(self.clocks.is_warp(who) & (slot.time[places] > known[FENCED, who]))

    def unknown(self, history: History, places: Array, access: Access, writes: bool) -> Array:
        """Which places someone else wrote, or, of an access that `writes`, read, with nothing that orders the two."""
        bad = np.zeros(places.shape, np.bool_)
        for slot in history.slots() if writes else [] if history.written is None else [history.written]:
            bad |= self.unordered(slot, places, access)
        return bad

    def note(self, history: History, slots: dict[int, AccessSlot], places: Array, access: Access) -> None:
        if access.who.ndim == 0:
            history.slot(slots, int(access.who)).note(places, access)
            return
        for actor in np.unique(access.who):
            pick = np.flatnonzero(access.who == actor)
            history.slot(slots, int(actor)).note(places, access, pick)


class CountOrder(Order):
    """Counters that blocks wait for: agents are blocks, each with a clock of what it knows of the others."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.now = np.eye(blocks, dtype=np.int64)
        self.told: dict[tuple[int, int], Array] = {}
        """What those knew who counted a counter up."""

    def release(self, counter: tuple[int, int], block: int) -> None:
        known = self.told.get(counter)
        self.told[counter] = self.now[block].copy() if known is None else np.maximum(known, self.now[block])
        self.now[block, block] += 1

    def acquire(self, counter: tuple[int, int], block: int) -> None:
        if counter in self.told:
            self.now[block] = np.maximum(self.now[block], self.told[counter])

    def by_blocks(self, op: Op, blocks: Array) -> Access:
        """Accesses of threads of these blocks, now."""
        return Access(self.number(op), blocks, self.now[blocks, blocks])

    def unordered(self, slot: AccessSlot, places: Array, access: Access) -> Array:
        who = slot.who[places]
        return np.asarray((who >= 0) & (who != access.who) & (slot.time[places] > self.now[access.who, who]))

    def note(self, history: History, slots: dict[int, AccessSlot], places: Array, access: Access) -> None:
        for block in np.unique(access.who):
            history.slot(slots, int(block)).note(places, access, np.flatnonzero(access.who == block))


def bits(values: Array) -> Array:
    """Numbers as integers, so that a NaN equals itself."""
    plain = np.ascontiguousarray(values)
    return plain.view(f"u{plain.itemsize}") if plain.itemsize in (1, 2, 4, 8) else plain
