"""Compiling LLVM text: what comes out, and what happens to text LLVM does not take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilewright.base.errors import CompilerBug
from tilewright.base.target import host_cpu, parse_target
from tilewright.codegen.host.pool import pool_ir
from tilewright.codegen.llvm.native import LONG, compile_object, emit_assembly, optimised_ir
from tilewright.codegen.nvptx.ptxas import cubin, ptxas_path

TWICE = """
define i64 @twice(i64 %x) {
  %a = add i64 %x, %x
  %b = add i64 %a, 0
  ret i64 %b
}
"""


def test_object_for_every_cpu() -> None:
    assert compile_object(TWICE, parse_target("x86-64-avx2"))[:4] == b"\x7fELF"
    assert compile_object(TWICE, parse_target("aarch64-neon"))[:4] == b"\x7fELF"


def test_assembly_follows_the_target() -> None:
    assert re.search(r"lea[a-z]*\s", emit_assembly(TWICE, parse_target("x86-64-avx2")))
    assert "lsl" in emit_assembly(TWICE, parse_target("aarch64-neon"))
    ptx = emit_assembly(TWICE, parse_target("sm_80"))
    assert ".target sm_80" in ptx
    assert ".version 7.1" in ptx


CALLS = "define internal i64 @once(i64 %x) {\n  %a = add i64 %x, 0\n  %b = add i64 %a, 1\n  ret i64 %b\n}\ndefine i64 @calls(i64 %x) {\n  %a = call i64 @once(i64 %x)\n  ret i64 %a\n}\n"


@pytest.mark.parametrize("lines", [LONG - 100, LONG + 100])
def test_functions_of_long_text_are_simplified_one_by_one(lines: int) -> None:
    found = optimised_ir(CALLS + "\n" * lines, host_cpu())
    assert "%x, 0" not in found
    assert ("call i64 @once" in found) == (lines > LONG)
    assert "call i64 @once" not in optimised_ir(CALLS + "\n" * lines, parse_target("sm_90"))


def test_optimised_ir_is_optimised_but_not_vectorised() -> None:
    assert "shl i64 %x, 1" in optimised_ir(TWICE, host_cpu())
    loop = """
    define void @fill(ptr %p, i64 %n) {
    head:
      br label %loop
    loop:
      %i = phi i64 [ 0, %head ], [ %next, %loop ]
      %at = getelementptr i64, ptr %p, i64 %i
      store i64 %i, ptr %at
      %next = add i64 %i, 1
      %more = icmp slt i64 %next, %n
      br i1 %more, label %loop, label %done
    done:
      ret void
    }
    """
    assert " x i64>" not in optimised_ir(loop, host_cpu())


@pytest.mark.parametrize("text", ["define i64 @f() { ret i32 0 }", "nonsense", "define void @f() { %x = add i64 %y, 1 ret void }"])
def test_rejected_text_is_kept(text: str) -> None:
    with pytest.raises(CompilerBug) as caught:
        compile_object(text, host_cpu())
    assert caught.value.code == "TW040"
    found = re.search(r"the LLVM text is in (\S+)", str(caught.value))
    assert found
    saved = Path(found.group(1))
    assert text in saved.read_text()
    saved.unlink()


@pytest.mark.parametrize(
    ("name", "sleeps", "pauses"), [("x86-64", "syscall", "pause"), ("aarch64-neon", "syscall", "yield")]
)
def test_pool_code_for_other_machines(name: str, sleeps: str, pauses: str) -> None:
    target = parse_target(name)
    assembly = emit_assembly(pool_ir(target), target)
    assert sleeps in assembly
    assert pauses in assembly
    without = emit_assembly(pool_ir(target, futex=False), target)
    assert "syscall" not in without
    assert "pthread_cond_wait" in without


@pytest.mark.parametrize(("llvm_value", "gone"), [("sub i16 0, %x", "neg.s16"), ("call i16 @llvm.abs.i16(i16 %x, i1 false)", "abs.s16")])
def test_what_ptxas_gets_wrong_is_written_otherwise(llvm_value: str, gone: str) -> None:
    text = f"""target triple = "nvptx64-nvidia-cuda"
    declare i16 @llvm.abs.i16(i16, i1)
    define ptx_kernel void @k(ptr addrspace(1) %to, i16 %x) {{
      %v = {llvm_value}
      %wide = sext i16 %v to i64
      store i64 %wide, ptr addrspace(1) %to
      ret void
    }}"""
    ptx = emit_assembly(text, parse_target("sm_90a"))
    assert gone not in ptx and "mul.lo.s16" in ptx
    if ptxas_path() is not None:
        assert cubin(ptx, "sm_90a")
