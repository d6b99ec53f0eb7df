"""Lanes of vecs -> SPIR-V: gathers, scatters, masked accesses, masks as bits, rearrangements, folds.

In: the writer of a kernel's function and an op of `ir.ops_lanes`; out: the parts of its results. There are no instructions for accesses of each lane's
own: they are made one after the other, each under its own condition.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.codegen.spirv.emitter import KernelText, Parts, width_of
from tilewright.codegen.spirv.ops import HANDLERS, Handler
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Scalar, Tensor, Vec, dtype_of


def _places(w: KernelText, op: Op, width: int) -> list[str]:
    """Each lane's element."""
    memory = op.operands[0]
    assert isinstance(memory.type, Tensor)
    indices = op.operands[1 : 1 + memory.type.rank]
    apart = [w.lanes(w.names[v], v.type) if isinstance(v.type, Vec) else [w.names[v][0]] * width for v in indices]
    return [w.offset(memory, [one[lane] for one in apart]) for lane in range(width)]


def _neighbours(w: KernelText, op: Op, width: int) -> list[str]:
    memory = op.operands[0]
    assert isinstance(memory.type, Tensor)
    first = w.offset(memory, [w.names[v][0] for v in op.operands[1 : 1 + memory.type.rank]])
    return [w.moved(first, lane) for lane in range(width)]


def _read(w: KernelText, op: Op) -> Sequence[Parts]:
    result, memory = op.result.type, op.operands[0]
    assert isinstance(result, Vec)
    whole = _is_true(w, op.operands[-1])
    if op.opcode == "load_lanes" and whole:
        assert isinstance(memory.type, Tensor)
        first = w.offset(memory, [w.names[v][0] for v in op.operands[1 : 1 + memory.type.rank]])
        return [w.read(memory, first, result, aligned=False)]
    places = (_places if op.opcode == "gather" else _neighbours)(w, op, result.width)
    single = Scalar(result.dtype)
    if whole:
        return [w.packed([w.read(memory, place, single)[0] for place in places], result)]
    masks = w.lanes(w.names[op.operands[-1]], op.operands[-1].type)
    zero = w.splat(0, single)
    found = [w.choose(mask, lambda at=place: [w.read(memory, at, single)], lambda: [zero], [single])[0][0] for mask, place in zip(masks, places, strict=True)]  # type: ignore[misc]
    return [w.packed(found, result)]


def _write(w: KernelText, op: Op) -> Sequence[Parts]:
    memory, value = op.operands[0], op.operands[-2]
    assert isinstance(value.type, Vec)
    single, whole = Scalar(value.type.dtype), _is_true(w, op.operands[-1])
    if op.opcode == "store_lanes" and whole:
        assert isinstance(memory.type, Tensor)
        first = w.offset(memory, [w.names[v][0] for v in op.operands[1 : 1 + memory.type.rank]])
        w.put(memory, first, w.names[value], value.type, aligned=False)
        return []
    places = (_places if op.opcode == "scatter" else _neighbours)(w, op, value.type.width)
    masks = w.lanes(w.names[op.operands[-1]], op.operands[-1].type)

    def put(place: str, one: str) -> Sequence[Parts]:
        w.put(memory, place, (one,), single)
        return []

    for mask, place, one in zip(masks, places, w.lanes(w.names[value], value.type), strict=True):
        if whole:
            put(place, one)
        else:
            w.choose(mask, lambda at=place, v=one: put(at, v), list, [])  # type: ignore[misc]
    return []


def _is_true(w: KernelText, mask: Value) -> bool:
    """Whether a mask is known to hold in all lanes."""
    return all(part == w.module.constant("bool", True, width) for part, width in zip(w.names[mask], w.widths(mask.type), strict=True))


def _lane_ids(w: KernelText, op: Op) -> Sequence[Parts]:
    type_ = op.result.type
    return [w.packed([w.const(dtype_of(type_), lane) for lane in range(width_of(type_))], type_)]


def _mask_bits(w: KernelText, op: Op) -> Sequence[Parts]:
    dtype = dtype_of(op.result.type)
    kind, total = w.type(dtype), ""
    for lane, bit in enumerate(w.lanes(w.names[op.operands[0]], op.operands[0].type)):
        one = w.let("OpSelect", kind, bit, w.const(dtype, 1 << lane), w.const(dtype, 0))
        total = w.let("OpBitwiseOr", kind, total, one) if total else one
    return [(total,)]


def _rearrange(w: KernelText, op: Op) -> Sequence[Parts]:
    lanes = op.attrs["lanes"]
    assert isinstance(lanes, tuple)
    given: list[str] = []
    for value in op.operands:
        given += w.lanes(w.names[value], value.type)
    return [w.packed([given[lane] for lane in lanes if isinstance(lane, int)], op.result.type)]


def _insert(w: KernelText, op: Op) -> Sequence[Parts]:
    lanes, lane = w.lanes(w.names[op.operands[0]], op.operands[0].type), op.attrs["lane"]
    assert isinstance(lane, int)
    lanes[lane] = w.names[op.operands[1]][0]
    return [w.packed(lanes, op.result.type)]


def _fold(w: KernelText, op: Op) -> Sequence[Parts]:
    """Halves are combined until one lane is left."""
    whole = op.operands[0].type
    assert isinstance(whole, Vec)
    value, width = w.names[op.operands[0]], whole.width
    while width > 1:
        lanes, half = w.lanes(value, Vec(whole.dtype, width)), width // 2
        type_ = Vec(whole.dtype, half) if half > 1 else Scalar(whole.dtype)
        a, b = Value(type_), Value(type_)
        w.names[a], w.names[b] = w.packed(lanes[:half], type_), w.packed(lanes[half:], type_)
        (value,) = HANDLERS[str(op.attrs["kind"])](w, Op(str(op.attrs["kind"]), (a, b), (Value(type_),), span=op.span))
        width = half
    return [value]


def _dot_lanes(w: KernelText, op: Op) -> Sequence[Parts]:
    """Four products of bytes are added to each lane of the sums: those of neighbours."""
    sums, octets = op.operands[0].type, op.operands[1].type
    word = w.module.type("i32")
    a, b = ([w.let("OpSConvert", word, one) for one in w.lanes(w.names[v], octets)] for v in op.operands[1:3])
    totals = w.lanes(w.names[op.operands[0]], sums)
    for k, (x, y) in enumerate(zip(a, b, strict=True)):
        totals[k // 4] = w.let("OpIAdd", word, totals[k // 4], w.let("OpIMul", word, x, y))
    return [w.packed(totals, sums)]


LANES: dict[str, Handler] = {
    "gather": _read, "load_lanes": _read, "scatter": _write, "store_lanes": _write, "lane_ids": _lane_ids, "mask_bits": _mask_bits,
    "rearrange": _rearrange, "insert": _insert, "fold": _fold, "dot_lanes": _dot_lanes,
}  # fmt: skip
