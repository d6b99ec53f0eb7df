"""The rank of an input that nothing indexes: from what is computed from it.

In: an untyped tree and a name. Out: the rank, where an operand of `@` or an array that is reduced or indexed can have come from
this name alone; None where it may be a number.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.api.host_values import ELEMENTWISE
from tilewright.cli import guess
from tilewright.tree import syntax
from tilewright.tree.syntax import Node


def rank_of_use(name: str, root: Node) -> int | None:
    return _operand(name, root) or _computed(name, root, frozenset({name}))


def _rank(name: str, root: Node) -> int | None:
    return guess.rank_in(name, root) or _operand(name, root)


def _operand(name: str, root: Node) -> int | None:
    """2 for what a matrix product takes."""
    products = [node for node in guess.nodes(root) if isinstance(node, syntax.Binary) and node.op == "@"]
    return 2 if any(isinstance(o, syntax.Name) and o.id == name for node in products for o in (node.left, node.right)) else None


def _computed(name: str, root: Node, seen: frozenset[str]) -> int | None:
    """The rank it must have because what is computed from it by elements is an array; None where another may be the reason."""
    for node in guess.nodes(root):
        if isinstance(node, syntax.ReduceExpr):
            target, value = "", node.value
        elif isinstance(node, syntax.Let) and node.value is not None and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, syntax.Assign) and isinstance(node.target, syntax.Name):
            target, value = node.target.id, node.value
        else:
            continue
        leaves = set(_leaves(value))
        if (
            name not in leaves
            or "" in leaves
            or target in seen
            or any(_rank(leaf, root) is not None for leaf in leaves - {name, target})
        ):
            continue
        if not target:
            return 1
        found = _rank(target, root) or _computed(target, root, seen | {target})
        if found is not None:
            return found
    return None


def _leaves(node: syntax.Expr) -> Iterator[str]:
    """Names in arithmetic and in functions of elements; '' for anything else that may be an array."""
    if isinstance(node, syntax.Name):
        yield node.id
    elif isinstance(node, syntax.Binary) and node.op != "@":
        yield from (*_leaves(node.left), *_leaves(node.right))
    elif isinstance(node, syntax.Unary):
        yield from _leaves(node.operand)
    elif isinstance(node, syntax.IfExpr):
        yield from (*_leaves(node.cond), *_leaves(node.then), *_leaves(node.otherwise))
    elif isinstance(node, syntax.Call) and isinstance(node.function, syntax.Name) and node.function.id in ELEMENTWISE:
        for argument in node.args:
            yield from _leaves(argument.value)
    elif not isinstance(node, syntax.Number | syntax.Bool):
        yield ""
