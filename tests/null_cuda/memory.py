"""Memory of the null driver: all of it is host memory. In: sizes and addresses; out: allocations, and copies in stream order.

Device memory starts poisoned and is poisoned again when freed; what was freed stays mapped for a while, so that late work reads
rubbish and does not end the process. A copy that is not inside one allocation is refused, as is one that reaches memory freed
since it was queued. Copies from and to pageable host memory behave as the driver's do: what is sent is read at once, what comes
back is waited for.
"""

from __future__ import annotations

import bisect
import ctypes
from collections import deque
from collections.abc import Callable

from null_cuda.state import (
    INVALID_CONTEXT,
    INVALID_VALUE,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    Context,
    Fault,
    Handle,
    Refused,
    State,
    Stream,
)  # fmt: skip

ALIGN = 512
FRESH, DEAD = 0xA5, 0xDD
_QUARANTINE = 64 << 20
_STAGED = 64 << 10
"""Bytes of pageable memory a copy to the device reads before it returns."""
_ALREADY_REGISTERED, _NOT_REGISTERED = 712, 713
_PEER_ENABLED, _PEER_NOT_ENABLED = 704, 705


class Allocation:
    """A range of memory the driver knows. `kind` is device, host, managed, registered or pool."""

    def __init__(self, address: int, nbytes: int, kind: str, context: Context, buffer: object = None, adopted: bool = False) -> None:
        self.address, self.nbytes, self.kind, self.context = address, nbytes, kind, context
        self.buffer = buffer
        self.adopted = adopted
        """Another library's: it is known but never freed here."""
        self.device_bytes = 0 if adopted or kind in ("host", "registered") else nbytes


class Pool(Handle):
    kind = "memory pool"

    def __init__(self, context: Context, number: int) -> None:
        super().__init__(context, number)
        self.attributes: dict[int, int] = {}


class MemoryCalls(State):
    """Allocation, copies, fills, pointers and peers."""

    allocations: dict[int, Allocation]
    starts: list[int]

    def start_memory(self) -> None:
        self.allocations = {}
        self.starts = []
        self.quarantine: deque[Allocation] = deque()
        self.peak = 0
        self._used = self._buried = 0
        self.default_pools: dict[int, Pool] = {}

    # -- ranges -------------------------------------------------------------------------------------------------

    def used(self) -> int:
        """Bytes of device memory that are allocated."""
        return self._used

    def locate(self, address: int, nbytes: int = 1) -> Allocation | None:
        """The live allocation the whole range lies in."""
        place = bisect.bisect_right(self.starts, address) - 1
        if place < 0:
            return None
        found = self.allocations[self.starts[place]]
        return found if address + nbytes <= found.address + found.nbytes else None

    def reach(self, address: int, nbytes: int) -> None:
        """On the device: fault where the range is not (or no longer) allocated."""
        with self.queue.lock:
            if nbytes and self.locate(address, nbytes) is None:
                raise Fault

    def adopt(self, address: int, nbytes: int, ordinal: int = 0) -> None:
        """Let the driver know device memory another library allocated."""
        context = next(c for c in self.contexts.values() if c.ordinal == ordinal)
        self._note(Allocation(address, nbytes, "device", context, adopted=True))

    def disown(self, address: int) -> None:
        """What was adopted is gone."""
        self._forget(self.allocations[address])

    def _note(self, allocation: Allocation) -> Allocation:
        self.allocations[allocation.address] = allocation
        bisect.insort(self.starts, allocation.address)
        self._used += allocation.device_bytes
        self.peak = max(self.peak, self._used)
        return allocation

    def _forget(self, allocation: Allocation) -> None:
        del self.allocations[allocation.address]
        del self.starts[bisect.bisect_left(self.starts, allocation.address)]
        self._used -= allocation.device_bytes

    def _allocate(self, nbytes: int, kind: str) -> Allocation:
        context = self.current()
        if nbytes <= 0:
            raise Refused(INVALID_VALUE)
        if kind != "host" and self.used() + nbytes > self.total:
            raise Refused(OUT_OF_MEMORY)
        buffer = (ctypes.c_char * (nbytes + ALIGN))()
        address = -(-ctypes.addressof(buffer) // ALIGN) * ALIGN
        ctypes.memset(address, FRESH, nbytes)
        return self._note(Allocation(address, nbytes, kind, context, buffer))

    def _release(self, pointer: object, kinds: tuple[str, ...]) -> None:
        address = int(pointer or 0)  # type: ignore[call-overload]
        if not address:
            return
        found = self.allocations.get(address)
        if found is None or found.kind not in kinds or found.adopted:
            raise Refused(INVALID_VALUE, f"{address:#x} is not the start of live {' or '.join(kinds)} memory")
        self._bury(found)

    def _bury(self, found: Allocation) -> None:
        self._forget(found)
        ctypes.memset(found.address, DEAD, found.nbytes)
        self.quarantine.append(found)
        self._buried += found.nbytes
        while self._buried > _QUARANTINE:
            self._buried -= self.quarantine.popleft().nbytes

    # -- allocation ---------------------------------------------------------------------------------------------

    def cuMemGetInfo(self) -> tuple[int, int]:
        return self.total - self.used(), self.total

    def cuMemAlloc(self, nbytes: int) -> int:
        return self._allocate(nbytes, "device").address

    def cuMemFree(self, pointer: int) -> None:
        self._release(pointer, ("device", "managed", "pool"))

    def cuMemAllocManaged(self, nbytes: int, flags: int) -> int:
        if int(flags) not in (1, 2, 4):
            raise Refused(INVALID_VALUE)
        return self._allocate(nbytes, "managed").address

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> int:
        if int(flags) & ~7:
            raise Refused(INVALID_VALUE)
        return self._allocate(nbytes, "host").address

    def cuMemAllocHost(self, nbytes: int) -> int:
        return self._allocate(nbytes, "host").address

    def cuMemFreeHost(self, pointer: int) -> None:
        self._release(pointer, ("host",))

    def cuMemHostRegister(self, pointer: int, nbytes: int, flags: int) -> None:
        address, context = int(pointer), self.current()
        if nbytes <= 0 or not address or int(flags) & ~15:
            raise Refused(INVALID_VALUE)
        for other in self.allocations.values():
            if other.address < address + nbytes and address < other.address + other.nbytes:
                raise Refused(_ALREADY_REGISTERED)
        self._note(Allocation(address, nbytes, "registered", context))

    def cuMemHostUnregister(self, pointer: int) -> None:
        found = self.allocations.get(int(pointer))
        if found is None or found.kind != "registered":
            raise Refused(_NOT_REGISTERED, f"{int(pointer):#x} was not registered")
        self._forget(found)

    def cuMemHostGetDevicePointer(self, pointer: int, flags: int) -> int:
        found = self.locate(int(pointer))
        if found is None or found.kind not in ("host", "registered", "managed"):
            raise Refused(INVALID_VALUE)
        return int(pointer)

    def cuMemHostGetFlags(self, pointer: int) -> int:
        found = self.locate(int(pointer))
        if found is None or found.kind not in ("host", "registered"):
            raise Refused(INVALID_VALUE)
        return 3

    def cuMemGetAddressRange(self, pointer: int) -> tuple[int, int]:
        found = self.locate(int(pointer))
        if found is None:
            raise Refused(500)
        return found.address, found.nbytes

    def cuPointerGetAttribute(self, attribute: int, pointer: int) -> object:
        found = self.locate(int(pointer))
        name = self.CUpointer_attribute(attribute).name.removeprefix("CU_POINTER_ATTRIBUTE_")
        if found is None:
            raise Refused(INVALID_VALUE)
        on_host = found.kind in ("host", "registered")
        answers: dict[str, object] = {
            "CONTEXT": found.context.number, "MEMORY_TYPE": 1 if on_host else 2, "DEVICE_POINTER": int(pointer),
            "DEVICE_ORDINAL": found.context.ordinal, "IS_MANAGED": found.kind == "managed", "RANGE_START_ADDR": found.address,
            "RANGE_SIZE": found.nbytes, "BUFFER_ID": found.address, "MAPPED": True,
        }  # fmt: skip
        if on_host or found.kind == "managed":
            answers["HOST_POINTER"] = int(pointer)
        if name not in answers:
            raise Refused(INVALID_VALUE)
        return answers[name]

    # -- pools --------------------------------------------------------------------------------------------------

    def cuDeviceGetDefaultMemPool(self, device: int) -> int:
        if device not in self.default_pools:
            pool = self.default_pools[device] = Pool(self.contexts[0xC0 + device], self.new_number())
            self.handles[pool.number] = pool
        return self.default_pools[device].number

    def cuDeviceGetMemPool(self, device: int) -> int:
        return MemoryCalls.cuDeviceGetDefaultMemPool(self, device)

    def cuMemPoolSetAttribute(self, pool: int, attribute: int, value: object) -> None:
        self.find(Pool, pool).attributes[int(attribute)] = int(value)  # type: ignore[call-overload]

    def cuMemPoolGetAttribute(self, pool: int, attribute: int) -> int:
        return self.find(Pool, pool).attributes.get(int(attribute), 0)

    def cuMemPoolTrimTo(self, pool: int, nbytes: int) -> None:
        self.find(Pool, pool)

    def cuMemAllocAsync(self, nbytes: int, stream: int) -> int:
        if self.stream(stream).capture is not None:
            raise Refused(NOT_SUPPORTED, "allocations as nodes of a graph are beyond the null driver")
        return self._allocate(nbytes, "pool").address

    def cuMemFreeAsync(self, pointer: int, stream: int) -> None:
        target = self.stream(stream)
        if target.capture is not None:
            raise Refused(NOT_SUPPORTED, "allocations as nodes of a graph are beyond the null driver")
        found = self.allocations.get(int(pointer))
        if found is None or found.kind not in ("pool", "device"):
            raise Refused(INVALID_VALUE, f"{int(pointer):#x} is not the start of live pool memory")

        def free() -> None:
            with self.queue.lock:
                if self.allocations.get(int(pointer)) is not found:
                    raise Fault
                self._bury(found)

        self.enqueue(target, "free", free)

    def enqueue(self, stream: Stream, name: str, body: Callable[[], None], wait: bool = False, host: bool = False) -> None:
        raise NotImplementedError

    # -- copies -------------------------------------------------------------------------------------------------

    def _on_device(self, address: object, nbytes: int) -> int:
        value = int(address or 0)  # type: ignore[call-overload]
        if nbytes and self.locate(value, nbytes) is None:
            raise Refused(INVALID_VALUE, f"{nbytes} bytes at {value:#x} are not inside one allocation")
        return value

    def _pinned(self, address: int, nbytes: int) -> bool:
        return self.locate(address, max(1, nbytes)) is not None

    def _copy(self, target: int, source: int, nbytes: int, stream: Stream, name: str, wait: bool, device: tuple[int, ...]) -> None:
        """Queue a copy; `device` are the ends that lie in device memory."""

        def body() -> None:
            for address in device:
                self.reach(address, nbytes)
            ctypes.memmove(target, source, nbytes)

        if nbytes:
            self.enqueue(stream, name, body, wait)

    def cuMemcpyHtoD(self, pointer: int, host: int, nbytes: int) -> None:
        target = self._on_device(pointer, nbytes)
        self._copy(target, int(host), nbytes, self.current().default, "cuMemcpyHtoD", True, (target,))

    def cuMemcpyDtoH(self, host: int, pointer: int, nbytes: int) -> None:
        source = self._on_device(pointer, nbytes)
        self._copy(int(host), source, nbytes, self.current().default, "cuMemcpyDtoH", True, (source,))

    def cuMemcpyDtoD(self, target: int, source: int, nbytes: int) -> None:
        ends = (self._on_device(target, nbytes), self._on_device(source, nbytes))
        self._copy(*ends, nbytes, self.current().default, "cuMemcpyDtoD", False, ends)

    def cuMemcpy(self, target: int, source: int, nbytes: int) -> None:
        self._copy(int(target), int(source), nbytes, self.current().default, "cuMemcpy", True, ())

    def cuMemcpyHtoDAsync(self, pointer: int, host: int, nbytes: int, stream: int) -> None:
        target, source, queue = self._on_device(pointer, nbytes), int(host), self.stream(stream)
        if queue.capture is not None or self._pinned(source, nbytes):
            self._copy(target, source, nbytes, queue, "cuMemcpyHtoDAsync", False, (target,))
        elif nbytes > _STAGED:
            self._copy(target, source, nbytes, queue, "cuMemcpyHtoDAsync", True, (target,))
        else:
            staged = ctypes.string_at(source, nbytes)

            def body() -> None:
                self.reach(target, nbytes)
                ctypes.memmove(target, staged, nbytes)

            self.enqueue(queue, "cuMemcpyHtoDAsync", body)

    def cuMemcpyDtoHAsync(self, host: int, pointer: int, nbytes: int, stream: int) -> None:
        source, target, queue = self._on_device(pointer, nbytes), int(host), self.stream(stream)
        wait = queue.capture is None and not self._pinned(target, nbytes)
        self._copy(target, source, nbytes, queue, "cuMemcpyDtoHAsync", wait, (source,))

    def cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ends = (self._on_device(target, nbytes), self._on_device(source, nbytes))
        self._copy(*ends, nbytes, self.stream(stream), "cuMemcpyDtoDAsync", False, ends)

    def cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        pageable = not self._pinned(int(target), nbytes) or not self._pinned(int(source), nbytes)
        queue = self.stream(stream)
        self._copy(int(target), int(source), nbytes, queue, "cuMemcpyAsync", pageable and queue.capture is None, ())

    def cuMemcpyPeerAsync(self, target: int, there: int, source: int, here: int, nbytes: int, stream: int) -> None:
        for context in (there, here):
            if int(context) not in self.contexts:
                raise Refused(INVALID_CONTEXT, f"{int(context):#x} is no context")
        ends = (self._on_device(target, nbytes), self._on_device(source, nbytes))
        self._copy(*ends, nbytes, self.stream(stream), "cuMemcpyPeerAsync", False, ends)

    def cuMemcpyPeer(self, target: int, there: int, source: int, here: int, nbytes: int) -> None:
        ends = (self._on_device(target, nbytes), self._on_device(source, nbytes))
        self._copy(*ends, nbytes, self.current().default, "cuMemcpyPeer", True, ends)

    def _fill(self, pointer: int, value: int, width: int, count: int, stream: Stream, name: str) -> None:
        nbytes = width * count
        target = self._on_device(pointer, nbytes)
        pattern = (int(value) & ((1 << (8 * width)) - 1)).to_bytes(width, "little") * count

        def body() -> None:
            self.reach(target, nbytes)
            ctypes.memmove(target, pattern, nbytes)

        if nbytes:
            self.enqueue(stream, name, body)

    def cuMemsetD8(self, pointer: int, value: int, count: int) -> None:
        self._fill(pointer, value, 1, count, self.current().default, "cuMemsetD8")

    def cuMemsetD32(self, pointer: int, value: int, count: int) -> None:
        self._fill(pointer, value, 4, count, self.current().default, "cuMemsetD32")

    def cuMemsetD8Async(self, pointer: int, value: int, count: int, stream: int) -> None:
        self._fill(pointer, value, 1, count, self.stream(stream), "cuMemsetD8Async")

    def cuMemsetD16Async(self, pointer: int, value: int, count: int, stream: int) -> None:
        self._fill(pointer, value, 2, count, self.stream(stream), "cuMemsetD16Async")

    def cuMemsetD32Async(self, pointer: int, value: int, count: int, stream: int) -> None:
        self._fill(pointer, value, 4, count, self.stream(stream), "cuMemsetD32Async")

    def cuMemPrefetchAsync(self, pointer: int, nbytes: int, location: object, flags: int, stream: int) -> None:
        found = self.locate(int(pointer), nbytes)
        if found is None or found.kind != "managed":
            raise Refused(INVALID_VALUE, f"{int(pointer):#x} is not managed memory")
        self.enqueue(self.stream(stream), "cuMemPrefetchAsync", lambda: None)

    def cuMemAdvise(self, pointer: int, nbytes: int, advice: int, location: object) -> None:
        found = self.locate(int(pointer), nbytes)
        if found is None or found.kind != "managed":
            raise Refused(INVALID_VALUE, f"{int(pointer):#x} is not managed memory")

    # -- peers --------------------------------------------------------------------------------------------------

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> int:
        if device not in range(self.count) or peer not in range(self.count):
            raise Refused(101)
        return int(device != peer)

    def cuCtxEnablePeerAccess(self, context: int, flags: int) -> None:
        here, there = self.current(), self.contexts.get(int(context))
        if there is None or int(flags):
            raise Refused(INVALID_VALUE)
        if there.ordinal == here.ordinal:
            raise Refused(101)
        if there.number in here.peers:
            raise Refused(_PEER_ENABLED)
        here.peers.add(there.number)

    def cuCtxDisablePeerAccess(self, context: int) -> None:
        here = self.current()
        if int(context) not in here.peers:
            raise Refused(_PEER_NOT_ENABLED)
        here.peers.discard(int(context))
