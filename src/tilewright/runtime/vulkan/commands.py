"""The queue of a Vulkan device. In: commands, one after the other; out: numbers that say how far the device has come.

Commands are recorded into a command buffer that is open, each behind a barrier after the one before, and submitted together: at once where the device
has nothing to do, else when there are several or somebody waits. A submission has a number, which a timeline semaphore reaches when it is done. Streams
share the queue, so that all their work runs in the order in which it was queued.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from tilewright.base.errors import DeviceError, TilewrightError
from tilewright.runtime.portable.waits import limit, timed_out

_TOGETHER = 32
"""Commands that are submitted at once while the device is busy."""
_STAMPS = 1024


class CommandQueue:
    """Records and submits commands."""

    def __init__(self, vk: Any, device: Any, queue: Any, family: int, label: str, period: float) -> None:
        self.vk, self.device, self.queue, self.label, self.period = vk, device, queue, label, period
        self.lock = threading.RLock()
        self.lost = ""
        flags = vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
        self._pool = vk.vkCreateCommandPool(device, vk.VkCommandPoolCreateInfo(flags=flags, queueFamilyIndex=family), None)
        kind = vk.VkSemaphoreTypeCreateInfo(semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE, initialValue=0)
        self._semaphore = vk.vkCreateSemaphore(device, vk.VkSemaphoreCreateInfo(pNext=kind), None)
        queries = vk.VkQueryPoolCreateInfo(queryType=vk.VK_QUERY_TYPE_TIMESTAMP, queryCount=_STAMPS)
        self._stamps = vk.vkCreateQueryPool(device, queries, None)
        self._next_stamp = 0
        every = vk.VK_ACCESS_MEMORY_READ_BIT | vk.VK_ACCESS_MEMORY_WRITE_BIT
        self._barrier = [vk.VkMemoryBarrier(srcAccessMask=every, dstAccessMask=every)]
        self._open: Any = None
        self._count = 0
        self._under_way: deque[tuple[int, Any]] = deque()
        self.submitted = 0
        """The number of the last submission."""

    def failed(self, what: str, error: Exception) -> TilewrightError:
        if isinstance(error, self.vk.VkErrorDeviceLost):
            self.lost = f"{what} ended with the device lost"
        return DeviceError.at("TW032", f"{self.label}: {what} failed: {type(error).__name__}")

    def record(self, what: str, command: Callable[[Any], object]) -> int:
        """Queue a command, behind all before it. The number of the submission it will be in."""
        vk = self.vk
        with self.lock:
            try:
                buffer = self._opened()
                if self._count:
                    stage = vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT
                    vk.vkCmdPipelineBarrier(buffer, stage, stage, 0, 1, self._barrier, 0, None, 0, None)
                command(buffer)
                self._count += 1
                number = self.submitted + 1
                if self._count >= _TOGETHER or self.reached() == self.submitted:
                    self.flush()
                return number
            except vk.VkError as error:
                raise self.failed(what, error) from error

    def _opened(self) -> Any:
        vk = self.vk
        if self._open is None:
            if self._under_way and self._under_way[0][0] <= self.reached():
                self._open = self._under_way.popleft()[1]
            else:
                made = vk.VkCommandBufferAllocateInfo(commandPool=self._pool, level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1)
                self._open = vk.vkAllocateCommandBuffers(self.device, made)[0]
            vk.vkBeginCommandBuffer(self._open, vk.VkCommandBufferBeginInfo(flags=vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT))
            stage = vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT
            vk.vkCmdPipelineBarrier(self._open, stage, stage, 0, 1, self._barrier, 0, None, 0, None)
        return self._open

    def flush(self) -> None:
        """Submit what is recorded."""
        vk = self.vk
        with self.lock:
            if self._open is None:
                return
            try:
                vk.vkEndCommandBuffer(self._open)
                number = self.submitted + 1
                values = vk.VkTimelineSemaphoreSubmitInfo(signalSemaphoreValueCount=1, pSignalSemaphoreValues=[number])
                one = vk.VkSubmitInfo(pNext=values, pCommandBuffers=[self._open], pSignalSemaphores=[self._semaphore])
                vk.vkQueueSubmit(self.queue, 1, [one], None)
            except vk.VkError as error:
                self._open, self._count = None, 0
                raise self.failed("a submission", error) from error
            self._under_way.append((number, self._open))
            self.submitted, self._open, self._count = number, None, 0

    def reached(self) -> int:
        """The number of the last submission that is done."""
        return int(self.vk.vkGetSemaphoreCounterValue(self.device, self._semaphore))

    def is_done(self, number: int) -> bool:
        return number <= self.submitted and self.reached() >= number

    def wait(self, number: int) -> None:
        """Return when a submission is done."""
        vk = self.vk
        with self.lock:
            if number > self.submitted:
                self.flush()
        number = min(number, self.submitted)
        if not number or self.reached() >= number:
            return
        info = vk.VkSemaphoreWaitInfo(pSemaphores=[self._semaphore], pValues=[number])
        try:
            vk.vkWaitSemaphores(self.device, info, int(limit() * 1e9))
        except vk.VkTimeout as error:
            raise timed_out(self.label, "the work of a stream") from error
        except vk.VkError as error:
            raise self.failed("a wait", error) from error

    def wait_all(self) -> None:
        self.flush()
        self.wait(self.submitted)

    # -- time -----------------------------------------------------------------------------------------------------------

    def stamp(self) -> tuple[int, int]:
        """Note the device's time behind the work queued so far: where, and the submission's number."""
        vk = self.vk
        with self.lock:
            slot = self._next_stamp = (self._next_stamp + 1) % _STAMPS

            def command(buffer: Any) -> None:
                vk.vkCmdResetQueryPool(buffer, self._stamps, slot, 1)
                vk.vkCmdWriteTimestamp(buffer, vk.VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, self._stamps, slot)

            return slot, self.record("a time stamp", command)

    def time(self, slot: int) -> float:
        """Milliseconds of a stamp that was reached."""
        vk = self.vk
        memory = vk.ffi.new("uint64_t[1]")
        vk.vkGetQueryPoolResults(self.device, self._stamps, slot, 1, 8, memory, 8, vk.VK_QUERY_RESULT_64_BIT | vk.VK_QUERY_RESULT_WAIT_BIT)
        return float(memory[0]) * self.period * 1e-6
