"""The null driver as the tests of single modules use it: initialised, and all work done at once. See `null_cuda`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from null_cuda import CONTEXT, FOREIGN_CONTEXT, Fault, NullCuda

__all__ = ["CONTEXT", "FOREIGN_CONTEXT", "FakeCuda", "Fault"]


class FakeCuda(NullCuda):
    """A null driver after `cuInit`."""

    def __init__(self, memory: int = 1 << 30, count: int = 1, *, mode: str = "eager", seed: int = 0) -> None:
        super().__init__(memory, count, mode=mode, seed=seed)
        self.process = os.getpid()
