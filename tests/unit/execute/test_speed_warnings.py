"""The first call of a slow kernel warns, once; TILEWRIGHT_WARN raises or silences."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from tilewright.cli.main import cli
from tilewright.execute import speed_warnings


@pytest.fixture(autouse=True)
def warns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TILEWRIGHT_WARN", raising=False)
    speed_warnings.forget()
    yield
    speed_warnings.forget()


def make() -> tw.Kernel:
    @tw.kernel
    def running(x: tw.Array) -> tw.Array:
        (n,) = x.shape
        out = tw.empty((n + 1,), x.dtype)
        total = 0.0
        for i in range(n):
            total += x[i]
            out[i] = total
        out[n] = total
        return out

    return running


def make_fast() -> tw.Kernel:
    @tw.kernel
    def double(x: tw.Array) -> tw.Array:
        (n,) = x.shape
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = 2 * x[i]
        return out

    return double


X = np.ones(64, np.float32)


def caught(call: object) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()  # type: ignore[operator]
    return [w for w in found if issubclass(w.category, tw.PerformanceWarning)]


@pytest.mark.parametrize("device", ["cpu", "emulator:loop"])
def test_once_for_each_kernel_at_the_line_of_the_caller(device: str) -> None:
    running, x = make(), np.ones(5000, np.float32)

    def calls() -> None:
        running(x, device=device)
        running(x, device=device)
        running(x.astype(np.float64), device=device)

    (warning,) = caught(calls)
    assert warning.filename == __file__
    assert "warning[TW062]" in str(warning.message)
    assert f"{__file__}:" in str(warning.message)
    assert "tw.scan" in str(warning.message)


def test_a_kernel_from_the_cache_warns_too() -> None:
    assert len(caught(lambda: make()(X))) == 1
    speed_warnings.forget()
    assert len(caught(lambda: make()(X))) == 1, "compiled before, and warns all the same"
    assert caught(lambda: make()(X)) == [], "the same kernel, made again"


def test_error_raises_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_WARN", "error")
    running, out = make(), np.zeros(65, np.float32)
    for _ in range(2):
        with pytest.raises(tw.UserError, match=r"error\[TW062\]"):
            running(X, out=out)
    assert not out.any()
    with pytest.raises(tw.UserError, match=r"error\[TW063\]"):
        make_fast()(X, out=np.zeros(len(X), [("flag", "i1"), ("value", "f4")])["value"])
    assert caught(lambda: make_fast()(X)) == []


def test_off_is_silent_and_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_WARN", "off")
    assert caught(lambda: make()(X)) == []
    monkeypatch.setenv("TILEWRIGHT_WARN", "loud")
    with pytest.raises(tw.UserError, match="TILEWRIGHT_WARN is 'loud'"):
        make()(X)


def test_copies_because_of_strides_are_said() -> None:
    records = np.zeros(64, [("flag", "i1"), ("value", "f4")])
    (warning,) = caught(lambda: make_fast()(records["value"]))
    assert "'x' (float32, shape [64]) is copied" in str(warning.message)
    speed_warnings.forget()
    (warning,) = caught(lambda: make_fast()(X, out=np.zeros(len(X), [("flag", "i1"), ("value", "f4")])["value"]))
    assert "'out'" in str(warning.message)
    assert caught(lambda: make_fast()(X, out=np.zeros(2 * len(X), np.float32)[::2])) == [], "results are written with any strides"
    (warning,) = caught(lambda: make_fast()(np.ones(128, np.float32)[::2], device="emulator"))
    assert "strides are (8,) bytes" in str(warning.message)
    (warning,) = caught(lambda: tw.gpu_scan(np.ones(128, np.float32)[::2], device="cpu"))
    assert warning.filename == __file__
    assert caught(lambda: make_fast()(np.ones(128, np.float32)[::2])) == [], "a CPU reads strides as they are"


def test_check_and_inspect_say_it(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(
        "import tilewright as tw\n\n\n@tw.kernel\ndef first(x: tw.Array, n: tw.Array) -> tw.Array:\n    total = 0.0\n"
        "    for i in range(n[0]):\n        total += x[i]\n    return total\n"
    )
    done = CliRunner().invoke(cli, ["check", str(path)])
    assert done.exit_code == 0, "a warning is no error"
    assert "slow.py:7:5: warning[TW060]" in done.output
    (found,) = json.loads(CliRunner().invoke(cli, ["check", "--json", str(path)]).output)
    assert (found["severity"], found["line"], found["code"]) == ("warning", 7, "TW060")
    shown = CliRunner().invoke(cli, ["inspect", str(path), "--target", "sm_90a"]).output
    assert "warning[TW060]: 'first' runs in one block" in shown
    as_json = json.loads(CliRunner().invoke(cli, ["inspect", str(path), "--json"]).output)
    assert "TW060" in as_json[0]["notes"][0]


def test_what_ran_last_is_one_line() -> None:
    double = make_fast()
    double(X)
    assert str(double.last).startswith("<artifact double for ")
    assert "\n" not in str(double.last)
    assert len(str(double.last)) < 120


@tw.kernel
def packed_product(a: tw.Array, b: tw.Array) -> tw.Array:
    rows, depth = a.shape
    columns = b.shape[1]
    out = tw.empty((rows, columns), a.dtype)
    for i, j in tw.grid(rows, columns):
        total = 0.0
        for k in range(depth):
            total += a[i, k] * b[k, j]
        out[i, j] = total
    return out


def test_operands_that_a_gpu_packs_for_their_strides_are_said() -> None:
    def notes(rows: int, depth: int, columns: int) -> list[str]:
        found = packed_product.compile(np.ones((rows, depth), np.float16), np.ones((depth, columns), np.float16), target="sm_90a").notes
        assert all(note.code == "TW063" for note in found)
        return [note.message for note in found]

    assert notes(256, 256, 256) == []
    assert [m.split(":")[0].split("'")[1] for m in notes(256, 250, 256)] == ["a"]
    assert [m.split(":")[0].split("'")[1] for m in notes(256, 250, 250)] == ["a", "b"]
