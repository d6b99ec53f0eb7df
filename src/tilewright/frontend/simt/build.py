"""The emitter: what the reader of explicit kernels and the table of words build with.

To the arithmetic of `simt_numbers` it adds arrays and their elements, and a thread's indices in the block and the grid of the launch.
All ops carry the spans of their source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tilewright.base.dtypes import DType, i64
from tilewright.base.sizes import Size
from tilewright.base.source import Span
from tilewright.base.target import DEFAULT_NVPTX, NVPTX, Target
from tilewright.frontend.simt.numbers import Numbers
from tilewright.frontend.simt.values import Arguments, MemoryValue, NumberValue, Seq, Val, literal
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Value


class LaunchShape:
    """What of a launch the code is made for. `rank`: axes of the grid; the others have one block. `vendor`: nvidia, amd or cpu. `cluster`: blocks
    of a cluster. `target`: whose warps threads are in."""

    def __init__(
        self, block: tuple[int, int, int], rank: int = 3, shared_bytes: int = 0, guarded: bool = False, vendor: str = "nvidia", cluster: int = 1,
        steps: bool = False, target: Target = NVPTX[DEFAULT_NVPTX],
    ) -> None:  # fmt: skip
        self.block, self.rank, self.shared_bytes, self.guarded, self.vendor, self.cluster = (
            block,
            rank,
            shared_bytes,
            guarded,
            vendor,
            cluster,
        )
        self.target = target
        self.warp_size = target.simt_warp
        self.ballot_bits = target.ballot_bits
        self.steps = steps
        """Whether each statement is preceded by a `step` for the debugger."""

    @property
    def threads(self) -> int:
        return prod(self.block)


GRID = ("grid$x", "grid$y", "grid$z")
"""Names of the launch's sizes: blocks along each axis."""
COUNT = "launch$n"
"""The elements of a launch, beyond which threads do nothing."""


class Emitter(Numbers):
    """Appends ops for one kernel."""

    def __init__(self, launch: LaunchShape, default_float: DType, span: Span) -> None:
        super().__init__(default_float, span)
        self.launch = launch
        self.prologue = Builder(span)
        """Ops at the very start of the kernel: arrays of its own, indices."""
        self._once: dict[object, Value] = {}
        self.dynamic = False
        """Whether the kernel uses its dynamic shared memory."""

    # -- memory ---------------------------------------------------------------------------------------------------

    def place(self, memory: MemoryValue, indices: Sequence[Val]) -> tuple[Value, ...]:
        """The indices of an element as IR values, with those already given."""
        rank = memory.type.rank
        if len(memory.given) + len(indices) != rank:
            raise self.fail(
                f"'{memory.name}' has {rank} {'axis' if rank == 1 else 'axes'}, but is used with {len(memory.given) + len(indices)} "
                f"{'index' if len(memory.given) + len(indices) == 1 else 'indices'}", code="TW003",
            )  # fmt: skip
        return (*memory.given, *self.positions(memory, indices))

    def positions(self, memory: MemoryValue, indices: Sequence[Val]) -> list[Value]:
        """Some indices, checked where they are constants; negative constants count from the end."""
        found: list[Value] = []
        for axis, val in enumerate(indices, len(memory.given)):
            number = self.integer(val, f"index {axis} of '{memory.name}'")
            extent = memory.type.shape[axis]
            if number.const is None:
                found.append(self.use(number, i64))
                continue
            at = int(number.const)
            if extent.constant is not None and not -extent.constant <= at < extent.constant:
                raise self.fail(
                    f"index {at} of '{memory.name}' is outside: axis {axis} has extent {extent.constant}", code="TW013"
                )
            found.append(self.b.index(at if at >= 0 else extent + at))
        return found

    def load(self, memory: MemoryValue, indices: Sequence[Val], **attrs: Attr) -> NumberValue:
        return self.num(self.b.emit("load", (memory.value, *self.place(memory, indices)), attrs)[0])

    def store(self, memory: MemoryValue, indices: Sequence[Val], number: NumberValue, **attrs: Attr) -> None:
        dtype = memory.type.dtype
        if memory.type.space == "constant":
            raise self.fail(
                f"'{memory.name}' is captured from outside the kernel and cannot be written", "pass it as an argument", "TW015"
            )
        value = self.use(self.convert(number, dtype, f"'{memory.name}'"))
        self.b.emit("store", (memory.value, *self.place(memory, indices), value), attrs)

    def array(self, name: str, shape: Sequence[int], dtype: DType, space: str, **attrs: Attr) -> MemoryValue:
        """A new array of the thread (`local`) or the block (`shared`). It is made once, at the start of the kernel."""
        with self.prologue.at(self.b.span):
            (value,) = self.prologue.emit("alloc", (), {"space": space, "dtype": dtype, "shape": tuple(shape), **attrs}, name)
        return MemoryValue(name, value)

    # -- indices --------------------------------------------------------------------------------------------------

    def once(self, key: object, make: Callable[[Builder], Value]) -> Value:
        """A value that the kernel computes at its start, one time."""
        if key not in self._once:
            self._once[key] = make(self.prologue)
        return self._once[key]

    def thread(self) -> Value:
        """The thread's number in its block."""
        return self.once("thread", lambda b: b.op("thread_id", name="thread"))

    def thread_axis(self, axis: int) -> Value:
        """Its index along x, y or z."""
        x, y, _ = self.launch.block
        extent, inner = self.launch.block[axis], (1, x, x * y)[axis]
        if extent == 1:
            return self.once(0, lambda b: b.index(0))
        whole = self.thread()

        def make(b: Builder) -> Value:
            value = whole if inner == 1 else b.op("floordiv", whole, b.index(inner))
            return value if extent * inner == self.launch.threads else b.op("mod", value, b.index(extent), name="xyz"[axis])

        return self.once(("thread", axis), make)

    def block_axis(self, axis: int) -> Value:
        if axis >= self.launch.rank:
            return self.once(0, lambda b: b.index(0))
        return self.once(("block", axis), lambda b: b.op("program_id", axis=axis, name=f"block_{'xyz'[axis]}"))

    def grid_axis(self, axis: int) -> Value:
        """Blocks of the grid along an axis."""
        if axis >= self.launch.rank:
            return self.once(1, lambda b: b.index(1))
        return self.once(("grid", axis), lambda b: b.op("grid_size", axis=axis, name=f"grid_{'xyz'[axis]}"))

    def global_axis(self, axis: int) -> Value:
        """The thread's index in the whole grid along an axis."""
        block, thread = self.block_axis(axis), self.thread_axis(axis)
        size = self.launch.block[axis]
        return self.once(("global", axis), lambda b: b.add(b.mul(block, b.index(size)), thread))

    def global_id(self) -> Value:
        """The thread's number in the whole grid."""
        rank = self.launch.rank
        blocks = [self.block_axis(axis) for axis in range(rank)]
        grid = [self.grid_axis(axis) for axis in range(rank - 1)]
        thread = self.thread()

        def make(b: Builder) -> Value:
            block = blocks[-1]
            for axis in reversed(range(rank - 1)):
                block = b.add(b.mul(block, grid[axis]), blocks[axis])
            return b.op("add", b.mul(block, b.index(self.launch.threads)), thread, name="id")

        return self.once("id", make)

    def size(self, size: Size) -> NumberValue:
        """An extent of an array."""
        if size.constant is not None:
            return literal(size.constant)
        return self.index(self.b.index(size))


def shape_of(emitter: Emitter, val: Val, what: str) -> tuple[int, ...]:
    """A shape of constants: an integer or a tuple of them."""
    items = val.items if isinstance(val, Seq) else (val,)
    shape = tuple(emitter.constant(item, what) for item in items)
    if not shape or min(shape) < 1:
        raise emitter.fail(f"{what} is {list(shape)}", "extents are positive numbers", "TW009")
    return shape


def arguments(emitter: Emitter, given: Arguments, word: str, names: Sequence[str], least: int | None = None) -> dict[str, Val]:
    """The arguments of a word by name; the first `least` of them (all, where it is None) must be there."""
    if len(given.items) > len(names):
        raise emitter.fail(f"tilewright.{word} takes {len(names)} argument(s), got {len(given.items)}", code="TW016")
    found = dict(zip(names, given.items, strict=False))
    for name, val in given.named.items():
        if name not in names:
            raise emitter.fail(
                f"tilewright.{word} has no argument '{name}'", f"its arguments are {', '.join(names) or 'none'}", "TW016"
            )
        if name in found:
            raise emitter.fail(f"tilewright.{word} got '{name}' twice", code="TW016")
        found[name] = val
    missing = [name for name in names[: len(names) if least is None else least] if name not in found]
    if missing:
        raise emitter.fail(f"tilewright.{word} is missing {', '.join(map(repr, missing))}", code="TW016")
    return found
