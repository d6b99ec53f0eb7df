"""Sorting the rows of a matrix on a GPU, each within one block: a radix sort in registers and shared memory, in one walk over the data.

In: what is sorted (`sort.SortPlan`), the length of rows and how many a block takes. Out: a program `keys[rows, columns], values? ->
sorted, moved?`. A block that has several rows sorts all their elements together, and by the number of their row at last.
"""

from __future__ import annotations

from tilewright.base.dtypes import i64, u16, u32
from tilewright.base.record import record
from tilewright.base.sizes import Size, ceildiv
from tilewright.base.target import Target
from tilewright.ir.program import Program, ProgramArray
from tilewright.ir.types import tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.keys import cooked, from_key, key_dtype, raw, to_key
from tilewright.primitives.parts import LaneNumbers, call, lanes
from tilewright.primitives.sort import RADIX, SortPlan, SortShape, block_sums, columns_of, digit_of, ranks_of

_ROWS, _COLUMNS = Size.of("rows"), Size.of("columns")
LONGEST = 4096
"""Elements of the longest row that is sorted so."""
_MOST_ROWS = 255


@record
class RowShape:
    """A block's tile, and how many rows it holds."""

    tile: SortShape
    rows: int


def row_shape(plan: SortPlan, columns: int, target: Target) -> RowShape:
    """How rows of that length are sorted."""
    wide = plan.dtype.itemsize > 4
    items = next((k for k in (4, 8, 16) if 256 * k >= columns), 16)
    if 512 < columns <= 1024 and wide:
        items = 8
    tile = SortShape(256, items, target.warp_size)
    return RowShape(tile, max(1, min(_MOST_ROWS, tile.tile // columns)))


def rows_program(plan: SortPlan, shape: RowShape) -> Program:
    tile, several = shape.tile, shape.rows > 1
    assert tile.threads >= RADIX, "there is a thread for each digit"
    unsigned = key_dtype(plan.dtype)
    arrays = {"keys": plan.dtype}
    if not plan.places:
        arrays["sorted"] = plan.dtype
    if plan.payload is not None:
        arrays |= {"moved": plan.payload} if plan.places else {"values": plan.payload, "moved": plan.payload}
    carries = several or plan.payload is not None

    def body(c: Code, *memory: Mem) -> None:
        by_name = dict(zip(arrays, memory, strict=True))
        keys_in = by_name["keys"]
        at, columns = lanes(c, tile.warp_size), c.size(_COLUMNS)
        first_row = c.block() * shape.rows
        valid = ((c.size(_ROWS) - first_row).min(shape.rows)) * columns
        base = first_row * columns
        inside = at.warp * (tile.warp_size * tile.items) + at.lane
        counters = c.shared(u32, tile.warps * RADIX)
        staged = c.shared(unsigned, tile.tile, align=16)
        staged_places = c.shared(u16, tile.tile, align=16) if carries else None
        keys: list[Num] = []
        places: list[Num] = []
        most = c.const(-1, unsigned)
        for item in range(tile.items):
            here = inside + item * tile.warp_size
            there = here < valid
            bits = raw(keys_in.load(base + here.min(valid - 1)))
            keys.append(c.select(there, to_key(c, bits, plan.dtype, plan.descending, plan.places), most))
            places.append(here.to(u16))
        for number in range(plan.passes + several):
            is_row = number == plan.passes
            if is_row:
                digits = [c.select(p.to(i64) < valid, p.to(i64) // columns, _MOST_ROWS).to(u32) for p in places]
            else:
                digits = [digit_of(key, number) for key in keys]
            ranks = _tile_ranks(c, at, tile, digits, counters)
            for item, rank in enumerate(ranks):
                staged.store(rank, keys[item])
                if staged_places is not None:
                    staged_places.store(rank, places[item])
            c.barrier()
            keys = [staged[inside + item * tile.warp_size] for item in range(tile.items)]
            if staged_places is not None:
                places = [staged_places[inside + item * tile.warp_size] for item in range(tile.items)]
            c.barrier()

        def put(item: int) -> None:
            here = inside + item * tile.warp_size
            if "sorted" in by_name:
                by_name["sorted"].store(base + here, cooked(from_key(c, keys[item], plan.dtype, plan.descending), plan.dtype))
            if plan.payload is None:
                return
            was = places[item].to(i64)
            by_name["moved"].store(base + here, by_name["values"].load(base + was) if "values" in by_name else (was % columns).to(plan.payload))

        for item in range(tile.items):
            c.when(inside + item * tile.warp_size < valid, lambda item=item: put(item))  # type: ignore[misc]

    params = [(name, tensor(dtype, _ROWS * _COLUMNS)) for name, dtype in arrays.items()]
    kernel = write_kernel("sort_rows", tile.threads, [ceildiv(_ROWS, shape.rows)], params, body)
    roles = {name: "input" if name in ("keys", "values") else "output" for name in arrays}
    whole = [ProgramArray(name, tensor(dtype, _ROWS, _COLUMNS), roles[name]) for name, dtype in arrays.items()]
    inputs, outputs = (tuple(a for a in whole if a.role == role) for role in ("input", "output"))
    return Program("sort_rows", inputs, outputs, (), (call(kernel),))


def _tile_ranks(c: Code, at: LaneNumbers, tile: SortShape, digits: list[Num], counters: Mem) -> list[Num]:
    """Where each element goes when the tile is sorted by these digits."""
    c.loop(at.thread, tile.warps * RADIX, tile.threads, [], lambda i: counters.store(i, 0))
    c.barrier()
    places = [digit.to(i64) + at.warp * RADIX for digit in digits]
    ranks = ranks_of(c, tile, digits, places, counters)
    c.barrier()
    total = columns_of(c, at, tile, counters)
    before, _ = block_sums(c, at, total, tile.warps)

    def begin() -> None:
        for warp in range(tile.warps):
            place = at.thread + warp * RADIX
            counters.store(place, counters[place] + before)

    c.when(at.thread < RADIX, begin)
    c.barrier()
    return [(rank + counters[place].to(i64)) for rank, place in zip(ranks, places, strict=True)]
