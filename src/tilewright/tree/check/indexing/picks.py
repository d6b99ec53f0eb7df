"""Checking indices that make new arrays: `None`, slices with a step, and arrays of indices.

In come an array, or an array value, and what stands in its brackets; out comes a `Picked`: which element of the array each element of the result is.
It is computed where it is used, as other array values are. What is picked follows NumPy: arrays of indices meet as operands do, their axes stand
where they stand in the brackets, or first where slices are between them, and a negative index counts from the end:

    x[:, None] * y          x[i] * y[j]
    x[::-1]                 x[n - 1 - i]
    x[rows, 0]              x[rows[i], 0]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.dtypes import bool_, i64
from tilewright.base.sizes import ONE, Size, ceildiv
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.check.context import Context
from tilewright.tree.check.elements import ElementBuilder, is_zero
from tilewright.tree.check.operations import Typing
from tilewright.tree.check.sizes import SizeChecker
from tilewright.tree.check.slices import SliceChecker
from tilewright.tree.typed import (
    Apply,
    ArrayInfo,
    Const,
    Element,
    Expr,
    Picked,
    PickedAxis,
    SizeValue,
    TypedView,
    Whole,
)


class PickChecker:
    def __init__(
        self, context: Context, sizes: SizeChecker, typing: Typing, elements: ElementBuilder, slices: SliceChecker,
        evaluate: Callable[[syntax.Expr], Expr],
    ) -> None:  # fmt: skip
        """`evaluate` types the expressions inside the brackets."""
        self.context = context
        self.sizes = sizes
        self.typing = typing
        self.elements = elements
        self.slices = slices
        self.evaluate = evaluate

    def picked(
        self, name: str, array: ArrayInfo | Expr, lead: tuple[Expr, ...], nodes: Sequence[syntax.Expr], arrays: dict[int, Expr], span: Span
    ) -> Expr:  # fmt: skip
        """`name[…]`; `arrays` are the indices that are arrays, by their position in the brackets."""
        nodes = list(nodes)
        rank = len(array.shape) - len(lead)
        nodes += [syntax.Slice(None, None, span=span) for _ in range(rank - sum(not isinstance(n, syntax.Nothing) for n in nodes))]
        steps = {at: self.step(node) for at, node in enumerate(nodes) if isinstance(node, syntax.Slice)}
        plain: list[syntax.Expr] = []
        """What is left for each axis without steps, new axes and arrays."""
        for at, node in enumerate(nodes):
            if at in arrays:
                plain.append(syntax.Slice(None, None, span=node.span))
            elif isinstance(node, syntax.Slice):
                plain.append(syntax.Slice(node.lo, node.hi, span=node.span))
            elif not isinstance(node, syntax.Nothing):
                plain.append(node)
        base = self.base(name, array, lead, plain, span)
        met = self.sizes.broadcast([value.shape for value in arrays.values()], span)
        kinds = ["array" if at in arrays else "run" if at in steps else "new" if isinstance(node, syntax.Nothing) else "number" for at, node in enumerate(nodes)]
        first = _first_array(kinds)
        shape: list[Size] = list(met) if first < 0 else []
        before = len(shape)
        axes: list[PickedAxis] = []
        extents = iter(base.shape)
        for at, kind in enumerate(kinds):
            if at == first:
                before = len(shape)
                shape += met
            if kind == "run":
                extent, step = next(extents), steps[at]
                axes.append(PickedAxis(len(shape), SizeValue(extent - 1, span=span) if step < 0 else None, step))
                shape.append(extent if step == 1 else ceildiv(extent, abs(step)))
            elif kind == "new":
                shape.append(ONE)
            elif kind == "array":
                axes.append(PickedAxis(-1, index=self.wrapped(arrays[at], next(extents), span)))
        start = 0 if first < 0 else before
        axes = [axis if axis.index is None else PickedAxis(start + len(met) - len(axis.index.shape), index=axis.index) for axis in axes]
        self.check_limits(name, base, axes, span)
        return Picked(base, tuple(axes), tuple(shape), span=span)

    def step(self, node: syntax.Slice) -> int:
        """The step of a slice, a constant."""
        value = None if node.step is None else self.evaluate(node.step)
        if value is None:
            return 1
        if not isinstance(value, Const) or not isinstance(value.value, int) or isinstance(value.value, bool) or value.value == 0:
            assert node.step is not None
            raise self.context.fail("TW016", "the step of a slice must be a constant integer other than 0", node.step.span, "index in a loop over range(start, stop, step)")
        if value.value < 0 and (node.lo is not None or node.hi is not None):
            raise self.context.fail("TW005", "a slice with a negative step and a start or a stop", node.span, "take the part first, and turn that around: x[a:b][::-1]")
        return int(value.value)

    def base(self, name: str, array: ArrayInfo | Expr, lead: tuple[Expr, ...], plain: Sequence[syntax.Expr], span: Span) -> Expr:
        """The array with its slices and numbers alone."""
        bare = all(isinstance(n, syntax.Slice) and n.lo is None and n.hi is None for n in plain)
        if bare and not lead:
            return Whole(array, span=span) if isinstance(array, ArrayInfo) else array
        if isinstance(array, ArrayInfo) and all(not isinstance(n, syntax.Slice) for n in plain) and len(plain) + len(lead) == array.rank:
            return Element(array, self.slices.access(array, plain, span, lead=lead), span=span)
        if isinstance(array, ArrayInfo):
            view = self.slices.place(array, lead, plain, span)
            return view if self.context.loops else _of_whole(view)
        if isinstance(array, TypedView):
            return self.slices.part_of(name, array, plain, span)
        axes: list[PickedAxis] = []
        shape: list[Size] = []
        for axis, (node, extent) in enumerate(zip(plain, array.shape, strict=True)):
            if isinstance(node, syntax.Slice):
                start, length, bounds = self.slices.part(name, extent, node, axis) if node.lo is not None or node.hi is not None else (None, extent, ())
                if bounds:
                    raise self.context.fail("TW005", f"a slice of the tile '{name}'", node.span, "slice the array it is made from")
                axes.append(PickedAxis(len(shape), None if start is None or is_zero(start) else start))
                shape.append(length)
            else:
                index = self.slices.index_value(name, extent, node)
                self.sizes.stay_in_tile(name, axis, extent, index, node.span)
                axes.append(PickedAxis(len(shape), index=index))
        return Picked(array, tuple(axes), tuple(shape), span=span)

    def wrapped(self, index: Expr, extent: Size, span: Span) -> Expr:
        """An array of indices, of which the negative ones count from the end."""
        if not index.dtype.is_int:
            raise self.context.fail("TW009", f"an array of indices must hold integers, got {index.dtype}", span)
        unsigned = index.dtype.kind == "u"
        index = self.typing.convert(index, i64)
        if unsigned:
            return index
        zero = Const(0, i64, span=span)
        shape = index.shape
        turned = Apply("add", (index, SizeValue(extent, weak="", span=span)), i64, "", shape, span=span)
        return Apply("select", (Apply("lt", (index, zero), bool_, "", shape, span=span), turned, index), i64, "", shape, span=span)

    def check_limits(self, name: str, base: Expr, axes: Sequence[PickedAxis], span: Span) -> None:
        """A slice that may be short has no last element, and no place for every index."""
        limits = base.limits if isinstance(base, TypedView) else ()
        for axis, bounds in zip(axes, limits, strict=False):
            if bounds and (axis.index is not None or axis.step < 0):
                raise self.context.fail("TW005", f"a slice of '{name}' that may reach beyond it is picked from", span, "take all of the axis, or index in a loop")


def _first_array(kinds: Sequence[str]) -> int:
    """Where the axes of index arrays stand in the brackets; -1: before all others, since slices are between them."""
    if "array" not in kinds:
        return len(kinds)
    given = [at for at, kind in enumerate(kinds) if kind in ("array", "number")]
    return given[0] if given[-1] - given[0] == len(given) - 1 else -1


def _of_whole(view: TypedView) -> Expr:
    """A part of an array, as a pick of all of it."""
    axes = tuple(
        PickedAxis(view.kept.index(axis), None if is_zero(start) else start) if axis in view.kept else PickedAxis(0, index=start)
        for axis, start in enumerate(view.starts)
    )
    return Picked(Whole(view.array, span=view.span), axes, view.shape, span=view.span)


def expanded(nodes: Sequence[syntax.Expr], rank: int) -> tuple[syntax.Expr, ...]:
    """Indices with `...` written out."""
    where = next((at for at, node in enumerate(nodes) if isinstance(node, syntax.Rest)), None)
    if where is None:
        return tuple(nodes)
    given = sum(not isinstance(node, syntax.Nothing | syntax.Rest) for node in nodes)
    rest = tuple(syntax.Slice(None, None, span=nodes[where].span) for _ in range(rank - given))
    return (*nodes[:where], *rest, *nodes[where + 1 :])

