"""The emulator: runs a kernel or program of any stage on NumPy arrays, and says what a wrong one does, with its source line.

In: IR and arrays. Out: the outputs, or a `UserError` (TW050) for an access out of bounds, a misaligned vector, a read of
uninitialised shared memory, a race, a divergent barrier, a deadlock, a misused mbarrier or asynchronous copy. It is the
reference: values are exactly those the op table promises, whichever way the batches are cut. Outputs and scratch start
poisoned, so that what a kernel forgot shows.
"""

from __future__ import annotations

from tilewright.ir.emulator.run import run_kernel, run_program

__all__ = ["run_kernel", "run_program"]
