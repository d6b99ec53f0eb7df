"""One thread's view of tiles in a blocked layout: which elements it holds, and how they are computed.

A tile is held as registers (a value per register step along each axis; a short vector along the vector axis), or symbolically: an
index tile is `base + sum(factor * coordinate)`, an edge mask a list of `index < bound`. Symbolic tiles are computed only where
somebody needs the numbers, so addresses stay known to be consecutive and aligned.
"""

from __future__ import annotations

from itertools import product
from math import gcd, prod

from tilewright.analysis import divisors
from tilewright.base.dtypes import i64
from tilewright.base.errors import CompilerBug
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.layouts import Accumulator, Blocked, Shared
from tilewright.ir.nodes import Kernel, Value, walk
from tilewright.ir.types import Tile, Vec

Shape = tuple[int, ...]
Cell = tuple[int, ...]


@record
class Registers:
    """A tile held in registers: a value per register step along each axis."""

    shape: Shape
    cells: dict[Cell, Value]


@record
class RegisterIndex:
    """A tile of integers `base + sum(factor[a] * coordinate[a])`, not computed until somebody needs it."""

    shape: Shape
    base: Value
    factors: dict[int, int]


@record
class Mask:
    """A conjunction of `index < bound` (kept symbolic) and of plain bool tiles."""

    shape: Shape
    edges: tuple[tuple[RegisterIndex, Value], ...]
    others: tuple[Registers, ...]


@record
class SameInVector:
    """A tile that is the same for all elements of a thread's vector: one number for each register step."""

    shape: Shape
    cells: dict[Cell, Value]


Held = Value | Registers | RegisterIndex | Mask | SameInVector


def shape_of(value: Value) -> Shape:
    return value.type.shape if isinstance(value.type, Tile) else ()


class ThreadView:
    """The layout of a kernel's tiles as one thread sees it. `coordinates` must be emitted before anything else."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel, self.target = kernel, target
        self.layout = self._layout()
        self.divisors = divisors.analyse(kernel)
        self.constants: dict[Value, int] = {}
        self.bases: list[Value] = []
        """This thread's first coordinate along each axis."""
        self.lane_digits: list[Value] = []
        self.warp_digits: list[Value] = []
        rank = len(self.layout.vector)
        self.axis = next((a for a in range(rank) if self.layout.vector[a] > 1), rank - 1)
        self.vector = self.layout.vector[self.axis] if rank else 1
        self.shifted = any("aligned" in op.attrs for op in walk(kernel.body))
        """Edges cut through vectors that lie at multiples of their size nevertheless."""

    def _layout(self) -> Blocked | Accumulator:
        """The layout of the tiles that are held in registers: there is one."""
        for op in walk(self.kernel.body):
            for result in op.results:
                if isinstance(result.type, Tile) and not isinstance(result.type.layout, Shared):
                    if not isinstance(result.type.layout, Blocked | Accumulator):
                        raise CompilerBug.at("TW040", f"lower_tiles: {result.type} has no layout in registers", op.span)
                    return result.type.layout
        return Blocked((), (), ())

    @property
    def layout_warp(self) -> int:
        """Neighbouring threads that the layout calls a warp: those of the target. Lowerings that exchange nothing between lanes may have others."""
        return self.target.warp_size

    def coordinates(self, b: Builder) -> None:
        self.thread = b.op("thread_id", name="thread")
        # Without warps lanes are nothing but numbers of threads, as many as the layout has.
        warp_size = self.layout_warp if self.target.has_warps else prod(self.layout.lanes)
        lane = self.lane = b.op("and", self.thread, b.index(warp_size - 1), name="lane")
        warp = b.op("shr", self.thread, b.index(warp_size.bit_length() - 1), name="warp")
        if isinstance(self.layout, Blocked) and self.layout.blocks > 1:
            first = b.mul(b.cast(b.op("cluster_rank"), i64), b.index(self.layout.threads // warp_size))
            self.own_warp, warp = warp, b.add(first, warp)
        self.lane_digits = self._digits(b, lane, self.layout.lanes)
        self.warp_digits = self._digits(b, warp, self.layout.warps)
        for a, v in enumerate(self.layout.vector):
            position = b.add(b.mul(self.warp_digits[a], b.index(self.layout.lanes[a])), self.lane_digits[a])
            base = b.mul(position, b.index(v))
            self.divisors[base] = v
            self.bases.append(base)

    def _digits(self, b: Builder, number: Value, sizes: tuple[int, ...]) -> list[Value]:
        """Row-major digits; sizes are powers of two."""
        digits: list[Value] = []
        shift = 0
        for position, size in reversed(list(enumerate(sizes))):
            digit = b.op("shr", number, b.index(shift)) if shift else number
            if any(s > 1 for s in sizes[:position]) or size == 1:
                digit = b.op("and", digit, b.index(size - 1))
            digits.append(digit)
            shift += size.bit_length() - 1
        return list(reversed(digits))

    # -- held values --------------------------------------------------------------------------------------------

    def cells(self, shape: Shape) -> list[Cell]:
        return list(product(*(range(n) for n in self.layout.registers(shape))))

    def is_wide(self, shape: Shape) -> bool:
        return self.vector > 1 and shape[self.axis] > 1

    def registers(self, b: Builder, held: Held, shape: Shape) -> Registers:
        """The tile in registers, computing it now if it was symbolic."""
        if isinstance(held, Registers):
            return held
        if isinstance(held, RegisterIndex):
            return Registers(shape, {cell: self.index_cell(b, held, cell) for cell in self.cells(shape)})
        if isinstance(held, Mask):
            return Registers(shape, {cell: self.mask_cell(b, held, cell) for cell in self.cells(shape)})
        if isinstance(held, SameInVector):
            return Registers(shape, {cell: b.op("broadcast", value, width=self.vector) for cell, value in held.cells.items()})
        wide = b.op("broadcast", held, width=self.vector) if self.is_wide(shape) else held
        return Registers(shape, dict.fromkeys(self.cells(shape), wide))

    def first(self, b: Builder, index: RegisterIndex | Value, cell: Cell) -> Value:
        """The index of a cell's first element."""
        if isinstance(index, Value):
            return index
        total = index.base
        divisor = self.divisors.get(total, 1)
        for a, factor in index.factors.items():
            offset = self.layout.offset(a, cell[a]) * factor
            part = self.bases[a] if factor == 1 else b.mul(self.bases[a], b.index(factor))
            divisor = gcd(divisor, self.layout.vector[a] * factor)
            total = b.add(total, part)
            if offset:
                total = b.add(total, b.index(offset))
                divisor = gcd(divisor, offset)
        self.divisors[total] = divisor
        return total

    def index_cell(self, b: Builder, index: RegisterIndex, cell: Cell) -> Value:
        first = self.first(b, index, cell)
        if not self.is_wide(index.shape):
            return first
        wide = b.op("broadcast", first, width=self.vector)
        factor = index.factors.get(self.axis, 0)
        if not factor:
            return wide
        return b.add(wide, b.op("pack", *(b.index(v * factor) for v in range(self.vector))))

    def mask_cell(self, b: Builder, mask: Mask, cell: Cell) -> Value:
        total: Value | None = None
        for index, bound in mask.edges:
            value = self.index_cell(b, RegisterIndex(mask.shape, index.base, index.factors), cell)
            limit = b.op("broadcast", bound, width=self.vector) if self.is_wide(mask.shape) else bound
            inside = b.op("lt", value, limit)
            total = inside if total is None else b.logical_and(total, inside)
        for other in mask.others:
            value = other.cells[self.collapsed(cell, other.shape)]
            if self.is_wide(mask.shape) and not isinstance(value.type, Vec):
                value = b.op("broadcast", value, width=self.vector)
            total = value if total is None else b.logical_and(total, value)
        assert total is not None
        return total

    def collapsed(self, cell: Cell, shape: Shape) -> Cell:
        """The register step that holds `cell` in a tile with some extents of 1."""
        return tuple(0 if shape[a] == 1 else c for a, c in enumerate(cell))
