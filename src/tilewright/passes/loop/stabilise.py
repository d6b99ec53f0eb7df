"""Forms that lose fewer bits, or none and time: algebra that is exact on paper and no worse in floating point.

In: a loop-stage kernel. Out: the same, with `1 + tanh(u)` as `2 * sigmoid(2u)`: near -1 the sum cancels all but a few bits of tanh,
the sigmoid keeps them, and costs no more. GELU in its tanh form is where this counts. Powers of two among factors, which round
nothing, are gathered into constants or cancelled. A short odd polynomial has its x taken out, so that constants it is multiplied by
become part of its own. Sits before contraction, which would hide the sum in an fma.

    %t = tanh %u;  %s = add 1.0, %t         ->  %s = mul 2.0, sigmoid (mul 2.0, %u)
    %p = mul (mul %x, 0.5), (mul %y, 2.0)   ->  %p = mul %x, %y
    %p = mul (add %x, c x x x), k           ->  %p = mul %x, (add k, (mul ck, (mul %x, %x)))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tilewright.base.dtypes import f32, f64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.rewrite import eliminate_dead, rewrite
from tilewright.ir.types import Scalar, dtype_of


def stabilise(kernel: Kernel) -> Kernel:
    ones = {op.results[0] for op in walk(kernel.body) if op.opcode == "const" and op.attrs["value"] == 1.0}
    tangents = {op.results[0]: op for op in walk(kernel.body) if op.opcode == "tanh"}

    def better(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode != "add":
            return None
        tangent = next((tangents[v] for v in op.operands if v in tangents), None)
        if tangent is None or not any(v in ones for v in op.operands):
            return None
        twice = b.mul(tangent.operands[0], b.splat(2.0, tangent.operands[0]))
        (half,) = b.emit("sigmoid", [twice], tangent.attrs)
        return [b.mul(half, b.splat(2.0, half))]

    if not tangents:
        return kernel
    return eliminate_dead(_gather(_polynomials(eliminate_dead(rewrite(kernel, better)))))


def _constant(made: Mapping[Value, Op], value: Value) -> float | None:
    op = made.get(value)
    number = op.attrs["value"] if op is not None and op.opcode == "const" else None
    return float(number) if isinstance(number, int | float) else None


def _polynomials(kernel: Kernel) -> Kernel:
    """x + c x^3 as x (1 + c x^2), and constants that multiply it as part of its own: one rounding less, and one multiplication."""
    made: dict[Value, Op] = {}
    cubes: dict[Value, tuple[Value, float, float]] = {}
    """Values k x + c x^3: x, k and c."""

    def leaves(value: Value) -> list[Value]:
        op = made.get(value)
        return [v for o in op.operands for v in leaves(o)] if op is not None and op.opcode == "mul" else [value]

    def cube(op: Op) -> tuple[Value, float, float] | None:
        for x, product in (op.operands, op.operands[::-1]):
            factors = leaves(product) if op.opcode == "add" else []
            constants = [c for c in (_constant(made, v) for v in factors) if c is not None]
            if len(constants) == 1 and len(factors) == 4 and factors.count(x) == 3:
                return x, 1.0, constants[0]
            number = _constant(made, product) if op.opcode == "mul" else None
            if number is not None and x in cubes:
                base, k, c = cubes[x]
                return base, k * number, c * number
        return None

    def factor(b: Builder, op: Op) -> Sequence[Value] | None:
        for result in op.results:
            made[result] = op
        if op.opcode not in ("add", "mul") or not isinstance(op.results[0].type, Scalar) or dtype_of(op.results[0].type) not in (f32, f64):
            return None
        found = cube(op)
        if found is None or not all(math.isfinite(c) for c in found[1:]):
            return None
        x, k, c = found
        inner = b.add(b.splat(k, x), b.mul(b.splat(c, x), b.mul(x, x)))
        result = b.mul(x, inner)
        cubes[result] = found
        return [result]

    return rewrite(kernel, factor)


def _gather(kernel: Kernel) -> Kernel:
    """Powers of two that multiply a product are multiplied into its constant, or cancel."""
    made: dict[Value, Op] = {}

    def constant(value: Value) -> float | None:
        return _constant(made, value)

    def scaled(value: Value) -> tuple[Value, float] | None:
        """A value times a constant."""
        op = made.get(value)
        if op is None or op.opcode != "mul":
            return None
        for x, c in (op.operands, reversed(op.operands)):
            number = constant(c)
            if number is not None:
                return x, number
        return None

    def gather(b: Builder, op: Op) -> Sequence[Value] | None:
        for result in op.results:
            made[result] = op
        if op.opcode != "mul" or not isinstance(op.results[0].type, Scalar) or not dtype_of(op.results[0].type).is_float:
            return None
        left, right = (scaled(v) for v in op.operands)
        if left is not None and right is not None and _is_power(left[1]) and left[1] * right[1] == 1.0:
            return [b.mul(left[0], right[0])]
        outer = scaled(op.results[0])
        inner = scaled(outer[0]) if outer is not None else None
        if outer is not None and inner is not None and _is_power(outer[1]) and math.isfinite(inner[1] * outer[1]):
            return [b.mul(inner[0], b.splat(inner[1] * outer[1], inner[0]))]
        return None

    return rewrite(kernel, gather)


def _is_power(number: float) -> bool:
    """Whether it is a power of two near 1, by which nothing but the exponent changes."""
    return number > 0 and math.frexp(number)[0] == 0.5 and 2.0**-8 <= number <= 2.0**8
