"""Scans of rows on a GPU: every row belongs to a few lanes of a warp, to a warp, or to a block, which needs nothing from other rows.

In: a `ScanPlan` and the shape of a block (`rows_shape` chooses it for a call). Out: a program of one kernel, `x[rows, n]… -> y[rows, n]…`. A
thread holds `steps` vectors of its row. It scans each, the lanes of the row scan what the vectors amount to by shuffles, and the warps of
the row tell one another in shared memory what they have. A row that is longer than the registers of its threads is walked tile by tile, and what is
before a tile is carried along. Order is kept, so the function need not be commutative.

    short rows   lanes of a warp have a row, several rows to a warp
    long rows    all threads of a block have a row

Elements behind the end of a row are read from inside it and never stored: what comes last changes nothing before it.
Few long rows are for `scan`, whose blocks share rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import u32
from tilewright.base.record import record
from tilewright.base.sizes import ceildiv
from tilewright.base.target import Target
from tilewright.ir.nodes import Attr
from tilewright.ir.program import Program
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.cpu_scan import ROWS, N, ScanMemory, interface, unpack
from tilewright.primitives.parts import call, lanes
from tilewright.primitives.scan import ScanPart, joiner, missing_part, part_where, running
from tilewright.primitives.scan_plan import ScanPlan, State

_THREADS = 128
_MOST_THREADS = 512
_VECTOR_BYTES = 16
_BLOCKS = 4
"""Rows for each multiprocessor from which on blocks are enough that have a row each, however long it is."""


@record
class RowsShape:
    """A block: `lanes` of its threads share a row, each with `steps` vectors of `width` elements at a time."""

    threads: int
    lanes: int
    steps: int
    width: int
    warp_size: int

    @property
    def group(self) -> int:
        """Lanes of one warp that share a row."""
        return min(self.lanes, self.warp_size)

    @property
    def warps(self) -> int:
        """Warps that share a row."""
        return max(1, self.lanes // self.warp_size)

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.threads // self.lanes

    @property
    def tile(self) -> int:
        """Elements of a row in registers."""
        return self.lanes * self.steps * self.width

    @property
    def key(self) -> str:
        return f"{self.threads} {self.lanes} {self.steps} {self.width}"


def rows_shape(plan: ScanPlan, target: Target, rows: int, size: int, aligned: bool) -> RowsShape | None:
    """The shape for rows of that size; None where there are too few rows of such a length. `aligned`: all data begin where vectors may."""
    widest = max(d.itemsize for d in (*plan.dtypes, *plan.results))
    width = 1
    while aligned and 2 * width * widest <= _VECTOR_BYTES and size % (2 * width) == 0:
        width *= 2
    bits = sum(d.bits for d in plan.function.dtypes)
    held = max(width, 16 if bits <= 32 else 8 if bits <= 64 else 4)
    vectors, most = -(-size // width), min(held // width, 8)
    shared = 1
    while shared * most < vectors and shared < min(_MOST_THREADS, target.max_threads):
        shared *= 2
    if shared * most * 2 < vectors and rows < _BLOCKS * target.multiprocessors:
        return None
    steps = min(most, -(-vectors // shared))
    return RowsShape(max(shared, _THREADS), shared, steps, width, target.warp_size)


def gpu_rows_scan_program(plan: ScanPlan, shape: RowsShape, long: bool) -> Program:
    """With `long`, rows may be longer than a tile. Vectors of the shape's width divide rows, and all data begin where they may."""
    assert plan.init or not plan.exclusive, "an exclusive scan begins with a value"
    assert plan.function.segmented == (plan.segments is not None), "rows need no marks"
    params, inputs, outputs = interface(plan, (ROWS, N), 16 if shape.width > 1 else 0)

    def body(c: Code, *given: Mem | Num) -> None:
        memory, _ = unpack(plan, given)
        _RowsBlock(c, plan, shape, memory).run(long)

    kernel = write_kernel("scan_rows", shape.threads, [ceildiv(ROWS, shape.rows)], params, body)
    return Program("scan", tuple(inputs), tuple(outputs), (), (call(kernel),))


class _RowsBlock:
    """What a block does."""

    def __init__(self, c: Code, plan: ScanPlan, shape: RowsShape, memory: ScanMemory) -> None:
        self.c, self.plan, self.shape, self.memory = c, plan, shape, memory
        self.function, self.join = plan.function, joiner(c, plan.function)
        self.size = c.size(N)
        at = lanes(c, shape.warp_size)
        row = c.block() if shape.rows == 1 else c.block() * shape.rows + at.thread // shape.lanes
        self.is_row = None if shape.rows == 1 else row < c.size(ROWS)
        self.row = row if shape.rows == 1 else row.min(c.size(ROWS) - 1)
        self.lane = at.lane if shape.group == shape.warp_size else at.lane & (shape.group - 1)
        self.warp = None if shape.warps == 1 else at.warp if shape.rows == 1 else at.warp & (shape.warps - 1)
        self.first_warp = None if self.warp is None or shape.rows == 1 else at.warp - self.warp
        self.totals = [c.shared(d, 2 * shape.rows * shape.warps) for d in plan.function.dtypes] if shape.warps > 1 else []

    def run(self, long: bool) -> None:
        c, plan = self.c, self.plan
        begin = ScanPart(plan.start(c, self.memory.initial)) if plan.init else missing_part(c, self.function)
        if not long:
            known = plan.init
            self._tile(c.index(0), c.index(0), begin if known else None)
            return

        def one(first: Num, buffer: Num, *carried: Num) -> list[Num]:
            before = ScanPart(list(carried), None if begin.there is None else first > 0)
            after = self._tile(first, buffer, before)
            return [c.const(1, buffer.dtype) - buffer, *after.state]

        c.loop(c.index(0), self.size, self.shape.tile, [c.index(0), *begin.state], one)

    def _tile(self, first: Num, buffer: Num, before: ScanPart | None) -> ScanPart:
        """Scan a tile of the row; what it and all before it amount to is given back."""
        shape, function = self.shape, self.function
        starts = [self._start(first, step) for step in range(shape.steps)]
        loaded = [self._loaded(t) for t in starts]
        elements = [[self._element(t, k, values) for k in range(shape.width)] for t, values in zip(starts, loaded, strict=True)]
        inside = [running(function, vector) for vector in elements]
        sums, carries, total = self._across_lanes([v[-1] for v in inside])
        warps_before, aggregate = self._across_warps(total, buffer)
        front = before
        if warps_before is not None:
            front = warps_before if before is None else self.join(before, warps_before)
        for t, vector, own, step_sum, carry in zip(starts, inside, elements, sums, carries, strict=True):
            ahead = front
            if carry is not None:
                ahead = ScanPart(carry) if front is None else self.join(front, ScanPart(carry))
            self._store(t, self._shown(ahead, vector, own, step_sum))
        whole = ScanPart(aggregate)
        return whole if before is None else self.join(before, whole)

    def _start(self, first: Num, step: int) -> Num:
        """The step of the walk at which the thread's vector begins: in the order (warp, step, lane)."""
        shape = self.shape
        place = first + self.lane * shape.width
        if self.warp is not None:
            place = place + self.warp * (shape.steps * shape.group * shape.width)
        return place + step * shape.group * shape.width if step else place

    def _loaded(self, t: Num) -> list[list[Num]]:
        """The elements of a vector, of each array, in the order of the walk."""
        width = self.shape.width
        inside = t.min(self.size - width)
        place = self.size - width - inside if self.plan.reverse else inside
        vectors = [x.load((self.row, place), width).lanes() for x in self.memory.x]
        return [v[::-1] for v in vectors] if self.plan.reverse else vectors

    def _element(self, t: Num, k: int, values: Sequence[Sequence[Num]]) -> State:
        c, plan, marks = self.c, self.plan, self.memory.marks
        begins = None
        if plan.segments is not None and marks is not None:
            place = plan.place((t + k).min(self.size - 1), self.size)
            other, outside = plan.neighbour(place, self.size)
            here, there = ((self.row, place), (self.row, other)) if plan.segments.whole else ((place,), (other,))
            begins = plan.segments.begins(marks, here, there, outside)
        return plan.element(c, [vector[k] for vector in values], begins, self.memory.initial)

    def _shuffled(self, value: Num, lane: int, mode: str) -> Num:
        """The value of another lane of the row."""
        c, shape = self.c, self.shape
        width: dict[str, Attr] = {} if shape.group == shape.warp_size else {"width": shape.group}
        return c.op("shuffle", value, c.const(lane, u32), mode=mode, **width)

    def _across_lanes(self, ends: list[State]) -> tuple[list[State], list[State | None], State]:
        """For each step: the scan of the lanes' vectors, and what the steps before amount to; and all steps of the warp."""
        c, function = self.c, self.function
        sums = ends
        distance = 1
        while distance < self.shape.group:
            others = [[self._shuffled(v, distance, "up") for v in s] for s in sums]
            inside = self.lane >= distance
            sums = [[c.select(inside, both, own) for both, own in zip(function(o, s), s, strict=True)] for o, s in zip(others, sums, strict=True)]
            distance *= 2
        carries: list[State | None] = []
        carry: State | None = None
        for total in sums:
            carries.append(carry)
            whole = total if self.shape.group == 1 else [self._shuffled(v, self.shape.group - 1, "idx") for v in total]
            carry = whole if carry is None else function(carry, whole)
        assert carry is not None
        return sums, carries, carry

    def _across_warps(self, total: State, buffer: Num) -> tuple[ScanPart | None, State]:
        """What the warps of the row before this one have, and what all have."""
        c, function, warp = self.c, self.function, self.warp
        if warp is None:
            return None, total
        place = buffer * (self.shape.rows * self.shape.warps)
        if self.first_warp is not None:
            place = place + self.first_warp

        def tell() -> None:
            for memory, number in zip(self.totals, total, strict=True):
                memory.store(place + warp, number)

        c.when(self.lane.eq(0), tell)
        c.barrier()
        aggregate, before = [m[place] for m in self.totals], missing_part(c, function)
        for w in range(self.shape.warps - 1):
            before = part_where(c, warp > w, aggregate, before)
            aggregate = function(aggregate, [m[place + (w + 1)] for m in self.totals])
        return before, aggregate

    def _shown(self, front: ScanPart | None, vector: list[State], own: list[State], step_sum: State) -> list[list[Num]]:
        """What is stored for each element of a vector; `front` is what is before the step."""
        c, plan, initial = self.c, self.plan, self.memory.initial
        if self.shape.width == 1 and not plan.exclusive:
            state = step_sum if front is None else self.join(front, ScanPart(step_sum)).state
            return [plan.shown(c, state, state, own[0], initial)]
        ahead = front
        if self.shape.group > 1:
            others = [self._shuffled(v, 1, "up") for v in step_sum]
            lanes_before = part_where(c, self.lane > 0, others, missing_part(c, self.function))
            ahead = lanes_before if front is None else self.join(front, lanes_before)
        with_each = vector if ahead is None else [self.join(ahead, ScanPart(v)).state for v in vector]
        states = with_each
        if plan.exclusive:
            assert ahead is not None, "an exclusive scan begins with a value"
            states = [ahead.state, *with_each[:-1]]
        return [plan.shown(c, state, state, element, initial) for state, element in zip(states, own, strict=True)]

    def _store(self, t: Num, values: list[list[Num]]) -> None:
        c, width = self.c, self.shape.width
        is_inside = t < self.size
        is_stored = is_inside if self.is_row is None else is_inside & self.is_row

        def store() -> None:
            place = self.size - width - t if self.plan.reverse else t
            for k, memory in enumerate(self.memory.y):
                numbers = [v[k] for v in values]
                memory.store((self.row, place), c.pack(numbers[::-1] if self.plan.reverse else numbers))

        c.when(is_stored, store)
