"""The CUDA runtime on a real GPU, with PTX written by hand: it needs no compiler. Skipped where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tilewright.base import dtypes
from tilewright.base.artifact import ArrayParam, Artifact, Launch, ScalarParam, SizeBinding
from tilewright.base.errors import CompilerBug, DeviceError
from tilewright.base.sizes import ONE, Size, ceildiv
from tilewright.runtime import cuda
from tilewright.runtime.cuda import CudaDevice
from tilewright.runtime.device_array import DeviceArray

pytestmark = pytest.mark.requires("cuda")

N = Size.of("n")
INDEX = """
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.wide.u32 %rd9, %r1, %r2, 0;
    cvt.u64.u32 %rd8, %r3; add.u64 %rd9, %rd9, %rd8; setp.ge.s64 %p1, %rd9, %rd3; @%p1 bra done; shl.b64 %rd8, %rd9, 2;
"""
PTX = f"""
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 dynamic[];

.visible .entry scale(.param .u64 x, .param .f32 factor, .param .u64 out, .param .u64 n) {{
    .reg .pred %p<2>; .reg .b32 %r<4>; .reg .f32 %f<3>; .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [x]; ld.param.f32 %f1, [factor]; ld.param.u64 %rd2, [out]; ld.param.u64 %rd3, [n];
    {INDEX}
    add.u64 %rd4, %rd1, %rd8; ld.global.f32 %f2, [%rd4]; mul.f32 %f2, %f2, %f1;
    add.u64 %rd5, %rd2, %rd8; st.global.f32 [%rd5], %f2;
done:
    ret;
}}

.visible .entry square(.param .u64 x, .param .u64 out, .param .u64 n) {{
    .reg .pred %p<2>; .reg .b32 %r<4>; .reg .f32 %f<3>; .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out]; ld.param.u64 %rd3, [n];
    {INDEX}
    add.u64 %rd4, %rd1, %rd8; ld.global.f32 %f2, [%rd4]; mul.f32 %f2, %f2, %f2;
    add.u64 %rd5, %rd2, %rd8; st.global.f32 [%rd5], %f2;
done:
    ret;
}}

.visible .entry shared_size(.param .u64 out) {{
    .reg .b32 %r<3>; .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out]; mov.u32 %r1, %dynamic_smem_size; cvt.rn.f32.u32 %r2, %r1; st.global.b32 [%rd1], %r2;
    ret;
}}

.visible .entry count_blocks(.param .u64 out) {{
    .reg .f32 %f<2>; .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [out]; mov.f32 %f1, 0f3F800000; red.global.add.f32 [%rd1], %f1;
    ret;
}}

.visible .entry fault() {{
    .reg .b64 %rd<2>; .reg .b32 %r<2>;
    mov.u64 %rd1, 8; mov.u32 %r1, 1; st.global.u32 [%rd1], %r1;
    ret;
}}

.visible .entry spin(.param .u64 clocks) {{
    .reg .pred %p<2>; .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [clocks]; mov.u64 %rd2, %clock64;
again:
    mov.u64 %rd3, %clock64; sub.u64 %rd4, %rd3, %rd2; setp.lt.u64 %p1, %rd4, %rd1; @%p1 bra again;
    ret;
}}
"""
VECTOR = ArrayParam("x", dtypes.f32, (N,), (ONE,), "input")


def program(*launches: Launch, scratch: tuple[ArrayParam, ...] = (), code: str = PTX) -> Artifact:
    inputs = (VECTOR, ScalarParam("factor", dtypes.f32), ScalarParam("clocks", dtypes.u64))
    return Artifact(
        "test", "sm_80", "ptx", code.encode(), inputs, (replace(VECTOR, name="out", role="output"),), scratch, launches,
        (SizeBinding("n", "x", 0),), (),
    )  # fmt: skip


BLOCKS = (ceildiv(N, 256),)
SCALE = program(Launch("scale", ("x", "factor", "out"), ("n",), BLOCKS, 256))
SCALE_SQUARE = program(
    Launch("scale", ("x", "factor", "middle"), ("n",), BLOCKS, 256),
    Launch("square", ("middle", "out"), ("n",), BLOCKS, 256),
    scratch=(replace(VECTOR, name="middle", role="scratch"),),
)
SPIN = program(Launch("spin", ("clocks",), (), (ONE,), 32))
NUMBERS = {"factor": 2.5, "clocks": 0}


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    found = cuda.devices()[0]
    yield found
    found.synchronize()


def run(device: CudaDevice, artifact: Artifact, values: np.ndarray, stream: int = 0) -> np.ndarray:
    x, out = device.from_numpy(values, stream=stream), device.empty(values.shape, dtypes.f32, stream)
    device.load(artifact).run({"x": x, "out": out}, NUMBERS, {"n": values.size}, stream)
    return out.numpy()


def random(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal(count).astype(np.float32)


def test_properties(device: CudaDevice) -> None:
    assert device.memory > 1 << 30
    assert device.multiprocessors > 0
    assert device.target.sm // 10 == device.capability[0]
    free, total = device.free_memory()
    assert 0 < free <= total


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1_000_003])
def test_run(device: CudaDevice, count: int) -> None:
    values = random(count)
    np.testing.assert_array_equal(run(device, SCALE, values), values * np.float32(2.5))


def test_launches_in_order_with_scratch(device: CudaDevice) -> None:
    values = random(100_000)
    np.testing.assert_array_equal(run(device, SCALE_SQUARE, values), (values * np.float32(2.5)) ** 2)


def test_streams(device: CudaDevice) -> None:
    stream = device.create_stream()
    values = random(100_000)
    for _ in range(20):
        np.testing.assert_array_equal(run(device, SCALE_SQUARE, values, stream), (values * np.float32(2.5)) ** 2)
    device.synchronize(stream)
    device.destroy_stream(stream)


def test_memory_used_on_another_stream_is_not_reused_early(device: CudaDevice) -> None:
    """A slow kernel delays the reader on one stream while the freed block is taken and overwritten on another."""
    stream = device.create_stream()
    values = random(1 << 20)
    scale, spin = device.load(SCALE), device.load(SPIN)
    out = device.empty(values.shape, dtypes.f32, stream)
    x = device.from_numpy(values)
    device.synchronize()
    spin.run({"x": 0, "out": 0}, {"factor": 0.0, "clocks": 200_000_000}, {"n": 0}, stream)
    scale.run({"x": x, "out": out}, NUMBERS, {"n": values.size}, stream)
    pointer = x.pointer
    del x
    other = device.empty(values.shape, dtypes.f32)
    assert other.pointer == pointer
    scale.run({"x": other, "out": other}, {"factor": 0.0, "clocks": 0}, {"n": values.size})
    np.testing.assert_array_equal(out.numpy(), values * np.float32(2.5))
    device.destroy_stream(stream)


def test_large_shared_memory_and_resources(device: CudaDevice) -> None:
    loaded = device.load(program(Launch("shared_size", ("out",), (), (ONE,), 32, device.max_shared)))
    out = device.empty((1,), dtypes.f32)
    loaded.run({"x": 0, "out": out}, NUMBERS, {"n": 0})
    assert out.numpy()[0] == device.max_shared
    found = loaded.resources("shared_size")
    assert found.registers > 0
    assert found.local_bytes == 0


def test_large_grid(device: CudaDevice) -> None:
    loaded = device.load(program(Launch("count_blocks", ("out",), (), (N,), 1)))
    out = device.from_numpy(np.zeros(1, np.float32))
    loaded.run({"x": 0, "out": out}, NUMBERS, {"n": 1_000_000})
    assert out.numpy()[0] == 1_000_000


def test_refused_ptx(device: CudaDevice) -> None:
    with pytest.raises(CompilerBug, match=r"(?s)was refused by cuda:0.*ptxas.*error.*the PTX is in") as caught:
        device.load(replace(SCALE, code=PTX.replace("mul.f32", "mull.f32", 1).encode()))
    os.unlink(str(caught.value).rsplit("the PTX is in ", 1)[1].strip())


def test_missing_kernel(device: CudaDevice) -> None:
    with pytest.raises(DeviceError, match=r"cuModuleGetFunction failed with CUDA_ERROR_NOT_FOUND \(500\)"):
        device.load(program(Launch("missing", (), (), (ONE,))))


def test_out_of_memory(device: CudaDevice) -> None:
    free, _ = device.free_memory()
    cached = device.empty((free // 2,), dtypes.u8)
    del cached  # its memory is cached and must be given up for the next
    array = device.empty((free * 3 // 4,), dtypes.u8)
    with pytest.raises(DeviceError, match=r"TW031.*out of memory on cuda:0 .*: asked for \d+ bytes, \d+ bytes are free of"):
        device.empty((free,), dtypes.u8)
    array.free()
    device.pool.flush()
    np.testing.assert_array_equal(device.from_numpy(np.arange(5)).numpy(), np.arange(5))


@pytest.mark.parametrize("dtype", dtypes.SCALARS, ids=str)
def test_copies(device: CudaDevice, dtype: dtypes.DType) -> None:
    values = np.array([[0, 1, 1, 0], [1, 0, 1, 1]]).astype(dtype.numpy)
    array = device.from_numpy(values)
    np.testing.assert_array_equal(array.numpy(), values)
    np.testing.assert_array_equal(array.T[::-1, 1].numpy(), values.T[::-1, 1])


def test_threads(device: CudaDevice) -> None:
    loaded = device.load(SCALE_SQUARE)
    failed = []

    def work(seed: int) -> None:
        values = random(10_000 + seed)
        x = device.from_numpy(values)
        for _ in range(50):
            out = device.empty(values.shape, dtypes.f32)
            loaded.run({"x": x, "out": out}, NUMBERS, {"n": values.size})
            if not np.array_equal(out.numpy(), (values * np.float32(2.5)) ** 2):
                failed.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_time(device: CudaDevice) -> None:
    loaded = device.load(SPIN)
    short = device.time(lambda: loaded.run({"x": 0, "out": 0}, {"factor": 0.0, "clocks": 1_000_000}, {"n": 0}), 5)
    long = device.time(lambda: loaded.run({"x": 0, "out": 0}, {"factor": 0.0, "clocks": 10_000_000}, {"n": 0}), 5)
    assert len(short) == len(long) == 5
    assert 0 < min(short) < min(long)


def test_launch_is_quick_and_does_not_wait(device: CudaDevice) -> None:
    loaded = device.load(SCALE)
    x, out = device.empty((256,), dtypes.f32), device.empty((256,), dtypes.f32)
    arrays, sizes = {"x": x, "out": out}, {"n": 256}
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            loaded.run(arrays, NUMBERS, sizes)
        best = min(best, (time.perf_counter() - start) / 100)
        device.synchronize()
    print(f"launch through Python: {best * 1e6:.2f} us")
    assert best < 30e-6
    spin = device.load(SPIN)
    start = time.perf_counter()
    spin.run({"x": 0, "out": 0}, {"factor": 0.0, "clocks": 500_000_000}, {"n": 0})
    queued = time.perf_counter() - start
    device.synchronize()
    assert queued < (time.perf_counter() - start) / 5


def test_native_addresses(device: CudaDevice) -> None:
    assert device.driver.address("cuLaunchKernel") > 0
    assert device.load(SCALE).function_address("scale") > 0


# -- other libraries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "bool", "uint8"])
def test_torch(device: CudaDevice, name: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = torch.tensor([[1, 0, 1], [0, 1, 1]], device="cuda").to(getattr(torch, name)).T
    wrapped = device.wrap(tensor)
    assert (wrapped.pointer, wrapped.shape, wrapped.strides) == (tensor.data_ptr(), (3, 2), (1, 3))
    assert wrapped.dtype is dtypes.by_name(name)
    assert wrapped.numpy().astype(np.float32).tolist() == [[1, 0], [0, 1], [1, 1]]
    back = torch.from_dlpack(device.from_numpy(np.ascontiguousarray(wrapped.numpy())))
    assert back.dtype == tensor.dtype
    assert back.device.index == 0
    assert back.float().tolist() == tensor.float().tolist()


def test_torch_keeps_exported_memory(device: CudaDevice) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    before = device.pool.usage()[0]
    tensor = torch.from_dlpack(device.from_numpy(random(1000)))
    assert device.pool.usage()[0] > before
    assert tensor.sum().item() == pytest.approx(random(1000).sum(), rel=1e-3)
    del tensor
    assert device.pool.usage()[0] == before


def test_torch_reads_the_interface(device: CudaDevice) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    values = random(12).reshape(3, 4)
    array = device.from_numpy(values)
    tensor = torch.as_tensor(array.T, device="cuda")
    assert tensor.data_ptr() == array.pointer
    np.testing.assert_array_equal(tensor.cpu().numpy(), values.T)


def test_cupy(device: CudaDevice) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    values = random(12).reshape(3, 4)
    array = device.from_numpy(values)
    np.testing.assert_array_equal(cupy.asnumpy(cupy.asarray(array[:, ::2]) * 2), values[:, ::2] * 2)
    np.testing.assert_array_equal(cupy.asnumpy(cupy.from_dlpack(array)), values)
    theirs = cupy.asarray(values)[1:]
    wrapped: DeviceArray = device.wrap(theirs)
    np.testing.assert_array_equal(wrapped.numpy(), values[1:])


# -- what ends a context runs in a process of its own ---------------------------------------------------------------


def in_child(body: str) -> str:
    here = os.path.dirname(__file__)
    code = f"import sys; sys.path.insert(0, {here!r})\nfrom test_cuda_runtime import *\n" + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_fault_is_raised_by_synchronize() -> None:
    text = in_child("""
        device = cuda.devices()[0]
        heard = []
        device.load(SCALE).run({"x": 0, "out": 0}, NUMBERS, {"n": 0})
        device.load(program(Launch("fault", (), (), (ONE,), 1))).run(
            {"x": 0, "out": 0}, NUMBERS, {"n": 0}, on_error=heard.append)
        try:
            device.synchronize()
        except DeviceError as error:
            print(error, heard == [error])
    """)
    assert "cuCtxSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS (700)" in text
    assert "kernels launched since the last synchronisation: fault" in text
    assert text.rstrip().endswith("True")


def test_a_forked_child_is_told_why_it_has_no_device() -> None:
    text = in_child("""
        cuda.devices()[0].synchronize()
        sys.stdout.flush()
        if os.fork() == 0:
            print(cuda.devices(), cuda.unavailable_reason(), flush=True)
            os._exit(0)
        os.wait()
    """)
    assert text.startswith("[]")
    assert "CUDA_ERROR_NOT_INITIALIZED" in text


def test_exit_with_everything_alive() -> None:
    text = in_child("""
        device = cuda.devices()[0]
        array, loaded, stream = device.from_numpy(random(10)), device.load(SCALE), device.create_stream()
        capsule = array.__dlpack__()
        try:
            import torch
            tensor = torch.from_dlpack(array)
        except ImportError:
            pass
        print("done")
    """)
    assert text.strip() == "done"
