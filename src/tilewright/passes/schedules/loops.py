"""Schedules of loop nests: how one is cut into blocks, tiles and threads. Data only.

How one is chosen is in `passes/choose/loops.py`, and for overlapping windows in `passes/choose/windows.py`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import ClassVar

from tilewright.base.record import record


@record
class Schedule:
    """One choice. Axes are numbered by the nest's parallel indices; `reduce_axis` is the reduced one, if tiled."""

    tiles: tuple[int, ...]
    """Elements of one block along each parallel index (1: the index is a scalar of the block)."""
    reduce_tile: int = 1
    """Elements of one step along the innermost reduction index; 1 means a serial loop."""
    vector: int = 1
    """Elements one thread accesses at once, along the vector axis (on a CPU the whole tile: a vector of several registers)."""
    vector_on_reduction: bool = False
    """Whether the vector axis is the reduction's."""
    vector_index: int = -1
    """Which parallel index is the vector axis, when it is not the reduction's; -1 for none."""
    threads: int = 1
    across: int = 1
    """Lanes along the other tiled index, where loads walk memory along that one: both loads and stores then use whole sectors."""
    turned: str = ""
    """GPU: values are read along one of two tiled indices and results written along the other, and between the two values are in shared memory. `vectors`: lines of whole
    vectors are read along the vector index (`lower_turned`). `elements`: rows begin anywhere, and the vector index is the results' (`turned_loads`)."""
    window: bool = False
    """GPU: results read overlapping windows, and each thread has several of them to share what it loads (`lower_windows`)."""
    along: int = -1
    """With `window`: the parallel index along which a thread has all results of the tile, besides its vector; -1 for none."""
    written: int = 0
    """With `window`: so many terms of a sum are written out at most; the indices before them are loops."""
    masked: bool = False
    """With `window`: there is one code for all blocks, in which results beyond the end of `along` are masked."""
    row_lanes: int = 0
    """GPU: lanes along the reduction where rows have lengths of their own (`ragged_rows`); the others are at other rows, and so are warps."""
    chunk: int = 1
    """CPU: elements of one block along the vector axis, walked in steps of the tile."""
    repeat: bool = False
    """CPU: what is left of a row is done by a vector that ends where it does, computing a few elements twice."""
    whole: bool = False
    """GPU: a step along the reduction holds all of it, so that a row is read once and stays in registers."""
    cluster: int = 1
    """GPU: blocks that share a row, meeting in each other's shared memory."""
    shifted: bool = False
    """GPU: a row's tile, or its first one, begins before the row, where vectors lie at multiples of their size (`shift_rows`)."""
    together: int = 1
    """GPU, with `shifted`, of rows that are walked once: steps that follow one another, so that what they load is on its way together."""
    flat: bool = False
    """GPU, with `whole`: rows of several axes are walked by one index (`flatten_rows`)."""
    scan: bool = False
    """GPU: the nest's loop is a scan, and the threads of a block walk it together, in steps of the reduction's tile (`scan_rows`)."""
    resident: int = 0
    """GPU: blocks that are to find room on a multiprocessor at once; 0 leaves it to the assembler how many registers a thread has."""
    rows_in_turn: int = 0
    """GPU: with reductions over several axes, threads keep their sums through all of them, and read so many rows at a time (`rows_in_turn`)."""
    row_axis: int = -1
    rows_per_block: int = 1
    """CPU: a block does `rows_per_block` neighbours along the parallel index `row_axis`, one after the other; short rows are not worth a block
    each."""
    short_rows: int = 0
    """CPU: with `vector_on_reduction`, sums up to this length lie beside each other in vectors, which is found out as the kernel runs. A block has several rows."""
    row_group: int = 0
    """CPU: rows that a reduction across them adds at a time to the sums of its block, which lie in the result (`column_sums`)."""
    rows_inside: bool = False
    """CPU: these rows are the inner loop, a vector of results at a time: what is the same for all of them is loaded once."""
    short: bool = False
    """CPU: sums are short, and written out."""
    block_search: int = 0
    """CPU: argmin/argmax look for the extreme value in runs of this many elements and for its place only when it wins."""

    to_tile: ClassVar[str] = "lower_loops"
    """The pass that lowers the loop stage."""

    @property
    def to_thread(self) -> str:
        """The pass that lowers the tile stage."""
        return "lower_windows" if self.window else "lower_turned" if self.turned == "vectors" else "lower_tiles"

    @property
    def across_rows(self) -> bool:
        """Whether sums cross rows, in steps of several, with lanes along the results."""
        return self.reduce_tile > 1 and not (self.vector_on_reduction or self.row_lanes or self.window)

    @property
    def row_step(self) -> int:
        """Elements of a row that the threads hold with one vector each."""
        return self.vector * self.threads * self.cluster // (self.tiles[-1] if self.tiles else 1)

    def describe(self) -> str:
        flags = ("whole", "shifted", "flat", "scan")
        return ", ".join(f"{k}={v}" for k, v in asdict(self).items() if v not in (1, -1, 0, False, (), "") or (k in flags and v))
