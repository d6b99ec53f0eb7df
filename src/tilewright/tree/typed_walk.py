"""Walking the typed tree: what is inside expressions and statements, and which variables statements assign."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.tree.typed import (
    Accumulate,
    Apply,
    ArrayAssign,
    Cast,
    Choose,
    Element,
    Expr,
    Fold,
    Masked,
    Picked,
    Product,
    Reduce,
    ReduceLoop,
    SetVar,
    Stmt,
    Store,
    Transpose,
    TypedAssert,
    TypedBarrier,
    TypedIf,
    TypedLoop,
    TypedPrint,
    TypedTurns,
    TypedView,
    TypedWhile,
    Variable,
)


def children(expr: Expr) -> tuple[Expr, ...]:
    """The expressions directly inside."""
    if isinstance(expr, Apply):
        return expr.args
    if isinstance(expr, Cast | Reduce | Transpose | Fold):
        return (expr.value,)
    if isinstance(expr, Product):
        return (expr.left, expr.right)
    if isinstance(expr, TypedView):
        return expr.starts
    if isinstance(expr, Masked):
        return (expr.value, expr.mask)
    if isinstance(expr, Picked):
        return (expr.value, *(e for axis in expr.axes for e in (axis.start, axis.index) if e is not None))
    if isinstance(expr, Choose):
        return (expr.cond, expr.then, expr.otherwise)
    if isinstance(expr, Element):
        return expr.indices
    return ()


def walk_expr(expr: Expr) -> Iterator[Expr]:
    """The expression and everything inside it."""
    yield expr
    for child in children(expr):
        yield from walk_expr(child)


def own_exprs(stmt: Stmt) -> tuple[Expr, ...]:
    """The expressions of a statement, not those of statements inside it."""
    if isinstance(stmt, SetVar | Accumulate | ArrayAssign):
        return (stmt.value,)
    if isinstance(stmt, Store):
        return (*stmt.indices, stmt.value)
    if isinstance(stmt, TypedLoop):
        return tuple(e for v in stmt.vars for e in (v.lo, v.hi))
    if isinstance(stmt, ReduceLoop):
        return tuple(e for v in (*stmt.outer, *stmt.inner) for e in (v.lo, v.hi))
    if isinstance(stmt, TypedWhile | TypedIf | TypedAssert):
        return (stmt.cond,)
    if isinstance(stmt, TypedBarrier | TypedTurns):
        return ()
    if isinstance(stmt, TypedPrint):
        return stmt.values
    return (stmt.value,) if stmt.index is None else (stmt.value, stmt.index)


def bodies(stmt: Stmt) -> tuple[tuple[Stmt, ...], ...]:
    """The statement lists directly inside."""
    if isinstance(stmt, TypedLoop | ReduceLoop | TypedWhile):
        return (stmt.body,)
    if isinstance(stmt, TypedIf):
        return (stmt.then, stmt.otherwise)
    return stmt.bodies if isinstance(stmt, TypedTurns) else ()


def walk(stmts: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Every statement, outer before inner, in order."""
    for stmt in stmts:
        yield stmt
        for body in bodies(stmt):
            yield from walk(body)


def exprs_in(stmts: tuple[Stmt, ...]) -> Iterator[Expr]:
    """Every expression of every statement, with everything inside."""
    for stmt in walk(stmts):
        for expr in own_exprs(stmt):
            yield from walk_expr(expr)


def assigned(stmts: tuple[Stmt, ...]) -> tuple[Variable, ...]:
    """Variables of an outer scope that these statements set, in order of first setting."""
    declared: set[Variable] = set()
    found: dict[Variable, None] = {}
    for stmt in walk(stmts):
        if isinstance(stmt, SetVar) and stmt.declares:
            declared.add(stmt.var)
        elif isinstance(stmt, SetVar | Accumulate) and stmt.var not in declared:
            found[stmt.var] = None
    return tuple(found)
