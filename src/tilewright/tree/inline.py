"""Calls of kernels in kernels: the body of the called one goes in front of the statement that calls it.

In: a function whose expressions may hold calls of a `Callee`. Out: the same without them; what the called kernel returns stands where the
call was. Its names get new ones where they would meet others, its spans remember the call, so that errors show both places:

    return gelu(project(x, w))        var total = …, project's loops, filling h
                                ->    gelu's loops over h, filling out
                                      return out

An argument that is a name or a number replaces the parameter, anything else is computed into a variable first. What is called under a
condition (`a if c else f(x)`, `c and f(x)`) goes under an `if`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from tilewright.base import dtypes
from tilewright.base.errors import Diagnostics
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.metadata import KernelKind, KernelMetadata, read_attributes
from tilewright.tree.syntax import Argument, Expr, Function, Node, Stmt

_T = TypeVar("_T")
_OPTIONS = ("out", "device", "tune")
"""Keywords of a call from Python that mean nothing inside a kernel."""


def inline(function: Function, sink: Diagnostics) -> Function:
    """The function with every called kernel in its place. What is wrong with a call is reported at it."""
    if not has_calls(function.body):
        return function
    return replace(function, body=_Inliner(function, sink).block(function.body))


def has_calls(item: object) -> bool:
    return any(isinstance(node, syntax.Callee) for node in nodes(item))


def nodes(item: object) -> Iterator[Node]:
    """Every node in an item, a node or tuple of them, from the outside in; not those inside a called kernel."""
    waiting = [item]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if kind is tuple:
            waiting.extend(reversed(item))  # type: ignore[call-overload]
        elif (parts := _INNER[kind] if kind in _INNER else _inner(kind)) is not None:
            yield item  # type: ignore[misc]
            if parts:
                values = item.__dict__
                waiting.extend([values[name] for name in parts])


_INNER: dict[type, tuple[str, ...] | None] = {}


def _inner(kind: type) -> tuple[str, ...] | None:
    """The parts of a kind of node that `nodes` goes on with; None for what is no node."""
    found = None
    if issubclass(kind, Node):
        found = () if issubclass(kind, syntax.Callee) else parts_backwards(kind)
    _INNER[kind] = found
    return found


_PARTS: dict[type, tuple[str, ...]] = {}
_PLAIN = frozenset({"str", "bool", "int", "str | None", "int | None", "tuple[str, ...]", "int | float", "Span"})
"""Types of fields that hold no nodes."""


def parts_backwards(kind: type[Node]) -> tuple[str, ...]:
    """The names of a node's parts that may hold nodes, the last first: as a stack wants them."""
    found = _PARTS.get(kind)
    if found is None:
        fields = [f for f in reversed(dataclasses.fields(kind)) if f.name != "span" and f.type not in _PLAIN]
        found = _PARTS[kind] = tuple(field.name for field in fields)
    return found


def declared(body: tuple[Stmt, ...]) -> dict[str, None]:
    """The names that statements declare, in order."""
    found: dict[str, None] = {}
    for node in nodes(body):
        if isinstance(node, syntax.Let):
            found |= dict.fromkeys(node.targets)
        elif isinstance(node, syntax.For):
            found |= dict.fromkeys(node.vars)
        elif isinstance(node, syntax.Expect):
            found |= dict.fromkeys(_size_names(node.type))
        elif isinstance(node, syntax.Made):
            found |= dict.fromkeys(node.names)
    return found


def _returning(callee: Function) -> Function:
    """A kernel that yields as one that returns: its nest fills an array."""
    metadata = read_attributes(callee.attributes, Diagnostics())
    nest = callee.body[-1] if callee.body else None
    if metadata.kind is not KernelKind.REDUCE or not isinstance(nest, syntax.For):
        return callee
    taken = {*declared(callee.body), *(p.name for p in callee.params)}
    name = next(n for n in ("out", *(f"out{k}" for k in range(len(taken) + 1))) if n not in taken)
    filled = reduced_into(name, nest, metadata)
    return replace(callee, body=(*callee.body[:-1], *filled, syntax.Return(syntax.Name(name, span=nest.span), span=nest.span)))


def reduced_into(name: str, nest: syntax.For, metadata: KernelMetadata) -> tuple[Stmt, ...]:
    """The loops of a reduce kernel as statements of another that fill an array."""
    filled = syntax.ReduceNest(name, metadata.reduction, metadata.axes, nest, span=nest.span)
    return syntax.Made((name,), span=nest.span), filled, syntax.Made((name,), True, span=nest.span)


def _without_rebinding(callee: Function) -> Function:
    """A kernel where `x = value`, for an array that is written in place, writes the elements: in the body around, the name is not always one of those."""
    written = {p.name for p in callee.params if p.in_place}

    def change(node: Stmt) -> Stmt:
        if isinstance(node, syntax.Assign) and isinstance(node.target, syntax.Name) and node.target.id in written:
            return replace(node, target=syntax.Index(node.target, (), span=node.target.span))
        if isinstance(node, syntax.For | syntax.While):
            return replace(node, body=tuple(map(change, node.body)))
        if isinstance(node, syntax.If):
            return replace(node, then=tuple(map(change, node.then)), otherwise=tuple(map(change, node.otherwise)))
        return node

    return replace(callee, body=tuple(map(change, callee.body))) if written else callee


def _size_names(type_: Expr | None) -> list[str]:
    """`f32[rows, 4]`: the names of its extents. `tw.Array[tw.f32]` has none."""
    return [e.id for e in type_.indices if isinstance(e, syntax.Name) and not dtypes.is_name(e.id)] if isinstance(type_, syntax.Index) else []


class _Inliner:
    def __init__(self, function: Function, sink: Diagnostics) -> None:
        self._sink = sink
        self._taken = {p.name for p in function.params} | {n for p in function.params for n in _size_names(p.type)}
        self._taken |= set(declared(function.body)) | {n.id for n in nodes(function.body) if isinstance(n, syntax.Name)}

    def _fresh(self, name: str, owner: str) -> str:
        """The name itself where it is free, else one that says whose it is."""
        candidate, number = name, 1
        own = name if name.startswith(f"{owner}_") else f"{owner}_{name}"
        while candidate in self._taken:
            candidate = own if number == 1 and own != name else f"{own}_{number}"
            number += 1
        self._taken.add(candidate)
        return candidate

    # -- statements -------------------------------------------------------------------------------------------------

    def block(self, body: Iterable[Stmt]) -> tuple[Stmt, ...]:
        return tuple(new for stmt in body for new in self._statement(stmt))

    def _statement(self, stmt: Stmt) -> list[Stmt]:
        if not has_calls(stmt):
            return [stmt]
        before: list[Stmt] = []
        new: Stmt
        if isinstance(stmt, syntax.ExprStmt) and isinstance(stmt.value, syntax.Call) and isinstance(stmt.value.function, syntax.Callee):
            args = tuple(replace(a, value=self._expr(a.value, before)) for a in stmt.value.args)
            if any(p.in_place for p in stmt.value.function.function.params):
                self._called(stmt.value.function.function, args, stmt.value.span, before, used=False)
                return before
        if isinstance(stmt, syntax.For):
            new = replace(stmt, ranges=self._parts(stmt.ranges, before), body=self.block(stmt.body))
        elif isinstance(stmt, syntax.If):
            new = replace(stmt, cond=self._expr(stmt.cond, before), then=self.block(stmt.then), otherwise=self.block(stmt.otherwise))
        elif isinstance(stmt, syntax.While):
            if has_calls(stmt.cond):
                self._sink.error(
                    "TW005", "a kernel called in the condition of a while", stmt.cond.span, "compute it into a variable, before and in the loop"
                )
                return []
            new = replace(stmt, body=self.block(stmt.body))
        else:
            new = self._parts(stmt, before)
        return [*before, new]

    # -- expressions ------------------------------------------------------------------------------------------------

    def _parts(self, item: _T, before: list[Stmt]) -> _T:
        """A node or tuple with the expressions directly inside it rewritten."""
        if isinstance(item, tuple):
            return tuple(self._any(part, before) for part in item)  # type: ignore[return-value]
        assert isinstance(item, Node)
        values = {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if f.name != "span"}
        changed = {name: self._any(value, before) for name, value in values.items() if isinstance(value, Node | tuple)}
        return replace(item, **changed)  # type: ignore[arg-type]

    def _any(self, item: object, before: list[Stmt]) -> object:
        if isinstance(item, tuple):
            return self._parts(item, before)
        return self._expr(item, before) if isinstance(item, Node) else item  # type: ignore[arg-type]

    def _expr(self, node: Expr, before: list[Stmt]) -> Expr:
        if not has_calls(node):
            return node
        if isinstance(node, syntax.Call) and isinstance(node.function, syntax.Callee):
            args = tuple(replace(a, value=self._expr(a.value, before)) for a in node.args)
            return self._called(node.function.function, args, node.span, before)
        if isinstance(node, syntax.Callee):
            self._sink.error("TW005", f"the kernel '{node.function.name}' is not called", node.span, f"write {node.function.name}(…)")
            return syntax.Number(0, span=node.span)
        if isinstance(node, syntax.IfExpr):
            cond = self._expr(node.cond, before)
            return self._under(cond, node.then, node.otherwise, node.span, before)
        if isinstance(node, syntax.Binary) and node.op in ("and", "or") and has_calls(node.right):
            left = self._expr(node.left, before)
            known = syntax.Bool(node.op == "or", span=node.span)
            if node.op == "and":
                return self._under(left, node.right, known, node.span, before)
            return self._under(left, known, node.right, node.span, before)
        return self._parts(node, before)

    def _under(self, cond: Expr, then: Expr, otherwise: Expr, span: Span, before: list[Stmt]) -> Expr:
        """`then if cond else otherwise`, each side computed only where it is taken."""
        sides: list[tuple[list[Stmt], Expr]] = []
        for side in (then, otherwise):
            own: list[Stmt] = []
            sides.append((own, self._expr(side, own)))
        if not sides[0][0] and not sides[1][0]:
            return syntax.IfExpr(cond, sides[0][1], sides[1][1], span=span)
        name = self._fresh("chosen", "either")
        start = syntax.Bool(False, span=span) if isinstance(otherwise, syntax.Bool) else syntax.Number(0, span=span)
        before.append(syntax.Let((name,), start, mutable=True, span=span))
        target = syntax.Name(name, span=span)
        blocks = [(*own, syntax.Assign(target, value, span=span)) for own, value in sides]
        before.append(syntax.If(cond, blocks[0], blocks[1], span=span))
        return target

    # -- calls ------------------------------------------------------------------------------------------------------

    def _called(self, callee: Function, args: tuple[Argument, ...], call: Span, before: list[Stmt], used: bool = True) -> Expr:
        """What stands where a kernel was called; its statements go to `before`. Where nothing is `used` of the result it need not have one."""
        given = self._bound(callee, args, call)
        if given is None:
            return syntax.Number(0, span=call)
        callee = _returning(_without_rebinding(callee))
        statements, last = callee.body[:-1], callee.body[-1] if callee.body else None
        if not used and not isinstance(last, syntax.Return):
            statements, last = callee.body, syntax.Return(None)
        if not isinstance(last, syntax.Return) or (last.value is None and used):
            self._sink.error("TW017", f"'{callee.name}' returns nothing", call, "return what it computes, as its last statement")
            return syntax.Number(0, span=call)
        early = next((n for n in nodes(statements) if isinstance(n, syntax.Return)), None)
        if early is not None:
            self._sink.error("TW005", "a kernel returns once, as its last statement", early.span.called_at(call))
            return syntax.Number(0, span=call)
        sizes = [n for p in callee.params for n in _size_names(p.type) if n not in given]
        own = dict.fromkeys([*declared(statements), *sizes, *callee.sizes])
        names: dict[str, Expr] = {name: syntax.Name(self._fresh(name, callee.name)) for name in own if name not in given}
        assigned = {n.target.id for n in nodes(statements) if isinstance(n, syntax.Assign) and isinstance(n.target, syntax.Name)} | set(own)
        for param in callee.params:
            if param.in_place and not isinstance(given[param.name], syntax.Name):
                self._sink.error("TW005", f"{callee.name} writes its '{param.name}' in place: it must be the name of an array", given[param.name].span, "give the array a name first")
                return syntax.Number(0, span=call)
            names[param.name] = given[param.name] if param.in_place else self._argument(param, given[param.name], param.name in assigned, callee.name, before)
        for param in callee.params:
            if param.type is not None and _says_something(param.type):
                label = f"{callee.name}'s '{param.name}'"
                before.append(syntax.Expect(label, names[param.name], renamed(param.type, names, call), param.optional, call, span=given[param.name].span))
            elif not param.optional and isinstance(given[param.name], syntax.Nothing):
                before.append(syntax.Expect(f"{callee.name}'s '{param.name}'", names[param.name], None, False, call, span=given[param.name].span))
        before.extend(renamed(statements, names, call))
        if last.value is None:
            return syntax.Number(0, span=call)
        result = renamed(last.value, names, call)
        return replace(result, span=call) if isinstance(result, syntax.Name | syntax.Number | syntax.Bool) else result

    def _bound(self, callee: Function, args: tuple[Argument, ...], call: Span) -> dict[str, Expr] | None:
        """Arguments by parameter; None, and a report, where they do not fit."""
        names = [p.name for p in callee.params]
        shown = f"{callee.name}({', '.join(names)})"
        given: dict[str, Expr] = {}
        positional = [a for a in args if a.keyword is None]
        if len(positional) > len(names):
            self._sink.error("TW016", f"{shown} takes {len(names)} argument(s), got {len(positional)}", call)
            return None
        most = sum(not p.keyword_only for p in callee.params)
        if len(positional) > most:
            self._sink.error("TW016", f"{shown} takes {most} argument(s) by position, got {len(positional)}", call, f"give {', '.join(names[most:])} by keyword")
            return None
        for name, argument in [*zip(names, positional), *((a.keyword, a) for a in args if a.keyword is not None)]:
            assert name is not None
            if name not in names:
                known = f"its arguments are {', '.join(names)}"
                why = "says where a call from Python runs; inside a kernel leave it out" if name in _OPTIONS else known
                self._sink.error("TW016", f"{callee.name} has no argument '{name}'", argument.span, why)
                return None
            if name in given:
                self._sink.error("TW016", f"{callee.name} got '{name}' twice", argument.span)
                return None
            given[name] = argument.value
        for param in callee.params:
            if param.name not in given and param.default is not None:
                given[param.name] = replace(param.default, span=call)
        missing = [n for n in names if n not in given]
        if missing:
            self._sink.error("TW016", f"{shown} is missing {', '.join(map(repr, missing))}", call)
            return None
        return given

    def _argument(self, param: syntax.Param, value: Expr, assigned: bool, owner: str, before: list[Stmt]) -> Expr:
        """What stands for a parameter in the body."""
        typed = isinstance(param.type, syntax.Name) and param.type.id not in ("int", "float", "bool", "complex") and dtypes.is_name(param.type.id)
        if not assigned and not typed and isinstance(value, syntax.Name | syntax.Number | syntax.Bool | syntax.Nothing):
            return value
        name = self._fresh(param.name, owner)
        before.append(syntax.Let((name,), value, mutable=True, type=param.type if typed else None, span=value.span))
        return syntax.Name(name, span=value.span)


def _says_something(type_: Expr) -> bool:
    return isinstance(type_, syntax.Index | syntax.StructType) or (isinstance(type_, syntax.Name) and (type_.id.lower() in ("array", "tensor") or dtypes.is_name(type_.id)))


def renamed(item: _T, names: Mapping[str, Expr], call: Span | None = None) -> _T:
    """A node or tuple of a called kernel with other things for its names, and spans that remember the call, if there is one."""
    if isinstance(item, tuple):
        return tuple(renamed(part, names, call) for part in item)  # type: ignore[return-value]
    if not isinstance(item, Node):
        return item
    span = item.span if call is None else item.span.called_at(call)
    if isinstance(item, syntax.Name) and item.id in names:
        return replace(names[item.id], span=span)  # type: ignore[return-value]
    values = {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if f.name != "span"}
    if isinstance(item, syntax.Call) and isinstance(item.function, syntax.Name):
        values["function"] = renamed(item.function, {}, call)
        values["args"] = renamed(item.args, names, call)
    else:
        values = {name: renamed(value, names, call) if isinstance(value, Node | tuple) else value for name, value in values.items()}
    if isinstance(item, syntax.Expect):
        values["call"] = item.call.called_at(call) if call is not None else item.call
    for field in ("targets", "vars", "names"):
        if field in values:
            values[field] = tuple(_new_name(name, names) for name in values[field])
    if isinstance(item, syntax.For):
        values["until"] = _new_name(item.until, names)
    if isinstance(item, syntax.ReduceNest):
        values["name"] = _new_name(item.name, names)
    return type(item)(**values, span=span)  # type: ignore[call-arg]


def _new_name(name: str, names: Mapping[str, Expr]) -> str:
    new = names.get(name)
    return new.id if isinstance(new, syntax.Name) else name
