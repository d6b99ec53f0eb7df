"""Checking statements: one walk over a kernel's body.

A `BodyChecker` starts from what earlier walks left in `State`, types every statement, and writes back what it learnt:
the dtypes of variables, the dtypes and extents of outputs, which names are assigned to, which sizes are equal. An error
ends only the statement it is in.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base import dtypes
from tilewright.base.dtypes import DType, accumulator
from tilewright.base.errors import Diagnostics
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.check_expr import flatten_index
from tilewright.tree.check_state import Alias, Key, Poison, Slot, State, Tile, VariableState
from tilewright.tree.check_yields import YieldChecker
from tilewright.tree.infer import Skip, TypePair, join, type_of
from tilewright.tree.inline import nodes
from tilewright.tree.metadata import KernelKind, KernelMetadata, suggest
from tilewright.tree.typed import (
    Accumulate,
    ArgSpec,
    ArrayAssign,
    ArrayInfo,
    Barrier,
    Element,
    Expr,
    If,
    Local,
    Loop,
    LoopVar,
    ScalarInfo,
    SetVar,
    Stmt,
    Store,
    Variable,
    While,
)
from tilewright.tree.typed_walk import walk_expr

_COMBINE = {"+": "add", "*": "mul", "and": "and", "or": "or", "&": "and", "|": "or"}


class BodyChecker(YieldChecker):
    def __init__(
        self, function: syntax.Function, args: Sequence[ArgSpec], metadata: KernelMetadata, state: State, sink: Diagnostics
    ) -> None:  # fmt: skip
        super().__init__(function, args, state, sink)
        self.kernel = function
        self.metadata = metadata
        self.results: list[ArrayInfo] = []
        self.body: tuple[Stmt, ...] = ()
        self.broken: set[Span] = set()
        """Calls of kernels whose arguments are wrong: nothing is said about what follows from that."""

    # -- the walk ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
            given = dict(self.metadata.params)
            if self.metadata.kind in (KernelKind.CONV2D, KernelKind.CONV2D_DEPTHWISE) or name in given:
                value = self.literal(given.get(name, default), self.kernel.span)
                self.scope.names.setdefault(name, Alias(value, (0, name)))
        for name, number in self.metadata.params:
            self.scope.names.setdefault(name, Alias(self.literal(number, self.kernel.span), (0, name)))
        for name, _ in self.metadata.broadcast:
            if name not in self.inputs:
                help = suggest(name, list(self.inputs)) or f"inputs: {', '.join(self.inputs)}"
                span = next((a.span for a in self.kernel.attributes if a.name == "broadcast"), self.kernel.span)
                self.sink.error("TW002", f"@broadcast names '{name}', which is not an input", span, help)
        last = len(self.kernel.body) - 1
        for position, stmt in enumerate(self.kernel.body):
            self.statement(stmt, last=position == last)
        self.finish()
        self.body = tuple(self.out)

    def finish(self) -> None:
        if self.is_python and self.metadata.kind is not KernelKind.REDUCE:
            returns = [s for s in self.kernel.body if isinstance(s, syntax.Return) and s.value is not None]
            if not returns:
                self.sink.error("TW017", f"'{self.kernel.name}' returns nothing", self.kernel.span, "return the arrays it makes")
        else:
            self.results = [a for a in self.arrays.values() if a.role == "output"]
            if not self.results and not self.sink.errors:
                self.sink.error("TW017", "the kernel writes no output", self.kernel.span, "write out[…] = …, or yield in a reduce kernel")
        for result in self.results:
            # A store that is wrong in itself has been reported.
            if result.name not in self.written and not self.sink.errors:
                self.sink.error("TW017", f"output '{result.name}' is never written", self.kernel.span, f"store to {result.name}[…]")

    def statement(self, stmt: syntax.Stmt, last: bool = False) -> None:
        try:
            if self.broken and any(call in self.broken for call in stmt.span.calls()):
                raise Skip
            if isinstance(stmt, syntax.Let):
                self.let(stmt)
            elif isinstance(stmt, syntax.Assign):
                self.assign(stmt)
            elif isinstance(stmt, syntax.For):
                self.loop(stmt)
            elif isinstance(stmt, syntax.If):
                self.branch(stmt)
            elif isinstance(stmt, syntax.While):
                self.repeat(stmt)
            elif isinstance(stmt, syntax.Yield):
                self.yielded(stmt)
            elif isinstance(stmt, syntax.Return):
                self.returned(stmt, last)
            elif isinstance(stmt, syntax.Made):
                self.passed_on(stmt)
            elif isinstance(stmt, syntax.ReduceNest):
                self.reduce_loop(stmt.loop, stmt.op, stmt.axes, stmt.name)
            elif isinstance(stmt, syntax.Expect):
                self.expected(stmt.name, self.expr(stmt.value), stmt)
            elif isinstance(stmt, syntax.ExprStmt):
                self.bare(stmt)
            else:
                raise self.fail("TW005", f"a {type(stmt).__name__.lower()} cannot be inside a kernel", stmt.span)
        except Skip:
            if isinstance(stmt, syntax.Expect):
                self.broken.add(stmt.call)
            if isinstance(stmt, syntax.Let):
                for name in stmt.targets:
                    if not isinstance(self.scope.find(name), LoopVar):
                        self.scope.names[name] = Poison()

    def bare(self, stmt: syntax.ExprStmt) -> None:
        value = stmt.value
        if isinstance(value, syntax.String):
            return
        if isinstance(value, syntax.Call) and isinstance(value.function, syntax.Name) and value.function.id == "barrier":
            self.barrier(value)
            return
        self.expr(value)
        raise self.fail("TW005", "this expression has no effect", stmt.span, "assign it to a name")

    def barrier(self, node: syntax.Call) -> None:
        """`barrier()`: what stands before it is done for all elements of shared arrays."""
        if node.args:
            raise self.fail("TW016", f"barrier() takes 0 arguments, got {len(node.args)}", node.span)
        if self.guarded:
            raise self.fail("TW012", "barrier() under a condition: not every iteration would reach it", node.span, "put it after the if")
        uneven = next((loop for loop in self.loops if loop.count is None), None)
        if uneven is not None:
            raise self.fail(
                "TW012", f"barrier() in the loop over '{uneven.name}', whose range is not the same for all iterations around it: not all would reach it",
                node.span, "let the loop run over sizes",
            )  # fmt: skip
        if not self.loops:
            raise self.fail("TW005", "barrier() outside loops", node.span, "leave it out: nests run one after the other")
        self.out.append(Barrier(span=node.span))

    # -- declarations -----------------------------------------------------------------------------------------------

    def let(self, stmt: syntax.Let) -> None:
        if stmt.shared:
            fixed = None if stmt.type is None else self.dtype_argument(stmt.type)
            self.declare_shared(stmt.targets[0], stmt.extents, fixed, (id(stmt), stmt.targets[0]), stmt.span)
            return
        for name in stmt.targets:
            if isinstance(self.scope.find(name), LoopVar):
                raise self.fail("TW010", f"'{name}' is the index of a loop around it and cannot be declared again", stmt.span, "choose another name")
        assert stmt.value is not None
        if stmt.destructure or len(stmt.targets) > 1:
            self.destructure(stmt, stmt.value)
            return
        (name,) = stmt.targets
        fixed = None if stmt.type is None else self.dtype_argument(stmt.type)
        self.let_name(name, stmt.value, (id(stmt), name), stmt.span, fixed, not stmt.mutable)

    def let_name(
        self, name: str, node: syntax.Expr, key: Key, span: Span, fixed: DType | None = None, immutable: bool = False
    ) -> None:  # fmt: skip
        """`name = node`, for a new name: an array, a tuple or a number."""
        if self.create(name, node):
            return
        items = self.extents(node)
        if items is not None:
            self.scope.names[name] = items
            return
        self.declare(name, self.expr(node), key, span, fixed, immutable, _is_cast(node))

    def destructure(self, stmt: syntax.Let, node: syntax.Expr) -> None:
        items = self.extents(node)
        if items is None:
            raise self.fail("TW009", "a tuple is expected on the right", stmt.span)
        if len(items) != len(stmt.targets):
            what = f"'{_shape_owner(node)}' has rank {len(items)}" if _shape_owner(node) else f"there are {len(items)} values"
            raise self.fail("TW003", f"{what}, but {len(stmt.targets)} names are given", stmt.span)
        for name, item in zip(stmt.targets, items, strict=True):
            self.declare(name, item, (id(stmt), name), stmt.span, None, not stmt.mutable, False)

    def declare(
        self, name: str, value: Expr, key: Key, span: Span, fixed: DType | None, immutable: bool, is_cast: bool
    ) -> None:  # fmt: skip
        mutable = key in self.state.assigned
        known = self.state.variables.get(key)
        if self.loops and (value.shape or (known is not None and known.shape)):
            self.declare_tile(name, value, key, span, fixed, immutable)
            return
        if value.shape:
            self.declare_array(name, value, key, span)
            return
        if fixed is not None:
            var = Variable(name, fixed, "", mutable)
            self.out.append(SetVar(var, self.assignable(value, fixed, f"'{name}'", span), True, span=span))
            self.scope.names[name] = Slot(var, key, len(self.loops), True, immutable=immutable)
            return
        steady = not any(isinstance(e, Local) and e.var.mutable for e in walk_expr(value))
        if value.weak and not mutable and steady:
            self.scope.names[name] = Alias(value, key)
            self.call_sizes([name], [value])
            return
        pair = self.learn_variable(key, type_of(value), name, span)
        var = Variable(name, pair[0], pair[1], mutable)
        self.out.append(SetVar(var, self.convert(value, var.dtype), True, span=span))
        self.scope.names[name] = Slot(var, key, len(self.loops), is_cast, immutable=immutable)

    def learn_variable(self, key: Key, pair: TypePair, name: str, span: Span) -> TypePair:
        """The variable's type with one more value seen. Weak values are kept apart: they give way whatever the order."""
        known = self.state.variables.setdefault(key, VariableState())
        before = known.weak if pair[1] else known.strong
        joined = pair if before is None else join(before, pair)
        if joined is None:
            assert before is not None
            raise self.fail(
                "TW006", f"'{name}' would be both {before[0]} and {pair[0]}, which would lose data", span, "cast one of the values"
            )
        if joined != before:
            self.state.changed = True
            if pair[1]:
                known.weak = joined
            else:
                known.strong = joined
        total = known.weak or known.strong
        if known.weak is not None and known.strong is not None:
            total = join(known.weak, known.strong)
        if total is None:
            raise self.fail("TW006", f"'{name}' would be both an index and {pair[0]}, which would lose data", span, "cast one of the values")
        return (self.default_float, "float") if total[1] == "float" else total

    # -- assignments ------------------------------------------------------------------------------------------------

    def assign(self, stmt: syntax.Assign) -> None:
        if isinstance(stmt.target, syntax.Index):
            self.store(stmt, stmt.target)
            return
        if not isinstance(stmt.target, syntax.Name):
            raise self.fail("TW015", "only a name or an element of an output can be assigned to", stmt.span)
        name = stmt.target.id
        found = self.scope.find(name)
        if isinstance(found, Poison):
            raise Skip
        if isinstance(found, LoopVar):
            raise self.fail("TW010", f"'{name}' is the index of a loop around it and cannot be assigned to", stmt.span, "choose another name")
        if isinstance(found, Alias) and not found.value.shape:
            raise self.fail("TW015", f"'{name}' is a size or a constant of the kernel and cannot be assigned to", stmt.span)
        if isinstance(found, ScalarInfo) or (isinstance(found, ArrayInfo) and (found.role == "input" or stmt.op)):
            raise self.fail("TW015", f"'{name}' is an input and cannot be written", stmt.span, "make an output and write to that")
        if isinstance(found, Slot):
            self.assign_variable(stmt, name, found)
        elif isinstance(found, Tile):
            self.assign_tile(stmt, name, found)
        elif self.is_python and not stmt.op:
            self.let_name(name, stmt.value, (id(stmt), name), stmt.span)
        elif self.is_place(name) and not stmt.op:
            self.assign_output(name, self.expr(stmt.value), stmt.span)
        elif found is None:
            raise self.unknown(name, stmt.span)
        else:
            raise self.fail("TW015", f"'{name}' cannot be assigned to", stmt.span)

    def assign_output(self, name: str, value: Expr, span: Span) -> None:
        """`out = expression`"""
        self.outside_loops(f"'{name} = …'", span)
        value = self.settled(value)
        array = self.output(name, len(value.shape), type_of(value), span)
        self.shape_output(name, value.shape)
        self.written.add(name)
        self.out.append(ArrayAssign(array, self.convert(value, array.dtype), span=span))

    def assign_variable(self, stmt: syntax.Assign, name: str, slot: Slot) -> None:
        if slot.immutable:
            raise self.fail("TW015", f"'{name}' was declared with let and cannot change", stmt.span, f"declare it with var {name}")
        if self.spread is not None and slot.depth <= self.spread.depth and any(self.spread.vars):
            raise self.fail(
                "TW005", f"'{name}' is declared outside the loop whose tiles change and would change for each of their elements", stmt.span,
                f"declare '{name}' inside that loop, or change it in another loop",
            )  # fmt: skip
        part = self.contribution(stmt, name)
        if part is not None:
            kind, negative, node = part
            value = self.expr(node)
            if not any(isinstance(e, Local) and e.var is slot.var for e in walk_expr(value)):
                self.accumulate(stmt, name, slot, kind, negative, value)
                return
        node = stmt.value if not stmt.op else syntax.Binary(stmt.op, stmt.target, stmt.value, span=stmt.span)
        value = self.expr(node)
        if value.shape:
            self.becomes_tile(slot, name, value, stmt.span)
        self.scalar_only(f"'{name}'", value, stmt.span)
        var = slot.var
        if not slot.fixed:
            self.learn_variable(slot.key, type_of(value), name, stmt.span)
        self.out.append(SetVar(var, self.assignable(value, var.dtype, f"'{name}'", stmt.span), span=stmt.span))
        self.changed(var)

    def accumulate(self, stmt: syntax.Assign, name: str, slot: Slot, kind: str, negative: bool, value: Expr) -> None:
        if value.shape:
            self.becomes_tile(slot, name, value, stmt.span)
        self.scalar_only(f"'{name}'", value, stmt.span)
        var = slot.var
        if kind in ("and", "or") and var.dtype.is_bool:
            value = self.logical(value, stmt.span)
        if not slot.fixed:
            self.learn_variable(slot.key, self.summed(kind, value, len(self.loops) > slot.depth), name, stmt.span)
        value = self.assignable(value, var.dtype, f"'{name}'", stmt.span)
        if negative:
            value = self.negate(value, stmt.span)
        self.out.append(Accumulate(var, kind, value, span=stmt.span))
        self.changed(var)

    def summed(self, kind: str, value: Expr, in_loop: bool) -> TypePair:
        """The type a value brings to what it is accumulated into: sums and products of integers over a loop are wide."""
        if value.weak or kind not in ("add", "mul"):
            return type_of(value)
        if value.dtype.is_bool or (in_loop and value.dtype.is_int):
            return accumulator(value.dtype), ""
        return type_of(value)

    def contribution(self, stmt: syntax.Assign, name: str) -> tuple[str, bool, syntax.Expr] | None:
        """For `a += f`, `a = a + f`, `a = max(a, f)` and the like: the operation, whether f is negated, and f."""
        if stmt.op:
            if stmt.op == "-":
                return "add", True, stmt.value
            return (_COMBINE[stmt.op], False, stmt.value) if stmt.op in _COMBINE else None
        value = stmt.value
        if isinstance(value, syntax.Binary):
            left, right = _is_name(value.left, name), _is_name(value.right, name)
            if value.op == "-" and left:
                return "add", True, value.right
            if value.op in _COMBINE and left != right:
                return _COMBINE[value.op], False, value.right if left else value.left
        if isinstance(value, syntax.Call) and isinstance(value.function, syntax.Name) and len(value.args) == 2:
            first, second = (a.value for a in value.args)
            if value.function.id in ("min", "max") and _is_name(first, name) != _is_name(second, name):
                return value.function.id, False, second if _is_name(first, name) else first
        return None

    def store(self, stmt: syntax.Assign, target: syntax.Index) -> None:
        base, nodes = flatten_index(target)
        array = self.array(base)
        if isinstance(array, ArrayInfo) and array.role == "input" and not self.is_python:
            raise self.fail("TW015", f"'{array.name}' is not an output and cannot be written", stmt.span, "write to out[…], or to an out_… of its own")
        if isinstance(array, ArrayInfo) and array.role == "input":
            raise self.fail("TW015", f"'{array.name}' is an input and cannot be written", stmt.span, "make an output and write to that")
        implicit = array is None and isinstance(base, syntax.Name) and self.is_place(base.id)
        if not implicit and not isinstance(array, ArrayInfo):
            name = base.id if isinstance(base, syntax.Name) else "this"
            if isinstance(base, syntax.Name) and self.scope.find(name) is None:
                raise self.unknown(name, base.span)
            raise self.fail("TW015", f"'{name}' is not an output and cannot be written", stmt.span)
        lead = self.lead(base)
        if any(isinstance(n, syntax.Slice) for n in nodes) or (array is not None and len(nodes) + len(lead) < len(array.shape)):
            self.store_part(stmt, base, array if isinstance(array, ArrayInfo) else None, nodes)
            return
        value = self.expr(stmt.value)
        if implicit and value.shape and self.loops:
            self.store_part(stmt, base, None, nodes)
            return
        self.learn_shared(base, value, stmt.span)
        if isinstance(array, ArrayInfo):
            place = array
        else:
            assert isinstance(base, syntax.Name)
            if stmt.op and base.id not in self.written:
                raise self.fail("TW017", f"'{base.id}' is read before anything is written to it", stmt.span, f"store to {base.id}[…] with = first")
            place = self.output(base.id, len(nodes), type_of(value), stmt.span)
        self.scalar_only(f"an element of '{place.name}'", value, stmt.span)
        indices = self.access(place, nodes, stmt.span, write=True, lead=lead)
        if self.implicit(place):
            self.reach_output(place, indices, stmt.span)
        kind, value = self.store_kind(stmt, place, indices, value)
        value = self.assignable(value, place.dtype, f"'{place.name}'", stmt.span)
        self.written.add(place.name)
        self.changed(place.name)
        store = Store(place, indices, value, kind, span=stmt.span)
        if self.spread is None:
            self.out.append(store)
        else:
            self.spread.guards.append(())
            self.out += self.once([store], set(), stmt.span)

    def store_kind(self, stmt: syntax.Assign, place: ArrayInfo, indices: tuple[Expr, ...], value: Expr) -> tuple[str, Expr]:
        """`place[…] op= value` as an accumulation where it is one, else as a plain store of the combined value."""
        if not stmt.op:
            return "", value
        self.on_read(place, stmt.span)
        if stmt.op == "-" and not place.dtype.is_bool:
            return "add", self.negate(self.assignable(value, place.dtype, f"'{place.name}'", stmt.span), stmt.span)
        if stmt.op in _COMBINE and not (place.dtype.is_bool and stmt.op in "+*"):
            return _COMBINE[stmt.op], value
        return "", self.binary(stmt.op, Element(place, indices, span=stmt.span), value, stmt.span)

    # -- control flow -----------------------------------------------------------------------------------------------

    def loop(self, stmt: syntax.For) -> None:
        if stmt.over is not None or not stmt.ranges:
            raise self.fail("TW005", "a kernel loops over ranges only", stmt.span, "write for i in range(n), or for i in 0..n")
        if len(stmt.vars) != len(stmt.ranges):
            raise self.fail("TW016", f"{len(stmt.vars)} loop indices for {len(stmt.ranges)} ranges", stmt.span)
        for position, name in enumerate(stmt.vars):
            if isinstance(self.scope.find(name), LoopVar) or name in stmt.vars[:position]:
                raise self.fail("TW010", f"'{name}' is already the index of a loop around it", stmt.span, "choose another name")
        if self.metadata.kind is KernelKind.REDUCE and self.yields is None:
            self.reduce_loop(stmt, self.metadata.reduction, self.metadata.axes)
            return
        self.changes_in(stmt.body)
        self.fors.append(id(stmt))
        with self.block() as body:
            variables = self.enter(stmt)
            shape = self.state.tiled.get(id(stmt)) if self.spread is None else None
            spread = None if shape is None else self.open_spread(shape, stmt.span)
            for inner in stmt.body:
                self.statement(inner)
            # Such stores keep some axes from running in parallel; that is not what the source promised with grid.
            asked = "auto" if spread is not None and spread.once else stmt.parallel
            statements = tuple(body) if spread is None else self.close_spread(spread, tuple(body), asked, stmt.span)
            del self.loops[len(self.loops) - len(variables) :]
        self.fors.pop()
        self.out.append(Loop(variables, statements, asked=asked, span=stmt.span))

    def branch(self, stmt: syntax.If) -> None:
        cond = self.logical(self.expr(stmt.cond), stmt.span)
        self.scalar_only("the condition", cond, stmt.span)
        self.guarded += 1
        try:
            with self.block() as then:
                for inner in stmt.then:
                    self.statement(inner)
            with self.block() as otherwise:
                for inner in stmt.otherwise:
                    self.statement(inner)
        finally:
            self.guarded -= 1
        self.out.append(If(cond, tuple(then), tuple(otherwise), span=stmt.span))

    def repeat(self, stmt: syntax.While) -> None:
        found, before = self.aside(stmt.cond)
        if before:
            raise self.fail("TW005", "a reduction in the condition of a while", stmt.cond.span, "compute it into a variable, before and in the loop")
        cond = self.logical(found, stmt.span)
        inside = next((n for n in nodes(stmt.body) if isinstance(n, syntax.Call) and getattr(n.function, "id", "") == "barrier"), None)
        if inside is not None:
            raise self.fail("TW012", "barrier() in a while: not every iteration would reach it as often", inside.span, "put it after the while")
        self.changes_in(stmt.body)
        self.guarded += 1
        try:
            with self.block() as body:
                for inner in stmt.body:
                    self.statement(inner)
        finally:
            self.guarded -= 1
        self.out.append(While(cond, tuple(body), span=stmt.span))

    # -- results ----------------------------------------------------------------------------------------------------

    def returned(self, stmt: syntax.Return, last: bool) -> None:
        if not last or not self.is_python or self.metadata.kind is KernelKind.REDUCE:
            raise self.fail("TW005", "a kernel returns once, as its last statement", stmt.span)
        if stmt.value is None:
            return
        nodes = stmt.value.items if isinstance(stmt.value, syntax.Tuple) else (stmt.value,)
        for position, node in enumerate(nodes):
            try:
                self.result(node, "result" if len(nodes) == 1 else f"result{position}", stmt.span)
            except Skip:
                continue

    def result(self, node: syntax.Expr, name: str, span: Span) -> None:
        """One returned value: an array the kernel made is the output itself, anything else is computed into one."""
        found = self.scope.find(node.id) if isinstance(node, syntax.Name) else None
        if isinstance(found, ArrayInfo) and found.role != "input" and found not in self.results and found.name not in self.temporaries:
            if found.role != "output":
                self.state.returned.add(found.name)
                self.state.changed = True
            self.results.append(found)
            return
        value = self.settled(self.expr(node))
        title = node.id if isinstance(node, syntax.Name) and value.shape and node.id not in self.inputs else name
        array = self.new_array(title, value.dtype, value.shape, "output")
        self.written.add(array.name)
        self.out.append(ArrayAssign(array, value, span=span))
        self.results.append(array)


def _is_name(node: syntax.Expr, name: str) -> bool:
    return isinstance(node, syntax.Name) and node.id == name


def _is_cast(node: syntax.Expr) -> bool:
    """Whether the value's dtype was written down: `i32(0)`, `cast(x, i32)`."""
    return isinstance(node, syntax.Call) and isinstance(node.function, syntax.Name) and (
        node.function.id == "cast" or dtypes.is_name(node.function.id)
    )  # fmt: skip


def _shape_owner(node: syntax.Expr) -> str:
    if isinstance(node, syntax.Attribute) and node.name == "shape" and isinstance(node.value, syntax.Name):
        return node.value.id
    return ""
