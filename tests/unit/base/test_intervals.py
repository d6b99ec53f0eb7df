"""Signs, intervals and affine forms: what is proven holds for every number tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.base import intervals
from tilewright.base.affine import AffineForm, combined
from tilewright.base.intervals import (
    Interval,
    clamped,
    constant_floor,
    constant_sign,
    sign_of,
    surely_negative,
    surely_nonnegative,
    surely_positive,
)
from tilewright.base.sizes import ONE, ZERO, Size, ceildiv, floordiv, maximum, minimum, mod

M, N = Size.of("m"), Size.of("n")
TERMS = st.sampled_from([M, N, ONE, M * N, ceildiv(N, 4), floordiv(N, 3), mod(M, 5), minimum(M, N), maximum(M - 3, ZERO), minimum(N, Size.of(4))])
SUMS = st.lists(st.tuples(TERMS, st.integers(-4, 4)), max_size=4).map(lambda terms: sum((t * f for t, f in terms), ZERO))
RANGES = st.tuples(st.integers(-20, 20), st.integers(0, 12)).map(lambda pair: Interval(pair[0], pair[0] + pair[1]))
quick = settings(max_examples=80, deadline=None, database=None)


@quick
@given(SUMS, st.integers(0, 30), st.integers(0, 30))
def test_signs_that_are_proven_hold(size: Size, m: int, n: int) -> None:
    value = size.evaluate({"m": m, "n": n})
    assert not surely_nonnegative(size) or value >= 0
    assert not surely_positive(size) or value > 0
    assert not surely_negative(size) or value < 0
    assert sign_of(size) is None or value * (sign_of(size) or 1) >= 0
    assert clamped(size).evaluate({"m": m, "n": n}) == max(value, 0)
    floor = constant_floor(size, trusts=lambda call: False)
    assert floor is None or value >= floor


def test_signs_that_are_seen() -> None:
    assert surely_nonnegative(ceildiv(N, 4) * 4 - N)
    assert surely_nonnegative(N - floordiv(N, 4) * 4)
    assert surely_nonnegative(N - minimum(M, N))
    assert surely_positive(N + 1) and not surely_positive(N)
    assert surely_negative(-N - 1) and sign_of(M - N) is None
    assert (constant_sign(Size.of(-2)), constant_sign(ZERO), constant_sign(N)) == (-1, 1, None)
    assert constant_floor(N * 2 + 1, {"n": 3}) == 7


PAIRS: dict[str, tuple[Callable[..., Interval[int] | None], Callable[[int, int], int]]] = {
    "add": (lambda a, b: a + b, lambda x, y: x + y),
    "sub": (lambda a, b: a - b, lambda x, y: x - y),
    "product": (intervals.product, lambda x, y: x * y),
    "quotient": (intervals.quotient, lambda x, y: x // y),
    "remainder": (intervals.remainder, lambda x, y: x % y),
    "min": (intervals.least_of, min),
    "max": (intervals.largest_of, max),
    "and": (intervals.bit_and, lambda x, y: x & y),
    "shl": (intervals.shift_left, lambda x, y: x << y),
    "shr": (intervals.shift_right, lambda x, y: x >> y),
}


@pytest.mark.parametrize("name", PAIRS)
def test_intervals_hold_every_result(name: str) -> None:
    combine, compute = PAIRS[name]

    @quick
    @given(RANGES, RANGES)
    def check(a: Interval[int], b: Interval[int]) -> None:
        found = combine(a, b)
        if found is not None:
            results = [compute(x, y) for x in range(a.low, a.high + 1) for y in range(b.low, b.high + 1)]
            assert found.low <= min(results) and max(results) <= found.high

    check()


def test_intervals_that_are_exact() -> None:
    assert -Interval(2, 5) == Interval(-5, -2)
    assert Interval(2, 5).scaled(-3, -1) == Interval(-15, -6)
    assert intervals.hull(Interval(1, 2), Interval(7, 9)) == Interval(1, 9)
    assert (Interval(4, 4).point, Interval(4, 5).point) == (4, None)
    assert intervals.quotient(Interval(1, 2), Interval(0, 3)) is None
    assert intervals.shift_left(Interval(1, 3), Interval(2, 2)) == Interval(4, 12)
    assert intervals.shift_right(Interval(1, 3), Interval(1, 2)) is None
    assert intervals.bit_and(Interval(-4, -1), Interval(-2, 3)) is None


def form(constant: int, **factors: int) -> AffineForm[str]:
    return AffineForm(tuple((name, Size.of(factor)) for name, factor in factors.items()), Size.of(constant))


def test_affine_forms() -> None:
    i, j = form(0, i=1), form(0, j=1)
    both = i.plus(j, Size.of(4)).plus(form(3))
    assert both == form(3, i=1, j=4)
    assert both.minus(i) == form(3, j=4)
    assert both.times(ZERO) == form(0)
    assert (both.factor("j"), both.factor("absent"), both.values) == (Size.of(4), ZERO, ("i", "j"))
    assert (i.bare, both.bare, i.is_just("i")) == ("i", None, True)


def test_affine_operations() -> None:
    i = form(1, i=2)
    assert combined("neg", [i]) == form(-1, i=-2)
    assert combined("add", [i, i]) == form(2, i=4)
    assert combined("sub", [i, i]) == form(0)
    assert combined("mul", [i, form(3)]) == combined("mul", [form(3), i]) == form(3, i=6)
    assert combined("mul", [i, i]) is None
    assert combined("add", [i, None]) is None
    assert combined("div", [i, i]) is None


def test_where_an_affine_form_lies() -> None:
    reach = {"i": Interval(ZERO, N - 1), "j": Interval(ZERO, Size.of(3))}
    assert form(5, i=1, j=-2).interval(reach.get, sign_of) == Interval(Size.of(-1), N + 4)
    assert form(0, k=1).interval(reach.get, sign_of) is None
