"""Schedules for results that read windows, which overlap or lie near each other: stencils, depthwise convolutions, poolings. GPUs only.

In: a loop-stage kernel and what the model knows of it. Out: a `Schedule` with `window` set, or None for other nests. A thread gets a
vector of neighbouring results along the axis that walks memory and a few along another one that slides, so that what their windows share
is loaded once; lanes go along memory first, then along the other sliding indices, for neighbours in the same block share cache lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import gcd, inf, prod

from tilewright.analysis import divisors
from tilewright.analysis.affine import Affine, Forms, address, analyse
from tilewright.analysis.loop_nest import Nest, can_repeat, nest_of
from tilewright.base.cost_model import MapCosts
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, Op, Value, is_watched, walk
from tilewright.passes.choose.loops import hint, power_of_two
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.windows.window_terms import sliding_along

STEPS = (1, 2, 4)
"""Elements between the windows of neighbouring results: what a vector of results reads is whole vectors then."""
MOST_TERMS = 49
"""Windows of more terms that are reduced axis by axis have fewer in all."""
LONGEST = 64
"""Terms of a window along one axis; longer sums are not windows."""
BESIDE = 16
"""Elements from one window to the next, at most, where they do not overlap: lanes further apart share no lines of the cache."""
LONGEST_SIZE = 32
"""The same of a window whose size is an extent of an array: code is made for each."""
LARGEST = 1024
"""Terms of a window."""
ALONG = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Results that a thread may have along the index it walks itself."""


def window_schedule(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> Schedule | None:
    """The schedule, where results read windows near each other."""
    if not target.has_warps:
        return None
    nest, costs = nest_of(kernel), target.costs.maps
    slides = _sliding(kernel, nest)
    axis = _written_along(kernel, nest)
    if not slides or axis < 0 or not can_repeat(kernel):
        return None
    rank, terms = len(nest.extents), _terms(kernel)
    vector = _vector(kernel, nest, axis, max(1, min(costs.window_widest, target.vector_bytes // nest.narrowest)))
    sizes = [hint(extent, hints) for extent in nest.extents]
    extents = [power_of_two(size) for size in sizes]
    tiles = [1] * rank
    along = next((p for p in range(rank) if p in slides and p != axis and extents[p] > 1), -1)
    rows, written, masked = 1, LARGEST, False
    if terms > costs.window_few_terms:
        beside = [p for p in reversed(range(rank)) if p in slides and p != axis and extents[p] > 1] or [_shared_along(kernel, nest, axis, extents)]
        _, along, vector, rows, written = min((_large_window(kernel, nest, target, (axis, p), vector, sizes) for p in beside), key=lambda found: found[0])
        masked = True
    elif along >= 0:
        # Windows further apart share less: a few of them are enough loads on their way.
        rows = max(2, min(costs.window_results // vector, costs.window_along // _step(kernel, nest, along), extents[along] // 4))
    elif nest.reductions and prod(sizes) >= costs.window_spread * target.multiprocessors * costs.window_busy:
        # Results that share nothing: more loads are on their way.
        along = next((p for p in reversed(range(rank)) if p != axis and extents[p] >= 2 * costs.window_spread), -1)
        rows = max(1, costs.window_spread // vector)
        masked = True
    if along >= 0:
        tiles[along] = rows
    others = sorted((p for p in range(rank) if p not in (axis, along)), key=lambda p: (p not in slides, -p))
    most = costs.window_lanes if any(p in slides for p in others) else target.warp_size
    threads = left = costs.window_threads
    lanes = min(most, max(1, extents[axis] // vector))
    if terms > costs.window_few_terms:
        lanes = min(_powers(lanes)[-3:], key=lambda n: _idle(sizes[axis], n * vector) * (1 + costs.window_segment / n))
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
    along = along if rows > 1 else -1
    return Schedule(
        tuple(tiles), 1, vector, vector_index=axis, threads=threads // left, window=True, along=along, written=written, masked=masked and along >= 0
    )


def window_sizes(kernel: Kernel, target: Target, extents: Mapping[str, int]) -> dict[str, int]:
    """Sizes of windows that become numbers: those over which all indices of a sum slide along results, as they do in a depthwise convolution."""
    if not target.has_warps or "reduce" not in kernel.opcodes or is_watched(kernel):
        return {}
    nest, forms = nest_of(kernel), analyse(kernel)
    found: dict[str, int] = {}
    for op in nest.reductions:
        slides = {sliding_along(op, index, forms) for index in nest.parallel.regions[0].args}
        names = {forms[v].constant.name for v in op.operands if v in forms and not forms[v].factors} - {None}
        if slides - {-1} == set(range(len(op.operands))):
            found |= {name: extents[name] for name in names if name is not None and 1 <= extents.get(name, 0) <= LONGEST_SIZE}
    return found


def _idle(size: int, tile: int) -> float:
    """How much more is computed by whole tiles than there is, on average of sizes between a half and all of this one: calls of similar sizes share code."""
    return 1 + (tile - 1) / (1.5 * size)


def _shared_along(kernel: Kernel, nest: Nest, axis: int, extents: Sequence[int]) -> int:
    """The parallel index, nearest to memory's, along which results read something in common, such as weights; -1 for none."""
    forms = analyse(kernel)
    loads = [address(op, forms) for op in walk(kernel.body) if op.opcode == "load"]
    indices = nest.parallel.regions[0].args
    return next((p for p in reversed(range(len(indices))) if p != axis and extents[p] > 1 and any(load.factor(indices[p]) == ZERO for load in loads)), -1)


def _large_window(
    kernel: Kernel, nest: Nest, target: Target, axes: tuple[int, int], widest: int, sizes: Sequence[int]
) -> tuple[float, int, int, int, int]:  # fmt: skip
    """The choice with the least work for a result: its instructions, the index that a thread walks itself, its results along memory and along that index, and how many
    terms are written out."""
    costs, (_, along) = target.costs.maps, axes
    windows = [WindowWork(kernel, nest, op, axes) for op in nest.reductions]
    best, chosen = inf, (along, 1, 1, 1)
    for vector, rows in product(_powers(widest), ALONG if along >= 0 else (1,)):
        length = sizes[along] if along >= 0 else 1
        if rows > length:
            continue
        idle = _idle(length, rows)
        busy = min(1.0, prod(sizes) / (vector * rows * target.multiprocessors * costs.window_busy))
        for written in sorted({n for w in windows for n in w.written()}):
            work = sum(w.instructions(vector, rows, written, costs) for w in windows) / (vector * rows) * idle / busy
            if work < best:
                best, chosen = work, (along, vector, rows, written)
    return (best, *chosen)


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]


class WindowWork:
    """What a thread does for a window of each of its results, which lie side by side along memory's axis and along an index that it walks itself."""

    def __init__(self, kernel: Kernel, nest: Nest, op: Op, axes: tuple[int, int]) -> None:
        forms, indices = analyse(kernel), nest.parallel.regions[0].args
        own = [indices[p] if p >= 0 else None for p in axes]
        self.turns = [_iterations(forms.get(v)) for v in op.operands]
        self.slides = [Slide(op, index, forms) for index in own]
        """How the window slides along either."""
        places = [{v for place in load.operands[1:] if place in forms for v in forms[place].values} for load in walk(op.regions[0]) if load.opcode == "load"]
        self.loads = [WindowLoad({d for d, arg in enumerate(op.regions[0].args) if arg in used}, [index in used for index in own]) for used in places]
        last = self.slides[1].position
        self.order = [*(d for d in range(len(self.turns)) if d != last), *([last] if last >= 0 else [])]
        """The order of the sum's indices, as `order_sums` makes it."""

    def written(self) -> list[int]:
        """How many terms are written out, for each number of loops around them."""
        return [prod(self.turns[d] for d in self.order[outer:]) for outer in range(len(self.order))]

    def instructions(self, vector: int, rows: int, written: int, costs: MapCosts) -> float:
        """Those of a thread for all its results; infinitely many where they are too many to write out, or need too many registers."""
        inner = [d for n, d in enumerate(self.order) if prod(self.turns[i] for i in self.order[n:]) <= written]
        turns = [t if d in inner else 1 for d, t in enumerate(self.turns)]
        terms, last = prod(turns), self.slides[1].position
        held = vector * rows
        total = float(terms * vector * rows)
        for load in self.loads:
            across, down = load.moves
            # At a time a thread needs what the last index of the sum reaches.
            span = self.slides[1].elements(rows, turns) if down else turns[last] if last in load.uses else 1
            held += (vector if across else 1) * span
            elements = self._elements(load, (vector, rows), turns)
            # Elements side by side are loaded as vectors: those of several neighbouring windows are a few more than theirs.
            slides, position = self.slides[0].position in load.uses, self.slides[0].position
            length = self.slides[0].elements(vector, turns) if slides else vector
            begins_anywhere = slides and turns[position] < self.turns[position]
            wide = length / (length / vector + (length > vector)) if across and vector > 1 and not begins_anywhere else 1
            total += elements / wide * (costs.window_element if down else costs.window_weight)
        if total > costs.window_written or held > costs.window_registers:
            return inf
        loops = prod(self.turns) // terms
        return total * (1 + costs.window_fetched * total) * loops + (costs.window_turn * loops if loops > 1 else 0)

    def _elements(self, load: WindowLoad, results: tuple[int, int], turns: Sequence[int]) -> int:
        """Elements that a load reads for that many results along either index."""
        count, left = 1, set(load.uses)
        for slide, number, moves in zip(self.slides, results, load.moves, strict=True):
            if moves and slide.position in left:
                left.discard(slide.position)
                count *= slide.elements(number, turns)
            elif moves:
                count *= number
        return count * prod(turns[d] for d in left)


@record
class WindowLoad:
    """A load of a window's term: the sum's indices that its place depends on, and whether it depends on either index of the results."""

    uses: set[int]
    moves: list[bool]


class Slide:
    """How a window slides along an index of results."""

    def __init__(self, op: Op, own: Value | None, forms: Forms) -> None:
        self.position = -1 if own is None else sliding_along(op, own, forms)
        """Which index of the sum is added to it; -1 for none."""
        self.step = self.gap = 1
        if own is not None and self.position >= 0:
            arg = op.regions[0].args[self.position]
            form = next(forms[v] for load in walk(op.regions[0]) if load.opcode == "load" for v in load.operands[1:] if v in forms and {own, arg} <= set(forms[v].values))
            self.step, self.gap = (form.factor(v).constant or 1 for v in (own, arg))

    def elements(self, results: int, turns: Sequence[int]) -> int:
        """Elements that so many neighbouring results read."""
        terms = turns[self.position] if self.position >= 0 else 1
        return len({self.step * r + self.gap * k for r in range(results) for k in range(terms)})


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
    """The parallel indices along which results read windows, or neighbouring results the same elements; none where the body has more than short sums."""
    forms = analyse(kernel)
    body = nest.parallel.regions[0]
    inner: dict[Value, int] = {}
    for op in walk(body):
        if op.opcode in ("for", "while", "parallel", "atomic", "accumulate") or (op.opcode == "reduce" and op not in nest.reductions):
            return frozenset()
        if op.opcode == "reduce":
            iterations = [_iterations(forms.get(v)) for v in op.operands]
            if not iterations or prod(iterations) > LARGEST or 0 in iterations:
                return frozenset()
            inner.update(zip(op.regions[0].args, iterations, strict=True))
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
            found.update(p for p, index in enumerate(body.args) if _reads_window(form, index, inner))
    return frozenset(found)


def _reads_window(form: Affine, index: Value, inner: Mapping[Value, int]) -> bool:
    """Whether results along an index read windows: those of neighbours overlap, lie side by side, or a little apart."""
    step = form.factor(index).constant
    reach = max(((inner[v] - 1) * (form.factor(v).constant or 0) for v in form.values if v in inner), default=0)
    return step is not None and reach > 0 and 0 < step <= max(reach, BESIDE)


def _step(kernel: Kernel, nest: Nest, position: int) -> int:
    """How far apart along their own axis neighbouring results read."""
    forms, index = analyse(kernel), nest.parallel.regions[0].args[position]
    steps = [forms[v].factor(index).constant for op in walk(nest.parallel.regions[0]) if op.opcode == "load" for v in op.operands[1:] if v in forms]
    return max((step for step in steps if step and 0 < step <= LONGEST), default=1)


def _terms(kernel: Kernel) -> int:
    forms = analyse(kernel)
    return sum(prod(_iterations(forms.get(v)) for v in op.operands) for op in walk(kernel.body) if op.opcode == "reduce")


def _iterations(form: Affine | None) -> int:
    """How often a loop of that extent runs, 0 where only a call can say."""
    constant = form.constant.constant if form is not None and not form.factors else None
    return constant if constant is not None and constant <= LONGEST else 0
