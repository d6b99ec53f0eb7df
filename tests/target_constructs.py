"""Constructs that targets differ in, each as a small call with its check: what the table of docs/targets.md is made of (`tools/targets_table.py`)."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

import tilewright as tw


@tw.kernel
def add(x: tw.Array, y: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] + y[i]
    return out


@tw.kernel
def functions(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = tw.exp(x[i]) + tw.sin(x[i]) + tw.erf(x[i]) + tw.log(x[i] * x[i] + 1.0)
    return out


@tw.kernel
def row_sums(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        total = 0.0
        for j in range(columns):
            total += x[i, j]
        out[i] = total
    return out


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        most = -tw.inf
        for j in range(columns):
            most = max(most, x[i, j])
        total = 0.0
        for j in range(columns):
            total += tw.exp(x[i, j] - most)
        for j in range(columns):
            out[i, j] = tw.exp(x[i, j] - most) / total
    return out


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
def attention(q: tw.Array, k: tw.Array, v: tw.Array) -> tw.Array:
    rows, depth = q.shape
    keys, width = v.shape
    out = tw.empty((rows, width), q.dtype)
    for i in tw.grid(rows):
        most = -tw.inf
        for j in range(keys):
            score = 0.0
            for d in range(depth):
                score += q[i, d] * k[j, d]
            most = max(most, score)
        total = 0.0
        for j in range(keys):
            score = 0.0
            for d in range(depth):
                score += q[i, d] * k[j, d]
            total += tw.exp(score - most)
        for e in range(width):
            mixed = 0.0
            for j in range(keys):
                score = 0.0
                for d in range(depth):
                    score += q[i, d] * k[j, d]
                mixed += tw.exp(score - most) * v[j, e]
            out[i, e] = mixed / total
    return out


@tw.kernel
def chosen(x: tw.Array, places: tw.Array) -> tw.Array:
    n = places.shape[0]
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[places[i]]
    return out


@tw.gpu
def reversed_block(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):  # type: ignore[no-untyped-def]
    held = tw.shared(64, tw.f32)
    t = tw.thread.x
    held[t] = x[t]
    tw.gpu_sync()
    y[t] = held[63 - t]


@tw.gpu
def neighbours(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):  # type: ignore[no-untyped-def]
    t = tw.thread.x
    y[t] = tw.shuffle_xor(x[t], 1)


@tw.gpu
def some_neighbours(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):  # type: ignore[no-untyped-def]
    t = tw.thread.x
    if t < 32:
        y[t] = tw.shuffle_xor(x[t], 1)


@tw.gpu
def added_up(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):  # type: ignore[no-untyped-def]
    tw.atomic_add(y, 0, x[tw.thread.x])


@tw.gpu
def counted(x: tw.GpuBuffer[tw.i64], y: tw.GpuBuffer[tw.i64]):  # type: ignore[no-untyped-def]
    tw.atomic_add(y, 0, x[tw.thread.x])


@tw.gpu
def said(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):  # type: ignore[no-untyped-def]
    assert x[0] < 1e9
    y[0] = x[0]


X = np.linspace(-3, 3, 64, dtype=np.float32)
MATRIX = np.random.default_rng(0).standard_normal((33, 65)).astype(np.float32)
QUERIES = MATRIX[::-1].copy() / 8
PIPELINE = """
pipeline scaled(x: tensor[n, m]) -> tensor[n, m]:
    let s = compute(x) {
        @kernel custom
        for i in 0..n, j in 0..m:
            out[i, j] = x[i, j] * 2.0
    }
    return s
"""


def _same(got: object, want: object, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=tolerance, atol=tolerance)


def _sums(dtype: object, tolerance: float = 1e-5) -> Callable[[str], None]:
    x = np.arange(37).astype(dtype)  # type: ignore[call-overload]
    return lambda device: _same(add(x, x, device=device), (x + x).astype(np.float64), tolerance)


def _explicit(kernel: object, want: Callable[[np.ndarray], np.ndarray], dtype: object = np.float32, count: int = 64) -> Callable[[str], None]:
    def run(device: str) -> None:
        x, y = X.astype(dtype), np.zeros(count, dtype)  # type: ignore[call-overload]
        kernel[1, 64](x, y, device=device)  # type: ignore[index]
        expected = want(x)
        _same(y[: len(expected)], expected)

    return run


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def _pipeline(device: str) -> None:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scaled.zyn"
        path.write_text(PIPELINE)
        _same(tw.load(str(path)).scaled(MATRIX, device=device), 2 * MATRIX)


CONSTRUCTS: dict[str, Callable[[str], None]] = {
    "arithmetic, f32": _sums(np.float32),
    "arithmetic, f16": _sums(np.float16, 1e-2),
    "arithmetic, bf16": _sums(ml_dtypes.bfloat16, 1e-1),
    "arithmetic, f64": _sums(np.float64),
    "arithmetic, i8": _sums(np.int8),
    "arithmetic, i32": _sums(np.int32),
    "arithmetic, i64": _sums(np.int64),
    "functions, f32": lambda device: _same(functions(X, device=device), functions(X, device="cpu")),
    "sums of rows": lambda device: _same(row_sums(MATRIX, device=device), MATRIX.sum(1, dtype=np.float64)),
    "softmax": lambda device: _same(softmax(MATRIX, device=device), _softmax(MATRIX)),
    "products": lambda device: _same(product(MATRIX, MATRIX.T.copy(), device=device), MATRIX.astype(np.float64) @ MATRIX.T, 1e-4),
    "attention in one nest": lambda device: _same(attention(QUERIES, MATRIX, MATRIX, device=device), _softmax(QUERIES @ MATRIX.T) @ MATRIX, 1e-4),
    "indices from memory": lambda device: _same(chosen(X, np.array([3, 0, 63], np.int32), device=device), X[[3, 0, 63]]),
    "a ZynML pipeline": _pipeline,
    "shared memory and barriers": _explicit(reversed_block, lambda x: x[::-1]),
    "shuffles, all threads": _explicit(neighbours, lambda x: x.reshape(-1, 2)[:, ::-1].reshape(-1)),
    "shuffles under a condition": _explicit(some_neighbours, lambda x: x[:32].reshape(-1, 2)[:, ::-1].reshape(-1)),
    "atomic addition, f32": _explicit(added_up, lambda x: x.sum(keepdims=True), count=1),
    "atomic addition, i64": _explicit(counted, lambda x: x.sum(keepdims=True), np.int64, 1),
    "assertions in kernels": _explicit(said, lambda x: x[:1], count=1),
    "scan of a short row": lambda device: _same(tw.scan(MATRIX[:, :40].copy(), axis=1, device=device), np.cumsum(MATRIX[:, :40], 1), 1e-4),
    "scan of a long array": lambda device: _same(tw.scan(np.ones(100_000, np.int32), device=device), np.arange(1, 100_001)),
    "sort": lambda device: _same(tw.sort(X[::-1].copy(), device=device), X),
}
