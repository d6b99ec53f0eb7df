"""Kernels in kernels: the tree that a call becomes, names that do not meet, and what is refused, with both places."""

from __future__ import annotations

import textwrap

import pytest

import tilewright as tw
from tilewright.base.dtypes import f32, f64, i32
from tilewright.base.errors import UserError
from tilewright.frontend.python.kernels import parse_function, parse_python_file
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree import syntax
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.show import show
from tilewright.tree.typed import ArrayArg
from tilewright.tree.typed_text import show as show_typed

HEAD = "import tilewright as tw\n\n"


def kernels(text: str) -> dict[str, syntax.Function]:
    return {f.name: f for f in parse_python_file(HEAD + textwrap.dedent(text), "k.py")}


def message(text: str, *ranks: int, kernel: str = "k") -> str:
    with pytest.raises(UserError) as caught:
        check_kernel(kernels(text)[kernel], [ArrayArg(f32, rank) for rank in ranks])
    return str(caught.value)


HALVES = """
    @tw.kernel
    def half(x: float) -> float:
        y = x / 2
        return y

    @tw.kernel
    def k(x):
        y = len(x)
        out = tw.empty((y,), x.dtype)
        for i in tw.grid(y):
            out[i] = half(x[i]) + half(i)
        return out
"""


def test_the_body_stands_where_the_call_was() -> None:
    assert show(kernels(HALVES)["k"]) == textwrap.dedent("""\
        kernel k(x) {
            var y = len(x)
            var out = empty((y,), x.dtype)
            for grid i in 0..y {
                var half_x = x[i]
                expect half_x: float
                var half_y = (half_x / 2)
                expect i: float
                var half_y_2 = (i / 2)
                out[i] = (half_y + half_y_2)
            }
            return out
        }
        """)


@tw.kernel
def square(x):
    return x * x


@tw.kernel
def squares(x):
    out = tw.empty_like(x)
    for i in tw.grid(len(x)):
        out[i] = square(x[i])
    return out


def test_live_functions_and_files_give_the_same_tree() -> None:
    text = """
        @tw.kernel
        def square(x):
            return x * x

        @tw.kernel
        def squares(x):
            out = tw.empty_like(x)
            for i in tw.grid(len(x)):
                out[i] = square(x[i])
            return out
    """
    assert parse_function(squares.python) == kernels(text)["squares"]


def test_a_call_and_its_text_give_the_same_typed_tree() -> None:
    text = """
        @tw.kernel
        def shifted(x, by: float = 1.0):
            out = tw.empty_like(x)
            for i in tw.grid(len(x)):
                out[i] = x[i] + by
            return out

        @tw.kernel
        def k(x):
            return shifted(x, by=2.0)

        @tw.kernel
        def default(x):
            return shifted(x)
    """
    found = kernels(text)
    body = [show_typed(check_kernel(found[name], [ArrayArg(f32, 1)])).splitlines()[1:] for name in ("k", "default")]
    assert body[0][-1].strip() == "out[i] = x[i] + 2.0"
    assert body[1][-1].strip() == "out[i] = x[i] + 1.0"


def test_what_is_called_under_a_condition_is_computed_under_it() -> None:
    text = """
        @tw.kernel
        def twice(x):
            y = x + x
            return y

        @tw.kernel
        def k(x):
            out = tw.empty_like(x)
            for i in tw.grid(len(x)):
                out[i] = twice(x[i - 1]) if i > 0 and twice(x[i - 1]) > 1 else 0.0
            return out
    """
    typed = check_kernel(kernels(text)["k"], [ArrayArg(f32, 1)])
    assert not [c for c in typed.checks if c.code == "TW013"]  # no index is taken to be reached


def test_the_dtype_of_an_annotation_is_no_size_of_the_called_kernel() -> None:
    """A kernel with `tw.Array[tw.f32]` called twice: the second call renamed `f32` as if it were an extent."""
    text = """
        @tw.kernel
        def taken(x: tw.Array[tw.f32], places: tw.Array[tw.i32]):
            n = places.shape[0]
            out = tw.empty(n, tw.f32)
            for i in tw.grid(n):
                out[i] = x[places[i]]
            return out

        @tw.kernel
        def k(a: tw.Array[tw.f32], places: tw.Array[tw.i32]):
            return taken(taken(a, places), places)
    """
    typed = check_kernel(kernels(text)["k"], [ArrayArg(f32, 1), ArrayArg(i32, 1)])
    assert show_typed(typed).splitlines()[0].startswith("kernel k(a: f32[")


def test_annotations_of_the_called_kernel_are_kept() -> None:
    text = """
        from typing import Annotated

        @tw.kernel
        def total(x: Annotated[tw.Array, "f32[n, 4]"], y: Annotated[tw.Array, "f32[n]"]):
            s = 0.0
            for i in range(n):
                s += x[i, 0] * y[i]
            return s

        @tw.kernel
        def k(a, b):
            return total(a, b)
    """
    function = kernels(text)["k"]
    typed = check_kernel(function, [ArrayArg(f32, 2), ArrayArg(f32, 1)])
    assert show_typed(typed).splitlines()[0] == "kernel k(a: f32[n, 4], b: f32[n]) -> result: f32[]"
    with pytest.raises(UserError) as caught:
        check_kernel(function, [ArrayArg(f64, 2), ArrayArg(f32, 1)])
    assert str(caught.value) == textwrap.dedent("""\
        k.py:15:18: error[TW009]: total's 'x' must be f32, got f64
            |
         15 |     return total(a, b)
            |                  ^""")
    with pytest.raises(UserError, match=r"TW003.*total's 'y' must have rank 1, got 2"):
        check_kernel(function, [ArrayArg(f32, 2), ArrayArg(f32, 2)])


CALLED = """
    @tw.kernel
    def rows(x: tw.Array):
        n, m = x.shape
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i, 0]
        return out

    @tw.kernel
    def nothing(x):
        y = x

    @tw.kernel
    def either(x):
        if x[0, 0] > 0:
            return x
        return x

    @tw.kernel
    def k(x):
        return {call}
"""


def test_errors_show_the_place_and_the_call() -> None:
    assert message(CALLED.format(call="rows(x)"), 1) == textwrap.dedent("""\
        k.py:6:5: error[TW003]: 'x' has rank 1, but 2 names are given
           |
         6 |     n, m = x.shape
           |     ^^^^^^^^^^^^^^
        k.py:24:12: called here
            |
         24 |     return rows(x)
            |            ^^^^^^^""")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("rows(x, x)", "k.py:24:12: error[TW016]: rows(x) takes 1 argument(s), got 2"),
        ("rows()", "k.py:24:12: error[TW016]: rows(x) is missing 'x'"),
        ("rows(y=x)", "k.py:24:17: error[TW016]: rows has no argument 'y'"),
        ("rows(x, x=x)", "k.py:24:20: error[TW016]: rows got 'x' twice"),
        ("rows(x, out=x)", "k.py:24:20: error[TW016]: rows has no argument 'out'"),
        ("rows(1.0)", "k.py:24:17: error[TW009]: rows's 'x' must be an array, got a number (f64)"),
        ("rows", "k.py:24:12: error[TW005]: the kernel 'rows' is not called"),
        ("nothing(x)", "k.py:24:12: error[TW017]: 'nothing' returns nothing"),
        ("k(x)", "k.py:24:12: error[TW005]: 'k' calls 'k': a kernel cannot call itself"),
    ],
)
def test_refused_calls(call: str, expected: str) -> None:
    text = CALLED.format(call=call)
    with pytest.raises(UserError) as caught:
        check_kernel(kernels(text)["k"], [ArrayArg(f32, 2)])
    assert str(caught.value).splitlines()[0] == expected


def test_kernels_that_call_one_another() -> None:
    text = """
        @tw.kernel
        def f(x):
            return g(x)

        @tw.kernel
        def g(x):
            return f(x) + 1
    """
    with pytest.raises(UserError, match=r"TW005.*'f' calls 'g' calls 'f': a kernel cannot call itself"):
        kernels(text)


def test_arrays_cannot_be_made_in_a_loop() -> None:
    text = """
        @tw.kernel
        def copied(x):
            out = tw.empty_like(x)
            for i in tw.grid(len(x)):
                out[i] = x[i]
            return out

        @tw.kernel
        def k(x):
            s = 0.0
            for i in range(len(x)):
                s += copied(x)[i]
            return s
    """
    assert message(text, 1).splitlines()[0] == "k.py:6:11: error[TW005]: empty_like() in a loop makes nothing"


def test_calls_in_the_condition_of_a_while() -> None:
    text = """
        @tw.kernel
        def half(x):
            y = x / 2
            return y

        @tw.kernel
        def k(x):
            v = x[0]
            while half(v) > 1:
                v = v - 1
            return v
    """
    assert message(text, 1).splitlines()[0] == "k.py:12:11: error[TW005]: a kernel called in the condition of a while"


def test_functions_of_zynml_become_the_same_typed_tree() -> None:
    python = kernels("""
        @tw.kernel
        def half(x):
            y = x / 2.0
            return y

        @tw.kernel
        def k(x):
            rows, cols = x.shape
            out = tw.empty((rows, cols), x.dtype)
            for i, j in tw.grid(rows, cols):
                out[i, j] = half(x[i, j])
            return out
    """)["k"]
    text = """
fn half(x):
    let y = x / 2.0
    return y

let k = compute(x) {
    for i in 0..rows, j in 0..cols:
        out[i, j] = half(x[i, j])
}
"""
    seen: list[syntax.Function] = []

    def run(function: syntax.Function, arguments: dict[str, object], device: str) -> object:
        seen.append(function)
        return 0.0

    from tilewright.zyn.module import ZynModule

    ZynModule(parse_module(text), run).run(x=0.0)
    lines = [show_typed(check_kernel(f, [ArrayArg(f32, 2)])).splitlines() for f in (python, seen[0])]
    assert lines[0] == [line for line in lines[1] if "@kernel" not in line or line in lines[0]]
