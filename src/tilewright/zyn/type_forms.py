"""The form of types in ZynML: what an annotation may be, found before anything runs.

In: the annotation of a parameter, a result or a `let`. Out: errors at what is no type. `tensor[n, 2 * n]`, `f16[n]`, `tensor[n, f16]`,
`tensor[1 <= n <= 8]`, `int`, `record`, tuples of types are types; what they say is held against values (`host/dimensions.py`).
"""

from __future__ import annotations

import re

from tilewright.base import dtypes
from tilewright.base.errors import Diagnostics
from tilewright.tree import syntax
from tilewright.tree.compose import COMPARISONS
from tilewright.tree.inline import nodes
from tilewright.tree.metadata import suggest
from tilewright.tree.syntax import Expr

ARRAYS = ("tensor", "array", "Tensor", "Array")
PLAIN = ("int", "float", "complex", "bool", "string", "str", "list", "record")
_QUANTISED = re.compile(r"i?q\d\w*", re.IGNORECASE)
_ARITHMETIC = ("+", "-", "*", "zdiv", "//", "%")


def check_type(node: Expr | None, sink: Diagnostics) -> None:
    """Report an annotation that is no type."""
    if node is None:
        return
    if isinstance(node, syntax.Tuple):
        for item in node.items:
            check_type(item, sink)
    elif isinstance(node, syntax.Name):
        _name(node, (*ARRAYS, *PLAIN), sink)
    elif isinstance(node, syntax.Index):
        if isinstance(node.value, syntax.Name):
            _name(node.value, ARRAYS, sink)
        else:
            sink.error("TW016", "this is no type", node.span, "write tensor[…], or an element type such as f32[…]")
        for index in node.indices:
            _extent(index, sink)
    elif isinstance(node, syntax.Binary) and node.op == "@":
        sink.error("TW016", "a type does not say where an array is", node.span, 'put the array there with x.to_device(…), or write @device on the block or function')
    else:
        sink.error("TW016", "this is no type", node.span, "write a name such as int, or tensor[…] with an extent for each axis")


def _name(node: syntax.Name, known: tuple[str, ...], sink: Diagnostics) -> None:
    if node.id in known or dtypes.is_name(node.id):
        return
    if _QUANTISED.fullmatch(node.id):
        packed = ", ".join(d.name for d in dtypes.ALL if d.is_packed)
        sink.error("TW005", f"'{node.id}' is no packed type that Tilewright knows", node.span, f"packed types are {packed}")
        return
    names = [*known, *(d.name for d in dtypes.SCALARS)]
    sink.error("TW002", f"unknown type '{node.id}'", node.span, suggest(node.id, names) or f"types are {', '.join(names)}")


def _extent(node: Expr, sink: Diagnostics) -> None:
    """One axis: a name, a number, arithmetic of them, or a name with its bounds."""
    if isinstance(node, syntax.Slice):
        if node.lo is not None or node.hi is not None:
            sink.error("TW016", "a type has extents, not ranges", node.span, "write ':' for any extent, or bounds as in 1 <= n <= 8")
    elif isinstance(node, syntax.Name) and dtypes.is_name(node.id):
        sink.error("TW016", f"'{node.id}' is an element type, not the name of a size", node.span, f"write it last in tensor[…], or in front: {node.id}[…]")
    elif isinstance(node, syntax.String):
        sink.error("TW016", "a type does not say where an array is", node.span, 'put the array there with x.to_device(…), or write @device on the block or function')
    elif isinstance(node, syntax.Number):
        if not isinstance(node.value, int) or node.value < 0:
            sink.error("TW016", f"an extent is a whole number, not {node.value}", node.span)
    elif isinstance(node, syntax.Binary) and (node.op in COMPARISONS or node.op == "and"):
        if bounded(node) is None:
            sink.error("TW016", "bounds of an extent are of one name", node.span, "write for example n <= 8, or 1 <= n <= 8")
    elif isinstance(node, syntax.Binary):
        if node.op not in _ARITHMETIC:
            sink.error("TW016", f"an extent with '{node.op}'", node.span, "compute extents with + - * / %")
        _extent(node.left, sink)
        _extent(node.right, sink)
    elif not isinstance(node, syntax.Name | syntax.Attribute | syntax.Call | syntax.Index):
        sink.error("TW016", "this is no extent", node.span, "write a name, a number, or arithmetic of them")


def bounded(node: Expr) -> str | None:
    """The size whose bounds an extent is: `n <= 8`, `1 <= n <= 8`; None where it is something else."""
    if not isinstance(node, syntax.Binary):
        return None
    if node.op == "and":
        left, right = bounded(node.left), bounded(node.right)
        return left if left == right else None
    if node.op not in COMPARISONS:
        return None
    names = {n.id for n in nodes(node) if isinstance(n, syntax.Name)}
    sides = [side for side in (node.left, node.right) if isinstance(side, syntax.Name)]
    return sides[0].id if len(names) == 1 and len(sides) == 1 else None
