"""Decoupled look-back: how the blocks of one launch learn what all blocks before them have, in a single pass over the data.

Every block takes the number of its tile from a counter, so that all tiles before it belong to blocks that run or are done. It
publishes what its tile amounts to (its *aggregate*), then looks at the tiles before it, one for each lane of some warps at once, until one
knows its *prefix* (everything up to and including it); then it publishes its own prefix.

A published number of up to 32 bits is one 64-bit word, with the status in the upper half, so that both arrive at once. A number
of 64 bits is two such words, and a state of several numbers has the words of all of them; a reader waits until all have the same status. A count
is a word with its status in the upper two bits. No fence is needed: nothing but the words themselves is handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.dtypes import DType, bool_, i64, u8, u16, u32, u64
from tilewright.base.sizes import Size
from tilewright.ir.program import ProgramArray
from tilewright.primitives.code import Code, Mem, Num, mask_word
from tilewright.primitives.parts import LaneNumbers, scratch

EMPTY, AGGREGATE, PREFIX = 0, 1, 2
_FIRST = 2
"""Where the states begin: pairs of words share 16 bytes."""
_WORDS = {8: u8, 16: u16, 32: u32, 64: u64}


Numbers = Sequence[Num]
Joined = Callable[[Numbers, Numbers], list[Num]]


def words_of(*dtypes: DType) -> int:
    """Words that published numbers take."""
    return sum(2 if d.bits == 64 else 1 for d in dtypes)


def states_array(tiles: Size, words: int = 1) -> ProgramArray:
    """The states of that many tiles, each of so many words, and before them the counter of tiles. All zero at first."""
    return scratch("states", u64, tiles * words + _FIRST)


def ticket(c: Code, states: Mem, thread: Num) -> Num:
    """The number of this block's tile: blocks get them in the order in which they begin."""
    place = c.shared(u64, 1)
    c.when(thread.eq(0), lambda: place.store(0, states.atomic("add", 0, 1)))
    c.barrier()
    return place[0].bits(i64)


def _publish(c: Code, states: Mem, tile: Num, state: Numbers, status: int) -> None:
    words = words_of(*(v.dtype for v in state))
    place = tile * words if words > 1 else tile
    mark = c.const(status << 32, u64)
    for value in state:
        bits = value.to(u8).to(u64) if value.dtype is bool_ else value.bits(_WORDS[value.dtype.bits]).to(u64)
        if words_of(value.dtype) == 1:
            _store(states, place, bits | mark)
        else:
            for half in (0, 1):
                _store(states, place + half, ((bits >> (32 * half)) & 0xFFFFFFFF) | mark)
        place = place + words_of(value.dtype)


def _store(states: Mem, index: Num, word: Num) -> None:
    c = states.code
    c.b.multi("atomic_store", states.value, c.index(index + _FIRST).value, word.value, order="relaxed", scope="device")


def _load(states: Mem, index: Num) -> Num:
    c = states.code
    return Num(c, c.b.op("atomic_load", states.value, c.index(index + _FIRST).value, order="relaxed", scope="device"))


def _read(c: Code, states: Mem, tile: Num, dtypes: Sequence[DType]) -> tuple[Num, list[Num]]:
    """The status of a tile and its state."""
    words = words_of(*dtypes)
    place = tile * words if words > 1 else tile
    loaded = [_load(states, place + k if k else place) for k in range(words)]
    marks = [(word >> 32).to(u32) for word in loaded]
    status = marks[0]
    for other in marks[1:]:
        status = c.select(status.eq(other), status, EMPTY)
    values = []
    for dtype in dtypes:
        low = loaded.pop(0)
        if words_of(dtype) == 2:
            values.append(((loaded.pop(0) << 32) | (low & 0xFFFFFFFF)).bits(dtype))
        else:
            bits = low.to(u32)
            values.append(bits.ne(0) if dtype is bool_ else bits.to(_WORDS[dtype.bits]).bits(dtype))
    return status, values


def _walk(
    c: Code, tile: Num, at: LaneNumbers, warps: int, dtypes: Sequence[DType], combine: Joined, read: Callable[[Num], tuple[Num, list[Num]]]
) -> list[Num]:
    """What all tiles before `tile` (not the first) amount to; called by the whole block, of which `warps` warps look at a tile for each lane."""
    lane = at.lane.to(u32)
    found, known = [c.shared(d, warps) for d in dtypes], c.shared(mask_word(at.warp_size), warps)

    def chosen(cond: Num, first: Numbers, second: Numbers) -> list[Num]:
        return [c.select(cond, a, b) for a, b in zip(first, second, strict=True)]

    def window(mine: Num) -> None:
        inside = mine >= 0

        def again(*_: Num) -> list[Num]:
            status, value = read(mine.max(0))
            return [c.select(inside, status, AGGREGATE), *value]

        status, *value = c.loop_while(again(), lambda status, *value: c.any(status.eq(EMPTY)), again)
        knowing = c.ballot(status.eq(PREFIX), at.warp_size)
        last = c.select(knowing.eq(0), c.const(at.warp_size - 1, u32), c.op("ctz", knowing).to(u32))
        for step in at.distances:
            other = [c.shuffle(v, step, "down") for v in value]
            value = chosen(lane + step <= last, combine(other, value), value)

        def tell() -> None:
            for memory, number in zip(found, value, strict=True):
                memory.store(at.warp, number)
            known.store(at.warp, knowing)

        c.when(lane.eq(0), tell)

    def turn(base: Num, is_first: Num, done: Num, *before: Num) -> list[Num]:
        c.when(at.warp < warps, lambda: window(base - at.warp * at.warp_size - at.lane))
        c.barrier()
        total: list[Num] = list(before)
        has, over = ~is_first, c.const(False, bool_)
        for warp in range(warps):
            value = [memory[warp] for memory in found]
            joined = chosen(has, combine(value, total), value)
            total = chosen(over, total, joined)
            has = c.const(True, bool_)
            over = over | known[warp].ne(0)
        c.barrier()
        return [base - at.warp_size * warps, c.const(False, bool_), over, *total]

    start = [tile - 1, c.const(True, bool_), c.const(False, bool_), *(c.const(0, d) for d in dtypes)]
    return c.loop_while(start, lambda base, is_first, done, *before: ~done, turn)[3:]


def exclusive_prefix(
    c: Code, states: Mem, tile: Num, at: LaneNumbers, warps: int, aggregate: Numbers, join: Joined, init: Numbers | None
) -> list[Num]:
    """What all tiles before this one amount to, with `init` before them; for the first tile `init`, else anything. For a whole block,
    whose first `warps` warps look back."""
    dtypes = [v.dtype for v in aggregate]

    def first() -> list[Num]:
        whole = list(aggregate) if init is None else join(init, aggregate)
        c.when(at.thread.eq(0), lambda: _publish(c, states, tile, whole, PREFIX))
        return list(aggregate) if init is None else list(init)

    def later() -> list[Num]:
        c.when(at.thread.eq(0), lambda: _publish(c, states, tile, aggregate, AGGREGATE))
        before = _walk(c, tile, at, warps, dtypes, join, lambda i: _read(c, states, i, dtypes))
        c.when(at.thread.eq(0), lambda: _publish(c, states, tile, join(before, aggregate), PREFIX))
        return before

    return c.either(tile.eq(0), first, later)


def count_before(c: Code, states: Mem, tile: Num, at: LaneNumbers, warps: int, count: Num) -> Num:
    """How many all tiles before this one have counted; for a whole block. Counts have 62 bits."""

    def publish(value: Num, status: int) -> None:
        c.when(at.thread.eq(0), lambda: _store(states, tile, value.bits(u64) | c.const(status << 62, u64)))

    def first() -> Num:
        publish(count, PREFIX)
        return c.const(0, i64)

    def read(index: Num) -> tuple[Num, list[Num]]:
        word = _load(states, index)
        return (word >> 62).to(u32), [(word & ((1 << 62) - 1)).bits(i64)]

    def later() -> Num:
        publish(count, AGGREGATE)
        (before,) = _walk(c, tile, at, warps, [i64], lambda a, b: [a[0] + b[0]], read)
        publish(before + count, PREFIX)
        return before

    return c.either(tile.eq(0), first, later)[0]
