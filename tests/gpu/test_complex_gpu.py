"""The table of kernels with complex numbers on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from kernels_complex import CASES, DTYPES

pytestmark = pytest.mark.requires("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_complex_table(case: Any, dtype: type) -> None:
    for size in (0, 1, 31, 33, 97):
        case.check("cuda", dtype, size)
