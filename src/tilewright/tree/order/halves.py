"""Loops that store and accumulate, as two loops.

In: a loop, and the variables around it that it accumulates into. Out: a loop that stores, and one that accumulates, in the order in which they may run; None where
one needs more of the other than an element of the same iteration:

    for j in 0..m:                                 for j in 0..m:
        e = exp(x[i, j] - top)                         y[i, j] = exp(x[i, j] - top)
        y[i, j] = e                         ->     for j in 0..m:
        s += e                                         s += y[i, j]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from tilewright.base.record import replace
from tilewright.tree.order.distribution import is_steady, with_elements
from tilewright.tree.order.independence import independent, is_reduction
from tilewright.tree.typed import (
    Accumulate,
    Element,
    Local,
    SetVar,
    Stmt,
    Store,
    TypedIf,
    TypedLoop,
    TypedWhile,
    Variable,
)
from tilewright.tree.typed_walk import assigned, exprs_in, walk


def halves(loop: TypedLoop, outer: Sequence[Variable]) -> tuple[TypedLoop, TypedLoop] | None:
    """The two loops, the one that runs first first."""
    stores = [s for s in walk(loop.body) if isinstance(s, Store)]
    if not stores or not is_steady(loop) or any(isinstance(s, TypedWhile) for s in walk(loop.body)):
        return None
    storing = without(loop.body, lambda s: isinstance(s, Accumulate) and s.var in outer)
    if assigned(storing) or any(isinstance(e, Local) and e.var in outer for e in exprs_in(storing)):
        return None
    once = {
        s.array.name: (at, s) for at, s in enumerate(loop.body)
        if isinstance(s, Store) and sum(other.array.name == s.array.name for other in stores) == 1
    }  # fmt: skip
    again = _read_again(loop.body, once)
    parts = _needed([without((with_elements(stmt, again),), lambda s: isinstance(s, Store)) for stmt in loop.body], outer)
    accumulating = replace(loop, body=tuple(stmt for part in parts for stmt in part))
    written = {s.array.name for s in stores}
    later = _reads_later(parts, once, written, {e.array.name for e in again.values()})
    if later is None or not is_reduction(accumulating, outer):
        return None
    first = replace(loop, body=storing)
    reads = any(isinstance(e, Element) and e.array.name in written for e in exprs_in(accumulating.body))
    if reads and not independent(first, first.vars):
        return None
    return (first, accumulating) if later else (accumulating, first)


def _read_again(body: tuple[Stmt, ...], once: Mapping[str, tuple[int, Store]]) -> dict[Variable, Element]:
    """Variables of an iteration that are stored as they are: the element can be read in their place."""
    found: dict[Variable, Element] = {}
    read = {e.array.name for e in exprs_in(body) if isinstance(e, Element)}
    for at, store in once.values():
        if store.kind or store.array.name in read or not isinstance(store.value, Local) or store.value.dtype != store.array.dtype:
            continue
        variable = store.value.var
        sets = [position for position, stmt in enumerate(body) if any(isinstance(s, SetVar | Accumulate) and s.var is variable for s in walk((stmt,)))]
        uses = [position for position, stmt in enumerate(body) if any(isinstance(e, Local) and e.var is variable for e in exprs_in((stmt,)))]
        if sets and variable not in assigned(body) and max(sets) < min(at, *uses):
            found[variable] = Element(store.array, store.indices, span=store.span)
    return found


def _needed(parts: list[tuple[Stmt, ...]], outer: Sequence[Variable]) -> list[tuple[Stmt, ...]]:
    """The statements without variables that nobody reads."""
    while True:
        read = {e.var for part in parts for e in exprs_in(part) if isinstance(e, Local)}.union(outer)
        left = [without(part, lambda s, read=read: isinstance(s, SetVar | Accumulate) and s.var not in read) for part in parts]  # type: ignore[misc]
        if left == parts:
            return parts
        parts = left


def _reads_later(parts: Sequence[tuple[Stmt, ...]], once: Mapping[str, tuple[int, Store]], written: Set[str], again: Set[str]) -> bool | None:
    """Whether what is accumulated is read after it was stored; False where all of it is read before. None where it is both, or where elements of other
    iterations are read, or some that are stored more than once."""
    found = {True} if again else set[bool]()
    for position, part in enumerate(parts):
        for expr in exprs_in(part):
            if not isinstance(expr, Element) or expr.array.name not in written or expr.array.name in again:
                continue
            at, store = once.get(expr.array.name, (position, None))
            if store is None or expr.indices != store.indices or position == at:
                return None
            found.add(position > at)
    return None if len(found) > 1 else found != {False}


def without(stmts: tuple[Stmt, ...], drop: Callable[[Stmt], bool]) -> tuple[Stmt, ...]:
    """The statements without those `drop` picks, nor loops and ifs that are empty then."""
    result: list[Stmt] = []
    for stmt in stmts:
        if drop(stmt):
            continue
        if isinstance(stmt, TypedIf):
            stmt = replace(stmt, then=without(stmt.then, drop), otherwise=without(stmt.otherwise, drop))
            if not stmt.then and not stmt.otherwise:
                continue
        elif isinstance(stmt, TypedLoop):
            stmt = replace(stmt, body=without(stmt.body, drop))
            if not stmt.body:
                continue
        result.append(stmt)
    return tuple(result)
