"""Random explicit kernels give on the GPU what the emulator gives, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, seed

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

from fuzz_simt import SimtKernel, simt_kernels
from test_fuzz_simt import SEED, agree, fuzzing

pytestmark = pytest.mark.requires("cuda")


@seed(SEED)
@fuzzing
@given(simt_kernels())
def test_the_gpu_agrees_with_the_emulator(one: SimtKernel) -> None:
    agree(one, "cuda")
