"""Checking loops that yield: the nest of a reduce kernel, and the indices of loops.

In come `for` nests whose innermost bodies yield values; out comes one typed reduction that fills an array. `BodyChecker` does the statements inside.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tilewright.base.dtypes import i64
from tilewright.base.errors import Diagnostics
from tilewright.base.sizes import ONE, ZERO, Size, ceildiv
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.bounds import clamped, interval
from tilewright.tree.check_state import Scope, State
from tilewright.tree.check_tiles import TileChecker
from tilewright.tree.infer import TypePair, join, size_of, sum_dtype, type_of
from tilewright.tree.typed import (
    Accumulate,
    ArgSpec,
    Expr,
    LoopVar,
    ReduceLoop,
    SizeValue,
    Stmt,
    Variable,
    Yield,
)
from tilewright.tree.typed_walk import walk_expr


class YieldChecker(TileChecker):
    def __init__(self, function: syntax.Function, args: Sequence[ArgSpec], state: State, sink: Diagnostics) -> None:
        super().__init__(function, args, state, sink)
        self.yields: list[TypePair] | None = None
        """Types of the values yielded in the reduction being checked."""
        self.kind = ""
        """Its operation."""
        self.target = Variable("out", self.default_float)
        """What it accumulates into."""
        self.domain = 0
        """How many loop indices it runs over."""

    @abstractmethod
    def statement(self, stmt: syntax.Stmt, last: bool = False) -> None:
        """Check one statement."""

    @contextmanager
    def block(self, scope: Scope | None = None) -> Iterator[list[Stmt]]:
        """Statements inside go to a list of their own, names to a scope of their own."""
        before, self.out = self.out, []
        outer, self.scope = self.scope, scope or Scope(self.scope)
        try:
            yield self.out
        finally:
            self.out, self.scope = before, outer

    def loop_var(self, name: str, node: syntax.Range) -> LoopVar:
        lo, hi = self.bound(node.lo), self.bound(node.hi)
        for expr in (*walk_expr(lo), *walk_expr(hi)):
            if isinstance(expr, SizeValue):
                self.state.equations.ranges |= self.state.solution.raw(expr.size).names
        if node.inclusive:
            hi = self.binary("+", hi, self.literal(1, node.span), node.span)
        step = ONE if node.step is None else size_of(self.bound(node.step))
        if step is None or step == ZERO:
            what = "0" if step == ZERO else "not made of constants and sizes"
            raise self.fail("TW016", f"the step of a loop cannot be {what}", node.span)
        first, last = size_of(lo), size_of(hi)
        down = step.constant is not None and step.constant < 0
        count = None
        if first is not None and last is not None:
            count = ceildiv(first - last, -step) if down else ceildiv(last - first, step)
        start, end = interval(lo), interval(hi)
        low = start[0] if start else None
        high = end[1] - 1 if end else None
        if first is not None and count is not None:
            low, high = first, first + step * (count - 1)
        elif down:
            low, high = (end[0] + 1 if end else None), (start[1] if start else None)
        if first is not None and count is not None and down:
            low, high = high, low
        return LoopVar(name, lo, hi, step, first, None if count is None else clamped(count), low, high)

    def bound(self, node: syntax.Expr) -> Expr:
        value = self.expr(node)
        if value.shape or not value.dtype.is_int:
            raise self.fail("TW009", f"a loop bound must be an integer, got {value.dtype}", node.span)
        return value if value.dtype is i64 else self.convert(value, i64)

    def enter(self, stmt: syntax.For) -> tuple[LoopVar, ...]:
        """Declare the indices of a loop in the current scope."""
        variables: list[LoopVar] = []
        for name, node in zip(stmt.vars, stmt.ranges, strict=True):
            var = self.loop_var(name, node)
            self.scope.names[name] = var
            variables.append(var)
            self.loops.append(var)
        return tuple(variables)

    def reduce_loop(self, stmt: syntax.For, kind: str, axes: tuple[int, ...] | None, name: str = "out") -> None:
        """A `@kernel reduce` nest: the loops directly around one another are its domain. Fills the array of that name."""
        self.outside_loops("the loop of a reduce kernel", stmt.span)
        self.yields, self.kind = [], kind
        known = self.state.outputs.get(name)
        self.target = Variable(name, known.pair[0] if known is not None and known.pair is not None else self.default_float)
        variables: list[LoopVar] = []
        with self.block() as body:
            nest: syntax.For | None = stmt
            while nest is not None:
                variables += self.enter(nest)
                inner = [s for s in nest.body if isinstance(s, syntax.For) and _yields(s)]
                following = inner[0] if len(inner) == 1 and not any(isinstance(s, syntax.Yield) for s in nest.body) else None
                self.domain = len(variables)
                for each in nest.body:
                    if each is not following:
                        self.statement(each)
                nest = following
            self.loops.clear()
        pairs, self.yields = self.yields, None
        if not pairs:
            raise self.fail("TW017", "a reduce kernel must yield a value", stmt.span, "write yield value inside the loop")
        reduced = set(range(len(variables))) if axes is None else set()
        for axis in axes or ():
            if not -len(variables) <= axis < len(variables):
                raise self.fail("TW003", f"axis {axis} of a reduction over {len(variables)} loop indices", stmt.span)
            reduced.add(axis % len(variables))
        inner_vars = tuple(v for i, v in enumerate(variables) if i in reduced)
        outer_vars = tuple(v for i, v in enumerate(variables) if i not in reduced)
        pair = pairs[0]
        for other in pairs[1:]:
            pair = join(pair, other) or pair
        dtype = sum_dtype(pair[0], kind)
        array = self.output(name, len(outer_vars), (dtype, ""), stmt.span)
        shape: list[Size] = []
        for var in variables:
            if var.count is None:
                raise self.fail("TW014", f"the range of '{var.name}' is not made of sizes of the inputs", stmt.span)
        for var in outer_vars:
            assert var.count is not None
            shape.append(var.count)
        self.shape_output(name, tuple(shape))
        if kind in ("argmin", "argmax"):
            self.not_empty(kind, [v.count for v in inner_vars if v.count is not None], shape, stmt.span)
        self.written.add(name)
        self.out.append(ReduceLoop(outer_vars, inner_vars, tuple(body), kind, self.target, array, span=stmt.span))

    def scalar_only(self, name: str, value: Expr, span: Span) -> None:
        if value.shape:
            raise self.fail("TW003", f"{name} is a number, and the value has rank {len(value.shape)}", span, "index the arrays in it")

    def yielded(self, stmt: syntax.Yield) -> None:
        if self.yields is None:
            help = "write @tw.kernel(reduce=…), or store to an output" if self.is_python else "write @kernel reduce(…), or store to out[…]"
            raise self.fail("TW012", "yield is only for reduce kernels", stmt.span, help)
        if self.spread is not None:
            raise self.fail("TW005", "yield in a loop whose tiles change", stmt.span, "yield after that loop")
        kind, index = self.kind, None
        node = stmt.value
        if isinstance(node, syntax.Tuple):
            if len(node.items) != 2 or kind not in ("argmin", "argmax"):
                raise self.fail("TW016", f"a reduce({kind}) kernel yields one value", stmt.span)
            position = self.expr(node.items[1])
            if position.shape or not position.dtype.is_int:
                raise self.fail("TW009", f"a yielded index must be an integer, got {position.dtype}", node.items[1].span)
            index, node = self.convert(position, i64), node.items[0]
        value = self.settled(self.expr(node))
        self.scalar_only("a yielded value", value, stmt.span)
        if kind in ("and", "or"):
            value = self.logical(value, stmt.span)
        self.yields.append(type_of(value))
        if kind not in ("argmin", "argmax"):
            self.out.append(Accumulate(self.target, kind, self.convert(value, self.target.dtype), span=stmt.span))
            return
        if len(self.loops) > self.domain:
            raise self.fail("TW005", f"yield of a reduce({kind}) kernel cannot be in an inner loop", stmt.span)
        self.out.append(Yield(value, index, span=stmt.span))


def _yields(stmt: syntax.Stmt) -> bool:
    if isinstance(stmt, syntax.Yield):
        return True
    if isinstance(stmt, syntax.For | syntax.While):
        return any(_yields(s) for s in stmt.body)
    return isinstance(stmt, syntax.If) and any(_yields(s) for s in (*stmt.then, *stmt.otherwise))
