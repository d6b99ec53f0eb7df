"""`while` in kernels: every element leaves its loop by itself, at every stage and on the CPU alike."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from assembled import assemble

DEVICES = ("cpu", "emulator:loop", "emulator:tile", "emulator:thread", pytest.param("cuda", marks=pytest.mark.requires("cuda")))


@tw.kernel
def collatz(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n,), tw.i64)
    for i in tw.grid(n):
        value = x[i]
        steps = 0
        while value != 1:
            value = value // 2 if value % 2 == 0 else value * 3 + 1
            steps += 1
        out[i] = steps
    return out


def steps_of(value: int) -> int:
    steps = 0
    while value != 1:
        value = value // 2 if value % 2 == 0 else value * 3 + 1
        steps += 1
    return steps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 5, 64, 257, 1500])
def test_elements_leave_one_by_one(size: int, device: str) -> None:
    """What lies beyond the last element, and is 0, would never become 1."""
    x = np.random.default_rng(size).integers(1, 200, size)
    assert np.asarray(collatz(x, device=device)).tolist() == [steps_of(int(v)) for v in x]


PROGRAMS = {
    "in a row's loop": ("""
let r = compute(x) {
    for i in 0..n, j in 0..m:
        var v = abs(x[i, j]) + 1.0
        var count = 0.0
        while v > 0.25:
            v = v * 0.5
            count += 1.0
        out[i, j] = count + v
}""", lambda x: halved(np.abs(x) + 1)),
    "summed": ("""
let r = compute(x) {
    for i in 0..n:
        var total = 0.0
        for j in 0..m:
            var v = abs(x[i, j])
            while v > 0.25: v = v * 0.5
            total += v
        out[i] = total
}""", lambda x: shrunk(np.abs(x)).sum(1)),
    "with a sum inside": ("""
let r = compute(x) {
    for i in 0..n:
        var bound = 1.0
        var total = inf
        while total > 3.0:
            bound = bound * 0.5
            total = 0.0
            for j in 0..m: total += min(abs(x[i, j]), bound)
        out[i] = total
}""", lambda x: np.array([clipped(row) for row in np.abs(x)])),
    "in a while": ("""
let r = compute(x) {
    for i in 0..n:
        var outer = 3
        var v = abs(x[i, 0]) + 2.0
        while outer > 0:
            var inner = outer
            while inner > 0 and v > 0.5:
                v = v * 0.75
                inner -= 1
            outer -= 1
        out[i] = v
}""", lambda x: np.array([nested(abs(v) + 2.0) for v in x[:, 0]])),
    "under a condition": ("""
let r = compute(x) {
    for i in 0..n:
        var v = x[i, 0]
        if v > 0:
            while v > 0.25: v = v * 0.5
        else:
            v = -1.0
        out[i] = v
}""", lambda x: np.where(x[:, 0] > 0, shrunk(x[:, 0]), -1.0)),
    "the same for all": ("""
let r = compute(x) {
    for i in 0..n:
        var k = x.shape[1]
        var v = x[i, 0]
        while k > 1:
            v += x[i, k - 1]
            k = k / 2
        out[i] = v
}""", lambda x: np.array([row[0] + sum(row[k - 1] for k in halves(len(row))) for row in x])),
    "that reads": ("""
let r = compute(x) {
    for i in 0..n:
        var k = 0
        while k < x.shape[1] - 1 and x[i, k] < 0.5: k += 1
        out[i] = x[i, k]
}""", lambda x: np.array([row[next((k for k in range(len(row) - 1) if row[k] >= 0.5), -1)] for row in x])),
    "of a product's factor": ("""
let r = compute(x) {
    for i in 0..n, j in 0..n:
        var total = 0.0
        for k in 0..m:
            var v = abs(x[i, k])
            while v > 0.25: v = v * 0.5
            total += v * x[j, k]
        out[i, j] = total
}""", lambda x: shrunk(np.abs(x)) @ x.T),
    "of a product's result": ("""
let r = compute(x) {
    for i in 0..n, j in 0..n:
        var total = 0.0
        for k in 0..m: total += x[i, k] * x[j, k]
        while total > 0.25: total = total * 0.5
        out[i, j] = total
}""", lambda x: shrunk(x @ x.T)),
    "that stores": ("""
let r = compute(x) {
    for i in 0..n, j in 0..m:
        var v = x[i, j]
        out[i, j] = v
        while v > 0.25:
            v = v * 0.5
            out[i, j] = v
}""", lambda x: shrunk(x)),
    "never": ("""
let r = compute(x) {
    for i in 0..n:
        var v = x[i, 0]
        while v > 1e30: v = v * 0.5
        out[i] = v
}""", lambda x: x[:, 0]),
    "before the loops": ("""
let r = compute(x) {
    var scale = 64.0
    while scale > 1.5: scale = scale * 0.5
    for i in 0..n: out[i] = x[i, 0] * scale
}""", lambda x: x[:, 0]),
}  # fmt: skip


def shrunk(v: np.ndarray) -> np.ndarray:
    v = v.copy()
    while (v > 0.25).any():
        v[v > 0.25] *= 0.5
    return v


def halved(v: np.ndarray) -> np.ndarray:
    count = np.zeros_like(v)
    v = v.copy()
    while (v > 0.25).any():
        count[v > 0.25] += 1
        v[v > 0.25] *= 0.5
    return count + v


def clipped(row: np.ndarray) -> float:
    bound, total = 1.0, np.inf
    while total > 3.0:
        bound *= 0.5
        total = np.minimum(row, bound).sum()
    return float(total)


def nested(v: float) -> float:
    for outer in (3, 2, 1):
        for _ in range(outer):
            v = v * 0.75 if v > 0.5 else v
    return v


def halves(k: int) -> list[int]:
    return [k, *halves(k // 2)] if k > 1 else []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 9), (35, 17)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, shape: tuple[int, int], device: str) -> None:
    text, reference = PROGRAMS[name]
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    found = np.asarray(tw.load(text).run(device=device, x=x)["r"])
    np.testing.assert_allclose(found, reference(x.astype(np.float64)), rtol=1e-5, atol=1e-5)


@pytest.mark.requires("ptxas")
def test_ptx_is_assembled() -> None:
    assemble(collatz.compile(np.ones(1000, np.int64), target="sm_90a").code.decode(), "sm_90a")
