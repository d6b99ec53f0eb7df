"""The memory of a GPU as a device object offers it: new arrays, foreign arrays, copies each way, pools.

In: shapes, dtypes, host arrays, arrays of other libraries; out: `DeviceArray`s, and `Ticket`s for copies under way. Arrays come from
the pool that is current on the thread, the device's own where none is; making one of a common kind is a single call of machine code.

The driver's plain free waits for everything the device does. Memory is therefore taken and freed through its stream-ordered
allocator, on a stream that nothing else uses; where a driver has none, plainly.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, SupportsInt

import numpy as np

from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError, TilewrightError, UserError
from tilewright.runtime import native_memory
from tilewright.runtime.array_views import block_of, host_array
from tilewright.runtime.cuda_driver import OUT_OF_MEMORY, Driver, Results
from tilewright.runtime.device_array import DeviceArray
from tilewright.runtime.device_memory import EVERY_STREAM, HOST, Block, MemoryPool, Slab, stream_handle
from tilewright.runtime.foreign_arrays import describe, torch_dtype
from tilewright.runtime.host_memory import STAGED, HostSource, Registration, Registry, Staging
from tilewright.runtime.libraries import is_tensor
from tilewright.runtime.streams import SPECIAL, recorders, refuse_in_capture
from tilewright.runtime.strided_copy import copy_artifact, copy_strided

if TYPE_CHECKING:
    from tilewright.base.artifact import Artifact
    from tilewright.runtime.cuda import CudaDevice
    from tilewright.runtime.cuda_program import CudaProgram

_LISTED = 5


class Ticket:
    """A copy under way. Keeps what it needs alive; `wait` returns when it is done, `done` says whether it is."""

    def __init__(self, device: CudaDevice, stream: int, finish: Callable[[], None] | None, *kept: object) -> None:
        self._device = device
        self._finish = finish
        self._kept = kept
        self.stream = stream
        self.event: Any = None
        """The driver's event after the copy; None once it was waited for."""
        event = device.new_event()
        try:
            device.call("cuEventRecord", event, stream)
        except BaseException:
            device.driver.attempt("cuEventDestroy", event)
            raise
        self.event = event

    def done(self) -> bool:
        """Whether the copy has ended; for one to plain memory `wait` has still to move it there."""
        if self.event is None:
            return True
        with self._device.active():
            status, _ = self._device.driver.attempt("cuEventQuery", self.event)
            if status == 600:
                return False
            if status:
                raise self._device.error("cuEventQuery", status)
            return True

    def wait(self) -> None:
        """Return when the copy is done and its target can be read."""
        if self.event is None:
            return
        with self._device.active():
            self._device.call("cuEventSynchronize", self.event)
            if self._finish is not None:
                self._finish()
            event, self.event = self.event, None
            self._kept, self._finish = (), None
            self._device.call("cuEventDestroy", event)

    def __del__(self) -> None:
        event = getattr(self, "event", None)
        if event is not None:
            self._device.retire_event(event)


class _Current(threading.local):
    def __init__(self) -> None:
        self.pools: list[MemoryPool] = []


class CudaMemory:
    """The part of `CudaDevice` that is about memory."""

    if TYPE_CHECKING:
        driver: Driver
        ordinal: int
        label: str

        @property
        def _context(self) -> SupportsInt: ...

        def active(self) -> AbstractContextManager[None]: ...
        def call(self, api: str, *arguments: object) -> Results: ...
        def error(self, api: str, status: int, detail: str = "") -> TilewrightError: ...
        def order(self, later: int, earlier: int) -> None: ...
        def load(self, artifact: Artifact) -> CudaProgram: ...
        def _attribute(self, name: str) -> int: ...

    pool: MemoryPool

    def start_memory(self) -> None:
        """Called once by the device."""
        self._current = _Current()
        self._open_pools = 0
        self._open_lock = threading.Lock()
        self._retired_events: list[Any] = []
        self._copy_programs: dict[tuple[int, int, bool], CudaProgram] = {}
        self._make: Callable[..., DeviceArray | None] = lambda *arguments: None
        self.pool = self.new_pool()

    # -- pools --------------------------------------------------------------------------------------------------

    def new_pool(self, limit: int | None = None, reserve: int | None = None) -> MemoryPool:
        """A pool of this device; `reserve` bytes are set aside for it at once, and it never holds more."""
        device: Any = self
        memory = device if reserve is None else Slab(device, self.pool.take(reserve))
        if memory is not self:
            retire = memory.retire
        else:
            retire = self.pool.retire if hasattr(self, "pool") else None
        if not native_memory.available():
            return MemoryPool(memory, limit, retire=retire)
        made: list[native_memory.NativeArena] = []

        def arena(retire: Any) -> native_memory.NativeArena:
            made.append(native_memory.NativeArena(retire, self))
            return made[0]

        pool = MemoryPool(memory, limit, arena, retire)
        pool._take = made[0].taker()
        if not hasattr(self, "pool"):
            self._make = made[0].maker()
        return pool

    @property
    def current_pool(self) -> MemoryPool:
        """Where arrays of this thread come from."""
        if not self._open_pools:
            return self.pool
        return self._current.pools[-1] if self._current.pools else self.pool

    def push_pool(self, pool: MemoryPool) -> None:
        """Arrays of this thread come from `pool` until `pop_pool`."""
        self._current.pools.append(pool)
        with self._open_lock:
            self._open_pools += 1

    def pop_pool(self) -> None:
        with self._open_lock:
            self._open_pools -= 1
        self._current.pools.pop()

    @cached_property
    def pinned_pool(self) -> MemoryPool:
        """Page-locked host memory."""
        return self._host_pool(managed=False)

    @cached_property
    def managed_pool(self) -> MemoryPool:
        """Memory that moves between host and device by itself."""
        if not self._attribute("MANAGED_MEMORY"):
            raise DeviceError.at("TW030", f"{self.label} has no managed memory")
        return self._host_pool(managed=True)

    def _host_pool(self, managed: bool) -> MemoryPool:
        device: Any = self
        source = HostSource(device, managed)
        if not native_memory.available():
            return MemoryPool(source)
        return MemoryPool(source, arena=lambda retire: native_memory.NativeArena(retire, self))

    @cached_property
    def registry(self) -> Registry:
        device: Any = self
        return Registry(device)

    @cached_property
    def staging(self) -> Staging:
        device: Any = self
        made = Staging(device)
        if native_memory.available():
            made.move = native_memory.move
        return made

    @cached_property
    def registers_read_only(self) -> bool:
        """Whether read-only host memory can be registered as such; elsewhere it is registered like any other."""
        try:
            return bool(self._attribute("READ_ONLY_HOST_REGISTER_SUPPORTED"))
        except DeviceError:
            return False

    # -- new arrays ---------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: DType, stream: int = 0) -> DeviceArray:
        """A new row-major array with undefined contents, for work on `stream`."""
        if recorders and stream in recorders:
            extents = checked_shape(shape)
            return self._on_block(recorders[stream].take(elements(extents) * dtype.itemsize, stream), extents, dtype)
        if not self._open_pools:
            made = self._make(shape, dtype, stream)
            if made is not None:
                return made
        extents = checked_shape(shape)
        block = self.current_pool.take(elements(extents) * dtype.itemsize, stream_handle(stream))
        return self._on_block(block, extents, dtype)

    def empty_managed(self, shape: Sequence[int], dtype: DType) -> DeviceArray:
        """A new array in managed memory: the host sees it at the same address."""
        extents = checked_shape(shape)
        block = self.managed_pool.take(elements(extents) * dtype.itemsize, HOST)
        block.host = block.pointer
        return self._on_block(block, extents, dtype)

    def empty_pinned(self, shape: Sequence[int], dtype: DType) -> np.ndarray:
        """A new NumPy array in page-locked memory."""
        extents = checked_shape(shape)
        block = self.pinned_pool.take(elements(extents) * dtype.itemsize, HOST)
        block.host = block.pointer
        return host_array(block, extents, dtype.numpy)

    def _on_block(self, block: Block, shape: tuple[int, ...], dtype: DType, pointer: int | None = None) -> DeviceArray:
        device: Any = self
        return DeviceArray(device, block.pointer if pointer is None else pointer, shape, dtype, None, block)

    def from_numpy(self, values: np.ndarray, dtype: DType | None = None, stream: int = 0) -> DeviceArray:
        """A copy of a host array. `dtype` is needed only where NumPy's does not tell (packed blocks)."""
        known = _known_dtype(values, dtype)
        array = self.empty(values.shape, known, stream)
        array.copy_from(values)
        return array

    def share(self, values: np.ndarray, dtype: DType | None = None) -> DeviceArray:
        """A host array as the device sees it, without a copy: pinned memory as it is, other memory is registered meanwhile."""
        known = _known_dtype(values, dtype)
        device: Any = self
        if not values.size:
            return self.empty(values.shape, known)
        itemsize = known.itemsize
        if any(step % itemsize for step in values.strides):
            raise UserError.at("TW009", f"strides {values.strides} are not multiples of the {itemsize} bytes of {known}")
        address = values.__array_interface__["data"][0]
        strides = tuple(step // itemsize for step in values.strides)
        block = block_of(values)
        if block is None:
            owner = _whole(values)
            token = Registration(self.registry, owner)
            start = owner.__array_interface__["data"][0]
            block = Block(self._mapped(start), 0, HOST, token, token, start)
        pointer = block.pointer + address - block.host
        return DeviceArray(device, pointer, values.shape, known, strides, block, values, not values.flags.writeable)

    def _mapped(self, address: int) -> int:
        with self.active():
            return int(self.call("cuMemHostGetDevicePointer", address, 0)[0])

    # -- foreign arrays -----------------------------------------------------------------------------------------

    def wrap(self, item: object, stream: int = 0) -> DeviceArray:
        """An array of another library that is on this device, without a copy; work on `stream` waits for its producer."""
        device: Any = self
        if isinstance(item, DeviceArray):
            self._check_device(item.device.ordinal)
            return item
        if is_tensor(item):
            return self._wrap_torch(item)
        pointer, shape, strides, dtype, producer, readonly = describe(item)
        if pointer:
            with self.active():
                attribute = self.driver.constant("CUpointer_attribute", "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL")
                self._check_device(int(self.call("cuPointerGetAttribute", attribute, pointer)[0]))
        stream = stream_handle(stream)
        if producer is not None and stream_handle(producer) != stream:
            self.order(stream, stream_handle(producer))
        block = Block(pointer, 0, stream, None)
        return DeviceArray(device, pointer, shape, dtype, strides, block, item, readonly)

    def _wrap_torch(self, tensor: Any) -> DeviceArray:
        """A PyTorch tensor by its own methods: its array interface takes ten times as long."""
        device: Any = self
        if not tensor.is_cuda:
            raise UserError.at("TW009", "a tensor on the CPU is not an array on a CUDA device", help="pass tensor.cuda()")
        if tensor.requires_grad:
            raise UserError.at("TW009", "the tensor requires a gradient, which kernels do not compute", help="pass tensor.detach()")
        if tensor.is_neg():
            raise UserError.at("TW009", "the tensor is a negated view of other elements", help="pass tensor.resolve_neg()")
        self._check_device(tensor.get_device())
        pointer = int(tensor.data_ptr())
        block = Block(pointer, 0, 0, None)
        return DeviceArray(device, pointer, tuple(tensor.shape), torch_dtype(tensor), tensor.stride(), block, tensor)

    def _check_device(self, ordinal: int) -> None:
        if ordinal != self.ordinal:
            raise DeviceError.at("TW033", f"the array is on cuda:{ordinal}, but was given to {self.label}")

    # -- copies -------------------------------------------------------------------------------------------------

    def copy(self, target: DeviceArray, source: DeviceArray, stream: int = 0) -> None:
        """Device to device, in stream order; both arrays are of one shape and dtype, and do not overlap unless they are the same."""
        device: Any = self
        if source.device is not self:
            self._copy_across(target, source, stream)
            return
        to, origin = target.launch_pointer(stream), source.launch_pointer(stream)
        if target.is_contiguous and source.is_contiguous:
            if source.nbytes:
                with self.active():
                    self.call("cuMemcpyDtoDAsync", to, origin, source.nbytes, stream)
            return
        ends = (origin, source.strides), (to, target.strides)
        copy_strided(device, source.dtype.itemsize, source.shape, *ends, stream)

    def _copy_across(self, target: DeviceArray, source: DeviceArray, stream: int) -> None:
        """From another device: what its streams do to the source is waited for there."""
        other: Any = source.device
        whole = source if source.is_contiguous else source.copy()
        for used in streams_to_wait(whole):
            other.wait_for(used)
        landing = target if target.is_contiguous else self.empty(target.shape, target.dtype, stream)
        if whole.nbytes:
            with self.active():
                ends = landing.launch_pointer(stream), self._context, whole.pointer, other._context
                self.call("cuMemcpyPeerAsync", *ends, whole.nbytes, stream)
                # The source's memory belongs to streams of the other device, which know nothing of this copy.
                self.call("cuStreamSynchronize", stream)
        if landing is not target:
            self.copy(target, landing, stream)

    def copy_program(self, width: int, rank: int, wide: bool) -> CudaProgram:
        """The loaded kernel for copies between strided arrays."""
        device: Any = self
        found = self._copy_programs.get((width, rank, wide))
        if found is None:
            found = self._copy_programs.setdefault((width, rank, wide), device.load(copy_artifact(width, rank, wide)))
        return found

    def fill_bytes(self, pointer: int, pattern: bytes, count: int, stream: int) -> None:
        """Set `count` elements of 1, 2 or 4 bytes, in stream order."""
        with self.active():
            kind = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}[len(pattern)]
            self.call(kind, pointer, int.from_bytes(pattern, "little"), count, stream)

    def is_pinned(self, address: int, nbytes: int, array: np.ndarray | None = None) -> bool:
        """Whether the device reaches host memory by itself."""
        return (array is not None and block_of(array) is not None) or self.registry.covers(address, nbytes)

    def copy_in(self, pointer: int, host: int, nbytes: int, streams: Iterable[int], pinned: bool = False) -> None:
        """Host to device, after the work queued on `streams`, the first of which is the memory's home."""
        self._refuse_copy()
        with self.active():
            home, alone = self._settle(streams)
            if nbytes >= STAGED and not pinned:
                self.staging.copy_in(pointer, host, nbytes, home)
                if not alone:
                    self.call("cuStreamSynchronize", home)
            elif home:
                self.call("cuMemcpyHtoDAsync", pointer, host, nbytes, home)
                self.call("cuStreamSynchronize", home)
            else:
                self.call("cuMemcpyHtoD", pointer, host, nbytes)

    def copy_out(self, host: int, pointer: int, nbytes: int, streams: Iterable[int], pinned: bool = False) -> None:
        """Device to host, after the work queued on `streams`."""
        self._refuse_copy()
        with self.active():
            home, _ = self._settle(streams)
            if nbytes >= STAGED and not pinned:
                self.staging.copy_out(host, pointer, nbytes, home)
            elif home:
                self.call("cuMemcpyDtoHAsync", host, pointer, nbytes, home)
                self.call("cuStreamSynchronize", home)
            else:
                self.call("cuMemcpyDtoH", host, pointer, nbytes)

    def copy_in_async(self, target: DeviceArray, source: np.ndarray, stream: int = 0) -> Ticket:
        """Host to device in stream order, without waiting. What is not pinned is read before this returns."""
        target.check_values(source)
        source = np.ascontiguousarray(source)
        return self._copy_async(target, source, stream, to_device=True)

    def copy_out_async(self, target: np.ndarray, source: DeviceArray, stream: int = 0) -> Ticket:
        """Device to host in stream order, without waiting. What is not pinned is written by the ticket's `wait`."""
        source.check_values(target, writing=False)
        if not target.flags.c_contiguous or not target.flags.writeable:
            raise UserError.at("TW018", "the target of a copy must be a writable array in C order")
        return self._copy_async(source, target, stream, to_device=False)

    def _copy_async(self, array: DeviceArray, host: np.ndarray, stream: int, to_device: bool) -> Ticket:
        device: Any = self
        self._refuse_copy()
        stream = stream_handle(stream)
        if not array.is_contiguous:
            raise UserError.at("TW033", f"a view with strides {array.strides} cannot be copied without waiting", help="copy() it first")
        address, nbytes = host.__array_interface__["data"][0], host.nbytes
        finish: Callable[[], None] | None = None
        block = block_of(host)
        with self.active():
            pointer = array.launch_pointer(stream)
            if nbytes:
                if block is None and not self.registry.covers(address, nbytes):
                    block = self.pinned_pool.take(nbytes, HOST)
                    staged = block.host = block.pointer
                    if to_device:
                        self.staging.move(staged, address, nbytes)
                    else:
                        finish = lambda: self.staging.move(address, staged, nbytes)  # noqa: E731
                else:
                    staged = address
                if block is not None:
                    block.use_on(stream)
                if to_device:
                    self.call("cuMemcpyHtoDAsync", pointer, staged, nbytes, stream)
                else:
                    self.call("cuMemcpyDtoHAsync", staged, pointer, nbytes, stream)
            return Ticket(device, stream, finish, array, host, block)

    def _refuse_copy(self) -> None:
        if SPECIAL.value:
            refuse_in_capture(
                "a copy between host and device", self.ordinal,
                "copy inputs to the device before the capture and read results after a replay",
            )  # fmt: skip

    def _settle(self, streams: Iterable[int]) -> tuple[int, bool]:
        """Wait for all streams; the home and whether it is the only one. A plain copy is ordered with the default stream by itself."""
        used = [0 if stream == HOST else stream for stream in streams if stream not in self.pool.forgotten]
        for stream in used:
            if stream:
                self.call("cuStreamSynchronize", stream)
        home = used[0] if used else 0
        return home, all(stream == home for stream in used)

    def new_event(self) -> Any:
        """An event without timing."""
        with self.active():
            while self._retired_events:
                self.driver.attempt("cuEventDestroy", self._retired_events.pop())
            flags = self.driver.constant("CUevent_flags", "CU_EVENT_DISABLE_TIMING")
            return self.call("cuEventCreate", flags)[0]

    def retire_event(self, event: Any) -> None:
        """Destroy an event later: this may run anywhere."""
        self._retired_events.append(event)

    def release_memory(self) -> None:
        """Give back all that is kept for later: cached memory, staging, the allocator's stream. Arrays in use stay."""
        if "staging" in self.__dict__:
            self.staging.close()
            del self.__dict__["staging"]
        if "registry" in self.__dict__:
            self.registry.settle()
        for name in ("pinned_pool", "managed_pool", "pool"):
            pool = self.__dict__.get(name)
            if pool is not None:
                pool.flush(wait=True)
        with self.active():
            while self._retired_events:
                self.call("cuEventDestroy", self._retired_events.pop())
            stream = self.__dict__.pop("_allocating_stream", None)
            if stream is not None:
                self.call("cuStreamDestroy", stream)

    # -- what pools ask for -------------------------------------------------------------------------------------

    def free_memory(self) -> tuple[int, int]:
        """Bytes free and in all, as the driver sees them."""
        with self.active():
            free, total = self.call("cuMemGetInfo")
            return int(free), int(total)

    @cached_property
    def _allocating_stream(self) -> int | None:
        """A stream for the driver's stream-ordered allocator; None where it has none."""
        if not self._attribute("MEMORY_POOLS_SUPPORTED"):
            return None
        with self.active():
            flags = self.driver.constant("CUstream_flags", "CU_STREAM_NON_BLOCKING")
            return int(self.call("cuStreamCreate", flags)[0])

    def raw_allocate(self, nbytes: int) -> int:
        """For the pool: a pointer, or 0 when memory is exhausted."""
        with self.active():
            stream = self._allocating_stream
            api = "cuMemAlloc" if stream is None else "cuMemAllocAsync"
            status, results = self.driver.attempt(api, nbytes) if stream is None else self.driver.attempt(api, nbytes, stream)
            if status == OUT_OF_MEMORY:
                return 0
            if status:
                raise self.error(api, status, f"{nbytes} bytes")
            if stream is not None:
                # From here on the memory is good for every stream.
                self.call("cuStreamSynchronize", stream)
            return int(results[0])

    def raw_free(self, pointers: list[int]) -> None:
        """For the pool: free memory that nothing uses any more."""
        with self.active():
            stream = self._allocating_stream
            if stream is None:
                for pointer in pointers:
                    self.call("cuMemFree", pointer)
                return
            for pointer in pointers:
                self.call("cuMemFreeAsync", pointer, stream)
            self.call("cuStreamSynchronize", stream)

    def is_idle(self, stream: int) -> bool:
        """Whether all work queued on the stream is done. A stream that captures a graph is not."""
        if stream in self.pool.forgotten:
            return True
        with self.active():
            return stream >= 0 and self.driver.attempt("cuStreamQuery", stream)[0] == 0

    def wait_for(self, stream: int) -> None:
        """Return when all work queued on the stream (`EVERY_STREAM`: on the device) is done."""
        if stream == HOST or stream in self.pool.forgotten or stream in recorders:
            return
        with self.active():
            if stream == EVERY_STREAM:
                self.call("cuCtxSynchronize")
            else:
                self.call("cuStreamSynchronize", stream)

    def holders(self, pool: MemoryPool) -> list[str]:
        """The arrays that hold the pool's memory, the largest first, in words."""
        held = {id(block): block for block in pool.blocks()}
        views: dict[int, DeviceArray] = {}
        for item in gc.get_objects():
            if type(item) is DeviceArray and id(item.owner) in held:
                known = views.get(id(item.owner))
                if known is None or item.size > known.size:
                    views[id(item.owner)] = item
        lines = []
        for key, block in sorted(held.items(), key=lambda entry: -entry[1].nbytes)[:_LISTED]:
            what = views[key].form_text() if key in views else "scratch memory"
            lines.append(f"{what}, {block.nbytes} bytes" + (f", made at {block.trace}" if block.trace else ""))
        if len(held) > _LISTED:
            lines.append(f"and {len(held) - _LISTED} more")
        return lines


def streams_to_wait(array: DeviceArray) -> list[int]:
    """The streams known to use an array's memory."""
    return [stream for stream in (array.owner.stream, *array.owner.users) if stream != HOST]


def checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The extents of a new array; UserError where there can be no such array."""
    extents = tuple(int(extent) for extent in shape)
    if any(extent < 0 for extent in extents):
        raise UserError.at("TW004", f"an array cannot have shape {extents}")
    return extents


def elements(shape: Sequence[int]) -> int:
    """How many elements an array of that shape has."""
    count = 1
    for extent in shape:
        count *= extent
    return count


def _known_dtype(values: np.ndarray, dtype: DType | None) -> DType:
    known = dtype or dtypes.from_numpy(values.dtype)
    if known is None or known.numpy != values.dtype:
        raise UserError.at("TW009", f"arrays of {values.dtype} are not supported on a device")
    return known


def _whole(values: np.ndarray) -> np.ndarray:
    """An array without gaps that covers the memory of a view: the view itself, or what it is a view of."""
    whole = values
    while isinstance(whole.base, np.ndarray) and not (whole.flags.c_contiguous or whole.flags.f_contiguous):
        whole = whole.base
    if not (whole.flags.c_contiguous or whole.flags.f_contiguous):
        raise UserError.at("TW009", f"an array with strides {values.strides} cannot be shared with a device", help="copy it")
    return whole
