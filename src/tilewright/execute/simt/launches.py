"""Launches of one explicit kernel on devices of one kind: what every kind offers. In: the values of all parameters; out: arrays written.

`execute/simt/array_launches.py` has them for devices with memory of their own; `device_kinds` those of the CPU and the emulator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from tilewright.base.artifact import Artifact
from tilewright.base.record import record
from tilewright.base.target import DEFAULT_NVPTX, NVPTX, Target
from tilewright.execute.calls.arguments import element_strides
from tilewright.execute.device import Device
from tilewright.execute.simt.arguments import Leaf
from tilewright.execute.simt.config import LaunchConfig
from tilewright.frontend.simt.kernels import BuiltKernel, Parameter, SimtArg
from tilewright.frontend.simt.source import FunctionSource
from tilewright.passes.late.bounds_checks import Site
from tilewright.runtime.memory.device_array import DeviceArray

Key = tuple[object, ...]


def vendor_of(target: Target) -> str:
    """Which of a kernel's alternative definitions a target takes: nvidia, amd or cpu."""
    return "nvidia" if target.is_gpu else "cpu"


class FastLaunches(Protocol):
    """Machine code that takes launches it has learnt."""

    def chain(self, fallback: Callable[..., object]) -> Callable[..., object] | None:
        """A function that takes every launch it knows, and hands others to `fallback`; None where it knows none."""


class Repeats:
    """What one configuration of a kernel learnt from its launches."""

    def __init__(self, name: str, may_be_fast: bool) -> None:
        self.name, self.may_be_fast = name, may_be_fast
        self.fast: FastLaunches | None = None
        """Set by a kind of device that has machine code for launches."""
        self.by_default = False
        """Whether the arguments of those launches do not say where they go, so that another default device would."""
        self.calls: dict[Key, Any] = {}
        """Launches on device arrays, by all that decides which code runs and with which sizes."""

    def entry(self, fallback: Callable[..., object]) -> Callable[..., object] | None:
        """Machine code for launches like those made so far; None where there is none."""
        return self.fast.chain(fallback) if self.fast is not None else None


@record
class Facts:
    """What holds for the sizes of a launch, and makes its code shorter."""

    small: bool
    """Every extent, every offset in an array and every index of a thread in the grid is below 2^31."""
    alike: tuple[tuple[str, str], ...] = ()
    """Arrays that have the shape of another: (name, name of that one)."""

    @staticmethod
    def of(leaves: Sequence[Leaf], config: LaunchConfig) -> Facts:
        arrays = [(leaf.name, leaf.value) for leaf in leaves if isinstance(leaf.value, np.ndarray | DeviceArray)]
        small = all(grid * block <= _SMALL for grid, block in zip(config.grid, config.block, strict=True))
        small = small and all(_span(array) <= _SMALL for _, array in arrays)
        first: dict[tuple[int, ...], str] = {}
        alike: list[tuple[str, str]] = []
        for name, array in arrays:
            if array.ndim > 1:
                other = first.setdefault(array.shape, name)
                if other != name:
                    alike.append((name, other))
        return Facts(small, tuple(alike))


_SMALL = (1 << 31) - 1


def _span(array: np.ndarray | DeviceArray) -> int:
    """The largest offset of an element, and the largest extent."""
    strides = element_strides(array)
    reach = sum((extent - 1) * abs(stride) for extent, stride in zip(array.shape, strides, strict=True) if extent)
    return max(reach + 1, *array.shape, array.size) if array.ndim else 1


class ExplicitSource(Protocol):
    """An explicit kernel, as far as its launches on a device need it."""

    last: Artifact | None
    sites: dict[Key, tuple[Site, ...]]
    plain: bool

    @property
    def source(self) -> FunctionSource: ...

    @property
    def parameters(self) -> Sequence[Parameter]: ...

    def key(
        self, args: Sequence[SimtArg], config: LaunchConfig, aliased: bool = False, vendor: str = "nvidia", facts: Facts | None = None,
        target: Target = NVPTX[DEFAULT_NVPTX],
    ) -> Key:
        """All that code is made for."""

    def built(
        self, args: Sequence[SimtArg], config: LaunchConfig, aliased: bool = False, vendor: str = "nvidia", facts: Facts | None = None,
        target: Target = NVPTX[DEFAULT_NVPTX],
    ) -> BuiltKernel:
        """The thread-stage kernel for these arguments and this launch."""

    def built_with_steps(self, args: Sequence[SimtArg], config: LaunchConfig) -> BuiltKernel:
        """The kernel with a `step` before each statement, for the debugger."""

    def sizes(self, artifact: Artifact, arrays: Any, config: LaunchConfig) -> dict[str, int]:
        """The values of all sizes of a launch."""

    def check_written(self, leaves: Sequence[Leaf], written: frozenset[str]) -> None:
        """Refuse read-only arrays that the kernel writes to."""


class KernelLaunches(ABC):
    """One explicit kernel on the devices of one kind: keeps what was compiled and loaded for it."""

    def __init__(self, kernel: ExplicitSource) -> None:
        self.kernel = kernel

    @abstractmethod
    def run(self, values: Sequence[object], config: LaunchConfig, device: Device, repeats: Repeats | None) -> None:
        """Launch. `repeats` learns what the next launches need not look at."""
