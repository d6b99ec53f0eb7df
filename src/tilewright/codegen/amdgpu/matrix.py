"""Matrix instructions -> LLVM text for AMD GPUs: MFMA of CDNA, WMMA of RDNA.

In: `wave_mma`, the names of its operands and the writer of the function. Out: the name of the sums. LLVM takes bf16 as integers of 16 bits,
bytes as words, and a wave's bytes with a flag for their sign.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import bf16
from tilewright.codegen.llvm.emitter import FunctionWriter, llvm_type
from tilewright.ir.layouts import INSTRUCTIONS, WaveInstruction
from tilewright.ir.nodes import Op
from tilewright.ir.types import Vec


def wave_mma(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    found = INSTRUCTIONS[str(op.attrs["instruction"])]
    pieces = found.pieces
    first, second = (_joined(w, found, operands[side * pieces : (side + 1) * pieces]) for side in (0, 1))
    kind = llvm_type(op.results[0].type)
    name = f"llvm.amdgcn.{found.name.removesuffix('.u8')}"
    if found.family == "mfma":
        zeros = [("i32", "0")] * 3  # no broadcast of operands
        return w.call(kind, name, first, second, (kind, operands[-1]), *zeros)
    if not found.dtype.is_float:
        sign = ("i1", str(found.dtype.kind == "i").lower())
        return w.call(kind, name, sign, first, sign, second, (kind, operands[-1]), ("i1", "false"))
    return w.call(kind, name, first, second, (kind, operands[-1]))


def _joined(w: FunctionWriter, found: WaveInstruction, parts: Sequence[str]) -> tuple[str, str]:
    """One operand as the instruction takes it: its type and its name."""
    value, width = parts[0], found.width // found.pieces
    for part in parts[1:]:
        kind, lanes = llvm_type(Vec(found.dtype, width)), ", ".join(f"i32 {k}" for k in range(2 * width))
        value, width = w.let(f"shufflevector {kind} {value}, {kind} {part}, <{2 * width} x i32> <{lanes}>"), 2 * width
    held = llvm_type(Vec(found.dtype, width))
    if found.dtype.is_float and found.dtype is not bf16:
        return held, value
    bits = width * found.dtype.bits
    wanted = f"<{width} x i16>" if found.dtype is bf16 else f"i{bits}" if found.family == "mfma" else f"<{bits // 32} x i32>"
    return wanted, w.let(f"bitcast {held} {value} to {wanted}")
