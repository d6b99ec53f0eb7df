"""Features that turn with others half a head away: independent, so parallel, and read in whole vectors."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np

import tilewright as tw


@tw.kernel
def rope(x: tw.Array, cos: tw.Array, sin: tw.Array) -> tw.Array:
    batch, length, heads, depth = x.shape
    half = depth // 2
    out = tw.empty((batch, length, heads, depth), x.dtype)
    for b, s, h, d in tw.grid(batch, length, heads, half):
        low = tw.f32(x[b, s, h, d])
        high = tw.f32(x[b, s, h, d + half])
        out[b, s, h, d] = low * cos[s, d] - high * sin[s, d]
        out[b, s, h, d + half] = high * cos[s, d] + low * sin[s, d]
    return out


def test_halves_are_read_in_vectors() -> None:
    x, turns = np.zeros((2, 64, 32, 128), ml_dtypes.bfloat16), np.zeros((64, 64), ml_dtypes.bfloat16)
    ptx = rope.compile(x, turns, turns, target="sm_90a").code.decode()
    accesses = set(re.findall(r"(?:ld|st)\.global\S*", ptx))
    assert accesses == {"ld.global.nc.v4.b32", "st.global.v4.b32"}


def test_odd_heads_stay_right() -> None:
    rng = np.random.default_rng(0)
    for depth in (2, 7, 30, 128):
        half = depth // 2
        x = rng.standard_normal((2, 5, 3, depth)).astype(np.float32)
        cos, sin = (rng.standard_normal((5, half)).astype(np.float32) for _ in range(2))
        low, high = x[..., :half].astype(np.float64), x[..., half : 2 * half].astype(np.float64)
        c, s = cos[None, :, None], sin[None, :, None]
        expected = np.concatenate([low * c - high * s, high * c + low * s], -1)
        for device in ("cpu", "emulator"):
            # The last of an odd number of elements has no partner, and is not written.
            np.testing.assert_allclose(rope(x, cos, sin, device=device, out=np.zeros_like(x))[..., : 2 * half], expected, atol=1e-5)
