"""Indices that kernels found outside their arrays. In: loaded programs that check indices; out: the error, at the next wait.

Each such program has a record on the device, its `$failure` (`base.artifact`). The first thread that finds an index outside leaves its site, the
index and the extent there and raises a flag, a word of the host that all programs of a device share. Waits look at the flag alone. Where it is up, the
records are read and cleared, and the first is raised; the kernel left out the access, so the context is whole. Records of programs that are gone are
used again after the device was waited for.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tilewright.base.artifact import FAILURE_FIELDS, IndexSite, index_error
from tilewright.runtime.cuda.host_words import HostWords

if TYPE_CHECKING:
    from tilewright.runtime.cuda.context import CudaContext

_RECORD = struct.Struct(f"<{FAILURE_FIELDS}q")
_PAGE = 4096


class IndexReports:
    """The records of one device."""

    def __init__(self, words: HostWords) -> None:
        self.flag = ctypes.c_uint64()
        """Not 0 where a record was written since `take` last looked."""
        self._words = words
        self._flag_there = 0
        self._free: list[int] = []
        self._dropped: deque[int] = deque()
        self._sites: dict[int, tuple[IndexSite, ...]] = {}
        self._lock = threading.Lock()

    def record(self, device: CudaContext, sites: tuple[IndexSite, ...]) -> int:
        """The address of a new program's record. The context must be active."""
        with self._lock:
            if not self._flag_there:
                host, self._flag_there = self._words.take(device)
                self.flag = ctypes.c_uint64.from_address(host)
            if not self._free:
                page = int(device.call("cuMemAlloc", _PAGE)[0])
                self._free = list(range(page, page + _PAGE, _RECORD.size))
            address = self._free.pop()
            self._clear(device, address)
            self._sites[address] = sites
            return address

    def drop(self, address: int) -> None:
        """The program is gone; work of it that is queued may still write. This may run anywhere."""
        self._dropped.append(address)

    def settle(self, dropped: Iterable[int]) -> None:
        """The device was waited for since these were dropped."""
        with self._lock:
            for address in dropped:
                self._sites.pop(address, None)
                self._free.append(address)

    def dropped(self) -> list[int]:
        """What was dropped so far; `settle` is for after the wait."""
        found = []
        while self._dropped:
            found.append(self._dropped.popleft())
        return found

    def take(self, device: CudaContext) -> Exception | None:
        """The error of the first record that was written, all of which are cleared; None where there is none. The context must be active."""
        with self._lock:
            # Who writes a record from here on raises the flag again.
            self.flag.value = 0
            error: Exception | None = None
            for address, sites in self._sites.items():
                room = (ctypes.c_char * _RECORD.size)()
                device.call("cuMemcpyDtoH", ctypes.addressof(room), address, _RECORD.size)
                site, index, extent, _ = _RECORD.unpack(room)
                # A negative site is one whose index is still to come.
                if site > 0:
                    self._clear(device, address)
                    error = error or index_error(sites, site, index, extent)
            return error

    def _clear(self, device: CudaContext, address: int) -> None:
        content = ctypes.create_string_buffer(_RECORD.pack(0, 0, 0, self._flag_there), _RECORD.size)
        device.call("cuMemcpyHtoD", address, ctypes.addressof(content), _RECORD.size)
