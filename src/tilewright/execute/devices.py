"""Devices by name: `cpu`, `cpu:0/2` (a part of its cores), `emulator`, `auto`, and those of every registered kind; what is here, what is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tilewright.base import registry
from tilewright.base.errors import DeviceError, UserError
from tilewright.base.target import CHIPS, Target, parse_target
from tilewright.execute.device import Device, array_device, own_memory
from tilewright.execute.kinds import kind_of, kinds
from tilewright.runtime.exchange.libraries import foreign_device, is_foreign
from tilewright.runtime.memory.device_array import DeviceArray

if TYPE_CHECKING:
    from tilewright.execute.places import DevicePlace

__all__ = [
    "Device",
    "array_device",
    "compute_devices",
    "cpu_partitions",
    "default_device",
    "device_of",
    "devices",
    "emulator_device",
    "find_device",
    "kind_of",
    "named_devices",
    "own_memory",
    "place_of",
    "set_default_device",
    "when_default_changes",
]

_default = "cpu"
_listeners: list[Callable[[], None]] = []


def devices() -> list[Device]:
    """Every device of this machine that can run kernels, without drivers that play a GPU on the CPU."""
    return [device for kind in kinds() for device in kind.devices()]


def named_devices() -> list[Device]:
    """Devices that are not in `devices()`, because they are the CPU in disguise: `webgpu` on lavapipe, `opencl` on PoCL. They run what names them."""
    return [device for kind in kinds() for device in kind.by_name()]


def compute_devices() -> list[Device]:
    """The devices of this machine that compute for real: `devices()` without the emulator."""
    return [device for kind in kinds() if not kind.simulated for device in kind.devices()]


def cpu_partitions(count: int) -> list[Device]:
    """The CPU as `count` devices, `cpu:0/2` and so on: each has cores of its own, and threads that stay on them."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError.at("TW016", f"the number of CPU partitions is {count!r}", help="give a whole number from 1 on")
    return [find_device(f"cpu:{index}/{count}") for index in range(count)]


def emulator_device(stage: str, target: Target | None = None) -> Device:
    """The emulator of an IR stage, for a GPU's target."""
    found: Device = registry.load("emulator").device(stage, target)
    return found


def set_default_device(name: str | Device) -> None:
    """The device of calls that name none: `cpu` (the start), `auto`, `emulator`, the name of a GPU…"""
    global _default
    found = find_device(name)
    _default = name if isinstance(name, str) else found.id
    for listener in _listeners:
        listener()


def when_default_changes(listener: Callable[[], None]) -> None:
    """Have `listener` called after each change of the default device."""
    _listeners.append(listener)


def default_device() -> str:
    """The device of calls that name none, as it was set."""
    return _default


def find_device(name: str | Device) -> Device:
    """The device a user named. `auto` is the first GPU that is not lost, else the CPU; `gpu` and `gpu:1` are GPUs whatever their make, `h100` one of that kind."""
    if isinstance(name, Device):
        if name.kind == "emulator":
            return name  # Its target may be any.
        name = name.id
    if not isinstance(name, str):
        raise UserError.at("TW009", f"a device is {name!r}, not a name such as {registry.examples()}")
    if name == "auto":
        return _automatic()
    kind, _, rest = name.partition(":")
    if kind == "gpu" and not registry.is_registered("gpu"):
        kind = registry.accelerator()
        name = f"{kind}:{rest}" if rest else kind
    if kind.lower() in CHIPS and not registry.is_registered(kind):
        return _chip(kind, rest)
    found: Device | None = registry.load(kind).find(name) if registry.is_registered(kind) else None
    if found is None:
        raise UserError.at("TW030", f"unknown device '{name}'", help=f"use {registry.usage()}")
    return found


def _chip(chip: str, rest: str) -> Device:
    """`h100`, `h100:1`: a GPU of this machine that runs code made for that chip."""
    target = parse_target(chip).name
    here = [device for device in compute_devices() if device.target.name == target]
    place = int(rest) if rest.isdecimal() else 0 if not rest else -1
    if 0 <= place < len(here):
        return here[place]
    name = f"{chip}:{rest}" if rest else chip
    raise DeviceError.at(
        "TW030", f"device '{name}' is not present: this machine has {len(here) or 'no'} GPU{'s' * (len(here) != 1)} for {target}",
        help=f"compile(…, target='{chip}') makes its code without a GPU; device='emulator' runs it",
    )  # fmt: skip


def _automatic() -> Device:
    for registration in registry.registered():
        found: Device | None = registry.load(registration.kind).automatic() if registration.automatic else None
        if found is not None:
            return found
    return find_device("cpu")


def device_of(values: Sequence[object]) -> str | None:
    """The device the first device array of a call is on."""
    for value in values:
        if isinstance(value, tuple | list):
            inside = device_of(value)
            if inside is not None:
                return inside
        elif isinstance(value, DeviceArray):
            return value.device.id
        elif is_foreign(value):
            return foreign_device(value)
    return None


def place_of(values: Sequence[object], device: str | Device | None) -> DevicePlace:
    """Where a primitive with these arguments runs: what `device=` names, else where the arrays are, else the default device."""
    found = find_device(device or device_of(list(values)) or default_device())
    return kind_of(found).place(found, values)
