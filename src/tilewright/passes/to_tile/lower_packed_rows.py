"""Loop stage -> tile stage for products with packed weights and rounded activations on a CPU (`schedules/packed_rows.py`).

In: a loop-stage kernel whose sums are marked `packed`, and a `PackedRows`. Out: a tile-stage kernel whose blocks walk their rows a few at a time, then those
that are left one by one. A sum becomes `packed_dots` of all rows at hand; what comes before and after it is written once for each of its results.

    parallel %n (%i) { %s = reduce … {packed}; store %y, %i, f(%s) }
    -> grid [ceildiv(n, 16)]:  for %i in 4s { %s0, %s1, %s2, %s3 = packed_dots %w, …, %i, %i + 1, …; store %y, %i, f(%s0); … }  for %i in 1s { … }
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import analyse
from tilewright.analysis.loop_nest import nest_of
from tilewright.base.dtypes import i64, u32
from tilewright.base.sizes import ONE, Size, ceildiv
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Stage, Value
from tilewright.ir.rewrite import clone_ops
from tilewright.passes.packed.find_sums import packed_sums
from tilewright.passes.schedules.packed_rows import PackedRows


def lower_packed_rows(kernel: Kernel, schedule: PackedRows, target: Target) -> Kernel:
    """The tile-stage kernel."""
    return _Lowering(kernel, schedule).run()


class _Lowering:
    def __init__(self, kernel: Kernel, schedule: PackedRows) -> None:
        self.kernel, self.schedule = kernel, schedule
        self.nest = nest_of(kernel)
        self.region = self.nest.parallel.regions[0]
        self.sums = {id(found.op): found for found in packed_sums(self.region, analyse(kernel))}
        self.outer: dict[Value, Value] = {p: p for p in kernel.params}

    def run(self) -> Kernel:
        b, schedule = Builder(self.kernel.span), self.schedule
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], self.outer)
        blocks, starts = self.starts(b)
        first = starts[schedule.n_index]
        end = b.op("min", b.add(first, b.index(schedule.block_rows)), b.index(self.nest.extents[schedule.n_index]))
        self.walk(b, first, end, schedule.n, lambda at, index, rows: self.columns(at, starts, index, rows))
        attrs = {**self.kernel.attrs, "schedule": schedule.describe()}
        return replace(self.kernel, stage=Stage.TILE, body=Block((), tuple(b.ops)), grid=(blocks,), attrs=MappingProxyType(attrs))

    def starts(self, b: Builder) -> tuple[Size, list[Value]]:
        """How many blocks there are, and the first index of this one along each axis."""
        counts = list(self.nest.extents)
        counts[self.schedule.n_index] = ceildiv(counts[self.schedule.n_index], self.schedule.block_rows)
        if self.schedule.m_index >= 0:
            counts[self.schedule.m_index] = ONE
        rest = b.cast(b.op("program_id", axis=0), u32)
        starts: list[Value] = []
        blocks = ONE
        for position in reversed(range(len(counts))):
            count = counts[position]
            blocks = blocks * count
            if count == ONE:
                starts.append(b.index(0))
                continue
            if all(other == ONE for other in counts[:position]):
                starts.append(b.cast(rest, i64))
                continue
            divisor = b.cast(b.index(count), u32)
            quotient = b.op("floordiv", rest, divisor)
            starts.append(b.cast(b.sub(rest, b.mul(quotient, divisor)), i64))
            rest = quotient
        starts.reverse()
        starts[self.schedule.n_index] = b.mul(starts[self.schedule.n_index], b.index(self.schedule.block_rows))
        return blocks, starts

    def walk(self, b: Builder, first: Value, end: Value, step: int, body: Callable[[Builder, Value, int], None]) -> None:
        """Some at a time, then one by one."""

        def several(inner: Builder, index: Value) -> list[Value]:
            body(inner, index, step)
            return []

        def single(inner: Builder, index: Value) -> list[Value]:
            body(inner, index, 1)
            return []

        width = b.index(step)
        middle = b.add(first, b.mul(b.op("floordiv", b.sub(end, first), width), width))
        if step > 1:
            b.for_(first, middle, width, [], several, name="i")
        b.for_(middle if step > 1 else first, end, b.index(1), [], single, name="i")

    def columns(self, b: Builder, starts: list[Value], row: Value, rows: int) -> None:
        schedule = self.schedule
        if schedule.m_index < 0:
            self.tile(b, starts, row, rows, None, 1)
            return
        count = b.index(self.nest.extents[schedule.m_index])
        self.walk(b, b.index(0), count, schedule.m, lambda at, index, columns: self.tile(at, starts, row, rows, index, columns))

    def tile(self, b: Builder, starts: list[Value], row: Value, rows: int, column: Value | None, columns: int) -> None:
        """All results of some rows and columns."""
        points: list[dict[Value, Value]] = []
        for r in range(rows):
            for c in range(columns):
                indices = list(starts)
                indices[self.schedule.n_index] = b.add(row, b.index(r)) if r else row
                if column is not None:
                    indices[self.schedule.m_index] = b.add(column, b.index(c)) if c else column
                points.append({**self.outer, **dict(zip(self.region.args, indices, strict=True))})
        for op in self.region.ops:
            if op.opcode == "yield":
                continue
            found = self.sums.get(id(op))
            if found is None:
                for env in points:
                    clone_ops(b, [op], env)
                continue
            tensors = [v for v in (found.weights, found.numbers, found.scale, found.sums) if v is not None]
            indices = [points[r * columns][v] for r in range(rows) for v in found.rows] + [points[c][v] for c in range(columns) for v in found.columns]
            with b.at(op.span):
                results = b.multi("packed_dots", *tensors, *indices, format=found.format, rows=rows, columns=columns)
            for env, result in zip(points, results, strict=True):
                env[op.results[0]] = result
