"""How blocks of products are shared out to cores: whole rounds, few copies, whatever the number of cores."""

from __future__ import annotations

import random

import pytest

from tilewright.base.sizes import Size, ceildiv
from tilewright.passes.to_tile.panels.shares import blocks_across, blocks_down, multiple_down

CORES = (1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 64)


def draws(seed: int) -> list[tuple[int, int, int]]:
    """Rows, columns, and batches."""
    made = random.Random(seed)
    return [(int(2 ** made.uniform(0, 13)), int(2 ** made.uniform(0, 13)), made.randint(1, 40)) for _ in range(300)]


@pytest.mark.parametrize("cores", CORES)
def test_blocks_are_whole_rounds(cores: int) -> None:
    for rows, columns, _ in draws(1):
        needed, high = -(-columns // 672), -(-rows // 1750)
        across = blocks_across(Size.of(rows), Size.of(columns), Size.of(needed), 64, cores).constant
        assert across is not None and across >= needed
        down = multiple_down(Size.of(high), Size.of(across), cores).constant
        assert down is not None and down >= high and (across * down) % cores == 0
        assert across in (1, needed) or columns >= 64 * across or across < needed * cores, "narrow blocks only where they must be"


@pytest.mark.parametrize("cores", CORES)
def test_blocks_copy_no_more_than_those_of_one_side(cores: int) -> None:
    """Rows are copied for all that lie side by side, and columns for all that lie one above another."""
    for rows, columns, _ in draws(2):
        if rows < 64 * cores or columns < 64 * cores or columns > 672 or rows > 1750:
            continue
        across = blocks_across(Size.of(rows), Size.of(columns), Size.of(1), 64, cores).constant
        assert across is not None
        copies = {count: count * rows + cores // count * columns for count in range(1, cores + 1) if cores % count == 0}
        assert copies[across] == min(copies.values())


@pytest.mark.parametrize("cores", CORES)
def test_few_cores_wait_in_the_last_round(cores: int) -> None:
    for _, _, batch in draws(3):
        down = blocks_down(Size.of(1), Size.of(batch), cores).constant
        assert down is not None and down >= 1
        rounds = -(-batch * down // cores)
        assert batch * down >= 0.75 * rounds * cores, (batch, down)


def test_sizes_that_are_not_known_give_the_same() -> None:
    rows, columns = Size.of("m"), Size.of("n")
    across = blocks_across(rows, columns, ceildiv(columns, Size.of(672)), 64, 8)
    down = blocks_down(ceildiv(rows, Size.of(1750)), across, 8)
    for m, n, _ in draws(4):
        side = blocks_across(Size.of(m), Size.of(n), Size.of(-(-n // 672)), 64, 8)
        assert across.evaluate({"m": m, "n": n}) == side.constant
        assert down.evaluate({"m": m, "n": n}) == blocks_down(Size.of(-(-m // 1750)), side, 8).constant
