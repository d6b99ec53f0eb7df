"""Accesses of global memory with a hint for the caches: `cache` of a load or store, one of `HINTS`.

In: the op and its operands; out: PTX in assembly, which is the only way LLVM has to say it. What an instruction moves are words of
4 bytes, up to four of them; a hint on anything else is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.codegen.llvm import FunctionWriter, llvm_type
from tilewright.ir.nodes import Op
from tilewright.ir.types import Tensor, Vec

HINTS = ("cs", "cg")
"""Will be used once; not in the first-level cache."""


def words(op: Op) -> int:
    """Words of a hinted access; 0 where there is no hint that could be given."""
    memory = op.operands[0].type
    accessed = op.results[0].type if op.results else op.operands[-1].type
    assert isinstance(memory, Tensor)
    if op.attrs.get("cache") not in HINTS or op.attrs.get("masked") or op.attrs.get("unaligned") or memory.space != "global" or memory.dtype.is_bool:
        return 0
    size = memory.dtype.itemsize * (accessed.width if isinstance(accessed, Vec) else 1)
    return size // 4 if size in (4, 8, 16) else 0


def _list(count: int, first: int) -> str:
    names = [f"${first + k}" for k in range(count)]
    return names[0] if count == 1 else "{" + ", ".join(names) + "}"


def _vector(count: int) -> str:
    return "" if count == 1 else f".v{count}"


def hinted_load(w: FunctionWriter, op: Op, operands: Sequence[str], read_only: bool) -> str:
    count = words(op)
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    where = w.element_pointer(op.operands[0], operands[1 : 1 + memory.rank])
    text = f"ld.global.{op.attrs['cache']}{_vector(count)}.b32 {_list(count, 0)}, [${count}];"
    kind = "i32" if count == 1 else "{" + ", ".join(["i32"] * count) + "}"
    effect, clobber = ("", "") if read_only else (" sideeffect", ",~{memory}")
    constraint = ",".join(["=r"] * count) + ",l" + clobber
    found = w.let(f'call {kind} asm{effect} "{text}", "{constraint}"(ptr addrspace(1) {where})')
    packed = found
    if count > 1:
        packed = "poison"
        for k in range(count):
            word = w.let(f"extractvalue {kind} {found}, {k}")
            packed = w.let(f"insertelement <{count} x i32> {packed}, i32 {word}, i64 {k}")
    before, after = "i32" if count == 1 else f"<{count} x i32>", llvm_type(op.results[0].type)
    return packed if before == after else w.let(f"bitcast {before} {packed} to {after}")


def hinted_store(w: FunctionWriter, op: Op, operands: Sequence[str]) -> None:
    count = words(op)
    memory, value = op.operands[0].type, op.operands[-1].type
    assert isinstance(memory, Tensor)
    where = w.element_pointer(op.operands[0], operands[1 : 1 + memory.rank])
    kind, plain = llvm_type(value), "i32" if count == 1 else f"<{count} x i32>"
    packed = operands[-1] if kind == plain else w.let(f"bitcast {kind} {operands[-1]} to {plain}")
    parts = [packed] if count == 1 else [w.let(f"extractelement {plain} {packed}, i64 {k}") for k in range(count)]
    text = f"st.global.{op.attrs['cache']}{_vector(count)}.b32 [$0], {_list(count, 1)};"
    constraint = "l," + ",".join(["r"] * count) + ",~{memory}"
    arguments = ", ".join([f"ptr addrspace(1) {where}", *(f"i32 {p}" for p in parts)])
    w.line(f'call void asm sideeffect "{text}", "{constraint}"({arguments})')
