"""What only IR built in memory can get wrong; the other rules are tested by the files in `tests/filetests/errors`."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from tilewright.base.dtypes import bool_, f32
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import Size
from tilewright.base.source import Source, Span
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value
from tilewright.ir.program import Program, ProgramArray
from tilewright.ir.types import CopyMap, Scalar, Tile, tensor
from tilewright.ir.verify import verify_kernel, verify_program

F32 = Scalar(f32)


def tile_kernel(*ops: Op, params: tuple[Value, ...] = ()) -> Kernel:
    return Kernel("k", Stage.TILE, params, Block((), ops), (Size.of(1),))


def reason(kernel: Kernel) -> str:
    with pytest.raises(CompilerBug) as caught:
        verify_kernel(kernel)
    assert caught.value.code == "TW042"
    return str(caught.value)


def test_single_definition() -> None:
    a, b = Value(F32, "a"), Value(F32, "b")
    neg = Op("neg", (a,), (b,))
    verify_kernel(tile_kernel(neg, params=(a,)))
    assert "%b: f32 is defined twice, in `%b = neg %a : f32`" in reason(tile_kernel(neg, neg, params=(a,)))
    assert "%a: f32 is defined twice" in reason(tile_kernel(Op("neg", (a,), (a,)), params=(a,)))
    assert "parameter %a: f32 is listed twice" in reason(tile_kernel(params=(a, a)))


def test_use_of_what_is_not_there() -> None:
    a, b = Value(F32, "a"), Value(F32, "b")
    assert "%a: f32 is not defined here, in `%b = neg %a : f32`" in reason(tile_kernel(Op("neg", (a,), (b,))))


def test_region_does_not_see_its_own_results() -> None:
    c, r = Value(Scalar(bool_), "c"), Value(F32, "r")
    inner = Block((), (Op("yield", (r,)),))
    assert "is not defined here" in reason(tile_kernel(Op("if", (c,), (r,), regions=(inner, inner)), params=(c,)))


def test_number_of_regions() -> None:
    c = Value(Scalar(bool_), "c")
    inner = Block((), (Op("yield"),))
    assert "if has 2 regions, got 1" in reason(tile_kernel(Op("if", (c,), regions=(inner,)), params=(c,)))
    assert "neg has 0 regions, got 1" in reason(tile_kernel(Op("neg", (c,), regions=(inner,)), params=(c,)))


def test_error_has_the_place_of_the_op() -> None:
    span = Span(Source("a.py", "y = -x\n"), 1, 5, 1, 7)
    a = Value(F32, "a")
    message = reason(tile_kernel(Op("neg", (a,), (Value(Scalar(bool_), "b"),), span=span), params=(a,)))
    assert message.startswith("a.py:1:5: error[TW042]: kernel @k: result %b: bool should have type f32")
    assert message.endswith(" 1 | y = -x\n   |     ^^")


def test_params_are_scalars_or_tensors() -> None:
    assert "neither a scalar nor a tensor" in reason(tile_kernel(params=(Value(CopyMap(f32, (8,)), "t"),)))
    assert "neither a scalar nor a tensor" in reason(tile_kernel(params=(Value(Tile(f32, (4,)), "t"),)))


def test_facts_and_threads() -> None:
    kernel = tile_kernel()
    assert "fact n: 0 is no divisor" in reason(
        Kernel("k", Stage.TILE, (), kernel.body, kernel.grid, facts=MappingProxyType({"n": 0}))
    )
    assert "1 to 3 grid sizes, got 4" in reason(Kernel("k", Stage.THREAD, (), kernel.body, (Size.of(1),) * 4))


def test_whole_kernel_of_the_builder_verifies() -> None:
    m = Value(tensor(f32, "n"), "m")
    builder = Builder()
    n = builder.index(Size.of("n"))

    def body(b: Builder, i: Value) -> list[Value]:
        (total,) = b.reduce("max", [n], lambda b, j: [b.op("load", m, j)])
        (last,) = b.for_(i, n, i, [total], lambda b, k, c: [b.add(c, c)])
        b.multi("store", m, i, last)
        return []

    builder.parallel([n], body)
    verify_kernel(Kernel("k", Stage.LOOP, (m,), Block((), tuple(builder.ops))))


def test_program_roles() -> None:
    array = ProgramArray("x", tensor(f32, "n"), "output")
    with pytest.raises(CompilerBug, match="input 'x' is marked as output"):
        verify_program(Program("p", (array,), (), (), ()))
