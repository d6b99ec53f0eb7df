"""Writes `zyn.tmLanguage.json`, the TextMate grammar for ZynML, here and into the extension for Visual Studio Code.

Its lists of words come from the language itself: reserved words from `zyn.lark`, functions, element types, attributes and kernel kinds
from the compiler. `python editors/make_grammar.py --check` only says whether the files are up to date.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import resources
from pathlib import Path

from tilewright.base.dtypes import SCALARS
from tilewright.tree.check.expressions import FUNCTIONS
from tilewright.tree.metadata import KernelKind, attribute_names

PLACES = [Path(__file__).parent / folder / "zyn.tmLanguage.json" for folder in ("", "vscode")]
CONSTANTS = ("true", "false", "inf")
OPERATORS = ("and", "or", "not")


def grammar_words() -> tuple[list[str], list[str]]:
    """Reserved words of the grammar, and words that are names elsewhere."""
    text = resources.files("tilewright.frontend.zyn").joinpath("zyn.lark").read_text(encoding="utf-8")
    reserved = re.findall(r'^[A-Z]+: "([a-z]+)"$', text, re.MULTILINE)
    declared = re.search(r"^%declare (.+)$", text, re.MULTILINE)
    assert declared is not None
    layout = {"INDENT", "DEDENT", "LRECORD", "ELSE_VALUE"}
    return reserved, [w.lower() for w in declared[1].split() if w not in layout]


def one_of(words: list[str] | tuple[str, ...]) -> str:
    return rf"\b({'|'.join(sorted(words))})\b"


def grammar() -> dict[str, object]:
    reserved, contextual = grammar_words()
    control = [w for w in reserved if w not in CONSTANTS + OPERATORS]
    types = [d.name for d in SCALARS] + ["tensor", "array"]
    return {
        "$schema": "https://raw.githubusercontent.com/martinring/tmlanguage/master/tmlanguage.json",
        "name": "ZynML",
        "scopeName": "source.zyn",
        "fileTypes": ["zyn"],
        "patterns": [
            {"include": f"#{part}"}
            for part in ("comments", "strings", "attributes", "functions", "numbers", "words", "calls", "operators")
        ],
        "repository": {
            "comments": {"name": "comment.line.zyn", "match": r"(//|#).*$"},
            "strings": {
                "patterns": [
                    {"name": "string.quoted.double.zyn", "begin": '"', "end": r'"|$', "patterns": [{"include": "#escapes"}]},
                    {"name": "string.quoted.single.zyn", "begin": "'", "end": r"'|$", "patterns": [{"include": "#escapes"}]},
                ]
            },
            "escapes": {"name": "constant.character.escape.zyn", "match": r"\\[ntr0\\\"']"},
            "attributes": {
                "patterns": [
                    {
                        "match": rf"(@)\s*(kernel)\s+({'|'.join(sorted(k.value for k in KernelKind))})\b",
                        "captures": {
                            "1": {"name": "punctuation.definition.decorator.zyn"},
                            "2": {"name": "entity.name.function.decorator.zyn"},
                            "3": {"name": "support.type.kernel.zyn"},
                        },
                    },
                    {
                        "match": rf"(@)\s*({'|'.join(sorted(attribute_names()))})\b",
                        "captures": {
                            "1": {"name": "punctuation.definition.decorator.zyn"},
                            "2": {"name": "entity.name.function.decorator.zyn"},
                        },
                    },
                ]
            },
            "functions": {
                "match": r"\b(fn|pipeline)\s+([A-Za-z_][A-Za-z_0-9]*)",
                "captures": {"1": {"name": "storage.type.function.zyn"}, "2": {"name": "entity.name.function.zyn"}},
            },
            "numbers": {
                "patterns": [
                    {"name": "constant.numeric.quantity.zyn", "match": r"\b\d+(\.\d+)?(KB|MB|GB|TB|ns|us|ms|s)\b"},
                    {"name": "constant.numeric.float.zyn", "match": r"\b(\d+\.\d+([eE][+-]?\d+)?|\d+[eE][+-]?\d+)\b"},
                    {"name": "constant.numeric.integer.zyn", "match": r"\b(0[xX][0-9a-fA-F_]+|0[bB][01_]+|\d[\d_]*)\b"},
                ]
            },
            "words": {
                "patterns": [
                    {"name": "keyword.control.zyn", "match": one_of(control)},
                    {"name": "keyword.operator.word.zyn", "match": one_of(OPERATORS)},
                    {"name": "constant.language.zyn", "match": one_of(CONSTANTS)},
                    {"name": "keyword.other.zyn", "match": one_of(contextual)},
                    {"name": "variable.language.zyn", "match": r"\bout(_[A-Za-z_0-9]*)?\b"},
                    {"name": "support.type.zyn", "match": one_of(types)},
                ]
            },
            "calls": {
                "patterns": [
                    {"name": "support.function.zyn", "match": rf"\b({'|'.join(map(re.escape, sorted(FUNCTIONS)))})\b(?=\s*\()"},
                    {"name": "entity.name.function.call.zyn", "match": r"\b[A-Za-z_][A-Za-z_0-9]*(?=\s*\()"},
                ]
            },
            "operators": {"name": "keyword.operator.zyn", "match": r"\|>|->|\.\.=?|\*\*=?|<<=?|>>=?|[-+*/%@&|^]=?|[<>!=]=|[<>=~]"},
        },
    }


def main() -> int:
    text = json.dumps(grammar(), indent=2, ensure_ascii=False) + "\n"
    if "--check" in sys.argv[1:]:
        return 0 if all(place.exists() and place.read_text(encoding="utf-8") == text for place in PLACES) else 1
    for place in PLACES:
        place.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
