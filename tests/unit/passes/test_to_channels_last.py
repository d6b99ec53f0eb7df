"""Which images of a convolution are turned, and what the turned kernel reads and writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench.families import convolutions

import tilewright as tw
from images_reference import convolved as convolved_images
from images_reference import transposed
from kernels_matrix import again, convolved, nest
from tilewright.analysis.contraction import find_contraction, image
from tilewright.base.dtypes import bf16
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import Kernel, walk
from tilewright.passes.program.to_channels_last import turned_kernel, turns_of
from tilewright.passes.routes import prepare
from tilewright.passes.runner import Trace
from tilewright.passes.schedules.matrix import Wgmma

GUARD = ["y = i + u - 1", "z = j + v - 1", "if y >= 0 and y < h and z >= 0 and z < w:"]
FIRST, LAST = "n, c, h, w = x.shape", "n, h, w, c = x.shape"
ARGUMENTS = np.ones((2, 32, 32, 32), bf16.numpy), np.ones((32, 32, 3, 3), bf16.numpy)


def convolution(sizes: str, shape: str, grid: str, term: str, result: str = "acc") -> tw.Kernel[..., Any]:
    sums = [("q", "c"), ("u", "r"), ("v", "s")]
    return nest("x, f", f"{sizes}; k, d, r, s = f.shape", shape, "x.dtype", grid, sums, f"{term} * f[o, q, u, v]", result, inside=GUARD)


def prepared(kernel: tw.Kernel[..., Any]) -> Kernel:
    (call,) = prepare(kernel.stages(*ARGUMENTS, target="sm_90a").program, Trace()).calls
    return call.kernel


@pytest.mark.parametrize(
    ("sizes", "shape", "grid", "term", "ways"),
    [
        (FIRST, "n, k, h, w", "b: n, o: k, i: h, j: w", "x[b, q, y, z]", {"image", "both"}),
        (FIRST, "n, h, w, k", "b: n, i: h, j: w, o: k", "x[b, q, y, z]", {"image"}),
        (LAST, "n, k, h, w", "b: n, o: k, i: h, j: w", "x[b, y, z, q]", {"result"}),
        (LAST, "n, h, w, k", "b: n, i: h, j: w, o: k", "x[b, y, z, q]", set()),
        ("h, w, c, n = x.shape", "k, n, h, w", "o: k, b: n, i: h, j: w", "x[y, z, q, b]", {"image", "both"}),
        (FIRST, "n, k, h, w", "b: n, o: k, i: h - 1, j: w", "x[b, q, y, z]", {"image"}),
    ],
    ids=["channels first", "into channels last", "from channels last", "channels last", "images last", "a row that is not written"],
)
def test_what_is_turned(sizes: str, shape: str, grid: str, term: str, ways: set[str]) -> None:
    kernel = prepared(convolution(sizes, shape, grid, term))
    assert turns_of(kernel).keys() == ways
    for way in ways:
        turned = turned_kernel(kernel, way)
        found = find_contraction(turned)
        assert found is not None
        assert image(found, found.a) or image(found, found.b)
        (store,) = (op for op in walk(turned.body) if op.opcode == "store")
        is_turned = store.operands[0].name.startswith("contraction.turned")
        assert is_turned is (way != "image")


def test_products_are_not_turned() -> None:
    kernel = nest("x, f", "n, c, h, w = x.shape; k, d, r, s = f.shape", "n, k, h, w", "x.dtype", "b: n, o: k, i: h, j: w", [("q", "c")],
                  "x[b, q, i, j] * f[o, q, 0, 0]")  # fmt: skip
    assert not turns_of(prepared(kernel))


@pytest.mark.parametrize("schedule", ["to_channels_last=result", "swap_ab=1 store=direct"])
def test_results_alone(schedule: str) -> None:
    """The image lies channels last, the results channels first."""
    kernel = convolution(LAST, "n, k, h, w", "b: n, o: k, i: h, j: w", "x[b, y, z, q]")
    kernel = again(kernel, schedule=f"family=wgmma m=64 n=64 k=64 stages=3 {schedule}")
    rng = np.random.default_rng(5)
    x, f = (rng.integers(-2, 3, shape).astype(bf16.numpy) for shape in ((2, 6, 5, 32), (24, 32, 3, 3)))
    want = convolved(x.astype(np.float64).transpose(0, 3, 1, 2), f.astype(np.float64)).astype(bf16.numpy)
    stages = kernel.stages(x, f, target="sm_90a").stages
    for stage in (stages.tile, stages.thread):
        (found,) = run_program(stage, {"x": x, "f": f}).values()
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    ("kernel", "one", "other", "stride", "padding", "dilation", "is_transposed"),
    [
        (convolutions.conv1d(2, 3, 2), (2, 34, 50), (20, 34, 5), (2,), (3,), 2, False),
        (convolutions.conv3d(2, 1), (1, 34, 5, 6, 7), (20, 34, 3, 3, 3), (2, 2, 2), (1, 1, 1), 1, False),
        (convolutions.transposed2d((1, 1), (3, 1), 2, True), (2, 34, 5, 6), (34, 20, 3, 3), (1, 1), (3, 1), 2, True),
    ],
    ids=["one axis", "three axes", "backwards"],
)
def test_images_of_other_forms(
    kernel: tw.Kernel[..., Any], one: tuple[int, ...], other: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: int, is_transposed: bool
) -> None:
    """One axis gets a second, three are five with batch and channels, and taps that run backwards run the other way."""
    rng = np.random.default_rng(7)
    x, w = (rng.integers(-2, 3, shape).astype(bf16.numpy) for shape in (one, other))
    want = (transposed if is_transposed else convolved_images)(x, w, stride, padding, dilation).astype(bf16.numpy)
    turned = again(kernel, schedule="family=wgmma m=64 n=64 k=64 stages=2 swap_ab=1 store=direct to_channels_last=image")
    stages = turned.stages(x, w, target="sm_90a").stages
    for stage in (stages.tile, stages.thread):
        (found,) = run_program(stage, {"x": x, "w": w}).values()
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    ("kernel", "one", "other"),
    [
        (convolutions.conv1d(1, 2, 1), (32, 512, 5070), (22, 512, 6)),
        (convolutions.transposed2d((1, 1), (3, 0), 2, True), (12, 256, 25, 28), (256, 256, 5, 5)),
    ],
    ids=["one axis", "backwards"],
)
def test_the_copy_engine_finds_pixels(kernel: tw.Kernel[..., Any], one: tuple[int, ...], other: tuple[int, ...]) -> None:
    chosen = kernel.stages(*(np.empty(shape, bf16.numpy) for shape in (one, other)), target="sm_90a").stages.schedules
    assert any(isinstance(s, Wgmma) and s.a_copy == "im2col" and s.to_channels_last for s in chosen)


def test_channels_of_no_whole_16_bytes() -> None:
    """They lie last already, but no copy engine reads them: the copy has zeros behind them."""
    rng = np.random.default_rng(8)
    x, w = (rng.integers(-2, 3, shape).astype(bf16.numpy) for shape in ((2, 5, 6, 35), (20, 3, 3, 35)))
    want = convolved_images(x.transpose(0, 3, 1, 2), w.transpose(0, 3, 1, 2), (1, 1), (1, 1), 1).transpose(0, 2, 3, 1).astype(bf16.numpy)
    kernel = again(convolutions.conv2d_last((1, 1), (1, 1), 1), schedule="family=wgmma m=64 n=64 k=64 stages=2 to_channels_last=image")
    stages = kernel.stages(x, w, target="sm_90a").stages
    for stage in (stages.tile, stages.thread):
        (found,) = run_program(stage, {"x": x, "w": w}).values()
        np.testing.assert_array_equal(found, want)
