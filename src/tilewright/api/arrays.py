"""Arrays on devices: making them, moving them, sharing them with other libraries.

In: shapes, lists, NumPy arrays, arrays of other libraries, and the name of a device. Out: a `DeviceArray` on a GPU, a NumPy array on
the host. Nothing is copied that need not be, and nothing silently: `copy=False` refuses where a copy would be made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.api.devices import default_device, find_device
from tilewright.api.execute import Runner
from tilewright.base import dtypes
from tilewright.base.dtypes import DType, f32
from tilewright.base.errors import DeviceError, UserError
from tilewright.frontend.python import parse_function
from tilewright.runtime import device_array, imports, streams
from tilewright.runtime.device_array import DeviceArray
from tilewright.runtime.imports import from_dlpack

if TYPE_CHECKING:
    from tilewright.runtime.cuda import CudaDevice
    from tilewright.runtime.cuda_copies import Ticket

__all__ = ["allocate", "array", "asarray", "copy", "from_dlpack", "pinned", "to_device"]
_OPEN = streams.OPEN


# -- devices --------------------------------------------------------------------------------------------------------

_named: dict[str | None, CudaDevice] = {}
_of: object = None
"""The devices `_named` is about."""
_cuda: Any = None
"""The module that finds devices, once it was needed."""


def gpu_of(name: str | None) -> CudaDevice | None:
    """The GPU a name means (None: the default device); None where it means the host. Raises where there is no such device."""
    global _cuda, _of
    known = _known(name)
    if known is not None:
        return known
    chosen = find_device(default_device() if name is None else name)
    if chosen.kind != "cuda":
        return None
    from tilewright.runtime import cuda

    found = cuda.devices()[int(chosen.id.split(":")[1])]
    if _of is not cuda._found:
        _named.clear()
    _cuda, _of = cuda, cuda._found
    if name is not None and name != "auto":
        _named[name] = found
    return found


def _known(name: str | None) -> CudaDevice | None:
    """The GPU of a name used before. The devices of a process change when it forks."""
    return _named.get(name) if _cuda is not None and _cuda._found is _of else None


def require_gpu(name: str | None, what: str) -> CudaDevice:
    """The GPU a name means; `what` needs one."""
    found = gpu_of("auto" if name in (None, "cpu") else name)
    if found is None:
        from tilewright.runtime import cuda

        raise DeviceError.at("TW030", f"{what} needs a CUDA device: {cuda.unavailable_reason() or f'{name!r} is none'}")
    return found


def as_dtype(dtype: object) -> DType:
    """A dtype given as ours, by name or as NumPy's."""
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str) and dtypes.is_name(dtype):
        return dtypes.by_name(dtype)
    try:
        found = dtypes.from_numpy(np.dtype(dtype))  # type: ignore[call-overload]
    except TypeError:
        found = None
    if found is None:
        raise UserError.at("TW009", f"{dtype!r} is no dtype of arrays", help="use tw.f32, 'f32', numpy.float32 …")
    return found


def _shape(shape: object) -> tuple[int, ...]:
    if isinstance(shape, int | np.integer) and not isinstance(shape, bool):
        return (int(shape),)
    if isinstance(shape, Sequence) and all(isinstance(e, int | np.integer) and not isinstance(e, bool) for e in shape):
        return tuple(int(extent) for extent in shape)
    raise UserError.at("TW009", f"{shape!r} is no shape", help="give a tuple of whole numbers")


def _stream(gpu: CudaDevice) -> int:
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
    that kernels can be given without a copy; `managed=True` is a `DeviceArray` that host and GPU both see.
    """
    if not (pinned or managed):
        gpu = _known(device)
        if gpu is not None and type(dtype) is DType and type(shape) is tuple and not _OPEN.value:
            return gpu.empty(shape, dtype)
    if pinned and managed:
        raise UserError.at("TW016", "memory is pinned or managed, not both")
    extents, kind = _shape(shape), as_dtype(dtype)
    if pinned:
        return require_gpu(device, "pinned memory").empty_pinned(extents, kind)
    if managed:
        return require_gpu(device, "managed memory").empty_managed(extents, kind)
    gpu = gpu_of(device)
    if gpu is not None:
        return gpu.empty(extents, kind, _stream(gpu))
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
    kind = None if dtype is None else as_dtype(dtype)
    source = _read(values, kind)
    if isinstance(source, DeviceArray):
        place = f"cuda:{source.device.ordinal}" if device is None else device
        converted = source if kind is None else source.astype(kind, copy=False)
        return to_device(converted, place, copy=True if converted is source else None)
    return to_device(source, default_device() if device is None else device, copy=True)


def asarray(values: object, dtype: object = None, device: str | None = None) -> Any:
    """An array with these values, without a copy where dtype and device allow it."""
    kind = None if dtype is None else as_dtype(dtype)
    source = _read(values, kind)
    if isinstance(source, DeviceArray):
        source = source if kind is None else source.astype(kind, copy=False)
    return source if device is None else to_device(source, device)


def _read(values: object, kind: DType | None) -> Any:
    """Values as a `DeviceArray` where they are on a GPU, else as a NumPy array of the wanted dtype."""
    if isinstance(values, DeviceArray):
        return values
    # In this order: a tensor that needs gradients refuses to say more.
    if getattr(values, "is_cuda", False) is True or hasattr(values, "__cuda_array_interface__"):
        return _wrapped(values)
    if hasattr(values, "__dlpack__") and not isinstance(values, np.ndarray):
        return _read(imports.from_dlpack(values), kind)
    try:
        found = np.asarray(values)
    except ValueError as error:
        raise UserError.at("TW009", f"the values are no array: {error}") from None
    if kind is not None and found.dtype != kind.numpy:
        if kind.kind == "q" or found.dtype.kind not in "biufV":
            raise UserError.at("TW009", f"values of {found.dtype} cannot be an array of {kind}")
        found = found.astype(kind.numpy)
    if kind is None and dtypes.from_numpy(found.dtype) is None:
        raise UserError.at("TW009", f"arrays of {found.dtype} are not supported", help="convert them to a bool, integer or float dtype")
    return found


def _wrapped(item: Any) -> DeviceArray:
    """An array of another library on a GPU, which may say where it is in several ways."""
    if hasattr(item, "__dlpack__"):
        found = imports.from_dlpack(item)
        if isinstance(found, DeviceArray):
            return found
    from tilewright.runtime import cuda

    index = getattr(getattr(item, "device", None), "index", None)
    place = cuda.devices()[index if isinstance(index, int) else 0]
    return place.wrap(item, _stream(place))


# -- moving ---------------------------------------------------------------------------------------------------------


def to_device(values: Any, device: str = "auto", copy: bool | None = None) -> Any:
    """The array on a device: `cpu` gives a NumPy array, `cuda` or `cuda:1` a `DeviceArray`.

    Copies where it must; `copy=True` always. With `copy=False` never: a GPU then reads host memory itself (which is slower than its
    own, and is registered for it as long as the result lives), and the host gets memory it sees (managed, pinned), or an error.
    """
    if copy not in (None, True, False):
        raise UserError.at("TW016", f"copy={copy!r}", help="give True, False or None")
    gpu = gpu_of(device)
    source = _read(values, None) if not isinstance(values, np.ndarray) else values
    if gpu is None:
        return _to_host(source, copy)
    if isinstance(source, np.ndarray):
        return gpu.share(source) if copy is False else gpu.from_numpy(source, stream=_stream(gpu))
    if source.device is gpu:
        return source.copy() if copy else source
    if copy is False:
        raise UserError.at("TW033", f"{source!r} cannot be on {gpu.label} without a copy", help="drop copy=False")
    moved = gpu.empty(source.shape, source.dtype, _stream(gpu))
    gpu.copy(moved, source, _stream(gpu))
    return moved


def _to_host(source: Any, copy: bool | None) -> np.ndarray:
    if isinstance(source, DeviceArray):
        return source.host() if copy is False else source.to_host()
    values: np.ndarray = source
    return np.array(values) if copy is not False else values


def copy(target: Any, source: Any, wait: bool = True) -> Ticket | None:
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
        to: CudaDevice = target.device  # type: ignore[assignment]
        return to.copy_in_async(target, source, _stream(to))
    if isinstance(target, np.ndarray) and isinstance(source, DeviceArray):
        if wait:
            source.to_host(target)
            return None
        origin: CudaDevice = source.device  # type: ignore[assignment]
        return origin.copy_out_async(target, source, _stream(origin))
    raise UserError.at(
        "TW009", f"cannot copy a {type(source).__name__} to a {type(target).__name__}", help="one of them must be on a device"
    )


@contextmanager
def pinned(values: np.ndarray, device: str | None = None) -> Iterator[np.ndarray]:
    """`with tw.pinned(x):` the memory of a NumPy array is page-locked inside, so that a GPU copies it at full speed."""
    from tilewright.runtime.host_memory import registered

    with registered(require_gpu(device, "pinned memory"), values) as inside:
        yield inside


# -- converting -----------------------------------------------------------------------------------------------------


@functools.cache
def _conversion(dtype: DType) -> Runner:
    from tilewright.api import language as tw

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
    made = _conversion(dtype).run({"x": values}, find_device(f"cuda:{values.device.ordinal}"))
    assert isinstance(made, DeviceArray)
    return made


device_array.provide(_convert, to_device)
