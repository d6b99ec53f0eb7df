"""`tilewright export`: kernels compiled ahead of time, as files that need nothing of Tilewright."""

from __future__ import annotations

from pathlib import Path

import click

from tilewright.api.export import embedding, pipeline_files
from tilewright.base.errors import UserError
from tilewright.base.target import parse_target
from tilewright.cli.guess import GuessedArguments, guess, parse_arguments
from tilewright.cli.sources import choose, read_source, walk
from tilewright.compile.export import export, export_target, write_files
from tilewright.tree.syntax import Function
from tilewright.tree.typed import ArrayArg, ScalarArg
from tilewright.zyn.load import load
from tilewright.zyn.module import ZynModule
from tilewright.zyn.whole_pipeline import PipelineInput


def export_file(path: str, kernel: str | None, arguments: str, target_name: str, folder: str, embed: str | None = None) -> None:
    """Write the files of each kernel of a source file to `folder`."""
    target = export_target(parse_target(target_name))
    entries = choose(walk(read_source(path), parse_arguments(arguments), kernel).raise_if_errors().entries, kernel, path)
    for entry in entries:
        files = export(entry.function, entry.signature(target.is_gpu), target, entry.name, embedding(embed or False))
        _write(files, folder, f"{entry.assumptions()}, {target.name}")


def export_pipeline(path: str, pipeline: str, arguments: str, target_name: str, folder: str) -> None:
    """Write the files of a whole pipeline of a ZynML program to `folder`."""
    if Path(path).suffix.lower() != ".zyn":
        raise UserError.at(
            "TW016",
            f"--pipeline: '{path}' is no ZynML program",
            help="a Python kernel is exported whole by --kernel NAME, whatever kernels it becomes",
        )
    target = export_target(parse_target(target_name))
    module = load(path)
    inputs = _inputs(module, pipeline, parse_arguments(arguments), path)
    files, kernels = pipeline_files(
        module, pipeline, {name: _input(given) for name, given in inputs.items()}, target, pipeline
    )
    taken = ", ".join(f"{name}: {given}" for name, given in inputs.items())
    _write(files, folder, f"{pipeline}({taken}) in {kernels} kernel{'' if kernels == 1 else 's'}, {target.name}")


def _inputs(
    module: ZynModule, pipeline: str, known: dict[str, GuessedArguments], path: str
) -> dict[str, GuessedArguments]:
    """What the pipeline takes: its parameters, then names of the program that it uses and that --args says something of."""
    function = next((s for s in module.tree.body if isinstance(s, Function) and s.name == pipeline), None)
    if function is None or pipeline not in module.functions():
        raise UserError.at(
            "TW016", f"{path} has no pipeline '{pipeline}'", help=f"it has {', '.join(module.functions()) or 'none'}"
        )
    found = {
        p.name: known.get(p.name) or guess(p.name, p.type, function)
        for p in function.params
        if p.default is None or p.name in known
    }
    unknown = [name for name in known if name not in found and name not in module.inputs()]
    if unknown:
        raise UserError.at(
            "TW008",
            f"pipeline '{pipeline}' has no argument '{unknown[0]}'",
            function.span,
            f"its arguments are {', '.join(p.name for p in function.params)}",
        )
    return found | {name: given for name, given in known.items() if name not in found}


def _input(given: GuessedArguments) -> PipelineInput:
    spec = given.spec(False)
    assert isinstance(spec, ArrayArg | ScalarArg)
    return PipelineInput(spec, given.extents or (), given.value)


def _write(files: dict[str, bytes], folder: str, said: str) -> None:
    write_files(files, folder)
    click.echo(said)
    for name, data in files.items():
        click.echo(f"  {Path(folder) / name}  {len(data)} bytes")
