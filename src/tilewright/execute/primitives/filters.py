"""Filters: the elements, or the slices along an axis, that are wanted.

In and out: as for the other primitives (`elements`). How many there are is the one number that the host waits for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tilewright.base.dtypes import bool_, i64
from tilewright.base.errors import UserError
from tilewright.execute.devices import place_of
from tilewright.execute.places import Array, ArrayPlace, DevicePlace, dtype_of
from tilewright.execute.primitives.axes import axis_of, numbers_only
from tilewright.execute.primitives.functions import function_of
from tilewright.execute.primitives.known_filters import known_filter, learn_filter

if TYPE_CHECKING:
    from tilewright.ir.program import Program
    from tilewright.primitives.functions import ScalarFunction
    from tilewright.runtime.core.device import LoadedProgram


def filter(data: Any, wanted: Any, *, axis: int | None = None, device: str | None = None) -> Any:
    """The elements for which `wanted` holds, in order: a predicate (`lambda v: v > 0`) or an array of bools of the same shape. The result has one axis.

    With `axis`, `wanted` is an array of bools with one for each place along that axis: slices are kept or left out, and the result has the data's axes.
    """
    if axis is None and device is None and callable(wanted):
        known = known_filter(data, wanted)
        if known is not None:
            return known
    numbers_only(data, "filter")
    place = place_of([data] if callable(wanted) else [data, wanted], device)
    given = place.read("data", data)
    if axis is not None:
        along = axis_of(axis, given.shape, "filter")
        if given.ndim > 1:
            return place.give(_slices(place, given, wanted, along))
    x = given.reshape(-1)
    arrays = {"x": x}
    predicate = None
    aligned = place.aligned(x)
    if callable(wanted):
        predicate = function_of(wanted, (dtype_of(x),), bool_)
    else:
        mask = place.read("wanted", wanted)
        if dtype_of(mask) is not bool_ or mask.shape != given.shape:
            raise UserError.at(
                "TW009", f"filter's mask is {dtype_of(mask)}{list(mask.shape)}, but the data have shape {list(given.shape)}",
                help="give a function, or an array of bools with an element for each of the data's",
            )  # fmt: skip
        mask = arrays["mask"] = mask.reshape(-1)
        aligned = aligned and place.aligned(mask)
    if not x.size:
        return place.give(place.new((0,), dtype_of(x)))
    y, count = place.new(x.shape, dtype_of(x)), place.new((1,), i64)
    program = filter_into(place, arrays, y, count, predicate, aligned)
    if program is not None and predicate is not None and isinstance(place, ArrayPlace) and place.runtime.writes_pinned and not place.on_host:
        learn_filter(data, wanted, place.runtime, program, place.place.library)
    return place.give(y)[: int(place.number(count))]


gpu_filter = filter


def _slices(place: DevicePlace, x: Array, wanted: Any, axis: int) -> Array:
    """The slices along an axis for which a mask is true."""
    size = x.shape[axis]
    if callable(wanted):
        raise UserError.at(
            "TW009", f"filter along axis {axis} takes a mask, but 'wanted' is a function, which tells of elements and not of slices whether they stay",
            help=f"give an array of {size} bools, or leave axis= out",
        )  # fmt: skip
    mask = place.read("wanted", wanted)
    if dtype_of(mask) is not bool_ or mask.shape != (size,):
        raise UserError.at(
            "TW009", f"filter's mask is {dtype_of(mask)}{list(mask.shape)}, but axis {axis} of the data has {size} place(s)",
            help=f"give an array of {size} bools",
        )  # fmt: skip
    return taken(place, x, axis, true_places(place, mask))


def true_places(place: DevicePlace, mask: Array) -> Array:
    """Where bools are true, as i64. Waits for their number."""
    if not mask.size:
        return place.new((0,), i64)
    places, count = place.new(mask.shape, i64), place.new((1,), i64)
    filter_into(place, {"x": mask}, places, count, None, place.aligned(mask), trues=True)
    return places[: int(place.number(count))]


def taken(place: DevicePlace, x: Array, axis: int, places: Array) -> Array:
    """The slices at these places of an axis."""
    from tilewright.primitives.gather import take_program

    before, after, dtype = x.shape[:axis], x.shape[axis + 1 :], dtype_of(x)
    y = place.new((*before, *places.shape, *after), dtype)
    if y.size:
        outer, inner = math.prod(before), math.prod(after)
        width = 1
        if place.target.simt and place.aligned(x):
            width = math.gcd(inner, min(16 // dtype.itemsize, 8))
        wide = place.target.simt and y.size >= 1 << 31
        arrays = {"x": x.reshape((outer, x.shape[axis], inner)), "places": places, "y": y.reshape((outer, places.shape[0], inner))}
        single = not place.target.simt and inner == 1
        place.run(f"take {dtype} {width} {wide} {single}", lambda: take_program(dtype, place.target, width, wide, single), arrays)
    return y


def filter_into(
    place: DevicePlace, arrays: dict[str, Array], y: Array, count: Array, predicate: ScalarFunction | None, aligned: bool, heads: bool = False,
    trues: bool = False, values: bool = False,
) -> LoadedProgram | None:  # fmt: skip
    """Run it, and give the program on the device, where devices have such. `values`: of heads the elements, on a CPU."""
    dtype = dtype_of(arrays["x"])

    def build() -> Program:
        from tilewright.primitives.cpu_chunks import filter_program_cpu
        from tilewright.primitives.filter import filter_program
        from tilewright.primitives.threads.filter import threads_filter_program

        if place.is_gpu:
            return filter_program(dtype, predicate, place.target, aligned, heads, trues=trues)
        if place.waits_for_none:
            return threads_filter_program(dtype, predicate, heads, trues, y.size >= 1 << 32)
        return filter_program_cpu(dtype, predicate, heads, trues, values)

    what = f"filter {dtype} {predicate.key if predicate else 'heads' + ' values' * values if heads else 'trues' if trues else 'mask'} {aligned}"
    return place.run(what, build, {**arrays, "y": y, "count": count})
