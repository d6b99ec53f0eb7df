"""Checking whole arrays that are assigned inside loops, ifs and whiles: `for t in range(n): u = step(u)`.

Such a name has memory of its own while the statement runs, and an assignment writes all its elements:

    u = a * 1.0                          u = memory, filled with a * 1.0
    for t in range(n):            ->     for t in 0..n:
        u = smooth(u)                        next[i] = … u …   for all i
                                             u[i] = next[i]    for all i

The second array is only there where the value reads other elements of `u` than the one that is written. A loop of few iterations is unrolled
instead: each iteration is then a statement of the kernel's top, and runs in parallel. The first walk finds out which names are assigned where
(`State.carried`), the next one goes by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tilewright.base.dtypes import DType
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.check.arrays import ArrayTable
from tilewright.tree.check.context import Context, Skip
from tilewright.tree.check.elements import ElementBuilder, limits_of
from tilewright.tree.check.expressions import ExpressionChecker
from tilewright.tree.check.operations import Typing
from tilewright.tree.check.sizes import SizeChecker
from tilewright.tree.check.state import Alias, Binding, Key
from tilewright.tree.inline import nodes
from tilewright.tree.typed import (
    Apply,
    ArrayAssign,
    ArrayInfo,
    Cast,
    Choose,
    Element,
    Expr,
    IndexRef,
    LoopVar,
    Shape,
    Stmt,
    Store,
    TypedLoop,
    TypedView,
    Whole,
)
from tilewright.tree.typed_walk import children, exprs_in, walk_expr

_MOST_ITERATIONS = 32
_MOST_STATEMENTS = 96
"""What is unrolled at most: iterations, and statements of all iterations together."""


class ArrayLoopChecker:
    def __init__(
        self, context: Context, sizes: SizeChecker, typing: Typing, arrays: ArrayTable, elements: ElementBuilder, expressions: ExpressionChecker,
        aliased: dict[int, set[str]],
    ) -> None:  # fmt: skip
        """`aliased`: statements that write in place what has other names."""
        self.context = context
        self.sizes = sizes
        self.typing = typing
        self.arrays = arrays
        self.elements = elements
        self.expressions = expressions
        self.aliased = aliased
        self.around: list[syntax.For | syntax.While | syntax.If] = []
        """The statements around the current one."""
        self.owned: set[str] = {name for _, name in context.state.kept} | {name for name, array in arrays.inputs.items() if array.role == "inout"}
        """Names that have had memory of their own: `w = u` copied."""
        self.local: set[str] = set()
        """Arrays made below the top."""

    # -- what is carried ----------------------------------------------------------------------------------------------

    def is_carried(self, name: str) -> bool:
        """Whether the name has memory of its own in the statement around."""
        return bool(self.around) and name in self.context.state.carried.get(id(self.around[0]), ())

    @property
    def carrying(self) -> bool:
        """Whether the statement around assigns whole arrays."""
        return bool(self.around) and id(self.around[0]) in self.context.state.carried

    def carries(self, stmt: syntax.For | syntax.While | syntax.If) -> bool:
        """Whether a statement of the kernel's top assigns whole arrays."""
        return not self.around and id(stmt) in self.context.state.carried

    def demand(self, name: str, span: Span) -> Skip:
        """A whole array is assigned below the top: the next walk gives it memory."""
        self.in_order(name, span)
        self.context.state.carried.setdefault(id(self.around[0]), {})[name] = None
        self.context.state.changed = True
        return Skip()

    def in_order(self, name: str, span: Span) -> None:
        for stmt in self.around:
            if isinstance(stmt, syntax.For) and stmt.parallel == "yes":
                raise self.context.fail(
                    "TW012", f"grid runs its iterations in any order, but the array '{name}' is carried from one to the next", span,
                    "use range for a loop whose order matters, or write to elements",
                )  # fmt: skip

    def ordered(self) -> bool:
        """Whether the statement around assigns whole arrays, and no loop around runs in any order."""
        return self.carrying and not any(isinstance(s, syntax.For) and s.parallel == "yes" for s in self.around)

    def is_local(self, name: str) -> bool:
        """Whether the name has memory that was made below the top."""
        binding = self.context.scope.find(name)
        return isinstance(binding, ArrayInfo) and binding.name in self.local

    @contextmanager
    def inside(self, stmt: syntax.For | syntax.While | syntax.If) -> Iterator[None]:
        """The statement is around what follows."""
        if self.carries(stmt):
            self.open(stmt)
        self.around.append(stmt)
        self.tell()
        try:
            yield
        finally:
            self.around.pop()
            self.tell()

    def tell(self) -> None:
        """Where the walk is now, as far as the context has to know it."""
        self.context.carrying = self.carrying
        in_turn = bool(self.around) and all(isinstance(s, syntax.For | syntax.While) and getattr(s, "parallel", "") != "yes" for s in self.around)
        self.context.in_turn = id(self.around[0]) if in_turn else None

    def open(self, stmt: syntax.For | syntax.While | syntax.If, unrolled: bool = False) -> None:
        """A statement that assigns whole arrays begins: each has memory of its own, with what it holds so far. Where the loop is unrolled
        names mean one array after the other, and only what is not computed yet needs memory."""
        for name in self.context.state.carried.get(id(stmt), ()):
            binding = self.context.scope.find(name)
            if isinstance(binding, ArrayInfo) and (unrolled or binding.role == "inout"):
                continue
            if not unrolled:
                self.owned.add(name)
            if isinstance(binding, ArrayInfo) and binding.role != "input" and binding.name not in self.arrays.temporaries and self.sole(name, binding):
                continue
            value = self.value_of(binding, stmt.span)
            if value is not None:
                self.context.scope.rebind(name, self.stored(name, self.typing.settled(value), stmt.span))

    def sole(self, name: str, array: ArrayInfo) -> bool:
        """Whether the array has no other name."""
        scope = self.context.scope
        return not any(other != name and isinstance(b := scope.find(other), ArrayInfo) and b.name == array.name for other in scope.visible())

    def value_of(self, binding: Binding | None, span: Span) -> Expr | None:
        if isinstance(binding, ArrayInfo):
            self.arrays.on_read(binding, span)
            return Whole(binding, span=span)
        return binding.value if isinstance(binding, Alias) and binding.value.shape else None

    def stored(self, name: str, value: Expr, span: Span) -> ArrayInfo:
        """A value of the kernel's top in memory of its own."""
        array = self.arrays.new_array(name, value.dtype, value.shape)
        self.context.emit(ArrayAssign(array, value, span=span))
        self.arrays.written.add(array.name)
        return array

    # -- assignments --------------------------------------------------------------------------------------------------

    def assign(self, stmt: syntax.Assign, name: str, array: ArrayInfo, made: tuple[DType, Shape, Expr | None] | None) -> None:
        """`name = value` for an array with memory of its own, below the top; `made` is what `empty(…)` and its kin make."""
        self.in_order(name, stmt.span)
        if made is not None:
            dtype, shape, fill = made
            self.same_type(name, array.dtype, array.shape, Whole(replace(array, dtype=dtype, shape=shape)), stmt.span)
            if fill is not None:
                self.write(array, fill, stmt.span)
            return
        node = stmt.value if not stmt.op else syntax.Binary(stmt.op, stmt.target, stmt.value, span=stmt.span)
        value = self.typing.settled(self.expressions.expr(node))
        if stmt.op and len(value.shape) == array.rank:
            value = self.typing.assignable(value, array.dtype, f"'{name}'", stmt.span)
        self.same_type(name, array.dtype, array.shape, value, stmt.span)
        self.write(array, value, stmt.span)

    def same_type(self, name: str, dtype: DType, shape: Shape, value: Expr, span: Span) -> None:
        """An array that a loop assigns, or that is updated, keeps its dtype and shape."""
        hint = f"give the new array another name, or make '{name}' of that type before"
        if len(value.shape) != len(shape):
            what = f"an array of rank {len(value.shape)}" if value.shape else f"a number ({value.dtype})"
            raise self.context.fail("TW003", f"'{name}' is an array of rank {len(shape)} and cannot become {what} here", span, hint)
        if value.dtype is not dtype:
            raise self.context.fail("TW006", f"'{name}' is {dtype} and cannot become {value.dtype} here", span, f"{hint}, or cast the value")
        for axis, (before, after) in enumerate(zip(shape, value.shape, strict=True)):
            gap = (before - after).constant
            if gap is not None and gap != 0:
                raise self.context.fail("TW004", f"axis {axis} of '{name}' has extent {before} and cannot become {after} here", span, hint)
            if gap is None:
                self.sizes.require(before, "eq", after, f"axis {axis} of '{name}' has extent {{left}} and cannot become {{right}} here", span)

    def write(self, array: ArrayInfo, value: Expr, span: Span) -> None:
        """All elements of an array get new values, below the top."""
        if self.context.spread is not None:
            raise self.context.fail("TW005", f"the array '{array.name}' is assigned in a loop whose tiles change", span, "change the tiles in a loop of their own")
        if any(limits_of(value)):
            raise self.context.fail("TW005", "a slice that may reach beyond its array cannot be kept whole", span, "write the elements in a loop")
        self.arrays.written.add(array.name)
        body = self.elements_of(array, value, span)
        at = body[-1].indices if isinstance(body[-1], Store) else ()
        if any(isinstance(e, Element) and e.array.name == array.name and e.indices != at for e in exprs_in(tuple(body))):
            fresh = self.arrays.new_array(f"{array.name}_next", array.dtype, array.shape, "scratch")
            self.arrays.written.add(fresh.name)
            self.emit_loop(self.elements_of(fresh, value, span), span)
            body = self.elements_of(array, Whole(fresh, span=span), span)
        self.emit_loop(body, span)
        self.context.changed(array.name)

    def elements_of(self, array: ArrayInfo, value: Expr, span: Span) -> list[Stmt]:
        """The statements that write one element, over fresh indices; the store is the last."""
        variables = tuple(self.elements.index(extent, (), span) for extent in array.shape)
        at = tuple(IndexRef(v, span=span) for v in variables)
        with self.context.inside(variables) as body:
            element = self.elements.element(value, at[len(at) - len(value.shape) :], span)
            body.append(Store(array, at, self.typing.convert(element, array.dtype), span=span))
        return body

    def emit_loop(self, body: list[Stmt], span: Span) -> None:
        store = body[-1]
        assert isinstance(store, Store)
        variables = tuple(i.var for i in store.indices if isinstance(i, IndexRef))
        self.context.out += [TypedLoop(variables, tuple(body), asked="no", span=span)] if variables else body

    def replace_elements(self, array: ArrayInfo, value: Expr, span: Span) -> None:
        """All elements of an array get new values, at the top of the kernel. What the value reads of the array elsewhere than at the element at
        hand is read before."""
        if not is_elementwise(value, array.name):
            fresh = self.arrays.new_array(f"{array.name}_next", array.dtype, array.shape, "scratch")
            self.arrays.written.add(fresh.name)
            self.context.emit(ArrayAssign(fresh, value, span=span))
            value = Whole(fresh, span=span)
        self.context.emit(ArrayAssign(array, value, span=span))
        self.arrays.written.add(array.name)
        self.context.changed(array.name)

    # -- arrays made below the top ------------------------------------------------------------------------------------

    def declare(self, name: str, value: Expr, key: Key, span: Span) -> bool:
        """`name = value`, for a new name below the top, where the value is needed after what it is made of has changed, or changes itself."""
        state = self.context.state
        if not value.shape or not self.ordered() or any(limits_of(value)) or self.context.spread is not None:
            return False
        if self.context.loops and key not in state.kept and key not in state.assigned:
            return False
        value = self.typing.settled(value)
        array = self.arrays.new_array(name, value.dtype, value.shape, "scratch")
        self.bind(name, array)
        self.write(array, value, span)
        return True

    def make(self, name: str, dtype: DType, shape: Shape, fill: Expr | None, span: Span) -> None:
        """`name = empty(shape, dtype)` and its kin, below the top."""
        array = self.arrays.new_array(name, dtype, shape, "scratch")
        self.bind(name, array)
        if fill is not None:
            self.write(array, fill, span)

    def bind(self, name: str, array: ArrayInfo) -> None:
        self.context.scope.names[name] = array
        self.local.add(array.name)
        self.owned.add(name)

    # -- other names --------------------------------------------------------------------------------------------------

    def written_in_place(self, stmt: syntax.Assign, name: str) -> None:
        """Elements of `name` are written: no other name may mean the same array, where names have memory of their own."""
        others = self.aliased.get(id(stmt), set())
        clash = sorted(o for o in others if name in self.owned or o in self.owned)
        if clash:
            raise self.context.fail(
                "TW005", f"'{name}' and '{clash[0]}' may be two names of one array, and this writes into it", stmt.span,
                f"make a copy where the names are made one, as in {clash[0]} = {name} + 0",
            )  # fmt: skip

    # -- unrolling ----------------------------------------------------------------------------------------------------

    def iterations(self, stmt: syntax.For, variables: Sequence[LoopVar]) -> list[int] | None:
        """The values of the index, where the loop is to be unrolled."""
        if stmt.until:
            return None
        var = variables[0]
        first, count, step = (None if size is None else size.constant for size in (var.first, var.count, var.step))
        if first is None or count is None or step is None or stmt.parallel == "yes" or len(variables) != 1:
            return None
        statements = sum(isinstance(n, syntax.Assign | syntax.Let | syntax.For | syntax.If | syntax.While) for n in nodes(stmt.body))
        if count > _MOST_ITERATIONS or count * statements > _MOST_STATEMENTS:
            return None
        return [first + k * step for k in range(count)]


def is_elementwise(value: Expr, array: str) -> bool:
    """Whether a value reads an array only at the element at hand."""
    if isinstance(value, Whole):
        return True
    if isinstance(value, Apply | Cast | Choose):
        return all(is_elementwise(part, array) for part in children(value))
    return not any(isinstance(e, Whole | Element | TypedView) and e.array.name == array for e in walk_expr(value))
