"""`python tools/onnx_table.py [--write]`: the table of ONNX operators in docs/onnx.md, from the registry of rules."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tilewright as tw

PAGE = Path(__file__).resolve().parents[1] / "docs" / "onnx.md"
_BETWEEN = re.compile(r"(?<=<!-- operators:begin -->\n).*(?=<!-- operators:end -->)", re.DOTALL)


def table() -> str:
    """Operators with notes as rows, the others as one list."""
    known = tw.graph.onnx_operators()
    plain = " ".join(name for name, note in known.items() if not note)
    rows = "".join(f"| `{name}` | {note} |\n" for name, note in known.items() if note)
    return f"{len(known)} operators. As the standard has them: `{plain}`\n\nWith notes:\n\n| operator | |\n|---|---|\n{rows}"


def page(text: str) -> str:
    """The page with the table as it is now."""
    return _BETWEEN.sub(lambda _: table(), text)


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    if "--write" in sys.argv:
        PAGE.write_text(page(text), encoding="utf-8")
        return 0
    return 0 if page(text) == text else 1


if __name__ == "__main__":
    raise SystemExit(main())
