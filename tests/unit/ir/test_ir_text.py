"""The text form loses nothing: what is parsed back is the same kernel node for node, not just the same text."""

from __future__ import annotations

import math
from types import MappingProxyType

import pytest

from tilewright.base.dtypes import ALL, bf16, f32, i64
from tilewright.base.errors import CompilerBug, UserError
from tilewright.base.sizes import Size, ceildiv
from tilewright.base.source import Source, Span
from tilewright.ir.build import Builder
from tilewright.ir.layouts import Accumulator, Blocked, Operand, Shared
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value
from tilewright.ir.program import KernelCall, Program, ProgramArray, ProgramCheck, ScalarInput
from tilewright.ir.text import print_kernel, print_op, print_program
from tilewright.ir.text_parse import parse_kernel, parse_program
from tilewright.ir.types import CopyMap, Scalar, Tensor, Tile, Type, Vec, tensor


def same_attr(a: Attr, b: Attr) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same_attr, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


def assert_same(a: Kernel, b: Kernel) -> None:
    """The kernels are equal but for the names of values that had to be made unique."""
    values: dict[Value, Value] = {}

    def defined(left: tuple[Value, ...], right: tuple[Value, ...]) -> None:
        assert [v.type for v in left] == [v.type for v in right]
        assert [bool(v.name) for v in left] == [bool(v.name) for v in right]
        values.update(zip(left, right, strict=True))

    def block(left: Block, right: Block) -> None:
        defined(left.args, right.args)
        assert len(left.ops) == len(right.ops)
        for x, y in zip(left.ops, right.ops, strict=True):
            assert x.opcode == y.opcode
            assert tuple(values[o] for o in x.operands) == y.operands
            assert list(x.attrs) == list(y.attrs)
            assert all(same_attr(x.attrs[k], y.attrs[k]) for k in x.attrs)
            assert len(x.regions) == len(y.regions)
            for inner, other in zip(x.regions, y.regions, strict=True):
                block(inner, other)
            defined(x.results, y.results)

    assert (a.name, a.stage, a.grid, a.threads, dict(a.facts)) == (b.name, b.stage, b.grid, b.threads, dict(b.facts))
    assert list(a.attrs) == list(b.attrs)
    assert all(same_attr(a.attrs[k], b.attrs[k]) for k in a.attrs)
    defined(a.params, b.params)
    block(a.body, b.body)


def assert_round_trips(kernel: Kernel) -> Kernel:
    text = print_kernel(kernel)
    parsed = parse_kernel(text)
    assert_same(kernel, parsed)
    assert print_kernel(parsed) == text
    return parsed


def kernel_of(*ops: Op, params: tuple[Value, ...] = (), **attrs: Attr) -> Kernel:
    return Kernel("k", Stage.TILE, params, Block((), ops), (Size.of(1),), attrs=MappingProxyType(attrs))


ACCUMULATOR = Accumulator("wgmma", (64, 128, 16), (4, 1))
TYPES: list[Type] = [
    *(Scalar(dtype) for dtype in ALL),
    Vec(bf16, 8),
    Tile(f32, ()),
    Tile(f32, (64, 128)),
    Tile(f32, (64, 128), Blocked((1, 4), (4, 8), (4, 1))),
    Tile(f32, (64, 128), Shared((1, 0), 128)),
    Tile(f32, (64, 128), ACCUMULATOR),
    Tile(f32, (64, 128), Operand("b", ACCUMULATOR)),
    tensor(f32),
    tensor(f32, "rows", "cols"),
    tensor(f32, 4, 4, space="shared", align=128),
    Tensor(f32, (ceildiv(Size.of("n") + 3, 4),), (Size.of("n") * Size.of("m") * -2 + 1,), "constant"),
    Tensor(f32, (Size.of("min"),), (Size.of("größe.x$1"),)),
    CopyMap(bf16, (128, 64), 128),
    CopyMap(bf16, (1, 1, 1, 64), 128, 1024),
]


@pytest.mark.parametrize("type_", TYPES, ids=str)
def test_types_round_trip(type_: Type) -> None:
    parsed = assert_round_trips(kernel_of(Op("x", (), (Value(type_),))))
    assert parsed.body.ops[0].result.type == type_


ATTRS: list[Attr] = [
    0, -1, 2**64, 0.0, -0.0, 1.0, 0.1, 1e300, 1e-300, 5e-324, 1e16, math.inf, -math.inf, math.nan, True, False,
    "", "a;b", 'quote " back \\ slash', "line\nbreak\ttab", "λ", "true", *ALL,
    Size.of("n"), Size.of("n") + 1, Size.of("n") * 2, Size.of("n") * -1, Size.of(7), Size.of(0), Size.of("f32"), Size.of("true"),
    Size.of("size"), Size.of("nan") - 4, Size.of("αβ"), ceildiv(Size.of("n"), 4) * Size.of("m"), (), (1,), (1, 1.0, True, "x", f32, Size.of("n"), ((), (2,))),
]  # fmt: skip


@pytest.mark.parametrize("value", ATTRS, ids=repr)
def test_attributes_keep_their_kind(value: Attr) -> None:
    assert_round_trips(kernel_of(Op("x", attrs=MappingProxyType({"value": value, "other": 1})), header=value))


def test_value_that_is_no_attribute() -> None:
    bad = MappingProxyType({"value": [1]})
    with pytest.raises(CompilerBug, match="an attribute cannot be a list"):
        print_kernel(kernel_of(Op("x", attrs=bad)))  # type: ignore[arg-type]


def test_names_are_unique_and_stable() -> None:
    names = ["x", "x", "x.1", "", "x", "0", "", "a b", "%0", "x.1"]
    values = [Value(Scalar(f32), name) for name in names]
    kernel = kernel_of(*(Op("x", (), (v,)) for v in values), Op("use", tuple(values)))
    assert_round_trips(kernel)
    assert print_kernel(kernel).splitlines()[-2] == '  use %x, %x.1, %x.1.1, %0, %x.2, %"0", %1, %"a b", %"%0", %x.1.2'


def test_operand_on_the_next_line_is_not_taken() -> None:
    parsed = parse_kernel("kernel @k stage=thread grid=[1] {\n  barrier\n  %0 = thread_id : i64\n}")
    assert [op.opcode for op in parsed.body.ops] == ["barrier", "thread_id"]


def test_regions() -> None:
    m = Value(tensor(f32, "n"), "m")
    builder = Builder()
    n, zero, one = builder.index(Size.of("n")), builder.index(0), builder.index(1)

    def body(b: Builder, i: Value) -> list[Value]:
        (total,) = b.reduce("add", [n, one], lambda b, j, k: [b.op("load", m, j)])
        condition = b.op("gt", total, total)
        (chosen,) = b.if_(condition, lambda b: [total], lambda b: [b.const(-0.0, f32)])
        (last,) = b.for_(zero, n, one, [chosen], lambda b, k, c: [b.add(c, c)], unroll=4)
        b.multi("store", m, i, last)
        return []

    builder.parallel([n], body)
    kernel = Kernel("k", Stage.LOOP, (m,), Block((), tuple(builder.ops)), facts=MappingProxyType({"n": 16}))
    assert_round_trips(kernel)


def test_locations_round_trip() -> None:
    one, two = Source("a.py", "x"), Source("b c.py", "y")
    spans = [
        Span(one, 3, 5, 3, 9),
        Span(one, 3, 5, 4, 2),
        Span(one, 7, 1),
        Span(two, 1, 2, 1, 4),
        Span(),
        Span(None, 2, 2),
    ]
    kernel = Kernel(
        "k", Stage.TILE, (), Block((), tuple(Op("x", span=s) for s in spans)), (Size.of(1),), span=Span(one, 1, 1, 1, 8)
    )
    text = print_kernel(kernel, locations=True)
    parsed = parse_kernel(text)
    assert [op.span for op in parsed.body.ops] == spans
    assert [op.span.path for op in parsed.body.ops] == [s.path for s in spans]
    assert (parsed.span, parsed.span.path) == (kernel.span, "a.py")
    assert print_kernel(parsed, locations=True) == text


def test_places_of_hand_written_text() -> None:
    parsed = parse_kernel("kernel @k stage=tile grid=[1] {\n  param %a: f32\n  %b = neg %a : f32\n}", "hand.kir")
    assert parsed.body.ops[0].span.place() == "hand.kir:3:3"
    assert parsed.span.place() == "hand.kir:1:1"


def test_program_round_trips() -> None:
    x, y = tensor(f32, "n"), tensor(f32, "n", "m")
    first = kernel_of(params=(Value(x, "x"),))
    second = kernel_of(params=(Value(x, "x"), Value(Scalar(i64), "s")))
    program = Program(
        "p",
        (ProgramArray("x", x, "input"), ScalarInput("a scalar", i64), ProgramArray("y", y, "input")),
        (ProgramArray("out", x, "output"),),
        (ProgramArray("t", y, "scratch"),),
        (KernelCall(first, ("x",)), KernelCall(second, ("t", "a scalar")), KernelCall(first, ("out",))),
        (ProgramCheck(Size.of("n") - 1, "lt", Size.of("m"), 'index {left} "of" {right}', Span(None, 4, 2), "TW013"),
         ProgramCheck(Size.of("n"), "eq", Size.of(4), "four", Span())),
        Span(Source("p.zyn", ""), 1, 1),
    )  # fmt: skip
    for locations in (False, True):
        text = print_program(program, locations)
        parsed = parse_program(text)
        assert print_program(parsed, locations) == text
        assert (parsed.name, parsed.inputs, parsed.outputs, parsed.scratch, parsed.checks) == (
            program.name, program.inputs, program.outputs, program.scratch, program.checks,
        )  # fmt: skip
        assert [call.args for call in parsed.calls] == [call.args for call in program.calls]
        assert parsed.calls[0].kernel is parsed.calls[2].kernel
        for mine, theirs in zip(program.calls, parsed.calls, strict=True):
            assert_same(mine.kernel, theirs.kernel)
    assert [c.span for c in parsed.checks] == [c.span for c in program.checks]


def test_print_op_uses_the_kernels_names() -> None:
    a, b = Value(Scalar(f32)), Value(Scalar(f32))
    last = Op("use", (b, a))
    kernel = kernel_of(Op("x", (), (a,)), Op("x", (), (b,)), last)
    assert print_op(last, kernel) == "use %1, %0"
    assert print_op(last) == "use %0, %1"


BAD = {
    "kernel @k stage=warp {\n}": "1:17: error[TW041]: unknown stage `warp`",
    "kernel @k stage=tile grid=[1] {\n  x {a = 1, a = 2}\n}": "2:13: error[TW041]: attribute `a` is given twice",
    "kernel @k stage=tile grid=[1] {\n  %a, %b = x : f32\n}": "2:3: error[TW041]: 2 results but 1 types",
    "kernel @k stage=tile {\n}\nkernel @k stage=tile {\n}": "3:1: error[TW041]: expected the end, got `kernel`",
    "kernel @k stage=tile {\n  x {a = #}\n}": "2:10: error[TW041]: unexpected character '#'",
    "kernel @k stage=tile {\n  x {a = }\n}": "2:10: error[TW041]: expected an attribute's value, got `}`",
    'kernel @k stage=tile {\n  x {a = "\\q"}\n}': "2:10: error[TW041]: bad escape in a string",
    "kernel @k stage=tile {\n  %a = x : tile<f32, [1.5]>\n}": "2:23: error[TW041]: expected an integer, got `1.5`",
    "kernel @k stage=tile {\n  %a = x : tile<f32, [1], ring([1])>\n}": "2:27: error[TW041]: unknown layout `ring`",
    "kernel @k stage=tile {\n  %a = x : vec<f33, 2>\n}": "2:16: error[TW041]: unknown dtype `f33`",
    "kernel @k stage=tile grid=[n +] {\n}": "1:31: error[TW041]: expected a size, got `]`",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: BAD[text])
def test_parse_errors_have_a_place(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_kernel(text, "bad.kir")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"bad.kir:{BAD[text]}"
    assert "^" in lines[3]


def test_program_parse_errors() -> None:
    with pytest.raises(UserError, match="no kernel is called @k"):
        parse_program("program @p {\n  call @k()\n}")
    with pytest.raises(UserError, match="output `y` must be a tensor"):
        parse_program("program @p {\n  output y: f32\n}")
    with pytest.raises(UserError, match="two kernels are called @k"):
        parse_program("program @p {\n}\nkernel @k stage=tile {\n}\nkernel @k stage=tile {\n}")
