"""Vulkan as the rest of the runtime sees it: physical devices with what they have, and a logical device for one.

In: the package `vulkan`; out: `Physical` records, and a device with a queue. A device must have memory addresses in shaders, integers of 8, 16 and 64 bits
and timeline semaphores (all are of Vulkan 1.2, which every driver for desktops has had since 2020); what else it has, its target says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewright.base.limits import Limits
from tilewright.base.record import record
from tilewright.base.target import PORTABLE, Target
from tilewright.runtime.portable.drivers import most_turns

VERSION = (1 << 22) | (2 << 12)
_NEEDED_12 = ("bufferDeviceAddress", "timelineSemaphore", "shaderInt8", "storageBuffer8BitAccess")
_NEEDED_11 = ("storageBuffer16BitAccess",)
_NEEDED = ("shaderInt64", "shaderInt16")
_CPU = 4
_EACH_ALONE, _NONE_ALONE = 1, 2
"""Whether floats of 16, 32 and 64 bits may have modes of their own."""


@record
class Physical:
    """One physical device."""

    handle: Any
    name: str
    is_cpu: bool
    family: int
    """The family of queues that compute."""
    missing: tuple[str, ...]
    """Features without which it cannot run our code."""
    features: tuple[str, ...]
    """Those it has that are optional."""
    limits: Limits
    period: float
    """Nanoseconds of one tick of its clock."""
    largest: int
    """Bytes of one allocation."""
    memory: int
    """Bytes of its own memory."""
    target: Target


def physical_devices(vk: Any, instance: Any, cores: int) -> list[Physical]:
    """What the instance finds."""
    return [_describe(vk, handle, cores) for handle in vk.vkEnumeratePhysicalDevices(instance)]


def make_instance(vk: Any) -> Any:
    application = vk.VkApplicationInfo(pApplicationName="tilewright", applicationVersion=1, pEngineName="tilewright", engineVersion=1, apiVersion=VERSION)
    return vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=application), None)


def _describe(vk: Any, handle: Any, cores: int) -> Physical:
    properties = vk.vkGetPhysicalDeviceProperties(handle)
    limits = properties.limits
    twelve = vk.VkPhysicalDeviceVulkan12Features()
    eleven = vk.VkPhysicalDeviceVulkan11Features(pNext=twelve)
    base = vk.VkPhysicalDeviceFeatures2(pNext=eleven)
    controls = vk.VkPhysicalDeviceVulkan12Properties()
    maintenance = vk.VkPhysicalDeviceVulkan11Properties(pNext=controls)
    old = properties.apiVersion < VERSION
    if not old:
        vk.vkGetPhysicalDeviceFeatures2(handle, base)
        vk.vkGetPhysicalDeviceProperties2(handle, vk.VkPhysicalDeviceProperties2(pNext=maintenance))
    lists = ((twelve, _NEEDED_12), (eleven, _NEEDED_11), (base.features, _NEEDED))
    missing = ("Vulkan 1.2",) if old else tuple(name for one, names in lists for name in names if not getattr(one, name))
    families = vk.vkGetPhysicalDeviceQueueFamilyProperties(handle)
    family = next((k for k, f in enumerate(families) if f.queueFlags & vk.VK_QUEUE_COMPUTE_BIT), -1)
    if family < 0:
        missing = (*missing, "a queue that computes")
    optional = [name for name in ("shaderBufferInt64Atomics", "shaderSharedInt64Atomics") if getattr(twelve, name)]
    optional += ["shaderFloat64"] if base.features.shaderFloat64 else []
    f64 = bool(base.features.shaderFloat64)
    # Conversions to f16 that round to nearest, besides any rounding of f32 (f16 and f64 may share theirs).
    rounds = controls.shaderRoundingModeRTEFloat16 and (controls.shaderRoundingModeRTEFloat64 or not f64) and controls.roundingModeIndependence != _NONE_ALONE
    halves = ["shaderFloat16"] if twelve.shaderFloat16 and rounds and not old else []
    small = ["f16", *(["f16.denormals"] if controls.shaderDenormPreserveFloat16 and controls.denormBehaviorIndependence == _EACH_ALONE else [])] if halves else []
    optional += halves
    keeps = bool(controls.shaderSignedZeroInfNanPreserveFloat32)
    heaps = vk.vkGetPhysicalDeviceMemoryProperties(handle)
    memory = max(heaps.memoryHeaps[k].size for k in range(heaps.memoryHeapCount))
    is_cpu = properties.deviceType == _CPU
    name = properties.deviceName if isinstance(properties.deviceName, str) else vk.ffi.string(properties.deviceName).decode()
    most = limits.maxComputeWorkGroupCount
    target = replace(
        PORTABLE["spirv-vulkan"], max_threads=min(int(limits.maxComputeWorkGroupInvocations), 256), max_shared=int(limits.maxComputeSharedMemorySize),
        shared_per_sm=int(limits.maxComputeSharedMemorySize), max_grid=(2**31 - 1, int(most[1]), int(most[2])),
        multiprocessors=cores if is_cpu else PORTABLE["spirv-vulkan"].multiprocessors, features=frozenset({"tiles", *small, *(("preserve",) if keeps else ()), *(("serial",) if is_cpu else ())}),
        atomic_bits=frozenset({32, 64} if len([n for n in optional if "64Atomics" in n]) == 2 else {32}),
        missing_dtypes=frozenset() if f64 else frozenset({"f64"}), soft_casts=PORTABLE["spirv-vulkan"].soft_casts - ({"f16"} if halves else set()), max_turns=most_turns(name),
    )  # fmt: skip
    largest = int(maintenance.maxMemoryAllocationSize) or 1 << 30
    block = limits.maxComputeWorkGroupSize
    plain = Limits(
        threads_per_block=target.max_threads, block=(int(block[0]), int(block[1]), int(block[2])), grid=(int(most[0]), int(most[1]), int(most[2])),
        warp_size=target.warp_size, shared_per_block=int(limits.maxComputeSharedMemorySize), vector_bytes=target.vector_bytes,
    )  # fmt: skip
    period = float(limits.timestampPeriod)
    return Physical(handle, name, is_cpu, family, missing, tuple(optional), plain, period, largest, int(memory), target)


def make_device(vk: Any, physical: Physical) -> tuple[Any, Any]:
    """A logical device, and its queue."""
    has = dict.fromkeys(physical.features, True)
    twelve = vk.VkPhysicalDeviceVulkan12Features(
        **dict.fromkeys(_NEEDED_12, True), **{name: True for name in has if name == "shaderFloat16" or "64Atomics" in name}
    )
    eleven = vk.VkPhysicalDeviceVulkan11Features(pNext=twelve, **dict.fromkeys(_NEEDED_11, True))
    plain = vk.VkPhysicalDeviceFeatures(**dict.fromkeys(_NEEDED, True), shaderFloat64="shaderFloat64" in has)
    queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=physical.family, queueCount=1, pQueuePriorities=[1.0])
    made = vk.VkDeviceCreateInfo(pNext=vk.VkPhysicalDeviceFeatures2(pNext=eleven, features=plain), pQueueCreateInfos=[queue])
    device = vk.vkCreateDevice(physical.handle, made, None)
    return device, vk.vkGetDeviceQueue(device, physical.family, 0)
