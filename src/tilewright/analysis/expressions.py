"""Which values of a kernel are the same function of the indices, however sums and products in them are ordered.

In: the ops of a loop-stage kernel. Out: keys that are equal for such values. `analysis/attention.py` compares by them what a text computes
anew for each of its reductions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import dtype_of

Key = tuple[object, ...]


class ExpressionTable:
    def __init__(self, kernel: Kernel) -> None:
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.names: dict[Value, str] = {}
        """What indices are called in keys: those of different reductions that count as one have one name."""
        self.opaque: set[Value] = set()
        """Results of the reductions at hand: each is only equal to itself."""

    def key(self, value: Value) -> Key:
        """Equal for values that are the same function of the indices; those of different reductions count as one."""
        if value in self.names:
            return ("index", self.names[value])
        op = self.made.get(value)
        if op is None or value in self.opaque:
            return ("value", id(value))
        if op.opcode in ("add", "sub", "neg", "fma") and dtype_of(value.type).is_float:
            terms = self._sum(value)
            return terms[0] if len(terms) == 1 else ("sum", *terms)
        if op.opcode == "mul":
            return ("mul", *sorted_keys([self.key(v) for v in op.operands]))
        if op.opcode == "select" and (shifted := self._shifted(op)) is not None:
            return self.key(shifted)
        if op.opcode == "if":
            position = op.results.index(value)
            return ("if", self.key(op.operands[0]), *(self.key(region.yields[position]) for region in op.regions))
        if op.opcode == "reduce":
            return self._reduction(op)
        if op.regions:
            return ("value", id(value))
        return (op.opcode, *_attributes(op.attrs), *(self.key(v) for v in op.operands))

    def _reduction(self, op: Op) -> Key:
        depth = sum(1 for name in self.names.values() if name.startswith("inner"))
        for number, arg in enumerate(op.regions[0].args):
            self.names[arg] = f"inner{depth}.{number}"
        found = (
            "reduce", op.attrs["kind"], *(self.key(v) for v in op.operands), *(self.key(v) for v in op.regions[0].yields),
        )  # fmt: skip
        for arg in op.regions[0].args:
            del self.names[arg]
        return found

    def _sum(self, value: Value) -> list[Key]:
        """The terms of a sum, in a fixed order."""
        return sorted_keys(self._terms(value, False))

    def _terms(self, value: Value, negative: bool) -> list[Key]:
        op = self.made.get(value)
        opcode = op.opcode if op is not None and dtype_of(value.type).is_float else ""
        assert op is not None or not opcode
        if opcode == "add" and op is not None:
            return [*self._terms(op.operands[0], negative), *self._terms(op.operands[1], negative)]
        if opcode == "sub" and op is not None:
            return [*self._terms(op.operands[0], negative), *self._terms(op.operands[1], not negative)]
        if opcode == "neg" and op is not None:
            return self._terms(op.operands[0], not negative)
        if opcode == "fma" and op is not None:
            product: Key = ("mul", *sorted_keys([self.key(v) for v in op.operands[:2]]))
            return [("neg", product) if negative else product, *self._terms(op.operands[2], negative)]
        own = self.key(value)
        return [("neg", own) if negative else own]

    def _shifted(self, op: Op) -> Value | None:
        """The maximum of which a select is what to subtract: 0 where it is -inf."""
        test = self.made.get(op.operands[0])
        maximum = op.operands[2]
        if test is None or test.opcode != "eq" or maximum not in self.opaque or not self._is_constant(op.operands[1], 0.0):
            return None
        compared = [v for v in test.operands if v is not maximum]
        return maximum if len(compared) == 1 and self._is_constant(compared[0], -math.inf) else None

    def _is_constant(self, value: Value, number: float) -> bool:
        op = self.made.get(value)
        return op is not None and op.opcode == "const" and op.attrs["value"] == number


def sorted_keys(keys: Sequence[Key]) -> list[Key]:
    """In a fixed order."""
    return sorted(keys, key=repr)


def _attributes(attrs: Mapping[str, object]) -> list[tuple[str, str]]:
    return sorted((name, str(value)) for name, value in attrs.items() if name != "narrow")
