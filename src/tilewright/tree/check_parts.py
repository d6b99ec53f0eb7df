"""Checking parts of arrays as values inside loops, and what is made of them: slices, `@`, `transpose`, reductions.

In come syntax expressions and array values; out come *tiles*, expressions with a shape, and elements of them. A tile is never stored. It is
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
from dataclasses import dataclass, field, replace

from tilewright.base.dtypes import DType, bool_, i64
from tilewright.base.errors import Diagnostics
from tilewright.base.sizes import ONE, ZERO, Size, minimum
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.bounds import affine, clamped, interval, surely_negative, surely_nonnegative
from tilewright.tree.check_arrays import ArrayChecker
from tilewright.tree.check_expr import Late
from tilewright.tree.check_state import State
from tilewright.tree.infer import Skip, size_of, sum_dtype
from tilewright.tree.typed import (
    Accumulate,
    Apply,
    ArgSpec,
    ArrayInfo,
    Cast,
    Choose,
    Const,
    Element,
    Expr,
    Fold,
    If,
    IndexRef,
    Limits,
    Local,
    Loop,
    LoopVar,
    Product,
    SetVar,
    Shape,
    SizeValue,
    Store,
    TileLocal,
    Transpose,
    Variable,
    View,
    Whole,
    row_major,
)
from tilewright.tree.typed_text import show_expr


@dataclass
class Spread:
    """A loop body that runs for every element of tiles of this shape; axes of extent 1 have no index."""

    shape: Shape
    vars: tuple[LoopVar | None, ...]
    depth: int
    """Loops around it."""
    guards: list[tuple[Expr, ...]] = field(default_factory=list)
    """What each statement about tiles is guarded by."""
    once: bool = False
    """It has stores that do not move along every axis."""

    def at(self, place: int) -> LoopVar | None:
        """The index of an axis, counted from the last as -1."""
        return self.vars[place] if -place <= len(self.vars) else None


class PartChecker(ArrayChecker):
    def __init__(self, function: syntax.Function, args: Sequence[ArgSpec], state: State, sink: Diagnostics) -> None:
        super().__init__(function, args, state, sink)
        self.fors: list[int] = []
        """The loops around, by the identity of their syntax nodes."""
        self.spread: Spread | None = None
        self.spread_key = 0
        self.versions: dict[Variable | str, int] = {}
        """How often variables, and arrays by name, have been assigned so far."""
        self.made = 0
        """Names given so far."""

    # -- parts of arrays --------------------------------------------------------------------------------------------

    def view(self, array: ArrayInfo, lead: tuple[Expr, ...], nodes: Sequence[syntax.Expr], span: Span) -> Expr:
        starts, kept, shape, limits = list(lead), [], [], []
        if len(nodes) + len(lead) > array.rank:
            plural = "index" if len(nodes) == 1 else "indices"
            raise self.fail("TW003", f"'{array.name}' has rank {array.rank - len(lead)} but is indexed with {len(nodes)} {plural}", span)
        for axis in range(len(lead), array.rank):
            node = nodes[axis - len(lead)] if axis - len(lead) < len(nodes) else syntax.Slice(None, None, span=span)
            if not isinstance(node, syntax.Slice):
                starts.append(self.index_value(array.name, array.shape[axis], node))
                self.learn_axis(array, axis, starts[-1], span)
                continue
            start, extent, bounds = self.section(array, axis, node)
            starts.append(start)
            kept.append(axis)
            shape.append(extent)
            limits.append(bounds)
        value = View(array, tuple(starts), tuple(kept), tuple(shape), tuple(limits), span=span)
        return value if self.loops else self.computed("part", value, span)

    def learn_axis(self, array: ArrayInfo, axis: int, value: Expr, span: Span) -> None:
        if array.role == "input":
            self.bind(array, axis, value, span)
        else:
            self.bind_made(array, axis, value, span)
        if not self.guarded:
            self.stay_inside(array, axis, value, span)

    def section(self, array: ArrayInfo, axis: int, node: syntax.Slice) -> tuple[Expr, Size, tuple[Expr, ...]]:
        """A slice of an axis: its first element, its extent, and what limits it."""
        start, stop, length = self.edges(array.name, array.shape[axis], node)
        self.bind_section(array, axis, start, length)
        self.bind_end(array, axis, stop)
        if node.lo is None and length is None:
            self.bind_section(array, axis, self.binary("-", stop, self.literal(1, node.span), node.span), None)  # x[:i+1]
        if self.implicit(array) and length is not None:
            return start, length, ()
        return self.part(array.name, array.shape[axis], node, axis)

    def edges(self, name: str, whole: Size, node: syntax.Slice) -> tuple[Expr, Expr, Size | None]:
        """First and last (exclusive) element of a slice, and its length where that is a size."""
        start = self.literal(0, node.span) if node.lo is None else self.index_value(name, whole, node.lo)
        stop = SizeValue(whole, span=node.span) if node.hi is None else self.index_value(name, whole, node.hi)
        first, last = affine(start), affine(stop)
        if first is None or last is None or dict(first.terms) != dict(last.terms):
            return start, stop, None
        return start, stop, last.offset - first.offset

    def part(self, name: str, whole: Size, node: syntax.Slice, axis: int) -> tuple[Expr, Size, tuple[Expr, ...]]:
        start, stop, length = self.edges(name, whole, node)
        text = f"the slice {_section(node, start, stop)} of '{name}'"
        reach = interval(start)
        if reach is not None and surely_negative(reach[0]) and not self.guarded:
            raise self.fail("TW013", f"{text} starts at {reach[0]} on axis {axis}", node.span)
        if reach is not None and not surely_nonnegative(reach[0]) and not self.guarded:
            message = f"{text} starts at {{right}} on axis {axis}"
            self.require(ZERO, "le", self.when_reached(reach[0], reach[0]), message, node.span, "TW013")
        if length is not None and length.constant is not None and length.constant <= 0:
            raise self.fail("TW013", f"{text} is empty", node.span)
        if not self.loops:
            return start, self.top_length(text, whole, start, stop, node.span), ()
        room = self.binary("-", SizeValue(whole, span=node.span), start, node.span)
        if length is None:
            # As long as its loop makes it, and never longer than the axis.
            own = self.binary("-", stop, start, node.span)
            return start, whole, (own,) if own == room else (own, room)
        if node.hi is None or (reach is not None and surely_nonnegative(whole - reach[1] - length)):
            return start, clamped(length), ()
        return start, clamped(length), (room,)

    def part_of_tile(self, name: str, value: Expr, nodes: Sequence[syntax.Expr], span: Span) -> Expr:
        if isinstance(value, View):
            return self.part_of(name, value, nodes, span)
        values = self.index_values(name, value.shape, nodes, span)
        for axis, index in enumerate(values):
            self.stay_in_tile(name, axis, value.shape[axis], index, nodes[axis].span)
        return self.element(value, values, span)

    def part_of(self, name: str, value: View, nodes: Sequence[syntax.Expr], span: Span) -> Expr:
        """A slice of a slice, or some of its indices."""
        if len(nodes) > len(value.kept):
            raise self.fail("TW003", f"'{name}' has rank {len(value.kept)} but is indexed with {len(nodes)} indices", span)
        starts, kept, shape, limits = list(value.starts), [], [], []
        for position, axis in enumerate(value.kept):
            node = nodes[position] if position < len(nodes) else syntax.Slice(None, None, span=span)
            extent, bounds = value.shape[position], value.limits[position]
            whole = _is_zero(starts[axis]) and extent == value.array.shape[axis]
            if not isinstance(node, syntax.Slice):
                index = self.index_value(name, extent, node)
                if whole:
                    self.learn_axis(value.array, axis, index, span)
                else:
                    self.stay_in_tile(name, position, extent, index, node.span)
                starts[axis] = self.shifted(starts[axis], index, span)
                continue
            if node.lo is not None or node.hi is not None:
                if whole:
                    self.bind_section(value.array, axis, *self.edges(name, extent, node)[::2])
                start, extent, own = self.part(name, extent, node, position)
                starts[axis] = self.shifted(starts[axis], start, span)
                bounds = (*own, *(self.binary("-", bound, start, span) for bound in bounds))
            kept.append(axis)
            shape.append(extent)
            limits.append(bounds)
        if not kept:
            return Element(value.array, tuple(starts), span=span)
        return replace(value, starts=tuple(starts), kept=tuple(kept), shape=tuple(shape), limits=tuple(limits), span=span)

    def stay_in_tile(self, name: str, axis: int, extent: Size, index: Expr, span: Span) -> None:
        """As `stay_inside`, for an element of a tile."""
        reach = interval(index)
        if reach is None or self.guarded:
            return
        text = f"index {show_expr(index)} of '{name}'"
        if surely_negative(extent - reach[1] - 1):
            raise self.fail("TW013", f"{text} reaches {reach[1]}, but axis {axis} has extent {extent}", span)
        if not surely_nonnegative(extent - reach[1] - 1):
            message = f"{text} reaches {{left}}, but axis {axis} has extent {{right}}"
            self.require(self.when_reached(reach[1] + 1, extent - reach[1] - 1) - 1, "lt", extent, message, span, "TW013")
        if surely_negative(reach[0]):
            raise self.fail("TW013", f"{text} goes down to {reach[0]} on axis {axis}", span)

    def top_length(self, text: str, whole: Size, start: Expr, stop: Expr, span: Span) -> Size:
        """The length of a slice outside loops: a size that no call makes larger than the array."""
        first, last = size_of(start), size_of(stop)
        if first is None or last is None:
            raise self.fail("TW014", f"{text} is not made of sizes of the inputs", span)
        return clamped(last - first if surely_nonnegative(whole - last) else minimum(last, whole) - first)

    def bind_section(self, array: ArrayInfo, axis: int, start: Expr, length: Size | None) -> None:
        """Slices of length k that begin at i in 0..n step k walk over an axis of extent n, also where i ends with the block of another
        such index (0..block + k) or before (0..min(…, n)). Others may: in ZynML, unless something else says what n is."""
        linear = affine(start)
        bare = linear.bare if linear is not None else None
        last = _walked(bare) if bare is not None and bare.first == ZERO else None
        name = self.raw_name(last) if last is not None else None
        if name is None or bare is None:
            return
        if array.role != "input":
            if bare.step == length and last is not None:
                self.bind_size(array, axis, last, start.span)
            return
        own = f"{array.name}${axis}"
        if bare.step == length and not self.guarded:
            self.equal(own, name)
        elif not self.is_python:
            self.state.equations.perhaps[name, Size.of(own)] = None

    def bind_end(self, array: ArrayInfo, axis: int, stop: Expr) -> None:
        """ZynML: `x[i, a:n]` says that n is the extent, unless something else says what it is."""
        size = size_of(stop)
        name = self.raw_name(size) if size is not None else None
        if name is not None and array.role == "input" and not self.is_python:
            self.state.equations.perhaps[name, Size.of(f"{array.name}${axis}")] = None
            self.state.equations.ranges.add(name)

    # -- operations -------------------------------------------------------------------------------------------------

    def tile_function(self, name: str, args: Sequence[Expr], span: Span) -> Expr:
        if name == "matmul":
            return self.matrix_product("matmul()", args[0], args[1], span)
        if name == "dot":
            for value in args:
                if len(value.shape) != 1:
                    raise self.fail("TW003", f"dot() takes two vectors, got ranks {len(args[0].shape)} and {len(args[1].shape)}", span)
            return self.matrix_product("dot()", args[0], args[1], span)
        value = self.settled(args[0])
        if not value.shape:
            raise self.fail("TW003", f"{name}() takes an array or a slice, got a number ({value.dtype})", span)
        if name == "transpose":
            turned = value.value if isinstance(value, Transpose) else Transpose(value, value.shape[::-1], span=span)
            return turned if self.loops else self.computed("transpose", turned, span)
        kind = {"row_max": "max", "row_min": "min", "row_sum": "add"}[name]
        value = self.convert(value, sum_dtype(value.dtype, kind))
        return self.tile_reduction(kind, value, (len(value.shape) - 1,), True, span)

    def matrix_product(self, what: str, a: Expr, b: Expr, span: Span) -> Expr:
        ranks = len(a.shape), len(b.shape)
        if not all(1 <= rank <= 2 for rank in ranks):
            raise self.fail("TW003", f"{what} takes vectors and matrices, got ranks {ranks[0]} and {ranks[1]}", span)
        met = self.meet(what, [a, b], span)
        dtype = self.default_float if met[1] == "float" else sum_dtype(met[0], "add")
        a, b = self.convert(a, dtype), self.convert(b, dtype)
        if a.shape[-1] != b.shape[0]:
            self.make_equal(a.shape[-1], b.shape[0], span)
        value = Product(a, b, dtype, (*a.shape[:-1], *b.shape[1:]), span=span)
        if not value.shape:
            return self.element(value, (), span)
        return value if self.loops else self.computed("product", value, span)

    def tile_reduction(self, kind: str, value: Expr, axes: tuple[int, ...], keep: bool, span: Span) -> Expr:
        if kind in ("argmin", "argmax") and len(axes) != 1:
            raise self.fail("TW005", f"{kind} over several axes inside a loop", span, "give the axis, or loop over the elements")
        shape = tuple(ONE if axis in axes else s for axis, s in enumerate(value.shape) if keep or axis not in axes)
        found = Fold(kind, value, axes, keep, sum_dtype(value.dtype, kind), shape, span=span)
        if not shape:
            return self.element(found, (), span)
        return found if self.loops else self.computed(kind, found, span)

    def filled(self, maker: str, node: syntax.Call) -> Expr:
        if maker not in ("zeros", "ones", "full"):
            raise self.fail("TW005", f"{maker}() in a loop makes nothing", node.span, "write zeros(…) or full(…), or make the array at the top")
        named = {a.keyword: a.value for a in node.args if a.keyword is not None}
        given = [a.value for a in node.args if a.keyword is None]
        if given and self.extents(given[0]) is None and maker != "full" and all(self.counts(n) for n in given):
            # zeros(64, d)
            shape = tuple(s for n in given for s in self.shape_argument(n))
            given = []
        else:
            node_of_shape = given.pop(0) if given else named.pop("shape", None)
            if node_of_shape is None:
                raise self.fail("TW016", f"{maker}() takes a shape", node.span, f"write {maker}(64, 64)")
            shape = self.shape_argument(node_of_shape)
        value: Expr = self.literal(float(maker == "ones"), node.span)
        if maker == "full":
            filling = given.pop(0) if given else named.pop("value", None)
            if filling is None:
                raise self.fail("TW016", "full() takes shape, value", node.span)
            value = self.expr(filling)
        wanted = given.pop(0) if given else named.pop("dtype", None)
        if given or named:
            raise self.fail("TW016", f"{maker}() takes a shape and a dtype, got {len(node.args)} arguments", node.span)
        if wanted is not None:
            value = self.assignable(value, self.dtype_argument(wanted), f"{maker}()", node.span)
        if value.shape or not isinstance(value, Const):
            raise self.fail("TW005", f"{maker}() in a loop takes a constant", node.span, "add the value to zeros(…)")
        return replace(value, shape=shape)

    def counts(self, node: syntax.Expr) -> bool:
        """Whether the argument is an extent, not a dtype."""
        if isinstance(node, syntax.Attribute) and node.name == "dtype":
            return False
        try:
            self.dtype_argument(node)
        except Skip:
            self.sink.items.pop()
            return True
        return False

    # -- limits -----------------------------------------------------------------------------------------------------

    def limits(self, value: Expr) -> Limits:
        """For each axis, what bounds the elements the value has."""
        if isinstance(value, View | TileLocal):
            return value.limits
        if isinstance(value, Transpose):
            return self.limits(value.value)[::-1]
        if isinstance(value, Product):
            return self.limits(value.left)[:-1] + self.limits(value.right)[1:]
        if isinstance(value, Fold):
            inner = self.limits(value.value)
            return tuple(() if axis in value.axes else inner[axis] for axis in range(len(inner)) if value.keep or axis not in value.axes)
        parts = value.args if isinstance(value, Apply) else (value.value,) if isinstance(value, Cast) else ()
        found: list[dict[Expr, None]] = [{} for _ in value.shape]
        for part in parts:
            for place, bounds in enumerate(reversed(self.limits(part)), 1):
                if part.shape[-place] != ONE:
                    found[-place].update(dict.fromkeys(bounds))
        return tuple(map(tuple, found))

    # -- elements ---------------------------------------------------------------------------------------------------

    def element(self, value: Expr, indices: Sequence[Expr], span: Span) -> Expr:
        if isinstance(value, Const):
            return replace(value, shape=())
        if isinstance(value, Apply):
            args = tuple(self.element(a, _aligned(self, a.shape, indices, span), span) for a in value.args)
            return replace(value, args=args, shape=())
        if isinstance(value, Cast):
            return replace(value, value=self.element(value.value, indices, span))
        if isinstance(value, Transpose):
            return self.element(value.value, indices[::-1], span)
        if isinstance(value, Whole):
            self.learn(value.array, indices, span)
            return Element(value.array, tuple(indices), span=span)
        if isinstance(value, View):
            places = list(value.starts)
            for axis, index in zip(value.kept, indices, strict=True):
                places[axis] = self.shifted(places[axis], index, span)
            return Element(value.array, tuple(places), span=span)
        if isinstance(value, Product):
            return self.product_element(value, indices)
        if isinstance(value, Fold):
            return self.fold_element(value, indices)
        if isinstance(value, TileLocal):
            return self.local_element(value, indices, span)
        return value

    def shifted(self, start: Expr, index: Expr, span: Span) -> Expr:
        return index if _is_zero(start) else self.binary("+", start, index, span)

    def local_element(self, value: TileLocal, indices: Sequence[Expr], span: Span) -> Expr:
        if value.held and self.at_hand(value.shape, indices):
            return Local(value.var, span=span)
        if value.value is not None and all(self.versions.get(var, 0) == count for var, count in value.versions):
            return self.element(value.value, indices, span)
        changed = [var for var, count in value.versions if self.versions.get(var, 0) != count]
        if changed:
            other = changed[0] if isinstance(changed[0], str) else changed[0].name
            raise self.fail("TW005", f"'{value.var.name}' is made of '{other}', which has changed since", span, f"use it before '{other}' changes")
        raise self.fail(
            "TW005", f"'{value.var.name}' changes in the loop and can only be used element by element", span,
            "for a product, reduction or transpose keep it in a shared array",
        )  # fmt: skip

    def at_hand(self, shape: Shape, indices: Sequence[Expr]) -> bool:
        """Whether it is the element that the spread body is at."""
        if self.spread is None:
            return False
        for place in range(1, len(shape) + 1):
            index = indices[-place]
            if shape[-place] != ONE and not (isinstance(index, IndexRef) and index.var is self.spread.at(-place)):
                return False
        return True

    def product_element(self, value: Product, indices: Sequence[Expr]) -> Expr:
        left, right, span = value.left, value.right, value.span
        rows, columns = indices[: len(left.shape) - 1], indices[len(left.shape) - 1 :]
        bounds = dict.fromkeys((*self.limits(left)[-1], *self.limits(right)[0]))

        def term(at: tuple[Expr, ...]) -> Expr:
            return self.binary("*", self.element(left, (*rows, *at), span), self.element(right, (*at, *columns), span), span)

        return self.accumulated("add", value.dtype, [(left.shape[-1], tuple(bounds))], term, span)

    def fold_element(self, value: Fold, indices: Sequence[Expr]) -> Expr:
        inner, bounds = value.value, self.limits(value.value)
        kept = [axis for axis in range(len(inner.shape)) if axis not in value.axes]
        given = [indices[axis] for axis in kept] if value.keep else list(indices)
        domain = [(inner.shape[axis], bounds[axis]) for axis in value.axes]

        def term(at: tuple[Expr, ...]) -> Expr:
            place = dict(zip(kept, given, strict=True)) | dict(zip(value.axes, at, strict=True))
            return self.element(inner, [place[axis] for axis in range(len(inner.shape))], value.span)

        if value.kind in ("argmin", "argmax"):
            return self.found_place(value.kind, inner.dtype, domain[0], term, value.span)
        return self.accumulated(value.kind, value.dtype, domain, term, value.span)

    def index(self, extent: Size, bounds: Sequence[Expr], span: Span) -> LoopVar:
        """An index over the elements of an axis."""
        lo, hi = self.literal(0, span), SizeValue(extent, span=span)
        end: Expr = hi
        for bound in bounds:
            end = Apply("min", (end, bound), i64, "index", span=span)
        return LoopVar(self.fresh("t"), lo, end, ONE, ZERO, None if bounds else extent, ZERO, extent - 1)

    def fresh(self, name: str) -> str:
        self.made += 1
        return f"{name}{self.made}"

    def accumulated(
        self, kind: str, dtype: DType, domain: Sequence[tuple[Size, tuple[Expr, ...]]], term: Callable[[tuple[Expr, ...]], Expr], span: Span
    ) -> Expr:  # fmt: skip
        """`kind` of the terms over the domain: a variable and a loop, put before the statement at hand."""
        var = Variable(self.fresh(kind), dtype, "", True)
        self.out.append(SetVar(var, Const(_identity(kind, dtype), dtype, span=span), True, span=span))
        indices = tuple(self.index(extent, bounds, span) for extent, bounds in domain)
        before, self.out = self.out, []
        self.loops.extend(indices)
        value = self.convert(term(tuple(IndexRef(i, span=span) for i in indices)), dtype)
        body, self.out = (*self.out, Accumulate(var, kind, value, span=span)), before
        del self.loops[len(self.loops) - len(indices) :]
        self.out.append(Loop(indices, body, asked="no", span=span))
        return Local(var, span=span)

    def found_place(
        self, kind: str, dtype: DType, axis: tuple[Size, tuple[Expr, ...]], term: Callable[[tuple[Expr, ...]], Expr], span: Span
    ) -> Expr:  # fmt: skip
        """argmin or argmax along one axis: the first of the best, and a NaN is better than all."""
        best, place = Variable(self.fresh("best"), dtype, "", True), Variable(self.fresh("place"), i64, "", True)
        start = dtype.min_value if kind == "argmax" else dtype.max_value
        self.out.append(SetVar(best, Const(start, dtype, span=span), True, span=span))
        self.out.append(SetVar(place, Const(0, i64, span=span), True, span=span))
        index = self.index(*axis, span)
        before, self.out = self.out, []
        self.loops.append(index)
        value = Variable(self.fresh("value"), dtype)
        self.out.append(SetVar(value, self.convert(term((IndexRef(index, span=span),)), dtype), True, span=span))
        better: Expr = Apply("gt" if kind == "argmax" else "lt", (Local(value), Local(best)), bool_)
        if dtype.is_float:
            known = Apply("not", (Apply("isnan", (Local(best),), bool_),), bool_)
            better = Apply("or", (better, Apply("and", (Apply("isnan", (Local(value),), bool_), known), bool_)), bool_)
        won = Variable(self.fresh("won"), bool_)
        self.out.append(SetVar(won, better, True, span=span))
        self.out.append(SetVar(place, Choose(Local(won), IndexRef(index), Local(place), i64), span=span))
        self.out.append(SetVar(best, Choose(Local(won), Local(value), Local(best), dtype), span=span))
        body, self.out = tuple(self.out), before
        self.loops.pop()
        self.out.append(Loop((index,), body, asked="no", span=span))
        return Local(place, span=span)

    def computed(self, name: str, value: Expr, span: Span) -> Expr:
        """At the top of a kernel a tile gets memory of its own."""
        array = row_major(f"{name}${len(self.arrays)}", value.dtype, value.shape, "scratch", self.alignment())
        self.arrays[array.name] = array
        self.temporaries.add(array.name)
        self.written.add(array.name)
        indices = tuple(self.index(extent, bounds, span) for extent, bounds in zip(value.shape, self.limits(value), strict=True))
        before, self.out = self.out, []
        self.loops.extend(indices)
        at = tuple(IndexRef(i, span=span) for i in indices)
        found = self.element(value, at, span)
        body, self.out = (*self.out, Store(array, at, found, span=span)), before
        del self.loops[len(self.loops) - len(indices) :]
        self.out.append(Loop(indices, body, asked="auto", span=span))
        return Whole(array, span=span)

    # -- what is evaluated only under a condition ---------------------------------------------------------------------

    def aside(self, node: syntax.Expr) -> Late:
        before, self.out = self.out, []
        self.guarded += 1
        try:
            value = self.expr(node)
            return value, tuple(self.out)
        finally:
            self.out = before
            self.guarded -= 1

    def late(self, cond: Expr, then: Late, otherwise: Late, span: Span) -> Expr:
        chosen = self.select(cond, then[0], otherwise[0], span, lazy=True)
        if chosen.shape:
            self.out += (*then[1], *otherwise[1])
            return chosen
        dtype = self.settled(chosen).dtype
        var = Variable(self.fresh("choice"), dtype, "", True)
        self.out.append(SetVar(var, self.convert(self.literal(0, span), dtype), True, span=span))
        sides = [(*before, SetVar(var, self.convert(value, dtype), span=span)) for value, before in (then, otherwise)]
        self.out.append(If(self.logical(cond, span), sides[0], sides[1], span=span))
        return Local(var, span=span)


def _identity(kind: str, dtype: DType) -> int | float | bool:
    """What changes nothing when combined."""
    if kind in ("and", "or"):
        return kind == "and"
    if kind in ("min", "max"):
        return dtype.max_value if kind == "min" else dtype.min_value
    number = int(kind == "mul")
    return float(number) if dtype.is_float else number


def _aligned(checker: PartChecker, shape: Shape, indices: Sequence[Expr], span: Span) -> tuple[Expr, ...]:
    """The indices of an operand that repeats along missing leading axes and along extents of 1."""
    own = indices[len(indices) - len(shape) :]
    return tuple(checker.literal(0, span) if s == ONE else i for s, i in zip(shape, own, strict=True))


def _is_zero(expr: Expr) -> bool:
    return isinstance(expr, Const) and expr.value == 0


def _section(node: syntax.Slice, start: Expr, stop: Expr) -> str:
    return f"{show_expr(start) if node.lo is not None else ''}:{show_expr(stop) if node.hi is not None else ''}"


def _walked(var: LoopVar) -> Size | None:
    """The extent that an index, with the blocks of its step, walks over: its end, where that is a size, or one of several it ends at, or
    that of the index whose block it ends with."""
    whole = size_of(var.hi)
    if whole is not None:
        return whole
    if isinstance(var.hi, Apply) and var.hi.op == "min":
        sizes = [size for size in map(size_of, var.hi.args) if size is not None]
        return sizes[0] if len(sizes) == 1 else None
    end = affine(var.hi)
    if end is None or len(end.terms) != 1:
        return None
    ((outer, factor),) = end.terms
    return size_of(outer.hi) if factor == ONE and end.offset == outer.step and outer.first == ZERO else None
