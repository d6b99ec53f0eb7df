"""Phases that are the same but for numbers are one function of a GPU's module, launched with the numbers of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from bench.families.convolutions import transposed2d

from assembled import assemble
from support import add_2d, stages_of
from tilewright.base.sizes import Size
from tilewright.base.target import parse_target
from tilewright.codegen.nvptx.alike_kernels import share_alike
from tilewright.codegen.nvptx.emitter import nvptx_function
from tilewright.codegen.registry import first_alike
from tilewright.compile.build import build_artifact
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value
from tilewright.ir.program import KernelCall, Program, SharedKernel
from tilewright.ir.rewrite import rewrite
from tilewright.passes.common.simplify import simplify

TARGET = parse_target("sm_90a")
PHASES = 4


def _phases() -> Program:
    """A transposed convolution of four phases that multiply matrices, with images that the copy engine reads."""
    x, w = np.zeros((8, 189, 86, 18), np.float32), np.zeros((189, 256, 6, 6), np.float32)
    return transposed2d((2, 2), (1, 1), 1, True).stages(x, w, target="sm_90a").stages.thread


def _with_numbers(shared: SharedKernel) -> Kernel:
    def fold(b: Builder, op: Op) -> Sequence[Value] | None:
        size = op.attrs.get("value")
        if op.opcode != "size" or not isinstance(size, Size) or size.names.isdisjoint(shared.numbers):
            return None
        number = size.substitute(shared.numbers).constant
        assert number is not None
        return [b.index(number)]

    return rewrite(shared.kernel, fold)


def _code(call: KernelCall) -> str:
    """That of the kernel which a call runs, with its numbers put in."""
    kernel = call.kernel if call.common is None else _with_numbers(call.common)
    return nvptx_function(simplify(kernel), "one", TARGET)[0]


@pytest.mark.requires("ptxas")
def test_phases_are_one_function_with_numbers_of_each() -> None:
    program = _phases()
    shared = share_alike(program)
    assert [call.kernel for call in shared.calls] == [call.kernel for call in program.calls]
    for before, call in zip(program.calls, shared.calls, strict=True):
        assert _code(before) == _code(call)
    mains = [n for n, call in enumerate(program.calls) if re.search(r"phase\d$", call.kernel.name)]
    assert len(mains) == PHASES and len({first_alike(shared)[n] for n in mains}) == 1
    artifact = build_artifact(program, TARGET)
    ptx = artifact.code.decode()
    entries = {launch.entry for launch in artifact.launches}
    assert len(entries) < len(artifact.launches) - PHASES and ptx.count(".entry") == len(entries)
    numbers = {name: size.constant for name, size in artifact.computed}
    seen = {tuple(numbers.get(name, name) for name in artifact.launches[n].sizes) for n in mains}
    assert len(seen) == PHASES, "each phase has numbers of its own"
    assert len({artifact.launches[n].maps for n in mains}) == PHASES, "and maps of its own"
    assemble(ptx, "sm_90a", level=0)


def test_kernels_that_are_no_phases_stay_apart() -> None:
    thread = stages_of(add_2d()).thread
    twice = replace(thread, calls=thread.calls * 2)
    assert share_alike(twice).calls == twice.calls and first_alike(twice) == [0, 1]
    assert not build_artifact(twice, TARGET).computed


def test_unlike_phases_stay_apart() -> None:
    """Where something else than an offset differs, so does the code."""
    (call,) = stages_of(add_2d()).thread.calls
    one = replace(call.kernel, attrs={**call.kernel.attrs, "phase_of": "add", "phase": 0})
    other = replace(one, name="other", grid=(one.grid[0] + Size.of(1),), attrs={**one.attrs, "phase": 1})
    program = stages_of(add_2d()).thread
    alike = share_alike(replace(program, calls=tuple(replace(call, kernel=k) for k in (one, replace(one, name="again"), other))))
    assert first_alike(alike) == [0, 0, 2]
