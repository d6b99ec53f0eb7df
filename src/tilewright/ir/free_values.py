"""Values that the sizes of a kernel's arrays do not bound. In: a kernel; out: the values. Loops that end at one may run for any time."""

from __future__ import annotations

from tilewright.base.sizes import Size, is_computed, is_number
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor


def free_values(kernel: Kernel) -> set[Value]:
    """Numbers of a call, sizes made of them that no array has, what is read from memory, and what is computed from all of these."""
    found: set[Value] = {param for param in kernel.params if not isinstance(param.type, Tensor)}
    extents = {name for param in kernel.params if isinstance(param.type, Tensor) for size in param.type.shape for name in size.names}
    for op in walk(kernel.body):
        if op.opcode in ("load", "atomic", "accumulate") or any(v in found for v in op.operands) or _is_number(op, extents):
            found.update(op.results)
    return found


def _is_number(op: Op, extents: set[str]) -> bool:
    size = op.attrs.get("value")
    return op.opcode == "size" and isinstance(size, Size) and any((is_computed(n) or is_number(n)) and n not in extents for n in size.names)
