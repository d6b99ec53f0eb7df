"""How a GPU holds what a scatter combines: numbers that have an atomic, and whose order does not count where that was asked for.

In: an array that a kernel combines into. Out: a form: which copies of the array there are, what a term becomes in each, and what the copies say in the end.

    Wide      elements narrower than 32 bits are combined in 32 bits and rounded once
    Ordered   least and greatest floats as integers in the same order, for which there are atomics: -0 is below 0, and NaN beyond all
    Fixed     sums of floats whose bits may not depend on the order: integers that count in units of the largest term of each element
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tilewright.base.dtypes import DType, compute_dtype, f32, f64, i32, i64, u32, u64
from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of

Number = int | float
_POSITIVE, _NEGATIVE, _NOT_A_NUMBER = 1, 2, 4
"""What `Fixed` notes of terms that are not finite."""


@record
class CopySpec:
    """One copy of the array: its dtype, how terms are combined in it, and what it begins with."""

    dtype: DType
    kind: str
    start: Number


class ScatterForm(Protocol):
    """What one array is combined in."""

    @property
    def copies(self) -> tuple[CopySpec, ...]:
        """The copies of the array."""

    @property
    def rounds(self) -> int:
        """How often the points are gone through."""

    def terms(self, b: Builder, value: Value, copies: Sequence[Value], counts: Value, number: int) -> list[tuple[int, Value, Value | None]]:
        """What a term adds in a round: the copy, the value, and a condition. `copies` are the elements that earlier rounds left; `counts` is
        the exponent of the number of terms."""

    def result(self, b: Builder, before: Value, copies: Sequence[Value], counts: Value) -> Value:
        """The element in the end, in the compute dtype of the array."""


@record
class Wide:
    copies: tuple[CopySpec, ...]
    rounds: int = 1

    def terms(self, b: Builder, value: Value, copies: Sequence[Value], counts: Value, number: int) -> list[tuple[int, Value, Value | None]]:
        return [(0, b.cast(value, self.copies[0].dtype), None)]

    def result(self, b: Builder, before: Value, copies: Sequence[Value], counts: Value) -> Value:
        wide = self.copies[0].dtype
        return b.cast(b.op(self.copies[0].kind, b.cast(before, wide), copies[0]), dtype_of(before.type))


def wide(kind: str, dtype: DType, start: Number) -> Wide:
    return Wide((CopySpec(dtype, kind, start),))


@record
class Ordered:
    """min and max of floats."""

    copies: tuple[CopySpec, ...]
    rounds: int = 1

    def terms(self, b: Builder, value: Value, copies: Sequence[Value], counts: Value, number: int) -> list[tuple[int, Value, Value | None]]:
        dtype = self.copies[0].dtype
        key = _flipped(b, b.bitcast(value, dtype))
        beyond = b.const(dtype.max_value if self.copies[0].kind == "max" else dtype.min_value, dtype)
        return [(0, b.select(b.op("isnan", value), beyond, key), None)]

    def result(self, b: Builder, before: Value, copies: Sequence[Value], counts: Value) -> Value:
        return b.op(self.copies[0].kind, before, b.bitcast(_flipped(b, copies[0]), dtype_of(before.type)))


def _flipped(b: Builder, bits: Value) -> Value:
    """Bits of a float as an integer that grows with it, and back: the other bits of negative ones are inverted."""
    dtype = dtype_of(bits.type)
    sign = b.op("shr", bits, b.const(dtype.bits - 1, dtype))
    return b.op("xor", bits, b.op("and", sign, b.const(dtype.max_value, dtype)))


def ordered(kind: str, dtype: DType) -> Ordered:
    """For elements that are computed in `dtype`, f32 or f64."""
    key = i64 if dtype is f64 else i32
    infinity = 0x7F800000 if dtype is f32 else 0x7FF0000000000000
    lowest = ~infinity  # the key of -inf
    return Ordered((CopySpec(key, kind, lowest if kind == "max" else infinity),))


@record
class Fixed:
    """Sums of floats. The first round finds the largest exponent of each element's terms, the second adds the terms up as integers in units that
    depend on it: sums of integers do not depend on their order. f64 takes two integers, of which the second holds what the first leaves."""

    copies: tuple[CopySpec, ...]
    dtype: DType
    rounds: int = 2

    @property
    def _bits(self) -> DType:
        return u64 if self.dtype is f64 else u32

    @property
    def _mantissa(self) -> int:
        return 52 if self.dtype is f64 else 23

    @property
    def _infinity(self) -> int:
        return (0x7FF if self.dtype is f64 else 0xFF) << self._mantissa

    def terms(self, b: Builder, value: Value, copies: Sequence[Value], counts: Value, number: int) -> list[tuple[int, Value, Value | None]]:
        bits = b.bitcast(value, self._bits)
        magnitude = b.op("and", bits, b.const((1 << (self._bits.bits - 1)) - 1, self._bits))
        infinity = b.const(self._infinity, self._bits)
        if number == 0:
            sign = b.select(b.op("eq", magnitude, bits), b.const(_POSITIVE, u32), b.const(_NEGATIVE, u32))
            odd = b.select(b.op("gt", magnitude, infinity), b.const(_NOT_A_NUMBER, u32), sign)
            return [(0, magnitude, b.op("lt", magnitude, infinity)), (1, odd, b.op("ge", magnitude, infinity))]
        finite = b.op("lt", magnitude, infinity)
        shift = self._shift(b, copies[0], counts)
        scaled = self._times(b, b.cast(value, f64), shift)
        whole = b.op("round", scaled)
        found: list[tuple[int, Value, Value | None]] = [(2, b.cast(whole, i64), finite)]
        if self.dtype is f64:
            rest = self._times(b, b.sub(scaled, whole), self._room(b, counts))
            found.append((3, b.cast(b.op("round", rest), i64), finite))
        return found

    def result(self, b: Builder, before: Value, copies: Sequence[Value], counts: Value) -> Value:
        shift = self._shift(b, copies[0], counts)
        total = b.cast(copies[2], f64)
        if self.dtype is f64:
            total = b.add(total, self._times(b, b.cast(copies[3], f64), b.op("neg", self._room(b, counts))))
        total = self._times(b, total, b.op("neg", shift))
        # An element that no term reached keeps its sign, a negative zero's too.
        total = b.select(b.op("eq", copies[0], b.const(0, self._bits)), b.const(-0.0, f64), total)
        infinity = b.const(float("inf"), f64)
        flags = copies[1]

        def has(flag: int) -> Value:
            return b.op("ne", b.op("and", flags, b.const(flag, u32)), b.const(0, u32))

        both = b.logical_and(has(_POSITIVE), has(_NEGATIVE))
        total = b.select(has(_POSITIVE), infinity, b.select(has(_NEGATIVE), b.op("neg", infinity), total))
        total = b.select(b.op("or", has(_NOT_A_NUMBER), both), b.const(float("nan"), f64), total)
        return b.cast(b.add(b.cast(before, f64), total), dtype_of(before.type))

    def _room(self, b: Builder, counts: Value) -> Value:
        """Bits of a term: so many that all terms together stay in 63."""
        return b.sub(b.index(61), counts)

    def _shift(self, b: Builder, largest: Value, counts: Value) -> Value:
        """The power of two that makes an element's largest term one of so many bits."""
        exponent = b.cast(b.op("shr", largest, b.const(self._mantissa, self._bits)), i64)
        bias = 1022 if self.dtype is f64 else 126
        return b.sub(b.add(self._room(b, counts), b.index(bias)), exponent)

    def _times(self, b: Builder, value: Value, power: Value) -> Value:
        """`value * 2^power`, in two steps, since one would leave the exponents of f64."""
        half = b.op("shr", power, b.index(1))
        for part in (half, b.sub(power, half)):
            bits = b.op("shl", b.add(part, b.index(1023)), b.index(52))
            value = b.mul(value, b.bitcast(bits, f64))
        return value


def fixed(dtype: DType) -> Fixed:
    """For elements that are computed in `dtype`, f32 or f64."""
    largest = CopySpec(u64 if dtype is f64 else u32, "max", 0)
    sums = (CopySpec(i64, "add", 0),) * (2 if dtype is f64 else 1)
    return Fixed((largest, CopySpec(u32, "or", 0), *sums), dtype)


def form_for(kind: str, dtype: DType, start: Number, deterministic: bool) -> ScatterForm | None:
    """The form of an array on a GPU; None where it is combined into itself. A product of floats in a certain order has none: `is_ordered` says so."""
    computed = compute_dtype(dtype)
    if dtype.is_float and kind in ("min", "max"):
        return ordered(kind, computed)
    if dtype.is_float and kind == "add" and deterministic:
        return fixed(computed)
    if dtype.is_float:
        return None if dtype is computed else wide(kind, computed, float(start))
    if dtype.bits >= 32:
        return None
    return wide(kind, i32 if dtype.kind == "i" else u32, int(start))


def depends_on_order(kind: str, dtype: DType) -> bool:
    """Whether no form makes the bits independent of the order."""
    return dtype.is_float and kind == "mul"
