"""Whole numbers of a call in extents, loop bounds, steps, slices and indices, against NumPy: the CPU and every stage of the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from support import CUDA
from tilewright.base.errors import UserError

pytestmark = [pytest.mark.requires("cpu"), pytest.mark.filterwarnings("ignore::tilewright.PerformanceWarning")]
DEVICES = ("cpu", "emulator:loop", "emulator:tile", "emulator:thread")
X = np.arange(1, 13, dtype=np.float32)


@tw.kernel
def convolved(x: tw.Array, w: tw.Array, bias: tw.Array | None = None, *, padding: int = 0, stride: int = 1) -> tw.Array:
    (length,) = x.shape
    (k,) = w.shape
    n = (length + 2 * padding - k) // stride + 1
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        total = 0.0
        for j in range(k):
            at = i * stride + j - padding
            if 0 <= at < length:
                total += x[at] * w[j]
        if bias is not None:
            total += bias[i]
        out[i] = total
    return out


@tw.kernel
def window(x: tw.Array, start: int, n: int) -> tw.Array:
    return x[start : start + n] * 2


@tw.kernel
def strided(x: tw.Array, k: int) -> tw.Array:
    n, = x.shape
    out = tw.zeros((n,), x.dtype)
    for i in tw.grid(range(0, n, k)):
        out[i] = x[i] + 1
    return out


@tw.kernel
def block_sums(x: tw.Array, k: int) -> tw.Array:
    n, = x.shape
    m = n // k
    out = tw.empty((m,), x.dtype)
    for i in tw.grid(m):
        t = 0.0
        for j in range(k):
            t += x[i * k + j]
        out[i] = t
    return out


@tw.kernel
def table(rows: int, cols: int, scale: float = 1.0) -> tw.Array:
    out = tw.empty((rows, cols), tw.f32)
    for i, j in tw.grid(rows, cols):
        out[i, j] = (i * cols + j) * scale
    return out


@tw.kernel
def between(x: tw.Array, lo: int, hi: int) -> float:
    t = 0.0
    for i in range(lo, hi):
        t += x[i]
    return t


@tw.kernel
def typed(x: tw.Array, n: tw.i32) -> tw.Array:
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[i]
    return out


@tw.kernel
def untyped(x, n):  # type: ignore[no-untyped-def]
    out = tw.empty((n, 2), x.dtype)
    for i, j in tw.grid(n, 2):
        out[i, j] = x[i] * n
    return out


@tw.kernel
def smooth(x: tw.Array, times: int) -> tw.Array:
    n, = x.shape
    u = x * 1.0
    v = tw.empty_like(x)
    for _ in range(times):
        for i in range(n):
            v[i] = (u[max(i - 1, 0)] + u[i] + u[min(i + 1, n - 1)]) / 3
        u, v = v, u
    return u


@tw.kernel
def tile_dot(x: tw.Array, w: tw.Array, k: int) -> tw.Array:
    n, = x.shape
    m = n - k + 1
    out = tw.empty((m,), x.dtype)
    for i in tw.grid(m):
        out[i] = tw.dot(x[i : i + k], w[:k])
    return out


@tw.kernel
def eye(n: int, m: int = 3, k: int = 0) -> tw.Array:
    out = tw.zeros((n, m), tw.f64)
    for i in tw.grid(n):
        if 0 <= i + k < m:
            out[i, i + k] = 1
    return out


@tw.kernel
def both(x: tw.Array, n: int) -> tuple[tw.Array, tw.Array]:
    a = tw.empty((n,), x.dtype)
    b = tw.empty((n + 1,), x.dtype)
    for i in tw.grid(n):
        a[i] = x[i]
    for i in tw.grid(n + 1):
        b[i] = a[i - 1] if i > 0 else 0
    return a, b


@tw.kernel
def down(x: tw.Array, n: int) -> tw.Array:
    out = tw.empty((n,), x.dtype)
    for i in range(n - 1, -1, -1):
        out[i] = x[i]
    return out


@tw.kernel
def matmul_n(a: tw.Array, b: tw.Array, n: int) -> tw.Array:
    m, k = a.shape
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        t = 0.0
        for p in range(k):
            t += a[i, p] * b[p, j]
        out[i, j] = t
    return out


@tw.kernel
def differences(w: tw.Array, n: int) -> tw.Array:
    out = tw.empty((n,), w.dtype)
    for i in tw.grid(n):
        out[i] = w[i + 1] - w[i]
    return out


@tw.kernel
def scaled(x: tw.Array, k: int) -> tw.Array:
    return x * k


def convolution(x: np.ndarray, w: np.ndarray, padding: int, stride: int) -> np.ndarray:
    padded = np.pad(x, padding).astype(np.float64)
    count = (len(x) + 2 * padding - len(w)) // stride + 1
    return np.array([padded[i * stride : i * stride + len(w)] @ w for i in range(count)])


def smoothed(x: np.ndarray, times: int) -> np.ndarray:
    for _ in range(times):
        p = np.pad(x, 1, "edge")
        x = (p[:-2] + p[1:-1] + p[2:]) / 3
    return x


def cases() -> Iterator[tuple[Any, tuple[object, ...], dict[str, object], Any]]:
    w = np.array([1, 2, 3], np.float32)
    for dtype in (np.float32, np.float64):
        for padding, stride in ((0, 1), (1, 2), (2, 3), (5, 7)):
            wanted = convolution(X, w, padding, stride)
            yield convolved, (X.astype(dtype), w.astype(dtype)), {"padding": padding, "stride": stride}, wanted
    yield convolved, (X, w, np.ones(12, np.float32)), {"padding": 1}, convolution(X, w, 1, 1) + 1
    yield convolved, (X[::-2], w), {"padding": 1}, convolution(X[::-2], w, 1, 1)
    yield window, (X, 3, 4), {}, X[3:7] * 2
    yield window, (X, 3, 40), {}, X[3:] * 2
    for k in (1, 2, 5, 13):
        yield strided, (X, k), {}, np.where(np.arange(12) % k == 0, X + 1, 0)
    for k in (1, 2, 5, 12, 13):
        yield block_sums, (X, k), {}, X[: 12 // k * k].reshape(-1, k).sum(1)
    yield table, (3, 4), {}, np.arange(12.0).reshape(3, 4)
    yield table, (0, 4), {}, np.zeros((0, 4))
    yield table, (31, 33), {"scale": 0.5}, np.arange(31 * 33).reshape(31, 33) * 0.5
    yield between, (X, 2, 5), {}, X[2:5].sum()
    yield between, (X, 5, 2), {}, 0.0
    yield typed, (X, 3), {}, X[:3]
    yield untyped, (X, 3), {}, np.stack([X[:3] * 3] * 2, 1)
    for times in (0, 2):
        yield smooth, (X, times), {}, smoothed(X, times)
    yield tile_dot, (X, X, 3), {}, np.correlate(X, X[:3], "valid")
    for k in (0, 1, -1, 5, -5):
        yield eye, (4, 3, k), {}, np.eye(4, 3, k)
    yield both, (X, 3), {}, (X[:3], np.r_[0, X[:3]])
    yield down, (X, 5), {}, X[:5]
    yield differences, (X, 11), {}, np.diff(X)
    random = np.random.default_rng(5)
    a, b = random.standard_normal((17, 9), np.float32), random.standard_normal((9, 20), np.float32)
    yield matmul_n, (a, b, 13), {}, a.astype(np.float64) @ b[:, :13]
    for kind in (np.int8, np.int32, np.int64, np.uint16):
        yield scaled, (X, kind(3)), {}, X * 3
        yield differences, (X, kind(4)), {}, np.diff(X)[:4]


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_numbers_shape_results(device: str) -> None:
    for kernel, args, keywords, wanted in cases():
        found = kernel(*args, device=device, **keywords)
        for got, want in zip(found if isinstance(found, tuple) else (found,), wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            assert np.shape(got) == np.shape(want), (kernel, args)
            np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=f"{kernel} {args[1:]}")


def test_a_number_beside_f32_does_not_widen_it() -> None:
    assert scaled(X, np.int64(3)).dtype == np.float32


def test_no_code_is_made_for_another_value() -> None:
    differences(X, 3)
    first = differences.last
    for n in (4, 0, 11):
        assert differences(X, n).tolist() == np.diff(X)[:n].tolist()
    assert differences.last is first


def test_results_go_to_out() -> None:
    given = np.zeros(5, np.float32)
    for _ in range(2):
        assert differences(X, 5, out=given) is given
        assert given.tolist() == [1.0] * 5
    with pytest.raises(UserError, match=r"out= for 'out' has shape \[5\], but the result has \[4\]"):
        differences(X, 4, out=given)


W = np.array([1, 2, 3], np.float32)
EXTENT = "(length + 2 * padding - k) // stride + 1"
WRONG = {
    "an extent below 0": (
        lambda **d: convolved(X, W, padding=-6, **d),
        f"error[TW004]: an extent cannot be negative: {EXTENT} is -2 (k = 3, length = 12, padding = -6, stride = 1) (at ",
    ),
    "a division by 0": (lambda **d: convolved(X, W, stride=0, **d), f"error[TW004]: {EXTENT} divides by stride, which is 0 (stride = 0) (at "),
    "more than 64 bits": (
        lambda **d: convolved(X, W, padding=1 << 62, **d),
        f"error[TW004]: {EXTENT} = 9223372036854775818 is beyond 64 bits (k = 3, length = 12, padding = 4611686018427387904, stride = 1)",
    ),
    "more than there is memory for": (lambda **d: table(1 << 31, 1 << 31, **d), "error[TW031]: no memory for the result 'out' of shape [2147483648, 2147483648]"),
    "a step of 0": (lambda **d: strided(X, 0, **d), "error[TW004]: the step of a loop cannot be less than 1: k is 0 (k = 0) (at "),
    "an array that is too short": (lambda **d: differences(X, 12, **d), "error[TW013]: index i + 1 of 'w' reaches 12, but axis 0 has extent 12 (at "),
}


@pytest.mark.parametrize("device", ["cpu", "emulator:thread", CUDA])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_numbers(case: str, device: str) -> None:
    call, expected = WRONG[case]
    if "memory" in case and device != "cpu":
        pytest.skip("the emulator has the memory of the host")
    for _ in range(2):  # the second call meets machine code
        with pytest.raises(tw.TilewrightError) as caught:
            call(**({} if device == "cpu" else {"device": device}))
        assert expected in str(caught.value)
