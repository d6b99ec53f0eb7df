"""Random numbers by the law of docs/random.md in plain Python, as the random kernels have them, and arrays of them."""

from __future__ import annotations

import numpy as np

from fuzz.random_kernels.philox import normal, philox, quantile, randint, uniform, word

__all__ = ["normal", "philox", "quantile", "randint", "uniform", "uniforms", "word", "words"]


def words(seed: int, count: int, bits: int = 32) -> np.ndarray:
    """The first words of a stream."""
    return np.array([word(seed, e, bits=bits) for e in range(count)], np.uint64 if bits == 64 else np.uint32)


def uniforms(seed: object, before: object, last: object) -> np.ndarray:
    """`uniform(seed, before, last)` of arrays, which broadcast."""
    return np.vectorize(lambda s, b, i: uniform(int(s), int(b), int(i)), otypes=[np.float64])(seed, before, last)
