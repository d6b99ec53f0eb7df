"""CPU code generation: every op in every dtype becomes an object without calls of anything a plain C library lacks."""

from __future__ import annotations

import numpy as np
import pytest
from op_kernels import map_kernels, module, reduction_kernels

from kernel_table import BY_NAME, CASES
from support import add_2d, data, program, run_cpu, scale_2d, stages_of, undefined_symbols
from tilewright.base.abi import STOP
from tilewright.base.dtypes import SCALARS, f32, i64
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import Size
from tilewright.base.target import parse_target
from tilewright.codegen.cpu.emitter import cpu_function
from tilewright.codegen.llvm.native import compile_object
from tilewright.compile.build import llvm_text
from tilewright.ir.nodes import Block, Kernel, Stage

MEMORY = {"memcpy", "memset", "memmove"}
C_LIBRARY = MEMORY | {f"{name}{kind}" for name in ("fma", "floor", "ceil", "trunc", "roundeven") for kind in ("", "f")}
"""What plain x86-64 has no instruction for: every C library has these."""


@pytest.mark.parametrize("target", ["x86-64", "x86-64-avx2", "x86-64-avx512", "aarch64-neon"])
def test_every_op_compiles_without_foreign_calls(target: str) -> None:
    chosen = parse_target(target)
    # Floats narrower than f32 are for memory: the front end computes in f32.
    wide = [d for d in SCALARS if not d.is_small_float]
    kernels = [k for d in wide for k in map_kernels(d, False)]
    kernels += [map_kernels(d, False)[1] for d in SCALARS if d.is_small_float]
    kernels += map_kernels(f32, True) + map_kernels(i64, True) + [k for d in (f32, i64) for k in reduction_kernels(d)]
    text, _ = llvm_text(module(kernels, chosen), chosen)
    code = compile_object(text, chosen, opt=1)
    assert undefined_symbols(code) - {STOP} <= (C_LIBRARY if target == "x86-64" else MEMORY)


@pytest.mark.parametrize("target", ["x86-64-avx2", "aarch64-neon"])
def test_narrow_floats_need_no_library(target: str) -> None:
    """f16, bf16 and f8 through the whole compiler, on CPUs without instructions for them."""
    names = [c.name for c in CASES if c.name.startswith(("add_f16", "add_bf16", "gelu_bf16", "casts_from_f", "casts_from_bf16", "scale_f8"))]
    names += ["sum_f16_all", "max_bf16_axis_0", "argmax_f16_all"]
    for name in names:
        case = BY_NAME[name]
        arguments = case.inputs(np.random.default_rng(0), case.shapes[-1])
        code = case.kernel.compile(*arguments, target=target).code
        assert undefined_symbols(code) - {STOP} <= MEMORY, name


def test_objects_for_an_older_level_run_here() -> None:
    """The code of every level this machine has gives the same numbers."""
    import platform

    from tilewright.base.target import host_cpu

    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("levels are those of x86-64")
    levels = ["x86-64", "x86-64-sse4.1", "x86-64-avx2", "x86-64-avx512"]
    have = [x for x in levels if x == "x86-64" or x.rpartition("-")[2] in ("sse4.1", "avx2", "avx512")]
    own = host_cpu().name
    usable = have[: have.index(own) + 1] if own in have else have[:1]
    rng = np.random.default_rng(0)
    inputs = {"x": data(rng, (37, 53), f32), "v": data(rng, (53,), f32)}
    results = [run_cpu(program(scale_2d()), inputs, parse_target(level))["o"] for level in usable]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


def test_gpu_shapes_are_refused() -> None:
    kernel = Kernel("two", Stage.THREAD, (), Block(), grid=(Size.of(1), Size.of(2)))
    with pytest.raises(CompilerBug, match="two: CPU kernels have a one-dimensional grid of single threads"):
        cpu_function(kernel, "two")


def test_arguments_do_not_alias() -> None:
    text, _ = cpu_function(stages_of(add_2d(), "cpu").thread.calls[0].kernel, "entry")
    assert "define void @entry(ptr %slots, i64 %begin, i64 %end)" in text
    assert text.count("ptr noalias") == 3
