"""The steps of random numbers: published vectors, another implementation, and quantiles to f64."""

from __future__ import annotations

import numpy as np
import pytest

from random_reference import philox as reference_philox
from random_reference import quantile, randint, word
from tilewright.base.dtypes import u32, u64
from tilewright.ir.numerics import evaluate
from tilewright.ir.random_numbers import ArrayTerms, philox

FULL = (1 << 64) - 1
VECTORS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)
"""Counter, key and result of philox4x32-10 in Random123's `kat_vectors`."""


def _array(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    halves = [a | b << 32 for a, b in (key, counter[:2], counter[2:])]
    found = philox(ArrayTerms(evaluate), *map(_array, halves))
    assert tuple(int(w[0]) for w in found) == expected == reference_philox(*halves)


def test_words_by_index() -> None:
    rng = np.random.default_rng(1)
    index = np.concatenate([_array(*range(40)), rng.integers(0, FULL, 200, np.uint64, endpoint=True), _array(FULL, FULL - 1, 1 << 63)])
    key, high = (rng.integers(0, FULL, index.size, np.uint64) for _ in range(2))
    for opcode, bits in (("random_u32", 32), ("random_u64", 64)):
        one = evaluate(opcode, [key, index], {}, u64)
        two = evaluate(opcode, [key, index, high], {}, u64)
        for k, i, h, a, b in zip(key, index, high, one, two, strict=True):
            assert int(a) == word(int(k), int(i), bits=bits)
            assert int(b) == word(int(k), int(h), int(i), bits=bits)
    folded = evaluate("random_key", [key, high], {}, u64)
    for k, h, i, found in zip(key, high, index, folded, strict=True):
        assert word(int(found), 7, int(i)) == word(int(k), int(h), 7, int(i))


def test_below() -> None:
    rng = np.random.default_rng(2)
    words = np.concatenate([_array(0, 1, FULL, FULL - 1, 1 << 63), rng.integers(0, FULL, 500, np.uint64)])
    for counts in (rng.integers(1, 100, words.size, np.uint64), rng.integers(1, FULL, words.size, np.uint64), np.full(words.size, FULL, np.uint64)):
        found = evaluate("random_below", [words, counts], {}, u64)
        assert [int(f) for f in found] == [int(w) * int(c) >> 64 for w, c in zip(words, counts, strict=True)]
    assert randint(3, -4, 5, 1) in range(-4, 5)


def test_a_long_range_splits_evenly() -> None:
    """Of all words, each number gets the same share but for one word: here of a word of 16 bits, by the same law."""
    for count in (3, 1000, 65535):
        shares = np.bincount(np.arange(1 << 16) * count >> 16, minlength=count)
        assert shares.size == count and np.ptp(shares) <= 1


def test_normal_f32_against_f64() -> None:
    rng = np.random.default_rng(3)
    edge = int(0.075 * 2**32)
    words = np.concatenate([
        np.arange(300), 2**31 - np.arange(1, 300), 2**31 + np.arange(300), 2**32 - 1 - np.arange(300), edge + np.arange(-200, 200),
        rng.integers(0, 2**32, 4000),
    ]).astype(np.uint32)  # fmt: skip
    found = evaluate("random_normal", [words], {}, u32)
    wanted = np.array([quantile(int(w), 32) for w in words])
    assert found.dtype == np.float32
    assert np.max(np.abs(found - wanted) / np.spacing(np.abs(wanted).astype(np.float32))) <= 8
    assert np.array_equal(evaluate("random_normal", [~words], {}, u32), -found)
    assert np.abs(found).max() == np.float32(6.337958)


def test_normal_f64() -> None:
    rng = np.random.default_rng(4)
    tops = np.concatenate([
        np.arange(300), 2**53 - 1 - np.arange(300), 2**53 + np.arange(300), rng.integers(0, 2**54, 4000),
        (np.exp(-rng.uniform(0.7, 37, 3000)) * 2**54).astype(np.uint64), (np.exp(-25 + rng.uniform(-1e-4, 1e-4, 300)) * 2**54),
    ]).astype(np.uint64)  # fmt: skip
    found = evaluate("random_normal", [tops << np.uint64(10)], {}, u64)
    wanted = np.array([quantile(int(w), 54) for w in tops])
    assert found.dtype == np.float64
    # The reference is as exact as its library: a few digits of the last place.
    assert np.max(np.abs(found - wanted) / np.spacing(np.abs(wanted))) <= 16
    assert np.array_equal(evaluate("random_normal", [~(tops << np.uint64(10))], {}, u64), -found)


def test_normal_rises_with_the_word() -> None:
    """Apart from the last places, between neighbours."""
    words = np.linspace(0, 2**32 - 1, 5001).astype(np.uint32)
    assert np.all(np.diff(evaluate("random_normal", [words], {}, u32)) > 0)
    edge = np.uint32(0.075 * 2**32)
    joint = evaluate("random_normal", [edge + np.arange(-50, 50).astype(np.uint32)], {}, u32)
    assert np.all(np.abs(np.diff(joint)) < 1e-6)
