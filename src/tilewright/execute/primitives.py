"""Device-wide primitives: map, reduction, scan, filter, histogram, transposition. Sorting is in `primitive_sorts`.

In: arrays (NumPy, device arrays, tensors of PyTorch, arrays of CuPy) and functions of numbers. Out: arrays of the same library.
The same call runs on a GPU, on the CPU and in the emulator; the device is chosen as for kernels.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.base.dtypes import DType, bool_, compute_dtype, f64, i64
from tilewright.base.errors import UserError
from tilewright.execute.arrays import as_dtype
from tilewright.execute.calls.outputs import keep
from tilewright.execute.devices import place_of
from tilewright.execute.places import Array, DevicePlace, Number, dtype_of
from tilewright.runtime.exchange.libraries import is_foreign
from tilewright.runtime.memory.device_array import DeviceArray

if TYPE_CHECKING:
    from tilewright.execute.calls.run import Runner
    from tilewright.ir.program import Program
    from tilewright.primitives.functions import Monoid, ScalarFunction

Function = Callable[..., Any]
_NAMES = {
    "sum": "add", "add": "add", "+": "add", "prod": "mul", "mul": "mul", "*": "mul", "min": "min", "max": "max", "and": "and", "&": "and",
    "or": "or", "|": "or", "xor": "xor", "^": "xor",
}  # fmt: skip
"""Functions known by name."""


_trees: dict[object, Any] = {}
_functions: dict[object, tuple[Any, ScalarFunction]] = {}


def _tree(function: Function) -> Any:
    """The tree of a function. The same text with the same captured values is read once, however often Python makes a function of it."""
    from tilewright.frontend.python.functions import parse_scalar_function

    key = _identity(function)
    if key is None:
        return parse_scalar_function(function)
    found = _trees.get(key)
    if found is None:
        found = parse_scalar_function(function)
        keep(_trees, key, found)
    return found


def _identity(function: Any) -> object:
    """What tells a function from others: its code and what it captures; None where that is more than numbers and functions."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return None
    around = getattr(function, "__globals__", {})
    try:
        captured = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        return None
    parts: list[object] = [code]
    for value in (*captured, *(around[n] for n in code.co_names if n in around)):
        if isinstance(value, bool | int | float):
            parts.append((type(value), value))
        elif isinstance(value, types.FunctionType):
            inner = _identity(value) if value is not function else code
            if inner is None:
                return None
            parts.append(inner)
        elif isinstance(value, types.ModuleType) and value.__name__ in ("tilewright", "math", "numpy"):
            parts.append(value.__name__)
        elif isinstance(value, types.BuiltinFunctionType | type):
            parts.append(value)
        else:
            return None
    return tuple(parts)


def _function(function: Function, dtypes: tuple[DType, ...], result: DType | None = None) -> ScalarFunction:
    from tilewright.primitives.functions import scalar_function

    tree = _tree(function)
    key = id(tree), dtypes, result
    found = _functions.get(key)
    if found is None:
        found = tree, scalar_function(tree, dtypes, result)
        keep(_functions, key, found)
    return found[1]


def _monoid(op: str | Function, dtype: DType, what: str) -> Monoid:
    """The function that combines two numbers of that dtype; narrow floats are combined in f32."""
    from tilewright.primitives.functions import Monoid

    if dtype.kind == "q":
        raise UserError.at("TW005", f"{dtype} holds packed blocks and cannot be computed with", help=f"give {what} another dtype=")
    accumulator = compute_dtype(dtype)
    if isinstance(op, str):
        opcode = _NAMES.get(op)
        if opcode is None:
            raise UserError.at("TW016", f"{what} does not know '{op}'", help=f"use one of {', '.join(sorted(_NAMES))}, or a function of two numbers")
        bitwise = opcode in ("and", "or", "xor")
        if dtype.is_float and bitwise:
            raise UserError.at("TW009", f"{what} with '{op}' takes integers, got {dtype}")
        if dtype.is_bool and not bitwise and opcode not in ("min", "max"):
            raise UserError.at("TW009", f"{what} with '{op}' does not take bool", help="give dtype=, for instance tw.i64")
        return Monoid(accumulator, opcode)
    if not callable(op):
        raise UserError.at("TW009", f"{what} combines by a function or a name, got {op!r}")
    return Monoid(accumulator, function=_function(op, (accumulator, accumulator), accumulator))


def _flat(place: DevicePlace, name: str, value: object) -> Array:
    array = place.read(name, value)
    return array.reshape(-1) if array.ndim != 1 else array


def one_axis(place: DevicePlace, name: str, value: object, what: str) -> Array:
    array = place.read(name, value)
    if array.ndim != 1:
        raise UserError.at("TW003", f"{what} takes an array of one axis, got shape {list(array.shape)}", help="pass array.reshape(-1)")
    return array


# -- map ------------------------------------------------------------------------------------------------------------


def gpu_map(*arguments: Any, dtype: object = None, device: str | None = None) -> Any:
    """A function of every element, or of the elements of several arrays of one shape: `gpu_map(a, b, lambda x, y: x * y + 1)`.

    Results have the dtype that the function gives, or `dtype`.
    """
    if len(arguments) < 2 or not callable(arguments[-1]):
        raise UserError.at("TW016", "gpu_map takes one or more arrays and then a function", help="write gpu_map(x, lambda v: v + 1)")
    *data, function = arguments
    place = place_of(data, device)
    arrays = [place.read(f"data {k}" if len(data) > 1 else "data", value) for k, value in enumerate(data)]
    shapes = {a.shape for a in arrays}
    if len(shapes) > 1:
        listed = " and ".join(str(list(a.shape)) for a in arrays)
        raise UserError.at("TW004", f"gpu_map takes arrays of one shape, got {listed}")
    tree = _tree(function)
    applied = _function(function, tuple(dtype_of(a) for a in arrays), None if dtype is None else as_dtype(dtype))
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


_maps: dict[str, Runner] = {}


# -- reduce and scan ------------------------------------------------------------------------------------------------


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
    monoid = _monoid(function, result, "gpu_reduce")
    first = _number(init, monoid.dtype, "init")
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


def _number(value: Any, dtype: DType, name: str) -> Number:
    """A number that the dtype holds."""
    try:
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, bool | int | float):
            if dtype.is_float:
                return float(number)
            if dtype.is_bool:
                return bool(number)
            if int(number) == number and dtype.min_value <= number <= dtype.max_value:
                return int(number)
    except (OverflowError, ValueError):
        pass
    raise UserError.at("TW009", f"{name} is {value!r}, which is no {dtype}")


def gpu_scan(
    data: Any, op: str | Function = "sum", *, exclusive: bool = False, init: Number | None = None, dtype: object = None, device: str | None = None
) -> Any:
    """Every element becomes the combination of all up to it: `gpu_scan(x)` is the running sum.

    `op` is a name (sum, prod, min, max, and, or, xor) or an associative function of two numbers. `exclusive=True` leaves the element
    itself out and begins with `init`, which functions without a name then need. Results have the data's dtype or `dtype`.
    """
    from tilewright.primitives.scan import LARGE

    place = place_of([data], device)
    x = one_axis(place, "data", data, "gpu_scan")
    result = dtype_of(x) if dtype is None else as_dtype(dtype)
    monoid = _monoid(op, result, "gpu_scan")
    if exclusive and init is None:
        if monoid.identity is None:
            raise UserError.at("TW008", "an exclusive gpu_scan with a function needs init=: what the first element becomes")
        init = monoid.identity if monoid.opcode != "add" else 0
    scalars = {} if init is None else {"init": _number(init, monoid.dtype, "init")}
    y = place.new(x.shape, result)
    if x.size:
        aligned, large = place.aligned(x), x.size >= LARGE

        def build() -> Program:
            from tilewright.primitives.cpu_chunks import scan_program_cpu
            from tilewright.primitives.scan import scan_program

            if place.is_gpu:
                return scan_program(dtype_of(x), monoid, result, place.target, exclusive, bool(scalars), aligned, large)
            return scan_program_cpu(dtype_of(x), monoid, result, exclusive, bool(scalars))

        what = f"scan {dtype_of(x)} {monoid.key} {result} {exclusive} {bool(scalars)} {aligned} {large}"
        place.run(what, build, {"x": x, "y": y}, scalars)
    return place.give(y)


# -- filter ---------------------------------------------------------------------------------------------------------


def gpu_filter(data: Any, wanted: Any, *, device: str | None = None) -> Any:
    """The elements for which `wanted` holds, in order: a predicate (`lambda v: v > 0`) or an array of bools of the same shape."""
    place = place_of([data] if callable(wanted) else [data, wanted], device)
    x = one_axis(place, "data", data, "gpu_filter")
    arrays = {"x": x}
    predicate = None
    aligned = place.aligned(x)
    if callable(wanted):
        predicate = _function(wanted, (dtype_of(x),), bool_)
    else:
        mask = arrays["mask"] = place.read("wanted", wanted)
        if dtype_of(mask) is not bool_ or mask.shape != x.shape:
            raise UserError.at(
                "TW009", f"gpu_filter's mask is {dtype_of(mask)}{list(mask.shape)}, but the data have shape {list(x.shape)}",
                help="give a function, or an array of bools with an element for each of the data's",
            )  # fmt: skip
        aligned = aligned and place.aligned(mask)
    if not x.size:
        return place.give(place.new((0,), dtype_of(x)))
    y, count = place.new(x.shape, dtype_of(x)), place.new((1,), i64)
    filter_into(place, arrays, y, count, predicate, aligned)
    return place.give(y)[: int(place.number(count))]


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


def gpu_histogram(
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
        raise UserError.at("TW009", "gpu_histogram takes integers or floats, got bool")
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
    monoid = _monoid(op, dtype_of(x), "gpu_histogram")
    return place.number(_reduced(place, x, monoid, dtype_of(x), _number(monoid.identity, monoid.dtype, "init")))


def gpu_transpose(data: Any, *, device: str | None = None) -> Any:
    """The matrix, or each matrix of an array of more axes, with its last two axes exchanged: a new contiguous array."""
    from tilewright.primitives.transpose import transpose_program, transpose_program_cpu

    place = place_of([data], device)
    x = place.read("data", data)
    if x.ndim < 2:
        raise UserError.at("TW003", f"gpu_transpose takes an array of at least two axes, got shape {list(x.shape)}")
    *around, rows, columns = x.shape
    y = place.new((*around, columns, rows), dtype_of(x))
    if x.size:
        dtype = dtype_of(x)
        width = min(16 // dtype.itemsize, 8)
        into = place.aligned(x) and columns % width == 0
        outof = rows % width == 0
        batch = math.prod(around)
        flat = {"x": x.reshape((batch, rows, columns)), "y": y.reshape((batch, columns, rows))}

        def build() -> Program:
            return transpose_program(dtype, into, outof) if place.is_gpu else transpose_program_cpu(dtype)

        place.run(f"transpose {dtype} {into} {outof}", build, flat)
    return place.give(y)
