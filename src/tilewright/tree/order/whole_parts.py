"""Steps that rewrite a part of an array become swaps of two whole arrays.

In: a classified ordered loop, and the arrays that are needed after it. Out: statements to run before the loop, and the loop with a swap in place of each
copy of a part; None where it has none. `rotation` then turns the swap into names that change places:

    ordered t:                                   next[i] = u[i]                  (all of it)
        next[i] = f(u[i], u[i + 2])              ordered t:
        u[1 + i] = next[i]               ->          next[1 + i] = f(u[i], u[i + 2])
                                                     old[i] = u[i]; u[i] = next[i]; next[i] = old[i]

The part is the same in every step and nothing else in the loop writes to the array. So what lies outside of the part never changes, and both arrays hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.base.dtypes import i64
from tilewright.base.record import record
from tilewright.base.sizes import ZERO
from tilewright.base.source import Span
from tilewright.tree.typed import (
    Apply,
    ArrayAssign,
    ArrayInfo,
    Cast,
    Const,
    Element,
    Expr,
    IndexRef,
    LoopVar,
    SizeValue,
    Stmt,
    Store,
    TypedLoop,
    TypedWhile,
    row_major,
)
from tilewright.tree.typed_walk import exprs_in, walk, walk_expr


def with_swaps(loop: TypedLoop | TypedWhile, needed: set[str]) -> tuple[list[Stmt], TypedLoop | TypedWhile] | None:
    """What runs before the loop, and the loop with swaps."""
    parts = [part for position in range(len(loop.body) - 1) if (part := _part(loop.body, position, needed)) is not None]
    if not parts:
        return None
    body = list(loop.body)
    before: list[Stmt] = []
    for part in reversed(parts):
        other = row_major(part.fresh.name, part.array.dtype, part.array.shape, "scratch", part.fresh.align)
        old = row_major(f"{part.fresh.name}$old", part.array.dtype, part.array.shape, "scratch", part.fresh.align)
        span = loop.body[part.position].span
        before.append(_copied(other, part.array, span))
        swap = [_copied(old, part.array, span), _copied(part.array, other, span), _copied(other, old, span)]
        body[part.position : part.position + 2] = [part.computed(other), *swap]
    return before, replace(loop, body=tuple(body))


def scratch_in(stmts: tuple[Stmt, ...]) -> dict[str, ArrayInfo]:
    """The scratch arrays of statements, by name."""
    arrays = [s.array for s in walk(stmts) if isinstance(s, Store)] + [e.array for e in exprs_in(stmts) if isinstance(e, Element)]
    return {array.name: array for array in arrays if array.role == "scratch"}


@record
class _Part:
    """Two statements: the part's elements are computed, and then copied to where they belong."""

    position: int
    array: ArrayInfo
    fresh: ArrayInfo
    """Where elements are kept in between."""
    loop: TypedLoop
    places: tuple[Expr, ...]
    """Where an element belongs, by the indices of the loop that computes it."""

    def computed(self, other: ArrayInfo) -> TypedLoop:
        *first, store = self.loop.body
        assert isinstance(store, Store)
        return replace(self.loop, body=(*first, replace(store, array=other, indices=self.places)))


def _part(body: Sequence[Stmt], position: int, needed: set[str]) -> _Part | None:
    computed, copied = body[position], body[position + 1]
    if not (isinstance(computed, TypedLoop) and isinstance(copied, TypedLoop) and computed.kind == copied.kind == "parallel"):
        return None
    if len(copied.body) != 1 or not isinstance(made := computed.body[-1], Store) or not isinstance(moved := copied.body[0], Store):
        return None
    fresh, array = made.array, moved.array
    if made.kind or moved.kind or not isinstance(moved.value, Element) or moved.value.array.name != fresh.name or fresh.name in needed:
        return None
    # An argument in place may be far larger than the part.
    if fresh.role != "scratch" or array.role in ("input", "inout") or fresh.dtype is not array.dtype:
        return None
    if not _all_of(fresh, made.indices, computed.vars) or not _all_of(fresh, moved.value.indices, copied.vars):
        return None
    if _uses(body, fresh.name) != 2 or _writes(body, array.name) != 1:
        return None
    if not all(_is_fixed(index, copied.vars) for index in moved.indices):
        return None
    renamed = dict(zip(copied.vars, computed.vars, strict=True))
    return _Part(position, array, fresh, computed, tuple(_renamed(index, renamed) for index in moved.indices))


def _all_of(array: ArrayInfo, indices: Sequence[Expr], variables: Sequence[LoopVar]) -> bool:
    """Whether the indices are the loop's own, and it runs over the whole array."""
    own = tuple(e.var for e in indices if isinstance(e, IndexRef))
    return own == tuple(variables) and len(own) == len(indices) and tuple(var.full for var in variables) == tuple(array.shape)


def _uses(body: Sequence[Stmt], name: str) -> int:
    return _writes(body, name) + sum(isinstance(array := getattr(e, "array", None), ArrayInfo) and array.name == name for e in exprs_in(tuple(body)))


def _writes(body: Sequence[Stmt], name: str) -> int:
    return sum(isinstance(s, Store | ArrayAssign) and s.array.name == name for s in walk(tuple(body)))


def _is_fixed(index: Expr, variables: Sequence[LoopVar]) -> bool:
    """Whether an index depends on the loop's own indices and on sizes alone."""
    return all(isinstance(e, Const | SizeValue | Apply | Cast) or (isinstance(e, IndexRef) and e.var in variables) for e in walk_expr(index))


def _renamed(expr: Expr, moved: Mapping[LoopVar, LoopVar]) -> Expr:
    if isinstance(expr, IndexRef):
        return replace(expr, var=moved.get(expr.var, expr.var))
    if isinstance(expr, Apply):
        return replace(expr, args=tuple(_renamed(a, moved) for a in expr.args))
    return replace(expr, value=_renamed(expr.value, moved)) if isinstance(expr, Cast) else expr


def _copied(target: ArrayInfo, source: ArrayInfo, span: Span) -> TypedLoop:
    """All elements of an array go to another."""
    variables = tuple(
        LoopVar(f"whole{axis}", Const(0, i64), SizeValue(n), first=ZERO, count=n, low=ZERO, high=n - 1) for axis, n in enumerate(target.shape)
    )
    at = tuple(IndexRef(var, span=span) for var in variables)
    return TypedLoop(variables, (Store(target, at, Element(source, at, span=span), span=span),), "parallel", "auto", span=span)
