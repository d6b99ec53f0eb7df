"""Barriers of the grid and kernels in one launch on a real GPU. Skipped without one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from bench import grid_kernels

import tilewright as tw
from tilewright.base.dtypes import f32
from tilewright.base.errors import TargetLimit
from tilewright.base.sizes import Size
from tilewright.compile.build import build_artifact
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Stage, Value
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.ir.verify import verify_program
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.cuda.device import CudaDevice

pytestmark = pytest.mark.requires("cuda")
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
THREADS = 128


@pytest.fixture
def gpu() -> CudaDevice:
    return cuda.devices()[0]


def handing_on(blocks: int, rounds: int) -> Program:
    """Each block takes over what the next one has, and adds one, so many times."""
    x, out = Value(tensor(f32, blocks * THREADS), "x"), Value(tensor(f32, blocks * THREADS), "out")
    b = Builder()
    thread, block = b.op("thread_id"), b.op("program_id", axis=0)
    width, one = b.index(THREADS), b.index(1)
    own = b.add(b.mul(block, width), thread)
    following = b.op("mod", b.add(block, one), b.op("grid_size", axis=0))
    other = b.add(b.mul(following, width), thread)
    b.multi("store", out, own, b.op("load", x, own))
    b.multi("grid_barrier")

    def turn(inner: Builder, i: Value) -> list[Value]:
        value = inner.op("load", out, other)
        inner.multi("grid_barrier")
        inner.multi("store", out, own, inner.add(value, inner.const(1.0, f32)))
        inner.multi("grid_barrier")
        return []

    b.for_(b.index(0), b.index(rounds), one, [], turn)
    kernel = Kernel("handing_on", Stage.THREAD, (x, out), Block((), tuple(b.ops)), (Size.of(blocks),), THREADS)
    assert isinstance(x.type, Tensor)
    made = Program(
        "handing_on", (ProgramArray("x", x.type, "input"),), (ProgramArray("out", x.type, "output"),), (), (KernelCall(kernel, ("x", "out")),)
    )
    verify_program(made)
    return made


@pytest.mark.parametrize("blocks", [1, 2, 131, 132, 264, 1000])
def test_blocks_hand_values_on(gpu: CudaDevice, blocks: int) -> None:
    program = gpu.load(build_artifact(handing_on(blocks, 50), gpu.target))
    values = np.arange(blocks * THREADS, dtype=np.float32)
    x, out = gpu.from_numpy(values), gpu.from_numpy(np.zeros_like(values))
    wanted = np.roll(values.reshape(blocks, THREADS), -50, axis=0).reshape(-1) + 50
    for _ in range(5):
        program.run({"x": x, "out": out}, {}, {})
        np.testing.assert_array_equal(out.numpy(), wanted)


def test_many_barriers(gpu: CudaDevice) -> None:
    program = gpu.load(grid_kernels.barrier_artifact(132, gpu.target))
    for count in (0, 1, 2, 3, 10_000):
        x, out = gpu.from_numpy(np.zeros(count, np.float32)), gpu.from_numpy(np.full(1, -1, np.float32))
        program.run({"x": x, "out": out}, {}, {"n": count})
        assert float(out.numpy()[0]) == count


def test_launches_on_two_streams_do_not_meet(gpu: CudaDevice) -> None:
    """Each launch has a word of its own, also when both run at once."""
    artifact = build_artifact(handing_on(60, 200), gpu.target)
    programs = [gpu.load(artifact), gpu.load(artifact)]
    values = [np.arange(60 * THREADS, dtype=np.float32) + 1000 * k for k in range(2)]
    given = [gpu.from_numpy(v) for v in values]
    results = [gpu.from_numpy(np.zeros_like(v)) for v in values]
    streams = [tw.Stream("cuda"), tw.Stream("cuda")]
    gpu.synchronize()
    for _ in range(20):
        for program, x, out, stream in zip(programs, given, results, streams, strict=True):
            program.run({"x": x, "out": out}, {}, {}, stream.handle)
    gpu.synchronize()
    for value, out in zip(values, results, strict=True):
        np.testing.assert_array_equal(out.numpy(), np.roll(value.reshape(60, THREADS), -200, axis=0).reshape(-1) + 200)


def test_more_blocks_than_fit_are_refused(gpu: CudaDevice) -> None:
    program = gpu.load(build_artifact(handing_on(100_000, 1), gpu.target))
    with pytest.raises(TargetLimit, match="waits for all its 100000 blocks"):
        program.run({"x": 0, "out": 0}, {}, {})


@tw.kernel(launches=1)
def centred(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    total = tw.empty((cols,), tw.f32)
    for j in tw.grid(cols):
        s = 0.0
        for i in range(rows):
            s += x[i, j]
        total[j] = s
    m = tw.empty((rows,), tw.f32)
    for i in tw.grid(rows):
        s = 0.0
        for j in range(cols):
            s += x[i, j] - total[j] / rows
        m[i] = s
    out = tw.empty((rows, cols), x.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = (x[i, j] - total[j] / rows) * m[rows - 1 - i]
    return out


@tw.kernel(launches=1)
def layers(x: tw.Array, w: tw.Array, v: tw.Array) -> tw.Array:
    return tw.relu(x @ w) @ v


def centred_by_numpy(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    centre = wide - wide.sum(axis=0) / max(1, len(x))
    return np.asarray(centre * centre.sum(axis=1)[::-1, None])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (31, 33), (127, 1031), (1000, 1000), (2003, 4099)])
def test_kernels_in_one_launch(shape: tuple[int, int], dtype: str) -> None:
    x = np.random.default_rng(5).standard_normal(shape).astype(DTYPES[dtype])
    given, wanted = tw.to_device(x, "cuda"), centred_by_numpy(x)
    scale = np.abs(wanted).max(initial=1.0)
    for _ in range(4):
        found = np.asarray(centred(given)).astype(np.float64)
        np.testing.assert_allclose(found, wanted, rtol=1e-4 if dtype == "f32" else 2**-7, atol=2e-4 * scale)
    if x.size:
        assert centred.last is not None
        (launch,) = centred.last.launches
        assert launch.cooperative and launch.persistent


def test_layers_in_one_launch() -> None:
    drawn = np.random.default_rng(6)
    x, w, v = (drawn.standard_normal(shape).astype(DTYPES["bf16"]) for shape in ((300, 512), (512, 1000), (1000, 256)))
    wide = [a.astype(np.float64) for a in (x, w, v)]
    wanted = np.maximum(wide[0] @ wide[1], 0) @ wide[2]
    on_device = [tw.to_device(a, "cuda") for a in (x, w, v)]
    for _ in range(4):
        found = np.asarray(layers(*on_device)).astype(np.float64)
        assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()


def test_the_same_bits_every_time() -> None:
    x = tw.to_device(np.random.default_rng(7).standard_normal((257, 777)).astype(np.float32), "cuda")
    first = np.asarray(centred(x)).tobytes()
    assert all(np.asarray(centred(x)).tobytes() == first for _ in range(300))


def test_in_a_graph() -> None:
    x = np.random.default_rng(8).standard_normal((257, 777)).astype(np.float32)
    given = tw.to_device(x, "cuda")
    eager = np.asarray(centred(given))
    with tw.capture("cuda") as graph:
        found = centred(given)
    for _ in range(20):
        graph.replay()
    np.testing.assert_array_equal(np.asarray(found), eager)


def test_a_graph_with_another_input() -> None:
    """The nodes stay cooperative when their parameters change."""
    x, other = (np.random.default_rng(k).standard_normal((257, 777)).astype(np.float32) for k in (8, 9))
    on_device = [tw.to_device(a, "cuda") for a in (x, other)]
    wanted = [np.asarray(centred(a)) for a in on_device]
    with tw.capture("cuda", x=on_device[0]) as graph:
        found = centred(graph["x"])
    for number in (0, 1, 0, 1):
        graph.replay(x=on_device[number])
        np.testing.assert_array_equal(np.asarray(found), wanted[number])


def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(65, 300, device="cuda")
    wanted = centred_by_numpy(x.cpu().numpy())
    for _ in range(3):
        found = centred(x)
        np.testing.assert_allclose(found.cpu().numpy(), wanted, rtol=1e-4, atol=2e-4 * np.abs(wanted).max())
