"""Affine forms of index values: which loop indices an index is made of.

`analyse(kernel)` gives, for each integer value of a loop-stage kernel, its form `constant + sum(factor * index)`, where the
constant and the factors are symbolic sizes and the indices are region arguments (or any other opaque integer value).
Values without such a form (products of two indices, loads…) are atoms of their own, so every integer has a form.
"""

from __future__ import annotations

from math import gcd
from weakref import WeakKeyDictionary

from tilewright.base.affine import AffineForm, combined
from tilewright.base.dtypes import i64
from tilewright.base.sizes import ONE, Size, floordiv
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.types import Scalar, Tensor

Affine = AffineForm[Value]
Forms = dict[Value, Affine]

_known: WeakKeyDictionary[Kernel, Forms] = WeakKeyDictionary()
"""The forms of kernels that passes have at hand: several ask the same one after the other."""


def analyse(kernel: Kernel, given: Forms | None = None) -> Forms:
    """Affine forms of all i64 values defined in the kernel; those of some values may be given. The result is the caller's own."""
    if given:
        return _analysed(kernel, given)
    found = _known.get(kernel)
    if found is None:
        found = _known[kernel] = _analysed(kernel, {})
    return dict(found)


def _analysed(kernel: Kernel, given: Forms) -> Forms:
    forms: Forms = dict(given)
    for param in kernel.params:
        if param.type == Scalar(i64):
            forms.setdefault(param, AffineForm(((param, ONE),)))
    _block(kernel.body, forms)
    return forms


def _block(block: Block, forms: Forms) -> None:
    for arg in block.args:
        forms[arg] = AffineForm(((arg, ONE),))
    for op in block.ops:
        for region in op.regions:
            _block(region, forms)
        for result in op.results:
            if result.type == Scalar(i64) and result not in forms:
                forms[result] = _form(op, forms) or AffineForm(((result, ONE),))


def _form(op: Op, forms: Forms) -> Affine | None:
    if op.opcode == "const":
        return AffineForm((), Size.of(int(op.attrs["value"])))  # type: ignore[arg-type]
    if op.opcode == "size":
        value = op.attrs["value"]
        assert isinstance(value, Size)
        return AffineForm((), value)
    return combined(op.opcode, [forms.get(v) for v in op.operands]) if op.operands else None


def address(op: Op, forms: Forms) -> Affine:
    """The element offset a loop-stage load or store touches, as an affine form (strides included)."""
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    total: Affine = AffineForm()
    for index, stride in zip(op.operands[1 : 1 + memory.rank], memory.strides, strict=True):
        total = total.plus(forms[index], stride)
    return total


def gap(op: Op, forms: Forms) -> Affine | None:
    """A comparison of indices as `0 <= gap`."""
    if op.opcode not in ("lt", "le", "gt", "ge") or any(v not in forms for v in op.operands):
        return None
    left, right = (forms[v] for v in op.operands)
    if op.opcode in ("gt", "ge"):
        left, right = right, left
    difference = right.minus(left)
    return AffineForm(difference.factors, difference.constant - (1 if op.opcode in ("lt", "gt") else 0))


def quotient(form: Affine, divisor: int) -> Affine | None:
    """`form // divisor`, where every factor of an index can be divided."""
    if any(not all(f % divisor == 0 for _, f in factor.terms) for _, factor in form.factors):
        return None
    factors = tuple((value, floordiv(factor, divisor)) for value, factor in form.factors)
    return AffineForm(factors, floored(form.constant, divisor))


def floored(size: Size, divisor: int) -> Size:
    """`size // divisor`: what can be divided is taken out of the division."""
    even, rest = divided(size, divisor)
    return even + floordiv(rest, divisor)


def divided(size: Size, divisor: int) -> tuple[Size, Size]:
    """Sizes a and b with `size == a * divisor + b`; b is a number from 0 to divisor - 1 where the rest can be divided."""
    even = Size(tuple((names, f // divisor) for names, f in size.terms if f // divisor))
    return even, size - even * divisor


def lowest(form: Affine) -> Affine:
    """A form that is at least 0 just where this one is, with factors that have nothing in common."""
    numbers = [factor.constant for _, factor in form.factors]
    if not numbers or any(n is None for n in numbers):
        return form
    common = gcd(*(n for n in numbers if n is not None))
    return form if common <= 1 else quotient(form, common) or form
