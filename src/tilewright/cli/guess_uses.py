"""The rank of an input that nothing indexes: from what is computed from it.

In: an untyped tree and a name. Out: the rank, where an operand of `@` or an array that is reduced or indexed can have come from
this name alone; None where it may be a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tilewright.tree import syntax
from tilewright.tree.syntax import Node
from tilewright.zyn.host.values import ELEMENTWISE


def rank_of_use(name: str, root: Node, nodes: Sequence[Node], rank_in: Callable[[str, Node], int | None]) -> int | None:
    """`nodes` are those of the tree, `rank_in(name, root)` the rank that indices and other plain uses show."""

    def shown(other: str) -> int | None:
        return rank_in(other, root) or _operand(other, nodes)

    return _operand(name, nodes) or _computed(name, nodes, frozenset({name}), shown)


def _operand(name: str, nodes: Sequence[Node]) -> int | None:
    """2 for what a matrix product takes."""
    products = [node for node in nodes if isinstance(node, syntax.Binary) and node.op == "@"]
    return 2 if any(isinstance(o, syntax.Name) and o.id == name for node in products for o in (node.left, node.right)) else None


def _computed(name: str, nodes: Sequence[Node], seen: frozenset[str], shown: Callable[[str], int | None]) -> int | None:
    """The rank it must have because what is computed from it by elements is an array; None where another may be the reason."""
    for node in nodes:
        if isinstance(node, syntax.ReduceExpr):
            target, value = "", node.value
        elif isinstance(node, syntax.Let) and node.value is not None and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, syntax.Assign) and isinstance(node.target, syntax.Name):
            target, value = node.target.id, node.value
        else:
            continue
        leaves = set(_leaves(value))
        if name not in leaves or "" in leaves or target in seen:
            continue
        if any(shown(leaf) is not None for leaf in leaves - {name, target}):
            continue
        if not target:
            return 1
        found = shown(target) or _computed(target, nodes, seen | {target}, shown)
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
