"""Loops that read one row or column which one of their own iterations writes, as all-pairs shortest paths and eliminations do.

In: a loop inside an ordered one. Out: the iterations before that one, it, and those after it, in this order: the meaning of the loop stays, whatever it computes. Each of the
parts is then classified by itself. The iterations of the first and the last one no longer meet the pivot.

    for i in 0..n:                                        for i in 0..k:      d[i, j] = min(d[i, j], d[i, k] + d[k, j])
        for j in 0..n:                             ->     for j in 0..n:      d[k, j] = min(d[k, j], d[k, k] + d[k, j])
            d[i, j] = min(d[i, j], d[i, k] + d[k, j])     for i in k + 1..n:  d[i, j] = min(d[i, j], d[i, k] + d[k, j])
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from tilewright.base.dtypes import i64
from tilewright.base.intervals import surely_nonnegative
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO
from tilewright.tree.bounds import IndexForm, Indices, linear_indices
from tilewright.tree.typed import (
    Apply,
    Const,
    Element,
    Expr,
    IndexRef,
    LoopVar,
    SetVar,
    Stmt,
    Store,
    TypedLoop,
    TypedNode,
    Variable,
)
from tilewright.tree.typed_walk import exprs_in, walk

_T = TypeVar("_T")


@record
class PivotedLoop:
    """The parts of a loop, and the index around it that chooses the pivot."""

    pivot: LoopVar
    before: TypedLoop
    at: tuple[Stmt, ...]
    after: TypedLoop


def around_pivot(loop: TypedLoop) -> PivotedLoop | None:
    """The loop over its first index in three parts; None where no outer index chooses an iteration whose elements the others read."""
    var, rest = loop.vars[0], loop.vars[1:]
    pivot = _pivot(loop, var)
    if pivot is None or loop.until is not None:
        return None
    body = (replace(loop, vars=rest),) if rest else loop.body
    at = IndexRef(pivot, span=loop.span)
    after = Apply("add", (at, Const(1, i64, span=loop.span)), i64, span=loop.span)

    def part(lo: Expr, hi: Expr) -> TypedLoop:
        own = LoopVar(var.name, lo, hi, ONE, None, None, var.low, var.high)
        return replace(loop, vars=(own,), body=with_index(body, var, IndexRef(own, span=loop.span)))

    return PivotedLoop(pivot, part(var.lo, at), with_index(body, var, at), part(after, var.hi))


def _pivot(loop: TypedLoop, var: LoopVar) -> LoopVar | None:
    """The index around the loop that chooses an iteration which writes what others read; None where there is none, or not surely one of the loop's values."""
    inside = {*loop.vars, *(v for s in walk(loop.body) if isinstance(s, TypedLoop) for v in s.vars)}
    writes: dict[str, list[Indices]] = {}
    for stmt in walk(loop.body):
        if isinstance(stmt, Store):
            forms = linear_indices(stmt.indices)
            if forms is None:
                return None
            writes.setdefault(stmt.array.name, []).append(forms)
    found: set[LoopVar] = set()
    for expr in exprs_in(loop.body):
        if not isinstance(expr, Element) or expr.array.name not in writes:
            continue
        read = linear_indices(expr.indices)
        if read is None:
            return None
        for write in writes[expr.array.name]:
            for x, y in zip(write, read, strict=True):
                chosen = _index_of(y)
                if _index_of(x) is var and chosen is not None and chosen not in inside:
                    found.add(chosen)
    if len(found) != 1:
        return None
    (pivot,) = found
    return pivot if _is_within(pivot, var) else None


def _index_of(form: IndexForm) -> LoopVar | None:
    """The index that a form is; None where it is anything else."""
    return form.factors[0][0] if len(form.factors) == 1 and form.factors[0][1] == ONE and form.constant == ZERO else None


def _is_within(inner: LoopVar, outer: LoopVar) -> bool:
    """Whether the values of one index are all among those of another."""
    if inner.first is None or inner.count is None or outer.first is None or outer.count is None or inner.step != ONE or outer.step != ONE:
        return False
    return surely_nonnegative(inner.first - outer.first) and surely_nonnegative(outer.first + outer.count - inner.first - inner.count)


def with_index(item: _T, var: LoopVar, by: Expr) -> _T:
    """A copy of statements or expressions with an expression in place of an index; loops and variables in it are new ones."""
    return _IndexReplacer(var, by).of(item)  # type: ignore[no-any-return]


class _IndexReplacer:
    def __init__(self, var: LoopVar, by: Expr) -> None:
        self.var, self.by = var, by
        self.vars: dict[int, LoopVar] = {}
        self.variables: dict[int, Variable] = {}

    def of(self, item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(self.of(one) for one in item)
        if isinstance(item, IndexRef):
            return self.by if item.var is self.var else replace(item, var=self.vars.get(id(item.var), item.var))
        if isinstance(item, Variable):
            return self.variables.get(id(item), item)
        if isinstance(item, LoopVar):
            return self.vars.get(id(item), item)
        if isinstance(item, TypedLoop):
            for var in item.vars:
                self.vars[id(var)] = replace(var, lo=self.of(var.lo), hi=self.of(var.hi))
        if isinstance(item, SetVar) and item.declares:
            self.variables[id(item.var)] = replace(item.var)
        if not isinstance(item, TypedNode):
            return item
        return replace(item, **{field.name: self.of(getattr(item, field.name)) for field in fields(item) if field.name != "span"})
