"""After which statements of a ZynML program nothing runs.

In: a statement around kernels. Out: why what follows it is never reached, or nothing where it may be.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.tree import syntax
from tilewright.tree.inline import nodes
from tilewright.tree.syntax import Stmt


def leaves(node: Stmt) -> str:
    """Why the statement after this one is never reached; empty if it can be."""
    if isinstance(node, syntax.Return):
        return f"line {node.span.line} has returned"
    if isinstance(node, syntax.Break | syntax.Continue):
        return f"line {node.span.line} has left the loop, or this turn of it"
    if isinstance(node, syntax.If) and _leaves(node.then) and _leaves(node.otherwise):
        jumps = any(isinstance(part, syntax.Break | syntax.Continue) for part in nodes((node.then, node.otherwise)))
        return f"both ways through the if of line {node.span.line} have {'left' if jumps else 'returned'}"
    if isinstance(node, syntax.While) and isinstance(node.cond, syntax.Bool) and node.cond.value:
        if any(isinstance(part, syntax.Break) for part in nodes(node.body)):
            return ""
        ends = any(isinstance(part, syntax.Return) for part in nodes(node.body))
        return f"the loop of line {node.span.line} {'is left only by return' if ends else 'never ends'}"
    return ""


def _leaves(body: Sequence[Stmt]) -> bool:
    return any(leaves(statement) for statement in body)
