"""Vulkan devices. In: what the package `vulkan` finds; out: devices with memory, streams, events and programs.

Kernels get addresses of memory and numbers, by push constants; where they are too many for those, from a piece of memory whose address is the one push
constant. Memory that the host sees is read and written where it is, once the work queued so far is done; other memory goes through a staging buffer.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.base.artifact import Artifact, Launch
from tilewright.base.dtypes import u8
from tilewright.base.errors import CompilerBug, DeviceError, UserError
from tilewright.base.limits import Limits
from tilewright.runtime.core.device import DeviceEvent
from tilewright.runtime.core.found import FoundDevices
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.portable.buffers import NumberedBuffers
from tilewright.runtime.portable.drivers import without_windows
from tilewright.runtime.portable.pooled import PooledDevice
from tilewright.runtime.portable.programs import Argument, PooledProgram
from tilewright.runtime.vulkan.commands import CommandQueue
from tilewright.runtime.vulkan.driver import Physical, make_device, make_instance, physical_devices
from tilewright.runtime.vulkan.pipeline_files import pipeline_cache

_PUSHED = 128
"""Bytes of push constants that code relies on (`codegen.spirv.emitter`)."""
_STAGED = 4 << 20
"""Bytes of the staging buffer."""
_DISPATCH_BASE = 0x10
"""Of a pipeline whose grid may begin at another block than the first."""
_ADDRESSED, _ADDRESSED_MEMORY = 0x20000, 2
"""Of buffers, and of memory, whose address kernels get. The package has no names for these three."""


class VulkanEvent(DeviceEvent):
    """A point in the queue."""

    __slots__ = ("_number", "_slot", "captured", "device", "stream", "timing")

    def __init__(self, device: VulkanDevice, timing: bool) -> None:
        self.device, self.timing, self.captured, self.stream = device, timing, False, 0
        self._number, self._slot = 0, -1

    def record(self, stream: int) -> VulkanEvent:
        self.stream = self.device.checked_stream(stream)
        if self.timing:
            self._slot, self._number = self.device.commands.stamp()
        else:
            self._number = self.device.number(stream)
        return self

    def done(self) -> bool:
        if self.device.commands.is_done(self._number):
            self.device.raise_reports()
            return True
        self.device.commands.flush()
        return False

    def synchronize(self) -> None:
        self.device.commands.wait(self._number)
        self.device.raise_reports()

    def milliseconds(self, start: Any) -> float:
        if not (self.timing and start.timing):
            raise UserError.at("TW033", "the time between events made with timing=False is not known")
        commands = self.device.commands
        return float(commands.time(self._slot) - commands.time(start._slot))


class _VulkanMemory:
    """One allocation: a buffer, its memory, and where the host sees it."""

    def __init__(self, buffer: Any, memory: Any, nbytes: int, view: np.ndarray | None) -> None:
        self.buffer, self.memory, self.nbytes, self.view = buffer, memory, nbytes, view


class VulkanDevice(PooledDevice):
    """One Vulkan device."""

    def __init__(self, vk: Any, physical: Physical, number: int) -> None:
        self.vk, self.physical = vk, physical
        self.id = f"vulkan:{number}"
        self.name = physical.name
        self.label = f"{self.id} ({physical.name})"
        self.target = physical.target
        self.staged = False
        """Whether memory is reached through the staging buffer though the host sees it; for tests."""
        self._lock = threading.RLock()
        self._memory = NumberedBuffers[_VulkanMemory]()
        self._streams: dict[int, int] = {0: 0}
        self._numbers = itertools.count(1)
        self.start()

    @cached_property
    def _made(self) -> tuple[Any, Any]:
        return make_device(self.vk, self.physical)

    @property
    def handle(self) -> Any:
        return self._made[0]

    @cached_property
    def commands(self) -> CommandQueue:
        device, queue = self._made
        return CommandQueue(self.vk, device, queue, self.physical.family, self.label, self.physical.period)

    @property
    def lost(self) -> str:
        return self.commands.lost if "commands" in self.__dict__ else ""

    def limits(self) -> Limits:
        return self.physical.limits

    def free_memory(self) -> tuple[int, int]:
        return self.physical.memory - self._memory.held, self.physical.memory

    # -- memory ---------------------------------------------------------------------------------------------------------

    def raw_allocate(self, nbytes: int) -> int:
        if nbytes > self.physical.largest:
            raise DeviceError.at("TW031", f"{self.label} gives at most {self.physical.largest} bytes at once, and {nbytes} were asked for")
        try:
            made = self._allocate(nbytes, visible=False)
        except (self.vk.VkErrorOutOfDeviceMemory, self.vk.VkErrorOutOfHostMemory):
            return 0
        vk = self.vk
        asked = vk.VkBufferDeviceAddressInfo(buffer=made.buffer)
        # The package's own function of that name forgets the answer.
        address = int(vk.lib.vkGetBufferDeviceAddress(self.handle, vk.ffi.addressof(asked)))
        return self._memory.add(made, nbytes, address)

    def _allocate(self, nbytes: int, visible: bool) -> _VulkanMemory:
        vk, device = self.vk, self.handle
        usage = vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        usage |= 0 if visible else _ADDRESSED
        buffer = vk.vkCreateBuffer(device, vk.VkBufferCreateInfo(size=nbytes, usage=usage, sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE), None)
        needs = vk.vkGetBufferMemoryRequirements(device, buffer)
        kind, mapped = self._memory_type(needs.memoryTypeBits, visible)
        extra = None if visible else vk.VkMemoryAllocateFlagsInfo(flags=_ADDRESSED_MEMORY)
        try:
            memory = vk.vkAllocateMemory(device, vk.VkMemoryAllocateInfo(pNext=extra, allocationSize=needs.size, memoryTypeIndex=kind), None)
        except vk.VkError:
            vk.vkDestroyBuffer(device, buffer, None)
            raise
        vk.vkBindBufferMemory(device, buffer, memory, 0)
        view = np.frombuffer(vk.vkMapMemory(device, memory, 0, nbytes, 0), np.uint8, nbytes) if mapped else None
        return _VulkanMemory(buffer, memory, nbytes, view)

    def _memory_type(self, allowed: int, visible: bool) -> tuple[int, bool]:
        """The kind of memory to take, and whether the host sees it."""
        vk = self.vk
        own, seen = vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | vk.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
        known = vk.vkGetPhysicalDeviceMemoryProperties(self.physical.handle)
        kinds = [(k, known.memoryTypes[k].propertyFlags, known.memoryHeaps[known.memoryTypes[k].heapIndex].size) for k in range(known.memoryTypeCount)]
        largest = max(size for _, flags, size in kinds if flags & own) if any(flags & own for _, flags, _ in kinds) else 0
        for wanted in ((seen,) if visible else (own | seen, own, seen)):
            for k, flags, size in kinds:
                if allowed >> k & 1 and flags & wanted == wanted and (visible or wanted != own | seen or size == largest):
                    return k, flags & seen == seen
        raise DeviceError.at("TW031", f"{self.label} has no memory that kernels and the host can use")

    def raw_free(self, pointers: list[int]) -> None:
        for pointer in pointers:
            self._release(self._memory.remove(pointer))

    def _release(self, made: _VulkanMemory) -> None:
        made.view = None
        self.vk.vkDestroyBuffer(self.handle, made.buffer, None)
        self.vk.vkFreeMemory(self.handle, made.memory, None)

    def locate(self, address: int) -> tuple[_VulkanMemory, int]:
        return self._memory.locate(address)

    @cached_property
    def _staging(self) -> _VulkanMemory:
        return self._allocate(_STAGED, visible=True)

    def send(self, address: int, octets: np.ndarray, stream: int) -> None:
        self._transfer(address, octets, to_host=False)

    def fetch(self, address: int, octets: np.ndarray, stream: int) -> None:
        self._transfer(address, octets, to_host=True)

    def _transfer(self, address: int, octets: np.ndarray, to_host: bool) -> None:
        if not octets.size:
            return
        self.check_alive()
        made, offset = self.locate(address)
        with self._lock:
            self.commands.wait_all()
            if made.view is not None and not self.staged:
                there = made.view[offset : offset + octets.size]
                np.copyto(octets, there) if to_host else np.copyto(there, octets)
                return
            staging = self._staging
            assert staging.view is not None
            for start in range(0, octets.size, _STAGED):
                part = octets[start : start + _STAGED]
                if not to_host:
                    staging.view[: part.size] = part
                ends = (made.buffer, staging.buffer) if to_host else (staging.buffer, made.buffer)
                places = (offset + start, 0) if to_host else (0, offset + start)
                self._copy(*ends, [(*places, part.size)])
                self.commands.wait_all()
                if to_host:
                    part[...] = staging.view[: part.size]

    def _copy(self, source: Any, target: Any, regions: Sequence[tuple[int, int, int]]) -> None:
        vk = self.vk
        made = [vk.VkBufferCopy(srcOffset=start, dstOffset=at, size=nbytes) for start, at, nbytes in regions]
        self.commands.record("a copy", lambda buffer: vk.vkCmdCopyBuffer(buffer, source, target, len(made), made))

    def move(self, runs: Sequence[tuple[int, int, int]], stream: int) -> None:
        self.check_alive()
        regions: dict[tuple[Any, Any], list[tuple[int, int, int]]] = {}
        for target, source, nbytes in runs:
            if target != source:
                (to, at), (origin, start) = self.locate(target), self.locate(source)
                regions.setdefault((origin.buffer, to.buffer), []).append((start, at, nbytes))
        for (origin, to), parts in regions.items():
            self._copy(origin, to, parts)
        self.note(stream)

    def repeat(self, address: int, pattern: bytes, nbytes: int, stream: int) -> None:
        vk = self.vk
        made, offset = self.locate(address)
        if offset % 4 or nbytes % 4:
            self.send(address, np.frombuffer(pattern * (nbytes // len(pattern)), np.uint8), stream)
            return
        word = int.from_bytes((pattern * 4)[:4], "little")
        self.commands.record("a fill", lambda buffer: vk.vkCmdFillBuffer(buffer, made.buffer, offset, nbytes, word))
        self.note(stream)

    # -- streams and events ---------------------------------------------------------------------------------------------

    def note(self, stream: int) -> None:
        """Something was queued on a stream."""
        self._streams[stream] = self.commands.submitted + 1

    def number(self, stream: int) -> int:
        """The submission that holds the last work of a stream."""
        return min(self._streams.get(stream, 0), self.commands.submitted + 1)

    def take_stream(self, priority: int = 0) -> int:
        stream = next(self._numbers)
        self._streams[stream] = 0
        return stream

    def return_stream(self, stream: int, priority: int = 0) -> None:
        return

    def checked_stream(self, stream: int) -> int:
        if stream not in self._streams:
            raise DeviceError.at("TW033", f"{self.label} has no stream {stream}")
        return stream

    def is_idle(self, stream: int) -> bool:
        self.commands.flush()
        return self.commands.is_done(min(self.number(stream), self.commands.submitted))

    def wait_for(self, stream: int) -> None:
        self.commands.wait_all()

    def order(self, later: int, earlier: int) -> None:
        return  # all streams share one queue, which runs in order

    def hold(self, stream: int, event: Any) -> None:
        assert isinstance(event, VulkanEvent)
        if event.device is not self:
            event.synchronize()

    def event(self, timing: bool = False) -> VulkanEvent:
        return VulkanEvent(self, timing)

    # -- programs -------------------------------------------------------------------------------------------------------

    def load(self, artifact: Artifact) -> VulkanProgram:
        return VulkanProgram(self, artifact)


class VulkanProgram(PooledProgram):
    """An artifact's kernels as pipelines."""

    device: VulkanDevice

    def __init__(self, device: VulkanDevice, artifact: Artifact) -> None:
        super().__init__(device, artifact, device.target)
        vk = device.vk
        try:
            module = vk.vkCreateShaderModule(device.handle, vk.VkShaderModuleCreateInfo(codeSize=len(artifact.code), pCode=artifact.code), None)
            with pipeline_cache(vk, device.handle, device.physical, artifact.code) as cache:
                by_entry = {one.entry: one for one in artifact.launches}
                made = {entry: self._pipeline(module, one, cache) for entry, one in by_entry.items()}
            self._pipelines = [made[one.entry] for one in artifact.launches]
            vk.vkDestroyShaderModule(device.handle, module, None)
        except vk.VkError as error:
            with tempfile.NamedTemporaryFile(prefix="tilewright-", suffix=".spv", delete=False) as file:
                file.write(artifact.code)
            raise CompilerBug.at(
                "TW040", f"{device.label} rejects the code of '{artifact.name}': {type(error).__name__}", help=f"please report this; the SPIR-V is in {file.name}"
            ) from error

    def _pipeline(self, module: Any, launch: Launch, cache: Any) -> tuple[Any, Any, int]:
        """The pipeline, its layout, and how many bytes are pushed."""
        vk, device = self.device.vk, self.device.handle
        count = 8 * (len(launch.args) + len(launch.sizes))
        pushed = max(8, count) if count <= _PUSHED else 8
        constants = vk.VkPushConstantRange(stageFlags=vk.VK_SHADER_STAGE_COMPUTE_BIT, offset=0, size=pushed)
        layout = vk.vkCreatePipelineLayout(device, vk.VkPipelineLayoutCreateInfo(pPushConstantRanges=[constants]), None)
        stage = vk.VkPipelineShaderStageCreateInfo(stage=vk.VK_SHADER_STAGE_COMPUTE_BIT, module=module, pName=launch.entry)
        made = vk.VkComputePipelineCreateInfo(flags=_DISPATCH_BASE, stage=stage, layout=layout)
        return vk.vkCreateComputePipelines(device, cache, 1, [made], None)[0], layout, pushed

    def launch(self, position: int, launch: Launch, grid: tuple[int, int, int], arguments: Sequence[Argument], sizes: Sequence[int], stream: int) -> None:
        device, vk = self.device, self.device.vk
        most = device.limits().grid
        if grid[1] > most[1] or grid[2] > most[2]:
            raise self.too_many_blocks(launch, grid, (2**31 - 1, most[1], most[2]))
        words = np.zeros(len(arguments) + len(sizes), np.uint64)
        for k, (dtype, value) in enumerate(arguments):
            if isinstance(value, DeviceArray):
                words[k] = value._pointer
            else:
                words[k : k + 1].view(np.uint8)[: dtype.itemsize] = np.array(value).astype(dtype.numpy).reshape(1).view(np.uint8)
        words[len(arguments) :] = np.array(sizes, np.int64).view(np.uint64)
        pipeline, layout, pushed = self._pipelines[position]
        octets = words.tobytes() or bytes(8)
        kept = device.empty((len(octets),), u8, stream) if len(octets) > _PUSHED else None
        if kept is not None:
            made, offset = device.locate(kept._pointer)
            given = octets
            device.commands.record("its arguments", lambda buffer: vk.vkCmdUpdateBuffer(buffer, made.buffer, offset, len(given), vk.ffi.from_buffer(given)))
            octets = np.array([kept._pointer], np.uint64).tobytes()

        def command(buffer: Any) -> None:
            vk.vkCmdBindPipeline(buffer, vk.VK_PIPELINE_BIND_POINT_COMPUTE, pipeline)
            vk.vkCmdPushConstants(buffer, layout, vk.VK_SHADER_STAGE_COMPUTE_BIT, 0, pushed, vk.ffi.from_buffer(octets))
            if grid[0] <= most[0]:
                vk.vkCmdDispatch(buffer, *grid)
                return
            for first in range(0, grid[0], most[0]):
                vk.vkCmdDispatchBase(buffer, first, 0, 0, min(most[0], grid[0] - first), grid[1], grid[2])

        device.commands.record(f"the launch of '{self.artifact.name}'", command)
        device.note(stream)


# -- finding devices ----------------------------------------------------------------------------------------------------


def _look() -> tuple[list[VulkanDevice], str]:
    """Those that can run our code, and why there are none."""
    try:
        import vulkan as vk  # type: ignore[import-untyped]
    except ImportError:
        return [], "the package vulkan is not installed; pip install 'tilewright[vulkan]'"
    except OSError as error:
        return [], f"there is no Vulkan loader: {error}"
    try:
        with without_windows():
            known = physical_devices(vk, make_instance(vk), os.cpu_count() or 1)
    except vk.VkError as error:
        return [], f"Vulkan finds no driver: {type(error).__name__}"
    # Real GPUs come before CPUs that stand in for one.
    able = sorted((one for one in known if not one.missing), key=lambda one: one.is_cpu)
    why = "" if able else "; ".join(f"{one.name} has no {', '.join(one.missing)}" for one in known) or "no Vulkan driver has a device"
    return [VulkanDevice(vk, one, number) for number, one in enumerate(able)], why


FOUND = FoundDevices(_look)
"""The Vulkan devices of this machine."""
