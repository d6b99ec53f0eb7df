"""The site of the documents is whole: its navigation has every page, its reference every public name. mkdocs is not needed for that."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

import tilewright as tw

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def navigation() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "tools/api_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_has_every_page_once() -> None:
    at_the_top = {"start.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"}  # pages of the repository's root
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(navigation()) == sorted(pages | at_the_top)


def test_the_reference_is_as_the_tool_writes_it() -> None:
    made = tool().pages()
    assert {path.name for path in (DOCS / "api").glob("*.md")} == set(made)
    for name, text in made.items():
        assert (DOCS / "api" / name).read_text(encoding="utf-8") == text, f"{name}: python tools/api_reference.py --write"


def test_the_reference_has_every_public_name() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    shown = set(re.findall(r"^## tw\.(\w+)|^\| `tw\.(\w+)`|^      heading: tw\.(\w+)", text, re.MULTILINE))
    names = {name for row in shown for name in row}
    assert [name for name in tw.__all__ if name not in names] == []


def test_what_the_reference_looks_up_is_there() -> None:
    for path in (DOCS / "api").glob("*.md"):
        for place in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            module, _, name = place.rpartition(".")
            assert hasattr(importlib.import_module(module), name), place


def is_described(name: str) -> bool:
    value: Any = getattr(tw, name)
    if callable(value) or isinstance(value, ModuleType):
        return bool(inspect.getdoc(value))
    source = inspect.getsource(importlib.import_module(f"tilewright.{tool().home(name)}"))
    return bool(re.search(rf'^{name} = [^\n]*\n"""', source, re.MULTILINE))


def test_every_public_name_has_a_docstring() -> None:
    group_of = tool().group_of
    types = {name for name in tw.__all__ if group_of(name) == "types"}
    assert [name for name in tw.__all__ if name not in types and not is_described(name)] == []



def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: make docs does it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    built = {path.relative_to(tmp_path / "site").with_suffix(".md").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    assert set(navigation()) <= built
    assert (tmp_path / "site/search/search_index.json").stat().st_size > 100_000
    assert "tw.torch_op" in (tmp_path / "site/api/graphs.html").read_text(encoding="utf-8")


def test_pictures_are_legible_files_that_pages_show() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    pictures = sorted((DOCS / "pictures").glob("*.svg"))
    assert {path.name for path in pictures} == {"figures.svg", "memory.svg", "stages.svg"}
    for path in pictures:
        root = ElementTree.parse(path).getroot()
        sizes = [float(text.attrib["font-size"]) for text in root.iter("{http://www.w3.org/2000/svg}text")]
        assert min(sizes) >= 12, path.name
        assert f"(pictures/{path.name})" in pages, path.name


def test_the_picture_of_the_figures_has_all_kept_results() -> None:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools/pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "python tools/pictures.py --write"
    assert (DOCS / "pictures/figures.svg").read_text(encoding="utf-8") == module.figures(), text
    assert (DOCS / "pictures/memory.svg").read_text(encoding="utf-8") == module.memory(), text
    numbers = re.compile(r"%(r|rd|p|f)?\d+|\$L__BB\w+")  # registers and labels are numbered anew by every change
    kept, made = (DOCS / "pictures/stages.svg").read_text(encoding="utf-8"), module.stages()
    assert numbers.sub("_", kept) == numbers.sub("_", made), text
