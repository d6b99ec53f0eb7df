"""Accesses to neighbouring elements that can become one: places as sums, and how wide an access may be. For `merge_loads` and `merge_stores`."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis import divisors
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Scalar, Tensor

WIDEST = 16
"""Bytes of one access."""
Form = tuple[tuple[Value, ...], int]
"""Values that are added up, and a constant."""


class Neighbours:
    """The places of the accesses of a kernel at the thread stage."""

    def __init__(self, kernel: Kernel) -> None:
        self.facts = kernel.facts
        self.divisors = divisors.analyse(kernel)
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.order = {value: number for number, value in enumerate(self.made)}

    def form(self, value: Value) -> Form:
        """A value as a sum of others, in the order in which they are made, and a constant."""
        op = self.made.get(value)
        if op is not None and op.opcode == "const" and isinstance(op.attrs["value"], int):
            return (), op.attrs["value"]
        if op is not None and op.opcode == "add" and isinstance(value.type, Scalar):
            (first, one), (second, two) = (self.form(v) for v in op.operands)
            return tuple(sorted((*first, *second), key=lambda v: self.order.get(v, -1))), one + two
        return (value,), 0

    def runs(self, at: Mapping[int, Op]) -> list[list[Op]]:
        """Accesses at places next to each other that become one, in the order of their places."""
        runs: list[list[Op]] = []
        places = sorted(at)
        while places:
            first = places[0]
            width = self.width(at[first])
            while width > 1 and not all(first + k in at for k in range(width)):
                width //= 2
            if width > 1:
                runs.append([at[first + k] for k in range(width)])
            places = [p for p in places if p >= first + width]
        return runs

    def width(self, op: Op) -> int:
        """Elements from there on that one access may take."""
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        size = memory.dtype.itemsize
        width = max(1, WIDEST // size)
        last = self.divisors.get(op.operands[memory.rank], 1)
        strides = [divisors.of_size(s, self.facts) * self.divisors.get(v, 1) for s, v in zip(memory.strides[:-1], op.operands[1 : memory.rank], strict=True)]
        if memory.strides[-1].constant != 1:
            return 1
        while width > 1 and (last % width or any(s % width for s in strides) or (memory.align or size) % (width * size)):
            width //= 2
        return width
