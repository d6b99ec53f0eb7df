"""A wide number that is stored as a small float is rounded once, as `cast` does it: numbers just beside the middle of two small floats show a stop at f32."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw

SMALL = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f8e4m3": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2}


@tw.kernel
def to_f16(x: tw.Array):
    out = tw.empty(x.shape, tw.f16)
    for i in tw.grid(len(x)):
        out[i] = x[i]
    return out


@tw.kernel
def to_bf16(x: tw.Array):
    out = tw.empty(x.shape, tw.bf16)
    for i in tw.grid(len(x)):
        out[i] = x[i]
    return out


@tw.kernel
def to_f8e4m3(x: tw.Array):
    out = tw.empty(x.shape, tw.f8e4m3)
    for i in tw.grid(len(x)):
        out[i] = x[i]
    return out


@tw.kernel
def to_f8e5m2(x: tw.Array):
    out = tw.empty(x.shape, tw.f8e5m2)
    for i in tw.grid(len(x)):
        out[i] = x[i]
    return out


@tw.kernel
def products(x: tw.Array, y: tw.Array):
    out = tw.empty(x.shape, tw.f16)
    for i in tw.grid(len(x)):
        out[i] = x[i] * y[i]
    return out


@tw.kernel
def in_a_variable(x: tw.Array):
    out = tw.empty(x.shape, tw.bf16)
    for i in tw.grid(len(x)):
        wide = x[i] * 2.0
        out[i] = wide
    return out


def beside_middles(dtype: type) -> np.ndarray:
    """Numbers of f64 a little below and above the middle of two neighbours, by less than an f32 shows."""
    some = np.linspace(0.3, 3, 37).astype(dtype)
    middles = (some.astype(np.float64) + np.nextafter(some, dtype(200)).astype(np.float64)) / 2
    return np.concatenate([middles * (1 - 1e-12), middles * (1 + 1e-12), -middles * (1 - 1e-12)])


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("name", SMALL)
def test_f64(name: str, device: str) -> None:
    dtype = SMALL[name]
    x = beside_middles(dtype)
    kernel = {"f16": to_f16, "bf16": to_bf16, "f8e4m3": to_f8e4m3, "f8e5m2": to_f8e5m2}[name]
    found = np.asarray(kernel(x, device=device))
    exact = x.astype(dtype) if name == "f16" else nearest(x, dtype)
    np.testing.assert_array_equal(found.astype(np.float64), exact.astype(np.float64))
    assert (x.astype(np.float32).astype(dtype) != exact).any()  # by way of f32 they would be others


def nearest(x: np.ndarray, dtype: type) -> np.ndarray:
    """The nearest small float, found among its neighbours."""
    near = x.astype(np.float32).astype(dtype)
    options = np.stack([near, np.nextafter(near, dtype(200)), np.nextafter(near, dtype(-200))])
    return np.take_along_axis(options, np.abs(options.astype(np.float64) - x).argmin(0)[None], 0)[0]


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_integers(device: str) -> None:
    x = np.array([(1 << 40) + (1 << 32) - 1, (1 << 40) + (1 << 32) + 1, (1 << 40) + (3 << 32) - 1], np.int64)
    np.testing.assert_array_equal(np.asarray(to_bf16(x, device=device)).astype(np.float64), [2.0**40, 2.0**40 + 2.0**33, 2.0**40 + 2.0**33])


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_products_and_variables(device: str) -> None:
    x = beside_middles(np.float16)
    np.testing.assert_array_equal(np.asarray(products(x, np.ones_like(x), device=device)), x.astype(np.float16))
    y = beside_middles(ml_dtypes.bfloat16)
    found = np.asarray(in_a_variable(y / 2, device=device))
    np.testing.assert_array_equal(found.astype(np.float64), nearest(y, ml_dtypes.bfloat16).astype(np.float64))
