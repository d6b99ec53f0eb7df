"""Local arrays of GPU threads: addresses are those of local memory, once."""

from __future__ import annotations

import re

import pytest

from assembled import assemble
from support import array
from tilewright.base.dtypes import f32
from tilewright.base.sizes import ONE
from tilewright.base.target import parse_target
from tilewright.codegen.llvm.native import emit_assembly
from tilewright.compile.build import llvm_text
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Stage
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor
from tilewright.ir.verify import verify_kernel


def ptx_for(varying: bool) -> str:
    """A value goes through a local array: at a place known when compiling, or not."""
    x = array("x", f32, 64)
    b = Builder()
    buffer = b.op("alloc", dtype=f32, shape=(32,), space="local")
    thread = b.op("thread_id")
    b.multi("store", buffer, thread if varying else b.index(3), b.op("load", x, thread))
    b.multi("store", x, thread, b.op("load", buffer, b.op("sub", b.index(31), thread) if varying else b.index(3)))
    kernel = Kernel("k", Stage.THREAD, (x,), Block((), tuple(b.ops)), grid=(ONE,), threads=32)
    verify_kernel(kernel)
    assert isinstance(x.type, Tensor)
    program = Program("k", (ProgramArray("x", x.type, "input"),), (), (), (KernelCall(kernel, ("x",)),))
    target = parse_target("sm_90a")
    return emit_assembly(llvm_text(program, target)[0], target, opt=2)


@pytest.mark.requires("ptxas")
def test_addresses_are_converted_once() -> None:
    ptx = ptx_for(varying=True)
    assert re.search(r"\bst\.local\.b32", ptx) and re.search(r"\bld\.local\.b32", ptx)
    assert "cvta.local" not in ptx
    assemble(ptx, "sm_90a")


def test_arrays_with_known_places_are_registers() -> None:
    assert ".local" not in ptx_for(varying=False)
