"""Ops of explicit kernels: warps that vote, match and exchange under masks, atomic accesses, barriers that count, and bit tricks.

Where an op takes a mask, every lane that comes there must be named in its own mask and all lanes named must come there together
with the same one: on a GPU anything else waits for ever or gives anything, so here it is an error (TW050). Atomic accesses are
made one after another; they race with ordinary ones only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from tilewright.ir.emulator.frames import LANE, SLOT, THREAD, Frame
from tilewright.ir.emulator.machine import BarrierReached, Machine, Results, Steps
from tilewright.ir.emulator.memory.atomics import update
from tilewright.ir.emulator.memory.memory import Memory, fault
from tilewright.ir.emulator.warps import bits
from tilewright.ir.emulator.warps.thread import ThreadMachine
from tilewright.ir.nodes import Op
from tilewright.ir.printing import pieces, written
from tilewright.ir.types import Vec, dtype_of

Array = np.ndarray
_TICK = 32
"""Cycles a reading of the clock is said to take."""
_RELATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less, "le": np.less_equal, "eq": np.equal, "ge": np.greater_equal, "gt": np.greater,
}  # fmt: skip


def _as_bits(values: Array) -> Array:
    """Numbers as integers that are equal where all bits are."""
    plain: Array = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
    return plain


class SimtOps:
    """The ops of one machine."""

    def __init__(self, machine: ThreadMachine) -> None:
        self.machine = machine
        self.warp_size = machine.warp_size
        self.ticks = 0
        self.votes: dict[tuple[int, int], tuple[int, int]] = {}
        """Of each block and barrier of it that counts: how many threads have come, and how many with a true bool."""
        machine.simple |= {
            "warp_sync": self._warp_sync, "shuffle": self._shuffle, "vote": self._vote, "match": self._match, "redux": self._redux,
            "active_mask": self._active_mask, "lane_id": self._lane_id, "warp_id": self._warp_id, "lane_mask": self._lane_mask,
            "clock": self._clock, "global_timer": self._timer, "nanosleep": self._nothing, "atomic": self._atomic,
            "atomic_load": self._atomic_load, "atomic_store": self._atomic_store, "print": self._print, "assert": self._assert,
            **dict.fromkeys(bits.RULES, self._bits),
        }  # fmt: skip
        machine.control |= {"barrier_reduce": self._barrier_reduce}

    # -- masks ----------------------------------------------------------------------------------------------------

    def _bits_of(self, op: Op, masks: Array) -> Array:
        """The bits of masks along a new last axis, one for each lane of a warp."""
        word = masks.dtype.type
        self._require_room(op, masks.dtype)
        return np.asarray(masks[..., None] >> np.arange(self.warp_size, dtype=masks.dtype) & word(1), np.bool_)

    def _packed(self, op: Op, members: Array) -> Array:
        """Bools along the last axis as the bits of the word that is the op's first result."""
        dtype = dtype_of(op.results[0].type).numpy
        self._require_room(op, dtype)
        bits = dtype.type(1) << np.arange(self.warp_size, dtype=dtype)
        return np.asarray(np.bitwise_or.reduce(np.where(members, bits, dtype.type(0)), axis=-1))

    def _require_room(self, op: Op, dtype: np.dtype) -> None:
        if 8 * dtype.itemsize < self.warp_size:
            raise fault(f"{op.opcode} with a mask of {8 * dtype.itemsize} bits in warps of {self.warp_size} lanes", op.span)

    # -- who takes part -------------------------------------------------------------------------------------------

    def _members(self, op: Op, frame: Frame, operands: int) -> Array:
        """For each warp and lane: which lanes of the warp take part with it; the middle axis has length 1 where that is the same
        for all. An op has a mask after its `operands`."""
        active = self.machine.by_warp(frame.active)
        if len(op.operands) == operands:
            return active[:, None, :]
        masks = self.machine.by_warp(frame.full(op.operands[operands]))
        members = self._bits_of(op, masks)
        own = members[:, np.arange(self.warp_size), np.arange(self.warp_size)]
        self._refuse(op, frame, active & ~own, masks, "does not name the thread's own lane", members)
        away = members & ~active[:, None, :]
        self._refuse(op, frame, active & away.any(axis=2), masks, "names lanes that are not here", away)
        other = members & (masks[:, None, :] != masks[:, :, None])
        self._refuse(op, frame, active & other.any(axis=2), masks, "differs from the mask of lanes it names", other)
        return members

    def _refuse(self, op: Op, frame: Frame, bad: Array, masks: Array, why: str, which: Array) -> None:
        if not bad.any():
            return

        def text(position: tuple[int, ...]) -> str:
            warp, lane = divmod(position[0], self.warp_size)
            lanes = np.flatnonzero(which[warp, lane])
            named = f" ({', '.join(map(str, lanes))})" if "lanes" in why else f" {lane}"
            return f"{op.opcode}: the mask {int(masks[warp, lane]):#0{2 + 2 * masks.itemsize}x} {why}{named}"

        raise self.machine.fail_at(
            op, frame, bad.reshape(-1), text,
            "every lane named in the mask must come here with the same mask: compute it by a vote before the ways part",
        )  # fmt: skip

    def _warp_sync(self, op: Op, frame: Frame) -> Results:
        self._members(op, frame, 0)
        self.machine.races.sync_warps(frame)
        return ()

    # -- exchange -------------------------------------------------------------------------------------------------

    def _shuffle(self, op: Op, frame: Frame) -> Results:
        members = self._members(op, frame, 2)
        width = op.attrs.get("width", self.warp_size)
        assert isinstance(width, int)
        if width > self.warp_size:
            raise fault(f"shuffle of {width} lanes in warps of {self.warp_size}", op.span)
        value = self.machine.by_warp(frame.full(op.operands[0]))
        operand = self.machine.by_warp(frame.full(op.operands[1]).astype(np.int64)) & (self.warp_size - 1)
        lane = np.arange(self.warp_size)[None, :]
        lowest = lane & ~(width - 1)
        highest = lowest + width - 1
        mode = op.attrs["mode"]
        if mode == "idx":
            source = lowest | (operand & (width - 1))
        elif mode == "up":
            source = np.where(lane - operand < lowest, lane, lane - operand)
        elif mode == "down":
            source = np.where(lane + operand > highest, lane, lane + operand)
        else:
            source = np.where(lane ^ operand > highest, lane, lane ^ operand)
        source = np.broadcast_to(source, value.shape)
        takes_part = (
            np.take_along_axis(members[:, 0], source, axis=1)
            if members.shape[1] == 1
            else np.take_along_axis(members, source[:, :, None], axis=2)[:, :, 0]
        )
        bad = self.machine.by_warp(frame.active) & ~takes_part
        if bad.any():
            wrong = source.reshape(-1)
            why = "not active" if len(op.operands) == 2 else "not in the mask"
            raise self.machine.fail_at(
                op, frame, bad.reshape(-1), lambda p: f"shuffle reads lane {int(wrong[p])} of its warp, which is {why}"
            )
        return (np.take_along_axis(value, source, axis=1).reshape(-1),)

    def _vote(self, op: Op, frame: Frame) -> Results:
        members = self._members(op, frame, 1)
        votes = self.machine.by_warp(frame.full(op.operands[0]))[:, None, :]
        mode = op.attrs["mode"]
        if mode == "ballot":
            return (self._each(self._packed(op, members & votes)),)
        any_ = (members & votes).any(axis=2)
        all_ = (~members | votes).all(axis=2)
        return (self._each(any_ if mode == "any" else all_ if mode == "all" else all_ | ~any_),)

    def _match(self, op: Op, frame: Frame) -> Results:
        members = self._members(op, frame, 1)
        values = self.machine.by_warp(_as_bits(frame.full(op.operands[0])))
        same = (values[:, :, None] == values[:, None, :]) & members
        if op.attrs["mode"] == "any":
            return (self._packed(op, same).reshape(-1),)
        alike = (same == members).all(axis=2)
        return self._packed(op, members & alike[:, :, None]).reshape(-1), alike.reshape(-1)

    def _each(self, by_warp: Array) -> Array:
        """One value for each lane, of values by warp that may be the same for all its lanes."""
        return np.broadcast_to(by_warp, (by_warp.shape[0], self.warp_size)).reshape(-1)

    def _redux(self, op: Op, frame: Frame) -> Results:
        members = self._members(op, frame, 1)
        kind, dtype = str(op.attrs["kind"]), dtype_of(op.operands[0].type)
        values = self.machine.by_warp(frame.full(op.operands[0]))[:, None, :]
        rule, neutral = {
            "add": (np.add, 0), "min": (np.minimum, dtype.max_value), "max": (np.maximum, dtype.min_value),
            "and": (np.bitwise_and, -1), "or": (np.bitwise_or, 0), "xor": (np.bitwise_xor, 0),
        }[kind]  # fmt: skip
        empty = np.asarray(int(neutral) & 0xFFFFFFFF, np.uint32).view(dtype.numpy)
        with np.errstate(over="ignore"):
            result = rule.reduce(np.where(members, values, empty), axis=2, dtype=values.dtype)
        return (self._each(np.asarray(result)),)

    # -- who one is -----------------------------------------------------------------------------------------------

    def _active_mask(self, op: Op, frame: Frame) -> Results:
        return (np.repeat(self._packed(op, self.machine.by_warp(frame.active)), self.warp_size),)

    def _lane_id(self, op: Op, frame: Frame) -> Results:
        return ((frame.get(THREAD) % self.warp_size).astype(np.int32),)

    def _warp_id(self, op: Op, frame: Frame) -> Results:
        return ((frame.get(THREAD) // self.warp_size).astype(np.int32),)

    def _lane_mask(self, op: Op, frame: Frame) -> Results:
        lane = frame.get(THREAD)[:, None] % self.warp_size
        return (self._packed(op, _RELATIONS[str(op.attrs["relation"])](np.arange(self.warp_size)[None, :], lane)),)

    def _clock(self, op: Op, frame: Frame) -> Results:
        self.ticks += _TICK
        narrow = op.attrs.get("bits") == 32
        return (np.full(1, self.ticks & 0xFFFFFFFF if narrow else self.ticks, np.uint32 if narrow else np.uint64),)

    def _timer(self, op: Op, frame: Frame) -> Results:
        return (np.full(1, time.time_ns(), np.uint64),)

    def _nothing(self, op: Op, frame: Frame) -> Results:
        return ()

    def _bits(self, op: Op, frame: Frame) -> Results:
        operands = [frame.get(v) for v in op.operands]
        with np.errstate(all="ignore"):
            return (np.asarray(bits.RULES[op.opcode](op, *operands)).astype(dtype_of(op.result.type).numpy, copy=False),)

    # -- telling the host -----------------------------------------------------------------------------------------

    def _print(self, op: Op, frame: Frame) -> Results:
        parts = pieces(str(op.attrs["text"]), [dtype_of(v.type) for v in op.operands])
        values = [frame.full(v) for v in op.operands]
        lanes = np.flatnonzero(frame.active)
        for lane in lanes[np.argsort(frame.full(LANE)[lanes], kind="stable")]:
            sys.stdout.write(written(parts, [v[lane].item() for v in values]))
        return ()

    def _assert(self, op: Op, frame: Frame) -> Results:
        bad = frame.active & ~frame.full(op.operands[0])
        if bad.any():
            raise self.machine.fail_at(op, frame, bad, lambda _: f"assertion failed: {op.attrs['text']}")
        return ()

    # -- barriers that count --------------------------------------------------------------------------------------

    def _barrier_reduce(self, op: Op, frame: Frame) -> Steps:
        machine = self.machine
        machine.require_whole_warps(op, frame)
        slots = frame.full(SLOT)
        votes = frame.full(op.operands[0])
        rounds = machine.barriers[slots]
        for slot in np.unique(slots[frame.active]):
            here = frame.active & (slots == slot)
            key = int(slot), int(rounds[np.argmax(here)])
            came, held = self.votes.get(key, (0, 0))
            self.votes[key] = came + int(here.sum()), held + int((votes & here).sum())
        yield BarrierReached(op.span)
        counts = np.zeros(frame.lanes, np.int64)
        for lane in np.flatnonzero(frame.active):
            came, held = self.votes[int(slots[lane]), int(rounds[lane])]
            if came != machine.kernel.threads:
                text = f"barrier_reduce of {machine.kernel.threads} threads, to which {came} came: the others wait at another barrier"
                raise machine.fail_at(op, frame, frame.active & (slots == slots[lane]), lambda _, text=text: text)  # type: ignore[misc]
            counts[lane] = held
        kind = op.attrs["kind"]
        if kind == "count":
            return (counts.astype(np.int32),)
        return (counts == machine.kernel.threads if kind == "and" else counts > 0,)

    # -- atomic accesses ------------------------------------------------------------------------------------------

    def _vector(self, op: Op, frame: Frame, width: int) -> tuple[Memory, Array, Array | None]:
        """The memory, the places of the neighbours each lane accesses, and which lanes do."""
        memory, places, active = self.machine.places(op, frame, 0, None)
        if width > 1:
            places = self.machine.vector_places(op, frame, memory, places, active, width)
        return memory, np.broadcast_to(places, (frame.lanes, *places.shape[1:])), active

    def _atomic(self, op: Op, frame: Frame) -> Results:
        type_ = op.result.type
        if not isinstance(type_, Vec):
            return Machine._atomic(self.machine, op, frame)
        memory, places, active = self._vector(op, frame, type_.width)
        self._prepare(op, frame, memory, places, active, reads=True)
        lanes = np.flatnonzero(frame.active)
        operands = [frame.full(v) for v in op.operands[1 + len(memory.shape) :]]
        old = np.zeros((frame.lanes, type_.width), memory.dtype.numpy)
        if op.attrs["kind"] == "add":
            chosen = places[lanes].reshape(-1)
            old[lanes] = update("add", memory, chosen, [operands[0][lanes].reshape(-1)]).reshape(-1, type_.width)
        else:
            for lane in lanes:
                old[lane] = memory.read(places[lane])
                if op.attrs["kind"] == "exchange" or np.array_equal(_as_bits(old[lane]), _as_bits(operands[0][lane])):
                    memory.write(places[lane], operands[-1][lane])
        self.machine.changes += 1
        return (old,)

    def _prepare(self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None, reads: bool) -> None:
        if not memory.flat.flags.writeable and op.opcode != "atomic_load":
            raise fault(f"{op.opcode} to {memory.label}, which is read-only", op.span)
        if reads:
            self.machine.check_written(op, frame, memory, places, active)
        self.machine.on_update(op, frame, memory, places, active)

    def _atomic_load(self, op: Op, frame: Frame) -> Results:
        type_ = op.result.type
        memory, places, active = self._vector(op, frame, type_.width if isinstance(type_, Vec) else 1)
        if memory.flat.size == 0:
            return (np.zeros(places.shape, memory.dtype.numpy),)
        self._prepare(op, frame, memory, places, active, reads=True)
        return (memory.read(places),)

    def _atomic_store(self, op: Op, frame: Frame) -> Results:
        type_ = op.operands[-1].type
        memory, places, active = self._vector(op, frame, type_.width if isinstance(type_, Vec) else 1)
        self._prepare(op, frame, memory, places, active, reads=False)
        lanes = frame.active
        values = frame.full(op.operands[-1])[lanes]
        if not np.array_equal(_as_bits(memory.read(places[lanes])), _as_bits(values)):
            self.machine.changes += 1
        memory.write(places[lanes], values)
        return ()
