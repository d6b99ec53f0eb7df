"""Calls and launches of kernels on NVIDIA GPUs, and what the general path teaches the machine code that takes the next ones.

In: calls that were made; out: launchers that make such calls. `NativeCalls` keeps the launchers; a call they refuse comes to the general
path (`execute/calls/array_calls.py`, `execute/simt/array_launches.py`) and either works or raises the exact error.
"""

from __future__ import annotations

from tilewright.base.artifact import Artifact
from tilewright.device_kinds.cuda.native_calls import NativeCalls, ObservedCall
from tilewright.execute.calls.array_calls import ArrayCalls, MadeCall
from tilewright.execute.calls.kernel_calls import Entry, KernelSource
from tilewright.execute.device import Device
from tilewright.execute.simt.array_launches import ArrayLaunches, MadeLaunch
from tilewright.execute.simt.launches import Repeats
from tilewright.runtime.cuda.program import CudaProgram


class CudaCalls(ArrayCalls):
    """A kernel on NVIDIA GPUs."""

    learns = True

    def __init__(self, kernel: KernelSource) -> None:
        super().__init__(kernel)
        self.native = NativeCalls(kernel.function.name)

    def entry(self, device: Device, fallback: Entry) -> Entry | None:
        return self.native.chain(fallback)

    @property
    def latest(self) -> Artifact | None:
        return self.native.last

    def forget_latest(self) -> None:
        self.native.forget_last()

    def learn(self, call: MadeCall) -> None:
        """Let machine code take the next call like this one."""
        program, out = call.plan.program, call.out
        assert isinstance(program, CudaProgram)
        artifact = program.artifact
        if out is not None and any(p.name not in call.given or p.align > 16 for p in artifact.outputs):
            return
        apart: list[tuple[str, str]] = []
        for i, param in enumerate(artifact.outputs if out is not None else ()):
            others = [*([] if artifact.alias_safe else call.arrays), *(earlier.name for earlier in artifact.outputs[:i])]
            apart += [(param.name, other) for other in others]
        written = frozenset(p.name for p in artifact.in_place)
        known = [*call.arrays, *(p.name for p in artifact.outputs if out is not None)]
        apart += [(a, b) for a in known if a in written for b in known if a != b and not (b in written and b < a)]
        values, library = tuple(call.values.values()), call.place.library
        self.native.learn(
            ObservedCall(values, out, program, call.plan.sizes, call.plan.shapes, library, call.arrays, call.outputs, apart, written or None)
        )


class CudaLaunches(ArrayLaunches):
    """An explicit kernel on NVIDIA GPUs."""

    def learn(self, repeats: Repeats, launch: MadeLaunch) -> None:
        """Let machine code take the next launch like this one."""
        plan = launch.plan
        assert isinstance(plan.program, CudaProgram)
        native = repeats.fast
        if not isinstance(native, NativeCalls):
            native = repeats.fast = NativeCalls(repeats.name)
        library = launch.place.library
        native.learn(
            ObservedCall(launch.values, None, plan.program, plan.sizes, (), library, launch.arrays, {}, plan.apart, plan.written)
        )
