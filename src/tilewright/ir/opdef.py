"""One row of the op table, and what a type rule is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.ir.nodes import Attrs
from tilewright.ir.types import Type


class TypeRuleError(Exception):
    """An op's operands or attributes do not fit its type rule."""


Rule = Callable[[Sequence[Type], Attrs], tuple[Type, ...]]
ALL_STAGES = frozenset({"loop", "tile", "thread"})


@dataclass(frozen=True)
class OpDef:
    """One row of the table."""

    name: str
    doc: str
    rule: Rule | None
    """Result types from operand types and attributes; None for ops with regions (the verifier knows those)."""
    stages: frozenset[str] = ALL_STAGES
    effect: str = "pure"
    """pure, read, write, sync (orders other threads), control, or debug."""
    group: str = "elementwise"
    bound: str = "exact"
    """Largest error of the result, in units in the last place of the result's dtype."""
    regions: int = 0

    @property
    def is_pure(self) -> bool:
        return self.effect == "pure"


def integer(attrs: Attrs, name: str) -> int:
    """An attribute that must be an integer."""
    value = attrs.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeRuleError(f"needs an integer attribute {name}")
    return value
