"""Packed blocks with NumPy: known answers, the reference of GGML where it is installed, errors of each format, and layouts of groups."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tilewright.base import dtypes
from tilewright.base.dtypes import DType, by_name
from tilewright.base.packed.dequantize import dequantize_blocks
from tilewright.base.packed.quantize import quantize_blocks

KNOWN = {
    "q4_0": ("4036e046acf258bd1379df358be046acf268", "19c8ca57eacb4567f749ffd800873d89"),
    "q4_1": ("ab3640c2d0369bf257bd1369ce258ae0469cf258", "544f88cc2c2ab905d28716663b0cd0e8"),
    "q5_0": ("4032a4a52d6dc07c38f3bf6b26e2ae5a15d18d49f4c0", "5985e2c953ba30a38490315cc9f51601"),
    "q5_1": ("743240c2a4a52d6db07b37e3af6a26d29d5905c18c48f4b0", "41ed12882152569163db7c7650c887ac"),
    "q8_0": ("4d2681df3d9af856b41270cd2b89e745a2005ebb1977d53390ee4caa0866c3217fdc", "25d671dba589f87749a1f5bd7c7047c7"),
    "q4_k": ("", "587f24dbc52b03ae0afc57706da31e5b"),
    "q5_k": ("", "7607c7825789434c0eb8b31724d6afd3"),
    "q6_k": ("", "6c1bfc7a7256a7fb93b6f66d9b9d33b7"),
}  # fmt: skip
"""By format: the bytes that GGML's reference makes of `VALUES`, where it makes some, and what it makes of bytes, hashed."""
VALUES = (((np.arange(256) * 37) % 101 - 50) / 16).astype(np.float32)
PACKED = [dtype for dtype in dtypes.ALL if dtype.is_packed]
ERRORS = {"q4_0": 0.09, "q4_1": 0.082, "q5_0": 0.045, "q5_1": 0.040, "q8_0": 0.0057, "q4_k": 0.075, "q5_k": 0.038, "q6_k": 0.019}
"""The root mean square error that docs/numerics.md states, for numbers of a normal distribution with deviation 1."""


def normal(rows: int, dtype: DType) -> np.ndarray:
    return np.random.default_rng(7).standard_normal((rows, dtype.block)).astype(np.float32)


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_known_answers(dtype: DType) -> None:
    made, read = KNOWN[dtype.name]
    if made:
        assert quantize_blocks(VALUES[None, : dtype.block], dtype).tobytes().hex() == made
    pattern = ((np.arange(dtype.block_bytes) * 73 + 19) % 251).astype(np.uint8)
    assert hashlib.sha256(dequantize_blocks(pattern[None], dtype).tobytes()).hexdigest()[:32] == read


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_the_reference_of_ggml(dtype: DType) -> None:
    quants = pytest.importorskip("gguf.quants")
    kind = getattr(pytest.importorskip("gguf.constants").GGMLQuantizationType, dtype.name.upper())
    values = normal(64, dtype)
    values[0], values[1], values[2, 1:] = 0, 1.5, 0
    packed = quantize_blocks(values, dtype)
    np.testing.assert_array_equal(dequantize_blocks(packed, dtype), quants.dequantize(packed.reshape(-1), kind).reshape(values.shape))
    if KNOWN[dtype.name][0]:
        np.testing.assert_array_equal(packed, quants.quantize(values.reshape(-1), kind).reshape(packed.shape))


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_errors_are_as_stated(dtype: DType) -> None:
    values = normal(128, dtype)
    error = np.sqrt(np.mean((dequantize_blocks(quantize_blocks(values, dtype), dtype) - values) ** 2))
    assert 0.8 * ERRORS[dtype.name] < error <= ERRORS[dtype.name]


@pytest.mark.parametrize("dtype", [*PACKED, *dtypes.GROUPS], ids=str)
@pytest.mark.parametrize("values", [0.0, 1.5, -3.0, 1e-30, 6e4])
def test_blocks_of_one_number(dtype: DType, values: float) -> None:
    """A constant block comes back within a step of its format; zero is exact."""
    found = dequantize_blocks(quantize_blocks(np.full((2, dtype.block), values, np.float32), dtype), dtype)
    assert np.abs(found - values).max() <= abs(values) / 60 if abs(values) > 1e-20 else np.abs(found).max() <= 1e-7


def test_no_blocks() -> None:
    for dtype in (*PACKED, *dtypes.GROUPS):
        packed = quantize_blocks(np.empty((0, dtype.block), np.float32), dtype)
        assert packed.shape == (0, dtype.block_bytes)
        assert dequantize_blocks(packed, dtype).shape == (0, dtype.block)


def test_groups_lie_as_documented() -> None:
    dtype = by_name("q4_g16_f32_z")
    values = np.arange(16, dtype=np.float32)[None] - 5
    packed = quantize_blocks(values, dtype)
    assert packed.shape == (1, 16)
    assert packed[:, :4].copy().view("<f4").item() == 1.0
    assert packed[0, 4:8].tolist() == [5, 0, 0, 0]
    assert packed[0, 8:].tolist() == [low | low + 1 << 4 for low in range(0, 16, 2)]
    np.testing.assert_array_equal(dequantize_blocks(packed, dtype), values)


def test_names() -> None:
    assert all(by_name(dtype.name) is dtype for dtype in (*PACKED, *dtypes.GROUPS))
    assert all(dtype.element is dtypes.f32 and dtype.is_packed for dtype in (*PACKED, *dtypes.GROUPS))
    assert dtypes.f16.element is dtypes.f16
