"""The sums that `sums_of_blocks` marked, with what they read. In: a region at the loop stage; out: one `PackedSum` for each."""

from __future__ import annotations

from tilewright.base.dtypes import f32, i8, u8
from tilewright.base.record import record
from tilewright.ir.nodes import Block, Op, Value, walk
from tilewright.ir.types import Tensor


@record(identity=True)
class PackedSum:
    """A sum over all blocks of a row of weights times a row of activations."""

    op: Op
    format: str
    weights: Value
    numbers: Value
    scale: Value
    sums: Value | None
    rows: tuple[Value, ...]
    """Indices of the row of weights."""
    columns: tuple[Value, ...]
    """Indices of the row of activations."""


def packed_sums(region: Block) -> list[PackedSum]:
    """The sums among a region's own ops."""
    found = [_packed_sum(op) for op in region.ops if op.opcode == "reduce" and "packed" in op.attrs]
    return [one for one in found if one is not None]


def _packed_sum(op: Op) -> PackedSum | None:
    (region,) = op.regions
    loads = [inner for inner in walk(region) if inner.opcode == "load"]
    tensors: dict[str, Value] = {}
    places: dict[str, tuple[Value, ...]] = {}
    for load in loads:
        memory = load.operands[0]
        assert isinstance(memory.type, Tensor)
        kind = "weights" if memory.type.dtype is u8 else "numbers" if memory.type.dtype is i8 else "scale" if memory.type.dtype is f32 else "sums"
        lead = load.operands[1:-1] if kind != "scale" else load.operands[1:]
        if tensors.setdefault(kind, memory) is not memory or places.setdefault(kind, lead) != lead or not lead or lead[-1] is not region.args[0]:
            return None
    if not {"weights", "numbers", "scale"} <= tensors.keys() or len({places[k] for k in places if k != "weights"}) != 1:
        return None
    return PackedSum(
        op, str(op.attrs["packed"]), tensors["weights"], tensors["numbers"], tensors["scale"], tensors.get("sums"), places["weights"][:-1], places["numbers"][:-1],
    )  # fmt: skip
