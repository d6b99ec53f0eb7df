"""A stretch of elements on a CPU: single ones up to an aligned address, full tiles, and what is left.

In: where the stretch begins and ends, and what is done with a tile and with an element. Out: tile-stage loops.

    low..high  ->  low..begin one by one, begin..middle in tiles, middle..high one by one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.analysis.affine import address
from tilewright.base.sizes import ONE
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Tensor
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering


def strips(
    b: Builder, low: Value, high: Value, tile: int, head: Value | None, lanes: Sequence[Value],
    singles: Sequence[Value], wide: Callable[..., Sequence[Value]], single: Callable[..., Sequence[Value]],
) -> tuple[tuple[Value, ...], tuple[Value, ...]]:  # fmt: skip
    """Walk low..high on a CPU: elements up to an aligned address, full tiles, the rest.

    `wide(builder, first, *lanes)` does a tile, `single(builder, index, *singles)` an element; each carries its own values.
    Both loops stand in a loop of two turns (head and tiles; rest and nothing), so that each body is there once.
    """
    width, zero, one = b.index(tile), b.index(0), b.index(1)
    length = b.op("max", b.sub(high, low), zero)
    begin = low if head is None else b.add(low, b.op("min", head, length))
    middle = b.add(begin, b.mul(b.op("floordiv", b.sub(b.add(low, length), begin), width), width))
    count = len(lanes)
    if head is None:
        wides = b.for_(low, middle, width, lanes, wide)
        return wides, b.for_(middle, high, one, singles, single)

    def turn(inner: Builder, number: Value, *carried: Value) -> list[Value]:
        last = inner.op("gt", number, zero)
        start, stop = inner.select(last, middle, low), inner.select(last, high, begin)
        alone = inner.for_(start, stop, one, carried[count:], single)
        together = inner.for_(inner.select(last, middle, begin), middle, width, carried[:count], wide)
        return [*together, *alone]

    results = b.for_(zero, b.index(2), one, [*lanes, *singles], turn, name="turn")
    return results[:count], results[count:]


def aligned_head(lowering: NestLowering, b: Builder, ops: Sequence[Op], env: dict[Value, Value], index: Value) -> Value | None:
    """How far the first array walked with stride one along `index` is from an aligned address; stores count first."""
    accesses = [
        op for op in ops
        if op.opcode in ("store", "load") and address(op, lowering.forms).factor(index) == ONE
    ]  # fmt: skip
    chosen = next((op for op in accesses if op.opcode == "store"), accesses[0] if accesses else None)
    if chosen is None or len(ops) > 64:
        return None
    memory = chosen.operands[0].type
    assert isinstance(memory, Tensor)
    local = dict(env)
    for op in ops:
        if op is chosen:
            break
        if op.regions or op.opcode in ("store", "yield") or any(v not in local for v in op.operands):
            continue  # the last: it needs the result of a loop or a branch, which is not repeated here
        with b.at(op.span):
            local.update(zip(op.results, lowering.lower_op(b, op, local, []), strict=True))
    where = [local.get(v) for v in chosen.operands[1 : 1 + memory.rank]]
    if any(v is None for v in where):
        return None
    return b.op("head", local[chosen.operands[0]], *(v for v in where if v is not None), bytes=lowering.target.vector_bytes)
