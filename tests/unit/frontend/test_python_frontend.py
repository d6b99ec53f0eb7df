"""The Python front end: what each construct becomes, what names mean, and where nodes say they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import numpy as np
import pytest

import tilewright as tw
from tilewright.base import dtypes
from tilewright.base.errors import UserError
from tilewright.frontend.python.kernels import parse_function, parse_python_file
from tilewright.tree import syntax
from tilewright.tree.show import show
from tilewright.tree.syntax import Assign, Binary, Bool, For, Index, Let, Name, Number, RangeExpr, ReduceExpr, Return

# mypy and ruff do not look inside: these functions are read, never run.
# ruff: noqa: F821, F841, RET504

SIZE = 16
SCALE = np.float32(0.5)
FLAGS = (1, 2.5, True)
exponential = getattr(tw, "exp", math.exp)


class Settings:
    eps = 1e-5


def from_text(body: str, head: str = "x, n", before: str = "") -> syntax.Function:
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    (function,) = parse_python_file(f"import tilewright as tw\n{before}\n@tw.kernel\ndef f({head}):\n{lines}", "k.py")
    return function


def expression(text: str, before: str = "") -> syntax.Expr:
    (statement,) = from_text(f"return {text}", before=before).body
    assert isinstance(statement, Return)
    assert statement.value is not None
    return statement.value


def scale(m: tw.Array, v: tw.Array) -> tw.Array:
    """Text that is no part of the kernel."""
    rows, cols = m.shape
    out = tw.empty((rows, cols), tw.f32)
    for i, j in tw.grid(rows, cols):
        out[i, j] = m[i, j] * v[j]
    return out


def test_live_function() -> None:
    assert show(parse_function(scale)) == (
        "kernel scale(m: array, v: array) -> array {\n"
        "    var (rows, cols) = m.shape\n"
        "    var out = empty((rows, cols), f32)\n"
        "    for grid i in 0..rows, j in 0..cols {\n"
        "        out[i, j] = (m[i, j] * v[j])\n"
        "    }\n"
        "    return out\n"
        "}\n"
    )


def test_live_function_spans_are_in_this_file() -> None:
    function = parse_function(scale)
    first = scale.__code__.co_firstlineno
    assert function.span.source is not None
    assert function.span.path == __file__
    assert function.span.line == first
    loop = function.body[2]
    assert (loop.span.line, loop.span.column) == (first + 4, 5)
    assert loop.span.source is not None
    assert loop.span.source.line(loop.span.line).strip().startswith("for i, j in")
    store = loop.body[0]
    assert isinstance(store, Assign)
    assert (store.value.span.column, store.value.span.end_column) == (21, 35)


def make_indented() -> Callable[..., object]:
    factor = 3

    def indented(x, n):
# A comment at the left edge does not end the function.
        y = factor * x[0]
        return y

    return indented


def test_indented_function_keeps_its_columns() -> None:
    function = make_indented()
    tree = parse_function(function)
    (let, _) = tree.body
    assert let == Let(("y",), Binary("*", Number(3), Index(Name("x"), (Number(0),))), mutable=True)
    assert (let.span.line, let.span.column) == (function.__code__.co_firstlineno + 2, 9)


def captures(x, n):
    a = SIZE + SCALE
    b = math.pi * math.inf
    c = Settings.eps + FLAGS[1]
    d = float("-inf")
    e = exponential(a)
    f = bf16_type(a)
    return a


bf16_type = dtypes.bf16


def test_captured_constants() -> None:
    values = [s.value for s in parse_function(captures).body if isinstance(s, Let)]
    assert values[0] == Binary("+", Number(16), Number(0.5))
    assert values[1] == Binary("*", Number(math.pi), Number(math.inf))
    assert values[2] == Binary("+", Number(1e-5), Number(2.5))
    assert values[3] == Number(-math.inf)
    assert values[4] == syntax.Call(Name("exp"), (syntax.Argument(Name("a")),))
    assert values[5] == syntax.Call(Name("bf16"), (syntax.Argument(Name("a")),))


def annotated(a: tw.Array, b: tw.f32, c: float, d: Annotated[tw.Array, "f32[rows, 2 * cols]"], e: "i32[n]", g=2.0):  # noqa: UP037
    return a


def test_annotations() -> None:
    params = parse_function(annotated).params
    assert [p.name for p in params] == ["a", "b", "c", "d", "e", "g"]
    assert [p.type for p in params] == [
        Name("array"), Name("f32"), Name("float"),
        Index(Name("f32"), (Name("rows"), Binary("*", Number(2), Name("cols")))),
        Index(Name("i32"), (Name("n"),)), None,
    ]  # fmt: skip
    assert params[5].default == Number(2.0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a + b * c", "(a + (b * c))"),
        ("a / b // c % d ** g", "(((a / b) // c) % (d ** g))"),
        ("a < b <= c", "((a < b) and (b <= c))"),
        ("a and b and not c", "((a and b) and (not c))"),
        ("+a - -b", "(a - (-b))"),
        ("x[1:, :n, -1]", "x[1:, :n, (-1)]"),
        ("a if b else c", "(a if b else c)"),
        ("tw.exp(x[0])", "exp(x[0])"),
        ("tw.cast(x, tw.bf16)", "cast(x, bf16)"),
        ("x.astype(tw.f16)", "cast(x, f16)"),
        ("min(a, b)", "min(a, b)"),
        ("tw.max(a, b, c)", "max(a, b, c)"),
        ("math.sqrt(n)", "sqrt(n)"),
        ("tw.inf", "inf"),
        ("x.shape[0]", "x.shape[0]"),
        ("a, b", "(a, b)"),
        ("tw.zeros((2, n), dtype=tw.f32)", "zeros((2, n), dtype=f32)"),
        ("e(n)", "exp(n)"),
        ("N * K", "(64 * 66.0)"),
        ("np.float32(n)", "float32(n)"),
    ],
)
def test_expression(text: str, shown: str) -> None:
    before = "import math\nimport numpy as np\nfrom tilewright import exp as e\nN = 4 * 16\nK: float = N + 2.0\n"
    assert show(syntax.ExprStmt(expression(text, before))) == shown + "\n"


@pytest.mark.parametrize(
    ("name", "op"),
    [("sum", "add"), ("prod", "mul"), ("min", "min"), ("max", "max"), ("all", "and"), ("any", "or"), ("argmin", "argmin"), ("argmax", "argmax")],
)
def test_reductions(name: str, op: str) -> None:
    assert expression(f"tw.{name}(x)") == expression(f"tw.{name}(x, axis=None)") == ReduceExpr(op, Name("x"))
    assert expression(f"tw.{name}(x, axis=1)") == expression(f"x.{name}(axis=1)") == ReduceExpr(op, Name("x"), Number(1))
    assert expression(f"tw.{name}(x, axis=(0, 1))") == ReduceExpr(op, Name("x"), syntax.Tuple((Number(0), Number(1))))


def test_first_assignment_declares_and_later_ones_assign() -> None:
    function = from_text("a = 0.0\nfor i in range(n):\n    a = a + 1\n    b = a\n    b *= 2\nfor i in range(n):\n    b = 1\nreturn a")
    first, loop, second, _ = function.body
    assert first == Let(("a",), Number(0.0), mutable=True)
    assert isinstance(loop, For)
    assert [type(s) for s in loop.body] == [Assign, Let, Assign]
    assert isinstance(second, For)
    assert [type(s) for s in second.body] == [Let]


def test_several_targets() -> None:
    function = from_text("a = b = 1\na, b = b, a\nreturn a")
    assert function.body[:2] == (Let(("a",), Number(1), mutable=True), Let(("b",), Number(1), mutable=True))
    assert function.body[2] == Assign(syntax.Tuple((Name("a"), Name("b"))), syntax.Tuple((Name("b"), Name("a"))))


def test_arrays_made_for_several_names() -> None:
    together = from_text("a, m, b = tw.empty_like(x), len(x), tw.zeros((3,), x.dtype)")
    assert together.body == from_text("a = tw.empty_like(x)\nm = len(x)\nb = tw.zeros((3,), x.dtype)").body


def test_loops() -> None:
    function = from_text(
        "for i in range(1, n, 2):\n    pass\nfor i, j in tw.grid(n, range(1, n)):\n    pass\nfor i in tw.grid(n):\n    pass\nwhile n > 0:\n    n -= 1"
    )
    ordered, grid, single, loop = function.body
    assert ordered == For(("i",), (RangeExpr(Number(1), Name("n"), Number(2)),), (), "no")
    assert grid == For(("i", "j"), (RangeExpr(Number(0), Name("n")), RangeExpr(Number(1), Name("n"))), (), "yes")
    assert single == For(("i",), (RangeExpr(Number(0), Name("n")),), (), "yes")
    assert isinstance(loop, syntax.While)


def test_annotated_variable_and_bool() -> None:
    function = from_text("acc: tw.f32 = 0\nflag = True\nreturn None")
    assert function.body == (Let(("acc",), Number(0), mutable=True, type=Name("f32")), Let(("flag",), Bool(True), mutable=True), Return(None))


def test_local_names_hide_captured_ones() -> None:
    assert from_text("N = n\nreturn N", before="N = 4").body[1] == Return(Name("N"))


def test_file_finds_kernels_only() -> None:
    text = (
        "import tilewright\nfrom tilewright import kernel\nimport other\n"
        "@tilewright.kernel\ndef a(x): return x\n"
        "@kernel(device='cpu')\ndef b(x): return x\n"
        "@other.kernel\ndef c(x): return open(x)\n"
        "def d(x): return [i for i in x]\n"
        "class K:\n    @staticmethod\n    @kernel\n    def e(x):\n        é = 1; return é + x\n"
    )
    functions = parse_python_file(text, "k.py")
    assert [f.name for f in functions] == ["a", "b", "e"]
    statement = functions[2].body[1]
    assert (statement.span.line, statement.span.column) == (15, 16)


def test_function_without_source() -> None:
    namespace: dict[str, Callable[..., object]] = {}
    exec(" ".join(("def made(x):", "return x")), namespace)  # nobody holds the text
    with pytest.raises(UserError, match=r"error\[TW007\]: the source of 'made' is not available"):
        parse_function(namespace["made"])


def test_lambda_is_no_kernel() -> None:
    with pytest.raises(UserError, match="'<lambda>' is not a kernel: only a 'def' can be one"):
        parse_function(lambda x: x)
