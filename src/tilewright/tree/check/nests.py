"""Checking the indices of loops, and loops that yield: the nest of a reduce kernel.

In come `for` nests whose innermost bodies yield values; out comes one typed reduction that fills an array.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.base.dtypes import i64
from tilewright.base.intervals import clamped
from tilewright.base.sizes import ONE, ZERO, Size, ceildiv, has_numbers
from tilewright.tree import syntax
from tilewright.tree.bounds import interval
from tilewright.tree.check.arrays import ArrayTable
from tilewright.tree.check.context import Context
from tilewright.tree.check.expressions import ExpressionChecker
from tilewright.tree.check.infer import TypePair, join, size_of, sum_dtype, type_of
from tilewright.tree.check.operations import Typing
from tilewright.tree.check.sizes import SizeChecker
from tilewright.tree.typed import Accumulate, Expr, LoopVar, ReduceLoop, SizeValue, TypedYield, Variable
from tilewright.tree.typed_walk import walk_expr


class NestChecker:
    def __init__(
        self, context: Context, sizes: SizeChecker, typing: Typing, arrays: ArrayTable, expressions: ExpressionChecker,
        statement: Callable[[syntax.Stmt], None],
    ) -> None:  # fmt: skip
        """`statement` checks one statement of a nest's body."""
        self.context = context
        self.sizes = sizes
        self.typing = typing
        self.arrays = arrays
        self.expressions = expressions
        self.statement = statement
        self.yields: list[TypePair] | None = None
        """Types of the values yielded in the reduction being checked."""
        self.kind = ""
        """Its operation."""
        self.target = Variable("out", context.default_float)
        """What it accumulates into."""
        self.domain = 0
        """How many loop indices it runs over."""

    # -- indices ------------------------------------------------------------------------------------------------------

    def loop_var(self, name: str, node: syntax.RangeExpr) -> LoopVar:
        """A loop index with all that is known of its range."""
        lo, hi = self.bound(node.lo), self.bound(node.hi)
        for expr in (*walk_expr(lo), *walk_expr(hi)):
            if isinstance(expr, SizeValue):
                self.context.state.equations.ranges |= self.context.state.solution.raw(expr.size).names
        if node.inclusive:
            hi = self.typing.binary("+", hi, self.typing.literal(1, node.span), node.span)
        step = ONE if node.step is None else size_of(self.bound(node.step))
        if step is None or step == ZERO:
            what = "0" if step == ZERO else "not made of constants and sizes"
            raise self.context.fail("TW016", f"the step of a loop cannot be {what}", node.span)
        title = node.hi.id if isinstance(node.hi, syntax.Name) else name
        step = self.sizes.numbers.extent(step, node.step.id if isinstance(node.step, syntax.Name) else f"{name}_step", node.span, least=1)
        first, last = size_of(lo), size_of(hi)
        down = step.constant is not None and step.constant < 0
        count = None
        if first is not None and last is not None:
            count = ceildiv(first - last, -step) if down else ceildiv(last - first, step)
            count = self.sizes.numbers.count(count, title, node.span) if has_numbers(count) else count
        start, end = interval(lo), interval(hi)
        low = start.low if start else None
        high = end.high - 1 if end else None
        if first is not None and count is not None:
            low, high = first, first + step * (count - 1)
        elif down:
            low, high = (end.low + 1 if end else None), (start.high if start else None)
        if first is not None and count is not None and down:
            low, high = high, low
        return LoopVar(name, lo, hi, step, first, None if count is None else clamped(count), low, high)

    def bound(self, node: syntax.Expr) -> Expr:
        """A bound of a range, an integer."""
        value = self.expressions.expr(node)
        if value.shape or not value.dtype.is_int:
            raise self.context.fail("TW009", f"a loop bound must be an integer, got {value.dtype}", node.span)
        return value if value.dtype is i64 else self.typing.convert(value, i64)

    def enter(self, stmt: syntax.For) -> tuple[LoopVar, ...]:
        """Declare the indices of a loop in the current scope."""
        variables: list[LoopVar] = []
        for name, node in zip(stmt.vars, stmt.ranges, strict=True):
            var = self.loop_var(name, node)
            self.context.scope.names[name] = var
            variables.append(var)
            self.context.loops.append(var)
        return tuple(variables)

    # -- loops that yield ---------------------------------------------------------------------------------------------

    def reduce_loop(self, stmt: syntax.For, kind: str, axes: tuple[int, ...] | None, name: str = "out") -> None:
        """A `@kernel reduce` nest: the loops directly around one another are its domain. Fills the array of that name."""
        self.context.outside_loops("the loop of a reduce kernel", stmt.span)
        self.yields, self.kind = [], kind
        known = self.context.state.outputs.get(name)
        self.target = Variable(name, known.pair[0] if known is not None and known.pair is not None else self.context.default_float)
        variables: list[LoopVar] = []
        with self.context.block() as body:
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
        pairs, self.yields = self.yields, None
        if not pairs:
            raise self.context.fail("TW017", "a reduce kernel must yield a value", stmt.span, "write yield value inside the loop")
        reduced = set(range(len(variables))) if axes is None else set()
        for axis in axes or ():
            if not -len(variables) <= axis < len(variables):
                raise self.context.fail("TW003", f"axis {axis} of a reduction over {len(variables)} loop indices", stmt.span)
            reduced.add(axis % len(variables))
        inner_vars = tuple(v for i, v in enumerate(variables) if i in reduced)
        outer_vars = tuple(v for i, v in enumerate(variables) if i not in reduced)
        pair = pairs[0]
        for other in pairs[1:]:
            pair = join(pair, other) or pair
        dtype = sum_dtype(pair[0], kind)
        array = self.arrays.output(name, len(outer_vars), (dtype, ""), stmt.span)
        shape: list[Size] = []
        for var in variables:
            if var.count is None:
                raise self.context.fail("TW014", f"the range of '{var.name}' is not made of sizes of the inputs", stmt.span)
        for var in outer_vars:
            assert var.count is not None
            shape.append(var.count)
        self.arrays.shape_output(name, tuple(shape))
        if kind in ("argmin", "argmax"):
            self.sizes.not_empty(kind, [v.count for v in inner_vars if v.count is not None], shape, stmt.span)
        self.arrays.written.add(name)
        self.context.emit(ReduceLoop(outer_vars, inner_vars, tuple(body), kind, self.target, array, span=stmt.span))

    def yielded(self, stmt: syntax.Yield) -> None:
        """`yield value`, or `yield value, index` for argmin and argmax."""
        if self.yields is None:
            help = "write @tw.kernel(reduce=…), or store to an output" if self.context.is_python else "write @kernel reduce(…), or store to out[…]"
            raise self.context.fail("TW012", "yield is only for reduce kernels", stmt.span, help)
        if self.context.spread is not None:
            raise self.context.fail("TW005", "yield in a loop whose tiles change", stmt.span, "yield after that loop")
        kind, index = self.kind, None
        node = stmt.value
        if isinstance(node, syntax.Tuple):
            if len(node.items) != 2 or kind not in ("argmin", "argmax"):
                raise self.context.fail("TW016", f"a reduce({kind}) kernel yields one value", stmt.span)
            position = self.expressions.expr(node.items[1])
            if position.shape or not position.dtype.is_int:
                raise self.context.fail("TW009", f"a yielded index must be an integer, got {position.dtype}", node.items[1].span)
            index, node = self.typing.convert(position, i64), node.items[0]
        value = self.typing.settled(self.expressions.expr(node))
        self.typing.scalar_only("a yielded value", value, stmt.span)
        if kind in ("and", "or"):
            value = self.typing.logical(value, stmt.span)
        self.yields.append(type_of(value))
        if kind not in ("argmin", "argmax"):
            self.context.emit(Accumulate(self.target, kind, self.typing.convert(value, self.target.dtype), span=stmt.span))
            return
        if len(self.context.loops) > self.domain:
            raise self.context.fail("TW005", f"yield of a reduce({kind}) kernel cannot be in an inner loop", stmt.span)
        self.context.emit(TypedYield(value, index, span=stmt.span))


def _yields(stmt: syntax.Stmt) -> bool:
    if isinstance(stmt, syntax.Yield):
        return True
    if isinstance(stmt, syntax.For | syntax.While):
        return any(_yields(s) for s in stmt.body)
    return isinstance(stmt, syntax.If) and any(_yields(s) for s in (*stmt.then, *stmt.otherwise))
