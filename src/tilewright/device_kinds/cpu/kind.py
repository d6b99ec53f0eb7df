"""The CPU as a kind of device: `cpu`, and `cpu:0/2` for a part of its cores.

In: kernels and their arguments; out: calls by the entry stub of the kernel's program (`CpuProgram.call`), or the general path where that
refuses.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tilewright.base.artifact import SMALL_EXTENT, SMALL_MANY, Artifact, SmallSums
from tilewright.base.errors import DeviceError, UserError
from tilewright.base.target import Target, host_cpu
from tilewright.compile import tiers
from tilewright.compile.driver import AxisNumbers, Signature, compile_kernel, for_any_extents
from tilewright.device_kinds.cpu.tiered import TieredPrograms
from tilewright.execute.calls.arguments import Number, ReadArgument, numbers
from tilewright.execute.calls.checks import bind_sizes
from tilewright.execute.calls.host_calls import output_arrays, recorded_result, result_strides, strides_of
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


_BEFORE_IT_RUNS = frozenset({"TW004", "TW013"})
"""What is said of sizes that do not fit, before anything is written."""


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


MOST_SIZED = 8
"""Kinds of code for small extents that a kernel may have at a time, for arguments of the same kind; and for small numbers."""
LARGEST_NUMBER = 64
"""The largest whole number of a call that is part of the code: steps, paddings and radii of windows."""


def _small_extents(arguments: list[ReadArgument], nests: Sequence[SmallSums] | None) -> AxisNumbers:
    """The extents that are small, if there is work enough to make code for them; with `nests`, those that count for these."""
    if nests is not None and not nests:
        return ()
    arrays = [(a.name, a.value) for a in arguments if isinstance(a.value, np.ndarray)]
    if sum(array.size for _, array in arrays) < SMALL_MANY:
        return ()
    found = tuple((name, axis, extent) for name, array in arrays for axis, extent in enumerate(array.shape) if 1 <= extent <= SMALL_EXTENT)
    return found if nests is None else _that_count(found, nests)


def _that_count(small: AxisNumbers, nests: Sequence[SmallSums]) -> AxisNumbers:
    """Those of the small extents that are part of the code."""
    extents = {(name, axis): extent for name, axis, extent in small}
    counting = {axis for nest in nests if all(extents.get(axis, nest.most + 1) <= nest.most for axis in nest.sums) for axis in (*nest.sums, *nest.around)}
    return tuple(one for one in small if one[:2] in counting)


class CpuCalls(KernelCalls):
    """A kernel on the CPU and on parts of it."""

    def __init__(self, kernel: KernelSource) -> None:
        super().__init__(kernel)
        self._programs: dict[tuple[Signature, AxisNumbers], cpu.CpuProgram] = {}
        """By what code is made for, and the small extents that are part of it."""
        self._small: dict[Signature, tuple[SmallSums, ...]] = {}
        """Which extents may be part of the code, as far as is known."""
        self._windows: Mapping[str, bool] | None = None
        """Parameters that say how windows lie, and whether something is divided by them; None until it is known."""
        self._numbers: set[tuple[tuple[str, int], ...]] = set()
        """What these were in calls so far."""
        self._partitions: dict[tuple[Signature, int], cpu.CpuProgram] = {}
        self._latest: cpu.CpuProgram | None = None
        self._tiered: TieredPrograms | None = None
        """Programs that are compiled in tiers, where any are."""

    def entry(self, device: Device, fallback: Entry) -> Entry | None:
        """The entry stub of the latest program."""
        return self._latest.entry(fallback) if self._latest is not None and device.partition is None else None

    @property
    def direct(self) -> Entry | None:
        # Quick code of tiers has no stub.
        return self._latest.call if self._latest is not None and self._latest.artifact.host else None

    @property
    def loaded(self) -> Artifact | None:
        return self._latest.artifact if self._latest is not None else None

    def entry_for(self, values: Mapping[str, object], device: Device, fallback: Entry) -> Entry | None:
        if device.partition is not None or any(isinstance(v, DeviceArray) for v in values.values()):
            return None
        return self._program(self.kernel.arguments(values, gpu=False), final=True).entry(fallback)

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
        recorder = streams.host_recorder() if streams.FAST_PATH_OFF.value else None
        program = self._program(arguments, out, final=recorder is not None)
        if recorder is not None:
            return self._record(recorder, program, values, arguments, out), program.artifact
        keywords = {} if out is None else {"out": out}
        result = program.call(*(a.value for a in arguments), **keywords)
        if result is NotImplemented and program.artifact.is_sized and program.artifact.host:
            # What is wrong with a call is said in names, which code for certain sizes does not have.
            program = self._latest = self._loaded(self._wanted(arguments, out), ())
        if result is NotImplemented:
            result, program = self._checked(program, arguments, out)
        if self._tiered is not None:
            self._tiered.after_call()
            # Another thread may have exchanged the code while this call ran; calls that go straight to machine code say nothing of it.
            program = next((one for one in tuple(self._programs.values()) if one.artifact.key == program.artifact.key), program)
        return result, program.artifact

    def _checked(self, program: cpu.CpuProgram, arguments: list[ReadArgument], out: object) -> tuple[object, cpu.CpuProgram]:
        """The result, and the program that computed it. What code with literals for numbers refuses before it runs is left to code for any: that says what is wrong in the
        kernel's own words, and takes calls that only look wrong where a literal made two sizes one."""
        try:
            return self._general(program, arguments, out), program
        except UserError as error:
            wanted = self._wanted(arguments, out)
            if not wanted.numbers or error.code not in _BEFORE_IT_RUNS or program.artifact.in_place:
                raise
            general = self._loaded(replace(wanted, numbers=()), ())
            try:
                result = self._general(general, arguments, out)
            except UserError as own:
                if own.code in _BEFORE_IT_RUNS:
                    raise own from None
                raise error from None  # said before anything ran, it is what helps
        self._latest = general
        return result, general

    @property
    def wanted(self) -> tuple[Signature, ...]:
        return tuple(replace(signature, extents=small) for signature, small in tuple(self._programs))

    def _wanted(self, arguments: list[ReadArgument], out: object) -> Signature:
        wanted = self._with_numbers(self.kernel.signature(arguments, gpu=False), arguments)
        results = result_strides(self.function, out) if out is not None else ()
        return replace(wanted, results=results) if results else wanted

    def _with_numbers(self, wanted: Signature, arguments: list[ReadArgument]) -> Signature:
        """With the small whole numbers that say how windows lie, while a kernel has not too many kinds of them. Numbers that a graph may be given others of have a type of their own."""
        given = [(a.name, a.value) for a in arguments if type(a.value) is int and abs(a.value) <= LARGEST_NUMBER]
        if not given or len(self._numbers) > MOST_SIZED:
            return wanted
        if self._windows is None:
            from tilewright.frontend.window_numbers import window_numbers

            self._windows = window_numbers(self.function)
        found = tuple((name, value) for name, value in given if name in self._windows and (value > 0 or not self._windows[name]))
        if found:
            self._numbers.add(found)
        return replace(wanted, numbers=found) if found and len(self._numbers) <= MOST_SIZED else wanted

    def _program(self, arguments: list[ReadArgument], out: object = None, final: bool = False) -> cpu.CpuProgram:
        """The program for a call. `final`: who asks keeps it, so that quick code will not do."""
        wanted = self._wanted(arguments, out)
        small = _small_extents(arguments, self._small.get(wanted))
        program = self._programs.get((wanted, small))
        if program is None:
            program = self._first(wanted, small, final)
        elif self._tiered is not None:
            better = self._tiered.exchanged((wanted, small), program, final)
            if better is not program:
                program = self._programs[wanted, small] = better
        self._latest = program
        return program

    def _first(self, wanted: Signature, small: AxisNumbers, final: bool) -> cpu.CpuProgram:
        """Code for a call of a new kind."""

        def load(signature: Signature) -> cpu.CpuProgram:
            if signature is wanted:
                return self._loaded(wanted, small, final)
            program = self._loaded(signature, (), final)
            keep(self._programs, (wanted, small), program)
            return program

        return self._or_for_any(wanted, load)

    @staticmethod
    def _or_for_any(wanted: Signature, load: Callable[[Signature], cpu.CpuProgram]) -> cpu.CpuProgram:
        """A program; what is refused with its numbers as literals is compiled for any: whether the call is wrong is then said in the kernel's own words."""
        try:
            return load(wanted)
        except UserError:
            if not wanted.numbers:
                raise
        return load(replace(wanted, numbers=()))

    def _loaded(self, wanted: Signature, small: AxisNumbers, final: bool = True) -> cpu.CpuProgram:
        """Code for these extents, while a kernel has not too many kinds of it; else for any."""
        if small and sum(1 for key in self._programs if key[0] == wanted and key[1]) >= MOST_SIZED:
            # From now on code for any extents takes what comes.
            program = self._programs.get((wanted, ()))
            if program is None or program.artifact.small:
                program = cpu.load(for_any_extents(announced(compile_kernel(self.function, wanted, host_cpu()))))
                keep(self._programs, (wanted, ()), program)
            return program
        program = self._programs.get((wanted, small))
        if program is not None:
            return program
        sized, tier = replace(wanted, extents=small), None
        if final or not tiers.hold(self.function):
            program = cpu.load(announced(compile_kernel(self.function, sized, host_cpu())))
        else:
            self._tiered = self._tiered or TieredPrograms(self.function.name)
            program, tier = self._tiered.first(lambda: tiers.begin(self.function, sized, host_cpu()))
        keep(self._small, wanted, program.artifact.small)
        key = wanted, _that_count(small, program.artifact.small)
        if tier is None or self._tiered is None:
            keep(self._programs, key, program)
            return program
        with self._tiered.lock:
            if key in self._programs:
                return self._programs[key]  # another thread's, which may be the optimised one by now
            keep(self._programs, key, program)
            self._tiered.add(key, tier)
        return program

    def _partition_program(self, arguments: list[ReadArgument], target: Target) -> cpu.CpuProgram:
        """Code planned for so many cores."""
        key = self._with_numbers(self.kernel.signature(arguments, gpu=False), arguments), target.multiprocessors
        program = self._partitions.get(key)
        if program is None:
            program = self._or_for_any(key[0], lambda wanted: cpu.load(announced(compile_kernel(self.function, wanted, target))))
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
