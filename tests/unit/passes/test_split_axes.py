"""Axes that loops walk in blocks: which are cut, and that the values stay."""

from __future__ import annotations

import numpy as np
import pytest

from support import array, loop_kernel
from tilewright.base.dtypes import f32, i64
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import Kernel, Value
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor
from tilewright.ir.verify import verify_kernel
from tilewright.passes.loop.split_axes import split_axes


def heads(block: int, width: int, offset: int, extent: int = 96) -> Kernel:
    """out[i, h, d] = x[i, block * h + d + offset], with `width` elements for each h."""
    x, out = array("x", f32, "n", extent), array("out", f32, "n", 3, width)

    def body(b: Builder, i: Value, h: Value, d: Value) -> None:
        place = b.add(b.add(b.mul(h, b.index(block)), d), b.index(offset))
        b.multi("store", out, i, h, d, b.op("load", x, i, place))

    return loop_kernel("heads", [x, out], ["n", 3, width], body)


def run(kernel: Kernel, x: np.ndarray) -> np.ndarray:
    types = {p.name: p.type for p in kernel.params}
    made = types["out"]
    assert isinstance(made, Tensor)
    given = array("x", f32, "n", x.shape[1]).type
    assert isinstance(given, Tensor)
    program = Program(
        "heads", (ProgramArray("x", given, "input"),), (ProgramArray("out", made, "output"),), (), (KernelCall(kernel, ("x", "out")),)
    )
    return run_program(program, {"x": x})["out"]


def shape_of(kernel: Kernel) -> str:
    return str(kernel.params[0].type)


def test_blocks_become_an_axis() -> None:
    kernel = split_axes(heads(32, 32, 0))
    verify_kernel(kernel)
    assert "[n, 3, 32], [96, 32, 1]" in shape_of(kernel)
    x = np.arange(5 * 96, dtype=np.float32).reshape(5, 96)
    np.testing.assert_array_equal(run(kernel, x), x.reshape(5, 3, 32))


def test_offsets_are_whole_blocks() -> None:
    kernel = split_axes(heads(16, 16, 48))
    assert "[n, 6, 16], [96, 16, 1]" in shape_of(kernel)
    x = np.arange(2 * 96, dtype=np.float32).reshape(2, 96)
    np.testing.assert_array_equal(run(kernel, x), x[:, 48:].reshape(2, 3, 16))


def test_offsets_inside_a_block_make_smaller_ones() -> None:
    """Sixteen elements from the middle of a block of 32: the index crosses no border of blocks of 16."""
    kernel = split_axes(heads(32, 16, 16))
    assert "[n, 6, 16], [96, 16, 1]" in shape_of(kernel)
    x = np.arange(2 * 96, dtype=np.float32).reshape(2, 96)
    np.testing.assert_array_equal(run(kernel, x), x.reshape(2, 3, 2, 16)[:, :, 1])


@pytest.mark.parametrize(
    ("block", "width", "offset"),
    [(16, 32, 0), (32, 32, 8), (2, 2, 0), (1, 32, 0)],
    ids=["overlapping", "across a border", "windows", "one apart"],
)
def test_others_stay(block: int, width: int, offset: int) -> None:
    kernel = heads(block, width, offset, 160)
    assert split_axes(kernel) is kernel


def test_indices_that_are_loaded_stay() -> None:
    x, at, out = array("x", f32, "n", 96), array("at", i64, "n"), array("out", f32, "n", 3)

    def body(b: Builder, i: Value, h: Value) -> None:
        place = b.add(b.mul(h, b.index(32)), b.op("load", at, i))
        b.multi("store", out, i, h, b.op("load", x, i, place))

    kernel = loop_kernel("gather", [x, at, out], ["n", 3], body)
    assert split_axes(kernel) is kernel
