"""Blocks of the kinds scan, sort, filter and histogram: the loops that compute what they yield.

In: the body of such a block. Out: the same loops as an elementwise kernel that stores every yielded value at the indices of its loops:
`yield x[i]` becomes `out[i] = x[i]`; a pair has two results; under the `if` of a filter there is a second result that says where it held.
What is done with the values is a primitive's matter (`zyn/host/primitive_blocks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.inline import nodes
from tilewright.tree.metadata import KernelKind
from tilewright.tree.syntax import Expr, Stmt

PRIMITIVES = (KernelKind.SCAN, KernelKind.SORT, KernelKind.FILTER, KernelKind.HISTOGRAM)
_EXAMPLES = {
    KernelKind.SCAN: "@kernel scan(+) … for i in 0..n: yield x[i]", KernelKind.SORT: "@kernel sort … for i in 0..n: yield x[i]",
    KernelKind.FILTER: "@kernel filter … for i in 0..n: if x[i] > 0: yield x[i]",
    KernelKind.HISTOGRAM: "@kernel histogram(bins=16) … for i in 0..n: yield x[i]",
}  # fmt: skip


def stored(body: Sequence[Stmt], kind: KernelKind, span: Span) -> tuple[Stmt, ...]:
    """The body with stores in place of what it yields."""
    yields = [n for n in nodes(tuple(body)) if isinstance(n, syntax.Yield)]
    if len(yields) != 1:
        raise _wrong(f"@kernel {kind.value}, but the block yields {'nothing' if not yields else f'in {len(yields)} places'}", span, f"write {_EXAMPLES[kind]}")
    return _statements(body, kind, ())


def _statements(body: Sequence[Stmt], kind: KernelKind, indices: tuple[Expr, ...]) -> tuple[Stmt, ...]:
    found: list[Stmt] = []
    for stmt in body:
        if isinstance(stmt, syntax.For) and _yields(stmt):
            found.append(_loop(stmt, kind, indices))
        elif isinstance(stmt, syntax.Yield):
            found += _stores(stmt, kind, indices)
        elif isinstance(stmt, syntax.If) and _yields(stmt):
            found += _chosen(stmt, kind, indices)
        elif isinstance(stmt, syntax.While) and _yields(stmt):
            raise _wrong("yield in a while: nobody knows how often", stmt.span, "yield in loops over ranges")
        else:
            found.append(stmt)
    return tuple(found)


def _yields(stmt: Stmt) -> bool:
    return any(isinstance(n, syntax.Yield) for n in nodes((stmt,)))


def _loop(stmt: syntax.For, kind: KernelKind, indices: tuple[Expr, ...]) -> syntax.For:
    for domain in stmt.ranges:
        if domain.lo != syntax.Number(0) or domain.step is not None:
            raise _wrong(f"a loop of @kernel {kind.value} begins at 0 and takes steps of 1", domain.span, "write for i in 0..n, and x[i + k] where values begin later")
    names = tuple(syntax.Name(name, span=stmt.span) for name in stmt.vars)
    return syntax.For(stmt.vars, stmt.ranges, _statements(stmt.body, kind, (*indices, *names)), over=stmt.over, span=stmt.span)


def _stores(stmt: syntax.Yield, kind: KernelKind, indices: tuple[Expr, ...]) -> list[Stmt]:
    if kind is KernelKind.FILTER:
        raise _wrong("@kernel filter yields all values", stmt.span, "yield under an if, as in: if x[i] > 0: yield x[i]")
    if not indices:
        raise _wrong("yield outside a loop", stmt.span, f"write {_EXAMPLES[kind]}")
    values = stmt.value.items if isinstance(stmt.value, syntax.Tuple) else (stmt.value,)
    if len(values) > (2 if kind in (KernelKind.SORT, KernelKind.HISTOGRAM) else 1):
        raise _wrong(f"@kernel {kind.value} takes one value, not {len(values)}", stmt.span, f"write {_EXAMPLES[kind]}")
    names = ("out",) if len(values) == 1 else ("out_key", "out_value")
    return [_store(name, indices, value) for name, value in zip(names, values, strict=True)]


def _chosen(stmt: syntax.If, kind: KernelKind, indices: tuple[Expr, ...]) -> list[Stmt]:
    last = stmt.then[-1] if stmt.then else None
    if kind is not KernelKind.FILTER or stmt.otherwise or not isinstance(last, syntax.Yield) or isinstance(last.value, syntax.Tuple):
        raise _wrong(f"@kernel {kind.value} cannot yield under this condition", stmt.span, f"write {_EXAMPLES[kind]}")
    if not indices:
        raise _wrong("yield outside a loop", stmt.span, f"write {_EXAMPLES[kind]}")
    zero = syntax.Number(0, span=last.span)
    then = (*stmt.then[:-1], _store("out_value", indices, last.value))
    return [_store("out_keep", indices, stmt.cond), syntax.If(stmt.cond, then, (_store("out_value", indices, zero),), span=stmt.span)]


def _store(name: str, indices: tuple[Expr, ...], value: Expr) -> Stmt:
    target = syntax.Index(syntax.Name(name, span=value.span), indices, span=value.span)
    return syntax.Assign(target, value, "", span=value.span)


def _wrong(message: str, span: Span, help: str) -> UserError:
    error = UserError.at("TW012", message, span, help)
    assert isinstance(error, UserError)
    return error
