"""Elements of tiles, and what tiles are made of: `@`, `transpose`, reductions.

In come array values inside loops; out come *tiles*, expressions with a shape, and elements of them. A tile is never stored. It is
a function of its indices: where one element is needed, `element` writes it down as a scalar expression, and puts the loops of the sums
and maxima inside it before the statement:

    out[i, j] = x[i, a:a+64] @ w[:, j]          var add1 = 0
                                          ->    for t2 in 0..min(64, n - a):
                                                    add1 += x[i, a + t2] * w[t2, j]
                                                out[i, j] = add1

A slice that reaches beyond its array is short, and so is what is computed from it: tiles have *limits* beside their extents. They bound
the loops of reductions, and elements beyond them are neither computed nor written. At the top of a kernel, outside loops, a tile gets memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.dtypes import DType, bool_, i64
from tilewright.base.record import replace
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.base.source import Span
from tilewright.tree.check.arrays import ArrayTable
from tilewright.tree.check.context import Context, Late, Skip
from tilewright.tree.check.infer import sum_dtype
from tilewright.tree.check.operations import Typing
from tilewright.tree.check.sizes import SizeChecker
from tilewright.tree.check.state import TileValue
from tilewright.tree.typed import (
    Accumulate,
    Apply,
    AxisIndex,
    Cast,
    Choose,
    Const,
    Element,
    Expr,
    Fold,
    IndexRef,
    Limits,
    Local,
    LoopVar,
    Picked,
    Product,
    SetVar,
    Shape,
    SizeValue,
    Store,
    TileLocal,
    Transpose,
    TypedIf,
    TypedLoop,
    TypedView,
    Variable,
    Whole,
)


class ElementBuilder:
    def __init__(self, context: Context, sizes: SizeChecker, typing: Typing, arrays: ArrayTable) -> None:
        self.context = context
        self.sizes = sizes
        self.typing = typing
        self.arrays = arrays

    # -- elements -----------------------------------------------------------------------------------------------------

    def element(self, value: Expr, indices: Sequence[Expr], span: Span) -> Expr:
        """One element of an array value, inside a loop; loops it needs are put before it."""
        if isinstance(value, Const):
            return replace(value, shape=())
        if isinstance(value, Apply):
            args = tuple(self.element(a, self.aligned(a.shape, indices, span), span) for a in value.args)
            return replace(value, args=args, shape=())
        if isinstance(value, Cast):
            return replace(value, value=self.element(value.value, indices, span))
        if isinstance(value, Transpose):
            return self.element(value.value, indices[::-1], span)
        if isinstance(value, Whole):
            self.sizes.learn(value.array, indices, span)
            return Element(value.array, tuple(indices), span=span)
        if isinstance(value, TypedView):
            places = list(value.starts)
            for axis, index in zip(value.kept, indices, strict=True):
                places[axis] = self.shifted(places[axis], index, span)
            return Element(value.array, tuple(places), span=span)
        if isinstance(value, AxisIndex):
            return indices[value.axis]
        if isinstance(value, Picked):
            return self.element(value.value, self.places(value, indices, span), span)
        if isinstance(value, Product):
            return self.product_element(value, indices)
        if isinstance(value, Fold):
            return self.fold_element(value, indices)
        if isinstance(value, TileLocal):
            return self.local_element(value, indices, span)
        return value

    def places(self, value: Picked, indices: Sequence[Expr], span: Span) -> tuple[Expr, ...]:
        """The indices of the element that a pick has there."""
        found: list[Expr] = []
        for axis in value.axes:
            if axis.index is not None:
                own = indices[axis.along : axis.along + len(axis.index.shape)]
                place = self.element(axis.index, self.aligned(axis.index.shape, own, span), span)
            else:
                place = indices[axis.along]
                if axis.step != 1:
                    place = self.typing.binary("*", place, self.typing.literal(axis.step, span), span)
                if axis.start is not None:
                    place = self.typing.binary("+", axis.start, place, span)
            found.append(place)
        return tuple(found)

    def aligned(self, shape: Shape, indices: Sequence[Expr], span: Span) -> tuple[Expr, ...]:
        """The indices of an operand that repeats along missing leading axes and along extents of 1."""
        last = indices[len(indices) - len(shape) :]
        return tuple(self.typing.literal(0, span) if extent == ONE else index for extent, index in zip(shape, last, strict=True))

    def shifted(self, start: Expr, index: Expr, span: Span) -> Expr:
        """`start + index`"""
        return index if is_zero(start) else self.typing.binary("+", start, index, span)

    def tile_value(self, tile: TileValue, span: Span) -> Expr:
        """A named tile as a value."""
        limits = tuple(tuple(bounds) for bounds in tile.limits)
        return TileLocal(tile.slot.var, tile.shape, limits, tile.held, tile.value, tile.versions, span=span)

    def local_element(self, value: TileLocal, indices: Sequence[Expr], span: Span) -> Expr:
        """One element of a named tile."""
        if value.held and self.at_hand(value.shape, indices):
            return Local(value.var, span=span)
        if value.value is not None and all(self.context.versions.get(var, 0) == count for var, count in value.versions):
            return self.element(value.value, indices, span)
        changed = [var for var, count in value.versions if self.context.versions.get(var, 0) != count]
        if changed:
            self.context.keep(value.var, arrays=all(isinstance(var, str) for var in changed))
            other = changed[0] if isinstance(changed[0], str) else changed[0].name
            raise self.context.fail("TW005", f"'{value.var.name}' is made of '{other}', which has changed since", span, f"use it before '{other}' changes")
        raise self.context.fail(
            "TW005", f"'{value.var.name}' changes in the loop and can only be used element by element", span,
            "for a product, reduction or transpose keep it in a shared array",
        )  # fmt: skip

    def at_hand(self, shape: Shape, indices: Sequence[Expr]) -> bool:
        """Whether it is the element that the spread body is at."""
        if self.context.spread is None:
            return False
        for place in range(1, len(shape) + 1):
            index = indices[-place]
            if shape[-place] != ONE and not (isinstance(index, IndexRef) and index.var is self.context.spread.at(-place)):
                return False
        return True

    def product_element(self, value: Product, indices: Sequence[Expr]) -> Expr:
        left, right, span = value.left, value.right, value.span
        batch = len(value.shape) - min(len(left.shape) - 1, 1) - min(len(right.shape) - 1, 1)
        first = batch + min(len(left.shape) - 1, 1)
        rows = (*self.aligned(left.shape[:-2], indices[:batch], span), *indices[batch:first])
        others, columns = self.aligned(right.shape[:-2], indices[:batch], span), indices[first:]
        bounds = dict.fromkeys((*limits_of(left)[-1], *limits_of(right)[-2:][0]))

        def term(at: tuple[Expr, ...]) -> Expr:
            return self.typing.binary("*", self.element(left, (*rows, *at), span), self.element(right, (*others, *at, *columns), span), span)

        return self.accumulated("add", value.dtype, [(left.shape[-1], tuple(bounds))], term, span)

    def fold_element(self, value: Fold, indices: Sequence[Expr]) -> Expr:
        inner, bounds = value.value, limits_of(value.value)
        kept = [axis for axis in range(len(inner.shape)) if axis not in value.axes]
        given = [indices[axis] for axis in kept] if value.keep else list(indices)
        domain = [(inner.shape[axis], bounds[axis]) for axis in value.axes]

        def term(at: tuple[Expr, ...]) -> Expr:
            place = dict(zip(kept, given, strict=True)) | dict(zip(value.axes, at, strict=True))
            return self.element(inner, [place[axis] for axis in range(len(inner.shape))], value.span)

        if value.kind in ("argmin", "argmax"):
            return self.best_place(value.kind, inner.dtype, domain[0], term, value.span)
        return self.accumulated(value.kind, value.dtype, domain, term, value.span)

    def index(self, extent: Size, bounds: Sequence[Expr], span: Span) -> LoopVar:
        """An index over the elements of an axis."""
        self.sizes.known(extent, span)
        lo, hi = self.typing.literal(0, span), SizeValue(extent, span=span)
        end: Expr = hi
        for bound in bounds:
            end = Apply("min", (end, bound), i64, "index", span=span)
        return LoopVar(self.context.fresh("t"), lo, end, ONE, ZERO, None if bounds else extent, ZERO, extent - 1)

    # -- loops before the statement at hand ---------------------------------------------------------------------------

    def accumulated(
        self, kind: str, dtype: DType, domain: Sequence[tuple[Size, tuple[Expr, ...]]], term: Callable[[tuple[Expr, ...]], Expr], span: Span
    ) -> Expr:  # fmt: skip
        """`kind` of the terms over the domain: a variable and a loop, put before the statement at hand."""
        var = Variable(self.context.fresh(kind), dtype, "", True)
        self.context.emit(SetVar(var, Const(identity(kind, dtype), dtype, span=span), True, span=span))
        indices = tuple(self.index(extent, bounds, span) for extent, bounds in domain)
        with self.context.inside(indices) as body:
            value = self.typing.convert(term(tuple(IndexRef(i, span=span) for i in indices)), dtype)
        self.context.emit(TypedLoop(indices, (*body, Accumulate(var, kind, value, span=span)), asked="no", span=span))
        return Local(var, span=span)

    def best_place(
        self, kind: str, dtype: DType, axis: tuple[Size, tuple[Expr, ...]], term: Callable[[tuple[Expr, ...]], Expr], span: Span
    ) -> Expr:  # fmt: skip
        """argmin or argmax along one axis: the first of the best, and a NaN is better than all."""
        best, place = Variable(self.context.fresh("best"), dtype, "", True), Variable(self.context.fresh("place"), i64, "", True)
        start = dtype.min_value if kind == "argmax" else dtype.max_value
        self.context.emit(SetVar(best, Const(start, dtype, span=span), True, span=span))
        self.context.emit(SetVar(place, Const(0, i64, span=span), True, span=span))
        index = self.index(*axis, span)
        with self.context.inside((index,)) as body:
            value = Variable(self.context.fresh("value"), dtype)
            self.context.emit(SetVar(value, self.typing.convert(term((IndexRef(index, span=span),)), dtype), True, span=span))
            better: Expr = Apply("gt" if kind == "argmax" else "lt", (Local(value), Local(best)), bool_)
            if dtype.is_float:
                known = Apply("not", (Apply("isnan", (Local(best),), bool_),), bool_)
                better = Apply("or", (better, Apply("and", (Apply("isnan", (Local(value),), bool_), known), bool_)), bool_)
            won = Variable(self.context.fresh("won"), bool_)
            self.context.emit(SetVar(won, better, True, span=span))
            self.context.emit(SetVar(place, Choose(Local(won), IndexRef(index), Local(place), i64), span=span))
            self.context.emit(SetVar(best, Choose(Local(won), Local(value), Local(best), dtype), span=span))
        self.context.emit(TypedLoop((index,), tuple(body), asked="no", span=span))
        return Local(place, span=span)

    def computed(self, name: str, value: Expr, span: Span) -> Expr:
        """At the top of a kernel a tile gets memory of its own."""
        array = self.arrays.temporary(name, value.dtype, value.shape)
        indices = tuple(self.index(extent, bounds, span) for extent, bounds in zip(value.shape, limits_of(value), strict=True))
        at = tuple(IndexRef(i, span=span) for i in indices)
        with self.context.inside(indices) as body:
            element = self.element(value, at, span)
        self.context.emit(TypedLoop(indices, (*body, Store(array, at, element, span=span)), asked="auto", span=span))
        return Whole(array, span=span)

    # -- operations ---------------------------------------------------------------------------------------------------

    def tile_function(self, name: str, args: Sequence[Expr], span: Span) -> Expr:
        """dot, transpose, row_max and the like."""
        if name == "matmul":
            return self.matrix_product("matmul()", args[0], args[1], span)
        if name == "dot":
            for value in args:
                if len(value.shape) != 1:
                    raise self.context.fail("TW003", f"dot() takes two vectors, got ranks {len(args[0].shape)} and {len(args[1].shape)}", span)
            return self.matrix_product("dot()", args[0], args[1], span)
        value = self.typing.settled(args[0])
        if not value.shape:
            raise self.context.fail("TW003", f"{name}() takes an array or a slice, got a number ({value.dtype})", span)
        if name == "transpose":
            turned = value.value if isinstance(value, Transpose) else Transpose(value, value.shape[::-1], span=span)
            return turned if self.context.loops else self.computed("transpose", turned, span)
        kind = {"row_max": "max", "row_min": "min", "row_sum": "add"}[name]
        if value.dtype.is_complex and kind != "add":
            self.typing.refuse_complex(name, span)
        value = self.typing.convert(value, sum_dtype(value.dtype, kind))
        return self.tile_reduction(kind, value, (len(value.shape) - 1,), True, span)

    def matrix_product(self, what: str, a: Expr, b: Expr, span: Span) -> Expr:
        """`a @ b`"""
        ranks = len(a.shape), len(b.shape)
        if not all(ranks):
            raise self.context.fail("TW003", f"{what} takes vectors and matrices, got ranks {ranks[0]} and {ranks[1]}", span)
        met = self.typing.meet(what, [a, b], span)
        dtype = self.context.default_float if met[1] == "float" else sum_dtype(met[0], "add")
        a, b = self.typing.convert(a, dtype), self.typing.convert(b, dtype)
        along = b.shape[-2:][0]
        if a.shape[-1] != along:
            self.sizes.make_equal(a.shape[-1], along, span)
        batch = self.sizes.broadcast([a.shape[:-2], b.shape[:-2]], span)
        value = Product(a, b, dtype, (*batch, *a.shape[-2:-1], *(b.shape[-1:] if ranks[1] > 1 else ())), span=span)
        if not value.shape:
            return self.element(value, (), span)
        return value if self.context.loops else self.computed("product", value, span)

    def tile_reduction(self, kind: str, value: Expr, axes: tuple[int, ...], keep: bool, span: Span) -> Expr:
        """A reduction of an array value inside a loop."""
        if kind in ("argmin", "argmax") and len(axes) != 1:
            raise self.context.fail("TW005", f"{kind} over several axes inside a loop", span, "give the axis, or loop over the elements")
        shape = tuple(ONE if axis in axes else s for axis, s in enumerate(value.shape) if keep or axis not in axes)
        fold = Fold(kind, value, axes, keep, sum_dtype(value.dtype, kind), shape, span=span)
        if not shape:
            return self.element(fold, (), span)
        return fold if self.context.loops else self.computed(kind, fold, span)

    def late(self, cond: Expr, then: Late, otherwise: Late, span: Span) -> Expr:
        """A choice whose sides need statements."""
        chosen = self.typing.select(cond, then[0], otherwise[0], span, lazy=True)
        if chosen.shape:
            self.context.out += (*then[1], *otherwise[1])
            return chosen
        dtype = self.typing.settled(chosen).dtype
        var = Variable(self.context.fresh("choice"), dtype, "", True)
        self.context.emit(SetVar(var, self.typing.convert(self.typing.literal(0, span), dtype), True, span=span))
        sides = [(*before, SetVar(var, self.typing.convert(value, dtype), span=span)) for value, before in (then, otherwise)]
        self.context.emit(TypedIf(self.typing.logical(cond, span), sides[0], sides[1], span=span))
        return Local(var, span=span)

    # -- values outside loops -----------------------------------------------------------------------------------------

    def pick(self, value: Expr, indices: tuple[Expr, ...], span: Span) -> Expr:
        """One element of an array value that has not been computed."""
        if not value.shape:
            return value
        if isinstance(value, Whole):
            aligned = self.aligned(value.shape, indices, span)
            self.sizes.learn(value.array, aligned, span)
            return Element(value.array, aligned, span=span)
        if isinstance(value, Apply):
            return replace(value, args=tuple(self.pick(a, indices, span) for a in value.args), shape=())
        if isinstance(value, Cast):
            return replace(value, value=self.pick(value.value, indices, span))
        if isinstance(value, Picked):
            return self.pick(value.value, self.places(value, self.aligned(value.shape, indices, span), span), span)
        raise Skip


def identity(kind: str, dtype: DType) -> int | float | bool:
    """What changes nothing when combined."""
    if kind in ("and", "or"):
        return kind == "and"
    if kind in ("min", "max"):
        return dtype.max_value if kind == "min" else dtype.min_value
    number = int(kind == "mul")
    return float(number) if dtype.is_float else number


def is_zero(expr: Expr) -> bool:
    return isinstance(expr, Const) and expr.value == 0


def every(bound: Expr, step: int) -> Expr:
    """How many of so many elements every `step`th are."""
    if step == 1:
        return bound
    more = Apply("add", (bound, Const(step - 1, i64)), i64, "index", span=bound.span)
    return Apply("floordiv", (more, Const(step, i64)), i64, "index", span=bound.span)


def limits_of(value: Expr) -> Limits:
    """For each axis, what bounds the elements the value has."""
    if isinstance(value, TypedView | TileLocal):
        return value.limits
    if isinstance(value, Transpose):
        return limits_of(value.value)[::-1]
    if isinstance(value, Picked):
        found: list[tuple[Expr, ...]] = [() for _ in value.shape]
        for axis, bounds in zip(value.axes, limits_of(value.value), strict=True):
            if axis.index is None:
                found[axis.along] = tuple(every(bound, axis.step) for bound in bounds)
        return tuple(found)
    if isinstance(value, Product):
        left, right = limits_of(value.left), limits_of(value.right)
        ends = left[-2:-1] + (right[-1:] if len(right) > 1 else ())
        batch: list[dict[Expr, None]] = [{} for _ in range(len(value.shape) - len(ends))]
        for part, own in ((value.left, left), (value.right, right)):
            for place, bounds in enumerate(reversed(own[:-2]), 1):
                if part.shape[-2 - place] != ONE:
                    batch[-place].update(dict.fromkeys(bounds))
        return tuple(map(tuple, batch)) + ends
    if isinstance(value, Fold):
        inner = limits_of(value.value)
        return tuple(() if axis in value.axes else inner[axis] for axis in range(len(inner)) if value.keep or axis not in value.axes)
    parts = value.args if isinstance(value, Apply) else (value.value,) if isinstance(value, Cast) else ()
    limits: list[dict[Expr, None]] = [{} for _ in value.shape]
    for part in parts:
        for place, bounds in enumerate(reversed(limits_of(part)), 1):
            if part.shape[-place] != ONE:
                limits[-place].update(dict.fromkeys(bounds))
    return tuple(map(tuple, limits))
