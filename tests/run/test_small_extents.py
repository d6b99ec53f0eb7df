"""Short sums on a CPU: extents up to 16 are part of the code where a call has many elements; other calls of the same kernel get code for any extents."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import f32, f64
from tilewright.base.errors import UserError
from tilewright.base.target import parse_target
from tilewright.compile.driver import Signature, compile_kernel
from tilewright.device_kinds.cpu import kind as cpu_kind
from tilewright.tree.typed import ArrayArg


@tw.kernel(device="cpu")
def apply_each(m: tw.Array, v: tw.Array) -> tw.Array:
    n, rows, d = m.shape
    out = tw.empty((n, rows), m.dtype)
    for b, i in tw.grid(n, rows):
        total = 0.0
        for j in range(d):
            total += m[b, i, j] * v[b, j]
        out[b, i] = total
    return out


@tw.kernel(device="cpu")
def apply_one(m: tw.Array, v: tw.Array) -> tw.Array:
    rows, d = m.shape
    n = v.shape[0]
    out = tw.empty((n, rows), m.dtype)
    for b, i in tw.grid(n, rows):
        total = 0.0
        for j in range(d):
            total += m[i, j] * v[b, j]
        out[b, i] = total
    return out


@tw.kernel(device="cpu")
def small_products(a: tw.Array, c: tw.Array) -> tw.Array:
    n, rows, d = a.shape
    columns = c.shape[2]
    out = tw.empty((n, rows, columns), a.dtype)
    for b, i, q in tw.grid(n, rows, columns):
        total = 0.0
        for j in range(d):
            total += a[b, i, j] * c[b, j, q]
        out[b, i, q] = total
    return out


@tw.kernel(device="cpu")
def softmax_rows(x: tw.Array) -> tw.Array:
    n, d = x.shape
    out = tw.empty((n, d), x.dtype)
    for i in tw.grid(n):
        most = tw.max(x[i, :])
        total = tw.sum(tw.exp(x[i, :] - most))
        for j in tw.grid(d):
            out[i, j] = tw.exp(x[i, j] - most) / total
    return out


def exact_softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def close(found: object, wanted: np.ndarray, dtype: type) -> None:
    assert isinstance(found, np.ndarray) and found.dtype == dtype
    np.testing.assert_allclose(found, wanted, rtol=2e-5 if dtype is np.float32 else 1e-12, atol=(2e-5 if dtype is np.float32 else 1e-12) * np.abs(wanted).max(initial=1.0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "rows", "d"), [(1031, 3, 3), (701, 5, 7), (401, 16, 1), (5003, 1, 2), (37, 16, 16), (521, 2, 9)])
def test_small_extents(n: int, rows: int, d: int, dtype: type) -> None:
    rng = np.random.default_rng(n)
    m, v, one = rng.standard_normal((n, rows, d)).astype(dtype), rng.standard_normal((n, d)).astype(dtype), rng.standard_normal((rows, d)).astype(dtype)
    close(apply_each(m, v), np.einsum("bij,bj->bi", m.astype(float), v), dtype)
    close(apply_one(one, v), v.astype(float) @ one.T, dtype)
    c = rng.standard_normal((n, d, rows)).astype(dtype)
    close(small_products(m, c), m.astype(float) @ c, dtype)
    close(softmax_rows(v), exact_softmax(v.astype(float)), dtype)


def test_code_is_made_for_small_extents_alone() -> None:
    rng = np.random.default_rng(5)
    for d, sized in ((3, True), (17, False), (4, True), (16, True), (300, False), (3, True)):
        x = rng.standard_normal((2000, d)).astype(np.float32)
        close(softmax_rows(x), exact_softmax(x.astype(float)), np.float32)
        assert softmax_rows.runner.last is not None
        assert softmax_rows.runner.last.is_sized is sized, d


def test_few_elements_need_no_code_of_their_own() -> None:
    x = np.ones((5, 6), np.float32)
    close(softmax_rows(x), exact_softmax(x), np.float32)
    assert softmax_rows.runner.last is not None and not softmax_rows.runner.last.is_sized
    assert softmax_rows(np.ones((0, 3), np.float32)).shape == (0, 3)


def test_views_and_given_results() -> None:
    rng = np.random.default_rng(7)
    wide = rng.standard_normal((4001, 11)).astype(np.float32)
    for x in (wide[:, 2:7], wide[::2, :5], wide[:, ::3]):
        close(softmax_rows(x), exact_softmax(x.astype(float)), np.float32)
    whole = np.zeros((4001, 8), np.float32)
    softmax_rows(wide[:, :5], out=whole[:, 1:6])
    close(whole[:, 1:6], exact_softmax(wide[:, :5].astype(float)), np.float32)
    assert not whole[:, 0].any() and not whole[:, 6:].any()


def test_kinds_of_code_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kind, "MOST_SIZED", 2)

    @tw.kernel(device="cpu")
    def totals(x: tw.Array) -> tw.Array:
        n, d = x.shape
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            total = 0.0
            for j in range(d):
                total += x[i, j] * x[i, j]
            out[i] = total
        return out

    sized = []
    for d in (100, 2, 3, 4, 5, 100, 5, 2):
        x = np.arange(5000 * d, dtype=np.float64).reshape(5000, d) % 7
        np.testing.assert_array_equal(totals(x), (x * x).sum(1))
        assert totals.runner.last is not None
        sized.append(totals.runner.last.is_sized)
    # After two kinds the code for any extents takes all calls, and the latest one is asked no more.
    assert sized[:5] == [False, True, True, False, False]


def test_messages_name_sizes() -> None:
    m, v = np.ones((2000, 3, 3), np.float32), np.ones((2000, 4), np.float32)
    apply_each(m, v[:, :3].copy())
    with pytest.raises(UserError) as small:
        apply_each(m, v)
    with pytest.raises(UserError) as large:
        apply_each(np.ones((20, 30, 30), np.float32), np.ones((20, 40), np.float32))
    text = {30: str(large.value), 3: str(small.value)}
    assert "m.shape[2]" in text[30] or "'v' is 40" in text[30]
    assert text[3].replace(" 3", " 30").replace(" 4", " 40") == text[30]


def convolution(s: int, p: int, phases: bool) -> tw.Kernel:
    @tw.kernel(device="cpu")
    def plain(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        filters, _, kh, kw = w.shape
        rows = (height + 2 * p - kh) // s + 1
        columns = (width + 2 * p - kw) // s + 1
        out = tw.empty((n, filters, rows, columns), x.dtype)
        for b, o, i, j in tw.grid(n, filters, rows, columns):
            total = tw.f32(0)
            for c in range(channels):
                for k in range(kh):
                    for m in range(kw):
                        y = i * s + k - p
                        z = j * s + m - p
                        if y >= 0 and y < height and z >= 0 and z < width:
                            total += x[b, c, y, z] * w[o, c, k, m]
            out[b, o, i, j] = total
        return out

    @tw.kernel(device="cpu")
    def transposed(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        _, filters, kh, kw = w.shape
        rows = (height - 1) * s + kh - 2 * p
        columns = (width - 1) * s + kw - 2 * p
        out = tw.empty((n, filters, rows, columns), x.dtype)
        for b, o, i, j in tw.grid(n, filters, rows, columns):
            total = tw.f32(0)
            for c in range(channels):
                for k in range(kh):
                    for m in range(kw):
                        y = i + p - k
                        z = j + p - m
                        if y % s == 0 and z % s == 0 and y // s >= 0 and y // s < height and z // s >= 0 and z // s < width:
                            total += x[b, c, y // s, z // s] * w[c, o, k, m]
            out[b, o, i, j] = total
        return out

    return transposed if phases else plain


def exact_convolution(x: np.ndarray, w: np.ndarray, s: int, p: int) -> np.ndarray:
    n, _, height, width = x.shape
    kh, kw = w.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (p, p), (p, p)))
    rows, columns = (height + 2 * p - kh) // s + 1, (width + 2 * p - kw) // s + 1
    out = np.zeros((n, w.shape[0], rows, columns))
    for k in range(kh):
        for m in range(kw):
            out += np.einsum("bcij,oc->boij", padded[:, :, k : k + (rows - 1) * s + 1 : s, m : m + (columns - 1) * s + 1 : s], w[:, :, k, m])
    return out


@pytest.mark.parametrize(("s", "p", "kh", "kw"), [(1, 1, 3, 3), (2, 0, 1, 5), (1, 2, 17, 3)])
def test_windows(s: int, p: int, kh: int, kw: int) -> None:
    """The sizes of a window are numbers, whatever those of channels and images."""
    rng = np.random.default_rng(kh)
    x, w = rng.standard_normal((2, 19, 21, 23)).astype(np.float32), rng.standard_normal((7, 19, kh, kw)).astype(np.float32)
    kernel = convolution(s, p, False)
    close(kernel(x, w), exact_convolution(x.astype(float), w.astype(float), s, p), np.float32)
    assert kernel.runner.last is not None and kernel.runner.last.is_sized is (kh <= 16)


def test_windows_of_every_second_place() -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((2, 5, 20, 21)).astype(np.float32), rng.standard_normal((5, 3, 4, 3)).astype(np.float32)
    kernel, s = convolution(2, 1, True), 2
    spread = np.zeros((2, 5, 39, 41))
    spread[:, :, ::s, ::s] = x
    wanted = exact_convolution(np.pad(spread, ((0, 0), (0, 0), (2, 2), (1, 1))), w[:, :, ::-1, ::-1].swapaxes(0, 1).astype(float), 1, 0)
    close(kernel(x, w), wanted, np.float32)
    assert kernel.runner.last is not None and kernel.runner.last.is_sized


@pytest.mark.parametrize("name", ["x86-64", "x86-64-avx2", "x86-64-avx512"])
def test_every_cpu(name: str) -> None:
    """Code for small extents is made for every CPU, for f32 and f64."""
    target = parse_target(name)
    for dtype, kernel, extents in ((f32, apply_each, (("m", 1, 3), ("m", 2, 5))), (f64, small_products, (("a", 1, 4), ("a", 2, 3), ("c", 2, 4))), (f32, softmax_rows, (("x", 1, 7),))):
        ranks = {"apply_each": (3, 2), "small_products": (3, 3), "softmax_rows": (2,)}[kernel.__name__]
        signature = Signature(tuple(ArrayArg(dtype, rank) for rank in ranks), extents=extents)
        artifact = compile_kernel(kernel.function, signature, target)
        assert artifact.is_sized and artifact.small and artifact.code
