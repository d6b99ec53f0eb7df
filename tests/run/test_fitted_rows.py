"""Products of few rows on Hopper whose tiles fit these: exchanged, with pieces of 16 to 64 columns turned on their way out. Executed by the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from bench.families import convolutions
from test_matrix_emulated import followed

from kernels_matrix import again
from tilewright.base.dtypes import bf16
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ((2, 141, 72, 16, 13), "m=128 n=144 k=64 stages=3 math_warpgroups=2 pingpong=1 mma_in_flight=1"),
        ((1, 81, 65, 8, 24), "m=64 n=96 k=64 stages=2"),
        ((1, 72, 65, 8, 24), "m=128 n=80 k=64 stages=2 math_warpgroups=2"),
        ((1, 250, 65, 8, 24), "m=256 n=16 k=64 stages=2 math_warpgroups=2"),
    ],
    ids=["pieces of 48", "two of 48", "of 16", "one of 16"],
)
def test_pieces_of_any_width_are_turned(sizes: tuple[int, ...], schedule: str) -> None:
    n, filters, channels, height, width = sizes
    rng = np.random.default_rng(filters)
    x, w = (rng.integers(-2, 3, shape).astype(bf16.numpy) for shape in ((n, channels, height, width), (filters, channels)))
    want = np.einsum("oc,bchw->bohw", w.astype(np.float64), x.astype(np.float64)).astype(bf16.numpy)
    stages = again(convolutions.pointwise, schedule=f"family=wgmma {schedule} swap_ab=1").stages(x, w, target="sm_90a").stages
    assert any(op.opcode == "tma_store" for call in stages.thread.calls for op in walk(call.kernel.body))
    for stage in (stages.tile, stages.thread):
        (found,) = run_program(stage, {"x": x, "w": w}).values()
        np.testing.assert_array_equal(found, want)


def test_few_filters_read_the_image_once() -> None:
    x, w = np.empty((9, 512, 128, 47), bf16.numpy), np.empty((141, 512), bf16.numpy)
    (chosen,) = followed(convolutions.pointwise, (x, w))
    assert (chosen.n, chosen.swap_ab) == (144, True)
