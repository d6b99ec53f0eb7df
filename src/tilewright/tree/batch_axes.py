"""Along which axes a kernel can be cut into parts that run at once. In: a typed kernel; out: a `Split`, or why there is none.

A kernel is split along one size, say `n`: every axis of that extent is cut alike, and arrays without one are given to every part
whole. That is right where a point of the loop over `n` touches no other point's share: indices along those axes are the loop's own
index, and neither that index nor `n` is used as a number. Values accumulated over `n` are partial: they may only be handed on to
outputs, which are then combined with the accumulation's own operation.
"""

from __future__ import annotations

from tilewright.base.errors import Diagnostics, UserError
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.source import Span
from tilewright.tree.bounds import affine
from tilewright.tree.typed import (
    Accumulate,
    Apply,
    ArrayAssign,
    ArrayInfo,
    Cast,
    Const,
    Element,
    Expr,
    IndexRef,
    Local,
    LoopVar,
    Picked,
    Reduce,
    ReduceLoop,
    SetVar,
    SizeValue,
    Stmt,
    Store,
    TypedBarrier,
    TypedIf,
    TypedKernel,
    TypedLoop,
    TypedTurns,
    TypedWhile,
    Variable,
    Whole,
)
from tilewright.tree.typed_text import show_expr
from tilewright.tree.typed_walk import assigned, children, own_exprs, walk, walk_expr

COMBINED = ("add", "mul", "min", "max", "and", "or")
"""Operations that combine the results of parts."""
_NEUTRAL = {"add": 0, "mul": 1}
"""Starts that may be counted once for each part. Of the other operations every start may."""

Partial = dict[Variable | str, str]
"""Variables and (names of) arrays that hold what a part accumulated, with the operation."""


@record
class Split:
    """How to cut a kernel."""

    size: str
    """The name of the extent."""
    axes: tuple[tuple[str, int], ...]
    """Inputs and outputs that are cut, and along which axis; all others are whole in every part."""
    combined: tuple[tuple[str, str], ...] = ()
    """Outputs that are combined from those of all parts, and by which operation."""

    def axis(self, array: str) -> int | None:
        return dict(self.axes).get(array)

    def operation(self, output: str) -> str | None:
        return dict(self.combined).get(output)


def find_split(kernel: TypedKernel, along: tuple[str, int] | None = None) -> Split:
    """The first of `find_splits`."""
    return find_splits(kernel, along)[0]


def find_splits(kernel: TypedKernel, along: tuple[str, int] | None = None) -> list[Split]:
    """The ways to cut a kernel, the leading axes of its outputs first, ways with results that are combined last.

    `along` asks for an axis of an input. Raises UserError with the reasons and their lines where there is no way.
    """
    candidates = _candidates(kernel) if along is None else [_asked(kernel, *along)]
    found: list[Split] = []
    first: Diagnostics | None = None
    for size in candidates:
        sink = Diagnostics()
        split = _BatchSplitter(kernel, size, sink).split()
        if split is not None:
            found.append(split)
        first = first or sink
    if found:
        return sorted(found, key=lambda split: bool(split.combined))
    if first is None:
        raise UserError.at(
            "TW012", f"{kernel.name} has no axis along which it could be split: all extents are constants", kernel.span
        )
    first.raise_if_errors()
    raise AssertionError("unreachable")


def _candidates(kernel: TypedKernel) -> list[str]:
    """Names of extents, the leading axes of outputs first, then those of inputs."""
    inputs = [a for a in kernel.inputs if isinstance(a, ArrayInfo)]
    bound = {size.name for array in inputs for size in array.shape}
    found: dict[str, None] = {}
    for arrays in (kernel.outputs, inputs):
        for axis in range(max((a.rank for a in arrays), default=0)):
            for array in arrays:
                if axis < array.rank and array.shape[axis].name in bound and array.shape[axis].name:
                    found[array.shape[axis].name or ""] = None
    return list(found)


def _asked(kernel: TypedKernel, array: str, axis: int) -> str:
    arrays = {a.name: a for a in kernel.inputs if isinstance(a, ArrayInfo)}
    if array not in arrays or not 0 <= axis < arrays[array].rank:
        known = ", ".join(f"{a.name} of rank {a.rank}" for a in arrays.values())
        raise UserError.at(
            "TW016", f"{kernel.name} has no axis {axis} of '{array}' to split", kernel.span, f"its arrays are {known}"
        )
    name = arrays[array].shape[axis].name
    if name is None:
        raise UserError.at("TW012", f"axis {axis} of '{array}' is always {arrays[array].shape[axis]} long", kernel.span)
    return name


class _BatchSplitter:
    """Checks one size."""

    def __init__(self, kernel: TypedKernel, size: str, sink: Diagnostics) -> None:
        self.kernel, self.size, self.sink = kernel, size, sink
        self.axes: dict[str, int] = {}
        self.partial: Partial = {}
        self.plain: list[tuple[Variable | str, Expr, Span]] = []
        """What else is written to variables and arrays."""

    def split(self) -> Split | None:
        """The way, or None with the reasons in the sink."""
        kernel = self.kernel
        arrays = [*(a for a in kernel.inputs if isinstance(a, ArrayInfo)), *kernel.outputs, *kernel.scratch]
        for array in arrays:
            self._array(array)
        for check in kernel.checks:
            least = check.left.constant
            if check.relation == "le" and check.right.name == self.size and least is not None and least <= 1:
                continue  # no part is empty unless the whole is
            if self.size in check.right.names or (self.size in check.left.names and check.relation == "eq"):
                self._refuse(f"it is held against another size: {check.left} {check.relation} {check.right}", check.span)
        if self.sink.errors:
            return None
        known = -1
        while known < len(self.partial):
            # Once more with what is partial by then: a loop around may have brought it to an earlier line.
            known = len(self.partial)
            self.sink.items.clear()
            self.plain.clear()
            self._statements(kernel.body, None)
        self._starts()
        if self.sink.errors:
            return None
        outside = [a.name for a in arrays if a.role != "scratch"]
        combined = tuple((a.name, self.partial[a.name]) for a in kernel.outputs if a.name in self.partial)
        return Split(self.size, tuple((n, self.axes[n]) for n in outside if n in self.axes), combined)

    def _refuse(self, why: str, span: Span) -> None:
        if len(self.sink.errors) < 3:
            self.sink.error("TW012", f"{self.kernel.name} cannot be split along '{self.size}': {why}", span)

    def _array(self, array: ArrayInfo) -> None:
        for axis, extent in enumerate(array.shape):
            if extent.name == self.size and array.name not in self.axes:
                self.axes[array.name] = axis
            elif self.size in extent.names:
                self._refuse(f"the extent of axis {axis} of '{array.name}' is {extent}, too", self.kernel.span)

    # -- statements ---------------------------------------------------------------------------------------------

    def _statements(self, stmts: tuple[Stmt, ...], inside: LoopVar | None) -> None:
        for stmt in stmts:
            self._statement(stmt, inside)

    def _statement(self, stmt: Stmt, inside: LoopVar | None) -> None:
        if isinstance(stmt, TypedLoop):
            self._statements(stmt.body, self._enter(stmt.vars, stmt, inside))
        elif isinstance(stmt, ReduceLoop):
            own = self._enter(stmt.outer, stmt, inside)
            cut = self._enter(stmt.inner, stmt, own, (stmt.var,))
            if cut is not own:
                self._accumulates(stmt.array.name, stmt.kind, stmt.span)
            elif own is None:
                self._repeated(stmt.array.name, stmt.kind, stmt.span)
            self._statements(stmt.body, cut)
        elif isinstance(stmt, ArrayAssign):
            self._array_value(stmt)
        elif isinstance(stmt, Store):
            self._store(stmt, inside)
        elif isinstance(stmt, SetVar):
            added = accumulation(stmt)
            if added is not None and self.partial.get(stmt.var) == added.kind:
                self._value(added.value, inside)
                return
            self.plain.append((stmt.var, stmt.value, stmt.span))
            self._value(stmt.value, inside)
        elif isinstance(stmt, TypedIf | TypedWhile):
            self._value(stmt.cond, inside)
            for body in (stmt.then, stmt.otherwise) if isinstance(stmt, TypedIf) else (stmt.body,):
                self._statements(body, inside)
        elif isinstance(stmt, TypedTurns):
            for turn in stmt.bodies:
                self._statements(turn, inside)
        elif not isinstance(stmt, TypedBarrier):
            if isinstance(stmt, Accumulate) and inside is None:
                self._repeated(stmt.var, stmt.kind, stmt.span)
            for expr in own_exprs(stmt):
                self._value(expr, inside)

    def _enter(
        self, loops: tuple[LoopVar, ...], stmt: TypedLoop | ReduceLoop, inside: LoopVar | None, own: tuple[Variable, ...] = ()
    ) -> LoopVar | None:
        """The index that is cut inside these loops; what they accumulate is partial from now on."""
        found = inside
        for var in loops:
            full = var.full
            if full is not None and full.name == self.size:
                if found is not None:
                    self._refuse(f"for every '{found.name}' the loop over '{var.name}' needs all of it", stmt.span)
                found = var
                continue
            for bound in (var.lo, var.hi):
                self._value(bound, inside)
        if found is not inside:
            self._effects(stmt, own)
        return found

    def _effects(self, stmt: TypedLoop | ReduceLoop, own: tuple[Variable, ...]) -> None:
        """What iterations of the cut loop leave behind besides their own share."""
        outer = {var for var in assigned(stmt.body) if var not in own}
        for inner in walk(stmt.body):
            if isinstance(inner, Accumulate) and inner.var in outer:
                self._accumulates(inner.var, inner.kind, inner.span)
            elif isinstance(inner, SetVar) and not inner.declares and inner.var in outer:
                added = accumulation(inner)
                if added is not None:
                    self._accumulates(inner.var, added.kind, inner.span)
                    continue
                self._refuse(f"'{inner.var.name}' is carried from one iteration to the next", inner.span)
            elif isinstance(inner, Store) and inner.array.name not in self.axes:
                if inner.kind:
                    self._accumulates(inner.array.name, inner.kind, inner.span)
                else:
                    self._refuse(f"every iteration stores to the same '{inner.array.name}'", inner.span)

    def _accumulates(self, target: Variable | str, kind: str, span: Span) -> None:
        name = target if isinstance(target, str) else target.name
        if kind not in COMBINED:
            self._refuse(f"'{name}' is a reduction over it ({kind}), which parts cannot make", span)
        elif self.partial.setdefault(target, kind) != kind:
            self._refuse(f"'{name}' accumulates over it with several operations", span)

    def _repeated(self, target: Variable | str, kind: str, span: Span) -> None:
        """Something that every part adds to what it accumulated: that must not count several times."""
        known = self.partial.get(target)
        if known is not None and (known in _NEUTRAL or known != kind):
            name = target if isinstance(target, str) else target.name
            self._refuse(f"'{name}' accumulates over it, and here something that every part would count", span)

    def _store(self, stmt: Store, inside: LoopVar | None) -> None:
        self._indices(stmt.array, stmt.indices, inside, stmt.span)
        if stmt.kind:
            if inside is None:
                self._repeated(stmt.array.name, stmt.kind, stmt.span)
            self._value(stmt.value, inside)
        else:
            self._hand_on(stmt.array, stmt.value, inside, stmt.span)

    def _array_value(self, stmt: ArrayAssign) -> None:
        value = stmt.value
        for expr in walk_expr(value):
            cut = [axis for axis, extent in enumerate(expr.shape) if self.size in extent.names]
            if len(cut) > 1:
                self._refuse(f"a value here has it along {len(cut)} axes", expr.span)
            if isinstance(expr, Picked) and any(self.size in extent.names for part in walk_expr(expr) for extent in part.shape):
                self._refuse("a value here picks elements along it", expr.span)
        if isinstance(value, Reduce):
            inner = value.value
            cut = [axis for axis, extent in enumerate(inner.shape) if extent.name == self.size]
            if any(axis in value.axes for axis in cut):
                self._accumulates(stmt.array.name, value.kind, stmt.span)
                self._value(inner, None)
                return
        self._hand_on(stmt.array, value, None, stmt.span)

    def _hand_on(self, array: ArrayInfo, value: Expr, inside: LoopVar | None, span: Span) -> None:
        """A plain write; one of nothing but a partial value makes the array partial."""
        bare = value
        while isinstance(bare, Cast):
            bare = bare.value
        source: Variable | str | None = None
        if isinstance(bare, Local):
            source = bare.var
        elif isinstance(bare, Element | Whole):
            source = bare.array.name
        if source is None or source not in self.partial or array.name in self.axes:
            self.plain.append((array.name, value, span))
            self._value(value, inside)
            return
        if isinstance(bare, Element):
            self._indices(bare.array, bare.indices, inside, span)
        self._accumulates(array.name, self.partial[source], span)

    def _starts(self) -> None:
        """What a partial sum or product starts from is counted by every part."""
        for target, value, span in self.plain:
            kind = self.partial.get(target, "")
            if kind in _NEUTRAL and not (isinstance(value, Const) and value.value == _NEUTRAL[kind]):
                name = target if isinstance(target, str) else target.name
                self._refuse(f"'{name}' accumulates over it ({kind}) and does not start from {_NEUTRAL[kind]}", span)

    # -- expressions --------------------------------------------------------------------------------------------

    def _indices(self, array: ArrayInfo, indices: tuple[Expr, ...], inside: LoopVar | None, span: Span) -> None:
        cut = self.axes.get(array.name)
        for axis, index in enumerate(indices):
            if axis != cut:
                self._value(index, inside)
                continue
            form = affine(index)
            if inside is None or form is None or form.bare is not inside:
                place = f"{array.name}[{', '.join(map(show_expr, indices))}]"
                needed = f"the part of one '{inside.name}'" if inside is not None else "one part"
                self._refuse(f"{place} is not in {needed}", span)

    def _value(self, expr: Expr, inside: LoopVar | None) -> None:
        """An expression as a number: it must be the same in a part as in the whole."""
        if isinstance(expr, IndexRef) and _runs_over(expr.var, self.size):
            self._refuse(f"the index '{expr.var.name}' is used as a number, which in a part would begin anew", expr.span)
        elif isinstance(expr, SizeValue) and self.size in expr.size.names:
            self._refuse("its extent is used as a number, which in a part would be smaller", expr.span)
        elif isinstance(expr, Local) and expr.var in self.partial:
            self._refuse(f"'{expr.var.name}' accumulates over all of it and is used here; a part knows only its own", expr.span)
        elif isinstance(expr, Element | Whole) and expr.array.name in self.partial:
            self._refuse(f"'{expr.array.name}' accumulates over all of it and is used here; a part knows only its own", expr.span)
        elif isinstance(expr, Element):
            self._indices(expr.array, expr.indices, inside, expr.span)
        else:
            for child in children(expr):
                self._value(child, inside)


def accumulation(stmt: SetVar) -> Accumulate | None:
    """`v = max(v, x)` as what it is."""
    value = stmt.value
    if not isinstance(value, Apply) or value.op not in COMBINED or len(value.args) != 2:
        return None
    for own, other in (value.args, value.args[::-1]):
        reads = any(isinstance(e, Local) and e.var is stmt.var for e in walk_expr(other))
        if isinstance(own, Local) and own.var is stmt.var and not reads:
            return Accumulate(stmt.var, value.op, other, span=stmt.span)
    return None


def _runs_over(var: LoopVar, size: str) -> bool:
    full: Size | None = var.full
    return full is not None and full.name == size
