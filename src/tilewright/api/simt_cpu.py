"""Explicit kernels on the CPU: their threads are lanes of SIMD registers, their blocks are spread over the cores.

In: a kernel's runner, the values of its parameters, how to launch and a CPU, or a part of its cores. Out: nothing; arrays are written in
place. A launch returns when it is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tilewright.api.outputs import converted, keep
from tilewright.api.simt_checks import FAILURE, new_failure, raise_failure
from tilewright.api.simt_host import copy_back, host_leaves, launch_sizes
from tilewright.base.errors import UserError
from tilewright.compile.simt import compile_simt
from tilewright.runtime import cpu, cpu_pool, streams
from tilewright.runtime.device_array import DeviceArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewright.api.devices import Device
    from tilewright.api.simt import Config
    from tilewright.api.simt_run import SimtRunner


def run_cpu(runner: SimtRunner, values: Sequence[object], config: Config, device: Device) -> None:
    """Launch the kernel."""
    streams.refuse_in_capture(f"a launch on {device.id}", help="graphs of explicit kernels are captured on a GPU")
    if config.stream is not None:
        raise UserError.at("TW016", f"{runner.source.name} runs on {device.id}, which takes no stream", runner.source.head())
    leaves, args, back = host_leaves(runner.parameters, values)
    arrays = {leaf.name: leaf.value for leaf in leaves if isinstance(leaf.value, np.ndarray)}
    built = runner.built(args, config, vendor="cpu")
    runner._check_written(leaves, built.written)
    aliased = any(_overlap(array, name, arrays) for name, array in arrays.items() if name in built.written)
    if aliased:
        built = runner.built(args, config, True, "cpu")
    key = (device.id, *runner.key(args, config, aliased, "cpu"))
    program = runner.on_cpu.get(key)
    if program is None:
        program = cpu.load(compile_simt(built.program, device.target))
        keep(runner.on_cpu, key, program)
    artifact = runner.last = program.artifact
    if config.check:
        arrays[FAILURE] = new_failure()
    numbers = {leaf.name: leaf.value for leaf in leaves if not isinstance(leaf.value, np.ndarray | DeviceArray)}
    sizes = runner._sizes(artifact, arrays, config)
    if 0 not in config.grid:
        pool = cpu_pool.partition(*device.partition) if device.partition is not None else None
        program.run(arrays, converted(artifact, numbers), pool, launch_sizes(config) | sizes)
    copy_back(back, arrays, built.written)
    if config.check:
        raise_failure(arrays[FAILURE], runner.sites[runner.key(args, config, aliased, "cpu")], built.kernel, config.grid)


def _overlap(array: np.ndarray, name: str, others: dict[str, np.ndarray]) -> bool:
    """Whether an array shares memory with another argument."""
    return any(np.may_share_memory(array, other) for other_name, other in others.items() if other_name != name)
