"""Which sizes of a kernel make better code on a CPU when they are numbers: those of short sums, and of short axes beside them.

In: the calls of a prepared program, and the extents of a call that are small. Out: `small_sums`, the sizes that sums run over, kernel by kernel; `fixed_sizes`,
those that become numbers for the call. Code for any extents walks such sums term by term, since nothing says how far apart neighbours lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tilewright.analysis.affine import Forms, analyse
from tilewright.analysis.loop_nest import Nest, nest_of
from tilewright.base.artifact import SMALL_EXTENT
from tilewright.ir.nodes import Kernel, Value, is_watched, walk
from tilewright.ir.program import KernelCall


def small_sums(calls: Iterable[KernelCall]) -> tuple[tuple[frozenset[str], frozenset[str]], ...]:
    """For each kernel that gains: the sizes that its sums and sweeps run over, all of which have to be small, and those of the loops around."""
    found = [(names, _around(call.kernel)) for call in calls if not call.varies and (names := _lengths(call.kernel))]
    return tuple(dict.fromkeys(found))


def fixed_sizes(calls: Iterable[KernelCall], extents: Mapping[str, int]) -> dict[str, int]:
    """Sizes that become numbers where these extents are small: of sums, and of other loops around the same sums."""
    small = {name: extent for name, extent in extents.items() if 1 <= extent <= SMALL_EXTENT}
    found: dict[str, int] = {}
    for sums, around in small_sums(calls):
        if sums <= small.keys():
            found |= {name: small[name] for name in (sums | around) & small.keys()}
    return found


def _around(kernel: Kernel) -> frozenset[str]:
    return frozenset(extent.name for extent in nest_of(kernel).extents if extent.name is not None)


def _lengths(kernel: Kernel) -> frozenset[str]:
    """The sizes over which all reductions and sweeps of a kernel run; of a sum over several indices those of its window, if it has one. Nothing where one runs
    over something else, or over numbers alone."""
    if kernel.attrs.keys() & {"blocks", "in_order", "dots"} or is_watched(kernel):
        return frozenset()
    nest, forms = nest_of(kernel), analyse(kernel)
    if not nest.extents or not nest.reductions:
        return frozenset()
    sliding = _sliding(nest, forms)
    names: set[str] = set()
    for op in walk(nest.parallel.regions[0]):
        if op.opcode in ("while", "atomic", "accumulate") or str(op.attrs.get("kind", "")).startswith("arg"):
            return frozenset()
        bounds = op.operands if op.opcode == "reduce" else op.operands[1:2] if op.opcode == "for" else ()
        if op.opcode == "reduce" and len(bounds) > 1:
            own = [bound for bound, arg in zip(op.operands, op.regions[0].args, strict=True) if arg in sliding]
            bounds = tuple(own) or bounds
        for bound in bounds:
            form = forms.get(bound)
            if form is None or form.factors:
                return frozenset()
            names |= form.constant.names
    return frozenset(names)


def _sliding(nest: Nest, forms: Forms) -> set[Value]:
    """Indices of sums that are added to those of results where something is read: the indices of a window."""
    own = set(nest.parallel.regions[0].args)
    sums = {k for op in nest.reductions for k in op.regions[0].args}
    loads = [op for op in walk(nest.parallel.regions[0]) if op.opcode == "load"]
    subscripts = [set(forms[v].values) for op in loads for v in op.operands[1:] if v in forms]
    return {k for used in subscripts if used & own for k in used & sums}
