"""The emulator at the thread stage: matrix units, asynchronous copies, mbarriers, named barriers, clusters, and their misuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest

from tilewright.base.dtypes import DType, bf16, f8e4m3, f8e5m2, f16, f32, f64, i8, i32, i64, u8, u16, u32, u64
from tilewright.base.errors import CompilerBug, UserError
from tilewright.base.sizes import Size
from tilewright.base.source import Source, Span
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_kernel
from tilewright.ir.emulator.warps.copies import swizzled
from tilewright.ir.emulator.warps.scheduler import EmulatedLaunch
from tilewright.ir.emulator.warps.thread import Waits
from tilewright.ir.layouts import MMA_LANES
from tilewright.ir.nodes import Attr, Block, Kernel, Stage, Value
from tilewright.ir.ops_matrix import MMA_SHAPES, accumulator_dtype, swizzled_place
from tilewright.ir.text import print_kernel
from tilewright.ir.text_parse import parse_kernel
from tilewright.ir.types import Tensor, tensor
from tilewright.ir.verify import verify_kernel

TEXT = Source("k.zyn", "\n".join(f"line {n}" for n in range(1, 21)))
Body = Callable[[Builder], object]


def line(number: int) -> Span:
    return Span(TEXT, number, 1, number, 5)


def kernel(params: Sequence[Value], threads: int, body: Body, grid: int = 1, cluster: int = 1) -> Kernel:
    builder = Builder(line(1))
    body(builder)
    attrs: dict[str, Attr] = {"cluster": cluster} if cluster > 1 else {}
    return Kernel(
        "k",
        Stage.THREAD,
        tuple(params),
        Block((), tuple(builder.ops)),
        (Size.of(grid),),
        threads,
        attrs=attrs,
        span=line(20),
    )


def run(
    params: Sequence[Value], arrays: Sequence[np.ndarray], threads: int, body: Body, grid: int = 1, cluster: int = 1
) -> None:
    made = kernel(params, threads, body, grid, cluster)
    verify_kernel(made)
    run_kernel(made, arrays, {})


def message(
    params: Sequence[Value], arrays: Sequence[np.ndarray], threads: int, body: Body, grid: int = 1, cluster: int = 1
) -> str:
    with pytest.raises(UserError) as error:
        run(params, arrays, threads, body, grid, cluster)
    text = str(error.value)
    assert "error[TW050]" in text
    return text


def array(dtype: DType, *shape: int, name: str = "x") -> Value:
    return Value(tensor(dtype, *shape), name)


def shared(b: Builder, dtype: DType, *shape: int, name: str = "buffer") -> Value:
    return b.op("alloc", name=name, dtype=dtype, shape=shape, space="shared")


def when(b: Builder, condition: Value, body: Body, otherwise: Body | None = None) -> None:
    def region(inner: Body | None) -> Callable[[Builder], list[Value]]:
        def build(b: Builder) -> list[Value]:
            if inner is not None:
                inner(b)
            return []

        return build

    b.if_(condition, region(body), region(otherwise))


def is_thread(b: Builder, number: int) -> Value:
    return b.op("eq", b.op("thread_id"), b.index(number))


def tensor_map(b: Builder, source: Value, box: tuple[int, ...], swizzle: int = 128) -> Value:
    assert isinstance(source.type, Tensor)
    return b.op("tensor_map", source, box=box, shape=source.type.shape, strides=source.type.strides, swizzle=swizzle)


def numbers(dtype: DType, *shape: int, seed: int = 0) -> np.ndarray:
    """Small numbers whose products and sums are exact."""
    low = 0 if dtype.kind == "u" else -4
    return np.random.default_rng(seed).integers(low, 5, shape).astype(dtype.numpy)


# -- mbarriers and copies by the engine -----------------------------------------------------------------------------


def loaded(
    corner: tuple[int, int], swizzle: int = 128, wait: bool = True, expect: int | None = None
) -> tuple[list[Value], Body]:
    """One thread loads a 16 x 64 box of x; all 128 threads copy the shared memory as it lies to out."""
    x, out = array(bf16, 40, 96), array(bf16, 16 * 64, name="out")

    def body(b: Builder) -> None:
        box, full = shared(b, bf16, 16 * 64), shared(b, u64, 2, name="full")
        map_ = tensor_map(b, x, (16, 64), swizzle)
        zero = b.index(0)

        def start(b: Builder) -> None:
            b.multi("mbarrier_init", full, b.index(1), count=1)
            b.multi("fence_init")

        def load(b: Builder) -> None:
            b.multi("mbarrier_expect", full, b.index(1), bytes=16 * 64 * 2 if expect is None else expect)
            with b.at(line(5)):
                b.multi("tma_load", box, zero, map_, full, b.index(1), *(b.const(c, i32) for c in corner))

        b.multi("prefetch_map", map_)
        when(b, is_thread(b, 0), start)
        b.multi("barrier")
        when(b, is_thread(b, 0), load)
        b.multi("barrier")
        if wait:
            with b.at(line(7)):
                b.multi("mbarrier_wait", full, b.index(1), zero)
        place = b.mul(b.op("thread_id"), b.index(8))
        with b.at(line(9)):
            b.multi("store", out, place, b.op("load", box, place, width=8))

    return [x, out], body


@pytest.mark.parametrize("corner", [(0, 0), (8, 16), (32, 64), (-3, -8), (100, 0)])
@pytest.mark.parametrize("swizzle", [0, 128])
def test_tma_load_places_a_box_and_fills_the_outside_with_zeros(corner: tuple[int, int], swizzle: int) -> None:
    x, out = numbers(bf16, 40, 96), np.empty(16 * 64, bf16.numpy)
    params, body = loaded(corner, swizzle)
    run(params, [x, out], 128, body)
    padded = np.zeros((400, 400), np.float32)
    padded[100:140, 100:196] = x.astype(np.float32)
    wanted = padded[100 + corner[0] : 116 + corner[0], 100 + corner[1] : 164 + corner[1]].reshape(-1)
    place = np.asarray([swizzled_place(2 * i) // 2 if swizzle else i for i in range(16 * 64)])
    np.testing.assert_array_equal(out.astype(np.float32)[place], wanted)


def test_the_engine_rounds_f32_to_tf32() -> None:
    """To nearest, ties to even; NaN stays NaN whatever its bits, and a sum that carries moves the exponent."""
    given = [0x3F800FFF, 0x3F801000, 0x3F801001, 0x3F803000, 0xBF803000, 0x3FFFF000, 0x7F800000, 0x7FFFFFFF, 0x7F800001, 0x00001001]
    wanted = [0x3F800000, 0x3F800000, 0x3F802000, 0x3F804000, 0xBF804000, 0x40000000, 0x7F800000, None, None, 0x00002000]
    bits = np.resize(np.asarray(given, np.uint32), 16 * 32)
    x, out = array(f32, 16, 32), array(f32, 16 * 32, name="out")

    def body(b: Builder) -> None:
        box, full, zero = shared(b, f32, 16 * 32), shared(b, u64, 1, name="full"), b.index(0)
        sizes = {"shape": (Size.of(16), Size.of(32)), "strides": (Size.of(32), Size.of(1))}
        map_ = b.op("tensor_map", x, box=(16, 32), swizzle=0, round=True, **sizes)

        def load(b: Builder) -> None:
            b.multi("mbarrier_init", full, zero, count=1)
            b.multi("fence_init")
            b.multi("mbarrier_expect", full, zero, bytes=16 * 32 * 4)
            b.multi("tma_load", box, zero, map_, full, zero, zero, zero)

        when(b, is_thread(b, 0), load)
        b.multi("barrier")
        b.multi("mbarrier_wait", full, zero, zero)
        place = b.mul(b.op("thread_id"), b.index(4))
        b.multi("store", out, place, b.op("load", box, place, width=4))

    result = np.empty(16 * 32, np.float32)
    run([x, out], [bits.view(np.float32).reshape(16, 32), result], 128, body)
    for found, want in zip(result.view(np.uint32).tolist(), wanted * 51, strict=False):
        assert found == want if want is not None else found & 0x7FFFFFFF > 0x7F800000


def test_only_f32_is_rounded() -> None:
    b = Builder()
    sizes: dict[str, Attr] = {"shape": (Size.of(16), Size.of(64)), "strides": (Size.of(64), Size.of(1))}
    with pytest.raises(CompilerBug, match="only f32 is rounded"):
        b.op("tensor_map", array(bf16, 16, 64), box=(16, 64), swizzle=128, round=True, **sizes)


def test_reading_what_is_still_being_copied_is_reported() -> None:
    params, body = loaded((0, 0), wait=False)
    text = message(params, [numbers(bf16, 40, 96), np.empty(1024, bf16.numpy)], 128, body)
    assert text.startswith(
        "k.zyn:9:1: error[TW050]: load of uninitialised shared memory: 'buffer'[0] "
        "is still being copied by the tma_load at k.zyn:5:1"
    )


@pytest.mark.parametrize(("expect", "left"), [(4096, 2048), (1024, -1024)])
def test_expecting_a_wrong_number_of_bytes_is_a_deadlock_that_names_the_mbarrier(expect: int, left: int) -> None:
    params, body = loaded((0, 0), expect=expect)
    text = message(params, [numbers(bf16, 40, 96), np.empty(1024, bf16.numpy)], 128, body)
    assert (
        f"waits for parity 0 of mbarrier 'full'[1] (phase 0, 0 of 1 arrivals and {left} bytes to come) at k.zyn:7:1"
        in text
    )
    assert "deadlock in block (0)" in text


def test_swizzle_of_arrays_is_that_of_the_op_table() -> None:
    places = np.arange(4096)
    np.testing.assert_array_equal(swizzled(places), [swizzled_place(int(p)) for p in places])
    assert sorted(swizzled(places, 64)) == sorted(swizzled(places, 32)) == list(places)


def with_mbarriers(use: Callable[[Builder, Value], object], count: int = 1, barrier: bool = True) -> str:
    """The message of a kernel that uses mbarriers 0 (of `count` arrivals) and 1 (never initialised) of 'full'."""

    def body(b: Builder) -> None:
        full = shared(b, u64, 2, name="full")
        when(b, is_thread(b, 0), lambda b: b.multi("mbarrier_init", full, b.index(0), count=count))
        if barrier:
            b.multi("barrier")
        use(b, full)

    return message([], [], 64, body)


def test_misuse_of_mbarriers() -> None:
    def arrive(b: Builder, full: Value) -> None:
        b.multi("mbarrier_arrive", full, b.index(0))

    def wait(index: int, parity: int) -> Callable[[Builder, Value], object]:
        return lambda b, full: b.multi("mbarrier_wait", full, b.index(index), b.index(parity))

    def arrive_and_wait(b: Builder, full: Value) -> None:
        arrive(b, full)
        wait(0, 0)(b, full)

    text = with_mbarriers(arrive, count=63)
    assert "64 threads arrive at mbarrier 'full'[0], which allows 63 more in this phase" in text
    assert "mbarrier_wait of mbarrier 'full'[1], which was never initialised" in with_mbarriers(wait(1, 0))
    assert "at [2] is out of bounds" in with_mbarriers(wait(2, 0))
    assert "parity 2, which is 0 or 1" in with_mbarriers(wait(0, 2))
    text = with_mbarriers(arrive, count=64, barrier=False)
    assert (
        "mbarrier_arrive of mbarrier 'full'[0], which another warp initialised with nothing that orders the two" in text
    )
    text = with_mbarriers(arrive_and_wait, count=65)
    assert "waits for parity 0 of mbarrier 'full'[0] (phase 0, 1 of 65 arrivals and 0 bytes to come)" in text
    text = with_mbarriers(lambda b, full: b.multi("mbarrier_expect", full, b.index(0), bytes=8), count=64)
    assert "the kernel ends with mbarrier 'full'[0] in phase 0" in text


def exchange(order: bool) -> tuple[list[Value], Body]:
    """The warps of a block of 64 threads hand numbers over, each arriving at its own mbarrier and waiting for the other's."""
    out = array(i64, 64, name="out")

    def body(b: Builder) -> None:
        buffer, full = shared(b, i64, 64), shared(b, u64, 2, name="full")
        t = b.op("thread_id")

        def start(b: Builder) -> None:
            for i in range(2):
                b.multi("mbarrier_init", full, b.index(i), count=32)

        when(b, is_thread(b, 0), start)
        b.multi("barrier")
        warp = b.op("floordiv", t, b.index(32))
        b.multi("store", buffer, t, b.mul(t, b.index(3)))
        b.multi("mbarrier_arrive", full, warp)
        if order:
            b.multi("mbarrier_wait", full, b.sub(b.index(1), warp), b.index(0))
        with b.at(line(9)):
            b.multi("store", out, t, b.op("load", buffer, b.sub(b.index(63), t)))

    return [out], body


def test_mbarriers_order_the_accesses_of_warps() -> None:
    out = np.empty(64, np.int64)
    params, body = exchange(True)
    run(params, [out], 64, body)
    np.testing.assert_array_equal(out, np.arange(63, -1, -1) * 3)
    params, body = exchange(False)
    assert "race on shared memory: load of 'buffer'" in message(params, [out], 64, body)


def stored(
    fence: bool = True, barrier: bool = True, commit: bool = True, wait: bool = True, again: bool = False
) -> tuple[list[Value], Body]:
    """64 threads write a swizzled 16 x 64 box, one stores it to out at (4, 32) of 16 x 96."""
    out = array(bf16, 16, 96, name="out")

    def body(b: Builder) -> None:
        box = shared(b, bf16, 16 * 64)
        map_ = tensor_map(b, out, (16, 64))
        t = b.op("thread_id")

        def write(b: Builder) -> None:
            for i in range(16):
                place = b.add(b.mul(t, b.index(16)), b.index(i))
                row, column = b.op("floordiv", place, b.index(64)), b.op("mod", place, b.index(64))
                chunk = b.op("xor", b.op("floordiv", column, b.index(8)), b.op("mod", row, b.index(8)))
                swizzled = b.add(
                    b.mul(row, b.index(64)), b.add(b.mul(chunk, b.index(8)), b.op("mod", column, b.index(8)))
                )
                b.multi("store", box, swizzled, b.cast(b.add(place, b.index(int(again))), bf16))

        def store(b: Builder) -> None:
            with b.at(line(5)):
                b.multi("tma_store", box, b.index(0), map_, b.index(4), b.index(32))
            if commit:
                b.multi("tma_commit")
            if wait and not again:
                b.multi("tma_wait", pending=0, read=True)

        write(b)
        if fence:
            b.multi("fence_async")
        if barrier:
            b.multi("named_barrier", b.index(1), threads=64)
        when(b, is_thread(b, 0), store)
        if again:
            b.multi("named_barrier", b.index(1), threads=64)
            with b.at(line(7)):
                b.multi("store", box, t, b.const(1.0, bf16))
            when(b, is_thread(b, 0), lambda b: b.multi("tma_wait", pending=0))

    return [out], body


def test_tma_store_leaves_out_what_lies_outside() -> None:
    out = np.zeros((16, 96), bf16.numpy)
    params, body = stored()
    run(params, [out], 64, body)
    wanted = np.zeros((16, 96), np.float32)
    wanted[4:, 32:] = np.arange(1024).astype(bf16.numpy).astype(np.float32).reshape(16, 64)[:12]
    np.testing.assert_array_equal(out.astype(np.float32), wanted)


def test_misuse_of_tma_store() -> None:
    out = [np.zeros((16, 96), bf16.numpy)]

    def text(params: list[Value], body: Body) -> str:
        return message(params, out, 64, body)

    assert "k.zyn:5:1" in text(*stored(fence=False)) and "not fenced since" in text(*stored(fence=False))
    assert "nothing that orders the two" in text(*stored(barrier=False))
    assert "a tma_store that is in no group" in text(*stored(commit=False))
    assert "ends before a tma_store has read its shared memory" in text(*stored(wait=False))
    overwritten = text(*stored(again=True))
    assert overwritten.startswith("k.zyn:7:1") and "race on shared memory: store of 'buffer'" in overwritten


def test_maps_the_engine_cannot_use() -> None:
    def problem(dtype: DType, shape: tuple[int, int], box: tuple[int, int]) -> str:
        return message([x := array(dtype, *shape)], [np.zeros(shape, dtype.numpy)], 32, lambda b: tensor_map(b, x, box))

    assert "not all multiples of 16 bytes" in problem(bf16, (8, 12), (8, 8))
    assert "rows of 256 bytes are longer than the 128 bytes" in problem(f32, (8, 64), (8, 64))
    assert "rows of 8 bytes are not a multiple of 16" in problem(bf16, (8, 64), (8, 4))


# -- wgmma ----------------------------------------------------------------------------------------------------------


def swizzled_tile(matrix: np.ndarray, offset: int = 0, total: int = 0) -> np.ndarray:
    """A matrix with rows of 128 bytes as it lies in swizzled shared memory, from element `offset` on."""
    size = matrix.itemsize
    flat = np.zeros(max(total, offset + matrix.size), matrix.dtype)
    flat[swizzled((offset + np.arange(matrix.size)) * size) // size] = matrix.reshape(-1)
    return flat


def copy_in(b: Builder, source: Value, target: Value, threads: int) -> None:
    """The whole of a global tensor to shared memory as it lies, by all threads."""
    assert isinstance(source.type, Tensor)
    count = source.type.shape[0].evaluate({})
    t = b.op("thread_id")

    def each(b: Builder, i: Value) -> list[Value]:
        b.multi("store", target, i, b.op("load", source, i))
        return []

    b.for_(t, b.index(count), b.index(threads), [], each)


def zeros(b: Builder, count: int, dtype: DType = f32) -> list[Value]:
    zero = b.const(0, dtype)
    return [zero] * count


def store_accumulators(b: Builder, out: Value, values: Sequence[Value]) -> None:
    """By the layout the op table gives."""
    t = b.op("mod", b.op("thread_id"), b.index(128))
    low = b.op("floordiv", b.op("mod", t, b.index(32)), b.index(4))
    row = b.add(b.mul(b.op("floordiv", t, b.index(32)), b.index(16)), low)
    column = b.mul(b.op("mod", t, b.index(4)), b.index(2))
    for r, value in enumerate(values):
        b.multi(
            "store", out, b.add(row, b.index(8 * (r // 2 % 2))), b.add(column, b.index(8 * (r // 4) + r % 2)), value
        )


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    kind = np.int64 if a.dtype.kind in "iu" else np.float64
    wide = [x.astype(np.float32).astype(kind) if kind is np.float64 else x.astype(kind) for x in (a, b)]
    return np.asarray(wide[0] @ wide[1])


def in_words(matrix: np.ndarray) -> np.ndarray:
    """A matrix of 64 rows as the words each thread has, by the layout the op table gives: [thread, instruction along k, word]."""
    per = 4 // matrix.itemsize
    words = np.zeros((128, matrix.shape[1] // (8 * per), 4, per), matrix.dtype)
    for t, s, r, e in np.ndindex(words.shape):
        row, column = 16 * (t // 32) + 8 * (r % 2) + t % 32 // 4, 4 * per * (r // 2) + per * (t % 4) + e
        words[t, s, r, e] = matrix[row, 8 * per * s + column]
    return np.ascontiguousarray(words).view(np.uint32).reshape(-1)


def times_registers(dtype: DType, n: int, first: int = 0) -> None:
    """A product whose first operand is in registers; steps begin at word `first` and go on in circles."""
    row, k = 128 // dtype.itemsize, 32 // dtype.itemsize
    accumulator = accumulator_dtype(dtype)
    left, right = numbers(dtype, 64, row), numbers(dtype, n, row, seed=1)
    words, bb, out = array(u32, 128 * 16, name="words"), array(dtype, n * row, name="b"), array(accumulator, 64, n, name="out")

    def body(b: Builder) -> None:
        sb = shared(b, dtype, n * row, name="sb")
        copy_in(b, bb, sb, 128)
        start = b.mul(b.op("thread_id"), b.index(16))
        own = [b.op("load", words, b.add(start, b.index(w))) for w in range(16)]
        b.multi("fence_async")
        b.multi("barrier")
        steps = tuple((4 * s, s * k, 0) for s in ((first + step) % 4 for step in range(4)))
        acc = b.multi(
            "wgmma_registers", *own, sb, b.index(0), *zeros(b, n // 2, accumulator), dtype=dtype, words=16, n=n, k=k, steps=steps
        )
        store_accumulators(b, out, b.multi("wgmma_wait", *acc, pending=0))

    result = np.zeros((64, n), accumulator.numpy)
    run([words, bb, out], [in_words(left), swizzled_tile(right), result], 128, body)
    np.testing.assert_array_equal(result, product(left, right.T))


@pytest.mark.parametrize("dtype", [bf16, f16, f32, f8e4m3, f8e5m2, i8, u8])
def test_wgmma_with_words_of_registers(dtype: DType) -> None:
    times_registers(dtype, 24)


def test_each_step_names_its_words() -> None:
    times_registers(bf16, 8, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": 6}, "four for each"), ({"k": 8}, "k fills 32 bytes"), ({"steps": ((16, 0, 0),)}, "words or accumulators are not all there"),
        ({"dtype": f16}, "cannot multiply"), ({"steps": ((0, 0, 4),)}, "words or accumulators are not all there"),
        ({"fresh": True}, "no accumulators where `fresh`"),
    ],
)  # fmt: skip
def test_what_words_of_registers_must_be(change: dict[str, Attr], message: str) -> None:
    b = Builder()
    sb = shared(b, bf16, 8 * 64)
    attrs: dict[str, Attr] = {"dtype": bf16, "words": 16, "n": 8, "k": 16, "steps": ((0, 0, 0),)} | change
    with pytest.raises(CompilerBug, match=message):
        b.multi("wgmma_registers", *[b.const(0, u32)] * 16, sb, b.index(0), *zeros(b, 4), **attrs)


@pytest.mark.parametrize("dtype", [bf16, f16, f32, f8e4m3, f8e5m2, i8, u8])
@pytest.mark.parametrize("n", [8, 24, 64])
def test_wgmma_of_rows_along_k(dtype: DType, n: int) -> None:
    row, k = 128 // dtype.itemsize, 32 // dtype.itemsize
    accumulator = accumulator_dtype(dtype)
    left, right = numbers(dtype, 64, row), numbers(dtype, n, row, seed=1)
    a, bb, out = (
        array(dtype, 64 * row, name="a"),
        array(dtype, n * row, name="b"),
        array(accumulator, 64, n, name="out"),
    )

    def body(b: Builder) -> None:
        sa, sb = shared(b, dtype, 64 * row, name="sa"), shared(b, dtype, n * row, name="sb")
        copy_in(b, a, sa, 128)
        copy_in(b, bb, sb, 128)
        b.multi("fence_async")
        b.multi("barrier")
        steps = tuple((s * k, s * k, 0) for s in range(4))
        acc = b.multi("wgmma", sa, b.index(0), sb, b.index(0), *zeros(b, n // 2, accumulator), n=n, k=k, steps=steps)
        store_accumulators(b, out, b.multi("wgmma_wait", *acc, pending=0))

    result = np.zeros((64, n), accumulator.numpy)
    run([a, bb, out], [swizzled_tile(left), swizzled_tile(right), result], 128, body)
    np.testing.assert_array_equal(result, product(left, right.T))


@pytest.mark.parametrize("majors", [("mn", "mn"), ("k", "mn"), ("mn", "k")])
def test_wgmma_of_rows_along_m_or_n(majors: tuple[str, str]) -> None:
    """k = 64 in four steps, n = 128: two blocks of 64 along n where b lies along n."""
    left, right = numbers(bf16, 64, 64), numbers(bf16, 128, 64, seed=1)
    lies_a = left if majors[0] == "k" else left.T
    lies_b = right if majors[1] == "k" else right.reshape(2, 64, 64).transpose(0, 2, 1)
    a, bb, out = array(bf16, 64 * 64, name="a"), array(bf16, 128 * 64, name="b"), array(f32, 64, 128, name="out")

    def body(b: Builder) -> None:
        sa, sb = shared(b, bf16, 64 * 64, name="sa"), shared(b, bf16, 128 * 64, name="sb")
        copy_in(b, a, sa, 128)
        copy_in(b, bb, sb, 128)
        b.multi("fence_async")
        b.multi("barrier")
        step = [16 if major == "k" else 16 * 64 for major in majors]
        acc = b.multi(
            "wgmma", sa, b.index(0), sb, b.index(0), *zeros(b, 64), n=128, k=16, b_block=64 * 64, a_block=0,
            steps=tuple((s * step[0], s * step[1], 0) for s in range(4)), a_major=majors[0], b_major=majors[1],
        )  # fmt: skip
        store_accumulators(b, out, b.multi("wgmma_wait", *acc, pending=0))

    result = np.zeros((64, 128), np.float32)
    flat = [swizzled_tile(np.ascontiguousarray(x)) for x in (lies_a, lies_b)]
    run([a, bb, out], [*flat, result], 128, body)
    np.testing.assert_array_equal(result, product(left, right.T))


def test_wgmma_cuts_f32_to_tf32_and_rounds_the_sum_once() -> None:
    left = np.zeros((64, 32), np.float32)
    left[:, 0] = 1 + 2.0**-10 + 2.0**-11  # the last bit is cut off, not rounded
    left[:, 1] = 1.0
    right = np.zeros((8, 32), np.float32)
    right[:, 0] = 1.0
    right[:, 1] = 2.0**-30
    a, bb, out = array(f32, 64 * 32, name="a"), array(f32, 8 * 32, name="b"), array(f32, 64, 8, name="out")

    def body(b: Builder) -> None:
        sa, sb = shared(b, f32, 64 * 32), shared(b, f32, 8 * 32)
        copy_in(b, a, sa, 128)
        copy_in(b, bb, sb, 128)
        b.multi("fence_async")
        b.multi("barrier")
        acc = b.multi("wgmma", sa, b.index(0), sb, b.index(0), *zeros(b, 4), n=8, k=8, steps=((0, 0, 0),))
        store_accumulators(b, out, b.multi("wgmma_wait", *acc, pending=0))

    result = np.zeros((64, 8), np.float32)
    run([a, bb, out], [swizzled_tile(left), swizzled_tile(right), result], 128, body)
    np.testing.assert_array_equal(result, np.full((64, 8), 1 + 2.0**-10, np.float32))


def chained(
    wait: int | None, threads: int = 128, fence: bool = True, guard: int | None = None
) -> tuple[list[Value], Body]:
    """Two groups on one accumulator, the second on top of the first; the last wait leaves `wait` of them unfinished."""
    a, out = array(bf16, 64 * 64, name="a"), array(f32, 64, 64, name="out")

    def body(b: Builder) -> None:
        sa = shared(b, bf16, 64 * 64, name="sa")
        copy_in(b, a, sa, threads)
        if fence:
            b.multi("fence_async")
        b.multi("barrier")

        def work(b: Builder) -> None:
            steps = tuple((s * 16, s * 16, 0) for s in range(4))
            acc: Sequence[Value] = zeros(b, 32)
            for _ in range(2):
                with b.at(line(5)):
                    acc = b.multi("wgmma", sa, b.index(0), sa, b.index(0), *acc, n=64, k=16, steps=steps)
                acc = b.multi("wgmma_wait", *acc, pending=1)
            if wait is not None:
                acc = b.multi("wgmma_wait", *acc, pending=wait)
            store_accumulators(b, out, acc)

        if guard is None:
            work(b)
        else:
            when(b, b.op("lt", b.op("thread_id"), b.index(guard)), work)

    return [a, out], body


def test_accumulators_of_unfinished_groups_are_not_numbers_and_become_some() -> None:
    left = numbers(bf16, 64, 64)
    result = np.zeros((64, 64), np.float32)
    params, body = chained(0)
    run(params, [swizzled_tile(left), result], 128, body)
    np.testing.assert_array_equal(result, 2 * product(left, left.T))
    params, body = chained(None)
    run(params, [swizzled_tile(left), result], 128, body)
    assert np.isnan(result).all()


def test_misuse_of_wgmma() -> None:
    arrays = [swizzled_tile(numbers(bf16, 64, 64)), np.zeros((64, 64), np.float32)]
    params, body = chained(0, fence=False)
    text = message(params, arrays, 128, body)
    assert (
        text.startswith("k.zyn:5:1")
        and "wgmma reads 'sa'[0], which was written by a thread and not fenced since" in text
    )
    params, body = chained(0, threads=96)
    assert "its warp group is not complete" in message(params, arrays, 96, body)
    params, body = chained(0, threads=120)
    assert "divergent wgmma: only 24 of 32 threads of warp 3" in message(params, arrays, 120, body)
    params, body = chained(0, guard=100)
    assert "divergent wgmma: only 4 of 32 threads of warp 3" in message(params, arrays, 128, body)
    params, body = chained(0, guard=96)
    assert "waits for the other warps of its warp group to start the same wgmma" in message(params, arrays, 128, body)


# -- mma, ldmatrix, stmatrix ----------------------------------------------------------------------------------------


def fragment(rows: int, per: int, matrix: np.ndarray, registers: int) -> np.ndarray:
    """What each lane holds of an operand of `mma`, written down as PTX does, as u32 or f64 [register, lane]."""
    held = np.zeros((registers, 32, per), matrix.dtype)
    for register in range(registers):
        for lane in range(32):
            for e in range(per):
                row = lane // 4 + (8 if rows == 16 and register % 2 else 0)
                high = register // 2 if rows == 16 else register
                held[register, lane, e] = matrix[row, lane % 4 * per + e + 4 * per * high]
    return held.reshape(registers, 32) if matrix.dtype == np.float64 else held.view(np.uint32).reshape(registers, 32)


@pytest.mark.parametrize("dtype", [bf16, f16, f32, i8, u8, f64])
def test_mma(dtype: DType) -> None:
    (m, n, k), a_regs, b_regs, c_regs = MMA_SHAPES[dtype.name]
    accumulator = accumulator_dtype(dtype)
    left, right, start = numbers(dtype, m, k), numbers(dtype, k, n, seed=1), numbers(accumulator, m, n, seed=2)
    per = 1 if dtype is f64 else 4 // dtype.itemsize
    held = f64 if dtype is f64 else u32
    a, bb = array(held, a_regs, 32, name="a"), array(held, b_regs, 32, name="b")
    c, out = array(accumulator, m, n, name="c"), array(accumulator, m, n, name="out")

    def body(b: Builder) -> None:
        lane = b.op("thread_id")
        row, column = b.op("floordiv", lane, b.index(4)), b.mul(b.op("mod", lane, b.index(4)), b.index(2))
        places = [(b.add(row, b.index(8 * (r // 2))), b.add(column, b.index(r % 2))) for r in range(c_regs)]
        registers = [
            b.op("load", t, b.index(r), lane) for t, count in ((a, a_regs), (bb, b_regs)) for r in range(count)
        ]
        results = b.multi("mma", *registers, *(b.op("load", c, *p) for p in places), dtype=dtype)
        for place, value in zip(places, results, strict=True):
            b.multi("store", out, *place, value)

    result = np.zeros((m, n), accumulator.numpy)
    arrays = [fragment(m, per, left, a_regs), fragment(8, per, np.ascontiguousarray(right.T), b_regs), start, result]
    run([a, bb, c, out], arrays, 32, body)
    np.testing.assert_array_equal(result, product(left, right) + start)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_and_stmatrix(count: int, trans: bool) -> None:
    """Matrix j starts at element 64 j; its registers are written out, and stored back elsewhere."""
    x, out, back = array(u16, 256), array(u32, 4, 32, name="out"), array(u16, 256, name="back")

    def body(b: Builder) -> None:
        first, second = shared(b, u16, 256, name="first"), shared(b, u16, 256, name="second")
        lane = b.op("thread_id")
        place = b.mul(lane, b.index(8))
        b.multi("store", first, place, b.op("load", x, place, width=8))
        b.multi("store", second, place, b.op("load", x, place, width=8))
        b.multi("warp_sync")
        registers = b.multi("ldmatrix", first, place, count=count, trans=trans)
        for r, value in enumerate(registers):
            b.multi("store", out, b.index(r), lane, value)
        shifted = [b.op("add", value, b.const(0x00010001, u32)) for value in registers]
        b.multi("stmatrix", second, place, *shifted, trans=trans)
        b.multi("warp_sync")
        b.multi("store", back, place, b.op("load", second, place, width=8))

    data = np.arange(256, dtype=np.uint16)
    result, returned = np.zeros((4, 32), np.uint32), np.zeros(256, np.uint16)
    run([x, out, back], [data, result, returned], 32, body)
    for j in range(count):
        matrix = data[64 * j : 64 * j + 64].reshape(8, 8)
        matrix = matrix.T if trans else matrix
        for lane in range(32):
            low, high = (int(matrix[lane // 4, 2 * (lane % 4) + e]) for e in range(2))
            assert result[j, lane] == low | high << 16
    np.testing.assert_array_equal(returned, data + (np.arange(256) < 64 * count))


def test_rows_of_ldmatrix_are_aligned_and_inside() -> None:
    def at(offset: int) -> str:
        def body(b: Builder) -> None:
            b.multi("ldmatrix", shared(b, bf16, 64), b.index(offset), count=1)

        return message([], [], 32, body)

    assert "a row at element 4 of 'buffer', of 64, is out of bounds or not at a multiple of 16 bytes" in at(4)
    assert "a row at element 64" in at(64)
    assert "ldmatrix of uninitialised shared memory" in at(0)


@pytest.mark.parametrize("dtype", [bf16, f16, f8e4m3, i8])
def test_bits_of_vectors(dtype: DType) -> None:
    width = 32 // dtype.bits
    x, out, again = array(dtype, 32 * width), array(u32, 32, name="out"), array(dtype, 32 * width, name="again")

    def body(b: Builder) -> None:
        place = b.mul(b.op("thread_id"), b.index(width))
        bits = b.op("to_bits", b.op("load", x, place, width=width))
        b.multi("store", out, b.op("thread_id"), bits)
        b.multi("store", again, place, b.op("from_bits", bits, dtype=dtype))

    data = numbers(dtype, 32 * width)
    result, copy = np.zeros(32, np.uint32), np.zeros_like(data)
    run([x, out, again], [data, result, copy], 32, body)
    np.testing.assert_array_equal(result, data.view(np.uint32))
    np.testing.assert_array_equal(copy.view(np.uint8), data.view(np.uint8))


# -- copies by threads ----------------------------------------------------------------------------------------------


def copied(wait: int | None, barrier: bool = True, masked: bool = False) -> tuple[list[Value], Body]:
    """64 threads copy 4 numbers each in two groups of 2 and read what the thread opposite copied."""
    x, out = array(f32, 512), array(f32, 512, name="out")

    def body(b: Builder) -> None:
        buffer = shared(b, f32, 512)
        t = b.op("thread_id")
        places = [b.add(b.mul(t, b.index(4)), b.index(256 * g)) for g in range(2)]
        mask = [b.op("lt", t, b.index(40))] if masked else []
        for place in places:
            with b.at(line(5)):
                b.multi("copy_async", buffer, place, x, place, *mask, bytes=16, masked=masked)
            b.multi("copy_commit")
        if wait is not None:
            b.multi("copy_wait", pending=wait)
        if barrier:
            b.multi("barrier")
        for g in range(2):
            place = b.add(b.mul(b.sub(b.index(63), t), b.index(4)), b.index(256 * g))
            with b.at(line(6 + g)):
                b.multi("store", out, place, b.op("load", buffer, place, width=4))

    return [x, out], body


def test_copy_async() -> None:
    data = np.arange(512, dtype=np.float32) + 1
    result = np.zeros(512, np.float32)
    params, body = copied(0)
    run(params, [data, result], 64, body, grid=3)
    np.testing.assert_array_equal(result, data)
    params, body = copied(0, masked=True)
    run(params, [data, result], 64, body)
    np.testing.assert_array_equal(result, np.where(np.arange(512) % 256 < 160, data, 0))


def test_misuse_of_copy_async() -> None:
    arrays = [np.ones(512, np.float32), np.ones(512, np.float32)]

    def text(params: list[Value], body: Body) -> str:
        return message(params, arrays, 64, body)

    assert text(*copied(None)).startswith(
        "k.zyn:6:1"
    ) and "is still being copied by the copy_async at k.zyn:5:1" in text(*copied(None))
    assert text(*copied(1)).startswith("k.zyn:7:1")
    assert "race on shared memory: load of 'buffer'" in text(*copied(0, barrier=False))


# -- named barriers, elect, clusters --------------------------------------------------------------------------------


def handed_over(turns: int = 3, arrive: bool = True) -> tuple[list[Value], Body]:
    """Two warps take turns by named barriers 3 and 4, as in a ping-pong; each adds to what the other left."""
    out = array(i64, 1, name="out")

    def body(b: Builder) -> None:
        buffer = shared(b, i64, 1)
        t = b.op("thread_id")
        warp = b.op("floordiv", t, b.index(32))
        when(b, is_thread(b, 0), lambda b: b.multi("store", buffer, b.index(0), b.index(0)))
        b.multi("barrier")
        mine, other = b.add(warp, b.index(3)), b.sub(b.index(4), warp)
        if arrive:
            second = b.op("eq", warp, b.index(1))
            when(b, second, lambda b: b.multi("named_barrier", other, threads=64, arrive=True))

        def turn(b: Builder, i: Value) -> list[Value]:
            with b.at(line(5)):
                b.multi("named_barrier", mine, threads=64)

            def add(b: Builder) -> None:
                value = b.op("load", buffer, b.index(0))
                b.multi("store", buffer, b.index(0), b.add(b.mul(value, b.index(3)), b.add(warp, b.index(1))))

            when(b, b.op("elect"), add)
            b.multi("named_barrier", other, threads=64, arrive=True)
            return []

        b.for_(b.index(0), b.index(turns), b.index(1), [], turn)
        b.multi("barrier")
        when(b, is_thread(b, 0), lambda b: b.multi("store", out, b.index(0), b.op("load", buffer, b.index(0))))

    return [out], body


def test_named_barriers_let_warps_take_turns() -> None:
    out = np.zeros(1, np.int64)
    params, body = handed_over()
    run(params, [out], 64, body)
    wanted = 0
    for turn in range(6):
        wanted = wanted * 3 + turn % 2 + 1
    assert out[0] == wanted


def test_named_barriers_nobody_opens_are_a_deadlock() -> None:
    params, body = handed_over(arrive=False)
    text = message(params, [np.zeros(1, np.int64)], 64, body)
    assert (
        "deadlock in block (0): warp 0 waits at named barrier 3 (32 of 64 threads) at k.zyn:5:1; warp 1 waits at named barrier 4"
        in text
    )


def test_misuse_of_named_barriers() -> None:
    def at(number: int, *threads: int) -> str:
        def body(b: Builder) -> None:
            first = b.op("lt", b.op("thread_id"), b.index(32))

            def arrive(n: int) -> Body:
                return lambda b: b.multi("named_barrier", b.index(number), threads=n)

            when(b, first, arrive(threads[0]), arrive(threads[-1]))

        return message([], [], 96, body)

    assert "of 0 to 15" in at(16, 96)
    assert "must be a multiple of 32" in at(1, 48)
    assert "named barrier 1 of 96 threads, where others wait for 64 threads" in at(1, 64, 96)
    assert "waits at named barrier 1 (32 of 64 threads)" in at(1, 64)


def test_elect_takes_the_lowest_active_lane() -> None:
    out = array(i64, 64, name="out")

    def body(b: Builder) -> None:
        t = b.op("thread_id")
        b.multi("store", out, t, b.index(0))
        high = b.op("ge", b.op("mod", t, b.index(32)), b.index(5))
        when(b, high, lambda b: b.multi("store", out, t, b.cast(b.op("elect"), i64)))
        b.multi("set_registers", count=40, increase=False)
        b.multi("wait_previous")
        b.multi("release_next")

    result = np.zeros(64, np.int64)
    run([out], [result], 64, body)
    assert np.flatnonzero(result).tolist() == [5, 37]


def test_a_cluster_shares_a_load_and_arrives_at_a_neighbours_mbarrier() -> None:
    """Block 0 of each pair loads for both; each then tells the other's second mbarrier that it is done."""
    x, out = array(f32, 4, 32), array(f32, 8, 32, name="out")

    def body(b: Builder) -> None:
        box, bars = shared(b, f32, 32), shared(b, u64, 2, name="bars")
        map_ = tensor_map(b, x, (1, 32))
        rank = b.cast(b.op("cluster_rank"), i64)
        block = b.op("program_id", axis=0)
        t = b.op("thread_id")

        def start(b: Builder) -> None:
            for i in range(2):
                b.multi("mbarrier_init", bars, b.index(i), count=1)

        def load(b: Builder) -> None:
            b.multi("mbarrier_expect", bars, b.index(0), bytes=128)
            pair = b.op("floordiv", block, b.index(2))

            def both(b: Builder) -> None:
                b.multi(
                    "tma_load",
                    box,
                    b.index(0),
                    map_,
                    bars,
                    b.index(0),
                    pair,
                    b.index(0),
                    b.const(3, i32),
                    multicast=True,
                )

            when(b, b.op("eq", rank, b.index(0)), both)

        when(b, is_thread(b, 0), start)
        b.multi("fence_init")
        b.multi("cluster_sync")
        when(b, is_thread(b, 0), load)
        b.multi("mbarrier_wait", bars, b.index(0), b.index(0))
        value = b.op("load", box, t)
        when(
            b,
            is_thread(b, 0),
            lambda b: b.multi("mbarrier_arrive", bars, b.index(1), b.sub(b.index(1), rank), remote=True),
        )
        b.multi("mbarrier_wait", bars, b.index(1), b.index(0))
        b.multi("store", out, block, t, b.add(value, b.cast(rank, f32)))
        b.multi("cluster_sync")

    data, result = numbers(f32, 4, 32), np.zeros((8, 32), np.float32)
    run([x, out], [data, result], 32, body, grid=8, cluster=2)
    np.testing.assert_array_equal(result, np.repeat(data, 2, axis=0) + (np.arange(8) % 2)[:, None])
    assert "is not made of clusters of 2" in message([x, out], [data, result], 32, body, grid=7, cluster=2)


def sent(fault: str = "") -> tuple[list[Value], Body]:
    """Both blocks of a pair fill a row and send it to the other, which adds its own. `fault`: leave out the fence, the barrier before the copy,
    the wait for it; write the row again while it is sent; or let the place, the rank or the bytes be wrong."""
    out = array(f32, 4, 64, name="out")

    def body(b: Builder) -> None:
        flat, bars = shared(b, f32, 128, name="flat"), shared(b, u64, 1, name="bars")
        zero, t, block = b.index(0), b.op("thread_id"), b.op("program_id", axis=0)
        other = b.op("xor", b.op("cluster_rank"), b.const(1, i32))
        when(b, is_thread(b, 0), lambda b: b.multi("mbarrier_init", bars, zero, count=1))
        b.multi("fence_init")
        b.multi("cluster_sync")
        b.multi("store", flat, t, b.cast(b.add(b.mul(block, b.index(100)), t), f32))
        if fault != "fence":
            b.multi("fence_async")
        if fault != "barrier":
            b.multi("barrier")

        def send(b: Builder) -> None:
            b.multi("mbarrier_expect", bars, zero, bytes=128 if fault == "bytes" else 256)
            to = b.index(66 if fault == "place" else 64)
            rank = b.const(2, i32) if fault == "rank" else other
            b.multi("copy_remote", flat, to, flat, zero, bars, zero, rank, count=64)

        when(b, is_thread(b, 0), send)
        if fault == "again":
            b.multi("store", flat, t, b.const(-1.0, f32))
        if fault != "wait":
            b.multi("mbarrier_wait", bars, zero, zero)
        b.multi("store", out, block, t, b.add(b.op("load", flat, t), b.op("load", flat, b.add(t, b.index(64)))))
        b.multi("cluster_sync")

    return [out], body


def test_copies_to_another_block_of_the_cluster() -> None:
    params, body = sent()
    result = np.zeros((4, 64), np.float32)
    run(params, [result], 64, body, grid=4, cluster=2)
    own = np.arange(4)[:, None] * 100.0 + np.arange(64)
    np.testing.assert_array_equal(result, own + own[[1, 0, 3, 2]])


@pytest.mark.parametrize(
    ("fault", "text"),
    [("fence", "not fenced since"), ("barrier", "nothing that orders the two"), ("wait", "still being copied by the copy_remote"),
     ("again", "race on shared memory: store of 'flat'[0]"), ("place", "out of bounds or not at a multiple of 16 bytes"),
     ("rank", "block 2 of a cluster of 2"), ("bytes", "deadlock")],
)  # fmt: skip
def test_misuse_of_copies_to_another_block(fault: str, text: str) -> None:
    params, body = sent(fault)
    assert text in message(params, [np.zeros((4, 64), np.float32)], 64, body, grid=4, cluster=2)


def test_flags_are_for_blocks_that_come_later() -> None:
    """Each block adds its number to what the block before left."""
    out, flags = array(i64, 4, name="out"), array(u32, 4, name="flags")

    def chain(step: int) -> Body:
        def body(b: Builder) -> None:
            block = b.op("program_id", axis=0)
            other = b.add(block, b.index(step))
            inside = b.logical_and(b.op("ge", other, b.index(0)), b.op("lt", other, b.index(4)))

            def add(b: Builder) -> None:
                b.multi("await_flag", flags, other)
                b.multi("store", out, block, b.add(block, b.op("load", out, other)))

            when(b, inside, add, lambda b: b.multi("store", out, block, block))
            b.multi("raise_flag", flags, block)

        return body

    result = np.zeros(4, np.int64)
    run([out, flags], [result, np.zeros(4, np.uint32)], 32, chain(-1), grid=4)
    assert result.tolist() == [0, 1, 3, 6]
    text = message([out, flags], [result, np.zeros(4, np.uint32)], 32, chain(1), grid=4)
    assert "await_flag of 'flags'[1], which no block before this one raises, in block (0), thread 0" in text
    assert "which nobody made 0 before" in message([out, flags], [result, np.full(4, 7, np.uint32)], 32, chain(1), grid=4)


# -- a whole contraction --------------------------------------------------------------------------------------------


class Gemm:
    """out = x @ y.T: a producer warp group loads stages of k = 64, one consumer group for each 64 rows multiplies and stores.

    Faults to make: `release_early` hands a stage back before the matrix unit is done with it, `release_unwaited` right before it
    waits for that, `no_wait` multiplies without waiting for the load, `no_fence` stores without a fence, `no_release` never hands
    a stage back.
    """

    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        tile: tuple[int, int] = (64, 64),
        stages: int = 2,
        blocks: int = 1,
        fault: str = "",
    ) -> None:
        self.x, self.y, self.out = (
            array(bf16, m, k, name="x"),
            array(bf16, n, k, name="y"),
            array(bf16, m, n, name="out"),
        )
        self.shape, self.tile, self.stages, self.blocks, self.fault = (m, n, k), tile, stages, blocks, fault
        self.consumers = tile[0] // 64
        self.threads = 128 * (1 + self.consumers)
        self.a_size, self.b_size = tile[0] * 64, tile[1] * 64

    def build(self, b: Builder) -> None:
        self.a = shared(b, bf16, self.stages * self.a_size, name="a")
        self.b = shared(b, bf16, self.stages * self.b_size, name="b")
        self.c = shared(b, bf16, self.tile[0] * self.tile[1], name="c")
        self.full, self.empty = shared(b, u64, self.stages, name="full"), shared(b, u64, self.stages, name="empty")
        self.maps = [
            tensor_map(b, t, (rows, 64)) for t, rows in ((self.x, self.tile[0]), (self.y, self.tile[1]), (self.out, 64))
        ]
        when(b, is_thread(b, 0), self.start)
        b.multi("barrier")
        self.group = b.op("floordiv", b.op("thread_id"), b.index(128))
        when(b, b.op("eq", self.group, b.index(0)), self.produce, self.consume)

    def start(self, b: Builder) -> None:
        for s in range(self.stages):
            b.multi("mbarrier_init", self.full, b.index(s), count=1)
            b.multi("mbarrier_init", self.empty, b.index(s), count=self.consumers)
        b.multi("fence_init")

    def over_tiles(self, b: Builder, body: Callable[[Builder, Value, Value, Value], None]) -> None:
        """The block's tiles: their corner, and the number of the first of their steps among all of the block's."""
        columns, steps = self.shape[1] // self.tile[1], self.shape[2] // 64

        def each(b: Builder, tile: Value) -> list[Value]:
            row = b.mul(b.op("floordiv", tile, b.index(columns)), b.index(self.tile[0]))
            column = b.mul(b.op("mod", tile, b.index(columns)), b.index(self.tile[1]))
            body(b, row, column, b.mul(b.op("floordiv", tile, b.index(self.blocks)), b.index(steps)))
            return []

        tiles = self.shape[0] // self.tile[0] * columns
        b.for_(b.op("program_id", axis=0), b.index(tiles), b.index(self.blocks), [], each)

    def stage(self, b: Builder, first: Value, i: Value) -> tuple[Value, Value]:
        step = b.add(first, i)
        return b.op("mod", step, b.index(self.stages)), b.op(
            "mod", b.op("floordiv", step, b.index(self.stages)), b.index(2)
        )

    def produce(self, b: Builder) -> None:
        b.multi("set_registers", count=40, increase=False)
        first_warp = b.op("lt", b.op("thread_id"), b.index(32))
        when(b, first_warp, lambda b: when(b, b.op("elect"), lambda b: self.over_tiles(b, self.load)))

    def load(self, b: Builder, row: Value, column: Value, first: Value) -> None:
        def each(b: Builder, i: Value) -> list[Value]:
            stage, parity = self.stage(b, first, i)
            with b.at(line(3)):
                b.multi("mbarrier_wait", self.empty, stage, b.sub(b.index(1), parity))
            b.multi("mbarrier_expect", self.full, stage, bytes=2 * (self.a_size + self.b_size))
            k = b.mul(i, b.index(64))
            with b.at(line(4)):
                b.multi("tma_load", self.a, b.mul(stage, b.index(self.a_size)), self.maps[0], self.full, stage, row, k)
                b.multi(
                    "tma_load", self.b, b.mul(stage, b.index(self.b_size)), self.maps[1], self.full, stage, column, k
                )
            return []

        b.for_(b.index(0), b.index(self.shape[2] // 64), b.index(1), [], each)

    def consume(self, b: Builder) -> None:
        b.multi("set_registers", count=232, increase=True)
        self.own = b.sub(self.group, b.index(1))
        self.leader = b.op("eq", b.op("mod", b.op("thread_id"), b.index(128)), b.index(0))
        self.over_tiles(b, self.multiply)
        when(b, self.leader, lambda b: b.multi("tma_wait", pending=0, read=True))

    def release(self, b: Builder, stage: Value) -> None:
        if self.fault != "no_release":
            when(b, self.leader, lambda b: b.multi("mbarrier_arrive", self.empty, stage))

    def multiply(self, b: Builder, row: Value, column: Value, first: Value) -> None:
        n = self.tile[1]

        def each(b: Builder, i: Value, *acc: Value) -> Sequence[Value]:
            stage, parity = self.stage(b, first, i)
            if self.fault != "no_wait":
                with b.at(line(6)):
                    b.multi("mbarrier_wait", self.full, stage, parity)
            at = b.add(b.mul(stage, b.index(self.a_size)), b.mul(self.own, b.index(64 * 64)))
            steps = tuple((s * 16, s * 16, 0) for s in range(4))
            with b.at(line(7)):
                acc = b.multi(
                    "wgmma", self.a, at, self.b, b.mul(stage, b.index(self.b_size)), *acc, n=n, k=16, steps=steps
                )
            if self.fault == "release_unwaited":
                self.release(b, stage)
                return b.multi("wgmma_wait", *acc, pending=0)
            acc = b.multi("wgmma_wait", *acc, pending=1)
            if self.fault == "release_early":
                self.release(b, stage)
            else:
                before = b.op("mod", b.add(stage, b.index(self.stages - 1)), b.index(self.stages))
                when(b, b.op("gt", i, b.index(0)), lambda b: self.release(b, before))
            return acc

        count = self.shape[2] // 64
        acc = b.for_(b.index(0), b.index(count), b.index(1), zeros(b, n // 2), each)
        acc = b.multi("wgmma_wait", *acc, pending=0)
        if not self.fault.startswith("release"):
            self.release(b, self.stage(b, first, b.index(count - 1))[0])
        self.epilogue(b, row, column, acc)

    def epilogue(self, b: Builder, row: Value, column: Value, acc: Sequence[Value]) -> None:
        """Boxes of 64 x 64 by stmatrix into swizzled memory, stored by one thread."""
        t = b.op("mod", b.op("thread_id"), b.index(128))
        lane, warp = b.op("mod", t, b.index(32)), b.op("floordiv", t, b.index(32))
        barrier = b.add(self.own, b.index(1))
        when(b, self.leader, lambda b: b.multi("tma_wait", pending=0, read=True))
        b.multi("named_barrier", barrier, threads=128)
        inner = b.add(b.mul(warp, b.index(16)), b.op("mod", lane, b.index(16)))
        half = b.op("floordiv", lane, b.index(16))
        for box in range(self.tile[1] // 64):
            base = b.mul(b.add(b.mul(self.own, b.index(self.tile[1] // 64)), b.index(box)), b.index(64 * 64))
            for j in range(4):
                chunk = b.op("xor", b.add(half, b.index(2 * j)), b.op("mod", inner, b.index(8)))
                place = b.add(base, b.add(b.mul(inner, b.index(64)), b.mul(chunk, b.index(8))))
                part = acc[32 * box + 8 * j : 32 * box + 8 * j + 8]
                pairs = [
                    b.op("to_bits", b.op("pack", b.cast(p, bf16), b.cast(q, bf16)))
                    for p, q in zip(part[::2], part[1::2], strict=True)
                ]
                b.multi("stmatrix", self.c, place, *pairs)
        if self.fault != "no_fence":
            b.multi("fence_async")
        b.multi("named_barrier", barrier, threads=128)

        def store(b: Builder) -> None:
            for box in range(self.tile[1] // 64):
                base = b.mul(b.add(b.mul(self.own, b.index(self.tile[1] // 64)), b.index(box)), b.index(64 * 64))
                down = b.add(row, b.mul(self.own, b.index(64)))
                with b.at(line(9)):
                    b.multi("tma_store", self.c, base, self.maps[2], down, b.add(column, b.index(64 * box)))
            b.multi("tma_commit")

        when(b, self.leader, store)

    @property
    def params(self) -> list[Value]:
        return [self.x, self.y, self.out]

    def arrays(self) -> list[np.ndarray]:
        m, n, k = self.shape
        return [numbers(bf16, m, k), numbers(bf16, n, k, seed=1), np.zeros((m, n), bf16.numpy)]

    def message(self) -> str:
        return message(self.params, self.arrays(), self.threads, self.build, self.blocks)


@pytest.mark.parametrize(
    ("shape", "tile", "stages", "blocks"),
    [
        ((64, 64, 128), (64, 64), 2, 1),
        ((64, 64, 320), (64, 64), 2, 1),
        ((128, 192, 192), (64, 64), 3, 2),
        ((256, 256, 256), (128, 128), 3, 3),
    ],
)
def test_a_pipelined_contraction(shape: tuple[int, int, int], tile: tuple[int, int], stages: int, blocks: int) -> None:
    gemm = Gemm(*shape, tile, stages, blocks)
    arrays = gemm.arrays()
    run(gemm.params, arrays, gemm.threads, gemm.build, blocks)
    wanted = product(arrays[0], arrays[1].T).astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(arrays[2].astype(np.float32), wanted.astype(np.float32))


def test_warps_on_their_own_compute_the_same() -> None:
    gemm = Gemm(128, 64, 192, (128, 64))
    arrays = gemm.arrays()
    made = kernel(gemm.params, gemm.threads, gemm.build)
    launch = EmulatedLaunch(made, {}, arrays, MMA_LANES, Waits.of(made))
    for _ in launch.team(0, 1, launch.races(1), apart=True).run():
        pass
    wanted = product(arrays[0], arrays[1].T).astype(bf16.numpy)
    np.testing.assert_array_equal(arrays[2].astype(np.float32), wanted.astype(np.float32))


def test_a_stage_handed_back_too_early_is_reported() -> None:
    text = Gemm(64, 64, 320, fault="release_early").message()
    assert (
        "k.zyn:7:1: error[TW050]: wgmma of uninitialised shared memory: 'a'[0] is still being copied by the tma_load"
        in text
    )
    text = Gemm(64, 64, 320, fault="release_unwaited").message()
    assert (
        text.startswith("k.zyn:4:1")
        and "race on shared memory: tma_load into 'a'[0], which may still be in use" in text
    )


def test_multiplying_without_waiting_for_the_load_is_reported() -> None:
    text = Gemm(64, 64, 128, fault="no_wait").message()
    assert text.startswith("k.zyn:7:1") and "wgmma of uninitialised shared memory: 'a'[0]" in text


def test_storing_without_a_fence_is_reported() -> None:
    text = Gemm(64, 64, 128, fault="no_fence").message()
    assert (
        text.startswith("k.zyn:9:1")
        and "tma_store reads 'c'[0], which was written by a thread and not fenced since" in text
    )


def test_a_stage_never_handed_back_is_a_deadlock_of_producer_and_consumers() -> None:
    text = Gemm(64, 64, 320, fault="no_release").message()
    assert (
        "warp 0 waits for parity 0 of mbarrier 'empty'[0] (phase 0, 1 of 1 arrivals and 0 bytes to come) at k.zyn:3:1"
        in text
    )
    assert (
        "warp 4 waits for parity 1 of mbarrier 'full'[0] (phase 1, 1 of 1 arrivals and 0 bytes to come) at k.zyn:6:1"
        in text
    )


def test_the_text_form_of_the_contraction_says_the_same() -> None:
    gemm = Gemm(64, 64, 128)
    first = kernel(gemm.params, gemm.threads, gemm.build)
    text = print_kernel(first)
    again = parse_kernel(text)
    assert print_kernel(again) == text
    arrays = gemm.arrays()
    run_kernel(again, arrays, {})
    np.testing.assert_array_equal(
        arrays[2].astype(np.float64), product(arrays[0], arrays[1].T).astype(bf16.numpy).astype(np.float64)
    )
