"""Whether the threads of a kernel are independent: no one touches an element that another one writes.

In: a thread-stage kernel and the value that is the number of a thread. Out: the first pair of accesses that may meet, or none. Two
accesses to an array cannot meet when along one axis both are `factor * number + rest` with the same factor, and the rests are equal
or stay within one step of the factor:

    out[i] and x[i]                 the same element, and each thread its own
    out[2 * i] and out[2 * i + 1]   never the same element
    out[i * m + j], j in 0..m       a row of m elements for each thread

Everything else is taken as meeting: also indices that come from memory, as nothing says that they differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tilewright.analysis import affine, ranges
from tilewright.analysis.affine import Affine
from tilewright.analysis.ranges import Range, surely_at_most
from tilewright.base.affine import AffineForm
from tilewright.base.intervals import Interval, constant_sign
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor

_ACCESSES = frozenset({"load", "store", "atomic"})


@record
class Dependence:
    """Two accesses of different threads that may touch one element; the first one writes."""

    write: Op
    other: Op
    array: str


def find_dependence(kernel: Kernel, number: Value, symbols: Collection[Value] = ()) -> Dependence | None:
    """A pair of accesses that forbids running the threads in any order. `symbols`: integers that are not negative."""
    finder = _DependenceFinder(kernel, number, symbols)
    accesses = [op for op in walk(kernel.body) if op.opcode in _ACCESSES and op.operands[0] in kernel.params]
    for write in accesses:
        if write.opcode == "load":
            continue
        for other in accesses:
            same = other.operands[0] is write.operands[0] and not (write.opcode == other.opcode == "atomic")
            if same and not finder.apart(write, other):
                return Dependence(write, other, write.operands[0].name)
    return None


class _DependenceFinder:
    def __init__(self, kernel: Kernel, number: Value, symbols: Collection[Value]) -> None:
        self.number = number
        names = {value: Size.of(f"{value.name}$value") for value in symbols}
        given: affine.Forms = {value: AffineForm((), name) for value, name in names.items()}
        self.forms = affine.analyse(kernel, {number: AffineForm(((number, ONE),)), **given})
        self.ranges = ranges.analyse(kernel, {value: Interval(name, name) for value, name in names.items()})
        self.shared = _uniform(kernel, number)

    def apart(self, one: Op, other: Op) -> bool:
        memory = one.operands[0].type
        assert isinstance(memory, Tensor)
        pairs = zip(one.operands[1 : 1 + memory.rank], other.operands[1 : 1 + memory.rank], strict=True)
        return any(self._apart(a, b) for a, b in pairs)

    def _apart(self, one: Value, other: Value) -> bool:
        """Whether these indices differ whenever the numbers of the threads do."""
        first, second = self.forms.get(one), self.forms.get(other)
        if first is None or second is None:
            return False
        factor = first.factor(self.number)
        if factor == ZERO or factor != second.factor(self.number):
            return False
        if factor.constant is not None and factor.constant < 0:
            factor = factor * -1
        a, b = self._rest(first), self._rest(second)
        if a is None or b is None or a[0] != b[0]:
            return False
        # Of what is left only ranges are known: both must lie within one step of the factor.
        low = a[1].low if surely_at_most(a[1].low, b[1].low) else b[1].low
        high = a[1].high if surely_at_most(b[1].high, a[1].high) else b[1].high
        inside = all(surely_at_most(low, r.low) and surely_at_most(r.high, high) for r in (a[1], b[1]))
        if inside and surely_at_most(high - low + 1, factor):
            return True
        return self._never_multiple(a[1], b[1], factor)

    @staticmethod
    def _never_multiple(a: Range, b: Range, factor: Size) -> bool:
        """Fixed distances that the factor does not divide: 2 * i and 2 * i + 3."""
        step = factor.constant
        if step is None or a.point is None or b.point is None:
            return False
        distance = (a.point - b.point).constant
        return distance is not None and distance % step != 0

    def _rest(self, form: Affine) -> tuple[frozenset[tuple[Value, Size]], Range] | None:
        """What is added to the thread's part: values all threads have in common, and the range of the others."""
        common = frozenset((value, factor) for value, factor in form.factors if value in self.shared and value is not self.number)
        others = tuple((value, factor) for value, factor in form.factors if value not in self.shared and value is not self.number)
        reach = AffineForm(others, form.constant).interval(self.ranges.get, constant_sign)
        return None if reach is None else (common, reach)


def _uniform(kernel: Kernel, number: Value) -> frozenset[Value]:
    """Values that are the same in all threads and do not change: made of parameters, sizes and constants alone."""
    same: set[Value] = set(kernel.params)
    for op in walk(kernel.body):
        pure = op.opcode not in _ACCESSES and not op.regions and op.opcode not in ("thread_id", "program_id")
        if pure and number not in op.results and all(v in same for v in op.operands):
            same.update(op.results)
    return frozenset(same)


def thread_number(kernel: Kernel) -> Value | None:
    """The thread's number in the whole grid, where the kernel has it."""
    made: Mapping[Value, Op] = {result: op for op in walk(kernel.body) for result in op.results}
    for value, op in made.items():
        if op.opcode == "add" and {_kind(made, operand) for operand in op.operands} == {"mul program_id", "thread_id"}:
            return value
    return None


def _kind(made: Mapping[Value, Op], value: Value) -> str:
    op = made.get(value)
    if op is None:
        return ""
    if op.opcode == "mul" and any(_kind(made, operand) == "program_id" for operand in op.operands):
        return "mul program_id"
    return op.opcode
