"""Loops of ordinary code as kernels: what they compute on the emulator, and what is refused with which text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewright as tw

FACTOR = 3.0


def twice(value: float) -> float:
    return 2 * value


@pytest.fixture(autouse=True)
def on_the_emulator() -> Any:
    before = tw.default_device()
    tw.set_default_device("emulator")
    yield
    tw.set_default_device(before)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("n", [0, 1, 31, 33, 257])
def test_a_region_captures_what_is_around_it(n: int) -> None:
    x, y = random(n), random(n)
    before = y.copy()
    a = np.float32(0.5)
    for i in tw.parallel_gpu(n, 32):
        if x[i] < 0:
            continue
        y[i] = a * x[i] + FACTOR * twice(y[i])
    np.testing.assert_allclose(y, np.where(x < 0, before, a * x + FACTOR * 2 * before), rtol=1e-6)


def test_points() -> None:
    out = np.zeros((5, 7, 3), np.int64)
    for i, j, k in tw.parallel_gpu((5, 7, 3), 64):
        out[i, j, k] = 100 * i + 10 * j + k
    i, j, k = np.indices(out.shape)
    np.testing.assert_array_equal(out, 100 * i + 10 * j + k)


def test_as_a_decorator() -> None:
    x, out = random(50), np.zeros(50, np.float32)

    @tw.parallel_gpu(50)
    def body(i: int) -> None:
        out[i] = x[49 - i]

    assert body is None
    np.testing.assert_array_equal(out, x[::-1])


def test_code_is_made_again_for_other_surroundings() -> None:
    def apply(function: Callable[[float], float], x: np.ndarray) -> np.ndarray:
        out = np.zeros_like(x)
        for i in tw.parallel_gpu(len(x)):
            out[i] = function(x[i])
        return out

    x = random(9)
    np.testing.assert_array_equal(apply(twice, x), 2 * x)
    np.testing.assert_array_equal(apply(lambda v: v - v, x), 0 * x)
    np.testing.assert_array_equal(apply(twice, x.astype(np.float64)), 2 * x.astype(np.float64))


def test_proven_loops() -> None:
    x = random(120)

    def own(out: np.ndarray, x: np.ndarray) -> None:
        for i in tw.prange(len(x)):
            out[i] += x[i]

    def odd_and_even(x: np.ndarray) -> None:
        for i in tw.prange(0, len(x), 2):
            x[i] = x[i + 1]

    def stretches(out: np.ndarray, x: np.ndarray, m: int) -> None:
        for i in tw.prange(len(x) // m):
            for j in range(m):
                out[i * m + j] = x[i * m + m - 1 - j]

    def columns(out: np.ndarray, x: np.ndarray) -> None:
        for j in tw.prange(10):
            for i in range(1, 12):
                out[i, j] = out[i - 1, j] + x[i, j]

    def backwards(out: np.ndarray, x: np.ndarray) -> None:
        for i in tw.prange(len(x) - 1, -1, -1):
            out[i] = x[i]

    out = x.copy()
    own(out, x)
    np.testing.assert_array_equal(out, 2 * x)
    own(out, out)
    np.testing.assert_array_equal(out, 4 * x)
    out = x.copy()
    odd_and_even(out)
    np.testing.assert_array_equal(out, np.repeat(x[1::2], 2))
    stretches(out, x, 8)
    np.testing.assert_array_equal(out, x.reshape(-1, 8)[:, ::-1].ravel())
    sums = np.zeros((12, 10), np.float32)
    columns(sums, np.ones((12, 10), np.float32))
    np.testing.assert_array_equal(sums, np.repeat(np.arange(12), 10).reshape(12, 10))
    backwards(out, x)
    np.testing.assert_array_equal(out, x)


def refused(function: Callable[..., object], *args: object) -> str:
    with pytest.raises(tw.UserError) as caught:
        function(*args)
    first = function.__code__.co_firstlineno
    text = caught.value.diagnostics[0].message
    for line in range(first + 9, first, -1):
        text = text.replace(f"line {line}", f"line +{line - first}")
    return text


NOT_PARALLEL = "the loop is not parallel as far as can be seen: iterations may touch the same element of"


def test_dependences_are_named_with_both_lines() -> None:
    def previous(x: np.ndarray) -> None:
        for i in tw.prange(1, len(x)):
            y = x[i - 1]
            x[i] = y

    def one_place(x: np.ndarray) -> None:
        for i in tw.prange(len(x)):
            x[0] = i

    def gather(x: np.ndarray, k: np.ndarray) -> None:
        for i in tw.prange(len(x)):
            x[k[i]] = 1.0

    def carried(x: np.ndarray) -> None:
        total = 0.0
        for i in tw.prange(len(x)):
            total = x[i] - total

    def sometimes(x: np.ndarray) -> None:
        best = 0.0
        for i in tw.prange(len(x)):
            if x[i] > 0:
                best = x[i]
            x[i] = best

    def overlapping_stretches(x: np.ndarray) -> None:
        for i in tw.prange(10):
            for j in range(4):
                x[i * 3 + j] = j

    x = random(50)
    before = x.copy()
    assert refused(previous, x) == f"{NOT_PARALLEL} 'x': line +3 writes it, line +2 reads it in another iteration"
    assert refused(one_place, x) == f"{NOT_PARALLEL} 'x': line +2 writes it, line +2 writes it in another iteration"
    assert refused(gather, x, np.arange(50)) == f"{NOT_PARALLEL} 'x': line +2 writes it, line +2 writes it in another iteration"
    assert refused(carried, x) == "'total' is carried from one iteration to the next: written at line +3, read at line +3"
    assert refused(sometimes, x) == "'best' is carried from one iteration to the next: written at line +4, read at line +5"
    assert refused(overlapping_stretches, x) == f"{NOT_PARALLEL} 'x': line +3 writes it, line +3 writes it in another iteration"
    np.testing.assert_array_equal(x, before)


def test_a_negative_number_proves_nothing() -> None:
    def shifted(x: np.ndarray, m: int) -> None:
        for i in tw.prange(5):
            x[i * (m + 1)] = i

    x = np.zeros(20, np.float32)
    shifted(x, 2)
    np.testing.assert_array_equal(x[::3][:5], np.arange(5))
    assert refused(shifted, x, -1).startswith(NOT_PARALLEL)


def test_shared_memory_is_found() -> None:
    def copy(out: np.ndarray, x: np.ndarray) -> None:
        for i in tw.prange(len(out)):
            out[i] = x[i]

    x = random(20)
    assert "'out' and 'x' share memory" in refused(copy, x[1:11], x[:10])
    copy(x[:10], x[10:])
    np.testing.assert_array_equal(x[:10], x[10:])


def test_what_a_body_cannot_do() -> None:
    def breaks(x: np.ndarray) -> None:
        for i in tw.parallel_gpu(10):
            if x[i] > 0:
                break

    def returns(x: np.ndarray) -> None:
        for i in tw.parallel_gpu(10):
            while x[i] > 0:
                return

    def otherwise(x: np.ndarray) -> None:
        for i in tw.parallel_gpu(10):
            x[i] = 0
        else:
            x[0] = 1

    def three(x: np.ndarray) -> None:
        for i, j, k in tw.parallel_gpu((2, 5)):
            x[i, j] = k

    x = random(10)
    assert refused(breaks, x) == "'break' ends iterations that run at the same time"
    assert refused(returns, x) == "'return' inside a loop that becomes a kernel"
    assert refused(otherwise, x) == "'else' of a loop that becomes a kernel"
    assert refused(three, x) == "the loop counts with 3 name(s) over 2 extent(s)"
    assert refused(lambda: list(tw.parallel_gpu(10))) == "tw.parallel_gpu(10, 256) is not what a 'for' goes over"
    assert refused(lambda: tw.parallel_gpu(-1)) == "tw.parallel_gpu(-1, 256): -1 is not a number of iterations"
    assert refused(lambda: tw.parallel_gpu(5, 2000)) == "tw.parallel_gpu(5, 2000): the block is 2000"
    assert refused(lambda: tw.prange(0, 5, 0)) == "tw.prange(0, 5, 0): the step is 0"
    assert refused(lambda: tw.prange(2.5)) == "tw.prange(2.5): 2.5 is not an integer"  # type: ignore[arg-type]
    with pytest.raises(tw.UserError, match="is not available"):
        exec(" ".join(("for i in tw.prange(5):", "pass")), {"tw": tw})  # nobody holds the text
