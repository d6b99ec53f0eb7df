"""Affine forms of index values: which loop indices an index is made of.

`analyse(kernel)` gives, for each integer value of a loop-stage kernel, its form `constant + sum(factor * index)`, where the
constant and the factors are symbolic sizes and the indices are region arguments (or any other opaque integer value).
Values without such a form (products of two indices, loads…) are atoms of their own, so every integer has a form.
"""

from __future__ import annotations

from tilewright.base.dtypes import i64
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.types import Scalar, Tensor


@record
class Affine:
    """`constant + sum(factor * value)`; factors are never zero."""

    factors: tuple[tuple[Value, Size], ...] = ()
    constant: Size = ZERO

    def factor(self, value: Value) -> Size:
        for known, factor in self.factors:
            if known is value:
                return factor
        return ZERO

    @property
    def values(self) -> tuple[Value, ...]:
        return tuple(v for v, _ in self.factors)

    def plus(self, other: Affine, scale: Size = ONE) -> Affine:
        factors = dict(self.factors)
        for value, factor in other.factors:
            factors[value] = factors.get(value, ZERO) + factor * scale
        return Affine(tuple((v, f) for v, f in factors.items() if f != ZERO), self.constant + other.constant * scale)

    def times(self, scale: Size) -> Affine:
        return Affine().plus(self, scale)

    def is_just(self, value: Value) -> bool:
        """Whether it is that value itself."""
        return self.constant == ZERO and len(self.factors) == 1 and self.factors[0] == (value, ONE)


Forms = dict[Value, Affine]


def analyse(kernel: Kernel, given: Forms | None = None) -> Forms:
    """Affine forms of all i64 values defined in the kernel; those of some values may be given."""
    forms: Forms = dict(given or {})
    for param in kernel.params:
        if param.type == Scalar(i64):
            forms.setdefault(param, Affine(((param, ONE),)))
    _block(kernel.body, forms)
    return forms


def _block(block: Block, forms: Forms) -> None:
    for arg in block.args:
        forms[arg] = Affine(((arg, ONE),))
    for op in block.ops:
        for region in op.regions:
            _block(region, forms)
        for result in op.results:
            if result.type == Scalar(i64) and result not in forms:
                forms[result] = _form(op, forms) or Affine(((result, ONE),))


def _form(op: Op, forms: Forms) -> Affine | None:
    if op.opcode == "const":
        return Affine((), Size.of(int(op.attrs["value"])))  # type: ignore[arg-type]
    if op.opcode == "size":
        value = op.attrs["value"]
        assert isinstance(value, Size)
        return Affine((), value)
    if op.opcode not in ("add", "sub", "mul", "neg"):
        return None
    operands = [forms.get(v) for v in op.operands]
    if any(o is None for o in operands):
        return None
    first, last = operands[0], operands[-1]
    assert first is not None and last is not None
    if op.opcode == "neg":
        return first.times(Size.of(-1))
    if op.opcode == "add":
        return first.plus(last)
    if op.opcode == "sub":
        return first.plus(last, Size.of(-1))
    if not first.factors:
        return last.times(first.constant)
    if not last.factors:
        return first.times(last.constant)
    return None


def address(op: Op, forms: Forms) -> Affine:
    """The element offset a loop-stage load or store touches, as an affine form (strides included)."""
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    total = Affine()
    for index, stride in zip(op.operands[1 : 1 + memory.rank], memory.strides, strict=True):
        total = total.plus(forms[index], stride)
    return total

