"""Barriers that not all threads reach, and waiting for ever.

A GPU lets threads that have ended out of its count, so that most of these kernels end there; compute-sanitizer says nothing of them.
"""

from __future__ import annotations

import numpy as np

import tilewright as tw
from simt_gallery.cases import Gallery, floats, integers

gallery = Gallery()


# A barrier in a condition that parts a warp.


@tw.gpu
def half_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    tile[t] = x[t]
    if t < 40:  # parts
        tw.gpu_sync()  # fault
        y[t] = tile[63 - t]


@tw.gpu
def half_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    tile[t] = x[t]
    tw.gpu_sync()
    if t < 40:
        y[t] = tile[63 - t]


gallery.add(
    "a barrier in a condition", half_bad, half_good, 1, 64, floats(64, 64),
    "divergent barrier: only 8 of 32 threads of warp 1 of block (0) arrive: threads 40-63 went the other way at the `if` at <parts>",
    result=lambda a: np.concatenate([a[0][:23:-1], a[1][40:]]),
)  # fmt: skip


# Threads beyond the end leave before a barrier.


@tw.gpu
def early_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(32, tw.f32)
    t, i = tw.thread.x, tw.gpu_thread_id()
    if i >= len(x):  # leaves
        return
    tile[t] = x[i]
    tw.gpu_sync()  # fault
    y[i] = tile[t ^ 1]


@tw.gpu
def early_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(32, tw.f32)
    t, i = tw.thread.x, tw.gpu_thread_id()
    if i < len(x):
        tile[t] = x[i]
    tw.gpu_sync()
    if i < len(x):
        y[i] = tile[t ^ 1]


gallery.add(
    "leaving before a barrier", early_bad, early_good, 2, 32, floats(50, 50),
    "divergent barrier: only 18 of 32 threads of warp 0 of block (1) arrive: threads 18-31 went the other way at the `if` at <leaves>",
    result=lambda a: a[0].reshape(-1, 2)[:, ::-1].reshape(-1),
)  # fmt: skip


# A loop whose length differs between threads.


@tw.gpu
def rounds_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    row = tw.shared(32, tw.i32)
    t = tw.thread.x
    row[t] = x[t]
    total = 0
    for k in range(x[t]):  # loop
        tw.gpu_sync()  # fault
        total += row[(t + k) % 32]
    y[t] = total


@tw.gpu
def rounds_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    row = tw.shared(32, tw.i32)
    t = tw.thread.x
    row[t] = x[t]
    total = 0
    tw.gpu_sync()
    for k in range(x[t]):
        total += row[(t + k) % 32]
    y[t] = total


gallery.add(
    "a barrier in a loop of different lengths", rounds_bad, rounds_good, 1, 32, integers(32, 32),
    "divergent barrier: only 31 of 32 threads of warp 0 of block (0) arrive: thread 0 left the `for` at <loop>",
    result=lambda a: np.asarray([sum(a[0][(t + k) % 32] for k in range(a[0][t])) for t in range(32)], np.int32),
)  # fmt: skip


# One barrier for some warps, another for the rest.


@tw.gpu
def sides_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    if t < 32:
        tile[t] = x[t]
        tw.gpu_sync()  # one
    else:
        tile[t] = -x[t]
        tw.gpu_sync()  # fault
    y[t] = tile[63 - t]


@tw.gpu
def sides_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    if t < 32:
        tile[t] = x[t]
    else:
        tile[t] = -x[t]
    tw.gpu_sync()
    y[t] = tile[63 - t]


gallery.add(
    "different barriers for different warps", sides_bad, sides_good, 1, 64, floats(64, 64),
    "divergent barrier: warp 1 of block (0) waits here, warp 0 at <one>",
    result=lambda a: np.concatenate([-a[0][:31:-1], a[0][31::-1]]),
)  # fmt: skip


# A barrier that whole warps never come to.


@tw.gpu
def missing_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(32, tw.f32)
    t = tw.thread.x
    if t < 32:  # parts
        tile[t] = x[t]
        tw.gpu_sync()  # fault
    y[t] = x[t]


@tw.gpu
def missing_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(32, tw.f32)
    t = tw.thread.x
    if t < 32:
        tile[t] = x[t]
    tw.gpu_sync()
    y[t] = x[t]


gallery.add(
    "a barrier one warp never comes to", missing_bad, missing_good, 1, 64, floats(64, 64),
    "deadlock in block (0): warp 0 waits at the barrier at <fault>; warp 1 waits for other warps at the end of the `if` at <parts>",
    result=lambda a: a[0],
)  # fmt: skip


# Leaving a loop with barriers one by one.


@tw.gpu
def search_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    t = tw.thread.x
    k = 0
    while k < 8:
        if x[t] % 8 == k:  # found
            break
        k += 1
        tw.gpu_sync()  # fault
    y[t] = k


@tw.gpu
def search_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    t = tw.thread.x
    k, found = 0, False
    for step in range(8):
        if x[t] % 8 == step:
            found = True
        if not found:
            k += 1
        tw.gpu_sync()
    y[t] = k


gallery.add(
    "leaving a loop with barriers", search_bad, search_good, 1, 32, integers(32, 32),
    "divergent barrier: only 28 of 32 threads of warp 0 of block (0) arrive: threads 7, 15, 23, 31 went the other way at the `if` at <found>",
    result=lambda a: a[0] % 8,
)  # fmt: skip


# Waiting for a flag that nobody raises.


@tw.gpu
def waiting_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    if tw.thread.x == 0:
        if tw.block.x == 0:
            y[1] = x[0]
        else:
            while tw.atomic_add(y, 0, 0) == 0:  # fault
                pass
            y[2] = x[0]


@tw.gpu
def waiting_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    if tw.thread.x == 0:
        if tw.block.x == 0:
            y[1] = x[0]
            tw.fence()
            tw.atomic_exchange(y, 0, 1)
        else:
            while tw.atomic_add(y, 0, 0) == 0:
                pass
            y[2] = y[1]


gallery.add(
    "a flag that nobody raises", waiting_bad, waiting_good, 2, 32, integers(4, 3),
    "deadlock in block (1): warp 0 waits for memory to change in the loop at <fault>",
    result=lambda a: np.asarray([1, 1, 1], np.int32),
)  # fmt: skip


# A lock that is not given back.


@tw.gpu
def locked_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    if tw.thread.x == 0:
        while tw.atomic_cas(y, 0, 0, 1) != 0:  # fault
            pass
        y[1] += x[tw.block.x]


@tw.gpu
def locked_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    if tw.thread.x == 0:
        while tw.atomic_cas(y, 0, 0, 1) != 0:
            pass
        y[1] += x[tw.block.x]
        tw.fence()
        tw.atomic_exchange(y, 0, 0)


gallery.add(
    "a lock that is not given back", locked_bad, locked_good, 4, 32, integers(4, 2),
    "deadlock in block (1): warp 0 waits for memory to change in the loop at <fault>",
    result=lambda a: np.asarray([0, 10], np.int32),
)  # fmt: skip
