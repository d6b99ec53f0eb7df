"""Tiles that are not computed: indices and edges stay formulas as long as nobody needs their numbers.

In: ops over tiles in blocked layouts that make indices, compare them, repeat them or take one element. Out: `Index` and `Mask` values, or registers
where a formula does not do. `lower_tiles.py` has the ops around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from tilewright.base.dtypes import bool_, i64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Tile, Vec, dtype_of
from tilewright.passes.registers import Cell, Held, Index, Mask, Registers, ThreadView, shape_of


class TileSymbols(ThreadView):
    env: dict[Value, Held]

    def _symbolic(self, b: Builder, op: Op, held: Sequence[Held], result: Tile) -> Held | None:
        """Index arithmetic and edge masks that need not be computed yet."""
        if op.opcode in ("add", "sub") and all(isinstance(h, Index) for h in held):
            first, second = held
            assert isinstance(first, Index) and isinstance(second, Index)
            sign = 1 if op.opcode == "add" else -1
            factors = dict(first.factors)
            for a, factor in second.factors.items():
                factors[a] = factors.get(a, 0) + sign * factor
            base = b.op(op.opcode, first.base, second.base)
            self.divisors[base] = gcd(self.divisors.get(first.base, 1), self.divisors.get(second.base, 1))
            return Index(result.shape, base, {a: f for a, f in factors.items() if f})
        if op.opcode == "mul" and all(isinstance(h, Index) for h in held):
            for one, other in (tuple(held), tuple(reversed(held))):
                assert isinstance(one, Index) and isinstance(other, Index)
                scale = self.constants.get(other.base)
                if not other.factors and scale is not None:
                    base = b.mul(one.base, other.base)
                    self.divisors[base] = self.divisors.get(one.base, 1) * abs(scale)
                    return Index(result.shape, base, {a: f * scale for a, f in one.factors.items() if scale})
        if op.opcode == "lt" and all(isinstance(h, Index) for h in held):
            index, bound = held
            assert isinstance(index, Index) and isinstance(bound, Index)
            if not bound.factors:
                return Mask(result.shape, ((index, bound.base),), ())
        if op.opcode == "and" and result.dtype is bool_ and all(isinstance(h, Mask | Registers) for h in held):
            parts = [h if isinstance(h, Mask) else Mask(result.shape, (), (h,)) for h in held]  # type: ignore[arg-type]
            if any(p.edges or any(o.shape != result.shape for o in p.others) for p in parts):
                return Mask(result.shape, parts[0].edges + parts[1].edges, parts[0].others + parts[1].others)
        return None

    def _iota(self, b: Builder, op: Op) -> None:
        axis = op.attrs["axis"]
        assert isinstance(axis, int)
        zero = b.index(0)
        self.constants[zero] = 0
        self.divisors[zero] = 0
        self.env[op.result] = Index(shape_of(op.result), zero, {axis: 1})

    def _broadcast(self, b: Builder, op: Op) -> None:
        held, shape = self.env[op.operands[0]], shape_of(op.result)
        if isinstance(held, Value):
            if dtype_of(held.type) is i64:
                self.env[op.result] = Index(shape, held, {})
                return
            wide = b.op("broadcast", held, width=self.vector) if self.is_wide(shape) else held
            self.env[op.result] = Registers(shape, dict.fromkeys(self.cells(shape), wide))
        elif isinstance(held, Index):
            self.env[op.result] = Index(shape, held.base, held.factors)
        elif isinstance(held, Mask):
            self.env[op.result] = Mask(shape, held.edges, held.others)
        elif dtype_of(op.result.type) is bool_ and held.shape[self.axis] < shape[self.axis]:
            # The same for a whole vector: that must not be forgotten, for then the vector is loaded at once or not at all.
            self.env[op.result] = Mask(shape, (), (held,))
        else:
            memo: dict[Value, Value] = {}
            cells: dict[Cell, Value] = {}
            for cell in self.cells(shape):
                source = held.cells[self.collapsed(cell, held.shape)]
                if self.is_wide(shape) and not isinstance(source.type, Vec):
                    if source not in memo:
                        memo[source] = b.op("broadcast", source, width=self.vector)
                    source = memo[source]
                cells[cell] = source
            self.env[op.result] = Registers(shape, cells)

    def _item(self, b: Builder, op: Op) -> None:
        held = self.registers(b, self.env[op.operands[0]], shape_of(op.operands[0]))
        (only,) = held.cells.values()
        self.env[op.result] = only
