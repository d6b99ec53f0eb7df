"""Every kernel of the table on the CPU and on every stage of the emulator, against NumPy in f64."""

from __future__ import annotations

import pytest

from kernel_table import CASES, Case

EMULATED = ("emulator:loop", "emulator:tile", "emulator:thread")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_the_cpu(case: Case) -> None:
    for shape in (*case.shapes, *case.long_shapes):
        case.check("cpu", shape)


@pytest.mark.parametrize("device", EMULATED)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_the_emulator(case: Case, device: str) -> None:
    for shape in case.shapes:
        case.check(device, shape)
