"""`stream_k`: what a contraction gets whose blocks hand partial sums on through memory."""

from __future__ import annotations

from kernels_matrix import BY_NAME, again
from tilewright.base.dtypes import f32, u32
from tilewright.base.target import parse_target
from tilewright.ir.types import Tensor
from tilewright.passes.routes import Stages

STREAM = "family=wgmma m=128 n=64 k=64 stages=3 math_warpgroups=2"


def stages_of(schedule: str) -> Stages:
    case = BY_NAME["nk_bf16"]
    return again(case.kernel, schedule=schedule).stages(*case.arguments((72, 200, 328)), target="sm_90a").stages


def test_a_stream_has_partial_sums_and_flags_that_are_cleared_first() -> None:
    stages = stages_of(f"{STREAM} stream_k=1")
    clearing, contraction = stages.loop.calls
    blocks = parse_target("sm_90a").multiprocessors
    partials, flags = contraction.kernel.params[-2:]
    assert isinstance(partials.type, Tensor)
    assert isinstance(flags.type, Tensor)
    assert (partials.type.dtype, [s.constant for s in partials.type.shape]) == (f32, [blocks, 128 * 64])
    assert (flags.type.dtype, [s.constant for s in flags.type.shape]) == (u32, [2 * blocks])
    assert clearing.args == (flags.name,) == contraction.args[-1:]
    assert [a.name for a in stages.loop.scratch] == [partials.name, flags.name]
    # The contraction may begin before the flags are cleared, and every multiprocessor takes part.
    thread = stages.thread.calls[1].kernel
    assert thread.attrs["dependent"] is True
    assert thread.grid[0].constant == blocks


def test_others_have_nothing_of_it() -> None:
    stages = stages_of(STREAM)
    (only,) = stages.loop.calls
    assert len(only.kernel.params) == 3
    assert stages.loop.scratch == ()
