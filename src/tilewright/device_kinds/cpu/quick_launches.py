"""Launches of explicit kernels on the CPU that no line of Python sees. In: a program that was launched, and how; out: a builtin function.

The function is an entry stub as that of other kernels (`codegen/host/entries.py`), made for one grid: arrays that are written are taken in place, and share no
memory with others; the record of an access outside an array lies on the stack. What the stub refuses goes to the general path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

from tilewright.base import abi
from tilewright.base.artifact import FAILURE, ArrayParam, Artifact, IndexSite
from tilewright.base.sizes import Size
from tilewright.base.target import host_cpu
from tilewright.codegen.host.entries import host_object
from tilewright.execute.simt.checks import FAILURE_LENGTH, Sites, raise_failure
from tilewright.execute.simt.config import LaunchConfig
from tilewright.execute.simt.host import launch_sizes
from tilewright.frontend.simt.kernels import BuiltKernel
from tilewright.runtime.core import streams
from tilewright.runtime.core.builtin import METH_FASTCALL_KEYWORDS, MethodDefinition, builtin_function
from tilewright.runtime.core.entry import provide_front
from tilewright.runtime.core.objects import ObjectCode, bind_symbol

LAUNCHES_BEFORE = 2
"""Launches of one kind before machine code is made for more of them."""


class QuickLaunch:
    """The stub of one kernel and one grid."""

    def __init__(self, artifact: Artifact, built: BuiltKernel, sites: Sites, config: LaunchConfig) -> None:
        self._sites, self._kernel, self._grid = sites, built.kernel, config.grid
        bind_symbol("tilewright_streams_special", ctypes.addressof(streams.FAST_PATH_OFF))
        self._objects = ObjectCode(artifact.code, host_object(_stub_form(artifact, built.written, config), host_cpu(), FAILURE_LENGTH, special=True))
        provide_front(self._objects)
        self._method = MethodDefinition(artifact.name.encode(), self._objects.address(abi.STUB_ENTRY), METH_FASTCALL_KEYWORDS, None)
        self._function: tuple[Callable[..., object], Callable[..., object]] | None = None

    def outside(self, *values: int) -> None:
        """An access lay outside its array: the stub asks for the error."""
        raise_failure(values, self._sites, self._kernel, self._grid)

    def chain(self, fallback: Callable[..., object]) -> Callable[..., object]:
        """The stub as a function that hands what it refuses to `fallback`."""
        if self._function is None or self._function[0] is not fallback:
            self._function = fallback, builtin_function(self._method, (self, fallback))
        return self._function[1]


def can_be_quick(artifact: Artifact, config: LaunchConfig) -> bool:
    """Whether stubs do what a launch needs."""
    return not artifact.outputs and not artifact.scratch and 0 not in config.grid and all(not launch.asserts for launch in artifact.launches)


def _stub_form(artifact: Artifact, written: frozenset[str], config: LaunchConfig) -> Artifact:
    """The artifact as the stub sees it: sizes of the grid are constants, and the record of failures is its own."""
    inputs = tuple(
        replace(p, role="inout") if isinstance(p, ArrayParam) and p.name in written else p for p in artifact.inputs if p.name != FAILURE
    )
    failure = tuple(replace(p, role="scratch") for p in artifact.inputs if isinstance(p, ArrayParam) and p.name == FAILURE)
    bound = {binding.name for binding in artifact.bindings}
    sizes = tuple((name, Size.of(value)) for name, value in launch_sizes(config).items() if name not in bound)
    return replace(
        artifact, inputs=inputs, scratch=failure, computed=(*artifact.computed, *sizes),
        sites=(IndexSite(artifact.name, "", "", 0, 0),) if failure else (),
    )  # fmt: skip
