"""Scans of rows on a CPU: every row is a line of neighbours in memory.

In: a `ScanPlan`. Out: a program `x[rows, n]… -> y[rows, n]…`. Many rows are shared out as they are. A few long ones are cut into chunks first: what
each chunk amounts to, what is before each chunk, then the chunks themselves. Chains of dependent steps are what takes time on a CPU, so a
walk takes several elements at a time: they are joined among themselves, beside what comes from before, and the chain has one step for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.chunks import chunk
from tilewright.base.record import record
from tilewright.base.sizes import Size, ceildiv, minimum
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import Program, ProgramArray, ScalarInput
from tilewright.ir.types import Scalar, Tensor, Type, tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.parts import call, scratch
from tilewright.primitives.scan_plan import ScanPlan, State, nothing

ROWS, N = Size.of("rows"), Size.of("n")
CHUNK = 32768
"""Elements of a chunk of a long row: small enough to stay in a second-level cache between the walks of one thread."""
_BLOCKS = 64
_STEP = 4
"""Elements that a walk joins among themselves."""
_VECTORS = 4


@record
class ScanMemory:
    """The memory of a scan: the arrays it reads, those it writes, the marks of segments and the initial numbers."""

    x: list[Mem]
    y: list[Mem]
    marks: Mem | None
    initial: list[Num]


def interface(
    plan: ScanPlan, shape: Sequence[Size], align: int = 0
) -> tuple[list[tuple[str, Type]], list[ProgramArray | ScalarInput], list[ProgramArray]]:
    """The parameters of a scan's kernel for arrays of that shape that begin at multiples of `align` bytes, and the inputs and outputs of its program."""
    line = shape[1] if len(shape) > 1 else shape[0]
    inputs: list[ProgramArray | ScalarInput] = [ProgramArray(n, tensor(d, *shape, align=align), "input") for n, d in zip(plan.inputs, plan.dtypes, strict=True)]
    outputs = [ProgramArray(n, tensor(d, *shape, align=align), "output") for n, d in zip(plan.outputs, plan.results, strict=True)]
    if plan.segments is not None:
        inputs.append(ProgramArray("segments", tensor(plan.segments.dtype, *(shape if plan.segments.whole else (line,))), "input"))
    numbers: list[ProgramArray | ScalarInput] = [ScalarInput(n, d) for n, d in zip(plan.initial, plan.value_dtypes, strict=False)]
    arrays = [a for a in (*inputs, *outputs) if isinstance(a, ProgramArray)]
    params: list[tuple[str, Type]] = [(a.name, a.type) for a in arrays]
    params += [(n.name, Scalar(n.dtype)) for n in numbers if isinstance(n, ScalarInput)]
    return params, [*inputs, *numbers], outputs


def unpack(plan: ScanPlan, given: Sequence[Mem | Num]) -> tuple[ScanMemory, list[Mem]]:
    """The parameters of `interface` by what they are; what follows the initial numbers is given back."""
    waiting = list(given)

    def memory(count: int) -> list[Mem]:
        taken = [v for v in waiting[:count] if isinstance(v, Mem)]
        del waiting[:count]
        return taken

    x = memory(len(plan.inputs))
    marks = memory(1) if plan.segments is not None else []
    y = memory(len(plan.outputs))
    numbers = [v for v in waiting[: len(plan.initial)] if isinstance(v, Num)]
    rest = [v for v in waiting[len(plan.initial) :] if isinstance(v, Mem)]
    return ScanMemory(x, y, marks[0] if marks else None, numbers), rest


def rows_scan_program(plan: ScanPlan, split: bool) -> Program:
    """With `split`, rows are cut into chunks."""
    return _split_program(plan) if split else _whole_program(plan)


def _whole_program(plan: ScanPlan) -> Program:
    params, inputs, outputs = interface(plan, (ROWS, N))
    blocks = minimum(ROWS, _BLOCKS)

    def body(c: Code, *given: Mem | Num) -> None:
        lines, _ = unpack(plan, given)
        rows, several, size = c.size(ROWS), c.size(blocks), c.size(N)

        def row(r: Num) -> None:
            walk = ScanWalk(c, plan, lines, r, size)
            walk.run(c.index(0), size, plan.start(c, lines.initial) if plan.init else None, None)

        c.loop(c.block() * rows // several, (c.block() + 1) * rows // several, 1, [], row)

    kernel = write_kernel("scan_rows", 1, [blocks], params, body)
    return Program("scan", tuple(inputs), tuple(outputs), (), (call(kernel),))


def _split_program(plan: ScanPlan) -> Program:
    params, inputs, outputs = interface(plan, (ROWS, N))
    chunks = ceildiv(N, chunk(CHUNK))
    dtypes = plan.function.dtypes
    totals = [scratch(f"total{k}", d, ROWS, chunks) for k, d in enumerate(dtypes)]
    before = [scratch(f"before{k}", d, ROWS, chunks) for k, d in enumerate(dtypes)]
    held = {a.name: a.type for a in (*totals, *before)}

    def bounds(c: Code) -> tuple[Num, Num, Num, Num]:
        several = c.size(chunks)
        r, k = c.block() // several, c.block() % several
        return r, k, k * chunk(CHUNK), ((k + 1) * chunk(CHUNK)).min(c.size(N))

    def total_body(c: Code, *given: Mem | Num) -> None:
        lines, sums = unpack(plan, given)
        r, k, low, high = bounds(c)
        state = ScanWalk(c, plan, lines, r, c.size(N)).total(low, high)
        for memory, value in zip(sums, state, strict=True):
            memory.store((r, k), value)

    def body(c: Code, *given: Mem | Num) -> None:
        lines, first = unpack(plan, given)
        r, k, low, high = bounds(c)
        there = None if plan.init else k > 0
        ScanWalk(c, plan, lines, r, c.size(N)).run(low, high, [m[r, k] for m in first], there)

    # The kernel of totals writes no result, but takes what the others take.
    kernels = [
        write_kernel("scan_totals", 1, [ROWS * chunks], [*params, *((a.name, a.type) for a in totals)], total_body),
        prefix_kernel(plan, [ROWS], chunks, [(a.name, held[a.name]) for a in (*totals, *before)], lambda c, k: (c.block(), k)),
        write_kernel("scan_rows", 1, [ROWS * chunks], [*params, *((a.name, a.type) for a in before)], body),
    ]
    return Program("scan", tuple(inputs), tuple(outputs), (*totals, *before), tuple(call(k) for k in kernels))


def prefix_kernel(
    plan: ScanPlan, grid: list[Size], chunks: Size, arrays: list[tuple[str, Tensor]], place: Callable[[Code, Num], tuple[Num, ...]]
) -> Kernel:
    """What is before each chunk of a line, one line to a block."""
    numbers = [(n, Scalar(d)) for n, d in zip(plan.initial, plan.value_dtypes, strict=False)]
    count = len(plan.function.dtypes)

    def body(c: Code, *given: Mem | Num) -> None:
        memory = [v for v in given if isinstance(v, Mem)]
        totals, before = memory[:count], memory[count:]
        initial = [v for v in given if isinstance(v, Num)]
        walk_chunks(c, plan, totals, before, initial, chunks, lambda k: place(c, k))

    return write_kernel("chunks_before", 1, grid, [*arrays, *numbers], body)


def walk_chunks(
    c: Code, plan: ScanPlan, totals: Sequence[Mem], before: Sequence[Mem], initial: Sequence[Num], chunks: Size, place: Callable[[Num], tuple[Num, ...]]
) -> None:
    """What is before each chunk: of the first it is the initial state, or nothing."""
    function = plan.function

    def step(k: Num, *now: Num) -> State:
        at = place(k)
        for memory, value in zip(before, now, strict=True):
            memory.store(at, value)
        mine = [m[at] for m in totals]
        joined = function(now, mine)
        if plan.init or function.identity is not None:
            return joined
        return [c.select(k.eq(0), own, both) for own, both in zip(mine, joined, strict=True)]

    c.loop(0, c.size(chunks), 1, plan.start(c, initial) if plan.init else nothing(c, function), step)


class ScanWalk:
    """A walk along (a part of) one row."""

    def __init__(self, c: Code, plan: ScanPlan, lines: ScanMemory, row: Num, size: Num, vectors: bool = True) -> None:
        self.c, self.plan, self.lines, self.row, self.size = c, plan, lines, row, size
        self.join = plan.function
        self.vectors = vectors and plan.function.is_named and plan.segments is None and not plan.results[0].is_bool and not plan.dtypes[0].is_bool

    def element(self, t: Num) -> State:
        plan, c = self.plan, self.c
        place = plan.place(t, self.size)
        begins = None
        if plan.segments is not None and self.lines.marks is not None:
            other, outside = plan.neighbour(place, self.size)
            here, there = ((self.row, place), (self.row, other)) if plan.segments.whole else ((place,), (other,))
            begins = plan.segments.begins(self.lines.marks, here, there, outside)
        return plan.element(c, [x.load((self.row, place)) for x in self.lines.x], begins, self.lines.initial)

    def store(self, t: Num, values: Sequence[Num]) -> None:
        place = self.plan.place(t, self.size)
        for memory, value in zip(self.lines.y, values, strict=True):
            memory.store((self.row, place), value)

    def total(self, low: Num, high: Num) -> State:
        """What a range, which is not empty, amounts to."""

        def several(t: Num, *now: Num) -> State:
            e = [self.element(t + k) for k in range(_STEP)]
            return self.join(now, self.join(self.join(e[0], e[1]), self.join(e[2], e[3])))

        c, first = self.c, low + 1
        middle = first + (high - first) // _STEP * _STEP
        now = c.loop(first, middle, _STEP, self.element(low), several)
        return c.loop(middle, high, 1, now, lambda t, *now: self.join(now, self.element(t)))

    def run(self, low: Num, high: Num, start: State | None, there: Num | None) -> None:
        """Scan a range, which is not empty. `start`: what is before it; `there`: whether that is anything, where it is not always."""
        c = self.c

        def one(t: Num, *now: Num) -> State:
            element = self.element(t)
            after = self.join(now, element)
            self.store(t, self.plan.shown(c, after, list(now), element, self.lines.initial))
            return after

        if start is None or there is not None:
            # The first element has nothing before it, or so it may be.
            element = self.element(low)
            state = element
            if start is not None and there is not None:
                state = [c.select(there, both, own) for both, own in zip(self.join(start, element), element, strict=True)]
            self.store(low, self.plan.shown(c, state, element, element, self.lines.initial))
            first = low + 1
        else:
            state, first = start, low
        step, several = self._by_vectors() if self.vectors else (_STEP, self._by_elements)
        middle = first + (high - first) // step * step
        state = c.loop(first, middle, step, state, several)
        c.loop(middle, high, 1, state, one)

    def _by_elements(self, t: Num, *now: Num) -> State:
        c, join = self.c, self.join
        e = [self.element(t + k) for k in range(_STEP)]
        two, last = join(e[0], e[1]), join(e[2], e[3])
        inside = [e[0], two, join(two, e[2]), join(two, last)]
        after = [join(now, part) for part in inside]
        before = [list(now), *after[:-1]]
        for k in range(_STEP):
            self.store(t + k, self.plan.shown(c, after[k], before[k], e[k], self.lines.initial))
        return after[-1]

    def _by_vectors(self) -> tuple[int, Callable[..., State]]:
        """A function known by name: vectors are scanned in steps of doubling distance."""
        plan, c = self.plan, self.c
        (dtype,), (result,) = plan.value_dtypes, plan.results
        identity = plan.function.identity
        assert identity is not None
        width = 16 // max(dtype.itemsize, 1)
        step = width * _VECTORS

        def shifted(vector: Num, by: int) -> Num:
            return c.pack([c.const(identity[0], dtype)] * by + vector.lanes()[:-by])

        def several(t: Num, now: Num) -> State:
            place = self.size - t - step if plan.reverse else t
            order = list(range(_VECTORS))[:: -1 if plan.reverse else 1]
            loaded = [self.lines.x[0].load((self.row, place + k * width), width, unaligned=True) for k in order]
            carried = now
            for k, vector in zip(order, loaded, strict=True):
                inside = _turned(c, vector, plan.reverse).to(dtype)
                distance = 1
                while distance < width:
                    inside = self.join([shifted(inside, distance)], [inside])[0]
                    distance *= 2
                last = inside.lanes()[-1]
                shown = shifted(inside, 1) if plan.exclusive else inside
                out = self.join([c.op("broadcast", carried, width=width)], [shown])[0].to(result)
                self.lines.y[0].store((self.row, place + k * width), _turned(c, out, plan.reverse), unaligned=True)
                carried = self.join([carried], [last])[0]
            return [carried]

        return step, several


def _turned(c: Code, vector: Num, turn: bool) -> Num:
    return c.pack(vector.lanes()[::-1]) if turn else vector


def is_split(rows: int, size: int) -> bool:
    """Whether rows of that number and length are cut into chunks."""
    return size > CHUNK and rows < 16


