"""Exact text of what the checker says. Each case is a kernel and the whole message."""

from __future__ import annotations

import textwrap

import pytest

from tilewright.base.dtypes import DType, bf16, f16, f64, i8, i64, u64
from tilewright.base.dtypes import f32 as single
from tilewright.base.errors import Diagnostics, UserError
from tilewright.frontend.python.kernels import parse_python_file
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree import syntax
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.typed import ArgSpec, ArrayArg, NoneArg, ScalarArg


def a(rank: int, dtype: DType = single) -> ArrayArg:
    return ArrayArg(dtype, rank)


def python(params: str, body: str) -> syntax.Function:
    text = f"import tilewright as tw\n@tw.kernel\ndef k({params}):\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ")
    (function,) = parse_python_file(text + "\n", "k.py")
    return function


def compute(text: str) -> syntax.Function:
    statement = parse_module(textwrap.dedent(text).strip() + "\n", "k.zyn").body[0]
    assert isinstance(statement, syntax.Let)
    block = statement.value
    assert isinstance(block, syntax.Compute)
    params = tuple(syntax.Param(i.id, span=i.span) for i in block.inputs if isinstance(i, syntax.Name))
    return syntax.Function("k", params, None, block.body, "compute", block.attributes, span=block.span)


def message(function: syntax.Function, args: list[ArgSpec]) -> str:
    with pytest.raises(UserError) as caught:
        check_kernel(function, args)
    return str(caught.value)


def loop(statement: str) -> str:
    return f"out = tw.empty_like(x)\nfor i in range(len(x)):\n    {statement}\nreturn out"


PYTHON = {
    "unknown array": ("x, y", loop("out[i] = z[i]"), [a(1), a(1)], """
        k.py:6:18: error[TW002]: unknown name 'z'
           |
         6 |         out[i] = z[i]
           |                  ^
        help: known arrays: x, y, out"""),
    "unknown function": ("x", loop("out[i] = tw.expp(x[i])"), [a(1)], """
        k.py:6:18: error[TW002]: unknown function 'expp'
           |
         6 |         out[i] = tw.expp(x[i])
           |                  ^^^^^^^
        help: did you mean 'exp'?"""),
    "rank": ("x", loop("out[i] = x[i, 0]"), [a(1)], """
        k.py:6:18: error[TW003]: 'x' has rank 1 but is indexed with 2 indices
           |
         6 |         out[i] = x[i, 0]
           |                  ^^^^^^^"""),
    "whole array as element": ("x", loop("out[i] = x"), [a(1)], """
        k.py:6:9: error[TW003]: an element of 'out' is a number, and the value has rank 1
           |
         6 |         out[i] = x
           |         ^^^^^^^^^^
        help: index the arrays in it"""),
    "shape of another rank": ("m", "r, c, d = m.shape\nreturn tw.sum(m)", [a(2)], """
        k.py:4:5: error[TW003]: 'm' has rank 2, but 3 names are given
           |
         4 |     r, c, d = m.shape
           |     ^^^^^^^^^^^^^^^^^"""),
    "axis": ("x", "return tw.sum(x, axis=2)", [a(1)], """
        k.py:4:27: error[TW003]: axis 2 of an array of rank 1
           |
         4 |     return tw.sum(x, axis=2)
           |                           ^"""),
    "out of range": ("x", loop("out[i] = x[i + 1]"), [a(1)], """
        k.py:6:18: error[TW013]: index i + 1 of 'x' reaches x.shape[0], but axis 0 has extent x.shape[0]
           |
         6 |         out[i] = x[i + 1]
           |                  ^^^^^^^^"""),
    "below zero": ("x", loop("out[i] = x[i - 1]"), [a(1)], """
        k.py:6:18: error[TW013]: index i - 1 of 'x' goes down to -1 on axis 0
           |
         6 |         out[i] = x[i - 1]
           |                  ^^^^^^^^"""),
    "write to an input": ("x", loop("x[i] = 1.0"), [a(1)], """
        k.py:6:9: error[TW015]: 'x' is an input and cannot be written
           |
         6 |         x[i] = 1.0
           |         ^^^^^^^^^^
        help: make an output and write to that, or annotate it as tw.InOut"""),
    "float into integers": ("x", loop("out[i] = x[i] * 0.5"), [a(1, i8)], """
        k.py:6:9: error[TW006]: 'out' is i8, and f64 does not fit it
           |
         6 |         out[i] = x[i] * 0.5
           |         ^^^^^^^^^^^^^^^^^^^
        help: write cast(f64(x[i]) * 0.5, i8)"""),
    "f16 with bf16": ("x, y", loop("out[i] = x[i] + y[i]"), [a(1, f16), a(1, bf16)], """
        k.py:6:18: error[TW006]: '+' mixes f16 with bf16, which would lose data
           |
         6 |         out[i] = x[i] + y[i]
           |                  ^^^^^^^^^^^
        help: convert one operand, as in cast(y[i], f16)"""),
    "u64 with i64": ("x, y", loop("out[i] = x[i] < y[i]"), [a(1, u64), a(1, i64)], """
        k.py:6:18: error[TW006]: '<' mixes u64 with i64, which would lose data
           |
         6 |         out[i] = x[i] < y[i]
           |                  ^^^^^^^^^^^
        help: convert one operand, as in cast(y[i], u64)"""),
    "literal too large": ("x", loop("out[i] = x[i] + 1000"), [a(1, i8)], """
        k.py:6:25: error[TW006]: 1000 does not fit i8 (-128 to 127)
           |
         6 |         out[i] = x[i] + 1000
           |                         ^^^^
        help: cast the other operand to a wider dtype"""),
    "arity": ("x", loop("out[i] = tw.exp(x[i], 2)"), [a(1)], """
        k.py:6:18: error[TW016]: exp() takes 1 argument, got 2
           |
         6 |         out[i] = tw.exp(x[i], 2)
           |                  ^^^^^^^^^^^^^^^"""),
    "float index": ("x", loop("out[i] = x[x[i]]"), [a(1)], """
        k.py:6:20: error[TW009]: an index of 'x' must be an integer, got f32
           |
         6 |         out[i] = x[x[i]]
           |                    ^^^^"""),
    "slice": ("x", loop("out[i] = x[i:3]"), [a(1)], """
        k.py:6:9: error[TW003]: an element of 'out' is a number, and the value has rank 1
           |
         6 |         out[i] = x[i:3]
           |         ^^^^^^^^^^^^^^^
        help: index the arrays in it"""),
    "index assigned": ("x", loop("i = 3"), [a(1)], """
        k.py:6:9: error[TW010]: 'i' is the index of a loop around it and cannot be assigned to
           |
         6 |         i = 3
           |         ^^^^^
        help: choose another name"""),
    "index again": ("x", loop("for i in range(3):\n        out[i] = x[i]"), [a(1)], """
        k.py:6:9: error[TW010]: 'i' is already the index of a loop around it
           |
         6 |         for i in range(3):
           |         ^^^^^^^^^^^^^^^^^^
        help: choose another name"""),
    "never written": ("x", "out = tw.empty_like(x)\nreturn out", [a(1)], """
        k.py:3:1: error[TW017]: output 'out' is never written
           |
         3 | def k(x):
           | ^^^^^^^^^
        help: store to out[…]"""),
    "read first": ("x", loop("out[i] += x[i]"), [a(1)], """
        k.py:6:9: error[TW017]: 'out' is read before anything is written to it
           |
         6 |         out[i] += x[i]
           |         ^^^^^^^^^^^^^^
        help: store to it first, or make it with zeros"""),
    "no result": ("x", "for i in range(len(x)):\n    y = x[i]", [a(1)], """
        k.py:3:1: error[TW017]: 'k' returns nothing
           |
         3 | def k(x):
           | ^^^^^^^^^
        help: return the arrays it makes"""),
    "extent from an element": ("x", "out = tw.empty((x[0],), tw.f32)\nreturn out", [a(1, i64)], """
        k.py:4:20: error[TW014]: extent x[0] is not made of sizes of the inputs and whole numbers
           |
         4 |     out = tw.empty((x[0],), tw.f32)
           |                    ^^^^^^^
        help: use x.shape[…], an int parameter or a constant"""),
    "extent from a number with a fraction": ("x, n", "out = tw.empty((n,), tw.f32)\nreturn out", [a(1), ScalarArg(f64, weak=True)], """
        k.py:4:20: error[TW014]: extent n is not made of sizes of the inputs and whole numbers
           |
         4 |     out = tw.empty((n,), tw.f32)
           |                    ^^^^
        help: use x.shape[…], an int parameter or a constant"""),
    "None that is used": ("x: tw.Array, bias: tw.Array | None", "out = tw.empty_like(x)\nfor i in tw.grid(len(x)):\n    out[i] = x[i] + bias[i]\nreturn out", [a(1), NoneArg()], """
        k.py:6:25: error[TW009]: 'bias' is None here
           |
         6 |         out[i] = x[i] + bias[i]
           |                         ^^^^
        help: use it under 'if bias is not None:'"""),
    "None for an array": ("x: tw.Array, bias: tw.Array", "return x + bias", [a(1), NoneArg()], """
        k.py:3:20: error[TW009]: 'bias' must be an array, got None
           |
         3 | def k(x: tw.Array, bias: tw.Array):
           |                    ^^^^^^^^^^^^^^
        help: annotate it as 'tw.Array | None' where it may be left out"""),
    "race in a grid": ("m", "out = tw.empty((4,), tw.f32)\nfor i, j in tw.grid(4, m.shape[1]):\n    out[i] = m[i, j]\nreturn out", [a(2)], """
        k.py:6:9: error[TW012]: every 'j' of the grid stores to the same out[i]
           |
         6 |         out[i] = m[i, j]
           |         ^^^^^^^^^^^^^^^^
        help: accumulate over 'j' in an inner range loop"""),
    "carried in a grid": ("x", "y = 0.0\nfor i in tw.grid(len(x)):\n    y = y * 0.5 + x[i]\nreturn y", [a(1)], """
        k.py:5:5: error[TW012]: grid runs its iterations in any order, but 'y' is carried from one to the next
           |
         5 |     for i in tw.grid(len(x)):
           |     ^^^^^^^^^^^^^^^^^^^^^^^^^
        help: use range for a loop whose order matters"""),
    "number of arguments": ("x, y", "return tw.sum(x)", [a(1)], """
        k.py:3:1: error[TW016]: k(x, y) takes 2 arguments, got 1
           |
         3 | def k(x, y):
           | ^^^^^^^^^^^^"""),
}  # fmt: skip


@pytest.mark.parametrize("case", PYTHON)
def test_python(case: str) -> None:
    params, body, args, expected = PYTHON[case]
    assert message(python(params, body), args) == textwrap.dedent(expected).strip("\n")


ZYNML = {
    "attribute": ("""
        let r = compute(x) {
            @workgrup(16)
            for i in 0..n: out[i] = x[i]
        }""", [a(1)], """
        k.zyn:2:5: error[TW011]: unknown attribute '@workgrup'
           |
         2 |     @workgrup(16)
           |     ^^^^^^^^^^^^^
        help: did you mean 'workgroup'?"""),
    "kind": ("""
        let r = compute(x) {
            @kernel elementwize
            for i in 0..n: out[i] = x[i]
        }""", [a(1)], """
        k.zyn:2:13: error[TW011]: unknown kernel kind 'elementwize'
           |
         2 |     @kernel elementwize
           |             ^^^^^^^^^^^
        help: did you mean 'elementwise'?"""),
    "unbound size": ("""
        let r = compute(A, B) {
            for i in 0..M, j in 0..N:
                var s = 0.0
                for k in 0..K:
                    s += A[i, j] * B[j]
                out[i, j] = s
        }""", [a(2), a(1)], """
        k.zyn:4:21: error[TW014]: size 'K' is not bound by any input; known sizes: M, N
           |
         4 |         for k in 0..K:
           |                     ^
        help: index an axis of an input with an index over 0..K"""),
    "redeclared index": ("""
        let r = compute(x, c) {
            @kernel elementwise
            for b in 0..batch, s in 0..seq:
                let s = c[s]
                out[b, s] = x[b, s] * s
        }""", [a(2), a(1)], """
        k.zyn:4:9: error[TW010]: 's' is the index of a loop around it and cannot be declared again
           |
         4 |         let s = c[s]
           |         ^^^^^^^^^^^^
        help: choose another name"""),
    "elementwise accumulates": ("""
        let r = compute(x) {
            @kernel elementwise
            for i in 0..n:
                var s = 0.0
                for j in 0..m:
                    s += x[i, j]
                out[i] = s
        }""", [a(2)], """
        k.zyn:5:9: error[TW012]: an elementwise kernel computes each element on its own, but the loop over 'j' carries values
           |
         5 |         for j in 0..m:
           |         ^^^^^^^^^^^^^^
        help: use @kernel reduce or @kernel fused"""),
    "unknown scalar": ("""
        let r = compute(x) {
            for i in 0..n: out[i] = x[i] + epz
        }""", [a(1)], """
        k.zyn:2:36: error[TW002]: unknown name 'epz'
           |
         2 |     for i in 0..n: out[i] = x[i] + epz
           |                                    ^^^
        help: known names: x, n"""),
    "let does not change": ("""
        let r = compute(x) {
            for i in 0..n:
                let y = x[i]
                y += 1.0
                out[i] = y
        }""", [a(1)], """
        k.zyn:4:9: error[TW015]: 'y' was declared with let and cannot change
           |
         4 |         y += 1.0
           |         ^^^^^^^^
        help: declare it with var y"""),
    "no yield": ("""
        let r = compute(x) {
            @kernel reduce(+)
            for i in 0..n:
                let y = x[i]
        }""", [a(1)], """
        k.zyn:3:5: error[TW017]: a reduce kernel must yield a value
           |
         3 |     for i in 0..n:
           |     ^^^^^^^^^^^^^^
        help: write yield value inside the loop"""),
    "yield elsewhere": ("""
        let r = compute(x) {
            for i in 0..n: yield x[i]
        }""", [a(1)], """
        k.zyn:2:20: error[TW012]: yield is only for reduce kernels
           |
         2 |     for i in 0..n: yield x[i]
           |                    ^^^^^^^^^^
        help: write @kernel reduce(…), or store to out[…]"""),
    "reduction axis": ("""
        let r = compute(x) {
            @kernel reduce(+, axis=1)
            for i in 0..n:
                yield x[i]
        }""", [a(1)], """
        k.zyn:3:5: error[TW003]: axis 1 of a reduction over 1 loop indices
           |
         3 |     for i in 0..n:
           |     ^^^^^^^^^^^^^^"""),
    "no output": ("""
        let r = compute(x) {
            for i in 0..n:
                let y = x[i]
        }""", [a(1)], """
        k.zyn:1:9: error[TW017]: the kernel writes no output
           |
         1 | let r = compute(x) {
           |         ^^^^^^^^^^^^
        help: write out[…] = …, or yield in a reduce kernel"""),
}  # fmt: skip


@pytest.mark.parametrize("case", ZYNML)
def test_zynml(case: str) -> None:
    text, args, expected = ZYNML[case]
    assert message(compute(text), args) == textwrap.dedent(expected).strip("\n")


def test_all_errors_come_together_in_order() -> None:
    function = python("x", """
        out = tw.empty((len(x),), tw.f32)
        for i in range(len(x)):
            out[i] = x[i, i]
            out[i] = tw.sin()
            x[i] = q
        return out
        """)  # fmt: skip
    sink = Diagnostics()
    with pytest.raises(UserError) as caught:
        check_kernel(function, [a(1)], sink)
    assert [(d.code, d.span.line) for d in caught.value.diagnostics] == [("TW003", 6), ("TW016", 7), ("TW015", 8)]
    assert len(sink.errors) == 3
