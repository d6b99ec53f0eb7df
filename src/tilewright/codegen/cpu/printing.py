"""`print` -> LLVM text for a CPU: C's `printf`, flushed at once, so that lines come in order with those of Python.

In: the op, the names of its operands and the writer of the function; out: nothing, a `print` has no result.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.codegen.llvm.emitter import FunctionWriter
from tilewright.codegen.llvm.printf import promoted, text_constant
from tilewright.ir.nodes import Op
from tilewright.ir.printing import pieces, printf_format
from tilewright.ir.types import dtype_of


def c_print(w: FunctionWriter, op: Op, operands: Sequence[str]) -> list[str]:
    dtypes = [dtype_of(v.type) for v in op.operands]
    format_ = text_constant(w, printf_format(pieces(str(op.attrs["text"]), dtypes)), "")
    numbers = [promoted(w, value, dtype, "") for value, dtype in zip(operands, dtypes, strict=True)]
    w.declarations.add("declare i32 @printf(ptr, ...)")
    w.let(f"call i32 (ptr, ...) @printf({', '.join([f'ptr {format_}', *map(' '.join, numbers)])})")
    w.call("i32", "fflush", ("ptr", "null"))
    return []
