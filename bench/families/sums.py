"""Sums over axes that do not collapse, and products of a vector with a matrix from the left."""

from __future__ import annotations

from typing import Any

import tilewright as tw
from bench.families.draw import Draw, Family, Problem, Spec


@tw.kernel
def weighted_total(x: tw.Array, v: tw.Array) -> float:
    rows, columns = x.shape
    total = 0.0
    for i in range(rows):
        for j in range(columns):
            total += x[i, j] * v[j]
    return total


@tw.kernel
def weighted_total_expression(x: tw.Array, v: tw.Array) -> float:
    return tw.sum(x * v)


@tw.kernel
def outer_axes(x: tw.Array) -> tw.Array:
    n, channels, length = x.shape
    out = tw.empty((channels,), x.dtype)
    for c in tw.grid(channels):
        total = tw.f32(0)
        for b in range(n):
            for i in range(length):
                total += x[b, c, i]
        out[c] = total
    return out


@tw.kernel
def outer_axes_expression(x: tw.Array) -> tw.Array:
    return tw.sum(x, axis=(0, 2))


@tw.kernel
def every_element(x: tw.Array) -> float:
    return tw.sum(x)


@tw.kernel
def largest_of_outer(x: tw.Array) -> tw.Array:
    n, channels, length = x.shape
    out = tw.empty((channels,), x.dtype)
    for c in tw.grid(channels):
        best = -tw.inf
        for b in range(n):
            for i in range(length):
                best = max(best, x[b, c, i])
        out[c] = best
    return out


@tw.kernel
def left_product(t: tw.Array, a: tw.Array) -> tw.Array:
    rows, columns = a.shape
    out = tw.empty((columns,), a.dtype)
    for j in tw.grid(columns):
        total = tw.f32(0)
        for i in range(rows):
            total += t[i] * a[i, j]
        out[j] = total
    return out


@tw.kernel
def left_product_operator(t: tw.Array, a: tw.Array) -> tw.Array:
    return t @ a


@tw.kernel
def left_product_transposed(t: tw.Array, a: tw.Array) -> tw.Array:
    return a.T @ t


def _elements(draw: Draw) -> float:
    return 1e8 if draw.on_gpu else 4e6


def crossing(draw: Draw) -> Problem:
    kind = draw.pick("nest", "expression", "outer", "outer expression", "view", "largest")
    if kind in ("nest", "expression"):
        rows, columns = draw.fitting(_elements(draw), (64, 30000), (64, 30000))
        ours = weighted_total if kind == "nest" else weighted_total_expression
        peer = lambda x, v: (x * v).sum()  # noqa: E731
        specs = (Spec((rows, columns), kind="positive"), Spec((columns,), kind="positive"))
        return Problem(f"x[i, j] * v[j] summed over both, {kind}", (rows, columns), specs, ours, peer, {"torch": peer, "torch.mv": lambda x, v: (x @ v).sum()})
    if kind == "view":
        rows, columns = draw.fitting(_elements(draw), (64, 30000), (64, 30000))
        step = draw.count(2, 3)
        peer_view = lambda x: x[:, ::step].sum()  # noqa: E731
        return Problem(f"sum of a view, every {step} columns", (rows, columns), (Spec((rows, columns), kind="positive"),), lambda x: every_element(x[:, ::step]), peer_view, {"torch": peer_view})
    n, c, length = draw.fitting(_elements(draw), (8, 512), (4, 512), (16, 8192))
    if kind == "largest":
        peer_most = lambda x: x.amax((0, 2))  # noqa: E731
        return Problem("largest over axes 0 and 2", (n, c, length), (Spec((n, c, length)),), largest_of_outer, peer_most, {"torch": peer_most})
    peer_outer = lambda x: x.sum((0, 2))  # noqa: E731
    summed = outer_axes if kind == "outer" else outer_axes_expression
    return Problem(f"sums over axes 0 and 2, {'nest' if kind == 'outer' else 'expression'}", (n, c, length), (Spec((n, c, length), kind="positive"),), summed, peer_outer, {"torch": peer_outer})


def from_the_left(draw: Draw) -> Problem:
    rows, columns = draw.fitting(_elements(draw), (32, 30000), (32, 30000))
    spelling, ours = draw.pick(("nest", left_product), ("t @ A", left_product_operator), ("A.T @ t", left_product_transposed))
    peers: dict[str, Any] = {"torch": lambda t, a: t @ a}
    if not draw.on_gpu:
        peers["numpy"] = lambda t, a: t @ a
    return Problem(f"sum over i of t[i] * A[i, j], {spelling}", (rows, columns), (Spec((rows,)), Spec((rows, columns))), ours, lambda t, a: t @ a, peers)


FAMILIES = (
    Family("crossing_sums", "x[i, j] * v[j] over both; axes 0 and 2 of three, sums and largest; views with steps; 1e8 elements on GPUs, 4e6 on CPUs", crossing, {"gpu": 1.0, "cpu": 1.0}),
    Family("left_product", "y[j] = sum of t[i] * A[i, j]: nest, t @ A, A.T @ t; 32-30000 rows and columns", from_the_left, {"gpu": 1.0, "cpu": 1.0}),
)  # fmt: skip
