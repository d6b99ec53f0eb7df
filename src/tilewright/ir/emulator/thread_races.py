"""Who touched what last, thread by thread: races of kernels whose threads a person wrote.

In: the reads, writes and atomics of shared and global memory, in the order the emulator does them, and the syncs between them.
Out: the accesses that race, each with the earlier access it races with.

Two accesses of one element race if one of them writes, not both are atomics, and nothing orders them. What orders: one thread's
own program; for threads of a warp a `warp_sync`, for those of a block a `barrier`, for all a `grid_barrier`; and, across the
whole grid, a fence followed by an atomic of the earlier side which an atomic of the later side comes after. That last kind is
told from too little rather than too much: a fence counts for its whole block, and an atomic tells of all that was released
before it. Writing the value that is there already changes nothing and is let pass.

Each element remembers its last write, and two reads and two atomics that no barrier has ordered. Two are enough: whoever comes
next differs from one of them. They are taken from different blocks, or else different warps, where there are such.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from tilewright.ir.nodes import Op

Array = np.ndarray
THREADS = 10
"""A thread of the launch is the number of its block, shifted by this, and its own in the block."""
LANES = 5
"""By how much it is shifted to give a warp of the launch."""
EPOCH = 32
"""A moment is the barriers a block has passed, shifted by this, and the syncs its warp has."""
RELEASES = frozenset({"release", "acq_rel"})
"""Orders of atomics that are a fence too."""


@dataclass(frozen=True, eq=False)
class Access:
    """The accesses of one op, on one axis each: who, when, in which phase of its block, and knowing which releases."""

    op: int
    who: Array
    moment: Array
    phase: Array
    acquired: Array

    def repeated(self, times: int) -> Access:
        return Access(self.op, *(np.repeat(a, times) for a in (self.who, self.moment, self.phase, self.acquired)))


class Slot:
    """One access of each of `size` elements; nobody is -1."""

    def __init__(self, size: int) -> None:
        self.who = np.full(size, -1, np.int64)
        self.moment = np.zeros(size, np.int64)
        self.phase = np.zeros(size, np.int32)
        self.op = np.zeros(size, np.int32)

    def note(self, places: Array, access: Access, chosen: Array | None = None) -> None:
        """Of several accesses of one place the last is kept, whole: fancy assignment goes in order."""
        pick: Array | slice = slice(None) if chosen is None else chosen
        there = places[pick]
        self.who[there] = access.who[pick]
        self.moment[there] = access.moment[pick]
        self.phase[there] = access.phase[pick]
        self.op[there] = access.op


class History:
    """The accesses of `size` elements that count; slots are made when first needed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.written: Slot | None = None
        self.read: tuple[Slot, Slot] | None = None
        self.updated: tuple[Slot, Slot] | None = None

    def drop(self, first: int, blocks: int) -> None:
        """Forget the accesses of these blocks."""
        for slot in (self.written, *(self.read or ()), *(self.updated or ())):
            if slot is not None:
                block = slot.who >> THREADS
                slot.who[(block >= first) & (block < first + blocks)] = -1

    def pair(self, name: str) -> tuple[Slot, Slot]:
        found: tuple[Slot, Slot] | None = getattr(self, name)
        if found is None:
            found = (Slot(self.size), Slot(self.size))
            setattr(self, name, found)
        return found


@dataclass(frozen=True)
class Race:
    """The access number `at` of an op races with an earlier one."""

    at: int
    who: int
    op: Op


@dataclass(eq=False)
class Order:
    """What the blocks of one launch know of one another. `apart`: what warps of a cluster do to each other is not looked at."""

    blocks: int
    apart: bool = False
    cluster: int = 1
    ops: list[Op] = field(default_factory=list)
    numbers: dict[Op, int] = field(default_factory=dict)
    stamp: int = 0
    """Counts atomics."""
    releases: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Of each block, in order: the accesses of phases before this were released at that stamp."""

    def __post_init__(self) -> None:
        self.phase = np.zeros(self.blocks, np.int32)
        """How often each block has fenced."""

    def number(self, op: Op) -> int:
        found = self.numbers.get(op)
        if found is None:
            found = self.numbers[op] = len(self.ops)
            self.ops.append(op)
        return found

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

    def unordered(self, slot: Slot | None, places: Array, access: Access) -> Array:
        """Which accesses are of another thread than the slot's, with nothing that orders the two."""
        if slot is None:
            return np.zeros(places.shape, np.bool_)
        who = slot.who[places]
        bad: Array = (who >= 0) & (who != access.who)
        if not bad.any():
            return bad
        at = np.flatnonzero(bad)
        before, now = who[at], access.who[at]
        then, moment = slot.moment[places[at]], access.moment[at]
        apart = before ^ now
        ordered = (then >> EPOCH < moment >> EPOCH) | ((apart >> LANES == 0) & (then < moment))
        if self.apart:
            ordered |= apart >> LANES != 0
            ordered &= _block(before) // self.cluster == _block(now) // self.cluster
        else:
            ordered &= apart >> THREADS == 0
        if self.releases and not ordered.all():
            phase = slot.phase[places[at]]
            for each in np.flatnonzero(~ordered):
                ordered[each] = self._was_released(int(before[each]), int(phase[each]), int(access.acquired[at[each]]))
        bad[at] = ~ordered
        return bad

    # -- accesses ---------------------------------------------------------------------------------------------------

    def read(self, history: History, places: Array, access: Access) -> Race | None:
        race = self._first(places, access, (history.written, *(history.updated or ())))
        if race is None:
            self._note_two(history.pair("read"), places, access)
        return race

    def write(self, history: History, places: Array, access: Access, current: Array, values: Array) -> Race | None:
        changed = bits(current) != bits(values)
        slots = (history.written, *(history.read or ()), *(history.updated or ()))
        race = self._first(places, access, slots, changed) or self._clash(places, access, values)
        if race is None:
            if history.written is None:
                history.written = Slot(history.size)
            history.written.note(places, access)
        return race

    def update(self, history: History, places: Array, access: Access) -> Race | None:
        """Atomics. Those of block scope order nothing for other blocks."""
        race = self._first(places, access, (history.written, *(history.read or ())))
        narrow = np.asarray([op.attrs.get("scope") == "block" for op in self.ops], np.bool_)
        if race is None and narrow.any():
            for slot in history.updated or ():
                apart = self.unordered(slot, places, access) & (_block(slot.who[places]) != _block(access.who))
                race = race or self._found(slot, places, apart & (narrow[slot.op[places]] | narrow[access.op]))
            if race is None and narrow[access.op]:
                race = self._clash(places, access, _block(access.who))
        if race is None:
            self._note_two(history.pair("updated"), places, access)
        return race

    def _first(
        self, places: Array, access: Access, slots: tuple[Slot | None, ...], counts: Array | None = None
    ) -> Race | None:
        for slot in slots:
            if slot is not None:
                bad = self.unordered(slot, places, access)
                race = self._found(slot, places, bad if counts is None else bad & counts)
                if race is not None:
                    return race
        return None

    def _found(self, slot: Slot, places: Array, bad: Array) -> Race | None:
        if not bad.any():
            return None
        at = int(np.argmax(bad))
        return Race(at, int(slot.who[places[at]]), self.ops[slot.op[places[at]]])

    def _clash(self, places: Array, access: Access, values: Array) -> Race | None:
        """Two threads that have different values for one place by one op."""
        order = np.argsort(places, kind="stable")
        there, who, what = places[order], access.who[order], bits(values)[order]
        bad = (there[1:] == there[:-1]) & (who[1:] != who[:-1]) & (what[1:] != what[:-1])
        if self.apart:
            bad &= _warp(who[1:]) == _warp(who[:-1])
        if not bad.any():
            return None
        at = int(np.argmax(bad))
        return Race(int(order[at + 1]), int(who[at]), self.ops[access.op])

    def _note_two(self, pair: tuple[Slot, Slot], places: Array, access: Access) -> None:
        first, second = pair
        kept = self.unordered(first, places, access)
        first.note(places, access, np.flatnonzero(~kept))
        others = np.flatnonzero(first.who[places] != access.who)
        if not others.size:
            return
        there, mine = places[others], access.who[others]
        own = first.who[there]
        free = ~self.unordered(second, there, _part(access, others))
        held = second.who[there]
        for group in (_same, _warp, _block):
            nearer = (held >= 0) & (group(held) == group(own)) & (group(mine) != group(own))
            chosen = others[free | nearer]
            second.note(places, access, chosen)
            held = second.who[there]
            free = np.zeros(free.shape, np.bool_)

def _same(who: Array) -> Array:
    return who


def _warp(who: Array) -> Array:
    return np.asarray(who >> LANES)


def _block(who: Array) -> Array:
    return np.asarray(who >> THREADS)


def _part(access: Access, chosen: Array) -> Access:
    return Access(access.op, *(a[chosen] for a in (access.who, access.moment, access.phase, access.acquired)))


def bits(values: Array) -> Array:
    """Numbers as integers, so that a NaN equals itself."""
    plain = np.ascontiguousarray(values)
    return plain.view(f"u{plain.itemsize}") if plain.itemsize in (1, 2, 4, 8) else plain
