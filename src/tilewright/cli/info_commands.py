"""`tilewright devices` and `tilewright cache`: what is here."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from tilewright.api.devices import devices as find_devices
from tilewright.compile.driver import disk_cache
from tilewright.runtime import cuda


def devices() -> None:
    """A table of the devices, and why there is no GPU where there is none."""
    table = Table("device", "name", "target", "units", "memory")
    for device in find_devices():
        memory = f"{device.memory / 2**30:.0f} GiB" if device.memory else ""
        units = "" if device.kind == "emulator" else str(device.target.multiprocessors)
        table.add_row(device.id, device.name, device.target.name, units, memory)
    Console().print(table)
    if not cuda.devices():
        click.echo(f"no CUDA device: {cuda.unavailable_reason()}")


def cache(action: str) -> None:
    """Show or empty the disk cache."""
    store = disk_cache()
    if action == "clear":
        click.echo(f"removed {store.clear()} entries from {store.root}")
        return
    info = store.info()
    state = "" if store.enabled else " (switched off)"
    click.echo(f"{info.path}: {info.entries} entries, {info.bytes / 2**20:.1f} MiB of {store.max_bytes / 2**20:.0f} MiB{state}")
