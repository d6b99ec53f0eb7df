"""Every instruction of explicit kernels on the CPU against the emulator; prints and assertions; what the CPU refuses."""

from __future__ import annotations

import numpy as np
import pytest

from instruction_kernels import Case, failing, instruction_cases, printing
from support import host_cpu
from tilewright.base.errors import DeviceError, TargetLimit
from tilewright.compile.build import build_artifact
from tilewright.compile.simt import prepare_simt
from tilewright.runtime import cpu

WIDE = frozenset({"atomic_wide_global", "atomic_wide_shared", "atomic_accesses_global", "atomic_accesses_shared", "message_2"})
"""Cases with atomic accesses of 128 bits."""
TIMES = frozenset({"clocks"})
GPU_ONLY = {"bulk_copies": "mbarrier_init", "clusters": "cluster_", "copies_with_hints": "copy_async", "mma_f8e4m3": "mma", "mma_f8e5m2": "mma"}
"""Cases of what only GPUs have: what the error names."""


def on_cpu(one: Case) -> dict[str, np.ndarray]:
    """The arrays after a run."""
    loaded = cpu.load(build_artifact(prepare_simt(one.program(), host_cpu()), host_cpu(), entry=False))
    arrays = {name: array.copy() for name, array in one.arrays.items()}
    loaded.run(arrays, {})
    return arrays


@pytest.mark.parametrize("one", [c for c in instruction_cases() if c.name not in WIDE | TIMES | GPU_ONLY.keys()], ids=lambda c: c.name)
def test_instructions(one: Case) -> None:
    found = on_cpu(one)
    for name, wanted in one.emulate().items():
        given = found[name]
        if name in one.ulp:
            unit = float(np.spacing(np.ones((), wanted.dtype)))
            np.testing.assert_allclose(given, wanted, rtol=one.ulp[name] * unit, atol=one.ulp[name] * unit)
        elif wanted.dtype.kind in "fV":
            np.testing.assert_array_equal(given.astype(np.float64), wanted.astype(np.float64), name)
        else:
            np.testing.assert_array_equal(given, wanted, name)


@pytest.mark.parametrize("one", [c for c in instruction_cases() if c.name in WIDE], ids=lambda c: c.name)
def test_wide_atomics_are_refused(one: Case) -> None:
    with pytest.raises(TargetLimit, match="of several numbers at once has no counterpart on a CPU"):
        prepare_simt(one.program(), host_cpu())


@pytest.mark.parametrize("one", [c for c in instruction_cases() if c.name in GPU_ONLY], ids=lambda c: c.name)
def test_what_only_gpus_have_is_refused(one: Case) -> None:
    with pytest.raises(TargetLimit, match=rf"{GPU_ONLY[one.name]}\w* is a construct of GPUs that the CPU has no counterpart for"):
        prepare_simt(one.program(), host_cpu())


def test_the_clock_of_all_multiprocessors_is_refused() -> None:
    (one,) = (c for c in instruction_cases() if c.name in TIMES)
    with pytest.raises(TargetLimit, match="global_timer"):
        prepare_simt(one.program(), host_cpu())


def test_prints_come_in_the_order_of_threads(capfd: pytest.CaptureFixture[str]) -> None:
    one = printing()
    on_cpu(one)
    found = capfd.readouterr().out
    one.emulate()
    assert sorted(found.splitlines()) == sorted(capfd.readouterr().out.splitlines())
    assert found


def test_a_failed_assertion_says_where() -> None:
    with pytest.raises(DeviceError, match=r"assertion failed.*: number != \"71\", in kernel tw_failing_0, block 1, thread 7, on cpu") as caught:
        on_cpu(failing())
    assert caught.value.code == "TW037"
