"""What is proven about sizes must hold for every value of their names."""

from __future__ import annotations

import itertools

import pytest

from tilewright.base.affine import AffineForm
from tilewright.base.dtypes import i64
from tilewright.base.intervals import Interval, clamped, surely_negative, surely_nonnegative
from tilewright.base.sizes import ZERO, Size, floordiv, parse_size
from tilewright.tree.bounds import (
    IndexForm,
    affine,
    disjoint,
    injective,
    interval,
    owns_axis,
)
from tilewright.tree.typed import Apply, Const, IndexRef, LoopVar, SizeValue

PROVABLE = [
    "n", "n + 3", "2*n*m + 1", "n - 2*floordiv(n, 2)", "n - min(n, m)", "max(n, m) - m", "max(n - 1, 0)", "m - mod(n, m)",
    "2*ceildiv(n, 2) - n", "n + 1 - 2*ceildiv(n, 2)", "n*min(m, 1)", "n - 4*floordiv(n, 4) + m",
]  # fmt: skip
OPEN = ["n - 1", "n - m", "floordiv(n, 2) - m", "min(n, m) - 1", "2*floordiv(n, 2) - n", "max(n, m) - n - 1"]


@pytest.mark.parametrize("text", PROVABLE)
def test_proven_and_true(text: str) -> None:
    size = parse_size(text)
    assert surely_nonnegative(size)
    for n, m in itertools.product(range(9), range(9)):
        assert size.evaluate({"n": n, "m": m}) >= 0


@pytest.mark.parametrize("text", OPEN)
def test_what_may_fail_is_not_proven(text: str) -> None:
    assert not surely_nonnegative(parse_size(text))
    assert not surely_negative(parse_size(text))


def test_negative_and_clamped() -> None:
    assert surely_negative(parse_size("0 - n - 1"))
    assert clamped(parse_size("n + 1")) == parse_size("n + 1")
    assert clamped(parse_size("n - 1")) == parse_size("max(n - 1, 0)")


def loop_var(name: str, count: str) -> LoopVar:
    size = parse_size(count)
    return LoopVar(name, Const(0, i64), SizeValue(size), first=ZERO, count=size, low=ZERO, high=size - 1)


ROW, COLUMN = loop_var("i", "n"), loop_var("j", "cols")


def op(name: str, *args: Apply | Const | IndexRef | SizeValue) -> Apply:
    return Apply(name, args, i64)


def number(value: int) -> Const:
    return Const(value, i64)


def test_affine_forms() -> None:
    i, j = IndexRef(ROW), IndexRef(COLUMN)
    form = affine(op("sub", op("mul", number(2), op("add", i, number(3))), op("mul", j, SizeValue(Size.of("n")))))
    assert form == AffineForm(((ROW, Size.of(2)), (COLUMN, -Size.of("n"))), Size.of(6))
    assert affine(op("mul", i, j)) is None
    assert affine(op("floordiv", i, number(2))) is None
    plain = affine(i)
    assert plain is not None
    assert plain.bare is ROW


def test_intervals() -> None:
    i = IndexRef(ROW)
    assert interval(op("sub", number(5), i)) == Interval(parse_size("6 - n"), Size.of(5))
    assert interval(op("floordiv", i, number(2))) == Interval(ZERO, parse_size("floordiv(n - 1, 2)"))
    assert interval(op("mod", op("mul", i, i), number(7))) == Interval(ZERO, Size.of(6))
    assert interval(op("mod", i, SizeValue(Size.of("m")))) == Interval(ZERO, parse_size("max(m - 1, 0)"))
    assert interval(op("mul", i, i)) is None
    assert interval(op("min", i, number(3))) == Interval(ZERO, parse_size("min(n - 1, 3)"))


def indices(*exprs: Apply | Const | IndexRef) -> tuple[IndexForm, ...]:
    found = tuple(affine(e) for e in exprs)
    assert None not in found
    return tuple(f for f in found if f is not None)


def test_injective() -> None:
    i, j = IndexRef(ROW), IndexRef(COLUMN)
    assert injective(indices(i, j), [ROW, COLUMN])
    assert not injective(indices(i), [ROW, COLUMN])
    assert not injective(indices(op("add", i, j)), [ROW, COLUMN])
    assert injective(indices(op("add", op("mul", i, SizeValue(Size.of("cols"))), j)), [ROW, COLUMN])
    assert not injective(indices(op("add", op("mul", i, number(4)), j)), [ROW, COLUMN])
    # Inside blocks of four, the last one short.
    inside = LoopVar("t", Const(0, i64), SizeValue(parse_size("min(4, n)")), low=ZERO, high=parse_size("min(4, n) - 1"))
    assert injective(indices(op("add", op("mul", i, number(4)), IndexRef(inside))), [ROW])
    assert not injective(indices(op("add", op("mul", i, number(3)), IndexRef(inside))), [ROW])


def test_halves_are_disjoint() -> None:
    half = floordiv(Size.of("depth"), 2)
    d = LoopVar("d", number(0), SizeValue(half), first=ZERO, count=half, low=ZERO, high=half - 1)
    low, high = indices(IndexRef(d)), indices(op("add", IndexRef(d), SizeValue(half)))
    assert disjoint(low, high)
    assert not disjoint(low, indices(op("add", IndexRef(d), SizeValue(half - 1))))


def test_disjoint_and_owned() -> None:
    i, j = IndexRef(ROW), IndexRef(COLUMN)
    even, odd = indices(op("mul", i, number(2))), indices(op("add", op("mul", i, number(2)), number(1)))
    assert disjoint(even, odd)
    assert not disjoint(even, indices(op("add", op("mul", i, number(2)), number(4))))
    assert disjoint(indices(i, number(0)), indices(i, number(1)))
    assert not disjoint(indices(i), indices(j))
    assert owns_axis([indices(i, j), indices(i, number(0))], ROW)
    assert not owns_axis([indices(i, j), indices(op("add", i, number(1)), j)], ROW)
