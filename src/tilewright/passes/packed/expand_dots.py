"""`packed_dots` become loops over blocks on vectors of bytes. In and out: a thread-stage kernel for a CPU.

    %s0, %s1, … = packed_dots %w, %x.q, %x.scale, … {rows, columns}
    ->  for %b in 0..blocks carrying vecs of sums:
          bytes of each row -> vecs of 16 numbers (`block_dots.py`);  dot_lanes with the activations, which all rows share
          four rows: their four vecs of lanes are added in pairs to one vec, a lane for each row, and scaled together
          sub-blocks with scales: the lanes of four of them are added in pairs to one vec, a lane for each, times a vec of their scales

Sums inside a block are of integers, and exact. Each block is one multiplication and addition of f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.base.dtypes import by_name, f32, i16, i32
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops_lanes import packed_operands
from tilewright.ir.rewrite import rewrite_block
from tilewright.ir.types import Tensor
from tilewright.passes.common.dot_units import dot_unit
from tilewright.passes.packed.block_dots import BYTES, BlockBytes, FourBlocks, Piece, as_float, form_of, four_blocks

LANES = 4
SIDE_BY_SIDE = {"q6_k": 2, "q5_k": 2}
"""Rows of four that are unpacked together, where not all of them."""
LINE = 64
"""Bytes that a CPU fetches together."""


def expand_dots(kernel: Kernel, target: Target) -> Kernel:
    """The kernel without `packed_dots`; the very same one where there are none."""
    if not any(op.opcode == "packed_dots" for op in walk(kernel.body)):
        return kernel

    def one(b: Builder, op: Op) -> Sequence[Value] | None:
        return _RowDots(b, op, target).run() if op.opcode == "packed_dots" else None

    return replace(kernel, body=Block(kernel.body.args, rewrite_block(kernel.body, one, {}).ops))


class _RowDots:
    """One op: some rows of weights times some rows of activations."""

    def __init__(self, b: Builder, op: Op, target: Target) -> None:
        self.b, self.form = b, form_of(by_name(str(op.attrs["format"])))
        self.arm = target.triple.startswith("aarch64")
        self.unit = dot_unit(target)
        operands = packed_operands(op.operands, op.attrs)
        self.weights, self.numbers, self.scale, self.sums = operands.tensors
        self.rows, self.columns = operands.rows, operands.columns

    def run(self) -> list[Value]:
        tensor = self.weights.type
        assert isinstance(tensor, Tensor)
        b = self.b
        together = len(self.rows) == LANES and self.scale is not None
        count = len(self.columns) if together else len(self.rows) * len(self.columns)
        zero = b.op("broadcast", b.const(0.0, f32), width=LANES)

        def step(inner: Builder, index: Value, *sums: Value) -> list[Value]:
            if self.scale is None:
                return _PlainStep(self, inner, index).add(list(sums))
            return _BlockStep(self, inner, index).add(list(sums), together)

        ends = b.for_(b.index(0), b.index(tensor.shape[-2]), b.index(1), [zero] * count, step, name="block")
        if together:
            return [b.op("extract", ends[c], lane=r) for r in range(LANES) for c in range(len(self.columns))]
        return [b.op("fold", end, kind="add") for end in ends]


class _BlockStep:
    """What one block adds to the sums."""

    def __init__(self, dots: _RowDots, b: Builder, index: Value) -> None:
        self.dots, self.b, self.form, self.index = dots, b, dots.form, index
        self.blocks = [BlockBytes(b, dots.weights, (*row, index), self.form.dtype, dots.arm) for row in dots.rows]
        if len(dots.rows) == LANES:
            self.fetch_next()

    def fetch_next(self) -> None:
        """What the next four rows read begins where the last of these ends: rows that are read side by side are no stream that a CPU sees by itself."""
        b, tensor, size = self.b, self.dots.weights.type, LANES * self.form.dtype.block_bytes
        assert isinstance(tensor, Tensor)
        ahead = b.add(b.index(tensor.shape[-2]), b.mul(self.index, b.index(LANES)))
        for line in range(0, size, LINE):
            b.multi("prefetch", self.dots.weights, *self.dots.rows[-1], ahead, b.index(line))

    # -- activations --------------------------------------------------------------------------------------------------

    def x(self, column: int, place: int) -> Value:
        return self.b.op("load", self.dots.numbers, *self.dots.columns[column], self.index, self.b.index(place), width=BYTES)

    def x_scale(self, column: int) -> Value:
        assert self.dots.scale is not None
        return self.b.op("load", self.dots.scale, *self.dots.columns[column], self.index)

    def x_sum(self, column: int) -> Value:
        """The sum of a block's activations, i32."""
        assert self.dots.sums is not None
        return self.b.cast(self.b.op("load", self.dots.sums, *self.dots.columns[column], self.index, self.b.index(0)), i32)

    def x_sums(self, column: int, first: int) -> Value:
        """Eight sums of sub-blocks, i16."""
        assert self.dots.sums is not None
        return self.b.op("load", self.dots.sums, *self.dots.columns[column], self.index, self.b.index(first), width=8)

    # -- sums of lanes ------------------------------------------------------------------------------------------------

    def pairs(self, one: Value, two: Value) -> Value:
        """Neighbouring lanes added: those of the first vec, then those of the second."""
        b = self.b
        even, odd = (b.op("rearrange", one, two, lanes=tuple(range(start, 2 * LANES, 2))) for start in (0, 1))
        return b.add(even, odd)

    def four(self, lanes: Sequence[Value]) -> Value:
        """Four vecs, each as the sum of its lanes."""
        return self.pairs(self.pairs(*lanes[:2]), self.pairs(*lanes[2:]))

    def halves(self, wide: Value) -> Value:
        low, high = self.b.multi("split", wide)
        return self.b.add(low, high)

    def dot(self, total: Value | None, numbers: Value, x: Value) -> Value:
        b, unit = self.b, self.dots.unit
        start = total if total is not None else b.op("broadcast", b.const(0, i32), width=LANES)
        if not unit:
            return b.op("dot_lanes", start, numbers, x)
        if unit != "sdot" and self.form.positive:
            return b.op("dot_lanes", start, numbers, x, unit=unit, positive=True)
        return b.op("dot_lanes", start, numbers, x, unit=unit)

    # -- one block ----------------------------------------------------------------------------------------------------

    def add(self, sums: list[Value], together: bool) -> list[Value]:
        if self.form.subs > 1:
            return self.sub_blocks(sums)
        totals: dict[tuple[int, int], Value] = {}
        four = four_blocks(self.b, self.blocks) if together else None
        for chunk in range(self.form.chunks):
            pieces = four.pieces(chunk) if four else [list(block.pieces(chunk)) for block in self.blocks]
            for c in range(len(self.dots.columns)):
                for number, first in enumerate(pieces[0]):
                    x = self.x(c, first.place)
                    for r in range(len(self.blocks)):
                        totals[r, c] = self.dot(totals.get((r, c)), pieces[r][number].numbers, x)
        return self.rows_together(four, sums, totals) if four else self.rows_apart(sums, totals)

    def rows_together(self, four: FourBlocks, sums: list[Value], totals: dict[tuple[int, int], Value]) -> list[Value]:
        """Four rows: a lane of the sums for each."""
        b, form = self.b, self.form
        factor = as_float(b, four.scale_bits())
        low = as_float(b, four.minimum_bits()) if form.minimum else None
        zero = b.op("pack", *(block.zero_point() for block in self.blocks)) if form.dtype.zero_point else None
        found = []
        for c, before in enumerate(sums):
            whole = self.four([totals[r, c] for r in range(LANES)])
            if form.less:
                whole = b.add(whole, b.like(b.mul(self.x_sum(c), b.const(form.less, i32)), whole))
            if zero is not None:
                whole = b.sub(whole, b.mul(zero, b.like(self.x_sum(c), zero)))
            scale = self.x_scale(c)
            after = b.fma(b.cast(whole, f32), b.mul(factor, b.like(scale, factor)), before)
            if low is not None:
                after = b.fma(low, b.like(b.mul(b.cast(self.x_sum(c), f32), scale), low), after)
            found.append(after)
        return found

    def rows_apart(self, sums: list[Value], totals: dict[tuple[int, int], Value]) -> list[Value]:
        """Any number of rows: lanes are added up after the last block."""
        b, form = self.b, self.form
        found = []
        count = len(self.dots.columns)
        for position, before in enumerate(sums):
            r, c = divmod(position, count)
            block, whole = self.blocks[r], totals[r, c]
            rest = b.mul(self.x_sum(c), b.const(form.less, i32)) if form.less else None
            if form.dtype.zero_point:
                rest = b.sub(b.const(0, i32), b.mul(self.x_sum(c), block.zero_point()))
            if rest is not None:
                zeros = b.op("broadcast", b.const(0, i32), width=LANES)
                whole = b.add(whole, b.op("insert", zeros, rest, lane=0))
            scale = self.x_scale(c)
            after = b.fma(b.cast(whole, f32), b.like(b.mul(as_float(b, block.scale_bits()), scale), before), before)
            if form.minimum:
                low = b.mul(as_float(b, block.minimum_bits()), b.mul(b.cast(self.x_sum(c), f32), scale))
                after = b.add(after, b.op("insert", b.op("broadcast", b.const(0.0, f32), width=LANES), low, lane=0))
            found.append(after)
        return found

    def sub_blocks(self, sums: list[Value]) -> list[Value]:
        """Sub-blocks with scales. Two sums go on from one sub-block to the next but one, so that few begin at zero: with the running sums A, the scaled sum
        s0*a0 + s2*a2 + s4*a4 + s6*a6 is (s0 - s2)*A0 + (s2 - s4)*A2 + (s4 - s6)*A4 + s6*A6. Integers wrap, so that it is exact."""
        b, count = self.b, len(self.dots.columns)
        eights = self.form.subs // 8
        scales = [block.sub_scales() for block in self.blocks]
        whole: dict[tuple[int, int], Value] = {}
        # As many rows side by side as registers hold what is unpacked of them.
        width = SIDE_BY_SIDE.get(self.form.dtype.name, len(self.blocks))
        for eight in range(eights):
            for first in range(0, len(self.blocks), width):
                rows = range(first, min(first + width, len(self.blocks)))
                running: dict[tuple[int, int, int], Value] = {}
                joined: dict[tuple[int, int], list[Value]] = {}
                wide = {r: self.steps(scales[r][0], eight) for r in rows}
                for pair in range(4):
                    self.pair(eight, pair, rows, running)
                    for r in rows:
                        for c in range(count):
                            joined.setdefault((r, c), []).append(self.pairs(running[r, c, 0], running[r, c, 1]))
                            if pair % 2:
                                term = b.mul(self.pairs(*joined[r, c][-2:]), wide[r][pair // 2])
                                whole[r, c] = term if (r, c) not in whole else b.add(whole[r, c], term)
        return self.sub_blocks_scaled(sums, whole, scales)

    def pair(self, eight: int, pair: int, rows: Sequence[int], running: dict[tuple[int, int, int], Value]) -> None:
        """Add two sub-blocks to the two running sums of each row and column."""
        for pieces in zip(*(self.blocks[r].pair(eight, pair) for r in rows), strict=True):
            for c in range(len(self.dots.columns)):
                x = self.x(c, pieces[0].place)
                for r, piece in zip(rows, pieces, strict=True):
                    key = r, c, piece.sub % 2
                    running[key] = self.dot(running.get(key), piece.numbers, x)

    def steps(self, scales: Value, eight: int) -> list[Value]:
        """By how much the scales of eight sub-blocks are larger than those of the next but one, as two vecs of i32."""
        b = self.b
        part = scales if self.form.subs == 8 else b.op("rearrange", scales, lanes=tuple(range(8 * eight, 8 * eight + 8)))
        own = b.cast(part, i16)
        after = b.op("rearrange", own, b.splat(0, own), lanes=(2, 3, 4, 5, 6, 7, 8, 9))
        return [b.cast(half, i32) for half in b.multi("split", b.sub(own, after))]

    def sub_blocks_scaled(self, sums: list[Value], whole: dict[tuple[int, int], Value], scales: list[tuple[Value, Value | None]]) -> list[Value]:
        b, form, count = self.b, self.form, len(self.dots.columns)
        together = len(self.blocks) == LANES
        found = []
        factors = self.factors("scale_bits", together)
        minima = self.factors("minimum_bits", together) if form.minimum else []
        for c in range(count):
            scale = self.x_scale(c)
            totals, lows = [], []
            for r in range(len(self.blocks)):
                total = whole[r, c]
                if form.less:
                    total = b.add(total, self.times(self.weighted(scales[r][0], c), form.less))
                totals.append(total)
                if form.minimum:
                    lows.append(self.weighted(scales[r][1], c))
            if together:
                totals, lows = [self.four(totals)], [self.four(lows)] if lows else []
            for r, total in enumerate(totals):
                before = sums[c if together else r * count + c]
                after = b.fma(b.cast(total, f32), b.mul(factors[r], b.like(scale, factors[r])), before)
                if lows:
                    after = b.fma(b.cast(lows[r], f32), b.mul(minima[r], b.like(b.op("neg", scale), minima[r])), after)
                found.append(after)
        return found if together else [found[c * len(self.blocks) + r] for r in range(len(self.blocks)) for c in range(count)]

    def factors(self, name: str, together: bool) -> list[Value]:
        """Factors of the blocks, in the lanes of one vec or each in all lanes of its own."""
        b = self.b
        bits = [getattr(block, name)() for block in self.blocks]
        if together:
            return [as_float(b, b.op("pack", *bits))]
        return [b.op("broadcast", as_float(b, one), width=LANES) for one in bits]

    def times(self, value: Value, factor: int) -> Value:
        return self.b.mul(value, self.b.splat(factor, value))

    def weighted(self, weights: Value | None, column: int) -> Value:
        """The sums of activations times weights of eight bits: four lanes whose sum is meant."""
        b, total = self.b, None
        assert weights is not None
        for first in range(0, self.form.subs, 8):
            part = weights if self.form.subs == 8 else b.op("rearrange", weights, lanes=tuple(range(first, first + 8)))
            products = b.mul(b.cast(b.cast(part, i16), i32), b.cast(self.x_sums(column, first), i32))
            total = self.halves(products) if total is None else b.add(total, self.halves(products))
        assert total is not None
        return total



class _PlainStep(_BlockStep):
    """What one block adds to the sums where activations are floats: numbers become f32, and the scale is that of their sums."""

    def quarters(self, wide: Value) -> list[Value]:
        """Vecs of four, of one of 16."""
        return [part for half in self.b.multi("split", wide) for part in self.b.multi("split", half)]

    def floats(self, column: int, place: int) -> list[Value]:
        b, dtype = self.b, self.form.dtype
        at = b.add(b.mul(self.index, b.index(dtype.block)), b.index(place))
        return self.quarters(b.cast(b.op("load", self.dots.numbers, *self.dots.columns[column], at, width=BYTES, unaligned=True), f32))

    def whole_numbers(self, numbers: Value) -> list[Value]:
        b, less = self.b, self.form.less
        return self.quarters(b.cast(b.add(numbers, b.splat(less, numbers)) if less else numbers, f32))

    def add(self, sums: list[Value], together: bool = False) -> list[Value]:
        b, form = self.b, self.form
        factors = [as_float(b, block.scale_bits()) for block in self.blocks]
        minima = [as_float(b, block.minimum_bits()) if form.minimum else None for block in self.blocks]
        if form.subs == 1:
            pieces = [[piece for chunk in range(form.chunks) for piece in block.pieces(chunk)] for block in self.blocks]
            return self.scaled(sums, pieces, [b.like(f, sums[0]) for f in factors], [m if m is None else b.like(m, sums[0]) for m in minima])
        scales = [block.sub_scales() for block in self.blocks]
        wide = [b.mul(b.cast(s, f32), b.op("broadcast", f, width=form.subs)) for (s, _), f in zip(scales, factors, strict=True)]
        low = [
            None if s is None or m is None else b.mul(b.cast(s, f32), b.op("broadcast", b.op("neg", m), width=form.subs))
            for (_, s), m in zip(scales, minima, strict=True)
        ]
        for eight in range(form.subs // 8):
            for pair in range(4):
                both = [block.pair(eight, pair) for block in self.blocks]
                for sub in (8 * eight + 2 * pair, 8 * eight + 2 * pair + 1):
                    pieces = [[piece for piece in found if piece.sub == sub] for found in both]
                    factor = [b.like(b.op("extract", w, lane=sub), sums[0]) for w in wide]
                    minimum = [None if m is None else b.like(b.op("extract", m, lane=sub), sums[0]) for m in low]
                    sums = self.scaled(sums, pieces, factor, minimum)
        return sums

    def scaled(self, sums: list[Value], pieces: list[list[Piece]], factors: list[Value], minima: list[Value | None]) -> list[Value]:
        """Add numbers times activations, times a factor for each row; and the activations times the row's minimum."""
        b, count = self.b, len(self.dots.columns)
        parts: dict[tuple[int, int], Value] = {}
        total: list[Value | None] = [None] * count
        for number, first in enumerate(pieces[0]):
            wide = [self.whole_numbers(row[number].numbers) for row in pieces]
            for c in range(count):
                x = self.floats(c, first.place)
                for r in range(len(pieces)):
                    for one, other in zip(wide[r], x, strict=True):
                        parts[r, c] = b.fma(one, other, parts[r, c]) if (r, c) in parts else b.mul(one, other)
                if minima[0] is not None:
                    for one in x:
                        before = total[c]
                        total[c] = one if before is None else b.add(before, one)
        found = []
        for position, before_sum in enumerate(sums):
            r, c = divmod(position, count)
            after = b.fma(parts[r, c], factors[r], before_sum)
            minimum, whole = minima[r], total[c]
            found.append(after if minimum is None or whole is None else b.fma(whole, minimum, after))
        return found
