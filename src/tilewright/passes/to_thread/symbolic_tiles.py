"""Tiles that stay formulas as long as nobody needs their numbers. Part of `lower_tiles`.

In: index arithmetic, comparisons and broadcasts of the tile stage. Out: an index as `base + factor * coordinate`, a mask as the edges it asks for, or what is the
same in a whole vector as one number for each; None where registers have to hold the numbers.

    %j = add %i, %n : tile<i64, [1024]>     with %i = base + coordinate   ->  (base + n) + coordinate
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from tilewright.base.dtypes import bool_, i64, u32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Tile, Vec, dtype_of
from tilewright.passes.common.registers import (
    Cell,
    Held,
    Mask,
    RegisterIndex,
    Registers,
    SameInVector,
    Shape,
    ThreadView,
    shape_of,
)


def symbolic(view: ThreadView, b: Builder, op: Op, held: Sequence[Held], result: Tile) -> Held | None:
    """Index arithmetic and edge masks that need not be computed yet."""
    if op.opcode == "floordiv" and view.kernel.attrs.get("short_rows"):
        return _quotient(view, b, held, result)
    if op.opcode in ("add", "sub", "mul") and any(isinstance(h, SameInVector) for h in held):
        return _uniform(view, b, op, held, result)
    if op.opcode in ("add", "sub") and all(isinstance(h, RegisterIndex) for h in held):
        first, second = held
        assert isinstance(first, RegisterIndex) and isinstance(second, RegisterIndex)
        sign = 1 if op.opcode == "add" else -1
        factors = dict(first.factors)
        for a, factor in second.factors.items():
            factors[a] = factors.get(a, 0) + sign * factor
        base = b.op(op.opcode, first.base, second.base)
        view.divisors[base] = gcd(view.divisors.get(first.base, 1), view.divisors.get(second.base, 1))
        return RegisterIndex(result.shape, base, {a: f for a, f in factors.items() if f})
    if op.opcode == "mul" and all(isinstance(h, RegisterIndex) for h in held):
        for one, other in (tuple(held), tuple(reversed(held))):
            assert isinstance(one, RegisterIndex) and isinstance(other, RegisterIndex)
            scale = view.constants.get(other.base)
            if not other.factors and scale is not None:
                base = b.mul(one.base, other.base)
                view.divisors[base] = view.divisors.get(one.base, 1) * abs(scale)
                return RegisterIndex(result.shape, base, {a: f * scale for a, f in one.factors.items() if scale})
            if not other.factors and one.factors and _is_per_thread(view, one, result.shape):
                # Rows of a length that is a size, one for each thread: where its row begins is one number.
                start = view.first(b, one, view.cells(result.shape)[0])
                base = b.mul(start, other.base)
                view.divisors[base] = view.divisors.get(start, 1) * view.divisors.get(other.base, 1)
                return RegisterIndex(result.shape, base, {})
    if op.opcode == "and" and view.shifted and all(isinstance(h, RegisterIndex) and _is_per_thread(view, h, result.shape) for h in held):
        # How far a thread's row is shifted is one number, too.
        return RegisterIndex(result.shape, b.op("and", *(view.first(b, h, view.cells(result.shape)[0]) for h in held if isinstance(h, RegisterIndex))), {})
    if op.opcode == "lt" and all(isinstance(h, RegisterIndex) for h in held):
        index, bound = held
        assert isinstance(index, RegisterIndex) and isinstance(bound, RegisterIndex)
        if not bound.factors:
            return Mask(result.shape, ((index, bound.base),), ())
    if op.opcode == "and" and result.dtype is bool_ and all(isinstance(h, Mask | Registers) for h in held):
        parts = [h if isinstance(h, Mask) else Mask(result.shape, (), (h,)) for h in held]  # type: ignore[arg-type]
        if any(p.edges or any(o.shape != result.shape for o in p.others) for p in parts):
            return Mask(result.shape, parts[0].edges + parts[1].edges, parts[0].others + parts[1].others)
    return None


def _is_per_thread(view: ThreadView, index: RegisterIndex, shape: Shape) -> bool:
    """Whether an index has one value in each thread, where such values are asked for: threads have a row each, which begins anywhere, or run one after another."""
    return (view.shifted or view.target.has("serial")) and not index.factors.get(view.axis, 0) and len(view.cells(shape)) == 1


def _quotient(view: ThreadView, b: Builder, held: Sequence[Held], result: Tile) -> Held | None:
    """The index of a short row divided by one number, in 32 bits; once for a vector where that has one quotient."""
    index, by = held
    if not isinstance(index, RegisterIndex) or not isinstance(by, RegisterIndex) or by.factors:
        return None
    divisor = b.cast(by.base, u32)
    cells: dict[Cell, Value] = {}
    uniform = view.is_wide(result.shape)
    for cell in view.cells(result.shape):
        first = view.first(b, index, cell)
        uniform = uniform and view.divisors.get(first, 1) % view.vector == 0 and view.divisors.get(by.base, 1) % view.vector == 0
        cells[cell] = first
    if uniform or not view.is_wide(result.shape):
        cells = {cell: b.cast(b.op("floordiv", b.cast(first, u32), divisor), i64) for cell, first in cells.items()}
        return SameInVector(result.shape, cells) if uniform else Registers(result.shape, cells)
    wide = b.op("broadcast", divisor, width=view.vector)
    cells = {cell: b.cast(b.op("floordiv", b.cast(view.index_cell(b, index, cell), u32), wide), i64) for cell in cells}
    return Registers(result.shape, cells)


def _uniform(view: ThreadView, b: Builder, op: Op, held: Sequence[Held], result: Tile) -> Held | None:
    """Arithmetic on tiles that are the same along a vector; None where one is not."""
    cells: dict[Cell, Value] = {}
    for cell in view.cells(result.shape):
        numbers: list[Value] = []
        for one in held:
            if isinstance(one, RegisterIndex) and not one.factors.get(view.axis, 0):
                numbers.append(view.first(b, one, view.collapsed(cell, one.shape)))
            elif isinstance(one, SameInVector):
                numbers.append(one.cells[cell])
            else:
                return None
        cells[cell] = b.op(op.opcode, *numbers)
    return SameInVector(result.shape, cells)


def broadcast(view: ThreadView, b: Builder, held: Held, result: Value) -> Held:
    """A number or tile in the shape of `result`; an index stays a formula."""
    shape = shape_of(result)
    if isinstance(held, Value):
        if dtype_of(held.type) is i64:
            return RegisterIndex(shape, held, {})
        wide = b.op("broadcast", held, width=view.vector) if view.is_wide(shape) else held
        return Registers(shape, dict.fromkeys(view.cells(shape), wide))
    if isinstance(held, RegisterIndex):
        return RegisterIndex(shape, held.base, held.factors)
    if isinstance(held, Mask):
        return Mask(shape, held.edges, held.others)
    if isinstance(held, SameInVector):
        return SameInVector(shape, {cell: held.cells[view.collapsed(cell, held.shape)] for cell in view.cells(shape)})
    if dtype_of(result.type) is bool_ and held.shape[view.axis] < shape[view.axis]:
        # The same for a whole vector: that must not be forgotten, for then the vector is loaded at once or not at all.
        return Mask(shape, (), (held,))
    memo: dict[Value, Value] = {}
    cells: dict[Cell, Value] = {}
    for cell in view.cells(shape):
        source = held.cells[view.collapsed(cell, held.shape)]
        if view.is_wide(shape) and not isinstance(source.type, Vec):
            if source not in memo:
                memo[source] = b.op("broadcast", source, width=view.vector)
            source = memo[source]
        cells[cell] = source
    return Registers(shape, cells)
