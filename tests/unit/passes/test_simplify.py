"""Folding and sharing: what goes, and above all what must stay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from support import array, loop_kernel, program, run_stages
from tilewright.base.dtypes import DType, bool_, f32, f64, i32, u8
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.verify import verify_kernel
from tilewright.passes.common.simplify import simplify

Expression = Callable[[Builder, Value], Value]


def point(expression: Expression, dtype: DType = f32, result: DType | None = None) -> Kernel:
    x, o = array("x", dtype, "n"), array("o", result or dtype, "n")

    def body(b: Builder, i: Value) -> None:
        b.multi("store", o, i, expression(b, b.op("load", x, i)))

    return loop_kernel("point", [x, o], ["n"], body)


def simplified(kernel: Kernel) -> list[Op]:
    done = simplify(kernel)
    verify_kernel(done)
    return [op for op in walk(done.body) if op.opcode not in ("size", "parallel", "load", "store", "yield")]


def opcodes(expression: Expression, dtype: DType = f32) -> list[str]:
    return [op.opcode for op in simplified(point(expression, dtype))]


@pytest.mark.parametrize(
    ("expression", "dtype"),
    [
        (lambda b, x: b.mul(x, b.const(1.0, f32)), f32), (lambda b, x: b.mul(b.const(1.0, f32), x), f32),
        (lambda b, x: b.op("div", x, b.const(1.0, f32)), f32), (lambda b, x: b.add(x, b.const(0, i32)), i32),
        (lambda b, x: b.sub(x, b.const(0, i32)), i32), (lambda b, x: b.op("or", x, b.const(0, i32)), i32),
        (lambda b, x: b.op("shl", x, b.const(0, i32)), i32), (lambda b, x: b.op("min", x, x), f32),
        (lambda b, x: b.select(b.const(True, bool_), x, b.op("neg", x)), f32),
        (lambda b, x: b.select(b.op("lt", x, b.const(0.0, f32)), x, x), f32),
        (lambda b, x: b.op("and", x, b.const(True, bool_)), bool_), (lambda b, x: b.op("or", b.const(False, bool_), x), bool_),
    ],
)  # fmt: skip
def test_what_changes_nothing_goes(expression: Expression, dtype: DType) -> None:
    assert opcodes(expression, dtype) == []


@pytest.mark.parametrize(
    ("expression", "dtype", "kept"),
    [
        (lambda b, x: b.add(x, b.const(0.0, f32)), f32, "add"),  # -0 + 0 is +0
        (lambda b, x: b.sub(x, x), f32, "sub"),  # inf - inf is NaN
        (lambda b, x: b.mul(x, b.const(0.0, f32)), f32, "mul"),  # NaN * 0 is NaN, -1 * 0 is -0
        (lambda b, x: b.cast(b.op("eq", x, x), f32), f32, "eq"),  # false for NaN
        (lambda b, x: b.op("div", x, x), f32, "div"),
        (lambda b, x: b.op("floordiv", x, b.const(1.0, f32)), f32, "floordiv"),  # rounds
        (lambda b, x: b.op("and", x, b.const(1, i32)), i32, "and"),
        (lambda b, x: b.op("neg", b.op("neg", b.mul(x, x))), f32, "mul"),
    ],
)  # fmt: skip
def test_what_changes_a_bit_stays(expression: Expression, dtype: DType, kept: str) -> None:
    assert kept in opcodes(expression, dtype)


def test_constants_fold_in_their_own_dtype() -> None:
    ops = simplified(point(lambda b, x: b.add(x, b.add(b.const(200, u8), b.const(100, u8))), u8))
    (const,) = (op for op in ops if op.opcode == "const")
    assert const.attrs["value"] == 44


def test_zeros_of_both_signs_are_two_constants() -> None:
    def both(b: Builder, x: Value) -> Value:
        return b.add(b.op("div", x, b.const(0.0, f32)), b.op("div", x, b.const(-0.0, f32)))

    kernel = point(both)
    assert [op.opcode for op in simplified(kernel)].count("const") == 2
    results = run_stages(program(kernel), {"x": np.ones(5, np.float32)})
    for stage, outputs in results.items():
        assert np.isnan(outputs["o"]).all(), stage


def test_constants_of_equal_value_but_other_dtype_are_not_shared() -> None:
    def two(b: Builder, x: Value) -> Value:
        wide = b.mul(b.cast(x, f64), b.const(3.0, f64))
        return b.add(b.cast(wide, f32), b.mul(x, b.const(3.0, f32)))

    assert opcodes(two).count("const") == 2


def test_equal_expressions_are_shared() -> None:
    def twice(b: Builder, x: Value) -> Value:
        return b.add(b.op("exp", x), b.op("exp", x))

    assert opcodes(twice).count("exp") == 1


def test_a_value_of_one_branch_is_not_seen_by_the_other() -> None:
    def branches(b: Builder, x: Value) -> Value:
        cond = b.op("lt", x, b.const(0.0, f32))
        return b.if_(cond, lambda t: [t.op("exp", x)], lambda e: [e.add(e.op("exp", x), x)])[0]

    kernel = point(branches)
    assert [op.opcode for op in simplified(kernel)].count("exp") == 2


def test_a_known_branch_takes_the_ifs_place() -> None:
    def branches(b: Builder, x: Value) -> Value:
        return b.if_(b.const(False, bool_), lambda t: [t.op("exp", x)], lambda e: [e.op("neg", x)])[0]

    assert opcodes(branches) == ["neg"]


@pytest.mark.parametrize(
    ("opcode", "bound", "decided"),
    [("lt", Size.of("n"), True), ("ge", Size.of(0), True), ("ge", Size.of("n"), False), ("lt", Size.of("n") - 1, None), ("gt", Size.of(0), None)],
)
def test_comparisons_that_the_loop_decides(opcode: str, bound: Size, decided: bool | None) -> None:
    o = array("o", bool_, "n")

    def body(b: Builder, i: Value) -> None:
        b.multi("store", o, i, b.op(opcode, i, b.index(bound)))

    ops = simplified(loop_kernel("compare", [o], ["n"], body))
    compared = [op for op in ops if op.opcode == opcode]
    if decided is None:
        assert compared
    else:
        assert not compared
        assert [op.attrs["value"] for op in ops if op.opcode == "const"] == [decided]


@pytest.mark.parametrize(("lanes", "chosen"), [((True, True), False), ((True, False), True)])
def test_a_load_under_a_condition_that_always_holds_has_none(lanes: tuple[bool, bool], chosen: bool) -> None:
    x, o = array("x", f32, 8, align=16), array("o", f32, 8, align=16)
    b = Builder()
    both = b.op("pack", *(b.const(lane, bool_) for lane in lanes))
    value = b.op("load", x, b.index(0), b.const(True, bool_), masked=True, width=2)
    b.multi("store", o, b.index(0), b.select(both, value, b.splat(0.0, value)))
    kernel = Kernel("k", Stage.THREAD, (x, o), Block((), tuple(b.ops)), (Size.of(1),), threads=32)
    ops = simplified(kernel)
    assert any(op.opcode == "select" for op in ops) is chosen
    (load,) = [op for op in walk(simplify(kernel).body) if op.opcode == "load"]
    assert "masked" not in load.attrs
    assert len(load.operands) == 2


@pytest.mark.parametrize(("least", "decided"), [(5, True), (4, False)])
def test_indices_that_run_down(least: int, decided: bool) -> None:
    """`least - i > 0` for i in 0..5."""
    o = array("o", bool_, 5)

    def body(b: Builder, i: Value) -> None:
        b.multi("store", o, i, b.op("gt", b.add(b.mul(i, b.index(-1)), b.index(least)), b.index(0)))

    ops = simplified(loop_kernel("down", [o], [5], body))
    assert any(op.opcode == "gt" for op in ops) is not decided


def test_unused_work_goes_but_stores_stay() -> None:
    x, o = array("x", f32, "n"), array("o", f32, "n")

    def body(b: Builder, i: Value) -> None:
        value = b.op("load", x, i)
        b.op("exp", value)
        b.multi("store", o, i, value)

    kernel = simplify(loop_kernel("unused", [x, o], ["n"], body))
    names = [op.opcode for op in walk(kernel.body)]
    assert "exp" not in names
    assert "store" in names
