"""`tw.bitcast` in kernels of loops: the bits of a number as another dtype of the same size."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import UserError


@tw.kernel
def bits_of(x: tw.Array) -> tw.Array:
    out = tw.empty((x.shape[0],), tw.u16)
    for i in tw.grid(x.shape[0]):
        out[i] = tw.bitcast(tw.cast(x[i], tw.f16), tw.u16)
    return out


@tw.kernel
def wrong(x: tw.Array) -> tw.Array:
    out = tw.empty((x.shape[0],), tw.u16)
    for i in tw.grid(x.shape[0]):
        out[i] = tw.bitcast(x[i], tw.u16)
    return out


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_bits(device: str) -> None:
    x = np.array([0.0, -0.0, 1.0, -2.5, 1e-7, 65504.0, 1e9, -np.inf, 0.1], np.float32)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16).view(np.uint16)
    assert np.array_equal(np.asarray(tw.kernel(device=device)(bits_of.python)(x)), want)


def test_sizes_must_agree() -> None:
    with pytest.raises(UserError, match=r"bitcast\(\) to u16, of 16 bits, was given f32, of 32 bits"):
        wrong(np.zeros(3, np.float32))
