"""Lanes of a warp that read from lanes which are not there."""

from __future__ import annotations

import numpy as np

import tilewright as tw
from simt_gallery.cases import Gallery, floats

gallery = Gallery()


# A shuffle in a condition.


@tw.gpu
def half_warp_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    t = tw.thread.x
    value = x[t]
    if t < 16:
        value += tw.shuffle_xor(value, 16)  # fault
    y[t] = value


@tw.gpu
def half_warp_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    t = tw.thread.x
    value = x[t]
    other = tw.shuffle_xor(value, 16)
    if t < 16:
        value += other
    y[t] = value


gallery.add(
    "a shuffle in a condition", half_warp_bad, half_warp_good, 1, 32, floats(32, 32),
    "shuffle reads lane 16 of its warp, which is not active, in block (0), thread 0",
    result=lambda a: np.concatenate([a[0][:16] + a[0][16:], a[0][16:]]),
)  # fmt: skip


# A block that does not fill its last warp.


@tw.gpu
def last_warp_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    t = tw.thread.x
    y[t] = tw.shuffle_down(x[t], 1)  # fault


@tw.gpu
def last_warp_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    t = tw.thread.x
    y[t] = tw.shuffle_down(x[t], 1, width=8)


gallery.add(
    "a warp that is not full", last_warp_bad, last_warp_good, 1, 40, floats(40, 40),
    "shuffle reads lane 8 of its warp, which is not active, in block (0), thread 39",
    result=lambda a: np.take_along_axis(a[0].reshape(5, 8), np.minimum(np.arange(8) + 1, 7)[None], 1).reshape(-1),
)  # fmt: skip


# Sums by shuffles after some lanes have left.


@tw.gpu
def left_bad(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    if i >= len(x):
        return
    total = x[i]
    for k in tw.unrolled(range(5)):
        total += tw.shuffle_xor(total, 16 >> k)  # fault
    if i % 32 == 0:
        y[i // 32] = total


@tw.gpu
def left_good(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    total = x[i] if i < len(x) else 0.0
    for k in tw.unrolled(range(5)):
        total += tw.shuffle_xor(total, 16 >> k)
    if i % 32 == 0 and i < len(x):
        y[i // 32] = total


gallery.add(
    "a sum by shuffles without all lanes", left_bad, left_good, 1, 64, floats(50, 2),
    "shuffle reads lane 18 of its warp, which is not active, in block (0), thread 34",
    result=lambda a: np.asarray([a[0][:32].sum(), a[0][32:].sum()]),
)  # fmt: skip


# The lane a value comes from is computed from data, and is another one's.


@tw.gpu
def picked_bad(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    t = tw.thread.x
    if x[t] % 2 == 0:
        y[t] = tw.shuffle(x[t], 31 - t)  # fault


@tw.gpu
def picked_good(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    t = tw.thread.x
    other = tw.shuffle(x[t], 31 - t)
    if x[t] % 2 == 0:
        y[t] = other


gallery.add(
    "a lane that is elsewhere", picked_bad, picked_good, 1, 32,
    lambda: [np.arange(32, dtype=np.int32), np.full(32, -1, np.int32)],
    "shuffle reads lane 31 of its warp, which is not active, in block (0), thread 0",
    result=lambda a: np.where(np.arange(32) % 2 == 0, 31 - np.arange(32), -1).astype(np.int32),
)  # fmt: skip
