"""`python tools/parser_tables.py [--write]`: the tables of ZynML's parser that the package ships, from its grammar; without `--write`, whether they hold."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
FOLDER = ROOT / "src" / "tilewright" / "frontend" / "zyn"


def text() -> str:
    """The tables of the grammar as it is."""
    import lark

    from tilewright.frontend.zyn.build_tree import TreeBuilder
    from tilewright.frontend.zyn.grammar_tables import MAKING, made_tables
    from tilewright.frontend.zyn.layout import LayoutReader
    from tilewright.frontend.zyn.shipped_tables import encoded

    grammar = (FOLDER / "zyn.lark").read_text(encoding="utf-8")
    return encoded(made_tables(grammar, LayoutReader(), TreeBuilder()), grammar, lark.__version__, MAKING)


def main() -> int:
    from tilewright.frontend.zyn.shipped_tables import NAME

    path = FOLDER / NAME
    if "--write" in sys.argv[1:]:
        path.write_text(text(), encoding="utf-8")
        return 0
    if not path.exists() or path.read_text(encoding="utf-8") != text():
        print(f"{path.name} is not of this grammar: python tools/parser_tables.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
