"""Running explicit kernels: what was built, compiled and loaded for one kernel, and its launches on every device.

In: the values of all parameters, how to launch, and a device. Out: nothing; arrays are written in place. Code is kept by the types of
the arguments, the block, the axes of the grid, the dynamic shared memory and whether arrays overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tilewright.api.arguments import Number, element_strides
from tilewright.api.checks import bind_sizes
from tilewright.api.cuda_calls import _form, _is_foreign, _memory, _overlap, _Place, _place, gpu_of
from tilewright.api.devices import Device
from tilewright.api.native_calls import Given, NativeCalls
from tilewright.api.outputs import converted, keep
from tilewright.api.simt_arguments import Leaf, checked_number, read_leaves, split_values
from tilewright.api.simt_checks import FAILURE, new_failure, raise_failure, with_checks
from tilewright.api.simt_host import copy_back, host_leaves, launch_sizes
from tilewright.api.simt_memory import check_alive
from tilewright.base.artifact import Artifact
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.compile.simt import compile_simt, prepare_simt
from tilewright.frontend.simt import BuiltKernel, Parameter, SimtArg, build_kernel, read_parameters
from tilewright.frontend.simt_build import Launch
from tilewright.frontend.simt_source import FunctionSource, alternative, read_source
from tilewright.ir.emulator.stepping import is_stepping
from tilewright.ir.nodes import Attr, Kernel, walk
from tilewright.ir.ops import OPS
from tilewright.passes.bounds_checks import Site
from tilewright.runtime import observe, streams
from tilewright.runtime.device_array import DeviceArray
from tilewright.runtime.libraries import Library, library_of

if TYPE_CHECKING:
    from tilewright.api.simt import Config
    from tilewright.runtime.cpu import CpuProgram
    from tilewright.runtime.cuda import CudaDevice
    from tilewright.runtime.cuda_program import CudaProgram

Key = tuple[object, ...]


@record
class _Loaded:
    """Code on a GPU."""

    built: BuiltKernel
    program: CudaProgram
    aliased: bool
    key: Key


@record
class _Call:
    """What a kind of launch on device arrays runs, and with which sizes."""

    program: CudaProgram
    written: frozenset[str]
    names: list[str]
    parameters: list[Parameter]
    sizes: dict[str, int]
    apart: list[tuple[str, str]]
    """Arrays that must not overlap."""


class Repeats:
    """What one configuration of a kernel learnt from its launches."""

    def __init__(self, native: NativeCalls | None) -> None:
        self.native = native
        self.calls: dict[Key, _Call] = {}
        """Launches on device arrays, by all that decides which code runs and with which sizes."""


@record
class Facts:
    """What holds for the sizes of a launch, and makes its code shorter."""

    small: bool
    """Every extent, every offset in an array and every index of a thread in the grid is below 2^31."""
    alike: tuple[tuple[str, str], ...] = ()
    """Arrays that have the shape of another: (name, name of that one)."""

    @staticmethod
    def of(leaves: Sequence[Leaf], config: Config) -> Facts:
        arrays = [(leaf.name, leaf.value) for leaf in leaves if isinstance(leaf.value, np.ndarray | DeviceArray)]
        small = all(grid * block <= _SMALL for grid, block in zip(config.grid, config.block, strict=True))
        small = small and all(_span(array) <= _SMALL for _, array in arrays)
        first: dict[tuple[int, ...], str] = {}
        alike: list[tuple[str, str]] = []
        for name, array in arrays:
            if array.ndim > 1:
                other = first.setdefault(array.shape, name)
                if other != name:
                    alike.append((name, other))
        return Facts(small, tuple(alike))


_SMALL = (1 << 31) - 1


def _span(array: np.ndarray | DeviceArray) -> int:
    """The largest offset of an element, and the largest extent."""
    strides = element_strides(array)
    reach = sum((extent - 1) * abs(stride) for extent, stride in zip(array.shape, strides, strict=True) if extent)
    return max(reach + 1, *array.shape, array.size) if array.ndim else 1


class SimtRunner:
    """One kernel on all devices."""

    def __init__(
        self, function: Callable[..., object], source: FunctionSource, parameters: Sequence[Parameter], attrs: Mapping[str, Attr],
        independent: bool = False,
    ) -> None:  # fmt: skip
        self.function, self.source, self.parameters, self.attrs = function, source, parameters, dict(attrs)
        self.independent = independent
        self._built: dict[Key, BuiltKernel] = {}
        self._loaded: dict[Key, _Loaded] = {}
        self.plain = all(parameter.kind is None for parameter in parameters)
        """Whether there are no structs among its parameters."""
        self._emulated: dict[Key, tuple[BuiltKernel, Kernel]] = {}
        self.on_cpu: dict[Key, tuple[CpuProgram, BuiltKernel, Key]] = {}
        """With what was built, and under which key."""
        self.sites: dict[Key, tuple[Site, ...]] = {}
        """Of kernels with checks: what a failure can name."""
        self.last: Artifact | None = None

    # -- building -------------------------------------------------------------------------------------------------

    def key(
        self, args: Sequence[SimtArg], config: Config, aliased: bool = False, vendor: str = "nvidia", facts: Facts | None = None
    ) -> Key:
        """All that code is made for."""
        return (
            tuple(args),
            config.block,
            config.rank,
            config.shared_bytes,
            bool(config.count),
            config.check,
            aliased,
            vendor,
            facts,
        )

    def built(
        self, args: Sequence[SimtArg], config: Config, aliased: bool = False, vendor: str = "nvidia", facts: Facts | None = None
    ) -> BuiltKernel:
        """The thread-stage kernel for these arguments and this launch. `vendor` chooses between alternatives: nvidia, amd or cpu."""
        key = self.key(args, config, aliased, vendor, facts)
        found = self._built.get(key)
        if found is None:
            attrs = dict(self.attrs)
            cluster = attrs.get("cluster", 1)
            assert isinstance(cluster, int)
            launch = Launch(config.block, config.rank, config.shared_bytes, bool(config.count), vendor, cluster)
            if aliased:
                attrs |= {"aliased": True, "noalias": False}
            if facts is not None and facts.small:
                attrs["small"] = True
            alike = dict(facts.alike) if facts is not None else {}
            found = build_kernel(self._source_for(vendor), self.parameters, args, launch, attrs, alike)
            if self.independent:
                _check_independent(found)
            if config.check:
                found, self.sites[key] = with_checks(found)
            keep(self._built, key, found)
        return found

    def _source_for(self, vendor: str) -> FunctionSource:
        """The definition for a target, where there are several."""
        chosen = alternative(self.function, vendor)
        if chosen is self.function:
            return self.source
        source = read_source(chosen)
        names = [p.name for p in read_parameters(source)]
        if names != [p.name for p in self.parameters]:
            own = ", ".join(p.name for p in self.parameters)
            raise UserError.at(
                "TW016", f"{source.name} for {vendor} takes ({', '.join(names)}), but another definition ({own})", source.head()
            )
        return source

    def built_with_steps(self, args: Sequence[SimtArg], config: Config) -> BuiltKernel:
        """The kernel with a `step` before each statement, for the debugger."""
        cluster = self.attrs.get("cluster", 1)
        assert isinstance(cluster, int)
        launch = Launch(config.block, config.rank, config.shared_bytes, bool(config.count), cluster=cluster, steps=True)
        return build_kernel(self._source_for("nvidia"), self.parameters, args, launch, dict(self.attrs))

    def compile(self, leaves: Sequence[Leaf], args: Sequence[SimtArg], config: Config, target: Target) -> Artifact:
        """The artifact of a launch with these arguments."""
        if not target.is_gpu:
            return compile_simt(self.built(args, config, vendor="cpu").program, target)
        return compile_simt(self.built(args, config, facts=Facts.of(leaves, config)).program, target)

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, values: Sequence[object], config: Config, device: Device, repeats: Repeats | None = None) -> None:
        """Launch. `repeats` learns from launches on a GPU what the next ones need not look at."""
        watcher = observe.observer
        if watcher is None:
            self._run(values, config, device, repeats)
            return
        with watcher.call(self.source, device.id) as record:
            self._run(values, config, device, repeats)
        record.kernels = 1

    def _run(self, values: Sequence[object], config: Config, device: Device, repeats: Repeats | None) -> None:
        if device.kind == "cuda":
            self._run_cuda(values, config, device, repeats)
        elif device.kind == "emulator":
            self._run_emulator(values, config, device)
        else:
            from tilewright.api.simt_cpu import run_cpu

            leaves, args, back = host_leaves(self.parameters, values)
            arrays, built, key = run_cpu(self, leaves, args, config, launch_sizes(config), device)
            copy_back(back, arrays, built.written)
            if config.check:
                raise_failure(arrays[FAILURE], self.sites[key], built.kernel, config.grid)

    def _run_cuda(self, values: Sequence[object], config: Config, device: Device, repeats: Repeats | None) -> None:
        gpu = gpu_of(device)
        parts = None if self.plain else split_values(self.parameters, values)
        given = list(values) if parts is None else [part.value for part in parts]
        library = library_of(tuple(given))
        place = _place(gpu, library)
        if place.split:
            gpu.order(place.stream, place.outside or 0)
        moved = [gpu.wrap(value, place.stream) if _is_foreign(value) else value for value in given]
        forms = (device.id, *map(_form, moved))
        known = repeats.calls.get(forms) if repeats is not None else None
        if known is not None and self._repeated(known, values, moved, place, repeats):
            return
        for value in given:
            check_alive(value)
        parts = parts or split_values(self.parameters, values)
        leaves, args = read_leaves(
            self.parameters, [replace(part, value=v) for part, v in zip(parts, moved, strict=True)], gpu=True
        )
        loaded = self._load(args, config, leaves, gpu, device)
        artifact, written = loaded.program.artifact, loaded.built.written
        self._check_written(leaves, written)
        arrays: dict[str, DeviceArray] = {}
        back: list[tuple[np.ndarray, DeviceArray]] = []
        copies: dict[object, DeviceArray] = {}
        for leaf, part in zip(leaves, parts, strict=True):
            if isinstance(leaf.value, np.ndarray):
                # An array that is given twice is one array on the GPU too.
                key = _identity(leaf.value)
                if key not in copies:
                    copies[key] = gpu.from_numpy(np.ascontiguousarray(leaf.value), stream=place.stream)
                arrays[leaf.name] = copies[key]
                if leaf.name in written:
                    back.append((_original(part.value, leaf.value), copies[key]))
            elif isinstance(leaf.value, DeviceArray):
                arrays[leaf.name] = leaf.value
        if config.check:
            streams.refuse_in_capture(f"a launch of {self.source.name} with check=True")
            arrays[FAILURE] = gpu.from_numpy(new_failure(), stream=place.stream)
        numbers = {leaf.name: leaf.value for leaf in leaves if not isinstance(leaf.value, np.ndarray | DeviceArray)}
        sizes = self._sizes(artifact, arrays, config)
        loaded.program.run(arrays, converted(artifact, numbers), sizes, place.stream, take=_memory(library, gpu.ordinal))
        for target, array in back:
            target[...] = array.numpy().reshape(target.shape)
        if place.split:
            gpu.order(place.outside or 0, place.stream)
        self.last = artifact
        if config.check:
            raise_failure(arrays[FAILURE].numpy(), self.sites[loaded.key], loaded.built.kernel, config.grid)
        if repeats is None or back or loaded.aliased or config.check:
            return
        names = [leaf.name for leaf in leaves]
        apart = [(a, b) for i, a in enumerate(arrays) for b in list(arrays)[i + 1 :] if a in written or b in written]
        call = _Call(loaded.program, written, names, [part.parameter for part in parts], sizes, apart)
        if not copies:
            keep(repeats.calls, forms, call)
        self._teach(repeats, call, values, library, arrays)

    def _teach(
        self, repeats: Repeats, call: _Call, values: Sequence[object], library: Library | None, arrays: Mapping[str, DeviceArray]
    ) -> None:
        """Let machine code take the next launch like this one."""
        if repeats.native is not None and self.plain and not streams.SPECIAL.value:
            given = Given(tuple(values), None, call.program, call.sizes, (), library, arrays, {}, call.apart, call.written)
            repeats.native.learn(given)

    def _repeated(
        self, known: _Call, values: Sequence[object], moved: Sequence[object], place: _Place, repeats: Repeats | None
    ) -> bool:
        """A launch like an earlier one: only what the forms of the arguments do not say is looked at."""
        arrays = {name: value for name, value in zip(known.names, moved, strict=True) if isinstance(value, DeviceArray)}
        if any(arrays[name].readonly for name in known.written) or any(_overlap(arrays[a], arrays[b]) for a, b in known.apart):
            return False
        program, numbers = known.program, {}
        for name, parameter, value in zip(known.names, known.parameters, moved, strict=True):
            if name not in arrays:
                plain = value.item() if isinstance(value, np.generic) else value
                numbers[name] = checked_number(name, plain, parameter.dtype, parameter.span) if parameter.dtype else plain
        take = _memory(place.library, place.gpu.ordinal)
        program.run(arrays, converted(program.artifact, numbers), known.sizes, place.stream, take=take)  # type: ignore[arg-type]
        if place.split:
            place.gpu.order(place.outside or 0, place.stream)
        self.last = program.artifact
        if repeats is not None:
            self._teach(repeats, known, values, place.library, arrays)
        return True

    def _load(self, args: Sequence[SimtArg], config: Config, leaves: list[Leaf], gpu: CudaDevice, device: Device) -> _Loaded:
        overlaps = _overlaps(leaves)
        written = self.built(args, config).written if overlaps else frozenset()
        aliased = any(a in written or b in written for a, b in overlaps)
        values = {leaf.name: leaf.value for leaf in leaves}
        for a, b in overlaps:
            one, other = values[a], values[b]
            if aliased and isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and _identity(one) != _identity(other):
                raise UserError.at(
                    "TW018", f"'{a}' and '{b}' overlap in part and {self.source.name} writes to them", self.source.head(),
                    "give arrays that are the same or apart, or device arrays",
                )  # fmt: skip
        facts = Facts.of(leaves, config)
        key = (device.id, *self.key(args, config, aliased, facts=facts))
        found = self._loaded.get(key)
        if found is None:
            built = self.built(args, config, aliased, facts=facts)
            own = self.key(args, config, aliased, facts=facts)
            found = _Loaded(built, gpu.load(compile_simt(built.program, gpu.target)), aliased, own)
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
            readonly = (
                not value.flags.writeable if isinstance(value, np.ndarray) else isinstance(value, DeviceArray) and value.readonly
            )
            if readonly:
                raise UserError.at(
                    "TW018", f"'{leaf.name}' is read-only, but {self.source.name} writes to it", self.source.head()
                )

    # -- emulator -------------------------------------------------------------------------------------------------

    def _run_emulator(self, values: Sequence[object], config: Config, device: Device) -> None:
        from tilewright.compile.build import describe_program
        from tilewright.ir.emulator import run_kernel

        streams.refuse_in_capture(f"a launch on {device.id}", help="graphs of explicit kernels are captured on a GPU")
        leaves, args, back = host_leaves(self.parameters, values)
        config = replace(config, check=False)
        key = (device.id, *self.key(args, config))
        found = self._emulated.get(key)
        if is_stepping(self.source.name):
            stepped = self.built_with_steps(args, config)
            found = stepped, stepped.kernel
        elif found is None:
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


def _check_independent(built: BuiltKernel) -> None:
    """Raise the error for a kernel that is marked as vectorizable and is not."""
    for op in walk(built.kernel.body):
        shared = op.opcode == "alloc" and op.attrs.get("space") == "shared"
        if shared or op.opcode == "atomic" or OPS[op.opcode].effect == "sync":
            what = "shared memory" if shared else f"'{op.opcode}'"
            raise UserError.at(
                "TW012",
                f"{built.kernel.name} is marked @tw.vectorizable, but its threads meet in {what}",
                op.span,
                "drop the mark",
            )


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
        if _overlap(a.value, b.value)  # type: ignore[arg-type]
    ]
    hosted = [leaf for leaf in leaves if isinstance(leaf.value, np.ndarray)]
    return found + [(a.name, b.name) for i, a in enumerate(hosted) for b in hosted[i + 1 :] if _share(a.value, b.value)]
