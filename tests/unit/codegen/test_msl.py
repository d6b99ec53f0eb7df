"""Metal Shading Language: the gallery, contractions and the ops of the table are compiled as C++ and executed thread by thread; address spaces are
checked as C++ for OpenCL. Nothing here is Apple's compiler, and nothing runs on a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from op_kernels import map_kernels, module, reduction_kernels

import metal_host
import tilewright as tw
from gallery_cases import CONTRACTION_CASES, GALLERY_CASES
from kernel_table import BY_NAME
from support import as_wide, assert_close
from tilewright.base.dtypes import bool_, f32, from_numpy, i8, i32, i64, u8, u32
from tilewright.base.errors import TargetLimit
from tilewright.base.target import PORTABLE
from tilewright.cli.main import cli
from tilewright.codegen.msl.emitter import KNOWN
from tilewright.codegen.msl.tables import FUNCTIONS, OPS
from tilewright.compile.build import build_artifact, legal_program, llvm_text
from tilewright.compile.driver import compile_stages
from tilewright.ir.ops import OPS as TABLE

MSL = PORTABLE["msl"]
CASES = {case.name: case for case in (*GALLERY_CASES, *CONTRACTION_CASES)}
needs_clang = pytest.mark.skipif(metal_host.CLANG is None, reason="clang-19 is not installed (Debian: clang-19)")


@needs_clang
def test_gallery(tmp_path: Path) -> None:
    """All of it in one library: clang takes a second for each file."""
    programs, artifacts, arguments = [], [], []
    for case in CASES.values():
        given = case.arguments(77)
        runner = case.kernel.runner
        values = runner.arguments(case.kernel.bound(*given), True)
        program = compile_stages(case.kernel.function, runner.signature(values, True), MSL).stages.thread
        programs.append(program)
        artifacts.append(build_artifact(program, MSL))
        arguments.append((case, given))
    assert {artifact.kind for artifact in artifacts} == {"msl"}
    library = metal_host.compile_host([a.code.decode() for a in artifacts], tmp_path)
    for number, (case, given) in enumerate(arguments):
        found = metal_host.run(library, number, programs[number], artifacts[number], case.kernel.bound(*given))
        wanted = case.reference(*(as_wide(a) if isinstance(a, np.ndarray) else a for a in given))
        scale = max(1.0, max(float(np.size(a)) for a in given) ** 0.5)
        for got, want in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            dtype = from_numpy(got.dtype)
            assert dtype is not None
            assert_close(got.reshape(np.shape(want)), want, dtype, 32, scale * np.ones_like(as_wide(want)), case.name)
    metal_host.check_spaces("".join(f"namespace m{k} {{\n{a.code.decode()}\n}}\n" for k, a in enumerate(artifacts[:6])), tmp_path)


@needs_clang
def test_kernels_of_the_table(tmp_path: Path) -> None:
    """Every eleventh kernel of the table, or with TILEWRIGHT_MSL=all every one; those with f64 are refused."""
    names = list(BY_NAME)
    chosen = [BY_NAME[name] for name in (names if os.environ.get("TILEWRIGHT_MSL") == "all" else names[::11])]
    done, refused = [], []
    for case in chosen:
        arguments = case.inputs(np.random.default_rng(1), case.shapes[-1])
        runner = case.kernel.runner
        bound = case.kernel.bound(*arguments)
        program = compile_stages(case.kernel.function, runner.signature(runner.arguments(bound, True), True), MSL).stages.thread
        try:
            done.append((case, arguments, bound, program, build_artifact(program, MSL)))
        except TargetLimit as limit:
            refused.append(str(limit))
    assert all("it has no f64" in text for text in refused)
    assert len(done) > len(refused)
    library = metal_host.compile_host([artifact.code.decode() for *_, artifact in done], tmp_path)
    for number, (case, arguments, bound, program, artifact) in enumerate(done):
        found = metal_host.run(library, number, program, artifact, bound)
        with np.errstate(all="ignore"):
            wide = [as_wide(a) if isinstance(a, np.ndarray) else a for a in arguments]
            want = case.reference(*wide)
            scale = case.scale(*wide) if case.scale else None
        for got, wanted in zip(found, want if isinstance(want, tuple) else (want,), strict=True):
            dtype = from_numpy(got.dtype)
            assert dtype is not None
            assert_close(got.reshape(np.shape(wanted)), np.asarray(wanted), dtype, case.ulp, scale, case.name)


@needs_clang
def test_every_op_compiles(tmp_path: Path) -> None:
    kernels = [k for d in (bool_, i8, i32, i64, u8, u32) for k in map_kernels(d, False, casts=False)]
    kernels += [k for d in (i32, f32) for k in reduction_kernels(d)]
    program = legal_program(module(kernels, MSL), MSL)
    text, _ = llvm_text(program, MSL)
    metal_host.compile_host([text], tmp_path)
    metal_host.check_spaces(text, tmp_path)
    assert all(name in TABLE for name in (*OPS, *KNOWN))
    assert all(f"{name}(" in text for name, text in FUNCTIONS.items())


@tw.gpu
def sums(x: tw.Array, out: tw.Array):
    tile = tw.shared(2, tw.f32)
    total = x[tw.thread.x]
    step = 16
    while step > 0:
        total += tw.shuffle_xor(total, step)
        step //= 2
    if tw.thread.x % 32 == 0:
        tile[tw.thread.x // 32] = total
    tw.barrier()
    if tw.thread.x == 0:
        out[0] = tile[0] + tile[1]


@tw.gpu
def diverges(x: tw.Array, out: tw.Array):
    tile = tw.shared(64, tw.f32)
    tile[tw.thread.x] = x[tw.thread.x]
    if x[tw.thread.x] < 31.5:
        tw.barrier()
    out[tw.thread.x % len(out)] = tile[63 - tw.thread.x]


@needs_clang
def test_explicit_kernels_meet_and_divergence_is_found(tmp_path: Path) -> None:
    x = np.arange(64, dtype=np.float32)
    compiled = [kernel[1, 64].compile(x, np.zeros(1, np.float32), target="msl") for kernel in (sums, diverges)]
    library = metal_host.compile_host([a.code.decode() for a in compiled], tmp_path)
    programs = [kernel[1, 64].thread_stage(x, np.zeros(1, np.float32), target="msl") for kernel in (sums, diverges)]
    out = np.zeros(1, np.float32)
    metal_host.run_explicit(library, 0, programs[0], compiled[0], [x, out], {"x$0": 64, "out$0": 1, "grid$x": 1})
    assert out[0] == x.sum()
    with pytest.raises(AssertionError, match="a barrier that not all threads of the block come to"):
        metal_host.run_explicit(library, 1, programs[1], compiled[1], [x, out], {"x$0": 64, "out$0": 1, "grid$x": 1})


@tw.gpu
def waits(x: tw.Array):
    bars = tw.mbarriers(1)
    tw.mbarrier_init(bars, 0, 1)


@tw.gpu
def releases(x: tw.Array):
    tw.atomic_add(x, 0, tw.i32(1), order="release")


@pytest.mark.parametrize(
    ("kernel", "dtype", "problem"),
    [(waits, np.float32, "msl cannot do mbarrier_init: it has no mbarrier"), (releases, np.int32, "msl cannot do atomic with order='release': Metal's atomics are relaxed")],
)
def test_refusals_name_target_construct_and_line(kernel: tw.GpuKernel, dtype: type, problem: str) -> None:
    with pytest.raises(TargetLimit) as caught:
        kernel[1, 32].compile(np.zeros(64, dtype), target="msl")
    assert problem in str(caught.value)
    assert "test_msl.py" in str(caught.value)


def test_export(tmp_path: Path) -> None:
    """A text and how to launch it."""
    gallery = Path(__file__).parents[3] / "examples" / "gallery.py"
    done = CliRunner().invoke(cli, ["export", str(gallery), "--kernel", "scale", "--target", "msl", "--args", "m=f32[*,*] v=f32[*]", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    described = json.loads((tmp_path / "scale.json").read_text())
    text = (tmp_path / "scale.metal").read_text()
    (launch,) = described["launches"]
    assert f"kernel void {launch['entry']}(" in text and launch["arrays"] == ["m", "v", "out"]
    assert f"constant long* p [[buffer({len(launch['arrays'])})]]" in text
    assert "`values`" in described["convention"]
