"""Running explicit kernels: what was built for one kernel, and its launches on every device.

In: the values of all parameters, how to launch, and a device. Out: nothing; arrays are written in place. Code is kept by the types of
the arguments, the block, the axes of the grid, the dynamic shared memory and whether arrays overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tilewright.base.artifact import Artifact
from tilewright.base.errors import TargetLimit, UserError
from tilewright.base.occupancy import occupancy
from tilewright.base.sizes import product
from tilewright.base.target import DEFAULT_NVPTX, NVPTX, Target
from tilewright.compile.simt import compile_simt
from tilewright.execute.calls.arguments import element_strides
from tilewright.execute.calls.checks import bind_sizes
from tilewright.execute.calls.outputs import keep
from tilewright.execute.device import Device
from tilewright.execute.kinds import kind_of
from tilewright.execute.simt.arguments import Leaf
from tilewright.execute.simt.checks import with_checks
from tilewright.execute.simt.config import LaunchConfig
from tilewright.execute.simt.host import launch_sizes
from tilewright.execute.simt.launches import Facts, KernelLaunches, Key, Repeats, vendor_of
from tilewright.frontend.simt.build import LaunchShape
from tilewright.frontend.simt.kernels import BuiltKernel, Parameter, SimtArg, build_kernel, read_parameters
from tilewright.frontend.simt.source import FunctionSource, alternative, read_source
from tilewright.frontend.simt.words_matrix import matrix_depth
from tilewright.ir.nodes import Attr, Op, walk
from tilewright.ir.ops import OPS
from tilewright.ir.types import Tensor
from tilewright.passes.late.bounds_checks import Site
from tilewright.runtime.core import observe
from tilewright.runtime.memory.device_array import DeviceArray


class SimtRunner:
    """One kernel on all devices."""

    def __init__(
        self, function: Callable[..., object], source: FunctionSource, parameters: Sequence[Parameter], attrs: Mapping[str, Attr],
        independent: bool = False,
    ) -> None:  # fmt: skip
        self.function, self.source, self.parameters, self.attrs = function, source, parameters, dict(attrs)
        self.independent = independent
        self._built: dict[Key, BuiltKernel] = {}
        self.plain = all(parameter.kind is None for parameter in parameters)
        """Whether there are no structs among its parameters."""
        self.launches: dict[str, KernelLaunches] = {}
        """By kind of device."""
        self.sites: dict[Key, tuple[Site, ...]] = {}
        """Of kernels with checks: what a failure can name."""
        self.last: Artifact | None = None

    # -- building -------------------------------------------------------------------------------------------------

    def key(
        self, args: Sequence[SimtArg], config: LaunchConfig, aliased: bool = False, vendor: str = "nvidia", facts: Facts | None = None,
        target: Target = NVPTX[DEFAULT_NVPTX],
    ) -> Key:  # fmt: skip
        """All that code is made for."""
        return (
            tuple(args),
            config.block,
            config.rank,
            config.shared_bytes,
            bool(config.count),
            config.check,
            config.asserts,
            aliased,
            vendor,
            facts,
            target.simt_warp,
            matrix_depth(target),
        )

    def built(
        self, args: Sequence[SimtArg], config: LaunchConfig, aliased: bool = False, vendor: str = "nvidia", facts: Facts | None = None,
        target: Target = NVPTX[DEFAULT_NVPTX],
    ) -> BuiltKernel:  # fmt: skip
        """The thread-stage kernel for these arguments and this launch. `vendor` chooses between alternatives: nvidia, amd or cpu.
        `target` says how large warps are."""
        key = self.key(args, config, aliased, vendor, facts, target)
        found = self._built.get(key)
        if found is None:
            attrs = dict(self.attrs)
            cluster = attrs.get("cluster", 1)
            assert isinstance(cluster, int)
            launch = LaunchShape(config.block, config.rank, config.shared_bytes, bool(config.count), vendor, cluster, target=target)
            if aliased:
                attrs |= {"aliased": True, "noalias": False}
            if config.asserts:
                attrs["asserts"] = True
            if facts is not None and facts.small:
                attrs["small"] = True
            alike = dict(facts.alike) if facts is not None else {}
            found = build_kernel(self._source_for(vendor), self.parameters, args, launch, attrs, alike)
            if target.is_gpu:
                self._check_limits(found, config, target)
            if self.independent:
                _check_independent(found)
            if config.check:
                found, self.sites[key] = with_checks(found)
            keep(self._built, key, found)
        return found

    def _check_limits(self, built: BuiltKernel, config: LaunchConfig, target: Target) -> None:
        """What the decorator asks of a multiprocessor must fit it, whatever the compiler does."""
        wanted = self.attrs.get("min_blocks")
        name, span = self.source.name, self.source.head()
        if isinstance(wanted, int):
            static = sum(_shared_bytes(op) for op in walk(built.kernel.body))
            room = occupancy(target, config.threads, 0, static + config.shared_bytes)
            if room is not None and room.blocks < wanted:
                raise TargetLimit.at(
                    "TW020", f"{name} has min_blocks={wanted}, but a multiprocessor of {target.name} holds {room.blocks} block(s) of {config.threads} "
                    f"threads and {static + config.shared_bytes} bytes of shared memory, limited by {' and '.join(room.limits)}",
                    span, f"ask for min_blocks={room.blocks} at most, or launch smaller blocks" if room.blocks else "launch smaller blocks",
                )  # fmt: skip

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

    def built_with_steps(self, args: Sequence[SimtArg], config: LaunchConfig) -> BuiltKernel:
        """The kernel with a `step` before each statement, for the debugger."""
        cluster = self.attrs.get("cluster", 1)
        assert isinstance(cluster, int)
        launch = LaunchShape(config.block, config.rank, config.shared_bytes, bool(config.count), cluster=cluster, steps=True)
        return build_kernel(self._source_for("nvidia"), self.parameters, args, launch, dict(self.attrs))

    def compile(self, leaves: Sequence[Leaf], args: Sequence[SimtArg], config: LaunchConfig, target: Target) -> Artifact:
        """The artifact of a launch with these arguments."""
        facts = Facts.of(leaves, config) if target.is_gpu else None
        return compile_simt(self.built(args, config, vendor=vendor_of(target), facts=facts, target=target).program, target)

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, values: Sequence[object], config: LaunchConfig, device: Device, repeats: Repeats | None = None) -> None:
        """Launch. `repeats` learns from launches what the next ones need not look at."""
        watcher = observe.observer
        if watcher is None:
            self._run(values, config, device, repeats)
            return
        with watcher.call(self.source, device.id) as record:
            self._run(values, config, device, repeats)
        record.kernels = 1

    def _run(self, values: Sequence[object], config: LaunchConfig, device: Device, repeats: Repeats | None) -> None:
        launches = self.launches.get(device.kind)
        if launches is None:
            launches = self.launches[device.kind] = kind_of(device).launches(self)
        launches.run(values, config, device, repeats)

    def sizes(self, artifact: Artifact, arrays: Mapping[str, np.ndarray | DeviceArray], config: LaunchConfig) -> dict[str, int]:
        shapes = {name: array.shape for name, array in arrays.items()}
        strides = {name: element_strides(array) for name, array in arrays.items()}
        sizes = bind_sizes(artifact, shapes, strides, self.source.head())
        return sizes | launch_sizes(config)

    def check_written(self, leaves: Sequence[Leaf], written: frozenset[str]) -> None:
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


def _shared_bytes(op: Op) -> int:
    """Bytes of shared memory that an op takes for a block."""
    if op.opcode != "alloc" or op.attrs.get("space") != "shared":
        return 0
    memory = op.result.type
    assert isinstance(memory, Tensor)
    count = product(memory.shape).constant
    return 0 if count is None else count * memory.dtype.itemsize


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
