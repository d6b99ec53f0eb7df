"""Steps of graphs as one persistent kernel: results, the order of ops, what the proof and the emulator notice, and refusals."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilewright as tw
from tilewright.base.errors import UserError
from tilewright.base.target import parse_target
from tilewright.execute.devices import Device, find_device
from tilewright.graphs.executor import Executor
from tilewright.graphs.plan import GraphPlan
from tilewright.ir.emulator.warps.scheduler import chosen_by
from tilewright.ir.nodes import walk
from tilewright.mega.cpu_step import CpuStep
from tilewright.mega.persistent.collect import repeats
from tilewright.mega.persistent.emit import EXITS, LINE, STEPS, emit
from tilewright.mega.persistent.entry import PersistentStep, compile_persistent, plan_step
from tilewright.mega.persistent.order import check
from tilewright.mega.persistent.records import StepPlan
from tilewright.mega.persistent.stream import idle_fetches, plan_stream

EMULATOR = find_device("emulator")


def mlp(wide: int = 40, hidden: int = 72, layers: int = 1) -> tuple[tw.TensorGraph, Callable[[np.ndarray], np.ndarray]]:
    """A gated feed-forward network, and what it computes in float64."""
    rng = np.random.default_rng(wide + hidden)

    def weight(*shape: int) -> Any:
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    g = tw.TensorGraph("mlp")
    x = g.input("x", (1, wide), tw.f32)
    known: list[tuple[Any, ...]] = []
    h = x
    for n in range(layers):
        gamma, gate, up, down = (1 + 0.1 * rng.standard_normal(wide)).astype(np.float32), weight(hidden, wide), weight(hidden, wide), weight(wide, hidden)
        known.append((gamma, gate, up, down))
        norm = g.op("RmsNorm", h, gamma=g.weight(f"gamma.{n}", gamma), name=f"norm.{n}")
        first = g.op("Silu", g.op("MulMat", norm, weight=g.weight(f"gate.{n}", gate), name=f"gate_.{n}"), name=f"silu.{n}")
        both = g.op("Mul", first, g.op("MulMat", norm, weight=g.weight(f"up.{n}", up), name=f"up_.{n}"), name=f"both.{n}")
        h = g.op("Add", h, g.op("MulMat", both, weight=g.weight(f"down.{n}", down), name=f"down_.{n}"), name=f"sum.{n}")
    g.output("y", h)

    def reference(given: np.ndarray) -> np.ndarray:
        y = given.astype(np.float64)
        for gamma, gate, up, down in known:
            n = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * gamma
            a = n @ gate.T.astype(np.float64)
            y = y + (a / (1 + np.exp(-a)) * (n @ up.T.astype(np.float64))) @ down.T.astype(np.float64)
        return y

    return g, reference


def step_of(g: tw.TensorGraph, x: np.ndarray, **options: Any) -> PersistentStep:
    return PersistentStep(g.executor, g.plan(x=x.shape), EMULATOR, {"x": x}, **options)


def planned(layers: int, many: bool = False) -> StepPlan:
    g, _ = mlp(layers=layers)
    return plan_step(g.executor, g.plan(x=(1, 40)), parse_target("sm_90a"), many)


@pytest.mark.parametrize(("wide", "hidden"), [(40, 72), (33, 31), (1, 5)])
def test_a_step_is_what_the_graph_computes(wide: int, hidden: int) -> None:
    g, reference = mlp(wide, hidden)
    x = np.random.default_rng(1).standard_normal((1, wide)).astype(np.float32)
    step = step_of(g, x)
    for _ in range(2):
        step.launch()
        assert np.abs(step.outputs["y"] - reference(x)).max() < 1e-4
        x *= -0.5
    step.close()
    with pytest.raises(UserError, match="is closed"):
        step.launch()


def test_blocks_of_more_threads() -> None:
    """Tasks of smaller kernels run side by side."""
    g, reference = mlp()
    x = np.random.default_rng(1).standard_normal((1, 40)).astype(np.float32)
    step = step_of(g, x, threads=256)
    assert step.program.calls[0].kernel.threads == 256
    step.launch()
    assert np.abs(step.outputs["y"] - reference(x)).max() < 1e-4


@pytest.mark.parametrize(("dtype", "wide", "out"), [(tw.q4_k, 512, 24), (tw.q8_0, 512, 13), (tw.f32, 2048, 9)])
def test_tasks_whose_threads_meet_run_beside_each_other(dtype: Any, wide: int, out: int) -> None:
    """Groups of threads, each with a barrier and shared memory of its own: the bits are those of one group."""
    rng = np.random.default_rng(out)
    weight = (rng.standard_normal((out, wide)) / wide**0.5).astype(np.float32)
    data: Any = tw.quantize(weight, dtype) if dtype.is_packed else weight
    g = tw.TensorGraph("product")
    g.output("y", g.op("MulMat", g.input("x", (1, wide), tw.f32), weight=g.weight("w", data)))
    x = rng.standard_normal((1, wide)).astype(np.float32)
    results = []
    for threads in (0, 256, 416):
        step = step_of(g, x, threads=threads)
        step.launch()
        results.append(np.array(step.outputs["y"]).tobytes())
        barriers = [op for op in walk(step.program.calls[0].kernel.body) if op.opcode == "named_barrier"]
        assert bool(barriers) == bool(threads)
    assert results[0] == results[1] == results[2]


def test_an_iteration_asks_for_the_weights_of_the_next() -> None:
    g, reference = mlp(layers=6)
    x = np.random.default_rng(1).standard_normal((1, 40)).astype(np.float32)
    for most, found in ((1 << 20, True), (0, False)):
        step = step_of(g, x, next_bytes=most)
        assert found == any(op.opcode == "prefetch" and op.attrs.get("bytes") for op in walk(step.program.calls[0].kernel.body))
        step.launch()
        assert np.abs(step.outputs["y"] - reference(x)).max() < 1e-3


def test_blocks_without_a_task_ask_for_weights() -> None:
    """Ops of few tasks leave blocks free, which ask for weights of ops behind; results are the same."""
    g, reference = mlp(264, 512)
    x = np.random.default_rng(1).standard_normal((1, 264)).astype(np.float32)
    step = plan_step(g.executor, g.plan(x=(1, 264)), parse_target("sm_90a"))
    fetches = idle_fetches(step, 4, 1 << 20)
    assert all(0 <= f.begin < f.end <= f.run.nbytes and f.end % 128 == 0 for found in fetches.values() for f in found)
    bound = step_of(g, x, idle=1 << 20)
    bound.launch()
    assert np.abs(bound.outputs["y"] - reference(x)).max() < 1e-3


def test_layers_share_code() -> None:
    """Three times the layers: as many ops of code, three times the iterations."""
    one, three = planned(12), planned(36)
    assert [loop.count for loop in one.loops if loop.count > 1] and len(one.ops) == len(three.ops)
    assert max(loop.count for loop in three.loops) > max(loop.count for loop in one.loops)
    g, reference = mlp(layers=12)
    x = np.random.default_rng(1).standard_normal((1, 40)).astype(np.float32)
    step = step_of(g, x)
    step.launch()
    assert np.abs(step.outputs["y"] - reference(x)).max() < 1e-3


@given(st.lists(st.integers(0, 63), min_size=1, max_size=60))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_order_of_blocks(choices: list[int]) -> None:
    """Whichever block goes on: no deadlock, no race, the same result."""
    g, reference = mlp()
    x = np.random.default_rng(1).standard_normal((1, 40)).astype(np.float32)
    step = step_of(g, x, steps=2)
    turns = iter(range(1 << 30))
    with chosen_by(lambda count: choices[next(turns) % len(choices)]):
        step.launch(2)
    assert np.abs(step.outputs["y"] - reference(x)).max() < 1e-4


def test_blocks_that_sleep() -> None:
    """Delays of some blocks change nothing, and there are some."""
    g, reference = mlp()
    x = np.random.default_rng(1).standard_normal((1, 40)).astype(np.float32)
    step = step_of(g, x, steps=8, delays=2000)
    assert any(op.opcode == "nanosleep" for op in walk(step.program.calls[0].kernel.body))
    step.launch(8)
    assert np.abs(step.outputs["y"] - reference(x)).max() < 1e-4


def test_blocks_that_hurry_are_caught_without_waits() -> None:
    g, _ = mlp()
    x = np.ones((1, 40), np.float32)
    step = step_of(g, x, waits=False)
    with pytest.raises(UserError, match="with no counter that orders the two"), chosen_by(lambda count: 0):
        step.launch()


@pytest.mark.parametrize("many", [False, True])
def test_every_wait_is_needed(many: bool) -> None:
    """The proof notices every single wait that is missing."""
    step = planned(12, many)
    removed = 0
    for loop in step.loops:
        for lists in (loop.first, loop.rest) if loop.count > 1 else (loop.first,):
            for number, waits in lists.items():
                for wait in list(waits):
                    lists[number] = [w for w in waits if w != wait]
                    with pytest.raises(UserError, match=r"depends on|comes after"):
                        check(step)
                    lists[number] = waits
                    removed += 1
    check(step)
    assert removed >= len(step.ops) - 1


def test_the_emulator_notices_a_missing_wait() -> None:
    """With one wait less there is a race, whatever the order of blocks; but for the product whose tasks read what the same blocks wrote before, which only the
    proof notices."""
    g, _ = mlp()
    step = step_of(g, np.ones((1, 40), np.float32))
    (loop,) = step.step.loops
    missed: list[int] = []
    for number, waits in loop.first.items():
        loop.first[number] = []
        step.finished = emit(step.step, 3)
        step.counters[...] = 0
        for room in (step.workspace, *step.scratch.values(), *step.outputs.values()):
            room.view(np.uint8)[...] = 77  # to write what is there already is no race
        with contextlib.suppress(UserError):
            step.launch()
            missed.append(number)  # nothing was noticed
        loop.first[number] = waits
    assert [op.title for op in step.step.ops if op.number not in missed] == ["mul_mat", "mul_mat_2"]


def test_a_wait_for_what_comes_later_is_refused() -> None:
    step = planned(1)
    ops = step.ops
    loop = next(loop for loop in step.loops if ops[0] in loop.ops)
    from tilewright.mega.persistent.records import OpWait

    loop.first[ops[0].number].append(OpWait(ops[-1].number, "same"))
    with pytest.raises(UserError, match="would wait for ever"):
        check(step)


def test_counters_wrap_around() -> None:
    """Counters are compared modulo 2^32, and launches need no clearing."""
    g, reference = mlp()
    x = np.random.default_rng(1).standard_normal((1, 40)).astype(np.float32)
    step = step_of(g, x, steps=3)
    made = (1 << 32) - 2
    step.counters[STEPS] = made
    for op in step.step.ops:
        step.counters[LINE * (1 + op.number)] = made * min(op.tasks, 3) % (1 << 32)
    step.launch(3)
    assert np.abs(step.outputs["y"] - reference(x)).max() < 1e-4
    assert step.counters[STEPS] == 1 and step.counters[EXITS] == 0


def test_runs_that_repeat() -> None:
    assert repeats([0, 1, 1, 1, 2]) == [(0, 1, 1), (1, 1, 3), (4, 1, 1)]
    assert repeats([0, 1, 2, 1, 2, 1, 2, 3]) == [(0, 1, 1), (1, 2, 3), (7, 1, 1)]
    assert repeats([5]) == [(0, 1, 1)]


def test_weights_are_asked_for_ahead() -> None:
    """Rows of weights are runs that move evenly from task to task; what a block reads behind an op is asked for in its last tasks."""
    g, _ = mlp(512, 1024)
    step = plan_step(g.executor, g.plan(x=(1, 512)), parse_target("sm_90a"))
    stream = plan_stream(step, 16, 32 << 10)
    assert stream.runs and all(run.stride == run.size and run.nbytes % run.stride == 0 for runs in stream.runs.values() for run in runs)
    program = emit(step, 16, stream=stream)
    assert any(op.opcode == "prefetch" for op in walk(program.calls[0].kernel.body))
    for loop in step.loops:
        for op in loop.ops:
            for piece in (p for group in stream.last.get(op.number, []) for p in group):
                target = next(o for o in step.ops if o.number == piece.op)
                assert piece.run.start + (target.tasks - 1) * piece.run.stride + piece.offset + piece.size <= piece.run.nbytes


def test_the_code_of_a_gpu() -> None:
    g, _ = mlp()
    artifact = compile_persistent(g, g.plan(x=(1, 40)), parse_target("sm_90a"))
    (launch,) = artifact.launches
    assert launch.cooperative
    text = artifact.code.decode()
    assert "red.release.gpu.global.add.u32" in text and "ld.acquire.gpu.global.u32" in text


def test_a_watchdog_names_ops() -> None:
    g, _ = mlp()
    step = step_of(g, np.ones((1, 40), np.float32), watchdog=0.5)
    codes = [op.attrs["code"] for op in walk(step.program.calls[0].kernel.body) if op.opcode == "await_count"]
    assert step.waiting(f"stopped kernel tw_persistent_0 at rows.py:{codes[0]} after 0.5 s").startswith("op 'mul_mat' of norm.0")
    assert step.waiting("illegal address") == ""
    assert step.program.calls[0].kernel.attrs["watchdog"] == 500_000_000


def test_refusals() -> None:
    g, _ = mlp()
    x = np.ones((1, 40), np.float32)
    with pytest.raises(UserError, match="only GPUs and the emulator"):
        PersistentStep(g.executor, g.plan(x=(1, 40)), find_device("cpu"), {"x": x})
    with pytest.raises(UserError, match="a launch of 2 steps"):
        step_of(g, x).launch(2)
    with pytest.raises(UserError, match="a launch of 0 steps"):
        step_of(g, x, steps=0)
    g.replace("MulMat", lambda x, weight: x @ weight.T, node="down_.0")
    with pytest.raises(UserError, match="runs by itself"):
        step_of(g, x)


def test_a_step_on_threads_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks know arrays by address: those between programs are the step's own as long as it is open, and nobody else gets their memory."""
    rooms: list[weakref.ref[np.ndarray]] = []
    make = Executor.workspace

    def watched(self: Executor, plan: GraphPlan, place: Device) -> Any:
        room = make(self, plan, place)
        assert room is not None
        rooms.append(weakref.ref(room if room.base is None else room.base))
        return room

    monkeypatch.setattr(Executor, "workspace", watched)
    g, reference = mlp()
    x = np.random.default_rng(1).standard_normal((1, 40)).astype(np.float32)
    cpu = find_device("cpu")
    step = CpuStep(g.executor, g.executor.plan(g.executor.bind({"x": x}), False), cpu, {"x": x})
    gc.collect()
    assert len(rooms) == 1 and rooms[0]() is not None
    step.launch()
    assert np.abs(step.outputs["y"] - reference(x)).max() < 1e-4
    step.close()
    del step
    gc.collect()
    assert rooms[0]() is None
