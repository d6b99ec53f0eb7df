"""Devices by name: `cpu`, `cuda:0`, `emulator`, `auto`; what is here and what is chosen."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import TYPE_CHECKING

from tilewright.base.errors import DeviceError, UserError
from tilewright.base.record import record
from tilewright.base.target import DEFAULT_NVPTX, NVPTX, Target, host_cpu

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
    """Bytes; 0 where it is the host's."""
    stage: str = ""
    """The IR stage an emulator runs."""

    def __str__(self) -> str:
        return self.id


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


def cpu_device() -> Device:
    target = host_cpu()
    cores = target.multiprocessors
    return Device("cpu", "cpu", f"{platform.machine()}, {cores} core{'s' if cores != 1 else ''}, {target.name}", target)


def emulator_device(stage: str, target: Target | None = None) -> Device:
    chosen = target or NVPTX[DEFAULT_NVPTX]
    return Device(f"emulator:{stage}", "emulator", f"executes the {stage} stage for {chosen.name}", chosen, stage=stage)


def set_default_device(name: str) -> None:
    """The device of calls that name none: `cpu` (the start), `auto`, `cuda:0`, `emulator`…"""
    global _default
    find_device(name)
    _default = name
    for listener in _listeners:
        listener()


def when_default_changes(listener: Callable[[], None]) -> None:
    """Have `listener` called after each change of the default device."""
    _listeners.append(listener)


def default_device() -> str:
    return _default


def find_device(name: str) -> Device:
    """The device a user named. `auto` is the first GPU that is not lost, else the CPU."""
    if name == "auto":
        usable = [gpu.ordinal for gpu in _gpus() if not gpu.faults.lost]
        return find_device(f"cuda:{usable[0]}") if usable else cpu_device()
    if name == "cpu":
        return cpu_device()
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
    raise UserError.at("TW030", f"unknown device '{name}'", help="use cpu, cuda, cuda:N, emulator, emulator:loop|tile|thread or auto")
