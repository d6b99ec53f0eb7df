"""Random numbers as a user writes them: dropout, pi and the price of an option by Monte Carlo, in Python and in ZynML.

`EXAMPLES` lists each with inputs of any size and a reference in NumPy, which computes Philox by itself: kernels draw the very same
numbers, on every device. `tilewright demo` runs them; `python examples/monte_carlo.py` prints what they find.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tilewright as tw

PATHS = 1024
POINTS = 4096
_ZYN = Path(__file__).parent / "zyn"


@tw.kernel
def dropout(x: tw.Array, seed: int, keep: float) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty_like(x)
    for i, j in tw.grid(rows, cols):
        out[i, j] = x[i, j] / keep if tw.random.uniform(seed, i, j) < keep else 0.0
    return out


@tw.kernel
def pi(seeds: tw.Array) -> tw.Array:
    """One estimate for each seed: how many points of the unit square lie in the circle."""
    out = tw.empty((len(seeds),), tw.f32)
    for k in tw.grid(len(seeds)):
        inside = tw.f32(0.0)
        for p in range(POINTS):
            x = tw.random.uniform(seeds[k], 0, p)
            y = tw.random.uniform(seeds[k], 1, p)
            inside += 1.0 if x * x + y * y < 1.0 else 0.0
        out[k] = 4 * inside / POINTS
    return out


@tw.kernel
def option_prices(strikes: tw.Array, seed: int, price: float, rate: float, volatility: float, years: float) -> tw.Array:
    """Of European calls: the mean of what they pay at the end of many paths, the same ones for every strike, discounted to today."""
    out = tw.empty((len(strikes),), strikes.dtype)
    for k in tw.grid(len(strikes)):
        total = 0.0
        for p in range(PATHS):
            z = tw.random.normal(seed, p, dtype=strikes.dtype)
            last = price * tw.exp((rate - volatility * volatility / 2) * years + volatility * tw.sqrt(years) * z)
            total += max(last - strikes[k], 0.0)
        out[k] = tw.exp(-rate * years) * total / PATHS
    return out


# -- the same in NumPy ------------------------------------------------------------------------------------------------


def philox_words(seed: Any, last: Any, before: Any = None) -> np.ndarray:
    """The 32-bit words of a seed and one index or two, as docs/random.md has it; arguments broadcast."""
    seed, last = np.broadcast_arrays(np.asarray(seed, np.uint64), np.asarray(last, np.uint64))
    low = last >> np.uint64(2)
    high = np.zeros_like(low)
    if before is not None:
        low = low | np.uint64(1 << 63)
        high = high + np.asarray(before, np.uint64)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    c, k = [low & mask, low >> half, high & mask, high >> half], [seed & mask, seed >> half]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [second >> half ^ c[1] ^ k[0], second & mask, first >> half ^ c[3] ^ k[1], first & mask]
        k = [(k[0] + np.uint64(0x9E3779B9)) & mask, (k[1] + np.uint64(0xBB67AE85)) & mask]
    return np.asarray(np.choose((last & np.uint64(3)).astype(np.int64), c))


def uniform(seed: Any, last: Any, before: Any = None) -> np.ndarray:
    return (philox_words(seed, last, before) >> np.uint64(8)) * 2.0**-24


def _dropout(x: np.ndarray, seed: int, keep: float) -> np.ndarray:
    rows, cols = x.shape
    return np.where(uniform(seed, np.arange(cols), np.arange(rows)[:, None]) < np.float32(keep), x / keep, 0)


def _pi(seeds: np.ndarray) -> np.ndarray:
    x, y = (uniform(seeds[:, None], np.arange(POINTS), before) for before in (0, 1))
    return np.asarray(4.0 * np.sum(x * x + y * y < 1, axis=1) / POINTS)


def _option_prices(strikes: np.ndarray, seed: int, price: float, rate: float, volatility: float, years: float) -> np.ndarray:
    from statistics import NormalDist

    z = np.array([NormalDist().inv_cdf((int(w) + 0.5) / 2**32) for w in philox_words(seed, np.arange(PATHS))])
    last = price * np.exp((rate - volatility**2 / 2) * years + volatility * np.sqrt(years) * z)
    found = [np.maximum(last - strike, 0).mean() for strike in strikes.astype(np.float64).reshape(-1)]
    return np.asarray(np.exp(-rate * years) * np.array(found).reshape(strikes.shape))


# -- the list ---------------------------------------------------------------------------------------------------------


class Example(NamedTuple):
    """A kernel with inputs of about `n` draws and its reference."""

    name: str
    program: Callable[..., object] | Path
    make: Callable[[np.random.Generator, int], dict[str, Any]]
    reference: Callable[..., object]
    result: str = ""
    operations: Callable[..., float] | None = None
    tolerance: float = 1e-5


def _matrix(random: np.random.Generator, n: int) -> dict[str, Any]:
    cols = max(1, min(1000, n // 2))
    return {"x": random.standard_normal((max(1, n // cols), cols), np.float32), "seed": 7, "keep": 0.75}


def _seeds(random: np.random.Generator, n: int) -> dict[str, Any]:
    return {"seeds": random.integers(0, 1 << 62, max(1, n // POINTS // 2))}


def _strikes(random: np.random.Generator, n: int) -> dict[str, Any]:
    strikes = np.linspace(80, 120, max(1, min(n // PATHS, 1000)), dtype=np.float32)
    return {"strikes": strikes, "seed": 11, "price": 100.0, "rate": 0.03, "volatility": 0.2, "years": 1.0}


EXAMPLES: tuple[Example, ...] = (
    Example("dropout", dropout, _matrix, _dropout),
    Example("pi", pi, _seeds, _pi),
    Example("option_prices", option_prices, _strikes, _option_prices, tolerance=3e-5),
    Example("dropout.zyn", _ZYN / "dropout.zyn", _matrix, _dropout, "dropped"),
    Example("pi.zyn", _ZYN / "pi.zyn", _seeds, _pi, "estimates"),
)


if __name__ == "__main__":
    print("pi is about", np.mean(pi(np.arange(1000))))
    print("dropped:", 1 - np.count_nonzero(dropout(np.ones((1000, 1000), np.float32), 1, 0.9)) / 1e6)
    print("calls at 90, 100, 110:", option_prices(np.array([90, 100, 110], np.float32), 1, 100.0, 0.03, 0.2, 1.0))
    print("normal numbers:", tw.random.normal(1, shape=(2, 3)).tolist())
