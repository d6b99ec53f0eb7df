"""Pass: accesses of arrays with several axes become accesses along one, with the common part of their addresses in the open.

In: a thread-stage kernel of a user, whose contiguous parameters have any rank. Out: the same with those parameters as rows. An index
that is another plus a constant contributes the constant apart: neighbours then share one product and differ by what a size gives.

    load %t, %z, %y, (%x + 1);  load %t, (%z - 1), %y, %x
    ->  %at = %z * (rows*columns) + %y * columns + %x;  load %t, (%at + 1);  load %t, (%at + -(rows*columns))

Runs last, for code alone: the emulator sees the axes, and with them what is out of bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.base.dtypes import i64
from tilewright.base.sizes import Size, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import Tensor

_ACCESSES = ("load", "store", "atomic", "atomic_load", "atomic_store")


def flat_accesses(kernel: Kernel) -> Kernel:
    """The kernel with rows for parameters."""
    used = {v for op in walk(kernel.body) if op.opcode not in _ACCESSES for v in op.operands}
    flat = {p: Value(_row(p.type), p.name) for p in kernel.params if _is_wide(p) and p not in used}
    if not flat:
        return kernel
    constants: dict[Value, int] = {}
    sums: dict[Value, tuple[Value, int]] = {}

    def one(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode == "const" and op.attrs["dtype"] is i64:
            value = op.attrs["value"]
            assert isinstance(value, int)
            constants[op.results[0]] = value
        elif op.opcode in ("add", "sub") and op.results[0].type.dtype is i64:
            _note(op, constants, sums)
        if op.opcode not in _ACCESSES or op.operands[0] not in flat:
            return None
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        rank = memory.type.rank
        index = _linear(b, memory.type, [b.cast(v, i64) for v in op.operands[1 : 1 + rank]], sums)
        return b.emit(
            op.opcode, (flat[memory], index, *op.operands[1 + rank :]), op.attrs, op.results[0].name if op.results else ""
        )

    done = rewrite(kernel, one)
    return replace(done, params=tuple(flat.get(p, p) for p in kernel.params))


def _is_wide(param: Value) -> bool:
    return isinstance(param.type, Tensor) and param.type.rank > 1 and param.type.is_contiguous


def _row(type_: object) -> Tensor:
    assert isinstance(type_, Tensor)
    return replace(type_, shape=(product(type_.shape),), strides=(Size.of(1),))


def _note(op: Op, constants: dict[Value, int], sums: dict[Value, tuple[Value, int]]) -> None:
    """Remember what is another value plus a constant."""
    left, right = op.operands
    if right in constants:
        base, before = sums.get(left, (left, 0))
        sums[op.results[0]] = base, before + (constants[right] if op.opcode == "add" else -constants[right])
    elif left in constants and op.opcode == "add":
        base, before = sums.get(right, (right, 0))
        sums[op.results[0]] = base, before + constants[left]


def _linear(b: Builder, memory: Tensor, indices: Sequence[Value], sums: dict[Value, tuple[Value, int]]) -> Value:
    """The place in the row."""
    total: Value | None = None
    apart = Size.of(0)
    for index, extent in zip(indices, memory.shape, strict=True):
        base, constant = sums.get(index, (index, 0))
        apart = apart * extent + constant
        total = base if total is None else b.add(b.mul(total, b.index(extent)), base)
    assert total is not None
    return total if apart.constant == 0 else b.add(total, b.index(apart))
