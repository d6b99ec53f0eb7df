"""A variance written as the mean of the squares less the square of the mean is computed from what the numbers are away from their mean.

In: a loop-stage kernel. Out: the same, with such differences in the form that loses no digits: where the mean is large beside the spread, both terms
of the difference are nearly equal, and what is left of them is the rounding of the squares. The result cannot be negative either. The row is walked
once more, in registers or in the nearest cache; rows that are in neither are walked once all the same (`one_pass_variance`).

    s = sum x;  q = sum x*x;  m = s / n;  v = q / n - m*m
    -> s = sum x;  m = s / n;  v = (sum (x - m)^2) / n
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.affine import Forms, analyse
from tilewright.analysis.recomputed import Keys
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import clone_ops, eliminate_dead, replace_values
from tilewright.ir.types import dtype_of


def shifted_variance(kernel: Kernel) -> Kernel:
    """The kernel with its variances about their means."""
    if sum(op.opcode == "reduce" for op in walk(kernel.body)) < 2 or not any(
        op.opcode == "sub" for op in walk(kernel.body)
    ):
        return kernel
    changed = _Centring(kernel).block(kernel.body)
    return eliminate_dead(replace(kernel, body=changed)) if changed is not kernel.body else kernel


class _Centring:
    def __init__(self, kernel: Kernel) -> None:
        self.forms: Forms = analyse(kernel)
        self.written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")}
        self.made: dict[Value, Op] = {result: op for op in walk(kernel.body) for result in op.results}

    def block(self, old: Block) -> Block:
        own = {result: op for op in old.ops for result in op.results}
        builder = Builder()
        mapping: dict[Value, Value] = {}
        changed = False
        for op in old.ops:
            found = self.variance(op, own)
            if found is None:
                regions = tuple(self.block(r) for r in op.regions)
                if mapping or any(a is not b for a, b in zip(regions, op.regions, strict=True)):
                    op = replace(op, regions=regions)
                    changed = True
                builder.append(_substituted(op, mapping))
                continue
            changed = True
            squares, mean = found
            with builder.at(op.span):
                mapping[op.results[0]] = self.centred(builder, squares, mapping.get(mean, mean), op)
        return Block(old.args, tuple(builder.ops)) if changed else old

    def variance(self, op: Op, own: Mapping[Value, Op]) -> tuple[Op, Value] | None:
        """The sum of the squares and the mean, where an op is their variance."""
        if op.opcode != "sub" or not dtype_of(op.results[0].type).is_float:
            return None
        product = self.made.get(op.operands[1])
        if product is None or product.opcode != "mul" or product.operands[0] is not product.operands[1]:
            return None
        mean = product.operands[0]
        squares, total = self.summed(op.operands[0], own), self.summed(mean, own)
        if squares is None or total is None or squares is total:
            return None
        return (squares, mean) if self.are_alike(total, squares) else None

    def summed(self, value: Value, own: Mapping[Value, Op]) -> Op | None:
        """The sum of which a value is the mean: divided by as many as there are terms."""
        op = self.made.get(value)
        if op is None or op.opcode not in ("div", "mul"):
            return None
        for first, second in (op.operands, op.operands[::-1])[: 1 if op.opcode == "div" else 2]:
            total = own.get(first)
            if total is None or total.opcode != "reduce" or total.attrs["kind"] != "add" or len(total.operands) != 1:
                continue
            if self.counts(second, total.operands[0], op.opcode == "mul"):
                return total
        return None

    def counts(self, value: Value, extent: Value, inverse: bool) -> bool:
        """Whether a number is that of the terms, or one by it."""
        op, terms = self.made.get(value), self.forms.get(extent)
        if op is None or terms is None or terms.factors:
            return False
        if op.opcode == "cast" and not inverse:
            return self.forms.get(op.operands[0]) == terms
        known, number = terms.constant.constant, op.attrs.get("value") if op.opcode == "const" else None
        if not known or not isinstance(number, int | float):
            return False
        return number * known == 1 if inverse else number == known

    def are_alike(self, total: Op, squares: Op) -> bool:
        """Whether one adds up the squares of what the other adds up."""
        if self.forms.get(total.operands[0]) != self.forms.get(squares.operands[0]):
            return False
        if any(op.regions for op in (*total.regions[0].ops, *squares.regions[0].ops)):
            return False
        square = self.made.get(squares.regions[0].yields[0])
        if square is None or square.opcode != "mul" or square.operands[0] is not square.operands[1]:
            return False
        term = Keys(total.regions[0].args[0], total, self.written).of(total.regions[0].yields[0])
        return term is not None and term == Keys(squares.regions[0].args[0], squares, self.written).of(
            square.operands[0]
        )

    def centred(self, b: Builder, squares: Op, mean: Value, op: Op) -> Value:
        region = squares.regions[0]
        square = self.made[region.yields[0]]

        def term(inner: Builder, index: Value) -> Sequence[Value]:
            mapping = {region.args[0]: index}
            clone_ops(inner, [o for o in region.ops if o.opcode != "yield" and o is not square], mapping)
            away = inner.sub(mapping[square.operands[0]], mean)
            return [inner.mul(away, away)]

        (spread,) = b.reduce("add", squares.operands, term, names=[region.args[0].name])
        scaled = self.made[op.operands[0]]
        (result,) = b.emit(
            scaled.opcode, [spread if v is squares.results[0] else v for v in scaled.operands], scaled.attrs
        )
        return result


def _substituted(op: Op, mapping: Mapping[Value, Value]) -> Op:
    if not mapping:
        return op
    return replace_values(Block((), (op,)), mapping).ops[0]
