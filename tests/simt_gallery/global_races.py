"""Races on global memory: between threads of a block, and between blocks, which nothing but atomics and fences orders."""

from __future__ import annotations

import numpy as np

import tilewright as tw
from simt_gallery.cases import Arrays, Gallery, floats, integers

gallery = Gallery()
ORDERS = "with nothing that orders the two"


# A sum of all threads without an atomic.


@tw.gpu
def total_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    y[0] += x[tw.gpu_thread_id()]  # fault


@tw.gpu
def total_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    tw.atomic_add(y, 0, x[tw.gpu_thread_id()])


gallery.add(
    "a sum of all threads without an atomic", total_bad, total_good, 2, 64, integers(128, 1),
    f"race on global memory: store of 'y'[0], which block (1), thread 63 loads at <fault> {ORDERS}, in block (0), thread 0",
    result=lambda a: np.asarray([a[0].sum()], np.int32),
)  # fmt: skip


# Every block writes its sum to the same place.


@tw.gpu
def sums_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    part = tw.shared(64, tw.f32)
    t = tw.thread.x
    part[t] = x[tw.gpu_thread_id()]
    tw.gpu_sync()
    if t == 0:
        total = 0.0
        for k in range(64):
            total += part[k]
        y[0] = total  # fault


@tw.gpu
def sums_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    part = tw.shared(64, tw.f32)
    t = tw.thread.x
    part[t] = x[tw.gpu_thread_id()]
    tw.gpu_sync()
    if t == 0:
        total = 0.0
        for k in range(64):
            total += part[k]
        y[tw.block.x] = total


gallery.add(
    "all blocks write one element", sums_bad, sums_good, 3, 64, floats(192, 3),
    f"race on global memory: store of 'y'[0], which block (0), thread 0 stores by the same statement {ORDERS}, in block (1), thread 0",
    result=lambda a: a[0].reshape(3, 64).sum(axis=1),
)  # fmt: skip


# A stencil in place.


@tw.gpu
def smooth_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    if i > 0 and i < len(y) - 1:
        y[i] = (y[i - 1] + y[i] + y[i + 1]) / 3.0  # fault


@tw.gpu
def smooth_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    if i > 0 and i < len(y) - 1:
        y[i] = (x[i - 1] + x[i] + x[i + 1]) / 3.0


def _ramp() -> Arrays:
    return [np.arange(64, dtype=np.float32) ** 2, np.arange(64, dtype=np.float32) ** 3]


gallery.add(
    "a stencil in place", smooth_bad, smooth_good, 2, 32, _ramp,
    f"race on global memory: store of 'y'[1], which thread 2 loads at <fault> {ORDERS}, in block (0), thread 1",
    result=lambda a: np.concatenate([a[1][:1], np.convolve(a[0], np.ones(3, np.float32), "valid") / 3, a[1][-1:]]),
)  # fmt: skip


# A block that uses what another block computes.


@tw.gpu
def chained_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    y[i] = 2.0 * x[i]  # written
    tw.gpu_sync()
    if i + 64 < len(x):
        x[i] = y[i + 64]  # fault


@tw.gpu
def chained_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    y[i] = 2.0 * x[i]
    tw.gpu_sync()
    x[i] = y[i ^ 63]


gallery.add(
    "a result of another block", chained_bad, chained_good, 2, 64, floats(128, 128),
    f"race on global memory: load of 'y'[64], which block (1), thread 0 stores at <written> {ORDERS}, in block (0), thread 0",
    result=lambda a: 2 * a[0],
)  # fmt: skip


# The last block adds up what others wrote, without a fence.


@tw.gpu
def last_bad(x: tw.GpuBuffer[tw.i32], parts: tw.GpuBuffer[tw.i32], count: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    b = tw.block.x
    if tw.thread.x == 0:
        parts[b] = x[b] * x[b]  # written
        if tw.atomic_add(count, 0, 1) == tw.grid.size.x - 1:
            total = 0
            for k in range(tw.grid.size.x):
                total += parts[k]  # fault
            y[0] = total


@tw.gpu
def last_good(x: tw.GpuBuffer[tw.i32], parts: tw.GpuBuffer[tw.i32], count: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    b = tw.block.x
    if tw.thread.x == 0:
        parts[b] = x[b] * x[b]
        tw.fence()
        if tw.atomic_add(count, 0, 1) == tw.grid.size.x - 1:
            total = 0
            for k in range(tw.grid.size.x):
                total += parts[k]
            y[0] = total


gallery.add(
    "the last block without a fence", last_bad, last_good, 5, 32,
    lambda: [np.arange(1, 6, dtype=np.int32), np.zeros(5, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32)],
    f"race on global memory: load of 'parts'[0], which block (0), thread 0 stores at <written> {ORDERS}, in block (4), thread 0",
    result=lambda a: np.asarray([55], np.int32),
)  # fmt: skip


# Atomics that only hold for a block.


@tw.gpu
def scope_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    tw.atomic_add(y, x[tw.gpu_thread_id()] % 4, 1, scope="block")  # fault


@tw.gpu
def scope_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    tw.atomic_add(y, x[tw.gpu_thread_id()] % 4, 1)


gallery.add(
    "atomics of too narrow a scope", scope_bad, scope_good, 2, 32, integers(64, 4),
    f"race on global memory: atomic of 'y'[0], which block (0), thread 31 updates by the same statement {ORDERS}, in block (1), thread 3",
    result=lambda a: np.full(4, 16, np.int32),
)  # fmt: skip


# Places that come from data, two of them alike.


@tw.gpu
def scattered_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    y[x[i] // 2] = i  # fault


@tw.gpu
def scattered_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    tw.atomic_max(y, x[i] // 2, i)


gallery.add(
    "two threads with one place", scattered_bad, scattered_good, 1, 64, integers(64, 33),
    f"race on global memory: store of 'y'[1], which thread 1 stores by the same statement {ORDERS}, in block (0), thread 2",
    result=lambda a: np.asarray([0, *range(2, 64, 2), 63], np.int32),
)  # fmt: skip


# Turning a matrix in place.


@tw.gpu
def turned_bad(x: tw.Array, y: tw.Array):
    i, j = tw.grid.y, tw.grid.x
    y[i, j] = y[j, i]  # fault


@tw.gpu
def turned_good(x: tw.Array, y: tw.Array):
    i, j = tw.grid.y, tw.grid.x
    if i < j:
        upper, lower = y[i, j], y[j, i]
        y[i, j] = lower
        y[j, i] = upper


def _square() -> Arrays:
    return [np.zeros((1, 1), np.float32), np.arange(256, dtype=np.float32).reshape(16, 16)]


gallery.add(
    "turning a matrix in place", turned_bad, turned_good, (2, 2), (8, 8), _square,
    f"race on global memory: store of 'y'[0, 1], which thread (0, 1) loads at <fault> {ORDERS}, in block (0, 0), thread (1, 0)",
    result=lambda a: a[1].T,
)  # fmt: skip


# A minimum that is looked at before it is updated.


@tw.gpu
def lowest_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    if x[i] < y[0]:  # read
        tw.atomic_min(y, 0, x[i])  # fault


@tw.gpu
def lowest_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    tw.atomic_min(y, 0, x[i])


gallery.add(
    "looking at what others update", lowest_bad, lowest_good, 1, 64, lambda: [np.arange(64, dtype=np.int32)[::-1].copy(), np.full(1, 99, np.int32)],
    f"race on global memory: atomic of 'y'[0], which thread 63 loads at <read> {ORDERS}, in block (0), thread 0",
    result=lambda a: np.zeros(1, np.int32),
)  # fmt: skip
