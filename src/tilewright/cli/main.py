"""The command `tilewright`. Each command's work is in a module of its own, imported when the command runs: help comes at once.

Errors of Tilewright are printed as their text on stderr, with exit status 1; `TILEWRIGHT_DEBUG=1` shows where they were raised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from tilewright.base import environment
from tilewright.base.errors import TilewrightError, UserError


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except TilewrightError as error:
            if environment.is_on("TILEWRIGHT_DEBUG"):
                raise
            click.echo(str(error), err=True)
            ctx.exit(1)


def _refuse(why: str, *names: str) -> None:
    """Options that were given and would do nothing here are errors, with the reason."""
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            shown = max(parameter.opts, key=len) if isinstance(parameter, click.Option) else "arguments after --"
            raise UserError.at("TW016", f"{shown} does nothing here: {why}", help="leave it out")


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib import metadata

        click.echo(f"tilewright {metadata.version('tilewright')}")
        ctx.exit()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version.")
def cli() -> None:
    """One kernel source in Python or ZynML, checked once, fast on every device.

    \b
    tilewright check kernels.zyn                          find every error, run nothing
    tilewright compile kernels.zyn --target sm_90a        PTX without a GPU
    tilewright run norm.zyn --in x=x.npy --out y=y.npy    run a program on the best device
    """




def _give_values(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """`stride=2` is also the value of a variable around a kernel, which a file that is not executed does not have."""
    if value:
        from tilewright.cli.guess import parse_arguments
        from tilewright.frontend.python.names import GIVEN

        before = GIVEN.set({name: given.value for name, given in parse_arguments(value).items() if given.value is not None})
        ctx.call_on_close(lambda: GIVEN.reset(before))
    return value


_ARGS = click.option(
    "--args", "arguments", default="", metavar="SPEC", callback=_give_values,
    help='What arguments are: "x=f32[1024,*] v=f32[*] eps=float stride=2"; * is any size, a number the value of a variable around the kernel.',
)  # fmt: skip
_KERNEL = click.option("--kernel", metavar="NAME", help="The kernel, where the file has several.")
_INPUT = click.option("--in", "given", multiple=True, metavar="NAME=VALUE", help="An input: a .npy, .npz or .safetensors file, or a number. Repeatable.")
_RESULT = click.option("--out", "wanted", multiple=True, metavar="NAME=FILE", help="Save a result as .npy. Repeatable.")


def _declare_roots(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> None:
    if value:
        from tilewright.zyn.program_files import ROOTS

        before = ROOTS.set(value)
        ctx.call_on_close(lambda: ROOTS.reset(before))


_ROOT = click.option(
    "--root", multiple=True, metavar="FOLDER", expose_value=False, callback=_declare_roots, type=click.Path(exists=True, file_okay=False),
    help="A folder that ZynML programs may import from, beside their own. Repeatable.",
)  # fmt: skip
_PRECISION = click.option(
    "--precision", type=click.Choice(("auto", "ieee", "tf32", "3xtf32")), help="How f32 is multiplied in contractions; else as the kernel says."
)


def _set_level(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value:
        from tilewright.base import levels

        ctx.with_resource(levels.given(value))


_OPTIMIZE = click.option(
    "--optimize", type=click.Choice(("O0", "O1", "O2", "O3", "Os", "Olatency")), expose_value=False, callback=_set_level,
    help="How much work goes into machine code, whatever kernels say.",
)  # fmt: skip


def _find_examples(ctx: click.Context, param: click.Parameter, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """`examples/gallery.py` is that of the package where the working directory has none."""
    from tilewright.cli.repository import existing

    return existing(value) if isinstance(value, str) else tuple(map(existing, value))


_FILE = click.argument("file", callback=_find_examples)
_PLOT = click.option("--plot", metavar="FILE", help="Also draw it, with Matplotlib.")


@cli.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", callback=_find_examples)
@_ARGS
@_ROOT
@click.option("-v", "--verbose", is_flag=True, help="Also say what was assumed of each kernel's arguments.")
@click.option("--json", is_flag=True, help="Print one list of objects with path, line, column, code, severity, message and help.")
@click.option("--target", metavar="NAME", help="Also say which words of explicit kernels it lacks: cpu, sm_80, sm_90a…")
def check(files: tuple[str, ...], arguments: str, verbose: bool, json: bool, target: str | None) -> None:
    """Report everything that is wrong in .zyn and .py files; nothing is executed.

    Element types that are not written are taken to be f32, ranks come from how arguments are used.

    \b
    Example:
      tilewright check -v examples/gallery.py examples/zyn/*.zyn
      tilewright check --json examples/zyn/softmax.zyn
      tilewright check --target cpu examples/simt/matmul.py
    """
    from tilewright.compile.collection import no_collection

    with no_collection():  # what is loaded stays
        from tilewright.cli.commands.check import check as command

    if json:
        _refuse("with --json the messages are all that is printed", "verbose")
    if not command(files, arguments, verbose, json, target):
        sys.exit(1)


@cli.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--check", is_flag=True, help="Change nothing; exit status 1 if something would change.")
@click.option("--diff", is_flag=True, help="Change nothing; show what would change.")
def fmt(files: tuple[str, ...], check: bool, diff: bool) -> None:
    """Format .zyn files in place: one indentation, one spacing; lines stay where they are. `-` reads the terminal.

    \b
    Examples:
      tilewright fmt examples/zyn/*.zyn
      tilewright fmt --check examples/zyn/*.zyn
    """
    from tilewright.cli.commands.fmt import fmt as command

    if not command(files, check, diff):
        sys.exit(1)


@cli.command()
def lsp() -> None:
    """Serve an editor over stdin and stdout with messages, types, declarations, formatting and completion of ZynML.

    \b
    Example:
      tilewright lsp
    """
    from tilewright.cli.commands.lsp import lsp as command

    command()


@cli.command(name="compile")
@_FILE
@_ROOT
@_KERNEL
@_ARGS
@click.option("--target", default="cpu", show_default=True, help="cpu, nvptx, sm_80, sm_90a, x86-64-avx2, aarch64-neon…")
@click.option(
    "--stage", type=click.Choice(("syntax", "typed", "loop", "tile", "thread", "llvm", "ptx", "asm")),
    help="What to print. Default: ptx for a GPU, asm for a CPU.",
)  # fmt: skip
@click.option("-o", "--output", metavar="PATH", help="A file, or a folder for one file per kernel. Default: the terminal.")
@click.option("--block", default="256", show_default=True, help="Of an explicit kernel: threads of a block, as 256 or 32,8.")
@_OPTIMIZE
def compile_(file: str, kernel: str | None, arguments: str, target: str, stage: str | None, output: str | None, block: str) -> None:
    """Compile kernels for any target and print the code, or any stage on the way to it.

    \b
    Examples:
      tilewright compile examples/zyn/relu.zyn --target sm_90a
      tilewright compile examples/gallery.py --kernel scale --args "m=f32[*,1024] v=f32[1024]" --stage tile
      tilewright compile examples/gallery.py --target sm_80 -o build/ptx/
      tilewright compile examples/gallery.py --kernel scale --optimize Os
      tilewright compile examples/simt/matmul.py --args "a=f32[*,*] b=f32[*,*] out=f32[*,*]" --block 32,32 --target sm_90a
    """
    from tilewright.cli.commands.simt import compile_explicit, is_explicit

    if is_explicit(file, kernel):
        if stage == "ptx" and target == "cpu":
            _refuse("a CPU has no PTX", "target")
        compile_explicit(file, kernel, arguments, target, stage, output, block)
        return
    _refuse("blocks are given to explicit kernels (@tw.gpu); others choose their own, see tile= and workgroup=", "block")
    from tilewright.cli.commands.compile import compile_file

    compile_file(file, kernel, arguments, target, stage, output)


@cli.command()
@_FILE
@_ROOT
@_KERNEL
@_INPUT
@_RESULT
@click.option("--grid", metavar="BLOCKS", help="Of an explicit kernel: blocks, as 64 or 8,4. Default: threads for the longest array.")
@click.option("--block", default="256", show_default=True, help="Of an explicit kernel: threads of a block, as 256 or 32,8.")
@click.option("--device", metavar="NAME", help="auto (the start), cpu, cuda, cuda:1, emulator.")
@_OPTIMIZE
def run(
    file: str, kernel: str | None, given: tuple[str, ...], wanted: tuple[str, ...], device: str | None, grid: str | None, block: str
) -> None:
    """Run a program and print or save its results.

    \b
    Examples:
      tilewright run examples/zyn/axpy.zyn --in a=2.5 --in x=x.npy --in y=y.npy --out result=r.npy
      tilewright run examples/gallery.py --kernel relu --in x=x.npy --device cpu
      tilewright run model.onnx --in x=x.npy --out y.npy
      tilewright run examples/simt/saxpy.py --kernel saxpy --in a=2 --in x=x.npy --in y=y.npy --block 128 --out y=r.npy
    """
    from tilewright.cli.commands.run import run as command
    from tilewright.cli.commands.simt import is_explicit

    explicit = is_explicit(file, kernel)
    if not explicit:
        _refuse("a grid and a block are given to explicit kernels (@tw.gpu); others choose their own", "grid", "block")
    command(file, kernel, given, wanted, device, (grid, block) if explicit else None)


@cli.command()
@_FILE
@_ROOT
@_KERNEL
@_INPUT
@_RESULT
@_ARGS
@click.option("--stage", type=click.Choice(("loop", "tile", "thread")), default="thread", show_default=True, help="What to execute.")
@click.option("--break", "lines", type=int, multiple=True, metavar="LINE", help="Print a thread's variables at that line. Repeatable.")
@click.option("--block", default="0", show_default=True, metavar="INDEX", help="The block of that thread: a number, or 1,0.")
@click.option("--thread", default="0", show_default=True, metavar="INDEX", help="The thread in its block.")
@click.option("--pdb", "interactive", is_flag=True, help="Enter Python's debugger there instead.")
@click.option("--script", is_flag=True, help="Execute the Python file; the way of files with @tw.gpu kernels.")
@click.argument("script_arguments", nargs=-1, metavar="[-- ARGUMENT...]")
def emulate(
    file: str, kernel: str | None, given: tuple[str, ...], wanted: tuple[str, ...], arguments: str, stage: str, lines: tuple[int, ...],
    block: str, thread: str, interactive: bool, script: bool, script_arguments: tuple[str, ...],
) -> None:  # fmt: skip
    """Execute a stage of the compiled kernels step by step and report the first fault with its source line.

    Faults are accesses out of bounds, races, divergent barriers and reads of memory nobody wrote. Without --in, small random inputs
    are made. A Python file with explicit kernels (@tw.gpu) is executed as the program it is, with its kernels on the emulator.

    \b
    Examples:
      tilewright emulate examples/zyn/row_sums.zyn
      tilewright emulate examples/zyn/relu.zyn --in x=x.npy --stage tile
      tilewright emulate program.py --kernel block_sum --break 14 --thread 3
    """
    from tilewright.cli.commands.emulate_script import emulate_script, has_explicit_kernels

    if script or lines or interactive or (has_explicit_kernels(file) and not given and not arguments):
        _refuse("the file is executed as the program it is, at the thread stage, and has its own inputs", "given", "wanted", "arguments", "stage")
        if not lines and not interactive:
            _refuse("without --break or --pdb no thread is followed", "kernel", "block", "thread")
        emulate_script(file, script_arguments, kernel, lines, block, thread, interactive)
        return
    from tilewright.cli.commands.run import emulate as command

    _refuse("a thread is followed in files with explicit kernels (@tw.gpu), with --break or --pdb", "block", "thread")
    _refuse("only a file that is executed (--script) gets arguments of its own", "script_arguments")
    if given:
        _refuse("the inputs given with --in say what the arguments are", "arguments")
    command(file, kernel, given, wanted, stage, arguments)


@cli.command()
@_FILE
@_ROOT
@_KERNEL
@_ARGS
@click.option("--device", metavar="NAME", help="auto (the start), cpu, cuda, cuda:1.")
@_PRECISION
@click.option("--budget", type=click.FloatRange(min=0), default=30.0, show_default=True, help="Seconds to spend on each kernel.")
@_PLOT
def tune(
    file: str, kernel: str | None, arguments: str, device: str | None, precision: str | None, budget: float, plot: str | None
) -> None:
    """Measure schedules of kernels on a device and keep the fastest for later calls, also of other sizes.

    \b
    Examples:
      tilewright tune examples/matmul.py --args "a=bf16[4096,4096] b=bf16[4096,4096]" --device cuda:0 --budget 60
      tilewright tune examples/matmul.py --args "a=f32[512,512] b=f32[512,512]" --device cpu --plot search.png
    """
    from tilewright.cli.commands.tune import tune as command

    command(file, kernel, arguments, device, precision, budget, plot)


@cli.command()
@_FILE
@_ROOT
@_KERNEL
@_ARGS
@click.option("--target", default="nvptx", show_default=True, help="nvptx, sm_80, sm_90a, cpu, x86-64-avx2…")
@_PRECISION
@_OPTIMIZE
@click.option("--json", is_flag=True, help="Print everything as JSON.")
@click.option("--fusion", is_flag=True, help="Show which loops became one kernel, which did not, and why.")
@click.option("--mega", is_flag=True, help="Run FILE (.onnx, .gguf, a model's folder, or .py with a tape) as a megakernel on --target (a device), and show its tasks; --plot writes an SVG.")
@click.option("--critical", is_flag=True, help="Prove on the machine code of FILE's critical functions (@tw.critical) that they call, allocate and ask for nothing.")
@_PLOT
@click.option("--block", default="256", show_default=True, help="Of an explicit kernel: threads of a block, as 256 or 32,8.")
def inspect(
    file: str, kernel: str | None, arguments: str, target: str, precision: str | None, json: bool, fusion: bool, mega: bool, critical: bool, plot: str | None, block: str
) -> None:
    """Show what kernels were compiled to: schedule, registers, occupancy, matrix instructions, and what bounds them.

    \b
    Examples:
      tilewright inspect examples/matmul.py --args "a=bf16[4096,4096] b=bf16[4096,4096]" --target sm_90a
      tilewright inspect examples/gallery.py --kernel scale --args "m=f32[1024,1024] v=f32[1024]" --json
      tilewright inspect examples/transformer.py --fusion
      tilewright inspect examples/simt/saxpy.py --kernel saxpy --args "a=float x=f32[*] y=f32[*]" --block 128
      tilewright inspect --mega examples/onnx/classifier.onnx --args "x=f32[2,4]" --target cpu --plot tasks.svg
      tilewright inspect --critical examples/critical.py --kernel check
    """
    if critical:
        _refuse("--critical is about machine code of this CPU, whose arguments are annotated", "precision", "fusion", "mega", "block", "plot", "arguments", "target")
        from tilewright.cli.commands.critical import inspect_critical

        inspect_critical(file, kernel, json)
        return
    if mega:
        _refuse("--mega is about the tasks of one launch", "precision", "fusion", "block")
        from tilewright.cli.commands.mega import inspect_mega

        inspect_mega(file, kernel, arguments, "auto" if target == "nvptx" else target, json, plot)
        return
    from tilewright.cli.commands.simt import inspect_explicit, is_explicit

    if is_explicit(file, kernel):
        _refuse("it is about kernels whose loops the compiler turns into launches, not about explicit ones", "precision", "fusion", "plot")
        inspect_explicit(file, kernel, arguments, target, json, block)
        return
    _refuse("blocks are given to explicit kernels (@tw.gpu); others choose their own, see tile= and workgroup=", "block")
    if fusion:
        _refuse("--fusion is about which loops become one, and has no picture", "precision", "plot")
        from tilewright.cli.commands.fusion import fusion as show

        show(file, kernel, arguments, target, json)
        return
    from tilewright.cli.commands.inspect import inspect as command

    command(file, kernel, arguments, target, precision, json, plot)


@cli.command()
@_FILE
@_ROOT
@_KERNEL
@_ARGS
@click.option("--target", default="cpu", show_default=True, help="cpu, sm_90a, sm_80, x86-64-avx2, aarch64-neon…")
@click.option(
    "--block", default="256", show_default=True, help="Of an explicit kernel: threads of a block, as 256 or 32,8."
)
@click.option(
    "--pipeline",
    default=None,
    metavar="NAME",
    help="A pipeline of a ZynML program, whole: one C function that runs all its kernels (CPU).",
)
@click.option(
    "--embed",
    is_flag=False,
    flag_value="cpu",
    default=None,
    metavar="[CPU]",
    help="Also write code for an NVIDIA GPU as data of an object for this CPU, or for x86-64-avx2, aarch64-neon….",
)
@click.option("-o", "--output", default=".", show_default=True, metavar="FOLDER", help="Where the files go.")
def export(
    file: str, kernel: str | None, arguments: str, target: str, output: str, block: str, pipeline: str | None, embed: str | None
) -> None:  # fmt: skip
    """Compile kernels ahead of time: code, a C header and a Python loader that need nothing of Tilewright.

    For a CPU: NAME.o, libNAME.so (Linux), NAME.h, and NAME.py that needs only ctypes. For a GPU: NAME.ptx, NAME.cubin where ptxas is
    installed, NAME.h, and NAME.py that needs only cuda-bindings.

    \b
    Examples:
      tilewright export examples/gallery.py --kernel scale --args "m=f32[*,*] v=f32[*]" -o build/export
      tilewright export examples/matmul.py --kernel matmul --args "a=bf16[4096,4096] b=bf16[4096,4096]" --target sm_90a -o build/export
      tilewright export examples/simt/saxpy.py --kernel saxpy --args "a=float x=f32[*] y=f32[*]" --block 128 -o build/export
      tilewright export examples/gallery.py --kernel scale --args "m=f32[*,*] v=f32[*]" --target sm_90a --embed -o build/export
      tilewright export examples/images/pipeline.zyn --pipeline develop --args "raw=u8[*,*] amount=float" -o build/export
    """
    if pipeline is not None:
        _refuse("a whole pipeline is exported, not one of its kernels", "kernel", "block")
        _refuse("whole pipelines are exported for CPUs", "embed")
        from tilewright.cli.commands.export import export_pipeline

        export_pipeline(file, pipeline, arguments, target, output)
        return
    from tilewright.cli.commands.simt import export_explicit_file, is_explicit

    if is_explicit(file, kernel):
        export_explicit_file(file, kernel, arguments, target, output, block, embed)
        return
    _refuse("blocks are given to explicit kernels (@tw.gpu); others choose their own, see tile= and workgroup=", "block")
    from tilewright.cli.commands.export import export_file

    export_file(file, kernel, arguments, target, output, embed)


@cli.command()
@click.option("--limits", is_flag=True, help="Also list what each of them allows and has.")
def devices(limits: bool) -> None:
    """List the devices that can run kernels here.

    \b
    Example:
      tilewright devices
    """
    from tilewright.cli.commands.info import devices as command

    command(limits)


_MODEL_OPTIONS = (
    click.option("--tokens", type=click.IntRange(0), default=200, show_default=True, help="Tokens to make, at most."),
    click.option("--device", default="auto", show_default=True, help="auto, or one that tilewright devices lists."),
    click.option("--temperature", type=float, default=0.0, help="Tokens are drawn; without it the best one is chosen each time."),
    click.option("--top-k", type=int, default=0, metavar="K", help="Draw from the K best tokens."),
    click.option("--top-p", type=float, default=1.0, metavar="P", help="Draw from the likeliest tokens that have the probability P together."),
    click.option("--seed", type=int, default=0, help="Of the draws; the same seed gives the same text."),
    click.option("--context", type=int, help="Tokens that prompt and text may have together."),
    click.option("--activations", type=click.Choice(("q8", "exact")), help="Whether packed weights are multiplied with numbers of eight bits; CPUs do unless told otherwise."),
    click.option("--cache", type=click.Choice(("f32", "f16", "bf16")), help="What keys and values are kept as: f16 on GPUs, f32 elsewhere."),
    click.option("--engine", type=click.Choice(("graph", "mega", "auto")), default="graph", show_default=True, help="What runs the steps: a captured graph, one persistent kernel (tasks on threads on a CPU), or whichever is measured faster."),
    click.option("--stats", is_flag=True, help="Also say what was loaded, how, and how long it took."),
)  # fmt: skip


def _with_model_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_MODEL_OPTIONS):
        command = option(command)
    return command


def _of_model(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of loading, and those of drawing."""
    return {n: given[n] for n in ("device", "context", "activations", "cache")}, {n: given[n] for n in ("temperature", "top_k", "top_p", "seed", "engine")}


@cli.command()
@click.argument("model", metavar="MODEL")
@click.argument("prompt", metavar="PROMPT")
@_with_model_options
def generate(model: str, prompt: str, tokens: int, stats: bool, **given: Any) -> None:
    """Go on with a text. MODEL is a .gguf file, or a folder with config.json, safetensors and tokenizer.json; PROMPT - is the standard input.

    \b
    Example:
      tilewright generate model.gguf "Once upon a time" --tokens 200
      tilewright generate model.gguf "Once upon a time" --temperature 0.8 --top-k 40 --seed 7 --stats
    """
    from tilewright.cli.commands.models import generate as command

    command(model, prompt, tokens, stats, *_of_model(given))


@cli.command()
@click.argument("model", metavar="MODEL")
@_with_model_options
def chat(model: str, tokens: int, stats: bool, **given: Any) -> None:
    """Talk with a model, line by line; an empty line ends it.

    \b
    Example:
      tilewright chat model.gguf --temperature 0.8
    """
    from tilewright.cli.commands.models import chat as command

    command(model, tokens, stats, *_of_model(given))


@cli.command()
@click.argument("model", metavar="MODEL")
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...")
@click.option("--device", default="auto", show_default=True, help="auto, or one that tilewright devices lists.")
@click.option("--out", metavar="FILE", help="Keep the vectors as .npy.")
@click.option("--stats", is_flag=True, help="Also say what was loaded, and how long it took.")
def embed(model: str, texts: tuple[str, ...], device: str, out: str | None, stats: bool) -> None:
    """A vector for each text, by an encoder (BERT); one line each, or all as .npy.

    \b
    Example:
      tilewright embed model_folder "a sentence" "another" --out vectors.npy
    """
    from tilewright.cli.commands.models import embed as command

    command(model, texts, device, out, stats)


@cli.command()
@click.argument("action", type=click.Choice(("list", "export", "import")))
@click.argument("file", required=False)
def tuning(action: str, file: str | None) -> None:
    """Show what was tuned on this machine, or share it as a file with others that have the same device.

    \b
    Examples:
      tilewright tuning list
      tilewright tuning export tuned.json
      tilewright tuning import tuned.json
    """
    from tilewright.cli.commands.tune import share as command

    command(action, file)


@cli.command()
@click.argument("action", type=click.Choice(("info", "clear")))
def cache(action: str) -> None:
    """Show or empty the cache of compiled kernels.

    \b
    Examples:
      tilewright cache info
      tilewright cache clear
    """
    from tilewright.cli.commands.info import cache as command

    command(action)


@cli.command()
@click.argument("kind", type=click.Choice((
    "cpu", "gpu", "runtime", "zyn", "zyn-cpu", "simt", "primitives", "primitives-cpu", "scans", "scans-cpu", "scatter", "scatter-cpu",
    "decode-attention", "decode-attention-cpu", "decode-step", "mega", "random", "random-cpu", "ordered", "ordered-cpu", "checks-cpu",
    "quantised-cpu", "onnx-cpu", "models", "models-cpu", "host", "compile", "portable", "opencl", "gemv", "families", "families-cpu", "matmul",
    "matmul-cpu", "transformer", "transformer-cpu",
)))  # fmt: skip
@click.option("--json", is_flag=True, help="Print the results as JSON.")
@click.option("--op", "ops", multiple=True, metavar="NAME", help="Only this operation. Repeatable.")
@click.option("--quick", is_flag=True, help="Small sizes, few repeats.")
def bench(kind: str, json: bool, ops: tuple[str, ...], quick: bool) -> None:
    """Compare with NumPy, PyTorch and Numba, side by side in one process.

    \b
    Example:
      tilewright bench cpu --quick --op relu
      tilewright bench transformer --op softmax
    """
    from tilewright.cli.commands.bench import bench as command

    sys.exit(command(kind, json, ops, quick))


@cli.command()
@click.option("--ptx", metavar="FOLDER", help="Where the generated PTX goes. Default: a temporary folder, which is printed.")
def demo(ptx: str | None) -> None:
    """Run the kernel gallery on every device found, check each result, and print one table.

    \b
    Example:
      tilewright demo
    """
    from tilewright.cli.commands.demo import demo as command

    if not command(ptx):
        sys.exit(1)


@cli.command()
@click.option("--to", "folder", metavar="FOLDER", help="Copy them into a new folder, to read, run and change.")
def examples(folder: str | None) -> None:
    """List the examples that come with the package; commands that are given examples/… find them from anywhere.

    \b
    Example:
      tilewright examples
      tilewright examples --to examples
    """
    from tilewright.cli.commands.info import examples as command

    command(folder)


def main() -> None:
    """Entry point of the installed command."""
    cli(prog_name="tilewright")


if __name__ == "__main__":
    main()
