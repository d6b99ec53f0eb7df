"""docs/accepted-words.md: every word that is accepted, where it may stand, what it does, and its fate.

In: the tables of words (`tree/kernel_words.py`, `frontend/python/kernel_options.py`), the signatures of what `import tilewright` offers, and
the commands. Out: the page as text. A parameter, option or variable that has no row here, or a row whose word is gone, is an error.

`python tools/accepted_words.py --write` writes the page; without the option it prints it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import click

import tilewright as tw
from tilewright.base.environment import SETTINGS
from tilewright.cli.main import cli
from tilewright.frontend.python.kernel_options import KERNEL_OPTIONS
from tilewright.frontend.words.python_words import NAMES
from tilewright.graphs.entry import GraphEntry
from tilewright.tree.kernel_words import ATTRIBUTES, BLOCK, FUNCTION, KINDS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs/accepted-words.md"
_PLACES = {BLOCK: "compute block", FUNCTION: "before `fn`, `pipeline`"}

Row = tuple[str, str, str]
"""A word, what it does, its fate."""

GPU_OPTIONS: tuple[Row, ...] = (
    ("device", "where it runs: a name, or the number of a GPU; otherwise its arrays decide", "acts"),
    ("max_threads", "the largest block it may be launched with; larger ones are refused", "acts"),
    ("min_blocks", "blocks that a multiprocessor must have room for (`.minnctapersm`), which limits registers; more than fit is refused", "acts"),
    ("cluster", "so many blocks along x run at once and reach each other's shared memory; refused where a GPU has no clusters", "acts"),
    ("check", "every index is checked, also on GPUs", "acts"),
    ("unchecked", "indices are not checked on CPUs", "acts"),
    ("optimize", "the level of its machine code, `O0` to `Olatency`; on a GPU only `O0` and `O1` make other code", "hint"),
    ("choices", "ways to launch it, as `tw.LaunchChoice`: it may be called without a grid, and `tw.tune` measures which is fastest", "acts"),
)
CPU_OPTIONS: tuple[Row, ...] = (
    ("check", "indices are checked while it runs", "acts"),
    ("unchecked", "they are not", "acts"),
    ("optimize", "the level of its machine code, `O0` to `Olatency`", "acts"),
)
MARKS: tuple[Row, ...] = (
    ("@tw.target(gpu=, cpu=)", "the definition is the one for that make of GPU, or for CPUs; makes other than nvidia and amd are refused", "acts"),
    ("@tw.gpu_compute", "an explicit kernel that refuses to run on a CPU", "acts"),
    ("@tw.vectorizable", "promises that threads have nothing to do with each other; a barrier, shared memory or atomic operation is an error", "acts"),
    ("@tw.inline_always", "the function is inlined where it is called, as all are; what cannot be is refused", "acts"),
    ("@tw.critical(max_latency_ns=)", "a budget that `tw.latency` compares with the 99th percentile, and reports", "acts"),
    ("@tw.critical(cpu=)", "the core that `tw.latency` measures on and `function.pinned()` pins the thread to; one that is not there is an error", "acts"),
    ("@tw.critical(memory=)", '"stack": its own arrays lie there; others are refused', "acts"),
    ("@tw.critical(overflow=)", '"check": a whole number that does not fit 64 bits is an exception; "wrap": it wraps', "acts"),
    ("@tw.no_allocation", "a critical function that allocates nothing: proved on the emitted code, or refused", "acts"),
    ("@tw.no_syscalls", "a critical function that makes no system calls: proved on the emitted code, or refused", "acts"),
)
CALLS: tuple[Row, ...] = (
    ("kernel(…, out=)", "results are written there", "acts"),
    ("kernel(…, device=)", "where this call runs: a name, a device, or several of them", "acts"),
    ("kernel(…, tune=True)", "schedules are measured first; refused where `schedule=` or `launches=` fixes them", "acts"),
    ("kernel(…, asynchronous=)", "whether the call gives a future", "acts"),
    ("kernel(…, stream=)", "the stream that it is queued on", "acts"),
    ("kernel[grid, block, shared, stream]", "the launch of an explicit kernel: blocks, threads, bytes of dynamic shared memory, a stream", "acts"),
    ("launch(…, device=, check=)", "where this launch of an explicit kernel runs, and whether its indices are checked", "acts"),
    ("kernel(…, tune=True) (explicit kernels with choices)", "the choices are measured first, once for these shapes", "acts"),
    ("any other keyword", "the error names the kernel's arguments", "refused"),
)
ANNOTATIONS: tuple[Row, ...] = (
    ("`x: tw.Array`", "an array of any dtype and rank", "acts"),
    ('`x: "f32[rows, cols]"`, `Annotated[tw.Array, "f32[rows, 64]"]`', "dtype, rank and sizes, which are names, numbers, and sums, differences and products of these: a call with another dtype, rank or extent is an error", "acts"),
    ("`n: int`, `s: float`, `b: bool`, `h: tw.f16`", "a number of that type; an array is an error", "acts"),
    ("`x: tw.GpuBuffer[tw.f32]` (explicit kernels)", "one row of that dtype; other dtypes and arrays with gaps are errors", "acts"),
    ("`-> tw.Array`, `-> float`, `-> tuple[tw.Array, …]`, `-> \"f32[rows]\"`", "how many results there are, their rank and dtype; others are errors", "acts"),
    ("any other annotation of a parameter", "the error lists these", "refused"),
    ("`x: tw.Array[tw.f32]`", "an array of that dtype, of any rank", "acts"),
    ("`tw.q4_0`, `q4_1`, `q5_0`, `q5_1`, `q8_0`, `q4_k`, `q5_k`, `q6_k`", "dtypes of packed blocks, which `tw.quantize` makes: kernels read their elements as f32; to write them is an error", "acts"),
)
ENVIRONMENT: tuple[Row, ...] = tuple((name, setting.meaning + ("; other values are refused" if setting.words else ""), "acts") for name, setting in SETTINGS.items())
_NOT_READ = {"TILEWRIGHT_RUNNER", "TILEWRIGHT_SIZES", "TILEWRIGHT_TOO_LARGE", "TILEWRIGHT_"}
"""Names in the source that are no variables of the environment."""
_OWN_TABLES = ("kernel", "gpu", "cpu", "target", "gpu_compute", "vectorizable", "inline_always")


def page() -> str:
    """The whole page."""
    parts = [
        "# Accepted words\n",
        "Generated by tools/accepted_words.py: change the tables it reads instead.\n",
        "Every attribute, option, parameter and annotation of both languages and of the command line. Each word **acts**, or is **refused** with the reason, or is a "
        "**hint**: the schedule follows it where it can, `tilewright inspect` says what became of it, and `@strict` (`strict=True`) makes it an error where it cannot. "
        "A word that is not here is refused.\n",
        "## ZynML: attributes\n",
        _table(
            ("attribute", "where", "what it does", "fate"),
            (
                (f"`{w.form}`", ", ".join(_PLACES[p] for p in w.places), w.effect + (f". Refused: {w.reason}" if w.reason else ""), w.fate)
                for w in ATTRIBUTES
            ),
        ),
        "## ZynML: kinds of kernels\n",
        "`@kernel kind(parameters)`. The body is held to what the kind promises. A name that is like none of these is the author's own; its parameters are numbers that the body names.\n",
        _table(("kind", "what the body has to be", "parameters"), ((f"`{k.form}`", k.promise, "; ".join(f"`{p.name}`: {p.meaning}, {p.form}" for p in k.parameters)) for k in KINDS)),
        "## Python: `@tw.kernel(…)`\n",
        "In files that commands read without executing them, too; values are literals there. The column at the right is the attribute of ZynML that says the same.\n",
        _table(("option", "takes", "what it does", "fate", "in ZynML"), ((f"`{o.name}=`", o.form, o.effect, o.fate, f"`@{o.attribute}`" if o.attribute else "") for o in KERNEL_OPTIONS)),
        "`kernel.metadata` is the record of them: a `tw.KernelMetadata` with a `tw.KernelKind`, a `tw.DeviceTarget`, `tw.KernelHints` and `tw.ExecutionConstraints`.\n",
        "## Python: `@tw.gpu(…)`, `@tw.cpu(…)` and marks\n",
        _table(("option", "what it does", "fate"), [*_named("@tw.gpu", GPU_OPTIONS), *_named("@tw.cpu", CPU_OPTIONS), *((f"`{a}`", b, c) for a, b, c in MARKS)]),
        "## Python: calls\n",
        _table(("word", "what it does", "fate"), ((f"`{a}`" if "(" in a or "[" in a else a, b, c) for a, b, c in CALLS)),
        "## Python: annotations\n",
        _table(("annotation", "what it does", "fate"), ANNOTATIONS),
        "## Python: functions\n",
        "What `import tilewright as tw` offers besides the words of kernels ([language.md](language.md), [explicit-kernels-instructions.md](explicit-kernels-instructions.md)). "
        "A keyword that is not in a signature is refused.\n",
        _table(("function", "what it does"), _functions()),
        "## The command line\n",
        "An option that would do nothing in a command as it is given is refused, with the reason.\n",
        *_commands(),
        "## The environment\n",
        _table(("variable", "what it does", "fate"), ((f"`{a}`", b, c) for a, b, c in ENVIRONMENT)),
    ]
    return "\n".join(parts).rstrip("\n") + "\n"


def _named(owner: str, rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    return [(f"`{owner}({name}=)`", effect, fate) for name, effect, fate in rows]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def functions() -> dict[str, Callable[..., object]]:
    """What the package offers that is called, but for words of kernels and decorators."""
    found = {name: getattr(tw, name) for name in tw.__all__ if name not in NAMES and name not in _OWN_TABLES}
    # `tw.graph` is an object that is called and has members.
    called = {name: value.__call__ if isinstance(value, GraphEntry) else value for name, value in found.items()}
    return {name: value for name, value in called.items() if inspect.isfunction(value) or inspect.ismethod(value)}


def _functions() -> Iterable[tuple[str, str]]:
    for name, value in sorted(functions().items()):
        signature = inspect.signature(value)
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
        shown = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
        yield f"`tw.{name}{shown}`", " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def _commands() -> Iterable[str]:
    for name, command in sorted(cli.commands.items()):
        yield f"**`tilewright {name}`**: {(command.help or '').split(chr(10))[0]}\n"
        yield _table(("option", "what it does"), _options(command)) if list(_options(command)) else ""


def _options(command: click.Command) -> Iterable[tuple[str, str]]:
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            choices = f" One of {', '.join(parameter.type.choices)}." if isinstance(parameter.type, click.Choice) else ""
            yield f"`{', '.join(parameter.opts)}`", (parameter.help or "") + choices
        elif isinstance(parameter.type, click.Choice):
            yield f"`{parameter.human_readable_name}`", f"One of {', '.join(parameter.type.choices)}."


def missing() -> list[str]:
    """Words without a row, and rows without a word."""
    wrong = _differences("tw.kernel", tw.kernel, [o.name for o in KERNEL_OPTIONS])
    wrong += _differences("tw.gpu", tw.gpu, [name for name, *_ in GPU_OPTIONS])
    wrong += _differences("tw.cpu", tw.cpu, [name for name, *_ in CPU_OPTIONS])
    read = {name for path in (ROOT / "src").rglob("*.py") for name in re.findall(r"TILEWRIGHT_[A-Z_]*", path.read_text(encoding="utf-8"))}
    listed = {name for name, *_ in ENVIRONMENT}
    wrong += [f"{name} is read and has no row" for name in sorted(read - listed - _NOT_READ)]
    wrong += [f"{name} has a row and is not read" for name in sorted(listed - read)]
    wrong += [f"tw.{name} says nothing of itself" for name, value in functions().items() if not inspect.getdoc(value)]
    wrong += [f"tilewright {name} {option} says nothing of itself" for name, command in cli.commands.items() for option, text in _options(command) if not text]
    return wrong


def _differences(label: str, function: Callable[..., object], rows: Sequence[str]) -> list[str]:
    own = [name for name in inspect.signature(function).parameters if name != "function"]
    return [f"{label}({name}=) has no row" for name in own if name not in rows] + [f"{label} has no {name}=" for name in rows if name not in own]


if __name__ == "__main__":
    if problems := missing():
        sys.exit("\n".join(problems))
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(page(), encoding="utf-8")
    else:
        print(page())
