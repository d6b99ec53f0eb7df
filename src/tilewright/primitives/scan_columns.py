"""Scans along an axis that is not the last: neighbours in memory belong to different lines, so that all of them take the same step at once.

In: a `ScanPlan` and into how many chunks the axis is cut. Out: a program `x[outer, n, inner]… -> y[outer, n, inner]…`. Where there are enough lines,
one kernel walks them; else three: what each chunk of a line amounts to, what is before each chunk, and the chunks themselves.

    CPU   a block has a strip of lines, whose states lie in its cache, and takes vectors of them
    GPU   a thread has a line
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.sizes import Size, ceildiv, minimum
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import Program
from tilewright.ir.types import Scalar, Type
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.cpu_scan import ScanMemory, interface, unpack, walk_chunks
from tilewright.primitives.parts import call, scratch
from tilewright.primitives.scan_plan import ScanPlan, State

OUTER, N, INNER = Size.of("outer"), Size.of("n"), Size.of("inner")
_STRIP = 1024
"""ScanMemory of a CPU's block."""
_THREADS = 128
_AHEAD = 8
"""Elements that a thread of a GPU loads before it joins them."""
_VECTOR = 64
"""Bytes of a CPU's vectors."""


def columns_scan_program(plan: ScanPlan, target: Target, pieces: int) -> Program:
    """With `pieces` over 1 the axis is cut into that many chunks (fewer where it is shorter)."""
    params, inputs, outputs = interface(plan, (OUTER, N, INNER))
    several = pieces > 1
    chunks = minimum(N, pieces) if several else Size.of(1)
    dtypes = plan.function.dtypes
    totals = [scratch(f"total{k}", d, OUTER, chunks, INNER) for k, d in enumerate(dtypes)] if several else []
    before = [scratch(f"before{k}", d, OUTER, chunks, INNER) for k, d in enumerate(dtypes)] if several else []
    width = _THREADS if target.simt else _STRIP
    threads = _THREADS if target.simt else 1
    strips = ceildiv(INNER, width)
    walk_lines = _thread_lines if target.simt else _strip_lines

    def kernel(name: str, extra: list[tuple[str, Type]], grid: Size, body: Callable[[Code, ScanMemory, list[Mem], Num, Num, Num], None]) -> Kernel:
        def written(c: Code, *given: Mem | Num) -> None:
            lines, rest = unpack(plan, given)
            strip, line = c.block() % c.size(strips), c.block() // c.size(strips)
            number = c.size(chunks)
            body(c, lines, rest, line // number, line % number, strip * width)

        return write_kernel(name, threads, [grid], [*params, *extra], written)

    def bounds(c: Code, k: Num) -> tuple[Num, Num]:
        size, number = c.size(N), c.size(chunks)
        return k * size // number, (k + 1) * size // number

    def total_body(c: Code, lines: ScanMemory, rest: list[Mem], o: Num, k: Num, first: Num) -> None:
        walk_lines(c, plan, lines, (o, k, first), bounds(c, k), None, rest)

    def scan_body(c: Code, lines: ScanMemory, rest: list[Mem], o: Num, k: Num, first: Num) -> None:
        walk_lines(c, plan, lines, (o, k, first), bounds(c, k), rest, None)

    def before_body(c: Code, *given: Mem | Num) -> None:
        memory = [v for v in given if isinstance(v, Mem)]
        initial = [v for v in given if isinstance(v, Num)]
        o, strip = c.block() // c.size(strips), c.block() % c.size(strips)
        count = len(dtypes)

        def line(i: Num) -> None:
            walk_chunks(c, plan, memory[:count], memory[count:], initial, chunks, lambda k: (o, k, i))

        first = strip * width
        if target.simt:
            mine = first + c.thread()
            c.when(mine < c.size(INNER), lambda: line(mine))
        else:
            c.loop(first, (first + width).min(c.size(INNER)), 1, [], line)

    if not several:
        return Program("scan", tuple(inputs), tuple(outputs), (), (call(kernel("scan_columns", [], OUTER * strips, scan_body)),))
    held: list[tuple[str, Type]] = [(a.name, a.type) for a in (*totals, *before)]
    numbers: list[tuple[str, Type]] = [(n, Scalar(d)) for n, d in zip(plan.initial, plan.value_dtypes, strict=False)]
    kernels = [
        kernel("scan_totals", held[: len(dtypes)], OUTER * chunks * strips, total_body),
        write_kernel("chunks_before", threads, [OUTER * strips], [*held, *numbers], before_body),
        kernel("scan_columns", held[len(dtypes) :], OUTER * chunks * strips, scan_body),
    ]
    return Program("scan", tuple(inputs), tuple(outputs), (*totals, *before), tuple(call(k) for k in kernels))


def _element(c: Code, plan: ScanPlan, lines: ScanMemory, o: Num, t: Num, i: Num, width: int = 1) -> State:
    """The state of the element (or of `width` of them, side by side) at step `t` of a walk."""
    size = c.size(N)
    place = plan.place(t, size)
    begins = None
    if plan.segments is not None and lines.marks is not None:
        other, outside = plan.neighbour(place, size)
        here, there = ((o, place, i), (o, other, i)) if plan.segments.whole else ((place,), (other,))
        begins = plan.segments.begins(lines.marks, here, there, outside)
    attrs = {"unaligned": True} if width > 1 else {}
    return plan.element(c, [x.load((o, place, i), width, **attrs) for x in lines.x], begins, lines.initial)


def _store(c: Code, plan: ScanPlan, lines: ScanMemory, o: Num, t: Num, i: Num, values: Sequence[Num]) -> None:
    place = plan.place(t, c.size(N))
    for memory, value in zip(lines.y, values, strict=True):
        memory.store((o, place, i), value, **({"unaligned": True} if value.width > 1 else {}))


Place = tuple[Num, Num, Num]
"""The outer index, the chunk and the first line."""


def _thread_lines(c: Code, plan: ScanPlan, lines: ScanMemory, at: Place, bounds: tuple[Num, Num], before: list[Mem] | None, totals: list[Mem] | None) -> None:
    """One line to a thread. Where there are `totals`, only what the chunk amounts to is computed."""
    o, k, first = at
    low, high = bounds
    i = first + c.thread()
    join = plan.function

    def one(t: Num, now: Sequence[Num], element: State) -> State:
        after = join(now, element)
        if totals is None:
            _store(c, plan, lines, o, t, i, plan.shown(c, after, list(now), element, lines.initial))
        return after

    def several(t: Num, *now: Num) -> State:
        elements = [_element(c, plan, lines, o, t + n, i) for n in range(_AHEAD)]
        state = list(now)
        for n, element in enumerate(elements):
            state = one(t + n, state, element)
        return state

    def line() -> None:
        state, start = _begin(c, plan, lines, o, k, i, low, before, totals)
        middle = start + (high - start) // _AHEAD * _AHEAD
        state = c.loop(start, middle, _AHEAD, state, several)
        state = c.loop(middle, high, 1, state, lambda t, *now: one(t, now, _element(c, plan, lines, o, t, i)))
        for memory, value in zip(totals or (), state, strict=False):
            memory.store((o, k, i), value)

    c.when(i < c.size(INNER), line)


def _begin(
    c: Code, plan: ScanPlan, lines: ScanMemory, o: Num, k: Num, i: Num, low: Num, before: list[Mem] | None, totals: list[Mem] | None, width: int = 1
) -> tuple[State, Num]:
    """The state with which the loop over a chunk begins, and at which step. Where nothing need be before the first element, that is done here."""
    join = plan.function
    if totals is None and plan.init and not before:
        return [_wide(c, v, width) for v in plan.start(c, lines.initial)], low
    attrs = {"unaligned": True} if width > 1 else {}
    if totals is None and plan.init and before:
        return [m.load((o, k, i), width, **attrs) for m in before], low
    element = _element(c, plan, lines, o, low, i, width)
    state = element
    if totals is None and before:
        joined = join([m.load((o, k, i), width, **attrs) for m in before], element)
        is_later = _wide(c, k > 0, width)
        state = [c.select(is_later, both, own) for both, own in zip(joined, element, strict=True)]
    if totals is None:
        _store(c, plan, lines, o, low, i, plan.shown(c, state, element, element, lines.initial))
    return state, low + 1


def _wide(c: Code, value: Num, width: int) -> Num:
    return value if width == 1 or value.width == width else c.op("broadcast", value, width=width)


def _strip_lines(c: Code, plan: ScanPlan, lines: ScanMemory, at: Place, bounds: tuple[Num, Num], before: list[Mem] | None, totals: list[Mem] | None) -> None:
    """A strip of lines to a block, whose states lie in memory of its own."""
    o, k, first = at
    low, high = bounds
    inner = c.size(INNER)
    last = (first + _STRIP).min(inner)
    join = plan.function
    vectors = join.takes_vectors and plan.segments is None and not any(d.is_bool for d in (*plan.dtypes, *plan.results))
    width = _VECTOR // max(d.itemsize for d in (*plan.function.dtypes, *plan.dtypes, *plan.results)) if vectors else 1
    states = [c.alloc("local", d, _STRIP, align=64) for d in join.dtypes]
    middle = first + (last - first) // width * width

    def each(step: Callable[[Num, int], None]) -> None:
        if width > 1:
            c.loop(first, middle, width, [], lambda i: step(i, width))
        c.loop(middle if width > 1 else first, last, 1, [], lambda i: step(i, 1))

    def keep(i: Num, state: Sequence[Num]) -> None:
        for memory, value in zip(states, state, strict=True):
            memory.store(i - first, value, **({"unaligned": True} if value.width > 1 else {}))

    def begin(i: Num, wide: int) -> None:
        state, _ = _begin(c, plan, lines, o, k, i, low, before, totals, wide)
        keep(i, state)

    def one(t: Num, i: Num, wide: int) -> None:
        now = [m.load(i - first, wide, **({"unaligned": True} if wide > 1 else {})) for m in states]
        element = _element(c, plan, lines, o, t, i, wide)
        after = join(now, element)
        if totals is None:
            _store(c, plan, lines, o, t, i, plan.shown(c, after, now, element, lines.initial))
        keep(i, after)

    def finish(i: Num, wide: int) -> None:
        for memory, held in zip(totals or (), states, strict=False):
            attrs = {"unaligned": True} if wide > 1 else {}
            memory.store((o, k, i), held.load(i - first, wide, **attrs), **attrs)

    each(begin)
    begins_later = not (totals is None and plan.init)
    c.loop(low + 1 if begins_later else low, high, 1, [], lambda t: each(lambda i, wide: one(t, i, wide)))
    if totals is not None:
        each(finish)


def pieces(target: Target, outer: int, size: int, inner: int) -> int:
    """Into how many chunks the axis is cut."""
    if target.simt:
        lines = outer * inner
        wanted = target.multiprocessors * 2048 * 2
    else:
        lines, wanted = outer * -(-inner // _STRIP), 8
    number = 1
    while lines * number < wanted and number * 2 * _AHEAD * 2 <= size:
        number *= 2
    return number
