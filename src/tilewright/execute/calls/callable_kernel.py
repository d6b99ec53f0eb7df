"""A kernel as those see it who make calls for it: asynchronous calls, calls on several devices, tuning. `execute/kernel.py` has the class."""

from __future__ import annotations

from typing import Any, Protocol

from tilewright.execute.calls.run import Runner
from tilewright.execute.device import Device
from tilewright.tree.syntax import Function


class CallableKernel(Protocol):
    """What is called."""

    __name__: str

    @property
    def asynchronous(self) -> bool: ...

    @property
    def device(self) -> str | None: ...

    @property
    def function(self) -> Function: ...

    @property
    def parameter_names(self) -> tuple[str, ...]: ...

    @property
    def runner(self) -> Runner: ...

    def __call__(self, *args: Any, **keywords: Any) -> Any: ...


class TunableKernel(CallableKernel, Protocol):
    """What can be tuned, and spread over devices."""

    ran: tuple[object, ...]
    """What ran where in the latest call on several devices."""
    spreads: dict[tuple[str, ...], object]

    @property
    def precision(self) -> str: ...

    @property
    def schedule(self) -> str: ...

    @property
    def launches(self) -> int: ...

    def bound(self, *args: object, **keywords: object) -> dict[str, object]:
        """The arguments of a call by name."""

    def forget_programs(self) -> None:
        """Choose code anew at the next call."""

    def take_tuned(self, device: Device) -> None:
        """Choose code anew for what was measured on a device, in tiers once the background has made it."""
