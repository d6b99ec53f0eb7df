"""Explicit kernels in Python, one for each group of instructions: what the words build is run on the emulator, assembled, and run on GPUs.

`CASES` has for each kernel its launch and its arrays; arrays that depend on the order of threads are not among them. Kernels that ask
for generations of GPUs say which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

import tilewright as tw

N = 256
Buffer = tw.GpuBuffer


@dataclass(frozen=True)
class Launch:
    kernel: tw.GpuKernel[...]
    make: Callable[[], list[np.ndarray]]
    grid: int = 2
    block: int = 128
    sm: int = 75
    check: Callable[[list[np.ndarray], list[np.ndarray]], None] | None = None
    """Arrays before and after, against plain NumPy."""

    def run(self, device: str) -> list[np.ndarray]:
        arrays = self.make()
        self.kernel[self.grid, self.block](*arrays, device=device)
        return arrays


def zeros(*dtypes: object) -> list[np.ndarray]:
    return [np.zeros(N, d) for d in dtypes]  # type: ignore[call-overload]


def counting(dtype: object = np.int32) -> np.ndarray:
    return (np.arange(N) * 37 % 11 - 5).astype(dtype)  # type: ignore[arg-type]


# -- warps ------------------------------------------------------------------------------------------------------------


@tw.gpu
def warps(v: Buffer[tw.i32], o: Buffer[tw.u32], p: Buffer[tw.i32]):
    i = tw.gpu_thread_id()
    x = v[i]
    odd = tw.ballot(x % 2 == 1)
    if x % 2 == 1:
        tw.warp_sync(odd)
        o[i] = tw.match_any(x, lanes=odd)
        p[i] = tw.shuffle(x, tw.ffs(odd) - 1, lanes=odd) + tw.redux_add(x, odd)
    else:
        rest = ~odd
        lanes, same = tw.match_all(7, rest)
        o[i] = lanes if same and tw.vote_all(x % 2 == 0, rest) and tw.vote_uniform(same, rest) else tw.u32(0)
        p[i] = tw.redux_max(x, lanes=rest) * 100 + tw.redux_min(x, rest)


def check_warps(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    v = before[0]
    for i, x in enumerate(v):
        warp = range(i // 32 * 32, i // 32 * 32 + 32)
        mine = [k for k in warp if v[k] % 2 == x % 2]
        if x % 2 == 1:
            assert after[1][i] == sum(1 << k % 32 for k in mine if v[k] == x)
            assert after[2][i] == v[mine[0]] + v[mine].sum()
        else:
            assert after[1][i] == sum(1 << k % 32 for k in mine)
            assert after[2][i] == v[mine].max() * 100 + v[mine].min()


@tw.gpu
def lanes(o: Buffer[tw.u32], p: Buffer[tw.u32], q: Buffer[tw.i32]):
    i = tw.gpu_thread_id()
    o[i] = tw.lane_mask() ^ tw.lane_mask("ge") ^ tw.lane_mask(relation="eq")
    p[i] = tw.active_mask()
    q[i] = tw.popcount(tw.lane_mask("lt")) + 100 * tw.warp_id() + (1000 if tw.elect() else 0)


def check_lanes(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    i = np.arange(N)
    assert np.array_equal(after[0], 0xFFFFFFFF ^ (1 << (i % 32).astype(np.uint32)))
    assert (after[1] == 0xFFFFFFFF).all()
    assert np.array_equal(after[2] % 1000, i % 32 + 100 * (i % 128 // 32))
    assert (after[2].reshape(-1, 32) >= 1000).sum(axis=1).tolist() == [1] * (N // 32)


@tw.gpu
def block_votes(v: Buffer[tw.i32], o: Buffer[tw.i32]):
    i = tw.gpu_thread_id()
    total = tw.barrier_count(v[i] > 0)
    some = tw.barrier_or(v[i] > 4)
    every = tw.barrier_and(v[i] > -6)
    if tw.thread.x < 64:
        tw.named_barrier(1, 64)
    o[i] = total * 4 + (2 if some else 0) + (1 if every else 0)


def check_block_votes(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    rows = before[0].reshape(2, 128)
    wanted = (rows > 0).sum(axis=1) * 4 + (rows > 4).any(axis=1) * 2 + (rows > -6).all(axis=1)
    assert np.array_equal(after[1], np.repeat(wanted, 128))


# -- bits and functions -----------------------------------------------------------------------------------------------


@tw.gpu
def bits(v: Buffer[tw.u32], o: Buffer[tw.u32], p: Buffer[tw.i32], q: Buffer[tw.i64]):
    i = tw.gpu_thread_id()
    x = v[i]
    o[i] = tw.byte_perm(x, tw.brev(x), 0x3715) ^ tw.funnel_left(x, 7, 5) ^ tw.funnel_right(x, x, i) ^ tw.mul_high(x, x)
    p[i] = tw.dp4a(tw.bitcast(x, tw.i32), tw.bitcast(x, tw.i32), 3)
    q[i] = tw.popcount(x) + 100 * tw.clz(x) + 10000 * tw.ctz(x) + 1000000 * tw.ffs(x)


def check_bits(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    for i, x in enumerate(before[0].tolist()):
        turned = int(f"{x:032b}"[::-1], 2)
        octets = (x | turned << 32).to_bytes(8, "little")
        mixed = int.from_bytes(bytes([octets[5], octets[1], octets[7], octets[3]]), "little")
        left = ((x | 7 << 32) << 5 >> 32) & 0xFFFFFFFF
        right = (x | x << 32) >> (i & 31) & 0xFFFFFFFF
        assert after[1][i] == mixed ^ left ^ right ^ (x * x >> 32)
        parts = np.asarray([x], np.uint32).view(np.int8).astype(int)
        assert after[2][i] == (parts * parts).sum() + 3
        text = f"{x:032b}"
        low = 32 - len(text.rstrip("0"))
        assert after[3][i] == text.count("1") + 100 * (32 - len(text.lstrip("0"))) + 10000 * low + 1000000 * (low + 1 if x else 0)


@tw.gpu
def fast(v: Buffer[tw.f32], o: Buffer[tw.f32]):
    i = tw.gpu_thread_id()
    x = v[i]
    total = tw.fast_exp(x) + tw.fast_exp2(x) + tw.fast_log(x) + tw.fast_log2(x) + tw.fast_sin(x) + tw.fast_cos(x)
    o[i] = total + tw.fast_sqrt(x) + tw.fast_rsqrt(x) + tw.fast_rcp(x) + tw.fast_tanh(x) + tw.fast_divide(x, 3.0)


def check_fast(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    x = before[0].astype(np.float64)
    wanted = (
        np.exp(x)
        + 2**x
        + np.log(x)
        + np.log2(x)
        + np.sin(x)
        + np.cos(x)
        + np.sqrt(x)
        + 1 / np.sqrt(x)
        + 1 / x
        + np.tanh(x)
        + x / 3
    )
    np.testing.assert_allclose(after[1], wanted, rtol=1e-3)


@tw.gpu
def times(o: Buffer[tw.i32]):
    start, short, begun = tw.clock(), tw.clock32(), tw.global_timer()
    tw.nanosleep(100)
    o[tw.gpu_thread_id()] = (
        (1 if tw.clock() > start else 0) + (2 if tw.clock32() - short < 1 << 30 else 0) + (4 if tw.global_timer() >= begun else 0)
    )


def check_times(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    assert (after[0] == 7).all()


# -- memory -----------------------------------------------------------------------------------------------------------


@tw.gpu
def vectors(x: Buffer[tw.f32], o: Buffer[tw.f32], p: Buffer[tw.f32]):
    i = tw.gpu_thread_id()
    if i < 64:
        a, b, c, d = tw.vload(x, 4 * i, width=4, cache="cs")
        tw.vstore(o, 4 * i, (d, c, b, a), cache="l2_evict_first")
        tw.atomic_add(p, 4 * (i % 4), (a, b, c, d))
        tw.prefetch(x, i + 100000)


def check_vectors(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    rows = before[0].reshape(64, 4)
    assert np.array_equal(after[1].reshape(64, 4), rows[:, ::-1])
    assert np.array_equal(after[2][:16].reshape(4, 4), rows.reshape(16, 4, 4).sum(axis=0))


@tw.gpu
def orders(flags: Buffer[tw.u32], data: Buffer[tw.f64], o: Buffer[tw.f64]):
    if tw.thread.x == 0:
        if tw.block.x == 0:
            data[0] = 42.0
            tw.atomic_store(flags, 0, 1, order="release")
        else:
            while tw.atomic_load(flags, 0, order="acquire") == 0:
                tw.nanosleep(20)
            o[0] = data[0]
        tw.fence("system")
        tw.atomic_add(flags, 1, 5, scope="system", order="acq_rel")
        tw.atomic_max(flags, 2 + tw.block.x, tw.u32(tw.block.x) + 7, scope="block")
    old = tw.atomic_cas(data, tw.thread.x + 1, 0.0, 2.5, order="acquire")
    if old == 0.0:
        tw.atomic_exchange(o, tw.thread.x + 1, 1.0)


def check_orders(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    assert after[0][:4].tolist() == [1, 10, 7, 8]
    assert after[1][:130].tolist() == [42.0] + [2.5] * 128 + [0.0]
    assert after[2][:130].tolist() == [42.0] + [1.0] * 128 + [0.0]


@tw.gpu
def copies(x: Buffer[tw.f32], o: Buffer[tw.f32]):
    tile = tw.shared((2, 128), tw.f32)
    i = tw.gpu_thread_id()
    t = tw.thread.x
    tw.copy_async(tile, (0, t), x, i)
    tw.copy_commit()
    if t < 32:
        tw.copy_async(tile, (1, 4 * t), x, 4 * t, count=4, where=t < 16, cache="cg", prefetch=128)
    tw.copy_commit()
    tw.copy_wait(1)
    first = tile[0, t]
    tw.copy_wait()
    tw.gpu_sync()
    o[i] = first + 1000 * tile[1, t]


def check_copies(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    x = before[0]
    second = np.where(np.arange(128) < 64, x[:128], 0)
    assert np.array_equal(after[1], x + 1000 * np.tile(second, 2))


@tw.gpu
def bulk(x: Buffer[tw.f32], o: Buffer[tw.f32]):
    tile = tw.shared(128, tw.f32, align=128)
    bars = tw.mbarriers(1)
    t = tw.thread.x
    start = tw.block.x * 128
    if t == 0:
        tw.mbarrier_init(bars, 0, 1)
        tw.fence_init()
    tw.gpu_sync()
    if t == 0:
        tw.mbarrier_expect(bars, 0, 512)
        tw.bulk_load(tile, 0, x, start, 128, bars, 0)
    tw.mbarrier_wait(bars, 0, 0)
    tile[t] = tile[t] * 2
    tw.fence_async()
    tw.gpu_sync()
    if t == 0:
        tw.bulk_store(tile, 0, o, start, 128)
        tw.bulk_commit()
        tw.bulk_wait(0, read=True)
        tw.bulk_wait()


def check_bulk(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    assert np.array_equal(after[1], 2 * before[0])


@tw.gpu
def tensor(x: tw.Array, o: tw.Array):
    tile = tw.shared((8, 32), tw.f32, align=1024)
    bars = tw.mbarriers(1)
    source, target = tw.tensor_map(x, (8, 32)), tw.tensor_map(o, (8, 32))
    if tw.thread.x == 0:
        tw.mbarrier_init(bars, 0, 1)
        tw.fence_init()
    tw.gpu_sync()
    if tw.thread.x == 0:
        tw.mbarrier_expect(bars, 0, 8 * 32 * 4)
        tw.tma_load(tile, (0, 0), source, (8 * tw.block.x, 4), bars, 0)
        tw.mbarrier_wait(bars, 0, 0)
        tw.tma_store(tile, (0, 0), target, (8 * tw.block.x, 0))
        tw.bulk_commit()
        tw.bulk_wait()


def check_tensor(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    wanted = np.zeros((16, 32), np.float32)
    wanted[:, :28] = before[0][:, 4:]
    assert np.array_equal(after[1], wanted)


@tw.gpu(cluster=2)
def cluster(o: Buffer[tw.i32], p: Buffer[tw.i32]):
    box = tw.shared(128, tw.i32)
    count = tw.shared(1, tw.i32)
    bars = tw.mbarriers(1)
    t = tw.thread.x
    other = (tw.cluster.rank + 1) % tw.cluster.size
    if t == 0:
        count[0] = 0
        tw.mbarrier_init(bars, 0, 128)
        tw.fence_init()
    tw.cluster_sync()
    tw.store_remote(box, t, other, tw.i32(tw.gpu_thread_id()))
    tw.atomic_add(count, 0, 1, rank=0)
    tw.mbarrier_arrive(bars, 0, rank=other)
    tw.mbarrier_wait(bars, 0, 0)
    tw.cluster_sync()
    o[tw.gpu_thread_id()] = box[t] + 1000 * tw.load_remote(count, 0, 0)
    p[tw.gpu_thread_id()] = tw.load_remote(box, t, other)
    tw.cluster_sync()


def check_cluster(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    numbers = np.arange(N).reshape(2, 128)
    assert np.array_equal(after[0], numbers[::-1].reshape(-1) + 256000)
    assert np.array_equal(after[1], numbers.reshape(-1))


# -- matrices ---------------------------------------------------------------------------------------------------------


@tw.gpu
def product(a: tw.Array, b: tw.Array, c: tw.Array):
    """One warp: 16 x 16 results of f16, bf16 or tf32 factors."""
    sums = tw.fragment_c()
    for k in range(0, a.shape[1], 8 if a.dtype == tw.f32 else 16):
        sums = tw.fragment_mma(tw.fragment_a(a, (0, k)), tw.fragment_b(b, (k, 0)), sums, a.dtype)
    tw.fragment_store(c, (0, 0), sums)


@tw.gpu
def product_transposed(a: tw.Array, b: tw.Array, c: tw.Array):
    """Both factors are given transposed, and the sums begin as what is there."""
    sums = tw.fragment_load(c, (0, 0))
    sums = tw.fragment_mma(tw.fragment_a(a, (0, 0), transposed=True), tw.fragment_b(b, (0, 0), transposed=True), sums, a.dtype)
    tw.fragment_store(c, (0, 0), sums)


@tw.gpu
def product_wmma(a: tw.Array, b: tw.Array, c: tw.Array):
    """The same by a shape of CUDA's WMMA."""
    sums = tw.wmma_fill()
    for k in range(0, a.shape[1], 16):
        sums = tw.wmma_mma(tw.wmma_load(a, (0, k), "a"), tw.wmma_load(b, (k, 0), "b"), sums)
    tw.wmma_store(c, (0, 0), sums)


def matrices(dtype: object, total: object = np.float32, k: int = 32, turned: bool = False) -> Callable[[], list[np.ndarray]]:
    def make() -> list[np.ndarray]:
        rng = np.random.default_rng(2)
        a, b = rng.integers(0, 4, (16, k)), rng.integers(0, 4, (k, 16))
        a, b = (a.T, b.T) if turned else (a, b)
        return [np.ascontiguousarray(m.astype(dtype)) for m in (a, b)] + [np.ones((16, 16), total)]  # type: ignore[arg-type]

    return make


def check_product(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    a, b = (m.astype(np.float64) for m in before[:2])
    assert np.array_equal(after[2].astype(np.float64), a @ b)


def check_product_transposed(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    a, b = (m.astype(np.float64) for m in before[:2])
    assert np.array_equal(after[2].astype(np.float64), a.T @ b.T + 1)


@tw.gpu
def integers(a: tw.Array, b: tw.Array, c: tw.Array):
    sums = tw.fragment_c(0, tw.i32)
    sums = tw.fragment_mma(tw.fragment_a(a, (0, 0)), tw.fragment_b(b, (0, 0)), sums, tw.i8)
    tw.fragment_store(c, (0, 0), sums)


@tw.gpu
def single(x: Buffer[tw.f16], o: Buffer[tw.f32], p: Buffer[tw.f16]):
    """`ldmatrix`, one `mma_sync`, `stmatrix`: a 16 x 16 tile times itself, its first eight columns as the second factor."""
    tile = tw.shared((16, 16), tw.f16)
    out = tw.shared((16, 8), tw.f16)
    t = tw.thread.x
    for k in range(8):
        tile[(t * 8 + k) // 16, (t * 8 + k) % 16] = x[t * 8 + k]
    tw.warp_sync()
    a = tw.ldmatrix(tile, (t % 16, t // 16 * 8))
    b = tw.ldmatrix(tile, (t % 16, 0), count=2, trans=True)
    c = tw.mma_sync(a, b, (0.0, 0.0, 0.0, 0.0), tw.f16)
    for k in tw.unrolled(range(4)):
        o[(t // 4 + 8 * (k // 2)) * 8 + 2 * (t % 4) + k % 2] = c[k]
    low, high = tw.pack_bits((c[0], c[1]), tw.f16), tw.pack_bits((c[2], c[3]), tw.f16)
    first, second = tw.unpack_bits(low, tw.f16)
    out[t // 4, 2 * (t % 4)] = first
    out[t // 4, 2 * (t % 4) + 1] = second
    word = tw.unpack_bits(high, tw.f16)
    out[t // 4 + 8, 2 * (t % 4)] = word[0]
    out[t // 4 + 8, 2 * (t % 4) + 1] = word[1]
    tw.warp_sync()
    for k in range(4):
        p[t * 4 + k] = out[(t * 4 + k) // 8, (t * 4 + k) % 8]


def check_single(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    x = before[0].reshape(16, 16).astype(np.float32)
    assert np.array_equal(after[1].reshape(16, 8), x @ x[:, :8])
    assert np.array_equal(after[2].reshape(16, 8), (x @ x[:, :8]).astype(np.float16))


@tw.gpu
def stored(o: Buffer[tw.f16]):
    tile = tw.shared((8, 8), tw.f16, align=128)
    t = tw.thread.x
    tw.stmatrix(tile, (t % 8, 0), tw.pack_bits((2 * t, 2 * t + 1), tw.f16))
    tw.warp_sync()
    o[2 * t] = tile[t // 4, 2 * (t % 4)]
    o[2 * t + 1] = tile[t // 4, 2 * (t % 4) + 1]


def check_stored(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    assert after[0].tolist() == list(range(64))


@tw.gpu
def warp_group(a: tw.Array, b: tw.Array, c: tw.Array):
    """64 x 8 results of 64 terms by the four warps of a group; rows of a and of b's transpose come swizzled."""
    left = tw.shared((64, 64), tw.bf16, align=1024)
    right = tw.shared((8, 64), tw.bf16, align=1024)
    bars = tw.mbarriers(1)
    from_a, from_b = tw.tensor_map(a, (64, 64), swizzle=128), tw.tensor_map(b, (8, 64), swizzle=128)
    t = tw.thread.x
    if t == 0:
        tw.mbarrier_init(bars, 0, 1)
        tw.fence_init()
    tw.gpu_sync()
    if t == 0:
        tw.mbarrier_expect(bars, 0, (64 + 8) * 64 * 2)
        tw.tma_load(left, (0, 0), from_a, (0, 0), bars, 0)
        tw.tma_load(right, (0, 0), from_b, (0, 0), bars, 0)
    tw.mbarrier_wait(bars, 0, 0)
    sums = (0.0, 0.0, 0.0, 0.0)
    sums = tw.wgmma_wait(tw.wgmma(left, (0, 0), right, (0, 0), sums, 8, steps=4))
    for r in tw.unrolled(range(4)):
        c[16 * (t // 32) + 8 * (r // 2) + t % 32 // 4, 2 * (t % 4) + r % 2] = sums[r]


def make_group() -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    return [rng.integers(-2, 3, shape).astype(ml_dtypes.bfloat16) for shape in ((64, 64), (8, 64))] + [
        np.zeros((64, 8), np.float32)
    ]


def check_group(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    a, b = (m.astype(np.float32) for m in before[:2])
    assert np.array_equal(after[2], a @ b.T)


def arrays(*given: np.ndarray) -> Callable[[], list[np.ndarray]]:
    return lambda: [array.copy() for array in given]


_ROWS = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
_WORDS = np.concatenate([[0, 1, 1 << 31, 0xFFFFFFFF], np.random.default_rng(1).integers(0, 1 << 32, N - 4)]).astype(np.uint32)
_HALF = np.random.default_rng(6).integers(-3, 4, 256).astype(np.float16)
_BF16, _F8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn

CASES: dict[str, Launch] = {
    "warps": Launch(warps, lambda: [counting(), *zeros(np.uint32, np.int32)], sm=80, check=check_warps),
    "lanes": Launch(lanes, lambda: zeros(np.uint32, np.uint32, np.int32), sm=90, check=check_lanes),
    "block_votes": Launch(block_votes, lambda: [counting(), *zeros(np.int32)], check=check_block_votes),
    "bits": Launch(bits, lambda: [_WORDS.copy(), *zeros(np.uint32, np.int32, np.int64)], check=check_bits),
    "fast": Launch(fast, lambda: [np.linspace(0.5, 2, N, dtype=np.float32), *zeros(np.float32)], check=check_fast),
    "times": Launch(times, lambda: zeros(np.int32), check=check_times),
    "vectors": Launch(vectors, lambda: [np.arange(N, dtype=np.float32), *zeros(np.float32, np.float32)], sm=80, check=check_vectors),
    "orders": Launch(orders, lambda: zeros(np.uint32, np.float64, np.float64), check=check_orders),
    "copies": Launch(copies, lambda: [np.arange(N, dtype=np.float32), *zeros(np.float32)], sm=80, check=check_copies),
    "bulk": Launch(bulk, lambda: [np.arange(N, dtype=np.float32), *zeros(np.float32)], sm=90, check=check_bulk),
    "tensor": Launch(tensor, arrays(_ROWS, np.zeros_like(_ROWS)), block=32, sm=90, check=check_tensor),
    "cluster": Launch(cluster, lambda: zeros(np.int32, np.int32), sm=90, check=check_cluster),
    "product_f16": Launch(product, matrices(np.float16), 1, 32, 80, check_product),
    "product_bf16": Launch(product, matrices(_BF16), 1, 32, 80, check_product),
    "product_tf32": Launch(product, matrices(np.float32), 1, 32, 80, check_product),
    "product_transposed": Launch(product_transposed, matrices(np.float16, k=16, turned=True), 1, 32, 80, check_product_transposed),
    "product_wmma": Launch(product_wmma, matrices(np.float16), 1, 32, 75, check_product),
    "product_i8": Launch(integers, matrices(np.int8, np.int32), 1, 32, 80, check_product),
    "single": Launch(single, lambda: [_HALF.copy(), np.zeros(128, np.float32), np.zeros(128, np.float16)], 1, 32, 80, check_single),
    "stored": Launch(stored, lambda: [np.zeros(64, np.float16)], 1, 32, 90, check_stored),
    "warp_group": Launch(warp_group, make_group, 1, 128, 90, check_group),
}  # fmt: skip
