"""How many blocks of an explicit kernel a multiprocessor holds at once, and which block size holds most.

In: a kernel, a block and arguments like those of a launch (none where annotations say all). Out: an `Occupancy`. The registers come from
the GPU's driver, or from NVIDIA's assembler where there is no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tilewright.base.artifact import Artifact
from tilewright.base.errors import DeviceError, TargetLimit, UserError
from tilewright.base.occupancy import Occupancy
from tilewright.base.occupancy import occupancy as blocks_held
from tilewright.base.target import Target, parse_target
from tilewright.execute.devices import array_device, devices, find_device

if TYPE_CHECKING:
    from tilewright.execute.simt.kernels import Extents, GpuKernel

_BLOCKS = (1024, 768, 512, 384, 256, 192, 128, 96, 64, 32)
"""Sizes that are tried; of equals those near the middle are preferred, which leave the scheduler some choice."""


def occupancy(kernel: GpuKernel[...], block: Extents, *args: object, shared: int = 0, device: str | None = None) -> Occupancy:
    """Blocks and warps of the kernel that one multiprocessor holds. `device` is a GPU's name or a target such as `sm_90a`."""
    target = _target(device)
    launch = kernel[1, block, shared]
    artifact = launch.compile(*(args or _typical(kernel)), target=target.name)
    rule = artifact.launches[0]
    registers, static = _resources(artifact, target)
    found = blocks_held(target, rule.threads, registers, static + rule.shared_bytes)
    if found is None:
        raise TargetLimit.at("TW020", f"{target.name} has no multiprocessors", kernel.span)
    return found


def best_block(kernel: GpuKernel[...], *args: object, shared: int = 0, device: str | None = None) -> int:
    """The number of threads (along x) with which most warps of the kernel run at once on a multiprocessor."""
    limit = kernel.max_threads or 1024
    ranked: list[tuple[float, int, int]] = []
    for threads in _BLOCKS:
        if threads > limit:
            continue
        try:
            found = occupancy(kernel, threads, *args, shared=shared, device=device)
        except TargetLimit:
            continue  # too much shared memory or too many registers at this size
        ranked.append((found.fraction, -abs(threads - 256), threads))
    if not ranked:
        raise TargetLimit.at("TW020", f"no block of {kernel.__name__} fits a multiprocessor", kernel.span)
    return max(ranked)[2]


def _target(device: str | None) -> Target:
    if device is None:
        chosen = find_device("auto")
        return chosen.target if chosen.target.is_gpu else parse_target("sm_90a")
    if device.startswith("sm_"):
        return parse_target(device)
    chosen = find_device(device)
    if not chosen.target.is_gpu:
        raise UserError.at("TW009", f"occupancy is of GPUs, not of '{device}'", help="name a GPU, or a target such as 'sm_90a'")
    return chosen.target


def _typical(kernel: GpuKernel[...]) -> list[object]:
    """Arguments of the annotated types."""
    values: list[object] = []
    for parameter in kernel.parameters:
        if parameter.form == "buffer" and parameter.dtype is not None:
            values.append(np.zeros(16, parameter.dtype.numpy))
        elif parameter.form == "number" and parameter.dtype is not None:
            values.append(parameter.dtype(0))
        else:
            raise UserError.at(
                "TW008", f"occupancy of {kernel.__name__}: the annotation of '{parameter.name}' does not say its type", parameter.span,
                "give arguments like those of a launch",
            )  # fmt: skip
    return values


def _resources(artifact: Artifact, target: Target) -> tuple[int, int]:
    """Registers of a thread and static shared memory of a block."""
    rule = artifact.launches[0]
    for device in devices():
        if device.target.name == target.name and array_device(device) is not None:
            found = device.runtime.load(artifact).resources(rule.entry)
            return found.registers, found.shared_bytes
    from tilewright.codegen.nvptx.ptxas import INSTALL, assemble

    assembled = assemble(artifact.code.decode(), target.name)
    if assembled is None:
        raise DeviceError.at(
            "TW030", f"the registers of {artifact.name} on {target.name} are not known: there is neither such a GPU nor ptxas", help=INSTALL
        )
    one = assembled[rule.entry]
    return one.registers, one.shared_bytes
