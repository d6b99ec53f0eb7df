"""Arrays of short records, and maps that read across rows, on a CPU: vectors along pairs, triples and fours; squares; odd sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw

FLOATS = [np.float32, np.float64, np.float16]


@tw.kernel
def turned(x: tw.Array, w: tw.Array) -> tw.Array:
    n, m, _ = x.shape
    out = tw.empty((n, m, 2), x.dtype)
    for i, j in tw.grid(n, m):
        out[i, j, 0] = x[i, j, 0] * w[j, 0] - x[i, j, 1] * w[j, 1]
        out[i, j, 1] = x[i, j, 0] * w[j, 1] + x[i, j, 1] * w[j, 0]
    return out


@tw.kernel
def butterflies(x: tw.Array, w: tw.Array) -> tw.Array:
    rows, n, _ = x.shape
    half = n // 2
    out = tw.empty((rows, half * 2, 2), x.dtype)
    for b, k in tw.grid(rows, half):
        real = x[b, k + half, 0] * w[k, 0] - x[b, k + half, 1] * w[k, 1]
        imaginary = x[b, k + half, 0] * w[k, 1] + x[b, k + half, 1] * w[k, 0]
        out[b, k, 0] = x[b, k, 0] + real
        out[b, k, 1] = x[b, k, 1] + imaginary
        out[b, k + half, 0] = x[b, k, 0] - real
        out[b, k + half, 1] = x[b, k, 1] - imaginary
    return out


@tw.kernel
def flat_pairs(x: tw.Array) -> tw.Array:
    n = x.shape[0] // 2
    out = tw.empty((n * 2,), x.dtype)
    for i in tw.grid(n):
        out[2 * i] = x[2 * i + 1]
        out[2 * i + 1] = -x[2 * i]
    return out


@tw.kernel
def grey(pixels: tw.Array) -> tw.Array:
    n, _ = pixels.shape
    out = tw.empty((n,), pixels.dtype)
    for i in tw.grid(n):
        out[i] = pixels[i, 0] * 0.25 + pixels[i, 1] * 0.5 + pixels[i, 2] * 0.25
    return out


@tw.kernel
def swapped(pixels: tw.Array) -> tw.Array:
    n, _ = pixels.shape
    out = tw.empty((n, 4), pixels.dtype)
    for i in tw.grid(n):
        out[i, 0] = pixels[i, 2]
        out[i, 1] = pixels[i, 1]
        out[i, 2] = pixels[i, 0]
        out[i, 3] = 1.0
    return out


@tw.kernel
def crossed(a: tw.Array, b: tw.Array) -> tw.Array:
    n, _ = a.shape
    out = tw.empty((n, 3), a.dtype)
    for i in tw.grid(n):
        out[i, 0] = a[i, 1] * b[i, 2] - a[i, 2] * b[i, 1]
        out[i, 1] = a[i, 2] * b[i, 0] - a[i, 0] * b[i, 2]
        out[i, 2] = a[i, 0] * b[i, 1] - a[i, 1] * b[i, 0]
    return out


@tw.kernel
def conjugate_in_place(x: tw.InOut) -> None:
    n, _ = x.shape
    for i in tw.grid(n):
        real = x[i, 0]
        x[i, 0] = x[i, 1]
        x[i, 1] = -real


@tw.kernel
def waves(t: tw.Array) -> tw.Array:
    (n,) = t.shape
    out = tw.empty((n, 2), t.dtype)
    for i in tw.grid(n):
        out[i, 0] = tw.cos(t[i])
        out[i, 1] = tw.sin(t[i])
    return out


@tw.kernel
def turned_over(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((columns, rows), x.dtype)
    for i, j in tw.grid(columns, rows):
        out[i, j] = x[j, i]
    return out


@tw.kernel
def with_its_transpose(x: tw.Array, y: tw.Array) -> tw.Array:
    rows, columns = y.shape
    out = tw.empty((rows, columns), y.dtype)
    for i, j in tw.grid(rows, columns):
        out[i, j] = y[i, j] * 2 + x[j, i]
    return out


@tw.kernel
def axes_moved(x: tw.Array) -> tw.Array:
    a, b, c = x.shape
    out = tw.empty((c, a, b), x.dtype)
    for k, i, j in tw.grid(c, a, b):
        out[k, i, j] = x[i, j, k]
    return out


def _complex(x: Any) -> Any:
    return x[..., 0].astype(np.float64) + 1j * x[..., 1]


def _pairs(z: Any) -> Any:
    return np.stack((z.real, z.imag), -1)


def _near(found: Any, wanted: Any, dtype: Any) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol={2: 3e-2, 4: 1e-5, 8: 1e-13}[np.dtype(dtype).itemsize])


@pytest.mark.parametrize("dtype", FLOATS)
def test_complex_numbers_as_pairs(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    for n, m in ((1, 1), (3, 7), (2, 31), (5, 33), (0, 8), (3, 0)):
        x, w = rng.standard_normal((n, m, 2)).astype(dtype), rng.standard_normal((m, 2)).astype(dtype)
        _near(turned(x, w), _pairs(_complex(x) * _complex(w)), dtype)
    wide, w = rng.standard_normal((3, 17, 5)).astype(dtype), rng.standard_normal((17, 3)).astype(dtype)
    _near(turned(wide, w), _pairs(_complex(wide) * _complex(w)), dtype)
    _near(turned(wide[:, ::2, 1:3], w[::2]), _pairs(_complex(wide[:, ::2, 1:3]) * _complex(w[::2])), dtype)


def test_short_records_are_refused_as_before() -> None:
    with pytest.raises(tw.UserError, match="axis 2 has extent 1"):
        turned(np.zeros((2, 3, 1), np.float32), np.zeros((3, 2), np.float32))


def test_butterflies_of_an_fft() -> None:
    rng = np.random.default_rng(2)
    for n in (2, 14, 32, 66):
        x, w = rng.standard_normal((3, n, 2)).astype(np.float32), rng.standard_normal((n // 2, 2)).astype(np.float32)
        z, far = _complex(x)[:, : n // 2], _complex(x)[:, n // 2 :] * _complex(w)
        _near(butterflies(x, w), _pairs(np.concatenate((z + far, z - far), 1)), np.float32)


@pytest.mark.parametrize("n", [1, 8, 31, 100])
def test_records_of_other_lengths(n: int) -> None:
    rng = np.random.default_rng(3)
    flat = rng.standard_normal(2 * n).astype(np.float32)
    wanted = np.stack((flat[1::2], -flat[::2]), -1).reshape(-1)
    np.testing.assert_array_equal(flat_pairs(flat), wanted)
    for length in (3, 4):
        pixels = rng.standard_normal((n, length)).astype(np.float32)
        _near(grey(pixels), pixels[:, :3].astype(np.float64) @ [0.25, 0.5, 0.25], np.float32)
        np.testing.assert_array_equal(swapped(pixels)[:, :3], pixels[:, 2::-1])
        np.testing.assert_array_equal(swapped(pixels)[:, 3], 1.0)
    a, b = (rng.standard_normal((n, 3)).astype(np.float32) for _ in range(2))
    _near(crossed(a, b), np.cross(a.astype(np.float64), b), np.float32)


@pytest.mark.parametrize("n", [1, 8, 33])
def test_records_in_place(n: int) -> None:
    x = np.random.default_rng(4).standard_normal((n, 2)).astype(np.float32)
    wanted = np.stack((x[:, 1], -x[:, 0]), -1)
    conjugate_in_place(x)
    np.testing.assert_array_equal(x, wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_waves_of_small_and_huge_arguments(dtype: Any) -> None:
    rare = [0.0, -0.0, 1e5, -3e8, 2.0**28, 2.0**44, 1e22, np.inf, -np.inf, np.nan]
    t = np.concatenate((np.linspace(-9, 9, 61), rare, np.linspace(50, 60, 33))).astype(dtype)
    found, exact = np.asarray(waves(t)), t.astype(np.longdouble)
    with np.errstate(invalid="ignore"):
        wanted = np.stack((np.cos(exact), np.sin(exact)), -1)
    np.testing.assert_allclose(found, wanted.astype(np.float64), rtol=0, atol=2 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(np.signbit(found[t == 0][:, 1]), np.signbit(t[t == 0]))


@pytest.mark.parametrize("dtype", [*FLOATS, np.int8, np.int64])
def test_reads_across_rows(dtype: Any) -> None:
    rng = np.random.default_rng(5)
    for rows, columns in ((1, 1), (31, 33), (65, 7), (300, 37), (3, 260), (0, 5), (5, 0)):
        x = (rng.standard_normal((rows, columns)) * 50).astype(dtype)
        np.testing.assert_array_equal(turned_over(x), x.T)
        np.testing.assert_array_equal(turned_over(x[::2, ::-1]), x[::2, ::-1].T)
        np.testing.assert_array_equal(with_its_transpose(x, x.T.copy()), x.T * 2 + x.T)
    x = (rng.standard_normal((3, 17, 19)) * 50).astype(dtype)
    np.testing.assert_array_equal(axes_moved(x), x.transpose(2, 0, 1))


def test_the_emulator_agrees() -> None:
    rng = np.random.default_rng(6)
    x, w = rng.standard_normal((2, 19, 2)).astype(np.float32), rng.standard_normal((19, 2)).astype(np.float32)
    np.testing.assert_array_equal(turned(x, w, device="emulator"), turned(x, w))
    np.testing.assert_array_equal(turned_over(x[..., 0], device="emulator"), x[..., 0].T)
