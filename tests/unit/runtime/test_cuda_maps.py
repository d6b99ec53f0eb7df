"""Kernels with tensor maps, clusters, much shared memory and early starts, on a fake driver."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace

import pytest
from fake_cuda import FakeCuda

from tilewright.base import dtypes
from tilewright.base.artifact import ArrayParam, Artifact, Launch, MapParam, SizeBinding
from tilewright.base.errors import CompilerBug, DeviceError, TargetLimit
from tilewright.base.sizes import ONE, Size, ceildiv
from tilewright.runtime.cuda import program as cuda_program
from tilewright.runtime.cuda.device import CudaDevice
from tilewright.runtime.cuda.driver import Driver
from tilewright.runtime.cuda.tensor_maps import MapForm, check_map, map_form

M, N, K = Size.of("m"), Size.of("n"), Size.of("k")
A = ArrayParam("a", dtypes.bf16, (M, K), (K, ONE), "input", 16)
OUT = ArrayParam("out", dtypes.bf16, (M, N), (N, ONE), "output", 16)
MAP_A = MapParam("a", dtypes.bf16, (M, K), (K, ONE), (128, 64), 128)
MAP_OUT = MapParam("out", dtypes.bf16, (M, N), (N, ONE), (64, 64), 128)
MATMUL = Launch("matmul", ("out",), ("k",), (ceildiv(M, 128),), 384, 200_000, maps=(MAP_A, MAP_OUT))
SIZES = {"m": 256, "n": 128, "k": 512}


def program(*launches: Launch, scratch: tuple[ArrayParam, ...] = ()) -> Artifact:
    bindings = (SizeBinding("m", "a", 0), SizeBinding("k", "a", 1))
    return Artifact("test", "sm_90a", "ptx", b".version 8.3", (A,), (OUT,), scratch, launches, bindings, ())


class Seen:
    """A kernel that notes its parameters: address of `out`, k, then address and number of each map."""

    def __init__(self, maps: int = 2) -> None:
        self.maps = maps
        self.calls: list[list[int]] = []

    def __call__(self, table: int, grid: tuple[int, int, int]) -> None:
        pointers = (ctypes.c_uint64 * (2 + self.maps)).from_address(table)
        values = [ctypes.c_uint64.from_address(pointer).value for pointer in pointers[:2]]
        for pointer in pointers[2:]:
            assert pointer % 64 == 0
            values += (ctypes.c_uint64 * 2).from_address(pointer)
        self.calls.append(values)


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(fake: FakeCuda) -> CudaDevice:
    return CudaDevice(Driver(fake), 0)


# -- the form of a map ----------------------------------------------------------------------------------------------


def test_form_has_the_innermost_axis_first_and_strides_in_bytes() -> None:
    deep = MapParam("x", dtypes.f32, (M, N, K), (K * N, K, ONE), (1, 8, 32))
    assert map_form(deep, {"m": 3, "n": 5, "k": 64}) == MapForm((64, 5, 3), (256, 1280), (32, 8, 1), False)
    flat = MapParam("x", dtypes.u8, (K,), (ONE,), (64,))
    assert map_form(flat, {"k": 100}) == MapForm((100,), (), (64,), False)


def test_unused_strides_become_legal() -> None:
    assert map_form(MAP_A, {"m": 1, "k": 17}).strides == (48,)
    deep = MapParam("x", dtypes.bf16, (M, N, K), (Size.of(3), Size.of(-1), ONE), (1, 1, 8))
    assert map_form(deep, {"m": 1, "n": 1, "k": 8}).strides == (16, 16)
    with pytest.raises(CompilerBug, match="a stride of -2 bytes"):
        map_form(deep, {"m": 1, "n": 2, "k": 8})


@pytest.mark.parametrize("sizes", [{"m": 128, "k": 0}, {"m": 0, "k": 64}, {"m": 0, "k": 0}])
def test_an_empty_array_is_described_as_one_element(sizes: dict[str, int]) -> None:
    assert map_form(MAP_A, sizes) == MapForm((1, 1), (16,), (64, 128), True)


def test_broken_promises_are_compiler_bugs() -> None:
    with pytest.raises(CompilerBug, match=r"TW040.*'a', \[2, 12\] of bf16 with strides \[12, 1\]: a stride of 24 bytes"):
        map_form(MAP_A, {"m": 2, "k": 12})
    with pytest.raises(CompilerBug, match="the last axis is not dense"):
        map_form(replace(MAP_A, strides=(ONE, M)), {"m": 16, "k": 16})
    with pytest.raises(TargetLimit, match=r"TW020.*no extent may exceed 4294967296"):
        map_form(MAP_A, {"m": 8, "k": 2**32 + 8})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": dtypes.q4_0}, "does not know q4_0"),
        ({"box": (64,)}, "2 extents, 2 strides and a box of 1 axes"),
        ({"shape": (), "strides": (), "box": ()}, "0 extents"),
        ({"shape": (ONE,) * 6, "strides": (ONE,) * 6, "box": (8,) * 6}, "6 extents"),
        ({"box": (512, 64)}, r"the box \(512, 64\)"),
        ({"box": (0, 64)}, r"the box \(0, 64\)"),
        ({"box": (64, 12)}, r"the box \(64, 12\)"),
        ({"box": (64, 128)}, "rows of 256 bytes cannot be swizzled by 128"),
        ({"swizzle": 16}, "cannot be swizzled by 16"),
        ({"rounds": True}, "bf16 cannot be rounded to tf32"),
    ],
)
def test_wrong_maps_are_found_at_load(device: CudaDevice, change: dict[str, object], message: str) -> None:
    check_map(MAP_A, "matmul")
    wrong = replace(MAP_A, **change)  # type: ignore[arg-type]
    with pytest.raises(CompilerBug, match=f"TW040.*'matmul', map of 'a': .*{message}"):
        device.load(program(replace(MATMUL, maps=(wrong,))))


def test_map_of_an_unknown_array(device: CudaDevice) -> None:
    with pytest.raises(CompilerBug, match=r"takes \['b'\], which 'test' lacks"):
        device.load(program(replace(MATMUL, maps=(replace(MAP_A, array="b"),))))


# -- images ---------------------------------------------------------------------------------------------------------

PAD = Size.of("pad")
H, W, C = Size.of("h"), Size.of("w"), Size.of("c")
IMAGES = MapParam(
    "a", dtypes.bf16, (N, H, W, C), (H * W * C, W * C, C, ONE), (1, 1, 1, 64), 128, 96, lower=(ONE * -1, PAD * -1),
    upper=(ONE * -1, PAD - 4), steps=(1, 2),
)  # fmt: skip
IMAGE_SIZES = {"n": 2, "h": 20, "w": 30, "c": 72, "pad": 3, "m": 1}


def image_program(map_: MapParam = IMAGES) -> Artifact:
    a = ArrayParam("a", dtypes.bf16, IMAGES.shape, IMAGES.strides, "input", 16)
    bindings = tuple(SizeBinding(name, "a", axis) for axis, name in enumerate("nhwc"))
    launch = Launch("convolve", ("out",), ("c",), (ONE,), 128, maps=(map_,))
    return Artifact("test", "sm_90a", "ptx", b".version 8.3", (a,), (OUT,), (), (launch,), bindings, ())


def test_form_of_images() -> None:
    form = map_form(IMAGES, IMAGE_SIZES)
    assert form == MapForm((72, 30, 20, 2), (144, 4320, 86400), (64, 1, 1, 1), False, (-3, -1), (-1, -1), (1, 2, 1, 1))
    nothing = MapForm((1,) * 4, (16,) * 3, (64, 1, 1, 1), True, (0, 0), (0, 0), (1,) * 4)
    assert map_form(IMAGES, {**IMAGE_SIZES, "n": 0}) == nothing


def test_form_of_images_with_planes() -> None:
    """Five axes: corners reach less far."""
    deep = MapParam(
        "a", dtypes.bf16, (N, H, H, W, C), (H * H * W * C, H * W * C, W * C, C, ONE), (1, 1, 1, 1, 64), 128, 96, lower=(ONE, ONE * -1, PAD * -1),
        upper=(ONE * -2, ONE * -1, PAD - 4), steps=(2, 1, 2),
    )  # fmt: skip
    form = map_form(deep, IMAGE_SIZES)
    assert (form.lower, form.upper, form.steps) == ((-3, -1, 1), (-1, -1, -2), (1, 2, 1, 2, 1))
    with pytest.raises(TargetLimit, match="between -16 and 15"):
        map_form(deep, {**IMAGE_SIZES, "pad": 17})


def test_images_whose_positions_no_map_has() -> None:
    assert map_form(IMAGES, {**IMAGE_SIZES, "pad": 128}).lower == (-128, -1)
    with pytest.raises(TargetLimit, match=r"TW020.*'a' .* image .* start at \[-1, -129\] and end at \[-1, 125\] .* -128 and 127"):
        map_form(IMAGES, {**IMAGE_SIZES, "pad": 129})
    assert map_form(IMAGES, {**IMAGE_SIZES, "w": 5, "pad": 0}).upper == (-4, -1)
    with pytest.raises(CompilerBug, match=r"TW040.*'a', \[2, 20, 4, 72\]: .* no positions that start at \[-1, 0\] and end at \[-1, -4\]"):
        map_form(IMAGES, {**IMAGE_SIZES, "w": 4, "pad": 0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixels": 0}, "it has corners or steps but no pixels"),
        ({"pixels": 1025}, "1025 pixels with the box"),
        ({"pixels": -1}, "-1 pixels with the box"),
        ({"box": (1, 1, 2, 64)}, r"96 pixels with the box \(1, 1, 2, 64\)"),
        ({"box": (1, 1, 1, 264), "swizzle": 0}, r"the box \(1, 1, 1, 264\)"),
        ({"lower": (ONE,)}, "are not 2 of each"),
        ({"steps": (1, 9)}, "steps of 1 to 8"),
    ],
)
def test_wrong_pixels_are_found_at_load(device: CudaDevice, change: dict[str, object], message: str) -> None:
    device.load(image_program())
    with pytest.raises(CompilerBug, match=f"TW040.*'convolve', map of 'a': .*{message}"):
        device.load(image_program(replace(IMAGES, **change)))  # type: ignore[arg-type]


def test_maps_of_images_follow_the_sizes(device: CudaDevice, fake: FakeCuda) -> None:
    seen = fake.kernels["convolve"] = Seen(1)
    loaded = device.load(image_program())
    for _ in range(2):
        for pad in (3, 2):  # named in the corners only
            loaded.run({"a": 0x1000, "out": 0x2000}, {}, {**IMAGE_SIZES, "pad": pad})
    assert [call[2:] for call in seen.calls] == [[0x1000, 1001], [0x1000, 1002]] * 2
    first, second = fake.calls("cuTensorMapEncodeIm2col")
    assert first == (
        "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 4, 0x1000, [72, 30, 20, 2], [144, 4320, 86400], [-3, -1], [-1, -1], 64, 96, [1, 2, 1, 1],
        "CU_TENSOR_MAP_INTERLEAVE_NONE", "CU_TENSOR_MAP_SWIZZLE_128B", "CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    )  # fmt: skip
    assert second[5:7] == ([-2, -1], [-2, -1])
    assert fake.calls("cuTensorMapEncodeTiled") == []


def test_refused_map_of_images(device: CudaDevice, fake: FakeCuda) -> None:
    fake.fail["cuTensorMapEncodeIm2col"] = 1
    with pytest.raises(DeviceError, match=r"cuTensorMapEncodeIm2col failed .* map of 'a' at 0x1000, bf16.*lower=\(-3, -1\).* 96 pixels"):
        device.load(image_program()).run({"a": 0x1000, "out": 0x2000}, {}, IMAGE_SIZES)


# -- running --------------------------------------------------------------------------------------------------------


def test_maps_follow_the_sizes(device: CudaDevice, fake: FakeCuda) -> None:
    seen = fake.kernels["matmul"] = Seen()
    device.load(program(MATMUL)).run({"a": 0x1000, "out": 0x2000}, {}, SIZES)
    assert seen.calls == [[0x2000, 512, 0x1000, 1, 0x2000, 2]]
    assert fake.calls("cuTensorMapEncodeTiled") == [
        ("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 2, 0x1000, [512, 256], [1024], [64, 128], [1, 1], "CU_TENSOR_MAP_INTERLEAVE_NONE",
         "CU_TENSOR_MAP_SWIZZLE_128B", "CU_TENSOR_MAP_L2_PROMOTION_L2_128B", "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"),
        ("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 2, 0x2000, [128, 256], [256], [64, 64], [1, 1], "CU_TENSOR_MAP_INTERLEAVE_NONE",
         "CU_TENSOR_MAP_SWIZZLE_128B", "CU_TENSOR_MAP_L2_PROMOTION_L2_128B", "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"),
    ]  # fmt: skip


def test_maps_are_encoded_once_per_addresses_and_sizes(device: CudaDevice, fake: FakeCuda) -> None:
    seen = fake.kernels["matmul"] = Seen()
    loaded = device.load(program(MATMUL))
    for _ in range(2):
        loaded.run({"a": 0x1000, "out": 0x2000}, {}, SIZES)
        loaded.run({"a": 0x3000, "out": 0x2000}, {}, SIZES)
        loaded.run({"a": 0x1000, "out": 0x2000}, {}, {**SIZES, "n": 64})
    first, second = seen.calls[:3], seen.calls[3:]
    assert first == second
    assert [call[2] for call in first] == [0x1000, 0x3000, 0x1000]
    assert [call[3] for call in first] == [1, 3, 5]
    assert len(fake.calls("cuTensorMapEncodeTiled")) == 6


def test_few_encoded_maps_are_kept(device: CudaDevice, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_program, "_BOUND_KEPT", 4)
    seen = fake.kernels["matmul"] = Seen()
    loaded = device.load(program(MATMUL))
    for address in (*range(16, 112, 16), 96, 16):
        loaded.run({"a": address, "out": 0x2000}, {}, SIZES)
        assert seen.calls[-1][2] == address
        assert len(loaded._bound) <= 4
    assert len(fake.calls("cuTensorMapEncodeTiled")) == 2 * 7


def test_maps_of_scratch_and_launches_without_maps(device: CudaDevice, fake: FakeCuda) -> None:
    middle = ArrayParam("middle", dtypes.bf16, (M, K), (K, ONE), "scratch", 16)
    seen = fake.kernels["matmul"] = Seen()
    plain = fake.kernels["plain"] = Seen(0)
    launches = (Launch("plain", ("middle",), ("k",), (ONE,)), replace(MATMUL, maps=(replace(MAP_A, array="middle"), MAP_OUT)))
    loaded = device.load(program(*launches, scratch=(middle,)))
    for _ in range(2):
        loaded.run({"a": 0x1000, "out": 0x2000}, {}, SIZES)
    assert plain.calls[0] == plain.calls[1]
    assert [call[2] for call in seen.calls] == [call[0] for call in plain.calls]
    assert len(fake.calls("cuTensorMapEncodeTiled")) == 2


def test_empty_arrays(device: CudaDevice, fake: FakeCuda) -> None:
    loaded = device.load(program(MATMUL))
    loaded.run({"a": 0, "out": 0x2000}, {}, {**SIZES, "m": 0})
    assert fake.calls("cuTensorMapEncodeTiled") == fake.calls("cuLaunchKernel") == []
    loaded.run({"a": 0, "out": 0x2000}, {}, {**SIZES, "k": 0})
    (empty, _) = fake.calls("cuTensorMapEncodeTiled")
    assert empty[3:5] == ([1, 1], [16])
    assert len(fake.calls("cuLaunchKernel")) == 1


def test_address_that_is_not_aligned(device: CudaDevice, fake: FakeCuda) -> None:
    with pytest.raises(CompilerBug, match=r"TW040.*map of 'a': its address 0x1008 is not a multiple of 16"):
        device.load(program(MATMUL)).run({"a": 0x1008, "out": 0x2000}, {}, SIZES)
    assert fake.calls("cuLaunchKernel") == []


def test_refused_map(device: CudaDevice, fake: FakeCuda) -> None:
    fake.fail["cuTensorMapEncodeTiled"] = 1
    with pytest.raises(DeviceError, match=r"cuTensorMapEncodeTiled failed with CUDA_ERROR_INVALID_VALUE .* map of 'a' at 0x1000, bf16"):
        device.load(program(MATMUL)).run({"a": 0x1000, "out": 0x2000}, {}, SIZES)


def test_threads_do_not_mix_maps(device: CudaDevice, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_program, "_BOUND_KEPT", 2)
    seen = fake.kernels["matmul"] = Seen()
    loaded = device.load(program(MATMUL))

    def work(number: int) -> None:
        for _ in range(50):
            loaded.run({"a": number << 12, "out": number << 16}, {}, SIZES)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen.calls) == 200
    assert all(call[2] << 4 == call[0] == call[4] for call in seen.calls)


# -- other rules of a launch ----------------------------------------------------------------------------------------


def test_shared_memory_is_asked_for_with_what_the_kernel_has_itself(device: CudaDevice, fake: FakeCuda) -> None:
    name = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    for static, dynamic, asked in ((0, 48 << 10, []), (1024, 48 << 10, [48 << 10]), (0, 227 << 10, [227 << 10])):
        fake.log.clear()
        fake.function_attributes["CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES"] = static
        device.load(program(replace(MATMUL, shared_bytes=dynamic)))
        assert fake.calls("cuFuncSetAttribute") == [("matmul", name, count) for count in asked]
    fake.function_attributes["CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES"] = 16
    with pytest.raises(TargetLimit, match=r"needs 232464 bytes of shared memory per block, but .* has 232448"):
        device.load(program(replace(MATMUL, shared_bytes=227 << 10)))


def test_clusters(device: CudaDevice, fake: FakeCuda) -> None:
    loaded = device.load(program(Launch("pair", ("a",), (), (M,), 128, cluster=2)))
    loaded.run({"a": 1, "out": 2}, {}, {**SIZES, "m": 6})
    assert [call[1:4] for call in fake.calls("cuLaunchKernel")] == [(6, 1, 1)]
    with pytest.raises(TargetLimit, match=r"TW020.*'pair' has 7 blocks along x, which clusters of 2 do not divide"):
        loaded.run({"a": 1, "out": 2}, {}, {**SIZES, "m": 7})
    assert fake.calls("cuFuncSetAttribute") == []
    device.load(program(Launch("many", ("a",), (), (M,), 128, cluster=16)))
    assert fake.calls("cuFuncSetAttribute") == [("many", "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)]


def test_failed_launch_tells_of_clusters(device: CudaDevice, fake: FakeCuda) -> None:
    fake.fail["cuLaunchKernel"] = 1
    with pytest.raises(DeviceError, match=r"grid \(6, 1, 1\), 128 threads, 0 bytes shared, clusters of 2"):
        device.load(program(Launch("pair", ("a",), (), (ONE * 6,), 128, cluster=2))).run({"a": 1, "out": 2}, {}, {})


def test_dependent_launches(device: CudaDevice, fake: FakeCuda) -> None:
    seen = fake.kernels["matmul"] = Seen()
    loaded = device.load(program(Launch("plain", ("a",), (), (ONE,)), replace(MATMUL, dependent=True)))
    streams: list[int] = []
    own = device.create_stream()
    for stream in (0, own, own, 0):
        loaded.run({"a": 0x6000 if stream else 0x1000, "out": 0x2000}, {}, SIZES, stream)
        config, *_ = fake.calls("cuLaunchKernelEx")[-1]
        streams.append(config.hStream)  # type: ignore[attr-defined]
    assert streams == [0, own, own, 0]
    assert [call[2] for call in seen.calls] == [0x1000, 0x6000, 0x6000, 0x1000]
    assert len(fake.calls("cuLaunchKernel")) == 4
    assert len({id(call[0]) for call in fake.calls("cuLaunchKernelEx")}) == 1
    (attribute,) = config.attrs  # type: ignore[attr-defined]
    assert attribute.id.name == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    assert attribute.value.programmaticStreamSerializationAllowed == 1
    found = vars(config)
    assert (found["gridDimX"], found["gridDimY"], found["gridDimZ"], found["numAttrs"]) == (2, 1, 1, 1)
    assert (found["blockDimX"], found["blockDimY"], found["blockDimZ"], found["sharedMemBytes"]) == (384, 1, 1, 200_000)
    fake.fail["cuLaunchKernelEx"] = 1
    with pytest.raises(DeviceError, match=r"cuLaunchKernelEx failed with .* kernel 'matmul'"):
        loaded.run({"a": 0x1000, "out": 0x2000}, {}, SIZES)
