"""Products of triangular matrices as natural loops. Terms outside of the triangles do not count, whatever is there: infinities and NaN stay out."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from kernels_matrix import again
from tilewright.base.dtypes import bf16
from tilewright.base.target import parse_target
from tilewright.execute.devices import emulator_device
from tilewright.passes.schedules.matrix import Wgmma


@tw.kernel
def upper_upper(a: tw.Array, b: tw.Array) -> tw.Array:
    n = a.shape[0]
    out = tw.empty((n, n), a.dtype)
    for i, j in tw.grid(n, n):
        acc = tw.f32(0)
        for k in range(i, j + 1):
            acc += a[i, k] * b[k, j]
        out[i, j] = acc
    return out


@tw.kernel
def lower_full(a: tw.Array, b: tw.Array, bias: tw.Array) -> tw.Array:
    n, m = a.shape[0], b.shape[1]
    out = tw.empty((n, m), a.dtype)
    for i, j in tw.grid(n, m):
        acc = tw.f32(0)
        for k in range(i + 1):
            acc += a[i, k] * b[k, j]
        out[i, j] = 0.5 * acc + bias[j]
    return out


@tw.kernel
def full_lower(a: tw.Array, b: tw.Array) -> tw.Array:
    """A condition says which terms count."""
    n, depth = a.shape
    m = b.shape[1]
    out = tw.empty((n, m), a.dtype)
    for i, j in tw.grid(n, m):
        acc = tw.f32(0)
        for k in range(depth):
            if not k < j:
                acc += a[i, k] * b[k, j]
        out[i, j] = acc
    return out


@tw.kernel
def upper_results(a: tw.Array, b: tw.Array) -> tw.Array:
    """Only results of the triangle are written, each with a sum of its own length."""
    n = a.shape[0]
    out = tw.zeros((n, n), a.dtype)
    for i in tw.grid(n):
        for j in range(i, n):
            acc = tw.f32(0)
            for k in range(i, j + 1):
                acc += a[i, k] * b[k, j]
            out[i, j] = acc
    return out


@tw.kernel
def lower_results(a: tw.Array, c: tw.InOut):
    n, depth = a.shape
    for i in tw.grid(n):
        for j in range(i + 1):
            acc = 0.0
            for k in range(depth):
                acc += a[i, k] * a[j, k]
            c[i, j] = 2 * acc + c[i, j]


@tw.kernel
def results_by_condition(a: tw.Array, b: tw.Array, c: tw.InOut):
    n, depth = a.shape
    m = b.shape[0]
    for i, j in tw.grid(n, m):
        if j > i:
            acc = 0.0
            for k in range(depth):
                acc += a[i, k] * b[j, k]
            c[i, j] = acc


@tw.kernel
def positive(x: tw.Array, y: tw.Array, out: tw.InOut):
    """A condition on the sum itself."""
    m, depth = x.shape
    n = y.shape[1]
    for i, j in tw.grid(m, n):
        total = 0.0
        for k in range(depth):
            total += x[i, k] * y[k, j]
        if total > 0.0:
            out[i, j] = total


@tw.kernel
def band(a: tw.Array) -> tw.Array:
    n, depth = a.shape
    out = tw.zeros((n, n), a.dtype)
    for i, j in tw.grid(n, n):
        if j >= i and j < i + 3:
            acc = 0.0
            for k in range(depth):
                acc += a[i, k] * a[j, k]
            out[i, j] = acc
    return out


def wanted(a: np.ndarray, b: np.ndarray, first: bool, last: bool, m: int) -> np.ndarray:
    """Each result by itself, in float64: terms from i on, up to j (`upper`), or else up to i."""
    n = len(a)
    out = np.zeros((n, m))
    for i in range(n):
        for j in range(m):
            low, high = (i, j + 1) if first and last else (0, i + 1) if first else (j, a.shape[1])
            with np.errstate(all="ignore"):
                out[i, j] = np.sum(a[i, low:high].astype(np.float64) * b[low:high, j])
    return out


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("n", [1, 45])
def test_terms_outside_do_not_count(n: int, device: str) -> None:
    rng = np.random.default_rng(n)
    a, b = (rng.standard_normal((n, n)).astype(np.float32) for _ in "ab")
    a[n - 1, 0], b[n // 2, n // 3] = np.inf, np.nan
    bias = rng.standard_normal(n).astype(np.float32)
    for found, result in (
        (upper_upper(a, b, device=device), wanted(a, b, True, True, n)),
        (lower_full(a, b, bias, device=device), 0.5 * wanted(a, b, True, False, n) + bias),
        (full_lower(a, b, device=device), wanted(a, b, False, True, n)),
    ):
        np.testing.assert_allclose(found, result, rtol=1e-4, atol=1e-4)


def test_arrays_that_end_before_the_sum_would() -> None:
    """The second factor has fewer rows than the first has columns: rows of zeros are never read."""
    rng = np.random.default_rng(0)
    a, b, bias = rng.standard_normal((9, 40)).astype(np.float32), rng.standard_normal((9, 17)).astype(np.float32), np.zeros(17, np.float32)
    np.testing.assert_allclose(lower_full(a, b, bias), 0.5 * np.tril(a[:, :9].astype(np.float64)) @ b, rtol=1e-4, atol=1e-4)
    found = lower_full(a, b, bias, device="emulator")
    np.testing.assert_allclose(found, 0.5 * np.tril(a[:, :9].astype(np.float64)) @ b, rtol=1e-4, atol=1e-4)


def test_tensor_cores_multiply_triangles() -> None:
    x = np.empty((512, 512), np.float32)
    found = upper_upper.stages(x, x, target="sm_90a").stages
    assert any("family=mma" in schedule.describe() for schedule in found.schedules)


WARP_GROUPS = {
    "skipping": "family=wgmma m=64 n=64 k=64 stages=3 persistent=0",
    "skipping, two groups": "family=wgmma m=128 n=64 k=64 stages=3 math_warpgroups=2 persistent=0 mma_in_flight=1",
    "skipping, direct": "family=wgmma m=64 n=128 k=64 stages=2 persistent=0 store=direct",
    "skipping, exchanged": "family=wgmma m=64 n=64 k=64 stages=3 persistent=0 swap_ab=1 store=direct",
    "all": "family=wgmma m=64 n=64 k=64 stages=3",
    "in turns": "family=wgmma m=64 n=64 k=64 stages=3 math_warpgroups=2 pingpong=1 mma_in_flight=1",
    "parts": "family=wgmma m=64 n=64 k=64 stages=3 split_k=2",
    "warps": "family=mma m=32 n=32 k=32 stages=2 persistent=0",
}


@pytest.mark.parametrize("stage", ["tile", "thread"])
@pytest.mark.parametrize("schedule", WARP_GROUPS)
def test_warp_groups_multiply_triangles(schedule: str, stage: str) -> None:
    """Factors of two bytes are packed with zeros outside of their triangle, wherever rows begin; blocks skip what is empty. Infinities outside are not felt."""
    start = list(WARP_GROUPS).index(schedule)
    device = emulator_device(stage, parse_target("sm_90a"))
    for n, m in ((201, 130), (136, 72), (1, 3), (65, 67))[start % 2 :: 2]:
        rng = np.random.default_rng(n)
        a, b, c = (rng.standard_normal(shape).astype(bf16.numpy) for shape in ((n, n), (n, n), (n, m)))
        a[0, n - 1], a[n - 1, 0], b[n // 2, n // 3] = np.inf, -np.inf, np.nan
        bias = rng.standard_normal(m).astype(np.float32)
        wide = [x.astype(np.float64) for x in (a, b, c)]
        for kernel, given, result in (
            (upper_upper, (a, b), wanted(wide[0], wide[1], True, True, n)),
            (lower_full, (a, c, bias), 0.5 * wanted(wide[0], wide[2], True, False, m) + bias),
            (full_lower, (a, c), wanted(wide[0], wide[2], False, True, m)),
        ):
            found = again(kernel, schedule=WARP_GROUPS[schedule])(*given, device=device)
            np.testing.assert_allclose(np.asarray(found).astype(np.float64), result, rtol=2e-2, atol=2e-2, err_msg=f"{kernel} {n} {m}")


def test_factors_of_two_bytes_are_packed_for_warp_groups() -> None:
    for n in (3486, 3488, 1501):
        x = np.empty((n, n), bf16.numpy)
        (chosen,) = [s for s in upper_upper.stages(x, x, target="sm_90a").stages.schedules if isinstance(s, Wgmma)]
        assert chosen.skips and (chosen.a_copy, chosen.b_copy) == ("pack", "pack")


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("n", [1, 23])
def test_a_triangle_of_results(n: int, device: str) -> None:
    """What is outside of it stays as it was, and infinities there are not felt."""
    rng = np.random.default_rng(n)
    a, b = (rng.standard_normal((n, n)).astype(np.float32) for _ in "ab")
    a[n - 1, 0], b[n - 1, n // 3] = np.inf, np.nan
    full = wanted(a, b, True, True, n)
    np.testing.assert_allclose(upper_results(a, b, device=device), np.triu(full), rtol=1e-4, atol=1e-4)
    narrow = rng.standard_normal((n, 5))
    c = rng.standard_normal((n, n))
    exact = np.where(np.tri(n, dtype=bool), c + 2 * narrow @ narrow.T, c)
    lower_results(narrow, c, device=device)
    np.testing.assert_allclose(c, exact, atol=1e-12)
    other, d = rng.standard_normal((n + 4, 5)), rng.standard_normal((n, n + 4))
    exact = np.where(np.tri(n, n + 4, dtype=bool), d, narrow @ other.T)
    results_by_condition(narrow, other, d, device=device)
    np.testing.assert_allclose(d, exact, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_stores_under_a_condition(dtype: type, device: str) -> None:
    rng = np.random.default_rng(3)
    x, y, out = (rng.standard_normal(shape).astype(dtype) for shape in ((17, 11), (22, 13), (17, 13)))
    y = y[::2]
    exact = x.astype(np.float64) @ y
    expected = np.where(exact > 0, exact, out)
    positive(x, y, out, device=device)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_triangles_of_results_are_products() -> None:
    x = np.empty((40, 40), np.float32)
    for target in ("aarch64-neon", "sm_90a"):
        assert len(upper_results.stages(x, x, target=target).stages.loop.calls) == 4  # zeros, sums, their repair, results
        assert len(lower_results.stages(x, x, target=target).stages.loop.calls) == 2
        assert len(results_by_condition.stages(x, x, x, target=target).stages.loop.calls) == 2
        assert len(positive.stages(x, x, x, target=target).stages.loop.calls) == 2
        assert len(band.stages(x, target=target).stages.loop.calls) == 1  # a band is few of the results: plain loops, which write the zeros, too
