"""Arrays on devices: making them, moving them, sharing them with other libraries.

In: shapes, lists, NumPy arrays, arrays of other libraries, and the name of a device. Out: a `DeviceArray` on a GPU, a NumPy array on
the host. Nothing is copied that need not be, and nothing silently: `copy=False` refuses where a copy would be made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilewright.base import dtypes, registry
from tilewright.base.dtypes import DType, f32
from tilewright.base.errors import DeviceError, UserError
from tilewright.execute.calls.run import Runner
from tilewright.execute.devices import array_device, default_device, find_device, kind_of, own_memory
from tilewright.execute.kinds import kinds
from tilewright.frontend.python.kernels import parse_function
from tilewright.runtime.core import streams
from tilewright.runtime.core.device import Transfer
from tilewright.runtime.exchange import imports
from tilewright.runtime.exchange.imports import from_dlpack
from tilewright.runtime.exchange.libraries import foreign_device, is_foreign
from tilewright.runtime.memory import device_array
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray
from tilewright.runtime.memory.host_memory import current_host_memory
from tilewright.runtime.memory.packed_array import PackedArray

__all__ = ["allocate", "array", "asarray", "copy", "from_dlpack", "pinned", "to_device"]
_OPEN = streams.STREAM_NAMED
_MOST_AXES = 64


# -- devices --------------------------------------------------------------------------------------------------------

_named: dict[str | None, tuple[ArrayDevice, Callable[[], object], object]] = {}
"""By name: the device, what tells the generation of its kind's devices, and which one it is of."""
registry.when_kinds_change(_named.clear)


def device_named(name: str | None) -> ArrayDevice | None:
    """The device with memory of its own a name means (None: the default device); None where it means the host. Raises where there is none."""
    known = _known(name)
    if known is not None:
        return known
    chosen = find_device(default_device() if name is None else name)
    generation = kind_of(chosen).generation
    now = generation()  # before the device is asked for: another thread may fork or forget meanwhile
    found = array_device(chosen)
    if found is not None and name is not None and name != "auto":
        _named[name] = found, generation, now
    return found


def _known(name: str | None) -> ArrayDevice | None:
    """The device of a name used before. The devices of a process change when it forks."""
    known = _named.get(name)
    return known[0] if known is not None and known[1]() is known[2] else None


def require_array_device(name: str | None, what: str) -> ArrayDevice:
    """The device a name means; `what` needs one with memory of its own."""
    found = device_named("auto" if name in (None, "cpu") else name)
    if found is None:
        reasons = [(kind.title, kind.absence()) for kind in kinds() if kind.absence()]
        title, reason = reasons[0] if reasons else (registry.accelerator(), f"{name!r} is none")
        raise DeviceError.at("TW030", f"{what} needs a {title} device: {reason}")
    return found


def as_dtype(dtype: object, with_complex: bool = False) -> DType:
    """A dtype given as ours, by name or as NumPy's; a complex one only where those are taken."""
    if isinstance(dtype, str) and dtypes.is_name(dtype):
        dtype = dtypes.by_name(dtype)
    if isinstance(dtype, DType):
        if dtype.is_packed:
            raise UserError.at("TW005", f"{dtype} is a type of packed blocks, which tw.quantize makes", help="make an array of f32, and pack it with tw.quantize")
        found: DType | None = dtype
    else:
        try:
            found = dtypes.of_array(np.dtype(dtype))  # type: ignore[call-overload]
        except TypeError:
            found = None
    if found is not None and found.is_complex and not with_complex:
        raise UserError.at("TW009", f"complex numbers are not taken here, and dtype is {found}", help="use an array of floats with one more axis, of extent 2")
    if found is None:
        raise UserError.at("TW009", f"{dtype!r} is no dtype of arrays", help="use tw.f32, 'f32', numpy.float32 …")
    return found


def as_shape(shape: object) -> tuple[int, ...]:
    if isinstance(shape, int | np.integer) and not isinstance(shape, bool):
        return (int(shape),)
    if isinstance(shape, Sequence) and all(isinstance(e, int | np.integer) and not isinstance(e, bool) for e in shape):
        return tuple(int(extent) for extent in shape)
    raise UserError.at("TW009", f"{shape!r} is no shape", help="give a tuple of whole numbers")


def current_stream(gpu: ArrayDevice) -> int:
    """The stream that work of this thread on a device goes to."""
    return streams.current(gpu.ordinal) or 0


# -- making ---------------------------------------------------------------------------------------------------------


def allocate(
    shape: int | Sequence[int],
    dtype: object = f32,
    device: str | None = None,
    *,
    pinned: bool = False,
    managed: bool = False,
) -> Any:
    """A new array with undefined contents.

    On a GPU a `DeviceArray`, on the host a NumPy array. `pinned=True` is host memory that GPUs copy from and to at full speed, and
    that kernels can be given without a copy (where there is no GPU it is plain memory: nothing copies it); `managed=True` is a `DeviceArray` that host and GPU both see.
    """
    if not (pinned or managed):
        gpu = _known(device)
        if gpu is not None and type(dtype) is DType and dtype.kind != "q" and type(shape) is tuple and not _OPEN.value:
            return gpu.empty(shape, dtype)
    if pinned and managed:
        raise UserError.at("TW016", "memory is pinned or managed, not both")
    extents, kind = as_shape(shape), as_dtype(dtype, with_complex=True)
    if pinned and (device not in (None, "cpu") or device_named("auto") is not None):
        return require_array_device(device, "pinned memory").empty_pinned(extents, kind)
    if managed:
        return require_array_device(device, "managed memory").empty_managed(extents, kind)
    gpu = None if pinned else device_named(device)
    if gpu is not None:
        return gpu.empty(extents, kind, current_stream(gpu))
    pool = current_host_memory()
    if pool is not None:
        return pool.make(extents, kind)
    if any(extent < 0 for extent in extents):
        raise UserError.at("TW004", f"an array cannot have shape {extents}")
    try:
        return np.empty(extents, kind.numpy)
    except (MemoryError, ValueError) as error:
        raise DeviceError.at("TW031", f"no memory for an array of shape {list(extents)} and {kind}: {error}") from error


def array(values: object, dtype: object = None, device: str | None = None) -> Any:
    """A new array with these values: a list, a NumPy array, or an array of any library. Always a copy.

    Without `device` it is where the values are, or on the default device when they are on the host.
    """
    kind = None if dtype is None else as_dtype(dtype, with_complex=True)
    source = _read(values, kind)
    if isinstance(source, DeviceArray):
        place = source.device.id if device is None else device
        converted = source if kind is None else source.astype(kind, copy=False)
        return to_device(converted, place, copy=True if converted is source else None)
    return to_device(source, default_device() if device is None else device, copy=True)


def asarray(values: object, dtype: object = None, device: str | None = None) -> Any:
    """An array with these values, without a copy where dtype and device allow it."""
    kind = None if dtype is None else as_dtype(dtype, with_complex=True)
    source = _read(values, kind)
    if isinstance(source, DeviceArray):
        source = source if kind is None else source.astype(kind, copy=False)
    return source if device is None else to_device(source, device)


def array_of(values: object) -> Any:
    """Values as a `DeviceArray` where they are on a device, else as a NumPy array."""
    return _read(values, None)


def _read(values: object, kind: DType | None) -> Any:
    """Values as a `DeviceArray` where they are on a GPU, else as a NumPy array of the wanted dtype."""
    if isinstance(values, DeviceArray):
        return values
    if isinstance(values, PackedArray):
        raise UserError.at("TW009", f"{values!r} holds packed blocks", help="unpack it with tw.dequantize, or take its bytes, .blocks")
    if is_foreign(values):
        return _wrapped(values)
    if _has_mask(values):
        raise UserError.at("TW009", "the values are a masked array, whose mask would be lost", help="pass x.filled(value), or x.data and x.mask")
    if hasattr(values, "__dlpack__") and not isinstance(values, np.ndarray):
        return _read(imports.from_dlpack(values), kind)
    try:
        found = np.asarray(values)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UserError.at("TW009", f"the values are no array: {error}") from None
    if kind is not None and found.dtype != kind.numpy:
        if kind.kind == "q" or found.dtype.kind not in ("biufcV" if kind.is_complex else "biufV") or found.dtype.names is not None:
            raise UserError.at("TW009", f"values of {found.dtype} cannot be an array of {kind}")
        found = found.astype(kind.numpy)
    if kind is None and dtypes.of_array(found.dtype) is None:
        raise UserError.at("TW009", f"arrays of {found.dtype} are not supported", help="convert them to a bool, integer, float or complex dtype")
    return found


def _has_mask(values: object, depth: int = 0) -> bool:
    """Whether it is a masked array, or a list with one in it."""
    if isinstance(values, list | tuple) and depth < _MOST_AXES:
        kinds = {type(value) for value in values}
        if any(issubclass(kind, np.ma.MaskedArray) for kind in kinds):
            return True
        return any(issubclass(kind, list | tuple) for kind in kinds) and any(_has_mask(value, depth + 1) for value in values)
    return isinstance(values, np.ma.MaskedArray)


def _wrapped(item: Any) -> DeviceArray:
    """An array of another library on a GPU, which may say where it is in several ways."""
    if hasattr(item, "__dlpack__"):
        found = imports.from_dlpack(item)
        if isinstance(found, DeviceArray):
            return found
    place = own_memory(find_device(foreign_device(item)))
    return place.wrap(item, current_stream(place))


# -- moving ---------------------------------------------------------------------------------------------------------


def to_device(values: Any, device: str = "auto", copy: bool | None = None) -> Any:
    """The array on a device: `cpu` gives a NumPy array, a device with memory of its own a `DeviceArray`.

    Copies where it must; `copy=True` always. With `copy=False` never: a GPU then reads host memory itself (which is slower than its
    own, and is registered for it as long as the result lives), and the host gets memory it sees (managed, pinned), or an error.
    """
    if copy not in (None, True, False):
        raise UserError.at("TW016", f"copy={copy!r}", help="give True, False or None")
    if isinstance(values, PackedArray):
        return PackedArray(to_device(values.blocks, device, copy), values.dtype)
    gpu = device_named(device)
    source = values if type(values) is np.ndarray else _read(values, None)
    if gpu is None:
        return _to_host(source, copy)
    if isinstance(source, np.ndarray):
        return gpu.share(source) if copy is False else gpu.from_numpy(source, stream=current_stream(gpu))
    if source.device is gpu:
        return source.copy() if copy else source
    if copy is False:
        raise UserError.at("TW033", f"{source!r} cannot be on {gpu.label} without a copy", help="drop copy=False")
    moved = gpu.empty(source.shape, source.dtype, current_stream(gpu))
    gpu.copy(moved, source, current_stream(gpu))
    return moved


def _to_host(source: Any, copy: bool | None) -> np.ndarray:
    if isinstance(source, DeviceArray):
        return source.host() if copy is False else source.to_host()
    values: np.ndarray = source
    return np.array(values) if copy is not False else values


def copy(target: Any, source: Any, wait: bool = True) -> Transfer | None:
    """Copy between the host and a GPU, or within one, on the current stream.

    With `wait=False` it returns at once with a ticket whose `wait()` says when `target` is ready; pinned host memory is copied by the
    GPU meanwhile, other host memory is read before this returns and written by `wait()`.
    """
    if isinstance(target, DeviceArray) and isinstance(source, DeviceArray):
        target.assign(source)
        return None
    if isinstance(target, DeviceArray) and isinstance(source, np.ndarray):
        if wait:
            target.copy_from(source)
            return None
        to = target.device
        return to.copy_in_async(target, source, current_stream(to))
    if isinstance(target, np.ndarray) and isinstance(source, DeviceArray):
        if wait:
            source.to_host(target)
            return None
        origin = source.device
        return origin.copy_out_async(target, source, current_stream(origin))
    raise UserError.at(
        "TW009", f"cannot copy a {type(source).__name__} to a {type(target).__name__}", help="one of them must be on a device"
    )


@contextmanager
def pinned(values: np.ndarray, device: str | None = None) -> Iterator[np.ndarray]:
    """`with tw.pinned(x):` the memory of a NumPy array is page-locked inside, so that a GPU copies it at full speed. Where there is no GPU it
    stays as it is."""
    if device in (None, "cpu") and device_named("auto") is None:
        yield values
        return
    with require_array_device(device, "pinned memory").registered(values) as inside:
        yield inside


# -- converting -----------------------------------------------------------------------------------------------------


@functools.cache
def _conversion(dtype: DType) -> Runner:
    from tilewright.frontend import words as tw

    def convert(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), dtype)
        for i in tw.grid(n):
            out[i] = tw.cast(x[i], dtype)
        return out

    return Runner(parse_function(convert))


def _convert(values: DeviceArray, dtype: DType) -> DeviceArray:
    if not values.size:
        return values.device.empty(values.shape, dtype)
    made = _conversion(dtype).run({"x": values}, find_device(values.device.id))
    assert isinstance(made, DeviceArray)
    return made


device_array.provide(_convert, to_device)
