"""Expressions of explicit kernels: Python's tree in, numbers, arrays and words out.

Names are looked up in the function's own variables, those of the functions around it, its closure, its globals and the builtins;
what is found outside becomes part of the code: numbers are constants, NumPy arrays constant memory, functions are read where they are
called. `and`, `or` and `a if c else b` leave out what they do not need wherever that could be seen.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, from_numpy
from tilewright.base.errors import TilewrightError
from tilewright.base.source import Span
from tilewright.frontend.simt import (
    simd,
    words_matrix,  # noqa: F401 - these fill the table of words
    words_memory,  # noqa: F401
    words_random,  # noqa: F401
    words_warp,  # noqa: F401
)
from tilewright.frontend.simt.build import Emitter, LaunchShape
from tilewright.frontend.simt.numbers import as_dtype
from tilewright.frontend.simt.printing import read_template
from tilewright.frontend.simt.source import FunctionSource, alternative, read_source
from tilewright.frontend.simt.state import Types
from tilewright.frontend.simt.tree import local_names
from tilewright.frontend.simt.values import (
    Arguments,
    DeviceFunction,
    Host,
    MemoryValue,
    Method,
    NumberValue,
    RecordValue,
    Seq,
    Simd,
    SimtScope,
    StateValue,
    TextValue,
    Val,
    WordValue,
    describe,
    literal,
)
from tilewright.frontend.simt.words import CALLS, CONSTANTS, NAMESPACES, VALUES, word_of
from tilewright.tree.unknown_functions import help_for

BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_HELP: dict[type[ast.expr], tuple[str, str]] = {
    ast.ListComp: ("a comprehension", "fill a local array in a loop: tw.local(n, tw.f32)"),
    ast.SetComp: ("a comprehension", "fill a local array in a loop: tw.local(n, tw.f32)"),
    ast.DictComp: ("a comprehension", "use plain variables"),
    ast.GeneratorExp: ("a generator expression", "accumulate in a loop: total += value"),
    ast.Dict: ("a dict", "use plain variables or a dataclass"),
    ast.Set: ("a set", "use plain variables"),
    ast.Starred: ("'*' in an expression", "write every item"),
    ast.Yield: ("yield", "write the value into an array"),
    ast.YieldFrom: ("yield from", "write the values into an array"),
    ast.Await: ("await", "wait for the launch outside the kernel"),
}
_CONSTANT_BYTES = 64 << 10
"""Constant memory of a module on NVIDIA's GPUs."""


class ExpressionBuilder(Emitter, ABC):
    """Reads expressions of the function whose scope is `scope`."""

    def __init__(self, launch: LaunchShape, default_float: DType, source: FunctionSource, types: Types) -> None:
        super().__init__(launch, default_float, source.head())
        self.types = types
        self.scope = SimtScope((), source)
        self.calls: list[tuple[object, Span]] = []
        """Device functions that are being read, and where they were called."""
        self._captured: dict[int, MemoryValue] = {}

    # -- places ---------------------------------------------------------------------------------------------------

    def span(self, node: ast.stmt | ast.expr | ast.arg | ast.keyword) -> Span:
        found = self.scope.source.span(node)
        return found if not self.calls else found.called_at(self.calls[-1][1])

    def head(self, node: ast.stmt) -> Span:
        """Of a statement that may be long: its first line only."""
        found = self.scope.source.place.head(node)
        return found if not self.calls else found.called_at(self.calls[-1][1])

    def unsupported(self, node: ast.stmt | ast.expr | ast.arg, what: str, help: str) -> TilewrightError:
        """The error for what a kernel cannot contain; the caller raises it."""
        return self.error("TW005", f"{what} is not available in an explicit kernel", self.span(node), help)

    # -- names ----------------------------------------------------------------------------------------------------

    def name(self, node: ast.Name) -> Val:
        scope: SimtScope | None = self.scope
        while scope is not None:
            if node.id in scope.variables:
                if node.id in scope.missing:
                    raise self.fail(
                        f"'{node.id}' may have no value here", f"assign '{node.id}' on every way that leads here", "TW017"
                    )
                return scope.variables[node.id]
            if node.id in local_names(scope.node or scope.source.node):
                raise self.fail(f"'{node.id}' has no value yet", "assign it before it is used", "TW017")
            scope = scope.outer
        known, value = self.scope.source.find(node.id)
        if not known:
            raise self.fail(f"unknown name '{node.id}'", code="TW002")
        return self.captured(value, node.id)

    def captured(self, value: object, name: str) -> Val:
        """What a Python object from outside means in the kernel."""
        if isinstance(value, bool | int | float):
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
                raise self.fail(f"'{name}' is {value}, which no 64-bit integer holds", code="TW006")
            return literal(value if isinstance(value, bool | float) else int(value), self.default_float)
        if isinstance(value, str):
            return TextValue(value)
        if isinstance(value, np.generic):
            dtype = from_numpy(value.dtype)
            if dtype is None:
                raise self.fail(f"'{name}' has dtype {value.dtype}, which kernels do not know", code="TW009")
            return NumberValue(dtype, "", None, value.item())
        if isinstance(value, np.ndarray):
            return self._constant_array(value, name)
        if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
            return Seq(tuple(self.captured(item, f"{name}[{i}]") for i, item in enumerate(value)))
        if isinstance(value, DType | ModuleType):
            return Host(value)
        found = word_of(value)
        if found is not None:
            return WordValue(found)
        if record_fields(type(value)):
            names = tuple(record_fields(type(value)))
            return RecordValue(type(value), names, tuple(self.captured(getattr(value, n), f"{name}.{n}") for n in names))
        function = getattr(value, "__simt_function__", value)
        if isinstance(function, FunctionType):
            source = self.types.sources.get(function)
            if source is None:
                # A function of a file that is only read has its source with it.
                source = getattr(function, "__simt_source__", None) or read_source(alternative(function, self.launch.vendor))
                self.types.sources[function] = source
            return DeviceFunction(source, source.node, source.name)
        return Host(value)

    def _constant_array(self, value: np.ndarray, name: str) -> MemoryValue:
        """A captured array becomes constant memory, with the values it has now."""
        found = self._captured.get(id(value))
        if found is not None:
            return found
        dtype = from_numpy(value.dtype)
        if dtype is None or not value.ndim or not value.size:
            shown = f"of {value.dtype}" if dtype is None else f"of shape {list(value.shape)}"
            raise self.fail(f"'{name}' is an array {shown}, which cannot be constant memory", "pass it as an argument", "TW009")
        if value.nbytes > _CONSTANT_BYTES:
            raise self.fail(
                f"'{name}' has {value.nbytes} bytes; a kernel's constant memory has {_CONSTANT_BYTES}",
                "pass it as an argument",
                "TW020",
            )
        wide = value if dtype.kind in "biu" else value.astype(np.float64)
        made = self.array(name, value.shape, dtype, "constant", values=tuple(wide.reshape(-1).tolist()))
        self._captured[id(value)] = made
        return made

    # -- expressions ----------------------------------------------------------------------------------------------

    def read(self, node: ast.expr) -> Val:
        with self.b.at(self.span(node)):
            return self._read(node)

    def read_number(self, node: ast.expr, what: str = "") -> NumberValue:
        val = self.read(node)
        with self.b.at(self.span(node)):
            return self.number(val, what)

    def _read(self, node: ast.expr) -> Val:
        handler = _READERS.get(type(node))
        if handler is not None:
            return handler(self, node)
        what, help_ = _HELP.get(type(node), (f"'{type(node).__name__}'", "use plain arithmetic"))
        raise self.unsupported(node, what, help_)

    def _constant(self, node: ast.Constant) -> Val:
        if isinstance(node.value, bool | int | float):
            if isinstance(node.value, int) and not -(1 << 63) <= node.value < 1 << 64:
                raise self.fail(f"no 64-bit integer holds {node.value}", code="TW006")
            return literal(node.value, self.default_float)
        if isinstance(node.value, str):
            return TextValue(node.value)
        if node.value is None:
            return Seq(())
        raise self.unsupported(node, f"the value {node.value!r}", "use numbers")

    def _template(self, node: ast.JoinedStr) -> Val:
        return read_template(self, node, self.read)

    def _tuple(self, node: ast.Tuple | ast.List) -> Val:
        return Seq(tuple(self.read(item) for item in node.elts))

    def _binary(self, node: ast.BinOp) -> Val:
        sign = BINARY.get(type(node.op))
        if sign is None:
            raise self.unsupported(node, "'@'", "write the loop over the products")
        left, right = self.read(node.left), self.read(node.right)
        if sign == "+" and isinstance(left, Seq) and isinstance(right, Seq):
            return Seq((*left.items, *right.items))
        if isinstance(left, Simd) or isinstance(right, Simd):
            return simd.binary(self, sign, left, right)
        what = f"an operand of '{sign}'"
        return self.binary(sign, self.number(left, what), self.number(right, what))

    def _unary(self, node: ast.UnaryOp) -> Val:
        operand = self.test(node.operand) if isinstance(node.op, ast.Not) else self.read(node.operand)
        if isinstance(operand, Simd):
            return simd.unary(self, type(node.op), operand)
        with self.b.at(self.span(node.operand)):
            number = self.number(operand)
        if isinstance(node.op, ast.Not):
            return self.negation(number)
        if isinstance(node.op, ast.Invert):
            return self.invert(number)
        return self.negative(number) if isinstance(node.op, ast.USub) else number

    def test(self, node: ast.expr) -> Val:
        """A condition: of what stands under `and`, `or` and `not` only the truth counts."""
        return self._bool(node, tested=True) if isinstance(node, ast.BoolOp) else self.read(node)

    def _bool(self, node: ast.BoolOp, tested: bool = False) -> Val:
        also = isinstance(node.op, ast.And)
        last = len(node.values) - 1

        def part(position: int) -> NumberValue:
            if tested or (also and position < last):
                return self.truth(self.test(node.values[position]))
            val = self.read(node.values[position])
            if isinstance(val, NumberValue) and not val.dtype.is_bool:
                with self.b.at(self.span(node)):
                    raise self.fail(
                        f"'a {'and' if also else 'or'} b' of numbers is one of them in Python; in a kernel it is true or false",
                        f"write {'b if a != 0 else a' if also else 'a if a != 0 else b'}, or compare the operands", "TW009",
                    )  # fmt: skip
            return self.truth(val)

        def from_(position: int) -> NumberValue:
            if position == last:
                return part(position)
            return self.both(lambda: part(position), lambda: from_(position + 1), also)

        return from_(0)

    def _comparison(self, node: ast.Compare) -> Val:
        if (lanes := simd.comparison(self, node, self.scope.variables, self.read)) is not None:
            return lanes
        first = self.read(node.left)
        if (
            isinstance(first, Host)
            and (dtype := as_dtype(first)) is not None
            and len(node.ops) == 1
            and isinstance(node.ops[0], ast.Eq | ast.NotEq)
        ):
            return literal((as_dtype(self.read(node.comparators[0])) is dtype) == isinstance(node.ops[0], ast.Eq))
        with self.b.at(self.span(node.left)):
            left = self.number(first, "an operand of a comparison")
        result: NumberValue | None = None
        for kind, right_node in zip(node.ops, node.comparators, strict=True):
            sign = _COMPARE.get(type(kind))
            if sign is None:
                words = {ast.In: "'in'", ast.NotIn: "'not in'", ast.Is: "'is'", ast.IsNot: "'is not'"}
                raise self.unsupported(node, words[type(kind)], "compare numbers with ==, <, …")
            right = self.read_number(right_node, "an operand of a comparison")
            this = self.binary(sign, left, right)
            result = this if result is None else self._and(result, this)
            left = right
        assert result is not None
        return result

    def _and(self, a: NumberValue, b: NumberValue) -> NumberValue:
        return self.both(lambda: a, lambda: b, True)

    def _choice(self, node: ast.IfExp) -> Val:
        condition = self.truth(self.test(node.test))
        if condition.const is not None:
            return self.read(node.body if condition.const else node.orelse)
        return self.choose(condition, lambda: self.read_number(node.body), lambda: self.read_number(node.orelse))

    def _attribute(self, node: ast.Attribute) -> Val:
        owner = self.read(node.value)
        if isinstance(owner, WordValue):
            name = f"{owner.name}.{node.attr}"
            if name in VALUES:
                return VALUES[name](self)
            if name in NAMESPACES or name in CALLS:
                return WordValue(name)
            if owner.name in NAMESPACES:
                known = sorted(
                    k.rsplit(".", 1)[1] for k in (*VALUES, *CALLS, *NAMESPACES) if k.rsplit(".", 1)[0] == owner.name and "." in k
                )
                raise self.fail(f"tilewright.{owner.name} has no '{node.attr}'", f"it has {', '.join(known)}", "TW002")
            raise self.fail(f"tilewright.{owner.name} has no '{node.attr}'", code="TW002")
        if isinstance(owner, MemoryValue):
            return self._array_attribute(owner, node.attr)
        if isinstance(owner, RecordValue):
            found = owner.get(node.attr)
            if found is None:
                raise self.fail(
                    f"{describe(owner)} has no field '{node.attr}'", f"its fields are {', '.join(owner.names)}", "TW002"
                )
            return found
        if isinstance(owner, Simd):
            return simd.member(self, owner, node.attr)
        if isinstance(owner, Host):
            return self._member(owner.object, node.attr)
        raise self.fail(f"{describe(owner)} has no '{node.attr}'", code="TW002")

    def _array_attribute(self, memory: MemoryValue, name: str) -> Val:
        extents = memory.type.shape[len(memory.given) :]
        if name == "shape":
            return Seq(tuple(self.size(extent) for extent in extents))
        if name == "size":
            total = literal(1)
            for extent in extents:
                total = self.binary("*", total, self.size(extent))
            return total
        if name == "dtype":
            return Host(memory.type.dtype)
        if name == "ndim":
            return literal(len(extents))
        raise self.fail(f"'{memory.name}' has no '{name}'", "an array in a kernel has shape, size, ndim and dtype", "TW002")

    def _member(self, owner: object, name: str) -> Val:
        if isinstance(owner, DType):
            raise self.fail(f"the dtype {owner} has no '{name}' in a kernel", code="TW002")
        if isinstance(owner, ModuleType) and owner.__name__ in ("math", "numpy") and name in CONSTANTS:
            return literal(CONSTANTS[name], self.default_float)
        try:
            value = getattr(owner, name)
        except AttributeError:
            shown = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__name__
            help = help_for(name, [n for n in dir(owner) if n[:1].islower()], python=True) if isinstance(owner, ModuleType) else ""
            raise self.fail(f"{shown} has no '{name}'", help, "TW002") from None
        return self.captured(value, name)

    def _subscript(self, node: ast.Subscript) -> Val:
        owner = self.read(node.value)
        if isinstance(owner, MemoryValue):
            indices = self.indices(node.slice)
            if len(owner.given) + len(indices) < owner.type.rank:
                return dataclasses.replace(owner, given=(*owner.given, *self.positions(owner, indices)))
            return self.load(owner, indices)
        if isinstance(owner, Seq | RecordValue):
            return self._item(owner, node.slice)
        if isinstance(owner, Simd):
            return simd.lane(self, owner, self.constant(self.read(node.slice), "the number of a lane"))
        raise self.fail(f"{describe(owner)} takes no index", code="TW009")

    def _item(self, owner: Seq | RecordValue, index: ast.expr) -> Val:
        if isinstance(index, ast.Slice):
            bounds = [
                None if b is None else self.constant(self.read(b), "the bound of a slice")
                for b in (index.lower, index.upper, index.step)
            ]
            return Seq(owner.items[slice(*bounds)])
        at = self.constant(self.read(index), "the index into a tuple")
        if not -len(owner.items) <= at < len(owner.items):
            raise self.fail(f"index {at} is outside: the tuple has {len(owner.items)} item(s)", code="TW013")
        return owner.items[at]

    def indices(self, node: ast.expr) -> list[Val]:
        """What stands in the brackets behind an array."""
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        for part in parts:
            if isinstance(part, ast.Slice):
                raise self.unsupported(part, "a slice of an array", "index single elements in a loop")
        found: list[Val] = []
        for part in parts:
            val = self.read(part)
            found += val.items if isinstance(val, Seq) else [val]
        return found

    def _walrus(self, node: ast.NamedExpr) -> Val:
        val = self.read(node.value)
        assert isinstance(node.target, ast.Name)
        return self.assign(node.target.id, val)

    def _function(self, node: ast.Lambda) -> Val:
        return DeviceFunction(self.scope.source, node, "<lambda>", self.scope)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> Val:
        called = self.read(node.func)
        items: list[Val] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                val = self.read(argument.value)
                if not isinstance(val, Seq | RecordValue):
                    raise self.unsupported(argument, f"'*' before {describe(val)}", "write every argument")
                items += val.items
            else:
                items.append(self.read(argument))
        named: dict[str, Val] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.unsupported(keyword.value, "'**' in a call", "write every argument")
            named[keyword.arg] = self.read(keyword.value)
        given = Arguments(tuple(items), named)
        if isinstance(called, Method):
            return simd.call_method(self, called, given)
        if isinstance(called, WordValue):
            if any(isinstance(item, Simd) for item in (*items, *named.values())) and called.name not in simd.OWN:
                return simd.call(self, called.name, given)
            if called.name not in CALLS:
                raise self.fail(f"tilewright.{called.name} is not available in an explicit kernel", code="TW005")
            return CALLS[called.name](self, given)
        if isinstance(called, DeviceFunction):
            return self.call_device(called, given, self.span(node))
        dtype = as_dtype(called)
        if dtype is not None:
            if len(items) != 1 or named:
                raise self.fail(f"{dtype}(...) takes one number, got {len(items) + len(named)}", code="TW016")
            return self.cast(self.number(items[0]), dtype)
        if isinstance(called, Host) and isinstance(called.object, type) and record_fields(called.object):
            return self._make_record(called.object, given)
        if isinstance(called, Host) and getattr(called.object, "__simt_kernel__", False):
            name = getattr(called.object, "__name__", "a kernel")
            raise self.fail(
                f"'{name}' is a kernel and cannot be called from another", "mark what both use with @tw.device, or not at all"
            )
        raise self.fail(
            f"{describe(called)} cannot be called in an explicit kernel", "call words of Tilewright and Python functions", "TW005"
        )

    def _make_record(self, kind: type, given: Arguments) -> Val:
        fields = record_fields(kind)
        bound = bind(
            self, kind.__name__, tuple(fields), given, {n: v for n, v in fields.items() if v is not inspect.Parameter.empty}
        )
        return RecordValue(kind, tuple(fields), tuple(bound.values()))

    @abstractmethod
    def assign(self, name: str, val: Val) -> Val:
        """Let a variable have a value."""

    @abstractmethod
    def call_device(self, called: DeviceFunction, given: Arguments, span: Span) -> Val:
        """What a called function gives, its body read in place."""


def bind(e: ExpressionBuilder, name: str, names: Sequence[str], given: Arguments, defaults: dict[str, object]) -> dict[str, Val]:
    """Arguments by name, as Python binds them."""
    if len(given.items) > len(names):
        raise e.fail(f"{name} takes {len(names)} argument(s) ({', '.join(names)}), got {len(given.items)}", code="TW016")
    found = dict(zip(names, given.items, strict=False))
    for key, val in given.named.items():
        if key not in names:
            raise e.fail(f"{name} has no argument '{key}'", f"its arguments are {', '.join(names)}", "TW016")
        if key in found:
            raise e.fail(f"{name} got '{key}' twice", code="TW016")
        found[key] = val
    for key, default in defaults.items():
        if key not in found:
            found[key] = default if isinstance(default, _VALUES) else e.captured(default, key)
    missing = [key for key in names if key not in found]
    if missing:
        raise e.fail(f"{name} is missing {', '.join(map(repr, missing))}", code="TW016")
    return {key: found[key] for key in names}


def record_fields(kind: type) -> dict[str, object]:
    """The fields of a dataclass or a named tuple with their defaults; empty for other classes."""
    empty = inspect.Parameter.empty
    if dataclasses.is_dataclass(kind):
        return {f.name: empty if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(kind)}
    names = getattr(kind, "_fields", None)
    if issubclass(kind, tuple) and isinstance(names, tuple):
        defaults = getattr(kind, "_field_defaults", {})
        return {name: defaults.get(name, empty) for name in names}
    return {}


_VALUES = (NumberValue, Seq, RecordValue, Simd, Method, MemoryValue, StateValue, WordValue, DeviceFunction, Host, TextValue)
_READERS: dict[type[ast.expr], Callable[[ExpressionBuilder, Any], Val]] = {
    ast.Name: ExpressionBuilder.name, ast.Constant: ExpressionBuilder._constant, ast.JoinedStr: ExpressionBuilder._template, ast.Tuple: ExpressionBuilder._tuple, ast.List: ExpressionBuilder._tuple,
    ast.BinOp: ExpressionBuilder._binary, ast.UnaryOp: ExpressionBuilder._unary, ast.BoolOp: ExpressionBuilder._bool,
    ast.Compare: ExpressionBuilder._comparison, ast.IfExp: ExpressionBuilder._choice, ast.Attribute: ExpressionBuilder._attribute,
    ast.Subscript: ExpressionBuilder._subscript, ast.NamedExpr: ExpressionBuilder._walrus, ast.Lambda: ExpressionBuilder._function,
    ast.Call: ExpressionBuilder._call,
}  # fmt: skip
