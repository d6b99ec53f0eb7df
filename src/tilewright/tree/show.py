"""Print an untyped tree as text, for `--stage syntax` and for tests.

In: a module, a statement, an expression. Out: text in ZynML's syntax with every operation in parentheses, so that the structure can be
seen. For a module the text parses back to the same tree. Python kernels print as `kernel name(…)`, with `grid` or `range` behind the
`for` where the loop's kind is fixed.
"""

from __future__ import annotations

import math

from tilewright.tree import syntax
from tilewright.tree.syntax import Argument, Expr, KernelAttribute, Stmt

_REDUCTIONS = {"add": "+", "mul": "*"}
_UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1}
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0", "\\": "\\\\", '"': '\\"'}
_LOOPS = {"yes": "for grid", "no": "for range", "auto": "for"}


def show(node: syntax.Module | Stmt) -> str:
    """The text of a module or statement, ending in a newline."""
    statements = node.body if isinstance(node, syntax.Module) else (node,)
    lines = [line for statement in statements for line in _statement(statement)]
    return "".join(line + "\n" for line in lines)


def _block(body: tuple[Stmt, ...]) -> list[str]:
    return ["    " + line for statement in body for line in _statement(statement)]


def _braces(head: str, body: tuple[Stmt, ...]) -> list[str]:
    return [head + " {", *_block(body), "}"]


def _statement(node: Stmt) -> list[str]:
    if isinstance(node, syntax.Let):
        return _let(node).split("\n")
    if isinstance(node, syntax.Assign):
        op = "/" if node.op == "zdiv" else node.op
        return f"{_target(node.target)} {op}= {_expression(node.value)}".split("\n")
    if isinstance(node, syntax.For):
        return _braces(_for_head(node), node.body)
    if isinstance(node, syntax.While):
        return _braces(f"while {_expression(node.cond)}", node.body)
    if isinstance(node, syntax.If):
        lines = _braces(f"if {_expression(node.cond)}", node.then)
        return lines if not node.otherwise else [*lines[:-1], "} else {", *_block(node.otherwise), "}"]
    if isinstance(node, syntax.Assert):
        return [f"assert({_expression(node.cond)}, {_string(node.text)})"]
    if isinstance(node, syntax.Print):
        return [f"print({', '.join([_string(node.text), *map(_expression, node.values)])})"]
    if isinstance(node, syntax.Break | syntax.Continue):
        return ["break" if isinstance(node, syntax.Break) else "continue"]
    if isinstance(node, syntax.Yield):
        return f"yield {_expression(node.value)}".split("\n")
    if isinstance(node, syntax.Return):
        return ["return"] if node.value is None else f"return {_expression(node.value)}".split("\n")
    if isinstance(node, syntax.Made):
        return [f"{'made' if node.done else 'makes'} {', '.join(node.names)}"]
    if isinstance(node, syntax.ReduceNest):
        axes = "" if node.axes is None else f", axis={list(node.axes)}"
        return _braces(f"{node.name} = reduce({_REDUCTIONS.get(node.op, node.op)}{axes})", (node.loop,))
    if isinstance(node, syntax.Expect):
        return [f"expect {_expression(node.value)}{'' if node.type is None else f': {_expression(node.type)}'}"]
    if isinstance(node, syntax.ExprStmt):
        return _expression(node.value).split("\n")
    if isinstance(node, syntax.Function):
        return _function(node)
    if isinstance(node, syntax.Config):
        return ["config {", *(f"    {name}: {_expression(value)}" for name, value in node.fields), "}"]
    return [f'import {_string(node.path)}{f" as {node.alias}" if node.alias else ""}']


def _let(node: syntax.Let) -> str:
    annotation = "" if node.type is None else f": {_expression(node.type)}"
    if node.shared:
        return f"shared var {node.targets[0]}[{', '.join(_expression(e) for e in node.extents)}]{annotation}"
    names = f"({', '.join(node.targets)})" if node.destructure else node.targets[0]
    word = "var" if node.mutable else "let"
    return f"{word} {names}{annotation} = {'' if node.value is None else _expression(node.value)}"


def _for_head(node: syntax.For) -> str:
    if node.over is not None:
        names = node.vars[0] if len(node.vars) == 1 else f"({', '.join(node.vars)})"
        return f"for {names} in {_expression(node.over)}"
    return f"{_LOOPS[node.parallel]} " + ", ".join(f"{name} in {_range(r)}" for name, r in zip(node.vars, node.ranges)) + (f" until {node.until}" if node.until else "")


def _range(node: syntax.RangeExpr) -> str:
    step = "" if node.step is None else f" step {_operand(node.step)}"
    return f"{_operand(node.lo)}{'..=' if node.inclusive else '..'}{_operand(node.hi)}{step}"


def _function(node: syntax.Function) -> list[str]:
    word = {"function": "fn"}.get(node.kind, node.kind)
    params = ", ".join(_param(p) for p in node.params)
    result = "" if node.result is None else f" -> {_expression(node.result)}"
    return [*(_attribute(a) for a in node.attributes), *_braces(f"{word} {node.name}({params}){result}", node.body)]


def _param(node: syntax.Param) -> str:
    annotation = "" if node.type is None else f": {_expression(node.type)}{' | none' if node.optional else ''}"
    default = "" if node.default is None else f" = {_expression(node.default)}"
    return f"{'inout ' if node.in_place else ''}{node.name}{annotation}{default}"


def _attribute(node: KernelAttribute) -> str:
    if node.name == "kernel" and len(node.args) == 1:
        kind = node.args[0].value
        if isinstance(kind, syntax.Name):
            return f"@kernel {kind.id}"
        if isinstance(kind, syntax.Call) and isinstance(kind.function, syntax.Name):
            return f"@kernel {kind.function.id}({', '.join(_kind_argument(a) for a in kind.args)})"
    return f"@{node.name}({', '.join(_kind_argument(a) for a in node.args)})" if node.args else f"@{node.name}"


def _kind_argument(node: Argument) -> str:
    if isinstance(node.value, syntax.Name) and node.keyword is None:
        return _REDUCTIONS.get(node.value.id, node.value.id)
    return _argument(node)


def _argument(node: Argument) -> str:
    return _expression(node.value) if node.keyword is None else f"{node.keyword}={_expression(node.value)}"


def _target(node: Expr) -> str:
    return _expression(node)


def _operand(node: Expr) -> str:
    """The text of an expression where only something closed can stand."""
    text = _expression(node)
    return f"({text})" if isinstance(node, syntax.Pipe | syntax.Await | syntax.Compute) else text


def _expression(node: Expr) -> str:
    if isinstance(node, syntax.Number):
        return _number(node)
    if isinstance(node, syntax.Bool):
        return "true" if node.value else "false"
    if isinstance(node, syntax.String):
        return _string(node.value)
    if isinstance(node, syntax.Nothing):
        return "none"
    if isinstance(node, syntax.IsNone):
        return f"({_operand(node.value)} is {'not ' if node.negated else ''}none)"
    if isinstance(node, syntax.Name):
        return node.id
    if isinstance(node, syntax.Attribute):
        return f"{_operand(node.value)}.{node.name}"
    if isinstance(node, syntax.Index):
        return f"{_operand(node.value)}[{', '.join(_expression(i) for i in node.indices)}]"
    if isinstance(node, syntax.Slice):
        step = "" if node.step is None else f":{_expression(node.step)}"
        return f"{'' if node.lo is None else _expression(node.lo)}:{'' if node.hi is None else _expression(node.hi)}{step}"
    if isinstance(node, syntax.Rest):
        return "..."
    if isinstance(node, syntax.Call):
        return f"{_operand(node.function)}({', '.join(_argument(a) for a in node.args)})"
    if isinstance(node, syntax.Unary):
        return f"(not {_operand(node.operand)})" if node.op == "not" else f"({node.op}{_operand(node.operand)})"
    if isinstance(node, syntax.Binary):
        return f"({_operand(node.left)} {'/' if node.op == 'zdiv' else node.op} {_operand(node.right)})"
    if isinstance(node, syntax.IfExpr):
        return f"({_operand(node.then)} if {_operand(node.cond)} else {_operand(node.otherwise)})"
    if isinstance(node, syntax.Tuple):
        return f"({', '.join(_expression(i) for i in node.items)}{',' if len(node.items) == 1 else ''})"
    if isinstance(node, syntax.List):
        return f"[{', '.join(_expression(i) for i in node.items)}]"
    if isinstance(node, syntax.Record):
        return f"{{{', '.join(f'{name}: {_expression(value)}' for name, value in node.fields)}}}"
    if isinstance(node, syntax.Pipe):
        return f"{_operand(node.value) if isinstance(node.value, syntax.Await) else _expression(node.value)} |> {_expression(node.call)}"
    if isinstance(node, syntax.ReduceExpr):
        axis = "" if node.axis is None else f", axis={_expression(node.axis)}"
        return f"reduce({_REDUCTIONS.get(node.op, node.op)}, {_expression(node.value)}{axis})"
    if isinstance(node, syntax.Await):
        value = f"{node.mode}({_expression(node.value)})" if node.mode != "one" else _operand(node.value)
        tail = "" if node.timeout is None or node.otherwise is None else f" timeout {_operand(node.timeout)} else {_operand(node.otherwise)}"
        return f"await {value}{tail}"
    if isinstance(node, syntax.Callee):
        return node.function.name
    if isinstance(node, syntax.Broken):
        return "<unread>"
    if isinstance(node, syntax.StructType):
        return node.layout.name
    return _compute(node)


def _compute(node: syntax.Compute) -> str:
    given = (("inout " if isinstance(i, syntax.Name) and i.id in node.in_place else "") + _expression(i) for i in node.inputs)
    head = f"compute({', '.join(given)}) {{"
    attributes = ["    " + _attribute(a) for a in node.attributes]
    return "\n".join([head, *attributes, *_block(node.body), "}"])


def _number(node: syntax.Number) -> str:
    if isinstance(node.value, complex):
        return repr(node.value)
    if node.unit:
        scaled = node.value / _UNITS[node.unit]
        return f"{int(scaled) if scaled == int(scaled) else scaled}{node.unit}"
    if isinstance(node.value, float) and not math.isfinite(node.value):
        return "nan" if math.isnan(node.value) else "inf" if node.value > 0 else "(-inf)"
    return repr(node.value) if node.value >= 0 else f"({node.value!r})"


def _string(value: str) -> str:
    return '"' + "".join(_ESCAPES.get(c, c) for c in value) + '"'
