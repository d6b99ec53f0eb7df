"""Programs of several blocks as one: names of sizes and arrays, what views fix, and what has to be checked at a call."""

from __future__ import annotations

import tilewright as tw
from tilewright.base.dtypes import f32
from tilewright.compile.driver import Signature, front_end
from tilewright.ir.program import Program
from tilewright.ir.text import print_program
from tilewright.ir.verify import verify_program
from tilewright.passes.program.watch_indices import watch_indices
from tilewright.tree.block_graph import AffineIndex, BlockCall, BlockGraph, BlockView, StorageLayout, straight
from tilewright.tree.syntax import Param
from tilewright.tree.typed import ArrayArg


@tw.kernel
def double(x):
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        out[i, j] = x[i, j] * 2
    return out


@tw.kernel
def add(x, y):
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        out[i, j] = x[i, j] + y[i, j]
    return out


PLAIN = StorageLayout((None, None), (None, None), straight(2))


def joined(params: str, parts: tuple[BlockCall, ...], results: tuple[int, ...]) -> Program:
    function = BlockGraph("both", tuple(Param(n) for n in params.split()), None, (), "compute", parts=parts, results=results)
    _, program = front_end(function, Signature(tuple(ArrayArg(f32, 2) for _ in params.split())))
    verify_program(program)
    return program


def shapes(program: Program) -> dict[str, str]:
    arrays = (*program.input_arrays, *program.outputs, *program.scratch)
    return {a.name: ", ".join(map(str, a.type.shape)) for a in arrays}


def test_equal_sizes_have_one_name() -> None:
    whole = BlockView(0, (None, None), straight(2))
    program = joined("x", (BlockCall(double.function, ("x",), (PLAIN,)), BlockCall(add.function, (whole, "x"), (PLAIN,))), (1,))
    assert set(shapes(program).values()) == {"rows, columns"}
    assert len(program.inputs) == 1 and len(program.calls) == 2
    assert not any(check.left != check.right for check in program.checks)


def test_what_a_view_fixes_is_a_number_everywhere() -> None:
    """Four columns from the fourth on, added to an array of its own shape: it has four columns too."""
    half = BlockView(0, (None, 4), (AffineIndex(0, (1, 0)), AffineIndex(4, (0, 1))))
    parts = (BlockCall(double.function, ("x",), (PLAIN,)), BlockCall(add.function, (half, "y"), (PLAIN,)))
    program = joined("x y", parts, (1,))
    found = shapes(program)
    assert found["y"] == "rows, 4" and found["x"] == "rows, columns"
    text = print_program(program)
    assert "add %j, %" in text and "const {value = 4, dtype = i64}" in text  # the view's columns are from the fourth on


def test_a_value_may_lie_in_another_order() -> None:
    turned = StorageLayout((None, None), (None, None), (AffineIndex(0, (0, 1)), AffineIndex(0, (1, 0))))
    seen = BlockView(0, (None, None), straight(2))
    program = joined("x", (BlockCall(double.function, ("x",), (turned,)), BlockCall(double.function, (seen,), (PLAIN,))), (1,))
    (between,) = program.scratch
    assert ", ".join(map(str, between.type.shape)) == "columns, rows"


def test_several_results() -> None:
    whole = BlockView(0, (None, None), straight(2))
    program = joined("x", (BlockCall(double.function, ("x",), (PLAIN,)), BlockCall(double.function, (whole,), (PLAIN,))), (1, 0))
    assert len(program.outputs) == 2 and not program.scratch


def test_a_place_that_no_index_moves_from_is_checked_at_the_call() -> None:
    """The third row as a matrix of one row: three rows have to be there, and no kernel asks again."""
    third = BlockView(0, (1, None), (AffineIndex(2, (0, 0)), AffineIndex(0, (0, 1))))
    program = joined("x", (BlockCall(double.function, ("x",), (PLAIN,)), BlockCall(double.function, (third,), (PLAIN,))), (1,))
    assert ("2", "lt", "rows") in [(str(check.left), check.relation, str(check.right)) for check in program.checks]
    assert "watch" not in print_program(watch_indices(program, "all"))
