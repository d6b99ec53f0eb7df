"""Pass: random numbers become arithmetic.

    %w = random_u32 %key, %index   ->   ten rounds of Philox on the counter index // 4, and a select of the word index % 4

In: any kernel. Out: the same kernel with no op of the group of random numbers left. The steps are those of `ir.random_numbers`, which the
emulator executes too.

One block of Philox has four words. Where the index is a vec of neighbours (the usual loop over consecutive elements) that begins with the
first word of a block, every block is computed once for all of its words: a quarter of the work. Where the beginning is not known to be
such a place, a branch asks.

Runs late, beside expand_math and before expand_casts: earlier passes share and move whole draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.analysis import divisors
from tilewright.base.dtypes import DType, i32, i64, u32, u64
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Stage, Value, walk
from tilewright.ir.random_numbers import OPCODES, counter_low, joined, philox, steps
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import Vec, dtype_of
from tilewright.passes.late.math_terms import Terms

_FEW = 4
"""Elements that share the branch around what few of them need."""


class BuilderTerms(Terms):
    """Terms of IR, as `ir.random_numbers` asks for them."""

    def wide_product(self, a: Value, factor: int) -> tuple[Value, Value]:
        wide = self.op("mul", self.cast(a, u64), factor)
        # LLVM would compute with whole products instead of their halves, were the lower one taken from there in a vector.
        low = self.op("mul", a, factor) if isinstance(a.type, Vec) else self.cast(wide, u32)
        return low, self.cast(self.op("shr", wide, 32), u32)

    def where_any(self, condition: Value, then: Callable[[BuilderTerms, Value], Value], operand: Value, otherwise: Value) -> Value:
        width = condition.type.width if isinstance(condition.type, Vec) else 1
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

    def signed(self, a: Value) -> Value:
        return self.builder.bitcast(a, i32 if dtype_of(a.type) is u32 else i64)


def expand_random(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with every random op expanded."""
    if not any(op.opcode in OPCODES for op in walk(kernel.body)):
        return kernel
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
        if target.is_gpu and op.opcode == "random_normal" and isinstance(op.operands[0].type, Vec):
            # It branches: lane by lane.
            lanes = [builder.op("extract", op.operands[0], lane=lane) for lane in range(op.operands[0].type.width)]
            return (builder.op("pack", *(steps(BuilderTerms(builder, lane), op.opcode, [lane], dtype_of(lane.type)) for lane in lanes)),)
        return (_one_by_one(builder, op),)

    return rewrite(kernel, replacement)


def _one_by_one(builder: Builder, op: Op) -> Value:
    first = op.operands[0]
    return steps(BuilderTerms(builder, first), op.opcode, op.operands, dtype_of(first.type))


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
        start, lambda inner: [blocks(inner, op.opcode, width, key, first, high)], lambda inner: [_one_by_one(inner, op)]
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
