"""Running a compiled kernel on one device: the general path, with every case handled.

In: the kernel's tree, the arguments of one call and a device. Out: NumPy arrays or device arrays, as the inputs were. The fast
path for CPU calls is the artifact's entry stub (`CpuProgram.call`); what it refuses comes here and either works (strided,
overlapping, converted) or raises the exact error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tilewright.api.arguments import Argument, Number, element_strides, numbers, read_argument, signature
from tilewright.api.checks import bind_sizes, check_output
from tilewright.api.cuda_calls import CudaCalls, device_of
from tilewright.api.devices import Device
from tilewright.api.outputs import MOST_SPECIALISATIONS, converted, given_outputs, keep, result_of
from tilewright.api.watchdog import watchdog_nanoseconds
from tilewright.base.artifact import ArrayParam, Artifact
from tilewright.base.errors import DeviceError
from tilewright.base.target import host_cpu
from tilewright.compile.driver import Signature, compile_kernel, compile_stages
from tilewright.runtime import cpu, cpu_pool, observe, streams
from tilewright.runtime.device_array import DeviceArray
from tilewright.tree.syntax import Function

if TYPE_CHECKING:
    from tilewright.runtime.host_graphs import HostGraph

__all__ = ["MOST_SPECIALISATIONS", "Runner", "device_of"]


class Runner:
    """A kernel on its way through the devices: keeps what was compiled and loaded for it."""

    def __init__(
        self, function: Function, precision: str = "ieee", schedule: str = "", watchdog: float | None = None, launches: int = 0
    ) -> None:
        self.function, self.launches = function, launches
        self.precision, self.schedule = precision, schedule
        self.watchdog = watchdog_nanoseconds(watchdog)
        self._cpu: dict[Signature, cpu.CpuProgram] = {}
        self.spreads: dict[tuple[str, ...], object] = {}
        """What makes calls on several devices, by the names of their arguments."""
        self._partitions: dict[tuple[Signature, int], cpu.CpuProgram] = {}
        self.cuda = CudaCalls(function, self.signature)
        self._latest: cpu.CpuProgram | None = None
        self._last: Artifact | None = None

    @property
    def last(self) -> Artifact | None:
        """The artifact of the latest call, for `inspect`-like questions."""
        return self.cuda.native.last or self._last

    @last.setter
    def last(self, artifact: Artifact | None) -> None:
        self.cuda.native.forget_last()
        self._last = artifact

    def arguments(self, values: Mapping[str, object], gpu: bool) -> list[Argument]:
        return [read_argument(name, value, self.function.span, gpu) for name, value in values.items()]

    def signature(self, arguments: list[Argument], gpu: bool) -> Signature:
        """What to compile for a call with these arguments."""
        found = signature(arguments, gpu)
        watchdog = self.watchdog if gpu else 0
        launches = self.launches if gpu else 0
        if self.precision == "ieee" and not self.schedule and not watchdog and not launches:
            return found
        return replace(found, precision=self.precision, schedule=self.schedule, watchdog=watchdog, launches=launches)

    def run(self, values: Mapping[str, object], device: Device, out: object = None) -> object:
        watcher = observe.observer
        if watcher is None:
            return self._run(values, device, out)
        with watcher.call(self.function, device.id) as record:
            result = self._run(values, device, out)
        if self.last is not None:
            watcher.count(record, self.function, self.last, values)
        return result

    def _run(self, values: Mapping[str, object], device: Device, out: object) -> object:
        if streams.SPECIAL.value:
            streams.check_captured(device.id)
        if device.partition is not None:
            return self._run_partition(values, device, out)
        if device.kind == "cpu":
            return self.run_cpu(values, out)
        if device.kind == "cuda":
            return self.run_cuda(values, device, out)
        return self.run_emulator(values, device, out)

    # -- CPU ----------------------------------------------------------------------------------------------------

    def cpu_program(self, arguments: list[Argument]) -> cpu.CpuProgram:
        wanted = self.signature(arguments, gpu=False)
        program = self._cpu.get(wanted)
        if program is None:
            program = cpu.load(compile_kernel(self.function, wanted, host_cpu()))
            keep(self._cpu, wanted, program)
        self.last = program.artifact
        self._latest = program
        return program

    def cpu_entry(self, fallback: Callable[..., object]) -> Callable[..., object] | None:
        """The entry stub of the latest CPU program, which hands what it refuses to `fallback`."""
        return self._latest.entry(fallback) if self._latest is not None else None

    def run_cpu(self, values: Mapping[str, object], out: object = None) -> object:
        values = {name: v.on_host() if isinstance(v, DeviceArray) else v for name, v in values.items()}
        if isinstance(out, DeviceArray):
            self.run_cpu(values, out.host())
            return out
        arguments = self.arguments(values, gpu=False)
        program = self.cpu_program(arguments)
        recorder = streams.host_recorder() if streams.SPECIAL.value else None
        if recorder is not None:
            return self._record_cpu(recorder, program, values, arguments, out)
        keywords = {} if out is None else {"out": out}
        result = program.call(*(a.value for a in arguments), **keywords)
        if result is not NotImplemented:
            return result
        return self._general_cpu(program, arguments, out)

    def _run_partition(self, values: Mapping[str, object], device: Device, out: object) -> object:
        """On some of the cores, with code planned for as many."""
        assert device.partition is not None
        streams.refuse_in_capture(f"a call on {device.id}", help="graphs of the CPU use all its cores: capture with device='cpu'")
        values = {name: v.on_host() if isinstance(v, DeviceArray) else v for name, v in values.items()}
        if isinstance(out, DeviceArray):
            self._run_partition(values, device, out.host())
            return out
        arguments = self.arguments(values, gpu=False)
        key = self.signature(arguments, gpu=False), device.target.multiprocessors
        program = self._partitions.get(key)
        if program is None:
            program = cpu.load(compile_kernel(self.function, key[0], device.target))
            keep(self._partitions, key, program)
        self.last = program.artifact
        return self._general_cpu(program, arguments, out, cpu_pool.partition(*device.partition))

    def _general_cpu(
        self, program: cpu.CpuProgram, arguments: list[Argument], out: object, pool: cpu_pool.Pool | None = None
    ) -> object:
        artifact = program.artifact
        arrays = {a.name: a.value for a in arguments if isinstance(a.value, np.ndarray)}
        sizes = bind_sizes(artifact, {n: a.shape for n, a in arrays.items()}, _strides(arrays), self.function.span)
        outputs, copies = self._outputs(artifact, sizes, out, arrays)
        program.run({**arrays, **outputs}, converted(artifact, numbers(arguments)), pool)
        for given, temporary in copies:
            given[...] = temporary
        return result_of(artifact, outputs, out)

    def _record_cpu(
        self, recorder: HostGraph, program: cpu.CpuProgram, values: Mapping[str, object], arguments: list[Argument], out: object
    ) -> object:
        """Instead of running: what a replay is to run."""
        artifact = program.artifact
        recorder.check_arguments({a.name: a.value for a in arguments}, values)
        arrays = {a.name: a.value for a in arguments if isinstance(a.value, np.ndarray)}
        sizes = bind_sizes(artifact, {n: a.shape for n, a in arrays.items()}, _strides(arrays), self.function.span)
        outputs, copies = self._outputs(artifact, sizes, out, arrays)
        recorder.add_program(program, {**arrays, **outputs}, converted(artifact, numbers(arguments)), frozenset(outputs))
        for given, temporary in copies:
            recorder.add_copy(given, temporary)
        return _recorded_result(artifact, outputs, out)

    def _outputs(
        self, artifact: Artifact, sizes: Mapping[str, int], out: object, arrays: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], list[tuple[np.ndarray, np.ndarray]]]:
        """Arrays to write to, and (given, temporary) pairs to copy back where the given one cannot be written directly."""
        given = given_outputs(artifact, out, self.function.span)
        outputs: dict[str, np.ndarray] = {}
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        for param in artifact.outputs:
            shape = tuple(s.evaluate(sizes) for s in param.shape)
            if param.name not in given:
                outputs[param.name] = _allocate(shape, param)
                continue
            target = check_output(param, given[param.name], shape, self.function.span)
            others = [*arrays.values(), *(t for n, t in given.items() if n != param.name and isinstance(t, np.ndarray))]
            if target.flags.c_contiguous and not any(np.may_share_memory(target, o) for o in others):
                outputs[param.name] = target
            else:
                outputs[param.name] = _allocate(shape, param)
                copies.append((target, outputs[param.name]))
        return outputs, copies

    # -- CUDA ---------------------------------------------------------------------------------------------------

    def run_cuda(self, values: Mapping[str, object], device: Device, out: object = None) -> object:
        result, self.last = self.cuda.run(values, device, out)
        return result

    def cuda_entry(self, fallback: Callable[..., object]) -> Callable[..., object] | None:
        """Machine code for the calls made so far, which hands others to `fallback`."""
        return self.cuda.native.chain(fallback)

    def quick_cuda(self, args: tuple[object, ...], out: object) -> object:
        """The short way for calls like those made before; `NotImplemented` when this one is not."""
        call = self.cuda.native.chain(_refuse)
        if call is None:
            return NotImplemented
        return call(*args) if out is None else call(*args, out=out)

    # -- emulator -----------------------------------------------------------------------------------------------

    def run_emulator(self, values: Mapping[str, object], device: Device, out: object = None) -> object:
        from tilewright.compile.build import describe_program
        from tilewright.ir.emulator import run_program

        values = {name: v.numpy() if isinstance(v, DeviceArray) else v for name, v in values.items()}
        arguments = self.arguments(values, gpu=True)
        wanted = self.signature(arguments, gpu=True)
        done = compile_stages(self.function, wanted, device.target)
        program = {"loop": done.stages.loop, "tile": done.stages.tile, "thread": done.stages.thread}[device.stage]
        inputs: dict[str, np.ndarray | Number] = {}
        for a in arguments:
            assert not isinstance(a.value, DeviceArray)
            inputs[a.name] = np.ascontiguousarray(a.value) if isinstance(a.value, np.ndarray) else a.value
        # The call-time checks of real devices: same errors, same texts.
        artifact = self.last = describe_program(program, device.target)
        arrays = {n: v for n, v in inputs.items() if isinstance(v, np.ndarray)}
        sizes = bind_sizes(artifact, {n: a.shape for n, a in arrays.items()}, _strides(arrays), self.function.span)
        given = given_outputs(artifact, out, self.function.span)
        for param in artifact.outputs:
            if param.name in given:
                shape = tuple(s.evaluate(sizes) for s in param.shape)
                check_output(param, given[param.name], shape, self.function.span)
        recorder = streams.host_recorder() if streams.SPECIAL.value else None
        if recorder is not None:
            recorder.check_arguments({a.name: a.value for a in arguments}, values)
            shapes = {p.name: tuple(s.evaluate(sizes) for s in p.shape) for p in artifact.outputs}
            made = {p.name: given.get(p.name, np.empty(shapes[p.name], p.dtype.numpy)) for p in artifact.outputs}
            recorder.add_emulated(program, inputs, converted(artifact, numbers(arguments)), made, run_program)
            return _recorded_result(artifact, made, out)
        outputs = run_program(program, {**inputs, **converted(artifact, numbers(arguments))})
        for name, target in given.items():
            assert isinstance(target, np.ndarray)
            target[...] = outputs[name]
        return result_of(artifact, outputs, out)


def _refuse(*args: object, **keywords: object) -> object:
    return NotImplemented


def _recorded_result(artifact: Artifact, outputs: Mapping[str, object], out: object) -> object:
    """As `result_of`, for arrays a replay will write: those of rank 0 stay arrays."""
    values = tuple(outputs[p.name] for p in artifact.outputs)
    return out if out is not None else values[0] if len(values) == 1 else values


def _strides(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: element_strides(array) for name, array in arrays.items()}


def _allocate(shape: tuple[int, ...], param: ArrayParam) -> np.ndarray:
    try:
        return np.empty(shape, param.dtype.numpy)
    except (MemoryError, ValueError) as error:
        raise DeviceError.at("TW031", f"no memory for the result '{param.name}' of shape {list(shape)}: {error}") from error
