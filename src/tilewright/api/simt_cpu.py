"""Explicit kernels on the CPU: their threads are lanes of SIMD registers, their blocks are spread over the cores.

In: a kernel's runner, the values of its parameters, how to launch and a CPU, or a part of its cores. Out: nothing; arrays are written in
place. A launch returns when it is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tilewright.api.outputs import converted, keep
from tilewright.api.simt_checks import FAILURE, new_failure
from tilewright.base.errors import UserError
from tilewright.compile.simt import compile_simt
from tilewright.runtime import cpu, cpu_pool, streams
from tilewright.runtime.device_array import DeviceArray

if TYPE_CHECKING:
    from tilewright.api.devices import Device
    from tilewright.api.simt import Config
    from tilewright.api.simt_arguments import Leaf
    from tilewright.api.simt_run import SimtRunner
    from tilewright.frontend.simt import BuiltKernel, SimtArg


def run_cpu(
    runner: SimtRunner, leaves: Sequence[Leaf], args: Sequence[SimtArg], config: Config, launch_sizes: Mapping[str, int], device: Device
) -> tuple[dict[str, np.ndarray], BuiltKernel, tuple[object, ...]]:
    """Launch the kernel; gives its arrays by name, what was built, and the runner's key of that."""
    streams.refuse_in_capture(f"a launch on {device.id}", help="graphs of explicit kernels are captured on a GPU")
    if config.stream is not None:
        raise UserError.at("TW016", f"{runner.source.name} runs on {device.id}, which takes no stream", runner.source.head())
    arrays = {leaf.name: leaf.value for leaf in leaves if isinstance(leaf.value, np.ndarray)}
    overlaps = _overlaps(arrays)
    key = (device.id, overlaps, *runner.key(args, config, False, "cpu"))
    found = runner.on_cpu.get(key)
    if found is None:
        built = runner.built(args, config, vendor="cpu")
        aliased = any(a in built.written or b in built.written for a, b in overlaps)
        built = runner.built(args, config, aliased, "cpu")
        found = cpu.load(compile_simt(built.program, device.target)), built, runner.key(args, config, aliased, "cpu")
        keep(runner.on_cpu, key, found)
    program, built, own = found
    runner._check_written(leaves, built.written)
    artifact = runner.last = program.artifact
    if config.check:
        arrays[FAILURE] = new_failure()
    numbers = {leaf.name: leaf.value for leaf in leaves if not isinstance(leaf.value, np.ndarray | DeviceArray)}
    sizes = runner._sizes(artifact, arrays, config)
    if 0 not in config.grid:
        pool = cpu_pool.partition(*device.partition) if device.partition is not None else None
        program.run(arrays, converted(artifact, numbers), pool, {**sizes, **launch_sizes})
    return arrays, built, own


def _overlaps(arrays: Mapping[str, np.ndarray]) -> tuple[tuple[str, str], ...]:
    """Pairs of arrays that share memory."""
    names = list(arrays)
    return tuple((a, b) for i, a in enumerate(names) for b in names[i + 1 :] if np.may_share_memory(arrays[a], arrays[b]))
