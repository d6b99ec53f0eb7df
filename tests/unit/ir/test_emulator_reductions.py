"""Least and greatest elements in the emulator: -0 is below +0, and NaN wins, on every processor."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from tilewright.base.dtypes import DType, f16, f32, f64
from tilewright.ir.emulator.reductions import combine, scan


def of_two(kind: str, x: float, y: float) -> float:
    if math.isnan(x) or math.isnan(y):
        return math.nan
    first, second = (x, y) if (x, math.copysign(1, x)) <= (y, math.copysign(1, y)) else (y, x)
    return first if kind == "min" else second


@pytest.mark.parametrize("dtype", [f16, f32, f64], ids=str)
@pytest.mark.parametrize("kind", ["min", "max"])
def test_zeros_have_signs(kind: str, dtype: DType) -> None:
    for values in product((0.0, -0.0, 1.0, -1.0, math.nan), repeat=3):
        array = np.array(values, dtype.numpy)
        two = of_two(kind, values[0], values[1])
        wanted = [values[0], two, of_two(kind, two, values[2])]
        for found, number in zip([*scan(kind, array, dtype, 0), combine(kind, [array], [dtype], 0)[0][0]], [*wanted, wanted[-1]], strict=True):
            assert np.array_equal(found, number, equal_nan=True) and (math.isnan(number) or np.signbit(found) == np.signbit(number)), values
