"""Kernels of the table with their batch split over two parts of the CPU, against NumPy in f64; what cannot be split is refused."""

from __future__ import annotations

import pytest

from kernel_table import BY_NAME, CASES, Case
from tilewright.base.errors import UserError
from tilewright.runtime.cpu import pool as cpu_pool

pytestmark = pytest.mark.skipif(len(cpu_pool.usable_cores()) < 2, reason="one core has no parts")
HALVES = ["cpu:0/2", "cpu:1/2"]
NOT_SPLIT = {
    "reverse": "is not in the part of one 'i'",
    "edges": "is not in the part of one 'i'",
    "difference": "the extent of axis 0 of 'out' is n - 1",
    "blur": "the extent of axis 0 of 'out' is rows - 2",
    "every_second": "the extent of axis 0 of 'out' is floordiv(n, 2)",
    "normalised": "'total' accumulates over all of it and is used here",
    "root_mean_square": "'total' accumulates over all of it and is used here",
    "extremes_i32": "the index 'i' is used as a number",
    "sum_and_difference": "the index 'i' is used as a number",
    "argmin_f32_all": "is a reduction over it (argmin), which parts cannot make",
    "argmax_f32_all": "is a reduction over it (argmax), which parts cannot make",
}
SPLIT = [case for case in CASES[::5] if not case.name.startswith(("argm", "extremes")) and case.name not in NOT_SPLIT]


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
def test_split(case: Case) -> None:
    case.check(HALVES, case.shapes[-1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["softmax", "matrix_product", "row_range", "variance", "nested", "dot_product", "conditional_sum"]
)
def test_split_at_every_size(name: str) -> None:
    case = BY_NAME[name]
    for shape in (*case.shapes, *case.long_shapes):
        case.check(HALVES, shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NOT_SPLIT)
def test_refused(name: str) -> None:
    case = BY_NAME[name]
    with pytest.raises(UserError) as caught:
        case.check(HALVES, case.shapes[-1])  # type: ignore[arg-type]
    assert any(NOT_SPLIT[name] in item.message for item in caught.value.diagnostics)


@pytest.mark.parametrize("case", CASES[2::6], ids=lambda case: case.name)
def test_in_parts(case: Case) -> None:
    """As programs of their own for each kernel, wherever the model puts them."""
    for shape in (case.shapes[0], case.shapes[-1]):
        case.check("heterogeneous", shape)
