"""One run of a ZynML program: its statements, one after the other.

In: a checked program, its inputs, a way to run compute blocks. Out: all names defined at its top level. A function that is no part of a
kernel runs here too, with names of its own and those of the program; blocks (`if`, loops) have scopes: what they declare ends with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.base import dtypes
from tilewright.base.errors import TilewrightError, UserError
from tilewright.base.source import Span
from tilewright.runtime.core import streams
from tilewright.tree import syntax
from tilewright.tree.syntax import Expr, Stmt
from tilewright.zyn.host import functions as host_functions
from tilewright.zyn.host import values as host_values
from tilewright.zyn.host.blocks import PARTS, Blocks, called
from tilewright.zyn.host.dimensions import AbstractValue, NamedSizes
from tilewright.zyn.lazy.lazy_array import LazyArray, settled
from tilewright.zyn.program_files import readable_file

_ARRAY_PARTS = ("shape", "size", "ndim", "dtype", "T")
_PROGRAM = "program"
"""What blocks of the top level that run together are called."""
_MISSING = object()
_MOST_SHOWN = 8
"""Axes of an array that stands for one that is not made."""
MOST_PARTS = 1 << 12
"""Of an array that is split, where the parts are only looked at."""


@dataclass(frozen=True)
class Returned:
    """How a block ends before its last statement: by `return`, or with a `word`, by `break` or `continue`."""

    value: object
    word: str = ""


class Run(Blocks):
    """The program, or one call of a function in it."""

    def run(self, module: syntax.Module, only: frozenset[str] | None = None) -> dict[str, object]:
        """All names that the program defines, or those of `only`; what waits and nobody reads is then not computed."""
        names: dict[str, None] = {}
        inputs = dict(self._values)
        self._waiting = self._new_waiting(_PROGRAM)
        try:
            self._statements(module.body, names)
            found = {name: self._values[name] for name in names if only is None or name in only}
            if self._waiting is not None:
                found = self._waiting.finish_all(found)
        except UserError as error:
            raise self._check.complete(error, module, inputs) from None
        return found

    # -- statements -------------------------------------------------------------------------------------------------

    def _statements(self, body: Sequence[Stmt], names: dict[str, None]) -> Returned | None:
        """Runs statements; `names` gets what they declare."""
        for statement in body:
            returned = self._statement(statement, names)
            if returned is not None:
                return returned
        return None

    def _statement(self, node: Stmt, names: dict[str, None]) -> Returned | None:
        self._known.clear()
        if isinstance(node, syntax.Let) and node.value is not None:
            self._label = "_".join(node.targets)
            value = self.evaluate(node.value)
            value = value if node.type is None else self._typed(node, node.type, value)
            self._values.update(self._bind(node.targets, value, node.span, node.destructure))
            names.update(dict.fromkeys(node.targets))
        elif isinstance(node, syntax.Assign):
            self._assign(node)
        elif isinstance(node, syntax.ExprStmt):
            self._label = "compute"
            self.evaluate(node.value)
        elif isinstance(node, syntax.Return):
            self._label = "result"
            return Returned(None if node.value is None else self.evaluate(node.value))
        elif isinstance(node, syntax.If):
            return self._if(node)
        elif isinstance(node, syntax.For):
            return self._for(node)
        elif isinstance(node, syntax.While):
            self._run_waiting()
            while self._truth(node.cond, "while"):
                returned = self._block(node.body)
                self._run_waiting()
                if returned is not None and returned.word == "continue" and not self._looks:
                    continue
                if returned is not None or self._looks:
                    return None if returned is not None and returned.word else returned
        elif isinstance(node, syntax.Break | syntax.Continue):
            return Returned(None, "break" if isinstance(node, syntax.Break) else "continue")
        elif isinstance(node, syntax.Config):
            for name, value in node.fields:
                if name == "compute_device" and isinstance(found := self.evaluate(value), str):
                    self._default_device = found
        return None

    def _typed(self, node: syntax.Let, type_: Expr, value: object) -> object:
        """A value held against the type it is declared with; numbers take an element type."""
        number = host_values.as_scalar(value)
        if isinstance(type_, syntax.Name) and dtypes.is_name(type_.id) and number is not None and type_.id not in ("int", "float", "bool"):
            try:
                return host_values.call("cast", [number, dtypes.by_name(type_.id)])  # type: ignore[list-item]
            except (ArithmeticError, TypeError, ValueError) as error:
                raise UserError.at("TW006", f"{host_functions.shown(number)} is no {type_.id}: {error}", node.span) from None
        sizes = NamedSizes("let", node.span, not self._looks, {n: v for n, v in self._values.items() if isinstance(v, int) and not isinstance(v, bool)})
        return sizes.take(f"'{node.targets[0]}'", type_, value, lambda part, known: self._inner({**self._values, **known}).evaluate(part))

    def _block(self, body: Sequence[Stmt], bound: Mapping[str, object] | None = None) -> Returned | None:
        """A block: what it declares, and what `bound` gives it, is gone when it ends."""
        declared = {name for s in body if isinstance(s, syntax.Let) for name in s.targets} | set(bound or ())
        before = {name: self._values.get(name, _MISSING) for name in declared}
        self._values.update(bound or {})
        try:
            return self._statements(body, {})
        finally:
            for name, value in before.items():
                if value is _MISSING:
                    self._values.pop(name, None)
                else:
                    self._values[name] = value

    def _if(self, node: syntax.If) -> Returned | None:
        holds = self._truth(node.cond, "if")
        if not self._looks:
            return self._block(node.then if holds else node.otherwise)
        first, second = self._block(node.then), self._block(node.otherwise)
        return first if first is not None and second is not None and not first.word and not second.word else None

    def _run_waiting(self) -> None:
        """Around each turn of a loop of the program itself: all turns are then the same program, which is compiled once."""
        if self._waiting is not None and self._values is self._program:
            self._waiting.run_all()

    def _for(self, node: syntax.For) -> Returned | None:
        self._run_waiting()
        for values in self._turns(node):
            returned = self._block(node.body, self._bind(node.vars, values, node.span, len(node.vars) > 1))
            self._run_waiting()
            if returned is not None and returned.word == "continue" and not self._looks:
                continue
            if returned is not None or self._looks:
                return None if self._looks or (returned is not None and returned.word) else returned
        return None

    def _turns(self, node: syntax.For) -> Iterator[object]:
        if node.over is not None:
            over = host_functions.settled(self.evaluate(node.over))
            if isinstance(over, AbstractValue):
                yield AbstractValue() if len(node.vars) == 1 else tuple(AbstractValue() for _ in node.vars)
                return
            if not isinstance(over, list | tuple) and not getattr(over, "shape", None):
                raise UserError.at("TW009", f"a loop over a {type(over).__name__}", node.over.span, "loop over a list, an array or a range")
            if isinstance(over, list | tuple):
                yield from (self._field(over, index) for index in range(len(over)))
            else:
                yield from (self._element(over, (row,)) for row in range(over.shape[0]))
            return
        yield from self._ranges(node.ranges)

    def _ranges(self, ranges: Sequence[syntax.RangeExpr]) -> Iterator[object]:
        spans = []
        for item in ranges:
            low, high = self._whole(item.lo), self._whole(item.hi)
            step = 1 if item.step is None else self._whole(item.step)
            if step == 0:
                raise UserError.at("TW016", "a loop with step 0 has no end", item.span)
            found = range(low, high + (1 if step > 0 else -1) if item.inclusive else high, step)
            spans.append(found or [low] if self._looks else found)
        if len(spans) == 1:
            yield from spans[0]
            return
        for first in spans[0]:
            for rest in self._ranges_of(spans[1:]):
                yield (first, *rest)

    def _ranges_of(self, spans: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
        if not spans:
            yield ()
            return
        for first in spans[0]:
            for rest in self._ranges_of(spans[1:]):
                yield (first, *rest)

    def _whole(self, node: Expr) -> int:
        value = self.evaluate(node)
        if isinstance(value, AbstractValue):
            return 1
        number = host_values.as_whole(self._item(value))
        if number is None:
            raise UserError.at("TW009", f"the bound of a loop is {host_functions.shown(value)}, no whole number", node.span)
        return number

    def _truth(self, node: Expr, word: str) -> bool:
        value = self._item(host_functions.settled(self.evaluate(node)))
        if isinstance(value, AbstractValue):
            return True
        number = host_values.as_scalar(value)
        if number is not None:
            return bool(number) or self._looks
        if isinstance(value, str | list | tuple | dict):
            return bool(value) or self._looks
        shape = getattr(value, "shape", None)
        what = f"an array of shape {list(shape)}" if isinstance(shape, tuple) else f"a {type(value).__name__}"
        raise UserError.at("TW009", f"the condition of '{word}' is {what}", node.span, "reduce it to one value, as in reduce(and, x > 0)")

    def _assign(self, node: syntax.Assign) -> None:
        targets = node.target.items if isinstance(node.target, syntax.Tuple) else (node.target,)
        self._label = "_".join(owner(t) for t in targets)
        source = node.value
        if node.op:
            source = syntax.Binary(node.op, node.target, source, span=node.span)
        value = self.evaluate(source)
        parts = [t for t in targets if not isinstance(t, syntax.Name)]
        places = [f"{number}" for number in range(len(targets))]
        found = self._bind(places, value, node.span, isinstance(node.target, syntax.Tuple))
        self._values.update({t.id: found[p] for t, p in zip(targets, places, strict=True) if isinstance(t, syntax.Name)})
        if parts:
            del value
            self._known.clear()
            for target, place in zip(targets, places, strict=True):
                if not isinstance(target, syntax.Name):
                    self._assign_part(target, found[place])

    def _assign_part(self, target: Expr, value: object) -> None:
        """`name[…] = value` and `name.field = value`, to any depth: the name has a changed value afterwards."""
        from tilewright.zyn.host import assign as host_assign

        if isinstance(target, syntax.Name):
            self._values[target.id] = value
            return
        assert isinstance(target, syntax.Index | syntax.Attribute)
        whole = target.value
        if isinstance(target, syntax.Attribute):
            record = self.evaluate(whole)
            new: object = AbstractValue() if isinstance(record, AbstractValue) else host_assign.with_field(record, target.name, value, target.span)
            self._assign_part(whole, new)
            return
        places = [self._place(i) for i in target.indices]
        held = self._values[whole.id] if isinstance(whole, syntax.Name) else self.evaluate(whole)
        if isinstance(held, AbstractValue) or isinstance(value, AbstractValue) or self._looks:
            return
        try:
            if isinstance(whole, syntax.Name):
                del held
                self._values[whole.id] = host_assign.with_part(self._values, whole.id, places, value, target.span)
            else:
                self._assign_part(whole, host_assign.changed(held, places, value, target.span))
        except TilewrightError as error:
            raise _placed(error, target.span) from None

    def _bind(self, names: Sequence[str], value: object, span: Span, apart: bool) -> dict[str, object]:
        if not apart:
            return {names[0]: value}
        if isinstance(value, AbstractValue):
            return {name: AbstractValue() for name in names}
        count = len(names)
        if not isinstance(value, tuple | list) or len(value) != count:
            got = f"{len(value)} value(s)" if isinstance(value, tuple | list) else f"a {type(value).__name__}"
            raise UserError.at("TW016", f"{count} name(s) on the left, {got} on the right", span, "give one name for each value")
        return {name: self._field(value, index) for index, name in enumerate(names)}

    # -- expressions ------------------------------------------------------------------------------------------------

    def evaluate(self, node: Expr) -> object:
        if id(node) in self._known:
            return self._known[id(node)]
        if isinstance(node, syntax.Number | syntax.Bool | syntax.String):
            return node.value
        if isinstance(node, syntax.Nothing):
            return None
        if isinstance(node, syntax.IsNone):
            return (self.evaluate(node.value) is None) != node.negated
        if isinstance(node, syntax.Name):
            return self._named(node)
        if isinstance(node, syntax.Compute):
            return self._compute(node)
        if isinstance(node, syntax.Call | syntax.Pipe):
            if self._is_apart(called(node)):
                return self._call(node)
            if id(called(node)) in self._check.callees:
                return self._composed(node)
        if isinstance(node, syntax.Tuple):
            return tuple(self.evaluate(i) for i in node.items)
        if isinstance(node, syntax.List):
            return [self.evaluate(i) for i in node.items]
        if isinstance(node, syntax.Record):
            return {name: self.evaluate(value) for name, value in node.fields}
        if isinstance(node, syntax.Attribute):
            return self._member(node)
        if isinstance(node, syntax.Index):
            return self._index(node)
        if isinstance(node, syntax.Await):
            return self._await(node)
        if isinstance(node, syntax.Binary) and node.op in ("and", "or"):
            return self._logical(node)
        if isinstance(node, syntax.IfExpr):
            return self._choice(node)
        return self._elementwise(node)

    def _named(self, node: syntax.Name) -> object:
        if node.id in self._values:
            return self._values[node.id]
        if not dtypes.is_name(node.id):
            raise UserError.at("TW002", f"'{node.id}' has no value here", node.span)
        return dtypes.by_name(node.id)

    def _logical(self, node: syntax.Binary) -> object:
        """`and` and `or` of numbers leave out the right side where the left one decides."""
        left = self.evaluate(node.left)
        number = host_values.as_scalar(left)
        if number is not None and bool(number) is (node.op == "or") and not self._looks:
            return bool(number)
        self._known[id(node.left)] = left
        if number is not None:
            right = self._known[id(node.right)] = self._item(self.evaluate(node.right))
            decided = host_values.as_scalar(right)
            if decided is not None:
                return bool(decided)
        return self._elementwise(node)

    def _choice(self, node: syntax.IfExpr) -> object:
        cond = self.evaluate(node.cond)
        number = host_values.as_scalar(cond)
        if number is not None:
            if self._looks:
                self.evaluate(node.otherwise)
                return self.evaluate(node.then)
            return self.evaluate(node.then if number else node.otherwise)
        if isinstance(cond, AbstractValue):
            return self.evaluate(node.then)
        self._known[id(node.cond)] = cond
        return self._elementwise(node)

    def _await(self, node: syntax.Await) -> object:
        from tilewright.zyn import async_blocks

        value = self.evaluate(node.value)
        timeout = host_values.as_scalar(self.evaluate(node.timeout)) if node.timeout is not None else None
        otherwise = self.evaluate(node.otherwise) if node.otherwise is not None else None
        if isinstance(value, AbstractValue):
            return AbstractValue()
        return async_blocks.wait_for(node.mode, value, timeout, otherwise, node.span)

    def _member(self, node: syntax.Attribute) -> object:
        value = self.evaluate(node.value)
        if isinstance(value, AbstractValue):
            return AbstractValue()
        if isinstance(value, Mapping):
            if node.name in value:
                return self._field(value, node.name)
            raise UserError.at("TW002", f"there is no '{node.name}' in this record", node.span, _fields(value))
        if isinstance(value, LazyArray) and node.name in _ARRAY_PARTS:
            known: object = getattr(value, node.name)
            return known
        value = host_functions.settled(value)
        if isinstance(getattr(value, "shape", None), tuple):
            if node.name in _ARRAY_PARTS:
                result = self._array_part(value, node.name)
                return host_functions.dtype_of(result) if node.name == "dtype" else result
            raise UserError.at("TW002", f"an array has no '{node.name}'", node.span, f"it has {', '.join(_ARRAY_PARTS)}")
        if isinstance(value, str | list | tuple | bool | int | float) or node.name.startswith("_") or not hasattr(value, node.name):
            raise UserError.at("TW002", f"there is no '{node.name}' in this {type(value).__name__}", node.span)
        member: object = getattr(value, node.name)
        return member

    def _index(self, node: syntax.Index) -> object:
        value = self.evaluate(node.value)
        indices = [self._place(i) for i in node.indices]
        view = value.sliced(indices) if isinstance(value, LazyArray) else None
        if view is not None:
            return view
        value = host_functions.settled(value)
        if isinstance(value, AbstractValue):
            return AbstractValue()
        shape = getattr(value, "shape", None)
        if isinstance(value, Mapping):
            key = indices[0]
            if len(indices) != 1 or not isinstance(key, str) or key not in value:
                raise UserError.at("TW002", f"there is no {host_functions.shown(key)} in this record", node.span, _fields(value))
            return self._field(value, key)
        rank = len(shape) if isinstance(shape, tuple) else 1
        if any(isinstance(i, str) for i in indices) or len(indices) > rank or isinstance(value, dtypes.DType) or not hasattr(value, "__getitem__"):
            raise UserError.at("TW003", f"{len(indices)} index(es) into a {type(value).__name__} of rank {rank}", node.span)
        try:
            result = self._element(value, tuple(indices)) if isinstance(shape, tuple) else self._field(value, indices[0])
        except TilewrightError as error:
            raise _placed(error, node.span) from None
        except (IndexError, KeyError, OverflowError) as error:
            if self._looks:
                return AbstractValue()
            raise UserError.at("TW013", f"index out of range: {error}", node.span) from None
        return result

    def _place(self, node: Expr) -> int | str | slice:
        if isinstance(node, syntax.Slice):
            return slice(*(None if bound is None else self._whole(bound) for bound in (node.lo, node.hi)))
        value = self._item(self.evaluate(node))
        if isinstance(value, str):
            return value
        number = host_values.as_scalar(value)
        if isinstance(value, AbstractValue) or (number is not None and self._looks):
            return 0
        place = host_values.as_whole(value)
        if place is None:
            raise UserError.at("TW003", f"an index is {host_functions.shown(value)}, no whole number", node.span)
        return place

    def _looked_at(self, name: str, arguments: Mapping[str, object], span: Span) -> object:
        """What a function gives where nothing is computed."""
        try:
            assert self._abstract is not None
            return self._abstract.looked_at(name, arguments)
        except TilewrightError as error:
            raise _placed(error, span) from None

    # -- calls ------------------------------------------------------------------------------------------------------

    def _is_apart(self, call: syntax.Call) -> bool:
        """Whether it calls a function that runs here, and not as part of a kernel."""
        if not isinstance(call.function, syntax.Name):
            return not isinstance(call.function, syntax.Callee)
        if call.function.id not in self._check.functions:
            return call.function.id in host_functions.FUNCTIONS
        return id(call) not in self._check.callees or any(self._is_part(a.value) for a in call.args)

    def _is_part(self, node: Expr) -> bool:
        if isinstance(node, syntax.String | syntax.List | syntax.Record | syntax.Tuple):
            return True
        if isinstance(node, syntax.Attribute | syntax.Index):
            self._known[id(node)] = self.evaluate(node)
        value = self._known.get(id(node)) if not isinstance(node, syntax.Name) else self._values.get(node.id)
        return isinstance(value, PARTS)

    def _call(self, node: syntax.Call | syntax.Pipe) -> object:
        call = called(node)
        piped = [self.evaluate(node.value)] if isinstance(node, syntax.Pipe) else []
        function = call.function
        label = self._label
        given = piped + [self.evaluate(a.value) for a in call.args if a.keyword is None]
        named = {a.keyword: self.evaluate(a.value) for a in call.args if a.keyword is not None}
        self._label = label
        if isinstance(function, syntax.Attribute):
            return self._method(function, given, named, node.span)
        assert isinstance(function, syntax.Name)
        if function.id in self._check.functions:
            return self._function(self._check.functions[function.id], call, given, named, node.span)
        arguments = host_functions.bound(host_functions.FUNCTIONS[function.id], given, named)
        view, arguments = self._view(function.id, arguments, node.span)
        if view is not None:
            return view
        if self._looks:
            return self._looked_at(function.id, arguments, node.span)
        try:
            if function.id == "read" and isinstance(path := arguments["path"], str):
                arguments["path"] = str(readable_file(path, node.span, self._check.roots))
            return self._host_call(function.id, arguments)
        except TilewrightError as error:
            raise _placed(error, node.span) from None

    def _method(self, function: syntax.Attribute, given: Sequence[object], named: Mapping[str, object], span: Span) -> object:
        receiver = self.evaluate(function.value)
        arguments = host_functions.bound(host_functions.METHODS[function.name], given, named)
        view, arguments = self._view(function.name, {"x": receiver, **arguments}, span)
        if view is not None:
            return view
        receiver = arguments.pop("x")
        if self._looks:
            return self._looked_at(function.name, {"x": receiver, **arguments}, span)
        try:
            return self._host_method(function.name, receiver, arguments)
        except TilewrightError as error:
            raise _placed(error, span) from None

    def _function(self, function: syntax.Function, call: syntax.Call, given: Sequence[object], named: Mapping[str, object], span: Span) -> object:
        """A call of a function that runs block by block."""
        self._check.require_apart(function, call)
        if self._waiting is not None and self._check.writes_in_place:
            self._waiting.run_all()  # what waits may read what the function writes
        values: dict[str, object] = {p.name: value for p, value in zip(function.params, given)} | dict(named)
        values = {name: settled(value) for name, value in values.items()}
        outside = self._inner({**self._program})
        for param in function.params:
            if param.name not in values:
                assert param.default is not None
                values[param.name] = outside.evaluate(param.default)
        sizes = NamedSizes(function.name, span, not self._looks)
        inner = self._inner({**self._program})

        def number(node: Expr, known: Mapping[str, object]) -> object:
            inner._values.update(known)
            return inner.evaluate(node)

        for param in function.params:
            inner._values[param.name] = values[param.name]
        for param in function.params:
            inner._values[param.name] = sizes.take(f"'{param.name}'", param.type, values[param.name], number)
        inner._values.update({name: size for name, size in sizes.values.items() if name not in values})
        inner._label = function.name
        if any(attribute.name == "device" for attribute in function.attributes):
            inner._device = outside._device_of(function.attributes)
        inner._waiting = self._new_waiting(function.name)
        returned = inner._statements(function.body, {})
        result = None if returned is None else returned.value
        if inner._waiting is not None:
            result = inner._waiting.finish(result)
        if function.result is None or isinstance(result, streams.FUTURES):
            return result
        return sizes.take("the result", function.result, result, number)

    def _composed(self, node: syntax.Call | syntax.Pipe) -> object:
        """A call of a function that is part of a kernel. Kernels check arrays they are given; numbers and the result are checked here."""
        call = called(node)
        assert isinstance(call.function, syntax.Name)
        function = self._check.functions[call.function.id]
        plain = [p for p in function.params if isinstance(p.type, syntax.Name)]
        if function.result is None and not plain:
            return self._elementwise(node)
        given = [*([node.value] if isinstance(node, syntax.Pipe) else []), *(a.value for a in call.args if a.keyword is None)]
        nodes = {p.name: value for p, value in zip(function.params, given)} | {a.keyword: a.value for a in call.args if a.keyword is not None}
        known = {n: self.evaluate(v) for n, v in nodes.items() if isinstance(v, syntax.Name | syntax.Number | syntax.Bool)}
        sizes = NamedSizes(function.name, node.span, not self._looks)
        inner = self._inner({**self._program, **known})

        def number(part: Expr, found: Mapping[str, object]) -> object:
            inner._values.update(found)
            return inner.evaluate(part)

        for param in plain:
            if param.name in known:
                sizes.take(f"'{param.name}'", param.type, known[param.name], number)
        result = self._elementwise(node)
        computed = any(not isinstance(i, syntax.Name) for i in getattr(function.result, "indices", ()))
        if function.result is not None and not (computed and len(known) < len(function.params)):
            for param in function.params:
                if param.name in known and isinstance(param.type, syntax.Index):
                    sizes.take(f"'{param.name}'", param.type, known[param.name], number)
            return sizes.take("the result", function.result, result, number)
        return result

    def _inner(self, values: dict[str, object]) -> Run:
        inner = type(self)(self._check, self._run_compute, self._device, values)
        inner._default_device, inner._program = self._default_device, self._program
        return inner


def looked_at(name: str, given: Mapping[str, object]) -> object:
    """What a host function gives where nothing is computed: a value of the right rank and type, or one nobody knows."""
    first = given.get("x")
    if name in ("print", "free", "reset"):
        return None
    if name in ("compute_devices", "str", "len", "done", "cancel", "flush"):
        return {"str": "", "done": True, "compute_devices": [{"id": "cpu", "type": "cpu", "name": "", "memory": 1, "cores": 1}]}.get(name, 1)
    if name == "concat":
        parts = given.get("arrays")
        return parts[0] if isinstance(parts, list | tuple) and parts else AbstractValue()
    if isinstance(first, AbstractValue) or name in ("memory_pool", "read"):
        return AbstractValue()
    if name == "split":
        parts = given.get("parts")
        count = len(parts) if isinstance(parts, list | tuple) else parts if isinstance(parts, int) else 0
        return tuple(first for _ in range(count)) if 0 < count <= MOST_PARTS else AbstractValue()
    if name == "to_device" or name == "transpose" or name == "copy":
        return first
    shape = given.get("shape")
    rank = len(shape) if isinstance(shape, list | tuple) else 1
    if rank > _MOST_SHOWN:
        return AbstractValue()
    dtype = getattr(first, "dtype", None) if name == "reshape" else host_functions.made_dtype(given.get("dtype", dtypes.f32)).numpy
    return np.ones((4,) * rank, dtype)



def _fields(value: Mapping[str, object]) -> str:
    names = [str(name) for name in value]
    return f"it has {', '.join(names[:12])}{', …' if len(names) > 12 else ''}" if names else "it is empty"


def owner(target: Expr) -> str:
    """The name that an assignment changes."""
    while isinstance(target, syntax.Index | syntax.Attribute):
        target = target.value
    return target.id if isinstance(target, syntax.Name) else ""


def _placed(error: TilewrightError, span: Span) -> TilewrightError:
    """The same error with the place of the call, where it has none."""
    found = error.diagnostics[0]
    if found.span.line:
        return error
    return type(error).at(found.code, found.message, span, found.help)
