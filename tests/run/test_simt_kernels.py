"""Explicit kernels against NumPy: every construct on the emulator, and its PTX through NVIDIA's assembler."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from assembled import assemble
from null_cuda.install import installed
from simt_constructs import CASES, check


@pytest.mark.parametrize("name", CASES)
def test_emulated(name: str) -> None:
    kernel, launch, arguments, _ = CASES[name]
    given = arguments()
    kernel[launch](*given, device="emulator")
    check(name, given)


@pytest.mark.parametrize("name", CASES)
def test_on_a_cpu(name: str) -> None:
    kernel, launch, arguments, _ = CASES[name]
    given = arguments()
    kernel[launch](*given, device="cpu")
    check(name, given)


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_assembled(name: str, target: str) -> None:
    kernel, launch, arguments, _ = CASES[name]
    artifact = kernel[launch].compile(*arguments(), target=target)
    done = assemble(artifact.code.decode(), target)
    assert not done.spills and len(done.registers) == 1


def test_on_null_gpu() -> None:
    @tw.gpu
    def scale(a: tw.f32, x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
        y[tw.gpu_thread_id()] = a * x[tw.gpu_thread_id()]

    with installed() as driver:
        x, y = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
        tw.gpu_launch(scale, 1000, 128, 2.0, x, y)
        assert np.array_equal(y, 2 * x)
        own, out = tw.to_device(x, "cuda"), tw.to_device(y, "cuda")
        scale[10, 100](3.0, own, out)
        assert np.array_equal(out.numpy(), 3 * x)
        scale[10, 100](2.0, out, out)
        assert np.array_equal(out.numpy(), 6 * x)
        assert driver.programs.launched == ["tw_scale_0"] * 3
    assert not driver.violations
