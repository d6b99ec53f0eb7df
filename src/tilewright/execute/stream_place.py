"""Where the work of a call goes on a device with memory of its own, and where its results come from.

In: the device and the arguments of a call. Out: a stream: the one the thread named, else the current one of the library the arrays
are of, else the default one; new results, of that library where it has a say; scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.base.record import record
from tilewright.runtime.core import streams
from tilewright.runtime.exchange.libraries import Library, is_foreign
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray


@record
class StreamPlace:
    """A stream of a device, and the library a call's arrays are of, with the stream that one would use."""

    device: ArrayDevice
    stream: int
    library: Library | None
    outside: int | None

    @staticmethod
    def of(device: ArrayDevice, values: Iterable[object]) -> StreamPlace:
        library: Library | None = device.library(values)
        named = streams.current(device.ordinal)
        outside = library.stream(device.ordinal) if library is not None else None
        stream = device.checked_stream(named) if named is not None else outside or 0
        return StreamPlace(device, stream, library, outside)

    @property
    def split(self) -> bool:
        """Whether two streams have to be put in order."""
        return self.outside is not None and self.outside != self.stream

    def enter(self) -> None:
        """Work of the call comes after that of the library."""
        if self.split:
            self.device.order(self.stream, self.outside or 0)

    def leave(self) -> None:
        """Work of the library comes after that of the call."""
        if self.split:
            self.device.order(self.outside or 0, self.stream)

    def wrapped(self, value: object) -> object:
        """An array of another library as one of ours; other values as they are."""
        return self.device.wrap(value, self.stream) if is_foreign(value) else value

    def new(self, shape: tuple[int, ...], dtype: DType) -> tuple[object, DeviceArray]:
        """A new result, of the library the inputs are of, and as an array of ours."""
        device, library = self.device, self.library
        make = library.maker(shape, dtype, device.ordinal) if library is not None else None
        if library is None or make is None:
            array = device.empty(shape, dtype, self.stream)
            return array, array
        if streams.recorders and self.stream in streams.recorders:
            # A graph keeps the memory of its results; the library's own would be used again between two replays.
            array = device.empty(shape, dtype, self.stream)
            return library.adopt(array), array
        made = make()
        return made, device.wrap(made, self.stream)

    def workspace(self) -> Callable[[int], tuple[int, object]] | None:
        """Scratch memory of the library, which knows what its graphs capture."""
        if self.library is None:
            return None
        library, ordinal = self.library, self.device.ordinal
        return lambda nbytes: library.memory(nbytes, ordinal)


def is_on_device(value: object) -> bool:
    """Whether it is an array in the memory of a device."""
    return isinstance(value, DeviceArray) or is_foreign(value)


def form_of(value: object) -> object:
    """All of an argument that decides which code runs and with which sizes."""
    if isinstance(value, DeviceArray):
        return value.shape, value.strides, value.dtype, value.is_aligned(16)
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, value.flags.aligned, value.strides
    return type(value)
