"""`docs/ops.md` is generated; this finds it stale."""

from __future__ import annotations

from pathlib import Path

from tilewright.ir.ops import reference

DOCUMENT = Path(__file__).parents[3] / "docs" / "ops.md"


def test_op_reference_is_current() -> None:
    text = DOCUMENT.read_text()
    assert text.rstrip("\n") == reference().rstrip("\n"), "run: python -m tilewright.ir.ops > docs/ops.md"
