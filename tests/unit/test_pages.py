"""The pages that teach do what they say: the tutorial and the how-to pages are run block by block, as their reader would.

`tests/page_runner.py` says what the blocks mean. A page whose blocks import a library that is not installed is skipped.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from page_runner import PageRunner, WrongPage, blocks_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs/tutorial.md", *sorted((ROOT / "docs/howto").glob("*.md"))]
OPTIONAL = ("torch", "jax", "numba", "triton")
STEPS = ("first kernel", "error", "inside", "Tune", "time loop", "explicit kernel", "emulator", "graph", "model", "Export")


def needs(page: Path) -> list[str]:
    """Libraries beyond our own that its blocks import."""
    code = "".join(block.text for block in blocks_of(page.read_text(encoding="utf-8")) if block.info == "python")
    return [name for name in OPTIONAL if re.search(rf"^\s*(import|from) {name}\b", code, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    for library in needs(page):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, str(ROOT / "tests/page_runner.py"), str(page), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 0


def test_the_tutorial_has_its_steps_in_order() -> None:
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## \d+\. (.+)$", text, re.MULTILINE)
    assert len(titles) == len(STEPS)
    assert [step for step, title in zip(STEPS, titles, strict=True) if step not in title] == []


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```python\nprint(1)  # 2\n```\n", "line 2: it prints ['1'], and should ['2']"),
        ("```python\nprint(1)\n```\n", "line 2: a print does not say what it prints"),
        ("```python\nprint('')  # such as 2\n```\n", "line 2: it prints"),
        ("```python\na = 1\n```\n\n```python\nb = a / 0\n```\n", "line 6: it raised"),
        ("```python error\na = 1\n```\n\n```text\nno\n```\n", "line 2: it raised no error"),
        ("```python error\nimport tilewright\ntilewright.load('let x = ')\n```\n\n```text\nno\n```\n", "line 2: the message is"),
        ("```sh\ntilewright targets-of-nothing\n```\n", "line 2: tilewright targets-of-nothing"),
        ("```sh\nrm -r .\n```\n", "line 2: rm -r .: no command"),
        ("```sh\ntilewright cache info\n```\n\n```text\nnever printed\n```\n", "line 2: 'never printed' is not printed"),
    ],
)
def test_a_page_that_is_wrong_is_found(page: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(page, encoding="utf-8")
    with pytest.raises(WrongPage, match=re.escape(message)):
        PageRunner(path, tmp_path).run()
