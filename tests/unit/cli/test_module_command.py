"""`python -m tilewright` is the command."""

from __future__ import annotations

import subprocess
import sys


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "tilewright", "--help"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: tilewright ")
