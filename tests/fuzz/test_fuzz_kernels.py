"""Random kernels: every stage of the IR and the machine code of this CPU must agree.

Integers, comparisons and everything that rounds once must agree bit for bit (NaN with NaN, zero with zero); functions and
float sums within their bounds. A failure prints the kernel as text. `HYPOTHESIS_SEED`-free: the examples are derived from the
test's source, so every run and every machine tries the same ones; set TILEWRIGHT_FUZZ_SEED to try others, and
TILEWRIGHT_FUZZ_EXAMPLES for more of them.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, note, seed, settings
from hypothesis import given as hypothesis_given
from support import assert_close, hints_of, run_cpu

from fuzz_kernels import Fuzzed, kernels
from tilewright.base.target import parse_target
from tilewright.ir.emulator import run_program
from tilewright.ir.text import print_kernel
from tilewright.ir.verify import verify_program
from tilewright.passes.pipeline import lower

EXAMPLES = int(os.environ.get("TILEWRIGHT_FUZZ_EXAMPLES", "60"))
SEED = os.environ.get("TILEWRIGHT_FUZZ_SEED")
