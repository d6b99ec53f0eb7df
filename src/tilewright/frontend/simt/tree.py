"""Questions about Python's own tree that explicit kernels ask: which names are assigned, where control flow leaves."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def local_names(node: ast.FunctionDef | ast.Lambda) -> frozenset[str]:
    """The names a function assigns to, its parameters included."""
    found = getattr(node, "_simt_locals", None)
    if found is None:
        names = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        for part in node.body if isinstance(node, ast.FunctionDef) else [node.body]:
            names |= stored_names(part)
        found = frozenset(names)
        node._simt_locals = found  # type: ignore[union-attr]
    return found


def stored_names(node: ast.AST) -> set[str]:
    """Names that a statement or expression assigns to, but for those inside functions it defines."""
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.Lambda):
        return set()
    found = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()
    for child in ast.iter_child_nodes(node):
        found |= stored_names(child)
    return found


def loop_number(node: ast.AST) -> int:
    """A loop's number: the same whenever it is read."""
    return node.lineno * 1000 + node.col_offset  # type: ignore[attr-defined, no-any-return]


def jumps(node: ast.AST, own: bool = False) -> frozenset[type]:
    """How a statement may go on elsewhere: break and continue of the loop around it, and return. `own`: of this loop itself."""
    if isinstance(node, ast.FunctionDef | ast.Lambda) and not own:
        return frozenset()
    if isinstance(node, ast.Break | ast.Continue | ast.Return):
        return frozenset({type(node)})
    found: set[type] = set()
    for child in ast.iter_child_nodes(node):
        found |= jumps(child)
    if isinstance(node, ast.For | ast.While) and not own:
        found -= {ast.Break, ast.Continue}
    return frozenset(found)


def _ends_block(statements: Sequence[ast.stmt]) -> bool:
    """Whether what stands after these statements is never reached from them."""
    return any(
        isinstance(s, ast.Return | ast.Break | ast.Continue)
        or (isinstance(s, ast.If) and _ends_block(s.body) and _ends_block(s.orelse))
        for s in statements
    )


def goes_on_once(node: ast.If) -> bool:
    """Whether exactly one of the branches never goes on."""
    return _ends_block(node.body) != _ends_block(node.orelse)


def with_rest(node: ast.If, rest: Sequence[ast.stmt]) -> ast.If:
    """The statements that follow become part of the branch that goes on."""
    body, orelse = (node.body, [*node.orelse, *rest]) if _ends_block(node.body) else ([*node.body, *rest], node.orelse)
    return ast.copy_location(ast.If(node.test, body, orelse), node)


def names_outside(function: ast.AST, loop: ast.AST) -> set[str]:
    """Names read in a function outside a loop."""
    if function is loop:
        return set()
    found = {function.id} if isinstance(function, ast.Name) and isinstance(function.ctx, ast.Load) else set()
    for child in ast.iter_child_nodes(function):
        found |= names_outside(child, loop)
    return found
