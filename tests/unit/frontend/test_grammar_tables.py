"""Tables of the parser, in the package and on disk: of the grammar as it is, read back alike, never trusted when damaged or somebody else's."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import lark
import pytest

from tilewright.frontend.zyn import grammar_tables, shipped_tables
from tilewright.frontend.zyn import parse as zyn
from tilewright.frontend.zyn.build_tree import TreeBuilder
from tilewright.frontend.zyn.layout import LayoutReader

TEXT = "let y = compute(x) {\n    for i in 0..n: out[i] = x[i] if x[i] > 0 else 0\n} |> sqrt()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILEWRIGHT_CACHE", "1")
    # As with another lark than the one that made the package's tables.
    monkeypatch.setattr(grammar_tables, "shipped", lambda *_: None)
    return tmp_path / "grammar"


def test_kept_tables_parse_the_same(folder: Path) -> None:
    made = zyn._ZynParser().parse(zyn.Source("a.zyn", TEXT))
    (tables,) = folder.iterdir()
    before = tables.stat().st_mtime_ns
    read = zyn._ZynParser().parse(zyn.Source("a.zyn", TEXT))
    assert read == made
    assert tables.stat().st_mtime_ns == before


def test_messages_are_the_same(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(zyn.UserError, match="expected"):
            zyn._ZynParser().parse(zyn.Source("a.zyn", "let = 3\n"))


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
def test_damaged_tables_are_made_anew(folder: Path, damage: bytes | None) -> None:
    zyn._ZynParser()
    (tables,) = folder.iterdir()
    good = tables.read_bytes()
    tables.write_bytes(good[:-1] if damage is None else damage)
    assert zyn._ZynParser().parse(zyn.Source("a.zyn", TEXT)).body
    assert tables.read_bytes()[:32] == good[:32] or tables.stat().st_size > 1000


def test_tables_others_could_write_are_not_read(folder: Path) -> None:
    zyn._ZynParser()
    (tables,) = folder.iterdir()
    tables.write_bytes(tables.read_bytes())
    tables.chmod(0o666)
    assert zyn._ZynParser().parse(zyn.Source("a.zyn", TEXT)).body
    assert tables.stat().st_mode & 0o022 == 0  # replaced by our own


def test_tables_in_a_place_that_others_can_write_are_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    zyn._ZynParser()
    (tables,) = folder.iterdir()
    before = tables.stat().st_mtime_ns
    folder.parent.chmod(0o770)
    for _ in range(2):
        assert zyn._ZynParser().parse(zyn.Source("a.zyn", TEXT)).body
    assert tables.stat().st_mtime_ns == before
    assert len(caplog.records) == 1 and "can be written by its group" in caplog.text


def test_without_a_cache_nothing_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    assert zyn._ZynParser().parse(zyn.Source("a.zyn", TEXT)).body
    assert not folder.exists()


# -- the package's own --------------------------------------------------------------------------------------------------------------


def _grammar() -> str:
    return resources.files("tilewright.frontend.zyn").joinpath("zyn.lark").read_text(encoding="utf-8")


def _shipped_text() -> str:
    return resources.files("tilewright.frontend.zyn").joinpath(shipped_tables.NAME).read_text(encoding="utf-8")


def test_the_packages_tables_are_those_of_the_grammar() -> None:
    version = json.loads(_shipped_text())["made_of"]["lark"]
    if version != lark.__version__:
        pytest.skip(f"the package's tables are of lark {version}, this is {lark.__version__}")
    made = grammar_tables.made_tables(_grammar(), LayoutReader(), TreeBuilder())
    text = shipped_tables.encoded(made, _grammar(), lark.__version__, grammar_tables.MAKING)
    assert text == _shipped_text(), "the grammar has changed: run `python tools/parser_tables.py --write`"


def test_tables_come_back_as_they_were() -> None:
    """All but the numbers of states and tokens, which have one order in the text: a second turn changes nothing."""
    making = grammar_tables.MAKING
    made = grammar_tables.made_tables(_grammar(), LayoutReader(), TreeBuilder())
    once = shipped_tables.decoded(shipped_tables.encoded(made, "g", "1", making), "g", "1", making)
    assert once is not None
    twice = shipped_tables.decoded(shipped_tables.encoded(once, "g", "1", making), "g", "1", making)
    assert once == twice
    assert once["memo"] == made["memo"]
    assert _accepted(once) == _accepted(made)


def _accepted(tables: dict[str, Any]) -> list[list[str]]:
    """For each state, the tokens it takes."""
    table = tables["data"]["parser"]["parser"]
    return sorted(sorted(table["tokens"][token] for token in row) for row in table["states"].values())


@pytest.mark.parametrize("text", [TEXT, "let a = 1\nlet b = [a, 2.5, 'x']\nif a > 1 {\n    print(b[0])\n}\n", "fn f(x) {\n    x + 1\n}\n"])
def test_the_packages_tables_parse_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome() -> object:
        try:
            return zyn._ZynParser().parse(zyn.Source("a.zyn", text))
        except zyn.UserError as error:
            return str(error)

    with_shipped = outcome()
    monkeypatch.setattr(grammar_tables, "shipped", lambda *_: None)
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    assert with_shipped == outcome()


def test_with_the_packages_tables_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILEWRIGHT_CACHE", "1")
    monkeypatch.setattr(lark, "__version__", json.loads(_shipped_text())["made_of"]["lark"])
    monkeypatch.setattr(lark.Lark, "__init__", lambda *_, **__: pytest.fail("tables were made anew"))
    assert zyn._ZynParser().parse(zyn.Source("a.zyn", TEXT)).body
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["grammar", "lark", "options"])
def test_tables_made_of_something_else_are_not_used(what: str) -> None:
    given: dict[str, object] = {"grammar": _grammar(), "version": json.loads(_shipped_text())["made_of"]["lark"], "making": grammar_tables.MAKING}
    assert shipped_tables.shipped(**given) is not None  # type: ignore[arg-type]
    given |= {"grammar": {"grammar": _grammar() + "\n"}, "lark": {"version": "0.1"}, "options": {"making": {"parser": "lalr"}}}[what]
    assert shipped_tables.shipped(**given) is None  # type: ignore[arg-type]


def test_another_lark_makes_its_own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILEWRIGHT_CACHE", "1")
    monkeypatch.setattr(lark, "__version__", "0.1")
    assert zyn._ZynParser().parse(zyn.Source("a.zyn", TEXT)).body
    assert [path.name for path in tmp_path.iterdir()] == ["grammar"]
