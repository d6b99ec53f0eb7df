"""Scan on a GPU: every element becomes the combination of all up to it, in one pass over the data (see `lookback`).

In: a `ScanPlan`, whether rows are scanned each by itself. Out: a program of two kernels, which clear the states of the tiles and scan. The data
are one line: rows that follow one another are segments of it. Order is kept, so the function need not be commutative; without a
number that changes nothing, whatever has nothing before it is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.dtypes import bool_, i64
from tilewright.base.record import record
from tilewright.base.sizes import Size, ceildiv
from tilewright.base.target import Target
from tilewright.ir.program import Program, ProgramArray, ScalarInput
from tilewright.ir.types import Scalar, tensor
from tilewright.primitives.code import Code, Mem, Num, Param, write_kernel
from tilewright.primitives.lookback import exclusive_prefix, states_array, ticket, words_of
from tilewright.primitives.parts import (
    BlockShape,
    LaneNumbers,
    call,
    clear,
    data_type,
    lanes,
    load_tile,
    store_tile,
    tile_index,
)
from tilewright.primitives.scan_plan import ScanPlan, State, StateFunction, nothing

N = Size.of("n")


@record
class ScanPart:
    """A state that may be missing: `there` says whether it is (None: always)."""

    state: State
    there: Num | None = None


LARGE = 1 << 25
"""From so many elements on tiles are as large as registers allow: looking back costs time for each tile, and only their number counts."""


def scan_shape(plan: ScanPlan, large: bool, target: Target) -> BlockShape:
    width = max(1, min(16 // max(d.itemsize for d in plan.dtypes), 4))
    bits = sum(d.bits for d in plan.function.dtypes)
    if not large or bits > 64:
        steps = 8 if bits <= 32 else 4 if bits <= 64 else 2 if bits <= 128 else 1
        return BlockShape(256, steps, width, target.warp_size)
    steps = 20 if bits <= 32 and plan.function.is_named else 16
    return BlockShape(min(512, target.max_threads), steps, width, target.warp_size)


def scan_program(
    plan: ScanPlan, target: Target, aligned: bool = True, large: bool = False, rows: bool = False,
    shape: BlockShape | None = None, hint: str = "cs", look: int = 1,
) -> Program:  # fmt: skip
    """The program `x…, segments?, init…? -> y…`, for data of any length of at least 1. With `rows` each row of `row` elements is scanned by itself: the
    function is then a segmented one, and rows are longer than a warp's part of a tile. `aligned`: all data begin, and for a reversed scan end, where vectors may."""
    shape = shape or scan_shape(plan, large, target)
    function = plan.function
    assert plan.init or not plan.exclusive, "an exclusive scan begins with a value"
    assert function.segmented == (rows or plan.segments is not None), "rows are segments"
    tiles = ceildiv(N, shape.tile)
    states = states_array(tiles, words_of(*function.dtypes))
    data = [ProgramArray(n, data_type(d, N, aligned), "input") for n, d in zip(plan.inputs, plan.dtypes, strict=True)]
    results = [ProgramArray(n, tensor(d, N, align=16), "output") for n, d in zip(plan.outputs, plan.results, strict=True)]
    marks = [ProgramArray("segments", tensor(plan.segments.dtype, N if plan.segments.whole else "line"), "input")] if plan.segments is not None else []
    numbers = [ScalarInput(n, d) for n, d in zip(plan.initial, plan.value_dtypes, strict=False)]
    numbers += [ScalarInput("row", i64)] if rows else []

    def body(c: Code, *given: Mem | Num) -> None:
        memory = [v for v in given if isinstance(v, Mem)]
        scalars = [v for v in given if isinstance(v, Num)]
        x, y = memory[: len(data)], memory[len(data) : len(data) + len(results)]
        tile_states = memory[-1]
        line = memory[-2] if marks else None
        row = scalars[-1] if rows else None
        initial = scalars[: len(plan.initial)]
        at, size = lanes(c, target.warp_size), c.size(N)
        totals = [c.shared(d, shape.warps) for d in function.dtypes]
        tile = ticket(c, tile_states, at.thread)
        loaded = [load_tile(c, m, at, tile, shape, size, aligned, hint, plan.reverse) for m in x]

        start_step = tile_index(c, at, tile, shape, 0).min(size - 1)
        # One division for all of the thread's elements: they reach into the next row at most.
        start_inside = start_step if row is None else start_step % row

        def element(step: int, k: int) -> State:
            begins = None
            if function.segmented:
                place = (tile_index(c, at, tile, shape, step) + k).min(size - 1)
                inside = place - start_step + start_inside
                if row is not None:
                    inside = c.select(inside >= row, inside - row, inside)
                begins = _begins(c, plan, line, row, size, place, inside)
            return plan.element(c, [values[step][k] for values in loaded], begins, initial)

        values = [[element(step, k) for k in range(shape.width)] for step in range(shape.steps)]
        join = joiner(c, function)
        inside = [running(function, vector) for vector in values]
        before, total = _across_warp(c, join, function, [v[-1] for v in inside], at)

        def tell() -> None:
            for part, number in zip(totals, total, strict=True):
                part.store(at.warp, number)

        c.when(at.is_last_lane, tell)
        c.barrier()
        aggregate, warp_before = [m[0] for m in totals], missing_part(c, function)
        for w in range(shape.warps - 1):
            warp_before = part_where(c, at.warp > w, aggregate, warp_before)
            aggregate = function(aggregate, [m[w + 1] for m in totals])
        start = plan.start(c, initial) if plan.init else None
        found = exclusive_prefix(c, tile_states, tile, at, min(shape.warps, look), aggregate, function, start)
        prefix = ScanPart(found) if plan.init else part_where(c, tile > 0, found, missing_part(c, function))
        first = join(prefix, warp_before)
        shown: list[list[list[Num]]] = []
        for ahead, vector, own in zip(before, inside, values, strict=True):
            shown.append(finished(c, plan, join, join(first, ahead), vector, own, initial))
        for k, out in enumerate(y):
            store_tile(c, out, at, tile, shape, size, [[v[k] for v in vector] for vector in shown], hint, plan.reverse, aligned)

    arrays = [*data, *results, *marks, states]
    params: list[Param] = [(a.name, a.type) for a in arrays]
    params += [(n.name, Scalar(n.dtype)) for n in numbers]
    kernel = write_kernel("scan", shape.threads, [tiles], params, body)
    calls = (clear("clear_states", states), call(kernel))
    return Program("scan", (*data, *marks, *numbers), tuple(results), (states,), calls)


def _begins(c: Code, plan: ScanPlan, marks: Mem | None, row: Num | None, size: Num, step: Num, inside: Num) -> Num:
    """Whether a segment or a row begins at a step of the walk over all data, which is the step `inside` of its row."""
    length = size if row is None else row
    first = inside.eq(0)
    if plan.segments is None or marks is None:
        return first
    place = plan.place(inside, length)
    other, outside = plan.neighbour(place, length)
    here, there = place, other
    if plan.segments.whole:
        here = plan.place(step, size)
        there = here + (other - place)
    return plan.segments.begins(marks, (here,), (there,), outside) | first


def missing_part(c: Code, function: StateFunction) -> ScanPart:
    """Nothing: the identity, or what is not there."""
    return ScanPart(nothing(c, function), c.const(False, bool_) if function.identity is None else None)


def part_where(c: Code, cond: Num, state: State, other: ScanPart) -> ScanPart:
    """`state` where the condition holds, else what `other` is."""
    chosen = [c.select(cond, a, b) for a, b in zip(state, other.state, strict=True)]
    return ScanPart(chosen) if other.there is None else ScanPart(chosen, cond | other.there)


Join = Callable[[ScanPart, ScanPart], ScanPart]


def joiner(c: Code, function: StateFunction) -> Join:
    def chosen(cond: Num, a: State, b: State) -> State:
        return [c.select(cond, x, y) for x, y in zip(a, b, strict=True)]

    def join(a: ScanPart, b: ScanPart) -> ScanPart:
        """Both, in this order, as far as they are there."""
        both = function(a.state, b.state)
        if a.there is None and b.there is None:
            return ScanPart(both)
        if b.there is None:
            assert a.there is not None
            return ScanPart(chosen(a.there, both, b.state))
        if a.there is None:
            return ScanPart(chosen(b.there, both, a.state))
        return ScanPart(chosen(a.there, chosen(b.there, both, a.state), b.state), a.there | b.there)

    return join


def running(function: StateFunction, vector: list[State]) -> list[State]:
    """The scan of a few states."""
    out = [vector[0]]
    for value in vector[1:]:
        out.append(function(out[-1], value))
    return out


def _across_warp(c: Code, join: Join, function: StateFunction, ends: list[State], at: LaneNumbers) -> tuple[list[ScanPart], State]:
    """For each step, what the warp has before this lane's vector; and what the whole warp amounts to."""
    sums = list(ends)
    lane = at.lane
    for distance in at.distances:
        others = [[c.shuffle(v, distance, "up") for v in s] for s in sums]
        inside = lane >= distance
        sums = [[c.select(inside, both, own) for both, own in zip(function(o, s), s, strict=True)] for o, s in zip(others, sums, strict=True)]
    before: list[ScanPart] = []
    carry: State | None = None
    for total in sums:
        ahead = part_where(c, lane > 0, [c.shuffle(v, 1, "up") for v in total], missing_part(c, function))
        before.append(ahead if carry is None else join(ScanPart(carry), ahead))
        whole = [c.shuffle(v, at.warp_size - 1) for v in total]
        carry = whole if carry is None else function(carry, whole)
    assert carry is not None
    return before, carry


def finished(
    c: Code, plan: ScanPlan, join: Join, ahead: ScanPart, inside: list[State], elements: Sequence[State], initial: Sequence[Num]
) -> list[list[Num]]:
    """What is stored for each element of a vector."""
    if plan.exclusive:
        states = [ahead.state, *(join(ahead, ScanPart(v)).state for v in inside[:-1])]
    else:
        states = [join(ahead, ScanPart(v)).state for v in inside]
    return [plan.shown(c, state, state, element, initial) for state, element in zip(states, elements, strict=True)]
