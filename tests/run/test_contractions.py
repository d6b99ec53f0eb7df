"""Sums of products in every shape, layout and dtype, on the CPU and on the emulator's stages for CPU targets, against float64."""

from __future__ import annotations

import inspect

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import parse_target
from tilewright.execute.devices import emulator_device

SIZES = (
    (1, 1, 1), (2, 7, 15), (7, 2, 1), (15, 16, 17), (31, 33, 32), (64, 63, 65), (129, 127, 128), (255, 257, 256), (14, 32, 600),
    (300, 5, 9), (3, 1100, 2), (40, 800, 530),
)  # fmt: skip
EMPTY = ((0, 4, 3), (4, 0, 3), (4, 3, 0), (0, 0, 0))
TARGETS = ("x86-64-avx512", "x86-64-avx2", "aarch64-neon")


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += a[i, p] * b[p, j]
        out[i, j] = acc
    return out


@tw.kernel
def wide_product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), tw.f64)
    for i, j in tw.grid(m, n):
        acc = tw.f64(0)
        for p in range(k):
            acc += a[i, p] * b[p, j]
        out[i, j] = acc
    return out


@tw.kernel
def whole_product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), tw.i32)
    for i, j in tw.grid(m, n):
        acc = tw.i32(0)
        for p in range(k):
            acc += tw.i32(a[i, p]) * tw.i32(b[p, j])
        out[i, j] = acc
    return out


@tw.kernel
def into_columns(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((n, m), tw.f32)
    for j, i in tw.grid(n, m):
        acc = tw.f32(0)
        for p in range(k):
            acc += b[p, j] * a[i, p]
        out[j, i] = acc
    return out


@tw.kernel
def layer(x: tw.Array, w: tw.Array, bias: tw.Array, r: tw.Array) -> tw.Array:
    m, k = x.shape
    n = w.shape[0]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += x[i, p] * w[j, p]
        out[i, j] = tw.sigmoid(acc + bias[j]) + r[i, j] * 2.0
    return out


@tw.kernel
def lower_part(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            if p <= i:
                acc += a[i, p] * b[p, j]
        out[i, j] = acc
    return out


@tw.kernel
def batched(a: tw.Array, b: tw.Array) -> tw.Array:
    t, m, k = a.shape
    n = b.shape[2]
    out = tw.empty((t, m, n), tw.f32)
    for q, i, j in tw.grid(t, m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += a[q, i, p] * b[q, p, j]
        out[q, i, j] = acc
    return out


@tw.kernel
def convolution(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, h, width = x.shape
    k, _, kh, kw = w.shape
    out = tw.empty((n, k, h, width), tw.f32)
    for b, o, i, j in tw.grid(n, k, h, width):
        acc = tw.f32(0)
        for q in range(c):
            for r in range(kh):
                for s in range(kw):
                    y = i + r - 1
                    z = j + s - 1
                    if y >= 0 and y < h and z >= 0 and z < width:
                        acc += x[b, q, y, z] * w[o, q, r, s]
        out[b, o, i, j] = acc
    return out


@tw.kernel
def convolution_last(x: tw.Array, w: tw.Array) -> tw.Array:
    n, h, width, c = x.shape
    kh, kw, _, k = w.shape
    out = tw.empty((n, h, width, k), tw.f32)
    for b, i, j, o in tw.grid(n, h, width, k):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                for q in range(c):
                    y = i + r - 1
                    z = j + s - 1
                    if y >= 0 and y < h and z >= 0 and z < width:
                        acc += x[b, y, z, q] * w[r, s, q, o]
        out[b, i, j, o] = acc
    return out


@tw.kernel
def depthwise(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, h, width = x.shape
    _, kh, kw = w.shape
    out = tw.empty((n, c, h, width), tw.f32)
    for b, o, i, j in tw.grid(n, c, h, width):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                y = i + r - 1
                z = j + s - 1
                if y >= 0 and y < h and z >= 0 and z < width:
                    acc += x[b, o, y, z] * w[o, r, s]
        out[b, o, i, j] = acc
    return out


def operands(m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m * 10007 + n * 101 + k)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    return a, b, a.astype(np.float64) @ b.astype(np.float64)


def close(found: np.ndarray, wanted: np.ndarray, k: int, unit: float = 2.0**-24) -> None:
    """Within the rounding errors of a sum of k products of normally distributed numbers, and of storing it."""
    scale = np.sqrt(max(1, k)) + np.abs(wanted).max(initial=1.0)
    worst = np.abs(np.asarray(found, np.float64) - wanted).max(initial=0.0)
    assert worst <= (2 + np.sqrt(k) * 2.0**-24 / unit) * unit * scale, f"{worst} at scale {scale}"


@pytest.mark.parametrize("size", [*SIZES, *EMPTY], ids=str)
def test_layouts(size: tuple[int, int, int]) -> None:
    k = size[2]
    a, b, want = operands(*size)
    close(product(a, b), want, k)
    close(product(a, np.asfortranarray(b)), want, k)
    close(product(np.asfortranarray(a), b), want, k)
    close(product(a[:, ::-1], b[::-1]), want, k)
    close(product(np.repeat(a, 2, axis=1)[:, ::2], np.repeat(b, 3, axis=0)[::3]), want, k)
    close(into_columns(a, b), want.T, k)


@pytest.mark.parametrize("size", [*SIZES, *EMPTY], ids=str)
def test_dtypes(size: tuple[int, int, int]) -> None:
    m, n, k = size
    a, b, want = operands(*size)
    close(wide_product(a.astype(np.float64), b.astype(np.float64)), want, k, 2.0**-53)
    for dtype, unit in ((np.dtype(ml_dtypes.bfloat16), 2.0**-8), (np.dtype(np.float16), 2.0**-11)):
        narrow = a.astype(dtype), b.astype(dtype)
        close(product(*narrow), narrow[0].astype(np.float64) @ narrow[1].astype(np.float64), k, unit)
    rng = np.random.default_rng(1)
    bytes_ = rng.integers(-128, 128, (m, k)).astype(np.int8), rng.integers(-128, 128, (k, n)).astype(np.int8)
    np.testing.assert_array_equal(whole_product(*bytes_), bytes_[0].astype(np.int32) @ bytes_[1].astype(np.int32))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_guards_and_epilogues(size: tuple[int, int, int]) -> None:
    m, n, k = size
    a, b, want = operands(*size)
    close(lower_part(a, b), np.tril(a.astype(np.float64)) @ b.astype(np.float64), k)
    rng = np.random.default_rng(2)
    bias, r = rng.standard_normal(n).astype(np.float32), rng.standard_normal((m, n)).astype(np.float32)
    found = layer(a, np.ascontiguousarray(b.T), bias, r)
    close(found, 1 / (1 + np.exp(-(want + bias))) + r.astype(np.float64) * 2, k)


@pytest.mark.parametrize("size", [(1, 14, 32, 16), (3, 17, 33, 5), (5, 64, 70, 40)], ids=str)
def test_batches(size: tuple[int, int, int, int]) -> None:
    t, m, n, k = size
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((t, m, k)).astype(np.float32), rng.standard_normal((t, k, n)).astype(np.float32)
    close(batched(a, b), a.astype(np.float64) @ b.astype(np.float64), k)


def conv_reference(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    n, c, h, width = x.shape
    _, _, kh, kw = w.shape
    padded = np.zeros((n, c, h + kh + 1, width + kw + 1))
    padded[:, :, 1 : h + 1, 1 : width + 1] = x
    out = np.zeros((n, w.shape[0], h, width))
    for r in range(kh):
        for s in range(kw):
            out += np.einsum("nchw,kc->nkhw", padded[:, :, r : r + h, s : s + width], w[:, :, r, s].astype(np.float64))
    return out


@pytest.mark.parametrize(
    "size",
    [(1, 1, 1, 1, 1, 3, 3), (2, 3, 5, 7, 4, 3, 3), (2, 16, 18, 33, 17, 3, 3), (1, 30, 12, 56, 64, 3, 3), (1, 2, 9, 40, 3, 2, 2),
     (2, 3, 4, 5, 6, 0, 3), (1, 0, 4, 5, 6, 3, 3), (1, 2, 0, 5, 6, 3, 3)],
    ids=str,
)  # fmt: skip
def test_convolutions(size: tuple[int, ...]) -> None:
    n, c, h, width, k, kh, kw = size
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((n, c, h, width)).astype(np.float32), rng.standard_normal((k, c, kh, kw)).astype(np.float32)
    want = conv_reference(x, w)
    close(convolution(x, w), want, c * kh * kw)
    last = convolution_last(np.ascontiguousarray(x.transpose(0, 2, 3, 1)), np.ascontiguousarray(w.transpose(2, 3, 1, 0)))
    close(last, want.transpose(0, 2, 3, 1), c * kh * kw)
    own = w[0]
    each = np.concatenate([conv_reference(x[:, q : q + 1], own[q : q + 1][None]) for q in range(c)] or [np.zeros_like(x)], axis=1)
    close(depthwise(x, np.ascontiguousarray(own)), each, kh * kw)


def test_a_guard_that_keeps_an_index_in_range_is_kept() -> None:
    a = np.ones((4, 9), np.float32)
    memory = np.full((9, 5), np.nan, np.float32)
    memory[:4] = 1
    np.testing.assert_array_equal(lower_part(a, memory[:4]), np.arange(1, 5, dtype=np.float32)[:, None].repeat(5, axis=1))


def test_nan_and_infinity_reach_their_row_or_column_only() -> None:
    a, b, want = operands(35, 70, 90)
    a[3, 5], b[7, 66] = np.nan, np.inf
    found = product(a, b)
    assert np.isnan(found[3]).all()
    assert not np.isfinite(found[:, 66]).any()
    rest = np.ones_like(found, bool)
    rest[3], rest[:, 66] = False, False
    close(found[rest], want[rest], 90)


def test_the_same_bits_every_time_and_for_any_number_of_threads() -> None:
    a, b, _ = operands(200, 300, 700)
    first = product(a, b)
    before = tw.get_num_threads()
    try:
        for threads in (1, 2, 3):
            tw.set_num_threads(threads)
            np.testing.assert_array_equal(first, product(a, b))
    finally:
        tw.set_num_threads(before)


@tw.kernel
def layer_of_bf16(x: tw.Array, w: tw.Array) -> tw.Array:
    m, k = x.shape
    n = w.shape[0]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += x[i, p] * w[j, p]
        out[i, j] = acc
    return out


@tw.kernel
def depthwise_last(x: tw.Array, w: tw.Array) -> tw.Array:
    n, h, width, c = x.shape
    kh, kw, _ = w.shape
    out = tw.empty((n, h, width, c), tw.f32)
    for b, i, j, q in tw.grid(n, h, width, c):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                y = i + r - 1
                z = j + s - 1
                if y >= 0 and y < h and z >= 0 and z < width:
                    acc += x[b, y, z, q] * w[r, s, q]
        out[b, i, j, q] = acc
    return out


def narrow_cases(rng: np.random.Generator, m: int, n: int, k: int) -> list[tuple[tw.Kernel, tuple[np.ndarray, np.ndarray], np.ndarray, float]]:
    """Products of narrow numbers in every layout, with what they give in float64 and the error allowed."""
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((m, k), (k, n)))
    want = a.astype(np.float64) @ b.astype(np.float64)
    error = 2.0**-22 * max(1, k)
    whole = rng.integers(-128, 128, (m, k)).astype(np.int8), rng.integers(-128, 128, (k, n)).astype(np.int8)
    cases = [(layer_of_bf16, (x, w), want, error) for x in (a, np.asfortranarray(a)) for w in (b.T, np.ascontiguousarray(b.T))]
    for first in (whole[0], whole[0].view(np.uint8)):
        for second in (whole[1], whole[1].view(np.uint8), np.asfortranarray(whole[1])):
            cases.append((whole_product, (first, second), first.astype(np.int32) @ second.astype(np.int32), 0.0))
    return cases


@pytest.mark.parametrize("size", [*SIZES, *EMPTY, (33, 65, 2100), (70, 600, 64)], ids=str)
def test_narrow_numbers_in_every_layout(size: tuple[int, int, int]) -> None:
    for kernel, arguments, want, error in narrow_cases(np.random.default_rng(6), *size):
        assert np.abs(np.asarray(kernel(*arguments), np.float64) - want).max(initial=0.0) <= error


@pytest.mark.parametrize("stage", ["tile", "thread"])
def test_a_matrix_unit_on_the_emulator(stage: str) -> None:
    device = emulator_device(stage, parse_target("x86-64-amx"))
    for size in ((1, 1, 1), (17, 19, 70), (4, 3, 0)):
        for kernel, arguments, want, error in narrow_cases(np.random.default_rng(7), *size):
            names = inspect.signature(kernel).parameters
            found = kernel.runner.run(dict(zip(names, arguments, strict=True)), device)
            assert np.abs(np.asarray(found, np.float64) - want).max(initial=0.0) <= error


def test_a_matrix_unit_gives_the_bits_of_the_emulator() -> None:
    if parse_target("cpu").name != "x86-64-amx":
        pytest.skip("this CPU has no matrix unit")
    rng = np.random.default_rng(8)
    x, w = rng.standard_normal((40, 100)), rng.standard_normal((36, 100))
    x[3, :50] = 1e-39
    x[5, 7], w[4, 9], x[6, 8] = np.nan, np.inf, -np.inf
    narrow = x.astype(ml_dtypes.bfloat16), w.astype(ml_dtypes.bfloat16)
    device = emulator_device("thread", parse_target("x86-64-amx"))
    wanted = layer_of_bf16.runner.run(dict(zip(("x", "w"), narrow, strict=True)), device)
    np.testing.assert_array_equal(layer_of_bf16(*narrow), wanted)
    assert np.isnan(np.asarray(wanted)[5]).all() and np.isfinite(np.asarray(wanted)[7, 5])


@pytest.mark.parametrize("size", [(1, 1, 1, 1), (2, 3, 9, 64), (1, 5, 2, 130), (2, 1, 4, 17), (1, 4, 4, 0), (0, 3, 3, 4)], ids=str)
@pytest.mark.parametrize("taps", [(3, 3), (1, 1), (2, 5), (0, 3)], ids=str)
def test_windows_beside_vectors(size: tuple[int, int, int, int], taps: tuple[int, int]) -> None:
    n, h, width, c = size
    rng = np.random.default_rng(9)
    x, w = rng.standard_normal(size).astype(np.float32), rng.standard_normal((*taps, c)).astype(np.float32)
    padded = np.zeros((n, h + taps[0] + 1, width + taps[1] + 1, c))
    padded[:, 1 : h + 1, 1 : width + 1] = x
    want = np.zeros(size)
    for r in range(taps[0]):
        for s in range(taps[1]):
            want += padded[:, r : r + h, s : s + width] * w[r, s].astype(np.float64)
    close(depthwise_last(x, w), want, 9)
    # Wherever the array lies.
    memory = np.zeros(x.size + 3, np.float32)[3:].reshape(size)
    memory[...] = x
    np.testing.assert_array_equal(depthwise_last(memory, w), depthwise_last(x, w))
    # What lies outside counts for nothing, whatever the weights are.
    w[:] = np.inf
    found = depthwise_last(np.ones_like(x), w)
    assert not np.isnan(found).any()


@pytest.mark.parametrize("stage", ["loop", "tile", "thread"])
@pytest.mark.parametrize("target", TARGETS)
def test_on_the_emulator(target: str, stage: str) -> None:
    device = emulator_device(stage, parse_target(target))

    def run(kernel: tw.Kernel, *arguments: np.ndarray) -> np.ndarray:
        names = inspect.signature(kernel).parameters
        found = kernel.runner.run(dict(zip(names, arguments, strict=True)), device)
        assert isinstance(found, np.ndarray)
        return found

    for size in ((1, 1, 1), (9, 35, 20), (17, 3, 0), (15, 16, 130)):
        m, n, k = size
        a, b, want = operands(*size)
        close(run(product, a, b), want, k)
        nothing = np.zeros(n, np.float32), np.zeros((m, n), np.float32)
        close(run(layer, a, np.ascontiguousarray(b.T), *nothing), 1 / (1 + np.exp(-want)), k)
    a, b, want = operands(9, 35, 20)
    close(run(product, np.asfortranarray(a), b), want, 20)
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((1, 2, 5, 9)).astype(np.float32), rng.standard_normal((3, 2, 3, 3)).astype(np.float32)
    close(run(convolution, x, w), conv_reference(x, w), 18)
    last = run(depthwise_last, np.ascontiguousarray(x.transpose(0, 2, 3, 1)), np.ascontiguousarray(w[0].transpose(1, 2, 0)))
    each = np.concatenate([conv_reference(x[:, q : q + 1], w[:1, q : q + 1]) for q in range(2)], axis=1)
    close(last, each.transpose(0, 2, 3, 1), 9)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 9, 12, 13, 17, 33])
@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (97, 1031), (1030, 12)])
def test_few_rows_at_the_lower_edge(rows: int, shape: tuple[int, int]) -> None:
    """Tiles there have half the rows where those suffice; a row's sums are the same bits in every tile, and nothing runs over into another."""
    columns, terms = shape
    rng = np.random.default_rng(rows)
    a = rng.standard_normal((40, 2 * terms)).astype(np.float32)[:, ::2]
    b = rng.standard_normal((terms, columns + 3)).astype(np.float32)[:, 3:]
    a[rows - 1, terms // 2] = np.nan
    found = product(a[:rows], b)
    assert np.isnan(found[rows - 1]).all() and not np.isnan(found[: rows - 1]).any()
    np.testing.assert_array_equal(found, product(a, b)[:rows])
    wanted = a[: rows - 1].astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(found[: rows - 1], wanted, rtol=0, atol=1e-5 * terms**0.5 * 4)
    wide = wide_product(a[:rows].astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(wide[: rows - 1], wanted, rtol=0, atol=1e-13 * terms)
    whole = rng.integers(-9, 9, (rows, terms)), rng.integers(-9, 9, (terms, columns))
    np.testing.assert_array_equal(whole_product(*(x.astype(np.int32) for x in whole)), whole[0] @ whole[1])


@pytest.mark.parametrize("rows", [1, 4, 5, 9, 41])
def test_few_channels_at_the_lower_edge(rows: int) -> None:
    """The same where the second factor is read where it lies, or is a window."""
    rng = np.random.default_rng(rows)
    x, w = rng.standard_normal((2, 5, 13, 17)).astype(np.float32), rng.standard_normal((rows, 5, 3, 3)).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), (2, 3))
    np.testing.assert_allclose(windowed(x, w), np.einsum("ncyxij,ocij->noyx", windows, w.astype(np.float64)), rtol=0, atol=1e-4)


@tw.kernel
def windowed(x: tw.Array, w: tw.Array) -> tw.Array:
    images, channels, height, width = x.shape
    outs, _, down, across = w.shape
    out = tw.empty((images, outs, height - down + 1, width - across + 1), x.dtype)
    for n, o, i, j in tw.grid(images, outs, height - down + 1, width - across + 1):
        acc = tw.f32(0)
        for c in range(channels):
            for p in range(down):
                for q in range(across):
                    acc += x[n, c, i + p, j + q] * w[o, c, p, q]
        out[n, o, i, j] = acc
    return out
