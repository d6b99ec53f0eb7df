"""Kernels that fill an array with one number. In: a kernel at the loop stage; out: the number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.analysis.affine import Forms, analyse
from tilewright.base.sizes import ONE, ZERO, Size, without_clamp
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor


def fill_of(kernel: Kernel) -> Op | None:
    """The constant that a kernel writes to all of its one array, where it does nothing else."""
    nests = [op for op in kernel.body.ops if op.regions]
    if len(nests) != 1 or nests[0].opcode != "parallel" or len(kernel.params) != 1:
        return None
    inside = list(walk(nests[0].regions[0]))
    stores = [op for op in inside if op.opcode == "store"]
    if len(stores) != 1 or stores[0].attrs or any(op.opcode not in ("store", "const", "yield") for op in inside):
        return None
    (nest,), (store,) = nests, stores
    source = next((op for op in walk(kernel.body) if store.operands[-1] in op.results), None)
    extents = dict(zip(nest.regions[0].args, nest.operands, strict=True))
    return source if source is not None and source.opcode == "const" and is_whole(store.operands[:-1], extents, analyse(kernel)) else None


def is_whole(place: Sequence[Value], extents: Mapping[Value, Value], forms: Forms) -> bool:
    """Whether a place, an array and its indices, is each element of the array once, in loops over indices up to `extents`."""
    memory, *places = place
    assert isinstance(memory.type, Tensor)
    return set(places) == set(extents) and len(places) == len(extents) and all(
        _length(forms, extents[place]) == without_clamp(extent) for place, extent in zip(places, memory.type.shape, strict=True)
    )


def loop_extent(op: Op, forms: Forms) -> Value | None:
    """How often a loop runs that counts from 0 by ones."""
    if op.opcode != "for" or op.results or len(op.operands) != 3:
        return None
    low, _, step = (forms.get(v) for v in op.operands)
    counts = low is not None and step is not None and not low.factors and not step.factors and low.constant == ZERO and step.constant == ONE
    return op.operands[1] if counts else None


def _length(forms: Forms, extent: Value) -> Size | None:
    form = forms.get(extent)
    return without_clamp(form.constant) if form is not None and not form.factors else None
