"""Every kernel of the table of explicit kernels gives the same on the CPU as on the emulator."""

from __future__ import annotations

import pytest

from simt_kernels import Case, all_cases, assert_equal, outcome

CASES = all_cases()


@pytest.mark.parametrize("one", CASES, ids=str)
def test_cpu_and_emulator_agree(one: Case) -> None:
    assert_equal(outcome(one, "cpu"), outcome(one, "emulator"), one.ulp, one.name)


def test_the_table_is_large() -> None:
    assert len(CASES) >= 200
    assert len({one.name for one in CASES}) == len(CASES)
