"""Weights that come by a ring in shared memory: results, which bytes, any order of blocks, what the emulator notices, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_persistent import EMULATOR, mlp, planned, step_of

import tilewright as tw
from tilewright.base.errors import CompilerBug, TargetLimit, UserError
from tilewright.base.target import parse_target
from tilewright.ir.emulator import run_program
from tilewright.ir.emulator.warps.scheduler import chosen_by
from tilewright.ir.nodes import Block, Op, walk
from tilewright.ir.program import Program
from tilewright.mega.persistent.emit import LINE
from tilewright.mega.persistent.entry import PersistentStep, compile_persistent, plan_step, step_ring
from tilewright.mega.persistent.records import MemoryRegion
from tilewright.mega.persistent.ring import CHOSEN_BYTES, CHOSEN_FLIGHT, check_ring, plan_ring

HOPPER = parse_target("sm_90a")


def product(dtype: Any, rows: int, wide: int, out: int) -> tuple[tw.TensorGraph, np.ndarray, np.ndarray]:
    """A product, rows to give it, and what it gives in float64."""
    rng = np.random.default_rng(wide + out)
    weight = (rng.standard_normal((out, wide)) / wide**0.5).astype(np.float32)
    given_ = tw.f32 if dtype.is_packed else dtype
    data: Any = tw.quantize(weight, dtype) if dtype.is_packed else weight.astype(dtype.numpy)
    g = tw.TensorGraph("product")
    g.output("y", g.op("MulMat", g.input("x", (rows, wide), given_), weight=g.weight("w", data), name="product"))
    x = rng.standard_normal((rows, wide)).astype(given_.numpy)
    known = np.asarray(tw.dequantize(data) if dtype.is_packed else data, np.float64)
    return g, x, x.astype(np.float64) @ known.T


FAMILIES = [
    (tw.bf16, 1, 256, 48), (tw.bf16, 1, 256, 47), (tw.bf16, 1, 1536, 64), (tw.bf16, 8, 256, 48), (tw.f16, 1, 256, 48), (tw.f32, 1, 128, 31),
    (tw.q8_0, 1, 256, 48), (tw.q4_0, 1, 256, 48), (tw.q4_k, 1, 256, 48), (tw.q6_k, 4, 256, 24), (tw.q5_1, 1, 256, 48), (tw.q5_0, 4, 256, 24), (tw.q5_k, 1, 256, 48),
    (tw.q8_0, 1, 512, 24), (tw.q4_k, 1, 512, 24), (tw.q6_k, 1, 512, 24), (tw.f32, 1, 1000, 12), (tw.f32, 1, 2048, 9),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "rows", "wide", "out"), FAMILIES)
def test_families_of_products(dtype: Any, rows: int, wide: int, out: int) -> None:
    """With a ring the bits are those without it."""
    g, x, wanted = product(dtype, rows, wide, out)
    results = []
    for ring_bytes in (0, 40 << 10):
        step = PersistentStep(g.executor, g.plan(x=x.shape), EMULATOR, {"x": x}, ring_bytes=ring_bytes)
        assert bool(step.ring.ops) == bool(ring_bytes), step.ring.left
        if (dtype, wide) in ((tw.q8_0, 512), (tw.q4_k, 512), (tw.f32, 2048)):
            assert all(ring.meets for ring in step.ring.ops.values())
        step.launch()
        results.append(np.array(step.outputs["y"]))
    assert results[0].tobytes() == results[1].tobytes()
    error = np.abs(results[1].astype(np.float64) - wanted).max()
    assert error < (0.1 if dtype.is_packed or dtype in (tw.bf16, tw.f16) else 1e-4)


@pytest.mark.parametrize(("dtype", "wide", "out"), [(tw.bf16, 640, 24), (tw.f32, 896, 13), (tw.f16, 264, 25)])
def test_rows_that_loops_read_come_by_shared_memory(dtype: Any, wide: int, out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows of x are read in loops: all threads fetch them at once. Here no loop is written out, so that short ones are such rows too."""
    monkeypatch.setattr("tilewright.mega.persistent.invariant.MOST_TURNS", 0)
    g, x, wanted = product(dtype, 1, wide, out)
    results = []
    for ring_bytes in (0, 20 << 10):
        step = PersistentStep(g.executor, g.plan(x=x.shape), EMULATOR, {"x": x}, ring_bytes=ring_bytes, steps=2)
        step.launch(2)
        results.append(np.array(step.outputs["y"]))
        rows = [op for op in walk(step.program.calls[0].kernel.body) if op.opcode == "alloc" and op.results[0].name.endswith(".row")]
        assert len(rows) == bool(ring_bytes), step.ring.left
    assert results[0].tobytes() == results[1].tobytes()
    assert np.abs(results[1].astype(np.float64) - wanted).max() < (0.1 if dtype is not tw.f32 else 1e-4)


def test_a_ring_is_chosen_where_it_pays() -> None:
    """Where most weights come from memory by it: not for few weights, nor for rows of which the ring would have room for few."""
    for wide, out, chosen in ((2048, 4096, True), (512, 1024, False), (24 << 10, 1024, False)):
        g = tw.TensorGraph("pays")
        g.output("y", g.op("MulMat", g.input("x", (1, wide), tw.bf16), weight=g.weight("w", np.zeros((out, wide), tw.bf16.numpy))))
        step = plan_step(g.executor, g.plan(x=(1, wide)), HOPPER)
        ring = step_ring(step, HOPPER, 132, 384, None)
        assert bool(ring.ops) is chosen, ring.left
        assert not chosen or (ring.nbytes <= CHOSEN_BYTES and ring.flight * ring.slot_bytes < 2 * CHOSEN_FLIGHT)
    assert not step_ring(step, parse_target("sm_80"), 108, 384, None).ops


def test_products_that_load_themselves() -> None:
    """Where a ring does not suit, an op loads as before, and the plan says why."""
    for form, why in (((tw.bf16, 2, 128, 33), "are not known"), ((tw.f32, 3, 64, 24), "are not known"), ((tw.bf16, 1, 255, 48), "no multiple of 16 bytes"), ((tw.f32, 1, 33, 31), "no whole units")):
        g, x, wanted = product(*form)
        step = PersistentStep(g.executor, g.plan(x=x.shape), EMULATOR, {"x": x}, ring_bytes=20 << 10)
        assert not step.ring.ops and why in str(step.ring.left)
        step.launch()
        assert np.abs(np.asarray(step.outputs["y"], np.float64) - wanted).max() < 0.1


@pytest.mark.parametrize("options", [{}, {"ring_slot": 208}, {"ring_bytes": 1 << 16}, {"ring_flight": 700}, {"threads": 256}, {"copies": 3, "polls": "relaxed"}])
def test_a_step_is_what_the_graph_computes(options: dict[str, Any]) -> None:
    """Rings of few and of many slots; units that have several slots, so that one unit lies around the ring's end; several launches and steps."""
    g, reference = mlp()
    x = np.random.default_rng(1).standard_normal((1, 40)).astype(np.float32)
    step = step_of(g, x, **{"ring_bytes": 3000, "steps": 2, **options})
    assert {"mul_mat_1", "mul_mat_2"} & {op.title for op in step.step.ops if op.number in step.ring.ops}
    for _ in range(2):
        step.launch(2)
        assert np.abs(step.outputs["y"] - reference(x)).max() < 1e-4
        x *= -0.5


def test_layers() -> None:
    """Iterations of a loop fetch their own weights."""
    g, reference = mlp(layers=6)
    x = np.random.default_rng(1).standard_normal((1, 40)).astype(np.float32)
    step = step_of(g, x, ring_bytes=5000)
    assert max(loop.count for loop in step.step.loops) > 2
    step.launch()
    assert np.abs(step.outputs["y"] - reference(x)).max() < 1e-3


@given(st.lists(st.integers(0, 63), min_size=1, max_size=60))
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_order_of_blocks(choices: list[int]) -> None:
    """Whichever block goes on: no deadlock, no race, the same result."""
    g, reference = mlp()
    x = np.random.default_rng(1).standard_normal((1, 40)).astype(np.float32)
    step = step_of(g, x, steps=2, ring_bytes=3000)
    turns = iter(range(1 << 30))
    with chosen_by(lambda count: choices[next(turns) % len(choices)]):
        step.launch(2)
    assert np.abs(step.outputs["y"] - reference(x)).max() < 1e-4


def _without(block: Block, opcode: str, memory: str) -> Block:
    """The block without such ops on a memory."""
    ops: list[Op] = []
    for op in block.ops:
        if op.opcode == opcode and op.operands[0].name == memory:
            continue
        ops.append(replace(op, regions=tuple(_without(region, opcode, memory) for region in op.regions)))
    return replace(block, ops=tuple(ops))


@pytest.mark.parametrize(("opcode", "memory"), [("mbarrier_wait", "ring.full"), ("mbarrier_wait", "ring.empty"), ("mbarrier_arrive", "ring.empty"), ("mbarrier_expect", "ring.full")])
def test_the_emulator_notices_what_is_missing(opcode: str, memory: str) -> None:
    """Without a wait, or without an arrival, the emulator finds a race, bytes that nobody expects, or a deadlock."""
    g, _ = mlp()
    step = step_of(g, np.ones((1, 40), np.float32), ring_bytes=3000)
    (call,) = step.program.calls
    kernel = replace(call.kernel, body=_without(call.kernel.body, opcode, memory))
    program: Program = replace(step.program, calls=(replace(call, kernel=kernel),))
    with pytest.raises(UserError):
        run_program(program, {"table": step.table, "counters": step.counters, "steps": 1}, {}, EMULATOR.target)


def test_which_bytes() -> None:
    """Units are whole rows; together they are the arrays, each byte once."""
    g, _ = mlp(512, 1024)
    step = plan_step(g.executor, g.plan(x=(1, 512)), HOPPER)
    ring = plan_ring(step, 16, 11, 64 << 10)
    assert len(ring.ops) == 2 and ring.nbytes <= 64 << 10
    for op in ring.ops.values():
        assert op.slots <= ring.slots and op.turns * 16 >= op.units
        for piece in op.pieces:
            assert piece.start == 0 and piece.stride == piece.size and piece.size * op.units == piece.nbytes
            assert sum(size for _, _, size in piece.parts(ring.slot_bytes, piece.size)) == piece.size
    assert ring.total == sum(op.turns * op.slots for op in ring.ops.values())
    assert plan_ring(step, 16, 11, 0).ops == {}


def test_the_code_of_a_gpu() -> None:
    g, _ = mlp(512, 1024)
    artifact = compile_persistent(g, g.plan(x=(1, 512)), HOPPER, ring_bytes=64 << 10)
    (launch,) = artifact.launches
    assert launch.cooperative
    text = artifact.code.decode()
    assert "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes" in text and "mbarrier.try_wait.parity" in text and "ld.shared.v4" in text


def test_how_blocks_look_at_counters() -> None:
    """Copies of a counter are counted together; looks that do not acquire have one that does behind them, or a fence."""
    g, reference = mlp()
    x = np.random.default_rng(1).standard_normal((1, 40)).astype(np.float32)
    step = step_of(g, x, copies=4, polls="fence")
    step.launch()
    assert np.abs(step.outputs["y"] - reference(x)).max() < 1e-4
    for op in step.step.ops:
        first = LINE * (1 + 4 * op.number)
        assert set(step.counters[first : first + 4 * LINE : LINE]) == {min(op.tasks, 3)}
    polls = {op.attrs["polls"] for op in walk(step.program.calls[0].kernel.body) if op.opcode == "await_count"}
    assert polls == {"fence"}


def test_a_tape_with_a_ring() -> None:
    tape = tw.mega.Tape("ring")
    w = np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32)
    tape.output("y", tape.emit("MatMul", tape.input("x", (1, 64)), tape.frozen("w", w), transB=1))
    plan = tw.mega.plan(tape)
    x = np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32)
    kernel = plan.compile("emulator", ring_bytes=1 << 14)
    assert kernel.key != plan.compile("emulator").key
    with kernel.load() as runner:
        assert np.abs(runner.launch(x) - x @ w.T).max() < 1e-4
        step = runner._step
        assert isinstance(step, PersistentStep) and any(op.opcode == "bulk_load" for op in walk(step.finished.calls[0].kernel.body))


def test_refusals() -> None:
    g, _ = mlp()
    x = np.ones((1, 40), np.float32)
    with pytest.raises(UserError, match="weights come by a ring, or are asked for ahead"):
        step_of(g, x, ring_bytes=4096, idle=1 << 20)
    with pytest.raises(UserError, match="multiples of 16"):
        step_of(g, x, ring_bytes=4096, ring_slot=100)
    with pytest.raises(UserError, match="polls is one of"):
        step_of(g, x, polls="never")
    with pytest.raises(UserError, match="copies a number from 1 to 32"):
        step_of(g, x, copies=0)
    step = planned(1)
    with pytest.raises(TargetLimit, match="has no bulk copies"):
        step_ring(step, parse_target("sm_80"), 4, 128, 4096)
    wide, _ = mlp(512, 1024)
    with pytest.raises(TargetLimit, match=r"(?s)a ring of .* bytes for 'mul_mat.*make ring_bytes smaller"):
        compile_persistent(wide, wide.plan(x=(1, 512)), HOPPER, ring_bytes=1 << 20)
    tape = tw.mega.Tape("refused")
    tape.output("y", tape.emit("MatMul", tape.input("x", (1, 8)), tape.frozen("w", shape=(8, 8))))
    with pytest.raises(UserError, match="does nothing on"):
        tw.mega.plan(tape).compile("cpu", ring_bytes=4096)
    with pytest.raises(UserError, match="0 is no ring"):
        tw.mega.plan(tape).compile("emulator", ring_bytes=-1)
    small = step_of(g, x, ring_bytes=256)
    assert not small.ring.ops and "bytes, and the ring" in str(small.ring.left)


def test_what_is_written_does_not_come_by_the_ring() -> None:
    """Bulk copies do not see what the same launch stores."""
    g, _ = mlp(512, 1024)
    step = plan_step(g.executor, g.plan(x=(1, 512)), HOPPER)
    ring = plan_ring(step, 16, 11, 64 << 10)
    number, op = next(iter(ring.ops.items()))
    loop = next(loop for loop in step.loops if any(o.number == number for o in loop.ops))
    position = next(o.position for o in loop.ops if o.number == number)
    slots = loop.slots[0][position]
    kept = slots[op.pieces[0].name]
    writer = step.ops[0]
    slots[op.pieces[0].name] = replace(kept, region=loop.slots[0][writer.position][sorted(writer.writes)[0]].region)
    with pytest.raises(UserError, match=r"by the ring, and op .* writes it in the same launch"):
        check_ring(step, ring, 16)
    slots[op.pieces[0].name] = replace(kept, region=MemoryRegion("apart"))
    check_ring(step, ring, 16)
    ring.ops[number] = replace(op, units=op.units + 1)
    with pytest.raises(CompilerBug, match="do not make up its tasks"):
        check_ring(step, ring, 16)
