"""Checking statements: one walk over a kernel's body.

A `BodyChecker` starts from what earlier walks left in `State`, types every statement, and writes back what it learnt:
the dtypes of variables, the dtypes and extents of outputs, which names are assigned to, which sizes are equal. An error
ends only the statement it is in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tilewright.base import dtypes
from tilewright.base.dtypes import DType, accumulator, i64
from tilewright.base.errors import Diagnostics
from tilewright.base.sizes import ONE, ZERO, Size, ceildiv, contiguous_strides, maximum
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.bounds import clamped, interval
from tilewright.tree.check_expr import (
    CREATORS,
    Alias,
    ExprChecker,
    Key,
    OutputState,
    Poison,
    Scope,
    Slot,
    State,
    VariableState,
    flatten_index,
)
from tilewright.tree.infer import Skip, TypePair, join, size_of, sum_dtype, type_of
from tilewright.tree.metadata import KernelKind, KernelMetadata, suggest
from tilewright.tree.typed import (
    Accumulate,
    ArgSpec,
    ArrayArg,
    ArrayAssign,
    ArrayInfo,
    Element,
    Expr,
    If,
    Local,
    Loop,
    LoopVar,
    Reduce,
    ReduceLoop,
    ScalarArg,
    ScalarInfo,
    SetVar,
    Shape,
    SizeValue,
    Stmt,
    Store,
    Variable,
    While,
    Whole,
    Yield,
    row_major,
    show_expr,
    walk_expr,
)

_COMBINE = {"+": "add", "*": "mul", "and": "and", "or": "or", "&": "and", "|": "or"}


class BodyChecker(ExprChecker):
    def __init__(
        self, function: syntax.Function, args: Sequence[ArgSpec], metadata: KernelMetadata, state: State, sink: Diagnostics
    ) -> None:  # fmt: skip
        super().__init__(function.kind, state, sink)
        self.kernel = function
        self.metadata = metadata
        self.params: list[ArrayInfo | ScalarInfo] = []
        self.arrays: dict[str, ArrayInfo] = {}
        """Arrays the kernel makes, by unique name."""
        self.temporaries: set[str] = set()
        """Arrays made for reductions, never written again."""
        self.results: list[ArrayInfo] = []
        self.body: tuple[Stmt, ...] = ()
        self.written: set[str] = set()
        self.out: list[Stmt] = []
        self.reach: dict[str, list[Shape]] = {}
        """ZynML outputs: for each store, one more than the largest index along each axis."""
        self.yields: list[TypePair] | None = None
        """Types of the values yielded in the reduction being checked."""
        self.target = Variable("out", self.default_float)
        """What that reduction accumulates into."""
        self.domain = 0
        """How many loop indices it runs over."""
        for param, arg in zip(function.params, args, strict=True):
            self.declare_param(param, arg)

    # -- parameters -------------------------------------------------------------------------------------------------

    def declare_param(self, param: syntax.Param, arg: ArgSpec) -> None:
        if isinstance(arg, ScalarArg):
            weak = ("float" if arg.dtype.is_float else "index" if arg.dtype.is_int else "") if arg.weak else ""
            dtype = self.default_float if weak == "float" else arg.dtype
            scalar = ScalarInfo(param.name, dtype, weak)
            self.params.append(self.annotated_scalar(param, scalar))
        else:
            shape = tuple(self.state.solution.of(f"{param.name}${axis}") for axis in range(arg.rank))
            strides = contiguous_strides(shape) if arg.strides is None else tuple(
                Size.of(f"{param.name}$s{axis}" if s is None else s) for axis, s in enumerate(arg.strides)
            )  # fmt: skip
            array = ArrayInfo(param.name, arg.dtype, shape, strides, "input", arg.align)
            self.inputs[param.name] = array
            self.params.append(array)
            self.written.add(param.name)
            self.annotated_array(param, arg)
        self.scope.names[param.name] = self.params[-1]

    def annotated_scalar(self, param: syntax.Param, scalar: ScalarInfo) -> ScalarInfo:
        """An annotation with a dtype makes a plain number that dtype."""
        node = param.type
        if isinstance(node, syntax.Index) or (isinstance(node, syntax.Name) and node.id.lower() in ("array", "tensor")):
            self.sink.error("TW009", f"'{param.name}' must be an array, got a number ({scalar.dtype})", param.span)
        if isinstance(node, syntax.Name) and dtypes.is_name(node.id) and node.id not in ("int", "float", "bool"):
            dtype = dtypes.by_name(node.id)
            if dtype is scalar.dtype or scalar.weak:
                return ScalarInfo(scalar.name, dtype)
            self.sink.error("TW009", f"'{param.name}' must be {dtype}, got {scalar.dtype}", param.span)
        return scalar

    def annotated_array(self, param: syntax.Param, arg: ArrayArg) -> None:
        """`f32[rows, 4]`: dtype, rank, names and constants of the extents."""
        node = param.type
        if not isinstance(node, syntax.Index):
            if isinstance(node, syntax.Name) and (node.id in ("int", "float", "bool") or dtypes.is_name(node.id)):
                self.sink.error("TW009", f"'{param.name}' must be a number ({node.id}), got an array of rank {arg.rank}", param.span)
            return
        if isinstance(node.value, syntax.Name) and dtypes.is_name(node.value.id):
            dtype = dtypes.by_name(node.value.id)
            if dtype is not arg.dtype:
                self.sink.error("TW009", f"'{param.name}' must be {dtype}, got {arg.dtype}", param.span)
        if len(node.indices) != arg.rank:
            self.sink.error("TW003", f"'{param.name}' must have rank {len(node.indices)}, got {arg.rank}", param.span)
            return
        equations = self.state.equations
        for axis, extent in enumerate(node.indices):
            name = f"{param.name}${axis}"
            if isinstance(extent, syntax.Name):
                equations.used.setdefault(extent.id, extent.span)
                self.equal(name, extent.id)
                if self.is_python:
                    size = SizeValue(self.state.solution.of(extent.id), span=extent.span)
                    self.scope.names.setdefault(extent.id, Alias(size, (id(extent), extent.id)))
            elif isinstance(extent, syntax.Number) and isinstance(extent.value, int):
                equations.defined.setdefault((name, Size.of(extent.value)), extent.span)

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
                self.sink.error("TW002", f"@broadcast names '{name}', which is not an input", self.kernel.span, help)
        last = len(self.kernel.body) - 1
        for position, stmt in enumerate(self.kernel.body):
            self.statement(stmt, last=position == last)
        self.finish()
        self.body = tuple(self.out)

    def finish(self) -> None:
        if self.is_python:
            returns = [s for s in self.kernel.body if isinstance(s, syntax.Return) and s.value is not None]
            if not returns:
                self.sink.error("TW017", f"'{self.kernel.name}' returns nothing", self.kernel.span, "return the arrays it makes")
        else:
            self.results = [a for a in self.arrays.values() if a.role == "output"]
            if not self.results:
                self.sink.error("TW017", "the kernel writes no output", self.kernel.span, "write out[…] = …, or yield in a reduce kernel")
        for result in self.results:
            if result.name not in self.written:
                self.sink.error("TW017", f"output '{result.name}' is never written", self.kernel.span, f"store to {result.name}[…]")

    def learn_outputs(self) -> None:
        """ZynML: extents of outputs from this walk's stores."""
        for name, reaches in self.reach.items():
            axes: list[Size] = []
            for ends in zip(*reaches, strict=True):
                extent = ends[0]
                for end in ends[1:]:
                    extent = maximum(extent, end)
                axes.append(clamped(extent))
            self.shape_output(name, tuple(axes))

    @contextmanager
    def block(self, scope: Scope | None = None) -> Iterator[list[Stmt]]:
        """Statements inside go to a list of their own, names to a scope of their own."""
        before, self.out = self.out, []
        outer, self.scope = self.scope, scope or Scope(self.scope)
        try:
            yield self.out
        finally:
            self.out, self.scope = before, outer

    def statement(self, stmt: syntax.Stmt, last: bool = False) -> None:
        try:
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
            elif isinstance(stmt, syntax.ExprStmt):
                self.bare(stmt)
            else:
                raise self.fail("TW005", f"a {type(stmt).__name__.lower()} cannot be inside a kernel", stmt.span)
        except Skip:
            if isinstance(stmt, syntax.Let):
                for name in stmt.targets:
                    if not isinstance(self.scope.find(name), LoopVar):
                        self.scope.names[name] = Poison()

    def bare(self, stmt: syntax.ExprStmt) -> None:
        value = stmt.value
        if isinstance(value, syntax.String):
            return
        if isinstance(value, syntax.Call) and isinstance(value.function, syntax.Name) and value.function.id == "barrier":
            raise self.fail("TW005", "barrier() is not available: it needs shared arrays", stmt.span)
        self.expr(value)
        raise self.fail("TW005", "this expression has no effect", stmt.span, "assign it to a name")

    # -- declarations -----------------------------------------------------------------------------------------------

    def let(self, stmt: syntax.Let) -> None:
        if stmt.shared:
            raise self.fail("TW005", "shared arrays are not available in kernels", stmt.span, "use a variable or an output")
        for name in stmt.targets:
            if isinstance(self.scope.find(name), LoopVar):
                raise self.fail("TW010", f"'{name}' is the index of a loop around it and cannot be declared again", stmt.span, "choose another name")
        assert stmt.value is not None
        if stmt.destructure or len(stmt.targets) > 1:
            self.destructure(stmt, stmt.value)
            return
        (name,) = stmt.targets
        if self.create(name, stmt.value):
            return
        items = self.extents(stmt.value)
        if items is not None:
            self.scope.names[name] = items
            self.call_sizes([name] if len(items) == 1 else [], items)
            return
        fixed = None if stmt.type is None else self.dtype_argument(stmt.type)
        self.declare(name, self.expr(stmt.value), (id(stmt), name), stmt.span, fixed, not stmt.mutable, _is_cast(stmt.value))

    def destructure(self, stmt: syntax.Let, node: syntax.Expr) -> None:
        items = self.extents(node)
        if items is None:
            raise self.fail("TW009", "a tuple is expected on the right", stmt.span)
        if len(items) != len(stmt.targets):
            what = f"'{_shape_owner(node)}' has rank {len(items)}" if _shape_owner(node) else f"there are {len(items)} values"
            raise self.fail("TW003", f"{what}, but {len(stmt.targets)} names are given", stmt.span)
        for name, item in zip(stmt.targets, items, strict=True):
            self.declare(name, item, (id(stmt), name), stmt.span, None, not stmt.mutable, False)

    def call_sizes(self, names: Sequence[str], items: Sequence[Expr]) -> None:
        """A Python variable that holds one size gives it its name."""
        for name, item in zip(names, items, strict=False):
            raw = self.raw_name(item.size) if isinstance(item, SizeValue) else None
            if self.is_python and raw is not None:
                self.state.equations.calls[raw, name] = None

    def declare(
        self, name: str, value: Expr, key: Key, span: Span, fixed: DType | None, immutable: bool, is_cast: bool
    ) -> None:  # fmt: skip
        known = self.state.variables.setdefault(key, VariableState())
        if value.shape:
            self.declare_array(name, value, key, span)
            return
        if fixed is not None:
            var = Variable(name, fixed, "", known.assigned)
            self.out.append(SetVar(var, self.assignable(value, fixed, f"'{name}'", span), True, span=span))
            self.scope.names[name] = Slot(var, key, len(self.loops), True, immutable=immutable)
            return
        steady = not any(isinstance(e, Local) and e.var.mutable for e in walk_expr(value))
        if value.weak and not known.assigned and steady:
            self.scope.names[name] = Alias(value, key)
            self.call_sizes([name], [value])
            return
        pair = self.learn_variable(key, type_of(value), name, span)
        var = Variable(name, pair[0], pair[1], known.assigned)
        self.out.append(SetVar(var, self.convert(value, var.dtype), True, span=span))
        self.scope.names[name] = Slot(var, key, len(self.loops), is_cast, immutable=immutable)

    def learn_variable(self, key: Key, pair: TypePair, name: str, span: Span) -> TypePair:
        """The variable's type with one more value seen."""
        known = self.state.variables.setdefault(key, VariableState())
        joined = pair if known.pair is None else join(known.pair, pair)
        if joined is None:
            assert known.pair is not None
            raise self.fail("TW006", f"'{name}' would be both {known.pair[0]} and {pair[0]}, which would lose data", span, "cast one of the values")
        if joined[1] == "float":
            joined = self.default_float, "float"
        if joined != known.pair:
            known.pair = joined
            self.state.changed = True
        return joined

    # -- arrays -----------------------------------------------------------------------------------------------------

    def new_array(self, name: str, dtype: DType, shape: Shape, role: str | None = None) -> ArrayInfo:
        unique, number = name, 0
        while unique in self.arrays or any(p.name == unique for p in self.params):
            number += 1
            unique = f"{name}${number}"
        array = row_major(unique, dtype, shape, role or ("output" if unique in self.state.returned else "scratch"))
        self.arrays[unique] = array
        return array

    def outside_loops(self, what: str, span: Span) -> None:
        if self.loops or self.guarded or self.scope.parent is not None:
            raise self.fail("TW005", f"{what} must be at the top of the kernel, outside loops and ifs", span)

    def create(self, name: str, node: syntax.Expr) -> bool:
        """`name = empty(shape, dtype)` and its kin; False when it is something else."""
        if not isinstance(node, syntax.Call) or not isinstance(node.function, syntax.Name):
            return False
        maker = node.function.id
        if maker not in CREATORS:
            return False
        self.outside_loops(f"{maker}()", node.span)
        values = {a.keyword or position: a.value for position, a in enumerate(node.args)}
        if maker.endswith("_like"):
            source = self.array(values[0]) if set(values) <= {0, 1, "dtype"} and 0 in values else None
            if source is None:
                raise self.fail("TW016", f"{maker}() takes an array", node.span, f"write {maker}(x)")
            shape = source.shape
            given = values.get(1) or values.get("dtype")
            dtype = source.dtype if given is None else self.dtype_argument(given)
        else:
            wanted = ("shape", "value", "dtype") if maker == "full" else ("shape", "dtype")
            ordered = [values.get(position, values.get(key)) for position, key in enumerate(wanted)]
            if any(v is None for v in ordered) or len(values) != len(wanted):
                raise self.fail("TW016", f"{maker}() takes {', '.join(wanted)}, got {len(node.args)} arguments", node.span)
            assert ordered[0] is not None
            assert ordered[-1] is not None
            shape = self.shape_argument(ordered[0])
            dtype = self.dtype_argument(ordered[-1])
        fill: Expr | None = None
        if maker == "full":
            assert ordered[1] is not None
            value = self.expr(ordered[1])
            fill = self.assignable(value, dtype, f"'{name}'", node.span)
        elif maker != "empty" and maker != "empty_like":
            fill = self.convert(self.literal(int(maker == "ones"), node.span), dtype)
        array = self.new_array(name, dtype, shape)
        self.scope.names[name] = array
        if fill is not None:
            self.written.add(array.name)
            self.out.append(ArrayAssign(array, fill, span=node.span))
        return True

    def shape_argument(self, node: syntax.Expr) -> Shape:
        items = self.extents(node)
        if items is None:
            items = (self.expr(node),)
        sizes: list[Size] = []
        for item in items:
            size = size_of(item)
            if size is None:
                raise self.fail("TW014", f"extent {show_expr(item)} is not made of sizes of the inputs", node.span, "use x.shape[…] or a constant")
            sizes.append(size)
        return tuple(sizes)

    def declare_array(self, name: str, value: Expr, key: Key, span: Span) -> None:
        """A name for an array value: computed where it is used, unless what it reads may change."""
        self.outside_loops(f"the array '{name}'", span)
        value = self.settled(value)
        if isinstance(value, Whole):
            self.scope.names[name] = value.array
            return
        if any(isinstance(e, Whole) and e.array.role != "input" and e.array.name not in self.temporaries for e in walk_expr(value)):
            array = self.new_array(name, value.dtype, value.shape)
            self.out.append(ArrayAssign(array, value, span=span))
            self.written.add(array.name)
            self.scope.names[name] = array
            return
        self.scope.names[name] = Alias(value, key)

    def materialise(self, value: Reduce) -> Expr:
        array = row_major(f"{value.kind}${len(self.arrays)}", value.dtype, value.shape, "scratch")
        self.arrays[array.name] = array
        self.temporaries.add(array.name)
        self.written.add(array.name)
        self.out.append(ArrayAssign(array, value, span=value.span))
        return Whole(array, span=value.span)

    def on_read(self, array: ArrayInfo, span: Span) -> None:
        if array.name not in self.written:
            raise self.fail("TW017", f"'{array.name}' is read before anything is written to it", span, "store to it first, or make it with zeros")

    def implicit(self, array: ArrayInfo) -> bool:
        return not self.is_python and array.role == "output"

    def implicit_array(self, base: syntax.Expr) -> ArrayInfo | None:
        """ZynML: `out` and `out_name` are outputs, known from earlier walks."""
        if self.is_python or not isinstance(base, syntax.Name) or not _is_output_name(base.id):
            return None
        return self.arrays.get(base.id)

    def output(self, name: str, rank: int, pair: TypePair, span: Span) -> ArrayInfo:
        """The output of that name, with one more value of type `pair` stored to it."""
        known = self.state.outputs.setdefault(name, OutputState())
        joined = pair if known.pair is None else join(known.pair, pair)
        if joined is None:
            assert known.pair is not None
            raise self.fail("TW006", f"'{name}' is {known.pair[0]}, and {pair[0]} does not fit it", span, "cast one of the values")
        if joined != known.pair:
            known.pair = joined
            self.state.changed = True
        if name in self.arrays:
            return self.arrays[name]
        shape = known.shape
        if shape is None or len(shape) != rank:
            shape = tuple(Size.of(f"{name}${axis}") for axis in range(rank))
        array = row_major(name, joined[0], shape, "output")
        self.arrays[name] = array
        return array

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
            known = self.state.variables.setdefault(found.key, VariableState())
            known.assigned = self.state.changed = True
            return
        if isinstance(found, ScalarInfo) or (isinstance(found, ArrayInfo) and (found.role == "input" or stmt.op)):
            raise self.fail("TW015", f"'{name}' is an input and cannot be written", stmt.span, "make an output and write to that")
        if isinstance(found, Slot):
            self.assign_variable(stmt, name, found)
        elif self.is_python and not stmt.op:
            self.let(syntax.Let((name,), stmt.value, mutable=True, span=stmt.span))
        elif not self.is_python and _is_output_name(name) and not stmt.op:
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

    def shape_output(self, name: str, shape: Shape) -> None:
        known = self.state.outputs[name]
        if known.shape != shape:
            known.shape, self.state.reshaped = shape, True

    def assign_variable(self, stmt: syntax.Assign, name: str, slot: Slot) -> None:
        if slot.immutable:
            raise self.fail("TW015", f"'{name}' was declared with let and cannot change", stmt.span, f"declare it with var {name}")
        known = self.state.variables.setdefault(slot.key, VariableState())
        if not known.assigned:
            known.assigned = self.state.changed = True
        part = self.contribution(stmt, name)
        if part is not None:
            kind, negative, node = part
            value = self.expr(node)
            if not any(isinstance(e, Local) and e.var is slot.var for e in walk_expr(value)):
                self.accumulate(stmt, name, slot, kind, negative, value)
                return
        node = stmt.value if not stmt.op else syntax.Binary(stmt.op, stmt.target, stmt.value, span=stmt.span)
        value = self.expr(node)
        self.scalar_only(name, value, stmt.span)
        var = slot.var
        if not slot.fixed:
            self.learn_variable(slot.key, type_of(value), name, stmt.span)
        self.out.append(SetVar(var, self.assignable(value, var.dtype, f"'{name}'", stmt.span), span=stmt.span))

    def scalar_only(self, name: str, value: Expr, span: Span) -> None:
        if value.shape:
            raise self.fail("TW003", f"'{name}' is a number, and the value has rank {len(value.shape)}", span)

    def accumulate(self, stmt: syntax.Assign, name: str, slot: Slot, kind: str, negative: bool, value: Expr) -> None:
        self.scalar_only(name, value, stmt.span)
        var = slot.var
        if kind in ("and", "or") and var.dtype.is_bool:
            value = self.logical(value, stmt.span)
        if not slot.fixed:
            self.learn_variable(slot.key, self.summed(kind, value, len(self.loops) > slot.depth), name, stmt.span)
        value = self.assignable(value, var.dtype, f"'{name}'", stmt.span)
        if negative:
            value = self.negate(value, stmt.span)
        self.out.append(Accumulate(var, kind, value, span=stmt.span))

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
        if isinstance(array, ArrayInfo) and array.role == "input":
            raise self.fail("TW015", f"'{array.name}' is an input and cannot be written", stmt.span, "make an output and write to that")
        implicit = array is None and not self.is_python and isinstance(base, syntax.Name) and _is_output_name(base.id)
        if not implicit and not isinstance(array, ArrayInfo):
            name = base.id if isinstance(base, syntax.Name) else "this"
            if isinstance(base, syntax.Name) and self.scope.find(name) is None:
                raise self.unknown(name, base.span)
            raise self.fail("TW015", f"'{name}' is not an output and cannot be written", stmt.span)
        value = self.expr(stmt.value)
        if isinstance(array, ArrayInfo):
            place = array
        else:
            assert isinstance(base, syntax.Name)
            if stmt.op and base.id not in self.written:
                raise self.fail("TW017", f"'{base.id}' is read before anything is written to it", stmt.span, f"store to {base.id}[…] with = first")
            place = self.output(base.id, len(nodes), type_of(value), stmt.span)
        self.scalar_only(place.name, value, stmt.span)
        indices = self.access(place, nodes, stmt.span, write=True)
        if self.implicit(place):
            self.reach_output(place, indices, stmt.span)
        kind, value = self.store_kind(stmt, place, indices, value)
        value = self.assignable(value, place.dtype, f"'{place.name}'", stmt.span)
        self.written.add(place.name)
        self.out.append(Store(place, indices, value, kind, span=stmt.span))

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

    def reach_output(self, place: ArrayInfo, indices: Sequence[Expr], span: Span) -> None:
        ends: list[Size] = []
        for axis, index in enumerate(indices):
            reach = interval(index)
            if reach is None:
                raise self.fail(
                    "TW014", f"the extent of '{place.name}' along axis {axis} cannot be found from index {show_expr(index)}", span,
                    "use loop indices and sizes only",
                )  # fmt: skip
            ends.append(reach[1] + 1)
        self.reach.setdefault(place.name, []).append(tuple(ends))

    # -- control flow -----------------------------------------------------------------------------------------------

    def loop_var(self, name: str, node: syntax.Range) -> LoopVar:
        lo, hi = self.bound(node.lo), self.bound(node.hi)
        for expr in walk_expr(hi):
            if isinstance(expr, SizeValue):
                self.state.equations.ranges |= self.state.solution.raw(expr.size).names
        if node.inclusive:
            hi = self.binary("+", hi, self.literal(1, node.span), node.span)
        step = ONE if node.step is None else size_of(self.bound(node.step))
        if step is None or step == ZERO:
            what = "0" if step == ZERO else "not made of constants and sizes"
            raise self.fail("TW016", f"the step of a loop cannot be {what}", node.span)
        first, last = size_of(lo), size_of(hi)
        down = step.constant is not None and step.constant < 0
        count = None
        if first is not None and last is not None:
            count = ceildiv(first - last, -step) if down else ceildiv(last - first, step)
        start, end = interval(lo), interval(hi)
        low = start[0] if start else None
        high = end[1] - 1 if end else None
        if first is not None and count is not None:
            low, high = first, first + step * (count - 1)
        elif down:
            low, high = (end[0] + 1 if end else None), (start[1] if start else None)
        if first is not None and count is not None and down:
            low, high = high, low
        return LoopVar(name, lo, hi, step, first, None if count is None else clamped(count), low, high)

    def bound(self, node: syntax.Expr) -> Expr:
        value = self.expr(node)
        if value.shape or not value.dtype.is_int:
            raise self.fail("TW009", f"a loop bound must be an integer, got {value.dtype}", node.span)
        return self.convert(value, i64)

    def loop(self, stmt: syntax.For) -> None:
        if stmt.over is not None or not stmt.ranges:
            raise self.fail("TW005", "a kernel loops over ranges only", stmt.span, "write for i in range(n), or for i in 0..n")
        if len(stmt.vars) != len(stmt.ranges):
            raise self.fail("TW016", f"{len(stmt.vars)} loop indices for {len(stmt.ranges)} ranges", stmt.span)
        for position, name in enumerate(stmt.vars):
            if isinstance(self.scope.find(name), LoopVar) or name in stmt.vars[:position]:
                raise self.fail("TW010", f"'{name}' is already the index of a loop around it", stmt.span, "choose another name")
        is_reduce = self.metadata.kind is KernelKind.REDUCE and not self.is_python
        if is_reduce and self.yields is None:
            self.reduce_loop(stmt)
            return
        with self.block() as body:
            variables = self.enter(stmt)
            for inner in stmt.body:
                self.statement(inner)
            del self.loops[len(self.loops) - len(variables) :]
        self.out.append(Loop(variables, tuple(body), asked=stmt.parallel, span=stmt.span))

    def enter(self, stmt: syntax.For) -> tuple[LoopVar, ...]:
        """Declare the indices of a loop in the current scope."""
        variables: list[LoopVar] = []
        for name, node in zip(stmt.vars, stmt.ranges, strict=True):
            var = self.loop_var(name, node)
            self.scope.names[name] = var
            variables.append(var)
            self.loops.append(var)
        return tuple(variables)

    def reduce_loop(self, stmt: syntax.For) -> None:
        """A `@kernel reduce` nest: the loops directly around one another are its domain."""
        self.outside_loops("the loop of a reduce kernel", stmt.span)
        kind, axes = self.metadata.reduction, self.metadata.axes
        self.yields = []
        known = self.state.outputs.get("out")
        self.target = Variable("out", known.pair[0] if known is not None and known.pair is not None else self.default_float)
        variables: list[LoopVar] = []
        with self.block() as body:
            nest: syntax.For | None = stmt
            while nest is not None:
                variables += self.enter(nest)
                inner = [s for s in nest.body if isinstance(s, syntax.For) and _yields(s)]
                following = inner[0] if len(inner) == 1 and not any(isinstance(s, syntax.Yield) for s in nest.body) else None
                self.domain = len(variables)
                for each in nest.body:
                    if each is not following:
                        self.statement(each)
                nest = following
            self.loops.clear()
        pairs, self.yields = self.yields, None
        if not pairs:
            raise self.fail("TW017", "a reduce kernel must yield a value", stmt.span, "write yield value inside the loop")
        reduced = set(range(len(variables))) if axes is None else set()
        for axis in axes or ():
            if not -len(variables) <= axis < len(variables):
                raise self.fail("TW003", f"axis {axis} of a reduction over {len(variables)} loop indices", stmt.span)
            reduced.add(axis % len(variables))
        inner_vars = tuple(v for i, v in enumerate(variables) if i in reduced)
        outer_vars = tuple(v for i, v in enumerate(variables) if i not in reduced)
        pair = pairs[0]
        for other in pairs[1:]:
            pair = join(pair, other) or pair
        dtype = sum_dtype(pair[0], kind)
        array = self.output("out", len(outer_vars), (dtype, ""), stmt.span)
        shape: list[Size] = []
        for var in variables:
            if var.count is None:
                raise self.fail("TW014", f"the range of '{var.name}' is not made of sizes of the inputs", stmt.span)
        for var in outer_vars:
            assert var.count is not None
            shape.append(var.count)
        self.shape_output("out", tuple(shape))
        if kind in ("argmin", "argmax"):
            self.not_empty(kind, [v.count for v in inner_vars if v.count is not None], shape, stmt.span)
        self.written.add("out")
        self.out.append(ReduceLoop(outer_vars, inner_vars, tuple(body), kind, self.target, array, span=stmt.span))

    def yielded(self, stmt: syntax.Yield) -> None:
        if self.yields is None:
            raise self.fail("TW012", "yield is only for reduce kernels", stmt.span, "write @kernel reduce(…), or store to out[…]")
        kind, index = self.metadata.reduction, None
        node = stmt.value
        if isinstance(node, syntax.Tuple):
            if len(node.items) != 2 or kind not in ("argmin", "argmax"):
                raise self.fail("TW016", f"a reduce({kind}) kernel yields one value", stmt.span)
            position = self.expr(node.items[1])
            if position.shape or not position.dtype.is_int:
                raise self.fail("TW009", f"a yielded index must be an integer, got {position.dtype}", node.items[1].span)
            index, node = self.convert(position, i64), node.items[0]
        value = self.settled(self.expr(node))
        self.scalar_only("yield", value, stmt.span)
        if kind in ("and", "or"):
            value = self.logical(value, stmt.span)
        self.yields.append(type_of(value))
        if kind not in ("argmin", "argmax"):
            self.out.append(Accumulate(self.target, kind, self.convert(value, self.target.dtype), span=stmt.span))
            return
        if len(self.loops) > self.domain:
            raise self.fail("TW005", f"yield of a reduce({kind}) kernel cannot be in an inner loop", stmt.span)
        self.out.append(Yield(value, index, span=stmt.span))

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
        cond = self.logical(self.expr(stmt.cond), stmt.span)
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
        if not last or not self.is_python:
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


def _is_output_name(name: str) -> bool:
    return name == "out" or name.startswith("out_")


def _is_cast(node: syntax.Expr) -> bool:
    """Whether the value's dtype was written down: `i32(0)`, `cast(x, i32)`."""
    return isinstance(node, syntax.Call) and isinstance(node.function, syntax.Name) and (
        node.function.id == "cast" or dtypes.is_name(node.function.id)
    )  # fmt: skip


def _shape_owner(node: syntax.Expr) -> str:
    if isinstance(node, syntax.Attribute) and node.name == "shape" and isinstance(node.value, syntax.Name):
        return node.value.id
    return ""


def _yields(stmt: syntax.Stmt) -> bool:
    if isinstance(stmt, syntax.Yield):
        return True
    if isinstance(stmt, syntax.For | syntax.While):
        return any(_yields(s) for s in stmt.body)
    return isinstance(stmt, syntax.If) and any(_yields(s) for s in (*stmt.then, *stmt.otherwise))
