"""Norms over several axes, written as one nest, and rows: softmax, losses, scans."""

from __future__ import annotations

from typing import Any

import tilewright as tw
from bench.families.draw import Draw, Family, Problem, Spec


def _torch() -> Any:
    import torch

    return torch


# -- kernels --------------------------------------------------------------------------------------------------------


def group_norm(groups: int) -> Any:
    @tw.kernel
    def normed(x: tw.Array, scale: tw.Array, shift: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        each = channels // groups
        out = tw.empty((n, channels, height, width), x.dtype)
        for b, g in tw.grid(n, groups):
            total = tw.f32(0)
            for c in range(each):
                for i in range(height):
                    for j in range(width):
                        total += x[b, g * each + c, i, j]
            mean = total / (each * height * width)
            squares = tw.f32(0)
            for c in range(each):
                for i in range(height):
                    for j in range(width):
                        away = x[b, g * each + c, i, j] - mean
                        squares += away * away
            factor = tw.rsqrt(squares / (each * height * width) + 1e-5)
            for c in range(each):
                for i in range(height):
                    for j in range(width):
                        out[b, g * each + c, i, j] = (x[b, g * each + c, i, j] - mean) * factor * scale[g * each + c] + shift[g * each + c]
        return out

    return normed


@tw.kernel
def instance_norm(x: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    out = tw.empty((n, channels, height, width), x.dtype)
    for b, c in tw.grid(n, channels):
        total = tw.f32(0)
        for i in range(height):
            for j in range(width):
                total += x[b, c, i, j]
        mean = total / (height * width)
        squares = tw.f32(0)
        for i in range(height):
            for j in range(width):
                squares += (x[b, c, i, j] - mean) * (x[b, c, i, j] - mean)
        factor = tw.rsqrt(squares / (height * width) + 1e-5)
        for i in range(height):
            for j in range(width):
                out[b, c, i, j] = (x[b, c, i, j] - mean) * factor
    return out


@tw.kernel
def layer_norm(x: tw.Array, scale: tw.Array, shift: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    out = tw.empty((n, channels, height, width), x.dtype)
    for b in tw.grid(n):
        total = tw.f32(0)
        for c in range(channels):
            for i in range(height):
                for j in range(width):
                    total += x[b, c, i, j]
        mean = total / (channels * height * width)
        squares = tw.f32(0)
        for c in range(channels):
            for i in range(height):
                for j in range(width):
                    squares += (x[b, c, i, j] - mean) * (x[b, c, i, j] - mean)
        factor = tw.rsqrt(squares / (channels * height * width) + 1e-5)
        for c in range(channels):
            for i in range(height):
                for j in range(width):
                    out[b, c, i, j] = (x[b, c, i, j] - mean) * factor * scale[c, i, j] + shift[c, i, j]
    return out


@tw.kernel
def batch_norm(x: tw.Array, scale: tw.Array, shift: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    out = tw.empty((n, channels, height, width), x.dtype)
    for c in tw.grid(channels):
        total = tw.f32(0)
        squares = tw.f32(0)
        for b in range(n):
            for i in range(height):
                for j in range(width):
                    total += x[b, c, i, j]
                    squares += x[b, c, i, j] * x[b, c, i, j]
        mean = total / (n * height * width)
        factor = tw.rsqrt(squares / (n * height * width) - mean * mean + 1e-5)
        for b in range(n):
            for i in range(height):
                for j in range(width):
                    out[b, c, i, j] = (x[b, c, i, j] - mean) * factor * scale[c] + shift[c]
    return out


@tw.kernel
def softmax_rows(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        most = tw.max(x[i, :])
        total = tw.sum(tw.exp(x[i, :] - most))
        for j in tw.grid(columns):
            out[i, j] = tw.exp(x[i, j] - most) / total
    return out


@tw.kernel
def log_softmax_rows(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        most = tw.max(x[i, :])
        total = tw.f32(0)
        for j in range(columns):
            total += tw.exp(x[i, j] - most)
        rest = most + tw.log(total)
        for j in tw.grid(columns):
            out[i, j] = x[i, j] - rest
    return out


@tw.kernel
def divergence(x: tw.Array, y: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows,), tw.f32)
    for i in tw.grid(rows):
        total = tw.f32(0)
        for j in range(columns):
            total += y[i, j] * (tw.log(y[i, j]) - tw.log(x[i, j]))
        out[i] = total
    return out


@tw.kernel
def logistic_loss(x: tw.Array, y: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows,), tw.f32)
    for i in tw.grid(rows):
        total = tw.f32(0)
        for j in range(columns):
            total += tw.log(1.0 + tw.exp(-abs(x[i, j]))) + max(x[i, j], 0.0) - x[i, j] * y[i, j]
        out[i] = total / columns
    return out


@tw.kernel
def masked_running_sum(x: tw.Array, keep: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        total = tw.f32(0)
        for j in range(columns):
            if keep[i, j] > 0.5:
                total += x[i, j]
            out[i, j] = total
    return out


# -- draws ----------------------------------------------------------------------------------------------------------


def _elements(draw: Draw) -> float:
    return 5e7 if draw.on_gpu else 2e6


def _image(draw: Draw) -> tuple[int, ...]:
    return draw.fitting(_elements(draw), (1, 64), (8, 512), (7, 256), (7, 256))


def group(draw: Draw) -> Problem:
    groups = draw.pick(2, 4, 8, 16, 32) if not draw.small else 2
    n, c, h, w = _image(draw)
    c = max(1, c // groups) * groups
    peer = lambda x, s, b: _torch().nn.functional.group_norm(x, groups, s, b)  # noqa: E731
    dtype = draw.pick("f32", "bf16") if draw.on_gpu else "f32"
    return _normed(f"group norm, {groups} groups", (n, c, h, w), (Spec((c,), dtype), Spec((c,), dtype)), group_norm(groups), peer, dtype)


def instance(draw: Draw) -> Problem:
    shape = _image(draw)
    dtype = draw.pick("f32", "bf16") if draw.on_gpu else "f32"
    return _normed("instance norm", shape, (), instance_norm, lambda x: _torch().nn.functional.instance_norm(x), dtype)


def layer(draw: Draw) -> Problem:
    shape = draw.fitting(_elements(draw), (8, 4096), (4, 128), (4, 64), (4, 64))
    dtype = draw.pick("f32", "bf16") if draw.on_gpu else "f32"
    rest = shape[1:]
    peer = lambda x, s, b: _torch().nn.functional.layer_norm(x, rest, s, b)  # noqa: E731
    return _normed("layer norm over three axes", shape, (Spec(rest, dtype), Spec(rest, dtype)), layer_norm, peer, dtype)


def batch(draw: Draw) -> Problem:
    n, c, h, w = _image(draw)
    peer = lambda x, s, b: _torch().nn.functional.batch_norm(x, None, None, s, b, training=True)  # noqa: E731
    return _normed("batch norm, training", (n + 1, c, h, w), (Spec((c,)), Spec((c,))), batch_norm, peer, "f32")


def _normed(title: str, shape: tuple[int, ...], others: tuple[Spec, ...], ours: Any, peer: Any, dtype: str) -> Problem:
    return Problem(f"{title} {dtype}", shape, (Spec(shape, dtype), *others), ours, peer, {"torch": peer}, 2e-2 if dtype == "bf16" else 1e-4)


def softmax(draw: Draw) -> Problem:
    rows, columns = draw.fitting((2e8 if draw.on_gpu else 2e6), (4, 8192), (3000, 400000))
    log = draw.pick(True, False)
    dtype = draw.pick("f32", "bf16") if draw.on_gpu else "f32"
    peer = lambda x: (_torch().log_softmax if log else _torch().softmax)(x, 1)  # noqa: E731
    return _normed(("log-" if log else "") + "softmax of long rows", (rows, columns), (), log_softmax_rows if log else softmax_rows, peer, dtype)


def losses(draw: Draw) -> Problem:
    rows, columns = draw.fitting((1e8 if draw.on_gpu else 1e6), (64, 32768), (64, 32768))
    if draw.pick(True, False):
        peer = lambda x, y: _torch().nn.functional.kl_div(x.log(), y, reduction="none").sum(1)  # noqa: E731
        specs = (Spec((rows, columns), kind="positive"), Spec((rows, columns), kind="positive"))
        return Problem("KL divergence with logs", (rows, columns), specs, divergence, peer, {"torch": peer})
    peer = lambda x, y: _torch().nn.functional.binary_cross_entropy_with_logits(x, y, reduction="none").mean(1)  # noqa: E731
    specs = (Spec((rows, columns)), Spec((rows, columns), kind="uniform"))
    return Problem("logistic loss by softplus", (rows, columns), specs, logistic_loss, peer, {"torch": peer})


def scans(draw: Draw) -> Problem:
    rows, columns = draw.fitting((6e7 if draw.on_gpu else 2e6), (8, 8192), (512, 65536))
    peer = lambda x, keep: _torch().cumsum(x * (keep > 0.5), 1)  # noqa: E731
    return Problem("masked running sum, plain loop", (rows, columns), (Spec((rows, columns)), Spec((rows, columns), kind="uniform")), masked_running_sum, peer, {"torch": peer})


_IMAGES = "batch 1-64, channels 8-512, sides 7-256; 5e7 elements on GPUs, 2e6 on CPUs"
FAMILIES = (
    Family("group_norm", f"2-32 groups, one nest; {_IMAGES}", group, {"gpu": 1.3, "cpu": 1.0}),
    Family("instance_norm", f"4-D arrays, one nest; {_IMAGES}", instance, {"gpu": 1.3, "cpu": 1.0}),
    Family("layer_norm", "three trailing axes of 4-128, 4-64, 4-64", layer, {"gpu": 1.3, "cpu": 1.0}),
    Family("batch_norm", f"training, f32; {_IMAGES}", batch, {"gpu": 1.0, "cpu": 1.0}),
    Family("long_softmax", "softmax and log-softmax, rows of 3000-400000", softmax, {"gpu": 1.05, "cpu": 1.0}),
    Family("row_losses", "KL divergence with logs, logistic loss by softplus; 64-32768 rows and columns", losses, {"gpu": 1.0, "cpu": 1.0}),
    Family("loop_scan", "masked running sum along rows of 512-65536, as a plain loop", scans, {"gpu": 2.0, "cpu": 1.0}),
)  # fmt: skip
