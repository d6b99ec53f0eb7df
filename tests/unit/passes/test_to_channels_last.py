"""Which images of a convolution are turned, and what the turned kernel reads and writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from kernels_matrix import again, convolved, nest
from tilewright.analysis.contraction import find_contraction, image
from tilewright.base.dtypes import bf16
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import Kernel, walk
from tilewright.passes.pipeline import prepare
from tilewright.passes.program.to_channels_last import turned_kernel, turns_of
from tilewright.passes.runner import Trace

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
