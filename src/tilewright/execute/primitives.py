"""Device-wide primitives: map, reduction, filter, histogram, transposition. Scans are in `scans`, sorting is in `primitive_sorts`.

In: arrays (NumPy, device arrays, tensors of PyTorch, arrays of CuPy) and functions of numbers. Out: arrays of the same library.
The same call runs on a GPU, on the CPU and in the emulator; the device is chosen as for kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.base.dtypes import DType, bool_, f64, i64
from tilewright.base.errors import UserError
from tilewright.execute.arrays import as_dtype
from tilewright.execute.calls.outputs import keep
from tilewright.execute.devices import place_of
from tilewright.execute.places import Array, DevicePlace, Number, dtype_of
from tilewright.execute.primitive_functions import Function, function_of, monoid_of, number_of, tree_of
from tilewright.runtime.exchange.libraries import is_foreign
from tilewright.runtime.memory.device_array import DeviceArray

if TYPE_CHECKING:
    from tilewright.execute.calls.run import Runner
    from tilewright.ir.program import Program
    from tilewright.primitives.functions import Monoid, ScalarFunction

def _flat(place: DevicePlace, name: str, value: object) -> Array:
    array = place.read(name, value)
    return array.reshape(-1) if array.ndim != 1 else array


def one_axis(place: DevicePlace, name: str, value: object, what: str) -> Array:
    array = place.read(name, value)
    if array.ndim != 1:
        raise UserError.at("TW003", f"{what} takes an array of one axis, got shape {list(array.shape)}", help="pass array.reshape(-1)")
    return array


# -- map ------------------------------------------------------------------------------------------------------------


def map(*arguments: Any, dtype: object = None, device: str | None = None) -> Any:
    """A function of every element, or of the elements of several arrays of one shape: `map(a, b, lambda x, y: x * y + 1)`.

    Results have the dtype that the function gives, or `dtype`.
    """
    if len(arguments) < 2 or not callable(arguments[-1]):
        raise UserError.at("TW016", "map takes one or more arrays and then a function", help="write tw.map(x, lambda v: v + 1)")
    *data, function = arguments
    place = place_of(data, device)
    arrays = [place.read(f"data {k}" if len(data) > 1 else "data", value) for k, value in enumerate(data)]
    shapes = {a.shape for a in arrays}
    if len(shapes) > 1:
        listed = " and ".join(str(list(a.shape)) for a in arrays)
        raise UserError.at("TW004", f"map takes arrays of one shape, got {listed}")
    tree = tree_of(function)
    applied = function_of(function, tuple(dtype_of(a) for a in arrays), None if dtype is None else as_dtype(dtype))
    if not arrays[0].size:
        return place.give(place.new(arrays[0].shape, applied.result))
    runner = _maps.get(applied.key)
    if runner is None:
        from tilewright.execute.calls.run import Runner
        from tilewright.primitives.functions import elementwise

        runner = Runner(elementwise(tree, applied.result))
        keep(_maps, applied.key, runner)
    names = [param.name for param in runner.function.params]
    # Arrays of other libraries go as they are: work is put in the order of their streams.
    foreign = [place.takes_foreign and is_foreign(v) for v in data]
    flat = [(v if own else a).reshape(-1) for v, a, own in zip(data, arrays, foreign, strict=True)]
    result: Any = runner.run(dict(zip(names, flat, strict=True)), place.device)
    result = result.reshape(arrays[0].shape)
    return place.give(result) if isinstance(result, np.ndarray | DeviceArray) else result


gpu_map = map
_maps: dict[str, Runner] = {}


# -- reduce ---------------------------------------------------------------------------------------------------------


def gpu_reduce(
    data: Any, init: Number = 0, function: str | Function = "sum", *, dtype: object = None, device: str | None = None
) -> Any:
    """All elements combined by an associative function, after `init`: `gpu_reduce(x, 0, lambda acc, v: acc + v)`.

    Gives an array of no axes (a NumPy scalar for host arrays), of the data's dtype or of `dtype`, in which it is then combined.
    The function need not be commutative; where it is not, the order of the elements is kept.
    """
    place = place_of([data], device)
    x = _flat(place, "data", data)
    result = dtype_of(x) if dtype is None else as_dtype(dtype)
    monoid = monoid_of(function, result, "gpu_reduce")
    first = number_of(init, monoid.dtype, "init")
    return _scalar(place, _reduced(place, x, monoid, result, first) if x.size else _filled(place.new((1,), result), first))


def _reduced(place: DevicePlace, x: Array, monoid: Monoid, result: DType, first: Number) -> Array:
    """The reduction of data that are not empty, as an array of one element."""

    def build() -> Program:
        from tilewright.primitives.cpu_chunks import reduce_program_cpu
        from tilewright.primitives.reduce import reduce_program

        if place.is_gpu:
            return reduce_program(dtype_of(x), monoid, result, place.target, aligned)
        return reduce_program_cpu(dtype_of(x), monoid, result)

    y, aligned = place.new((1,), result), place.aligned(x)
    place.run(f"reduce {dtype_of(x)} {monoid.key} {result} {aligned}", build, {"x": x, "y": y}, {"init": first})
    return y


def _filled(array: Array, value: Number) -> Array:
    if isinstance(array, np.ndarray):
        array[...] = value
    else:
        array.fill(value)
    return array


def _scalar(place: DevicePlace, array: Array) -> Any:
    given = place.give(array)
    return given[0] if isinstance(given, np.ndarray) else given.reshape(())


# -- filter ---------------------------------------------------------------------------------------------------------


def filter(data: Any, wanted: Any, *, device: str | None = None) -> Any:
    """The elements for which `wanted` holds, in order: a predicate (`lambda v: v > 0`) or an array of bools of the same shape."""
    place = place_of([data] if callable(wanted) else [data, wanted], device)
    x = one_axis(place, "data", data, "filter")
    arrays = {"x": x}
    predicate = None
    aligned = place.aligned(x)
    if callable(wanted):
        predicate = function_of(wanted, (dtype_of(x),), bool_)
    else:
        mask = arrays["mask"] = place.read("wanted", wanted)
        if dtype_of(mask) is not bool_ or mask.shape != x.shape:
            raise UserError.at(
                "TW009", f"filter's mask is {dtype_of(mask)}{list(mask.shape)}, but the data have shape {list(x.shape)}",
                help="give a function, or an array of bools with an element for each of the data's",
            )  # fmt: skip
        aligned = aligned and place.aligned(mask)
    if not x.size:
        return place.give(place.new((0,), dtype_of(x)))
    y, count = place.new(x.shape, dtype_of(x)), place.new((1,), i64)
    filter_into(place, arrays, y, count, predicate, aligned)
    return place.give(y)[: int(place.number(count))]


gpu_filter = filter


def filter_into(
    place: DevicePlace, arrays: dict[str, Array], y: Array, count: Array, predicate: ScalarFunction | None, aligned: bool, heads: bool = False
) -> None:
    dtype = dtype_of(arrays["x"])

    def build() -> Program:
        from tilewright.primitives.cpu_chunks import filter_program_cpu
        from tilewright.primitives.filter import filter_program

        return filter_program(dtype, predicate, place.target, aligned, heads) if place.is_gpu else filter_program_cpu(dtype, predicate, heads)

    what = f"filter {dtype} {predicate.key if predicate else 'heads' if heads else 'mask'} {aligned}"
    place.run(what, build, {**arrays, "y": y, "count": count})


# -- histogram and transpose ----------------------------------------------------------------------------------------


def histogram(
    data: Any, bins: int = 256, range: tuple[float, float] | None = None, *, device: str | None = None
) -> Any:
    """How many elements fall into each of `bins` equal parts of `range`, as i64.

    Without a range, integers have bins 0, 1, 2… of their own, floats the range from their smallest to their largest element. Elements
    outside, and NaN, are not counted; the upper end belongs to the last bin. An element's bin is floor((v - low) * (bins / (high - low))),
    computed in the data's dtype (f32 at least; f64 for integers, unless every bin is one integer).
    """
    from tilewright.primitives.cpu_chunks import histogram_program_cpu
    from tilewright.primitives.histogram import histogram_program, number_dtype

    if not isinstance(bins, int) or isinstance(bins, bool) or not 1 <= bins <= 1 << 31:
        raise UserError.at("TW009", f"bins is {bins!r}, not a number of bins from 1 to {1 << 31}")
    place = place_of([data], device)
    x = _flat(place, "data", data)
    dtype = dtype_of(x)
    if dtype.is_bool:
        raise UserError.at("TW009", "histogram takes integers or floats, got bool")
    low, high = _range(place, x, bins, range)
    unit = dtype.is_int and high - low == bins and low == math.floor(low)
    number = i64 if unit else number_dtype(dtype)
    counts = place.new((bins,), i64)
    if not x.size:
        return place.give(_filled(counts, 0))
    aligned = place.aligned(x)
    bounds = {"low": int(low), "high": int(high), "scale": 0} if unit else {"low": low, "high": high, "scale": bins / (high - low)}
    if not unit and number is not f64:
        bounds = {name: float(np.float32(value)) for name, value in bounds.items()}

    def build() -> Program:
        return histogram_program(dtype, bins, place.target, unit, aligned) if place.is_gpu else histogram_program_cpu(dtype, bins, unit)

    place.run(f"histogram {dtype} {bins} {unit} {aligned}", build, {"x": x, "counts": counts}, bounds)
    return place.give(counts)


gpu_histogram = histogram


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
    return place.number(_reduced(place, x, monoid, dtype_of(x), number_of(monoid.identity, monoid.dtype, "init")))


def gpu_transpose(data: Any, *, device: str | None = None) -> Any:
    """The matrix, or each matrix of an array of more axes, with its last two axes exchanged: a new contiguous array."""
    place = place_of([data], device)
    x = place.read("data", data)
    if x.ndim < 2:
        raise UserError.at("TW003", f"gpu_transpose takes an array of at least two axes, got shape {list(x.shape)}")
    return place.give(exchanged(place, x))


def exchanged(place: DevicePlace, x: Array) -> Array:
    """An array with its last two axes exchanged."""
    from tilewright.primitives.transpose import transpose_program, transpose_program_cpu

    *around, rows, columns = x.shape
    dtype = dtype_of(x)
    y = place.new((*around, columns, rows), dtype)
    if x.size:
        width = min(16 // dtype.itemsize, 8)
        into = place.aligned(x) and columns % width == 0
        outof = rows % width == 0
        batch = math.prod(around)
        flat = {"x": x.reshape((batch, rows, columns)), "y": y.reshape((batch, columns, rows))}

        def build() -> Program:
            return transpose_program(dtype, into, outof) if place.is_gpu else transpose_program_cpu(dtype)

        place.run(f"transpose {dtype} {into} {outof}", build, flat)
    return y
