"""Exact text of what the checker says about slices, tiles, shared arrays and barriers."""

from __future__ import annotations

import textwrap

import pytest
from test_check_errors import a, compute, loop, message, python

from tilewright.base.dtypes import i64

ZYNML = {
    "across elements": ("x, w", """
        for i in 0..r step 4:
            var p = zeros(4, c)
            for k in 0..3:
                p = p @ w + x[i:i+4]
            out[i:i+4] = p""", [a(2), a(2)], """
        k.zyn:5:17: error[TW005]: 'p' changes in the loop and can only be used element by element
           |
         5 |             p = p @ w + x[i:i+4]
           |                 ^^^^^
        help: for a product, reduction or transpose keep it in a shared array"""),
    "made of what changed": ("x", """
        for i in 0..r step 4:
            var m = 1.0
            let s = x[i:i+4, 0:3] * m
            m = 2.0
            out[i:i+4] = s""", [a(2)], """
        k.zyn:6:9: error[TW005]: 's' is made of 'm', which has changed since
           |
         6 |         out[i:i+4] = s
           |         ^^^^^^^^^^^^^^
        help: use it before 'm' changes"""),
    "made of a tile that changed": ("x, w", """
        for i in 0..r step 4:
            var m = row_max(x[i:i+4])
            let s = x[i:i+4] - m
            m = m * 2.0
            out[i:i+4] = s @ w""", [a(2), a(2)], """
        k.zyn:6:22: error[TW005]: 's' is made of 'm', which has changed since
           |
         6 |         out[i:i+4] = s @ w
           |                      ^^^^^
        help: use it before 'm' changes"""),
    "changes in the loop below": ("x", """
        for i in 0..r:
            var m = 1.0
            let s = x[i] * m
            for k in 0..3:
                m += reduce(+, s)
            out[i] = m""", [a(2)], """
        k.zyn:6:18: error[TW005]: 's' is made of 'm', which has changed since
           |
         6 |             m += reduce(+, s)
           |                  ^^^^^^^^^^^^
        help: use it before 'm' changes"""),
    "slice starts below": ("x", """
        for i in 0..r:
            out[i] = reduce(+, x[i, i-1:i+1])""", [a(2)], """
        k.zyn:3:33: error[TW013]: the slice i - 1:i + 1 of 'x' starts at -1 on axis 1
           |
         3 |         out[i] = reduce(+, x[i, i-1:i+1])
           |                                 ^^^^^^^"""),
    "empty slice": ("x", """
        for i in 0..r:
            out[i] = reduce(+, x[i, 3:3])""", [a(2)], """
        k.zyn:3:33: error[TW013]: the slice 3:3 of 'x' is empty
           |
         3 |         out[i] = reduce(+, x[i, 3:3])
           |                                 ^^^"""),
    "too many indices": ("x", """
        for i in 0..r:
            out[i] = reduce(+, x[i, 0:2, 1])""", [a(2)], """
        k.zyn:3:28: error[TW003]: 'x' has rank 2 but is indexed with 3 indices
           |
         3 |         out[i] = reduce(+, x[i, 0:2, 1])
           |                            ^^^^^^^^^^^^"""),
    "lengths": ("x", """
        for i in 0..r:
            out[i] = dot(x[i, 0:3], x[i, 0:4])""", [a(2)], """
        k.zyn:3:18: error[TW004]: extents 3 and 4 do not match
           |
         3 |         out[i] = dot(x[i, 0:3], x[i, 0:4])
           |                  ^^^^^^^^^^^^^^^^^^^^^^^^^"""),
    "ranks of dot": ("x, w", """
        for i in 0..r:
            out[i] = dot(x[i], w)""", [a(2), a(2)], """
        k.zyn:3:18: error[TW003]: dot() takes two vectors, got ranks 1 and 2
           |
         3 |         out[i] = dot(x[i], w)
           |                  ^^^^^^^^^^^^"""),
    "ranks of a product": ("x, w", """
        for i in 0..r:
            out[i] = x[i, 0] @ w""", [a(2), a(2)], """
        k.zyn:3:18: error[TW003]: '@' takes vectors and matrices, got ranks 0 and 2
           |
         3 |         out[i] = x[i, 0] @ w
           |                  ^^^^^^^^^^^"""),
    "row of a number": ("x", """
        for i in 0..r:
            out[i] = row_max(x[i, 0])""", [a(2)], """
        k.zyn:3:18: error[TW003]: row_max() takes an array or a slice, got a number (f32)
           |
         3 |         out[i] = row_max(x[i, 0])
           |                  ^^^^^^^^^^^^^^^^"""),
    "barrier under a condition": ("x", """
        for i in 0..r:
            shared var s[7]
            if x[i, 0] > 0:
                barrier()
            out[i] = x[i, 0]""", [a(2)], """
        k.zyn:5:13: error[TW012]: barrier() under a condition: not every iteration would reach it
           |
         5 |             barrier()
           |             ^^^^^^^^^
        help: put it after the if"""),
    "barrier outside": ("x", """
        barrier()
        out = x""", [a(2)], """
        k.zyn:2:5: error[TW005]: barrier() outside loops
           |
         2 |     barrier()
           |     ^^^^^^^^^
        help: leave it out: nests run one after the other"""),
    "shared outside": ("x", """
        shared var s[7]
        out = x""", [a(2)], """
        k.zyn:2:5: error[TW005]: the shared array 's' must be in a loop
           |
         2 |     shared var s[7]
           |     ^^^^^^^^^^^^^^^
        help: an array of the whole kernel is made with zeros(…)"""),
    "shared not written": ("x", """
        for i in 0..r:
            shared var s[7]
            out[i] = s[0] + x[i, 0]""", [a(2)], """
        k.zyn:4:18: error[TW017]: 's' is read before anything is written to it
           |
         4 |         out[i] = s[0] + x[i, 0]
           |                  ^^^^
        help: store to it first, or make it with zeros"""),
    "shared in a loop without sizes": ("x, n", """
        for i in 0..r:
            for k in 0..n[i]:
                shared var s[7]
                s[0] = x[i, 0]
                out[i] = s[0]""", [a(2), a(1, i64)], """
        k.zyn:4:13: error[TW014]: the shared array 's' stands in a loop over 'k', whose range is not made of sizes
           |
         4 |             shared var s[7]
           |             ^^^^^^^^^^^^^^^"""),
    "outer variable": ("x", """
        var total = 0.0
        for i in 0..r step 4:
            var acc = zeros(4, c)
            acc += x[i:i+4]
            total += 1.0
            out[i:i+4] = acc""", [a(2)], """
        k.zyn:6:9: error[TW005]: 'total' is declared outside the loop whose tiles change and would change for each of their elements
           |
         6 |         total += 1.0
           |         ^^^^^^^^^^^^
        help: declare 'total' inside that loop, or change it in another loop"""),
    "two kinds of tiles": ("x", """
        for i in 0..r step 4:
            var a = zeros(4)
            var b = zeros(4, 7)
            a += x[i, 0]
            b += x[i:i+4]
            out_a[i:i+4] = a
            out_b[i:i+4] = b""", [a(2)], """
        k.zyn:4:9: error[TW004]: tiles that change in one loop have extents 4 and 7 along one axis
           |
         4 |         var b = zeros(4, 7)
           |         ^^^^^^^^^^^^^^^^^^^
        help: change them in loops of their own"""),
    "empty in a loop": ("x", """
        for i in 0..r step 4:
            var t = empty(4, f16)
            out[i] = x[i, 0]""", [a(2)], """
        k.zyn:3:17: error[TW005]: empty() in a loop makes nothing
           |
         3 |         var t = empty(4, f16)
           |                 ^^^^^^^^^^^^^
        help: write zeros(…) or full(…), or make the array at the top"""),
    "let": ("x", """
        for i in 0..r step 4:
            let t = x[i:i+4]
            t += 1.0
            out[i:i+4] = t""", [a(2)], """
        k.zyn:4:9: error[TW015]: 't' was declared with let and cannot change
           |
         4 |         t += 1.0
           |         ^^^^^^^^
        help: declare it with var t"""),
    "while": ("x", """
        for i in 0..r:
            var t = 0.0
            while t < reduce(+, x[i]):
                t += 100.0
            out[i] = t""", [a(2)], """
        k.zyn:4:15: error[TW005]: a reduction in the condition of a while
           |
         4 |         while t < reduce(+, x[i]):
           |               ^^^^^^^^^^^^^^^^^^^
        help: compute it into a variable, before and in the loop"""),
    "slice of a tile": ("x", """
        for i in 0..r:
            let t = x[i] * 2
            out[i] = reduce(+, t[0:2])""", [a(2)], """
        k.zyn:4:30: error[TW005]: a slice of the tile 't'
           |
         4 |         out[i] = reduce(+, t[0:2])
           |                              ^^^
        help: slice the array it is made from"""),
    "index of a tile": ("x", """
        for i in 0..r step 4:
            let t = x[i:i+4]
            out[i] = t[4, 0]""", [a(2)], """
        k.zyn:4:20: error[TW013]: index 4 of 't' reaches 4, but axis 0 has extent 4
           |
         4 |         out[i] = t[4, 0]
           |                    ^"""),
    "read where tiles change": ("x", """
        for i in 0..r step 4:
            var acc = zeros(4, c)
            for j in 0..3:
                out_t[0] = x[i, j]
                acc += x[i:i+4] * out_t[0]
            out[i:i+4] = acc""", [a(2)], """
        k.zyn:6:31: error[TW005]: 'out_t' is written in the loop whose tiles change and cannot be read there
           |
         6 |             acc += x[i:i+4] * out_t[0]
           |                               ^^^^^^^^
        help: read it in a loop of its own"""),
    "argmax over two axes": ("x", """
        for i in 0..r step 4:
            out[i] = reduce(argmax, x[i:i+4])""", [a(2)], """
        k.zyn:3:18: error[TW005]: argmax over several axes inside a loop
           |
         3 |         out[i] = reduce(argmax, x[i:i+4])
           |                  ^^^^^^^^^^^^^^^^^^^^^^^^
        help: give the axis, or loop over the elements"""),
    "slice of an input is written": ("x", """
        for i in 0..r:
            x[i, 0:3] = 0.0
            out[i] = 1.0""", [a(2)], """
        k.zyn:3:9: error[TW015]: 'x' is not an output and cannot be written
           |
         3 |         x[i, 0:3] = 0.0
           |         ^^^^^^^^^^^^^^^
        help: write to out[…], or to an out_… of its own; compute(inout x, …) writes it in place"""),
    "changing tile in a reduction": ("x", """
        @kernel reduce(+)
        for i in 0..r:
            var t = x[i, 0:3]
            t += 1.0
            yield reduce(+, t)""", [a(2)], """
        k.zyn:3:5: error[TW017]: a reduce kernel must yield a value
           |
         3 |     for i in 0..r:
           |     ^^^^^^^^^^^^^^
        help: write yield value inside the loop
        k.zyn:4:9: error[TW005]: a tile that changes cannot be in the loop of a reduce kernel
           |
         4 |         var t = x[i, 0:3]
           |         ^^^^^^^^^^^^^^^^^
        help: use @kernel fused and store to out"""),
    "yield where tiles change": ("x", """
        @kernel reduce(+)
        for i in 0..r:
            for j in 0..c step 4:
                var t = x[i, j:j+4]
                t += 1.0
                yield x[i, j]
            for j in 0..c:
                yield x[i, j]""", [a(2)], """
        k.zyn:7:13: error[TW005]: yield in a loop whose tiles change
           |
         7 |             yield x[i, j]
           |             ^^^^^^^^^^^^^
        help: yield after that loop"""),
}  # fmt: skip


@pytest.mark.parametrize("case", ZYNML)
def test_zynml(case: str) -> None:
    inputs, body, args, expected = ZYNML[case]
    text = f"let y = compute({inputs}) {{\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n}"
    assert message(compute(text), args) == textwrap.dedent(expected).strip("\n")


PYTHON = {
    "shared without a shape": ("x", loop("s = tw.shared()\n    out[i] = x[i]"), [a(1)], """
        k.py:6:13: error[TW016]: shared() takes shape, dtype and is assigned to a new name
           |
         6 |         s = tw.shared()
           |             ^^^^^^^^^^^
        help: write x = shared((n,), f32)"""),
    "barrier with an argument": ("x", loop("tw.barrier(1)\n    out[i] = x[i]"), [a(1)], """
        k.py:6:9: error[TW016]: barrier() takes 0 arguments, got 1
           |
         6 |         tw.barrier(1)
           |         ^^^^^^^^^^^^^"""),
    "a vector has no rows": ("x", loop("out[0:3] = x[0:3] + tw.row_sum(x[0:3] @ x[0:3])"), [a(1)], """
        k.py:6:29: error[TW003]: row_sum() takes an array or a slice, got a number (f32)
           |
         6 |         out[0:3] = x[0:3] + tw.row_sum(x[0:3] @ x[0:3])
           |                             ^^^^^^^^^^^^^^^^^^^^^^^^^^^"""),
    "rank of what is stored": ("x, m", loop("out[0:3] = m[0:3]"), [a(1), a(2)], """
        k.py:6:9: error[TW003]: the part of 'out' has rank 1, and the value has rank 2
           |
         6 |         out[0:3] = m[0:3]
           |         ^^^^^^^^^^^^^^^^^"""),
}  # fmt: skip


@pytest.mark.parametrize("case", PYTHON)
def test_python(case: str) -> None:
    params, body, args, expected = PYTHON[case]
    assert message(python(params, body), args) == textwrap.dedent(expected).strip("\n")
