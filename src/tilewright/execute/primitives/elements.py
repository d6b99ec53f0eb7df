"""Device-wide primitives: map, reduction, transposition. The others have modules of their own beside this one.

In: arrays (NumPy, device arrays, tensors of PyTorch, arrays of CuPy) and functions of numbers. Out: arrays of the same library.
The same call runs on a GPU, on the CPU and in the emulator; the device is chosen as for kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.execute.arrays import as_dtype
from tilewright.execute.calls.outputs import keep
from tilewright.execute.devices import place_of
from tilewright.execute.places import Array, DevicePlace, Number, dtype_of
from tilewright.execute.primitives.functions import Function, function_of, monoid_of, number_of, tree_of
from tilewright.runtime.exchange.libraries import is_foreign
from tilewright.runtime.memory.device_array import DeviceArray

if TYPE_CHECKING:
    from tilewright.execute.calls.run import Runner
    from tilewright.ir.program import Program
    from tilewright.primitives.functions import Monoid

def flattened(place: DevicePlace, name: str, value: object) -> Array:
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
    x = flattened(place, "data", data)
    result = dtype_of(x) if dtype is None else as_dtype(dtype)
    monoid = monoid_of(function, result, "gpu_reduce")
    first = number_of(init, monoid.dtype, "init")
    return _scalar(place, reduced(place, x, monoid, result, first) if x.size else filled(place.new((1,), result), first))


def reduced(place: DevicePlace, x: Array, monoid: Monoid, result: DType, first: Number) -> Array:
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


def filled(array: Array, value: Number) -> Array:
    if isinstance(array, np.ndarray):
        array[...] = value
    else:
        array.fill(value)
    return array


def _scalar(place: DevicePlace, array: Array) -> Any:
    given = place.give(array)
    return given[0] if isinstance(given, np.ndarray) else given.reshape(())


# -- transpose ----------------------------------------------------------------------------------------


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
            return transpose_program(dtype, into, outof) if place.target.simt else transpose_program_cpu(dtype)

        place.run(f"transpose {dtype} {into} {outof}", build, flat)
    return y
