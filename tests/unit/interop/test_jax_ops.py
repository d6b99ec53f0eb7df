"""Kernels as functions of JAX: alone, traced, mapped and differentiated; and the refusal where JAX is not installed."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import DeviceError, UserError


@tw.kernel
def axpy(a: float, x: tw.Array, y: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows, cols), x.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = a * x[i, j] + y[j]
    return out


@tw.kernel
def axpy_gradients(a: float, x: tw.Array, y: tw.Array, g: tw.Array) -> tw.Array:
    rows, cols = x.shape
    dx = tw.empty((rows, cols), x.dtype)
    dy = tw.empty((cols,), x.dtype)
    for i, j in tw.grid(rows, cols):
        dx[i, j] = a * g[i, j]
    for j in tw.grid(cols):
        dy[j] = tw.sum(g[:, j])
    return dx, dy


def test_without_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "jax":
            raise ImportError("No module named 'jax'")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(DeviceError, match=r"JAX cannot be imported(.|\n)*pip install jax"):
        tw.jax_function(axpy)


def test_bad_arguments() -> None:
    with pytest.raises(UserError, match="a function is no kernel"):
        tw.jax_function(test_without_jax)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="backward= is a int"):
        tw.jax_function(axpy, backward=1)


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((3, 4), np.float32), rng.standard_normal(4, np.float32)


def test_alone_and_traced(jax: Any) -> None:
    f = tw.jax_function(axpy)
    x, y = map(jax.numpy.asarray, data())
    expected = 2 * x + y
    result = f(2.0, x, y)
    assert isinstance(result, jax.Array)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    traced = jax.jit(lambda x, y: jax.numpy.sin(f(2.0, x, y)))
    np.testing.assert_allclose(traced(x, y), jax.numpy.sin(expected), rtol=1e-5, atol=1e-6)
    half = f(2.0, x.astype(jax.numpy.bfloat16), y.astype(jax.numpy.bfloat16))
    assert half.dtype == jax.numpy.bfloat16


def test_shapes_are_known_without_running(jax: Any) -> None:
    f = tw.jax_function(axpy)
    found = jax.eval_shape(lambda x, y: f(2.0, x, y), *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in data()))
    assert (found.shape, found.dtype) == ((3, 4), np.float32)


def test_mapped(jax: Any) -> None:
    f = tw.jax_function(axpy)
    x, y = data()
    stacked = jax.numpy.stack([x, 2 * x, 3 * x])
    np.testing.assert_allclose(jax.vmap(lambda x: f(2.0, x, y))(stacked), 2 * stacked + y, rtol=1e-6)


def test_gradients(jax: Any) -> None:
    x, y = map(jax.numpy.asarray, data())

    def by_function(a: float, x: Any, y: Any, g: Any) -> Any:
        return a * g, g.sum(0)

    for backward in (axpy_gradients, by_function):
        f = tw.jax_function(axpy, backward=backward)
        loss = lambda x, y, f=f: (f(2.0, x, y) ** 2).sum()  # noqa: E731
        plain = lambda x, y: ((2.0 * x + y) ** 2).sum()  # noqa: E731
        for wrap in (lambda g: g, jax.jit):
            for found, wanted in zip(wrap(jax.grad(loss, (0, 1)))(x, y), jax.grad(plain, (0, 1))(x, y), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_errors(jax: Any) -> None:
    f = tw.jax_function(axpy)
    x, y = data()
    with pytest.raises(UserError, match="takes 3 argument"):
        f(1.0, x)
    with pytest.raises(UserError, match="not known while JAX traces"):
        jax.jit(f)(2.0, x, y)
