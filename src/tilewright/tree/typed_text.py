"""The typed tree as text, for `--stage typed`, for messages and for tests.

In: a kernel or an expression. Out: text that is read, not parsed.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.base.sizes import without_marks
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
    Fold,
    IndexRef,
    Local,
    LoopVar,
    Masked,
    Picked,
    Product,
    Reduce,
    ReduceLoop,
    ScalarRef,
    SetVar,
    SizeValue,
    Stmt,
    Store,
    TileLocal,
    Transpose,
    TypedAssert,
    TypedBarrier,
    TypedIf,
    TypedKernel,
    TypedLoop,
    TypedPrint,
    TypedTurns,
    TypedView,
    TypedWhile,
    Whole,
)

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "eq": "==", "ne": "!=", "lt": "<",
    "le": "<=", "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip


def show_expr(expr: Expr) -> str:
    """The expression as text; a conversion is written `dtype(value)`."""
    text = _nested(expr)
    bracketed = isinstance(expr, Choose | SizeValue) or (isinstance(expr, Apply) and expr.op in _INFIX)
    return text[1:-1] if bracketed and text.startswith("(") else text


def _nested(expr: Expr) -> str:
    """The expression as it stands inside another one."""
    if isinstance(expr, Const):
        return str(expr.value).lower() if isinstance(expr.value, bool) else repr(expr.value)
    if isinstance(expr, SizeValue):
        text = without_marks(str(expr.size))
        return text if expr.size.name or expr.size.constant is not None else f"({text})"
    if isinstance(expr, IndexRef | Local | TileLocal):
        return expr.var.name
    if isinstance(expr, TypedView):
        return f"{expr.array.name}[{', '.join(map(show_expr, expr.starts))}, …]"
    if isinstance(expr, Masked):
        return f"{_nested(expr.value)}[{show_expr(expr.mask)}]"
    if isinstance(expr, AxisIndex):
        return f"#{expr.axis}"
    if isinstance(expr, Picked):
        return f"{_nested(expr.value)}[{_picked(expr)}]"
    if isinstance(expr, Transpose):
        return f"transpose({show_expr(expr.value)})"
    if isinstance(expr, Product):
        return f"({_nested(expr.left)} @ {_nested(expr.right)})"
    if isinstance(expr, ScalarRef):
        return expr.scalar.name
    if isinstance(expr, Element):
        return f"{expr.array.name}[{', '.join(map(show_expr, expr.indices))}]"
    if isinstance(expr, Whole):
        return expr.array.name
    if isinstance(expr, Cast):
        return f"{expr.dtype}({show_expr(expr.value)})"
    if isinstance(expr, Choose):
        return f"({_nested(expr.then)} if {_nested(expr.cond)} else {_nested(expr.otherwise)})"
    if isinstance(expr, Reduce | Fold):
        return f"reduce({expr.kind}, {show_expr(expr.value)}, axes={list(expr.axes)})"
    if expr.op in _INFIX and len(expr.args) == 2:
        return f"({_nested(expr.args[0])} {_INFIX[expr.op]} {_nested(expr.args[1])})"
    if expr.op == "bitcast":
        return f"bitcast({show_expr(expr.args[0])}, {expr.dtype})"
    return f"{expr.op}({', '.join(map(show_expr, expr.args))})"


def _picked(expr: Picked) -> str:
    """What stands in the brackets of a pick."""
    covered = {axis.along + k for axis in expr.axes for k in range(1 if axis.index is None else len(axis.index.shape))}
    items = [(position, "None") for position in range(len(expr.shape)) if position not in covered]
    for axis in expr.axes:
        start = "" if axis.start is None else show_expr(axis.start)
        items.append((axis.along, f"{start}:" + (f":{axis.step}" if axis.step != 1 else "") if axis.index is None else show_expr(axis.index)))
    return ", ".join(text for _, text in sorted(items, key=lambda item: item[0]))


def _show_range(var: LoopVar) -> str:
    step = "" if var.step.constant == 1 else f" step {var.step}"
    return f"{var.name} in {show_expr(var.lo)}..{show_expr(var.hi)}{step}"


def _show_stmts(stmts: tuple[Stmt, ...], indent: str) -> Iterator[str]:
    inner = indent + "    "
    for stmt in stmts:
        if isinstance(stmt, SetVar):
            head = f"var {stmt.var.name}: {stmt.var.dtype}" if stmt.declares else stmt.var.name
            yield f"{indent}{head} = {show_expr(stmt.value)}"
        elif isinstance(stmt, Accumulate):
            yield f"{indent}{stmt.var.name} {stmt.kind}= {show_expr(stmt.value)}"
        elif isinstance(stmt, Store):
            place = f"{stmt.array.name}[{', '.join(map(show_expr, stmt.indices))}]"
            scatter = "  # scatter" if stmt.scatter else ""
            yield f"{indent}{place} {stmt.kind}= {show_expr(stmt.value)}{scatter}"
        elif isinstance(stmt, ArrayAssign):
            yield f"{indent}{stmt.array.name}[...] = {show_expr(stmt.value)}"
        elif isinstance(stmt, TypedLoop):
            until = f" until {stmt.until.name}" if stmt.until is not None else ""
            yield f"{indent}{stmt.kind or 'loop'} {', '.join(map(_show_range, stmt.vars))}{until}:"
            yield from _show_stmts(stmt.body, inner)
        elif isinstance(stmt, ReduceLoop):
            outer = f" for {', '.join(map(_show_range, stmt.outer))}" if stmt.outer else ""
            over = ", ".join(map(_show_range, stmt.inner))
            yield f"{indent}{stmt.array.name} = reduce {stmt.kind} over {over}{outer}:"
            yield from _show_stmts(stmt.body, inner)
        elif isinstance(stmt, TypedAssert):
            yield f"{indent}assert {show_expr(stmt.cond)}, {stmt.text!r}"
        elif isinstance(stmt, TypedPrint):
            yield f"{indent}print {', '.join([repr(stmt.text), *map(show_expr, stmt.values)])}"
        elif isinstance(stmt, TypedWhile):
            yield f"{indent}{stmt.kind}{' ' if stmt.kind else ''}while {show_expr(stmt.cond)}:"
            yield from _show_stmts(stmt.body, inner)
        elif isinstance(stmt, TypedIf):
            yield f"{indent}if {show_expr(stmt.cond)}:"
            yield from _show_stmts(stmt.then, inner)
            if stmt.otherwise:
                yield f"{indent}else:"
                yield from _show_stmts(stmt.otherwise, inner)
        elif isinstance(stmt, TypedTurns):
            for turn, body in enumerate(stmt.bodies):
                yield f"{indent}turn {turn} of {len(stmt.bodies)}:"
                yield from _show_stmts(body, inner)
        elif isinstance(stmt, TypedBarrier):
            yield f"{indent}barrier()"
        else:
            index = f", {show_expr(stmt.index)}" if stmt.index is not None else ""
            yield f"{indent}yield {show_expr(stmt.value)}{index}"


def show(kernel: TypedKernel) -> str:
    """The typed tree as text, for people."""
    params = [f"{p.name}: {p}" if isinstance(p, ArrayInfo) else f"{p.name}: {p.dtype}" for p in kernel.inputs]
    lines = [f"kernel {kernel.name}({', '.join(params)}) -> {', '.join(f'{o.name}: {o}' for o in kernel.outputs)}"]
    lines += [f"    {line}" for line in kernel.metadata.lines()]
    lines += [f"    scratch {s.name}: {s}" for s in kernel.scratch]
    signs = {"eq": "==", "le": "<=", "lt": "<"}
    lines += [f"    check {c.left} {signs[c.relation]} {c.right}" for c in kernel.checks]
    lines += _show_stmts(kernel.body, "    ")
    return "\n".join(lines) + "\n"
