"""ZynML: numbers that shape results, defaults and optional arrays, on the CPU and the emulator, also where blocks are joined and runs are replayed."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from support import CUDA
from tilewright.base.errors import UserError

pytestmark = pytest.mark.requires("cpu")
X = np.arange(1, 7, dtype=np.float32)
POOL = """
fn pool(x, stride: int, width: int = 2) {
    let n = (6 - width) / stride + 1
    return compute(x, stride, width, n) {
        for i in 0..n:
            var total = 0.0
            for j in 0..width: total += x[i * stride + j]
            out[i] = total
    }
}
let y = pool(x, stride)
let z = pool(x, stride, width=3)
"""
LOOPS = """
pipeline go(x, n, k) {
    let y = compute(x, n) {
        for i in 0..m:
            var v = x[i]
            for t in 0..n: v = v * 0.5 + t
            out[i] = v
    }
    let z = compute(y, x, k) {
        for i in 0..m:
            var v = y[i]
            for t in 0..k: v += x[i]
            out[i] = v
    }
    return compute(z, n) {
        for i in 0..m:
            var v = z[i]
            for t in 0..n: v += 1
            out[i] = v
    }
}
let r = go(x, n, k)
"""
OPTIONAL = """
fn add(x, bias = none) {
    return compute(x, bias) {
        for i in 0..n:
            var v = x[i]
            if bias != none: v += bias[i]
            out[i] = v
    }
}
let y = add(x)
let z = add(x, x)
let w = compute(x, b) { for i in 0..n: out[i] = x[i] if b == none else x[i] + b[i] }
let given = b != none
"""


def run(text: str, device: str, **inputs: object) -> dict[str, np.ndarray]:
    program = tw.load(text)
    results: dict[str, np.ndarray] = {}
    for _ in range(3):  # statement by statement, traced, replayed
        results = program.run(**inputs) if device == "cpu" else program.run(device=device, **inputs)
    return results


@pytest.mark.parametrize("device", ["cpu", "emulator:thread", CUDA])
def test_a_number_is_the_length_of_a_result(device: str) -> None:
    text = "let y = compute(x, n, k) { for i in 0..n: out[i] = x[i] * k }\nlet z = compute(y, k) { for i in 0..m: out[i] = y[i] + k }"
    for n, k in ((3, 2), (6, -1), (0, 1)):
        found = run(text, device, x=X, n=n, k=k)
        assert found["y"].tolist() == (X[:n] * k).tolist()
        assert found["z"].tolist() == (X[:n] * k + k).tolist()
    with pytest.raises(UserError, match="index i of 'x' reaches 6, but axis 0 has extent 6"):
        run(text, device, x=X, n=7, k=1)


@pytest.mark.parametrize("device", ["cpu", "emulator:thread", CUDA])
def test_functions_with_defaults(device: str) -> None:
    for stride in (1, 2, 3):
        found = run(POOL, device, x=X, stride=stride)
        assert found["y"].tolist() == [X[i : i + 2].sum() for i in range(0, 5, stride)]
        assert found["z"].tolist() == [X[i : i + 3].sum() for i in range(0, 4, stride)]


def test_loops_that_numbers_end_in_joined_blocks() -> None:
    program = tw.load(LOOPS)
    for n, k in ((3, 2), (3, 2), (3, 2), (5, 1), (5, 1), (2, 0), (-1, 4)):
        wanted = X.copy()
        for t in range(n):
            wanted = wanted * np.float32(0.5) + t
        np.testing.assert_allclose(program.run(x=X, n=n, k=k)["r"], wanted + max(k, 0) * X + max(n, 0), rtol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "emulator:thread", CUDA])
def test_optional_arrays(device: str) -> None:
    for b in (None, X):
        found = run(OPTIONAL, device, x=X, b=b)
        assert found["y"].tolist() == X.tolist()
        assert found["z"].tolist() == (2 * X).tolist()
        assert found["w"].tolist() == (X if b is None else 2 * X).tolist()
        assert bool(found["given"]) is (b is not None)


def test_none_that_is_used() -> None:
    with pytest.raises(UserError, match="'b' is none here"):
        tw.load("let y = compute(x, b) { for i in 0..n: out[i] = x[i] + b[i] }").run(x=X, b=None)
    with pytest.raises(UserError, match="arithmetic with a NoneType"):
        tw.load("let y = x + none").run(x=X)


def test_lengths_from_memory() -> None:
    text = """
    let y = compute(x, lengths) {
        for b in 0..batch:
            var total = 0.0
            for t in 0..lengths[b]: total += x[t]
            out[b] = total
    }
    """
    assert run(text, "cpu", x=X, lengths=np.array([0, 2, 6]))["y"].tolist() == [0.0, 3.0, 21.0]
