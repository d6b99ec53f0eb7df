"""What the three stages have in common: running regions, masked control flow, elementwise ops and memory.

A `Machine` runs one kernel over frames of lanes. Running a region is a generator, so that a thread-stage barrier can hand
control to the scheduler; the other stages never yield (`drain`). Lanes that take different ways run under masks: inactive
lanes compute along, but touch no memory and cannot fail. A region is only entered with at least one active lane.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tilewright.base.dtypes import DType, f64
from tilewright.base.errors import CompilerBug, UserError
from tilewright.base.sizes import Size
from tilewright.base.source import Span
from tilewright.ir import places
from tilewright.ir.emulator.frames import BLOCK, LANE, SLOT, Frame, align, choose
from tilewright.ir.emulator.memory.atomics import accumulate, update
from tilewright.ir.emulator.memory.memory import Memory, fault
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.numerics import convert, evaluate
from tilewright.ir.ops import OPS
from tilewright.ir.printing import pieces, written
from tilewright.ir.types import Scalar, Tensor, Tile, Type, Vec, dtype_of

Array = np.ndarray
Results = tuple[Array, ...]
RESIDENT = 5
"""Blocks of a persistent kernel that run at once here; a number that divides few grids."""


@dataclass(frozen=True)
class BarrierReached:
    """The frame's warps arrived at a barrier."""

    span: Span


@dataclass(frozen=True)
class GridBarrier:
    """The frame's warps arrived at a barrier of the whole grid."""

    span: Span


@dataclass(frozen=True)
class Wait:
    """The frame's warps wait until `ready` says so; `text` says for what."""

    span: Span
    ready: Callable[[], bool]
    text: Callable[[], str]


@dataclass(frozen=True)
class Pause:
    """One round of a loop that may be waiting for other warps."""

    span: Span


@dataclass(frozen=True)
class Fork:
    """Run these to their ends, then go on with their results. Without an op: the warps of a kernel from its start."""

    op: Op | None
    children: tuple[tuple[Frame, Steps], ...]


Event = BarrierReached | GridBarrier | Wait | Pause | Fork
Steps = Generator[Event, "Sequence[Results]", Results]


def drain(steps: Steps) -> Results:
    """Run a region that never hands control away."""
    try:
        event = next(steps)
    except StopIteration as stop:
        results: Results = stop.value
        return results
    raise CompilerBug.at("TW040", f"the emulator met {type(event).__name__} outside the thread stage")


def constant(value: object, dtype: DType) -> Array:
    """A number of the kernel's text as an array of shape [1]; integers wrap."""
    if dtype.is_bool:
        return np.full(1, bool(value))
    if not isinstance(value, int | float):
        raise CompilerBug.at("TW040", f"{value!r} is not a constant of {dtype}")
    if dtype.is_int:
        return np.full(1, int(value) & ((1 << dtype.bits) - 1), f"u{dtype.itemsize}").view(dtype.numpy)
    return convert(np.full(1, float(value), np.float64), f64, dtype)


def advance(index: Array, step: Array, goes_on: Array) -> Array:
    """The next loop index; lanes that are done keep theirs, so that they stay done."""
    with np.errstate(over="ignore"):
        return np.where(goes_on, index + step, index)


def launched_grid(kernel: Kernel, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """How many blocks a launch has along each axis: of a persistent kernel no more than fit a small GPU."""
    grid = tuple(max(0, s.evaluate(sizes)) for s in kernel.grid)
    return (min(grid[0], RESIDENT), *grid[1:]) if kernel.attrs.get("persistent") else grid


def tile_rank(type_: Type) -> int:
    return len(type_.shape) if isinstance(type_, Tile) else 0


class Machine(ABC):
    """Runs the ops that mean the same at every stage. Stages add their own to `simple` and `control`."""

    def __init__(self, kernel: Kernel, sizes: Mapping[str, int]) -> None:
        self.kernel = kernel
        self.sizes = sizes
        self.grid = launched_grid(kernel, sizes)
        self.memories: dict[Value, Memory] = {}
        self.changes = 0
        """Counts writes that changed memory: whether waiting lanes have something new to see."""
        self.simple: dict[str, Callable[[Op, Frame], Results]] = {
            "print": self._print,
            "const": self._const, "size": self._size, "load": self._load, "store": self._store, "atomic": self._atomic, "accumulate": self._accumulate, "head": self._head,
            "broadcast": self._broadcast, "report": self._report, "program_id": self._program_id,
        }  # fmt: skip
        self.control: dict[str, Callable[[Op, Frame], Steps]] = {"for": self.for_, "if": self.if_, "while": self.while_}

    # -- what a stage says about its lanes ------------------------------------------------------------------------

    @abstractmethod
    def describe(self, frame: Frame, lane: int) -> str:
        """Who the lane is, for messages."""

    def block_text(self, block: int) -> str:
        """A block of the grid, given its linear number (x fastest)."""
        return places.block_text(self.grid, block)

    # -- regions --------------------------------------------------------------------------------------------------

    def bind(self, param: Value, argument: Array | int | float | bool, frame: Frame) -> None:
        """Give a kernel parameter its value."""
        if isinstance(param.type, Tensor):
            assert isinstance(argument, np.ndarray)
            self.memories[param] = Memory.of_array(param.name, param.type, argument)
        else:
            assert isinstance(param.type, Scalar)
            number = argument.item() if isinstance(argument, np.ndarray | np.generic) else argument
            frame.values[param] = constant(number, param.type.dtype)

    def run(self, block: Block, frame: Frame) -> Steps:
        """Execute the ops in order; gives what the block yields."""
        for op in block.ops:
            control = self.control.get(op.opcode)
            if control is not None:
                results = yield from control(op, frame)
            elif op.opcode == "yield":
                return tuple(frame.get(v) for v in op.operands)
            else:
                simple = self.simple.get(op.opcode)
                results = simple(op, frame) if simple else self._elementwise(op, frame)
            for value, result in zip(op.results, results, strict=False):
                frame.values[value] = result
        return ()

    # -- control flow under masks ---------------------------------------------------------------------------------

    def if_(self, op: Op, frame: Frame) -> Steps:
        condition = frame.get(op.operands[0])
        taken = [frame.active & side for side in (condition, ~condition)]
        # The lanes that do not take the only region taken are inactive anyway.
        for region, lanes in zip(op.regions, taken, strict=True):
            if lanes.all() or (frame.mask is not None and np.array_equal(lanes, frame.mask)):
                return (yield from self.run(region, frame))
        with frame.masked(taken[0], op):
            first = yield from self.run(op.regions[0], frame)
        with frame.masked(taken[1], op):
            second = yield from self.run(op.regions[1], frame)
        return tuple(choose(condition, a, b) for a, b in zip(first, second, strict=True))

    def for_(self, op: Op, frame: Frame) -> Steps:
        low, high, step = (frame.get(v) for v in op.operands[:3])
        if (np.broadcast_to(step == 0, (frame.lanes,)) & frame.active).any():
            raise fault("a loop's step is 0", op.span)
        carried = tuple(frame.get(v) for v in op.operands[3:])
        return (yield from self.for_from(op, frame, low, high, step, carried))

    def for_from(self, op: Op, frame: Frame, index: Array, high: Array, step: Array, carried: Results) -> Steps:
        """The rest of a serial loop, from `index` on."""
        (region,) = op.regions
        while True:
            goes_on = np.where(step > 0, index < high, index > high)
            if goes_on.shape[0] == 1:
                if not goes_on[0]:
                    return carried
                frame.values.update(zip(region.args, (index, *carried), strict=True))
                carried = yield from self.run(region, frame)
            else:
                lanes = goes_on & frame.active
                if not lanes.any():
                    return carried
                frame.values.update(zip(region.args, (index, *carried), strict=True))
                with frame.masked(lanes, op):
                    following = yield from self.run(region, frame)
                carried = tuple(choose(lanes, a, b) for a, b in zip(following, carried, strict=True))
            index = advance(index, step, goes_on)

    def while_(self, op: Op, frame: Frame) -> Steps:
        return (yield from self.while_from(op, frame, tuple(frame.get(v) for v in op.operands)))

    def while_from(self, op: Op, frame: Frame, carried: Results) -> Steps:
        """The rest of a conditional loop. The first region hands the values of this round to the second."""
        test, body = op.regions
        left = carried
        active = frame.active
        while True:
            with frame.masked(active, op):
                frame.values.update(zip(test.args, left, strict=True))
                condition, *values = yield from self.run(test, frame)
                carried = tuple(choose(active, a, b) for a, b in zip(values, carried, strict=True))
                active = active & condition
            if not active.any():
                return carried
            with frame.masked(active, op):
                frame.values.update(zip(body.args, carried, strict=True))
                left = yield from self.run(body, frame)

    # -- numbers --------------------------------------------------------------------------------------------------

    def _const(self, op: Op, frame: Frame) -> Results:
        return (constant(op.attrs["value"], dtype_of(op.result.type)),)

    def _size(self, op: Op, frame: Frame) -> Results:
        size = op.attrs["value"]
        assert isinstance(size, Size | int | str)
        value = Size.of(size).evaluate(self.sizes)
        return (np.full(1, (value + (1 << 63)) % (1 << 64) - (1 << 63), np.int64),)  # as the code that computes it in 64 bits does

    def _program_id(self, op: Op, frame: Frame) -> Results:
        axis = op.attrs.get("axis", 0)
        assert isinstance(axis, int)
        extent = self.grid[axis] if axis < len(self.grid) else 1
        return (frame.get(BLOCK) // prod(self.grid[:axis]) % extent,)

    def _report(self, op: Op, frame: Frame) -> Results:
        cell = self.memories[op.operands[0]]
        index, extent, *outside = (frame.full(v) for v in op.operands[1:])
        active = align(frame.active, index.ndim - 1)
        found = np.argwhere(np.broadcast_to(active & outside[0] if outside else active, index.shape))
        if len(found) and not cell.read(np.zeros(1, np.int64))[0]:
            first = tuple(found[0])
            cell.write(np.arange(3), np.array([int(str(op.attrs["site"])), int(index[first]), int(extent[first[0]])]))
        return ()

    def _broadcast(self, op: Op, frame: Frame) -> Results:
        result = op.result.type
        assert isinstance(result, Tile | Vec)
        shape = result.shape if isinstance(result, Tile) else (result.width,)
        value = align(frame.get(op.operands[0]), len(shape))
        return (np.broadcast_to(value, (value.shape[0], *shape)),)

    def _print(self, op: Op, frame: Frame) -> Results:
        """Before the thread stage kernels that print have no tiles, and run in order."""
        parts = pieces(str(op.attrs["text"]), [dtype_of(v.type) for v in op.operands])
        values = [frame.full(v) for v in op.operands]
        for lane in np.flatnonzero(frame.active):
            sys.stdout.write(written(parts, [v[lane].item() for v in values]))
        return ()

    def _elementwise(self, op: Op, frame: Frame) -> Results:
        definition = OPS.get(op.opcode)
        if definition is None or definition.group not in ("elementwise", "function"):
            raise CompilerBug.at(
                "TW040", f"the emulator cannot run {op.opcode} at the {self.kernel.stage} stage", op.span
            )
        operands = [frame.get(v) for v in op.operands]
        if op.opcode == "select":
            operands[0] = align(operands[0], operands[1].ndim - 1)
        return (evaluate(op.opcode, operands, op.attrs, dtype_of(op.operands[0].type)),)

    # -- memory ---------------------------------------------------------------------------------------------------

    def owner(self, memory: Memory, frame: Frame) -> Array | None:
        """Whose copy of an allocation each lane uses."""
        if not memory.owners:
            return None
        return frame.get(LANE if memory.space == "local" else SLOT)

    def fail_at(
        self, op: Op, frame: Frame, bad: Array, text: Callable[[tuple[int, ...]], str], help: str = ""
    ) -> UserError:
        """The error for the first lane (and element) where `bad` holds."""
        position = tuple(int(p) for p in np.argwhere(bad)[0])
        lane = position[0]
        if bad.shape[0] == 1:
            lane = int(np.argmax(frame.active))
        return fault(f"{text(position)}, in {self.describe(frame, lane)}", op.span, help)

    def places(self, op: Op, frame: Frame, rank: int, mask: Value | None) -> tuple[Memory, Array, Array | None]:
        """Of a load, store or atomic: the memory, the places of the elements, and which of them are really accessed."""
        tensor, *_ = op.operands
        memory = self.memories[tensor]
        active = None if frame.mask is None else align(frame.mask, rank)
        if mask is not None:
            wanted = align(frame.get(mask), rank)
            active = wanted if active is None else active & wanted
        indices = [
            align(frame.get(v).astype(np.int64, copy=False), rank) for v in op.operands[1 : 1 + len(memory.shape)]
        ]
        return memory, self.element_places(op, frame, memory, indices, active), active

    def element_places(self, op: Op, frame: Frame, memory: Memory, indices: list[Array], active: Array | None) -> Array:
        """Places of the elements at these indices, which must be inside where active."""
        for axis, (index, extent) in enumerate(zip(indices, memory.shape, strict=True)):
            outside = (index < 0) | (index >= extent)
            if not outside.any():
                continue
            bad = outside if active is None else outside & active
            if bad.any():
                raise self.fail_at(op, frame, bad, self._bounds_text(op, memory, indices, axis, bad.shape))
            # What is left outside is not accessed.
            indices[axis] = np.where(outside, 0, index)
        return memory.offsets(indices, self.owner(memory, frame))

    @staticmethod
    def _bounds_text(
        op: Op, memory: Memory, indices: Sequence[Array], axis: int, shape: tuple[int, ...]
    ) -> Callable[[tuple[int, ...]], str]:
        def text(position: tuple[int, ...]) -> str:
            full = np.broadcast_shapes(shape, *(i.shape for i in indices))
            there = [int(np.broadcast_to(i, full)[position]) for i in indices]
            which = f" (axis {axis})" if len(there) > 1 else ""
            return (
                f"{op.opcode} of {memory.label} at {there} is out of bounds: "
                f"index {there[axis]}{which}, extent {memory.shape[axis]}"
            )

        return text

    def vector_places(
        self, op: Op, frame: Frame, memory: Memory, first: Array, active: Array | None, width: int
    ) -> Array:
        """Places of `width` elements that follow one another."""
        wrong = np.zeros(first.shape, bool) if op.attrs.get("unaligned") else memory.misaligned(first, width)
        wrong = wrong if active is None else wrong & active
        if wrong.any():
            size = width * memory.dtype.itemsize
            start = np.broadcast_to(first - memory.base, wrong.shape)
            raise self.fail_at(
                op, frame, wrong,
                lambda p: f"{op.opcode} of {width} elements of {memory.label} from element {int(start[p])} on is misaligned: "
                f"a vector of {size} bytes must lie at a multiple of that",
            )  # fmt: skip
        places = first[..., None] + np.arange(width)
        outside = memory.outside(places, first[..., None])
        bad = outside if active is None else outside & active[..., None]
        if bad.any():
            base = np.broadcast_to(places - memory.base, bad.shape)
            raise self.fail_at(
                op, frame, bad,
                lambda p: f"{op.opcode} of {width} elements of {memory.label} is out of bounds: element {int(base[p])} "
                f"in memory, extents {list(memory.shape)}",
            )  # fmt: skip
        return np.where(outside, 0, places)

    def check_aligned(self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None) -> None:
        """Of an access that says so: a vector begins every so many elements along the last axis."""
        every = op.attrs.get("aligned", 0)
        if not isinstance(every, int) or not every:
            return
        first = places[..., ::every]
        wrong = memory.misaligned(first, min(every, 16 // memory.dtype.itemsize))
        if active is not None:
            wrong = wrong & (active[..., ::every] if active.shape[-1] > 1 else active)
        if wrong.any():
            start = np.broadcast_to(first - memory.base, wrong.shape)
            raise self.fail_at(
                op, frame, wrong,
                lambda p: f"{op.opcode} of {memory.label}: no vector of {every} elements begins at element {int(start[p])}",
            )  # fmt: skip

    def check_written(self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None) -> None:
        if memory.written is None:
            return
        missing = ~memory.written[places]
        if active is not None:
            missing = missing & (active if active.ndim == missing.ndim else active[..., None])
        if missing.any():
            element = np.broadcast_to(places % max(memory.size, 1), missing.shape)
            raise self.fail_at(
                op, frame, missing,
                lambda p: f"{op.opcode} of uninitialised {memory.space} memory: {memory.label}"
                f"{[int(i) for i in np.unravel_index(int(element[p]), memory.shape)]} "
                f"{self.unwritten_text(memory, int(np.broadcast_to(places, missing.shape)[p]))}",
            )  # fmt: skip

    def unwritten_text(self, memory: Memory, place: int) -> str:
        """Why there is nothing at that place."""
        return "was never written"

    def _head(self, op: Op, frame: Frame) -> Results:
        """No result may depend on where arrays lie; here every one starts three elements before an aligned address."""
        return (np.full(np.shape(frame.get(op.operands[1])) if len(op.operands) > 1 else (1,), 3, np.int64),)

    def _load(self, op: Op, frame: Frame) -> Results:
        masked = bool(op.attrs.get("masked"))
        result = op.result.type
        memory, places, active = self.places(op, frame, tile_rank(result), op.operands[-1] if masked else None)
        self.check_aligned(op, frame, memory, places, active)
        if isinstance(result, Vec):
            if memory.flat.size:
                places = self.vector_places(op, frame, memory, places, active, result.width)
            else:
                places = np.zeros((*places.shape, result.width), np.int64)
        if memory.flat.size == 0:
            return (np.zeros(places.shape, memory.dtype.numpy),)
        self.check_written(op, frame, memory, places, active)
        self.on_read(op, frame, memory, places, active)
        found = memory.read(places)
        if masked and active is not None:
            wanted = active if active.ndim == found.ndim else active[..., None]
            found = np.where(wanted, found, np.zeros((), found.dtype))
        return (found,)

    def _store(self, op: Op, frame: Frame) -> Results:
        masked = bool(op.attrs.get("masked"))
        value_operand = op.operands[-2] if masked else op.operands[-1]
        memory, places, active = self.places(
            op, frame, tile_rank(value_operand.type), op.operands[-1] if masked else None
        )
        if memory.flat.size == 0:
            return ()
        self.check_aligned(op, frame, memory, places, active)
        if isinstance(value_operand.type, Vec):
            places = self.vector_places(op, frame, memory, places, active, value_operand.type.width)
            active = None if active is None else active[..., None]
        self._require_writable(op, memory)
        values = frame.get(value_operand)
        self.on_write(op, frame, memory, places, values, active)
        shape = np.broadcast_shapes(places.shape, values.shape, () if active is None else active.shape)
        places, values = np.broadcast_to(places, shape), np.broadcast_to(values, shape)
        if active is not None:
            wanted = np.broadcast_to(active, shape)
            places, values = places[wanted], values[wanted]
        memory.write(places, values)
        self.changes += 1
        return ()

    def _require_writable(self, op: Op, memory: Memory) -> None:
        if not memory.flat.flags.writeable:
            raise fault(f"{op.opcode} to {memory.label}, which is read-only", op.span)

    def on_read(  # noqa: B027 - most stages look at nothing
        self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None
    ) -> None:
        """A stage may look at reads before they happen."""

    def on_write(  # noqa: B027 - most stages look at nothing
        self, op: Op, frame: Frame, memory: Memory, places: Array, values: Array, active: Array | None
    ) -> None:
        """A stage may look at writes before they happen."""

    def on_update(  # noqa: B027 - most stages look at nothing
        self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None
    ) -> None:
        """A stage may look at atomics before they happen."""

    def _atomic(self, op: Op, frame: Frame) -> Results:
        kind = str(op.attrs["kind"])
        rank = tile_rank(op.result.type)
        memory, places, active = self.places(op, frame, rank, None)
        operands = [frame.get(v) for v in op.operands[1 + len(memory.shape) :]]
        self._require_writable(op, memory)
        self.check_written(op, frame, memory, places, active)
        self.on_update(op, frame, memory, places, active)
        # Each lane does its own access, even where all lanes do the same.
        shape = (frame.lanes, *np.broadcast_shapes(places.shape[1:], *(o.shape[1:] for o in operands)))
        places = np.broadcast_to(places, shape)
        wanted = np.broadcast_to(np.True_ if active is None else active, shape)
        chosen = places[wanted]
        before = memory.flat[chosen]
        old = np.zeros(shape, memory.dtype.numpy)
        old[wanted] = update(kind, memory, chosen, [np.broadcast_to(o, shape)[wanted] for o in operands])
        self.changes += int(not np.array_equal(before, memory.flat[chosen]))
        return (old,)

    def _accumulate(self, op: Op, frame: Frame) -> Results:
        """Every active lane and element combines once, even where all lanes do the same."""
        masked = bool(op.attrs.get("masked"))
        value_operand = op.operands[-2] if masked else op.operands[-1]
        memory, places, active = self.places(op, frame, tile_rank(value_operand.type), op.operands[-1] if masked else None)
        if memory.flat.size == 0:
            return ()
        self._require_writable(op, memory)
        self.check_written(op, frame, memory, places, active)
        values = frame.get(value_operand)
        inner = np.broadcast_shapes(places.shape[1:], values.shape[1:], () if active is None else active.shape[1:])
        shape = (frame.lanes, *inner)
        wanted = np.broadcast_to(np.True_ if active is None else active, shape)
        accumulate(str(op.attrs["kind"]), memory, np.broadcast_to(places, shape)[wanted], np.broadcast_to(values, shape)[wanted])
        self.changes += 1
        return ()
