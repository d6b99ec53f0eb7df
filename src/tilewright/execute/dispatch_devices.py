"""Calls on several devices at once: which calls are such, and who makes them. Loads what makes them when there is one.

In: what a call, or the decorator, says about devices; out: the result of the call. A list of devices splits the batch
(`distributed/data_parallel.py`), `heterogeneous` places independent parts of the kernel (`distributed/heterogeneous.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.base import hooks, registry
from tilewright.base.errors import UserError
from tilewright.execute.calls.callable_kernel import CallableKernel
from tilewright.execute.calls.in_place import refuse_function
from tilewright.execute.devices import Device
from tilewright.tree.metadata import CompileTarget

HETEROGENEOUS = "heterogeneous"


def spans_devices(asked: object) -> bool:
    """Whether `device=` means several devices, or is no name of one."""
    return asked == HETEROGENEOUS or isinstance(asked, CompileTarget | Device | tuple | list)


def spread_call(kernel: CallableKernel, asked: Any, args: tuple[object, ...], keywords: dict[str, Any]) -> object:
    keywords.pop("device", None)
    if isinstance(asked, Device):
        return kernel(*args, device=asked.id, **keywords)
    if asked in (CompileTarget.CPU, CompileTarget.GPU):
        return kernel(*args, device="cpu" if asked is CompileTarget.CPU else registry.accelerator(), **keywords)
    refuse_function(kernel.function, "which calls on several devices cannot do: each has a part", "call it on one device")
    if not isinstance(asked, tuple | list):
        return hooks.asked("place a call")(kernel, args, keywords)
    return hooks.asked("spread a kernel")(kernel, asked)(*args, **keywords)


def checked_spread(parallel: str, devices: Sequence[str] | None, device: str | None) -> tuple[str, ...] | None:
    """What the decorator says about several devices."""
    if not parallel and devices is None:
        return None
    if parallel not in ("", "data"):
        raise UserError.at(
            "TW005",
            f"parallel is {parallel!r}",
            help="a kernel is parallel='data'; tw.parallel([…], model=True) places several kernels",
        )
    if device is not None:
        raise UserError.at("TW016", f"a kernel has device={device!r} and devices={devices!r}", help="give one of them")
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise UserError.at("TW016", f"devices is {devices!r}", help=f"give a list of names, such as {registry.accelerator_examples()}")
    return tuple(map(str, devices))
