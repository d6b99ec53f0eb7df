"""Matrix units: `wgmma` of warp groups on shared memory (`wgmma_registers`: one operand in registers), `mma` of warps on registers, and the loads and stores that feed them.

Products are exact; those of one instruction and the accumulator are added in f64 and rounded once to the accumulator (integers
wrap). Operands of f32 are cut to tf32. A `wgmma` only starts: its results are marks, NaN to all other ops, that stand for the
accumulator until a `wgmma_wait` that covers it gives the numbers; the operands are read from shared memory no earlier than that.
All four warps of the group must start the same ones in the same order with all their threads. A warp group's accesses count as
finished for each of its warps that has waited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from tilewright.base.dtypes import DType, f32, f64
from tilewright.ir.emulator.frames import LANE, SLOT, THREAD, Frame
from tilewright.ir.emulator.machine import Results, Steps, Wait
from tilewright.ir.emulator.memory.memory import Memory, fault
from tilewright.ir.emulator.warps.barriers import whole
from tilewright.ir.emulator.warps.copies import swizzled
from tilewright.ir.emulator.warps.thread import ThreadMachine
from tilewright.ir.layouts import INSTRUCTIONS, MMA_LANES, SIDE, WGMMA_WARPS
from tilewright.ir.nodes import Op
from tilewright.ir.numerics import fma
from tilewright.ir.ops_matrix import ROW_BYTES, accumulator_dtype, mma_shape
from tilewright.ir.types import dtype_of

Array = np.ndarray
_THREADS = WGMMA_WARPS * MMA_LANES
_MARK, _MARK_BITS = 0x7FC00000, 0xFFC00000
"""A mark is a NaN: the number of its `wgmma` above 8 bits for the accumulator's."""
_NUMBERS = 1 << 14
_KEPT = 64
"""Finished groups whose accumulators can still be asked for."""
_MATRIX_ROW = 16
"""Bytes of one row of an 8x8 matrix of `ldmatrix`."""


# -- numbers ----------------------------------------------------------------------------------------------------------


def exact(values: Array, dtype: DType) -> Array:
    """Operands of a matrix unit as f64; f32 is cut to tf32."""
    if dtype is f32:
        values = (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    wide = values.astype(np.float32) if dtype.is_small_float else values
    return np.asarray(wide.astype(np.float64))


def accumulate(product: Array, accumulator: Array) -> Array:
    """f64 sums of products added to an accumulator of f32 or i32."""
    with np.errstate(all="ignore"):
        if accumulator.dtype == np.int32:
            return np.asarray((product.astype(np.int64) + accumulator).astype(np.int32))
        return np.asarray((product + accumulator).astype(np.float32))


@lru_cache
def accumulator_places(columns: int) -> tuple[Array, Array]:
    """Row and column of accumulator r of thread t of a warp group, as arrays [t, r]."""
    t, r = np.arange(_THREADS)[:, None], np.arange(columns // 2)[None, :]
    return 16 * (t // MMA_LANES) + 8 * (r // 2 % 2) + t % MMA_LANES // 4, 8 * (r // 4) + 2 * (t % 4) + r % 2


@dataclass(frozen=True)
class Fragments:
    """Which element of an `mma`'s operand each lane's elements are, as arrays [lane, element]."""

    a: tuple[Array, Array]
    b: tuple[Array, Array]
    c: tuple[Array, Array]


@lru_cache
def fragments(dtype: DType, m: int, a_regs: int, b_regs: int, c_regs: int) -> Fragments:
    per = 1 if dtype is f64 else 4 // dtype.itemsize
    lane = np.arange(MMA_LANES)[:, None]
    group, inner = lane // 4, lane % 4

    def operand(registers: int, rows: int) -> tuple[Array, Array]:
        i = np.arange(registers * per)[None, :]
        register = i // per
        return group + 8 * (register % rows), inner * per + i % per + 4 * per * (register // rows)

    c = np.arange(c_regs)[None, :]
    # Along m there are two rows of registers where m is 16; b has one, and is kept as n x k.
    return Fragments(operand(a_regs, m // 8), operand(b_regs, 1), (group + 8 * (c // 2), 2 * inner + c % 2))


def _in_words(words: Array, dtype: DType) -> Array:
    """The 64 x k tile whose elements a warp group's threads hold in four words each."""
    per = 4 // dtype.itemsize
    t, e = np.arange(_THREADS)[:, None], np.arange(4 * per)[None, :]
    word = e // per
    rows = 16 * (t // MMA_LANES) + 8 * (word % 2) + t % MMA_LANES // 4
    columns = 4 * per * (word // 2) + per * (t % 4) + e % per
    tile = np.empty((64, 8 * per), dtype.numpy)
    tile[rows, columns] = np.ascontiguousarray(words).view(dtype.numpy)
    return tile


# -- wgmma ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Started:
    """One `wgmma` of a warp group: what its warps gave, and the accumulators once it is finished."""

    op: Op
    unit: int
    number: int
    slot: int
    offsets: tuple[int, ...]
    accumulators: Array
    """By thread and register, as u32."""
    words: Array
    """The operand that is in registers, alike."""
    issued: Array = field(default_factory=lambda: np.zeros(WGMMA_WARPS, np.bool_))
    known: Array | None = None
    """What all its warps knew when they started it."""
    results: Array | None = None


@dataclass(eq=False)
class Unit:
    """The matrix unit of one warp group."""

    number: int
    started: dict[int, Started] = field(default_factory=dict)
    issued: Array = field(default_factory=lambda: np.zeros(WGMMA_WARPS, np.int64))
    finished: int = 0

    def find(self, number: int) -> Started | None:
        """The `wgmma` of a mark."""
        latest = max(self.started, default=-1)
        found = latest - (latest - number) % _NUMBERS
        return self.started.get(found)

    def all_issued(self, limit: int) -> bool:
        return all(self.started[n].issued.all() for n in range(self.finished, limit))


class Matrix:
    """The matrix units of one machine's blocks, and their ops."""

    def __init__(self, machine: ThreadMachine) -> None:
        self.machine = machine
        self.units: dict[int, Unit] = {}
        machine.simple |= {
            "wgmma": self._wgmma, "wgmma_registers": self._wgmma, "mma": self._mma, "wave_mma": self._wave_mma, "ldmatrix": self._ldmatrix, "stmatrix": self._stmatrix,
        }  # fmt: skip
        machine.control["wgmma_wait"] = self._wgmma_wait

    def _require_warps(self, op: Op, frame: Frame) -> None:
        """The instructions are of whole warps of NVIDIA's size."""
        if self.machine.warp_size != MMA_LANES:
            raise fault(f"{op.opcode} is an instruction of warps of {MMA_LANES} lanes, and here they have {self.machine.warp_size}", op.span)
        self.machine.require_whole_warps(op, frame, full=True)

    def _warps(self, op: Op, frame: Frame) -> list[tuple[Unit, int, slice]]:
        """The active warps: their unit, number in the warp group, and lanes of the frame."""
        self._require_warps(op, frame)
        found: list[tuple[Unit, int, slice]] = []
        for first in np.flatnonzero(frame.active[::MMA_LANES]) * MMA_LANES:
            warp = int(frame.full(THREAD)[first]) // MMA_LANES
            if (warp // WGMMA_WARPS + 1) * _THREADS > self.machine.kernel.threads:
                raise fault(
                    f"{op.opcode} in warp {warp} of {self.machine.warps}: its warp group is not complete, "
                    f"in {self.machine.describe(frame, int(first))}", op.span,
                )  # fmt: skip
            number = int(frame.full(SLOT)[first]) * -(-self.machine.warps // WGMMA_WARPS) + warp // WGMMA_WARPS
            unit = self.units.setdefault(number, Unit(number))
            found.append((unit, warp % WGMMA_WARPS, slice(int(first), int(first) + MMA_LANES)))
        return found

    def _wgmma(self, op: Op, frame: Frame) -> Results:
        warps = self._warps(op, frame)
        count = whole(op.attrs, "words") if op.opcode == "wgmma_registers" else 0
        places = [frame.full(op.operands[i]).astype(np.int64) for i in ((count + 1,) if count else (1, 3))]
        if op.attrs.get("fresh"):
            given = np.zeros((frame.lanes, len(op.results)), np.uint32)
        else:
            given = self._registers(op, frame, count + 2 if count else 4)
        words = np.stack([frame.full(v) for v in op.operands[:count]], axis=1) if count else np.zeros((frame.lanes, 0), np.uint32)
        marks = np.array(given)
        for unit, warp, lanes in warps:
            offsets = tuple(int(place[lanes][0]) for place in places)
            if any((place[lanes] != offset).any() for place, offset in zip(places, offsets, strict=True)):
                raise fault(f"{op.opcode} with offsets that differ between threads of a warp", op.span)
            number = int(unit.issued[warp])
            unit.issued[warp] += 1
            started = unit.started.get(number)
            if started is None:
                slot = int(frame.full(SLOT)[lanes][0])
                started = Started(
                    op, unit.number, number, slot, offsets, np.zeros((_THREADS, given.shape[1]), np.uint32),
                    np.zeros((_THREADS, count), np.uint32),
                )
                unit.started[number] = started
            elif started.op is not op or started.offsets != offsets:
                raise fault(
                    f"the warps of a warp group start different wgmma: at {op.span.place()} with offsets {list(offsets)} and at "
                    f"{started.op.span.place()} with {list(started.offsets)}", op.span,
                )  # fmt: skip
            started.issued[warp] = True
            started.accumulators[warp * MMA_LANES : (warp + 1) * MMA_LANES] = given[lanes]
            started.words[warp * MMA_LANES : (warp + 1) * MMA_LANES] = words[lanes]
            if self.machine.clocks is not None:
                known = self.machine.clocks.now[:, self.machine.warp_of(frame.full(LANE)[lanes][0])]
                started.known = known.copy() if started.known is None else np.minimum(started.known, known)
            marks[lanes] = _MARK | (number % _NUMBERS) << 8 | np.arange(given.shape[1], dtype=np.uint32)
        return self._as_values(op, marks)

    @staticmethod
    def _registers(op: Op, frame: Frame, skip: int) -> Array:
        """Accumulators by lane and register, as u32."""
        values = [frame.full(v) for v in op.operands[skip:]]
        return np.ascontiguousarray(np.stack(values, axis=1)).view(np.uint32)

    @staticmethod
    def _as_values(op: Op, registers: Array) -> Results:
        dtype = dtype_of(op.results[0].type).numpy
        return tuple(np.ascontiguousarray(registers[:, r]).view(dtype) for r in range(registers.shape[1]))

    def _wgmma_wait(self, op: Op, frame: Frame) -> Steps:
        warps = self._warps(op, frame)
        limits = [(unit, int(unit.issued[warp]) - whole(op.attrs, "pending")) for unit, warp, _ in warps]

        def missing() -> list[int]:
            return [unit.number for unit, limit in limits if not unit.all_issued(limit)]

        if missing():
            yield Wait(
                op.span, lambda: not missing(), lambda: "for the other warps of its warp group to start the same wgmma"
            )
        for unit, limit in limits:
            while unit.finished < limit:
                self._finish(unit)
        registers = self._registers(op, frame, 0)
        for (unit, warp, lanes), (_, limit) in zip(warps, limits, strict=True):
            registers[lanes] = self._resolved(op, unit, registers[lanes], slice(warp * MMA_LANES, (warp + 1) * MMA_LANES), limit)
            clocks = self.machine.clocks
            if clocks is not None:
                clocks.learn(self.machine.warp_of(frame.full(LANE)[lanes][0]), clocks.unit(unit.number), limit)
        return self._as_values(op, registers)

    def _resolved(self, op: Op, unit: Unit, registers: Array, threads: slice, limit: int) -> Array:
        """Registers of some threads of a warp group, with the marks of groups below `limit` replaced by numbers."""
        result = np.array(registers)
        heads = registers[0]
        marked = ((heads & np.uint32(_MARK_BITS)) == _MARK) & (registers == heads).all(axis=0)
        for number in np.unique(heads[marked] >> np.uint32(8) & np.uint32(_NUMBERS - 1)):
            started = unit.find(int(number))
            if started is None or started.number >= limit or started.results is None:
                continue
            which = np.flatnonzero(marked & ((heads >> np.uint32(8) & np.uint32(_NUMBERS - 1)) == number))
            result[:, which] = started.results[threads][:, heads[which] & np.uint32(0xFF)]
        return result

    def _finish(self, unit: Unit) -> None:
        """Carry out the oldest unfinished `wgmma`."""
        started = unit.started[unit.finished]
        op = started.op
        count = started.words.shape[1]
        a = self.machine.memories[op.operands[0]] if not count else None
        b = self.machine.memories[op.operands[count or 2]]
        dtype = dtype_of(op.results[0].type).numpy
        registers = np.array(started.accumulators)
        for warp in range(WGMMA_WARPS):
            threads = slice(warp * MMA_LANES, (warp + 1) * MMA_LANES)
            registers[threads] = self._resolved(op, unit, registers[threads], threads, started.number)
        n = whole(op.attrs, "n")
        rows, columns = accumulator_places(n)
        steps = op.attrs["steps"]
        assert isinstance(steps, tuple)
        for step in steps:
            assert isinstance(step, tuple)
            add_a, add_b, first = (int(x) for x in step if isinstance(x, int))
            left = _in_words(started.words[:, add_a : add_a + 4], b.dtype) if a is None else self._tile(
                started, a, "a", started.offsets[0] + add_a, 64
            )
            right = self._tile(started, b, "b", started.offsets[-1] + add_b, n)
            part = registers[:, first : first + n // 2]
            tile = np.empty((64, n), dtype)
            tile[rows, columns] = np.ascontiguousarray(part).view(dtype)
            with np.errstate(all="ignore"):
                tile = accumulate(exact(left, b.dtype) @ exact(right, b.dtype).T, tile)
            part[:] = np.ascontiguousarray(tile[rows, columns]).view(np.uint32)
        started.results = registers
        unit.finished += 1
        unit.started.pop(unit.finished - _KEPT, None)

    def _tile(self, started: Started, memory: Memory, which: str, offset: int, extent: int) -> Array:
        """A tile of `extent` rows along m or n and k columns, read by the matrix unit."""
        op = started.op
        elements = tile_elements(op.attrs, which, offset, extent, memory.dtype.itemsize)
        if int(elements.min()) < 0 or int(elements.max()) >= memory.size:
            raise fault(
                f"wgmma reads {memory.label} up to element {int(elements.max())} from {offset} on, but it has {memory.size}",
                op.span,
            )
        places = started.slot * memory.size + elements
        clocks = self.machine.clocks
        actor = clocks.unit(started.unit) if clocks is not None else 0
        self.machine.races.engine_reads(op, memory, places.reshape(-1), started.known, actor, started.number + 1)
        return memory.read(places)

    # -- one warp -----------------------------------------------------------------------------------------------------

    def _mma(self, op: Op, frame: Frame) -> Results:
        self._require_warps(op, frame)
        dtype = op.attrs["dtype"]
        assert isinstance(dtype, DType)
        (m, n, k), a_regs, b_regs, c_regs = mma_shape(op.attrs)
        where = fragments(dtype, m, a_regs, b_regs, c_regs)
        warps = frame.lanes // MMA_LANES
        values = [frame.full(v).reshape(warps, MMA_LANES) for v in op.operands]

        def whole_matrix(
            places: tuple[Array, Array], registers: list[Array], shape: tuple[int, int], held: np.dtype
        ) -> Array:
            packed = np.ascontiguousarray(np.stack(registers, axis=2))
            if packed.dtype != held:
                packed = packed.view(held)
            matrix = np.zeros((warps, *shape), held)
            matrix[:, places[0], places[1]] = packed.reshape(warps, MMA_LANES, -1)
            return matrix

        a = whole_matrix(where.a, values[:a_regs], (m, k), dtype.numpy)
        b = whole_matrix(where.b, values[a_regs : a_regs + b_regs], (n, k), dtype.numpy)
        c = whole_matrix(where.c, values[a_regs + b_regs :], (m, n), accumulator_dtype(dtype).numpy)
        with np.errstate(all="ignore"):
            if dtype is f64:
                for step in range(k):
                    c = fma(a[:, :, step, None], b[:, None, :, step], c)
            else:
                c = accumulate(exact(a, dtype) @ exact(b, dtype).transpose(0, 2, 1), c)
        result = c[:, where.c[0], where.c[1]].reshape(frame.lanes, -1)
        return tuple(result[:, r] for r in range(result.shape[1]))

    def _wave_mma(self, op: Op, frame: Frame) -> Results:
        found = INSTRUCTIONS[str(op.attrs["instruction"])]
        lanes, pieces = found.lanes, found.pieces
        if self.machine.warp_size != lanes:
            raise fault(f"{found.name} is for waves of {lanes} lanes, not of {self.machine.warp_size}", op.span)
        self.machine.require_whole_warps(op, frame, full=True)
        waves = frame.lanes // lanes
        values = [frame.full(v).reshape(waves, lanes, -1) for v in op.operands]
        lane, register = np.arange(lanes), np.arange(found.sums)
        k = np.arange(found.width) + (0 if found.repeated else found.width * (lane[:, None] // SIDE))
        sides = []
        for held in (values[:pieces], values[pieces : 2 * pieces]):
            elements = np.concatenate(held, axis=2)
            low, high = (np.ascontiguousarray(elements[:, half]).view(np.uint8) for half in (slice(0, SIDE), slice(SIDE, None)))
            if found.repeated and not np.array_equal(low, high):
                raise fault(f"{found.name} is given other operands in lanes 16 to 31 than in lanes 0 to 15", op.span)
            matrix = np.zeros((waves, SIDE, found.k), elements.dtype)
            matrix[:, (lane % SIDE)[:, None], np.broadcast_to(k, (lanes, found.width))] = elements
            sides.append(exact(matrix, found.dtype))
        rows = np.asarray([[found.row(int(one), int(r)) for r in register] for one in lane])
        columns = np.broadcast_to((lane % SIDE)[:, None], rows.shape)
        sums = np.zeros((waves, SIDE, SIDE), found.total.numpy)
        sums[:, rows, columns] = values[-1]
        with np.errstate(all="ignore"):
            sums = accumulate(sides[0] @ sides[1].transpose(0, 2, 1), sums)
        return (sums[:, rows, columns].reshape(frame.lanes, -1),)

    def _rows(self, op: Op, frame: Frame, count: int) -> tuple[Memory, Array, Array]:
        """Of the lanes that give the place of a matrix row: the memory, the elements' places, and which lanes they are."""
        self._require_warps(op, frame)
        memory = self.machine.memories[op.operands[0]]
        width = _MATRIX_ROW // memory.dtype.itemsize
        offset = frame.full(op.operands[1]).astype(np.int64)
        active = frame.active & (np.arange(frame.lanes) % MMA_LANES < 8 * count)
        bad = active & ((offset < 0) | (offset + width > memory.size) | (offset % width != 0))
        if bad.any():
            raise self.machine.fail_at(
                op, frame, bad,
                lambda p: f"{op.opcode} of a row at element {int(offset[p[0]])} of {memory.label}, of {memory.size}, "
                f"is out of bounds or not at a multiple of {_MATRIX_ROW} bytes",
            )  # fmt: skip
        first = np.where(active, frame.full(SLOT) * memory.size + offset, 0)
        return memory, first[:, None] + np.arange(width), active

    def _ldmatrix(self, op: Op, frame: Frame) -> Results:
        count = whole(op.attrs, "count")
        memory, places, active = self._rows(op, frame, count)
        self.machine.check_written(op, frame, memory, places, active[:, None])
        self.machine.on_read(op, frame, memory, places, active[:, None])
        found = np.ascontiguousarray(memory.read(places)).view(np.uint16).reshape(-1, 4, 8, 8)[:, :count]
        if op.attrs.get("trans"):
            found = found.transpose(0, 1, 3, 2)
        pairs = np.ascontiguousarray(found).view(np.uint32).reshape(-1, count, MMA_LANES)
        return tuple(np.ascontiguousarray(pairs[:, matrix]).reshape(-1) for matrix in range(count))

    def _stmatrix(self, op: Op, frame: Frame) -> Results:
        count = len(op.operands) - 2
        memory, places, active = self._rows(op, frame, count)
        pairs = np.zeros((frame.lanes // MMA_LANES, 4, MMA_LANES), np.uint32)
        for matrix, value in enumerate(op.operands[2:]):
            pairs[:, matrix] = frame.full(value).reshape(-1, MMA_LANES)
        matrices = pairs.view(np.uint16).reshape(-1, 4, 8, 8)
        if op.attrs.get("trans"):
            matrices = np.ascontiguousarray(matrices.transpose(0, 1, 3, 2))
        values = matrices.reshape(frame.lanes, 8).view(memory.flat.dtype)
        self.machine.on_write(op, frame, memory, places, values, active[:, None])
        memory.write(places[active], values[active])
        self.machine.changes += 1
        return ()


def tile_elements(attrs: Mapping[str, object], which: str, offset: int, extent: int, size: int) -> Array:
    """The elements of a swizzled tile in shared memory, as an array [extent, k]."""
    k = attrs["k"]
    assert isinstance(k, int)
    row, column = np.arange(extent)[:, None], np.arange(k)[None, :]
    if attrs.get(f"{which}_major", "k") == "k":
        linear = offset * size + row * ROW_BYTES + column * size
    else:
        along = ROW_BYTES // size
        block = attrs.get(f"{which}_block", 0)
        assert isinstance(block, int)
        linear = offset * size + (row // along) * block * size + column * ROW_BYTES + (row % along) * size
    return swizzled(linear) // size
