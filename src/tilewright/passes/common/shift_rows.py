"""Rows that begin between two vectors: how far a row's tile is shifted so that its vectors lie at multiples of their size.

In: a loop-stage kernel whose reductions and sweeps walk rows, or a map whose results lie in rows. Out: where a row begins in memory, as a
form of the indices of the results, if all arrays walked beside one another begin at the same place modulo the vector (`row_start`; of a map
those that are written, `map_start`), and which accesses then lie right (`aligned_accesses`, `aligned_in_map`). What all rows share, such as
the gains of a norm, may lie anywhere: it comes from the cache.

    row of 7, vectors of 4, row 1 begins at element 7:   shift = 7 mod 4 = 3
    tile     0 1 2 3 | 4 5 6 7 | 8 9 …
    element  . . . 0 | 1 2 3 4 | 5 6 …
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tilewright.analysis.affine import Affine, Forms, address, analyse
from tilewright.base.sizes import ONE, ZERO
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.types import INDEX, Tensor, Tile


def row_start(kernel: Kernel, parallel: Op, rows: tuple[Op, ...], vector: int) -> Affine | None:
    """The element at which a row begins, less multiples of `vector`; None where arrays differ in it, or it depends on more than
    the results' indices. `rows` are the reductions and sweeps."""
    start: Affine | None = None
    for access, column, form in _walking(rows, analyse(kernel)):
        if form.factor(column) != ONE:
            return None
        if access.opcode == "load" and form.values == (column,):
            continue  # the same for all rows
        own = _rest(form, column, vector, kernel.facts)
        if not _aligned_base(access, vector) or (start is not None and not _same(own, start)):
            return None
        start = own
    if start is None or any(v not in parallel.regions[0].args for v in start.values):
        return None
    return start


def map_start(kernel: Kernel, parallel: Op, axis: int, vector: int) -> Affine | None:
    """The element at which a row of a map's results begins, less multiples of `vector`; None where results differ in it, where it depends on more than the results'
    indices, and where most of what is read along the row begins elsewhere."""
    found = list(_in_map(kernel, parallel, axis))
    stores = [(op, column, form) for op, column, form in found if op.opcode == "store"]
    if not stores or any(form.factor(column) != ONE or not _aligned_base(op, vector) for op, column, form in stores):
        return None
    start, *others = [_rest(form, column, vector, kernel.facts) for _, column, form in stores]
    if not start.values or any(v not in parallel.regions[0].args for v in start.values) or not all(_same(start, other) for other in others):
        return None
    aligned = aligned_in_map(kernel, parallel, axis, start, vector)
    return start if 2 * len(aligned) > len(found) else None


def shares_columns(kernel: Kernel, parallel: Op, axis: int) -> bool:
    """Whether a map reads something along its rows that is the same for all of them."""
    return any(op.opcode == "load" and form.values == (column,) for op, column, form in _in_map(kernel, parallel, axis))


def aligned_in_map(kernel: Kernel, parallel: Op, axis: int, start: Affine, vector: int) -> set[int]:
    """Ids of the loads and stores of a map whose vectors lie at multiples of their size once rows that begin at `start` are shifted."""
    return _aligned(kernel, _in_map(kernel, parallel, axis), start, vector)


def _in_map(kernel: Kernel, parallel: Op, axis: int) -> Iterator[tuple[Op, Value, Affine]]:
    return _moving(parallel.regions[0], parallel.regions[0].args[axis], analyse(kernel))


def read_shared(kernel: Kernel, rows: tuple[Op, ...]) -> set[Value]:
    """Arrays that are read along rows and are the same for all of them."""
    return {op.operands[0] for op, column, form in _walking(rows, analyse(kernel)) if op.opcode == "load" and form.values == (column,)}


def walked(kernel: Kernel, rows: tuple[Op, ...]) -> set[Value]:
    """Arrays that are read along rows and are not the same for all of them."""
    return {op.operands[0] for op, column, form in _walking(rows, analyse(kernel)) if op.opcode == "load" and form.values != (column,)}


def aligned_accesses(kernel: Kernel, rows: tuple[Op, ...], start: Affine, vector: int) -> set[int]:
    """Ids of the loads and stores whose vectors lie at multiples of their size once rows that begin at `start` are shifted."""
    return _aligned(kernel, _walking(rows, analyse(kernel)), start, vector)


def _aligned(kernel: Kernel, accesses: Iterator[tuple[Op, Value, Affine]], start: Affine, vector: int) -> set[int]:
    return {
        id(access) for access, column, form in accesses
        if form.factor(column) == ONE and _same(_rest(form, column, vector, kernel.facts), start) and _aligned_base(access, vector)
    }  # fmt: skip


def shift_of(b: Builder, start: Affine, env: Mapping[Value, Value], vector: int) -> Value:
    """How many elements a row's tile begins before the row; a tile of them where one of the indices is."""
    total = b.index(start.constant)
    for value, factor in start.factors:
        index = env[value]
        term = b.mul(index, b.like(b.index(factor), index))
        total = b.add(b.like(total, term), term) if isinstance(term.type, Tile) else b.add(total, b.like(term, total))
    return b.op("and", total, b.like(b.index(vector - 1), total))


def _walking(rows: tuple[Op, ...], forms: Forms) -> Iterator[tuple[Op, Value, Affine]]:
    """Accesses that move with a row's index, that index, and their addresses."""
    for row in rows:
        yield from _moving(row.regions[0], row.regions[0].args[-1], forms)


def _moving(region: Block, column: Value, forms: Forms) -> Iterator[tuple[Op, Value, Affine]]:
    for op in walk(region):
        if op.opcode in ("load", "store") and all(v.type == INDEX and v in forms for v in _indices(op)):
            form = address(op, forms)
            if form.factor(column) != ZERO:
                yield op, column, form


def _indices(op: Op) -> tuple[Value, ...]:
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    return op.operands[1 : 1 + memory.rank]


def _rest(form: Affine, column: Value, vector: int, facts: Mapping[str, int]) -> Affine:
    """An address without the row's own index and without multiples of the vector."""
    factors = tuple((v, f) for v, f in form.factors if v is not column and not f.divisible_by(vector, facts))
    return Affine(factors, ZERO if form.constant.divisible_by(vector, facts) else form.constant)


def _same(a: Affine, b: Affine) -> bool:
    return set(a.factors) == set(b.factors) and a.constant == b.constant


def _aligned_base(op: Op, vector: int) -> bool:
    """Whether the array itself lies at a multiple of a vector, or of the widest access there is."""
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    return memory.space == "global" and memory.align >= min(16, vector * memory.dtype.itemsize)
