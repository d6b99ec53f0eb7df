"""Kernels with structs in a file that is not run. In: an untyped tree; out: the tree of its fields, and what annotations say these are.

A parameter is a struct where its annotation says so, or where its uses do: `p[i].x`, `p["x"]`. The dtypes of fields that nobody wrote are guessed by use, as others are.
"""

from __future__ import annotations

from tilewright.base.dtypes import f32
from tilewright.base.errors import Diagnostics
from tilewright.cli.guess import GuessedArguments, guess
from tilewright.tree import syntax
from tilewright.tree.inline import nodes
from tilewright.tree.structs.layout import StructField, StructLayout
from tilewright.tree.structs.split import annotated_layout, has_structs, split_structs
from tilewright.tree.syntax import Function

_OF_ARRAYS = frozenset({"shape", "ndim", "size", "strides", "dtype", "real", "imag", "T", "mT", "itemsize", "nbytes"})
"""What elements and slices of plain arrays have."""


def without_structs(function: Function, sink: Diagnostics) -> tuple[Function, dict[str, GuessedArguments]]:
    """The kernel without structs, and arguments for fields whose dtypes are known."""
    layouts: dict[str, StructLayout] = {}
    for param in function.params:
        said = annotated_layout(param.type)
        fields = () if said is not None else _fields(param.name, function)
        if said is not None:
            layouts[param.name] = said[0]
        elif fields:
            layouts[param.name] = StructLayout(tuple(StructField(name, f32) for name in fields))
    if not layouts and not has_structs(function):
        return function, {}
    singles = {p.name for p in function.params if isinstance(p.type, syntax.StructType)}
    split = split_structs(function, layouts, sink, singles)
    if sink.errors:
        return function, {}
    known: dict[str, GuessedArguments] = {}
    params = {p.name: p for p in function.params}
    for name, leaves in split.params:
        said = annotated_layout(params[name].type)
        if said is None:
            continue
        dtypes = dict(said[0].leaves())
        for path, leaf in leaves:
            extents: tuple[int | None, ...] | None = guess(leaf, None, split.function).extents or (None,)
            if said[1] == ():
                extents = None
            elif said[1]:
                extents = tuple(
                    e.value if isinstance(e, syntax.Number) and isinstance(e.value, int) else None for e in said[1]
                )
            known[leaf] = GuessedArguments(dtypes[path], extents)
    return split.function, known


def _fields(name: str, function: Function) -> tuple[str, ...]:
    """The fields that a kernel uses of a parameter."""
    found: dict[str, None] = {}
    for node in nodes(function.body):
        if (
            isinstance(node, syntax.Index)
            and len(node.indices) == 1
            and isinstance(node.indices[0], syntax.String)
            and _root(node.value) == name
        ):
            found[node.indices[0].value] = None
        if (
            isinstance(node, syntax.Attribute)
            and isinstance(node.value, syntax.Index)
            and node.name not in _OF_ARRAYS
            and _root(node.value) == name
        ):
            found[node.name] = None
    return tuple(found)


def _root(node: syntax.Expr) -> str:
    while isinstance(node, syntax.Index):
        node = node.value
    return node.id if isinstance(node, syntax.Name) else ""
