"""Whether an iteration reads only elements of an array that it wrote itself before.

In: the body of a loop, and an array. Out: a `Coverage`; None where that is not proven. The body is walked in its order with boxes of elements that are surely written by then, of
affine bounds along each axis. Inside a loop these are also what its earlier iterations wrote. Variables that hold indices stand for all that they may be.

    cp[0] = …                          [0, 1)
    for i in 1..n:                     [0, 1) and [1, i), so [0, i)
        cp[i] = f(cp[i - 1])           read inside; [0, i + 1)
    x = cp[n - 1]                      [0, n)

Every access is inside of its array, or the call fails: what is written whole may be read anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count, product

from tilewright.base.affine import AffineForm
from tilewright.base.intervals import sign_of, surely_nonnegative
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.tree.bounds import IndexForm, affine, bound_by, interval
from tilewright.tree.typed import (
    Accumulate,
    Apply,
    ArrayAssign,
    ArrayInfo,
    Cast,
    Element,
    Expr,
    Local,
    LoopVar,
    ReduceLoop,
    SetVar,
    Stmt,
    Store,
    TypedAssert,
    TypedIf,
    TypedLoop,
    TypedPrint,
    TypedTurns,
    TypedWhile,
    Variable,
    Whole,
)
from tilewright.tree.typed_walk import exprs_in, own_exprs, walk, walk_expr

_MOST_BOXES = 24
"""Boxes that are kept apart; more than these are not needed in any nest that people write."""
_MOST_RANGES = 6
"""Values that a variable may have, each between bounds of its own."""


@record
class Coverage:
    """The proof for one array. `filled`: where loops have no turn, no iteration writes the array, and what it was filled with is read."""

    filled: bool


def coverage(body: tuple[Stmt, ...], array: ArrayInfo) -> Coverage | None:
    """The proof that iterations of a loop with this body have nothing of an array from each other; None where there is none."""
    proof = _ReadProof(array, body)
    proof.run(body, (), {}, ())
    return Coverage(proof.filled) if proof.holds else None


def form_of(size: Size | int) -> IndexForm:
    return AffineForm((), Size.of(size))


@record
class _Box:
    """Elements from `low` up to `end`, exclusive, along each axis. None where an end is not above its low."""

    axes: tuple[tuple[IndexForm, IndexForm], ...]


@record
class _Bounds:
    """Numbers that are at least each of `lows` and at most each of `highs`. With `entry` these are added to what a variable was as a loop began."""

    lows: tuple[IndexForm, ...] = ()
    highs: tuple[IndexForm, ...] = ()
    entry: int = -1


_ANY = (_Bounds(),)
_Ranges = tuple[_Bounds, ...]
_Known = Mapping[Variable, _Ranges]
_Boxes = tuple[_Box, ...]
_Facts = tuple[IndexForm, ...]
"""Forms that are at least 0."""


class _ReadProof:
    def __init__(self, array: ArrayInfo, body: tuple[Stmt, ...]) -> None:
        self.array, self.body = array, body
        self.holds, self.filled = True, False
        self.entries = count()

    # -- statements ---------------------------------------------------------------------------------------------

    def run(self, stmts: tuple[Stmt, ...], boxes: _Boxes, known: _Known, facts: _Facts, check: bool = True) -> tuple[_Boxes, _Known]:
        """What is written, and what variables may be, after some statements. With `check` their reads are proven."""
        for stmt in stmts:
            if not self.holds:
                break
            boxes, known = self._statement(stmt, boxes, known, facts, check)
        return boxes, known

    def _statement(self, stmt: Stmt, boxes: _Boxes, known: _Known, facts: _Facts, check: bool) -> tuple[_Boxes, _Known]:
        if isinstance(stmt, TypedLoop):
            if stmt.until is not None:
                return boxes, self._loop(stmt.vars, stmt, boxes, known, facts, check)[1]
            return self._loop(stmt.vars, stmt, boxes, known, facts, check)
        if isinstance(stmt, TypedWhile):
            entry = self._at_entry(stmt, None, (), known, facts)
            self._reads(stmt, boxes, entry, facts, check)
            self.run(stmt.body, boxes, entry, facts, check)
            return boxes, entry
        self._reads(stmt, boxes, known, facts, check)
        if isinstance(stmt, TypedIf):
            return self._branches(stmt, boxes, known, facts, check)
        if isinstance(stmt, SetVar):
            return boxes, {**known, stmt.var: self._ranges(stmt.value, known) if stmt.var.dtype.is_int else _ANY}
        if isinstance(stmt, Accumulate):
            sum_of = _sums(known.get(stmt.var, _ANY), self._ranges(stmt.value, known)) if stmt.kind == "add" and stmt.var.dtype.is_int else _ANY
            return boxes, {**known, stmt.var: sum_of}
        if isinstance(stmt, Store):
            if stmt.array.name != self.array.name:
                return boxes, known
            place = [self._point(index, known) for index in stmt.indices]
            if None in place:
                return boxes, known
            return self._with(boxes, _Box(tuple((p, p.plus(_1)) for p in place if p is not None)), facts), known
        if not isinstance(stmt, TypedPrint | TypedAssert) and self._has(stmt):
            self.holds = False  # what it does to the array is not known
        return boxes, known

    def _branches(self, stmt: TypedIf, boxes: _Boxes, known: _Known, facts: _Facts, check: bool) -> tuple[_Boxes, _Known]:
        yes, no = (*facts, *self._facts(stmt.cond, True, facts)), (*facts, *self._facts(stmt.cond, False, facts))
        then, known_then = self.run(stmt.then, boxes, known, yes, check)
        other, known_other = self.run(stmt.otherwise, boxes, known, no, check)
        for box in then:
            if self._is_covered(box, other, no):
                boxes = self._with(boxes, box, facts)
        for box in other:
            if self._is_covered(box, then, yes):
                boxes = self._with(boxes, box, facts)
        return boxes, _joined(known_then, known_other)

    def _loop(self, over: Sequence[LoopVar], loop: TypedLoop, boxes: _Boxes, known: _Known, facts: _Facts, check: bool) -> tuple[_Boxes, _Known]:
        if not over:
            return self.run(loop.body, boxes, known, facts, check)
        var, rest = over[0], over[1:]
        span = _span(var)
        inside = facts if span is None else (*facts, span[1].minus(span[0]).minus(_1))
        entry = self._at_entry(loop, var, rest, known, inside)
        written: _Boxes = () if span is None else self._loop(rest, loop, (), entry, inside, False)[0]
        if check:
            before = boxes
            for box in written:
                assert span is not None
                at = AffineForm(((var, ONE),))
                before = self._with(before, self._over(box, var, (span[0], at) if var.step == ONE else (at.plus(_1), span[1]), inside), inside)
            self._loop(rest, loop, before, entry, inside, True)
        for box in written:
            assert span is not None
            boxes = self._with(boxes, self._over(box, var, span, facts), facts)
        return boxes, {variable: tuple(_beyond(one, var) for one in ranges) for variable, ranges in entry.items()}

    def _at_entry(self, loop: TypedLoop | TypedWhile, var: LoopVar | None, rest: Sequence[LoopVar], known: _Known, facts: _Facts) -> _Known:
        """What variables may be as an iteration begins, and after the last one."""
        changed = {s.var for s in walk(loop.body) if isinstance(s, SetVar | Accumulate)} & known.keys()
        if not changed:
            return known
        marks = {variable: next(self.entries) for variable in changed}
        start = {**known, **{v: (_Bounds((_0,), (_0,), mark),) for v, mark in marks.items()}}
        after = (self._loop(rest, loop, (), start, facts, False) if isinstance(loop, TypedLoop) else self.run(loop.body, (), start, facts, False))[1]
        result = dict(known)
        for variable, mark in marks.items():
            found, rises, falls = list(known[variable]), False, False
            for one in after[variable]:
                if one.entry == mark:
                    rises = rises or not any(not high.factors and surely_nonnegative(-high.constant) for high in one.highs)
                    falls = falls or not any(not low.factors and surely_nonnegative(low.constant) for low in one.lows)
                elif one.entry >= 0:
                    rises = falls = True
                else:
                    found.append(one if var is None else _beyond(one, var))
            result[variable] = _few(_Bounds(() if falls else one.lows, () if rises else one.highs, one.entry) for one in found)
        return result

    # -- boxes ----------------------------------------------------------------------------------------------------

    def _with(self, boxes: _Boxes, box: _Box | None, facts: _Facts) -> _Boxes:
        """The boxes and another one, put together where they are neighbours."""
        if box is None or self._is_covered(box, boxes, facts):
            return boxes
        for first, second in ((first, second) for other in boxes for first, second in ((other, box), (box, other))):
            together = self._together(first, second, facts)
            if together is not None and not self._is_covered(together, (first, second), facts):
                return self._with(tuple(b for b in boxes if not self._is_covered(b, (together,), facts)), together, facts)
        return (*boxes, box) if len(boxes) < _MOST_BOXES else boxes

    def _together(self, first: _Box, second: _Box, facts: _Facts) -> _Box | None:
        """Two boxes as one, where the second goes on along one axis where the first ends, or before. Elements between are in one of them also where one is empty."""
        differs = [axis for axis, (a, b) in enumerate(zip(first.axes, second.axes, strict=True)) if not (_same(a[0], b[0]) and _same(a[1], b[1]))]
        if len(differs) != 1:
            return None
        (low, end), (start, stop) = first.axes[differs[0]], second.axes[differs[0]]
        if not self._at_least(end, start, facts):
            return None
        return _Box(tuple((low, stop) if axis == differs[0] else ends for axis, ends in enumerate(first.axes)))

    def _is_covered(self, box: _Box, boxes: _Boxes, facts: _Facts) -> bool:
        """Whether all of a box is in one of others."""
        return any(
            all(self._at_least(low, a, facts) and self._at_least(b, end, facts) for (low, end), (a, b) in zip(box.axes, other.axes, strict=True)) for other in boxes
        )

    def _over(self, box: _Box, var: LoopVar, span: tuple[IndexForm, IndexForm], facts: _Facts) -> _Box | None:
        """What boxes of all values of an index have together; None where that is no box."""
        moving = [axis for axis, ends in enumerate(box.axes) if any(end.factor(var) != ZERO for end in ends)]
        if not moving:
            return box if self._at_least(span[1], span[0].plus(_1), facts) else None
        low, end = box.axes[moving[0]]
        factor, rest = low.factor(var), low.plus(AffineForm(((var, ONE),)), -low.factor(var))
        if len(moving) > 1 or end.factor(var) != factor or factor not in (ONE, -ONE) or not self._at_least(end, low.plus(_1), facts):
            return None
        ends = (span[0].plus(rest), span[1].plus(rest)) if factor == ONE else (rest.minus(span[1]).plus(_1), rest.minus(span[0]).plus(_1))
        return _Box(tuple(ends if axis == moving[0] else other for axis, other in enumerate(box.axes)))

    # -- reads ----------------------------------------------------------------------------------------------------

    def _reads(self, stmt: Stmt, boxes: _Boxes, known: _Known, facts: _Facts, check: bool) -> None:
        if not check:
            return
        places = [e.indices for expr in own_exprs(stmt) for e in walk_expr(expr) if isinstance(e, Element) and e.array.name == self.array.name]
        if isinstance(stmt, Store) and stmt.kind and stmt.array.name == self.array.name:
            places.append(stmt.indices)
        for indices in places:
            for place in product(*(self._ranges(index, known) for index in indices)):
                self.holds = self.holds and self._is_written(place, boxes, facts)

    def _is_written(self, place: Sequence[_Bounds], boxes: _Boxes, facts: _Facts) -> bool:
        """Whether an element with such indices is surely written, or no iteration writes any where it is not."""
        open_: list[list[Size]] = []
        for box in boxes:
            missing: list[Size] | None = []
            for index, (low, end), extent in zip(place, box.axes, self.array.shape, strict=True):
                lows, highs = (index.lows, index.highs) if index.entry < 0 else ((), ())
                inside = _is_zero(low) or any(self._at_least(one, low, facts) for one in lows)
                if not inside:
                    missing = None
                elif not (_is_size(end) and surely_nonnegative(end.constant - extent)) and not any(self._at_least(end, one.plus(_1), facts) for one in highs):
                    least = [_least(end.minus(one).minus(_1)) for one in highs]
                    missing = None if missing is None or not least or least[0] is None else [*missing, least[0]]
                if missing is None:
                    break
            if missing == []:
                return True
            if missing is not None:
                open_.append(missing)
        if any(all(map(self._all_or_none, missing)) for missing in open_):
            self.filled = True
            return True
        return False

    def _all_or_none(self, size: Size) -> bool:
        """Whether no iteration of any loop writes the array where a size is negative."""

        def never(stmts: tuple[Stmt, ...]) -> bool:
            return all(any(map(is_empty, s.vars)) or never(s.body) if isinstance(s, TypedLoop) else not self._writes(s) for s in stmts)

        def is_empty(var: LoopVar) -> bool:
            span = _span(var)
            least = _least(form_of(size + 1).minus(span[1].minus(span[0]))) if span is not None else None
            return least is not None and surely_nonnegative(least)

        return never(self.body)

    def _has(self, stmt: Stmt) -> bool:
        """Whether a statement that is not known here may have to do with the array."""
        return isinstance(stmt, ArrayAssign | ReduceLoop | TypedTurns) or any(isinstance(e, Element | Whole) and e.array.name == self.array.name for e in exprs_in((stmt,)))

    def _writes(self, stmt: Stmt) -> bool:
        return any(isinstance(s, Store) and s.array.name == self.array.name for s in walk((stmt,)))

    # -- numbers --------------------------------------------------------------------------------------------------

    def _at_least(self, a: IndexForm, b: IndexForm, facts: _Facts) -> bool:
        """Whether a is surely not below b."""
        gap = a.minus(b)
        return any(least is not None and surely_nonnegative(least) for least in (_least(gap), *(_least(gap.minus(fact)) for fact in facts)))

    def _facts(self, cond: Expr, holds: bool, facts: _Facts) -> _Facts:
        """Forms that are not negative where a condition holds, or does not."""
        if isinstance(cond, Apply) and cond.op == ("and" if holds else "or"):
            return tuple(fact for arg in cond.args for fact in self._facts(arg, holds, facts))
        if not isinstance(cond, Apply) or len(cond.args) != 2 or not cond.args[0].dtype.is_int:
            return ()
        a, b = affine(cond.args[0]), affine(cond.args[1])
        relation = cond.op if holds else {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}.get(cond.op)
        if a is None or b is None:
            return ()
        up, down = b.minus(a), a.minus(b)
        if relation == "ne":
            return tuple(one.minus(_1) for one in (up, down) if self._at_least(one, _0, facts))
        return {"lt": (up.minus(_1),), "le": (up,), "gt": (down.minus(_1),), "ge": (down,), "eq": (up, down)}.get(relation or "", ())

    def _point(self, index: Expr, known: _Known) -> IndexForm | None:
        """An index as a form; None where it may be several."""
        found = self._ranges(index, known)
        if len(found) != 1 or found[0].entry >= 0:
            return None
        return next((low for low in found[0].lows if any(_same(low, high) for high in found[0].highs)), None)

    def _ranges(self, expr: Expr, known: _Known) -> _Ranges:
        """What an index expression may be."""
        form = affine(expr)
        if form is not None:
            return (_Bounds((form,), (form,)),)
        if isinstance(expr, Local) and expr.dtype.is_int:
            return known.get(expr.var, _ANY)
        if isinstance(expr, Cast) and expr.dtype.is_int and expr.value.dtype.is_int and expr.dtype.bits >= expr.value.dtype.bits:
            return self._ranges(expr.value, known)
        if isinstance(expr, Apply) and expr.dtype.is_int and expr.op in ("add", "sub", "neg"):
            parts = [self._ranges(arg, known) for arg in expr.args]
            return _sums(parts[0], parts[1]) if expr.op == "add" else _sums(parts[0] if expr.op == "sub" else (_Bounds((_0,), (_0,)),), _negated(parts[-1]))
        found = interval(expr)
        if found is not None:
            return (_Bounds((form_of(found.low),), (form_of(found.high),)),)
        if isinstance(expr, Apply) and expr.dtype.is_int and expr.op in ("min", "max"):
            parts = [self._ranges(arg, known) for arg in expr.args]
            if all(len(part) == 1 and part[0].entry < 0 for part in parts):
                bounds = tuple(one for part in parts for one in (part[0].highs if expr.op == "min" else part[0].lows))
                return (_Bounds((), bounds) if expr.op == "min" else _Bounds(bounds, ()),)
        return _ANY


_0, _1 = form_of(0), form_of(1)


def _span(var: LoopVar) -> tuple[IndexForm, IndexForm] | None:
    """An index that goes in steps of one, up or down: its least value, and one above its largest, where it has any."""
    first, last = affine(var.lo), affine(var.hi)
    if first is None or last is None or var.step not in (ONE, -ONE):
        return None
    return (first, last) if var.step == ONE else (last.plus(_1), first.plus(_1))


def _ends(var: LoopVar) -> tuple[IndexForm | None, IndexForm | None]:
    """The least and the largest value that an index may have, where these are known."""
    step, first, last = var.step.constant, affine(var.lo), affine(var.hi)
    if step is not None and step != 0 and var.lo is not var.hi:
        low, high = (first, last if last is None else last.minus(_1)) if step > 0 else (last if last is None else last.plus(_1), first)
    else:
        low = high = None
    known_low, known_high = (None if size is None else form_of(size) for size in (var.low, var.high))
    return low or known_low, high or known_high


def _without(form: IndexForm, var: LoopVar, upper: bool) -> IndexForm | None:
    """The form at its largest, or at its least, over all values of an index."""
    factor = form.factor(var)
    if factor == ZERO:
        return form
    sign = sign_of(factor)
    place = None if sign is None else _ends(var)[1 if (sign > 0) == upper else 0]
    return None if place is None else form.plus(AffineForm(((var, ONE),)), -factor).plus(place, factor)


def _least(form: IndexForm) -> Size | None:
    """The least value of a form: each index is at an end of its range, inner ones first."""
    while form.factors:
        values = form.values
        inner = next((v for v in values if not any(v in bound_by(other) for other in values if other is not v)), None)
        found = None if inner is None else _without(form, inner, upper=False)
        if found is None:
            return None
        form = found
    return form.constant


def _beyond(one: _Bounds, var: LoopVar) -> _Bounds:
    """The numbers for any value of an index."""
    lows, highs = (tuple(f for form in forms if (f := _without(form, var, upper)) is not None) for forms, upper in ((one.lows, False), (one.highs, True)))
    return _Bounds(lows, highs, one.entry)


def _sums(first: _Ranges, second: _Ranges) -> _Ranges:
    if any(a.entry >= 0 and b.entry >= 0 for a in first for b in second):
        return _ANY
    return _few(
        _Bounds(tuple(x.plus(y) for x in a.lows for y in b.lows), tuple(x.plus(y) for x in a.highs for y in b.highs), max(a.entry, b.entry)) for a in first for b in second
    )


def _negated(ranges: _Ranges) -> _Ranges:
    if any(one.entry >= 0 for one in ranges):
        return _ANY
    return tuple(_Bounds(tuple(f.times(-ONE) for f in one.highs), tuple(f.times(-ONE) for f in one.lows)) for one in ranges)


def _few(ranges: Iterable[_Bounds]) -> _Ranges:
    found = tuple(dict.fromkeys(ranges))
    return found if len(found) <= _MOST_RANGES else _ANY


def _joined(one: _Known, other: _Known) -> _Known:
    """What variables may be after either of two branches."""
    return {variable: _few((*one[variable], *other[variable])) for variable in one.keys() & other.keys()}


def _same(a: IndexForm, b: IndexForm) -> bool:
    return _is_zero(a.minus(b))


def _is_zero(form: IndexForm) -> bool:
    return _is_size(form) and form.constant == ZERO


def _is_size(form: IndexForm) -> bool:
    return not form.factors
