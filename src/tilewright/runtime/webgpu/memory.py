"""Memory of a WebGPU device: buffers by size, kept when they are free, and staging buffers for reading.

In: bytes wanted; out: a buffer of wgpu of at least as many. All work of a device is on one queue, in order: a buffer that was given back can be used
by the next call at once. A buffer belongs to one array; views share it.
"""

from __future__ import annotations

import threading
from typing import Any

from tilewright.base.errors import DeviceError
from tilewright.runtime.core.device import Buffer

STORAGE, COPY_SRC, COPY_DST, UNIFORM, MAP_READ = 0x80, 0x4, 0x8, 0x40, 0x1
_KEPT = 256 << 20
"""Bytes of free buffers that are kept."""


def rounded(nbytes: int) -> int:
    """The size of the buffer for so many bytes: a multiple of 16, as arrays of vectors are, and few different ones. Never empty: bindings cannot be."""
    size = 256
    while size < nbytes and size < 1 << 16:
        size *= 2
    if size >= nbytes:
        return size
    step = 1 << (nbytes.bit_length() - 3)
    return -(-nbytes // step) * step


class BufferPool:
    """The buffers of one device."""

    def __init__(self, device: Any, label: str, largest: int) -> None:
        self.device, self.label, self.largest = device, label, largest
        self.free: dict[tuple[int, int], list[Any]] = {}
        self.made: dict[int, Any] = {}
        """All that were made and not destroyed. wgpu ends a buffer that only a cycle of garbage holds, even where the array in that cycle gives it back."""
        self.kept = self.used = self.peak = 0
        self.lock = threading.Lock()

    def take(self, nbytes: int, usage: int = STORAGE | COPY_SRC | COPY_DST) -> Any:
        size = rounded(nbytes)
        if nbytes > self.largest:
            raise DeviceError.at("TW031", f"an array of {nbytes} bytes is more than {self.label} gives a kernel: its limit is {self.largest}")
        size = min(size, max(self.largest // 16 * 16, -(-nbytes // 4) * 4))
        with self.lock:
            waiting = self.free.get((size, usage))
            self.used += size
            self.peak = max(self.peak, self.used)
            if waiting:
                self.kept -= size
                return waiting.pop()
        try:
            buffer = self.device.create_buffer(size=size, usage=usage)
        except Exception as error:
            self.used -= size
            raise DeviceError.at("TW031", f"out of memory on {self.label}: asked for {nbytes} bytes: {error}") from error
        self.made[id(buffer)] = buffer
        return buffer

    def give(self, buffer: Any) -> None:
        with self.lock:
            self.used -= buffer.size
            self.kept += buffer.size
            self.free.setdefault((buffer.size, int(buffer.usage)), []).append(buffer)
            while self.kept > _KEPT:
                size, usage = max(self.free, key=lambda form: form[0] if self.free[form] else 0)
                gone = self.free[size, usage].pop(0)
                self.kept -= size
                del self.made[id(gone)]
                gone.destroy()


class WebGpuBuffer(Buffer):
    """A buffer of wgpu, as arrays hold it."""

    __slots__ = ("__weakref__", "_loans", "buffer", "freed", "host", "nbytes", "pool", "recent", "stream", "trace", "users")

    def __init__(self, pool: BufferPool, nbytes: int, stream: int) -> None:
        self.freed = True
        self.pool, self.nbytes, self.stream, self.recent, self.host, self._loans = pool, nbytes, stream, stream, 0, 0
        self.trace: str | None = None
        self.users: set[int] = set()
        self.buffer = pool.take(nbytes)
        self.freed = False

    def use_on(self, stream: int) -> None:
        self.recent = stream
        if stream != self.stream:
            self.users.add(stream)

    def note_line(self, line: str) -> None:
        self.trace = line

    def lend(self) -> None:
        self._loans += 1

    def end_loan(self) -> None:
        self._loans -= 1
        if self.freed and not self._loans:
            self.pool.give(self.buffer)

    def free(self) -> None:
        if not self.freed:
            self.freed = True
            if not self._loans:
                self.pool.give(self.buffer)

    def __del__(self) -> None:
        if not getattr(self, "freed", True) and _KEPT:  # at the end of the process nothing is left
            self.free()
