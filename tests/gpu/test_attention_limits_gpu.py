"""Attention on a real GPU at its limits: rows without keys, errors beside those of PyTorch's libraries, memory that grows with the length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels_attention
import kernels_masked
import kernels_tiled
import tilewright as tw
from conftest import require
from kernels_attention import attend, scores
from tilewright.base.dtypes import bf16


@pytest.fixture(autouse=True)
def _device() -> None:
    require("cuda")


def torch_with_cuda() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no GPU")
    return torch


def first(found: object) -> np.ndarray:
    return np.asarray(found[0] if isinstance(found, tuple) else found).astype(np.float64)


@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 777, 1000])
@pytest.mark.parametrize("kernel", kernels_masked.MASKED, ids=lambda kernel: kernel.python.__name__)
def test_rows_without_keys_are_zero(kernel: tw.Kernel[..., Any], length: int) -> None:
    """With matrix units, and where there are none for the dtype."""
    for dtype, width, error in ((np.float16, 64, 2e-3), (bf16.numpy, 128, 2e-2), (np.float32, 16, 2e-5)):
        given = kernels_masked.problem(length, width, dtype)
        want = kernels_masked.wanted(*given)
        assert not want[:, 0].any()
        np.testing.assert_allclose(first(kernel(*given, device="cuda")), want, rtol=error, atol=error)


@pytest.mark.parametrize("schedule", ["", "family=attention_mma m=64 n=32 k=64 head_dim_v=64 warps_m=4 stages=2 persistent=0 a_copy=rs"])
def test_nothing_before_the_first_row(schedule: str) -> None:
    kernel = tw.kernel(schedule=schedule)(kernels_masked.earlier.python) if schedule else kernels_masked.earlier
    q, k, v, _ = kernels_masked.problem(300, 64, np.float16)
    want = kernels_masked.wanted(q, k, v, np.tri(300, k=-1, dtype=bool))
    np.testing.assert_allclose(first(kernel(q, k, v, device="cuda")), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("length", [64, 130, 777])
def test_tiles_whose_keys_end_with_a_block_of_queries(length: int) -> None:
    rng = np.random.default_rng(length)
    q, k, v = (rng.standard_normal((2, length, 64)).astype(np.float16) for _ in range(3))
    limit = np.where(np.arange(length)[None] // 48 <= np.arange(length)[:, None] // 48, 0.0, -np.inf)
    want = attend(scores(q[:, None], k[:, None], 0.125) + limit, v[:, None])[:, 0]
    np.testing.assert_allclose(first(kernels_tiled.block_causal_flash(q, k, v, device="cuda")), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 12, 512, 64), (2, 8, 1024, 64), (1, 8, 4096, 64), (2, 8, 512, 128), (1, 4, 4096, 128), (1, 4, 777, 128)])
def test_errors_are_those_of_libraries(shape: tuple[int, ...], causal: bool) -> None:
    """Against float64, by the root of the mean square, at most 1.2 times as far off as the best of PyTorch's. The largest error of a million
    depends on chance: the order of keys alone changes it by an eighth."""
    torch = torch_with_cuda()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(shape[2] + causal)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel([SDPBackend.MATH]):
        want = attention(q.double(), k.double(), v.double(), is_causal=causal)
    kernel = kernels_attention.grouped_causal if causal else kernels_attention.plain
    out = torch.full_like(q, float("nan"))
    kernel(q, k, v, shape[-1] ** -0.5, out=out)

    def errors(found: Any) -> tuple[float, float]:
        difference = found.double() - want
        return difference.square().mean().sqrt().item(), difference.abs().max().item()

    theirs = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel([backend]):
                theirs.append(errors(attention(q, k, v, is_causal=causal)))
        except RuntimeError:
            continue  # not in this build
    assert theirs
    for own, best, times in zip(errors(out), map(min, zip(*theirs, strict=True)), (1.2, 1.5), strict=True):
        assert own <= times * best, (errors(out), theirs)


@pytest.mark.parametrize("kernel", [kernels_attention.plain, kernels_attention.grouped_causal], ids=["plain", "causal"])
def test_memory_grows_with_the_length_only(kernel: tw.Kernel[..., Any]) -> None:
    """65536 positions: nothing but the result is taken from the device; all scores would be 16 GiB."""
    torch = torch_with_cuda()
    from tilewright.runtime.cuda.device import devices

    length = 65536
    q, k, v = (torch.randn((1, 1, length, 64), device="cuda", dtype=torch.bfloat16) for _ in range(3))
    few = q[:, :, :256].contiguous()
    kernel(few, few, few, 0.125)
    torch.cuda.synchronize()
    pool = devices()[0].pool
    pool.flush()
    pool.reset_peak()
    torch.cuda.reset_peak_memory_stats()
    used, held = pool.in_use, torch.cuda.memory_allocated()
    out = kernel(q, k, v, 0.125)
    torch.cuda.synchronize()
    result = length * 64 * 2
    # The result is PyTorch's, as the inputs are; scratch is ours.
    taken = (pool.peak - used) + (torch.cuda.max_memory_allocated() - held)
    print(f"peak {taken} bytes, result {result} bytes, scores would be {length * length * 4} bytes")
    assert result <= taken <= result + (1 << 16)
    del out
