"""The emulator at the thread stage: vectors, shuffles, shared memory, barriers, warps that part ways, faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tilewright.base.dtypes import DType, f32, i32, i64, u32
from tilewright.base.errors import UserError
from tilewright.base.sizes import Size, ceildiv
from tilewright.base.source import Source, Span
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_kernel
from tilewright.ir.emulator.warps.thread import HELD, LANES, Waits
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value
from tilewright.ir.types import BOOL, INDEX, Scalar, Tensor, tensor

N = Size.of("n")
TEXT = Source("k.zyn", "\n".join(f"line {n}" for n in range(1, 21)))


def line(number: int) -> Span:
    return Span(TEXT, number, 1, number, 5)


def kernel(
    params: Sequence[Value], grid: Sequence[Size | int], threads: int, body: Callable[[Builder], None]
) -> Kernel:
    builder = Builder(line(1))
    body(builder)
    sizes = tuple(Size.of(g) for g in grid)
    return Kernel("k", Stage.THREAD, tuple(params), Block((), tuple(builder.ops)), sizes, threads)


def nothing(b: Builder) -> list[Value]:
    return []


def shared(b: Builder, dtype: DType, *shape: int, name: str = "buffer") -> Value:
    return b.op("alloc", name=name, dtype=dtype, shape=shape, space="shared")


def global_index(b: Builder, threads: int) -> Value:
    return b.add(b.mul(b.op("program_id", axis=0), b.index(threads)), b.op("thread_id"))


# -- elementwise and vectors ----------------------------------------------------------------------------------------


def guarded_map(threads: int, guard: bool = True) -> Kernel:
    x, out = Value(tensor(f32, "n"), "x"), Value(tensor(f32, "n"), "out")

    def body(b: Builder) -> None:
        i = global_index(b, threads)

        def work(b: Builder) -> list[Value]:
            with b.at(line(7)):
                value = b.op("load", x, i)
            b.multi("store", out, i, b.add(value, value))
            return []

        if guard:
            b.if_(b.op("lt", i, b.index(N)), work, nothing)
        else:
            work(b)

    return kernel([x, out], [ceildiv(N, threads)], threads, body)


@pytest.mark.parametrize("threads", [1, 32, 48, 128])
@pytest.mark.parametrize("n", [1, 31, 100])
def test_guarded_map_with_partial_warps(n: int, threads: int) -> None:
    data = np.arange(n, dtype=np.float32)
    result = np.full(n, -1, np.float32)
    run_kernel(guarded_map(threads), [data, result], {"n": n})
    np.testing.assert_array_equal(result, data * 2)


def test_out_of_bounds_names_block_thread_and_line() -> None:
    with pytest.raises(UserError) as error:
        run_kernel(guarded_map(64, guard=False), [np.ones(100, np.float32), np.ones(100, np.float32)], {"n": 100})
    assert str(error.value) == (
        "k.zyn:7:1: error[TW050]: load of 'x' at [100] is out of bounds: index 100, extent 100, in block (1), thread 36\n"
        "   |\n 7 | line 7\n   | ^^^^"
    )


def vector_copy(shift: int = 0, shape: tuple[Size, ...] = (N,), strides: tuple[Size, ...] = (Size.of(1),)) -> Kernel:
    x, out = Value(Tensor(f32, shape, strides), "x"), Value(tensor(f32, "n"), "out")

    def body(b: Builder) -> None:
        start = b.add(b.mul(global_index(b, 32), b.index(4)), b.index(shift))

        def copy(b: Builder) -> list[Value]:
            lanes = (
                [start] if len(shape) == 1 else [b.op("floordiv", start, b.index(8)), b.op("mod", start, b.index(8))]
            )
            four = b.op("load", x, *lanes, width=4)
            swapped = b.op("pack", *(b.op("extract", four, lane=lane) for lane in (3, 2, 1, 0)))
            b.multi("store", out, start, b.op("mul", swapped, b.op("broadcast", b.const(10.0, f32), width=4)))
            return []

        b.if_(b.op("lt", start, b.index(N)), copy, nothing)

    return kernel([x, out], [ceildiv(N, 128)], 32, body)


def test_vector_load_store_extract_pack() -> None:
    data = np.arange(200, dtype=np.float32)
    result = np.empty(200, np.float32)
    run_kernel(vector_copy(), [data, result], {"n": 200})
    np.testing.assert_array_equal(result, data.reshape(-1, 4)[:, ::-1].reshape(-1) * 10)


def test_vectors_in_a_padded_array() -> None:
    padded = np.arange(48, dtype=np.float32).reshape(4, 12)
    data, result = padded[:, :8], np.empty(32, np.float32)
    run_kernel(vector_copy(0, (Size.of(4), Size.of(8)), (Size.of(12), Size.of(1))), [data, result], {"n": 32})
    np.testing.assert_array_equal(result, data.reshape(-1, 4)[:, ::-1].reshape(-1) * 10)


def test_a_vector_over_the_end_is_out_of_bounds() -> None:
    data = np.ones(30, np.float32)
    with pytest.raises(
        UserError, match=r"load of 4 elements of 'x' is out of bounds: element 30 in memory, extents \[30\]"
    ):
        run_kernel(vector_copy(), [data, np.ones(30, np.float32)], {"n": 30})


def test_a_vector_into_the_padding_is_out_of_bounds() -> None:
    x, out = Value(Tensor(f32, (Size.of(4), Size.of(6)), (Size.of(8), Size.of(1))), "x"), Value(tensor(f32, 4), "out")

    def body(b: Builder) -> None:
        b.multi("store", out, b.index(0), b.op("load", x, b.index(0), b.index(4), width=4))

    data = np.ones((4, 8), np.float32)[:, :6]
    with pytest.raises(UserError, match=r"element 6 in memory, extents \[4, 6\], in block \(0\), thread 0"):
        run_kernel(kernel([x, out], [1], 1, body), [data, np.ones(4, np.float32)], {})


def test_a_misaligned_vector_is_a_fault() -> None:
    with pytest.raises(UserError, match="'x' from element 1 on is misaligned: a vector of 16 bytes"):
        run_kernel(vector_copy(shift=1), [np.ones(200, np.float32), np.ones(200, np.float32)], {"n": 200})
    # The array itself may start at an odd address.
    with pytest.raises(UserError, match="misaligned"):
        run_kernel(vector_copy(), [np.ones(201, np.float32)[1:], np.ones(200, np.float32)], {"n": 200})


def test_local_memory_is_each_thread_s_own() -> None:
    out = Value(tensor(i64, 64), "out")

    def body(b: Builder) -> None:
        t = b.op("thread_id")
        own = b.op("alloc", name="own", dtype=i64, shape=(3,), space="local")
        b.for_(b.index(0), b.index(3), b.index(1), [], lambda b, k: (b.multi("store", own, k, b.mul(t, k)), [])[1])
        b.multi("store", out, t, b.op("load", own, b.op("mod", t, b.index(3))))

    result = np.empty(64, np.int64)
    run_kernel(kernel([out], [1], 64, body), [result], {})
    np.testing.assert_array_equal(result, [t * (t % 3) for t in range(64)])


# -- warps ----------------------------------------------------------------------------------------------------------


def shuffle_reference(mode: str, operand: int, width: int, lane: int) -> int:
    """The lane read, as PTX's shfl defines it."""
    low = lane // width * width
    high = low + width - 1
    if mode == "idx":
        return low + operand % width
    source = {"up": lane - operand, "down": lane + operand, "xor": lane ^ operand}[mode]
    return lane if source > high or (mode == "up" and source < low) else source


@pytest.mark.parametrize("mode", ["idx", "up", "down", "xor"])
@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize("operand", [0, 1, 5, 16])
def test_shuffle(mode: str, width: int, operand: int) -> None:
    out = Value(tensor(i64, 64), "out")

    def body(b: Builder) -> None:
        t = b.op("thread_id")
        b.multi("store", out, t, b.op("shuffle", t, b.const(operand, i32), mode=mode, width=width))

    result = np.empty(64, np.int64)
    run_kernel(kernel([out], [1], 64, body), [result], {})
    expected = [t // 32 * 32 + shuffle_reference(mode, operand, width, t % 32) for t in range(64)]
    np.testing.assert_array_equal(result, expected)


def test_shuffle_from_an_inactive_lane_is_a_fault() -> None:
    out = Value(tensor(i64, 32), "out")

    def body(b: Builder) -> None:
        t = b.op("thread_id")

        def half(b: Builder) -> list[Value]:
            b.multi("store", out, t, b.op("shuffle", t, b.const(8, i32), mode="down"))
            return []

        b.if_(b.op("lt", t, b.index(16)), half, nothing)

    with pytest.raises(
        UserError, match="shuffle reads lane 16 of its warp, which is not active, in block \\(0\\), thread 8"
    ):
        run_kernel(kernel([out], [1], 32, body), [np.empty(32, np.int64)], {})


def test_vote_counts_active_lanes_only() -> None:
    ballots, flags = Value(tensor(u32, 64), "ballots"), Value(tensor(BOOL.dtype, 64, 2), "flags")

    def body(b: Builder) -> None:
        t = b.op("thread_id")
        odd = b.op("eq", b.op("mod", t, b.index(2)), b.index(1))

        def vote(b: Builder) -> list[Value]:
            b.multi("store", ballots, t, b.op("vote", odd, mode="ballot"))
            b.multi("store", flags, t, b.index(0), b.op("vote", odd, mode="any"))
            b.multi("store", flags, t, b.index(1), b.op("vote", b.op("lt", t, b.index(40)), mode="all"))
            return []

        b.if_(b.op("lt", t, b.index(40)), vote, nothing)

    masks, found = np.zeros(64, np.uint32), np.zeros((64, 2), np.bool_)
    run_kernel(kernel([ballots, flags], [1], 64, body), [masks, found], {})
    assert set(masks[:32]) == {0xAAAAAAAA}
    assert set(masks[32:40]) == {0xAA}
    assert not masks[40:].any()
    assert found[:40].all()


# -- shared memory and barriers -------------------------------------------------------------------------------------


def block_sum(threads: int, barrier: bool = True) -> Kernel:
    """Two levels: shuffles inside a warp, shared memory across warps; one atomic per block."""
    x, out = Value(tensor(f32, "n"), "x"), Value(tensor(f32, 1), "out")
    warps = threads // 32

    def body(b: Builder) -> None:
        t, i = b.op("thread_id"), global_index(b, threads)
        lane, warp = b.op("mod", t, b.index(32)), b.op("floordiv", t, b.index(32))
        inside = b.op("lt", i, b.index(N))
        total = b.op("load", x, i, inside, masked=True)
        for delta in (16, 8, 4, 2, 1):
            total = b.add(total, b.op("shuffle", total, b.const(delta, i32), mode="xor"))
        buffer = shared(b, f32, warps)

        def keep(b: Builder) -> list[Value]:
            b.multi("store", buffer, warp, total)
            return []

        b.if_(b.op("eq", lane, b.index(0)), keep, nothing)
        if barrier:
            b.multi("barrier")

        def finish(b: Builder) -> list[Value]:
            with b.at(line(9)):
                part = b.op("load", buffer, lane, b.op("lt", lane, b.index(warps)), masked=True)
            for delta in (16, 8, 4, 2, 1):
                part = b.add(part, b.op("shuffle", part, b.const(delta, i32), mode="xor"))
            b.if_(
                b.op("eq", lane, b.index(0)),
                lambda b: (b.op("atomic", out, b.index(0), part, kind="add"), [])[1],
                nothing,
            )
            return []

        b.if_(b.op("eq", warp, b.index(0)), finish, nothing)

    return kernel([x, out], [ceildiv(N, threads)], threads, body)


@pytest.mark.parametrize("blocks_at_once", [1, 3, 1000])
def test_two_level_block_reduction(blocks_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.ir.emulator.warps.thread.LANES", blocks_at_once * 128)
    data = np.random.default_rng(0).integers(0, 9, 1000).astype(np.float32)
    result = np.zeros(1, np.float32)
    run_kernel(block_sum(128), [data, result], {"n": 1000})
    assert result[0] == data.sum()


def test_uninitialised_shared_memory_is_a_fault() -> None:
    out = Value(tensor(f32, 64), "out")

    def body(b: Builder) -> None:
        t = b.op("thread_id")
        buffer = shared(b, f32, 2, 32)
        b.if_(
            b.op("lt", t, b.index(40)),
            lambda b: (b.multi("store", buffer, b.index(1), b.op("mod", t, b.index(32)), b.const(1.0, f32)), [])[1],
            nothing,
        )
        b.multi("barrier")
        with b.at(line(5)):
            b.multi("store", out, t, b.op("load", buffer, b.op("floordiv", t, b.index(32)), b.index(3)))

    with pytest.raises(UserError) as error:
        run_kernel(kernel([out], [2], 64, body), [np.empty(64, np.float32)], {})
    assert str(error.value).splitlines()[0] == (
        "k.zyn:5:1: error[TW050]: load of uninitialised shared memory: 'buffer'[0, 3] was never written, in block (0), thread 0"
    )


def test_a_forgotten_barrier_is_a_race() -> None:
    with pytest.raises(UserError) as error:
        run_kernel(block_sum(128, barrier=False), [np.ones(256, np.float32), np.zeros(1, np.float32)], {"n": 256})
    assert str(error.value).splitlines()[0] == (
        "k.zyn:9:1: error[TW050]: race on shared memory: load of 'buffer'[1], which another warp accesses between the same "
        "barriers, in block (0), thread 1"
    )


@pytest.mark.parametrize("second_barrier", [True, False])
def test_writing_what_another_warp_still_reads_is_a_race(second_barrier: bool) -> None:
    out = Value(tensor(i64, 64), "out")

    def body(b: Builder) -> None:
        t = b.op("thread_id")
        buffer = shared(b, i64, 64)

        def round_(b: Builder, i: Value, value: Value) -> list[Value]:
            with b.at(line(8)):
                b.multi("store", buffer, t, value)
            b.multi("barrier")
            following = b.op("load", buffer, b.sub(b.index(63), t))
            if second_barrier:
                b.multi("barrier")
            return [b.add(following, b.index(1))]

        (value,) = b.for_(b.index(0), b.index(3), b.index(1), [t], round_)
        b.multi("store", out, t, value)

    result = np.empty(64, np.int64)
    run = kernel([out], [1], 64, body)
    if second_barrier:
        run_kernel(run, [result], {})
        np.testing.assert_array_equal(result, 66 - np.arange(64))
    else:
        with pytest.raises(
            UserError, match=r"k.zyn:8:1: error\[TW050\]: race on shared memory: store of 'buffer'\[0\]"
        ):
            run_kernel(run, [result], {})


def test_two_warps_writing_one_place_race_only_with_different_values() -> None:
    def body(b: Builder, same: bool) -> None:
        t = b.op("thread_id")
        b.multi("store", shared(b, i64, 1), b.index(0), b.index(3) if same else b.op("floordiv", t, b.index(32)))

    run_kernel(kernel([], [1], 64, lambda b: body(b, True)), [], {})
    with pytest.raises(UserError, match="race on shared memory: store of 'buffer'"):
        run_kernel(kernel([], [1], 64, lambda b: body(b, False)), [], {})


def test_blocks_run_together_do_not_hold_one_another_up() -> None:
    """Warp 1 passes its two barriers in two loops whose lengths differ between blocks; warp 0 in one."""
    count = Value(tensor(i64, "n", 2), "count")

    def body(b: Builder) -> None:
        p, t = b.op("program_id", axis=0), b.op("thread_id")
        zero, one, two = b.index(0), b.index(1), b.index(2)

        def wait(b: Builder, i: Value, total: Value) -> list[Value]:
            b.multi("barrier")
            return [b.add(total, one)]

        def first(b: Builder) -> list[Value]:
            return list(b.for_(zero, two, one, [zero], wait))

        def second(b: Builder) -> list[Value]:
            own = b.add(b.op("mod", p, two), one)
            (total,) = b.for_(zero, own, one, [zero], wait)
            return list(b.for_(own, two, one, [total], wait))

        warp = b.op("floordiv", t, b.index(32))
        (total,) = b.if_(b.op("eq", warp, zero), first, second)
        b.op("atomic", count, p, warp, total, kind="add")

    result = np.zeros((4, 2), np.int64)
    run_kernel(kernel([count], [N], 64, body), [result], {"n": 4})
    np.testing.assert_array_equal(result, np.full((4, 2), 64))


def test_divergent_barrier_is_a_fault() -> None:
    def body(b: Builder) -> None:
        def wait(b: Builder) -> list[Value]:
            with b.at(line(4)):
                b.multi("barrier")
            return []

        b.if_(b.op("lt", b.op("thread_id"), b.index(40)), wait, nothing)

    with pytest.raises(UserError) as error:
        run_kernel(kernel([], [1], 64, body), [], {})
    assert str(error.value).splitlines()[0] == (
        "k.zyn:4:1: error[TW050]: divergent barrier: only 8 of 32 threads of warp 1 of block (0) arrive: "
        "threads 40-63 went the other way at the `if` at k.zyn:1:1"
    )
    assert "help: every thread of a block must reach the barrier" in str(error.value)


def test_a_barrier_one_warp_never_reaches_is_a_deadlock() -> None:
    def body(b: Builder) -> None:
        def wait(b: Builder) -> list[Value]:
            with b.at(line(4)):
                b.multi("barrier")
            return []

        with b.at(line(3)):
            b.if_(b.op("lt", b.op("thread_id"), b.index(32)), wait, nothing)

    with pytest.raises(UserError) as error:
        run_kernel(kernel([], [1], 96, body), [], {})
    assert str(error.value).splitlines()[0] == (
        "k.zyn:4:1: error[TW050]: deadlock in block (0): warp 0 waits at the barrier at k.zyn:4:1; "
        "warp 1 waits for other warps at the end of the `if` at k.zyn:3:1; "
        "warp 2 waits for other warps at the end of the `if` at k.zyn:3:1"
    )


def test_producer_and_consumer_warps() -> None:
    """Warp 0 fills a buffer, warp 1 empties it, in step through barriers of their own branches."""
    x, out = Value(tensor(f32, "n", 32), "x"), Value(tensor(f32, "n", 32), "out")

    def body(b: Builder) -> None:
        t = b.op("thread_id")
        lane = b.op("mod", t, b.index(32))
        buffer = shared(b, f32, 32)
        zero, one, n = b.index(0), b.index(1), b.index(N)

        def produce(b: Builder) -> list[Value]:
            def round_(b: Builder, i: Value) -> list[Value]:
                b.multi("store", buffer, lane, b.op("load", x, i, lane))
                b.multi("barrier")  # full
                b.multi("barrier")  # empty
                return []

            b.for_(zero, n, one, [], round_)
            return []

        def consume(b: Builder) -> list[Value]:
            def round_(b: Builder, i: Value, last: Value) -> list[Value]:
                b.multi("barrier")
                value = b.add(b.op("load", buffer, b.sub(b.index(31), lane)), last)
                b.multi("store", out, i, lane, value)
                b.multi("barrier")
                return [value]

            b.for_(zero, n, one, [b.const(0.0, f32)], round_)
            return []

        b.if_(b.op("lt", t, b.index(32)), produce, consume)

    data = np.random.default_rng(0).integers(0, 99, (5, 32)).astype(np.float32)
    result = np.empty((5, 32), np.float32)
    run_kernel(kernel([x, out], [1], 64, body), [data, result], {"n": 5})
    np.testing.assert_array_equal(result, np.cumsum(data[:, ::-1], axis=0))


def test_results_of_branches_come_together() -> None:
    """Values of warps that parted, some with lanes on both sides, are merged; barriers inside one side only of a whole block."""
    out = Value(tensor(i64, 2, 64), "out")

    def body(b: Builder) -> None:
        p, t = b.op("program_id", axis=0), b.op("thread_id")
        first = b.op("eq", p, b.index(0))

        def wait(b: Builder) -> list[Value]:
            b.multi("barrier")
            return [b.mul(t, b.index(2))]

        (value,) = b.if_(first, wait, lambda b: [b.index(-1)])
        b.multi("store", out, p, t, value)

    result = np.empty((2, 64), np.int64)
    run_kernel(kernel([out], [2], 64, body), [result], {})
    np.testing.assert_array_equal(result, [np.arange(64) * 2, np.full(64, -1)])


def test_loops_with_barriers_run_as_long_as_each_block_needs() -> None:
    """Block p does p rounds of a shift through shared memory."""
    out = Value(tensor(i64, "n", 64), "out")

    def body(b: Builder) -> None:
        p, t = b.op("program_id", axis=0), b.op("thread_id")
        buffer = shared(b, i64, 64)

        def round_(b: Builder, i: Value, value: Value) -> list[Value]:
            b.multi("store", buffer, t, value)
            b.multi("barrier")
            following = b.op("load", buffer, b.op("mod", b.add(t, b.index(1)), b.index(64)))
            b.multi("barrier")
            return [following]

        (value,) = b.for_(b.index(0), p, b.index(1), [t], round_)
        b.multi("store", out, p, t, value)

    result = np.empty((6, 64), np.int64)
    run_kernel(kernel([out], [N], 64, body), [result], {"n": 6})
    np.testing.assert_array_equal(result, [np.roll(np.arange(64), -p) for p in range(6)])


def spin(b: Builder, flag: Value, wanted: Value) -> None:
    """Loop until the flag has the wanted value; the carried value counts rounds."""

    def test(b: Builder, rounds: Value) -> list[Value]:
        return [
            b.op("ne", b.op("atomic", flag, b.index(0), b.const(0, i32), kind="or", scope="device"), wanted),
            rounds,
        ]

    def step(b: Builder, rounds: Value) -> list[Value]:
        return [b.add(rounds, b.index(1))]

    regions = (b.region([INDEX], ["r"], test), b.region([INDEX], ["r"], step))
    b.append(Op("while", (b.index(0),), (Value(INDEX),), {}, regions, line(6)))


def flag_kernel(signal: bool) -> Kernel:
    """Warp 0 waits in a loop for warp 1 to set a flag."""
    flag, out = Value(tensor(i32, 1), "flag"), Value(tensor(i32, 64), "out")

    def body(b: Builder) -> None:
        t = b.op("thread_id")

        def other(b: Builder) -> list[Value]:
            if signal:
                b.if_(
                    b.op("eq", t, b.index(32)),
                    lambda b: (b.op("atomic", flag, b.index(0), b.const(7, i32), kind="exchange"), [])[1],
                    nothing,
                )
            return []

        b.if_(b.op("lt", t, b.index(32)), lambda b: (spin(b, flag, b.const(7, i32)), [])[1], other)
        b.multi("store", out, t, b.op("load", flag, b.index(0)))

    return kernel([flag, out], [1], 64, body)


def test_a_warp_can_wait_for_another_s_flag() -> None:
    result = np.empty(64, np.int32)
    run_kernel(flag_kernel(signal=True), [np.zeros(1, np.int32), result], {})
    assert (result == 7).all()


def test_waiting_for_a_flag_nobody_sets_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.ir.emulator.warps.scheduler.PATIENCE", 50)
    with pytest.raises(
        UserError, match=r"deadlock in block \(0\): warp 0 waits for memory to change in the loop at k.zyn:6:1; warp 1"
    ):
        run_kernel(flag_kernel(signal=False), [np.zeros(1, np.int32), np.empty(64, np.int32)], {})


def test_blocks_can_wait_for_all_others() -> None:
    """A barrier over the grid: count up, wait for all, then read what the next block wrote."""
    count, data, out = Value(tensor(i32, 1), "count"), Value(tensor(i64, "n"), "data"), Value(tensor(i64, "n"), "out")

    def body(b: Builder) -> None:
        p, t = b.op("program_id", axis=0), b.op("thread_id")

        def first(b: Builder) -> list[Value]:
            b.multi("store", data, p, b.mul(p, p))
            b.multi("fence", scope="device")
            b.op("atomic", count, b.index(0), b.const(1, i32), kind="add", scope="device")
            spin(b, count, b.cast(b.index(N), i32))
            b.multi("store", out, p, b.op("load", data, b.op("mod", b.add(p, b.index(1)), b.index(N))))
            return []

        b.if_(b.op("eq", t, b.index(0)), first, nothing)
        b.multi("barrier")

    result = np.empty(5, np.int64)
    run_kernel(
        kernel([count, data, out], [N], 32, body), [np.zeros(1, np.int32), np.zeros(5, np.int64), result], {"n": 5}
    )
    np.testing.assert_array_equal(result, [1, 4, 9, 16, 0])


# -- atomics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "start", "expected", "old"),
    [
        ("add", i32, 5, 5 + 496, None), ("sub", u32, 0, 2**32 - 496, None), ("min", i32, 9, 0, None), ("max", i32, 9, 31, None),
        ("or", u32, 0, 31, None), ("and", u32, 7, 0, None), ("xor", u32, 0, 0, None), ("exchange", i32, -1, 31, [-1, *range(31)]),
        ("add", f32, 0.5, 496.5, None),
    ],
)  # fmt: skip
def test_atomics_one_lane_after_another(
    kind: str, dtype: DType, start: float, expected: float, old: list[int] | None
) -> None:
    cell, out = Value(tensor(dtype, 1), "cell"), Value(tensor(dtype, 32), "out")

    def body(b: Builder) -> None:
        t = b.op("thread_id")
        b.multi("store", out, t, b.op("atomic", cell, b.index(0), b.cast(t, dtype), kind=kind))

    memory, seen = np.full(1, start, dtype.numpy), np.empty(32, dtype.numpy)
    run_kernel(kernel([cell, out], [1], 32, body), [memory, seen], {})
    assert memory[0] == expected
    if kind == "add":
        np.testing.assert_array_equal(seen, start + np.concatenate([[0], np.cumsum(np.arange(31))]))
    if old is not None:
        assert list(seen) == old


def test_compare_and_swap_and_wrapping_counters() -> None:
    cells, out = Value(tensor(u32, 3), "cells"), Value(tensor(u32, 32), "out")

    def body(b: Builder) -> None:
        t = b.op("thread_id")
        mine = b.cast(t, u32)
        b.multi("store", out, t, b.op("atomic", cells, b.index(0), b.const(9, u32), mine, kind="cas"))
        b.op("atomic", cells, b.index(1), b.const(4, u32), kind="inc")
        b.op("atomic", cells, b.index(2), b.const(4, u32), kind="dec")

    memory, seen = np.asarray([9, 0, 0], np.uint32), np.empty(32, np.uint32)
    run_kernel(kernel([cells, out], [1], 32, body), [memory, seen], {})
    assert list(memory) == [0, 32 % 5, (0 - 32) % 5]
    assert list(seen) == [9] + [0] * 31


def test_many_blocks_with_shared_memory() -> None:
    data = np.ones(200_000, np.float32)
    result = np.zeros(1, np.float32)
    run_kernel(block_sum(256), [data, result], {"n": 200_000})
    assert result[0] == 200_000


def test_scalar_parameters_and_sizes() -> None:
    a, out = Value(Scalar(i64), "a"), Value(tensor(i64, "n"), "out")

    def body(b: Builder) -> None:
        b.multi("store", out, b.op("thread_id"), b.mul(a, b.index(N * 2 + 1)))

    result = np.empty(4, np.int64)
    run_kernel(kernel([a, out], [1], 4, body), [3, result], {"n": 4})
    assert list(result) == [27] * 4


def test_long_kernels_run_in_fewer_blocks_at_once() -> None:
    short, long = (Waits(frozenset(), frozenset(), 0, 1, False, False, held) for held in (1 << 10, 1 << 16))
    assert short.blocks_at_once(256, 10000) == LANES // 256
    assert long.blocks_at_once(256, 10000) == HELD // (256 << 16)
    assert Waits(frozenset(), frozenset(), 0, 1, False, False, HELD).blocks_at_once(256, 10000) == 1
