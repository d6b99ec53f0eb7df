"""Vulkan's caches of pipelines, kept on disk. In: a device and a module; out: a cache that holds what the driver made of the module before, and its file renewed.

The driver's version and the UUID of its caches are part of the file's name (`runtime/portable/driver_files.py`), and the driver looks at the data's header itself:
data that it does not know it leaves. The package `vulkan` wraps all calls but the one that reads a cache, which is called by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilewright.runtime.portable import driver_files
from tilewright.runtime.vulkan.driver import Physical

_HEADER = 32
"""Bytes of a cache that holds nothing."""


@contextmanager
def pipeline_cache(vk: Any, device: Any, physical: Physical, code: bytes) -> Iterator[Any]:
    """A cache for the pipelines of a module; what it holds in the end is kept."""
    properties = vk.vkGetPhysicalDeviceProperties(physical.handle)
    uuid = bytes(properties.pipelineCacheUUID).hex()
    driver = f"vulkan | {physical.name} | {properties.vendorID} | {properties.driverVersion} | {uuid}"
    before = driver_files.kept(driver, code) or b""
    given = vk.ffi.from_buffer(before) if before else None
    cache = vk.vkCreatePipelineCache(device, vk.VkPipelineCacheCreateInfo(initialDataSize=len(before), pInitialData=given), None)
    try:
        yield cache
        after = _data(vk, device, cache)
        if len(after) > _HEADER and after != before:
            driver_files.keep(driver, code, after)
    finally:
        vk.vkDestroyPipelineCache(device, cache, None)


def _data(vk: Any, device: Any, cache: Any) -> bytes:
    """What a cache holds; nothing where the driver does not say."""
    size = vk.ffi.new("size_t *")
    if vk.lib.vkGetPipelineCacheData(device, cache, size, vk.ffi.NULL) or not size[0]:
        return b""
    data = vk.ffi.new("char[]", size[0])
    if vk.lib.vkGetPipelineCacheData(device, cache, size, data):
        return b""
    return bytes(vk.ffi.buffer(data, size[0]))
