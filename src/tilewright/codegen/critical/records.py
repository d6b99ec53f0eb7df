"""What the code generator of critical functions is told: the kernel, and how its parameters come in.

A thread-stage kernel has a parameter for each number, for each array and for each field of a state; the function has one for each number, array and state.
"""

from __future__ import annotations

from tilewright.base.dtypes import DType
from tilewright.base.record import record
from tilewright.ir.nodes import Kernel


@record
class CriticalArgument:
    """One parameter of the function. A number has a `dtype` and no pieces; memory is an address, with pieces behind it."""

    name: str
    dtype: DType | None = None
    """Of a number, or of the elements of an array."""
    shape: tuple[int, ...] = ()
    """Of an array."""
    size: int = 0
    """Bytes of memory."""
    align: int = 1
    pieces: tuple[tuple[str, int], ...] = ()
    """Tensors of the kernel, by name, and how many bytes behind the address they begin."""
    state: str = ""
    """The name of its class, where it is a state."""
    written: bool = False

    @property
    def is_memory(self) -> bool:
        return bool(self.pieces) or bool(self.state) or bool(self.shape)


@record
class CriticalText:
    """One critical function, ready to be written as LLVM text."""

    name: str
    kernel: Kernel
    arguments: tuple[CriticalArgument, ...]
    result: DType | None
    result_name: str
    """The tensor of the kernel that takes the result."""
