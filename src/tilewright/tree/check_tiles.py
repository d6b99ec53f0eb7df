"""Checking tiles: parts of arrays as values inside loops, and what is made of them.

In come slices, `@`, `transpose`, `row_max`, reductions and names bound to such values; out come plain scalar statements. A tile
is never stored. It is a function of its indices: where one element is needed, `element` writes it down, and puts the loops of the
sums and maxima inside it before the statement:

    acc += x[i, a:a+64] @ w              for t0 in 0..cols:  (the elements of acc)
                                  ->         var add1 = 0
                                             for t2 in 0..min(64, n - a):
                                                 add1 += x[i, a + t2] * w[t2, t0]
                                             acc += add1

A variable that changes holds one element of its tile. The body of the loop it is declared in then runs for each element (a `Spread`), so
such a tile can only be used element by element, or along axes of extent 1: what attention carries is of that kind, an update like
`state = state @ step` is not.

A slice that reaches beyond its array is short, and so is what is computed from it: tiles have *limits* beside their extents. They bound
the loops of reductions, and elements beyond them are neither computed nor written. The same elements are left out all over a spread
body in most kernels; then one `if` around it says so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tilewright.base.dtypes import DType, bool_, i64
from tilewright.base.errors import Diagnostics
from tilewright.base.sizes import ONE, ZERO, Size, minimum
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.bounds import affine, clamped, interval, surely_negative, surely_nonnegative
from tilewright.tree.check_arrays import ArrayChecker
from tilewright.tree.check_expr import Late, flatten_index
from tilewright.tree.check_state import Alias, Key, Shared, Slot, State, Tile, VariableState
from tilewright.tree.infer import Skip, TypePair, size_of, sum_dtype, type_of
from tilewright.tree.typed import (
    TRUE,
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
    Stmt,
    Store,
    TileLocal,
    Transpose,
    Variable,
    View,
    Whole,
    bodies,
    exprs_in,
    row_major,
    show_expr,
    walk_expr,
)


@dataclass
class Spread:
    """A loop body that runs for every element of tiles of this shape; axes of extent 1 have no index."""

    shape: Shape
    vars: tuple[LoopVar | None, ...]
    depth: int
    """Loops around it."""
    guards: list[tuple[Expr, ...]] = field(default_factory=list)
    """What each statement about tiles is guarded by."""

    def at(self, place: int) -> LoopVar | None:
        """The index of an axis, counted from the last as -1."""
        return self.vars[place] if -place <= len(self.vars) else None


class TileChecker(ArrayChecker):
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

    @abstractmethod
    def learn_variable(self, key: Key, pair: TypePair, name: str, span: Span) -> TypePair:
        """The variable's type with one more value seen."""

    @abstractmethod
    def contribution(self, stmt: syntax.Assign, name: str) -> tuple[str, bool, syntax.Expr] | None:
        """For an accumulation: the operation, whether the value is negated, and the value."""

    @abstractmethod
    def summed(self, kind: str, value: Expr, in_loop: bool) -> TypePair:
        """The type a value brings to what it is accumulated into."""

    @abstractmethod
    def store_kind(self, stmt: syntax.Assign, place: ArrayInfo, indices: tuple[Expr, ...], value: Expr) -> tuple[str, Expr]:
        """A store as an accumulation where it is one."""

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
        if not self.guarded:
            self.stay_inside(array, axis, value, span)

    def section(self, array: ArrayInfo, axis: int, node: syntax.Slice) -> tuple[Expr, Size, tuple[Expr, ...]]:
        """A slice of an axis: its first element, its extent, and what limits it."""
        start, _, length = self.edges(array.name, array.shape[axis], node)
        self.bind_section(array, axis, start, length)
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
        if reach is not None and surely_negative(reach[0]):
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
        """Slices of length k that begin at i in 0..n step k walk over an axis of extent n. Others may: in ZynML, unless something else
        says what n is."""
        linear = affine(start)
        bare = linear.bare if linear is not None else None
        last = size_of(bare.hi) if bare is not None and bare.first == ZERO else None
        name = self.raw_name(last) if last is not None else None
        if name is None or bare is None or array.role != "input":
            return
        own = f"{array.name}${axis}"
        if bare.step == length and not self.guarded:
            self.equal(own, name)
        elif not self.is_python:
            self.state.equations.perhaps[name, Size.of(own)] = None

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

    def hoistable(self, bounds: Sequence[Expr]) -> bool:
        """Whether the bounds are the same all through the spread body."""
        if self.spread is None:
            return False
        known = set(self.loops[: self.spread.depth])
        for bound in bounds:
            for expr in walk_expr(bound):
                if isinstance(expr, Local | Element) or (isinstance(expr, IndexRef) and expr.var not in known):
                    return False
        return True

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
            "a product, reduction or transpose of it needs an array of its own",
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

    # -- named tiles --------------------------------------------------------------------------------------------------

    def tile_value(self, tile: Tile, span: Span) -> Expr:
        limits = tuple(tuple(bounds) for bounds in tile.limits)
        return TileLocal(tile.slot.var, tile.shape, limits, tile.held, tile.value, tile.versions, span=span)

    def declare_tile(self, name: str, value: Expr, key: Key, span: Span, fixed: DType | None, immutable: bool) -> None:
        """`name = value` inside a loop, where the value is a tile or later ones are."""
        known = self.state.variables.setdefault(key, VariableState())
        value = self.settled(value) if key not in self.state.assigned else value
        shape = self.broadcast([known.shape, value.shape], span)
        if fixed is not None:
            value = self.assignable(value, fixed, f"'{name}'", span)
        if key in self.state.assigned:
            known.shape = shape
            self.declare_changing(name, value, key, span, fixed, shape, immutable)
            return
        changing = _changing(value)
        if not changing:
            self.scope.names[name] = Alias(value, key)
            return
        limits = self.limits(value)
        versions = tuple((what, self.versions.get(what, 0)) for what in changing)
        var = Variable(name, value.dtype)
        held = self.fits(value.shape) and all(map(self.hoistable, limits))
        if held:
            self.set_element(var, value, span, declares=True)
        slot = Slot(var, key, len(self.loops), immutable=immutable)
        self.scope.names[name] = Tile(slot, value.shape, [list(bounds) for bounds in limits], held, value, versions)

    def declare_changing(
        self, name: str, value: Expr, key: Key, span: Span, fixed: DType | None, shape: Shape, immutable: bool
    ) -> None:  # fmt: skip
        self.demand(shape, span)
        pair = (fixed, "") if fixed is not None else self.learn_variable(key, type_of(value), name, span)
        var = Variable(name, pair[0], pair[1], True)
        limits = [list(bounds) for bounds in self.limits(value)] or [[] for _ in shape]
        limits = [[] for _ in range(len(shape) - len(limits))] + limits
        slot = Slot(var, key, len(self.loops), fixed is not None, immutable=immutable)
        self.set_element(var, self.convert(value, var.dtype), span, declares=True)
        self.scope.names[name] = Tile(slot, shape, limits)

    def demand(self, shape: Shape, span: Span) -> None:
        """The loop around must run for each element of such a shape. What this walk finds out the next one goes by."""
        if not self.fors:
            raise self.fail("TW005", "a tile that changes cannot be in the loop of a reduce kernel", span, "use @kernel fused and store to out")
        place = self.fors[-1] if self.spread is None else self.spread_key
        known = self.state.tiled.get(place, ())
        wanted = list(known if len(known) > len(shape) else shape)
        for axis in range(1, min(len(known), len(shape)) + 1):
            a, b = known[-axis], shape[-axis]
            if a != b and ONE not in (a, b):
                raise self.fail(
                    "TW004", f"tiles that change in one loop have extents {a} and {b} along one axis", span, "change them in loops of their own"
                )
            wanted[-axis] = b if a == ONE else a
        if self.spread is None or self.spread.shape != tuple(wanted):
            self.state.tiled[place] = tuple(wanted)
            self.state.changed = True
            raise Skip

    def becomes_tile(self, slot: Slot, name: str, value: Expr, span: Span) -> None:
        """A variable that held a number is given a tile."""
        if not slot.depth:
            return
        known = self.state.variables.setdefault(slot.key, VariableState())
        shape = self.broadcast([known.shape, value.shape], span)
        if shape != known.shape:
            known.shape = shape
            self.state.changed = True
            raise Skip

    def fits(self, shape: Shape) -> bool:
        """Whether the spread body has an index for every axis."""
        spread = self.spread
        return spread is not None and len(shape) <= len(spread.shape) and all(
            extent == ONE or extent == spread.shape[-place] for place, extent in enumerate(reversed(shape), 1)
        )  # fmt: skip

    def here(self, shape: Shape, span: Span) -> tuple[Expr, ...]:
        """The indices of the element at hand."""
        assert self.spread is not None
        found: list[Expr] = []
        for place in range(len(shape), 0, -1):
            var = self.spread.at(-place)
            found.append(self.literal(0, span) if var is None else IndexRef(var, span=span))
        return tuple(found)

    def guard(self, limits: Limits) -> tuple[Expr, ...]:
        """Conditions under which the element at hand exists."""
        assert self.spread is not None
        found: dict[Expr, None] = {}
        for place, bounds in enumerate(reversed(limits), 1):
            var = self.spread.at(-place)
            if var is not None:
                found.update((Apply("lt", (IndexRef(var), bound), bool_), None) for bound in bounds)
        return tuple(found)

    def under(self, conditions: tuple[Expr, ...], body: Sequence[Stmt], span: Span) -> None:
        if conditions:
            self.out.append(If(_all(conditions), tuple(body), span=span))
        else:
            self.out += body

    def set_element(self, var: Variable, value: Expr, span: Span, declares: bool = False, kind: str = "") -> None:
        """The element at hand of a tile variable gets its value, where the value has such an element."""
        assert self.spread is not None
        conditions = self.guard(self.limits(value))
        before, self.out = self.out, []
        try:
            found = self.element(value, self.here(value.shape, span), span)
        finally:
            body, self.out = self.out, before
        if conditions:
            self.spread.guards.append(conditions)
        if conditions and declares:
            self.out.append(SetVar(var, self.convert(self.literal(0, span), var.dtype), True, span=span))
        last = Accumulate(var, kind, found, span=span) if kind else SetVar(var, found, declares and not conditions, span=span)
        self.under(conditions, [*body, last], span)

    def assign_tile(self, stmt: syntax.Assign, name: str, tile: Tile) -> None:
        slot, var = tile.slot, tile.slot.var
        if slot.immutable:
            raise self.fail("TW015", f"'{name}' was declared with let and cannot change", stmt.span, f"declare it with var {name}")
        part = self.contribution(stmt, name)
        if part is not None:
            kind, negative, node = part
            value = self.expr(node)
            known = len(self.out), len(self.spread.guards if self.spread else ())
            if not any(isinstance(e, TileLocal) and e.var is var for e in walk_expr(value)):
                self.accumulate_tile(stmt, name, tile, kind, negative, value)
                if not any(isinstance(e, Local) and e.var is var for e in exprs_in(tuple(self.out[known[0] :]))):
                    return
                del self.out[known[0] :]
        node = stmt.value if not stmt.op else syntax.Binary(stmt.op, stmt.target, stmt.value, span=stmt.span)
        value = self.expr(node)
        if not slot.fixed:
            self.learn_variable(slot.key, type_of(value), name, stmt.span)
        self.grow(name, tile, value, stmt.span)
        self.set_element(var, self.assignable(value, var.dtype, f"'{name}'", stmt.span), stmt.span)
        self.changed(var)

    def accumulate_tile(self, stmt: syntax.Assign, name: str, tile: Tile, kind: str, negative: bool, value: Expr) -> None:
        slot, var = tile.slot, tile.slot.var
        if not slot.fixed:
            self.learn_variable(slot.key, self.summed(kind, value, len(self.loops) > slot.depth), name, stmt.span)
        self.grow(name, tile, value, stmt.span)
        value = self.assignable(value, var.dtype, f"'{name}'", stmt.span)
        self.set_element(var, self.negate(value, stmt.span) if negative else value, stmt.span, kind=kind)
        self.changed(var)

    def grow(self, name: str, tile: Tile, value: Expr, span: Span) -> None:
        """What an assignment tells about the shape of a tile and its limits."""
        known = self.state.variables.setdefault(tile.slot.key, VariableState())
        shape = self.broadcast([tile.shape, value.shape], span)
        if shape != known.shape:
            known.shape = shape
            self.state.changed = True
        if shape != tile.shape:
            raise Skip
        for place, bounds in enumerate(reversed(self.limits(value)), 1):
            if value.shape[-place] != ONE and self.hoistable(bounds):
                tile.limits[-place] += [b for b in bounds if b not in tile.limits[-place]]

    def changed(self, what: Variable | str) -> None:
        self.versions[what] = self.versions.get(what, 0) + 1

    def changes_in(self, body: tuple[syntax.Stmt, ...]) -> None:
        """A loop begins: what its body assigns changes from one iteration to the next."""
        for stmt in body:
            if isinstance(stmt, syntax.Assign):
                target = flatten_index(stmt.target)[0] if isinstance(stmt.target, syntax.Index) else stmt.target
                found = self.scope.find(target.id) if isinstance(target, syntax.Name) else None
                if isinstance(found, Slot | Tile):
                    self.changed(found.var if isinstance(found, Slot) else found.slot.var)
                elif isinstance(found, ArrayInfo | Shared):
                    self.changed(found.name if isinstance(found, ArrayInfo) else found.array.name)
                elif found is None and isinstance(target, syntax.Name):
                    self.changed(target.id)
            elif isinstance(stmt, syntax.For | syntax.While):
                self.changes_in(stmt.body)
            elif isinstance(stmt, syntax.If):
                self.changes_in((*stmt.then, *stmt.otherwise))

    # -- stores -----------------------------------------------------------------------------------------------------

    def store_part(self, stmt: syntax.Assign, base: syntax.Expr, array: ArrayInfo | None, nodes: Sequence[syntax.Expr]) -> None:
        """`array[i, a:b] = value`; without an array, to the output of that name."""
        span = stmt.span
        value = self.expr(stmt.value)
        self.learn_shared(base, value, span)
        slices = sum(isinstance(n, syntax.Slice) for n in nodes)
        if array is None:
            assert isinstance(base, syntax.Name)
            if stmt.op and base.id not in self.written:
                raise self.fail("TW017", f"'{base.id}' is read before anything is written to it", span, f"store to {base.id}[…] with = first")
            missing = max(0, len(value.shape) - slices)
            column = missing == 1 and slices > 0 and value.shape[-1] == ONE
            array = self.output(base.id, len(nodes) + (0 if column else missing), type_of(value), span)
        lead = self.lead(base)
        self.written.add(array.name)
        place = self.view(array, lead, nodes, span) if self.loops else None
        if not isinstance(place, View):
            raise self.fail("TW005", "a slice is assigned to inside a loop only", span, f"loop over the elements of '{array.name}'")
        axes = self.store_axes(array, value, place, span)
        extents, limits = [], []
        for position, axis in enumerate(axes):
            own = place.shape[position]
            if axis is not None and self.implicit(array) and _slice_at(nodes, lead, place.kept[position]) is None:
                extents.append(value.shape[axis])
            elif axis is None or value.shape[axis] == ONE:
                extents.append(own)
            else:
                if own != value.shape[axis]:
                    self.make_equal(own, value.shape[axis], span)
                extents.append(own)
            bounds = () if axis is None or value.shape[axis] == ONE else self.limits(value)[axis]
            limits.append(tuple(dict.fromkeys((*bounds, *place.limits[position]))))
        self.write_part(stmt, array, place, value, axes, extents, limits)

    def store_axes(self, array: ArrayInfo, value: Expr, place: View, span: Span) -> list[int | None]:
        """For each axis of the part that is written, that of the value (None: it repeats)."""
        rank, wanted = len(value.shape), len(place.kept)
        if rank == wanted + 1 and value.shape[-1] == ONE:
            return list(range(wanted))  # a column into a vector
        if rank > wanted:
            raise self.fail("TW003", f"the part of '{array.name}' has rank {wanted}, and the value has rank {rank}", span)
        return [None] * (wanted - rank) + list(range(rank))

    def write_part(
        self, stmt: syntax.Assign, array: ArrayInfo, place: View, value: Expr, axes: list[int | None], extents: list[Size],
        limits: list[tuple[Expr, ...]],
    ) -> None:  # fmt: skip
        span, spread = stmt.span, self.spread
        rank = len(value.shape)
        own: list[LoopVar] = []
        used: set[LoopVar] = set()
        conditions: dict[Expr, None] = {}
        indices: list[Expr] = []
        for position, axis in enumerate(axes):
            shared = spread.at(axis - rank) if spread is not None and axis is not None else None
            if shared is not None and shared.count == extents[position]:
                used.add(shared)
                conditions.update((Apply("lt", (IndexRef(shared), bound), bool_), None) for bound in limits[position])
                indices.append(IndexRef(shared, span=span))
            else:
                own.append(self.index(extents[position], limits[position], span))
                indices.append(IndexRef(own[-1], span=span))
        before, self.out = self.out, []
        self.loops.extend(own)
        by_axis = {axis: index for axis, index in zip(axes, indices, strict=True) if axis is not None}
        at = [by_axis.get(axis, self.literal(0, span)) for axis in range(rank)]
        try:
            found = self.element(value, at, span) if rank else value
            starts = list(place.starts)
            for axis, index in zip(place.kept, indices, strict=True):
                starts[axis] = self.shifted(starts[axis], index, span)
            if self.implicit(array):
                self.reach_part(array, place, indices, extents, limits, span)
            kind, found = self.store_kind(stmt, array, tuple(starts), found)
            found = self.assignable(found, array.dtype, f"'{array.name}'", span)
            body: list[Stmt] = [*self.out, Store(array, tuple(starts), found, kind, span=span)]
        finally:
            self.out = before
            del self.loops[len(self.loops) - len(own) :]
        if own:
            body = [Loop(tuple(own), tuple(body), asked="no", span=span)]
        if spread is not None:
            spread.guards.append(tuple(conditions))
            body = self.once(body, used, span)
        self.under(tuple(conditions), body, span)
        self.changed(array.name)

    def once(self, body: list[Stmt], used: set[LoopVar], span: Span) -> list[Stmt]:
        """Stores without some of the spread indices happen once."""
        spread = () if self.spread is None else self.spread.vars
        zero = Const(0, i64, span=span)
        others = [Apply("eq", (IndexRef(v, span=span), zero), bool_) for v in spread if v is not None and v not in used]
        return [If(_all(others), tuple(body), span=span)] if others else body

    def reach_part(
        self, array: ArrayInfo, place: View, indices: Sequence[Expr], extents: Sequence[Size], limits: Sequence[tuple[Expr, ...]], span: Span
    ) -> None:  # fmt: skip
        """How far a store to a part of an output goes: as far as the value has elements."""
        ends: list[Size] = []
        for axis, start in enumerate(place.starts):
            position = place.kept.index(axis) if axis in place.kept else None
            reach = interval(start)
            if reach is None:
                raise self.fail(
                    "TW014", f"the extent of '{array.name}' along axis {axis} cannot be found from index {show_expr(start)}", span,
                    "use loop indices and sizes only",
                )  # fmt: skip
            end = reach[1] + (extents[position] if position is not None else 1)
            for bound in limits[position] if position is not None else ():
                limit = affine(self.binary("+", start, bound, span))
                if limit is not None and not limit.terms:
                    end = limit.offset
            ends.append(end)
        self.reach.setdefault(array.name, []).append(tuple(ends))

    # -- shared arrays ----------------------------------------------------------------------------------------------

    def declare_shared(self, name: str, extents: Sequence[syntax.Expr], fixed: DType | None, key: Key, span: Span) -> None:
        """`shared var x[n]`: memory for each iteration of the loops around."""
        if not self.loops:
            raise self.fail("TW005", f"the shared array '{name}' must be in a loop", span, "an array of the whole kernel is made with zeros(…)")
        if self.spread is not None:
            raise self.fail("TW005", f"the shared array '{name}' stands between tiles that change", span, "declare it in an outer loop")
        shape = tuple(s for node in extents for s in self.shape_argument(node))
        lead, outer = [], []
        for var in self.loops:
            if var.low is None or var.high is None or not surely_nonnegative(var.low):
                raise self.fail("TW014", f"the shared array '{name}' stands in a loop over '{var.name}', whose range is not made of sizes", span)
            lead.append(IndexRef(var, span=span))
            outer.append(var.high + 1)
        known = self.state.variables.setdefault(key, VariableState())
        pair = known.strong or known.weak
        array = self.new_array(name, fixed or (pair[0] if pair is not None else self.default_float), (*outer, *shape), "scratch")
        self.scope.names[name] = Shared(array, tuple(lead), (0, "") if fixed is not None else key)

    def learn_shared(self, base: syntax.Expr, value: Expr, span: Span) -> None:
        """A shared array without a dtype has that of what is stored to it."""
        found = self.scope.find(base.id) if isinstance(base, syntax.Name) else None
        if isinstance(found, Shared) and found.key[0] and isinstance(base, syntax.Name):
            known = self.state.variables[found.key]
            first = known.strong is None and known.weak is None
            self.learn_variable(found.key, type_of(value), base.id, span)
            if first:
                raise Skip  # the next walk knows

    # -- spread loops -----------------------------------------------------------------------------------------------

    def open_spread(self, shape: Shape, span: Span) -> Spread:
        """The body of the loop just entered runs for each element of this shape."""
        found = tuple(None if extent == ONE else self.index(extent, (), span) for extent in shape)
        self.spread = Spread(shape, found, len(self.loops))
        self.spread_key = self.fors[-1]
        self.loops.extend(v for v in found if v is not None)
        return self.spread

    def close_spread(self, spread: Spread, body: tuple[Stmt, ...], asked: str, span: Span) -> tuple[Stmt, ...]:
        variables = tuple(v for v in spread.vars if v is not None)
        del self.loops[len(self.loops) - len(variables) :]
        self.spread = None
        shared = set(spread.guards)
        if len(shared) == 1 and (conditions := shared.pop()):
            body = (If(_all(conditions), _without_guard(body, _all(conditions)), span=span),)
        return (Loop(variables, body, asked=asked, span=span),) if variables else body


def _changing(value: Expr) -> dict[Variable | str, None]:
    """The variables, and arrays by name, that it reads and that may change."""
    found: dict[Variable | str, None] = {}
    for expr in walk_expr(value):
        if isinstance(expr, Local | TileLocal) and expr.var.mutable:
            found[expr.var] = None
        elif isinstance(expr, Element | View | Whole) and expr.array.role != "input":
            found[expr.array.name] = None
    return found


def _without_guard(stmts: tuple[Stmt, ...], cond: Expr) -> tuple[Stmt, ...]:
    """The statements with `if cond` taken off; conditions that begin with it keep the rest."""
    result: list[Stmt] = []
    for stmt in stmts:
        if isinstance(stmt, If) and stmt.cond == cond and not stmt.otherwise:
            result += _without_guard(stmt.then, cond)
        elif isinstance(stmt, If):
            result.append(replace(stmt, then=_without_guard(stmt.then, cond), otherwise=_without_guard(stmt.otherwise, cond)))
        elif isinstance(stmt, Loop) and bodies(stmt):
            result.append(replace(stmt, body=_without_guard(stmt.body, cond)))
        else:
            result.append(stmt)
    return tuple(result)


def _all(conditions: Sequence[Expr]) -> Expr:
    total = conditions[0] if conditions else TRUE
    for condition in conditions[1:]:
        total = Apply("and", (total, condition), bool_)
    return total


def _identity(kind: str, dtype: DType) -> int | float | bool:
    """What changes nothing when combined."""
    if kind in ("and", "or"):
        return kind == "and"
    if kind in ("min", "max"):
        return dtype.max_value if kind == "min" else dtype.min_value
    number = int(kind == "mul")
    return float(number) if dtype.is_float else number


def _aligned(checker: TileChecker, shape: Shape, indices: Sequence[Expr], span: Span) -> tuple[Expr, ...]:
    """The indices of an operand that repeats along missing leading axes and along extents of 1."""
    own = indices[len(indices) - len(shape) :]
    return tuple(checker.literal(0, span) if s == ONE else i for s, i in zip(shape, own, strict=True))


def _slice_at(nodes: Sequence[syntax.Expr], lead: Sequence[Expr], axis: int) -> syntax.Slice | None:
    """The slice written for an axis, None where it is missing or bare."""
    position = axis - len(lead)
    node = nodes[position] if position < len(nodes) else None
    return node if isinstance(node, syntax.Slice) and (node.lo is not None or node.hi is not None) else None


def _is_zero(expr: Expr) -> bool:
    return isinstance(expr, Const) and expr.value == 0


def _section(node: syntax.Slice, start: Expr, stop: Expr) -> str:
    return f"{show_expr(start) if node.lo is not None else ''}:{show_expr(stop) if node.hi is not None else ''}"
