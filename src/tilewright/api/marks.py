"""Marks on explicit kernels and on functions they call: alternatives for targets, and promises that are checked.

`@tw.target(gpu="nvidia")` makes a definition the one for that target; definitions of one name for several targets are alternatives, of
which a launch takes the one for its device. `@tw.vectorizable`, `@tw.gpu_compute` and `@tw.inline_always` say what must hold.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from tilewright.base.errors import UserError
from tilewright.execute.simt.kernels import GpuKernel, gpu

F = TypeVar("F", bound=Callable[..., object])
VENDORS = ("nvidia", "amd", "cpu")
_alternatives: dict[tuple[str, str], dict[str, Callable[..., object]]] = {}


def target(*, gpu: str | None = None, cpu: bool = False) -> Callable[[F], F]:
    """The definition that follows is for GPUs of a maker (`gpu="nvidia"`, which the emulator is too, or `"amd"`), or for CPUs."""
    if (gpu is None) == (not cpu):
        raise UserError.at("TW016", "target takes gpu= or cpu=True", help='for instance @tw.target(gpu="nvidia")')
    vendor = "cpu" if cpu else gpu
    if vendor not in VENDORS:
        raise UserError.at("TW016", f"target gpu={gpu!r} is not known", help="choose nvidia or amd")

    def mark(item: F) -> F:
        function: Any = item.python if isinstance(item, GpuKernel) else item
        key = (function.__module__, function.__qualname__)
        known = _alternatives.setdefault(key, {})
        known[str(vendor)] = function
        function.__simt_alternatives__ = known
        return item

    return mark


def inline_always(function: F) -> F:
    """A function that kernels call: its body stands in the place of every call. All functions of explicit kernels are treated so; what is
    no plain function, and so cannot be, is refused."""
    if not inspect.isfunction(function) or inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        what = type(function).__name__ if not inspect.isfunction(function) else "generator or coroutine"
        raise UserError.at("TW009", f"inline_always was given a {what}", help="mark a plain function that explicit kernels call")
    return function


def gpu_compute(function: Callable[..., object]) -> GpuKernel[...]:
    """An explicit kernel that is for GPUs alone: a launch on the CPU is refused. The emulator stands for a GPU."""
    made = gpu(function)
    made.only_gpu = True
    return made


def vectorizable(item: Any) -> Any:
    """A kernel whose threads have nothing to do with each other, so that any number of them may run as lanes of a SIMD register.

    A barrier, shared memory, warp operation or atomic operation in it is an error when it is compiled.
    """
    made = item if isinstance(item, GpuKernel) else gpu(item)
    made.independent = True
    return made
