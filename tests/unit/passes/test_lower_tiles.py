"""Tile stage to thread stage: vectors, lanes, warps and the masks at the edges."""

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
    run_stages,
    stages_of,
    strided,
)
from tilewright.base.dtypes import DType, f16, f32, f64, i8, i64
from tilewright.base.sizes import Size
from tilewright.base.target import parse_target
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import Kernel, Op, Stage, Value, walk
from tilewright.ir.program import Program
from tilewright.ir.types import Tensor
from tilewright.passes.loop.collapse import collapse
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.to_thread.assign_layouts import assign_layouts
from tilewright.passes.to_thread.lower_tiles import lower_tiles
from tilewright.passes.to_tile.lower_loops import lower_loops

RNG = np.random.default_rng(6)


def thread_ops(kernel: Kernel, target: str = "sm_90a", **hints: int) -> list[Op]:
    stages = stages_of(kernel, target, **hints)
    return [op for call in stages.thread.calls for op in walk(call.kernel.body)]


def widths(ops: list[Op], opcode: str) -> set[int]:
    """Elements per access of global memory."""
    found: set[int] = set()
    for op in ops:
        memory = op.operands[0].type if op.operands else None
        if op.opcode == opcode and isinstance(memory, Tensor) and memory.space == "global":
            type_ = op.results[0].type if opcode == "load" else op.operands[-1].type
            found.add(getattr(type_, "width", 1))
    return found


@pytest.mark.parametrize(("dtype", "width"), [(f64, 2), (f32, 4), (f16, 8), (i8, 8)], ids=str)
def test_aligned_rows_are_accessed_in_vectors(dtype: DType, width: int) -> None:
    ops = thread_ops(add_2d(dtype, facts={"rows": 1024, "cols": 1024}), rows=4096, cols=4096)
    assert widths(ops, "load") == {width}
    assert widths(ops, "store") == {width}


def test_unknown_alignment_means_single_elements() -> None:
    ops = thread_ops(add_2d(align=0, facts={"rows": 1024, "cols": 1024}), rows=4096, cols=4096)
    assert widths(ops, "load") == {1}


def test_rows_of_odd_length_are_not_aligned() -> None:
    """Row sums of `cols` elements: the second row starts anywhere."""
    assert widths(thread_ops(reduce_2d(), rows=4096, cols=4099), "load") == {1}
    assert 4 in widths(thread_ops(reduce_2d(facts={"cols": 4}), rows=4096, cols=4096), "load")


def test_a_shift_breaks_alignment_but_not_the_answer() -> None:
    x, o = array("x", f32, Size.of("n") + 1, align=16), array("o", f32, "n", align=16)

    def body(b: Builder, i: Value) -> None:
        b.multi("store", o, i, b.op("load", x, b.add(i, b.index(1))))

    kernel = loop_kernel("shift", [x, o], ["n"], body, {"n": 4})
    ops = thread_ops(kernel, n=4096)
    assert widths(ops, "load") == {1}
    assert 4 in widths(ops, "store")


def test_cpu_vectors_ask_for_no_alignment() -> None:
    ops = [op for op in thread_ops(add_2d(), "cpu", rows=64, cols=64) if op.opcode in ("load", "store")]
    assert any(op.attrs.get("unaligned") for op in ops)
    assert all(op.attrs.get("unaligned") for op in ops if "width" in op.attrs)


def test_a_row_takes_shuffles_and_one_barrier() -> None:
    ops = [op.opcode for op in thread_ops(reduce_2d(facts={"cols": 16}), rows=8192, cols=16384)]
    assert ops.count("barrier") == 1
    assert ops.count("shuffle") == 5


def test_short_rows_need_no_barrier() -> None:
    ops = [op.opcode for op in thread_ops(reduce_2d(facts={"cols": 16}), rows=65536, cols=64)]
    assert ops.count("barrier") == 0
    assert "shuffle" in ops


def _run(kernel: Kernel, schedule: Schedule, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Through the two lowerings with a schedule of one's own."""
    target = parse_target("sm_90a")
    tile = assign_layouts(lower_loops(kernel, schedule, target), schedule, target)
    thread = lower_tiles(tile, target)
    assert thread.stage is Stage.THREAD
    whole = program(kernel)
    call = whole.calls[0]
    lowered = Program(whole.name, whole.inputs, whole.outputs, (), (type(call)(thread, call.args),))
    return run_program(lowered, inputs)["o"]


MAPS = [
    Schedule((1, 32), vector=1, vector_index=1, threads=32), Schedule((1, 256), vector=4, vector_index=1, threads=64),
    Schedule((4, 64), vector=2, vector_index=1, threads=128), Schedule((8, 16), vector=4, vector_index=1, threads=32),
    Schedule((32, 1), vector=1, vector_index=0, threads=32), Schedule((16, 64), vector=4, vector_index=1, threads=32),
]  # fmt: skip


@pytest.mark.parametrize("schedule", MAPS, ids=lambda s: s.describe())
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (17, 64), (33, 130)])
def test_any_schedule_gives_the_same_elementwise_answer(schedule: Schedule, shape: tuple[int, int]) -> None:
    x, y = data(RNG, shape, f32), data(RNG, shape, f32)
    np.testing.assert_array_equal(_run(add_2d(), schedule, {"x": x, "y": y}), x + y)


ROWS = [
    Schedule((1,), 32, 1, vector_on_reduction=True, threads=32), Schedule((1,), 256, 4, vector_on_reduction=True, threads=64),
    Schedule((4,), 64, 2, vector_on_reduction=True, threads=128), Schedule((8,), 32, 1, vector_on_reduction=True, threads=256),
    Schedule((1,), 1024, 4, vector_on_reduction=True, threads=128), Schedule((2,), 512, 4, vector_on_reduction=True, threads=256),
]  # fmt: skip


@pytest.mark.parametrize("schedule", ROWS, ids=lambda s: s.describe())
@pytest.mark.parametrize("kind", ["add", "argmax", "min"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (9, 300)])
def test_any_schedule_reduces_rows(schedule: Schedule, kind: str, shape: tuple[int, int]) -> None:
    x = data(RNG, shape, f32)
    got = _run(reduce_2d(kind, 1), schedule, {"x": x})
    want = {"add": x.astype(float).sum(1), "argmax": x.argmax(1), "min": x.min(1)}[kind]
    assert_close(got, want, i64 if kind == "argmax" else f32, 16, np.abs(x).sum(1) if kind == "add" else None)


COLUMNS = [
    Schedule((32,), 8, 1, vector_index=0, threads=32), Schedule((64,), 16, 2, vector_index=0, threads=128),
    Schedule((128,), 32, 4, vector_index=0, threads=256), Schedule((32,), 32, 1, vector_index=0, threads=256),
]  # fmt: skip


@pytest.mark.parametrize("schedule", COLUMNS, ids=lambda s: s.describe())
@pytest.mark.parametrize("kind", ["add", "argmin", "max"])
@pytest.mark.parametrize("shape", [(1, 1), (33, 5), (70, 130)])
def test_any_schedule_reduces_columns(schedule: Schedule, kind: str, shape: tuple[int, int]) -> None:
    x = data(RNG, shape, f32)
    got = _run(reduce_2d(kind, 0), schedule, {"x": x})
    want = {"add": x.astype(float).sum(0), "argmin": x.argmin(0), "max": x.max(0)}[kind]
    assert_close(got, want, i64 if kind == "argmin" else f32, 16, np.abs(x).sum(0) if kind == "add" else None)


def test_results_all_threads_hold_are_stored_once() -> None:
    """A race would show in the emulator: every element of the output has one writer."""
    x = data(RNG, (3, 2000), f32)
    results = run_stages(program(reduce_2d()), {"x": x})
    assert_close(results["thread"]["o"], x.astype(float).sum(1), f32, 32, np.abs(x).sum(1))


@pytest.mark.parametrize("n", [1, 5, 127, 1000])
def test_reversed_and_doubled_indices(n: int) -> None:
    x, y, o = array("x", f32, "n", align=16), array("y", f32, Size.of("n") * 2, align=16), array("o", f32, "n", align=16)

    def body(b: Builder, i: Value) -> None:
        back = b.sub(b.index(Size.of("n") - 1), i)
        twice = b.mul(i, b.index(2))
        b.multi("store", o, i, b.sub(b.op("load", x, back), b.op("load", y, twice)))

    inputs = {"x": data(RNG, (n,), f32), "y": data(RNG, (2 * n,), f32)}
    for stage, outputs in run_stages(program(loop_kernel("forms", [x, y, o], ["n"], body)), inputs).items():
        np.testing.assert_array_equal(outputs["o"], inputs["x"][::-1] - inputs["y"][::2], stage)


def test_strides_that_only_the_call_knows() -> None:
    x = strided("x", f32, ["n", "m"], ["s", "t"])
    o = array("o", f32, "n", "m", align=16)

    def body(b: Builder, i: Value, j: Value) -> None:
        b.multi("store", o, i, j, b.op("load", x, i, j))

    whole = program(collapse(loop_kernel("view", [x, o], ["n", "m"], body)))
    base = data(RNG, (40, 60), f32)
    for view in (base, base.T, base[::2, ::3], base[::-1, ::-1]):
        for stage, outputs in run_stages(whole, {"x": view}).items():
            np.testing.assert_array_equal(outputs["o"], view, stage)


def test_a_long_sum_through_both_kernels() -> None:
    x = data(RNG, (70_001,), f32)
    results = run_stages(program(reduce_all()), {"x": x})
    assert_close(results["thread"]["o"], x.astype(float).sum(), f32, 64, np.abs(x).sum())
