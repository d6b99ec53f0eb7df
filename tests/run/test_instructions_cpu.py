"""Every instruction of explicit kernels on the CPU against the emulator; prints and assertions; what the CPU refuses."""

from __future__ import annotations

import numpy as np
import pytest

from instruction_kernels import Case, failing, instruction_cases, printing
from support import host_cpu
from tilewright.base.errors import DeviceError, TargetLimit
from tilewright.compile.build import build_artifact
from tilewright.compile.simt import prepare_simt
from tilewright.ir.nodes import walk
from tilewright.ir.ops import OPS
from tilewright.ir.types import Vec
from tilewright.runtime.cpu import program as cpu

CASES = instruction_cases()


def is_refused(one: Case) -> bool:
    """Whether a kernel has what only GPUs have: matrix units, copy engines and their barriers, clusters, one clock, 128 bits at once."""
    for op in walk(one.kernel.body):
        wide = op.opcode.startswith("atomic") and any(isinstance(v.type, Vec) for v in (*op.operands, *op.results))
        if OPS[op.opcode].group in ("matrix", "copy", "barrier") or op.opcode == "global_timer" or (wide and op.attrs.get("kind") != "add"):
            return True
    return False


def on_cpu(one: Case) -> dict[str, np.ndarray]:
    """The arrays after a run."""
    loaded = cpu.load(build_artifact(prepare_simt(one.program(), host_cpu()), host_cpu(), entry=False))
    arrays = {name: array.copy() for name, array in one.arrays.items()}
    loaded.run(arrays, {})
    return arrays


@pytest.mark.parametrize("one", [c for c in CASES if not is_refused(c)], ids=lambda c: c.name)
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


@pytest.mark.parametrize("one", [c for c in CASES if is_refused(c)], ids=lambda c: c.name)
def test_what_only_gpus_have_is_refused_by_name(one: Case) -> None:
    with pytest.raises(TargetLimit, match=f"is not available on {host_cpu().name}: only GPUs have it") as caught:
        prepare_simt(one.program(), host_cpu())
    assert any(f": {op.opcode}, " in str(caught.value) for op in walk(one.kernel.body))


def test_most_instructions_run() -> None:
    assert sum(not is_refused(c) for c in CASES) >= 31


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
