"""One block of packed weights times rounded activations, as vectors of a CPU. In: a builder at the thread stage; out: ops on vecs.

A format says where its bytes lie: `pieces` gives vecs of 16 numbers of eight bits, each with the place of its activations and the sub-block whose scale
it has. Numbers that are smaller by a constant than what the format means are put right by the sums of the activations, which the rounding kernel left.

    q4_k   byte & 15, byte >> 4 : two vecs of 16 numbers from 0 to 15, of two sub-blocks
    q5_0   the fifth bits as a mask of those that are 0 : (byte & 15) | mask << 4 is the number less 16
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright.base.dtypes import DType, by_name, f16, f32, i8, i32, u8, u16, u32
from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of

BYTES = 16
"""Numbers of a piece."""


@record(identity=True)
class Piece:
    """16 numbers of a block."""

    sub: int
    """The sub-block they belong to."""
    place: int
    """Where their activations begin in the block."""
    numbers: Value


@record
class PackedForm:
    """What sums of a format are made of."""

    dtype: DType
    chunks: int
    """Parts of a block without sub-blocks that are unpacked together."""
    subs: int
    """Sub-blocks with scales of their own; 1 where the block has one scale."""
    less: int
    """By how much the numbers of pieces are smaller than the weights, in the weight's steps."""
    minimum: bool
    """Whether weights have a minimum, which the sums of the activations are multiplied with."""

    @property
    def positive(self) -> bool:
        """Whether the numbers of pieces are never negative."""
        return self.dtype.bits == 4 if self.dtype.scale else self.dtype.name in ("q4_0", "q4_1", "q4_k", "q6_k")

    @property
    def has_sums(self) -> bool:
        """Whether the sums of activations are needed."""
        return bool(self.less) or self.minimum or self.dtype.zero_point


def form_of(dtype: DType) -> PackedForm:
    """How the sums of a format are computed."""
    if dtype.scale:
        return PackedForm(dtype, dtype.block // (2 * BYTES if dtype.bits == 4 else BYTES), 1, -8 if dtype.bits == 4 and not dtype.zero_point else 0, False)
    chunks, subs, less, minimum = _FORMS[dtype.name]
    return PackedForm(dtype, chunks, subs, less, minimum)


_FORMS = {
    "q4_0": (1, 1, -8, False), "q4_1": (1, 1, 0, True), "q5_0": (1, 1, 0, False), "q5_1": (1, 1, 16, True), "q8_0": (1, 1, 0, False),
    "q4_k": (0, 8, 0, True), "q5_k": (0, 8, 16, True), "q6_k": (0, 16, -32, False),
}  # fmt: skip


class BlockBytes:
    """One block of one row: its bytes, and what they mean."""

    def __init__(self, b: Builder, weights: Value, place: Sequence[Value], dtype: DType, arm: bool = False) -> None:
        self.b, self.weights, self.at, self.dtype, self.arm = b, weights, tuple(place), dtype, arm
        self.loaded: dict[tuple[int, int], Value] = {}

    # -- bytes --------------------------------------------------------------------------------------------------------

    def byte(self, offset: int) -> Value:
        return self.b.op("load", self.weights, *self.at, self.b.index(offset), anchored=True)

    def bytes(self, offset: int, count: int = BYTES) -> Value:
        if (offset, count) not in self.loaded:
            self.loaded[offset, count] = self.b.op("load", self.weights, *self.at, self.b.index(offset), width=count, unaligned=True, anchored=True)
        return self.loaded[offset, count]

    def word(self, offset: int, dtype: DType) -> Value:
        """Bytes that follow each other, as one whole number."""
        found = self.b.cast(self.byte(offset), dtype)
        for position in range(1, dtype.itemsize):
            byte = self.b.cast(self.byte(offset + position), dtype)
            found = self.b.op("or", found, self.b.op("shl", byte, self.b.const(8 * position, dtype)))
        return found

    def logic(self, opcode: str, value: Value, number: int) -> Value:
        return self.b.op(opcode, value, self.b.splat(number, value))

    def low(self, value: Value) -> Value:
        return self.b.bitcast(self.logic("and", value, 15), i8)

    def high(self, value: Value) -> Value:
        return self.b.bitcast(self.logic("shr", value, 4), i8)

    # -- scales -------------------------------------------------------------------------------------------------------

    def scale_bits(self) -> Value:
        """The block's factor as it lies there: u16 for f16, u32 for f32."""
        if self.dtype.scale and by_name(self.dtype.scale) is f32:
            return self.word(0, u32)
        return self.word(208 if self.dtype.name == "q6_k" else 0, u16)

    def minimum_bits(self) -> Value:
        return self.word(2, u16)

    def zero_point(self) -> Value:
        """How much the numbers of pieces are larger than the weights; i32."""
        found = self.b.cast(self.byte(by_name(self.dtype.scale).itemsize), i32)
        return self.b.sub(found, self.b.const(128, i32)) if self.dtype.bits == 8 else found

    def sub_scales(self) -> tuple[Value, Value | None]:
        """The scales of the sub-blocks, vec<u8, 8> or vec<i8, 16>, and the factors of their minima."""
        b = self.b
        if self.dtype.name == "q6_k":
            return b.bitcast(self.bytes(192), i8), None
        one, two, three = (self.word(offset, u32) for offset in (4, 8, 12))

        def bits(value: Value, shift: int, mask: int) -> Value:
            shifted = b.op("shr", value, b.const(shift, u32)) if shift else value
            return b.op("and", shifted, b.const(mask * 0x01010101, u32))

        def eight(first: Value, second: Value) -> Value:
            return b.op("rearrange", *(b.op("from_bits", word, dtype=u8) for word in (first, second)), lanes=tuple(range(8)))

        # The upper two bits of the first eight bytes belong to the last four scales.
        scales = eight(bits(one, 0, 63), b.op("or", bits(three, 0, 15), bits(one, 2, 48)))
        minima = eight(bits(two, 0, 63), b.op("or", bits(three, 4, 15), bits(two, 2, 48)))
        return scales, minima

    # -- numbers ------------------------------------------------------------------------------------------------------

    def pieces(self, chunk: int) -> Iterator[Piece]:
        """The numbers of one part of the block."""
        if self.dtype.scale:
            return self._group(chunk)
        found: Iterator[Piece] = getattr(self, f"_{self.dtype.name}")(chunk)
        return found

    def _nibbles(self, offset: int) -> Iterator[Piece]:
        packed = self.bytes(offset)
        yield Piece(0, 0, self.low(packed))
        yield Piece(0, BYTES, self.high(packed))

    def _q4_0(self, chunk: int) -> Iterator[Piece]:
        return self._nibbles(2)

    def _q4_1(self, chunk: int) -> Iterator[Piece]:
        return self._nibbles(4)

    def _fives(self, bits: int, offset: int) -> Iterator[Piece]:
        return self.fives(self.b.op("not", self.bytes(bits)), 0, offset)  # more than the four that count: whole registers are cheaper

    def fives(self, absent: Value, place: int, offset: int) -> Iterator[Piece]:
        """Numbers of five bits less 16. The fifth bits, inverted, lie in a vec of bytes from `place` on."""
        b, packed = self.b, self.bytes(offset)
        for half in range(2):
            lanes = b.op("rearrange", absent, lanes=tuple(place + 2 * half + lane // 8 for lane in range(BYTES)))
            yield Piece(0, BYTES * half, self.with_fifth(packed, half, b.op("ne", b.op("and", lanes, self.bit_of_lane()), b.splat(0, lanes))))

    def bit_of_lane(self) -> Value:
        lanes = self.b.op("lane_ids", dtype=u8, width=BYTES)
        return self.b.op("shl", self.b.splat(1, lanes), self.logic("and", lanes, 7))

    def with_fifth(self, packed: Value, half: int, absent: Value) -> Value:
        """Numbers of five bits less 16: halves of bytes whose fifth bit is missing where the mask holds."""
        b = self.b
        mask = b.select(absent, b.splat(255, packed), b.splat(0, packed))
        if half:
            return b.bitcast(b.op("or", self.logic("and", mask, 0xF0), self.logic("shr", packed, 4)), i8)
        return b.bitcast(b.op("or", self.logic("and", packed, 15), self.logic("shl", mask, 4)), i8)

    def _q5_0(self, chunk: int) -> Iterator[Piece]:
        return self._fives(2, 6)

    def _q5_1(self, chunk: int) -> Iterator[Piece]:
        return self._fives(4, 8)

    def _q8_0(self, chunk: int) -> Iterator[Piece]:
        for half in range(2):
            yield Piece(0, BYTES * half, self.b.bitcast(self.bytes(2 + BYTES * half), i8))

    # -- numbers of blocks with sub-blocks ------------------------------------------------------------------------------

    def pair(self, eight: int, pair: int) -> list[Piece]:
        """The numbers of two neighbouring sub-blocks out of eight, those of the same place in bytes together."""
        if self.dtype.name == "q6_k":
            return [self._q6_k(eight, pair, g) for g in range(2)]
        found = []
        for g in range(2):
            packed = self.bytes((16 if self.dtype.name == "q4_k" else 48) + 32 * pair + BYTES * g)
            if self.dtype.name == "q4_k":
                numbers = [self.low(packed), self.high(packed)]
            else:
                numbers = [self.with_fifth(packed, half, self.absent(g, 2 * pair + half)) for half in range(2)]
            found += [Piece(2 * pair + half, 64 * pair + 32 * half + BYTES * g, numbers[half]) for half in range(2)]
        return found

    def absent(self, g: int, bit: int) -> Value:
        fifths = self.b.op("not", self.bytes(16 + BYTES * g))
        return self.b.op("ne", self.logic("and", fifths, 1 << bit), self.b.splat(0, fifths))

    def _q6_k(self, n: int, quarter: int, g: int) -> Piece:
        b, packed, upper = self.b, self.bytes(64 * n + 32 * (quarter % 2) + BYTES * g), self.bytes(128 + 32 * n + BYTES * g)
        key = 128 + 32 * n + BYTES * g, 2 + quarter % 2
        if key not in self.loaded:  # the bits of two quarters, each in its own half
            self.loaded[key] = self.logic("and", self.logic("shr", upper, 2) if quarter % 2 else upper, 0x33)
        bits = self.loaded[key]
        low, parts = quarter < 2, (packed, bits) if quarter < 2 else (bits, packed)
        found = b.op("join_halves", *parts, side="low" if low else "high", arm=True) if self.arm else b.op("join_halves", *parts, side="low" if low else "high")
        sub = 8 * n + 2 * quarter + g
        return Piece(sub, BYTES * sub, b.bitcast(found, i8))

    def _group(self, chunk: int) -> Iterator[Piece]:
        dtype = self.dtype
        packed = self.bytes(by_name(dtype.scale).itemsize * (1 + dtype.zero_point) + BYTES * chunk)
        if dtype.bits == 4:
            # The activations lie with all even places first.
            yield Piece(0, BYTES * chunk, self.low(packed))
            yield Piece(0, dtype.block // 2 + BYTES * chunk, self.high(packed))
        else:
            yield Piece(0, BYTES * chunk, self.b.bitcast(self.logic("xor", packed, 0x80), i8))


class FourBlocks:
    """The blocks of four rows: their numbers, and their factors as one vec."""

    def __init__(self, b: Builder, blocks: Sequence[BlockBytes]) -> None:
        self.b, self.blocks = b, blocks

    def pieces(self, chunk: int) -> list[list[Piece]]:
        return [list(block.pieces(chunk)) for block in self.blocks]

    def scale_bits(self) -> Value:
        return self.b.op("pack", *(block.scale_bits() for block in self.blocks))

    def minimum_bits(self) -> Value:
        return self.b.op("pack", *(block.minimum_bits() for block in self.blocks))


class FourFives(FourBlocks):
    """Blocks of `q5_0` or `q5_1`: the first eight bytes of two blocks are one vec, from which fifth bits and factors are taken."""

    HEAD = 8

    def __init__(self, b: Builder, blocks: Sequence[BlockBytes]) -> None:
        super().__init__(b, blocks)
        self.arm = blocks[0].arm
        heads = [block.bytes(0, self.HEAD) for block in blocks]
        self.pairs = [b.op("rearrange", *heads[at : at + 2], lanes=tuple(range(2 * self.HEAD))) for at in (0, 2)]
        self.bits = 2 if blocks[0].dtype.name == "q5_0" else 4

    def pieces(self, chunk: int) -> list[list[Piece]]:
        absent = [self.b.op("not", pair) for pair in self.pairs]
        return [list(block.fives(absent[r // 2], self.HEAD * (r % 2) + self.bits, self.bits + 4)) for r, block in enumerate(self.blocks)]

    def words(self, offset: int) -> Value:
        """Two bytes of each head, as vec<u16, 4>."""
        lanes = tuple(self.HEAD * r + offset + byte for r in range(4) for byte in range(2))
        if self.arm:
            # LLVM would take several instructions for it.
            both = self.b.op("rearrange", *self.pairs, lanes=lanes + lanes, table=True)
            return self.b.multi("split", self.b.op("as_lanes", both, dtype=u16))[0]
        return self.b.op("as_lanes", self.b.op("rearrange", *self.pairs, lanes=lanes), dtype=u16)

    def scale_bits(self) -> Value:
        return self.words(0)

    def minimum_bits(self) -> Value:
        return self.words(2)


def four_blocks(b: Builder, blocks: Sequence[BlockBytes]) -> FourBlocks:
    """The blocks of four rows, as the format allows."""
    return FourFives(b, blocks) if blocks[0].dtype.name in ("q5_0", "q5_1") else FourBlocks(b, blocks)


def as_float(b: Builder, bits: Value) -> Value:
    """Factors as f32, of a vec or a scalar of their bits."""
    return b.bitcast(bits, f32) if dtype_of(bits.type) is u32 else b.cast(b.bitcast(bits, f16), f32)
