"""Tuning of loop nests: which parameters there are, that each makes other code, that all compute the same, and what later calls use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from tilewright.base import chunks
from tilewright.base.target import Target, host_cpu, parse_target
from tilewright.compile import primitives, tuning
from tilewright.compile.driver import LoopChoices, Signature, compile_stages, compiler_version, loop_schedules
from tilewright.compile.tuning import Measurement, TuningStore, TuningTable
from tilewright.execute import tune as tuner
from tilewright.execute.calls.run import Runner
from tilewright.execute.primitives import tuned_chunks
from tilewright.execute.tune import extents_of
from tilewright.ir.emulator import run_program
from tilewright.ir.text import print_program
from tilewright.passes.schedules.loop_words import CPU_WORDS, GPU_WORDS, LoopNumbers, parse_loops

HOPPER = parse_target("sm_90a")


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    n, m = x.shape
    out = tw.empty((n, m), x.dtype)
    for i in tw.grid(n):
        top = -tw.inf
        for j in range(m):
            top = max(top, x[i, j])
        total = 0.0
        for j in range(m):
            total += tw.exp(x[i, j] - top)
        for j in range(m):
            out[i, j] = tw.exp(x[i, j] - top) / total
    return out


@tw.kernel
def total(x: tw.Array) -> tw.f32:
    found = 0.0
    for i in range(x.shape[0]):
        found += x[i]
    return found


@tw.kernel
def columns(x: tw.Array) -> tw.Array:
    n, m = x.shape
    out = tw.empty((m,), x.dtype)
    for j in tw.grid(m):
        found = 0.0
        for i in range(n):
            found += x[i, j]
        out[j] = found
    return out


@tw.kernel
def blur(x: tw.Array) -> tw.Array:
    n, m = x.shape
    out = tw.empty((n - 2, m - 2), x.dtype)
    for i, j in tw.grid(n - 2, m - 2):
        found = 0.0
        for a in range(3):
            for b in range(3):
                found += x[i + a, j + b]
        out[i, j] = found / 9.0
    return out


@tw.kernel
def scaled(x: tw.Array) -> tw.Array:
    out = tw.empty_like(x)
    for i in tw.grid(x.shape[0]):
        out[i] = x[i] * 2.0 + 1.0
    return out


@tw.kernel
def halvings(x: tw.Array) -> tw.i64:
    n = x[0]
    count = 0
    while n > 1:
        n = n // 2
        count += 1
    return count


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def _blur(x: np.ndarray) -> np.ndarray:
    n, m = x.shape
    return sum(x[a : a + n - 2, b : b + m - 2] for a in range(3) for b in range(3)) / 9


CASES = {
    "rows": (softmax, (3, 1024), _softmax, {"cpu": {"vector"}, "sm_90a": {"vector", "row_share"}}),
    "short rows": (softmax, (6, 96), _softmax, {"cpu": {"vector"}, "sm_90a": {"vector", "row_block"}}),
    "reduction": (total, (150_000,), lambda x: x.sum(), {"cpu": {"vector", "stretch"}, "sm_90a": {"vector", "threads"}}),
    "columns": (columns, (300, 70), lambda x: x.sum(0), {"cpu": {"vector"}, "sm_90a": {"threads"}}),
    "windows": (blur, (12, 70), _blur, {"cpu": {"vector", "rows", "columns"}, "sm_90a": {"window_threads", "window_along"}}),
    "map": (scaled, (5000,), lambda x: x * 2 + 1, {"cpu": {"vector", "chunk"}, "sm_90a": {"vector", "threads", "vectors"}}),
}


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def choices(kernel: object, x: np.ndarray, target: Target) -> tuple[LoopChoices, Signature]:
    runner = Runner(kernel.function)  # type: ignore[attr-defined]
    read = runner.arguments({"x": x}, target.is_gpu)
    signature = replace(runner.signature(read, target.is_gpu), extents=extents_of(read))
    return loop_schedules(runner.function, signature, target, signature.extents), signature


@pytest.fixture
def fresh_tables(tmp_path: Path) -> Iterator[TuningStore]:
    store = TuningStore(tmp_path)
    tuning.use_store(store)
    yield store
    tuning.use_store(None)


@pytest.mark.parametrize("family", list(CASES))
@pytest.mark.parametrize("name", ["cpu", "sm_90a"])
def test_every_choice_makes_other_code_and_the_same_results(family: str, name: str) -> None:
    kernel, shape, reference, wanted = CASES[family]
    target = host_cpu() if name == "cpu" else HOPPER
    x = numbers(*shape)
    found, signature = choices(kernel, x, target)
    listed = found.first(lambda: False)
    words = {word for one in listed for word, _ in one.numbers}
    assert listed[0] == LoopNumbers() and wanted[name] <= words
    texts: set[str] = set()
    expected = reference(x.astype(np.float64))
    seen: set[str] = set()
    for one in listed:
        word = one.numbers[0][0] if one.numbers else ""
        if word in seen:
            continue  # one of each parameter is enough here
        seen.add(word)
        done = compile_stages(kernel.function, replace(signature, schedule=one.describe()), target)
        texts.add(print_program(done.stages.thread))
        if name == "cpu":
            fixed = tw.kernel(schedule=one.describe())(kernel.python)
            np.testing.assert_allclose(fixed(x, device="cpu"), expected, rtol=1e-4, atol=2e-3 if family == "reduction" else 1e-5)
            continue
        results = run_program(done.stages.thread, {"x": x})
        np.testing.assert_allclose(results[done.stages.thread.outputs[0].name], expected, rtol=1e-4, atol=2e-3 if family == "reduction" else 1e-5)
    assert len(texts) == len(seen)


@pytest.mark.parametrize("target", [host_cpu(), HOPPER], ids=lambda t: t.name)
def test_no_word_at_all_is_the_code_of_the_compiler(target: Target) -> None:
    for kernel, shape, _, _ in CASES.values():
        _, signature = choices(kernel, numbers(*shape), target)
        plain = compile_stages(kernel.function, signature, target)
        same = compile_stages(kernel.function, replace(signature, schedule="family=loops"), target)
        assert print_program(plain.stages.thread) == print_program(same.stages.thread)


def test_what_has_no_parameter_says_so(fresh_tables: TuningStore) -> None:
    found = tw.tune(halvings, np.array([40], np.int32), budget=60.0, device="cpu")
    assert found.best is None and found.trials == ()
    assert "no parameter of its schedule changes its code (vector, chunk" in found.reason and "nothing to tune" in str(found)


@pytest.mark.requires("cpu")
def test_tuning_is_kept_used_by_later_calls_and_shared_as_a_file(fresh_tables: TuningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner._HostBench, "_SECONDS", 0.005)
    real = tuner._HostBench.seconds

    def seconds(self: tuner._HostBench, schedules: list[str], rounds: int = 1) -> list[float]:
        """Times as measured, but for one schedule, which wins on any machine."""
        return [t / 100 if text == "family=loops chunk=2048" else t for t, text in zip(real(self, schedules, rounds), schedules, strict=True)]

    monkeypatch.setattr(tuner._HostBench, "seconds", seconds)
    listed = [LoopNumbers(), LoopNumbers((("chunk", 2048),)), LoopNumbers((("vector", 32),))]
    monkeypatch.setattr(LoopChoices, "first", lambda self, until: listed)
    monkeypatch.setattr(LoopChoices, "around", lambda self, numbers: [])
    x = numbers(20_000)
    expected = scaled(x, device="cpu")
    assert "chunk=2048" not in scaled.last.schedule
    found = tw.tune(scaled, x, budget=60.0, device="cpu")
    assert found.best is not None and found.best.schedule == "family=loops chunk=2048" and len(found.trials) == 3
    assert found.default is not None and found.default.schedule == "family=loops" and found.speedup > 10
    np.testing.assert_array_equal(scaled(x, device="cpu"), expected)
    assert "chunk=2048" in scaled.last.schedule
    monkeypatch.setattr(tuner, "tune_function", lambda *args: pytest.fail("measured again"))
    scaled(x, device="cpu", tune=True)
    monkeypatch.undo()
    # Another machine of this kind takes the file.
    file = tmp_path / "tuned.json"
    tw.export_tuning(file)
    tuning.use_store(TuningStore(tmp_path / "other"))
    other = tw.kernel(scaled.python)
    other(x, device="cpu")
    assert "chunk=2048" not in other.last.schedule
    tw.import_tuning(file)
    again = tw.kernel(scaled.python)
    np.testing.assert_array_equal(again(x, device="cpu"), expected)
    assert "chunk=2048" in again.last.schedule
    monkeypatch.setenv("TILEWRIGHT_TUNING", "off")
    off = tw.kernel(scaled.python)
    off(x, device="cpu")
    assert "chunk=2048" not in off.last.schedule


def test_advice_is_for_near_extents_of_this_compiler_and_never_what_failed() -> None:
    here, far = (("x", 0, 1000),), (("x", 0, 1000_000),)
    version = compiler_version()

    def table(*entries: tuple[str, float, str, str]) -> TuningTable:
        return TuningTable("k", "t", tuple(Measurement(here, text, seconds, error, "", by, (), 1) for text, seconds, error, by in entries))

    usual = ("family=loops", 2.0, "", version)
    fast = table(usual, ("family=loops chunk=8", 1.0, "", version))
    assert tuning.advise_loops(fast, here, version) == "family=loops chunk=8"
    assert tuning.advise_loops(fast, far, version) == ""
    assert tuning.advise_loops(table(usual, ("family=loops chunk=8", 1.999, "", version)), here, version) == ""
    assert tuning.advise_loops(table(usual, ("family=loops chunk=8", 1.0, "", "older")), here, version) == ""
    assert tuning.advise_loops(table(usual, ("family=loops chunk=8", 0.0, "results differ", version)), here, version) == ""
    assert tuning.advise_loops(table(("family=cpu m=1 n=1 k=1", 1.0, "", version)), here, version) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("family=loops chunks=8", "'chunks=8' is not part of a schedule of family loops"),
        ("family=loops chunk=9", "chunk is a power of two from 1"),
        ("family=loops chunk=", "chunk is a power of two from 1"),
        ("family=loops chunk=-8", "chunk is a power of two from 1"),
        ("family=loops vector=1", "vector is a power of two from 2"),
        ("family=loops chunk=8 chunk=16", "gives 'chunk' twice"),
        ("family=loops window_threads=64", "is not part of a schedule of family loops"),
    ],
)
def test_words_that_are_none(text: str, message: str) -> None:
    with pytest.raises(tw.UserError, match=message):
        tw.kernel(schedule=text)(scaled.python)(numbers(8), device="cpu")


def test_a_word_that_changes_nothing_is_refused() -> None:
    for text, name in (("family=loops square=64", "square"), ("family=loops chunk=2048 rows=8", "rows")):
        with pytest.raises(tw.UserError, match=rf"{name}=\d+ changes nothing in scaled") as failed:
            tw.kernel(schedule=text)(scaled.python)(numbers(8), device="cpu")
        assert "TW020" in str(failed.value)


def test_texts_are_read_as_they_are_written() -> None:
    for target, words in ((host_cpu(), CPU_WORDS), (HOPPER, GPU_WORDS)):
        made = LoopNumbers(tuple((word.name, max(word.least, 64)) for word in words))
        assert parse_loops(made.describe(), target) == made
        assert parse_loops(" ".join(reversed(made.describe().split())), target) == made


def test_the_page_has_every_word() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tuning.md").read_text(encoding="utf-8")
    for word in (*CPU_WORDS, *GPU_WORDS):
        assert f"| `{word.name}` | {word.meaning} |" in page


PRIMITIVES = {
    "scan": (tw.scan, lambda x: (x,), np.cumsum),
    "histogram": (tw.histogram, lambda x: (x, 64, (-4.0, 4.0)), lambda x: np.histogram(x.astype(np.float32), 64, (-4, 4))[0]),
    "filter": (tw.filter, lambda x: (x, x > 0), lambda x: x[x > 0]),
}


@pytest.mark.requires("cpu")
@pytest.mark.parametrize("name", list(PRIMITIVES))
def test_units_of_work_of_primitives(fresh_tables: TuningStore, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arguments, reference = PRIMITIVES[name]
    x = numbers(300_001)
    monkeypatch.setattr(tuned_chunks, "_NUMBERS", (8192, 100_000))
    real = tuned_chunks._CallBench.seconds

    def seconds(self: tuned_chunks._CallBench, schedules: list[str], rounds: int = 1) -> list[float]:
        return [t / 100 if text == "family=loops chunk=8192" else t for t, text in zip(real(self, schedules, rounds), schedules, strict=True)]

    monkeypatch.setattr(tuned_chunks, "_SECONDS", 0.01)
    monkeypatch.setattr(tuned_chunks._CallBench, "seconds", seconds)
    with chunks.watched() as seen:
        plain = function(*arguments(x), device="cpu")
    (what,) = [text for text in seen if name in text][:1]
    assert primitives._tuned_chunk(what, host_cpu()) == 0
    found = tw.tune(function, *arguments(x), budget=60.0, device="cpu")
    assert found.best is not None and found.best.schedule == "family=loops chunk=8192"
    assert [m.schedule for m in found.trials] == ["family=loops", "family=loops chunk=8192", "family=loops chunk=100000"] and all(m.ok for m in found.trials)
    assert primitives._tuned_chunk(what, host_cpu()) == 8192
    again = function(*arguments(x), device="cpu")
    expected = reference(x.astype(np.float64))
    for result in (plain, again):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=0.05 if name == "scan" else 1e-6)


def test_primitives_without_a_parameter_say_so(fresh_tables: TuningStore) -> None:
    for function, x in ((tw.sort, numbers(3000)), (tw.scan, numbers(100, 30))):
        found = tw.tune(function, x, budget=5.0, device="cpu")
        assert found.best is None and "no parameter that changes its code" in found.reason


def test_other_things_are_no_kernels_to_tune() -> None:
    for thing in (len, "softmax"):
        with pytest.raises(tw.UserError, match="is no kernel whose schedules can be measured"):
            tw.tune(thing, numbers(4))  # type: ignore[arg-type]
    for thing in (scaled, tw.scan):
        with pytest.raises(tw.UserError, match="the emulator has no speed"):
            tw.tune(thing, numbers(4), device="emulator")
