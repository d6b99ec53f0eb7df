"""`break`, `continue` and `return` before the end, as conditions and flags: all that follows knows loops and ifs alone.

In: the body of a kernel, as the source has it. Out: the same without jumps; what is wrong with one is reported at its line.

    for i in range(n):                  var stop = false
        if x[i] < 0:                    for i in 0..n until stop {
            break                 ->        if x[i] < 0 { stop = true }
        total += x[i]                       else { total += x[i] }
                                        }

What follows an `if` that surely jumps goes under its other branch; elsewhere a flag says that the rest of the iteration is left out. A loop
`until` a flag looks at it before each iteration, and runs in order. A `while` tests its condition only as long as the flag is not set. A
kernel that returns before its end sets what it returns, and the flags of all loops around.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tilewright.base.errors import Diagnostics
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.inline import declared, nodes
from tilewright.tree.syntax import Expr, Function, Stmt

_Jump = syntax.Break | syntax.Continue | syntax.Return


@dataclass
class _Level:
    """A loop around, or the function itself (`loop` None). `stop` ends the loop, `skip` the iteration."""

    loop: syntax.For | syntax.While | None
    stop: str
    skip: str
    stops: bool = False
    """Whether something sets `stop`."""
    skips: bool = False
    """Whether something asks for `skip`."""


def without_jumps(function: Function, sink: Diagnostics) -> Function:
    """A kernel without jumps, but for a `return` as its last statement."""
    last = function.body[-1] if function.body else None
    early = [n for n in nodes(function.body) if isinstance(n, syntax.Return) and n is not last]
    if not early and not has_jumps(function.body):
        return function
    return replace(function, body=_Jumps(function, sink, bool(early)).function())


def block_without_jumps(body: tuple[Stmt, ...], taken: Iterable[str], sink: Diagnostics) -> tuple[Stmt, ...]:
    """The statements of a compute block without `break` and `continue`."""
    if not has_jumps(body):
        return body
    return _Jumps(Function("", tuple(syntax.Param(name) for name in taken), None, body, "compute"), sink, False).plain()


def has_jumps(body: object) -> bool:
    return any(isinstance(n, syntax.Break | syntax.Continue) for n in nodes(body))


class _Jumps:
    def __init__(self, function: Function, sink: Diagnostics, returns: bool) -> None:
        self._function, self._sink = function, sink
        self._taken = {p.name for p in function.params} | {n.id for n in nodes(function.body) if isinstance(n, syntax.Name)}
        self._taken |= set(declared(function.body))
        self._top = _Level(None, "", self._fresh("done"))
        self._levels = [self._top]
        self._results: tuple[str, ...] = ()
        """Variables that hold what is returned; none where nothing is, or one array on all ways."""
        self._returns = returns

    def _fresh(self, name: str) -> str:
        found, number = name, 1
        while found in self._taken:
            number += 1
            found = f"{name}{number}"
        self._taken.add(found)
        return found

    # -- the whole ----------------------------------------------------------------------------------------------------

    def plain(self) -> tuple[Stmt, ...]:
        body = self._function.body
        end = body[-1:] if body and isinstance(body[-1], syntax.Return) else ()
        return (*self._block(body[: len(body) - len(end)]), *end)

    def function(self) -> tuple[Stmt, ...]:
        body, span = self._function.body, self._function.span
        if not self._returns:
            return self.plain()
        found = [n for n in nodes(body) if isinstance(n, syntax.Return)]
        values = [n.value for n in found]
        given = [v for v in values if v is not None]
        end = syntax.Return(None, span=span)
        start: list[Stmt] = []
        if given:
            if len(given) < len(values) or not _always_returns(body):
                self._sink.error(
                    "TW017", f"'{self._function.name}' returns a value on some ways through it, and none on others", found[0].span,
                    "let every way end in return, with a value",
                )  # fmt: skip
                return body
            end, start = self._result(found, given)
        done = self._block(body)
        if self._top.skips:
            start.append(_flag(self._top.skip, False, span))
        return (*start, *self._used(done, self._top), end)

    def _result(self, found: Sequence[syntax.Return], given: Sequence[Expr]) -> tuple[syntax.Return, list[Stmt]]:
        """The last statement, and the variables that hold what it returns."""
        first = given[0]
        if isinstance(first, syntax.Name) and all(value == first for value in given):
            return syntax.Return(first, span=found[-1].span), []
        counts = {len(v.items) if isinstance(v, syntax.Tuple) else 1 for v in given}
        if len(counts) > 1:
            self._sink.error("TW016", f"'{self._function.name}' returns {min(counts)} value(s) on one way through it, and {max(counts)} on another", found[0].span)
        (count, *_) = sorted(counts)
        self._results = tuple(self._fresh("result" if count == 1 else f"result{k}") for k in range(count))
        span = found[0].span
        starts = [syntax.Bool(False, span=span) if all(_is_truth(_items(v)[k]) for v in given) else syntax.Number(0, span=span) for k in range(count)]
        names = tuple(syntax.Name(name, span=found[-1].span) for name in self._results)
        end = syntax.Return(names[0] if count == 1 else syntax.Tuple(names, span=span), span=found[-1].span)
        return end, [syntax.Let((name,), value, mutable=True, span=span) for name, value in zip(self._results, starts)]

    # -- statements ---------------------------------------------------------------------------------------------------

    def _block(self, body: Sequence[Stmt]) -> list[Stmt]:
        result: list[Stmt] = []
        for position, stmt in enumerate(body):
            rest = body[position + 1 :]
            if isinstance(stmt, _Jump):
                if rest:
                    self._sink.error("TW005", f"this is never reached: line {stmt.span.line} has left {'the kernel' if isinstance(stmt, syntax.Return) else 'the iteration'}", rest[0].span, "remove it")
                return [*result, *self._jump(stmt)]
            if not self._may_jump(stmt):
                result.append(stmt)
                continue
            if isinstance(stmt, syntax.If):
                return [*result, *self._if(stmt, rest)]
            result += self._loop(stmt)
            if rest and any(isinstance(n, syntax.Return) for n in nodes(stmt)):
                return [*result, *self._unless_left(rest, stmt.span)]
        return result

    def _if(self, stmt: syntax.If, rest: Sequence[Stmt]) -> list[Stmt]:
        surely = _always_jumps(stmt.then), _always_jumps(stmt.otherwise)
        leaves = self._leaves(stmt.then), self._leaves(stmt.otherwise)
        if rest and surely[0] and not leaves[1]:
            return [_either(stmt, self._block(stmt.then), self._block((*stmt.otherwise, *rest)))]
        if rest and surely[1] and not leaves[0]:
            return [_either(stmt, self._block((*stmt.then, *rest)), self._block(stmt.otherwise))]
        new = _either(stmt, self._block(stmt.then), self._block(stmt.otherwise))
        return [new, *self._unless_left(rest, stmt.span)] if rest and any(leaves) and not all(surely) else [new]

    def _unless_left(self, rest: Sequence[Stmt], span: Span) -> list[Stmt]:
        """What follows a statement that may have left the iteration."""
        level = self._levels[-1]
        level.skips = True
        body = self._block(rest)
        return [syntax.If(syntax.Unary("not", syntax.Name(level.skip, span=span), span=span), tuple(body), span=span)] if body else []

    def _leaves(self, body: Sequence[Stmt]) -> bool:
        return any(self._may_jump(stmt) or isinstance(stmt, _Jump) for stmt in body)

    def _may_jump(self, stmt: Stmt) -> bool:
        """Whether a statement has a jump in it that leaves more than a loop inside it; or one that such a loop has to know of."""
        return any(isinstance(n, _Jump) for n in nodes(stmt))

    # -- loops --------------------------------------------------------------------------------------------------------

    def _loop(self, stmt: Stmt) -> list[Stmt]:
        assert isinstance(stmt, syntax.For | syntax.While)
        level = _Level(stmt, self._fresh("stop"), self._fresh("skip"))
        self._levels.append(level)
        body = self._block(stmt.body)
        self._levels.pop()
        body = self._used(body, level)
        if level.skips:
            body = [_flag(level.skip, False, stmt.span), *body]
        if not level.stops:
            return [replace(stmt, body=tuple(body))]
        start = _flag(level.stop, False, stmt.span)
        if isinstance(stmt, syntax.For):
            return [start, replace(stmt, body=tuple(body), until=level.stop)]
        going: Expr = syntax.Unary("not", syntax.Name(level.stop, span=stmt.span), span=stmt.span)
        if not (isinstance(stmt.cond, syntax.Bool) and stmt.cond.value):
            going = syntax.IfExpr(going, stmt.cond, syntax.Bool(False, span=stmt.cond.span), span=stmt.cond.span)
        return [start, replace(stmt, cond=going, body=tuple(body))]

    def _used(self, body: Sequence[Stmt], level: _Level) -> list[Stmt]:
        """The statements without assignments to a flag that nobody asks for."""
        if level.skips:
            return list(body)
        result: list[Stmt] = []
        for stmt in body:
            if isinstance(stmt, syntax.Assign) and isinstance(stmt.target, syntax.Name) and stmt.target.id == level.skip:
                continue
            if isinstance(stmt, syntax.If):
                stmt = _either(stmt, self._used(stmt.then, level), self._used(stmt.otherwise, level))
            elif isinstance(stmt, syntax.For | syntax.While):
                stmt = replace(stmt, body=tuple(self._used(stmt.body, level)))
            result.append(stmt)
        return result

    # -- jumps --------------------------------------------------------------------------------------------------------

    def _jump(self, stmt: _Jump) -> list[Stmt]:
        span = stmt.span
        if isinstance(stmt, syntax.Return):
            crossed = self._levels[1:]
            stores: list[Stmt] = []
            if self._results and stmt.value is not None:
                items = _items(stmt.value)
                stores = [syntax.Assign(syntax.Name(name, span=span), item, span=span) for name, item in zip(self._results, items)]
            for level in crossed:
                self._stop(level, stmt, "return")
            return [*stores, *(s for level in crossed for s in (_set(level.stop, span), _set(level.skip, span))), _set(self._top.skip, span)]
        level = self._levels[-1]
        word = "break" if isinstance(stmt, syntax.Break) else "continue"
        if level.loop is None:
            self._sink.error("TW005", f"'{word}' outside a loop", span, "leave it out")
            return []
        if word == "continue":
            return [_set(level.skip, span)]
        self._stop(level, stmt, word)
        return [_set(level.stop, span), _set(level.skip, span)]

    def _stop(self, level: _Level, stmt: _Jump, word: str) -> None:
        level.stops = True
        loop = level.loop
        if isinstance(loop, syntax.For) and loop.parallel == "yes":
            self._sink.error(
                "TW012", f"'{word}' in the grid of line {loop.span.line}, whose iterations run in any order: none of them can end the others", stmt.span,
                "use range for a loop whose order matters; 'continue' ends one iteration",
            )  # fmt: skip
        elif isinstance(loop, syntax.For) and len(loop.vars) > 1:
            self._sink.error("TW005", f"'{word}' in a loop over several indices: it does not say which one ends", stmt.span, "write one loop inside the other")


def _always_jumps(body: Sequence[Stmt]) -> bool:
    last = body[-1] if body else None
    return isinstance(last, _Jump) or (isinstance(last, syntax.If) and _always_jumps(last.then) and _always_jumps(last.otherwise))


def _always_returns(body: Sequence[Stmt]) -> bool:
    """Whether every way through the statements ends in a return."""
    last = body[-1] if body else None
    if isinstance(last, syntax.While) and isinstance(last.cond, syntax.Bool) and last.cond.value:
        return not any(isinstance(n, syntax.Break) for n in nodes(last.body))
    return isinstance(last, syntax.Return) or (isinstance(last, syntax.If) and _always_returns(last.then) and _always_returns(last.otherwise))


def _either(stmt: syntax.If, then: Sequence[Stmt], otherwise: Sequence[Stmt]) -> syntax.If:
    """The condition with other branches; one with nothing to do is not the first."""
    if then or not otherwise:
        return replace(stmt, then=tuple(then), otherwise=tuple(otherwise))
    return replace(stmt, cond=syntax.Unary("not", stmt.cond, span=stmt.cond.span), then=tuple(otherwise), otherwise=())


def _items(value: Expr) -> tuple[Expr, ...]:
    return value.items if isinstance(value, syntax.Tuple) else (value,)


def _is_truth(value: Expr) -> bool:
    return isinstance(value, syntax.Bool) or (isinstance(value, syntax.Binary) and value.op in ("==", "!=", "<", "<=", ">", ">="))


def _flag(name: str, value: bool, span: Span) -> Stmt:
    return syntax.Let((name,), syntax.Bool(value, span=span), mutable=True, span=span)


def _set(name: str, span: Span) -> Stmt:
    return syntax.Assign(syntax.Name(name, span=span), syntax.Bool(True, span=span), span=span)
