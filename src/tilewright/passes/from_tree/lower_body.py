"""Building one loop-stage kernel from typed statements: the inner half of `lower_tree`.

A `Draft` is a kernel under construction: ops on sizes at its top, and the body of its one `parallel`. Values of variables
are kept in a scope (a dict from variable to IR value) that is copied into regions and merged after them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from tilewright.base.dtypes import DType, bool_, compute_dtype, i64
from tilewright.base.errors import UserError
from tilewright.base.record import replace
from tilewright.base.sizes import ONE, Size, SizeCall, contiguous_strides, has_numbers, is_number, parameter_of
from tilewright.base.source import Span
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value
from tilewright.ir.ops import OPS
from tilewright.ir.types import INDEX, Scalar, Tensor, dtype_of
from tilewright.passes.from_tree.complex_numbers import ComplexMath, Pair, matrix_products
from tilewright.tree.order.halves import without
from tilewright.tree.typed import (
    Accumulate,
    Apply,
    ArrayAssign,
    ArrayInfo,
    AxisIndex,
    Cast,
    Choose,
    Const,
    Element,
    Expr,
    IndexRef,
    Local,
    LoopVar,
    Picked,
    Reduce,
    ReduceLoop,
    ScalarInfo,
    ScalarRef,
    SetVar,
    SizeValue,
    Stmt,
    Store,
    TypedAssert,
    TypedBarrier,
    TypedIf,
    TypedLoop,
    TypedPrint,
    TypedWhile,
    TypedYield,
    Variable,
    Whole,
)
from tilewright.tree.typed_walk import assigned, walk, walk_expr

Number = Value | Pair
"""What a variable holds, or an expression is: a value, of complex dtypes two."""
Scope = dict[Variable | LoopVar, Number]


def tensor_type(array: ArrayInfo) -> Tensor:
    """What lies in memory. Complex numbers are pairs of floats along one more axis; strides that calls bind are in floats already."""
    if not array.dtype.is_complex:
        return Tensor(array.stored, array.shape, array.strides, align=array.align)
    shape = (*array.shape, Size.of(2))
    packed = array.strides == contiguous_strides(array.shape)
    strides = contiguous_strides(shape) if packed else (*array.strides, ONE)
    return Tensor(array.dtype.part, shape, strides, align=array.align)


def scalar_type(scalar: ScalarInfo) -> Tensor:
    """A complex number that is an argument: an array of its parts."""
    return Tensor(scalar.dtype.part, (Size.of(2),), (ONE,))


def spread(numbers: Sequence[Number]) -> list[Value]:
    """All values that these are made of."""
    found: list[Value] = []
    for number in numbers:
        if isinstance(number, Pair):
            assert number.im is not None
            found += (number.re, number.im)
        else:
            found.append(number)
    return found


def gathered(variables: Sequence[Variable], values: Sequence[Value]) -> list[Number]:
    """The numbers that variables hold, from their values in order."""
    rest = iter(values)
    return [Pair(next(rest), next(rest)) if var.dtype.is_complex else next(rest) for var in variables]


def part_names(variables: Sequence[Variable]) -> list[str]:
    """A name for each value of these."""
    return [name for var in variables for name in ((f"{var.name}_re", f"{var.name}_im") if var.dtype.is_complex else (var.name,))]


class Draft:
    """One kernel. `top_values` says what top-level variables are; it is read when one is first used."""

    def __init__(
        self, arrays: Mapping[str, ArrayInfo], scalars: Mapping[str, ScalarInfo], top_values: Mapping[Variable, Expr], span: Span
    ) -> None:  # fmt: skip
        self.top = Builder(span)
        self.body = Builder(span)
        self.span = span
        self.scope: Scope = {}
        self.domain: tuple[Value, ...] = ()
        self.indices: tuple[Value, ...] = ()
        self.written: set[str] = set()
        """Arrays the kernel stores to."""
        self.read: set[str] = set()
        """Arrays it loads from."""
        self._stored: dict[str, tuple[tuple[Value, ...], Number]] = {}
        """For arrays whose last store is sure: where it went, and the value as stored."""
        self._arrays = arrays
        self._scalars = scalars
        self._top_values = top_values
        self._params: dict[str, Value] = {}
        self._sizes: dict[Size, Value] = {}
        self._numbers: dict[Value, int | float | bool] = {}
        """What constant values are."""
        self._neutral: set[Value] = set()
        """Values standing for "nothing accumulated yet"."""

    def kernel(self, name: str, keep: set[str] | None = None) -> Kernel:
        """The kernel so far; with `keep`, without stores to tensors of other names."""
        body = Block(self.indices, (*self.body.ops, Op("yield", span=self.span)))
        if keep is not None:
            body = _drop_stores(body, keep)
        parallel = Op("parallel", self.domain, (), regions=(body,), span=self.span)
        return Kernel(name, Stage.LOOP, tuple(self._params.values()), Block((), (*self.top.ops, parallel)), span=self.span)

    # -- the domain -------------------------------------------------------------------------------------------------

    def open_shape(self, shape: Sequence[Size]) -> None:
        """A domain over every element of an array of that shape."""
        self.domain = tuple(self.size(s) for s in shape)
        self.indices = tuple(Value(INDEX, f"i{axis}") for axis in range(len(shape)))

    def open_loops(self, variables: Sequence[LoopVar], counts: Sequence[Size | None] = ()) -> None:
        """A domain over loop indices; each counts from 0 by ones, the index is computed from that. `counts` says how many values they take."""
        known = counts or [var.count for var in variables]
        self.domain = tuple(
            self.extent(self.top, var, self.scope) if count is None else self.size(count) for var, count in zip(variables, known, strict=True)
        )
        self.indices = tuple(Value(INDEX, var.name) for var in variables)
        for var, position in zip(variables, self.indices, strict=True):
            self.scope[var] = self.index(self.body, var, position, self.scope)

    def extent(self, builder: Builder, var: LoopVar, scope: Scope) -> Value:
        """How many values the index takes."""
        if var.count is not None:
            return self.size(var.count)
        lo, hi = self.expr(builder, var.lo, scope), self.expr(builder, var.hi, scope)
        step = var.step.constant
        first, last, size = (hi, lo, -step) if step is not None and step < 0 else (lo, hi, step)
        gap = builder.op("sub", last, first)
        if size != 1:
            width = self.size(var.step) if size is None else self.number(builder, size, i64)
            gap = builder.op("floordiv", builder.op("sub", builder.add(gap, width), self.number(builder, 1, i64)), width)
        return builder.op("max", gap, self.number(builder, 0, i64))

    def index(self, builder: Builder, var: LoopVar, position: Value, scope: Scope) -> Value:
        """The index at the position: `lo + position * step`."""
        value = position
        if var.step.constant != 1:
            value = builder.mul(value, self.size(var.step))
        if var.first is None or var.first.constant != 0:
            value = builder.add(self.expr(builder, var.lo, scope), value)
        return value

    # -- leaves -----------------------------------------------------------------------------------------------------

    def size(self, size: Size) -> Value:
        """A size, computed once at the top of the kernel."""
        if size not in self._sizes:
            self._sizes[size] = self.top.index(size)
        return self._sizes[size]

    def size_of_numbers(self, builder: Builder, size: Size) -> Value:
        """A size with numbers of the call in it, which are parameters of the kernel and may be negative."""
        total: Value | None = None
        for monomial, factor in size.terms:
            value = self.number(builder, factor, i64) if factor != 1 or not monomial else None
            for atom in monomial:
                part = self.atom(builder, atom)
                value = part if value is None else builder.mul(value, part)
            assert value is not None
            total = value if total is None else builder.add(total, value)
        return total if total is not None else self.number(builder, 0, i64)

    def atom(self, builder: Builder, atom: str | SizeCall) -> Value:
        if isinstance(atom, str):
            return builder.cast(self.param(parameter_of(atom)), i64) if is_number(atom) else self.size(Size.of(atom))
        a, b = (self.size_of_numbers(builder, side) for side in (atom.a, atom.b))
        if atom.op == "ceildiv":
            zero = self.number(builder, 0, i64)
            return builder.op("sub", zero, builder.op("floordiv", builder.op("sub", zero, a), b))
        return builder.op(atom.op, a, b)

    def number(self, builder: Builder, value: int | float | bool, dtype: DType) -> Value:
        found = builder.const(value, dtype)
        self._numbers[found] = value
        return found

    def param(self, name: str) -> Value:
        if name not in self._params:
            if name in self._scalars:
                scalar = self._scalars[name]
                self._params[name] = Value(scalar_type(scalar) if scalar.dtype.is_complex else Scalar(scalar.dtype), name)
            else:
                self._params[name] = Value(tensor_type(self._arrays[name]), name)
        return self._params[name]

    def load(self, builder: Builder, array: ArrayInfo, indices: Sequence[Value]) -> Number:
        stored = self._stored.get(array.name)
        if stored is not None and stored[0] == tuple(indices) and builder is self.body:
            if isinstance(stored[1], Pair):
                return stored[1]
            return builder.cast(stored[1], compute_dtype(array.dtype))
        self.read.add(array.name)
        if array.dtype.is_complex:
            return self.load_pair(builder, array.name, indices)
        value = builder.op("load", self.param(array.name), *indices, name="")
        return builder.cast(value, compute_dtype(array.dtype))

    def load_pair(self, builder: Builder, name: str, indices: Sequence[Value]) -> Pair:
        """The parts of a complex number."""
        re, im = (builder.op("load", self.param(name), *indices, self.number(builder, part, i64), name="") for part in (0, 1))
        return Pair(re, im)

    def store(self, builder: Builder, array: ArrayInfo, indices: Sequence[Value], value: Number) -> None:
        if array.dtype.is_complex:
            assert isinstance(value, Pair)
            value = self.pair_as(builder, value, array.dtype)
            for part, number in enumerate(spread([value])):
                builder.multi("store", self.param(array.name), *indices, self.number(builder, part, i64), number)
        else:
            assert isinstance(value, Value)
            value = builder.cast(value, array.dtype)
            builder.multi("store", self.param(array.name), *indices, value)
        self.written.add(array.name)
        if builder is self.body:
            self._stored[array.name] = (tuple(indices), value)
        else:
            self._stored.pop(array.name, None)

    def accumulate(self, builder: Builder, store: Store, indices: Sequence[Value], value: Number) -> None:
        """Combine into an element that other points may combine into as well."""
        name = store.array.name
        if store.array.dtype.is_complex:
            assert isinstance(value, Pair)
            if store.kind != "add":
                raise UserError.at("TW012", f"several iterations multiply elements of '{name}', which is {store.array.dtype}, in any order", store.span, "use a loop over range(…)")
            for part, number in enumerate(spread([self.pair_as(builder, value, store.array.dtype)])):
                builder.multi("accumulate", self.param(name), *indices, self.number(builder, part, i64), number, kind=store.kind)
            self.written.add(name)
            self._stored.pop(name, None)
            return
        assert isinstance(value, Value)
        builder.multi("accumulate", self.param(name), *indices, builder.cast(value, compute_dtype(store.array.dtype)), kind=store.kind)
        self.written.add(name)
        self._stored.pop(name, None)

    def variable(self, var: Variable, scope: Scope) -> Number:
        if var not in scope:
            # A top-level variable: computed at the start of the body, for all that follows.
            self.scope[var] = scope[var] = self.of(self.body, self._top_values[var], self.scope)
        return scope[var]

    # -- complex numbers --------------------------------------------------------------------------------------------

    def of(self, builder: Builder, expr: Expr, scope: Scope, indices: Sequence[Value] = ()) -> Number:
        """The value of an expression of any dtype, both parts of a complex one."""
        return self.whole(builder, self.pair(builder, expr, scope, indices)) if expr.dtype.is_complex else self.expr(builder, expr, scope, indices)

    def whole(self, builder: Builder, value: Pair) -> Pair:
        return ComplexMath(builder, value.dtype).whole(value)

    def pair_as(self, builder: Builder, value: Pair, dtype: DType) -> Pair:
        """The number in another complex dtype, both of its parts."""
        whole = self.whole(builder, value)
        assert whole.im is not None
        return Pair(builder.cast(whole.re, dtype.part), builder.cast(whole.im, dtype.part))

    def pair(self, builder: Builder, expr: Expr, scope: Scope, indices: Sequence[Value] = ()) -> Pair:
        """The value of an expression of a complex dtype; of an array value, its element at `indices`."""
        with builder.at(expr.span if expr.span.line else builder.span):
            return self._pair(builder, expr, scope, indices)

    def _pair(self, builder: Builder, expr: Expr, scope: Scope, indices: Sequence[Value]) -> Pair:
        part = expr.dtype.part
        if isinstance(expr, Const):
            number = complex(expr.value)
            return Pair(self.number(builder, number.real, part), self.number(builder, number.imag, part) if isinstance(expr.value, complex) else None)
        found: Number
        if isinstance(expr, Local):
            found = self.variable(expr.var, scope)
        elif isinstance(expr, ScalarRef):
            found = self.load_pair(builder, expr.scalar.name, ())
        elif isinstance(expr, Element):
            found = self.load(builder, expr.array, [self.expr(builder, i, scope) for i in expr.indices])
        elif isinstance(expr, Whole):
            found = self.load(builder, expr.array, self.aligned(builder, expr.array.shape, indices))
        elif isinstance(expr, Picked):
            return self.pair(builder, expr.value, scope, self.places(builder, expr, scope, self.aligned(builder, expr.shape, indices)))
        elif isinstance(expr, Cast):
            if not expr.value.dtype.is_complex:
                return Pair(builder.cast(self.expr(builder, expr.value, scope, indices), part), None)
            value = self.pair(builder, expr.value, scope, indices)
            return Pair(builder.cast(value.re, part), None if value.im is None else builder.cast(value.im, part))
        elif isinstance(expr, Choose):
            return self.choose_pair(builder, expr, scope)
        else:
            assert isinstance(expr, Apply)
            if expr.op == "complex":
                re, im = (self.expr(builder, a, scope, indices) for a in expr.args)
                return Pair(re, im)
            numbers = ComplexMath(builder, part)
            if expr.op == "select":
                return numbers.select(self.expr(builder, expr.args[0], scope, indices), *(self.pair(builder, a, scope, indices) for a in expr.args[1:]))
            return numbers.apply(expr.op, self.pairs(builder, expr.args, scope, indices))
        assert isinstance(found, Pair)
        return found

    def pairs(self, builder: Builder, args: Sequence[Expr], scope: Scope, indices: Sequence[Value]) -> list[Pair]:
        """Operands; one that comes twice is computed once."""
        known: dict[int, Pair] = {}
        for arg in args:
            if id(arg) not in known:
                known[id(arg)] = self.pair(builder, arg, scope, indices)
        return [known[id(arg)] for arg in args]

    def choose_pair(self, builder: Builder, expr: Choose, scope: Scope) -> Pair:
        cond = self.expr(builder, expr.cond, scope)
        if not any(isinstance(e, Element) for side in (expr.then, expr.otherwise) for e in walk_expr(side)):
            return ComplexMath(builder, expr.dtype.part).select(cond, self.pair(builder, expr.then, scope), self.pair(builder, expr.otherwise, scope))

        def side(of: Expr) -> Callable[[Builder], Sequence[Value]]:
            return lambda inner: spread([self.whole(inner, self.pair(inner, of, dict(scope)))])

        re, im = builder.if_(cond, side(expr.then), side(expr.otherwise))
        return Pair(re, im)

    # -- expressions ------------------------------------------------------------------------------------------------

    def expr(self, builder: Builder, expr: Expr, scope: Scope, indices: Sequence[Value] = ()) -> Value:
        """The value of an expression; of an array value, its element at `indices`."""
        with builder.at(expr.span if expr.span.line else builder.span):
            return self._expr(builder, expr, scope, indices)

    def _expr(self, builder: Builder, expr: Expr, scope: Scope, indices: Sequence[Value]) -> Value:
        if isinstance(expr, Const):
            return self.number(builder, expr.value, compute_dtype(expr.dtype))
        if isinstance(expr, SizeValue):
            return self.size_of_numbers(builder, expr.size) if has_numbers(expr.size) else self.size(expr.size)
        assert not expr.dtype.is_complex
        if isinstance(expr, IndexRef):
            return _value(scope[expr.var])
        if isinstance(expr, Local):
            return _value(self.variable(expr.var, scope))
        if isinstance(expr, ScalarRef):
            return builder.cast(self.param(expr.scalar.name), compute_dtype(expr.dtype))
        if isinstance(expr, Element):
            return _value(self.load(builder, expr.array, [self.expr(builder, i, scope) for i in expr.indices]))
        if isinstance(expr, Whole):
            return _value(self.load(builder, expr.array, self.aligned(builder, expr.array.shape, indices)))
        if isinstance(expr, AxisIndex):
            return self.aligned(builder, expr.shape, indices)[expr.axis]
        if isinstance(expr, Picked):
            return self.expr(builder, expr.value, scope, self.places(builder, expr, scope, self.aligned(builder, expr.shape, indices)))
        if isinstance(expr, Cast):
            return self.cast(builder, self.expr(builder, expr.value, scope, indices), expr.dtype, expr.rounds)
        if isinstance(expr, Choose):
            return self.choose(builder, expr, scope)
        assert isinstance(expr, Apply)
        if expr.args and expr.args[0].dtype.is_complex:
            return ComplexMath(builder, expr.args[0].dtype.part).real(expr.op, self.pairs(builder, expr.args, scope, indices))
        args = [self.expr(builder, a, scope, indices) for a in expr.args]
        if expr.op == "pow" and expr.dtype.is_int:
            from tilewright.passes.from_tree.integer_powers import integer_power

            return integer_power(builder, args[0], args[1], expr.dtype)
        if expr.op == "bitcast":
            # The bits are those of the dtype itself, not of the one it is computed in.
            return builder.cast(builder.bitcast(builder.cast(args[0], expr.args[0].dtype), expr.dtype), compute_dtype(expr.dtype))
        if expr.op == "nextafter" and expr.dtype.is_small_float:
            return builder.cast(builder.op(expr.op, *(builder.cast(a, expr.dtype) for a in args)), compute_dtype(expr.dtype))
        if expr.dtype.is_small_float and OPS[expr.op].group == "function":
            # Computed in f32, but only this many bits of the result will count.
            return builder.op(expr.op, *args, narrow=expr.dtype)
        return builder.op(expr.op, *args)

    def places(self, builder: Builder, expr: Picked, scope: Scope, indices: Sequence[Value]) -> list[Value]:
        """The indices of the element that a pick has there."""
        found: list[Value] = []
        for axis in expr.axes:
            if axis.index is not None:
                found.append(self.expr(builder, axis.index, scope, indices[axis.along : axis.along + len(axis.index.shape)]))
                continue
            place = indices[axis.along]
            if axis.step != 1:
                place = builder.mul(place, self.number(builder, axis.step, i64))
            found.append(place if axis.start is None else builder.add(self.expr(builder, axis.start, scope), place))
        return found

    def aligned(self, builder: Builder, shape: Sequence[Size], indices: Sequence[Value]) -> list[Value]:
        """The indices of an operand that repeats along missing leading axes and along extents of 1."""
        own = list(indices[len(indices) - len(shape) :])
        return [self.number(builder, 0, i64) if s.constant == 1 else i for s, i in zip(shape, own, strict=True)]

    @staticmethod
    def unrounded(value: Expr, array: ArrayInfo) -> Expr:
        """What is stored, without the conversion that the store makes itself: f64 becomes f16 in one rounding, not by way of f32."""
        while isinstance(value, Cast) and not value.rounds and value.dtype is array.dtype and array.dtype.is_small_float:
            value = value.value
        return value

    def cast(self, builder: Builder, value: Value, dtype: DType, rounds: bool) -> Value:
        if rounds and dtype.is_small_float:
            value = builder.cast(value, dtype)
        return builder.cast(value, compute_dtype(dtype))

    def choose(self, builder: Builder, expr: Choose, scope: Scope) -> Value:
        cond = self.expr(builder, expr.cond, scope)
        if not any(isinstance(e, Element) for side in (expr.then, expr.otherwise) for e in walk_expr(side)):
            return builder.select(cond, self.expr(builder, expr.then, scope), self.expr(builder, expr.otherwise, scope))
        return builder.if_(
            cond,
            lambda inner: [self.expr(inner, expr.then, dict(scope))],
            lambda inner: [self.expr(inner, expr.otherwise, dict(scope))],
        )[0]

    # -- statements -------------------------------------------------------------------------------------------------

    def statements(self, builder: Builder, stmts: Sequence[Stmt], scope: Scope) -> None:
        """Append the statements; `scope` then holds what variables have become."""
        for stmt in stmts:
            with builder.at(stmt.span):
                self.statement(builder, stmt, scope)

    def statement(self, builder: Builder, stmt: Stmt, scope: Scope) -> None:
        if isinstance(stmt, SetVar):
            scope[stmt.var] = self.of(builder, stmt.value, scope)
        elif isinstance(stmt, Accumulate):
            before = self.variable(stmt.var, scope)
            scope[stmt.var] = self.combine(builder, stmt.kind, before, self.of(builder, stmt.value, scope))
        elif isinstance(stmt, Store):
            indices = [self.expr(builder, i, scope) for i in stmt.indices]
            value = self.of(builder, stmt.value if stmt.kind else self.unrounded(stmt.value, stmt.array), scope)
            if stmt.scatter:
                self.accumulate(builder, stmt, indices, value)
                return
            if stmt.kind:
                value = self.combine(builder, stmt.kind, self.load(builder, stmt.array, indices), value)
            self.store(builder, stmt.array, indices, value)
        elif isinstance(stmt, TypedPrint):
            self.printed(builder, stmt, scope)
        elif isinstance(stmt, TypedAssert):
            builder.multi("assert", self.expr(builder, stmt.cond, scope), text=stmt.text)
        elif isinstance(stmt, TypedIf):
            self.branch(builder, stmt, scope)
        elif isinstance(stmt, TypedWhile):
            self.repeat(builder, stmt, scope)
        elif isinstance(stmt, TypedLoop) and stmt.kind == "reduce":
            self.reduction(builder, stmt, scope)
        elif isinstance(stmt, TypedLoop):
            self.serial(builder, stmt.vars, stmt, scope)
        else:
            assert isinstance(stmt, ArrayAssign | ReduceLoop | TypedYield | TypedBarrier)
            raise AssertionError(f"{type(stmt).__name__} inside a kernel")

    def printed(self, builder: Builder, stmt: TypedPrint, scope: Scope) -> None:
        from tilewright.ir.printing import FormatError, pieces

        values = [self.expr(builder, v, scope) for v in stmt.values]
        try:
            pieces(stmt.text, [dtype_of(v.type) for v in values])
        except FormatError as error:
            raise UserError.at("TW009", str(error), stmt.span) from None
        builder.multi("print", *values, text=stmt.text)

    def combine(self, builder: Builder, kind: str, before: Number, value: Number) -> Number:
        """`kind(before, value)`, or the value alone where nothing came before."""
        if isinstance(before, Pair) or isinstance(value, Pair):
            assert isinstance(before, Pair) and isinstance(value, Pair) and before.im is not None and value.im is not None
            if kind == "add":
                return Pair(_value(self.combine(builder, kind, before.re, value.re)), _value(self.combine(builder, kind, before.im, value.im)))
            if before.re in self._neutral or (self._numbers.get(before.re) == 1 and self._numbers.get(before.im) == 0):
                return value
            return before if value.re in self._neutral else ComplexMath(builder, before.dtype).apply(kind, [before, value])
        known = self._numbers.get(before)
        if before in self._neutral or (known is not None and known == identity(kind, dtype_of(value.type))):
            return value
        if value in self._neutral:
            return before
        return builder.op(kind, before, value)

    def branch(self, builder: Builder, stmt: TypedIf, scope: Scope) -> None:
        targets = list(assigned((stmt,)))
        for var in targets:
            self.variable(var, scope)
        cond = self.expr(builder, stmt.cond, scope)

        def side(stmts: tuple[Stmt, ...]) -> Block:
            def body(inner: Builder) -> Sequence[Value]:
                own = dict(scope)
                self.statements(inner, stmts, own)
                return spread([own[v] for v in targets])

            return builder.region([], [], body)

        regions = side(stmt.then), side(stmt.otherwise)
        results = tuple(Value(v.type, name) for v, name in zip(regions[0].yields, part_names(targets), strict=True))
        builder.append(Op("if", (cond,), results, regions=regions, span=builder.span))
        self.merge(scope, targets, results)

    def merge(self, scope: Scope, targets: Sequence[Variable], results: Sequence[Value]) -> None:
        scope.update(zip(targets, gathered(targets, results), strict=True))
        self._stored.clear()

    def repeat(self, builder: Builder, stmt: TypedWhile, scope: Scope) -> None:
        targets = list(assigned(stmt.body))
        start = spread([self.variable(v, scope) for v in targets])
        types, names = [v.type for v in start], part_names(targets)

        def test(inner: Builder, *carried: Value) -> Sequence[Value]:
            own = scope | dict(zip(targets, gathered(targets, carried), strict=True))
            return [self.expr(inner, stmt.cond, own), *carried]

        def body(inner: Builder, *carried: Value) -> Sequence[Value]:
            own = scope | dict(zip(targets, gathered(targets, carried), strict=True))
            self.statements(inner, stmt.body, own)
            return spread([own[v] for v in targets])

        self._stored.clear()
        regions = builder.region(types, names, test), builder.region(types, names, body)
        results = tuple(Value(t, n) for t, n in zip(types, names, strict=True))
        builder.append(Op("while", tuple(start), results, regions=regions, span=builder.span))
        self.merge(scope, targets, results)

    def serial(self, builder: Builder, variables: Sequence[LoopVar], loop: TypedLoop, scope: Scope) -> None:
        """Nested `for`s over the indices, carrying what the body assigns."""
        if loop.until is not None:
            self.serial_until(builder, variables[0], loop, loop.until, scope)
            return
        targets = list(assigned(loop.body))
        start = spread([self.variable(v, scope) for v in targets])
        var, rest = variables[0], variables[1:]
        unit = var.step.constant == 1
        if unit:
            lo, hi = self.expr(builder, var.lo, scope), self.expr(builder, var.hi, scope)
        else:
            lo, hi = self.number(builder, 0, i64), self.extent(builder, var, scope)
        types = [INDEX, *(v.type for v in start)]

        def body(inner: Builder, position: Value, *carried: Value) -> Sequence[Value]:
            own = scope | dict(zip(targets, gathered(targets, carried), strict=True))
            own[var] = position if unit else self.index(inner, var, position, own)
            if rest:
                self.serial(inner, rest, loop, own)
            else:
                self.statements(inner, loop.body, own)
            return spread([own[v] for v in targets])

        self._stored.clear()
        block = builder.region(types, [var.name, *part_names(targets)], body)
        results = tuple(Value(v.type, name) for v, name in zip(start, part_names(targets), strict=True))
        attrs = MappingProxyType({"independent": True} if loop.kind == "each" else {})
        operands = (lo, hi, self.number(builder, 1, i64), *start)
        builder.append(Op("for", operands, results, attrs, (block,), builder.span))
        self.merge(scope, targets, results)

    def serial_until(self, builder: Builder, var: LoopVar, loop: TypedLoop, stop: Variable, scope: Scope) -> None:
        """A `while` over the positions of the index, which ends when they do or when the flag is set."""
        targets = list(assigned(loop.body))
        start = spread([self.variable(v, scope) for v in targets])
        count = self.extent(builder, var, scope)
        types, names = [INDEX, *(v.type for v in start)], [var.name, *part_names(targets)]

        def test(inner: Builder, position: Value, *carried: Value) -> Sequence[Value]:
            own = scope | dict(zip(targets, gathered(targets, carried), strict=True))
            going = inner.op("not", _value(self.variable(stop, own)))
            return [inner.logical_and(inner.op("lt", position, count), going), position, *carried]

        def body(inner: Builder, position: Value, *carried: Value) -> Sequence[Value]:
            own = scope | dict(zip(targets, gathered(targets, carried), strict=True))
            own[var] = self.index(inner, var, position, own)
            self.statements(inner, loop.body, own)
            return [inner.add(position, self.number(inner, 1, i64)), *spread([own[v] for v in targets])]

        self._stored.clear()
        regions = builder.region(types, names, test), builder.region(types, names, body)
        results = tuple(Value(t, n) for t, n in zip(types, names, strict=True))
        operands = (self.number(builder, 0, i64), *start)
        builder.append(Op("while", operands, results, regions=regions, span=builder.span))
        self.merge(scope, targets, results[1:])

    # -- reductions -------------------------------------------------------------------------------------------------

    def reduction(self, builder: Builder, loop: TypedLoop, scope: Scope) -> None:
        """A loop that only accumulates: one `reduce` for each variable or array element it accumulates into."""
        body, places = _places_as_variables(loop.body)
        kinds = {s.var: s.kind for s in walk(body) if isinstance(s, Accumulate)}
        targets = assigned(body)
        # Side by side, so that one loop can compute all of them: none reads what another one is stored to.
        results = [self.reduced(builder, loop.vars, body, target, kinds[target], targets, scope) for target in targets]
        for target, result in zip(targets, results, strict=True):
            if target in places:
                store = places[target]
                indices = [self.expr(builder, i, scope) for i in store.indices]
                if store.scatter:
                    self.accumulate(builder, store, indices, result)
                    continue
                before = self.load(builder, store.array, indices)
                self.store(builder, store.array, indices, self.combine(builder, store.kind, before, result))
            else:
                scope[target] = self.combine(builder, kinds[target], self.variable(target, scope), result)

    def reduced(
        self, builder: Builder, variables: Sequence[LoopVar], body: tuple[Stmt, ...], target: Variable, kind: str,
        targets: Sequence[Variable], scope: Scope,
    ) -> Number:  # fmt: skip
        """`kind` over the loops of everything the body accumulates into `target`."""
        others = [t for t in targets if t is not target]
        body = without(body, lambda s: isinstance(s, Accumulate) and s.var in others)
        variables, body = _flattened(variables, body, target)
        dtype = compute_dtype(target.dtype)

        def point(inner: Builder, positions: Sequence[Value]) -> Number:
            own = dict(scope)
            for var, position in zip(variables, positions, strict=True):
                own[var] = self.index(inner, var, position, own)
            own[target] = start = self.neutral(inner, kind, dtype)
            self._neutral.update(spread([start]))
            self.statements(inner, body, own)
            return own[target]

        extents = [self.extent(builder, var, scope) for var in variables]
        return self.over(builder, kind, dtype, extents, point, [v.name for v in variables])

    def neutral(self, builder: Builder, kind: str, dtype: DType) -> Number:
        """A new value for "nothing accumulated yet"."""
        if dtype.is_complex:
            return Pair(self.number(builder, float(kind == "mul"), dtype.part), self.number(builder, 0.0, dtype.part))
        return self.number(builder, identity(kind, dtype), dtype)

    def over(
        self, builder: Builder, kind: str, dtype: DType, extents: Sequence[Value], point: Callable[[Builder, Sequence[Value]], Number], names: Sequence[str] = ()
    ) -> Number:  # fmt: skip
        """`kind` of what the points of a domain give. Sums of complex numbers are two sums, and four where they are
        products of matrices, each of which is found as such; products of all points are multiplied one after the other."""
        if not dtype.is_complex:
            return builder.reduce(kind, extents, lambda inner, *at: [_value(point(inner, at))], names)[0]
        if kind == "mul":
            return self.product(builder, extents, point, dtype)

        def sum_of(part: int) -> Value:
            minus: list[bool] = []

            def term(number: int) -> Value:
                def at_point(inner: Builder, *at: Value) -> Sequence[Value]:
                    value = spread([point(inner, at)])[part]
                    products = matrix_products(inner, value)
                    minus[:] = [taken for taken, _ in products]
                    return [products[number][1] if products else value]

                return builder.reduce(kind, extents, at_point, names)[0]

            first = term(0)
            return ComplexMath(builder, dtype.part).difference(first, term(1), *minus) if minus else first

        return Pair(sum_of(0), sum_of(1))

    def product(self, builder: Builder, extents: Sequence[Value], point: Callable[[Builder, Sequence[Value]], Number], dtype: DType) -> Pair:
        """The product of the points of a domain, in order."""
        types = [Scalar(dtype.part)] * 2

        def level(outer: Builder, before: Sequence[Value], found: Pair) -> Pair:
            def body(inner: Builder, position: Value, re: Value, im: Value) -> Sequence[Value]:
                at, so_far = (*before, position), Pair(re, im)
                if len(at) < len(extents):
                    return spread([level(inner, at, so_far)])
                value = point(inner, at)
                assert isinstance(value, Pair)
                return spread([ComplexMath(inner, dtype.part).multiply(so_far, value)])

            block = outer.region([INDEX, *types], ["at", "re", "im"], body)
            results = tuple(Value(t, "") for t in types)
            zero, one = self.number(outer, 0, i64), self.number(outer, 1, i64)
            outer.append(Op("for", (zero, extents[len(before)], one, *spread([found])), results, MappingProxyType({}), (block,), outer.span))
            return Pair(*results)

        self._stored.clear()
        start = self.neutral(builder, "mul", dtype)
        assert isinstance(start, Pair)
        return level(builder, (), start) if extents else start

    def reduce_loop(self, stmt: ReduceLoop) -> None:
        """A `@kernel reduce` nest: the domain is open over its outer indices."""
        with self.body.at(stmt.span):
            result: Number
            if stmt.kind in ("argmin", "argmax"):
                result = self.arg_loop(stmt)
            else:
                result = self.reduced(self.body, stmt.inner, stmt.body, stmt.var, stmt.kind, (stmt.var,), self.scope)
            self.store(self.body, stmt.array, self.indices, result)

    def arg_loop(self, stmt: ReduceLoop) -> Value:
        """argmin or argmax of what the body yields: the best pair of every point, then of all points."""
        largest = stmt.kind == "argmax"
        # Yields become assignments to a pair of variables, so that branches merge them like any others.
        (first,) = [s for s in walk(stmt.body) if isinstance(s, TypedYield)][:1]
        best = Variable("best", first.value.dtype, mutable=True)
        place = Variable("place", i64, mutable=True)
        position = Variable("position", i64)
        body = _yields_as_variables(stmt.body, best, place, position, largest)

        def region(inner: Builder, *positions: Value) -> Sequence[Value]:
            own = dict(self.scope)
            linear = positions[0]
            for var, at in zip(stmt.inner[1:], positions[1:], strict=True):
                linear = inner.add(inner.mul(linear, self.extent(inner, var, own)), at)
            own[position] = linear
            for var, at in zip(stmt.inner, positions, strict=True):
                own[var] = self.index(inner, var, at, own)
            dtype = compute_dtype(best.dtype)
            own[best] = self.number(inner, dtype.min_value if largest else dtype.max_value, dtype)
            own[place] = self.number(inner, i64.max_value, i64)
            self.statements(inner, body, own)
            return [_value(own[best]), _value(own[place])]

        extents = [self.extent(self.body, var, self.scope) for var in stmt.inner]
        return self.body.reduce(stmt.kind, extents, region, [v.name for v in stmt.inner])[1]

    def reduce_value(self, reduce: Reduce, outer: Sequence[Value]) -> Number:
        """A reduction of an array value over some of its axes, at the given indices of the others, or of all where the axes stay."""
        shape = reduce.value.shape
        kept = iter(outer if len(reduce.shape) < len(shape) else [i for axis, i in enumerate(outer) if axis not in reduce.axes])
        fixed = {axis: next(kept) for axis in range(len(shape)) if axis not in reduce.axes}
        pair = reduce.kind in ("argmin", "argmax")

        def point(inner: Builder, positions: Sequence[Value]) -> Number:
            moving = dict(zip(reduce.axes, positions, strict=True))
            indices = [fixed[axis] if axis in fixed else moving[axis] for axis in range(len(shape))]
            return self.of(inner, reduce.value, dict(self.scope), indices)

        def region(inner: Builder, *positions: Value) -> Sequence[Value]:
            value = _value(point(inner, positions))
            linear = positions[0]
            for axis, at in zip(reduce.axes[1:], positions[1:], strict=True):
                linear = inner.add(inner.mul(linear, self.size(shape[axis])), at)
            return [value, linear]

        extents = [self.size(shape[a]) for a in reduce.axes]
        return self.body.reduce(reduce.kind, extents, region)[-1] if pair else self.over(self.body, reduce.kind, reduce.value.dtype, extents, point)


def _value(number: Number) -> Value:
    """What a variable that is not complex holds."""
    assert isinstance(number, Value)
    return number


def identity(kind: str, dtype: DType) -> int | float | bool:
    """What changes nothing when combined."""
    if kind == "add":
        return 0
    if kind == "mul":
        return 1
    if kind in ("min", "max"):
        return dtype.max_value if kind == "min" else dtype.min_value
    if kind == "and":
        return True if dtype.is_bool else -1 if dtype.kind == "i" else dtype.max_value
    return False if dtype.is_bool else 0


def unchanging(kind: str, dtype: DType) -> int | float | bool:
    """The same, bit for bit: 0 would make a negative zero positive, and its negative leaves both as they are."""
    return -0.0 if kind == "add" and dtype.is_float else identity(kind, dtype)


def _places_as_variables(stmts: tuple[Stmt, ...]) -> tuple[tuple[Stmt, ...], dict[Variable, Store]]:
    """Accumulating stores as accumulations into variables, and which store each variable stands for."""
    places: dict[Variable, Store] = {}
    by_place: dict[tuple[str, tuple[Expr, ...]], Variable] = {}

    def change(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        result: list[Stmt] = []
        for stmt in body:
            if isinstance(stmt, Store):
                place = stmt.array.name, stmt.indices
                if place not in by_place:
                    by_place[place] = Variable(stmt.array.name, stmt.array.dtype, mutable=True)
                    places[by_place[place]] = stmt
                result.append(Accumulate(by_place[place], stmt.kind, stmt.value, span=stmt.span))
            elif isinstance(stmt, TypedIf):
                result.append(replace(stmt, then=change(stmt.then), otherwise=change(stmt.otherwise)))
            elif isinstance(stmt, TypedLoop):
                result.append(replace(stmt, body=change(stmt.body)))
            else:
                result.append(stmt)
        return tuple(result)

    return change(stmts), places


def _flattened(
    variables: Sequence[LoopVar], body: tuple[Stmt, ...], target: Variable
) -> tuple[tuple[LoopVar, ...], tuple[Stmt, ...]]:
    """Reduction loops inside one another as one domain, where the inner ranges are known outside."""
    variables = tuple(variables)
    while True:
        touching = [s for s in body if any(isinstance(i, Accumulate) and i.var is target for i in walk((s,)))]
        if len(touching) != 1 or not isinstance(touching[0], TypedLoop):
            return variables, body
        loop = touching[0]
        if loop.kind != "reduce" or any(v.count is None for v in (*variables, *loop.vars)) or assigned(loop.body) != (target,):
            return variables, body
        variables += loop.vars
        body = (*(s for s in body if s is not loop), *loop.body)


def _yields_as_variables(
    stmts: tuple[Stmt, ...], best: Variable, place: Variable, position: Variable, largest: bool
) -> tuple[Stmt, ...]:
    """`yield v, i` as: if v beats the best (or is the first NaN, or ties with a smaller index), keep v and i."""
    def test(op: str, a: Expr, b: Expr) -> Expr:
        return Apply(op, (a, b), bool_)

    result: list[Stmt] = []
    for stmt in stmts:
        if isinstance(stmt, TypedYield):
            value, index = Variable("value", best.dtype), Variable("index", i64)
            given = stmt.value if stmt.value.dtype is best.dtype else Cast(stmt.value, best.dtype, span=stmt.span)
            result.append(SetVar(value, given, True, span=stmt.span))
            result.append(SetVar(index, stmt.index if stmt.index is not None else Local(position), True, span=stmt.span))
            new, old = Local(value), Local(best)
            tie = test("and", test("eq", new, old), test("lt", Local(index), Local(place)))
            better = test("or", test("gt" if largest else "lt", new, old), tie)
            if best.dtype.is_float:
                fresh = test("and", Apply("isnan", (new,), bool_), Apply("not", (Apply("isnan", (old,), bool_),), bool_))
                better = test("or", better, fresh)
            won = Variable("won", bool_)
            result.append(SetVar(won, better, True, span=stmt.span))
            result.append(SetVar(place, Choose(Local(won), Local(index), Local(place), i64), span=stmt.span))
            result.append(SetVar(best, Choose(Local(won), new, old, best.dtype), span=stmt.span))
        elif isinstance(stmt, TypedIf):
            then, otherwise = (_yields_as_variables(s, best, place, position, largest) for s in (stmt.then, stmt.otherwise))
            result.append(replace(stmt, then=then, otherwise=otherwise))
        else:
            result.append(stmt)
    return tuple(result)


def _drop_stores(block: Block, keep: set[str]) -> Block:
    """The block without stores to tensors that are not named in `keep`."""
    ops: list[Op] = []
    for op in block.ops:
        if op.opcode in ("store", "accumulate") and op.operands[0].name not in keep:
            continue
        ops.append(replace(op, regions=tuple(_drop_stores(r, keep) for r in op.regions)) if op.regions else op)
    return Block(block.args, tuple(ops))
