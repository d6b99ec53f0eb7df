"""The generated parts of `docs/language.md` are what the language says."""

from __future__ import annotations

from pathlib import Path

from tilewright.frontend.zyn.reference import grammar, parts, renewed

DOCUMENT = Path(__file__).parents[3] / "docs/language.md"


def test_the_reference_is_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert renewed(text) == text, "run: python -m tilewright.frontend.zyn.reference docs/language.md"


def test_a_stale_part_is_found() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert renewed(text.replace("`softplus`", "`softplush`")) == text
    assert renewed(text.replace('"while" expr block', "gone")) == text


def test_the_grammar_is_written_for_readers() -> None:
    text = grammar()
    assert 'let: "let" names (":" expr)? "=" expr' in text
    assert 'compute: "compute" "(" arguments ")" attribute* compute_block' in text
    for mark in ("?expr", "-> binary", "LET", "%declare", " _item", "LRECORD", "ELSE_VALUE"):
        assert mark not in text, mark
    assert {"grammar", "functions", "types", "attributes", "kinds", "reductions"} == set(parts())
