"""Random loop-stage kernels for the fuzz tests: what Hypothesis draws, and the inputs that go with it.

A kernel is one nest: parallel indices, inputs read through random index forms (shifted, reversed, doubled, dropped, permuted,
gathered; contiguous, strided or broadcast in memory), a random graph of elementwise ops, perhaps an `if` or a serial loop,
perhaps a reduction. `exact` kernels must give the same bits at every stage and on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from hypothesis import strategies as st

from support import array, loop_kernel, program, strided
from tilewright.base.dtypes import (
    DType,
    accumulator,
    bf16,
    bool_,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
)
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.program import Program
from tilewright.ir.types import Scalar, dtype_of

ARITHMETIC = (i8, i16, i32, i64, u8, u16, u32, u64, f16, bf16, f32, f64)
STORED = (*ARITHMETIC, bool_, f8e4m3, f8e5m2)
EXTENTS = (1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 48, 64, 97)
FLOAT_BINARY = ("add", "sub", "mul", "min", "max", "div")
FLOAT_UNARY = ("neg", "abs", "floor", "ceil", "round", "trunc", "sqrt")
INT_BINARY = ("add", "sub", "mul", "min", "max", "and", "or", "xor", "shl", "shr", "floordiv", "mod")
INT_UNARY = ("neg", "abs", "not")
COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")
FUNCTIONS = (
    "exp", "exp2", "log", "log2", "sin", "cos", "tan", "tanh", "sinh", "cosh", "erf", "rsqrt", "sigmoid", "pow", "floordiv", "mod",
)  # fmt: skip


class Fuzzed:
    """A drawn kernel with its inputs. No dataclass: Hypothesis would print every node of it."""

    def __init__(self, program: Program, inputs: dict[str, np.ndarray | int | float | bool], ulp: float, terms: int) -> None:
        self.program, self.inputs = program, inputs
        self.ulp = ulp
        """How far apart results may be, in units of the last place; 0 asks for equal bits."""
        self.terms = terms
        """The longest float sum, whose terms may be added in any order."""

    def __repr__(self) -> str:
        return f"{self.program.name}(ulp={self.ulp}, terms={self.terms})"


class _Drawing:
    """Draws one kernel."""

    def __init__(self, draw: st.DrawFn, most: int) -> None:
        self.draw = draw
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        rank = draw(st.integers(1, 3))
        self.extents: list[int] = []
        self.budget = most
        for _ in range(rank):
            self.extents.append(self.extent())
        self.indices: list[tuple[Value, str, int]] = []
        """Index values in scope with the name and the value of their extents."""
        self.params: list[Value] = []
        self.inputs: dict[str, np.ndarray | int | float | bool] = {}
        self.facts: dict[str, int] = {}
        self.sizes: dict[str, int] = {f"n{k}": e for k, e in enumerate(self.extents)}

    def extent(self) -> int:
        value = self.draw(st.sampled_from([e for e in EXTENTS if e <= max(1, self.budget)]))
        self.budget //= value
        return value

    def pick(self, options: Sequence[object]) -> object:
        return self.draw(st.sampled_from(list(options)))

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 - percent

    # -- memory -------------------------------------------------------------------------------------------------

    def values(self, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
        if dtype.is_bool:
            return self.rng.integers(0, 2, shape).astype(np.bool_)
        if dtype.is_int:
            info = np.iinfo(dtype.numpy)
            low, high = (info.min, info.max) if self.rng.integers(2) else (max(info.min, -7), 7)
            return self.rng.integers(low, high, shape, dtype.numpy, endpoint=True)
        result = (self.rng.standard_normal(shape) * 2.0 ** float(self.rng.integers(-3, 4))).astype(dtype.numpy)
        if self.rng.integers(4) == 0 and result.size and dtype.bits >= 16:
            special = np.array([np.nan, np.inf, -np.inf, 1.0, 0.5]).astype(dtype.numpy)
            flat = result.reshape(-1)
            flat[self.rng.integers(0, flat.size, 2)] = special[self.rng.integers(0, len(special), 2)]
        return result

    def load(self, b: Builder) -> Value:
        """Read a fresh input through a random choice of the indices in scope."""
        dtype = self.pick(STORED)
        assert isinstance(dtype, DType)
        order = list(self.draw(st.permutations(range(len(self.indices))))) if self.chance(30) else list(range(len(self.indices)))
        kept = [p for p in order if not self.chance(25)]
        where: list[Value] = []
        shape: list[int] = []
        names: list[str | Size] = []
        for position in kept:
            index, name, extent = self.indices[position]
            form = self.pick(("plain",) * 6 + ("shift", "reverse", "double", "gather"))
            size = Size.of(name)
            if form == "shift":
                by = self.draw(st.integers(1, 5))
                index, extent, size = b.add(index, b.index(by)), extent + by, size + by
            elif form == "reverse":
                index = b.sub(b.index(size - 1), index)
            elif form == "double":
                index, extent, size = b.mul(index, b.index(2)), extent * 2, size * 2
            elif form == "gather":
                index, extent, size = self.gather(b, index, name, extent)
            where.append(index)
            shape.append(extent)
            names.append(size)
        label = f"x{len(self.params)}"
        values = self.values(tuple(shape), dtype)
        layout = self.pick(("contiguous",) * 4 + ("padded", "reversed", "broadcast")) if kept else "contiguous"
        if layout == "contiguous":
            memory = array(label, dtype, *names, align=16 if self.chance(50) else 0)
        else:
            values, strides = self.laid_out(values, str(layout), label)
            memory = strided(label, dtype, names, strides)
        self.params.append(memory)
        self.inputs[label] = np.asarray(values)
        return b.op("load", memory, *where)

    def gather(self, b: Builder, index: Value, name: str, extent: int) -> tuple[Value, int, Size]:
        label = f"g{len(self.params)}"
        dtype = self.pick((i32, i64, u8))
        assert isinstance(dtype, DType)
        length = self.draw(st.integers(1, 9))
        memory = array(label, dtype, name, align=16)
        self.params.append(memory)
        self.inputs[label] = self.rng.integers(0, length, extent).astype(dtype.numpy)
        return b.cast(b.op("load", memory, index), i64), length, Size.of(length)

    def laid_out(self, values: np.ndarray, layout: str, label: str) -> tuple[np.ndarray, list[str | int]]:
        """The same values in memory of another shape; strides are symbolic but for a constant 0."""
        rank = values.ndim
        names: list[str | int] = [f"{label}.s{a}" for a in range(rank)]
        if layout == "reversed":
            return values[::-1].copy()[::-1], names
        if layout == "broadcast":
            return np.broadcast_to(values[:1], values.shape), [0, *names[1:]]
        wide = np.zeros((*values.shape[:-1], values.shape[-1] * 2 + 3), values.dtype)
        wide[..., : values.shape[-1] * 2 : 2] = values
        return wide[..., : values.shape[-1] * 2 : 2], names

    # -- arithmetic ---------------------------------------------------------------------------------------------

    def binary(self, b: Builder, left: Value, right: Value) -> Value:
        dtype = dtype_of(left.type)
        name = str(self.pick(FLOAT_BINARY if dtype.is_float else INT_BINARY))
        if dtype.is_float and name in ("min", "max"):
            # Which zero min(-0, 0) gives is nobody's promise; without negative zeros it is no question.
            left, right = (b.add(v, b.const(0.0, dtype)) for v in (left, right))
        return b.op(name, left, right)

    def graph(self, b: Builder, values: list[Value], count: int) -> list[Value]:
        """Append `count` ops on the values; gives all of them."""
        for _ in range(count):
            dtype = self.pick(ARITHMETIC)
            assert isinstance(dtype, DType)
            # Most ops take what is there, in its own dtype.
            first = values[self.draw(st.integers(0, len(values) - 1))]
            own = dtype_of(first.type)
            if self.chance(65) and own in ARITHMETIC:
                dtype = own
            a = b.cast(first, dtype)
            other = b.cast(values[self.draw(st.integers(0, len(values) - 1))], dtype)
            shape = self.draw(st.integers(0, 9))
            if shape < 5:
                values.append(self.binary(b, a, other))
            elif shape < 7:
                values.append(b.op(str(self.pick(FLOAT_UNARY if dtype.is_float else INT_UNARY)), a))
            elif shape == 7:
                third = b.cast(values[self.draw(st.integers(0, len(values) - 1))], dtype)
                values.append(b.select(b.op(str(self.pick(COMPARE)), a, other), other, third))
            elif shape == 8:
                number = self.pick((0, 1, 2, 3, -1, 100) if dtype.is_signed else (0, 1, 2, 3, 100))
                assert isinstance(number, int)
                values.append(self.binary(b, a, b.const(number, dtype)))
            else:
                values.append(b.op(str(self.pick(COMPARE)), a, other))
        return values

    def choice(self, b: Builder, values: list[Value]) -> Value:
        """An `if` whose sides load and compute."""
        first = values[-1]
        cond = b.op("lt", b.cast(first, f32), b.const(0.5, f32))
        dtype = self.pick(ARITHMETIC)
        assert isinstance(dtype, DType)

        def side(inner: Builder) -> list[Value]:
            own = [*values, self.load(inner)] if self.chance(60) else list(values)
            return [inner.cast(self.graph(inner, own, 1)[-1], dtype)]

        return b.if_(cond, side, side)[0]

    def serial(self, b: Builder, values: list[Value]) -> Value:
        """A `for` that carries a value."""
        dtype = self.pick(ARITHMETIC)
        assert isinstance(dtype, DType)
        start = b.cast(values[-1], dtype)
        count = self.draw(st.integers(0, 4))
        low: Value = b.index(0)
        high: Value = b.index(count)
        if self.chance(30):
            # Bounds that differ from point to point.
            index, _, _ = self.indices[-1]
            high = b.op("min", high, index)

        def body(inner: Builder, k: Value, carried: Value) -> list[Value]:
            other = inner.cast(k, dtype) if self.chance(50) else inner.cast(values[0], dtype)
            return [inner.op(str(self.pick(("add", "mul", "max"))), carried, other)]

        return b.for_(low, high, b.index(1), [start], body)[0]


@st.composite
def kernels(draw: st.DrawFn, functions: bool = False, most: int = 1500) -> Fuzzed:
    """A kernel and inputs for it. Without `functions` every stage must agree bit for bit."""
    drawing = _Drawing(draw, most)
    outputs: list[Value] = []
    ulp, terms = 0.0, 1
    with_reduction = drawing.chance(50)

    def finish(b: Builder, value: Value) -> Value:
        nonlocal ulp
        if not functions:
            return value
        name = str(drawing.pick(FUNCTIONS))
        dtype = dtype_of(value.type) if dtype_of(value.type) in (f32, f64, f16, bf16) else f32
        argument = b.cast(value, dtype)
        operands = [argument]
        if name in ("pow", "floordiv", "mod"):
            operands.append(b.const(draw(st.sampled_from([0.5, 2.0, 3.0, -1.5, 7.0])), dtype))
        ulp = 8.0
        return b.op(name, *operands)

    def point(b: Builder) -> Value:
        values = [drawing.load(b) for _ in range(draw(st.integers(1, 3)))]
        if drawing.chance(20):
            index, _, _ = drawing.indices[draw(st.integers(0, len(drawing.indices) - 1))]
            values.append(index)
        if drawing.chance(20):
            dtype = drawing.pick((f32, i32, i64, f64, bool_))
            assert isinstance(dtype, DType)
            scalar = Value(Scalar(dtype), f"a{len(drawing.params)}")
            drawing.params.append(scalar)
            drawing.inputs[scalar.name] = True if dtype.is_bool else 3 if dtype.is_int else 1.25
            values.append(scalar)
        drawing.graph(b, values, draw(st.integers(0, 4)))
        if drawing.chance(20):
            values.append(drawing.choice(b, values))
        if drawing.chance(15):
            values.append(drawing.serial(b, values))
        return values[-1]

    def body(b: Builder, *indices: Value) -> None:
        drawing.indices = [(v, f"n{k}", drawing.extents[k]) for k, v in enumerate(indices)]
        if with_reduction:
            value = reduction(b)
        else:
            value = point(b)
            if dtype_of(value.type) in (f8e4m3, f8e5m2) and draw(st.booleans()):
                value = b.cast(value, f32)
        value = finish(b, value)
        shape = tuple(f"n{k}" for k in range(len(indices)))
        output = array("o", dtype_of(value.type), *shape, align=draw(st.sampled_from([0, 16])))
        outputs.append(output)
        b.multi("store", output, *indices, value)

    def reduction(b: Builder) -> Value:
        nonlocal ulp, terms
        count = draw(st.integers(1, 2))
        names = [f"r{k}" for k in range(count)]
        extents = [drawing.extent() for _ in names]
        if drawing.chance(4):
            extents[0] = 0
        drawing.sizes.update(zip(names, extents, strict=True))
        kind = str(drawing.pick(("add", "mul", "min", "max", "and", "or", "argmin", "argmax")))
        outer = list(drawing.indices)

        def term(inner: Builder, *k: Value) -> list[Value]:
            nonlocal ulp, terms
            drawing.indices = [*outer, *((v, n, e) for v, n, e in zip(k, names, extents, strict=True))]
            # An anchor binds the sizes of the reduction.
            kind_of_anchor = drawing.pick((f32, i32, f16))
            assert isinstance(kind_of_anchor, DType)
            anchor = array("anchor", kind_of_anchor, *names, align=16)
            drawing.params.append(anchor)
            drawing.inputs["anchor"] = drawing.values(tuple(extents), kind_of_anchor)
            anchored = inner.op("load", anchor, *k)
            value = point(inner)
            value = inner.op("max", inner.cast(anchored, f32), inner.cast(value, f32)) if drawing.chance(20) else value
            dtype = dtype_of(value.type)
            if kind in ("add", "mul"):
                wide = accumulator(dtype)
                if wide.is_float and not functions:
                    value, wide = inner.cast(inner.cast(value, i32), i64), i64
                value = inner.cast(value, wide)
                if wide.is_float:
                    ulp, terms = 16.0, max(1, int(np.prod(extents)))
                    if kind == "mul":
                        value = inner.op("min", inner.op("abs", value), inner.const(1.0, wide))
            elif kind in ("and", "or"):
                if dtype.is_float:
                    value = inner.cast(value, bool_)
            else:
                value = inner.cast(value, f32) if dtype in (f8e4m3, f8e5m2) else value
                if dtype_of(value.type).is_float:
                    value = inner.add(value, inner.const(0.0, dtype_of(value.type)))
            if kind.startswith("arg"):
                return [value, k[-1] if count == 1 else inner.add(inner.mul(k[0], inner.index(Size.of(names[1]))), k[1])]
            return [value]

        found = b.reduce(kind, [b.index(Size.of(n)) for n in names], term, names)
        drawing.indices = outer
        value = found[-1]
        if drawing.chance(30) and not ulp:
            value = drawing.graph(b, [value], 1)[-1]
        return value

    kernel = loop_kernel("fuzzed", [], [f"n{k}" for k in range(len(drawing.extents))], body)
    # Every parallel size is bound by the output at the latest; inputs bind it where one has it plainly.
    binder = array("shape", i8, *(f"n{k}" for k in range(len(drawing.extents))))
    drawing.inputs["shape"] = np.zeros(drawing.extents, np.int8)
    facts = {n: d for n, e in drawing.sizes.items() for d in (2, 4, 16) if e % d == 0 and draw(st.booleans())}
    kernel = replace(kernel, params=(binder, *drawing.params, *outputs), facts=MappingProxyType(facts))
    return Fuzzed(program(kernel), drawing.inputs, ulp, terms)
