"""Variables: the type that all assignments give one, and which assignments accumulate.
"""

from __future__ import annotations

from tilewright.base.dtypes import DType, accumulator
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.check.context import Context
from tilewright.tree.check.infer import TypePair, join, type_of
from tilewright.tree.check.state import Key, VariableState
from tilewright.tree.typed import Expr

COMBINE = {"+": "add", "*": "mul", "and": "and", "or": "or", "&": "and", "|": "or"}
"""Operators that accumulate, and what they do."""


class VariableTypes:
    """The types of variables, learnt value by value and walk by walk."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def learn(self, key: Key, pair: TypePair, name: str, span: Span) -> TypePair:
        """The variable's type with one more value seen. Weak values are kept apart: they give way whatever the order."""
        known = self.context.state.variables.setdefault(key, VariableState())
        before = known.weak if pair[1] else known.strong
        joined = pair if before is None else join(before, pair)
        if joined is None:
            assert before is not None
            raise self.context.fail(
                "TW006", f"'{name}' would be both {before[0]} and {pair[0]}, which would lose data", span, "cast one of the values"
            )
        if joined != before:
            self.context.state.changed = True
            if pair[1]:
                known.weak = joined
            else:
                known.strong = joined
        total = known.weak or known.strong
        if known.weak is not None and known.strong is not None:
            total = join(known.weak, known.strong)
        if total is None:
            raise self.context.fail("TW006", f"'{name}' would be both an index and {pair[0]}, which would lose data", span, "cast one of the values")
        return (self.context.default_float, "float") if total[1] == "float" else total

    def dtype(self, known: VariableState) -> DType:
        """What `learn_variable` gave last."""
        pair = join(known.weak, known.strong) if known.weak is not None and known.strong is not None else known.weak or known.strong
        return self.context.default_float if pair is None or pair[1] == "float" else pair[0]


def summed(kind: str, value: Expr, in_loop: bool) -> TypePair:
    """The type a value brings to what it is accumulated into: sums and products of integers over a loop are wide."""
    if value.weak or kind not in ("add", "mul"):
        return type_of(value)
    if value.dtype.is_bool or (in_loop and value.dtype.is_int):
        return accumulator(value.dtype), ""
    return type_of(value)


def contribution(stmt: syntax.Assign, name: str) -> tuple[str, bool, syntax.Expr] | None:
    """For `a += f`, `a = a + f`, `a = max(a, f)` and the like: the operation, whether f is negated, and f."""
    if stmt.op:
        if stmt.op == "-":
            return "add", True, stmt.value
        return (COMBINE[stmt.op], False, stmt.value) if stmt.op in COMBINE else None
    value = stmt.value
    if isinstance(value, syntax.Binary):
        left, right = _is_name(value.left, name), _is_name(value.right, name)
        if value.op == "-" and left:
            return "add", True, value.right
        if value.op in COMBINE and left != right:
            return COMBINE[value.op], False, value.right if left else value.left
    if isinstance(value, syntax.Call) and isinstance(value.function, syntax.Name) and len(value.args) == 2:
        first, second = (a.value for a in value.args)
        if value.function.id in ("min", "max") and _is_name(first, name) != _is_name(second, name):
            return value.function.id, False, second if _is_name(first, name) else first
    return None


def _is_name(node: syntax.Expr, name: str) -> bool:
    return isinstance(node, syntax.Name) and node.id == name
