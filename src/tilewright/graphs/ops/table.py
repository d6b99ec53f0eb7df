"""All ops by name: the package's own, and those that users registered."""

from __future__ import annotations

from difflib import get_close_matches

from tilewright.base.errors import UserError
from tilewright.graphs.ops import attention, elementwise, rows
from tilewright.graphs.registry import OpRecord, known_ops

OWN = (attention, elementwise, rows)
"""The modules whose records are there from the beginning."""


def op_records() -> dict[str, OpRecord]:
    return known_ops()


def op_record(name: str) -> OpRecord:
    known = known_ops()
    if name not in known:
        close = get_close_matches(str(name), known, 1)
        raise UserError.at("TW002", f"unknown op '{name}'", help=f"did you mean '{close[0]}'?" if close else f"known ops: {', '.join(known)}")
    return known[name]
