"""Attention over a cache on a GPU: lengths read as the kernel runs, the same bits from a captured graph, pages, tokens and windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels_decode as text
import tilewright as tw
from kernels_decode import attended

pytestmark = pytest.mark.requires("cuda")


def arrays(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


def host(result: Any) -> np.ndarray:
    return np.asarray(result.numpy() if hasattr(result, "numpy") else result).astype(np.float64)


def on_device(values: np.ndarray) -> Any:
    return tw.to_device(values, "cuda")


def on_gpu(kernel: tw.Kernel[..., Any]) -> tw.Kernel[..., Any]:
    return tw.kernel(device="cuda")(kernel.python)


@pytest.mark.parametrize("depth", [64, 128, 256])
def test_lengths(depth: int) -> None:
    q, k, v = arrays(depth, (8, depth), (4096, 2, depth), (4096, 2, depth))
    for length in (0, 1, 31, 33, 1009, 4096):
        hidden = [x.copy() for x in (k, v)]
        for x in hidden:
            x[length:] = np.nan
        found = host(on_gpu(text.one_length)(q, *hidden, np.array([length], np.int32)))
        np.testing.assert_allclose(found, attended(q, k, v, 0, length), rtol=2e-3, atol=2e-3)


def test_a_graph_gives_the_bits_of_a_call_at_every_length() -> None:
    q, k, v = arrays(1, (8, 128), (8192, 2, 128), (8192, 2, 128))
    kernel = on_gpu(text.one_length)
    given, length = [on_device(x) for x in (q, k, v)], on_device(np.array([8192], np.int32))
    step = tw.graph(lambda *arrays: kernel(*arrays), *given, length)
    for number in (5, 777, 8192):
        length.copy_from(np.array([number], np.int32))
        step.replay()
        replayed = host(step.result)
        assert np.array_equal(replayed, host(kernel(*given, length)))
        np.testing.assert_allclose(replayed, attended(q, k, v, 0, number), rtol=2e-3, atol=2e-3)


def test_tokens_windows_and_pages() -> None:
    q, k, v = arrays(2, (4, 8, 64), (2048, 2, 64), (2048, 2, 64))
    found = host(on_gpu(text.window)(q, k, v, np.array([1000], np.int32), 333))
    want = np.stack([attended(q[i], k, v, 1000 + i + 1 - 333, 1000 + i + 1) for i in range(4)])
    np.testing.assert_allclose(found, want, rtol=2e-3, atol=2e-3)
    pages, lengths = np.random.default_rng(2).permutation(128).reshape(4, 32).astype(np.int32), np.array([0, 3, 400, 512], np.int32)
    keys, values = (x.reshape(128, 16, 2, 64) for x in (k, v))
    found = host(on_gpu(text.paged)(q, keys, values, pages, lengths))
    want = np.stack([attended(q[b], *(x[pages[b]].reshape(-1, 2, 64) for x in (keys, values)), 0, n) for b, n in enumerate(lengths)])
    np.testing.assert_allclose(found, want, rtol=2e-3, atol=2e-3)
