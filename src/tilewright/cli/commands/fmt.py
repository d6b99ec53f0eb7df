"""`tilewright fmt`: ZynML files in the one style."""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from tilewright.base.errors import UserError
from tilewright.frontend.zyn.format import format_text
from tilewright.zyn.program_files import read_program


def fmt(paths: Sequence[str], check: bool, diff: bool) -> bool:
    """Format files in place (`-` is the terminal); with `check` or `diff` only say what would change. Whether all was well."""
    well = True
    for path in paths:
        text = _read(path)
        try:
            done = format_text(text, path)
        except UserError as error:
            click.echo(str(error), err=True)
            well = False
            continue
        if diff:
            click.echo("".join(difflib.unified_diff(text.splitlines(True), done.splitlines(True), path, path)), nl=False)
        if check or diff:
            if done != text:
                well = False
                if check:
                    click.echo(f"{path}: would change", err=True)
        elif path == "-":
            click.echo(done, nl=False)
        elif done != text:
            _write(Path(path), done)
            click.echo(f"{path}: formatted")
    return well


def _read(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else read_program(Path(path), help="")
    except UnicodeDecodeError:
        raise UserError.at("TW007", f"'{path}' cannot be read: it is not UTF-8") from None


def _write(path: Path, text: str) -> None:
    """Put the new text in the old one's place, all of it or nothing."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, path.stat().st_mode)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UserError.at("TW007", f"'{path}' cannot be written: {error.strerror or error}") from None
