"""A target from outside, with warps of 8 lanes and a code generator of its own: the gallery through the ordinary passes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

import tilewright as tw
from gallery_cases import CONTRACTION_CASES, GALLERY_CASES, GalleryCase
from support import as_wide, assert_close
from tilewright.base.artifact import Artifact
from tilewright.base.dtypes import from_numpy
from tilewright.base.errors import TargetLimit, UserError
from tilewright.base.target import Target, names, parse_target, register_target
from tilewright.codegen.registry import backend_for
from tilewright.compile.build import build_artifact
from tilewright.compile.driver import compile_stages
from tilewright.ir.program import Program
from toy_device import codegen
from toy_device.machine import launch, load_code
from toy_device.target import TOY

CASES = {case.name: case for case in (*GALLERY_CASES, *CONTRACTION_CASES)}
REFUSED = {"multiply_add": "toy8 cannot take 'a' of multiply_add: it has no f64"}
"""What the device cannot do."""


def thread_program(case: GalleryCase, arguments: tuple[object, ...]) -> Program:
    runner = case.kernel.runner
    values = runner.arguments(case.kernel.bound(*arguments), True)
    return compile_stages(case.kernel.function, runner.signature(values, True), TOY).stages.thread


def run(program: Program, artifact: Artifact, given: Mapping[str, object]) -> list[np.ndarray]:
    """The outputs of the generated code."""
    arrays = {a.name: np.ascontiguousarray(given[a.name]) for a in program.input_arrays}
    elements = {name: tuple(s // x.itemsize for s in x.strides) for name, x in arrays.items()}
    sizes = program.sizes({name: x.shape for name, x in arrays.items()}, elements)
    for array in (*program.outputs, *program.scratch):
        arrays[array.name] = np.zeros([extent.evaluate(sizes) for extent in array.type.shape], array.type.dtype.numpy)
    views = {name: x.reshape(-1).view(np.uint8) for name, x in arrays.items()}
    kernels = load_code(artifact.code)
    for one in artifact.launches:
        grid = [extent.evaluate(sizes) for extent in one.grid]
        launch(kernels[one.entry], grid, [views[a] if a in views else given[a] for a in one.args], [sizes[s] for s in one.sizes])
    return [arrays[array.name] for array in program.outputs]


@pytest.mark.parametrize("elements", [1, 77, 1000])
@pytest.mark.parametrize("name", CASES)
def test_gallery(name: str, elements: int) -> None:
    case = CASES[name]
    arguments = case.arguments(elements)
    program = thread_program(case, arguments)
    assert all(call.kernel.threads <= TOY.max_threads for call in program.calls)
    if name in REFUSED:
        with pytest.raises(TargetLimit, match=REFUSED[name]) as caught:
            build_artifact(program, TOY)
        assert caught.value.diagnostics[0].span.line
        return
    artifact = build_artifact(program, TOY)
    assert (artifact.kind, artifact.target) == ("toy", "toy8")
    found = run(program, artifact, case.kernel.bound(*arguments))
    wanted = case.reference(*(as_wide(a) if isinstance(a, np.ndarray) else a for a in arguments))
    scale = max(1.0, max(float(np.size(a)) for a in arguments) ** 0.5)
    for got, want in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        dtype = from_numpy(got.dtype)
        assert dtype is not None
        assert_close(got, want, dtype, 32, scale * np.ones_like(as_wide(want)), name)


# -- explicit kernels ---------------------------------------------------------------------------------------------------


@tw.gpu
def shares(x: tw.Array, sums: tw.Array):
    tile = tw.shared(64, tw.f32)
    i = tw.block.x * 64 + tw.thread.x
    tile[tw.thread.x] = x[i] if i < len(x) else 0.0
    tw.barrier()
    half = 32
    while half > 0:
        if tw.thread.x < half:
            tile[tw.thread.x] += tile[tw.thread.x + half]
        tw.barrier()
        half //= 2
    if tw.thread.x == 0:
        tw.atomic_add(sums, 0, tile[0])


def test_explicit_kernel() -> None:
    x = np.arange(77, dtype=np.float32)
    program = shares[2, 64].thread_stage(x, np.zeros(1, np.float32), target="toy8")
    artifact = build_artifact(program, TOY)
    (one,) = artifact.launches
    sums = np.zeros(1, np.float32)
    sizes = {**program.sizes({"x": (77,), "sums": (1,)}, {"x": (1,), "sums": (1,)}), **dict(zip(program.launch_sizes, (2, 1, 1), strict=False))}
    launch(load_code(artifact.code)[one.entry], (2, 1, 1), [x.view(np.uint8), sums.view(np.uint8)], [sizes[s] for s in one.sizes])
    assert sums[0] == x.sum()


# -- what it refuses ----------------------------------------------------------------------------------------------------


@tw.gpu
def counts(x: tw.Array):
    tw.atomic_add(x, 0, 1)


@tw.gpu
def reverses(x: tw.Array):
    tile = tw.shared(4096, tw.i64)
    tile[tw.thread.x] = x[tw.thread.x]
    tw.barrier()
    x[tw.thread.x] = tile[31 - tw.thread.x]


@tw.gpu
def measures(x: tw.Array):
    x[tw.thread.x] = tw.i64(tw.clock())


@tw.gpu
def waits(x: tw.Array):
    bars = tw.mbarriers(1)
    tw.mbarrier_init(bars, 0, 1)


@pytest.mark.parametrize(
    ("kernel", "threads", "problem", "source"),
    [
        (counts, 32, "toy8 cannot do atomic of 64 bits: it has no atomic access of that size", "tw.atomic_add(x, 0, 1)"),
        (reverses, 32, "reverses needs 32768 bytes of shared memory; a block of toy8 has 16384", "def reverses"),
        (measures, 32, "toy8 cannot do clock: its code generator does not know it", "tw.clock()"),
        (measures, 512, "measures wants 512 threads in a block; toy8 allows 256", "def measures"),
        (waits, 32, "toy8 cannot do mbarrier_init: it has no mbarrier", "tw.mbarrier_init(bars, 0, 1)"),
    ],
)  # fmt: skip
def test_refusals_name_target_construct_and_line(kernel: tw.GpuKernel, threads: int, problem: str, source: str) -> None:
    program = kernel[1, threads].thread_stage(np.zeros(512, np.int64), target="toy8")
    with pytest.raises(TargetLimit, match=problem) as caught:
        build_artifact(program, TOY)
    assert source in str(caught.value)


# -- the registry -------------------------------------------------------------------------------------------------------


def test_target_is_known_by_name() -> None:
    assert parse_target("toy8") is TOY
    assert "toy8" in names()
    assert backend_for(TOY) is codegen.BACKEND


def test_a_target_without_code_generator() -> None:
    with pytest.raises(TargetLimit, match="no code generator for mystery: none is registered for 'none'"):
        backend_for(Target("mystery", "none"))


def test_names_of_other_targets_are_taken() -> None:
    with pytest.raises(UserError, match="'sm_90a' is the name of another target"):
        register_target(replace(TOY, name="sm_90a"))


def test_import_loads_no_code_generator() -> None:
    code = "import sys, tilewright; print([m for m in sys.modules if m.startswith(('llvmlite', 'tilewright.codegen.cpu', 'tilewright.codegen.nvptx'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
