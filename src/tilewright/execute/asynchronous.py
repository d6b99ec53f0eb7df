"""Calls that do not wait: `asynchronous=True` gives a future, `stream=` says where, and futures are arguments like arrays.

In: a kernel and the arguments of a call; out: a `Future`, or what the plain call gives. On a GPU the call is queued at once:
what it waits for are events on the device. On the CPU and the emulator it joins the queue of the current stream and runs on a
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.base import dtypes, registry
from tilewright.base.errors import UserError
from tilewright.execute.calls.callable_kernel import CallableKernel
from tilewright.execute.calls.named_numbers import tell_recorder
from tilewright.execute.devices import Device, array_device, default_device, device_of, find_device
from tilewright.execute.speed_warnings import contiguous
from tilewright.runtime.core import streams
from tilewright.runtime.core.device import DeviceEvent, Transfer
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray

if TYPE_CHECKING:
    from tilewright.runtime.core.futures import Future, GpuFuture

_OPTIONS = ("asynchronous", "stream")
_NUMBERS = frozenset((float, int, bool))


def is_special(args: tuple[object, ...], keywords: Mapping[str, object]) -> bool:
    """Whether a call has something to do with streams, futures or graphs."""
    if streams.FAST_PATH_OFF.value or "asynchronous" in keywords or "stream" in keywords:
        return True
    futures = streams.FUTURES
    return bool(futures) and (any(isinstance(a, futures) for a in args) or any(isinstance(a, futures) for a in keywords.values()))


def special_call(kernel: CallableKernel, args: tuple[object, ...], keywords: dict[str, object]) -> object:
    """Make the call; `NotImplemented` where it is a plain one after all, with the options taken out of `keywords`."""
    options = {name: keywords.pop(name) for name in _OPTIONS if name in keywords and name not in kernel.parameter_names}
    asynchronous = options.get("asynchronous", kernel.asynchronous)
    if not isinstance(asynchronous, bool):
        raise UserError.at("TW009", f"asynchronous= is a {type(asynchronous).__name__}, not True or False", kernel.function.span)
    if options.get("stream") is not None:
        from tilewright.execute.streams import Stream

        with Stream.of(options["stream"], _device(kernel, args, keywords).id):
            return kernel(*args, asynchronous=asynchronous, **keywords)
    if asynchronous:
        return call_later(kernel, args, keywords)
    if _futures(args, keywords):
        return call_now(kernel, args, keywords)
    if streams.is_capturing():
        tell_recorder(kernel.parameter_names, args, keywords)
    return NotImplemented


def _futures(args: tuple[object, ...], keywords: Mapping[str, object]) -> list[Future[Any]]:
    known = streams.FUTURES
    found: list[Any] = [value for value in (*args, *keywords.values()) if known and isinstance(value, known)]
    return found


def _device(kernel: CallableKernel, args: tuple[object, ...], keywords: Mapping[str, object]) -> Device:
    """Where the call runs, by what is known of its arguments now."""
    asked = keywords.get("device")
    if asked is not None and not isinstance(asked, str):
        raise UserError.at(
            "TW009", f"device= is a {type(asked).__name__}, not a name such as {registry.examples()}", kernel.function.span
        )
    known: list[object] = []
    for value in (*args, *keywords.values()):
        if isinstance(value, streams.FUTURES):
            part = value.on_device()  # type: ignore[attr-defined]
            value = part.pending if part is not None else None
        known += value if isinstance(value, tuple | list) else [value]
    return find_device(asked or kernel.device or device_of(known) or default_device())


def _resolved(value: object, on_gpu: bool) -> Any:
    """A future's result: waited for, or the arrays that a GPU will have written by then."""
    if not isinstance(value, streams.FUTURES):
        return value
    part = value.on_device() if on_gpu else None  # type: ignore[attr-defined]
    return part.pending if part is not None else value.result()  # type: ignore[attr-defined]


def _plain(kernel: CallableKernel, args: tuple[object, ...], keywords: Mapping[str, object], on_gpu: bool) -> object:
    """The call itself."""
    named = {name: _resolved(value, on_gpu) for name, value in keywords.items()}
    if kernel.asynchronous:
        named["asynchronous"] = False
    return kernel(*(_resolved(value, on_gpu) for value in args), **named)


def call_now(kernel: CallableKernel, args: tuple[object, ...], keywords: dict[str, object]) -> object:
    """A plain call with futures among its arguments."""
    device = _device(kernel, args, keywords)
    gpu = array_device(device)
    if gpu is None:
        return _plain(kernel, args, keywords, on_gpu=False)
    for future in _futures(args, keywords):
        part = future.on_device()
        if part is None:
            future.exception()
        else:
            _order(gpu, streams.current(gpu.ordinal) or 0, part)
    return _plain(kernel, args, keywords, on_gpu=True)


def call_later(kernel: CallableKernel, args: tuple[object, ...], keywords: dict[str, object]) -> Future[Any]:
    """An asynchronous call."""
    gpu = _only_gpu(kernel, args, keywords)
    if gpu is not None:
        from tilewright.runtime.core.futures import GpuFuture

        stream = streams.named(gpu.ordinal) or 0
        named = {"asynchronous": False} if kernel.asynchronous else {}
        return GpuFuture(kernel(*args, **named), gpu.event().record(stream), stream)
    streams.refuse_in_capture(
        f"an asynchronous call of {kernel.__name__}", help="calls inside a capture run when the graph is replayed"
    )
    device = _device(kernel, args, keywords)
    after = _futures(args, keywords)
    gpu = array_device(device)
    if gpu is None:
        from tilewright.execute.streams import host_queue

        return host_queue(device).submit(lambda: _plain(kernel, args, keywords, on_gpu=False), after)
    from tilewright.runtime.core import pending_launches as held_calls

    stream = _quietly_current(gpu.ordinal)
    waiting = [future for future in after if future.on_device() is None and not future.done()]
    if not waiting and not held_calls.is_holding(gpu.ordinal, stream):
        return _queue(kernel, gpu, stream, args, keywords)
    return held_calls.hold(gpu.ordinal, stream, lambda: _queue(kernel, gpu, stream, args, keywords), waiting)


def _only_gpu(kernel: CallableKernel, args: tuple[object, ...], keywords: Mapping[str, object]) -> ArrayDevice | None:
    """The device of a call with nothing but device arrays and numbers, where nothing is captured or held back: the usual one."""
    if keywords or kernel.device is not None or streams.FAST_PATH_OFF.value:
        return None
    found: Any = None
    for value in args:
        if type(value) is DeviceArray:
            found = value.device
        elif type(value) not in _NUMBERS:
            return None
    return found  # type: ignore[no-any-return]


def _quietly_current(ordinal: int) -> int:
    """The current stream, without waiting for calls that are held back on it: this one will queue behind them."""
    return streams.named(ordinal) or 0


def _queue(
    kernel: CallableKernel, gpu: ArrayDevice, stream: int, args: tuple[object, ...], keywords: Mapping[str, object]
) -> GpuFuture[Any]:
    """Queue the call on the GPU's stream, after the futures it takes, and an event behind it."""
    from tilewright.runtime.core.futures import GpuFuture

    with streams.use(gpu.ordinal, stream):
        for future in _futures(args, keywords):
            part = future.on_device()
            if part is not None:
                _order(gpu, stream, part)
        args = tuple(_resolved(value, on_gpu=True) for value in args)
        keywords = {name: _resolved(value, on_gpu=True) for name, value in keywords.items()}
        finish: Callable[[], object] | None = None
        if any(isinstance(v, np.ndarray) for v in (*args, *keywords.values())) and device_of([*args, *keywords.values()]) is None:
            result, finish = _from_host(kernel, gpu, stream, args, dict(keywords))
        else:
            result = _plain(kernel, args, keywords, on_gpu=True)
        return GpuFuture(result, gpu.event().record(stream), stream, finish)


def _from_host(
    kernel: CallableKernel, gpu: ArrayDevice, stream: int, args: tuple[object, ...], keywords: dict[str, object]
) -> tuple[object, Callable[[], object]]:
    """A call with arrays of the host: copies there and back are queued with it."""
    given = keywords.pop("out", None)
    under_way: list[Transfer] = []

    def moved(value: object) -> object:
        if not isinstance(value, np.ndarray):
            return value
        values = contiguous("an array", value, kernel.function.span)
        dtype = dtypes.from_numpy(values.dtype)
        if dtype is None:
            return value  # the call says what is wrong
        array = gpu.empty(values.shape, dtype, stream)
        under_way.append(gpu.copy_in_async(array, values, stream))
        return array

    keywords["device"] = gpu.id
    result = _plain(kernel, tuple(map(moved, args)), {name: moved(value) for name, value in keywords.items()}, on_gpu=True)
    parts = result if isinstance(result, tuple) else (result,)
    targets = (None,) * len(parts) if given is None else given if isinstance(given, tuple | list) else (given,)
    if len(targets) != len(parts):
        raise UserError.at(
            "TW018", f"out= has {len(targets)} array(s), but the kernel returns {len(parts)}", kernel.function.span
        )
    found: list[np.ndarray] = []
    for part, target in zip(parts, targets, strict=True):
        assert isinstance(part, DeviceArray)
        direct = isinstance(target, np.ndarray) and target.flags.c_contiguous and target.flags.writeable
        values = target if direct and isinstance(target, np.ndarray) else np.empty(part.shape, part.dtype.numpy)
        under_way.append(gpu.copy_out_async(values, part, stream))
        found.append(values)

    def finish() -> object:
        for ticket in under_way:
            ticket.wait()
        for values, target in zip(found, targets, strict=True):
            if isinstance(target, np.ndarray) and target is not values:
                np.copyto(target, values, casting="no")
        plain = [values[()] if values.ndim == 0 else values for values in found]
        return given if given is not None else plain[0] if len(plain) == 1 else tuple(plain)

    return result, finish


def _order(gpu: ArrayDevice, stream: int, part: GpuFuture[Any]) -> None:
    """Work on the stream waits for the future's event, on the device."""
    streams.refuse_in_capture("a future as an argument", gpu.ordinal, "wait for its result before the capture")
    assert isinstance(part.event, DeviceEvent)
    if type(part.event.device) is not type(gpu):
        part.event.synchronize()  # devices of different kinds do not know each other's events
    elif part.stream != stream or part.event.device is not gpu:
        gpu.hold(stream, part.event)
