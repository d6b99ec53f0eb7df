"""Thread-stage kernels written by hand, with every op for matrix units, asynchronous copies and their barriers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

from support import array
from tilewright.base.dtypes import DType, bf16, f8e4m3, f8e5m2, f16, f32, f64, i8, i32, i64, u8, u16, u32, u64
from tilewright.base.sizes import Size, ceildiv
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Stage, Value
from tilewright.ir.ops_matrix import MMA_SHAPES, accumulator_dtype
from tilewright.ir.types import Tensor
from tilewright.ir.verify import verify_kernel

WGMMA_DTYPES: tuple[DType, ...] = (bf16, f16, f32, f8e4m3, f8e5m2, i8, u8)


def kernel(name: str, params: Sequence[Value], b: Builder, threads: int = 128, grid: Size | int = 1, **attrs: Attr) -> Kernel:
    """The ops collected in the builder as a verified kernel."""
    body, kept = Block((), tuple(b.ops)), MappingProxyType(attrs)
    whole = Kernel(name, Stage.THREAD, tuple(params), body, grid=(Size.of(grid),), threads=threads, attrs=kept)
    verify_kernel(whole)
    return whole


def shared(b: Builder, dtype: DType, count: int, align: int = 1024) -> Value:
    return b.op("alloc", dtype=dtype, shape=(count,), space="shared", align=align)


def when(b: Builder, condition: Value, body: Callable[[Builder], None]) -> None:
    def then(inner: Builder) -> list[Value]:
        body(inner)
        return []

    b.if_(condition, then, lambda inner: [])


def row_map(b: Builder, memory: Value, box: Sequence[int], swizzle: int = 128) -> Value:
    """The map of a row-major tensor as it is."""
    type_ = memory.type
    assert isinstance(type_, Tensor)
    return b.op("tensor_map", memory, shape=type_.shape, strides=type_.strides, box=tuple(box), swizzle=swizzle)


def tma_copy(rank: int, dtype: DType = f32) -> Kernel:
    """`o = x` of one box, through shared memory."""
    names = [f"n{k}" for k in range(rank)]
    x, o = (array(n, dtype, *names, align=16) for n in "xo")
    box = (*[2] * (rank - 1), 32)
    count = 32 << (rank - 1)
    b = Builder()
    buffer, barriers = shared(b, dtype, 2 * count), shared(b, u64, 2, 8)
    source, target = row_map(b, x, box, 0), row_map(b, o, box, 0)
    zero, wide, narrow = b.index(0), b.mul(b.op("program_id", axis=0), b.index(32)), b.const(1, i32)
    where = [wide if k == rank - 1 else narrow for k in range(rank)]

    def copy(inner: Builder) -> None:
        inner.multi("prefetch_map", source)
        inner.multi("mbarrier_init", barriers, zero, count=1)
        inner.multi("fence_init")
        inner.multi("mbarrier_expect", barriers, zero, bytes=count * dtype.itemsize)
        inner.multi("tma_load", buffer, inner.const(count, i32), source, barriers, zero, *where)
        inner.multi("mbarrier_wait", barriers, zero, inner.const(0, i32))
        inner.multi("fence_async")
        inner.multi("tma_store", buffer, inner.index(count), target, *where)
        inner.multi("tma_commit")
        inner.multi("tma_wait", pending=1, read=True)
        inner.multi("tma_wait", pending=0)

    when(b, b.op("eq", b.op("thread_id"), zero), copy)
    return kernel(f"copy_{rank}d", (x, o), b, 32)


def image_copy(multicast: bool = False) -> Kernel:
    """`o` is what a filter's element sees of images: 64 pixels of 64 channels, every second one along w."""
    x, o = array("x", bf16, "n", "h", "w", "c", align=16), array("o", bf16, "m", "k", align=16)
    b = Builder()
    buffer, barriers = shared(b, bf16, 64 * 64), shared(b, u64, 1, 8)
    assert isinstance(x.type, Tensor)
    source = b.op(
        "tensor_map", x, shape=x.type.shape, strides=x.type.strides, box=(1, 1, 1, 64), swizzle=128, pixels=64,
        lower=(-1, Size.of("pad") * -1), upper=(-1, Size.of("pad") - 2), steps=(1, 2),
    )  # fmt: skip
    target = row_map(b, o, (64, 64))
    zero, block = b.index(0), b.op("program_id", axis=0)
    where = [b.add(block, b.index(k)) for k in range(4)]
    offsets = [b.cast(b.add(block, b.index(4)), i32), b.add(block, b.index(5))]
    attrs: dict[str, Attr] = {"multicast": True} if multicast else {}

    def copy(inner: Builder) -> None:
        inner.multi("mbarrier_init", barriers, zero, count=1)
        inner.multi("fence_init")
        inner.multi("mbarrier_expect", barriers, zero, bytes=64 * 64 * 2)
        mask = [inner.const(3, i32)] if multicast else []
        inner.multi("tma_load", buffer, zero, source, barriers, zero, *where, *offsets, *mask, **attrs)  # type: ignore[arg-type]
        inner.multi("mbarrier_wait", barriers, zero, inner.const(0, i32))
        inner.multi("tma_store", buffer, zero, target, block, zero)
        inner.multi("tma_commit")
        inner.multi("tma_wait", pending=0)

    when(b, b.op("eq", b.op("thread_id"), zero), copy)
    kind: dict[str, Attr] = {"cluster": 2} if multicast else {}
    return kernel("images_multicast" if multicast else "images", (x, o), b, 32, 2, **kind)


def cluster() -> Kernel:
    """A multicast load, arrivals at the neighbour's mbarrier, and everything else about clusters and warps with roles."""
    x = array("x", f32, "n", 32, align=16)
    o = array("o", f32, "m")
    b = Builder()
    buffer, barriers = shared(b, f32, 256), shared(b, u64, 4, 8)
    source = row_map(b, x, (8, 32))
    again = row_map(b, x, (8, 32))
    zero, one = b.index(0), b.const(1, i32)
    rank = b.op("cluster_rank")
    thread = b.op("thread_id")

    def start(inner: Builder) -> None:
        inner.multi("mbarrier_init", barriers, zero, count=1)
        inner.multi("mbarrier_init", barriers, one, count=2)
        inner.multi("fence_init")

    when(b, b.op("eq", thread, zero), start)
    b.multi("cluster_sync")
    b.multi("cluster_arrive")
    b.emit("cluster_sync", [], {"arrived": True})
    b.multi("release_next")
    b.multi("wait_previous")

    def produce(inner: Builder) -> None:
        inner.multi("set_registers", count=40, increase=False)

        def load(last: Builder) -> None:
            last.multi("mbarrier_expect", barriers, zero, bytes=1024)
            last.multi("tma_load", buffer, zero, source, barriers, zero, rank, zero, last.const(3, i32), multicast=True)
            last.multi("tma_load", buffer, zero, again, barriers, zero, rank, zero)

        when(inner, inner.op("elect"), load)

    def consume(inner: Builder) -> None:
        inner.multi("set_registers", count=232, increase=True)
        inner.multi("mbarrier_wait", barriers, zero, zero)
        inner.multi("mbarrier_arrive", barriers, one)
        inner.multi("mbarrier_arrive", barriers, one, inner.op("xor", rank, one), remote=True)
        other = inner.op("xor", rank, one)
        inner.multi("copy_remote", buffer, inner.index(64), buffer, zero, barriers, zero, other, count=32)
        inner.multi("named_barrier", inner.index(1), threads=128)
        inner.multi("named_barrier", inner.const(2, i32), threads=256, arrive=True)
        mine = inner.op("load", buffer, inner.op("and", thread, inner.index(127)))
        inner.multi("store", o, thread, inner.add(mine, inner.op("load_remote", buffer, inner.op("and", thread, inner.index(127)), other)))

    when(b, b.op("lt", thread, b.index(128)), produce)
    when(b, b.op("ge", thread, b.index(128)), consume)
    return kernel("cluster", (x, o), b, 256, 2, cluster=2, dependent=True, min_blocks=1)


def operand_map(b: Builder, memory: Value, major: str, rows: int) -> tuple[Value, list[Value]]:
    """The map that brings an operand's tile of `rows` by 128 bytes of k, and where it is."""
    type_ = memory.type
    assert isinstance(type_, Tensor)
    zero = b.index(0)
    if major == "k":
        return row_map(b, memory, (rows, 128 // type_.dtype.itemsize)), [zero, zero]
    k, length = type_.shape
    seen = {"shape": (ceildiv(length, 64), k, Size.of(64)), "strides": (Size.of(64), length, Size.of(1))}
    return b.op("tensor_map", memory, box=(rows // 64, 64, 64), swizzle=128, **seen), [zero, zero, zero]


def wgmma(dtype: DType, n: int = 64, a_major: str = "k", b_major: str = "k", wait: int = 0) -> Kernel:
    """`o = a @ b` of one tile: a is 128 rows by 128 bytes of k, b has n rows; as [k, m] and [k, n] where the major is `mn`."""
    k, row = 32 // dtype.itemsize, 128 // dtype.itemsize
    total = accumulator_dtype(dtype)
    a = array("a", dtype, *((128, row) if a_major == "k" else (row, 128)), align=16)
    other = array("b", dtype, *((n, row) if b_major == "k" else (row, n)), align=16)
    o = array("o", total, 128, n)
    b = Builder()
    a_tile, b_tile, barriers = shared(b, dtype, 2 * 128 * row), shared(b, dtype, n * row), shared(b, u64, 1, 8)
    a_map, a_where = operand_map(b, a, a_major, 128)
    b_map, b_where = operand_map(b, other, b_major, n)
    thread, zero, place = b.op("thread_id"), b.index(0), b.const(128 * row, u32)

    def load(inner: Builder) -> None:
        inner.multi("mbarrier_init", barriers, zero, count=1)
        inner.multi("fence_init")
        inner.multi("mbarrier_expect", barriers, zero, bytes=(128 + n) * 128)
        inner.multi("tma_load", a_tile, place, a_map, barriers, zero, *a_where)
        inner.multi("tma_load", b_tile, zero, b_map, barriers, zero, *b_where)

    when(b, b.op("eq", thread, zero), load)
    b.multi("barrier")
    b.multi("mbarrier_wait", barriers, zero, zero)
    accumulators = [b.const(0, total) for _ in range(n)]
    a_step, b_step = (k if major == "k" else k * row for major in (a_major, b_major))
    steps = tuple((64 * row * half + a_step * s, b_step * s, n // 2 * half) for s in range(4) for half in (0, 1))
    options: dict[str, Attr] = {"a_major": a_major, "b_major": b_major, "a_block": 64 * row, "b_block": 64 * row}
    accumulators = list(b.multi("wgmma", a_tile, place, b_tile, zero, *accumulators, n=n, k=k, steps=steps, **options))
    if wait:
        accumulators = list(b.multi("wgmma_wait", *accumulators, pending=wait))
    accumulators = list(b.multi("wgmma_wait", *accumulators, pending=0))
    column = b.mul(b.op("mod", thread, b.index(4)), b.index(2))
    line = b.add(
        b.mul(b.op("floordiv", thread, b.index(32)), b.index(16)), b.op("floordiv", b.op("mod", thread, b.index(32)), b.index(4))
    )
    for r, value in enumerate(accumulators):
        half, rest = divmod(r, n // 2)
        there = b.add(line, b.index(64 * half + 8 * (rest // 2 % 2)))
        b.multi("store", o, there, b.add(column, b.index(8 * (rest // 4) + rest % 2)), value)
    return kernel(f"wgmma_{dtype}_{a_major}_{b_major}", (a, other, o), b)


def wgmma_registers(dtype: DType, b_major: str = "k") -> Kernel:
    """`o = a @ b` of one tile of 64 rows, a in registers: each thread's 16 words lie side by side in memory."""
    n, k, row = 64, 32 // dtype.itemsize, 128 // dtype.itemsize
    total = accumulator_dtype(dtype)
    words, other, o = array("a", u32, 128, 16), array("b", dtype, *((n, row) if b_major == "k" else (row, n)), align=16), array("o", total, 128, 32)
    b = Builder()
    b_tile, barriers = shared(b, dtype, n * row), shared(b, u64, 1, 8)
    b_map, b_where = operand_map(b, other, b_major, n)
    thread, zero = b.op("thread_id"), b.index(0)

    def load(inner: Builder) -> None:
        inner.multi("mbarrier_init", barriers, zero, count=1)
        inner.multi("fence_init")
        inner.multi("mbarrier_expect", barriers, zero, bytes=n * 128)
        inner.multi("tma_load", b_tile, zero, b_map, barriers, zero, *b_where)

    when(b, b.op("eq", thread, zero), load)
    b.multi("barrier")
    b.multi("mbarrier_wait", barriers, zero, zero)
    own = [b.op("load", words, thread, b.index(w)) for w in range(16)]
    steps = tuple((4 * s, (k if b_major == "k" else k * row) * s, 0) for s in range(4))
    options: dict[str, Attr] = {"dtype": dtype, "words": 16, "n": n, "k": k, "steps": steps, "b_major": b_major, "b_block": 64 * row}
    accumulators = b.multi("wgmma_registers", *own, b_tile, zero, *[b.const(0, total)] * (n // 2), **options)
    for r, value in enumerate(b.multi("wgmma_wait", *accumulators, pending=0)):
        b.multi("store", o, thread, b.index(r), value)
    return kernel(f"wgmma_registers_{dtype}_{b_major}", (words, other, o), b, 128)


def mma(dtype: DType) -> Kernel:
    """One instruction of a warp on registers."""
    _, na, nb, nc = MMA_SHAPES[dtype.name]
    operand, total = f64 if dtype is f64 else u32, accumulator_dtype(dtype)
    x, o = array("x", operand, 32, na + nb), array("o", total, 32, nc)
    b = Builder()
    lane = b.op("thread_id")
    inputs = [b.op("load", x, lane, b.index(k)) for k in range(na + nb)]
    start = [b.const(0, total) for _ in range(nc)]
    for k, value in enumerate(b.multi("mma", *inputs, *start, dtype=dtype)):
        b.multi("store", o, lane, b.index(k), value)
    return kernel(f"mma_{dtype}", (x, o), b, 32)


def matrices() -> Kernel:
    """Loads of 8x8 matrices of every kind."""
    o = array("o", u32, 32)
    b = Builder()
    tile = shared(b, f16, 1024, 128)
    lane = b.op("thread_id")
    offset = b.mul(lane, b.index(8))
    total = b.const(0, u32)
    for count in (1, 2, 4):
        for trans in (False, True):
            for value in b.multi("ldmatrix", tile, offset, count=count, trans=trans):
                total = b.op("xor", total, value)
    for dtype in (f16, bf16, f8e4m3, u16, i8):
        total = b.op("xor", b.op("to_bits", b.op("from_bits", total, dtype=dtype)), b.const(5, u32))
    b.multi("store", o, lane, total)
    return kernel("matrices", (o,), b, 32)


def store_matrices() -> Kernel:
    """Stores of 8x8 matrices of every kind; pairs of f32 become packed halves."""
    x, o = array("x", f32, 64, align=16), array("o", bf16, 1024)
    b = Builder()
    tile = shared(b, bf16, 1024, 128)
    lane = b.op("thread_id")
    offset = b.mul(lane, b.index(8))
    pair = b.op("load", x, b.mul(lane, b.index(2)), width=2)
    bits = b.op("to_bits", b.cast(pair, bf16))
    halves = b.op("to_bits", b.cast(b.op("pack", b.op("extract", pair, lane=1), b.op("extract", pair, lane=0)), f16))
    for count in (1, 2, 4):
        for trans in (False, True):
            b.multi("stmatrix", tile, offset, *[bits, halves, bits, halves][:count], trans=trans)
    b.multi("barrier")
    b.multi("store", o, lane, b.op("load", tile, lane))
    return kernel("store_matrices", (x, o), b, 32)


def copies() -> Kernel:
    """Copies of 4, 8 and 16 bytes by each thread, some masked."""
    x, o = array("x", f32, "n", 4, align=16), array("o", f32, "n")
    b = Builder()
    tile = shared(b, f32, 3072, 16)
    thread, zero = b.op("thread_id"), b.index(0)
    there = b.op("lt", thread, b.index(Size.of("n")))
    b.multi("prefetch", x, thread, zero)
    for k, bytes_ in enumerate((4, 8, 16)):
        place = b.add(b.mul(thread, b.index(4)), b.index(1024 * k))
        b.multi("copy_async", tile, place, x, thread, zero, bytes=bytes_)
        b.multi("copy_async", tile, b.add(place, b.index(512)), x, thread, zero, there, bytes=bytes_, masked=True)
        b.multi("copy_commit")
    b.multi("copy_wait", pending=1)
    b.multi("copy_wait", pending=0)
    b.multi("barrier")
    b.multi("store", o, thread, b.op("load", tile, thread))
    return kernel("copies", (x, o), b, 128)


def flags() -> Kernel:
    """Each block writes a row, and adds to it that of the block before."""
    o, raised = array("o", f32, "m", 32), array("raised", u32, "m")
    b = Builder()
    block, thread = b.op("program_id", axis=0), b.op("thread_id")
    leader = b.op("eq", thread, b.index(0))
    b.multi("store", o, block, thread, b.cast(block, f32))
    b.multi("barrier")
    when(b, leader, lambda inner: inner.multi("raise_flag", raised, block))

    def add(inner: Builder) -> None:
        before = inner.sub(block, inner.index(1))
        when(inner, leader, lambda deep: deep.multi("await_flag", raised, before))
        inner.multi("barrier")
        inner.multi("store", o, block, thread, inner.op("load", o, before, thread))

    when(b, b.op("gt", block, b.index(0)), add)
    return kernel("flags", (o, raised), b, 32, Size.of("m"))


def counts() -> Kernel:
    """Each block writes a row behind an address, and reads that of the block before once that has counted up."""
    table, counters = array("table", u64, 1), array("counters", u32, "m")
    b = Builder()
    block, thread = b.op("program_id", axis=0), b.op("thread_id")
    leader = b.op("eq", thread, b.index(0))
    o = b.op("tensor_at", table, b.index(0), dtype=f32, shape=(64, 32), strides=(32, 1), align=16)
    weights = b.op("tensor_at", table, b.index(0), dtype=f32, shape=(64, 32), strides=(32, 1), align=16, constant=True)
    when(b, leader, lambda inner: inner.multi("prefetch", weights, block, inner.index(0), bytes=128))
    b.multi("store", o, block, thread, b.cast(block, f32))
    b.multi("barrier")
    when(b, leader, lambda inner: inner.multi("count_up", counters, block))

    def add(inner: Builder) -> None:
        before = inner.sub(block, inner.index(1))
        when(inner, leader, lambda deep: deep.multi("await_count", counters, before, deep.const(1, u32)))
        inner.multi("barrier")
        inner.multi("store", o, block, thread, inner.op("load", o, before, thread))

    when(b, b.op("gt", block, b.index(0)), add)
    return kernel("counts", (table, counters), b, 32, Size.of("m"))


def matrix_kernels() -> list[Kernel]:
    """All of them: every op at least once."""
    return [
        *(tma_copy(rank) for rank in range(1, 6)), image_copy(), image_copy(True), cluster(), *(wgmma(d) for d in WGMMA_DTYPES),
        *(wgmma_registers(d) for d in WGMMA_DTYPES), wgmma_registers(bf16, "mn"),
        *(mma(d) for d in (bf16, f16, f32, i8, u8, f64)), matrices(), store_matrices(), copies(), flags(), counts(),
    ]  # fmt: skip


def gemm(stages: int = 4, bm: int = 128, bn: int = 256, b_major: str = "k") -> Kernel:
    """c = a @ b in bf16: one warp loads, two warp groups multiply; a ring of mbarriers between them. Tiles are whole."""
    a, c = array("a", bf16, "m", "k", align=16), array("c", bf16, "m", "n", align=16)
    other = array("b", bf16, "n", "k", align=16) if b_major == "k" else array("b", bf16, "k", "n", align=16)
    b = Builder()
    a_tile, b_tile = shared(b, bf16, stages * bm * 64), shared(b, bf16, stages * bn * 64)
    out_tile = shared(b, bf16, bm * bn // 4)
    full, empty = shared(b, u64, stages, 8), shared(b, u64, stages, 8)
    a_map = row_map(b, a, (bm, 64))
    b_map, _ = operand_map(b, other, b_major, bn)
    c_map = row_map(b, c, (64, 64))
    zero = b.index(0)
    thread = b.op("thread_id")
    columns = b.index(ceildiv(Size.of("n"), bn))
    block = b.op("program_id", axis=0)
    row, column = b.mul(b.op("floordiv", block, columns), b.index(bm)), b.mul(b.op("mod", block, columns), b.index(bn))
    group = b.op("shuffle", b.cast(b.op("floordiv", thread, b.index(128)), i32), b.const(0, i32), mode="idx")
    loads = b.index(ceildiv(Size.of("k"), 64))

    def start(inner: Builder) -> None:
        for s in range(stages):
            inner.multi("mbarrier_init", full, inner.index(s), count=1)
            inner.multi("mbarrier_init", empty, inner.index(s), count=2)
        inner.multi("fence_init")

    when(b, b.op("eq", thread, zero), start)
    b.multi("barrier")

    def ring(inner: Builder, i: Value) -> tuple[Value, Value]:
        """The stage and the parity of round i."""
        rounds = inner.cast(inner.op("floordiv", i, inner.index(stages)), i32)
        return inner.op("mod", i, inner.index(stages)), inner.op("and", rounds, inner.const(1, i32))

    def produce(inner: Builder) -> None:
        inner.multi("set_registers", count=40, increase=False)

        def load(each: Builder, i: Value) -> list[Value]:
            stage, parity = ring(each, i)
            each.multi("mbarrier_wait", empty, stage, each.op("xor", parity, each.const(1, i32)))
            each.multi("mbarrier_expect", full, stage, bytes=(bm + bn) * 128)
            at = each.mul(i, each.index(64))
            each.multi("tma_load", a_tile, each.mul(stage, each.index(bm * 64)), a_map, full, stage, row, at)
            where = [column, at] if b_major == "k" else [each.op("floordiv", column, each.index(64)), at, zero]
            each.multi("tma_load", b_tile, each.mul(stage, each.index(bn * 64)), b_map, full, stage, *where)
            return []

        def one(last: Builder) -> None:
            last.for_(zero, loads, last.index(1), [], load)

        warp = inner.op("shuffle", inner.cast(inner.op("floordiv", thread, inner.index(32)), i32), inner.const(0, i32), mode="idx")
        when(inner, inner.op("eq", warp, inner.const(0, i32)), lambda last: when(last, last.op("elect"), one))

    def consume(inner: Builder) -> None:
        inner.multi("set_registers", count=232, increase=True)
        mine = inner.sub(group, inner.const(1, i32))
        first = inner.op("eq", inner.op("mod", thread, inner.index(128)), zero)
        a_base = inner.mul(inner.cast(mine, i64), inner.index(64 * 64))

        def multiply(each: Builder, i: Value, *sums: Value) -> list[Value]:
            stage, parity = ring(each, i)
            each.multi("mbarrier_wait", full, stage, parity)
            b_step = 16 if b_major == "k" else 16 * 64
            steps = tuple((16 * s, b_step * s, 0) for s in range(4))
            a_at = each.add(each.mul(stage, each.index(bm * 64)), a_base)
            b_at = each.mul(stage, each.index(bn * 64))
            sums = each.multi(
                "wgmma", a_tile, a_at, b_tile, b_at, *sums, n=bn, k=16, steps=steps, b_major=b_major, b_block=64 * 64
            )
            sums = each.multi("wgmma_wait", *sums, pending=1)
            before, _ = ring(each, each.sub(i, each.index(1)))
            release = each.op("and", first, each.op("gt", i, zero))
            when(each, release, lambda last: (last.multi("mbarrier_arrive", empty, before), None)[1])
            return list(sums)

        sums: Sequence[Value] = [inner.const(0.0, f32) for _ in range(bn // 2)]
        sums = inner.for_(zero, loads, inner.index(1), sums, multiply)
        sums = inner.multi("wgmma_wait", *sums, pending=0)
        lane = inner.op("mod", thread, inner.index(32))
        warp = inner.op("mod", inner.op("floordiv", thread, inner.index(32)), inner.index(4))
        line = inner.add(inner.mul(warp, inner.index(16)), inner.op("mod", lane, inner.index(16)))
        mask = inner.op("mod", line, inner.index(8))
        half = inner.op("floordiv", lane, inner.index(16))
        mine_at = inner.mul(inner.cast(mine, i64), inner.index(64 * 64))
        barrier = inner.add(mine, inner.const(1, i32))
        for part in range(bn // 64):
            for chunk in range(4):
                quads = []
                for q in range(4):
                    r = 32 * part + 8 * chunk + 2 * q
                    quads.append(inner.op("to_bits", inner.cast(inner.op("pack", sums[r], sums[r + 1]), bf16)))
                place = inner.op("xor", inner.add(half, inner.index(2 * chunk)), mask)
                offset = inner.add(inner.mul(line, inner.index(64)), inner.mul(place, inner.index(8)))
                inner.multi("stmatrix", out_tile, inner.add(mine_at, offset), *quads)
            inner.multi("fence_async")
            inner.multi("named_barrier", barrier, threads=128)

            def store(last: Builder, part: int = part) -> None:
                line0 = last.add(row, last.mul(last.cast(mine, i64), last.index(64)))
                last.multi("tma_store", out_tile, mine_at, c_map, line0, last.add(column, last.index(64 * part)))
                last.multi("tma_commit")
                last.multi("tma_wait", pending=0, read=True)

            when(inner, first, store)
            inner.multi("named_barrier", barrier, threads=128)

    is_producer = b.op("eq", group, b.const(0, i32))
    when(b, is_producer, produce)
    when(b, b.op("not", is_producer), consume)
    grid = ceildiv(Size.of("m"), bm) * ceildiv(Size.of("n"), bn)
    return kernel(f"gemm_{b_major}", (a, other, c), b, 384, grid)
