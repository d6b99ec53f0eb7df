"""What can be proven about sizes and indices: signs, ranges, and when different iterations reach different elements.

Names of sizes stand for extents and are never negative. Every answer is safe: `False` or `None` means "not proven".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import permutations
from math import gcd

from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Call, Size, floordiv, maximum, minimum
from tilewright.tree.typed import Apply, Cast, Const, Expr, IndexRef, LoopVar, SizeValue


def surely_nonnegative(size: Size) -> bool:
    """Whether the size is at least 0 whatever its names are."""
    return _floor(size, 4) >= 0


def surely_positive(size: Size) -> bool:
    return surely_nonnegative(size - 1)


def surely_negative(size: Size) -> bool:
    return surely_nonnegative(-size - 1)


_UNKNOWN = -(1 << 62)


def _floor(size: Size, depth: int) -> int:
    """A lower bound of the size, `_UNKNOWN` when there is none."""
    total = 0
    for monomial, factor in size.terms:
        if not monomial:
            total += factor
        elif factor < 0 or not all(_call_nonnegative(a, depth) for a in monomial if isinstance(a, Call)):
            total = _UNKNOWN
            break
    if total != _UNKNOWN or not depth:
        return total
    # Trade one call for a bound of it and look at what the whole comes to then.
    for monomial, factor in size.terms:
        calls = [a for a in monomial if isinstance(a, Call)]
        if len(calls) != 1:
            continue
        others = tuple(a for a in monomial if a is not calls[0])
        rest = Size(tuple(t for t in size.terms if t != (monomial, factor)))
        for bound in _bounds(calls[0], factor):
            found = _floor(rest + Size(((others, 1),)) * bound, depth - 1)
            if found != _UNKNOWN:
                return found
    return _UNKNOWN


def _call_nonnegative(call: Call, depth: int) -> bool:
    if not depth:
        return False
    a, b = call.a, call.b
    if call.op == "max":
        return _floor(a, depth - 1) >= 0 or _floor(b, depth - 1) >= 0
    if call.op == "mod":
        return _floor(b, depth - 1) >= 0
    return _floor(a, depth - 1) >= 0 and _floor(b, depth - 1) >= 0


def _bounds(call: Call, factor: int) -> list[Size]:
    """Sizes that `factor * call` is surely not smaller than."""
    a, b = call.a, call.b
    divisor = b.constant
    if call.op == "min" and factor < 0:
        return [a * factor, b * factor]
    if call.op == "max" and factor > 0:
        return [a * factor, b * factor]
    if call.op == "mod" and factor < 0:
        return [maximum(b - 1, ZERO) * factor, b * factor]
    if call.op in ("floordiv", "ceildiv") and divisor and divisor > 0 and factor % divisor == 0:
        each = factor // divisor
        slack = divisor - 1
        if call.op == "floordiv":
            return [a * each if factor < 0 else (a - slack) * each]
        return [a * each if factor > 0 else (a + slack) * each]
    return []


def clamped(count: Size) -> Size:
    """The count, or 0 where it could be negative."""
    return count if surely_nonnegative(count) else maximum(count, ZERO)


# -- index expressions --------------------------------------------------------------------------------------------


@record
class Affine:
    """`offset + Σ factor * index`; factors are sizes, never zero."""

    offset: Size
    terms: tuple[tuple[LoopVar, Size], ...] = ()

    def factor(self, var: LoopVar) -> Size:
        return dict(self.terms).get(var, ZERO)

    def vars(self) -> frozenset[LoopVar]:
        return frozenset(v for v, _ in self.terms)

    @property
    def bare(self) -> LoopVar | None:
        """The index when the expression is just that index."""
        if self.offset == ZERO and len(self.terms) == 1 and self.terms[0][1] == ONE:
            return self.terms[0][0]
        return None


def _combine(a: Affine, b: Affine, sign: int) -> Affine:
    factors = dict(a.terms)
    for var, factor in b.terms:
        factors[var] = factors.get(var, ZERO) + factor * sign
    return Affine(a.offset + b.offset * sign, tuple((v, f) for v, f in factors.items() if f != ZERO))


def affine(expr: Expr) -> Affine | None:
    """The expression as a linear function of loop indices, or None."""
    if isinstance(expr, Const) and isinstance(expr.value, int):
        return Affine(Size.of(int(expr.value)))
    if isinstance(expr, SizeValue):
        return Affine(expr.size)
    if isinstance(expr, IndexRef):
        return Affine(ZERO, ((expr.var, ONE),))
    if isinstance(expr, Cast) and expr.dtype is expr.value.dtype:
        return affine(expr.value)
    if isinstance(expr, Apply) and expr.dtype.is_int:
        args = [affine(a) for a in expr.args]
        if expr.op in ("add", "sub") and args[0] is not None and args[1] is not None:
            return _combine(args[0], args[1], 1 if expr.op == "add" else -1)
        if expr.op == "neg" and args[0] is not None:
            return _combine(Affine(ZERO), args[0], -1)
        if expr.op == "mul" and args[0] is not None and args[1] is not None:
            number, linear = (args[0], args[1]) if not args[0].terms else (args[1], args[0])
            if not number.terms:
                scale = number.offset
                terms = tuple((v, f * scale) for v, f in linear.terms if f * scale != ZERO)
                return Affine(linear.offset * scale, terms)
    return None


Interval = tuple[Size, Size]


def interval(expr: Expr) -> Interval | None:
    """The smallest and the largest value of an index expression, where every index has a known range."""
    linear = affine(expr)
    if linear is not None:
        low = high = linear.offset
        for var, factor in linear.terms:
            if var.low is None or var.high is None:
                return None
            if surely_nonnegative(factor):
                low, high = low + factor * var.low, high + factor * var.high
            elif surely_nonnegative(-factor):
                low, high = low + factor * var.high, high + factor * var.low
            else:
                return None
        return low, high
    if isinstance(expr, Apply) and len(expr.args) == 2:
        a, b = interval(expr.args[0]), interval(expr.args[1])
        if expr.op == "mod" and b is not None and b[0] == b[1] and surely_nonnegative(b[0]):
            return ZERO, clamped(b[0] - 1)
        if a is None or b is None:
            return None
        if expr.op == "add":
            return a[0] + b[0], a[1] + b[1]
        if expr.op == "sub":
            return a[0] - b[1], a[1] - b[0]
        if expr.op == "mul" and b[0] == b[1] and surely_nonnegative(b[0]):
            return a[0] * b[0], a[1] * b[0]
        if expr.op == "floordiv" and b[0] == b[1] and surely_positive(b[0]):
            return floordiv(a[0], b[0]), floordiv(a[1], b[0])
        if expr.op == "min":
            return minimum(a[0], b[0]), minimum(a[1], b[1])
        if expr.op == "max":
            return maximum(a[0], b[0]), maximum(a[1], b[1])
    return None


# -- which elements iterations reach ------------------------------------------------------------------------------


Indices = tuple[Affine, ...]


def linear_indices(indices: Sequence[Expr]) -> Indices | None:
    """All indices as linear functions, or None when one is not."""
    found = tuple(affine(i) for i in indices)
    return tuple(f for f in found if f is not None) if None not in found else None


def injective(indices: Indices, over: Collection[LoopVar]) -> bool:
    """Whether different values of the `over` indices always reach different elements, whatever other indices do."""
    missing = set(over)
    for index in indices:
        reached = index.vars()
        if not reached & missing:
            continue
        if len(reached) == 1 or _mixed_radix(index):
            missing -= reached
    return not missing


def _mixed_radix(index: Affine) -> bool:
    """`i*cols + j` with `j < cols`, or `i + j` with i in steps of cols: the indices are digits of one number."""
    if len(index.terms) > 3:
        return False
    for order in permutations(index.terms):
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


def disjoint(a: Indices, b: Indices) -> bool:
    """Whether two index tuples, each evaluated at any iteration, never meet: some axis keeps them apart."""
    for x, y in zip(a, b, strict=True):
        if dict(x.terms) != dict(y.terms):
            continue
        reach = _reach(x)
        apart = x.offset - y.offset
        if reach is not None and (surely_positive(apart - reach) or surely_positive(-apart - reach)):
            return True
        gap = apart.constant
        factors = [f.constant for _, f in x.terms]
        if gap is None or None in factors:
            continue
        step = gcd(*(f for f in factors if f is not None)) if factors else 0
        if (gap % step if step else gap) != 0:
            return True
    return False


def _reach(index: Affine) -> Size | None:
    """How far the elements two iterations reach lie apart at most, along one axis."""
    total = ZERO
    for var, factor in index.terms:
        span = _span(var)
        if span is None:
            return None
        if surely_nonnegative(factor):
            total = total + factor * span
        elif surely_nonnegative(-factor):
            total = total - factor * span
        else:
            return None
    return total


def owns_axis(accesses: Sequence[Indices], var: LoopVar) -> bool:
    """Whether some axis of every access has the same index, made of `var` alone: each value of `var` has its own elements."""
    rank = len(accesses[0])
    for axis in range(rank):
        first = accesses[0][axis]
        if first.vars() == {var} and all(a[axis] == first for a in accesses):
            return True
    return False
