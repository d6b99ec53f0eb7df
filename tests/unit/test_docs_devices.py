"""The document on devices is true: its code runs and prints what it says, with two null GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_docs_memory import ROOT, run

from tilewright.runtime.cpu import pool as cpu_pool

_PRELUDE = """
import runpy, sys
sys.path[:0] = [{tests!r}]
from copy_kernels import register_copies
from null_cuda.install import install
register_copies(install(mode="lazy", count=2))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.skipif(len(cpu_pool.usable_cores()) < 2, reason="one core has no parts")
def test_devices(tmp_path: Path) -> None:
    run("docs/runtime-devices.md", "", _PRELUDE.format(tests=str(ROOT / "tests")), tmp_path)
