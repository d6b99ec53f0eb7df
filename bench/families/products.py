"""Products of matrices and attention: shapes beside the usual ones, triangles, symmetric results, chains."""

from __future__ import annotations

import math
from typing import Any

import tilewright as tw
from bench.families.draw import Draw, Family, Problem, Spec


def _torch() -> Any:
    import torch

    return torch


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def product_operator(a: tw.Array, b: tw.Array) -> tw.Array:
    return a @ b


@tw.kernel
def product_of_rows(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[0]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[j, p]
        out[i, j] = total
    return out


@tw.kernel
def product_of_columns(a: tw.Array, b: tw.Array) -> tw.Array:
    k, m = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[p, i] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def triangular_range(a: tw.Array, b: tw.Array) -> tw.Array:
    n = a.shape[0]
    out = tw.empty((n, n), a.dtype)
    for i, j in tw.grid(n, n):
        total = tw.f32(0)
        for p in range(i, n):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def triangular_condition(a: tw.Array, b: tw.Array) -> tw.Array:
    n = a.shape[0]
    out = tw.empty((n, n), a.dtype)
    for i, j in tw.grid(n, n):
        total = tw.f32(0)
        for p in range(n):
            if p <= i:
                total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def triangular_both(a: tw.Array, b: tw.Array) -> tw.Array:
    n = a.shape[0]
    out = tw.zeros((n, n), a.dtype)
    for i in tw.grid(n):
        for j in range(i, n):
            total = tw.f32(0)
            for p in range(i, j + 1):
                total += a[i, p] * b[p, j]
            out[i, j] = total
    return out


@tw.kernel
def rank_update(a: tw.Array) -> tw.Array:
    n, k = a.shape
    out = tw.empty((n, n), a.dtype)
    for i, j in tw.grid(n, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * a[j, p]
        out[i, j] = total
    return out


@tw.kernel
def covariance(x: tw.Array) -> tw.Array:
    samples, n = x.shape
    mean = tw.sum(x, axis=0) / samples
    out = tw.empty((n, n), x.dtype)
    for i, j in tw.grid(n, n):
        total = 0.0
        for s in range(samples):
            total += (x[s, i] - mean[i]) * (x[s, j] - mean[j])
        out[i, j] = total / (samples - 1)
    return out


@tw.kernel
def chain(a: tw.Array, b: tw.Array, c: tw.Array) -> tw.Array:
    return (a @ b) @ c


def attention(d: int, causal: bool) -> Any:
    scale = 1 / math.sqrt(d)

    @tw.kernel
    def attended(q: tw.Array, k: tw.Array, v: tw.Array) -> tw.Array:
        heads, queries, width = q.shape
        _, keys, _ = k.shape
        out = tw.empty((heads, queries, width), q.dtype)
        for h, i in tw.grid(heads, queries):
            most = -tw.inf
            for j in range(keys):
                score = tw.f32(0)
                for c in range(width):
                    score += q[h, i, c] * k[h, j, c]
                most = max(most, score * scale)
            whole = tw.f32(0)
            for j in range(keys):
                score = tw.f32(0)
                for c in range(width):
                    score += q[h, i, c] * k[h, j, c]
                whole += tw.exp(score * scale - most)
            for e in range(width):
                mixed = tw.f32(0)
                for j in range(keys):
                    score = tw.f32(0)
                    for c in range(width):
                        score += q[h, i, c] * k[h, j, c]
                    mixed += tw.exp(score * scale - most) * v[h, j, e]
                out[h, i, e] = mixed / whole
        return out

    @tw.kernel
    def earlier(q: tw.Array, k: tw.Array, v: tw.Array) -> tw.Array:
        heads, queries, width = q.shape
        out = tw.empty((heads, queries, width), q.dtype)
        for h, i in tw.grid(heads, queries):
            most = -tw.inf
            for j in range(i + 1):
                score = tw.f32(0)
                for c in range(width):
                    score += q[h, i, c] * k[h, j, c]
                most = max(most, score * scale)
            whole = tw.f32(0)
            for j in range(i + 1):
                score = tw.f32(0)
                for c in range(width):
                    score += q[h, i, c] * k[h, j, c]
                whole += tw.exp(score * scale - most)
            for e in range(width):
                mixed = tw.f32(0)
                for j in range(i + 1):
                    score = tw.f32(0)
                    for c in range(width):
                        score += q[h, i, c] * k[h, j, c]
                    mixed += tw.exp(score * scale - most) * v[h, j, e]
                out[h, i, e] = mixed / whole
        return out

    return earlier if causal else attended


# -- draws ----------------------------------------------------------------------------------------------------------


def _product(draw: Draw, m: int, n: int, k: int, dtype: str, title: str) -> Problem:
    spelling = draw.pick("nest", "operator", "rows", "columns")
    ours = {"nest": product, "operator": product_operator, "rows": product_of_rows, "columns": product_of_columns}[spelling]
    first = (k, m) if spelling == "columns" else (m, k)
    second = (n, k) if spelling == "rows" else (k, n)

    def peer(a: Any, b: Any) -> Any:
        return (a.T if spelling == "columns" else a) @ (b.T if spelling == "rows" else b)

    peers: dict[str, Any] = {"torch": peer} | ({} if draw.on_gpu else {"numpy": peer})
    tolerance = {"bf16": 2e-2, "f64": 1e-12}.get(dtype, 1e-4)
    return Problem(f"{title} {dtype}, {spelling}", (m, n, k), (Spec(first, dtype), Spec(second, dtype)), ours, peer, peers, tolerance, 2.0 * m * n * k)


def deep(draw: Draw) -> Problem:
    m, n, k = draw.fitting((2e10 if draw.on_gpu else 1e8), (16, 400), (16, 400), (20000, 500000) if draw.on_gpu else (5000, 100000))
    return _product(draw, m, n, k, draw.pick("f32", "bf16") if draw.on_gpu else "f32", "few results, a long sum,")


def plain_f32(draw: Draw) -> Problem:
    m, n, k = draw.fitting((3e10 if draw.on_gpu else 2e8), (64, 6000), (64, 6000), (64, 6000))
    return _product(draw, m, n, k, "f32", "product")


def plain_f64(draw: Draw) -> Problem:
    m, n, k = draw.fitting((1e10 if draw.on_gpu else 1e8), (32, 3000), (32, 3000), (32, 3000))
    return _product(draw, m, n, k, "f64", "product")


def few_rows(draw: Draw) -> Problem:
    m = draw.count(1, 64)
    n, k = draw.fitting((6e7 if draw.on_gpu else 4e6), (1024, 16384), (1024, 16384))
    return _product(draw, m, n, k, draw.pick("bf16", "f32") if draw.on_gpu else "f32", "linear with few rows")


def triangular(draw: Draw) -> Problem:
    n = draw.size(1500, 5000, small=40) if draw.on_gpu else draw.size(200, 700, small=40)
    dtype = draw.pick("f32", "bf16") if draw.on_gpu else "f32"
    kind = draw.pick("range", "condition", "both")
    ours = {"range": triangular_range, "condition": triangular_condition, "both": triangular_both}[kind]

    def peer(a: Any, b: Any) -> Any:
        if kind == "range":
            return a.triu() @ b
        return a.tril() @ b if kind == "condition" else (a.triu() @ b.triu()).triu()

    # What a user of the library would call: the full product of matrices whose zeros are there.
    full = lambda a, b: a @ b  # noqa: E731
    return Problem(f"triangular, {kind} {dtype}", (n, n, n), (Spec((n, n), dtype), Spec((n, n), dtype)), ours, peer, {"torch": peer, "torch, full product": full}, 2e-2 if dtype == "bf16" else 1e-4, 2.0 * n**3)


def symmetric(draw: Draw) -> Problem:
    n, k = draw.size(100, 900, small=40), draw.size(200, 2000, small=40)
    dtype = draw.pick("f32", "f64")
    tolerance = 1e-11 if dtype == "f64" else 1e-4
    if draw.pick(True, False):
        peer = lambda a: a @ a.T  # noqa: E731
        return Problem(f"A @ A.T as a nest {dtype}", (n, k), (Spec((n, k), dtype),), rank_update, peer, {"torch": peer, "numpy": peer}, tolerance)
    import numpy as np

    exact = lambda x: _torch().cov(x.T)  # noqa: E731
    return Problem(f"covariance {dtype}", (k, n), (Spec((k, n), dtype),), covariance, exact, {"torch": exact, "numpy": lambda x: np.cov(x, rowvar=False)}, tolerance)


def chains(draw: Draw) -> Problem:
    a, b, c, d = (draw.size(100, 700, small=30) for _ in range(4))
    dtype = draw.pick("f64", "f32")
    peer = lambda x, y, z: (x @ y) @ z  # noqa: E731
    specs = (Spec((a, b), dtype), Spec((b, c), dtype), Spec((c, d), dtype))
    return Problem(f"two products in a row {dtype}", (a, b, c, d), specs, chain, peer, {"torch": peer, "numpy": peer}, 1e-11 if dtype == "f64" else 1e-4)


def attentions(draw: Draw) -> Problem:
    d = draw.pick(32, 40, 64, 80, 128, 256, 512, 1024) if draw.on_gpu else draw.pick(32, 64, 80, 128)
    dtype = draw.pick("f32", "f16", "bf16") if draw.on_gpu else "f32"
    heads, length = draw.fitting((2e10 if draw.on_gpu else 5e7) / d / 1000, (4, 128), (128, 4096) if draw.on_gpu else (64, 512))
    if draw.small:
        d = draw.pick(16, 32)
    causal = draw.pick(True, False)
    peer = lambda q, k, v: _torch().nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)[0]  # noqa: E731
    shape = (heads, length, d)
    return Problem(f"attention {dtype}, width {d}{', causal' if causal else ''}", shape, (Spec(shape, dtype),) * 3, attention(d, causal), peer, {"torch": peer}, 1e-4 if dtype == "f32" else 2e-2)


FAMILIES = (
    Family("deep_product", "16-400 x 16-400 results, sums of 20000-500000 (CPUs 5000-100000); operands as rows or columns", deep, {"gpu": 1.0, "cpu": 1.0}),
    Family("product_f32", "64-6000 each, products near 3e10 (CPUs 2e8); nest, operator, A @ B.T, A.T @ B", plain_f32, {"gpu": 1.7, "cpu": 1.0}),
    Family("product_f64", "32-3000 each; nest, operator, A @ B.T, A.T @ B", plain_f64, {"gpu": 1.0, "cpu": 1.0}),
    Family("few_rows", "1-64 rows times weights of 1024-16384 each way", few_rows, {"gpu": 1.0, "cpu": 1.0}),
    Family("triangular", "1500-5000 (CPUs 200-700); range(i, n), a condition, range(i, j + 1)", triangular, {"gpu": 1.5, "cpu": 1.0}),
    Family("attention", "heads 4-128, length 128-4096 (CPUs 64-512), width 32-1024 (CPUs 32-128), causal or not", attentions, {"gpu": 1.3, "cpu": 1.0}),
    Family("symmetric", "A @ A.T as a nest, covariance; 100-900 x 200-2000, f32 and f64", symmetric, {"cpu": 1.0}),
    Family("product_chain", "two products in a row, 100-700 each, f32 and f64", chains, {"cpu": 1.0}),
)  # fmt: skip
