"""Products of matrices whose sum is not the innermost loop, as ones whose sum is.

In: a loop at the top of a kernel. Out: the same, where loops inside that add products to elements run over the elements first and over the terms then. Each element is added
up in the same order as before. Products that are added up together get loops of their own.

    for k in 0..m:                                                            for j in 0..i + 1:
        for j in 0..i + 1:                                             ->         for k in 0..m:
            c[i, j] += a[j, k] * b[i, k] + b[j, k] * a[i, k]                          c[i, j] += a[j, k] * b[i, k]
                                                                              for j in 0..i + 1: …
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tilewright.base.dtypes import f32, f64
from tilewright.tree.typed import Apply, Element, Expr, IndexRef, LoopVar, Stmt, Store, TypedLoop
from tilewright.tree.typed_walk import walk_expr


def products_inside(loop: TypedLoop, merged: Callable[[TypedLoop], TypedLoop]) -> TypedLoop:
    """The loop with the sums of such products as innermost loops. `merged` joins loops directly inside one another."""
    body = tuple(part for stmt in loop.body for part in _parts(stmt, loop.vars, merged))
    return loop if len(body) == len(loop.body) and all(a is b for a, b in zip(body, loop.body, strict=True)) else replace(loop, body=body)


def _parts(stmt: Stmt, rows: Sequence[LoopVar], merged: Callable[[TypedLoop], TypedLoop]) -> Sequence[Stmt]:
    if not isinstance(stmt, TypedLoop) or stmt.until is not None or stmt.asked == "yes":
        return (stmt,)
    nest = merged(stmt)
    store = nest.body[0]
    if len(nest.vars) != 2 or len(nest.body) != 1 or not isinstance(store, Store):
        return (stmt,)
    term, column = nest.vars
    reached = _indices_of(store.indices)
    if store.kind != "add" or store.array.dtype not in (f32, f64) or term in reached or column not in reached or not reached & set(rows):
        return (stmt,)
    if any(isinstance(e, Element) and e.array.name == store.array.name for e in walk_expr(store.value)):
        return (stmt,)
    terms = list(_terms(store.value))
    if not all(_is_product(one, term, column) for one in terms):
        return (stmt,)
    inner = [replace(nest, vars=(term,), body=(replace(store, value=one),), asked="auto") for one in terms]
    return [replace(nest, vars=(column,), body=(one,), asked="auto") for one in inner]


def _terms(value: Expr) -> Iterator[Expr]:
    if isinstance(value, Apply) and value.op == "add":
        for arg in value.args:
            yield from _terms(arg)
    else:
        yield _positive(value)


def _positive(value: Expr) -> Expr:
    """The negative of a product as the product of the negative of its first factor."""
    if not isinstance(value, Apply) or value.op != "neg":
        return value
    inner = value.args[0]
    if not isinstance(inner, Apply) or inner.op != "mul":
        return value
    return replace(inner, args=(_positive(replace(value, args=(inner.args[0],))), *inner.args[1:]))


def _is_product(value: Expr, term: LoopVar, column: LoopVar) -> bool:
    """Whether a term is a product of an element that the columns share with one of a column."""
    factors = list(_factors(value))
    moved = [_indices_of(e.indices) for e in factors if isinstance(e, Element)]
    rest = [e for e in factors if not isinstance(e, Element)]
    if any(isinstance(e, IndexRef) and e.var in (term, column) for factor in rest for e in walk_expr(factor)):
        return False
    shared, own = [m for m in moved if term in m and column not in m], [m for m in moved if term in m and column in m]
    return len(shared) == 1 and len(own) == 1 and len(shared[0]) > 1


def _factors(value: Expr) -> Iterator[Expr]:
    if isinstance(value, Apply) and value.op in ("mul", "neg"):
        for arg in value.args:
            yield from _factors(arg)
    else:
        yield value


def _indices_of(indices: Sequence[Expr]) -> set[LoopVar]:
    return {e.var for index in indices for e in walk_expr(index) if isinstance(e, IndexRef)}
