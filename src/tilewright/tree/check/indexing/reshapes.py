"""Checking `x.reshape(a, b)`: the same elements in the same order under another shape.

In come an array value and the extents as written, one of which may be -1; out comes a `Picked`, index arithmetic without memory of its own. Axes that stay
are kept apart, so that an axis that is split or joined costs nothing for the others:

    x[n, d].reshape(n, h, -1)       x[i, j * (d // h) + k]
    x[n, d].reshape(-1)             x[i // d, i % d]

That both shapes have as many elements is known from the sizes, or calls check it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import i64
from tilewright.base.sizes import ONE, Size, floordiv, product, size_text
from tilewright.base.source import Span
from tilewright.tree.check.context import Context
from tilewright.tree.check.elements import limits_of
from tilewright.tree.check.operations import Typing
from tilewright.tree.check.sizes import SizeChecker
from tilewright.tree.typed import AxisIndex, Expr, Picked, PickedAxis, Shape, SizeValue

_Group = tuple[range, range]


class ReshapeChecker:
    def __init__(self, context: Context, sizes: SizeChecker, typing: Typing) -> None:
        self.context = context
        self.sizes = sizes
        self.typing = typing

    def reshaped(self, value: Expr, extents: Sequence[Size | None], span: Span) -> Expr:
        """The value under another shape; None stands for the extent that follows from the others."""
        if any(limits_of(value)):
            raise self.context.fail("TW005", "a slice that may reach beyond its array is reshaped", span, "take all of the axis, or index in a loop")
        shape = self.shape(value.shape, extents, span)
        if shape == value.shape:
            return value
        axes: list[PickedAxis] = []
        for own, new in groups(value.shape, shape):
            if len(own) == 1 and len(new) == 1:
                axes.append(PickedAxis(new[0]))
                continue
            place = self.linear(shape, new, span)
            for axis in own:
                axes.append(PickedAxis(0, index=self.part(place, value.shape, own, axis, span)))
        return Picked(value, tuple(axes), shape, span=span)

    def shape(self, own: Shape, extents: Sequence[Size | None], span: Span) -> Shape:
        """The new shape, of as many elements."""
        if sum(extent is None for extent in extents) > 1:
            raise self.context.fail("TW016", "reshape() can find one extent, and more than one is -1", span)
        known = [extent for extent in extents if extent is not None]
        for extent in known:
            if extent.constant is not None and extent.constant < 0:
                raise self.context.fail("TW016", f"reshape() was given the extent {extent}", span, "extents are 0 or more; -1 stands for the one that follows from the others")
        left = quotient(product(own), product(known))
        shape = tuple(left if extent is None else extent for extent in extents)
        new, old = product(shape), product(own)
        if new.constant is not None and old.constant is not None and new != old:
            raise self.context.fail("TW004", f"an array of {_text(own)} ({old} elements) cannot have shape {_text(extents)}", span)
        if new != old:
            message = f"an array of {_text(own)} ({{right}} elements) cannot have shape {_text(extents)}, which has {{left}}"
            self.sizes.require(new, "eq", old, message, span)
        return shape

    def linear(self, shape: Shape, axes: range, span: Span) -> Expr:
        """The place of an element among those of these axes."""
        total: Expr | None = None
        for axis in axes:
            if shape[axis] == ONE:
                continue
            index: Expr = AxisIndex(axis, shape, span=span)
            apart = product(shape[axis + 1 : axes.stop])
            if apart != ONE:
                index = self.typing.binary("*", index, SizeValue(apart, span=span), span)
            total = index if total is None else self.typing.binary("+", total, index, span)
        return self.typing.literal(0, span) if total is None else self.typing.convert(total, i64)

    def part(self, place: Expr, shape: Shape, axes: range, axis: int, span: Span) -> Expr:
        """The index along one axis of the place among several."""
        if shape[axis] == ONE:
            return self.typing.convert(self.typing.literal(0, span), i64)
        inner = product(shape[axis + 1 : axes.stop])
        if inner != ONE:
            place = self.typing.binary("//", place, SizeValue(inner, span=span), span)
        if any(shape[a] != ONE for a in axes if a < axis):
            place = self.typing.binary("%", place, SizeValue(shape[axis], span=span), span)
        return self.typing.convert(place, i64)


def groups(own: Shape, new: Shape) -> list[_Group]:
    """Axes of both shapes, in groups of as many elements; what is not known to be equal is one group."""
    first = 0
    found: list[_Group] = []
    while first < min(len(own), len(new)) and own[first] == new[first]:
        found.append((range(first, first + 1), range(first, first + 1)))
        first += 1
    ends: list[_Group] = []
    i, j = len(own), len(new)
    while i > first and j > first and own[i - 1] == new[j - 1]:
        i, j = i - 1, j - 1
        ends.insert(0, (range(i, i + 1), range(j, j + 1)))
    a, b = first, first
    while a < i and b < j:
        both = ((c, d) for total in range(2, i - a + j - b) for c in range(1, min(total, i - a + 1)) if 0 < (d := total - c) <= j - b)
        cut = next(((c, d) for c, d in both if product(own[a : a + c]) == product(new[b : b + d])), None)
        if cut is None:
            break
        found.append((range(a, a + cut[0]), range(b, b + cut[1])))
        a, b = a + cut[0], b + cut[1]
    if a < i or b < j:
        found.append((range(a, i), range(b, j)))
    return found + ends


def quotient(total: Size, known: Size) -> Size:
    """What is left of a product of extents; factors that both have are cancelled."""
    if len(total.terms) == 1 and len(known.terms) == 1:
        (factors, number), (others, divisor) = total.terms[0], known.terms[0]
        left, rest = list(factors), []
        for factor in others:
            if factor in left:
                left.remove(factor)
            else:
                rest.append(factor)
        if number % divisor == 0:
            number, divisor = number // divisor, 1
        total, known = Size(((tuple(left), number),)), Size(((tuple(rest), divisor),))
    return total if known == ONE else floordiv(total, known)


def _text(shape: Sequence[Size | None]) -> str:
    return f"[{', '.join('-1' if extent is None else size_text(extent) for extent in shape)}]"
