"""Accesses out of bounds."""

from __future__ import annotations

import numpy as np

import tilewright as tw
from simt_gallery.cases import Arrays, Gallery, floats, integers

gallery = Gallery()


# A grid that is larger than the array.


@tw.gpu
def scale_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    y[i] = 2.0 * x[i]  # fault


@tw.gpu
def scale_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    if i < len(x):
        y[i] = 2.0 * x[i]


gallery.add(
    "no guard at the end", scale_bad, scale_good, 4, 32, floats(100, 100),
    "load of 'x' at [100] is out of bounds: index 100, extent 100, in block (3), thread 4",
    result=lambda a: 2 * a[0], tool="memcheck",
)  # fmt: skip


# A guard that lets one thread too many through.


@tw.gpu
def guard_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32], n: tw.i32):
    i = tw.gpu_thread_id()
    if i <= n:
        y[i] = x[0] + i  # fault


@tw.gpu
def guard_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32], n: tw.i32):
    i = tw.gpu_thread_id()
    if i < n:
        y[i] = x[0] + i


gallery.add(
    "one thread too many", guard_bad, guard_good, 2, 64, floats(100, 100),
    "store of 'y' at [100] is out of bounds: index 100, extent 100, in block (1), thread 36",
    result=lambda a: a[0][0] + np.arange(100, dtype=np.float32), numbers=(100,), tool="memcheck",
)  # fmt: skip


# A stencil without a border on the left.


@tw.gpu
def difference_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    y[i] = x[i] - x[i - 1]  # fault


@tw.gpu
def difference_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    left = x[i - 1] if i > 0 else 0.0
    y[i] = x[i] - left


gallery.add(
    "left of the first element", difference_bad, difference_good, 2, 32, floats(64, 64),
    "load of 'x' at [-1] is out of bounds: index -1, extent 64, in block (0), thread 0",
    result=lambda a: np.ones(64, np.float32), tool="memcheck",
)  # fmt: skip


# Rows and columns exchanged.


@tw.gpu
def rows_bad(x: tw.Array, y: tw.Array):
    i, j = tw.grid.x, tw.grid.y
    y[i, j] = x[i, j]  # fault


@tw.gpu
def rows_good(x: tw.Array, y: tw.Array):
    i, j = tw.grid.x, tw.grid.y
    y[j, i] = x[j, i]


gallery.add(
    "rows and columns exchanged", rows_bad, rows_good, (4, 2), (8, 4),
    lambda: [np.arange(256, dtype=np.float32).reshape(8, 32), np.zeros((8, 32), np.float32)],
    "load of 'x' at [8, 0] is out of bounds: index 8 (axis 0), extent 8, in block (1, 0), thread (0, 0)",
    result=lambda a: a[0], tool="memcheck",
)  # fmt: skip


# A shared array that forgets its halo.


@tw.gpu
def halo_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(64, tw.f32)
    t, i = tw.thread.x, tw.gpu_thread_id()
    tile[t + 1] = x[i]  # fault
    if t == 0:
        tile[0] = x[max(i - 1, 0)]
    tw.gpu_sync()
    y[i] = tile[t + 1] - tile[t]


@tw.gpu
def halo_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(65, tw.f32)
    t, i = tw.thread.x, tw.gpu_thread_id()
    tile[t + 1] = x[i]
    if t == 0:
        tile[0] = x[max(i - 1, 0)]
    tw.gpu_sync()
    y[i] = tile[t + 1] - tile[t]


gallery.add(
    "a shared array without its halo", halo_bad, halo_good, 2, 64, floats(128, 128),
    "store of 'tile' at [64] is out of bounds: index 64, extent 64, in block (0), thread 63",
    result=lambda a: np.diff(a[0], prepend=a[0][:1]), tool="memcheck",
)  # fmt: skip


# A local array with one element too few.


@tw.gpu
def digits_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    digits = tw.local(3, tw.i32)
    rest, count = x[i], 0
    while rest > 0:
        digits[count] = rest % 10  # fault
        rest = rest // 10
        count += 1
    for k in range(count):
        y[i] += digits[k]


@tw.gpu
def digits_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    digits = tw.local(10, tw.i32)
    rest, count = x[i], 0
    while rest > 0:
        digits[count] = rest % 10
        rest = rest // 10
        count += 1
    for k in range(count):
        y[i] += digits[k]


def _numbers() -> Arrays:
    return [np.arange(40, 40 + 32 * 40, 40, dtype=np.int32), np.zeros(32, np.int32)]


gallery.add(
    "a local array that is too short", digits_bad, digits_good, 1, 32, _numbers,
    "store of 'digits' at [3] is out of bounds: index 3, extent 3, in block (0), thread 24",
    result=lambda a: np.asarray([sum(map(int, str(v))) for v in a[0]], np.int32),
)  # fmt: skip


# A histogram with a value that has no bin.


@tw.gpu
def bins_bad(x: tw.GpuBuffer[tw.i32], bins: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    tw.atomic_add(bins, x[i] // 10, 1)  # fault


@tw.gpu
def bins_good(x: tw.GpuBuffer[tw.i32], bins: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    tw.atomic_add(bins, min(x[i] // 10, len(bins) - 1), 1)


gallery.add(
    "a value without a bin", bins_bad, bins_good, 1, 64, integers(64, 6),
    "atomic of 'bins' at [6] is out of bounds: index 6, extent 6, in block (0), thread 59",
    result=lambda a: np.bincount(np.minimum(a[0] // 10, 5), minlength=6).astype(np.int32), tool="memcheck",
)  # fmt: skip


# A loop with a stride over the grid that is unrolled by hand.


@tw.gpu
def pairs_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    for i in range(2 * tw.gpu_thread_id(), len(x), 2 * tw.block.size.x * tw.grid.size.x):
        y[i // 2] = x[i] + x[i + 1]  # fault


@tw.gpu
def pairs_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    for i in range(2 * tw.gpu_thread_id(), len(x), 2 * tw.block.size.x * tw.grid.size.x):
        second = x[i + 1] if i + 1 < len(x) else 0.0
        y[i // 2] = x[i] + second


gallery.add(
    "the partner of the last element", pairs_bad, pairs_good, 2, 32, floats(201, 101),
    "load of 'x' at [201] is out of bounds: index 201, extent 201, in block (1), thread 4",
    result=lambda a: np.append(a[0], np.float32(0)).reshape(-1, 2).sum(axis=1, dtype=np.float32), tool="memcheck",
)  # fmt: skip


# Dynamic shared memory that the launch makes too small.


@tw.gpu
def mirrored_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    part = tw.shared_dynamic(tw.f32)
    t = tw.thread.x
    part[2 * t] = x[tw.gpu_thread_id()]  # fault
    tw.gpu_sync()
    y[tw.gpu_thread_id()] = part[2 * (tw.block.size.x - 1 - t)]


@tw.gpu
def mirrored_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    part = tw.shared_dynamic(tw.f32)
    t = tw.thread.x
    part[t] = x[tw.gpu_thread_id()]
    tw.gpu_sync()
    y[tw.gpu_thread_id()] = part[tw.block.size.x - 1 - t]


gallery.add(
    "dynamic shared memory that is too small", mirrored_bad, mirrored_good, 2, 64, floats(128, 128),
    "store of 'part' at [64] is out of bounds: index 64, extent 64, in block (0), thread 32",
    result=lambda a: a[0].reshape(2, 64)[:, ::-1].reshape(-1), shared=256, tool="memcheck",
)  # fmt: skip
