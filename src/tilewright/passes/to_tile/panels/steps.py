"""Numbers of a contraction on a CPU, taken apart and counted: the indices that make up a row, a column, or a step of the sum.

In: numbers, and the extents they are made of. Out: tile-stage ops that bind loop indices to their digits, walk the steps of a stretch, cut numbers where their outer
digits change, and walk what is left in vectors. `copies.py` and `columns_in_place.py` build on these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.analysis.contraction import Contraction
from tilewright.base.dtypes import DType, i64
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.passes.schedules.matrix import CpuProduct
from tilewright.passes.to_tile.lower_loops import LoopLowering
from tilewright.passes.to_tile.panels.count_up import count_up
from tilewright.passes.to_tile.panels.sides import Side


def _extent(b: Builder, extent: Size, axis: int, phases: bool) -> Value:
    if phases and extent.constant is not None:
        return b.op("const", value=extent.constant, dtype=i64, kept=f"extent{axis}")
    return b.index(extent)


def local_array(b: Builder, name: str, shape: Sequence[int], dtype: DType) -> Value:
    """Memory of a block's own."""
    return b.op("alloc", dtype=dtype, shape=tuple(shape), space="local", align=64, name=name)


class PanelSteps(LoopLowering):
    """Bodies are lowered as for loops, over tiles of rank 2."""

    found: Contraction
    matrix: CpuProduct
    dtype: DType
    lanes: int
    a: Side
    b: Side
    k_extents: tuple[Size, ...]
    k_indices: tuple[Value, ...]

    def _apart(self, b: Builder, number: Value, extents: Sequence[Size], phases: bool = False) -> list[Value]:
        """The digits of a number, the last fastest. `phases`: extents that are numbers are divided by as any other."""
        digits: list[Value] = []
        for axis in reversed(range(1, len(extents))):
            quotient = b.op("floordiv", number, _extent(b, extents[axis], axis, phases))
            digits.insert(0, b.sub(number, b.mul(quotient, _extent(b, extents[axis], axis, phases))))
            number = quotient
        return [number, *digits]

    def _steps_apart(self, b: Builder, number: Value) -> list[Value]:
        """The indices that make up a step of the sum, taken apart once for a block of it. Phases differ in how many terms they have, and in little else: their
        code is the same but for these numbers (`codegen/cpu/same_bodies.py`)."""
        return self._apart(b, number, self.k_extents, "phase_of" in self.kernel.attrs)

    def _k_loop(
        self, b: Builder, start: Value, count: Value, body: Callable[[Builder, Value, dict[Value, Value]], None]
    ) -> None:
        """`count` steps of the sum from `start` on. The indices that make up a step are counted up, not taken apart every time."""
        zero, one = b.index(0), b.index(1)
        if len(self.k_indices) == 1:

            def plain(inner: Builder, k: Value) -> list[Value]:
                body(inner, k, {self.k_indices[0]: inner.add(start, k)})
                return []

            b.for_(zero, count, one, [], plain, name="k")
            return

        def step(inner: Builder, k: Value, *digits: Value) -> list[Value]:
            body(inner, k, dict(zip(self.k_indices, digits, strict=True)))
            return self._count_up(inner, digits)

        b.for_(zero, count, one, self._steps_apart(b, start), step, name="k")

    def _count_up(self, b: Builder, digits: Sequence[Value]) -> list[Value]:
        """The indices of the next step of the sum."""
        return count_up(b, digits, self.k_extents)

    def _segments(
        self, b: Builder, extents: Sequence[Size], limit: Size, low: Value, high: Value,
        body: Callable[[Builder, Sequence[Value], Value, Value, Value], None],
    ) -> None:  # fmt: skip
        """Cut the numbers low..high where their outer digits change: `body(builder, outer digits, first, end, base)` for each piece, whose
        numbers are `base` and the innermost index, below `limit`."""
        if len(extents) == 1:
            body(b, (), low, high, b.index(0))
            return
        row = b.index(extents[-1])

        def piece(inner: Builder, outer: Value, *digits: Value) -> list[Value]:
            base = inner.mul(outer, row)
            first, end = (
                inner.op("max", inner.sub(low, base), inner.index(0)),
                inner.op("min", inner.sub(high, base), inner.index(limit)),
            )
            body(inner, digits, first, end, base)
            return count_up(inner, digits, extents[:-1])

        begun, last = b.op("floordiv", low, row), b.op("floordiv", b.sub(b.add(high, row), b.index(1)), row)
        b.for_(begun, last, b.index(1), self._apart(b, begun, extents[:-1]), piece, name="outer")

    def _strips_of(
        self, b: Builder, low: Value, high: Value, widths: Sequence[int], some: Callable[[Builder, Value, int], Sequence[Value]],
        again: bool, masked: Callable[[Builder, Value], Sequence[Value]] | None = None,
    ) -> None:  # fmt: skip
        """Walk low..high in vectors. With `again`, what is left over is done by a vector that ends there and repeats a few elements. What is shorter than a vector is one
        with a mask, where `masked` makes one; else it is done element by element."""
        one, lanes = b.index(1), b.index(widths[-1])

        def vectors(at: Builder) -> list[Value]:
            begin = low
            for width in widths[:-1]:
                middle = at.add(begin, at.mul(at.op("floordiv", at.sub(high, begin), at.index(width)), at.index(width)))
                at.for_(begin, middle, at.index(width), [], lambda inner, k, w=width: some(inner, k, w), name="c")
                begin = middle
            if again:
                at.for_(
                    begin,
                    high,
                    lanes,
                    [],
                    lambda inner, k: some(inner, inner.op("min", k, inner.sub(high, lanes)), widths[-1]),
                    name="c",
                )
                return []
            middle = at.add(begin, at.mul(at.op("floordiv", at.sub(high, begin), lanes), lanes))
            at.for_(begin, middle, lanes, [], lambda inner, k: some(inner, k, widths[-1]), name="c")
            at.for_(middle, high, one, [], lambda inner, k: some(inner, k, 1), name="c")
            return []

        def singles(at: Builder) -> list[Value]:
            if masked is not None:
                at.for_(low, high, lanes, [], masked, name="c")
            else:
                at.for_(low, high, one, [], lambda inner, k: some(inner, k, 1), name="c")
            return []

        if again:
            b.if_(b.op("ge", b.sub(high, low), lanes), vectors, singles)
        else:
            vectors(b)

    def _several(self, b: Builder, first: Value, width: int) -> Value:
        return self.index_tile(b, first, 1, width) if width > 1 else first

    def _bind(
        self, b: Builder, env: dict[Value, Value], indices: Sequence[Value], extents: Sequence[Size], number: Value
    ) -> Value:
        """Bind the loop indices that make up `number`; returns the innermost."""
        digits = self._apart(b, number, extents)
        env.update(zip(indices, digits, strict=True))
        return digits[-1]
