"""Filter, histogram and reduction on a CPU: chunks of the data, each the work of one block, in two walks over the data.

In: as for the programs of GPUs. Out: programs of up to three kernels: what each chunk amounts to; what is before each chunk, in one
block; the results of each chunk. Scans are in `cpu_scan`.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.base.chunks import chunk
from tilewright.base.dtypes import DType, bool_, i64, u32
from tilewright.base.sizes import Size, ceildiv, minimum
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import Program, ProgramArray, ScalarInput
from tilewright.ir.types import Scalar, Type, tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.filter import differs
from tilewright.primitives.functions import Monoid, ScalarFunction
from tilewright.primitives.histogram import number_dtype
from tilewright.primitives.parts import call, scratch

N = Size.of("n")
CHUNK = 65536
"""Elements of a block."""
VECTOR = 64
"""Bytes of a vector."""


def reduce_program_cpu(dtype: DType, monoid: Monoid, result: DType) -> Program:
    """The program `x, init -> y`."""
    chunks = ceildiv(N, chunk(CHUNK))
    totals = scratch("totals", monoid.dtype, chunks)
    x, y = tensor(dtype, N), tensor(result, 1)

    def total_body(c: Code, x: Mem, totals: Mem) -> None:
        low, high = _bounds(c)
        totals.store(c.block(), _combined(c, monoid, x, low, high))

    def last_body(c: Code, totals: Mem, y: Mem, init: Num) -> None:
        (value,) = c.loop(0, c.size(chunks), 1, [init], lambda i, now: monoid(now, totals[i]))
        y.store(0, value.to(result))

    kernels = [
        _kernel("reduce", [chunks], [("x", x), ("totals", totals.type)], total_body),
        _kernel("reduce_parts", [1], [("totals", totals.type), ("y", y), ("init", Scalar(monoid.dtype))], last_body),
    ]
    inputs = (ProgramArray("x", x, "input"), ScalarInput("init", monoid.dtype))
    return Program("reduce", inputs, (ProgramArray("y", y, "output"),), (totals,), tuple(call(k) for k in kernels))


def filter_program_cpu(dtype: DType, predicate: ScalarFunction | None, heads: bool = False, trues: bool = False, values: bool = False) -> Program:
    """The program `x, mask? -> y, count`; with `heads` or `trues` as `filter.filter_program`, with `heads` and `values` the elements at those places."""
    positions = (heads and not values) or trues
    chunks = ceildiv(N, chunk(CHUNK))
    kept = i64 if positions else dtype
    totals, before = scratch("totals", i64, chunks), scratch("before", i64, chunks)
    x, y, count = tensor(dtype, N), tensor(kept, N), tensor(i64, 1)
    given: list[tuple[str, Type]] = [("x", x)]
    if predicate is None and not heads and not trues:
        given.append(("mask", tensor(bool_, N)))

    by_vectors = not heads and (predicate is None or predicate.is_straight) and not dtype.is_bool

    def test(x: Mem, masks: list[Mem], i: Num) -> Num:
        if heads:
            return differs(x.code, x.load((i - 1).max(0)), x.load(i)) | i.eq(0)
        if trues:
            return x.load(i)
        return masks[0].load(i) if predicate is None else predicate.apply(x.code, x.load(i))

    def total_body(c: Code, x: Mem, *rest: Mem) -> None:
        *masks, totals = rest
        low, high = _bounds(c)
        width = VECTOR // 4
        step = 4 * width
        # Sums of vectors have 32 bits: a chunk has fewer elements.
        middle = low + (high - low) // step * step if by_vectors else low

        def several(i: Num, *sums: Num) -> list[Num]:
            places = [i + k * width for k in range(4)]
            if predicate is None:
                flags = [masks[0].load(p, width, unaligned=True) for p in places]
            else:
                flags = [predicate.apply_vector(c, x.load(p, width, unaligned=True)) for p in places]
            return [s + f.to(u32) for s, f in zip(sums, flags, strict=True)]

        whole = c.const(0, i64)
        if by_vectors:
            zero = c.op("broadcast", c.const(0, u32), width=width)
            parts = c.loop(low, middle, step, [zero] * 4, several)
            for lane in ((parts[0] + parts[1]) + (parts[2] + parts[3])).lanes():
                whole = whole + lane.to(i64)
        (whole,) = c.loop(middle, high, 1, [whole], lambda i, s: s + test(x, masks, i).to(i64))
        totals.store(c.block(), whole)

    def body(c: Code, x: Mem, *rest: Mem) -> None:
        *masks, y, before = rest
        low, high = _bounds(c)
        # What is kept goes to a place of its own first: behind it a store of what is not kept does no harm.
        staged = c.alloc("local", kept, _STAGED + _UNROLL, align=64)

        def batch(first: Num, place: Num) -> Num:
            end = (first + _STAGED).min(high)
            middle = first + (end - first) // _UNROLL * _UNROLL

            def one(i: Num, used: Num) -> Num:
                staged.store(used, i if positions else x.load(i))
                return used + test(x, masks, i).to(i64)

            def several(i: Num, used: Num) -> Num:
                for k in range(_UNROLL):
                    used = one(i + k, used)
                return used

            (used,) = c.loop(first, middle, _UNROLL, [c.const(0, i64)], several)
            (used,) = c.loop(middle, end, 1, [used], one)
            _copy(c, y, place, staged, used)
            return place + used

        c.loop(low, high, _STAGED, [before[c.block()]], batch)

    monoid = Monoid(i64, "add")
    kernels = [_kernel("filter_totals", [chunks], [*given, ("totals", totals.type)], total_body)]
    kernels.append(_prefix_kernel(monoid, totals, before, chunks, False, ("count", count)))
    kernels.append(_kernel("filter", [chunks], [*given, ("y", y), ("before", before.type)], body))
    inputs = tuple(ProgramArray(name, type_, "input") for name, type_ in given)  # type: ignore[arg-type]
    outputs = (ProgramArray("y", y, "output"), ProgramArray("count", count, "output"))
    return Program("filter", inputs, outputs, (totals, before), tuple(call(k) for k in kernels))


_STAGED = 2048
_UNROLL = 8


def runs_program_cpu(dtype: DType) -> Program:
    """As `filter.runs_program`."""
    count = Size.of("m")
    x, places = tensor(dtype, N), tensor(i64, count)
    values, lengths = tensor(dtype, count), tensor(i64, count)

    def body(c: Code, x: Mem, places: Mem, values: Mem, lengths: Mem) -> None:
        number = c.size(count)
        low = c.block() * chunk(CHUNK)
        last = number - 1

        def one(i: Num) -> None:
            here = places[i]
            values.store(i, x[here])
            lengths.store(i, c.select(i < last, places[(i + 1).min(last)], c.size(N)) - here)

        c.loop(low, (low + chunk(CHUNK)).min(number), 1, [], one)

    params: list[tuple[str, Type]] = [("x", x), ("places", places), ("values", values), ("lengths", lengths)]
    arrays = [ProgramArray(name, type_, "input" if k < 2 else "output") for k, (name, type_) in enumerate(params)]  # type: ignore[arg-type]
    kernel = _kernel("runs", [ceildiv(count, chunk(CHUNK))], params, body)
    return Program("runs", tuple(arrays[:2]), tuple(arrays[2:]), (), (call(kernel),))


def histogram_program_cpu(dtype: DType, bins: int, unit: bool, chunks: int = 16) -> Program:
    """The program `x, low, high, scale -> counts` of `histogram.histogram_program`: a table for each of some chunks, then their sums."""
    pieces = minimum(ceildiv(N, chunk(CHUNK)), chunks)
    tables = scratch("tables", i64, pieces * bins)
    number = i64 if unit else number_dtype(dtype)
    x, counts = tensor(dtype, N), tensor(i64, bins)
    bounds: list[tuple[str, Type]] = [(name, Scalar(number)) for name in ("low", "high", "scale")]

    def count_body(c: Code, x: Mem, tables: Mem, low: Num, high: Num, scale: Num) -> None:
        base = c.block() * bins
        c.loop(0, bins, 1, [], lambda i: tables.store(base + i, 0))
        size, several = c.size(N), c.size(pieces)

        def one(i: Num) -> None:
            value = x.load(i).to(number)
            inside = (value >= low) & (value <= high)
            offset = value - low
            place = (offset if unit else (offset * scale).to(i64)).max(0).min(bins - 1)
            where = base + place
            tables.store(where, tables[where] + inside.to(i64))

        c.loop(c.block() * size // several, (c.block() + 1) * size // several, 1, [], one)

    def sum_body(c: Code, tables: Mem, counts: Mem) -> None:
        low = c.block() * _BINS

        def one(i: Num) -> None:
            (total,) = c.loop(0, c.size(pieces), 1, [c.const(0, i64)], lambda k, now: now + tables[k * bins + i])
            counts.store(i, total)

        c.loop(low, (low + _BINS).min(bins), 1, [], one)

    kernels = [
        _kernel("histogram", [pieces], [("x", x), ("tables", tables.type), *bounds], count_body),
        _kernel("histogram_sums", [-(-bins // _BINS)], [("tables", tables.type), ("counts", counts)], sum_body),
    ]
    inputs: list[ProgramArray | ScalarInput] = [ProgramArray("x", x, "input"), *(ScalarInput(name, number) for name, _ in bounds)]
    return Program("histogram", tuple(inputs), (ProgramArray("counts", counts, "output"),), (tables,), tuple(call(k) for k in kernels))


_BINS = 4096


def _kernel(name: str, grid: list[Size | int], params: list[tuple[str, Type]], body: Callable[..., None]) -> Kernel:
    return write_kernel(name, 1, grid, params, body)


def _bounds(c: Code) -> tuple[Num, Num]:
    low = c.block() * chunk(CHUNK)
    return low, (low + chunk(CHUNK)).min(c.size(N))


def _prefix_kernel(
    monoid: Monoid, totals: ProgramArray, before: ProgramArray, chunks: Size, init: bool, count: tuple[str, Type] | None = None
) -> Kernel:
    """What is before each chunk; with `count` also what all of them amount to. Of the first chunk it is `init`, else zero."""

    def body(c: Code, totals: Mem, before: Mem, *rest: Mem | Num) -> None:
        first = rest[-1] if init else c.const(0, monoid.dtype)
        assert isinstance(first, Num)

        def step(i: Num, now: Num) -> Num:
            before.store(i, now)
            value = totals[i]
            joined = monoid(now, value)
            return joined if init or monoid.identity is not None else c.select(i.eq(0), value, joined)

        (whole,) = c.loop(0, c.size(chunks), 1, [first], step)
        if count is not None:
            assert isinstance(rest[0], Mem)
            rest[0].store(0, whole)

    params: list[tuple[str, Type]] = [(totals.name, totals.type), (before.name, before.type)]
    params += [count] if count is not None else []
    params += [("init", Scalar(monoid.dtype))] if init else []
    return _kernel("chunks_before", [1], params, body)


def _combined(c: Code, monoid: Monoid, x: Mem, low: Num, high: Num) -> Num:
    """What the elements of a range, which is not empty, amount to."""
    if monoid.function is None and not monoid.dtype.is_bool:
        return _combined_vectors(c, monoid, x, low, high)

    def step(i: Num, now: Num) -> Num:
        return monoid(now, x.load(i).to(monoid.dtype))

    return c.loop(low + 1, high, 1, [x.load(low).to(monoid.dtype)], step)[0]


def _combined_vectors(c: Code, monoid: Monoid, x: Mem, low: Num, high: Num) -> Num:
    """A function known by name, on four vectors at a time."""
    width = VECTOR // max(x.dtype.itemsize, monoid.dtype.itemsize)
    step = 4 * width
    whole = low + (high - low) // step * step
    assert monoid.identity is not None
    nothing = c.op("broadcast", c.const(monoid.identity, monoid.dtype), width=width)

    def several(i: Num, *running: Num) -> list[Num]:
        return [
            monoid(now, x.load(i + k * width, width, unaligned=True).to(monoid.dtype)) for k, now in enumerate(running)
        ]

    a, b, d, e = c.loop(low, whole, step, [nothing] * 4, several)
    values = monoid(monoid(a, b), monoid(d, e)).lanes()
    while len(values) > 1:
        values = [monoid(values[k], values[k + len(values) // 2]) for k in range(len(values) // 2)]
    return c.loop(whole, high, 1, [values[0]], lambda i, now: monoid(now, x.load(i).to(monoid.dtype)))[0]


def _copy(c: Code, y: Mem, place: Num, staged: Mem, count: Num) -> None:
    width = VECTOR // y.dtype.itemsize
    if y.dtype is bool_:
        c.loop(0, count, 1, [], lambda i: y.store(place + i, staged[i]))
        return
    whole = count // width * width
    c.loop(0, whole, width, [], lambda i: y.store(place + i, staged.load(i, width), unaligned=True))
    c.loop(whole, count, 1, [], lambda i: y.store(place + i, staged[i]))


