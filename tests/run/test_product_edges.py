"""Products on this CPU at all edges of tiles and blocks: right against float64, and no access outside their arrays."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

import tilewright as tw
from fuzz.random_kernels.memory import PAGE, Arena


@tw.kernel
def plain(a: tw.Array, b: tw.Array) -> tw.Array:
    return a @ b


@tw.kernel
def of_rows(a: tw.Array, b: tw.Array) -> tw.Array:
    return a @ b.T


@tw.kernel
def of_columns(a: tw.Array, b: tw.Array) -> tw.Array:
    return a.T @ b


SPELLINGS: dict[str, tuple[Callable[..., np.ndarray], bool, bool]] = {
    "plain": (plain, False, False), "rows": (of_rows, False, True), "columns": (of_columns, True, False),
}  # fmt: skip
SIZES = [
    # Columns that fill one, two and three registers of the last tile, in one block and in two.
    (8, 12, 700), (8, 13, 700), (8, 17, 700), (8, 21, 700), (16, 25, 600), (59, 20, 1100), (80, 51, 600), (88, 64, 530),
    # Rows that fill half a tile, and blocks that end with one.
    (1, 40, 700), (3, 40, 700), (4, 29, 700), (5, 31, 700), (9, 300, 300), (76, 24, 520), (146, 72, 520), (188, 122, 300),
    # Rows of the second factor that are short, long, and long by a power of two.
    (20, 512, 130), (20, 1024, 130), (20, 1030, 130), (20, 2100, 64), (3, 5, 1), (7, 1, 9),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_products_are_right_and_stay_inside_their_arrays(spelling: str, dtype: type) -> None:
    kernel, turned_a, turned_b = SPELLINGS[spelling]
    rng = np.random.default_rng(3)
    for number, (m, n, k) in enumerate(SIZES):
        shapes = ((k, m) if turned_a else (m, k), (n, k) if turned_b else (k, n), (m, n))
        arenas = [Arena(int(np.prod(shape)) * np.dtype(dtype).itemsize // PAGE + 1) for shape in shapes]
        for seed in range(2):
            where = random.Random(10 * number + seed)
            arrays = [
                arena.place(shape, np.dtype(dtype), "contiguous", where)
                for arena, shape in zip(arenas, shapes, strict=True)
            ]
            for arena, array in zip(arenas, arrays, strict=True):
                arena.fill()
                array[...] = rng.standard_normal(array.shape)
                arena.snapshot()
            a, b, out = arrays
            kernel(a, b, out=out)
            wide = (a.astype(np.float64).T if turned_a else a.astype(np.float64)) @ (
                b.astype(np.float64).T if turned_b else b.astype(np.float64)
            )
            assert np.abs(out - wide).max() <= (1e-5 if dtype is np.float32 else 1e-13) * np.abs(wide).max() * max(
                1, k / 500
            ), (m, n, k)
            assert [arena.spoilt(view) for arena, view in zip(arenas, (None, None, out), strict=True)] == [False] * 3, (
                m,
                n,
                k,
            )


@tw.kernel
def picked(a: tw.Array, b: tw.Array, at: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[at[p], j]
        out[i, j] = total
    return out


def test_places_of_steps_are_not_read_behind_the_last() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((30, 40)), rng.standard_normal((50, 60))
    arena = Arena(1)
    at = np.ndarray((40,), np.int64, buffer=arena.bytes, offset=arena.size - 8 * 40)
    at[:] = rng.integers(0, 50, 40)
    np.testing.assert_allclose(picked(a, b, at), a @ b[at], rtol=1e-12, atol=1e-12)


def test_rows_of_few_columns_have_one_order_of_sums_for_any_number_of_threads() -> None:
    rng = np.random.default_rng(5)
    before = tw.get_num_threads()
    try:
        for m, n, k in [(59, 20, 1100), (88, 64, 1030), (9, 100, 1100)]:
            a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
            found = []
            for threads in (1, 2):
                tw.set_num_threads(threads)
                found.append(np.asarray(plain(a, b)))
            np.testing.assert_array_equal(*found)
    finally:
        tw.set_num_threads(before)
