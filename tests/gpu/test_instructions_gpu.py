"""Every instruction of explicit kernels on a real GPU, against the emulator. Skipped without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from instruction_kernels import Case, instruction_cases
from kernels_instructions import CASES as PYTHON
from tilewright.compile.build import build_artifact
from tilewright.runtime import cuda
from tilewright.runtime.cuda import CudaDevice

pytestmark = pytest.mark.requires("cuda")
CASES = {case.name: case for case in instruction_cases()}


@pytest.fixture
def gpu() -> CudaDevice:
    return cuda.devices()[0]


def on_gpu(gpu: CudaDevice, case: Case) -> dict[str, np.ndarray]:
    """The arrays after a run."""
    program = gpu.load(build_artifact(case.program(), gpu.target))
    arrays = {name: gpu.from_numpy(array) for name, array in case.arrays.items()}
    program.run(arrays, {}, {})
    return {name: array.numpy() for name, array in arrays.items()}


def compare(case: Case, found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for name, array in wanted.items():
        got = found[name]
        if name in case.ulp:
            np.testing.assert_allclose(got, array, atol=case.ulp[name] * 2.0**-23, rtol=case.ulp[name] * 2.0**-23, err_msg=name)
        elif array.dtype.kind in "iub":
            np.testing.assert_array_equal(got, array, err_msg=name)
        else:
            # Bits, but for those of NaN.
            size = f"u{array.dtype.itemsize}"
            nan = np.isnan(array.astype(np.float64))
            np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), nan, err_msg=name)
            np.testing.assert_array_equal(got.view(size)[~nan], array.view(size)[~nan], err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_gpu_and_emulator_agree(gpu: CudaDevice, name: str) -> None:
    case = CASES[name]
    if gpu.target.sm < case.sm:
        pytest.skip(f"needs sm_{case.sm}")
    compare(case, on_gpu(gpu, case), case.emulate())


@pytest.mark.parametrize("name", PYTHON)
def test_words_of_python(gpu: CudaDevice, name: str) -> None:
    case = PYTHON[name]
    if gpu.target.sm < case.sm:
        pytest.skip(f"needs sm_{case.sm}")
    assert case.check is not None
    case.check(case.make(), case.run("cuda"))


CHILD = """
import sys
sys.path.insert(0, {tests!r})
from instruction_kernels import {name}
from tilewright.compile.build import build_artifact
from tilewright.base.errors import DeviceError
from tilewright.runtime import cuda
gpu = cuda.devices()[0]
case = {name}()
program = gpu.load(build_artifact(case.program(), gpu.target))
arrays = {{name: gpu.from_numpy(array) for name, array in case.arrays.items()}}
try:
    program.run(arrays, {{}}, {{}})
    gpu.synchronize()
except DeviceError as error:
    print(str(error).splitlines()[0])
"""


def child(name: str) -> list[str]:
    """What a process of its own writes that runs the case: a failed assertion ends the context."""
    text = CHILD.format(tests=str(Path(__file__).parents[1]), name=name)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_prints_reach_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    CASES["printing"].emulate()
    wanted = capsys.readouterr().out.splitlines()
    assert sorted(child("printing")) == sorted(wanted)


def test_a_failed_assertion_is_told_with_text_and_thread() -> None:
    (line,) = child("failing")
    assert line.startswith('error[TW037]: assertion failed: number != "71", in kernel tw_failing_0, block 1, thread 7, on cuda:0')
