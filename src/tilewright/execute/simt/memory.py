"""Explicit memory: `gpu_alloc`, `gpu_copy_to`, `gpu_copy_from`, `gpu_free` and `gpu_sync`.

A buffer of `gpu_alloc` is a device array (where there is no GPU, a NumPy array) that lives until `gpu_free`. Each is known with the
line it was allocated on, which the errors name: freeing twice, using a buffer after it was freed, copies of another size or dtype,
and buffers that were never freed.
"""

from __future__ import annotations

import atexit
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, f32, from_numpy
from tilewright.base.errors import DeviceError, UserError
from tilewright.execute.arrays import allocate
from tilewright.execute.devices import array_device, default_device, devices, find_device
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.trace import caller


@dataclass
class Allocation:
    """A buffer, the line that allocated it, and the one that freed it."""

    buffer: DeviceArray | np.ndarray | None
    text: str
    """`f32[1000] on gpu:0`"""
    nbytes: int
    place: str
    freed: str = ""


_allocations: dict[int, Allocation] = {}
"""Buffers by the identity of what owns their memory."""
_freed: dict[int, tuple[object, Allocation]] = {}
"""Host buffers that were freed, kept so that no other object has their identity; the last few."""
_MOST_FREED = 256


def _owner(buffer: DeviceArray | np.ndarray) -> object:
    if isinstance(buffer, DeviceArray):
        return buffer.owner
    while isinstance(buffer.base, np.ndarray):
        buffer = buffer.base
    return buffer


def gpu_alloc(shape: int | tuple[int, ...], dtype: DType = f32, device: str | None = None, unified: bool = False) -> Any:
    """A buffer with undefined contents that lives until `gpu_free`. `unified`: host and GPU both see it, without copies."""
    default = default_device()
    chosen = find_device(device or ("auto" if default == "cpu" else default))
    has_memory = array_device(chosen) is not None
    buffer = allocate(shape, dtype, chosen.id if has_memory else "cpu", managed=unified and has_memory)
    place = caller() or "an unknown line"
    extents = "x".join(map(str, buffer.shape))
    if isinstance(buffer, DeviceArray):
        buffer.owner.note_line(place)
    _allocations[id(_owner(buffer))] = Allocation(buffer, f"{dtype}[{extents}] on {chosen.id}", buffer.nbytes, place)
    return buffer


def gpu_copy_to(buffer: Any, host: object) -> None:
    """Copy a host array into a buffer of the same size and dtype."""
    values = _checked("gpu_copy_to", buffer, host, writing=False)
    if isinstance(buffer, DeviceArray):
        buffer.copy_from(np.ascontiguousarray(values).reshape(buffer.shape))
    else:
        buffer[...] = values.reshape(buffer.shape)


def gpu_copy_from(buffer: Any, host: object) -> None:
    """Copy a buffer into a host array of the same size and dtype; waits for the work that writes it."""
    values = _checked("gpu_copy_from", buffer, host, writing=True)
    found = buffer.numpy() if isinstance(buffer, DeviceArray) else buffer
    values[...] = found.reshape(values.shape)


def gpu_free(buffer: Any) -> None:
    """Give a buffer's memory back. Kernels already launched still run to their end."""
    known = _known("gpu_free", buffer)
    if known.freed:
        raise DeviceError.at(
            "TW033", f"gpu_free: the buffer {known.text}, allocated at {known.place}, was freed before, at {known.freed}"
        )
    known.freed = caller() or "an unknown line"
    owner = _owner(buffer)
    del _allocations[id(owner)]
    known.buffer = None
    if len(_freed) >= _MOST_FREED:
        _freed.pop(next(iter(_freed)))
    _freed[id(owner)] = owner, known
    if isinstance(buffer, DeviceArray):
        buffer.owner.note_line(f"{known.place}, freed at {known.freed}")
        buffer.free()


def gpu_sync() -> None:
    """On the host: wait for all work on all GPUs. In a kernel: every thread of the block arrives before any leaves."""
    for device in devices():
        device.runtime.synchronize()


def gpu_check_leaks() -> None:
    """Raise an error that names every buffer of `gpu_alloc` that was not freed, with the line that allocated it."""
    if _allocations:
        raise DeviceError.at("TW033", _leaks(), help="free them with tw.gpu_free(...)")


def check_alive(value: object) -> None:
    """Raise the error for a host buffer that was freed; device arrays know it themselves."""
    if _freed and isinstance(value, np.ndarray):
        found = _freed.get(id(_owner(value)))
        if found is not None:
            known = found[1]
            raise DeviceError.at(
                "TW033", f"the buffer {known.text}, allocated at {known.place}, was used after it was freed at {known.freed}"
            )


def _known(what: str, buffer: object) -> Allocation:
    if isinstance(buffer, DeviceArray | np.ndarray):
        key = id(_owner(buffer))
        if key in _allocations:
            return _allocations[key]
        if key in _freed:
            return _freed[key][1]
    shown = f"a {type(buffer).__name__}"
    raise UserError.at(
        "TW033", f"{what} was given {shown} that gpu_alloc did not make", help="arrays of other kinds free themselves"
    )


def _checked(what: str, buffer: object, host: object, writing: bool) -> np.ndarray:
    known = _known(what, buffer)
    assert isinstance(buffer, DeviceArray | np.ndarray)
    if known.freed:
        raise DeviceError.at(
            "TW033", f"{what}: the buffer {known.text}, allocated at {known.place}, was used after it was freed at {known.freed}"
        )
    values = host if isinstance(host, np.ndarray) else None if writing else np.asarray(host)
    if values is None:
        raise UserError.at("TW009", f"{what} was given a {type(host).__name__} to write to, not a NumPy array")
    if values.size != buffer.size:
        raise UserError.at(
            "TW004",
            f"{what}: the buffer {known.text}, allocated at {known.place}, has {buffer.size} elements, the host array {values.size}",
        )
    dtype = buffer.dtype if isinstance(buffer, DeviceArray) else from_numpy(buffer.dtype)
    if from_numpy(values.dtype) is not dtype:
        raise UserError.at(
            "TW009", f"{what}: the buffer {known.text}, allocated at {known.place}, holds {dtype}, the host array {values.dtype}",
            help="convert it with .astype(...)",
        )  # fmt: skip
    if writing and not values.flags.writeable:
        raise UserError.at("TW018", f"{what}: the host array is read-only")
    return values


def _leaks() -> str:
    items = [f"{a.text} ({a.nbytes} bytes), allocated at {a.place}" for a in _allocations.values()]
    count = len(items)
    return f"{count} buffer{'s' if count > 1 else ''} of gpu_alloc {'were' if count > 1 else 'was'} not freed:\n  " + "\n  ".join(
        items
    )


@atexit.register
def _report() -> None:
    if _allocations:
        print(f"tilewright: {_leaks()}", file=sys.stderr)
