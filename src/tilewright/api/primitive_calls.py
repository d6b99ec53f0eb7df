"""Where a primitive runs: arrays of any library in, arrays of one device out, results back in the form the caller gave.

`place_of` chooses the device as calls of kernels do: what `device=` names, else the device the arrays are on, else the default
one. A `Place` reads arguments (contiguous arrays of its device), makes results, and runs programs of primitives by name.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.api.arguments import read_argument
from tilewright.api.cuda_calls import _memory, _new, _place, device_of, gpu_of, is_on_device
from tilewright.api.devices import Device, default_device, find_device
from tilewright.api.outputs import keep
from tilewright.base.artifact import ArrayParam, Artifact
from tilewright.base.dtypes import DType, from_numpy
from tilewright.base.errors import DeviceError, UserError
from tilewright.base.target import Target
from tilewright.compile.primitives import compile_program, finished_program
from tilewright.runtime import streams
from tilewright.runtime.device_array import DeviceArray
from tilewright.runtime.libraries import is_tensor, library_of

if TYPE_CHECKING:
    from tilewright.ir.program import Program
    from tilewright.runtime.cuda import CudaDevice
    from tilewright.runtime.cuda_program import CudaProgram

Array = np.ndarray | DeviceArray
Number = int | float | bool
Build = Callable[[], "Program"]


def place_of(values: Sequence[object], device: str | Device | None) -> Place:
    """The place of a call with these arguments."""
    name = device or device_of(list(values)) or default_device()
    found = find_device(name)
    if found.kind == "cuda":
        return _Gpu(found, values)
    return _Emulator(found, values) if found.kind == "emulator" else _Host(found, values)


class Place(ABC):
    """A device, for one call."""

    def __init__(self, device: Device, values: Sequence[object]) -> None:
        self.device = device
        self.target: Target = device.target
        if streams.SPECIAL.value:
            streams.check_captured(device.id)
        self.tensors = any(is_tensor(v) and not v.is_cuda for v in values)  # type: ignore[attr-defined]
        """Whether host tensors came in: then host tensors go out."""

    @property
    def is_gpu(self) -> bool:
        """Whether programs are those for GPUs."""
        return self.target.is_gpu

    @property
    def is_cuda(self) -> bool:
        return self.device.kind == "cuda"

    @abstractmethod
    def read(self, name: str, value: object) -> Array:
        """The argument as a contiguous array of the place."""

    @abstractmethod
    def new(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """A new array."""

    @abstractmethod
    def run(self, what: str, build: Build, arrays: Mapping[str, Array], scalars: Mapping[str, Number] | None = None) -> None:
        """Run the program for `what` on these arrays, outputs included."""

    @abstractmethod
    def give(self, array: Array) -> Any:
        """A result as the caller wants it."""

    @abstractmethod
    def number(self, array: Array) -> Any:
        """The single element of an array, on the host."""

    def aligned(self, array: Array) -> bool:
        """Whether the first element lies where a vector may."""
        return address(array) % 16 == 0


def address(array: Array) -> int:
    return array.pointer if isinstance(array, DeviceArray) else int(array.__array_interface__["data"][0])


def dtype_of(array: Array) -> DType:
    if isinstance(array, DeviceArray):
        return array.dtype
    found = from_numpy(array.dtype)
    assert found is not None
    return found


def _contiguous(name: str, value: object) -> np.ndarray:
    if isinstance(value, DeviceArray):
        value = value.on_host()
    argument = read_argument(name, value)
    if not isinstance(argument.value, np.ndarray):
        raise UserError.at("TW009", f"'{name}' is a {type(value).__name__}, not an array")
    return np.ascontiguousarray(argument.value)


def _allocate(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    try:
        return np.empty(shape, dtype.numpy)
    except (MemoryError, ValueError) as error:
        raise DeviceError.at("TW031", f"no memory for a result of shape {list(shape)} and {dtype}: {error}") from error


class _OnHost(Place):
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


_cpu_programs: dict[str, Any] = {}


class _Host(_OnHost):
    def run(self, what: str, build: Build, arrays: Mapping[str, Array], scalars: Mapping[str, Number] | None = None) -> None:
        from tilewright.runtime import cpu

        artifact = compile_program(what, self.target, build)
        program = _cpu_programs.get(artifact.key)
        if program is None:
            program = cpu.load(artifact)
            keep(_cpu_programs, artifact.key, program)
        program.run({name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}, scalars or {})


class _Emulator(_OnHost):
    def run(self, what: str, build: Build, arrays: Mapping[str, Array], scalars: Mapping[str, Number] | None = None) -> None:
        from tilewright.ir.emulator import run_program

        program = finished_program(build(), self.target)
        outputs = {a.name: arrays[a.name] for a in program.outputs}
        inputs: dict[str, Any] = {n: v for n, v in arrays.items() if n not in outputs} | dict(scalars or {})
        run_program(program, inputs, outputs)  # type: ignore[arg-type]


_gpu_programs: weakref.WeakKeyDictionary[CudaDevice, dict[str, CudaProgram]] = weakref.WeakKeyDictionary()
"""By device, since the devices of a process change when it forks."""


class _Gpu(Place):
    def __init__(self, device: Device, values: Sequence[object]) -> None:
        super().__init__(device, values)
        self.gpu = gpu_of(device)
        self.place = _place(self.gpu, library_of(values))
        self.on_host = not any(is_on_device(v) for v in values)
        if self.place.split:
            self.gpu.order(self.place.stream, self.place.outside or 0)
        self.take = _memory(self.place.library, self.gpu.ordinal)
        self.results: dict[int, Any] = {}
        """Arrays of other libraries, by the address of our view of them."""

    def read(self, name: str, value: object) -> Array:
        if not is_on_device(value):
            return self.gpu.from_numpy(_contiguous(name, value), stream=self.place.stream)
        wrapped = self.gpu.wrap(value, self.place.stream)
        if wrapped.is_contiguous:
            return wrapped
        own = self.gpu.empty(wrapped.shape, wrapped.dtype, self.place.stream)
        self.gpu.copy(own, wrapped, self.place.stream)
        return own

    def new(self, shape: tuple[int, ...], dtype: DType) -> Array:
        made, array = _new(self.place, shape, ArrayParam("", dtype, (), (), "output"))
        if made is not array:
            self.results[id(array)] = (array, made)
        return array

    def run(self, what: str, build: Build, arrays: Mapping[str, Array], scalars: Mapping[str, Number] | None = None) -> None:
        artifact = compile_program(what, self.target, build)
        programs = _gpu_programs.setdefault(self.gpu, {})
        program = programs.get(artifact.key)
        if program is None:
            program = self.gpu.load(artifact)
            keep(programs, artifact.key, program)
        own = {name: array for name, array in arrays.items() if isinstance(array, DeviceArray)}
        program.run(own, scalars or {}, sizes_of(artifact, arrays), self.place.stream, take=self.take)

    def give(self, array: Array) -> Any:
        assert isinstance(array, DeviceArray)
        if self.place.split:
            self.gpu.order(self.place.outside or 0, self.place.stream)
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
