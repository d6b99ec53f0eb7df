"""Whether there may be tables of measurements is known without their module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ASKS = """
import sys
from tilewright.compile.tuning_folder import may_have_tables
print(may_have_tables(), "tilewright.compile.tuning" in sys.modules)
if "open" in sys.argv:
    from tilewright.compile import tuning
    tuning.use_store(tuning.TuningStore())
    print(may_have_tables())
"""


def _said(cache: Path, *words: str, **environment: str) -> list[str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith("TILEWRIGHT_")}
    done = subprocess.run(
        [sys.executable, "-c", _ASKS, *words], env={**given, "TILEWRIGHT_CACHE_DIR": str(cache), **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_on_disk_says_so(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "tuning").mkdir()
    assert _said(tmp_path) == [f"{there} False"]
    assert _said(tmp_path, TILEWRIGHT_TUNING="off") == ["False False"]
    assert _said(tmp_path, TILEWRIGHT_CACHE="off") == ["False False"]


def test_tables_of_this_process_count(tmp_path: Path) -> None:
    assert _said(tmp_path, "open") == ["False False", "True"]
