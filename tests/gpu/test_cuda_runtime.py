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
from tilewright.base.artifact import ArrayParam, Artifact, Launch, MapParam, ScalarParam, SizeBinding
from tilewright.base.errors import CompilerBug, DeviceError, TargetLimit
from tilewright.base.sizes import ONE, Size, ceildiv
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.cuda.device import CudaDevice
from tilewright.runtime.memory.device_array import DeviceArray

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


# -- what came with Hopper ------------------------------------------------------------------------------------------

HOPPER_PTX = """
.version 8.0
.target sm_90
.address_size 64

// Each block copies one box of 512 bytes, at its number along x and y, and writes it out as it lies in shared memory.
.visible .entry copy_box(
    .param .u64 out, .param .u64 width, .param .u64 height, .param .align 64 .b8 map[128]
) {
    .reg .pred %p<3>; .reg .b32 %r<12>; .reg .b64 %rd<8>;
    .shared .align 1024 .b8 tile[512];
    .shared .align 8 .b64 barrier;
    ld.param.u64 %rd1, [out]; ld.param.u32 %r1, [width]; ld.param.u32 %r2, [height];
    mov.u32 %r3, %tid.x; mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y;
    mov.u32 %r6, tile; mov.u32 %r7, barrier;
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra ready;
    mbarrier.init.shared::cta.b64 [%r7], 1;
    fence.proxy.async.shared::cta;
    mbarrier.arrive.expect_tx.shared::cta.b64 %rd2, [%r7], 512;
    mul.lo.u32 %r1, %r1, %r4; mul.lo.u32 %r2, %r2, %r5;
    mov.b64 %rd3, map; cvta.param.u64 %rd3, %rd3;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r6], [%rd3, {%r1, %r2}], [%r7];
ready:
    bar.sync 0;
again:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r7], 0;
    @!%p2 bra again;
    mov.u32 %r8, %nctaid.x; mad.lo.u32 %r8, %r5, %r8, %r4;
    mad.lo.u32 %r8, %r8, 128, %r3; mul.wide.u32 %rd4, %r8, 4; add.u64 %rd1, %rd1, %rd4;
    shl.b32 %r9, %r3, 2; add.u32 %r9, %r6, %r9;
    ld.shared.b32 %r10, [%r9]; st.global.b32 [%rd1], %r10;
    ret;
}

// One block copies 16 pixels of 8 floats from a base position on, at an offset from each, and writes them out.
.visible .entry copy_pixels(
    .param .u64 out, .param .u64 image, .param .u64 row, .param .u64 column, .param .u64 channel, .param .u64 down,
    .param .u64 across, .param .align 64 .b8 map[128]
) {
    .reg .pred %p<3>; .reg .b16 %h<3>; .reg .b32 %r<12>; .reg .b64 %rd<8>;
    .shared .align 1024 .b8 tile[512];
    .shared .align 8 .b64 barrier;
    ld.param.u64 %rd1, [out]; ld.param.u32 %r1, [channel]; ld.param.u32 %r2, [column]; ld.param.u32 %r4, [row];
    ld.param.u32 %r5, [image]; ld.param.u16 %h1, [across]; ld.param.u16 %h2, [down];
    mov.u32 %r3, %tid.x; mov.u32 %r6, tile; mov.u32 %r7, barrier;
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra ready;
    mbarrier.init.shared::cta.b64 [%r7], 1;
    fence.proxy.async.shared::cta;
    mbarrier.arrive.expect_tx.shared::cta.b64 %rd2, [%r7], 512;
    mov.b64 %rd3, map; cvta.param.u64 %rd3, %rd3;
    cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes
        [%r6], [%rd3, {%r1, %r2, %r4, %r5}], [%r7], {%h1, %h2};
ready:
    bar.sync 0;
again:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r7], 0;
    @!%p2 bra again;
    mul.wide.u32 %rd4, %r3, 4; add.u64 %rd1, %rd1, %rd4;
    shl.b32 %r9, %r3, 2; add.u32 %r9, %r6, %r9;
    ld.shared.b32 %r10, [%r9]; st.global.b32 [%rd1], %r10;
    ret;
}

.visible .entry cluster_rank(.param .u64 out) .reqnctapercluster 2, 1, 1 {
    .reg .b32 %r<4>; .reg .f32 %f<2>; .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out]; mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2;
    mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, %cluster_nctarank; mad.lo.u32 %r2, %r3, 10, %r2;
    cvt.rn.f32.u32 %f1, %r2; st.global.f32 [%rd1], %f1;
    ret;
}

// Lets the next kernel start, then waits for what it writes: out[1] becomes 1 if that came, 2 if it did not for too long.
.visible .entry wait_for_next(.param .u64 out) {
    .reg .pred %p<3>; .reg .f32 %f<3>; .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [out]; mov.u64 %rd2, %clock64;
    griddepcontrol.launch_dependents;
    mov.f32 %f2, 0f3F800000;
again:
    ld.relaxed.gpu.global.f32 %f1, [%rd1];
    setp.neu.f32 %p1, %f1, 0f00000000; @%p1 bra done;
    mov.u64 %rd3, %clock64; sub.u64 %rd4, %rd3, %rd2; setp.lt.u64 %p2, %rd4, 100000000; @%p2 bra again;
    mov.f32 %f2, 0f40000000;
done:
    st.global.f32 [%rd1+4], %f2;
    ret;
}

// out[0] = 1 at once; when the kernel before has ended, out[2] = out[1].
.visible .entry tell(.param .u64 out) {
    .reg .f32 %f<3>; .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [out]; mov.f32 %f1, 0f3F800000; st.relaxed.gpu.global.f32 [%rd1], %f1;
    griddepcontrol.wait;
    ld.relaxed.gpu.global.f32 %f2, [%rd1+4]; st.global.f32 [%rd1+8], %f2;
    ret;
}
"""


@pytest.fixture
def hopper(device: CudaDevice) -> CudaDevice:
    if device.capability < (9, 0):
        pytest.skip(f"{device.label} has compute capability {device.capability[0]}.{device.capability[1]}, not 9.0")
    return device


def boxes(values: np.ndarray, box: tuple[int, int], grid: tuple[int, int]) -> np.ndarray:
    """What `copy_box` must write: every box row by row, with zeros outside the array."""
    padded = np.zeros((grid[0] * box[0], grid[1] * box[1]), values.dtype)
    inside = tuple(slice(0, min(a, b)) for a, b in zip(padded.shape, values.shape))
    padded[inside] = values[inside]
    return padded.reshape(grid[0], box[0], grid[1], box[1]).transpose(0, 2, 1, 3).reshape(grid[0] * grid[1], -1)


def copy_boxes(hopper: CudaDevice, values: DeviceArray, box: tuple[int, int], swizzle: int, grid: tuple[int, int]) -> np.ndarray:
    rows, cols, pitch = (Size.of(name) for name in ("rows", "cols", "pitch"))
    x = ArrayParam("x", values.dtype, (rows, cols), (pitch, ONE), "input", 16)
    out = ArrayParam("out", dtypes.f32, (rows,), (ONE,), "output")
    launch = Launch(
        "copy_box", ("out",), ("width", "height"), (Size.of("across"), Size.of("down")), 128,
        maps=(MapParam("x", values.dtype, (rows, cols), (pitch, ONE), box, swizzle),),
    )  # fmt: skip
    loaded = hopper.load(Artifact("boxes", "sm_90", "ptx", HOPPER_PTX.encode(), (x,), (out,), (), (launch,), (), ()))
    sizes = {
        "rows": values.shape[0], "cols": values.shape[1], "pitch": values.strides[0], "height": box[0], "width": box[1],
        "down": grid[0], "across": grid[1],
    }  # fmt: skip
    target = hopper.from_numpy(np.full((grid[0] * grid[1], 128), np.nan, np.float32))
    for _ in range(2):  # the second call finds its map encoded
        loaded.run({"x": values, "out": target}, {}, sizes)
    return target.numpy().view(values.dtype.numpy)


@pytest.mark.parametrize(
    ("dtype", "box"),
    [(dtypes.f32, (4, 32)), (dtypes.bf16, (4, 64)), (dtypes.f16, (8, 32)), (dtypes.f8e4m3, (4, 128)), (dtypes.i8, (4, 128)),
     (dtypes.i32, (16, 8)), (dtypes.u32, (4, 32)), (dtypes.f64, (4, 16)), (dtypes.u16, (4, 64)), (dtypes.i64, (4, 16)),
     (dtypes.f8e5m2, (2, 256)), (dtypes.u64, (32, 2))],
    ids=str,
)  # fmt: skip
def test_tensor_maps(hopper: CudaDevice, dtype: dtypes.DType, box: tuple[int, int]) -> None:
    """Rows and columns that boxes do not divide, and rows further apart than they are long."""
    generator = np.random.default_rng(5)
    whole = generator.integers(0, 16, (2 * box[0] + 1, 3 * box[1] + 16)).astype(dtype.numpy)
    values = hopper.from_numpy(whole)[:, : 2 * box[1] + 3]
    found = copy_boxes(hopper, values, box, 0, (3, 3))
    np.testing.assert_array_equal(found, boxes(values.numpy(), box, (3, 3)))


@pytest.mark.parametrize(("swizzle", "box"), [(128, (4, 32)), (64, (8, 16)), (32, (16, 8))])
def test_swizzled_maps(hopper: CudaDevice, swizzle: int, box: tuple[int, int]) -> None:
    values = random(8 * box[0] * box[1]).reshape(2 * box[0], 4 * box[1])
    found = copy_boxes(hopper, hopper.from_numpy(values), box, swizzle, (2, 4))
    place = np.arange(512)
    lies = (place ^ ((place >> 3) & (swizzle - 16)))[::4] // 4
    np.testing.assert_array_equal(found[:, lies], boxes(values, box, (2, 4)))


@pytest.mark.parametrize(
    ("window", "stride", "pad", "dilation"),
    [((3, 3), (1, 1), (0, 0), (1, 1)), ((3, 3), (1, 1), (1, 1), (1, 1)), ((3, 3), (2, 2), (1, 1), (1, 1)),
     ((1, 5), (3, 1), (0, 2), (1, 1)), ((3, 2), (1, 2), (2, 1), (2, 3)), ((2, 2), (1, 1), (4, 5), (1, 1))],
)  # fmt: skip
def test_maps_of_images(
    hopper: CudaDevice, window: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int], dilation: tuple[int, int]
) -> None:
    """Every element of a filter sees what padding and slicing the images gives, across rows and images; zeros after the last."""
    images, channels, extents = 3, 20, (13, 10)
    values = random(images * extents[0] * extents[1] * channels).reshape(images, *extents, channels)
    upper = tuple(p - (k - 1) * d for p, k, d in zip(pad, window, dilation))
    height, width = ((e + p + u - 1) // s + 1 for e, p, u, s in zip(extents, pad, upper, stride))
    shape = tuple(Size.of(extent) for extent in values.shape)
    strides = tuple(Size.of(step // 4) for step in values.strides)
    lower = tuple(Size.of(-p) for p in pad)
    map_ = MapParam("x", dtypes.f32, shape, strides, (1, 1, 1, 8), 0, 16, lower, tuple(Size.of(u) for u in upper), stride)
    names = ("image", "row", "column", "channel", "down", "across")
    loaded = hopper.load(program(Launch("copy_pixels", ("out",), names, (ONE,), 128, maps=(map_,)), code=HOPPER_PTX))
    source, target = hopper.from_numpy(values), hopper.from_numpy(np.full((16, 8), np.nan, np.float32))
    padded = np.pad(values, ((0, 0), (pad[0], pad[0]), (pad[1], pad[1]), (0, 4)))
    for r, s in {(0, 0), (window[0] - 1, window[1] - 1), (0, window[1] - 1), (window[0] - 1, 0)}:
        down, across = r * dilation[0], s * dilation[1]
        seen = padded[:, down :: stride[0], across :: stride[1]][:, :height, :width].reshape(-1, channels + 4)
        seen = np.concatenate([seen, np.zeros((32, channels + 4), np.float32)])
        for first in range(0, images * height * width, 16):
            p, q = first // width % height, first % width
            at = (first // (height * width), p * stride[0] - pad[0], q * stride[1] - pad[1])
            for channel in (0, 16):
                loaded.run({"x": source, "out": target}, NUMBERS, dict(zip(names, (*at, channel, down, across))))
                np.testing.assert_array_equal(target.numpy(), seen[first : first + 16, channel : channel + 8])


def test_map_of_a_single_row(hopper: CudaDevice) -> None:
    """Its rows are 7 elements apart, which no map could have."""
    values = random(64).reshape(1, 64)
    kept = hopper.from_numpy(values)
    odd = DeviceArray(hopper, kept.pointer, (1, 64), dtypes.f32, (7, 1), kept.owner)
    np.testing.assert_array_equal(copy_boxes(hopper, odd, (4, 32), 0, (1, 2)), boxes(values, (4, 32), (1, 2)))


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_map_of_nothing(hopper: CudaDevice, rank: int) -> None:
    """The driver takes it, and a kernel that copies nothing by it runs."""
    shape, strides = (*[N] * (rank - 1), Size.of(0)), (*[Size.of(0)] * (rank - 1), ONE)
    map_ = MapParam("x", dtypes.f32, shape, strides, (*[4] * (rank - 1), 32), 128)
    loaded = hopper.load(program(Launch("count_blocks", ("out",), (), (N,), 1, maps=(map_,))))
    out = hopper.from_numpy(np.zeros(1, np.float32))
    loaded.run({"x": 0, "out": out}, NUMBERS, {"n": 3})
    assert out.numpy()[0] == 3


def test_clusters(hopper: CudaDevice) -> None:
    loaded = hopper.load(program(Launch("cluster_rank", ("out",), (), (N,), 32, cluster=2), code=HOPPER_PTX))
    out = hopper.from_numpy(np.zeros(6, np.float32))
    loaded.run({"x": 0, "out": out}, NUMBERS, {"n": 6})
    assert out.numpy().tolist() == [20, 21, 20, 21, 20, 21]
    with pytest.raises(TargetLimit, match="5 blocks along x, which clusters of 2 do not divide"):
        loaded.run({"x": 0, "out": out}, NUMBERS, {"n": 5})


@pytest.mark.parametrize("dependent", [True, False])
@pytest.mark.parametrize("own_stream", [True, False])
def test_dependent_launches_start_early(hopper: CudaDevice, dependent: bool, own_stream: bool) -> None:
    stream = hopper.create_stream() if own_stream else 0
    first, second = Launch("wait_for_next", ("out",), (), (ONE,), 1), Launch("tell", ("out",), (), (ONE,), 1)
    loaded = hopper.load(program(first, replace(second, dependent=dependent), code=HOPPER_PTX))
    # The first use of a kernel may have the driver wait for what runs.
    loaded.run({"x": 0, "out": hopper.empty((3,), dtypes.f32, stream)}, NUMBERS, {"n": 0}, stream)
    for _ in range(3):
        out = hopper.from_numpy(np.zeros(3, np.float32), stream=stream)
        loaded.run({"x": 0, "out": out}, NUMBERS, {"n": 0}, stream)
        told = 1 if dependent else 2
        assert out.numpy().tolist() == [1, told, told]
    if own_stream:
        hopper.destroy_stream(stream)


def test_launch_with_maps_is_quick(hopper: CudaDevice) -> None:
    values = hopper.from_numpy(random(1024).reshape(32, 32))
    launch = Launch(
        "copy_box", ("out",), ("n", "n"), (ONE,), 128,
        maps=(MapParam("x", dtypes.f32, (Size.of(32), Size.of(32)), (Size.of(32), ONE), (4, 32), 128),),
    )  # fmt: skip
    out = hopper.empty((128,), dtypes.f32)
    for rule in (launch, replace(launch, dependent=True)):
        loaded = hopper.load(program(rule, code=HOPPER_PTX))
        best = 1.0
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(100):
                loaded.run({"x": values, "out": out}, NUMBERS, {"n": 0})
            best = min(best, (time.perf_counter() - start) / 100)
            hopper.synchronize()
        print(f"launch with a map{', dependent' if rule.dependent else ''}: {best * 1e6:.2f} us")
        assert best < 40e-6


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
    assert "which was forked from one that used CUDA" in text


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
