"""Random kernels: every stage of the IR and the machine code of this CPU must agree.

Integers, comparisons and everything that rounds once must agree bit for bit (NaN with NaN, zero with zero); functions and
float sums within their bounds. A failure prints the kernel as text. The examples follow from TILEWRIGHT_FUZZ_SEED (0 unless
set, and printed), so every run and every machine tries the same ones; TILEWRIGHT_FUZZ_EXAMPLES asks for more of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from fuzz_kernels import Fuzzed, kernels
from hypothesis import HealthCheck, Phase, given, note, seed, settings

from support import hints_of, run_cpu
from tilewright.base.dtypes import DType
from tilewright.base.target import parse_target
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk
from tilewright.ir.program import Program
from tilewright.ir.text import print_kernel
from tilewright.ir.types import dtype_of
from tilewright.ir.verify import verify_program
from tilewright.passes.routes import lower

EXAMPLES = int(os.environ.get("TILEWRIGHT_FUZZ_EXAMPLES", "40"))
SEED = int(os.environ.get("TILEWRIGHT_FUZZ_SEED", "0"))
fuzzing = settings(
    max_examples=EXAMPLES, deadline=None, database=None, print_blob=False, report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
)  # fmt: skip


def agree(label: str, got: np.ndarray, want: np.ndarray, dtype: DType, ulp: float, terms: int) -> None:
    """Equal; or, for floats with a bound, near."""
    assert got.shape == want.shape
    if not dtype.is_float:
        places = np.argwhere(got != want)
        assert not len(places), f"{label} differs at {places[0]}: {got[tuple(places[0])]} instead of {want[tuple(places[0])]}"
        return
    a, b = got.astype(np.float64), want.astype(np.float64)
    bad = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if ulp:
        with np.errstate(all="ignore"):
            # What cancels in a long sum, or crosses a pole of a function, is not ours to judge here: other tests do.
            unit = 2.0**-dtype.mantissa * ulp * (1 + terms)
            bad &= ~(np.abs(a - b) <= unit * np.maximum(np.abs(b), 1.0)) & np.isfinite(b)
    places = np.argwhere(bad)
    assert not len(places), f"{label} differs at {places[0]}: {a[tuple(places[0])]!r} instead of {b[tuple(places[0])]!r}"


def rounds_products(program: Program) -> bool:
    """Whether fusing multiplications with additions can change a result."""
    return any(op.opcode == "mul" and dtype_of(op.operands[0].type).is_float for c in program.calls for op in walk(c.kernel.body))


def check(fuzzed: Fuzzed, target: str) -> None:
    program, inputs = fuzzed.program, fuzzed.inputs
    note(f"TILEWRIGHT_FUZZ_SEED={SEED}, target {target}, shapes { {n: np.shape(v) for n, v in inputs.items()} }")
    note(print_kernel(program.calls[0].kernel))
    verify_program(program)
    dtype = program.outputs[0].type.dtype
    stages = lower(program, parse_target(target), hints_of(program, inputs))
    reference = run_program(stages.loop, inputs)["o"]
    if not rounds_products(program):
        agree("the source", run_program(program, inputs)["o"], reference, dtype, fuzzed.ulp, fuzzed.terms)
    for stage in ("tile", "thread"):
        agree(stage, run_program(getattr(stages, stage), inputs)["o"], reference, dtype, fuzzed.ulp, fuzzed.terms)
    if not parse_target(target).is_gpu:
        agree("native code", run_cpu(program, inputs)["o"], reference, dtype, fuzzed.ulp, fuzzed.terms)


@pytest.mark.parametrize("target", ["sm_90a", "cpu"])
@pytest.mark.parametrize("functions", [False, True], ids=["exact", "functions"])
def test_all_stages_agree(target: str, functions: bool) -> None:
    @seed(SEED)
    @fuzzing
    @given(kernels(functions))
    def every(fuzzed: Fuzzed) -> None:
        check(fuzzed, target)

    run: Callable[[], None] = every
    run()
