"""`panel_dot` as instructions of x86's matrix unit (AMX): LLVM text.

In: a function writer and the op. Out: the lines. The unit has eight registers of 16 rows of 64 bytes: four hold the tile of sums, two rows of
the first factor, two columns of the second. The registers are named, not allocated: nothing else in a kernel uses them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, bf16
from tilewright.codegen.llvm.emitter import FunctionWriter
from tilewright.ir.nodes import Op
from tilewright.ir.ops_matrix import PANEL, PANEL_STEP
from tilewright.ir.types import Tensor

ROWS = 16
"""Rows of one register."""
_SHAPES = "@tilewright.amx"
_CONFIGURATION = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[ROWS] * 8, *[0] * 8])


def emit(w: FunctionWriter, op: Op, operands: Sequence[str]) -> None:
    """Any op of the unit."""
    if op.opcode == "panel_begin":
        begin(w)
    elif op.opcode == "panel_end":
        end(w)
    else:
        panel_dot(w, op, operands)


def begin(w: FunctionWriter) -> None:
    """Give all registers their shape."""
    numbers = ", ".join(f"i8 {byte}" for byte in _CONFIGURATION)
    w.declarations.add(f"{_SHAPES} = internal constant [64 x i8] [{numbers}], align 64")
    w.call("void", "llvm.x86.ldtilecfg", ("ptr", _SHAPES))


def end(w: FunctionWriter) -> None:
    """Free the registers, so that nobody saves them."""
    w.call("void", "llvm.x86.tilerelease")


def panel_dot(w: FunctionWriter, op: Op, operands: Sequence[str]) -> None:
    sums, rows, columns = (v.type for v in op.operands[:3])
    assert isinstance(sums, Tensor) and isinstance(rows, Tensor) and isinstance(columns, Tensor)
    where, row, panel, steps, first = operands[3:]
    second = op.attrs["second"]
    assert isinstance(second, DType)
    long = (rows.shape[2].constant or 0) * rows.dtype.itemsize
    wide = PANEL * 4
    bases = [
        w.element_pointer(value, [index, "0", "0"])
        for value, index in zip(op.operands[:3], (where, row, panel), strict=True)
    ]
    places = [(2 * i + j, _at(w, bases[0], i * ROWS * wide + j * 64)) for i in (0, 1) for j in (0, 1)]
    fresh, kept, start, loop, done = (w.new_label(h) for h in ("fresh", "kept", "start", "steps", "done"))
    w.line(f"br i1 {first}, label %{fresh}, label %{kept}")
    w.open_label(fresh)
    for number, _ in places:
        w.call("void", "llvm.x86.tilezero", ("i8", str(number)))
    w.line(f"br label %{start}")
    w.open_label(kept)
    for number, place in places:
        _move(w, "tileloadd64", number, place, wide)
    w.line(f"br label %{start}")
    w.open_label(start)
    begin_label = w.label
    w.line(f"br label %{loop}")
    w.open_label(loop)
    step, following, a, b, next_a, next_b = (w.fresh(h) for h in ("i", "next", "a", "b", "na", "nb"))
    w.line(f"{step} = phi i64 [ 0, %{begin_label} ], [ {following}, %{loop} ]")
    w.line(f"{a} = phi ptr [ {bases[1]}, %{begin_label} ], [ {next_a}, %{loop} ]")
    w.line(f"{b} = phi ptr [ {bases[2]}, %{begin_label} ], [ {next_b}, %{loop} ]")
    name = _instruction(rows.dtype, second)
    _move(w, "tileloadd64", 6, b, wide)
    _move(w, "tileloadd64", 4, a, long)
    _multiply(w, name, 0, 4, 6)
    _move(w, "tileloadd64", 7, _at(w, b, 64), wide)
    _multiply(w, name, 1, 4, 7)
    _move(w, "tileloadd64", 5, _at(w, a, ROWS * long), long)
    _multiply(w, name, 2, 5, 6)
    _multiply(w, name, 3, 5, 7)
    w.line(f"{next_a} = getelementptr i8, ptr {a}, i64 {PANEL_STEP}")
    w.line(f"{next_b} = getelementptr i8, ptr {b}, i64 {ROWS * wide}")
    w.line(f"{following} = add nsw i64 {step}, 1")
    more = w.let(f"icmp slt i64 {following}, {steps}")
    w.line(f"br i1 {more}, label %{loop}, label %{done}")
    w.open_label(done)
    for number, place in places:
        _move(w, "tilestored64", number, place, wide)


def _instruction(first: DType, second: DType) -> str:
    if first is bf16:
        return "tdpbf16ps"
    return f"tdpb{'s' if first.kind == 'i' else 'u'}{'s' if second.kind == 'i' else 'u'}d"


def _at(w: FunctionWriter, pointer: str, offset: int) -> str:
    return w.let(f"getelementptr i8, ptr {pointer}, i64 {offset}") if offset else pointer


def _move(w: FunctionWriter, name: str, register: int, place: str, stride: int) -> None:
    w.call("void", f"llvm.x86.{name}", ("i8", str(register)), ("ptr", place), ("i64", str(stride)))


def _multiply(w: FunctionWriter, name: str, total: int, first: int, second: int) -> None:
    w.call("void", f"llvm.x86.{name}", ("i8", str(total)), ("i8", str(first)), ("i8", str(second)))
