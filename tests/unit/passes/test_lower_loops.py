"""Loop stage to tile stage: what a block computes, and that its edges are right."""

from __future__ import annotations

import numpy as np
import pytest

from support import (
    add_2d,
    array,
    assert_close,
    data,
    loop_kernel,
    program,
    reduce_2d,
    reduce_all,
    run_cpu,
    run_stages,
    scale_2d,
    stages_of,
)
from tilewright.base.dtypes import f32, i64
from tilewright.base.errors import UserError
from tilewright.base.sizes import Size
from tilewright.base.target import parse_target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Stage, Value, walk
from tilewright.ir.types import Tile
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.to_tile.lower_loops import lower_loops

RNG = np.random.default_rng(5)


def tile_ops(kernel: Kernel, target: str = "sm_90a", **hints: int) -> list[Op]:
    stages = stages_of(kernel, target, **hints)
    assert stages.tile.calls[0].kernel.stage is Stage.TILE
    return [op for call in stages.tile.calls for op in walk(call.kernel.body)]


def masked(ops: list[Op]) -> list[Op]:
    return [op for op in ops if op.attrs.get("masked")]


def test_a_gpu_block_has_a_masked_twin() -> None:
    ops = tile_ops(add_2d(), rows=100, cols=100)
    assert len([op for op in ops if op.opcode == "if"]) == 1
    assert len(masked(ops)) == 3
    assert len([op for op in ops if op.opcode in ("load", "store")]) == 6


def test_divisible_sizes_need_no_twin() -> None:
    ops = tile_ops(add_2d(facts={"rows": 64, "cols": 64}), rows=6400, cols=6400)
    assert not masked(ops)
    assert not [op for op in ops if op.opcode == "if"]


def test_a_cpu_block_walks_tiles_and_single_elements() -> None:
    ops = tile_ops(add_2d(), "cpu", rows=100, cols=100)
    assert not masked(ops)
    loads = [op for op in ops if op.opcode == "load"]
    assert any(isinstance(op.result.type, Tile) for op in loads)
    assert any(not isinstance(op.result.type, Tile) for op in loads)


def test_what_does_not_vary_along_an_axis_is_loaded_once() -> None:
    """The row of `v` is a tile with one extent of 1, not repeated for every row of the block."""
    ops = tile_ops(scale_2d(), rows=1024, cols=64)
    shapes = {op.result.type.shape for op in ops if op.opcode == "load" and isinstance(op.result.type, Tile)}
    assert any(1 in shape for shape in shapes)
    assert any(1 not in shape for shape in shapes)


@pytest.mark.parametrize("shape", [(1, 1), (1, 129), (31, 33), (65, 3), (3, 1025), (0, 7), (7, 0)])
@pytest.mark.parametrize("kind", ["add", "max", "argmax"])
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_at_awkward_shapes(shape: tuple[int, int], kind: str, axis: int) -> None:
    if kind == "argmax" and shape[axis] == 0:
        pytest.skip("no largest of nothing")
    x = data(RNG, shape, f32)
    with np.errstate(all="ignore"):
        want = {
            "add": lambda: x.astype(float).sum(axis), "max": lambda: x.max(axis, initial=-np.inf), "argmax": lambda: x.argmax(axis),
        }[kind]()  # fmt: skip
    whole = program(reduce_2d(kind, axis))
    results = {**run_stages(whole, {"x": x}), "native": run_cpu(whole, {"x": x})}
    for stage, outputs in results.items():
        assert_close(outputs["o"], want, i64 if kind == "argmax" else f32, 16, np.abs(x).sum(axis) if kind == "add" else None, stage)


@pytest.mark.parametrize("shape", [(2, 3, 5), (3, 70, 9), (1, 1, 200)])
def test_a_reduction_over_two_indices_counts_each_term_once(shape: tuple[int, int, int]) -> None:
    x, o = array("x", f32, "a", "b", "c", align=16), array("o", f32, "b")

    def body(b: Builder, j: Value) -> None:
        extents = [b.index(Size.of("a")), b.index(Size.of("c"))]
        b.multi("store", o, j, b.reduce("add", extents, lambda inner, i, k: [inner.op("load", x, i, j, k)])[0])

    whole = program(loop_kernel("middle", [x, o], ["b"], body))
    values = data(RNG, shape, f32)
    results = {**run_stages(whole, {"x": values}), "native": run_cpu(whole, {"x": values})}
    for stage, outputs in results.items():
        assert_close(outputs["o"], values.astype(float).sum((0, 2)), f32, 32, np.abs(values).sum((0, 2)), stage)


def test_a_value_computed_after_a_loop_may_be_stored_through_an_index() -> None:
    """The store's address needs nothing of the loop before it, its value does."""
    x, o = array("x", f32, "n"), array("o", f32, "n")

    def body(b: Builder, i: Value) -> None:
        start = b.op("load", x, i)
        (total,) = b.for_(b.index(0), b.index(3), b.index(1), [start], lambda inner, k, acc: [inner.mul(acc, acc)])
        b.multi("store", o, i, b.op("neg", total))

    whole = program(loop_kernel("powers", [x, o], ["n"], body))
    values = data(RNG, (77,), f32, 0.5)
    want = -(values.astype(np.float32) ** 2) ** 2
    want = -((-want) ** 2)
    for outputs in (run_stages(whole, {"x": values})["thread"], run_cpu(whole, {"x": values})):
        assert_close(outputs["o"], want, f32, 16)


def test_bounds_that_differ_inside_a_tile() -> None:
    """Row i sums its first i + 1 elements."""
    x, o = array("x", f32, "n", "n"), array("o", f32, "n")

    def body(b: Builder, i: Value) -> None:
        extent = b.add(i, b.index(1))
        b.multi("store", o, i, b.reduce("add", [extent], lambda inner, k: [inner.op("load", x, i, k)])[0])

    whole = program(loop_kernel("triangle", [x, o], ["n"], body))
    values = data(RNG, (41, 41), f32)
    for stage, outputs in {**run_stages(whole, {"x": values}), "native": run_cpu(whole, {"x": values})}.items():
        assert_close(outputs["o"], np.tril(values.astype(float)).sum(1), f32, 16, np.tril(np.abs(values)).sum(1), stage)


def test_conditions_that_differ_inside_a_tile_guard_loads() -> None:
    """`x[i + 1] if i < n - 1 else 0` must not read past the end."""
    x, o = array("x", f32, "n"), array("o", f32, "n")

    def body(b: Builder, i: Value) -> None:
        inside = b.op("lt", i, b.index(Size.of("n") - 1))
        then = lambda t: [t.op("load", x, t.add(i, t.index(1)))]  # noqa: E731
        b.multi("store", o, i, b.if_(inside, then, lambda e: [e.const(0.0, f32)])[0])

    whole = program(loop_kernel("next", [x, o], ["n"], body))
    for n in (1, 33, 100):
        values = data(RNG, (n,), f32)
        for stage, outputs in {**run_stages(whole, {"x": values}), "native": run_cpu(whole, {"x": values})}.items():
            assert_close(outputs["o"], np.append(values[1:], 0), f32, 0.5, label=stage)


def test_empty_reductions_give_the_identity() -> None:
    for kind, want in (("add", 0.0), ("mul", 1.0), ("max", -np.inf), ("min", np.inf)):
        whole = program(reduce_all(kind))
        empty = np.zeros(0, np.float32)
        for stage, outputs in {**run_stages(whole, {"x": empty}), "native": run_cpu(whole, {"x": empty})}.items():
            assert outputs["o"] == np.float32(want), (kind, stage)


def test_a_nested_parallel_is_an_error_of_the_user() -> None:
    o = array("o", f32, "n", "n")

    def body(b: Builder, i: Value) -> None:
        n = b.index(Size.of("n"))

        def inner(deep: Builder, j: Value) -> list[Value]:
            deep.multi("store", o, i, j, deep.const(0.0, f32))
            return []

        b.parallel([n], inner)

    kernel = loop_kernel("twice", [o], ["n"], body)
    with pytest.raises(UserError, match=r"error\[TW005\]: a parallel loop inside a parallel loop is not available in kernels yet"):
        lower_loops(kernel, Schedule((1,)), parse_target("sm_90a"))
