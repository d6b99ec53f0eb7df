"""Many rows on a CPU, each the work of one thread: sorting them, and selecting the first of each.

In: what is sorted (`sort.SortPlan`), or how many are selected. Out: programs over `keys[rows, n]`. Blocks share out the rows and have memory for one
row each. A sort is a radix sort of 8 bits at a time that leaves out digits which all keys of the row share; in short rows all elements are compared with each other. A
selection finds the digits of the last key that is wanted, from the highest on, and then walks the row once more.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.base.dtypes import DType, bool_, i64
from tilewright.base.sizes import Size, minimum
from tilewright.ir.program import Program, ProgramArray
from tilewright.ir.types import tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.cpu_sort import unrolled
from tilewright.primitives.keys import cooked, from_key, key_dtype, raw, to_key
from tilewright.primitives.parts import call, scratch
from tilewright.primitives.sort import SortPlan

_ROWS, _N = Size.of("rows"), Size.of("n")
_RADIX = 256
_BLOCKS = 32
_SHORT = 64
_SHORT_OF_BYTES = 24
"""Elements of rows whose elements are all compared with each other; of bytes, which have one digit."""
_MOST_LANES = 16
"""Elements that are compared at once, where these are 64 bytes or less."""
LONGEST = 1 << 18
"""Elements of the longest row that one thread sorts."""


def sort_rows_program_cpu(plan: SortPlan) -> Program:
    """The program `keys, values? -> sorted?, moved?`."""
    unsigned, passes = key_dtype(plan.dtype), plan.passes
    lanes = min(_MOST_LANES, 64 // unsigned.itemsize)
    blocks = minimum(_ROWS, _BLOCKS)
    arrays = {"keys": ProgramArray("keys", tensor(plan.dtype, _ROWS, _N), "input")}
    if plan.payload is not None and not plan.places:
        arrays["values"] = ProgramArray("values", tensor(plan.payload, _ROWS, _N), "input")
    if not plan.places:
        arrays["sorted"] = ProgramArray("sorted", tensor(plan.dtype, _ROWS, _N), "output")
    if plan.payload is not None:
        arrays["moved"] = ProgramArray("moved", tensor(plan.payload, _ROWS, _N), "output")
    held = plan.held
    arrays["row_keys"] = scratch("row_keys", unsigned, blocks * (2 * _N + lanes))
    if held is not None:
        arrays["row_values"] = scratch("row_values", held, blocks * (2 * _N + lanes))

    def body(c: Code, *memory: Mem) -> None:
        by_name = dict(zip(arrays, memory, strict=True))
        own, carried = by_name["row_keys"], by_name.get("row_values")
        size, rows, several = c.size(_N), c.size(_ROWS), c.size(blocks)
        home = c.block() * (size * 2 + lanes)
        table = c.alloc("local", i64, passes * _RADIX, align=64)

        def read(r: Num, t: Num) -> Num:
            key = to_key(c, raw(by_name["keys"].load((r, t))), plan.dtype, plan.descending, plan.places)
            own.store(home + t, key)
            if carried is not None:
                carried.store(home + t, by_name["values"].load((r, t)) if "values" in by_name else t.to(carried.dtype))
            return key

        def write(r: Num, base: Num) -> None:
            def one(t: Num) -> None:
                if "sorted" in by_name:
                    key = from_key(c, own.load(base + t), plan.dtype, plan.descending)
                    by_name["sorted"].store((r, t), cooked(key, plan.dtype))
                if carried is not None:
                    by_name["moved"].store((r, t), carried.load(base + t).to(by_name["moved"].dtype))

            unrolled(c, c.index(0), size, 4, one)

        def by_comparison(r: Num) -> None:
            """An element's place is how many are smaller, or equal and before it. Behind the row there are keys that are neither."""
            c.loop(0, size, 1, [], lambda t: _nothing(read(r, t)))
            own.store(home + size, c.op("broadcast", c.const(-1, unsigned), width=lanes), unaligned=True)
            target = home + size + lanes
            lane = c.op("lane_ids", width=lanes, dtype=unsigned)

            def one(t: Num) -> None:
                key = own.load(home + t)
                wanted, here = (c.op("broadcast", v, width=lanes) for v in (key, t.to(unsigned)))

                def several(j: Num, before: Num) -> Num:
                    others = own.load(home + j, lanes, unaligned=True)
                    earlier = lane + c.op("broadcast", j.to(unsigned), width=lanes) < here
                    return before + ((others < wanted) | (others.eq(wanted) & earlier)).to(unsigned)

                (before,) = c.loop(0, size, lanes, [c.op("broadcast", c.const(0, unsigned), width=lanes)], several)
                place = target + c.op("fold", before, kind="add", together=True).to(i64)
                own.store(place, key)
                if carried is not None:
                    carried.store(place, carried.load(home + t))

            c.loop(0, size, 1, [], one)
            write(r, target)

        def by_digits(r: Num) -> None:
            zero = c.op("broadcast", c.const(0, i64), width=8)
            c.loop(0, passes * _RADIX, 8, [], lambda i: table.store(i, zero))

            def count(t: Num) -> None:
                key = read(r, t)
                for k in range(passes):
                    place = _digit(key, k) + k * _RADIX
                    table.store(place, table[place] + 1)

            unrolled(c, c.index(0), size, 2, count)
            first = own.load(home)
            side = c.const(0, i64)
            for k in range(passes):
                side = c.either(
                    table[_digit(first, k) + k * _RADIX].eq(size), lambda side=side: side, lambda side=side, k=k: move(side, k)  # type: ignore[misc]
                )[0]
            write(r, home + side * size)

        def move(side: Num, k: int) -> Num:
            source, target = home + side * size, home + (1 - side) * size

            def begin(i: Num, before: Num) -> Num:
                mine = table[i]
                table.store(i, before)
                return before + mine

            c.loop(k * _RADIX, (k + 1) * _RADIX, 1, [target], begin)

            def one(t: Num) -> None:
                key = own.load(source + t)
                d = _digit(key, k) + k * _RADIX
                place = table[d]
                table.store(d, place + 1)
                own.store(place, key)
                if carried is not None:
                    carried.store(place, carried.load(source + t))

            unrolled(c, c.index(0), size, 4, one)
            return 1 - side

        def row(r: Num) -> None:
            c.either(size <= (_SHORT_OF_BYTES if passes == 1 else _SHORT), lambda: by_comparison(r), lambda: by_digits(r))

        c.loop(c.block() * rows // several, (c.block() + 1) * rows // several, 1, [], row)

    kernel = write_kernel("sort_rows", 1, [blocks], [(a.name, a.type) for a in arrays.values()], body)
    by_kind = {kind: tuple(a for a in arrays.values() if a.role == kind) for kind in ("input", "output", "scratch")}
    return Program("sort_rows", by_kind["input"], by_kind["output"], by_kind["scratch"], (call(kernel),))


SELECTED, SELECTED_BY_VECTORS = 1 << 15, 1 << 17
"""Elements of the parts of a row that are selected from: where digits of all are counted, and where most of them are read once."""
_FEWEST_KEPT, _MOST_KEPT = 512, 4096
_AT_ONCE = 4
"""Vectors that are compared before a branch."""


def kept_of(wanted: int) -> int:
    """Candidates that a selection of so many elements keeps; 0 where it counts digits of the whole part instead."""
    return next((kept for kept in (_FEWEST_KEPT, _MOST_KEPT) if wanted * 4 <= kept), 0)


def select_program_cpu(dtype: DType, descending: bool, kept: int = 0) -> Program:
    """The program `keys[rows, n] -> places[rows, parts, wanted]`: of each of some equal parts of a row, where the `wanted` elements are that stand first
    in order. Places are in their own order. Of equal elements the first ones are taken. Every part has that many elements.

    Where few are wanted, vectors are compared with the last candidate so far, and what stands before it is `kept` until there is no more room; then all
    but the wanted ones go. Most elements of most rows are thus read once."""
    unsigned = key_dtype(dtype)
    parts, wanted = Size.of("parts"), Size.of("wanted")
    lanes = min(_MOST_LANES, 64 // unsigned.itemsize)

    def body(c: Code, keys: Mem, places: Mem) -> None:
        several, size, many = c.size(parts), c.size(_N), c.size(wanted)
        r, chunk = c.block() // several, c.block() % several
        low, high = r * size + chunk * size // several, r * size + (chunk + 1) * size // several
        first = (r * several + chunk) * many
        table = c.alloc("local", i64, _RADIX, align=64)

        def key_of(value: Num) -> Num:
            return to_key(c, raw(value), dtype, descending, True)

        def key_at(t: Num) -> Num:
            return key_of(keys.load(t))

        if not kept:
            last, left = _last_wanted(c, unsigned, table, key_at, (low, high), many)
            _take(c, key_at, (low, high), (last, left), lambda used, t: places.store(first + used, t - r * size))
            return
        own, where = c.alloc("local", unsigned, kept, align=64), c.alloc("local", i64, kept, align=64)

        def put(at: Num, key: Num, place: Num) -> None:
            own.store(at, key)
            where.store(at, place)

        def only_wanted(held: Num) -> Num:
            """All but the wanted candidates go, and the last of these in order is what others are compared with."""
            last, left = _last_wanted(c, unsigned, table, own.load, (c.index(0), held), many)
            _take(c, own.load, (c.index(0), held), (last, left), lambda used, t: put(used, own.load(t), where.load(t)))
            return last

        begin = (low + kept).min(high)
        c.loop(low, begin, 1, [], lambda t: put(t - low, key_at(t), t - r * size))
        step, sampled = _AT_ONCE * lanes, kept // 2

        def room(t: Num, held: Num) -> list[Num]:
            """Where it is much, a sample of the rest says sooner what is not wanted: in rows that are in order, each element stands before all others so far."""
            bound, rest = only_wanted(held), high - t

            def nearer() -> list[Num]:
                apart = rest // sampled
                c.loop(0, sampled, 1, [], lambda i: own.store(many + i, key_at(t + i * apart)))
                last, _ = _last_wanted(c, unsigned, table, lambda i: own.load(many + i), (c.index(0), c.index(sampled)), many)
                return [c.select(last < bound, last + 1, bound)]

            return [many, *c.either(rest > 8 * sampled, nearer, lambda: [bound])]

        def some_before(t: Num, count: int, bound: Num) -> Num:
            limit = c.op("broadcast", bound, width=lanes)
            masks = [key_of(keys.load(t + k * lanes, lanes, unaligned=True)) < limit for k in range(count)]
            while len(masks) > 1:
                masks = [one | other for one, other in zip(masks[::2], masks[1::2], strict=True)]
            return c.op("fold", masks[0].to(unsigned), kind="add", together=True).ne(0)

        def enter(t: Num, held: Num, bound: Num) -> list[Num]:
            key = key_at(t)
            wants = key < bound
            c.when(wants, lambda: put(held, key, t - r * size))
            return [held + wants.to(i64)]

        def vector(t: Num, held: Num, bound: Num) -> list[Num]:
            end = t + lanes
            is_some = c.either(end <= high, lambda: [some_before(t, 1, bound)], lambda: [c.const(True, bool_)])[0]
            return c.either(is_some, lambda: c.loop(t, end.min(high), 1, [held], lambda u, held: enter(u, held, bound)), lambda: [held])

        def vectors(t: Num, held: Num, bound: Num) -> list[Num]:
            held, bound = c.either(held + step > kept, lambda: room(t, held), lambda: [held, bound])
            end = t + step
            is_some = c.either(end <= high, lambda: [some_before(t, _AT_ONCE, bound)], lambda: [c.const(True, bool_)])[0]
            (held,) = c.either(is_some, lambda: c.loop(t, end.min(high), lanes, [held], lambda u, held: vector(u, held, bound)), lambda: [held])
            return [held, bound]

        held, _ = c.loop(begin, high, step, [begin - low, c.const(-1, unsigned)], vectors)
        only_wanted(held)
        c.loop(0, many, 1, [], lambda i: places.store(first + i, where.load(i)))

    params = [("keys", tensor(dtype, _ROWS * _N)), ("places", tensor(i64, _ROWS * parts * wanted))]
    kernel = write_kernel("select", 1, [_ROWS * parts], params, body)
    keys, places = ProgramArray("keys", tensor(dtype, _ROWS, _N), "input"), ProgramArray("places", tensor(i64, _ROWS, parts, wanted), "output")
    return Program("select", (keys,), (places,), (), (call(kernel),))


def _last_wanted(c: Code, unsigned: DType, table: Mem, key_at: Callable[[Num], Num], span: tuple[Num, Num], wanted: Num) -> tuple[Num, Num]:
    """The last key that is wanted, digit by digit from the highest on, and how many of the keys that equal it are."""
    passes = unsigned.bits // 8
    zero = c.op("broadcast", c.const(0, i64), width=8)
    prefix, left = c.const(0, unsigned), wanted
    for k in reversed(range(passes)):
        c.loop(0, _RADIX, 8, [], lambda i: table.store(i, zero))
        shift = 8 * (k + 1)

        def count(t: Num, k: int = k, shift: int = shift, prefix: Num = prefix) -> None:
            key = key_at(t)
            place = _digit(key, k)
            if shift == unsigned.bits:
                table.store(place, table[place] + 1)
            else:
                table.store(place, table[place] + (key >> shift).eq(prefix).to(i64))

        unrolled(c, *span, 4, count)

        def next_digit(d: Num, found: Num, left: Num) -> list[Num]:
            mine = table[d]
            beyond = found.eq(d) & (left > mine)
            return [found + beyond.to(i64), c.select(beyond, left - mine, left)]

        found, left = c.loop(0, _RADIX - 1, 1, [c.const(0, i64), left], next_digit)
        prefix = found.to(unsigned) if k == passes - 1 else (prefix << 8) | found.to(unsigned)
    return prefix, left


def _take(c: Code, key_at: Callable[[Num], Num], span: tuple[Num, Num], until: tuple[Num, Num], put: Callable[[Num, Num], None]) -> None:
    """Hand on the elements before the last wanted key, and the first of those that equal it, in their order: how many there were before, and where each is."""
    last, left = until

    def take(t: Num, used: Num, equal: Num) -> list[Num]:
        key = key_at(t)
        same = key.eq(last) & (equal > 0)
        wants = (key < last) | same
        c.when(wants, lambda: put(used, t))
        return [used + wants.to(i64), equal - same.to(i64)]

    c.loop(*span, 1, [c.const(0, i64), left], take)


def _digit(key: Num, number: int) -> Num:
    return ((key >> (8 * number) if number else key) & 0xFF).to(i64)


def _nothing(_: object) -> None: ...
