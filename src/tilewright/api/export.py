"""`tw.export`: a kernel compiled ahead of time for arguments like the given ones, or a critical function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilewright.base.errors import UserError
from tilewright.base.target import parse_target
from tilewright.compile.critical_export import export_critical
from tilewright.compile.export import export as files_of
from tilewright.compile.export import export_target, write_files
from tilewright.execute.critical.function import CriticalFunction
from tilewright.execute.kernel import Kernel


def export(kernel: Kernel[Any, Any] | CriticalFunction[..., Any], *args: object, target: str = "cpu", folder: str | Path = ".", name: str = "", **keywords: object) -> list[Path]:
    """Write code, C header and Python loader of a kernel; the paths written.

    `args` and `keywords` are arguments like those of later calls: their dtypes, ranks and layouts are fixed by the code, and on a GPU what divides
    their sizes. `target` is `cpu` (this machine), `sm_90a`, `x86-64-avx2`… A critical function takes no arguments here: its annotations say all.
    """
    if isinstance(kernel, CriticalFunction):
        if args or keywords:
            raise UserError.at("TW016", "export() of a critical function takes no arguments like those of calls: its annotations say all", kernel.span)
        return write_files(export_critical(kernel.built, export_target(parse_target(target)), name or kernel.__name__), folder)
    if not isinstance(kernel, Kernel):
        raise UserError.at("TW009", f"export() takes a kernel, not a {type(kernel).__name__}", help="mark the function with @tw.kernel")
    chosen = export_target(parse_target(target))
    values = kernel.bound(*args, **keywords)
    runner = kernel.runner
    signature = runner.signature(runner.arguments(values, chosen.is_gpu), chosen.is_gpu)
    return write_files(files_of(kernel.function, signature, chosen, name or kernel.__name__), folder)
