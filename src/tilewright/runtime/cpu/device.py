"""The CPU, or some of its cores, as a device. In: artifacts of kind 'object'; out: programs that run on its threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.base.artifact import Artifact
from tilewright.base.limits import Cache, Limits
from tilewright.base.target import Target
from tilewright.runtime.core import host_info
from tilewright.runtime.core.device import DeviceRuntime, LoadedProgram, Number, Workspace
from tilewright.runtime.cpu import pool as cpu_pool
from tilewright.runtime.cpu import program as cpu


class CpuDevice(DeviceRuntime):
    """The CPU, or a part of its cores. Its memory is the host's."""

    def __init__(self, id: str, target: Target, partition: tuple[int, int] | None = None) -> None:
        self.id = self.label = id
        self.target, self.partition = target, partition

    def free_memory(self) -> tuple[int, int]:
        return host_info.free_memory(), host_info.total_memory()

    def limits(self) -> Limits:
        level2 = next((cache.bytes for cache in self.caches if cache.level == 2), 0)
        return Limits(vector_bytes=self.target.vector_bytes, l2_bytes=level2, clock=host_info.clock(self.cores[0]))

    @property
    def simd(self) -> str:
        return next(iter(self.target.features), "")

    @property
    def cores(self) -> tuple[int, ...]:
        return cpu_pool.partition_cores(*self.partition) if self.partition else cpu_pool.usable_cores()

    @property
    def caches(self) -> tuple[Cache, ...]:
        return host_info.caches(self.cores[0])

    @property
    def pool(self) -> cpu_pool.ThreadPool | None:
        """The threads of a part of the cores; None for all of them."""
        return cpu_pool.partition(*self.partition) if self.partition is not None else None

    def load(self, artifact: Artifact) -> LoadedProgram:
        return _HostProgram(cpu.load(artifact), self)


class _HostProgram(LoadedProgram):
    """A CPU program on some cores."""

    def __init__(self, program: cpu.CpuProgram, device: CpuDevice) -> None:
        self.artifact = program.artifact
        self._program, self._device = program, device

    def run(
        self, arrays: Mapping[str, Any], scalars: Mapping[str, Number], sizes: Mapping[str, int], stream: int = 0, *,
        take: Callable[[int], Workspace] | None = None,
    ) -> None:  # fmt: skip
        self._program.run(arrays, scalars, self._device.pool)
