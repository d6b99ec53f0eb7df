"""`tilewright devices`, `tilewright cache` and `tilewright examples`: what is here."""

from __future__ import annotations

from dataclasses import fields

import click
from rich.console import Console
from rich.table import Table

from tilewright.base.errors import DeviceError
from tilewright.base.target import names, parse_target
from tilewright.cli import repository
from tilewright.compile.store import disk_cache
from tilewright.execute.devices import Device, named_devices
from tilewright.execute.devices import devices as find_devices
from tilewright.execute.kinds import absences, kind_of


def devices(limits: bool = False) -> None:
    """A table of the devices, and why there is no GPU where there is none; with `limits`, all that is known of each."""
    table = Table("device", "name", "target", "units", "memory", "free")
    for device in find_devices():
        memory = f"{device.memory / 2**30:.0f} GiB" if device.memory else ""
        units = "" if kind_of(device).simulated else str(device.target.multiprocessors)
        table.add_row(device.id, device.name, device.target.name, units, memory, _free(device))
    Console().print(table)
    if limits:
        for device in find_devices():
            _print_limits(device)
    disguised = named_devices()
    if disguised:
        click.echo("by name only, since these run on the CPU: " + ", ".join(f"{device.id} ({device.name})" for device in disguised))
    for reason in absences():
        click.echo(reason)
    checked = [name for name in names() if not parse_target(name).executed]
    click.echo(f"targets that are checked, not executed (no device was in reach): {', '.join(checked)}")


def _free(device: Device) -> str:
    """Free memory; nothing where the device cannot be asked, as one that another process has for itself."""
    try:
        return f"{device.free_memory / 2**30:.0f} GiB" if device.memory else ""
    except DeviceError:
        return "unavailable"


def _print_limits(device: Device) -> None:
    click.echo(f"{device.id}:")
    facts: dict[str, object] = {f.name: getattr(device.limits, f.name) for f in fields(device.limits)}
    if device.compute_capability is not None:
        facts["compute_capability"] = "{}.{}".format(*device.compute_capability)
    if device.cores:
        facts["simd"] = device.simd
        facts["cores"] = ", ".join(map(str, device.cores))
        facts |= {f"l{c.level}_{c.kind}_cache": f"{c.bytes} bytes for {c.cores} core(s)" for c in device.caches}
    for name, value in facts.items():
        click.echo(f"  {name.replace('_', ' '):32}{value}")


def cache(action: str) -> None:
    """Show or empty the disk cache."""
    store = disk_cache()
    if action == "clear":
        click.echo(f"removed {store.clear()} entries from {store.root}")
        return
    info = store.info()
    state = "" if store.enabled else " (switched off)"
    click.echo(f"{info.path}: {info.entries} entries, {info.bytes / 2**20:.1f} MiB of {store.max_bytes / 2**20:.0f} MiB{state}")


def examples(folder: str | None) -> None:
    """List the examples, or copy them into a new folder."""
    if folder is not None:
        click.echo(f"{len(repository.copy_examples(folder))} files in {folder}/")
        return
    root = repository.examples()
    click.echo(f"in {root}; tilewright examples --to FOLDER copies them")
    for path in sorted(p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        click.echo(f"  examples/{path.relative_to(root).as_posix()}")
