"""Loop stage -> tile stage, for loops that are scans on a GPU: the threads of a block walk a line together.

In: the loop, and what `lower_loops` has lowered before it. Out: a loop over tiles of the line. Each step computes the terms of a tile, then what is carried into
each of its turns (`scan_tile`), and then the rest of the body for all of them at once; the last step is masked.

    for 0, %n, 1, %s0 (%i, %s) { %t = load %x, %i; %r = add %s, %t; store %out, %i, %r; yield %r }
    -> for 0, %n, 1024, %s0 (%k, %first) { %t = load %x, %k + iota; %s, %next = scan_tile %t, %first; %r = add %s, %t; store %out, …; yield %next }
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of
from tilewright.passes.common.nest_shapes import Condition, join, shape_of, widen
from tilewright.passes.common.scan_loops import ScanLoop, nothing
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering
from tilewright.passes.to_tile.loops.one_shape import carrying_loop


class ScanRows:
    """One loop, in steps of `tile` turns along the axis `position` of the tiles."""

    def __init__(self, lowering: NestLowering, scan: ScanLoop, position: int, tile: int, env: dict[Value, Value], masks: list[Condition]) -> None:
        self.lowering, self.scan, self.position, self.tile, self.env, self.masks = lowering, scan, position, tile, env, masks

    def run(self, b: Builder, low: Value, high: Value, init: Sequence[Value]) -> Sequence[Value]:
        """What is carried after the loop."""
        loop, tile = self.scan.loop, b.index(self.tile)
        count = b.op("max", b.sub(high, low), b.index(0))
        whole = b.mul(b.op("floordiv", count, tile), tile)

        def step(inner: Builder, first: Value, masked: bool, carried: Sequence[Value]) -> Sequence[Value]:
            number = self.lowering.index_tile(inner, first, self.position, self.tile)
            edge = [Condition(inner.op("lt", number, inner.like(count, number)), edge=True)] if masked else []
            return self._turns(inner, inner.add(inner.like(low, number), number), edge, carried)

        sums = carrying_loop(b, b.index(0), whole, tile, init, lambda inner, k, *c: step(inner, k, False, c), loop)
        shapes = [shape_of(v) for v in sums]
        return b.if_(
            b.op("lt", whole, count),
            lambda inner: [widen(inner, v, s) for v, s in zip(step(inner, whole, True, sums), shapes, strict=True)],
            lambda inner: list(sums),
        )

    def _turns(self, b: Builder, index: Value, edge: list[Condition], carried: Sequence[Value]) -> list[Value]:
        """A tile of turns: what is carried after the last of them."""
        body = self.scan.loop.regions[0]
        local, masks = {**self.env, body.args[0]: index}, [*self.masks, *edge]
        after: dict[int, Value] = {}
        done: set[int] = set()
        for scan in self.scan.scans:
            self.lowering.ops(b, scan.slice, local, masks)
            done |= {id(op) for op in scan.slice}
            term = local[scan.term[0]]
            if len(scan.term) > 1:
                factors = [local[v] for v in scan.term]
                shape = join(*(shape_of(v) for v in factors))
                term = b.mul(*(widen(b, v, shape) for v in factors))
            first = carried[scan.position]
            shape = join(shape_of(term), shape_of(index), shape_of(first))
            term = widen(b, term, shape)
            if edge:
                term = b.select(widen(b, edge[0].value, shape), term, b.splat(nothing(scan.kind, dtype_of(term.type)), term))
            before = tuple(1 if axis == self.position else extent for axis, extent in enumerate(shape))
            local[scan.carried], last = b.multi("scan_tile", term, widen(b, first, before), kind=scan.kind, axis=self.position)
            after[scan.position] = b.op("item", last) if all(extent == 1 for extent in before) else last
        self.lowering.ops(b, [op for op in body.ops if id(op) not in done and op.opcode != "yield"], local, masks)
        return [after[position] for position in range(len(carried))]
