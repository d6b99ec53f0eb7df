"""The table of kernels with structs on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels_structs import CASES, LAYOUTS, PARTICLE, SIZES, draw, totals

pytestmark = pytest.mark.requires("cuda")


@pytest.mark.filterwarnings("ignore::tilewright.PerformanceWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_struct_table(case: Any, layout: str) -> None:
    for size in SIZES:
        case.check("cuda", layout, size)


def test_a_struct_and_a_number() -> None:
    p = draw(97, PARTICLE)
    out, total = totals(p, device="cuda")
    np.testing.assert_allclose(out["x"], p["x"] - p["x"].astype(float).sum() / 98, rtol=1e-5, atol=1e-6)
    assert (out["id"] == np.arange(97)).all() and total == p["id"].sum()
