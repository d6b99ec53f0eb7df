"""What a text repeats in two loops over a row, `exp(x[i, j] - most)` say, is computed once where the row stays in registers."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.ir.nodes import walk


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        most = -tw.inf
        for j in range(columns):
            most = max(most, x[i, j])
        total = 0.0
        for j in range(columns):
            total += tw.exp(x[i, j] - most)
        for j in range(columns):
            out[i, j] = tw.exp(x[i, j] - most) / total
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(4096, 2048), (512, 50257)])
def test_one_exponential_for_an_element(shape: tuple[int, int], dtype: type[np.floating]) -> None:
    stages = softmax.stages(np.empty(shape, dtype), target="sm_90a").stages
    (loop,), (tile,) = stages.loop.calls, stages.tile.calls
    counts = [[sum(op.opcode == name for op in walk(call.kernel.body)) for name in ("exp", "load")] for call in (loop, tile)]
    assert counts == [[2, 3], [1, 1]]


def test_a_row_too_long_for_registers_is_read_again() -> None:
    """Then what was computed would have to be kept in memory, and computing it again is cheaper."""
    stages = softmax.stages(np.empty((8, 1 << 20), np.float32), target="sm_90a").stages
    loads = [sum(op.opcode == "load" for op in walk(call.kernel.body)) for call in stages.tile.calls]
    assert sum(loads) > 1
