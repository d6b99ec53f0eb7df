"""Assertions of kernels on a GPU: what a user is told when one fails, and that the process goes on."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from instruction_kernels import THREADS, failing
from null_cuda import Fault
from null_cuda.install import installed
from tilewright.base.abi import ASSERT_BITS, ASSERT_MARK
from tilewright.base.errors import DeviceError
from tilewright.compile.build import build_artifact
from tilewright.runtime.cuda import device as cuda


def test_a_failed_assertion_is_told_with_its_text_and_thread() -> None:
    """A stand-in for the kernel reports and traps as the compiled one does."""
    with installed(mode="lazy") as driver:
        device = cuda.devices()[0]
        program = device.load(build_artifact(failing().program(), device.target))
        out = device.from_numpy(np.zeros(2 * THREADS, np.int32))

        def fail(table: int, grid: tuple[int, int, int]) -> None:
            (module,) = (h for h in driver.handles.values() if h.kind == "module" and "tilewright_watchdog" in h.ptx)
            word = ctypes.c_uint64.from_buffer(module.variables["tilewright_watchdog"]).value
            blocks, threads, *_ = ASSERT_BITS
            ctypes.c_uint64.from_address(word).value = ASSERT_MARK | 1 << (blocks + threads) | 7 << blocks | 1
            raise Fault(719)

        driver.kernels["tw_failing_0"] = fail
        program.run({"o": out}, {}, {})
        with pytest.raises(DeviceError) as caught:
            out.numpy()
        assert caught.value.code == "TW037"
        text = 'assertion failed: number != "71", in kernel tw_failing_0, block 1, thread 7, on cuda:0 (Fake GPU)'
        assert str(caught.value).startswith(f"error[TW037]: {text}")
        with pytest.raises(DeviceError, match=r"cuda:0 .* is lost to this process: an assertion failed: number"):
            out.numpy()
    assert driver.violations == []
