"""Convolutions and transposed ones of one to three axes in float64, with channels first: what tests compare with."""

from __future__ import annotations

import itertools

import numpy as np

Steps = tuple[int, ...]


def convolved(x: np.ndarray, w: np.ndarray, stride: Steps, padding: Steps, dilation: int) -> np.ndarray:
    """[n, c, …] and [o, c, …] in float64."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    x = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)))
    axes = range(x.ndim - 2)
    sizes = [(x.shape[2 + a] - dilation * (w.shape[2 + a] - 1) - 1) // stride[a] + 1 for a in axes]
    total = np.zeros((len(x), len(w), *sizes))
    for taps in itertools.product(*(range(e) for e in w.shape[2:])):
        place = tuple(slice(dilation * t, dilation * t + stride[a] * (sizes[a] - 1) + 1, stride[a]) for a, t in enumerate(taps))
        total += np.einsum("nc...,oc->no...", x[(slice(None), slice(None), *place)], w[(slice(None), slice(None), *taps)])
    return total


def transposed(x: np.ndarray, w: np.ndarray, stride: Steps, padding: Steps, dilation: int) -> np.ndarray:
    """[n, c, …] and [c, o, …] in float64."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    sizes = [(x.shape[2 + a] - 1) * s + dilation * (w.shape[2 + a] - 1) + 1 for a, s in enumerate(stride)]
    total = np.zeros((len(x), w.shape[1], *sizes))
    for taps in itertools.product(*(range(e) for e in w.shape[2:])):
        place = tuple(slice(dilation * t, dilation * t + s * (x.shape[2 + a] - 1) + 1, s) for a, (t, s) in enumerate(zip(taps, stride, strict=True)))
        total[(slice(None), slice(None), *place)] += np.einsum("nc...,co->no...", x, w[(slice(None), slice(None), *taps)])
    return total[(slice(None), slice(None), *(slice(p, e - p) for p, e in zip(padding, sizes, strict=True)))]
