"""Loads and stores under a condition become predicated instructions, in every dtype and width, and assemble."""

from __future__ import annotations

import re

import pytest

from assembled import assemble_all
from support import array
from tilewright.base.dtypes import SCALARS, DType, bf16, f32
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import ONE
from tilewright.base.target import parse_target
from tilewright.codegen.llvm.native import emit_assembly
from tilewright.codegen.nvptx.emitter import nvptx_function
from tilewright.compile.build import llvm_text
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Stage
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor
from tilewright.ir.verify import verify_kernel


def ptx_for(dtype: DType, width: int, writes: bool = False, target: str = "sm_90a", stores: bool = False) -> str:
    """Loads `width` elements for the first seven threads and stores them elsewhere (or in the same array), with `stores` for those threads only."""
    x = array("x", dtype, 4096, align=16)
    o = x if writes else array("o", dtype, 4096, align=16)
    b = Builder()
    thread = b.op("thread_id")
    place = b.mul(thread, b.index(width))
    wide = {"width": width} if width > 1 else {}
    few = b.op("lt", thread, b.index(7))
    value = b.op("load", x, place, few, masked=True, **wide)
    if stores:
        b.multi("store", o, place, value, few, masked=True)
    else:
        b.multi("store", o, place, value)
    params = (x,) if writes else (x, o)
    kernel = Kernel("k", Stage.THREAD, params, Block((), tuple(b.ops)), grid=(ONE,), threads=32)
    verify_kernel(kernel)
    arrays = [ProgramArray(p.name, p.type, "input" if p is x else "output") for p in params if isinstance(p.type, Tensor)]
    program = Program("k", tuple(arrays[:1]), tuple(arrays[1:]), (), (KernelCall(kernel, tuple(p.name for p in params)),))
    text, _ = llvm_text(program, parse_target(target))
    return emit_assembly(text, parse_target(target), opt=2)




@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", ["sm_75", "sm_90a"])
def test_every_dtype_and_width(target: str) -> None:
    modules: list[tuple[str, str]] = []
    for dtype in SCALARS:
        width = 1
        while width * dtype.itemsize <= 32:
            ptx = ptx_for(dtype, width, target=target)
            assert ptx.count(" ld.global.nc") == max(1, width * dtype.itemsize // 16), (dtype, width)
            assert "bra" not in ptx
            modules.append((ptx, target))
            width *= 2
    assemble_all(modules, level=1)


@pytest.mark.requires("ptxas")
def test_stores_of_every_dtype_and_width() -> None:
    modules: list[tuple[str, str]] = []
    for dtype in SCALARS:
        width = 1
        while width * dtype.itemsize <= 32:
            ptx = ptx_for(dtype, width, stores=True)
            assert len(re.findall(r"@%p\d+ st\.global", ptx)) == ptx.count("st.global") == max(1, width * dtype.itemsize // 16), (dtype, width)
            assert "bra" not in ptx
            modules.append((ptx, "sm_90a"))
            width *= 2
    assemble_all(modules, level=1)


def test_the_widest_load_takes_four_registers() -> None:
    assert "ld.global.nc.v4.b32" in ptx_for(f32, 4)
    assert "ld.global.nc.v4.b32" in ptx_for(bf16, 8)


def test_what_is_written_is_not_read_through_the_read_only_cache() -> None:
    assert " ld.global.b32" in ptx_for(f32, 1, writes=True)


def test_from_shared_memory() -> None:
    b = Builder()
    buffer = b.op("alloc", dtype=f32, shape=(32,), space="shared")
    thread = b.op("thread_id")
    x = array("x", f32, 32)
    b.multi("store", x, thread, b.op("load", buffer, thread, b.op("lt", thread, b.index(7)), masked=True))
    text = nvptx_function(Kernel("s", Stage.THREAD, (x,), Block((), tuple(b.ops)), threads=32), "s", parse_target("sm_90a"))[0]
    assert "@$2 ld.shared.b32 $0, [$1];" in text and "ptr addrspace(3)" in text


def test_local_memory_has_none() -> None:
    b = Builder()
    buffer = b.op("alloc", dtype=f32, shape=(32,), space="local")
    thread = b.op("thread_id")
    x = array("x", f32, 32)
    b.multi("store", x, thread, b.op("load", buffer, thread, b.op("lt", thread, b.index(7)), masked=True))
    with pytest.raises(CompilerBug, match="no load under a condition from local memory"):
        nvptx_function(Kernel("s", Stage.THREAD, (x,), Block((), tuple(b.ops)), threads=32), "s", parse_target("sm_90a"))
