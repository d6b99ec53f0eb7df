"""Pass: atomic updates that a target has no instruction for become loops of compare-and-swap.

In: a thread-stage kernel, and a target without atomic arithmetic of floats. Out: the same with `cas` and `exchange` of floats alone, which
compare and move bits; and without `inc` and `dec`, which few GPUs have.

    %old = atomic %t, %i, %v {kind = "add"}     first = atomic_load t[i]
                                          ->    loop { seen = cas t[i], first, first + v; leave where seen is first; first = seen }
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from tilewright.base.dtypes import DType, bool_, u16, u32, u64
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import Scalar, Tensor, Vec, dtype_of

_BITS: dict[int, DType] = {16: u16, 32: u32, 64: u64}


def expand_atomics(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with the atomics that the target has."""

    def one(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode != "atomic" or op.attrs["kind"] in ("cas", "exchange") or isinstance(op.results[0].type, Vec):
            return None
        kind, dtype = str(op.attrs["kind"]), dtype_of(op.results[0].type)
        if kind not in ("inc", "dec") and not (dtype.is_float and not target.atomic_floats):
            return None
        return [_loop(b, op, kind, dtype)]

    return rewrite(kernel, one)


def _loop(b: Builder, op: Op, kind: str, dtype: DType) -> Value:
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    place, value = op.operands[: 1 + memory.rank], op.operands[1 + memory.rank]
    scope = {k: v for k, v in op.attrs.items() if k == "scope"}
    first = b.emit("atomic_load", place, scope)[0]
    again = b.const(True, bool_)
    words = _BITS[dtype.bits]

    def body(inner: Builder, expected: Value, go: Value) -> list[Value]:
        seen = inner.emit("atomic", (*place, expected, _updated(inner, kind, expected, value)), {**op.attrs, "kind": "cas"})[0]
        same = inner.op("ne", inner.bitcast(seen, words), inner.bitcast(expected, words))
        return [seen, same]

    types, names = [first.type, Scalar(bool_)], ["expected", "go"]
    head = b.region(types, names, lambda inner, expected, go: [go, expected, go])
    tail: Block = b.region(types, names, body)
    results = (Value(first.type, "old"), Value(Scalar(bool_), "go"))
    b.append(Op("while", (first, again), results, MappingProxyType({}), (head, tail), op.span))
    return results[0]


def _updated(b: Builder, kind: str, old: Value, value: Value) -> Value:
    if kind == "inc":
        return b.select(b.op("ge", old, value), b.splat(0, old), b.add(old, b.splat(1, old)))
    if kind == "dec":
        wraps = b.op("or", b.op("eq", old, b.splat(0, old)), b.op("gt", old, value))
        return b.select(wraps, value, b.sub(old, b.splat(1, old)))
    return b.op(kind, old, value)
