"""Reports and pictures of a launch."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from tilewright.cli.main import cli
from tilewright.mega.cpu_tasks import TaskTime
from tilewright.mega.report import MegaReport, ReportedTask, critical_path

TAPE = "examples/mega/gated_layer.py"


def _task(number: int, after: tuple[int, ...], start: int, end: int) -> ReportedTask:
    return ReportedTask(number, f"kernel {number}", "", 1, 1, 64, after, start, end, end - start)


def test_the_critical_path_goes_back_along_what_ends_last() -> None:
    tasks = [_task(0, (), 0, 10), _task(1, (), 0, 30), _task(2, (0, 1), 30, 40), _task(3, (0,), 10, 20), _task(4, (2, 3), 40, 50)]
    assert critical_path(tasks) == [1, 2, 4]
    assert critical_path([]) == []


def test_a_picture_is_well_formed() -> None:
    times = [TaskTime(p, n, f"mul<mat> {n}", 10 * n, 10 * n + 2, 10 * n + 9) for n in range(12) for p in range(3)]
    report = MegaReport("a & b", "cpu", times, [_task(n, (n - 1,) if n else (), 10 * n, 10 * n + 9) for n in range(12)], list(range(12)))
    root = ElementTree.fromstring(tw.mega.gantt_svg(report))
    bars = [r for r in root.iter("{http://www.w3.org/2000/svg}path") if len(r)]
    assert len(bars) == 36 and "mul<mat> 0: 0.00 to 0.01 µs on 0" in (bars[0][0].text or "")
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 1
    ElementTree.fromstring(tw.mega.gantt_svg(MegaReport("none", "cpu", [], [])))
    many = MegaReport("many", "cpu", [TaskTime(p, n, f"mul {n}", 10 * n, 10 * n + 2, 10 * n + 9) for n in range(12) for p in range(500)], [])
    bars = [r for r in ElementTree.fromstring(tw.mega.gantt_svg(many)).iter("{http://www.w3.org/2000/svg}path") if len(r)]
    assert len(bars) == 12 and bars[1][0].text == "mul 1: 0.01 to 0.02 µs, 500 tasks" and bars[1].get("d", "").count("M") == 500


def test_inspect_shows_tasks_and_writes_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "tasks.svg"
    done = CliRunner().invoke(cli, ["inspect", "--mega", TAPE, "--target", "cpu", "--plot", str(picture)], catch_exceptions=False)
    assert done.exit_code == 0 and "gated_layer on cpu: 8 kernels" in done.output and "critical path (*)" in done.output
    ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    done = CliRunner().invoke(cli, ["inspect", "--mega", "examples/onnx/classifier.onnx", "--args", "x=f32[2,4]", "--target", "cpu", "--json"], catch_exceptions=False)
    data = json.loads(done.output)
    assert [task["title"] for task in data["tasks"]] == ["onnx_gemm", "onnx_few_rows", "onnx_softmax"] and data["critical_path"] == [0, 1, 2]
    assert data["nanoseconds"] > 0 and data["bytes"] > 0


@pytest.mark.parametrize(("arguments", "message"), [
    (["nothing.onnx"], "there is no such file"),
    (["README.md"], "no tape is read from such files"),
    (["examples/onnx/classifier.onnx", "--args", "x=f32[*,4]"], "the input 'x' needs a shape"),
    ([TAPE, "--fusion"], "--fusion does nothing here"),
    ([TAPE, "--kernel", "other"], "builds 1 tape"),
])  # fmt: skip
def test_what_inspect_refuses(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(cli, ["inspect", "--mega", *arguments, "--target", "cpu"])
    assert done.exit_code != 0 and message in done.output + str(done.exception)


def test_reports_need_clocks() -> None:
    tape = tw.mega.Tape("one")
    tape.output("y", tape.emit("Neg", tape.input("x", (3,))))
    with tw.mega.plan(tape).compile().load() as runner:
        with pytest.raises(tw.UserError, match="no launch of 'one' had clocks"):
            runner.report()
        runner.launch(np.ones(3, np.float32), clocks=True)
        assert "one on cpu: 1 kernels on 1 processors" in runner.report().text()
