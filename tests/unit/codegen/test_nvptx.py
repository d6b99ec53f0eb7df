"""NVPTX code generation: every op in every dtype becomes PTX that NVIDIA's assembler takes, on every generation of GPUs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matrix_kernels import matrix_kernels
from op_kernels import map_kernels, module, reduction_kernels, thread_kernel

import tilewright as tw
from assembled import assemble
from instruction_kernels import instruction_cases
from support import add_2d, array, loop_kernel, ptx_of, reduce_2d, stages_of
from tilewright.base.dtypes import SCALARS, DType, bool_, f16, f32, f64, i64
from tilewright.base.errors import TargetLimit
from tilewright.base.sizes import ONE
from tilewright.base.target import parse_target
from tilewright.codegen.llvm.native import emit_assembly
from tilewright.codegen.nvptx.emitter import nvptx_function
from tilewright.compile.build import llvm_text
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Stage, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.ops_lanes import DEFINITIONS as LANE_DEFINITIONS
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor
from tilewright.passes.late.check_target import check_kernel_target

KNOWN = set((Path(__file__).parents[2] / "data" / "llvm22_nvvm.txt").read_text().split())
"""Every NVVM intrinsic of LLVM 22 of the families Tilewright uses, overload suffixes left off."""
UNREACHABLE = {"panel_begin", "panel_dot", "panel_end", "run_blocks", "step", "fault", "report", "wave_mma", *(row.name for row in LANE_DEFINITIONS)}
"""Ops no pass makes for NVIDIA GPUs: those of CPUs, of AMD's, and of the debugger."""


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_every_op_assembles(target: str) -> None:
    chosen = parse_target(target)
    widest = target == "sm_90a"
    kernels = [k for d in SCALARS for k in map_kernels(d, False)]
    kernels += [k for d in SCALARS for k in reduction_kernels(d)] if widest else reduction_kernels(f32) + reduction_kernels(i64)
    kernels += map_kernels(f16, True) + map_kernels(f32, True) + map_kernels(bool_, True) if widest else []
    program = module(kernels, chosen)
    program = replace(program, calls=(*program.calls, KernelCall(thread_kernel(chosen), ("o", "w"))))
    text, _ = llvm_text(program, chosen)
    used = set(re.findall(r"declare [^@]*@(llvm\.nvvm\.[\w.]+)\(", text))
    assert used, "no intrinsics at all?"
    unknown = {name for name in used if not any(name == k or name.startswith(k + ".") for k in KNOWN)}
    assert not unknown, f"LLVM 22 does not know {sorted(unknown)}"
    ptx = emit_assembly(text, chosen, opt=1)
    assert ".extern .func" not in ptx, "a call of something that is not there"
    assert f".target {target}" in ptx
    assemble(ptx, target, level=0)


def test_every_op_is_covered() -> None:
    """An op added to the table must be added to the kernels above, or be listed as unreachable."""
    chosen = parse_target("sm_90a")
    seen = {op.opcode for op in walk(thread_kernel(chosen).body)}
    for dtype in SCALARS:
        for kernel in map_kernels(dtype, True):
            seen |= {op.opcode for op in walk(kernel.body)}
    # Some ops exist on a CPU alone; `test_cpu.py` compiles these kernels.
    for name in ("x86-64-avx2", "x86-64-avx512"):
        for call in module(map_kernels(f32, True), parse_target(name)).calls:
            seen |= {op.opcode for op in walk(call.kernel.body)}
    for kernel in (*matrix_kernels(), *(case.kernel for case in instruction_cases())):
        seen |= {op.opcode for op in walk(kernel.body)}
    missing = {d.name for d in OPS.values() if "thread" in d.stages} - seen - UNREACHABLE - {"for", "if", "yield", "size", "const"}
    assert not missing


def test_reads_are_invariant_only_when_nobody_writes() -> None:
    """A tensor that the kernel also writes must not be read through the non-coherent cache."""
    memory = array("o", f32, "n", align=16)

    def body(b: Builder, i: Value) -> None:
        b.multi("store", memory, i, b.add(b.op("load", memory, i), b.const(1.0, f32)))

    ptx = ptx_of(stages_of(loop_kernel("bump", [memory], ["n"], body), n=4096))
    assert "ld.global" in ptx
    assert "ld.global.nc" not in ptx
    assert "ld.global.nc" in ptx_of(stages_of(add_2d(), rows=64, cols=64))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("opcode", ["min", "max"])
def test_extremes_are_one_instruction_an_element(target: str, width: int, opcode: str) -> None:
    """LLVM may not make comparisons and selects of any width."""
    x, o = array("x", f32, 4096, align=16), array("o", f32, 4096, align=16)
    b = Builder()
    place = b.mul(b.op("thread_id"), b.index(width))
    parts = [[b.op("load", x, b.add(place, b.index(first + k))) for k in range(width)] for first in (0, 1024)]
    first, second = ((b.op("pack", *part) if width > 1 else part[0]) for part in parts)
    value = b.op(opcode, first, second)
    for k in range(width):
        b.multi("store", o, b.add(place, b.index(k)), b.op("extract", value, lane=k) if width > 1 else value)
    kernel = Kernel("k", Stage.THREAD, (x, o), Block((), tuple(b.ops)), grid=(ONE,), threads=32)
    arrays = [ProgramArray(p.name, p.type, kind) for p, kind in ((x, "input"), (o, "output")) if isinstance(p.type, Tensor)]
    program = Program("k", (arrays[0],), (arrays[1],), (), (KernelCall(kernel, ("x", "o")),))
    text, _ = llvm_text(program, parse_target(target))
    ptx = emit_assembly(text, parse_target(target), opt=3)
    assert len(re.findall(rf"{opcode}\.NaN\.f32", ptx)) == width
    assert "setp" not in ptx
    assert "selp" not in ptx


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("width", [1, 2])
def test_ordinary_divisions_and_roots_do_not_branch(dtype: DType, width: int) -> None:
    x, o = array("x", dtype, 4096, align=16), array("o", dtype, 4096, align=16)
    b = Builder()
    place = b.mul(b.op("thread_id"), b.index(2))
    attrs = {"width": width} if width > 1 else {}
    first, second = (b.emit("load", [x, b.add(place, b.index(k))], attrs)[0] for k in (0, 1024))
    b.multi("store", o, place, b.emit("div", [first, b.emit("sqrt", [second], {"ordinary": True})[0]], {"ordinary": True})[0])
    kernel = Kernel("k", Stage.THREAD, (x, o), Block((), tuple(b.ops)), grid=(ONE,), threads=32)
    arrays = [ProgramArray(p.name, p.type, kind) for p, kind in ((x, "input"), (o, "output")) if isinstance(p.type, Tensor)]
    target = parse_target("sm_90a")
    ptx = emit_assembly(llvm_text(Program("k", (arrays[0],), (arrays[1],), (), (KernelCall(kernel, ("x", "o")),)), target)[0], target, opt=3)
    assert len(re.findall(r"rcp\.approx", ptx)) == len(re.findall(r"rsqrt\.approx", ptx)) == width
    assert not re.search(r"div\.rn|sqrt\.rn|setp", ptx)
    assemble(ptx, "sm_90a", level=0)


@tw.kernel
def append(cache: tw.InOut, row: tw.Array, position: tw.Array) -> None:
    for j in tw.grid(len(row)):
        cache[position[0], j] = row[j]


def test_loads_are_under_way_before_an_index_is_checked() -> None:
    """Else the store of a row would wait for two loads, one after the other."""
    artifact = append.compile(np.zeros((64, 1024), np.float32), np.zeros(1024, np.float32), np.zeros(1, np.int64), target="sm_90a")
    blocks = re.split(r"^\$L__BB", artifact.code.decode(), flags=re.MULTILINE)
    storing = [block for block in blocks if "st.global.v4" in block]
    assert storing
    assert not any("ld.global" in block for block in storing)


def test_block_size_is_declared() -> None:
    stages = stages_of(add_2d(), rows=640, cols=640)
    threads = stages.thread.calls[0].kernel.threads
    assert f".reqntid {threads}" in ptx_of(stages)


def test_too_many_threads_are_a_target_limit() -> None:
    kernel = Kernel("wide", Stage.THREAD, (), Block(), threads=2048)
    with pytest.raises(TargetLimit, match=r"error\[TW020\]: wide wants 2048 threads in a block; sm_90a allows 1024"):
        check_kernel_target(kernel, parse_target("sm_90a"))


def test_shuffle_segments() -> None:
    """The last operand is clamp and segment mask: `((32 - width) << 8) | 31`, without the 31 for `up`."""
    for mode, width, expected in (("xor", 32, 31), ("xor", 16, 0x101F), ("up", 32, 0), ("up", 8, 0x1800), ("down", 4, 0x1C1F), ("idx", 32, 31)):
        b = Builder()
        x = array("x", f32, 32)
        thread = b.op("thread_id")
        value = b.op("shuffle", b.op("load", x, thread), b.index(1), mode=mode, width=width)
        b.multi("store", x, thread, value)
        text, _, _ = nvptx_function(Kernel("s", Stage.THREAD, (x,), Block((), tuple(b.ops)), threads=32), "s", parse_target("sm_90a"))
        assert f", i32 {expected})" in text, (mode, width)


@pytest.mark.requires("ptxas")
def test_several_kernels_keep_their_line_tables() -> None:
    """A module of two kernels with debug metadata of their own must still assemble."""
    import numpy as np

    from kernel_table import BY_NAME

    case = BY_NAME["sum_f32_all"]
    ptx = case.kernel.compile(np.zeros((4096, 4096), np.float32), target="sm_90a").code.decode()
    assert ptx.count(".entry") == 2
    assemble(ptx, "sm_90a")


def test_bool_scalars_are_bytes() -> None:
    from tilewright.ir.types import Scalar

    flag, out = Value(Scalar(bool_), "flag"), array("o", f32, "n")

    def body(b: Builder, i: Value) -> None:
        b.multi("store", out, i, b.select(flag, b.const(1.0, f32), b.const(2.0, f32)))

    ptx = ptx_of(stages_of(loop_kernel("choose", [flag, out], ["n"], body), n=64))
    assert re.search(r"\.param \.(u|b)8 ", ptx)


def test_reduction_over_rows_uses_shared_memory_once() -> None:
    ptx = ptx_of(stages_of(reduce_2d(), rows=64, cols=100000))
    assert ptx.count("bar.sync") + ptx.count("barrier.cta.sync") + ptx.count("barrier.sync") == 1
    assert "st.shared" in ptx
