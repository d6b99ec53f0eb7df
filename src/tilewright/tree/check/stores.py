"""Checking stores: to elements, to parts of arrays, and to shared arrays.

In come assignments to `array[…]`; out come typed stores. One to a part is a loop over the elements of the value, each at its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.base.dtypes import DType, bool_, i64
from tilewright.base.intervals import surely_nonnegative
from tilewright.base.sizes import ONE, Size, ceildiv
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.bounds import IndexForm, affine, linear_indices
from tilewright.tree.check.arrays import ArrayTable
from tilewright.tree.check.context import Context, Skip
from tilewright.tree.check.elements import ElementBuilder, every, limits_of
from tilewright.tree.check.expressions import ExpressionChecker, flatten_index
from tilewright.tree.check.indexing.picks import expanded
from tilewright.tree.check.infer import type_of
from tilewright.tree.check.operations import Typing
from tilewright.tree.check.sizes import SizeChecker
from tilewright.tree.check.state import Alias, Key, Poison, SharedArray, VariableState
from tilewright.tree.check.tiles import TileChecker, all_of
from tilewright.tree.check.variables import COMBINE, VariableTypes
from tilewright.tree.typed import (
    Apply,
    ArrayInfo,
    Cast,
    Const,
    Element,
    Expr,
    IndexRef,
    LoopVar,
    Picked,
    SizeValue,
    Stmt,
    Store,
    TypedIf,
    TypedLoop,
    TypedView,
)
from tilewright.tree.typed_walk import exprs_in, walk_expr

COMBINATIONS = ("add", "mul", "min", "max", "and", "or", "xor")
"""Operations of two numbers that accumulate."""


class StoreChecker:
    def __init__(
        self, context: Context, sizes: SizeChecker, typing: Typing, arrays: ArrayTable, elements: ElementBuilder, expressions: ExpressionChecker,
        variables: VariableTypes, tiles: TileChecker,
    ) -> None:  # fmt: skip
        self.context = context
        self.sizes = sizes
        self.typing = typing
        self.arrays = arrays
        self.elements = elements
        self.expressions = expressions
        self.slices = expressions.slices
        self.variables = variables
        self.tiles = tiles

    # -- elements -----------------------------------------------------------------------------------------------------

    def store(self, stmt: syntax.Assign, target: syntax.Index) -> None:
        """`array[…] = value`, and with an operator."""
        base, nodes = flatten_index(target)
        array = self.expressions.array(base)
        if isinstance(array, ArrayInfo) and array.packed is not None:
            raise self.context.fail("TW015", f"'{array.name}' holds packed blocks ({array.packed}), which kernels read and do not write", stmt.span, "write to an array of f32, and pack that with tw.quantize")
        if isinstance(array, ArrayInfo) and array.role == "input" and not self.context.is_python:
            raise self.context.fail("TW015", f"'{array.name}' is not an output and cannot be written", stmt.span, f"write to out[…], or to an out_… of its own; compute(inout {array.name}, …) writes it in place")
        if isinstance(array, ArrayInfo) and array.role == "input":
            raise self.context.fail("TW015", f"'{array.name}' is an input and cannot be written", stmt.span, "make an output and write to that, or annotate it as tw.InOut")
        implicit = array is None and isinstance(base, syntax.Name) and self.arrays.is_place(base.id)
        if not implicit and not isinstance(array, ArrayInfo):
            name = base.id if isinstance(base, syntax.Name) else "this"
            if isinstance(base, syntax.Name) and self.context.scope.find(name) is None:
                raise self.expressions.unknown(name, base.span)
            binding = self.context.scope.find(name)
            if self.context.is_python and isinstance(binding, Alias) and binding.value.shape and binding.key not in self.context.state.stored:
                self.context.state.stored.add(binding.key)
                self.context.state.changed = True
                raise Skip
            raise self.context.fail("TW015", f"'{name}' is not an output and cannot be written", stmt.span, "make an array at the top of the kernel and write to that")
        lead = self.expressions.lead(base)
        if isinstance(array, ArrayInfo):
            nodes = expanded(nodes, len(array.shape) - len(lead))
        arrays = self.expressions.index_arrays(tuple(nodes))
        if isinstance(array, ArrayInfo) and len(nodes) == 1 and arrays and arrays[0].dtype.is_bool:
            self.store_masked(stmt, array, lead, arrays[0])
            return
        self.only_places(base, nodes, array if isinstance(array, ArrayInfo) else None, arrays)
        if isinstance(array, ArrayInfo) and arrays:
            self.store_picked(stmt, base, array, lead, nodes, arrays)
            return
        if any(isinstance(n, syntax.Slice) for n in nodes) or (array is not None and len(nodes) + len(lead) < len(array.shape)):
            self.store_part(stmt, base, array if isinstance(array, ArrayInfo) else None, nodes)
            return
        value = self.expressions.expr(stmt.value)
        if implicit and value.shape and self.context.loops:
            self.store_part(stmt, base, None, nodes)
            return
        self.learn_shared(base, value, stmt.span)
        if isinstance(array, ArrayInfo):
            place = array
        else:
            assert isinstance(base, syntax.Name)
            if stmt.op and base.id not in self.arrays.written:
                raise self.context.fail("TW017", f"'{base.id}' is read before anything is written to it", stmt.span, f"store to {base.id}[…] with = first")
            place = self.arrays.output(base.id, len(nodes), type_of(value), stmt.span)
        self.typing.scalar_only(f"an element of '{place.name}'", value, stmt.span)
        indices = self.slices.access(place, nodes, stmt.span, write=True, lead=lead)
        if self.sizes.implicit(place):
            self.arrays.reach_output(place, indices, stmt.span)
        kind, value = self.store_kind(stmt, place, indices, value)
        value = self.typing.assignable(value, place.dtype, f"'{place.name}'", stmt.span)
        self.arrays.written.add(place.name)
        self.context.changed(place.name)
        store = Store(place, indices, value, kind, span=stmt.span)
        if self.context.spread is None:
            self.context.emit(store)
        else:
            self.context.spread.guards.append(())
            self.context.out += self.once([store], set(), stmt.span)

    def only_places(self, base: syntax.Expr, nodes: Sequence[syntax.Expr], array: ArrayInfo | None, arrays: Mapping[int, Expr]) -> None:
        """What is written are elements of an array whose extents are known."""
        for node in nodes:
            if isinstance(node, syntax.Nothing | syntax.Rest):
                what = "None" if isinstance(node, syntax.Nothing) else "'...'"
                raise self.context.fail("TW005", f"an index of {what} in what is written", node.span, "write x[…] with an index or a slice for each axis")
        name = base.id if isinstance(base, syntax.Name) else "this"
        if arrays and any(value.dtype.is_bool for value in arrays.values()):
            raise self.context.fail("TW005", f"'{name}' is written with a mask and something else as indices", nodes[0].span, "a mask is the only index; choose elements with tw.where")
        if arrays and (array is None or self.sizes.implicit(array)):
            raise self.context.fail(
                "TW005", f"'{name}' is written at the places that an array holds, and nothing says how large it is", nodes[0].span,
                f"give it an extent: zeros(…), or inout {name}; or write the elements in a loop",
            )  # fmt: skip

    def attempted(self, target: syntax.Index) -> None:
        """A store that is wrong: what reads the array later is not wrong for that."""
        base = flatten_index(target)[0]
        array = self.context.scope.find(base.id) if isinstance(base, syntax.Name) else None
        if isinstance(array, ArrayInfo) and array.role != "input":
            self.arrays.written.add(array.name)

    def store_kind(self, stmt: syntax.Assign, place: ArrayInfo, indices: tuple[Expr, ...], value: Expr) -> tuple[str, Expr]:
        """`place[…] op= value` as an accumulation where it is one, else as a plain store of the combined value."""
        if not stmt.op:
            return self.combination(stmt, place, indices, value)
        self.arrays.on_read(place, stmt.span)
        if stmt.op == "-" and not place.dtype.is_bool:
            value = self.typing.assignable(value, place.dtype, f"'{place.name}'", stmt.span)
            return "add", self.negative(value, bool(self.context.loops) and not self.moves(indices), stmt.span)
        if stmt.op in COMBINE and not (place.dtype.is_bool and stmt.op in "+*") and not (place.dtype.is_inexact and stmt.op in "&|"):
            return COMBINE[stmt.op], value
        if stmt.op == "^" and not place.dtype.is_inexact:
            return "xor", value
        return "", self.typing.binary(stmt.op, Element(place, indices, span=stmt.span), value, stmt.span)

    def combination(self, stmt: syntax.Assign, place: ArrayInfo, indices: tuple[Expr, ...], value: Expr) -> tuple[str, Expr]:
        """`place[k] = max(place[k], value)`, and the like, as an accumulation: at a place that data decides, or that a loop around stays at."""
        if not isinstance(value, Apply) or value.dtype is not place.dtype or not self.stays(indices):
            return "", value
        own = Element(place, indices)
        if value.op in ("add", "sub") and not value.dtype.is_bool:
            terms = self.without(value, own, self.moves(indices), stmt.span)
            return ("add", terms) if terms is not None else ("", value)
        if value.op not in COMBINATIONS:
            return "", value
        for first, other in (value.args, value.args[::-1]):
            if first == own:
                return value.op, other
        return "", value

    def negative(self, value: Expr, sums: bool, span: Span) -> Expr:
        """The negative of a value. That of a term of a sum stays a product, where it is one: of the negative of its first factor."""
        if sums and isinstance(value, Apply) and value.op == "mul" and value.dtype.is_float:
            return replace(value, args=(self.negative(value.args[0], sums, span), *value.args[1:]))
        return self.typing.negate(value, span)

    def stays(self, indices: tuple[Expr, ...]) -> bool:
        """Whether data decide a place, or a loop around stays at it."""
        forms = linear_indices(indices)
        if forms is None:
            return True
        moving = {var for form in forms for var in form.values}
        return any(var not in moving for var in self.context.loops)

    def moves(self, indices: tuple[Expr, ...]) -> bool:
        """Whether the innermost loop moves a place: it then gets a value once, which is rounded as it is written."""
        forms = linear_indices(indices)
        return forms is not None and any(self.context.loops[-1] in form.values for form in forms)

    def without(self, value: Expr, own: Element, whole: bool, span: Span) -> Expr | None:
        """What a sum adds to an element that is its first term, or the other of two; None where it is neither. `whole`: of two terms alone."""
        if not isinstance(value, Apply) or value.op not in ("add", "sub") or value.dtype is not own.dtype:
            return None
        first, last = value.args
        if first == own:
            return last if value.op == "add" else self.negative(last, not whole, span)
        if last == own and value.op == "add":
            return first
        rest = None if whole else self.without(first, own, whole, span)
        return None if rest is None else replace(value, args=(rest, last))

    # -- parts of arrays ----------------------------------------------------------------------------------------------

    def store_part(self, stmt: syntax.Assign, base: syntax.Expr, array: ArrayInfo | None, nodes: Sequence[syntax.Expr]) -> None:
        """`array[i, a:b] = value`; without an array, to the output of that name."""
        span = stmt.span
        value = self.expressions.expr(stmt.value)
        self.learn_shared(base, value, span)
        slices = sum(isinstance(n, syntax.Slice) for n in nodes)
        if array is None:
            assert isinstance(base, syntax.Name)
            if stmt.op and base.id not in self.arrays.written:
                raise self.context.fail("TW017", f"'{base.id}' is read before anything is written to it", span, f"store to {base.id}[…] with = first")
            missing = max(0, len(value.shape) - slices)
            column = missing == 1 and slices > 0 and value.shape[-1] == ONE
            array = self.arrays.output(base.id, len(nodes) + (0 if column else missing), type_of(value), span)
        lead = self.expressions.lead(base)
        self.arrays.written.add(array.name)
        place, steps = self.stepped(array, self.slices.place(array, lead, nodes, span), lead, nodes)
        axes = self.store_axes(array, value, place, span)
        extents, limits = [], []
        for position, axis in enumerate(axes):
            extent = place.shape[position]
            if axis is not None and self.sizes.implicit(array) and _slice_at(nodes, lead, place.kept[position]) is None:
                extents.append(value.shape[axis])
            elif axis is None or value.shape[axis] == ONE:
                extents.append(extent)
            else:
                if extent != value.shape[axis]:
                    self.sizes.meet(value.shape[axis])
                    self.sizes.make_equal(extent, value.shape[axis], span)
                extents.append(extent)
            bounds = () if axis is None or value.shape[axis] == ONE else limits_of(value)[axis]
            limits.append(tuple(dict.fromkeys((*bounds, *place.limits[position]))))
        self.write_part(stmt, array, place, value, axes, extents, limits, steps)

    def store_picked(
        self, stmt: syntax.Assign, base: syntax.Expr, array: ArrayInfo, lead: tuple[Expr, ...], nodes: Sequence[syntax.Expr], arrays: dict[int, Expr]
    ) -> None:  # fmt: skip
        """`array[rows, a:b] = value`: where several places are one, the last value stays; with an operator all of them are combined."""
        span = stmt.span
        given = len(nodes) + len(lead)
        if given > array.rank:
            raise self.context.fail("TW003", f"'{array.name}' has rank {array.rank - len(lead)} but is indexed with {len(nodes)} indices", span)
        value = self.expressions.expr(stmt.value)
        self.learn_shared(base, value, span)
        place = self.expressions.picks.picked(array.name, array, lead, nodes, arrays, span)
        assert isinstance(place, Picked)
        self.arrays.written.add(array.name)
        rank, wanted = len(value.shape), len(place.shape)
        if rank > wanted:
            raise self.context.fail("TW003", f"the part of '{array.name}' has rank {wanted}, and the value has rank {rank}", span)
        axes: list[int | None] = [*([None] * (wanted - rank)), *range(rank)]
        limits = [tuple(bounds) for bounds in limits_of(place)]
        for position, axis in enumerate(axes):
            if axis is None or value.shape[axis] == ONE:
                continue
            if place.shape[position] != value.shape[axis]:
                self.sizes.meet(value.shape[axis])
                self.sizes.make_equal(place.shape[position], value.shape[axis], span)
            limits[position] = tuple(dict.fromkeys((*limits_of(value)[axis], *limits[position])))
        self.write_part(stmt, array, place, value, axes, list(place.shape), limits, (1,) * wanted)

    def target(self, place: Expr, indices: Sequence[Expr], steps: Sequence[int], span: Span) -> tuple[Expr, ...]:
        """The element of the array that an element of a part is."""
        if isinstance(place, Picked):
            inner = self.elements.places(place, indices, span)
            return self.target(place.value, inner, (1,) * len(inner), span)
        if isinstance(place, Element):
            return place.indices
        if not isinstance(place, TypedView):
            return tuple(indices)
        starts = list(place.starts)
        for axis, index, step in zip(place.kept, indices, steps, strict=True):
            moved = index if step == 1 else self.typing.binary("*", index, self.typing.literal(step, span), span)
            starts[axis] = self.elements.shifted(starts[axis], moved, span)
        return tuple(starts)

    def store_masked(self, stmt: syntax.Assign, array: ArrayInfo, lead: tuple[Expr, ...], mask: Expr) -> None:
        """`array[mask] = value`: elements where the mask does not hold keep their values."""
        span = stmt.span
        self.arrays.on_read(array, span)
        masks = self.expressions.masks
        place = self.slices.place(array, lead, (), span)
        masks.fits(array.name, place.shape, mask, span)
        value, selected = masks.unmasked(self.expressions.expr(stmt.value), span)
        if selected is not None and selected != mask:
            raise self.context.fail("TW004", "elements that one mask selects are written where another one holds", span, "use the same mask on both sides")
        if selected is None and value.shape:
            raise self.context.fail(
                "TW004", f"an array of rank {len(value.shape)} is written where a mask holds, and how many elements that is, is known only when the kernel runs", span,
                "select from the value with the same mask: out[m] = x[m]",
            )  # fmt: skip
        if stmt.op:
            value = self.typing.binary(stmt.op, place, value, span)
        value = self.typing.assignable(value, array.dtype, f"'{array.name}'", span)
        chosen = self.typing.select(mask, value, place, span, lazy=False)
        rank = len(place.shape)
        self.write_part(replace(stmt, op=""), array, place, chosen, list(range(rank)), list(place.shape), list(place.limits), (1,) * rank)

    def stepped(
        self, array: ArrayInfo, place: TypedView, lead: Sequence[Expr], nodes: Sequence[syntax.Expr]
    ) -> tuple[TypedView, tuple[int, ...]]:  # fmt: skip
        """A part that is written with steps: as many elements as it has then, and the steps of its axes."""
        steps: list[int] = []
        starts = list(place.starts)
        for axis in place.kept:
            node = nodes[axis - len(lead)] if axis - len(lead) < len(nodes) else None
            step = self.expressions.picks.step(node) if isinstance(node, syntax.Slice) else 1
            position = len(steps)
            if node is not None and step != 1 and (self.sizes.implicit(array) or (step < 0 and place.limits[position])):
                raise self.context.fail("TW005", "a slice with such a step in what is written", node.span, "write the elements in a loop over range(start, stop, step)")
            if node is not None and step < 0:
                starts[axis] = self.elements.shifted(starts[axis], SizeValue(place.shape[position] - 1, span=node.span), node.span)
            steps.append(step)
        shape = tuple(extent if step == 1 else ceildiv(extent, abs(step)) for extent, step in zip(place.shape, steps, strict=True))
        limits = tuple(tuple(every(bound, step) for bound in bounds) for bounds, step in zip(place.limits, steps, strict=True))
        return replace(place, starts=tuple(starts), shape=shape, limits=limits), tuple(steps)

    def store_axes(self, array: ArrayInfo, value: Expr, place: TypedView, span: Span) -> list[int | None]:
        """For each axis of the part that is written, that of the value (None: it repeats)."""
        rank, wanted = len(value.shape), len(place.kept)
        if rank == wanted + 1 and value.shape[-1] == ONE:
            return list(range(wanted))  # a column into a vector
        if rank > wanted:
            raise self.context.fail("TW003", f"the part of '{array.name}' has rank {wanted}, and the value has rank {rank}", span)
        return [None] * (wanted - rank) + list(range(rank))

    def write_part(
        self, stmt: syntax.Assign, array: ArrayInfo, place: TypedView | Picked, value: Expr, axes: list[int | None], extents: list[Size],
        limits: list[tuple[Expr, ...]], steps: Sequence[int],
    ) -> None:  # fmt: skip
        span, spread = stmt.span, self.context.spread
        rank = len(value.shape)
        element_vars: list[LoopVar] = []
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
                element_vars.append(self.elements.index(extents[position], limits[position], span))
                indices.append(IndexRef(element_vars[-1], span=span))
        by_axis = {axis: index for axis, index in zip(axes, indices, strict=True) if axis is not None}
        at = [by_axis.get(axis, self.typing.literal(0, span)) for axis in range(rank)]
        with self.context.inside(element_vars) as before:
            element = self.elements.element(value, at, span) if rank else value
            starts = self.target(place, indices, steps, span)
            if isinstance(place, TypedView) and self.sizes.implicit(array):
                self.reach_part(array, place, extents, limits, span)
            whole = element
            kind, element = self.store_kind(stmt, array, starts, element)
            if not stmt.op and any(isinstance(e, Element) and e.array.name == array.name for e in walk_expr(element)):
                kind, element = "", whole  # a step of a stencil, which reads its neighbours: no sum
            element = self.typing.assignable(element, array.dtype, f"'{array.name}'", span)
        body: list[Stmt] = [*before, Store(array, starts, element, kind, span=span)]
        read = self.overlapping(array, starts, element_vars, body)
        if read is not None:
            if spread is not None or self.context.in_grid or not element_vars:
                raise self.context.fail("TW005", f"this reads elements of '{array.name}' while others are written", read.span, "write to another array")
            body = self.at_once(element_vars, [self.elements.index(e, n, span) for e, n in zip(extents, limits, strict=True)], extents, body, span)
        elif element_vars:
            body = [TypedLoop(tuple(element_vars), tuple(body), asked="no", span=span)]
        if spread is not None:
            spread.guards.append(tuple(conditions))
            body = self.once(body, used, span)
        self.tiles.under(tuple(conditions), body, span)
        self.context.changed(array.name)

    def overlapping(
        self, array: ArrayInfo, written: tuple[Expr, ...], element_vars: Sequence[LoopVar], body: Sequence[Stmt]
    ) -> Element | None:  # fmt: skip
        """What reads elements of a part in the statement that writes the part, but for the element itself."""
        for expr in exprs_in(tuple(body)):
            if isinstance(expr, Element) and expr.array.name == array.name and expr.indices != written:
                pairs = [(affine(a), affine(b)) for a, b in zip(expr.indices, written, strict=True)]
                if not any(a is not None and b is not None and _never_meet(a, b, element_vars) for a, b in pairs):
                    return expr
        return None

    def at_once(
        self, element_vars: Sequence[LoopVar], back: Sequence[LoopVar], extents: Sequence[Size], body: Sequence[Stmt], span: Span
    ) -> list[Stmt]:  # fmt: skip
        """A part that is read and written: all of it is computed, over `element_vars`, before any of it changes, over `back`, as in NumPy."""
        *before, store = body
        assert isinstance(store, Store)
        array = store.array
        fresh = self.arrays.new_array(f"{array.name}_next", array.dtype, tuple(extents), "scratch")
        self.arrays.written.add(fresh.name)
        at = tuple(IndexRef(var, span=span) for var in element_vars)
        computed = TypedLoop(tuple(element_vars), (*before, replace(store, array=fresh, indices=at, kind="")), asked="no", span=span)
        moved = dict(zip(element_vars, back, strict=True))
        places = tuple(with_indices(index, moved) for index in store.indices)
        value = Element(fresh, tuple(IndexRef(var, span=span) for var in back), span=span)
        return [computed, TypedLoop(tuple(back), (replace(store, indices=places, value=value),), asked="no", span=span)]

    def once(self, body: list[Stmt], used: set[LoopVar], span: Span) -> list[Stmt]:
        """Stores without some of the spread indices happen once."""
        spread = () if self.context.spread is None else self.context.spread.vars
        zero = Const(0, i64, span=span)
        others = [Apply("eq", (IndexRef(v, span=span), zero), bool_) for v in spread if v is not None and v not in used]
        if not others or self.context.spread is None:
            return body
        self.context.spread.once = True
        return [TypedIf(all_of(others), tuple(body), span=span)]

    def reach_part(self, array: ArrayInfo, place: TypedView, extents: Sequence[Size], limits: Sequence[tuple[Expr, ...]], span: Span) -> None:
        """How far a store to a part of an output goes: as far as the value has elements."""
        ends: list[Size] = []
        for axis, start in enumerate(place.starts):
            position = place.kept.index(axis) if axis in place.kept else None
            end = self.arrays.last_index(array, axis, start, span) + (extents[position] if position is not None else 1)
            for bound in limits[position] if position is not None else ():
                limit = affine(self.typing.binary("+", start, bound, span))
                if limit is not None and not limit.factors:
                    end = limit.constant
            ends.append(end)
        self.arrays.reached(array, tuple(ends), span)

    # -- shared arrays ------------------------------------------------------------------------------------------------

    def declare_shared(self, name: str, extents: Sequence[syntax.Expr], fixed: DType | None, key: Key, span: Span) -> None:
        """`shared var x[n]`: memory for each iteration of the loops around."""
        if not self.context.loops:
            raise self.context.fail("TW005", f"the shared array '{name}' must be in a loop", span, "an array of the whole kernel is made with zeros(…)")
        if self.context.spread is not None:
            raise self.context.fail("TW005", f"the shared array '{name}' stands between tiles that change", span, "declare it in an outer loop")
        shape = tuple(s for node in extents for s in self.expressions.shape_argument(node))
        lead, outer = [], []
        for var in self.context.loops:
            if var.low is None or var.high is None or not surely_nonnegative(var.low):
                raise self.context.fail("TW014", f"the shared array '{name}' stands in a loop over '{var.name}', whose range is not made of sizes", span)
            lead.append(IndexRef(var, span=span))
            outer.append(var.high + 1)
        known = self.context.state.variables.setdefault(key, VariableState())
        array = self.arrays.new_array(name, fixed or self.variables.dtype(known), (*outer, *shape), "scratch")
        self.context.scope.names[name] = SharedArray(array, tuple(lead), (0, "") if fixed is not None else key)

    def learn_shared(self, base: syntax.Expr, value: Expr, span: Span) -> None:
        """A shared array without a dtype has that of what is stored to it."""
        binding = self.context.scope.find(base.id) if isinstance(base, syntax.Name) else None
        if isinstance(binding, SharedArray) and binding.key[0] and isinstance(base, syntax.Name):
            known = self.context.state.variables[binding.key]
            first = known.strong is None and known.weak is None
            dtype = self.variables.learn(binding.key, type_of(value), base.id, span)[0]
            if first or dtype is not binding.array.dtype:
                self.context.scope.rebind(base.id, Poison())  # what reads it learns nothing from a type that was only assumed
                raise Skip  # the next walk knows


def _never_meet(a: IndexForm, b: IndexForm, element_vars: Sequence[LoopVar]) -> bool:
    """Whether two indices differ by a constant at every iteration."""
    gap = (a.constant - b.constant).constant
    return dict(a.factors) == dict(b.factors) and gap is not None and gap != 0 and not set(a.values) & set(element_vars)


def _slice_at(nodes: Sequence[syntax.Expr], lead: Sequence[Expr], axis: int) -> syntax.Slice | None:
    """The slice written for an axis, None where it is missing or bare."""
    position = axis - len(lead)
    node = nodes[position] if position < len(nodes) else None
    return node if isinstance(node, syntax.Slice) and (node.lo is not None or node.hi is not None) else None


def with_indices(expr: Expr, moved: Mapping[LoopVar, LoopVar]) -> Expr:
    """An index expression with other loop indices in place of some."""
    if isinstance(expr, IndexRef):
        return replace(expr, var=moved.get(expr.var, expr.var))
    if isinstance(expr, Apply):
        return replace(expr, args=tuple(with_indices(a, moved) for a in expr.args))
    if isinstance(expr, Element):
        return replace(expr, indices=tuple(with_indices(index, moved) for index in expr.indices))
    return replace(expr, value=with_indices(expr.value, moved)) if isinstance(expr, Cast) else expr
