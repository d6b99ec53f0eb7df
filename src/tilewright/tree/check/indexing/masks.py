"""Elements that a mask selects: `x[x > 0]`.

How many there are is known only when the kernel runs. So such a value is not an array with memory: it has one axis, whose size is a name of its own for each
mask. Values under one mask combine with each other and with numbers. What takes them are reductions, where the other elements count for nothing, and stores
under the same mask:

    x[m].sum()              sum(where(m, x, 0))
    out[m] = 2 * x[m]       out[:] = where(m, 2 * x, out)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.base.sizes import Size
from tilewright.base.source import Span
from tilewright.tree.check.context import Context
from tilewright.tree.check.sizes import SizeChecker
from tilewright.tree.typed import Apply, Cast, Expr, Masked, Shape

_MARK = "?mask"


def is_masked(shape: Shape) -> bool:
    """Whether it is the shape of elements that a mask selects."""
    return any(name.startswith(_MARK) for size in shape for name in size.names)


class MaskChecker:
    def __init__(self, context: Context, sizes: SizeChecker) -> None:
        self.context = context
        self.sizes = sizes

    def masked(self, name: str, value: Expr, mask: Expr, span: Span) -> Expr:
        """`value[mask]`"""
        self.fits(name, value.shape, mask, span)
        if mask not in self.context.masks:
            self.context.masks.append(mask)
        return Masked(value, mask, (Size.of(f"{_MARK}{self.context.masks.index(mask)}"),), span=span)

    def fits(self, name: str, shape: Shape, mask: Expr, span: Span) -> None:
        """A mask has the shape of what it selects from."""
        if len(mask.shape) != len(shape):
            raise self.context.fail(
                "TW003", f"'{name}' has rank {len(shape)}, and its mask has rank {len(mask.shape)}", span, "a mask is an array of bool of the same shape, and the only index"
            )
        for own, other in zip(shape, mask.shape, strict=True):
            if own != other:
                self.sizes.make_equal(own, other, span)

    def unmasked(self, value: Expr, span: Span) -> tuple[Expr, Expr | None]:
        """The value for all elements, and the mask that selects some; None where there is none."""
        masks: list[Expr] = []
        whole = self._whole(value, masks, span)
        return whole, masks[0] if masks else None

    def _whole(self, value: Expr, masks: list[Expr], span: Span) -> Expr:
        if isinstance(value, Masked):
            if not masks:
                masks.append(value.mask)
            return value.value
        if not is_masked(value.shape):
            return value
        if isinstance(value, Apply):
            args = tuple(self._whole(a, masks, span) for a in value.args)
            return replace(value, args=args, shape=self.sizes.broadcast([a.shape for a in args], span))
        if isinstance(value, Cast):
            return replace(value, value=self._whole(value.value, masks, span))
        self.refuse(value.shape, span)
        return value

    def refuse(self, shape: Sequence[Size], span: Span) -> None:
        """Elements that a mask selects have no shape, no places and no memory."""
        for size in shape:
            self.sizes.known(size, span)
