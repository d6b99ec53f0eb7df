"""What a sum and the loop after it both compute is found, and only where the result's array can hold it."""

from __future__ import annotations

from typing import Any

import numpy as np

import kernels_rows
import tilewright as tw
from tilewright.analysis.recomputed import Recomputed, find_recomputed
from tilewright.ir.nodes import walk

X = np.zeros((3, 70), np.float32)


def find(kernel: tw.Kernel[..., Any], *arguments: object) -> Recomputed | None:
    return find_recomputed(kernel.stages(*arguments, target="cpu").stages.loop.calls[0].kernel)


def exponentials(kernel: tw.Kernel[..., Any], *arguments: object) -> int:
    tile = kernel.stages(*arguments, target="x86-64-avx512").stages.tile
    return sum(op.opcode == "exp" for call in tile.calls for op in walk(call.kernel.body))


@tw.kernel
def beside(x: tw.Array, y: tw.Array) -> tw.Array:
    """The loop needs its inputs again, and the value twice."""
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = tw.f32(0)
        for j in range(c):
            s += y[i, j] * tw.exp(x[i, j])
        for j in range(c):
            e = tw.exp(x[i, j])
            out[i, j] = x[i, j] + e * e / s
    return out


@tw.kernel
def turned(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((c, n), x.dtype)
    for i in tw.grid(n):
        s = tw.f32(0)
        for j in range(c):
            s += tw.exp(x[i, j])
        for j in range(c):
            out[j, i] = tw.exp(x[i, j]) / s
    return out


@tw.kernel
def other_place(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = tw.f32(0)
        for j in range(c):
            s += tw.exp(x[i, j])
        for j in range(c):
            out[i, j] = tw.exp(x[i, c - 1 - j]) / s
    return out


@tw.kernel
def under_a_condition(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.zeros((n, c), x.dtype)
    for i in tw.grid(n):
        s = tw.f32(0)
        for j in range(c):
            s += tw.exp(x[i, j])
        for j in range(c):
            if x[i, j] > 0:
                out[i, j] = tw.exp(x[i, j]) / s
    return out


def test_softmax() -> None:
    found = find(kernels_rows.softmax, X)
    assert found is not None and (found.first.opcode, found.again.opcode) == ("exp", "exp")
    assert exponentials(kernels_rows.softmax, X) == 2  # in vectors, and one by one at the end


def test_a_value_among_others() -> None:
    found = find(beside, X, X)
    assert found is not None and found.again.opcode == "exp"
    x, y = np.random.default_rng(1).standard_normal((2, 5, 77)).astype(np.float32)
    e = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(beside(x, y), x + e * e / (y * e).sum(1, keepdims=True), rtol=1e-4, atol=1e-5)


def test_rows_across_memory() -> None:
    x = np.random.default_rng(2).standard_normal((5, 77)).astype(np.float32)
    e = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(turned(x), (e / e.sum(1, keepdims=True)).T, rtol=1e-5)


def test_a_result_over_its_input() -> None:
    x = np.random.default_rng(3).standard_normal((5, 77)).astype(np.float32)
    e, given = np.exp(x.astype(np.float64)), x.copy()
    kernels_rows.softmax(given, out=given)
    np.testing.assert_allclose(given, e / e.sum(1, keepdims=True), rtol=1e-5)
    given = x.copy()
    beside(given, given, out=given)
    np.testing.assert_allclose(given, x + e * e / (x * e).sum(1, keepdims=True), rtol=1e-4, atol=1e-5)


def test_what_is_not_the_same_is_left_alone() -> None:
    assert find(other_place, X) is None
    assert find(under_a_condition, X) is None
    assert find(kernels_rows.softmax, X.astype(np.float16)) is None  # the result is too narrow to hold it
    assert find(kernels_rows.layer_norm, X, X[0], X[0]) is None  # nothing that takes long
    assert find(kernels_rows.residual_norm_gate, X, X, X[0], X) is None  # the function is not in the sum
