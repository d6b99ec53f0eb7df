"""ZynML's words that are kernels themselves: `median(x, axis=k)`.

In: a call as it was written. Out: a call of the kernel that stands for it (`frontend/python/library.py`), which is put in the place of the call as any
called function is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.syntax import Argument, Expr


def median_call(node: syntax.Call) -> syntax.Call:
    """The call of the kernel of `median`. UserError where the arguments are wrong."""
    usage = "write median(x), median(x, axis=k) or median(x, axis=k, keepdims=true)"
    given = {a.keyword or ("x", "axis")[position]: a for position, a in enumerate(node.args[:3]) if a.keyword is not None or position < 2}
    if "x" not in given or len(given) != len(node.args) or not given.keys() <= {"x", "axis", "keepdims"}:
        raise UserError.at("TW016", f"median() takes an array, an axis and keepdims=, got {len(node.args)} argument(s)", node.span, usage)
    axes = _axes(given["axis"].value) if "axis" in given else None
    keep = given["keepdims"].value if "keepdims" in given else syntax.Bool(False, span=node.span)
    if not isinstance(keep, syntax.Bool):
        raise UserError.at("TW016", "keepdims must be true or false", keep.span)
    # Programs without such words need no reader of Python.
    from tilewright.frontend.python.kernels import read_library
    from tilewright.frontend.python.library import median_text

    callee = syntax.Callee(_placed(read_library(median_text(axes, keep.value)), node.span), span=node.span)
    return syntax.Call(callee, (Argument(given["x"].value, span=given["x"].span),), span=node.span)


LIBRARY: Mapping[str, Callable[[syntax.Call], syntax.Call]] = {"median": median_call}
"""By word: what gives a call of it as one of its kernel."""


def _axes(axis: Expr) -> list[int]:
    items = axis.items if isinstance(axis, syntax.Tuple | syntax.List) else (axis,)
    return [_whole_number(item) for item in items]


def _whole_number(node: Expr) -> int:
    sign, number = (-1, node.operand) if isinstance(node, syntax.Unary) and node.op == "-" else (1, node)
    if not isinstance(number, syntax.Number) or not isinstance(number.value, int):
        raise UserError.at("TW016", "axis must be a constant integer", node.span)
    return sign * number.value


def _placed(function: syntax.Function, span: Span) -> syntax.Function:
    """The tree of such a kernel as if all of it stood at the call: the author of the call knows no other place."""

    def moved(item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(moved(part) for part in item)
        if not isinstance(item, syntax.Node):
            return item
        return type(item)(**{name: span if name == "span" else moved(value) for name, value in vars(item).items()})

    found = moved(function)
    assert isinstance(found, syntax.Function)
    return found
