"""Reductions in loops of ordinary code: what names hold after the loop, on the emulator and on the CPU, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tilewright as tw

counted = 0


@pytest.fixture(autouse=True, params=["emulator", "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    before = tw.default_device()
    tw.set_default_device(request.param)
    yield request.param
    tw.set_default_device(before)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def add_up(x: Any, total: Any) -> Any:
    for i in tw.prange(len(x)):
        total += x[i]
    return total


@pytest.mark.parametrize("n", [0, 1, 31, 33, 257])
def test_a_sum_begins_with_the_old_value(n: int) -> None:
    x = random(n)
    total = add_up(x, 0.5)
    assert type(total) is float
    assert total == pytest.approx(0.5 + float(x.astype(np.float64).sum()), rel=1e-5, abs=1e-5)


def test_accumulators_follow_the_language() -> None:
    many = np.full(300, 200, np.uint8)
    assert add_up(many, 0) == 60000 and type(add_up(many, 0)) is int
    assert add_up(many, -1) == 59999
    assert add_up(np.full(9, 2**31 - 1, np.int32), 0) == 9 * (2**31 - 1)
    assert add_up(np.full(2, 2**63, np.uint64), 1) == 1  # It wraps as 64 bits do.
    assert add_up(np.full(300, 2**62 + 1, np.int64)[:1], 2) == 2**62 + 3
    halves = np.full(4001, 1, np.float16)
    assert add_up(halves, 0) == 4001.0  # In f32: f16 ends at 2048.
    narrow = add_up(halves, np.float16(0))
    assert narrow == 4001 and type(narrow) is np.float32
    wide = add_up(np.full(5, 0.1, np.float32), np.float64(0))
    assert type(wide) is np.float64 and wide == 5 * float(np.float32(0.1))
    tenths = add_up(np.full(1000, 0.1), 0.0)
    assert tenths == pytest.approx(100, rel=1e-13)
    large = add_up(np.full(3, 2**30, np.int32), 0.5)  # A Python float that met integers alone.
    assert type(large) is float and large == 3 * 2**30 + 0.5
    half_way = 0.0
    for i in tw.prange(3):
        half_way += 16777217.0 + 0.0 * i
    assert half_way == 3 * 16777217.0  # Python's floats alone: f64.
    signed = add_up(np.full(7, -3, np.int8), np.int8(0))
    assert type(signed) is np.int64 and signed == -21


def test_several_reductions_with_elements_written_and_a_serial_loop() -> None:
    x, out = random(37, 11), np.zeros(37, np.float32)
    total, largest, smallest, product, count, all_small, some_large = 1.0, -np.inf, np.inf, 1.0, 0, True, False
    for i in tw.prange(37):
        row = 0.0
        for j in range(11):
            row += x[i, j]
            total = total + x[i, j] * 2.0
            if x[i, j] > 0:
                count += 1
            largest = max(largest, x[i, j])
            smallest = min(x[i, j], 0.25, smallest)
        product *= 1.0 + 0.01 * x[i, 0]
        all_small = all_small and x[i, 1] < 10
        some_large = x[i, 2] > 10 or some_large
        out[i] = row
    double = x.astype(np.float64)
    np.testing.assert_allclose(out, double.sum(1), rtol=1e-4, atol=1e-5)
    assert total == pytest.approx(1 + 2 * double.sum(), rel=1e-5)
    assert count == int((x > 0).sum())
    assert (largest, smallest) == (float(x.max()), min(0.25, float(x.min())))
    assert product == pytest.approx(float(np.prod(1 + 0.01 * double[:, 0])), rel=1e-5)
    assert all_small is True and some_large is False


def test_subtraction_division_and_bits() -> None:
    x = np.arange(1, 20, dtype=np.int32)
    left, share, bits, ones, both = 1000, 1.0, 0, -1, 5
    for i in tw.prange(len(x)):
        left -= x[i]
        share /= 1.0 + x[i] * 0.1
        bits |= x[i]
        ones &= x[i] | 64
        both ^= x[i]
    assert left == 1000 - 190
    assert share == pytest.approx(float(1 / np.prod(1 + x * 0.1)), rel=1e-5)
    assert (bits, ones, both) == (31, 64, 5 ^ int(np.bitwise_xor.reduce(x)))


def test_extremes_of_integers_and_nothing() -> None:
    def extremes(x: np.ndarray, low: Any, high: Any) -> tuple[Any, Any]:
        for i in tw.prange(len(x)):
            low = np.minimum(low, x[i])
            high = tw.maximum(high, x[i])
        return low, high

    x = np.array([5, -7, 3], np.int32)
    assert extremes(x, 0, 0) == (-7, 5)
    assert extremes(x, -9, 9) == (-9, 9)
    low, high = extremes(x, np.int32(0), np.int32(0))
    assert (type(low), type(high)) == (np.int32, np.int32)
    assert extremes(x[:0], 1, 2) == (1, 2)
    large = np.array([2**64 - 1, 2**63], np.uint64)
    assert extremes(large, 2**64 - 2, 7) == (2**63, 2**64 - 1)
    assert all(np.isnan(extremes(np.array([1, np.nan, 2], np.float32), 0.0, 0.0)))
    assert extremes(np.array([np.inf, -np.inf], np.float32), 0.0, 0.0) == (-np.inf, np.inf)


def test_continue_steps_and_strides() -> None:
    x = random(200)[::2]
    total = 0.0
    for i in tw.prange(90, 3, -4):
        if x[i] < 0:
            continue
        total += x[i]
    picked = x[90:3:-4].astype(np.float64)
    assert total == pytest.approx(picked[picked >= 0].sum(), rel=1e-6)


def test_more_numbers_than_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.api import regions

    monkeypatch.setattr(regions, "_MOST_BLOCKS", 2)
    x, out = random(301), np.zeros(301, np.float32)
    total = 0.0
    for i in tw.prange(301, block=32):
        if i % 7 == 3:
            continue
        out[i] = 2 * x[i]
        total += x[i]
    wanted = np.where(np.arange(301) % 7 == 3, 0, x)
    np.testing.assert_array_equal(out, 2 * wanted)
    assert total == pytest.approx(float(wanted.astype(np.float64).sum()), rel=1e-5)


def test_regions_reduce_too() -> None:
    global counted
    x = random(5, 7)
    total, counted = 0.0, 3
    for i, j in tw.parallel_gpu((5, 7), 32):
        total += x[i, j]
        counted += 1
    assert total == pytest.approx(float(x.astype(np.float64).sum()), rel=1e-5)
    assert counted == 38

    @tw.parallel_gpu(5)
    def _(i: int) -> None:
        nonlocal total
        global counted
        if i == 0:
            return
        total += 1
        counted -= i

    assert total == pytest.approx(4 + float(x.astype(np.float64).sum()), rel=1e-5)
    assert counted == 28


def test_variables_that_functions_share() -> None:
    total = 1.0

    def inner(x: np.ndarray) -> None:
        nonlocal total
        for i in tw.prange(len(x)):
            total += x[i]

    inner(np.ones(5, np.float32))
    inner(np.ones(5, np.float32))
    assert total == 11.0


def refused(function: Callable[..., object], *args: object) -> str:
    with pytest.raises(tw.UserError) as caught:
        function(*args)
    first = function.__code__.co_firstlineno
    text = caught.value.diagnostics[0].message
    for line in range(first + 9, first, -1):
        text = text.replace(f"line {line}", f"line +{line - first}")
    return text


CARRIED = "is carried from one iteration to the next:"


def test_what_is_no_reduction() -> None:
    def read(x: np.ndarray, out: np.ndarray) -> None:
        total = 0.0
        for i in tw.prange(len(x)):
            total += x[i]
            out[i] = total

    def read_before(x: np.ndarray, total: float) -> None:
        for i in tw.prange(len(x)):
            if total < 5:
                total += x[i]

    def read_in_itself(x: np.ndarray, total: float) -> None:
        for i in tw.prange(len(x)):
            total += x[i] * total

    def two_ways(x: np.ndarray, total: float) -> None:
        for i in tw.prange(len(x)):
            total += x[i]
            total *= 2.0

    def set_anew(x: np.ndarray, total: float) -> None:
        for i in tw.prange(len(x)):
            if x[i] > 0:
                total = 0.0
            total += x[i]

    def turned(x: np.ndarray, total: float) -> None:
        for i in tw.prange(len(x)):
            total = x[i] - total

    def other_max(x: np.ndarray, best: float) -> None:
        max = add_up
        for i in tw.prange(len(x)):
            best = max(best, x[i])

    def without(x: np.ndarray) -> None:
        for i in tw.prange(len(x)):
            absent += x[i]  # type: ignore[name-defined]  # noqa: F821, F841

    def dependent(x: np.ndarray, total: float) -> None:
        for i in tw.prange(1, len(x)):
            x[i] = x[i - 1]
            total += x[i]

    def own(x: np.ndarray, total: float) -> None:
        @tw.parallel_gpu(len(x))
        def body(i: int) -> None:
            total += x[i]  # noqa: F823, F841

    def logical(x: np.ndarray, some: int) -> None:
        for i in tw.prange(len(x)):
            some = some or x[i] > 0

    def together(x: np.ndarray, total: float) -> None:
        for i in tw.parallel_gpu(32, 32):
            shared = tw.shared(32, tw.f32)
            shared[i] = x[i]
            tw.barrier()
            total += shared[31 - i]

    x, out = random(50), np.zeros(50, np.float32)
    before = x.copy()
    assert refused(read, x, out) == f"'total' {CARRIED} written at line +3, read at line +4"
    assert refused(read_before, x, 0.0) == f"'total' {CARRIED} written at line +3, read at line +2"
    assert refused(read_in_itself, x, 0.0) == f"'total' {CARRIED} written at line +2, read at line +2"
    assert refused(two_ways, x, 0.0) == f"'total' {CARRIED} combined by '+' at line +2, by '*' at line +3"
    assert refused(set_anew, x, 0.0) == f"'total' {CARRIED} written at line +3, read at line +4"
    assert refused(turned, x, 0.0) == f"'total' {CARRIED} written at line +2, read at line +2"
    assert refused(other_max, x, 0.0) == f"'best' {CARRIED} 'max' is not Python's"
    assert refused(without, x) == "'absent' has no value before the loop"
    assert "line +2 writes it, line +2 reads it" in refused(dependent, x, 0.0)
    assert refused(own, x, 0.0).startswith(f"'total' {CARRIED} written")
    assert refused(logical, x, 0).startswith("'a or b' of numbers is one of them in Python")
    assert "through shared memory or barriers" in refused(together, x, 0.0)
    assert refused(add_up, x, np.zeros(3)) == "'total' is a ndarray before the loop, and iterations combine numbers into it"
    assert refused(add_up, x, 1j) == "'total' is a complex before the loop, and iterations combine numbers into it"
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(out, 0)
