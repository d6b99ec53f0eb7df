"""Explicit kernels whose threads talk within their warps, or through atomics."""

from __future__ import annotations

import numpy as np

import tilewright as tw
from simt_kernels import case, filled, floats, wholes, zeros

# -- shuffles and votes -------------------------------------------------------------------------------------------


@case(2, 64, wholes(128), zeros(4))
def warp_sum(x, y):
    i = tw.gpu_thread_id()
    v = x[i]
    offset = 16
    while offset > 0:
        v += tw.shuffle_down(v, offset)
        offset //= 2
    if tw.lane_id() == 0:
        y[i // 32] = v


@case(2, 64, wholes(128, dtype=np.int32), zeros(128, dtype=np.int32))
def butterfly_max(x, y):
    i = tw.gpu_thread_id()
    v = x[i]
    for m in (16, 8, 4, 2, 1):
        v = max(v, tw.shuffle_xor(v, m))
    y[i] = v


@case(1, 96, wholes(96), zeros(96))
def warp_scan(x, y):
    i = tw.thread.x
    lane = tw.lane_id()
    v = x[i]
    d = 1
    while d < 32:
        other = tw.shuffle_up(v, d)
        if lane >= d:
            v += other
        d *= 2
    y[i] = v


@case(1, 64, wholes(64), zeros(64))
def broadcast_of_a_lane(x, y):
    i = tw.thread.x
    y[i] = tw.shuffle(x[i], 5) + tw.shuffle(x[i], tw.lane_id() ^ 1)


@case(1, 64, wholes(64, dtype=np.float64), zeros(64, dtype=np.float64))
def shuffle_of_64_bits(x, y):
    i = tw.thread.x
    y[i] = tw.shuffle_down(x[i], 3) - tw.shuffle_up(x[i], 2)


@case(1, 64, wholes(64, dtype=np.int64, low=-(1 << 40), high=1 << 40), zeros(64, dtype=np.int64))
def shuffle_of_wide_integers(x, y):
    i = tw.thread.x
    y[i] = tw.shuffle_xor(x[i], 31)


@case(1, 64, floats(64, dtype=np.float16), zeros(64, dtype=np.float16))
def shuffle_of_halves(x, y):
    i = tw.thread.x
    y[i] = tw.shuffle_xor(x[i], 1)


@case(1, 64, wholes(64), zeros(64))
def groups_of_eight(x, y):
    i = tw.thread.x
    v = x[i]
    for m in (4, 2, 1):
        v += tw.shuffle_xor(v, m, 8)
    y[i] = v + tw.shuffle(v, 3, 8) + tw.shuffle_down(x[i], 5, 8) + tw.shuffle_up(x[i], 5, 8)


@case(1, 64, wholes(64, dtype=np.int32), zeros(64, dtype=np.int32))
def rotate_within_a_warp(x, y):
    i = tw.thread.x
    y[i] = tw.shuffle(x[i], (tw.lane_id() + x[i] + 32) % 32)


@case(2, 64, wholes(128, dtype=np.int32), zeros(128, dtype=np.bool_), zeros(128, dtype=np.bool_))
def any_and_all(x, a, b):
    i = tw.gpu_thread_id()
    a[i] = tw.vote_any(x[i] > 8)
    b[i] = tw.vote_all(x[i] > -9)


@case(2, 64, wholes(128, dtype=np.int32), zeros(128, dtype=np.uint32))
def ballots(x, y):
    i = tw.gpu_thread_id()
    y[i] = tw.ballot(x[i] > 0)


@case(2, 64, wholes(128, dtype=np.int32), zeros(128, dtype=np.int32))
def rank_among_chosen(x, y):
    """How many lanes before this one have a positive number."""
    i = tw.gpu_thread_id()
    votes = tw.ballot(x[i] > 0)
    below = votes & ((tw.u32(1) << tw.u32(tw.lane_id())) - 1)
    count = 0
    while below != 0:
        below = below & (below - 1)
        count += 1
    y[i] = count


@case(1, 128, wholes(128), zeros(1))
def block_sum_by_warps(x, y):
    i = tw.thread.x
    sums = tw.shared(4, tw.f32)
    v = x[i]
    for m in (16, 8, 4, 2, 1):
        v += tw.shuffle_down(v, m)
    if tw.lane_id() == 0:
        sums[tw.warp_id()] = v
    tw.gpu_sync()
    if i == 0:
        y[0] = sums[0] + sums[1] + sums[2] + sums[3]


@case(1, 128, wholes(128, dtype=np.int32), zeros(128, dtype=np.int32))
def block_scan_by_warps(x, y):
    i = tw.thread.x
    lane = tw.lane_id()
    warp = tw.warp_id()
    totals = tw.shared(4, tw.i32)
    v = x[i]
    for d in (1, 2, 4, 8, 16):
        other = tw.shuffle_up(v, d)
        if lane >= d:
            v += other
    if lane == 31:
        totals[warp] = v
    tw.gpu_sync()
    for w in range(4):
        if w < warp:
            v += totals[w]
    y[i] = v


@case(1, 32, wholes(32, 32), zeros(32, 32))
def transpose_by_shuffles(x: tw.Array, y: tw.Array):
    lane = tw.lane_id()
    for r in range(32):
        v = x[(lane + r) % 32, lane]
        y[lane, (lane + r) % 32] = v
        tw.warp_sync()


@case(1, 64, wholes(64, dtype=np.int32, low=0, high=5), zeros(64, dtype=np.int32))
def vote_in_a_loop(x, y):
    i = tw.thread.x
    v = x[i]
    turns = 0
    while tw.vote_any(v > 0):
        v -= 1
        turns += 1
    y[i] = turns * 100 + v


@case(1, 32, wholes(32), zeros(32))
def bitonic_in_a_warp(x, y):
    lane = tw.lane_id()
    v = x[tw.thread.x]
    k = 2
    while k <= 32:
        j = k // 2
        while j > 0:
            other = tw.shuffle_xor(v, j)
            up = (lane & k) == 0
            low = (lane & j) == 0
            v = min(v, other) if up == low else max(v, other)
            j //= 2
        k *= 2
    y[tw.thread.x] = v


@case(1, 96, wholes(24, 12), wholes(12), zeros(24))
def warp_for_each_row(x: tw.Array, v: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    row = tw.warp_id()
    while row < x.shape[0]:
        total = 0.0
        k = tw.lane_id()
        while k < x.shape[1]:
            total += x[row, k] * v[k]
            k += 32
        for m in (16, 8, 4, 2, 1):
            total += tw.shuffle_xor(total, m)
        if tw.lane_id() == 0:
            y[row] = total
        row += 3


# -- atomics ------------------------------------------------------------------------------------------------------


def _atomic(name: str, dtype: type, start: int) -> None:
    function = getattr(tw, f"atomic_{name}")

    @case(3, 64, wholes(192, dtype=dtype, low=1, high=9), filled(start, 7, dtype=dtype), name=f"atomic_{name}_{dtype.__name__}")
    def kernel(x, y):
        i = tw.gpu_thread_id()
        function(y, i % 7, x[i])


for _name, _start in (("add", 0), ("sub", 500), ("min", 100), ("max", -3), ("and", 127), ("or", 0), ("xor", 5)):
    for _kind in (np.int32, np.uint32, np.int64, np.uint64, np.float32):
        if _kind is np.float32 and _name in ("and", "or", "xor", "min", "max"):
            continue
        _atomic(_name, _kind, max(_start, 0) if np.dtype(_kind).kind == "u" else _start)


@case(2, 64, wholes(128, dtype=np.int32, low=0, high=16), zeros(16, dtype=np.int32))
def histogram(x, counts):
    tw.atomic_add(counts, x[tw.gpu_thread_id()], 1)


@case(2, 64, wholes(300, dtype=np.int32, low=0, high=16), zeros(16, dtype=np.int32))
def histogram_in_shared_memory(x, counts):
    t = tw.thread.x
    own = tw.shared(16, tw.i32)
    if t < 16:
        own[t] = 0
    tw.gpu_sync()
    i = tw.gpu_thread_id()
    while i < len(x):
        tw.atomic_add(own, x[i], 1)
        i += 128
    tw.gpu_sync()
    if t < 16:
        tw.atomic_add(counts, t, own[t])


@case(2, 64, wholes(128, dtype=np.int32), zeros(2, dtype=np.int32))
def counters_in_branches(x, counts):
    v = x[tw.gpu_thread_id()]
    if v > 0:
        tw.atomic_add(counts, 0, 1)
    elif v < -4:
        tw.atomic_add(counts, 1, v)


@case(1, 64, zeros(1, dtype=np.uint32), zeros(64, dtype=np.uint32))
def tickets(counter, y):
    """Each thread draws a number; sorted, they are all there."""
    n = tw.atomic_add(counter, 0, 1)
    y[n] = n * n


@case(1, 64, zeros(1, dtype=np.uint32), zeros(1, dtype=np.uint32))
def wrapping_counters(a, b):
    tw.atomic_inc(a, 0, 9)
    tw.atomic_dec(b, 0, 9)


@case(2, 64, wholes(128, dtype=np.int32), filled(-1, 128, dtype=np.int32), zeros(128, dtype=np.int32))
def exchanged(x, y, z):
    i = tw.gpu_thread_id()
    z[i] = tw.atomic_exchange(y, i, x[i])


@case(2, 64, wholes(128, dtype=np.int32, low=0, high=3), wholes(128, dtype=np.int32, low=0, high=3), zeros(128, dtype=np.int32))
def compared_and_swapped(x, y, z):
    i = tw.gpu_thread_id()
    z[i] = tw.atomic_cas(y, i, x[i], 77)


@case(2, 32, wholes(64, low=1, high=5), zeros(3))
def sums_of_squares(x, y):
    i = tw.gpu_thread_id()
    tw.atomic_add(y, i % 3, x[i] * x[i])


@case(1, 64, wholes(64, dtype=np.int32, low=1, high=9), filled(1, 64, dtype=np.int32))
def update_by_swapping(x, y):
    """An update that no instruction does, by compare and swap."""
    i = tw.gpu_thread_id()
    old = y[i]
    while True:
        seen = tw.atomic_cas(y, i, old, old * 2 + x[i])
        if seen == old:
            break
        old = seen


@case(2, 64, wholes(128, dtype=np.int32), zeros(5, dtype=np.int32))
def one_atomic_for_a_warp(x, y):
    i = tw.gpu_thread_id()
    v = x[i]
    for m in (16, 8, 4, 2, 1):
        v += tw.shuffle_down(v, m)
    if tw.lane_id() == 0:
        tw.atomic_add(y, i // 32, v)
        tw.atomic_max(y, 4, v)


@case(2, 64, wholes(128, dtype=np.int32), zeros(2, dtype=np.int32), zeros(2, dtype=np.int32))
def atomics_of_the_block(x, low, high):
    t = tw.thread.x
    ends = tw.shared(2, tw.i32)
    if t == 0:
        ends[0] = 1000
        ends[1] = -1000
    tw.gpu_sync()
    v = x[tw.gpu_thread_id()]
    tw.atomic_min(ends, 0, v)
    tw.atomic_max(ends, 1, v)
    tw.gpu_sync()
    if t == 0:
        low[tw.block.x] = ends[0]
        high[tw.block.x] = ends[1]


@case(2, 48, wholes(96, dtype=np.int32, low=-3, high=4), zeros(1, dtype=np.int32), zeros(96, dtype=np.int32))
def flags_by_or(x, flags, y):
    i = tw.gpu_thread_id()
    tw.atomic_or(flags, 0, 1 << (x[i] + 3))
    y[i] = x[i]
