"""Products of five to eight rows in a persistent kernel: matrix instructions of a warp, with norms and tails, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import parse_target
from tilewright.execute.devices import find_device
from tilewright.ir.nodes import walk
from tilewright.mega.persistent.entry import PersistentStep, compile_persistent, plan_step


def network(dtype: Any, rows: int, wide: int, hidden: int) -> tuple[tw.TensorGraph, np.ndarray, np.ndarray]:
    """A norm, two products side by side, and one with what it is added to; and what they give in float64."""
    rng = np.random.default_rng(rows + wide)
    gate, up, down = ((rng.standard_normal(s) / s[-1] ** 0.5).astype(dtype.numpy) for s in ((hidden, wide), (hidden, wide), (wide, hidden)))
    gamma = (1 + 0.1 * rng.standard_normal(wide)).astype(dtype.numpy)
    g = tw.TensorGraph("rows")
    x = g.input("x", (rows, wide), dtype)
    norm = g.op("RmsNorm", x, gamma=g.weight("gamma", gamma))
    both = g.op("Mul", g.op("Silu", g.op("MulMat", norm, weight=g.weight("gate", gate))), g.op("MulMat", norm, weight=g.weight("up", up)))
    g.output("y", g.op("Add", x, g.op("MulMat", both, weight=g.weight("down", down))))
    given = rng.standard_normal((rows, wide)).astype(dtype.numpy)
    known = given.astype(np.float64)
    scaled = known / np.sqrt((known * known).mean(-1, keepdims=True) + 1e-6) * gamma.astype(np.float64)
    one, other = (scaled @ w.T.astype(np.float64) for w in (gate, up))
    return g, given, known + (one / (1 + np.exp(-one)) * other) @ down.T.astype(np.float64)


@pytest.mark.parametrize(("dtype", "rows", "wide", "hidden"), [(tw.bf16, 8, 256, 64), (tw.bf16, 6, 200, 48), (tw.f16, 5, 264, 40), (tw.bf16, 7, 64, 33)])
def test_rows_by_matrix_instructions(dtype: Any, rows: int, wide: int, hidden: int) -> None:
    g, x, wanted = network(dtype, rows, wide, hidden)
    step = PersistentStep(g.executor, g.plan(x=x.shape), find_device("emulator"), {"x": x}, threads=256)
    by_matrix = [any(op.opcode == "mma" for op in walk(one.kernel.body)) for one in step.step.ops]
    assert any(by_matrix)
    step.launch()
    assert np.abs(np.asarray(step.outputs["y"], np.float64) - wanted).max() < 0.04


@pytest.mark.parametrize(("dtype", "rows", "wide", "hidden", "blocks"), [(tw.bf16, 8, 640, 64, 14), (tw.bf16, 8, 64, 640, 14), (tw.f16, 5, 1032, 64, 66), (tw.bf16, 6, 520, 48, 33)])
def test_weights_are_on_their_way_before_a_wait(dtype: Any, rows: int, wide: int, hidden: int, blocks: int) -> None:
    """Each group of threads has one task at most: the first of its weights are asked for before the wait, and those of blocks without a task are not. The bits are those of loads behind it."""
    g, x, wanted = network(dtype, rows, wide, hidden)
    found = []
    for early in (True, False):
        step = PersistentStep(g.executor, g.plan(x=x.shape), find_device("emulator"), {"x": x}, threads=384, blocks=blocks, early_loads=early)
        ops = list(walk(step.program.calls[0].kernel.body))
        waits = [n for n, op in enumerate(ops) if op.opcode == "await_count"]
        ahead = [n for n, op in enumerate(ops) if op.opcode == "load" and op.attrs.get("early")]
        assert bool(ahead) == early and any(op.kernel.threads == 256 for op in step.step.ops)
        assert not early or min(ahead) < max(waits)
        for _ in range(2):
            step.launch()
        found.append(np.asarray(step.outputs["y"], np.float64))
    assert np.abs(found[0] - wanted).max() < 0.04 and (found[0] == found[1]).all()


def test_as_many_warps_share_rows_as_find_room_at_once() -> None:
    """Of 132 multiprocessors with twelve warps: 96 tasks have eight each, 560 have two."""
    g, x, _ = network(tw.bf16, 8, 1536, 8960)
    step = plan_step(g.executor, g.plan(x=x.shape), parse_target("sm_90a"))
    threads = {op.tasks: op.kernel.threads for op in step.ops if op.kernel.attrs.get("row_matrix")}
    assert threads == {560: 64, 96: 256}


@pytest.mark.parametrize(("dtype", "rows"), [(tw.bf16, 4), (tw.bf16, 9), (tw.f32, 8)])
def test_other_rows_go_as_before(dtype: Any, rows: int) -> None:
    """Few rows keep up with memory without them, many have larger tiles, and f32 stays f32."""
    g, x, _ = network(dtype, rows, 64, 32)
    step = plan_step(g.executor, g.plan(x=x.shape), parse_target("sm_90a"))
    assert not any(op.kernel.attrs.get("row_matrix") for op in step.ops)


def test_the_code_of_a_gpu() -> None:
    g, x, _ = network(tw.bf16, 8, 512, 256)
    text = compile_persistent(g, g.plan(x=x.shape), parse_target("sm_90a")).code.decode()
    assert "mma.sync.aligned.m16n8k16" in text
