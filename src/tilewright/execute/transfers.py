"""Copies that do not wait: arrays on their way to a device or back, as futures.

In: an array (or the future of one) and the device it is to be on; out: a `Future` of it there. The copy is queued on the
current stream, after the work that makes its source. From and to pinned memory the GPU copies by itself, while kernels of other
streams run; plain memory goes through a pinned piece: it is read before the call returns, and written when the result is asked
for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.execute.devices import Device, array_device, find_device, own_memory
from tilewright.execute.stream_place import is_on_device
from tilewright.execute.streams import host_queue
from tilewright.runtime.core import pending_launches as held_calls
from tilewright.runtime.core import streams
from tilewright.runtime.core.device import DeviceEvent, Transfer
from tilewright.runtime.core.futures import Future, GpuFuture
from tilewright.runtime.exchange.libraries import foreign_device
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray


def transfer(source: Any, device: str, out: Any = None) -> Future[Any]:
    """The array `source` on `device`, once it is there; in `out`, where that is given.

    `source` may be the future of an array. Until the future is done, leave the memory of host arrays alone.
    """
    chosen = find_device(device)
    streams.refuse_in_capture("transfer()", help="copy before the capture or after a replay")
    if isinstance(source, Future):
        part = source.on_device()
        if part is None:
            return _after(source, chosen, out)
        return _with_array(part.pending, chosen, out, part)
    return _with_array(source, chosen, out)


def _after(source: Future[Any], device: Device, out: Any) -> Future[Any]:
    """The source is made by the host, or its call is still held back."""
    gpu = array_device(device)
    if gpu is None:
        return host_queue(device).submit(lambda: _copied(source.result(), out), (source,))
    stream = _stream(gpu)
    _check_target(gpu, out)
    if source.done() and not held_calls.is_holding(gpu.ordinal, stream):
        return _with_array(source.result(), device, out)
    return held_calls.hold(gpu.ordinal, stream, lambda: _in(gpu, source.result(), out, stream), (source,))


def _with_array(source: Any, device: Device, out: Any, producer: GpuFuture[Any] | None = None) -> Future[Any]:
    gpu = array_device(device)
    if is_on_device(source):
        if gpu is not None:
            raise UserError.at("TW009", f"{source!r} is on a GPU already", help="use tw.to_device between GPUs")
        return _out(source if isinstance(source, DeviceArray) else _wrapped(source), out, producer)
    if not isinstance(source, np.ndarray):
        raise UserError.at(
            "TW009", f"a {type(source).__name__} cannot be copied without waiting", help="pass a NumPy or a device array"
        )
    if gpu is None:
        return host_queue(device).submit(lambda: _copied(source, out))
    _check_target(gpu, out)
    stream = _stream(gpu)
    if held_calls.is_holding(gpu.ordinal, stream):
        return held_calls.hold(gpu.ordinal, stream, lambda: _in(gpu, source, out, stream), ())
    return _in(gpu, source, out, stream)


def _check_target(gpu: ArrayDevice, out: Any) -> None:
    """What is wrong with `out=` is said at the call, also where the copy has to wait."""
    if out is not None and (not isinstance(out, DeviceArray) or out.device is not gpu):
        raise UserError.at("TW018", f"out= is {out!r}, not an array on {gpu.label}")


def _in(gpu: ArrayDevice, source: np.ndarray, out: Any, stream: int) -> GpuFuture[Any]:
    dtype: DType | None = dtypes.of_array(source.dtype)
    if dtype is None:
        raise UserError.at("TW009", f"arrays of {source.dtype} are not supported on a device")
    target = out if out is not None else gpu.empty(source.shape, dtype, stream)
    ticket = gpu.copy_in_async(target, source, stream)
    return GpuFuture(target, gpu.event().record(stream), stream, _finish(ticket, target))


def _out(source: DeviceArray, out: Any, producer: GpuFuture[Any] | None) -> GpuFuture[Any]:
    gpu = source.device
    stream = _stream(gpu)
    target = np.empty(source.shape, source.dtype.numpy) if out is None else out
    if not isinstance(target, np.ndarray):
        raise UserError.at("TW018", f"out= is a {type(target).__name__}, not a NumPy array")
    if producer is not None and isinstance(producer.event, DeviceEvent) and producer.stream != stream:
        gpu.hold(stream, producer.event)
    else:
        for used in (source.owner.stream, *source.owner.users):
            if used >= 0 and used != stream:
                gpu.order(stream, used)
    ticket = gpu.copy_out_async(target, source, stream)
    return GpuFuture(target, gpu.event().record(stream), stream, _finish(ticket, target))


def _finish(ticket: Transfer, target: Any) -> Callable[[], Any]:
    def finish() -> Any:
        ticket.wait()
        return target

    return finish


def _copied(source: Any, out: Any) -> np.ndarray:
    """On the host: a copy."""
    values = source.numpy() if isinstance(source, DeviceArray) else np.asarray(source)
    if out is None:
        return np.array(values)
    if not isinstance(out, np.ndarray) or out.shape != values.shape or out.dtype != values.dtype:
        raise UserError.at("TW018", f"out= does not fit the {values.dtype} array of shape {values.shape}")
    np.copyto(out, values)
    return out


def _stream(gpu: ArrayDevice) -> int:
    return streams.named(gpu.ordinal) or 0


def _wrapped(source: Any) -> DeviceArray:
    gpu = own_memory(find_device(foreign_device(source)))
    return gpu.wrap(source, _stream(gpu))
