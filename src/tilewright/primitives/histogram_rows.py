"""Histograms with weights, with edges of bins, or of each row by itself.

In: a `HistogramPlan`. Out: a program `x[rows, n], weights[rows, n]?, edges[bins + 1] and steps, or low, high, scale -> counts[rows, bins]` for any
number of bins; an edge is found in `steps` steps, the bits of the number of bins less one.

    CPU   a table for each of some parts of a row, then their sums, in the order of the parts
    GPU   a table of each block in shared memory where it fits, which it adds to memory's at the end; else memory's alone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.dtypes import DType, f64, i64, u32, u64
from tilewright.base.record import record
from tilewright.base.sizes import Size, ceildiv, minimum
from tilewright.base.target import Target
from tilewright.ir.program import KernelCall, Program, ProgramArray, ScalarInput
from tilewright.ir.types import Scalar, tensor
from tilewright.primitives.code import Code, Mem, Num, Param, write_kernel
from tilewright.primitives.histogram import number_dtype, widened
from tilewright.primitives.parts import call, scratch

_ROWS, _N, _BINS = Size.of("rows"), Size.of("n"), Size.of("bins")
_THREADS = 256
_CHUNK = 65536
_STRIP = 4096
_BESIDE = 8
"""Elements that a CPU looks at side by side."""
_TABLES = (256, 1024, 4096)
"""Bins of the tables that a block of a GPU may have."""


@record
class HistogramPlan:
    """`bins`: unit (each bin is one integer), even (equal parts of a range) or edges."""

    dtype: DType
    bins: str
    weights: DType | None = None
    number: DType = f64
    """The dtype in which elements are compared with what bounds the bins."""

    @property
    def key(self) -> str:
        return f"{self.dtype} {self.bins} {self.weights} {self.number}"

    @property
    def total(self) -> DType:
        """The dtype of what a bin holds."""
        return i64 if self.weights is None or not self.weights.is_float else f64


def plan_of(dtype: DType, bins: str, weights: DType | None, whole_edges: bool = False) -> HistogramPlan:
    if bins == "unit" or (bins == "edges" and whole_edges and dtype.is_int and dtype is not u64):
        return HistogramPlan(dtype, bins, weights, i64)
    return HistogramPlan(dtype, bins, weights, f64 if bins == "edges" else number_dtype(dtype))


def histogram_rows_program(plan: HistogramPlan, target: Target, parts: int, table: int = 0) -> Program:
    """Rows are cut into up to `parts` parts; `table`: for how many bins a block of a GPU has a table."""
    x = ProgramArray("x", tensor(plan.dtype, _ROWS, _N), "input")
    arrays = [x]
    if plan.weights is not None:
        arrays.append(ProgramArray("weights", tensor(plan.weights, _ROWS, _N), "input"))
    if plan.bins == "edges":
        arrays.append(ProgramArray("edges", tensor(plan.number, _BINS + 1), "input"))
    numbers = [ScalarInput("steps", i64)] if plan.bins == "edges" else [ScalarInput(name, plan.number) for name in ("low", "high", "scale")]
    counts = ProgramArray("counts", tensor(plan.total, _ROWS, _BINS), "output")
    # Sums of weights may be above 32 bits: where nothing adds to 64 at once, a table belongs to one thread, as on a CPU.
    narrow = 64 not in target.atomic_bits and plan.total is i64
    if target.simt and not (narrow and plan.weights is not None):
        calls, held = _gpu_calls(plan, arrays, numbers, counts, parts, table, narrow)
    else:
        calls, held = _cpu_calls(plan, arrays, numbers, counts, parts, table)
    return Program("histogram", (*arrays, *numbers), (counts,), tuple(held), tuple(calls))


Add = Callable[[Num, Num], None]


def _counting(c: Code, plan: HistogramPlan, given: tuple[Mem | Num, ...], row: Num, add: Add) -> Callable[[Sequence[Num]], None]:
    """What looks at some elements of a row: `add(bin, amount)` is called for each that falls into a bin."""
    memory = [v for v in given if isinstance(v, Mem)]
    numbers = [v for v in given if isinstance(v, Num)]
    bins = c.size(_BINS)

    def several(places: Sequence[Num]) -> None:
        values = [memory[0].load((row, t)).to(plan.number) for t in places]
        if plan.bins == "edges":
            edges = memory[2 if plan.weights is not None else 1]
            first, last = edges[0], edges[bins]
            found = _found(c, edges, bins, numbers[0], values)
            inside = [(value >= first) & (value <= last) for value in values]
        else:
            low, high, scale = numbers
            inside = [(value >= low) & (value <= high) for value in values]
            offsets = [value - low for value in values]
            if plan.bins != "unit":
                offsets = [(c.select(is_in, offset, 0) * scale).to(i64) for is_in, offset in zip(inside, offsets, strict=True)]
            found = [offset.max(0).min(bins - 1) for offset in offsets]
        for t, is_in, place in zip(places, inside, found, strict=True):
            amount = memory[1].load((row, t)).to(plan.total) if plan.weights is not None else c.const(1, plan.total)
            c.when(is_in, lambda place=place, amount=amount: add(place, amount))  # type: ignore[misc]

    return several


def _found(c: Code, edges: Mem, bins: Num, steps: Num, values: Sequence[Num]) -> list[Num]:
    """For each value the last bin whose lower edge is not above it; 0 where all are. Searches run side by side, in `steps` steps of powers of two."""

    def step(number: Num, *places: Num) -> list[Num]:
        shift = steps - 1 - number
        further = [place + (c.const(1, i64) << shift) for place in places]
        reached = [(place < bins) & (edges[place.min(bins)] <= value) for place, value in zip(further, values, strict=True)]
        # Shifts, not choices: those would become branches that nobody can predict.
        return [place + (is_reached.to(i64) << shift) for place, is_reached in zip(places, reached, strict=True)]

    return c.loop(0, steps, 1, [c.const(0, i64) for _ in values], step)


def _cpu_calls(
    plan: HistogramPlan, arrays: list[ProgramArray], numbers: list[ScalarInput], counts: ProgramArray, parts: int, table: int
) -> tuple[list[KernelCall], list[ProgramArray]]:
    pieces = minimum(ceildiv(_N, _CHUNK), parts)
    tables = scratch("tables", plan.total, _ROWS, pieces, _BINS)

    def count_body(c: Code, *given: Mem | Num) -> None:
        memory = [v for v in given if isinstance(v, Mem)]
        own = memory[-1]
        several, size, bins = c.size(pieces), c.size(_N), c.size(_BINS)
        row, part = c.block() // several, c.block() % several
        c.loop(0, bins, 1, [], lambda b: own.store((row, part, b), 0))

        def add(place: Num, amount: Num) -> None:
            own.store((row, part, place), own[row, part, place] + amount)

        count = _counting(c, plan, tuple(v for v in given if v is not own), row, add)
        each = c.size(ceildiv(_N, pieces))
        low = (part * each).min(size)
        high = (low + each).min(size)
        middle = low + (high - low) // _BESIDE * _BESIDE
        c.loop(low, middle, _BESIDE, [], lambda t: count([t + k for k in range(_BESIDE)]))
        c.loop(middle, high, 1, [], lambda t: count([t]))

    def sum_body(c: Code, own: Mem, counts: Mem) -> None:
        strips = c.size(ceildiv(_BINS, _STRIP))
        row, first = c.block() // strips, c.block() % strips * _STRIP

        def one(b: Num) -> None:
            (total,) = c.loop(0, c.size(pieces), 1, [c.const(0, plan.total)], lambda k, now: now + own[row, k, b])
            counts.store((row, b), total)

        c.loop(first, (first + _STRIP).min(c.size(_BINS)), 1, [], one)

    params: list[Param] = [*((a.name, a.type) for a in arrays), *((n.name, Scalar(n.dtype)) for n in numbers), (tables.name, tables.type)]
    kernels = [
        write_kernel("histogram_rows", 1, [_ROWS * pieces], params, count_body),
        write_kernel("histogram_sums", 1, [_ROWS * ceildiv(_BINS, _STRIP)], [(tables.name, tables.type), (counts.name, counts.type)], sum_body),
    ]
    return [call(k) for k in kernels], [tables]


def _gpu_calls(
    plan: HistogramPlan, arrays: list[ProgramArray], numbers: list[ScalarInput], counts: ProgramArray, parts: int, table: int, narrow: bool
) -> tuple[list[KernelCall], list[ProgramArray]]:
    """`narrow`: counts are words of 32 bits on their way."""
    pieces = minimum(ceildiv(_N, _THREADS), parts)
    total = u32 if narrow else plan.total
    result, counts = counts, scratch("words", u32, _ROWS, _BINS) if narrow else counts

    def clear_body(c: Code, counts: Mem) -> None:
        place = c.block() * _THREADS + c.thread()
        bins = c.size(_BINS)
        c.when(place < c.size(_ROWS) * bins, lambda: counts.store((place // bins, place % bins), 0))

    def body(c: Code, *given: Mem | Num) -> None:
        counts = next(v for v in reversed(given) if isinstance(v, Mem))
        several, size, bins, thread = c.size(pieces), c.size(_N), c.size(_BINS), c.thread()
        row, part = c.block() // several, c.block() % several
        own = c.shared(total, table) if table else None
        if own is not None:
            c.loop(thread, bins, _THREADS, [], lambda b: own.store(b, 0))
            c.barrier()

        def add(place: Num, amount: Num) -> None:
            amount = amount.to(total)
            if own is not None:
                _discard(own.atomic("add", place, amount, scope="block"))
            else:
                _discard(counts.atomic("add", (row, place), amount))

        count = _counting(c, plan, tuple(v for v in given if v is not counts), row, add)
        c.loop(part * _THREADS + thread, size, several * _THREADS, [], lambda t: count([t]))
        if own is not None:
            c.barrier()
            c.loop(thread, bins, _THREADS, [], lambda b: _discard(counts.atomic("add", (row, b), own[b])))

    params: list[Param] = [*((a.name, a.type) for a in arrays), *((n.name, Scalar(n.dtype)) for n in numbers), (counts.name, counts.type)]
    kernels = [
        write_kernel("clear_counts", _THREADS, [ceildiv(_ROWS * _BINS, _THREADS)], [(counts.name, counts.type)], clear_body),
        write_kernel("histogram_rows", _THREADS, [_ROWS * pieces], params, body),
    ]
    if not narrow:
        return [call(k) for k in kernels], []
    kernels.append(widened(counts.name, counts.type, result.name, result.type))
    return [call(k) for k in kernels], [counts]


def _discard(_: Num) -> None: ...


def table_for(target: Target, bins: int) -> int:
    """For how many bins a block has a table; 0: none."""
    return next((size for size in _TABLES if bins <= size and size * 8 <= target.max_shared), 0) if target.simt else 0


def parts_of(target: Target, rows: int) -> int:
    """Into how many parts a row is cut at most."""
    wanted, parts = (target.multiprocessors * 8 if target.simt else 16), 1
    while rows * parts < wanted and parts < 1024:
        parts *= 2
    return parts
