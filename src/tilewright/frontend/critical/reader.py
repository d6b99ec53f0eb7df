"""Critical functions: a Python function with annotations in, a thread-stage kernel of one thread out.

The reader is that of explicit kernels, with Python's rules for whole numbers. An `int` has 64 bits: what does not fit is an `OverflowError`, a division by
zero a `ZeroDivisionError`, an index outside its array an `IndexError` (also a negative one that is computed); each is a `fault` in the code that ends the
function. Integers read from memory are such numbers too. Numbers made with `tw.i32(x)` and its like are typed: they wrap. Floats are IEEE: a
division by zero gives inf or nan. Functions that are called take the place of their calls.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MappingProxyType

from tilewright.base.dtypes import DType, bool_, f64, i64, u64
from tilewright.base.errors import CompilerBug, TilewrightError, UserError
from tilewright.base.sizes import Size, contiguous_strides
from tilewright.base.source import Span
from tilewright.frontend.critical.layout import StateLayout
from tilewright.frontend.critical.parameters import CriticalParameter, CriticalSignature
from tilewright.frontend.simt.build import LaunchShape, shape_of
from tilewright.frontend.simt.expressions import BINARY
from tilewright.frontend.simt.numbers import as_dtype
from tilewright.frontend.simt.source import FunctionSource, read_source
from tilewright.frontend.simt.state import Types
from tilewright.frontend.simt.statements import Statements
from tilewright.frontend.simt.values import (
    NOTHING,
    Arguments,
    DeviceFunction,
    Host,
    MemoryValue,
    NumberValue,
    Seq,
    StateValue,
    TextValue,
    Val,
    WordValue,
    describe,
    literal,
)
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Stage, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program, ProgramArray, ScalarInput
from tilewright.ir.types import Scalar, Tensor

RESULT_NAME = "$result"
_MOST_ROUNDS = 24
_REFUSED_GROUPS = {
    "warp": "warps", "copy": "asynchronous copies", "matrix": "matrix instructions", "barrier": "barriers of copies",
}  # fmt: skip
_REFUSED = {
    "print": "it writes to the process's output, which is a system call", "nanosleep": "it gives the core away", "global_timer": "write tw.clock()",
    "thread_id": "there is one thread", "program_id": "there is one thread", "grid_size": "there is one thread", "barrier": "there is one thread",
    "grid_barrier": "there is one thread",
}  # fmt: skip
_MOST_STACK = 1 << 16
"""Bytes of arrays of its own that a critical function may have."""


@dataclass(frozen=True)
class MemoryPiece:
    """A tensor of the kernel that is part of an argument: which, and how many bytes behind its address."""

    parameter: str
    tensor: str
    offset: int


@dataclass(frozen=True)
class BuiltCritical:
    """A critical function at the thread stage."""

    program: Program
    kernel: Kernel
    signature: CriticalSignature
    result: DType | None
    pieces: tuple[MemoryPiece, ...]
    written: frozenset[str]
    """Parameters it writes to."""
    stack_bytes: int
    """Bytes of its own arrays."""

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_MAKERS = {"empty": None, "zeros": 0, "ones": 1}
"""Words that make arrays, and what is in them."""


class CriticalReader(Statements):
    """Reads the statements of a critical function."""

    def __init__(self, source: FunctionSource, types: Types, wraps: bool) -> None:
        outside = replace(source, node=ast.copy_location(ast.Lambda(ast.arguments([], [], None, [], [], None, []), ast.Constant(None)), source.node))
        super().__init__(LaunchShape((1, 1, 1), 1, vendor="cpu"), f64, outside, types)
        self.wraps = wraps
        self._ready: dict[int, Val] = {}
        """Values of expressions that were read before the general reader asks for them."""

    def read(self, node: ast.expr) -> Val:
        found = self._ready.pop(id(node), None)
        return super().read(node) if found is None else found

    def read_once(self, node: ast.expr) -> Val:
        """The value of an expression, which the general reader will get again without reading it twice."""
        val = self.read(node)
        self._ready[id(node)] = val
        return val

    # -- places ---------------------------------------------------------------------------------------------------

    def span(self, node: ast.stmt | ast.expr | ast.arg | ast.keyword) -> Span:
        found = self.scope.source.span(node)
        return found if len(self.calls) < 2 else found.called_at(self.calls[-1][1])

    def head(self, node: ast.stmt) -> Span:
        found = self.scope.source.place.head(node)
        return found if len(self.calls) < 2 else found.called_at(self.calls[-1][1])

    def unsupported(self, node: ast.stmt | ast.expr | ast.arg, what: str, help: str) -> TilewrightError:
        return self.error("TW005", f"{what} is not available in a critical function", self.span(node), help)

    # -- faults ---------------------------------------------------------------------------------------------------

    def fault_if(self, bad: Value, text: str, first: Value | None = None, second: Value | None = None) -> None:
        """End the function where `bad` holds. The text has an exception's name first; {0} and {1} are the two numbers."""
        a, b = first or self.b.index(0), second or self.b.index(0)

        def failing(inner: Builder) -> Sequence[Value]:
            inner.multi("fault", a, b, text=text)
            return ()

        self.b.if_(bad, failing, lambda inner: ())

    def _is_python(self, number: NumberValue) -> bool:
        """Whether it is a whole number by Python's rules: of 64 bits, and checked."""
        return number.dtype.is_bool or (number.dtype is i64 and bool(number.weak))

    def python_number(self, number: NumberValue) -> NumberValue:
        """An integer from outside as Python's own; u64 and floats stay what they are."""
        if number.dtype.is_int and number.dtype is not u64 and number.const is None:
            return NumberValue(i64, "index", self.use(number, i64))
        return number

    # -- arithmetic -----------------------------------------------------------------------------------------------

    def binary(self, sign: str, a: NumberValue, b: NumberValue) -> NumberValue:
        if a.const is not None and b.const is not None and not self._folds(sign, a.const, b.const):
            # What cannot be computed is a fault when the function comes there, as in Python; it may never come there.
            a, b = self._at_run_time(a), self._at_run_time(b)
        if (a.const is not None and b.const is not None) or not (self._is_python(a) and self._is_python(b)):
            return super().binary(sign, a, b)
        if sign in ("/", "//", "%"):
            self._divisor(sign, a, b)
        if sign == "**":
            if b.const is None:
                raise self.fail("a power of whole numbers with an exponent that is computed", "write a loop of products, or a shift: 1 << n")
            return super().binary(sign, a, b)
        if sign in ("<<", ">>"):
            return self._shifted(sign, a, b)
        result = super().binary(sign, a, b)
        if not self.wraps and sign in ("+", "-", "*") and result.dtype is i64 and result.const is None:
            self._overflow(sign, self.use(a, i64), self.use(b, i64), self.use(result))
        return result

    @staticmethod
    def _folds(sign: str, a: float, b: float) -> bool:
        """Whether an operation of two known numbers has a result that is known."""
        if sign in ("/", "//", "%"):
            return bool(b)
        whole = isinstance(a, int) and isinstance(b, int)
        if not whole or sign not in ("+", "-", "*", "<<", ">>") or not all(_LEAST <= n <= _MOST for n in (a, b)):
            return True
        if sign in ("<<", ">>"):
            return 0 <= b < 64 and (sign == ">>" or _LEAST <= int(a) << int(b) <= _MOST)
        result = a + b if sign == "+" else a - b if sign == "-" else a * b
        return _LEAST <= result <= 2 * _MOST + 1

    def _at_run_time(self, number: NumberValue) -> NumberValue:
        assert number.const is not None
        if isinstance(number.const, float):
            return NumberValue(f64, "float", self.b.const(number.const, f64))
        return NumberValue(i64, "index", self.b.index(int(number.const)))

    def _divisor(self, sign: str, a: NumberValue, b: NumberValue) -> None:
        if b.const is None or not b.const:
            zero = self.b.op("eq", self.use(b, i64), self.b.index(0))
            self.fault_if(zero, f"ZeroDivisionError: {{0}} {sign} 0", self.use(a, i64))
        if sign == "//" and not self.wraps and (b.const is None or b.const == -1):
            least = self.b.op("eq", self.use(a, i64), self.b.index(-(1 << 63)))
            minus = self.b.op("eq", self.use(b, i64), self.b.index(-1))
            self.fault_if(self.b.op("and", least, minus), "OverflowError: {0} // {1} does not fit 64 bits", self.use(a, i64), self.use(b, i64))

    def _overflow(self, sign: str, a: Value, b: Value, result: Value) -> None:
        """A fault where the result of 64 bits is not the true one."""
        op = self.b.op
        if sign == "*":
            bad = op("ne", op("mul_high", a, b), op("shr", result, self.b.index(63)))
        elif sign == "+":
            bad = op("lt", op("and", op("xor", a, result), op("xor", b, result)), self.b.index(0))
        else:
            bad = op("lt", op("and", op("xor", a, b), op("xor", a, result)), self.b.index(0))
        self.fault_if(bad, f"OverflowError: {{0}} {sign} {{1}} does not fit 64 bits", a, b)

    def _shifted(self, sign: str, a: NumberValue, b: NumberValue) -> NumberValue:
        left, count = self.use(a, i64), self.use(b, i64)
        op = self.b.op
        if b.const is None or not 0 <= b.const < 64:
            outside = op("or", op("lt", count, self.b.index(0)), op("gt", count, self.b.index(63)))
            self.fault_if(outside, f"ValueError: {{0}} {sign} {{1}}: shifts are by 0 to 63", left, count)
        result = op("shl" if sign == "<<" else "shr", left, count)
        if sign == "<<" and not self.wraps:
            self.fault_if(op("ne", op("shr", result, count), left), "OverflowError: {0} << {1} does not fit 64 bits", left, count)
        return NumberValue(i64, "index", result)

    def negative(self, a: NumberValue) -> NumberValue:
        if a.const is None and a.dtype is i64 and a.weak and not self.wraps:
            value = self.use(a)
            self.fault_if(self.b.op("eq", value, self.b.index(-(1 << 63))), "OverflowError: -({0}) does not fit 64 bits", value)
        return super().negative(a)

    def convert(self, number: NumberValue, dtype: DType, what: str) -> NumberValue:
        if number.const is None and number.dtype is i64 and number.weak and dtype.is_int and dtype is not i64:
            value = self.use(number)
            low = self.b.op("lt", value, self.b.index(int(dtype.min_value)))
            bad = low if dtype is u64 else self.b.op("or", low, self.b.op("gt", value, self.b.index(int(dtype.max_value))))
            self.fault_if(bad, f"OverflowError: {{0}} does not fit {what}, which is {dtype}", value)
            return self.num(self.b.cast(value, dtype))
        return super().convert(number, dtype, what)

    # -- memory ---------------------------------------------------------------------------------------------------

    def positions(self, memory: MemoryValue, indices: Sequence[Val]) -> list[Value]:
        found = super().positions(memory, indices)
        for axis, (val, value) in enumerate(zip(indices, found, strict=True), len(memory.given)):
            if isinstance(val, NumberValue) and val.const is None:
                self._inside(memory, axis, value)
        return found

    def _inside(self, memory: MemoryValue, axis: int, index: Value) -> None:
        extent = self.b.index(memory.type.shape[axis])
        outside = self.b.op("or", self.b.op("lt", index, self.b.index(0)), self.b.op("ge", index, extent))
        which = f"axis {axis} of " if memory.type.rank > 1 else ""
        self.fault_if(outside, f"IndexError: index {{0}} is outside {which}'{memory.name}', which has extent {{1}}", index, extent)

    def load(self, memory: MemoryValue, indices: Sequence[Val], **attrs: object) -> NumberValue:
        return self.python_number(super().load(memory, indices, **attrs))  # type: ignore[arg-type]

    # -- states ---------------------------------------------------------------------------------------------------

    def _read(self, node: ast.expr) -> Val:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 2 and not node.keywords:
            called, name = self.read_once(node.func), self.read_once(node.args[1])
            if isinstance(called, Host) and called.object is getattr and isinstance(name, TextValue):
                del self._ready[id(node.func)], self._ready[id(node.args[1])]
                # `getattr(book, name)` with a name that is known when it is compiled is `book.name`.
                return self.read(ast.copy_location(ast.Attribute(node.args[0], name.text, ast.Load()), node))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = self.read_once(node.func.value)
            if isinstance(owner, StateValue) and node.func.attr not in owner.fields:
                del self._ready[id(node.func.value)]
                return self._method(owner, node, node.func.attr)
        if isinstance(node, ast.Call) and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in _MAKERS:
            called = self.read_once(node.func)
            if isinstance(called, WordValue) and called.name in _MAKERS:
                del self._ready[id(node.func)]
                return self._made_array(called.name, node)
        if isinstance(node, ast.Attribute | ast.Subscript):
            owner = self.read_once(node.value)
            if isinstance(owner, StateValue):
                del self._ready[id(node.value)]
                if isinstance(node, ast.Subscript):
                    return self._element(owner, self.indices(node.slice))
                field = self._field(owner, node.attr)
                return self.load(field, []) if isinstance(field, MemoryValue) and node.attr in owner.single else field
        elif isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred):
            called = self.read_once(node.func)
            if isinstance(called, WordValue) and called.name in ("int", "len", "abs"):
                found = self._builtin(called.name, self.read_once(node.args[0]))
                if found is not None:
                    del self._ready[id(node.func)], self._ready[id(node.args[0])]
                    return found
        elif isinstance(node, ast.Call) and not node.args and not node.keywords:
            called = self.read_once(node.func)
            if isinstance(called, WordValue) and called.name == "clock":
                now = super()._read(node)
                assert isinstance(now, NumberValue)
                return NumberValue(i64, "index", self.use(now, i64))  # ticks since the machine started: they fit
        return super()._read(node)

    def _made_array(self, word: str, node: ast.Call) -> MemoryValue:
        """`tw.zeros((4, 8), tw.f64)`: a temporary array, which lies on the stack."""
        given = {k.arg: self.read(k.value) for k in node.keywords if k.arg} | dict(zip(("shape", "dtype"), map(self.read, node.args), strict=False))
        if given.keys() - {"shape", "dtype"} or "shape" not in given or len(node.args) > 2:
            raise self.fail(f"tilewright.{word} takes a shape and a dtype", f"write tw.{word}((4, 8), tw.f64)", "TW016")
        shape = given["shape"]
        for item in shape.items if isinstance(shape, Seq) else (shape,):
            if not isinstance(item, NumberValue) or item.const is None:
                raise self.fail(
                    f"the size of tilewright.{word} is computed, and a critical function allocates nothing",
                    "give numbers that are known when it is compiled: such an array lies on the stack; or pass an array or a state", "TW005",
                )  # fmt: skip
        dtype = self.dtype(given["dtype"], "dtype") if "dtype" in given else f64
        extents = shape_of(self, shape, f"the shape of tilewright.{word}")
        memory = self.array("local", extents, dtype, "local")
        filled = _MAKERS[word]
        if filled is not None:
            self._fill(memory, extents, self.b.const(filled, dtype))
        return memory

    def _fill(self, memory: MemoryValue, extents: Sequence[int], value: Value) -> None:
        def inner(builder: Builder, places: tuple[Value, ...]) -> None:
            if len(places) == len(extents):
                builder.emit("store", (memory.value, *places, value), {})
                return

            def body(deeper: Builder, index: Value) -> Sequence[Value]:
                inner(deeper, (*places, index))
                return ()

            builder.for_(builder.index(0), builder.index(extents[len(places)]), builder.index(1), (), body)

        inner(self.b, ())

    def _method(self, owner: StateValue, node: ast.Call, name: str) -> Val:
        """A call of a method of a state's class: its body takes the place of the call."""
        function = getattr(owner.kind, "__critical__", {}).get(name) or getattr(owner.kind, name, None)
        function = getattr(function, "__simt_function__", function)
        if owner.axes or not isinstance(function, FunctionType):
            raise self.fail(f"{describe(owner)} has no method '{name}'", f"its fields are {', '.join(owner.fields)}", "TW002")
        items: list[Val] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                raise self.unsupported(argument, "'*' in a call of a method", "write every argument")
            items.append(self.read(argument))
        named = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.unsupported(keyword.value, "'**' in a call", "write every argument")
            named[keyword.arg] = self.read(keyword.value)
        source = self.types.sources.get(function)
        if source is None:
            source = self.types.sources[function] = read_source(function)
        return self.call_device(DeviceFunction(source, source.node, source.name), Arguments((owner, *items), named), self.span(node))

    def _builtin(self, name: str, val: Val) -> Val | None:
        """What Python's own functions do here more than in other kernels; None where it is nothing."""
        if name == "len" and isinstance(val, StateValue) and val.axes:
            field = _first_field(val)
            return self.size(field.type.shape[len(field.given)])
        if not isinstance(val, NumberValue) or val.const is not None:
            return None
        if name == "int" and val.dtype.is_float:
            value = self.use(val, f64)
            limit = self.b.const(float(1 << 63), f64)
            fits = self.b.op("and", self.b.op("ge", value, self.b.op("neg", limit)), self.b.op("lt", value, limit))
            self.fault_if(self.b.op("not", fits), "OverflowError: the float does not fit an int of 64 bits")
            return NumberValue(i64, "index", self.b.cast(value, i64))
        if name == "abs" and val.dtype is i64 and val.weak and not self.wraps:
            value = self.use(val)
            self.fault_if(self.b.op("eq", value, self.b.index(-(1 << 63))), "OverflowError: abs({0}) does not fit 64 bits", value)
        return None

    def _field(self, owner: StateValue, name: str) -> MemoryValue | StateValue:
        if owner.axes:
            raise self.fail(f"'{owner.name}' is {describe(owner)}: it takes {owner.axes} index(es) before '.{name}'", f"write {owner.name}[i].{name}", "TW003")
        found = owner.fields.get(name)
        if found is None:
            raise self.fail(f"{owner.kind.__name__} has no field '{name}'", f"its fields are {', '.join(owner.fields)}", "TW002")
        return found

    def _element(self, owner: StateValue, indices: list[Val]) -> StateValue:
        if not owner.axes:
            raise self.fail(f"'{owner.name}' is {describe(owner)} and takes no index", code="TW009")
        if len(indices) > owner.axes:
            raise self.fail(f"'{owner.name}' has {owner.axes} axes, but is used with {len(indices)} indices", code="TW003")
        return _indexed(owner, tuple(self.positions(replace(_first_field(owner), name=owner.name), indices)))

    def store_to(self, target: ast.expr, val: Val) -> None:
        if isinstance(target, ast.Attribute):
            owner = self.read_once(target.value)
            if isinstance(owner, StateValue):
                del self._ready[id(target.value)]
                with self.b.at(self.span(target)):
                    self.store(self._single(owner, target.attr), [], self.number(val, "the value"))
                return
        super().store_to(target, val)

    def _single(self, owner: StateValue, name: str) -> MemoryValue:
        field = self._field(owner, name)
        if not isinstance(field, MemoryValue) or name not in owner.single:
            raise self.fail(f"'{name}' of {owner.kind.__name__} is {describe(field)}, which cannot be assigned", "write its elements", "TW015")
        return field

    # -- statements -----------------------------------------------------------------------------------------------

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assert):
            with self.b.at(self.head(node)):
                holds = self.truth(self.test(node.test), "the condition of an assert")
                said = node.msg.value if isinstance(node.msg, ast.Constant) and isinstance(node.msg.value, str) else ast.unparse(node.test)
                if holds.const is None:
                    self.fault_if(self.b.op("not", self.use(holds)), f"AssertionError: {said.replace('{', '(').replace('}', ')')}")
                elif not holds.const:
                    self.fault_if(self.b.const(True, bool_), f"AssertionError: {said.replace('{', '(').replace('}', ')')}")
            return
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute) and type(node.op) in BINARY:
            with self.b.at(self.head(node)):
                owner = self.read(node.target.value)
                if isinstance(owner, StateValue):
                    field = self._single(owner, node.target.attr)
                    number = self.binary(BINARY[type(node.op)], self.load(field, []), self.read_number(node.value))
                    self.store(field, [], number)
                    return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
            with self.b.at(self.head(node)):
                if isinstance(self.read_once(node.value.func.value), StateValue):
                    self.read(node.value)
                    return
        super()._statement(node)

    def _parameter(self, function: str, parameter: ast.arg, val: Val) -> Val:
        if len(self.calls) < 2 or parameter.annotation is None:
            return val
        said = self.read(parameter.annotation) if not isinstance(parameter.annotation, ast.Subscript) else Host(None)
        what = f"'{parameter.arg}' of '{function}'"
        if isinstance(val, StateValue):
            wanted = said.object if isinstance(said, Host) else None
            if isinstance(wanted, type) and isinstance(getattr(wanted, "__layout__", None), StateLayout) and not issubclass(val.kind, wanted):
                raise self.fail(f"{what} is a {wanted.__name__}, but is given {describe(val)}", code="TW009")
            return val
        if not isinstance(val, NumberValue):
            return val
        return self._held_as(said, val, what)

    def _held_as(self, said: Val, val: NumberValue, what: str) -> NumberValue:
        """A number that an annotation names the type of."""
        word = said.name if isinstance(said, WordValue) else ""
        if word == "float" and not val.dtype.is_float:
            return self.convert(val, f64, what)
        if word == "int" and not (val.dtype.is_int or val.dtype.is_bool):
            raise self.fail(f"{what} is an int, but the value is {describe(val)}", "convert it: int(...)", "TW006")
        if word == "bool" and not val.dtype.is_bool:
            raise self.fail(f"{what} is a bool, but the value is {describe(val)}", "compare it: x != 0", "TW006")
        dtype = as_dtype(said)
        return val if dtype is None else self.python_number(self.convert(val, dtype, what))


def _first_field(state: StateValue) -> MemoryValue:
    field = next(iter(state.fields.values()))
    return field if isinstance(field, MemoryValue) else _first_field(field)


def _indexed(state: StateValue, positions: tuple[Value, ...]) -> StateValue:
    def one(field: MemoryValue | StateValue) -> MemoryValue | StateValue:
        if isinstance(field, MemoryValue):
            return replace(field, given=(*field.given, *positions))
        return replace(field, fields={name: one(inner) for name, inner in field.fields.items()})

    return replace(state, fields={name: one(field) for name, field in state.fields.items()}, axes=state.axes - len(positions))


# -- building ----------------------------------------------------------------------------------------------------------


def build_critical(source: FunctionSource, signature: CriticalSignature, wraps: bool = False) -> BuiltCritical:
    """The function at the thread stage: read again and again until the types of all variables are known. Raises `UserError`."""
    types = Types()
    for _ in range(_MOST_ROUNDS):
        types.changed = False
        known = len(types.pairs), len(types.flags)
        reader = CriticalReader(source, types, wraps)
        try:
            built = _read_function(reader, source, signature)
        except UserError:
            if not types.changed and known == (len(types.pairs), len(types.flags)):
                raise
            continue
        if not types.changed:
            return built
    raise CompilerBug.at("TW040", f"the types of the variables of '{source.name}' do not settle", source.head())


def _read_function(reader: CriticalReader, source: FunctionSource, signature: CriticalSignature) -> BuiltCritical:
    params: list[Value] = []
    pieces: list[MemoryPiece] = []
    vals: list[Val] = []
    for parameter in signature.parameters:
        with reader.b.at(parameter.span):
            vals.append(_declared(reader, parameter, params, pieces))
    assert isinstance(source.node, ast.FunctionDef)
    val = reader.call_device(DeviceFunction(source, source.node, source.name), Arguments(tuple(vals)), source.head())
    result, dtype = _result(reader, source, signature, val)
    if dtype is not None:
        assert result is not None
        place = Value(Tensor(dtype, (), (), "global", dtype.itemsize), RESULT_NAME)
        params.append(place)
        reader.b.multi("store", place, result)
    body = Block((), (*reader.prologue.ops, *reader.b.ops))
    stack = _refuse_ops(body, source)
    kernel = Kernel(source.name, Stage.THREAD, tuple(params), body, (Size.of(1),), 1, attrs=MappingProxyType({"noalias": False}), span=source.head())
    inputs = tuple(ProgramArray(p.name, p.type, "input") if isinstance(p.type, Tensor) else ScalarInput(p.name, p.type.dtype) for p in params)
    program = Program(source.name, inputs, (), (), (KernelCall(kernel, tuple(p.name for p in params)),), span=source.head())
    owners = {piece.tensor: piece.parameter for piece in pieces}
    written = frozenset(owners[op.operands[0].name] for op in walk(body) if OPS[op.opcode].effect == "write" and op.operands and op.operands[0].name in owners)
    return BuiltCritical(program, kernel, signature, dtype, tuple(pieces), written, stack)


def _declared(reader: CriticalReader, parameter: CriticalParameter, params: list[Value], pieces: list[MemoryPiece]) -> Val:
    name = parameter.name
    if parameter.is_number:
        assert parameter.dtype is not None
        params.append(Value(Scalar(parameter.dtype), name))
        return reader.python_number(NumberValue(parameter.dtype, "", params[-1]))

    def array(label: str, dtype: DType, shape: tuple[int, ...], strides: Sequence[int] | None, offset: int) -> MemoryValue:
        extents = tuple(map(Size.of, shape))
        steps = contiguous_strides(extents) if strides is None else tuple(map(Size.of, strides))
        params.append(Value(Tensor(dtype, extents, steps, "global", dtype.itemsize), label))
        pieces.append(MemoryPiece(name, label, offset))
        return MemoryValue(label, params[-1])

    def object_at(label: str, kind: type, layout: StateLayout, shape: tuple[int, ...], steps: tuple[int, ...], offset: int, axes: int) -> StateValue:
        """`shape` and `steps` (in bytes) are those of the arrays of objects around it."""
        fields: dict[str, MemoryValue | StateValue] = {}
        for field in layout.fields:
            inner: list[int] = []
            step = field.itemsize
            for extent in reversed(field.shape):
                inner.insert(0, step)
                step *= extent
            whole, bytes_ = (*shape, *field.shape), (*steps, *inner)
            where = f"{label}.{field.name}"
            if field.dtype is not None:
                size = field.dtype.itemsize
                fields[field.name] = array(where, field.dtype, whole, [b // size for b in bytes_], offset + field.offset)
            else:
                assert field.layout is not None and field.state is not None
                fields[field.name] = object_at(where, field.state, field.layout, whole, bytes_, offset + field.offset, len(field.shape))
        return StateValue(label, kind, fields, frozenset(f.name for f in layout.fields if f.dtype is not None and not f.shape), axes)

    if parameter.state is not None:
        return object_at(name, parameter.state, parameter.layout, (), (), 0, 0)
    assert parameter.dtype is not None
    return array(name, parameter.dtype, parameter.shape, None, 0)


def _result(reader: CriticalReader, source: FunctionSource, signature: CriticalSignature, val: Val) -> tuple[Value | None, DType | None]:
    head = source.head()
    if val == NOTHING:
        if signature.result is not None:
            raise UserError.at("TW017", f"'{source.name}' is annotated to return {signature.result}, but returns nothing", head)
        return None, None
    if not isinstance(val, NumberValue):
        raise UserError.at("TW009", f"'{source.name}' returns {describe(val)}", head, "a critical function returns one number or nothing: write the rest into a state or an array")
    if signature.result is None and not signature.open:
        raise UserError.at("TW009", f"'{source.name}' is annotated to return nothing, but returns {describe(val)}", head)
    with reader.b.at(head):
        dtype = signature.result or (bool_ if val.dtype.is_bool else f64 if val.weak == "float" else val.dtype)
        if dtype.is_bool and not val.dtype.is_bool:
            raise UserError.at("TW006", f"'{source.name}' returns {describe(val)}, which is no bool", head, "compare it: x != 0")
        held = reader.convert(val if not val.dtype.is_bool or dtype.is_bool else literal(int(val.const)) if val.const is not None else val, dtype, "the result")
        return reader.use(held, dtype), dtype


def _refuse_ops(body: Block, source: FunctionSource) -> int:
    """Refuse what critical functions cannot do; the bytes of their own arrays."""
    size = 0
    for op in walk(body):
        group = _REFUSED_GROUPS.get(OPS[op.opcode].group)
        why = _REFUSED.get(op.opcode) or (f"{group} are those of GPUs" if group else "")
        if op.opcode == "alloc" and op.attrs.get("space") == "shared":
            raise UserError.at("TW005", "a shared array is not available in a critical function: there is one thread", op.span, "make it tw.local(shape, dtype)")
        if why:
            raise UserError.at("TW005", f"'{op.opcode}' is not available in a critical function: {why}", op.span)
        if op.opcode == "alloc" and "values" not in op.attrs:
            memory = op.result.type
            assert isinstance(memory, Tensor)
            count = 1
            for extent in memory.shape:
                count *= extent.evaluate({})
            size += count * memory.dtype.itemsize
            if size > _MOST_STACK:
                raise UserError.at(
                    "TW020", f"the arrays of '{source.name}' take {size} bytes with this one; a critical function keeps up to {_MOST_STACK} on the stack", op.span,
                    "pass the array in a tw.State, or make it smaller",
                )  # fmt: skip
    return size
