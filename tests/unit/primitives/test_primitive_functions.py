"""Functions that users give to primitives: which text they are, what they capture, what they become."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tilewright.base.dtypes import DType, bool_, f16, f32, f64, i32, i64, u8
from tilewright.base.errors import UserError
from tilewright.frontend.python.functions import parse_scalar_function
from tilewright.primitives.functions import Monoid, scalar_function
from tilewright.primitives.reduce import is_commutative

FACTOR = 3.5


def helper(v: float) -> float:
    return v * v + FACTOR


def branches(x: float, y: float) -> float:
    if x > y:
        return helper(x)
    z = y - 1
    if z > 0:
        return z
    return math.sqrt(y)


def made(offset: float) -> Callable[[float], float]:
    def inner(a: float) -> float:
        shifted = a + offset
        return shifted * 2

    return inner


def result(function: Callable[..., object], *dtypes: DType) -> DType:
    return scalar_function(parse_scalar_function(function), dtypes).result


def test_results_have_the_dtype_of_the_expression() -> None:
    assert result(lambda x: x * 2 + FACTOR, f32) is f32
    assert result(lambda a, b: a if a > b else b, i32, i32) is i32
    assert result(lambda x: x > 0, f64) is bool_
    assert result(lambda x: 1.0, i32) is f32
    assert result(branches, f32, f32) is f32
    assert result(made(7), f16) is f16
    assert result(lambda x: x / 2, i64) in (f32, f64)


def test_lambdas_on_one_line_are_told_apart() -> None:
    first, second = (lambda x: x + 1), (lambda x: x * 3)
    a, b = (scalar_function(parse_scalar_function(f), (i32,)) for f in (first, second))
    assert [op.opcode for op in a.ops] == ["const", "add"]
    assert [op.opcode for op in b.ops] == ["const", "mul"]
    assert a.key != b.key


def test_captured_values_are_part_of_a_function() -> None:
    keys = {scalar_function(parse_scalar_function(made(k)), (f32,)).key for k in (1, 2, 2.0)}
    assert len(keys) == 3


def test_an_unused_argument_stays_an_argument() -> None:
    last = scalar_function(parse_scalar_function(lambda a, b: b), (u8, u8))
    assert last.value is last.arguments[1] and last.dtypes == (u8, u8)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda a, b: a + b, True), (lambda a, b: b + a + a * b, True), (lambda a, b: b, False), (lambda a, b: a - b, False),
        (lambda a, b: max(a, b), True), (lambda a, b: a if a > b else b, False),
    ],
)  # fmt: skip
def test_only_what_is_proven_counts_as_commutative(function: Callable[..., object], wanted: bool) -> None:
    assert is_commutative(Monoid(i32, function=scalar_function(parse_scalar_function(function), (i32, i32), i32))) is wanted


def no_return(x: float) -> float:  # type: ignore[return]  # noqa: RET503
    if x > 0:
        return x


def recursive(x: float) -> float:
    return recursive(x - 1)


@pytest.mark.parametrize(
    ("function", "code", "text"),
    [
        (no_return, "TW017", "returns a value on some ways through it, and none on others"),
        (recursive, "TW005", "recursive"),
        (math.sqrt, "TW005", "not a function written in Python"),
        (eval("lambda x: x"), "TW007", "source of '<lambda>' is not available"),
        (lambda x: [x], "TW00", ""),
    ],
)
def test_what_is_no_function_of_numbers_is_refused(function: Callable[..., object], code: str, text: str) -> None:
    with pytest.raises(UserError, match=code) as caught:
        scalar_function(parse_scalar_function(function), (f32,))
    assert text in str(caught.value)


def test_the_number_of_arguments_is_checked() -> None:
    with pytest.raises(UserError, match=r"takes 1 number\(s\), but is called with 2"):
        scalar_function(parse_scalar_function(lambda x: x), (f32, f32))
