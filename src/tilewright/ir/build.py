"""Building IR: a `Builder` appends ops to a list, inferring result types from the op table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

from tilewright.base.dtypes import DType, bool_, i64
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import Size
from tilewright.base.source import NOWHERE, Span
from tilewright.ir.nodes import Attr, Attrs, Block, Op, Value
from tilewright.ir.ops import TypeRuleError, result_types
from tilewright.ir.types import INDEX, Type, Vec, dtype_of


class _SpanOf:
    """What `Builder.at` gives to `with`: passes enter it for every op, so it is no generator."""

    __slots__ = ("before", "builder", "span")

    def __init__(self, builder: Builder, span: Span) -> None:
        self.builder, self.span = builder, span

    def __enter__(self) -> None:
        self.before, self.builder.span = self.builder.span, self.span

    def __exit__(self, *problem: object) -> None:
        self.builder.span = self.before


class Builder:
    """Collects ops in order. `builder.add(a, b)` is `builder.op("add", a, b)` spelled shorter for the common ops."""

    def __init__(self, span: Span = NOWHERE) -> None:
        self.ops: list[Op] = []
        self.span = span

    # -- any op -------------------------------------------------------------------------------------------------

    def op(self, opcode: str, *operands: Value, name: str = "", **attrs: Attr) -> Value:
        """Append an op with exactly one result."""
        return self.multi(opcode, *operands, name=name, **attrs)[0]

    def multi(self, opcode: str, *operands: Value, name: str = "", **attrs: Attr) -> tuple[Value, ...]:
        """Append an op with any number of results."""
        return self.emit(opcode, operands, attrs, name)

    def emit(self, opcode: str, operands: Sequence[Value], attrs: Attrs, name: str = "") -> tuple[Value, ...]:
        """Append an op whose attributes are already a mapping, as when an op is rebuilt on other operands."""
        try:
            types = result_types(opcode, [o.type for o in operands], attrs)
        except TypeRuleError as error:
            described = ", ".join(str(o.type) for o in operands)
            raise CompilerBug.at("TW042", f"{opcode}({described}) {dict(attrs)}: {error}", self.span) from error
        results = tuple(Value(t, name) for t in types)
        self.ops.append(Op(opcode, tuple(operands), results, MappingProxyType(dict(attrs)), (), self.span))
        return results

    def append(self, op: Op) -> tuple[Value, ...]:
        self.ops.append(op)
        return op.results

    def at(self, span: Span) -> _SpanOf:
        """Ops appended inside carry this span."""
        return _SpanOf(self, span)

    # -- structure ----------------------------------------------------------------------------------------------

    def region(self, arg_types: Sequence[Type], names: Sequence[str], body: RegionBody) -> Block:
        """Build a block: `body(builder, *args)` returns what to yield."""
        args = tuple(Value(t, n) for t, n in zip(arg_types, names, strict=True))
        inner = Builder(self.span)
        inner.multi("yield", *body(inner, *args))
        return Block(args, tuple(inner.ops))

    def for_(
        self, lo: Value, hi: Value, step: Value, init: Sequence[Value], body: RegionBody, name: str = "i", **attrs: Attr
    ) -> tuple[Value, ...]:
        """`body(builder, i, *carried)` returns the next carried values; gives the last ones."""
        block = self.region([lo.type, *(v.type for v in init)], [name, *(v.name for v in init)], body)
        results = tuple(Value(v.type, v.name) for v in init)
        return self.append(Op("for", (lo, hi, step, *init), results, MappingProxyType(attrs), (block,), self.span))

    def if_(self, cond: Value, then: RegionBody, otherwise: RegionBody) -> tuple[Value, ...]:
        """Both bodies take only a builder; results have the types of what `then` yields."""
        first, second = self.region([], [], then), self.region([], [], otherwise)
        results = tuple(Value(v.type, v.name) for v in first.yields)
        return self.append(Op("if", (cond,), results, MappingProxyType({}), (first, second), self.span))

    def parallel(self, extents: Sequence[Value], body: RegionBody, names: Sequence[str] = ()) -> None:
        labels = list(names) or [f"i{k}" for k in range(len(extents))]
        block = self.region([INDEX] * len(extents), labels, body)
        self.append(Op("parallel", tuple(extents), (), MappingProxyType({}), (block,), self.span))

    def reduce(self, kind: str, extents: Sequence[Value], body: RegionBody, names: Sequence[str] = ()) -> tuple[Value, ...]:
        """`body(builder, *indices)` returns the value (and the index for argmin/argmax) to combine."""
        labels = list(names) or [f"k{k}" for k in range(len(extents))]
        block = self.region([INDEX] * len(extents), labels, body)
        results = tuple(Value(v.type) for v in block.yields)
        return self.append(Op("reduce", tuple(extents), results, MappingProxyType({"kind": kind}), (block,), self.span))

    # -- leaves -------------------------------------------------------------------------------------------------

    def const(self, value: int | float | bool, dtype: DType) -> Value:
        typed: int | float | bool = float(value) if dtype.is_float else bool(value) if dtype.is_bool else int(value)
        return self.op("const", value=typed, dtype=dtype)

    def index(self, value: int | Size) -> Value:
        """An index: a constant or a symbolic size."""
        if isinstance(value, Size):
            constant = value.constant
            if constant is None:
                return self.op("size", name=value.name or "", value=value)
            value = constant
        # Indices are numbers modulo 2^64: products that a pass writes out wrap around as those of the kernel would.
        return self.const((value + (1 << 63)) % (1 << 64) - (1 << 63), i64)

    def splat(self, value: int | float | bool, like: Value) -> Value:
        """A constant in the container and dtype of `like`."""
        return self.like(self.const(value, dtype_of(like.type)), like)

    def like(self, scalar: Value, like: Value) -> Value:
        """A scalar repeated to the container of `like`."""
        from tilewright.ir.types import Tile

        if isinstance(like.type, Tile):
            return self.op("broadcast", scalar, shape=like.type.shape)
        if isinstance(like.type, Vec):
            return self.op("broadcast", scalar, width=like.type.width)
        return scalar

    # -- the common ops -----------------------------------------------------------------------------------------

    def add(self, a: Value, b: Value) -> Value:
        return self.op("add", a, b)

    def sub(self, a: Value, b: Value) -> Value:
        return self.op("sub", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        return self.op("mul", a, b)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.op("fma", a, b, c)

    def select(self, cond: Value, a: Value, b: Value) -> Value:
        return self.op("select", cond, a, b)

    def cast(self, value: Value, dtype: DType) -> Value:
        return value if dtype_of(value.type) is dtype else self.op("cast", value, dtype=dtype)

    def bitcast(self, value: Value, dtype: DType) -> Value:
        return value if dtype_of(value.type) is dtype else self.op("bitcast", value, dtype=dtype)

    def logical_and(self, a: Value, b: Value) -> Value:
        assert dtype_of(a.type) is bool_
        return self.op("and", a, b)


RegionBody = Callable[..., Sequence[Value]]
