"""Tile stage -> thread stage for contractions on any GPU: matrix instructions of warps, or plain multiply-adds.

In: a tile-stage kernel made by `lower_contraction`, with layouts, and its schedule (family `mma`, `fma`, or those of AMD's waves). Out: the thread-stage
kernel. All threads of a block do the same: they bring the operands of a later step to shared memory (`stage_operand`), read the
fragments of the next part of this step, and multiply those of the current part, so that loads run while the arithmetic does.

    fill stages 0 .. S-2; read fragments 0
    for steps (sums, fragments) {
      bring step + S-1
      for parts { read the fragments of the next part (last part: barrier, then those of the next stage);  multiply }
    }
    the epilogue, window by window

`units` knows which fragments an instruction takes and where they lie. Past the end of the sum zeros are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import DType
from tilewright.base.errors import CompilerBug
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.layouts import MMA_LANES, SIDE, Accumulator, Blocked
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.types import dtype_of
from tilewright.passes.common.registers import Registers, shape_of
from tilewright.passes.common.unsigned import unsigned_divisions
from tilewright.passes.schedules.matrix import Mma, WarpProduct, WaveProduct
from tilewright.passes.schedules.sum_levels import PartialSums, in_registers, stretches
from tilewright.passes.to_thread.lower_tiles import TileLowering
from tilewright.passes.to_thread.mma.packed_operand import PackedOperand
from tilewright.passes.to_thread.mma.result_rows import ResultRows, result_rows
from tilewright.passes.to_thread.mma.units import FmaUnit, HorizontalUnit, MmaUnit, MultiplyUnit
from tilewright.passes.to_thread.mma.wave_unit import WaveUnit
from tilewright.passes.to_thread.stage_operand import (
    OperandSource,
    OperandView,
    Ring,
    ThreadTile,
    contiguous_axis,
    make_view,
)

PACKED_REGISTERS = 80
"""Of a thread that unpacks weights, beside its sums: that takes more instructions than all else, so more threads are worth more than registers."""

HELD_REGISTERS = 40
"""Of a thread whose schedule says which sums it holds, beside these and fragments."""


def lower_mma(kernel: Kernel, schedule: WarpProduct, target: Target) -> Kernel:
    """The thread-stage kernel."""
    return _MmaLowering(kernel, schedule, target).run()


class _MmaLowering(TileLowering):
    """`unit` multiplies, `views` bring the operands; this brings both together and lowers the ops around the sum."""

    def __init__(self, kernel: Kernel, schedule: WarpProduct, target: Target) -> None:
        super().__init__(kernel, target)
        self.schedule = schedule
        self.sum = next(op for op in walk(kernel.body) if op.opcode == "for" and op.attrs.get("role") == "sum")
        self.products = [op for op in self.sum.regions[0].ops if op.opcode == "dot"]
        if not self.products:
            raise CompilerBug.at("TW040", "lower_mma: the sum has no dot", self.sum.span)
        self.axis, self.vector = 1, self.layout.vector[1]
        self.stages = max(2, schedule.stages)

    def _layout(self) -> Blocked | Accumulator:
        layout = super()._layout()
        return ThreadTile(layout.vector, layout.lanes, layout.warps) if isinstance(layout, Blocked) else layout

    @property
    def layout_warp(self) -> int:
        return MMA_LANES

    # -- the whole kernel ---------------------------------------------------------------------------------------

    def run(self) -> Kernel:
        b = Builder(self.kernel.span)
        self.coordinates(b)
        self._operands(b)
        self._body(b, self.kernel.body.ops)
        attrs: dict[str, Attr] = dict(self.kernel.attrs)
        blocks = self._blocks()
        if blocks > 1:
            attrs["min_blocks"] = blocks
        return unsigned_divisions(
            replace(
                self.kernel,
                stage=Stage.THREAD,
                body=Block((), tuple(b.ops)),
                threads=self.schedule.threads,
                attrs=MappingProxyType(attrs),
            )
        )

    def _blocks(self) -> int:
        """Blocks of one multiprocessor its registers are shared between."""
        if self.schedule.persistent:
            return 1
        if self.schedule.b_copy == "packed":
            return max(1, min(4, 65536 // (self.schedule.threads * (PACKED_REGISTERS + self.unit.words))))
        registers = self._others() + self.unit.words * (1 + self._inner_levels())
        return max(1, min(4, 65536 // (self.schedule.threads * registers)))

    def _others(self) -> int:
        """Registers of all but the sums."""
        if isinstance(self.schedule, Mma) and self.schedule.levels_held >= 0:
            # Fragments of the next part, both parts of these, and addresses, as compilers were seen to have them.
            return 3 * (self.unit.first_count + self.unit.second_count) + HELD_REGISTERS
        return self.unit.registers - self.unit.words + sum(view.cost for view in self.views)

    def _inner_levels(self) -> int:
        """Levels of sums above the innermost that stay in registers: those there is room for, and those shared memory has none for."""
        s, levels = self.schedule, len(stretches(self.schedule))
        taken = sum(self.stages * view.ring.size * view.ring.dtype.itemsize for view in self.views)
        most = max(0, self.target.max_shared - taken) // (4 * self.unit.words * s.threads)
        return max(in_registers(s, self.unit.words, self._others()), levels - most)

    def coordinates(self, b: Builder) -> None:
        layout = self.layout
        if isinstance(layout, Blocked):
            super().coordinates(b)
            return
        wave = layout.wave
        lanes = wave.lanes if wave else MMA_LANES
        self.thread = b.op("thread_id", name="thread")
        lane = b.op("and", self.thread, b.index(lanes - 1), name="lane")
        warp = b.op("shr", self.thread, b.index(lanes.bit_length() - 1), name="warp")
        self.warp_digits = self._digits(b, warp, layout.warps)
        if wave:
            starts = (b.op("and", lane, b.index(SIDE - 1)), b.mul(b.op("shr", lane, b.index(SIDE.bit_length() - 1)), b.index(wave.column)))
        else:
            starts = (b.op("shr", lane, b.index(2)), b.mul(b.op("and", lane, b.index(3)), b.index(2)))
        for axis, extent in enumerate((self.schedule.m, self.schedule.n)):
            base = b.add(b.mul(self.warp_digits[axis], b.index(layout.part(axis, extent))), starts[axis])
            self.divisors[base] = layout.vector[axis]
            self.bases.append(base)

    def _unit(self, operand: DType, total: DType, precision: str) -> MultiplyUnit:
        """What multiplies."""
        if isinstance(self.schedule, Mma):
            return MmaUnit(self.schedule, operand, total, precision, self.layout, self.target)
        if isinstance(self.schedule, WaveProduct):
            return WaveUnit(self.schedule, operand, total, precision, self.layout, self.target)
        return FmaUnit(self.schedule, operand, total, precision, self.layout, self.target)

    def _operands(self, b: Builder) -> None:
        """Rings in shared memory, and how each is filled."""
        s, product = self.schedule, self.products[0]
        known = dict(self.env)
        self._before(Builder(), self.kernel.body.ops)
        operands = [product.operands[0], *(p.operands[1] for p in self.products)]
        sources = [OperandSource(self.kernel, self.sum, v) for v in operands]
        packed = s.b_copy == "packed"
        axes = [None if packed and number else contiguous_axis(self, source, s.threads) for number, source in enumerate(sources)]
        self.rows = self._result_rows()
        operand, total = dtype_of(product.operands[0].type), dtype_of(product.result.type)
        # Matrix instructions for f32 that nobody asked for multiply its parts.
        precision = str(self.kernel.attrs.get("precision", "3xtf32" if isinstance(s, Mma) else "ieee"))
        units = [self._unit(operand, total, precision) for _ in self.products]
        self.unit: MultiplyUnit = units[0] if len(units) == 1 else HorizontalUnit(units)
        self.views: list[OperandView] = []
        copies = (s.a_copy, *[s.b_copy] * len(units))
        for number, (source, axis, copy) in enumerate(zip(sources, axes, copies, strict=True)):
            side = min(number, 1)
            shape, along = shape_of(source.operand), 1 - side
            major = self.unit.major("k" if axis is None or axis == along else "mn")
            pitch = self.unit.pitch(shape[along if major == "k" else 1 - along], major)
            size = shape[1 - along if major == "k" else along] * pitch
            memory = b.op(
                "alloc",
                dtype=self.unit.stored,
                shape=(self.stages * size,),
                space="shared",
                align=128,
                name=f"{'ab'[side]}.ring",
            )
            ring = Ring(memory, self.unit.stored, shape, along, major, pitch)
            view = PackedOperand(self, source, ring, s.threads) if packed and number else make_view(self, source, ring, s.threads, copy, axis)
            view.coordinates(b)
            self.views.append(view)
        self.env = known
        self.unit.prepare(b, [view.ring for view in self.views], self)
        lengths = stretches(s)
        self.kept = {
            length: PartialSums(b, self.unit.zeros(Builder()), self.thread, s.threads, number)
            for number, length in enumerate(lengths[: len(lengths) - self._inner_levels()])
        }
        if self.rows is not None:
            self._place_rows(b, self.rows)

    def _result_rows(self) -> ResultRows | None:
        """How results leave by way of shared memory, where that gains something."""
        s, ops = self.schedule, self.kernel.body.ops
        if s.persistent or isinstance(s, WaveProduct) or len(self.products) > 1 or self.sum not in ops:
            return None
        return result_rows(self, (s.m, s.n), ops[ops.index(self.sum) + 1 :], self.sum.results[0], s.threads)

    def _place_rows(self, b: Builder, rows: ResultRows) -> None:
        """Where rows of results lie on their way: in a ring that nobody needs any more, if one has room."""
        rings = [view.ring for view in self.views if self.stages * view.ring.size >= rows.size]
        dtype = dtype_of(self.sum.results[0].type)
        same = [ring.memory for ring in rings if ring.dtype is dtype]
        rows.memory = same[0] if same else b.op("alloc", dtype=dtype, shape=(rows.size,), space="shared", align=128, name="rows")
        rows.coordinates(b)

    def _before(self, b: Builder, ops: Sequence[Op]) -> bool:
        """Everything before the sum, for a look at what operands are made of."""
        for op in ops:
            if op is self.sum:
                return True
            if op.opcode == "for" and op.attrs.get("role") == "tiles":
                self.env[op.regions[0].args[0]] = op.regions[0].args[0]
                return self._before(b, op.regions[0].ops)
            self.ops(b, [op])
        return False

    def _body(self, b: Builder, ops: Sequence[Op]) -> None:
        """The ops of one tile, or of the loop over tiles."""
        for number, op in enumerate(ops):
            if op.opcode == "for" and op.attrs.get("role") == "tiles":
                self._tiles(b, op)
                return
            if op is self.sum:
                self._sum(b)
                self._finish(b, [x for x in ops[number + 1 :] if x.opcode != "yield"])
                return
            self.ops(b, [op])

    def _tiles(self, b: Builder, op: Op) -> None:
        low, high, step = (self.env[v] for v in op.operands[:3])
        assert isinstance(low, Value) and isinstance(high, Value) and isinstance(step, Value)
        region = op.regions[0]

        def body(inner: Builder, index: Value) -> list[Value]:
            self.env[region.args[0]] = index
            self._body(inner, region.ops)
            inner.multi("barrier")  # the next tile overwrites what this one has read
            return []

        b.for_(low, high, step, [], body, name="tile", unroll=1)

    # -- the sum ------------------------------------------------------------------------------------------------

    def _sum(self, b: Builder) -> None:
        shape = (self.schedule.m, self.schedule.n)
        low, end = (self.env[v] for v in self.sum.operands[:2])
        assert isinstance(low, Value) and isinstance(end, Value)
        for view in self.views:
            view.begin(b, self)
        zeros = self.unit.zeros(b)
        sums = b.if_(b.op("gt", end, low), lambda inner: self._steps(inner, low, end, zeros), lambda inner: zeros)
        tiles = self.unit.cells(b, sums)
        self.env.update((result, Registers(shape, cells)) for result, cells in zip(self.sum.results, tiles, strict=True))

    def _steps(self, b: Builder, low: Value, end: Value, zeros: Sequence[Value]) -> list[Value]:
        step, ahead = self.schedule.k, self.stages - 1
        asynchronous = any(view.asynchronous for view in self.views)
        # A step that is not there is not read: copies fill with zeros, registers take the last step again.
        count = b.op("floordiv", b.sub(b.sub(end, low), b.index(1)), b.index(step))
        last = b.add(low, b.mul(count, b.index(step)))
        for number in range(ahead):
            self._put(b, self._bring(b, b.add(low, b.index(number * step)), end, last, b.index(number)))
        if asynchronous:
            b.multi("copy_wait", pending=ahead - 1)
        b.multi("barrier")
        parts = self.unit.parts

        def run(inner: Builder, k: Value, state: Sequence[Value], sums: Sequence[Value]) -> tuple[list[Value], list[Value]]:
            """One step: the sums, and what the next step begins with."""
            reading, writing, *fragments = state
            following = self._next(inner, reading)
            held: list[Registers | None] = []
            for part in range(parts):
                if part == 0:
                    held = self._bring(inner, inner.add(k, inner.index(ahead * step)), end, last, writing)
                if part + 1 < parts:
                    coming = self.unit.read(inner, part + 1, reading)
                else:
                    self._put(inner, held)
                    if asynchronous:
                        inner.multi("copy_wait", pending=ahead - 1)
                    inner.multi("barrier")
                    coming = self.unit.read(inner, 0, following)
                sums = self.unit.multiply(inner, fragments, sums)
                fragments = coming
            if self.unit.plain:
                # Else LLVM moves the loads just above to the start of the next step, where they are waited for.
                inner.multi("warp_sync")
            return list(sums), [following, self._next(inner, writing), *fragments]

        def level(outer: Builder, first: Value, stop: Value, lengths: Sequence[int], state: Sequence[Value]) -> list[Value]:
            """The sums from `first` to `stop`, and what the step behind them begins with."""
            length = outer.index(lengths[0] if lengths else step)
            kept = self.kept.get(lengths[0]) if lengths else None
            totals = zeros if kept is None else []
            if kept is not None:
                kept.put(outer, zeros)

            def stretch(inner: Builder, k: Value, *carried: Value) -> list[Value]:
                before, begun = carried[: len(totals)], carried[len(totals) :]
                if not lengths:
                    sums, later = run(inner, k, begun, before)
                    return [*sums, *later]
                if lengths[0] == step:
                    sums, later = run(inner, k, begun, zeros)
                else:
                    inside = level(inner, k, inner.op("min", inner.add(k, length), stop), lengths[1:], begun)
                    sums, later = inside[: len(zeros)], inside[len(zeros) :]
                if kept is not None:
                    kept.add(inner, sums)
                    return later
                return [*(inner.add(t, s) for t, s in zip(before, sums, strict=True)), *later]

            name = "k" if not lengths or lengths[0] == step else "stretch"
            results = outer.for_(first, stop, length, [*totals, *state], stretch, name=name, unroll=1)
            return [*(kept.get(outer) if kept is not None else ()), *results]

        begun = [b.index(0), b.index(ahead), *self.unit.read(b, 0, b.index(0))]
        results = level(b, low, end, stretches(self.schedule), begun)
        if asynchronous:
            b.multi("copy_wait", pending=0)
        return results[: len(zeros)]

    def _next(self, b: Builder, stage: Value) -> Value:
        following = b.add(stage, b.index(1))
        return b.select(b.op("eq", following, b.index(self.stages)), b.index(0), following)

    def _bring(self, b: Builder, k: Value, end: Value, last: Value, stage: Value) -> list[Registers | None]:
        """Bring the step at `k` to a stage: start the copies, and load what goes through registers."""
        valid = b.op("lt", k, end)
        clamped = b.op("min", k, last)
        self.divisors[k] = self.divisors[clamped] = self.divisors.get(self.sum.regions[0].args[0], 1)
        held: list[Registers | None] = []
        for view in self.views:
            view.offset = b.mul(stage, b.index(view.ring.size))
            view.valid = valid
            held.append(view.bring(b, k if view.asynchronous else clamped))
        if any(view.asynchronous for view in self.views):
            b.multi("copy_commit")
        return held

    def _put(self, b: Builder, held: Sequence[Registers | None]) -> None:
        for view, registers in zip(self.views, held, strict=True):
            if registers is not None:
                view.put(b, registers)

    # -- finishing ----------------------------------------------------------------------------------------------

    def _finish(self, b: Builder, ops: Sequence[Op]) -> None:
        """What the kernel does to its results, a few registers at a time."""
        if self.rows is not None:
            self.rows.finish(b)
            return
        rows, columns = self.layout.registers((self.schedule.m, self.schedule.n))
        for row in range(rows):
            self.window = (range(row, row + 1), range(columns))
            self.ops(b, ops)
        self.window = None
