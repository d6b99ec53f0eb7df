"""Results that nobody uses: warnings, not errors.

In: an untyped program, or a kernel from Python. Out: a warning (TW019) for each statement whose value goes nowhere, and for each name
declared in a function or kernel that nothing reads. Names at a program's top level are its results; names that begin with `_` are
meant to be left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tilewright.base.errors import Diagnostic
from tilewright.tree import syntax
from tilewright.tree.inline import nodes
from tilewright.tree.syntax import Expr, Node, Stmt

_VALUES = (
    syntax.Number, syntax.Bool, syntax.Name, syntax.Index, syntax.Unary, syntax.Binary, syntax.IfExpr, syntax.Tuple, syntax.List,
    syntax.Record, syntax.ReduceExpr,
)  # fmt: skip


def unused(root: syntax.Module | syntax.Function) -> list[Diagnostic]:
    """The warnings, in order of their places."""
    found: list[Diagnostic] = []
    if isinstance(root, syntax.Module):
        found += _statements(root.body)
        bodies: Iterable[Sequence[Stmt]] = _bodies(root)
    else:
        bodies = (root.body,)
    for body in bodies:
        found += [*_statements(_every_statement(body)), *_names(body)]
    return sorted(dict.fromkeys(found), key=lambda d: (d.span.line, d.span.column))


def _bodies(root: Node) -> Iterator[Sequence[Stmt]]:
    """The bodies of functions and kernels that are in no other."""
    for node in _outermost(root):
        yield node.body


def _outermost(item: object) -> Iterator[syntax.Function | syntax.Compute]:
    inside = 0
    for node in nodes(item):
        if isinstance(node, syntax.Function | syntax.Compute):
            # `nodes` goes from the outside in: those inside this one come next.
            if inside:
                inside -= 1
                continue
            inside = sum(isinstance(n, syntax.Function | syntax.Compute) for n in nodes(node)) - 1
            yield node


def _every_statement(body: Sequence[Stmt]) -> list[Stmt]:
    return [node for node in nodes(tuple(body)) if isinstance(node, syntax.ExprStmt)]


def _statements(body: Sequence[Stmt]) -> Iterator[Diagnostic]:
    for stmt in body:
        if isinstance(stmt, syntax.ExprStmt) and (what := _valuable(stmt.value)):
            yield Diagnostic("TW019", f"the result of this {what} is not used", stmt.span, "name it: let result = …", "warning")


def _valuable(value: Expr) -> str:
    """What an expression is, if it is good for nothing but its value."""
    while isinstance(value, syntax.Pipe):
        value = value.value
    if isinstance(value, syntax.Compute):
        return "" if value.in_place else "block"
    return "expression" if isinstance(value, _VALUES) else ""


def _names(body: Sequence[Stmt]) -> Iterator[Diagnostic]:
    written = {id(n.target) for n in nodes(tuple(body)) if isinstance(n, syntax.Assign) and isinstance(n.target, syntax.Name)}
    read = {n.id for n in nodes(tuple(body)) if isinstance(n, syntax.Name) and id(n) not in written}
    for node in nodes(tuple(body)):
        if isinstance(node, syntax.Let) and not any(name in read or name.startswith("_") for name in node.targets):
            names = " and ".join(f"'{name}'" for name in node.targets)
            verb = "is" if len(node.targets) == 1 else "are"
            yield Diagnostic("TW019", f"{names} {verb} never used", node.span, "leave it out, or let its name begin with _", "warning")
