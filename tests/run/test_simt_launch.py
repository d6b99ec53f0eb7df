"""Launching explicit kernels: grids and blocks, tails, dynamic shared memory, structs, constant memory, explicit memory, marks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

import tilewright as tw
from null_cuda.install import installed
from tilewright.base.errors import DeviceError, TargetLimit, TilewrightError, UserError

DEVICES = ("emulator", "cpu")


@tw.gpu
def double(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    y[i] = 2 * x[i]


@tw.gpu
def neighbours(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    """Sums of three neighbours, through shared memory: the tail's threads are needed at the barrier."""
    tile = tw.shared(34, tw.f32)
    i, t = tw.gpu_thread_id(), tw.thread.x
    tile[t + 1] = x[i]
    if t == 0:
        tile[0] = x[i - 1] if i > 0 else 0.0
    if t == 31:
        tile[33] = x[i + 1]
    tw.gpu_sync()
    y[i] = tile[t] + tile[t + 1] + tile[t + 2]


@dataclass
class Circle:
    x: tw.f32
    y: tw.f32
    radius: tw.f32


class Weights(NamedTuple):
    values: tw.GpuBuffer[tw.f32]
    scale: float


@tw.gpu
def inside(px: tw.GpuBuffer[tw.f32], py: tw.GpuBuffer[tw.f32], circle: Circle, out: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    moved = Circle(circle.x + 1, circle.y, radius=circle.radius)
    moved.x -= 1
    dx, dy = px[i] - moved.x, py[i] - moved.y
    out[i] = 1 if dx * dx + dy * dy < moved.radius**2 else 0


@tw.gpu
def weighted(x: tw.GpuBuffer[tw.f32], w: Weights):
    i = tw.gpu_thread_id()
    x[i] *= w.values[i] * w.scale


@tw.gpu
def reversed_blocks(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32]):
    own = tw.shared_dynamic(tw.i32)
    t, n = tw.thread.x, tw.block.size.x
    own[t] = x[tw.gpu_thread_id()]
    tw.gpu_sync()
    y[tw.gpu_thread_id()] = own[n - 1 - t] * (1 if len(own) == n else 0)


def table() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(100, dtype=np.float32), np.full(128, -1, np.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [0, 1, 31, 32, 100])
def test_threads_beyond_the_count_do_nothing(device: str, n: int) -> None:
    x, y = table()
    tw.gpu_launch(double, n, 32, x, y, device=device)
    expected = np.full(128, -1, np.float32)
    expected[:n] = 2 * x[:n]
    assert np.array_equal(y, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 40, 64, 70])
def test_the_tail_still_reaches_barriers(device: str, n: int) -> None:
    x, y = np.arange(1, n + 1, dtype=np.float32), np.zeros(n, np.float32)
    tw.gpu_launch(neighbours, n, 32, x, y, device=device) if n % 32 else neighbours.over(n - 1, 32)(x, y, device=device)
    padded = np.concatenate([[0], x, [0]])
    assert np.array_equal(y, padded[:-2] + padded[1:-1] + padded[2:])


def test_inner_threads_are_not_guarded() -> None:
    """Only the tail's accesses outside are left out: others are reported."""
    x, y = np.zeros(40, np.float32), np.zeros(40, np.float32)
    with pytest.raises(TilewrightError, match=r"'x'.*out of bounds|outside"):
        tw.gpu_launch(neighbours, 70, 32, x, y, device="emulator")


@pytest.mark.parametrize("device", DEVICES)
def test_structs(device: str) -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=64).astype(np.float32) for _ in range(2))
    out = np.zeros(64, np.int32)
    inside[2, 32](x, y, Circle(0.25, -0.5, 1.0), out, device=device)
    assert np.array_equal(out, (x - 0.25) ** 2 + (y + 0.5) ** 2 < 1)
    values = x.copy()
    weighted[2, 32](values, Weights(y, 0.5), device=device)
    np.testing.assert_allclose(values, x * y / 2, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_shared_memory(device: str) -> None:
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    reversed_blocks[2, 32, 128](x, y, device=device)
    assert np.array_equal(y, x.reshape(2, 32)[:, ::-1].ravel())


def test_dynamic_shared_memory_of_a_launch_reaches_ptx() -> None:
    x = np.zeros(64, np.int32)
    artifact = reversed_blocks[2, 32, 64 << 10].compile(x, x)
    assert artifact.launches[0].shared_bytes == 64 << 10
    with pytest.raises(TargetLimit, match="300000 bytes of shared memory"):
        reversed_blocks[2, 32, 300000].compile(x, x)


def test_launch_bounds_reach_ptx() -> None:
    @tw.gpu(max_threads=128, min_blocks=4)
    def bounded(x: tw.GpuBuffer[tw.f32]):
        x[tw.gpu_thread_id()] = 0.0

    x = np.zeros(128, np.float32)
    assert ".minnctapersm 4" in bounded[1, 128].compile(x).code.decode()
    assert ".reqntid 64" in bounded[1, 64].compile(x).code.decode()
    with pytest.raises(UserError, match=r"the block of bounded is 256: 256 threads; its max_threads is 128"):
        bounded[1, 256]


LAUNCHES = [
    (lambda: double(np.zeros(1), np.zeros(1)), "TW016", "double is a GPU kernel and needs a grid and a block"),
    (lambda: double[3](np.zeros(1), np.zeros(1)), "TW016", "double[...] takes a grid and a block"),
    (lambda: double[1, 0], "TW009", "the block of double is 0"),
    (lambda: double[1, (32, 32, 2)], "TW020", "the block of double is (32, 32, 2): 2048 threads; a GPU allows 1024"),
    (lambda: double[(1, 2, 3, 4), 32], "TW009", "the grid of double is (1, 2, 3, 4)"),
    (lambda: double["x", 32], "TW009", "the grid of double is 'x'"),
    (lambda: double[1, [32]], "TW009", "the block of double is [32]"),
    (lambda: double[1, 32, -5], "TW009", "the dynamic shared memory of double is -5, not a number of bytes"),
    (lambda: tw.gpu_launch(double, 1.5, 32), "TW009", "double is launched for 1.5 threads"),
    (lambda: tw.gpu_launch(print, 1, 32), "TW009", "gpu_launch was given a builtin_function_or_method"),
    (lambda: double[1, 32](np.zeros(3, np.float32), device="emulator"), "TW008", "double is missing 'y'"),
    (lambda: double[1, 32](1, 2, 3, device="emulator"), "TW016", "double takes 2 argument(s) (x, y), got 3"),
    (lambda: double[1, 32](1, z=3, device="emulator"), "TW016", "double has no argument 'z'"),
    (lambda: double[1, 32](np.zeros(3), np.zeros(3), device="emulator"), "TW009", "'x' holds f32, got an array of f64"),
    (lambda: double[1, 32](1.0, np.zeros(3), device="emulator"), "TW009", "'x' is an array, got 1.0"),
    (
        lambda: double[1, 32](np.zeros((4, 4), np.float32).T, np.zeros(3, np.float32), device="emulator"), "TW009",
        "'x' is a GpuBuffer, but the array of shape [4, 4] has gaps or another order",
    ),
    (lambda: inside[1, 32](1, 2, 3, 4, device="emulator"), "TW009", "'circle' is a Circle, got a int"),
    (lambda: double[1, 32](*[np.broadcast_to(np.float32(1), 32)] * 2, device="emulator"), "TW009", "gaps or another order"),
    (lambda: reversed_blocks[1, 32](*[np.zeros(32, np.int32)] * 2, device="emulator"), "TW016", "the launch gives 0 bytes of dynamic shared memory"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(LAUNCHES)))
def test_bad_launches(number: int) -> None:
    launch, code, text = LAUNCHES[number]
    with pytest.raises(UserError, match=re.escape(text)) as caught:
        launch()
    assert caught.value.code == code


def test_a_read_only_array_cannot_be_written() -> None:
    y = np.zeros(32, np.float32)
    y.flags.writeable = False
    with pytest.raises(UserError, match="'y' is read-only, but double writes to it"):
        double[1, 32](np.zeros(32, np.float32), y, device="emulator")


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_that_are_not_plain_are_written_in_place(device: str) -> None:
    @tw.gpu
    def fill(out: tw.Array):
        out[tw.grid.y, tw.grid.x] = 10 * tw.grid.y + tw.grid.x

    whole = np.zeros((8, 8), np.int32)
    fill[1, (4, 4)](whole[::2, ::2], device=device)
    assert np.array_equal(whole[::2, ::2], 10 * np.arange(4)[:, None] + np.arange(4)) and not whole[1::2].any()
    records = np.zeros((4, 4), np.dtype([("a", np.int8), ("b", np.int32)], align=False))
    fill[1, (4, 4)](records["b"], device=device)
    assert np.array_equal(records["b"], whole[::2, ::2])


# -- explicit memory --------------------------------------------------------------------------------------------------


def test_explicit_memory_on_a_gpu() -> None:
    with installed() as driver:
        x = np.arange(100, dtype=np.float32)
        a, b = tw.gpu_alloc(100), tw.gpu_alloc(100, tw.f32)
        tw.gpu_copy_to(a, x)
        tw.gpu_launch(double, 100, 32, a, b)
        tw.gpu_sync()
        back = np.zeros(100, np.float32)
        tw.gpu_copy_from(b, back)
        assert np.array_equal(back, 2 * x)
        tw.gpu_free(a)
        here = r"test_simt_launch\.py:\d+"
        with pytest.raises(DeviceError, match=rf"gpu_free: the buffer f32\[100\] on cuda:0, allocated at .*{here}, was freed before, at .*{here}"):
            tw.gpu_free(a)
        with pytest.raises(DeviceError, match=rf"was used after it was freed \(allocated at .*{here}, freed at .*{here}\)"):
            double[4, 25](a, b)
        with pytest.raises(UserError, match=rf"gpu_copy_to: the buffer f32\[100\] on cuda:0, allocated at .*{here}, has 100 elements, the host array 99"):
            tw.gpu_copy_to(b, x[:99])
        with pytest.raises(UserError, match=rf"gpu_copy_from: the buffer .*{here}, holds f32, the host array float64"):
            tw.gpu_copy_from(b, np.zeros(100))
        with pytest.raises(DeviceError, match=rf"1 buffer of gpu_alloc was not freed:\n  f32\[100\] on cuda:0 \(400 bytes\), allocated at .*{here}"):
            tw.gpu_check_leaks()
        tw.gpu_free(b)
        tw.gpu_check_leaks()
    assert not driver.violations


def test_explicit_memory_without_a_gpu() -> None:
    a, b = tw.gpu_alloc(64, tw.f32, device="cpu"), tw.gpu_alloc(64, tw.f32, device="cpu")
    tw.gpu_copy_to(a, np.arange(64, dtype=np.float32))
    double[2, 32](a, b, device="emulator")
    out = np.zeros(64, np.float32)
    tw.gpu_copy_from(b, out)
    assert np.array_equal(out, 2 * np.arange(64))
    tw.gpu_free(a)
    with pytest.raises(DeviceError, match="was used after it was freed at"):
        double[2, 32](a, b, device="emulator")
    with pytest.raises(UserError, match="gpu_free was given a ndarray that gpu_alloc did not make"):
        tw.gpu_free(out)
    tw.gpu_free(b)
    tw.gpu_check_leaks()


# -- marks ------------------------------------------------------------------------------------------------------------


def test_alternatives_for_targets() -> None:
    @tw.target(gpu="nvidia")
    def here(v):
        return v + 1

    @tw.target(cpu=True)
    def here(v):  # noqa: F811
        return v + 2

    @tw.gpu
    def use(x: tw.GpuBuffer[tw.f32]):
        x[tw.gpu_thread_id()] = here(0.0)

    found = {}
    for device in DEVICES:
        x = np.zeros(4, np.float32)
        use[1, 4](x, device=device)
        found[device] = x[0]
    assert found == {"emulator": 1, "cpu": 2}


def test_a_missing_alternative_is_an_error() -> None:
    @tw.target(gpu="amd")
    @tw.gpu
    def only_amd(x: tw.GpuBuffer[tw.f32]):
        x[tw.gpu_thread_id()] = 1.0

    with pytest.raises(TargetLimit, match="'only_amd' is defined for amd, but not for nvidia"):
        only_amd[1, 4](np.zeros(4, np.float32), device="emulator")


def test_marks_are_checked() -> None:
    @tw.gpu_compute
    def on_gpu(x: tw.GpuBuffer[tw.f32]):
        x[tw.gpu_thread_id()] = 1.0

    with pytest.raises(DeviceError, match=r"on_gpu is marked @tw.gpu_compute, and the launch would run on 'cpu'"):
        on_gpu[1, 4](np.zeros(4, np.float32), device="cpu")
    on_gpu[1, 4](np.zeros(4, np.float32), device="emulator")

    @tw.vectorizable
    @tw.gpu
    def apart(x: tw.GpuBuffer[tw.f32]):
        x[tw.gpu_thread_id()] = 1.0
        tw.gpu_sync()

    with pytest.raises(UserError, match=r"apart is marked @tw.vectorizable, but its threads meet in 'barrier'"):
        apart[1, 4](np.zeros(4, np.float32), device="emulator")


@pytest.mark.requires("ptxas")
def test_occupancy() -> None:
    found = tw.occupancy(double, 256, device="sm_90a")
    assert (found.blocks, found.warps, found.fraction) == (8, 64, 1.0)
    assert tw.occupancy(double, 32, device="sm_90a").limits == ("blocks",)
    assert tw.best_block(double, device="sm_90a") == 256
    with pytest.raises(UserError, match="occupancy of weighted: the annotation of 'w' does not say its type"):
        tw.occupancy(weighted, 32, device="sm_90a")


def test_graphs_streams_and_profiles() -> None:
    @tw.gpu
    def scale(a: tw.f32, x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
        y[tw.gpu_thread_id()] = a * x[tw.gpu_thread_id()]

    with installed() as driver:
        x = np.arange(32, dtype=np.float32)
        own, out = tw.to_device(x, "cuda"), tw.to_device(x, "cuda")
        scale[1, 32](3.0, own, out)
        with tw.capture("cuda") as graph:
            scale[1, 32](2.0, own, out)
        out.fill(0)
        graph.replay()
        assert np.array_equal(out.numpy(), 2 * x)
        stream = tw.Stream("cuda:0")
        scale[1, 32, 0, stream](5.0, own, out)
        stream.synchronize()
        assert np.array_equal(out.numpy(), 5 * x)
        with tw.profile() as found:
            scale[1, 32](4.0, own, out)
        (row,) = found.rows()
        assert (row.name, row.device, row.calls, row.launches) == ("scale", "cuda:0", 1, 1)
    assert not driver.violations


def test_launches_are_repeated_by_machine_code() -> None:
    @tw.gpu
    def scale(a: tw.f32, x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
        y[tw.gpu_thread_id()] = a * x[tw.gpu_thread_id()]

    with installed() as driver:
        x = np.arange(64, dtype=np.float32)
        own, out = tw.to_device(x, "cuda"), tw.to_device(x, "cuda")
        launch = scale[2, 32]
        for a in (1.0, 2.0, 3):
            launch(a, own, out)
            assert np.array_equal(out.numpy(), a * x)
        assert type(launch.entry).__name__ == "builtin_function_or_method"
        # The same grid by its count is a launch of its own, and learns as well.
        for n in (64, 50):
            other = scale.over(n, 32)
            other(2.0, own, out)
            assert type(other.entry).__name__ == "builtin_function_or_method"
            tw.gpu_launch(scale, n, 32, 3.0, own, out)
            assert np.array_equal(out.numpy()[:n], 3 * x[:n])
        # What machine code may not take: overlapping arrays, other sizes, keywords, NumPy numbers, freed memory.
        launch(2.0, out, out)
        assert np.array_equal(out.numpy(), 6 * x)
        launch(np.float32(0.5), own, y=out)
        assert np.array_equal(out.numpy(), x / 2)
        launch(np.float32(4), own, out)
        launch(np.float32(8), own, out)
        assert np.array_equal(out.numpy(), 8 * x)
        with pytest.raises(UserError, match="'y' holds f32, got an array of f64"):
            launch(1.0, own, tw.to_device(x.astype(np.float64), "cuda"))
        own.free()
        with pytest.raises(DeviceError, match="was used after it was freed"):
            launch(1.0, own, out)
    assert not driver.violations


def test_host_arrays_that_overlap_on_a_gpu() -> None:
    with installed():
        x = np.arange(64, dtype=np.float32)
        double[2, 32](x, x)
        assert np.array_equal(x, 2 * np.arange(64))
        with pytest.raises(UserError, match="'x' and 'y' overlap in part and double writes to them"):
            double[1, 32](x[:40], x[8:48])

        @tw.gpu
        def twice(x: tw.Array, y: tw.Array):
            y[tw.gpu_thread_id()] = 2 * x[tw.gpu_thread_id()]

        twice[1, 32](x[::2], x[1::2])
        assert np.array_equal(x[1::2], 2 * x[::2])
