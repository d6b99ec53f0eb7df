"""Every word and operator of explicit kernels for every dtype and target: which are refused, and which fail to become code.

Each case is lowered alone. What is not refused becomes one module for each dtype, and LLVM runs on that in another process. Where that
fails the module is halved until single cases are found, so that a process that ends is told by its name and the rest still runs.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tests.word_cases import BODIES, SOURCE, THREADS

from tilewright.base.dtypes import SCALARS, DType
from tilewright.base.errors import CompilerBug, TilewrightError
from tilewright.base.target import Target, parse_target
from tilewright.codegen.nvptx.ptxas import assemble
from tilewright.codegen.registry import backend_for
from tilewright.compile.build import llvm_text
from tilewright.compile.isolate import compile_isolated
from tilewright.compile.simt import addressed
from tilewright.ir.program import Program


@dataclass(frozen=True)
class Lowered:
    """A case that was not refused: its program as the code generator gets it."""

    name: str
    program: Program
    target: Target


def kernels(folder: Path) -> list[object]:
    """The kernels of all cases, from a file written into the folder."""
    path = folder / "every_word.py"
    path.write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("every_word", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [getattr(module, f"case_{number}") for number in range(len(BODIES))]


def arguments(dtype: DType) -> tuple[object, ...]:
    row = np.zeros(2048, dtype.numpy)
    return row, row.copy(), np.zeros((64, 64), dtype.numpy), row.copy(), np.zeros(THREADS, np.float64), 1


def lower(kernel: object, name: str, dtype: DType, target: Target) -> Lowered | TilewrightError:
    """The case at the last stage before LLVM, or why it is refused."""
    try:
        program = kernel[1, THREADS, 4096].thread_stage(*arguments(dtype), target=target.name)  # type: ignore[index]
        program = addressed(program, target)
        program, needed = backend_for(target).prepare(program, target)
        llvm_text(program, needed)
    except TilewrightError as error:
        return error
    return Lowered(name, program, needed)


def generate(cases: Sequence[Lowered], assembled: bool) -> Iterator[tuple[str, str]]:
    """Have LLVM make code of all cases together; those of which it cannot, with what it says. `assembled`: PTX becomes code, too."""
    if not cases:
        return
    calls = tuple(
        replace(call, kernel=replace(call.kernel, name=f"case_{number}")) for number, case in enumerate(cases) for call in case.program.calls
    )
    target = cases[0].target
    try:
        program = replace(cases[0].program, calls=calls)
        backend = backend_for(target)
        assert backend.finish_apart is not None
        function, *names = backend.finish_apart(target)
        code = compile_isolated(function, backend.write(program, target).text, *names)
        if assembled and target.kind == "nvptx":
            assemble(code.decode(), target.name)
    except CompilerBug as error:
        if len(cases) == 1:
            yield cases[0].name, str(error)
            return
        half = len(cases) // 2
        yield from generate(cases[:half], assembled)
        yield from generate(cases[half:], assembled)


def chosen(every: bool, words: Sequence[str] = ()) -> list[int]:
    """The numbers of the cases to try: of every word the first, or every case; of `words` alone where some are given."""
    seen: set[str] = set()
    found: list[int] = []
    for number, (word, _) in enumerate(BODIES):
        if (not words or word in words) and (every or word in ("operator", "statement") or word not in seen):
            found.append(number)
        seen.add(word)
    return found


def failures(
    folder: Path, target_name: str, numbers: Sequence[int], dtypes: Sequence[DType] = SCALARS, assembled: bool = False
) -> tuple[list[tuple[str, str]], int, int]:  # fmt: skip
    """What neither becomes code nor is refused with a place, how many cases became code, and how many were refused."""
    target = parse_target(target_name)
    bad: list[tuple[str, str]] = []
    made = refused = 0
    found = kernels(folder)
    for dtype in dtypes:
        batch: list[Lowered] = []
        for number in numbers:
            word, body = BODIES[number]
            name = f"{word} of {dtype} for {target.name}: {body!r}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case = lower(found[number], name, dtype, target)
            if isinstance(case, Lowered):
                batch.append(case)
            elif isinstance(case, CompilerBug) or not any(d.span.line for d in case.diagnostics):
                bad.append((name, str(case)))
            else:
                refused += 1
        # Each case is spelled in the PTX version that it asks for by itself.
        versions = sorted({case.target.ptx for case in batch})
        groups = [[case for case in batch if case.target.ptx == version] for version in versions]
        broken = [one for group in groups for one in generate(group, assembled)]
        bad += broken
        made += len(batch) - len(broken)
    return bad, made, refused
