"""Indices in 32 bits and accesses along one axis: what the code of explicit kernels computes with, and that it computes the same."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from simt_constructs import CASES, check
from tilewright.base.target import parse_target
from tilewright.compile.simt import addressed, prepare_simt
from tilewright.execute.simt.arguments import read_leaves, split_values
from tilewright.execute.simt.host import launch_sizes
from tilewright.execute.simt.run import Facts
from tilewright.ir.emulator import run_kernel
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.text import print_kernel
from tilewright.ir.types import Tensor, dtype_of

TARGET = parse_target("sm_90a")


def last_stage(configured: tw.api.simt.ConfiguredKernel, given: list[object]) -> tuple[Kernel, dict[str, int], dict[str, object]]:
    """The kernel as code is made of it, the sizes of the launch, and the arguments by name."""
    kernel, config = configured.kernel, configured.config
    leaves, args = read_leaves(kernel.parameters, split_values(kernel.parameters, given), True)
    built = kernel.runner.built(args, config, facts=Facts.of(leaves, config))
    done = addressed(prepare_simt(built.program, TARGET), TARGET).calls[0].kernel
    arrays = {leaf.name: leaf.value for leaf in leaves}
    found = {name: a for name, a in arrays.items() if isinstance(a, np.ndarray)}
    strides = {name: tuple(s // a.itemsize for s in a.strides) for name, a in found.items()}
    sizes = built.program.sizes({name: a.shape for name, a in found.items()}, strides)
    return done, sizes | launch_sizes(config), arrays


@pytest.mark.parametrize("name", CASES)
def test_same_results(name: str) -> None:
    kernel, launch, arguments, _ = CASES[name]
    given = arguments()
    done, sizes, values = last_stage(kernel[launch], given)
    passed = []
    for param in done.params:
        value = values[param.name]
        if isinstance(param.type, Tensor) and isinstance(value, np.ndarray):
            value = value.reshape(tuple(s.evaluate(sizes) for s in param.type.shape))
            assert np.may_share_memory(value, values[param.name])
        passed.append(value)
    run_kernel(done, passed, sizes)
    check(name, given)


@tw.gpu
def neighbours(x: tw.Array, y: tw.Array):
    row, column = tw.grid.y, tw.grid.x
    if 0 < row < x.shape[0] - 1 and 0 < column < x.shape[1] - 1:
        y[row, column] = x[row - 1, column] + x[row + 1, column] + x[row, column - 1] + x[row, column + 1]


def stage_of(*shapes: tuple[int, int], grid: tuple[int, int] = (2, 2)) -> str:
    given: list[object] = [np.empty(shape, np.float32) for shape in shapes]
    return print_kernel(last_stage(neighbours[grid, (16, 16)], given)[0])


def test_neighbours_share_their_address() -> None:
    text = stage_of((32, 32), (32, 32))
    assert text.count(" mul ") == 3, text  # one of the block along each axis, one of the row
    assert "y$" not in text


def test_arrays_of_other_shapes_have_their_own_sizes() -> None:
    assert "y$1" in stage_of((32, 32), (32, 40))


def test_comparisons_are_narrow_only_where_sizes_are() -> None:
    done, _, _ = last_stage(neighbours[(2, 2), (16, 16)], [np.empty((32, 32), np.float32)] * 2)
    assert all(dtype_of(op.operands[0].type).bits <= 32 for op in walk(done.body) if op.opcode in ("lt", "le", "gt", "ge"))
    done, _, _ = last_stage(neighbours[(1 << 28, 2), (16, 16)], [np.empty((32, 32), np.float32)] * 2)
    assert all(dtype_of(op.operands[0].type).bits == 64 for op in walk(done.body) if op.opcode in ("lt", "le", "gt", "ge"))


def test_facts() -> None:
    config = neighbours[(2, 2), (16, 16)].config
    huge = np.broadcast_to(np.float32(0), (1 << 31, 1))

    def of(*arrays: np.ndarray) -> Facts:
        leaves, _ = read_leaves(neighbours.parameters, split_values(neighbours.parameters, arrays), True)
        return Facts.of(leaves, config)

    assert of(np.zeros((2, 3)), np.zeros((2, 3))) == Facts(True, (("y", "x"),))
    assert of(np.zeros((2, 3)), np.zeros((3, 2))) == Facts(True)
    assert not of(np.zeros((2, 3)), huge).small
