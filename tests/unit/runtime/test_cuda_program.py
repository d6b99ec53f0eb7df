"""Finding devices, loading and launching programs, and their errors, on a fake driver."""

from __future__ import annotations

import ctypes
import gc
import re
import struct
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import CONTEXT, FOREIGN_CONTEXT, FakeCuda

from tilewright.base import dtypes
from tilewright.base.artifact import ArrayParam, Artifact, Launch, ScalarParam, SizeBinding
from tilewright.base.errors import CompilerBug, DeviceError, TargetLimit, TilewrightError, UserError
from tilewright.base.sizes import ONE, Size, ceildiv
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.cuda import driver as cuda_driver
from tilewright.runtime.cuda.device import CudaDevice
from tilewright.runtime.cuda.driver import Driver

N = Size.of("n")


def program(*launches: Launch, scalars: tuple[ScalarParam, ...] = (), scratch: tuple[ArrayParam, ...] = ()) -> Artifact:
    vector = ArrayParam("x", dtypes.f32, (N,), (ONE,), "input")
    return Artifact(
        "test", "sm_90a", "ptx", b".version 8.3", (vector, *scalars), (replace(vector, name="out", role="output"),), scratch,
        launches, (SizeBinding("n", "x", 0),), (),
    )  # fmt: skip


SCALE = program(
    Launch("scale", ("x", "factor", "out"), ("n",), (ceildiv(N, 128),), threads=128),
    scalars=(ScalarParam("factor", dtypes.f32),),
)


def parameters(table: int, formats: str) -> tuple[float, ...]:
    """The values behind a table of parameter pointers."""
    pointers = (ctypes.c_void_p * len(formats)).from_address(table)
    read = [struct.unpack("<" + f, ctypes.string_at(p, struct.calcsize(f)))[0] for p, f in zip(pointers, formats)]  # type: ignore[arg-type]
    return tuple(read)


def run_scale(table: int, grid: tuple[int, int, int]) -> None:
    x, factor, out, count = parameters(table, "QfQq")
    assert grid == (-(-int(count) // 128), 1, 1)
    source = np.ctypeslib.as_array((ctypes.c_float * int(count)).from_address(int(x)))
    np.ctypeslib.as_array((ctypes.c_float * int(count)).from_address(int(out)))[:] = source * factor


@pytest.fixture
def fake() -> FakeCuda:
    made = FakeCuda(count=2)
    made.kernels["scale"] = run_scale
    return made


@pytest.fixture
def device(fake: FakeCuda) -> CudaDevice:
    return CudaDevice(Driver(fake), 0)


# -- devices --------------------------------------------------------------------------------------------------------


def test_device_properties(device: CudaDevice, fake: FakeCuda) -> None:
    assert (device.ordinal, device.name, device.capability) == (0, "Fake GPU", (9, 0))
    assert (device.memory, device.multiprocessors, device.max_shared) == (1 << 30, 132, 227 << 10)
    assert device.target.name == "sm_90a"
    assert repr(device) == "CudaDevice(cuda:0 (Fake GPU), compute capability 9.0, 1024 MiB)"
    assert fake.calls("cuDevicePrimaryCtxRetain") == []


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_found", None)
    monkeypatch.setattr(cuda, "_reason", "")


@pytest.mark.usefixtures("fresh")
def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "load_driver", lambda: Driver(FakeCuda(count=2)))
    assert [d.ordinal for d in cuda.devices()] == [0, 1]
    assert cuda.devices()[0] is cuda.devices()[0]
    assert cuda.unavailable_reason() == ""


@pytest.mark.usefixtures("fresh")
def test_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Driver:
        raise DeviceError.at("TW030", "no NVIDIA driver was found: gone")

    monkeypatch.setattr(cuda, "load_driver", missing)
    assert cuda.devices() == []
    assert cuda.unavailable_reason() == "no NVIDIA driver was found: gone"
    monkeypatch.setattr(cuda, "load_driver", lambda: Driver(FakeCuda(count=0)))
    cuda._forget()
    assert cuda.unavailable_reason() == "the NVIDIA driver reports no device"


def test_bindings_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match="the CUDA bindings cannot be imported") as caught:
        cuda_driver.load_driver()
    assert caught.value.code == "TW030"


def test_context_is_made_current_per_thread_and_others_come_back(device: CudaDevice, fake: FakeCuda) -> None:
    device.empty((3,), dtypes.f32)
    assert fake.stack() == [CONTEXT]
    fake.stack()[-1] = FOREIGN_CONTEXT
    device.synchronize()
    assert fake.stack() == [FOREIGN_CONTEXT]
    assert fake.calls("cuCtxPushCurrent") == [(CONTEXT,)]
    seen = []

    def work() -> None:
        device.synchronize()
        seen.append(list(fake.stack()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[CONTEXT]]


# -- running --------------------------------------------------------------------------------------------------------


def test_run(device: CudaDevice) -> None:
    loaded = device.load(SCALE)
    values = np.arange(300, dtype=np.float32)
    x, out = device.from_numpy(values), device.empty((300,), dtypes.f32)
    loaded.run({"x": x, "out": out}, {"factor": 2.5}, {"n": 300})
    np.testing.assert_array_equal(out.numpy(), values * 2.5)
    loaded.run({"x": x.pointer, "out": out.pointer}, {"factor": -1}, {"n": 100})
    np.testing.assert_array_equal(out.numpy()[:100], -values[:100])


def test_an_empty_grid_is_not_launched(device: CudaDevice, fake: FakeCuda) -> None:
    empty = device.empty((0,), dtypes.f32)
    device.load(SCALE).run({"x": empty, "out": empty}, {"factor": 1.0}, {"n": 0})
    assert fake.calls("cuLaunchKernel") == []


def test_launch_numbers(device: CudaDevice, fake: FakeCuda) -> None:
    launch = Launch("wide", ("x",), (), (N * 1000, ceildiv(N, 2), Size.of(3)), threads=384, shared_bytes=200_000)
    loaded = device.load(program(launch))
    stream = device.create_stream()
    loaded.run({"x": 1, "out": 2}, {}, {"n": 2_000_000 // 1000}, stream=stream)
    (arguments,) = fake.calls("cuLaunchKernel")
    assert arguments[:9] == ("wide", 2_000_000, 1000, 3, 384, 1, 1, 200_000, stream)
    assert fake.calls("cuFuncSetAttribute") == [("wide", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 200_000)]
    loaded.run({"x": 1, "out": 2}, {}, {"n": 2})
    assert fake.calls("cuLaunchKernel")[1][8] is None


def test_grid_limits(device: CudaDevice, fake: FakeCuda) -> None:
    loaded = device.load(program(Launch("wide", ("x",), (), (N, ONE))))
    loaded.run({"x": 1, "out": 2}, {}, {"n": 2**31 - 1})
    assert fake.calls("cuLaunchKernel")[0][1] == 2**31 - 1
    with pytest.raises(TargetLimit, match=r"needs a grid of \(2147483648, 1, 1\), but cuda:0"):
        loaded.run({"x": 1, "out": 2}, {}, {"n": 2**31})
    tall = device.load(program(Launch("tall", ("x",), (), (ONE, N))))
    with pytest.raises(TargetLimit, match=r"\(1, 65536, 1\)"):
        tall.run({"x": 1, "out": 2}, {}, {"n": 65536})


SCALARS = {
    "bool": (True, "?"), "i8": (-5, "b"), "i16": (-300, "h"), "i32": (-70000, "i"), "i64": (-(2**40), "q"),
    "u8": (200, "B"), "u16": (60000, "H"), "u32": (2**32 - 1, "I"), "u64": (2**64 - 1, "Q"),
    "f16": (1.5, "e"), "f32": (1.25, "f"), "f64": (0.1, "d"),
}  # fmt: skip


def read_scalar(device: CudaDevice, fake: FakeCuda, dtype: dtypes.DType, value: float, form: str) -> float:
    seen = []
    fake.kernels["probe"] = lambda table, grid: seen.append(parameters(table, form + "q"))
    loaded = device.load(program(Launch("probe", ("s",), ("n",), (ONE,)), scalars=(ScalarParam("s", dtype),)))
    loaded.run({"x": 1, "out": 2}, {"s": value}, {"n": 2**40})
    assert seen[0][1] == 2**40
    return seen[0][0]


@pytest.mark.parametrize("name", SCALARS)
def test_scalars(device: CudaDevice, fake: FakeCuda, name: str) -> None:
    value, form = SCALARS[name]
    assert read_scalar(device, fake, dtypes.by_name(name), value, form) == value


@pytest.mark.parametrize(("dtype", "value", "bits"), [(dtypes.bf16, 1.0, 0x3F80), (dtypes.f8e4m3, 1.0, 0x38), (dtypes.f8e5m2, -2, 0xC0)])
def test_scalars_packed_as_bits(device: CudaDevice, fake: FakeCuda, dtype: dtypes.DType, value: float, bits: int) -> None:
    assert read_scalar(device, fake, dtype, value, "H" if dtype.bits == 16 else "B") == bits


def test_scalars_out_of_range(device: CudaDevice, fake: FakeCuda) -> None:
    assert read_scalar(device, fake, dtypes.f32, 1e300, "f") == float("inf")
    assert read_scalar(device, fake, dtypes.f16, -1e9, "e") == float("-inf")
    assert read_scalar(device, fake, dtypes.i32, np.int64(7), "i") == 7
    with pytest.raises(UserError, match="'s' is i8, which cannot hold 300"):
        read_scalar(device, fake, dtypes.i8, 300, "b")
    with pytest.raises(UserError, match=r"'s' must be i32, not 2\.5"):
        read_scalar(device, fake, dtypes.i32, 2.5, "i")


def test_scratch(device: CudaDevice, fake: FakeCuda) -> None:
    scratch = (
        ArrayParam("a", dtypes.f32, (N,), (ONE,), "scratch"),
        ArrayParam("b", dtypes.u8, (ONE,), (ONE,), "scratch", 1024),
        ArrayParam("c", dtypes.f64, (N, N), (N, ONE), "scratch"),
    )
    seen = []
    fake.kernels["fill"] = lambda table, grid: seen.append(parameters(table, "QQQ"))
    launches = (Launch("fill", ("a", "b", "c"), (), (ONE,)), Launch("fill", ("c", "b", "a"), (), (ONE,)))
    loaded = device.load(program(*launches, scratch=scratch))
    for _ in range(3):
        loaded.run({"x": 1, "out": 2}, {}, {"n": 100})
    a, b, c = map(int, seen[0])
    assert seen[1] == (c, b, a)
    assert (b - a, c - a) == (1024, 1280)
    assert seen[0::2] == [seen[0]] * 3  # reused in stream order
    assert len(fake.calls("cuMemAllocAsync")) == 1
    assert device.pool.usage() == (0, fake.used())
    assert fake.used() >= 1280 + 80_000
    stream = device.create_stream()
    loaded.run({"x": 1, "out": 2}, {}, {"n": 100}, stream=stream)
    assert len(fake.calls("cuMemAllocAsync")) == 2


def test_same_name_for_a_size_and_a_scalar(device: CudaDevice, fake: FakeCuda) -> None:
    seen = []
    fake.kernels["probe"] = lambda table, grid: seen.append(parameters(table, "iq"))
    loaded = device.load(program(Launch("probe", ("n",), ("n",), (ONE,)), scalars=(ScalarParam("n", dtypes.i32),)))
    loaded.run({"x": 1, "out": 2}, {"n": 5}, {"n": 9})
    assert seen == [(5, 9)]


def test_missing_arguments(device: CudaDevice) -> None:
    loaded = device.load(SCALE)
    for arrays, scalars, sizes, name in (
        ({"x": 1}, {"factor": 1.0}, {"n": 1}, "out"),
        ({"x": 1, "out": 1}, {}, {"n": 1}, "factor"),
        ({"x": 1, "out": 1}, {"factor": 1.0}, {}, "n"),
    ):
        with pytest.raises(UserError, match=f"'test' was not given '{name}'"):
            loaded.run(arrays, scalars, sizes)


def test_arrays_that_cannot_be_used(device: CudaDevice, fake: FakeCuda) -> None:
    loaded = device.load(SCALE)
    other = CudaDevice(Driver(fake), 1).empty((4,), dtypes.f32)
    with pytest.raises(UserError, match=r"an array on cuda:1 .* was given to a program on cuda:0"):
        loaded.run({"x": other, "out": 1}, {"factor": 1.0}, {"n": 4})
    freed = device.empty((4,), dtypes.f32)
    freed.free()
    with pytest.raises(DeviceError, match="after it was freed"):
        loaded.run({"x": freed, "out": 1}, {"factor": 1.0}, {"n": 4})


def test_threads_do_not_mix_arguments(device: CudaDevice) -> None:
    loaded = device.load(SCALE)
    wrong = []

    def work(factor: float) -> None:
        x, out = device.from_numpy(np.ones(64, np.float32)), device.empty((64,), dtypes.f32)
        for _ in range(100):
            loaded.run({"x": x, "out": out}, {"factor": factor}, {"n": 64})
            if not (out.numpy() == factor).all():
                wrong.append(factor)

    threads = [threading.Thread(target=work, args=(float(f),)) for f in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- errors ---------------------------------------------------------------------------------------------------------


def test_refused_ptx(device: CudaDevice, fake: FakeCuda) -> None:
    fake.fail["cuModuleLoadDataEx"] = 218
    fake.ptx_log = b"ptxas application ptx input, line 9; error : Unknown symbol 'foo'"
    with pytest.raises(CompilerBug) as caught:
        device.load(SCALE)
    text = str(caught.value)
    assert "the PTX of 'test' (sm_90a) was refused by cuda:0 (Fake GPU) with CUDA_ERROR_INVALID_PTX (218)" in text
    assert "line 9; error : Unknown symbol 'foo'" in text
    found = re.search(r"the PTX is in (\S+)", text)
    assert found
    assert Path(found.group(1)).read_bytes() == SCALE.code
    Path(found.group(1)).unlink()


def test_load_failing_without_a_log_is_a_device_error(device: CudaDevice, fake: FakeCuda) -> None:
    fake.fail["cuModuleLoadDataEx"] = 2
    with pytest.raises(DeviceError, match=r"cuModuleLoadDataEx failed with CUDA_ERROR_OUT_OF_MEMORY \(2\): out of memory"):
        device.load(SCALE)


def test_wrong_kind(device: CudaDevice) -> None:
    with pytest.raises(CompilerBug, match="kind 'object'"):
        device.load(replace(SCALE, kind="object"))


def test_unknown_argument(device: CudaDevice) -> None:
    with pytest.raises(CompilerBug, match=r"kernel 'scale' takes \['nothing'\]"):
        device.load(program(Launch("scale", ("nothing",), (), (ONE,))))


def test_limits_before_launch(device: CudaDevice, fake: FakeCuda) -> None:
    with pytest.raises(TargetLimit, match=r"needs 300000 bytes of shared memory per block, but cuda:0 .* has 232448"):
        device.load(program(Launch("big", ("x",), (), (ONE,), shared_bytes=300_000)))
    fake.function_attributes["CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK"] = 256
    with pytest.raises(TargetLimit, match=r"wants 512 threads per block, but with its registers .* can run 256"):
        device.load(program(Launch("big", ("x",), (), (ONE,), threads=512)))


def test_resources(device: CudaDevice, fake: FakeCuda) -> None:
    fake.function_attributes |= {
        "CU_FUNC_ATTRIBUTE_NUM_REGS": 40, "CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES": 8, "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": 1024,
    }  # fmt: skip
    found = device.load(SCALE).resources("scale")
    assert (found.registers, found.local_bytes, found.shared_bytes, found.max_threads) == (40, 8, 1024, 1024)


def test_failed_launch(device: CudaDevice, fake: FakeCuda) -> None:
    loaded = device.load(SCALE)
    fake.fail["cuLaunchKernel"] = 1
    with pytest.raises(DeviceError) as caught:
        loaded.run({"x": 1, "out": 2}, {"factor": 1.0}, {"n": 1000})
    assert str(caught.value) == (
        "error[TW032]: cuLaunchKernel failed with CUDA_ERROR_INVALID_VALUE (1): invalid value, on cuda:0 (Fake GPU), "
        "kernel 'scale', grid (8, 1, 1), 128 threads, 0 bytes shared"
    )


def test_fault_names_the_kernels_since_the_last_synchronisation(device: CudaDevice, fake: FakeCuda) -> None:
    fake.kernels.clear()
    first, second = device.load(SCALE), device.load(program(Launch("other", ("x",), (), (ONE,))))
    first.run({"x": 1, "out": 2}, {"factor": 1.0}, {"n": 4})
    device.synchronize()
    second.run({"x": 1, "out": 2}, {}, {"n": 4})
    second.run({"x": 1, "out": 2}, {}, {"n": 4})
    fake.fail["cuCtxSynchronize"] = 700
    with pytest.raises(DeviceError) as caught:
        device.synchronize()
    assert str(caught.value) == (
        "error[TW032]: cuCtxSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS (700): illegal address, on cuda:0 (Fake GPU); "
        "kernels launched since the last synchronisation: other\nhelp: the device is lost to this process, which can go on with "
        "device='cpu'; run the kernel on the emulator to find the fault"
    )
    fake.log.clear()
    for use in (device.synchronize, lambda: device.empty((3,), dtypes.f32), lambda: second.run({"x": 1, "out": 2}, {}, {"n": 4})):
        with pytest.raises(DeviceError) as caught:
            use()
        assert str(caught.value) == (
            "error[TW034]: cuda:0 (Fake GPU) is lost to this process: a fault of other ended its context\n"
            "help: use device='cpu', or restart the process; the first error says more"
        )
    assert fake.log == []


def test_fault_found_by_a_copy(device: CudaDevice, fake: FakeCuda) -> None:
    array = device.from_numpy(np.zeros(4, np.float32))
    fake.kernels.clear()
    device.load(SCALE).run({"x": array, "out": array}, {"factor": 1.0}, {"n": 4})
    fake.fail["cuMemcpyDtoH"] = 700
    with pytest.raises(DeviceError, match=r"cuMemcpyDtoH .* since the last synchronisation: scale"):
        array.numpy()


def test_error_callback(device: CudaDevice, fake: FakeCuda) -> None:
    fake.kernels.clear()
    loaded = device.load(SCALE)
    heard: list[TilewrightError] = []
    arguments = ({"x": 1, "out": 2}, {"factor": 1.0}, {"n": 4})
    loaded.run(*arguments, on_error=heard.append)  # type: ignore[arg-type]
    device.synchronize()
    assert heard == []
    later: list[TilewrightError] = []
    loaded.run(*arguments, on_error=later.append)  # type: ignore[arg-type]
    fake.fail["cuCtxSynchronize"] = 700
    with pytest.raises(DeviceError) as caught:
        device.synchronize()
    assert later == [caught.value]
    assert heard == []  # what it watched was done


def test_synchronising_one_stream(device: CudaDevice, fake: FakeCuda) -> None:
    fake.kernels.clear()
    loaded = device.load(SCALE)
    stream = device.create_stream()
    loaded.run({"x": 1, "out": 2}, {"factor": 1.0}, {"n": 4}, stream=stream)
    loaded.run({"x": 1, "out": 2}, {"factor": 1.0}, {"n": 4})
    device.synchronize(stream)
    assert list(device.launched) == [(0, "scale")]


def test_modules_are_unloaded_when_nothing_runs(device: CudaDevice, fake: FakeCuda) -> None:
    loaded = device.load(SCALE)
    assert fake.leaks() == {"module": 1}
    del loaded
    gc.collect()
    assert fake.calls("cuModuleUnload") == []
    device.synchronize()
    assert len(fake.calls("cuModuleUnload")) == 1
    fake.check()


def test_time(device: CudaDevice, fake: FakeCuda) -> None:
    count = []
    assert device.time(lambda: count.append(1), repeats=3, warmup=2) == [0.25] * 3
    assert len(count) == 5
    device.release_idle()
    assert len(fake.calls("cuEventCreate")) == len(fake.calls("cuEventDestroy")) == 6


def test_order_falls_back_to_waiting(device: CudaDevice, fake: FakeCuda) -> None:
    fake.fail["cuEventRecord"] = 400
    device.order(0, 99)
    assert fake.calls("cuCtxSynchronize") == [()]
    assert len(fake.calls("cuEventDestroy")) == 1
