"""Kernels that walk rows several times: softmax, norms, losses, and what is fused with them. Used by tests here and on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import tilewright as tw


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        m = -tw.inf
        for j in range(c):
            m = max(m, x[i, j])
        s = tw.f32(0)
        for j in range(c):
            s += tw.exp(x[i, j] - m)
        for j in range(c):
            out[i, j] = tw.exp(x[i, j] - m) / s
    return out


@tw.kernel
def layer_norm(x: tw.Array, gain: tw.Array, shift: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = tw.f32(0)
        for j in range(c):
            s += x[i, j]
        mean = s / c
        v = tw.f32(0)
        for j in range(c):
            d = x[i, j] - mean
            v += d * d
        r = 1 / tw.sqrt(v / c + 1e-5)
        for j in range(c):
            out[i, j] = (x[i, j] - mean) * r * gain[j] + shift[j]
    return out


@tw.kernel
def rms_norm(x: tw.Array, gain: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        v = tw.f32(0)
        for j in range(c):
            v += tw.f32(x[i, j]) * x[i, j]
        r = 1 / tw.sqrt(v / c + 1e-5)
        for j in range(c):
            out[i, j] = x[i, j] * r * gain[j]
    return out


@tw.kernel
def residual_norm_gate(x: tw.Array, residual: tw.Array, gain: tw.Array, gate: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        v = tw.f32(0)
        for j in range(c):
            t = tw.f32(x[i, j]) + residual[i, j]
            v += t * t
        r = 1 / tw.sqrt(v / c + 1e-5)
        for j in range(c):
            t = tw.f32(x[i, j]) + residual[i, j]
            z = tw.f32(gate[i, j])
            out[i, j] = t * r * gain[j] * (z / (1 + tw.exp(-z)))
    return out


@tw.kernel
def cross_entropy(x: tw.Array, label: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        m = -tw.inf
        for j in range(c):
            m = max(m, x[i, j])
        s = tw.f32(0)
        for j in range(c):
            s += tw.exp(x[i, j] - m)
        out[i] = tw.log(s) + m - x[i, label[i]]
    return out


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def _normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)


def _layer_norm(x: np.ndarray, gain: np.ndarray, shift: np.ndarray) -> np.ndarray:
    d = x - x.mean(1, keepdims=True)
    return d / np.sqrt((d * d).mean(1, keepdims=True) + 1e-5) * gain + shift


def _gated(x: np.ndarray, residual: np.ndarray, gain: np.ndarray, gate: np.ndarray) -> np.ndarray:
    return _normed(x + residual) * gain * gate / (1 + np.exp(-gate))


def _cross_entropy(x: np.ndarray, label: np.ndarray) -> np.ndarray:
    m = x.max(1)
    return np.log(np.exp(x - m[:, None]).sum(1)) + m - x[np.arange(len(x)), label.astype(np.int64)]


@dataclass(frozen=True)
class RowCase:
    """A kernel, what its arguments are beside the first matrix (`r`: another one, `c`: a vector along rows, `l`: labels), and float64's word."""

    kernel: tw.Kernel[..., object]
    others: str
    reference: Callable[..., np.ndarray]

    def inputs(self, rng: np.random.Generator, n: int, c: int, dtype: np.typing.DTypeLike) -> list[np.ndarray]:
        made = {
            "r": lambda: (rng.standard_normal((n, c)) * 2).astype(dtype), "c": lambda: rng.standard_normal(c).astype(dtype),
            "l": lambda: rng.integers(0, c, n).astype(np.int64),
        }  # fmt: skip
        return [made["r"](), *(made[kind]() for kind in self.others)]

    def expected(self, inputs: list[np.ndarray]) -> np.ndarray:
        with np.errstate(all="ignore"):
            return self.reference(*(x.astype(np.float64) for x in inputs))


CASES = {
    "softmax": RowCase(softmax, "", _softmax),
    "layer_norm": RowCase(layer_norm, "cc", _layer_norm),
    "rms_norm": RowCase(rms_norm, "c", lambda x, gain: _normed(x) * gain),
    "residual_norm_gate": RowCase(residual_norm_gate, "rcr", _gated),
    "cross_entropy": RowCase(cross_entropy, "l", _cross_entropy),
}
