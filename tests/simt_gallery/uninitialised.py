"""Reads of shared and local memory that nobody wrote."""

from __future__ import annotations

import numpy as np

import tilewright as tw
from simt_gallery.cases import Gallery, floats, integers

gallery = Gallery()


# Half of a shared array is never filled.


@tw.gpu
def filled_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    tile[t] = x[t]
    tw.gpu_sync()
    y[t] = tile[t] + tile[t + 32]  # fault


@tw.gpu
def filled_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t = tw.thread.x
    tile[t] = x[t]
    tile[t + 32] = x[t + 32]
    tw.gpu_sync()
    y[t] = tile[t] + tile[t + 32]


gallery.add(
    "a shared array that is half filled", filled_bad, filled_good, 1, 32, floats(64, 32),
    "load of uninitialised shared memory: 'tile'[32] was never written, in block (0), thread 0",
    result=lambda a: a[0][:32] + a[0][32:],
)  # fmt: skip


# Sums that start from nothing.


@tw.gpu
def window_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    seen = tw.local(4, tw.f32)
    for k in range(3):
        seen[k] = x[i + k]
    total = 0.0
    for k in range(4):
        total += seen[k]  # fault
    y[i] = total


@tw.gpu
def window_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    seen = tw.local(4, tw.f32)
    for k in range(4):
        seen[k] = x[i + k]
    total = 0.0
    for k in range(4):
        total += seen[k]
    y[i] = total


gallery.add(
    "a local array that is not filled", window_bad, window_good, 1, 32, floats(40, 32),
    "load of uninitialised local memory: 'seen'[3] was never written, in block (0), thread 0",
    result=lambda a: np.asarray([a[0][i : i + 4].sum() for i in range(32)]),
)  # fmt: skip


# Counters in shared memory that nobody made zero.


@tw.gpu
def counters_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    bins = tw.shared(8, tw.i32)
    t = tw.thread.x
    tw.atomic_add(bins, x[t] % 8, 1)  # fault
    tw.gpu_sync()
    if t < 8:
        y[t] = bins[t]


@tw.gpu
def counters_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    bins = tw.shared(8, tw.i32)
    t = tw.thread.x
    if t < 8:
        bins[t] = 0
    tw.gpu_sync()
    tw.atomic_add(bins, x[t] % 8, 1)
    tw.gpu_sync()
    if t < 8:
        y[t] = bins[t]


gallery.add(
    "counters that are not cleared", counters_bad, counters_good, 1, 64, integers(64, 8),
    "atomic of uninitialised shared memory: 'bins'[1] was never written, in block (0), thread 0",
    result=lambda a: np.full(8, 8, np.int32),
)  # fmt: skip


# The edge of a tile that only some threads fill.


@tw.gpu
def edges_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(34, tw.f32)
    t, i = tw.thread.x, tw.gpu_thread_id()
    tile[t + 1] = x[i]
    if t == 0 and i > 0:
        tile[0] = x[i - 1]
    if t == 31 and i < len(x) - 1:
        tile[33] = x[i + 1]
    tw.gpu_sync()
    y[i] = tile[t] + tile[t + 1] + tile[t + 2]  # fault


@tw.gpu
def edges_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(34, tw.f32)
    t, i = tw.thread.x, tw.gpu_thread_id()
    tile[t + 1] = x[i]
    if t == 0:
        tile[0] = x[i - 1] if i > 0 else 0.0
    if t == 31:
        tile[33] = x[i + 1] if i < len(x) - 1 else 0.0
    tw.gpu_sync()
    y[i] = tile[t] + tile[t + 1] + tile[t + 2]


gallery.add(
    "the edge of a tile at the end of the data", edges_bad, edges_good, 2, 32, floats(64, 64),
    "load of uninitialised shared memory: 'tile'[0] was never written, in block (0), thread 0",
    result=lambda a: np.convolve(a[0], np.ones(3, np.float32), "same").astype(np.float32),
)  # fmt: skip


# A result that only the first block has.


@tw.gpu
def first_block_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    scale = tw.shared(1, tw.f32)
    if tw.gpu_thread_id() == 0:
        scale[0] = 0.5
    tw.gpu_sync()
    y[tw.gpu_thread_id()] = scale[0] * x[tw.gpu_thread_id()]  # fault


@tw.gpu
def first_block_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    scale = tw.shared(1, tw.f32)
    if tw.thread.x == 0:
        scale[0] = 0.5
    tw.gpu_sync()
    y[tw.gpu_thread_id()] = scale[0] * x[tw.gpu_thread_id()]


gallery.add(
    "shared memory of another block", first_block_bad, first_block_good, 2, 32, floats(64, 64),
    "load of uninitialised shared memory: 'scale'[0] was never written, in block (1), thread 0",
    result=lambda a: np.float32(0.5) * a[0],
)  # fmt: skip
