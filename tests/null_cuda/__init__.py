"""A CUDA driver without a GPU, for tests: it keeps the driver's contract and runs kernels on host memory.

`NullCuda` has the functions of `cuda.bindings.driver` that a runtime calls, with the same arguments and results: handles are checked,
calls in the wrong order are refused with the real driver's codes, launches keep the hardware's limits, captures forbid what they
forbid. `cuGetProcAddress` gives addresses of C functions, so machine code can call it too. Work is queued and runs by `mode`:

- `eager`: at once; `lazy`: only what somebody waits for; `reverse`, `random`: as lazy, with the order that is open turned round or
  drawn; `background`: on a thread of its own.

A launch runs what `kernels` has for its entry (a Python function of the address of the parameter table, and the grid), or else what
an executor knows: `install` adds one that runs the compiled program of the public API on the emulator. `fail` and `inject` make
functions fail; a kernel that raises `Fault` ends its context. `leaks` and `check` say at the end what was left over.
"""

from __future__ import annotations

from null_cuda.driver import NullCuda
from null_cuda.state import CONTEXT, FOREIGN_CONTEXT, Fault

__all__ = ["CONTEXT", "FOREIGN_CONTEXT", "Fault", "NullCuda"]
