"""The cases of `tools/replay.py`: what is compiled, for which arguments and targets.

In: the gallery, the examples and the kernels that tests share. Out: `all_cases()`. Each `Case` compiles something for a
target and gives the texts of what belongs to the code: launches, sizes, checks. The code itself passes through the
stand-in for LLVM.

All that this tool knows of the compiler's inside is in the first section.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import linecache
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np
from tools.replay import PTX, ROOT, TARGETS, Text, given

import tilewright as tw
from tilewright.base import launch_abi
from tilewright.base.artifact import ArrayParam, Artifact
from tilewright.base.errors import CompilerBug, TilewrightError
from tilewright.base.target import parse_target
from tilewright.cli import sources
from tilewright.codegen.host.allocator import memory_ir
from tilewright.codegen.host.c_entry import entry_text
from tilewright.codegen.host.launcher import stub_ir
from tilewright.codegen.host.launcher_text import ENGINE
from tilewright.codegen.host.pool import pool_ir, starter_ir
from tilewright.compile import driver
from tilewright.compile import pieces as parts
from tilewright.compile.build import build_artifact
from tilewright.compile.primitives import compile_program, finished_program
from tilewright.compile.simt import compile_simt
from tilewright.execute import places
from tilewright.execute.calls.run import Runner
from tilewright.execute.primitives import elements as primitive_elements
from tilewright.execute.primitives import filters, histograms, scans, sorts, uniques
from tilewright.ir.program import Program
from tilewright.runtime.cuda.strided_copy import copy_ptx
from tilewright.zyn import module as zyn
from tilewright.zyn.async_blocks import run_at_once
from tilewright.zyn.host.block_runner import BlockRunner

# -- the compiler ------------------------------------------------------------------------------------------------------


def refusal(error: Exception) -> str:
    """What the baseline says of a case that does not compile."""
    if isinstance(error, TilewrightError):
        return f"{'bug' if isinstance(error, CompilerBug) else 'refused'}:{error.code}"
    return f"bug:{type(error).__name__}"


def described(artifact: Artifact) -> str:
    """What goes with the code, a line for each thing. Names are marked with %: they do not count."""
    lines: list[str] = []
    for array in (*artifact.inputs, *artifact.outputs, *artifact.scratch):
        lines.append(_row("argument", f"%{array.name}", array.dtype))
        if isinstance(array, ArrayParam):
            lines.append(_row("  array", array.role, _sizes(array.shape), _sizes(array.strides), array.align))
    for launch in artifact.launches:
        lines.append(
            _row(
                "launch",
                _names(launch.args),
                _names(launch.sizes),
                "grid",
                _sizes(launch.grid),
                launch.threads,
                launch.shared_bytes,
            )
        )
        lines.append(_row("  work", _sizes([launch.work]), "cluster", launch.cluster, "watchdog", launch.watchdog))
        lines.append(
            _row(
                "  flags", launch.dependent, launch.cooperative, launch.persistent, [text for _, text in launch.asserts]
            )
        )
        for m in launch.maps:
            around = (_sizes(m.lower), _sizes(m.upper), m.steps, m.rounds)
            lines.append(
                _row(
                    "  map",
                    f"%{m.array}",
                    m.dtype,
                    _sizes(m.shape),
                    _sizes(m.strides),
                    m.box,
                    m.swizzle,
                    m.pixels,
                    *around,
                )
            )
    lines += [_row("size", f"%{b.name}", f"%{b.array}", b.axis, b.stride) for b in artifact.bindings]
    lines += [_row("check", _sizes([c.left]), c.relation, _sizes([c.right]), c.code) for c in artifact.checks]
    lines += [_row("fact", f"%{name}", number) for name, number in artifact.facts]
    lines.append(_row("may be given an input as its result", artifact.alias_safe))
    return "\n".join(lines) + "\n"


def _row(*items: object) -> str:
    return " ".join(map(str, items))


def _names(names: Iterable[str]) -> str:
    return " ".join(f"%{name}" for name in names)


def _sizes(sizes: Iterable[object]) -> str:
    marked = (re.sub(r"[A-Za-z_][\w.]*(?![\w.]*\()", r"%\g<0>", str(size)) for size in sizes)
    return f"[{', '.join(marked)}]"


def _fresh() -> None:
    """Nothing compiled before is found again: code that is found does not pass LLVM."""
    driver.forget()


def compile_kernel(kernel: tw.Kernel[..., Any], arguments: Iterable[object], target: str) -> list[str]:
    """A kernel of `@tw.kernel`; for a CPU with the entry that Python calls."""
    _fresh()
    return [described(kernel.compile(*arguments, target=target))]


def compile_explicit(kernel: Any, config: tuple[object, ...], arguments: Iterable[object], target: str) -> list[str]:
    """A kernel of `@tw.gpu` or `@tw.cpu`."""
    _fresh()
    return [described(getattr(kernel, "kernel", kernel)[config].compile(*arguments, target=target))]


def compile_counted(kernel: Any, count: int, block: object, arguments: Iterable[object], target: str) -> list[str]:
    """An explicit kernel launched for a number of threads, which its last block has too many of."""
    _fresh()
    return [described(kernel.over(count, block).compile(*arguments, target=target))]


def compile_threads(program: Program, target: str) -> list[str]:
    """A program that is at the thread stage already."""
    return [described(build_artifact(program, parse_target(target), entry=False))]


def compile_finished(program: Program, target: str) -> list[str]:
    """The same, with the last passes before it."""
    chosen = parse_target(target)
    return [described(build_artifact(finished_program(program, chosen), chosen, entry=False))]


def compile_lanes(program: Program, target: str) -> list[str]:
    """A program of threads, as an explicit kernel is: for a CPU, threads become lanes and loops."""
    _fresh()
    return [described(compile_simt(program, parse_target(target)))]


def compile_scheduled(
    kernel: tw.Kernel[..., Any],
    arguments: tuple[object, ...],
    number: int,
    count: int,
    changes: Mapping[str, Any],
    target: str,
) -> list[str]:
    """A kernel with one of the schedules that the cost model lists, `number` of `count` spread over the list, and some
    fields of it changed."""
    _fresh()
    chosen, values = parse_target(target), kernel.bound(*arguments)
    runner = Runner(kernel.function, kernel.precision)
    signature = runner.signature(runner.arguments(values, chosen.is_gpu), chosen.is_gpu)
    shapes = {name: getattr(value, "shape", ()) for name, value in values.items()}
    extents = tuple((name, axis, extent) for name, shape in shapes.items() for axis, extent in enumerate(shape))
    listed = driver.contraction_schedules(kernel.function, signature, chosen, extents)
    if len(listed) <= number:
        return ["no such schedule\n"]
    place = number if len(listed) <= count else number * (len(listed) - 1) // (count - 1)
    known = {field.name for field in fields(listed[place])}
    others = "".join(f" {name}={int(value)}" for name, value in changes.items() if name not in known and value not in _NEUTRAL[name])
    text = replace(listed[place], **{name: value for name, value in changes.items() if name in known}).describe() + others
    own = replace(signature, schedule=text, extents=extents)
    return [described(driver.compile_kernel(kernel.function, own, chosen))]


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stream_k": (False,), "pingpong": (False,), "split_k": (1,), "cluster_k": (1,), "cluster": (1,), "persistent": (True,),
    "mma_in_flight": (0,), "swap_ab": (False,),
}  # fmt: skip
"""Values that ask for nothing: families without the field need not hear of them."""
VARIANTS: dict[str, Mapping[str, Any]] = {
    "stream": {"stream_k": True, "pingpong": False, "split_k": 1, "cluster_k": 1, "cluster": 1, "persistent": True, "mma_in_flight": 0},
    "sums of clusters": {"cluster_k": 2, "stages": 2, "split_k": 1, "pingpong": False, "mma_in_flight": 0}, "parts": {"split_k": 3},
    "swap": {"swap_ab": True}, "clusters": {"cluster": 2}, "no turns": {"pingpong": False, "mma_in_flight": 0},
    "no turns but waits": {"pingpong": False}, "not persistent": {"persistent": False}, "no waits": {"mma_in_flight": 0},
}  # fmt: skip
"""Fields of schedules that the lists seldom have otherwise."""


def compile_parts(kernel: tw.Kernel[..., Any], arguments: tuple[object, ...], target: str) -> list[str]:
    """A kernel cut into parts for several devices."""
    _fresh()
    chosen = parse_target(target)
    runner = Runner(kernel.function)
    values: dict[str, Any] = kernel.bound(*arguments)
    cut = parts.cut_kernel(kernel.function, runner.signature(runner.arguments(values, chosen.is_gpu), chosen.is_gpu))
    sizes = {b.name: np.shape(values[b.array])[b.axis] for b in cut.program.bindings() if not b.stride}
    return [described(parts.compile_part(cut, number, chosen, sizes)) for number in range(len(cut.parts))]


@functools.cache
def _file(path: Path) -> Any:
    return sources.read_source(str(path))


def kernels_of(path: Path) -> list[str]:
    """The names of the kernels in a Python file; none where it cannot be read without being executed."""
    try:
        return [function.name for function in _file(path).kernels]
    except TilewrightError:
        return []


def compile_guessed(path: Path, name: str, target: str) -> list[str]:
    """A kernel of a file, which is not executed, for arguments as they are guessed from its text."""
    _fresh()
    chosen = parse_target(target)
    entry = next(e for e in sources.walk(_file(path), {}, name).raise_if_errors().entries if e.name == name)
    return [described(driver.compile_kernel(entry.function, entry.signature(chosen.is_gpu), chosen))]


class _Blocks(BlockRunner):
    """What ZynML programs run their blocks with: compiles them and gives ones of the right shape."""

    takes_futures = joins_blocks = True

    def __init__(self, target: str) -> None:
        self.target = parse_target(target)
        self.found: list[str] = []

    def __call__(self, function: Any, arguments: dict[str, object], device: str) -> object:
        return run_at_once(self._compile, function, arguments, device)

    def _compile(self, function: Any, arguments: Mapping[str, object], device: str) -> object:
        runner = Runner(function)
        read = runner.arguments(arguments, self.target.is_gpu)
        artifact = driver.compile_kernel(function, runner.signature(read, self.target.is_gpu), self.target)
        self.found.append(described(artifact))
        arrays = {a.name: a.value for a in read if isinstance(a.value, np.ndarray)}
        sizes = {
            b.name: (
                arrays[b.array].strides[b.axis] // arrays[b.array].itemsize
                if b.stride
                else arrays[b.array].shape[b.axis]
            )
            for b in artifact.bindings
        }
        results = [np.ones(tuple(s.evaluate(sizes) for s in o.shape), o.dtype.numpy) for o in artifact.outputs]
        plain = tuple(r if r.ndim else r[()] for r in results)
        return plain[0] if len(plain) == 1 else plain


def compile_zyn(path: Path, function: str, inputs: Mapping[str, object], target: str) -> list[str]:
    """The blocks of a ZynML program, or of one of its functions, in the order in which they run."""
    _fresh()
    blocks = _Blocks(target)
    program = zyn.load(path, blocks)
    run: Callable[..., object] = getattr(program, function or "run")
    run(**inputs)
    return blocks.found


class _Place(places.DevicePlace):
    """Where primitives run: compiles their programs. Results are ones."""

    def __init__(self, target: str, is_aligned: bool) -> None:
        self.target, self.is_aligned = parse_target(target), is_aligned
        self.found: list[str] = []

    @property
    def is_cuda(self) -> bool:
        return False

    def read(self, name: str, value: Any) -> Any:
        return np.ascontiguousarray(value)

    def new(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.ones(shape, dtype.numpy)

    def run(self, what: str, build: Any, arrays: object, scalars: object = None) -> None:
        self.found.append(described(compile_program(what, self.target, build)))

    def give(self, array: Any) -> Any:
        return array

    def number(self, array: Any) -> Any:
        return array.reshape(-1)[0]

    def aligned(self, array: Any) -> bool:
        return self.is_aligned


def compile_primitive(call: Callable[[], object], is_aligned: bool, target: str) -> list[str]:
    """The programs that a call of a primitive runs."""
    _fresh()
    place = _Place(target, is_aligned)
    with contextlib.ExitStack() as stack:
        for module in (primitive_elements, filters, histograms, scans, sorts, uniques):
            stack.enter_context(mock.patch.object(module, "place_of", return_value=place))
        call()
    return place.found


_LAYOUT = launch_abi.Layout(16, 24, 32, 40, 48, 56, 64, tensor=16, tensor_gradient=24)
_SLOTS = {
    "array": launch_abi.Slot(launch_abi.OWN, 2), "tensor": launch_abi.Slot(launch_abi.TENSOR, 3),
    "checked": launch_abi.Slot(launch_abi.CHECKED_TENSOR, 1), "float": launch_abi.Slot(launch_abi.FLOAT),
    "integer": launch_abi.Slot(launch_abi.INTEGER), "bool": launch_abi.Slot(launch_abi.BOOL),
}  # fmt: skip


def launch_stub(arguments: str, results: str, is_given: bool, written: tuple[int, ...] = ()) -> str:
    """The stub for calls with such arguments, which launches on a GPU."""
    slots = [tuple(_SLOTS[word] for word in side.split()) for side in (arguments, results)]
    return stub_ir(launch_abi.Pattern(slots[0], slots[1], is_given, written), _LAYOUT)


def c_entry(kernel: tw.Kernel[..., Any], arguments: tuple[object, ...]) -> str:
    """The function that C calls."""
    return entry_text(kernel.compile(*arguments, target="x86-64-avx2"), "exported")


HOST: dict[str, Callable[[], str]] = {
    "launch engine": lambda: ENGINE,
    "allocator": memory_ir,
    "starter of the pool": starter_ir,
    **{
        f"pool of {target}{'' if futex else ' without futex'}": functools.partial(pool_ir, parse_target(target), futex)
        for target, futex in itertools.product(("x86-64-avx2", "aarch64-neon"), (True, False))
    },
}
"""LLVM text of the runtime itself."""
COPIES: dict[str, Callable[[], str]] = {
    f"copy of {width} bytes, {rank} axes{', wide' if wide else ''}": functools.partial(copy_ptx, width, rank, wide)
    for width, rank, wide in itertools.product((1, 2, 4, 8, 16), (1, 3, 5), (False, True))
}
"""PTX of the runtime."""


# -- cases -------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Something to compile. `compile` takes the name of a target and gives the texts that go with the code."""

    name: str
    compile: Callable[[str], list[str]]
    targets: tuple[str, ...] = TARGETS

    @property
    def family(self) -> str:
        return self.name.split("/")[0]


GPUS = tuple(t for t in TARGETS if t.startswith("sm_"))
CPUS = tuple(t for t in TARGETS if t not in GPUS)
ONCE = ("aarch64-neon",)
"""For texts that know no target."""
SHARES = {
    "table": (2, 1), "matrix": (2, 1), "attention": (1, 1), "tiled": (1, 1), "schedules": (1, 1), "gallery": (2, 1),
    "examples": (1, 3),
    "parts": (1, 1), "zyn": (1, 1), "simt-gallery": (1, 2), "simt-random": (2, 1), "simt-tail": (1, 1), "ops": (1, 1),
    "primitives": (1, 1),
    "guessed": (1, 1),
}  # fmt: skip
"""For how many CPUs and GPUs each case of a family is compiled; others for all."""
QUICK = {
    "host": 1,
    "matrix-ops": 1,
    "simt-examples": 1,
    "simt-serial": 1,
    "simt-instructions": 2,
    "options": 5,
    "simt": 7,
    "primitives": 17,
    "attention": 17,
}
"""Of how many cases of a family one is in the quick run; of others of `MOST`."""
MOST = 11
ALWAYS = (
    "zyn/block 48 float32", "primitives/transpose float32", "primitives/sort rows float32", "simd/lanes",
    "instructions/printing", "instructions-cpu/printing", "guessed/test_while collatz",
)  # fmt: skip
"""Cases of the quick run that reach what no other one does."""
_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def _some(case: Case) -> Case:
    """The case for its family's share of targets. Which these are, its name decides, so that a family sees them all."""
    cpus, gpus = SHARES.get(case.family, (len(CPUS), len(GPUS)))
    start = zlib.crc32(case.name.encode())
    chosen = {CPUS[(start + k) % len(CPUS)] for k in range(cpus)} | {
        GPUS[(start // 4 + k) % len(GPUS)] for k in range(gpus)
    }
    return case._replace(targets=tuple(target for target in case.targets if target in chosen))


def quick(cases: list[Case]) -> list[Case]:
    """A few cases of every family, and those of `ALWAYS`."""
    found = [case for case in cases if case.name in ALWAYS]
    for _, family in itertools.groupby(sorted(cases, key=lambda case: case.family), key=lambda case: case.family):
        several = list(family)
        step = min(QUICK.get(several[0].family, MOST), len(several))
        found += [case for case in several[step // 2 :: step] if case.name not in ALWAYS]
    return found


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def _example(name: str) -> Any:
    """A file of the examples as a module."""
    known = f"replayed_{name.replace('/', '_')}"
    if known not in sys.modules:
        found = importlib.util.spec_from_file_location(known, ROOT / "examples" / f"{name}.py")
        assert found is not None and found.loader is not None
        sys.modules[known] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[known])
    return sys.modules[known]


def _case(name: str, function: Callable[..., list[str]], *fixed: object, targets: tuple[str, ...] = TARGETS) -> Case:
    return Case(name, functools.partial(function, *fixed), targets)


def _lazily(
    function: Callable[..., list[str]], kernel: object, make: Callable[[], Iterable[object]], *fixed: object
) -> Callable[[str], list[str]]:
    """Arguments are made when the case is compiled."""
    return lambda target: function(kernel, tuple(make()), *fixed, target)


def table() -> Iterator[Case]:
    """The table of kernels that every device runs, small and large."""
    cases = importlib.import_module("kernel_table").CASES
    for case in cases:
        sizes = dict.fromkeys((case.shapes[-1], *case.long_shapes[-1:]))
        for place, shape in enumerate(sizes):
            make = functools.partial(case.inputs, _rng(), shape)
            yield Case(
                f"table/{case.name} {list(shape)}",
                _lazily(compile_kernel, case.kernel, make),
                GPUS if place else TARGETS,
            )


def matrix() -> Iterator[Case]:
    """Contractions: layouts, dtypes, epilogues, batches, convolutions; odd, long and whole sizes."""
    kernels = importlib.import_module("kernels_matrix")
    for case in kernels.MATRIX_CASES:
        whole = tuple((n // 64 + 1) * 64 if n > 16 else n for n in case.long[0])
        sizes = {"odd": case.sizes[-1], "long": case.long[0], "whole": whole}
        for label, size in sizes.items():
            make = functools.partial(case.arguments, size)
            yield Case(
                f"matrix/{case.name} {label}",
                _lazily(compile_kernel, case.kernel, make),
                TARGETS if label == "odd" else GPUS,
            )
    for name, dtype, (m, n, k) in (
        ("large", _HALVES[1], (4096, 4096, 4096)), ("few rows", _HALVES[0], (64, 4096, 4096)),
        ("one row", np.float32, (1, 4096, 4096)),
        ("long sum", np.float32, (128, 128, 65536)), ("f64", np.float64, (512, 512, 512)),
    ):  # fmt: skip
        for layout, kernel in kernels.PLAIN.items():
            shapes = ((k, m) if layout[0] == "t" else (m, k), (k, n) if layout in ("kn", "tn") else (n, k))
            make = functools.partial(lambda shapes, dtype: [_zeros(*s, dtype=dtype) for s in shapes], shapes, dtype)
            yield Case(f"matrix/{name} {layout}", _lazily(compile_kernel, kernel, make))


def _attention() -> Iterator[tuple[str, tw.Kernel[..., Any], tuple[object, ...]]]:
    text = importlib.import_module("kernels_attention")
    sizes = ((512, 64, 16), (77, 64, 2), (1024, 128, 32), (192, 80, 4))
    others = (np.dtype(np.float32), np.dtype(ml_dtypes.float8_e4m3fn))
    for (rows, depth, heads), dtype in (*itertools.product(sizes, _HALVES), *itertools.product(sizes[:2], others)):
        q = _zeros(1, heads, rows, depth, dtype=dtype)
        turned = _zeros(1, rows, heads, depth, dtype=dtype)
        for kernel, more in (
            (text.plain, (0.1,)), (text.grouped_causal, (0.1,)), (text.ranged, ()), (text.before, ()),
            (text.masked, (_zeros(rows, rows, dtype=np.uint8), 0.1)),
            (text.biased, (_zeros(heads, rows, rows, dtype=dtype),)),
            (text.with_logarithm, (0.1,)),
        ):  # fmt: skip
            yield f"{kernel.__name__} {rows}x{depth} {dtype}", kernel, (q, q, q, *more)
        yield f"rows_first {rows}x{depth} {dtype}", text.rows_first, (turned, turned, turned)
    q = _zeros(2, 8, 256, 64, dtype=_HALVES[0])
    few = _zeros(2, 2, 256, 64, dtype=_HALVES[0])
    yield "grouped_causal of few heads", text.grouped_causal, (q, few, few, 0.1)


def attention() -> Iterator[Case]:
    """Attention in loops and over tiles, masked in several ways."""
    for name, kernel, arguments in _attention():
        yield _case(f"attention/{name}", compile_kernel, kernel, arguments)
    masked = importlib.import_module("kernels_masked")
    for kernel, dtype, length in itertools.product(
        (*masked.MASKED, masked.earlier), (np.float16, np.float32), (65, 256)
    ):
        arguments = masked.problem(length, 64, dtype)[: len(kernel.parameter_names)]
        yield _case(f"attention/{kernel.__name__} {length} {np.dtype(dtype)}", compile_kernel, kernel, arguments)
    tiled = importlib.import_module("kernels_tiled")
    for length, dtype in itertools.product((65, 256), (np.float16, np.float32)):
        x, mask = _zeros(length, 64, dtype=dtype), _zeros(length, length, dtype=np.bool_)
        heads = _zeros(2, length, 64, dtype=dtype)
        four = heads[None]
        for kernel, arguments in (
            (tiled.flash, (four, four, four, 0.2)), (tiled.masked_flash, (x, x, x, mask)),
            (tiled.flash_with_logarithm, (x, x, x)),
            (tiled.tiled_matmul, (x, x.T.copy())), (tiled.plain_matmul, (x, x.T.copy())),
            (tiled.causal_rows, (x, x, x)),
            (tiled.causal_flash, (x, x, x, mask)), (tiled.block_causal_flash, (heads,) * 3),
            (tiled.block_causal_loops, (heads,) * 3),
        ):  # fmt: skip
            yield _case(f"tiled/{kernel.__name__} {length} {np.dtype(dtype)}", compile_kernel, kernel, arguments)


def schedules() -> Iterator[Case]:
    """Contractions and attention with schedules all over the list of candidates."""
    kernels = importlib.import_module("kernels_matrix")
    layers, blocks = _example("layers"), _example("blocks")
    chosen: dict[str, tuple[Any, tuple[object, ...]]] = {
        "product bf16": (
            kernels.PLAIN["kn"],
            (_zeros(2048, 1024, dtype=_HALVES[1]), _zeros(1024, 4096, dtype=_HALVES[1])),
        ),
        "product f16 odd": (
            kernels.PLAIN["kn"],
            (_zeros(777, 328, dtype=np.float16), _zeros(328, 520, dtype=np.float16)),
        ),
        "product f32": (kernels.PLAIN["kn"], (_zeros(512, 512), _zeros(512, 512))),
        "product tf32": (kernels.again(kernels.PLAIN["kn"], "tf32"), (_zeros(512, 512), _zeros(512, 512))),
        "product 3xtf32": (kernels.again(kernels.PLAIN["kn"], "3xtf32"), (_zeros(512, 512), _zeros(512, 512))),
        "product few rows": (
            kernels.PLAIN["kn"],
            (_zeros(16, 4096, dtype=np.float16), _zeros(4096, 4096, dtype=np.float16)),
        ),
        "swiglu": (layers.swiglu, tuple(_zeros(*s, dtype=_HALVES[1]) for s in ((1024, 768), (768, 3072), (768, 3072)))),
        "gelu_mlp": (
            blocks.gelu_mlp,
            tuple(_zeros(*s, dtype=np.float16) for s in ((512, 256), (256, 1024), (1024, 256))),
        ),
    }
    by_name = kernels.BY_NAME
    for name in list(by_name)[::9]:
        case = by_name[name]
        chosen[f"matrix {name}"] = (case.kernel, tuple(case.arguments(case.long[0])))
    found = {name: (kernel, arguments) for name, kernel, arguments in _attention()}
    for name in list(found)[::18]:
        chosen[f"attention {name}"] = found[name]
    count = 6
    for name, (kernel, arguments) in chosen.items():
        for number in range(count):
            yield _case(f"schedules/{name} {number}", compile_scheduled, kernel, arguments, number, count, {})

    for name, sizes in (("whole", (512, 1024, 8192)), ("odd", (72, 200, 328)), ("few rows", (64, 4096, 4096))):
        m, n, k = sizes
        factors = _zeros(m, k, dtype=_HALVES[1]), _zeros(k, n, dtype=_HALVES[1])
        for label, changes in VARIANTS.items():
            fixed = (kernels.PLAIN["kn"], factors, 0, 6, changes)
            yield _case(f"variants/{name} {label}", compile_scheduled, *fixed, targets=GPUS)


def rows() -> Iterator[Case]:
    """Rows that are walked several times, short and long."""
    cases = importlib.import_module("kernels_rows").CASES
    for (name, case), dtype, columns in itertools.product(
        cases.items(), (*_HALVES, np.dtype(np.float32)), (33, 768, 1000, 4096, 32768, 50257)
    ):
        make = functools.partial(case.inputs, _rng(), 64, columns, dtype)
        yield Case(
            f"rows/{name} {columns} {dtype}",
            _lazily(compile_kernel, case.kernel, make),
            TARGETS if columns == 33 else GPUS,
        )


def gallery() -> Iterator[Case]:
    """The examples that the demo runs: Python kernels and ZynML programs."""
    found = _example("gallery")
    listed = [
        *found.GALLERY,
        *found.CONTRACTIONS,
        *_example("layers").LAYERS,
        *_example("blocks").BLOCKS,
        _example("blocks").LONGER,
    ]
    for entry, elements in itertools.product(listed, (1, 1000, 1 << 16, 1 << 20)):
        name, program, make = f"gallery/{entry.name} {elements}", entry.program, entry.make
        if isinstance(program, Path):
            compile_: Callable[[str], list[str]] = functools.partial(
                lambda program, make, n, target: compile_zyn(program, "", make(_rng(), n), target),
                program,
                make,
                elements,
            )
        else:
            compile_ = _lazily(
                compile_kernel, program, functools.partial(lambda make, n: make(_rng(), n).values(), make, elements)
            )
        yield Case(name, compile_, TARGETS if elements == 1 else GPUS)


def examples() -> Iterator[Case]:
    """The transformer of Python kernels, and the files that are not in the gallery."""
    whole = _example("transformer")
    for dtype in (np.dtype(np.float32), *_HALVES):
        x, square, wide = (_zeros(*s, dtype=dtype) for s in ((128, 128), (128, 128), (128, 512)))
        vector, inner = _zeros(128, dtype=dtype), _zeros(512, dtype=dtype)
        heads = _zeros(2, 4, 64, 32, dtype=dtype)
        yield _case(f"examples/project {dtype}", compile_kernel, whole.project, (x, square, vector))
        yield _case(f"examples/attend {dtype}", compile_kernel, whole.attend, (heads, heads, heads, 0.1))
        yield _case(
            f"examples/project_add_norm {dtype}",
            compile_kernel,
            whole.project_add_norm,
            (x, square, vector, x, vector, vector),
        )
        yield _case(f"examples/project_gelu {dtype}", compile_kernel, whole.project_gelu, (x, wide, inner))
        yield _case(f"examples/matmul {dtype}", compile_kernel, _example("matmul").matmul, (x, wide))


def options() -> Iterator[Case]:
    """Options of kernels: one launch, a watchdog, precisions."""
    gallery_, layers, blocks = _example("gallery"), _example("layers"), _example("blocks")
    x, w = _zeros(256, 512), _zeros(512, 256)
    chosen = {
        "softmax": (layers.softmax, (x,)), "layer_norm": (layers.layer_norm, (x, x[0].copy(), x[0].copy())),
        "mean_and_variance": (gallery_.mean_and_variance, (_zeros(70000),)),
        "total": (gallery_.total, (_zeros(70000),)),
        "gelu_mlp": (blocks.gelu_mlp, (x, w, _zeros(256, 512))), "matmul": (gallery_.matmul, (x, w)),
    }  # fmt: skip
    for (name, (kernel, arguments)), (label, option) in itertools.product(
        chosen.items(),
        {
            "one launch": {"launches": 1},
            "watchdog": {"watchdog": 2.0},
            "tf32": {"precision": "tf32"},
            "3xtf32": {"precision": "3xtf32"},
        }.items(),
    ):
        made = tw.kernel(**option)(kernel.python)
        yield _case(
            f"options/{name} {label}", compile_kernel, made, arguments, targets=GPUS if label != "watchdog" else TARGETS
        )


def several() -> Iterator[Case]:
    """Kernels cut into parts for several devices."""
    table_ = importlib.import_module("kernel_table")
    blocks = _example("blocks")
    for case in table_.CASES[2::6]:
        make = functools.partial(case.inputs, _rng(), case.shapes[-1])
        yield Case(f"parts/{case.name}", _lazily(compile_parts, case.kernel, make))
    yield _case(
        "parts/gelu_mlp", compile_parts, blocks.gelu_mlp, (_zeros(256, 512), _zeros(512, 256), _zeros(256, 512))
    )


def zyn_programs() -> Iterator[Case]:
    """Every ZynML program of the examples."""
    known = importlib.import_module("zyn_cases")
    for case, size in itertools.product(known.CASES, (0, 1)):
        yield Case(
            f"zyn/{case.name} {size}",
            functools.partial(
                lambda case, size, target: compile_zyn(case.path, "", case.inputs(size), target), case, size
            ),
        )
    for tour, elements in itertools.product(_example("tours").TOURS, (1000, 1 << 16)):
        yield Case(
            f"zyn/{tour.name} of {elements}",
            functools.partial(
                lambda tour, n, target: compile_zyn(tour.path, tour.function, tour.make(_rng(), n), target),
                tour,
                elements,
            ),
        )
    for dtype, (batch, seq, heads, depth) in itertools.product(
        (np.dtype(np.float32), _HALVES[1]), ((2, 48, 4, 16), (8, 512, 12, 64))
    ):
        hidden = heads * depth
        weights = {n: w.astype(dtype) for n, w in known.block_weights(hidden, 4 * hidden).items()}
        inputs = {
            "x": _zeros(batch, seq, hidden, dtype=dtype),
            "layer": 0,
            "model": {"layers": [weights]},
            "num_heads": heads,
            "head_dim": depth,
        }
        path = ROOT / "examples" / "zyn" / "transformer_block.zyn"
        yield _case(f"zyn/block {seq} {dtype}", compile_zyn, path, "transformer_block", inputs)


def explicit() -> Iterator[Case]:
    """Explicit kernels: the table, the gallery of bugs and of what is right instead, examples, random ones."""
    for case in importlib.import_module("simt_kernels").all_cases():
        config = (case.grid, case.block, case.shared) if case.shared else (case.grid, case.block)
        yield _case(f"simt/{case.name}", compile_explicit, case.kernel, config, tuple(case.arguments(_rng())))
    for case in importlib.import_module("simt_gallery").all_cases():
        config, arguments = (case.grid, case.block, case.shared), (*case.arrays(), *case.numbers)
        for label, kernel in (("bad", case.bad), ("good", case.good)):
            checked = tw.gpu(check=True, **({"cluster": kernel.cluster} if kernel.cluster > 1 else {}))(kernel.python)
            yield _case(f"simt-gallery/{case.name} {label}", compile_explicit, kernel, config, arguments)
            yield _case(f"simt-gallery/{case.name} {label} checked", compile_explicit, checked, config, arguments)
    for name, launch in importlib.import_module("kernels_instructions").CASES.items():
        yield _case(
            f"simt-instructions/{name}",
            compile_explicit,
            launch.kernel,
            (launch.grid, launch.block),
            tuple(launch.make()),
        )
    x = _zeros(64, 64)
    for name, kernel_name, config, arguments in (
        ("mandelbrot", "mandelbrot", ((2, 4), (32, 8)), (_zeros(48, 64, dtype=np.int32), -2.0, -1.5, 0.05, 60)),
        ("matmul", "matmul", ((4, 4), (16, 16)), (x, x, x)),
        ("nbody", "accelerations", (2, 128), (_zeros(300, 4), _zeros(300, 3))),
        ("saxpy", "saxpy", (40, 256), (2.0, x[0], x[1])), ("saxpy", "saxpy_striding", (40, 256), (2.0, x[0], x[1])),
        ("stencil", "heat", ((2, 3, 2), (32, 8, 1)), (_zeros(12, 17, 40), _zeros(12, 17, 40), 0.1)),
        ("transpose", "transpose", ((2, 2), (32, 8)), (x, x)),
    ):  # fmt: skip
        kernel = getattr(_example(f"simt/{name}"), kernel_name)
        yield _case(f"simt-examples/{kernel_name}", compile_explicit, kernel, config, arguments)
    source = _loaded("fuzz/simt_programs")
    for seed in range(60):
        text, threads = source.kernel_source(seed)
        arrays = (
            _zeros(source.LENGTH, dtype=np.int32), _zeros(source.LENGTH), _zeros(3, 2 * threads, dtype=np.int32),
            _zeros(2, 2 * threads),
            _zeros(8, dtype=np.int32),
        )  # fmt: skip
        yield _case(f"simt-random/{seed}", compile_explicit, _from_text(text, f"<random {seed}>"), (2, threads), arrays)
    serial = _from_text(_SERIAL, "<serial>", "sums")
    for dtype in (np.float32, np.float64, np.int32, np.int16):
        yield _case(
            f"simt-serial/{np.dtype(dtype)}",
            compile_explicit,
            serial,
            (4, 1),
            (_zeros(1000, dtype=dtype), _zeros(4, dtype=dtype)),
            targets=CPUS,
        )

    yield from _registers()
    for case in importlib.import_module("simt_kernels").all_cases()[::4]:
        if isinstance(case.grid, int) and isinstance(case.block, int) and not case.shared:
            count, arguments = case.grid * case.block - 5, tuple(case.arguments(_rng()))
            yield _case(f"simt-tail/{case.name}", compile_counted, case.kernel, count, case.block, arguments)


def _registers() -> Iterator[Case]:
    """Functions with SIMD values."""
    found = _loaded("unit/frontend/test_simd")
    four, many, flags = _zeros(16), _zeros(10, 4), _zeros(3, dtype=np.bool_)
    whole, wholes = _zeros(16, dtype=np.int32), _zeros(8, 4, dtype=np.int32)
    doubles, three = _zeros(4, dtype=np.float64), _zeros(3, 4, dtype=np.float64)
    for function, arguments in (
        (found.arithmetic, (four, four, _zeros(16, 4))), (found.integers, (whole, whole, wholes)),
        (found.lanes, (four, many, four)), (found.masks, (doubles, three, flags)), (found.carried, (_zeros(64), four)),
        (found.conversions, (four, whole, doubles, _zeros(4, dtype=np.uint32))),
        (found.squares, (_zeros(640), _zeros(640))),
    ):  # fmt: skip
        yield _case(f"simd/{function.__name__}", compile_explicit, function, (4, 1), arguments)
    for name, kind in sorted(found.TYPES.items()):
        x, out = _zeros(4 * kind.width, dtype=kind.dtype.numpy), _zeros(kind.width, dtype=kind.dtype.numpy)
        yield _case(f"simd/sum of {name}", compile_explicit, found._sums(kind, kind.dtype), (1, 1), (x, out))


_SERIAL = """
import tilewright as tw

@tw.cpu
def sums(x, out):
    part = tw.block.x
    n = len(x) // 4
    total = x[part * n]
    for i in range(part * n + 1, (part + 1) * n):
        total += x[i] * x[i]
    out[part] = total
"""


def _loaded(path: str) -> Any:
    """A file of the tests that is in a folder, as a module."""
    folder, name = (ROOT / "tests" / path).parent, Path(path).name
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(name)


def _from_text(text: str, path: str, name: str = "kernel") -> Any:
    """A function of a text that is in no file."""
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    names: dict[str, Any] = {"__name__": path}
    exec(compile(text, path, "exec"), names)
    return names[name]


def code_generators() -> Iterator[Case]:
    """Thread-stage programs of tests: every op in every dtype, matrix and other instructions."""
    dtypes = importlib.import_module("kernel_table")._NUMBERS
    ops = _loaded("unit/codegen/op_kernels")
    for dtype, vectors in itertools.product(dtypes, (False, True)):

        def lower(target: str, dtype: Any = dtype, vectors: bool = vectors) -> list[str]:
            return compile_threads(ops.module(ops.map_kernels(dtype, vectors), parse_target(target)), target)

        yield Case(f"ops/{dtype} {'vectors' if vectors else 'numbers'}", lower)
    for dtype in (d for d in dtypes if not d.is_float or d.bits > 8):

        def reduce(target: str, dtype: Any = dtype) -> list[str]:
            return compile_threads(ops.module(ops.reduction_kernels(dtype), parse_target(target)), target)

        yield Case(f"ops/{dtype} reductions", reduce)

    def threads(target: str) -> list[str]:
        return compile_threads(_alone(ops.thread_kernel(parse_target(target))), target)

    yield Case("ops/threads", threads, GPUS)
    for number, kernel in enumerate(_loaded("unit/codegen/matrix_kernels").matrix_kernels()):
        yield _case(f"matrix-ops/{kernel.name} {number}", compile_threads, _alone(kernel), targets=GPUS)
    for case in importlib.import_module("instruction_kernels").instruction_cases():
        yield _case(f"instructions/{case.name}", compile_finished, case.program(), targets=GPUS)
        yield _case(f"instructions-cpu/{case.name}", compile_lanes, case.program(), targets=CPUS)


def _alone(kernel: Any) -> Program:
    """A program of one kernel, all of whose parameters are given."""
    support = importlib.import_module("support")
    program: Program = support.program(kernel, ())
    return program


def _later(a: Any, b: Any) -> Any:
    return b


def _large(v: Any) -> Any:
    return v > 2


def whole_arrays() -> Iterator[Case]:
    """Primitives: scans, reductions, filters, sorts, histograms, transpositions."""
    dtypes = [np.dtype(d) for d in (np.uint8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64)]
    for dtype, aligned in (*((d, True) for d in dtypes), *((d, False) for d in dtypes[::5])):
        x, m = _zeros(5000, dtype=dtype), _zeros(60, 50, dtype=dtype)
        mask = _zeros(5000, dtype=np.bool_)
        calls: dict[str, tuple[Callable[..., object], tuple[object, ...], dict[str, object]]] = {
            "scan": (tw.gpu_scan, (x,), {}), "scan max": (tw.gpu_scan, (x, "max"), {}),
            "scan exclusive": (tw.gpu_scan, (x,), {"exclusive": True}),
            "scan from 1": (tw.gpu_scan, (x, "prod"), {"exclusive": True, "init": 1}),
            "scan function": (tw.gpu_scan, (x, _later), {}),
            "scan wide": (tw.gpu_scan, (x,), {"dtype": tw.f64}), "reduce": (tw.gpu_reduce, (x,), {}),
            "reduce min": (tw.gpu_reduce, (x, 1, "min"), {}),
            "reduce function": (tw.gpu_reduce, (x, 0, _later), {}),
            "filter": (tw.gpu_filter, (x, _large), {}),
            "filter mask": (tw.gpu_filter, (x, mask), {}), "histogram": (tw.gpu_histogram, (x, 100, (0, 50)), {}),
            "histogram many": (tw.gpu_histogram, (x, 40000, (0, 50)), {}),
            "histogram plain": (tw.gpu_histogram, (x,), {}),
            "histogram most": (tw.gpu_histogram, (x, 1 << 20, (0, 50)), {}), "transpose": (tw.gpu_transpose, (m,), {}),
            "transpose even": (tw.gpu_transpose, (m[:48, :48],), {}), "sort": (tw.gpu_sort, (x,), {}),
            "sort down": (tw.gpu_sort, (x,), {"descending": True}),
            "sort pairs": (tw.gpu_sort, (x, x.astype(np.int64)), {}), "argsort": (tw.gpu_argsort, (x,), {}),
            "sort rows": (tw.gpu_sort, (m,), {}),
            "argsort rows": (tw.gpu_argsort, (m,), {"descending": True}),
            "unique": (tw.gpu_unique, (x,), {"return_counts": True}),
            "run lengths": (tw.gpu_run_lengths, (x,), {}),
        }  # fmt: skip
        for name, (function, arguments, named) in calls.items():
            call = functools.partial(function, *arguments, **named)
            label = f"primitives/{name} {dtype}{'' if aligned else ' unaligned'}"
            yield _case(label, compile_primitive, call, aligned, targets=TARGETS if aligned else GPUS)


def runtime() -> Iterator[Case]:
    """Code that the runtime itself needs, launch stubs, and functions that C calls."""

    def plain(text: Callable[[], str], kind: str, target: str) -> list[str]:
        given.append(Text(kind, text()))
        return []

    for (name, text), kind in (*((item, "host") for item in HOST.items()), *((item, PTX) for item in COPIES.items())):
        yield _case(f"host/{name}", plain, text, kind, targets=ONCE)
    patterns = [
        ("array", "array"), ("array array", "array"), ("tensor", "tensor"), ("checked float", "checked"), ("", "array"),
        ("array integer bool float", "array array"), ("tensor tensor checked array float integer bool", "array tensor"),
        (" ".join(["tensor"] * 12), "tensor"), ("array tensor", ""),
    ]  # fmt: skip
    for (arguments, results), is_given in itertools.product(patterns, (False, True)):
        written = () if results else (0,)
        make = functools.partial(launch_stub, arguments, results, is_given, written)
        yield _case(
            f"host/stub of {arguments or 'nothing'} to {results or 'nothing'}{', given' if is_given else ''}",
            plain,
            make,
            "host",
            targets=ONCE,
        )
    kernels = importlib.import_module("kernel_table")
    for name in (
        "softmax",
        "scaled_sum",
        "casts_from_f32",
        "matrix_product",
        "normalised",
        "dot_product",
        "sum_and_difference",
    ):
        case = kernels.BY_NAME[name]

        def entry(target: str, case: Any = case) -> list[str]:
            _fresh()
            text = c_entry(case.kernel, tuple(case.inputs(_rng(), case.shapes[-1])))
            given[:] = [Text("C", text)]
            return []

        yield Case(f"host/C function of {name}", entry, ONCE)


BASELINE_NAMES = {
    "test_attention_pattern": "test_online", "test_cluster_softmax": "test_one_meeting", "test_variance": "test_spread",
    "test_divide_by_reciprocal": "test_divide_alike", "test_fuse_horizontally": "test_join_products",
    "test_horizontal_fusion": "test_joined_products", "test_horizontal_structure": "test_joined_structure",
    "test_link_blocks": "test_link_parts", "test_mark_low_precision": "test_few_bits",
    "test_minmax_before_widening": "test_narrow_extremes", "test_recover_reductions": "test_uncarry",
    "test_reuse_buffers": "test_share_scratch", "test_several_products": "test_several_sums",
    "test_shifted_variance": "test_centre_squares", "test_split_reductions_structure": "test_split_beside",
}  # fmt: skip
"""Test files that had another name when the baseline was recorded; the name of a case decides its targets."""


def guessed() -> Iterator[Case]:
    """Kernels of test files, for arguments guessed from their text."""
    for path in sorted((ROOT / "tests").glob("*/**/test_*.py")):
        if not re.search(r"^@tw\.kernel", path.read_text(encoding="utf-8"), re.MULTILINE):
            continue
        for name in dict.fromkeys(kernels_of(path)):
            yield _case(f"guessed/{BASELINE_NAMES.get(path.stem, path.stem)} {name}", compile_guessed, path, name)


FAMILIES = (
    table, matrix, attention, schedules, rows, gallery, examples, options, several, zyn_programs, explicit,
    code_generators, whole_arrays, runtime, guessed,
)  # fmt: skip


def all_cases() -> list[Case]:
    """Every case, each with a name of its own."""
    found = [_some(case) for family in FAMILIES for case in family()]
    names: dict[str, int] = {}
    for case in found:
        names[case.name] = names.get(case.name, 0) + 1
    twice = [name for name, count in names.items() if count > 1]
    assert not twice, f"cases with one name: {', '.join(twice)}"
    return found
