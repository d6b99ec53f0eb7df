"""Tapes, plans, layouts and runners: what is built, and what is refused, with the instruction's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.mega.cpu_tasks import CpuTasks, ScheduledTask, check_schedule, dependencies
from tilewright.runtime.cpu.graphs import RecordedLaunch

RNG = np.random.default_rng(3)


def floats(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / max(shape[-1], 1) ** 0.5).astype(np.float32)


def gated(rows: int = 3, width: int = 33, hidden: int = 65) -> tw.mega.Tape:
    """A gated layer, whose weights come later."""
    tape = tw.mega.Tape("gated")
    x = tape.input("x", (rows, width))
    norm = tape.emit("RMSNorm", x, tape.frozen("gamma", shape=(width,)))
    gate = tape.emit("Silu", tape.emit("MatMul", norm, tape.frozen("gate", shape=(width, hidden))))
    up = tape.emit("MatMul", norm, tape.frozen("up", shape=(width, hidden)))
    down = tape.emit("MatMul", tape.emit("Mul", gate, up), tape.frozen("down", shape=(hidden, width)))
    tape.output("y", tape.emit("Add", x, down))
    return tape


def reference(x: np.ndarray, gamma: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    x, gamma, gate, up, down = (a.astype(np.float64) for a in (x, gamma, gate, up, down))
    norm = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gamma
    g = norm @ gate
    return x + (g / (1 + np.exp(-g)) * (norm @ up)) @ down


WEIGHTS = [floats(33), floats(33, 65), floats(33, 65), floats(65, 33)]


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_layer(fuse: bool, workers: int) -> None:
    plan = tw.mega.plan(gated(), fuse=fuse)
    with plan.compile("cpu").load(workers=workers) as runner:
        runner.set_weights(WEIGHTS)
        for _ in range(3):
            x = floats(3, 33)
            assert np.abs(runner.launch(x) - reference(x, *WEIGHTS)).max() < 1e-5
        assert runner.output_shape == (3, 33)
        runner.set_weights({"down": 2 * WEIGHTS[3]})
        assert np.abs(runner.launch({"x": x}) - reference(x, *WEIGHTS[:3], 2 * WEIGHTS[3])).max() < 1e-5


def test_two_runners_of_one_kernel_have_weights_of_their_own() -> None:
    kernel = tw.mega.plan(gated()).compile()
    x = floats(3, 33)
    with kernel.load() as one, kernel.load() as other:
        one.set_weights(WEIGHTS)
        other.set_weights([*WEIGHTS[:3], 0 * WEIGHTS[3]])
        assert np.array_equal(other.launch(x), x)
        assert np.abs(one.launch(x) - reference(x, *WEIGHTS)).max() < 1e-5


def test_the_workspace_is_the_same_every_time_and_slots_share_it() -> None:
    plan = tw.mega.plan(gated(), fuse=False)
    layout = plan.workspace
    assert layout == tw.mega.plan(gated(), fuse=False).workspace
    assert set(layout.offsets) == {0, 2, 4, 5, 7, 8, 10, 11} and not layout.inside
    assert layout.sizes[0] == 3 * 33 * 4 and layout.sizes[4] == 3 * 65 * 4
    assert layout.input_offsets == {"x": layout.offsets[0]} and layout.output_offsets == {"y": layout.offsets[11]}
    assert layout.bytes_by_dtype == {"f32": sum(layout.sizes.values())}
    assert layout.least <= layout.nbytes < sum(-(-size // 256) * 256 for size in layout.sizes.values())
    lives = {0: (0, 8), 2: (0, 3), 4: (1, 2), 5: (2, 4), 7: (3, 4), 8: (4, 5), 10: (5, 6), 11: (6, 7)}
    for one, (first, last) in lives.items():
        for other, (begin, end) in lives.items():
            apart = layout.offsets[one] + layout.sizes[one] <= layout.offsets[other] or layout.offsets[other] + layout.sizes[other] <= layout.offsets[one]
            assert one == other or apart or last < begin or end < first, (one, other)
    fused = tw.mega.plan(gated()).workspace
    assert fused.nbytes < layout.nbytes and set(fused.offsets) == {0, 11} and set(fused.inside) == {2, 4, 5, 7, 8, 10}
    assert "slot   2 stays inside task 0" in str(fused)


def test_tasks_know_what_they_wait_for() -> None:
    tasks = tw.mega.plan(gated(), fuse=False).tasks
    assert [task.after for task in tasks] == [(), (0,), (1,), (0,), (2, 3), (4,), (5,)]
    assert tasks[1].title == "instruction 1 (MatMul)" and tasks[1].read_bytes == 4 * (3 * 33 + 33 * 65) and tasks[1].written_bytes == 4 * 3 * 65


def test_kernels_come_from_the_cache() -> None:
    plan = tw.mega.plan(gated())
    first, second = plan.compile("cpu"), tw.mega.plan(gated()).compile("cpu")
    assert first.key == second.key and second.from_cache and second.artifact.kind == "mega"
    other = gated()
    other.instructions[2] = tw.mega.Tape("x").instruction("Tanh", other.instructions[2].inputs, other.instructions[2].outputs)
    assert tw.mega.plan(other).compile("cpu").key != first.key
    assert tw.mega.plan(gated(rows=4)).key != plan.key


# -- where tapes come from ------------------------------------------------------------------------------------------


def test_a_tape_of_a_graph() -> None:
    g = tw.TensorGraph("step")
    x, position = g.input("x", ("n", 32), tw.f32), g.input("position", (1,), tw.i32)
    keys = g.op("KVAppend", g.cache("keys", (8, 1, 32), tw.f32), g.op("Rope", x.reshape("n", 1, 32), position), position, name="append")
    g.output("y", g.op("Attention", x.reshape("n", 1, 32), keys, keys, position).reshape("n", 32))
    with pytest.raises(tw.UserError, match="the size 'n' of the graph 'step' has no value"):
        tw.mega.Tape.from_graph(g)
    plan = tw.mega.plan(tw.mega.Tape.from_graph(g, n=1))
    assert [one.op for one in plan.tape.instructions] == ["Rope", "KVAppend", "Attention"]
    with plan.compile().load() as runner:
        for p in range(3):
            value = floats(1, 32)
            want = g.run(device="cpu", x=value, position=np.array([p], np.int32))
            assert np.abs(runner.launch(value, p) - want).max() < 1e-6
        with pytest.raises(tw.UserError, match="append: position is 8, and the cache holds 8 positions"):
            runner.launch(value, 8)
        assert runner.cache("keys")[2].any() and not runner.cache("keys")[3].any()
    with pytest.raises(tw.UserError, match="stands for a tensor graph"):
        plan.tape.emit("Add", 0, 1)


def test_named_extents_of_a_graph_are_numbers_of_its_tape() -> None:
    g = tw.TensorGraph("named")
    x, position = g.input("x", ("n", 4, 16), tw.f32), g.input("position", (1,), tw.i32)
    keys = g.op("KVAppend", g.cache("keys", ("longest", 4, 16), tw.f32), x, position, name="append")
    g.output("y", g.op("Exp", keys.transpose(1, 0, 2)[:, 1:3]))
    plan = tw.mega.plan(tw.mega.Tape.from_graph(g, n=2, longest=5))
    found = []
    for device in ("cpu", "emulator"):
        with plan.compile(device).load() as runner:
            runner.launch(np.ones((2, 4, 16), np.float32), 1)
            found.append(runner.launch(np.full((2, 4, 16), 2, np.float32), 2))
    want = np.exp(np.array([1, 2], np.float32))[None, :, None] + np.zeros((4, 2, 16))
    assert np.allclose(found[0], want) and np.allclose(found[1], want)
    assert g.executor.capacity == {}


def test_a_tape_of_an_onnx_file() -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
    plan = tw.mega.plan(tw.mega.Tape.from_onnx("examples/onnx/classifier.onnx", x=(2, 4)))
    with plan.compile().load() as runner:
        assert np.array_equal(runner.launch(x), tw.graph.from_onnx("examples/onnx/classifier.onnx").run(x=x, device="cpu"))


# -- what is refused ------------------------------------------------------------------------------------------------


def _unknown(tape: tw.mega.Tape, x: int) -> None:
    tape.output("y", tape.emit("Conv", x))


def _before(tape: tw.mega.Tape, x: int) -> None:
    late = tape.slot()
    tape.output("y", tape.emit("Add", x, late))
    tape.instruction("Neg", [x], [late])


def _never(tape: tw.mega.Tape, x: int) -> None:
    tape.output("y", tape.emit("Add", x, tape.slot()))


def _twice(tape: tw.mega.Tape, x: int) -> None:
    y = tape.emit("Neg", x)
    tape.instruction("Exp", [x], [y])
    tape.output("y", y)


def _onto_input(tape: tw.mega.Tape, x: int) -> None:
    tape.instruction("Exp", [x], [x])
    tape.output("y", x)


def _count(tape: tw.mega.Tape, x: int) -> None:
    tape.output("y", tape.emit("Add", x))


def _attribute(tape: tw.mega.Tape, x: int) -> None:
    tape.output("y", tape.emit("Softmax", x, dim=1))


def _shapes(tape: tw.mega.Tape, x: int) -> None:
    tape.emit("Neg", x)
    tape.output("y", tape.emit("Add", x, np.zeros((3, 7), np.float32)))


def _dtypes(tape: tw.mega.Tape, x: int) -> None:
    tape.output("y", tape.emit("Mul", x, np.zeros(5, np.int64)))


def _declared(tape: tw.mega.Tape, x: int) -> None:
    y = tape.slot((2, 6), tw.f32)
    tape.instruction("Neg", [x], [y])
    tape.output("y", y)


def _declared_dtype(tape: tw.mega.Tape, x: int) -> None:
    y = tape.slot(dtype=tw.f16)
    tape.instruction("Neg", [x], [y])
    tape.output("y", y)


def _no_cache(tape: tw.mega.Tape, x: int) -> None:
    tape.emit("KVCacheAppendK", x, layer=0)
    tape.output("y", x)


def _layer(tape: tw.mega.Tape, x: int) -> None:
    tape.kv_cache(2, 8, 1, 5)
    tape.emit("KVCacheAppendK", tape.emit("Reshape", x, shape=[2, 1, 5]), layer=2)
    tape.output("y", x)


def _rows(tape: tw.mega.Tape, x: int) -> None:
    tape.kv_cache(2, 8, 1, 6)
    tape.emit("KVCacheAppendK", tape.emit("Reshape", x, shape=[2, 1, 5]), layer=1)
    tape.output("y", x)


def _norm(tape: tw.mega.Tape, x: int) -> None:
    tape.output("y", tape.emit("RMSNorm", x, np.zeros(4, np.float32)))


def _slot(tape: tw.mega.Tape, x: int) -> None:
    tape.output("y", tape.emit("Neg", 99))


@pytest.mark.parametrize(("build", "message"), [
    (_unknown, r"instruction 0 \(Conv\): there is no op 'Conv'"),
    (_before, r"instruction 0 \(Add\): reads slot 1 before it is written, by instruction 1 \(Neg\)"),
    (_never, r"instruction 0 \(Add\): reads slot 1 before it is written: no instruction writes it"),
    (_twice, r"instruction 1 \(Exp\): writes slot 1, which instruction 0 \(Neg\) has written"),
    (_onto_input, r"instruction 0 \(Exp\): writes slot 0, which is the input 'x'"),
    (_count, r"instruction 0 \(Add\): has 1 input\(s\), and takes 2"),
    (_attribute, r"instruction 0 \(Softmax\): has no attribute 'dim'"),
    (_shapes, r"instruction 1 \(Add\): shapes \[2, 5\], \[3, 7\] do not meet"),
    (_dtypes, r"instruction 0 \(Mul\): its inputs are float32 and int64"),
    (_declared, r"instruction 0 \(Neg\): slot 1 is declared as f32\[2, 6\], and it makes f32\[2, 5\]"),
    (_declared_dtype, r"instruction 0 \(Neg\): slot 1 is declared as f16\?, and it makes f32\[2, 5\]"),
    (_no_cache, r"instruction 0 \(KVCacheAppendK\): the tape has no caches"),
    (_layer, r"instruction 1 \(KVCacheAppendK\): layer is 2, and the caches have 2"),
    (_rows, r"instruction 1 \(KVCacheAppendK\).*features of the cache and of the rows: 6 and 5 differ"),
    (_norm, r"instruction 0 \(RMSNorm\): its gamma is \[4\], for axes of \[5\]"),
    (_slot, r"instruction 0 \(Neg\): reads slot 99, which there is not"),
])  # fmt: skip
def test_what_is_wrong_with_a_tape(build: Callable[[tw.mega.Tape, int], None], message: str) -> None:
    tape = tw.mega.Tape("wrong")
    build(tape, tape.input("x", (2, 5)))
    with pytest.raises(tw.UserError, match=message):
        tw.mega.plan(tape)


def test_support_lists_all_unknown_ops() -> None:
    tape = tw.mega.Tape("mixed")
    x = tape.input("x", (2, 5))
    tape.output("y", tape.emit("Conv", tape.emit("LSTM", tape.emit("Neg", x)), tape.emit("Conv", x)))
    assert tw.mega.check_support(tape) == ["LSTM", "Conv"]
    assert tw.mega.check_support(gated()) == []
    assert tw.mega.check_support(["Add", "Conv"]) == ["Conv"]


def test_what_a_runner_refuses() -> None:
    runner = tw.mega.plan(gated()).compile().load()
    x = floats(3, 33)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: runner.launch(x), r"the weight 'gamma' \(f32\[33\]\) has no numbers, for instruction 0 \(RMSNorm\)"),
        (lambda: runner.set_weights(WEIGHTS[:3]), r"3 weight\(s\) were given, and the tape 'gated' has 4"),
        (lambda: runner.set_weights(gate=WEIGHTS[3]), r"the weight 'gate' is f32\[33, 65\], and was given as f32\[65, 33\], for instruction 1 \(MatMul\)"),
        (lambda: runner.set_weights(gate=WEIGHTS[1].astype(np.float16)), r"the weight 'gate' is f32\[33, 65\], and was given as f16\[33, 65\]"),
        (lambda: runner.set_weights(other=x), "has no weight 'other' to set"),
        (lambda: runner.set_kv_cache([x], [x]), "has no caches"),
        (lambda: runner.launch(x.T), r"the input 'x' is f32\[3, 33\], and was given as \[33, 3\], for instruction 0 \(RMSNorm\)"),
        (lambda: runner.launch(x.astype(np.float64)), "and was given as f64"),
        (lambda: runner.launch({"z": x}), "has no input 'z'"),
        (lambda: runner.launch(), "missing the input 'x'"),
        (lambda: runner.launch(x, 5), "position is 5, and nothing in the tape 'gated' reads it"),
    ]  # fmt: skip
    for call, message in refused:
        with pytest.raises(tw.UserError, match=message):
            call()
    with pytest.raises(tw.DeviceError, match=r"1 runner\(s\) were not closed: <runner of gated on cpu>"):
        tw.mega.check_leaks()
    runner.close()
    runner.close()
    tw.mega.check_leaks()
    for closed in (lambda: runner.launch(x), lambda: runner.set_weights(WEIGHTS), runner.timeline):
        with pytest.raises(tw.DeviceError, match="the runner of 'gated' was used after it was closed"):
            closed()


def test_positions_and_caches_are_checked() -> None:
    tape = tw.mega.Tape("cached")
    tape.kv_cache(1, 4, 1, 5)
    rows = tape.input("rows", (2, 1, 5))
    tape.emit("KVCacheAppendK", rows)
    tape.output("y", tape.emit("Neg", rows))
    with tw.mega.plan(tape).compile().load() as runner:
        good = [np.zeros((4, 1, 5), np.float32)]
        for caches, message in [
            ([np.zeros((4, 1, 6), np.float32)], r"the cache 'keys_0' is f32\[4, 1, 5\], and was given as f32\[4, 1, 6\]"), ([np.zeros((4, 1, 5))], "was given as f64"),
            (good * 2, r"keys of 2 layer\(s\) were given"), ([np.zeros((5, 1, 4), np.float32).T], "not contiguous"),
        ]:  # fmt: skip
            with pytest.raises(tw.UserError, match=message):
                runner.set_kv_cache(caches, good)
        runner.launch(floats(2, 1, 5), 2)
        with pytest.raises(tw.UserError, match=r"instruction 0 \(KVCacheAppendK\): position is 3, and the cache holds 4 positions, of which it would append 2"):
            runner.launch(floats(2, 1, 5), 3)
        for position in (-1, 1.5, [1, 2]):
            with pytest.raises(tw.UserError, match="position is"):
                runner.launch(floats(2, 1, 5), position)


def test_a_runner_that_is_forgotten_warns() -> None:
    held = [tw.mega.plan(gated()).compile().load()]
    with pytest.warns(ResourceWarning, match="the runner of 'gated' on cpu was never closed"):
        held.clear()


def test_one_kernel_in_the_emulator() -> None:
    """The same plan as one persistent kernel: blocks that wait for each other's counters."""
    with tw.mega.plan(gated(1), fuse=False).compile("emulator").load() as runner:
        runner.set_weights(WEIGHTS)
        for _ in range(2):
            x = floats(1, 33)
            assert np.abs(runner.launch(x) - reference(x, *WEIGHTS)).max() < 1e-5
        assert np.abs(runner.launch(x, clocks=True) - reference(x, *WEIGHTS)).max() < 1e-5
        report = runner.report()
        assert [task.title for task in report.tasks] == ["rms_norm", "onnx_matmul", "tape_silu", "onnx_matmul", "onnx_mul", "onnx_matmul", "onnx_add"]
        assert all(t.end >= t.start >= t.arrived >= 0 for t in report.times) and report.path[-1] == 6
    with pytest.raises(tw.UserError, match="workers=2 does nothing on 'emulator"):
        tw.mega.plan(gated()).compile("emulator").load(workers=2)


def test_one_kernel_for_a_gpu() -> None:
    kernel = tw.mega.plan(gated(1)).compile("sm_90a")
    assert kernel.artifact.kind == "ptx" and len(kernel.artifact.launches) == 1 and kernel.artifact.launches[0].cooperative
    assert tw.mega.plan(gated(1)).compile("sm_90a").from_cache
    with pytest.raises(tw.UserError, match="this megakernel is for sm_90a, and 'cpu' is"):
        kernel.load("cpu")


@pytest.mark.parametrize("target", ["wgsl", "tpu"])
def test_other_targets_are_refused(target: str) -> None:
    with pytest.raises(tw.TilewrightError):
        tw.mega.plan(gated()).compile(target)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_views_of_inputs_follow_them(device: str) -> None:
    """A transpose and then a reshape is no view: it is copied in every launch."""
    tape = tw.mega.Tape("views")
    x = tape.input("x", (2, 3))
    flat = tape.emit("Reshape", tape.emit("Transpose", x), shape=[6])
    tape.output("flat", flat)
    tape.output("y", tape.emit("Neg", flat))
    with tw.mega.plan(tape).compile(device).load() as runner:
        for _ in range(2):
            given = floats(2, 3)
            found = runner.launch(given)
            assert np.array_equal(found["flat"], given.T.reshape(6)) and np.array_equal(found["y"], -given.T.reshape(6))


# -- tasks ----------------------------------------------------------------------------------------------------------


def _launch(*extents: tuple[int, int, bool], scratch: tuple[tuple[int, str], ...] = ()) -> RecordedLaunch:
    return RecordedLaunch("launch", None, None, extents, frozenset(scratch))


def test_dependencies_are_those_that_memory_makes() -> None:
    a, b, c = (0, 10), (10, 20), (5, 15)
    write, read = (lambda m: (*m, True)), (lambda m: (*m, False))
    assert dependencies([_launch(write(a)), _launch(write(b)), _launch(read(a), read(b))]) == [(), (), (0, 1)]
    assert dependencies([_launch(write(a)), _launch(read(a), write(b)), _launch(read(b), read(a))]) == [(), (0,), (1,)]
    assert dependencies([_launch(read(a)), _launch(read(a)), _launch(write(c)), _launch(write(b))]) == [(), (), (0, 1), (2,)]
    assert dependencies([_launch(scratch=((0, "s"),)), _launch(), _launch(scratch=((0, "s"),))]) == [(), (), (0,)]
    barrier = RecordedLaunch("copy", None, None, (), frozenset(), lambda: None)
    assert dependencies([_launch(write(a)), _launch(write(b)), barrier, _launch()]) == [(), (), (0, 1), (2,)]


def test_every_wait_that_is_taken_away_is_noticed() -> None:
    with tw.mega.plan(gated(rows=5), fuse=False).compile().load(workers=2) as runner:
        runner.set_weights(WEIGHTS)
        tasks: CpuTasks = runner.tasks
        check_schedule(tasks.tasks, tasks.waits, tasks.titles)
        waits = 0
        for number, task in enumerate(tasks.tasks):
            for gone in task.waits:
                waits += 1
                kept = ScheduledTask(task.number, task.launch, task.begin, task.end, tuple(w for w in task.waits if w != gone))
                with pytest.raises(tw.CompilerBug, match="does not wait for"):
                    check_schedule([*tasks.tasks[:number], kept, *tasks.tasks[number + 1 :]], tasks.waits, tasks.titles)
        assert waits >= 6
        with pytest.raises(tw.CompilerBug, match="which comes later"):
            check_schedule(list(reversed(tasks.tasks)), tasks.waits, tasks.titles)


def test_an_error_in_a_task_is_that_of_the_launch() -> None:
    """Indices of data are checked on a CPU; the launch after it works."""
    tape = tw.mega.Tape("gathered")
    ids = tape.input("ids", (3,), tw.i64)
    tape.output("y", tape.emit("Gather", np.arange(7, dtype=np.float32), ids))
    with tw.mega.plan(tape).compile().load() as runner:
        with pytest.raises(tw.TilewrightError, match="index 9"):
            runner.launch(np.array([1, 9, 2]))
        assert runner.launch(np.array([1, 6, 2])).tolist() == [1, 6, 2]


@pytest.mark.parametrize("workers", [1, 3])
def test_large_launches_are_cut_for_threads(workers: int) -> None:
    """Threads take tasks from one list and wait at counters, run after run; more workers than threads do no harm."""
    tape = tw.mega.Tape("wide")
    x = tape.input("x", (257, 129))
    left, right = tape.emit("Exp", x), tape.emit("Neg", x)
    both = tape.emit("Mul", left, tape.emit("Transpose", tape.emit("Transpose", right)))
    tape.output("y", tape.emit("ReduceSum", both, axes=[1]))
    with tw.mega.plan(tape, fuse=False).compile().load(workers=workers) as runner:
        assert max(sum(task.launch == number for task in runner.tasks.tasks) for number in range(len(runner.tasks.launches))) == workers
        for _ in range(50):
            given = floats(257, 129)
            want = -(np.exp(given.astype(np.float64)) * given).sum(1)
            assert np.abs(runner.launch(given).reshape(-1) - want).max() < 1e-2
        runner.launch(given, clocks=True)
        assert len(runner.timeline()) == len(runner.tasks.tasks) and all(t.end >= t.start >= t.arrived >= 0 for t in runner.timeline())
