"""Launches of explicit kernels on the CPU: overlapping arrays, parts of its cores, what is refused, what is kept."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import DeviceError, UserError


@tw.gpu
def shifted(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    v = x[0]
    y[i] = x[i] + 1.0
    if x[0] != v:
        y[i] = 100.0


@tw.gpu
def halved(x: tw.Array):
    i = tw.gpu_thread_id()
    x[i] = x[i] * 0.5


def test_arrays_that_overlap_are_read_again() -> None:
    """Thread 0 changes what it has read, through another parameter."""
    memory = np.arange(64, dtype=np.float32)
    shifted[1, 64](memory, memory.copy(), device="cpu")
    np.testing.assert_array_equal(memory, np.arange(64))
    shifted[1, 1](memory, memory, device="cpu")
    assert memory[0] == 100.0
    apart, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    shifted[1, 64](apart, out, device="cpu")
    np.testing.assert_array_equal(out, apart + 1)


def test_strided_arrays_and_tensors_are_written_in_place() -> None:
    torch = pytest.importorskip("torch")
    base = np.arange(128, dtype=np.float32)
    halved[2, 32](base[::2], device="cpu")
    wanted = np.arange(128, dtype=np.float32)
    wanted[::2] /= 2
    np.testing.assert_array_equal(base, wanted)
    tensor = torch.arange(64, dtype=torch.float32)
    halved[2, 32](tensor, device="cpu")
    np.testing.assert_array_equal(tensor.numpy(), np.arange(64) / 2)


def test_a_part_of_the_cores() -> None:
    x = np.ones(4096, np.float32)
    name = tw.cpu_partitions(1)[0].id
    halved[64, 64](x, device=name)
    assert (x == 0.5).all()


def test_an_empty_grid_does_nothing() -> None:
    x = np.ones(64, np.float32)
    halved[0, 64](x, device="cpu")
    assert (x == 1.0).all()


def test_read_only_arrays_are_refused() -> None:
    x = np.ones(64, np.float32)
    x.flags.writeable = False
    with pytest.raises(UserError, match="'x' is read-only, but halved writes to it"):
        halved[1, 64](x, device="cpu")
    assert (x == 1.0).all()


def test_launches_are_looked_up() -> None:
    x = np.ones(64, np.float32)
    for _ in range(3):
        halved[1, 64](x, device="cpu")
    before = len(halved.runner.launches["cpu"].programs)
    halved[1, 64](x, device="cpu")
    assert len(halved.runner.launches["cpu"].programs) == before
    halved[4, 16](x, device="cpu")
    assert len(halved.runner.launches["cpu"].programs) == before + 1
    artifact = halved.last
    assert artifact is not None and artifact.kind == "object" and artifact.launches[0].threads == 1


@tw.gpu
def guarded(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    assert x[i] >= 0, "no negative numbers"
    y[i] = tw.sqrt(x[i])


def test_an_assertion_names_its_line_and_thread() -> None:
    x, y = np.ones(256, np.float32), np.zeros(256, np.float32)
    guarded[4, 64](x, y, device="cpu")
    assert (y == 1.0).all()
    x[77] = -1.0
    with pytest.raises(DeviceError, match=r"test_simt_cpu.py:\d+:\d+: .*no negative numbers.*, in kernel tw_guarded_0, block 1, thread 13, on cpu"):
        guarded[4, 64](x, y, device="cpu")
    x[77] = 4.0
    guarded[4, 64](x, y, device="cpu")
    assert y[77] == 2.0


@tw.gpu
def told(x: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    if x[i] > 2:
        print("thread", i, "has", x[i])


def test_prints(capfd: pytest.CaptureFixture[str]) -> None:
    told[1, 32](np.arange(32, dtype=np.int32) % 5, device="cpu")
    assert capfd.readouterr().out.splitlines() == [f"thread {i} has {i % 5}" for i in range(32) if i % 5 > 2]
