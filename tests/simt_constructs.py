"""Explicit kernels, one for each construct: how to launch them, with what, and what NumPy or Python says comes out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import tilewright as tw

SCALE = 3
TABLE = (1.0, 2.0, 4.0)


@tw.gpu
def saxpy(a: tw.f32, x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    if i < len(x):
        y[i] += a * x[i]


@tw.gpu
def early_return(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    if i >= len(x):
        return
    if x[i] < 0:
        y[i] = -1.0
        return
    y[i] = x[i] * SCALE


@tw.gpu
def indices(out: tw.Array):
    x, y, z = tw.grid.x, tw.grid.y, tw.grid.z
    out[z, y, x] = tw.thread.x + 10 * tw.thread.y + 100 * tw.thread.z + 1000 * tw.block.x + 10000 * tw.block.y + 100000 * tw.block.z


@tw.gpu
def sizes(out: tw.GpuBuffer[tw.i32]):
    if tw.gpu_thread_id() == 0:
        out[0], out[1], out[2] = tw.block.size.x, tw.block.size.y, tw.block.size.z
        out[3], out[4], out[5] = tw.grid.size.x, tw.grid.size.y, tw.grid.size.z
        out[6] = tw.warp.size
    out[7 + tw.gpu_thread_id()] = tw.gpu_thread_id()


@tw.gpu
def block_sum(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    part = tw.shared(64, tw.f32)
    t = tw.thread.x
    total = 0.0
    for i in range(tw.grid.x, len(x), 64 * tw.grid.size.x):
        total += x[i]
    part[t] = total
    tw.gpu_sync()
    step = 32
    while step > 0:
        if t < step:
            part[t] += part[t + step]
        tw.gpu_sync()
        step //= 2
    if t == 0:
        y[tw.block.x] = part[0]


@tw.gpu
def jumps(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    total = 0
    for k in range(20):
        if k == x[i]:
            break
        if k % 3 == 1:
            continue
        if k % 5 == 4:
            total += 100
            if total > 150:
                continue
        total += k
    y[i] = total


@tw.gpu
def collatz(x: tw.GpuBuffer[tw.i32], steps: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    value = x[i]
    count = 0
    while True:
        if value == 1:
            break
        value = value // 2 if value % 2 == 0 else 3 * value + 1
        count += 1
    steps[i] = count


@tw.gpu
def found_in_loop(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    k = 0
    while True:
        seen = x[(i + k) % len(x)]
        k += 1
        if seen > 0:
            break
    y[i] = seen


@tw.gpu
def downwards(y: tw.GpuBuffer[tw.i64]):
    i = tw.gpu_thread_id()
    total = 0
    for k in range(10, i, -3):
        total = total * 10 + k
    y[i] = total


@tw.gpu
def nested(y: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    total = 0
    for a in range(6):
        for b in range(6):
            if a * b > i:
                break
            if (a + b) % 2:
                continue
            total += a * b + 1
        else_ = total
        if total > 40:
            return
        total += else_ % 2
        y[i] = total


def square(v):
    return v * v


@tw.device
def clipped(v, low: tw.f32 = 0.0, high: tw.f32 = 1.0):
    if v < low:
        return low
    if v > high:
        return high
    return v


@tw.gpu
def functions(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()

    def shifted(v, by=SCALE):
        return v + by + i

    both = square(x[i]), clipped(x[i])
    first, second = both
    y[i] = shifted(first) + clipped(second, high=0.5) + (lambda v: 2 * v)(second)


@tw.gpu
def first_above(x: tw.GpuBuffer[tw.f32], limit: tw.f32, y: tw.GpuBuffer[tw.i32]):
    def search(limit):
        for k in range(len(x)):
            if x[k] > limit:
                return k
        return -1

    i = tw.gpu_thread_id()
    y[i] = search(limit * i)


@tw.gpu
def maths(x: tw.GpuBuffer[tw.f32], y: tw.Array):
    i = tw.gpu_thread_id()
    v = x[i]
    y[0, i] = tw.exp(v) + math.sin(v) * math.cos(v)
    y[1, i] = math.sqrt(abs(v)) + np.log2(abs(v) + 1)
    y[2, i] = max(v, 0.5, -v) - min(v, 0.25)
    y[3, i] = v**3 + abs(v) ** 0.5
    y[4, i] = tw.floor(v) + tw.where(v > 0, v, -v) + tw.clamp(v, -0.5, 0.5)
    y[5, i] = tw.fma(v, v, 1.0) / 3 + math.pi
    y[6, i] = float(int(v * 10)) if v > -1 or v < -2 else TABLE[1]


@tw.gpu
def conditions(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    n = len(x)
    # What stands on the right must not be read where the left decides.
    if (i + 40 < n and x[i + 40] > 3) or not i % 7:
        y[i] = 1
    elif 10 < i <= 20 and x[i] != 5:
        y[i] = 2
    else:
        y[i] = x[i + 40] if i + 40 < n else 3


@tw.gpu
def mixed(a: tw.GpuBuffer[tw.i32], h: tw.GpuBuffer[tw.f16], d: tw.GpuBuffer[tw.f64], out: tw.Array, k: int, s: float):
    i = tw.gpu_thread_id()
    out[0, i] = a[i] * 2 + k
    out[1, i] = h[i] * h[i] * s
    out[2, i] = d[i] / 3 + tw.f64(a[i])
    out[3, i] = (a[i] >> 1) ^ (a[i] & 6) | (1 << 2)
    out[4, i] = tw.f64(a[i] / 4) + ~a[i]
    out[5, i] = (a[i] > 2) + True
    h[i] = s
    a[i] -= i


@tw.gpu
def transpose(x: tw.Array, y: tw.Array):
    tile = tw.shared((16, 17), tw.f32)
    column, row = tw.block.x * 16 + tw.thread.x, tw.block.y * 16 + tw.thread.y
    rows, columns = x.shape
    if row < rows and column < columns:
        tile[tw.thread.y][tw.thread.x] = x[row, column]
    tw.gpu_sync()
    column, row = tw.block.y * 16 + tw.thread.x, tw.block.x * 16 + tw.thread.y
    if row < columns and column < rows:
        y[row][column] = tile[tw.thread.x, tw.thread.y]


@tw.gpu
def locals_(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    own = tw.local(4, tw.f32)
    for k in tw.unrolled(range(4)):
        own[k] = x[i] * (k + 1)
    total = 0.0
    for k in range(4):
        total += own[3 - k] * TABLE[0]
    for factor in TABLE:
        if factor == 2.0:
            continue
        total *= factor
    y[i] = total


@tw.gpu
def warps(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32], votes: tw.GpuBuffer[tw.u32]):
    i = tw.gpu_thread_id()
    v = x[i]
    for k in tw.unrolled(range(5)):
        v += tw.shuffle_down(v, 16 >> k)
    y[i] = tw.shuffle(v, 0) + tw.shuffle_xor(x[i], 1) - tw.shuffle_up(x[i], 2, width=8)
    ballot = tw.ballot(x[i] > 0)
    if tw.lane_id() == 0:
        votes[tw.warp_id()] = ballot
    if tw.vote_all(x[i] < 1e9) and not tw.vote_any(x[i] > 1e9):
        y[i] += 1


@tw.gpu
def counted(x: tw.GpuBuffer[tw.i32], bins: tw.GpuBuffer[tw.i32]):
    tw.atomic_add(bins, x[tw.gpu_thread_id()] % len(bins), 1)


RNG = np.random.default_rng(7)
F = RNG.normal(size=64).astype(np.float32)
G = np.where(np.arange(64) % 9 == 0, 2.0, -1.0).astype(np.float32)
N = RNG.integers(1, 30, 64).astype(np.int32)


def python_jumps(x: int) -> int:
    total = 0
    for k in range(20):
        if k == x:
            break
        if k % 3 == 1:
            continue
        if k % 5 == 4:
            total += 100
            if total > 150:
                continue
        total += k
    return total


def python_collatz(value: int) -> int:
    count = 0
    while value != 1:
        value, count = (value // 2 if value % 2 == 0 else 3 * value + 1), count + 1
    return count


def python_downwards(i: int) -> int:
    total = 0
    for k in range(10, i, -3):
        total = total * 10 + k
    return total


def python_nested(i: int) -> int:
    total, result = 0, 0
    for a in range(6):
        for b in range(6):
            if a * b > i:
                break
            if (a + b) % 2:
                continue
            total += a * b + 1
        else_ = total
        if total > 40:
            return result
        total += else_ % 2
        result = total
    return result


def expected_functions(x: np.ndarray) -> np.ndarray:
    one = np.clip(x, 0, 1)
    return (x * x + SCALE + np.arange(64) + np.clip(one, 0, 0.5) + 2 * one).astype(np.float32)


def expected_maths(x: np.ndarray) -> np.ndarray:
    v = x.astype(np.float64)
    rows = [
        np.exp(v) + np.sin(v) * np.cos(v), np.sqrt(abs(v)) + np.log2(abs(v) + 1), np.maximum(np.maximum(v, 0.5), -v) - np.minimum(v, 0.25),
        v**3 + abs(v) ** 0.5, np.floor(v) + abs(v) + np.clip(v, -0.5, 0.5), (v * v + 1) / 3 + math.pi,
        np.where((v > -1) | (v < -2), np.trunc(x * np.float32(10)), 2.0),
    ]  # fmt: skip
    return np.stack(rows)


def expected_conditions() -> np.ndarray:
    out = []
    for i in range(64):
        if (i + 40 < 64 and N[i + 40] > 3) or not i % 7:
            out.append(1)
        elif 10 < i <= 20 and N[i] != 5:
            out.append(2)
        else:
            out.append(N[i + 40] if i + 40 < 64 else 3)
    return np.array(out)


def expected_mixed() -> np.ndarray:
    a, h, d, i = N.astype(np.float64), F.astype(np.float16).astype(np.float32), F.astype(np.float64), N
    return np.stack([a * 2 + 5, h * h * np.float32(0.5), d / 3 + a, (i >> 1) ^ (i & 6) | 4, i / 4 + ~i, (i > 2) + 1.0])


def expected_warps() -> np.ndarray:
    lane = np.arange(64) % 32
    total = np.repeat(F.reshape(2, 32).sum(1), 32)
    up = np.where(lane % 8 >= 2, np.roll(F, 2), F)
    return total + F.reshape(-1, 2)[:, ::-1].ravel() - up + 1


def zeros(count: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(count, dtype)


X3 = np.add.outer(np.add.outer(np.arange(4) // 2 * 100000 + np.arange(4) % 2 * 100, np.arange(6) // 3 * 10000 + np.arange(6) % 3 * 10), np.arange(8) // 4 * 1000 + np.arange(8) % 4)
M = RNG.normal(size=(21, 37)).astype(np.float32)
Case = tuple[Any, tuple[Any, ...], Callable[[], list[Any]], dict[int, Any]]
@tw.gpu
def counts_down(out: tw.GpuBuffer[tw.u32]):
    t = tw.i32(tw.thread.x)
    tw.atomic_max(out, t % len(out), tw.u32(-t))


@tw.gpu
def shifts(out: tw.GpuBuffer[tw.i64]):
    """Counts are modulo the bits."""
    t = tw.i64(tw.thread.x)
    out[t] = (t >> -63) + (t << -60) + (t >> 66)


CASES: dict[str, Case] = {
    "saxpy": (saxpy, (3, 32), lambda: [2.0, F, np.ones(64, np.float32)], {2: 1 + 2 * F}),
    "early return": (early_return, (2, 64), lambda: [F, zeros(64)], {1: np.where(F < 0, -1, F * 3)}),
    "indices": (indices, ((2, 2, 2), (4, 3, 2)), lambda: [np.zeros((4, 6, 8), np.int64)], {0: X3}),
    "sizes": (sizes, ((2, 3), (4, 2)), lambda: [zeros(55, np.int32)], {0: [4, 2, 1, 2, 3, 1, 32, *range(48)]}),
    "block sum": (block_sum, (2, 64), lambda: [np.arange(500, dtype=np.float32), zeros(2)], {}),
    "counts down": (counts_down, (1, 64), lambda: [zeros(5, np.uint32)], {0: [2**32 - 5, 2**32 - 1, 2**32 - 2, 2**32 - 3, 2**32 - 4]}),
    "shifts": (shifts, (1, 64), lambda: [zeros(64, np.int64)], {0: [(t >> 1) + (t << 4) + (t >> 2) for t in range(64)]}),
    "jumps": (jumps, (2, 32), lambda: [N, zeros(64, np.int32)], {1: [python_jumps(v) for v in N]}),
    "collatz": (collatz, (1, 64), lambda: [N, zeros(64, np.int32)], {1: [python_collatz(int(v)) for v in N]}),
    "found in loop": (found_in_loop, (1, 64), lambda: [G, zeros(64)], {1: np.full(64, 2.0)}),
    "downwards": (downwards, (1, 16), lambda: [zeros(16, np.int64)], {0: [python_downwards(i) for i in range(16)]}),
    "nested": (nested, (1, 32), lambda: [zeros(32, np.int32)], {0: [python_nested(i) for i in range(32)]}),
    "functions": (functions, (2, 32), lambda: [F, zeros(64)], {1: expected_functions(F)}),
    "first above": (
        first_above, (1, 8), lambda: [np.arange(20, dtype=np.float32), 3.0, zeros(8, np.int32)], {2: [1, 4, 7, 10, 13, 16, 19, -1]},
    ),
    "maths": (maths, (2, 32), lambda: [F, np.zeros((7, 64), np.float32)], {1: expected_maths(F)}),
    "conditions": (conditions, (2, 32), lambda: [N, zeros(64, np.int32)], {1: expected_conditions()}),
    "mixed": (
        mixed, (1, 64), lambda: [N.copy(), F.astype(np.float16), F.astype(np.float64), np.zeros((6, 64)), 5, 0.5],
        {3: expected_mixed(), 0: N - np.arange(64), 1: np.full(64, 0.5)},
    ),
    "transpose": (transpose, ((3, 2), (16, 16)), lambda: [M, np.zeros((37, 21), np.float32)], {1: M.T}),
    "locals": (locals_, (1, 64), lambda: [F, zeros(64)], {1: 40 * F}),
    "warps": (warps, (1, 64), lambda: [F, zeros(64), zeros(2, np.uint32)], {
        1: expected_warps(), 2: [sum(1 << k for k in range(32) if F[32 * w + k] > 0) for w in range(2)],
    }),
    "counted": (counted, (2, 32), lambda: [N, zeros(5, np.int32)], {1: np.bincount(N % 5, minlength=5)}),
}  # fmt: skip


def check(name: str, given: list[Any]) -> None:
    """Whether the arguments of a case are what they should be after the launch."""
    for position, values in CASES[name][3].items():
        np.testing.assert_allclose(given[position], values, rtol=2e-6, atol=2e-6)
    if name == "block sum":
        assert given[1].sum() == 499 * 250
