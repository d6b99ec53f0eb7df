"""What a user is told when there is no driver, no GPU or no more GPU, and that the process goes on and ends well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import tilewright as tw
from null_cuda import Fault, NullCuda
from null_cuda.install import installed
from tilewright.base.errors import DeviceError
from tilewright.execute.devices import find_device
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.cuda import driver as cuda_driver
from tilewright.runtime.cuda.device import CudaDevice
from tilewright.runtime.cuda.driver import Driver

TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    cuda._forget()
    yield
    cuda._forget()


# -- no device ------------------------------------------------------------------------------------------------------


def with_bindings(monkeypatch: pytest.MonkeyPatch, driver: object) -> None:
    package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    for name, module in {"cuda": package, "cuda.bindings": bindings, "cuda.bindings.driver": driver}.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]


def test_no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="device 'cuda' is not present: the CUDA bindings cannot be imported"):
        find_device("cuda")
    assert find_device("auto").kind == "cpu"


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    with_bindings(monkeypatch, SimpleNamespace(cuInit=missing))
    with pytest.raises(DeviceError, match="no NVIDIA driver was found: Failed to dlopen libcuda"):
        find_device("cuda:0")
    assert find_device("auto").kind == "cpu"


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with installed(count=0):
        assert cuda.unavailable_reason() == "the NVIDIA driver reports no device"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        cuda._forget()
        assert cuda.unavailable_reason() == "the NVIDIA driver reports no device: CUDA_VISIBLE_DEVICES is '7'"
        with pytest.raises(DeviceError, match="device 'cuda' is not present: the NVIDIA driver reports no device"):
            find_device("cuda")


def test_a_driver_that_does_not_start() -> None:
    driver = NullCuda()
    driver.fail["cuInit"] = 803
    with installed(driver):
        assert cuda.devices() == []
        assert re.match(r"the NVIDIA driver does not start: cuInit gave CUDA_ERROR_SYSTEM_DRIVER_MISMATCH \(803\)", cuda.unavailable_reason())


def test_a_gpu_that_is_not_there() -> None:
    with installed(count=2), pytest.raises(DeviceError, match="device 'cuda:2' is not present: this machine has 2"):
        find_device("cuda:2")


def test_an_old_driver() -> None:
    with installed(version=11040) as driver:
        with pytest.raises(DeviceError) as caught:
            find_device("cuda")
        assert caught.value.code == "TW030"
        assert str(caught.value) == (
            "error[TW030]: the NVIDIA driver is too old for cuda:0 (Fake GPU): code for it is PTX 8.0, which drivers take from CUDA 12.0 on, "
            "and this driver is of CUDA 11.4\nhelp: update the NVIDIA driver (nvidia-smi shows its version), or use device='cpu'"
        )
        assert [d.kind for d in tw.devices()] == ["cpu", "emulator"]
        assert driver.calls("cuDevicePrimaryCtxRetain") == []


def test_code_newer_than_the_driver() -> None:
    """As an artifact exported elsewhere may be."""
    from test_cuda_program import SCALE, replace

    device = CudaDevice(cuda_driver.Driver(started(NullCuda(version=12040))), 0)
    with pytest.raises(DeviceError, match=r"code for it is PTX 8\.7, which drivers take from CUDA 12\.8 on, and this driver is of CUDA 12\.4"):
        device.load(replace(SCALE, code=b"//\n.version 8.7\n.target sm_90a\n"))


def started(driver: NullCuda) -> NullCuda:
    driver.cuInit(0)
    return driver


@pytest.mark.parametrize(("mode", "words"), [(3, "'exclusive process', and another process uses it"), (2, "'prohibited': no process may use it"), (0, "busy or unavailable")])
def test_a_gpu_that_lets_nobody_in(mode: int, words: str) -> None:
    driver = NullCuda()
    driver.compute_mode = mode
    if not mode:
        driver.fail["cuDevicePrimaryCtxRetain"] = 46
    with installed(driver):
        for _ in range(2):
            with pytest.raises(DeviceError, match=words) as caught:
                tw.to_device(np.ones(3, np.float32), "cuda")
            assert caught.value.code == "TW030"
        driver.compute_mode = 0
        driver.fail.clear()
        assert tw.to_device(np.ones(3, np.float32), "cuda").shape == (3,)  # it was only busy


def test_functions_that_are_not_there() -> None:
    driver = started(NullCuda())
    with pytest.raises(DeviceError, match="the installed CUDA bindings have no cuNothing"):
        Driver(driver).call("cuNothing")

    def lacking() -> None:
        raise RuntimeError('Function "cuCtxSynchronize" not found')

    driver.cuCtxSynchronize = lacking
    with pytest.raises(DeviceError, match=r"the NVIDIA driver, of CUDA 13\.0, has no cuCtxSynchronize"):
        Driver(driver).call("cuCtxSynchronize")


# -- a device is lost -----------------------------------------------------------------------------------------------


def test_a_fault_is_reported_once_with_its_kernel_and_line() -> None:
    @tw.kernel
    def double(x: tw.Array) -> tw.Array:
        out = tw.empty(x.shape, x.dtype)
        for i in tw.grid(x.shape[0]):
            out[i] = 2.0 * x[i]
        return out

    def faulting(table: int, grid: tuple[int, int, int]) -> None:
        raise Fault(700)

    values = np.arange(4, dtype=np.float32)
    with installed(mode="lazy", count=2) as driver:
        driver.kernels["tw_double_0"] = faulting
        x = tw.to_device(values, "cuda")
        result = double(x)
        with pytest.raises(DeviceError) as caught:
            result.numpy()
        assert caught.value.code == "TW032"
        line = double.python.__code__.co_firstlineno + 3
        assert f"since the last synchronisation: tw_double_0 ({__file__}:{line}:" in str(caught.value)
        for use in (result.numpy, lambda: double(x), lambda: tw.to_device(values, "cuda"), lambda: double(values, device="cuda:0")):
            with pytest.raises(DeviceError) as caught:
                use()
            assert caught.value.code == "TW034"
            assert re.fullmatch(
                r"error\[TW034\]: cuda:0 \(Fake GPU\) is lost to this process: a fault of tw_double_0 \(.*\) ended its context\n"
                r"help: use device='cpu', or restart the process; the first error says more",
                str(caught.value),
            )
        np.testing.assert_array_equal(double(values), 2 * values)
        driver.kernels.clear()
        np.testing.assert_array_equal(double(tw.to_device(values, "cuda:1")).numpy(), 2 * values)
        assert find_device("auto").id == "cuda:1"
        result.free()
    assert driver.violations == []


def test_a_wild_index_is_a_fault_of_its_kernel() -> None:
    """And kernels whose results were read are not under suspicion."""

    @tw.kernel
    def gather(x: tw.Array, index: tw.Array) -> tw.Array:
        out = tw.empty(index.shape, x.dtype)
        for i in tw.grid(index.shape[0]):
            out[i] = x[index[i]]
        return out

    @tw.kernel
    def double(x: tw.Array) -> tw.Array:
        out = tw.empty(x.shape, x.dtype)
        for i in tw.grid(x.shape[0]):
            out[i] = 2.0 * x[i]
        return out

    with installed(mode="lazy") as driver:
        x = tw.to_device(np.arange(8, dtype=np.float32), "cuda")
        right, wrong = (tw.to_device(np.full(4, at, np.int64), "cuda") for at in (3, 1 << 40))
        np.testing.assert_array_equal(gather(x, right).numpy(), np.full(4, 3, np.float32))
        double(x).numpy()
        with pytest.raises(DeviceError) as caught:
            gather(x, wrong).numpy()
        assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in str(caught.value)
        assert "since the last synchronisation: tw_gather_0 (" in str(caught.value)
        assert "tw_double_0" not in str(caught.value)
        (found,) = driver.kernel_errors
        assert "error[TW050]" in str(found)


def test_a_fault_of_another_library() -> None:
    with installed() as driver:
        device = cuda.devices()[0]
        device.synchronize()
        driver.contexts[0xC0].error = 719
        with pytest.raises(DeviceError, match=r"LAUNCH_FAILED \(719\).*: none by Tilewright"):
            device.synchronize()
        with pytest.raises(DeviceError, match="a fault of another library ended its context"):
            device.synchronize()


# -- processes ------------------------------------------------------------------------------------------------------

HEAD = """
import sys, os, gc
sys.path.insert(0, {tests!r})
import numpy as np
from null_cuda import Fault, NullCuda
from null_cuda.install import install
import tilewright as tw
from tilewright.base.errors import DeviceError
from tilewright.runtime.cuda import device as cuda

@tw.kernel
def double(x: tw.Array) -> tw.Array:
    out = tw.empty(x.shape, x.dtype)
    for i in tw.grid(x.shape[0]):
        out[i] = 2.0 * x[i]
    return out

values = np.arange(8, dtype=np.float32)
"""


def in_child(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "child.py"
    script.write_text(HEAD.format(tests=str(TESTS)) + textwrap.dedent(body))
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "TILEWRIGHT_CACHE_DIR": str(tmp_path / "cache")}
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False, env=environment)


def test_a_forked_child_is_told_so_and_uses_the_cpu(tmp_path: Path) -> None:
    done = in_child(tmp_path, """
        driver = install()
        x = tw.to_device(values, "cuda")
        y = double(x)
        double(values)
        sys.stdout.flush()
        if os.fork() == 0:
            for use in (lambda: double(x), y.numpy, lambda: tw.to_device(values, "cuda"), lambda: cuda.devices()[0]):
                try:
                    use()
                    print("no error")
                except DeviceError as error:
                    print(str(error).replace(str(os.getpid()), "PID").splitlines()[0])
                except IndexError:
                    print(cuda.unavailable_reason().replace(str(os.getpid()), "PID"))
            print(double(values).sum())
            del x, y
            gc.collect()
            sys.stdout.flush()
            os._exit(0)
        print("child", os.wait()[1], double(x).numpy().sum(), driver.violations)
    """)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    place = "cannot be used in process PID, which was forked from one that used CUDA"
    assert all(line.startswith("error[TW030]: ") and line.endswith(place) for line in lines[:3])
    assert lines[1] == f"error[TW030]: cuda:0 (Fake GPU) {place}"
    assert lines[2] == f"error[TW030]: device 'cuda' is not present: CUDA {place}"
    assert lines[3:] == [f"CUDA {place}", "56.0", "child 0 56.0 []"]
    assert done.stderr == ""


@pytest.mark.parametrize("mode", ["eager", "lazy", "background"])
def test_exit_with_everything_alive(tmp_path: Path, mode: str) -> None:
    done = in_child(tmp_path, f"""
        driver = install(mode={mode!r}, count=2)
        x, y = tw.to_device(values, "cuda"), tw.to_device(values, "cuda:1")
        kept = [double(x), double(y), x[2:5], x.__dlpack__()]
        device = cuda.devices()[0]
        stream = device.create_stream()
        kept += [device.from_numpy(values, stream=stream), double(x)]
        cycle = [x]; cycle.append(cycle)
        own = tw.Stream("cuda")
        with own:
            kept += [double(x), own.record()]
        with tw.capture("cuda") as graph:
            kept.append(double(x))
        graph.replay()
        kept += [graph, double(x, asynchronous=True), double(values, asynchronous=True)]
        kernel = double
        print("end")
    """)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_exit_after_a_fault(tmp_path: Path) -> None:
    done = in_child(tmp_path, """
        driver = install(mode="lazy")
        def faulting(table, grid):
            raise Fault(700)
        driver.kernels["tw_double_0"] = faulting
        x = tw.to_device(values, "cuda")
        y = double(x)
        stream = cuda.devices()[0].create_stream()
        try:
            y.numpy()
        except DeviceError as error:
            print(error.code)
        del y
        gc.collect()
        print(double(values).sum(), double(values, device="auto").sum())
    """)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "TW032\n56.0 56.0\n", "")


def test_exit_with_an_uncaught_fault_shows_one_error(tmp_path: Path) -> None:
    done = in_child(tmp_path, """
        driver = install(mode="lazy")
        def faulting(table, grid):
            raise Fault(700)
        driver.kernels["tw_double_0"] = faulting
        print(double(tw.to_device(values, "cuda")).numpy())
    """)  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("error[TW032]") == 1
    assert "tw_double_0 (" in done.stderr


