"""The parser's own loop gives what lark's gives, and leaves what is wrong to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lark
import pytest

from tilewright.base.source import Source
from tilewright.frontend.zyn.layout import LayoutError
from tilewright.frontend.zyn.parse import _parser
from tilewright.frontend.zyn.quick_parse import NotParsed

ROOT = Path(__file__).parents[3]
TEXTS = sorted([*(ROOT / "examples" / "zyn").glob("*.zyn"), ROOT / "tests" / "unit" / "frontend" / "gallery.zyn"])


def both(text: str) -> tuple[object, object]:
    parser = _parser()
    found: list[object] = []
    with parser.lock:
        parser._builder.source = Source("text", text)
        for parse in (parser._quick.parse, parser._lark.parse):
            parser._layout.prepare(text)
            found.append(parse(text))
    return found[0], found[1]


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_trees_are_those_of_lark(path: Path) -> None:
    quick, known = both(path.read_text(encoding="utf-8"))
    assert quick == known
    assert spans(quick) == spans(known)


def spans(tree: object) -> list[object]:
    from tilewright.tree.inline import nodes

    return [node.span for node in nodes(tree)]


@pytest.mark.parametrize("text", ["", "\n\n", "let a = 1", "let a = ((1 + 2) * x ** -3) if y else [1, {b: 2}]\n"])
def test_short_texts(text: str) -> None:
    quick, known = both(text)
    assert quick == known


@pytest.mark.parametrize("text", ["let = 1\n", "let a = 1 +", "let a = compute(x) {\n", ")"])
def test_what_is_wrong_is_refused(text: str) -> None:
    parser = _parser()

    def fault(parse: Callable[[str], object]) -> type[Exception] | None:
        try:
            parser._layout.prepare(text)
            parse(text)
        except (NotParsed, LayoutError, lark.exceptions.LarkError) as error:
            return type(error)
        return None

    with parser.lock:
        quick, known = fault(parser._quick.parse), fault(parser._lark.parse)
    assert known is not None
    assert quick in (NotParsed, known)
