"""Tuning of explicit kernels by their choices, and tuning tables as files: on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from copy_kernels import register_copies
from null_cuda.install import installed
from tilewright.base.errors import DeviceError, UserError
from tilewright.compile import tuning
from tilewright.compile.tuning import Measurement, TuningStore, TuningTable, advise_listed
from tilewright.execute.tuning_files import TuningFile

ITEMS = 1


def _blocks(x: np.ndarray, ITEMS: int) -> int:
    return -(-x.size // (32 * ITEMS))


@tw.gpu(choices=[tw.LaunchChoice(block=32, grid=_blocks, ITEMS=n) for n in (1, 2, 4)])
def accumulate(x: tw.GpuBuffer[tw.f32], o: tw.GpuBuffer[tw.f32]):
    for k in tw.unrolled(range(ITEMS)):
        i = tw.gpu_thread_id() * ITEMS + k
        if i < x.shape[0]:
            o[i] += 2 * x[i]


@pytest.fixture(autouse=True)
def _own_tables(tmp_path: Path) -> Iterator[None]:
    tuning.use_store(TuningStore(tmp_path / "cache"))
    yield
    tuning.use_store(None)


def arrays(n: int = 100) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(n, dtype=np.float32), np.full(n, 5, np.float32)


def test_choices_are_measured_and_the_arguments_stay() -> None:
    x, o = arrays()
    found = tw.tune(accumulate, x, o, device="cpu", budget=60)
    assert [m.schedule for m in found.trials] == ["block=32 ITEMS=1", "block=32 ITEMS=2", "block=32 ITEMS=4"]
    assert all(m.ok and m.seconds > 0 for m in found.trials)
    assert found.best is not None and found.default is found.trials[0]
    assert (o == 5).all() and (x == np.arange(100)).all()


def test_a_call_takes_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    x, o = arrays()
    assert accumulate.chosen(x, o, device="cpu").config.grid == (4, 1, 1)  # the first
    _measured(x, o, {"block=32 ITEMS=1": 3.0, "block=32 ITEMS=2": 1.0, "block=32 ITEMS=4": 2.0})
    assert accumulate.chosen(x, o, device="cpu").config.grid == (2, 1, 1)
    accumulate(x, o, device="cpu")
    assert np.array_equal(o, 5 + 2 * x)
    near, far = arrays(300), arrays(100 * 64)
    assert accumulate.chosen(*near, device="cpu").kernel.constants == {"ITEMS": 2}
    assert accumulate.chosen(*far, device="cpu").kernel.constants == {"ITEMS": 1}
    monkeypatch.setenv("TILEWRIGHT_TUNING", "off")
    assert accumulate.chosen(x, o, device="cpu").kernel.constants == {"ITEMS": 1}


def _measured(x: np.ndarray, o: np.ndarray, seconds: dict[str, float]) -> None:
    """Tune, and then say how long each choice took."""
    tw.tune(accumulate, x, o, device="cpu", budget=0)
    ((key, table),) = tuning.store().tables().items()
    extents = table.entries[0].extents
    tuning.store().add(key, table.kernel, table.target, [Measurement(extents, text, s, rounds=9) for text, s in seconds.items()])


@pytest.mark.parametrize("on_device", [False, True])
def test_arrays_of_a_device_are_put_back(on_device: bool) -> None:
    with installed(count=1) as driver:
        register_copies(driver)
        kernel = tw.gpu(choices=list(accumulate.choices.values()))(accumulate.python)  # nothing of other null GPUs is loaded for it
        x, o = arrays()
        given = (tw.to_device(x, "cuda"), tw.to_device(o, "cuda")) if on_device else (x, o)
        found = tw.tune(kernel, *given, device="cuda", budget=60)
        assert [m.error for m in found.trials] == ["", "", ""] and found.best is not None
        assert (np.asarray(given[1].numpy() if on_device else o) == 5).all()
        kernel(*given, device="cuda")
        after = given[1].numpy() if on_device else o
        assert np.array_equal(after, 5 + 2 * x)
        assert driver.violations == []


def test_another_dtype_has_a_table_of_its_own() -> None:
    @tw.gpu(choices=[tw.LaunchChoice(block=32, threads=lambda x: x.size), tw.LaunchChoice(block=64, threads=lambda x: x.size)])
    def double(x: tw.Array, o: tw.Array):
        o[tw.gpu_thread_id()] = 2 * x[tw.gpu_thread_id()]

    for dtype in (np.float32, np.float64, np.float32):
        tw.tune(double, np.zeros(40, dtype), np.zeros(40, dtype), device="cpu", budget=60)
    assert len(tuning.store().tables()) == 2


def test_tune_in_the_call_measures_once() -> None:
    x, o = arrays()
    accumulate(x, o, device="cpu", tune=True)
    (before,) = tuning.store().tables().values()
    accumulate(x, o, device="cpu", tune=True)
    (after,) = tuning.store().tables().values()
    assert before == after and len(after.entries) == 3
    assert np.array_equal(o, 5 + 4 * x)


def test_constants_may_be_parameters_and_size_memory() -> None:
    @tw.gpu(choices=[tw.LaunchChoice(block=n, grid=lambda x, TILE: x.size // TILE, TILE=n) for n in (16, 32)])
    def reverse(x: tw.GpuBuffer[tw.i32], TILE: int, o: tw.GpuBuffer[tw.i32], plus: int = 7):
        tile = tw.shared(TILE, tw.i32)
        tile[tw.thread.x] = x[tw.gpu_thread_id()]
        tw.gpu_sync()
        o[tw.gpu_thread_id()] = tile[TILE - 1 - tw.thread.x] + plus

    x, o = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    found = tw.tune(reverse, x, o, device="cpu", budget=60)
    # The choices compute different things: the second is not taken.
    assert "results differ from the default choice's" in found.trials[1].error
    reverse(x, o, device="cpu")
    assert np.array_equal(o, x.reshape(-1, 16)[:, ::-1].reshape(-1) + 7)
    with pytest.raises(UserError, match="takes 3 argument"):
        reverse(x, o, 1, 16)


def test_choices_that_fail_are_passed_over_with_the_reason() -> None:
    def broken(x: np.ndarray) -> int:
        return x.size // 0

    @tw.gpu(choices=[
        tw.LaunchChoice(block=32, threads=broken, SIZE=8), tw.LaunchChoice(block=2048, threads=lambda x: x.size, SIZE=8),
        tw.LaunchChoice(block=32, threads=lambda x: x.size, SIZE=-1), tw.LaunchChoice(block=32, threads=lambda x: x.size, SIZE=9),
    ])  # fmt: skip
    def fill(x: tw.GpuBuffer[tw.f32], SIZE: int):
        own = tw.local(SIZE, tw.f32)
        own[0] = 1.0
        x[tw.gpu_thread_id()] = own[0]

    x = np.zeros(40, np.float32)
    found = tw.tune(fill, x, device="cpu", budget=60)
    errors = [m.error for m in found.trials]
    assert "ZeroDivisionError" in errors[0] and "2048 threads" in errors[1] and errors[2] and not errors[3]
    assert found.best is found.trials[3]
    fill(x, device="cpu")
    assert (x == 1).all()


def test_launches_that_look_alike_are_kept_apart() -> None:
    @tw.gpu(choices=[tw.LaunchChoice(block=32, grid=lambda x: x.size // 32), tw.LaunchChoice(block=32, grid=lambda x: 1)])
    def clear(x: tw.Array):
        i = tw.gpu_thread_id()
        while i < x.shape[0]:
            x[i] = 0.0
            i += tw.grid.size.x * tw.block.size.x

    found = tw.tune(clear, np.ones(64, np.float32), device="cpu", budget=60)
    assert [m.schedule for m in found.trials] == ["block=32", "block=32 (2)"] and found.best is not None


@pytest.mark.parametrize(("make", "message"), [
    (lambda: tw.LaunchChoice(block=32), "grid= or threads=, got neither"),
    (lambda: tw.LaunchChoice(block=32, grid=1, threads=2), "got both"),
    (lambda: tw.LaunchChoice(block=32, grid=1, WORDS="x"), "constant 'WORDS'"),
    (lambda: tw.gpu(choices=[3])(accumulate.python), "choices of accumulate"),
    (lambda: tw.gpu(choices=[tw.LaunchChoice(block=1, grid=1, ITEMS=1), tw.LaunchChoice(block=1, grid=1)])(accumulate.python), "other constants"),
    (lambda: tw.gpu(choices=[tw.LaunchChoice(block=1, grid=1, ITEM=1)])(accumulate.python)(*arrays()), "'ITEM' is a constant of a tw.LaunchChoice"),
    (lambda: tw.gpu(choices=[tw.LaunchChoice(block=1, grid=lambda y: 1, ITEMS=1)])(accumulate.python)(*arrays()), "asks for 'y'"),
    (lambda: tw.tune(tw.gpu(accumulate.python), *arrays()), "has no choices to measure"),
    (lambda: tw.tune(accumulate, *arrays(), device="emulator"), "the emulator has no speed"),
    (lambda: tw.tune(accumulate, *arrays(), device="cpu", out=arrays()[0]), "no result for out="),
    (lambda: accumulate(*arrays(), device="cpu", tune=1), "tune= is 1"),
    (lambda: tw.gpu(accumulate.python)(*arrays()), "needs a grid and a block"),
])  # fmt: skip
def test_wrong_choices_are_named(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        make()  # type: ignore[operator]


def test_choices_run_on_the_emulator() -> None:
    x, o = arrays()
    accumulate(x, o, device="emulator")
    assert np.array_equal(o, 5 + 2 * x)


def test_the_usual_one_stays_unless_another_is_clearly_faster() -> None:
    at = (("x", 0, 64),)
    table = TuningTable("k", "cpu", (Measurement(at, "a", 1.001), Measurement(at, "b", 1.0), Measurement(at, "c", 0.5, error="wrong")))
    assert advise_listed(table, at, ["a", "b", "c"]) == "a"
    assert advise_listed(table, at, ["b", "a"]) == "b"
    assert advise_listed(table, (("x", 0, 64 * 8),), ["a", "b"]) == ""
    assert advise_listed(table, at, ["d"]) == ""


# -- files ----------------------------------------------------------------------------------------------------------


def exported(tmp_path: Path) -> tuple[Path, TuningFile]:
    x, o = arrays()
    _measured(x, o, {"block=32 ITEMS=1": 3.0, "block=32 ITEMS=2": 1.0, "block=32 ITEMS=4": 2.0})
    path = tmp_path / "tuned.json"
    return path, tw.export_tuning(path)


def test_a_file_carries_what_was_measured(tmp_path: Path) -> None:
    path, written = exported(tmp_path)
    assert written.kernels == ("accumulate",) and written.measurements == 3
    tuning.use_store(TuningStore(tmp_path / "other machine"))
    assert accumulate.chosen(*arrays(), device="cpu").kernel.constants == {"ITEMS": 1}
    read = tw.import_tuning(path)
    assert (read.kernels, read.measurements, read.left_out) == (("accumulate",), 3, 0)
    assert accumulate.chosen(*arrays(), device="cpu").kernel.constants == {"ITEMS": 2}
    assert str(path) in str(read)


def _changed(path: Path, change: object) -> None:
    """Change the content, with the checksum that fits it."""
    from tilewright.execute.tuning_files import _HEAD, _digest

    data = json.loads(path.read_text().partition("\n")[2])
    change(data)  # type: ignore[operator]
    body = json.dumps(data)
    path.write_text(f"{_HEAD} {_digest(body)}\n{body}\n")


def _other_target(data: dict[str, dict[str, dict[str, str]]]) -> None:
    for target in data["targets"].values():
        target["key"] += "|more"
        target["device"] = "Another CPU"


@pytest.mark.parametrize(("change", "message", "kind"), [
    (lambda path: path.write_text(path.read_text().replace("accumulate", "accumulatf")), "is damaged: its content does not fit", UserError),
    (lambda path: path.write_bytes(path.read_bytes()[:-40]), "is damaged", UserError),
    (lambda path: path.write_text("{}"), "is no file of tuning tables", UserError),
    (lambda path: path.write_bytes(b"\xff\xfe\x00"), "is no file of tuning tables", UserError),
    (lambda path: path.write_text(path.read_text().replace("tilewright-tuning 1", "tilewright-tuning 9")), "another format", UserError),
    (lambda path: path.unlink(), "cannot be read", UserError),
    (lambda path: _changed(path, lambda data: data.update(version="0.0.1")), "written by Tilewright 0.0.1", UserError),
    (lambda path: _changed(path, lambda data: data.pop("tables")), "is damaged: KeyError", UserError),
    (lambda path: _changed(path, lambda data: data["targets"].clear()), "does not describe the target", UserError),
    (lambda path: _changed(path, lambda data: data.update(tables=[1])), "is damaged", UserError),
    (lambda path: _changed(path, _other_target), "was measured on Another CPU", DeviceError),
])  # fmt: skip
def test_a_damaged_or_foreign_file_is_named(tmp_path: Path, change: object, message: str, kind: type[Exception]) -> None:
    path, _ = exported(tmp_path)
    change(path)  # type: ignore[operator]
    tuning.use_store(TuningStore(tmp_path / "other machine"))
    with pytest.raises(kind, match=message) as caught:
        tw.import_tuning(path)
    assert str(path) in str(caught.value)
    assert not tuning.store().tables()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tuned\.json cannot be written"):
        tw.export_tuning(tmp_path / "missing" / "tuned.json")


def test_the_command_line_shares_tables(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from tilewright.cli.main import cli

    path, _ = exported(tmp_path)
    run = CliRunner()
    assert "accumulate on " in run.invoke(cli, ["tuning", "list"], catch_exceptions=False).output
    assert "3 measurements of 1 kernels" in run.invoke(cli, ["tuning", "export", str(tmp_path / "b.json")], catch_exceptions=False).output
    assert "3 measurements of 1 kernels" in run.invoke(cli, ["tuning", "import", str(path)], catch_exceptions=False).output
