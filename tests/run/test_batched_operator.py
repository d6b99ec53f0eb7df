"""`@` of arrays of more than two axes: products of matrices along leading axes that meet, against NumPy in f64."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    return a @ b


@tw.kernel
def scaled(q: tw.Array, k: tw.Array, v: tw.Array) -> tw.Array:
    score = tw.exp(q @ k)
    return (score / score.sum(axis=-1, keepdims=True)) @ v


@tw.kernel
def in_a_loop(a: tw.Array, b: tw.Array) -> tw.Array:
    n, m, _ = a.shape
    out = tw.empty((n, m, b.shape[2]), a.dtype)
    for i in range(n):
        out[i] = a[i] @ b[i]
    return out


SHAPES = [
    ((3, 5, 7), (3, 7, 2)), ((3, 5, 7), (7, 2)), ((5, 7), (3, 7, 2)), ((2, 3, 5, 7), (3, 7, 2)), ((2, 1, 5, 7), (3, 7, 2)), ((1, 5, 7), (3, 7, 2)),
    ((3, 5, 7), (7,)), ((7,), (3, 7, 2)), ((5, 7), (7,)), ((7,), (7, 2)), ((3, 5, 0), (3, 0, 2)), ((1, 1, 1), (1, 1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_products(device: str) -> None:
    rng = np.random.default_rng(3)
    for a, b in SHAPES if device == "cpu" else SHAPES[:7:2]:
        x, y = rng.normal(0, 1, a), rng.normal(0, 1, b)
        got = product(x, y, device=device)
        assert got.shape == (x @ y).shape
        np.testing.assert_allclose(got, x @ y, rtol=1e-12, atol=1e-12)
    x, y, z = rng.normal(0, 1, (3, 5, 4)), rng.normal(0, 1, (3, 4, 9)), rng.normal(0, 1, (3, 9, 2))
    e = np.exp(x @ y)
    np.testing.assert_allclose(scaled(x, y, z, device=device), e / e.sum(-1, keepdims=True) @ z, rtol=1e-12)
    np.testing.assert_allclose(in_a_loop(x, y, device=device), x @ y, rtol=1e-12)


def test_wrong_sizes() -> None:
    with pytest.raises(tw.UserError) as error:
        product(np.ones((3, 5, 7)), np.ones((3, 6, 2)))
    assert "axis 1 of 'b' is 6, but its counterpart is 7 (axis 2 of 'a')" in str(error.value)
    with pytest.raises(tw.UserError) as error:
        product(np.ones((3, 5, 7)), np.ones((2, 7, 2)))
    assert "axis 0 of 'b' is 2, but its counterpart is 3 (axis 0 of 'a')" in str(error.value)
