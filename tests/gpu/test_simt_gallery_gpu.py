"""The gallery of explicit kernels on a GPU: good twins give their values, and compiled checks find what leaves its array."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from simt_gallery import all_cases, bounds
from simt_gallery.cases import Case, launch, marked

pytestmark = pytest.mark.requires("cuda")


def named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name.replace(" ", "_") for case in cases])


@pytest.mark.parametrize("check", [False, True])
@named(all_cases())
def test_good(case: Case, check: bool) -> None:
    arrays = case.arrays()
    before = [a.copy() for a in arrays]
    launch(case, case.good, arrays, "cuda", check=check)
    if case.result is not None:
        np.testing.assert_allclose(arrays[-1], case.result(before), rtol=1e-5)


@named(bounds.gallery.cases)
def test_bounds(case: Case) -> None:
    """The GPU goes on after such a failure; which thread is named is open."""
    for _ in range(2):
        with pytest.raises(tw.UserError) as error:
            launch(case, case.bad, case.arrays(), "cuda", check=True)
        where, message = marked(case.bad, str(error.value))
        assert where == "<fault>"
        assert message.split(" at [")[0] == case.message.split(" at [")[0]


def test_assertions() -> None:
    case = next(c for c in all_cases() if c.name == "an assertion that does not hold")
    with pytest.raises(tw.UserError, match="assertion failed: x"):
        launch(case, case.bad, case.arrays(), "cuda", check=True)
