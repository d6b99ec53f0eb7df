"""The kernels of the benchmarks of grids that stay: what they compute, and that they are what the rows say."""

from __future__ import annotations

import numpy as np
import pytest
from bench import grid_kernels

from tilewright.base.target import parse_target
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk

TARGET = parse_target("sm_90a")


def test_ten_steps_are_one_launch_or_ten() -> None:
    rng = np.random.default_rng(0)
    x, v = (rng.standard_normal((256, 256)) / 16).astype(np.float32), rng.standard_normal(256).astype(np.float32)
    one = grid_kernels.persistent_kernel.stages(x, v, target="sm_90a").stages.thread
    ten = grid_kernels.ten_launches.stages(x, v, target="sm_90a").stages.thread
    assert (len(one.calls), len(ten.calls)) == (1, grid_kernels.STEPS)
    assert sum(op.opcode == "grid_barrier" for op in walk(one.calls[0].kernel.body)) == grid_kernels.STEPS - 1
    wanted = v.astype(np.float64)
    for _ in range(grid_kernels.STEPS):
        wanted = np.tanh(x.astype(np.float64) @ wanted)
    for program in (one, ten):
        (found,) = run_program(program, {"x": x, "v": v}).values()
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_barriers_are_met_so_often() -> None:
    (out,) = run_program(grid_kernels.barriers(4), {"x": np.zeros(7, np.float32)}).values()
    assert out[0] == 7


@pytest.mark.requires("ptxas")
def test_barriers_assemble() -> None:
    from tilewright.codegen.nvptx.ptxas import assemble

    artifact = grid_kernels.barrier_artifact(132, TARGET)
    (launch,) = artifact.launches
    assert launch.cooperative and not launch.persistent
    assembled = assemble(artifact.code.decode(), "sm_90a")
    assert assembled is not None and launch.entry in assembled
