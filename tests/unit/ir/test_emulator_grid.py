"""Barriers of the whole grid in the emulator: blocks that hand values on, races between blocks, blocks that never come."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tilewright.base.dtypes import f32, i64
from tilewright.base.errors import UserError
from tilewright.base.sizes import Size
from tilewright.base.source import Source, Span
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_kernel
from tilewright.ir.emulator.machine import RESIDENT
from tilewright.ir.nodes import Block, Kernel, Stage, Value
from tilewright.ir.types import tensor
from tilewright.ir.verify import verify_kernel

TEXT = Source("k.zyn", "\n".join(f"line {n}" for n in range(1, 21)))


def line(number: int) -> Span:
    return Span(TEXT, number, 1, number, 5)


def kernel(params: list[Value], grid: int | str, threads: int, body: Callable[[Builder], None], **attrs: bool) -> Kernel:
    builder = Builder(line(1))
    body(builder)
    made = Kernel("k", Stage.THREAD, tuple(params), Block((), tuple(builder.ops)), (Size.of(grid),), threads, attrs=attrs)
    verify_kernel(made)
    return made


def rotate(threads: int, rounds: int, barrier: bool = True) -> Kernel:
    """Each block writes its part of x, then reads that of the next block, over and over."""
    x = Value(tensor(f32, "n"), "x")

    def body(b: Builder) -> None:
        thread, block, blocks = b.op("thread_id"), b.op("program_id", axis=0), b.op("grid_size", axis=0)
        width = b.index(threads)
        own = b.add(b.mul(block, width), thread)
        following = b.op("mod", b.add(block, b.index(1)), blocks)
        other = b.add(b.mul(following, width), thread)
        for _ in range(rounds):
            with b.at(line(3)):
                value = b.op("load", x, other)
            if barrier:
                b.multi("grid_barrier")
            with b.at(line(5)):
                b.multi("store", x, own, b.add(value, b.const(1.0, f32)))
            b.multi("grid_barrier")

    return kernel([x], "blocks", threads, body)


@pytest.mark.parametrize("threads", [32, 48, 96])
@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_blocks_hand_values_on(blocks: int, threads: int) -> None:
    x = np.arange(blocks * threads, dtype=np.float32)
    wanted = np.roll(x.reshape(blocks, threads), -3, axis=0).reshape(-1) + 3
    run_kernel(rotate(threads, 3), [x], {"n": len(x), "blocks": blocks})
    np.testing.assert_array_equal(x, wanted)


def test_a_grid_without_blocks_does_nothing() -> None:
    run_kernel(rotate(32, 2), [np.zeros(0, np.float32)], {"n": 0, "blocks": 0})


def test_without_the_barrier_it_is_a_race() -> None:
    with pytest.raises(UserError, match=r"race on global memory: store of 'x'.*another block") as caught:
        run_kernel(rotate(32, 1, barrier=False), [np.arange(128, dtype=np.float32)], {"n": 128, "blocks": 4})
    assert "k.zyn:5" in str(caught.value)


def test_a_block_alone_races_with_nobody() -> None:
    x = np.arange(32, dtype=np.float32)
    run_kernel(rotate(32, 1, barrier=False), [x], {"n": 32, "blocks": 1})
    np.testing.assert_array_equal(x, np.arange(32) + 1)


def leaver(threads: int) -> Kernel:
    """Block 2 ends before the barrier."""
    x = Value(tensor(i64, "n"), "x")

    def body(b: Builder) -> None:
        block = b.op("program_id", axis=0)

        def meet(inner: Builder) -> list[Value]:
            with inner.at(line(9)):
                inner.multi("grid_barrier")
            inner.multi("store", x, block, block)
            return []

        b.if_(b.op("ne", block, b.index(2)), meet, lambda inner: [])

    return kernel([x], "blocks", threads, body)


def test_a_block_that_never_comes_is_a_deadlock() -> None:
    with pytest.raises(UserError, match=r"deadlock.*for all blocks at the grid_barrier at k.zyn:9.*block \(2\) has ended"):
        run_kernel(leaver(64), [np.zeros(4, np.int64)], {"n": 4, "blocks": 4})


def test_without_that_block_all_come() -> None:
    x = np.full(2, -1, np.int64)
    run_kernel(leaver(64), [x], {"n": 2, "blocks": 2})
    np.testing.assert_array_equal(x, [0, 1])


def test_half_a_warp_must_not_wait() -> None:
    x = Value(tensor(f32, "n"), "x")

    def body(b: Builder) -> None:
        def meet(inner: Builder) -> list[Value]:
            inner.multi("grid_barrier")
            return []

        b.if_(b.op("lt", b.op("thread_id"), b.index(16)), meet, lambda inner: [])

    with pytest.raises(UserError, match="divergent grid_barrier: only 16 of 32 threads of warp 0 of block \\(0\\)"):
        run_kernel(kernel([x], 2, 32, body), [np.zeros(1, np.float32)], {"n": 1})


def test_a_persistent_kernel_has_few_blocks() -> None:
    """Blocks stride over more work than there are blocks; some come round once more than others before they meet."""
    work = 2 * RESIDENT + 3
    counts, sums = Value(tensor(i64, "n"), "counts"), Value(tensor(i64, "n"), "sums")

    def body(b: Builder) -> None:
        first, step = b.op("program_id", axis=0), b.op("grid_size", axis=0)

        def count(inner: Builder, i: Value) -> list[Value]:
            inner.multi("store", counts, i, step)
            inner.multi("barrier")
            return []

        def turn(inner: Builder, i: Value) -> list[Value]:
            mirrored = inner.sub(inner.index(work - 1), i)
            inner.multi("store", sums, i, inner.add(inner.op("load", counts, mirrored), mirrored))
            return []

        b.for_(first, b.index(work), step, [], count)
        b.multi("grid_barrier")
        b.for_(first, b.index(work), step, [], turn)

    found, results = np.zeros(work, np.int64), np.zeros(work, np.int64)
    run_kernel(kernel([counts, sums], work, 64, body, persistent=True), [found, results], {"n": work})
    np.testing.assert_array_equal(found, RESIDENT)
    np.testing.assert_array_equal(results, RESIDENT + np.arange(work)[::-1])
