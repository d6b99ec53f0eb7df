"""Random explicit kernels: the emulator finds no fault in them and gives what the CPU's code gives, bit for bit.

`tests/gpu/test_fuzz_simt_gpu.py` does the same with a GPU. Examples follow from TILEWRIGHT_FUZZ_SEED and TILEWRIGHT_FUZZ_EXAMPLES as for
the other fuzzers.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from fuzz_simt import INPUTS, SimtKernel, simt_kernels
from hypothesis import HealthCheck, Phase, given, note, seed, settings

EXAMPLES = int(os.environ.get("TILEWRIGHT_FUZZ_EXAMPLES", "40"))
SEED = int(os.environ.get("TILEWRIGHT_FUZZ_SEED", "0"))
fuzzing = settings(
    max_examples=EXAMPLES, deadline=None, database=None, print_blob=False, report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
)  # fmt: skip


def outcome(one: SimtKernel, kernel: object, device: str, n: int) -> np.ndarray:
    x = np.random.default_rng(n).integers(-100, 100, INPUTS).astype(np.int32)
    y = np.zeros(one.grid * one.block, np.int32)
    kernel[one.grid, one.block](x, y, n, device=device)  # type: ignore[index]
    return y


def agree(one: SimtKernel, device: str) -> None:
    note(repr(one))
    kernel = one.kernel()
    for n in (7, 123):
        np.testing.assert_array_equal(outcome(one, kernel, device, n), outcome(one, kernel, "emulator", n))


@pytest.mark.requires("cpu")
@seed(SEED)
@fuzzing
@given(simt_kernels())
def test_the_cpu_agrees_with_the_emulator(one: SimtKernel) -> None:
    agree(one, "cpu")
