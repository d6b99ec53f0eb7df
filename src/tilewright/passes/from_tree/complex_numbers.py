"""Arithmetic of complex numbers as arithmetic of their parts: what `lower_body` builds for operands of complex dtypes.

In come pairs of IR values, out comes a pair, or one value for what is real. There are no complex numbers in the IR: an array of them is one of floats
with one more axis of extent 2, a variable is two.

A number that was real in the source has no imaginary part here. So `2 * z` multiplies two numbers, and an infinite part stays what it is. Products and quotients of
two complex numbers are those of NumPy. Division scales its operands by powers of two where they could leave the range of their dtype on the way (Baudin and Smith, 2012),
`abs` is `hypot`, `log` and `sqrt` scale likewise. Bounds: docs/numerics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tilewright.base.dtypes import DType, f32
from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import INDEX, dtype_of


@record
class Pair:
    """A complex number. `im` is None where it is a real one."""

    re: Value
    im: Value | None

    @property
    def dtype(self) -> DType:
        """Of its parts."""
        return dtype_of(self.re.type)


class ComplexMath:
    """Builds operations on pairs."""

    def __init__(self, builder: Builder, dtype: DType) -> None:
        """`dtype`: that of the parts."""
        self.builder = builder
        self.dtype = dtype
        limits = np.finfo(np.float32 if dtype is f32 else np.float64)
        self.largest, self.smallest, self.eps = float(limits.max), float(limits.smallest_normal), float(limits.eps)

    # -- parts --------------------------------------------------------------------------------------------------------

    def number(self, value: float) -> Value:
        return self.builder.const(value, self.dtype)

    def im(self, z: Pair) -> Value:
        """The imaginary part, 0 of a real number."""
        return self.number(0.0) if z.im is None else z.im

    def whole(self, z: Pair) -> Pair:
        return Pair(z.re, self.im(z))

    def _op(self, name: str, *operands: Value) -> Value:
        return self.builder.op(name, *operands)

    # -- operations by name -------------------------------------------------------------------------------------------

    def apply(self, op: str, args: Sequence[Pair]) -> Pair:
        """An operation whose result is complex."""
        if op == "add":
            return self.add(*args)
        if op == "sub":
            z, w = args
            im = z.im if w.im is None else self._op("neg", w.im) if z.im is None else self._op("sub", z.im, w.im)
            return Pair(self._op("sub", z.re, w.re), im)
        if op == "mul":
            return self.multiply(*args)
        if op == "div":
            return self.divide(*args)
        if op == "neg":
            return self.negate(args[0])
        if op == "conj":
            return Pair(args[0].re, None if args[0].im is None else self._op("neg", args[0].im))
        if op == "pow":
            return self.power(*args)
        return {"exp": self.exp, "log": self.log, "sqrt": self.sqrt}[op](self.whole(args[0]))

    def real(self, op: str, args: Sequence[Pair]) -> Value:
        """An operation whose result is a float or a truth."""
        z = args[0]
        if op == "real":
            return z.re
        if op == "imag":
            return self.im(z)
        if op == "abs":
            return self._op("abs", z.re) if z.im is None else self._op("hypot", z.re, z.im)
        if op in ("eq", "ne"):
            return self._op("and" if op == "eq" else "or", self._op(op, z.re, args[1].re), self._op(op, self.im(z), self.im(args[1])))
        if op == "isnan":
            return self._op("or", self._op("isnan", z.re), self._op("isnan", self.im(z)))
        inf = self.number(math.inf)
        sizes = [self._op("abs", part) for part in (z.re, self.im(z))]
        if op == "isinf":
            return self._op("or", *(self._op("eq", size, inf) for size in sizes))
        return self._op("and", *(self._op("lt", size, inf) for size in sizes))

    def select(self, cond: Value, z: Pair, w: Pair) -> Pair:
        im = None if z.im is None and w.im is None else self.builder.select(cond, self.im(z), self.im(w))
        return Pair(self.builder.select(cond, z.re, w.re), im)

    # -- arithmetic ---------------------------------------------------------------------------------------------------

    def add(self, z: Pair, w: Pair) -> Pair:
        im = z.im if w.im is None else w.im if z.im is None else self._op("add", z.im, w.im)
        return Pair(self._op("add", z.re, w.re), im)

    def negate(self, z: Pair) -> Pair:
        return Pair(self._op("neg", z.re), None if z.im is None else self._op("neg", z.im))

    def multiply(self, z: Pair, w: Pair) -> Pair:
        if z.im is None or w.im is None:
            scale, other = (z.re, w) if z.im is None else (w.re, z)
            return Pair(self._op("mul", scale, other.re), None if other.im is None else self._op("mul", scale, other.im))
        re = self._op("sub", self._op("mul", z.re, w.re), self._op("mul", z.im, w.im))
        return Pair(re, self._op("add", self._op("mul", z.re, w.im), self._op("mul", z.im, w.re)))

    def difference(self, first: Value, second: Value, first_minus: bool, second_minus: bool) -> Value:
        """The sum of two numbers, of which those marked are taken away."""
        if first_minus and second_minus:
            return self._op("neg", self._op("add", first, second))
        if first_minus:
            return self._op("sub", second, first)
        return self._op("sub" if second_minus else "add", first, second)

    def divide(self, z: Pair, w: Pair) -> Pair:
        """By Smith's method: the quotient of the divisor's parts, which is at most 1, takes the place of squares."""
        if w.im is None:
            return Pair(self._op("div", z.re, w.re), None if z.im is None else self._op("div", z.im, w.re))
        (a, b), _, back = self._scaled(z.re, self.im(z))
        (c, d), scale, _ = self._scaled(w.re, w.im)
        select, zero = self.builder.select, self.number(0.0)
        turned = self._op("lt", self._op("abs", c), self._op("abs", d))
        large, small = select(turned, d, c), select(turned, c, d)
        first, second = select(turned, b, a), select(turned, a, b)
        # By 0 both parts are divided, as NumPy does.
        nothing = self._op("and", self._op("eq", large, zero), self._op("eq", small, zero))
        ratio = self._op("div", small, large)
        below = select(nothing, self._op("abs", large), self._op("add", large, self._op("mul", small, ratio)))
        across = [select(nothing, zero, self._op("mul", part, ratio)) for part in (second, first)]
        re = self._op("div", self._op("add", first, across[0]), below)
        im = self._op("div", self._op("sub", second, across[1]), below)
        im = select(turned, self._op("neg", im), im)
        factor = self._op("mul", scale, back)
        return Pair(self._op("mul", re, factor), self._op("mul", im, factor))

    def _scaled(self, re: Value, im: Value) -> tuple[tuple[Value, Value], Value, Value]:
        """The parts times a power of two that brings them where a quotient neither overflows nor loses bits, that power, and its inverse."""
        size = self._op("max", self._op("abs", re), self._op("abs", im))
        large = self._op("ge", size, self.number(self.largest / 2))
        small = self._op("le", size, self.number(2 * self.smallest / self.eps))
        up = 2 / self.eps**2

        def chosen(when_large: float, when_small: float) -> Value:
            return self.builder.select(large, self.number(when_large), self.builder.select(small, self.number(when_small), self.number(1.0)))

        scale = chosen(0.5, up)
        return (self._op("mul", re, scale), self._op("mul", im, scale)), scale, chosen(2.0, 1 / up)

    # -- functions ----------------------------------------------------------------------------------------------------

    def exp(self, z: Pair) -> Pair:
        """`exp(x) * (cos(y), sin(y))`. Where `exp(x)` alone would overflow, some of x is taken out, up to twice, and multiplied last."""
        select, x, y = self.builder.select, z.re, self.im(z)
        step = 64.0 if self.dtype is f32 else 512.0
        lasts: list[Value] = []
        rest = x
        for _ in range(2):
            far = self._op("gt", rest, self.number(step))
            rest = select(far, self._op("sub", rest, self.number(step)), rest)
            lasts.append(select(far, self.number(math.exp(step)), self.number(1.0)))
        size = self._op("exp", rest)
        parts = [self._op("mul", size, self._op(name, y)) for name in ("cos", "sin")]
        for last in lasts:
            parts = [self._op("mul", part, last) for part in parts]
        re, im = parts
        # At infinities the limit: no NaN from 0 * inf.
        zero, inf = self.number(0.0), self.number(math.inf)
        turning = self._op("not", self._op("lt", self._op("abs", y), inf))
        gone = self._op("and", self._op("eq", x, self.number(-math.inf)), turning)
        endless = self._op("and", self._op("eq", x, inf), turning)
        re = select(gone, zero, select(endless, inf, re))
        im = select(gone, zero, select(self._op("eq", y, zero), y, im))
        return Pair(re, im)

    def log(self, z: Pair) -> Pair:
        """`(log(abs(z)), atan2(y, x))`; near the circle of radius 1 the first by `log1p` of what its square is above 1."""
        select, x, y = self.builder.select, z.re, self.im(z)
        one, half = self.number(1.0), self.number(0.5)
        a, b = self._op("abs", x), self._op("abs", y)
        m, n = self._op("max", a, b), self._op("min", a, b)
        large = self._op("gt", m, self.number(self.largest / 4))
        small = self._op("lt", m, self.number(self.smallest / self.eps))
        scale = select(large, self.number(0.25), select(small, self.number(2.0**64), one))
        shift = select(large, self.number(2 * math.log(2)), select(small, self.number(-64 * math.log(2)), self.number(0.0)))
        size = self._op("hypot", self._op("mul", x, scale), self._op("mul", y, scale))
        far = self._op("add", self._op("log", size), shift)
        above = self._op("add", self._op("mul", self._op("sub", m, one), self._op("add", m, one)), self._op("mul", n, n))
        close = self._op("and", self._op("gt", m, half), self._op("lt", m, self.number(2.0)))
        near = self._op("mul", half, self._op("log1p", select(close, above, one)))
        return Pair(select(close, near, far), self._op("atan2", y, x))

    def sqrt(self, z: Pair) -> Pair:
        """The root with a real part that is not negative; its imaginary part has the sign of y."""
        select = self.builder.select
        y = self.im(z)
        size = self._op("max", self._op("abs", z.re), self._op("abs", y))
        large = self._op("gt", size, self.number(self.largest / 8))
        small = self._op("lt", size, self.number(4 * self.smallest / self.eps))
        bits = 24 if self.dtype is f32 else 54
        scale = select(large, self.number(1 / 16), select(small, self.number(4.0**bits), self.number(1.0)))
        back = select(large, self.number(4.0), select(small, self.number(2.0**-bits), self.number(1.0)))
        u, v = self._op("mul", z.re, scale), self._op("mul", y, scale)
        total = self._op("add", self._op("hypot", u, v), self._op("abs", u))
        root = self._op("sqrt", self._op("mul", self.number(0.5), total))
        other = self._op("div", v, self._op("add", root, root))
        ahead = self._op("ge", u, self.number(0.0))
        re = self._op("mul", select(ahead, root, self._op("abs", other)), back)
        im = self._op("mul", select(ahead, other, self._op("copysign", root, v)), back)
        nothing = self._op("eq", size, self.number(0.0))
        endless = self._op("eq", self._op("abs", y), self.number(math.inf))
        re = select(endless, self.number(math.inf), select(nothing, self.number(0.0), re))
        return Pair(re, select(self._op("or", endless, nothing), y, im))

    def power(self, z: Pair, w: Pair) -> Pair:
        """`exp(w * log(z))`; of 0 what NumPy says: 1 to the power of 0, 0 to those that are positive, else NaN."""
        select, zero, nan = self.builder.select, self.number(0.0), self.number(math.nan)
        found = self.whole(self.exp(self.whole(self.multiply(self.log(self.whole(z)), w))))
        none = self._op("and", self._op("eq", z.re, zero), self._op("eq", self.im(z), zero))
        unit = self._op("and", self._op("eq", w.re, zero), self._op("eq", self.im(w), zero))
        falls = self._op("and", self._op("gt", w.re, zero), self._op("eq", self.im(w), zero))
        of_zero = select(falls, zero, nan)
        re = select(unit, self.number(1.0), select(none, of_zero, found.re))
        return Pair(re, select(unit, zero, select(none, of_zero, self.im(found))))


def matrix_products(builder: Builder, value: Value) -> list[tuple[bool, Value]]:
    """The two products that a part of a product of complex matrices is made of, and whether each is taken away. None where `value` is something else."""
    made = {op.results[0]: op for op in builder.ops if len(op.results) == 1}
    both = made.get(value)
    if both is None or both.opcode not in ("add", "sub") or not all(v in made and made[v].opcode == "mul" for v in both.operands):
        return []
    found = []
    for number, product in enumerate(both.operands):
        minus = bool(number) and both.opcode == "sub"
        factors = []
        for factor in made[product].operands:
            negated = factor in made and made[factor].opcode == "neg"  # of a conjugate: the sum is negated in its place
            minus ^= negated
            factors.append(made[factor].operands[0] if negated else factor)
        left, right = (_places(made, factor) for factor in factors)
        if left <= right or right <= left:
            return []
        found.append((minus, builder.op("mul", *factors)))
    return found


def _places(made: Mapping[Value, Op], value: Value) -> set[Value]:
    """The indices that a value depends on."""
    waiting, seen = [value], set[Value]()
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting += made[one].operands if one in made else ()
    return {one for one in seen if one not in made and one.type == INDEX}
