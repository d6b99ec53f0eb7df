"""A device from outside the package: target, code generator, what executes its code, and a runtime. `register()` makes it known as `toy`."""

from __future__ import annotations

from tilewright.base import registry

DEVICES = 2


def register() -> None:
    """From now on `device="toy"` is the first toy device, `toy:1` the second."""
    registry.register("toy", _load)


def unregister() -> None:
    registry.unregister("toy")


def _load() -> object:
    from toy_device.kind import ToyKind

    return ToyKind()
