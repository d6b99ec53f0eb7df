"""What a kernel's arguments are, when nobody said.

In: an untyped tree and the name of a parameter. Out: a `Given`: an array of a rank, or a number. An annotation decides where there is
one; else the uses do: `x[i, j]` and `rows, cols = x.shape` mean rank 2. Element types nobody wrote are f32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilewright.base import dtypes
from tilewright.base.dtypes import DType, bool_, f32, f64, i64
from tilewright.base.errors import UserError
from tilewright.cli.guess_uses import rank_of_use
from tilewright.tree import syntax
from tilewright.tree.inline import parts_backwards
from tilewright.tree.syntax import Node
from tilewright.tree.typed import ArgSpec, ArrayArg, ScalarArg

_PLAIN: dict[str, ScalarArg] = {"float": ScalarArg(f64, weak=True), "int": ScalarArg(i64, weak=True), "bool": ScalarArg(bool_)}


@dataclass(frozen=True)
class Given:
    """One argument: an array with its extents (None where any will do), or a number."""

    dtype: DType
    extents: tuple[int | None, ...] | None = None
    """None is a number."""
    plain: str = ""
    """`float` or `int`: a number as Python has it, which takes the dtype of what it meets."""
    guessed: bool = False

    def spec(self, gpu: bool) -> ArgSpec:
        if self.extents is not None:
            return ArrayArg(self.dtype, len(self.extents), None, 16 if gpu else 0)
        return _PLAIN[self.plain] if self.plain else ScalarArg(self.dtype)

    def __str__(self) -> str:
        if self.extents is None:
            return self.plain or self.dtype.name
        return f"{self.dtype}[{', '.join('*' if e is None else str(e) for e in self.extents)}]"


def parse_arguments(text: str) -> dict[str, Given]:
    """`x=f32[1024,*] v=f32[*] eps=float` as arguments by name."""
    found: dict[str, Given] = {}
    position = 0
    pattern = re.compile(r"[\s,;]*([A-Za-z_]\w*)\s*[=:]\s*([A-Za-z_]\w*)\s*(?:\[([^\]]*)\])?")
    while text[position:].strip(" \t\n,;"):
        match = pattern.match(text, position)
        if match is None:
            rest = text[position:].strip()
            raise UserError.at("TW016", f"--args: '{rest}' is not name=dtype[extents]", help='write for example --args "x=f32[1024,*] eps=float"')
        name, kind, extents = match.groups()
        if not dtypes.is_name(kind):
            known = ", ".join(d.name for d in dtypes.SCALARS)
            raise UserError.at("TW016", f"--args: '{kind}' is not an element type", help=f"choose one of {known}")
        if extents is None:
            found[name] = Given(_PLAIN[kind].dtype, plain=kind) if kind in ("float", "int") else Given(dtypes.by_name(kind))
        else:
            found[name] = Given(dtypes.by_name(kind), _extents(name, extents))
        position = match.end()
    return found


def _extents(name: str, text: str) -> tuple[int | None, ...]:
    parts = [p.strip() for p in text.split(",")] if text.strip() else []
    for part in parts:
        if part != "*" and not part.isdigit():
            raise UserError.at("TW016", f"--args: '{part}' is no extent of '{name}'", help="write a number, or * for any size")
    return tuple(None if p == "*" else int(p) for p in parts)


def guess(name: str, type_: syntax.Expr | None, root: Node) -> Given:
    """What `name` is in `root`. Arrays are f32 and numbers Python's float unless the annotation says otherwise."""
    if isinstance(type_, syntax.Index):
        element = type_.value.id if isinstance(type_.value, syntax.Name) else ""
        extents = tuple(e.value if isinstance(e, syntax.Number) and isinstance(e.value, int) else None for e in type_.indices)
        if dtypes.is_name(element):
            return Given(dtypes.by_name(element), extents)
        return Given(f32, extents, guessed=True)
    if isinstance(type_, syntax.Name) and type_.id.lower() not in ("array", "tensor"):
        if type_.id in ("float", "int"):
            return Given(_PLAIN[type_.id].dtype, plain=type_.id)
        if dtypes.is_name(type_.id):
            return Given(dtypes.by_name(type_.id))
    rank = rank_in(name, root)
    if rank is not None and _is_places(name, root):
        return Given(i64, (None,) * rank, guessed=True)
    if rank is None and type_ is None:
        rank = rank_of_use(name, root, nodes(root), rank_in)
        if rank is None:
            return Given(f64, plain="float", guessed=True)
    return Given(f32, (None,) * (1 if rank is None else rank), guessed=True)


def _is_places(name: str, root: Node) -> bool:
    """Whether elements of the array are indices of others: `x[places[i]]`."""
    indices = [i for node in nodes(root) if isinstance(node, syntax.Index) for i in node.indices]
    return any(isinstance(i, syntax.Index) and _is(i.value, name) for i in indices)


def rank_in(name: str, root: Node) -> int | None:
    """The rank of the array `name` as its uses show it; None when nothing shows an array."""
    exact: list[int] = []
    at_least: list[int] = []
    parts: dict[int, list[int]] = {}
    for part, axes in _parts(root):
        parts.setdefault(id(part), []).append(axes)
    for node in nodes(root):
        if isinstance(node, syntax.Index) and _is(node.value, name):
            for axes in parts.get(id(node), ()):
                slices = sum(isinstance(i, syntax.Slice) for i in node.indices)
                exact.append(len(node.indices) + max(0, (axes if slices else 1) - slices))
        if isinstance(node, syntax.Index):
            if _is(node.value, name):
                exact.append(len(node.indices))
            elif _is_shape(node.value, name) and isinstance(node.indices[0], syntax.Number):
                at_least.append(int(node.indices[0].value) + 1)
        elif isinstance(node, syntax.Let) and node.destructure and node.value is not None and _is_shape(node.value, name):
            exact.append(len(node.targets))
        elif isinstance(node, syntax.ReduceExpr) and _is(node.value, name):
            # A reduction along an axis leaves something: nobody writes one for a vector.
            at_least.append(1 if node.axis is None else max(2, *(axis + 1 for axis in _axes(node.axis))))
        elif isinstance(node, syntax.Attribute) and _is(node.value, name):
            at_least.append(1)
    if not exact and isinstance(root, syntax.Module):
        exact += _passed(name, root, {s.name: s for s in root.body if isinstance(s, syntax.Function)}, ())
    if exact:
        return max(exact)
    return max(at_least) if at_least else None


def _passed(name: str, root: Node, functions: Mapping[str, syntax.Function], around: tuple[str, ...]) -> Iterator[int]:
    """The ranks that functions of the program take `name` to have, where it is given to them."""
    for node in nodes(root):
        piped = node.call if isinstance(node, syntax.Pipe) else node
        if not isinstance(piped, syntax.Call) or not isinstance(piped.function, syntax.Name) or piped.function.id in around:
            continue
        function = functions.get(piped.function.id)
        given = [*([node.value] if isinstance(node, syntax.Pipe) else []), *(a.value for a in piped.args)]
        for param, value in zip(function.params if function is not None else (), given):
            if function is not None and _is(value, name):
                if isinstance(param.type, syntax.Index):
                    yield len(param.type.indices)
                rank = rank_in(param.name, function)
                yield from [rank] if rank is not None else _passed(param.name, function, functions, (*around, function.name))


_TILE_FUNCTIONS = {"dot": 1, "transpose": 2, "matmul": 2, "row_max": 2, "row_min": 2, "row_sum": 2}


def _parts(root: Node) -> Iterator[tuple[syntax.Expr, int]]:
    """Expressions used as vectors or matrices, and how many axes such a part has; a name stands for what it was declared with."""
    declared = {s.targets[0]: s.value for s in nodes(root) if isinstance(s, syntax.Let) and len(s.targets) == 1}
    for node in nodes(root):
        operands: list[tuple[syntax.Expr, int]] = []
        if isinstance(node, syntax.Binary) and node.op == "@":
            operands = [(node.left, 2), (node.right, 2)]
        elif isinstance(node, syntax.Call) and isinstance(node.function, syntax.Name) and node.function.id in _TILE_FUNCTIONS:
            operands = [(a.value, _TILE_FUNCTIONS[node.function.id]) for a in node.args]
        for operand, axes in operands:
            value = declared.get(operand.id) if isinstance(operand, syntax.Name) else None
            yield value or operand, axes


_walked: list[tuple[Node, tuple[Node, ...]]] = []
"""The last tree that was asked about, and its nodes: each input of a program looks at all of them."""


def nodes(root: Node) -> Sequence[Node]:
    """The node and everything inside it, but for functions: their names are their own."""
    for known, found in _walked:
        if known is root:
            return found
    found = tuple(_nodes(root))
    if isinstance(root, syntax.Module):
        _walked[:] = [(root, found)]
    return found


def _nodes(root: Node) -> Iterator[Node]:
    waiting: list[object] = [root]
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple):
            waiting.extend(reversed(item))
        elif isinstance(item, Node) and (item is root or not isinstance(item, syntax.Function)):
            yield item
            values = item.__dict__
            waiting.extend([values[name] for name in parts_backwards(type(item))])


def _is(node: syntax.Expr, name: str) -> bool:
    return isinstance(node, syntax.Name) and node.id == name


def _is_shape(node: syntax.Expr, name: str) -> bool:
    return isinstance(node, syntax.Attribute) and node.name == "shape" and _is(node.value, name)


def _axes(node: syntax.Expr | None) -> list[int]:
    """The axes written in a reduction; one that is no plain number counts as the first."""
    if isinstance(node, syntax.Tuple):
        return [axis for item in node.items for axis in _axes(item)]
    if isinstance(node, syntax.Number):
        return [int(node.value)]
    return [0]
