"""Sorting and what follows from it: `sort`, `argsort`, `unique`, `run_lengths`.

In and out: as for the other primitives (`execute.primitives`). All sorts are stable. Floats are in NumPy's order: every NaN behind
everything else (before everything else where the order is descending).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilewright.base.dtypes import i64
from tilewright.base.errors import UserError
from tilewright.execute.devices import place_of
from tilewright.execute.places import Array, DevicePlace, dtype_of
from tilewright.execute.primitives import filter_into, one_axis

if TYPE_CHECKING:
    from tilewright.ir.program import Program
    from tilewright.primitives.sort import SortPlan


def sort(data: Any, values: Any = None, *, descending: bool = False, device: str | None = None) -> Any:
    """The elements in order, row by row where there are several axes; with `values` (of the same shape) also those, moved alike.

    `sort(keys)` gives an array, `sort(keys, values)` a pair. Equal keys keep their order. -0.0 comes before 0.0.
    """
    given = [data] if values is None else [data, values]
    place = place_of(given, device)
    x = place.read("data", data)
    arrays = {"keys": x}
    if values is not None:
        v = arrays["values"] = place.read("values", values)
        if v.shape != x.shape:
            raise UserError.at("TW004", f"sort's values have shape {list(v.shape)}, but its keys {list(x.shape)}")
    _check_axes(x, "sort")
    done = _sorted(place, arrays, descending, None)
    return tuple(place.give(a) for a in done) if values is not None else place.give(done[0])


gpu_sort = sort


def argsort(data: Any, *, descending: bool = False, device: str | None = None) -> Any:
    """Where the elements are that stand first, second… in order, as i64; row by row where there are several axes. Stable."""
    place = place_of([data], device)
    x = place.read("data", data)
    _check_axes(x, "argsort")
    return place.give(_sorted(place, {"keys": x}, descending, i64)[0])


gpu_argsort = argsort


def unique(data: Any, *, return_counts: bool = False, device: str | None = None) -> Any:
    """The different elements, in order; with `return_counts` also how often each occurs. All NaN are one element."""
    place = place_of([data], device)
    x = place.read("data", data).reshape(-1)
    values, counts = _runs(place, _sorted(place, {"keys": x}, False, None)[0])
    return (values, counts) if return_counts else values


gpu_unique = unique


def run_lengths(data: Any, *, device: str | None = None) -> Any:
    """Run-length encoding: the value of each run of equal neighbours, and its length (i64). NaN equals NaN here."""
    place = place_of([data], device)
    return _runs(place, one_axis(place, "data", data, "run_lengths"))


gpu_run_lengths = run_lengths


def _check_axes(x: Array, what: str) -> None:
    if x.ndim == 0:
        raise UserError.at("TW003", f"{what} takes an array of at least one axis, got a single element")


def _runs(place: DevicePlace, x: Array) -> tuple[Any, Any]:
    dtype = dtype_of(x)
    if not x.size:
        return place.give(place.new((0,), dtype)), place.give(place.new((0,), i64))
    places, count = place.new(x.shape, i64), place.new((1,), i64)
    filter_into(place, {"x": x}, places, count, None, place.aligned(x), heads=True)
    number = int(place.number(count))
    values, lengths = place.new((number,), dtype), place.new((number,), i64)

    def build() -> Program:
        from tilewright.primitives.cpu_chunks import runs_program_cpu
        from tilewright.primitives.filter import runs_program

        return runs_program(dtype) if place.is_gpu else runs_program_cpu(dtype)

    place.run(f"runs {dtype}", build, {"x": x, "places": places[:number], "values": values, "lengths": lengths})
    return place.give(values), place.give(lengths)


def _sorted(place: DevicePlace, arrays: dict[str, Array], descending: bool, places: Any) -> list[Array]:
    """The sorted keys and, where there are values, those; where `places` is a dtype, only where the keys were."""
    from tilewright.primitives.sort import WIDE, SortPlan

    x = arrays["keys"]
    payload = places or (dtype_of(arrays["values"]) if "values" in arrays else None)
    plan = SortPlan(dtype_of(x), payload, places is not None, descending, x.size >= WIDE, all(place.aligned(a) for a in arrays.values()))
    made = {} if plan.places else {"sorted": place.new(x.shape, plan.dtype)}
    if payload is not None:
        made["moved"] = place.new(x.shape, payload)
    if x.size:
        if x.ndim == 1:
            _sort_flat(place, plan, {**arrays, **made})
        else:
            _sort_rows(place, plan, {**arrays, **made})
    return list(made.values())


def _sort_flat(place: DevicePlace, plan: SortPlan, arrays: dict[str, Array]) -> None:
    def build() -> Program:
        from tilewright.primitives.cpu_buckets import bucket_sort_program
        from tilewright.primitives.cpu_sort import sort_program_cpu
        from tilewright.primitives.sort import sort_program

        if place.is_gpu:
            return sort_program(plan, place.target)
        return bucket_sort_program(plan) if plan.passes > 2 else sort_program_cpu(plan)

    place.run(f"sort {plan.key}", build, arrays)


def _sort_rows(place: DevicePlace, plan: SortPlan, arrays: dict[str, Array]) -> None:
    from tilewright.primitives.rows import LONGEST, row_shape, rows_program

    *_, columns = arrays["keys"].shape
    rows = arrays["keys"].size // columns
    flat = {name: array.reshape((rows, columns)) for name, array in arrays.items()}
    if place.is_gpu and columns <= LONGEST:
        shape = row_shape(plan, columns, place.target)
        own = replace(plan, wide=False, aligned=False)
        place.run(f"sort rows {own.key} {shape}", lambda: rows_program(own, shape), flat)
        return
    for row in range(rows):
        part = {name: array[row] for name, array in flat.items()}
        aligned = all(place.aligned(a) for a in part.values())
        _sort_flat(place, replace(plan, wide=columns >= 1 << 30, aligned=plan.aligned and aligned), part)
