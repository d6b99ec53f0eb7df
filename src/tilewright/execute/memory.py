"""Memory pools as users see them: `memory_pool(device, size=…)`, and the pool each device has of itself.

In: the name of a device and sizes, as numbers or as text ("64MiB"). Out: a `Pool`, whose arrays come and go without asking the
driver, and which can be the one all new arrays of a thread come from.
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tilewright.base import registry
from tilewright.base.dtypes import DType, f32
from tilewright.base.errors import DeviceError, UserError, public_methods
from tilewright.execute.arrays import as_dtype, as_shape, current_stream, device_named, require_array_device
from tilewright.runtime.core import streams
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray
from tilewright.runtime.memory.device_memory import MemoryBlock, MemoryPool, PoolStatistics
from tilewright.runtime.memory.host_memory import HostMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_size(size: int | str, name: str) -> int:
    """Bytes, from a number or from text such as '1GB' or '64 MiB'."""
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = _UNITS.get(found[2].lower()) if found else None
        if found is not None and unit is not None:
            size = int(float(found[1]) * unit)
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise UserError.at("TW016", f"{name}={size!r}", help="give bytes as a whole number, or text such as '64MiB'")
    return size


@public_methods("__enter__", "__exit__")
class Pool:
    """A memory pool of one device. `with pool:` new arrays of this thread come from it.

    Memory is handed out in size classes and reused in stream order: an array dropped while a kernel still works on it is handed to the
    next kernel of the same stream at once, and to nobody else before it is safe.
    """

    def __init__(self, gpu: ArrayDevice, pool: MemoryPool, size: int | None) -> None:
        self._gpu = gpu
        self._pool = pool
        self.size = size
        """Bytes set aside for it; None where it grows as needed."""

    @property
    def device(self) -> str:
        return self._gpu.id

    @property
    def limit(self) -> int | None:
        """The most bytes it may hold, in use and cached."""
        return self._pool.limit

    @limit.setter
    def limit(self, value: int | str | None) -> None:
        self._pool.limit = None if value is None else parse_size(value, "limit")

    def allocate(self, shape: int | Sequence[int], dtype: object = f32) -> Any:
        """A new array of this pool, with undefined contents."""
        if type(shape) is tuple and type(dtype) is DType and dtype.kind != "q" and not streams.STREAM_NAMED.value:
            made: DeviceArray | None = self._pool.make(shape, dtype, 0)
            if made is not None:
                return made
        self._gpu.push_pool(self._pool)
        try:
            return self._gpu.empty(as_shape(shape), as_dtype(dtype, with_complex=True), current_stream(self._gpu))
        finally:
            self._gpu.pop_pool()

    def free(self, array: Any) -> None:
        """Give an array's memory back now; using the array, or freeing it again, is an error from then on."""
        if not isinstance(array, DeviceArray):
            raise UserError.at("TW009", f"a {type(array).__name__} is no array of a pool")
        if not isinstance(array.owner, MemoryBlock) or array.owner.arena is not self._pool.arena:
            raise DeviceError.at("TW033", f"{array!r} is not of this pool", help="free it with the pool it was allocated from")
        if array.owner.freed:
            raise DeviceError.at("TW033", f"{array!r} was freed before", help="free an array once")
        array.free()

    def reset(self) -> None:
        """Free every array of the pool, also those somebody still holds: using one is an error from then on."""
        self._pool.reset()

    def flush(self, wait: bool = False) -> int:
        """Hand cached memory back to the device; how many bytes that was.

        Only what no stream still works on; with `wait=True` also the rest, after waiting for those streams.
        """
        return self._pool.flush(wait)

    def statistics(self) -> PoolStatistics:
        """Bytes in use, cached and at the peak; counts of allocations; fragmentation."""
        return self._pool.statistics()

    def trace(self, on: bool = True) -> None:
        """Keep the source line of each allocation, for the message when memory runs out. `TILEWRIGHT_TRACE_MEMORY=1` does from the start."""
        self._pool.trace(on)

    def __enter__(self) -> Pool:
        self._gpu.push_pool(self._pool)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._gpu.pop_pool()

    def __repr__(self) -> str:
        in_use, cached = self._pool.usage()
        size = f", size {self.size}" if self.size is not None else f", limit {self.limit}" if self.limit is not None else ""
        return f"Pool({self.device}{size}, {in_use} bytes in use, {cached} cached)"


class HostPool(Pool):
    """A memory pool of the host, whose arrays are NumPy's. `with pool:` what `tw.allocate` makes on the CPU in this thread comes from it.

    Memory is used again once nobody holds an array of it, or a view of one: `free` and `reset` end the counting, not the arrays.
    """

    def __init__(self, memory: HostMemory, size: int | None) -> None:
        self._memory = memory
        self.size = size

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def limit(self) -> int | None:
        """The most bytes it may hold, in use and cached."""
        return self._memory.limit

    @limit.setter
    def limit(self, value: int | str | None) -> None:
        self._memory.limit = None if value is None else parse_size(value, "limit")

    def allocate(self, shape: int | Sequence[int], dtype: object = f32) -> Any:
        """A new array of this pool, with undefined contents."""
        return self._memory.make(as_shape(shape), as_dtype(dtype, with_complex=True))

    def free(self, array: Any) -> None:
        """The array is done with; freeing it again is an error."""
        self._memory.free(array)

    def reset(self) -> None:
        """All arrays of the pool are done with."""
        self._memory.reset()

    def flush(self, wait: bool = False) -> int:
        """Hand cached memory back to the system; how many bytes that was."""
        return self._memory.flush()

    def statistics(self) -> PoolStatistics:
        """Bytes in use, cached and at the peak; counts of allocations; fragmentation."""
        return self._memory.statistics()

    def trace(self, on: bool = True) -> None:
        raise UserError.at("TW016", "a pool of the host keeps no source lines", help="trace the pool of a GPU, or use tracemalloc")

    def __enter__(self) -> Pool:
        self._memory.push()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._memory.pop()

    def __repr__(self) -> str:
        in_use, cached = self._memory.usage()
        size = f", size {self.size}" if self.size is not None else f", limit {self.limit}" if self.limit is not None else ""
        return f"Pool({self.device}{size}, {in_use} bytes in use, {cached} cached)"


def memory_pool(device: str | None = None, size: int | str | None = None, limit: int | str | None = None) -> Pool:
    """A new pool on a device (None: the first GPU, or the host where there is none). `size` bytes are set aside at once and are all it ever has; without, it
    grows, up to `limit`. On the host (`cpu`) `size` is a limit too, and arrays are NumPy's."""
    if size is not None and limit is not None:
        raise UserError.at("TW016", "a pool has a size or a limit, not both")
    reserve = None if size is None else parse_size(size, "size")
    most = None if limit is None else parse_size(limit, "limit")
    if device == "cpu" or (device is None and device_named("auto") is None):
        return HostPool(HostMemory(most if reserve is None else reserve), reserve)
    gpu = require_array_device(device or registry.accelerator(), "a memory pool")
    return Pool(gpu, gpu.new_pool(most, reserve), reserve)


def default_pool(device: str | None = None) -> Pool:
    """The pool that arrays of a GPU come from when no other is current."""
    gpu = require_array_device(device or registry.accelerator(), "a memory pool")
    return Pool(gpu, gpu.default_pool(), None)
