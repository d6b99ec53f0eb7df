"""Cooperative and persistent launches on a null driver: how many blocks they get, what is refused, and what the driver is told."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import FakeCuda

import tilewright as tw
from null_cuda import NullCuda
from null_cuda.install import installed
from tilewright.base import dtypes
from tilewright.base.artifact import ArrayParam, Artifact, Launch, SizeBinding
from tilewright.base.errors import TargetLimit
from tilewright.base.sizes import ONE, Size
from tilewright.compile.serial import deserialise, serialise
from tilewright.runtime.cuda.device import CudaDevice
from tilewright.runtime.cuda.driver import Driver

N = Size.of("n")
RULE = Launch("meet", ("x", "out"), ("n",), (N,), threads=128, cooperative=True)


def program(launch: Launch) -> Artifact:
    vector = ArrayParam("x", dtypes.f32, (N,), (ONE,), "input")
    return Artifact(
        "test", "sm_90a", "ptx", b".version 8.3", (vector,), (replace(vector, name="out", role="output"),), (),
        (launch,), (SizeBinding("n", "x", 0),), (),
    )  # fmt: skip


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(fake: FakeCuda) -> CudaDevice:
    return CudaDevice(Driver(fake), 0)


def launched(fake: FakeCuda, device: CudaDevice, launch: Launch, n: int) -> list[tuple[int, int, int]]:
    grids: list[tuple[int, int, int]] = []
    fake.kernels["meet"] = lambda table, grid: grids.append(grid)
    device.load(program(launch)).run({"x": 1 << 20, "out": 1 << 21}, {}, {"n": n})
    device.synchronize()
    return grids


RESIDENT = 16 * 132
"""Blocks of 128 threads, with 32 registers each, that the null device holds."""


def test_as_many_blocks_as_fit(fake: FakeCuda, device: CudaDevice) -> None:
    assert launched(fake, device, RULE, RESIDENT) == [(RESIDENT, 1, 1)]


def test_one_block_too_many_is_refused_before_the_launch(fake: FakeCuda, device: CudaDevice) -> None:
    with pytest.raises(TargetLimit, match=f"'meet' waits for all its {RESIDENT + 1} blocks of 128 threads.*runs {RESIDENT} of them at once"):
        launched(fake, device, RULE, RESIDENT + 1)


def test_shared_memory_counts(fake: FakeCuda, device: CudaDevice) -> None:
    heavy = replace(RULE, shared_bytes=100 << 10)
    assert launched(fake, device, heavy, 2 * 132) == [(264, 1, 1)]
    with pytest.raises(TargetLimit, match=r"102400 bytes of dynamic shared memory.*runs 264 of them at once"):
        launched(fake, device, heavy, 2 * 132 + 1)


def test_registers_count(fake: FakeCuda, device: CudaDevice) -> None:
    fake.function_attributes["CU_FUNC_ATTRIBUTE_NUM_REGS"] = 255
    with pytest.raises(TargetLimit, match="runs 264 of them at once"):
        launched(fake, device, RULE, 300)


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_persistent_kernel_gets_what_fits_and_no_more_than_it_needs(fake: FakeCuda, device: CudaDevice, cooperative: bool) -> None:
    rule = replace(RULE, persistent=True, cooperative=cooperative)
    assert launched(fake, device, rule, 10**6) == [(RESIDENT, 1, 1)]
    assert launched(fake, device, rule, 7) == [(7, 1, 1)]


def test_a_plain_kernel_may_have_any_number(fake: FakeCuda, device: CudaDevice) -> None:
    assert launched(fake, device, replace(RULE, cooperative=False), 10**5) == [(10**5, 1, 1)]


def test_rules_are_kept_on_disk() -> None:
    for rule in (RULE, replace(RULE, persistent=True), replace(RULE, cooperative=False)):
        assert deserialise(serialise(program(rule))).launches == (rule,)


# -- through the public API -----------------------------------------------------------------------------------------


def make() -> tw.Kernel[..., object]:
    """A kernel of the test's own: two nests, the second of which needs all of the first."""

    @tw.kernel(launches=1)
    def turned(x: tw.Array) -> tuple[tw.Array, tw.Array]:
        rows, cols = x.shape
        y = tw.empty((rows, cols), x.dtype)
        for i, j in tw.grid(rows, cols):
            y[i, j] = x[i, j] * 3.0
        out = tw.empty((cols, rows), x.dtype)
        for i, j in tw.grid(cols, rows):
            out[i, j] = y[j, i] + y[rows - 1 - j, cols - 1 - i]
        return y, out

    return turned


def check(found: object, x: np.ndarray) -> None:
    y, out = found  # type: ignore[misc]
    np.testing.assert_array_equal(np.asarray(y), x * 3)
    np.testing.assert_array_equal(np.asarray(out), (x * 3 + (x * 3)[::-1, ::-1]).T)


@pytest.fixture
def null() -> Iterator[NullCuda]:
    with installed(stage="thread") as driver:
        yield driver


def test_calls_are_one_cooperative_launch(null: NullCuda) -> None:
    """The first call takes the general path, later ones machine code: the null device holds each against the rule."""
    kernel = make()
    for shape in ((96, 128), (96, 128), (96, 128), (7, 31), (1, 1)):
        x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
        before = len(null.programs.launched)
        check(kernel(tw.to_device(x, "cuda")), x)
        assert null.programs.launched[before:] == ["tw_turned_0"]
    assert kernel.last is not None
    (launch,) = kernel.last.launches
    assert launch.cooperative and launch.persistent


def test_nothing_to_do_is_no_launch(null: NullCuda) -> None:
    x = np.zeros((0, 5), np.float32)
    check(make()(tw.to_device(x, "cuda")), x)
    assert null.programs.launched == []


def test_in_a_graph(null: NullCuda) -> None:
    kernel = make()
    x = np.random.default_rng(3).standard_normal((33, 65)).astype(np.float32)
    given = tw.to_device(x, "cuda")
    kernel(given)
    with tw.capture("cuda") as graph:
        found = kernel(given)
    before = len(null.programs.launched)
    graph.replay()
    graph.replay()
    check(found, x)
    assert null.programs.launched[before:] == ["tw_turned_0"] * 2


def test_a_graph_with_another_input(null: NullCuda) -> None:
    kernel = make()
    x, other = (np.random.default_rng(k).standard_normal((33, 65)).astype(np.float32) for k in (3, 4))
    with tw.capture("cuda", x=tw.to_device(x, "cuda")) as graph:
        found = kernel(graph["x"])
    graph.replay(x=tw.to_device(other, "cuda"))
    check(found, other)


def test_the_result_may_be_the_input(null: NullCuda) -> None:
    """Kernels that depend on each other only through that are not ordered: a temporary is used."""

    @tw.kernel(launches=1)
    def crossed(x: tw.Array, y: tw.Array) -> tuple[tw.Array, tw.Array]:
        (n,) = x.shape
        a = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            a[i] = x[n - 1 - i] + y[i]
        b = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            b[i] = x[i] * y[n - 1 - i]
        return a, b

    x, y = (np.random.default_rng(k).standard_normal(5000).astype(np.float32) for k in (6, 7))
    given = [tw.to_device(a, "cuda") for a in (x, y)]
    crossed(*given, out=tuple(given))
    np.testing.assert_array_equal(np.asarray(given[0]), x[::-1] + y)
    np.testing.assert_array_equal(np.asarray(given[1]), x * y[::-1])


def test_exported_code_is_launched_so_too(null: NullCuda, tmp_path: Path) -> None:
    """By the loader that comes with it; the null driver takes PTX alone."""
    x = np.random.default_rng(5).standard_normal((330, 650)).astype(np.float32)
    tw.export(make(), x, target="sm_90a", folder=tmp_path)
    assert "cuLaunchCooperativeKernel" in (tmp_path / "turned.h").read_text()
    loader = runpy.run_path(str(tmp_path / "turned.py"))
    arrays = [tw.to_device(a, "cuda") for a in (x, np.zeros_like(x), np.zeros_like(x.T))]
    loader["Program"]({**loader["DESCRIPTION"], "code": ("turned.ptx",)})(arrays[0], out=tuple(arrays[1:]))
    check(arrays[1:], x)
    assert null.programs.launched == ["tw_turned_0"]


def test_on_a_cpu_it_changes_nothing() -> None:
    x = np.random.default_rng(4).standard_normal((33, 65)).astype(np.float32)
    y, out = make()(x, device="cpu")  # type: ignore[misc]
    np.testing.assert_array_equal(np.asarray(y), x * 3)
    np.testing.assert_array_equal(np.asarray(out), (x * 3 + (x * 3)[::-1, ::-1]).T)
