"""Calls of a kernel on devices with memory of their own: the general path, with every case handled.

In: arguments by name, a device and `out=`; out: results of the library the arrays came from: NumPy arrays for host arrays, else
device arrays, or arrays of another library on that device. A kind of device that learns from calls overrides `learn`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilewright.base.artifact import ArrayParam, Artifact
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.compile.driver import Signature, compile_kernel
from tilewright.execute.calls.arguments import Number, ReadArgument, element_strides, numbers
from tilewright.execute.calls.checks import bind_sizes, check_output
from tilewright.execute.calls.complex_arrays import any_complex
from tilewright.execute.calls.in_place import apart, check_given, check_in_place, share_memory
from tilewright.execute.calls.kernel_calls import KernelCalls, KernelSource
from tilewright.execute.calls.outputs import converted, given_outputs, keep, result_of
from tilewright.execute.device import Device, own_memory
from tilewright.execute.speed_warnings import announced, contiguous
from tilewright.execute.stream_place import StreamPlace, form_of, is_on_device
from tilewright.runtime.core import streams
from tilewright.runtime.core.device import LoadedProgram
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray


@record
class CallPlan:
    """A loaded program, the sizes of one kind of call and the shapes of its results."""

    program: LoadedProgram
    sizes: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]
    arguments: tuple[ReadArgument, ...] = ()
    """The call's arguments, where they were just read."""


@record
class MadeCall:
    """A call that was made, with what it used."""

    values: Mapping[str, object]
    out: object
    given: Mapping[str, object]
    plan: CallPlan
    place: StreamPlace
    arrays: Mapping[str, DeviceArray]
    outputs: Mapping[str, DeviceArray]


class ArrayCalls(KernelCalls):
    """A kernel on devices with memory of their own."""

    def __init__(self, kernel: KernelSource) -> None:
        super().__init__(kernel)
        self._programs: dict[tuple[int, str], LoadedProgram] = {}
        self._plans: dict[tuple[object, ...], CallPlan] = {}
        self._shaping: dict[tuple[object, ...], tuple[str, ...]] = {}
        """Numbers that decide sizes, by the forms of all arguments."""

    @property
    def programs(self) -> list[LoadedProgram]:
        """What was loaded so far, the latest last."""
        return list(self._programs.values())

    def compile(self, signature: Signature, device: Device) -> Artifact:
        """The kernel's code for a device."""
        return compile_kernel(self.function, signature, device.target)

    def learn(self, call: MadeCall) -> None:
        """A call was made whose arrays were all on the device, outside graphs."""

    def run(self, values: Mapping[str, object], device: Device, out: object = None) -> tuple[object, Artifact]:
        runtime = own_memory(device)
        several = out if isinstance(out, tuple | list) else [out]
        on_host = not any(is_on_device(v) for v in (*values.values(), *several))
        place = StreamPlace.of(runtime, (*values.values(), *several))
        place.enter()
        moved = {name: place.wrapped(value) for name, value in values.items()}
        plan = self._plan(moved, device, runtime)
        artifact = plan.program.artifact
        arrays: dict[str, DeviceArray] = {}
        hosts: dict[str, np.ndarray] = {}
        scalars: dict[str, Number] = {}
        for a in plan.arguments or self.kernel.arguments(moved, device.target.is_gpu):
            if isinstance(a.value, np.ndarray):
                hosts[a.name] = a.value
                arrays[a.name] = runtime.from_numpy(contiguous(a.name, a.value, self.function.span), stream=place.stream)
            elif isinstance(a.value, DeviceArray):
                arrays[a.name] = a.value
            elif a.value is not None:
                scalars[a.name] = a.value
        read = self._apart(artifact, arrays, hosts, runtime, place)
        given = given_outputs(artifact, out, self.function.span)
        results: dict[str, object] = {}
        outputs: dict[str, DeviceArray] = {}
        copies: list[tuple[DeviceArray, DeviceArray]] = []
        for param, shape in zip(artifact.outputs, plan.shapes, strict=True):
            target = given.get(param.name)
            if target is None or isinstance(target, np.ndarray):
                if target is not None:
                    check_output(param, target, shape, self.function.span)
                    check_given(artifact, hosts, {param.name: target}, share_memory, self.function.span)
                results[param.name], outputs[param.name] = place.new(shape, param.dtype)
                continue
            wrapped = runtime.wrap(target, place.stream)
            self._check_given(wrapped, param, shape)
            check_given(artifact, arrays, {param.name: wrapped}, DeviceArray.overlaps, self.function.span)
            others = [*([] if artifact.alias_safe else arrays.values()), *outputs.values()]
            outputs[param.name] = wrapped
            if any(wrapped.overlaps(other) for other in others) or not wrapped.is_aligned(max(1, param.align)):
                outputs[param.name] = runtime.empty(shape, param.dtype, place.stream)
                copies.append((wrapped, outputs[param.name]))
        numbers = converted(artifact, scalars)
        plan.program.run({**read, **outputs}, numbers, plan.sizes, place.stream, take=place.workspace())
        for wrapped, temporary in copies:
            runtime.copy(wrapped, temporary, place.stream)
        place.leave()
        for name in [p.name for p in artifact.in_place if p.name in hosts]:
            hosts[name][...] = arrays[name].numpy()
        if on_host:
            return self._to_host(artifact, outputs, given, out), artifact
        hosted = {name: target for name, target in given.items() if isinstance(target, np.ndarray)}
        for name, target in hosted.items():
            target[...] = outputs[name].numpy()
        if not copies and not hosted and not hosts and read == arrays and not streams.FAST_PATH_OFF.value and not any_complex(moved.values()):
            self.learn(MadeCall(values, out, given, plan, place, arrays, outputs))
        return result_of(artifact, results, out), artifact

    def _apart(
        self, artifact: Artifact, arrays: Mapping[str, DeviceArray], hosts: Mapping[str, np.ndarray], runtime: ArrayDevice, place: StreamPlace
    ) -> Mapping[str, DeviceArray]:  # fmt: skip
        """The arrays to run on: what shares memory with an array that is written in place is read from a copy."""
        if not artifact.in_place:
            return arrays
        for param in artifact.in_place:
            check_in_place(param.name, hosts.get(param.name), hosts.get(param.name, arrays[param.name]), self.function.span)
            if param.name in hosts:
                streams.refuse_in_capture(f"'{param.name}', an array of the host that is written in place", help="pass an array of the device")
        apart(artifact, hosts, share_memory, lambda array: array, self.function.span)  # others were copied to the device before

        def copy(array: DeviceArray) -> DeviceArray:
            if not array.is_contiguous:
                name = next(n for n, a in arrays.items() if a is array)
                raise UserError.at(
                    "TW018", f"'{name}' and '{artifact.in_place[0].name}' share memory, and {artifact.name} writes to the second in place", self.function.span,
                    f"pass a copy of '{name}'",
                )  # fmt: skip
            fresh = runtime.empty(array.shape, array.dtype, place.stream)
            runtime.copy(fresh, array, place.stream)
            return fresh

        return apart(artifact, arrays, DeviceArray.overlaps, copy, self.function.span)

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

    def _plan(self, values: Mapping[str, object], device: Device, runtime: ArrayDevice) -> CallPlan:
        """What to run for arguments of these forms. Calls like an earlier one find it without being looked at in detail."""
        forms = (runtime.ordinal, *map(form_of, values.values()))
        key = forms + tuple(values[name] for name in self._shaping.get(forms, ()))
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        gpu = device.target.is_gpu
        arguments = self.kernel.arguments(values, gpu)
        artifact = announced(self.compile(self.kernel.signature(arguments, gpu), device))
        program = self._programs.get((runtime.ordinal, artifact.key))
        if program is None:
            program = runtime.load(artifact)
            keep(self._programs, (runtime.ordinal, artifact.key), program)
        inputs = {a.name: a.value for a in arguments if isinstance(a.value, np.ndarray | DeviceArray)}
        shapes = {name: array.shape for name, array in inputs.items()}
        strides = {name: element_strides(array) for name, array in inputs.items()}
        sizes = bind_sizes(program.artifact, shapes, strides, self.function.span, numbers(arguments))
        results = tuple(tuple(s.evaluate(sizes) for s in p.shape) for p in program.artifact.outputs)
        shaping = tuple(name for name in values if name in program.artifact.shaping)
        keep(self._shaping, forms, shaping)
        keep(self._plans, forms + tuple(values[name] for name in shaping), CallPlan(program, sizes, results))
        return CallPlan(program, sizes, results, tuple(arguments))
