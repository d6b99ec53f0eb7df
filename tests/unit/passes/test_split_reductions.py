"""Cutting long reductions in two kernels."""

from __future__ import annotations

import numpy as np
import pytest

from support import (
    array,
    assert_close,
    data,
    loop_kernel,
    program,
    reduce_2d,
    reduce_all,
    run_cpu,
    run_stages,
    stages_of,
    strided,
)
from tilewright.base.dtypes import by_name, f32
from tilewright.base.sizes import Size
from tilewright.base.target import parse_target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel
from tilewright.ir.verify import verify_program
from tilewright.passes.program.split_reductions import split_reductions


def calls(kernel: Kernel, target: str = "sm_90a", **hints: int) -> int:
    whole = split_reductions(program(kernel), (None,), parse_target(target), hints)[0]
    verify_program(whole)
    assert len(whole.scratch) == (0 if len(whole.calls) == 1 else len(whole.calls[0].args) - len(whole.inputs))
    return len(whole.calls)


def test_a_long_sum_is_cut() -> None:
    assert calls(reduce_all(), n=1 << 24) == 2
    assert calls(reduce_all()) == 2, "nothing is known of n: it may be long"


def test_a_short_sum_is_not() -> None:
    assert calls(reduce_all(), n=4096) == 1


def test_many_rows_are_not() -> None:
    assert calls(reduce_2d(), rows=4096, cols=1 << 20) == 1


def test_few_long_rows_are() -> None:
    assert calls(reduce_2d(), rows=2, cols=1 << 20) == 2


def test_columns_of_a_tall_matrix_are() -> None:
    assert calls(reduce_2d("add", 0), rows=1 << 16, cols=128) == 2


def test_argmax_keeps_value_and_place() -> None:
    whole = split_reductions(program(reduce_all("argmax")), (None,), parse_target("sm_90a"), {"n": 1 << 24})[0]
    assert [a.type.dtype.name for a in whole.scratch] == ["f32", "i64"]


@pytest.mark.parametrize("kind", ["add", "max", "argmax", "argmin"])
@pytest.mark.parametrize("n", [1, 40_000, 65_537])
def test_the_answer_stays(kind: str, n: int) -> None:
    x = data(np.random.default_rng(n), (n,), f32)
    want = {"add": x.astype(float).sum(), "max": x.max(), "argmax": x.argmax(), "argmin": x.argmin()}[kind]
    dtype = by_name("i64") if kind.startswith("arg") else f32
    scale = np.abs(x).astype(float).sum()
    for outputs in (run_stages(program(reduce_all(kind)), {"x": x})["thread"], run_cpu(program(reduce_all(kind)), {"x": x})):
        assert_close(outputs["o"], want, dtype, 8, scale)


def test_the_epilogue_runs_once() -> None:
    """What follows the reduction belongs to the second kernel."""
    x, o = array("x", f32, "n", align=16), array("o", f32)

    def body(b: Builder) -> None:
        total = b.reduce("add", [b.index(Size.of("n"))], lambda inner, k: [inner.op("load", x, k)])[0]
        b.multi("store", o, b.op("sqrt", total))

    kernel = loop_kernel("norm", [x, o], [], body)
    stages = stages_of(kernel, n=1 << 24)
    first, second = (call.kernel for call in stages.loop.calls)
    from tilewright.ir.nodes import walk

    assert "sqrt" not in [op.opcode for op in walk(first.body)]
    assert "sqrt" in [op.opcode for op in walk(second.body)]
    x_value = np.full(50_000, 2.0, np.float32)
    assert_close(run_stages(program(kernel), {"x": x_value})["thread"]["o"], np.sqrt(100_000.0), f32)


def test_a_reduction_that_needs_its_neighbours_is_not_cut() -> None:
    """The mean inside the second sum comes from the first: each would have to be computed twice."""
    x, o = array("x", f32, "n", align=16), array("o", f32)

    def body(b: Builder) -> None:
        n = b.index(Size.of("n"))
        total = b.reduce("add", [n], lambda inner, k: [inner.op("load", x, k)])[0]
        b.multi("store", o, b.reduce("add", [n], lambda inner, k: [inner.sub(inner.op("load", x, k), total)])[0])

    assert calls(loop_kernel("centred", [x, o], [], body), n=1 << 24) == 1


def sum_of_view(kind: str) -> Kernel:
    """A reduction over both axes of a view that is not one piece of memory."""
    x, o = strided("x", f32, ("rows", "columns"), ("down", "across")), array("o", f32)

    def body(b: Builder) -> None:
        extents = [b.index(Size.of("rows")), b.index(Size.of("columns"))]
        b.multi("store", o, b.reduce(kind, extents, lambda inner, i, j: [inner.op("load", x, i, j)])[0])

    return loop_kernel("view", [x, o], (), body)


def test_a_sum_over_several_indices_is_cut_on_a_cpu() -> None:
    assert calls(sum_of_view("add"), "aarch64-neon") == 2
    assert calls(sum_of_view("add"), "sm_90a") == 1, "other passes cut it there"


@pytest.mark.parametrize("kind", ["add", "max"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 70_001), (301, 211)])
def test_the_answer_of_a_view_stays(kind: str, shape: tuple[int, int]) -> None:
    x = data(np.random.default_rng(shape[0]), (shape[0], 3 * shape[1]), f32)[:, ::3]
    want = x.astype(float).sum() if kind == "add" else x.max()
    assert_close(run_cpu(program(sum_of_view(kind)), {"x": x})["o"], want, f32, 8, np.abs(x).astype(float).sum())
