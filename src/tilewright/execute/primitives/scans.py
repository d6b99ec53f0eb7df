"""Scans: `scan`, along any axis of one or several arrays.

In and out: as for the other primitives (`elements`). Arrays are read as `[outer, n, inner]`, contiguous, and scanned along `n`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tilewright.base.dtypes import DType, compute_dtype
from tilewright.base.errors import UserError
from tilewright.execute.arrays import as_dtype
from tilewright.execute.devices import place_of
from tilewright.execute.places import Array, DevicePlace, Number, dtype_of
from tilewright.execute.primitives.axes import axis_of
from tilewright.execute.primitives.functions import Function, monoid_of, number_of, state_functions_of

if TYPE_CHECKING:
    from tilewright.ir.program import Program
    from tilewright.primitives.scan_plan import ScanPlan, Segments, StateFunction


def scan(
    data: Any, op: str | Function = "sum", *, axis: int = -1, exclusive: bool = False, reverse: bool = False, init: Any = None,
    segments: Any = None, dtype: Any = None, device: str | None = None,
) -> Any:  # fmt: skip
    """Every element becomes the combination of all up to it along an axis: `scan(x)` is the running sum of each row.

    `op` is a name (sum, prod, min, max, and, or, xor) or an associative function of two numbers. `exclusive=True` leaves the element itself out and
    begins with `init`, which functions without a name then need. `reverse=True` runs from the last element to the first. `segments` begins anew where a
    segment begins: an array of bools that are true there, or of integers that change there, of the data's shape or with one for each place along the
    axis. `data` may be a tuple of arrays of one shape: `op` is then a function of two tuples of numbers that returns one, and a tuple of
    arrays comes out. Results have the data's dtype or `dtype`.
    """
    several = isinstance(data, tuple)
    given = list(data) if several else [data]
    if not given:
        raise UserError.at("TW016", "scan takes an array or a tuple of arrays, got an empty tuple")
    place = place_of([*given, *([] if segments is None else [segments])], device)
    arrays = [place.read(f"data {k}" if several else "data", value) for k, value in enumerate(given)]
    shape = arrays[0].shape
    if any(a.shape != shape for a in arrays):
        raise UserError.at("TW004", f"scan takes arrays of one shape, got {' and '.join(str(list(a.shape)) for a in arrays)}")
    along = axis_of(axis, shape, "scan")
    outer, size, inner = math.prod(shape[:along]), shape[along], math.prod(shape[along + 1 :])
    plan, scalars = _plan(arrays, op, exclusive, reverse, init, dtype)
    marks = None if segments is None else place.read("segments", segments)
    results = [place.new(shape, d) for d in plan.results]
    if arrays[0].size:
        named = dict(zip((*plan.inputs, *plan.outputs), (*arrays, *results), strict=True))
        found = None if marks is None else _segments(marks, shape, size)
        _run(place, plan, found, named, marks, (outer, size, inner), scalars)
    elif marks is not None:
        _segments(marks, shape, size)
    out = tuple(place.give(y) for y in results)
    return out if several else out[0]


gpu_scan = scan


def _plan(
    arrays: list[Array], op: str | Function, exclusive: bool, reverse: bool, init: Any, dtype: Any
) -> tuple[ScanPlan, dict[str, Number]]:
    """What is computed, without segments, and the numbers that begin it."""
    from tilewright.primitives.scan_plan import ScanPlan

    dtypes = tuple(dtype_of(a) for a in arrays)
    wanted = dtype if isinstance(dtype, tuple) else (dtype,) * len(arrays)
    if len(wanted) != len(arrays):
        raise UserError.at("TW016", f"scan has {len(arrays)} array(s), but {len(wanted)} dtypes")
    results = tuple(d if w is None else as_dtype(w) for d, w in zip(dtypes, wanted, strict=True))
    function = _function(op, results)
    if exclusive and init is None:
        identity = function.identity
        if identity is None:
            raise UserError.at("TW008", "an exclusive scan with a function needs init=: what the first element becomes")
        init = identity[0] if function.monoid is None or function.monoid.opcode != "add" else 0
    plan = ScanPlan(dtypes, results, function, exclusive, init is not None, reverse)
    if init is None:
        return plan, {}
    numbers = init if isinstance(init, tuple) else (init,)
    if len(numbers) != len(arrays):
        raise UserError.at("TW016", f"init is {init!r}, but scan has {len(arrays)} array(s)", help="give a number for each")
    values = (number_of(v, d, "init") for v, d in zip(numbers, plan.value_dtypes, strict=True))
    return plan, dict(zip(plan.initial, values, strict=True))


def _function(op: str | Function, results: tuple[DType, ...]) -> StateFunction:
    from tilewright.primitives.scan_plan import StateFunction

    if len(results) == 1:
        return StateFunction(monoid_of(op, results[0], "scan"))
    packed = next((d for d in results if d.kind == "q"), None)
    if packed is not None:
        raise UserError.at("TW005", f"{packed} holds packed blocks and cannot be computed with", help="give scan another dtype=")
    return StateFunction(functions=state_functions_of(op, tuple(compute_dtype(d) for d in results), "scan"))  # type: ignore[arg-type]


def _segments(marks: Array, shape: tuple[int, ...], size: int) -> Segments:
    from tilewright.primitives.scan_plan import Segments

    dtype = dtype_of(marks)
    if not (dtype.is_bool or dtype.is_int):
        raise UserError.at("TW009", f"segments are {dtype}", help="give bools that are true where a segment begins, or integers that change there")
    if marks.shape not in (shape, (size,)):
        raise UserError.at(
            "TW004", f"segments have shape {list(marks.shape)}, but the data have {list(shape)}", help=f"give an array of that shape, or of {[size]}"
        )
    return Segments("flags" if dtype.is_bool else "ids", dtype, marks.shape == shape)


def _run(
    place: DevicePlace, plan: ScanPlan, segments: Segments | None, named: Mapping[str, Array], marks: Array | None, extents: tuple[int, int, int],
    scalars: dict[str, Number],
) -> None:  # fmt: skip
    from dataclasses import replace

    outer, size, inner = extents
    plan = replace(plan, segments=segments, function=replace(plan.function, segmented=segments is not None))
    if inner != 1:
        from tilewright.primitives.scan_columns import columns_scan_program, pieces

        number = pieces(place.target, outer, size, inner)
        arrays = _shaped(segments, named, marks, extents)
        place.run(f"scan columns {plan.key} {number}", lambda: columns_scan_program(plan, place.target, number), arrays, scalars)
    elif place.is_gpu:
        _run_gpu_rows(place, plan, named, marks, outer, size, scalars)
    elif place.waits_for_none:
        from tilewright.primitives.threads.scan import is_cut, threads_scan_program

        cut = is_cut(outer, size)
        arrays = _shaped(segments, named, marks, (outer, size))
        place.run(f"scan threads {plan.key} {cut}", lambda: threads_scan_program(plan, cut), arrays, scalars)
    else:
        from tilewright.primitives.cpu_scan import is_split, rows_scan_program

        split = is_split(outer, size)
        arrays = _shaped(segments, named, marks, (outer, size))
        place.run(f"scan rows {plan.key} {split}", lambda: rows_scan_program(plan, split), arrays, scalars)


def _shaped(segments: Segments | None, named: Mapping[str, Array], marks: Array | None, shape: tuple[int, ...]) -> dict[str, Array]:
    arrays = {name: array.reshape(shape) for name, array in named.items()}
    if marks is not None and segments is not None:
        arrays["segments"] = marks.reshape(shape) if segments.whole else marks
    return arrays


def _run_gpu_rows(
    place: DevicePlace, plan: ScanPlan, named: Mapping[str, Array], marks: Array | None, rows: int, size: int, scalars: dict[str, Number]
) -> None:
    """Rows that a warp or a block can walk by itself, or one line in which rows follow one another."""
    from dataclasses import replace

    from tilewright.primitives.scan_rows import gpu_rows_scan_program, rows_shape

    aligned = all(place.aligned(named[name]) for name in (*plan.inputs, *plan.outputs))
    shape = rows_shape(plan, place.target, rows, size, aligned)
    if shape is None:
        arrays = _shaped(plan.segments, named, marks, (rows * size,))
        is_segmented = plan.segments is not None or rows > 1
        _run_flat(place, replace(plan, function=replace(plan.function, segmented=is_segmented)), arrays, rows, size, scalars)
        return
    long = size > shape.tile
    arrays = _shaped(plan.segments, named, marks, (rows, size))
    place.run(f"scan gpu rows {plan.key} {shape.key} {long}", lambda: gpu_rows_scan_program(plan, shape, long), arrays, scalars)


def _run_flat(place: DevicePlace, plan: ScanPlan, arrays: Mapping[str, Array], rows: int, size: int, scalars: dict[str, Number]) -> None:
    """One line, in which rows follow one another."""
    from tilewright.primitives.scan import LARGE, scan_program

    whole = rows * size
    # Tiles that are counted from the end begin where vectors may if their number of elements allows it.
    aligned = all(place.aligned(arrays[name]) for name in plan.inputs) and (not plan.reverse or whole % 4 == 0)
    large = whole >= LARGE

    def build() -> Program:
        return scan_program(plan, place.target, aligned, large, rows > 1)

    numbers = {**scalars, "row": size} if rows > 1 else scalars
    place.run(f"scan {plan.key} {aligned} {large} {rows > 1}", build, arrays, numbers)
