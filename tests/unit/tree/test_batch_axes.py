"""Along which axes kernels can be split, and what is said of those that cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kernels_several as kernels
import tilewright as tw
from tilewright.base.errors import UserError
from tilewright.tree.batch_axes import Split, find_split
from tilewright.tree.check.kernel import check_kernel


def split(kernel: Any, *args: object, along: tuple[str, int] | None = None) -> Split:
    runner = kernel.runner
    return find_split(
        check_kernel(runner.function, runner.signature(runner.arguments(kernel.bound(*args), False), False).args), along
    )


MATRIX = np.ones((6, 4), np.float32)
VECTOR = np.ones(6, np.float32)


def test_rows_are_split_and_what_has_none_is_whole() -> None:
    found = split(kernels.product(), MATRIX, np.ones((4, 5), np.float32))
    assert found == Split("n", (("a", 0), ("out", 0)))
    assert found.axis("b") is None
    assert split(kernels.shifted_exp(), MATRIX, np.ones(4, np.float32)).axes == (("x", 0), ("result", 0))


def test_an_axis_can_be_asked_for() -> None:
    kernel, args = kernels.product(), (MATRIX, np.ones((4, 5), np.float32))
    assert split(kernel, *args, along=("b", 1)).axes == (("b", 1), ("out", 1))
    inner = split(kernel, *args, along=("a", 1))
    assert inner.axes == (("a", 1), ("b", 0))
    assert inner.operation("out") == "add"
    for wrong in (("c", 0), ("a", 2), ("a", -1)):
        with pytest.raises(UserError, match=f"no axis {wrong[1]} of '{wrong[0]}'"):
            split(kernel, *args, along=wrong)


def test_reductions_are_combined() -> None:
    assert split(kernels.column_sums(), MATRIX, along=("x", 0)).combined == (("result", "add"),)
    assert split(kernels.column_sums(), MATRIX).axes == (("x", 1), ("result", 0))
    found = split(kernels.extremes(), VECTOR)
    assert [kind for _, kind in found.combined] == ["min", "max", "add"]


def neighbours() -> Any:
    @tw.kernel
    def neighbours(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        out = tw.zeros((n,), x.dtype)
        for i in tw.grid(n - 1):
            out[i] = x[i + 1]
        return out

    return neighbours


def numbered() -> Any:
    @tw.kernel
    def numbered(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i] * i
        return out

    return numbered


def mean_free() -> Any:
    @tw.kernel
    def mean_free(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        total = 0.0
        for i in range(n):
            total += x[i]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i] - total
        return out

    return mean_free


def running() -> Any:
    @tw.kernel
    def running(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        total = 0.0
        for i in range(n):
            total = total * 0.5 + x[i]
            out[i] = total
        return out

    return running


def all_pairs() -> Any:
    @tw.kernel
    def all_pairs(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            total = 0.0
            for j in range(n):
                total += x[i] * x[j]
            out[i] = total
        return out

    return all_pairs


def mean() -> Any:
    @tw.kernel
    def mean(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        total = 0.0
        for i in range(n):
            total += x[i]
        out = tw.empty((1,), x.dtype)
        out[0] = total / n
        return out

    return mean


def from_one() -> Any:
    @tw.kernel
    def from_one(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        total = 1.0
        for i in range(n):
            total += x[i]
        out = tw.empty((1,), x.dtype)
        out[0] = total
        return out

    return from_one


def mixed() -> Any:
    @tw.kernel
    def mixed(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        total = 0.0
        for i in range(n):
            total += x[i]
        out = tw.empty((2,), x.dtype)
        out[0] = total
        out[1] = 5.0
        return out

    return mixed


def counted_once() -> Any:
    @tw.kernel
    def counted_once(x: tw.Array, y: tw.Array) -> tw.Array:
        n, m = x.shape[0], y.shape[0]
        total = 0.0
        for i in range(n):
            total += x[i]
        for j in range(m):
            total += y[j]
        out = tw.empty((1,), x.dtype)
        out[0] = total
        return out

    return counted_once


def spread_sum() -> Any:
    @tw.kernel
    def spread_sum(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        total = 0.0
        for i in range(n):
            total += x[i]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = total
        return out

    return spread_sum


def carried() -> Any:
    """What is accumulated is used at an earlier line, by the next turn of the loop around."""

    @tw.kernel
    def carried(x: tw.Array) -> tw.Array:
        n, m = x.shape
        out = tw.empty((m,), x.dtype)
        total = 0.0
        for j in range(m):
            out[j] = total * 2.0
            for i in range(n):
                total += x[i, j]
        return out

    return carried


@pytest.mark.parametrize(
    ("make", "argument", "reason", "text"),
    [
        (neighbours, VECTOR, "n", "for i in tw.grid(n - 1):"),
        (numbered, VECTOR, "the index 'i' is used as a number", "out[i] = x[i] * i"),
        (mean_free, VECTOR, "'total' accumulates over all of it and is used here", "out[i] = x[i] - total"),
        (running, VECTOR, "'total' is carried from one iteration to the next", "total = total * 0.5 + x[i]"),
        (all_pairs, VECTOR, "for every 'i' the loop over 'j' needs all of it", "for j in range(n):"),
        (mean, VECTOR, "'total' accumulates over all of it and is used here", "out[0] = total / n"),
        (from_one, VECTOR, "does not start from 0", "total = 1.0"),
        (mixed, VECTOR, "does not start from 0", "out[1] = 5.0"),
    ],
)
def test_what_cannot_be_split_says_why_and_where(make: Callable[[], Any], argument: np.ndarray, reason: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        split(make(), argument)
    item = next(d for d in caught.value.diagnostics if reason in d.message)
    assert item.code == "TW012"
    assert "cannot be split along 'n'" in item.message
    assert text in item.span.excerpt()


def test_what_every_part_would_add_is_refused() -> None:
    with pytest.raises(UserError, match="here something that every part would count") as caught:
        split(counted_once(), VECTOR, np.ones(4, np.float32))
    assert "total += y[j]" in caught.value.diagnostics[0].span.excerpt()


def test_a_sum_that_every_row_gets_is_refused() -> None:
    with pytest.raises(UserError, match="'total' accumulates over all of it and is used here"):
        split(spread_sum(), VECTOR)


def test_a_sum_that_the_next_turn_uses_is_found() -> None:
    with pytest.raises(UserError, match="'total' accumulates over all of it and is used here"):
        split(carried(), MATRIX, along=("x", 0))


def test_square_results_of_one_size_are_refused() -> None:
    @tw.kernel
    def outer(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n, n), x.dtype)
        for i, j in tw.grid(n, n):
            out[i, j] = x[i] * x[j]
        return out

    with pytest.raises(UserError, match="the extent of axis 1 of 'out' is n, too"):
        split(outer, VECTOR)


def test_constants_have_no_axis() -> None:
    @tw.kernel
    def first(x: tw.Array) -> tw.Array:
        out = tw.empty((1,), x.dtype)
        out[0] = x[0] * 2.0
        return out

    with pytest.raises(UserError, match="cannot be split along"):
        split(first, VECTOR)
