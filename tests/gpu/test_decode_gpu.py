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


def test_packed_keys_and_values() -> None:
    q, *rows = arrays(7, (8, 128), (2048, 2, 128), (2048, 2, 128))
    k, v = (tw.quantize(x.astype(np.float32), tw.q8_0) for x in rows)
    numbers = [np.asarray(tw.dequantize(x)) for x in (k, v)]
    on_gpu_ = [tw.quantize(on_device(x.astype(np.float32)), tw.q8_0) for x in rows]
    for length in (0, 1, 33, 1009, 2048):
        found = host(on_gpu(text.one_length)(on_device(q), *on_gpu_, on_device(np.array([length], np.int32))))
        np.testing.assert_allclose(found, attended(q, *numbers, 0, length), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("paged", [False, True])
def test_packed_caches_of_a_graph(paged: bool) -> None:
    table = np.array([[5, 2, 0], [1, 4, 3]], np.int32)
    g = tw.TensorGraph("packed")
    q, k, v = (g.input(n, (2, 1, heads, 64), tw.f16) for n, heads in (("q", 4), ("k", 2), ("v", 2)))
    p = g.input("p", (2,), tw.i32)
    pages = {"table": g.input("table", table.shape, tw.i32)} if paged else {}
    keys, values = (g.op("KVAppend", g.cache(n, (6, 5, 2, 64) if paged else (2, 15, 2, 64), tw.q8_0), x, p, **pages) for n, x in (("keys", k), ("values", v)))
    g.output("y", g.op("Attention", q, keys, values, p, **pages))
    seen: list[list[np.ndarray]] = [[np.zeros((0, 2, 64), np.float32)] * 2 for _ in range(2)]
    for position in range(7):
        given = arrays(position, (2, 1, 4, 64), (2, 1, 2, 64), (2, 1, 2, 64))
        rounded = [np.asarray(tw.dequantize(tw.quantize(x.astype(np.float32), tw.q8_0))) for x in given[1:]]
        seen = [[np.concatenate([old, x[s]]) for old, x in zip(seen[s], rounded, strict=True)] for s in range(2)]
        y = host(g.run(q=given[0], k=given[1], v=given[2], p=np.full(2, position, np.int32), device="cuda", **({"table": table} if paged else {})))
        for s in range(2):
            np.testing.assert_allclose(y[s, 0], attended(given[0][s, 0], *seen[s], 0, position + 1), rtol=4e-3, atol=4e-3)
