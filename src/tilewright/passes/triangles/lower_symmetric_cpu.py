"""Loop stage -> tile stage for symmetric products on a CPU: tiles on and below the diagonal are computed, and finished on both sides of it.

In: a loop-stage kernel that is a symmetric contraction (`symmetry.py`), and its schedule of family `cpu` with `half`. Out: a tile-stage kernel as
`lower_contraction_cpu` makes it, without the tiles above the diagonal. The rest of the kernel runs on each sum twice: for its place, and for the place
across the diagonal, where it may compute something else. Tiles that the diagonal crosses finish what is on and below it, and mirror what is below.

    for %panel of rows { copy rows; for %panel of columns up to the diagonal { sums; finish at (i, j); finish at (j, i) } }

Blocks are stripes of columns from the diagonal down. There is one for each core, all with as many tiles to compute; where those would be too wide for
the cache, there are more, of the same width, and the longest come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt
from types import MappingProxyType

from tilewright.analysis.contraction import find_contraction
from tilewright.base.dtypes import f32, i64
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import ONE, Size, ceildiv, floordiv, maximum, minimum
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import Scalar
from tilewright.passes.schedules.matrix import CpuPanels
from tilewright.passes.to_tile.lower_contraction_cpu import PanelLowering
from tilewright.passes.to_tile.panels.results import has_functions
from tilewright.passes.to_tile.panels.sides import needed_ops
from tilewright.passes.triangles.symmetry import is_symmetric

STRIPE = 8
"""Panels of columns that a stripe has at least, where there are more stripes than cores."""


def lower_symmetric_cpu(kernel: Kernel, schedule: CpuPanels, target: Target) -> Kernel:
    """The tile-stage kernel."""
    found = find_contraction(kernel)
    if found is None or not is_symmetric(found) or schedule.keep != "b":
        raise CompilerBug.at("TW040", f"{kernel.name} is no symmetric contraction", kernel.span)
    return _Half(kernel, found, schedule, target).run_contraction()


class _Half(PanelLowering):
    """A tile is computed if some of its columns come before its last row, or there."""

    fixed: tuple[Value, ...] = ()

    def run_contraction(self) -> Kernel:
        found, s = self.found, self.matrix
        b = Builder(self.kernel.span)
        env: dict[Value, Value] = {p: p for p in self.kernel.params}
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], env)
        (size,) = self.a.extents
        stripes, is_wide = self._stripes(size)
        height = Size.of(s.m // s.mr * s.mr)
        down = maximum(ONE, ceildiv(size, height))
        number = b.op("program_id", axis=0)
        pieces = (*(found.extents[p] for p in found.batch), down, stripes)
        *outer, row, column = self._apart(b, number, pieces)
        env.update(zip((found.indices[p] for p in found.batch), outer, strict=True))
        left = self._edge(b, column, size, stripes, is_wide)
        right = self._edge(b, b.add(column, b.index(1)), size, stripes, is_wide)
        # Rows begin where the diagonal enters the stripe.
        top = b.mul(row, b.index(height))
        bottom = b.op("min", b.add(top, b.index(height)), b.index(size))
        first = b.mul(b.op("floordiv", left, b.index(s.mr)), b.index(s.mr))
        top = b.op("max", top, first)
        self._block(b, env, (top, b.op("max", top, bottom)), (left, b.op("max", left, b.op("min", right, bottom))))
        attrs = MappingProxyType({**self.kernel.attrs, "schedule": s.describe()})
        grid = (found.size(found.batch) * down * stripes,)
        return replace(self.kernel, stage=Stage.TILE, body=Block((), tuple(b.ops)), grid=grid, attrs=attrs)

    # -- stripes ------------------------------------------------------------------------------------------------

    def _stripes(self, size: Size) -> tuple[Size, Size]:
        """How many stripes there are; and 1 where they are of one width, 0 where they have as much work."""
        s, cores = self.matrix, self.target.multiprocessors
        most = ceildiv(size, Size.of(s.n // s.nr * s.nr))
        # Of stripes with as much work the last is the widest.
        reach = isqrt((s.n - s.nr) ** 2 * cores)
        if self.found.batch or reach < 2 * s.nr * cores:
            return maximum(ONE, most), ONE
        is_wide = minimum(ONE, floordiv(size, Size.of(reach + 1)))
        alike = minimum(Size.of(cores), ceildiv(size, Size.of(2 * s.nr)))
        rounds = ceildiv(most, Size.of(2 * cores)) * (2 * cores)
        equal = maximum(most, minimum(rounds, ceildiv(size, Size.of(STRIPE * s.nr))))
        return maximum(ONE, alike + is_wide * (equal - alike)), is_wide

    def _edge(self, b: Builder, number: Value, size: Size, stripes: Size, is_wide: Size) -> Value:
        """The first column of a stripe."""
        s = self.matrix
        panels = ceildiv(size, Size.of(s.nr))
        each = b.mul(number, b.index(ceildiv(panels, stripes)))
        # Work before column c of n is that of c (2n - c) / 2 results.
        share = b.op("div", b.cast(number, f32), b.cast(b.index(stripes), f32))
        rest = b.op("sqrt", b.op("max", b.sub(b.const(1.0, f32), share), b.const(0.0, f32)))
        place = b.mul(b.sub(b.const(1.0, f32), rest), b.cast(b.index(panels), f32))
        even = b.cast(b.add(place, b.const(0.5, f32)), i64)
        even = b.select(b.op("ge", number, b.index(stripes)), b.index(panels), even)
        column = b.mul(b.select(b.op("eq", b.index(is_wide), b.index(1)), each, even), b.index(s.nr))
        return b.op("min", column, b.index(size))

    def _panels_for(self, b: Builder, number: Value, inside: Value, down: tuple[Value, Value], across: tuple[Value, Value]) -> Value:
        s = self.matrix
        last = b.add(down[0], b.add(b.mul(number, b.index(s.mr)), b.index(s.mr - 1)))
        reached = b.add(b.op("floordiv", b.sub(last, across[0]), b.index(s.nr)), b.index(1))
        return b.op("min", inside, reached)

    # -- numbers that finish all results alike -------------------------------------------------------------------

    def _allocate_sums(self, b: Builder, env: dict[Value, Value]) -> None:
        """Fixed numbers lie behind the sums: the innermost loop needs all registers, and compilers would keep one of theirs for each."""
        s = self.matrix
        self.fixed = self._fixed()
        self.sums = self._local(b, "sums", (self.tiles + bool(self.fixed), s.mr, s.nr), self.dtype)
        ops = needed_ops(self.found, self.fixed)
        if self.fixed and ops is not None:
            local = dict(env)
            self.ops(b, ops, local, [])
            for number, value in enumerate(self.fixed):
                b.multi("store", self.sums, b.index(self.tiles), b.index(0), b.index(number), local[value])

    def _fixed(self) -> tuple[Value, ...]:
        """Numbers of the rest that depend neither on places nor on sums, such as the length of the sum to divide by."""
        rest = super()._rest()
        own = {result: op for op in rest for result in op.results}
        moving = {*self.found.indices, self._sum}

        def is_fixed(value: Value) -> bool:
            op = own.get(value)
            return value not in moving and (op is None or (OPS[op.opcode].is_pure and op.opcode != "load" and all(map(is_fixed, op.operands))))

        used = dict.fromkeys(v for op in rest if op.opcode != "store" and not all(map(is_fixed, op.results)) for v in op.operands)
        constants = {v for v, op in own.items() if op.opcode == "const"}
        return tuple(v for v in used if v.type == Scalar(self.dtype) and is_fixed(v) and v not in constants)[: self.matrix.nr]

    def _rest(self) -> list[Op]:
        return [op for op in super()._rest() if not (op.results and op.results[0] in self.fixed)]

    def _recall(self, b: Builder, env: dict[Value, Value]) -> dict[Value, Value]:
        """`env` with the fixed numbers."""
        places = (b.index(number) for number in range(len(self.fixed)))
        return {**env, **{v: b.op("load", self.sums, b.index(self.tiles), b.index(0), place) for v, place in zip(self.fixed, places, strict=True)}}

    # -- results ------------------------------------------------------------------------------------------------

    def _one_tile(
        self, b: Builder, env: dict[Value, Value], where: Value, panels: tuple[Value, Value], stretch: tuple[Value, Value], last: Value,
        down: tuple[Value, Value], across: tuple[Value, Value], direct: bool,
    ) -> None:  # fmt: skip
        self.terms = self._terms(b, stretch, down[0], across[0])
        sums = self._multiply(b, env, where, *panels, *stretch, direct)
        self._both_halves(b, env, sums, where, last, down, across)

    def _both_halves(
        self, b: Builder, env: dict[Value, Value], sums: Sequence[Value], where: Value, last: Value, down: tuple[Value, Value],
        across: tuple[Value, Value],
    ) -> None:  # fmt: skip
        s = self.matrix

        def through_memory(at: Builder) -> list[Value]:
            self._keep(at, sums, where)

            def both(end: Builder) -> list[Value]:
                local = self._recall(end, env)
                self._finish_below(end, local, where, down, across)
                return self._finish_across(end, local, where, down, across)

            at.if_(last, both, lambda end: [])
            return []

        def at_once(at: Builder) -> list[Value]:
            local = self._recall(at, env)
            self._finish_registers(at, local, sums, down[0], across[0])
            self._keep(at, sums, where)
            return self._finish_across(at, local, where, down, across)

        if not self._is_short():
            through_memory(b)
            return
        # No element of the tile is on the diagonal, and none outside of the array.
        below = b.op("le", b.add(across[0], b.index(s.nr)), down[0])
        full = b.logical_and(below, b.op("le", b.add(down[0], b.index(s.mr)), down[1]))
        b.if_(b.logical_and(last, full), at_once, through_memory)

    def _finish_below(self, b: Builder, env: dict[Value, Value], where: Value, down: tuple[Value, Value], across: tuple[Value, Value]) -> None:
        """The rest of the kernel for the elements of a tile on and below the diagonal, row by row."""
        (row_index,), (column_index,) = self.a.indices, self.b.indices
        end = b.op("min", b.add(across[0], b.index(self.matrix.nr)), across[1])

        def by_row(at: Builder, row: Value) -> list[Value]:
            own = at.sub(row, down[0])

            def some(inner: Builder, place: Value, width: int) -> list[Value]:
                sums = inner.op("load", self.sums, where, own, self._several(inner, inner.sub(place, across[0]), width))
                self.ops(inner, self._rest(), {**env, row_index: row, column_index: self._several(inner, place, width), self._sum: sums}, [])
                return []

            high = at.op("max", across[0], at.op("min", end, at.add(row, at.index(1))))
            self._strips_of(at, across[0], high, self._widths(), some, self._may_repeat())
            return []

        b.for_(down[0], b.op("min", b.add(down[0], b.index(self.matrix.mr)), down[1]), b.index(1), [], by_row, name="row")

    def _finish_across(
        self, b: Builder, env: dict[Value, Value], where: Value, down: tuple[Value, Value], across: tuple[Value, Value]
    ) -> list[Value]:
        """The same across the diagonal: columns of the tile are rows of results."""
        (row_index,), (column_index,) = self.a.indices, self.b.indices
        end = b.op("min", b.add(down[0], b.index(self.matrix.mr)), down[1])

        def by_column(at: Builder, column: Value) -> list[Value]:
            own = at.sub(column, across[0])

            def some(inner: Builder, place: Value, width: int) -> list[Value]:
                sums = inner.op("load", self.sums, where, self._several(inner, inner.sub(place, down[0]), width), own)
                self.ops(inner, self._rest(), {**env, row_index: column, column_index: self._several(inner, place, width), self._sum: sums}, [])
                return []

            low = at.op("max", down[0], at.add(column, at.index(1)))
            self._strips_of(at, low, at.op("max", low, end), self._widths(), some, self._may_repeat())
            return []

        b.for_(across[0], b.op("min", b.add(across[0], b.index(self.matrix.nr)), across[1]), b.index(1), [], by_column, name="column")
        return []

    @property
    def _sum(self) -> Value:
        return self.found.reduction.results[0]

    def _widths(self) -> tuple[int, ...]:
        """Functions are long chains of ops: several vectors side by side keep a CPU busy."""
        return (2 * self.lanes, self.lanes) if has_functions(self._rest()) else (self.lanes,)

    def _may_repeat(self) -> bool:
        """Whether an element may be finished twice: nothing that is written is read."""
        rest = self._rest()
        written = {op.operands[0] for op in rest if op.opcode == "store"}
        return not any(op.opcode == "load" and op.operands[0] in written for op in rest)
