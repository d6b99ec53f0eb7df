"""What one `accumulate` becomes once a thread does it: plain code where the elements are its own, else an atomic.

In: the place and the value, at the thread stage. Out: ops appended to a builder. A kind without an atomic of its own tries again until nobody came in
between.

    accumulate %t, %i, %v {kind = "add", alone}    ->  %o = load %t, %i;  %n = add %o, %v;  store %t, %i, %n
    accumulate %t, %i, %v {kind = "add"}           ->  %o = atomic %t, %i, %v {kind = "add"}
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, bool_, compute_dtype, u32, u64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.ops import ATOMICS
from tilewright.ir.types import dtype_of


def combine_alone(b: Builder, memory: Value, indices: Sequence[Value], value: Value, kind: str, width: int = 1) -> None:
    """Combine into elements that no other thread has to do with; `width` neighbours at once on a CPU."""
    dtype = dtype_of(memory.type)
    if width == 1:
        old = b.op("load", memory, *indices)
    else:
        old = b.op("load", memory, *indices, width=width, unaligned=True)
    new = b.cast(b.op(kind, b.cast(old, compute_dtype(dtype)), value), dtype)
    if width == 1:
        b.multi("store", memory, *indices, new)
    else:
        b.multi("store", memory, *indices, new, unaligned=True)


def combine_atomic(b: Builder, memory: Value, indices: Sequence[Value], value: Value, kind: str, scope: str = "device") -> None:
    """Combine into an element that other threads may combine into at the same time."""
    if kind in ATOMICS:
        b.op("atomic", memory, *indices, value, kind=kind, scope=scope, order="relaxed")
        return
    first = b.op("atomic_load", memory, *indices, order="relaxed", scope=scope)

    def test(inner: Builder, old: Value, again: Value) -> list[Value]:
        return [again, old, again]

    def body(inner: Builder, old: Value, again: Value) -> list[Value]:
        new = inner.op(kind, old, value)
        found = inner.op("atomic", memory, *indices, old, new, kind="cas", scope=scope, order="relaxed")
        return [found, inner.op("ne", _bits(inner, found), _bits(inner, old))]

    start = (first, b.const(True, bool_))
    types, names = [v.type for v in start], ["old", "again"]
    regions = b.region(types, names, test), b.region(types, names, body)
    b.append(Op("while", start, tuple(Value(t) for t in types), regions=regions, span=b.span))


def _bits(b: Builder, value: Value) -> Value:
    dtype: DType = dtype_of(value.type)
    return b.bitcast(value, u64 if dtype.bits == 64 else u32) if dtype.is_float else value
