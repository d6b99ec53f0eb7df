"""The example notebooks run from top to bottom and print what they keep. Jupyter is not needed: cells are run as IPython runs them.

`python tests/unit/test_example_notebooks.py --write` runs them and keeps what they print.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def run(notebook: dict[str, Any], name: str) -> list[str]:
    """What every code cell prints. A cell is a file of its own that only `linecache` knows, as in IPython."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed: list[str] = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            source, place = "".join(cell["source"]), f"<{name} cell {number}>"
            linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(source, place, "exec"), names)
            printed.append(output.getvalue())
    return printed


def kept(notebook: dict[str, Any]) -> list[str]:
    return ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    printed = run(notebook, path.stem)
    assert any(printed)
    assert printed == kept(notebook)


def write() -> None:
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, (cell, text) in enumerate(zip(codes, run(notebook, path.stem), strict=True), 1):
            cell["execution_count"] = number
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}] if text else []
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__" and "--write" in sys.argv[1:]:
    write()
