"""What annotations of kernels in Python may say. In: the type expression of a parameter; out: errors for what nothing would follow.

A parameter is `tw.Array` (or another library's array type), `int`, `float`, `bool`, a dtype, or `"f32[rows, 4]"`, whose extents are names and
numbers. The checker holds arguments to these (`tree/check/arrays.py`).
"""

from __future__ import annotations

from tilewright.base import dtypes
from tilewright.base.errors import Diagnostics
from tilewright.tree import syntax
from tilewright.tree.structs.split import annotated_layout

_ARRAYS = ("array", "tensor", "ndarray", "devicearray", "arraylike", "any", "object")
"""Words for an array of any dtype and rank, and for anything at all."""
_HELP = 'use tw.Array, int, float, complex, bool, a dtype, a class of tw.State, or "f32[rows, cols]"'


def check_parameter(name: str, node: syntax.Expr | None, sink: Diagnostics) -> None:
    """Report a parameter's annotation that says nothing a kernel could be held to."""
    if node is None or isinstance(node, syntax.StructType):
        return
    said = annotated_layout(node)
    if said is not None and said[1] is None:
        return
    if isinstance(node, syntax.Name):
        if node.id.lower() not in _ARRAYS and node.id not in ("int", "float", "bool", "complex") and not dtypes.is_name(node.id):
            sink.error("TW005", f"'{name}' is annotated as '{node.id}', which is no type of a kernel's parameter", node.span, _HELP)
        return
    if not isinstance(node, syntax.Index) or not isinstance(node.value, syntax.Name | syntax.StructType):
        sink.error("TW005", f"the annotation of '{name}' is no type of a kernel's parameter", node.span, _HELP)
        return
    base = node.value.id if isinstance(node.value, syntax.Name) else ""
    if base in ("NDArray", "Sequence", "Any"):
        return
    if base and base.lower() not in _ARRAYS and not dtypes.is_name(base):
        sink.error("TW005", f"'{name}' is annotated as '{base}[…]', and '{base}' is no dtype", node.span, _HELP)
    if array_dtype(node) is not None:
        return
    for extent in node.indices:
        if isinstance(extent, syntax.Name) and dtypes.is_name(extent.id):
            sink.error("TW005", f"'{extent.id}' stands among the extents of '{name}' and is a dtype", extent.span, f'write the dtype first: "{extent.id}[rows, cols]"')
        elif not _is_size(extent):
            sink.error(
                "TW005", f"an extent of '{name}' is no size", extent.span, "extents are names and whole numbers, and sums, differences and products of these",
            )  # fmt: skip


def array_dtype(node: syntax.Expr | None) -> str | None:
    """The dtype of `tw.Array[tw.f32]`, an array of any rank; None where the annotation is another."""
    if not isinstance(node, syntax.Index) or not isinstance(node.value, syntax.Name) or node.value.id.lower() not in _ARRAYS or len(node.indices) != 1:
        return None
    (index,) = node.indices
    return index.id if isinstance(index, syntax.Name) and dtypes.is_name(index.id) else None


def without_none(node: syntax.Expr | None) -> tuple[syntax.Expr | None, bool]:
    """`type | None` and `Optional[type]` as the type, and whether None is allowed."""
    if isinstance(node, syntax.Binary) and node.op == "|":
        sides = (node.left, node.right)
        if any(map(_says_none, sides)):
            return next((side for side in sides if not _says_none(side)), None), True
    if isinstance(node, syntax.Index) and isinstance(node.value, syntax.Name) and node.value.id == "Optional" and len(node.indices) == 1:
        return node.indices[0], True
    return node, False


def _says_none(node: syntax.Expr) -> bool:
    return isinstance(node, syntax.Nothing) or (isinstance(node, syntax.Name) and node.id in ("None", "none"))


def _is_size(node: syntax.Expr) -> bool:
    if isinstance(node, syntax.Binary):
        return node.op in ("+", "-", "*") and _is_size(node.left) and _is_size(node.right)
    return isinstance(node, syntax.Name) or (isinstance(node, syntax.Number) and isinstance(node.value, int))
