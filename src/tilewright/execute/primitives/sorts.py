"""Sorting: `sort`, `argsort`, `topk`. What follows from it is in `uniques`.

In and out: as for the other primitives (`elements`). All sorts are stable. Floats are in NumPy's order: every NaN behind
everything else (before everything else where the order is descending).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.base.dtypes import i64
from tilewright.base.errors import UserError
from tilewright.execute.devices import place_of
from tilewright.execute.places import Array, DevicePlace, dtype_of
from tilewright.execute.primitives.axes import Lines
from tilewright.execute.primitives.elements import map
from tilewright.execute.primitives.functions import Function

if TYPE_CHECKING:
    from tilewright.ir.program import Program
    from tilewright.primitives.sort import SortPlan


def sort(
    data: Any, values: Any = None, *, axis: int = -1, key: Function | None = None, descending: bool = False, device: str | None = None
) -> Any:
    """The elements in order along an axis; with `values` (of the same shape) also those, moved alike.

    `sort(keys)` gives an array, `sort(keys, values)` a pair. Equal keys keep their order. -0.0 comes before 0.0. `key`, a function of one number, says
    by what elements are ordered.
    """
    place = place_of([data] if values is None else [data, values], device)
    x = place.read("data", data)
    lines = Lines(x.shape, axis, "sort")
    arrays = {"keys": x}
    if values is not None:
        v = arrays["values"] = place.read("values", values)
        if v.shape != x.shape:
            raise UserError.at("TW004", f"sort's values have shape {list(v.shape)}, but its keys {list(x.shape)}")
    arrays = {name: lines.last(place, array) for name, array in arrays.items()}
    if key is None:
        done = sorted_lines(place, arrays, descending, None)
    else:
        order = sorted_lines(place, {"keys": _keys(place, arrays["keys"], key)}, descending, i64)[0]
        done = [gathered(place, array, order) for array in arrays.values()]
    given = tuple(place.give(lines.back(place, a)) for a in done)
    return given if values is not None else given[0]


gpu_sort = sort


def argsort(data: Any, *, axis: int = -1, key: Function | None = None, descending: bool = False, device: str | None = None) -> Any:
    """Where the elements are that stand first, second… in order along an axis, as i64. Stable; `key` as in `sort`."""
    place = place_of([data], device)
    x = place.read("data", data)
    lines = Lines(x.shape, axis, "argsort")
    keys = lines.last(place, x) if key is None else _keys(place, lines.last(place, x), key)
    return place.give(lines.back(place, sorted_lines(place, {"keys": keys}, descending, i64)[0]))


gpu_argsort = argsort


def topk(data: Any, k: int, *, axis: int = -1, largest: bool = True, key: Function | None = None, device: str | None = None) -> Any:
    """The `k` largest (or smallest) elements along an axis in order, the first one first, and where they are (i64): a pair of arrays.

    Of equal elements those that come first are taken, and come first. NaN is larger than everything else. `key` as in `sort`.
    """
    place = place_of([data], device)
    x = place.read("data", data)
    lines = Lines(x.shape, axis, "topk")
    size = x.shape[lines.axis]
    if not isinstance(k, int | np.integer) or isinstance(k, bool) or not 0 <= k <= size:
        raise UserError.at("TW009", f"k is {k!r}, but axis {lines.axis} of the data has {size} element(s)", help=f"give a whole number from 0 to {size}")
    rows = lines.last(place, x)
    keys = rows if key is None else _keys(place, rows, key)
    order = _first(place, keys, int(k), largest)
    return place.give(lines.back(place, gathered(place, rows, order))), place.give(lines.back(place, order))


def _keys(place: DevicePlace, x: Array, key: Function) -> Array:
    """What elements are ordered by."""
    return place.read("key", map(x, key, device=place.device.id))


def gathered(place: DevicePlace, x: Array, order: Array) -> Array:
    """The elements of rows at these places."""
    from tilewright.primitives.gather import gather_program

    dtype = dtype_of(x)
    y = place.new(order.shape, dtype)
    if order.size:
        arrays = {"x": _rows(x), "places": _rows(order), "y": _rows(y)}
        place.run(f"gather {dtype}", lambda: gather_program(dtype, place.target), arrays)
    return y


def _rows(x: Array) -> Array:
    columns = x.shape[-1]
    return x.reshape((x.size // columns, columns))


def _first(place: DevicePlace, keys: Array, k: int, largest: bool) -> Array:
    """Where the k elements are that stand first in each row."""
    *around, size = keys.shape
    if not k or not keys.size:
        return place.new((*around, k), i64)
    if not place.target.simt and k * 4 <= size:
        from tilewright.primitives.cpu_rows import SELECTED, SELECTED_BY_VECTORS, kept_of, select_program_cpu

        rows, dtype = _rows(keys), dtype_of(keys)
        kept = kept_of(k)
        part = SELECTED_BY_VECTORS if kept else max(SELECTED, 4 * k)
        found = place.new((rows.shape[0], max(1, size // part), k), i64)
        place.run(f"select {dtype} {largest} {kept}", lambda: select_program_cpu(dtype, largest, kept), {"keys": rows, "places": found})
        candidates = found.reshape((rows.shape[0], found.size // rows.shape[0]))
        order = sorted_lines(place, {"keys": gathered(place, rows, candidates)}, largest, i64)[0]
        return gathered(place, candidates, _leading(place, order, k)).reshape((*around, k))
    return _leading(place, sorted_lines(place, {"keys": keys}, largest, i64)[0], k)


def _leading(place: DevicePlace, order: Array, k: int) -> Array:
    """The first k of each row, contiguous."""
    if order.shape[-1] == k:
        return order
    return place.read("order", order[..., :k])


def sorted_lines(place: DevicePlace, arrays: dict[str, Array], descending: bool, places: Any) -> list[Array]:
    """The sorted keys and, where there are values, those; where `places` is a dtype, only where the keys were."""
    from tilewright.primitives.sort import WIDE, SortPlan

    x = arrays["keys"]
    payload = places or (dtype_of(arrays["values"]) if "values" in arrays else None)
    plan = SortPlan(dtype_of(x), payload, places is not None, descending, x.size >= WIDE, all(place.aligned(a) for a in arrays.values()))
    made = {} if plan.places else {"sorted": place.new(x.shape, plan.dtype)}
    if payload is not None:
        made["moved"] = place.new(x.shape, payload)
    if x.size:
        if x.ndim == 1 and not place.waits_for_none:
            _sort_flat(place, plan, {**arrays, **made})
        else:
            _sort_rows(place, plan, {**arrays, **made})
    return list(made.values())


def _sort_flat(place: DevicePlace, plan: SortPlan, arrays: dict[str, Array]) -> None:
    from tilewright.primitives.vectors.buckets import SMALLEST, quick_sort_program
    from tilewright.primitives.vectors.rows import sorts_by_vectors

    if sorts_by_vectors(plan, place.target):
        (size,) = arrays["keys"].shape
        if size < SMALLEST:
            _quick_rows(place, plan, {name: array.reshape((1, size)) for name, array in arrays.items()})
        else:
            own = replace(plan, wide=False, aligned=False)
            place.run(f"sort quick {own.key}", lambda: quick_sort_program(own), arrays)
        return

    def build() -> Program:
        from tilewright.primitives.cpu_buckets import bucket_sort_program
        from tilewright.primitives.cpu_sort import sort_program_cpu
        from tilewright.primitives.sort import sort_program

        if place.is_gpu:
            return sort_program(plan, place.target)
        return bucket_sort_program(plan) if plan.passes > 2 else sort_program_cpu(plan)

    place.run(f"sort {plan.key}", build, arrays)


def _quick_rows(place: DevicePlace, plan: SortPlan, arrays: dict[str, Array]) -> None:
    from tilewright.primitives.vectors.rows import quick_rows_program

    own = replace(plan, wide=False, aligned=False)
    place.run(f"sort quick rows {own.key}", lambda: quick_rows_program(own), arrays)


def _sort_rows(place: DevicePlace, plan: SortPlan, arrays: dict[str, Array]) -> None:
    from tilewright.primitives.cpu_rows import LONGEST as LONGEST_ROW
    from tilewright.primitives.cpu_rows import sort_rows_program_cpu
    from tilewright.primitives.rows import LONGEST, row_shape, rows_program
    from tilewright.primitives.vectors.rows import sorts_by_vectors

    *_, columns = arrays["keys"].shape
    rows = arrays["keys"].size // columns
    flat = {name: array.reshape((rows, columns)) for name, array in arrays.items()}
    if place.waits_for_none:
        from tilewright.primitives.threads.sort import threads_sort_program

        own = replace(plan, wide=columns >= 1 << 32, aligned=False)
        place.run(f"sort threads {own.key}", lambda: threads_sort_program(own), flat)
        return
    if place.is_gpu and columns <= LONGEST:
        shape = row_shape(plan, columns, place.target)
        own = replace(plan, wide=False, aligned=False)
        place.run(f"sort rows {own.key} {shape}", lambda: rows_program(own, shape), flat)
        return
    if sorts_by_vectors(plan, place.target) and rows > 1 and columns <= LONGEST_ROW:
        _quick_rows(place, plan, flat)
        return
    if not place.is_gpu and rows > 1 and columns <= LONGEST_ROW:
        own = replace(plan, wide=False, aligned=False)
        place.run(f"sort rows {own.key}", lambda: sort_rows_program_cpu(own), flat)
        return
    for row in range(rows):
        part = {name: array[row] for name, array in flat.items()}
        aligned = all(place.aligned(a) for a in part.values())
        _sort_flat(place, replace(plan, wide=columns >= 1 << 30, aligned=plan.aligned and aligned), part)
