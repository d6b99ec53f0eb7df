"""The highlighting grammar: in step with the language, and it colours the examples as it should."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tilewright.frontend.zyn.parse import layout_tokens

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "editors/vscode"


def maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_grammar", ROOT / "editors/make_grammar.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GRAMMAR = json.loads((FOLDER / "zyn.tmLanguage.json").read_text(encoding="utf-8"))


def test_it_is_what_the_language_says() -> None:
    assert maker().grammar() == GRAMMAR, "run python editors/make_grammar.py"
    assert json.loads((ROOT / "editors/zyn.tmLanguage.json").read_text(encoding="utf-8")) == GRAMMAR


def test_all_words_of_the_grammar_are_there() -> None:
    reserved, contextual = maker().grammar_words()
    assert {"let", "for", "await", "inf"} <= set(reserved)
    assert {"compute", "pipeline", "var", "timeout"} <= set(contextual)
    shown = " ".join(p["match"] for p in GRAMMAR["repository"]["words"]["patterns"])
    assert all(re.search(rf"\b{word}\b", shown) for word in (*reserved, *contextual))


def rules(name: str) -> list[tuple[str, str]]:
    """(pattern, scope) of one part of the grammar, in order; a rule with captures is that of its last one."""
    part = GRAMMAR["repository"][name]
    found = []
    for rule in part.get("patterns", [part]):
        pattern = rule["match"] if "match" in rule else rule["begin"] + r"(?:\\.|[^\\])*?" + f"(?:{rule['end']})"
        scope = rule.get("name") or list(rule["captures"].values())[-1]["name"]
        found.append((pattern, scope))
    return found


def coloured(line: str) -> list[tuple[str, str]]:
    """What TextMate makes of a line: at each place the first rule whose match begins earliest."""
    every = [rule for part in GRAMMAR["patterns"] for rule in rules(part["include"][1:])]
    position, found = 0, []
    while position < len(line):
        hits = [(m.start(), number, m) for number, (p, _) in enumerate(every) if (m := re.compile(p).search(line, position)) and m.end() > m.start()]
        if not hits:
            break
        _, number, match = min(hits, key=lambda hit: hit[:2])
        found.append((match[0], every[number][1].removesuffix(".zyn")))
        position = match.end()
    return found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("let s = 1.5e-3 // x", [("let", "keyword.control"), ("=", "keyword.operator"), ("1.5e-3", "constant.numeric.float"), ("// x", "comment.line")]),
        ("@kernel matmul", [("@kernel matmul", "support.type.kernel")]),
        ("@tile(64KB)", [("@tile", "entity.name.function.decorator"), ("64KB", "constant.numeric.quantity")]),
        ("fn f(x):", [("fn f", "entity.name.function")]),
        ('"a // b"', [('"a // b"', "string.quoted.double")]),
        ("out[i] = exp(x)", [("out", "variable.language"), ("=", "keyword.operator"), ("exp", "support.function")]),
        ("x |> g()", [("|>", "keyword.operator"), ("g", "entity.name.function.call")]),
        ("0..=n step 0xff", [
            ("0", "constant.numeric.integer"), ("..=", "keyword.operator"), ("step", "keyword.other"), ("0xff", "constant.numeric.integer"),
        ]),
    ],
)  # fmt: skip
def test_lines(line: str, expected: list[tuple[str, str]]) -> None:
    assert coloured(line) == expected


@pytest.mark.parametrize("path", sorted((ROOT / "examples/zyn").glob("*.zyn")), ids=lambda p: p.name)
def test_every_keyword_of_the_examples_is_coloured_as_one(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    for token in layout_tokens(text, str(path)):
        if token.type.isupper() and token.value.isalpha() and token.type not in ("NAME", "STRING", "INDENT", "DEDENT", "KERNEL", "NEWLINE"):
            scopes = [scope for word, scope in coloured(lines[token.line - 1]) if token.value in word.split()]
            assert any(s.startswith(("keyword", "constant.language", "storage", "entity.name.function")) for s in scopes), (token, scopes)


def test_the_extension_names_files_that_exist() -> None:
    package = json.loads((FOLDER / "package.json").read_text(encoding="utf-8"))
    contributed = package["contributes"]
    (language,), (grammar,) = contributed["languages"], contributed["grammars"]
    for name in (package["main"], language["configuration"], grammar["path"]):
        assert (FOLDER / name).is_file(), name
    assert grammar["scopeName"] == GRAMMAR["scopeName"]
    assert language["extensions"] == [".zyn"]
    configuration = json.loads((FOLDER / "language-configuration.json").read_text(encoding="utf-8"))
    for rule in configuration["indentationRules"].values():
        re.compile(rule)
