"""How many iterations the loops of one thread make in all, at most, as a size. In: a thread-stage kernel. Out: a size, and whether it has loops without a known end.

A value is a size whose names may also be *parts*: the thread's number, a block's number, a loop's index, a number from memory. A part has bounds, which are
sizes without parts. The length of a loop is its end less its begin, in which parts that both have cancel; then bounds stand for what is left.

Threads of a block may go through a loop together, each one's iterations masked where it has none: a loop ends when the last of them is through, and what stands
under a condition is passed by all. So one more pass is counted for every loop, and both sides of a condition that differs between threads.

    for %t, %n, 256 (%i) { for 0, %m, 1 {…} }      ->   (ceildiv(n, 256) + 1) * (m + 2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.analysis.ranges import surely_not_negative
from tilewright.analysis.uniform import block_values, waiting_ops
from tilewright.base.dtypes import DType
from tilewright.base.record import record
from tilewright.base.sizes import (
    ONE,
    ZERO,
    Size,
    SizeCall,
    ceildiv,
    floordiv,
    has_numbers,
    is_number,
    maximum,
    minimum,
    mod,
    number_name,
    product,
)
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.types import Scalar, Tensor, dtype_of

_MARK = "%"
"""Names of parts begin with it."""
_MOST_CHOICES = 3
"""Extremes inside a value; above that, only its bounds are kept."""
Bounds = tuple[Size | None, Size | None]
"""The least and the largest value, where they are known."""


@record
class LoopTurns:
    """What is known of a kernel's loops."""

    count: Size
    """Iterations of one thread at most, but for loops whose end is not known."""
    open_ended: bool
    """Whether there are such loops."""


def loop_turns(kernel: Kernel, cost: Callable[[Op], int]) -> LoopTurns:
    """The iterations of a thread. `cost`: those that an op's own code makes."""
    uniform = block_values(kernel, waiting_ops(kernel))
    first = _Turns(kernel, cost, uniform, {})
    first.count(kernel.body)
    last = _Turns(kernel, cost, uniform, first.cells)
    return LoopTurns(last.count(kernel.body), last.open_ended)


def _number_type(value: Value) -> DType | None:
    dtype = dtype_of(value.type) if isinstance(value.type, Scalar) else None
    return dtype if dtype is not None and (dtype.is_int or dtype.is_bool) else None


def _is_natural(size: Size | None) -> bool:
    return size is not None and not has_numbers(size) and surely_not_negative(size)


def _parts(size: Size) -> bool:
    return any(name.startswith(_MARK) for name in size.names)


def _choices(size: Size) -> int:
    """Extremes of values with parts that it is made of."""
    calls = [atom for monomial, _ in size.terms for atom in monomial if isinstance(atom, SizeCall)]
    return sum(1 + _choices(call.a) + _choices(call.b) for call in calls if _parts(call.a) or _parts(call.b))


class _Turns:
    def __init__(self, kernel: Kernel, cost: Callable[[Op], int], uniform: set[Value], cells: dict[Value, Bounds]) -> None:
        self.kernel, self.cost, self.uniform, self.known_cells = kernel, cost, uniform, cells
        self.open_ended = False
        self.forms: dict[Value, Size] = {}
        self.bounds: dict[str, Bounds] = {}
        self.made: dict[object, Size] = {}
        self.cells: dict[Value, Bounds] = {}
        """What the kernel's own memory holds: the bounds of all numbers stored there."""
        for param in kernel.params:
            if _number_type(param) is not None:
                self.forms[param] = Size.of(number_name(param.name))

    # -- values ---------------------------------------------------------------------------------------------------------

    def part(self, least: Size | None, most: Size | None, key: object) -> Size:
        """A number between bounds; the same one for the same key."""
        found = self.made.get(key)
        if found is None:
            name = f"{_MARK}{len(self.bounds)}"
            self.bounds[name] = least, most
            found = self.made[key] = Size.of(name)
        return found

    def form(self, value: Value) -> Size:
        found = self.forms.get(value)
        if found is None:
            found = self.forms[value] = self.part(*self.of_dtype(value), value)
        return found

    def of_dtype(self, value: Value) -> Bounds:
        """What short integers are between."""
        dtype = _number_type(value)
        if dtype is None or (dtype.is_int and dtype.bits > 16):
            return (ZERO if dtype is not None and dtype.kind == "u" else None), None
        return (ZERO, ONE) if dtype.is_bool else (Size.of(int(dtype.min_value)), Size.of(int(dtype.max_value)))

    def least(self, size: Size) -> Size | None:
        found = self.most(-size)
        return None if found is None else -found

    def most(self, size: Size) -> Size | None:
        """The largest value of a size with parts."""
        for monomial, factor in size.terms:
            for place, atom in enumerate(monomial):
                if isinstance(atom, SizeCall) and _parts(Size((((atom,), 1),))):
                    others = monomial[:place] + monomial[place + 1 :]
                    if atom.op not in ("min", "max") or not all(map(self.is_natural_atom, others)):
                        return None
                    rest, times = size - Size(((monomial, factor),)), Size(((others, factor),))
                    either = [self.most(rest + times * side) for side in (atom.a, atom.b)]
                    known = [side for side in either if side is not None]
                    if (atom.op == "min") == (factor > 0):
                        return minimum(*known) if len(known) == 2 else known[0] if known else None
                    return maximum(*known) if len(known) == 2 else None
        total = ZERO
        for monomial, factor in size.terms:
            parts = [atom for atom in monomial if isinstance(atom, str) and atom.startswith(_MARK)]
            if not parts:
                total = total + Size(((monomial, factor),))
                continue
            others = tuple(atom for atom in monomial if atom not in parts)
            sides = [self.bounds[name][1 if factor > 0 else 0] for name in parts]
            if any(side is None for side in sides):
                return None
            if len(monomial) > 1 and not (all(map(self.is_natural_atom, others)) and all(_is_natural(self.bounds[name][0]) for name in parts)):
                return None
            total = total + Size(((others, factor),)) * product(side for side in sides if side is not None)
        return total

    def is_natural_atom(self, atom: str | SizeCall) -> bool:
        if isinstance(atom, str):
            return _is_natural(self.bounds[atom][0]) if atom.startswith(_MARK) else not is_number(atom)
        return not _parts(Size((((atom,), 1),))) and _is_natural(Size((((atom,), 1),)))

    def natural(self, size: Size) -> bool:
        return _is_natural(self.least(size))

    # -- ops ------------------------------------------------------------------------------------------------------------

    def note(self, op: Op) -> None:
        """What an op without regions gives."""
        if op.opcode == "store":
            self.stored(op)
        elif op.opcode not in ("load", "prefetch"):
            for value in op.operands:
                if isinstance(value.type, Tensor):
                    self.cells[value] = None, None  # others see it, or write to it
        if len(op.results) != 1 or _number_type(op.results[0]) is None:
            return
        found = self.result(op)
        dtype = _number_type(op.results[0])
        if found is not None and dtype is not None and dtype.kind == "u" and not self.natural(found):
            found = None  # it may wrap around
        if found is not None:
            self.forms[op.results[0]] = found

    def stored(self, op: Op) -> None:
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        value = op.operands[1 + memory.type.rank]
        now = (self.least(self.form(value)), self.most(self.form(value))) if _number_type(value) is not None else (None, None)
        self.cells[memory] = self.hull(self.cells[memory], now) if memory in self.cells else now

    def hull(self, a: Bounds, b: Bounds) -> Bounds:
        least = minimum(a[0], b[0]) if a[0] is not None and b[0] is not None else None
        return least, maximum(a[1], b[1]) if a[1] is not None and b[1] is not None else None

    def between(self, values: Sequence[Value], key: object) -> Size:
        """One of two values."""
        sides = [(self.least(self.form(v)), self.most(self.form(v))) for v in values]
        return self.part(*self.hull(sides[0], sides[1]), key)

    def result(self, op: Op) -> Size | None:
        opcode = op.opcode
        if opcode == "const":
            value = op.attrs["value"]
            return Size.of(int(value)) if isinstance(value, int) else None
        if opcode == "size":
            value = op.attrs["value"]
            assert isinstance(value, Size | int | str)
            return Size.of(value)
        if opcode in ("thread_id", "lane_id", "warp_id"):
            return self.part(ZERO, Size.of(self.kernel.threads - 1), (opcode, str(op.attrs)))
        if opcode in ("program_id", "grid_size"):
            axis = op.attrs["axis"]
            assert isinstance(axis, int)
            extent = self.kernel.grid[axis] if axis < len(self.kernel.grid) else ONE
            return extent if opcode == "grid_size" else self.part(ZERO, extent - 1, (opcode, axis))
        if opcode == "load":
            bounds = self.known_cells.get(op.operands[0])
            return self.part(*bounds, op.results[0]) if bounds is not None and op.operands[0] not in self.kernel.params else None
        if opcode == "select" and len(op.operands) == 3:
            return self.between(op.operands[1:], op.results[0])
        if opcode == "cast":
            source, target = _number_type(op.operands[0]), _number_type(op.results[0])
            kept = source is not None and target is not None and target.is_int and (target.bits >= 32 or target.bits > source.bits)
            return self.form(op.operands[0]) if kept else None
        forms = [self.form(v) for v in op.operands if _number_type(v) is not None]
        return self.computed(op.opcode, forms, op.results[0]) if len(forms) == len(op.operands) else None

    def computed(self, opcode: str, forms: Sequence[Size], key: object) -> Size | None:
        if opcode == "neg":
            return -forms[0]
        if len(forms) != 2:
            return None
        a, b = forms
        if opcode in ("add", "sub", "mul"):
            found = a + b if opcode == "add" else a - b if opcode == "sub" else a * b
            return found if _choices(found) <= 2 * _MOST_CHOICES else self.part(self.least(a), self.most(a), a) + b if opcode == "add" else None
        if opcode in ("min", "max"):
            found = minimum(a, b) if opcode == "min" else maximum(a, b)
            return found if _choices(found) <= _MOST_CHOICES else self.part(self.least(found), self.most(found), (opcode, a, b))
        shift = b.constant
        if opcode in ("shl", "shr"):
            if shift is None or not 0 <= shift < 63:
                return None
            return a * (1 << shift) if opcode == "shl" else self.divided(a, Size.of(1 << shift))
        if opcode == "floordiv":
            return self.divided(a, b)
        if opcode == "mod" and _is_natural(b):
            return mod(a, b) if not _parts(a) else self.part(ZERO, b - 1, ("mod", a, b))
        if opcode == "and" and (self.natural(a) or self.natural(b)):
            known = [most for side in (a, b) if self.natural(side) and (most := self.most(side)) is not None]
            return self.part(ZERO, known[0] if len(known) == 1 else minimum(*known) if known else None, ("and", a, b))
        if opcode in ("or", "xor") and self.natural(a) and self.natural(b):
            both = self.most(a + b)
            return self.part(ZERO, both, (opcode, a, b))
        return None

    def divided(self, a: Size, b: Size) -> Size | None:
        if _parts(b) or not _is_natural(b):
            return None
        if not _parts(a):
            return floordiv(a, b)
        least, most = self.least(a), self.most(a)
        return self.part(None if least is None else floordiv(least, b), None if most is None else floordiv(most, b), ("floordiv", a, b))

    # -- loops ----------------------------------------------------------------------------------------------------------

    def count(self, block: Block) -> Size:
        """Iterations that one pass of the block makes."""
        total = ZERO
        for op in block.ops:
            if op.opcode == "for":
                total = total + self.loop(op)
            elif op.opcode == "if":
                total = total + self.branch(op)
            elif op.opcode == "while":
                self.open_ended = True
                for region in op.regions:
                    total = total + self.count(region)
                total = total + 1
            else:
                self.note(op)
                total = total + self.cost(op)
        return total

    def branch(self, op: Op) -> Size:
        sides = [self.count(region) for region in op.regions]
        for position, result in enumerate(op.results):
            if _number_type(result) is not None and len(op.regions) == 2:
                self.forms[result] = self.between([region.yields[position] for region in op.regions], result)
        if len(sides) == 1:
            return sides[0]
        if op.operands[0] not in self.uniform:
            return sides[0] + sides[1]
        then, otherwise = (self.masked(region) for region in op.regions)
        return maximum(sides[0] + otherwise, sides[1] + then)

    def masked(self, block: Block) -> int:
        """Iterations of a pass in which no thread takes part."""
        return sum(sum(map(self.masked, op.regions)) + (op.opcode in ("for", "while")) if op.regions else self.cost(op) for op in block.ops)

    def loop(self, op: Op) -> Size:
        low, high, step = (self.form(v) for v in op.operands[:3])
        index = op.regions[0].args[0]
        last = self.most(high)
        if _number_type(index) is not None:
            self.forms[index] = self.part(self.least(low), None if last is None else last - 1, index)
        body = self.count(op.regions[0])
        length, stride = self.most(high - low), self.least(step) if _parts(step) else step
        if length is None or stride is None:
            self.open_ended = True
            return body + 1
        return (ceildiv(maximum(length, ZERO), maximum(stride, ONE)) + 1) * (body + 1)
