"""Where watchdogs report. In: a loaded module whose kernels have one; out: which kernel was stopped, and where, after its context is lost.

Kernels write to memory of the host, which outlives the context. A device has pages of words for that, one word for each module; the
module's variable points to its word. Pages stay as long as the process: work that is still queued may report.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, SupportsInt

from tilewright.base.abi import ASSERT_BITS, ASSERT_MARK, WATCHDOG_MARK, WATCHDOG_SYMBOL
from tilewright.base.artifact import Artifact, Launch

if TYPE_CHECKING:
    from tilewright.runtime.cuda.context import CudaContext

_PAGE = 4096
_WORD = 8
_PORTABLE_MAPPED = 3


class Watchdogs:
    """The reports of one device's modules."""

    def __init__(self) -> None:
        self._page = 0
        self._used = _PAGE
        self._modules: dict[int, tuple[Launch, ...]] = {}

    def watch(self, device: CudaContext, module: SupportsInt, artifact: Artifact) -> None:
        """Tell a module where to report, if it has a watchdog. The context must be active."""
        if WATCHDOG_SYMBOL.encode() not in artifact.code:
            return
        if self._used == _PAGE:
            self._page = int(device.call("cuMemHostAlloc", _PAGE, _PORTABLE_MAPPED)[0])
            ctypes.memset(self._page, 0, _PAGE)
            self._used = 0
        host = self._page + self._used
        pointer = ctypes.c_uint64(int(device.call("cuMemHostGetDevicePointer", host, 0)[0]))
        variable, _ = device.call("cuModuleGetGlobal", module, WATCHDOG_SYMBOL.encode())
        device.call("cuMemcpyHtoD", int(variable), ctypes.addressof(pointer), _WORD)
        self._used += _WORD
        self._modules[host] = artifact.launches

    def stopped(self) -> str:
        """Which kernel a watchdog stopped, when and where; empty where none did."""
        for host, launches in self._modules.items():
            word = ctypes.c_uint64.from_address(host).value
            if word & WATCHDOG_MARK and not word & ASSERT_MARK:
                launch = launches[(word & ~WATCHDOG_MARK) >> 32]
                path = launch.place.rsplit(":", 2)[0]
                place = f" at {path}:{word & 0xFFFFFFFF}" if path else ""
                return f"kernel {launch.entry}{place} after {launch.watchdog / 1e9:g} s"
        return ""

    def failed(self) -> tuple[str, str, str]:
        """Of a failed assertion: its text, where it is, and in which kernel, block and thread it failed; empty where none did."""
        for host, launches in self._modules.items():
            word = ctypes.c_uint64.from_address(host).value
            if word & ASSERT_MARK:
                fields = []
                for bits in ASSERT_BITS:
                    fields.append(word & (1 << bits) - 1)
                    word >>= bits
                block, thread, ordinal, number = fields
                launch = launches[number]
                place, text = launch.asserts[ordinal]
                return text, place, f"kernel {launch.entry}, block {block}, thread {thread}"
        return "", "", ""
