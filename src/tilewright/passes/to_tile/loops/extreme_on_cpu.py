"""min, max, argmin and argmax along a vector axis of a CPU, at the speed of one compare per vector.

Part of `lower_loops`: in comes a reduction of one of these kinds, out come tile-stage loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import dtype_of
from tilewright.passes.common.combine import combine, identities
from tilewright.passes.common.nest_shapes import Condition, shape_of, widen
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering
from tilewright.passes.to_tile.loops.strips import aligned_head


class ReductionBody:
    """A reduction's body, evaluated where `ExtremeOnCpu` asks for it."""

    def __init__(self, lowering: NestLowering, env: dict[Value, Value], masks: list[Condition]) -> None:
        self.lowering, self.env, self.masks = lowering, env, masks

    def enter(self, op: Op, dimension: int, index: Value) -> None:
        """From now on the body is evaluated at this index of an outer dimension."""
        self.env = {**self.env, op.regions[0].args[dimension]: index}

    def values(self, b: Builder, op: Op, index: Value, inside: Value | None = None) -> tuple[Value, ...]:
        """What the reduction's body yields at an index or a tile of indices, in the index's shape; anything where an index is not `inside`."""
        found = self.lowering.row_terms(b, op, {**self.env, op.regions[0].args[-1]: index}, self.masks, inside)
        return tuple(widen(b, v, shape_of(index)) for v in found)

    def head(self, b: Builder, op: Op) -> Value | None:
        """How many elements lie before the first aligned one."""
        index = op.regions[0].args[-1]
        return aligned_head(self.lowering, b, op.regions[0].ops, {**self.env, index: b.index(0)}, index)


class ExtremeOnCpu:
    """min, max, argmin and argmax along a vector axis, at the speed of one compare per vector.

    A NaN must win, and -0 is below 0: `max` and `min` of the IR are so. AArch64 has instructions for that. Elsewhere plain vector comparisons
    do not give it, so a run is reduced with `larger`, which ignores NaN, next to a probe `p = fma(v, 0, p)` that turns NaN when any value
    was NaN or infinite; only then, and where the result is a zero of either sign, is the run reduced again exactly.
    argmin and argmax find the extreme value of short runs first and look for its place only in runs that win:
    `argmax(v) = min{i : v[i] == max(v)}`.
    """

    def __init__(self, body: ReductionBody, op: Op, position: int, tile: int, run: int, rising: bool, native: bool, register: int = 0, masked: bool = False) -> None:
        """`position` is the tile axis, `tile` its extent, `run` the elements searched at a time; `rising` says that later
        elements have larger indices, `native` that the processor's own maximum is that of the IR. What is left behind whole tiles is taken by registers
        of so many elements, the last of which is `masked` or single elements; 0: all by single elements."""
        self.register, self.masked = register, masked
        self.outer: Sequence[Value] = ()
        """Extents of outer dimensions, of which results are carried through in lanes."""
        self.inside: Value | None = None
        self.body, self.op, self.position, self.tile, self.run, self.rising = body, op, position, tile, run, rising
        self.kind = str(op.attrs["kind"])
        self.value_kind = self.kind.removeprefix("arg")
        self.dtypes = [dtype_of(r.type) for r in op.results]
        self.nothing = identities(self.kind, self.dtypes)
        self.is_float = self.dtypes[0].is_float
        self.exact = native or not self.is_float

    def lower(self, b: Builder, extent: Value, start: Sequence[Value], outer: Sequence[Value] = ()) -> Sequence[Value]:
        """The reduction over 0..extent, and of values (no places) over outer dimensions."""
        self.outer = outer
        if self.kind == self.value_kind:
            found = self._extreme(b, b.index(0), extent)
            return [b.op(self.kind, start[0], found)]
        return self._search(b, extent, start)

    def _values(self, b: Builder, index: Value) -> tuple[Value, ...]:
        return self.body.values(b, self.op, index, self.inside)

    def _walk(
        self, b: Builder, low: Value, high: Value, init: Sequence[Value], step: Callable[..., Sequence[Value]],
        fold: Sequence[str],
    ) -> list[Value]:  # fmt: skip
        """Carry values over low..high, in each of the outer dimensions: tiles, registers, folded by `fold` at the end, and single elements."""
        count = len(init)
        widths = (self.tile, self.register) if self.register else (self.tile,)
        lanes = [self._lanes(b, v, width) for width in widths for v in init]
        carried = self._dimension(b, 0, [*lanes, *([] if self.masked else init)], low, high, len(init), step)
        folded = [b.op("item", b.op("reduce_tile", v, kind=fold[n % count], axis=self.position)) for n, v in enumerate(carried[: len(lanes)])]
        parts = [*folded, *carried[len(lanes) :]]
        total = parts[:count]
        for place in range(count, len(parts), count):
            total = [b.op(kind, a, c) for kind, a, c in zip(fold, total, parts[place : place + count], strict=True)]
        return total

    def _lanes(self, b: Builder, value: Value, width: int) -> Value:
        return b.op("broadcast", value, shape=tuple(width if a == self.position else 1 for a in range(self.body.lowering.rank)))

    def _dimension(
        self, b: Builder, number: int, carried: Sequence[Value], low: Value, high: Value, count: int, step: Callable[..., Sequence[Value]]
    ) -> Sequence[Value]:
        if number == len(self.outer):
            return self._row(b, carried, low, high, count, step)

        def body(inner: Builder, index: Value, *carried: Value) -> list[Value]:
            self.body.enter(self.op, number, index)
            return list(self._dimension(inner, number + 1, carried, low, high, count, step))

        return b.for_(b.index(0), self.outer[number], b.index(1), list(carried), body, name="k")

    def _row(self, b: Builder, carried: Sequence[Value], low: Value, high: Value, count: int, step: Callable[..., Sequence[Value]]) -> Sequence[Value]:
        """Whole tiles, then whole registers and what is left."""
        tile = b.index(self.tile)
        middle = b.add(low, b.mul(b.op("floordiv", b.sub(high, low), tile), tile))
        done = list(b.for_(low, middle, tile, list(carried[:count]), lambda inner, k, *c: step(inner, self._tile(inner, k, self.tile), *c)))
        if self.register:
            register, end = b.index(self.register), high
            if not self.masked:
                end = b.add(middle, b.mul(b.op("floordiv", b.sub(high, middle), register), register))

            def few(inner: Builder, k: Value, *old: Value) -> list[Value]:
                index = self._tile(inner, k, self.register)
                if not self.masked:
                    return list(step(inner, index, *old))
                self.inside = inside = inner.op("lt", index, inner.like(high, index))
                new = step(inner, index, *old)
                self.inside = None
                return [inner.select(inside, n, o) for n, o in zip(new, old, strict=True)]

            done += b.for_(middle, end, register, list(carried[count : 2 * count]), few)
            middle = end
        if not self.masked:
            done += b.for_(middle, high, b.index(1), list(carried[-count:]), step)
        return done

    def _tile(self, b: Builder, first: Value, width: int) -> Value:
        return self.body.lowering.index_tile(b, first, self.position, width)

    def _extreme(self, b: Builder, low: Value, high: Value) -> Value:
        """The extreme value of a run, NaN if there is one."""
        init = b.const(self.nothing[0], self.dtypes[0])

        def exactly(inner: Builder) -> list[Value]:
            return self._walk(
                inner, low, high, [init], lambda i, k, best: [i.op(self.value_kind, best, self._values(i, k)[0])], [self.value_kind]
            )

        if self.exact:
            return exactly(b)[0]

        def quickly(inner: Builder, index: Value, best: Value, probe: Value) -> list[Value]:
            value = self._values(inner, index)[0]
            pick = "larger" if self.value_kind == "max" else "smaller"
            return [inner.op(pick, value, best), inner.fma(value, inner.splat(0.0, value), probe)]

        best, probe = self._walk(b, low, high, [init, b.const(0.0, self.dtypes[0])], quickly, [self.value_kind, "add"])
        # Of zeros the quick comparison gives any: -0 is below 0, which only counts where zero is the result.
        unsure = b.op("or", b.op("isnan", probe), b.op("eq", best, b.const(0.0, self.dtypes[0])))
        return b.if_(unsure, exactly, lambda inner: [best])[0]

    def _search(self, b: Builder, extent: Value, start: Sequence[Value]) -> Sequence[Value]:
        # A first, shorter run makes all others start at an aligned address; what is one run anyway stays one.
        head = self.body.head(b, self.op)
        run = b.index(self.run)
        first = b.index(0) if head is None else b.select(b.op("le", extent, run), b.index(0), b.sub(head, run))
        if self.rising:
            return self._search_rising(b, first, extent, start)

        def each_run(inner: Builder, begin: Value, best: Value, place: Value) -> Sequence[Value]:
            low, high = self._ends(inner, begin, extent)
            extreme = self._extreme(inner, low, high)
            better, tie = self._compare(inner, extreme, best)

            def locate(then: Builder) -> Sequence[Value]:
                found = self._locate(then, low, high, extreme)
                return [extreme, then.select(better, found, then.op("min", found, place))]

            return inner.if_(inner.op("or", better, tie), locate, lambda otherwise: [best, place])

        return b.for_(first, extent, b.index(self.run), list(start), each_run, name="run")

    def _search_rising(self, b: Builder, first: Value, extent: Value, start: Sequence[Value]) -> Sequence[Value]:
        """Where later elements have larger indices the first run that wins is enough to know; its place is looked for once."""
        nothing = b.const(self.nothing[0], self.dtypes[0])
        none = b.index(-(1 << 62))

        def each_run(inner: Builder, begin: Value, best: Value, where: Value) -> Sequence[Value]:
            low, high = self._ends(inner, begin, extent)
            extreme = self._extreme(inner, low, high)
            better, _ = self._compare(inner, extreme, best)
            # Values equal to the identity win where nothing has won yet.
            fresh = inner.op("and", inner.op("eq", where, none), inner.op("lt", low, high))
            wins = inner.op("or", better, fresh)
            return [inner.select(wins, extreme, best), inner.select(wins, begin, where)]

        best, where = b.for_(first, extent, b.index(self.run), [nothing, none], each_run, name="run")
        low, high = self._ends(b, where, extent)
        return combine(b, self.kind, start, (best, self._locate(b, low, high, best)))

    def _ends(self, b: Builder, begin: Value, extent: Value) -> tuple[Value, Value]:
        """A run's first element and the one after its last, inside 0..extent."""
        low = b.op("max", begin, b.index(0))
        return low, b.op("max", b.op("min", b.add(begin, b.index(self.run)), extent), low)

    def _compare(self, b: Builder, value: Value, best: Value) -> tuple[Value, Value]:
        """Whether a value beats the best one, and whether it equals it; NaN beats everything."""
        better = b.op("gt" if self.kind == "argmax" else "lt", value, best)
        tie = b.op("eq", value, best)
        if self.is_float:
            nan, best_nan = b.op("isnan", value), b.op("isnan", best)
            better = b.op("or", better, b.op("and", nan, b.op("not", best_nan)))
            tie = b.op("or", tie, b.op("and", nan, best_nan))
        return better, tie

    def _locate(self, b: Builder, low: Value, high: Value, extreme: Value) -> Value:
        """The smallest index in the run whose value is `extreme`."""

        def pick(inner: Builder, k: Value, best: Value) -> list[Value]:
            value, index = self._values(inner, k)
            same = inner.op("eq", value, inner.like(extreme, value))
            if self.is_float:
                same = inner.op("or", same, inner.op("isnan", value))
            return [inner.op("min", best, inner.select(same, index, inner.splat(self.nothing[1], index)))]

        return self._walk(b, low, high, [b.const(self.nothing[1], self.dtypes[1])], pick, ["min"])[0]
