"""The gallery on the emulator: each bad kernel is caught with the exact words and line, each good twin passes with its values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from assembled import assemble
from simt_gallery import all_cases, bounds
from simt_gallery.cases import Case, as_written, launch, marked, marks
from tilewright.base.errors import TargetLimit

CASES = all_cases()
each = pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "_") for case in CASES])


def test_there_are_forty() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40


@each
def test_bad(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.ir.emulator.warps.scheduler.PATIENCE", 100)
    with pytest.raises(tw.UserError) as error:
        launch(case, case.bad, case.arrays(), "emulator")
    where, message = marked(case.bad, str(error.value))
    assert message == case.message
    assert where == "<fault>"


@each
def test_good(case: Case) -> None:
    arrays = case.arrays()
    before = [a.copy() for a in arrays]
    launch(case, case.good, arrays, "emulator")
    if case.result is not None:
        np.testing.assert_allclose(arrays[-1], case.result(before), rtol=1e-5)


SHOWN = {
    "no barrier before reading", "no barrier between the steps of a sum", "no barrier before writing again", "a warp that is taken to run in step",
    "all threads write one element", "nobody waits for the first thread", "a sum without an atomic", "moving elements in place",
    "filling the buffer that is being read", "a sum of all threads without an atomic", "a barrier in a condition",
    "different barriers for different warps", "a barrier one warp never comes to",
}  # fmt: skip
"""The bad kernels whose text alone shows the fault."""


@each
def test_what_the_text_shows_is_an_error_of_the_compiler(case: Case) -> None:
    """At the line the emulator names, or at another that has to do with it; good twins and what depends on data are accepted."""
    case.good[case.grid, case.block, case.shared].thread_stage(*case.arrays(), *case.numbers)
    bad = case.bad[case.grid, case.block, case.shared]
    if case.name not in SHOWN:
        bad.thread_stage(*case.arrays(), *case.numbers)
        return
    for target in ("sm_90a", "cpu"):
        with pytest.raises(tw.UserError, match=r"error\[TW051\]: (race on|divergent barrier)") as error:
            bad.compile(*case.arrays(), *case.numbers, target=target)
        assert marks(case.bad)[error.value.span.line] in ("fault", "one")


@pytest.mark.requires("cpu")
@pytest.mark.parametrize("case", bounds.gallery.cases, ids=[case.name.replace(" ", "_") for case in bounds.gallery.cases])
def test_bounds_on_the_cpu(case: Case) -> None:
    """Checks that are compiled in find the same line; which thread comes first is open."""
    with pytest.raises(tw.UserError) as error:
        launch(case, case.bad, case.arrays(), "cpu", check=True)
    where, message = marked(case.bad, str(error.value))
    assert where == "<fault>"
    assert message.split(" at [")[0] == case.message.split(" at [")[0]
    assert message.split(", extent ")[1].split(",")[0] == case.message.split(", extent ")[1].split(",")[0]


@pytest.mark.requires("cpu")
@each
def test_good_on_the_cpu(case: Case) -> None:
    arrays = case.arrays()
    before = [a.copy() for a in arrays]
    if case.only_gpu:
        with pytest.raises(TargetLimit, match="only GPUs have"):
            launch(case, case.good, arrays, "cpu", check=True)
        return
    launch(case, case.good, arrays, "cpu", check=True)
    if case.result is not None:
        np.testing.assert_allclose(arrays[-1], case.result(before), rtol=1e-5)


@pytest.mark.requires("ptxas")
@each
def test_both_become_ptx(case: Case) -> None:
    """What the emulator runs, a GPU can."""
    for kernel in (case.bad, case.good):
        with as_written():
            artifact = kernel[case.grid, case.block, case.shared].compile(*case.arrays(), *case.numbers, target="sm_90a")
        assemble(artifact.code.decode(), "sm_90a", level=1)


def test_the_record_of_compute_sanitizer_agrees() -> None:
    """`sanitize.py` wrote it on a GPU: it has to be run again for cases that are new."""
    record = json.loads((Path(__file__).parent / "sanitizer.json").read_text(encoding="utf-8"))
    for run in record["runs"]:
        if run["kind"] == "good":
            assert run["reports"] == dict.fromkeys((case.name for case in CASES), 0), run["tool"]
        else:
            assert run["reports"].keys() == {case.name for case in CASES if case.tool == run["tool"]}
            assert all(run["reports"].values()), run["tool"]
    assert sum(len(run["reports"]) for run in record["runs"] if run["kind"] == "bad") == 18
