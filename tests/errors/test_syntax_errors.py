"""The exact text of what the two front ends say about programs they cannot read."""

from __future__ import annotations

import textwrap

import pytest

from tilewright.base.errors import UserError
from tilewright.frontend.python.kernels import parse_python_file
from tilewright.frontend.zyn.parse import parse_module


def zyn(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_module(text, "t.zyn")
    return str(caught.value)


def python(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    with pytest.raises(UserError) as caught:
        parse_python_file(f"import tilewright as tw\nimport numpy as np\n@tw.kernel\ndef f(x, n):\n{lines}", "k.py")
    return str(caught.value)


def first_line(message: str) -> str:
    return message.split("\n")[0]


def help_of(message: str) -> str:
    last = message.split("\n")[-1]
    return last.removeprefix("help: ") if last.startswith("help: ") else ""


# -- ZynML ----------------------------------------------------------------------------------------------------------


def test_full_message_with_caret() -> None:
    assert zyn("let a = 1\nfor i 0..n:\n    f(i)\n") == textwrap.dedent(
        """\
        t.zyn:2:7: error[TW001]: expected 'in', found '0'
           |
         2 | for i 0..n:
           |       ^"""
    )


def test_full_message_with_help() -> None:
    assert zyn("let y = compute(x\nlet z = 3\n") == textwrap.dedent(
        """\
        t.zyn:2:1: error[TW001]: expected '=', ')' or ',', found 'let'
           |
         2 | let z = 3
           | ^^^
        help: the '(' of line 1 is still open"""
    )


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("let x = ", "1:8", "expected an expression, found the end of the line"),
        ("let = 3", "1:5", "expected a name, found '='"),
        ("let x 3", "1:7", "expected '=', ':' or ',', found '3'"),
        ("let x = 1 2", "1:11", "expected the end of the line, found '2'"),
        ("let x = (1 2)", "1:12", "expected ')' or ',', found '2'"),
        ("let x = [1 2]", "1:12", "expected ']' or ',', found '2'"),
        ("let x = a[1 2]", "1:13", "expected ':', ']' or ',', found '2'"),
        ("for i in 0..n\n    x = 1", "1:14", "expected ':', '{' or ',', found the end of the line"),
        ("for i in 0 n: x = 1", "1:12", "expected ':', '{', ',' or '..', found 'n'"),
        ("if a\n  x = 1", "1:5", "expected ':' or '{', found the end of the line"),
        ("else: x = 1", "1:1", "expected a statement, found 'else'"),
        ("fn f(x) -> :", "1:12", "expected an expression, found ':'"),
        ("let x = 3 if y", "1:15", "expected 'else', found the end of the line"),
        ("let x = await f timeout 1s", "1:27", "expected 'else', found the end of the line"),
        ('let x = f("a" "b")', "1:15", "expected ')' or ',', found \"b\""),
        ("config { a 3 }", "1:12", "expected ':', found '3'"),
        ("let y = compute(x)", "1:19", "expected ':' or '{', found the end of the line"),
        ("let x = 3 $ 4", "1:11", "unexpected character '$'"),
        ("let x = \0", "1:9", "unexpected character U+0000"),
    ],
)
def test_zyn_expectations(text: str, place: str, message: str) -> None:
    assert first_line(zyn(text)) == f"t.zyn:{place}: error[TW001]: {message}"


@pytest.mark.parametrize(
    ("text", "place", "message", "help"),
    [
        ("let x = (1 + 2", "1:9", "'(' is never closed", "add ')'"),
        ("let y = compute(x) {\n  out = x\n", "1:20", "'{' is never closed", "add '}'"),
        ("let x = 1)", "1:10", "')' closes nothing", "remove it, or open the bracket it belongs to"),
        ("let x = [1, 2)", "1:14", "')' does not close '[' of line 1", "close that one first, with ']'"),
        ("for i in 0..n:\nx = 1", "2:1", "expected an indented block after ':'", "indent the lines that belong to the block"),
        ("for i in 0..n:", "1:14", "expected an indented block after ':'", "indent the lines that belong to the block"),
        ("let x = 1\n  let y = 2", "2:3", "unexpected indentation: the block's statements begin in column 1, this one in column 3",
         "a block is indented only after ':'"),
        ("  let x = 1\nlet y = 2", "2:1", "indentation fits no open block: the nearest one begins in column 3, this line in column 1",
         "align the line with the statement it follows"),
        ("\tlet x = 1", "1:2", "tab in the indentation", "indent with spaces; tilewright fmt replaces tabs"),
        ('let s = "abc', "1:9", "this string is not closed on its line", 'add " where it ends'),
        ('let s = "\\q"', "1:9", "unknown escape '\\q'", "write \\\\ for a backslash"),
        ("let x = 3kb", "1:10", "unknown unit 'kb'", "units are KB, MB, GB, TB, ns, us, ms and s"),
        ("let x = 99999999999999999999", "1:9", "integer does not fit in 64 bits", "the largest is 18446744073709551615"),
        ("let x = 1e999", "1:9", "number is too large for a float", "write inf for infinity"),
        ("a + b = x", "1:1", "this cannot be assigned to", "assign to a name, an element or a field"),
        ("if a: if b: x = 1\nelse: y = 2", "2:1", "this 'else' would belong to the 'if' inside line 1", "put that 'if' on a line of its own"),
        ("@foo\nlet x = 1", "1:1", "'@foo' stands before nothing it can apply to",
         "put it in the header of a compute, at the top level of its block, or before a function"),
        ("let y = compute(x) { @kernel }", "1:22", "'@kernel' without a kind", "write for example '@kernel elementwise'"),
        ("let y = compute(a=x) { out = x }", "1:17", "'a=' in compute", "the inputs of a compute are positional"),
        ("let x = f(+, 3)", "1:11", "'+' has no operands", "an operator alone can only be given to reduce"),
        ("let x = y |> 3", "1:14", "the right side of '|>' must be a call", "write for example '|> sqrt()'"),
        ("let x = {a: 1, a: 2}", "1:16", "field 'a' is given twice", "remove one of them"),
        ("for a in xs, i in 0..n: f(a)", "1:5", "a loop over a list cannot share its 'for' with another loop", "nest the loops"),
        ("let x = " + "(" * 200, "1:108", "more than 100 blocks and brackets are open", "move the inner part into a let"),
    ],
)  # fmt: skip
def test_zyn_rules(text: str, place: str, message: str, help: str) -> None:
    error = zyn(text)
    assert first_line(error) == f"t.zyn:{place}: error[TW001]: {message}"
    assert help_of(error) == help


@pytest.mark.parametrize(
    ("text", "place", "message", "help"),
    [
        ("let x = reduce(foo, y)", "1:16", "unknown reduction", "use one of + * min max and or argmin argmax"),
        ("let x = reduce(+)", "1:9", "reduce takes an operator, an array and an axis, got 1 argument(s)",
         "write reduce(op, x) or reduce(op, x, axis=k)"),
        ("let x = reduce(+, y, dim=1)", "1:22", "reduce does not take 'dim=' here", "write reduce(op, x) or reduce(op, x, axis=k)"),
    ],
)  # fmt: skip
def test_zyn_reduce(text: str, place: str, message: str, help: str) -> None:
    error = zyn(text)
    assert first_line(error) == f"t.zyn:{place}: error[TW016]: {message}"
    assert help_of(error) == help


# -- Python ---------------------------------------------------------------------------------------------------------


def test_python_reports_everything_at_once() -> None:
    assert python("a = lambda q: q\nfor v in x:\n    pass\ndel x") == textwrap.dedent(
        """\
        k.py:5:9: error[TW005]: lambda is not available in a kernel
           |
         5 |     a = lambda q: q
           |         ^^^^^^^^^^^
        help: write the expression where it is used
        k.py:6:14: error[TW005]: a loop over this is not available in a kernel
           |
         6 |     for v in x:
           |              ^
        help: loop over tw.grid(...) or range(...) and index
        k.py:8:5: error[TW005]: del is not available in a kernel
           |
         8 |     del x
           |     ^^^^^
        help: leave it out: variables end with their block"""
    )


@pytest.mark.parametrize(
    ("body", "place", "what", "help"),
    [
        ("while n:\n    n -= 1\nelse:\n    n = 2", "8:9", "'else' after 'while'", "set a flag in the loop and test it in an if"),
        ("for i in range(n):\n    n -= 1\nelse:\n    n = 2", "8:9", "'else' after 'for'", "set a flag in the loop and test it in an if"),
        ("try:\n    a = 1\nexcept E:\n    pass", "5:5", "try", "check the values before the kernel is called"),
        ("with n as y:\n    pass", "5:5", "with", "open resources before the kernel is called"),
        ("a = [i for i in x]", "5:9", "a comprehension", "fill an array in a loop"),
        ("a = sum(i for i in x)", "5:12", "a generator expression", "accumulate in a loop: total += value"),
        ("global x", "5:5", "global", "pass the value as a parameter and return the result"),
        ("import os", "5:5", "import", "import at the top of the file"),
        ("class A:\n    pass", "5:5", "class", "use plain variables"),
        ("def g(): pass", "5:5", "a nested function", "write its body where it is called"),
        ("a = f'{x}'", "5:9", "an f-string", "kernels have no text: return the value and format it outside"),
        ("a = h(*x)", "5:11", "'*' in an expression", "write every item"),
        ("a = f(**x)", "5:13", "'**' in a call", "write every argument"),
        ("*a, b = x", "5:5", "a starred target", "name every variable"),
        ("a = (b := 3)", "5:10", "':='", "assign on a line of its own"),
        ("yield x", "5:5", "yield", 'write the value into an output array, or mark the kernel with @tw.kernel(reduce="+")'),
        ("yield from x", "5:5", "yield from", "yield single values"),
        ("a = {1: 2}", "5:9", "a dict", "use plain variables"),
        ("raise E", "5:5", "raise", "check the values before the kernel is called"),
        ("match n:\n    case 1: pass", "5:5", "match", "use if and elif"),
        ("a = n in x", "5:9", "'in' or 'is'", "compare with == or !="),
        ("a: int", "5:5", "'a' without a value", "write 'a: type = value'"),
        ("a = range(n)", "5:9", "range() outside a for", "write 'for i in range(...):'"),
        ("a = np.exp(n)", "5:9", "the Python function 'np.exp'", "use tw.exp"),
        ("a = np.nothing(n)", "5:9", "'np.nothing'", "use a function of tilewright"),
    ],
)  # fmt: skip
def test_python_unsupported(body: str, place: str, what: str, help: str) -> None:
    error = python(body)
    assert first_line(error) == f"k.py:{place}: error[TW005]: {what} is not available in a kernel"
    assert help_of(error) == help


@pytest.mark.parametrize(
    ("body", "line", "help"),
    [
        ("if n:\n    a = 1\nreturn a", "k.py:7:12: error[TW005]: 'a' has a value only inside the block of line 6", "assign 'a' before that block"),
        ("for i in range(n):\n    pass\nreturn i", "k.py:7:12: error[TW005]: 'i' has a value only inside the block of line 5",
         "assign 'i' before that block"),
        ("for i, j in range(n):\n    pass", "k.py:5:9: error[TW016]: 2 loop variable(s) for 1 range(s)", "use tw.grid(...) for several variables"),
        ("for i in tw.grid(n, n):\n    pass", "k.py:5:9: error[TW016]: 1 loop variable(s) for 2 range(s)",
         "give grid() one bound for each variable"),
        ("a = tw.sum(x, initial=1.0)", "k.py:5:19: error[TW016]: sum does not take 'initial=' here", "write sum(x) or sum(x, axis=k)"),
        ("a = 100000000000000000000", "k.py:5:9: error[TW006]: an integer of 67 bits does not fit in 64", "use a float"),
        ("a = (1", "k.py:5:9: error[TW001]: invalid Python: '(' was never closed", ""),
    ],
)  # fmt: skip
def test_python_other(body: str, line: str, help: str) -> None:
    error = python(body)
    assert first_line(error) == line
    assert help_of(error) == help
