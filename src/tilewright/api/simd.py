"""`@tw.cpu`: a Python function becomes serial code of the CPU, with explicit SIMD values where it asks for them.

The function is read as the body of an explicit kernel with one thread. Calling it runs it once, on the calling thread; `function[n](…)` runs it
n times, spread over the cores, with `tw.block.x` counting from 0 to n - 1. It writes to its arrays and returns nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, ParamSpec, overload

from tilewright.base.errors import UserError, public_methods
from tilewright.execute.simt.kernels import GpuKernel
from tilewright.runtime.core.entry import Entry

P = ParamSpec("P")


@public_methods("__init__", "__getitem__")
class CpuFunction(Entry, Generic[P]):
    """A compiled serial function. Call it as it is written; `function[n](…)` runs it n times over the cores."""

    __simt_kernel__ = True

    def __init__(self, function: Callable[P, object], check: bool = False, unchecked: bool = False, optimize: str = "") -> None:
        self.kernel: GpuKernel[P] = GpuKernel(function, device="cpu", check=check, unchecked=unchecked, optimize=optimize)
        super().__init__(self.kernel[1, 1])
        functools.update_wrapper(self, function)

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **named: P.kwargs) -> None:  # type: ignore[override]
            """Run it once, on the calling thread."""

    def __getitem__(self, count: object) -> Callable[..., object]:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UserError.at(
                "TW016", f"{self.__name__}[...] takes how many times it runs, got {count!r}", self.kernel.span, f"for instance {self.__name__}[8](...)"
            )
        return self.kernel[count, 1]

    def assembly(self, *args: P.args, **named: P.kwargs) -> str:
        """The machine's instructions for arguments like these."""
        from tilewright.base.target import host_cpu
        from tilewright.codegen.llvm.native import emit_assembly
        from tilewright.compile.build import llvm_text
        from tilewright.compile.simt import addressed, levelled

        target = host_cpu()
        program = self.kernel[1, 1].thread_stage(*args, target=target.name, **named)
        chosen = levelled(program, target)
        return emit_assembly(llvm_text(addressed(program, target), chosen)[0], chosen)

    def __reduce__(self) -> str:
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<CPU function {self.__name__}({', '.join(p.name for p in self.kernel.parameters)})>"

    __name__: str
    __qualname__: str


@overload
def cpu(function: Callable[P, object]) -> CpuFunction[P]: ...
@overload
def cpu(*, check: bool = False, unchecked: bool = False, optimize: str = "") -> Callable[[Callable[P, object]], CpuFunction[P]]: ...
def cpu(
    function: Callable[P, object] | None = None, *, check: bool = False, unchecked: bool = False, optimize: str = ""
) -> CpuFunction[P] | Callable[[Callable[P, object]], CpuFunction[P]]:
    """Mark a Python function as serial code of the CPU. Indices are checked while it runs, unless it is `unchecked`; `check=True` says so expressly.

    `optimize` is the level of its machine code: `O0` to `O3`, `Os`, `Olatency` or `tiered`.
    """
    if function is None:
        return lambda own: CpuFunction(own, check, unchecked, optimize)
    return CpuFunction(function, check, unchecked, optimize)
