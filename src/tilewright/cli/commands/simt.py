"""`tilewright compile`, `inspect`, `run` and `export` for explicit kernels: the functions of a Python file under `@tw.gpu` and `@tw.cpu`.

In: a `.py` file, what the arguments are and a block. Out: the thread stage, LLVM text or code of a kernel, or what it takes of a
multiprocessor. The file is executed as a module, not as a program: what stands under `if __name__ == "__main__"` does not run.
"""

from __future__ import annotations

import json as json_text
import runpy
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import click
import numpy as np

from tilewright.api.export import embedding, explicit_files
from tilewright.api.occupancy import occupancy
from tilewright.api.simd import CpuFunction
from tilewright.base.errors import UserError
from tilewright.base.target import Target, parse_target
from tilewright.cli.commands.emulate_script import has_explicit_kernels, parse_index
from tilewright.cli.guess import GuessedArguments, parse_arguments
from tilewright.codegen.llvm import native
from tilewright.codegen.nvptx.ptxas import INSTALL, assemble
from tilewright.codegen.registry import backend_for
from tilewright.compile.build import legal_program, llvm_text
from tilewright.compile.export import export_target, write_files
from tilewright.compile.simt import addressed, levelled
from tilewright.execute.devices import default_device, find_device, set_default_device
from tilewright.execute.simt.kernels import ConfiguredKernel, GpuKernel
from tilewright.frontend.simt.kernels import NO_DEFAULT, Parameter
from tilewright.ir.text import print_program

_MARKS = ("gpu", "cpu")
_STAGES = ("thread", "llvm", "ptx", "asm")
BLOCK = "256"
"""Threads of a block where nobody says how many."""
_EXTENT = 64
"""Extent of axes that are not said; code does not depend on it."""


def explicit_kernels(path: str) -> dict[str, GpuKernel[...]]:
    """The explicit kernels of a file, by name; none where it marks no function so."""
    if not has_explicit_kernels(path, *_MARKS):
        return {}
    with ExitStack() as stack:
        stack.callback(sys.path.__setitem__, slice(None), list(sys.path))
        sys.path.insert(0, str(Path(path).resolve().parent))
        names = runpy.run_path(path, run_name="__tilewright__")
    marked = [value.kernel if isinstance(value, CpuFunction) else value for value in names.values()]
    return {value.__name__: value for value in marked if isinstance(value, GpuKernel)}


def is_explicit(path: str, kernel: str | None) -> bool:
    """Whether a command is about an explicit kernel."""
    if not has_explicit_kernels(path, *_MARKS):
        return False
    from tilewright.cli.sources import read_source

    others = {function.name for function in read_source(path).kernels}
    return kernel not in others if kernel is not None else not others


def compile_explicit(
    path: str, kernel: str | None, arguments: str, target_name: str, stage: str | None, output: str | None, block: str
) -> None:
    """Print a stage of one kernel, or write it to a file."""
    target = parse_target("sm_90a" if target_name == "cpu" and stage == "ptx" else target_name)
    stage = stage or ("ptx" if target.kind == "nvptx" else "asm")
    if stage not in _STAGES:
        raise UserError.at("TW016", f"an explicit kernel has no stage {stage}", help=f"choose one of {', '.join(_STAGES)}")
    chosen = _chosen(path, kernel)
    configured, values = _configured(chosen, parse_arguments(arguments), block)
    text = stage_text(configured, values, target, stage)
    from tilewright.cli.commands.compile import write_text

    write_text(text, output)


def stage_text(configured: ConfiguredKernel, values: list[object], target: Target, stage: str) -> str:
    """One kernel at one stage."""
    if stage == "thread":
        return print_program(configured.thread_stage(*values, target=target.name))
    if target.is_gpu and stage in ("ptx", "asm") and backend_for(target).listing is None:
        return configured.compile(*values, target=target.name).code.decode()
    plain = configured.thread_stage(*values, target=target.name)
    program, target = addressed(plain, target), levelled(plain, target)
    text, _ = llvm_text(legal_program(program, target), target)
    return text if stage == "llvm" else (backend_for(target).listing or native.emit_assembly)(text, target)


def inspect_explicit(path: str, kernel: str | None, arguments: str, target_name: str, json: bool, block: str) -> None:
    """What kernels take: threads, registers, spills, shared memory, and how many blocks a multiprocessor holds."""
    chosen = _chosen(path, kernel)
    target = parse_target("cpu" if target_name == "nvptx" and chosen.device == "cpu" else target_name)
    configured, values = _configured(chosen, parse_arguments(arguments), block)
    artifact = configured.compile(*values, target=target.name)
    rule = artifact.launches[0]
    found: dict[str, object] = {
        "kernel": chosen.__name__, "target": target.name, "block": list(configured.config.block), "threads": rule.threads,
        "dynamic shared memory": rule.shared_bytes,
    }  # fmt: skip
    if target.is_host:
        found |= {"bytes of code": len(artifact.code), "arrays written": sorted(configured.written(*values))}
    uses = backend_for(target).uses
    if uses is not None:
        use = uses(artifact.code)[rule.entry]
        found |= {"registers": use.registers, "spilled bytes": use.spilled, "static shared memory": use.shared}
    assembled = assemble(artifact.code.decode(), target.name) if target.kind == "nvptx" else None
    if assembled is not None:
        one = assembled[rule.entry]
        held = occupancy(chosen, configured.config.block, *values, device=target.name)
        found |= {
            "registers": one.registers, "spilled bytes": one.spill_bytes, "local memory": one.stack_bytes, "static shared memory": one.shared_bytes,
            "blocks of a multiprocessor": held.blocks, "occupancy": round(held.fraction, 3), "limited by": list(held.limits),
        }  # fmt: skip
    if json:
        click.echo(json_text.dumps(found))
        return
    for name, value in found.items():
        click.echo(f"{name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    if assembled is None and target.kind == "nvptx":
        click.echo(f"registers and occupancy need ptxas: {INSTALL}")


def run_explicit(
    path: str, kernel: str | None, inputs: Mapping[str, object], device: str | None, grid: str | None, block: str
) -> tuple[dict[str, object], str]:
    """Launch one kernel: the arrays that it writes by name, and where it ran. Without a grid there are threads for the longest array."""
    chosen = _chosen(path, kernel)
    names = [p.name for p in chosen.parameters]
    _check_given("--in", chosen, inputs)
    missing = [p.name for p in chosen.parameters if p.name not in inputs and p.default is NO_DEFAULT]
    if missing:
        raise UserError.at("TW008", f"{chosen.__name__} needs {', '.join(missing)}", chosen.span, "give " + " ".join(f"--in {n}=…" for n in missing))
    values = {name: np.array(value) if isinstance(value := inputs[name], np.ndarray) else value for name in names if name in inputs}
    shape = parse_index("--block", block) if chosen.device != "cpu" or block != BLOCK else 1
    longest = max((v.size for v in values.values() if isinstance(v, np.ndarray)), default=1)
    if grid is not None:
        configured = chosen[parse_index("--grid", grid), shape]
    elif chosen.device == "cpu" and shape == 1:
        configured = chosen[1, 1]
    else:
        configured = chosen.over(longest, shape)
    place = find_device(chosen.device or device or "auto")
    before = default_device()
    set_default_device(place.id)
    try:
        configured(**values)
    finally:
        set_default_device(before)
    written = configured.written(**values)
    return {name: values[name] for name in names if name in written}, f"{place.id} ({place.name})"


def export_explicit_file(path: str, kernel: str | None, arguments: str, target_name: str, folder: str, block: str, embed: str | None = None) -> None:
    """Write the files of one kernel to `folder`."""
    chosen, target = _chosen(path, kernel), export_target(parse_target(target_name))
    configured, values = _configured(chosen, parse_arguments(arguments), block)
    files = explicit_files(configured, values, target, chosen.__name__, embed=embedding(embed or False))
    write_files(files, folder)
    click.echo(f"{chosen.__name__}({', '.join(p.name for p in chosen.parameters)}) in blocks of {configured.config.threads} thread(s), {target.name}")
    for name, data in files.items():
        click.echo(f"  {Path(folder) / name}  {len(data)} bytes")


def _check_given(option: str, kernel: GpuKernel[...], given: Mapping[str, object]) -> None:
    names = [p.name for p in kernel.parameters]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise UserError.at("TW016", f"{option}: {kernel.__name__} has no argument '{unknown[0]}'", kernel.span, f"its arguments are {', '.join(names)}")


def _chosen(path: str, kernel: str | None) -> GpuKernel[...]:
    known = explicit_kernels(path)
    if kernel is None and len(known) == 1:
        return next(iter(known.values()))
    if kernel is None:
        raise UserError.at(
            "TW016", f"{path} has {len(known)} explicit kernels: {', '.join(known)}", help="choose one with --kernel NAME"
        )
    if kernel not in known:
        raise UserError.at("TW016", f"{path} has no kernel '{kernel}'", help=f"its explicit kernels are {', '.join(known)}")
    return known[kernel]


def _configured(kernel: GpuKernel[...], given: Mapping[str, GuessedArguments], block: str) -> tuple[ConfiguredKernel, list[object]]:
    """The kernel on a grid with as many axes as the block, and stand-ins for its arguments."""
    _check_given("--args", kernel, given)
    shape = parse_index("--block", block) if kernel.device != "cpu" or block != BLOCK else 1
    axes = len(shape) if isinstance(shape, tuple) else 1
    return kernel[(2,) * axes, shape], [_stand_in(p, given.get(p.name)) for p in kernel.parameters]


def _stand_in(parameter: Parameter, given: GuessedArguments | None) -> object:
    if given is not None and given.extents is not None:
        return np.zeros([_EXTENT if extent is None else extent for extent in given.extents], given.dtype.numpy)
    if given is not None:
        return {"float": 0.0, "int": 0}.get(given.plain, given.dtype(0))
    if parameter.form == "buffer" and parameter.dtype is not None:
        return np.zeros(_EXTENT, parameter.dtype.numpy)
    if parameter.form == "number" and parameter.dtype is not None:
        return parameter.dtype(0)
    raise UserError.at(
        "TW008", f"the annotation of '{parameter.name}' does not say its type", parameter.span,
        f'say it: --args "{parameter.name}=f32[*]" for an array, "{parameter.name}=float" for a number',
    )  # fmt: skip
