"""`ldexp`, `min` and `max` as instructions of AVX-512: LLVM text.

In: a function writer and the op. Out: the lines. `ldexp` is one instruction for each register: powers beyond the range give 0, denormals
(rounded once) and infinities, as a multiplication would. `min` and `max` are three: `vrange` orders zeros by their signs but drops NaN,
so what is unordered is added up instead. LLVM's own code for `llvm.maximum` has six, and a way through a mask that chains of maxima wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import f32
from tilewright.codegen.llvm.emitter import FunctionWriter, llvm_type
from tilewright.ir.nodes import Op
from tilewright.ir.types import Vec, dtype_of

_BYTES = 64
_CURRENT_ROUNDING = "4"
_RANGE = {"min": "4", "max": "5"}
"""The smaller or larger of both, with the sign that it has."""


def ldexp(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    kind = op.results[0].type
    single = dtype_of(kind) is f32
    lanes = _BYTES // dtype_of(kind).itemsize
    if not isinstance(kind, Vec):
        return _scalar(w, llvm_type(kind), lanes // 4, f"scalef.{'ss' if single else 'sd'}", operands, (), (("i32", _CURRENT_ROUNDING),))
    return _vector(w, kind, lanes, f"scalef.{'ps' if single else 'pd'}", operands, (), (("i32", _CURRENT_ROUNDING),))


def extreme(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str | None:
    """`min` or `max`; None where a side is a constant, of which LLVM knows more."""
    if not all(name.startswith("%") for name in operands):
        return None
    kind = op.operands[0].type
    single = dtype_of(kind) is f32
    lanes = _BYTES // dtype_of(kind).itemsize
    which, default = ("i32", _RANGE[op.opcode]), ("i32", _CURRENT_ROUNDING)
    if isinstance(kind, Vec):
        found = _vector(w, kind, lanes, f"range.{'ps' if single else 'pd'}", operands, (which,), (default,))
    else:
        found = _scalar(w, llvm_type(kind), lanes // 4, f"range.{'ss' if single else 'sd'}", operands, (), (which, default))
    whole, mask = llvm_type(kind), f"<{kind.width} x i1>" if isinstance(kind, Vec) else "i1"
    unordered = w.let(f"fcmp uno {whole} {operands[0]}, {operands[1]}")
    nan = w.let(f"fadd {whole} {operands[0]}, {operands[1]}")
    return w.let(f"select {mask} {unordered}, {whole} {nan}, {whole} {found}")


_Arguments = Sequence[tuple[str, str]]


def _vector(w: FunctionWriter, kind: Vec, lanes: int, name: str, operands: Sequence[str], which: _Arguments, last: _Arguments) -> str:
    """The instruction for all lanes, register by register. `which` goes before what stays of other lanes, `last` behind the mask."""
    whole, register = llvm_type(kind), f"<{lanes} x {dtype_of(kind).llvm}>"
    parts = []
    for start in range(0, max(kind.width, lanes), lanes):
        given = [(register, _lanes(w, whole, kind.width, value, start, lanes)) for value in operands]
        parts.append(w.call(register, f"llvm.x86.avx512.mask.{name}.512", *given, *which, (register, "zeroinitializer"), (f"i{lanes}", "-1"), *last))
    return _joined(w, parts, dtype_of(kind).llvm, lanes, kind.width)


def _scalar(w: FunctionWriter, element: str, lanes: int, name: str, operands: Sequence[str], which: _Arguments, last: _Arguments) -> str:
    register = f"<{lanes} x {element}>"
    given = [(register, w.let(f"insertelement {register} poison, {element} {value}, i64 0")) for value in operands]
    result = w.call(register, f"llvm.x86.avx512.mask.{name}", *given, *which, (register, "zeroinitializer"), ("i8", "-1"), *last)
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
