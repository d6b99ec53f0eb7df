"""What attention does between its two products, whatever instructions compute those: scores, a running maximum, and weights.

In: a step's tile-stage ops and the sums of its first product, in registers. Out: thread-stage ops. Both lowerings of `lower_attention`'s
kernels have an `AttentionScores`. A thread has, of every 16 rows of its warp (a
band), two: in each, of every eight columns, two neighbours, as matrix instructions leave their sums. From those sums it makes scores, the maxima of
rows and, as powers of two, the weights, which are the first operand of the second product as they lie. What a score is
multiplied by goes into the exponent's factor: the sums themselves are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

from tilewright.base.dtypes import f32, i32, u32
from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value, walk
from tilewright.ir.types import Tile, dtype_of
from tilewright.passes.common.registers import Cell, Held, Mask, RegisterIndex, Registers
from tilewright.passes.to_thread.wgmma.epilogue import Epilogue

HUGE, TINY_FACTOR = 1e38, 2.0**-10
"""Where the maximum is beyond the first, scores differ by far more than exponents can tell, and this factor in place of log2(e)
keeps products finite."""


@record
class ScoreStep:
    """What one step along the keys does."""

    index: Value
    ops: tuple[Op, ...]
    scores: Op
    score: Value
    """What is exponentiated."""
    weighted: Op

    @property
    def key(self) -> Value:
        return self.scores.operands[1]

    @property
    def value(self) -> Value:
        return self.weighted.operands[1]


@record
class ScoreForm:
    """How a score comes from the first product: `times` a scalar, under a `mask`; or in another way (`plain` is False)."""

    plain: bool
    times: Value | None
    mask: Value | None
    divides: bool = False
    """`times` is what it is divided by."""


class AttentionScores:
    """The scores of one kernel, whose other ops `epilogue` lowers. `begin` must be called before anything is exponentiated."""

    factor: Value
    """What a unit is multiplied by to be a power of two."""

    def __init__(self, epilogue: Epilogue, keys: int) -> None:
        kernel = epilogue.kernel
        self.epilogue = epilogue
        self.bands = max(1, epilogue.tile.bands)
        """Times 16 rows of a warp. Values of a thread are those of the first band, then those of the next."""
        self.keys = keys
        """Of a step."""
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.walks = [op for op in walk(kernel.body) if op.opcode == "for" and op.attrs.get("role") in ("masked", "sum")]
        self.steps = [make_step(op) for op in self.walks]
        self.query_load = self.made[self.steps[-1].scores.operands[0]]
        self.dtype = dtype_of(self.query_load.results[0].type)
        self.exponential = next(op.opcode for op in self.steps[-1].ops if op.opcode in ("exp", "exp2"))

    def count(self, b: Builder, loop: Op) -> Value:
        """How many steps a loop along the keys has."""
        high = self.epilogue.env[loop.operands[1]]
        assert isinstance(high, Value)
        return b.cast(high, u32)

    def cells(self, b: Builder, values: Sequence[Value]) -> dict[Cell, Value]:
        """Accumulators as registers of a tile: two neighbours each."""
        each = len(values) // self.bands
        return {
            (2 * band + row, column): b.op("pack", *values[band * each + 4 * column + 2 * row :][:2])
            for band in range(self.bands) for column in range(each // 4) for row in range(2)
        }  # fmt: skip

    # -- scores and weights -------------------------------------------------------------------------------------------

    def bind(self, b: Builder, step: ScoreStep, t: Value) -> None:
        """What the scores need besides the product, loads above all: on their way while it runs."""
        self.epilogue.env[step.index] = b.cast(t, dtype_of(step.index.type))
        self.epilogue.window = self._window
        form = self.form(step)
        wanted = ([form.mask] if form.mask is not None else []) if form.plain else [step.score]
        late: set[Value] = {step.scores.results[0]}
        for op in needed_ops(step.ops, wanted):
            if op is step.scores or any(v in late for v in op.operands):
                late.update(op.results)
            elif op.results[0] not in (step.key, step.value):
                self.epilogue.ops(b, [op])
        self.epilogue.window = None

    @property
    def _window(self) -> tuple[range, range]:
        """All registers of the scores. Nothing is stored for rows beyond the edge, and keys beyond it are masked: loads need no
        condition."""
        return range(2 * self.bands), range(self.keys // 8)

    def form(self, step: ScoreStep) -> ScoreForm:
        value, mask = step.score, None
        op = self.made.get(value)
        if op is not None and op.opcode == "select" and self._constant(op.operands[2]) == -math.inf:
            value, mask = op.operands[1], op.operands[0]
            op = self.made.get(value)
        if value is step.scores.results[0]:
            return ScoreForm(True, None, mask)
        if op is not None and op.opcode in ("mul", "div"):
            for one, other in (op.operands, tuple(reversed(op.operands)))[: 2 if op.opcode == "mul" else 1]:
                times = self._scalar(step, other)
                if one is step.scores.results[0] and times is not None:
                    return ScoreForm(True, times, mask, op.opcode == "div")
        return ScoreForm(False, None, None)

    def _scalar(self, step: ScoreStep, value: Value) -> Value | None:
        """The number a tile repeats, the same in every step."""
        op = self.made.get(value)
        if op is None or op.opcode != "broadcast" or isinstance(op.operands[0].type, Tile):
            return None
        needed = needed_ops(step.ops, op.operands)
        return None if any(step.index in x.operands or x.regions for x in needed) else op.operands[0]

    def _constant(self, value: Value) -> object:
        op = self.made.get(value)
        while op is not None and op.opcode == "broadcast":
            op = self.made.get(op.operands[0])
        return op.attrs["value"] if op is not None and op.opcode == "const" else None

    def begin(self, b: Builder) -> None:
        """Compute `factor`: units are the products as they come where they are only scaled, by a factor that is not negative."""
        base = b.const(math.log2(math.e) if self.exponential == "exp" else 1.0, f32)
        times = self._times(b)
        # A factor of zero would make NaN of -inf.
        self.factor = base if times is None else b.op("max", b.mul(times, base), b.const(1e-37, f32))

    def signed_scale(self, b: Builder) -> Value | None:
        """What scores are multiplied by, where it may be negative: then queries change their signs with it."""
        times = self.form(self.steps[-1]).times
        return None if times is None or self._is_positive(times) else self._held(b, times)

    def query_signs(self, b: Builder) -> Value | None:
        """Bits that turn the signs of the queries in a register, where they may have to."""
        scale = self.signed_scale(b)
        if scale is None:
            return None
        sign = 0x80000000 if self.dtype is f32 else 0x80008000
        return b.select(b.op("lt", scale, b.const(0.0, f32)), b.const(sign, u32), b.const(0, u32))

    def _times(self, b: Builder) -> Value | None:
        """What scores are multiplied by, without its sign."""
        form = self.form(self.steps[-1])
        if form.times is None:
            return None
        held = self._held(b, form.times)
        held = b.op("div", b.const(1.0, f32), held) if form.divides else held
        return held if self._is_positive(form.times) else b.op("abs", held)

    def _held(self, b: Builder, scalar: Value) -> Value:
        self.epilogue.ops(b, [op for op in needed_ops(self.steps[-1].ops, [scalar]) if op.results[0] not in self.epilogue.env])
        held = self.epilogue.env[scalar]
        assert isinstance(held, Value)
        return held

    def units(self, b: Builder, step: ScoreStep, scores: Sequence[Value], limited: Value | None = None) -> dict[Cell, Value]:
        """Scores, up to a factor that is the same for all. `limited`: whether a mask can hide any, where that is not sure."""
        shape = (self.epilogue.tile.m, self.keys)
        cells = self.cells(b, scores)
        form = self.form(step)
        if not form.plain:
            self.epilogue.env[step.scores.results[0]] = Registers(shape, cells)
            self.epilogue.window = self._window
            late: set[Value] = {step.scores.results[0]}
            for op in needed_ops(step.ops, [step.score]):
                if op is not step.scores and any(v in late for v in op.operands):
                    self.epilogue.ops(b, [op])
                    late.update(op.results)
            self.epilogue.window = None
            return self.epilogue.registers(b, self.epilogue.env[step.score], shape).cells
        if form.mask is not None:
            held = self.epilogue.env[form.mask]

            def hidden(inner: Builder) -> list[Value]:
                mask = self._mask(inner, held)
                lowest = inner.op("broadcast", inner.const(-math.inf, f32), width=2)
                return [inner.select(mask[cell], value, lowest) for cell, value in cells.items()]

            masked = hidden(b) if limited is None else b.if_(limited, hidden, lambda inner: list(cells.values()))
            return dict(zip(cells, masked, strict=True))
        return cells

    def _mask(self, b: Builder, held: Held) -> dict[Cell, Value]:
        """A mask of scores. Limits are compared as the room that is left from the thread's first element on: small numbers, and
        constants on the other side."""
        shape = (self.epilogue.tile.m, self.keys)
        if not isinstance(held, Mask):
            return self.epilogue.registers(b, held, shape).cells
        rooms: list[tuple[Value, RegisterIndex]] = []
        for index, bound in held.edges:
            room = b.sub(bound, self.epilogue.first(b, index, (0, 0)))
            room = b.op("max", b.op("min", room, b.index(1 << 20)), b.index(-(1 << 20)))
            rooms.append((b.op("broadcast", b.cast(room, i32), width=2), index))
        cells: dict[Cell, Value] = {}
        for cell in self.epilogue.cells(shape):
            total: Value | None = None
            for room, index in rooms:
                start = sum(self.epilogue.layout.offset(a, cell[a]) * f for a, f in index.factors.items())
                beside = index.factors.get(1, 0)
                inside = b.op("lt", b.op("pack", b.const(start, i32), b.const(start + beside, i32)), room)
                total = inside if total is None else b.logical_and(total, inside)
            rest = Mask(shape, (), held.others)
            if held.others:
                other = self.epilogue.mask_cell(b, rest, cell)
                total = other if total is None else b.logical_and(total, other)
            assert total is not None
            cells[cell] = total
        return cells

    def _shift(self, b: Builder, most: Value) -> Value:
        """What is subtracted from the units of a row."""
        return b.select(b.op("eq", most, b.const(-math.inf, f32)), b.const(0.0, f32), most)

    def _power(self, b: Builder, most: Value, width: int = 1) -> Callable[[Value], Value]:
        """What makes a unit of a row its weight, `width` of them at a time. Of f32 it is as near as its power is: what is subtracted, is so
        before anything is rounded."""
        if self.dtype is f32:
            shift, factor = self._shift(b, most), self.factor
        else:
            factor, shift = self._exponent(b, most)
        if width > 1:
            shift, factor = b.op("broadcast", shift, width=width), b.op("broadcast", factor, width=width)

        def power(unit: Value) -> Value:
            exponent = b.mul(b.sub(unit, shift), factor) if self.dtype is f32 else b.fma(unit, factor, shift)
            return b.op("exp2_approx", exponent, flush=True)

        return power

    def _exponent(self, b: Builder, most: Value) -> tuple[Value, Value]:
        """Factor and summand that make a unit the exponent of its weight."""
        form = self.form(self.steps[-1])
        shift = self._shift(b, most)
        factor = self.factor
        if not form.plain:
            far = b.op("gt", b.op("abs", shift), b.const(HUGE, f32))
            factor = b.select(far, b.const(TINY_FACTOR, f32), factor)
        return factor, b.op("neg", b.mul(shift, factor))

    def _is_positive(self, value: Value) -> bool:
        """Whether a scalar is known to be above zero."""
        op = self.made.get(value)
        if op is None:
            return False
        if op.opcode == "const":
            number = op.attrs["value"]
            return isinstance(number, int | float) and number > 0
        if op.opcode in ("mul", "div"):
            return all(self._is_positive(v) for v in op.operands)
        return op.opcode in ("sqrt", "rsqrt", "cast", "exp", "exp2") and self._is_positive(op.operands[0])

    def row_maximum(self, b: Builder, units: dict[Cell, Value], row: int) -> Value:
        best: list[Value] = []
        for lane in range(2):
            # One by one: there is an instruction for scalars only.
            values = [b.op("extract", units[row, column], lane=lane) for column in range(self.keys // 8)]
            best.append(reduce(lambda x, y: larger(b, x, y), values))
        single = larger(b, *best)
        for distance in (1, 2):
            single = larger(b, single, b.op("shuffle", single, b.const(distance, i32), mode="xor"))
        return single

    def grown(self, b: Builder, units: dict[Cell, Value], before: Sequence[Value]) -> tuple[list[Value], list[Value], Value]:
        """The maximum of each row to subtract from now on, what sums below the one before shrink by, and whether any does."""
        most: list[Value] = []
        shrink: list[Value] = []
        needed: Value | None = None
        for row, old in enumerate(before):
            new = larger(b, old, self.row_maximum(b, units, row))
            power = self._power(b, new)
            grows = b.op("ne", new, old)
            needed = grows if needed is None else b.op("or", needed, grows)
            shrink.append(power(old))
            most.append(new)
        assert needed is not None
        return most, shrink, b.op("vote", needed, mode="any")

    def scaled(
        self, b: Builder, out: Sequence[Value], total: Sequence[Value], shrink: Sequence[Value], grown: Value
    ) -> tuple[list[Value], list[Value]]:
        each = len(out) // self.bands

        def smaller(inner: Builder) -> list[Value]:
            scaled = [inner.mul(value, shrink[number // each * 2 + number // 2 % 2]) for number, value in enumerate(out)]
            return [*scaled, *(inner.mul(x, inner.op("broadcast", a, width=2)) for x, a in zip(total, shrink, strict=True))]

        results = list(b.if_(grown, smaller, lambda inner: [*out, *total]))
        return results[: len(out)], results[len(out) :]

    def weights(
        self, b: Builder, units: dict[Cell, Value], most: Sequence[Value], columns: range
    ) -> tuple[dict[Cell, Value], list[Value]]:
        """The exponentials of some columns, and their sums for each row, of even and odd columns."""
        weights: dict[Cell, Value] = {}
        totals: list[Value] = []
        for row in range(2 * self.bands) if columns else ():
            power = self._power(b, most[row], 2)
            total: Value | None = None
            for column in columns:
                one = power(units[row, column])
                weights[row, column] = one
                total = one if total is None else b.add(total, one)
            assert total is not None
            totals.append(total)
        return weights, totals

    def packed(self, b: Builder, weights: dict[Cell, Value]) -> list[Value]:
        """Weights as the first operand of the second product: accumulators lie as it wants them. Of f32 each register has one: those of even
        columns are the first four terms of an instruction, those of odd ones the next."""
        if self.dtype is f32:
            return [
                b.bitcast(b.op("extract", weights[2 * band + row, column], lane=lane), u32)
                for band in range(self.bands) for column in range(self.keys // 8) for lane in range(2) for row in range(2)
            ]  # fmt: skip
        return [
            b.op("to_bits", b.cast(weights[2 * band + row, column], self.dtype))
            for band in range(self.bands) for column in range(self.keys // 8) for row in range(2)
        ]  # fmt: skip

    def added(self, b: Builder, total: Value) -> Value:
        single = b.add(b.op("extract", total, lane=0), b.op("extract", total, lane=1))
        for distance in (1, 2):
            single = b.add(single, b.op("shuffle", single, b.const(distance, i32), mode="xor"))
        return single

    def largest(self, b: Builder, most: Value) -> Value:
        """The maximum of the scores themselves."""
        times = self._times(b)
        if times is None:
            return most
        # A factor of zero would make NaN of -inf.
        return b.select(b.op("eq", most, b.const(-math.inf, f32)), most, b.mul(most, times))


def larger(b: Builder, first: Value, second: Value) -> Value:
    return b.op("max", first, second, hardware=True)


def make_step(loop: Op) -> ScoreStep:
    region = loop.regions[0]
    scores, weighted = (op for op in region.ops if op.opcode == "dot")
    maximum = next(op for op in region.ops if op.opcode == "reduce_tile" and op.attrs["kind"] == "max")
    return ScoreStep(region.args[0], tuple(region.ops), scores, maximum.operands[0], weighted)


def needed_ops(ops: Sequence[Op], values: Sequence[Value]) -> list[Op]:
    """Those of the ops that make the values, in order."""
    wanted = set(values)
    found: list[Op] = []
    for op in reversed(ops):
        if any(r in wanted for r in op.results):
            found.append(op)
            wanted.update(op.operands)
            wanted.update(v for region in op.regions for inner in walk(region) for v in inner.operands)
    return list(reversed(found))
