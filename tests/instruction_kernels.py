"""Thread-stage kernels written by hand, with every op of explicit kernels: what is assembled, run on the emulator and on GPUs.

A `Case` has a kernel and its arrays; every array is compared after a run, so results that depend on the order of threads are not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from tilewright.base.dtypes import (
    SCALARS,
    DType,
    bf16,
    bool_,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
)
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_kernel
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value
from tilewright.ir.ops_simt import (
    ACCESS_SCOPES,
    ATOMICS,
    LOAD_CACHES,
    LOAD_ORDERS,
    ORDERS,
    REDUX,
    RELATIONS,
    STORE_CACHES,
    STORE_ORDERS,
)
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.ir.verify import verify_kernel

THREADS, BLOCKS = 64, 2
INTEGERS = (i32, u32, i64, u64)


@dataclass
class Case:
    name: str
    kernel: Kernel
    arrays: dict[str, np.ndarray]
    sm: int = 75
    """The first generation of GPUs that takes it."""
    ulp: dict[str, float] = field(default_factory=dict)
    """How far arrays may be off, in units of the last place of 1; the others must agree to the bit."""

    def program(self) -> Program:
        """All arrays as outputs of one call."""
        arrays = tuple(ProgramArray(p.name, p.type, "output") for p in self.kernel.params if isinstance(p.type, Tensor))
        return Program(self.name, (), arrays, (), (KernelCall(self.kernel, tuple(self.arrays)),))

    def emulate(self) -> dict[str, np.ndarray]:
        """The arrays after a run on the emulator."""
        after = {name: array.copy() for name, array in self.arrays.items()}
        run_kernel(self.kernel, list(after.values()), {})
        return after


class Maker:
    """Builds the kernel of a case: parameters as they are asked for, one array each."""

    def __init__(self, name: str, threads: int = THREADS, blocks: int = BLOCKS) -> None:
        self.name, self.threads, self.blocks = name, threads, blocks
        self.b = Builder()
        self.params: list[Value] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.thread = self.b.op("thread_id")
        self.number = self.b.add(self.b.mul(self.b.op("program_id", axis=0), self.b.index(threads)), self.thread)
        self.total = threads * blocks

    def array(self, name: str, dtype: DType, values: np.ndarray) -> Value:
        param = Value(tensor(dtype, *values.shape, align=16), name)
        self.params.append(param)
        self.arrays[name] = np.ascontiguousarray(values.astype(dtype.numpy))
        return param

    def result(self, name: str, value: Value, builder: Builder | None = None) -> None:
        """Store one number of every thread."""
        dtype = value.type.dtype
        out = self.array(name, dtype, np.zeros(self.total, dtype.numpy))
        (builder or self.b).multi("store", out, self.number, value)

    def case(self, sm: int = 75, ulp: dict[str, float] | None = None, **attrs: Attr) -> Case:
        body = Block((), tuple(self.b.ops))
        kernel = Kernel(
            self.name, Stage.THREAD, tuple(self.params), body, (Size.of(self.blocks),), self.threads, attrs=MappingProxyType({"noalias": False, **attrs})
        )  # fmt: skip
        verify_kernel(kernel)
        return Case(self.name, kernel, self.arrays, sm, ulp or {})


def when(b: Builder, condition: Value, body: Callable[[Builder], None]) -> None:
    def then(inner: Builder) -> list[Value]:
        body(inner)
        return []

    b.if_(condition, then, lambda inner: [])


def until(b: Builder, condition: Callable[[Builder], Value]) -> None:
    """Turn until the condition holds."""

    def test(inner: Builder) -> list[Value]:
        return [inner.op("not", condition(inner))]

    first, second = b.region([], [], test), b.region([], [], lambda inner: [])
    b.append(Op("while", (), (), MappingProxyType({}), (first, second), b.span))


def numbers(dtype: DType, count: int, seed: int = 1) -> np.ndarray:
    """Small whole numbers, whose sums are exact in every dtype."""
    found = np.random.default_rng(seed).integers(1, 5, count)
    return found.astype(dtype.numpy)


def kinds_of(dtype: DType) -> list[str]:
    return [k for k in ATOMICS if not (dtype.is_float and k in ("and", "or", "xor", "inc", "dec"))]


# -- atomics ----------------------------------------------------------------------------------------------------------


def atomics(dtype: DType) -> Case:
    """Every kind: on a place of its own, and, where the end does not depend on the order, on one that many threads share."""
    m = Maker(f"atomics_{dtype}")
    b = m.b
    value = b.op("load", m.array("v", dtype, numbers(dtype, m.total)), m.number)
    few = b.op("and", m.thread, b.index(3))
    for position, kind in enumerate(kinds_of(dtype)):
        start = numbers(dtype, m.total, position + 2)
        operands = (
            [b.op("load", m.array(f"expected_{kind}", dtype, numbers(dtype, m.total, 77)), m.number), value]
            if kind == "cas"
            else [value]
        )
        own = m.array(f"own_{kind}", dtype, start)
        m.result(f"old_{kind}", b.op("atomic", own, m.number, *operands, kind=kind))
        if kind in ("add", "sub", "min", "max", "and", "or", "xor"):
            shared = m.array(f"many_{kind}", dtype, np.full(4, 2 if kind in ("min", "max") else 0, dtype.numpy))
            b.multi("atomic", shared, few, value, kind=kind)
        elif kind in ("inc", "dec"):
            shared = m.array(f"many_{kind}", dtype, np.zeros(4, dtype.numpy))
            b.multi("atomic", shared, few, b.const(4, dtype), kind=kind)
    return m.case()


def atomic_nan(dtype: DType) -> Case:
    """min and max of floats: NaN stays, zeros have an order."""
    m = Maker(f"atomic_nan_{dtype}", threads=32, blocks=1)
    special = np.asarray([np.nan, -np.nan, 0.0, -0.0, 1.0, -1.0, np.inf, -np.inf])
    values = m.array("v", dtype, np.tile(special, 4))
    value = m.b.op("load", values, m.number)
    starts = np.repeat(np.asarray([0.0, -0.0, np.nan, 2.0]), 8)
    for kind in ("min", "max"):
        m.result(
            f"old_{kind}",
            m.b.op("atomic", m.array(f"t_{kind}", dtype, starts), m.number, value, kind=kind, order="acq_rel", scope="system"),
        )
    return m.case()


def atomic_orders(space: str, dtype: DType = i32) -> Case:
    """One addition and one exchange in every order and scope."""
    m = Maker(f"atomic_orders_{space}_{dtype}")
    b = m.b
    counters = m.array("t", dtype, np.zeros(64, dtype.numpy))
    inside = counters
    if space == "shared":
        inside = b.op("alloc", dtype=dtype, shape=(64,), space="shared")
        b.multi("store", inside, m.thread, b.const(0, dtype))
        b.multi("barrier")
    place = 0
    for scope in (s for s in ACCESS_SCOPES if s != "cluster"):
        for order in ORDERS:
            b.multi("atomic", inside, b.index(place), b.const(1, dtype), kind="add", scope=scope, order=order)
            b.multi("atomic", inside, b.index(place + 1), b.const(7, dtype), kind="exchange", scope=scope, order=order)
            b.multi(
                "atomic", inside, b.index(place + 1), b.const(7, dtype), b.const(7, dtype), kind="cas", scope=scope, order=order
            )
            place += 2
    if space == "shared":
        b.multi("barrier")
        when(b, b.op("eq", b.op("program_id", axis=0), b.index(1)),
             lambda inner: inner.multi("store", counters, m.thread, inner.op("load", inside, m.thread)))  # fmt: skip
    return m.case()


def atomic_cluster_scope() -> Case:
    m = Maker("atomic_cluster_scope")
    for order in ORDERS:
        m.b.multi(
            "atomic",
            m.array(f"t_{order}", u32, np.zeros(1)),
            m.b.index(0),
            m.b.const(2, u32),
            kind="add",
            scope="cluster",
            order=order,
        )
    m.b.multi("fence", scope="cluster")
    return m.case(sm=90)


def atomic_vectors() -> Case:
    """Neighbours added by one instruction."""
    m = Maker("atomic_vectors")
    b = m.b
    for dtype, widths in ((f32, (2, 4)), (f16, (2, 4, 8)), (bf16, (2, 4, 8))):
        for width in widths:
            for order in ("relaxed", "acq_rel"):
                many = m.array(f"many_{dtype}_{width}_{order}", dtype, np.zeros(4 * width))
                own = m.array(f"own_{dtype}_{width}_{order}", dtype, numbers(dtype, m.total * width))
                value = b.op("pack", *(b.const(float(k % 2), dtype) for k in range(width)))
                few = b.mul(b.op("and", m.thread, b.index(3)), b.index(width))
                b.multi("atomic", many, few, value, kind="add", order=order)
                old = b.op("atomic", own, b.mul(m.number, b.index(width)), value, kind="add", order=order)
                m.result(f"old_{dtype}_{width}_{order}", b.op("extract", old, lane=width - 1))
    return m.case()


def atomic_wide(space: str) -> Case:
    """128 bits exchanged and compared as one."""
    m = Maker(f"atomic_wide_{space}")
    b = m.b
    for dtype in (u32, u64, f32):
        width = 16 // dtype.itemsize
        memory = m.array(f"t_{dtype}", dtype, numbers(dtype, m.total * width))
        place = b.mul(m.number, b.index(width))
        if space == "shared":
            outside, memory = memory, b.op("alloc", dtype=dtype, shape=(m.threads * width,), space="shared", align=16)
            place = b.mul(m.thread, b.index(width))
            for k in range(width):
                start = b.op("load", outside, b.add(b.mul(m.number, b.index(width)), b.index(k)))
                b.multi("store", memory, b.add(place, b.index(k)), start)
        new = b.op("pack", *(b.const(k, dtype) for k in range(width)))
        again = b.op("pack", *(b.const(k + 1, dtype) for k in range(width)))
        old = b.op("atomic", memory, place, new, kind="exchange")
        first = b.op("atomic", memory, place, new, again, kind="cas", order="acquire", scope="block")
        second = b.op("atomic", memory, place, new, new, kind="cas", order="release", scope="system")
        for name, found in (("old", old), ("first", first), ("second", second)):
            m.result(f"{name}_{dtype}", b.op("extract", found, lane=width - 1))
    return m.case(sm=90)


def atomic_accesses(space: str) -> Case:
    """Loads and stores in every order, scope and width."""
    m = Maker(f"atomic_accesses_{space}")
    b = m.b
    shapes = [
        (d, w) for d in (u8, i8, u16, i16, f16, bf16, i32, u32, f32, i64, u64, f64) for w in (1, 2, 4) if d.itemsize * w <= 16
    ] + [(u8, 16), (f16, 8)]
    for dtype, width in shapes:
        x = m.array(f"x_{dtype}_{width}", dtype, numbers(dtype, m.total * width))
        o = m.array(f"o_{dtype}_{width}", dtype, np.zeros(m.total * width))
        whole = b.mul(m.number, b.index(width))
        middle, place = x, whole
        if space == "shared":
            middle, place = (
                b.op("alloc", dtype=dtype, shape=(m.threads * width,), space="shared", align=16),
                b.mul(m.thread, b.index(width)),
            )
            b.multi("atomic_store", middle, place, b.op("atomic_load", x, whole, width=width))
        for order in LOAD_ORDERS:
            for scope in ("block", "device", "system"):
                value = b.op("atomic_load", middle, place, order=order, scope=scope, width=width)
        for order in STORE_ORDERS:
            for scope in ("block", "device", "system"):
                b.multi("atomic_store", middle, place, value, order=order, scope=scope)
        b.multi("store", o, whole, b.op("atomic_load", middle, place, order="acquire", width=width))
    return m.case()


def message(width: int = 1) -> Case:
    """Each block waits for the one before it, takes its number and hands on one more: a chain through flags and data."""
    m = Maker(f"message_{width}", threads=32, blocks=16)
    b = m.b
    flags = m.array("flags", u32, np.zeros(m.blocks + 1))
    data = m.array("data", u32, np.zeros((m.blocks + 1) * 4))
    words = m.array("words", u64, np.zeros((m.blocks + 1) * 2))
    block = b.op("program_id", axis=0)
    first = b.op("eq", m.thread, b.index(0))

    def go(inner: Builder) -> None:
        before = inner.op("sub", block, inner.index(1))

        def wait(deep: Builder) -> list[Value]:
            if width == 1:
                until(deep, lambda d: d.op("eq", d.op("atomic_load", flags, before, order="acquire"), d.const(1, u32)))
                return [deep.op("load", data, deep.mul(before, deep.index(4)))]
            place = deep.mul(before, deep.index(2))
            until(
                deep, lambda d: d.op("ne", d.op("extract", d.op("atomic_load", words, place, width=2), lane=1), d.const(0, u64))
            )
            return [deep.cast(deep.op("extract", deep.op("atomic_load", words, place, width=2), lane=0), u32)]

        (found,) = inner.if_(inner.op("gt", block, inner.index(0)), wait, lambda deep: [deep.const(100, u32)])
        found = inner.add(found, inner.const(1, u32))
        if width == 1:
            inner.multi("store", data, inner.mul(block, inner.index(4)), found)
            inner.multi("atomic_store", flags, block, inner.const(1, u32), order="release")
        else:
            pair = inner.op("pack", inner.cast(found, u64), inner.const(1, u64))
            inner.multi("atomic_store", words, inner.mul(block, inner.index(2)), pair)

    when(b, first, go)
    return m.case()


# -- warps ------------------------------------------------------------------------------------------------------------


def lanes() -> Case:
    m = Maker("lanes", threads=96)
    b = m.b
    m.result("lane", b.op("lane_id"))
    m.result("warp", b.op("warp_id"))
    for relation in RELATIONS:
        m.result(relation, b.op("lane_mask", relation=relation))
    m.result("all", b.op("active_mask"))
    odd = b.op("eq", b.op("and", m.thread, b.index(1)), b.index(1))
    # On a GPU the other half may or may not be there, so only one's own bit and half are certain.
    own = b.op("lane_mask", relation="eq")
    (some,) = b.if_(odd, lambda inner: [inner.op("and", inner.op("active_mask"), own)], lambda inner: [inner.const(0, u32)])
    m.result("own", some)
    return m.case()


def masked() -> Case:
    """Lanes that part ways and vote, match, exchange and meet under masks."""
    m = Maker("masked")
    b = m.b
    lane = b.op("lane_id")
    value = b.op("load", m.array("v", i32, np.arange(m.total) * 37 % 11 - 5), m.number)
    long = b.op("load", m.array("w", i64, (np.arange(m.total) % 3) << 33), m.number)
    third = b.op("lt", b.op("mod", lane, b.const(3, i32)), b.const(1, i32))
    mask = b.op("vote", third, mode="ballot")
    rest = b.op("not", mask)
    names = [
        "ballot",
        "any",
        "all",
        "uniform",
        "match",
        "match_all",
        "same",
        "match_long",
        *(f"redux_{k}" for k in REDUX),
        "unsigned",
        "shuffle",
        "first",
    ]
    types = {"ballot": u32, "match": u32, "match_all": u32, "match_long": u32, "unsigned": u32}

    def side(mask: Value, start: int) -> Callable[[Builder], list[Value]]:
        def body(inner: Builder) -> list[Value]:
            positive = inner.op("gt", value, inner.const(start, i32))
            found = [inner.op("vote", positive, mask, mode=mode) for mode in ("ballot", "any", "all", "uniform")]
            inner.multi("warp_sync", mask)
            found += [inner.op("match", value, mask, mode="any"), *inner.multi("match", inner.const(3, i32), mask, mode="all")]
            found += [inner.op("match", long, mask, mode="any")]
            found += [inner.op("redux", value, mask, kind=kind) for kind in REDUX]
            found += [inner.op("redux", inner.bitcast(value, u32), mask, kind="max")]
            lowest = inner.cast(inner.op("ctz", mask), i32)
            found += [inner.op("shuffle", value, lowest, mask, mode="idx"), lowest]
            return found

        return body

    results = b.if_(third, side(mask, 0), side(rest, -3))
    for name, found in zip(names, results, strict=True):
        assert types.get(name) is None or found.type.dtype is types[name]
        m.result(name, found)
    return m.case(sm=80)


def whole_warps() -> Case:
    """The same without masks, and matches of floats and of 64 bits."""
    m = Maker("whole_warps")
    b = m.b
    value = b.op("load", m.array("v", i32, np.arange(m.total) * 37 % 11 - 5), m.number)
    positive = b.op("gt", value, b.const(0, i32))
    for mode in ("ballot", "any", "all", "uniform"):
        m.result(mode, b.op("vote", positive, mode=mode))
    for dtype in (u32, f32, i64, u64, f64):
        number = b.cast(value, dtype)
        m.result(f"match_{dtype}", b.op("match", number, mode="any"))
        every, same = b.multi("match", number, mode="all")
        m.result(f"every_{dtype}", every)
        m.result(f"same_{dtype}", same)
        every, same = b.multi("match", b.const(3, dtype), mode="all")
        m.result(f"constant_{dtype}", every)
        m.result(f"constant_same_{dtype}", same)
    b.multi("warp_sync")
    return m.case()


def reductions() -> Case:
    m = Maker("redux")
    b = m.b
    for dtype in (i32, u32):
        value = b.op(
            "load",
            m.array(f"v_{dtype}", dtype, (np.arange(m.total) * 2654435761 >> 3) % 4001 - (2000 if dtype is i32 else 0)),
            m.number,
        )
        for kind in REDUX:
            m.result(f"{kind}_{dtype}", b.op("redux", value, kind=kind))
    return m.case(sm=80)


def shuffles() -> Case:
    """Every mode, width and dtype."""
    m = Maker("shuffles")
    b = m.b
    for dtype in (d for d in SCALARS if not (d.is_float and d.bits == 8)):
        value = b.op(
            "load",
            m.array(f"v_{dtype}", dtype, np.arange(m.total) * 7 % 120 if not dtype.is_bool else np.arange(m.total) % 3 == 0),
            m.number,
        )
        for mode, amount in (("idx", 5), ("up", 3), ("down", 2), ("xor", 5)):
            for width in (32, 8) if dtype in (f32, f16, i64) else (32,):
                m.result(f"{mode}_{width}_{dtype}", b.op("shuffle", value, b.const(amount, i32), mode=mode, width=width))
    lane = b.op("lane_id")
    for width in (1, 2, 4, 8, 16, 32):
        for mode in ("idx", "up", "down", "xor"):
            m.result(f"lane_{mode}_{width}", b.op("shuffle", lane, b.const(1, i64), mode=mode, width=width))
    return m.case()


def counting_barriers() -> Case:
    m = Maker("counting_barriers", threads=96, blocks=3)
    b = m.b
    value = b.op("load", m.array("v", i32, np.arange(m.total) * 37 % 11), m.number)
    for limit in (-1, 5, 20):
        flag = b.op("gt", value, b.const(limit, i32))
        m.result(f"count_{limit}", b.op("barrier_reduce", flag, kind="count"))
        m.result(f"and_{limit}", b.op("barrier_reduce", flag, kind="and"))
        m.result(f"or_{limit}", b.op("barrier_reduce", flag, kind="or"))
    return m.case()


# -- single threads ---------------------------------------------------------------------------------------------------


def bits() -> Case:
    m = Maker("bits")
    b = m.b
    rng = np.random.default_rng(3)
    for dtype in (i8, u8, i16, u16, i32, u32, i64, u64):
        raw = rng.integers(0, 256, (m.total, dtype.itemsize), np.uint8).view(f"u{dtype.itemsize}").reshape(-1) >> rng.integers(
            0, dtype.bits, m.total
        ).astype(f"u{dtype.itemsize}")
        raw[:3] = 0, 1, 1 << (dtype.bits - 1)
        value = b.op("load", m.array(f"v_{dtype}", dtype, raw.view(dtype.numpy)), m.number)
        for opcode in ("popcount", "clz", "ctz", "brev"):
            m.result(f"{opcode}_{dtype}", b.op(opcode, value))
        if dtype.bits >= 32:
            other = b.op(
                "load",
                m.array(
                    f"w_{dtype}", dtype, rng.integers(0, 256, (m.total, dtype.itemsize), np.uint8).view(dtype.numpy).reshape(-1)
                ),
                m.number,
            )
            m.result(f"mul_high_{dtype}", b.op("mul_high", value, other))
    words = [
        b.op("load", m.array(f"word{k}", u32, rng.integers(0, 1 << 32, m.total, np.uint64).astype(np.uint32)), m.number)
        for k in range(3)
    ]
    m.result("byte_perm", b.op("byte_perm", *words))
    # Halves of ordinary size: sums of words that are NaN have bits of no certain pattern.
    narrow = [b.op("and", word, b.const(0x3FFF3FFF, u32)) for word in words]
    m.result("add_pairs_f16", b.op("add_pairs", narrow[0], narrow[1], dtype=f16))
    for mode in ("left", "right"):
        m.result(f"funnel_{mode}", b.op("funnel_shift", *words, mode=mode))
    signed = [b.bitcast(word, i32) for word in words]
    m.result("dp4a_ss", b.op("dp4a", signed[0], signed[1], signed[2]))
    m.result("dp4a_su", b.op("dp4a", signed[0], words[1], signed[2]))
    m.result("dp4a_us", b.op("dp4a", words[0], signed[1], signed[2]))
    m.result("dp4a_uu", b.op("dp4a", words[0], words[1], words[2]))
    return m.case()


FAST = ("sin_approx", "cos_approx", "log2_approx", "sqrt_approx", "rsqrt_approx", "rcp_approx", "exp2_approx", "tanh_approx")


def fast_math() -> Case:
    m = Maker("fast_math")
    value = m.b.op("load", m.array("v", f32, np.linspace(0.25, 3.0, m.total)), m.number)
    for name in FAST:
        m.result(name, m.b.op(name, value))
    m.result("div_approx", m.b.op("div_approx", m.b.const(2.0, f32), value))
    return m.case(ulp=dict.fromkeys((*FAST, "div_approx"), 6.0) | {"tanh_approx": 8400.0})


def clocks() -> Case:
    """Later readings are not smaller."""
    m = Maker("clocks", threads=32, blocks=1)
    b = m.b
    first, timer = b.op("clock"), b.op("global_timer")
    short = b.op("clock", bits=32)
    b.multi("nanosleep", b.const(2000, u32))
    m.result("cycles", b.op("gt", b.op("clock"), first))
    m.result("short", b.op("lt", b.op("sub", b.op("clock", bits=32), short), b.const(1 << 30, u32)))
    m.result("time", b.op("ge", b.op("global_timer"), timer))
    return m.case()


# -- copies, clusters, caches -----------------------------------------------------------------------------------------


def bulk_copies() -> Case:
    """Global memory to shared memory and on, by the copy engine, in pieces of different sizes."""
    m = Maker("bulk_copies")
    b = m.b
    x, o = (m.array(n, f32, np.arange(2048) * (n == "x")) for n in "xo")
    tile = b.op("alloc", dtype=f32, shape=(1024,), space="shared", align=128)
    bars = b.op("alloc", dtype=u64, shape=(2,), space="shared", align=16)
    first = b.op("eq", m.thread, b.index(0))
    start = b.mul(b.op("program_id", axis=0), b.index(1024))

    def setup(inner: Builder) -> None:
        for k in (0, 1):
            inner.multi("mbarrier_init", bars, inner.index(k), count=1)
        inner.multi("fence_init")

    def go(inner: Builder) -> None:
        for k, count in ((0, 768), (1, 256)):
            inner.multi("mbarrier_expect", bars, inner.index(k), bytes=4 * count)
            inner.multi(
                "bulk_load",
                tile,
                inner.index(768 * k),
                x,
                inner.add(start, inner.index(768 * k)),
                inner.index(count),
                bars,
                inner.index(k),
            )

    when(b, first, setup)
    b.multi("barrier")
    when(b, first, go)
    for k in (0, 1):
        b.multi("mbarrier_wait", bars, b.index(k), b.const(0, u32))

    def double(inner: Builder, i: Value) -> list[Value]:
        inner.multi("store", tile, i, inner.mul(inner.op("load", tile, i), inner.const(2.0, f32)))
        return []

    b.for_(m.thread, b.index(1024), b.index(m.threads), [], double)
    b.multi("fence_async")
    b.multi("barrier")

    def out(inner: Builder) -> None:
        inner.multi("bulk_store", tile, inner.index(0), o, start, inner.const(1024, i32))
        inner.multi("tma_commit")
        inner.multi("tma_wait", pending=0)

    when(b, first, out)
    return m.case(sm=90)


def clusters() -> Case:
    """Each block writes to the next one's shared memory, adds to a counter of the first, and reads its neighbour's."""
    m = Maker("clusters", threads=32, blocks=4)
    b = m.b
    inbox = b.op("alloc", dtype=i32, shape=(32,), space="shared")
    flags = b.op("alloc", dtype=u32, shape=(4,), space="shared")
    rank = b.op("cluster_rank")
    b.multi("store", inbox, m.thread, b.const(0, i32))
    when(b, b.op("lt", m.thread, b.index(4)), lambda inner: inner.multi("store", flags, m.thread, inner.const(0, u32)))
    b.multi("cluster_sync")
    following = b.op("mod", b.add(rank, b.const(1, i32)), b.const(2, i32))
    b.multi("store_remote", inbox, m.thread, following, b.cast(m.number, i32))
    for place, (kind, order) in enumerate((("add", "relaxed"), ("max", "acq_rel"), ("or", "release"))):
        b.multi(
            "atomic_remote",
            flags,
            b.index(place),
            b.const(0, i32),
            b.cast(b.add(m.thread, b.index(1)), u32),
            kind=kind,
            order=order,
        )
    b.multi("atomic_remote", flags, b.index(3), b.const(0, i32), b.const(0, u32), b.const(9, u32), kind="cas", scope="device")
    b.multi("cluster_sync")
    m.result("inbox", b.op("load", inbox, m.thread))
    m.result("neighbour", b.op("load_remote", inbox, m.thread, following))
    m.result("counters", b.op("load_remote", flags, b.op("and", m.thread, b.index(3)), b.const(0, i32)))
    b.multi("cluster_sync")
    return m.case(sm=90, cluster=2)


def caches() -> Case:
    """Loads and stores with every hint, of every size."""
    m = Maker("caches")
    b = m.b
    for dtype, width in ((u8, 1), (u8, 16), (f16, 1), (bf16, 4), (f32, 1), (f32, 4), (i64, 1), (f64, 2)):
        x = m.array(f"x_{dtype}_{width}", dtype, numbers(dtype, m.total * width))
        place = b.mul(m.number, b.index(width))
        wide = {"width": width} if width > 1 else {}
        for cache in LOAD_CACHES:
            if dtype in (u8, f32) or cache == "cs":
                o = m.array(f"o_{dtype}_{width}_{cache}", dtype, np.zeros(m.total * width))
                b.multi("store", o, place, b.op("load", x, place, cache=cache, **wide))
        for cache in STORE_CACHES:
            if dtype in (f16, f32) or cache == "wt":
                o = m.array(f"s_{dtype}_{width}_{cache}", dtype, np.zeros(m.total * width))
                b.multi("store", o, place, b.op("load", x, place, **wide), cache=cache)
    flags = m.array("flags", bool_, np.arange(m.total) % 3 == 0)
    seen = m.array("seen", bool_, np.zeros(m.total, np.bool_))
    b.multi("store", seen, m.number, b.op("load", flags, m.number, cache="cs"), cache="cs")
    return m.case(sm=80)


def copies_with_hints() -> Case:
    m = Maker("copies_with_hints")
    b = m.b
    x = m.array("x", f32, np.arange(m.total * 4))
    number = 0
    for bytes_ in (4, 16):
        for cache in ("ca", "cg", "l2_evict_first", "l2_evict_last", None):
            for prefetch in (0, 128):
                if (cache == "cg" and bytes_ == 4) or (cache is None and not prefetch):
                    continue
                attrs: dict[str, Attr] = (
                    {"bytes": bytes_} | ({"cache": cache} if cache else {}) | ({"prefetch": prefetch} if prefetch else {})
                )
                tile = b.op("alloc", dtype=f32, shape=(m.threads * 4,), space="shared", align=16)
                place, there = b.mul(m.thread, b.index(4)), b.mul(m.number, b.index(4))
                if number % 2:
                    b.multi("copy_async", tile, place, x, there, b.op("lt", m.thread, b.index(20)), masked=True, **attrs)
                else:
                    b.multi("copy_async", tile, place, x, there, **attrs)
                b.multi("copy_commit")
                b.multi("copy_wait", pending=0)
                m.result(f"o{number}", b.op("load", tile, place))
                number += 1
    return m.case(sm=80)


def fp8(dtype: DType) -> Case:
    """One matrix instruction of 8-bit floats: sums of few small whole numbers are exact."""
    m = Maker(f"mma_{dtype}", threads=32, blocks=1)
    b = m.b
    rng = np.random.default_rng(5)
    raw = rng.integers(-3, 4, (6, 32, 4)).astype(dtype.numpy).view(np.uint32).reshape(6, 32)
    words = [b.op("load", m.array(f"w{k}", u32, raw[k]), m.thread) for k in range(6)]
    sums = [b.const(float(k), f32) for k in range(4)]
    for k, value in enumerate(b.multi("mma", *words, *sums, dtype=dtype)):
        m.result(f"o{k}", value)
    return m.case(sm=89)


# -- telling the host -------------------------------------------------------------------------------------------------


def printing() -> Case:
    """Every dtype with and without a format, and an assertion that holds."""
    m = Maker("printing", threads=32, blocks=1)
    b = m.b
    value = b.op("load", m.array("v", f32, np.arange(m.total) + 0.5), m.number)
    m.result("o", value)
    first = b.op("lt", m.thread, b.index(2))

    def body(inner: Builder) -> None:
        inner.multi("print", text="100% {{}}\n")
        for dtype in (d for d in SCALARS if not (d.is_float and d.bits == 8)):
            inner.multi("print", inner.cast(value, dtype), inner.cast(m.thread, i64), text=f"{dtype} {{}} of {{:>3d}}\n")
        inner.multi("print", value, value, inner.const(-5, i32), inner.const(250, u64), text="{:8.3f}|{:<+9.2e}|{:x}|{:#06x}\n")

    when(b, first, body)
    b.multi("assert", b.op("lt", m.thread, b.index(32)), text="thread < 32")
    return m.case()


def failing() -> Case:
    """The assertion fails in thread 7 of block 1, and holds elsewhere."""
    m = Maker("failing")
    m.result("o", m.b.cast(m.number, i32))
    m.b.multi("assert", m.b.op("ge", m.number, m.b.index(0)), text="number >= 0")
    m.b.multi("assert", m.b.op("ne", m.number, m.b.index(THREADS + 7)), text='number != "71"')
    return m.case()


def instruction_cases() -> list[Case]:
    """All of them."""
    floats = (f16, bf16, f32, f64)
    return [
        *(atomics(dtype) for dtype in (*INTEGERS, i16, u16, *floats)), *(atomic_nan(dtype) for dtype in floats),
        *(atomic_orders(space, dtype) for space in ("global", "shared") for dtype in (i32, u64, f32)),
        atomic_cluster_scope(), atomic_vectors(), atomic_wide("global"), atomic_wide("shared"),
        atomic_accesses("global"), atomic_accesses("shared"), message(1), message(2),
        lanes(), masked(), whole_warps(), reductions(), shuffles(), counting_barriers(), bits(), fast_math(), clocks(), printing(),
        bulk_copies(), clusters(), caches(), copies_with_hints(), fp8(f8e4m3), fp8(f8e5m2),
    ]  # fmt: skip
