"""Explicit kernels on the emulator: what is right stays unreported, output comes in order, and blocks are quick."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw


@tw.gpu
def locked(y: tw.GpuBuffer[tw.i32]):
    while tw.atomic_cas(y, 0, 0, 1) != 0:
        pass
    y[1] += 1
    tw.fence()
    tw.atomic_exchange(y, 0, 0)


def test_threads_of_a_warp_can_take_turns_at_a_lock() -> None:
    y = np.zeros(2, np.int32)
    locked[2, 16](y, device="emulator")
    assert y.tolist() == [0, 32]


@tw.gpu
def unlocked(y: tw.GpuBuffer[tw.i32]):
    while tw.atomic_cas(y, 0, 0, 1) != 0:
        pass
    y[1] += 1
    tw.atomic_exchange(y, 0, 0)


def test_a_lock_without_a_fence_is_a_race() -> None:
    with pytest.raises(tw.UserError, match=r"race on global memory: load of 'y'\[1\], which (block \(\d\), )?thread \d+ stores at"):
        unlocked[2, 16](np.zeros(2, np.int32), device="emulator")


@tw.gpu
def telling(x: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    if i % 20 == 3:
        print("thread", i, "has", x[i])


def test_prints_come_in_the_order_of_threads(capfd: pytest.CaptureFixture[str]) -> None:
    telling[2, 64](np.arange(128, dtype=np.int32) * 2, device="emulator")
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["3", "23", "43", "63", "83", "103", "123"]
    assert lines[1] == "thread 23 has 46"


@tw.gpu
def squares(x: tw.Array, y: tw.Array):
    i, j = tw.grid.y, tw.grid.x
    y[i, j + 1] = x[i, j] * x[i, j]


def test_threads_of_two_axes_are_named_by_both() -> None:
    x, y = np.ones((8, 16), np.float32), np.zeros((8, 16), np.float32)
    wanted = r"store of 'y' at \[0, 16\] is out of bounds: index 16 \(axis 1\), extent 16, in block \(1, 0\), thread \(7, 0\)"
    with pytest.raises(tw.UserError, match=wanted):
        squares[(2, 2), (8, 4)](x, y, device="emulator")


@tw.gpu(check=True)
def checked(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    assert x[i] >= 0
    y[x[i]] = i


def test_checks_on_the_cpu_leave_the_rest_alone() -> None:
    x, y = np.arange(64, dtype=np.int32)[::-1].copy(), np.full(64, -1, np.int32)
    checked[2, 32](x, y, device="cpu")
    assert (y == x).all()
    x[5] = 64
    y[:] = -1
    with pytest.raises(tw.UserError, match=r"store of 'y' at \[64\] is out of bounds: index 64, extent 64, in block \(0\), thread 5"):
        checked[2, 32](x, y, device="cpu")
    assert (np.sort(y)[1:] == np.delete(np.arange(64), 5)).all(), "what was inside was done"
    x[5] = -3
    with pytest.raises(tw.UserError, match=r"assertion failed: x\[i\] >= 0, in block \(0\), thread 5"):
        checked[2, 32](x, y, device="cpu")
    with pytest.raises(tw.UserError, match="check is 1"):
        checked[2, 32](x, y, check=1)


@tw.gpu(cluster=2)
def exchanged(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32], ready: tw.bool_):
    tile = tw.shared(64, tw.f32)
    t, i = tw.thread.x, tw.gpu_thread_id()
    tile[t] = x[i]
    if ready:
        tw.cluster_sync()
    y[i] = tw.load_remote(tile, 63 - t, 1 - tw.cluster.rank)
    tw.cluster_sync()


def test_blocks_of_a_cluster_meet() -> None:
    x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    exchanged[4, 64](x, y, True, device="emulator")
    np.testing.assert_array_equal(y.reshape(2, 2, 64), x.reshape(2, 2, 64)[:, ::-1, ::-1])
    with pytest.raises(tw.UserError, match=r"uninitialised shared memory|race on shared memory"):
        exchanged[4, 64](x, y, False, device="emulator")
