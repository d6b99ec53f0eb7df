"""Explicit kernels whose blocks work together through shared memory: reductions, scans, tiles, stencils, sorts."""

from __future__ import annotations

import numpy as np

import tilewright as tw
from simt_kernels import case, floats, wholes, zeros


@case(3, 64, floats(192), zeros(192))
def reverse_a_block(x, y):
    t = tw.thread.x
    s = tw.shared(64, tw.f32)
    s[t] = x[tw.gpu_thread_id()]
    tw.gpu_sync()
    y[tw.gpu_thread_id()] = s[63 - t]


@case(2, 40, floats(80), zeros(80))
def rotate_a_block(x, y):
    t = tw.thread.x
    s = tw.shared(40, tw.f32)
    s[t] = x[tw.gpu_thread_id()]
    tw.gpu_sync()
    y[tw.gpu_thread_id()] = s[(t + 7) % 40]


@case(3, 64, floats(192), zeros(192))
def broadcast_from_thread_zero(x, y):
    s = tw.shared(1, tw.f32)
    if tw.thread.x == 0:
        s[0] = x[tw.block.x]
    tw.gpu_sync()
    y[tw.gpu_thread_id()] = s[0] * tw.thread.x


@case(2, 48, floats(96), zeros(96), shared=48 * 4)
def dynamic_shared_memory(x, y):
    t = tw.thread.x
    s = tw.shared_dynamic(tw.f32)
    s[t] = x[tw.gpu_thread_id()]
    tw.gpu_sync()
    y[tw.gpu_thread_id()] = s[(t * 5) % 48]


# -- reductions ---------------------------------------------------------------------------------------------------


def _reduction(name: str, dtype: type, start: float, low: int, high: int, threads: int) -> None:
    function = {"sum": lambda a, b: a + b, "largest": max, "smallest": min}[name]
    kind = {np.float32: tw.f32, np.float64: tw.f64, np.int32: tw.i32, np.int64: tw.i64, np.uint8: tw.u8}[dtype]

    @case(3, threads, wholes(3 * threads - 5, dtype=dtype, low=low, high=high), zeros(3, dtype=dtype), name=f"{name}_of_blocks_of_{threads}_{dtype.__name__}")
    def kernel(x, y):
        t = tw.thread.x
        i = tw.gpu_thread_id()
        s = tw.shared(threads, kind)
        s[t] = x[i] if i < len(x) else kind(start)
        tw.gpu_sync()
        step = threads // 2
        while step > 0:
            if t < step:
                s[t] = function(s[t], s[t + step])
            tw.gpu_sync()
            step //= 2
        if t == 0:
            y[tw.block.x] = s[0]


for _name, _start in (("sum", 0), ("largest", 0), ("smallest", 100)):
    for _kind in (np.float32, np.int32, np.int64, np.float64):
        _reduction(_name, _kind, _start, 0, 100, 64)
_reduction("sum", np.float32, 0, -9, 9, 16)
_reduction("sum", np.float32, 0, -9, 9, 256)
_reduction("largest", np.uint8, 0, 0, 250, 32)


@case(2, 64, wholes(128), zeros(2))
def interleaved_sum(x, y):
    t = tw.thread.x
    s = tw.shared(64, tw.f32)
    s[t] = x[tw.gpu_thread_id()]
    tw.gpu_sync()
    step = 1
    while step < 64:
        if t % (2 * step) == 0:
            s[t] += s[t + step]
        tw.gpu_sync()
        step *= 2
    if t == 0:
        y[tw.block.x] = s[0]


@case(2, 64, wholes(128, high=99), zeros(2, dtype=np.int32), zeros(2))
def place_of_the_largest(x, where, value):
    t = tw.thread.x
    i = tw.gpu_thread_id()
    best = tw.shared(64, tw.f32)
    place = tw.shared(64, tw.i32)
    best[t] = x[i]
    place[t] = i
    tw.gpu_sync()
    step = 32
    while step > 0:
        if t < step:
            better = best[t + step] > best[t] or (best[t + step] == best[t] and place[t + step] < place[t])
            if better:
                best[t] = best[t + step]
                place[t] = place[t + step]
        tw.gpu_sync()
        step //= 2
    if t == 0:
        where[tw.block.x] = place[0]
        value[tw.block.x] = best[0]


@case(2, 64, wholes(300), wholes(300), zeros(2))
def dot_product(x, y, out):
    t = tw.thread.x
    s = tw.shared(64, tw.f32)
    total = 0.0
    i = tw.gpu_thread_id()
    while i < len(x):
        total += x[i] * y[i]
        i += 128
    s[t] = total
    tw.gpu_sync()
    for k in range(6):
        step = 32 >> k
        if t < step:
            s[t] += s[t + step]
        tw.gpu_sync()
    if t == 0:
        out[tw.block.x] = s[0]


@case(2, 64, wholes(128), zeros(128))
def deviation_from_the_mean(x, y):
    t = tw.thread.x
    s = tw.shared(64, tw.f32)
    v = x[tw.gpu_thread_id()]
    s[t] = v
    tw.gpu_sync()
    for k in range(6):
        if t < 32 >> k:
            s[t] += s[t + (32 >> k)]
        tw.gpu_sync()
    y[tw.gpu_thread_id()] = v - s[0] / 64


# -- scans --------------------------------------------------------------------------------------------------------


@case(2, 64, wholes(128), zeros(128))
def scan_with_two_buffers(x, y):
    t = tw.thread.x
    s = tw.shared((2, 64), tw.f32)
    now = 0
    s[0, t] = x[tw.gpu_thread_id()]
    tw.gpu_sync()
    d = 1
    while d < 64:
        if t >= d:
            s[1 - now, t] = s[now, t] + s[now, t - d]
        else:
            s[1 - now, t] = s[now, t]
        now = 1 - now
        tw.gpu_sync()
        d *= 2
    y[tw.gpu_thread_id()] = s[now, t]


@case(2, 64, wholes(128, dtype=np.int32), zeros(128, dtype=np.int32))
def scan_in_place(x, y):
    t = tw.thread.x
    s = tw.shared(64, tw.i32)
    s[t] = x[tw.gpu_thread_id()]
    tw.gpu_sync()
    for k in range(6):
        d = 1 << k
        v = s[t - d] if t >= d else 0
        tw.gpu_sync()
        s[t] += v
        tw.gpu_sync()
    y[tw.gpu_thread_id()] = s[t]


@case(2, 32, wholes(128, dtype=np.int32), zeros(128, dtype=np.int32))
def scan_up_and_down(x, y):
    t = tw.thread.x
    first = tw.block.x * 64
    s = tw.shared(64, tw.i32)
    s[2 * t] = x[first + 2 * t]
    s[2 * t + 1] = x[first + 2 * t + 1]
    offset = 1
    d = 32
    while d > 0:
        tw.gpu_sync()
        if t < d:
            s[offset * (2 * t + 2) - 1] += s[offset * (2 * t + 1) - 1]
        offset *= 2
        d //= 2
    if t == 0:
        s[63] = 0
    d = 1
    while d < 64:
        offset //= 2
        tw.gpu_sync()
        if t < d:
            a = offset * (2 * t + 1) - 1
            b = offset * (2 * t + 2) - 1
            v = s[a]
            s[a] = s[b]
            s[b] += v
        d *= 2
    tw.gpu_sync()
    y[first + 2 * t] = s[2 * t]
    y[first + 2 * t + 1] = s[2 * t + 1]


@case(1, 64, wholes(64, dtype=np.int32), zeros(64, dtype=np.int32), zeros(1, dtype=np.int32))
def filter_in_order(x, y, count):
    t = tw.thread.x
    s = tw.shared(64, tw.i32)
    keep = 1 if x[t] > 0 else 0
    s[t] = keep
    tw.gpu_sync()
    for k in range(6):
        d = 1 << k
        v = s[t - d] if t >= d else 0
        tw.gpu_sync()
        s[t] += v
        tw.gpu_sync()
    if keep == 1:
        y[s[t] - 1] = x[t]
    if t == 63:
        count[0] = s[63]


# -- tiles --------------------------------------------------------------------------------------------------------


def _transpose(tile: int, pad: int, rows: int) -> None:
    @case((3, 2), (tile, rows), floats(2 * tile, 3 * tile), zeros(3 * tile, 2 * tile), name=f"transpose_{tile}_by_{rows}_padded_{pad}")
    def kernel(x: tw.Array, y: tw.Array):
        s = tw.shared((tile, tile + pad), tw.f32)
        j = tw.block.x * tile + tw.thread.x
        for k in range(0, tile, rows):
            s[tw.thread.y + k, tw.thread.x] = x[tw.block.y * tile + tw.thread.y + k, j]
        tw.gpu_sync()
        i = tw.block.y * tile + tw.thread.x
        for k in range(0, tile, rows):
            y[tw.block.x * tile + tw.thread.y + k, i] = s[tw.thread.x, tw.thread.y + k]


for _tile, _pad, _rows in ((8, 0, 8), (8, 1, 4), (16, 1, 16), (32, 1, 8), (12, 1, 6)):
    _transpose(_tile, _pad, _rows)


def _matmul(tile: int, m: int, n: int, k: int) -> None:
    @case((-(-n // tile), -(-m // tile)), (tile, tile), wholes(m, k), wholes(k, n), zeros(m, n), name=f"matmul_of_tiles_of_{tile}_{m}_{n}_{k}")
    def kernel(a: tw.Array, b: tw.Array, c: tw.Array):
        left = tw.shared((tile, tile), tw.f32)
        right = tw.shared((tile, tile), tw.f32)
        tx = tw.thread.x
        ty = tw.thread.y
        row = tw.block.y * tile + ty
        column = tw.block.x * tile + tx
        total = 0.0
        for step in range((a.shape[1] + tile - 1) // tile):
            at = step * tile
            left[ty, tx] = a[row, at + tx] if row < a.shape[0] and at + tx < a.shape[1] else 0.0
            right[ty, tx] = b[at + ty, column] if at + ty < b.shape[0] and column < b.shape[1] else 0.0
            tw.gpu_sync()
            for k in range(tile):
                total += left[ty, k] * right[k, tx]
            tw.gpu_sync()
        if row < c.shape[0] and column < c.shape[1]:
            c[row, column] = total


_matmul(4, 8, 8, 8)
_matmul(8, 13, 17, 11)
_matmul(16, 32, 32, 48)


def _stencil(radius: int, threads: int) -> None:
    @case(2, threads, wholes(2 * threads), zeros(2 * threads), name=f"window_of_{2 * radius + 1}_in_blocks_of_{threads}")
    def kernel(x, y):
        s = tw.shared(threads + 2 * radius, tw.f32)
        t = tw.thread.x
        i = tw.gpu_thread_id()
        s[t + radius] = x[i]
        if t < radius:
            s[t] = x[i - radius] if i >= radius else 0.0
            s[t + radius + threads] = x[i + threads] if i + threads < len(x) else 0.0
        tw.gpu_sync()
        total = 0.0
        for k in range(2 * radius + 1):
            total += s[t + k] * (k + 1)
        y[i] = total


for _radius, _threads in ((1, 32), (3, 32), (4, 48), (8, 64)):
    _stencil(_radius, _threads)


@case((2, 2), (8, 8), wholes(16, 16), zeros(16, 16))
def five_points_with_a_border(x: tw.Array, y: tw.Array):
    s = tw.shared((10, 10), tw.f32)
    tx = tw.thread.x
    ty = tw.thread.y
    j = tw.block.x * 8 + tx
    i = tw.block.y * 8 + ty
    s[ty + 1, tx + 1] = x[i, j]
    if ty == 0:
        s[0, tx + 1] = x[i - 1, j] if i > 0 else 0.0
    if ty == 7:
        s[9, tx + 1] = x[i + 1, j] if i < 15 else 0.0
    if tx == 0:
        s[ty + 1, 0] = x[i, j - 1] if j > 0 else 0.0
    if tx == 7:
        s[ty + 1, 9] = x[i, j + 1] if j < 15 else 0.0
    tw.gpu_sync()
    y[i, j] = s[ty, tx + 1] + s[ty + 2, tx + 1] + s[ty + 1, tx] + s[ty + 1, tx + 2] - 4.0 * s[ty + 1, tx + 1]


# -- sorts and meetings in loops ----------------------------------------------------------------------------------


def _bitonic(n: int, dtype: type) -> None:
    kind = {np.float32: tw.f32, np.int32: tw.i32}[dtype]

    @case(2, n, wholes(2 * n, dtype=dtype, low=-99, high=99), zeros(2 * n, dtype=dtype), name=f"bitonic_sort_of_{n}_{dtype.__name__}")
    def kernel(x, y):
        t = tw.thread.x
        s = tw.shared(n, kind)
        s[t] = x[tw.gpu_thread_id()]
        tw.gpu_sync()
        k = 2
        while k <= n:
            j = k // 2
            while j > 0:
                other = t ^ j
                if other > t:
                    up = (t & k) == 0
                    if (s[t] > s[other]) == up:
                        v = s[t]
                        s[t] = s[other]
                        s[other] = v
                tw.gpu_sync()
                j //= 2
            k *= 2
        y[tw.gpu_thread_id()] = s[t]


_bitonic(32, np.float32)
_bitonic(128, np.int32)


@case(1, 48, wholes(48, dtype=np.int32, high=99), zeros(48, dtype=np.int32))
def odd_even_sort(x, y):
    t = tw.thread.x
    s = tw.shared(48, tw.i32)
    s[t] = x[t]
    tw.gpu_sync()
    for turn in range(48):
        if t % 2 == turn % 2 and t + 1 < 48 and s[t] > s[t + 1]:
            v = s[t]
            s[t] = s[t + 1]
            s[t + 1] = v
        tw.gpu_sync()
    y[t] = s[t]


@case(1, 64, wholes(64, dtype=np.int32, low=0, high=64), zeros(64, dtype=np.int32), zeros(1, dtype=np.int32))
def until_nothing_changes(x, y, turns):
    """The loop ends when no thread has changed anything, which a flag in shared memory says."""
    t = tw.thread.x
    s = tw.shared(64, tw.i32)
    changed = tw.shared(1, tw.i32)
    s[t] = x[t]
    count = 0
    going = True
    while going:
        tw.gpu_sync()
        if t == 0:
            changed[0] = 0
        tw.gpu_sync()
        v = s[t]
        w = s[v]
        tw.gpu_sync()
        if w < v:
            s[t] = w
            changed[0] = 1
        tw.gpu_sync()
        going = changed[0] == 1
        count += 1
    y[t] = s[t]
    if t == 0:
        turns[0] = count


@case(1, 64, wholes(64), zeros(64))
def values_across_many_barriers(x, y):
    t = tw.thread.x
    s = tw.shared(64, tw.f32)
    a = x[t]
    b = a * 2.0
    c = t * 3
    for k in range(4):
        s[t] = a
        tw.gpu_sync()
        a, b = b + s[(t + 1) % 64], a
        tw.gpu_sync()
        if k % 2 == 0:
            s[t] = b
            tw.gpu_sync()
            a = a - s[63 - t]
            tw.gpu_sync()
    y[t] = a + b + c


@case((2, 2), (6, 5, 2), zeros(4, 60, dtype=np.int32))
def shared_memory_of_an_odd_block(y: tw.Array):
    s = tw.shared((2, 5, 6), tw.i32)
    s[tw.thread.z, tw.thread.y, tw.thread.x] = tw.thread.x + 10 * tw.thread.y + 100 * tw.thread.z
    tw.gpu_sync()
    own = tw.thread.x + 6 * tw.thread.y + 30 * tw.thread.z
    y[tw.block.x + 2 * tw.block.y, own] = s[1 - tw.thread.z, 4 - tw.thread.y, 5 - tw.thread.x]


@case(1, 32, wholes(32), zeros(32))
def local_arrays_across_barriers(x, y):
    t = tw.thread.x
    s = tw.shared(32, tw.f32)
    a = tw.local(3, tw.f32)
    for k in range(3):
        a[k] = x[t] + k
    s[t] = a[1]
    tw.gpu_sync()
    a[t % 3] = s[31 - t]
    tw.gpu_sync()
    y[t] = a[0] + 2.0 * a[1] + 3.0 * a[2]


@case(1, 64, wholes(64, dtype=np.int32, low=0, high=4), zeros(64, dtype=np.int32))
def divergence_between_barriers(x, y):
    t = tw.thread.x
    s = tw.shared(64, tw.i32)
    v = 0
    for k in range(x[t]):
        v += k * t
    s[t] = v
    tw.gpu_sync()
    w = s[(t + 5) % 64]
    while w > 50:
        w -= 17
    tw.gpu_sync()
    s[t] = w
    tw.gpu_sync()
    y[t] = s[63 - t]


@case(3, 64, wholes(192), zeros(3), zeros(3))
def two_reductions_in_one(x, a, b):
    t = tw.thread.x
    s = tw.shared(64, tw.f32)
    m = tw.shared(64, tw.f32)
    v = x[tw.gpu_thread_id()]
    s[t] = v
    m[t] = v * v
    tw.gpu_sync()
    step = 32
    while step >= 1:
        if t < step:
            s[t] += s[t + step]
            m[t] = max(m[t], m[t + step])
        tw.gpu_sync()
        step //= 2
    if t == 0:
        a[tw.block.x] = s[0]
        b[tw.block.x] = m[0]
