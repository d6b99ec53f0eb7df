"""Schedules for results that read overlapping windows: stencils, depthwise convolutions, poolings. GPUs only.

In: a loop-stage kernel and what the model knows of it. Out: a `Schedule` with `window` set, or None for other nests. A thread gets a
vector of neighbouring results along the axis that walks memory and a few along another one that slides, so that what their windows share
is loaded once; lanes go along memory first, then along the other sliding indices, for neighbours in the same block share cache lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, prod

from tilewright.analysis import divisors
from tilewright.analysis.affine import Affine, address, analyse
from tilewright.analysis.loop_nest import Nest, can_repeat, nest_of
from tilewright.base.sizes import ONE
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, Value, walk
from tilewright.passes.choose.loops import hint, power_of_two
from tilewright.passes.schedules.loops import Schedule

STEPS = (1, 2, 4)
"""Elements between the windows of neighbouring results: what a vector of results reads is whole vectors then."""
MOST_TERMS = 49
"""Longer sums are not written out for every result."""


def window_schedule(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> Schedule | None:
    """The schedule, where windows overlap."""
    if not target.has_warps:
        return None
    nest, costs = nest_of(kernel), target.costs.maps
    slides = _sliding(kernel, nest)
    axis = _written_along(kernel, nest)
    if not slides or axis < 0 or not can_repeat(kernel):
        return None
    rank = len(nest.extents)
    most = costs.window_results // (1 if _terms(kernel) <= costs.window_few_terms else 2)
    vector = _vector(kernel, nest, axis, max(1, min(costs.window_widest, target.vector_bytes // nest.narrowest)))
    extents = [power_of_two(hint(extent, hints)) for extent in nest.extents]
    tiles = [1] * rank
    along = next((p for p in range(rank) if p in slides and p != axis and extents[p] > 1), -1)
    if along >= 0:
        # Windows further apart share less: a few of them are enough loads on their way.
        tiles[along] = max(2, min(most // vector, costs.window_along // _step(kernel, nest, along), extents[along] // 4))
    others = sorted((p for p in range(rank) if p not in (axis, along)), key=lambda p: (p not in slides, -p))
    beside = costs.window_lanes if any(p in slides for p in others) else target.warp_size
    threads = left = costs.window_threads
    lanes = min(beside, max(1, extents[axis] // vector))
    tiles[axis] = lanes * vector
    left //= lanes
    for p in others:
        tiles[p] = min(left, extents[p])
        left //= tiles[p]
    more = min(left, max(1, extents[axis] // tiles[axis]))
    tiles[axis] *= more
    left //= more
    if threads // left < target.warp_size:
        tiles[axis] *= target.warp_size * left // threads  # a warp has no lanes to spare
        left = threads // target.warp_size
    return Schedule(
        tuple(tiles), 1, vector, vector_index=axis, threads=threads // left, window=True, along=along if tiles[along] > 1 else -1
    )


def _vector(kernel: Kernel, nest: Nest, axis: int, widest: int) -> int:
    """The widest vector in whose steps every array is written, so that a vector is wholly inside or outside."""
    forms = analyse(kernel)
    index = nest.parallel.regions[0].args[axis]
    known = divisors.of_size(nest.extents[axis], kernel.facts)
    for op in walk(kernel.body):
        if op.opcode == "store":
            place = address(op, forms)
            if place.factor(index) != ONE:
                return 1
            for value, factor in place.factors:
                known = known if value is index else gcd(known, divisors.of_size(factor, kernel.facts))
            known = gcd(known, divisors.of_size(place.constant, kernel.facts))
        elif op.opcode == "load" and address(op, forms).factor(index).constant not in (0, *STEPS, None):
            return 1  # neighbouring results read places that are far apart
    while widest > 1 and known % widest:
        widest //= 2
    return widest


def _written_along(kernel: Kernel, nest: Nest) -> int:
    """The parallel index along which all arrays are written one element after another; -1 for none."""
    forms = analyse(kernel)
    places = [address(op, forms) for op in walk(kernel.body) if op.opcode == "store"]
    indices = nest.parallel.regions[0].args
    return next((p for p in reversed(range(len(indices))) if all(place.factor(indices[p]) == ONE for place in places)), -1)


def _sliding(kernel: Kernel, nest: Nest) -> frozenset[int]:
    """The parallel indices along which neighbouring results read the same elements; none where the body has more than short sums."""
    forms = analyse(kernel)
    body = nest.parallel.regions[0]
    inner: set[Value] = set()
    for op in walk(body):
        if op.opcode in ("for", "while", "parallel", "atomic", "accumulate") or (op.opcode == "reduce" and op not in nest.reductions):
            return frozenset()
        if op.opcode == "reduce":
            iterations = [_iterations(forms.get(v)) for v in op.operands]
            if not iterations or prod(iterations) > MOST_TERMS or 0 in iterations:
                return frozenset()
            inner.update(op.regions[0].args)
    found: set[int] = set()
    seen: dict[tuple[Value, int, tuple[tuple[Value, str], ...]], Affine] = {}
    for op in walk(body):
        if op.opcode != "load":
            continue
        for dimension, value in enumerate(op.operands[1:]):
            form = forms[value]
            mine = [p for p, index in enumerate(body.args) if form.factor(index).constant in STEPS]
            key = (op.operands[0], dimension, tuple((v, str(f)) for v, f in form.factors))
            # Elements a symbolic size apart are not neighbours.
            apart = (seen.setdefault(key, form).constant - form.constant).constant
            if apart or any(v in inner for v in form.values):
                found.update(mine)
    return frozenset(found)


def _step(kernel: Kernel, nest: Nest, position: int) -> int:
    """How far apart along their own axis neighbouring results read."""
    forms, index = analyse(kernel), nest.parallel.regions[0].args[position]
    steps = [forms[v].factor(index).constant for op in walk(nest.parallel.regions[0]) if op.opcode == "load" for v in op.operands[1:] if v in forms]
    return max((step for step in steps if step in STEPS), default=1)


def _terms(kernel: Kernel) -> int:
    forms = analyse(kernel)
    return sum(prod(_iterations(forms.get(v)) for v in op.operands) for op in walk(kernel.body) if op.opcode == "reduce")


def _iterations(form: Affine | None) -> int:
    """How often a loop of that extent runs, 0 where only a call can say."""
    constant = form.constant.constant if form is not None and not form.factors else None
    return constant if constant is not None and constant <= MOST_TERMS else 0
