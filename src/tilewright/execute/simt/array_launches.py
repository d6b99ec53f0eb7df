"""Launches of explicit kernels on devices with memory of their own: the general path.

In: the values of all parameters, how to launch and a device. Out: nothing; arrays are written in place, host arrays through copies.
A kind of device that learns from launches overrides `learn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tilewright.base.artifact import Artifact
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.compile.simt import compile_simt
from tilewright.execute.calls.outputs import converted, keep
from tilewright.execute.device import Device, own_memory
from tilewright.execute.simt.arguments import Leaf, checked_number, read_leaves, split_values
from tilewright.execute.simt.checks import FAILURE, new_failure, raise_failure
from tilewright.execute.simt.config import LaunchConfig
from tilewright.execute.simt.launches import ExplicitSource, Facts, KernelLaunches, Key, Repeats, vendor_of
from tilewright.execute.simt.memory import check_alive
from tilewright.execute.speed_warnings import contiguous
from tilewright.execute.stream_place import StreamPlace, form_of
from tilewright.frontend.simt.kernels import BuiltKernel, Parameter, SimtArg
from tilewright.runtime.core import streams
from tilewright.runtime.core.device import LoadedProgram
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray


@record
class LoadedKernel:
    """Code on a device."""

    built: BuiltKernel
    program: LoadedProgram
    aliased: bool
    key: Key


@record
class LaunchPlan:
    """What a kind of launch on device arrays runs, and with which sizes."""

    program: LoadedProgram
    written: frozenset[str]
    names: list[str]
    parameters: list[Parameter]
    sizes: dict[str, int]
    apart: list[tuple[str, str]]
    """Arrays that must not overlap."""


@record
class MadeLaunch:
    """A launch that was made, with what it used."""

    plan: LaunchPlan
    values: tuple[object, ...]
    place: StreamPlace
    arrays: Mapping[str, DeviceArray]


class ArrayLaunches(KernelLaunches):
    """An explicit kernel on devices with memory of their own."""

    def __init__(self, kernel: ExplicitSource) -> None:
        super().__init__(kernel)
        self._loaded: dict[Key, LoadedKernel] = {}

    def compile(self, built: BuiltKernel, device: Device) -> Artifact:
        """The kernel's code for a device."""
        return compile_simt(built.program, device.target)

    def run(self, values: Sequence[object], config: LaunchConfig, device: Device, repeats: Repeats | None) -> None:
        kernel, runtime = self.kernel, own_memory(device)
        parts = None if kernel.plain else split_values(kernel.parameters, values)
        given = list(values) if parts is None else [part.value for part in parts]
        place = StreamPlace.of(runtime, tuple(given))
        place.enter()
        moved = [place.wrapped(value) for value in given]
        forms = (runtime.ordinal, *map(form_of, moved))
        known = repeats.calls.get(forms) if repeats is not None else None
        if known is not None and self._repeated(known, values, moved, place, repeats):
            return
        for value in given:
            check_alive(value)
        parts = parts or split_values(kernel.parameters, values)
        leaves, args = read_leaves(
            kernel.parameters, [replace(part, value=v) for part, v in zip(parts, moved, strict=True)], gpu=device.target.is_gpu
        )
        loaded = self._load(args, config, leaves, runtime, device)
        artifact, written = loaded.program.artifact, loaded.built.written
        kernel.check_written(leaves, written)
        arrays: dict[str, DeviceArray] = {}
        back: list[tuple[np.ndarray, DeviceArray]] = []
        copies: dict[object, DeviceArray] = {}
        for leaf, part in zip(leaves, parts, strict=True):
            if isinstance(leaf.value, np.ndarray):
                # An array that is given twice is one array on the device too.
                key = _identity(leaf.value)
                if key not in copies:
                    copies[key] = runtime.from_numpy(contiguous(leaf.name, leaf.value, part.parameter.span), stream=place.stream)
                arrays[leaf.name] = copies[key]
                if leaf.name in written:
                    back.append((_original(part.value, leaf.value), copies[key]))
            elif isinstance(leaf.value, DeviceArray):
                arrays[leaf.name] = leaf.value
        if config.check:
            streams.refuse_in_capture(f"a launch of {self.kernel.source.name} with check=True")
            arrays[FAILURE] = runtime.from_numpy(new_failure(), stream=place.stream)
        numbers = {leaf.name: leaf.value for leaf in leaves if not isinstance(leaf.value, np.ndarray | DeviceArray)}
        sizes = kernel.sizes(artifact, arrays, config)
        loaded.program.run(arrays, converted(artifact, numbers), sizes, place.stream, take=place.workspace())
        for target, array in back:
            target[...] = array.numpy().reshape(target.shape)
        place.leave()
        kernel.last = artifact
        if config.check:
            raise_failure(arrays[FAILURE].numpy().tolist(), self.kernel.sites[loaded.key], loaded.built.kernel, config.grid)
        if repeats is None or back or loaded.aliased or config.check:
            return
        names = [leaf.name for leaf in leaves]
        apart = [(a, b) for i, a in enumerate(arrays) for b in list(arrays)[i + 1 :] if a in written or b in written]
        call = LaunchPlan(loaded.program, written, names, [part.parameter for part in parts], sizes, apart)
        if not copies:
            keep(repeats.calls, forms, call)
        self._learn(repeats, call, values, place, arrays)

    def _learn(
        self, repeats: Repeats, call: LaunchPlan, values: Sequence[object], place: StreamPlace, arrays: Mapping[str, DeviceArray]
    ) -> None:
        if repeats.may_be_fast and self.kernel.plain and not streams.FAST_PATH_OFF.value:
            self.learn(repeats, MadeLaunch(call, tuple(values), place, arrays))

    def learn(self, repeats: Repeats, launch: MadeLaunch) -> None:
        """A launch was made whose arrays were all on the device, outside graphs."""

    def _repeated(
        self, known: LaunchPlan, values: Sequence[object], moved: Sequence[object], place: StreamPlace, repeats: Repeats | None
    ) -> bool:
        """A launch like an earlier one: only what the forms of the arguments do not say is looked at."""
        arrays = {name: value for name, value in zip(known.names, moved, strict=True) if isinstance(value, DeviceArray)}
        if any(arrays[name].readonly for name in known.written) or any(arrays[a].overlaps(arrays[b]) for a, b in known.apart):
            return False
        program, numbers = known.program, {}
        for name, parameter, value in zip(known.names, known.parameters, moved, strict=True):
            if name not in arrays:
                plain = value.item() if isinstance(value, np.generic) else value
                numbers[name] = checked_number(name, plain, parameter.dtype, parameter.span) if parameter.dtype else plain
        program.run(arrays, converted(program.artifact, numbers), known.sizes, place.stream, take=place.workspace())  # type: ignore[arg-type]
        place.leave()
        self.kernel.last = program.artifact
        if repeats is not None:
            self._learn(repeats, known, values, place, arrays)
        return True

    def _load(self, args: Sequence[SimtArg], config: LaunchConfig, leaves: list[Leaf], runtime: ArrayDevice, device: Device) -> LoadedKernel:
        overlaps, vendor = _overlaps(leaves), vendor_of(device.target)
        written = self.kernel.built(args, config, vendor=vendor, target=device.target).written if overlaps else frozenset()
        aliased = any(a in written or b in written for a, b in overlaps)
        values = {leaf.name: leaf.value for leaf in leaves}
        for a, b in overlaps:
            one, other = values[a], values[b]
            if aliased and isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and _identity(one) != _identity(other):
                raise UserError.at(
                    "TW018", f"'{a}' and '{b}' overlap in part and {self.kernel.source.name} writes to them", self.kernel.source.head(),
                    "give arrays that are the same or apart, or device arrays",
                )  # fmt: skip
        facts = Facts.of(leaves, config)
        key = (runtime.ordinal, *self.kernel.key(args, config, aliased, vendor, facts, device.target))
        found = self._loaded.get(key)
        if found is None:
            built = self.kernel.built(args, config, aliased, vendor, facts, device.target)
            own = self.kernel.key(args, config, aliased, vendor, facts, device.target)
            found = LoadedKernel(built, runtime.load(self.compile(built, device)), aliased, own)
            keep(self._loaded, key, found)
        return found


def _share(a: object, b: object) -> bool:
    """Whether two host arrays have an element in common; where that is hard to say, yes."""
    assert isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    try:
        return bool(np.shares_memory(a, b, max_work=10_000))  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, ValueError):
        return True


def _identity(array: np.ndarray) -> object:
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype


def _original(given: object, array: np.ndarray) -> np.ndarray:
    """The caller's own array where reading it made a copy."""
    own = isinstance(given, np.ndarray) and array.size and not np.may_share_memory(given, array)
    return given if own else array  # type: ignore[return-value]


def _overlaps(leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
    """Pairs of device arrays that share memory."""
    arrays = [leaf for leaf in leaves if isinstance(leaf.value, DeviceArray)]
    found = [
        (a.name, b.name)
        for i, a in enumerate(arrays)
        for b in arrays[i + 1 :]
        if a.value.overlaps(b.value)  # type: ignore[union-attr, arg-type]
    ]
    hosted = [leaf for leaf in leaves if isinstance(leaf.value, np.ndarray)]
    return found + [(a.name, b.name) for i, a in enumerate(hosted) for b in hosted[i + 1 :] if _share(a.value, b.value)]
