"""The ZynML front end: what each construct becomes, where it says it is, and how fast and sturdy the parser is."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest

from tilewright.base.errors import UserError
from tilewright.frontend.zyn.parse import MOST_ERRORS, parse_module
from tilewright.tree import syntax
from tilewright.tree.show import show
from tilewright.tree.syntax import (
    Argument,
    Assign,
    Await,
    Binary,
    Call,
    Compute,
    For,
    Index,
    KernelAttribute,
    Let,
    Name,
    Number,
    Pipe,
    RangeExpr,
    ReduceExpr,
    Slice,
    Tuple,
    Unary,
    Yield,
)

GALLERY = (Path(__file__).parent / "gallery.zyn").read_text()


def one(text: str) -> syntax.Stmt:
    (statement,) = parse_module(text).body
    return statement


def value(text: str) -> syntax.Expr:
    statement = one(f"let value = {text}")
    assert isinstance(statement, Let)
    assert statement.value is not None
    return statement.value


def compute(text: str) -> Compute:
    node = value(text)
    assert isinstance(node, Compute)
    return node


def names(*ids: str) -> tuple[Name, ...]:
    return tuple(Name(i) for i in ids)


# -- expressions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a + b * c", "(a + (b * c))"),
        ("a - b - c", "((a - b) - c)"),
        ("-a ** 2", "(-(a ** 2))"),
        ("2 ** -a ** b", "(2 ** (-(a ** b)))"),
        ("a @ b / c", "((a @ b) / c)"),
        ("not a and b or c", "(((not a) and b) or c)"),
        ("a < b + 1 and c", "((a < (b + 1)) and c)"),
        ("a < b <= c", "((a < b) and (b <= c))"),
        ("a | b ^ c & d << 1", "(a | (b ^ (c & (d << 1))))"),
        ("a if b else c if d else e", "(a if b else (c if d else e))"),
        ("x[1:, :n, :, i + 1]", "x[1:, :n, :, (i + 1)]"),
        ("f(a, axis=-1)(b).c[0]", "f(a, axis=(-1))(b).c[0]"),
        ("()", "()"),
        ("(a,)", "(a,)"),
        ("[a, [b],]", "[a, [b]]"),
        ("{a: 1, b: {c: [2]}}", "{a: 1, b: {c: [2]}}"),
        ("x |> exp() |> sum(axis=1)", "x |> exp() |> sum(axis=1)"),
        ("x |> sqrt", "x |> sqrt()"),
        ("0xff + 0b11 + 1_000", "((255 + 3) + 1000)"),
        ("1e-6 + 2.5", "(1e-06 + 2.5)"),
        ("reduce(and, x)", "reduce(and, x)"),
        ("x.step + x.for", "(x.step + x.for)"),
    ],
)
def test_expression(text: str, shown: str) -> None:
    assert show(one(f"let value = {text}")) == f"let value = {shown}\n"


def test_division_is_marked_as_the_one_that_floors_integers() -> None:
    assert value("a / b") == Binary("zdiv", *names("a", "b"))
    assert one("x /= 2") == Assign(Name("x"), Number(2), "zdiv")


@pytest.mark.parametrize(
    ("text", "op"),
    [("+", "add"), ("*", "mul"), ("min", "min"), ("max", "max"), ("and", "and"), ("or", "or"), ("argmin", "argmin"), ("argmax", "argmax")],
)
def test_reduce(text: str, op: str) -> None:
    assert value(f"reduce({text}, x)") == ReduceExpr(op, Name("x"))
    assert value(f"reduce({text}, x, 1)") == value(f"reduce({text}, x, axis=1)") == ReduceExpr(op, Name("x"), Number(1))


@pytest.mark.parametrize(
    ("text", "scaled", "unit"),
    [("2KB", 2048, "KB"), ("1MB", 1 << 20, "MB"), ("1GB", 1 << 30, "GB"), ("1.5KB", 1536, "KB"), ("5ns", 5e-9, "ns"), ("2us", 2e-6, "us"),
     ("1000ms", 1.0, "ms"), ("3s", 3, "s")],
)  # fmt: skip
def test_units(text: str, scaled: float, unit: str) -> None:
    node = value(text)
    assert node == Number(pytest.approx(scaled), unit)
    assert isinstance(node, Number)
    assert isinstance(node.value, int) == (unit.endswith("B") or unit == "s")


def test_infinity_and_strings() -> None:
    assert value("-inf") == Unary("-", Number(math.inf))
    assert value(r'"a\n\"{(\\"') == syntax.String('a\n"{(\\')
    assert value("'// no comment'") == syntax.String("// no comment")
    assert value("true") == syntax.Bool(True)


def test_await() -> None:
    assert value("await f") == Await("one", Name("f"))
    assert value("await all(fs)") == Await("all", Name("fs"))
    assert value("await any([a, b])") == Await("any", syntax.List(names("a", "b")))
    assert value("await f timeout 1s else a + b") == Await(
        "one", Name("f"), Number(1, "s"), Binary("+", *names("a", "b"))
    )


# -- statements -----------------------------------------------------------------------------------------------------


def test_let_forms() -> None:
    assert one("let x: f32 = 1") == Let(("x",), Number(1), type=Name("f32"))
    assert one("let (a, b) = t") == one("let a, b = t") == Let(("a", "b"), Name("t"), destructure=True)
    assert one("let (a,) = t") == Let(("a",), Name("t"), destructure=True)
    assert one("shared var tile[16, n]: f32") == Let(
        ("tile",), None, mutable=True, type=Name("f32"), shared=True, extents=(Number(16), Name("n"))
    )


def test_words_are_names_outside_their_place() -> None:
    text = "var var = 0.0\nvar += x\nvar step = var\nfor i in 0..var step step: shared = kernel @ kernel\nlet timeout = config + fn + compute"
    first, second, third, loop, last = parse_module(text).body
    assert first == Let(("var",), Number(0.0), mutable=True)
    assert second == Assign(Name("var"), Name("x"), "+")
    assert third == Let(("step",), Name("var"), mutable=True)
    assert isinstance(loop, For)
    assert loop.ranges == (RangeExpr(Number(0), Name("var"), Name("step")),)
    assert loop.body == (Assign(Name("shared"), Binary("@", Name("kernel"), Name("kernel"))),)
    assert isinstance(last, Let)
    assert last.targets == ("timeout",)


def test_ranges() -> None:
    loop = one("for i in 0..n, j in 1..=2*m step 4:\n    f(i)\n")
    assert isinstance(loop, For)
    assert loop.vars == ("i", "j")
    assert loop.parallel == "auto"
    assert loop.ranges == (
        RangeExpr(Number(0), Name("n")),
        RangeExpr(Number(1), Binary("*", Number(2), Name("m")), Number(4), inclusive=True),
    )


def test_loop_over_list() -> None:
    assert one("for (a, b) in pairs: f(a)") == For(
        ("a", "b"), (), (syntax.ExprStmt(Call(Name("f"), (Argument(Name("a")),))),), over=Name("pairs")
    )


def test_yield_and_return_values() -> None:
    loop = one("for i in 0..n: yield (x, i)")
    assert isinstance(loop, For)
    assert loop.body == (Yield(Tuple(names("x", "i"))),)
    function = one("fn f(a, b: int = 3) -> int { return a, b }")
    assert function == syntax.Function(
        "f", (syntax.Param("a", optional=True), syntax.Param("b", Name("int"), Number(3))), Name("int"), (syntax.Return(Tuple(names("a", "b"))),), "function"
    )


def test_function_attributes_import_and_config() -> None:
    body = parse_module('@critical_path\n@inline(2) fn f():\n    return\nimport "a.zyn" as a\nconfig { x: 1, y: "z"\n w: 2 }').body
    function, imported, config = body
    assert isinstance(function, syntax.Function)
    assert [a.name for a in function.attributes] == ["critical_path", "inline"]
    assert imported == syntax.Import("a.zyn", "a")
    assert config == syntax.Config((("x", Number(1)), ("y", syntax.String("z")), ("w", Number(2))))


IF_FORMS = [
    "if a:\n    x = 1\nelif b:\n    x = 2\nelse:\n    x = 3",
    "if a { x = 1 } else if b { x = 2 } else { x = 3 }",
    "if a {\n  x = 1\n}\nelif b {\n  x = 2\n}\nelse {\n  x = 3\n}",
    "if a: x = 1\nelif b: x = 2\nelse: x = 3",
    "if a:\n    x = 1\nelse:\n    if b: x = 2\n    else: x = 3",
]


@pytest.mark.parametrize("text", IF_FORMS)
def test_if_forms_are_one_tree(text: str) -> None:
    assert one(text) == one(IF_FORMS[0])


COMPUTE_FORMS = [
    "compute(x) @device(\"cpu\") {\n    @kernel elementwise\n    for i in 0..n:\n        let a = x[i]\n        out[i] = a\n}",
    "compute(x) @device(\"cpu\") { @kernel elementwise for i in 0..n { let a = x[i]; out[i] = a } }",
    "compute(x) { @device(\"cpu\") @kernel elementwise\n  for i in 0..n: let a = x[i]; out[i] = a\n}",
    "compute(x) @device(\"cpu\"):\n    @kernel elementwise\n    for i in 0..n:\n        let a = x[i]\n        out[i] = a\n",
    "compute(x)\n{\n  @device(\"cpu\")\n\n  @kernel elementwise // why\n  for i in 0..n: {\n  }\n}".replace(
        ": {\n  }", "\n  {\n      let a = x[i]\n\n      # why not\n      out[i] = a\n  }"
    ),
    "compute(x) @device(\"cpu\") {\r\n    @kernel elementwise\r\n    for i in 0..n:\r\n        let a = x[i]\r\n        out[i] = a }\r\n",
]  # fmt: skip


@pytest.mark.parametrize("text", COMPUTE_FORMS)
def test_compute_forms_are_one_tree(text: str) -> None:
    node = compute(text)
    assert node == Compute(
        names("x"),
        (
            KernelAttribute("device", (Argument(syntax.String("cpu")),)),
            KernelAttribute("kernel", (Argument(Name("elementwise")),)),
        ),
        (
            For(
                ("i",),
                (RangeExpr(Number(0), Name("n")),),
                (Let(("a",), Index(Name("x"), names("i"))), Assign(Index(Name("out"), names("i")), Name("a"))),
            ),
        ),
    )


def test_reduce_attribute() -> None:
    node = compute("compute(m) { @kernel reduce(+, axis=1) @workgroup(16, 16) for i in 0..r, j in 0..c: yield m[i, j] }")
    kind = Call(Name("reduce"), (Argument(Name("add")), Argument(Number(1), "axis")))
    assert node.attributes[0] == KernelAttribute("kernel", (Argument(kind),))
    assert node.attributes[1] == KernelAttribute("workgroup", (Argument(Number(16)), Argument(Number(16))))


def test_pipe_after_blocks() -> None:
    wanted = value("compute(x) { for i in 0..n: yield x[i] } |> sqrt()")
    assert isinstance(wanted, Pipe)
    assert value("compute(x):\n    for i in 0..n:\n        yield x[i]\n|> sqrt()\nlet q = 1".removesuffix("\nlet q = 1")) == wanted
    assert value("compute(x) { for i in 0..n: yield x[i] }\n  |> sqrt()") == wanted


def test_line_continuations() -> None:
    assert value("a +\n  b") == value("(a\n+ b)") == Binary("+", *names("a", "b"))
    loop = one("for i in 0..n,\n    j in 0..m:\n    f(i)")
    assert isinstance(loop, For)
    assert loop.vars == ("i", "j")


def test_indented_text_and_empty_text() -> None:
    assert parse_module("\n    let x = 1\n    for i in 0..n:\n      f(i)\n    let y = 2\n    ") == parse_module(
        "let x = 1\nfor i in 0..n:\n f(i)\nlet y = 2"
    )
    assert parse_module("").body == parse_module("\n// nothing\n  # here\n").body == ()


def test_blocks_nest_in_lists_of_blocks() -> None:
    node = value("[compute(a) {\n  for i in 0..n:\n    out[i] = a[\n i]\n}, compute(b) { out = b }]")
    assert isinstance(node, syntax.List)
    assert all(isinstance(item, Compute) for item in node.items)


# -- the whole language ---------------------------------------------------------------------------------------------


def test_gallery_shows_and_parses_back() -> None:
    module = parse_module(GALLERY, "gallery.zyn")
    assert len(module.body) == sum(line[:1].isalpha() for line in GALLERY.split("\n"))
    assert parse_module(show(module)) == module


def test_every_span_is_the_text_of_its_node() -> None:
    lines = GALLERY.split("\n")

    def text_of(node: syntax.Node) -> str:
        span = node.span
        assert 1 <= span.line <= span.end_line
        part = lines[span.line - 1 : span.end_line]
        part[-1] = part[-1][: span.end_column - 1]
        part[0] = part[0][span.column - 1 :]
        return "\n".join(part)

    checked = 0
    stack: list[object] = [parse_module(GALLERY, "gallery.zyn")]
    while stack:
        item = stack.pop()
        if isinstance(item, tuple):
            stack.extend(item)
        if not isinstance(item, syntax.Node):
            continue
        stack.extend(getattr(item, f.name) for f in dataclasses.fields(item) if f.name != "span")
        text = text_of(item)
        assert text == text.strip()
        checked += 1
        if isinstance(item, Name) and item.id not in ("add", "mul"):
            assert text == item.id
        elif isinstance(item, Index | Binary | Compute) or (isinstance(item, Call) and item.function != Name("reduce")):
            assert value(text) == item
        elif isinstance(item, Slice):
            assert value(f"x[{text}]") == Index(Name("x"), (item,))
        elif isinstance(item, RangeExpr):
            loop = one(f"for i in {text}: f()")
            assert isinstance(loop, For)
            assert loop.ranges == (item,)
    assert checked > 1000


def failure(text: str) -> UserError | None:
    try:
        parse_module(text)
    except UserError as error:
        return error
    return None


def test_no_text_crashes_the_parser() -> None:
    """Damaged programs parse or give a `UserError` with a place; nothing else."""
    generator = random.Random(7)
    pieces = ["{", "}", "(", ")", "[", "]", ":", "\n", "\n    ", "\t", '"', "for", "else", "@", "|>", "..", "var", "let ", "\\", "é", "\0", "step", ","]
    chunks = GALLERY.split("\n\n")[0].split("\nlet ")
    for _ in range(400):
        text = "let " + generator.choice(chunks[1:])
        for _ in range(generator.randint(1, 3)):
            position = generator.randrange(len(text) + 1)
            end = position + generator.choice([0, 0, 1, 5])
            text = text[:position] + generator.choice(pieces) + text[end:]
        error = failure(text)
        if error is not None:
            assert error.code in ("TW001", "TW016"), text
            assert error.span.line >= 1, text


def test_every_declaration_tells_its_mistake() -> None:
    text = (
        "let a = 1 +* 2\nfn f(x): return x + \nlet ok = 3\nfn g(x) {\n    let y = (x + 1\n    return y\n}\npipeline p(x):\n    return x x\n"
        'let s = "abc\nfn h(x) {\nlet q = 1 +\n}\nlet fine = 4\n'
    )
    with pytest.raises(UserError) as caught:
        parse_module(text)
    places = [(d.span.line, d.span.column) for d in caught.value.diagnostics]
    # What was opened before reading went on is no mistake of its own.
    assert places == [(1, 12), (3, 1), (6, 5), (9, 14), (10, 9), (12, 12)]
    assert all(d.code == "TW001" for d in caught.value.diagnostics)
    assert "1 | let a = 1 +* 2" in str(caught.value) and "12 | let q = 1 +" in str(caught.value)
    many = "let a = *\n" * 50
    with pytest.raises(UserError) as caught:
        parse_module(many)
    assert len(caught.value.diagnostics) == MOST_ERRORS
