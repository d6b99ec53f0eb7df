"""Buffers of a device by number. In: buffers of a driver, with their address where they have one; out: the buffer that a number lies in, and where.

An array is a number that names a byte. Where memory has no addresses, each buffer gets a range of numbers of our own, with a gap behind it: a number
beyond the end of one buffer is never in the next.
"""

from __future__ import annotations

import bisect
import threading
from typing import Generic, TypeVar

B = TypeVar("B")

_FIRST, _GAP = 1 << 20, 1 << 16
"""Where our numbers begin, and what lies between two buffers."""


class NumberedBuffers(Generic[B]):
    """The buffers of one device."""

    def __init__(self) -> None:
        self.held = 0
        """Bytes of all of them."""
        self._buffers: dict[int, tuple[B, int]] = {}
        self._bases: list[int] = []
        self._next = _FIRST
        self._lock = threading.Lock()

    def add(self, buffer: B, nbytes: int, address: int = 0) -> int:
        """The number of the buffer's first byte: its address, else one of ours."""
        with self._lock:
            if not address:
                address = self._next
                self._next += -(-(nbytes + _GAP) // _GAP) * _GAP
            self._buffers[address] = buffer, nbytes
            bisect.insort(self._bases, address)
            self.held += nbytes
        return address

    def remove(self, address: int) -> B:
        """Forget the buffer that begins there."""
        with self._lock:
            buffer, nbytes = self._buffers.pop(address)
            del self._bases[bisect.bisect_left(self._bases, address)]
            self.held -= nbytes
        return buffer

    def locate(self, address: int) -> tuple[B, int]:
        """The buffer that a number means a byte of, and which."""
        base = address if address in self._buffers else self._bases[bisect.bisect_right(self._bases, address) - 1]
        return self._buffers[base][0], address - base
