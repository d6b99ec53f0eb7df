"""Who multiplies, and what it takes: the fragments of matrix instructions of one warp, and of plain multiply-adds of one thread.

A unit works on one stage of two rings (`stage_operand.Ring`), in `parts` along the sum. `read` gives the registers one part
needs, `multiply` adds their products to the sums, `cells` hands the sums out as registers of the result's tile. Rings are
padded so that the threads of a warp read different banks; all places are a base of the thread, the stage, and a constant.

Lanes of a warp-level instruction (PTX ISA, matrix fragments), l = lane: a has row l / 4 (and + 8) and, of each four bytes of
k, number l % 4 (and + 4); b has column l / 4 and the same of k; sums have row l / 4 (and + 8), columns 2 (l % 4) and the
next. `ldmatrix` reads four such registers at once, each from eight rows of 16 bytes; with `trans` it does so for 16-bit
elements that lie across the sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tilewright.base.dtypes import DType, f32, f64, u32
from tilewright.base.errors import UserError
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.layouts import MMA_LANES, Accumulator, Blocked
from tilewright.ir.nodes import Attr, Value
from tilewright.ir.ops_matrix import MMA_SHAPES, accumulator_dtype, mma_shape
from tilewright.ir.types import Vec
from tilewright.passes.common.registers import Cell, ThreadView
from tilewright.passes.common.tf32 import all_parts, rounded_tf32
from tilewright.passes.schedules.matrix import Mma, WarpProduct
from tilewright.passes.to_thread.stage_operand import WIDEST, Ring

F64_STEP = 8
"""Terms of one instruction of f64, from Hopper on: 4, 8 or 16."""


class MultiplyUnit(ABC):
    """What one step of the sum asks of those who multiply."""

    stored: DType
    """What operands are in shared memory."""
    parts: int
    """Parts of one step, each with fragments of its own."""
    words: int
    """Registers of the sums of a thread."""
    registers: int
    """About how many registers a thread needs in all."""
    first_count: int
    second_count: int
    """Fragments of the first and of the second operand that one part has, in this order."""
    plain: bool
    """Fragments are read by ordinary loads, which compilers move."""

    @abstractmethod
    def major(self, given: str) -> str:
        """How an operand that lies that way in global memory should lie in shared memory."""

    @abstractmethod
    def pitch(self, extent: int, major: str) -> int:
        """Elements from one row of shared memory to the next."""

    @abstractmethod
    def prepare(self, b: Builder, rings: Sequence[Ring], thread: ThreadView) -> None:
        """Compute what depends on the thread only. `rings`: that of the first operand, then one for each product's second."""

    @abstractmethod
    def zeros(self, b: Builder) -> list[Value]:
        """Sums of nothing."""

    @abstractmethod
    def read(self, b: Builder, part: int, stage: Value) -> list[Value]:
        """The fragments of one part."""

    @abstractmethod
    def multiply(self, b: Builder, fragments: Sequence[Value], sums: Sequence[Value]) -> list[Value]:
        """The sums with the products of one part added."""

    @abstractmethod
    def cells(self, b: Builder, sums: Sequence[Value]) -> list[dict[Cell, Value]]:
        """The sums as registers of each product's result."""


class FmaUnit(MultiplyUnit):
    """Multiply-adds of one thread: outer products of a column of a and a row of b, both read in vectors."""

    def __init__(
        self,
        schedule: WarpProduct,
        operand: DType,
        total: DType,
        precision: str,
        layout: Blocked | Accumulator,
        target: Target,
    ) -> None:
        assert isinstance(layout, Blocked)
        self.stored, self.parts, self.plain = total, schedule.k, True
        self.layout, self.shape = layout, (schedule.m, schedule.n)
        for axis in (0, 1):
            if self.shape[axis] % layout.span(axis):
                raise UserError.at(
                    "TW005",
                    f"{self.shape[axis]} results along one side cannot be shared by threads that take {layout.span(axis)}",
                )
        rows, columns = layout.registers(self.shape)
        self.rows, self.groups = rows, columns
        self.wide = layout.vector[1]
        words = max(1, total.itemsize // 4)
        step = (schedule.m + schedule.n) * schedule.k // schedule.threads
        self.words = words * rows * columns * self.wide
        self.first_count, self.second_count = (self.shape[a] // layout.span(a) for a in (0, 1))
        self.registers = self.words + words * (2 * (rows + columns * self.wide) + step) + 32

    def major(self, given: str) -> str:
        return "mn"

    def pitch(self, extent: int, major: str) -> int:
        return extent + WIDEST // self.stored.itemsize

    def prepare(self, b: Builder, rings: Sequence[Ring], thread: ThreadView) -> None:
        self.rings, self.bases = rings, thread.bases

    def zeros(self, b: Builder) -> list[Value]:
        zero = b.op("broadcast", b.const(0, self.stored), width=self.wide)
        return [zero] * (self.rows * self.groups)

    def read(self, b: Builder, part: int, stage: Value) -> list[Value]:
        fragments: list[Value] = []
        for axis, ring in enumerate(self.rings):
            width = self.layout.vector[axis]
            start = b.add(b.mul(stage, b.index(ring.size)), self.bases[axis])
            for group in range(self.shape[axis] // self.layout.span(axis)):
                place = b.add(start, b.index(ring.static(group * self.layout.span(axis), part)))
                fragments.append(
                    b.op("load", ring.memory, place, width=width) if width > 1 else b.op("load", ring.memory, place)
                )
        return fragments

    def multiply(self, b: Builder, fragments: Sequence[Value], sums: Sequence[Value]) -> list[Value]:
        tall = self.layout.vector[0]
        columns = fragments[self.rows // tall :]
        result = list(sums)
        for row in range(self.rows):
            held = fragments[row // tall]
            one = b.op("extract", held, lane=row % tall) if isinstance(held.type, Vec) else held
            wide = b.op("broadcast", one, width=self.wide) if self.wide > 1 else one
            for group, column in enumerate(columns):
                place = row * self.groups + group
                if self.stored.is_float:
                    result[place] = b.fma(wide, column, result[place])
                else:
                    result[place] = b.add(b.mul(wide, column), result[place])
        return result

    def cells(self, b: Builder, sums: Sequence[Value]) -> list[dict[Cell, Value]]:
        places = [(row, group) for row in range(self.rows) for group in range(self.groups)]
        return [dict(zip(places, sums, strict=True))]


class MmaUnit(MultiplyUnit):
    """Matrix instructions of one warp on registers."""

    def __init__(
        self,
        schedule: Mma,
        operand: DType,
        total: DType,
        precision: str,
        layout: Blocked | Accumulator,
        target: Target,
    ) -> None:
        assert isinstance(layout, Accumulator)
        if (
            operand.name not in MMA_SHAPES
            or accumulator_dtype(operand) is not total
            or (operand is f32 and precision == "ieee")
        ):
            raise UserError.at(
                "TW005", f"no matrix instruction multiplies {operand} and adds up in {total} with precision {precision}"
            )
        self.stored, self.layout, self.shape = operand, layout, (schedule.m, schedule.n)
        self.split, self.four = operand is f32 and precision == "3xtf32", schedule.tf32_terms == 4
        # From Hopper on f64 has instructions of 16 rows.
        self.kind: dict[str, Attr] = {"dtype": operand}
        if operand is f64 and target.sm >= 90:
            self.kind["k"] = F64_STEP
        (self.m, _, self.k), self.a_count, self.b_count, self.c_count = mma_shape(self.kind)
        self.down, self.across = layout.part(0, schedule.m) // 16, layout.part(1, schedule.n) // 8
        if not self.down or not self.across or schedule.k % self.k:
            raise UserError.at(
                "TW005",
                f"a warp has {layout.part(0, schedule.m)} x {layout.part(1, schedule.n)} results and {schedule.k} products; "
                f"instructions take 16 x 8 x {self.k}",
            )  # fmt: skip
        self.parts = schedule.k // self.k
        words = max(1, total.itemsize // 4)
        self.tall = self.a_count * 16 // self.m
        """Registers of 16 rows of a."""
        fragments = (self.tall * self.down + self.b_count * self.across) * (2 if operand is f64 else 1)
        self.words = 4 * words * self.down * self.across
        self.first_count, self.second_count = self.tall * self.down, self.b_count * self.across
        self.registers = self.words + (4 if self.split else 2) * fragments + 40

    def major(self, given: str) -> str:
        # Only 16-bit elements can be turned on the way to registers, and single ones of four bytes or more be read.
        return "k" if self.stored.itemsize == 1 else given

    def _by_matrix(self, major: str) -> bool:
        return self.stored is not f64 and (major == "k" or self.stored.itemsize == 2)

    def pitch(self, extent: int, major: str) -> int:
        if self._by_matrix(major):
            return extent + WIDEST // self.stored.itemsize
        return extent + (4 if self.stored is f64 else 8)

    def prepare(self, b: Builder, rings: Sequence[Ring], thread: ThreadView) -> None:
        self.rings = rings
        self.plain = not all(self._by_matrix(ring.major) for ring in self.rings)
        lane = b.op("and", thread.thread, b.index(MMA_LANES - 1))
        low, middle, high = (
            b.op("and", lane, b.index(7)), b.op("and", b.op("shr", lane, b.index(3)), b.index(1)), b.op("shr", lane, b.index(4)),
        )  # fmt: skip
        self.bases: list[Value] = []
        for side, ring in enumerate(self.rings):
            part = b.mul(thread.warp_digits[side], b.index(self.layout.part(side, self.shape[side])))
            if not self._by_matrix(ring.major):
                across, along = b.op("shr", lane, b.index(2)), b.op("and", lane, b.index(3))
            else:
                # Registers of a walk the rows first, those of b the sum first.
                row, column = (middle, high) if side == 0 else (high, middle)
                if ring.major == "k":
                    across = b.add(low, b.mul(row, b.index(8)))
                    along = b.mul(column, b.index(WIDEST // self.stored.itemsize))
                else:
                    across, along = b.mul(row, b.index(8)), b.add(low, b.mul(column, b.index(8)))
            self.bases.append(ring.place(b, b.add(part, across), along))

    def zeros(self, b: Builder) -> list[Value]:
        return [b.const(0, accumulator_dtype(self.stored))] * (4 * self.down * self.across)

    # -- fragments ----------------------------------------------------------------------------------------------

    def read(self, b: Builder, part: int, stage: Value) -> list[Value]:
        starts = [b.add(b.mul(stage, b.index(r.size)), base) for r, base in zip(self.rings, self.bases, strict=True)]
        fragments: list[Value] = []
        for block in range(self.down):
            fragments += self._fragment(b, self.rings[0], starts[0], 16 * block, part * self.k, 4)
        for pair in range(0, self.across, 2):
            fragments += self._fragment(
                b, self.rings[1], starts[1], 8 * pair, part * self.k, min(4, 2 * (self.across - pair))
            )
        return fragments

    def _fragment(self, b: Builder, ring: Ring, start: Value, across: int, along: int, count: int) -> list[Value]:
        """16 rows of a or 16 columns of b (8 where count is 2), for one instruction along the sum."""
        if self._by_matrix(ring.major):
            place = b.add(start, b.index(ring.static(across, along)))
            return list(b.multi("ldmatrix", ring.memory, place, count=count, trans=ring.major == "mn"))
        halves, steps = range(0, 16 if count == 4 else 8, 8), range(0, self.k, 4)
        # Registers of a walk the rows first, those of b the sum first.
        places = (
            [(x, y) for y in steps for x in halves]
            if ring is self.rings[0]
            else [(x, y) for x in halves for y in steps]
        )
        values = [
            b.op("load", ring.memory, b.add(start, b.index(ring.static(across + x, along + y)))) for x, y in places
        ]
        return values if self.stored is f64 else [b.bitcast(v, u32) for v in values]

    # -- products -----------------------------------------------------------------------------------------------

    def multiply(self, b: Builder, fragments: Sequence[Value], sums: Sequence[Value]) -> list[Value]:
        first, second = list(fragments[: self.tall * self.down]), list(fragments[self.tall * self.down :])
        if self.stored is f32 and not self.split:
            first, second = [rounded_tf32(b, v) for v in first], [rounded_tf32(b, v) for v in second]
        if not self.split:
            return self._products(b, first, second, sums)
        big, small = all_parts(b, first)
        other_big, other_small = all_parts(b, second)
        result = list(sums)
        if self.four:
            result = self._products(b, small, other_small, result)
        result = self._products(b, small, other_big, result)
        result = self._products(b, big, other_small, result)
        return self._products(b, big, other_big, result)

    def _products(
        self, b: Builder, first: Sequence[Value], second: Sequence[Value], sums: Sequence[Value]
    ) -> list[Value]:
        result = list(sums)
        for row in range(self.down):
            left = first[self.tall * row : self.tall * (row + 1)]
            for column in range(self.across):
                right = second[self.b_count * column : self.b_count * (column + 1)]
                for half in range(16 // self.m):
                    start = 4 * (row * self.across + column) + self.c_count * half
                    place = slice(start, start + self.c_count)
                    # An instruction of eight rows takes every other register.
                    own = left[half :: 16 // self.m]
                    result[place] = b.emit("mma", [*own, *right, *result[place]], self.kind)
        return result

    def cells(self, b: Builder, sums: Sequence[Value]) -> list[dict[Cell, Value]]:
        """Two neighbours along n in each."""
        cells: dict[Cell, Value] = {}
        for row in range(2 * self.down):
            for column in range(self.across):
                start = 4 * (row // 2 * self.across + column) + 2 * (row % 2)
                cells[row, column] = b.op("pack", sums[start], sums[start + 1])
        return [cells]


class HorizontalUnit(MultiplyUnit):
    """Several products of the same rows: each has a unit of its own, and all read the fragments of the first operand once."""

    def __init__(self, units: Sequence[MultiplyUnit]) -> None:
        first = units[0]
        self.units = units
        self.stored, self.parts = first.stored, first.parts
        self.first_count, self.second_count = first.first_count, sum(unit.second_count for unit in units)
        self.words = sum(unit.words for unit in units)
        self.registers = first.registers + sum(unit.words + 2 * unit.second_count for unit in units[1:])
        self.counts = [len(unit.zeros(Builder())) for unit in units]
        """Values of each product's sums."""

    def major(self, given: str) -> str:
        return self.units[0].major(given)

    def pitch(self, extent: int, major: str) -> int:
        return self.units[0].pitch(extent, major)

    def prepare(self, b: Builder, rings: Sequence[Ring], thread: ThreadView) -> None:
        for unit, second in zip(self.units, rings[1:], strict=True):
            unit.prepare(b, (rings[0], second), thread)
        self.plain = any(unit.plain for unit in self.units)

    def zeros(self, b: Builder) -> list[Value]:
        return [zero for unit in self.units for zero in unit.zeros(b)]

    def read(self, b: Builder, part: int, stage: Value) -> list[Value]:
        fragments = self.units[0].read(b, part, stage)
        for unit in self.units[1:]:
            # What is read of the first operand again nobody uses.
            fragments += unit.read(b, part, stage)[unit.first_count :]
        return fragments

    def multiply(self, b: Builder, fragments: Sequence[Value], sums: Sequence[Value]) -> list[Value]:
        first, place = list(fragments[: self.first_count]), self.first_count
        result: list[Value] = []
        for unit, own in zip(self.units, self._apart(sums), strict=True):
            result += unit.multiply(b, [*first, *fragments[place : place + unit.second_count]], own)
            place += unit.second_count
        return result

    def cells(self, b: Builder, sums: Sequence[Value]) -> list[dict[Cell, Value]]:
        return [cells for unit, own in zip(self.units, self._apart(sums), strict=True) for cells in unit.cells(b, own)]

    def _apart(self, sums: Sequence[Value]) -> list[Sequence[Value]]:
        starts = [sum(self.counts[:number]) for number in range(len(self.counts))]
        return [sums[start : start + count] for start, count in zip(starts, self.counts, strict=True)]
