"""Histograms: `histogram`, with even bins or edges, weights, of all elements or along an axis.

In and out: as for the other primitives (`elements`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.base.dtypes import DType, f32, f64, i64
from tilewright.base.errors import UserError
from tilewright.execute.devices import place_of
from tilewright.execute.places import Array, DevicePlace, Number, dtype_of
from tilewright.execute.primitives.axes import Lines
from tilewright.execute.primitives.elements import filled, reduced
from tilewright.execute.primitives.functions import monoid_of, number_of

if TYPE_CHECKING:
    from tilewright.ir.program import Program

_MOST = 1 << 31


def histogram(
    data: Any, bins: Any = 256, range: tuple[float, float] | None = None, *, weights: Any = None, axis: int | None = None, device: str | None = None
) -> Any:
    """How many elements fall into each bin, as i64: of `bins` equal parts of `range`, or between neighbours of an array of edges.

    Without a range, integers have bins 0, 1, 2… of their own, floats the range from their smallest to their largest element. Elements
    outside, and NaN, are not counted; the upper end belongs to the last bin. An element's bin is floor((v - low) * (bins / (high - low))),
    computed in the data's dtype (f32 at least; f64 for integers, unless every bin is one integer). With `weights`, of the data's shape, a bin holds the
    sum of its elements' weights: f64 for floats, i64 for integers. With `axis` each line along that axis has a histogram of its own, which
    stands in the axis's place.
    """
    edges = None if isinstance(bins, int | np.integer) else _edges(bins)
    if edges is None and (isinstance(bins, bool) or not 1 <= bins <= _MOST):
        raise UserError.at("TW009", f"bins is {bins!r}, not a number of bins from 1 to {_MOST}, and not an array of edges")
    if edges is not None and range is not None:
        raise UserError.at("TW016", f"histogram takes edges or a range, got both: range is {range!r}", help="leave out range=")
    place = place_of([data] if weights is None else [data, weights], device)
    x = place.read("data", data)
    dtype = dtype_of(x)
    if dtype.is_bool:
        raise UserError.at("TW009", "histogram takes integers or floats, got bool")
    number = int(bins) if edges is None else len(edges) - 1
    amounts = None if weights is None else _weights(place, x, weights)
    if edges is None and amounts is None and axis is None:
        return _counted(place, x.reshape(-1), number, range)
    lines = None if axis is None else Lines(x.shape, axis, "histogram")
    rows = x.reshape((1, x.size)) if lines is None else lines.last(place, x)
    held = None if amounts is None else amounts.reshape((1, x.size)) if lines is None else lines.last(place, amounts)
    counts = _filled_rows(place, rows, held, number, edges, range)
    return place.give(counts.reshape(-1) if lines is None else lines.back(place, counts))


gpu_histogram = histogram


def _edges(bins: Any) -> np.ndarray:
    """Edges of bins, on the host: they are checked before anything runs."""
    edges = bins.numpy() if hasattr(bins, "numpy") else np.asarray(bins)
    if edges.ndim != 1 or edges.size < 2 or edges.dtype.kind not in "iuf":
        raise UserError.at(
            "TW009", f"bins is {bins!r}, not a number of bins and not an array of at least two edges", help="give an ascending array of one axis"
        )
    falls = np.flatnonzero(~(edges[1:] >= edges[:-1]))
    if falls.size:
        k = int(falls[0])
        raise UserError.at("TW009", f"the edges of bins do not ascend: edge {k + 1} is {edges[k + 1]}, after {edges[k]}", help="sort the edges")
    return edges


def _weights(place: DevicePlace, x: Array, given: Any) -> Array:
    weights = place.read("weights", given)
    if weights.shape != x.shape:
        raise UserError.at("TW004", f"histogram's weights have shape {list(weights.shape)}, but the data {list(x.shape)}")
    if dtype_of(weights).kind == "q":
        raise UserError.at("TW009", f"histogram's weights are {dtype_of(weights)}", help="give integers or floats")
    return weights


def _bounds(place: DevicePlace, x: Array, bins: int, given: tuple[float, float] | None, number: DType | None) -> tuple[bool, dict[str, Number]]:
    """Whether each bin is one integer; and the numbers that bound the bins, in the dtype in which elements are compared."""
    low, high = _range(place, x, bins, given)
    if dtype_of(x).is_int and high - low == bins and low == math.floor(low):
        return True, {"low": int(low), "high": int(high), "scale": 0}
    bounds: dict[str, Number] = {"low": low, "high": high, "scale": bins / (high - low)}
    return False, bounds if number is f64 else {name: float(np.float32(value)) for name, value in bounds.items()}


def _counted(place: DevicePlace, x: Array, bins: int, range: tuple[float, float] | None) -> Any:
    """All elements in even bins."""
    from tilewright.primitives.cpu_chunks import histogram_program_cpu
    from tilewright.primitives.histogram import histogram_program, number_dtype

    dtype = dtype_of(x)
    unit, bounds = _bounds(place, x, bins, range, number_dtype(dtype))
    counts = place.new((bins,), i64)
    if not x.size:
        return place.give(filled(counts, 0))
    aligned = place.aligned(x)

    def build() -> Program:
        return histogram_program(dtype, bins, place.target, unit, aligned) if place.target.simt else histogram_program_cpu(dtype, bins, unit)

    place.run(f"histogram {dtype} {bins} {unit} {aligned}", build, {"x": x, "counts": counts}, bounds)
    return place.give(counts)


def _filled_rows(
    place: DevicePlace, x: Array, weights: Array | None, bins: int, edges: np.ndarray | None, range: tuple[float, float] | None
) -> Array:
    """The histogram of each row."""
    from tilewright.primitives.histogram import number_dtype
    from tilewright.primitives.histogram_rows import histogram_rows_program, parts_of, plan_of, table_for

    *around, size = x.shape
    rows = math.prod(around)
    dtype, kind = dtype_of(x), None if weights is None else dtype_of(weights)
    scalars: dict[str, Number] = {}
    if edges is None:
        unit, scalars = _bounds(place, x, bins, range, number_dtype(dtype))
        plan = plan_of(dtype, "unit" if unit else "even", kind)
    else:
        plan = plan_of(dtype, "edges", kind, edges.dtype.kind == "i" or edges.dtype in (np.uint8, np.uint16, np.uint32))
        if plan.number is f64 and dtype.is_float and "f64" in place.target.missing_dtypes:
            plan, edges = replace(plan, number=f32), _narrow_edges(edges)
    counts = place.new((*around, bins), plan.total)
    if not x.size:
        return filled(counts, 0) if counts.size else counts
    arrays = {"x": x.reshape((rows, size)), "counts": counts.reshape((rows, bins))}
    if weights is not None:
        arrays["weights"] = weights.reshape((rows, size))
    if edges is not None:
        scalars = {"steps": (bins - 1).bit_length()}
        arrays["edges"] = place.read("bins", np.ascontiguousarray(edges, plan.number.numpy))
    parts, table = parts_of(place.target, rows), table_for(place.target, bins)
    place.run(f"histogram rows {plan.key} {parts} {table}", lambda: histogram_rows_program(plan, place.target, parts, table), arrays, scalars)
    return counts


def _narrow_edges(edges: np.ndarray) -> np.ndarray:
    """Edges as f32 that f32 are on the same sides of: the next number above each, and below the last, which belongs to its bin."""
    wide = edges.astype(np.float64)
    with np.errstate(over="ignore"):
        near = wide.astype(np.float32)
    above = np.where(near < wide, np.nextafter(near, np.float32(np.inf)), near)
    above[-1] = np.nextafter(near[-1], np.float32(-np.inf)) if near[-1] > wide[-1] else near[-1]
    return above


def _range(place: DevicePlace, x: Array, bins: int, given: tuple[float, float] | None) -> tuple[float, float]:
    if given is not None:
        low, high = (float(v) for v in given)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise UserError.at("TW009", f"range is {given!r}, not a smaller and a larger finite number")
        return low, high
    if dtype_of(x).is_int:
        return 0, bins
    if not x.size:
        return 0.0, 1.0
    low, high = (float(_extreme(place, x, op)) for op in ("min", "max"))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError.at("TW009", f"the data range from {low} to {high}, which is no range for bins", help="give range=")
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _extreme(place: DevicePlace, x: Array, op: str) -> Any:
    monoid = monoid_of(op, dtype_of(x), "histogram")
    return place.number(reduced(place, x, monoid, dtype_of(x), number_of(monoid.identity, monoid.dtype, "init")))
