"""Values of a group of neighbouring threads that run as the lanes of a SIMD register, and arithmetic on them.

A value of the threads' code is, for a group, one of three things:

    Uniform(v)          the scalar v in every lane
    Linear(base, step)  base + lane * step for a constant step: an index along memory; only the base is computed
    Varying(v)          a vec

`Arithmetic` computes pure ops on these, as scalars where it can. Sums and products by constants of linear values stay linear; so do
quotients and remainders where the group lies within one period, as thread coordinates of a block do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from tilewright.base.dtypes import DType, bool_, i64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import dtype_of


@dataclass(frozen=True)
class Uniform:
    value: Value


@dataclass(frozen=True)
class Linear:
    base: Value
    step: int
    multiple: int = 1
    """Divides the base."""
    low: int | None = None
    high: int | None = None
    """Between which all lanes are, where that is known; a linear value with bounds never wraps."""
    parts: tuple[Value, Value, int] | None = None
    """The base as the sum of a multiple of a span and a rest, of which all lanes are below the span."""


@dataclass(frozen=True)
class Varying:
    value: Value


Lanes = Uniform | Linear | Varying


def same_kind(a: Lanes, b: Lanes) -> bool:
    if isinstance(a, Linear) and isinstance(b, Linear):
        return a.step == b.step
    return type(a) is type(b)


def step_between(b: Builder, lanes: Linear) -> Value:
    """What lies between two lanes, in their dtype, where it may wrap."""
    dtype = dtype_of(lanes.base.type)
    bits = 1 << dtype.bits
    step = lanes.step % bits
    return b.const(step - bits if dtype.kind == "i" and step >= bits // 2 else step, dtype)


class Arithmetic:
    """Pure ops on the lanes of one group; ops are appended to `b`."""

    def __init__(self, builder: Builder, width: int) -> None:
        self.b = builder
        self.width = width
        self.constants: dict[Value, int] = {}
        """Integers among the scalars that were built."""
        self.multiples: dict[Value, int] = {}
        """What divides other scalars."""

    # -- forms ---------------------------------------------------------------------------------------------------

    def vec(self, lanes: Lanes) -> Value:
        """The lanes as a vec."""
        if isinstance(lanes, Varying):
            return lanes.value
        if isinstance(lanes, Uniform):
            return self.b.op("broadcast", lanes.value, width=self.width)
        dtype = dtype_of(lanes.base.type)
        ids = self.b.op("lane_ids", width=self.width, dtype=dtype)
        if lanes.step != 1:
            ids = self.b.mul(ids, self.b.op("broadcast", step_between(self.b, lanes), width=self.width))
        return self.b.add(self.b.op("broadcast", lanes.base, width=self.width), ids)

    def index(self, lanes: Lanes) -> Lanes:
        """An integer as an i64."""
        return self.cast(lanes, i64)

    def truth(self) -> Value:
        """The mask with every lane set."""
        return self.b.op("broadcast", self.b.const(True, bool_), width=self.width)

    def constant(self, lanes: Lanes) -> int | None:
        return self.constants.get(lanes.value) if isinstance(lanes, Uniform) else None

    def divisor(self, scalar: Value) -> int:
        """A number that divides the scalar."""
        known = self.constants.get(scalar)
        return self.multiples.get(scalar, 1) if known is None else abs(known)

    def number(self, value: int) -> Uniform:
        """An index that is the same constant in all lanes."""
        scalar = self.b.index(value)
        self.constants[scalar] = value
        return Uniform(scalar)

    # -- ops -----------------------------------------------------------------------------------------------------

    def pure(self, op: Op, operands: Sequence[Lanes]) -> Lanes:
        """The result of an elementwise op."""
        scalars = [o.value for o in operands if isinstance(o, Uniform)]
        if len(scalars) == len(operands):
            (result,) = self.b.emit(op.opcode, scalars, op.attrs)
            value = op.attrs.get("value")
            if op.opcode == "const" and type(value) is int:
                self.constants[result] = value
            elif op.opcode in ("add", "sub", "mul") and dtype_of(result.type).is_int:
                a, b = (self.divisor(v) for v in scalars)
                self.multiples[result] = a * b if op.opcode == "mul" else gcd(a, b)
            return Uniform(result)
        rule = _RULES.get(op.opcode)
        found = rule(self, op, operands) if rule is not None else None
        if found is not None:
            return found
        if op.opcode == "select" and isinstance(operands[0], Uniform):
            (result,) = self.b.emit("select", [operands[0].value, self.vec(operands[1]), self.vec(operands[2])], op.attrs)
            return Varying(result)
        (result,) = self.b.emit(op.opcode, [self.vec(o) for o in operands], op.attrs)
        return Varying(result)

    def cast(self, lanes: Lanes, dtype: DType) -> Lanes:
        source = lanes.base if isinstance(lanes, Linear) else lanes.value
        return lanes if dtype_of(source.type) is dtype else self.pure(Op("cast", attrs={"dtype": dtype}), [lanes])


def _shifted(a: Linear, base: Value, step: int, multiple: int, change: int | None) -> Lanes:
    if step == 0:
        return Uniform(base)
    bounded = change is not None and a.low is not None and a.high is not None
    low, high = (a.low + change, a.high + change) if bounded else (None, None)  # type: ignore[operator]
    limits = dtype_of(base.type)
    if low is not None and high is not None and (low < limits.min_value or high > limits.max_value):
        low = high = None
    return Linear(base, step, multiple, low, high)


def _add(m: Arithmetic, op: Op, operands: Sequence[Lanes]) -> Lanes | None:
    a, b = operands
    if isinstance(b, Linear) and isinstance(a, Uniform):
        a, b = b, a
    if not isinstance(a, Linear):
        return None
    if isinstance(b, Uniform):
        known = m.constant(b)
        multiple = gcd(a.multiple, m.divisor(b.value))
        return _shifted(a, m.b.add(a.base, b.value), a.step, multiple, known)
    if isinstance(b, Linear):
        return _shifted(a, m.b.add(a.base, b.base), a.step + b.step, gcd(a.multiple, b.multiple), None)
    return None


def _sub(m: Arithmetic, op: Op, operands: Sequence[Lanes]) -> Lanes | None:
    a, b = operands
    if isinstance(a, Linear) and isinstance(b, Uniform):
        known = m.constant(b)
        multiple = gcd(a.multiple, m.divisor(b.value))
        return _shifted(a, m.b.sub(a.base, b.value), a.step, multiple, -known if known is not None else None)
    if isinstance(a, Linear) and isinstance(b, Linear):
        return _shifted(a, m.b.sub(a.base, b.base), a.step - b.step, gcd(a.multiple, b.multiple), None)
    if isinstance(a, Uniform) and isinstance(b, Linear):
        return Linear(m.b.sub(a.value, b.base), -b.step)
    return None


def _mul(m: Arithmetic, op: Op, operands: Sequence[Lanes]) -> Lanes | None:
    a, b = operands
    if isinstance(b, Linear):
        a, b = b, a
    if not isinstance(a, Linear) or not isinstance(b, Uniform):
        return None
    factor = m.constant(b)
    if factor is None:
        return None
    if factor == 0:
        return b
    return _scaled(m, a, m.b.mul(a.base, b.value), factor)


def _shl(m: Arithmetic, op: Op, operands: Sequence[Lanes]) -> Lanes | None:
    a, b = operands
    count = m.constant(b)
    if not isinstance(a, Linear) or count is None or not isinstance(b, Uniform):
        return None
    return _scaled(m, a, m.b.op("shl", a.base, b.value), 1 << (count % dtype_of(a.base.type).bits))


def _scaled(m: Arithmetic, a: Linear, base: Value, factor: int) -> Lanes:
    low = high = None
    limits = dtype_of(base.type)
    if a.low is not None and a.high is not None:
        low, high = sorted((a.low * factor, a.high * factor))
        if low < limits.min_value or high > limits.max_value:
            low = high = None
    return Linear(base, a.step * factor, a.multiple * abs(factor), low, high)


def _neg(m: Arithmetic, op: Op, operands: Sequence[Lanes]) -> Lanes | None:
    (a,) = operands
    if not isinstance(a, Linear) or dtype_of(a.base.type).kind != "i":
        return None
    return _scaled(m, a, m.b.op("neg", a.base), -1)


def _cast(m: Arithmetic, op: Op, operands: Sequence[Lanes]) -> Lanes | None:
    (a,) = operands
    if not isinstance(a, Linear):
        return None
    before, after = dtype_of(a.base.type), op.attrs["dtype"]
    assert isinstance(after, DType)
    if not after.is_int:
        return None
    fits = a.low is not None and a.high is not None and a.low >= after.min_value and a.high <= after.max_value
    if after.bits > before.bits and not fits:
        return None  # lanes that wrap in the narrow dtype are not linear in the wide one
    (base,) = m.b.emit("cast", [a.base], op.attrs)
    return Linear(base, a.step, a.multiple, a.low if fits else None, a.high if fits else None)


def _within(m: Arithmetic, a: Lanes, period: int | None) -> Linear | None:
    """The linear value if all its lanes lie within one period, whatever its base. Narrow numbers may have wrapped."""
    if not isinstance(a, Linear) or period is None or period <= 0 or a.step < 0:
        return None
    if a.low is None and dtype_of(a.base.type) is not i64:
        return None
    reach = (m.width - 1) * a.step + 1
    common = gcd(a.multiple, period)
    return a if reach <= common else None


def _remainder(m: Arithmetic, a: Lanes, period: int | None, base: Value | None) -> Lanes | None:
    if isinstance(a, Linear) and a.parts is not None and period == a.parts[2]:
        return Linear(a.parts[1], a.step, gcd(a.multiple, period), 0, period - 1)
    within = _within(m, a, period)
    if within is None or period is None:
        return None
    base = base or m.b.op("mod", within.base, m.b.const(period, dtype_of(within.base.type)))
    return Linear(base, within.step, gcd(within.multiple, period), 0, period - 1)


def _mod(m: Arithmetic, op: Op, operands: Sequence[Lanes]) -> Lanes | None:
    return _remainder(m, operands[0], m.constant(operands[1]), None)


def _and(m: Arithmetic, op: Op, operands: Sequence[Lanes]) -> Lanes | None:
    a, b = operands
    if isinstance(b, Linear):
        a, b = b, a
    mask = m.constant(b)
    if mask is None or mask < 0 or mask & (mask + 1):
        return None
    return _remainder(m, a, mask + 1, None)


def _floordiv(m: Arithmetic, op: Op, operands: Sequence[Lanes]) -> Lanes | None:
    within = _within(m, operands[0], m.constant(operands[1]))
    if within is None or not isinstance(operands[1], Uniform):
        return None
    base = within.base
    if within.parts is not None and m.constants[operands[1].value] % within.parts[2] == 0:
        base = within.parts[0]  # the rest makes no difference
    return Uniform(m.b.op("floordiv", base, operands[1].value))


def _shr(m: Arithmetic, op: Op, operands: Sequence[Lanes]) -> Lanes | None:
    a, b = operands
    count = m.constant(b)
    if not isinstance(a, Linear) or count is None or not isinstance(b, Uniform):
        return None
    within = _within(m, a, 1 << (count % dtype_of(a.base.type).bits))
    return Uniform(m.b.op("shr", within.base, b.value)) if within is not None else None


def _select(m: Arithmetic, op: Op, operands: Sequence[Lanes]) -> Lanes | None:
    condition, a, b = operands
    if isinstance(condition, Uniform) and isinstance(a, Linear) and isinstance(b, Linear) and a.step == b.step:
        return Linear(m.b.select(condition.value, a.base, b.base), a.step)
    return None


_RULES = {
    "add": _add, "sub": _sub, "mul": _mul, "shl": _shl, "neg": _neg, "cast": _cast, "mod": _mod, "and": _and, "floordiv": _floordiv,
    "shr": _shr, "select": _select,
}  # fmt: skip
