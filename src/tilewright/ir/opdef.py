"""One row of the op table, what a type rule is, and what several of them ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.record import record
from tilewright.ir.nodes import Attrs
from tilewright.ir.types import NumberType, Scalar, Tensor, Tile, Type


class TypeRuleError(Exception):
    """An op's operands or attributes do not fit its type rule."""


Rule = Callable[[Sequence[Type], Attrs], tuple[Type, ...]]
ALL_STAGES = frozenset({"loop", "tile", "thread"})


@record
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


def memory_access(types: Sequence[Type], extra: int) -> tuple[Tensor, NumberType]:
    """For `tensor, indices..., extra operands`: the tensor and the type of what is accessed there."""
    if not types or not isinstance(types[0], Tensor):
        raise TypeRuleError("first operand must be a tensor")
    memory = types[0]
    indices = types[1 : 1 + memory.rank]
    if len(types) != 1 + memory.rank + extra:
        raise TypeRuleError(f"a tensor of rank {memory.rank} takes {memory.rank} indices, got {len(types) - 1 - extra}")
    shape: tuple[int, ...] | None = None
    layout = None
    for index in indices:
        if isinstance(index, Tile) and index.dtype.is_int:
            if shape is None:
                shape, layout = index.shape, index.layout
            elif len(shape) != len(index.shape) or any(
                1 not in (a, b) and a != b for a, b in zip(shape, index.shape, strict=True)
            ):
                raise TypeRuleError(f"index tiles of shapes {list(shape)} and {list(index.shape)} do not meet")
            else:
                shape = tuple(max(a, b) for a, b in zip(shape, index.shape, strict=True))
        elif not (isinstance(index, Scalar) and index.dtype.is_int):
            raise TypeRuleError(f"an index must be an integer, got {index}")
    dtype = memory.dtype.element
    return memory, Scalar(dtype) if shape is None else Tile(dtype, shape, layout)
