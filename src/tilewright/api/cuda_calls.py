"""Calls of a kernel on CUDA devices: the general path, and what it teaches the machine code that takes the next ones.

In: arguments by name, a device and `out=`; out: results of the library the arrays came from: NumPy arrays for host arrays,
else tensors of PyTorch, arrays of CuPy or device arrays. Work goes to the stream the thread named, else to the library's
current one, else to the default one. `NativeCalls` keeps the launchers; a call they refuse comes here and either works or
raises the exact error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from tilewright.api.arguments import Argument, Number, element_strides, read_argument
from tilewright.api.checks import bind_sizes, check_output
from tilewright.api.devices import Device
from tilewright.api.native_calls import Given, NativeCalls
from tilewright.api.outputs import MOST_SPECIALISATIONS, converted, given_outputs, keep, result_of
from tilewright.base.artifact import ArrayParam, Artifact
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.compile.driver import Signature, compile_kernel
from tilewright.runtime import streams
from tilewright.runtime.device_array import DeviceArray
from tilewright.runtime.device_memory import stream_handle
from tilewright.runtime.libraries import Library, is_tensor, library_of
from tilewright.tree.syntax import Function

if TYPE_CHECKING:
    from tilewright.runtime.cuda import CudaDevice
    from tilewright.runtime.cuda_program import CudaProgram

__all__ = ["MOST_SPECIALISATIONS", "CudaCalls", "device_of", "gpu_of", "is_on_device"]


@record
class _CudaPlan:
    """A loaded program, the sizes of one kind of call and the shapes of its results."""

    program: CudaProgram
    sizes: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]
    arguments: tuple[Argument, ...] = ()
    """The call's arguments, where they were just read."""


@record
class _Place:
    """Where a call's work goes: a stream of a device, and the library its arrays are of, with the stream that one would use."""

    gpu: CudaDevice
    stream: int
    library: Library | None
    outside: int | None

    @property
    def split(self) -> bool:
        """Whether two streams have to be put in order."""
        return self.outside is not None and self.outside != self.stream


class CudaCalls:
    """A kernel on CUDA devices: keeps what was compiled and loaded for it."""

    def __init__(self, function: Function, signature: Callable[[list[Argument], bool], Signature]) -> None:
        self.function = function
        self._signature = signature
        self._programs: dict[tuple[str, str], CudaProgram] = {}
        self._plans: dict[tuple[object, ...], _CudaPlan] = {}
        self.native = NativeCalls(function.name)

    @property
    def programs(self) -> list[CudaProgram]:
        """What was loaded so far, the latest last."""
        return list(self._programs.values())

    def run(self, values: Mapping[str, object], device: Device, out: object = None) -> tuple[object, Artifact]:
        """The results of a call, and what ran."""
        gpu = gpu_of(device)
        several = out if isinstance(out, tuple | list) else [out]
        on_host = not any(is_on_device(v) for v in (*values.values(), *several))
        place = _place(gpu, library_of((*values.values(), *several)))
        if place.split:
            gpu.order(place.stream, place.outside or 0)
        moved = {n: gpu.wrap(v, place.stream) if _is_foreign(v) else v for n, v in values.items()}
        plan = self._plan(moved, device, gpu)
        artifact = plan.program.artifact
        arrays: dict[str, DeviceArray] = {}
        scalars: dict[str, Number] = {}
        for a in plan.arguments or self._read(moved):
            if isinstance(a.value, np.ndarray):
                arrays[a.name] = gpu.from_numpy(np.ascontiguousarray(a.value), stream=place.stream)
            elif isinstance(a.value, DeviceArray):
                arrays[a.name] = a.value
            else:
                scalars[a.name] = a.value
        given = given_outputs(artifact, out, self.function.span)
        results: dict[str, object] = {}
        outputs: dict[str, DeviceArray] = {}
        copies: list[tuple[DeviceArray, DeviceArray]] = []
        for param, shape in zip(artifact.outputs, plan.shapes, strict=True):
            target = given.get(param.name)
            if target is None or isinstance(target, np.ndarray):
                if target is not None:
                    check_output(param, target, shape, self.function.span)
                results[param.name], outputs[param.name] = _new(place, shape, param)
                continue
            wrapped = gpu.wrap(target, place.stream)
            self._check_given(wrapped, param, shape)
            others = [*([] if artifact.alias_safe else arrays.values()), *outputs.values()]
            outputs[param.name] = wrapped
            if any(_overlap(wrapped, other) for other in others) or wrapped.pointer % max(1, param.align):
                outputs[param.name] = gpu.empty(shape, param.dtype, place.stream)
                copies.append((wrapped, outputs[param.name]))
        take = _memory(place.library, gpu.ordinal)
        plan.program.run({**arrays, **outputs}, converted(artifact, scalars), plan.sizes, place.stream, take=take)
        for wrapped, temporary in copies:
            gpu.copy(wrapped, temporary, place.stream)
        if place.split:
            gpu.order(place.outside or 0, place.stream)
        if on_host:
            return self._to_host(artifact, outputs, given, out), artifact
        hosted = {name: target for name, target in given.items() if isinstance(target, np.ndarray)}
        for name, target in hosted.items():
            target[...] = outputs[name].numpy()
        if not copies and not hosted and not streams.SPECIAL.value:
            self._teach(values, out, given, plan, place, arrays, outputs)
        return result_of(artifact, results, out), artifact

    def _read(self, values: Mapping[str, object]) -> list[Argument]:
        return [read_argument(name, value, self.function.span, True) for name, value in values.items()]

    def _check_given(self, wrapped: DeviceArray, param: ArrayParam, shape: tuple[int, ...]) -> None:
        if wrapped.shape != shape or wrapped.dtype is not param.dtype or not wrapped.is_contiguous or wrapped.readonly:
            raise UserError.at(
                "TW018", f"out= for '{param.name}' is {wrapped!r}, but the result is a writable, contiguous "
                f"{param.dtype}[{', '.join(map(str, shape))}]", self.function.span,
            )  # fmt: skip

    def _to_host(
        self, artifact: Artifact, outputs: Mapping[str, DeviceArray], given: Mapping[str, object], out: object
    ) -> object:
        host: dict[str, object] = {}
        for name, array in outputs.items():
            values = host[name] = array.numpy()
            target = given.get(name)
            if isinstance(target, np.ndarray):
                target[...] = values
        return result_of(artifact, host, out)

    def _plan(self, values: Mapping[str, object], device: Device, gpu: CudaDevice) -> _CudaPlan:
        """What to run for arguments of these forms. Calls like an earlier one find it without being looked at in detail."""
        forms = (device.id, *(_form(v) for v in values.values()))
        plan = self._plans.get(forms)
        if plan is not None:
            return plan
        arguments = self._read(values)
        artifact = compile_kernel(self.function, self._signature(arguments, True), gpu.target)
        program = self._programs.get((device.id, artifact.key))
        if program is None:
            program = gpu.load(artifact)
            keep(self._programs, (device.id, artifact.key), program)
        inputs = {a.name: a.value for a in arguments if isinstance(a.value, np.ndarray | DeviceArray)}
        shapes = {name: array.shape for name, array in inputs.items()}
        strides = {name: element_strides(array) for name, array in inputs.items()}
        sizes = bind_sizes(program.artifact, shapes, strides, self.function.span)
        results = tuple(tuple(s.evaluate(sizes) for s in p.shape) for p in program.artifact.outputs)
        keep(self._plans, forms, _CudaPlan(program, sizes, results))
        return _CudaPlan(program, sizes, results, tuple(arguments))

    def _teach(
        self, values: Mapping[str, object], out: object, given: Mapping[str, object], plan: _CudaPlan, place: _Place,
        arrays: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray],
    ) -> None:  # fmt: skip
        """Let machine code take the next call like this one."""
        artifact = plan.program.artifact
        if out is not None and any(p.name not in given or p.align > 16 for p in artifact.outputs):
            return
        apart: list[tuple[str, str]] = []
        for i, param in enumerate(artifact.outputs if out is not None else ()):
            others = [*([] if artifact.alias_safe else arrays), *(earlier.name for earlier in artifact.outputs[:i])]
            apart += [(param.name, other) for other in others]
        self.native.learn(
            Given(tuple(values.values()), out, plan.program, plan.sizes, plan.shapes, place.library, arrays, outputs, apart)
        )


def _place(gpu: CudaDevice, library: Library | None) -> _Place:
    named = streams.current(gpu.ordinal)
    outside = library.stream(gpu.ordinal) if library is not None else None
    stream = stream_handle(named) if named is not None else outside or 0
    return _Place(gpu, stream, library, outside)


def _new(place: _Place, shape: tuple[int, ...], param: ArrayParam) -> tuple[object, DeviceArray]:
    """A new result, of the library the inputs are of, and as an array of ours."""
    gpu, library = place.gpu, place.library
    make = library.maker(shape, param.dtype, gpu.ordinal) if library is not None else None
    if library is None or make is None:
        own = gpu.empty(shape, param.dtype, place.stream)
        return own, own
    if streams.recorders and place.stream in streams.recorders:
        # A graph keeps the memory of its results; the library's own would be used again between two replays.
        own = gpu.empty(shape, param.dtype, place.stream)
        return library.adopt(own), own
    made = make()
    return made, gpu.wrap(made, place.stream)


def _memory(library: Library | None, ordinal: int) -> Callable[[int], tuple[int, object]] | None:
    """Scratch memory of the library, which knows what its graphs capture."""
    if library is None:
        return None
    chosen = library
    return lambda nbytes: chosen.memory(nbytes, ordinal)


def _form(value: object) -> object:
    """All of an argument that decides which code runs and with which sizes."""
    if isinstance(value, DeviceArray):
        return value.shape, value.strides, value.dtype, value.pointer % 16 == 0
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, value.flags.aligned, value.strides
    return type(value)


def is_on_device(value: object) -> bool:
    if isinstance(value, DeviceArray):
        return True
    if is_tensor(value):
        return bool(value.is_cuda)  # type: ignore[attr-defined]
    return not isinstance(value, np.ndarray) and hasattr(value, "__cuda_array_interface__")


def _is_foreign(value: object) -> bool:
    return not isinstance(value, DeviceArray) and is_on_device(value)


def device_of(values: list[object]) -> str | None:
    """The device the first device array of a call is on."""
    for value in values:
        if isinstance(value, tuple | list):
            inside = device_of(list(value))
            if inside is not None:
                return inside
        elif isinstance(value, DeviceArray):
            return f"cuda:{value.device.ordinal}"
        elif is_on_device(value):
            index = getattr(getattr(value, "device", None), "index", None)
            return f"cuda:{index if isinstance(index, int) else 0}"
    return None


def gpu_of(device: Device) -> CudaDevice:
    from tilewright.runtime import cuda

    return cuda.devices()[int(device.id.split(":")[1])]


def _overlap(a: DeviceArray, b: DeviceArray) -> bool:
    if not a.size or not b.size:
        return False
    (a_low, a_high), (b_low, b_high) = a.reach(), b.reach()
    return a.pointer + a_low < b.pointer + b_high and b.pointer + b_low < a.pointer + a_high
