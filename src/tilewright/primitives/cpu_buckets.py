"""Sorting keys of 32 and 64 bits on a CPU: first into buckets that fit the cache, then each bucket by itself.

In: as for GPUs (`sort.SortPlan`). Out: a program of kernels: the smallest and the largest key; how many keys of each chunk go to each
of `BUCKETS` buckets, which cut the range between them evenly; where they go; the move; and a radix sort of each bucket over the bits
that its keys do not share, up to 11 at a time, fewer where a bucket has few keys. Buckets are what threads share out.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.base.dtypes import DType, bool_, i64, u32, u64
from tilewright.base.sizes import Size
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.cpu_sort import bounds, chunk_count, unrolled
from tilewright.primitives.keys import cooked, from_key, key_dtype, raw, to_key
from tilewright.primitives.parts import scratch
from tilewright.primitives.sort import SortPlan

N = Size.of("n")
BITS = 10
BUCKETS = 1 << BITS
_DIGIT = 11
_TABLE = 1 << _DIGIT
_MOST_PASSES = 8
_KEY_STEPS = 2
"""What a key costs in a pass, in entries of its table."""


def bucket_sort_program(plan: SortPlan, chunks: int = 16) -> Program:
    """The program `keys, values? -> sorted?, moved?`."""
    return _Buckets(plan, chunk_count(chunks)).program()


class _Buckets:
    def __init__(self, plan: SortPlan, count: Size) -> None:
        self.plan, self.count = plan, count
        self.unsigned = key_dtype(plan.dtype)
        # Keys go from the input to the first side, and in a bucket from one side to the other. The second side is the output where that
        # can hold them on their way.
        own = not plan.places
        self.sides = [("other_keys", "other_values"), ("sorted" if own else "more_keys", "moved" if own else "more_values")]
        types: dict[str, DType | None] = {"keys": plan.dtype, "other_keys": plan.dtype, self.sides[1][0]: plan.dtype}
        if plan.payload is not None:
            types |= {"other_values": plan.held, self.sides[1][1]: plan.held, "moved": plan.payload}
            if own:
                types["values"] = plan.payload
        self.arrays = {name: tensor(dtype, N) for name, dtype in types.items() if dtype is not None}
        self.small = {
            "extremes": tensor(self.unsigned, count * 2), "cut": tensor(u64, 2),
            "counts": tensor(i64, count * BUCKETS), "starts": tensor(i64, BUCKETS + 1),
        }  # fmt: skip

    def program(self) -> Program:
        calls = [self._extremes(), self._cut(), self._count(), self._starts(), self._move(), self._sort()]
        inputs = [ProgramArray(n, self.arrays[n], "input") for n in ("keys", "values") if n in self.arrays]
        outputs = [ProgramArray(n, self.arrays[n], "output") for n in ("sorted", "moved") if n in self.arrays]
        named = {a.name for a in (*inputs, *outputs)}
        held = [scratch(n, t.dtype, N) for n, t in self.arrays.items() if n not in named]
        held += [scratch(n, t.dtype, *t.shape) for n, t in self.small.items()]
        return Program("sort", tuple(inputs), tuple(outputs), tuple(held), tuple(calls))

    def _call(self, name: str, grid: Size | int, arrays: list[str], body: Callable[..., None]) -> KernelCall:
        types = {**self.arrays, **self.small}
        return KernelCall(write_kernel(name, 1, [grid], [(n, types[n]) for n in arrays], body), tuple(arrays))

    def _key(self, c: Code, value: Num) -> Num:
        return to_key(c, raw(value), self.plan.dtype, self.plan.descending, self.plan.places)

    def _extremes(self) -> KernelCall:
        """The smallest and the largest key of each chunk."""

        def body(c: Code, keys: Mem, extremes: Mem) -> None:
            low, high = bounds(c, self.count)
            width = 64 // self.plan.dtype.itemsize
            whole = low + (high - low) // width * width
            least, most = (c.op("broadcast", c.const(v, self.unsigned), width=width) for v in (-1, 0))

            def vectors(i: Num, least: Num, most: Num) -> list[Num]:
                key = self._key(c, keys.load(i, width, unaligned=True))
                return [least.min(key), most.max(key)]

            def single(i: Num, least: Num, most: Num) -> list[Num]:
                key = self._key(c, keys.load(i))
                return [least.min(key), most.max(key)]

            least, most = c.loop(low, whole, width, [least, most], vectors)
            small, large = least.lanes(), most.lanes()
            for k in range(1, width):
                small[0], large[0] = small[0].min(small[k]), large[0].max(large[k])
            one, other = c.loop(whole, high, 1, [small[0], large[0]], single)
            extremes.store(c.block() * 2, one)
            extremes.store(c.block() * 2 + 1, other)

        return self._call("sort_extremes", self.count, ["keys", "extremes"], body)

    def _cut(self) -> KernelCall:
        """The smallest key, and how many of its lower bits a bucket's keys may differ in."""

        def body(c: Code, extremes: Mem, cut: Mem) -> None:
            def step(i: Num, least: Num, most: Num) -> list[Num]:
                return [least.min(extremes[i * 2]), most.max(extremes[i * 2 + 1])]

            least, most = c.loop(0, c.size(self.count), 1, [c.const(-1, self.unsigned), c.const(0, self.unsigned)], step)
            over = ((most - least).to(u64)) >> BITS
            (shift,) = c.loop(0, 64 - BITS, 1, [c.const(0, u64)], lambda i, n: n + (over >> i.bits(u64)).ne(0).to(u64))
            cut.store(0, least.to(u64))
            cut.store(1, shift)

        return self._call("sort_cut", 1, ["extremes", "cut"], body)

    def _bucket(self, c: Code, cut: Mem) -> tuple[Callable[[Num], Num], Num, Num]:
        """What gives a key's bucket; the smallest key; the bits of a bucket."""
        least, shift = cut[0].to(self.unsigned), cut[1].to(self.unsigned)
        return (lambda key: ((key - least) >> shift).to(i64)), least, shift

    def _count(self) -> KernelCall:
        def body(c: Code, keys: Mem, cut: Mem, counts: Mem) -> None:
            low, high = bounds(c, self.count)
            bucket, _, _ = self._bucket(c, cut)
            tables = 2
            table = c.alloc("local", u32, BUCKETS * tables, align=64)
            zero = c.op("broadcast", c.const(0, u32), width=16)
            c.loop(0, BUCKETS * tables, 16, [], lambda i: table.store(i, zero))

            def add(i: Num, k: int) -> None:
                where = bucket(self._key(c, keys.load(i))) + k * BUCKETS
                table.store(where, table[where] + 1)

            middle = low + (high - low) // tables * tables

            def several(i: Num) -> None:
                for k in range(tables):
                    add(i + k, k)

            c.loop(low, middle, tables, [], several)
            c.loop(middle, high, 1, [], lambda i: add(i, 0))
            base = c.block() * BUCKETS
            c.loop(0, BUCKETS, 1, [], lambda i: counts.store(base + i, (table[i] + table[i + BUCKETS]).to(i64)))

        return self._call("sort_count", self.count, ["keys", "cut", "counts"], body)

    def _starts(self) -> KernelCall:
        def body(c: Code, counts: Mem, starts: Mem) -> None:
            def one(i: Num, before: Num) -> Num:
                starts.store(i, before)

                def chunk(j: Num, now: Num) -> Num:
                    where = j * BUCKETS + i
                    mine = counts[where]
                    counts.store(where, now)
                    return now + mine

                return c.loop(0, c.size(self.count), 1, [before], chunk)[0]

            (total,) = c.loop(0, BUCKETS, 1, [c.const(0, i64)], one)
            starts.store(BUCKETS, total)

        return self._call("sort_starts", 1, ["counts", "starts"], body)

    def _move(self) -> KernelCall:
        """Keys, less the smallest, to their buckets."""
        plan = self.plan
        payload = [n for n in ("values", "other_values") if n in self.arrays]

        def body(c: Code, keys: Mem, cut: Mem, counts: Mem, out: Mem, *memory: Mem) -> None:
            low, high = bounds(c, self.count)
            bucket, least, _ = self._bucket(c, cut)
            where = c.alloc("local", i64, BUCKETS, align=64)
            base = c.block() * BUCKETS
            c.loop(0, BUCKETS, 1, [], lambda i: where.store(i, counts[base + i]))

            def one(i: Num) -> None:
                key = self._key(c, keys.load(i))
                b = bucket(key)
                place = where[b]
                where.store(b, place + 1)
                out.store(place, cooked(key - least, plan.dtype))
                if memory:
                    memory[-1].store(place, memory[0].load(i) if len(memory) > 1 else i.to(memory[-1].dtype))

            unrolled(c, low, high, 4, one)

        return self._call("sort_move", self.count, ["keys", "cut", "counts", "other_keys", *payload], body)

    def _sort(self) -> KernelCall:
        """Each bucket by the bits its keys do not share, from one side to the other and back; then to the output."""
        plan = self.plan
        names = [name for side in self.sides for name in side if name in self.arrays]
        names += [n for n in ("moved",) if n in self.arrays and n not in names]

        def body(c: Code, cut: Mem, starts: Mem, *memory: Mem) -> None:
            by_name = dict(zip(names, memory, strict=True))
            sides = [(by_name[keys], by_name.get(values)) for keys, values in self.sides]
            low, high = starts[c.block()], starts[c.block() + 1]
            least, shift = cut[0].to(self.unsigned), cut[1]
            bits = _digit_bits(c, high - low, shift)
            size = (c.const(1, i64) << bits.bits(i64)).max(8)
            mask = (size - 1).to(self.unsigned)
            table = c.alloc("local", i64, _TABLE, align=64)
            zero = c.op("broadcast", c.const(0, i64), width=8)

            def one_pass(source: int, bit: Num) -> None:
                (keys, values), (out, moved) = sides[source], sides[1 - source]
                by = bit.to(self.unsigned)
                c.loop(0, size, 8, [], lambda i: table.store(i, zero))

                def digit(i: Num) -> tuple[Num, Num]:
                    value = keys.load(i)
                    return value, ((raw(value) >> by) & mask).to(i64)

                def count(i: Num) -> None:
                    _, d = digit(i)
                    table.store(d, table[d] + 1)

                unrolled(c, low, high, 4, count)

                def begin(i: Num, before: Num) -> Num:
                    mine = table[i]
                    table.store(i, before)
                    return before + mine

                c.loop(0, size, 1, [low], begin)

                def move(i: Num) -> None:
                    value, d = digit(i)
                    place = table[d]
                    table.store(d, place + 1)
                    out.store(place, value)
                    if values is not None and moved is not None:
                        moved.store(place, values.load(i))

                unrolled(c, low, high, 4, move)

            def turn(bit: Num, second: Num) -> Num:
                c.either(second, lambda: one_pass(1, bit), lambda: one_pass(0, bit))
                return ~second

            few = high - low <= 1
            (second,) = c.loop(c.const(0, u64), c.select(few, c.const(0, u64), shift), bits.max(1), [c.const(False, bool_)], turn)

            def finish(source: int) -> None:
                keys, values = sides[source]

                def one(i: Num) -> None:
                    if "sorted" in by_name:
                        key = raw(keys.load(i)) + least
                        by_name["sorted"].store(i, cooked(from_key(c, key, plan.dtype, plan.descending), plan.dtype))
                    if values is not None and (source == 0 or plan.places):
                        by_name["moved"].store(i, values.load(i).to(by_name["moved"].dtype))

                unrolled(c, low, high, 4, one)

            c.either(second, lambda: finish(1), lambda: finish(0))

        return self._call("sort_buckets", BUCKETS, ["cut", "starts", *names], body)


def _digit_bits(c: Code, count: Num, shift: Num) -> Num:
    """Bits of a digit for which `count` keys of `shift` bits are sorted soonest: a pass counts and moves every key, and walks a table of all digits."""
    best, bits = c.const(1 << 62, i64), c.const(1, u64)
    for passes in range(1, _MOST_PASSES + 1):
        wide = ((shift + (passes - 1)) // passes).max(1)
        steps = (count * _KEY_STEPS + (c.const(1, i64) << wide.min(_DIGIT).bits(i64))) * passes
        better = (wide <= _DIGIT) & (steps < best)
        best, bits = c.select(better, steps, best), c.select(better, wide, bits)
    return bits
