"""What can be proven about index expressions: their ranges, and when different iterations reach different elements.

In come typed expressions, out come affine forms of loop indices (`base/affine.py`) and intervals of sizes (`base/intervals.py`). Every answer is
safe: `False` or `None` means "not proven".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import permutations
from math import gcd

from tilewright.base.affine import AffineForm, combined
from tilewright.base.intervals import Interval, clamped, sign_of, surely_nonnegative, surely_positive
from tilewright.base.sizes import ONE, ZERO, Size, ceildiv, floordiv, has_numbers, maximum, minimum
from tilewright.tree.typed import Apply, Cast, Const, Expr, IndexRef, LoopVar, SizeValue
from tilewright.tree.typed_walk import walk_expr

IndexForm = AffineForm[LoopVar]


def affine(expr: Expr) -> IndexForm | None:
    """The expression as a linear function of loop indices, or None."""
    if isinstance(expr, Const) and isinstance(expr.value, int):
        return AffineForm((), Size.of(int(expr.value)))
    if isinstance(expr, SizeValue):
        return AffineForm((), expr.size)
    if isinstance(expr, IndexRef):
        return AffineForm(((expr.var, ONE),))
    if isinstance(expr, Cast) and expr.dtype is expr.value.dtype:
        return affine(expr.value)
    if isinstance(expr, Apply) and expr.dtype.is_int:
        return combined(expr.op, [affine(a) for a in expr.args])
    return None


def interval(expr: Expr) -> Interval[Size] | None:
    """The smallest and the largest value of an index expression, where every index has a known range."""
    linear = affine(expr)
    if linear is not None:
        low, high = _end(linear, upper=False), _end(linear, upper=True)
        return Interval(low, high) if low is not None and high is not None else None
    if isinstance(expr, Apply) and len(expr.args) == 2:
        a, b = interval(expr.args[0]), interval(expr.args[1])
        number = b.point if b is not None else None
        if expr.op == "mod" and number is not None and surely_nonnegative(number):
            return Interval(ZERO, clamped(number - 1))
        if a is None or b is None:
            return None
        if expr.op == "add":
            return a + b
        if expr.op == "sub":
            return a - b
        if expr.op == "mul" and number is not None and surely_nonnegative(number):
            return a.scaled(number)
        if expr.op == "floordiv" and number is not None and surely_nonnegative(number):
            divisor = number if surely_positive(number) else maximum(number, ONE)
            return Interval(floordiv(a.low, divisor), floordiv(a.high, divisor))
        if expr.op == "min":
            return Interval(minimum(a.low, b.low), minimum(a.high, b.high))
        if expr.op == "max":
            return Interval(maximum(a.low, b.low), maximum(a.high, b.high))
    return None


def _end(form: IndexForm, upper: bool) -> Size | None:
    """The largest, or the smallest, value of a linear function: each index is at an end of its range, inner ones first."""
    while form.factors:
        var, factor = next(
            ((v, f) for v, f in form.factors if not any(v in bound_by(other) for other in form.values if other is not v)), form.factors[0]
        )
        sign = sign_of(factor)
        if sign is None and has_numbers(factor):
            # A number of the call, which may be negative: at one of the ends.
            rest = form.plus(AffineForm(((var, ONE),)), -factor)
            ends = [None if place is None else _end(rest.plus(place, factor), upper) for place in (_bound(var, False), _bound(var, True))]
            return None if ends[0] is None or ends[1] is None else (maximum if upper else minimum)(ends[0], ends[1])
        if sign is None:
            return None
        last = (sign > 0) == upper
        place = _bound(var, last)
        if place is None:
            return None
        form = form.plus(AffineForm(((var, ONE),)), -factor).plus(place, factor)
    return form.constant


def _bound(var: LoopVar, last: bool) -> IndexForm | None:
    """The largest, or the smallest, value of an index, in terms of the indices around it where it stops with one of them."""
    step = var.step.constant
    if bound_by(var) and step in (1, -1):
        near, far = affine(var.lo), affine(var.hi)
        form = near if last == (step < 0) else far
        if form is not None:
            return form if form is near else AffineForm(form.factors, form.constant - step)
    size = var.high if last else var.low
    return AffineForm((), size) if size is not None else None


def size_under(expr: Expr, fixed: Mapping[LoopVar, Size]) -> Size | None:
    """The expression as a size, where indices have the values `fixed` says; None where it is none."""
    linear = affine(expr)
    if linear is not None:
        form = fixed_form(linear, fixed)
        return None if form.factors else form.constant
    if isinstance(expr, Apply) and expr.op in ("min", "max"):
        a, b = (size_under(e, fixed) for e in expr.args)
        return None if a is None or b is None else minimum(a, b) if expr.op == "min" else maximum(a, b)
    return None


def range_under(var: LoopVar, fixed: Mapping[LoopVar, Size]) -> tuple[Size, Size] | None:
    """The first value of an index, and how many it takes, where indices around it have the values `fixed` says. A number that stands for an index has no range."""
    if var.lo is var.hi:
        return None
    if var.first is not None and var.count is not None:
        return var.first, var.count
    first, last = size_under(var.lo, fixed), size_under(var.hi, fixed)
    step = var.step.constant
    if first is None or last is None or not step:
        return None
    return first, clamped(ceildiv(first - last, Size.of(-step)) if step < 0 else ceildiv(last - first, var.step))


def fixed_form(form: IndexForm, fixed: Mapping[LoopVar, Size]) -> IndexForm:
    """The linear function with numbers in place of some indices."""
    for var, factor in form.factors:
        if var in fixed:
            form = form.plus(AffineForm(((var, ONE),)), -factor).plus(AffineForm((), fixed[var] * factor))
    return form


def bound_by(var: LoopVar) -> frozenset[LoopVar]:
    """The indices that the range of an index is made of."""
    return frozenset(e.var for bound in (var.lo, var.hi) for e in walk_expr(bound) if isinstance(e, IndexRef))


# -- which elements iterations reach ------------------------------------------------------------------------------


Indices = tuple[IndexForm, ...]


def linear_indices(indices: Sequence[Expr]) -> Indices | None:
    """All indices as linear functions, or None when one is not."""
    forms = tuple(affine(i) for i in indices)
    return tuple(f for f in forms if f is not None) if None not in forms else None


def injective(indices: Indices, over: Collection[LoopVar]) -> bool:
    """Whether different values of the `over` indices always reach different elements, whatever other indices do."""
    missing = set(over)
    for index in indices:
        reached = set(index.values)
        if not reached & missing:
            continue
        if len(reached) == 1 or _mixed_radix(index):
            missing -= reached
    return not missing


def _mixed_radix(index: IndexForm) -> bool:
    """`i*cols + j` with `j < cols`, or `i + j` with i in steps of cols: the indices are digits of one number."""
    if len(index.factors) > 3:
        return False
    for order in permutations(index.factors):
        reach = ZERO  # the largest sum of the smaller digits
        for var, factor in order:
            span = _span(var)
            if span is None or not surely_positive(factor * var.step - reach):
                break
            reach = reach + factor * span
        else:
            return True
    return False


def _span(var: LoopVar) -> Size | None:
    """How far the values of an index lie apart at most."""
    if var.count is not None:
        return (var.count - 1) * var.step
    return var.high - var.low if var.high is not None and var.low is not None else None


def disjoint(a: Indices, b: Indices, fixed: Mapping[LoopVar, Size] | None = None) -> bool:
    """Whether two index tuples, each evaluated at any iteration, never meet: some axis keeps them apart. Indices around the iterations have
    the values `fixed` says, and are no part of the tuples."""
    for x, y in zip(a, b, strict=True):
        if fixed is not None and (_is_below(x, y, fixed) or _is_below(y, x, fixed)):
            return True
        if dict(x.factors) != dict(y.factors):
            continue
        reach = _reach(x)
        apart = x.constant - y.constant
        if reach is not None and (surely_positive(apart - reach) or surely_positive(-apart - reach)):
            return True
        gap = apart.constant
        factors = [f.constant for _, f in x.factors]
        if gap is None or None in factors:
            continue
        step = gcd(*(f for f in factors if f is not None)) if factors else 0
        if (gap % step if step else gap) != 0:
            return True
    return False


def apart_from(place: Indices, other: Indices) -> bool:
    """Whether an index tuple never meets `place`, whose indices stand still while those of the other move: one axis keeps them apart."""
    for x, y in zip(place, other, strict=True):
        gap = y.minus(x)
        high, low = _end(gap, upper=True), _end(gap, upper=False)
        if (high is not None and surely_positive(-high)) or (low is not None and surely_positive(low)):
            return True
    return False


def _is_below(x: IndexForm, y: IndexForm, fixed: Mapping[LoopVar, Size]) -> bool:
    """Whether the largest value of one index is below the smallest of another."""
    high, low = _end_under(x, fixed, upper=True), _end_under(y, fixed, upper=False)
    return high is not None and low is not None and surely_positive(low - high)


def _end_under(form: IndexForm, fixed: Mapping[LoopVar, Size], upper: bool) -> Size | None:
    """The largest, or the smallest, value of a linear function of indices whose ranges are sizes under `fixed`."""
    total = form.constant
    for var, factor in form.factors:
        reached, sign = range_under(var, fixed), sign_of(factor)
        if reached is None or sign is None or var.step.constant is None:
            return None
        first, count = reached
        # Where there are no values nothing is accessed, so that the end of one value and more serves.
        last = first + var.step * (_unclamped(count) - 1)
        ends = (first, last) if var.step.constant > 0 else (last, first)
        total = total + factor * ends[1 if (sign > 0) == upper else 0]
    return total


def _unclamped(count: Size) -> Size:
    """`n` of `max(n, 0)`: the number of values wherever there are any."""
    if len(count.terms) == 1 and count.terms[0][1] == 1 and len(count.terms[0][0]) == 1:
        atom = count.terms[0][0][0]
        if not isinstance(atom, str) and atom.op == "max" and ZERO in (atom.a, atom.b):
            return atom.b if atom.a == ZERO else atom.a
    return count


def _reach(index: IndexForm) -> Size | None:
    """How far the elements two iterations reach lie apart at most, along one axis."""
    total = ZERO
    for var, factor in index.factors:
        span = _span(var)
        if span is None:
            return None
        sign = sign_of(factor)
        if sign is None:
            return None
        total = total + factor * span * sign
    return total


def owns_axis(accesses: Sequence[Indices], var: LoopVar) -> bool:
    """Whether some axis of every access has the same index, made of `var` alone: each value of `var` has its own elements."""
    rank = len(accesses[0])
    for axis in range(rank):
        first = accesses[0][axis]
        if first.values == (var,) and all(a[axis] == first for a in accesses):
            return True
    return False
