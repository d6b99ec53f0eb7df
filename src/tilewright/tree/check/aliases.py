"""Names of one array: where two names may mean the same memory, and an element is written through one of them.

In: the body of a kernel, as the source has it. Out: for each statement that writes in place, the names that may see it. Lowering gives every
name that a loop assigns memory of its own, so `w = u` copies there; where Python would show the write through both names, the checker says so.

    w = u
    for i in tw.grid(n):
        u[i] = 0.0          # {id of the store: {"u": {"w"}}}
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.tree import syntax

_Pairs = frozenset[frozenset[str]]


class AliasedWrites:
    """One walk over a body; loops are walked until nothing new is found."""

    def __init__(self, temporary: Iterable[str] = ()) -> None:
        """`temporary` names are the compiler's own, and never read again."""
        self.temporary = frozenset(temporary)
        self.found: dict[int, set[str]] = {}
        """Statements by identity, with the other names of what they write."""

    def block(self, body: Iterable[syntax.Stmt], pairs: _Pairs = frozenset()) -> _Pairs:
        for stmt in body:
            pairs = self.statement(stmt, pairs)
        return pairs

    def statement(self, stmt: syntax.Stmt, pairs: _Pairs) -> _Pairs:
        if isinstance(stmt, syntax.Let):
            values = stmt.value.items if stmt.destructure and isinstance(stmt.value, syntax.Tuple) else (stmt.value,) * len(stmt.targets)
            return _bound(pairs, list(zip(stmt.targets, values)))
        if isinstance(stmt, syntax.Assign):
            target = stmt.target
            while isinstance(target, syntax.Index):
                target = target.value
            if not isinstance(target, syntax.Name):
                return pairs
            if target is stmt.target and not stmt.op:
                return _bound(pairs, [(target.id, stmt.value)])
            others = {name for pair in pairs if target.id in pair for name in pair} - {target.id} - self.temporary
            if others:
                self.found.setdefault(id(stmt), set()).update(others)
            return pairs
        if isinstance(stmt, syntax.For | syntax.While):
            while (after := pairs | self.block(stmt.body, pairs)) != pairs:
                pairs = after
            return pairs
        if isinstance(stmt, syntax.If):
            return self.block(stmt.then, pairs) | self.block(stmt.otherwise, pairs)
        return pairs


def _bound(pairs: _Pairs, assigned: list[tuple[str, syntax.Expr | None]]) -> _Pairs:
    """The pairs once all these names mean something else."""
    gone = {name for name, _ in assigned}
    new: set[frozenset[str]] = set()
    for name, value in assigned:
        owner = _owner(value)
        if owner is not None:
            same = {owner} | {other for pair in pairs if owner in pair for other in pair}
            new |= {frozenset((name, other)) for other in same - gone if other != name}
    return frozenset(pair for pair in pairs if not pair & gone) | new


def _owner(value: syntax.Expr | None) -> str | None:
    """The name whose memory a value is: a name, or an array under another shape."""
    if isinstance(value, syntax.Call) and isinstance(value.function, syntax.Attribute) and value.function.name in ("reshape", "ravel"):
        value = value.function.value
    elif isinstance(value, syntax.Call) and isinstance(value.function, syntax.Name) and value.function.id in ("reshape", "ravel") and value.args:
        value = value.args[0].value
    return value.id if isinstance(value, syntax.Name) else None
