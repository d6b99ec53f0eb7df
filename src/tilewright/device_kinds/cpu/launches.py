"""Explicit kernels on the CPU: their threads are lanes of SIMD registers, their blocks are spread over the cores.

In: the values of a kernel's parameters, how to launch and a CPU, or a part of its cores. Out: nothing; arrays are written in place. A launch
returns when it is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilewright.base.errors import UserError
from tilewright.codegen.host.interpreter import stubs_work
from tilewright.compile import tiers
from tilewright.compile.simt import compile_simt
from tilewright.device_kinds.cpu.quick_launches import LAUNCHES_BEFORE, QuickLaunch, can_be_quick
from tilewright.device_kinds.cpu.tiered import TieredPrograms
from tilewright.execute.calls.outputs import converted, keep
from tilewright.execute.device import Device
from tilewright.execute.simt.arguments import Leaf
from tilewright.execute.simt.checks import FAILURE, new_failure, raise_failure
from tilewright.execute.simt.config import LaunchConfig
from tilewright.execute.simt.host import copy_back, host_leaves, launch_sizes
from tilewright.execute.simt.launches import ExplicitSource, KernelLaunches, Key, Repeats
from tilewright.frontend.simt.kernels import BuiltKernel, SimtArg
from tilewright.runtime.core import streams
from tilewright.runtime.cpu import pool as cpu_pool
from tilewright.runtime.cpu import program as cpu
from tilewright.runtime.memory.device_array import DeviceArray


class CpuLaunches(KernelLaunches):
    """An explicit kernel on the CPU."""

    def __init__(self, kernel: ExplicitSource) -> None:
        super().__init__(kernel)
        self.programs: dict[Key, tuple[cpu.CpuProgram, BuiltKernel, Key]] = {}
        """With what was built, and under which key."""
        self._tiered: TieredPrograms | None = None
        """Programs that are compiled in tiers, where any are."""

    def run(self, values: Sequence[object], config: LaunchConfig, device: Device, repeats: Repeats | None) -> None:
        leaves, args, back = host_leaves(self.kernel.parameters, values)
        arrays, built, key = self._launch(leaves, args, config, device)
        copy_back(back, arrays, built.written)
        if config.check:
            raise_failure(arrays[FAILURE].tolist(), self.kernel.sites[key], built.kernel, config.grid)
        if repeats is not None and repeats.may_be_fast and not back and self.kernel.plain and device.partition is None and stubs_work():
            self._learn(repeats, args, config, device, built, key)

    def _learn(self, repeats: Repeats, args: Sequence[SimtArg], config: LaunchConfig, device: Device, built: BuiltKernel, key: Key) -> None:
        """Machine code for more launches like this one, once there were some."""
        place_of = (device.id, (), *self.kernel.key(args, config, False, "cpu"))
        found = self.programs.get(place_of)
        if self._tiered is not None and self._tiered.holds(place_of):
            return  # quick code is called through Python, where it is exchanged
        if found is None or found[2] != key or not can_be_quick(found[0].artifact, config):
            return
        if repeats.fast is not None and not isinstance(repeats.fast, QuickLaunch):
            return  # launches on a GPU are under way
        place = ("cpu", *key)
        made = repeats.calls.get(place)
        if isinstance(made, int | None) and (made or 0) < LAUNCHES_BEFORE:
            keep(repeats.calls, place, (made or 0) + 1)
            return
        if not isinstance(made, QuickLaunch):
            made = QuickLaunch(found[0].artifact, built, self.kernel.sites.get(key, ()), config)
            keep(repeats.calls, place, made)
        repeats.fast, repeats.by_default = made, True

    def _launch(
        self, leaves: Sequence[Leaf], args: Sequence[SimtArg], config: LaunchConfig, device: Device
    ) -> tuple[dict[str, np.ndarray], BuiltKernel, Key]:
        """Launch the kernel; gives its arrays by name, what was built, and the kernel's key of that."""
        kernel = self.kernel
        streams.refuse_in_capture(f"a launch on {device.id}", help="graphs of explicit kernels are captured on a GPU")
        if config.stream is not None:
            raise UserError.at("TW016", f"{kernel.source.name} runs on {device.id}, which takes no stream", kernel.source.head())
        arrays = {leaf.name: leaf.value for leaf in leaves if isinstance(leaf.value, np.ndarray)}
        overlaps = _overlaps(arrays)
        key = (device.id, overlaps, *kernel.key(args, config, False, "cpu"))
        found = self.programs.get(key)
        if found is None:
            built = kernel.built(args, config, vendor="cpu")
            aliased = any(a in built.written or b in built.written for a, b in overlaps)
            built = kernel.built(args, config, aliased, "cpu")
            found = self._loaded(key, built, device, kernel.key(args, config, aliased, "cpu"))
        elif self._tiered is not None:
            better = self._tiered.exchanged(key, found[0])
            if better is not found[0]:
                found = self.programs[key] = better, *found[1:]
        program, built, own = found
        kernel.check_written(leaves, built.written)
        artifact = kernel.last = program.artifact
        if config.check:
            arrays[FAILURE] = new_failure()
        scalars = {leaf.name: leaf.value for leaf in leaves if not isinstance(leaf.value, np.ndarray | DeviceArray)}
        sizes = kernel.sizes(artifact, arrays, config)
        if 0 not in config.grid:
            pool = cpu_pool.partition(*device.partition) if device.partition is not None else None
            program.run(arrays, converted(artifact, scalars), pool, {**sizes, **launch_sizes(config)})
        if self._tiered is not None:
            self._tiered.after_call()
        return arrays, built, own

    def _loaded(self, key: Key, built: BuiltKernel, device: Device, own: Key) -> tuple[cpu.CpuProgram, BuiltKernel, Key]:
        """The program for a first launch of its kind."""
        if not tiers.hold_explicit(built.program):
            found = cpu.load(compile_simt(built.program, device.target)), built, own
            keep(self.programs, key, found)
            return found
        self._tiered = self._tiered or TieredPrograms(self.kernel.source.name)
        program, tier = self._tiered.first(lambda: tiers.begin_explicit(built.program, device.target))
        with self._tiered.lock:
            if key in self.programs:
                return self.programs[key]  # another thread's, which may be the optimised one by now
            keep(self.programs, key, (program, built, own))
            if tier is not None:
                self._tiered.add(key, tier)
        return program, built, own


def _overlaps(arrays: Mapping[str, np.ndarray]) -> tuple[tuple[str, str], ...]:
    """Pairs of arrays that share memory."""
    names = list(arrays)
    return tuple((a, b) for i, a in enumerate(names) for b in names[i + 1 :] if np.may_share_memory(arrays[a], arrays[b]))
