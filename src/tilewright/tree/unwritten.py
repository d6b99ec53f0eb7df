"""Results of ZynML blocks that may have elements nobody writes: those are zero.

In comes a checked body whose loops are not classified yet; out comes the same body, with `out = 0` in front for every such result. Nobody
declares `out`, so nobody can say what it holds at first, and memory of others must not show through.

    for i in 0..6 step 2: out[i] = x[i]     ->  out = 0; for i in 0..6 step 2: out[i] = x[i]
    for i in 0..n: out[i] = x[i]            ->  as it is: every element is written

The proof knows loops over whole axes, in any order and direction, indices that are digits of one number (`4 * i + j`, tiles that end with
the array), stores side by side (`2 * d` and `2 * d + 1`, `d` and `d + half`), and conditions whose two branches both write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tilewright.base.affine import AffineForm
from tilewright.base.intervals import surely_nonnegative, surely_positive
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, SizeCall
from tilewright.tree.bounds import IndexForm, affine, linear_indices
from tilewright.tree.typed import (
    Apply,
    ArrayAssign,
    ArrayInfo,
    Const,
    Expr,
    LoopVar,
    ReduceLoop,
    SizeValue,
    Stmt,
    Store,
    TypedIf,
    TypedLoop,
)
from tilewright.tree.typed_walk import walk


def fill_unwritten(body: tuple[Stmt, ...], results: Iterable[ArrayInfo]) -> tuple[Stmt, ...]:
    """The body with zeros in front for results of which not every element is surely written."""
    fills: list[Stmt] = []
    for array in results:
        if not writes_all(body, array):
            zero = Const(False if array.dtype.is_bool else 0.0 if array.dtype.is_float else 0, array.dtype)
            span = next(stmt.span for stmt in walk(body) if isinstance(stmt, Store | ArrayAssign | ReduceLoop) and stmt.array.name == array.name)
            fills.append(ArrayAssign(array, zero, span=span))
    return (*fills, *body)


def writes_all(body: tuple[Stmt, ...], array: ArrayInfo) -> bool:
    """Whether the text shows that every element of the array is written."""
    if any(isinstance(stmt, ArrayAssign | ReduceLoop) and stmt.array.name == array.name for stmt in body):
        return True
    covers = list(dict.fromkeys(_covers(body, array, (), ())))
    if any(_is_whole(cover, array.shape) for cover in covers):
        return True
    return any(_whole_together(covers, array.shape, axis) for axis in range(array.rank))


# -- what one store reaches ---------------------------------------------------------------------------------------


@record
class _Reach:
    """The places along one axis that a store reaches: `base` and any sum of multiples of strides, each below its count."""

    base: Size
    digits: tuple[tuple[Size, Size], ...]
    """(stride, count), the smallest stride first."""

    @property
    def length(self) -> Size | None:
        """How many places in a row it reaches, or None where they have gaps."""
        total = ONE
        for stride, count in self.digits:
            if stride != total:
                return None
            total = total * count
        return total


_Cover = tuple[_Reach, ...]


def _covers(stmts: Sequence[Stmt], array: ArrayInfo, loops: tuple[LoopVar, ...], conditions: tuple[Expr, ...]) -> Iterator[_Cover]:
    """What stores that surely happen reach, axis by axis. `loops` and `conditions` are those around."""
    for stmt in stmts:
        if isinstance(stmt, Store) and stmt.array.name == array.name and not stmt.kind:
            cover = _store_cover(stmt, array, loops, conditions)
            if cover is not None:
                yield cover
        elif isinstance(stmt, ArrayAssign | ReduceLoop) and stmt.array.name == array.name:
            if not conditions and all(var.count is not None and surely_positive(var.count) for var in loops):
                yield tuple(_Reach(ZERO, ((ONE, extent),)) for extent in array.shape)
        elif isinstance(stmt, TypedLoop):
            yield from _covers(stmt.body, array, (*loops, *stmt.vars), conditions)
        elif isinstance(stmt, TypedIf):
            if stmt.otherwise:
                other = set(_covers(stmt.otherwise, array, loops, conditions))
                yield from (cover for cover in _covers(stmt.then, array, loops, conditions) if cover in other)
            else:
                yield from _covers(stmt.then, array, loops, (*conditions, stmt.cond))


def _store_cover(store: Store, array: ArrayInfo, loops: tuple[LoopVar, ...], conditions: tuple[Expr, ...]) -> _Cover | None:
    forms = linear_indices(store.indices)
    if forms is None or not all(_only_ends(c, forms, array.shape) for cond in conditions for c in _conjuncts(cond)):
        return None
    counts: dict[LoopVar, Size] = {}
    for var in loops:
        count = _count(var, forms, array.shape)
        if count is None:
            return None
        counts[var] = count
    used = [var for form in forms for var in form.values]
    if len(used) != len(set(used)) or not all(surely_positive(count) for var, count in counts.items() if var not in used):
        return None  # an index of two axes reaches a diagonal; a loop without iterations writes nothing
    reaches = [_reach(form, counts) for form in forms]
    return tuple(r for r in reaches if r is not None) if None not in reaches else None


def _reach(form: IndexForm, counts: dict[LoopVar, Size]) -> _Reach | None:
    base, digits = form.constant, []
    for var, factor in form.factors:
        stride = factor * var.step
        if var not in counts or var.first is None:
            return None
        base = base + factor * var.first
        if surely_nonnegative(-stride):
            base, stride = base + stride * (counts[var] - 1), -stride
        if not surely_nonnegative(stride):
            return None
        digits.append((stride, counts[var]))
    return _Reach(base, _in_order(digits))


def _in_order(digits: Sequence[tuple[Size, Size]]) -> tuple[tuple[Size, Size], ...]:
    """Digits by their strides: each next to the one whose multiples it counts, where there is one."""
    left, total = list(digits), ONE
    ordered: list[tuple[Size, Size]] = []
    while left:
        following = next((digit for digit in left if digit[0] == total), None)
        if following is None:
            return (*ordered, *sorted(left, key=str))
        left.remove(following)
        ordered.append(following)
        total = total * following[1]
    return tuple(ordered)


def _count(var: LoopVar, forms: Sequence[IndexForm], shape: Sequence[Size]) -> Size | None:
    """How many values an index has, not counting that it ends where the array ends."""
    if var.count is not None:
        return var.count
    if var.step != ONE or var.first is None or var.first != ZERO:
        return None
    extent = None
    for bound in _smallest_of(var.hi):
        form = affine(bound)
        if form is None:
            return None
        if not form.factors and isinstance(bound, SizeValue | Const):
            if extent is not None:
                return None
            extent = form.constant
        elif not any(index.factor(var) == ONE and _past(index, var, form) == (ZERO, end) for index, end in zip(forms, shape, strict=True)):
            return None
    return extent


def _past(index: IndexForm, var: LoopVar, bound: IndexForm) -> tuple[Size, Size]:
    """An index with the bound of one of its loops in place of the loop's own: (zero where nothing else is left in it, its constant)."""
    at = index.minus(AffineForm(((var, ONE),))).plus(bound)
    return (ZERO if not at.factors else ONE), at.constant


def _smallest_of(expr: Expr) -> Iterator[Expr]:
    if isinstance(expr, Apply) and expr.op == "min":
        for arg in expr.args:
            yield from _smallest_of(arg)
    else:
        yield expr


def _conjuncts(expr: Expr) -> Iterator[Expr]:
    if isinstance(expr, Apply) and expr.op == "and":
        for arg in expr.args:
            yield from _conjuncts(arg)
    else:
        yield expr


def _only_ends(condition: Expr, forms: Sequence[IndexForm], shape: Sequence[Size]) -> bool:
    """Whether it only says that an index is inside the array: `i + t < n`, or `t < n - i`."""
    if not isinstance(condition, Apply) or condition.op not in ("lt", "gt") or len(condition.args) != 2:
        return False
    small, large = (affine(arg) for arg in (condition.args if condition.op == "lt" else condition.args[::-1]))
    if small is None or large is None:
        return False
    gap = small.minus(large)
    return any(not (rest := index.minus(gap)).factors and rest.constant == extent for index, extent in zip(forms, shape, strict=True))


# -- what stores reach together -----------------------------------------------------------------------------------


def _is_whole(cover: _Cover, shape: Sequence[Size]) -> bool:
    return all(_is_full(reach, extent) for reach, extent in zip(cover, shape, strict=True))


def _is_full(reach: _Reach, extent: Size) -> bool:
    return reach.base == ZERO and reach.length is not None and _at_least(reach.length, extent)


def _at_least(place: Size, extent: Size) -> bool:
    """Whether the place is surely not below the extent, which may be the largest of several."""
    for monomial, factor in extent.terms:
        if factor > 0 and len(monomial) == 1 and isinstance(call := monomial[0], SizeCall) and call.op == "max":
            rest = extent - Size(((monomial, factor),))
            return all(_at_least(place, rest + end * factor) for end in (call.a, call.b))
    return surely_nonnegative(place - extent)


def _whole_together(covers: Sequence[_Cover], shape: Sequence[Size], axis: int) -> bool:
    """Whether stores that have all of the other axes have, side by side, all of this one."""
    others = [c for c in covers if all(_is_full(r, e) for k, (r, e) in enumerate(zip(c, shape, strict=True)) if k != axis)]
    reaches = [cover[axis] for cover in others]
    for first in reaches:
        family = [r.base for r in reaches if r.digits == first.digits]
        if first.base == ZERO and len(family) > 1 and _is_full(_joined(first, family), shape[axis]):
            return True
    place, left = ZERO, [r for r in reaches if r.length is not None]
    while not _at_least(place, shape[axis]):
        following = next((r for r in left if r.base == place), None)
        if following is None or following.length is None:
            return False
        left.remove(following)
        place = place + following.length
    return bool(reaches)


def _joined(first: _Reach, bases: Sequence[Size]) -> _Reach:
    """Stores at bases `0, gap, 2 * gap, …` as one."""
    gaps = [base for base in bases if base != ZERO]
    for gap in gaps:
        if all(gap * k in bases for k in range(len(bases))):
            return replace(first, digits=_in_order((*first.digits, (gap, Size.of(len(bases))))))
    return first
