"""`out=` a view: results are written where they lie, with whatever strides, and nothing beside them is touched."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import tilewright as tw

RNG = np.random.default_rng(5)
X = RNG.standard_normal((37, 53)).astype(np.float32)
MARK = np.float32(-7.5)


@tw.kernel
def scaled(x: tw.Array) -> tw.Array:
    return x * 2.0 + 1.0


@tw.kernel
def row_softmax(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        most = tw.max(x[i, :])
        total = tw.sum(tw.exp(x[i, :] - most))
        for j in tw.grid(columns):
            out[i, j] = tw.exp(x[i, j] - most) / total
    return out


@tw.kernel
def shared_product(x: tw.Array) -> tw.Array:
    return x @ (x.T @ x)


@tw.kernel
def blurred(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        if 0 < j < columns - 1:
            out[i, j] = (x[i, j - 1] + x[i, j] + x[i, j + 1]) / 3.0
        else:
            out[i, j] = x[i, j]
    return out


@tw.kernel
def sum_and_rows(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    return x + 1.0, tw.sum(x, axis=1)


@pytest.fixture(autouse=True)
def no_copies() -> Iterator[None]:
    """A copy of a result would warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "offset": lambda whole: whole[2:39, 3:56],
    "every second column": lambda whole: whole[:37, :106:2],
    "every third row": lambda whole: whole[:111:3, 1:54],
    "transposed": lambda whole: whole[:53, :37].T,
    "backwards": lambda whole: whole[40:3:-1, 60:7:-1],
}


@pytest.mark.parametrize("kernel", [scaled, row_softmax, shared_product, blurred], ids=lambda k: k.__name__)
@pytest.mark.parametrize("view", VIEWS)
def test_results_in_views(view: str, kernel: tw.Kernel[[tw.Array], tw.Array]) -> None:
    whole = np.full((120, 120), MARK)
    target = VIEWS[view](whole)
    assert target.shape == X.shape
    for _ in range(2):  # the second call is machine code's alone
        target[...] = np.nan
        assert kernel(X, out=target) is target
        np.testing.assert_allclose(target, kernel(X), rtol=2e-5, atol=1e-5)
    target[...] = MARK
    assert (whole == MARK).all()


def test_other_layouts_after_one_another() -> None:
    """Code for one layout serves no other, and calls without `out=` none of them."""
    whole = np.full((120, 120), MARK)
    for make in (*VIEWS.values(), lambda w: np.ascontiguousarray(w[:37, :53])):
        target = make(whole)
        scaled(X, out=target)
        np.testing.assert_array_equal(target, X * np.float32(2) + np.float32(1))
        np.testing.assert_array_equal(scaled(X), X * np.float32(2) + np.float32(1))


def test_several_results() -> None:
    first, second = np.full((74, 60), MARK)[::2, 4:57], np.full(111, MARK)[::3]
    for _ in range(2):
        sum_and_rows(X, out=(first, second))
        np.testing.assert_array_equal(first, X + np.float32(1))
        np.testing.assert_allclose(second, X.sum(1, dtype=np.float64), rtol=1e-5, atol=1e-5)
    whole = np.empty_like(X)
    sum_and_rows(X, out=(whole, second))
    np.testing.assert_array_equal(whole, X + np.float32(1))


def test_a_view_of_an_input() -> None:
    """The kernel sees what the input was before the call."""
    whole = np.arange(40, dtype=np.float32).reshape(4, 10)
    before = whole.copy()
    scaled(whole[:, :5], out=whole[:, 2:7])
    before[:, 2:7] = before[:, :5] * 2 + 1
    np.testing.assert_array_equal(whole, before)


def test_elements_that_share_memory() -> None:
    """Each of them holds one of the results that belong there."""
    base = np.full(60, MARK)
    target = np.lib.stride_tricks.as_strided(base, (5, 8), (16, 4))
    x = np.ones((5, 8), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaled(x, out=target)
    assert (base[:24] == 3.0).all()
    assert (base[24:] == MARK).all()


def test_no_elements() -> None:
    target = np.full((4, 6), MARK)[:, 3:3]
    assert scaled(np.empty((4, 0), np.float32), out=target) is target


@pytest.mark.parametrize("wrong", [np.empty((80, 60), np.float32)[::2, :53], np.empty((37, 106), np.float64)[:, ::2], np.empty(106, np.float32)[::2]])
def test_what_does_not_fit(wrong: np.ndarray) -> None:
    with pytest.raises(tw.UserError, match="TW018"):
        scaled(X, out=wrong)


def test_a_captured_graph() -> None:
    target = np.full((74, 60), MARK)[::2, 4:57]
    x = X.copy()
    with tw.capture(device="cpu") as graph:
        scaled(x, out=target)
    x += 1
    graph.replay()
    np.testing.assert_array_equal(target, x * np.float32(2) + np.float32(1))
