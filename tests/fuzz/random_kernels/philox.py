"""Random numbers by the law of docs/random.md, in plain Python and NumPy: shares no code with Tilewright."""

from __future__ import annotations

import math
from fractions import Fraction
from statistics import NormalDist

MASK = (1 << 32) - 1


def philox(key: int, low: int, high: int) -> tuple[int, int, int, int]:
    """Philox 4x32-10 as Salmon et al. publish it: a key of 64 bits, a counter of two times 64."""
    c = [low & MASK, low >> 32, high & MASK, high >> 32]
    k = [key & MASK, key >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & MASK, first >> 32 ^ c[3] ^ k[1], first & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c[0], c[1], c[2], c[3]


def word(seed: int, *index: int, bits: int = 32) -> int:
    """The random word of a seed and indices."""
    *folded, last = (i % (1 << 64) for i in index)
    high = folded.pop() if folded else None
    key = seed % (1 << 64)
    for i in folded:
        words = philox(key, i, (1 << 64) - 1)
        key = words[0] | words[1] << 32
    each = 128 // bits
    block = last // each | (0 if high is None else 1 << 63)
    words = philox(key, block, high or 0)
    part = words[(last % each) * bits // 32 :][: bits // 32]
    return sum(w << 32 * k for k, w in enumerate(part))


UNIFORM_BITS = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}


def uniform(seed: int, *index: int, dtype: str = "f32") -> float:
    """Exact: a multiple of a power of two."""
    bits = 64 if dtype == "f64" else 32
    kept = UNIFORM_BITS[dtype]
    return (word(seed, *index, bits=bits) >> bits - kept) * 2.0**-kept


def randint(seed: int, low: int, high: int, *index: int) -> int:
    return low + int(Fraction(word(seed, *index, bits=64) * (high - low), 1 << 64).__floor__())


def normal(seed: int, *index: int, dtype: str = "f32") -> float:
    """To about the last digit of f64."""
    if dtype == "f64":
        return quantile(word(seed, *index, bits=64) >> 10, 54)
    return quantile(word(seed, *index), 32)


def quantile(number: int, bits: int) -> float:
    """Where the normal distribution reaches (number + 1/2) / 2^bits."""
    upper = number >> bits - 1
    tail = (1 << bits) - 1 - number if upper else number
    p = (2 * tail + 1) * 2.0 ** (-bits - 1)
    if p > 0.45:
        # Beside the middle the distance from it has the digits that p lacks.
        q = ((1 << bits) - 2 * tail - 1) * 2.0 ** (-bits - 1)
        z = -_near_middle(q)
    else:
        z = NormalDist().inv_cdf(p)
    return -z if upper else z


def _series(terms: int) -> list[float]:
    """Of the inverse error function, in powers of pi x^2 / 4, by its recurrence."""
    c = [Fraction(1)]
    for k in range(1, terms):
        c.append(sum((c[m] * c[k - 1 - m] / ((m + 1) * (2 * m + 1)) for m in range(k)), Fraction(0)))
    return [float(value / (2 * k + 1)) for k, value in enumerate(c)]


_SERIES = _series(14)


def _near_middle(q: float) -> float:
    """The quantile at 1/2 + q for small q: sqrt(2) times the inverse error function of 2 q."""
    t = math.pi * q * q
    return math.sqrt(2 * math.pi) * q * math.fsum(c * t**k for k, c in enumerate(_SERIES))

