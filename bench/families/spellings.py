"""Convolutions, transposed ones too, in other words than conditions: scattered, in blocks, by quotients, cut loops, borders, numbers of the call, groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilewright as tw
from bench.families.draw import Draw, Family, Problem, Spec


def _functional() -> Any:
    import torch

    return torch.nn.functional


# -- transposed -----------------------------------------------------------------------------------------------------


@tw.kernel
def scattered_from_pixels(x: tw.Array, w: tw.Array, step: int, pad: int) -> tw.Array:
    n, channels, height, width = x.shape
    _, filters, kh, kw = w.shape
    rows = (height - 1) * step - 2 * pad + kh
    columns = (width - 1) * step - 2 * pad + kw
    out = tw.zeros((n, filters, rows, columns), x.dtype)
    for b, o, i, j in tw.grid(n, filters, height, width):
        for k in range(kh):
            for m in range(kw):
                y = i * step + k - pad
                z = j * step + m - pad
                if 0 <= y < rows and 0 <= z < columns:
                    for c in range(channels):
                        out[b, o, y, z] += x[b, c, i, j] * w[c, o, k, m]
    return out


@tw.kernel
def scattered_by_taps(x: tw.Array, w: tw.Array, step: int) -> tw.Array:
    n, channels, height, width = x.shape
    _, filters, kh, kw = w.shape
    out = tw.zeros((n, filters, (height - 1) * step + kh, (width - 1) * step + kw), x.dtype)
    for k in range(kh):
        for m in range(kw):
            for b, o, i, j in tw.grid(n, filters, height, width):
                total = tw.f32(0)
                for c in range(channels):
                    total += x[b, c, i, j] * w[c, o, k, m]
                out[b, o, i * step + k, j * step + m] += total
    return out


def blocks(s: int) -> Callable[..., Any]:
    @tw.kernel
    def stored(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        filters = w.shape[1]
        out = tw.empty((n, filters, s * height, s * width), x.dtype)
        for b, o, i, j in tw.grid(n, filters, height, width):
            for k in range(s):
                for m in range(s):
                    total = tw.f32(0)
                    for c in range(channels):
                        total += x[b, c, i, j] * w[c, o, k, m]
                    out[b, o, s * i + k, s * j + m] = total
        return out

    return stored


def quotients(s: int) -> Callable[..., Any]:
    @tw.kernel
    def divided(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        filters = w.shape[1]
        out = tw.empty((n, filters, s * height, s * width), x.dtype)
        for b, o, y, z in tw.grid(n, filters, s * height, s * width):
            total = tw.f32(0)
            for c in range(channels):
                total += x[b, c, y // s, z // s] * w[c, o, y % s, z % s]
            out[b, o, y, z] = total
        return out

    return divided


def transposed(draw: Draw) -> Problem:
    spelling = draw.pick("from pixels", "by taps", "blocks", "quotients")
    s = draw.count(2, 3)
    k = s if spelling in ("blocks", "quotients") else draw.count(2, 5)
    p = draw.count(0, (k - 1) // 2) if spelling == "from pixels" else 0
    n, c, f, h, w = draw.fitting(2e8 / (k * k), (1, 32), (8, 256), (8, 256), (7, 64), (7, 64))
    ours: dict[str, Callable[..., Any]] = {
        "from pixels": lambda x, taps: scattered_from_pixels(x, taps, s, p), "by taps": lambda x, taps: scattered_by_taps(x, taps, s),
        "blocks": blocks(s), "quotients": quotients(s),
    }  # fmt: skip
    peer = lambda x, taps: _functional().conv_transpose2d(x, taps, stride=s, padding=p)  # noqa: E731
    title = f"transposed {k}x{k}, stride {s}, padding {p}, {spelling}"
    return Problem(title, (n, c, h, w, c, f, k, k), (Spec((n, c, h, w)), Spec((c, f, k, k), scale=1 / (c * k) ** 0.5)), ours[spelling], peer, {"torch": peer}, 1e-4)


# -- windows --------------------------------------------------------------------------------------------------------


@tw.kernel
def by_numbers(x: tw.Array, w: tw.Array, step: int, pad: int) -> tw.Array:
    n, channels, height, width = x.shape
    filters, _, kh, kw = w.shape
    rows = (height + 2 * pad - kh) // step + 1
    columns = (width + 2 * pad - kw) // step + 1
    out = tw.empty((n, filters, rows, columns), x.dtype)
    for b, o, i, j in tw.grid(n, filters, rows, columns):
        total = tw.f32(0)
        for c in range(channels):
            for k in range(kh):
                for m in range(kw):
                    y = i * step + k - pad
                    z = j * step + m - pad
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, c, y, z] * w[o, c, k, m]
        out[b, o, i, j] = total
    return out


def literal(size: int) -> Callable[..., Any]:
    @tw.kernel
    def skipped(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        filters = w.shape[0]
        out = tw.empty((n, filters, height, width), x.dtype)
        for b, o, i, j in tw.grid(n, filters, height, width):
            total = tw.f32(0)
            for c in range(channels):
                for k in range(size):
                    y = i + k - size // 2
                    if y < 0 or y >= height:
                        continue
                    for m in range(size):
                        z = j + m - size // 2
                        if z < 0 or z >= width:
                            continue
                        total += x[b, c, y, z] * w[o, c, k, m]
            out[b, o, i, j] = total
        return out

    return skipped


def cut(size: int) -> Callable[..., Any]:
    @tw.kernel
    def inside(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        filters = w.shape[0]
        out = tw.empty((n, filters, height, width), x.dtype)
        for b, o, i, j in tw.grid(n, filters, height, width):
            total = tw.f32(0)
            for c in range(channels):
                for y in range(max(0, i - size // 2), min(height, i + size // 2 + 1)):
                    for z in range(max(0, j - size // 2), min(width, j + size // 2 + 1)):
                        total += x[b, c, y, z] * w[o, c, y - i + size // 2, z - j + size // 2]
            out[b, o, i, j] = total
        return out

    return inside


def repeated(size: int) -> Callable[..., Any]:
    @tw.kernel
    def clamped(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        filters = w.shape[0]
        out = tw.empty((n, filters, height, width), x.dtype)
        for b, o, i, j in tw.grid(n, filters, height, width):
            total = tw.f32(0)
            for c in range(channels):
                for k in range(size):
                    for m in range(size):
                        y = min(max(i + k - size // 2, 0), height - 1)
                        z = min(max(j + m - size // 2, 0), width - 1)
                        total += x[b, c, y, z] * w[o, c, k, m]
            out[b, o, i, j] = total
        return out

    return clamped


@tw.kernel
def by_groups(x: tw.Array, w: tw.Array, groups: int) -> tw.Array:
    n, _, height, width = x.shape
    filters, inside, kh, kw = w.shape
    of_group = filters // groups
    out = tw.empty((n, filters, height - kh + 1, width - kw + 1), x.dtype)
    for b in range(n):
        for g in range(groups):
            for o in range(of_group):
                for i, j in tw.grid(height - kh + 1, width - kw + 1):
                    total = tw.f32(0)
                    for c in range(inside):
                        for k in range(kh):
                            for m in range(kw):
                                total += x[b, g * inside + c, i + k, j + m] * w[g * of_group + o, c, k, m]
                    out[b, g * of_group + o, i, j] = total
    return out


def windows(draw: Draw) -> Problem:
    spelling = draw.pick("numbers of the call", "continue", "cut loops", "repeated border", "groups")
    size = draw.pick(3, 5)
    s, p = (draw.count(1, 2), draw.count(0, size // 2)) if spelling == "numbers of the call" else (1, size // 2)
    groups = draw.pick(2, 4, 8) if spelling == "groups" else 1
    n, c, f, h, w = draw.fitting(2e8 / (size * size), (1, 32), (8, 256), (8, 256), (9, 96), (9, 96))
    c, f = -(-c // groups) * groups, -(-f // groups) * groups
    h, w = h + size, w + size
    kernels: dict[str, Callable[..., Any]] = {
        "numbers of the call": lambda x, taps: by_numbers(x, taps, s, p), "continue": literal(size), "cut loops": cut(size),
        "repeated border": repeated(size), "groups": lambda x, taps: by_groups(x, taps, groups),
    }  # fmt: skip

    def peer(x: Any, taps: Any) -> Any:
        if spelling == "repeated border":
            return _functional().conv2d(_functional().pad(x, (p, p, p, p), mode="replicate"), taps)
        return _functional().conv2d(x, taps, stride=s, padding=0 if spelling == "groups" else p, groups=groups)

    title = f"{size}x{size}, stride {s}, {spelling}" + (f" {groups}" if groups > 1 else "")
    return Problem(
        title, (n, c, h, w, f, c // groups, size, size), (Spec((n, c, h, w)), Spec((f, c // groups, size, size), scale=1 / (c // groups * size * size) ** 0.5)),
        kernels[spelling], peer, {"torch": peer}, 1e-4,
    )  # fmt: skip


_SIZES = "batch 1-32, channels and filters 8-256, products near 2e8"
FAMILIES = (
    Family("transposed_spellings", f"2x2 to 5x5, stride 2-3 (numbers of the call), padding; scattered from pixels or by taps, blocks of results, quotients and rests; {_SIZES}", transposed, {"cpu": 1.0}),
    Family("window_spellings", f"3x3 and 5x5; step and padding as numbers of the call, `continue`, cut loops, a repeated border, groups; {_SIZES}", windows, {"cpu": 1.0}),
)  # fmt: skip
