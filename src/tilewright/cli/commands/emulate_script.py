"""`tilewright emulate` of a Python program with explicit kernels: the program runs as it is, its kernels on the emulator.

In: a `.py` file and arguments for it; a kernel, lines, a block and a thread to follow. Out: what the program prints, then either
the first fault with its source line, or that there was none. At the lines asked for, the variables of the thread are printed, or
Python's debugger takes over.
"""

from __future__ import annotations

import ast
import linecache
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from tilewright.api.debugging import debug, stop_text
from tilewright.base.errors import UserError
from tilewright.execute.devices import default_device, set_default_device
from tilewright.ir.emulator.warps.stepping import Stop
from tilewright.zyn.program_files import read_program


def has_explicit_kernels(path: str, *marks: str) -> bool:
    """Whether a Python file marks functions with `gpu`, or with one of `marks`; nothing is executed."""
    if not path.endswith(".py"):
        return False
    try:
        tree = ast.parse(read_program(Path(path)))
    except (UserError, SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return any(_is_marked(mark, marks or ("gpu",)) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for mark in node.decorator_list)


def _is_marked(mark: ast.expr, marks: tuple[str, ...]) -> bool:
    called = mark.func if isinstance(mark, ast.Call) else mark
    return (isinstance(called, ast.Attribute) and called.attr in marks) or (isinstance(called, ast.Name) and called.id in marks)


def parse_index(option: str, text: str) -> int | tuple[int, ...]:
    """`5` or `1,0,2`."""
    try:
        parts = tuple(int(part) for part in text.split(","))
    except ValueError:
        parts = (-1,)
    if not 1 <= len(parts) <= 3 or min(parts) < 0:
        raise UserError.at("TW016", f"{option} is {text!r}", help=f"give a number or an index, {option} 5 or {option} 1,0")
    return parts[0] if len(parts) == 1 else parts


def emulate_script(
    path: str, script_arguments: Sequence[str], kernel: str | None, lines: Sequence[int], block: str, thread: str, interactive: bool
) -> None:
    """Execute the file as a program whose kernels run on the emulator."""
    if not Path(path).is_file():
        raise UserError.at("TW016", f"there is no file {path}")
    before, seen, chosen = default_device(), 0, None

    def show(stop: Stop) -> str:
        nonlocal seen
        seen += 1
        click.echo(stop_text(stop))
        return "continue"

    with ExitStack() as stack:
        stack.callback(set_default_device, before)
        set_default_device("emulator")
        stack.callback(setattr, sys, "argv", sys.argv)
        sys.argv = [path, *script_arguments]
        stack.callback(sys.path.__setitem__, slice(None), list(sys.path))
        sys.path.insert(0, str(Path(path).resolve().parent))
        if lines or interactive:
            chosen = debug(
                kernel, block=parse_index("--block", block), thread=parse_index("--thread", thread), lines=lines or None,
                on_stop=None if interactive else show,
            )  # fmt: skip
            stack.enter_context(chosen)
        linecache.checkcache(path)
        runpy.run_path(path, run_name="__main__")
    if chosen is not None and chosen.left:
        click.echo("ended at the debugger's prompt")
        return
    if lines and not interactive and not seen:
        click.echo(f"thread {thread} of block {block} never came to line {', '.join(map(str, lines))}")
    click.echo("OK: no fault at the thread stage")
