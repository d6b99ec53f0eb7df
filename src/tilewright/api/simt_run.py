"""Running explicit kernels: what was built, compiled and loaded for one kernel, and its launches on every device.

In: the values of all parameters, how to launch, and a device. Out: nothing; arrays are written in place. Code is kept by the types of
the arguments, the block, the axes of the grid, the dynamic shared memory and whether arrays overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tilewright.api.arguments import Number, element_strides
from tilewright.api.checks import bind_sizes
from tilewright.api.cuda_calls import _is_foreign, _memory, _overlap, _place, gpu_of
from tilewright.api.devices import Device
from tilewright.api.outputs import converted, keep
from tilewright.api.simt_arguments import Leaf, read_leaves
from tilewright.base.artifact import Artifact
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.compile.simt import compile_simt, prepare_simt
from tilewright.frontend.simt import BuiltKernel, Parameter, SimtArg, build_kernel
from tilewright.frontend.simt_build import COUNT, GRID, Launch
from tilewright.frontend.simt_source import FunctionSource
from tilewright.ir.nodes import Attr, Kernel
from tilewright.runtime import streams
from tilewright.runtime.device_array import DeviceArray
from tilewright.runtime.libraries import is_tensor, library_of

if TYPE_CHECKING:
    from tilewright.api.simt import Config
    from tilewright.runtime.cuda import CudaDevice
    from tilewright.runtime.cuda_program import CudaProgram

Key = tuple[object, ...]


@record
class _Loaded:
    """Code on a GPU."""

    built: BuiltKernel
    program: CudaProgram


class SimtRunner:
    """One kernel on all devices."""

    def __init__(self, source: FunctionSource, parameters: Sequence[Parameter], attrs: Mapping[str, Attr]) -> None:
        self.source, self.parameters, self.attrs = source, parameters, dict(attrs)
        self._built: dict[Key, BuiltKernel] = {}
        self._loaded: dict[Key, _Loaded] = {}
        self._emulated: dict[Key, tuple[BuiltKernel, Kernel]] = {}
        self.last: Artifact | None = None

    # -- building -------------------------------------------------------------------------------------------------

    def key(self, args: Sequence[SimtArg], config: Config, aliased: bool = False) -> Key:
        """All that code is made for."""
        return (tuple(args), config.block, config.rank, config.shared_bytes, bool(config.count), aliased)

    def built(self, args: Sequence[SimtArg], config: Config, aliased: bool = False) -> BuiltKernel:
        """The thread-stage kernel for these arguments and this launch."""
        key = self.key(args, config, aliased)
        found = self._built.get(key)
        if found is None:
            launch = Launch(config.block, config.rank, config.shared_bytes, bool(config.count))
            attrs = dict(self.attrs)
            if aliased:
                attrs["aliased"] = True
            found = build_kernel(self.source, self.parameters, args, launch, attrs)
            keep(self._built, key, found)
        return found

    def compile(self, args: Sequence[SimtArg], config: Config, target: Target) -> Artifact:
        return compile_simt(self.built(args, config).program, target)

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, values: Sequence[object], config: Config, device: Device) -> None:
        if device.kind == "cuda":
            self._run_cuda(values, config, device)
        elif device.kind == "emulator":
            self._run_emulator(values, config, device)
        else:
            from tilewright.api.simt_cpu import run_cpu

            run_cpu(self, values, config, device)

    def _run_cuda(self, values: Sequence[object], config: Config, device: Device) -> None:
        gpu = gpu_of(device)
        library = library_of(tuple(values))
        place = _place(gpu, library)
        if place.split:
            gpu.order(place.stream, place.outside or 0)
        moved = [gpu.wrap(v, place.stream) if _is_foreign(v) else v for v in values]
        leaves, args = read_leaves(self.parameters, moved, gpu=True)
        loaded = self._load(args, config, leaves, gpu, device)
        artifact, written = loaded.program.artifact, loaded.built.written
        self._check_written(leaves, written)
        arrays: dict[str, DeviceArray] = {}
        back: list[tuple[np.ndarray, DeviceArray]] = []
        for leaf in leaves:
            if isinstance(leaf.value, np.ndarray):
                arrays[leaf.name] = gpu.from_numpy(np.ascontiguousarray(leaf.value), stream=place.stream)
                if leaf.name in written:
                    back.append((leaf.value, arrays[leaf.name]))
            elif isinstance(leaf.value, DeviceArray):
                arrays[leaf.name] = leaf.value
        numbers = {leaf.name: leaf.value for leaf in leaves if not isinstance(leaf.value, np.ndarray | DeviceArray)}
        sizes = self._sizes(artifact, arrays, config)
        loaded.program.run(arrays, converted(artifact, numbers), sizes, place.stream, take=_memory(library, gpu.ordinal))
        for target, array in back:
            target[...] = array.numpy()
        if place.split:
            gpu.order(place.outside or 0, place.stream)
        self.last = artifact

    def _load(self, args: Sequence[SimtArg], config: Config, leaves: list[Leaf], gpu: CudaDevice, device: Device) -> _Loaded:
        overlaps = _overlaps(leaves)
        aliased = bool(overlaps) and any(a in self.built(args, config).written or b in self.built(args, config).written for a, b in overlaps)
        key = (device.id, *self.key(args, config, aliased))
        found = self._loaded.get(key)
        if found is None:
            built = self.built(args, config, aliased)
            found = _Loaded(built, gpu.load(compile_simt(built.program, gpu.target)))
            keep(self._loaded, key, found)
        return found

    def _sizes(self, artifact: Artifact, arrays: Mapping[str, np.ndarray | DeviceArray], config: Config) -> dict[str, int]:
        shapes = {name: array.shape for name, array in arrays.items()}
        strides = {name: element_strides(array) for name, array in arrays.items()}
        sizes = bind_sizes(artifact, shapes, strides, self.source.head())
        return sizes | launch_sizes(config)

    def _check_written(self, leaves: Sequence[Leaf], written: frozenset[str]) -> None:
        for leaf in leaves:
            if leaf.name not in written:
                continue
            value = leaf.value
            readonly = not value.flags.writeable if isinstance(value, np.ndarray) else isinstance(value, DeviceArray) and value.readonly
            if readonly:
                raise UserError.at("TW018", f"'{leaf.name}' is read-only, but {self.source.name} writes to it", self.source.head())

    # -- emulator -------------------------------------------------------------------------------------------------

    def _run_emulator(self, values: Sequence[object], config: Config, device: Device) -> None:
        from tilewright.compile.build import describe_program
        from tilewright.ir.emulator import run_kernel

        streams.refuse_in_capture(f"a launch on {device.id}", help="graphs of explicit kernels are captured on a GPU")
        leaves, args, back = host_leaves(self.parameters, values)
        key = (device.id, *self.key(args, config))
        found = self._emulated.get(key)
        if found is None:
            built = self.built(args, config)
            found = built, prepare_simt(built.program, device.target).calls[0].kernel
            keep(self._emulated, key, found)
        built, kernel = found
        self._check_written(leaves, built.written)
        artifact = self.last = describe_program(built.program, device.target)
        arrays = {leaf.name: leaf.value for leaf in leaves if isinstance(leaf.value, np.ndarray)}
        numbers = {leaf.name: leaf.value for leaf in leaves if not isinstance(leaf.value, np.ndarray | DeviceArray)}
        sizes = self._sizes(artifact, arrays, config)
        given: dict[str, np.ndarray | Number] = {**arrays, **converted(artifact, numbers)}
        if 0 not in config.grid:
            run_kernel(kernel, [given[p.name] for p in kernel.params], sizes)
        copy_back(back, arrays, built.written)


def launch_sizes(config: Config) -> dict[str, int]:
    """The sizes that a launch gives."""
    return {**dict(zip(GRID, config.grid, strict=True)), COUNT: config.count}


Back = list[tuple[str, "DeviceArray | np.ndarray"]]


def host_leaves(parameters: Sequence[Parameter], values: Sequence[object]) -> tuple[list[Leaf], list[SimtArg], Back]:
    """Leaves in host memory, and the device arrays whose elements were copied there."""
    originals: dict[int, object] = {}

    def on_host(value: object) -> object:
        if isinstance(value, DeviceArray):
            made: object = value.numpy()
        elif is_tensor(value):
            made = value.detach().cpu().numpy()  # type: ignore[attr-defined]
            if not value.is_cuda:  # type: ignore[attr-defined]
                return made
        else:
            return value
        originals[id(made)] = value
        return made

    moved = [on_host(value) for value in values]
    leaves, args = read_leaves(parameters, moved, gpu=False)
    back: Back = []
    for parameter, value in zip(parameters, moved, strict=True):
        leaf = next((leaf for leaf in leaves if leaf.name == parameter.name), None)
        if leaf is None or not isinstance(leaf.value, np.ndarray):
            continue
        original = originals.get(id(value))
        if original is not None:
            back.append((leaf.name, original))  # type: ignore[arg-type]
        elif isinstance(value, np.ndarray) and not np.may_share_memory(value, leaf.value):
            back.append((leaf.name, value))
    return leaves, args, back


def copy_back(back: Back, arrays: Mapping[str, np.ndarray], written: frozenset[str]) -> None:
    """What was written in a copy goes to where it came from."""
    for name, original in back:
        if name not in written:
            continue
        values = arrays[name].reshape(original.shape)
        if isinstance(original, DeviceArray):
            original.copy_from(values)
        elif isinstance(original, np.ndarray):
            original[...] = values
        else:
            original.copy_(_as_tensor(values))  # type: ignore[unreachable]


def _as_tensor(values: np.ndarray) -> object:
    import torch

    return torch.from_numpy(values)


def _overlaps(leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
    """Pairs of device arrays that share memory."""
    arrays = [leaf for leaf in leaves if isinstance(leaf.value, DeviceArray)]
    return [
        (a.name, b.name)
        for i, a in enumerate(arrays)
        for b in arrays[i + 1 :]
        if _overlap(a.value, b.value)  # type: ignore[arg-type]
    ]
