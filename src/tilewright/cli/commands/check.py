"""`tilewright check`: everything that is wrong with files, for people or as JSON for programs.

In: paths and what is known of arguments. Out: messages, or one JSON list of objects with the keys of `as_json`; whether there were no
errors. Warnings are shown and are no errors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from tilewright.base.errors import Diagnostic, TilewrightError, UserError
from tilewright.base.target import Target, parse_target
from tilewright.cli.guess import parse_arguments
from tilewright.cli.sources import File, Walk, read_source, walk
from tilewright.compile.collection import no_collection
from tilewright.compile.driver import performance_notes
from tilewright.tree.unused import unused
from tilewright.zyn.program_files import read_program

_CPU = parse_target("x86-64-avx2")
"""What kernels are planned for: whether they are slow is the same on any CPU, and no other needs LLVM to be known."""


def check(paths: Sequence[str], arguments: str, verbose: bool, as_list: bool = False, target: str | None = None) -> bool:
    """Report on every file; whether all are right. With a target, also what of explicit kernels it lacks."""
    with no_collection():  # checking makes many nodes and lets go of few
        return _check(paths, arguments, verbose, as_list, None if target is None else parse_target(target))


def _check(paths: Sequence[str], arguments: str, verbose: bool, as_list: bool, target: Target | None) -> bool:
    found: list[tuple[str, Diagnostic]] = []
    known = parse_arguments(arguments)
    for path in paths:
        result = Walk()
        explicit: list[str] = []
        diagnostics: list[Diagnostic] = []
        try:
            file = read_source(path, every_error=True)
            diagnostics += warnings(file)
            if file.program is None:
                from tilewright.cli.explicit_names import explicit_names

                explicit, wrong = explicit_names(read_program(Path(path), help=""), path, target)
                diagnostics += wrong
            result = walk(file, known, certain=True, alike=True)
            diagnostics = in_order([*result.errors, *result.warnings, *diagnostics, *([] if result.errors else slow(result))])
        except UserError as error:
            diagnostics = in_order([*error.diagnostics, *diagnostics])
        found += [(path, d) for d in diagnostics]
        if not as_list:
            _tell(path, result, explicit, diagnostics, verbose)
    if as_list:
        click.echo(json.dumps([as_json(path, d) for path, d in found], ensure_ascii=False, indent=1))
    errors = sum(d.severity == "error" for _, d in found)
    if errors and not as_list:
        click.echo(f"{errors} error{'s' if errors != 1 else ''}", err=True)
    return not errors


def warnings(file: File) -> list[Diagnostic]:
    """What is not wrong, but hardly meant."""
    roots = [file.program] if file.program is not None else list(file.kernels)
    return [warning for root in roots for warning in unused(root)]


def slow(result: Walk) -> list[Diagnostic]:
    """What makes the kernels of a file slow on a CPU, as far as it shows without their sizes."""
    found: list[Diagnostic] = []
    quick: set[object] = set()
    for entry in result.entries:
        if entry.form is not None and entry.form in quick:
            continue
        try:
            notes = performance_notes(entry.function, entry.signature(gpu=False), _CPU)
        except TilewrightError:
            continue  # what only a compilation finds is its own to say
        if not notes:
            quick.add(entry.form)
        found += [note.diagnostic for note in notes]
    return found


def in_order(diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    """Each once, by place."""
    return sorted(dict.fromkeys(diagnostics), key=lambda d: (d.span.line, d.span.column))


def as_json(path: str, diagnostic: Diagnostic) -> dict[str, object]:
    """One message as JSON. Lines and columns count from 1, the end is exclusive; 0 is an unknown place."""
    span = diagnostic.span
    return {
        "path": span.path if span.source is not None else path, "line": span.line, "column": span.column, "end_line": span.end_line,
        "end_column": span.end_column, "code": diagnostic.code, "severity": diagnostic.severity, "message": diagnostic.message,
        "help": diagnostic.help,
    }  # fmt: skip


def _tell(path: str, result: Walk, explicit: list[str], diagnostics: list[Diagnostic], verbose: bool) -> None:
    for diagnostic in diagnostics:
        click.echo(diagnostic.render(), err=True)
    if result.inputs:
        click.echo(f"{path}: inputs {', '.join(f'{name}: record' if name in result.records else f'{name}: {given}' for name, given in result.inputs.items())}")
    if not any(d.severity == "error" for d in diagnostics):
        names = ", ".join([*(e.name for e in result.entries), *explicit]) or "no kernels"
        click.echo(f"{path}: ok ({names})")
    if verbose:
        for entry in result.entries:
            assumed = " (assumed)" if any(given.guessed for _, given in entry.args) else ""
            click.echo(f"  {entry.assumptions()}{assumed}")
