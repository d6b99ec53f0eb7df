"""Host memory a GPU can reach: pinned, registered, managed; and the staging of copies from memory it cannot.

In: a CUDA device and sizes or NumPy arrays; out: blocks whose `host` says where the host sees them, NumPy arrays on them, and the
copies between device and any host memory.

The host uses such memory when it likes, not in stream order. Blocks therefore have a home no stream has (`HOST`), every use by a
stream is noted, and a block handed out again is first waited for. A copy from or to plain memory goes through a ring of pinned
pieces: threads fill one while the device copies another.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime.memory.array_views import block_of
from tilewright.runtime.memory.device_memory import EVERY_STREAM, HOST, MemoryBlock, MemoryPool

if TYPE_CHECKING:
    from tilewright.runtime.cuda.context import CudaContext

PIECE = 8 << 20
"""Bytes of one piece of the staging ring."""
PIECES = 4
STAGED = 1 << 20
"""Copies of plain memory from this size on are staged; the driver's own way is faster below."""
_PORTABLE, _MAPPED, _READ_ONLY = 1, 2, 8
_ALREADY_REGISTERED = 712

Move = Callable[[int, int, int], None]


class HostSource:
    """Pinned or managed memory for a pool: what `RawMemory` asks for, with the host in the place of a stream."""

    def __init__(self, device: CudaContext, managed: bool) -> None:
        self._device = device
        self._managed = managed
        self.label = f"{'managed memory' if managed else 'pinned host memory'} of {device.label}"

    def free_memory(self) -> tuple[int, int]:
        """Bytes free and in all: of the device, where managed memory is counted, or of the host."""
        if self._managed or not hasattr(os, "sysconf"):
            return self._device.free_memory()
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def raw_allocate(self, nbytes: int) -> int:
        device = self._device
        with device.active():
            if self._managed:
                flags = device.driver.constant("CUmemAttach_flags", "CU_MEM_ATTACH_GLOBAL")
                status, results = device.driver.attempt("cuMemAllocManaged", nbytes, flags)
            else:
                status, results = device.driver.attempt("cuMemHostAlloc", nbytes, _PORTABLE | _MAPPED)
            if status == 2:
                return 0
            if status:
                raise device.error("cuMemAllocManaged" if self._managed else "cuMemHostAlloc", status, f"{nbytes} bytes")
            return int(results[0])

    def raw_free(self, pointers: list[int]) -> None:
        with self._device.active():
            for pointer in pointers:
                self._device.call("cuMemFree" if self._managed else "cuMemFreeHost", pointer)

    def is_idle(self, stream: int) -> bool:
        return stream == HOST or self._device.is_idle(stream)

    def wait_for(self, stream: int) -> None:
        if stream != HOST:
            self._device.wait_for(stream)

    def order(self, later: int, earlier: int) -> None:
        # The next user is the host, and it has no queue to wait in.
        self.wait_for(earlier)

    def holders(self, pool: MemoryPool) -> list[str]:
        blocks = sorted(pool.blocks(), key=lambda block: -block.nbytes)
        return [f"{block.nbytes} bytes" + (f", {block.trace}" if block.trace else "") for block in blocks[:5]]


class Registry:
    """Host arrays made reachable for a device, by address."""

    def __init__(self, device: CudaContext) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._ranges: dict[int, tuple[int, int]] = {}
        """Bytes and number of users, by address."""
        self._dropped: deque[tuple[int, tuple[int, ...], object]] = deque()

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether the memory is registered as a whole."""
        if not self._ranges:
            return False
        return any(start <= address and address + nbytes <= start + size for start, (size, _) in self._ranges.copy().items())

    def add(self, address: int, nbytes: int, readonly: bool) -> None:
        """Register memory; once for the device, however often it is asked for."""
        self.settle()
        with self._lock:
            known = self._ranges.get(address)
            if known is not None and known[0] >= nbytes:
                self._ranges[address] = (known[0], known[1] + 1)
                return
            with self._device.active():
                flags = _PORTABLE | _MAPPED | (_READ_ONLY if readonly and self._device.registers_read_only else 0)
                status, _ = self._device.driver.attempt("cuMemHostRegister", address, nbytes, flags)
                if status == _ALREADY_REGISTERED:
                    raise DeviceError.at(
                        "TW033",
                        f"{nbytes} bytes at {address:#x} cannot be registered for {self._device.label}: part of them is registered "
                        f"already",
                        help="register the whole array once, or use pinned memory: tw.allocate(..., pinned=True)",
                    )
                if status:
                    raise self._device.error("cuMemHostRegister", status, f"{nbytes} bytes")
            self._ranges[address] = (nbytes, 1)

    def remove(self, address: int) -> None:
        """Undo one `add`. Nothing uses the memory any more."""
        with self._lock:
            nbytes, users = self._ranges[address]
            if users > 1:
                self._ranges[address] = (nbytes, users - 1)
                return
            del self._ranges[address]
            with self._device.active():
                self._device.call("cuMemHostUnregister", address)

    def drop(self, address: int, streams: tuple[int, ...], keep: object) -> None:
        """Undo one `add` later, since this may run anywhere; `keep` is the memory's owner."""
        self._dropped.append((address, streams, keep))

    def settle(self) -> None:
        """See to what was dropped."""
        while self._dropped:
            address, used, _keep = self._dropped.popleft()
            for stream in used:
                self._device.wait_for(stream)
            self.remove(address)


class PinnedRange:
    """The token of a block on a registered NumPy array: ends the registration when it goes."""

    __slots__ = ("_address", "_array", "_registry", "users")

    def __init__(self, registry: Registry, array: np.ndarray) -> None:
        self._registry, self._array = registry, array
        self._address = 0
        self.users: set[int] = set()
        address = array.__array_interface__["data"][0]
        registry.add(address, array.nbytes, not array.flags.writeable)
        self._address = address

    def note(self, pointer: int, stream: int) -> None:
        """A stream uses the block: as an arena, that is all a block asks of it."""
        self.users.add(stream)

    def __del__(self) -> None:
        if self._address:
            self._registry.drop(self._address, tuple(self.users), self._array)


@contextmanager
def registered(device: CudaContext, array: np.ndarray) -> Iterator[np.ndarray]:
    """The array's memory is pinned inside: copies of it run at full speed, and kernels can be given it without a copy."""
    if not isinstance(array, np.ndarray):
        raise UserError.at("TW009", f"a {type(array).__name__} cannot be pinned", help="pass a NumPy array")
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise UserError.at("TW009", f"an array with strides {array.strides} cannot be pinned", help="pin the array it is a view of")
    if not array.nbytes or block_of(array) is not None:
        yield array
        return
    address = array.__array_interface__["data"][0]
    device.registry.add(address, array.nbytes, not array.flags.writeable)
    try:
        yield array
    finally:
        # Copies under way may still read it.
        device.wait_for(EVERY_STREAM)
        device.registry.remove(address)


class Staging:
    """A ring of pinned pieces through which plain memory is copied."""

    def __init__(self, device: CudaContext) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._blocks: list[MemoryBlock] = []
        self._events: list[object] = []
        self.move: Move = ctypes.memmove  # type: ignore[assignment]
        """Copies bytes on the host: target, source, count."""

    def _prepare(self) -> None:
        device = self._device
        while len(self._blocks) < PIECES:
            block = device.pinned_pool.take(PIECE, HOST)
            block.host = block.pointer
            self._events.append(device.new_event())
            self._blocks.append(block)

    def copy_in(self, pointer: int, host: int, nbytes: int, stream: int) -> None:
        """Plain memory to the device, in order on `stream`. Returns when the memory has been read."""
        device = self._device
        with self._lock, device.active():
            self._prepare()
            for number, start in enumerate(range(0, nbytes, PIECE)):
                block, event = self._blocks[number % PIECES], self._events[number % PIECES]
                count = min(PIECE, nbytes - start)
                device.call("cuEventSynchronize", event)
                self.move(block.host, host + start, count)
                device.call("cuMemcpyHtoDAsync", pointer + start, block.host, count, stream)
                device.call("cuEventRecord", event, stream)

    def copy_out(self, host: int, pointer: int, nbytes: int, stream: int) -> None:
        """The device to plain memory, after what is queued on `stream`. Returns when it has been written."""
        device = self._device
        with self._lock, device.active():
            self._prepare()
            starts = list(range(0, nbytes, PIECE))
            for number in range(len(starts) + PIECES - 1):
                if number < len(starts):
                    at, block, event = starts[number], self._blocks[number % PIECES], self._events[number % PIECES]
                    device.call("cuEventSynchronize", event)
                    device.call("cuMemcpyDtoHAsync", block.host, pointer + at, min(PIECE, nbytes - at), stream)
                    device.call("cuEventRecord", event, stream)
                done = number - (PIECES - 1)
                if done >= 0:
                    at, block, event = starts[done], self._blocks[done % PIECES], self._events[done % PIECES]
                    device.call("cuEventSynchronize", event)
                    self.move(host + at, block.host, min(PIECE, nbytes - at))

    def close(self) -> None:
        """Give the pieces and events back."""
        with self._lock, self._device.active():
            for event in self._events:
                self._device.call("cuEventSynchronize", event)
                self._device.call("cuEventDestroy", event)
            self._events.clear()
            self._blocks.clear()
