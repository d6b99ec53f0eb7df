"""Count what a loop-stage kernel does: operations, and the bytes it must at least move. Symbolic, in the sizes of the call.

Operations are those on floats and on integers narrower than i64 (i64 is what indices are made of); `fma` counts two, a function one, and a
reduction one for each value combined, so a matrix product counts `2*m*n*k`. Bytes count every array once for reading and once for writing.
Of two branches the longer counts. Scores that attention computes anew in each of its texts (`analysis/attention.py`) count once. Where a loop's length depends on more than sizes the count is a lower bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.analysis.affine import Forms, analyse
from tilewright.base.dtypes import i64
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, ceildiv, maximum, product
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.types import Scalar, Tensor

if TYPE_CHECKING:
    from tilewright.analysis.attention import Attention

OPERATIONS = 16
"""Operations of a reduction that take a core as long as an element that is read or written."""
_FREE = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isnan", "select", "cast", "bitcast", "not", "and", "or", "xor", "shl", "shr"})


@record
class Work:
    """What one launch does."""

    operations: Size
    bytes: Size
    exact: bool
    """Otherwise `operations` is a lower bound."""


def elements_per_block(kernel: Kernel) -> Size:
    """Elements one block of a thread-stage kernel touches: those of all arrays, shared out over the blocks."""
    total = ZERO
    for param in kernel.tensors:
        assert isinstance(param.type, Tensor)
        total = total + product(param.type.shape)
    return per_block(kernel, total)


def per_block(kernel: Kernel, elements: Size) -> Size:
    """What one of a kernel's blocks does, in elements: those of arrays that it touches, of which one with loops of its own counts more often, or what its operations take as long as."""
    weight, operations = kernel.attrs.get("weight"), kernel.attrs.get("operations")
    total = elements * weight if isinstance(weight, int) else elements
    if isinstance(operations, Size):
        total = maximum(total, ceildiv(operations, Size.of(OPERATIONS)))
    return ceildiv(total, maximum(ONE, product(kernel.grid)))


def work_of(kernel: Kernel) -> Work:
    attention = None
    if "reduce" in kernel.opcodes:
        from tilewright.analysis.attention import find_attention

        attention = find_attention(kernel)
    counter = _WorkCounter(analyse(kernel), attention)
    operations = counter.block(kernel.body)
    return Work(operations, _bytes(kernel), counter.exact)


class _WorkCounter:
    def __init__(self, forms: Forms, attention: Attention | None = None) -> None:
        self.forms, self.attention = forms, attention
        self.exact = True

    def block(self, block: Block) -> Size:
        total = ZERO
        for op in block.ops:
            total = total + self.op(op)
        return total

    def op(self, op: Op) -> Size:
        if self.attention is not None and op in (self.attention.parallel, self.attention.maximum, *self.attention.sums, self.attention.weighted):
            return self._of_attention(op, self.attention)
        if op.opcode in ("parallel", "reduce"):
            points = product([self.length(v) for v in op.operands])
            inside = self.block(op.regions[0])
            if op.opcode == "reduce":
                inside = inside + ONE
            return points * inside
        if op.opcode == "for":
            low, high, step = (self.length(v) for v in op.operands[:3])
            return ceildiv(high - low, step) * self.block(op.regions[0])
        if op.opcode == "if":
            return maximum(*(self.block(region) for region in op.regions))
        if op.regions:
            self.exact = False
            return ZERO + sum((self.block(region) for region in op.regions), ZERO)
        return _cost(op)

    def _of_attention(self, op: Op, attention: Attention) -> Size:
        """Scores and their exponentials count with the maximum; a sum adds them up, a weighted one multiplies them too."""
        points = product([self.length(v) for v in op.operands])
        if op is attention.maximum:
            return points * (self.block(op.regions[0]) + 3)
        if op is not attention.parallel:
            return points * (2 if op is attention.weighted else 1)
        shared = (attention.maximum, *attention.sums)
        if attention.loop is not None:
            return points * self.block(op.regions[0])
        # One of the indices is that of the values' columns: what does not depend on it counts once for all of them.
        rows = product([size for index, size in zip(attention.indices, attention.extents, strict=True) if index is not attention.column])
        total = rows * sum((self.op(x) for x in shared), ZERO)
        return total + points * sum((self.op(x) for x in op.regions[0].ops if x not in shared), ZERO)

    def length(self, value: Value) -> Size:
        form = self.forms.get(value)
        if form is None or form.factors:
            self.exact = False
            return ONE
        return form.constant


def _cost(op: Op) -> Size:
    known = OPS.get(op.opcode)
    if known is None or known.group not in ("elementwise", "function") or op.opcode in _FREE:
        return ZERO
    type_ = op.results[0].type
    if not isinstance(type_, Scalar) or type_.dtype is i64 or type_.dtype.is_bool:
        return ZERO
    return Size.of(2 if op.opcode == "fma" else 1)


def _bytes(kernel: Kernel) -> Size:
    reads: dict[Value, None] = {}
    writes: dict[Value, None] = {}
    for op in walk(kernel.body):
        if op.opcode in ("load", "store", "atomic", "accumulate"):
            if op.opcode != "store":
                reads[op.operands[0]] = None
            if op.opcode != "load":
                writes[op.operands[0]] = None
    total = ZERO
    for memory in (*reads, *writes):
        assert isinstance(memory.type, Tensor)
        total = total + product(memory.type.shape) * memory.type.dtype.itemsize
    return total
