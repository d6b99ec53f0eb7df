"""Products on CPUs with wide vectors: panels that are turned in registers, and vectors that the last row or column cuts through. Against float64, with whatever lies
beside an array, and at every stage for several targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import parse_target
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import Op, walk

TARGETS = ["aarch64-neon", "x86-64-avx2", "x86-64-avx512"]
DTYPES = ["float32", "float64"]
SHAPES = [(1, 1, 1), (15, 16, 17), (17, 8, 15), (29, 33, 16), (67, 40, 770), (113, 31, 7), (57, 95, 401), (30, 49, 8)]


@tw.kernel
def of_rows(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[0]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[j, p]
        out[i, j] = total
    return out


@tw.kernel
def of_columns(a: tw.Array, b: tw.Array) -> tw.Array:
    k, m = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[p, i] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def plain(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def symmetric(a: tw.Array) -> tw.Array:
    n, k = a.shape
    out = tw.empty((n, n), a.dtype)
    for i, j in tw.grid(n, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * a[j, p]
        out[i, j] = total
    return out


@tw.kernel
def centred(a: tw.Array, b: tw.Array, mean: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[0]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += (a[i, p] + 1.0) * (b[j, p] - mean[j])
        out[i, j] = total
    return out


@tw.kernel
def of_whole_numbers(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[0]
    out = tw.empty((m, n), tw.i32)
    for i, j in tw.grid(m, n):
        total = tw.i32(0)
        for p in range(k):
            total += tw.i32(a[i, p]) * tw.i32(b[j, p])
        out[i, j] = total
    return out


def drawn(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def inside(value: np.ndarray, fill: float = np.nan) -> np.ndarray:
    """The array as the middle of a larger one of `fill`, its rows one behind the other."""
    room = np.full(value.size + 64, fill, value.dtype)
    view = room[32 : 32 + value.size].reshape(value.shape)
    view[...] = value
    return view


def check(found: np.ndarray, wanted: np.ndarray) -> None:
    limit = (1e-12 if found.dtype == np.float64 else 2e-5) * max(1.0, float(np.abs(wanted).max(initial=0.0)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_panels_at_their_edges(m: int, n: int, k: int, dtype: str) -> None:
    a, b = drawn(m, k, dtype=dtype), drawn(k, n, dtype=dtype)
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    check(plain(inside(a), inside(b)), wanted)
    check(of_rows(inside(a), inside(np.ascontiguousarray(b.T))), wanted)
    check(of_columns(inside(np.ascontiguousarray(a.T)), inside(b)), wanted)
    check(symmetric(inside(a)), a.astype(np.float64) @ a.astype(np.float64).T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_that_are_computed(dtype: str) -> None:
    for m, n, k in ((40, 37, 130), (29, 16, 5), (129, 50, 33)):
        a, b, mean = drawn(m, k, dtype=dtype), drawn(n, k, dtype=dtype), drawn(n, dtype=dtype)
        check(centred(inside(a), inside(b), inside(mean)), (a.astype(np.float64) + 1) @ (b.astype(np.float64) - mean[:, None]).T)


@pytest.mark.parametrize("dtype", ["int32", "int16", "uint8"])
def test_whole_numbers(dtype: str) -> None:
    rng = np.random.default_rng(3)
    for m, n, k in ((40, 37, 130), (29, 16, 5), (120, 33, 47)):
        a, b = (rng.integers(0, 90, shape).astype(dtype) for shape in ((m, k), (n, k)))
        np.testing.assert_array_equal(of_whole_numbers(a, b), a.astype(np.int32) @ b.astype(np.int32).T)


@pytest.mark.parametrize("special", [np.nan, np.inf])
@pytest.mark.parametrize("kernel", [plain, of_rows, of_columns])
def test_what_is_no_number_stays_in_its_row_and_column(kernel: Any, special: float) -> None:
    m, n, k = 45, 41, 50
    a, b = drawn(m, k), drawn(k, n)
    a[m - 1, 3], b[k - 1, n - 1] = special, special
    with np.errstate(invalid="ignore"):
        wanted = a.astype(np.float64) @ b.astype(np.float64)
    found = kernel(a.T.copy() if kernel is of_columns else a, b.T.copy() if kernel is of_rows else b)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    there = np.isfinite(wanted)
    assert there[:-1, :-1].all()
    np.testing.assert_allclose(found[there], wanted[there], rtol=0, atol=1e-4)


def test_views() -> None:
    a, b = drawn(50, 300)[:, ::3], drawn(90, 140)[1::2, 20:120]
    check(of_rows(a, b), a.astype(np.float64) @ b.astype(np.float64).T)
    check(plain(a, b.T), a.astype(np.float64) @ b.astype(np.float64).T)
    check(of_columns(a.T, b.T), a.astype(np.float64) @ b.astype(np.float64).T)


def test_no_terms_no_rows_no_columns() -> None:
    for m, n, k in ((30, 20, 0), (0, 20, 9), (30, 0, 9)):
        a, b = np.ones((m, k), np.float32), np.ones((n, k), np.float32)
        np.testing.assert_array_equal(of_rows(a, b), a @ b.T)
        np.testing.assert_array_equal(of_columns(a.T.copy(), b.T.copy()), a @ b.T)


@tw.kernel
def contiguous(a: tw.Array, b: tw.Array) -> tw.Array:
    """`plain`, never called with views, whose code reads factors in other ways: contiguous factors would share it."""
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@pytest.mark.parametrize("m", [14, 15, 29, 113])
def test_bits_do_not_depend_on_cores(m: int) -> None:
    a, b = drawn(m, 900), drawn(171, 900)
    np.testing.assert_array_equal(of_rows(a, b), of_rows(a, b, device="cpu:0/1"))
    np.testing.assert_array_equal(contiguous(a, b.T.copy()), contiguous(a, b.T.copy(), device="cpu:0/1"))


@pytest.mark.parametrize("target", TARGETS)
def test_every_stage_stays_inside_its_arrays(target: str) -> None:
    for m, n, k in ((31, 19, 18), (16, 5, 3)):
        a, b = drawn(m, k), drawn(k, n)
        wanted = a.astype(np.float64) @ b.astype(np.float64)
        for kernel, first, second in ((plain, a, b), (of_rows, a, b.T.copy()), (of_columns, a.T.copy(), b)):
            stages = kernel.stages(first, second, target=target).stages
            for stage in (stages.loop, stages.tile, stages.thread):
                np.testing.assert_allclose(run_program(stage, {"a": first, "b": second})["out"], wanted, rtol=0, atol=1e-4)


def ops_of(kernel: Any, target: str, dtype: str = "float32") -> list[Op]:
    stages = kernel.stages(drawn(200, 300, dtype=dtype), drawn(300, 200, dtype=dtype) if kernel is plain else drawn(200, 300, dtype=dtype), target=target).stages
    return [op for call in stages.thread.calls for op in walk(call.kernel.body)]


@pytest.mark.parametrize(("dtype", "lanes"), [("float32", 16), ("float64", 8)])
def test_wide_vectors_are_turned_in_registers(dtype: str, lanes: int) -> None:
    sorted_lanes = [op for op in ops_of(of_rows, "x86-64-avx512", dtype) if op.opcode == "rearrange"]
    assert len(sorted_lanes) == lanes * (lanes.bit_length() - 1)
    assert not any(op.opcode == "rearrange" for op in ops_of(of_rows, "aarch64-neon", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_edges_are_masked_where_the_target_masks(dtype: str) -> None:
    assert any(op.opcode == "load_lanes" for op in ops_of(plain, "x86-64-avx512", dtype))
    for target in ("aarch64-neon", "x86-64-avx2"):
        assert not any(op.opcode == "load_lanes" for op in ops_of(plain, target, dtype))


def test_a_panel_of_rows_fits_the_nearest_cache() -> None:
    for dtype, size, depth in (("float32", 4, 512), ("float64", 8, 256)):
        for target in ("x86-64-avx512", "x86-64-avx2", "aarch64-neon"):
            (call,) = plain.stages(drawn(200, 300, dtype=dtype), drawn(300, 200, dtype=dtype), target=target).stages.tile.calls
            words = dict(word.split("=") for word in str(call.kernel.attrs["schedule"]).split())
            assert int(words["k"]) == depth
            assert int(words["mr"]) * depth * size <= parse_target(target).costs.caches.panel_bytes


@tw.kernel
def lower_half(a: tw.Array, b: tw.Array) -> tw.Array:
    n = a.shape[0]
    out = tw.empty((n, n), a.dtype)
    for i, j in tw.grid(n, n):
        total = a.dtype(0)
        for p in range(n):
            if p <= i:
                total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def from_the_diagonal_on(a: tw.Array, b: tw.Array) -> tw.Array:
    n = a.shape[0]
    out = tw.empty((n, n), a.dtype)
    for i, j in tw.grid(n, n):
        total = a.dtype(0)
        for p in range(i, n):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def between_diagonals(a: tw.Array, b: tw.Array) -> tw.Array:
    n = a.shape[0]
    out = tw.zeros((n, n), a.dtype)
    for i in tw.grid(n):
        for j in range(i, n):
            total = a.dtype(0)
            for p in range(i, j + 1):
                total += a[i, p] * b[p, j]
            out[i, j] = total
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 16, 31, 45, 130])
def test_triangles_read_nothing_outside(n: int, dtype: str) -> None:
    """What a condition leaves out may be anything."""
    a, b = drawn(n, n, dtype=dtype), drawn(n + 1, n, dtype=dtype)[:n]
    below, above = np.tril(np.ones((n, n), bool)), np.triu(np.ones((n, n), bool))
    wide = [np.where(part, a, 0).astype(np.float64) for part in (below, above)]
    nan = np.array(np.nan, dtype)
    check(lower_half(inside(np.where(below, a, nan)), inside(b)), wide[0] @ b)
    check(from_the_diagonal_on(inside(np.where(above, a, nan)), inside(b)), wide[1] @ b)
    both = np.triu(wide[1] @ np.triu(b).astype(np.float64))
    check(between_diagonals(inside(np.where(above, a, nan)), inside(np.where(above, b, nan))), both)


@tw.kernel
def below_in_place(x: tw.Array, limit: tw.i32) -> tw.Array:
    out = tw.empty_like(x)
    n, m = x.shape
    for i, j in tw.grid(n, m):
        value = x[i, j]
        if j <= i + limit:
            value = value * 2.0
        out[i, j] = value
    return out


@tw.kernel
def neighbours_under_a_condition(x: tw.Array) -> tw.Array:
    n, m = x.shape
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        value = x[i, j]
        if j + 1 < m:
            value += x[i, j + 1]
        if j > 0:
            value -= x[i, j - 1]
        out[i, j] = value
    return out


@pytest.mark.parametrize("dtype", [*DTYPES, "int32"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (5, 16), (7, 33), (40, 100)])
def test_conditions_in_other_nests(shape: tuple[int, int], dtype: str) -> None:
    x = (drawn(*shape) * 100).astype(dtype)
    right, left = np.zeros_like(x), np.zeros_like(x)
    right[:, :-1], left[:, 1:] = x[:, 1:], x[:, :-1]
    np.testing.assert_array_equal(neighbours_under_a_condition(inside(x, 3)), x + right - left)
    if dtype != "int32":
        rows, columns = np.indices(shape)
        np.testing.assert_array_equal(below_in_place(inside(x), 2), np.where(columns <= rows + 2, x * 2, x))
