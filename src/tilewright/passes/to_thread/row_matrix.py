"""Tile stage -> thread stage for products of a few rows of x with rows of w, both bf16 or f16, by matrix instructions.

In: a tile-stage kernel of `lower_gemv`; where its attribute `row_matrix` is set, eight lanes have rows of w, and four walk the sum. Out: a thread-stage kernel. Lane 4 g + t holds
16 bytes of row g of w, and of row g + 8, in the registers that `mma` wants of its first factor, since a sum may walk its terms in any order that both factors share. The second
factor's column g is row g of x: so each lane needs that row alone, and what is computed of x (a norm, and the sum that it divides by) is computed for one row in a lane, not for every row of x.

    %x = load [8, 1, k]; %w = load [1, 16, k]; fma (cast %x), (cast %w), %sum   ->   %x' = load row g of x; mma %w, %x', %sum

Lane 4 g + t then has the sums of rows g and g + 8 of w with rows 2 t and 2 t + 1 of x. Behind the loop they are what each of its four lanes adds to the sums of all rows, the rest being zeros,
and lanes and warps meet as they do without matrix instructions (`lower_row_dots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType

from tilewright.base.dtypes import bool_, f32, i32, u32
from tilewright.base.errors import CompilerBug
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attrs, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.types import Tile, Vec, dtype_of
from tilewright.passes.common.registers import Cell, Held, Mask, RegisterIndex, Registers, SameInVector, Shape, shape_of
from tilewright.passes.to_thread.lower_row_dots import RowDotLowering

COLUMNS = 8
"""Rows of x that an instruction takes."""
_ELEMENTWISE = frozenset({"cast", "add", "sub", "mul", "div", "fma", "neg", "max", "min", "select", "broadcast", "sqrt", "rsqrt", "exp", "tanh", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"})
"""Ops that compute an element of a row of x from the same element of others."""

_OWN_ROW = "own_row"
"""Of what is there for all rows of x, that of a lane's own; only inside this lowering."""


def lower_row_dots(kernel: Kernel, target: Target) -> Kernel:
    """The thread-stage kernel."""
    return (RowMatrixLowering if kernel.attrs.get("row_matrix") else RowDotLowering)(kernel, target).run()


class RowMatrixLowering(RowDotLowering):
    """`lower_row_dots`, with sums that are registers of a matrix instruction."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, target)
        rows = [axis for axis, lanes in enumerate(self.layout.lanes[:-1]) if lanes == COLUMNS]
        others = [axis for axis in range(len(self.layout.lanes) - 1) if axis not in rows]
        if len(rows) != 1 or len(others) != 1 or self.layout.lanes[-1] != 4:
            raise CompilerBug.at("TW040", f"rows by matrix instructions in the layout {self.layout}", kernel.span)
        self.n_axis, self.m_axis = rows[0], others[0]
        self.products = {v for v in self.sums if min(shape_of(v)[self.n_axis], shape_of(v)[self.m_axis]) > 1}
        """Sums that matrix instructions add to."""
        self.row_sums = {v for v in self.sums if shape_of(v)[self.m_axis] > 1 and shape_of(v)[self.n_axis] == 1}
        """Sums along rows of x, as their norms are: each lane adds up its own row, and all have all of them behind the loop."""
        self.rows_of_x = max(shape_of(v)[self.m_axis] for v in self.sums)
        self.own_values: dict[Value, Value] = {}
        """For tiles with all rows of x, tiles with the row of a lane's own, in the loop at hand."""
        self.own_rows: dict[Value, Value] = {}
        """The same outside of loops: what is computed of sums along rows, as norms are, is computed for a lane's own row, too. Whoever needs one row needs none of the others."""

    def coordinates(self, b: Builder) -> None:
        super().coordinates(b)
        self.column, self.quarter = self.lane_digits[self.n_axis], self.lane_digits[-1]

    # -- sums -----------------------------------------------------------------------------------------------------

    def _sum_cells(self, shape: Shape) -> list[Cell]:
        """Two columns for each row of w that a lane has; of a sum along a row of x, one."""
        if shape[self.n_axis] == 1:
            return [(0,) * len(shape)]
        extents = [2 if a == self.m_axis else count for a, count in enumerate(self.layout.registers(shape))]
        return list(product(*(range(n) for n in extents)))

    def _sum(self, b: Builder, value: Value, held: Held) -> Registers:
        if value not in self.products | self.row_sums:
            return super()._sum(b, value, held)
        shape = self.summed_shape(shape_of(value))
        assert isinstance(held, Registers)
        if held.shape == shape:
            return held
        zero = b.const(0, f32)
        return Registers(shape, dict.fromkeys(self._sum_cells(shape), zero))

    def bind(self, values: Sequence[Value], flat: Sequence[Value]) -> None:
        remaining = list(flat)
        for value in values:
            if value in self.products | self.row_sums:
                shape = self.summed_shape(shape_of(value))
                cells = self._sum_cells(shape)
                self.env[value] = Registers(shape, dict(zip(cells, remaining[: len(cells)], strict=True)))
            else:
                own = self.summed_shape(value.type.shape) if isinstance(value.type, Tile) and value in self.sums else shape_of(value)
                cells = self.cells(own) if isinstance(value.type, Tile) else [()]
                super().bind([value], remaining[: len(cells)])
            del remaining[: len(cells)]

    def reduce_tile(self, b: Builder, op: Op) -> None:
        if op.operands[0] in self.row_sums:
            own = self.reductions.of_sums(b, op, self._sum(b, op.operands[0], self.env[op.operands[0]]), in_loop=self.depth > 0)
            (mine,) = own.cells.values()
            lanes = 32 // COLUMNS
            alone = self._one_row(op.result)
            self.env[alone] = Registers(shape_of(alone), {(0,) * len(own.shape): mine})
            self.own_rows[op.result] = alone
            self.env[op.result] = Registers(own.shape, {
                cell: b.op("shuffle", mine, b.const(cell[self.m_axis] * lanes, i32), mode="idx") for cell in self.cells(own.shape)
            })  # fmt: skip
            return
        if op.operands[0] not in self.products:
            super().reduce_tile(b, op)
            return
        held = self._sum(b, op.operands[0], self.env[op.operands[0]])
        zero = b.const(0.0, f32)
        cells: dict[Cell, Value] = {}
        for cell in self.cells(held.shape):
            row = cell[self.m_axis]
            mine = held.cells[tuple(row % 2 if a == self.m_axis else c for a, c in enumerate(cell))]
            cells[cell] = b.select(b.op("eq", self.quarter, b.index(row // 2)), mine, zero)
        self.env[op.result] = self.reductions.of_sums(b, op, Registers(held.shape, cells), in_loop=self.depth > 0)

    def lower_op(self, b: Builder, op: Op) -> None:
        if op.opcode == _OWN_ROW and op.operands[0] in self.own_rows:
            self.env[op.result] = self.env[self.own_rows[op.operands[0]]]
            return
        if op.opcode == _OWN_ROW:
            self.env[op.result] = self._selected(b, self.env[op.operands[0]], shape_of(op.result))
            return
        if op.opcode in ("add", "fma") and op.result in self.row_sums:
            self._add_row(b, op)
            return
        if op.opcode != "fma" or op.result not in self.products:
            super().lower_op(b, op)
            self._follow(b, op)
            return
        x, w, total = op.operands
        held = self._sum(b, total, self.env[total])
        ours, theirs = (self.registers(b, self.env[v], shape_of(v)).cells for v in (x, w))
        cells = dict(held.cells)
        dtype = dtype_of(w.type)
        words: dict[Value, list[Value]] = {}

        def parts(value: Value) -> list[Value]:
            if value not in words:
                whole = b.op("bitcast", value, dtype=u32)
                words[value] = [b.op("extract", whole, lane=lane) for lane in range(4)]
            return words[value]

        rows = sorted({cell[self.n_axis] for cell in theirs})
        for step in sorted({cell[-1] for cell in theirs}):
            factor = parts(ours[self._cell(0, 0, step)])
            for first, second in zip(rows[::2], rows[1::2], strict=True):
                one, other = (parts(theirs[self._cell(0, row, step)]) for row in (first, second))
                places = [self._cell(column, row, 0) for row in (first, second) for column in (0, 1)]
                for k in (0, 2):
                    operands = (one[k], other[k], one[k + 1], other[k + 1], factor[k], factor[k + 1], *(cells[place] for place in places))
                    cells.update(zip(places, b.emit("mma", operands, {"dtype": dtype}), strict=True))
        self.env[op.result] = Registers(held.shape, cells)

    def _follow(self, b: Builder, op: Op) -> None:
        """What an op outside of loops computes of numbers of each row of x, for a lane's own row alone."""
        if self.depth or len(op.results) != 1 or op.opcode not in _ELEMENTWISE or not self._has_a_number_of_each_row(op.result):
            return
        if any(v not in self.own_rows and self._has_a_number_of_each_row(v) for v in op.operands):
            return
        alone = self._one_row(op.result)
        attrs = MappingProxyType({**op.attrs, "shape": shape_of(alone)}) if op.opcode == "broadcast" else op.attrs
        super().lower_op(b, replace(op, operands=tuple(self.own_rows.get(v, v) for v in op.operands), results=(alone,), attrs=attrs))
        self.own_rows[op.result] = alone

    def _has_a_number_of_each_row(self, value: Value) -> bool:
        return isinstance(value.type, Tile) and shape_of(value)[self.m_axis] > 1

    def _one_row(self, value: Value) -> Value:
        assert isinstance(value.type, Tile)
        return Value(replace(value.type, shape=tuple(1 if a == self.m_axis else e for a, e in enumerate(shape_of(value)))), value.name)

    def _add_row(self, b: Builder, op: Op) -> None:
        """What a lane has of its own row, added to its sum."""
        total = next(v for v in op.operands if v in self.row_sums)
        held = self._sum(b, total, self.env[total])
        ((cell, number),) = held.cells.items()
        terms = [self.registers(b, self.env[v], shape_of(v)).cells for v in op.operands if v is not total]
        for place in sorted(terms[0]):
            for numbers in zip(*(self._elements(b, term[place]) for term in terms), strict=True):
                number = b.op("add", number, numbers[0]) if op.opcode == "add" else b.fma(numbers[0], numbers[1], number)
        self.env[op.result] = Registers(held.shape, {cell: number})

    def _cell(self, m: int, n: int, k: int) -> Cell:
        found = [0] * len(self.layout.lanes)
        found[self.m_axis], found[self.n_axis], found[-1] = m, n, k
        return tuple(found)

    # -- the row of a lane's own ------------------------------------------------------------------------------------

    def ops(self, b: Builder, ops: Sequence[Op]) -> tuple[Held, ...]:
        return super().ops(b, self._with_own_rows(ops) if any(op.opcode in ("fma", "add") and op.result in self.products | self.row_sums for op in ops) else ops)

    def _with_own_rows(self, ops: Sequence[Op]) -> list[Op]:
        """The ops in which products take the narrow factors, of x the row of a lane's own."""
        made = {result: op for op in ops for result in op.results}
        self.own_values = {}
        found: list[Op] = []
        for op in ops:
            if op.opcode in ("add", "fma") and op.result in self.row_sums:
                found.append(replace(op, operands=tuple(v if v in self.row_sums else self._own(v, made, found) for v in op.operands)))
                continue
            term = self._term(op, made)
            if term is None:
                found.append(op)
                continue
            pair, total, mask = term
            factors = [_narrow(v, made) for v in pair]
            x, w = factors if shape_of(factors[0])[self.m_axis] > 1 else factors[::-1]
            if shape_of(w)[self.m_axis] != 1 or shape_of(x)[self.n_axis] != 1 or any(shape_of(v)[-1] == 1 for v in (x, w)):
                raise CompilerBug.at("TW040", "rows by matrix instructions of factors that are no rows", op.span)
            if dtype_of(x.type) is not dtype_of(w.type):
                raise CompilerBug.at("TW040", f"rows by matrix instructions of {dtype_of(x.type)} and {dtype_of(w.type)}", op.span)
            own = self._own(x, made, found)
            if mask is not None:
                own, w = (self._inside_of(v, mask, found) for v in (own, w))
            found.append(replace(op, opcode="fma", operands=(own, w, total), attrs=MappingProxyType({})))
        return _used(found)

    def _term(self, op: Op, made: dict[Value, Op]) -> tuple[Sequence[Value], Value, Value | None] | None:
        """The factors that an op adds the product of to a sum, the sum, and where the term counts; None for other ops."""
        if len(op.results) != 1 or op.result not in self.products or op.opcode not in ("add", "fma"):
            return None
        if op.opcode == "fma":
            return op.operands[:2], op.operands[2], None
        total, term = op.operands if op.operands[0] in self.sums else op.operands[::-1]
        inner, mask = made.get(term), None
        if inner is not None and inner.opcode == "select":
            mask, inner = inner.operands[0], made.get(inner.operands[1])
        while (repeated := made.get(mask) if mask is not None else None) is not None and repeated.opcode == "broadcast":
            mask = repeated.operands[0]
        if inner is None or inner.opcode != "mul" or (mask is not None and any(shape_of(mask)[a] != 1 for a in (self.m_axis, self.n_axis))):
            raise CompilerBug.at("TW040", "rows by matrix instructions of a sum that has other terms", op.span)
        return inner.operands, total, mask

    def _inside_of(self, value: Value, mask: Value, to: list[Op]) -> Value:
        """A factor that is zero where a term does not count: a masked load is."""
        op = next((o for o in reversed(to) if value in o.results), None)
        if op is not None and op.opcode == "load" and op.attrs.get("masked"):
            return value
        shape, type_ = shape_of(value), value.type
        assert isinstance(type_, Tile)
        none: Attrs = MappingProxyType({})
        where, zero, chosen = Value(replace(type_, dtype=bool_), "inside"), Value(type_, "zero"), Value(type_, value.name)
        b = Builder(self.kernel.span)
        number = b.const(0, type_.dtype)
        repeated = MappingProxyType({"shape": shape})
        to += [*b.ops, Op("broadcast", (mask,), (where,), repeated, (), self.kernel.span), Op("broadcast", (number,), (zero,), repeated, (), self.kernel.span)]
        to.append(Op("select", (where, value, zero), (chosen,), none, (), self.kernel.span))
        return chosen

    def _own(self, value: Value, made: dict[Value, Op], to: list[Op]) -> Value:
        """What stands for a value with all rows of x: that with one row, which is another in every lane. Ops that make it are added to `to`."""
        if not isinstance(value.type, Tile) or shape_of(value)[self.m_axis] == 1:
            return value
        if value in self.own_values:
            return self.own_values[value]
        shape = tuple(1 if a == self.m_axis else e for a, e in enumerate(shape_of(value)))
        own = Value(replace(value.type, shape=shape), value.name)
        op = made.get(value)
        if op is None or (op.opcode not in _ELEMENTWISE and op.opcode != "load"):
            to.append(Op(_OWN_ROW, (value,), (own,), MappingProxyType({}), (), self.kernel.span))
        else:
            attrs = MappingProxyType({**op.attrs, "shape": shape}) if op.opcode == "broadcast" else op.attrs
            to.append(replace(op, operands=tuple(self._own(v, made, to) for v in op.operands), results=(own,), attrs=attrs))
        self.own_values[value] = own
        return own

    def _selected(self, b: Builder, held: Held, shape: Shape) -> Held:
        """Of what lies in registers for all rows, the lane's own; of an index, that of its row."""
        if isinstance(held, RegisterIndex):
            return self._own_index(b, held, shape)
        if isinstance(held, Mask):
            edges = tuple((self._own_index(b, index, shape), limit) for index, limit in held.edges)
            return Mask(shape, edges, tuple(other if other.shape[self.m_axis] == 1 else self._own_cells(b, other) for other in held.others))
        if isinstance(held, SameInVector):
            return SameInVector(shape, self._own_cells(b, Registers(held.shape, held.cells)).cells)
        if not isinstance(held, Registers):
            raise CompilerBug.at("TW040", f"rows by matrix instructions: {type(held).__name__}", self.kernel.span)
        return self._own_cells(b, held)

    def _row(self, b: Builder) -> Value:
        """The number of a lane's row of x; lanes that have none read the last."""
        return b.op("min", self.column, b.index(self.rows_of_x - 1))

    def _own_index(self, b: Builder, held: RegisterIndex, shape: Shape) -> RegisterIndex:
        factor = held.factors.get(self.m_axis, 0)
        if not factor:
            return RegisterIndex(shape, held.base, held.factors)
        return RegisterIndex(shape, b.add(held.base, b.mul(self._row(b), b.index(factor))), {a: f for a, f in held.factors.items() if a != self.m_axis})

    def _own_cells(self, b: Builder, held: Registers) -> Registers:
        shape = tuple(1 if a == self.m_axis else e for a, e in enumerate(held.shape))
        cells: dict[Cell, Value] = {}
        count = held.shape[self.m_axis]
        for cell in self.cells(shape):
            rows = [held.cells[tuple(row if a == self.m_axis else c for a, c in enumerate(cell))] for row in range(count)]
            chosen = rows[-1]
            for row in reversed(range(count - 1)):
                mine = b.op("eq", self.column, b.index(row))
                if isinstance(chosen.type, Vec):
                    mine = b.op("broadcast", mine, width=chosen.type.width)
                chosen = b.select(mine, rows[row], chosen)
            cells[cell] = chosen
        return Registers(shape, cells)


def _narrow(value: Value, made: dict[Value, Op]) -> Value:
    """The factor of a product before it was widened and repeated."""
    op = made.get(value)
    while op is not None and op.opcode in ("broadcast", "cast") and isinstance(op.operands[0].type, Tile):
        value = op.operands[0]
        if op.opcode == "cast":
            return value
        op = made.get(value)
    return value


def _used(ops: Sequence[Op]) -> list[Op]:
    """The ops without those that nobody needs."""
    kept: list[Op] = []
    wanted: set[Value] = set()
    for op in reversed(ops):
        inside = [op, *(i for r in op.regions for i in walk(r))]
        if op.results and not wanted.intersection(op.results) and all(o.opcode == _OWN_ROW or OPS[o.opcode].effect in ("pure", "read", "control") for o in inside):
            continue
        wanted.update(v for o in inside for v in o.operands)
        kept.append(op)
    return kept[::-1]
