"""`ldexp` as AVX-512's scaling instruction: LLVM text.

In: a function writer and the op. Out: the lines, one instruction for each register. Powers beyond the range give 0, denormals
(rounded once) and infinities, as a multiplication would.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import f32
from tilewright.codegen.llvm.emitter import FunctionWriter, llvm_type
from tilewright.ir.nodes import Op
from tilewright.ir.types import Vec, dtype_of

_BYTES = 64
_CURRENT_ROUNDING = "4"


def ldexp(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    kind = op.results[0].type
    single = dtype_of(kind) is f32
    lanes = _BYTES // dtype_of(kind).itemsize
    if not isinstance(kind, Vec):
        return _scalar(w, llvm_type(kind), lanes // 4, "ss" if single else "sd", operands)
    name = f"llvm.x86.avx512.mask.scalef.{'ps' if single else 'pd'}.512"
    whole, register = llvm_type(kind), f"<{lanes} x {dtype_of(kind).llvm}>"
    parts = []
    for start in range(0, max(kind.width, lanes), lanes):
        values = [_lanes(w, whole, kind.width, value, start, lanes) for value in operands]
        given = [(register, value) for value in values]
        parts.append(w.call(register, name, *given, (register, "zeroinitializer"), (f"i{lanes}", "-1"), ("i32", _CURRENT_ROUNDING)))
    return _joined(w, parts, dtype_of(kind).llvm, lanes, kind.width)


def _scalar(w: FunctionWriter, element: str, lanes: int, suffix: str, operands: Sequence[str]) -> str:
    register = f"<{lanes} x {element}>"
    given = [(register, w.let(f"insertelement {register} zeroinitializer, {element} {value}, i64 0")) for value in operands]
    result = w.call(
        register, f"llvm.x86.avx512.mask.scalef.{suffix}", *given, (register, "zeroinitializer"), ("i8", "-1"), ("i32", _CURRENT_ROUNDING)
    )
    return w.let(f"extractelement {register} {result}, i64 0")


def _lanes(w: FunctionWriter, kind: str, width: int, value: str, start: int, lanes: int) -> str:
    """So many elements from `start` on; what is not there is undefined."""
    if width == lanes:
        return value
    places = ", ".join(f"i32 {start + k}" if start + k < width else "i32 poison" for k in range(lanes))
    return w.let(f"shufflevector {kind} {value}, {kind} poison, <{lanes} x i32> <{places}>")


def _joined(w: FunctionWriter, parts: Sequence[str], element: str, lanes: int, width: int) -> str:
    """The parts one after another, cut to `width`."""
    joined, count = list(parts), lanes
    while len(joined) > 1:
        places = ", ".join(f"i32 {k}" for k in range(2 * count))
        kind = f"<{count} x {element}>"
        pairs = [joined[k : k + 2] for k in range(0, len(joined), 2)]
        joined = [
            w.let(f"shufflevector {kind} {pair[0]}, {kind} {pair[1] if len(pair) > 1 else 'poison'}, <{2 * count} x i32> <{places}>")
            for pair in pairs
        ]
        count *= 2
    if count == width:
        return joined[0]
    places = ", ".join(f"i32 {k}" for k in range(width))
    return w.let(f"shufflevector <{count} x {element}> {joined[0]}, <{count} x {element}> poison, <{width} x i32> <{places}>")
