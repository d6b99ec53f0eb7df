"""Numba kernels as an expert would write them: parallel, fast-math, float32 throughout, blocked where that pays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba
import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def _parallel(function: Callable[P, R]) -> Callable[P, R]:
    compiled: Callable[P, R] = numba.njit(parallel=True, fastmath=True)(function)
    return compiled


def _inline(function: Callable[P, R]) -> Callable[P, R]:
    compiled: Callable[P, R] = numba.njit(fastmath=True, inline="always")(function)
    return compiled


_range = numba.prange
_f4 = np.float32


@_parallel
def relu(x: np.ndarray, out: np.ndarray) -> None:
    for i in _range(x.size):
        out[i] = max(x[i], _f4(0))


@_parallel
def multiply_add(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    for i in _range(x.size):
        out[i] = x[i] * y[i] + _f4(1)


@_parallel
def exp(x: np.ndarray, out: np.ndarray) -> None:
    for i in _range(x.size):
        out[i] = math.exp(x[i])


@_inline
def _exp_polynomial(x: np.float32) -> np.float32:
    """e to the x in a few multiply-adds, about 2 units in the last place: what makes the loop around it vectorise."""
    x = min(max(x, _f4(-87.3)), _f4(88.3))
    n = np.floor(x * _f4(1.44269504088896341) + _f4(0.5))
    r = x - n * _f4(0.693359375)
    r = r - n * _f4(-2.12194440e-4)
    p = _f4(1.9875691500e-4)
    p = p * r + _f4(1.3981999507e-3)
    p = p * r + _f4(8.3334519073e-3)
    p = p * r + _f4(4.1665795894e-2)
    p = p * r + _f4(1.6666665459e-1)
    p = p * r + _f4(5.0000001201e-1)
    p = p * (r * r) + r + _f4(1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    result: np.float32 = p * power
    return result


@_parallel
def exp_polynomial(x: np.ndarray, out: np.ndarray) -> None:
    for i in _range(x.size):
        out[i] = _exp_polynomial(x[i])


@_parallel
def sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    for i in _range(x.size):
        out[i] = _f4(1) / (_f4(1) + math.exp(-x[i]))


@_parallel
def sigmoid_polynomial(x: np.ndarray, out: np.ndarray) -> None:
    for i in _range(x.size):
        out[i] = _f4(1) / (_f4(1) + _exp_polynomial(-x[i]))


@_parallel
def gelu(x: np.ndarray, out: np.ndarray) -> None:
    for i in _range(x.size):
        v = x[i]
        out[i] = _f4(0.5) * v * (_f4(1) + math.tanh(_f4(0.7978845608) * (v + _f4(0.044715) * v * v * v)))


@_parallel
def gelu_polynomial(x: np.ndarray, out: np.ndarray) -> None:
    for i in _range(x.size):
        v = x[i]
        u = _f4(1.5957691216) * (v + _f4(0.044715) * v * v * v)
        out[i] = v / (_f4(1) + _exp_polynomial(-u))


@_parallel
def scale(m: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
    for i in _range(m.shape[0]):
        for j in range(m.shape[1]):
            out[i, j] = m[i, j] * v[j]


@_parallel
def total(x: np.ndarray) -> np.float32:
    s = _f4(0)
    for i in _range(x.size):
        s += x[i]
    return s


@_parallel
def row_sums(x: np.ndarray, out: np.ndarray) -> None:
    for i in _range(x.shape[0]):
        s = _f4(0)
        for j in range(x.shape[1]):
            s += x[i, j]
        out[i] = s


@_parallel
def column_sums(x: np.ndarray, partial: np.ndarray, out: np.ndarray) -> None:
    """Each thread sums a band of rows, in the order they lie in memory, into a row of `partial`."""
    bands = partial.shape[0]
    rows, cols = x.shape
    for band in _range(bands):
        for j in range(cols):
            partial[band, j] = _f4(0)
        for i in range(band * rows // bands, (band + 1) * rows // bands):
            for j in range(cols):
                partial[band, j] += x[i, j]
    for j in range(cols):
        s = _f4(0)
        for band in range(bands):
            s += partial[band, j]
        out[j] = s


@_parallel
def argmax(x: np.ndarray, best: np.ndarray, where: np.ndarray) -> int:
    """The maximum of each block first, without indices, then the place inside the best block. `x.size` in whole blocks."""
    threads, block = best.size, 4096
    share = x.size // threads
    for t in _range(threads):
        top, at = _f4(-np.inf), 0
        # LLVM does not vectorise one running maximum; 64 of them it does.
        lanes = np.empty(64, np.float32)
        for k in range(share // block):
            first = t * share + k * block
            for lane in range(64):
                lanes[lane] = _f4(-np.inf)
            for i in range(0, block, 64):
                for lane in range(64):
                    lanes[lane] = max(lanes[lane], x[first + i + lane])
            m = _f4(-np.inf)
            for lane in range(64):
                m = max(m, lanes[lane])
            if m > top:
                top = m
                at = first
        best[t] = top
        for i in range(at, at + block):
            if x[i] == top:
                where[t] = i
                break
    winner = 0
    for t in range(1, threads):
        if best[t] > best[winner]:
            winner = t
    index: int = where[winner]
    return index
