"""Checking tiles that have a name.

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

from collections.abc import Sequence

from tilewright.base.dtypes import DType, bool_
from tilewright.base.record import replace
from tilewright.base.sizes import ONE
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.check.context import Context, Skip, Spread
from tilewright.tree.check.elements import ElementBuilder, limits_of
from tilewright.tree.check.expressions import ExpressionChecker, flatten_index
from tilewright.tree.check.infer import type_of
from tilewright.tree.check.operations import Typing
from tilewright.tree.check.sizes import SizeChecker
from tilewright.tree.check.state import Alias, Key, SharedArray, TileValue, VariableSlot, VariableState
from tilewright.tree.check.variables import VariableTypes, contribution, summed
from tilewright.tree.typed import (
    TRUE,
    Accumulate,
    Apply,
    ArrayInfo,
    Element,
    Expr,
    IndexRef,
    Limits,
    Local,
    SetVar,
    Shape,
    Stmt,
    Store,
    TileLocal,
    TypedIf,
    TypedLoop,
    TypedView,
    Variable,
    Whole,
)
from tilewright.tree.typed_walk import bodies, exprs_in, walk, walk_expr


class TileChecker:
    def __init__(
        self, context: Context, sizes: SizeChecker, typing: Typing, elements: ElementBuilder, expressions: ExpressionChecker, variables: VariableTypes
    ) -> None:  # fmt: skip
        self.context = context
        self.sizes = sizes
        self.typing = typing
        self.elements = elements
        self.expressions = expressions
        self.variables = variables

    # -- named tiles --------------------------------------------------------------------------------------------------

    def declare_tile(self, name: str, value: Expr, key: Key, span: Span, fixed: DType | None, immutable: bool) -> None:
        """`name = value` inside a loop, where the value is a tile or later ones are."""
        known = self.context.state.variables.setdefault(key, VariableState())
        value = self.typing.settled(value) if key not in self.context.state.assigned else value
        shape = self.sizes.broadcast([known.shape, value.shape], span)
        if fixed is not None:
            value = self.typing.assignable(value, fixed, f"'{name}'", span)
        if key in self.context.state.assigned:
            known.shape = shape
            self.declare_changing(name, value, key, span, fixed, shape, immutable)
            return
        changing = _changing(value)
        if not changing:
            self.context.scope.names[name] = Alias(value, key)
            return
        limits = limits_of(value)
        versions = tuple((what, self.context.versions.get(what, 0)) for what in changing)
        var = Variable(name, value.dtype)
        held = self.fits(value.shape) and all(map(self.hoistable, limits))
        if held:
            self.set_element(var, value, span, declares=True)
        self.context.tile_keys[var] = key
        slot = VariableSlot(var, key, len(self.context.loops), immutable=immutable)
        self.context.scope.names[name] = TileValue(slot, value.shape, [list(bounds) for bounds in limits], held, value, versions)

    def declare_changing(
        self, name: str, value: Expr, key: Key, span: Span, fixed: DType | None, shape: Shape, immutable: bool
    ) -> None:  # fmt: skip
        self.demand(shape, span)
        pair = (fixed, "") if fixed is not None else self.variables.learn(key, type_of(value), name, span)
        var = Variable(name, pair[0], pair[1], True)
        limits = [list(bounds) for bounds in limits_of(value)] or [[] for _ in shape]
        limits = [[] for _ in range(len(shape) - len(limits))] + limits
        slot = VariableSlot(var, key, len(self.context.loops), fixed is not None, immutable=immutable)
        self.set_element(var, self.typing.convert(value, var.dtype), span, declares=True)
        self.context.scope.names[name] = TileValue(slot, shape, limits)

    def demand(self, shape: Shape, span: Span) -> None:
        """The loop around must run for each element of such a shape. What this walk finds out the next one goes by."""
        if not self.context.fors:
            raise self.context.fail("TW005", "a tile that changes cannot be in the loop of a reduce kernel", span, "use @kernel fused and store to out")
        place = self.context.fors[-1] if self.context.spread is None else self.context.spread_key
        known = self.context.state.tiled.get(place, ())
        wanted = list(known if len(known) > len(shape) else shape)
        for axis in range(1, min(len(known), len(shape)) + 1):
            a, b = known[-axis], shape[-axis]
            if a != b and ONE not in (a, b):
                raise self.context.fail(
                    "TW004", f"tiles that change in one loop have extents {a} and {b} along one axis", span, "change them in loops of their own"
                )
            wanted[-axis] = b if a == ONE else a
        if self.context.carrying and self.context.spread is None and known == tuple(wanted):
            raise self.context.fail("TW005", "a tile that changes beside whole arrays that do", span, "make it with tw.empty, and write its elements in a loop")
        if self.context.spread is None or self.context.spread.shape != tuple(wanted):
            self.context.state.tiled[place] = tuple(wanted)
            self.context.state.changed = True
            raise Skip

    def becomes_tile(self, slot: VariableSlot, name: str, value: Expr, span: Span) -> None:
        """A variable that held a number is given a tile."""
        if not slot.depth:
            return
        known = self.context.state.variables.setdefault(slot.key, VariableState())
        shape = self.sizes.broadcast([known.shape, value.shape], span)
        if shape != known.shape:
            known.shape = shape
            self.context.state.changed = True
            raise Skip

    # -- the element at hand ------------------------------------------------------------------------------------------

    def fits(self, shape: Shape) -> bool:
        """Whether the spread body has an index for every axis."""
        spread = self.context.spread
        return spread is not None and len(shape) <= len(spread.shape) and all(
            extent == ONE or extent == spread.shape[-place] for place, extent in enumerate(reversed(shape), 1)
        )  # fmt: skip

    def here(self, shape: Shape, span: Span) -> tuple[Expr, ...]:
        """The indices of the element at hand."""
        assert self.context.spread is not None
        indices: list[Expr] = []
        for place in range(len(shape), 0, -1):
            var = self.context.spread.at(-place)
            indices.append(self.typing.literal(0, span) if var is None else IndexRef(var, span=span))
        return tuple(indices)

    def guard(self, limits: Limits) -> tuple[Expr, ...]:
        """Conditions under which the element at hand exists."""
        assert self.context.spread is not None
        conditions: dict[Expr, None] = {}
        for place, bounds in enumerate(reversed(limits), 1):
            var = self.context.spread.at(-place)
            if var is not None:
                conditions.update((Apply("lt", (IndexRef(var), bound), bool_), None) for bound in bounds)
        return tuple(conditions)

    def under(self, conditions: tuple[Expr, ...], body: Sequence[Stmt], span: Span) -> None:
        """Statements that happen where these conditions hold."""
        if conditions:
            self.context.emit(TypedIf(all_of(conditions), tuple(body), span=span))
        else:
            self.context.out += body

    def set_element(self, var: Variable, value: Expr, span: Span, declares: bool = False, kind: str = "") -> None:
        """The element at hand of a tile variable gets its value, where the value has such an element."""
        assert self.context.spread is not None
        conditions = self.guard(limits_of(value))
        with self.context.collected() as body:
            element = self.elements.element(value, self.here(value.shape, span), span)
        if conditions:
            self.context.spread.guards.append(conditions)
        if conditions and declares:
            self.context.emit(SetVar(var, self.typing.convert(self.typing.literal(0, span), var.dtype), True, span=span))
        last = Accumulate(var, kind, element, span=span) if kind else SetVar(var, element, declares and not conditions, span=span)
        self.under(conditions, [*body, last], span)

    # -- assignments --------------------------------------------------------------------------------------------------

    def assign_tile(self, stmt: syntax.Assign, name: str, tile: TileValue) -> None:
        """`name = value` for a tile that changes."""
        slot, var = tile.slot, tile.slot.var
        if slot.immutable:
            raise self.context.fail("TW015", f"'{name}' was declared with let and cannot change", stmt.span, f"declare it with var {name}")
        part = contribution(stmt, name)
        if part is not None:
            kind, negative, node = part
            value = self.expressions.expr(node)
            start = len(self.context.out)
            if not any(isinstance(e, TileLocal) and e.var is var for e in walk_expr(value)):
                self.accumulate_tile(stmt, name, tile, kind, negative, value)
                if not any(isinstance(e, Local) and e.var is var for e in exprs_in(tuple(self.context.out[start :]))):
                    return
                del self.context.out[start :]
        node = stmt.value if not stmt.op else syntax.Binary(stmt.op, stmt.target, stmt.value, span=stmt.span)
        value = self.expressions.expr(node)
        if not slot.fixed:
            self.variables.learn(slot.key, type_of(value), name, stmt.span)
        self.grow(name, tile, value, stmt.span)
        self.set_element(var, self.typing.assignable(value, var.dtype, f"'{name}'", stmt.span), stmt.span)
        self.context.changed(var)

    def accumulate_tile(self, stmt: syntax.Assign, name: str, tile: TileValue, kind: str, negative: bool, value: Expr) -> None:
        """`name += value` for a tile that changes."""
        slot, var = tile.slot, tile.slot.var
        if not slot.fixed:
            self.variables.learn(slot.key, summed(kind, value, len(self.context.loops) > slot.depth), name, stmt.span)
        self.grow(name, tile, value, stmt.span)
        value = self.typing.assignable(value, var.dtype, f"'{name}'", stmt.span)
        self.set_element(var, self.typing.negate(value, stmt.span) if negative else value, stmt.span, kind=kind)
        self.context.changed(var)

    def grow(self, name: str, tile: TileValue, value: Expr, span: Span) -> None:
        """What an assignment tells about the shape of a tile and its limits."""
        known = self.context.state.variables.setdefault(tile.slot.key, VariableState())
        shape = self.sizes.broadcast([tile.shape, value.shape], span)
        if shape != known.shape:
            known.shape = shape
            self.context.state.changed = True
        if shape != tile.shape:
            raise Skip
        for place, bounds in enumerate(reversed(limits_of(value)), 1):
            if value.shape[-place] != ONE and self.hoistable(bounds):
                tile.limits[-place] += [b for b in bounds if b not in tile.limits[-place]]

    # -- what changes -------------------------------------------------------------------------------------------------

    def changes_in(self, body: tuple[syntax.Stmt, ...]) -> None:
        """A loop begins: what its body assigns changes from one iteration to the next."""
        for stmt in body:
            if isinstance(stmt, syntax.Assign):
                target = flatten_index(stmt.target)[0] if isinstance(stmt.target, syntax.Index) else stmt.target
                binding = self.context.scope.find(target.id) if isinstance(target, syntax.Name) else None
                if isinstance(binding, VariableSlot | TileValue):
                    self.context.changed(binding.var if isinstance(binding, VariableSlot) else binding.slot.var)
                elif isinstance(binding, ArrayInfo | SharedArray):
                    self.context.changed(binding.name if isinstance(binding, ArrayInfo) else binding.array.name)
                elif binding is None and isinstance(target, syntax.Name):
                    self.context.changed(target.id)
            elif isinstance(stmt, syntax.For | syntax.While):
                self.changes_in(stmt.body)
            elif isinstance(stmt, syntax.If):
                self.changes_in((*stmt.then, *stmt.otherwise))

    def hoistable(self, bounds: Sequence[Expr]) -> bool:
        """Whether the bounds are the same all through the spread body."""
        if self.context.spread is None:
            return False
        known = set(self.context.loops[: self.context.spread.depth])
        for bound in bounds:
            for expr in walk_expr(bound):
                if isinstance(expr, Local | Element) or (isinstance(expr, IndexRef) and expr.var not in known):
                    return False
        return True

    # -- spread loops -------------------------------------------------------------------------------------------------

    def open_spread(self, shape: Shape, span: Span) -> Spread:
        """The body of the loop just entered runs for each element of this shape."""
        spread_vars = tuple(None if extent == ONE else self.elements.index(extent, (), span) for extent in shape)
        self.context.spread = Spread(shape, spread_vars, len(self.context.loops))
        self.context.spread_key = self.context.fors[-1]
        self.context.loops.extend(v for v in spread_vars if v is not None)
        return self.context.spread

    def close_spread(self, spread: Spread, body: tuple[Stmt, ...], asked: str, span: Span) -> tuple[Stmt, ...]:
        """The body of a spread loop, as a loop over the elements."""
        variables = tuple(v for v in spread.vars if v is not None)
        self.whole_statements(spread, body)
        del self.context.loops[len(self.context.loops) - len(variables) :]
        self.context.spread = None
        shared = set(spread.guards)
        if len(shared) == 1 and (conditions := shared.pop()):
            body = (TypedIf(all_of(conditions), _without_guard(body, all_of(conditions)), span=span),)
        return (TypedLoop(variables, body, asked=asked, span=span),) if variables else body

    def whole_statements(self, spread: Spread, body: tuple[Stmt, ...]) -> None:
        """Elements of the tiles run through the whole body one by one: none may see what another has stored."""
        wanted = {v for v in spread.vars if v is not None}
        stores: dict[str, tuple[Expr, ...] | None] = {}
        for stmt in walk(body):
            if isinstance(stmt, Store):
                reached = {e.var for index in stmt.indices for e in walk_expr(index) if isinstance(e, IndexRef)}
                indices = stmt.indices if wanted <= reached else None
                if stores.setdefault(stmt.array.name, indices) != indices:
                    stores[stmt.array.name] = None
        for expr in exprs_in(body):
            if isinstance(expr, Element) and expr.array.name in stores and expr.indices != stores[expr.array.name]:
                self.context.sink.error(
                    "TW005", f"'{expr.array.name}' is written in the loop whose tiles change and cannot be read there", expr.span,
                    "read it in a loop of its own",
                )  # fmt: skip


def _changing(value: Expr) -> dict[Variable | str, None]:
    """The variables, and arrays by name, that it reads and that may change."""
    changing: dict[Variable | str, None] = {}
    for expr in walk_expr(value):
        if isinstance(expr, Local | TileLocal) and expr.var.mutable:
            changing[expr.var] = None
        elif isinstance(expr, Element | TypedView | Whole) and expr.array.role != "input":
            changing[expr.array.name] = None
    return changing


def _without_guard(stmts: tuple[Stmt, ...], cond: Expr) -> tuple[Stmt, ...]:
    """The statements with `if cond` taken off; conditions that begin with it keep the rest."""
    result: list[Stmt] = []
    for stmt in stmts:
        if isinstance(stmt, TypedIf) and stmt.cond == cond and not stmt.otherwise:
            result += _without_guard(stmt.then, cond)
        elif isinstance(stmt, TypedIf):
            result.append(replace(stmt, then=_without_guard(stmt.then, cond), otherwise=_without_guard(stmt.otherwise, cond)))
        elif isinstance(stmt, TypedLoop) and bodies(stmt):
            result.append(replace(stmt, body=_without_guard(stmt.body, cond)))
        else:
            result.append(stmt)
    return tuple(result)


def all_of(conditions: Sequence[Expr]) -> Expr:
    total = conditions[0] if conditions else TRUE
    for condition in conditions[1:]:
        total = Apply("and", (total, condition), bool_)
    return total
