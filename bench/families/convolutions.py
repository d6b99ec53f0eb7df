"""Convolutions, transposed ones too, in one to three dimensions, as loop nests with conditions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tilewright as tw
from bench.families.draw import Draw, Family, Problem, Spec


def _functional() -> Any:
    import torch

    return torch.nn.functional


# -- kernels --------------------------------------------------------------------------------------------------------


def conv1d(s: int, p: int, d: int) -> Callable[..., Any]:
    @tw.kernel
    def convolution(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, length = x.shape
        filters, _, taps = w.shape
        size = (length + 2 * p - d * (taps - 1) - 1) // s + 1
        out = tw.empty((n, filters, size), x.dtype)
        for b, o, i in tw.grid(n, filters, size):
            total = tw.f32(0)
            for c in range(channels):
                for k in range(taps):
                    at = i * s + k * d - p
                    if 0 <= at < length:
                        total += x[b, c, at] * w[o, c, k]
            out[b, o, i] = total
        return out

    return convolution


def conv2d(s: tuple[int, int], p: tuple[int, int], d: int, nested: bool) -> Callable[..., Any]:
    (s0, s1), (p0, p1) = s, p

    @tw.kernel
    def joined(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        filters, _, kh, kw = w.shape
        rows = (height + 2 * p0 - d * (kh - 1) - 1) // s0 + 1
        columns = (width + 2 * p1 - d * (kw - 1) - 1) // s1 + 1
        out = tw.empty((n, filters, rows, columns), x.dtype)
        for b, o, i, j in tw.grid(n, filters, rows, columns):
            total = tw.f32(0)
            for c in range(channels):
                for k in range(kh):
                    for m in range(kw):
                        y = i * s0 + k * d - p0
                        z = j * s1 + m * d - p1
                        if y >= 0 and y < height and z >= 0 and z < width:
                            total += x[b, c, y, z] * w[o, c, k, m]
            out[b, o, i, j] = total
        return out

    @tw.kernel
    def apart(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        filters, _, kh, kw = w.shape
        rows = (height + 2 * p0 - d * (kh - 1) - 1) // s0 + 1
        columns = (width + 2 * p1 - d * (kw - 1) - 1) // s1 + 1
        out = tw.empty((n, filters, rows, columns), x.dtype)
        for b, o, i, j in tw.grid(n, filters, rows, columns):
            total = tw.f32(0)
            for c in range(channels):
                for k in range(kh):
                    y = i * s0 + k * d - p0
                    if 0 <= y < height:
                        for m in range(kw):
                            z = j * s1 + m * d - p1
                            if 0 <= z < width:
                                total += x[b, c, y, z] * w[o, c, k, m]
            out[b, o, i, j] = total
        return out

    return apart if nested else joined


def conv2d_last(s: tuple[int, int], p: tuple[int, int], d: int) -> Callable[..., Any]:
    (s0, s1), (p0, p1) = s, p

    @tw.kernel
    def channels_last(x: tw.Array, w: tw.Array) -> tw.Array:
        n, height, width, channels = x.shape
        filters, kh, kw, _ = w.shape
        rows = (height + 2 * p0 - d * (kh - 1) - 1) // s0 + 1
        columns = (width + 2 * p1 - d * (kw - 1) - 1) // s1 + 1
        out = tw.empty((n, rows, columns, filters), x.dtype)
        for b, i, j, o in tw.grid(n, rows, columns, filters):
            total = tw.f32(0)
            for k in range(kh):
                for m in range(kw):
                    for c in range(channels):
                        y = i * s0 + k * d - p0
                        z = j * s1 + m * d - p1
                        if 0 <= y < height and 0 <= z < width:
                            total += x[b, y, z, c] * w[o, k, m, c]
            out[b, i, j, o] = total
        return out

    return channels_last


def conv3d(s: int, p: int) -> Callable[..., Any]:
    @tw.kernel
    def convolution(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, depth, height, width = x.shape
        filters, _, kd, kh, kw = w.shape
        planes = (depth + 2 * p - kd) // s + 1
        rows = (height + 2 * p - kh) // s + 1
        columns = (width + 2 * p - kw) // s + 1
        out = tw.empty((n, filters, planes, rows, columns), x.dtype)
        for b, o, h, i, j in tw.grid(n, filters, planes, rows, columns):
            total = tw.f32(0)
            for c in range(channels):
                for q in range(kd):
                    for k in range(kh):
                        for m in range(kw):
                            v = h * s + q - p
                            y = i * s + k - p
                            z = j * s + m - p
                            if 0 <= v < depth and 0 <= y < height and 0 <= z < width:
                                total += x[b, c, v, y, z] * w[o, c, q, k, m]
            out[b, o, h, i, j] = total
        return out

    return convolution


def depthwise(p: tuple[int, int]) -> Callable[..., Any]:
    p0, p1 = p

    @tw.kernel
    def each_channel(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        _, kh, kw = w.shape
        rows = height + 2 * p0 - kh + 1
        columns = width + 2 * p1 - kw + 1
        out = tw.empty((n, channels, rows, columns), x.dtype)
        for b, c, i, j in tw.grid(n, channels, rows, columns):
            total = tw.f32(0)
            for k in range(kh):
                for m in range(kw):
                    y = i + k - p0
                    z = j + m - p1
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, c, y, z] * w[c, k, m]
            out[b, c, i, j] = total
        return out

    return each_channel


@tw.kernel
def pointwise(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters, _ = w.shape
    out = tw.empty((n, filters, height, width), x.dtype)
    for b, o, i, j in tw.grid(n, filters, height, width):
        total = tw.f32(0)
        for c in range(channels):
            total += x[b, c, i, j] * w[o, c]
        out[b, o, i, j] = total
    return out


def transposed1d(s: int, p: int, d: int, extra: int) -> Callable[..., Any]:
    @tw.kernel
    def transposed(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, length = x.shape
        _, filters, taps = w.shape
        size = (length - 1) * s - 2 * p + d * (taps - 1) + extra + 1
        out = tw.empty((n, filters, size), x.dtype)
        for b, o, i in tw.grid(n, filters, size):
            total = tw.f32(0)
            for c in range(channels):
                for k in range(taps):
                    at = i + p - k * d
                    if at % s == 0 and 0 <= at // s < length:
                        total += x[b, c, at // s] * w[c, o, k]
            out[b, o, i] = total
        return out

    return transposed


def transposed2d(s: tuple[int, int], p: tuple[int, int], d: int, nested: bool) -> Callable[..., Any]:
    (s0, s1), (p0, p1) = s, p

    @tw.kernel
    def joined(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        _, filters, kh, kw = w.shape
        rows = (height - 1) * s0 - 2 * p0 + d * (kh - 1) + 1
        columns = (width - 1) * s1 - 2 * p1 + d * (kw - 1) + 1
        out = tw.empty((n, filters, rows, columns), x.dtype)
        for b, o, i, j in tw.grid(n, filters, rows, columns):
            total = tw.f32(0)
            for c in range(channels):
                for k in range(kh):
                    for m in range(kw):
                        y = i + p0 - k * d
                        z = j + p1 - m * d
                        if y % s0 == 0 and z % s1 == 0 and 0 <= y // s0 < height and 0 <= z // s1 < width:
                            total += x[b, c, y // s0, z // s1] * w[c, o, k, m]
            out[b, o, i, j] = total
        return out

    @tw.kernel
    def apart(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        _, filters, kh, kw = w.shape
        rows = (height - 1) * s0 - 2 * p0 + d * (kh - 1) + 1
        columns = (width - 1) * s1 - 2 * p1 + d * (kw - 1) + 1
        out = tw.empty((n, filters, rows, columns), x.dtype)
        for b, o, i, j in tw.grid(n, filters, rows, columns):
            total = tw.f32(0)
            for c in range(channels):
                for k in range(kh):
                    y = i + p0 - k * d
                    if y % s0 == 0:  # noqa: SIM102
                        if 0 <= y // s0 < height:
                            for m in range(kw):
                                z = j + p1 - m * d
                                if z % s1 == 0:  # noqa: SIM102
                                    if 0 <= z // s1 < width:
                                        total += x[b, c, y // s0, z // s1] * w[c, o, k, m]
            out[b, o, i, j] = total
        return out

    return apart if nested else joined


def transposed3d(s: int, p: int) -> Callable[..., Any]:
    @tw.kernel
    def transposed(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, depth, height, width = x.shape
        _, filters, kd, kh, kw = w.shape
        planes = (depth - 1) * s - 2 * p + kd
        rows = (height - 1) * s - 2 * p + kh
        columns = (width - 1) * s - 2 * p + kw
        out = tw.empty((n, filters, planes, rows, columns), x.dtype)
        for b, o, h, i, j in tw.grid(n, filters, planes, rows, columns):
            total = tw.f32(0)
            for c in range(channels):
                for q in range(kd):
                    for k in range(kh):
                        for m in range(kw):
                            v = h + p - q
                            y = i + p - k
                            z = j + p - m
                            if v % s == 0 and y % s == 0 and z % s == 0:  # noqa: SIM102
                                if 0 <= v // s < depth and 0 <= y // s < height and 0 <= z // s < width:
                                    total += x[b, c, v // s, y // s, z // s] * w[c, o, q, k, m]
            out[b, o, h, i, j] = total
        return out

    return transposed


# -- draws ----------------------------------------------------------------------------------------------------------


def _work(draw: Draw) -> float:
    """Products of a convolution: a few milliseconds on either device."""
    return 2e10 if draw.on_gpu else 2e8


def _dtype(draw: Draw, *gpu: str) -> str:
    return str(draw.pick(*gpu)) if draw.on_gpu and gpu else "f32"


def _problem(draw: Draw, title: str, x: tuple[int, ...], w: tuple[int, ...], dtype: str, ours: Any, peer: Any, products: float) -> Problem:
    fan = products ** 0.5
    shape = (*x, *w)
    tolerance = 2e-2 if dtype == "bf16" else 1e-4
    return Problem(title, shape, (Spec(x, dtype), Spec(w, dtype, scale=1 / max(1.0, fan))), ours, peer, {"torch": peer}, tolerance)


def convolution_1d(draw: Draw) -> Problem:
    taps, s, d = draw.count(2, 11), draw.count(1, 3), draw.count(1, 3)
    p = draw.count(0, d * (taps - 1))
    reach = d * (taps - 1) + 1
    n, c, f, length = draw.fitting(_work(draw) / taps, (1, 32), (8, 512), (8, 512), (64, 20000))
    length += reach
    dtype = _dtype(draw, "f32", "f32", "bf16")
    peer = lambda x, w: _functional().conv1d(x, w, stride=s, padding=p, dilation=d)  # noqa: E731
    return _problem(draw, f"1-D {taps} taps, stride {s}, padding {p}, dilation {d}", (n, c, length), (f, c, taps), dtype, conv1d(s, p, d), peer, c * taps)


def convolution_2d(draw: Draw) -> Problem:
    square = draw.pick(True, False)
    kh = draw.pick(1, 3, 3, 5, 7, 11)
    kw = kh if square else draw.pick(1, 3, 5, 7)
    s = (draw.count(1, 2),) * 2 if square else (draw.count(1, 2), draw.count(1, 2))
    d = draw.pick(1, 1, 2)
    p = (draw.count(0, kh // 2 * d), draw.count(0, kw // 2 * d))
    n, c, f, h, w = draw.fitting(_work(draw) / (kh * kw), (1, 64), (3, 512), (16, 512), (7, 256), (7, 256))
    h, w = h + d * (kh - 1), w + d * (kw - 1)
    dtype = _dtype(draw, "f32", "f32", "bf16")
    spelling = draw.pick("and", "nested ifs", "channels last")
    title = f"2-D {kh}x{kw}, stride {s}, padding {p}, dilation {d}, {spelling}"
    if spelling == "channels last":

        def peer(x: Any, taps: Any) -> Any:
            result = _functional().conv2d(x.permute(0, 3, 1, 2), taps.permute(0, 3, 1, 2), stride=s, padding=p, dilation=d)
            return result.permute(0, 2, 3, 1)

        return _problem(draw, title, (n, h, w, c), (f, kh, kw, c), dtype, conv2d_last(s, p, d), peer, c * kh * kw)
    peer_first = lambda x, taps: _functional().conv2d(x, taps, stride=s, padding=p, dilation=d)  # noqa: E731
    return _problem(draw, title, (n, c, h, w), (f, c, kh, kw), dtype, conv2d(s, p, d, spelling == "nested ifs"), peer_first, c * kh * kw)


def convolution_3d(draw: Draw) -> Problem:
    kd, kh, kw = draw.pick(1, 3), draw.pick(3, 3, 5), draw.pick(3, 3, 5)
    s, p = draw.count(1, 2), draw.count(0, 1)
    n, c, f, depth, h, w = draw.fitting(_work(draw) / (kd * kh * kw), (1, 16), (3, 128), (8, 128), (4, 32), (8, 96), (8, 96))
    depth, h, w = depth + kd, h + kh, w + kw
    peer = lambda x, taps: _functional().conv3d(x, taps, stride=s, padding=p)  # noqa: E731
    return _problem(draw, f"3-D {kd}x{kh}x{kw}, stride {s}, padding {p}", (n, c, depth, h, w), (f, c, kd, kh, kw), _dtype(draw, "f32"), conv3d(s, p), peer, c * kd * kh * kw)


def convolution_depthwise(draw: Draw) -> Problem:
    kh, kw = draw.pick(1, 3, 5, 7, 11), draw.pick(3, 5, 7)
    p = (draw.count(0, kh // 2), draw.count(0, kw // 2))
    n, c, h, w = draw.fitting((4e7 if draw.on_gpu else 2e6), (1, 64), (8, 512), (14, 512), (14, 512))
    h, w = h + kh, w + kw

    def peer(x: Any, taps: Any) -> Any:
        return _functional().conv2d(x, taps.unsqueeze(1), padding=p, groups=taps.shape[0])

    return _problem(draw, f"depthwise {kh}x{kw}, padding {p}", (n, c, h, w), (c, kh, kw), _dtype(draw, "f32", "bf16"), depthwise(p), peer, kh * kw)


def convolution_pointwise(draw: Draw) -> Problem:
    n, c, f, h, w = draw.fitting(_work(draw), (1, 64), (16, 512), (16, 512), (7, 128), (7, 128))
    peer = lambda x, taps: _functional().conv2d(x, taps[:, :, None, None])  # noqa: E731
    return _problem(draw, "1x1, NCHW", (n, c, h, w), (f, c), _dtype(draw, "f32", "f32", "bf16"), pointwise, peer, c)


def transposed_1d(draw: Draw, strides: tuple[int, int]) -> Problem:
    s, d = draw.count(*strides), draw.pick(1, 1, 2)
    taps = draw.count(1, 9)
    p = draw.count(0, min(2, d * (taps - 1)))
    extra = draw.count(0, max(s - 1, 0)) if d == 1 else 0
    n, c, f, length = draw.fitting(_work(draw) / taps, (1, 32), (8, 256), (8, 256), (64, 8000))
    length += 4

    def peer(x: Any, w: Any) -> Any:
        return _functional().conv_transpose1d(x, w, stride=s, padding=p, output_padding=extra, dilation=d)

    title = f"1-D {taps} taps, stride {s}, padding {p}, dilation {d}, output padding {extra}"
    return _problem(draw, title, (n, c, length), (c, f, taps), _dtype(draw, "f32"), transposed1d(s, p, d, extra), peer, c * taps / s)


def transposed_2d(draw: Draw, strides: tuple[int, int]) -> Problem:
    square = draw.pick(True, False)
    kh = draw.count(2, 6)
    kw = kh if square else draw.count(1, 7)
    s = (draw.count(*strides),) * 2 if square else (draw.count(*strides), draw.count(*strides))
    d = draw.pick(1, 1, 1, 2)
    p = (draw.count(0, (kh - 1) * d // 2), draw.count(0, (kw - 1) * d // 2))
    n, c, f, h, w = draw.fitting(_work(draw) / (kh * kw), (1, 32), (8, 256), (8, 256), (7, 128), (7, 128))
    h, w = h + 4, w + 4
    nested = draw.pick(True, False)
    peer = lambda x, taps: _functional().conv_transpose2d(x, taps, stride=s, padding=p, dilation=d)  # noqa: E731
    title = f"2-D {kh}x{kw}, stride {s}, padding {p}, dilation {d}, {'nested ifs' if nested else 'and'}"
    return _problem(draw, title, (n, c, h, w), (c, f, kh, kw), _dtype(draw, "f32", "f32", "bf16"), transposed2d(s, p, d, nested), peer, c * kh * kw / (s[0] * s[1]))


def transposed_3d(draw: Draw, strides: tuple[int, int]) -> Problem:
    s, k = draw.count(*strides), draw.count(2, 4)
    p = draw.count(0, k // 2)
    n, c, f, depth, h, w = draw.fitting(_work(draw) / k**3, (1, 8), (8, 96), (8, 96), (4, 24), (8, 48), (8, 48))
    depth, h, w = depth + 2, h + 2, w + 2
    peer = lambda x, taps: _functional().conv_transpose3d(x, taps, stride=s, padding=p)  # noqa: E731
    return _problem(draw, f"3-D {k}x{k}x{k}, stride {s}, padding {p}", (n, c, depth, h, w), (c, f, k, k, k), _dtype(draw, "f32"), transposed3d(s, p), peer, c * k**3 / s**3)


_SIZES = "batch 1-64, channels and filters 3-512, sides 7-256 (1-D up to 20000), products near 2e10 on GPUs and 2e8 on CPUs"
FAMILIES = (
    Family("convolution_1d", f"2-11 taps, stride 1-3, dilation 1-3, any padding; f32, bf16 on GPUs; {_SIZES}", convolution_1d, {"gpu": 1.0, "cpu": 1.0}),
    Family("convolution_2d", f"1x1 to 11x11, square and oblong, stride 1-2, dilation 1-2, any padding; NCHW with `and` or nested ifs, NHWC; {_SIZES}", convolution_2d, {"gpu": 1.0, "cpu": 1.0}),
    Family("convolution_3d", f"1-3 x 3-5 x 3-5, stride 1-2, padding 0-1; {_SIZES}", convolution_3d, {"gpu": 1.0, "cpu": 1.0}),
    Family("depthwise", "1-11 x 3-7, any padding, NCHW; 4e7 elements on GPUs, 2e6 on CPUs", convolution_depthwise, {"gpu": 1.2, "cpu": 1.0}),
    Family("pointwise", f"1x1 on NCHW; {_SIZES}", convolution_pointwise, {"gpu": 1.2, "cpu": 1.0}),
    Family("transposed_1d", f"1-9 taps, stride 2-4, dilation 1-2, padding, output padding; {_SIZES}", functools.partial(transposed_1d, strides=(2, 4)), {"gpu": 1.0, "cpu": 1.0}),
    Family("transposed_2d", f"2-6 x 1-7, stride 2-4 for each axis, dilation 1-2, padding; `and` or nested ifs; {_SIZES}", functools.partial(transposed_2d, strides=(2, 4)), {"gpu": 1.0, "cpu": 1.0}),
    Family("transposed_3d", f"2x2x2 to 4x4x4, stride 2-3, padding; {_SIZES}", functools.partial(transposed_3d, strides=(2, 3)), {"gpu": 1.0, "cpu": 1.0}),
    Family("transposed_stride1", f"2-6 x 1-7, stride 1; {_SIZES}", functools.partial(transposed_2d, strides=(1, 1)), {"gpu": 1.0, "cpu": 1.0}),
)  # fmt: skip
