"""The gallery on the emulator: each bad kernel is caught with the exact words and line, each good twin passes with its values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from simt_gallery import all_cases, bounds
from simt_gallery.cases import Case, launch, marked
from support import assemble
from tilewright.base.errors import TargetLimit

CASES = all_cases()
each = pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "_") for case in CASES])


def test_there_are_forty() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40


@each
def test_bad(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.ir.emulator.scheduler.PATIENCE", 100)
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
