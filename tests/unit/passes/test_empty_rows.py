"""Which kernels have their masked rows defined, and which stay as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels_attention
import kernels_masked
import tilewright as tw
from tilewright.ir.nodes import Kernel, walk
from tilewright.passes.loop.empty_rows import empty_rows


@tw.kernel
def masked_softmax(x, mask):
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        most = -tw.inf
        for j in range(columns):
            most = max(most, tw.where(mask[i, j], x[i, j], -tw.inf))
        total = 0.0
        for j in range(columns):
            total += tw.exp(tw.where(mask[i, j], x[i, j], -tw.inf) - most)
        for j in range(columns):
            out[i, j] = tw.exp(tw.where(mask[i, j], x[i, j], -tw.inf) - most) / total
    return out


def loop(kernel: tw.Kernel[..., Any], *arguments: object) -> Kernel:
    return kernel.stages(*arguments, target="sm_80").stages.loop.calls[0].kernel


def defined(kernel: Kernel) -> int:
    """Maxima compared with -inf."""
    made = {result: op for op in walk(kernel.body) for result in op.results}
    maxima = {op.results[0] for op in walk(kernel.body) if op.opcode == "reduce" and op.attrs["kind"] == "max"}
    lowest = {v for v, op in made.items() if op.opcode == "const" and op.attrs["value"] == -np.inf}
    return sum(op.opcode == "eq" and any(v in maxima for v in op.operands) and any(v in lowest for v in op.operands) for op in walk(kernel.body))


HEADS = np.zeros((1, 2, 16, 8), np.float32)
ROWS = np.zeros((2, 16, 8), np.float32)
MASK = np.zeros((16, 16), bool)


@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        (kernels_masked.hidden, (ROWS, ROWS, ROWS, MASK)), (kernels_masked.left_out, (ROWS, ROWS, ROWS, MASK)),
        (kernels_masked.tiled, (ROWS, ROWS, ROWS, MASK)), (kernels_masked.earlier, (ROWS, ROWS, ROWS)),
        (kernels_attention.grouped_causal, (HEADS, HEADS, HEADS, 0.1)),
    ],
    ids=lambda x: x.python.__name__ if isinstance(x, tw.Kernel) else "",
)  # fmt: skip
def test_masked(kernel: tw.Kernel[..., Any], arguments: tuple[object, ...]) -> None:
    found = loop(kernel, *arguments)
    assert defined(found) == 1
    again = empty_rows(found)
    assert again is found  # once is enough


def test_what_masks_nothing_or_weights_nothing_stays() -> None:
    assert defined(loop(kernels_attention.plain, HEADS, HEADS, HEADS, 0.1)) == 0
    assert defined(loop(kernels_attention.biased, HEADS, HEADS, HEADS, np.zeros((2, 16, 16), np.float32))) == 0
    assert defined(loop(masked_softmax, np.zeros((4, 16), np.float32), np.zeros((4, 16), bool))) == 0
