"""Instructions of explicit kernels, as Python sees them: what they mean is in the table of words (`frontend.simt_ops`).

Inside a function marked `@tilewright.gpu` these names are read by the compiler, never executed; see docs/explicit-kernels-instructions.md.
"""

from __future__ import annotations

from typing import Any

from tilewright.api.simt_language import _only_in_kernels
from tilewright.base.dtypes import DType, f32

Index = int | tuple[int, ...]
Fragment = tuple[Any, ...]
"""Numbers in the registers of a warp's threads."""


class _Cluster:
    """Blocks that run at once and reach each other's shared memory: `@tw.gpu(cluster=2)`."""

    __simt__ = "cluster"
    rank: int
    """This block's number in its cluster."""
    size: int
    """Blocks of a cluster."""

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        _only_in_kernels(f"cluster.{name}")


cluster = _Cluster()


def vote_uniform(predicate: object, lanes: int | None = None) -> bool:
    """Whether the predicate is the same in all lanes of the warp."""
    _only_in_kernels("vote_uniform")


def match_any(value: Any, lanes: int | None = None) -> int:
    """A bit for each lane of the warp: whether it has the same value."""
    _only_in_kernels("match_any")


def match_all(value: Any, lanes: int | None = None) -> tuple[int, bool]:
    """The lanes if all of them have the same value, else 0; and whether they do."""
    _only_in_kernels("match_all")


def redux_add(value: Any, lanes: int | None = None) -> int:
    """The sum over the warp, of 32-bit integers, by one instruction."""
    _only_in_kernels("redux_add")


def redux_min(value: Any, lanes: int | None = None) -> int:
    """The least over the warp, of 32-bit integers, by one instruction."""
    _only_in_kernels("redux_min")


def redux_max(value: Any, lanes: int | None = None) -> int:
    """The greatest over the warp, of 32-bit integers, by one instruction."""
    _only_in_kernels("redux_max")


def redux_and(value: Any, lanes: int | None = None) -> int:
    """The bitwise and over the warp, of 32-bit integers, by one instruction."""
    _only_in_kernels("redux_and")


def redux_or(value: Any, lanes: int | None = None) -> int:
    """The bitwise or over the warp, of 32-bit integers, by one instruction."""
    _only_in_kernels("redux_or")


def redux_xor(value: Any, lanes: int | None = None) -> int:
    """The bitwise xor over the warp, of 32-bit integers, by one instruction."""
    _only_in_kernels("redux_xor")


def lane_mask(relation: str = "lt") -> int:
    """A bit for each lane whose number is in that relation (lt, le, eq, ge, gt) to this thread's."""
    _only_in_kernels("lane_mask")


def active_mask() -> int:
    """A bit for each lane of the warp that is here now."""
    _only_in_kernels("active_mask")


def elect() -> bool:
    """True in one thread of the warp, which must come as a whole."""
    _only_in_kernels("elect")


def barrier_count(predicate: object) -> int:
    """A barrier of the block that tells every thread in how many of them the predicate holds."""
    _only_in_kernels("barrier_count")


def barrier_and(predicate: object) -> bool:
    """A barrier of the block that tells every thread whether the predicate holds in all of them."""
    _only_in_kernels("barrier_and")


def barrier_or(predicate: object) -> bool:
    """A barrier of the block that tells every thread whether the predicate holds in any of them."""
    _only_in_kernels("barrier_or")


def named_barrier(number: int, threads: int) -> None:
    """Barrier 1 to 15 of the block among that many of its threads, whole warps: each arrives before any leaves."""
    _only_in_kernels("named_barrier")


def named_arrive(number: int, threads: int) -> None:
    """Arrive at such a barrier without waiting."""
    _only_in_kernels("named_arrive")


def grid_sync() -> None:
    """Every thread of the grid arrives before any leaves; all blocks must run at once."""
    _only_in_kernels("grid_sync")


def wait_previous() -> None:
    """Wait for the kernel launched before, where this one may start before its end."""
    _only_in_kernels("wait_previous")


def release_next() -> None:
    """The kernel launched next may start."""
    _only_in_kernels("release_next")


def popcount(x: int) -> int:
    """How many bits are 1."""
    _only_in_kernels("popcount")


def clz(x: int) -> int:
    """How many bits above the highest 1 are 0; all of them for 0."""
    _only_in_kernels("clz")


def ctz(x: int) -> int:
    """How many bits below the lowest 1 are 0; all of them for 0."""
    _only_in_kernels("ctz")


def ffs(x: int) -> int:
    """The place of the lowest 1, counted from 1; 0 for 0."""
    _only_in_kernels("ffs")


def brev(x: int) -> int:
    """The bits in reverse order."""
    _only_in_kernels("brev")


def byte_perm(a: Any, b: Any, selector: int) -> int:
    """Four of the eight bytes of b and a, by the nibbles of the selector."""
    _only_in_kernels("byte_perm")


def funnel_left(low: int, high: int, n: int) -> int:
    """The upper word of high:low shifted left by n modulo 32."""
    _only_in_kernels("funnel_left")


def funnel_right(low: int, high: int, n: int) -> int:
    """The lower word of high:low shifted right by n modulo 32."""
    _only_in_kernels("funnel_right")


def mul_high(a: Any, b: Any) -> int:
    """The upper half of the product of two integers of 32 or 64 bits."""
    _only_in_kernels("mul_high")


def dp4a(a: Any, b: Any, c: Any) -> int:
    """C plus the products of the four bytes of a and b, signed where the word is i32."""
    _only_in_kernels("dp4a")


def fast_exp2(x: float) -> float:
    """2^x, f32, by the device's own instruction: quick, and less exact."""
    _only_in_kernels("fast_exp2")


def fast_exp(x: float) -> float:
    """E^x, f32, by the device's own instruction: quick, and less exact."""
    _only_in_kernels("fast_exp")


def fast_log2(x: float) -> float:
    """Log2(x), f32, by the device's own instruction: quick, and less exact."""
    _only_in_kernels("fast_log2")


def fast_log(x: float) -> float:
    """Log(x), f32, by the device's own instruction: quick, and less exact."""
    _only_in_kernels("fast_log")


def fast_sin(x: float) -> float:
    """Sin(x), f32, by the device's own instruction: quick, and less exact."""
    _only_in_kernels("fast_sin")


def fast_cos(x: float) -> float:
    """Cos(x), f32, by the device's own instruction: quick, and less exact."""
    _only_in_kernels("fast_cos")


def fast_sqrt(x: float) -> float:
    """Sqrt(x), f32, by the device's own instruction: quick, and less exact."""
    _only_in_kernels("fast_sqrt")


def fast_rsqrt(x: float) -> float:
    """1 / sqrt(x), f32, by the device's own instruction: quick, and less exact."""
    _only_in_kernels("fast_rsqrt")


def fast_rcp(x: float) -> float:
    """1 / x, f32, by the device's own instruction: quick, and less exact."""
    _only_in_kernels("fast_rcp")


def fast_tanh(x: float) -> float:
    """Tanh(x), f32, by the device's own instruction: quick, and less exact."""
    _only_in_kernels("fast_tanh")


def fast_divide(a: Any, b: Any) -> float:
    """A / b, f32, by the device's own instructions: quick, and less exact; 0 where b is above 2^126."""
    _only_in_kernels("fast_divide")


def clock() -> int:
    """A counter of the multiprocessor's cycles, of 64 bits."""
    _only_in_kernels("clock")


def clock32() -> int:
    """Its lower 32 bits."""
    _only_in_kernels("clock32")


def global_timer() -> int:
    """Nanoseconds, the same clock on all multiprocessors."""
    _only_in_kernels("global_timer")


def nanosleep(ns: int) -> None:
    """Do nothing for about that many nanoseconds, at most a million."""
    _only_in_kernels("nanosleep")


def vload(array: Any, index: Index, width: int = 1, cache: str | None = None) -> Any:
    """An element, or a tuple of neighbours; `cache` says how caches treat it."""
    _only_in_kernels("vload")


def vstore(array: Any, index: Index, value: Any, cache: str | None = None) -> None:
    """Write an element, or a tuple of neighbours."""
    _only_in_kernels("vstore")


def prefetch(array: Any, index: Index) -> None:
    """That element will be needed soon; it may lie outside the array."""
    _only_in_kernels("prefetch")


def atomic_load(array: Any, index: Index, order: str = "relaxed", scope: str = "device", width: int = 1) -> Any:
    """One access that is made where it stands, every time."""
    _only_in_kernels("atomic_load")


def atomic_store(array: Any, index: Index, value: Any, order: str = "relaxed", scope: str = "device") -> None:
    """Write an element, or neighbours of 128 bits at most, as one."""
    _only_in_kernels("atomic_store")


def copy_async(
    to: Any,
    at: Index,
    source: Any,
    index: Index,
    count: int = 1,
    where: object = True,
    cache: str | None = None,
    prefetch: int = 0,
) -> None:
    """Start copying 4, 8 or 16 bytes to shared memory."""
    _only_in_kernels("copy_async")


def copy_commit() -> None:
    """Close the thread's group of `copy_async`."""
    _only_in_kernels("copy_commit")


def copy_wait(pending: int = 0) -> None:
    """Wait until at most `pending` of the thread's groups of `copy_async` are unfinished."""
    _only_in_kernels("copy_wait")


def mbarriers(n: int) -> Any:
    """N barriers in shared memory that count arrivals and copied bytes."""
    _only_in_kernels("mbarriers")


def mbarrier_init(barriers: Any, i: int, count: int) -> None:
    """Make it one that expects `count` arrivals in every phase; by one thread, before a barrier."""
    _only_in_kernels("mbarrier_init")


def mbarrier_arrive(barriers: Any, i: int, rank: int | None = None) -> None:
    """Arrive, here or in the block of the cluster with that rank."""
    _only_in_kernels("mbarrier_arrive")


def mbarrier_expect(barriers: Any, i: int, bytes: int) -> None:
    """Arrive, and expect that many bytes to be copied in this phase."""
    _only_in_kernels("mbarrier_expect")


def mbarrier_wait(barriers: Any, i: int, parity: int) -> None:
    """Wait until the phase of that parity has ended: 0 waits for the first."""
    _only_in_kernels("mbarrier_wait")


def fence_init() -> None:
    """Initialised mbarriers are seen by the whole cluster and the copy engine."""
    _only_in_kernels("fence_init")


def fence_async() -> None:
    """What this thread wrote to shared memory is seen by the copy engine and matrix units."""
    _only_in_kernels("fence_async")


def bulk_load(to: Any, at: Index, source: Any, index: Index, count: int, barriers: Any, i: int) -> None:
    """Start copying neighbours to shared memory; their bytes count on the mbarrier."""
    _only_in_kernels("bulk_load")


def bulk_store(source: Any, at: Index, to: Any, index: Index, count: int) -> None:
    """Start copying neighbours from shared memory, as part of the thread's open group."""
    _only_in_kernels("bulk_store")


def tensor_map(array: Any, box: tuple[int, ...], swizzle: int = 0) -> Any:
    """How the copy engine sees an array: the box one copy moves, and how its rows are swizzled."""
    _only_in_kernels("tensor_map")


def tma_load(to: Any, at: Index, map: Any, index: Index, barriers: Any, i: int) -> None:
    """Start copying the box there into shared memory; its bytes count on the mbarrier."""
    _only_in_kernels("tma_load")


def tma_store(source: Any, at: Index, map: Any, index: Index) -> None:
    """Start copying a box from shared memory, as part of the thread's open group."""
    _only_in_kernels("tma_store")


def bulk_commit() -> None:
    """Close the thread's group of bulk and tensor stores."""
    _only_in_kernels("bulk_commit")


def bulk_wait(pending: int = 0, read: bool = False) -> None:
    """Wait until at most `pending` of the thread's groups of stores are unfinished, or have been `read`."""
    _only_in_kernels("bulk_wait")


def cluster_sync() -> None:
    """Every thread of the cluster arrives before any leaves."""
    _only_in_kernels("cluster_sync")


def load_remote(array: Any, index: Index, rank: int) -> Any:
    """An element of the same shared memory in the block of the cluster with that rank."""
    _only_in_kernels("load_remote")


def store_remote(array: Any, index: Index, rank: int, value: Any) -> None:
    """Write an element of the same shared memory in the block with that rank."""
    _only_in_kernels("store_remote")


def fragment_a(array: Any, index: Index, transposed: bool = False) -> Fragment:
    """16 rows of a first factor, from row and column `index` of a matrix on (or of its transpose)."""
    _only_in_kernels("fragment_a")


def fragment_b(array: Any, index: Index, transposed: bool = False) -> Fragment:
    """16 columns of a second factor, from row and column `index` of a matrix on (or of its transpose)."""
    _only_in_kernels("fragment_b")


def fragment_c(value: Any = 0.0, dtype: DType = f32) -> Fragment:
    """16 x 16 sums that all begin as that number: f32, or i32 for sums of integers."""
    _only_in_kernels("fragment_c")


def fragment_mma(a: Any, b: Any, c: Any, dtype: DType) -> Fragment:
    """C plus the product of a and b, whose elements have that dtype; gives the new sums."""
    _only_in_kernels("fragment_mma")


def fragment_load(array: Any, index: Index) -> Fragment:
    """16 x 16 sums from row and column `index` of a matrix of f32 or i32 on."""
    _only_in_kernels("fragment_load")


def fragment_store(array: Any, index: Index, c: Any) -> None:
    """Write 16 x 16 sums to a matrix, from row and column `index` on, rounded to its dtype."""
    _only_in_kernels("fragment_store")


def mma_sync(a: Any, b: Any, c: Any, dtype: DType) -> Fragment:
    """One matrix instruction of the warp, 16 x 8: four words of a, two of b, four sums."""
    _only_in_kernels("mma_sync")


def ldmatrix(array: Any, index: Index, count: int = 4, trans: bool = False) -> Fragment:
    """8 x 8 matrices of 16-bit elements; lane l gives the place of row l % 8 of matrix l // 8."""
    _only_in_kernels("ldmatrix")


def stmatrix(array: Any, index: Index, words: Any, trans: bool = False) -> None:
    """The reverse of `ldmatrix`, for one, two or four words."""
    _only_in_kernels("stmatrix")


def pack_bits(values: Any, dtype: DType) -> int:
    """Two 16-bit or four 8-bit numbers as one u32, the first lowest."""
    _only_in_kernels("pack_bits")


def unpack_bits(word: int, dtype: DType) -> Fragment:
    """A u32 as a tuple of two 16-bit or four 8-bit numbers."""
    _only_in_kernels("unpack_bits")


def wgmma(a: Any, a_index: Index, b: Any, b_index: Index, sums: Any, n: int, steps: int = 1) -> Fragment:
    """Four warps start adding a 64 x k tile of a times a k x n tile of b, rows swizzled."""
    _only_in_kernels("wgmma")


def wgmma_wait(sums: Any, pending: int = 0) -> Fragment:
    """Wait until at most `pending` groups of `wgmma` are unfinished; gives the sums."""
    _only_in_kernels("wgmma_wait")


def set_registers(count: int, direction: str) -> None:
    """Give registers back ('decrease') or take more ('increase'): so many for each thread of the warp group."""
    _only_in_kernels("set_registers")
