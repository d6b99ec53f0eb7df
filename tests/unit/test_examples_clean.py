"""The examples are what users copy: clean under ruff and pyright, without a single ignore."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").rglob("*.py"))


def tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed")
    return found


def test_there_are_examples_and_no_ignores() -> None:
    assert FILES
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "type: ignore" not in text, path
        assert "pyright:" not in text, path
        assert "noqa" not in text, path


def test_ruff() -> None:
    done = subprocess.run([tool("ruff"), "check", "examples"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pyright() -> None:
    check_types("examples", ROOT)


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_pyright_on_pages(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    (tmp_path / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT / "src")]}))
    check_types("readme.py", tmp_path)


def check_types(what: str, folder: Path) -> None:
    command = [tool("pyright"), "--pythonpath", sys.executable, what]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    except subprocess.TimeoutExpired:
        pytest.skip("pyright did not answer: its first start needs a network")
    if done.returncode not in (0, 1):
        pytest.skip(f"pyright cannot start here: {(done.stderr or done.stdout).strip()[-300:]}")
    assert done.returncode == 0, done.stdout
