"""`check=True`: explicit kernels that say where they leave their arrays, on GPUs and CPUs.

In: a kernel that was built. Out: the same with bounds checks compiled in, which leave the first failure in an array that every
launch is given; `raise_failure` reads it when the launch is done.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tilewright.base.source import Span
from tilewright.frontend.simt.kernels import BuiltKernel
from tilewright.ir.needs import UNTESTED
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.types import Tensor
from tilewright.passes.late.bounds_checks import FIELDS, NAME, Site, failure_of

FAILURE = NAME
"""The name of that array among a launch's arrays."""
FAILURE_LENGTH = FIELDS
Sites = Sequence[Site]
"""The accesses of a kernel that are watched."""


def with_checks(built: BuiltKernel) -> tuple[BuiltKernel, tuple[Site, ...]]:
    """The kernel with its checks, and the accesses they watch. What the text alone shows to be wrong is refused first: checks would hide it."""
    from tilewright.analysis import thread_faults
    from tilewright.passes.routes import watch_accesses
    from tilewright.passes.runner import Trace

    thread_faults.check_threads(built.kernel)
    untested = _untested(built.kernel)
    if untested:
        span = min(untested.values(), key=lambda s: s.line)
        warnings.warn(
            f"{span.place()}: the checks of {built.kernel.name} do not test the places in shared memory of {', '.join(sorted(untested))}; device=\"emulator\" does",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip
    program, sites = watch_accesses(built.program, Trace())
    return replace(built, program=program, kernel=program.calls[0].kernel), sites


def _untested(kernel: Kernel) -> dict[str, Span]:
    """Ops whose places in shared memory are not tested and not constants inside."""
    constants = {op.results[0]: op.attrs["value"] for op in walk(kernel.body) if op.opcode == "const"}
    found: dict[str, Span] = {}
    for op in walk(kernel.body):
        if op.opcode in UNTESTED:
            memory, number = op.operands[0].type, constants.get(op.operands[1])
            inside = op.opcode.startswith("mbarrier") and isinstance(memory, Tensor) and isinstance(number, int)
            size = memory.shape[0].constant if inside and isinstance(memory, Tensor) and memory.rank == 1 else None
            if size is None or not isinstance(number, int) or not 0 <= number < size:
                found.setdefault(op.opcode, op.span)
    return found


def new_failure() -> np.ndarray:
    return np.zeros(FIELDS, np.int64)


def raise_failure(values: Sequence[int], sites: Sites, kernel: Kernel, grid: Sequence[int]) -> None:
    """Raise what the launch left behind, if it did."""
    error = failure_of(values, sites, kernel, grid[: max(1, len(kernel.grid))])
    if error is not None:
        raise error
