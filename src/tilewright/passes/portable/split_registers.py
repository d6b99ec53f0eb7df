"""Pass: vectors stay where threads read and write memory; in registers they become single numbers.

    %v = load %x, %i {width = 8} : vec<f32, 8>        %0 = load %x, %i {width = 4} : vec<f32, 4>
    %w = mul %v, %v                           ->      %1 = load %x, %i + 4 {width = 4} : vec<f32, 4>
    store %out, %i, %w                                %2 = extract %0 {lane = 0} …

In and out: a thread-stage kernel. Some portable GPUs have memory in vectors of four numbers of 32 bits, and no others: an array is of vectors or of numbers
for a whole kernel. It is of vectors where some accesses are aligned vectors and nothing else than these is written: a language may write a whole vector
where a part of one is stored, and neighbours belong to other threads. Single elements of such an array can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attrs, Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, Vec
from tilewright.passes.simt_to_simd.split_vectors import VectorSplitter, after, plain

WIDTH = 4
_ALIGN = 16


def split_registers(kernel: Kernel) -> Kernel:
    """The kernel with vecs as what is loaded and stored alone; unchanged where it has none."""
    if not any(isinstance(v.type, Vec) for op in walk(kernel.body) for v in (*op.results, *op.operands)):
        return kernel
    return replace(kernel, body=_RegisterSplitter(arrays_of_vectors(kernel)).block(kernel.body))


def arrays_of_vectors(kernel: Kernel) -> frozenset[Value]:
    """The arrays that can be of vectors."""
    found = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("load", "store") and _is_vector(op)}
    for op in walk(kernel.body):
        touched = {v for v in op.operands if isinstance(v.type, Tensor)}
        if op.opcode not in ("load", "prefetch") and not (op.opcode == "store" and _is_vector(op)):
            found -= touched
    return frozenset(v for v in found if v in kernel.params and _is_wide(v))


def _is_wide(array: Value) -> bool:
    type_ = array.type
    return isinstance(type_, Tensor) and type_.dtype.itemsize == 4 and not type_.dtype.is_bool and type_.align % _ALIGN == 0 and type_.space == "global"


def _is_vector(op: Op) -> bool:
    """Whether it is an access of whole aligned vectors."""
    value = op.results[0] if op.opcode == "load" else next((v for v in op.operands if isinstance(v.type, Vec)), None)
    memory = op.operands[0].type
    return (
        value is not None and isinstance(value.type, Vec) and value.type.width % WIDTH == 0 and isinstance(memory, Tensor) and memory.rank > 0
        and not op.attrs.get("unaligned") and not op.attrs.get("masked") and memory.strides[-1].constant == 1
    )  # fmt: skip


def _four(attrs: Attrs) -> Attrs:
    return MappingProxyType({**attrs, "width": WIDTH})


class _RegisterSplitter(VectorSplitter):
    def __init__(self, arrays: frozenset[Value]) -> None:
        super().__init__()
        self.arrays = arrays

    def load(self, b: Builder, op: Op) -> list[Value]:
        if op.operands[0] not in self.arrays or not _is_vector(op):
            return super().load(b, op)
        assert isinstance(op.result.type, Vec)
        indices = self.singles(op.operands[1:])
        parts: list[Value] = []
        for start in range(0, op.result.type.width, WIDTH):
            whole = b.emit("load", [op.operands[0], *after(b, indices, start)], _four(plain(op)))[0]
            parts += [b.emit("extract", [whole], {"lane": lane})[0] for lane in range(WIDTH)]
        return parts

    def store(self, b: Builder, op: Op) -> None:
        if op.operands[0] not in self.arrays:
            super().store(b, op)
            return
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        indices: Sequence[Value] = self.singles(op.operands[1 : 1 + memory.rank])
        parts = self.get(op.operands[1 + memory.rank])
        for start in range(0, len(parts), WIDTH):
            whole = b.emit("pack", parts[start : start + WIDTH], {})[0]
            b.emit("store", [op.operands[0], *after(b, indices, start), whole], plain(op))
