"""What `@kernel kind` claims of a block, held against the statements in it.

In: the kind and the untyped body. Out: an error at the attribute where the body cannot be such a kernel, however it is lowered: a matrix
product, convolution or attention that adds up nothing, an attention without an exponential. Whether sums really are contractions is
asked of the loops later (`passes/choose/hints.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.errors import Diagnostics
from tilewright.tree import syntax
from tilewright.tree.inline import nodes
from tilewright.tree.metadata import CONTRACTIONS, KernelKind
from tilewright.tree.names import is_output
from tilewright.tree.syntax import Expr, KernelAttribute, Node, Stmt

_ATTENTION = (KernelKind.ATTENTION, KernelKind.FLASH_ATTENTION)
_SUMMING = (*CONTRACTIONS, KernelKind.CONV2D_DEPTHWISE, *_ATTENTION)
_SUMS = frozenset({"dot", "matmul", "sum", "row_sum", "reduce", "fma"})
_EXPONENTIALS = frozenset({"exp", "exp2", "softmax", "sigmoid"})


def check_claim(kind: KernelKind, attributes: Sequence[KernelAttribute], body: Sequence[Stmt], sink: Diagnostics) -> None:
    """Report a kind that the body contradicts."""
    if kind not in _SUMMING:
        return
    inside = list(nodes(tuple(body)))
    called = {_called(node) for node in inside if isinstance(node, syntax.Call)}
    if "" in called:
        return  # a function whose body is elsewhere
    span = next(a.span for a in attributes if a.name == "kernel")
    if not called & _SUMS and not any(_adds_up(node) for node in inside):
        sink.error("TW012", f"@kernel {kind.value}, but the block adds up nothing", span, "accumulate with +=, or name another @kernel kind")
    elif kind in _ATTENTION and not called & _EXPONENTIALS:
        sink.error("TW012", f"@kernel {kind.value}, but the block weighs nothing: it has no exp", span, "name another @kernel kind")
    elif kind is KernelKind.BATCHED_MATMUL and any(_adds_products(node) for node in inside):
        for name in dict.fromkeys(_flat(node) for node in inside if _flat(node)):
            sink.error("TW012", f"@kernel batched_matmul, but '{name}' has two axes and no batch", span, "name it @kernel matmul")


def _flat(node: Node) -> str:
    """The result of two axes of which it stores single elements; '' where it does something else."""
    if not isinstance(node, syntax.Assign) or not isinstance(node.target, syntax.Index) or not isinstance(node.target.value, syntax.Name):
        return ""
    name, indices = node.target.value.id, node.target.indices
    return name if is_output(name) and len(indices) == 2 and not any(isinstance(i, syntax.Slice) for i in indices) else ""


def _adds_products(node: Node) -> bool:
    return isinstance(node, syntax.Assign) and _adds_up(node) and any(isinstance(n, syntax.Binary) and n.op == "*" for n in nodes((node.value,)))


def _called(node: syntax.Call) -> str:
    """The function of the language that is called; '' for one of the program."""
    return node.function.id if isinstance(node.function, syntax.Name) else ""


def _adds_up(node: Node) -> bool:
    if isinstance(node, syntax.Assign):
        return node.op == "+" or (isinstance(node.value, syntax.Binary) and node.value.op == "+" and _mentions(node.value, node.target))
    return isinstance(node, syntax.ReduceExpr | syntax.ReduceNest) or (isinstance(node, syntax.Binary) and node.op == "@")


def _mentions(value: Expr, target: Expr) -> bool:
    return any(node == target for node in nodes(value))
