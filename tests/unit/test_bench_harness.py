"""The benchmark harness: wrong results are found and never compared, samples interleave, device time excludes the host's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bench import harness, run
from bench.harness import (
    OURS,
    Bar,
    Case,
    HostClock,
    LoadMeter,
    Plan,
    Prepared,
    Record,
    Setting,
    Variant,
    interleave,
    measure,
    summarise,
)

SETTING = Setting("test", "abc", "2026-01-01T00:00:00Z")
PLAN = Plan(4, 2, 1, 10.0)


class ScriptedClock:
    """Gives each variant the time its name says, and notes the order."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times = times
        self.turns: list[tuple[str, list[int]]] = []

    def sample(self, run: Callable[[int], object], slots: Iterable[int], batch: int) -> list[float]:
        order = list(slots)
        name = str(run(order[0]))
        self.turns.append((name, order))
        return [self.times[name]] * (len(order) // batch)


def fill(out: np.ndarray, value: float, name: str) -> Callable[[int], object]:
    def run(slot: int) -> str:
        out[slot] = value
        return name

    return run


def case_of(variants: list[Variant], out: np.ndarray, bar: Bar | None = None, slots: int = 1) -> Case:
    def verify(slot: int, returned: object, variant: Variant) -> str:
        return "" if out[slot] == 1.0 else f"{out[slot]}"

    return Case("one", (1,), "f32", 4000, lambda: Prepared(variants, lambda: out.fill(np.nan), verify, slots), bar)


def test_ratio_is_the_best_right_peer_over_ours() -> None:
    out = np.zeros(1)
    variants = [Variant(OURS, fill(out, 1.0, OURS)), Variant("slow", fill(out, 1.0, "slow")), Variant("wrong", fill(out, 2.0, "wrong"))]
    clock = ScriptedClock({OURS: 2.0, "slow": 5.0, "wrong": 0.1})
    record = measure(case_of(variants, out, Bar(2.4)), clock, PLAN, SETTING)
    assert (record.peer, record.peer_ms, record.ratio, record.peers) == ("slow", 5.0, 2.5, {"slow": 5.0})
    assert record.met
    assert record.GBps == pytest.approx(4000 / 2.0 / 1e6)
    assert record.error == "wrong: 2.0"


def test_a_variant_that_writes_nothing_or_raises_is_reported() -> None:
    out = np.ones(1)

    def broken(slot: int) -> object:
        raise RuntimeError("no such device")

    variants = [Variant(OURS, lambda slot: OURS), Variant("broken", broken)]
    record = measure(case_of(variants, out), ScriptedClock({}), PLAN, SETTING)
    assert record.error == "tilewright: nan; broken: RuntimeError: no such device"
    assert record.ours_ms is None
    assert record.ratio is None


def test_a_result_that_goes_bad_while_timed_is_reported() -> None:
    out, calls = np.zeros(1), 0

    def once(slot: int) -> str:
        nonlocal calls
        calls += 1
        out[slot] = 1.0 if calls <= 3 else 7.0
        return OURS

    record = measure(case_of([Variant(OURS, once)], out), ScriptedClock({OURS: 1.0}), PLAN, SETTING)
    assert record.error == "tilewright after timing: 7.0"


def test_rounds_interleave_turn_and_rotate_the_buffers() -> None:
    out = np.zeros(3)
    variants = [Variant(n, fill(out, 1.0, n)) for n in (OURS, "a", "b")]
    clock = ScriptedClock({OURS: 1.0, "a": 1.0, "b": 1.0})
    samples = interleave(case_of(variants, out, slots=3).prepare(), variants, clock, PLAN)
    assert [name for name, _ in clock.turns[:9]] == [OURS, "a", "b", "b", "a", OURS, "a", "b", OURS]
    assert [order for _, order in clock.turns[::3]] == [[0, 1], [2, 0], [1, 2], [0, 1]]
    assert {len(times) for times in samples.values()} == {8}


def test_time_limit_keeps_three_rounds() -> None:
    out = np.zeros(1)
    variants = [Variant(OURS, fill(out, 1.0, OURS))]
    seconds = iter(range(0, 1000, 100))
    samples = interleave(case_of(variants, out).prepare(), variants, ScriptedClock({OURS: 1.0}), replace(PLAN, rounds=9), lambda: next(seconds))
    assert len(samples[OURS]) == 3 * PLAN.per_round


def test_bar_against_named_peers() -> None:
    record = Record("argmax", [8], "f32", "test")
    summarise(record, {OURS: [1.0], "numba": [1.5], "numpy": [3.5]}, 0, Bar(3.0, ("numpy",)))
    assert (record.ratio, record.bar_ratio, record.met) == (1.5, 3.5, True)
    ours_twice = Record("launch_host", [8], "f32", "test")
    summarise(ours_twice, {OURS: [2.0], f"{OURS}, other arrays": [1.0], "torch": [4.0]}, 0, None)
    assert (ours_twice.peer, ours_twice.ratio, ours_twice.ratio_min) == ("torch", 2.0, 2.0)
    late = Record("call", [8], "f32", "test", bar_ms=0.5)
    summarise(late, {OURS: [0.6]}, 0, None)
    assert late.met is False


def test_line_is_json_with_the_fields_readers_expect() -> None:
    line = json.loads(Record("sum", [8], "f32", "test", ours_ms=1 / 3, commit="abc", date="d").line())
    assert {"op", "shape", "dtype", "device", "ours_ms", "ours_min_ms", "peer", "peer_ms", "ratio", "GBps", "peers", "commit", "date", "error"} <= set(line)
    assert line["ours_ms"] == 0.33333


def test_host_clock_gives_a_time_for_each_batch() -> None:
    calls: list[int] = []
    times = HostClock(warm=0.0).sample(calls.append, [0, 1, 2, 0, 1, 2], 3)
    assert calls == [0, 0, 0, 1, 2, 0, 1, 2]
    assert len(times) == 2
    calls.clear()
    assert len(HostClock(warm=0.005).sample(calls.append, [7, 8], 1)) == 2
    assert len(calls) > 10 and calls[-3:] == [7, 7, 8]  # short calls have been made for some milliseconds before


def test_load_meter_counts_others_and_says_when_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"wall": 0.0, "own": 0.0}
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: clock["wall"], process_time=lambda: clock["own"]))
    monkeypatch.setattr(harness.os, "sysconf", lambda name: 100)
    file = tmp_path / "stat"
    file.write_text("cpu 100 0 0 9 0 0 0 0 0 0\n")
    meter = LoadMeter(file)
    clock.update(wall=2.0, own=1.0)
    file.write_text("cpu 400 0 50 9 0 0 50 0 0 0\n")
    assert meter.read() == pytest.approx((4.0 - 1.0) / 2.0)
    assert LoadMeter(tmp_path / "none").read() is None


# -- the command --------------------------------------------------------------------------------------------------------


def test_missing_peer_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(run.require.__globals__["NEEDED"], "cpu", {"no_such_peer": "no-such-peer"})
    assert run.main("cpu", True) == 2
    assert "`make bench`, which installs the peers, or `pip install no-such-peer`" in capsys.readouterr().err


def test_wrong_results_make_the_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def jobs(setting: Setting, quick: bool, wanted: Callable[[str], bool]) -> list[run.Job]:
        return [run.Job("good", ("good",), lambda: iter([Record("good", [], "", "test")])),
                run.Job("bad", ("bad",), lambda: iter([Record("bad", [], "", "test", error="wrong")]))]  # fmt: skip

    monkeypatch.setattr(run, "require", lambda kind: None)
    monkeypatch.setattr(run, "cpu_jobs", jobs)
    assert run.main("cpu", True, ["good"]) == 0
    assert run.main("cpu", True) == 1
    assert [json.loads(line)["op"] for line in capsys.readouterr().out.splitlines()] == ["good", "good", "bad"]
    assert run.main("cpu", True, ["ugly"]) == 2
    assert "no benchmark 'ugly' for cpu\nhelp: choose from good, bad" in capsys.readouterr().err


def test_table_shows_errors_and_missed_bars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Record("slow", [4, 2], "f32", "test", 2.0, 1.9, "numpy", 1.0, 0.5, GBps=3.0, bar=0.95)
    bad = Record("bad", [4], "f32", "test", error="1 of 4 wrong")
    monkeypatch.setattr(run, "require", lambda kind: None)
    monkeypatch.setattr(run, "cpu_jobs", lambda *_: [run.Job("both", ("slow", "bad"), lambda: iter([slow, bad]))])
    assert run.main("cpu") == 1
    shown = capsys.readouterr().out
    assert "missed >= 0.95" in shown
    assert "bad f32: 1 of 4 wrong" in shown


# -- the cases, small ---------------------------------------------------------------------------------------------------


def small_cases() -> list[Case]:
    pytest.importorskip("torch")
    pytest.importorskip("numba")
    from bench import cpu

    return cpu.cases(quick=True, n=1 << 16, side=64)


def test_every_cpu_variant_is_right() -> None:
    for case in small_cases():
        prepared = case.prepare()
        assert harness.check(prepared, [v for v in prepared.variants if not v.name.startswith("numba")]) == {}, case.label
        assert prepared.variants[0].name == OURS


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at = 0.0

    def record(self) -> None:
        # An event is reached when all that was queued before it is done, but not before the host queued it.
        self.device.end = self.at = max(self.device.end, self.device.host)

    def query(self) -> bool:
        return self.at <= self.device.host

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at - self.at


class FakeDevice(SimpleNamespace):
    """A device and a host with times of their own, in milliseconds: what is queued runs after what was queued before."""

    def __init__(self) -> None:
        super().__init__()
        self.host = self.end = 0.0

    def Event(self, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)

    def queue(self, device_ms: float, host_ms: float) -> None:
        self.host += host_ms
        self.end = max(self.end, self.host) + device_ms

    def _sleep(self, cycles: int) -> None:
        self.queue(cycles / 1_000_000, 0.001)

    def synchronize(self) -> None:
        self.host = max(self.host, self.end)


@pytest.mark.parametrize("host_ms", [0.01, 0.4, 2.0])
@pytest.mark.parametrize("batch", [1, 20])
def test_event_clock_measures_the_device_alone(host_ms: float, batch: int) -> None:
    pytest.importorskip("torch")
    from bench.gpu import EventClock

    device = FakeDevice()
    clock = EventClock(device)  # type: ignore[arg-type]
    assert clock.sample(lambda slot: device.queue(0.01, host_ms), range(batch), batch) == pytest.approx([0.01])


def host_machine() -> tuple[object, list[int]]:
    """A `Machine` whose device is the host: our kernels get NumPy views of the tensors, NumPy stands in for CuPy."""
    torch = pytest.importorskip("torch")
    import ml_dtypes
    from bench import gpu

    synchronized: list[int] = []

    def wrap(tensor: object) -> np.ndarray:
        if tensor.dtype is torch.bfloat16:  # type: ignore[attr-defined]
            return np.asarray(tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16))  # type: ignore[attr-defined]
        return np.asarray(tensor)

    clock = HostClock()
    return gpu.Machine("cpu", wrap, clock, clock, cupy=np, synchronize=lambda: synchronized.append(1)), synchronized


def test_every_gpu_case_is_right_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, synchronized = host_machine()
    from bench import gpu

    monkeypatch.setattr(gpu, "COLD_BYTES", 50_000)
    monkeypatch.setattr(gpu, "SHORT_BYTES", 10_000)
    assert isinstance(machine, gpu.Machine)
    cases = gpu.cases(machine, True, n=4096, wide=(48, 64), small=(32, 32))
    assert len(cases) == 17
    for case in cases:
        prepared = case.prepare()
        assert harness.check(prepared, prepared.variants) == {}, case.label
        touched = case.nbytes * prepared.slots
        assert touched >= 40_000, case.label
        assert prepared.batch == (gpu.BATCH if case.nbytes < 10_000 else 1), case.label
    assert synchronized


def test_gpu_session_reports_the_part_of_a_copy() -> None:
    machine, _ = host_machine()
    from bench import gpu

    assert isinstance(machine, gpu.Machine)
    session = gpu.Session(replace(machine, clock=ConstantClock(0.5)), SETTING, True, copy_elements=1000)
    case = Case("add", (1000,), "bf16", 6000, lambda: gpu.add_case(session.machine, 1000, "bf16"))
    record = session.measure(case)
    assert record.error is None
    assert record.of_copy == pytest.approx(6000 / 4000)
    assert session.copy_record("bf16").GBps == pytest.approx(4000 / 0.5 / 1e6)
    # A tensor of another library as out= is what only a device takes.
    overhead = session.launch_overhead()
    assert {"torch out=", "cupy"} <= set(overhead.peers)
    assert overhead.ours_ms is not None


class ConstantClock:
    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def sample(self, run: Callable[[int], object], slots: Iterable[int], batch: int) -> list[float]:
        order = list(slots)
        run(order[0])
        return [self.milliseconds] * (len(order) // batch)


def test_plot_draws_what_a_file_holds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench import plot

    file = tmp_path / "cpu.jsonl"
    records = [Record("sum", [8], "f32", "test", 1.0, 1.0, "numba", 1.2, 1.2, bar=0.95), Record("bad", [8], "f32", "test", error="wrong")]
    file.write_text("".join(r.line() + "\n" for r in records))
    assert plot.read(file) == records
    picture = plot.plot(plot.read(file), file.with_suffix(".png"))
    assert picture.read_bytes().startswith(b"\x89PNG")
