"""Scratch arrays of which each iteration of a loop reads only what it wrote itself: iterations have parts of their own, and run in any order."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.tree.typed_walk import walk

RNG = np.random.default_rng(37)


def thomas(a, b, c, d):  # type: ignore[no-untyped-def]
    m, n = b.shape
    x = tw.zeros((m, n), dtype=b.dtype)
    cp = tw.zeros((n,), dtype=b.dtype)
    dp = tw.zeros((n,), dtype=b.dtype)
    for r in range(m):
        cp[0] = c[r, 0] / b[r, 0]
        dp[0] = d[r, 0] / b[r, 0]
        for i in range(1, n):
            den = b[r, i] - a[r, i] * cp[i - 1]
            cp[i] = c[r, i] / den
            dp[i] = (d[r, i] - a[r, i] * dp[i - 1]) / den
        x[r, n - 1] = dp[n - 1]
        for i in range(n - 2, -1, -1):
            x[r, i] = dp[i] - cp[i] * x[r, i + 1]
    return x


def thomas_in_one(a, b, c, d):  # type: ignore[no-untyped-def]
    m, n = b.shape
    x = tw.zeros((m, n), dtype=b.dtype)
    cp = tw.zeros((2, n), dtype=b.dtype)
    for r in tw.grid(m):
        for i in range(n):
            if i == 0:
                cp[0, 0] = c[r, 0] / b[r, 0]
                cp[1, 0] = d[r, 0] / b[r, 0]
            else:
                den = b[r, i] - a[r, i] * cp[0, i - 1]
                cp[0, i] = c[r, i] / den
                cp[1, i] = (d[r, i] - a[r, i] * cp[1, i - 1]) / den
        for k in range(n):
            i = n - 1 - k
            x[r, i] = cp[1, i]
            if k > 0:
                x[r, i] -= cp[0, i] * x[r, i + 1]
    return x


def gauss(m, b):  # type: ignore[no-untyped-def]
    batch, n, _ = m.shape
    x = tw.zeros((batch, n), dtype=m.dtype)
    a = tw.zeros((8, 9), dtype=m.dtype)
    for s in range(batch):
        for i in range(n):
            for j in range(n):
                a[i, j] = m[s, i, j]
            a[i, n] = b[s, i]
        for k in range(n):
            best = k
            for i in range(k + 1, n):
                if abs(a[i, k]) > abs(a[best, k]):
                    best = i
            for j in range(k, n + 1):
                t = a[k, j]
                a[k, j] = a[best, j]
                a[best, j] = t
            for i in range(k + 1, n):
                f = a[i, k] / a[k, k]
                for j in range(k, n + 1):
                    a[i, j] -= f * a[k, j]
        for i in range(n - 1, -1, -1):
            v = a[i, n]
            for j in range(i + 1, n):
                v -= a[i, j] * x[s, j]
            x[s, i] = v / a[i, i]
    return x


def binomial(s, k, steps: int):  # type: ignore[no-untyped-def]
    n = s.shape[0]
    out = tw.zeros((n,), dtype=s.dtype)
    v = tw.full((65,), 7, dtype=s.dtype)
    for o in range(n):
        for i in range(steps + 1):
            v[i] = max(s[o] + 0.25 * (2 * i - steps) - k[0], 0.0)
        for t in range(steps):
            for i in range(steps - t):
                v[i] = 0.5 * v[i + 1] + 0.25 * v[i]
        out[o] = v[0]
    return out


def histogram(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows, 5), tw.i64)
    h = tw.zeros((5,), tw.i64)
    for r in range(rows):
        for b in range(5):
            h[b] = 0
        for i in range(n):
            h[x[r, i]] += 1
        for b in range(5):
            out[r, b] = h[b]
    return out


def sorted_rows(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows, n), dtype=x.dtype)
    v = tw.zeros((40,), dtype=x.dtype)
    for r in range(rows):
        for i in range(n):
            v[i] = x[r, i]
        for i in range(1, n):
            key = v[i]
            j = i - 1
            while j >= 0 and v[j] > key:
                v[j + 1] = v[j]
                j -= 1
            v[j + 1] = key
        for i in range(n):
            out[r, i] = v[i]
    return out


def network(x):  # type: ignore[no-untyped-def]
    rows, cols, _ = x.shape
    out = tw.zeros((rows, cols), dtype=x.dtype)
    v = tw.zeros((3,), dtype=x.dtype)
    for r in range(rows):
        for c in range(cols):
            v[0] = x[r, c, 0]
            v[1] = x[r, c, 1]
            v[2] = x[r, c, 2]
            for _ in range(3):
                for i in range(2):
                    if v[i] > v[i + 1]:
                        t = v[i]
                        v[i] = v[i + 1]
                        v[i + 1] = t
            out[r, c] = v[1]
    return out


def ring(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows, n), dtype=x.dtype)
    last = tw.zeros((4,), dtype=x.dtype)
    for r in range(rows):
        for k in range(4):
            last[k] = 0.0
        total = 0.0
        for i in range(n):
            total += x[r, i] - last[i % 4]
            last[i % 4] = x[r, i]
            out[r, i] = total
    return out


def from_the_end(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows, n), dtype=x.dtype)
    v = tw.zeros((n + 1,), dtype=x.dtype)
    for r in range(rows):
        v[n] = x[r, 0]
        for i in range(n - 1, -1, -1):
            v[i] = 0.5 * v[i + 1] + x[r, i]
        for i in range(n):
            out[r, n - 1 - i] = v[n - i] + v[i]
    return out


def lu(m):  # type: ignore[no-untyped-def]
    batch, n, _ = m.shape
    out = tw.zeros((batch,), dtype=m.dtype)
    a = tw.zeros((n, n), dtype=m.dtype)
    for s in range(batch):
        for i in range(n):
            for j in range(n):
                a[i, j] = m[s, i, j]
        det = 1.0
        for k in range(n):
            det *= a[k, k]
            for i in range(k + 1, n):
                a[i, k] /= a[k, k]
                for j in range(k + 1, n):
                    a[i, j] -= a[i, k] * a[k, j]
        out[s] = det
    return out


def of_two_loops(x):  # type: ignore[no-untyped-def]
    rows, cols, n = x.shape
    out = tw.zeros((rows, cols, n), dtype=x.dtype)
    v = tw.zeros((n,), dtype=x.dtype)
    for r, c in tw.grid(rows, cols):
        v[0] = x[r, c, 0]
        for i in range(1, n):
            v[i] = 0.5 * v[i - 1] + x[r, c, i]
        for i in range(n):
            out[r, c, i] = v[n - 1 - i]
    return out


def in_a_branch(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows,), dtype=x.dtype)
    v = tw.zeros((3, n), dtype=x.dtype)
    for r in range(rows):
        if x[r, 0] > 0:
            for i in range(n):
                v[1, i] = x[r, i]
        else:
            for i in range(n):
                v[1, i] = -x[r, i]
        for _ in range(3):
            for i in range(1, n):
                v[1, i] += v[1, i - 1]
        out[r] = v[1, n - 1]
    return out


def place_of_the_least(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows, n), dtype=x.dtype)
    v = tw.zeros((50,), dtype=x.dtype)
    for r in range(rows):
        for i in range(n):
            v[i] = x[r, i]
        for k in range(n):
            at = k
            for i in range(k, n):
                if v[i] < v[at]:
                    at = i
            out[r, k] = v[at]
            v[at] = v[k]
    return out


def rows_of(*shape: int) -> tuple[np.ndarray, ...]:
    return (RNG.standard_normal(shape),)


def systems(m: int, n: int) -> tuple[np.ndarray, ...]:
    return tuple(RNG.random((m, n)) + (3 if k == 1 else 0) for k in range(4))


SIZES = (0, 1, 2, 31, 33)
CALLS: dict[Any, list[tuple[Any, ...]]] = {
    thomas: [systems(m, n) for m in SIZES for n in (1, 2, 7, 33)],
    thomas_in_one: [systems(m, n) for m in SIZES for n in (1, 2, 7, 33)],
    gauss: [(RNG.random((m, n, n)), RNG.random((m, n))) for m in (1100, *SIZES) for n in (0, 1, 3, 8)],
    binomial: [(RNG.random(m) + 2, np.array([1.5]), steps) for m in (*SIZES, 9000) for steps in (-9, -1, 0, 1, 5, 64) if m < 100 or steps == 5] + [(RNG.random(5) + 2, np.array([1.5]), 7)],
    histogram: [(RNG.integers(0, 5, (m, n)),) for m in SIZES for n in (0, 1, 9)],
    sorted_rows: [rows_of(m, n) for m in SIZES for n in (0, 1, 2, 9)],
    network: [rows_of(m, c, 3) for m, c in ((0, 1), (1, 1), (3, 0), (5, 31), (33, 67))],
    ring: [rows_of(m, n) for m in SIZES for n in (0, 1, 3, 13)],
    from_the_end: [rows_of(m, n) for m in SIZES for n in (1, 3, 13)],
    lu: [(RNG.random((m, n, n)) + n * np.eye(n),) for m in SIZES for n in (0, 1, 2, 7)],
    of_two_loops: [rows_of(m, c, n) for m, c in ((0, 2), (1, 1), (3, 0), (5, 31), (33, 67)) for n in (1, 6)],
    in_a_branch: [rows_of(m, n) for m in SIZES for n in (1, 5)],
    place_of_the_least: [rows_of(m, n) for m in SIZES for n in (0, 1, 9)],
}


# -- what stays as it is ----------------------------------------------------------------------------------------


def reads_the_fill(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows,), dtype=x.dtype)
    v = tw.zeros((n + 1,), dtype=x.dtype)
    for r in range(rows):
        for i in range(n):
            v[i] = x[r, i]
        for t in range(n):
            for i in range(n - t):
                v[i] = 0.5 * v[i + 1] + v[i]
        out[r] = v[0]
    return out


def reads_the_row_before(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows, n), dtype=x.dtype)
    v = tw.zeros((n,), dtype=x.dtype)
    for r in range(rows):
        for i in range(n):
            out[r, i] = v[i]
            v[i] = x[r, i]
    return out


def is_read_after(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((n,), dtype=x.dtype)
    v = tw.zeros((n,), dtype=x.dtype)
    y = tw.zeros((rows, n), dtype=x.dtype)
    for r in range(rows):
        v[0] = x[r, 0]
        for i in range(1, n):
            v[i] = v[i - 1] + x[r, i]
        for i in range(n):
            y[r, i] = v[i]
    for i in range(n):
        out[i] = v[i] + (y[rows - 1, i] if rows > 0 else 0.0)
    return out


def is_returned(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    v = tw.zeros((n,), dtype=x.dtype)
    for r in range(rows):
        v[0] = x[r, 0]
        for i in range(1, n):
            v[i] = v[i - 1] + x[r, i]
    return v


def counts_on(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows,), dtype=x.dtype)
    h = tw.zeros((3,), dtype=x.dtype)
    for r in range(rows):
        for i in range(n):
            h[0 if x[r, i] < 0 else 1] += 1
        out[r] = h[0] - h[1]
    return out


def where_data_say(x):  # type: ignore[no-untyped-def]
    rows = x.shape[0]
    out = tw.zeros((rows,), dtype=x.dtype)
    v = tw.zeros((3,), dtype=x.dtype)
    for r in range(rows):
        place = 0
        if x[r, 0] > 0:
            place = 1
        v[place] = x[r, 0]
        out[r] = v[0] + v[1]
    return out


def under_a_condition(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows, n), dtype=x.dtype)
    v = tw.zeros((n,), dtype=x.dtype)
    for r in range(rows):
        for i in range(n):
            if x[r, i] > 0:
                v[i] = x[r, i]
        for i in range(n):
            out[r, i] = v[i]
    return out


def in_one_branch(x):  # type: ignore[no-untyped-def]
    rows = x.shape[0]
    out = tw.zeros((rows,), dtype=x.dtype)
    v = tw.zeros((2,), dtype=x.dtype)
    for r in range(rows):
        if x[r, 0] > 0:
            v[0] = x[r, 0]
            v[1] = 1.0
        else:
            v[0] = 2.0
        out[r] = v[0] + v[1]
    return out


def past_what_was_filled(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows,), dtype=x.dtype)
    v = tw.zeros((n + 2,), dtype=x.dtype)
    for r in range(rows):
        for i in range(1, n + 1):
            v[i] = x[r, i - 1]
        out[r] = v[n + 1] + v[1]
        v[n + 1] = 1.0
    return out


def every_second(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows,), dtype=x.dtype)
    v = tw.zeros((2 * n,), dtype=x.dtype)
    for r in range(rows):
        for i in range(n):
            v[2 * i] = x[r, i]
        for i in range(n):
            out[r] += v[i]
        for i in range(n):
            v[2 * i + 1] = x[r, i]
    return out


def until_it_breaks(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows,), dtype=x.dtype)
    v = tw.zeros((n,), dtype=x.dtype)
    for r in range(rows):
        for i in range(n):
            if x[r, i] > 1:
                break
            v[i] = x[r, i]
        for i in range(1, n):
            v[i] += 0.5 * v[i - 1]
        out[r] = v[n - 1]
    return out


def while_it_lasts(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows,), dtype=x.dtype)
    v = tw.zeros((n,), dtype=x.dtype)
    for r in range(rows):
        i = 0
        while i < n and x[r, i] < 1:
            v[i] = x[r, i]
            i += 1
        for k in range(n):
            out[r] += v[k]
    return out


def of_another_length(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows,), dtype=x.dtype)
    v = tw.zeros((n + rows,), dtype=x.dtype)
    for r in range(rows):
        for i in range(r + 1):
            v[i] = x[r, 0]
        for i in range(n):
            out[r] += v[i]
    return out


def triangle(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows,), dtype=x.dtype)
    v = tw.zeros((n, n), dtype=x.dtype)
    for r in range(rows):
        for i in range(n):
            for j in range(i, n):
                v[i, j] = x[r, j] + r
        for i in range(n):
            for j in range(n):
                out[r] += v[i, j]
        for i in range(n):
            for j in range(i):
                v[i, j] = x[r, j]
    return out


def goes_up_and_down(x):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    out = tw.zeros((rows, n), dtype=x.dtype)
    v = tw.zeros((n + 3,), dtype=x.dtype)
    for r in range(rows):
        v[0] = x[r, 0]
        j = 0
        for i in range(n):
            out[r, i] = v[j]
            if x[r, i] > 0 and j < n:
                j += 1
        for i in range(n):
            v[i] = x[r, i]
    return out


KEPT = (
    reads_the_fill, reads_the_row_before, is_read_after, is_returned, counts_on, where_data_say, under_a_condition, in_one_branch, past_what_was_filled, every_second, until_it_breaks,
    while_it_lasts, of_another_length, triangle, goes_up_and_down,
)  # fmt: skip


# -- tests ------------------------------------------------------------------------------------------------------


def plain(function: Any, *args: Any) -> np.ndarray:
    """What Python itself makes of a kernel, in float64."""

    class Words:
        zeros, full, i64 = staticmethod(np.zeros), staticmethod(np.full), np.int64
        grid = staticmethod(lambda *n: range(n[0]) if len(n) == 1 else ((i, j) for i in range(n[0]) for j in range(n[1])))

    return FunctionType(function.__code__, {"tw": Words, "min": min, "max": max, "range": range, "abs": abs})(*args)


def runs_side_by_side(function: Any, *args: Any) -> bool:
    """Whether the loop over rows is a parallel one: one that has all of the function's other loops in it."""
    body = tw.kernel(function).stages(*args, target="cpu").typed.body
    loops = [s for s in walk(body) if getattr(s, "kind", "") == "parallel" and s.vars[0].name in ("r", "s", "o")]
    return any(getattr(s, "kind", "") in ("serial", "reduce", "each") for loop in loops for s in walk(loop.body))


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_rows_have_parts_of_their_own(function: Any) -> None:
    kernel = tw.kernel(function)
    assert runs_side_by_side(function, *CALLS[function][-1])
    for args in CALLS[function]:
        np.testing.assert_allclose(kernel(*args), plain(function, *args), rtol=1e-9, atol=1e-9, err_msg=str([np.shape(a) for a in args]))


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_on_the_emulator(function: Any) -> None:
    first = CALLS[function][-1][0].shape[0]
    args = tuple(a[:5] if isinstance(a, np.ndarray) and a.shape[0] == first else a for a in CALLS[function][-1])
    np.testing.assert_allclose(tw.kernel(function)(*args, device="emulator"), plain(function, *args), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("function", KEPT, ids=lambda f: f.__name__)
def test_what_iterations_hand_on_stays(function: Any) -> None:
    kernel = tw.kernel(function)
    for rows, n in ((1, 1), (2, 3), (31, 7), (33, 5), (3, 40)):
        x = RNG.standard_normal((rows, n))
        np.testing.assert_allclose(kernel(x), plain(function, x), rtol=1e-9, atol=1e-9, err_msg=str((rows, n)))
    assert not runs_side_by_side(function, x)
