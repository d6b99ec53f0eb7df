"""Random numbers in explicit kernels: `tw.random.uniform(seed, i)` and its kin, as in other kernels (`tree/check/random_draws.py`).

In: a seed and indices, which are integers. Out: ops of random numbers at the thread stage, and what makes the number of their bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, f32, f64, i64, u32, u64
from tilewright.frontend.simt.build import Emitter
from tilewright.frontend.simt.values import Arguments, NumberValue, Val, describe
from tilewright.frontend.simt.words import variadic_word
from tilewright.ir.nodes import Value
from tilewright.tree.check.random_draws import DTYPES, LEADING, UNIFORM_BITS


def _word(e: Emitter, what: str, val: Val, name: str) -> Value:
    """A seed or an index as 64 bits."""
    number = e.integer(val, f"the {what} of tw.{name}")
    if number.const is None:
        return e.use(number, u64)
    if not 0 <= int(number.const) < 1 << 64:
        raise e.fail(f"the {what} of tw.{name} is {number.const}", "it is at least 0 and below 2^64", "TW013")
    return e.b.const(int(number.const), u64)


def _bits(e: Emitter, dtype: DType, key: Value, indices: Sequence[Value]) -> Value:
    *folded, last = indices
    high = [folded.pop()] if folded else []
    for index in folded:
        key = e.b.op("random_key", key, index)
    return e.b.op(f"random_{dtype}", key, last, *high)


def _dtype(e: Emitter, given: Arguments, name: str) -> DType:
    for keyword in given.named:
        if keyword != "dtype":
            raise e.fail(f"tw.{name} has no argument '{keyword}' in a kernel", "it takes a seed, indices and dtype=", "TW016")
    kinds = DTYPES[name]
    dtype = e.dtype(given.named["dtype"], "dtype") if "dtype" in given.named else kinds[0]
    if dtype not in kinds:
        raise e.fail(f"tw.{name} gives no {dtype}", f"choose one of {', '.join(map(str, kinds))}", "TW006")
    return dtype


def _draw(e: Emitter, given: Arguments, name: str) -> tuple[DType, Value]:
    """The dtype asked for, and the random bits."""
    dtype, names = _dtype(e, given, name), LEADING.get(name, ("seed",))
    if len(given.items) <= len(names):
        raise e.fail(
            f"tw.{name} takes {', '.join(names)} and one index or more, got {len(given.items)} arguments", f"write tw.{name}({', '.join(names)}, i)", "TW016"
        )
    seed = _word(e, "seed", given.items[0], name)
    indices = [_word(e, "index", val, name) for val in given.items[len(names) :]]
    wide = dtype.bits == 64 or name == "random.randint"
    return dtype, _bits(e, u64 if wide else u32, seed, indices)


@variadic_word("random.bits")
def _random_bits(e: Emitter, given: Arguments) -> Val:
    return e.num(_draw(e, given, "random.bits")[1])


@variadic_word("random.uniform")
def _uniform(e: Emitter, given: Arguments) -> Val:
    dtype, word = _draw(e, given, "random.uniform")
    kept, computed = UNIFORM_BITS[dtype], f64 if dtype is f64 else f32
    top = e.b.op("shr", word, e.b.splat((64 if dtype is f64 else 32) - kept, word))
    return e.num(e.b.cast(e.b.mul(e.b.cast(top, computed), e.b.const(2.0**-kept, computed)), dtype))


@variadic_word("random.normal")
def _normal(e: Emitter, given: Arguments) -> Val:
    dtype, word = _draw(e, given, "random.normal")
    return e.num(e.b.cast(e.b.op("random_normal", word), dtype))


@variadic_word("random.randint")
def _randint(e: Emitter, given: Arguments) -> Val:
    dtype, word = _draw(e, given, "random.randint")
    low, high = (_bound(e, val, dtype) for val in given.items[1:3])
    if low.const is not None and high.const is not None and low.const >= high.const:
        raise e.fail(f"tw.random.randint has no number from {low.const} on below {high.const}", "high must be above low", "TW016")
    bound = u64 if dtype is u64 else i64
    a, b = e.use(low, bound), e.use(high, bound)
    offset = e.b.op("random_below", word, e.b.sub(e.b.cast(b, u64), e.b.cast(a, u64)))
    inside = e.b.select(e.b.op("lt", a, b), offset, e.b.const(0, u64))
    return e.num(e.b.cast(e.b.add(e.b.cast(a, u64), inside), dtype))


def _bound(e: Emitter, val: Val, dtype: DType) -> NumberValue:
    number = e.integer(val, "a bound of tw.random.randint")
    if number.const is not None:
        if not int(dtype.min_value) <= number.const <= int(dtype.max_value) + (dtype.bits < 64):
            raise e.fail(f"tw.random.randint of {dtype} cannot reach {number.const}", "ask for a wider dtype", "TW006")
    elif not number.weak and (number.dtype is u64) != (dtype is u64) and number.dtype.bits == 64:
        raise e.fail(f"a bound of tw.random.randint of {dtype} is {describe(number)}", f"convert it: tw.{u64 if dtype is u64 else i64}(...)", "TW006")
    return number
