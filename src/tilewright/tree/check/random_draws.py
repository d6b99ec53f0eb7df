"""Random numbers in kernels: `random.uniform(seed, i, j)` and its kin, from typed arguments to ops.

In come a seed and indices, which are integers; out comes an expression of `random_u32` or `random_u64` and what makes the number of its
bits. The last two indices make the counter; those before them are folded into the key, one after the other (docs/random.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.base.dtypes import DType, bf16, bool_, f16, f32, f64, i32, i64, u32, u64
from tilewright.base.source import Span
from tilewright.tree.check.context import Context
from tilewright.tree.check.infer import constant_of, describe
from tilewright.tree.check.operations import Typing
from tilewright.tree.typed import Apply, Cast, Const, Expr

_FLOATS, _INTEGERS = (f32, f64, f16, bf16), (i64, i32, u32, u64)
DTYPES: Mapping[str, tuple[DType, ...]] = {
    "random.uniform": _FLOATS, "random.normal": _FLOATS, "random.randint": _INTEGERS, "random.bits": (u32, u64),
}  # fmt: skip
"""The functions, each with the dtypes it gives; the first is the one it gives unasked."""
LEADING = {"random.randint": ("seed", "low", "high")}
"""The arguments before the indices, where they are not just the seed."""
UNIFORM_BITS = {f16: 11, bf16: 8, f32: 24, f64: 53}
"""Bits of a uniform number: as many as its dtype holds below 1 at equal distances."""


class RandomDraws:
    """Builds draws."""

    def __init__(self, context: Context, typing: Typing) -> None:
        self.context = context
        self.typing = typing

    def draw(self, name: str, given: Sequence[Expr], dtype: DType | None, span: Span) -> Expr:
        """`given`: the arguments in order, without the dtype."""
        kinds = DTYPES[name]
        if dtype is not None and dtype not in kinds:
            raise self.context.fail("TW006", f"{name}() gives no {dtype}", span, f"choose one of {', '.join(map(str, kinds))}")
        wanted = dtype or kinds[0]
        names = LEADING.get(name, ("seed",))
        if len(given) <= len(names):
            raise self.context.fail(
                "TW016", f"{name}() takes {', '.join(names)} and one index or more, got {len(given)} arguments", span,
                f"write {name}({', '.join(names)}, i)",
            )  # fmt: skip
        seed = self._word("seed", given[0], name)
        indices = [self._word("index", index, name) for index in given[len(names) :]]
        if name == "random.randint":
            return self._between(given[1], given[2], self._bits(u64, seed, indices, span), wanted, span)
        word = self._bits(u64 if wanted.bits == 64 else u32, seed, indices, span)
        if name == "random.bits":
            return word
        if name == "random.normal":
            number = Apply("random_normal", (word,), f64 if wanted is f64 else f32, span=span)
            return number if wanted in (f32, f64) else Cast(number, wanted, rounds=True, span=span)
        kept = UNIFORM_BITS[wanted]
        top = Apply("shr", (word, Const(word.dtype.bits - kept, word.dtype, span=span)), word.dtype, span=span)
        # Exact, in f32 for the narrow types too.
        return Apply("mul", (Cast(top, wanted, span=span), Const(2.0**-kept, wanted, span=span)), wanted, span=span)

    def _bits(self, dtype: DType, key: Expr, indices: Sequence[Expr], span: Span) -> Expr:
        *folded, last = indices
        high = [folded.pop()] if folded else []
        for index in folded:
            key = Apply("random_key", (key, index), u64, span=span)
        return Apply(f"random_{dtype}", (key, last, *high), dtype, span=span)

    def _between(self, low: Expr, high: Expr, word: Expr, dtype: DType, span: Span) -> Expr:
        """low + floor(word * (high - low) / 2^64), and low where there is nothing between."""
        bound = u64 if dtype is u64 else i64
        for what, value in (("low", low), ("high", high)):
            self._integer(what, value, "random.randint")
        first, last = constant_of(low), constant_of(high)
        if first is not None and last is not None and first >= last:
            raise self.context.fail("TW016", f"random.randint() has no number from {first} on below {last}", span, "high must be above low")
        for number, most in ((first, int(dtype.max_value)), (last, int(dtype.max_value) + (dtype.bits < 64))):
            if number is not None and not int(dtype.min_value) <= number <= most:
                raise self.context.fail("TW006", f"random.randint() of {dtype} cannot reach {number}", span, "ask for a wider dtype")
        a, b = (self.typing.assignable(v, bound, f"a bound of random.randint() of {dtype}", span) for v in (low, high))
        count = Apply("sub", (_as(b, u64), _as(a, u64)), u64, span=span)
        offset = Apply("random_below", (word, count), u64, span=span)
        inside = Apply("select", (Apply("lt", (a, b), bool_, span=span), offset, Const(0, u64, span=span)), u64, span=span)
        return _as(Apply("add", (_as(a, u64), inside), u64, span=span), dtype)

    def _integer(self, what: str, value: Expr, name: str) -> None:
        self.typing.scalar_only(f"the {what} of {name}()", value, value.span)
        if not value.dtype.is_int or value.weak == "float":
            raise self.context.fail("TW006", f"the {what} of {name}() is an integer, got {describe(value)}", value.span, f"write cast(…, {i64})")

    def _word(self, what: str, value: Expr, name: str) -> Expr:
        """A seed or an index as 64 bits."""
        self._integer(what, value, name)
        constant = constant_of(value)
        if constant is not None and not 0 <= constant < 1 << 64:
            raise self.context.fail("TW013", f"the {what} of {name}() is {constant}", value.span, "it is at least 0 and below 2^64")
        if isinstance(value, Const):
            return replace(value, value=int(value.value), dtype=u64, weak="")
        return _as(value, u64)


def _as(value: Expr, dtype: DType) -> Expr:
    if isinstance(value, Const):
        wrapped = int(value.value) & ((1 << dtype.bits) - 1)
        signed = dtype.kind == "i" and wrapped >> (dtype.bits - 1)
        return replace(value, value=wrapped - (1 << dtype.bits) if signed else wrapped, dtype=dtype, weak="")
    return value if value.dtype is dtype else Cast(value, dtype, span=value.span)
