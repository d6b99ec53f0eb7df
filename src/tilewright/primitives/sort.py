"""Radix sort on a GPU, 8 bits at a time, each pass one walk over the data (*Onesweep*).

In: the dtype of the keys, what goes with them (nothing, values, or the places they were at), the order. Out: a program that first
counts the digits of all passes, then sorts by each digit, from the lowest on; every pass keeps the order of equal digits. In a pass
a block takes the next tile, counts its digits, tells the blocks after it, sorts the tile in shared memory, learns from the blocks
before it where its digits go (a look-back for each digit, see `lookback`), and writes runs of neighbours.

Within a warp elements of one digit find each other by `match` or by votes; a counter for each warp and digit says where they go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilewright.base.dtypes import DType, bool_, i64, u32, u64
from tilewright.base.record import record
from tilewright.base.sizes import Size, ceildiv, minimum
from tilewright.base.target import Target
from tilewright.ir.nodes import Attr, Kernel
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.primitives.code import Code, Mem, Num, mask_bits, mask_word, write_kernel
from tilewright.primitives.keys import cooked, from_key, key_dtype, raw, to_key
from tilewright.primitives.lookback import AGGREGATE, EMPTY, PREFIX
from tilewright.primitives.parts import LaneNumbers, call, clear, lanes, scratch

N = Size.of("n")
RADIX = 256
_COUNT_THREADS = 512
"""Threads that count, where a block may have as many."""
_COUNT_UNROLL = 2
WIDE = 1 << 30
"""From so many elements on, counts do not fit beside a status in 32 bits."""


@record
class SortShape:
    """A block's tile: `items` keys in each of `threads`. `rank` is how equal digits of a warp are found: match, vote or or."""

    threads: int
    items: int
    warp_size: int
    rank: str = "or"
    blocks: int = 0
    """How many blocks should fit on a multiprocessor; 0: as it comes."""
    early: bool = True
    """Whether digits are counted, and told, before keys are ranked."""
    look: int = 4
    """How many tiles a look back reads at once."""

    @property
    def tile(self) -> int:
        return self.threads * self.items

    @property
    def warps(self) -> int:
        return self.threads // self.warp_size


@record
class SortPlan:
    """What is sorted. `payload`: the dtype of what goes with each key, or None; with `places` it is where the key was, and keys are not
    wanted."""

    dtype: DType
    payload: DType | None = None
    places: bool = False
    descending: bool = False
    wide: bool = False
    aligned: bool = True

    @property
    def passes(self) -> int:
        return key_dtype(self.dtype).bits // 8

    @property
    def held(self) -> DType | None:
        """What goes with each key on the way: places of few elements have 32 bits."""
        return u32 if self.places and not self.wide else self.payload

    @property
    def key(self) -> str:
        return f"{self.dtype} {self.payload} {self.places} {self.descending} {self.wide} {self.aligned}"


def sort_shape(plan: SortPlan, target: Target) -> SortShape:
    size = plan.dtype.itemsize + (plan.held.itemsize if plan.held else 0)
    items = {1: 24, 2: 24, 4: 25, 8: 22 if plan.dtype.itemsize == 4 else 16}.get(size, 10 if size > 8 else 20)
    return SortShape(min(384, target.max_threads), items, target.warp_size, blocks=2 if items >= 20 else 0)


@record
class Move:
    """The arrays of one pass: keys from and to, what goes with them from and to; empty where there is none."""

    keys: str
    sorted: str
    values: str = ""
    moved: str = ""

    @property
    def names(self) -> list[str]:
        return [name for name in (self.keys, self.sorted, self.values, self.moved) if name]


def moves(plan: SortPlan, passes: int = 0, shape: tuple[Size, ...] = (N,)) -> tuple[list[Move], list[ProgramArray], list[ProgramArray], list[ProgramArray]]:
    """The arrays of each pass, and the inputs, outputs and scratch arrays there are. Results of passes go to two arrays in turn; where
    an output is one of them, the last goes there. `passes`: how many there are, where a digit has not 8 bits.
    `shape`: that of all arrays."""
    passes = passes or plan.passes
    last = passes - 1

    def target(turn: int, output: str, kind: str) -> str:
        if turn == last:
            return output
        if not plan.places:
            return output if (last - turn) % 2 == 0 else f"other_{kind}"
        return f"other_{kind}" if turn % 2 == 0 else f"more_{kind}"

    found: list[Move] = []
    for turn in range(passes):
        keys = target(turn - 1, "sorted", "keys") if turn else "keys"
        move = Move(keys, "" if plan.places and turn == last else target(turn, "sorted", "keys"))
        if plan.payload is not None:
            values = target(turn - 1, "moved", "values") if turn else "" if plan.places else "values"
            move = replace(move, values=values, moved=target(turn, "moved", "values"))
        found.append(move)
    used, align = {name for move in found for name in move.names}, 16 if plan.aligned else 0
    held = [scratch(f"{which}_{kind}", dtype, *shape) for which in ("other", "more") for kind, dtype in (("keys", plan.dtype), ("values", plan.held))
            if f"{which}_{kind}" in used and dtype is not None]  # fmt: skip
    inputs, outputs = [ProgramArray("keys", tensor(plan.dtype, *shape, align=align), "input")], []
    if not plan.places:
        outputs.append(ProgramArray("sorted", tensor(plan.dtype, *shape, align=16), "output"))
    if plan.payload is not None:
        outputs.append(ProgramArray("moved", tensor(plan.payload, *shape, align=16), "output"))
        if not plan.places:
            inputs.append(ProgramArray("values", tensor(plan.payload, *shape, align=align), "input"))
    return found, inputs, outputs, held


def sort_program(plan: SortPlan, target: Target, shape: SortShape | None = None) -> Program:
    """The program `keys, values? -> sorted?, moved?`."""
    shape = shape or sort_shape(plan, target)
    assert shape.threads >= RADIX, "there is a thread for each digit"
    tiles = ceildiv(N, shape.tile)
    steps, inputs, outputs, held = moves(plan)
    counts = scratch("counts", u64, RADIX * plan.passes)
    states = scratch("states", u64 if plan.wide else u32, tiles * (RADIX * plan.passes))
    tickets = scratch("tickets", u32, max(4, plan.passes))
    held = [*held, counts, states, tickets]
    types = {a.name: a.type for a in (*inputs, *outputs, *held)}
    calls = [clear("clear_counts", counts), clear("clear_states", states), clear("clear_tickets", tickets)]
    calls.append(call(_count_kernel(plan, target, types["keys"], counts.type)))
    calls.append(call(_starts_kernel(plan, target, counts.type)))
    for number, move in enumerate(steps):
        names = [*move.names, "counts", "states", "tickets"]
        kernel = _pass_kernel(plan, shape, number, tiles, move, [(name, types[name]) for name in names])
        calls.append(KernelCall(kernel, tuple(names)))
    return Program("sort", tuple(inputs), tuple(outputs), tuple(held), tuple(calls))


# -- counting -------------------------------------------------------------------------------------------------------


def _count_kernel(plan: SortPlan, target: Target, x: Tensor, counts: Tensor) -> Kernel:
    """How often each digit of each pass occurs."""
    width = max(1, 16 // plan.dtype.itemsize) if plan.aligned else 1
    threads = min(_COUNT_THREADS, target.max_threads)
    grid = minimum(ceildiv(N, threads * width * _COUNT_UNROLL), target.multiprocessors * 4)
    words = RADIX * plan.passes

    def body(c: Code, keys: Mem, counts: Mem) -> None:
        thread, size = c.thread(), c.size(N)
        table = c.shared(u32, words)
        c.loop(thread, words, threads, [], lambda i: table.store(i, 0))
        c.barrier()

        def one(value: Num) -> None:
            key = to_key(c, raw(value), plan.dtype, plan.descending, plan.places)
            for number in range(plan.passes):
                table.atomic("add", digit_of(key, number).to(i64) + number * RADIX, 1, scope="block")

        stride = c.blocks() * threads
        first = c.block() * threads + thread
        vectors = size // width

        def several(i: Num, _: Num) -> Num:
            loaded = [keys.load((i + stride * k) * width, width).lanes() for k in range(_COUNT_UNROLL)]
            for values in loaded:
                for value in values:
                    one(value)
            return i + stride * _COUNT_UNROLL

        (rest,) = c.loop(first, vectors - stride * (_COUNT_UNROLL - 1), stride * _COUNT_UNROLL, [first], several)

        def single(i: Num) -> None:
            for value in keys.load(i * width, width).lanes():
                one(value)

        c.loop(rest, vectors, stride, [], single)
        if width > 1:
            last = vectors * width + first
            c.when(last < size, lambda: one(keys[last]))
        c.barrier()

        def flush(i: Num) -> None:
            count = table[i].to(u64)
            c.when(count.ne(0), lambda: _discard(counts.atomic("add", i, count)))

        c.loop(thread, words, threads, [], flush)

    return write_kernel("sort_count", threads, [grid], [("keys", x), ("counts", counts)], body)


def _starts_kernel(plan: SortPlan, target: Target, counts: Tensor) -> Kernel:
    """Counts become the places where the digits begin; a block for each pass."""

    def body(c: Code, counts: Mem) -> None:
        at = lanes(c, target.warp_size)
        place = c.block() * RADIX + at.thread
        mine = counts[place]
        before, _ = block_sums(c, at, mine, RADIX // target.warp_size)
        counts.store(place, before)

    return write_kernel("sort_starts", RADIX, [plan.passes], [("counts", counts)], body)


def block_sums(c: Code, at: LaneNumbers, mine: Num, warps: int) -> tuple[Num, Num]:
    """What the threads before this one have, and what those of its warp up to it have; for the first `warps` warps."""
    running = mine
    for distance in at.distances:
        other = c.shuffle(running, distance, "up")
        running = c.select(at.lane >= distance, running + other, running)
    totals = c.shared(mine.dtype, warps)
    c.when(at.is_last_lane, lambda: totals.store(at.warp, running))
    c.barrier()
    before = running - mine
    for warp in range(warps - 1):
        before = c.select(at.warp > warp, before + totals[warp], before)
    return before, running


def digit_of(key: Num, number: int) -> Num:
    shifted = key >> (8 * number) if number else key
    return (shifted & 0xFF).to(u32) if key.dtype.bits > 8 else shifted.to(u32)


def _discard(_: Num) -> None: ...


# -- one pass -------------------------------------------------------------------------------------------------------


def _pass_kernel(plan: SortPlan, shape: SortShape, number: int, tiles: Size, move: Move, params: list[tuple[str, Tensor]]) -> Kernel:
    first, last = number == 0, number == plan.passes - 1
    word = u64 if plan.wide else u32
    unsigned = key_dtype(plan.dtype)

    def body(c: Code, *memory: Mem) -> None:
        by_name = dict(zip(move.names, memory))
        counts, states, tickets = memory[-3:]
        source, target, moved = by_name[move.keys], by_name.get(move.sorted), by_name.get(move.moved)
        at, size = lanes(c, shape.warp_size), c.size(N)
        warp_counts = c.shared(u32, shape.warps * RADIX)
        c.loop(at.thread, shape.warps * RADIX, shape.threads, [], lambda i: warp_counts.store(i, 0))
        ticket = c.shared(u32, 1)
        c.when(at.thread.eq(0), lambda: ticket.store(0, tickets.atomic("add", number, 1)))
        c.barrier()
        tile = ticket[0].to(i64)
        start = tile * shape.tile
        inside = at.warp * (shape.warp_size * shape.items) + at.lane
        keys = _load_keys(c, plan, shape, source, start, inside, size, first)
        base = at.warp * RADIX
        places = [digit_of(key, number).to(i64) + base for key in keys]
        digits = [digit_of(key, number) for key in keys]
        ranks: list[Num] = []
        if shape.early:
            for place in places:
                _discard(warp_counts.atomic("add", place, 1, scope="block"))
        else:
            ranks = ranks_of(c, shape, digits, places, warp_counts)
        c.barrier()

        # A thread for each digit: what warps have becomes where they begin, and the tile's count is told.
        total = columns_of(c, at, shape, warp_counts)
        is_digit = at.thread < RADIX
        state = (c.const(number, i64) * c.size(tiles) + tile) * RADIX + at.thread
        publish = _publisher(c, plan, states, word)
        c.when(is_digit, lambda: publish(state, total.to(word), c.select(tile.eq(0), c.const(PREFIX, u32), c.const(AGGREGATE, u32))))
        local, _ = block_sums(c, at, total, shape.warps)

        def begin() -> None:
            for warp in range(shape.warps):
                place = at.thread + warp * RADIX
                warp_counts.store(place, warp_counts[place] + local)

        c.when(is_digit, begin)
        c.barrier()
        if shape.early:
            ranks = ranks_of(c, shape, digits, places, warp_counts)
        else:
            ranks = [rank + warp_counts[place].to(i64) for rank, place in zip(ranks, places, strict=True)]
        staged = c.shared(unsigned, shape.tile, align=16)
        for key, rank in zip(keys, ranks, strict=True):
            staged.store(rank, key)
        where = c.shared(word, RADIX)

        def look_back() -> None:
            before = _digits_before(c, shape, states, state, tile, word)
            c.when(tile > 0, lambda: publish(state, before + total.to(word), c.const(PREFIX, u32)))
            # Less than nothing wraps, and comes back with the place in the tile.
            where.store(at.thread, counts[at.thread + number * RADIX].to(word) + before - local.to(word))

        c.when(is_digit, look_back)
        c.barrier()
        valid = (size - start).min(shape.tile)

        def out(target: Mem, key: Num, place: Num) -> None:
            target.store(place, cooked(from_key(c, key, plan.dtype, plan.descending) if last else key, plan.dtype))

        goes: list[Num] = []
        for item in range(shape.items):
            i = at.thread + item * shape.threads
            key = staged[i]
            place = (where[digit_of(key, number)] + i.to(word)).to(i64)
            goes.append(place)
            if target is not None:
                c.when(i < valid, lambda to=target, key=key, place=place: out(to, key, place))  # type: ignore[misc]
        if plan.held is None or moved is None:
            return
        held = c.shared(plan.held, shape.tile, align=16)
        for item, rank in enumerate(ranks):
            place = start + inside + item * shape.warp_size
            held.store(rank, by_name[move.values].load(place.min(size - 1)) if move.values else place.to(plan.held))
        c.barrier()
        for item in range(shape.items):
            i = at.thread + item * shape.threads
            c.when(i < valid, lambda i=i, place=goes[item]: moved.store(place, held[i].to(moved.dtype)))  # type: ignore[misc]

    attrs: dict[str, Attr] = {"min_blocks": shape.blocks} if shape.blocks else {}
    return write_kernel(f"sort_pass{number}", shape.threads, [tiles], params, body, **attrs)


def _load_keys(c: Code, plan: SortPlan, shape: SortShape, source: Mem, start: Num, inside: Num, size: Num, first: bool) -> list[Num]:
    """The thread's keys; behind the end the largest, which stay behind all others."""
    unsigned = key_dtype(plan.dtype)

    def load(place: Num) -> Num:
        bits = raw(source.load(place))
        return to_key(c, bits, plan.dtype, plan.descending, plan.places) if first else bits

    def whole() -> list[Num]:
        return [load(start + inside + item * shape.warp_size) for item in range(shape.items)]

    def edge() -> list[Num]:
        most = c.const(-1, unsigned)
        places = [start + inside + item * shape.warp_size for item in range(shape.items)]
        return [c.select(place < size, load(place.min(size - 1)), most) for place in places]

    return c.either(start + shape.tile <= size, whole, edge)


def columns_of(c: Code, at: LaneNumbers, shape: SortShape, warp_counts: Mem) -> Num:
    """For a digit's thread: the counts of warps become the sums of those before; gives the tile's count."""

    def column() -> Num:
        running = c.const(0, u32)
        for warp in range(shape.warps):
            place = at.thread + warp * RADIX
            mine = warp_counts[place]
            warp_counts.store(place, running)
            running = running + mine
        return running

    return c.either(at.thread < RADIX, column, lambda: c.const(0, u32))[0]


def _publisher(c: Code, plan: SortPlan, states: Mem, word: DType) -> Callable[[Num, Num, Num], None]:
    def publish(place: Num, count: Num, status: Num) -> None:
        value = count | (status.to(word) << (word.bits - 2))
        c.b.multi("atomic_store", states.value, place.value, value.value, order="relaxed", scope="device")

    return publish


def _digits_before(c: Code, shape: SortShape, states: Mem, state: Num, tile: Num, word: DType) -> Num:
    """How often the thread's digit occurs in all tiles before."""

    def read(place: Num) -> Num:
        return Num(c, c.b.op("atomic_load", states.value, place.value, order="relaxed", scope="device"))

    first = state - tile * RADIX
    low = (1 << (word.bits - 2)) - 1

    def step(place: Num, total: Num, done: Num) -> list[Num]:
        words = [read((place - k * RADIX).max(first)) for k in range(shape.look)]
        going = c.const(True, bool_)
        for found in words:
            status = (found >> (word.bits - 2)).to(u32)
            going = going & status.ne(EMPTY) & ~done
            total = c.select(going, total + (found & low), total)
            place = c.select(going, place - RADIX, place)
            done = done | (going & status.eq(PREFIX))
        return [place, total, done]

    start = [state - RADIX, c.const(0, word), tile.eq(0)]
    return c.loop_while(start, lambda place, total, done: ~done, step)[1]


# -- ranks inside a tile --------------------------------------------------------------------------------------------


def ranks_of(c: Code, shape: SortShape, digits: list[Num], places: list[Num], counters: Mem) -> list[Num]:
    """For each of the thread's digits, what its counter (at `places`, one for each warp and digit) says when all digits of the warp
    before it, in order, are counted. The counters count on."""
    below = c.op("lane_mask", relation="lt", **mask_bits(shape.warp_size))
    seen = _bits_of_lanes(c, shape) if shape.rank == "or" else None
    mine = c.op("lane_mask", relation="eq", **mask_bits(shape.warp_size))
    ranks: list[Num] = []
    for digit, place in zip(digits, places, strict=True):
        if seen is not None:
            _discard(seen.atomic("or", place, mine, scope="block"))
            c.warp_sync()
            mask = seen[place]
        else:
            mask = (
                c.op("match", digit, mode="any", **mask_bits(shape.warp_size))
                if shape.rank == "match"
                else _lanes_alike(c, digit, shape.warp_size)
            )
        before = counters[place]
        rank = c.op("popcount", mask & below).to(u32)
        c.warp_sync()

        def count(place: Num = place, before: Num = before, mask: Num = mask) -> None:
            counters.store(place, before + c.op("popcount", mask).to(u32))
            if seen is not None:
                seen.store(place, 0)

        c.when(rank.eq(0), count)
        c.warp_sync()
        ranks.append((before + rank).to(i64))
    return ranks


def _lanes_alike(c: Code, digit: Num, warp_size: int) -> Num:
    """The lanes that have the same digit, by a vote on each bit."""
    found, word = None, mask_word(warp_size)
    for bit in range(8):
        mine = (digit & (1 << bit)).ne(0)
        alike = c.ballot(mine, warp_size) ^ c.select(mine, c.const(0, word), c.const(-1, word))
        found = alike if found is None else found & alike
    assert found is not None
    return found


def _bits_of_lanes(c: Code, shape: SortShape) -> Mem:
    """A word for each warp and digit, in which lanes leave their bits."""
    seen = c.shared(mask_word(shape.warp_size), shape.warps * RADIX)
    c.loop(c.thread(), shape.warps * RADIX, shape.threads, [], lambda i: seen.store(i, 0))
    c.barrier()
    return seen
