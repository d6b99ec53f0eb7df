"""Tables of the parser on disk: read back alike, never trusted when damaged or somebody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.frontend.zyn import parse as zyn

TEXT = "let y = compute(x) {\n    for i in 0..n: out[i] = x[i] if x[i] > 0 else 0\n} |> sqrt()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILEWRIGHT_CACHE", "1")
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
