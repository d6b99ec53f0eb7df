"""Imports of ZynML programs: each file once, only from where they may come from, and no text of other files in messages."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from tilewright.cli.main import cli

SECRET = "root:hunter2:0:0\n"


def put(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.zyn").write_text(text)
    return folder


def test_a_file_imported_many_times_is_there_once(tmp_path: Path) -> None:
    """A ladder whose every file imports the next one twice has as many parts as files."""
    depth = 40
    for i in range(depth):
        put(tmp_path, **{f"e{i}": f'import "e{i + 1}.zyn" as a\nimport "e{i + 1}.zyn" as b\nlet v = a.v + b.v - {2**60 // 2**i}\n'})
    put(tmp_path, **{f"e{depth}": "var calls = 0\nlet v = 1\n"})
    module = tw.load(tmp_path / "e0.zyn")
    assert len(module.tree.body) == depth + 2
    value = 1
    for i in reversed(range(depth)):
        value = 2 * value - 2**60 // 2**i
    assert module.run() == {"v": (value + 2**63) % 2**64 - 2**63}


def test_two_names_of_one_file_share_its_values(tmp_path: Path) -> None:
    put(tmp_path, counter="var n = 0\nfn more(k): return n + k\n", left='import "counter.zyn" as c\nlet l = c.more(1)\n')
    put(tmp_path, main='import "counter.zyn" as a\nimport "counter.zyn" as b\nimport "left.zyn" as left\na.n = 5\nlet y = b.n + left.l + b.more(2)\n')
    assert tw.load(tmp_path / "main.zyn").run() == {"y": 5 + 1 + 7}


def test_names_of_loops_stay_their_own(tmp_path: Path) -> None:
    put(tmp_path, part="let i = 100\nlet n = 3\nvar total = 0\nfor i in 0..n: total = total + i\nlet w = compute(x) { for i in 0..m: out[i] = x[i] * n }\n")
    put(tmp_path, main='import "part.zyn" as part\nlet y = part.total + part.i\nlet z = part.w\n')
    found = tw.load(tmp_path / "main.zyn").run(x=np.ones(2, np.float32))
    assert found["y"] == 103
    np.testing.assert_array_equal(found["z"], [3, 3])


def test_names_of_files_in_files_are_hidden(tmp_path: Path) -> None:
    put(tmp_path, deep="let d = 2\n", taken='import "deep.zyn" as q\nlet t = q.d\n', main='import "taken.zyn"\nimport "deep.zyn" as q_\nlet y = t + q_.d\n')
    assert tw.load(tmp_path / "main.zyn").run() == {"t": 2, "y": 4}
    put(tmp_path, other="let d = 3\n", main='import "deep.zyn" as m\nimport "other.zyn" as m\nlet y = m.d\n')
    with pytest.raises(tw.UserError, match="'m' is the name of two imports"):
        tw.load(tmp_path / "main.zyn")


def test_many_files_in_a_row(tmp_path: Path) -> None:
    for i in range(500):
        put(tmp_path, **{f"c{i}": f'import "c{i + 1}.zyn" as n\nlet v = n.v + 1\n'})
    put(tmp_path, c500="let v = 1\n")
    with pytest.raises(tw.UserError, match="more than 64 files import one another in a row"):
        tw.load(tmp_path / "c0.zyn")
    assert tw.load(tmp_path / "c440.zyn").run() == {"v": 61}


@pytest.mark.parametrize("how", ["up", "absolute", "link", "link to a file", "link in a row", "text in the folder", "hidden", "link to text"])
def test_imports_stay_where_the_program_is(tmp_path: Path, how: str) -> None:
    (tmp_path / "secret.txt").write_text(SECRET)
    (tmp_path / "outside.zyn").write_text("let password = hunter2 hunter2\n")
    folder = put(tmp_path / "programs")
    path = {"up": "../secret.txt", "absolute": f"{tmp_path}/outside.zyn", "text in the folder": "notes.txt", "hidden": ".env"}.get(how, "link.zyn")
    if how == "link":
        (folder / "sub").symlink_to(tmp_path)
        path = "sub/outside.zyn"
    elif how == "link to a file":
        (folder / "link.zyn").symlink_to(tmp_path / "outside.zyn")
    elif how == "link in a row":
        (folder / "hop.zyn").symlink_to(tmp_path / "outside.zyn")
        (folder / "link.zyn").symlink_to("hop.zyn")
    else:
        (folder / "notes.txt").write_text(SECRET)
        (folder / ".env").write_text(SECRET)
        if how == "link to text":
            (folder / "link.zyn").symlink_to("notes.txt")
    put(folder, main=f'import "{path}" as s\nlet y = 1\n')
    with pytest.raises(tw.UserError) as caught:
        tw.load(folder / "main.zyn")
    assert caught.value.code == "TW007" and "hunter2" not in str(caught.value)
    assert "lies outside" in str(caught.value) or "is no .zyn file" in str(caught.value)
    for command in ("check", "run", "emulate", "compile", "inspect"):
        result = CliRunner().invoke(cli, [command, str(folder / "main.zyn")])
        assert result.exit_code == 1 and "hunter2" not in result.output and "TW007" in result.output, result.output


def test_declared_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "library", norm='import "base.zyn" as base\nlet n = base.b\n', base="let b = 4\n")
    main = put(tmp_path / "programs", main='import "../library/norm.zyn" as norm\nlet y = norm.n\n') / "main.zyn"
    with pytest.raises(tw.UserError, match="roots="):
        tw.load(main)
    assert tw.load(main, roots=[tmp_path / "library"]).run() == {"y": 4}
    with pytest.raises(tw.UserError, match="lies outside"):
        tw.load(main, roots=[tmp_path / "programs"])
    for command in ("check", "run"):
        result = CliRunner().invoke(cli, [command, str(main), "--root", str(tmp_path / "library")])
        assert result.exit_code == 0, result.output
        assert CliRunner().invoke(cli, [command, str(main)]).exit_code == 1
    monkeypatch.setenv("TILEWRIGHT_ROOTS", os.pathsep.join([str(tmp_path / "nowhere"), str(tmp_path / "library")]))
    assert tw.load(main).run() == {"y": 4}


def test_paths_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.zyn")
    (tmp_path / "folder.zyn").mkdir()
    (tmp_path / "circle.zyn").symlink_to("circle.zyn")
    (tmp_path / "latin.zyn").write_bytes(b"let hunter2 = 1 \xff\n")
    (tmp_path / "wide.zyn").write_bytes("let hunter2 = 1\n".encode("utf-16"))
    for path in ("a\0b.zyn", "pipe.zyn", "folder.zyn", "circle.zyn", "latin.zyn", "wide.zyn", "n" * 300 + ".zyn", "", ".", "/", "\x1b[31m.zyn"):
        put(tmp_path, main=f'import "{path}" as n\nlet v = 1\n')
        with pytest.raises(tw.UserError) as caught:
            tw.load(tmp_path / "main.zyn")
        assert "hunter2" not in str(caught.value)
    for path in (tmp_path / "pipe.zyn", tmp_path / "folder.zyn", tmp_path / "circle.zyn", "a\0b.zyn", "let \0", 3):
        with pytest.raises(tw.UserError):
            tw.load(path)  # type: ignore[arg-type]
    (tmp_path / "secret.txt").write_text(SECRET)
    with pytest.raises(tw.UserError, match="is not ZynML") as caught:
        tw.load(tmp_path / "secret.txt")
    assert "hunter2" not in str(caught.value)


def test_byte_order_marks(tmp_path: Path) -> None:
    (tmp_path / "part.zyn").write_bytes(b"\xef\xbb\xbflet n = 2\n")
    (tmp_path / "main.zyn").write_bytes(b'\xef\xbb\xbfimport "part.zyn" as p\r\nlet y = p.n + 1\r\n')
    assert tw.load(tmp_path / "main.zyn").run() == {"y": 3}
    assert tw.load("\ufefflet y = 1\n").run() == {"y": 1}
    source = "import tilewright as tw\n\n@tw.kernel\ndef twice(x: tw.Array):\n    return x * 2\n"
    (tmp_path / "kernels.py").write_bytes(b"\xef\xbb\xbf" + source.encode())
    for name in ("main.zyn", "kernels.py"):
        result = CliRunner().invoke(cli, ["check", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    (tmp_path / "wrong.zyn").write_bytes(b"\xef\xbb\xbflet = 1\n")
    with pytest.raises(tw.UserError, match=r"wrong.zyn:1:5: error\[TW001\]"):
        tw.load(tmp_path / "wrong.zyn")
    result = CliRunner().invoke(cli, ["fmt", "--check", str(tmp_path / "part.zyn")])
    assert result.exit_code == 0, result.output
