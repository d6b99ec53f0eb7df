"""Explicit kernels on the CPU: the same thread-stage kernel, with the threads of a block as loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.api.devices import Device
from tilewright.base.errors import TargetLimit

if TYPE_CHECKING:
    from tilewright.api.simt import Config
    from tilewright.api.simt_run import SimtRunner


def run_cpu(runner: SimtRunner, values: Sequence[object], config: Config, device: Device) -> None:
    """Launch on the CPU's cores."""
    raise TargetLimit.at(
        "TW020", f"{runner.source.name} is an explicit kernel of {config.threads} threads, which {device.id} does not run",
        runner.source.head(), "use device='emulator', or a GPU",
    )  # fmt: skip
