"""Conditions of sums as lists of tests: what a guard says about the indices of its sum.

In: the values of a loop-stage kernel. Out: `GuardTest`s, all of which must hold: an affine form is at least 0, or divides by a number without rest, or
anything else, as a value. `not`, `or` under `not` and comparisons of all spellings come out the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.affine import Affine, Forms, divided
from tilewright.base.affine import AffineForm
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import INDEX

Made = Mapping[Value, Op]

_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


@record
class GuardTest:
    """`form >= 0`; or `form % divisor == 0` where there is a divisor; or `value`, or its opposite, where there is no form."""

    form: Affine | None
    divisor: int = 0
    value: Value | None = None
    opposite: bool = False


def guard_tests(condition: Value, made: Made, forms: Forms, opposite: bool = False) -> list[GuardTest]:
    """What a condition says, as a conjunction; its opposite if asked for."""
    op = made.get(condition)
    if op is None:
        return [GuardTest(None, value=condition, opposite=opposite)]
    if op.opcode == "not":
        return guard_tests(op.operands[0], made, forms, not opposite)
    if op.opcode == ("or" if opposite else "and"):
        return [test for v in op.operands for test in guard_tests(v, made, forms, opposite)]
    if op.opcode in _OPPOSITE and op.operands[0].type == INDEX and all(v in forms for v in op.operands):
        opcode = _OPPOSITE[op.opcode] if opposite else op.opcode
        left, right = (forms[v] for v in op.operands)
        if opcode in ("lt", "le", "gt", "ge"):
            gap = right.minus(left) if opcode in ("lt", "le") else left.minus(right)
            return [GuardTest(AffineForm(gap.factors, gap.constant - (1 if opcode in ("lt", "gt") else 0)))]
        whole = _whole(left.minus(right), made, forms) if opcode == "eq" else None
        if whole is not None:
            return [whole]
    return [GuardTest(None, value=condition, opposite=opposite)]


def _whole(difference: Affine, made: Made, forms: Forms) -> GuardTest | None:
    """`p % s - c` is zero, or `p // s * s - p`, or `(p & (s - 1)) - c`."""
    for value, factor in difference.factors:
        op = made.get(value)
        number = factor.constant
        if op is None or number is None or op.opcode not in ("mod", "floordiv", "and") or len(op.operands) != 2:
            continue
        divisor = divisor_of(op, forms)
        if divisor is None or op.operands[0] not in forms:
            continue
        inside = forms[op.operands[0]]
        rest = difference.minus(AffineForm(((value, factor),)))
        if op.opcode == "floordiv":
            sign = number // divisor if number in (divisor, -divisor) else 0
            if sign and _is_zero(rest.plus(inside, Size.of(sign))):
                return GuardTest(inside, divisor)
        elif number in (1, -1) and not rest.factors and rest.constant.constant is not None:
            wanted = -number * rest.constant.constant
            if 0 <= wanted < divisor:
                return GuardTest(AffineForm(inside.factors, inside.constant - wanted), divisor)
    return None


def divisor_of(op: Op, forms: Forms) -> int | None:
    """The number above 0 by which a `mod` or `floordiv` divides; for `and` with s - 1, s where that is a power of two."""
    form = forms.get(op.operands[1])
    number = None if form is None or form.factors else form.constant.constant
    if number is None or number < (0 if op.opcode == "and" else 1):
        return None
    if op.opcode == "and":
        return number + 1 if number & (number + 1) == 0 else None
    return number


def _is_zero(form: Affine) -> bool:
    return not form.factors and form.constant.constant == 0


def remainder(form: Affine, divisor: int) -> int | None:
    """`form % divisor`, where that is the same for all values of its indices."""
    if any(not all(f % divisor == 0 for _, f in factor.terms) for _, factor in form.factors):
        return None
    return divided(form.constant, divisor)[1].constant


def emit(b: Builder, form: Affine) -> Value:
    """Ops that compute a form, always in the same order, so that equal forms become the same value."""
    total: Value | None = None
    for value, factor in form.factors:
        term = value if factor == ONE else b.mul(value, b.index(factor))
        total = term if total is None else b.add(total, term)
    if total is None:
        return b.index(form.constant)
    return total if form.constant.constant == 0 else b.add(total, b.index(form.constant))
