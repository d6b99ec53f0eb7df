"""Convolutions of f32 with few channels, as convolutions of tf32 parts whose pixels overlap.

In: a convolution in loops, and how its parts are to lie. Out: an `ImageForm`: `parts_form` gives the one that a schedule names. With `to_channels_last = rows` (or `rows32`)
parts are an image with channels last and zeros beside each row, and the row of a window is read as channels (`row_windows`): an element is there once, where `folded`
has it once for each place of the window.

    parallel n, k, i, j { acc = reduce c, r, s { yield x[n, c, i + r, j + s - 1] * w[k, c, r, s] }; out[n, k, i, j] = f(acc) }
    -> parallel n, h, w, c { store x.parts[n, h, w, c] = small(x[n, c, h, w - 1]), or 0; store x.parts[N + n, h, w, c] = large(…) }
       parallel k, r, q { store w.parts[0, k, r, q] = small(w[k, q % c, r, q // c]); store w.parts[1, k, r, q] = large(…) }
       parallel n, k, i, j { acc = reduce t, r, q { yield x.parts[n + N * u, i + r, j, q] * w.parts[v, k, r, q] }; out[n, k, i, j] = f(acc) }
       where x.parts has a stride of c along j
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.analysis.contraction import Contraction
from tilewright.base.dtypes import f32, i64, u32
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Value
from tilewright.ir.types import tensor
from tilewright.passes.program.to_channels_last import upwards
from tilewright.passes.windows.image_forms import ImageForm, image_form
from tilewright.passes.windows.row_windows import OVERLAPPING, RowWindows

STEP = 32
"""Channels of one step of the sum: rows of weights are whole steps, for the copy engine takes longer for what lies outside an array."""


def parts_form(kernel: Kernel, folded: int, way: str, found: Contraction | None = None) -> ImageForm | None:
    """The convolution of f32 that a kernel is, as a schedule wants its parts to lie; None where it is none that can be brought to them."""
    if way not in OVERLAPPING:
        return image_form(kernel, found, folded)
    whole = image_form(upwards(kernel))
    if whole is None:
        return None
    axis = whole.order[-2]
    form = RowParts(whole.kernel, whole.found, whole.image, whole.weights, whole.order, whole.channel, (axis,), OVERLAPPING[way])
    return form if axis in form.foldable and form.is_dense else None


@record
class RowParts(RowWindows):
    """A convolution of f32 that reads rows of windows from parts of tf32 whose pixels overlap."""

    @property
    def key(self) -> tuple[object, ...]:
        return ("rows", *self.order, self.first, self.length, self.unit, self.gap)

    @property
    def padded(self) -> Size:
        """Channels of a window's row in the weights, in whole steps."""
        return self._whole(self.depth, STEP)

    def image_parts(self, number: int) -> Value:
        assert self.image.tensor is not None
        inside = [self.image.tensor.shape[axis] for axis in self.order[1:-2]]
        return Value(tensor(f32, self.images * 2, *(inside or [ONE]), self.length, self.unit, align=16), f"{self.kernel.name}.parts{number}")

    def seen(self, parts: Value) -> Value:
        return self.overlapping(parts)

    def stored(self, b: Builder, indices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        at = dict(zip(self.order, indices, strict=True))
        outside = self.pixel_of(b, at, indices[-1])
        return [at[axis] for axis in range(len(self.order))], outside

    def _unfolded(self, b: Builder, index: Value) -> tuple[Value, dict[int, Value]]:
        # Channels of a window's row fit 32 bits, where division is cheap.
        place = b.cast(b.op("floordiv", b.cast(index, u32), b.cast(b.index(self.unit), u32)), i64)
        return b.sub(index, b.mul(place, b.index(self.unit))), {self.axis: place}

    def _there(self, b: Builder, channel: Value, number: Value) -> list[Value]:
        found = super()._there(b, channel, number)
        return [*found, b.op("lt", channel, b.index(self.channels))] if self.unit != self.channels else found
