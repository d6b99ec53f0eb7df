"""Bit tricks -> LLVM text, on every device. In: one op of the group `bits`, the names of its operands and the writer; out: its result.

Devices that have an instruction for one that LLVM would not find say so in their dialect (`better`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tilewright.ir.nodes import Op
from tilewright.ir.types import Type, Vec, dtype_of


class InstructionWriter(Protocol):
    """What bit tricks need of the writer of a function."""

    def let(self, text: str) -> str:
        """Append an instruction and name its result."""

    def call(self, result: str, name: str, *arguments: tuple[str, str]) -> str:
        """Call an intrinsic, declaring it."""


Handler = Callable[[InstructionWriter, Op, Sequence[str]], str]


def _kind(type_: Type) -> tuple[str, str]:
    """The LLVM type of integers, and its name in overloaded intrinsics."""
    bits = dtype_of(type_).bits
    return (f"<{type_.width} x i{bits}>", f"v{type_.width}i{bits}") if isinstance(type_, Vec) else (f"i{bits}", f"i{bits}")


def _plain(name: str) -> Handler:
    def handler(w: InstructionWriter, op: Op, operands: Sequence[str]) -> str:
        kind, suffix = _kind(op.operands[0].type)
        return w.call(kind, f"llvm.{name}.{suffix}", (kind, operands[0]))

    return handler


def _zeros(name: str) -> Handler:
    """Counts of zeros, which are all bits of 0."""

    def handler(w: InstructionWriter, op: Op, operands: Sequence[str]) -> str:
        kind, suffix = _kind(op.operands[0].type)
        return w.call(kind, f"llvm.{name}.{suffix}", (kind, operands[0]), ("i1", "false"))

    return handler


def _funnel_shift(w: InstructionWriter, op: Op, operands: Sequence[str]) -> str:
    low, high, count = operands
    name = "llvm.fshl.i32" if op.attrs["mode"] == "left" else "llvm.fshr.i32"
    return w.call("i32", name, ("i32", high), ("i32", low), ("i32", count))


def _byte_perm(w: InstructionWriter, op: Op, operands: Sequence[str]) -> str:
    low, high = (w.let(f"zext i32 {v} to i64") for v in operands[:2])
    both = w.let(f"or i64 {low}, {w.let(f'shl i64 {high}, 32')}")
    result = "0"
    for k in range(4):
        nibble = w.let(f"lshr i32 {operands[2]}, {4 * k}")
        by = w.let(f"zext i32 {w.let(f'and i32 {nibble}, 7')} to i64")
        moved = w.let(f"lshr i64 {both}, {w.let(f'shl i64 {by}, 3')}")
        octet = w.let(f"trunc i64 {moved} to i8")
        signs = w.let(f"ashr i8 {octet}, 7")
        replicate = w.let(f"icmp ne i32 {w.let(f'and i32 {nibble}, 8')}, 0")
        chosen = w.let(f"zext i8 {w.let(f'select i1 {replicate}, i8 {signs}, i8 {octet}')} to i32")
        result = w.let(f"or i32 {result}, {w.let(f'shl i32 {chosen}, {8 * k}')}")
    return result


def _mul_high(w: InstructionWriter, op: Op, operands: Sequence[str]) -> str:
    dtype = dtype_of(op.operands[0].type)
    bits, wide = dtype.bits, 2 * dtype.bits
    word = "sext" if dtype.kind == "i" else "zext"
    a, b = (w.let(f"{word} i{bits} {v} to i{wide}") for v in operands)
    product = w.let(f"mul i{wide} {a}, {b}")
    return w.let(f"trunc i{wide} {w.let(f'lshr i{wide} {product}, {bits}')} to i{bits}")


def _dp4a(w: InstructionWriter, op: Op, operands: Sequence[str]) -> str:
    total = operands[2]
    words = ["sext" if dtype_of(v.type).kind == "i" else "zext" for v in op.operands[:2]]
    for k in range(4):
        parts = []
        for word, value in zip(words, operands[:2], strict=True):
            octet = w.let(f"trunc i32 {w.let(f'lshr i32 {value}, {8 * k}')} to i8")
            parts.append(w.let(f"{word} i8 {octet} to i32"))
        total = w.let(f"add i32 {total}, {w.let(f'mul i32 {parts[0]}, {parts[1]}')}")
    return total


HANDLERS: dict[str, Handler] = {
    "popcount": _plain("ctpop"), "brev": _plain("bitreverse"), "clz": _zeros("ctlz"), "ctz": _zeros("cttz"),
    "funnel_shift": _funnel_shift, "byte_perm": _byte_perm, "mul_high": _mul_high, "dp4a": _dp4a,
}  # fmt: skip
