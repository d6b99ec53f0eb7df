"""The CPU as a kind of device: `cpu`, and `cpu:0/2` for a part of its cores.

In: kernels and their arguments; out: calls by the entry stub of the kernel's program (`CpuProgram.call`), or the general path where that
refuses.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tilewright.base.artifact import Artifact
from tilewright.base.errors import DeviceError, UserError
from tilewright.base.target import Target, host_cpu
from tilewright.compile.driver import Signature, compile_kernel
from tilewright.execute.calls.arguments import Number, ReadArgument, numbers
from tilewright.execute.calls.checks import bind_sizes
from tilewright.execute.calls.host_calls import output_arrays, recorded_result, strides_of
from tilewright.execute.calls.in_place import host_apart
from tilewright.execute.calls.kernel_calls import Entry, KernelCalls, KernelSource
from tilewright.execute.calls.outputs import converted, keep, result_of
from tilewright.execute.device import Device
from tilewright.execute.kinds import DeviceKind
from tilewright.execute.speed_warnings import announced
from tilewright.runtime.core import host_info, streams
from tilewright.runtime.cpu import pool as cpu_pool
from tilewright.runtime.cpu import program as cpu
from tilewright.runtime.cpu.device import CpuDevice
from tilewright.runtime.memory.device_array import DeviceArray

if TYPE_CHECKING:
    from tilewright.execute.places import DevicePlace
    from tilewright.execute.simt.launches import ExplicitSource, KernelLaunches
    from tilewright.runtime.cpu.graphs import HostGraph

# -- devices --------------------------------------------------------------------------------------------------------


class CpuKind(DeviceKind):
    """The CPU of this machine and parts of it."""

    kind = title = "cpu"
    launch_seconds = 3e-6

    def devices(self) -> list[Device]:
        return [_whole()]

    def find(self, name: str) -> Device | None:
        if name == "cpu":
            return _whole()
        part = re.fullmatch(r"cpu:(\d+)/(\d+)", name)
        if part is None:
            return None
        index, count = int(part[1]), int(part[2])
        if index >= count:
            raise UserError.at("TW030", f"unknown device '{name}'", help=f"the parts of cpu:…/{count} are numbered from 0 to {count - 1}")
        return _partition(index, count)

    def runtime(self, device: Device) -> CpuDevice:
        return _runtime(device)

    def calls(self, kernel: KernelSource) -> CpuCalls:
        return CpuCalls(kernel)

    def launches(self, kernel: ExplicitSource) -> KernelLaunches:
        from tilewright.device_kinds.cpu.launches import CpuLaunches

        return CpuLaunches(kernel)

    def place(self, device: Device, values: Sequence[object]) -> DevicePlace:
        from tilewright.device_kinds.cpu.place import CpuPlace

        return CpuPlace(device, values)


@functools.cache
def _runtime(device: Device) -> CpuDevice:
    return CpuDevice(device.id, device.target, device.partition)


@functools.cache
def _whole() -> Device:
    return Device("cpu", "cpu", _cpu_name(host_cpu()), host_cpu(), host_info.total_memory())


def _cpu_name(target: Target) -> str:
    cores = target.multiprocessors
    return f"{platform.machine()}, {cores} core{'s' if cores != 1 else ''}, {target.name}"


@functools.cache
def _partition(index: int, count: int) -> Device:
    cores = cpu_pool.usable_cores()
    if count > len(cores):
        raise DeviceError.at(
            "TW030", f"the CPU cannot be divided by {count}: this process may use {len(cores)} core(s)", help="use fewer partitions"
        )
    target = replace(host_cpu(), multiprocessors=len(cpu_pool.partition_cores(index, count)))
    return Device(f"cpu:{index}/{count}", "cpu", _cpu_name(target), target, _whole().memory, partition=(index, count))


# -- kernels --------------------------------------------------------------------------------------------------------


class CpuCalls(KernelCalls):
    """A kernel on the CPU and on parts of it."""

    def __init__(self, kernel: KernelSource) -> None:
        super().__init__(kernel)
        self._programs: dict[Signature, cpu.CpuProgram] = {}
        self._partitions: dict[tuple[Signature, int], cpu.CpuProgram] = {}
        self._latest: cpu.CpuProgram | None = None

    def entry(self, device: Device, fallback: Entry) -> Entry | None:
        """The entry stub of the latest program."""
        return self._latest.entry(fallback) if self._latest is not None and device.partition is None else None

    def entry_for(self, values: Mapping[str, object], device: Device, fallback: Entry) -> Entry | None:
        if device.partition is not None or any(isinstance(v, DeviceArray) for v in values.values()):
            return None
        return self._program(self.kernel.arguments(values, gpu=False)).entry(fallback)

    def run(self, values: Mapping[str, object], device: Device, out: object = None) -> tuple[object, Artifact]:
        if device.partition is not None:
            streams.refuse_in_capture(f"a call on {device.id}", help="graphs of the CPU use all its cores: capture with device='cpu'")
        in_place = {p.name for p in self.function.params if p.in_place}
        values = {name: (v.host() if name in in_place else v.on_host()) if isinstance(v, DeviceArray) else v for name, v in values.items()}
        if isinstance(out, DeviceArray):
            _, artifact = self.run(values, device, out.host())
            return out, artifact
        arguments = self.kernel.arguments(values, gpu=False)
        if device.partition is not None:
            program = self._partition_program(arguments, device.target)
            return self._general(program, arguments, out, cpu_pool.partition(*device.partition)), program.artifact
        program = self._program(arguments)
        recorder = streams.host_recorder() if streams.FAST_PATH_OFF.value else None
        if recorder is not None:
            return self._record(recorder, program, values, arguments, out), program.artifact
        keywords = {} if out is None else {"out": out}
        result = program.call(*(a.value for a in arguments), **keywords)
        if result is NotImplemented:
            result = self._general(program, arguments, out)
        return result, program.artifact

    def _program(self, arguments: list[ReadArgument]) -> cpu.CpuProgram:
        wanted = self.kernel.signature(arguments, gpu=False)
        program = self._programs.get(wanted)
        if program is None:
            program = cpu.load(announced(compile_kernel(self.function, wanted, host_cpu())))
            keep(self._programs, wanted, program)
        self._latest = program
        return program

    def _partition_program(self, arguments: list[ReadArgument], target: Target) -> cpu.CpuProgram:
        """Code planned for so many cores."""
        key = self.kernel.signature(arguments, gpu=False), target.multiprocessors
        program = self._partitions.get(key)
        if program is None:
            program = cpu.load(announced(compile_kernel(self.function, key[0], target)))
            keep(self._partitions, key, program)
        return program

    def _general(
        self, program: cpu.CpuProgram, arguments: list[ReadArgument], out: object, pool: cpu_pool.ThreadPool | None = None
    ) -> object:
        artifact = program.artifact
        arrays = {a.name: a.value for a in arguments if isinstance(a.value, np.ndarray)}
        outputs, copies = self._outputs(artifact, arrays, out, numbers(arguments))
        arrays = host_apart(artifact, arrays, self.function.span)
        program.run({**arrays, **outputs}, converted(artifact, numbers(arguments)), pool)
        for given, temporary in copies:
            given[...] = temporary
        return result_of(artifact, outputs, out)

    def _record(
        self, recorder: HostGraph, program: cpu.CpuProgram, values: Mapping[str, object], arguments: list[ReadArgument], out: object
    ) -> object:
        """Instead of running: what a replay is to run."""
        artifact = program.artifact
        recorder.check_arguments({a.name: a.value for a in arguments}, values)
        arrays = {a.name: a.value for a in arguments if isinstance(a.value, np.ndarray)}
        outputs, copies = self._outputs(artifact, arrays, out, numbers(arguments))
        apart = host_apart(artifact, arrays, self.function.span)
        for name, array in apart.items():
            if array is not arrays[name]:
                recorder.add_copy(array, arrays[name])
        written = frozenset((*outputs, *(p.name for p in artifact.in_place)))
        recorder.add_program(program, {**apart, **outputs}, converted(artifact, numbers(arguments)), written)
        for given, temporary in copies:
            recorder.add_copy(given, temporary)
        return recorded_result(artifact, outputs, out)

    def _outputs(
        self, artifact: Artifact, arrays: Mapping[str, np.ndarray], out: object, given: Mapping[str, Number]
    ) -> tuple[dict[str, np.ndarray], list[tuple[np.ndarray, np.ndarray]]]:
        span = self.function.span
        sizes = bind_sizes(artifact, {n: a.shape for n, a in arrays.items()}, strides_of(arrays), span, given)
        return output_arrays(artifact, sizes, out, arrays, span)
