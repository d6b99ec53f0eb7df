"""Every kernel of the table of explicit kernels gives the same on a real GPU as on the emulator. Skipped without one."""

from __future__ import annotations

import pytest

from simt_kernels import Case, all_cases, assert_equal, outcome

pytestmark = pytest.mark.requires("cuda")


@pytest.mark.parametrize("one", all_cases(), ids=str)
def test_gpu_and_emulator_agree(one: Case) -> None:
    assert_equal(outcome(one, "cuda:0"), outcome(one, "emulator"), one.ulp, one.name)
