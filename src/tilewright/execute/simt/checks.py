"""`check=True`: explicit kernels that say where they leave their arrays, on GPUs and CPUs.

In: a kernel that was built. Out: the same with bounds checks compiled in, which leave the first failure in an array that every
launch is given; `raise_failure` reads it when the launch is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tilewright.frontend.simt.kernels import BuiltKernel
from tilewright.ir.nodes import Kernel
from tilewright.passes.late.bounds_checks import FIELDS, NAME, Site, failure_of

FAILURE = NAME
"""The name of that array among a launch's arrays."""


def with_checks(built: BuiltKernel) -> tuple[BuiltKernel, tuple[Site, ...]]:
    """The kernel with its checks, and the accesses they watch."""
    from tilewright.passes.pipeline import watch_accesses
    from tilewright.passes.runner import Trace

    program, sites = watch_accesses(built.program, Trace())
    return replace(built, program=program, kernel=program.calls[0].kernel), sites


def new_failure() -> np.ndarray:
    return np.zeros(FIELDS, np.int64)


def raise_failure(values: np.ndarray, sites: Sequence[Site], kernel: Kernel, grid: Sequence[int]) -> None:
    """Raise what the launch left behind, if it did."""
    error = failure_of(values.tolist(), sites, kernel, grid[: max(1, len(kernel.grid))])
    if error is not None:
        raise error
