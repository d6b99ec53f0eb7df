"""Rows that stay in registers on a real GPU, of lengths that vectors divide and of others, against float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kernels_rows import CASES

pytestmark = pytest.mark.requires("cuda")
DTYPES = {"f32": (np.float32, 4e-6), "bf16": (ml_dtypes.bfloat16, 2**-7), "f16": (np.float16, 2**-9)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("n", "c"), [(7, 33), (64, 1024), (67, 1501), (67, 2053), (33, 7001), (17, 16384), (33, 20011), (35, 50257)])
def test_rows_against_float64(name: str, dtype: str, n: int, c: int) -> None:
    case, (kind, bound) = CASES[name], DTYPES[dtype]
    inputs = case.inputs(np.random.default_rng(c), n, c, kind)
    found, expected = case.kernel(*inputs, device="cuda"), case.expected(inputs)
    assert isinstance(found, np.ndarray)
    assert np.max(np.abs(found.astype(np.float64) - expected) / (1 + np.abs(expected))) < bound
