"""Constant memory in LLVM text: an `alloc` with `values` in, the type and the numbers of a global out."""

from __future__ import annotations

from tilewright.codegen.llvm.emitter import literal, memory_type
from tilewright.ir.nodes import Op
from tilewright.ir.types import Tensor


def initialiser(op: Op) -> str:
    """`[3 x float] [float 1.0, float 2.0, float 3.0]`"""
    memory, values = op.results[0].type, op.attrs["values"]
    assert isinstance(memory, Tensor) and isinstance(values, tuple)
    element = memory_type(memory.dtype)
    numbers = (v for v in values if isinstance(v, int | float))
    items = ((str(int(v)) if memory.dtype.is_bool else literal(v, memory.dtype)) for v in numbers)
    return f"[{len(values)} x {element}] [{', '.join(f'{element} {item}' for item in items)}]"
