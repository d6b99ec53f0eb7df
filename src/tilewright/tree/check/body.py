"""Checking statements: one walk over a kernel's body.

A `BodyChecker` starts from what earlier walks left in `State`, types every statement, and writes back what it learnt:
the dtypes of variables, the dtypes and extents of outputs, which names are assigned to, which sizes are equal. An error
ends only the statement it is in.

It makes the collaborators of its walk and gives each what it needs, in this order:

    context      the place: scope, loops, conditions, statements so far     (context.py)
    sizes        equations of sizes, accesses that stay inside              (sizes.py)
    typing       operators, functions and conversions of typed operands     (operations.py)
    arrays       parameters, arrays the kernel makes, outputs               (arrays.py)
    elements     elements of tiles, `@`, reductions                         (elements.py)
    expressions  syntax to typed expressions, with slices                   (expressions.py, slices.py)
    tiles        tiles with a name                                          (tiles.py)
    stores       stores to elements and parts                               (stores.py)
    nests        loop indices, nests that yield                             (nests.py)
    array_loops  whole arrays assigned in loops and ifs                     (array_loops.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.base.errors import Diagnostics
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.check.array_loops import ArrayLoopChecker
from tilewright.tree.check.arrays import ArrayTable
from tilewright.tree.check.context import Context, Skip
from tilewright.tree.check.elements import ElementBuilder
from tilewright.tree.check.expressions import CREATORS, ExpressionChecker, flatten_index, is_decided
from tilewright.tree.check.infer import constant_of, size_of, type_of
from tilewright.tree.check.nests import NestChecker
from tilewright.tree.check.operations import Typing
from tilewright.tree.check.sizes import SizeChecker
from tilewright.tree.check.state import Absent, Alias, Key, Poison, SharedArray, State, TileValue, VariableSlot
from tilewright.tree.check.stores import StoreChecker
from tilewright.tree.check.tiles import TileChecker
from tilewright.tree.check.variables import VariableTypes, contribution, summed
from tilewright.tree.inline import nodes
from tilewright.tree.metadata import KernelKind, KernelMetadata, kind_numbers, suggest
from tilewright.tree.typed import (
    Accumulate,
    ArgSpec,
    ArrayAssign,
    ArrayInfo,
    Expr,
    Local,
    LoopVar,
    Picked,
    ScalarInfo,
    SetVar,
    Shape,
    SizeValue,
    Stmt,
    TypedAssert,
    TypedBarrier,
    TypedIf,
    TypedLoop,
    TypedPrint,
    TypedWhile,
    Variable,
    Whole,
)
from tilewright.tree.typed_text import show_expr
from tilewright.tree.typed_walk import walk_expr


class BodyChecker:
    def __init__(
        self, function: syntax.Function, args: Sequence[ArgSpec], metadata: KernelMetadata, state: State, sink: Diagnostics,
        aliased: dict[int, set[str]],
    ) -> None:  # fmt: skip
        """`aliased`: statements, by identity, that write in place what has these other names."""
        self.kernel = function
        self.metadata = metadata
        self.results: list[ArrayInfo] = []
        self.body: tuple[Stmt, ...] = ()
        self.broken: set[Span] = set()
        """Calls of kernels whose arguments are wrong: nothing is said about what follows from that."""
        self.context = context = Context(function.kind, state, sink)
        self.sizes = sizes = SizeChecker(context)
        self.typing = typing = Typing(context, sizes)
        self.arrays = arrays = ArrayTable(function, args, context, sizes)
        self.variables = variables = VariableTypes(context)
        elements = ElementBuilder(context, sizes, typing, arrays)
        self.expressions = expressions = ExpressionChecker(context, sizes, typing, arrays, elements)
        self.tiles = tiles = TileChecker(context, sizes, typing, elements, expressions, variables)
        self.stores = StoreChecker(context, sizes, typing, arrays, elements, expressions, variables, tiles)
        self.nests = NestChecker(context, sizes, typing, arrays, expressions, self.statement)
        self.array_loops = ArrayLoopChecker(context, sizes, typing, arrays, elements, expressions, aliased)
        self.frozen: set[str] = set()
        """Arrays declared with let."""
        self.headless = 0
        """Loops and conditions around whose heads are wrong."""
        self.unrolling = 0
        """Unrolled loops around."""
        self.levels: dict[Key, int] = {}
        """How many of them were around the declarations of variables."""

    # -- the walk -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        for name, number in kind_numbers(self.metadata).items():
            self.context.scope.names.setdefault(name, Alias(self.typing.literal(number, self.kernel.span), (0, name)))
        for name, _ in self.metadata.broadcast:
            if name not in self.arrays.inputs:
                help = suggest(name, list(self.arrays.inputs)) or f"inputs: {', '.join(self.arrays.inputs)}"
                span = next((a.span for a in self.kernel.attributes if a.name == "broadcast"), self.kernel.span)
                self.context.sink.error("TW002", f"@broadcast names '{name}', which is not an input", span, help)
        last = len(self.kernel.body) - 1
        for position, stmt in enumerate(self.kernel.body):
            self.statement(stmt, last=position == last)
        self.finish()
        self.body = tuple(self.context.out)

    def finish(self) -> None:
        if self.context.is_python and self.metadata.kind is not KernelKind.REDUCE:
            returns = [s for s in self.kernel.body if isinstance(s, syntax.Return) and s.value is not None]
            if not returns and not any(p.in_place for p in self.kernel.params):
                self.context.sink.error("TW017", f"'{self.kernel.name}' returns nothing", self.kernel.span, "return the arrays it makes")
        else:
            self.results = [a for a in self.arrays.by_name.values() if a.role == "output"]
            order = self.kernel.option(syntax.OUTPUT_ORDER)
            if isinstance(order, tuple):  # what a function returns, which may have been stored in another order
                self.results.sort(key=lambda a: order.index(a.name) if a.name in order else len(order))
            if not self.results and not any(p.in_place for p in self.kernel.params) and not self.context.sink.errors:
                self.context.sink.error("TW017", "the kernel writes no output", self.kernel.span, "write out[…] = …, or yield in a reduce kernel")
        for param in self.kernel.params:
            if param.in_place and param.name not in self.context.versions and param.name in self.arrays.inputs and not self.context.sink.errors:
                word = "tw.Array" if self.context.is_python else f"{param.name} without inout"
                self.context.sink.error("TW017", f"'{param.name}' is to be written in place, and nothing is written to it", param.span, f"write to it, or declare it as {word}")
        for result in self.results:
            # A store that is wrong in itself has been reported.
            if result.name not in self.arrays.written and not self.context.sink.errors:
                self.context.sink.error("TW017", f"output '{result.name}' is never written", self.kernel.span, f"store to {result.name}[…]")

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
                if not self.headless:  # else nobody knows what takes it
                    self.nests.yielded(stmt)
            elif isinstance(stmt, syntax.Return):
                self.returned(stmt, last)
            elif isinstance(stmt, syntax.Made):
                self.arrays.passed_on(stmt)
            elif isinstance(stmt, syntax.ReduceNest):
                self.nests.reduce_loop(stmt.loop, stmt.op, stmt.axes, stmt.name)
            elif isinstance(stmt, syntax.Expect):
                if not self.is_absent(stmt):
                    self.expected(stmt.name, self.expressions.expr(stmt.value), stmt)
            elif isinstance(stmt, syntax.Print):
                self.printed(stmt)
            elif isinstance(stmt, syntax.Assert):
                self.asserted(stmt)
            elif isinstance(stmt, syntax.ExprStmt):
                self.bare(stmt)
            else:
                raise self.context.fail("TW005", f"a {type(stmt).__name__.lower()} cannot be inside a kernel", stmt.span)
        except Skip:
            if isinstance(stmt, syntax.Expect):
                self.broken.add(stmt.call)
            if isinstance(stmt, syntax.Let):
                for name in stmt.targets:
                    if not isinstance(self.context.scope.find(name), LoopVar):
                        self.context.scope.names[name] = Poison()
            if isinstance(stmt, syntax.Assign) and isinstance(stmt.target, syntax.Index):
                self.stores.attempted(stmt.target)
            if self.context.sink.errors and isinstance(stmt, syntax.For | syntax.While | syntax.If):
                self.rest(stmt)

    def rest(self, stmt: syntax.For | syntax.While | syntax.If) -> None:
        """What else is wrong inside a loop or condition whose head is wrong."""
        self.headless += 1
        for block in (stmt.then, stmt.otherwise) if isinstance(stmt, syntax.If) else (stmt.body,):
            with self.context.block():
                for name in stmt.vars if isinstance(stmt, syntax.For) else ():
                    self.context.scope.names[name] = Poison()
                for inner in block:
                    self.statement(inner)
        self.headless -= 1

    def bare(self, stmt: syntax.ExprStmt) -> None:
        value = stmt.value
        if isinstance(value, syntax.String):
            raise self.context.fail("TW005", "a text has no effect in a kernel", stmt.span, "write a comment: # …")
        if isinstance(value, syntax.Call) and isinstance(value.function, syntax.Name) and value.function.id == "barrier":
            self.barrier(value)
            return
        if isinstance(value, syntax.Call) and isinstance(value.function, syntax.Name) and value.function.id == "print":
            self.printed(print_statement(value, self.context))
            return
        if isinstance(value, syntax.Call) and isinstance(value.function, syntax.Name) and value.function.id == "assert":
            self.asserted(assert_statement(value, self.context))
            return
        self.expressions.expr(value)
        raise self.context.fail("TW005", "this expression has no effect", stmt.span, "assign it to a name")

    def printed(self, stmt: syntax.Print) -> None:
        """`print(…)`: numbers in the places of a text."""
        values: list[Expr] = []
        for node in stmt.values:
            value = self.typing.settled(self.expressions.expr(node))
            if value.shape:
                raise self.context.fail("TW009", "an array cannot be printed in a kernel", node.span, "print its elements in a loop")
            if value.dtype.is_complex:
                raise self.context.fail("TW009", "a complex number cannot be printed in a kernel", node.span, "print z.real and z.imag")
            values.append(value)
        if self.metadata.kind is KernelKind.REDUCE or self.context.spread is not None:
            raise self.context.fail("TW005", "print in a loop that yields, or whose tiles change", stmt.span, "print in a loop of its own")
        self.context.emit(TypedPrint(stmt.text, tuple(values), span=stmt.span))

    def asserted(self, stmt: syntax.Assert) -> None:
        """`assert cond, "text"`"""
        cond = self.typing.logical(self.expressions.expr(stmt.cond), stmt.span)
        self.typing.scalar_only("the condition of an assert", cond, stmt.span)
        if self.metadata.kind is KernelKind.REDUCE or self.context.spread is not None:
            raise self.context.fail("TW005", "assert in a loop that yields, or whose tiles change", stmt.span, "check in a loop of its own")
        text = stmt.text or show_expr(cond)
        if self.context.loops or self.context.guarded or self.context.scope.parent is not None or not self.sizes.asserted(cond, text, stmt.span):
            self.context.emit(TypedAssert(cond, text, span=stmt.span))

    def barrier(self, node: syntax.Call) -> None:
        """`barrier()`: what stands before it is done for all elements of shared arrays."""
        if node.args:
            raise self.context.fail("TW016", f"barrier() takes 0 arguments, got {len(node.args)}", node.span)
        if self.context.guarded:
            raise self.context.fail("TW012", "barrier() under a condition: not every iteration would reach it", node.span, "put it after the if")
        uneven = next((loop for loop in self.context.loops if loop.count is None), None)
        if uneven is not None:
            raise self.context.fail(
                "TW012", f"barrier() in the loop over '{uneven.name}', whose range is not the same for all iterations around it: not all would reach it",
                node.span, "let the loop run over sizes",
            )  # fmt: skip
        if not self.context.loops:
            raise self.context.fail("TW005", "barrier() outside loops", node.span, "leave it out: nests run one after the other")
        self.context.emit(TypedBarrier(span=node.span))

    # -- declarations -------------------------------------------------------------------------------------------------

    def let(self, stmt: syntax.Let) -> None:
        if stmt.shared:
            fixed = None if stmt.type is None else self.expressions.dtype_argument(stmt.type)
            self.stores.declare_shared(stmt.targets[0], stmt.extents, fixed, (id(stmt), stmt.targets[0]), stmt.span)
            return
        for name in stmt.targets:
            if isinstance(self.context.scope.find(name), LoopVar):
                raise self.context.fail("TW010", f"'{name}' is the index of a loop around it and cannot be declared again", stmt.span, "choose another name")
        assert stmt.value is not None
        if stmt.destructure or len(stmt.targets) > 1:
            self.destructure(stmt, stmt.value)
            return
        (name,) = stmt.targets
        fixed = None if stmt.type is None or _is_array_type(stmt.type) else self.expressions.dtype_argument(stmt.type)
        (self.frozen.discard if stmt.mutable else self.frozen.add)(name)
        self.let_name(name, stmt.value, (id(stmt), name), stmt.span, fixed, not stmt.mutable)
        if stmt.type is not None and _is_array_type(stmt.type):
            self.is_array(name, stmt.span)

    def let_name(
        self, name: str, node: syntax.Expr, key: Key, span: Span, fixed: DType | None = None, immutable: bool = False
    ) -> None:  # fmt: skip
        """`name = node`, for a new name: an array, a tuple or a number."""
        if self.create(name, node, fixed):
            return
        if isinstance(node, syntax.Nothing) or (isinstance(node, syntax.Name) and isinstance(self.context.scope.find(node.id), Absent)):
            self.context.scope.names[name] = Absent()
            return
        binding = self.context.scope.find(node.id) if isinstance(node, syntax.Name) else None
        if isinstance(binding, Alias) and binding.value.shape and fixed is None and self.context.scope.parent is None:
            self.context.scope.names[name] = binding  # two names of one array, whatever it becomes
            return
        items = self.expressions.extents(node)
        if items is not None:
            if fixed is not None:
                raise self.context.fail("TW009", f"'{name}' must be {fixed}, got a tuple", span)
            self.context.scope.names[name] = items
            return
        self.declare(name, self.expressions.expr(node), key, span, fixed, immutable, _is_cast(node))

    def is_array(self, name: str, span: Span) -> None:
        """`name: Array = …` holds an array."""
        binding = self.context.scope.find(name)
        value = binding.value if isinstance(binding, Alias) else binding
        if not isinstance(value, Poison | ArrayInfo | SharedArray | TileValue) and not getattr(value, "shape", ()):
            raise self.context.fail("TW009", f"'{name}' must be an array, got a number or a tuple", span, "leave the type out")

    def destructure(self, stmt: syntax.Let, node: syntax.Expr) -> None:
        items = self.expressions.extents(node)
        if items is None:
            raise self.context.fail("TW009", "a tuple is expected on the right", stmt.span)
        if len(items) != len(stmt.targets):
            what = f"'{_shape_owner(node)}' has rank {len(items)}" if _shape_owner(node) else f"there are {len(items)} values"
            raise self.context.fail("TW003", f"{what}, but {len(stmt.targets)} names are given", stmt.span)
        for name, item in zip(stmt.targets, items, strict=True):
            self.declare(name, item, (id(stmt), name), stmt.span, None, not stmt.mutable, False)

    def declare(
        self, name: str, value: Expr, key: Key, span: Span, fixed: DType | None, immutable: bool, is_cast: bool
    ) -> None:  # fmt: skip
        mutable = key in self.context.state.assigned
        known = self.context.state.variables.get(key)
        self.levels[key] = self.unrolling
        if value.shape and fixed is not None:
            value = self.typing.assignable(value, fixed, f"'{name}'", span)
        if self.array_loops.declare(name, value, key, span):
            return
        if self.context.loops and (value.shape or (known is not None and known.shape)):
            self.tiles.declare_tile(name, value, key, span, fixed, immutable)
            return
        if value.shape:
            self.declare_array(name, value, key, span)
            return
        if fixed is not None:
            var = Variable(name, fixed, "", mutable)
            self.context.emit(SetVar(var, self.typing.assignable(value, fixed, f"'{name}'", span), True, span=span))
            self.context.assigned(var, value)
            self.context.scope.names[name] = VariableSlot(var, key, len(self.context.loops), True, immutable=immutable)
            return
        steady = not any(isinstance(e, Local) and e.var.mutable for e in walk_expr(value))
        if value.weak and not mutable and steady:
            self.context.scope.names[name] = Alias(value, key)
            self.sizes.call_sizes([name], [value])
            return
        pair = self.variables.learn(key, type_of(value), name, span)
        var = Variable(name, pair[0], pair[1], mutable)
        self.context.emit(SetVar(var, self.typing.convert(value, var.dtype), True, span=span))
        self.context.assigned(var, value)
        self.context.scope.names[name] = VariableSlot(var, key, len(self.context.loops), is_cast, immutable=immutable)

    # -- arrays -------------------------------------------------------------------------------------------------------

    def create(self, name: str, node: syntax.Expr, fixed: DType | None = None) -> bool:
        """`name = empty(shape, dtype)` and its kin; False when it is something else."""
        made = self.creation(name, node)
        if made is None:
            return False
        dtype, shape, fill = made
        if fixed is not None and fixed is not dtype:
            raise self.context.fail("TW009", f"'{name}' must be {fixed}, and the array is {dtype}", node.span)
        if self.array_loops.around:
            self.array_loops.make(name, dtype, shape, fill, node.span)
            return True
        array = self.arrays.new_array(name, dtype, shape)
        self.context.scope.names[name] = array
        if fill is not None:
            self.arrays.written.add(array.name)
            self.context.emit(ArrayAssign(array, fill, span=node.span))
        return True

    def creation(self, name: str, node: syntax.Expr) -> tuple[DType, Shape, Expr | None] | None:
        """The dtype, shape and first value of an array that is made with `empty(shape, dtype)` and its kin."""
        if not isinstance(node, syntax.Call) or not isinstance(node.function, syntax.Name):
            return None
        maker = node.function.id
        if maker not in CREATORS:
            return None
        values = {a.keyword or position: a.value for position, a in enumerate(node.args)}
        wanted = ("shape", "value", "dtype") if maker == "full" else ("shape", "dtype")
        if self.context.loops and not (self.array_loops.ordered() and (maker.endswith("_like") or maker == "empty" or len(values) == len(wanted))):
            return None
        if not self.array_loops.ordered():
            self.context.outside_loops(f"{maker}()", node.span)
        if maker.endswith("_like"):
            source = self.expressions.array(values[0]) if set(values) <= {0, 1, "dtype"} and 0 in values else None
            if source is None:
                raise self.context.fail("TW016", f"{maker}() takes an array", node.span, f"write {maker}(x)")
            shape = source.shape
            given = values.get(1) or values.get("dtype")
            dtype = source.dtype if given is None else self.expressions.dtype_argument(given)
        else:
            ordered = [values.get(position, values.get(key)) for position, key in enumerate(wanted)]
            if any(v is None for v in ordered) or len(values) != len(wanted):
                raise self.context.fail("TW016", f"{maker}() takes {', '.join(wanted)}, got {len(node.args)} arguments", node.span)
            assert ordered[0] is not None
            assert ordered[-1] is not None
            shape = self.expressions.shape_argument(ordered[0])
            dtype = self.expressions.dtype_argument(ordered[-1])
        fill: Expr | None = None
        if maker == "full":
            assert ordered[1] is not None
            value = self.expressions.expr(ordered[1])
            fill = self.typing.assignable(value, dtype, f"'{name}'", node.span)
        elif maker != "empty" and maker != "empty_like":
            fill = self.typing.convert(self.typing.literal(int(maker == "ones"), node.span), dtype)
        return dtype, shape, fill

    def declare_array(self, name: str, value: Expr, key: Key, span: Span) -> None:
        """A name for an array value: computed where it is used, unless what it reads may change."""
        if isinstance(value, Picked):
            self.array_loops.owned.add(name)  # a copy, where NumPy has a view
        self.context.outside_loops(f"the array '{name}'", span)
        value = self.typing.settled(value)
        if isinstance(value, Whole) and value.array.role != "inout":
            self.context.scope.names[name] = value.array
            return
        if self.unrolling or key in self.context.state.stored or any(isinstance(e, Whole) and e.array.role != "input" and e.array.name not in self.arrays.temporaries for e in walk_expr(value)):
            array = self.arrays.new_array(name, value.dtype, value.shape)
            self.context.emit(ArrayAssign(array, value, span=span))
            self.arrays.written.add(array.name)
            self.context.scope.names[name] = array
            return
        self.context.scope.names[name] = Alias(value, key)

    def is_absent(self, stmt: syntax.Expect) -> bool:
        """Whether the argument is None, which the parameter allows."""
        if not isinstance(stmt.value, syntax.Name | syntax.Nothing) or not self.expressions.is_none(stmt.value):
            return False
        if not stmt.optional:
            raise self.context.fail("TW009", f"{stmt.name} cannot be None", stmt.span, "annotate the parameter as 'tw.Array | None' where it may be left out")
        return True

    def expected(self, name: str, value: Expr, stmt: syntax.Expect) -> None:
        """An argument of a kernel called here is what the parameter's annotation says; its size names mean extents of it."""
        node, span = stmt.type, stmt.span
        if isinstance(node, syntax.Name):
            if node.id.lower() in ("array", "tensor") and not value.shape:
                raise self.context.fail("TW009", f"{name} must be an array, got a number ({value.dtype})", span)
            if dtypes.is_name(node.id) and value.shape:
                raise self.context.fail("TW009", f"{name} must be a number ({node.id}), got an array of rank {len(value.shape)}", span)
            return
        assert isinstance(node, syntax.Index)
        only = node.indices[0] if len(node.indices) == 1 else None
        named = next((n.id for n in (node.value, only) if isinstance(n, syntax.Name) and dtypes.is_name(n.id)), None)
        held = value.array.stored if isinstance(value, Whole) else value.dtype
        if named is not None and dtypes.by_name(named) is not held:
            raise self.context.fail("TW009", f"{name} must be {named}, got {held}", span)
        if isinstance(only, syntax.Name) and only.id == named:
            return  # tw.Array[tw.f32]: of any rank
        if len(node.indices) != len(value.shape):
            raise self.context.fail("TW003", f"{name} must have rank {len(node.indices)}, got {len(value.shape)}", span)
        for extent, size_of_axis in zip(node.indices, value.shape, strict=True):
            known = self.context.scope.find(extent.id) if isinstance(extent, syntax.Name) else Alias(self.expressions.expr(extent), (0, ""))
            size = size_of(known.value) if isinstance(known, Alias) else None
            if size is not None:
                self.sizes.make_equal(size, size_of_axis, span)
            elif isinstance(extent, syntax.Name):
                value = SizeValue(size_of_axis, span=extent.span)
                self.context.scope.names[extent.id] = Alias(value, (id(extent), extent.id))
                self.sizes.call_sizes([extent.id], [value])

    # -- assignments --------------------------------------------------------------------------------------------------

    def assign(self, stmt: syntax.Assign) -> None:
        if isinstance(stmt.target, syntax.Index):
            base = flatten_index(stmt.target)[0]
            if isinstance(base, syntax.Name):
                self.array_loops.written_in_place(stmt, base.id)
            whole = self.whole_target(stmt.target)
            if whole is None:
                self.stores.store(stmt, stmt.target)
                return
            stmt = replace(stmt, target=whole)
            binding = self.context.scope.find(whole.id)
            if isinstance(binding, ArrayInfo) and binding.role != "inout" and not stmt.op and self.context.scope.parent is None:
                self.write_whole(stmt, whole.id, binding)
                return
        if not isinstance(stmt.target, syntax.Name):
            raise self.context.fail("TW015", "only a name or an element of an output can be assigned to", stmt.span)
        name = stmt.target.id
        binding = self.context.scope.find(name)
        if isinstance(binding, Poison):
            raise Skip
        if isinstance(binding, LoopVar):
            raise self.context.fail("TW010", f"'{name}' is the index of a loop around it and cannot be assigned to", stmt.span, "choose another name")
        if isinstance(binding, Alias) and not binding.value.shape:
            raise self.context.fail("TW015", f"'{name}' is a size or a constant of the kernel and cannot be assigned to", stmt.span)
        if isinstance(binding, ScalarInfo) or (isinstance(binding, ArrayInfo) and binding.role == "input" and (stmt.op or not self.context.is_python)):
            raise self.context.fail("TW015", f"'{name}' is an input and cannot be written", stmt.span, "make an output and write to that")
        if isinstance(binding, ArrayInfo | Alias) and not self.arrays.is_place(name):
            self.assign_array(stmt, name, binding)
            return
        if isinstance(binding, tuple) and self.context.scope.parent is not None:
            raise self.context.fail("TW005", f"'{name}' is a tuple and cannot be assigned again in a loop or if", stmt.span, "use variables of their own")
        if isinstance(binding, VariableSlot):
            self.assign_variable(stmt, name, binding)
        elif isinstance(binding, TileValue):
            self.tiles.assign_tile(stmt, name, binding)
        elif self.context.is_python and not stmt.op:
            self.let_name(name, stmt.value, (id(stmt), name), stmt.span)
        elif self.arrays.is_place(name) and not stmt.op:
            self.assign_output(name, self.expressions.expr(stmt.value), stmt.span)
        elif binding is None:
            raise self.expressions.unknown(name, stmt.span)
        else:
            raise self.context.fail("TW015", f"'{name}' cannot be assigned to", stmt.span)

    def whole_target(self, target: syntax.Index) -> syntax.Name | None:
        """`x` where `x[…]` or `x[:]` outside loops means all elements of an array that has memory."""
        base, nodes = flatten_index(target)
        binding = self.context.scope.find(base.id) if isinstance(base, syntax.Name) and not self.context.loops else None
        if not isinstance(binding, ArrayInfo) or binding.role == "input" or not binding.shape or binding.name in self.arrays.temporaries:
            return None
        bare = all(isinstance(n, syntax.Slice) and n.lo is None and n.hi is None and n.step is None for n in nodes)
        assert isinstance(base, syntax.Name)
        return base if bare and len(nodes) <= len(binding.shape) else None

    def assign_array(self, stmt: syntax.Assign, name: str, binding: ArrayInfo | Alias) -> None:
        """`name = value` where the name means an array: at the top it means another one from here on, elsewhere all its elements change."""
        if name in self.frozen:
            raise self.context.fail("TW015", f"'{name}' was declared with let and cannot change", stmt.span, f"declare it with var {name}")
        if stmt.op:
            self.array_loops.written_in_place(stmt, name)
        if self.context.scope.parent is not None:
            if name not in self.context.scope.names and not self.array_loops.is_carried(name) and not self.array_loops.is_local(name):
                raise self.array_loops.demand(name, stmt.span)
            if not isinstance(binding, ArrayInfo) or binding.role == "input":
                # This walk found out that the array needs memory; the next one gives it some.
                self.context.state.changed = True
                raise Skip
            made = self.creation(name, stmt.value) if not stmt.op else None
            self.array_loops.assign(stmt, name, binding, made)
        elif not stmt.op and isinstance(binding, ArrayInfo) and binding.role == "inout":
            self.write_whole(stmt, name, binding)
        elif not stmt.op:
            self.let_name(name, stmt.value, (id(stmt), name), stmt.span)
        else:
            node = syntax.Binary(stmt.op, stmt.target, stmt.value, span=stmt.span)
            self.update_array(stmt, name, binding, self.typing.settled(self.expressions.expr(node)))

    def update_array(self, stmt: syntax.Assign, name: str, binding: ArrayInfo | Alias, value: Expr) -> None:
        """`name += value` at the top of a kernel."""
        dtype, shape = (binding.dtype, binding.shape) if isinstance(binding, ArrayInfo) else (binding.value.dtype, binding.value.shape)
        value = self.typing.assignable(value, dtype, f"'{name}'", stmt.span)
        self.array_loops.same_type(name, dtype, shape, value, stmt.span)
        if isinstance(binding, ArrayInfo) and binding.name not in self.arrays.temporaries:
            self.array_loops.replace_elements(binding, value, stmt.span)
            return
        if self.array_loops.aliased.get(id(stmt)):
            self.array_loops.owned.add(name)
            self.array_loops.written_in_place(stmt, name)
        self.declare_array(name, value, (id(stmt), name), stmt.span)

    def write_whole(self, stmt: syntax.Assign, name: str, array: ArrayInfo) -> None:
        """`name = value` at the top of a kernel, where the name is an array that is written in place: every element gets a value."""
        made = self.creation(name, stmt.value)
        if made is not None:
            dtype, shape, fill = made
            self.array_loops.same_type(name, array.dtype, array.shape, Whole(replace(array, dtype=dtype, shape=shape)), stmt.span)
            if fill is None:
                raise self.context.fail("TW015", f"'{name}' is written in place and cannot become a new array without values", stmt.span, "leave this statement out")
            value = fill
        else:
            value = self.typing.settled(self.expressions.expr(stmt.value))
            if value.shape:
                self.array_loops.same_type(name, array.dtype, array.shape, value, stmt.span)
            value = self.typing.assignable(value, array.dtype, f"'{name}'", stmt.span)
        self.array_loops.replace_elements(array, value, stmt.span)

    def assign_output(self, name: str, value: Expr, span: Span) -> None:
        """`out = expression`"""
        self.context.outside_loops(f"'{name} = …'", span)
        value = self.typing.settled(value)
        array = self.arrays.output(name, len(value.shape), type_of(value), span)
        self.arrays.shape_output(name, value.shape)
        self.arrays.written.add(name)
        self.context.emit(ArrayAssign(array, self.typing.convert(value, array.dtype), span=span))

    def assign_variable(self, stmt: syntax.Assign, name: str, slot: VariableSlot) -> None:
        if slot.immutable:
            raise self.context.fail("TW015", f"'{name}' was declared with let and cannot change", stmt.span, f"declare it with var {name}")
        if self.context.spread is not None and slot.depth <= self.context.spread.depth and any(self.context.spread.vars):
            raise self.context.fail(
                "TW005", f"'{name}' is declared outside the loop whose tiles change and would change for each of their elements", stmt.span,
                f"declare '{name}' inside that loop, or change it in another loop",
            )  # fmt: skip
        part = contribution(stmt, name)
        if part is not None:
            kind, negative, node = part
            value = self.expressions.expr(node)
            valued = isinstance(stmt.value, syntax.Binary) and stmt.value.valued and (slot.var.dtype.is_float or not value.dtype.is_bool)
            if not valued and not any(isinstance(e, Local) and e.var is slot.var for e in walk_expr(value)):
                self.accumulate(stmt, name, slot, kind, negative, value)
                return
        node = stmt.value if not stmt.op else syntax.Binary(stmt.op, stmt.target, stmt.value, span=stmt.span)
        value = self.expressions.expr(node)
        if value.shape:
            self.tiles.becomes_tile(slot, name, value, stmt.span)
        self.typing.scalar_only(f"'{name}'", value, stmt.span)
        var = slot.var
        if not slot.fixed:
            self.variables.learn(slot.key, type_of(value), name, stmt.span)
        self.context.emit(SetVar(var, self.typing.assignable(value, var.dtype, f"'{name}'", stmt.span), span=stmt.span))
        self.context.assigned(var, value)
        self.context.changed(var)

    def accumulate(self, stmt: syntax.Assign, name: str, slot: VariableSlot, kind: str, negative: bool, value: Expr) -> None:
        if value.shape:
            self.tiles.becomes_tile(slot, name, value, stmt.span)
        self.typing.scalar_only(f"'{name}'", value, stmt.span)
        var = slot.var
        if var.dtype.is_complex and kind not in ("add", "mul"):
            self.typing.refuse_complex(kind, stmt.span)
        if kind in ("and", "or") and var.dtype.is_bool:
            value = self.typing.logical(value, stmt.span)
        if not slot.fixed:
            self.variables.learn(slot.key, summed(kind, value, len(self.context.loops) > slot.depth or self.unrolling > self.levels.get(slot.key, 0)), name, stmt.span)
        value = self.typing.assignable(value, var.dtype, f"'{name}'", stmt.span)
        if negative:
            value = self.typing.negate(value, stmt.span)
        self.context.emit(Accumulate(var, kind, value, span=stmt.span))
        self.context.assigned(var, value)
        self.context.changed(var)

    # -- control flow -------------------------------------------------------------------------------------------------

    def loop(self, stmt: syntax.For) -> None:
        if stmt.over is not None or not stmt.ranges:
            raise self.context.fail("TW005", "a kernel loops over ranges only", stmt.span, "write for i in range(n), or for i in 0..n")
        if len(stmt.vars) != len(stmt.ranges):
            raise self.context.fail("TW016", f"{len(stmt.vars)} loop indices for {len(stmt.ranges)} ranges", stmt.span)
        for position, name in enumerate(stmt.vars):
            if isinstance(self.context.scope.find(name), LoopVar) or name in stmt.vars[:position]:
                raise self.context.fail("TW010", f"'{name}' is already the index of a loop around it", stmt.span, "choose another name")
        if self.metadata.kind is KernelKind.REDUCE and self.nests.yields is None:
            self.nests.reduce_loop(stmt, self.metadata.reduction, self.metadata.axes)
            return
        if self.array_loops.carries(stmt):
            values = self.array_loops.iterations(stmt, [self.nests.loop_var(n, r) for n, r in zip(stmt.vars, stmt.ranges, strict=True)])
            if values is not None:
                self.unroll(stmt, values)
                return
        flag = self.context.scope.find(stmt.until) if stmt.until else None
        until = flag.var if isinstance(flag, VariableSlot) else None
        self.tiles.changes_in(stmt.body)
        with self.array_loops.inside(stmt), self.ordered(stmt), self.context.loop_body(stmt) as body:
            variables = self.nests.enter(stmt)
            shape = self.context.state.tiled.get(id(stmt)) if self.context.spread is None and not self.array_loops.ordered() else None
            if shape is not None and until is not None:
                raise self.context.fail("TW005", "a loop that changes tiles cannot be left by 'break' or 'return'", stmt.span, "change the tiles in a loop of their own")
            spread = None if shape is None else self.tiles.open_spread(shape, stmt.span)
            for inner in stmt.body:
                self.statement(inner)
            # Such stores keep some axes from running in parallel; that is not what the source promised with grid.
            asked = "auto" if spread is not None and spread.once else stmt.parallel
            statements = tuple(body) if spread is None else self.tiles.close_spread(spread, tuple(body), asked, stmt.span)
        self.context.emit(TypedLoop(variables, statements, asked=asked, until=until, span=stmt.span))

    @contextmanager
    def ordered(self, stmt: syntax.For | syntax.While) -> Iterator[None]:
        """Inside a loop whose iterations run in order, reads may be of what iterations before wrote."""
        before, in_grid = self.context.written_later, self.context.in_grid
        if not isinstance(stmt, syntax.For) or stmt.parallel != "yes":
            self.context.written_later = before | self.stored_in(stmt.body)
        else:
            self.context.in_grid = True
        try:
            yield
        finally:
            self.context.written_later, self.context.in_grid = before, in_grid

    def stored_in(self, body: tuple[syntax.Stmt, ...]) -> set[str]:
        """Arrays whose elements the statements write, by unique name."""
        stores = [n for n in nodes(body) if isinstance(n, syntax.Assign) and isinstance(n.target, syntax.Index) and not n.op]
        bases = [flatten_index(n.target)[0] for n in stores if isinstance(n.target, syntax.Index)]
        bindings = [self.context.scope.find(base.id) for base in bases if isinstance(base, syntax.Name)]
        return {b.name for b in bindings if isinstance(b, ArrayInfo)}

    def unroll(self, stmt: syntax.For, values: Sequence[int]) -> None:
        """The body once for each value of the index, at the top of the kernel."""
        before = dict(self.context.scope.names)
        self.unrolling += 1
        self.array_loops.open(stmt, unrolled=True)
        for value in values:
            self.context.scope.names[stmt.vars[0]] = Alias(self.typing.literal(value, stmt.span), (id(stmt), stmt.vars[0]))
            for inner in stmt.body:
                self.statement(inner)
        self.unrolling -= 1
        names = self.context.scope.names
        for name in [n for n in names if n not in before]:
            del names[name]
        if stmt.vars[0] in before:
            names[stmt.vars[0]] = before[stmt.vars[0]]

    def branch(self, stmt: syntax.If) -> None:
        cond = self.typing.logical(self.expressions.expr(stmt.cond), stmt.span)
        self.typing.scalar_only("the condition", cond, stmt.span)
        known = constant_of(cond) if is_decided(stmt.cond) or (self.unrolling and not self.array_loops.around) else None
        if known is not None:
            for inner in stmt.then if known else stmt.otherwise:
                self.statement(inner)
            return
        with self.array_loops.inside(stmt), self.context.condition(cond):
            with self.context.block() as then:
                for inner in stmt.then:
                    self.statement(inner)
            with self.context.block() as otherwise:
                for inner in stmt.otherwise:
                    self.statement(inner)
        self.context.emit(TypedIf(cond, tuple(then), tuple(otherwise), span=stmt.span))

    def repeat(self, stmt: syntax.While) -> None:
        with self.array_loops.inside(stmt):
            self.repeated(stmt)

    def repeated(self, stmt: syntax.While) -> None:
        value, before = self.expressions.aside(stmt.cond)
        if before:
            raise self.context.fail("TW005", "a reduction in the condition of a while", stmt.cond.span, "compute it into a variable, before and in the loop")
        cond = self.typing.logical(value, stmt.span)
        inside = next((n for n in nodes(stmt.body) if isinstance(n, syntax.Call) and getattr(n.function, "id", "") == "barrier"), None)
        if inside is not None:
            raise self.context.fail("TW012", "barrier() in a while: not every iteration would reach it as often", inside.span, "put it after the while")
        self.tiles.changes_in(stmt.body)
        with self.ordered(stmt), self.context.condition(), self.context.block() as body:
            for inner in stmt.body:
                self.statement(inner)
        self.context.emit(TypedWhile(cond, tuple(body), span=stmt.span))

    # -- results ------------------------------------------------------------------------------------------------------

    def returned(self, stmt: syntax.Return, last: bool) -> None:
        if not last or not self.context.is_python or self.metadata.kind is KernelKind.REDUCE:
            raise self.context.fail("TW005", "a kernel returns once, as its last statement", stmt.span)
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
        binding = self.context.scope.find(node.id) if isinstance(node, syntax.Name) else None
        if isinstance(binding, ArrayInfo) and binding.role == "inout":
            raise self.context.fail(
                "TW005", f"'{binding.name}' is written in place: the caller has it, and it cannot be returned as well", span,
                f"leave it out, or return a copy of it, {binding.name} + 0",
            )  # fmt: skip
        if isinstance(binding, ArrayInfo) and binding.role != "input" and binding not in self.results and binding.name not in self.arrays.temporaries:
            if binding.role != "output":
                self.context.state.returned.add(binding.name)
                self.context.state.changed = True
            self.results.append(binding)
            return
        value = self.typing.settled(self.expressions.expr(node))
        self.expressions.masks.refuse(value.shape, node.span)
        title = node.id if isinstance(node, syntax.Name) and value.shape and node.id not in self.arrays.inputs else name
        array = self.arrays.new_array(title, value.dtype, value.shape, "output")
        self.arrays.written.add(array.name)
        self.context.emit(ArrayAssign(array, value, span=span))
        self.results.append(array)


def _is_cast(node: syntax.Expr) -> bool:
    """Whether the value's dtype was written down: `i32(0)`, `cast(x, i32)`."""
    return isinstance(node, syntax.Call) and isinstance(node.function, syntax.Name) and (
        node.function.id == "cast" or dtypes.is_name(node.function.id)
    )  # fmt: skip


def print_statement(node: syntax.Call, context: Context) -> syntax.Print:
    """`print("text", x, …)` of ZynML: its arguments, with spaces between."""
    parts: list[str] = []
    values: list[syntax.Expr] = []
    for argument in node.args:
        if argument.keyword is not None:
            raise context.fail("TW016", f"print has no argument '{argument.keyword}' in a kernel", argument.span)
        if isinstance(argument.value, syntax.String):
            parts.append(argument.value.value.replace("{", "{{").replace("}", "}}"))
        else:
            parts.append("{}")
            values.append(argument.value)
    return syntax.Print(" ".join(parts) + "\n", tuple(values), span=node.span)


def assert_statement(node: syntax.Call, context: Context) -> syntax.Assert:
    """`assert(cond, "text")` of ZynML."""
    values = [a.value for a in node.args if a.keyword is None]
    text = values[1] if len(values) == 2 else syntax.String("")
    if not 1 <= len(values) <= 2 or len(values) != len(node.args) or not isinstance(text, syntax.String):
        raise context.fail("TW016", "assert() takes a condition and a text", node.span, 'write assert(x > 0, "x is positive")')
    return syntax.Assert(values[0], text.value, span=node.span)


def _is_array_type(node: syntax.Expr) -> bool:
    return isinstance(node, syntax.Name) and node.id.lower() in ("array", "tensor")


def _shape_owner(node: syntax.Expr) -> str:
    if isinstance(node, syntax.Attribute) and node.name == "shape" and isinstance(node.value, syntax.Name):
        return node.value.id
    return ""
