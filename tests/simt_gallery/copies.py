"""Asynchronous copies, mbarriers, named barriers, vectors and assertions."""

from __future__ import annotations

import numpy as np

import tilewright as tw
from simt_gallery.cases import Gallery, floats, integers

gallery = Gallery()


# Reading what is still being copied.


@tw.gpu
def fetched_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    tw.copy_async(tile, t, x, t)  # copy
    tw.copy_commit()
    tw.gpu_sync()
    y[t] = tile[63 - t]  # fault
    tw.copy_wait()


@tw.gpu
def fetched_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    tw.copy_async(tile, t, x, t)
    tw.copy_commit()
    tw.copy_wait()
    tw.gpu_sync()
    y[t] = tile[63 - t]


gallery.add(
    "no wait for an asynchronous copy", fetched_bad, fetched_good, 1, 64, floats(64, 64),
    "load of uninitialised shared memory: 'tile'[63] is still being copied by the copy_async at <copy>, in block (0), "
    "thread 0",
    result=lambda a: a[0][::-1], only_gpu=True,
)  # fmt: skip


# Waiting for one's own copies, but not for those of others.


@tw.gpu
def met_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    tw.copy_async(tile, t, x, t)  # copy
    tw.copy_commit()
    tw.copy_wait()
    y[t] = tile[63 - t]  # fault


@tw.gpu
def met_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    tw.copy_async(tile, t, x, t)
    tw.copy_commit()
    tw.copy_wait()
    tw.gpu_sync()
    y[t] = tile[63 - t]


gallery.add(
    "no barrier after an asynchronous copy", met_bad, met_good, 1, 64, floats(64, 64),
    "race on shared memory: load of 'tile'[63], which thread 63 copies to at <copy> with nothing that orders the two, in "
    "block (0), thread 0",
    result=lambda a: a[0][::-1], only_gpu=True,
)  # fmt: skip


# Two copies on their way, and one too many allowed to be.


@tw.gpu
def groups_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tiles = tw.shared(128, tw.f32)
    t = tw.thread.x
    for k in tw.unrolled(range(2)):
        tw.copy_async(tiles, 64 * k + t, x, 64 * k + t)  # copy
        tw.copy_commit()
    total = 0.0
    for k in tw.unrolled(range(2)):
        tw.copy_wait(1)
        tw.gpu_sync()
        total += tiles[64 * k + 63 - t]  # fault
    tw.copy_wait(0)
    y[t] = total


@tw.gpu
def groups_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tiles = tw.shared(128, tw.f32)
    t = tw.thread.x
    for k in tw.unrolled(range(2)):
        tw.copy_async(tiles, 64 * k + t, x, 64 * k + t)
        tw.copy_commit()
    tw.copy_wait(1)
    tw.gpu_sync()
    total = tiles[63 - t]
    tw.copy_wait(0)
    tw.gpu_sync()
    y[t] = total + tiles[127 - t]


gallery.add(
    "a wait that lets one copy go on", groups_bad, groups_good, 1, 64, floats(128, 64),
    "load of uninitialised shared memory: 'tiles'[127] is still being copied by the copy_async at <copy>, in block (0), "
    "thread 0",
    result=lambda a: (a[0][:64] + a[0][64:])[::-1], only_gpu=True,
)  # fmt: skip


# An mbarrier nobody initialised.


@tw.gpu
def ready_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    full = tw.mbarriers(1)
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    tile[t] = x[t]
    tw.mbarrier_arrive(full, 0)  # fault
    tw.mbarrier_wait(full, 0, 0)
    y[t] = tile[63 - t]


@tw.gpu
def ready_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    full = tw.mbarriers(1)
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    if t == 0:
        tw.mbarrier_init(full, 0, 64)
    tw.gpu_sync()
    tile[t] = x[t]
    tw.mbarrier_arrive(full, 0)
    tw.mbarrier_wait(full, 0, 0)
    y[t] = tile[63 - t]


gallery.add(
    "an mbarrier nobody initialised", ready_bad, ready_good, 1, 64, floats(64, 64),
    "mbarrier_arrive of mbarrier 'full'[0], which was never initialised",
    result=lambda a: a[0][::-1], only_gpu=True,
)  # fmt: skip


# An mbarrier that others use before they can know of it.


@tw.gpu
def announced_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    full = tw.mbarriers(1)
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    if t == 0:
        tw.mbarrier_init(full, 0, 64)
    tile[t] = x[t]
    tw.mbarrier_arrive(full, 0)  # fault
    tw.mbarrier_wait(full, 0, 0)
    y[t] = tile[63 - t]


gallery.add(
    "an mbarrier that is used too early", announced_bad, ready_good, 1, 64, floats(64, 64),
    "mbarrier_arrive of mbarrier 'full'[0], which another warp initialised with nothing that orders the two",
    result=lambda a: a[0][::-1], only_gpu=True,
)  # fmt: skip


# More threads arrive than were announced.


@tw.gpu
def arrivals_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    full = tw.mbarriers(1)
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    if t == 0:
        tw.mbarrier_init(full, 0, 32)
    tw.gpu_sync()
    tile[t] = x[t]
    tw.mbarrier_arrive(full, 0)  # fault
    tw.mbarrier_wait(full, 0, 0)
    y[t] = tile[63 - t]


gallery.add(
    "more arrivals than an mbarrier allows", arrivals_bad, ready_good, 1, 64, floats(64, 64),
    "64 threads arrive at mbarrier 'full'[0], which allows 32 more in this phase (phase 0, 32 of 32 arrivals and 0 bytes to"
    " come), in block (0), thread 0",
    result=lambda a: a[0][::-1], only_gpu=True,
)  # fmt: skip


# Fewer threads arrive than were announced.


@tw.gpu
def awaited_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    full = tw.mbarriers(1)
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    if t == 0:
        tw.mbarrier_init(full, 0, 64)
    tw.gpu_sync()
    if t < 32:
        tile[t] = x[t]
        tw.mbarrier_arrive(full, 0)
    tw.mbarrier_wait(full, 0, 0)  # fault
    y[t] = tile[t % 32]


@tw.gpu
def awaited_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    full = tw.mbarriers(1)
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    if t == 0:
        tw.mbarrier_init(full, 0, 32)
    tw.gpu_sync()
    if t < 32:
        tile[t] = x[t]
        tw.mbarrier_arrive(full, 0)
    tw.mbarrier_wait(full, 0, 0)
    y[t] = tile[t % 32]


gallery.add(
    "an mbarrier whose phase never ends", awaited_bad, awaited_good, 1, 64, floats(64, 64),
    "deadlock in block (0): warp 0 waits for parity 0 of mbarrier 'full'[0] (phase 0, 32 of 64 arrivals and 0 bytes to "
    "come) at <fault>; warp 1 waits for parity 0 of mbarrier 'full'[0] (phase 0, 32 of 64 arrivals and 0 bytes to come) at "
    "<fault>",
    result=lambda a: np.tile(a[0][:32], 2), only_gpu=True,
)  # fmt: skip


# Waiting for the parity of the phase before.


@tw.gpu
def bulk_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    full = tw.mbarriers(1)
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    if t == 0:
        tw.mbarrier_init(full, 0, 1)
        tw.fence_init()
    tw.gpu_sync()
    if t == 0:
        tw.mbarrier_expect(full, 0, 256)
        tw.bulk_load(tile, 0, x, 0, 64, full, 0)  # copy
    tw.mbarrier_wait(full, 0, 1)
    y[t] = tile[63 - t]  # fault


@tw.gpu
def bulk_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    full = tw.mbarriers(1)
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    if t == 0:
        tw.mbarrier_init(full, 0, 1)
        tw.fence_init()
    tw.gpu_sync()
    if t == 0:
        tw.mbarrier_expect(full, 0, 256)
        tw.bulk_load(tile, 0, x, 0, 64, full, 0)
    tw.mbarrier_wait(full, 0, 0)
    y[t] = tile[63 - t]


gallery.add(
    "the wrong parity of an mbarrier", bulk_bad, bulk_good, 1, 64, floats(64, 64),
    "load of uninitialised shared memory: 'tile'[63] is still being copied by the bulk_load at <copy>, in block (0), thread"
    " 0",
    result=lambda a: a[0][::-1], only_gpu=True,
)  # fmt: skip


# Bytes that are announced and never copied.


@tw.gpu
def bytes_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    full = tw.mbarriers(1)
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    if t == 0:
        tw.mbarrier_init(full, 0, 1)
        tw.fence_init()
    tw.gpu_sync()
    if t == 0:
        tw.mbarrier_expect(full, 0, 512)
        tw.bulk_load(tile, 0, x, 0, 64, full, 0)
    tw.mbarrier_wait(full, 0, 0)  # fault
    y[t] = tile[63 - t]


gallery.add(
    "bytes that never come", bytes_bad, bulk_good, 1, 64, floats(64, 64),
    "deadlock in block (0): warp 0 waits for parity 0 of mbarrier 'full'[0] (phase 0, 0 of 1 arrivals and 256 bytes to "
    "come) at <fault>; warp 1 waits for parity 0 of mbarrier 'full'[0] (phase 0, 0 of 1 arrivals and 256 bytes to come) at "
    "<fault>",
    result=lambda a: a[0][::-1], only_gpu=True,
)  # fmt: skip


# Warps that meet at a named barrier for more than there are.


@tw.gpu
def named_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    if t < 64:
        tile[t] = x[t]
        tw.named_barrier(1, 96)  # fault
        y[t] = tile[63 - t]


@tw.gpu
def named_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    if t < 64:
        tile[t] = x[t]
        tw.named_barrier(1, 64)
        y[t] = tile[63 - t]


gallery.add(
    "a named barrier for too many", named_bad, named_good, 1, 128, floats(64, 64),
    "deadlock in block (0): warp 0 waits at named barrier 1 (64 of 96 threads) at <fault>; warp 1 waits at named barrier 1 "
    "(64 of 96 threads) at <fault>; warp 2 has ended; warp 3 has ended",
    result=lambda a: a[0][::-1],
)  # fmt: skip


# A vector that does not begin at a multiple of its size.


@tw.gpu
def vectors_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    t = tw.thread.x
    a, b, c, d = tw.vload(x, 4 * t + 1, 4)  # fault
    y[t] = a + b + c + d


@tw.gpu
def vectors_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    t = tw.thread.x
    a, b, c, d = tw.vload(x, 4 * t, 4)
    y[t] = a + b + c + d


gallery.add(
    "a vector that is not aligned", vectors_bad, vectors_good, 1, 32, floats(132, 32),
    "load of 4 elements of 'x' from element 1 on is misaligned: a vector of 16 bytes must lie at a multiple of that, in "
    "block (0), thread 0",
    result=lambda a: a[0][:128].reshape(32, 4).sum(axis=1), tool="memcheck",
)  # fmt: skip


# An assertion.


@tw.gpu
def asserted_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    assert x[i] < 40  # fault
    y[i] = x[i]


@tw.gpu
def asserted_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    assert x[i] < 65
    y[i] = x[i]


gallery.add(
    "an assertion that does not hold", asserted_bad, asserted_good, 2, 32, integers(64, 64),
    "assertion failed: x[i] < 40, in block (1), thread 7",
    result=lambda a: a[0],
)  # fmt: skip
