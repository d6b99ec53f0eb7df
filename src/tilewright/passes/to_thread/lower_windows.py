"""Tile stage -> thread stage, for results that read overlapping windows: what one thread executes.

In: a tile-stage kernel whose schedule says `window`, from `lower_loops`: each thread has several neighbouring results, and their
loads are tiles at constant distances from one another. Out: a thread-stage kernel in which

- an element that several results read is loaded once: every index is written as `start + thread + constant`, so equal ones are equal
  values and `simplify` shares them; elements of an aligned vector come from one load of it;
- a load whose mask says no more than that its place is inside the array asks just that, which is the same question for every result that
  reads it; and it is a predicated load, no branch. (For results outside the nest it may give anything: they are not stored.)
- a guard is decided here where the block's and the vector's bounds decide it, so that only the borders of what a thread has are tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from tilewright.analysis import divisors
from tilewright.analysis.ranges import surely_not_negative
from tilewright.base.dtypes import bool_, i64
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Scalar, Tensor, Tile, Vec, dtype_of
from tilewright.passes.common.registers import Cell, Held, Mask, RegisterIndex, Registers, Shape, shape_of
from tilewright.passes.to_thread.lower_tiles import TileLowering


def lower_windows(kernel: Kernel, target: Target) -> Kernel:
    """The thread-stage kernel."""
    return WindowLowering(kernel, target).run()


@record
class Test:
    """`index >= bound + more` or `index < bound + more`, of each element of a tile."""

    index: RegisterIndex
    kind: str
    bound: Value
    more: int


@record
class Guard(Mask):
    """A conjunction of tests, kept until it is known for which element they are asked, and of plain bool tiles."""

    tests: tuple[Test, ...] = ()


@record
class Start:
    """The first index of a block along an axis of its tiles."""

    value: Value
    extent: Size
    tile: int


class WindowLowering(TileLowering):
    def __init__(self, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, target)
        extents = kernel.attrs["tiled"]
        assert isinstance(extents, tuple)
        self.extents = [e for e in extents if isinstance(e, Size)]
        """Of the tiled indices, one for each axis of the tiles."""
        self.parts: dict[Value, tuple[Value | None, int]] = {}
        """Integers as a value and a constant."""
        self.sizes: dict[Value, Size] = {}
        self.starts: dict[int, Start] = {}
        self.full: tuple[Value | None, int, Size | None] | None = None
        """What the branch around says: that value plus that many is at most the size."""
        self.natural = _natural(kernel)
        """Values at the tile stage, later also here, that are never negative."""
        self.made: dict[Value, Op] = {r: op for op in walk(kernel.body) for r in op.results}

    # -- numbers --------------------------------------------------------------------------------------------------

    def part(self, value: Value) -> tuple[Value | None, int]:
        if value in self.constants:
            return None, self.constants[value]
        return self.parts.get(value, (value, 0))

    def remember(self, op: Op, results: Sequence[Value]) -> None:
        super().remember(op, results)
        for old, new in zip(op.results, results, strict=True):
            if old in self.natural:
                self.natural.add(new)
            size = op.attrs.get("value")
            if op.opcode == "size" and isinstance(size, Size):
                self.sizes[new] = size
            if op.opcode in ("add", "sub") and new.type == Scalar(i64):
                operands = [self.env[v] for v in op.operands]
                if all(isinstance(v, Value) for v in operands):
                    self._shifted(new, op.opcode, *operands)  # type: ignore[arg-type]

    def _shifted(self, result: Value, opcode: str, first: Value, second: Value) -> None:
        """Remember a sum with a constant as such."""
        (one, more), (other, constant) = self.part(first), self.part(second)
        if other is None:
            self.parts[result] = one, more + (constant if opcode == "add" else -constant)
        elif one is None and opcode == "add":
            self.parts[result] = other, more + constant

    def symbolic(self, b: Builder, op: Op, held: Sequence[Held], result: Tile) -> Held | None:
        if op.opcode in ("ge", "gt", "lt", "le") and all(isinstance(h, RegisterIndex) for h in held):
            return self._test(op.opcode, held[0], held[1], result.shape)  # type: ignore[arg-type]
        if op.opcode == "and" and result.dtype is bool_ and any(isinstance(h, Mask) for h in held):
            guards = [self._guard(b, h, result.shape) for h in held]
            return Guard(result.shape, (), guards[0].others + guards[1].others, guards[0].tests + guards[1].tests)
        found = super().symbolic(b, op, held, result)
        if isinstance(found, RegisterIndex):
            first, second = held
            assert isinstance(first, RegisterIndex) and isinstance(second, RegisterIndex)
            if op.opcode in ("add", "sub"):
                self._shifted(found.base, op.opcode, first.base, second.base)
                self._note_start(found)
            else:
                self._scaled(b, found.base, first.base, second.base)
        return found

    def _scaled(self, b: Builder, result: Value, first: Value, second: Value) -> None:
        scale = self.constants.get(second, self.constants.get(first))
        root, more = self.part(first if second in self.constants else second)
        if scale is None:
            return
        if root is None:
            self.constants[result] = more * scale
            return
        scaled = b.mul(root, b.index(scale))
        self.divisors[scaled] = self.divisors.get(root, 1) * abs(scale)
        if root in self.natural and scale >= 0:
            self.natural.add(scaled)
        self.parts[result] = scaled, more * scale

    def _note_start(self, index: RegisterIndex) -> None:
        """An index tile of the nest itself is `start + coordinate`."""
        root, more = self.part(index.base)
        if root is not None and not more and len(index.factors) == 1:
            ((axis, factor),) = index.factors.items()
            if factor == 1 and axis not in self.starts and index.shape[axis] > 1:
                self.starts[axis] = Start(root, self.extents[axis], index.shape[axis])

    def _test(self, opcode: str, first: RegisterIndex, second: RegisterIndex, shape: Shape) -> Guard | None:
        if second.factors:
            turned = {"ge": "le", "gt": "lt", "lt": "gt", "le": "ge"}
            return None if first.factors else self._test(turned[opcode], second, first, shape)
        kind, more = {"ge": ("ge", 0), "gt": ("ge", 1), "lt": ("lt", 0), "le": ("lt", 1)}[opcode]
        return Guard(shape, (), (), (Test(first, kind, second.base, more),))

    def _guard(self, b: Builder, held: Held, shape: Shape) -> Guard:
        if isinstance(held, Guard):
            return held
        if isinstance(held, Mask):
            return Guard(shape, (), held.others, tuple(Test(index, "lt", bound, 0) for index, bound in held.edges))
        return Guard(shape, (), (self.registers(b, held, shape),))

    def broadcast(self, b: Builder, op: Op) -> None:
        held = self.env[op.operands[0]]
        if isinstance(held, Guard):
            self.env[op.result] = Guard(shape_of(op.result), (), held.others, held.tests)
        else:
            super().broadcast(b, op)

    def if_(self, b: Builder, op: Op) -> None:
        """Inside a branch for full blocks they are known to be full."""
        cond = self.made.get(op.operands[0])
        if cond is not None and cond.opcode == "le":
            last, extent = (self.env[v] for v in cond.operands)
            if isinstance(last, Value) and isinstance(extent, Value):
                self._full_branch(b, op, *self.part(last), self.size(extent))
                return
        super().if_(b, op)

    def _full_branch(self, b: Builder, op: Op, root: Value | None, length: int, extent: Size | None) -> None:
        cond = self.env[op.operands[0]]
        assert isinstance(cond, Value)
        full, before = (root, length, extent), dict(self.starts)

        def branch(inner: Builder, number: int) -> list[Value]:
            self.starts = dict(before)
            self.full = full if number == 0 else None
            return self.flat(inner, op.regions[number].yields, self.ops(inner, op.regions[number].ops))

        self.bind(op.results, b.if_(cond, lambda inner: branch(inner, 0), lambda inner: branch(inner, 1)))
        self.starts, self.full = before, None

    def size(self, value: Value) -> Size | None:
        if value in self.constants:
            return Size.of(self.constants[value])
        return self.sizes.get(value)

    # -- elements -------------------------------------------------------------------------------------------------

    def form(self, index: RegisterIndex | Value, cell: Cell, lane: int, more: int = 0) -> tuple[Value | None, dict[int, int], int]:
        """The index of an element: a value of the block, factors of the thread's coordinates, a constant. `more` elements lie between, along vectors."""
        if isinstance(index, Value):
            root, constant = self.part(index)
            return root, {}, constant
        root, constant = self.part(index.base)
        for a, factor in index.factors.items():
            constant += factor * (self.layout.offset(a, cell[a]) + (lane if a == self.axis else 0)) + (more if a == self.axis else 0)
        return root, index.factors, constant

    def at(self, b: Builder, index: RegisterIndex | Value, cell: Cell, lane: int, more: int = 0) -> Value:
        """The index of an element, always computed in the same order."""
        total = self.moving(b, index, cell)
        constant = self.form(index, cell, lane, more)[2]
        if constant or total is None:
            divisor = gcd(0 if total is None else self.divisors[total], constant)
            total = b.index(constant) if total is None else b.add(total, b.index(constant))
            self.divisors[total] = divisor
        return total

    def moving(self, b: Builder, index: RegisterIndex | Value, cell: Cell) -> Value | None:
        """What an element's index has beside its constant."""
        root, factors, _ = self.form(index, cell, 0)
        total, divisor = root, self.divisors.get(root, 1) if root is not None else 0
        for a, factor in sorted(factors.items()):
            part = self.bases[a] if factor == 1 else b.mul(self.bases[a], b.index(factor))
            divisor = gcd(divisor, self.layout.vector[a] * factor)
            total = part if total is None else b.add(total, part)
        if total is not None:
            self.divisors[total] = divisor
        return total

    def first(self, b: Builder, index: RegisterIndex | Value, cell: Cell) -> Value:
        return self.at(b, index, cell, 0)

    # -- what is known of an index ------------------------------------------------------------------------------------

    def _not_below(self, index: RegisterIndex | Value, cell: Cell, lane: int, bound: int, more: int = 0) -> bool:
        root, factors, constant = self.form(index, cell, lane, more)
        return constant >= bound and all(f > 0 for f in factors.values()) and (root is None or root in self.natural)

    def _below(self, index: RegisterIndex | Value, cell: Cell, lane: int, bound: Size, active: bool, more: int = 0) -> bool:
        """Whether the element's index is surely less. `active`: only for results that exist."""
        root, factors, constant = self.form(index, cell, lane, more)
        if root is None and not factors:
            room = (bound - constant).constant
            return room is not None and room > 0
        if len(factors) != 1:
            return False
        ((axis, factor),) = factors.items()
        start = self.starts.get(axis)
        if factor != 1 or start is None or start.value is not root:
            return False
        room = (bound - start.extent).constant
        if room is None:
            return False
        span = (self.layout.lanes[axis] * self.layout.warps[axis] - 1) * self.layout.vector[axis]
        if span + constant - room < start.tile and self._is_full(start):
            return True
        if not active:
            return False
        own = self.layout.offset(axis, cell[axis])
        if axis != self.axis:
            return constant - room <= own
        whole = self._divides(self.vector, start)
        return constant - room < own + self.vector if whole else constant - room <= own + lane

    def _is_full(self, start: Start) -> bool:
        if start.extent.divisible_by(start.tile, self.kernel.facts):
            return True
        return self.full is not None and self.full == (start.value, start.tile, start.extent)

    def _divides(self, width: int, start: Start) -> bool:
        """Whether aligned vectors along the axis are wholly inside or wholly outside."""
        return self.divisors.get(start.value, 1) % width == 0 and divisors.of_size(start.extent, self.kernel.facts) % width == 0

    # -- guards ---------------------------------------------------------------------------------------------------

    def _asked(self, b: Builder, guard: Mask, cell: Cell, lane: int, active: bool) -> Value | None:
        """The condition of one element, or None where it surely holds."""
        total: Value | None = None
        guard = self._guard(b, guard, guard.shape)
        for test in guard.tests:
            own = self.collapsed(cell, test.index.shape)
            size = self.size(test.bound)
            number = None if size is None else size.constant
            if test.kind == "ge" and number is not None and self._not_below(test.index, own, lane, number + test.more):
                continue
            if test.kind == "lt" and size is not None and self._below(test.index, own, lane, size + test.more, active):
                continue
            bound = b.add(test.bound, b.index(test.more)) if test.more else test.bound
            total = _both(b, total, self.compared(b, test.kind, test.index, own, lane, bound))
        for other in guard.others:
            value = other.cells[self.collapsed(cell, other.shape)]
            if isinstance(value.type, Vec):
                value = b.op("extract", value, lane=lane)
            total = _both(b, total, value)
        return total

    def compared(self, b: Builder, kind: str, index: RegisterIndex | Value, cell: Cell, lane: int, bound: Value, more: int = 0) -> Value:
        """`index >= bound` or `index < bound`. What an index has beside its constant is the same for many elements, and is taken from the bound once."""
        constant, moving = self.form(index, cell, lane, more)[2], self.moving(b, index, cell)
        if moving is None:
            return b.op(kind, b.index(constant), bound)
        return b.op({"ge": "le", "lt": "gt"}[kind], b.sub(bound, moving), b.index(constant))

    def _lanes(self, b: Builder, mask: Mask, cell: Cell, active: bool) -> list[Value | None]:
        return [self._asked(b, mask, cell, lane, active) for lane in range(self.vector)]

    def mask_cell(self, b: Builder, mask: Mask, cell: Cell) -> Value:
        if not self.is_wide(mask.shape):
            return self._asked(b, mask, cell, 0, False) or b.const(True, bool_)
        return self._packed(b, self._lanes(b, mask, cell, False))

    def _packed(self, b: Builder, lanes: Sequence[Value | None]) -> Value:
        return b.op("pack", *(b.const(True, bool_) if lane is None else lane for lane in lanes))

    def mask_is_uniform(self, b: Builder, mask: Mask, cell: Cell) -> bool:
        guard = self._guard(b, mask, mask.shape)
        if any(other.shape[self.axis] > 1 for other in guard.others):
            return False
        for test in guard.tests:
            root, factors, constant = self.form(test.index, self.collapsed(cell, test.index.shape), 0)
            factor = factors.get(self.axis, 0)
            if not factor:
                continue
            size = self.size(test.bound)
            bound = 1 if size is None else divisors.of_size(size + test.more, self.kernel.facts)
            first = gcd(constant, 0 if root is None else self.divisors.get(root, 1))
            if factor != 1 or len(factors) > 1 or first % self.vector or bound % self.vector:
                return False
        return True

    def condition(self, b: Builder, mask: Held | None, shape: Shape, cell: Cell, pieces: int) -> list[Value] | None:
        if not isinstance(mask, Mask):
            return super().condition(b, mask, shape, cell, pieces)
        always = b.const(True, bool_)
        if not self.is_wide(shape) or self.mask_is_uniform(b, mask, cell):
            return [self._asked(b, mask, cell, 0, False) or always] * pieces
        lanes = [lane or always for lane in self._lanes(b, mask, cell, False)]
        width = self.vector // pieces
        return lanes if width == 1 else [b.logical_and(lanes[p * width], lanes[p * width + width - 1]) for p in range(pieces)]

    def lower_op(self, b: Builder, op: Op) -> None:
        if op.opcode == "select" and isinstance(self.env[op.operands[0]], Mask):
            self._choice(b, op)
        else:
            super().lower_op(b, op)

    def _choice(self, b: Builder, op: Op) -> None:
        """A select by a guard: only the elements whose guard is not decided need one."""
        guard = self.env[op.operands[0]]
        shape = shape_of(op.result)
        yes, no = (self.registers(b, self.env[v], shape) for v in op.operands[1:])
        assert isinstance(guard, Mask)
        cells: dict[Cell, Value] = {}
        for cell in self.cells(shape):
            wide = self.is_wide(shape)
            lanes = self._lanes(b, guard, cell, True) if wide else [self._asked(b, guard, cell, 0, True)]
            if all(lane is None for lane in lanes):
                cells[cell] = yes.cells[cell]
            else:
                cond = self._packed(b, lanes) if wide else lanes[0]
                assert cond is not None
                cells[cell] = b.select(cond, yes.cells[cell], no.cells[cell])
        self.env[op.result] = Registers(shape, cells)

    # -- loads ----------------------------------------------------------------------------------------------------

    def guarded_load(self, b: Builder, memory: Value, indices: Sequence[Value], width: int, cond: Value) -> Value:
        if width == 1:
            return b.op("load", memory, *indices, cond, masked=True)
        return b.op("load", memory, *indices, cond, masked=True, width=width)

    def load(self, b: Builder, op: Op) -> None:
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        held = [self.env[v] for v in op.operands[1 : 1 + memory.type.rank]]
        mask = self.env[op.operands[-1]] if op.attrs.get("masked") else None
        places = [h for h in held if isinstance(h, RegisterIndex | Value)]
        if not isinstance(op.result.type, Tile) or len(places) < len(held) or not (mask is None or isinstance(mask, Mask)):
            super().load(b, op)
            return
        window = _Loads(b, self, memory, places, mask)
        shape = op.result.type.shape
        self.env[op.result] = Registers(shape, {cell: window.cell(b, shape, cell) for cell in self.cells(shape)})

    def group(self, memory: Tensor, places: Sequence[RegisterIndex | Value], whole: bool) -> tuple[int, int]:
        """The axis of the array that vectors walk, and how many elements an aligned load takes; 1: each element is loaded alone."""
        walking = [d for d, place in enumerate(places) if isinstance(place, RegisterIndex) and place.factors.get(self.axis, 0)]
        if len(walking) != 1:
            return -1, 1
        (axis,) = walking
        place = places[axis]
        assert isinstance(place, RegisterIndex)
        if set(place.factors) != {self.axis} or place.factors[self.axis] not in (1, 2, 4) or memory.strides[axis].constant != 1:
            return -1, 1
        root, _ = self.part(place.base)
        known = 0 if root is None else self.divisors.get(root, 1)
        for d, stride in enumerate(memory.strides):
            if d != axis:
                known = gcd(known, divisors.of_size(stride, self.kernel.facts))
        if not whole:
            known = gcd(known, divisors.of_size(memory.shape[axis], self.kernel.facts))
        width, align = self.vector, memory.align or memory.dtype.itemsize
        while width > 1 and (width * memory.dtype.itemsize > 16 or known % width or align % (width * memory.dtype.itemsize)):
            width //= 2
        return axis, width


class _Loads:
    """One tile-stage load, cell by cell."""

    def __init__(
        self, b: Builder, lowering: WindowLowering, memory: Value, places: Sequence[RegisterIndex | Value], mask: Mask | None
    ) -> None:
        assert isinstance(memory.type, Tensor)
        self.lowering, self.memory, self.tensor, self.places, self.mask = lowering, memory, memory.type, places, mask
        tests = self.lowering._guard(b, mask, mask.shape).tests if mask is not None else ()
        kept = [self._kept_inside(test) for test in tests]
        self.tested = [d for d, place in enumerate(places) if d in kept or self._may_leave(place)]
        """Axes of the array along which the place may be outside."""
        self.exact = mask is not None and not mask.others and None not in kept
        """Whether asking for the place is as good as asking the mask."""

    def _kept_inside(self, test: Test) -> int | None:
        """The axis of the array inside which the test keeps the place, -1 if it keeps the result inside the nest, None if it does neither."""
        low, size = self.lowering, self.lowering.size(test.bound)
        if size is None:
            return None
        root = low.part(test.index.base)
        for axis, start in low.starts.items():
            if test.kind == "lt" and test.index.factors == {axis: 1} and root == (start.value, 0) and size + test.more == start.extent:
                return -1
        for d, place in enumerate(self.places):
            bound = self.tensor.shape[d] if test.kind == "lt" else Size.of(0)
            if isinstance(place, RegisterIndex) and size + test.more == bound and test.index.factors == place.factors and root == low.part(place.base):
                return d
        return None

    def _may_leave(self, place: RegisterIndex | Value) -> bool:
        starts = self.lowering.starts
        return isinstance(place, RegisterIndex) and any(a not in starts or not self.lowering._is_full(starts[a]) for a in place.factors)

    def cell(self, b: Builder, shape: Shape, cell: Cell) -> Value:
        low = self.lowering
        if not low.is_wide(shape):
            return self._element(b, cell, 0)
        axis, width = low.group(self.tensor, self.places, False)
        if width == 1 or (self.mask is not None and not self.exact):
            return low.concatenated(b, [self._element(b, cell, lane) for lane in range(low.vector)])
        place = self.places[axis]
        assert isinstance(place, RegisterIndex)
        _, factors, first = low.form(place, low.collapsed(cell, place.shape), 0)
        step = factors[low.axis]
        groups: dict[int, list[int]] = {}
        for lane in range(low.vector):
            groups.setdefault((first + step * lane) // width, []).append(lane)
        elements: list[Value] = []
        for group, lanes in groups.items():
            if len(lanes) == 1 and width > 2 and step == 1:
                elements.append(self._element(b, cell, lanes[0]))
                continue
            vector = self._access(b, cell, 0, width, group * width - first)
            if step == 1 and lanes == list(range(low.vector)) and width == low.vector:
                return vector
            elements += [b.op("extract", vector, lane=first + step * lane - group * width) for lane in lanes]
        return b.op("pack", *elements)

    def _element(self, b: Builder, cell: Cell, lane: int) -> Value:
        return self._access(b, cell, lane, 1)

    def _access(self, b: Builder, cell: Cell, lane: int, width: int, more: int = 0) -> Value:
        """The element of a lane, counted from the cell's first; or so many from `more` elements behind it on."""
        low = self.lowering
        own = [low.collapsed(cell, p.shape) if isinstance(p, RegisterIndex) else cell for p in self.places]
        indices = [low.at(b, place, c, lane, more) for place, c in zip(self.places, own, strict=True)]
        cond = self._inside(b, own, lane, more) if self.exact else self._asked(b, cell, lane)
        if cond is not None:
            return low.guarded_load(b, self.memory, indices, width, cond)
        return low.plain_load(b, self.memory, indices, width)

    def _asked(self, b: Builder, cell: Cell, lane: int) -> Value | None:
        return None if self.mask is None else self.lowering._asked(b, self.mask, cell, lane, False)

    def _inside(self, b: Builder, own: Sequence[Cell], lane: int, more: int) -> Value | None:
        low, total = self.lowering, None
        for d in self.tested:
            place, extent = self.places[d], self.tensor.shape[d]
            here: Value | None = None
            if not low._not_below(place, own[d], lane, 0, more):
                here = low.compared(b, "ge", place, own[d], lane, b.index(0), more)
            if not low._below(place, own[d], lane, extent, False, more):
                here = _both(b, here, low.compared(b, "lt", place, own[d], lane, b.index(extent), more))
            # Elements of a row ask the same of it, and elements of a column of that.
            total = total if here is None else _both(b, total, here)
        return total


def _both(b: Builder, total: Value | None, more: Value) -> Value:
    return more if total is None else b.logical_and(total, more)


def _natural(kernel: Kernel) -> set[Value]:
    """Integers that are surely not negative."""
    found: set[Value] = set()
    for op in walk(kernel.body):
        if not op.results or not isinstance(op.results[0].type, Scalar) or not dtype_of(op.results[0].type).is_int:
            continue
        value = op.attrs.get("value")
        known = (
            op.opcode == "program_id"
            or (isinstance(value, Size) and surely_not_negative(value))
            or (op.opcode == "const" and isinstance(value, int) and value >= 0)
            or (op.opcode == "cast" and (dtype_of(op.operands[0].type).kind == "u" or op.operands[0] in found))
            or (op.opcode in ("add", "mul", "min", "floordiv") and all(v in found for v in op.operands))
        )
        if known:
            found.update(op.results)
    return found
