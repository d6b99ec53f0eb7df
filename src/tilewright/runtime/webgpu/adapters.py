"""The GPUs that WebGPU finds on this machine. In: nothing; out: adapters with their targets, or why there are none.

wgpu-py is an extra (`pip install tilewright[webgpu]`) and is imported when somebody asks for a device. An adapter through OpenGL is left out where the
same chip is there through Vulkan, Metal or Direct3D. The target of an adapter is the record `wgsl` with the adapter's own limits.
"""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import replace
from typing import Any

from tilewright.base.record import record
from tilewright.base.target import PORTABLE, Target
from tilewright.runtime.portable.drivers import most_turns, without_windows

_MOST_BINDING = (1 << 31) - 4
_LIMITS = (
    "max-buffer-size", "max-storage-buffer-binding-size", "max-storage-buffers-per-shader-stage", "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup", "max-compute-workgroup-size-x",
)  # fmt: skip
"""What is asked for above the least that every implementation has."""
_FEATURES = {"shader-f16": "f16"}
"""What is asked for where it is there, and the target's word for it."""


@record(identity=True)
class FoundAdapter:
    """An adapter of wgpu-py, and what it can do."""

    adapter: Any
    name: str
    api: str
    software: bool
    target: Target
    limits: dict[str, int]
    """What a device is asked for."""
    features: list[str]
    """The same of what not every implementation has."""
    binding: int
    """Bytes of the largest array that a kernel can be given."""


@functools.cache
def adapters(pid: int = 0) -> tuple[tuple[FoundAdapter, ...], str]:
    """The adapters, and why there are none."""
    try:
        wgpu = importlib.import_module("wgpu")
    except ImportError as error:
        return (), f"wgpu is not installed (pip install tilewright[webgpu]): {error}"
    except OSError as error:
        return (), f"wgpu cannot be loaded: {error}"
    # It warns of what a driver lacks that no kernel needs.
    logging.getLogger("wgpu").setLevel(logging.ERROR)
    try:
        with without_windows():
            found = [_read(adapter) for adapter in wgpu.gpu.enumerate_adapters_sync()]
    except Exception as error:  # a loader or driver that fails is the same as none
        return (), f"wgpu finds no adapter: {error}"
    native = {one.name for one in found if one.api != "OpenGL"}
    found = [one for one in found if one.api != "OpenGL" or one.name not in native]
    found.sort(key=lambda one: one.software)
    return tuple(found), "" if found else "wgpu finds no adapter (a Vulkan driver such as mesa-vulkan-drivers is needed)"


def _read(adapter: Any) -> FoundAdapter:
    info = adapter.info
    limits = {name: int(adapter.limits[name]) for name in _LIMITS}
    limits["max-buffer-size"] = min(limits["max-buffer-size"], _MOST_BINDING)
    limits["max-storage-buffer-binding-size"] = min(limits["max-storage-buffer-binding-size"], _MOST_BINDING)
    threads = min(limits["max-compute-invocations-per-workgroup"], limits["max-compute-workgroup-size-x"])
    software = str(info["adapter_type"]) == "CPU"
    features = [name for name in _FEATURES if name in adapter.features]
    name = str(info["device"] or info["description"] or info["vendor"])
    target = replace(
        PORTABLE["wgsl"], max_threads=min(threads, 1024), max_shared=limits["max-compute-workgroup-storage-size"],
        max_arrays=limits["max-storage-buffers-per-shader-stage"], max_turns=most_turns(name), features=PORTABLE["wgsl"].features | {_FEATURES[name] for name in features} | ({"serial"} if software else set()),
        soft_casts=PORTABLE["wgsl"].soft_casts - {_FEATURES[name] for name in features},
    )  # fmt: skip
    binding = min(limits["max-storage-buffer-binding-size"], limits["max-buffer-size"])
    return FoundAdapter(adapter, name, str(info["backend_type"]), software, target, limits, features, binding)
