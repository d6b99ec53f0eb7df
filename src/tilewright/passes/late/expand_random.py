"""Pass: random numbers become arithmetic.

    %w = random_u32 %key, %index   ->   ten rounds of Philox on the counter index // 4, and a select of the word index % 4

In: any kernel. Out: the same kernel with no op of the group of random numbers left. The steps are those of `ir.random_numbers`, which the
emulator executes too.

One block of Philox has four words. Where the index is a vec of neighbours (the usual loop over consecutive elements) that begins with the
first word of a block, every block is computed once for all of its words: a quarter of the work. Where the beginning is not known to be
such a place, a branch asks.

Quantiles of the normal distribution in f64 have tails that few numbers lie in. A thread of a GPU walks those of its elements that do in a loop, so that
the lanes of a warp compute tails of different elements at once.

Runs late, beside expand_math and before expand_casts: earlier passes share and move whole draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType

from tilewright.analysis import divisors
from tilewright.base.dtypes import DType, i32, i64, u32, u64
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import NO_ATTRS, Attrs, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.random_numbers import OPCODES, counter_low, joined, philox, steps
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import Vec, dtype_of
from tilewright.passes.late.math_terms import Terms

_ORDINARY: Attrs = MappingProxyType({"ordinary": True})
_FEW = 4
"""Elements that share the branch around what few of them need."""


class BuilderTerms(Terms):
    """Terms of IR, as `ir.random_numbers` asks for them."""

    def __init__(self, builder: Builder, like: Value, gpu: bool = False) -> None:
        super().__init__(builder, like)
        self.gpu = gpu

    def wide_product(self, a: Value, factor: int) -> tuple[Value, Value]:
        wide = self.op("mul", self.cast(a, u64), factor)
        # LLVM would compute with whole products instead of their halves, were the lower one taken from there in a vector.
        low = self.op("mul", a, factor) if isinstance(a.type, Vec) else self.cast(wide, u32)
        return low, self.cast(self.op("shr", wide, 32), u32)

    def where_any(self, condition: Value, then: Callable[[BuilderTerms, Value], Value], operand: Value, otherwise: Value) -> Value:
        width = condition.type.width if isinstance(condition.type, Vec) else 1
        if self.gpu and width > 1:
            return self._one_after_another(condition, then, operand, otherwise, width)
        if width > _FEW:
            # A branch for every few elements: it is seldom taken then.
            parts = zip(*(self.builder.multi("split", v) for v in (condition, operand, otherwise)), strict=True)
            low, high = (self.where_any(c, then, o, e) for c, o, e in parts)
            return self.builder.op("rearrange", low, high, lanes=tuple(range(width)))

        def chosen(inner: Builder) -> Sequence[Value]:
            value = then(BuilderTerms(inner, operand), operand)
            return [inner.select(condition, value, otherwise)]

        any_ = condition if width == 1 else self.builder.op("not", self.builder.op("every", self.builder.op("not", condition)))
        return self.builder.if_(any_, chosen, lambda inner: [otherwise])[0]

    def _one_after_another(
        self, condition: Value, then: Callable[[BuilderTerms, Value], Value], operand: Value, otherwise: Value, width: int
    ) -> Value:
        """By a thread of a GPU: a loop over its elements for which the condition holds. All lanes of a warp take part in a turn, each for
        an element of its own, so that there are as many turns as the lane with the most such elements has."""
        b = self.builder
        operands, results, marks = ([b.op("extract", v, lane=k) for k in range(width)] for v in (operand, otherwise, condition))
        waiting = b.const(0, u32)
        for k, mark in enumerate(marks):
            waiting = b.op("or", waiting, b.select(mark, b.const(1 << k, u32), b.const(0, u32)))

        def is_left(inner: Builder, left: Value, *now: Value) -> Sequence[Value]:
            return [inner.op("ne", left, inner.const(0, u32)), left, *now]

        def turn(inner: Builder, left: Value, *now: Value) -> Sequence[Value]:
            zero = inner.const(0, u32)
            rest = inner.op("and", left, inner.sub(left, inner.const(1, u32)))
            first = inner.op("xor", left, rest)
            chosen = [inner.op("ne", inner.op("and", first, inner.const(1 << k, u32)), zero) for k in range(width)]
            given = operands[-1]
            for k in range(width - 1):
                given = inner.select(chosen[k], operands[k], given)
            value = then(BuilderTerms(inner, given, gpu=True), given)
            return [rest, *(inner.select(c, value, old) for c, old in zip(chosen, now, strict=True))]

        carried = [waiting, *results]
        types, names = [v.type for v in carried], ["left", *(f"r{k}" for k in range(width))]
        regions = (b.region(types, names, is_left), b.region(types, names, turn))
        last = b.append(Op("while", tuple(carried), tuple(Value(t) for t in types), NO_ATTRS, regions, b.span))
        return b.op("pack", *last[1:])

    def quotient(self, a: Value, b: Value) -> Value:
        return self.builder.emit("div", [a, b], _ORDINARY if self.gpu else NO_ATTRS)[0]

    def root(self, a: Value) -> Value:
        return self.builder.emit("sqrt", [a], _ORDINARY if self.gpu else NO_ATTRS)[0]

    def signed(self, a: Value) -> Value:
        return self.builder.bitcast(a, i32 if dtype_of(a.type) is u32 else i64)


def expand_random(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with every random op expanded."""
    if not any(op.opcode in OPCODES for op in walk(kernel.body)):
        return kernel
    if target.is_gpu:
        kernel = replace(kernel, body=_side_by_side(kernel.body))
    known = divisors.analyse(kernel) if kernel.stage is Stage.THREAD else {}
    made: dict[Value, Op] = {}

    def replacement(builder: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode not in OPCODES:
            made.update((result, op) for result in op.results)
            return None
        if op.opcode in _WORDS and isinstance(op.operands[1].type, Vec):
            shared = _by_blocks(builder, op, made, known, target.is_gpu)
            if shared is not None:
                return (shared,)
        return (_one_by_one(builder, op, target.is_gpu),)

    return rewrite(kernel, replacement)


def _one_by_one(builder: Builder, op: Op, gpu: bool) -> Value:
    first = op.operands[0]
    return steps(BuilderTerms(builder, first, gpu), op.opcode, op.operands, dtype_of(first.type))


# -- quantiles of several vectors ---------------------------------------------------------------------------------------

_TOGETHER = 8
"""Elements of a thread whose tails share a loop."""


def _side_by_side(block: Block) -> Block:
    """Quantiles of 64-bit words that follow one another in a block as one op on a wider vec: they share the turns for their tails."""
    ops: list[Op] = []
    for is_quantile, run in groupby(block.ops, key=_is_wide_quantile):
        if is_quantile:
            ops += _together(list(run))
        else:
            ops += (replace(op, regions=tuple(map(_side_by_side, op.regions))) if op.regions else op for op in run)
    return Block(block.args, tuple(ops))


def _is_wide_quantile(op: Op) -> bool:
    return op.opcode == "random_normal" and isinstance(op.operands[0].type, Vec) and dtype_of(op.operands[0].type) is u64


def _together(run: Sequence[Op]) -> list[Op]:
    """The ops of a run, joined as far as they are not too wide. None depends on another: words come of integers."""
    builder = Builder(run[0].span)
    while run:
        widths = [op.operands[0].type.width for op in run]  # type: ignore[union-attr]
        count = 1
        while count < len(run) and sum(widths[: count + 1]) <= _TOGETHER:
            count += 1
        first, run = run[:count], run[count:]
        if count == 1:
            builder.append(first[0])
            continue
        words = [builder.op("extract", op.operands[0], lane=lane) for op, width in zip(first, widths, strict=False) for lane in range(width)]
        values = builder.op("random_normal", builder.op("pack", *words))
        place = 0
        for op, width in zip(first, widths, strict=False):
            lanes = tuple(builder.op("extract", values, lane=place + lane) for lane in range(width))
            builder.append(Op("pack", lanes, op.results, NO_ATTRS, (), op.span))
            place += width
    return builder.ops


# -- neighbours share blocks --------------------------------------------------------------------------------------------

_WORDS = {"random_u32": 4, "random_u64": 2}
"""How many numbers a block has."""


def _by_blocks(builder: Builder, op: Op, made: dict[Value, Op], known: dict[Value, int], gpu: bool) -> Value | None:
    """The vec's words from its blocks; None where that is not possible."""
    of_block, width = _WORDS[op.opcode], op.results[0].type.width  # type: ignore[union-attr]
    first = _first_of_neighbours(op.operands[1], made)
    if first is None or width % of_block:
        return None
    uniform = [_scalar(v, made) for v in (op.operands[0], *op.operands[2:])]
    if None in uniform:
        return None
    key, *high = (v for v in uniform if v is not None)
    blocks = _scalar_blocks if gpu else _vector_blocks
    if known.get(first, 1) % of_block == 0:
        return blocks(builder, op.opcode, width, key, first, high)
    start = builder.op("eq", builder.op("and", first, builder.splat(of_block - 1, first)), builder.splat(0, first))
    return builder.if_(
        start, lambda inner: [blocks(inner, op.opcode, width, key, first, high)], lambda inner: [_one_by_one(inner, op, gpu)]
    )[0]  # fmt: skip


def _vector_blocks(builder: Builder, opcode: str, width: int, key: Value, first: Value, high: Sequence[Value]) -> Value:
    """The numbers from the index `first` on, which begins a block: all blocks at once, by vectors of a CPU."""
    of_block = _WORDS[opcode]
    count = width // of_block
    block = _block_number(builder, of_block, first)
    if count > 1:
        numbers = builder.op("pack", *(builder.const(k, u64) for k in range(count)))
        block = builder.add(builder.op("broadcast", block, width=count), numbers)
    return _interleaved(builder, _block_words(builder, of_block, key, block, high), count)


def _scalar_blocks(builder: Builder, opcode: str, width: int, key: Value, first: Value, high: Sequence[Value]) -> Value:
    """The same, block by block, as a thread of a GPU does it."""
    of_block = _WORDS[opcode]
    start = _block_number(builder, of_block, first)
    blocks = [builder.add(start, builder.const(k, u64)) if k else start for k in range(width // of_block)]
    return builder.op("pack", *(word for block in blocks for word in _block_words(builder, of_block, key, block, high)))


def _block_number(builder: Builder, of_block: int, first: Value) -> Value:
    return builder.op("shr", builder.cast(first, u64), builder.const(of_block.bit_length() - 1, u64))


def _block_words(builder: Builder, of_block: int, key: Value, block: Value, high: Sequence[Value]) -> Sequence[Value]:
    """The numbers of a block, or of a vec of blocks."""
    t = BuilderTerms(builder, block)
    upper = builder.like(high[0] if high else builder.const(0, u64), block)
    words = philox(t, builder.like(key, block), counter_low(t, block, bool(high)), upper)
    return words if of_block == 4 else [joined(t, words[0], words[1]), joined(t, words[2], words[3])]


def _interleaved(builder: Builder, parts: Sequence[Value], count: int) -> Value:
    """Element k of every part, for each k in turn."""
    if count == 1:
        return builder.op("pack", *parts)
    if len(parts) == 2:
        return _zipped(builder, parts[0], parts[1], count)
    return _zipped(builder, _zipped(builder, parts[0], parts[2], count), _zipped(builder, parts[1], parts[3], count), 2 * count)


def _zipped(builder: Builder, a: Value, b: Value, count: int) -> Value:
    return builder.op("rearrange", a, b, lanes=tuple(lane for k in range(count) for lane in (k, count + k)))


def _scalar(value: Value, made: dict[Value, Op]) -> Value | None:
    """The number that all elements of a vec are."""
    op = made.get(value)
    return op.operands[0] if op is not None and op.opcode == "broadcast" else None


def _first_of_neighbours(value: Value, made: dict[Value, Op]) -> Value | None:
    """The first element of a vec whose elements are x, x + 1, x + 2, …"""
    op = made.get(value)
    while op is not None and op.opcode == "cast" and _keeps_neighbours(op):
        op = made.get(op.operands[0])
    if op is None or op.opcode != "add":
        return None
    for base, numbers in (op.operands, op.operands[::-1]):
        first, row = _scalar(base, made), made.get(numbers)
        if first is not None and row is not None and row.opcode == "pack" and _counts(row, made):
            return first
    return None


def _keeps_neighbours(op: Op) -> bool:
    """A change of sign alone: wider integers would tell where the sum of narrow ones wraps."""
    before: DType = dtype_of(op.operands[0].type)
    return before.is_int and before.bits == dtype_of(op.results[0].type).bits


def _counts(op: Op, made: dict[Value, Op]) -> bool:
    ops = [made.get(v) for v in op.operands]
    return all(o is not None and o.opcode == "const" and o.attrs["value"] == k for k, o in enumerate(ops))
