"""Reductions across rows on a CPU: a few rows at a time, as streams, into sums that lie in the result.

Part of `lower_loops`: in comes a nest whose body is one reduction and the store of what it gives, along an index that walks memory one element at a time; out
come tile-stage loops. Walking all rows for one vector of columns would take a line of each row at a time, from as many pages as there are rows. So a block adds
`row_group` rows at a time to all its sums, which stay in the nearest cache. What does not vary along the row, as `t[i]` in `t[i] * a[i, j]`, is computed before it.

    parallel %n (%j) { %s = reduce %m {add} (%i) { yield t[i] * a[i, j] }; store %y, %j, %s }
    -> for %j in 16s { %s = t[0] * a[0, j]; …; %s += t[7] * a[7, j]; store %y, %j, %s }
       for %i in 8s, from 8 on { for %j in 16s { %s = load %y, %j; %s += t[i] * a[i, j]; …; %s += t[i + 7] * a[i + 7, j]; store %y, %j, %s } }
       for %i in 1s, for the rows that are left { … }

Columns that fill no such vector are taken one register at a time, and the last few one by one, with vectors down the column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tilewright.analysis.affine import address, analyse
from tilewright.analysis.loop_nest import Nest
from tilewright.base.sizes import ONE
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, is_watched
from tilewright.ir.ops import OPS
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.common.combine import combine, identities
from tilewright.passes.common.nest_shapes import shape_of, widen

if TYPE_CHECKING:
    from tilewright.passes.to_tile.loops.nest_lowering import NestLowering

_MOST_OPS = 24
"""Ops of a term, up to which several of them stand side by side."""


def row_group(kernel: Kernel, nest: Nest, axis: int) -> int:
    """Rows that are added at a time; 0 where sums are better kept in registers, or the nest is another one."""
    if len(nest.reductions) != 1 or nest.sweeps or axis < 0 or is_watched(kernel):
        return 0
    region, forms = nest.parallel.regions[0], analyse(kernel)
    (reduction,) = nest.reductions
    body = reduction.regions[0].ops
    acting = [op for op in region.ops if not OPS[op.opcode].is_pure and op is not reduction and op.opcode not in ("load", "yield")]
    store, *others = acting or [reduction]
    if store.opcode != "store" or others or len(reduction.operands) != 1 or len(reduction.results) != 1 or str(reduction.attrs["kind"]).startswith("arg"):
        return 0
    if store.operands[-1] is not reduction.results[0] or len(body) > _MOST_OPS or any(op.regions for op in (*body, *(o for o in region.ops if o is not reduction))):
        return 0
    memory, index = store.operands[0], region.args[axis]
    plain = all(OPS[op.opcode].is_pure or op.opcode in ("load", "yield") for op in body)
    if not plain or any(op.opcode == "load" and op.operands[0] is memory for op in (*body, *region.ops)):
        return 0
    assert isinstance(memory.type, Tensor)
    moves = any(op.opcode == "load" and address(op, forms).factor(index) == ONE for op in body)
    if not moves or memory.type.dtype is not dtype_of(reduction.results[0].type) or address(store, forms).factor(index) != ONE:
        return 0
    if reduction.operands[0] in _moving(region.ops, index):
        return 0
    row, parts = reduction.regions[0].args[0], region.args[:1] if "reduce_extent" in kernel.attrs else ()
    places = [set(forms[v].values) for op in body if op.opcode == "load" for v in op.operands[1:]]
    if any(row in values and values - {row, *parts} for values in places):
        return 0  # a window that slides along its results: short, and better kept in registers
    return 8 if len(body) <= _MOST_OPS // 2 else 4


def _moving(ops: Sequence[Op], index: Value) -> set[Value]:
    """What varies along an index."""
    moving = {index}
    for op in ops:
        if not moving.isdisjoint(op.operands):
            moving.update(op.results)
    return moving


class ColumnSums:
    """The columns of one block."""

    def __init__(self, nest: NestLowering, ops: Sequence[Op], index: Value, group: int, tile: int, vector: int) -> None:
        """`ops` are those of the nest, `index` is the one that walks memory; `tile` columns are taken at a time, then `vector`."""
        self.nest, self.index, self.group, self.tile, self.vector = nest, index, group, tile, vector
        self.reduction = next(op for op in ops if op.opcode == "reduce")
        self.store = next(op for op in ops if op.opcode == "store")
        self.ops = ops
        self.kind, self.dtype = str(self.reduction.attrs["kind"]), dtype_of(self.reduction.results[0].type)
        (self.nothing,) = identities(self.kind, [self.dtype])
        self.row = self.reduction.regions[0].args[0]
        self.moving = _moving((*(op for op in ops if op is not self.reduction), *self.reduction.regions[0].ops), index)

    def lower(self, b: Builder, env: dict[Value, Value], low: Value, high: Value) -> None:
        """All columns from `low` to `high`."""
        still = [op for op in self.ops if op not in (self.reduction, self.store) and op.opcode != "yield" and self.moving.isdisjoint(op.operands)]
        env = dict(env)
        self.nest.ops(b, still, env, [])
        extent = env[self.reduction.operands[0]]
        middle = self._whole(b, low, high, self.tile)
        last = self._whole(b, middle, high, self.vector)

        def streams(inner: Builder) -> list[Value]:
            self._streams(inner, env, low, middle, extent)
            return []

        b.if_(b.op("gt", middle, low), streams, lambda inner: [])
        b.for_(middle, last, b.index(self.vector), [], lambda inner, j: self._register(inner, env, j, extent))
        b.for_(last, high, b.index(1), [], lambda inner, j: self._down(inner, env, j, extent))

    def _whole(self, b: Builder, low: Value, high: Value, width: int) -> Value:
        length = b.op("max", b.sub(high, low), b.index(0))
        return b.add(low, b.mul(b.op("floordiv", length, b.index(width)), b.index(width)))

    def _streams(self, b: Builder, env: dict[Value, Value], low: Value, high: Value, extent: Value) -> None:
        """Several rows at a time, added to the sums in the result."""
        shape, step, group = (self.tile,), b.index(self.tile), b.index(self.group)

        def clear(inner: Builder, j: Value) -> list[Value]:
            self._put(inner, self._columns(inner, env, j, self.tile), widen(inner, inner.const(self.nothing, self.dtype), shape))
            return []

        def rows(count: int, fresh: bool) -> Callable[..., list[Value]]:
            def add(inner: Builder, first: Value) -> list[Value]:
                known = [self._still(inner, env, inner.add(first, inner.index(k)) if k else first) for k in range(count)]

                def vector(deep: Builder, j: Value) -> list[Value]:
                    local = self._columns(deep, env, j, self.tile)
                    start = widen(deep, deep.const(self.nothing, self.dtype), shape)
                    total: Sequence[Value] = [start if fresh else deep.op("load", *(local[v] for v in self.store.operands[:-1]))]
                    for row in known:
                        total = combine(deep, self.kind, total, [widen(deep, self._term(deep, {**local, **row}), shape)])
                    self._put(deep, local, total[0])
                    return []

                inner.for_(low, high, step, [], vector)
                return []

            return add

        def begin(inner: Builder) -> list[Value]:
            rows(self.group, True)(inner, inner.index(0))
            return [group]

        def empty(inner: Builder) -> list[Value]:
            inner.for_(low, high, step, [], clear)
            return [inner.index(0)]

        (done,) = b.if_(b.op("ge", extent, group), begin, empty)
        whole = b.mul(b.op("floordiv", extent, group), group)
        b.for_(done, whole, group, [], rows(self.group, False))
        b.for_(whole, extent, b.index(1), [], rows(1, False))

    def _register(self, b: Builder, env: dict[Value, Value], j: Value, extent: Value) -> list[Value]:
        """One register of columns: several sums of it, so that none waits for the one before."""
        shape, count, local = (self.vector,), 4, self._columns(b, env, j, self.vector)
        start = widen(b, b.const(self.nothing, self.dtype), shape)

        def several(inner: Builder, first: Value, *sums: Value) -> list[Value]:
            found: list[Value] = []
            for k, total in enumerate(sums):
                row = {**local, **self._still(inner, env, inner.add(first, inner.index(k)) if k else first)}
                found += combine(inner, self.kind, [total], [widen(inner, self._term(inner, row), shape)])
            return found

        step = b.index(count)
        whole = b.mul(b.op("floordiv", extent, step), step)
        sums = b.for_(b.index(0), whole, step, [start] * count, several)
        total = b.for_(whole, extent, b.index(1), [sums[0]], several)
        for other in sums[1:]:
            total = combine(b, self.kind, total, [other])
        self._put(b, local, total[0])
        return []

    def _down(self, b: Builder, env: dict[Value, Value], j: Value, extent: Value) -> list[Value]:
        """One column, with vectors of its rows."""
        local, width = {**env, self.index: j}, b.index(self.tile)
        self.nest.ops(b, self._moving_ops(), local, [])
        start = b.const(self.nothing, self.dtype)

        def term(inner: Builder, row: Value, total: Value) -> Sequence[Value]:
            value = self._term(inner, {**local, **self._still(inner, env, row)})
            return combine(inner, self.kind, [total], [widen(inner, value, shape_of(row))])

        whole = b.mul(b.op("floordiv", extent, width), width)
        lanes = b.for_(
            b.index(0), whole, width, [widen(b, start, (self.tile,))],
            lambda inner, first, total: term(inner, self.nest.index_tile(inner, first, 0, self.tile), total),
        )  # fmt: skip
        rest = b.for_(whole, extent, b.index(1), [start], term)
        folded = b.op("item", b.op("reduce_tile", lanes[0], kind=self.kind, axis=0))
        self._put(b, local, combine(b, self.kind, rest, [folded])[0])
        return []

    def _columns(self, b: Builder, env: dict[Value, Value], first: Value, width: int) -> dict[Value, Value]:
        """What the nest knows of the columns from `first` on."""
        local = {**env, self.index: self.nest.index_tile(b, first, 0, width)}
        self.nest.ops(b, self._moving_ops(), local, [])
        return local

    def _moving_ops(self) -> list[Op]:
        return [op for op in self.ops if op not in (self.reduction, self.store) and not self.moving.isdisjoint(op.operands)]

    def _still(self, b: Builder, env: dict[Value, Value], row: Value) -> dict[Value, Value]:
        """What is the same for all columns of a row."""
        local = {**env, self.row: row}
        ops = [op for op in self.reduction.regions[0].ops if op.opcode != "yield" and self.moving.isdisjoint(op.operands)]
        self.nest.ops(b, ops, local, [])
        return {self.row: row} | {r: local[r] for op in ops for r in op.results}

    def _term(self, b: Builder, local: dict[Value, Value]) -> Value:
        ops = [op for op in self.reduction.regions[0].ops if op.opcode == "yield" or not self.moving.isdisjoint(op.operands)]
        (value,) = self.nest.ops(b, ops, local, [])
        return value

    def _put(self, b: Builder, local: dict[Value, Value], value: Value) -> None:
        b.multi("store", *(local[v] for v in self.store.operands[:-1]), value)
