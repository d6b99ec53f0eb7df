"""Races of `grid` loops that can be seen: two iterations that surely reach one element, one of them writing it.

In: a typed loop whose iterations the source promised to be independent, and could not be proven so. Out: the first two iterations that break the
promise. They are searched for among few values of each index (the first ones, the last ones, and the constants of the text), with two choices of numbers
for all sizes: only what holds for both counts. Accesses under a condition, and with indices from data, are not looked at: they are no certain race.

    for i in tw.grid(n):
        out[i // 2] = x[i]       # iterations i=0 and i=1 both write out[0]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, product

from tilewright.base.record import record
from tilewright.base.sizes import Size, has_numbers
from tilewright.base.source import Span
from tilewright.tree.typed import (
    Apply,
    Cast,
    Choose,
    Const,
    Element,
    Expr,
    IndexRef,
    LoopVar,
    SizeValue,
    Stmt,
    Store,
    TypedLoop,
)
from tilewright.tree.typed_walk import children, own_exprs, walk, walk_expr

_FIRST = 9
_LAST = 2
_MOST_POINTS = 4096
_TRIALS = (53, 71)
"""Numbers for sizes and indices around: each trial counts up from one."""
_Point = tuple[int, ...]


@record
class GridAccess:
    """One access that every iteration makes, with the loops inside the grid around it."""

    array: str
    indices: tuple[Expr, ...]
    writes: str
    """`=` for a plain store, `+=` for one that combines, empty for a read."""
    inner: tuple[LoopVar, ...]
    span: Span


@record
class Collision:
    first: dict[str, int]
    second: dict[str, int]
    place: str
    reads: bool
    """The first iteration reads what the second writes."""
    span: Span
    turns: tuple[int, ...]
    """Which turns of the loops these are; those near the end count from there, below 0."""
    example: str
    """The sizes it is said for, where turns count from the end."""

    def message(self) -> str:
        a, b = (", ".join(f"{name}={value}" for name, value in point.items()) for point in (self.first, self.second))
        begin = f"grid runs its iterations in any order, but{self.example} iteration"
        if self.reads:
            return f"{begin} {a} reads {self.place}, which iteration {b} writes"
        return f"{begin}s {a} and {b} both write {self.place}"


def collision(loop: TypedLoop) -> Collision | None:
    """Two iterations that surely race."""
    found = [_search(loop, trial) for trial in _TRIALS]
    if found[0] is None or found[1] is None:
        return None
    same = (found[0].turns, found[0].span) == (found[1].turns, found[1].span)
    return found[0] if same else None


def _search(loop: TypedLoop, trial: int) -> Collision | None:
    accesses = list(_accesses(loop.body, ()))
    written = {a.array for a in accesses if a.writes}
    accesses = [a for a in accesses if a.array in written]
    known = _Numbers(trial)
    constants = sorted({e.value for a in accesses for i in a.indices for e in walk_expr(i) if isinstance(e, Const) and type(e.value) is int})
    extra = [c for c in constants if _FIRST <= c < 1 << 20]
    points = list(islice(_points(loop.vars, known, {}, extra), _MOST_POINTS))
    for array in sorted(written):
        clash = _array_collision(loop, [a for a in accesses if a.array == array], points, known, extra)
        if clash is not None:
            return clash
    return None


def _array_collision(
    loop: TypedLoop, accesses: list[GridAccess], points: list[dict[LoopVar, int]], known: _Numbers, extra: list[int]
) -> Collision | None:  # fmt: skip
    writers: dict[_Point, tuple[dict[LoopVar, int], GridAccess]] = {}
    outer = loop.vars
    for access in (a for a in accesses if a.writes):
        for point in points:
            for inner in islice(_points(access.inner, known, point, extra), _FIRST):
                place = known.place(access.indices, inner)
                if place is None:
                    continue
                other, by = writers.setdefault(place, (inner, access))
                if any(other[v] != inner[v] for v in outer) and "=" in (access.writes, by.writes):
                    return _collision(known, outer, other, inner, array_place(access.array, place), False, access.span)
    for access in (a for a in accesses if not a.writes):
        for point in points:
            for inner in islice(_points(access.inner, known, point, extra), _FIRST):
                place = known.place(access.indices, inner)
                if place in writers and any(writers[place][0][v] != inner[v] for v in outer):
                    return _collision(known, outer, inner, writers[place][0], array_place(access.array, place), True, access.span)
    return None


def array_place(array: str, place: _Point) -> str:
    return f"{array}[{', '.join(map(str, place))}]"


def _collision(
    known: _Numbers, outer: tuple[LoopVar, ...], first: Mapping[LoopVar, int], second: Mapping[LoopVar, int], place: str, reads: bool, span: Span
) -> Collision:  # fmt: skip
    turns = tuple(known.turn(v, point) for point in (first, second) for v in outer)
    sizes = sorted({name for v in outer if isinstance(v.hi, SizeValue) for name in v.hi.size.names})
    example = ", ".join(f"{name} = {known.names[name]}" for name in sizes if name in known.names)
    said = f" with {example}" if example and min(turns) < 0 else ""
    return Collision({v.name: first[v] for v in outer}, {v.name: second[v] for v in outer}, place, reads, span, turns, said)


def _points(variables: tuple[LoopVar, ...], known: _Numbers, around: Mapping[LoopVar, int], extra: list[int]) -> Iterator[dict[LoopVar, int]]:
    """Some values of the indices, the first ones first."""
    if not variables:
        yield dict(around)
        return
    few = _FIRST if len(variables) == 1 else 5 if len(variables) == 2 else 3
    values: list[list[int]] = []
    for var in variables:
        lo, hi, step = known.value(var.lo, around), known.value(var.hi, around), known.size(var.step)
        if lo is None or hi is None or not step:
            return
        count = len(range(lo, hi, step))
        last = range(max(few, count - _LAST), count)
        values.append([lo + k * step for k in (*range(min(few, count)), *(e for e in extra if few <= e < count and e not in last), *last)])
    for point in product(*values):
        yield {**around, **dict(zip(variables, point, strict=True))}


class _Numbers:
    """A number for every size and every index around the loop."""

    def __init__(self, trial: int) -> None:
        self.trial = trial
        self.names: dict[str, Size] = {}
        self.around: dict[LoopVar, int] = {}

    def size(self, size: Size) -> int | None:
        if has_numbers(size):
            return None
        for name in sorted(size.names):
            self.names.setdefault(name, Size.of(self.trial + 7 * len(self.names)))
        return size.substitute(self.names).constant

    def turn(self, var: LoopVar, point: Mapping[LoopVar, int]) -> int:
        """Which turn of the loop this is, from the end where it is one of the last."""
        lo, hi, step = self.value(var.lo, point), self.value(var.hi, point), self.size(var.step)
        assert lo is not None and hi is not None and step
        number, count = (point[var] - lo) // step, len(range(lo, hi, step))
        return number - count if number >= max(_FIRST, count - _LAST) else number

    def place(self, indices: tuple[Expr, ...], point: Mapping[LoopVar, int]) -> _Point | None:
        values = [self.value(i, point) for i in indices]
        return None if None in values else tuple(v for v in values if v is not None)

    def value(self, expr: Expr, point: Mapping[LoopVar, int]) -> int | None:
        if isinstance(expr, Const):
            return int(expr.value) if isinstance(expr.value, int) else None
        if isinstance(expr, SizeValue):
            return self.size(expr.size)
        if isinstance(expr, IndexRef):
            return point[expr.var] if expr.var in point else self.around.setdefault(expr.var, self.trial % 11)
        if isinstance(expr, Cast) and expr.dtype.is_int and expr.dtype.bits == 64:
            return self.value(expr.value, point)
        if not isinstance(expr, Apply) or not expr.dtype.is_int or len(expr.args) != 2:
            return None
        a, b = (self.value(arg, point) for arg in expr.args)
        if a is None or b is None:
            return None
        if expr.op in ("floordiv", "mod"):
            return None if b == 0 else a // b if expr.op == "floordiv" else a % b
        return {"add": a + b, "sub": a - b, "mul": a * b, "min": min(a, b), "max": max(a, b)}.get(expr.op)


def _accesses(body: tuple[Stmt, ...], inner: tuple[LoopVar, ...]) -> Iterator[GridAccess]:
    """What every iteration surely reads and writes."""
    for stmt in body:
        for expr in own_exprs(stmt):
            for element in _certain(expr):
                yield GridAccess(element.array.name, element.indices, "", inner, element.span)
        if isinstance(stmt, Store):
            yield GridAccess(stmt.array.name, stmt.indices, "+=" if stmt.kind else "=", inner, stmt.span)
        if isinstance(stmt, TypedLoop):
            yield from _accesses(stmt.body, (*inner, *stmt.vars))


def _certain(expr: Expr) -> Iterator[Element]:
    """The elements that are read whatever conditions say."""
    if isinstance(expr, Element):
        yield expr
    for part in (expr.cond,) if isinstance(expr, Choose) else children(expr):
        yield from _certain(part)


def promised(stmts: tuple[Stmt, ...]) -> Iterator[TypedLoop]:
    """The loops that the source wrote as `grid`."""
    return (s for s in walk(stmts) if isinstance(s, TypedLoop) and s.asked == "yes")
