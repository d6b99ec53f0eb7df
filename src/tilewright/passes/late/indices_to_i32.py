"""Pass: integers that fit 32 bits are computed in 32 bits, where a GPU's registers have as many.

In: a thread-stage kernel whose launches promise (attribute `small`) that every extent, and every index of a thread in the grid, is below
2^31. Out: the same values; those whose range is proven to fit are computed as i32, and widened where they meet others, as in addresses.

    %i = add (mul %block, 256), %thread : i64;  %c = lt %i, %n   ->   the same in i32

Ranges come from what indices are (a thread's number is below the block's size, an extent is not negative) and from arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from tilewright.base.dtypes import DType, i32, i64
from tilewright.base.intervals import (
    Interval,
    bit_and,
    hull,
    largest_of,
    least_of,
    product,
    quotient,
    remainder,
    shift_left,
    shift_right,
)
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.rewrite import eliminate_dead
from tilewright.ir.types import INDEX, Scalar, dtype_of

LIMIT = (1 << 31) - 1
Range = Interval[int]
_WORD = Scalar(i32)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def indices_to_i32(kernel: Kernel) -> Kernel:
    if not kernel.attrs.get("small"):
        return kernel
    return eliminate_dead(_Narrower(kernel).run())


class _Narrower:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        block = kernel.attrs.get("block", (kernel.threads, 1, 1))
        assert isinstance(block, tuple)
        self.block = [b for b in block if isinstance(b, int)]
        self.ranges: dict[Value, Range] = {}
        self.mapping: dict[Value, Value] = {}
        """Values of the kernel that others stand for now."""
        self.words: dict[Value, Value] = {}
        """The i32 form of an i64 value, where one was computed."""

    def run(self) -> Kernel:
        return replace(self.kernel, body=self.region(self.kernel.body, Builder()))

    def region(self, block: Block, builder: Builder) -> Block:
        """A region's ops; what was narrowed inside is not seen outside."""
        words = dict(self.words)
        for op in block.ops:
            with builder.at(op.span):
                self.op(builder, op)
        self.words = words
        return Block(block.args, tuple(builder.ops))

    # -- ops ------------------------------------------------------------------------------------------------------

    def op(self, b: Builder, op: Op) -> None:
        operands = tuple(self.mapping.get(v, v) for v in op.operands)
        if op.regions:
            self.structured(b, replace(op, operands=operands))
            return
        self.learn(op, operands)
        if op.opcode in _COMPARISONS and operands[0].type == INDEX and all(map(self.fits, operands)):
            self.mapping[op.results[0]] = b.op(op.opcode, *(self.word(b, v) for v in operands))
            return
        if op.opcode in _NARROWED and op.results[0].type == INDEX and self.fits(op.results[0]):
            numbers = [v for v in operands if v.type == INDEX]
            if all(map(self.fits, numbers)):
                narrow = b.op(op.opcode, *(self.word(b, v) if v.type == INDEX else v for v in operands), name=op.results[0].name)
                self.stand_for(b, op.results[0], narrow)
                return
        b.append(replace(op, operands=operands))

    def stand_for(self, b: Builder, old: Value, narrow: Value) -> None:
        """`narrow` is the value from here on; who needs all its bits widens it."""
        wide = b.cast(narrow, i64)
        self.mapping[old] = wide
        self.words[wide] = narrow
        if old in self.ranges:
            self.ranges[wide] = self.ranges[old]

    def word(self, b: Builder, value: Value) -> Value:
        word = self.words.get(value)
        if word is None:
            word = self.words[value] = b.cast(value, i32)
        return word

    def fits(self, value: Value) -> bool:
        reach = self.ranges.get(value)
        return reach is not None and reach.low >= -LIMIT - 1 and reach.high <= LIMIT

    # -- loops and branches ---------------------------------------------------------------------------------------

    def structured(self, b: Builder, op: Op) -> None:
        if op.opcode == "for" and op.operands[0].type == INDEX:
            self.loop(b, op)
            return
        blocks = tuple(self.region(region, Builder()) for region in op.regions)
        blocks = tuple(self.finished(block) for block in blocks)
        if op.opcode == "if":
            for position, result in enumerate(op.results):
                sides = [self.ranges.get(block.yields[position]) for block in blocks]
                if result.type == INDEX and all(side is not None for side in sides):
                    self.ranges[result] = reduce(hull, [side for side in sides if side is not None])
        b.append(replace(op, regions=blocks))

    def finished(self, block: Block) -> Block:
        """A region whose `yield` names what stands for its operands now."""
        last = block.ops[-1]
        operands = tuple(self.mapping.get(v, v) for v in last.operands)
        return Block(block.args, (*block.ops[:-1], replace(last, operands=operands)))

    def loop(self, b: Builder, op: Op) -> None:
        low, high, step = op.operands[:3]
        ranges = [self.ranges.get(v) for v in (low, high, step)]
        (region,) = op.regions
        index = region.args[0]
        first, last, by = ranges
        if first is None or last is None or by is None or by.low < 1 or not all(map(self.fits, (low, high, step))):
            block = self.finished(self.region(region, Builder()))
            b.append(replace(op, regions=(block,)))
            return
        self.ranges[index] = Interval(first.low, max(first.low, last.high - 1))
        if last.high + by.high - 1 > LIMIT or first.high + by.high > LIMIT:
            block = self.finished(self.region(region, Builder()))
            b.append(replace(op, regions=(block,)))
            return
        bounds = tuple(self.word(b, v) for v in (low, high, step))
        narrow = Value(_WORD, index.name)
        inner = Builder(op.span)
        self.stand_for(inner, index, narrow)
        block = self.finished(self.region(region, inner))
        block = Block((narrow, *region.args[1:]), block.ops)
        b.append(replace(op, operands=(*bounds, *op.operands[3:]), regions=(block,)))

    # -- ranges ---------------------------------------------------------------------------------------------------

    def learn(self, op: Op, operands: Sequence[Value]) -> None:
        """What range the op's result is in."""
        if not op.results or not isinstance(op.results[0].type, Scalar) or not op.results[0].type.dtype.is_int:
            return
        reach = self._range(op, operands)
        dtype = _of_dtype(op.results[0].type.dtype)
        if reach is not None and dtype is not None and not dtype.low <= reach.low <= reach.high <= dtype.high:
            reach = dtype  # it wraps around
        if reach is not None and -(1 << 62) <= reach.low <= reach.high <= 1 << 62:
            self.ranges[op.results[0]] = reach

    def _range(self, op: Op, operands: Sequence[Value]) -> Range | None:
        source = _SOURCES.get(op.opcode)
        if source is not None:
            return source(self, op)
        if op.opcode == "cast":
            return self.ranges.get(operands[0]) or _of_dtype(dtype_of(operands[0].type))
        if op.opcode == "select":
            operands = operands[1:]
        rule = _RULES.get(op.opcode)
        known = [self.ranges.get(v) or _of_dtype(dtype_of(v.type)) for v in operands]
        if rule is None or any(k is None for k in known):
            return None
        return rule(*[k for k in known if k is not None])

    def const(self, op: Op) -> Range | None:
        value = op.attrs["value"]
        return Interval(value, value) if isinstance(value, int) else None

    def extent(self, op: Op) -> Range | None:
        size = op.attrs["value"]
        assert isinstance(size, Size)
        if size.constant is not None:
            return Interval(size.constant, size.constant)
        return Interval(0, LIMIT) if size.name else None

    def thread(self, op: Op) -> Range:
        return Interval(0, self.kernel.threads - 1)

    def blocks(self, op: Op) -> Range:
        axis = op.attrs["axis"]
        assert isinstance(axis, int)
        most = LIMIT // self.block[axis]
        return Interval(0, most - (op.opcode == "program_id"))


def _of_dtype(dtype: DType) -> Range | None:
    if dtype.is_bool:
        return Interval(0, 1)
    if not dtype.is_int or dtype.bits > 32:
        return None
    return Interval(int(dtype.min_value), int(dtype.max_value))


_RULES: Mapping[str, Callable[..., Range | None]] = {
    "add": Interval.__add__, "sub": Interval.__sub__, "neg": Interval.__neg__, "mul": product, "floordiv": quotient, "mod": remainder, "min": least_of,
    "max": largest_of, "and": bit_and, "shl": shift_left, "shr": shift_right, "select": hull,
}  # fmt: skip
_SOURCES: Mapping[str, Callable[[_Narrower, Op], Range | None]] = {
    "const": _Narrower.const, "size": _Narrower.extent, "thread_id": _Narrower.thread, "program_id": _Narrower.blocks,
    "grid_size": _Narrower.blocks, "lane_id": _Narrower.thread,
}  # fmt: skip
_NARROWED = frozenset(_RULES)
