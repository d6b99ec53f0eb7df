"""Pass: integers that fit 32 bits are computed in 32 bits, where a GPU's registers have as many.

In: a thread-stage kernel whose launches promise (attribute `small`) that every extent, and every index of a thread in the grid, is below
2^31. Out: the same values; those whose range is proven to fit are computed as i32, and widened where they meet others, as in addresses.

    %i = add (mul %block, 256), %thread : i64;  %c = lt %i, %n   ->   the same in i32

Ranges come from what indices are (a thread's number is below the block's size, an extent is not negative) and from arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tilewright.base.dtypes import DType, i32, i64
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.rewrite import eliminate_dead
from tilewright.ir.types import INDEX, Scalar, dtype_of

LIMIT = (1 << 31) - 1
Range = tuple[int, int]
_WORD = Scalar(i32)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def narrow_indices(kernel: Kernel) -> Kernel:
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
        found = self.words.get(value)
        if found is None:
            found = self.words[value] = b.cast(value, i32)
        return found

    def fits(self, value: Value) -> bool:
        low, high = self.ranges.get(value, (-(1 << 63), 1 << 63))
        return low >= -LIMIT - 1 and high <= LIMIT

    # -- loops and branches ---------------------------------------------------------------------------------------

    def structured(self, b: Builder, op: Op) -> None:
        if op.opcode == "for" and op.operands[0].type == INDEX:
            self.loop(b, op)
            return
        blocks = tuple(self.region(region, Builder()) for region in op.regions)
        blocks = tuple(self.finished(block) for block in blocks)
        if op.opcode == "if":
            for position, result in enumerate(op.results):
                found = [self.ranges.get(block.yields[position]) for block in blocks]
                if result.type == INDEX and all(f is not None for f in found):
                    self.ranges[result] = min(f[0] for f in found if f), max(f[1] for f in found if f)
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
        if first is None or last is None or by is None or by[0] < 1 or not all(map(self.fits, (low, high, step))):
            block = self.finished(self.region(region, Builder()))
            b.append(replace(op, regions=(block,)))
            return
        self.ranges[index] = first[0], max(first[0], last[1] - 1)
        if last[1] + by[1] - 1 > LIMIT or first[1] + by[1] > LIMIT:
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
        found = self._range(op, operands)
        if found is not None and -(1 << 62) <= found[0] <= found[1] <= 1 << 62:
            self.ranges[op.results[0]] = found

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
        return (value, value) if isinstance(value, int) else None

    def extent(self, op: Op) -> Range | None:
        size = op.attrs["value"]
        assert isinstance(size, Size)
        if size.constant is not None:
            return size.constant, size.constant
        return (0, LIMIT) if size.name else None

    def thread(self, op: Op) -> Range:
        return 0, self.kernel.threads - 1

    def blocks(self, op: Op) -> Range:
        axis = op.attrs["axis"]
        assert isinstance(axis, int)
        most = LIMIT // self.block[axis]
        return 0, most - (op.opcode == "program_id")


def _of_dtype(dtype: DType) -> Range | None:
    if dtype.is_bool:
        return 0, 1
    if not dtype.is_int or dtype.bits > 32:
        return None
    return int(dtype.min_value), int(dtype.max_value)


def _product(a: Range, b: Range) -> Range:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


def _floor(a: Range, b: Range) -> Range | None:
    if b[0] < 1:
        return None
    corners = [x // y for x in a for y in b]
    return min(corners), max(corners)


def _mod(a: Range, b: Range) -> Range | None:
    if b[0] < 1:
        return None
    return (0, min(a[1], b[1] - 1)) if a[0] >= 0 else (0, b[1] - 1)


def _bits(a: Range, b: Range) -> Range | None:
    ends = [high for low, high in (a, b) if low >= 0]
    return (0, min(ends)) if ends else None


def _left(a: Range, b: Range) -> Range | None:
    return _product(a, (1 << b[0], 1 << b[0])) if b[0] == b[1] and 0 <= b[0] < 32 else None


def _right(a: Range, b: Range) -> Range | None:
    return (a[0] >> b[0], a[1] >> b[0]) if b[0] == b[1] and 0 <= b[0] < 32 else None


_RULES: Mapping[str, Callable[..., Range | None]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]), "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]), "mul": _product,
    "floordiv": _floor, "mod": _mod, "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])), "neg": lambda a: (-a[1], -a[0]), "and": _bits,
    "shl": _left, "shr": _right, "select": lambda a, b: (min(a[0], b[0]), max(a[1], b[1])),
}  # fmt: skip
_SOURCES: Mapping[str, Callable[[_Narrower, Op], Range | None]] = {
    "const": _Narrower.const, "size": _Narrower.extent, "thread_id": _Narrower.thread, "program_id": _Narrower.blocks,
    "grid_size": _Narrower.blocks, "lane_id": lambda n, op: (0, 31),
}  # fmt: skip
_NARROWED = frozenset(_RULES)
