"""Checking accesses: the indices of an element, slices, and parts of tiles.

In come arrays and the syntax of what stands in their brackets; out come typed indices, and parts of arrays as tiles. Every index is looked at on
the way: it is an integer, it tells about sizes, and it stays inside its axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewright.base.dtypes import i64
from tilewright.base.intervals import surely_negative, surely_nonnegative
from tilewright.base.sizes import ZERO, Size, minimum
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.bounds import affine, interval
from tilewright.tree.check.context import Context
from tilewright.tree.check.elements import ElementBuilder, is_zero
from tilewright.tree.check.infer import size_of
from tilewright.tree.check.operations import Typing
from tilewright.tree.check.sizes import SizeChecker
from tilewright.tree.typed import ArrayInfo, Cast, Const, Element, Expr, Shape, SizeValue, TypedView
from tilewright.tree.typed_text import show_expr


class SliceChecker:
    def __init__(
        self, context: Context, sizes: SizeChecker, typing: Typing, elements: ElementBuilder, evaluate: Callable[[syntax.Expr], Expr]
    ) -> None:  # fmt: skip
        """`evaluate` types the expressions inside the brackets."""
        self.context = context
        self.sizes = sizes
        self.typing = typing
        self.elements = elements
        self.evaluate = evaluate

    def index_values(self, name: str, shape: Shape, indices: Sequence[syntax.Expr], span: Span) -> tuple[Expr, ...]:
        """The typed indices of an access with one index for each axis."""
        if len(indices) != len(shape):
            plural = "index" if len(indices) == 1 else "indices"
            raise self.context.fail("TW003", f"'{name}' has rank {len(shape)} but is indexed with {len(indices)} {plural}", span)
        return tuple(self.index_value(name, extent, index) for index, extent in zip(indices, shape, strict=True))

    def index_value(self, name: str, extent: Size, index: syntax.Expr) -> Expr:
        """One typed index of an axis of that extent; a negative constant counts from its end."""
        if isinstance(index, syntax.Slice):
            raise self.context.fail("TW005", f"a slice of the tile '{name}'", index.span, "slice the array it is made from")
        value = self.evaluate(index)
        if value.shape or not value.dtype.is_int:
            raise self.context.fail("TW009", f"an index of '{name}' must be an integer, got {value.dtype}", index.span)
        if self.context.is_python and isinstance(value, Const) and isinstance(value.value, int) and value.value < 0:
            value = SizeValue(extent + value.value, span=index.span)
        return value if value.dtype is i64 else Cast(value, i64, span=index.span)

    def access(
        self, array: ArrayInfo, indices: Sequence[syntax.Expr], span: Span, write: bool = False, lead: tuple[Expr, ...] = ()
    ) -> tuple[Expr, ...]:  # fmt: skip
        """The typed indices of one access; learns sizes from it and sees that it stays inside."""
        values = lead + self.index_values(array.name, array.shape[len(lead) :], indices, span)
        self.sizes.learn(array, values, span, write)
        return values

    def view(self, array: ArrayInfo, lead: tuple[Expr, ...], nodes: Sequence[syntax.Expr], span: Span) -> Expr:
        """A part of an array, as a value: some indices are slices, or missing at the end."""
        value = self.place(array, lead, nodes, span)
        return value if self.context.loops else self.elements.computed("part", value, span)

    def place(self, array: ArrayInfo, lead: tuple[Expr, ...], nodes: Sequence[syntax.Expr], span: Span) -> TypedView:
        """Where a part of an array lies."""
        starts, kept, shape, limits = list(lead), [], [], []
        if len(nodes) + len(lead) > array.rank:
            plural = "index" if len(nodes) == 1 else "indices"
            raise self.context.fail("TW003", f"'{array.name}' has rank {array.rank - len(lead)} but is indexed with {len(nodes)} {plural}", span)
        for axis in range(len(lead), array.rank):
            node = nodes[axis - len(lead)] if axis - len(lead) < len(nodes) else syntax.Slice(None, None, span=span)
            if not isinstance(node, syntax.Slice):
                starts.append(self.index_value(array.name, array.shape[axis], node))
                self.sizes.learn_axis(array, axis, starts[-1], span)
                continue
            start, extent, bounds = self.section(array, axis, node)
            starts.append(start)
            kept.append(axis)
            shape.append(extent)
            limits.append(bounds)
        return TypedView(array, tuple(starts), tuple(kept), tuple(shape), tuple(limits), span=span)

    def section(self, array: ArrayInfo, axis: int, node: syntax.Slice) -> tuple[Expr, Size, tuple[Expr, ...]]:
        """A slice of an axis: its first element, its extent, and what limits it."""
        start, stop, length = self.edges(array.name, array.shape[axis], node)
        self.sizes.bind_section(array, axis, start, length)
        self.sizes.bind_end(array, axis, stop)
        if node.lo is None and length is None:
            self.sizes.bind_section(array, axis, self.typing.binary("-", stop, self.typing.literal(1, node.span), node.span), None)  # x[:i+1]
        if self.sizes.implicit(array) and length is not None:
            return start, length, ()
        return self.part(array.name, array.shape[axis], node, axis)

    def edges(self, name: str, axis_extent: Size, node: syntax.Slice) -> tuple[Expr, Expr, Size | None]:
        """First and last (exclusive) element of a slice, and its length where that is a size."""
        start = self.typing.literal(0, node.span) if node.lo is None else self.index_value(name, axis_extent, node.lo)
        stop = SizeValue(axis_extent, span=node.span) if node.hi is None else self.index_value(name, axis_extent, node.hi)
        first, last = affine(start), affine(stop)
        if first is None or last is None or dict(first.factors) != dict(last.factors):
            return start, stop, None
        return start, stop, last.constant - first.constant

    def part(self, name: str, axis_extent: Size, node: syntax.Slice, axis: int) -> tuple[Expr, Size, tuple[Expr, ...]]:
        """A slice of an extent: its first element, its extent, and what limits it."""
        start, stop, length = self.edges(name, axis_extent, node)
        text = f"the slice {_section(node, start, stop)} of '{name}'"
        reach = interval(start)
        if reach is not None and surely_negative(reach.low) and not self.context.guarded:
            raise self.context.fail("TW013", f"{text} starts at {reach.low} on axis {axis}", node.span)
        if reach is not None and not surely_nonnegative(reach.low) and not self.context.guarded:
            message = f"{text} starts at {{right}} on axis {axis}"
            self.sizes.require(ZERO, "le", self.sizes.when_reached(reach.low, reach.low), message, node.span, "TW013")
        if length is not None and length.constant is not None and length.constant <= 0:
            raise self.context.fail("TW013", f"{text} is empty", node.span)
        if not self.context.loops:
            return start, self.top_length(text, axis_extent, start, stop, node.span), ()
        room = self.typing.binary("-", SizeValue(axis_extent, span=node.span), start, node.span)
        if length is None:
            # As long as its loop makes it, and never longer than the axis.
            written = self.typing.binary("-", stop, start, node.span)
            return start, axis_extent, (written,) if written == room else (written, room)
        if node.hi is None or (reach is not None and surely_nonnegative(axis_extent - reach.high - length)):
            return start, self.sizes.numbers.count(length, "", node.span), ()
        return start, self.sizes.numbers.count(length, "", node.span), (room,)

    def part_of_tile(self, name: str, value: Expr, nodes: Sequence[syntax.Expr], span: Span) -> Expr:
        """`value[i, a:b]` of an array value inside a loop."""
        if isinstance(value, TypedView):
            return self.part_of(name, value, nodes, span)
        values = self.index_values(name, value.shape, nodes, span)
        for axis, index in enumerate(values):
            self.sizes.stay_in_tile(name, axis, value.shape[axis], index, nodes[axis].span)
        return self.elements.element(value, values, span)

    def part_of(self, name: str, value: TypedView, nodes: Sequence[syntax.Expr], span: Span) -> Expr:
        """A slice of a slice, or some of its indices."""
        if len(nodes) > len(value.kept):
            raise self.context.fail("TW003", f"'{name}' has rank {len(value.kept)} but is indexed with {len(nodes)} indices", span)
        starts, kept, shape, limits = list(value.starts), [], [], []
        for position, axis in enumerate(value.kept):
            node = nodes[position] if position < len(nodes) else syntax.Slice(None, None, span=span)
            extent, bounds = value.shape[position], value.limits[position]
            all_of_axis = is_zero(starts[axis]) and extent == value.array.shape[axis]
            if not isinstance(node, syntax.Slice):
                index = self.index_value(name, extent, node)
                if all_of_axis:
                    self.sizes.learn_axis(value.array, axis, index, span)
                else:
                    self.sizes.stay_in_tile(name, position, extent, index, node.span)
                starts[axis] = self.elements.shifted(starts[axis], index, span)
                continue
            if node.lo is not None or node.hi is not None:
                if all_of_axis:
                    self.sizes.bind_section(value.array, axis, *self.edges(name, extent, node)[::2])
                start, extent, section = self.part(name, extent, node, position)
                starts[axis] = self.elements.shifted(starts[axis], start, span)
                bounds = (*section, *(self.typing.binary("-", bound, start, span) for bound in bounds))
            kept.append(axis)
            shape.append(extent)
            limits.append(bounds)
        if not kept:
            return Element(value.array, tuple(starts), span=span)
        return replace(value, starts=tuple(starts), kept=tuple(kept), shape=tuple(shape), limits=tuple(limits), span=span)

    def top_length(self, text: str, axis_extent: Size, start: Expr, stop: Expr, span: Span) -> Size:
        """The length of a slice outside loops: a size that no call makes larger than the array."""
        first, last = size_of(start), size_of(stop)
        if first is None or last is None:
            raise self.context.fail("TW014", f"{text} is not made of sizes of the inputs", span)
        length = last - first if surely_nonnegative(axis_extent - last) else minimum(last, axis_extent) - first
        return self.sizes.numbers.count(length, "", span)


def _section(node: syntax.Slice, start: Expr, stop: Expr) -> str:
    return f"{show_expr(start) if node.lo is not None else ''}:{show_expr(stop) if node.hi is not None else ''}"
