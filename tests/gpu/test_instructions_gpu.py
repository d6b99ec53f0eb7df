"""Every instruction of explicit kernels on a real GPU, against the emulator. Skipped without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from instruction_kernels import Case, instruction_cases
from kernels_instructions import CASES as PYTHON
from tilewright.compile.build import build_artifact
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.cuda.device import CudaDevice

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


# -- many threads at once -----------------------------------------------------------------------------------------------


@tw.gpu
def crowd(
    x: tw.GpuBuffer[tw.f32], o: tw.GpuBuffer[tw.f32], d: tw.GpuBuffer[tw.f64], h: tw.GpuBuffer[tw.f16], u: tw.GpuBuffer[tw.u64]
):
    """All threads want the same few elements, by instructions and by loops around compare-and-swap."""
    v = x[tw.gpu_thread_id()]
    tw.atomic_max(o, 0, v)
    tw.atomic_min(o, 1, v)
    tw.atomic_max(d, 0, tw.f64(v))
    tw.atomic_max(h, 0, tw.f16(v))
    tw.atomic_inc(u, 0, 1000)
    tw.atomic_add(u, 1, 3, scope="system", order="acq_rel")


@tw.gpu
def chain(flags: tw.GpuBuffer[tw.u32], data: tw.GpuBuffer[tw.i64]):
    """Each block waits for the one before it, and hands on what it got and its own number."""
    got = tw.shared(1, tw.i64)
    b = tw.block.x
    if tw.thread.x == 0:
        before = tw.i64(0)
        if b > 0:
            while tw.atomic_load(flags, b - 1, order="acquire") == 0:
                tw.nanosleep(20)
            before = data[b - 1]
        got[0] = before
    tw.gpu_sync()
    if tw.thread.x == 64:
        data[b] = got[0] + b
    tw.gpu_sync()
    if tw.thread.x == 0:
        tw.fence()
        tw.atomic_store(flags, b, 1, order="release")


@tw.gpu
def pairs(words: tw.GpuBuffer[tw.u64], torn: tw.GpuBuffer[tw.i32]):
    """Both halves of 128 bits are always of one store."""
    i = tw.gpu_thread_id()
    for k in range(50):
        a, b = tw.atomic_load(words, 0, width=2)
        if a != b:
            torn[0] = 1
        own = tw.u64(i * 1000 + k)
        tw.atomic_store(words, 0, (own, own))


def test_a_crowd_gets_through() -> None:
    n = 1 << 14
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    o, d, h, u = np.zeros(2, np.float32), np.zeros(1), np.zeros(1, np.float16), np.zeros(2, np.uint64)
    crowd[n // 256, 256](x, o, d, h, u, device="cuda")
    assert o.tolist() == [x.max(), x.min()]
    assert d[0] == x.max()
    assert h[0] == np.float16(x.max())
    assert u.tolist() == [n % 1001, 3 * n]


def test_a_long_chain_of_blocks() -> None:
    blocks = 2000
    flags, data = np.zeros(blocks, np.uint32), np.zeros(blocks, np.int64)
    chain[blocks, 128](flags, data, device="cuda")
    np.testing.assert_array_equal(data, np.cumsum(np.arange(blocks)))


def test_128_bits_are_never_torn(gpu: CudaDevice) -> None:
    words, torn = np.zeros(2, np.uint64), np.zeros(1, np.int32)
    pairs[64, 64](words, torn, device="cuda")
    assert torn[0] == 0
    assert words[0] == words[1]


CHILD = """
import sys
sys.path.insert(0, {tests!r})
from instruction_kernels import {name}
from tilewright.compile.build import build_artifact
from tilewright.base.errors import DeviceError
from tilewright.runtime.cuda import device as cuda
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
