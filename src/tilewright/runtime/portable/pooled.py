"""A device whose memory comes in pieces of its own, with what is the same for all of them: pools, copies of arrays with strides, reports of kernels.

In: pieces of memory by address, and copies of bytes between them and the host; out: an `ArrayDevice`. An address is a number that names a byte of
the device's memory: where the device tells none, the numbers are our own (`has_addresses` says which).
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tilewright.base.artifact import (
    FAILURE_EXTENT,
    FAILURE_FIELDS,
    FAILURE_INDEX,
    FAILURE_SITE,
    Artifact,
    IndexSite,
    index_error,
)
from tilewright.base.dtypes import DType, i64
from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime.core.device import Transfer, new_ordinal
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray
from tilewright.runtime.memory.device_memory import MemoryBlock, MemoryPool, PythonArena, Retire

_MOST_RUNS = 256
"""Pieces that lie together: so many are copied one by one on the device, more go through the host."""


class OpaqueBlock(MemoryBlock):
    """A piece of memory that has no address users could do anything with."""

    __slots__ = ()

    has_addresses = False


class OpaqueArena(PythonArena):
    """Free lists of such memory."""

    block = OpaqueBlock


class _ThreadPools(threading.local):
    def __init__(self) -> None:
        self.pools: list[MemoryPool] = []


class Landed(Transfer):
    """A copy between host and device, with what it needs kept alive until it is over."""

    def __init__(self, event: Any, *kept: object) -> None:
        self._event, self._kept = event, kept

    def done(self) -> bool:
        return bool(self._event.done())

    def wait(self) -> None:
        self._event.synchronize()
        self._kept = ()


class PooledDevice(ArrayDevice):
    """A device with pooled memory."""

    opaque = False
    """Whether addresses are our own numbers."""
    name: str

    def start(self) -> None:
        """Called once by the device."""
        self.ordinal = new_ordinal()
        self._pools = _ThreadPools()
        self._reports: dict[int, tuple[DeviceArray, tuple[IndexSite, ...]]] = {}
        self._reporting = False
        self.pool = self.new_pool()

    # -- what the device does -------------------------------------------------------------------------------------------

    @abstractmethod
    def raw_allocate(self, nbytes: int) -> int:
        """The address of new memory, or 0 when there is none."""

    @abstractmethod
    def raw_free(self, pointers: list[int]) -> None:
        """Free memory that nothing uses any more."""

    @abstractmethod
    def is_idle(self, stream: int) -> bool:
        """Whether all work queued on the stream is done."""

    @abstractmethod
    def send(self, address: int, octets: np.ndarray, stream: int) -> None:
        """Copy bytes of the host, which stay as they are until the stream was waited for, behind the work queued on a stream."""

    @abstractmethod
    def fetch(self, address: int, octets: np.ndarray, stream: int) -> None:
        """Copy bytes to the host behind the work queued on a stream."""

    @abstractmethod
    def move(self, runs: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Copy on the device: target, source and bytes of each piece."""

    @abstractmethod
    def repeat(self, address: int, pattern: bytes, nbytes: int, stream: int) -> None:
        """Fill memory with a pattern of 1, 2 or 4 bytes."""

    # -- streams --------------------------------------------------------------------------------------------------------

    def stream_done(self, stream: int) -> bool:
        done = self.is_idle(stream)
        if done:
            self.raise_reports()
        return done

    def synchronize(self, stream: int | None = None) -> None:
        self.check_alive()
        self.wait_for(-1 if stream is None else stream)
        self.raise_reports()

    # -- pools ----------------------------------------------------------------------------------------------------------

    def new_pool(self, limit: int | None = None, reserve: int | None = None) -> MemoryPool:
        if reserve is not None:
            raise UserError.at("TW030", f"{self.label} sets no memory aside for a pool", help="give limit= instead of reserve=")
        retire: Retire | None = self.pool.retire if hasattr(self, "pool") else None
        return MemoryPool(self, limit, OpaqueArena if self.opaque else None, retire)

    def default_pool(self) -> MemoryPool:
        return self.pool

    def push_pool(self, pool: MemoryPool) -> None:
        self._pools.pools.append(pool)

    def pop_pool(self) -> None:
        self._pools.pools.pop()

    def peak_memory(self) -> int:
        return self.pool.peak

    def reset_peak_memory(self) -> None:
        self.pool.reset_peak()

    def holders(self, pool: MemoryPool) -> list[str]:
        """The arrays that hold the pool's memory, the largest first, in words."""
        found = sorted(pool.blocks(), key=lambda block: -block.nbytes)[:5]
        return [f"{block.nbytes} bytes" + (f" made at {block.trace}" if block.trace else "") for block in found]

    # -- arrays ---------------------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: DType, stream: int = 0) -> DeviceArray:
        extents = tuple(int(extent) for extent in shape)
        if any(extent < 0 for extent in extents):
            raise UserError.at("TW004", f"an array cannot have shape {extents}")
        self.check_alive()
        pool = self._pools.pools[-1] if self._pools.pools else self.pool
        block = pool.take(prod(extents) // dtype.block * dtype.itemsize, stream)
        return DeviceArray(self, block.base, extents, dtype, None, block)

    def read(self, array: DeviceArray, out: np.ndarray) -> None:
        stream = self._settled(array)
        self.fetch(array._pointer, _octets(out), stream)
        self.synchronize(stream)

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        stream = self._settled(array)
        self.send(array._pointer, _octets(values), stream)
        self.synchronize(stream)

    def _settled(self, array: DeviceArray) -> int:
        """The array's home stream, after the work of all streams that use it."""
        home, *others = array.streams()
        for other in others:
            self.order(home, other)
        return home

    def copy_in_async(self, target: DeviceArray, source: np.ndarray, stream: int = 0) -> Transfer:
        target.check_usable()
        values = np.array(source)
        target.owner.use_on(stream)
        if values.size:
            self.send(target._pointer, _octets(values), stream)
        return Landed(self.event().record(stream), target, values)

    def copy_out_async(self, target: np.ndarray, source: DeviceArray, stream: int = 0) -> Transfer:
        source.check_usable()
        source.owner.use_on(stream)
        if target.size:
            self.fetch(source._pointer, _octets(target), stream)
        return Landed(self.event().record(stream), source, target)

    def copy(self, target: DeviceArray, source: DeviceArray, stream: int = 0) -> None:
        target.check_usable()
        source.check_usable()
        if source.device is not self:
            target.copy_from(source.numpy())
            return
        if not source.size:
            return
        target.owner.use_on(stream)
        source.owner.use_on(stream)
        runs = _runs(target, source)
        if runs is not None:
            self.move(runs, stream)
            return
        # Many small pieces: through the host.
        (low, high), (first, last) = source.reach(), target.reach()
        read, written = np.empty(high - low, np.uint8), np.empty(last - first, np.uint8)
        self.fetch(source._pointer + low, read, stream)
        self.fetch(target._pointer + first, written, stream)
        self.synchronize(stream)
        _seen(target, written, first)[...] = _seen(source, read, low)
        self.send(target._pointer + first, written, stream)
        self.synchronize(stream)

    def fill(self, array: DeviceArray, pattern: bytes, stream: int) -> None:
        if array.nbytes:
            self.repeat(array._pointer, pattern, array.nbytes, stream)

    # -- reports --------------------------------------------------------------------------------------------------------

    def report_cell(self, artifact: Artifact) -> DeviceArray:
        """Memory in which a program leaves its first access outside an array."""
        cell = self.empty((FAILURE_FIELDS,), i64)
        cell.copy_from(np.zeros(FAILURE_FIELDS, np.int64))
        self._reports[id(cell)] = cell, artifact.sites
        return cell

    def forget_cell(self, cell: DeviceArray) -> None:
        self._reports.pop(id(cell), None)

    def expect_reports(self) -> None:
        """A kernel that may report was queued: the next wait looks."""
        self._reporting = True

    def raise_reports(self) -> None:
        """After a wait: raise what kernels found outside their arrays. They left such accesses out, so the device goes on."""
        if not self._reporting:
            return
        self._reporting = False
        found: Exception | None = None
        for cell, sites in list(self._reports.values()):
            values = np.zeros(FAILURE_FIELDS, np.int64)
            self.read(cell, values)
            if values[FAILURE_SITE]:
                cell.copy_from(np.zeros(FAILURE_FIELDS, np.int64))
                found = found or index_error(sites, int(values[FAILURE_SITE]), int(values[FAILURE_INDEX]), int(values[FAILURE_EXTENT]), self.label)
        self._reporting = False
        if found is not None:
            raise found

    def check_alive(self) -> None:
        """Raise where the device was lost."""
        if self.lost:
            raise DeviceError.at("TW032", f"{self.label} cannot be used any more: {self.lost}", help="start the program again")


def _octets(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)


def _seen(array: DeviceArray, raw: np.ndarray, start: int) -> np.ndarray:
    """The array's elements in a copy of the bytes it reaches."""
    size = array.dtype.itemsize
    return np.ndarray(array.shape, array.dtype.numpy, raw, -start, tuple(stride * size for stride in array.strides))


def _runs(target: DeviceArray, source: DeviceArray) -> list[tuple[int, int, int]] | None:
    """The pieces that lie together in both; None where there are many."""
    size, inner = target.dtype.itemsize, 1
    axes = [(n, a, b) for n, a, b in zip(target.shape, target.strides, source.strides, strict=True) if n != 1]
    while axes and axes[-1][1] == axes[-1][2] == inner:
        inner *= axes.pop()[0]
    count = prod(n for n, _, _ in axes)
    if count > _MOST_RUNS:
        return None
    places = [(0, 0)]
    for extent, to, origin in axes:
        places = [(a + k * to, b + k * origin) for a, b in places for k in range(extent)]
    return [(target._pointer + a * size, source._pointer + b * size, inner * size) for a, b in places]
