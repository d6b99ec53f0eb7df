"""`tilewright export`: kernels compiled ahead of time, as files that need nothing of Tilewright."""

from __future__ import annotations

from pathlib import Path

import click

from tilewright.base.target import parse_target
from tilewright.cli.guess import parse_arguments
from tilewright.cli.sources import choose, read_source, walk
from tilewright.compile.export import export, export_target, write_files


def export_file(path: str, kernel: str | None, arguments: str, target_name: str, folder: str) -> None:
    """Write the files of each kernel of a source file to `folder`."""
    target = export_target(parse_target(target_name))
    entries = choose(walk(read_source(path), parse_arguments(arguments), kernel).raise_if_errors().entries, kernel, path)
    for entry in entries:
        files = export(entry.function, entry.signature(target.is_gpu), target, entry.name)
        write_files(files, folder)
        click.echo(f"{entry.assumptions()}, {target.name}")
        for name, data in files.items():
            click.echo(f"  {Path(folder) / name}  {len(data)} bytes")
