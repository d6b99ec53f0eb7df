"""Convolutions whose windows along the last axis of the image are read as channels, from a copy whose pixels overlap.

In: a convolution in loops (`ImageForm`). Out: how rows of such a copy lie: [n, h, w, c] with the channels of a pixel in whole 16 bytes or 32 (`unit`), and zeros beside
each row, as far as windows reach (`length`). All pixels of a window's row are then neighbours in memory, and so are their channels: the copy engine is told of an array
[n, h, j, q], q being all channels of the window's row (`depth`), and no byte is copied twice (`overlapping`).
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size, contiguous_strides
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Tensor
from tilewright.passes.windows.image_forms import ImageForm

OVERLAPPING = {"rows": 16, "rows32": 32}
"""Values of a schedule's `to_channels_last` with which pixels overlap, and of how many bytes their channels are whole multiples: pixels that begin at whole 32 bytes are read faster,
from more memory."""


@record
class RowWindows(ImageForm):
    """A convolution whose windows along the last axis of the image are read as channels."""

    whole: int = 16
    """Bytes of which a pixel's channels are a whole multiple; 0: as many as there are, and rows of windows do not overlap."""

    @property
    def axis(self) -> int:
        return self.folded[0]

    @property
    def first(self) -> Size:
        """Where windows begin along the axis."""
        return self.found.access(self.image)[self.axis].constant

    @property
    def is_dense(self) -> bool:
        """Whether a window has several places along the axis, and these are neighbours once places that no window reads are left out."""
        position, taps = self._taps_along(self.axis)
        if position is None or taps == ONE or self.gap <= 0:
            return False
        if not self.whole:
            return self.image.tensor is not None and self.image.tensor.strides[self.order[-1]] == ONE  # copies read along channels
        return self.step(self.axis) % self.gap == 0

    @property
    def gap(self) -> int:
        """How far a window's places lie apart; so do the places that are copied."""
        position = self._taps_along(self.axis)[0]
        return 0 if position is None else self.found.access(self.image)[self.axis].factor(self.found.k[position]).constant or 0

    @property
    def apart(self) -> int:
        """How many pixels of a copied row windows of neighbouring results lie apart."""
        return self.step(self.axis) // self.gap

    @property
    def unit(self) -> Size:
        """Channels of a pixel, and zeros."""
        return self._whole(self.channels, max(1, self.whole // self.image.dtype.itemsize))

    @property
    def depth(self) -> Size:
        return self.unit * self.taps_along(self.axis)

    @property
    def length(self) -> Size:
        """Pixels of a row that windows reach."""
        return (self._places(self.axis) - 1) * self.apart + self.taps_along(self.axis)

    def overlapping(self, rows: Value) -> Value:
        """The same as an array of windows' rows."""
        assert isinstance(rows.type, Tensor)
        *outside, _, unit = rows.type.shape
        *strides, _, one = contiguous_strides(rows.type.shape)
        if not self.whole:
            return Value(replace(rows.type, shape=(*rows.type.shape[:-1], self.depth)), rows.name)
        shape = (*outside, self._places(self.axis), self.depth)
        return Value(replace(rows.type, shape=shape, strides=(*strides, self.pitch(unit), one)), rows.name)

    def pitch(self, unit: Size) -> Size:
        """Elements from one window's row to the next, in a copy whose last axis has so many."""
        return unit * self.apart if self.whole else unit

    def pixel_of(self, b: Builder, axes: dict[int, Value], channel: Value) -> list[Value]:
        """Where in the image an element of the copy is, which `axes` becomes: the conditions that there is one."""
        assert self.image.tensor is not None
        place = b.add(b.mul(axes[self.axis], b.index(self.gap)), b.index(self.first))
        axes[self.axis] = place
        inside = [b.op("ge", place, b.index(0)), b.op("lt", place, b.index(self.image.tensor.shape[self.axis]))]
        if self.unit != self.channels:
            inside.append(b.op("lt", channel, b.index(self.channels)))
        return inside
