"""erfc, lgamma and tgamma on NumPy arrays of a wide float type: what these ops mean.

In: an array of f64 or long double. Out: the function, good to all but the last digits of that type: errors stay far below those of the next
narrower one. Series whose terms have one sign, continued fractions and steps of G(x + 1) = x G(x) only, so that nothing cancels.
"""

from __future__ import annotations

import functools

import numpy as np

Array = np.ndarray
_NUMERATORS = ((1, 12), (-1, 360), (1, 1260), (-1, 1680), (1, 1188), (-691, 360360), (1, 156), (-3617, 122400), (43867, 244188), (-174611, 125400),
               (77683, 5796), (-236364091, 1506960))  # fmt: skip
"""Stirling's series, in odd powers of 1/x."""
_WINDOW = 24
"""Arguments are brought to here and the next whole number, where the series has 40 digits less than it needs."""


def erf_of_wide(x: Array) -> Array:
    """2/sqrt(pi) x e^(-x^2) sum of (2 x^2)^n / (1 3 5 … (2n+1)): every term positive, so nothing cancels."""
    one = x.dtype.type(1)
    size = np.minimum(np.abs(x), x.dtype.type(7))  # erf(7) is 1 to 70 bits
    square = size * size
    term = np.ones_like(size)
    total = np.ones_like(size)
    for n in range(1, 250):
        term = term * (2 * square / (2 * n + 1))
        total = total + term
        if not np.any(term > total * x.dtype.type(1e-22)):
            break
    small = _two_over_root_pi(x) * size * _gauss(size) * total
    result = np.where(np.isnan(x), x, np.minimum(small, one))
    return np.asarray(np.copysign(np.where(np.abs(x) >= 7, one, result), x))


def _two_over_root_pi(x: Array) -> Array:
    return np.asarray(2 / np.sqrt(4 * np.arctan(x.dtype.type(1))))


def _gauss(size: Array) -> Array:
    """e^(-x^2) with the rounding error of x^2 put back."""
    square = size * size
    high = size.astype(np.float32).astype(size.dtype)
    error = (size - high) * (size + high) - (square - high * high)
    return np.asarray(np.exp(-square) * (1 - error))


def erfc_of_wide(x: Array) -> Array:
    """1 - erf(x) below 1; beyond it a continued fraction, evaluated from its 200th term."""
    kind = x.dtype.type
    size = np.minimum(np.maximum(np.abs(x), kind(1)), kind(120))
    fraction = size.copy()
    for n in range(200, 0, -1):
        fraction = size + kind(n) / 2 / fraction
    far = _gauss(size) * _two_over_root_pi(x) / 2 / fraction
    far = np.where(x < 0, 2 - far, far)
    return np.where(np.abs(x) < 1, 1 - erf_of_wide(x), np.where(np.isnan(x), x, far))


def _stirling(y: Array) -> Array:
    """log G(y) in the window."""
    kind = y.dtype.type
    inverse = 1 / y
    square = inverse * inverse
    total = np.zeros_like(y)
    for above, below in reversed(_NUMERATORS):
        total = total * square + kind(above) / kind(below)
    pi = 4 * np.arctan(kind(1))
    return np.asarray((y - kind(0.5)) * np.log(y) - y + np.log(2 * pi) / 2 + total * inverse)


def _to_window(size: Array) -> tuple[Array, Array, Array]:
    """Where an argument from 0 to 200 comes to lie, the product of the steps up to there, and that of the steps down."""
    kind = size.dtype.type
    y, up, down = size.copy(), np.ones_like(size), np.ones_like(size)
    for _ in range(_WINDOW):
        low = y < _WINDOW
        up = np.where(low, up * y, up)
        y = np.where(low, y + 1, y)
    for _ in range(200):
        high = y >= _WINDOW + 1
        y = np.where(high, y - 1, y)
        down = np.where(high, down * y, down)
        if not high.any():
            break
    return y, up, down * kind(1)


def _sine_of_pi(size: Array) -> Array:
    """sin(pi x) with its sign."""
    whole = np.rint(size)
    sine = np.sin(4 * np.arctan(size.dtype.type(1)) * (size - whole))
    return np.asarray(np.where(np.fmod(whole, 2) == 0, sine, -sine))


def tgamma_of_wide(x: Array) -> Array:
    kind = x.dtype.type
    size = np.minimum(np.abs(x), kind(200))
    size = np.where(np.isnan(x) | (size == 0), kind(1), size)
    y, up, down = _to_window(size)
    value = np.exp(_stirling(y)) * down / up
    pi = 4 * np.arctan(kind(1))
    mirrored = -pi / (size * _sine_of_pi(size) * value)
    result = np.where(x < 0, mirrored, value)
    result = np.where((x < 0) & (np.floor(x) == x), kind(np.nan), result)
    result = np.where(x == 0, np.copysign(kind(np.inf), x), result)
    # Far below zero all is denormal beyond any type's reach, and a zero with the sign of its stretch.
    far = np.where(np.fmod(np.floor(np.abs(np.where(np.isfinite(x), x, 0))), 2) == 0, kind(-0.0), kind(0.0))
    result = np.where((x < -199) & (np.floor(x) != x), far, result)
    result = np.where(x > 199, kind(np.inf), result)
    return np.where(np.isnan(x), x, result)


@functools.cache
def _zetas(name: str, count: int) -> tuple[object, ...]:
    """The sums of 1/n^k from k = 2 on, by Euler and Maclaurin from n = 30."""
    kind = np.dtype(name).type
    found = []
    for k in range(2, count):
        n = kind(30)
        total = sum((kind(i) ** -k for i in range(1, 30)), kind(0)) + n ** (1 - k) / (k - 1) + n**-k / 2
        step = kind(k) * n ** (-k - 1)
        for j, bernoulli in enumerate((kind(1) / 6, kind(-1) / 30, kind(1) / 42, kind(-1) / 30, kind(5) / 66, kind(-691) / 2730, kind(7) / 6), 1):
            total += bernoulli * step / kind(_factorial(2 * j))
            step *= kind(k + 2 * j - 1) * kind(k + 2 * j) / n**2
        found.append(total)
    return tuple(found)


def _factorial(n: int) -> int:
    return functools.reduce(lambda a, b: a * b, range(1, n + 1), 1)


def _about_one(d: Array) -> Array:
    """log G(1 + d) for |d| <= 1/2: its power series, with log(1 + d) taken out so that terms shrink as 4^-k."""
    kind = d.dtype.type
    euler = kind(0.5772156649015329) + kind(-4.942915152430645e-18)
    total = np.zeros_like(d)
    zetas = _zetas(d.dtype.str, 60)
    for k in range(len(zetas) + 1, 1, -1):
        total = total * -d + (zetas[k - 2] - kind(1)) / k
    return np.asarray(-np.log1p(d) + d * (kind(1) - euler) + total * d * d)


def lgamma_of_wide(x: Array) -> Array:
    kind = x.dtype.type
    size = np.abs(x)
    size = np.where(np.isnan(x) | (size == 0), kind(1), size)
    inside = np.minimum(size, kind(100))
    y, up, _ = _to_window(np.minimum(inside, kind(_WINDOW)))
    value = _stirling(np.where(size < _WINDOW, y, np.minimum(size, kind(2.0**60)))) - np.where(size < _WINDOW, np.log(up), kind(0))
    one, two = np.clip(size - 1, kind(-0.5), kind(0.5)), np.clip(size - 2, kind(-0.5), kind(0.5))
    value = np.where(np.abs(size - 1) < kind(0.5), _about_one(one), value)
    value = np.where(np.abs(size - 2) <= kind(0.5), _about_one(two) + np.log1p(two), value)
    value = np.where(size > kind(2.0**60), size * (np.log(size) - 1), value)
    pi = 4 * np.arctan(kind(1))
    mirrored = np.log(pi / np.abs(size * _sine_of_pi(size))) - value
    result = np.where(x < 0, mirrored, value)
    result = np.where((x == 0) | ((x < 0) & (np.floor(x) == x)) | np.isinf(x), kind(np.inf), result)
    return np.where(np.isnan(x), x, result)
