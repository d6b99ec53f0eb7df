"""Benchmarks that run row by row: every row is right, with a GPU's peers too; failures cost one row; steady rates are warm."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from bench import contraction_run as runs
from bench import run
from bench.contraction_run import DeviceSampler, Timed
from bench.harness import OURS, Setting

from tilewright.cli.main import cli

torch = pytest.importorskip("torch")
contractions = importlib.import_module("bench.contractions")
transformer = importlib.import_module("bench.transformer")

SETTING = Setting("test", "abc", "2026-01-01T00:00:00Z")
SMALL = {
    "rope": (2, 24, 3, 16), "attention": (1, 2, 70, 16), "attention_causal": (1, 2, 70, 16), "attention_masked": (1, 2, 70, 16),
    "attention_grouped": (1, 4, 2, 70, 16), "transformer_block": (2, 32, 64, 2, 128),
}  # fmt: skip


class Simulated(contractions.Place):  # type: ignore[misc, name-defined]
    """The host's memory, said to be a GPU's: rows get the peers they have there."""

    gpu = True


def place(kind: type = Simulated) -> object:
    return kind("cpu", contractions.host_view, lambda: None, cold_bytes=0)


def constant(variants: Sequence[Timed], seconds: float) -> dict[str, list[float]]:
    return {v.name: [0.5 if v.name == OURS else 1.0] for v in variants}


def small(row: object) -> object:
    return transformer.Layer(row.op, SMALL.get(row.op, (6, 300)), row.dtype)  # type: ignore[attr-defined]


def bench(kind: type = Simulated) -> runs.Bench:
    return runs.Bench(place(kind), constant, 0.0, SETTING, transformer, lambda dtype: 1.0)  # type: ignore[arg-type]


def every_small_row() -> list[object]:
    return list(dict.fromkeys(small(row) for row in transformer.gpu_rows()))


@pytest.mark.parametrize("row", every_small_row(), ids=lambda row: row.label)
def test_every_gpu_row_is_right_on_the_host(row: object) -> None:
    record = bench().measure(row)  # type: ignore[arg-type]
    assert record.error is None
    assert record.max_error is not None
    op = record.op
    assert record.ratio == (None if op == "attention_masked" else 2.0)
    assert record.launches is not None
    assert (record.of_copy is not None) == (op in (*transformer.ROWS, "rope"))
    assert (record.TFLOPS is not None) == op.startswith(("attention", "transformer"))
    # What needs a GPU's library is left out, and said.
    absent = ["torch cuDNN"] if op.startswith("attention") else []
    absent += ["torch efficient"] if op == "attention_masked" else []
    assert [note.split(": ")[:2] for note in record.notes] == [[f"{op} without {name}", "RuntimeError"] for name in absent]


@pytest.mark.parametrize("row", list(dict.fromkeys(small(row) for row in transformer.cpu_rows())), ids=lambda row: row.label)
def test_every_cpu_row_is_right(row: object) -> None:
    record = bench(contractions.Place).measure(row)  # type: ignore[arg-type]
    assert record.error is None
    assert record.notes == []
    assert {"torch", "numpy"} <= set(record.peers)


def test_a_block_is_a_few_launches() -> None:
    record = bench().measure(transformer.Layer("transformer_block", SMALL["transformer_block"], "bf16"))
    # Five calls, of which the norms may be kernels of their own.
    assert record.launches is not None
    assert 5 <= record.launches <= 7


def test_work_is_counted_as_papers_count_it() -> None:
    work = transformer.Layer("attention", (4, 16, 4096, 128), "bf16").flops
    assert work == 4 * 4 * 16 * 4096 * 4096 * 128
    assert transformer.Layer("attention_causal", (4, 16, 4096, 128), "bf16").flops == work // 2
    assert transformer.Layer("attention_grouped", (4, 16, 8, 4096, 128), "bf16").flops == work // 2
    rows, features, hidden = 8 * 512, 768, 3072
    products = 2 * rows * features * (3 * features + features + 2 * hidden)
    block = transformer.Layer("transformer_block", (8, 512, features, 12, hidden), "bf16")
    assert block.flops == products + 4 * 8 * 512 * 512 * features


@pytest.mark.parametrize("op", ["softmax", "rope", "attention", "attention_causal", "transformer_block"])
def test_bounds_find_small_mistakes(op: str) -> None:
    """An output that is a few hundredths off (a tenth for a block, whose steps round), or in the wrong place."""
    problem = transformer.problem(transformer.Layer(op, SMALL.get(op, (6, 300)), "bf16"), place())
    right = problem.references[0]
    assert problem.judge(0, right.to(torch.bfloat16), False)[0] == ""
    off = right.clone()
    much = {"transformer_block": 0.1, "attention": 0.05, "attention_causal": 0.05}.get(op, 0.02)
    off[-1, -1] += much * (off[-1, -1].abs() if op == "softmax" else 1 + off[-1, -1].abs())
    assert "wrong, one at" in problem.judge(0, off, False)[0]
    assert "wrong, one at" in problem.judge(0, right.flip(0, 1), False)[0]
    assert "wrong, one at" in problem.judge(0, torch.full_like(right, float("nan")), True)[0]


def test_a_row_that_fails_is_reported_and_a_wrong_peer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    row = transformer.Layer("softmax", (6, 300), "f32")
    monkeypatch.setattr(transformer.kernels, "softmax", transformer.kernels.gelu)
    assert "tilewright: 1800 of 1800 wrong" in (bench().measure(row).error or "")
    monkeypatch.undo()
    monkeypatch.setattr(torch, "softmax", lambda x, dim, out: out.zero_())
    record = bench().measure(row)
    assert record.error is not None
    assert record.error.startswith("torch: 1800 of 1800 wrong")
    assert (record.ours_ms, record.ratio) == (0.5, None)
    assert bench().measure(transformer.Layer("softmax", (6,), "f32")).error is not None


class Recorder:
    """A clock that notes which launches were timed together."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.queues: list[list[list[str]]] = []

    def sample(self, run: Callable[[int], object], slots: Iterable[int], batch: int) -> list[float]:
        queue, times = [], []
        for slot in slots:
            self.log.clear()
            run(slot)
            queue.append(list(self.log))
            # The first of a stretch is slow.
            warm = len(queue) > 1 and queue[-2][:1] == queue[-1][:1]
            times.append(len(self.log) * (1.0 if warm else 2.0))
        self.queues.append(queue)
        return times


def timed(log: list[str], name: str, steady: bool) -> Timed:
    def call() -> object:
        log.append(name)
        return SimpleNamespace()

    return Timed(name, [call, call], steady)  # type: ignore[list-item]


def test_a_steady_rate_is_timed_after_launches_of_the_same_kernel() -> None:
    log: list[str] = []
    clock = Recorder(log)
    samples = DeviceSampler(clock, 4)([timed(log, OURS, True), timed(log, "peer", True)], 10.0)
    # A launch takes a millisecond: ten of them, after ten.
    assert samples == {OURS: [1.0] * 4, "peer": [1.0] * 4}
    turns = [group for queue in clock.queues[4:] for group in queue]
    assert all(len(group) == 10 and len(set(group)) == 1 for group in turns)
    assert all(first == second for first, second in zip(turns[::2], turns[1::2], strict=True))
    assert all(sum(map(len, queue)) <= runs.QUEUED for queue in clock.queues)


def test_calls_of_many_kernels_do_not_fill_the_queue() -> None:
    log: list[str] = []
    many = Timed(OURS, timed(log, OURS, False).calls, launches=24)
    parts = runs._parts([runs.Turn(many, 3)] * 10, runs.QUEUED)
    assert [len(part) for part in parts] == [2] * 5


def test_other_rates_are_timed_launch_by_launch() -> None:
    log: list[str] = []
    clock = Recorder(log)
    samples = DeviceSampler(clock, 5)([timed(log, OURS, False), timed(log, "peer", False)], 10.0)
    assert {len(times) for times in samples.values()} == {5}
    assert all(len(group) == 1 for queue in clock.queues for group in queue)


def test_launches_that_cannot_be_counted_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> object:
        return torch.ones(3) + 1

    assert runs.device_launches(call, lambda: None) is None  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch.profiler.profile", lambda activities: (_ for _ in ()).throw(RuntimeError("no CUPTI")))
    assert runs.device_launches(call, lambda: None) is None  # type: ignore[arg-type]
    events = [SimpleNamespace(device_type=getattr(torch._C._autograd.DeviceType, kind)) for kind in ("CUDA", "CPU", "CUDA")]
    monkeypatch.setattr("torch.profiler.profile", lambda activities: nullcontext(SimpleNamespace(events=lambda: events)))
    assert runs.device_launches(call, lambda: None) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("quick", [False, True])
def test_a_bench_on_a_gpu_is_opened_with_its_suite(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import gpu

    device = SimpleNamespace(wrap=lambda tensor: tensor)
    monkeypatch.setattr("tilewright.execute.devices.find_device", lambda name: device)
    monkeypatch.setattr("tilewright.runtime.cuda.device.devices", lambda: [device])
    monkeypatch.setattr(gpu, "EventClock", lambda: Recorder([]))
    opened = runs.open_bench("transformer", SETTING, quick)
    assert opened.suite is transformer
    assert opened.place.gpu
    assert opened.place.compile is not quick
    assert opened.copy_rate is not None
    assert runs.open_bench("matmul", SETTING, quick).suite is contractions
    torch.set_grad_enabled(True)


def test_kinds_of_the_command_are_those_of_the_benchmarks() -> None:
    argument = next(p for p in cli.commands["bench"].params if p.name == "kind")
    assert tuple(argument.type.choices) == run.KINDS  # type: ignore[attr-defined]


def test_labels_are_different() -> None:
    """`--only` can choose each row of every suite."""
    for kind in runs.KINDS:
        labels = [row.label for row in runs.rows(kind)]
        assert len(labels) == len(set(labels))
    assert any(row.op == "transformer_block" for row in runs.rows("transformer"))


def test_rows_travel_to_the_process_that_measures_them() -> None:
    runner = runs.Runner("transformer-cpu", SETTING, True)
    try:
        record = runner.measure(transformer.Layer("softmax", (64, 64), "f32"))
        assert record.error is None
        assert record.ours_ms is not None
    finally:
        runner.stop()
