"""Scans of rows on a GPU whose blocks cannot wait for each other: what each stretch amounts to, what is before each, then the stretches themselves.

In: a `ScanPlan`. Out: a program `x[rows, n]… -> y[rows, n]…` of three kernels. A thread walks a stretch of neighbours, as a thread of a CPU does (`cpu_scan`). A block for
each row joins its stretches: each of its threads some that follow one another, then the threads among themselves in shared memory. Rows that are one stretch need
one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.sizes import Size, ceildiv
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import Program
from tilewright.ir.types import Scalar, Tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.cpu_scan import ScanWalk, interface, unpack
from tilewright.primitives.parts import call, scratch
from tilewright.primitives.scan import ScanPart, joiner, missing_part
from tilewright.primitives.scan_plan import ScanPlan, State

ROWS, N = Size.of("rows"), Size.of("n")
_THREADS = 64
STRETCH = 64
"""Elements of one thread."""
_JOINERS = 128
"""Threads of the block that joins the stretches of a row."""


def threads_scan_program(plan: ScanPlan, split: bool) -> Program:
    """With `split`, rows are cut into stretches."""
    params, inputs, outputs = interface(plan, (ROWS, N))
    several = ceildiv(N, STRETCH) if split else Size.of(1)
    walkers = ROWS * several
    blocks = [ceildiv(walkers, _THREADS)]
    dtypes = plan.function.dtypes
    states = [scratch(f"state{k}", d, ROWS, several) for k, d in enumerate(dtypes)]
    held = [(a.name, a.type) for a in states]

    def mine(c: Code) -> tuple[Num, Num, Num, Num, Num]:
        walker, size = c.block() * _THREADS + c.thread(), c.size(N)
        if not split:
            return walker, walker, c.index(0), c.index(0), size
        r, k = walker // c.size(several), walker % c.size(several)
        return walker, r, k, k * STRETCH, ((k + 1) * STRETCH).min(size)

    def total_body(c: Code, *given: Mem | Num) -> None:
        lines, sums = unpack(plan, given)
        walker, r, k, low, high = mine(c)

        def one() -> None:
            for memory, value in zip(sums, ScanWalk(c, plan, lines, r, c.size(N), vectors=False).total(low, high), strict=True):
                memory.store((r, k), value)

        c.when(walker < c.size(walkers), one)

    def body(c: Code, *given: Mem | Num) -> None:
        lines, first = unpack(plan, given)
        walker, r, k, low, high = mine(c)

        def one() -> None:
            walk = ScanWalk(c, plan, lines, r, c.size(N), vectors=False)
            if split:
                walk.run(low, high, [m[r, k] for m in first], None if plan.init else k > 0)
            else:
                walk.run(low, high, plan.start(c, lines.initial) if plan.init else None, None)

        c.when(walker < c.size(walkers), one)

    if not split:
        return Program("scan", tuple(inputs), tuple(outputs), (), (call(write_kernel("scan_rows", _THREADS, blocks, params, body)),))
    # The kernel of totals writes no result: it takes the arrays that are read.
    kernels = [
        write_kernel("scan_totals", _THREADS, blocks, [*params, *held], total_body),
        _before_kernel(plan, several, held),
        write_kernel("scan_rows", _THREADS, blocks, [*params, *held], body),
    ]
    return Program("scan", tuple(inputs), tuple(outputs), tuple(states), tuple(map(call, kernels)))


def _before_kernel(plan: ScanPlan, several: Size, arrays: Sequence[tuple[str, Tensor]]) -> Kernel:
    """What each stretch of a row amounts to becomes what is before it; a block for each row."""
    function = plan.function
    numbers = [(n, Scalar(d)) for n, d in zip(plan.initial, plan.value_dtypes, strict=False)]

    def body(c: Code, *given: Mem | Num) -> None:
        states = [v for v in given if isinstance(v, Mem)]
        initial = [v for v in given if isinstance(v, Num)]
        row, thread, size = c.block(), c.thread(), c.size(several)
        each = c.size(ceildiv(several, _JOINERS))
        low = (thread * each).min(size)
        high = (low + each).min(size)
        join, empty = joiner(c, function), missing_part(c, function)

        def joined(part: ScanPart, state: State) -> list[Num]:
            found = join(part, ScanPart(state))
            there = [] if part.there is None else [c.const(True, part.there.dtype)]
            return [*found.state, *there]

        def part(values: Sequence[Num]) -> ScanPart:
            return ScanPart(list(values)) if empty.there is None else ScanPart(list(values[:-1]), values[-1])

        def flat(one: ScanPart) -> list[Num]:
            return [*one.state, *([] if one.there is None else [one.there])]

        own = c.loop(low, high, 1, flat(empty), lambda k, *now: joined(part(now), [m[row, k] for m in states]))
        shared = [c.shared(v.dtype, _JOINERS) for v in own]
        for memory, value in zip(shared, own, strict=True):
            memory.store(thread, value)
        c.barrier()
        start = plan.start(c, initial) if plan.init else None
        first = flat(empty) if start is None else flat(ScanPart(start, None if empty.there is None else c.const(True, empty.there.dtype)))
        before = c.loop(0, thread.min(size), 1, first, lambda k, *now: flat(join(part(now), part([m[k] for m in shared]))))

        def step(k: Num, *now: Num) -> list[Num]:
            mine = [m[row, k] for m in states]
            for memory, value in zip(states, now, strict=False):
                memory.store((row, k), value)
            return joined(part(now), mine)

        c.loop(low, high, 1, before, step)

    return write_kernel("scan_before", _JOINERS, [ROWS], [*arrays, *numbers], body)


def is_cut(rows: int, size: int) -> bool:
    """Whether rows of that number and length are cut into stretches: not where they are short, or where there are threads enough without."""
    return size > STRETCH and not (rows >= 4096 and size <= 16 * STRETCH)
