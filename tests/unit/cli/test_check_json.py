"""`tilewright check`: JSON, warnings, and how little it has to load."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from tilewright.cli.main import cli
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree.unused import unused

ROOT = Path(__file__).parents[3]
WRONG = """\
let y = compute(x) {
    for i in 0..n:
        let kept = x[i]
        out[i] = x[i, i] + 1
}
"""


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["check", *words])
    return done.exit_code, done.stdout


def test_json_has_every_message_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "wrong.zyn"
    path.write_text(WRONG, encoding="utf-8")
    status, text = run("--json", "--args", "x=f32[*]", str(path))
    assert status == 1
    assert json.loads(text) == [
        {
            "path": str(path), "line": 3, "column": 9, "end_line": 3, "end_column": 24, "code": "TW019", "severity": "warning",
            "message": "'kept' is never used", "help": "leave it out, or let its name begin with _",
        },
        {
            "path": str(path), "line": 4, "column": 18, "end_line": 4, "end_column": 25, "code": "TW003", "severity": "error",
            "message": "'x' has rank 1 but is indexed with 2 indices", "help": "",
        },
    ]  # fmt: skip


def test_json_of_right_files_is_an_empty_list() -> None:
    assert run("--json", str(ROOT / "examples/zyn/softmax.zyn"), str(ROOT / "examples/gallery.py")) == (0, "[]\n")


def test_json_of_a_missing_file_and_of_a_syntax_error(tmp_path: Path) -> None:
    bad = tmp_path / "bad.zyn"
    bad.write_text("let y = )\n", encoding="utf-8")
    status, text = run("--json", str(tmp_path / "none.zyn"), str(bad))
    assert status == 1
    first, second = json.loads(text)
    assert (first["code"], first["line"], first["path"]) == ("TW007", 0, str(tmp_path / "none.zyn"))
    assert (second["code"], second["line"], second["column"], second["path"]) == ("TW001", 1, 9, str(bad))


def test_warnings_do_not_fail(tmp_path: Path) -> None:
    path = tmp_path / "warned.zyn"
    path.write_text("let y = x * 2\ny + 1\n", encoding="utf-8")
    done = CliRunner().invoke(cli, ["check", str(path)])
    assert done.exit_code == 0
    assert f"{path}: ok" in done.stdout
    assert done.stderr == textwrap.dedent(f"""\
        {path}:2:1: warning[TW019]: the result of this expression is not used
           |
         2 | y + 1
           | ^^^^^
        help: name it: let result = …
        """)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("compute(x) {\n    for i in 0..n: out[i] = x[i]\n}\n", [(1, "the result of this block is not used")]),
        ("let y = x\n", []),
        ("fn f(x):\n    let a = x\n    let b = x\n    return b\nlet y = f(x)\n", [(2, "'a' is never used")]),
        ("fn f(x):\n    let _a = x\n    return x\nlet y = f(x)\n", []),
        ("fn f(x):\n    let (a, b) = x\n    return a\nlet y = f(x)\n", []),
        ("let y = compute(x) {\n    for i in 0..n:\n        var s = 0.0\n        s = 2.0\n        out[i] = x[i]\n}\n", [(3, "'s' is never used")]),
        ("let y = compute(x) {\n    for i in 0..n:\n        x[i] * 2\n        out[i] = x[i]\n}\n", [(3, "the result of this expression is not used")]),
    ],
)
def test_unused(text: str, found: list[tuple[int, str]]) -> None:
    assert [(d.span.line, d.message) for d in unused(parse_module(text))] == found


def test_examples_have_no_warnings() -> None:
    for path in sorted((ROOT / "examples/zyn").glob("*.zyn")):
        assert unused(parse_module(path.read_text(encoding="utf-8"), str(path))) == [], path


def test_checking_loads_neither_llvm_nor_code_generators() -> None:
    code = (
        "import sys; from tilewright.cli.commands.check import check\n"
        f"assert check([{str(ROOT / 'examples/zyn/transformer.zyn')!r}], '', False)\n"
        "print([m for m in sys.modules if m.startswith(('llvmlite', 'tilewright.codegen.llvm.emitter', 'torch'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_package_offers_all_its_names() -> None:
    code = "import tilewright as tw\nassert [n for n in tw.__all__ if not hasattr(tw, n)] in ([], ['jax_function']), 'missing'\nfrom tilewright import *"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
