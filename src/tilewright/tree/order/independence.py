"""Which loops can run in any order: two proofs about a typed loop.

In: a loop, and the values of indices around it that are the same for all of its iterations (`fixed`). Out: whether it only accumulates, or
whether its iterations reach different elements. `False` means "not proven".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from tilewright.base.affine import AffineForm
from tilewright.base.intervals import surely_nonnegative
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.tree.bounds import (
    IndexForm,
    Indices,
    affine,
    apart_from,
    disjoint,
    fixed_form,
    injective,
    linear_indices,
    owns_axis,
)
from tilewright.tree.typed import (
    Accumulate,
    Apply,
    ArrayAssign,
    Cast,
    Element,
    Expr,
    IndexRef,
    Local,
    LoopVar,
    ReduceLoop,
    ScalarRef,
    SetVar,
    Stmt,
    Store,
    TypedAssert,
    TypedIf,
    TypedLoop,
    TypedPrint,
    TypedYield,
    Variable,
)
from tilewright.tree.typed_walk import exprs_in, walk, walk_expr

REDUCED = ("add", "mul", "min", "max", "and", "or")
"""Stores that a reduction can stand for."""
Fixed = Mapping[LoopVar, Size]
NOTHING_FIXED: Fixed = {}


def is_reduction(loop: TypedLoop, outer: Sequence[Variable]) -> bool:
    """Whether the loop does nothing but accumulate into outer variables or into array elements that it does not move over."""
    stores = [s for s in walk(loop.body) if isinstance(s, Store)]
    if (not outer and not stores) or any(s.kind not in REDUCED for s in stores):
        return False
    kinds: dict[Variable, str] = {}
    for stmt in walk(loop.body):
        if isinstance(stmt, ArrayAssign | ReduceLoop | TypedYield | TypedPrint | TypedAssert):
            return False
        if isinstance(stmt, SetVar) and stmt.var in outer:
            return False
        if isinstance(stmt, Accumulate) and stmt.var in outer and kinds.setdefault(stmt.var, stmt.kind) != stmt.kind:
            return False
    if any(isinstance(e, Local) and e.var in outer for e in exprs_in(loop.body)):
        return False
    return _one_element(loop, stores)


def _one_element(loop: TypedLoop, stores: Sequence[Store]) -> bool:
    """Stores of a reduction all accumulate: per array into one element that stays the same over the loop, or into several that surely are different ones."""
    moving = {v for s in walk((loop,)) if isinstance(s, TypedLoop) for v in s.vars}
    inside = {s.var for s in walk(loop.body) if isinstance(s, SetVar)}
    places: dict[str, dict[tuple[Expr, ...], str]] = {}
    for store in stores:
        own = places.setdefault(store.array.name, {})
        if not store.kind or own.setdefault(store.indices, store.kind) != store.kind:
            return False
        for index in store.indices:
            for expr in walk_expr(index):
                if isinstance(expr, Element) or (isinstance(expr, IndexRef) and expr.var in moving):
                    return False
                if isinstance(expr, Local) and expr.var in inside:
                    return False
    if not all(_is_apart(a, b) for own in places.values() for a, b in combinations(own, 2)):
        return False
    return all(_is_apart(place, e.indices) for e in exprs_in(loop.body) if isinstance(e, Element) for place in places.get(e.array.name, ()))


def _is_apart(place: Sequence[Expr], other: Sequence[Expr]) -> bool:
    """Whether indices never mean the element that is accumulated into: `a[i, k]` with `k < j`, beside `a[i, j]`."""
    here, there = linear_indices(place), linear_indices(other)
    return here is not None and there is not None and apart_from(here, there)


def independent(loop: TypedLoop, over: Sequence[LoopVar], fixed: Fixed = NOTHING_FIXED) -> bool:
    """Whether the points over these indices (of the loop's first) can run in any order, as far as arrays are concerned."""
    body: tuple[Stmt, ...] = loop.body
    bases = _Bases(body)
    writes: dict[str, list[Indices]] = {}
    accesses: dict[str, list[Indices]] = {}
    reads: set[str] = set()
    for stmt in walk(body):
        if isinstance(stmt, ArrayAssign | ReduceLoop | TypedYield | TypedPrint | TypedAssert):
            return False
        if isinstance(stmt, Store) and not stmt.scatter:
            writes.setdefault(stmt.array.name, []).append(_forms(stmt.indices, fixed, bases))
            if stmt.kind:
                reads.add(stmt.array.name)
    if not writes:
        return any(isinstance(s, Store) for s in walk(body))
    for expr in exprs_in(body):
        if isinstance(expr, Element) and expr.array.name in writes:
            accesses.setdefault(expr.array.name, []).append(_forms(expr.indices, fixed, bases))
            reads.add(expr.array.name)
    colours = _colours(body, over, fixed)
    return all(_array_independent(writes[name], accesses.get(name, []), over, fixed, colours, bases) for name in writes)


class _Bases:
    """Numbers from arrays that a loop only reads, as `positions[s]` in `cache[s, positions[s] + t]`: each stands as an index of its own, and is the
    same wherever the indices that choose it are."""

    def __init__(self, body: tuple[Stmt, ...]) -> None:
        self.written = {s.array.name for s in walk(body) if isinstance(s, Store)}
        self.inside = {s.var for s in walk(body) if isinstance(s, SetVar | Accumulate)}
        self.known: dict[Expr, LoopVar] = {}
        self.needs: dict[LoopVar, frozenset[LoopVar]] = {}
        """The indices that choose each."""
        self.unknown: dict[Expr, LoopVar] = {}

    def form(self, expr: Expr) -> IndexForm | None:
        """A sum of a linear function and such numbers; None for anything else."""
        linear = affine(expr)
        if linear is not None:
            return linear
        if isinstance(expr, Cast) and expr.dtype.is_int and expr.value.dtype.is_int and expr.dtype.bits >= expr.value.dtype.bits:
            return self.form(expr.value)
        if isinstance(expr, Apply) and expr.op in ("add", "sub"):
            first, second = (self.form(arg) for arg in expr.args)
            return None if first is None or second is None else first.plus(second) if expr.op == "add" else first.minus(second)
        if not isinstance(expr, Element | Local | ScalarRef) or not expr.dtype.is_int:
            return None
        if isinstance(expr, Element) and expr.array.name in self.written:
            return None
        if any((isinstance(e, Element) and e is not expr) or (isinstance(e, Local) and e.var in self.inside) for e in walk_expr(expr)):
            return None
        var = self.known.get(expr)
        if var is None:
            var = self.known[expr] = LoopVar("base", expr, expr)
            self.needs[var] = frozenset(e.var for e in walk_expr(expr) if isinstance(e, IndexRef))
        return AffineForm(((var, ONE),))

    def form_or_unknown(self, expr: Expr) -> IndexForm:
        """As `form`; anything else is a number of its own, of which nothing is known: what lies apart then does so along other axes."""
        found = self.form(expr)
        if found is not None:
            return found
        return AffineForm(((self.unknown.setdefault(expr, LoopVar("unknown", expr, expr)), ONE),))

    def injective(self, indices: Indices, over: Sequence[LoopVar]) -> bool:
        """Whether different values of the `over` indices reach different elements: an index that an axis tells settles the numbers it chooses."""
        missing = set(over)
        while missing:
            before = len(missing)
            for index in indices:
                settled = {v for v in index.values if v in self.needs and self.needs[v].isdisjoint(missing)}
                rest = AffineForm(tuple((v, f) for v, f in index.factors if v not in settled), index.constant)
                if self.needs.keys().isdisjoint(rest.values) and injective((rest,), [v for v in rest.values if v in missing]):
                    missing -= set(rest.values)
            if len(missing) == before:
                return False
        return True


def _forms(indices: Sequence[Expr], fixed: Fixed, bases: _Bases) -> Indices:
    return tuple(fixed_form(bases.form_or_unknown(index), fixed) for index in indices)


def _array_independent(
    writes: list[Indices], reads: list[Indices], over: Sequence[LoopVar], fixed: Fixed, colours: tuple[IndexForm, int] | None, bases: _Bases
) -> bool:
    distinct = list(dict.fromkeys(writes + reads))
    if all(owns_axis(distinct, var) for var in over):
        return True
    if not all(bases.injective(w, over) for w in writes):
        return False
    return all(
        a == b or disjoint(a, b, fixed or None) or all(owns_axis((a, b), var) for var in over) or _across(a, b, over) or (colours is not None and _other_colour(a, b, over, colours))
        for w in dict.fromkeys(writes) for a, b in ((w, other) for other in distinct)
    )  # fmt: skip


def _across(a: Indices, b: Indices, over: Sequence[LoopVar]) -> bool:
    """Whether two accesses lie across the diagonal from each other, `c[i, j]` and `c[j, i]`, with j on one side of it in every row i. They meet on the diagonal alone,
    in one iteration of both loops."""
    if len(a) != 2 or a != b[::-1] or len(over) != 1:
        return False
    bare = [index.values[0] for index in a if len(index.factors) == 1 and index.factors[0][1] == ONE and index.constant == ZERO]
    return len(bare) == 2 and over[0] in bare and any(_on_one_side(column, row) for column, row in (bare, bare[::-1]))


def _on_one_side(column: LoopVar, row: LoopVar) -> bool:
    """Whether an index runs from another one on, or up to it."""
    first, end = affine(column.lo), affine(column.hi)
    starts = first is not None and first.values == (row,) and first.factor(row) == ONE and surely_nonnegative(first.constant)
    ends = end is not None and end.values == (row,) and end.factor(row) == ONE and surely_nonnegative(ONE - end.constant)
    return column.step == ONE and (starts or ends)


# -- colours ------------------------------------------------------------------------------------------------------


def _colours(body: tuple[Stmt, ...], over: Sequence[LoopVar], fixed: Fixed) -> tuple[IndexForm, int] | None:
    """The form and the modulus of `if form % modulus == colour:` around a whole body: only iterations of one colour do anything."""
    if len(body) != 1 or not isinstance(body[0], TypedIf) or body[0].otherwise:
        return None
    if any(isinstance(e, Element) for e in walk_expr(body[0].cond)):
        return None
    for cond in _conjuncts(body[0].cond):
        if not isinstance(cond, Apply) or cond.op != "eq":
            continue
        for side, other in (cond.args, cond.args[::-1]):
            if not isinstance(side, Apply) or side.op != "mod":
                continue
            form, by = affine(side.args[0]), affine(side.args[1])
            modulus = by.constant.constant if by is not None and not by.factors else None
            moves = any((isinstance(e, IndexRef) and e.var not in fixed) or isinstance(e, Local) for e in walk_expr(other))
            if form is not None and modulus is not None and modulus > 1 and not moves:
                return fixed_form(form, fixed), modulus
    return None


def _conjuncts(cond: Expr) -> Iterator[Expr]:
    if isinstance(cond, Apply) and cond.op == "and":
        for arg in cond.args:
            yield from _conjuncts(arg)
    else:
        yield cond


def _other_colour(a: Indices, b: Indices, over: Sequence[LoopVar], colours: tuple[IndexForm, int]) -> bool:
    """Whether two accesses, each index one of the loop's own and a constant, meet only in iterations of different colours."""
    form, modulus = colours
    if not set(form.values) <= set(over) & {var for index in a for var in index.values}:
        return False
    factors = dict(form.factors)
    gap = 0
    for x, y in zip(a, b, strict=True):
        apart = (x.constant - y.constant).constant
        if dict(x.factors) != dict(y.factors) or len(x.factors) != 1 or x.factors[0][1] != ONE or x.values[0] not in over or apart is None:
            return False
        factor = factors.get(x.values[0], ZERO).constant
        if factor is None:
            return False
        gap += factor * apart
    return gap % modulus != 0

