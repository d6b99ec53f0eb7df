"""Sorting many keys of 32 and 64 bits on a CPU with wide vectors: a quicksort whose first steps threads share out.

In: what is sorted (`sort.SortPlan`), without values. Out: a program `keys -> sorted` of kernels: a sample of the keys gives the pivots
between `BUCKETS` buckets; each chunk, which fits a cache, is split by them; where the pieces of chunks go; and each bucket, which
gathers its pieces and sorts them. Chunks and buckets are what threads share out. Memory is walked through twice.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.base.dtypes import i64
from tilewright.base.sizes import Size, ceildiv
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.cpu_sort import bounds
from tilewright.primitives.keys import key_dtype, raw, to_key
from tilewright.primitives.parts import scratch
from tilewright.primitives.sort import SortPlan
from tilewright.primitives.vectors.quicksort import Quicksort, load_lanes, store_lanes
from tilewright.primitives.vectors.rows import copy_keys

N = Size.of("n")
BUCKETS = 64
_SAMPLES = 32 * BUCKETS
_CHUNK_BYTES = 256 << 10
SMALLEST = 1 << 16
"""Keys that are worth more than one thread."""


def quick_sort_program(plan: SortPlan) -> Program:
    return _QuickBuckets(plan).program()


class _QuickBuckets:
    def __init__(self, plan: SortPlan) -> None:
        self.plan, self.chunks = plan, ceildiv(N, _CHUNK_BYTES // plan.dtype.itemsize)
        self.unsigned = key_dtype(plan.dtype)
        self.types = {
            "keys": tensor(plan.dtype, N), "sorted": tensor(plan.dtype, N), "split": tensor(plan.dtype, N),
            "pivots": tensor(self.unsigned, _SAMPLES), "cuts": tensor(i64, self.chunks * (BUCKETS + 1)),
            "places": tensor(i64, self.chunks * BUCKETS), "starts": tensor(i64, BUCKETS + 1),
        }  # fmt: skip

    def program(self) -> Program:
        calls = [self._sample(), self._split(), self._places(), self._sort()]
        keys, out = ProgramArray("keys", self.types["keys"], "input"), ProgramArray("sorted", self.types["sorted"], "output")
        held = [scratch(n, t.dtype, *t.shape) for n, t in self.types.items() if n not in ("keys", "sorted")]
        return Program("sort", (keys,), (out,), tuple(held), tuple(calls))

    def _call(self, name: str, grid: Size | int, arrays: list[str], body: Callable[..., None]) -> KernelCall:
        return KernelCall(write_kernel(name, 1, [grid], [(n, self.types[n]) for n in arrays], body), tuple(arrays))

    def _sample(self) -> KernelCall:
        """Some of the keys, in order: the first one of each 32 is a pivot."""
        plan = self.plan

        def body(c: Code, keys: Mem, pivots: Mem) -> None:
            size, shift = c.size(N), _SAMPLES.bit_length() - 1

            def take(i: Num) -> None:
                pivots.store(i, to_key(c, raw(keys.load((i * size) >> shift)), plan.dtype, plan.descending))

            c.loop(0, _SAMPLES, 1, [], take)
            Quicksort(c, pivots, self.unsigned, False).sort(c.index(0), c.index(_SAMPLES))

        return self._call("sort_sample", 1, ["keys", "pivots"], body)

    def _split(self) -> KernelCall:
        """Each chunk by the pivot in the middle, then its halves, and so on."""

        def body(c: Code, keys: Mem, pivots: Mem, split: Mem, cuts: Mem) -> None:
            low, high = bounds(c, self.chunks)
            quick = Quicksort(c, split, self.plan.dtype, self.plan.descending)
            copy_keys(c, keys, split, low, high, self.plan, quick.width)
            base = c.block() * (BUCKETS + 1)
            cuts.store(base, low)
            cuts.store(base + BUCKETS, high)

            def level(k: Num) -> None:
                step = c.const(BUCKETS // 2, i64) >> k

                def one(at: Num) -> None:
                    left, right = cuts[base + at - step], cuts[base + at + step]
                    cuts.store(base + at, quick.partition(left, right, pivots[at * (_SAMPLES // BUCKETS)]))

                c.loop(step, BUCKETS, step * 2, [], one)

            c.loop(0, BUCKETS.bit_length() - 1, 1, [], level)

        return self._call("sort_split", self.chunks, ["keys", "pivots", "split", "cuts"], body)

    def _places(self) -> KernelCall:
        def body(c: Code, cuts: Mem, places: Mem, starts: Mem) -> None:
            def one(bucket: Num, before: Num) -> Num:
                starts.store(bucket, before)

                def chunk(j: Num, now: Num) -> Num:
                    here = j * (BUCKETS + 1) + bucket
                    places.store(j * BUCKETS + bucket, now)
                    return now + cuts[here + 1] - cuts[here]

                return c.loop(0, c.size(self.chunks), 1, [before], chunk)[0]

            (total,) = c.loop(0, BUCKETS, 1, [c.const(0, i64)], one)
            starts.store(BUCKETS, total)

        return self._call("sort_places", 1, ["cuts", "places", "starts"], body)

    def _sort(self) -> KernelCall:
        def body(c: Code, pivots: Mem, split: Mem, cuts: Mem, places: Mem, starts: Mem, out: Mem) -> None:
            bucket = c.block()
            quick = Quicksort(c, out, self.plan.dtype, self.plan.descending)

            def gather(j: Num) -> None:
                here = j * (BUCKETS + 1) + bucket
                first, count, place = cuts[here], cuts[here + 1] - cuts[here], places[j * BUCKETS + bucket]
                full = count & -quick.width

                def vector(i: Num) -> None:
                    out.store(place + i, split.load(first + i, quick.width, unaligned=True), unaligned=True)

                c.loop(0, full, quick.width, [], vector)
                rest = quick.below(count - full)
                store_lanes(out, place + full, load_lanes(split, first + full, rest), rest)

            c.loop(0, c.size(self.chunks), 1, [], gather)
            every = _SAMPLES // BUCKETS
            least = c.select(bucket > 0, pivots[bucket * every], c.const(0, self.unsigned))
            following = (bucket + 1).min(BUCKETS - 1) * every
            most = c.select(bucket < BUCKETS - 1, pivots[following] - 1, c.const(-1, self.unsigned))
            quick.sort(starts[bucket], starts[bucket + 1], least, most)

        return self._call("sort_buckets", BUCKETS, ["pivots", "split", "cuts", "places", "starts", "sorted"], body)
