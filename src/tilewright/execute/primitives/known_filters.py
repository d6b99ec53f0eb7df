"""Filters of a form that was met before: what the first call found out is kept, and calls like it go straight to the launch.

In: the data, an array of ours or a tensor of PyTorch, on a device that writes page-locked memory, and a predicate. Out: the elements that are kept, or None where the general path
(`filters`) has to be taken: the form is new, a stream is named, a graph is recorded. The count goes to page-locked memory: the host waits for the stream, and reads
it. Only calls whose data were on the device are learnt, so a form is one of such data.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any

import numpy as np

from tilewright.base import levels
from tilewright.base.dtypes import i64
from tilewright.base.record import record
from tilewright.execute.calls.outputs import keep
from tilewright.execute.primitives.functions import identity_of
from tilewright.runtime.core import streams
from tilewright.runtime.core.device import LoadedProgram
from tilewright.runtime.exchange.libraries import Library
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray


@record(identity=True)
class KnownFilter:
    """What calls of one form have in common. `cells`: places for a count that no call uses now."""

    runtime: weakref.ref[ArrayDevice]
    program: LoadedProgram
    library: Library | None
    cells: list[np.ndarray]
    process: int
    level: str


_known: dict[object, KnownFilter] = {}


def _form(data: Any, wanted: Any) -> object:
    """What tells the forms of calls apart; None for those that the general path does."""
    if streams.STREAM_NAMED.value or streams.FAST_PATH_OFF.value or streams.recorders:
        return None
    torch = sys.modules.get("torch")
    if type(data) is DeviceArray:
        if not data.is_contiguous or not data.size:
            return None
        own: object = data.dtype, data.device.id, data.is_aligned(16)
    elif torch is not None and type(data) is torch.Tensor:
        if data.layout is not torch.strided or data.requires_grad or data.is_neg() or not data.is_contiguous() or not data.numel():
            return None
        own = data.dtype, data.device, data.data_ptr() % 16 == 0
    else:
        return None
    function = identity_of(wanted)
    return None if function is None else (function, own)


def learn_filter(data: Any, wanted: Any, runtime: ArrayDevice, program: LoadedProgram, library: Library | None) -> None:
    """Keep what a call of the general path used."""
    form = _form(data, wanted)
    if form is not None:
        keep(_known, form, KnownFilter(weakref.ref(runtime), program, library, [], os.getpid(), levels.holds("")))


def known_filter(data: Any, wanted: Any) -> Any:
    """The result of a call of a form that was met before; None where the general path has to be taken."""
    form = _form(data, wanted)
    found = _known.get(form) if form is not None else None
    runtime = found.runtime() if found is not None else None
    if found is None or runtime is None or found.process != os.getpid() or found.level != levels.holds(""):
        return None
    cell = found.cells.pop() if found.cells else runtime.empty_pinned((1,), i64)
    place = cell.__array_interface__["data"][0]
    library = found.library
    if library is None:
        size, result = data.size, runtime.empty((data.size,), data.dtype)
        found.program.run({"x": data, "y": result, "count": place}, {}, {"n": size})
        runtime.synchronize(0)
    else:
        size, result, ordinal = data.numel(), data.new_empty(data.numel()), runtime.ordinal
        stream = library.stream(ordinal)
        arrays = {"x": data.data_ptr(), "y": result.data_ptr(), "count": place}
        found.program.run(arrays, {}, {"n": size}, stream, take=lambda nbytes: library.memory(nbytes, ordinal))
        runtime.synchronize(stream)
    count = int(cell[0])
    found.cells.append(cell)
    return result[:count]
