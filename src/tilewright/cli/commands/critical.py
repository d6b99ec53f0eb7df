"""`tilewright inspect --critical`: what is proved of the critical functions of a file.

In: a `.py` file, which is executed as a module, and a name; out: for each function what its machine code does. A function whose promise
(`@tw.no_allocation`, `@tw.no_syscalls`) is not kept ends the command with an error.
"""

from __future__ import annotations

import json as json_text
import runpy
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tilewright.base.errors import UserError
from tilewright.execute.critical.function import CriticalFunction


def critical_functions(path: str) -> dict[str, CriticalFunction[..., Any]]:
    """The critical functions that a file defines, by name."""
    if not Path(path).is_file():
        raise UserError.at("TW007", f"file '{path}' does not exist")
    with ExitStack() as stack:
        stack.callback(sys.path.__setitem__, slice(None), list(sys.path))
        sys.path.insert(0, str(Path(path).resolve().parent))
        names = runpy.run_path(path, run_name="__tilewright__")
    return {value.__name__: value for value in names.values() if isinstance(value, CriticalFunction)}


def inspect_critical(path: str, name: str | None, json: bool) -> None:
    """Print the proofs."""
    found = critical_functions(path)
    if name is not None and name not in found:
        raise UserError.at("TW002", f"'{path}' has no critical function '{name}'", help=f"it has {', '.join(found) or 'none'}")
    if not found:
        raise UserError.at("TW002", f"'{path}' has no critical function", help="mark one with @tw.critical")
    chosen = list(found.values()) if name is None else [found[name]]
    proofs = [function.compile().proof() for function in chosen]
    if json:
        click.echo(json_text.dumps([asdict(proof) | {"no_allocation": proof.no_allocation, "no_syscalls": proof.no_syscalls} for proof in proofs], indent=2))
    else:
        click.echo("\n\n".join(f"{proof}\n{proof.estimate.table()}" for proof in proofs))
