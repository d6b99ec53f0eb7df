"""Reductions in loops of ordinary Python code: names that every iteration combines something into, and does nothing else with.

In: the statements of a marked loop and a name that it carries from one iteration to the next. Out: the operation that combines, or the
two lines that stand against it. Statements that combine are

    total += f    total = total - f + g       sum: every iteration adds
    scale *= f    scale = scale / f           product
    best = max(best, f)    best = min(f, best)
    ok = ok and f          some = some or f
    bits &= f     bits |= f     bits ^= f

One name is combined by one operation in the whole loop.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BINARY: dict[type[ast.operator], tuple[str, bool]] = {
    ast.Add: ("+", True), ast.Sub: ("+", False), ast.Mult: ("*", True), ast.Div: ("*", False),
    ast.BitAnd: ("&", True), ast.BitOr: ("|", True), ast.BitXor: ("^", True),
}  # fmt: skip
"""What an operator combines by, and whether the name may stand on its right."""
EXTREMES = {"max": "max", "maximum": "max", "min": "min", "minimum": "min"}


@dataclass(frozen=True, eq=False)
class LoopReduction:
    """A name and what combines it: one of + * max min and or & | ^."""

    name: str
    operation: str
    functions: tuple[ast.expr, ...]
    """What is called as `max` or `min`."""
    place: ast.stmt


@dataclass(frozen=True, eq=False)
class NoReduction:
    """Why a name is not combined: where it is written, and where it is read or combined by something else."""

    write: ast.AST
    read: ast.AST
    operations: tuple[str, str] | None = None
    """Those of both places, where they differ."""


def find_reduction(name: str, body: Sequence[ast.stmt]) -> LoopReduction | NoReduction:
    """What a loop does to a name that it carries."""
    statements: list[tuple[ast.stmt, str]] = []
    functions: list[ast.expr] = []
    inside: set[int] = set()
    for stmt in _statements(body):
        operation = _combined(name, stmt, functions)
        if operation is not None:
            statements.append((stmt, operation))
            inside |= {id(node) for node in _uses(name, stmt)}
    uses = [node for stmt in body for node in _uses(name, stmt)]
    others = [node for node in uses if id(node) not in inside]
    writes = [node for node in others if not _is_read(node)]
    reads = [node for node in others if _is_read(node)]
    if not statements or others:
        first = statements[0][0] if statements else None
        write = writes[0] if writes else first
        assert write is not None
        return NoReduction(write, reads[0] if reads else first or write)
    first, operation = statements[0]
    for stmt, other in statements:
        if other != operation:
            return NoReduction(first, stmt, (operation, other))
    return LoopReduction(name, operation, tuple(functions), first)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements and those inside them, but not those of functions."""
    for stmt in body:
        yield stmt
        if not isinstance(stmt, ast.FunctionDef):
            for part in ("body", "orelse"):
                yield from _statements(getattr(stmt, part, ()))


def _uses(name: str, node: ast.AST) -> list[ast.AST]:
    found = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]
    return [*found, *(n for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n.name == name)]


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _combined(name: str, stmt: ast.stmt, functions: list[ast.expr]) -> str | None:
    """What the statement combines the name by, where it only does that."""
    if isinstance(stmt, ast.AugAssign):
        own = isinstance(stmt.target, ast.Name) and stmt.target.id == name
        return _BINARY.get(type(stmt.op), (None, False))[0] if own and not _uses(name, stmt.value) else None
    if not isinstance(stmt, ast.Assign) or len(stmt.targets) != 1:
        return None
    target = stmt.targets[0]
    if not isinstance(target, ast.Name) or target.id != name or len(_uses(name, stmt.value)) != 1:
        return None
    called: list[ast.expr] = []
    operation = _path(name, stmt.value, called)
    if operation:
        functions += called
    return operation or None


def _path(name: str, node: ast.expr, called: list[ast.expr]) -> str | None:
    """The operation that leads from an expression down to the name: empty at the name itself, None where there is no single one."""
    if isinstance(node, ast.Name):
        return "" if node.id == name else None
    parts: list[ast.expr]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        operation, both = _BINARY[type(node.op)]
        parts = [node.left, node.right] if both else [node.left]
    elif isinstance(node, ast.BoolOp):
        operation, parts = "and" if isinstance(node.op, ast.And) else "or", node.values
    elif isinstance(node, ast.Call) and not node.keywords and len(node.args) > 1 and _called(node.func) in EXTREMES:
        operation, parts = EXTREMES[_called(node.func)], node.args
        called.append(node.func)
    else:
        return None
    inner = next((_path(name, part, called) for part in parts if _uses(name, part)), None)
    return operation if inner in ("", operation) else None


def _called(function: ast.expr) -> str:
    """The name of a function, with or without its module."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
