"""Kernels that draw random numbers, for the tests on every device."""

from __future__ import annotations

import tilewright as tw


@tw.kernel
def dropout(x: tw.Array, seed: int, keep: float) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty_like(x)
    for i, j in tw.grid(rows, cols):
        out[i, j] = x[i, j] / keep if tw.random.uniform(seed, i, j) < keep else 0.0
    return out


@tw.kernel
def all_kinds(x: tw.Array, seed: int):
    """Of each function one dtype or two, by one to four indices."""
    (n,) = x.shape
    words = tw.empty((n,), tw.u32)
    long = tw.empty((n,), tw.u64)
    low = tw.empty((n,), tw.f16)
    high = tw.empty((n,), tw.f64)
    dice = tw.empty((n,), tw.i64)
    bell = tw.empty((n,), tw.f32)
    wide = tw.empty((n,), tw.f64)
    for i in tw.grid(n):
        words[i] = tw.random.bits(seed, i)
        long[i] = tw.random.bits(seed, 5, i, dtype=tw.u64)
        low[i] = tw.random.uniform(seed, 1, 2, i, dtype=tw.f16)
        high[i] = tw.random.uniform(seed, i, i, dtype=tw.f64)
        dice[i] = tw.random.randint(seed, 1, 7, 3, 2, 1, i)
        bell[i] = tw.random.normal(seed, i)
        wide[i] = tw.random.normal(seed, i, 9, dtype=tw.f64)
    return words, long, low, high, dice, bell, wide


@tw.kernel
def places_from_data(x: tw.Array, seed: tw.u64) -> tw.Array:
    """Indices that are no neighbours."""
    (n,) = x.shape
    out = tw.empty((n,), tw.u32)
    for i in tw.grid(n):
        out[i] = tw.random.bits(seed, x[i])
    return out


@tw.kernel
def shifted(x: tw.Array, seed: int, by: int) -> tw.Array:
    """Neighbours whose first one begins no block of four."""
    (n,) = x.shape
    out = tw.empty((n,), tw.u32)
    for i in tw.grid(n):
        out[i] = tw.random.bits(seed, i + by)
    return out


@tw.kernel
def columns(x: tw.Array, seed: int) -> tw.Array:
    """Neighbours in memory whose last index is the same."""
    rows, cols = x.shape
    out = tw.empty((rows, cols), tw.f32)
    for i, j in tw.grid(rows, cols):
        out[i, j] = tw.random.uniform(seed, j, i)
    return out


@tw.kernel
def inside(x: tw.Array, seed: int) -> float:
    """Four times how many points of the square lie in the circle: pi."""
    (n,) = x.shape
    total = 0.0
    for i in range(n):
        a = tw.random.uniform(seed, 0, i)
        b = tw.random.uniform(seed, 1, i)
        total += 4.0 if a * a + b * b < 1.0 else 0.0
    return total / n


@tw.kernel
def walk(x: tw.Array, seed: int, steps: int) -> tw.Array:
    """Steps of a walk, in order, for each element by itself."""
    (n,) = x.shape
    out = tw.empty((n,), tw.f64)
    for i in tw.grid(n):
        place = x[i]
        for t in range(steps):
            place += tw.random.normal(seed, i, t, dtype=tw.f64)
        out[i] = place
    return out


@tw.kernel
def between(low: tw.Array, high: tw.Array, seed: int) -> tw.Array:
    """Bounds from data; where there is nothing between them, the lower one."""
    (n,) = low.shape
    out = tw.empty_like(low)
    for i in tw.grid(n):
        out[i] = tw.random.randint(seed, low[i], high[i], i, dtype=low.dtype)
    return out


@tw.gpu
def explicit(words, numbers, dice, bell, seed):
    i = tw.gpu_thread_id()
    if i < words.shape[0]:
        words[i] = tw.random.bits(seed, i)
        numbers[i] = tw.random.uniform(seed, 3, i, dtype=tw.f64)
        dice[i] = tw.random.randint(seed, -3, 4, 1, 2, i, dtype=tw.i32)
        bell[i] = tw.random.normal(seed, i, dtype=tw.f16)


@tw.cpu
def simd_loop(out, seed: int):
    for i in range(out.shape[0]):
        out[i] = tw.random.uniform(seed, i)
