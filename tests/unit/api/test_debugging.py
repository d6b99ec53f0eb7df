"""`tw.debug` and `tilewright emulate --break`: one thread of an explicit kernel, statement by statement."""

from __future__ import annotations

import inspect
import io
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from tilewright.cli.main import cli
from tilewright.ir.emulator.warps.stepping import Stop


def square(v):
    w = v * v
    return w  # noqa: RET504 - the debugger shows it


@tw.gpu
def sums(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    part = tw.shared(32, tw.f32)
    t = tw.thread.x
    total = 0.0
    for i in range(t, len(x), 32):
        total += square(x[i])
    if t == 3:
        total = -total
    part[t] = total
    tw.gpu_sync()
    y[t] = part[31 - t]


FIRST = inspect.getsourcelines(sums.python)[1] + 1
"""The line of `def sums`."""


def launch() -> np.ndarray:
    x, y = np.arange(64, dtype=np.float32), np.zeros(32, np.float32)
    sums[1, 32](x, y, device="emulator")
    return y


def numbers(stop: Stop) -> dict[str, object]:
    return {name: value for name, value in stop.variables.items() if not isinstance(value, np.ndarray)}


def test_every_statement_is_recorded() -> None:
    with tw.debug(sums, thread=3, record=True) as seen:
        launch()
    here = [(s.line - FIRST, s.function, numbers(s)) for s in seen.stops]
    assert here[3] == (4, "sums", {"t": 3, "total": 0.0})
    assert here[4] == (5, "sums", {"t": 3, "total": 0.0, "i": 3})
    assert here[6][1:] == ("square", {"v": 3.0, "w": 9.0})
    assert (7, "sums", {"t": 3, "total": 1234.0}) in here
    assert here[-1] == (10, "sums", {"t": 3, "total": -1234.0})
    np.testing.assert_array_equal(seen.stops[-1].variables["x"], np.arange(64))  # type: ignore[arg-type]
    assert seen.stops[-1].variables["part"][3] == -1234.0  # type: ignore[index]


def test_lines_and_ways() -> None:
    with tw.debug("sums", thread=5, lines=FIRST + 8, record=True) as seen:
        launch()
    assert [numbers(s) for s in seen.stops] == [{"t": 5, "total": 25.0 + 37.0**2}]
    with tw.debug(sums, thread=5, lines=[FIRST + 7], record=True) as seen:
        launch()
    assert seen.stops == [], "thread 5 does not come there"
    with tw.debug("another", record=True) as seen:
        launch()
    assert seen.stops == []


def test_nothing_changes() -> None:
    plain = launch()
    with tw.debug(sums, record=True):
        np.testing.assert_array_equal(launch(), plain)
    np.testing.assert_array_equal(launch(), plain)


def test_a_function_of_one_s_own() -> None:
    lines: list[int] = []

    def told(stop: Stop) -> str:
        lines.append(stop.line - FIRST)
        return "step" if len(lines) < 3 else "quit"

    with tw.debug(sums, lines=FIRST + 5, on_stop=told):
        launch()
        pytest.fail("the launch was ended")
    assert lines[0] == 5 and len(lines) == 3


@pytest.mark.parametrize("options", [{"thread": -1}, {"thread": "x"}, {"block": ()}, {"kernel": 5}, {"record": True, "on_stop": print}])
def test_what_makes_no_sense(options: dict[str, object]) -> None:
    with pytest.raises(tw.UserError, match=r"tw\.debug takes"):
        tw.debug(**options)  # type: ignore[arg-type]


def typed(commands: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What pdb prints for these commands."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO(commands))
    monkeypatch.setattr(sys, "stdout", shown)
    with tw.debug(sums, thread=3, lines=FIRST + 8):
        launch()
    return shown.getvalue()


def test_python_s_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    text = typed('p t, total\nn\np float(part[3])\np int((everyone("t") == 3).sum())\nc\n', monkeypatch)
    assert f"({FIRST + 8})sums()" in text and "-> part[t] = total" in text
    assert "(3, -1234.0)" in text and f"({FIRST + 9})sums()" in text and "-1234.0\n(tw) 1\n" in text


def test_the_debugger_can_end_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed("q\n", monkeypatch).count("-> part[t] = total") == 1


PROGRAM = """import sys
import numpy as np
import tilewright as tw

@tw.gpu
def halves(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    half = x[i] / 2
    y[i] = half

x = np.arange(64, dtype=np.float32)
y = np.zeros(int(sys.argv[1]) if len(sys.argv) > 1 else 64, np.float32)
halves[2, 32](x, y)
print("sum", y.sum())
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "halves.py"
    path.write_text(PROGRAM)
    return str(path)


def test_emulate_runs_a_program(program: str) -> None:
    result = CliRunner().invoke(cli, ["emulate", program])
    assert result.exit_code == 0, result.output
    assert result.output == "sum 1008.0\nOK: no fault at the thread stage\n"
    assert tw.default_device() == "cpu"


def test_emulate_reports_the_fault(program: str) -> None:
    result = CliRunner().invoke(cli, ["emulate", program, "--", "50"])
    assert result.exit_code == 1
    assert f"{program}:9:5: error[TW050]: store of 'y' at [50] is out of bounds: index 50, extent 50, in block (1), thread 18" in result.output


def test_emulate_prints_variables_at_a_line(program: str) -> None:
    result = CliRunner().invoke(cli, ["emulate", program, "--kernel", "halves", "--break", "9", "--block", "1", "--thread", "2"])
    assert result.exit_code == 0, result.output
    assert f"{program}:9 in halves, block 1, thread 2: i = 34, half = 17.0\n" in result.output
    missed = CliRunner().invoke(cli, ["emulate", program, "--break", "9", "--thread", "99"])
    assert "thread 99 of block 0 never came to line 9" in missed.output
    assert CliRunner().invoke(cli, ["emulate", program, "--break", "9", "--thread", "x"]).exit_code == 1
