"""Devices by name: `cpu`, `cpu:0/2` (a part of its cores), `cuda:0`, `emulator`, `auto`; what is here, what it has, what is chosen."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright.base.errors import DeviceError, UserError
from tilewright.base.limits import Cache, Limits
from tilewright.base.record import record
from tilewright.base.target import DEFAULT_NVPTX, NVPTX, Target, host_cpu
from tilewright.runtime import cpu_pool

if TYPE_CHECKING:
    from tilewright.runtime.cuda import CudaDevice

STAGES = ("loop", "tile", "thread")


@record
class Device:
    """A place kernels run. `kind` is cpu, cuda or emulator."""

    id: str
    kind: str
    name: str
    target: Target
    memory: int = 0
    """Bytes in all: of a GPU its own, of the CPU and its partitions the host's; 0 for an emulator."""
    stage: str = ""
    """The IR stage an emulator runs."""
    partition: tuple[int, int] | None = None
    """Of a part of the CPU's cores: which part, and how many there are."""

    def __str__(self) -> str:
        return self.id

    @property
    def type(self) -> str:
        """The same as `kind`."""
        return self.kind

    @property
    def free_memory(self) -> int:
        """Bytes that are free now. For a GPU this makes its context, and counts what the pool of this process holds as used."""
        if self.kind == "cuda":
            return self._gpu.free_memory()[0]
        from tilewright.runtime import host_info

        return 0 if self.kind == "emulator" else host_info.free_memory()

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Of a GPU."""
        return self._gpu.capability if self.kind == "cuda" else None

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors of a GPU, cores of a CPU."""
        return self.target.multiprocessors

    @property
    def simd(self) -> str:
        """The SIMD level code is made for on a CPU: `avx512`, `avx2`, `neon`…"""
        return next(iter(self.target.features), "") if self.kind == "cpu" else ""

    @property
    def cores(self) -> tuple[int, ...]:
        """The cores of a CPU (partition), as the system numbers them."""
        if self.kind != "cpu":
            return ()
        return cpu_pool.partition_cores(*self.partition) if self.partition else cpu_pool.usable_cores()

    @property
    def caches(self) -> tuple[Cache, ...]:
        """The caches of the CPU's first core, the nearest first."""
        from tilewright.runtime import host_info

        return host_info.caches(self.cores[0]) if self.kind == "cpu" else ()

    @property
    def limits(self) -> Limits:
        """What one kernel may use, and how fast the device is clocked."""
        if self.kind == "cuda":
            from tilewright.runtime.cuda_limits import limits_of

            return limits_of(self._gpu)
        target = self.target
        if self.kind == "cpu":
            from tilewright.runtime import host_info

            level2 = next((cache.bytes for cache in self.caches if cache.level == 2), 0)
            return Limits(vector_bytes=target.vector_bytes, l2_bytes=level2, clock=host_info.clock(self.cores[0]))
        return Limits(
            threads_per_block=target.max_threads, block=(target.max_threads, 1, 1), grid=target.max_grid, warp_size=target.warp_size,
            shared_per_block=target.max_shared, shared_per_multiprocessor=target.shared_per_sm, registers_per_thread=target.max_registers,
            registers_per_multiprocessor=target.registers_per_sm, threads_per_multiprocessor=target.threads_per_sm,
            vector_bytes=target.vector_bytes,
        )  # fmt: skip

    @property
    def _gpu(self) -> CudaDevice:
        return _gpus()[int(self.id.split(":")[1])]


_default = "cpu"
_listeners: list[Callable[[], None]] = []


def devices() -> list[Device]:
    """Every device of this machine that can run kernels."""
    found = [cpu_device()]
    for gpu in _gpus():
        try:
            found.append(Device(f"cuda:{gpu.ordinal}", "cuda", gpu.name, gpu.target, gpu.memory))
        except (UserError, DeviceError):
            continue  # no target is known for it, or the driver is too old; asking for it by name says so
    found.append(emulator_device("thread"))
    return found


def _gpus() -> list[CudaDevice]:
    """The CUDA runtime is loaded when somebody first asks for GPUs."""
    from tilewright.runtime import cuda

    return cuda.devices()


def _why_no_gpu() -> str:
    from tilewright.runtime import cuda

    return cuda.unavailable_reason()


def compute_devices() -> list[Device]:
    """The devices of this machine that compute for real: `devices()` without the emulator."""
    return [device for device in devices() if device.kind != "emulator"]


@functools.cache
def cpu_device() -> Device:
    from tilewright.runtime import host_info

    return Device("cpu", "cpu", _cpu_name(host_cpu()), host_cpu(), host_info.total_memory())


def _cpu_name(target: Target) -> str:
    cores = target.multiprocessors
    return f"{platform.machine()}, {cores} core{'s' if cores != 1 else ''}, {target.name}"


def cpu_partitions(count: int) -> list[Device]:
    """The CPU as `count` devices, `cpu:0/2` and so on: each has cores of its own, and threads that stay on them."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError.at("TW016", f"the number of CPU partitions is {count!r}", help="give a whole number from 1 on")
    return [_partition(index, count) for index in range(count)]


@functools.cache
def _partition(index: int, count: int) -> Device:
    cores = cpu_pool.usable_cores()
    if count > len(cores):
        raise DeviceError.at(
            "TW030", f"the CPU cannot be divided by {count}: this process may use {len(cores)} core(s)", help="use fewer partitions"
        )
    own = cpu_pool.partition_cores(index, count)
    target = replace(host_cpu(), multiprocessors=len(own))
    whole = cpu_device()
    return Device(f"cpu:{index}/{count}", "cpu", _cpu_name(target), target, whole.memory, partition=(index, count))


def emulator_device(stage: str, target: Target | None = None) -> Device:
    chosen = target or NVPTX[DEFAULT_NVPTX]
    return Device(f"emulator:{stage}", "emulator", f"executes the {stage} stage for {chosen.name}", chosen, stage=stage)


def set_default_device(name: str | Device) -> None:
    """The device of calls that name none: `cpu` (the start), `auto`, `cuda:0`, `emulator`…"""
    global _default
    found = find_device(name)
    _default = name if isinstance(name, str) else found.id
    for listener in _listeners:
        listener()


def when_default_changes(listener: Callable[[], None]) -> None:
    """Have `listener` called after each change of the default device."""
    _listeners.append(listener)


def default_device() -> str:
    return _default


def find_device(name: str | Device) -> Device:
    """The device a user named. `auto` is the first GPU that is not lost, else the CPU."""
    if isinstance(name, Device):
        name = name.id
    if not isinstance(name, str):
        raise UserError.at("TW009", f"a device is {name!r}, not a name such as 'cpu' or 'cuda:0'")
    if name == "auto":
        usable = [gpu.ordinal for gpu in _gpus() if not gpu.faults.lost]
        return find_device(f"cuda:{usable[0]}") if usable else cpu_device()
    if name == "cpu":
        return cpu_device()
    part = re.fullmatch(r"cpu:(\d+)/(\d+)", name)
    if part is not None:
        index, count = int(part[1]), int(part[2])
        if index >= count:
            raise UserError.at("TW030", f"unknown device '{name}'", help=f"the parts of cpu:…/{count} are numbered from 0 to {count - 1}")
        return _partition(index, count)
    if name == "emulator":
        return emulator_device("thread")
    if name.startswith("emulator:") and name.split(":", 1)[1] in STAGES:
        return emulator_device(name.split(":", 1)[1])
    if name == "cuda" or (name.startswith("cuda:") and name[5:].isdigit()):
        ordinal = int(name[5:] or 0) if ":" in name else 0
        gpus = _gpus()
        if ordinal < len(gpus):
            gpu = gpus[ordinal]
            return Device(f"cuda:{ordinal}", "cuda", gpu.name, gpu.target, gpu.memory)
        reason = _why_no_gpu() or f"this machine has {len(gpus)}"
        raise DeviceError.at(
            "TW030", f"device '{name}' is not present: {reason}", help="use device='cpu', or device='emulator' to run GPU code without a GPU"
        )
    raise UserError.at("TW030", f"unknown device '{name}'", help="use cpu, cpu:I/N, cuda, cuda:N, emulator, emulator:loop|tile|thread or auto")
