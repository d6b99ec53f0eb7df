"""Loops whose statements need each other in one iteration alone, as several loops one after the other.

In: a loop that is not parallel as it is. Out: loops over the same indices, each with some of its statements, in their order; None where that is not the same or brings nothing apart.
The caller keeps them if all of them are parallel then. Statements stay together where one reads or writes what another one writes in another iteration. A number that one of
them computes and a later one reads is kept for every iteration, in an array.

    for i in 0..n:                                 for i in 0..n:
        t = 0                                          t = 0
        for j in 0..m: t += a[i, j] * x[j]    ->       for j in 0..m: t += a[i, j] * x[j]
        for j in 0..m: y[j] += a[i, j] * t             kept[i] = t
                                                   for i in 0..n:
                                                       for j in 0..m: y[j] += a[i, j] * kept[i]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar
from zlib import crc32

from tilewright.base.sizes import ONE
from tilewright.tree.bounds import linear_indices, owns_axis
from tilewright.tree.typed import (
    Accumulate,
    ArrayAssign,
    ArrayInfo,
    Element,
    Expr,
    IndexRef,
    Local,
    LoopVar,
    ReduceLoop,
    SetVar,
    Stmt,
    Store,
    TypedAssert,
    TypedIf,
    TypedLoop,
    TypedNode,
    TypedPrint,
    TypedWhile,
    TypedYield,
    Variable,
)
from tilewright.tree.typed_walk import assigned, exprs_in, own_exprs, walk, walk_expr

_T = TypeVar("_T")
_KEPT = "$kept"
_WHOLE = (ArrayAssign, ReduceLoop, TypedYield, TypedPrint, TypedAssert, TypedWhile)


def distributed(loop: TypedLoop, within: frozenset[str] = frozenset()) -> list[TypedLoop] | None:
    """The loop as several; None where it stays one. `within`: the sizes that are numbers of steps around it."""
    if loop.until is not None or assigned(loop.body) or not is_steady(loop) or any(isinstance(s, _WHOLE) or (isinstance(s, TypedLoop) and s.until is not None) for s in walk(loop.body)):
        return None
    body = [part for stmt in loop.body for part in _inner_parts(stmt)]
    if len(body) < 2:
        return None
    keeps = _can_keep(loop, within)
    groups = _groups(body, loop.vars, keeps)
    if len(groups) < 2:
        return None
    return [replace(loop, body=part, asked="auto") for part in (_kept(groups, loop.vars[0]) if keeps else groups)]


def is_steady(loop: TypedLoop) -> bool:
    """Whether a second loop with these bounds has the same iterations: the body changes nothing that they are made of."""
    variables = {s.var for s in walk(loop.body) if isinstance(s, SetVar | Accumulate)}
    arrays = {s.array.name for s in walk(loop.body) if isinstance(s, Store)}
    bounds = [e for bound in own_exprs(loop) for e in walk_expr(bound)]
    return not any((isinstance(e, Local) and e.var in variables) or (isinstance(e, Element) and e.array.name in arrays) for e in bounds)


def _inner_parts(stmt: Stmt) -> Sequence[Stmt]:
    """An inner loop as several, where its statements need nothing of each other: `for j: s[j] += …; q[i] += …`."""
    if not isinstance(stmt, TypedLoop) or len(stmt.body) < 2 or assigned(stmt.body) or not is_steady(stmt):
        return (stmt,)
    body = [part for inner in stmt.body for part in _inner_parts(inner)]
    groups = _groups(body, stmt.vars, keeps=False)
    return [replace(stmt, body=group) for group in groups] if len(groups) > 1 else (stmt,)


def _can_keep(loop: TypedLoop, within: frozenset[str]) -> bool:
    """Whether an array can have an element for each iteration."""
    full = loop.vars[0].full
    return len(loop.vars) == 1 and full is not None and within.isdisjoint(full.names)


# -- what stays together ------------------------------------------------------------------------------------------


def _groups(body: Sequence[Stmt], over: Sequence[LoopVar], keeps: bool) -> list[tuple[Stmt, ...]]:
    """The statements in runs; what is in different runs may be in different loops."""
    joined = [False] * len(body)
    for last in range(1, len(body)):
        for first in range(last):
            if _hold_together(body[first], body[last], over, keeps):
                for place in range(first + 1, last + 1):
                    joined[place] = True
    groups: list[list[Stmt]] = []
    for stmt, joins in zip(body, joined, strict=True):
        if joins:
            groups[-1].append(stmt)
        else:
            groups.append([stmt])
    return [tuple(group) for group in groups]


def _hold_together(one: Stmt, other: Stmt, over: Sequence[LoopVar], keeps: bool) -> bool:
    set_by_one, set_by_other = _variables((one,)), _variables((other,))
    if set_by_one & set_by_other:
        return True
    used = {e.var for e in exprs_in((other,)) if isinstance(e, Local)} & set_by_one
    if used and (not keeps or isinstance(one, TypedIf) or _is_kept(other)):
        return True
    if {e.var for e in exprs_in((one,)) if isinstance(e, Local)} & set_by_other:
        return True
    mine, its = _accesses(one), _accesses(other)
    for name in mine.keys() & its.keys():
        if not (mine[name][1] or its[name][1]):
            continue
        forms = [linear_indices(indices) for indices in (*mine[name][0], *its[name][0])]
        known = [form for form in forms if form is not None]
        if len(known) != len(forms) or not all(owns_axis(known, var) for var in over):
            return True
    return False


def _is_kept(stmt: Stmt) -> bool:
    """Whether a statement keeps a number, for a loop that was made of another one: it stays beside what makes the number."""
    return isinstance(stmt, Store) and _KEPT in stmt.array.name


def _variables(stmts: tuple[Stmt, ...]) -> set[Variable]:
    """The variables that statements set and that are there outside of their inner loops."""
    return {s.var for s in walk(stmts) if isinstance(s, SetVar | Accumulate)}


def _accesses(stmt: Stmt) -> dict[str, tuple[list[tuple[Expr, ...]], bool]]:
    """The indices that each array is accessed with, and whether it is written."""
    found: dict[str, tuple[list[tuple[Expr, ...]], bool]] = {}
    for inner in walk((stmt,)):
        if isinstance(inner, Store):
            found[inner.array.name] = ([*found.get(inner.array.name, ([], False))[0], inner.indices], True)
    for expr in exprs_in((stmt,)):
        if isinstance(expr, Element):
            places, written = found.get(expr.array.name, ([], False))
            found[expr.array.name] = ([*places, expr.indices], written)
    return found


# -- numbers that are kept ----------------------------------------------------------------------------------------


def _kept(groups: list[tuple[Stmt, ...]], var: LoopVar) -> list[tuple[Stmt, ...]]:
    """The groups, with variables that live from one to a later one as elements of arrays there."""
    result: list[tuple[Stmt, ...]] = []
    known: dict[Variable, Element] = {}
    for position, group in enumerate(groups):
        set_here = _variables(group)
        needed = {e.var for later in groups[position + 1 :] for e in exprs_in(later) if isinstance(e, Local)}
        stores: list[Stmt] = []
        own = with_elements(group, known)
        for variable in sorted(set_here & needed, key=lambda v: v.name):
            place = Element(_array_of(variable, var), (IndexRef(var, span=group[0].span),), span=group[0].span)
            stores.append(Store(place.array, place.indices, Local(variable, span=group[0].span), span=group[0].span))
            known[variable] = place
        result.append((*own, *stores))
    return result


def _array_of(variable: Variable, var: LoopVar) -> ArrayInfo:
    """An array with a number for each iteration. Equal ones are the same array: loops run one after the other."""
    assert var.full is not None
    mark = crc32(f"{variable.dtype} {var.full}".encode())
    return ArrayInfo(f"{variable.name}{_KEPT}{mark:x}", variable.dtype, (var.full,), (ONE,), "scratch")


def with_elements(item: _T, known: Mapping[Variable, Element]) -> _T:
    """Statements with elements in the place of variables."""
    found: _T = _KeptNumbers(known).of(item)
    return found


class _KeptNumbers:
    """Puts elements in the place of variables."""

    def __init__(self, known: Mapping[Variable, Element]) -> None:
        self.known = dict(known)

    def of(self, item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(self.of(one) for one in item)
        if isinstance(item, Local) and item.var in self.known:
            return replace(self.known[item.var], span=item.span)
        if not isinstance(item, TypedNode) or not self.known:
            return item
        return replace(item, **{field.name: self.of(getattr(item, field.name)) for field in fields(item) if field.name != "span"})
