"""Ordered loops without copies of whole arrays: arrays change places instead.

In: a classified ordered loop, and the arrays that are needed after it. Out: statements that do the same. A loop that hands arrays on by copies
(`a, b = b, a`, `u = step(u)`) has bodies that iterations take in turn, each with other arrays in the same places:

    ordered t:                                   ordered t:
        v[i] = f(u[i - 1], u[i])                     turn 0 of 2: v[i] = f(u[i - 1], u[i])
        new[i] = u[i]; u[i] = v[i]; v[i] = new[i]    turn 1 of 2: u[i] = f(v[i - 1], v[i])
                                                 if steps % 2 == 1: u[i] = v[i]

A copy only notes that a name means another array's memory from there on. A statement that writes all of an array gets memory that nobody needs, where
its own is shared by then. What names mean at the end of the body is a permutation of the memory there was at its start; its order is the number of
turns. Loops where this does not work out stay as they are. `whole_parts` makes swaps of steps that rewrite a part of an array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tilewright.base.dtypes import bool_, i64
from tilewright.base.sizes import ZERO, Size
from tilewright.tree.order.whole_parts import with_swaps
from tilewright.tree.typed import (
    Accumulate,
    Apply,
    ArrayInfo,
    Cast,
    Choose,
    Const,
    Element,
    Expr,
    IndexRef,
    Local,
    LoopVar,
    SetVar,
    SizeCheck,
    SizeValue,
    Stmt,
    Store,
    TypedIf,
    TypedLoop,
    TypedTurns,
    TypedWhile,
    Variable,
)
from tilewright.tree.typed_walk import exprs_in, own_exprs, walk, walk_expr

_MOST_TURNS = 4
Same = Mapping[Size, Size]
"""For a size, another one that is equal in every call."""
Buffers = dict[str, str]
"""The array whose memory each array's name means."""


def is_ordered(stmt: Stmt) -> bool:
    return isinstance(stmt, TypedLoop | TypedWhile) and stmt.kind == "ordered"


def needed_after(stmts: Sequence[Stmt]) -> set[str]:
    """Arrays that the statements have to do with."""
    return set(_arrays(tuple(stmts)))


def rotated(stmt: Stmt, needed: set[str], same: Same) -> list[Stmt]:
    """The loop without copies that only hand arrays on. `same` names one of those sizes that are equal in every call."""
    assert isinstance(stmt, TypedLoop | TypedWhile)
    around = needed | _arrays((stmt,)).keys()
    body = [done for inner in stmt.body for done in (rotated(inner, around, same) if is_ordered(inner) else [inner])]
    plain = replace(stmt, body=tuple(body))
    swapped = with_swaps(plain, needed)
    if swapped is not None:
        before, loop = swapped
        turned = _Rotation(loop, needed, same).run()
        if turned is not None:
            return [*before, *turned]
    return _Rotation(plain, needed, same).run() or [plain]


def equal_sizes(checks: Iterable[SizeCheck]) -> Same:
    """Sizes that a call checks to be equal, each with one that stands for all."""
    same: dict[Size, Size] = {}
    for check in checks:
        if check.relation == "eq":
            one, other = (_standing(size, same) for size in (check.left, check.right))
            if one != other:
                same[other] = one
    return same


def _standing(size: Size, same: Same) -> Size:
    while size in same:
        size = same[size]
    return size


class _NoRotation(Exception):
    pass


class _Rotation:
    def __init__(self, loop: TypedLoop | TypedWhile, needed: set[str], same: Same) -> None:
        self.loop, self.same = loop, same
        self.arrays = {name: array for name, array in _arrays((loop,)).items() if array.role != "input"}
        self.needed = {name for name, array in self.arrays.items() if name in needed or array.role != "scratch"}

    def run(self) -> list[Stmt] | None:
        """The loop with turns; None where it stays as it is."""
        if not any(_copy(stmt, self.same) for stmt in self.loop.body):
            return None
        try:
            after, head = self._liveness()
            body, ends = self._walk(after)
            return self._turned(body, self._permutation(ends, head))
        except _NoRotation:
            return None

    # -- what is needed ---------------------------------------------------------------------------------------------

    def _liveness(self) -> tuple[list[set[str]], set[str]]:
        """The arrays whose elements are needed after each statement, and at the start of the body."""
        head: set[str] = set()
        while True:
            live = self.needed | head
            after: list[set[str]] = []
            for stmt in reversed(self.loop.body):
                after.append(set(live))
                copied = _copy(stmt, self.same)
                if copied is not None:
                    live = (live - {copied[0].name}) | ({copied[1].name} if copied[0].name in live else set())
                else:
                    live = (live - _filled(stmt, self.same)) | (_read(stmt) & self.arrays.keys())
            if live == head:
                return after[::-1], head
            head = live

    # -- one iteration ----------------------------------------------------------------------------------------------

    def _walk(self, after: Sequence[set[str]]) -> tuple[list[Stmt], Buffers]:
        """The body without copies, and what names mean at its end."""
        buffers = {name: name for name in self.arrays}
        body: list[Stmt] = []
        for stmt, live in zip(self.loop.body, after, strict=True):
            copied = _copy(stmt, self.same)
            if copied is not None:
                buffers[copied[0].name] = buffers[copied[1].name]
                continue
            others = live | _read(stmt)
            for name in sorted(_written(stmt)):
                taken = {buffers[other] for other in others & self.arrays.keys() if other != name}
                if buffers[name] not in taken:
                    continue
                if name not in _filled(stmt, self.same):
                    raise _NoRotation
                taken |= {buffers[other] for other in _written(stmt) if other != name}
                free = [other for other in self.arrays if other not in taken and self._alike(name, other)]
                if not free:
                    raise _NoRotation
                buffers[name] = name if name in free else free[0]
            body.append(self._renamed(stmt, buffers))
        return body, buffers

    def _alike(self, name: str, other: str) -> bool:
        a, b = self.arrays[name], self.arrays[other]
        return a.dtype is b.dtype and _equal(a.shape, b.shape, self.same)

    # -- all iterations ---------------------------------------------------------------------------------------------

    def _permutation(self, ends: Buffers, head: set[str]) -> Buffers:
        """What each piece of memory holds an iteration later, said by where it lies now; that of names nobody needs is filled in."""
        kept = {name: ends[name] for name in sorted(head | self.needed)}
        if len(set(kept.values())) != len(kept):
            raise _NoRotation
        sources = {memory: name for name, memory in kept.items()}
        for name in self.arrays:
            if name not in kept:
                # Back to the start of the chain that ends here: the shortest cycles.
                start = name
                while start in sources:
                    start = sources[start]
                if not self._alike(name, start):
                    raise _NoRotation
                kept[name] = start
        return kept

    def _turned(self, body: Sequence[Stmt], step: Buffers) -> list[Stmt]:
        places = [{name: name for name in self.arrays}]
        while (following := {name: places[-1][step[name]] for name in self.arrays}) != places[0]:
            places.append(following)
            if len(places) > _MOST_TURNS:
                raise _NoRotation
        loop = self.loop
        if len(places) == 1:
            return [replace(loop, body=tuple(body))] if body else []
        moved = {array for place in places for name, array in place.items() if name != array}
        if any(isinstance(e, Element) and e.array.name in moved for e in own_exprs(loop) for e in walk_expr(e)):
            raise _NoRotation
        turns = [[self._renamed(stmt, place) for stmt in body] for place in places]
        before: list[Stmt] = []
        counted = Variable("steps", i64, mutable=isinstance(loop, TypedWhile))
        steps: Expr = Local(counted, span=loop.span)
        if isinstance(loop, TypedWhile):
            before.append(SetVar(counted, Const(0, i64), True, span=loop.span))
            for turn in turns:
                turn.append(Accumulate(counted, "add", Const(1, i64), span=loop.span))
        elif loop.vars[0].count is not None:
            steps = SizeValue(loop.vars[0].count, span=loop.span)
        else:
            before.append(SetVar(counted, _count(loop.vars[0]), True, span=loop.span))
        bodies = TypedTurns(tuple(map(tuple, turns)), span=loop.span)
        return [*before, replace(loop, body=(bodies,)), *self._home(places, steps)]

    def _home(self, places: Sequence[Buffers], steps: Expr) -> list[Stmt]:
        """After the loop: what is needed goes to where its name says."""
        groups: dict[tuple[object, ...], list[str]] = {}
        for name in sorted(self.needed):
            if any(place[name] != name for place in places):
                groups.setdefault(tuple(_standing(extent, self.same) for extent in self.arrays[name].shape), []).append(name)
        known = steps.size.constant if isinstance(steps, SizeValue) else None
        result: list[Stmt] = []
        for names in groups.values():
            for turn in range(1, len(places)) if known is None else [known % len(places)]:
                away = [name for name in names if places[turn][name] != name]
                if away:
                    result.append(self._copies(away, places[turn], turn, len(places), None if known is not None else steps))
        return result

    def _copies(self, names: Sequence[str], place: Buffers, turn: int, period: int, steps: Expr | None) -> TypedLoop:
        """Elements of arrays go to others, all at once, where the number of steps says so."""
        span = self.loop.span
        shape = self.arrays[names[0]].shape
        variables = tuple(LoopVar(f"home{axis}", Const(0, i64), SizeValue(n), first=ZERO, count=n, low=ZERO, high=n - 1) for axis, n in enumerate(shape))
        at = tuple(IndexRef(var, span=span) for var in variables)
        held = [Variable(name, self.arrays[name].dtype) for name in names]
        body: tuple[Stmt, ...] = (
            *(SetVar(var, Element(self.arrays[place[name]], at, span=span), True, span=span) for var, name in zip(held, names, strict=True)),
            *(Store(self.arrays[name], at, Local(var, span=span), span=span) for var, name in zip(held, names, strict=True)),
        )
        if steps is not None:
            left = Apply("mod", (steps, Const(period, i64)), i64, span=span)
            body = (TypedIf(Apply("eq", (left, Const(turn, i64)), bool_, span=span), body, span=span),)
        return TypedLoop(variables, body, "parallel", "auto", span=span)

    # -- renaming ---------------------------------------------------------------------------------------------------

    def _renamed(self, stmt: Stmt, buffers: Buffers) -> Stmt:
        return _Renaming({name: self.arrays[other] for name, other in buffers.items() if name != other}).stmt(stmt)


class _Renaming:
    """Statements with other arrays in place of some."""

    def __init__(self, arrays: Mapping[str, ArrayInfo]) -> None:
        self.arrays = arrays

    def stmts(self, stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(map(self.stmt, stmts))

    def stmt(self, stmt: Stmt) -> Stmt:
        if not self.arrays:
            return stmt
        if isinstance(stmt, SetVar | Accumulate):
            return replace(stmt, value=self.expr(stmt.value))
        if isinstance(stmt, Store):
            array = self.arrays.get(stmt.array.name, stmt.array)
            return replace(stmt, array=array, indices=tuple(map(self.expr, stmt.indices)), value=self.expr(stmt.value))
        if isinstance(stmt, TypedIf):
            return replace(stmt, cond=self.expr(stmt.cond), then=self.stmts(stmt.then), otherwise=self.stmts(stmt.otherwise))
        if isinstance(stmt, TypedWhile):
            return replace(stmt, cond=self.expr(stmt.cond), body=self.stmts(stmt.body))
        if isinstance(stmt, TypedTurns):
            return replace(stmt, bodies=tuple(map(self.stmts, stmt.bodies)))
        if isinstance(stmt, TypedLoop) and not any(isinstance(e, Element) and e.array.name in self.arrays for own in own_exprs(stmt) for e in walk_expr(own)):
            return replace(stmt, body=self.stmts(stmt.body))
        raise _NoRotation

    def expr(self, expr: Expr) -> Expr:
        if isinstance(expr, Element):
            return replace(expr, array=self.arrays.get(expr.array.name, expr.array), indices=tuple(map(self.expr, expr.indices)))
        if isinstance(expr, Apply):
            return replace(expr, args=tuple(map(self.expr, expr.args)))
        if isinstance(expr, Cast):
            return replace(expr, value=self.expr(expr.value))
        if isinstance(expr, Choose):
            return replace(expr, cond=self.expr(expr.cond), then=self.expr(expr.then), otherwise=self.expr(expr.otherwise))
        return expr


# -- what statements do -----------------------------------------------------------------------------------------------


def _arrays(stmts: tuple[Stmt, ...]) -> dict[str, ArrayInfo]:
    """The arrays of statements, by name."""
    found = {s.array.name: s.array for s in walk(stmts) if hasattr(s, "array")}
    return found | {array.name: array for e in exprs_in(stmts) if isinstance(array := getattr(e, "array", None), ArrayInfo)}


def _read(stmt: Stmt) -> set[str]:
    updated = {s.array.name for s in walk((stmt,)) if isinstance(s, Store) and s.kind}
    return updated | {e.array.name for e in exprs_in((stmt,)) if isinstance(e, Element)}


def _written(stmt: Stmt) -> set[str]:
    return {s.array.name for s in walk((stmt,)) if isinstance(s, Store)}


def _equal(a: Sequence[Size], b: Sequence[Size], same: Same) -> bool:
    return len(a) == len(b) and all(_standing(x, same) == _standing(y, same) for x, y in zip(a, b, strict=True))


def _filled(stmt: Stmt, same: Same) -> set[str]:
    """Arrays that get a new value in every element, without being read."""
    if not isinstance(stmt, TypedLoop) or stmt.kind != "parallel":
        return set()
    return {name for name in _written(stmt) - _read(stmt) if _always_stored(stmt.body, name, stmt.vars, same)}


def _always_stored(stmts: tuple[Stmt, ...], name: str, variables: tuple[LoopVar, ...], same: Same) -> bool:
    """Whether every point stores to the element of its own, and there is one for each element."""
    for stmt in stmts:
        if isinstance(stmt, Store) and stmt.array.name == name and _is_own(stmt.array, stmt.indices, variables, same):
            return True
        if isinstance(stmt, TypedIf) and all(_always_stored(side, name, variables, same) for side in (stmt.then, stmt.otherwise)):
            return True
    return False


def _is_own(array: ArrayInfo, indices: Sequence[Expr], variables: tuple[LoopVar, ...], same: Same) -> bool:
    own = tuple(e.var for e in indices if isinstance(e, IndexRef))
    full = [var.full for var in variables if var.full is not None]
    return own == variables and len(own) == len(indices) and _equal(full, array.shape, same)


def _copy(stmt: Stmt, same: Same) -> tuple[ArrayInfo, ArrayInfo] | None:
    """The array that is written and the one that is read, where a statement only copies all of one to another of the same type."""
    if not isinstance(stmt, TypedLoop) or stmt.kind != "parallel" or len(stmt.body) != 1:
        return None
    (store,) = stmt.body
    if not isinstance(store, Store) or store.kind or not isinstance(store.value, Element):
        return None
    target, source = store.array, store.value.array
    if source.role == "input" or source.dtype is not target.dtype or not _equal(source.shape, target.shape, same) or source.name == target.name:
        return None
    own = _is_own(target, store.indices, stmt.vars, same) and _is_own(source, store.value.indices, stmt.vars, same)
    return (target, source) if own else None


def _count(var: LoopVar) -> Expr:
    """How many values an index takes."""
    step = var.step.constant
    if not step:
        raise _NoRotation
    first, last = (var.hi, var.lo) if step < 0 else (var.lo, var.hi)
    gap: Expr = Apply("sub", (last, first), i64)
    if abs(step) != 1:
        gap = Apply("floordiv", (Apply("add", (gap, Const(abs(step) - 1, i64)), i64), Const(abs(step), i64)), i64)
    return Apply("max", (gap, Const(0, i64)), i64)
