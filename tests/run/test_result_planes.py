"""Results of convolutions with channels last on Hopper, which leave as rows of a matrix, in tiles as wide as there are filters, executed by the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench.families import convolutions
from test_matrix_emulated import followed

import tilewright as tw
from images_reference import convolved
from kernels_matrix import again, on
from tilewright.base.dtypes import bf16, f16
from tilewright.base.target import parse_target
from tilewright.execute.devices import emulator_device
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk

SCHEDULES = {
    "fitted": "family=wgmma m=128 n=72 k=64 stages=3 math_warpgroups=2",
    "narrow": "family=wgmma m=64 n=40 k=64 stages=2",
    "in turns": "family=wgmma m=128 n=80 k=64 stages=3 math_warpgroups=2 pingpong=1 mma_in_flight=1",
    "three groups": "family=wgmma m=192 n=88 k=64 stages=2 math_warpgroups=3",
    "whole pieces": "family=wgmma m=64 n=128 k=64 stages=2",
    "shared sums": "family=wgmma m=128 n=72 k=64 stages=3 math_warpgroups=2 cluster_k=2",
    "shared steps": "family=wgmma m=128 n=72 k=64 stages=3 math_warpgroups=2 stream_k=1",
}


def numbers(dtype: Any, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(map(sum, shapes)))
    return [rng.integers(-2, 3, shape).astype(dtype.numpy) for shape in shapes]


def expected(x: np.ndarray, w: np.ndarray, stride: tuple[int, int], padding: tuple[int, int], dtype: Any) -> np.ndarray:
    return convolved(x.transpose(0, 3, 1, 2), w.transpose(0, 3, 1, 2), stride, padding, 1).transpose(0, 2, 3, 1).astype(dtype.numpy)


def computed(kernel: tw.Kernel[..., Any], **arrays: np.ndarray) -> tuple[set[str], list[np.ndarray]]:
    """Opcodes of the last kernel, and what the tile stage and the thread stage give."""
    stages = kernel.stages(*arrays.values(), target="sm_90a").stages
    opcodes = {op.opcode for op in walk(stages.thread.calls[-1].kernel.body)}
    return opcodes, [next(iter(run_program(stage, arrays).values())) for stage in (stages.tile, stages.thread)]


@pytest.mark.parametrize("filters", [72, 75, 146])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_results_leave_through_shared_memory(schedule: str, filters: int) -> None:
    dtype = f16 if filters == 75 else bf16
    x, w = numbers(dtype, (2, 7, 9, 40), (filters, 3, 2, 40))
    opcodes, results = computed(again(convolutions.conv2d_last((2, 1), (1, 0), 1), schedule=SCHEDULES[schedule]), x=x, w=w)
    assert "stmatrix" in opcodes
    assert ("tma_store" in opcodes) == (filters == 72 and schedule == "whole pieces")
    for found in results:
        np.testing.assert_array_equal(found, expected(x, w, (2, 1), (1, 0), dtype))


@tw.kernel
def added(x: tw.Array, w: tw.Array, other: tw.Array) -> tw.Array:
    """Rows of results follow one another, those of the other array need not."""
    n, height, width, channels = x.shape
    filters, kh, kw, _ = w.shape
    out = tw.empty((n, height, width, filters), x.dtype)
    for b, i, j, o in tw.grid(n, height, width, filters):
        total = tw.f32(0)
        for k in range(kh):
            for m in range(kw):
                for c in range(channels):
                    if 0 <= i + k - 1 < height and 0 <= j + m - 1 < width:
                        total += x[b, i + k - 1, j + m - 1, c] * w[o, k, m, c]
        out[b, i, j, o] = total + other[b, i, j, o]
    return out


@pytest.mark.parametrize("schedule", ["fitted", "in turns", "whole pieces"])
def test_what_is_added(schedule: str) -> None:
    x, w, dense = numbers(bf16, (2, 5, 6, 32), (72, 3, 3, 32), (2, 5, 6, 72))
    wide = np.zeros((2, 5, 9, 72), bf16.numpy)
    wide[:, :, :6] = dense
    exact = convolved(x.transpose(0, 3, 1, 2), w.transpose(0, 3, 1, 2), (1, 1), (1, 1), 1).transpose(0, 2, 3, 1)
    want = (exact + dense.astype(np.float64)).astype(bf16.numpy)
    for found in computed(again(added, schedule=SCHEDULES[schedule]), x=x, w=w, other=dense)[1]:
        np.testing.assert_array_equal(found, want)
    given = on(again(added, schedule=SCHEDULES[schedule]), emulator_device("thread", parse_target("sm_90a")))
    np.testing.assert_array_equal(np.asarray(given((x, w, wide[:, :, :6]))), want)


@pytest.mark.parametrize("sizes", [((0, 5, 5, 40), (72, 3, 3, 40)), ((1, 1, 1, 40), (9, 3, 3, 40)), ((2, 5, 5, 40), (0, 3, 3, 40))], ids=["no images", "one pixel", "no filters"])
def test_nothing_and_single_pixels(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, w = numbers(bf16, *sizes)
    for found in computed(again(convolutions.conv2d_last((1, 1), (1, 1), 1), schedule=SCHEDULES["fitted"]), x=x, w=w)[1]:
        np.testing.assert_array_equal(found, expected(x, w, (1, 1), (1, 1), bf16))


def test_tiles_fit_the_filters() -> None:
    x, w = np.empty((8, 90, 96, 208), bf16.numpy), np.empty((72, 3, 7, 208), bf16.numpy)
    (chosen,) = followed(convolutions.conv2d_last((2, 1), (1, 2), 1), (x, w))
    assert (chosen.n, chosen.swap_ab) == (72, False)


def test_few_results_with_long_sums_share_them() -> None:
    """Blocks of a cluster where sums are short, all blocks where they are long."""
    for image, filters, chosen_by in (((3, 163, 40, 34), (128, 163, 7, 7), "cluster_k"), ((5, 263, 62, 34), (205, 263, 11, 11), "stream_k")):
        (chosen,) = followed(convolutions.conv2d((2, 2), (0, 3), 1, False), (np.empty(image, bf16.numpy), np.empty(filters, bf16.numpy)))
        assert getattr(chosen, chosen_by) > (chosen_by == "cluster_k") and not chosen.pingpong, image


# -- windows of one place -------------------------------------------------------------------------------------------


ONE_PLACE = {"channels first": (convolutions.conv2d((1, 1), (0, 0), 1, False), False), "nested": (convolutions.conv2d((1, 1), (0, 0), 2, True), False), "channels last": (convolutions.conv2d_last((1, 1), (0, 0), 1), True)}


@pytest.mark.parametrize("sizes", [(40, 24, 2, 5, 7), (33, 31, 1, 8, 3), (16, 64, 3, 4, 8), (72, 17, 1, 1, 1), (8, 16, 0, 3, 3), (5, 0, 1, 3, 2)])
@pytest.mark.parametrize("name", ONE_PLACE)
def test_a_window_of_one_place_is_a_product(name: str, sizes: tuple[int, ...]) -> None:
    kernel, last = ONE_PLACE[name]
    filters, channels, n, height, width = sizes
    x, w = numbers(bf16, (n, height, width, channels), (filters, 1, 1, channels))
    want = expected(x, w, (1, 1), (0, 0), bf16)
    if not last:
        x, w, want = (np.ascontiguousarray(a.transpose(0, 3, 1, 2)) for a in (x, w, want))
    stages = kernel.stages(x, w, target="sm_90a").stages
    reductions = [op for op in walk(stages.loop.calls[-1].kernel.body) if op.opcode == "reduce"]
    assert all(len(op.operands) == 1 for op in reductions)
    for stage in (stages.loop, stages.tile, stages.thread):
        np.testing.assert_array_equal(next(iter(run_program(stage, {"x": x, "w": w}).values())), want)


def test_products_that_lie_so_are_not_copied() -> None:
    x, w = np.empty((32, 64, 128, 100), bf16.numpy), np.empty((128, 64, 1, 1), bf16.numpy)
    stages = convolutions.conv2d((1, 1), (0, 0), 1, False).stages(x, w, target="sm_90a").stages
    assert len(stages.thread.calls) == 1
