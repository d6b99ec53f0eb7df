"""Pass: math functions become arithmetic.

    %y = exp %x   ->   %n = fma %x, %log2_e, %magic; … %y = mul %p, %scale

In: any kernel. Out: the same kernel with no op of the group `function` left but `exp2_approx` and the like, and no `floordiv` or `mod` of
floats. What is left every code generator has as an instruction. Results stay inside the bound of the op table on the whole
range; `docs/numerics.md` has the measured errors.

Runs late, just before code generation: earlier passes fuse, hoist and share whole functions, not their pieces. Expansions are
branch-free, so vec and tile values need no masks; but for the rare huge argument of a sine: of a scalar on a GPU, of any element of a vec on a CPU.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from tilewright.base.dtypes import DType, bf16, f32, f64
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Stage, Value
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import Tile, Vec, dtype_of
from tilewright.passes.late.known_ranges import is_at_least, is_not_positive
from tilewright.passes.late.math_terms import Terms

Branches = dict[tuple[Builder, Value], tuple[Value, ...]]
"""What is written in branches, by block and argument."""


def expand_math(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with every function op expanded."""
    hardware = target.has("approx") and kernel.stage is Stage.THREAD
    scales = has_ldexp(target) and kernel.stage is Stage.THREAD
    plain = has_no_f64(target)
    made: dict[Value, Op] = {}
    branches: Branches | None = {} if target.kind == "cpu" and kernel.stage is Stage.THREAD else None

    def replacement(builder: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode not in EXPANDED:
            made.update((result, op) for result in op.results)
            return None
        narrow = op.attrs.get("narrow")
        if hardware and isinstance(narrow, DType):
            quick = _expand_narrow(builder, op.opcode, op.operands[0], narrow, made)
            if quick is not None:
                return (quick,)
        value = _expand(builder, op.opcode, op.operands, hardware, scales, plain, branches, made)
        if value is None:
            return None
        made[value] = op
        return (value,)

    return rewrite(kernel, replacement)


def expand(builder: Builder, opcode: str, operands: Sequence[Value], target: Target) -> Value | None:
    """Append the arithmetic for one op and give its result; None for ops that need no expansion."""
    if opcode not in EXPANDED:
        return None
    tile = isinstance(operands[0].type, Tile)
    return _expand(builder, opcode, operands, target.has("approx") and not tile, has_ldexp(target) and not tile, has_no_f64(target))


def has_no_f64(target: Target) -> bool:
    """Whether f32 is all there is to compute in."""
    return "f64" in target.missing_dtypes


def has_ldexp(target: Target) -> bool:
    """Whether a CPU multiplies by powers of two in one instruction: AVX-512 does."""
    return target.kind == "cpu" and target.name.startswith("x86-64") and target.vector_bytes == 64


def _expand(
    builder: Builder, opcode: str, operands: Sequence[Value], hardware: bool, scales: bool, plain: bool = False, branches: Branches | None = None,
    made: Mapping[Value, Op] = MappingProxyType({}),
) -> Value | None:  # fmt: skip
    first = operands[0]
    dtype = dtype_of(first.type)
    if not dtype.is_float:
        return None
    if dtype.is_small_float:
        wide = [builder.cast(o, f32) if dtype_of(o.type) is dtype else o for o in operands]
        if opcode == "nextafter":
            from tilewright.passes.late.functions import numbers

            return builder.cast(numbers.nextafter_narrow(Terms(builder, wide[0]), wide[0], wide[1], dtype), dtype)
        result = _expand(builder, opcode, wide, hardware, scales, plain, branches)
        assert result is not None
        return builder.cast(result, dtype) if dtype_of(result.type) is f32 else result
    if (hardware or plain) and isinstance(first.type, Vec) and opcode in _BRANCHING:
        lanes = range(first.type.width)
        scalars = [[builder.op("extract", o, lane=lane) for o in operands] for lane in lanes]
        results = [EXPANDED[opcode](Terms(builder, s[0], hardware, plain=plain), *s) for s in scalars]
        return builder.op("pack", *results)
    t = Terms(builder, first, hardware, scales, plain, branches)
    known = (opcode == "log" and is_at_least(first, 1.0, made)) or (opcode == "exp" and is_not_positive(first, made))
    return EXPANDED[opcode](t, *operands, True) if known else EXPANDED[opcode](t, *operands)


def _expand_narrow(builder: Builder, opcode: str, x: Value, narrow: DType, made: Mapping[Value, Op]) -> Value | None:
    """A GPU's own instructions, where fewer bits than f32's count. None where they would not do. `made`: the ops before."""
    t = Terms(builder, x, hardware=True)
    if dtype_of(x.type) is not f32:
        return None
    if opcode == "exp":
        return t.op("exp2_approx", _times(t, made, x, math.log2(math.e)))
    if opcode == "exp2":
        return t.op("exp2_approx", x)
    if opcode == "sigmoid":
        return t.op("rcp_approx", t.add(t.op("exp2_approx", _times(t, made, x, -math.log2(math.e))), 1.0))
    if opcode == "tanh" and narrow.mantissa <= bf16.mantissa:
        return t.op("tanh_approx", x)
    return None


def _times(t: Terms, made: Mapping[Value, Op], x: Value, factor: float) -> Value:
    """x times a constant. Where x is a constant times something the two are one constant: a rounding less, and an instruction."""
    scaled = _scaled(t, made, x, factor)
    return t.mul(x, factor) if scaled is None else scaled


def _scaled(t: Terms, made: Mapping[Value, Op], x: Value, factor: float) -> Value | None:
    op = made.get(x)
    if op is None:
        return None
    if op.opcode == "broadcast":
        return _scaled(t, made, op.operands[0], factor)
    if op.opcode == "const" and isinstance(op.attrs["value"], float):
        number = op.attrs["value"] * factor
        return t.number(number, f32) if 2.0**-100 < abs(number) < 2.0**100 else None
    if op.opcode == "mul":
        for a, b in (op.operands, op.operands[::-1]):
            other = _scaled(t, made, b, factor)
            if other is not None:
                return t.mul(a, other)
    if op.opcode == "fma":
        a, b, c = op.operands
        last = _scaled(t, made, c, factor)
        for first, second in ((a, b), (b, a)):
            other = _scaled(t, made, second, factor) if last is not None else None
            if last is not None and other is not None:
                return t.fma(first, other, last)
    return None


# -- small ones -----------------------------------------------------------------------------------------------------


def _rsqrt(t: Terms, x: Value) -> Value:
    return t.div(1.0, t.op("sqrt", x))


def _floordiv(t: Terms, a: Value, b: Value) -> Value:
    """The floor of the exact quotient. Where rounding pushed a/b up to an integer the remainder has the wrong sign."""
    if dtype_of(a.type) is f32 and not t.plain:
        return t.cast(_floordiv(Terms(t.builder, t.like), t.cast(a, f64), t.cast(b, f64)), f32)
    quotient = t.div(a, b)
    whole = t.op("floor", quotient)
    rest = t.fma(t.neg(whole), b, a)
    rest = t.select(t.eq(t.abs(b), math.inf), a, rest)
    wrong = t.bit_and(t.ne(rest, 0.0), t.ne(t.lt(rest, 0.0), t.lt(b, 0.0)))
    wrong = t.bit_and(wrong, t.bit_and(t.eq(rest, rest), t.lt(t.abs(whole), 2.0**53 if dtype_of(a.type) is f64 else 2.0**24)))
    result = t.select(wrong, t.sub(whole, 1.0), whole)
    result = t.select(t.eq(t.abs(a), math.inf), math.nan, result)  # as NumPy and Python have it
    return t.select(t.eq(b, 0.0), quotient, result)


_MOD_STEPS = 6
"""Enough for any two f32; in f64 a quotient from 2^300 on may give NaN, in f32 where there is no f64 one from 2^120 on."""


def _mod(t: Terms, a: Value, b: Value) -> Value:
    """The exact remainder, with the sign of b."""
    if dtype_of(a.type) is f32 and not t.plain:
        return t.cast(_mod(Terms(t.builder, t.like), t.cast(a, f64), t.cast(b, f64)), f32)
    rest = _remainder(t, a, b)
    wrong = t.bit_and(t.ne(rest, 0.0), t.ne(t.lt(rest, 0.0), t.lt(b, 0.0)))
    result = t.select(wrong, t.add(rest, b), rest)
    return t.select(t.eq(rest, 0.0), t.with_sign_of(t.number(0.0, dtype_of(b.type)), b), result)


def _fmod(t: Terms, a: Value, b: Value) -> Value:
    """The exact remainder, with the sign of a."""
    if dtype_of(a.type) is f32 and not t.plain:
        return t.cast(_fmod(Terms(t.builder, t.like), t.cast(a, f64), t.cast(b, f64)), f32)
    size = t.abs(b)
    rest = _remainder(t, t.abs(a), size)
    rest = t.select(t.lt(rest, 0.0), t.add(rest, size), rest)
    return t.with_sign_of(t.abs(rest), a)


def _remainder(t: Terms, a: Value, b: Value) -> Value:
    """The remainder of least size. Each step takes some 50 bits off the quotient without a rounding."""
    minus_b = t.neg(b)
    rest = a
    for _ in range(_MOD_STEPS):
        rest = t.fma(t.op("round", t.div(rest, b)), minus_b, rest)
    size = t.abs(b)
    # A quotient too large for the steps leaves too large a rest.
    rest = t.select(t.op("le", t.abs(rest), size), rest, math.nan)
    return t.select(t.bit_and(t.eq(size, math.inf), t.lt(t.abs(a), math.inf)), a, rest)


def _of(module: str, name: str) -> Callable[..., Value]:
    """A function of a module of expansions, which is loaded with the first op that needs it: most kernels have few functions."""

    def expanded(*arguments: object) -> Value:
        found: Value = getattr(importlib.import_module(f"tilewright.passes.late.{module}"), name)(*arguments)
        return found

    return expanded


_BRANCHING = frozenset({"sin", "cos", "tan"})
EXPANDED: dict[str, Callable[..., Value]] = {
    "exp": _of("math_exponential", "exp"),
    "exp2": _of("math_exponential", "exp2"),
    "log": _of("math_logarithm", "log"),
    "log2": _of("math_logarithm", "log2"),
    "sin": _of("math_trigonometric", "sin"),
    "cos": _of("math_trigonometric", "cos"),
    "tan": _of("math_trigonometric", "tan"),
    "tanh": _of("math_exponential", "tanh"),
    "sinh": _of("math_exponential", "sinh"),
    "cosh": _of("math_exponential", "cosh"),
    "erf": _of("math_exponential", "erf"),
    "rsqrt": _rsqrt,
    "sigmoid": _of("math_exponential", "sigmoid"),
    "pow": _of("math_logarithm", "power"),
    "floordiv": _floordiv,
    "mod": _mod,
    "fmod": _fmod,
    "exp10": _of("math_exponential", "exp10"),
    "expm1": _of("math_exponential", "expm1"),
    "log10": _of("math_logarithm", "log10"),
    "log1p": _of("math_logarithm", "log1p"),
    "asin": _of("functions.inverse", "asin"),
    "acos": _of("functions.inverse", "acos"),
    "atan": _of("functions.inverse", "atan"),
    "atan2": _of("functions.inverse", "atan2"),
    "asinh": _of("functions.inverse", "asinh"),
    "acosh": _of("functions.inverse", "acosh"),
    "atanh": _of("functions.inverse", "atanh"),
    "cbrt": _of("functions.roots", "cbrt"),
    "hypot": _of("functions.roots", "hypot"),
    "erfc": _of("functions.special", "erfc"),
    "lgamma": _of("functions.special", "lgamma"),
    "tgamma": _of("functions.special", "tgamma"),
    "copysign": _of("functions.numbers", "copysign"),
    "nextafter": _of("functions.numbers", "nextafter"),
    "frexp_fraction": _of("functions.numbers", "frexp_fraction"),
    "frexp_exponent": _of("functions.numbers", "frexp_exponent"),
    "scale_by_power": _of("functions.numbers", "scale_by_power"),
}
"""What this pass removes; of `floordiv` and `mod` only those of floats."""
