"""Names in a ZynML `compute`: which ones its body takes from outside, which of those are sizes, and replacing its inputs by parameters.

In: untyped statements. Out: names with the place of their first use, and rewritten statements. Nothing is evaluated.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tilewright.base import dtypes
from tilewright.base.record import replace
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.syntax import Expr, Node, Stmt

_T = TypeVar("_T")
_TILE_MAKERS = ("zeros", "ones", "full")


@dataclass
class BodyNames:
    """What a body says about names it does not declare itself."""

    free: dict[str, Span] = field(default_factory=dict)
    """Every one that is read, in order of first use."""
    in_ranges: set[str] = field(default_factory=set)
    """Those that appear in the bounds of a loop or slice or in the shape of a tile or shared array."""
    axes: list[tuple[str, str, int]] = field(default_factory=list)
    """(size, array, axis): a loop over `0..size` indexes that axis with its bare variable, which makes `size` that axis' extent."""


def expression_names(node: Expr) -> dict[str, Span]:
    """The names an expression reads, in order of first use; functions that are called are not among them."""
    walker = _Walker()
    walker.expression(node, {})
    return walker.names.free


def body_names(body: Iterable[Stmt]) -> BodyNames:
    """The names a compute's body reads from outside; outputs (`out`, `out_…`) are not among them."""
    walker = _Walker()
    walker.block(tuple(body), {})
    for name in [n for n in walker.names.free if is_output(n) and n in walker.written]:
        del walker.names.free[name]
    return walker.names


def is_output(name: str) -> bool:
    return name == "out" or name.startswith("out_")


_Scope = dict[str, str]
"""Names declared in the body; a loop variable over `0..n` has its size's name, all others have ''."""


class _Walker:
    def __init__(self) -> None:
        self.names = BodyNames()
        self.written: set[str] = set()

    def block(self, body: tuple[Stmt, ...], scope: _Scope) -> None:
        scope = dict(scope)
        for statement in body:
            self.statement(statement, scope)

    def statement(self, node: Stmt, scope: _Scope) -> None:
        if isinstance(node, syntax.Let):
            for value in (node.value, *node.extents):
                self.expression(value, scope)
            for extent in node.extents:
                self._size(extent, scope)
            scope.update(dict.fromkeys(node.targets, ""))
        elif isinstance(node, syntax.Assign):
            base = node.target
            while isinstance(base, syntax.Index | syntax.Attribute):
                base = base.value
            if isinstance(base, syntax.Name) and base.id not in scope:
                self.written.add(base.id)
            self.expression(node.value, scope)
            self.expression(node.target, scope)
        elif isinstance(node, syntax.For):
            self._for(node, scope)
        elif isinstance(node, syntax.If):
            self.expression(node.cond, scope)
            self.block(node.then, scope)
            self.block(node.otherwise, scope)
        elif isinstance(node, syntax.While):
            self.expression(node.cond, scope)
            self.block(node.body, scope)
        elif isinstance(node, syntax.ReduceNest):
            self._for(node.loop, scope)
        elif isinstance(node, syntax.Made):
            scope.update(dict.fromkeys(node.names, ""))
        elif isinstance(node, syntax.Expect):
            self.expression(node.value, scope)
            if isinstance(node.type, syntax.Index):
                scope.update((e.id, "") for e in node.type.indices if isinstance(e, syntax.Name))
        elif isinstance(node, syntax.Yield | syntax.Return | syntax.ExprStmt):
            self.expression(node.value, scope)

    def _for(self, node: syntax.For, scope: _Scope) -> None:
        inner = dict(scope)
        self.expression(node.over, scope)
        inner.update(dict.fromkeys(node.vars, ""))
        for name, domain in zip(node.vars, node.ranges):
            for bound in (domain.lo, domain.hi, domain.step):
                self.expression(bound, scope)
                if bound is not None:
                    self._size(bound, scope)
            whole = domain.lo == syntax.Number(0) and domain.step is None and not domain.inclusive
            if whole and isinstance(domain.hi, syntax.Name) and domain.hi.id not in scope:
                inner[name] = domain.hi.id
        self.block(node.body, inner)

    def _size(self, node: Expr, scope: Mapping[str, str]) -> None:
        self.names.in_ranges |= {n for n in expression_names(node) if n not in scope}

    def expression(self, node: Expr | None, scope: Mapping[str, str]) -> None:
        if isinstance(node, syntax.Name):
            if node.id not in scope:
                self.names.free.setdefault(node.id, node.span)
        elif isinstance(node, syntax.Call):
            if not isinstance(node.function, syntax.Name):
                self.expression(node.function, scope)
            for argument in node.args:
                # `cast(x, bf16)`: a dtype is no variable.
                if not (isinstance(argument.value, syntax.Name) and dtypes.is_name(argument.value.id)):
                    self.expression(argument.value, scope)
                    if isinstance(node.function, syntax.Name) and node.function.id in _TILE_MAKERS:
                        self._size(argument.value, scope)
        elif isinstance(node, syntax.Index):
            self.expression(node.value, scope)
            for axis, index in enumerate(node.indices):
                self.expression(index, scope)
                if isinstance(node.value, syntax.Name) and node.value.id not in scope and isinstance(index, syntax.Name):
                    size = scope.get(index.id, "")
                    if size:
                        self.names.axes.append((size, node.value.id, axis))
        elif isinstance(node, syntax.Slice):
            for bound in (node.lo, node.hi, node.step):
                self.expression(bound, scope)
                if bound is not None:
                    self._size(bound, scope)
        elif isinstance(node, syntax.Compute):
            for item in node.inputs:
                self.expression(item, scope)
        elif isinstance(node, Node):
            for child in _children(node):
                self.expression(child, scope)


def _children(node: Node) -> list[Expr]:
    """The expressions directly inside a node, in the order they are written."""
    found: list[Expr] = []
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, tuple):  # a record's field
                part = part[1]
            if isinstance(part, Node):
                found.append(part)  # type: ignore[arg-type]
    return found


def substitute(item: _T, replacements: Sequence[tuple[Expr, Expr]]) -> _T:
    """`item` (a node or a tuple of nodes) with every part equal to a replacement's first replaced by its second."""
    if not replacements:
        return item
    if isinstance(item, tuple):
        parts = [substitute(part, replacements) for part in item]
        return item if all(map(operator.is_, parts, item)) else tuple(parts)  # type: ignore[return-value]
    if not isinstance(item, Node):
        return item
    for old, new in replacements:
        if item == old:
            return replace(new, span=item.span)  # type: ignore[return-value]
    changed: dict[str, object] = {}
    for name, value in vars(item).items():
        if isinstance(value, Node | tuple) and (other := substitute(value, replacements)) is not value:
            changed[name] = other
    return replace(item, **changed) if changed else item
