"""The ops of tensor graphs against float64, fused and node by node, on the CPU and the emulator."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import UserError

RNG = np.random.default_rng(7)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def build(op: str, *inputs: np.ndarray, **given: Any) -> tuple[tw.TensorGraph, dict[str, np.ndarray]]:
    g = tw.TensorGraph("one")
    arrays = {f"x{i}": a for i, a in enumerate(inputs)}
    tensors = [g.input(n, a.shape, a.dtype if a.dtype != ml_dtypes.bfloat16 else tw.bf16) for n, a in arrays.items()]
    g.output("y", g.op(op, *tensors, name="node", **given))
    return g, arrays


def both(g: tw.TensorGraph, arrays: dict[str, np.ndarray], device: str = "cpu") -> Any:
    fused, eager = (g.run(device=device, fuse=fuse, **arrays) for fuse in (True, False))
    assert fused.dtype == eager.dtype
    np.testing.assert_allclose(np.asarray(fused, np.float64), np.asarray(eager, np.float64), 1e-3, 1e-6)
    return fused


def close(found: Any, wanted: Any, tolerance: float = 2e-6) -> None:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max(initial=0) <= tolerance * max(1.0, np.abs(wanted).max(initial=0))


@pytest.mark.parametrize("shape", [(1, 31), (33, 7), (2, 3, 17), (5,), (0, 8)])
def test_mul_mat(shape: tuple[int, ...]) -> None:
    x, w, b = normal(*shape), normal(13, shape[-1]), normal(13)
    g, arrays = build("MulMat", x, weight=w)
    close(both(g, arrays), x.astype(np.float64) @ w.T.astype(np.float64), 1e-5)
    g, arrays = build("MulMat", x, weight=w, bias=b)
    close(both(g, arrays), x.astype(np.float64) @ w.T.astype(np.float64) + b, 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2), (np.float64, 1e-13)])
def test_mul_mat_of_other_dtypes(dtype: Any, tolerance: float) -> None:
    x, w = normal(3, 32, dtype=dtype), normal(5, 32, dtype=dtype)
    g, arrays = build("MulMat", x, weight=w)
    close(both(g, arrays), x.astype(np.float64) @ w.T.astype(np.float64), tolerance)


def test_norms_and_softmax_over_the_last_axis() -> None:
    x, gamma, beta = normal(2, 3, 33), normal(33), normal(33)
    d = x.astype(np.float64)
    g, arrays = build("RmsNorm", x, gamma=gamma, scalar=1e-5)
    close(both(g, arrays), d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * gamma)
    g, arrays = build("LayerNorm", x, gamma=gamma, beta=beta)
    close(both(g, arrays), (d - d.mean(-1, keepdims=True)) / np.sqrt(d.var(-1, keepdims=True) + 1e-5) * gamma + beta)
    g, arrays = build("SoftMax", x)
    e = np.exp(d - d.max(-1, keepdims=True))
    close(both(g, arrays), e / e.sum(-1, keepdims=True))


@pytest.mark.parametrize(("op", "function"), [("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply), ("Div", np.divide)])
def test_arithmetic_broadcasts(op: str, function: Any) -> None:
    for first, second in (((3, 5), (3, 5)), ((2, 3, 5), (5,)), ((4, 1, 5), (1, 3, 1)), ((7,), (2, 7))):
        x, y = normal(*first), normal(*second) + 4
        g, arrays = build(op, x, y)
        close(both(g, arrays), function(x.astype(np.float64), y))
    g = tw.TensorGraph("number")
    x = g.input("x", (3, 2), tw.f32)
    g.output("y", g.op(op, x, 2.5))
    value = normal(3, 2)
    close(g.run(x=value, device="cpu"), function(value.astype(np.float64), 2.5))


def test_functions_nan_and_infinity() -> None:
    x = np.array([-np.inf, -3.5, -0.0, 0.7, np.inf, np.nan], np.float32)
    d = x.astype(np.float64)
    with np.errstate(all="ignore"):
        wanted = {"Silu": d / (1 + np.exp(-d)), "Relu": np.maximum(d, 0), "Sigmoid": 1 / (1 + np.exp(-d)), "Tanh": np.tanh(d), "Exp": np.exp(d)}
    for op, reference in wanted.items():
        g, arrays = build(op, x)
        found = both(g, arrays)
        finite = np.isfinite(reference)
        close(found[finite], reference[finite])
        assert np.isnan(found[-1])
    for approximate in (False, True):
        g, arrays = build("Gelu", normal(9), approximate=approximate)
        assert both(g, arrays).shape == (9,)


def test_copy_embedding_argmax() -> None:
    x = normal(4, 6)
    g, arrays = build("Copy", x, dtype=tw.f16)
    assert both(g, arrays).dtype == np.float16
    ids, table = np.array([[3, 0, 9], [1, 1, 2]], np.int32), normal(10, 5)
    g, arrays = build("Embedding", ids, weight=table)
    assert np.array_equal(both(g, arrays), table[ids])
    scores = np.array([[1, 7, 7, 2], [np.nan, 1, 2, 3]], np.float32)
    g, arrays = build("Argmax", scores)
    assert both(g, arrays).tolist() == [1, 0]


def turned(x: np.ndarray, first: int, theta: float, pairs: bool) -> np.ndarray:
    tokens, _, depth = x.shape
    angles = (first + np.arange(tokens))[:, None] * theta ** (-np.arange(0, depth, 2) / depth)
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    d = x.astype(np.float64)
    if pairs:
        a, b = d[..., ::2], d[..., 1::2]
        return np.stack([a * c - b * s, a * s + b * c], -1).reshape(x.shape)
    a, b = d[..., : depth // 2], d[..., depth // 2 :]
    return np.concatenate([a * c - b * s, a * s + b * c], -1)


@pytest.mark.parametrize("pairs", [False, True])
def test_rope(pairs: bool) -> None:
    x = normal(3, 2, 8)
    g = tw.TensorGraph("rope")
    y = g.op("Rope", g.input("x", ("tokens", 2, 8), tw.f32), g.input("position", (1,), tw.i32), pairs=pairs, theta=500.0)
    g.output("y", y)
    for first in (0, 17):
        close(g.run(x=x, position=np.array([first], np.int32), device="cpu"), turned(x, first, 500.0, pairs), 1e-5)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int | None, scale: float) -> np.ndarray:
    """[token, head, feature] against [position, group, feature]; without `first` everything is seen."""
    tokens, heads, _ = q.shape
    k, v = (np.repeat(x.astype(np.float64), heads // k.shape[1], 1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q.astype(np.float64), k) * scale
    if first is not None:
        seen = np.arange(len(k))[None] <= first + np.arange(tokens)[:, None]
        scores = np.where(seen, scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", e / e.sum(-1, keepdims=True), v)


def test_attention_of_all_and_of_earlier_keys() -> None:
    q, k, v = normal(5, 4, 8), normal(7, 2, 8), normal(7, 2, 8)
    g, arrays = build("Attention", q, k, v)
    close(both(g, arrays), attended(q, k, v, None, 8**-0.5), 1e-5)
    g, arrays = build("Attention", q, k[:5], v[:5], causal=True, scale=0.3)
    close(both(g, arrays), attended(q, k[:5], v[:5], 0, 0.3), 1e-5)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_a_cache_grows_step_by_step(device: str) -> None:
    """Tokens go into the cache at a position in device memory; attention sees what is there."""
    g = tw.TensorGraph("step")
    q, k, v = (g.input(n, ("tokens", heads, 8), tw.f32) for n, heads in (("q", 4), ("k", 2), ("v", 2)))
    position = g.input("position", (1,), tw.i32)
    keys = g.op("KVAppend", g.cache("keys", (11, 2, 8), tw.f32), k, position, name="append_k")
    values = g.op("KVAppend", g.cache("values", (11, 2, 8), tw.f32), v, position, name="append_v")
    g.output("y", g.op("Attention", q, keys, values, position))
    seen_k, seen_v = np.zeros((0, 2, 8), np.float32), np.zeros((0, 2, 8), np.float32)
    for fuse, tokens in ((True, 3), (False, 1), (True, 1)):
        q_, k_, v_ = normal(tokens, 4, 8), normal(tokens, 2, 8), normal(tokens, 2, 8)
        first = len(seen_k)
        seen_k, seen_v = np.concatenate([seen_k, k_]), np.concatenate([seen_v, v_])
        y = g.run(q=q_, k=k_, v=v_, position=np.array([first], np.int32), device=device, fuse=fuse)
        close(y, attended(q_, seen_k, seen_v, first, 8**-0.5), 1e-5)
    assert np.array_equal(g.state("keys", device)[:5], seen_k)
    g.reset()
    assert not g.state("values", device).any()


def test_sequences_of_different_lengths_and_pages() -> None:
    sequences, positions = 3, np.array([4, 0, 6], np.int32)
    table = np.array([[5, 2, 0], [1, 7, 3], [4, 6, 8]], np.int32)
    past_k, past_v = normal(sequences, 9, 2, 8), normal(sequences, 9, 2, 8)
    q, k, v = normal(sequences, 1, 4, 8), normal(sequences, 1, 2, 8), normal(sequences, 1, 2, 8)
    for paged in (False, True):
        g = tw.TensorGraph("sequences")
        q_, k_, v_ = (g.input(n, x.shape, tw.f32) for n, x in (("q", q), ("k", k), ("v", v)))
        p = g.input("p", (sequences,), tw.i32)
        pages = {"table": g.input("table", table.shape, tw.i32)} if paged else {}
        shape = (9, 3, 2, 8) if paged else (sequences, 9, 2, 8)
        keys = g.op("KVAppend", g.cache("keys", shape, tw.f32), k_, p, **pages)
        values = g.op("KVAppend", g.cache("values", shape, tw.f32), v_, p, **pages)
        g.output("y", g.op("Attention", q_, keys, values, p, **pages))
        for name, past in (("keys", past_k), ("values", past_v)):
            state = g.state(name, "cpu")
            for s in range(sequences):
                for j in range(9):
                    state[(table[s, j // 3], j % 3) if paged else (s, j)] = past[s, j]
        y = g.run(q=q, k=k, v=v, p=positions, device="cpu", **({"table": table} if paged else {}))
        for s, first in enumerate(positions):
            seen = [np.concatenate([past[s, :first], new[s]]) for past, new in ((past_k, k), (past_v, v))]
            close(y[s], attended(q[s], *seen, first, 8**-0.5), 1e-5)


@pytest.mark.parametrize(("paged", "device"), [(False, "cpu"), (True, "cpu"), (False, "emulator")])
def test_packed_caches(paged: bool, device: str) -> None:
    """Rows are rounded to the bits of `tw.quantize`; attention sees what those are."""
    sequences, table = 2, np.array([[5, 2, 0], [1, 4, 3]], np.int32)
    g = tw.TensorGraph("packed")
    q, k, v = (g.input(n, (sequences, "tokens", heads, 32), tw.f32) for n, heads in (("q", 4), ("k", 2), ("v", 2)))
    p = g.input("p", (sequences,), tw.i32)
    pages = {"table": g.input("table", table.shape, tw.i32)} if paged else {}
    shape: tuple[int | str, ...] = (6, 5, 2, 32) if paged else (sequences, "room", 2, 32)
    keys, values = (g.op("KVAppend", g.cache(n, shape, tw.q8_0), x, p, **pages) for n, x in (("keys", k), ("values", v)))
    g.output("y", g.op("Attention", q, keys, values, p, **pages))
    if not paged:
        g.capacity(room=15)
    seen: list[list[np.ndarray]] = [[np.zeros((0, 2, 32), np.float32)] * 2 for _ in range(sequences)]
    first = np.array([0, 0], np.int32)
    for tokens in (3, 1) if device == "cpu" else (1,):
        given = normal(sequences, tokens, 4, 32), normal(sequences, tokens, 2, 32), normal(sequences, tokens, 2, 32)
        given[1][0, 0] = 0  # a block without any size
        rounded = [np.asarray(tw.dequantize(tw.quantize(x, tw.q8_0))) for x in given[1:]]
        seen = [[np.concatenate([old, x[s]]) for old, x in zip(seen[s], rounded, strict=True)] for s in range(sequences)]
        y = g.run(q=given[0], k=given[1], v=given[2], p=first, device=device, **({"table": table} if paged else {}))
        for s in range(sequences):
            close(y[s], attended(given[0][s], *seen[s], int(first[s]), 32**-0.5), 1e-5)
        first = first + tokens
    state = np.asarray(tw.dequantize(g.state("keys", device)))
    assert np.array_equal(state[5, :1] if paged else state[0, :1], seen[0][0][:1])
    if not paged:
        g.capacity(room=20)
        assert g.state("keys", device).shape == (2, 20, 2, 32)
        assert np.array_equal(np.asarray(tw.dequantize(g.state("keys", device)))[1, : len(seen[1][0])], seen[1][0])
    g.reset()
    assert not np.asarray(tw.dequantize(g.state("keys", device))).any()


def test_packed_caches_that_are_refused() -> None:
    g = tw.TensorGraph("refused")
    with pytest.raises(UserError, match="cannot be q4_0"):
        g.cache("keys", (10, 2, 32), tw.q4_0)
    with pytest.raises(UserError, match="multiple of 32"):
        g.cache("keys", (10, 2, 24), "q8_0")
    cache, q = g.cache("keys", (10, 2, 32), "q8_0"), g.input("q", (1, 4, 32), tw.f32)
    with pytest.raises(UserError, match="without positions"):
        g.op("Attention", q, cache, cache)
    with pytest.raises(UserError, match="a window over keys"):
        g.op("Attention", q, cache, cache, g.input("at", (1,), tw.i32), window=3)
    with pytest.raises(UserError, match="rows of floats"):
        g.op("KVAppend", cache, g.input("k", (1, 2, 32), tw.i32), g.input("p", (1,), tw.i32))


def test_views_between_nodes_are_no_copies() -> None:
    """Queries, keys and values are parts of one product; heads are views; the result of attention is read as rows."""
    x, w, o = normal(5, 16), normal(32, 16) / 4, normal(16, 16) / 4
    g = tw.TensorGraph("views")
    qkv = g.op("MulMat", g.input("x", ("n", 16), tw.f32), weight=w)
    q = qkv[:, :16].reshape("n", 2, 8)
    k, v = qkv[:, 16:24].reshape("n", 1, 8), qkv[:, 24:].reshape("n", 1, 8)
    mixed = g.op("Attention", q, k, v, causal=True)
    g.output("y", g.op("MulMat", mixed.reshape("n", 16), weight=o))
    full = x.astype(np.float64) @ w.T.astype(np.float64)
    wanted = attended(full[:, :16].reshape(5, 2, 8), full[:, 16:24].reshape(5, 1, 8), full[:, 24:].reshape(5, 1, 8), 0, 8**-0.5).reshape(5, 16) @ o.T
    close(both(g, {"x": x}), wanted, 1e-5)
    assert len(g.plan(x=(5, 16)).calls) == 3


def test_views_that_are_none_are_copied() -> None:
    x = normal(3, 4, 5)
    g = tw.TensorGraph("copied")
    y = (g.input("x", (3, 4, 5), tw.f32) * 2.0).transpose(2, 0, 1).reshape(15, 4)
    g.output("y", y + 1.0)
    g.output("whole", y.T)
    found = g.run(x=x, device="cpu")
    wanted = (x * 2).transpose(2, 0, 1).reshape(15, 4)
    assert np.array_equal(found["y"], wanted + 1)
    assert np.array_equal(found["whole"], wanted.T)


def test_inputs_that_are_not_contiguous() -> None:
    x, w = normal(6, 10)[::2, ::-1], normal(4, 10)
    g, arrays = build("MulMat", x, weight=w[::2])
    close(both(g, arrays), x.astype(np.float64) @ w[::2].T, 1e-5)


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_packed_weights_stay_packed(name: str) -> None:
    packed = tw.quantize(normal(24, 64), getattr(tw, name))
    g = tw.TensorGraph("packed")
    x = g.input("x", ("n", 64), tw.f32)
    g.output("y", g.op("Silu", g.op("MulMat", x, weight=g.weight("w", packed))))
    value = normal(3, 64)
    sums = value.astype(np.float64) @ np.asarray(tw.dequantize(packed), np.float64).T
    close(both(g, {"x": value}), sums / (1 + np.exp(-sums)), 1e-5)
    assert g.executor.weights["w", (), "cpu"].dtype is getattr(tw, name)
    if name != "q8_0":
        with pytest.raises(tw.UserError, match="of packed dtypes caches take q8_0"):
            g.cache("c", (4, 1, 64), getattr(tw, name))


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float16, 4e-3), (ml_dtypes.bfloat16, 3e-2)])
def test_caches_of_narrow_floats(dtype: Any, tolerance: float) -> None:
    kind = tw.f16 if dtype is np.float16 else tw.bf16
    g = tw.TensorGraph("narrow")
    q, k, v = (g.input(n, (1, heads, 8), kind) for n, heads in (("q", 4), ("k", 2), ("v", 2)))
    position = g.input("position", (1,), tw.i64)
    keys, values = (g.op("KVAppend", g.cache(n, (5, 2, 8), kind), rows, position) for n, rows in (("keys", k), ("values", v)))
    g.output("y", g.op("Attention", q, keys, values, position))
    past = [normal(0, 2, 8, dtype=dtype) for _ in range(2)]
    for at in range(3):
        rows = [normal(1, heads, 8, dtype=dtype) for heads in (4, 2, 2)]
        past = [np.concatenate([old, new]) for old, new in zip(past, rows[1:], strict=True)]
        y = g.run(**dict(zip("qkv", rows, strict=True)), position=np.array([at]), device="cpu")
        close(y, attended(rows[0], past[0], past[1], at, 8**-0.5), tolerance)
