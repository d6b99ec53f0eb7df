"""The documents on memory and other libraries are true: their code runs and prints what they say, on a null GPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_PRELUDE = """
import runpy, sys
sys.path[:0] = [{tests!r}]
from copy_kernels import register_copies
from null_cuda.install import install
register_copies(install(mode="lazy"))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def blocks(name: str, info: str) -> tuple[list[str], list[str]]:
    """The code, on the document's own lines, and what it prints."""
    text = (ROOT / name).read_text(encoding="utf-8")
    lines: list[str] = []
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        if match[1] in ("python", info):
            lines += [""] * (text.count("\n", 0, match.start()) + 1 - len(lines))
            lines += match[2].splitlines()
    return lines, re.findall(r"^ *print\(.*\)  # (.+)$", "\n".join(lines), re.MULTILINE)


def run(name: str, info: str, prelude: str, tmp_path: Path) -> None:
    lines, expected = blocks(name, info)
    script, start = tmp_path / f"{Path(name).stem}_md.py", tmp_path / "start.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    start.write_text(prelude)
    done = subprocess.run([sys.executable, str(start), str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert expected
    assert done.stdout.splitlines() == expected


def test_memory(tmp_path: Path) -> None:
    run("docs/runtime-memory.md", "", _PRELUDE.format(tests=str(ROOT / "tests")), tmp_path)


def test_interop(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    jax = "python jax" if importlib.util.find_spec("jax") else ""
    run("docs/interop.md", jax, textwrap.dedent("""
        import runpy, sys
        runpy.run_path(sys.argv[1], run_name="__main__")
    """), tmp_path)  # fmt: skip
