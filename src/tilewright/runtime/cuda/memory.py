"""The memory of a GPU as a device object offers it: new arrays, foreign arrays, pools.

In: shapes, dtypes, host arrays, arrays of other libraries; out: `DeviceArray`s. Arrays come from the pool that is current on the
thread, the device's own where none is; making one of a common kind is a single call of machine code.

The driver's plain free waits for everything the device does. Memory is therefore taken and freed through its stream-ordered
allocator, on a stream that nothing else uses; where a driver has none, plainly.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime.core.device import Buffer
from tilewright.runtime.core.streams import recorders
from tilewright.runtime.cuda.copies import CudaCopies
from tilewright.runtime.cuda.driver import OUT_OF_MEMORY
from tilewright.runtime.cuda.host_memory import HostSource, PinnedRange, registered
from tilewright.runtime.exchange import dlpack
from tilewright.runtime.exchange.foreign_arrays import describe, torch_dtype
from tilewright.runtime.exchange.libraries import Library, is_tensor, library_of
from tilewright.runtime.memory import native_memory
from tilewright.runtime.memory.array_views import block_of, host_array
from tilewright.runtime.memory.device_array import DeviceArray, known_dtype
from tilewright.runtime.memory.device_memory import EVERY_STREAM, HOST, MemoryBlock, MemoryPool, stream_handle
from tilewright.runtime.memory.slab import Slab

_LISTED = 5


class _CurrentPool(threading.local):
    def __init__(self) -> None:
        self.pools: list[MemoryPool] = []


class CudaMemory(CudaCopies):
    """The part of `CudaDevice` that is about memory."""

    shares_with_libraries = True

    def start_memory(self) -> None:
        """Called once by the device."""
        self._current = _CurrentPool()
        self._open_pools = 0
        self._open_lock = threading.Lock()
        self.start_copies()
        self.pool = self.new_pool()
        self._make = self.pool.make

    # -- pools --------------------------------------------------------------------------------------------------

    def new_pool(self, limit: int | None = None, reserve: int | None = None) -> MemoryPool:
        """A pool of this device; `reserve` bytes are set aside for it at once, and it never holds more."""
        memory: Any = self if reserve is None else Slab(self, self.pool.take(reserve))
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
        pool._take, pool.make = made[0].taker(), made[0].maker()
        return pool

    def default_pool(self) -> MemoryPool:
        return self.pool

    def peak_memory(self) -> int:
        return self.pool.peak

    def reset_peak_memory(self) -> None:
        self.pool.reset_peak()

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
        if not self.attribute("MANAGED_MEMORY"):
            raise DeviceError.at("TW030", f"{self.label} has no managed memory")
        return self._host_pool(managed=True)

    def _host_pool(self, managed: bool) -> MemoryPool:
        source = HostSource(self, managed)
        if not native_memory.available():
            return MemoryPool(source)
        return MemoryPool(source, arena=lambda retire: native_memory.NativeArena(retire, self))

    @cached_property
    def registers_read_only(self) -> bool:
        """Whether read-only host memory can be registered as such; elsewhere it is registered like any other."""
        try:
            return bool(self.attribute("READ_ONLY_HOST_REGISTER_SUPPORTED"))
        except DeviceError:
            return False

    # -- new arrays ---------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: DType, stream: int = 0) -> DeviceArray:
        """A new row-major array with undefined contents, for work on `stream`."""
        if recorders and stream in recorders:
            extents = checked_shape(shape)
            return self._on_block(recorders[stream].take(elements(extents) * dtype.itemsize, stream), extents, dtype)
        make = self.current_pool.make if self._open_pools else self._make
        made = make(shape, dtype, stream)  # type: ignore[arg-type]
        if made is not None:
            return made  # type: ignore[no-any-return]
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

    def _on_block(self, block: Buffer, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        return DeviceArray.at(self, block, 0, shape, dtype)

    def share(self, values: np.ndarray, dtype: DType | None = None) -> DeviceArray:
        """A host array as the device sees it, without a copy: pinned memory as it is, other memory is registered meanwhile."""
        known = known_dtype(values, dtype)
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
            token = PinnedRange(self.registry, owner)
            start = owner.__array_interface__["data"][0]
            block = MemoryBlock(self._mapped(start), 0, HOST, token, token, start)
        pointer = block.base + address - block.host
        return DeviceArray(self, pointer, values.shape, known, strides, block, values, not values.flags.writeable)

    def _mapped(self, address: int) -> int:
        with self.active():
            return int(self.call("cuMemHostGetDevicePointer", address, 0)[0])

    # -- foreign arrays -----------------------------------------------------------------------------------------

    def wrap(self, item: object, stream: int = 0) -> DeviceArray:
        """An array of another library that is on this device, without a copy; work on `stream` waits for its producer."""
        if isinstance(item, DeviceArray):
            if item.device is not self:
                raise DeviceError.at("TW033", f"the array is on {item.device.id}, but was given to {self.label}")
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
        block = MemoryBlock(pointer, 0, stream, None)
        return DeviceArray(self, pointer, shape, dtype, strides, block, item, readonly)

    def _wrap_torch(self, tensor: Any) -> DeviceArray:
        """A PyTorch tensor by its own methods: its array interface takes ten times as long."""
        if not tensor.is_cuda:
            raise UserError.at("TW009", "a tensor on the CPU is not an array on a CUDA device", help="pass tensor.cuda()")
        if tensor.requires_grad:
            raise UserError.at("TW009", "the tensor requires a gradient, which kernels do not compute", help="pass tensor.detach()")
        if tensor.is_neg():
            raise UserError.at("TW009", "the tensor is a negated view of other elements", help="pass tensor.resolve_neg()")
        dtype = torch_dtype(tensor)
        if dtype.is_complex and tensor.is_conj():
            raise UserError.at("TW009", "the tensor is a conjugated view of other elements", help="pass tensor.resolve_conj()")
        self._check_device(tensor.get_device())
        pointer = int(tensor.data_ptr())
        block = MemoryBlock(pointer, 0, 0, None)
        return DeviceArray(self, pointer, tuple(tensor.shape), dtype, tensor.stride(), block, tensor)

    def library(self, values: Iterable[object]) -> Library | None:
        return library_of(values)

    def dlpack_device(self) -> tuple[int, int]:
        return dlpack.CUDA, self.ordinal

    def registered(self, values: np.ndarray) -> AbstractContextManager[np.ndarray]:
        return registered(self, values)

    def _check_device(self, ordinal: int) -> None:
        if ordinal != self.ordinal:
            raise DeviceError.at("TW033", f"the array is on cuda:{ordinal}, but was given to {self.label}")

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
        if not self.attribute("MEMORY_POOLS_SUPPORTED"):
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
            pointer = int(results[0])
            if stream is not None:
                # From here on the memory is good for every stream.
                status, _ = self.driver.attempt("cuStreamSynchronize", stream)
                if status:
                    self.driver.attempt("cuMemFreeAsync", pointer, stream)
                    raise self.error("cuStreamSynchronize", status)
            return pointer

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


def _whole(values: np.ndarray) -> np.ndarray:
    """An array without gaps that covers the memory of a view: the view itself, or what it is a view of."""
    whole = values
    while isinstance(whole.base, np.ndarray) and not (whole.flags.c_contiguous or whole.flags.f_contiguous):
        whole = whole.base
    if not (whole.flags.c_contiguous or whole.flags.f_contiguous):
        raise UserError.at("TW009", f"an array with strides {values.strides} cannot be shared with a device", help="copy it")
    return whole
