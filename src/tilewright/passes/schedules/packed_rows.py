"""Schedules of products with packed weights and rounded activations on a CPU: `y[m, n] = sum_k w[n, k] * x[m, k]`. Data only.

A block has some rows of weights. It takes `n` of them at a time, so that what it loads of the activations serves all, and `m` rows of activations, so that
weights are unpacked once for all of those. How one is chosen is in `passes/choose/cpu/packed_rows.py`.
"""

from __future__ import annotations

from typing import ClassVar

from tilewright.base.record import record
from tilewright.passes.schedules.loops import Schedule


@record
class PackedRows(Schedule):
    """Along the parallel index `n_index` rows of weights, along `m_index` rows of activations (-1: there is one)."""

    to_tile: ClassVar[str] = "lower_packed_rows"

    n_index: int = 0
    m_index: int = -1
    n: int = 4
    """Rows of weights that are multiplied together."""
    m: int = 1
    """Rows of activations that are multiplied together."""
    block_rows: int = 16
    """Rows of weights that a block has."""
