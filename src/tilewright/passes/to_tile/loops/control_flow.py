"""Branches and serial loops of a nest.

In: `if` and `for` of the loop stage. Out: the same over tiles where all elements of a tile go the same way; masks and choices where they do not.

    if %c { %v = load %x, %i }  ->  %v = load %x, %i {masked}; select %c, %v, …
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from tilewright.analysis.loop_nest import is_sweep
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.passes.common.nest_shapes import Condition, item, join, shape_of, widen
from tilewright.passes.to_tile.loops.even_tiles import border_tests
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering
from tilewright.passes.to_tile.loops.one_shape import branches, carrying_loop, within_edges

if TYPE_CHECKING:
    from tilewright.passes.to_tile.loops.sweeps import Sweeps


class ControlFlow:
    """The branches and loops of one kernel."""

    def __init__(self, lowering: NestLowering) -> None:
        self.lowering, self.schedule = lowering, lowering.schedule
        kernel = lowering.kernel
        self.border_tests = set() if lowering.target.simt or kernel.attrs.get("frames") else border_tests(kernel)
        """Conditions that are asked of a whole tile first."""

    @cached_property
    def _sweeps(self) -> Sweeps:
        from tilewright.passes.to_tile.loops.sweeps import Sweeps

        return Sweeps(self.lowering)

    def lower_if(self, b: Builder, op: Op, cond: Value, env: dict[Value, Value], masks: list[Condition]) -> Sequence[Value]:
        """What an `if` gives: a condition that varies inside the tile masks both branches and chooses."""
        if shape_of(cond) and id(op) in self.border_tests:
            self.border_tests.discard(id(op))  # so that the other branch is masked
            holds = cond
            for axis in range(len(shape_of(cond))):
                holds = b.op("reduce_tile", holds, kind="and", axis=axis)
            results = branches(
                b, b.op("item", holds), lambda inner: self.lowering.ops(inner, op.regions[0].ops, dict(env), masks),
                lambda inner: tuple(self.lower_if(inner, op, cond, dict(env), masks)),
            )  # fmt: skip
            self.border_tests.add(id(op))
            return results
        if shape_of(cond):
            then = self.lowering.ops(b, op.regions[0].ops, env, [*masks, Condition(cond, edge=False)])
            if id(op) in self.lowering.unchosen or (not self.lowering.target.simt and _is_zero_elsewhere(b, op, cond, then)):
                return then
            inverse = b.op("not", cond)
            otherwise = self.lowering.ops(b, op.regions[1].ops, env, [*masks, Condition(inverse, edge=False)])
            results = []
            for x, y in zip(then, otherwise, strict=True):
                shape = join(shape_of(cond), shape_of(x), shape_of(y))
                results.append(b.select(*(widen(b, v, shape) for v in (cond, x, y))))
            return results
        first, second = op.regions
        return branches(
            b, cond, lambda inner: self.lowering.ops(inner, first.ops, dict(env), masks), lambda inner: self.lowering.ops(inner, second.ops, dict(env), masks)
        )

    def lower_for(
        self, b: Builder, op: Op, operands: Sequence[Value], env: dict[Value, Value], masks: list[Condition]
    ) -> Sequence[Value]:
        """What a loop leaves."""
        low, high, step, *init = operands
        position = self.lowering.reduce_position
        if self.lowering.scan is not None and op is self.lowering.scan.loop and position is not None:
            from tilewright.passes.rows.scan_rows import ScanRows

            with self.lowering.within_reduction():
                return ScanRows(self.lowering, self.lowering.scan, position, self.schedule.reduce_tile, env, masks).run(b, low, high, init)
        if self.lowering.inner_walks and id(op) not in self.lowering.inner_walks:
            pass
        elif is_sweep(op) and position is not None and not self.lowering.inside_reduction and not (shape_of(low) or shape_of(high)):
            with self.lowering.within_reduction():
                self._sweeps.lower(b, op, low, high, step, env, masks)
            return []
        elif is_sweep(op) and position is not None and not self.lowering.inside_reduction and self.schedule.row_lanes:
            with self.lowering.within_reduction():
                self._sweeps.lower_ragged(b, op, env, masks)
            return []
        varying = join(shape_of(low), shape_of(high))

        def body(inner: Builder, index: Value, *carried: Value) -> Sequence[Value]:
            local = dict(env)
            local[op.regions[0].args[0]] = index
            local.update(zip(op.regions[0].args[1:], carried, strict=True))
            if not varying:
                return self.lowering.ops(inner, op.regions[0].ops, local, masks)
            # Bounds differ inside the tile: walk the common range and mask what lies outside one's own.
            wide = widen(inner, index, varying)
            active = inner.logical_and(
                inner.op("ge", wide, widen(inner, low, varying)), inner.op("lt", wide, widen(inner, high, varying))
            )
            values = self.lowering.ops(inner, op.regions[0].ops, local, [*masks, Condition(active, edge=False)])
            kept = []
            for new, old in zip(values, carried, strict=True):
                shape = join(varying, shape_of(new), shape_of(old))
                kept.append(inner.select(*(widen(inner, v, shape) for v in (active, new, old))))
            return kept

        if varying:
            high = within_edges(b, high, low, masks)
            varying = join(varying, shape_of(high))
            bounds = self.lowering.extreme(b, "min", low), self.lowering.extreme(b, "max", high)
        else:
            bounds = low, high
        return carrying_loop(b, bounds[0], bounds[1], item(b, step), init, body, op)


def _is_zero_elsewhere(b: Builder, op: Op, cond: Value, then: Sequence[Value]) -> bool:
    """Whether an `if` gives an element, or zero: the load that its condition masks gives both."""
    made = next((o for o in reversed(b.ops) if len(then) == 1 and then[0] in o.results), None)
    if made is None or made.opcode != "load" or not made.attrs.get("masked") or made.operands[-1] is not cond:
        return False
    (zero,) = op.regions[1].yields
    if any(o.opcode not in ("const", "yield") for o in op.regions[1].ops):
        return False  # what else the other branch does is done
    constant = next((o for o in op.regions[1].ops if zero in o.results), None)
    return constant is not None and str(constant.attrs["value"]) in ("0", "0.0")
