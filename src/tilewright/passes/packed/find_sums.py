"""Sums over rows of packed weights times activations, with what they read. In: a region at the loop stage; out: one `PackedSum` for each.

Those with rounded activations are marked by `sums_of_blocks`. Those with activations as they are, are found by the element of the weights, which
`unpack_blocks` marks, in loops over blocks and places as `split_blocks` writes them.
"""

from __future__ import annotations

from math import prod

from tilewright.analysis.affine import Forms
from tilewright.base.dtypes import by_name, f32, i8, u8
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size
from tilewright.ir.nodes import Block, Op, Value, walk
from tilewright.ir.types import Scalar, Tensor, dtype_of
from tilewright.passes.packed.elements import radices


@record(identity=True)
class PackedSum:
    """A sum over all blocks of a row of weights times a row of activations."""

    op: Op
    format: str
    weights: Value
    numbers: Value
    scale: Value | None
    """None where activations are not rounded."""
    sums: Value | None
    rows: tuple[Value, ...]
    """Indices of the row of weights."""
    columns: tuple[Value, ...]
    """Indices of the row of activations."""


def packed_sums(region: Block, forms: Forms) -> list[PackedSum]:
    """The sums among a region's own ops."""
    reductions = [op for op in region.ops if op.opcode == "reduce"]
    found = [_packed_sum(op) if "packed" in op.attrs else _plain_sum(op, forms) for op in reductions]
    return [one for one in found if one is not None]


def _plain_sum(op: Op, forms: Forms) -> PackedSum | None:
    """A sum of elements times floats, none of which is rounded."""
    (region,) = op.regions
    made = {result: inner for inner in region.ops for result in inner.results}
    product = made.get(region.yields[0]) if len(region.yields) == 1 else None
    if op.attrs.get("kind") != "add" or product is None or product.opcode != "mul" or op.results[0].type != Scalar(f32):
        return None
    sides = [made.get(v) for v in product.operands]
    sides = [made.get(s.operands[0]) if s is not None and s.opcode == "cast" and "packed" not in s.attrs else s for s in sides]
    element = next((s for s in sides if s is not None and "packed" in s.attrs), None)
    load = next((s for s in sides if s is not None and s.opcode == "load"), None)
    if element is None or load is None:
        return None
    dtype = by_name(str(element.attrs["packed"]))
    bytes_ = [inner for inner in region.ops if inner.opcode == "load" and inner is not load]
    weights = bytes_[0].operands[0] if bytes_ else None
    if dtype.scale or weights is None or not isinstance(weights.type, Tensor) or weights.type.dtype is not u8 or dtype_of(load.operands[0].type).bits > 32:
        return None
    rows = bytes_[0].operands[1:-2]
    if any(one.operands[0] is not weights or one.operands[1:-2] != rows or one.operands[-2] is not region.args[0] for one in bytes_):
        return None
    digits = radices(dtype)
    extents = [forms[v] for v in op.operands]
    if len(extents) != len(digits) + 1 or any(form.factors for form in extents):
        return None
    if [form.constant for form in extents] != [weights.type.shape[-2], *map(Size.of, digits)]:
        return None
    steps = [prod(digits[at:]) for at in range(len(digits) + 1)]
    place = forms[load.operands[-1]]
    if place.constant != Size.of(0) or len(place.factors) != len(steps) or any(place.factor(arg) != Size.of(step) for arg, step in zip(region.args, steps, strict=True)):
        return None
    inside = {result for inner in region.ops for result in inner.results} | set(region.args)
    columns = load.operands[1:-1]
    x = load.operands[0].type
    if any(v in inside for v in (*rows, *columns)) or not isinstance(x, Tensor) or not x.dtype.is_float or x.strides[-1] != ONE:
        return None
    return PackedSum(op, dtype.name, weights, load.operands[0], None, None, rows, columns)


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
