"""Where watchdogs report. In: a loaded module whose kernels have one; out: which kernel was stopped, and where, after its context is lost.

Kernels write to words of the host, which outlive the context (`host_words`). Each module has one, to which its variable points.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, SupportsInt

from tilewright.base.abi import ASSERT_BITS, ASSERT_MARK, WATCHDOG_MARK, WATCHDOG_SYMBOL
from tilewright.base.artifact import Artifact, Launch
from tilewright.runtime.cuda.host_words import WORD, HostWords

if TYPE_CHECKING:
    from tilewright.runtime.cuda.context import CudaContext


class Watchdogs:
    """The reports of one device's modules."""

    def __init__(self, words: HostWords) -> None:
        self._words = words
        self._modules: dict[int, tuple[Launch, ...]] = {}

    def watch(self, device: CudaContext, module: SupportsInt, artifact: Artifact) -> None:
        """Tell a module where to report, if it has a watchdog. The context must be active."""
        if WATCHDOG_SYMBOL.encode() not in artifact.code:
            return
        host, there = self._words.take(device)
        pointer = ctypes.c_uint64(there)
        variable, _ = device.call("cuModuleGetGlobal", module, WATCHDOG_SYMBOL.encode())
        device.call("cuMemcpyHtoD", int(variable), ctypes.addressof(pointer), WORD)
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
