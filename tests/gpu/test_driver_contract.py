"""The null driver answers as this machine's driver does: the same scenarios, the same codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import null_contract

pytestmark = pytest.mark.requires("cuda")

TESTS = Path(__file__).parents[1]


def test_contract() -> None:
    """In a process of its own, where nothing has started the driver yet."""
    code = f"import sys, json; sys.path.insert(0, {str(TESTS)!r})\nimport null_contract\nfrom cuda.bindings import driver\n"
    code += "print(json.dumps(null_contract.run(driver)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {k: v for k, v in found.items() if v != null_contract.EXPECTED.get(k)} == {}
    assert found.keys() == null_contract.EXPECTED.keys()
