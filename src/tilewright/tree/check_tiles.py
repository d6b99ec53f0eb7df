"""Checking tiles that have a name, stores to parts of arrays, and shared arrays.

A tile that never changes is another name for its value. A variable that changes holds one element of its tile, and the body of the loop it
is declared in runs for each element (a `Spread`):

    for i in 0..rows step 64:                        for i in 0..rows step 64, t1 in 0..64:
        var m = -inf                                     if t1 < rows - i:
        for j in 0..cols step 64:              ->            var m = -inf
            m = max(m, row_max(x[i:i+64, j:j+64]))           for j in 0..cols step 64:
        out[i:i+64] = m                                          … m = max(m, max2)
                                                             out[i + t1] = m

Such a tile can only be used element by element, or along axes of extent 1: what attention carries is of that kind, an update like
`state = state @ step` is not. Elements beyond the limits of a value are neither computed nor written; where these are the same all over
a spread body, one `if` around it says so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from tilewright.base.dtypes import DType, bool_, i64
from tilewright.base.sizes import ONE, Size
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.bounds import Affine, affine, interval, surely_nonnegative
from tilewright.tree.check_expr import flatten_index
from tilewright.tree.check_parts import PartChecker, Spread
from tilewright.tree.check_state import Alias, Key, Poison, Shared, Slot, Tile, VariableState
from tilewright.tree.infer import Skip, TypePair, join, type_of
from tilewright.tree.typed import (
    TRUE,
    Accumulate,
    Apply,
    ArrayInfo,
    Const,
    Element,
    Expr,
    If,
    IndexRef,
    Limits,
    Local,
    Loop,
    LoopVar,
    SetVar,
    Shape,
    Stmt,
    Store,
    TileLocal,
    Variable,
    View,
    Whole,
)
from tilewright.tree.typed_text import show_expr
from tilewright.tree.typed_walk import bodies, exprs_in, walk, walk_expr


class TileChecker(PartChecker):
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
        self.apart(array, tuple(starts), own, body)
        if own:
            body = [Loop(tuple(own), tuple(body), asked="no", span=span)]
        if spread is not None:
            spread.guards.append(tuple(conditions))
            body = self.once(body, used, span)
        self.under(tuple(conditions), body, span)
        self.changed(array.name)

    def apart(self, array: ArrayInfo, written: tuple[Expr, ...], own: Sequence[LoopVar], body: Sequence[Stmt]) -> None:
        """A part that is written may not be read in the same statement, but for the element itself."""
        for expr in exprs_in(tuple(body)):
            if isinstance(expr, Element) and expr.array.name == array.name and expr.indices != written:
                pairs = [(affine(a), affine(b)) for a, b in zip(expr.indices, written, strict=True)]
                if not any(a is not None and b is not None and _never_meet(a, b, own) for a, b in pairs):
                    raise self.fail(
                        "TW005", f"this reads elements of '{array.name}' while others are written", expr.span, "write to another array"
                    )

    def once(self, body: list[Stmt], used: set[LoopVar], span: Span) -> list[Stmt]:
        """Stores without some of the spread indices happen once."""
        spread = () if self.spread is None else self.spread.vars
        zero = Const(0, i64, span=span)
        others = [Apply("eq", (IndexRef(v, span=span), zero), bool_) for v in spread if v is not None and v not in used]
        if not others or self.spread is None:
            return body
        self.spread.once = True
        return [If(_all(others), tuple(body), span=span)]

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
        array = self.new_array(name, fixed or self.learnt_dtype(known), (*outer, *shape), "scratch")
        self.scope.names[name] = Shared(array, tuple(lead), (0, "") if fixed is not None else key)

    def learnt_dtype(self, known: VariableState) -> DType:
        """What `learn_variable` gave last."""
        pair = join(known.weak, known.strong) if known.weak is not None and known.strong is not None else known.weak or known.strong
        return self.default_float if pair is None or pair[1] == "float" else pair[0]

    def learn_shared(self, base: syntax.Expr, value: Expr, span: Span) -> None:
        """A shared array without a dtype has that of what is stored to it."""
        found = self.scope.find(base.id) if isinstance(base, syntax.Name) else None
        if isinstance(found, Shared) and found.key[0] and isinstance(base, syntax.Name):
            known = self.state.variables[found.key]
            first = known.strong is None and known.weak is None
            dtype = self.learn_variable(found.key, type_of(value), base.id, span)[0]
            if first or dtype is not found.array.dtype:
                self.scope.rebind(base.id, Poison())  # what reads it learns nothing from a type that was only assumed
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
        self.whole_statements(spread, body)
        del self.loops[len(self.loops) - len(variables) :]
        self.spread = None
        shared = set(spread.guards)
        if len(shared) == 1 and (conditions := shared.pop()):
            body = (If(_all(conditions), _without_guard(body, _all(conditions)), span=span),)
        return (Loop(variables, body, asked=asked, span=span),) if variables else body

    def whole_statements(self, spread: Spread, body: tuple[Stmt, ...]) -> None:
        """Elements of the tiles run through the whole body one by one: none may see what another has stored."""
        wanted = {v for v in spread.vars if v is not None}
        stores: dict[str, tuple[Expr, ...] | None] = {}
        for stmt in walk(body):
            if isinstance(stmt, Store):
                reached = {e.var for index in stmt.indices for e in walk_expr(index) if isinstance(e, IndexRef)}
                own = stmt.indices if wanted <= reached else None
                if stores.setdefault(stmt.array.name, own) != own:
                    stores[stmt.array.name] = None
        for expr in exprs_in(body):
            if isinstance(expr, Element) and expr.array.name in stores and expr.indices != stores[expr.array.name]:
                self.sink.error(
                    "TW005", f"'{expr.array.name}' is written in the loop whose tiles change and cannot be read there", expr.span,
                    "read it in a loop of its own",
                )  # fmt: skip


def _changing(value: Expr) -> dict[Variable | str, None]:
    """The variables, and arrays by name, that it reads and that may change."""
    found: dict[Variable | str, None] = {}
    for expr in walk_expr(value):
        if isinstance(expr, Local | TileLocal) and expr.var.mutable:
            found[expr.var] = None
        elif isinstance(expr, Element | View | Whole) and expr.array.role != "input":
            found[expr.array.name] = None
    return found


def _never_meet(a: Affine, b: Affine, own: Sequence[LoopVar]) -> bool:
    """Whether two indices differ by a constant at every iteration."""
    gap = (a.offset - b.offset).constant
    return dict(a.terms) == dict(b.terms) and gap is not None and gap != 0 and not a.vars() & set(own)


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


def _slice_at(nodes: Sequence[syntax.Expr], lead: Sequence[Expr], axis: int) -> syntax.Slice | None:
    """The slice written for an axis, None where it is missing or bare."""
    position = axis - len(lead)
    node = nodes[position] if position < len(nodes) else None
    return node if isinstance(node, syntax.Slice) and (node.lo is not None or node.hi is not None) else None
