"""Affine forms of index values: which loop indices an index is made of.

`analyse(kernel)` gives, for each integer value of a loop-stage kernel, its form `constant + sum(factor * index)`, where the
constant and the factors are symbolic sizes and the indices are region arguments (or any other opaque integer value).
Values without such a form (products of two indices, loads…) are atoms of their own, so every integer has a form.
"""

from __future__ import annotations

from tilewright.base.affine import AffineForm, combined
from tilewright.base.dtypes import i64
from tilewright.base.sizes import ONE, Size
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.types import Scalar, Tensor

Affine = AffineForm[Value]
Forms = dict[Value, Affine]


def analyse(kernel: Kernel, given: Forms | None = None) -> Forms:
    """Affine forms of all i64 values defined in the kernel; those of some values may be given."""
    forms: Forms = dict(given or {})
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
