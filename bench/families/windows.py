"""Pooling: averages and largest values of windows, in one to three dimensions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import tilewright as tw
from bench.families.draw import Draw, Family, Problem, Spec


def max1d(k: int, s: int, p: int) -> Callable[..., Any]:
    @tw.kernel
    def largest(x: tw.Array) -> tw.Array:
        n, channels, length = x.shape
        size = (length + 2 * p - k) // s + 1
        out = tw.empty((n, channels, size), x.dtype)
        for b, c, i in tw.grid(n, channels, size):
            best = -tw.inf
            for q in range(k):
                at = i * s + q - p
                if 0 <= at < length:
                    best = max(best, x[b, c, at])
            out[b, c, i] = best
        return out

    return largest


def mean1d(k: int, s: int, p: int) -> Callable[..., Any]:
    @tw.kernel
    def average(x: tw.Array) -> tw.Array:
        n, channels, length = x.shape
        size = (length + 2 * p - k) // s + 1
        out = tw.empty((n, channels, size), x.dtype)
        for b, c, i in tw.grid(n, channels, size):
            total = tw.f32(0)
            for q in range(k):
                at = i * s + q - p
                if 0 <= at < length:
                    total += x[b, c, at]
            out[b, c, i] = total / k
        return out

    return average


def max2d(k: int, s: int, p: int, nested: bool) -> Callable[..., Any]:
    @tw.kernel
    def joined(x: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        rows = (height + 2 * p - k) // s + 1
        columns = (width + 2 * p - k) // s + 1
        out = tw.empty((n, channels, rows, columns), x.dtype)
        for b, c, i, j in tw.grid(n, channels, rows, columns):
            best = -tw.inf
            for q in range(k):
                for r in range(k):
                    y = i * s + q - p
                    z = j * s + r - p
                    if 0 <= y < height and 0 <= z < width:
                        best = max(best, x[b, c, y, z])
            out[b, c, i, j] = best
        return out

    @tw.kernel
    def apart(x: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        rows = (height + 2 * p - k) // s + 1
        columns = (width + 2 * p - k) // s + 1
        out = tw.empty((n, channels, rows, columns), x.dtype)
        for b, c, i, j in tw.grid(n, channels, rows, columns):
            best = -tw.inf
            for q in range(k):
                y = i * s + q - p
                if 0 <= y < height:
                    for r in range(k):
                        z = j * s + r - p
                        if 0 <= z < width:
                            best = max(best, x[b, c, y, z])
            out[b, c, i, j] = best
        return out

    return apart if nested else joined


def mean2d(k: int, s: int, p: int) -> Callable[..., Any]:
    @tw.kernel
    def average(x: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        rows = (height + 2 * p - k) // s + 1
        columns = (width + 2 * p - k) // s + 1
        out = tw.empty((n, channels, rows, columns), x.dtype)
        for b, c, i, j in tw.grid(n, channels, rows, columns):
            total = tw.f32(0)
            for q in range(k):
                for r in range(k):
                    y = i * s + q - p
                    z = j * s + r - p
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, c, y, z]
            out[b, c, i, j] = total / (k * k)
        return out

    return average


def pool3d(k: int, s: int, p: int, largest: bool) -> Callable[..., Any]:
    @tw.kernel
    def most(x: tw.Array) -> tw.Array:
        n, channels, depth, height, width = x.shape
        planes = (depth + 2 * p - k) // s + 1
        rows = (height + 2 * p - k) // s + 1
        columns = (width + 2 * p - k) // s + 1
        out = tw.empty((n, channels, planes, rows, columns), x.dtype)
        for b, c, h, i, j in tw.grid(n, channels, planes, rows, columns):
            best = -tw.inf
            for t in range(k):
                for q in range(k):
                    for r in range(k):
                        v = h * s + t - p
                        y = i * s + q - p
                        z = j * s + r - p
                        if 0 <= v < depth and 0 <= y < height and 0 <= z < width:
                            best = max(best, x[b, c, v, y, z])
            out[b, c, h, i, j] = best
        return out

    @tw.kernel
    def average(x: tw.Array) -> tw.Array:
        n, channels, depth, height, width = x.shape
        planes = (depth + 2 * p - k) // s + 1
        rows = (height + 2 * p - k) // s + 1
        columns = (width + 2 * p - k) // s + 1
        out = tw.empty((n, channels, planes, rows, columns), x.dtype)
        for b, c, h, i, j in tw.grid(n, channels, planes, rows, columns):
            total = tw.f32(0)
            for t in range(k):
                for q in range(k):
                    for r in range(k):
                        v = h * s + t - p
                        y = i * s + q - p
                        z = j * s + r - p
                        if 0 <= v < depth and 0 <= y < height and 0 <= z < width:
                            total += x[b, c, v, y, z]
            out[b, c, h, i, j] = total / (k * k * k)
        return out

    return most if largest else average


def pooling(draw: Draw) -> Problem:
    rank = draw.pick(1, 2, 2, 3)
    k = draw.count(2, 11 if rank < 3 else 5)
    s = draw.pick(1, 2, 3, k)
    p = draw.count(0, k // 2)
    largest = draw.pick(True, False)
    spelling = draw.pick("and", "nested ifs")
    elements = 6e7 if draw.on_gpu else 4e6
    sides = {1: ((64, 100000),), 2: ((14, 512), (14, 512)), 3: ((8, 64), (14, 128), (14, 128))}[rank]
    n, c, *space = draw.fitting(elements, (1, 32), (3, 512), *sides)
    space = [side + k for side in space]
    dtype = draw.pick("f32", "bf16") if draw.on_gpu else "f32"
    if rank == 1:
        kernel = (max1d if largest else mean1d)(k, s, p)
    elif rank == 2:
        kernel = max2d(k, s, p, spelling == "nested ifs") if largest else mean2d(k, s, p)
    else:
        kernel = pool3d(k, s, p, largest)

    def peer(x: Any) -> Any:
        functional = importlib.import_module("torch").nn.functional
        return getattr(functional, f"{'max' if largest else 'avg'}_pool{rank}d")(x, k, s, p)

    title = f"{'largest' if largest else 'average'} of {rank}-D windows of {k}, stride {s}, padding {p}, {spelling if rank == 2 and largest else 'and'}"
    shape = (n, c, *space)
    return Problem(title, shape, (Spec(shape, dtype),), kernel, peer, {"torch": peer}, 1e-2 if dtype == "bf16" else 1e-5)


FAMILIES = (
    Family("pooling", "1-D to 3-D, largest and average, windows 2-11, stride 1, 2, 3 or the window, padding to half of it; f32, bf16 on GPUs; 6e7 elements on GPUs, 4e6 on CPUs", pooling, {"gpu": 1.2, "cpu": 1.0}),
)  # fmt: skip
