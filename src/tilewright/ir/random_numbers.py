"""Random numbers as arithmetic: Philox 4x32-10, and what is made of its words. Every device and every stage computes these very steps.

The steps are written once, on *terms*: the pass `expand_random` gives them a builder of IR, the emulator arrays of NumPy. All of them
are exact on integers or rounded once on floats, and none is left for a code generator to contract, so all devices give the same bits.

    random_u32 %key, %index          word index % 4 of block index // 4 under the key: Philox(counter = [block, 0])
    random_u32 %key, %index, %high   the same of Philox(counter = [block + 2^63, high])
    random_u64 …                     words 2 * (index % 2) and the next (the upper half) of block index // 2
    random_key %key, %index          words 0 and 1 of Philox(counter = [index, 2^64 - 1]): the key of another stream
    random_below %word, %count       floor(word * count / 2^64)
    random_normal %word              the normal distribution's quantile at (word + 1/2) / 2^32, f32; of a u64 at 53 of its bits, f64

A counter is 128 bits, written here as its lower and its upper 64; a key 64. Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*
(2011) has the generator; Wichura, *The percentage points of the normal distribution* (AS241, 1988) the rational functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from tilewright.base.dtypes import DType, f32, f64, i32, i64, u32, u64
from tilewright.ir.nodes import NO_ATTRS, Attrs

V = TypeVar("V")

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_SEVERAL = 1 << 63
"""Set in the counter of a draw with two indices or more."""

# The quantile: around the middle q times a function of m^2 - q^2, m being how far the middle reaches; in the tails a function of
# sqrt(-log p) - s. f32: m = 0.425, s = 1.6, as AS241 has them. f64: m = 0.485, s = 2, where few numbers lie in a tail, and one function is
# enough for all of it; least squares with 33 digits, 2e-16 and 6e-17. Numerators and denominators, the highest power first.
_MIDDLE_F32 = ((59.10937472, 159.29113202, 50.434271938, 3.3871327179), (67.1875636, 78.757757664, 17.895169469, 1.0))
_TAIL_F32 = ((0.17023821103, 1.3067284816, 2.75681539, 1.4234372777), (0.12021132975, 0.7370016425, 1.0))
_MIDDLE_F64 = (
    (1130043664.0123563, 16473165478.337456, 34632333753.530785, 23766906378.36744, 7020270595.808384, 1023819644.2009628, 79465780.6022433,
     3397344.669892993, 79481.98923985542, 947.1488487557148, 4.474413149658886),
    (2455078322.71726, 14382700636.679764, 20041290805.82201, 10610746780.93712, 2607032057.377072, 330992498.59316564, 23062138.77068707,
     904720.9484977217, 19740.36641317767, 222.09991818571015, 1.0),
)  # fmt: skip
_TAIL_F64 = (
    (0.0012904860986283034, 0.03988658288404693, 0.42665113330946913, 2.1603448148999123, 5.809025132301661, 8.565361354658059,
     6.6005260092273685, 2.089849982971259),
    (1.2154899049743497e-09, 0.0009123875566369932, 0.02638939792167743, 0.2513660343908, 1.0735684087133484, 2.2789773996987726,
     2.3781090878442264, 1.0),
)  # fmt: skip
_REACH_F32, _REACH_F64 = 0.425, 0.485
# log(1 + f) / f with 1 + f from sqrt(1/2) to sqrt(2); f64: (log((1+s)/(1-s)) / s - 2) / s^2 in s^2.
_LOG_F32 = (-0.07902744, 0.12622319, -0.12998183, 0.14214496, -0.16641282, 0.20001045, -0.25000307, 0.3333333)
_LOG_F64 = (
    0.14616585424934123, 0.1533171061820642, 0.18182889455675105, 0.22222211130259875, 0.2857142862600327,
    0.39999999999899444, 0.666666666666667,
)  # fmt: skip
_LN2 = 0.6931471805599453


class RandomTerms(Protocol[V]):
    """What the steps need: ops of the op table, in which plain numbers take the dtype of the first operand that is a value."""

    def op(self, opcode: str, *terms: V | float | int) -> V: ...
    def cast(self, a: V, dtype: DType) -> V: ...
    def wide_product(self, a: V, factor: int) -> tuple[V, V]:
        """The lower and the upper word of the product of a word with a constant."""
        ...

    def where_any(self, condition: V, then: Callable[[RandomTerms[V], V], V], operand: V, otherwise: V) -> V:
        """`then` of the operand where the condition holds, else `otherwise`; `then` need not be computed where it holds nowhere."""
        ...

    def quotient(self, a: V, b: V) -> V:
        """a / b, where neither they nor it lie near the ends of the range of floats (a may be zero)."""
        ...

    def root(self, a: V) -> V:
        """The square root of a number that is neither tiny nor huge."""
        ...

    def signed(self, a: V) -> V:
        """The same bits as a signed integer."""
        ...

    def bits(self, a: V) -> V:
        """The pattern of a float as a signed integer."""
        ...

    def float_bits(self, a: V) -> V:
        """The reverse."""
        ...


# -- Philox -----------------------------------------------------------------------------------------------------------


def philox(t: RandomTerms[V], key: V, low: V, high: V) -> tuple[V, V, V, V]:
    """The four words of a block: u32, from a key and a counter of u64."""
    counter = [*_halves(t, low), *_halves(t, high)]
    keys = list(_halves(t, key))
    for number in range(ROUNDS):
        if number:
            keys = [t.op("add", k, step) for k, step in zip(keys, _KEY_STEPS, strict=True)]
        (low_0, high_0), (low_1, high_1) = (t.wide_product(counter[2 * k], _MULTIPLIERS[k]) for k in (0, 1))
        counter = [
            t.op("xor", t.op("xor", counter[1], keys[0]), high_1), low_1,
            t.op("xor", t.op("xor", counter[3], keys[1]), high_0), low_0,
        ]  # fmt: skip
    return counter[0], counter[1], counter[2], counter[3]


def _halves(t: RandomTerms[V], value: V) -> tuple[V, V]:
    return t.cast(value, u32), t.cast(t.op("shr", value, 32), u32)


def counter_low(t: RandomTerms[V], block: V, several: bool) -> V:
    """The lower half of the counter of a block."""
    return t.op("or", block, _SEVERAL) if several else block


def joined(t: RandomTerms[V], low: V, high: V) -> V:
    """Two words as one of 64 bits."""
    return t.op("or", t.cast(low, u64), t.op("shl", t.cast(high, u64), 32))


def random_u32(t: RandomTerms[V], key: V, index: V, high: V | None = None) -> V:
    words = philox(t, key, counter_low(t, t.op("shr", index, 2), high is not None), _upper(t, index, high))
    odd = t.op("ne", t.op("and", index, 1), 0)
    first, second = t.op("select", odd, words[1], words[0]), t.op("select", odd, words[3], words[2])
    return t.op("select", t.op("ne", t.op("and", index, 2), 0), second, first)


def random_u64(t: RandomTerms[V], key: V, index: V, high: V | None = None) -> V:
    words = philox(t, key, counter_low(t, t.op("shr", index, 1), high is not None), _upper(t, index, high))
    odd = t.op("ne", t.op("and", index, 1), 0)
    return t.op("select", odd, joined(t, words[2], words[3]), joined(t, words[0], words[1]))


def random_key(t: RandomTerms[V], key: V, index: V) -> V:
    words = philox(t, key, index, t.op("or", index, (1 << 64) - 1))
    return joined(t, words[0], words[1])


def _upper(t: RandomTerms[V], index: V, high: V | None) -> V:
    return t.op("xor", index, index) if high is None else high


def random_below(t: RandomTerms[V], word: V, count: V) -> V:
    """By halves, each product of which fits in 64 bits."""
    (w_low, w_high), (c_low, c_high) = ([t.cast(half, u64) for half in _halves(t, value)] for value in (word, count))
    middle = t.op("add", t.op("mul", w_high, c_low), t.op("shr", t.op("mul", w_low, c_low), 32))
    middle_low, middle_high = (t.cast(half, u64) for half in _halves(t, middle))
    other = t.op("add", t.op("mul", w_low, c_high), middle_low)
    return t.op("add", t.op("add", t.op("mul", w_high, c_high), middle_high), t.op("shr", other, 32))


# -- the normal distribution ------------------------------------------------------------------------------------------


def random_normal_f32(t: RandomTerms[V], word: V) -> V:
    """Of a u32. The tails mirror each other: the quantile of ~word is minus that of word."""
    signed = t.signed(word)
    sign = t.op("shr", signed, 31)
    # From the end of the nearer tail, and from the middle; both below 2^31.
    tail = t.op("xor", signed, sign)
    centre = t.op("xor", tail, 0x7FFFFFFF)
    p = t.op("fma", t.cast(tail, f32), 2.0**-32, 2.0**-33)
    q = t.op("fma", t.cast(centre, f32), 2.0**-32, 2.0**-33)
    inner = t.op("fma", t.op("neg", q), q, _REACH_F32**2)
    top, bottom = (_polynomial(t, inner, c) for c in _MIDDLE_F32)
    outer = t.op("sub", t.root(_minus_log_f32(t, p)), 1.6)
    top_2, bottom_2 = (_polynomial(t, outer, c) for c in _TAIL_F32)
    is_middle = t.op("le", q, _REACH_F32)
    size = t.quotient(t.op("select", is_middle, t.op("mul", q, top), top_2), t.op("select", is_middle, bottom, bottom_2))
    # Words below 2^31 are those of the lower tail.
    return t.float_bits(t.op("xor", t.bits(size), t.op("xor", t.op("and", sign, -(1 << 31)), -(1 << 31))))


def random_normal_f64(t: RandomTerms[V], word: V) -> V:
    """Of a u64, by its upper 54 bits. Tails are computed where there are any: of three numbers in a hundred."""
    signed = t.signed(word)
    sign = t.op("shr", signed, 63)
    tail = t.op("shr", t.op("xor", signed, sign), 10)
    centre = t.op("xor", tail, (1 << 53) - 1)
    q = t.op("fma", t.cast(centre, f64), 2.0**-54, 2.0**-55)
    inner = t.op("fma", t.op("neg", q), q, _REACH_F64**2)
    top, bottom = (_polynomial(t, inner, c) for c in _MIDDLE_F64)
    middle = t.quotient(t.op("mul", q, top), bottom)

    def outside(u: RandomTerms[V], distance: V) -> V:
        p = u.op("fma", u.cast(distance, f64), 2.0**-54, 2.0**-55)
        outer = u.op("sub", u.root(_minus_log_f64(u, p)), 2.0)
        return u.quotient(*(_polynomial(u, outer, c) for c in _TAIL_F64))

    size = t.where_any(t.op("gt", q, _REACH_F64), outside, tail, middle)
    return t.float_bits(t.op("xor", t.bits(size), t.op("xor", t.op("and", sign, -(1 << 63)), -(1 << 63))))


def _polynomial(t: RandomTerms[V], x: V, coefficients: Sequence[float]) -> V:
    total = t.op("fma", x, coefficients[0], coefficients[1])
    for coefficient in coefficients[2:]:
        total = t.op("fma", total, x, coefficient)
    return total


def _minus_log_f32(t: RandomTerms[V], p: V) -> V:
    """-log(p) for p from 2^-33 to 1/2, where nothing cancels."""
    pattern = t.bits(p)
    # The exponent stays where it is in the pattern: k is 2^23 times it.
    k = t.op("and", t.op("sub", pattern, 0x3F3504F3), -(1 << 23))
    f = t.op("sub", t.float_bits(t.op("sub", pattern, k)), 1.0)
    # log(1 + f) = f - f^2 (1/2 - f g)
    g = t.op("fma", t.op("neg", f), _polynomial(t, f, _LOG_F32), 0.5)
    rest = t.op("fma", t.op("mul", f, f), g, t.op("neg", f))
    return t.op("fma", t.op("neg", t.cast(k, f32)), _LN2 * 2.0**-23, rest)


def _minus_log_f64(t: RandomTerms[V], p: V) -> V:
    """-log(p) for p from 2^-55 to 1/2."""
    pattern = t.bits(p)
    k = t.op("shr", t.op("sub", pattern, 0x3FE6A09E667F3BCD), 52)
    f = t.op("sub", t.float_bits(t.op("sub", pattern, t.op("shl", k, 52))), 1.0)
    # log(1 + f) = f - (f^2/2 - s (f^2/2 + s^2 P(s^2)))
    half = t.op("mul", t.op("mul", f, 0.5), f)
    s = t.quotient(f, t.op("add", f, 2.0))
    square = t.op("mul", s, s)
    rest = t.op("fma", t.op("neg", s), t.op("fma", square, _polynomial(t, square, _LOG_F64), half), half)
    # k is small: the sum of bits is a float at once, where a cast of 64-bit integers is slow on many CPUs.
    power = t.op("sub", t.float_bits(t.op("add", k, 0x4338000000000000)), 1.5 * 2.0**52)
    return t.op("fma", t.op("neg", power), _LN2, t.op("sub", rest, f))


STEPS: dict[str, Callable[..., object]] = {
    "random_u32": random_u32, "random_u64": random_u64, "random_key": random_key, "random_below": random_below,
}  # fmt: skip
OPCODES = frozenset((*STEPS, "random_normal"))


def steps(t: RandomTerms[V], opcode: str, operands: Sequence[V], dtype: DType) -> V:
    """The value of a random op, from operands of that dtype."""
    if opcode == "random_normal":
        return random_normal_f32(t, *operands) if dtype is u32 else random_normal_f64(t, *operands)
    return STEPS[opcode](t, *operands)  # type: ignore[return-value]


# -- on arrays --------------------------------------------------------------------------------------------------------

Evaluate = Callable[[str, Sequence[np.ndarray], Attrs, DType], np.ndarray]


class ArrayTerms:
    """Terms that are arrays of NumPy; `evaluate` is what an op computes on them."""

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate

    def op(self, opcode: str, *terms: np.ndarray | float | int) -> np.ndarray:
        values = [t for t in terms if isinstance(t, np.ndarray | np.generic)]
        model = values[1] if opcode == "select" and len(values) > 1 else values[0]
        arrays = [t if isinstance(t, np.ndarray | np.generic) else model.dtype.type(t) for t in terms]
        return self._evaluate(opcode, [np.asarray(a) for a in arrays], NO_ATTRS, _DTYPES[model.dtype.name])

    def cast(self, a: np.ndarray, dtype: DType) -> np.ndarray:
        return self._evaluate("cast", [a], {"dtype": dtype}, _DTYPES[a.dtype.name])

    def wide_product(self, a: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
        return _halves(self, self.op("mul", self.cast(a, u64), factor))

    def where_any(
        self, condition: np.ndarray, then: Callable[[ArrayTerms, np.ndarray], np.ndarray], operand: np.ndarray, otherwise: np.ndarray
    ) -> np.ndarray:  # fmt: skip
        return self.op("select", condition, then(self, operand), otherwise) if np.any(condition) else otherwise

    def quotient(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self.op("div", a, b)

    def root(self, a: np.ndarray) -> np.ndarray:
        return self.op("sqrt", a)

    def signed(self, a: np.ndarray) -> np.ndarray:
        return np.asarray(a).view(np.int32 if a.dtype == np.uint32 else np.int64)

    def bits(self, a: np.ndarray) -> np.ndarray:
        return np.asarray(a).view(np.int32 if a.dtype == np.float32 else np.int64)

    def float_bits(self, a: np.ndarray) -> np.ndarray:
        return np.asarray(a).view(np.float32 if a.dtype == np.int32 else np.float64)


_DTYPES = {d.numpy.name: d for d in (f32, f64, i32, i64, u32, u64)}
