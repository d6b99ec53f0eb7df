"""Which sizes of a kernel make better code on a CPU when they are numbers: those of short sums, of short axes beside them, and a product's single row.

In: the calls of a prepared program, and the extents of a call that are small. Out: `small_sums`, the sizes that sums run over, kernel by kernel; `fixed_sizes`,
those that become numbers for the call. Code for any extents walks such sums term by term, since nothing says how far apart neighbours lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tilewright.analysis.affine import Forms, analyse
from tilewright.analysis.contraction import find_contraction
from tilewright.analysis.loop_nest import Nest, inner_sums, nest_of
from tilewright.base.artifact import SMALL_EXTENT
from tilewright.ir.nodes import Kernel, Value, is_watched, walk
from tilewright.ir.program import KernelCall
from tilewright.passes.choose.cpu.contraction import ACCUMULATORS


def small_sums(calls: Iterable[KernelCall]) -> tuple[tuple[frozenset[str], frozenset[str], int], ...]:
    """For each kernel that gains: the sizes that its sums and sweeps run over, all of which have to be small, those of the loops around, and how small they have
    to be. A product has its rows and its columns, too: where there is one, it is a matrix times a vector."""
    fixed = [call for call in calls if not call.varies]
    found = [(names, _around(call.kernel), SMALL_EXTENT) for call in fixed if (names := _lengths(call.kernel) or _narrowed(call.kernel))]
    found += [(frozenset((name,)), frozenset[str](), 1) for call in fixed for name in _sides(call.kernel)]
    return tuple(dict.fromkeys(found))


def waiting_sizes(kernel: Kernel) -> tuple[str, ...]:
    """The sizes whose numbers a kernel waits for, to be cut into phases (`passes/windows/split_phases.py`)."""
    names = kernel.attrs.get("waits", ())
    assert isinstance(names, tuple)
    return tuple(map(str, names))


def _sides(kernel: Kernel) -> tuple[str, ...]:
    """The sizes that alone say how many rows a product has, and how many columns."""
    found = None if is_watched(kernel) else find_contraction(kernel)
    if found is None or found.batch or found.accumulator not in ACCUMULATORS:
        return ()
    extents = [found.extents[side[0]] for side in (found.m, found.n) if len(side) == 1]
    return tuple(extent.name for extent in extents if extent.name is not None)


def fixed_sizes(calls: Iterable[KernelCall], extents: Mapping[str, int]) -> dict[str, int]:
    """Sizes that become numbers where these extents are small: of sums, and of other loops around the same sums."""
    small = {name: extent for name, extent in extents.items() if 1 <= extent <= SMALL_EXTENT}
    found: dict[str, int] = {}
    for sums, around, most in small_sums(calls):
        if all(small.get(name, most + 1) <= most for name in sums):
            found |= {name: small[name] for name in (sums | around) & small.keys()}
    return found


def _around(kernel: Kernel) -> frozenset[str]:
    return frozenset(extent.name for extent in nest_of(kernel).extents if extent.name is not None) | _narrowed(kernel)


def _narrowed(kernel: Kernel) -> frozenset[str]:
    """The extents of axes that windows walk in part, of which the strides of weights are made."""
    names = kernel.attrs.get("narrowed", ())
    assert isinstance(names, tuple)
    return frozenset(map(str, names))


def _lengths(kernel: Kernel) -> frozenset[str]:
    """The sizes over which all reductions and sweeps of a kernel run; of a sum over several indices those of its window, if it has one. Nothing where one runs
    over something else, or over numbers alone."""
    if kernel.attrs.keys() & {"blocks", "in_order", "dots"} or is_watched(kernel):
        return frozenset()
    if waiting_sizes(kernel):
        return frozenset(waiting_sizes(kernel))
    nest, forms = nest_of(kernel), analyse(kernel)
    inner = _inner_lengths(nest, forms)
    if inner:
        return inner
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


def _inner_lengths(nest: Nest, forms: Forms) -> frozenset[str]:
    """The sizes that alone say how long sums inside of loops and of other reductions are: of a point's distances to all others, say."""
    names: set[str] = set()
    for op in inner_sums(nest):
        lengths = [forms[bound] for bound in op.operands if bound in forms]
        if len(lengths) != len(op.operands) or any(form.factors or form.constant.name is None for form in lengths):
            return frozenset()
        names |= {str(form.constant.name) for form in lengths}
    return frozenset(names)


def _sliding(nest: Nest, forms: Forms) -> set[Value]:
    """Indices of sums that are added to those of results where something is read: the indices of a window."""
    own = set(nest.parallel.regions[0].args)
    sums = {k for op in nest.reductions for k in op.regions[0].args}
    loads = [op for op in walk(nest.parallel.regions[0]) if op.opcode == "load"]
    subscripts = [set(forms[v].values) for op in loads for v in op.operands[1:] if v in forms]
    return {k for used in subscripts if used & own for k in used & sums}
