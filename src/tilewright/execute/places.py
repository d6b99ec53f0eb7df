"""Where a primitive runs: arrays of any library in, arrays of one device out, results back in the form the caller gave.

A `DevicePlace` is a device, for one call (`execute.devices.place_of` chooses it): it reads arguments (contiguous arrays of its device),
makes results, and runs programs of primitives by name. `HostPlace` is that of devices that use NumPy's arrays, `ArrayPlace` that of
devices with memory of their own.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.base.artifact import Artifact
from tilewright.base.dtypes import DType, from_numpy
from tilewright.base.errors import DeviceError, UserError
from tilewright.base.target import Target
from tilewright.compile.primitives import compile_program
from tilewright.execute.calls.arguments import read_argument
from tilewright.execute.calls.outputs import keep
from tilewright.execute.device import Device, own_memory
from tilewright.execute.speed_warnings import contiguous
from tilewright.execute.stream_place import StreamPlace, is_on_device
from tilewright.ir.program import Program
from tilewright.runtime.core import streams
from tilewright.runtime.core.device import LoadedProgram
from tilewright.runtime.exchange.libraries import is_foreign, is_tensor
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray

Array = np.ndarray | DeviceArray
Number = int | float | bool
Build = Callable[[], Program]


class DevicePlace(ABC):
    """A device, for one call."""

    def __init__(self, device: Device, values: Sequence[object]) -> None:
        self.device = device
        self.target: Target = device.target
        if streams.FAST_PATH_OFF.value:
            streams.check_captured(device.id)
        self.tensors = any(is_tensor(v) and not is_foreign(v) for v in values)
        """Whether host tensors came in: then host tensors go out."""

    @property
    def is_gpu(self) -> bool:
        """Whether programs are those for GPUs on which a block may wait for others."""
        return self.target.simt and self.target.forward_progress

    @property
    def waits_for_none(self) -> bool:
        """Whether a wait for another block may never end: programs are then several launches. Where there is none of that kind, each block is one thread, as on a CPU."""
        return self.target.simt and not self.target.forward_progress

    takes_foreign = False
    """Whether arrays of other libraries go to kernels as they are."""

    @abstractmethod
    def read(self, name: str, value: object) -> Array:
        """The argument as a contiguous array of the place."""

    @abstractmethod
    def new(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """A new array."""

    @abstractmethod
    def run(self, what: str, build: Build, arrays: Mapping[str, Array], scalars: Mapping[str, Number] | None = None) -> LoadedProgram | None:
        """Run the program for `what` on these arrays, outputs included. What is loaded on the device for it, where there is such a thing."""

    @abstractmethod
    def give(self, array: Array) -> Any:
        """A result as the caller wants it."""

    @abstractmethod
    def number(self, array: Array) -> Any:
        """The single element of an array, on the host."""

    def aligned(self, array: Array) -> bool:
        """Whether the first element lies where a vector may."""
        return array.is_aligned(16) if isinstance(array, DeviceArray) else array.__array_interface__["data"][0] % 16 == 0


def dtype_of(array: Array) -> DType:
    if isinstance(array, DeviceArray):
        return array.dtype
    found = from_numpy(array.dtype)
    assert found is not None
    return found


def _contiguous(name: str, value: object) -> np.ndarray:
    if type(value) is np.ndarray and value.flags.carray and from_numpy(value.dtype) is not None:
        return value
    if isinstance(value, DeviceArray):
        value = value.on_host()
    argument = read_argument(name, value)
    if not isinstance(argument.value, np.ndarray):
        raise UserError.at("TW009", f"'{name}' is a {type(value).__name__}, not an array")
    return contiguous(name, argument.value)


def _allocate(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    try:
        return np.empty(shape, dtype.numpy)
    except (MemoryError, ValueError) as error:
        raise DeviceError.at("TW031", f"no memory for a result of shape {list(shape)} and {dtype}: {error}") from error


class HostPlace(DevicePlace):
    """A device whose arrays are NumPy's."""

    def read(self, name: str, value: object) -> Array:
        return _contiguous(name, value)

    def new(self, shape: tuple[int, ...], dtype: DType) -> Array:
        return _allocate(shape, dtype)

    def give(self, array: Array) -> Any:
        assert isinstance(array, np.ndarray)
        return sys.modules["torch"].from_numpy(array) if self.tensors else array

    def number(self, array: Array) -> Any:
        assert isinstance(array, np.ndarray)
        return array.reshape(-1)[0]


_programs: weakref.WeakKeyDictionary[ArrayDevice, dict[str, LoadedProgram]] = weakref.WeakKeyDictionary()
"""By device, since the devices of a process change when it forks."""


class ArrayPlace(DevicePlace):
    """A device with memory of its own."""

    takes_foreign = True

    def __init__(self, device: Device, values: Sequence[object]) -> None:
        super().__init__(device, values)
        self.runtime = own_memory(device)
        self.place = StreamPlace.of(self.runtime, values)
        self.on_host = not any(is_on_device(v) for v in values)
        self.place.enter()
        self.results: dict[int, Any] = {}
        """Arrays of other libraries, by the address of our view of them."""

    def read(self, name: str, value: object) -> Array:
        if not is_on_device(value):
            return self.runtime.from_numpy(_contiguous(name, value), stream=self.place.stream)
        wrapped = self.runtime.wrap(value, self.place.stream)
        if wrapped.dtype.is_complex:
            read_argument(name, wrapped)  # refuses it
        if wrapped.is_contiguous:
            return wrapped
        own = self.runtime.empty(wrapped.shape, wrapped.dtype, self.place.stream)
        self.runtime.copy(own, wrapped, self.place.stream)
        return own

    def new(self, shape: tuple[int, ...], dtype: DType) -> Array:
        made, array = self.place.new(shape, dtype)
        if made is not array:
            self.results[id(array)] = (array, made)
        return array

    def compile(self, what: str, build: Build) -> Artifact:
        """The code of a primitive's program for the device."""
        return compile_program(what, self.target, build)

    def run(self, what: str, build: Build, arrays: Mapping[str, Array], scalars: Mapping[str, Number] | None = None) -> LoadedProgram | None:
        artifact = self.compile(what, build)
        programs = _programs.setdefault(self.runtime, {})
        program = programs.get(artifact.key)
        if program is None:
            program = self.runtime.load(artifact)
            keep(programs, artifact.key, program)
        own = {name: array for name, array in arrays.items() if isinstance(array, DeviceArray)}
        program.run(own, scalars or {}, sizes_of(artifact, arrays), self.place.stream, take=self.place.workspace())
        return program

    def give(self, array: Array) -> Any:
        assert isinstance(array, DeviceArray)
        self.place.leave()
        if self.on_host:
            host = array.numpy()
            return sys.modules["torch"].from_numpy(host) if self.tensors else host
        known = self.results.get(id(array))
        if known is not None:
            return known[1]
        return self.place.library.adopt(array) if self.place.library is not None else array

    def number(self, array: Array) -> Any:
        if streams.recorders and self.place.stream in streams.recorders:
            raise UserError.at("TW016", "the size of this result is known only after it was computed, which a graph cannot wait for")
        assert isinstance(array, DeviceArray)
        return array.numpy().reshape(-1)[0]


def sizes_of(artifact: Artifact, arrays: Mapping[str, Array]) -> dict[str, int]:
    """The values of the size names that arrays bind."""
    return {b.name: arrays[b.array].shape[b.axis] for b in artifact.bindings if not b.stride}
