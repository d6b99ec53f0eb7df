"""Choose the tile of results that a CPU keeps in registers: rows, and vectors along a row.

In: the target, and how many rows or columns all results have, where the code knows. Out: rows and vectors, with registers left for a row of the second factor
and an element of the first. Tiles of few filters are as high as these are many: what a tile has beyond them is computed in vain.
"""

from __future__ import annotations

from tilewright.base.target import Target
from tilewright.passes.schedules.matrix import fit_registers

LINE = 64
"""Bytes of a cache line, and of the widest vectors."""
MOST_VECTORS = 6
"""Along a row: panels of columns stay short enough for the near caches."""

HIGHEST = 13
"""Rows of one tile for all filters, where a CPU has 32 registers of 64 bytes."""
MOST_ROWS = 12
"""Rows that lie apart: their addresses have room in registers."""
FEWEST_SUMS = 8
"""Vectors of sums, so that no product waits for the one before."""


def register_tile(target: Target) -> tuple[int, int]:
    """Rows and vectors for any number of either. With 32 registers of 64 bytes, 9 rows of three are 27 multiply-adds in a step of 45 instructions, where 14 of two are 28 in
    49: cores that share their units with another thread issue few."""
    if target.vector_bytes == LINE:
        return 9, 3
    return (8, 3) if fit_registers(target, 8, 3) else (6, 2)


def fitted_tile(target: Target, rows: int) -> tuple[int, int]:
    """Rows and vectors where all results have `rows` rows, and many columns: as few tiles as with the usual height, all of one height, and as many vectors as
    registers are left for. One higher tile takes less time than two."""
    height, _ = register_tile(target)
    highest = HIGHEST if target.vector_bytes == LINE and rows <= HIGHEST else height
    height = -(-rows // -(-rows // highest))
    return height, max(vectors for vectors in range(1, MOST_VECTORS + 1) if fit_registers(target, height, vectors))


def fitted_columns(target: Target, lanes: int, columns: int) -> tuple[int, int]:
    """Rows and vectors where all results have `columns` columns, and many rows: no wider than these, if a tile has room for them."""
    vectors = -(-columns // lanes)
    rows = [n for n in range(1, MOST_ROWS + 1) if fit_registers(target, n, vectors)]
    return (rows[-1], vectors) if rows and rows[-1] * vectors >= FEWEST_SUMS else register_tile(target)
