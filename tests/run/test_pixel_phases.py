"""Transposed convolutions of two-byte elements on Hopper: phases write pixels to scratch by the copy engine, and one kernel turns them to rows of results through shared memory. Executed by the
emulator, at the tile stage and at the thread stage."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bench.families import convolutions

import tilewright as tw
from images_reference import Steps, transposed
from tilewright.base.errors import UserError
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import Wgmma

BF16 = ml_dtypes.bfloat16
PIXELS = "family=wgmma m=64 n=64 k=64 stages=2 to_channels_last=image gather=1 pixels=32"


def normal(*shape: int, dtype: Any = BF16) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def results(kernel: Any, schedule: str = PIXELS, **arrays: np.ndarray) -> list[np.ndarray]:
    """At both stages; phases leave by the copy engine, and the last kernel turns what they left."""
    stages = tw.kernel(schedule=schedule)(kernel.python).stages(*arrays.values(), target="sm_90a").stages
    phases = [call.kernel for call in stages.thread.calls if str(call.kernel.attrs.get("schedule")).startswith("family=wgmma")]
    assert phases and all(any(op.opcode == "tma_store" for op in walk(k.body)) for k in phases)
    assert any(isinstance(s, Schedule) and s.turned for s in stages.schedules)
    return [np.asarray(next(iter(run_program(stage, arrays).values()))).astype(np.float64) for stage in (stages.tile, stages.thread)]


Shapes = tuple[tuple[int, ...], tuple[int, ...]]
CASES: dict[str, tuple[Any, Shapes, Steps, Steps, int]] = {
    "every phase": (convolutions.transposed2d((2, 2), (1, 0), 1, False), ((1, 64, 4, 5), (64, 64, 3, 3)), (2, 2), (1, 0), 1),
    "a few channels more": (convolutions.transposed2d((2, 2), (0, 1), 1, True), ((2, 20, 3, 5), (20, 67, 3, 4)), (2, 2), (0, 1), 1),
    "few channels": (convolutions.transposed2d((3, 3), (1, 2), 1, False), ((2, 34, 4, 3), (34, 9, 4, 5)), (3, 3), (1, 2), 1),
    "rows of two blocks": (convolutions.transposed2d((1, 2), (0, 0), 1, False), ((1, 17, 2, 17), (17, 16, 1, 3)), (1, 2), (0, 0), 1),
    "taps that never divide": (convolutions.transposed2d((2, 2), (2, 2), 2, False), ((1, 33, 4, 5), (33, 20, 3, 3)), (2, 2), (2, 2), 2),
    "phases without terms": (convolutions.transposed2d((4, 4), (0, 1), 1, True), ((1, 31, 3, 4), (31, 20, 3, 5)), (4, 4), (0, 1), 1),
    "one axis": (convolutions.transposed1d(3, 1, 2, 0), ((2, 33, 40), (33, 20, 4)), (3,), (1,), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_phases_write_pixels(name: str) -> None:
    kernel, (one, other), stride, padding, dilation = CASES[name]
    x, w = normal(*one), normal(*other)
    want = transposed(x, w, stride, padding, dilation)
    for found in results(kernel, x=x, w=w):
        assert found.shape == want.shape
        assert np.abs(found - want).max() <= 8e-3 * np.abs(want).max()


def test_zeros_of_taps_that_never_divide_are_no_phases() -> None:
    """With steps of two and taps two apart, three phases of four have no term: one kernel computes, another writes all results."""
    x, w = np.zeros((4, 64, 40, 40), np.float32), np.zeros((64, 256, 3, 3), np.float32)  # fewer filters are one product for all taps
    kernel: Any = convolutions.transposed2d((2, 2), (2, 2), 2, False)
    calls = [call.kernel.name for call in kernel.stages(x, w, target="sm_90a").stages.tile.calls]
    assert [name for name in calls if ".phase" in name and name.split(".")[-1].startswith("phase")] == ["joined.phase0"]


def test_pixels_are_written_where_results_are_many() -> None:
    kernel: Any = convolutions.transposed2d((2, 2), (0, 0), 1, False)
    for side, pixels in ((8, False), (60, True)):
        stages = kernel.stages(np.zeros((4, 64, side, side), BF16), np.zeros((64, 128, 3, 3), BF16), target="sm_90a").stages
        assert any(isinstance(s, Wgmma) and s.pixels for s in stages.schedules) == pixels
        assert any(isinstance(s, Schedule) and s.turned for s in stages.schedules) == pixels


def test_wide_elements_keep_their_order() -> None:
    kernel: Any = convolutions.transposed2d((2, 2), (0, 0), 1, False)
    stages = kernel.stages(np.zeros((4, 64, 60, 60), np.float32), np.zeros((64, 128, 3, 3), np.float32), target="sm_90a").stages
    assert not any(isinstance(s, Wgmma) and s.pixels for s in stages.schedules)


def test_nothing_stays_of_earlier_pixels() -> None:
    """NaN of one call are not seen by the next: every element that is read has been written."""
    kernel, (one, other), stride, padding, dilation = CASES["few channels"]
    x, w = normal(*one), normal(*other)
    x[1] = np.nan
    want = transposed(x, w, stride, padding, dilation)
    for found in results(kernel, x=x, w=w):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(want))


def test_only_phases_write_pixels() -> None:
    with pytest.raises(UserError, match="gather is for the phases"):
        results(convolutions.conv2d((1, 1), (1, 1), 1, True), PIXELS.replace("gather", "swap_ab=1 gather"), x=normal(2, 33, 7, 9), w=normal(17, 33, 3, 3))


def test_phases_share_rows_of_windows() -> None:
    """Phases of few channels read windows' rows as channels, from one copy of the image for each place where windows begin: there are two, and four phases."""
    kernel, (one, other), stride, padding, dilation = CASES["a few channels more"]
    x, w = normal(*one), normal(*other)
    want, schedule = transposed(x, w, stride, padding, dilation), PIXELS.replace("=image", "=rows")
    names = [call.kernel.name for call in tw.kernel(schedule=schedule)(kernel.python).stages(x, w, target="sm_90a").stages.tile.calls]
    assert sum(name.endswith(".rows") for name in names) == 2
    for found in results(kernel, schedule, x=x, w=w):
        assert np.abs(found - want).max() <= 8e-3 * np.abs(want).max()


STACKED = f"{PIXELS} stacked=1"
STACKS: dict[str, tuple[Any, Shapes, Steps, Steps, int]] = {
    "one of nine": (convolutions.transposed2d((3, 3), (1, 0), 1, False), ((2, 17, 4, 3), (17, 31, 6, 6)), (3, 3), (1, 0), 1),
    "shifted along both axes": (convolutions.transposed2d((2, 4), (1, 3), 1, True), ((1, 33, 5, 1), (33, 20, 4, 8)), (2, 4), (1, 3), 1),
    "four of different windows": (convolutions.transposed2d((3, 3), (1, 2), 1, False), ((2, 34, 4, 3), (34, 9, 4, 5)), (3, 3), (1, 2), 1),
    "holes between results": (convolutions.transposed2d((4, 4), (0, 1), 1, True), ((1, 31, 3, 4), (31, 20, 5, 6)), (4, 4), (0, 1), 1),
    "taps apart": (convolutions.transposed2d((4, 3), (1, 5), 2, False), ((1, 70, 4, 1), (70, 20, 4, 7)), (4, 3), (1, 5), 2),
    "one axis": (convolutions.transposed1d(3, 1, 2, 0), ((2, 33, 40), (33, 20, 4)), (3,), (1,), 2),
    "three axes": (convolutions.transposed3d(2, 1), ((1, 20, 3, 2, 5), (20, 7, 4, 4, 3)), (2, 2, 2), (1, 1, 1), 1),
    "steps along one axis": (convolutions.transposed2d((1, 2), (1, 2), 1, False), ((2, 70, 5, 6), (70, 33, 3, 4)), (1, 2), (1, 2), 1),
}


@pytest.mark.parametrize("name", STACKS)
def test_phases_in_stacks(name: str) -> None:
    """An infinity is felt by those alone in whose windows it is."""
    kernel, (one, other), stride, padding, dilation = STACKS[name]
    x, w = normal(*one), normal(*other)
    x.reshape(-1)[-1] = np.inf
    want = transposed(x, w, stride, padding, dilation)
    for found in results(kernel, STACKED, x=x, w=w):
        assert found.shape == want.shape
        fine = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(found), fine)
        assert np.abs(found[fine] - want[fine]).max() <= 8e-3 * np.abs(want[fine]).max()


def test_stacks_are_few_kernels() -> None:
    kernel, (one, other), *_ = STACKS["one of nine"]
    stages = tw.kernel(schedule=STACKED)(kernel.python).stages(normal(*one), normal(*other), target="sm_90a").stages
    assert [call.kernel.name for call in stages.tile.calls] == ["joined.phase0.stack", "joined.phase0.turn", "joined.phase0", "joined.gather"]


def test_stacks_of_f16_by_rows_of_windows() -> None:
    kernel, (one, other), stride, padding, dilation = STACKS["one of nine"]
    x, w = normal(*one, dtype=np.float16), normal(*other, dtype=np.float16)
    want = transposed(x, w, stride, padding, dilation)
    for found in results(kernel, STACKED.replace("=image", "=rows32"), x=x, w=w):
        assert np.abs(found - want).max() <= 1e-3 * np.abs(want).max()


def test_stacks_are_chosen_where_windows_are_the_same() -> None:
    """Four taps in steps of two: every phase has the same windows. Of three taps none has those of another."""
    kernel: Any = convolutions.transposed2d((2, 2), (0, 0), 1, False)
    for taps, stacked in ((4, True), (3, False)):
        stages = kernel.stages(np.zeros((8, 96, 60, 60), BF16), np.zeros((96, 40, taps, taps), BF16), target="sm_90a").stages
        products = [s for s in stages.schedules if isinstance(s, Wgmma)]
        assert all(s.stacked == stacked and s.pixels for s in products)
        assert len(products) == (1 if stacked else 4)


def test_sums_with_something_added_are_no_stacks() -> None:
    @tw.kernel(schedule=STACKED)
    def biased(x: tw.Array, w: tw.Array, v: tw.Array) -> tw.Array:
        n, channels, length = x.shape
        _, filters, taps = w.shape
        out = tw.empty((n, filters, (length - 1) * 2 + taps), x.dtype)
        for b, o, i in tw.grid(n, filters, (length - 1) * 2 + taps):
            total = tw.f32(0)
            for c in range(channels):
                for k in range(taps):
                    if (i - k) % 2 == 0 and 0 <= (i - k) // 2 < length:
                        total += x[b, c, (i - k) // 2] * w[c, o, k]
            out[b, o, i] = total + v[o]
        return out

    with pytest.raises(UserError, match="stacked goes with gather and pixels"):
        biased.stages(normal(2, 33, 40), normal(33, 20, 4), normal(20), target="sm_90a")


def test_rows_of_results_a_polynomial_apart_compile_at_once() -> None:
    """What lies between two lines of results is no sum that LLVM takes apart 64 times."""
    x, w = (np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), shape) for shape in ((14, 71, 132, 132), (71, 71, 4, 1)))
    kernel = convolutions.transposed2d((3, 3), (1, 0), 1, False)
    gather = kernel.stages(x, w, target="sm_90a").stages.thread.calls[-1].kernel
    assert any(op.opcode == "size" and op.attrs.get("kept") for op in walk(gather.body))
    assert kernel.compile(x, w, target="sm_90a").code
