"""Whole numbers of a call that say how windows lie: steps, paddings, radii, groups. Code for small ones has them as literals.

In: the untyped tree of a kernel. Out: the parameters that are part of an index which two loops make, as `x[i * stride + p - pad]`; and the tree with numbers
for some of them, which first checks that it was called with these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from tilewright.tree import syntax
from tilewright.tree.block_graph import BlockGraph
from tilewright.tree.names import substitute
from tilewright.tree.syntax import Expr, Function, Node, Stmt

_NOTHING: frozenset[str] = frozenset()
_DIVISIONS = frozenset({"/", "//", "%", "zdiv"})


def window_numbers(function: Function) -> dict[str, bool]:
    """Parameters that say how windows lie, in order; and whether something is divided by them."""
    if isinstance(function, BlockGraph):
        return {}
    assigned = set(_assigned(function.body))
    params = [p.name for p in function.params if not p.in_place and p.name not in assigned]
    if not params:
        return {}
    walk = _NumberWalk(params)
    walk.statements(function.body)
    return {name: name in walk.divisors for name in params if name in walk.found}


def with_numbers(function: Function, numbers: Mapping[str, int]) -> Function:
    """The kernel for calls with these numbers."""
    literals: list[tuple[Expr, Expr]] = []
    checks: list[Stmt] = []
    for name, value in numbers.items():
        literal: Expr = syntax.Number(abs(value), given=True, span=function.span)
        if value < 0:
            literal = syntax.Unary("-", literal, span=function.span)
        literals.append((syntax.Name(name), literal))
        checks.append(syntax.Assert(syntax.Binary("==", syntax.Name(name, span=function.span), literal, span=function.span), span=function.span))
    return dataclasses.replace(function, body=(*checks, *substitute(function.body, literals)))


def _assigned(body: Sequence[Stmt]) -> Iterator[str]:
    """Names that statements give another value."""
    for stmt in body:
        if isinstance(stmt, syntax.Let):
            yield from stmt.targets
        elif isinstance(stmt, syntax.Assign) and isinstance(stmt.target, syntax.Name):
            yield stmt.target.id
        elif isinstance(stmt, syntax.For):
            yield from stmt.vars
        yield from _assigned([inner for inner in _parts(stmt) if isinstance(inner, Node)])  # type: ignore[misc]


def _parts(node: Node) -> Iterator[object]:
    """What is directly inside a node."""
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        yield from value if isinstance(value, tuple) else (value,)


class _NumberWalk:
    """One walk over a kernel: what names are made of, by loop indices and parameters."""

    def __init__(self, params: Sequence[str]) -> None:
        self.params = frozenset(params)
        self.made: dict[str, frozenset[str]] = {name: frozenset({name}) for name in params}
        self.found: set[str] = set()
        self.divisors: set[str] = set()

    def statements(self, body: Sequence[Stmt]) -> None:
        for stmt in body:
            if isinstance(stmt, syntax.For):
                for name, range_ in zip(stmt.vars, stmt.ranges, strict=False):
                    self.made[name] = self.sources(range_) | {f"loop {name}"}
                self.statements(stmt.body)
            elif isinstance(stmt, syntax.Let):
                source = self.sources(stmt.value)
                for name in stmt.targets:
                    self.made[name] = source
            elif isinstance(stmt, syntax.Assign):
                source = self.sources(stmt.value)
                if isinstance(stmt.target, syntax.Name):
                    self.made[stmt.target.id] = source | (self.made.get(stmt.target.id, _NOTHING) if stmt.op else _NOTHING)
                else:
                    self.sources(stmt.target)
            elif isinstance(stmt, syntax.If | syntax.While):
                self.sources(stmt.cond)
                for inner in _parts(stmt):
                    if isinstance(inner, Node) and inner is not stmt.cond:
                        self.statements([inner])  # type: ignore[list-item]
            else:
                self.sources(stmt)

    def sources(self, node: object) -> frozenset[str]:
        """Loop indices and parameters that a value is computed from. What is read from an array is data."""
        if isinstance(node, syntax.Name):
            return self.made.get(node.id, _NOTHING)
        if not isinstance(node, Node) or isinstance(node, syntax.Attribute):
            return _NOTHING
        if isinstance(node, syntax.Index):
            for index in node.indices:
                own = self.sources(index)
                if sum(name.startswith("loop ") for name in own) > 1:
                    self.found |= own & self.params
            return _NOTHING
        if isinstance(node, syntax.Binary) and node.op in _DIVISIONS:
            self.divisors |= self.sources(node.right) & self.params
        found = _NOTHING
        for part in _parts(node):
            for inner in part if isinstance(part, tuple) else (part,):
                found |= self.sources(inner)
        return found
