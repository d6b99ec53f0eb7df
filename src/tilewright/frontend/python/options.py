"""What `@tw.kernel(reduce=…, axis=…)` says, as the attribute that ZynML writes `@kernel reduce(…, axis=…)`.

In: the values of the decorator's arguments. Out: attributes of the untyped tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.errors import UserError
from tilewright.base.source import NOWHERE, Span
from tilewright.tree import syntax
from tilewright.tree.metadata import REDUCTION_NAMES
from tilewright.tree.syntax import Argument, Expr, KernelAttribute


def reduction(op: str, axis: int | Sequence[int] | None, span: Span = NOWHERE) -> tuple[KernelAttribute, ...]:
    """The attributes of a kernel that reduces what it yields; none where `op` is empty. Raises UserError."""
    if not op:
        if axis is not None:
            raise UserError.at("TW016", f"axis={axis!r} without reduce=", span, 'write for example reduce="+", axis=1')
        return ()
    if op not in REDUCTION_NAMES:
        raise UserError.at("TW016", f"reduce={op!r} is no reduction", span, f"choose one of {', '.join(REDUCTION_NAMES)}")
    arguments = [Argument(syntax.Name(REDUCTION_NAMES[op], span=span), span=span)]
    if axis is not None:
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        if not axes or any(isinstance(a, bool) or not isinstance(a, int) for a in axes):
            raise UserError.at("TW016", f"axis={axis!r} is no axis", span, "give an integer, or a tuple of them")
        items = tuple(_number(a, span) for a in axes)
        arguments.append(Argument(items[0] if isinstance(axis, int) else syntax.List(items, span=span), "axis", span=span))
    kind = syntax.Call(syntax.Name("reduce", span=span), tuple(arguments), span=span)
    return (KernelAttribute("kernel", (Argument(kind, span=span),), span=span),)


def _number(value: int, span: Span) -> Expr:
    number = syntax.Number(abs(value), span=span)
    return number if value >= 0 else syntax.Unary("-", number, span=span)
