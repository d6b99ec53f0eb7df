"""Assignments of several things at once: `(a, b) = (b, a)`.

In: a function of the untyped tree. Out: the same with single assignments. All values are computed before the first is assigned:

    (m, l) = (m_new, l * c)    ->    let (new_m, new_l) = (m_new, l * c); m = new_m; l = new_l
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tilewright.tree import syntax
from tilewright.tree.inline import declared, nodes
from tilewright.tree.syntax import Function, Stmt


def split_assignments(function: Function) -> Function:
    """The function with one target for each assignment."""
    if not any(isinstance(n, syntax.Assign) and isinstance(n.target, syntax.Tuple) for n in nodes(function.body)):
        return function
    taken = {n.id for n in nodes(function.body) if isinstance(n, syntax.Name)} | set(declared(function.body))
    return replace(function, body=_block(function.body, taken | {p.name for p in function.params}))


def _block(body: Iterable[Stmt], taken: set[str]) -> tuple[Stmt, ...]:
    return tuple(new for stmt in body for new in _statement(stmt, taken))


def _statement(stmt: Stmt, taken: set[str]) -> tuple[Stmt, ...]:
    if isinstance(stmt, syntax.Assign) and isinstance(stmt.target, syntax.Tuple) and not stmt.op:
        return _split(stmt, stmt.target, taken)
    if isinstance(stmt, syntax.For | syntax.While):
        return (replace(stmt, body=_block(stmt.body, taken)),)
    if isinstance(stmt, syntax.ReduceNest):
        return (replace(stmt, loop=replace(stmt.loop, body=_block(stmt.loop.body, taken))),)
    if isinstance(stmt, syntax.If):
        return (replace(stmt, then=_block(stmt.then, taken), otherwise=_block(stmt.otherwise, taken)),)
    return (stmt,)


def _split(stmt: syntax.Assign, target: syntax.Tuple, taken: set[str]) -> tuple[Stmt, ...]:
    names: list[str] = []
    for item in target.items:
        base = f"new_{item.id}" if isinstance(item, syntax.Name) else "new"
        name = next(n for n in (base, *(f"{base}_{k}" for k in range(2, len(taken) + 3))) if n not in taken)
        taken.add(name)
        names.append(name)
    first = syntax.Let(tuple(names), stmt.value, mutable=True, destructure=True, span=stmt.span)
    parts = [syntax.Assign(t, syntax.Name(n, span=t.span), span=stmt.span) for t, n in zip(target.items, names, strict=True)]
    return first, *(part for each in parts for part in _statement(each, taken))
