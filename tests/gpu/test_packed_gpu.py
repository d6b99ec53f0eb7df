"""Products of packed weights with many rows on a GPU: every format, dtype and odd size, against float64."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.base import dtypes
from tilewright.base.dtypes import DType

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.requires("cuda")
FORMATS = [*(d for d in dtypes.ALL if d.is_packed), tw.q4_group(32), tw.q4_group(16, scale=tw.f32, zero_point=True), tw.q8_group(64, zero_point=True)]


@tw.kernel
def product(x: tw.Array, w: tw.Array) -> tw.Array:
    m, k = x.shape
    n = w.shape[0]
    y = tw.empty((m, n), tw.f32)
    for b, i in tw.grid(m, n):
        total = 0.0
        for j in range(k):
            total += x[b, j] * w[i, j]
        y[b, i] = total
    return y


def check(dtype: DType, m: int, n: int, k: int, of: object) -> None:
    random = np.random.default_rng(m + n + k)
    w = tw.quantize(random.standard_normal((n, k)).astype(np.float32), dtype)
    there = tw.to_device(w, "cuda")
    x = torch.from_numpy(random.standard_normal((m, k)).astype(np.float32)).cuda().to(of)
    known = torch.from_numpy(np.asarray(tw.dequantize(w))).cuda()
    if m > 8:  # more rows than those of a product with few: weights are rounded to the dtype of x
        known = known.to(of)
    known = known.double()
    wanted = x.double() @ known.T
    got = torch.as_tensor(product(x, there)).double()
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 2e-5


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(9, 257, 1536), (131, 640, 2048)])
def test_every_format(dtype: DType, m: int, n: int, k: int) -> None:
    check(dtype, m, n, k, torch.bfloat16)


@pytest.mark.parametrize("of", [torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(5, 33, 256), (64, 4096, 512), (513, 300, 768)])
def test_dtypes_and_sizes(of: object, m: int, n: int, k: int) -> None:
    check(tw.q4_k, m, n, k, of)
    check(tw.q6_k, m, n, k, of)
