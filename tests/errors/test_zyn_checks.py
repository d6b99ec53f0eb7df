"""Exact texts of what is said about ZynML programs, by `check` where it can be known and else by the call, on CPU and emulator alike."""

from __future__ import annotations

import textwrap

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import from_numpy
from tilewright.cli.guess import GuessedArguments
from tilewright.cli.sources import parse_source, walk

A = {"a": np.ones(3, np.float32)}
HALVES = {"a": np.ones(3, np.float16), "b": np.ones(3, ml_dtypes.bfloat16)}


def block(*lines: str, inputs: str = "a") -> str:
    return f"let r = compute({inputs}) {{\n" + "\n".join(f"    {line}" for line in lines) + "\n}\n"


CHECKED = {
    "rank": (block("for i in 0..n: out[i] = a[i, i]"), A, """
        k.zyn:2:29: error[TW003]: 'a' has rank 1 but is indexed with 2 indices
           |
         2 |     for i in 0..n: out[i] = a[i, i]
           |                             ^^^^^^^"""),
    "dtype": (block("for i in 0..n: out[i] = a[i] + b[i]", inputs="a, b"), HALVES, """
        k.zyn:2:29: error[TW006]: '+' mixes f16 with bf16, which would lose data
           |
         2 |     for i in 0..n: out[i] = a[i] + b[i]
           |                             ^^^^^^^^^^^
        help: convert one operand, as in cast(b[i], f16)"""),
    "unbound size": (block("for i in 0..n, j in 0..q: out[i, j] = a[i]"), A, """
        k.zyn:2:28: error[TW014]: size 'q' is not bound by any input; known sizes: n
           |
         2 |     for i in 0..n, j in 0..q: out[i, j] = a[i]
           |                            ^
        help: index an axis of an input with an index over 0..q"""),
    "index twice in a loop": (block("for i in 0..n, i in 0..n: out[i] = a[i]"), A, """
        k.zyn:2:5: error[TW010]: 'i' is already the index of a loop around it
           |
         2 |     for i in 0..n, i in 0..n: out[i] = a[i]
           |     ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        help: choose another name"""),
    "index of an outer loop": (block("for i in 0..n:", "    for i in 0..n: out[i] = a[i]"), A, """
        k.zyn:3:9: error[TW010]: 'i' is already the index of a loop around it
           |
         3 |         for i in 0..n: out[i] = a[i]
           |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        help: choose another name"""),
    "write to an input": (block("for i in 0..n: a[i] = 2.0"), A, """
        k.zyn:2:20: error[TW015]: 'a' is not an output and cannot be written
           |
         2 |     for i in 0..n: a[i] = 2.0
           |                    ^^^^^^^^^^
        help: write to out[…], or to an out_… of its own; compute(inout a, …) writes it in place"""),
    "write outside out": (block("for i in 0..n: out[i - 1] = a[i]"), A, """
        k.zyn:2:20: error[TW013]: index i - 1 of 'out' goes down to -1 on axis 0
           |
         2 |     for i in 0..n: out[i - 1] = a[i]
           |                    ^^^^^^^^^^^^^^^^^"""),
    "out read first": (block("for i in 0..n: out[i] = out[i] + a[i]"), A, """
        k.zyn:2:29: error[TW017]: 'out' is read before anything is written to it
           |
         2 |     for i in 0..n: out[i] = out[i] + a[i]
           |                             ^^^^^^
        help: store to out[…] first"""),
    "out added to first": (block("for i in 0..n: out[i] += a[i]"), A, """
        k.zyn:2:20: error[TW017]: 'out' is read before anything is written to it
           |
         2 |     for i in 0..n: out[i] += a[i]
           |                    ^^^^^^^^^^^^^^
        help: store to out[…] with = first"""),
    "matmul without a sum": (block("@kernel matmul", "for i in 0..n: out[i] = a[i] * 2"), A, """
        k.zyn:2:5: error[TW012]: @kernel matmul, but the block adds up nothing
           |
         2 |     @kernel matmul
           |     ^^^^^^^^^^^^^^
        help: accumulate with +=, or name another @kernel kind"""),
    "matmul in a function": ("fn f(a):\n    return compute(a) {\n        @kernel matmul\n        for i in 0..n: out[i] = a[i] * 2\n    }\nlet r = f(a)\n", A, """
        k.zyn:3:9: error[TW012]: @kernel matmul, but the block adds up nothing
           |
         3 |         @kernel matmul
           |         ^^^^^^^^^^^^^^
        help: accumulate with +=, or name another @kernel kind"""),
    "matmul that is a row sum": (block("@kernel matmul", "for i in 0..n:", "    var s = 0.0", "    for k in 0..n: s += a[k]", "    out[i] = s + a[i]"), A, """
        k.zyn:1:9: error[TW012]: @kernel matmul, but the loops are no such thing: nothing adds up products of two factors, one that varies along some results and one along others
           |
         1 | let r = compute(a) {
           |         ^^^^^^^^^^^^
        help: add up a[i, k] * b[k, j] over k and store the sum, or name another @kernel kind"""),
    "attention without weights": (block("@kernel attention", "for i in 0..n:", "    var s = 0.0", "    for k in 0..n: s += a[k]", "    out[i] = s + a[i]"), A, """
        k.zyn:2:5: error[TW012]: @kernel attention, but the block weighs nothing: it has no exp
           |
         2 |     @kernel attention
           |     ^^^^^^^^^^^^^^^^^
        help: name another @kernel kind"""),
    "unknown attribute": (block("@tyle(3)", "for i in 0..n: out[i] = a[i] * 2"), A, """
        k.zyn:2:5: error[TW011]: unknown attribute '@tyle'
           |
         2 |     @tyle(3)
           |     ^^^^^^^^
        help: did you mean 'tile'?"""),
    "shared memory": (block("@shared(1MB)", "for i in 0..n: out[i] = a[i] * 2"), A, """
        k.zyn:2:5: error[TW020]: @shared asks for 1048576 bytes, and a block has at most 232448 on any target
           |
         2 |     @shared(1MB)
           |     ^^^^^^^^^^^^
        help: ask for less"""),
    "threads": (block("@workgroup(64, 64)", "for i in 0..n: out[i] = a[i] * 2"), A, """
        k.zyn:2:5: error[TW020]: @workgroup asks for 4096 threads, and a block has at most 1024
           |
         2 |     @workgroup(64, 64)
           |     ^^^^^^^^^^^^^^^^^^
        help: ask for fewer"""),
    "barrier under if": (block("for i in 0..n:", "    if a[i] > 0: barrier()", "    out[i] = a[i]"), A, """
        k.zyn:3:22: error[TW012]: barrier() under a condition: not every iteration would reach it
           |
         3 |         if a[i] > 0: barrier()
           |                      ^^^^^^^^^
        help: put it after the if"""),
    "barrier in an uneven loop": (block("for i in 0..n:", "    for j in 0..i: barrier()", "    out[i] = a[i]"), A, """
        k.zyn:3:24: error[TW012]: barrier() in the loop over 'j', whose range is not the same for all iterations around it: not all would reach it
           |
         3 |         for j in 0..i: barrier()
           |                        ^^^^^^^^^
        help: let the loop run over sizes"""),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKED)
def test_checked(case: str) -> None:
    text, inputs, expected = CHECKED[case]
    known = {name: GuessedArguments(dtype, (None,) * value.ndim) for name, value in inputs.items() if (dtype := from_numpy(value.dtype)) is not None}
    errors = walk(parse_source(text, "k.zyn"), known).errors
    assert "\n".join(error.render() for error in errors) == textwrap.dedent(expected).strip("\n")


@pytest.mark.parametrize("case", CHECKED)
def test_a_run_says_the_same(case: str) -> None:
    text, inputs, expected = CHECKED[case]
    with pytest.raises(tw.UserError) as caught:
        tw.load(text).run(device="cpu", **inputs)
    assert str(caught.value).replace("<string>", "k.zyn") == textwrap.dedent(expected).strip("\n")


PRODUCT = block("for i in 0..M, j in 0..N:", "    var s = 0.0", "    for k in 0..K: s += a[i, k] * b[k, j]", "    out[i, j] = s", inputs="a, b")
CONFLICTS = {
    "product": (PRODUCT, (3, 4), (5, 6), "axis 0 of 'b' is 5, but 'K' is 4 (axis 1 of 'a')", "let r = compute(a, b) {", 15),
    "elementwise": (block("for i in 0..n: out[i] = a[i] + b[i]", inputs="a, b"), (3,), (4,), "axis 0 of 'b' is 4, but 'n' is 3 (axis 0 of 'a')", "let r = compute(a, b) {", 15),
    "whole arrays": ("let r = a + b\n", (3,), (4,), "axis 0 of 'b' is 4, but its counterpart is 3 (axis 0 of 'a')", "let r = a + b", 5),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("case", CONFLICTS)
def test_dimension_conflicts_name_both_inputs_and_their_sizes(case: str, device: str) -> None:
    text, first, second, said, line, width = CONFLICTS[case]
    with pytest.raises(tw.UserError) as caught:
        tw.load(text).run(device=device, a=np.ones(first, np.float32), b=np.ones(second, np.float32))
    assert str(caught.value) == f"<string>:1:9: error[TW004]: size mismatch: {said}\n   |\n 1 | {line}\n   |         {'^' * width}"


def test_every_error_of_a_block_comes_at_once() -> None:
    text = block("for i in 0..n:", "    out[i] = a[i, i]", "    a[i] = 1.0", "    out_b[i] = sinn(a[i])")
    errors = walk(parse_source(text, "k.zyn"), {"a": GuessedArguments(tw.f32, (None,))}).errors
    assert [(error.code, error.span.line) for error in errors] == [("TW003", 3), ("TW015", 4), ("TW002", 5)]
