"""Tuning: the search with a made-up device and clock, and the whole way on the CPU."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import DeviceError, TargetLimit, UserError
from tilewright.base.target import parse_target
from tilewright.codegen.host import interpreter
from tilewright.compile import tuning
from tilewright.compile.tuning import Measurement, TuningStore, TuningTable
from tilewright.execute import tune as tuner
from tilewright.execute.devices import find_device
from tilewright.execute.tune import neighbourhood
from tilewright.execute.tune_search import Progress, Tuning, difference, search
from tilewright.passes.schedules.attention import CpuAttention, MmaAttention, WgmmaAttention
from tilewright.passes.schedules.matrix import CpuPanels, MatrixSchedule, Mma, Wgmma
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.cuda.device import CudaDevice
from tilewright.runtime.cuda.driver import Driver
from tilewright.runtime.cuda.program import CudaProgram
from tilewright.runtime.memory.device_array import DeviceArray

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from fake_cuda import FakeCuda

HOPPER = parse_target("sm_90a")
FIRST = Wgmma(128, 256, 64, stages=4, math_warpgroups=2)
SECOND = Wgmma(128, 128, 64, stages=6, math_warpgroups=2, pingpong=True, mma_in_flight=1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeDevice:
    """Schedules take what a table or a function says; `drift` slows all down as time goes by."""

    def __init__(self, clock: Clock, seconds: dict[str, float], usual: float = 2.0, drift: float = 0.0) -> None:
        self.clock, self.times, self.usual, self.drift = clock, seconds, usual, drift
        self.lucky: dict[str, float] = {}
        self.wrong: set[str] = set()
        self.failing: dict[str, Exception] = {}
        self.dead = False
        self.checked: list[str] = []
        self.announced: list[str] = []
        self.order: list[str] = []

    def ahead(self, schedules: Sequence[str]) -> None:
        self.announced += schedules

    def check(self, schedule: str) -> str:
        self.checked.append(schedule)
        self.clock.now += 1.0
        if schedule in self.failing:
            raise self.failing[schedule]
        return "results differ" if schedule in self.wrong else ""

    def seconds(self, schedules: Sequence[str], rounds: int = 1) -> list[float]:
        self.order += schedules
        slow = 1 + self.drift * self.clock.now
        lucky = self.lucky if rounds == 1 else {}
        return [self.times.get(s, self.usual) * lucky.get(s, 1.0) * slow for s in schedules]

    def usable(self) -> bool:
        return not self.dead


class Notes:
    """A ledger in memory."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self.begun: list[str] = []
        self.abandoned: list[str] = []
        self.kept: dict[str, Measurement] = {}

    def failed_before(self, schedule: str) -> str:
        return self.failures.get(schedule, "")

    def begin(self, schedule: str) -> None:
        self.begun.append(schedule)

    def measured(self, schedule: str, seconds: float, error: str) -> Measurement:
        return Measurement((), schedule, seconds, error)

    def abandon(self, schedule: str) -> None:
        self.abandoned.append(schedule)

    def finish(self, measurements: Sequence[Measurement]) -> TuningTable | None:
        self.kept = {m.schedule: m for m in measurements}
        return None


def run(device: FakeDevice, notes: Notes | None = None, budget: float = 1000.0, seen: list[Progress] | None = None) -> Tuning:
    report = None if seen is None else seen.append
    return search([FIRST, SECOND], neighbourhood(HOPPER), device, notes or Notes(), Tuning("k", "cuda:0"), budget, report, device.clock)


# -- the search -----------------------------------------------------------------------------------------------------


def test_the_search_climbs_to_a_schedule_several_steps_away() -> None:
    one = replace(SECOND, raster=16)
    two = replace(one, stages=5)
    goal = replace(two, epilogue_stages=1)
    device = FakeDevice(Clock(), {FIRST.describe(): 1.5, SECOND.describe(): 1.4, one.describe(): 1.3, two.describe(): 1.2, goal.describe(): 1.0})
    seen: list[Progress] = []
    found = run(device, seen=seen)
    assert found.best is not None and found.best.schedule == goal.describe()
    assert found.default is not None and found.default.schedule == FIRST.describe()
    assert found.speedup == pytest.approx(1.5)
    assert [m.schedule for m in found.trials][:2] == [FIRST.describe(), SECOND.describe()]
    assert len(device.checked) == len(set(device.checked)) == len(found.trials) == len(seen)
    assert seen[-1].best == min((m for m in seen[-1].trials if m.ok), key=lambda m: m.seconds)
    assert set(device.checked) <= set(device.announced)


def test_the_budget_ends_the_search_but_not_before_the_default_is_measured() -> None:
    found = run(FakeDevice(Clock(), {}), budget=0.0)
    assert [m.schedule for m in found.trials] == [FIRST.describe()]
    found = run(FakeDevice(Clock(), {}), budget=10.0)
    assert len(found.trials) == 9  # a second each, and a part of the budget is for the end


def test_wrong_and_failing_schedules_are_kept_and_never_chosen() -> None:
    wrong, failing = replace(FIRST, raster=4).describe(), replace(FIRST, raster=16).describe()
    device = FakeDevice(Clock(), {FIRST.describe(): 1.0, wrong: 0.1, failing: 0.1})
    device.wrong = {wrong}
    limit = TargetLimit.at("TW020", "needs too much\nof everything")
    device.failing = {failing: limit}
    notes = Notes()
    found = run(device, notes)
    assert found.best is not None and found.best.schedule == FIRST.describe()
    assert notes.kept[wrong].error == "results differ"
    assert notes.kept[failing].error == "error[TW020]: needs too much"
    assert wrong not in device.order and failing not in device.order
    assert found.table is None


def test_what_failed_before_is_not_tried_again() -> None:
    notes = Notes()
    notes.failures = {SECOND.describe(): "did not finish"}
    device = FakeDevice(Clock(), {FIRST.describe(): 1.0})
    run(device, notes)
    assert SECOND.describe() not in device.checked
    assert notes.kept[SECOND.describe()].error == "did not finish"


def test_a_machine_that_slows_down_does_not_favour_what_came_first() -> None:
    found = run(FakeDevice(Clock(), {FIRST.describe(): 1.0, SECOND.describe(): 0.9}, drift=1.0))
    times = {m.schedule: m.seconds for m in found.trials}
    assert times[FIRST.describe()] / times[SECOND.describe()] == pytest.approx(1 / 0.9)
    assert found.best is not None and found.best.schedule == SECOND.describe()
    others = {t for s, t in times.items() if s not in (FIRST.describe(), SECOND.describe())}
    assert others and all(t / times[FIRST.describe()] == pytest.approx(2.0) for t in others)


def test_lucky_measurements_do_not_win() -> None:
    lucky = replace(FIRST, raster=4).describe()
    device = FakeDevice(Clock(), {FIRST.describe(): 1.0, SECOND.describe(): 0.95}, usual=1.02)
    device.lucky = {lucky: 0.5}
    found = run(device)
    assert found.best is not None and found.best.schedule == SECOND.describe()
    assert found.speedup == pytest.approx(1 / 0.95)
    assert found.ranking()[0].schedule == SECOND.describe()


def test_a_tie_leaves_things_as_they_are_also_in_the_table(tmp_path: Path) -> None:
    device = FakeDevice(Clock(), {FIRST.describe(): 1.0, SECOND.describe(): 0.998})
    found = run(device)
    assert found.best is not None and found.best.schedule == FIRST.describe()
    table = TuningTable("k", "sm_90a", found.trials)
    assert tuning.advise(table, (), (), lambda extents: (FIRST, SECOND), "") == FIRST.describe()


def test_a_dead_device_ends_the_search_and_is_remembered() -> None:
    device = FakeDevice(Clock(), {})
    device.failing = {SECOND.describe(): DeviceError.at("TW032", "illegal address")}
    notes = Notes()

    def dies(schedule: str) -> str:
        device.dead = schedule == SECOND.describe()
        return FakeDevice.check(device, schedule)

    device.check = dies  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="the device failed while family=wgmma m=128 n=128"):
        run(device, notes)
    assert "illegal address" in notes.kept[SECOND.describe()].error


def test_stopping_keeps_what_was_measured_and_blames_nobody() -> None:
    device = FakeDevice(Clock(), {})
    device.failing = {SECOND.describe(): KeyboardInterrupt()}  # type: ignore[dict-item]
    notes = Notes()
    with pytest.raises(KeyboardInterrupt):
        run(device, notes)
    assert notes.abandoned == [SECOND.describe()]
    assert list(notes.kept) == [FIRST.describe()]


# -- neighbours -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        FIRST, SECOND, Mma(128, 128, 32, stages=3, warps_m=2, warps_n=4),
        WgmmaAttention(128, 128, 64, stages=2, math_warpgroups=2, head_dim_v=64),
        MmaAttention(64, 64, 128, stages=2, warps_m=4, head_dim_v=128, persistent=False, a_copy="rs"),
    ],
)  # fmt: skip
def test_neighbours_vary_and_fit(schedule: MatrixSchedule) -> None:
    found = neighbourhood(HOPPER)(schedule)
    assert schedule not in found and len(found) == len(set(found)) >= 6
    assert all(s.has_room(HOPPER) for s in found)
    assert {s.family for s in found} == {schedule.family}
    assert {s.raster for s in found} > {1, 4, 16}  # type: ignore[attr-defined]
    assert len({s.stages for s in found}) > 1 and len({(s.m, s.n) for s in found}) > 1


def test_attention_on_a_cpu_has_neighbours() -> None:
    target = parse_target("x86-64-avx2")
    schedule = CpuAttention(32, 48, 1024, mr=6, nr=16, vectors=2)
    assert {(s.m, s.n) for s in neighbourhood(target)(schedule)} == {(64, 48), (16, 48), (32, 96), (32, 24)}


def test_what_cannot_fit_is_left_out() -> None:
    assert FIRST.has_room(HOPPER) and SECOND.has_room(HOPPER)
    assert not replace(FIRST, stages=5).has_room(HOPPER)  # shared memory
    assert not replace(FIRST, pingpong=True).has_room(HOPPER)  # registers
    assert not replace(SECOND, stages=1, mma_in_flight=1).has_room(HOPPER)  # nobody would ever be done
    assert not replace(FIRST, n=96).has_room(HOPPER)
    attention = WgmmaAttention(128, 128, 128, stages=2, math_warpgroups=2, head_dim_v=128)
    assert attention.has_room(HOPPER) and not replace(attention, n=256).has_room(HOPPER)
    assert not replace(attention, stages=4).has_room(HOPPER)
    warps = MmaAttention(64, 64, 128, stages=2, warps_m=4, head_dim_v=128, persistent=False, a_copy="rs")
    assert warps.has_room(parse_target("sm_89")) and not replace(warps, stages=3).has_room(parse_target("sm_89"))
    assert CpuPanels(140, 320, 256, mr=14, nr=32, vectors=2).has_room(parse_target("x86-64-avx512"))
    assert not CpuPanels(140, 320, 256, mr=14, nr=48, vectors=3).has_room(parse_target("x86-64-avx512"))


# -- comparing ------------------------------------------------------------------------------------------------------


def test_difference() -> None:
    a = np.linspace(-3, 3, 101, dtype=np.float32).reshape(1, 101)
    assert difference(a, a.copy()) == ""
    assert difference(a * np.float32(1 + 1e-6), a) == ""
    assert "differ from the default schedule's by up to" in difference(a * np.float32(1.001), a)
    spoilt = a.copy()
    spoilt[0, 7] = np.nan
    assert "no numbers" in difference(spoilt, a)
    assert difference(spoilt, spoilt.copy()) == ""
    narrow = a.astype(ml_dtypes.bfloat16)
    assert difference((a * np.float32(1.004)).astype(ml_dtypes.bfloat16), narrow) == ""
    assert difference((a * np.float32(1.1)).astype(ml_dtypes.bfloat16), narrow)
    whole = np.arange(6, dtype=np.int32)
    assert difference(whole + (whole == 3), whole) == "1 of 6 results differ from the default schedule's"
    assert "not float32[1, 101]" in difference(a[:, :5], a)


# -- on the CPU -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TuningStore]:
    monkeypatch.delenv("TILEWRIGHT_TUNING", raising=False)
    store = TuningStore(tmp_path)
    tuning.use_store(store)
    yield store
    tuning.use_store(None)


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def doubled(x: tw.Array) -> tw.f32:
    return x[0] + x[0]


def inputs(n: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.standard_normal((n, n), np.float32), generator.standard_normal((n, n), np.float32)


@pytest.mark.requires("cpu")
def test_tuning_on_the_cpu_is_used_by_later_calls(fresh_tables: TuningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner._HostBench, "_SECONDS", 0.01)
    few = iter([3, 3])  # one look before the search, one step of it
    all_around = tuner.neighbourhood(parse_target("cpu"))
    monkeypatch.setattr(tuner, "neighbourhood", lambda target: lambda s: all_around(s)[: next(few, 0)])
    a, b = inputs(96)
    expected = product(a, b)
    np.testing.assert_allclose(expected, a @ b, rtol=1e-4, atol=1e-4)
    out = np.empty_like(a)
    found = tw.tune(product, a, b, budget=100.0, out=out)
    assert isinstance(found, tw.Tuning) and found.best is not None and found.default is not None
    assert len(found.trials) > 1 and found.best.seconds > 0
    assert found.best.schedule in str(found)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(product(a, b), expected, rtol=1e-4, atol=1e-4)
    assert product.last is not None and found.best.schedule in product.last.schedule
    assert found.table is not None and all(m.error == "" or m.seconds == 0 for m in found.table.entries)
    assert "did not finish" not in {m.error for m in found.table.entries}
    # What was measured once is not measured again.
    monkeypatch.setattr(tuner, "tune_function", lambda *args: pytest.fail("measured again"))
    np.testing.assert_allclose(product(a, b, tune=True), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.requires("cpu")
def test_tune_in_a_call(fresh_tables: TuningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = inputs(48)
    asked: list[float] = []

    def stand_in(function: object, values: object, device: object, precision: str, budget: float) -> Tuning:
        asked.append(budget)
        return Tuning("product", "cpu", (Measurement((), "x", 1.0),))

    monkeypatch.setattr(tuner, "tune_function", stand_in)
    for _ in range(3):
        product(a, b)  # so that calls go straight to machine code
    np.testing.assert_allclose(product(a, b, tune=True), a @ b, rtol=1e-4, atol=1e-4)
    assert asked == [30.0]
    product(a, b, tune=False)
    assert asked == [30.0]
    monkeypatch.setenv("TILEWRIGHT_TUNING", "off")
    product(a, b, tune=True)
    assert asked == [30.0]


@pytest.mark.requires("cpu")
def test_other_kernels_have_nothing_to_tune(fresh_tables: TuningStore) -> None:
    x = np.arange(5, dtype=np.float32)
    found = tw.tune(doubled, x)
    assert found.best is None and found.trials == ()
    assert "nothing to tune" in str(found)
    assert doubled(x, tune=True) == 0.0


def test_what_cannot_be_tuned_is_an_error(fresh_tables: TuningStore) -> None:
    a, b = inputs(16)
    fixed = tw.kernel(schedule="family=cpu m=14 n=32 k=64 mr=14 nr=32 vectors=2")(product.python)
    with pytest.raises(UserError, match="has a fixed schedule"):
        tw.tune(fixed, a, b)
    with pytest.raises(UserError, match="the emulator has no speed"):
        tw.tune(product, a, b, device="emulator")


# -- on a GPU that is not there -------------------------------------------------------------------------------------


class FakeGpu(FakeCuda):
    """Programs multiply in NumPy; they are numbered as they first run, and `milliseconds` says how long each takes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.events: dict[int, float] = {}
        self.numbers: dict[str, int] = {}
        self.milliseconds: dict[int, float] = {}
        self.idle: set[int] = set()
        """Programs that write nothing."""
        self.faulty: set[int] = set()

    def run(self, program: CudaProgram, arrays: Mapping[str, DeviceArray], *rest: object) -> None:
        number = self.numbers.setdefault(program.artifact.schedule, len(self.numbers) + 1)
        self.now += self.milliseconds.get(number, 1.0)
        if number in self.faulty:
            self.fail["cuCtxSynchronize"] = 700
        if number not in self.idle:
            x, y = (arrays[name].numpy().astype(np.float32) for name in "ab")
            arrays["out"].copy_from((x @ y).astype(ml_dtypes.bfloat16))

    def cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def cuEventCreate(self, flags: str) -> int:
        return len(self.log)

    def cuEventRecord(self, event: int, stream: int) -> None:
        self.events[event] = self.now

    def cuEventElapsedTime(self, start: int, stop: int) -> float:
        return self.events[stop] - self.events[start]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, fresh_tables: TuningStore) -> FakeGpu:
    fake = FakeGpu()
    device = CudaDevice(Driver(fake), 0)
    monkeypatch.setattr(cuda, "devices", lambda: [device])
    monkeypatch.setattr(CudaProgram, "run", lambda self, arrays, *rest, **named: fake.run(self, arrays, *rest))
    monkeypatch.setattr(interpreter, "stubs_work", lambda: False)  # every call comes to `run`
    return fake


def narrow_inputs() -> tuple[np.ndarray, np.ndarray]:
    a, b = inputs(256)
    return a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)


def tune_on_gpu(a: np.ndarray, b: np.ndarray) -> Tuning:
    """Ten schedules, whatever time it takes."""
    ticks = itertools.count()
    values = {"a": a, "b": b}
    return tuner.tune_function(product.function, values, find_device("cuda"), budget=12.0, clock=lambda: float(next(ticks)))


def test_tuning_on_a_gpu(gpu: FakeGpu) -> None:
    a, b = narrow_inputs()
    gpu.milliseconds = {1: 2.0, 3: 0.5, 4: 0.1}
    gpu.idle = {4}
    found = tune_on_gpu(a, b)
    assert found.best is not None and found.default is not None and found.table is not None
    assert found.default.seconds == pytest.approx(2e-3)
    assert found.best.schedule == found.trials[2].schedule and found.best.seconds == pytest.approx(0.5e-3)
    assert found.speedup == pytest.approx(4.0)
    # The fastest wrote nothing: memory held the right result of the schedule before.
    assert "no numbers" in found.trials[3].error
    assert all(m.divisors for m in found.table.entries)
    kernel = tw.kernel(product.python)
    result = kernel(a, b, device="cuda")
    assert kernel.last is not None and found.best.schedule in kernel.last.schedule
    assert isinstance(result, np.ndarray)
    np.testing.assert_allclose(result.astype(np.float32), a.astype(np.float32) @ b.astype(np.float32), rtol=0.02, atol=0.3)


def test_a_fault_on_a_gpu_is_remembered_for_the_next_process(gpu: FakeGpu, fresh_tables: TuningStore) -> None:
    a, b = narrow_inputs()
    gpu.faulty = {2}
    with pytest.raises(DeviceError, match="the device failed while"):
        tune_on_gpu(a, b)
    assert fresh_tables.directory is not None
    (key,) = (path.stem for path in fresh_tables.directory.iterdir())
    table = TuningStore(fresh_tables.directory.parent).get(key)
    assert table is not None
    good, bad = table.entries
    assert good.ok and not bad.ok and "CUDA_ERROR_ILLEGAL_ADDRESS" in bad.error
