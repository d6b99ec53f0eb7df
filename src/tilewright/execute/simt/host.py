"""Arguments of explicit kernels in host memory, for launches on the emulator and on the CPU.

In: the values of a launch, on any device. Out: leaves that are NumPy arrays and numbers; what the kernel wrote in a copy goes back to
where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tilewright.execute.simt.arguments import Leaf, read_leaves, split_values
from tilewright.execute.simt.config import LaunchConfig
from tilewright.execute.simt.memory import check_alive
from tilewright.execute.stream_place import is_on_device
from tilewright.frontend.simt.build import COUNT, GRID
from tilewright.frontend.simt.kernels import Parameter, SimtArg
from tilewright.runtime.exchange.host_tensors import as_tensor
from tilewright.runtime.exchange.imports import from_dlpack
from tilewright.runtime.exchange.libraries import is_tensor
from tilewright.runtime.memory.device_array import DeviceArray


def launch_sizes(config: LaunchConfig) -> dict[str, int]:
    """The sizes that a launch gives."""
    return {**dict(zip(GRID, config.grid, strict=True)), COUNT: config.count}


Back = list[tuple[str, "DeviceArray | np.ndarray"]]


def host_leaves(parameters: Sequence[Parameter], values: Sequence[object]) -> tuple[list[Leaf], list[SimtArg], Back]:
    """Leaves in host memory, and the device arrays whose elements were copied there."""
    given = split_values(parameters, values)
    for part in given:
        check_alive(part.value)
    parts = [replace(part, value=_on_host(part.value)) for part in given]
    leaves, args = read_leaves(parameters, parts, gpu=False)
    back: Back = []
    for leaf, part, before in zip(leaves, parts, given, strict=True):
        if not isinstance(leaf.value, np.ndarray):
            continue
        if part.value is not before.value and is_on_device(before.value):
            back.append((leaf.name, before.value))  # type: ignore[arg-type]
        elif isinstance(part.value, np.ndarray) and leaf.value.size and not np.may_share_memory(part.value, leaf.value):
            back.append((leaf.name, part.value))
    return leaves, args, back


def _on_host(value: object) -> object:
    if isinstance(value, DeviceArray):
        return value.numpy()
    if is_tensor(value):
        return from_dlpack(value.detach().cpu())  # type: ignore[attr-defined]
    return value.get() if is_on_device(value) and hasattr(value, "get") else value


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
            original.copy_(as_tensor(values))  # type: ignore[unreachable]
