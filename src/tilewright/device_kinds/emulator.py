"""The emulator as a kind of device: `emulator`, and `emulator:loop|tile|thread` for the stage of the IR it runs.

In: kernels and their arguments; out: results that are exact by definition, with the checks and errors of real devices. It runs what a
GPU would run, in host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tilewright.base.artifact import Artifact
from tilewright.base.errors import DeviceError
from tilewright.base.limits import Limits
from tilewright.base.target import DEFAULT_NVPTX, NVPTX, Target
from tilewright.compile.driver import compile_stages
from tilewright.compile.primitives import finished_program
from tilewright.compile.simt import prepare_simt
from tilewright.execute.calls.arguments import numbers
from tilewright.execute.calls.checks import bind_sizes, check_output
from tilewright.execute.calls.host_calls import recorded_result, strides_of
from tilewright.execute.calls.in_place import check_given, host_apart, refuse_in_place, share_memory
from tilewright.execute.calls.kernel_calls import KernelCalls, KernelSource
from tilewright.execute.calls.outputs import converted, given_outputs, keep, result_of
from tilewright.execute.device import Device
from tilewright.execute.kinds import DeviceKind
from tilewright.execute.places import Array, Build, DevicePlace, HostPlace, Number
from tilewright.execute.simt.config import LaunchConfig
from tilewright.execute.simt.host import copy_back, host_leaves
from tilewright.execute.simt.launches import ExplicitSource, KernelLaunches, Key, Repeats
from tilewright.execute.speed_warnings import announce, contiguous
from tilewright.frontend.simt.kernels import BuiltKernel
from tilewright.ir.emulator.memory.memory import new_array
from tilewright.ir.emulator.unwritten import check_all_written
from tilewright.ir.emulator.warps.stepping import is_stepping
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import Program
from tilewright.runtime.core import streams
from tilewright.runtime.core.device import DeviceRuntime, LoadedProgram
from tilewright.runtime.memory.device_array import DeviceArray

STAGES = ("loop", "tile", "thread")


class EmulatorKind(DeviceKind):
    """The emulator of each stage."""

    kind = title = "emulator"
    simulated = True
    launch_seconds = 1e-3

    def devices(self) -> list[Device]:
        return [self.device("thread")]

    def find(self, name: str) -> Device | None:
        stage = name.partition(":")[2] if ":" in name else "thread"
        return self.device(stage) if stage in STAGES else None

    def device(self, stage: str, target: Target | None = None) -> Device:
        """The emulator of a stage, for a GPU's target."""
        chosen = target or NVPTX[DEFAULT_NVPTX]
        return Device(f"emulator:{stage}", "emulator", f"executes the {stage} stage for {chosen.name}", chosen, stage=stage)

    def runtime(self, device: Device) -> DeviceRuntime:
        return _runtime(device)

    def calls(self, kernel: KernelSource) -> KernelCalls:
        return EmulatorCalls(kernel)

    def launches(self, kernel: ExplicitSource) -> KernelLaunches:
        return EmulatorLaunches(kernel)

    def place(self, device: Device, values: Sequence[object]) -> DevicePlace:
        return EmulatorPlace(device, values)


class EmulatorDevice(DeviceRuntime):
    """The emulator of a stage."""

    def __init__(self, device: Device) -> None:
        self.id = self.label = device.id
        self._target = device.target

    def free_memory(self) -> tuple[int, int]:
        return 0, 0

    def limits(self) -> Limits:
        target = self._target
        return Limits(
            threads_per_block=target.max_threads, block=(target.max_threads, 1, 1), grid=target.max_grid, warp_size=target.warp_size,
            shared_per_block=target.max_shared, shared_per_multiprocessor=target.shared_per_sm, registers_per_thread=target.max_registers,
            registers_per_multiprocessor=target.registers_per_sm, threads_per_multiprocessor=target.threads_per_sm,
            vector_bytes=target.vector_bytes,
        )  # fmt: skip

    def load(self, artifact: Artifact) -> LoadedProgram:
        raise DeviceError.at("TW030", f"the emulator runs the IR, not the {artifact.kind} code of '{artifact.name}'", help="use device='cpu' or a GPU")


@functools.cache
def _runtime(device: Device) -> EmulatorDevice:
    return EmulatorDevice(device)


class EmulatorCalls(KernelCalls):
    """A kernel on the emulator."""

    def run(self, values: Mapping[str, object], device: Device, out: object = None) -> tuple[object, Artifact]:
        from tilewright.compile.build import describe_program

        given_arrays = {p.name: values[p.name] for p in self.function.params if p.in_place and isinstance(values[p.name], DeviceArray)}
        values = {name: v.numpy() if isinstance(v, DeviceArray) else v for name, v in values.items()}
        arguments = self.kernel.arguments(values, gpu=True)
        done = compile_stages(self.function, replace(self.kernel.signature(arguments, gpu=True), indices="none"), device.target)  # it checks all accesses itself
        announce(done.notes)
        stages = done.stages
        program = {"loop": stages.loop, "tile": stages.tile, "thread": stages.thread}[device.stage]
        artifact, span = describe_program(program, device.target), self.function.span
        # As on a GPU, arrays of the host are copied; what is written in place is copied back.
        targets = {p.name: next(a.value for a in arguments if a.name == p.name) for p in artifact.in_place}
        apart = host_apart(artifact, {a.name: a.value for a in arguments if isinstance(a.value, np.ndarray)}, span)
        inputs: dict[str, np.ndarray | Number] = {}
        for a in arguments:
            assert not isinstance(a.value, DeviceArray)
            if a.value is None:
                continue
            if a.name in targets:
                inputs[a.name] = np.array(a.value, order="C")
            else:
                inputs[a.name] = contiguous(a.name, apart[a.name], span) if isinstance(a.value, np.ndarray) else a.value
        # The call-time checks of real devices: same errors, same texts.
        arrays = {n: v for n, v in inputs.items() if isinstance(v, np.ndarray)}
        sizes = bind_sizes(artifact, {n: a.shape for n, a in arrays.items()}, strides_of(arrays), span, numbers(arguments))
        given = given_outputs(artifact, out, span)
        check_given(artifact, {n: a.value for n, a in ((a.name, a) for a in arguments) if n in targets}, given, _share, span)
        for param in artifact.outputs:
            if param.name in given:
                shape = tuple(s.evaluate(sizes) for s in param.shape)
                check_output(param, given[param.name], shape, span)
        recorder = streams.host_recorder() if streams.FAST_PATH_OFF.value else None
        if recorder is not None:
            recorder.check_arguments({a.name: a.value for a in arguments}, values)
            shapes = {p.name: tuple(s.evaluate(sizes) for s in p.shape) for p in artifact.outputs}
            results = {p.name: given.get(p.name, np.empty(shapes[p.name], p.dtype.numpy)) for p in artifact.outputs}
            refuse_in_place(artifact, device.id, span)
            recorder.add_emulated(program, inputs, converted(artifact, numbers(arguments)), results, partial(_run_aligned, target=device.target))
            return recorded_result(artifact, results, out), artifact
        everything = {**inputs, **converted(artifact, numbers(arguments))}
        old: dict[str, np.ndarray] = {}
        for made in program.outputs:
            if made.name in given:  # elements that the kernel does not write keep what the caller gave
                old[made.name] = new_array(made.type, sizes)
                old[made.name][...] = given[made.name]
        if done.written is not None:
            check_all_written(done.written, everything, old)
        try:
            outputs = _run_aligned(program, everything, old or None, device.target)
        finally:
            for name, target in targets.items():
                target[...] = inputs[name]  # type: ignore[index]
            for name, array in given_arrays.items():
                array.copy_from(values[name])  # type: ignore[attr-defined]
        for name, array in given.items():
            assert isinstance(array, np.ndarray)
            array[...] = outputs[name]
        return result_of(artifact, outputs, out), artifact


class EmulatorLaunches(KernelLaunches):
    """An explicit kernel on the emulator."""

    def __init__(self, kernel: ExplicitSource) -> None:
        super().__init__(kernel)
        self._emulated: dict[Key, tuple[BuiltKernel, Kernel]] = {}

    def run(self, values: Sequence[object], config: LaunchConfig, device: Device, repeats: Repeats | None) -> None:
        from tilewright.compile.build import describe_program
        from tilewright.ir.emulator import run_kernel

        source = self.kernel
        streams.refuse_in_capture(f"a launch on {device.id}", help="graphs of explicit kernels are captured on a GPU")
        leaves, args, back = host_leaves(source.parameters, values)
        config = replace(config, check=False)
        key = (device.id, *source.key(args, config, target=device.target))
        found = self._emulated.get(key)
        if is_stepping(source.source.name):
            stepped = source.built_with_steps(args, config)
            found = stepped, stepped.kernel
        elif found is None:
            built = source.built(args, config, target=device.target)
            found = built, prepare_simt(built.program, device.target).calls[0].kernel
            keep(self._emulated, key, found)
        built, kernel = found
        source.check_written(leaves, built.written)
        artifact = source.last = describe_program(built.program, device.target)
        arrays = {leaf.name: leaf.value for leaf in leaves if isinstance(leaf.value, np.ndarray)}
        scalars = {leaf.name: leaf.value for leaf in leaves if not isinstance(leaf.value, np.ndarray | DeviceArray)}
        sizes = source.sizes(artifact, arrays, config)
        given: dict[str, np.ndarray | Number] = {**arrays, **converted(artifact, scalars)}
        if 0 not in config.grid:
            moved = {n: _aligned(a) for n, a in arrays.items() if not _is_aligned(a) and not _meets_others(n, arrays)}
            run_kernel(kernel, [moved.get(p.name, given[p.name]) for p in kernel.params], sizes, device.target)
            for name in moved.keys() & built.written:
                arrays[name][...] = moved[name]
        copy_back(back, arrays, built.written)


class EmulatorPlace(HostPlace):
    """The emulator, for one primitive."""

    def run(self, what: str, build: Build, arrays: Mapping[str, Array], scalars: Mapping[str, Number] | None = None) -> None:
        program = finished_program(build(), self.target)
        outputs = {a.name: arrays[a.name] for a in program.outputs}
        inputs: dict[str, Any] = {n: v for n, v in arrays.items() if n not in outputs} | dict(scalars or {})
        _run_aligned(program, inputs, outputs, self.target)  # type: ignore[arg-type]


def _run_aligned(
    program: Program, inputs: Mapping[str, np.ndarray | Number], outputs: Mapping[str, np.ndarray] | None = None,
    target: Target = NVPTX[DEFAULT_NVPTX],
) -> dict[str, np.ndarray]:  # fmt: skip
    """Run a program on arrays as a GPU gets them: those of the host are copied to memory that is aligned."""
    from tilewright.ir.emulator import run_program

    moved = {n: _aligned(a) for n, a in (outputs or {}).items() if not _is_aligned(a)}
    given = {n: v if not isinstance(v, np.ndarray) or _is_aligned(v) else _aligned(v) for n, v in inputs.items()}
    try:
        results = run_program(program, given, None if outputs is None else {**outputs, **moved}, target)
    finally:
        for array in program.input_arrays:
            if array.role == "inout" and given[array.name] is not inputs[array.name]:
                inputs[array.name][...] = given[array.name]  # type: ignore[index]
    for name, copy in moved.items():
        assert outputs is not None
        outputs[name][...] = copy
    return {**results, **{n: outputs[n] for n in moved}} if outputs is not None else results


_ALIGN = 16
"""Bytes that device memory is aligned to, at least."""


def _is_aligned(array: np.ndarray) -> bool:
    return array.ctypes.data % _ALIGN == 0


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy, row by row, in aligned memory."""
    memory = np.empty(array.nbytes + _ALIGN, np.uint8)
    start = -memory.ctypes.data % _ALIGN
    made = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def _share(a: object, b: object) -> bool:
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and share_memory(a, b)


def _meets_others(name: str, arrays: Mapping[str, np.ndarray]) -> bool:
    return any(other != name and np.may_share_memory(arrays[name], array) for other, array in arrays.items())
