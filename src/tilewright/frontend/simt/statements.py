"""Statements of explicit kernels: Python's control flow in, structured IR out.

Variables become values that `if`, `for` and `while` hand on. Where a branch leaves a loop or the function, what follows it becomes the
other branch; where that is not enough, a flag says that it was left, and guards what follows. Device functions are read where they are
called, with variables of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from tilewright.base.errors import Diagnostic, UserError
from tilewright.base.source import Span
from tilewright.frontend.simt.expressions import BINARY, bind
from tilewright.frontend.simt.flow import RESULT, RETURN
from tilewright.frontend.simt.loops import Loops
from tilewright.frontend.simt.numbers import as_dtype
from tilewright.frontend.simt.printing import read_assert
from tilewright.frontend.simt.tree import goes_on_once, jumps, with_rest
from tilewright.frontend.simt.values import (
    NOTHING,
    Arguments,
    DeviceFunction,
    MemoryValue,
    NumberValue,
    RecordValue,
    Seq,
    SimtScope,
    Val,
    WordValue,
    describe,
    leaves,
    literal,
)
from tilewright.ir.nodes import Block, Value, walk
from tilewright.ir.ops import OPS

_HELP: dict[type[ast.stmt], tuple[str, str]] = {
    ast.Try: ("try", "check the values before the kernel is launched"),
    ast.With: ("with", "open resources before the kernel is launched"),
    ast.AsyncWith: ("async with", "open resources before the kernel is launched"),
    ast.AsyncFor: ("async for", "loop over range(...)"),
    ast.Delete: ("del", "leave it out: variables end with the kernel"),
    ast.Global: ("global", "pass an array and write to it"),
    ast.Nonlocal: ("nonlocal", "return the value and assign it"),
    ast.Import: ("import", "import at the top of the file"),
    ast.ImportFrom: ("import", "import at the top of the file"),
    ast.ClassDef: ("class", "define it outside the kernel"),
    ast.AsyncFunctionDef: ("an async function", "write it with a plain 'def'"),
    ast.Raise: ("raise", "write an error code into an array"),
    ast.Match: ("match", "use if and elif"),
}


class Statements(Loops):
    """Reads the statements of a function."""

    collected: dict[Diagnostic, None] | None = None
    """Where all errors are looked for: those found. Then a statement that is wrong does not end the reading."""
    lost: frozenset[str] = frozenset()
    """Variables that such statements would have set: what is said of statements that use them may only follow from that."""

    # -- blocks ---------------------------------------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for position, statement in enumerate(statements):
            if self.scope.dead:
                return
            rest = statements[position + 1 :]
            if isinstance(statement, ast.If) and rest and goes_on_once(statement):
                self.statement(with_rest(statement, rest))
                return
            self.statement(statement)
            exits = self._exits(statement)
            if rest and exits and not self.scope.dead:
                with self.b.at(self.span(rest[0])):
                    self.branch(self._is_clear(exits), lambda rest=rest: self.block(rest), self._left)  # type: ignore[misc]
                return

    def _left(self) -> None:
        """The way of those who have left already."""
        self.scope.dead = True

    def _exits(self, statement: ast.stmt) -> list[str]:
        """The flags a statement may raise for what follows it."""
        kinds = jumps(statement)
        found = [RETURN] if ast.Return in kinds else []
        if self.scope.loops:
            number = self.scope.loops[-1].number
            found += [f"${word}{number}" for word, kind in (("break", ast.Break), ("continue", ast.Continue)) if kind in kinds]
        return found

    def statement(self, node: ast.stmt) -> None:
        if self.collected is None:
            self._statement(node)
            return
        try:
            self._statement(node)
        except UserError as error:
            names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
            if not self.lost & {n.id for n in names}:
                self.collected.update(dict.fromkeys(error.diagnostics))
            self.lost |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
            for inner in (getattr(node, "body", ()), getattr(node, "orelse", ())):
                self.block(inner)

    def _statement(self, node: ast.stmt) -> None:
        with self.b.at(self.head(node)):
            if self.launch.steps:
                self._step(node)
            handler = _HANDLERS.get(type(node))
            if handler is None:
                raise self.unsupported(
                    node, *_HELP.get(type(node), (f"'{type(node).__name__}'", "use assignments, if, for and while"))
                )
            handler(self, node)

    def _step(self, node: ast.stmt) -> None:
        """For the debugger: the variables that have a value before a statement."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        found: dict[str, Value] = {}
        for name, val in self.scope.variables.items():
            if name.startswith("$") or name in self.scope.missing:
                continue
            if isinstance(val, MemoryValue) and not val.given:
                found[name] = val.value
            for path, number in leaves(val):
                found[name + "".join(f"[{item}]" for item in path)] = self.use(number)
        self.b.multi("step", *found.values(), names=tuple(found), function=self.scope.source.name)

    # -- simple statements ----------------------------------------------------------------------------------------

    def _expression(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str | type(...)):
            return  # a docstring, or `...`
        if not isinstance(node.value, ast.Call | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            val = self.read(node.value)
            is_function = isinstance(val, WordValue | DeviceFunction)
            raise self.fail("this expression has no effect", "call it: add ()" if is_function else "assign it to a name, or remove it")
        before = len(self.b.ops)
        val = self.read(node.value)
        made = self.b.ops[before:]
        called = self.read(node.value.func) if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name | ast.Attribute) else None
        if isinstance(val, NumberValue) and isinstance(called, WordValue) and all(OPS[op.opcode].effect in ("pure", "read", "control") for op in walk(Block((), tuple(made)))):
            raise self.fail("this call has no effect", "assign its value to a name, or remove it")

    def _assignment(self, node: ast.Assign) -> None:
        val = self.read(node.value)
        for target in node.targets:
            self.store_to(target, val)

    def _annotated(self, node: ast.AnnAssign) -> None:
        what = f"'{ast.unparse(node.target)}'"
        if node.value is None:
            raise self.unsupported(node, f"{what} without a value", f"write {what[1:-1]}: type = value")
        val = self._held_to(node.annotation, self.read(node.value), what)
        self.store_to(node.target, val)

    def _held_to(self, annotation: ast.expr, val: Val, what: str) -> Val:
        """A value of the type its annotation says."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                text = ast.parse(annotation.value.strip(), mode="eval").body
            except SyntaxError:
                raise self.unsupported(annotation, f"'{annotation.value}' as a type", "write a dtype, for instance tw.f32") from None
            for part in ast.walk(text):
                ast.copy_location(part, annotation)
            annotation = text
        said = self.read(annotation)
        dtype = as_dtype(said)
        if not isinstance(val, NumberValue):
            if dtype is not None or (isinstance(said, WordValue) and said.name in ("int", "float", "bool")):
                raise self.fail(f"{what} is annotated as a number, but is {describe(val)}", "remove the annotation", "TW009")
            return val
        if dtype is not None:
            return self.convert(val, dtype, what)
        word = said.name if isinstance(said, WordValue) else ""
        if word == "float" and not val.dtype.is_float:
            return self.convert(val, self.default_float, what)
        if (word == "float" and val.dtype.is_float) or (word == "int" and val.dtype.is_int) or (word == "bool" and val.dtype.is_bool):
            return val
        help = "write a dtype, for instance tw.f32, or convert the value"
        raise self.fail(f"{what} is annotated as {describe(said)}, but is {describe(val)}", help, "TW009")

    def store_to(self, target: ast.expr, val: Val) -> None:
        if isinstance(target, ast.Name):
            if isinstance(val, MemoryValue) and val.name in ("shared", "local", "shared_dynamic"):
                val = _renamed(val, target.id)
            self.assign(target.id, val)
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target, val)
        elif isinstance(target, ast.Subscript):
            owner = self.read(target.value)
            with self.b.at(self.span(target)):
                if not isinstance(owner, MemoryValue):
                    raise self.fail(f"{describe(owner)} cannot be written to by index", "assign a new tuple", "TW015")
                self.store(owner, self.indices(target.slice), self.number(val, "the value"))
        elif isinstance(target, ast.Attribute):
            self._store_field(target, val)
        else:
            raise self.unsupported(target, "this target", "assign to a variable or an element")

    def _unpack(self, target: ast.Tuple | ast.List, val: Val) -> None:
        if not isinstance(val, Seq | RecordValue):
            raise self.fail(f"{describe(val)} cannot be unpacked", code="TW009")
        if any(isinstance(t, ast.Starred) for t in target.elts):
            raise self.unsupported(target, "'*' in an assignment", "name every part")
        if len(target.elts) != len(val.items):
            raise self.fail(f"{len(val.items)} value(s) for {len(target.elts)} name(s)", code="TW016")
        for part, item in zip(target.elts, val.items, strict=True):
            self.store_to(part, item)

    def _store_field(self, target: ast.Attribute, val: Val) -> None:
        owner = self.read(target.value)
        if not isinstance(owner, RecordValue) or not isinstance(target.value, ast.Name):
            raise self.fail(f"{describe(owner)} has no fields to write to", code="TW015")
        if target.attr not in owner.names:
            raise self.fail(
                f"{describe(owner)} has no field '{target.attr}'", f"its fields are {', '.join(owner.names)}", "TW002"
            )
        items = tuple(val if name == target.attr else item for name, item in zip(owner.names, owner.items, strict=True))
        self.assign(target.value.id, RecordValue(owner.kind, owner.names, items))

    def _augmented(self, node: ast.AugAssign) -> None:
        target = node.target
        if not isinstance(target, ast.Subscript):
            reading = ast.copy_location(ast.Name(target.id, ast.Load()) if isinstance(target, ast.Name) else
                                        ast.Attribute(target.value, target.attr, ast.Load()), target)  # fmt: skip
            whole = ast.copy_location(ast.BinOp(reading, node.op, node.value), node)
            self.store_to(target, self.read(whole))
            return
        owner = self.read(target.value)
        if not isinstance(owner, MemoryValue):
            raise self.fail(f"{describe(owner)} cannot be written to by index", "assign a new tuple", "TW015")
        indices = self.indices(target.slice)
        place = self.place(owner, indices)
        fixed = [self.index(value) for value in place[len(owner.given) :]]
        sign = BINARY.get(type(node.op))
        if sign is None:
            raise self.unsupported(node, "'@='", "write the loop over the products")
        number = self.binary(sign, self.load(owner, fixed), self.read_number(node.value))
        self.store(owner, fixed, number)

    def _nested(self, node: ast.FunctionDef) -> None:
        if node.decorator_list:
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and (decorator.args or decorator.keywords):
                    raise self.unsupported(decorator, "an option of a nested function", "remove it, or define the function outside the kernel")
                found = self.read(decorator.func if isinstance(decorator, ast.Call) else decorator)
                if not isinstance(found, WordValue) or found.name not in ("device", "inline_always"):
                    raise self.unsupported(decorator, "this decorator", "nested functions take @tw.device or none")
        self.assign(node.name, DeviceFunction(self.scope.source, node, node.name, self.scope))

    def _assert(self, node: ast.Assert) -> None:
        test = self.number(self.test(node.test), "the condition of an assert")
        read_assert(self, test, ast.unparse(node.test), None if node.msg is None else self.read(node.msg))

    def _pass(self, node: ast.stmt) -> None:
        return

    def _break(self, node: ast.Break) -> None:
        loop = self.scope.loops[-1]
        loop.left.append(frozenset(self.scope.variables) - self.scope.missing)
        self._raise_flag(f"$break{loop.number}")
        self.scope.dead = True

    def _continue(self, node: ast.Continue) -> None:
        self._raise_flag(f"$continue{self.scope.loops[-1].number}")
        self.scope.dead = True

    def _return(self, node: ast.Return) -> None:
        val = NOTHING if node.value is None else self.read(node.value)
        if not self.calls and val != NOTHING:
            raise self.fail("a kernel returns nothing", "write the result into an array it is given")
        if self.calls:
            self.assign(RESULT, val)
        self._raise_flag(RETURN)
        self.scope.dead = True

    def _if_statement(self, node: ast.If) -> None:
        test = self.test(node.test)
        with self.b.at(self.span(node.test)):
            condition = self.truth(test)
        self.branch(condition, lambda: self.block(node.body), lambda: self.block(node.orelse))

    # -- device functions -----------------------------------------------------------------------------------------

    def call_device(self, called: DeviceFunction, given: Arguments, span: Span) -> Val:
        if any(known is called.node for known, _ in self.calls) or called.node is self.scope.source.node:
            raise self.fail(f"'{called.name}' calls itself", "write a loop: kernels have no recursion")
        arguments = called.node.args
        for extra, star in ((arguments.vararg, "*"), (arguments.kwarg, "**")):
            if extra is not None:
                raise self.fail(
                    f"'{called.name}' takes '{star}{extra.arg}', which device functions cannot", "name every parameter"
                )
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        count = len(arguments.posonlyargs) + len(arguments.args)
        defaults: list[ast.expr | None] = [None] * (count - len(arguments.defaults))
        defaults += [*arguments.defaults, *arguments.kw_defaults]
        key = (*self.scope.key, "call", span.line, span.column, called.name)
        caller, inner = self.scope, SimtScope(key, called.source, called.outer, called.node)
        self.scope = inner
        self.calls.append((called.node, span))
        try:
            standing = {p.arg: self.read(d) for p, d in zip(parameters, defaults, strict=True) if d is not None}
            bound = bind(self, f"'{called.name}'", [p.arg for p in parameters], given, dict(standing))
            for parameter in parameters:
                self.assign(parameter.arg, self._parameter(called.name, parameter, bound[parameter.arg]))
            if isinstance(called.node, ast.Lambda):
                return self.read(called.node.body)
            if self._flag(RETURN) in self.types.flags:
                inner.variables[RETURN] = literal(False)
            before = len(self.collected or ())
            self.block(called.node.body)
            if self.collected is not None and len(self.collected) > before:
                raise UserError(*list(self.collected)[before:])  # what it would have given is not known
            return self._result(called, span)
        finally:
            self.calls.pop()
            self.scope = caller

    def _parameter(self, function: str, parameter: ast.arg, val: Val) -> Val:
        dtype = as_dtype(self.read(parameter.annotation)) if parameter.annotation is not None and isinstance(val, NumberValue) else None
        if dtype is None:
            return val
        assert isinstance(val, NumberValue)
        return self.convert(val, dtype, f"'{parameter.arg}' of '{function}'")

    def _result(self, called: DeviceFunction, span: Span) -> Val:
        if self.scope.variables.get(RESULT, NOTHING) == NOTHING:
            return NOTHING  # `return` alone, on some ways or on all
        if not self.scope.dead:
            raise self.error("TW017", f"'{called.name}' may end without a result", span, "return a value on every way")
        val = self.scope.variables[RESULT]
        returns = called.node.returns if isinstance(called.node, ast.FunctionDef) else None
        dtype = as_dtype(self.read(returns)) if returns is not None and isinstance(val, NumberValue) else None
        return val if dtype is None or not isinstance(val, NumberValue) else self.convert(val, dtype, f"the result of '{called.name}'")


def _renamed(memory: MemoryValue, name: str) -> MemoryValue:
    object.__setattr__(memory.value, "name", name)
    return MemoryValue(name, memory.value, memory.given)


_HANDLERS: dict[type[ast.stmt], Callable[[Statements, Any], None]] = {
    ast.Assert: Statements._assert, ast.Expr: Statements._expression, ast.Assign: Statements._assignment, ast.AnnAssign: Statements._annotated,
    ast.AugAssign: Statements._augmented, ast.FunctionDef: Statements._nested, ast.Pass: Statements._pass,
    ast.Break: Statements._break, ast.Continue: Statements._continue, ast.Return: Statements._return, ast.If: Statements._if_statement,
    ast.While: Statements._while_statement, ast.For: Statements._for_statement,
}  # fmt: skip
