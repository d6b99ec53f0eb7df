"""Races on shared memory. compute-sanitizer does not look at those with atomics."""

from __future__ import annotations

import numpy as np

import tilewright as tw
from simt_gallery.cases import Gallery, floats, integers

gallery = Gallery()
ORDERS = "with nothing that orders the two"


# A tile that is read before all have written it.


@tw.gpu
def reverse_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    tile[t] = x[tw.gpu_thread_id()]  # written
    y[tw.gpu_thread_id()] = tile[63 - t]  # fault


@tw.gpu
def reverse_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    tile[t] = x[tw.gpu_thread_id()]
    tw.gpu_sync()
    y[tw.gpu_thread_id()] = tile[63 - t]


gallery.add(
    "no barrier before reading", reverse_bad, reverse_good, 2, 64, floats(128, 128),
    f"race on shared memory: load of 'tile'[63], which thread 63 stores at <written> {ORDERS}, in block (0), thread 0",
    result=lambda a: a[0].reshape(2, 64)[:, ::-1].reshape(-1), tool="racecheck",
)  # fmt: skip


# A tree of sums whose steps are not apart.


@tw.gpu
def tree_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    part = tw.shared(128, tw.f32)
    t = tw.thread.x
    part[t] = x[tw.gpu_thread_id()]
    tw.gpu_sync()
    step = 64
    while step > 0:
        if t < step:
            part[t] += part[t + step]  # fault
        step //= 2
    if t == 0:
        y[tw.block.x] = part[0]


@tw.gpu
def tree_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    part = tw.shared(128, tw.f32)
    t = tw.thread.x
    part[t] = x[tw.gpu_thread_id()]
    tw.gpu_sync()
    step = 64
    while step > 0:
        if t < step:
            part[t] += part[t + step]
        tw.gpu_sync()
        step //= 2
    if t == 0:
        y[tw.block.x] = part[0]


gallery.add(
    "no barrier between the steps of a sum", tree_bad, tree_good, 3, 128, floats(384, 3),
    f"race on shared memory: load of 'part'[32], which thread 32 stores at <fault> {ORDERS}, in block (0), thread 0",
    result=lambda a: a[0].reshape(3, 128).sum(axis=1), tool="racecheck",
)  # fmt: skip


# A buffer that is filled again while others still read it.


@tw.gpu
def reuse_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    total = 0.0
    for k in range(4):
        tile[t] = x[64 * k + t]  # fault
        tw.gpu_sync()
        total += tile[63 - t]  # read
    y[t] = total


@tw.gpu
def reuse_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    total = 0.0
    for k in range(4):
        tile[t] = x[64 * k + t]
        tw.gpu_sync()
        total += tile[63 - t]
        tw.gpu_sync()
    y[t] = total


gallery.add(
    "no barrier before writing again", reuse_bad, reuse_good, 1, 64, floats(256, 64),
    f"race on shared memory: store of 'tile'[0], which thread 63 loads at <read> {ORDERS}, in block (0), thread 0",
    result=lambda a: a[0].reshape(4, 64).sum(axis=0)[::-1], tool="racecheck",
)  # fmt: skip


# The last steps of a sum, in one warp, as they were written before Volta.


@tw.gpu
def warp_sum_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    part = tw.shared(64, tw.f32)
    t = tw.thread.x
    part[t] = x[t]
    part[t + 32] = x[t + 32]
    part[t] += part[t + 32]  # written
    if t < 16:
        part[t] += part[t + 16]  # fault
    if t == 0:
        y[0] = part[0]


@tw.gpu
def warp_sum_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    part = tw.shared(64, tw.f32)
    t = tw.thread.x
    part[t] = x[t]
    part[t + 32] = x[t + 32]
    part[t] += part[t + 32]
    tw.warp_sync()
    if t < 16:
        part[t] += part[t + 16]
    tw.warp_sync()
    if t == 0:
        y[0] = part[0]


gallery.add(
    "a warp that is taken to run in step", warp_sum_bad, warp_sum_good, 1, 32, floats(64, 1),
    f"race on shared memory: load of 'part'[16], which thread 16 stores at <written> {ORDERS}, in block (0), thread 0",
    result=lambda a: np.asarray([a[0][[0, 16, 32, 48]].sum()]), tool="racecheck",
)  # fmt: skip


# All threads write what one should.


@tw.gpu
def winner_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    best = tw.shared(1, tw.f32)
    t = tw.thread.x
    best[0] = x[t]  # fault
    tw.gpu_sync()
    y[t] = best[0]


@tw.gpu
def winner_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    best = tw.shared(1, tw.f32)
    t = tw.thread.x
    if t == 5:
        best[0] = x[t]
    tw.gpu_sync()
    y[t] = best[0]


gallery.add(
    "all threads write one element", winner_bad, winner_good, 1, 64, floats(64, 64),
    f"race on shared memory: store of 'best'[0], which thread 0 stores by the same statement {ORDERS}, in block (0), thread 1",
    result=lambda a: np.full(64, a[0][5]), tool="racecheck",
)  # fmt: skip


# One thread prepares, the others do not wait.


@tw.gpu
def prepared_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    factor = tw.shared(1, tw.f32)
    t = tw.thread.x
    if t == 0:
        factor[0] = x[0] * 0.5  # written
    y[t] = x[t] * factor[0]  # fault


@tw.gpu
def prepared_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    factor = tw.shared(1, tw.f32)
    t = tw.thread.x
    if t == 0:
        factor[0] = x[0] * 0.5
    tw.gpu_sync()
    y[t] = x[t] * factor[0]


gallery.add(
    "nobody waits for the first thread", prepared_bad, prepared_good, 1, 64, floats(64, 64),
    f"race on shared memory: load of 'factor'[0], which thread 0 stores at <written> {ORDERS}, in block (0), thread 1",
    result=lambda a: a[0] * np.float32(0.5) * a[0][0], tool="racecheck",
)  # fmt: skip


# A histogram that is cleared while others count already.


@tw.gpu
def cleared_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    bins = tw.shared(8, tw.i32)
    t = tw.thread.x
    if t < 8:
        bins[t] = 0  # cleared
    tw.atomic_add(bins, x[t] % 8, 1, scope="block")  # fault
    tw.gpu_sync()
    if t < 8:
        y[t] = bins[t]


@tw.gpu
def cleared_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    bins = tw.shared(8, tw.i32)
    t = tw.thread.x
    if t < 8:
        bins[t] = 0
    tw.gpu_sync()
    tw.atomic_add(bins, x[t] % 8, 1, scope="block")
    tw.gpu_sync()
    if t < 8:
        y[t] = bins[t]


gallery.add(
    "counting before the bins are cleared", cleared_bad, cleared_good, 1, 64, integers(64, 8),
    f"race on shared memory: atomic of 'bins'[1], which thread 1 stores at <cleared> {ORDERS}, in block (0), thread 0",
    result=lambda a: np.full(8, 8, np.int32),
)  # fmt: skip


# A count that is read before all have counted.


@tw.gpu
def counted_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    count = tw.shared(1, tw.i32)
    t = tw.thread.x
    if t == 0:
        count[0] = 0
    tw.gpu_sync()
    if x[t] % 2 == 0:
        tw.atomic_add(count, 0, 1, scope="block")  # counted
    y[t] = count[0]  # fault


@tw.gpu
def counted_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    count = tw.shared(1, tw.i32)
    t = tw.thread.x
    if t == 0:
        count[0] = 0
    tw.gpu_sync()
    if x[t] % 2 == 0:
        tw.atomic_add(count, 0, 1, scope="block")
    tw.gpu_sync()
    y[t] = count[0]


gallery.add(
    "a count that is read too early", counted_bad, counted_good, 1, 64, integers(64, 64),
    f"race on shared memory: load of 'count'[0], which thread 63 updates at <counted> {ORDERS}, in block (0), thread 0",
    result=lambda a: np.full(64, 32, np.int32),
)  # fmt: skip


# Adding without an atomic.


@tw.gpu
def added_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    total = tw.shared(1, tw.i32)
    t = tw.thread.x
    if t == 0:
        total[0] = 0
    tw.gpu_sync()
    total[0] += x[t]  # fault
    tw.gpu_sync()
    if t == 0:
        y[0] = total[0]


@tw.gpu
def added_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    total = tw.shared(1, tw.i32)
    t = tw.thread.x
    if t == 0:
        total[0] = 0
    tw.gpu_sync()
    tw.atomic_add(total, 0, x[t], scope="block")
    tw.gpu_sync()
    if t == 0:
        y[0] = total[0]


gallery.add(
    "a sum without an atomic", added_bad, added_good, 1, 64, integers(64, 1),
    f"race on shared memory: store of 'total'[0], which thread 63 loads at <fault> {ORDERS}, in block (0), thread 0",
    result=lambda a: np.asarray([a[0].sum()], np.int32), tool="racecheck",
)  # fmt: skip


# Moving elements to their neighbours in place.


@tw.gpu
def shifted_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    row = tw.shared(65, tw.f32)
    t = tw.thread.x
    row[t] = x[t]
    if t == 0:
        row[64] = 0.0
    tw.gpu_sync()
    row[t] = row[t + 1]  # fault
    tw.gpu_sync()
    y[t] = row[t]


@tw.gpu
def shifted_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    row = tw.shared(65, tw.f32)
    t = tw.thread.x
    row[t] = x[t]
    if t == 0:
        row[64] = 0.0
    tw.gpu_sync()
    following = row[t + 1]
    tw.gpu_sync()
    row[t] = following
    tw.gpu_sync()
    y[t] = row[t]


gallery.add(
    "moving elements in place", shifted_bad, shifted_good, 1, 64, floats(64, 64),
    f"race on shared memory: store of 'row'[1], which thread 0 loads at <fault> {ORDERS}, in block (0), thread 1",
    result=lambda a: np.append(a[0][1:], np.float32(0)), tool="racecheck",
)  # fmt: skip


# Two buffers in turn, of which the wrong one is filled.


@tw.gpu
def turns_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tiles = tw.shared((2, 64), tw.f32)
    t = tw.thread.x
    tiles[0, t] = x[t]
    tw.gpu_sync()
    total = 0.0
    for k in range(3):
        if k < 2:
            tiles[k % 2, t] = x[64 * (k + 1) + t]  # filled
        total += tiles[k % 2, 63 - t]  # fault
        tw.gpu_sync()
    y[t] = total


@tw.gpu
def turns_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tiles = tw.shared((2, 64), tw.f32)
    t = tw.thread.x
    tiles[0, t] = x[t]
    tw.gpu_sync()
    total = 0.0
    for k in range(3):
        if k < 2:
            tiles[(k + 1) % 2, t] = x[64 * (k + 1) + t]
        total += tiles[k % 2, 63 - t]
        tw.gpu_sync()
    y[t] = total


gallery.add(
    "filling the buffer that is being read", turns_bad, turns_good, 1, 64, floats(192, 64),
    f"race on shared memory: load of 'tiles'[0, 63], which thread 63 stores at <filled> {ORDERS}, in block (0), thread 0",
    result=lambda a: a[0].reshape(3, 64).sum(axis=0)[::-1], tool="racecheck",
)  # fmt: skip
