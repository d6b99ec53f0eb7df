"""What is different: `unique`, of elements or of slices along an axis, and `run_lengths`.

In and out: as for the other primitives (`elements`). Slices are sorted by words that hold the keys of a few of their elements each, from the last word to
the first, stably; then each is compared with the one before it. How many differ is the one number that the host waits for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.base.dtypes import bool_, i64
from tilewright.execute.devices import place_of
from tilewright.execute.places import Array, DevicePlace, dtype_of
from tilewright.execute.primitives.axes import Lines, axis_of, numbers_only
from tilewright.execute.primitives.elements import filled, one_axis
from tilewright.execute.primitives.filters import filter_into, taken, true_places
from tilewright.execute.primitives.sorts import gathered, sorted_lines

if TYPE_CHECKING:
    from tilewright.ir.program import Program


def unique(data: Any, *, axis: int | None = None, return_counts: bool = False, device: str | None = None) -> Any:
    """The different elements, in order; with `return_counts` also how often each occurs. All NaN are one element.

    With `axis`, the different slices along it, in the order of their elements from the first on; the result has the data's axes. Of equal slices the first
    one is given. As in NumPy, slices of arrays of two and more axes that hold a NaN are all different.
    """
    numbers_only(data, "unique")
    place = place_of([data], device)
    x = place.read("data", data)
    along = None if axis is None else axis_of(axis, x.shape, "unique")
    if along is None or x.ndim == 1:
        (ordered,) = sorted_lines(place, {"keys": x.reshape(-1)}, False, None)
        if not return_counts and not place.target.simt and isinstance(ordered, np.ndarray):
            return place.give(_heads(place, ordered))
        values, counts = _runs(place, ordered)
    else:
        values, counts = _slices(place, x, along)
    return (place.give(values), place.give(counts)) if return_counts else place.give(values)


gpu_unique = unique


def run_lengths(data: Any, *, device: str | None = None) -> Any:
    """Run-length encoding: the value of each run of equal neighbours, and its length (i64). NaN equals NaN here."""
    place = place_of([data], device)
    values, lengths = _runs(place, one_axis(place, "data", data, "run_lengths"))
    return place.give(values), place.give(lengths)


gpu_run_lengths = run_lengths


def _heads(place: DevicePlace, x: np.ndarray) -> Array:
    """The values of runs, on a CPU: they are all that is written."""
    dtype = dtype_of(x)
    if not x.size:
        return place.new((0,), dtype)
    values, count = place.new(x.shape, dtype), place.new((1,), i64)
    filter_into(place, {"x": x}, values, count, None, place.aligned(x), heads=True, values=True)
    found = values[: int(place.number(count))]
    # A few of many do not keep the memory of all.
    return np.array(found) if 2 * found.size < x.size else found


def _runs(place: DevicePlace, x: Array) -> tuple[Array, Array]:
    """The values of runs, and their lengths."""
    if not x.size:
        return place.new((0,), dtype_of(x)), place.new((0,), i64)
    places, count = place.new(x.shape, i64), place.new((1,), i64)
    filter_into(place, {"x": x}, places, count, None, place.aligned(x), heads=True)
    return _runs_at(place, x, places[: int(place.number(count))])


def _runs_at(place: DevicePlace, x: Array, places: Array) -> tuple[Array, Array]:
    """The first elements and the lengths of the runs that begin at these places."""
    dtype = dtype_of(x)
    values, lengths = place.new(places.shape, dtype), place.new(places.shape, i64)

    def build() -> Program:
        from tilewright.primitives.cpu_chunks import runs_program_cpu
        from tilewright.primitives.filter import runs_program

        return runs_program(dtype) if place.target.simt else runs_program_cpu(dtype)

    place.run(f"runs {dtype}", build, {"x": x, "places": places, "values": values, "lengths": lengths})
    return values, lengths


def _slices(place: DevicePlace, x: Array, axis: int) -> tuple[Array, Array]:
    """The different slices along an axis, and how often each occurs."""
    from tilewright.primitives.gather import heads_program

    size, lines, dtype = x.shape[axis], Lines(x.shape, axis, "unique"), dtype_of(x)
    if not x.size:
        # Slices without elements are all alike.
        number = min(size, 1)
        return place.new((*lines.before, number, *lines.after), dtype), filled(place.new((number,), i64), size)
    words = _words(place, lines.last(place, x).reshape((x.size // size, size)))
    word = dtype_of(words)
    order = _order(place, words)
    flags = place.new((size,), bool_)
    place.run(f"heads {dtype} {word}", lambda: heads_program(dtype, word, place.target), {"words": words, "order": order, "flags": flags})
    first, counts = _runs_at(place, order, true_places(place, flags))
    return taken(place, x, axis, first), counts


def _words(place: DevicePlace, columns: Array) -> Array:
    """The keys of a few columns each, as words."""
    from tilewright.primitives.gather import word_dtype, words_program
    from tilewright.primitives.keys import key_dtype

    dtype = dtype_of(columns)
    number, size = columns.shape
    word = word_dtype(dtype, number)
    words = place.new((math.ceil(number * key_dtype(dtype).bits / word.bits), size), word)
    place.run(f"words {dtype} {word}", lambda: words_program(dtype, word, place.target), {"x": columns, "words": words})
    return words


def _order(place: DevicePlace, words: Array) -> Array:
    """Where the columns of words stand that come first, second… in order. Each sort keeps the order of those before it."""
    *others, last = range(words.shape[0])
    (order,) = sorted_lines(place, {"keys": words[last]}, False, i64)
    for group in reversed(others):
        _, order = sorted_lines(place, {"keys": gathered(place, words[group], order), "values": order}, False, None)
    return order
