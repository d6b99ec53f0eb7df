"""The gallery on the emulator: each bad kernel is caught with the exact words and line, each good twin passes with its values."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from simt_gallery import barriers, bounds, global_races, shared_races, uninitialised, warps
from simt_gallery.cases import Case, launch, marked

CASES = [case for module in (bounds, shared_races, global_races, barriers, uninitialised, warps) for case in module.gallery.cases]
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
