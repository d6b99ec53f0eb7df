"""`tw.export`: a kernel compiled ahead of time for arguments like the given ones, a pipeline of a ZynML program, or a critical function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilewright.api.simd import CpuFunction
from tilewright.base.errors import UserError
from tilewright.base.target import Target, parse_target
from tilewright.compile.critical_export import export_critical
from tilewright.compile.export import export as files_of
from tilewright.compile.export import export_explicit, export_pipeline, export_target, write_files
from tilewright.compile.simt import addressed, levelled
from tilewright.execute.calls.arguments import read_argument
from tilewright.execute.calls.described import stand_in
from tilewright.execute.critical.function import CriticalFunction
from tilewright.execute.kernel import Kernel
from tilewright.execute.simt.kernels import ConfiguredKernel, GpuKernel
from tilewright.tree.typed import ArrayArg, NoneArg
from tilewright.zyn.module import ZynModule, pipeline_of
from tilewright.zyn.whole_pipeline import PipelineInput, whole_pipeline


def explicit_files(kernel: ConfiguredKernel, args: Sequence[object], target: Target, name: str, named: Mapping[str, object] = MappingProxyType({}), embed: Target | None = None) -> dict[str, bytes]:
    """The files of an explicit kernel for arguments like these and blocks like its own."""
    written = kernel.written(*args, **named)
    if target.is_gpu:
        artifact = kernel.compile(*args, target=target.name, **named)
        return export_explicit(kernel.thread_stage(*args, target=target.name, **named), artifact, written, target, name, embed)
    plain = kernel.thread_stage(*args, target=target.name, **named)
    return export_explicit(addressed(plain, target), None, written, levelled(plain, target), name, embed)


def pipeline_files(
    module: ZynModule, pipeline: str, inputs: Mapping[str, PipelineInput], target: Target, name: str
) -> tuple[dict[str, bytes], int]:
    """The files of a whole pipeline, and how many kernels it is."""
    whole = whole_pipeline(module, pipeline, inputs)
    return export_pipeline(whole.function, whole.signature(), target, name, dict(whole.fixed), whole.checks)


def _pipeline_input(name: str, value: object) -> PipelineInput:
    """What an argument like those of calls says of a pipeline's: of an array its extents, unless they are `*`; of a number its value, unless only its type is given."""
    described = isinstance(value, str)
    spec = read_argument(name, stand_in(value)).spec
    if isinstance(spec, NoneArg):
        raise UserError.at("TW009", f"'{name}' is None, which a pipeline that is exported cannot take")
    if isinstance(spec, ArrayArg):
        shape: Sequence[int | None] = getattr(value, "shape", ())
        if described:
            texts = [part.strip() for part in str(value).partition("[")[2].rstrip(" ]").split(",")]
            shape = [None if text == "*" else int(text) for text in texts]
        return PipelineInput(ArrayArg(spec.dtype, spec.rank), tuple(shape))
    number = None if described else value.item() if hasattr(value, "item") else value
    return PipelineInput(spec, (), number)  # type: ignore[arg-type]


def embedding(embed: bool | str) -> Target | None:
    """The CPU whose objects GPU code is embedded in; None: it is not."""
    if isinstance(embed, str):
        return export_target(parse_target(embed))
    return export_target(parse_target("cpu")) if embed else None


def export(
    kernel: Kernel[Any, Any]
    | CriticalFunction[..., Any]
    | ConfiguredKernel
    | CpuFunction[...]
    | GpuKernel[...]
    | Callable[..., object],
    *args: object,
    target: str = "cpu",
    folder: str | Path = ".",
    name: str = "",
    embed: bool | str = False,
    **keywords: object,
) -> list[Path]:
    """Write code, C header and Python loader of a kernel; the paths written.

    `args` and `keywords` are arguments like those of later calls: their dtypes, ranks and layouts are fixed by the code, and on a GPU what divides
    their sizes. `target` is `cpu` (this machine), `sm_90a`, `x86-64-avx2`… A critical function takes no arguments here: its annotations say all.
    Of an explicit kernel, `export(kernel[grid, block], …)`, the block is fixed by the code; the exported function takes the grid's extents as its last arguments.
    A pipeline, `export(tw.load("file.zyn").develop, …)`, becomes one function for CPUs that runs all its kernels in order.
    `embed=True`: code for an NVIDIA GPU is also data of an object for this machine's CPU, behind a C header; a text names another CPU.
    """
    host = embedding(embed)
    if host is not None and (isinstance(kernel, CriticalFunction) or pipeline_of(kernel) is not None):
        raise UserError.at("TW016", "embed= is for kernels of GPUs; this is exported for CPUs alone")
    if isinstance(kernel, CriticalFunction):
        if args or keywords:
            raise UserError.at("TW016", "export() of a critical function takes no arguments like those of calls: its annotations say all", kernel.span)
        return write_files(export_critical(kernel.built, export_target(parse_target(target)), name or kernel.__name__), folder)
    if isinstance(kernel, CpuFunction):
        kernel = kernel.kernel[1, 1]
    if isinstance(kernel, ConfiguredKernel):
        return write_files(explicit_files(kernel, args, export_target(parse_target(target)), name or kernel.kernel.__name__, keywords, host), folder)
    if isinstance(kernel, GpuKernel):
        raise UserError.at(
            "TW016",
            f"{kernel.__name__} is an explicit kernel, whose block is part of its code",
            kernel.span,
            f"export {kernel.__name__}[grid, block]; the grid is free",
        )
    if (pipeline := pipeline_of(kernel)) is not None:
        module, called = pipeline
        inputs = {key: _pipeline_input(key, value) for key, value in module.bound(called, args, dict(keywords)).items()}
        return write_files(
            pipeline_files(module, called, inputs, export_target(parse_target(target)), name or called)[0], folder
        )
    if not isinstance(kernel, Kernel):
        raise UserError.at("TW009", f"export() takes a kernel, not a {type(kernel).__name__}", help="mark the function with @tw.kernel")
    chosen = export_target(parse_target(target))
    values = {key: stand_in(value) for key, value in kernel.bound(*args, **keywords).items()}
    runner = kernel.runner
    signature = runner.signature(runner.arguments(values, chosen.is_gpu), chosen.is_gpu)
    return write_files(files_of(kernel.function, signature, chosen, name or kernel.__name__, host), folder)
