"""`tilewright compile`: any stage of a file's kernels as text."""

from __future__ import annotations

from pathlib import Path

import click

from tilewright.base.errors import UserError
from tilewright.base.target import Target, parse_target
from tilewright.cli.guess import parse_arguments
from tilewright.cli.sources import Entry, File, choose, read_source, walk
from tilewright.codegen.llvm import native
from tilewright.codegen.registry import backend_for
from tilewright.compile.build import is_proven, legal_program, llvm_text
from tilewright.compile.driver import at_level, compile_kernel, compile_stages
from tilewright.compile.isolate import compile_isolated
from tilewright.ir.program import Program
from tilewright.ir.text import print_program
from tilewright.tree import typed_text
from tilewright.tree.show import show

STAGES = ("syntax", "typed", "loop", "tile", "thread", "llvm", "ptx", "asm")
_JOINED = STAGES[:5]
"""Stages whose texts can stand one after another; a file of the others holds one module."""
_SUFFIX = {"llvm": "ll", "ptx": "ptx", "asm": "s", "syntax": "txt", "typed": "txt"}
_COMMENT = {"llvm": ";", "asm": "#"}


def compile_file(path: str, kernel: str | None, arguments: str, target_name: str, stage: str | None, output: str | None) -> None:
    """Print a stage of the file's kernels, or write it to `output`: a file, or a folder that gets one file for each kernel."""
    target = parse_target(target_name)
    stage = stage or ("ptx" if target.kind == "nvptx" else "asm")
    if stage == "ptx" and target.kind != "nvptx":
        raise UserError.at("TW020", f"{target.name} {'is a CPU: it ' if target.is_host else ''}has no PTX", help="choose --stage asm, or a GPU target such as sm_90a")
    file = read_source(path)
    if stage == "syntax" and file.program is not None and kernel is None:
        write_text(show(file.program), output)
        return
    entries = choose(_entries(file, arguments, stage, kernel), kernel, path)
    folder = output is not None and (output.endswith("/") or Path(output).is_dir())
    if len(entries) > 1 and stage not in _JOINED and not folder:
        names = ", ".join(e.name for e in entries)
        raise UserError.at(
            "TW016", f"{path} has {len(entries)} kernels: {names}", help="choose one with --kernel NAME, or give a folder: -o build/",
        )  # fmt: skip
    texts = {entry.name: stage_text(entry, target, stage) for entry in entries}
    if output is None or not folder:
        write_text("\n".join(texts.values()), output)
        return
    for name, text in texts.items():
        place = Path(output) / f"{name}.{_SUFFIX.get(stage, 'kir')}"
        write_text(text, str(place))
        click.echo(str(place))


def _entries(file: File, arguments: str, stage: str, kernel: str | None) -> list[Entry]:
    known = parse_arguments(arguments)
    if stage == "syntax" and file.program is None:
        return [Entry(function.name, function, ()) for function in file.kernels]
    return walk(file, known, kernel).raise_if_errors().entries


def stage_text(entry: Entry, target: Target, stage: str) -> str:
    """One kernel at one stage, as text that ends in a newline."""
    if stage == "syntax":
        return show(entry.function)
    signature = entry.signature(target.is_gpu)
    if stage in ("ptx", "asm") and target.is_gpu and backend_for(target).listing is None:
        return compile_kernel(entry.function, signature, target).code.decode()
    done = compile_stages(entry.function, signature, target)
    target = at_level(entry.function, target)
    if stage == "typed":
        return typed_text.show(done.typed)
    if stage == "loop":
        return print_program(done.stages.loop)
    if stage == "tile":
        return print_program(done.stages.tile)
    if stage == "thread":
        return print_program(done.stages.thread)
    text, _ = llvm_text(legal_program(done.stages.thread, target), target)
    comment = ";" if target.kind.startswith("spirv-") else _COMMENT[stage]
    chosen = "\n".join(f"{comment} {schedule.describe()}" for schedule in done.stages.schedules)
    return f"{chosen}\n{text if stage == 'llvm' else _assembly(text, done.stages.thread, target)}"


def _assembly(text: str, program: Program, target: Target) -> str:
    if backend_for(target).finish_apart is None or all(is_proven(call.kernel) for call in program.calls):
        return (backend_for(target).listing or native.emit_assembly)(text, target)
    names = target.triple, target.cpu, native.machine_features(target)
    return compile_isolated("tilewright.codegen.llvm.native:emit_assembly_for", text, *names, target.level).decode()


def write_text(text: str, output: str | None) -> None:
    text = text if text.endswith("\n") else text + "\n"
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError.at("TW007", f"'{output}' cannot be written: {error.strerror or error}") from None
