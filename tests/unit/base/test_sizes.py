"""Symbolic sizes: arithmetic agrees with integers, equal sizes compare equal, text comes back, divisibility is never claimed wrongly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.base.sizes import (
    CALLS,
    ONE,
    ZERO,
    Size,
    ceildiv,
    contiguous_strides,
    floordiv,
    maximum,
    minimum,
    mod,
    parse_size,
    product,
)

NAMES = ("m", "n", "rows")
M, N, ROWS = (Size.of(name) for name in NAMES)
VALUES = st.fixed_dictionaries({name: st.integers(0, 40) for name in NAMES})
ATOMS = st.one_of(st.integers(-9, 9).map(Size.of), st.sampled_from([M, N, ROWS]))


def _grown(inner: st.SearchStrategy[Size]) -> st.SearchStrategy[Size]:
    pairs = st.tuples(inner, inner)
    calls = st.tuples(st.sampled_from(sorted(CALLS)), inner, st.integers(1, 16).map(Size.of))
    made = {"floordiv": floordiv, "ceildiv": ceildiv, "mod": mod, "min": minimum, "max": maximum}
    return st.one_of(
        pairs.map(lambda p: p[0] + p[1]), pairs.map(lambda p: p[0] - p[1]), pairs.map(lambda p: p[0] * p[1]),
        calls.map(lambda c: made[c[0]](c[1], c[2])),
    )  # fmt: skip


SIZES = st.recursive(ATOMS, _grown, max_leaves=6)
quick = settings(max_examples=60, deadline=None, database=None)


@quick
@given(SIZES, SIZES, VALUES)
def test_arithmetic_is_that_of_integers(a: Size, b: Size, values: dict[str, int]) -> None:
    x, y = a.evaluate(values), b.evaluate(values)
    assert (a + b).evaluate(values) == x + y
    assert (a - b).evaluate(values) == x - y
    assert (a * b).evaluate(values) == x * y
    assert (-a).evaluate(values) == -x
    assert (3 - a).evaluate(values) == 3 - x
    assert minimum(a, b).evaluate(values) == min(x, y)
    assert maximum(a, b).evaluate(values) == max(x, y)


@quick
@given(SIZES, st.integers(1, 16), VALUES)
def test_division_is_that_of_integers(a: Size, divisor: int, values: dict[str, int]) -> None:
    x = a.evaluate(values)
    assert (a // divisor).evaluate(values) == x // divisor
    assert (a % divisor).evaluate(values) == x % divisor
    assert ceildiv(a, divisor).evaluate(values) == -(-x // divisor)


@quick
@given(SIZES, SIZES, SIZES)
def test_equal_sizes_compare_equal(a: Size, b: Size, c: Size) -> None:
    assert a + b == b + a
    assert a * b == b * a
    assert (a + b) * c == a * c + b * c
    assert a - a == ZERO
    assert hash(a + b) == hash(b + a)


@quick
@given(SIZES)
def test_text_comes_back(size: Size) -> None:
    assert parse_size(str(size)) == size


@quick
@given(SIZES, SIZES, VALUES)
def test_substitution(size: Size, inner: Size, values: dict[str, int]) -> None:
    put = size.substitute({"n": inner})
    assert put.evaluate(values) == size.evaluate({**values, "n": inner.evaluate(values)})
    assert size.substitute({"absent": inner}) is size


@quick
@given(SIZES, st.integers(1, 16), st.sampled_from([1, 2, 4, 8, 16]), VALUES)
def test_divisibility_is_never_claimed_wrongly(size: Size, divisor: int, fact: int, values: dict[str, int]) -> None:
    facts = {"n": fact, "m": 8}
    multiples = {name: value * facts.get(name, 1) for name, value in values.items()}
    if size.divisible_by(divisor, facts):
        assert size.evaluate(multiples) % divisor == 0


def test_divisibility_that_is_seen() -> None:
    assert (N * 4 + 8).divisible_by(4)
    assert not (N * 4 + 2).divisible_by(4)
    assert (M * N).divisible_by(16, {"m": 2, "n": 8})
    assert ZERO.divisible_by(7)


def test_what_a_size_is() -> None:
    assert (Size.of(7).constant, ZERO.constant, N.constant) == (7, 0, None)
    assert (N.name, (N * 2).name, (N + 1).name, Size.of(3).name) == ("n", None, None, None)
    assert (N * M + ceildiv(ROWS, 4)).names == {"m", "n", "rows"}
    assert Size.of(N) is N


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (ZERO, "0"), (ONE, "1"), (N + 1, "n + 1"), (1 - N, "-n + 1"), (2 * N * M - 4, "2*m*n - 4"),
        (ceildiv(N, 128), "ceildiv(n, 128)"), (N % 4, "mod(n, 4)"), (minimum(N, M) * 3, "3*min(m, n)"),
    ],
)  # fmt: skip
def test_text(size: Size, text: str) -> None:
    assert str(size) == text


def test_trivial_calls_fold() -> None:
    assert floordiv(N, 1) == N
    assert mod(N, 1) == ZERO
    assert ceildiv(N * 8, 4) == N * 2
    assert minimum(N, N + 1) == N
    assert maximum(N, N + 1) == N + 1
    assert minimum(M, N) == minimum(N, M)
    assert floordiv(7, 0) == ZERO


def test_shapes() -> None:
    assert contiguous_strides((M, N, Size.of(3))) == (N * 3, Size.of(3), ONE)
    assert contiguous_strides(()) == ()
    assert product([M, N, Size.of(2)]) == 2 * M * N
    assert product([]) == ONE


@pytest.mark.parametrize("text", ["", "n +", "2 3", "min(n)", "(n", "n $ m", "ceildiv(n, )"])
def test_text_that_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="bad size"):
        parse_size(text)
