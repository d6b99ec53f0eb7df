"""Scatters: `out[k[i]] += w[i]` and its family, on the CPU and at every stage of the emulator, against exact sums."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from examples import histogram
from tests.run.test_language import run_zyn

import tilewright as tw
from support import CUDA
from tilewright.base.dtypes import DType, bf16, f16
from tilewright.base.errors import UserError

DEVICES = ("cpu", "emulator:loop", "emulator:tile", "emulator:thread")
SIZES = (0, 1, 31, 33, 997, 9001)
RNG = np.random.default_rng(20)


@tw.kernel
def scatter_add(k: tw.Array, w: tw.Array, first: tw.Array) -> tw.Array:
    out = tw.empty(first.shape, first.dtype)
    for j in tw.grid(first.shape[0]):
        out[j] = first[j]
    for i in tw.grid(k.shape[0]):
        out[k[i]] += w[i]
    return out


@tw.kernel(deterministic=True)
def scatter_add_deterministic(k: tw.Array, w: tw.Array, first: tw.Array) -> tw.Array:
    out = tw.empty(first.shape, first.dtype)
    for j in tw.grid(first.shape[0]):
        out[j] = first[j]
    for i in tw.grid(k.shape[0]):
        out[k[i]] += w[i]
    return out


@tw.kernel
def scatter_mul(k: tw.Array, w: tw.Array, first: tw.Array) -> tw.Array:
    out = tw.empty(first.shape, first.dtype)
    for j in tw.grid(first.shape[0]):
        out[j] = first[j]
    for i in tw.grid(k.shape[0]):
        out[k[i]] *= w[i]
    return out


@tw.kernel
def scatter_max(k: tw.Array, w: tw.Array, first: tw.Array) -> tw.Array:
    out = tw.empty(first.shape, first.dtype)
    for j in tw.grid(first.shape[0]):
        out[j] = first[j]
    for i in tw.grid(k.shape[0]):
        out[k[i]] = max(out[k[i]], w[i])
    return out


@tw.kernel
def scatter_min(k: tw.Array, w: tw.Array, first: tw.Array) -> tw.Array:
    out = tw.empty(first.shape, first.dtype)
    for j in tw.grid(first.shape[0]):
        out[j] = first[j]
    for i in tw.grid(k.shape[0]):
        out[k[i]] = tw.min(w[i], out[k[i]])
    return out


@tw.kernel
def scatter_and(k: tw.Array, w: tw.Array, first: tw.Array) -> tw.Array:
    out = tw.empty(first.shape, first.dtype)
    for j in tw.grid(first.shape[0]):
        out[j] = first[j]
    for i in tw.grid(k.shape[0]):
        out[k[i]] &= w[i]
    return out


@tw.kernel
def scatter_or(k: tw.Array, w: tw.Array, first: tw.Array) -> tw.Array:
    out = tw.empty(first.shape, first.dtype)
    for j in tw.grid(first.shape[0]):
        out[j] = first[j]
    for i in tw.grid(k.shape[0]):
        out[k[i]] |= w[i]
    return out


@tw.kernel
def scatter_xor(k: tw.Array, w: tw.Array, first: tw.Array) -> tw.Array:
    out = tw.empty(first.shape, first.dtype)
    for j in tw.grid(first.shape[0]):
        out[j] = first[j]
    for i in tw.grid(k.shape[0]):
        out[k[i]] ^= w[i]
    return out


KERNELS = {
    "add": (scatter_add, np.add), "deterministic": (scatter_add_deterministic, np.add), "mul": (scatter_mul, np.multiply), "max": (scatter_max, np.maximum),
    "min": (scatter_min, np.minimum), "and": (scatter_and, np.bitwise_and), "or": (scatter_or, np.bitwise_or), "xor": (scatter_xor, np.bitwise_xor),
}  # fmt: skip
FLOATS = (np.float16, np.float32, np.float64)
INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
CASES = [
    *((kind, dtype) for kind in ("add", "deterministic", "mul", "max", "min") for dtype in (*FLOATS, *INTEGERS)),
    *((kind, dtype) for kind in ("and", "or", "xor") for dtype in (*INTEGERS, np.bool_)),
]


def values(dtype: type, n: int, kind: str = "add") -> np.ndarray:
    if dtype is np.bool_:
        return RNG.random(n) < 0.5
    if np.dtype(dtype).kind == "f":
        return (RNG.uniform(0.9, 1.1, n) if kind == "mul" else RNG.normal(size=n)).astype(dtype)
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max, n, dtype, endpoint=True)


def expected(ufunc: np.ufunc, first: np.ndarray, k: np.ndarray, w: np.ndarray) -> np.ndarray:
    wide = np.float64 if first.dtype.kind == "f" else first.dtype
    result = first.astype(wide)
    with np.errstate(all="ignore"):
        ufunc.at(result, k, w.astype(wide))
    return result


def check(got: np.ndarray, wanted: np.ndarray, terms: int, label: str = "") -> None:
    if got.dtype.kind != "f":
        np.testing.assert_array_equal(got, wanted, label)
        return
    eps = float(np.finfo(got.dtype).eps)
    sums = max(1, terms) * float(np.finfo(np.float32 if got.dtype == np.float16 else got.dtype).eps)
    np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=2 * eps + sums, atol=4 * eps + 4 * sums, err_msg=label)


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=lambda c: c if isinstance(c, str) else c.__name__)
def test_kinds_and_dtypes(kind: str, dtype: type) -> None:
    kernel, ufunc = KERNELS[kind]
    for n, m, devices in ((4200, 13, ("cpu", "emulator:thread")), (300, 1000, DEVICES)):  # shared memory and copies; the array itself
        k = RNG.integers(0, m, n).astype(np.int32)
        w, first = values(dtype, n, kind), values(dtype, m, kind)
        if dtype is np.float16 and kind == "mul":
            w, k = w[: 4 * m], k[: 4 * m]
        for device in devices:
            check(kernel(k, w, first, device=device), expected(ufunc, first, k, w), len(w), f"{kind} {n} {device}")


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_sizes_and_layouts(device: str) -> None:
    for n in SIZES:
        k = RNG.integers(0, 5, 2 * n).astype(np.int64)[::-2]
        w = RNG.normal(size=3 * n).astype(np.float32)[::3]
        first = RNG.normal(size=5).astype(np.float32)[::-1]
        check(scatter_add(k, w, first, device=device), expected(np.add, first, k, w), n, f"{n}")
    empty = np.zeros(0, np.float32)
    assert scatter_add(np.zeros(0, np.int32), empty, empty, device=device).shape == (0,)


@pytest.mark.parametrize("kind", ["add", "deterministic", "mul", "max", "min"])
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_narrow_floats(kind: str, dtype: DType) -> None:
    """bf16 and f16, against results in f64: sums and products are made in f32 and rounded to the dtype once, maxima are exact."""
    kernel, ufunc = KERNELS[kind]
    eps = float(ml_dtypes.finfo(dtype.numpy).eps)
    for n, m, devices in ((0, 3, ("cpu",)), (33, 1, DEVICES), (997, 300, DEVICES), (4200, 13, ("cpu", "emulator:thread"))):
        k = RNG.integers(0, m, n).astype(np.int32)
        w = (RNG.uniform(0.9, 1.1, n) if kind == "mul" else RNG.normal(size=n)).astype(dtype.numpy)
        first = RNG.uniform(0.5, 1.5, m).astype(dtype.numpy)
        wide = w.astype(np.float64)
        wanted = first.astype(np.float64)
        ufunc.at(wanted, k, wide)
        size = np.abs(first.astype(np.float64))
        np.add.at(size, k, np.abs(wide))
        exact = kind in ("max", "min")
        steps = n * float(np.finfo(np.float32).eps) * (np.abs(wanted) if kind == "mul" else size)
        allowed = 0.0 if exact else eps / 2 * np.abs(wanted) + steps + 1e-7  # the last: f16 below its normal numbers
        for device in devices:
            found = kernel(k, w, first, device=device)
            assert found.dtype == dtype.numpy
            error = np.abs(found.astype(np.float64) - wanted)
            assert (error <= allowed).all(), (n, device, error.max())


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1e-42, 3e38, 3e38, -3e38, 1e30, 1.0, -1e30], np.float32)


@pytest.mark.parametrize("kind", ["add", "deterministic", "max", "min"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_values(kind: str, dtype: type) -> None:
    kernel, ufunc = KERNELS[kind]
    k = np.array([0, 1, 2, 3, 3, 3, 4, 5, 5, 6, 7, 7, 7, 8, 8, 9], np.int32)
    w = np.concatenate([SPECIAL, [np.inf, -np.inf, -0.0]]).astype(dtype)
    first = np.zeros(11, dtype)
    with np.errstate(all="ignore"):
        wanted = expected(ufunc, first, k, w)
        wanted = wanted.astype(dtype)
    for device in DEVICES:
        got = kernel(k, w, first, device=device)
        close = np.where(k[:1] >= 0, np.arange(11) != 7, True)  # what cancels depends on the order of terms
        np.testing.assert_array_equal(got[close], wanted[close], f"{device}")


def test_deterministic_sums_do_not_depend_on_the_order() -> None:
    n = 4000
    for dtype in (np.float16, np.float32, np.float64):
        k = RNG.integers(0, 3, n).astype(np.int32)
        w = (RNG.normal(size=n) * 10.0 ** RNG.integers(-3, 3, n)).astype(dtype)
        order = RNG.permutation(n)
        first = np.zeros(3, dtype)
        once = scatter_add_deterministic(k, w, first, device="emulator:thread")
        again = scatter_add_deterministic(k[order], w[order], first, device="emulator:thread")
        np.testing.assert_array_equal(once, again)
        exact = [math.fsum(w[k == key].astype(np.float64).tolist()) for key in range(3)]
        np.testing.assert_allclose(once.astype(np.float64), exact, rtol=4 * float(np.finfo(dtype).eps), err_msg=str(dtype))


def test_the_bits_on_a_cpu_do_not_depend_on_threads() -> None:
    n, m = 200_000, 50
    k, w, first = RNG.integers(0, m, n).astype(np.int32), RNG.normal(size=n).astype(np.float32), np.zeros(m, np.float32)
    before, results = tw.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4, 2):
            tw.set_num_threads(threads)
            results.append(scatter_add_deterministic(k, w, first, device="cpu"))
    finally:
        tw.set_num_threads(before)
    assert all(np.array_equal(results[0], other) for other in results[1:])
    check(results[0], expected(np.add, first, k, w), n // m)


def test_a_deterministic_product_of_floats_is_refused_on_a_gpu() -> None:
    @tw.kernel(deterministic=True)
    def product(k: tw.Array, w: tw.Array) -> tw.Array:
        out = tw.ones((4,), w.dtype)
        for i in tw.grid(k.shape[0]):
            out[k[i]] *= w[i]
        return out

    k, w = np.zeros(3, np.int32), np.full(3, 2.0, np.float32)
    with pytest.raises(UserError, match=r"TW020.*depends on the order"):
        product(k, w, device="emulator:thread")
    np.testing.assert_array_equal(product(k, w, device="cpu"), [8, 1, 1, 1])


# -- places that many elements share ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["emulator:thread", CUDA])
@pytest.mark.parametrize("kind", ["add", "max", "xor"])
@pytest.mark.parametrize("pattern", ["equal", "sorted", "long runs", "short runs", "one other", "pairs"])
def test_elements_that_meet(kind: str, pattern: str, device: str) -> None:
    """Warps, threads and runs of lanes combine what goes to one place; a large array, so that nothing is shared by a block."""
    n, m = 3001, 9001
    k = {
        "equal": np.full(n, 17), "sorted": np.sort(RNG.integers(0, 40, n)), "long runs": np.arange(n) // 200 % 3, "short runs": np.arange(n) // 7,
        "one other": np.where(np.arange(n) == 777, 5, 4), "pairs": np.arange(n) // 2 * 2 % 64,
    }[pattern].astype(np.int32)  # fmt: skip
    kernel, ufunc = KERNELS[kind]
    for dtype in (np.int32, np.int64) if kind == "xor" else (np.float32, np.int32, np.float64):
        w, first = values(dtype, n), values(dtype, m)
        check(kernel(k, w, first, device=device), expected(ufunc, first, k, w), n, f"{pattern} {dtype.__name__}")


# -- nests -----------------------------------------------------------------------------------------------------------


@tw.kernel
def embedding_gradient(ids: tw.Array, grad: tw.Array, table: tw.Array) -> tw.Array:
    n, d = grad.shape
    out = tw.zeros(table.shape, grad.dtype)
    for i, j in tw.grid(n, d):
        out[ids[i], j] += grad[i, j]
    return out


@tw.kernel
def rows_of_loops(ids: tw.Array, grad: tw.Array, table: tw.Array) -> tw.Array:
    n, d = grad.shape
    out = tw.zeros(table.shape, grad.dtype)
    for i in tw.grid(n):
        for j in range(d):
            out[ids[i], j] += grad[i, j]
    return out


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (700, 40), (5, 130)])
def test_rows_at_computed_places(device: str, shape: tuple[int, int]) -> None:
    n, d = shape
    ids, grad, table = RNG.integers(0, 6, n), RNG.normal(size=shape).astype(np.float32), np.zeros((6, d), np.float32)
    wanted = np.zeros((6, d))
    np.add.at(wanted, ids, grad.astype(np.float64))
    for kernel in (embedding_gradient, rows_of_loops):
        check(kernel(ids, grad, table, device=device), wanted, n)


@tw.kernel
def two_at_once(k: tw.Array, x: tw.Array, lo: float, scale: float) -> tuple[tw.Array, tw.Array, tw.Array]:
    n = x.shape[0]
    sums = tw.zeros((16,), x.dtype)
    counts = tw.zeros((16,), tw.i32)
    doubled = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        b = int((x[i] - lo) * scale)
        if b >= 0 and b < 16:
            sums[b] += x[i] * x[i]
            counts[b] += 1
        doubled[i] = 2.0 * x[i]
    return sums, counts, doubled


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_several_scatters_guards_and_places_from_values(device: str) -> None:
    x = RNG.normal(size=3001).astype(np.float32)
    sums, counts, doubled = two_at_once(np.zeros(1, np.int32), x, -2.0, 4.0, device=device)
    b = np.trunc((x - np.float32(-2)) * np.float32(4)).astype(int)
    inside = (b >= 0) & (b < 16)
    np.testing.assert_array_equal(counts, np.bincount(b[inside], minlength=16))
    check(sums, np.bincount(b[inside], (x.astype(np.float64) ** 2)[inside], 16), len(x))
    np.testing.assert_array_equal(doubled, 2 * x)


@tw.kernel
def places(x: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array, tw.Array]:
    n, m = x.shape
    whole = tw.zeros((1,), x.dtype)
    rows = tw.zeros((n,), x.dtype)
    fours = tw.zeros(((n + 3) // 4,), x.dtype)
    cyclic = tw.zeros((3,), x.dtype)
    for i, j in tw.grid(n, m):
        whole[0] += x[i, j]
    for i, j in tw.grid(n, m):
        rows[i] += x[i, j]
    for i, j in tw.grid(n, m):
        fours[i // 4] += x[i, j]
    for i, j in tw.grid(n, m):
        cyclic[j % 3] += x[i, j]
    return whole, rows, fours, cyclic


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("shape", [(1, 1), (9, 31), (130, 33)])
def test_places_that_arithmetic_decides(device: str, shape: tuple[int, int]) -> None:
    x = RNG.normal(size=shape).astype(np.float32)
    wide = x.astype(np.float64)
    whole, rows, fours, cyclic = places(x, device=device)
    check(whole, wide.sum()[None], x.size)
    check(rows, wide.sum(1), x.size)
    check(fours, np.add.reduceat(wide.sum(1), np.arange(0, shape[0], 4)), x.size)
    check(cyclic, np.array([wide[:, c::3].sum() for c in range(3)]), x.size)


@tw.kernel
def edges(x: tw.Array, w: tw.Array, bins: tw.Array) -> tw.Array:
    m = bins.shape[0] - 1
    out = tw.zeros((m,), w.dtype)
    for i in tw.grid(x.shape[0]):
        lo = 0
        hi = m
        while lo < hi:
            middle = (lo + hi) // 2
            if bins[middle + 1] <= x[i]:
                lo = middle + 1
            else:
                hi = middle
        if x[i] >= bins[0] and lo < m:
            out[lo] += w[i]
    return out


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_a_weighted_histogram_with_edges(device: str) -> None:
    x, w = RNG.normal(size=2500).astype(np.float32), RNG.random(2500).astype(np.float32)
    bins = np.array([-2, -1.5, -0.3, 0, 0.1, 1, 3], np.float32)
    inside = x < bins[-1]
    check(edges(x, w, bins, device=device), np.histogram(x[inside].astype(np.float64), bins, weights=w[inside].astype(np.float64))[0], len(x))


@tw.kernel
def coo(row: tw.Array, col: tw.Array, v: tw.Array, x: tw.Array, y: tw.Array) -> tw.Array:
    out = tw.zeros(y.shape, v.dtype)
    for p in tw.grid(v.shape[0]):
        out[row[p]] += v[p] * x[col[p]]
    return out


@tw.kernel
def csr(ptr: tw.Array, col: tw.Array, v: tw.Array, x: tw.Array) -> tw.Array:
    rows = ptr.shape[0] - 1
    out = tw.empty((rows,), v.dtype)
    for r in tw.grid(rows):
        total = 0.0
        for p in range(ptr[r], ptr[r + 1]):
            total += v[p] * x[col[p]]
        out[r] = total
    return out


@tw.kernel
def csr_transposed(ptr: tw.Array, col: tw.Array, v: tw.Array, x: tw.Array, y: tw.Array) -> tw.Array:
    out = tw.zeros(y.shape, v.dtype)
    for r in tw.grid(ptr.shape[0] - 1):
        for p in range(ptr[r], ptr[r + 1]):
            out[col[p]] += v[p] * x[r]
    return out


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_sparse_products(device: str) -> None:
    rows, columns = 67, 50
    dense = RNG.normal(size=(rows, columns)) * (RNG.random((rows, columns)) < 0.2)
    dense[5] = 0
    row, col = np.nonzero(dense)
    v = dense[row, col].astype(np.float32)
    ptr = np.concatenate([[0], np.cumsum((dense != 0).sum(1))]).astype(np.int32)
    x, y = RNG.normal(size=columns).astype(np.float32), RNG.normal(size=rows).astype(np.float32)
    col = col.astype(np.int32)
    check(coo(row.astype(np.int32), col, v, x, y, device=device), dense @ x, columns)
    check(csr(ptr, col, v, x, device=device), dense @ x, columns)
    check(csr_transposed(ptr, col, v, y, x, device=device), dense.T @ y, rows)


@tw.kernel
def channels(k: tw.Array, w: tw.Array) -> tw.Array:
    c, n = w.shape
    out = tw.zeros((c, 9), w.dtype)
    for a, i in tw.grid(c, n):
        out[a, k[i]] += w[a, i]
    return out


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("shape", [(2, 500), (40, 33)])
def test_histograms_of_rows(device: str, shape: tuple[int, int]) -> None:
    w, k = RNG.normal(size=shape).astype(np.float32), RNG.integers(0, 9, shape[1])
    check(channels(k, w, device=device), np.array([np.bincount(k, row.astype(np.float64), 9) for row in w]), shape[1])


@tw.kernel
def repeated(k: tw.Array, turns: tw.Array) -> tw.Array:
    out = tw.zeros((4,), tw.i32)
    for i, _ in tw.grid(k.shape[0], turns.shape[0]):
        out[k[i]] += 1
    return out


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_every_point_counts_once(device: str) -> None:
    k = RNG.integers(0, 4, 77)
    np.testing.assert_array_equal(repeated(k, np.zeros(13), device=device), np.bincount(k, minlength=4) * 13)


# -- ZynML and the examples --------------------------------------------------------------------------------------------

ZYN = """
let y = compute(start, k, w) {{
    {attribute}
    for j in 0..m: out[j] = start[j]
    for i in 0..n {{
        {body}
    }}
}}
"""


@pytest.mark.parametrize(("body", "ufunc"), [
    ("out[k[i]] += w[i]", np.add), ("out[k[i]] *= w[i]", np.multiply), ("out[k[i]] = max(out[k[i]], w[i])", np.maximum),
    ("out[k[i]] = min(w[i], out[k[i]])", np.minimum),
])  # fmt: skip
@pytest.mark.parametrize("attribute", ["", "@deterministic"])
def test_zynml(body: str, ufunc: np.ufunc, attribute: str) -> None:
    k, w, start = RNG.integers(0, 5, 600), RNG.uniform(0.9, 1.1, 600).astype(np.float32), RNG.random(5).astype(np.float32)
    for device in DEVICES:
        if attribute and ufunc is np.multiply and device != "cpu":
            continue
        found = run_zyn(ZYN.format(body=body, attribute=attribute), device, start=start, k=k, w=w)
        check(np.asarray(found), expected(ufunc, start, k, w), 600, device)


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_the_example(device: str) -> None:
    x, w = RNG.normal(size=1500).astype(np.float32), RNG.random(1500).astype(np.float32)
    found = histogram.counts(x, -3.0, 3.0, 12, device=device)
    inside = (x >= -3) & (x < 3)
    np.testing.assert_array_equal(found, np.histogram(x[inside].astype(np.float64), 12, (-3, 3))[0])
    edges_ = np.array([-1, 0, 0.5, 2], np.float32)
    inside = x < 2
    check(histogram.weighted(x, w, edges_, device=device), np.histogram(x[inside].astype(np.float64), edges_, weights=w[inside].astype(np.float64))[0], 1500)
    keys, rows = RNG.integers(0, 4, 90), RNG.normal(size=(90, 5)).astype(np.float32)
    wanted = np.zeros((4, 5))
    np.add.at(wanted, keys, rows.astype(np.float64))
    check(histogram.rows_by_key(keys, rows, 4, device=device), wanted, 90)
    largest = histogram.largest_by_key(keys, rows[:, 0], 5, device=device)
    np.testing.assert_array_equal(largest, [*(rows[keys == key, 0].max() for key in range(4)), -np.inf])


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 7])
def test_an_index_outside_is_an_error_at_its_line(bad: int) -> None:
    k = np.zeros(20_000, np.int32)
    k[12_345] = bad
    first = np.zeros(7, np.float32)
    with pytest.raises(UserError, match=rf"TW050.*writes 'out' at index {bad}, but its extent there is 7") as error:
        scatter_add(k, np.ones(20_000, np.float32), first, device="cpu")
    assert "out[k[i]] += w[i]" in str(error.value)
    with pytest.raises(UserError, match=r"out of bounds|lies outside|inside its extent"):
        scatter_add(k, np.ones(20_000, np.float32), first, device="emulator:thread")


def test_an_index_of_a_row_outside_names_its_axis() -> None:
    ids, grad = np.array([0, 9]), np.ones((2, 3), np.float32)
    with pytest.raises(UserError, match=r"writes 'out' at index 9 \(axis 0\), but its extent there is 6"):
        embedding_gradient(ids, grad, np.zeros((6, 3), np.float32), device="cpu")


def test_what_is_scattered_is_not_read_in_the_same_grid() -> None:
    @tw.kernel
    def mixed(x: tw.Array) -> tw.Array:
        (n,) = x.shape
        out = tw.zeros((n,), x.dtype)
        for i in tw.grid(n):
            out[i // 2] += x[i] + out[0]
        return out

    with pytest.raises(UserError, match="TW012"):
        mixed(np.ones(10, np.float32), device="cpu")


# -- in place --------------------------------------------------------------------------------------------------------


@tw.kernel
def add_into(table: tw.InOut, k: tw.Array, w: tw.Array):
    for i in tw.grid(k.shape[0]):
        table[k[i]] += w[i]


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("n", [3, 5000])
def test_into_an_array_where_it_lies(device: str, n: int) -> None:
    k, w = RNG.integers(0, 20, n), RNG.normal(size=n).astype(np.float32)
    for step in (1, -2):
        whole = RNG.normal(size=40 if step == -2 else 20).astype(np.float32)
        before, table = whole.copy(), whole[::step]
        add_into(table, k, w, device=device)
        check(table, expected(np.add, before[::step], k, w), n)
        if step == -2:
            np.testing.assert_array_equal(whole[::2], before[::2])


def test_bits_of_floats_are_refused() -> None:
    @tw.kernel
    def bits(k: tw.Array, w: tw.Array) -> tw.Array:
        out = tw.zeros((4,), w.dtype)
        for i in tw.grid(k.shape[0]):
            out[k[i]] |= w[i]
        return out

    with pytest.raises(UserError, match=r"TW006|TW005"):
        bits(np.zeros(3, np.int32), np.ones(3, np.float32), device="cpu")


@tw.kernel
def added_in_place(y: tw.InOut, places: tw.Array, w: tw.Array):
    for i in tw.grid(len(places)):
        y[places[i]] += w[i]


@tw.kernel(deterministic=True)
def added_in_place_always_alike(y: tw.InOut, places: tw.Array, w: tw.Array):
    for i in tw.grid(len(places)):
        y[places[i]] += w[i]


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_elements_that_no_point_reaches_keep_the_sign_of_zero(dtype: str, device: str) -> None:
    numpy = getattr(tw, dtype).numpy
    for kernel in (added_in_place, added_in_place_always_alike):
        y, w = -np.zeros(20, numpy), np.full(33, -0.0, numpy)
        kernel(y, (np.arange(33) % 10).astype(np.int32), w, device=device)
        assert np.signbit(y.astype(np.float64)).all()


@tw.kernel
def beside_ragged_sums(x: tw.Array, places: tw.Array):
    n = x.shape[0]
    least = tw.zeros((9,), tw.f32)
    sums = tw.full((9,), 1, tw.f32)
    for i in tw.grid(n):
        total = 0.0
        for _ in range(i + 1):
            for b in range(n):
                total += x[b]
        least[places[i]] = tw.min(least[places[i]], x[i])
        sums[places[i]] += abs(total)
    return least, sums


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_blocks_of_less_than_a_warp(device: str) -> None:
    """Lanes that a block lacks hand nothing on."""
    x, places = np.arange(-20, 20, dtype=np.float32), (np.arange(40) % 9).astype(np.int8)
    least, sums = beside_ragged_sums(x, places, device=device)
    expected, total = np.zeros(9, np.float32), np.ones(9)
    np.minimum.at(expected, places, x)
    np.add.at(total, places, np.abs(np.arange(1, 41) * float(x.sum())))
    np.testing.assert_array_equal(least, expected)
    np.testing.assert_allclose(sums, total, rtol=1e-6)
