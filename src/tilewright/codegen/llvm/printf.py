"""Arguments of C's `printf` -> LLVM text, on every device.

In: a text or a number, the writer of the function, and the address space of constants as LLVM writes it (`""` where there is one).
Out: the constant's address, or the number as C passes it to a function of variable arguments.
"""

from __future__ import annotations

import hashlib

from tilewright.base.dtypes import DType, f64
from tilewright.codegen.llvm.emitter import FunctionWriter


def text_constant(w: FunctionWriter, text: str, space: str) -> str:
    """The address of a text that ends in zero, in the generic space."""
    raw = text.encode() + b"\0"
    name = f"@tilewright_text_{hashlib.sha256(raw).hexdigest()[:16]}"
    spelled = "".join(chr(c) if 32 <= c < 127 and c not in b'"\\' else f"\\{c:02X}" for c in raw)
    w.declarations.add(f'{name} = private unnamed_addr{space} constant [{len(raw)} x i8] c"{spelled}"')
    return f"addrspacecast (ptr{space} {name} to ptr)" if space else name


def promoted(w: FunctionWriter, value: str, dtype: DType, space: str) -> tuple[str, str]:
    """A number as C passes it to a function with any number of arguments: its LLVM type, and its name."""
    if dtype.is_bool:
        yes, no = (text_constant(w, word, space) for word in ("True", "False"))
        return "ptr", w.let(f"select i1 {value}, ptr {yes}, ptr {no}")
    if dtype.is_float:
        return "double", value if dtype is f64 else w.let(f"fpext {dtype.llvm} {value} to double")
    if dtype.bits < 32:
        return "i32", w.let(f"{'sext' if dtype.kind == 'i' else 'zext'} {dtype.llvm} {value} to i32")
    return dtype.llvm, value
