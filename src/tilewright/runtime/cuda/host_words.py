"""Words of the host that kernels write to. In: a device; out: addresses of such words, for the host and for the device.

Pages stay as long as the process, also when the context is lost: work that is still queued may write.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.runtime.cuda.context import CudaContext

_PAGE = 4096
WORD = 8
_PORTABLE_MAPPED = 3


class HostWords:
    """The words of one device."""

    def __init__(self) -> None:
        self._page = 0
        self._used = _PAGE

    def take(self, device: CudaContext) -> tuple[int, int]:
        """A new word, which is zero: its address here and on the device. The context must be active."""
        if self._used == _PAGE:
            self._page = int(device.call("cuMemHostAlloc", _PAGE, _PORTABLE_MAPPED)[0])
            ctypes.memset(self._page, 0, _PAGE)
            self._used = 0
        host = self._page + self._used
        pointer = int(device.call("cuMemHostGetDevicePointer", host, 0)[0])
        self._used += WORD
        return host, pointer
