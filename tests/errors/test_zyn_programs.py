"""Exact texts of what `tilewright check` says about whole ZynML programs: sizes that are told, attributes, what is never reached,
warnings; and that all errors of a program come at once, from a check and from a run.
"""

from __future__ import annotations

import textwrap

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import Diagnostic
from tilewright.cli.commands.check import in_order, warnings
from tilewright.cli.guess import parse_arguments
from tilewright.cli.sources import parse_source, walk


def block(*lines: str, inputs: str = "a", head: str = "") -> str:
    return f"let r = compute({inputs}){head} {{\n" + "\n".join(f"    {line}" for line in lines) + "\n}\n"


FUTURE = "let f = compute(x) @async {\n    for i in 0..n: out[i] = x[i] * 2\n}\n"

CHECKED = {
    "product sizes": (block("for i in 0..M, j in 0..N:", "    var s = 0.0", "    for k in 0..K: s += a[i, k] * b[k, j]", "    out[i, j] = s", inputs="a, b"), "a=f32[3,4] b=f32[5,6]", """
        k.zyn:1:9: error[TW004]: size mismatch: axis 0 of 'b' is 5, but 'K' is 4 (axis 1 of 'a')
           |
         1 | let r = compute(a, b) {
           |         ^^^^^^^^^^^^^^^"""),
    "sizes of a result": ("let h = compute(a) {\n    for i in 0..n: out[i] = a[i] * 2\n}\nlet r = h + b\n", "a=f32[3] b=f32[4]", """
        k.zyn:4:9: error[TW004]: size mismatch: axis 0 of 'b' is 4, but its counterpart is 3 (axis 0 of 'h')
           |
         4 | let r = h + b
           |         ^^^^^"""),
    "sizes in a type": ("fn f(x: tensor[n, k], y: tensor[k]):\n    print(n)\n    return x @ y\nlet r = f(a, b)\n", "a=f32[2,3] b=f32[4]", """
        k.zyn:4:9: error[TW004]: f: 'k' is 3 by axis 1 of 'x', but 4 by axis 0 of 'y'
           |
         4 | let r = f(a, b)
           |         ^^^^^^^
        help: give arrays whose sizes 'k' agree"""),
    "two conflicts": ("let r = a + b\nlet q = a * c\n", "a=f32[3] b=f32[4] c=f32[5]", """
        k.zyn:1:9: error[TW004]: size mismatch: axis 0 of 'b' is 4, but its counterpart is 3 (axis 0 of 'a')
           |
         1 | let r = a + b
           |         ^^^^^
        k.zyn:2:9: error[TW004]: size mismatch: axis 0 of 'c' is 5, but its counterpart is 3 (axis 0 of 'a')
           |
         2 | let q = a * c
           |         ^^^^^"""),
    "shared memory of sizes": (block("@shared(rows * cols * 4)", "for i in 0..rows, j in 0..cols: out[i, j] = a[i, j] * 2"), "a=f32[1000,1000]", """
        k.zyn:2:5: error[TW020]: @shared asks for 4000000 bytes, and a block has at most 232448 on any target
           |
         2 |     @shared(rows * cols * 4)
           |     ^^^^^^^^^^^^^^^^^^^^^^^^"""),
    "shared memory of an unknown size": (block("@shared(zork * 4)", "for i in 0..n: out[i] = a[i] * 2"), "", """
        k.zyn:2:5: error[TW014]: @shared: size 'zork' is not bound by any input
           |
         2 |     @shared(zork * 4)
           |     ^^^^^^^^^^^^^^^^^
        help: known sizes: n"""),
    "shared memory below nothing": (block("@shared(-4)", "for i in 0..n: out[i] = a[i] * 2"), "", """
        k.zyn:2:5: error[TW016]: @shared takes a number of bytes, or an expression of sizes
           |
         2 |     @shared(-4)
           |     ^^^^^^^^^^^
        help: write for example @shared(16 * 16 * 4)"""),
    "shared memory of a text": (block("@shared(\"much\")", "for i in 0..n: out[i] = a[i] * 2"), "", """
        k.zyn:2:5: error[TW016]: @shared takes a number of bytes, or an expression of sizes
           |
         2 |     @shared("much")
           |     ^^^^^^^^^^^^^^^
        help: write for example @shared(16 * 16 * 4)"""),
    "a kind given twice": (block("@kernel elementwise", "for i in 0..n: out[i] = a[i] * 2", head=" @kernel custom"), "", """
        k.zyn:2:5: error[TW012]: @kernel is given twice: line 1 has one
           |
         2 |     @kernel elementwise
           |     ^^^^^^^^^^^^^^^^^^^
        help: keep one of them"""),
    "threads given twice": (block("@workgroup(32)", "@workgroup(64)", "for i in 0..n: out[i] = a[i] * 2"), "", """
        k.zyn:3:5: error[TW012]: @workgroup is given twice: line 2 has one
           |
         3 |     @workgroup(64)
           |     ^^^^^^^^^^^^^^
        help: keep one of them"""),
    "a kind that is nearly known": (block("@kernel matmull", "for i in 0..n: out[i] = a[i] * 2"), "", """
        k.zyn:2:13: error[TW011]: unknown kernel kind 'matmull'
           |
         2 |     @kernel matmull
           |             ^^^^^^^
        help: did you mean 'matmul'?"""),
    "a batched product without a batch": (block("@kernel batched_matmul", "for i in 0..M, j in 0..N:", "    var s = 0.0", "    for k in 0..K: s += a[i, k] * b[k, j]", "    out[i, j] = s", inputs="a, b"), "", """
        k.zyn:2:5: error[TW012]: @kernel batched_matmul, but 'out' has two axes and no batch
           |
         2 |     @kernel batched_matmul
           |     ^^^^^^^^^^^^^^^^^^^^^^
        help: name it @kernel matmul"""),
    "elementwise with a sum": (block("@kernel elementwise", "for i in 0..n:", "    var s = 0.0", "    for k in 0..n: s += a[k]", "    out[i] = s"), "", """
        k.zyn:5:9: error[TW012]: an elementwise kernel computes each element on its own, but the loop over 'k' carries values
           |
         5 |         for k in 0..n: s += a[k]
           |         ^^^^^^^^^^^^^^^^^^^^^^^^
        help: use @kernel reduce or @kernel fused"""),
    "elementwise with a recurrence": (block("@kernel elementwise", "var s = 0.0", "for i in 0..n:", "    s = s * 0.5 + a[i]", "    out[i] = s"), "", """
        k.zyn:4:5: error[TW012]: an elementwise kernel computes each element on its own, but the loop over 'i' carries values
           |
         4 |     for i in 0..n:
           |     ^^^^^^^^^^^^^^
        help: use @kernel reduce or @kernel fused"""),
    "a reduction that yields nothing": (block("@kernel reduce(+)", "for i in 0..n: out[i] = a[i]"), "", """
        k.zyn:3:5: error[TW017]: a reduce kernel must yield a value
           |
         3 |     for i in 0..n: out[i] = a[i]
           |     ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        help: write yield value inside the loop"""),
    "yield without a reduction": (block("for i in 0..n: yield a[i]"), "", """
        k.zyn:2:20: error[TW012]: yield is only for reduce kernels
           |
         2 |     for i in 0..n: yield a[i]
           |                    ^^^^^^^^^^
        help: write @kernel reduce(…), or store to out[…]"""),
    "a convolution that is none": (block("@kernel conv2d", "for i in 0..n: out[i] = a[i]"), "", """
        k.zyn:2:5: error[TW012]: @kernel conv2d, but the block adds up nothing
           |
         2 |     @kernel conv2d
           |     ^^^^^^^^^^^^^^
        help: accumulate with +=, or name another @kernel kind"""),
    "a broadcast along another axis": (block("@broadcast(b, axis=0)", "for i in 0..n, j in 0..m: out[i, j] = a[i, j] * b[j]", inputs="a, b"), "", """
        k.zyn:2:5: error[TW012]: @broadcast(b, axis=0), but 'b' is read with 'j', which is axis 1 of 'out'
           |
         2 |     @broadcast(b, axis=0)
           |     ^^^^^^^^^^^^^^^^^^^^^
        help: write @broadcast(b, axis=1)"""),
    "a broadcast of nothing": (block("@broadcast(q)", "for i in 0..n: out[i] = a[i]"), "", """
        k.zyn:2:5: error[TW002]: @broadcast names 'q', which is not an input
           |
         2 |     @broadcast(q)
           |     ^^^^^^^^^^^^^
        help: inputs: a"""),
    "a barrier in a while": (block("for i in 0..n:", "    var v = a[i]", "    while v > 1:", "        v = v * 0.5", "        barrier()", "    out[i] = v"), "", """
        k.zyn:6:13: error[TW012]: barrier() in a while: not every iteration would reach it as often
           |
         6 |             barrier()
           |             ^^^^^^^^^
        help: put it after the while"""),
    "an index that is assigned": (block("for i in 0..n:", "    i = 3", "    out[i] = a[i]"), "", """
        k.zyn:3:9: error[TW010]: 'i' is the index of a loop around it and cannot be assigned to
           |
         3 |         i = 3
           |         ^^^^^
        help: choose another name"""),
    "nothing written": (block("for i in 0..n: let _t = a[i]"), "", """
        k.zyn:1:9: error[TW017]: the kernel writes no output
           |
         1 | let r = compute(a) {
           |         ^^^^^^^^^^^^
        help: write out[…] = …, or yield in a reduce kernel"""),
    "await after return": (FUTURE + "fn g(x):\n    return x\n    let y = await f\nlet r = g(x)\n", "", """
        k.zyn:6:5: error[TW005]: this await is never reached: line 5 has returned
           |
         6 |     let y = await f
           |     ^^^^^^^^^^^^^^^
        help: remove it"""),
    "await after both ways": (FUTURE + "fn g(x, k):\n    if k > 1:\n        return x\n    else:\n        return -x\n    print(await f)\nlet r = g(x, 2)\n", "", """
        k.zyn:9:5: error[TW005]: this await is never reached: both ways through the if of line 5 have returned
           |
         9 |     print(await f)
           |     ^^^^^^^^^^^^^^
        help: remove it"""),
    "await after an endless loop": (FUTURE + "while true:\n    print(1)\nlet r = await f\n", "", """
        k.zyn:6:1: error[TW005]: this await is never reached: the loop of line 4 never ends
           |
         6 | let r = await f
           | ^^^^^^^^^^^^^^^
        help: remove it"""),
    "await under false": (FUTURE + "if false:\n    print(await f)\n", "", """
        k.zyn:5:5: error[TW005]: this await is never reached: the condition of line 4 is always false
           |
         5 |     print(await f)
           |     ^^^^^^^^^^^^^^
        help: remove it"""),
    "await under not true": (FUTURE + "if true:\n    print(1)\nelse:\n    print(await f)\n", "", """
        k.zyn:7:5: error[TW005]: this await is never reached: the condition of line 4 is always true
           |
         7 |     print(await f)
           |     ^^^^^^^^^^^^^^
        help: remove it"""),
    "await of a result": (FUTURE.replace(" @async", "") + "let r = await f\n", "", """
        k.zyn:4:9: error[TW009]: await of 'f', which is no future
           |
         4 | let r = await f
           |         ^^^^^^^
        help: mark the block that makes it @async"""),
}  # fmt: skip

WARNED = {
    "a block": ("compute(x) { for i in 0..n: out[i] = x[i] }\n", """
        k.zyn:1:1: warning[TW019]: the result of this block is not used
           |
         1 | compute(x) { for i in 0..n: out[i] = x[i] }
           | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        help: name it: let result = …"""),
    "an expression": ("x + 1\n", """
        k.zyn:1:1: warning[TW019]: the result of this expression is not used
           |
         1 | x + 1
           | ^^^^^
        help: name it: let result = …"""),
    "a name in a kernel": (block("for i in 0..n:", "    let t = a[i]", "    out[i] = a[i]"), """
        k.zyn:3:9: warning[TW019]: 't' is never used
           |
         3 |         let t = a[i]
           |         ^^^^^^^^^^^^
        help: leave it out, or let its name begin with _"""),
    "a name in a function": ("fn f(x):\n    let t = x * 2\n    return x\nlet r = f(x)\n", """
        k.zyn:2:5: warning[TW019]: 't' is never used
           |
         2 |     let t = x * 2
           |     ^^^^^^^^^^^^^
        help: leave it out, or let its name begin with _"""),
}  # fmt: skip


def shown(found: list[Diagnostic]) -> str:
    return "\n".join(diagnostic.render() for diagnostic in in_order(found))


@pytest.mark.parametrize("case", CHECKED)
def test_checked(case: str) -> None:
    text, arguments, expected = CHECKED[case]
    assert shown(walk(parse_source(text, "k.zyn"), parse_arguments(arguments)).errors) == textwrap.dedent(expected).strip("\n")


@pytest.mark.parametrize("case", WARNED)
def test_warned(case: str) -> None:
    text, expected = WARNED[case]
    file = parse_source(text, "k.zyn")
    assert shown(warnings(file)) == textwrap.dedent(expected).strip("\n")
    assert not walk(file, {}).errors


RIGHT = {
    "sizes that agree": (CHECKED["product sizes"][0], "a=f32[3,4] b=f32[4,6]"),
    "sizes nobody knows": (CHECKED["product sizes"][0], "a=f32[3,*] b=f32[5,6]"),
    "a split result": ("let (p, q) = split(a, 2, axis=1)\nlet r = p + b\n", "a=f32[3,8] b=f32[3,4]"),
    "a transposed result": ("let r = transpose(a) + b\n", "a=f32[3,8] b=f32[8,3]"),
    "a reshaped result": ("let r = reshape(a, [k, 4]) + b\n", "a=f32[6,2] b=f32[3,4] k=int"),
    "joined arrays": ("let r = concat([a, b]) + c\n", "a=f32[3] b=f32[4] c=f32[7]"),
    "a part": ("let r = a[1:3] + b\n", "a=f32[30] b=f32[2]"),
    "sizes in a type": (CHECKED["sizes in a type"][0], "a=f32[2,3] b=f32[3]"),
    "enough shared memory": (CHECKED["shared memory of sizes"][0], "a=f32[100,100]"),
    "statements under false": ("if false:\n    print(1)\nlet r = a * 2\n", ""),
    "a loop that returns": ("fn f(x):\n    var k = 0\n    while true:\n        k += 1\n        if k > 3: return x * k\nlet r = f(a)\n", ""),
    "two broadcasts": (block("@broadcast(b, axis=1)", "@broadcast(c, axis=0)", "for i in 0..n, j in 0..m: out[i, j] = a[i, j] * b[j] + c[i]", inputs="a, b, c"), ""),
    "a while in a kernel": (block("for i in 0..n:", "    var v = a[i]", "    while v > 1: v = v * 0.5", "    out[i] = v"), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_right(case: str) -> None:
    text, arguments = RIGHT[case]
    assert shown(walk(parse_source(text, "k.zyn"), parse_arguments(arguments)).errors) == ""


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_a_call_asks_for_too_much_shared_memory(device: str) -> None:
    text = CHECKED["shared memory of sizes"][0]
    with pytest.raises(tw.UserError) as caught:
        tw.load(text).run(device=device, a=np.ones((300, 300), np.float32))
    assert str(caught.value).splitlines()[0] == (
        "<string>:1:9: error[TW020]: @shared asks for 360000 bytes, and a block has at most 232448 on any target (at <string>:2:5)"
    )
    assert tw.load(text).run(device=device, a=np.ones((30, 30), np.float32))["r"].shape == (30, 30)  # type: ignore[attr-defined]


MANY = """\
let p = compute(x) {
    for i in 0..n: out[i] = x[i] + w[i]
}
let q = compute(x) {
    @tyle(3)
    for i in 0..n: out[i] = sinn(x[i])
}
let s = foo(x)
y = 3
let t = compute(m, x) {
    for i in 0..n, j in 0..k: out[i, j] = m[i, j] + x[j]
}
fn f(z):
    return z
    let r = await z
let u = q + s
let v = compute(x) { for i in 0..n: yield x[i] }
"""
PLACES = [
    ("TW004", 1), ("TW011", 5), ("TW002", 6), ("TW002", 8), ("TW015", 9), ("TW004", 10), ("TW005", 15), ("TW012", 17),
]  # fmt: skip


def test_check_tells_all_errors_at_once() -> None:
    found = walk(parse_source(MANY, "k.zyn"), parse_arguments("x=f32[3] w=f32[4] m=f32[2,5]")).errors
    assert [(d.code, d.span.line) for d in in_order(found)] == PLACES


def test_a_run_tells_all_errors_at_once() -> None:
    given = {"x": np.ones(3, np.float32), "w": np.ones(4, np.float32), "m": np.ones((2, 5), np.float32)}
    with pytest.raises(tw.UserError) as caught:
        tw.load(MANY).run(**given)
    assert [(d.code, d.span.line) for d in caught.value.diagnostics] == PLACES


def test_a_run_that_meets_an_error_tells_those_behind_it() -> None:
    text = 'let p = a + b\nlet q = compute(a) {\n    for i in 0..n: out[i] = sinn(a[i])\n}\nlet r = a + read("nowhere.npy")\n'
    with pytest.raises(tw.UserError) as caught:
        tw.load(text).run(a=np.ones(3, np.float32), b=np.ones(4, np.float32))
    assert [d.render().splitlines()[0] for d in caught.value.diagnostics] == [
        "<string>:1:9: error[TW004]: size mismatch: axis 0 of 'b' is 4, but its counterpart is 3 (axis 0 of 'a')",
        "<string>:3:29: error[TW002]: unknown function 'sinn'",
    ]


def test_records_and_other_libraries_are_looked_at_too() -> None:
    text = "let p = a + model.w\nlet q = model.layers[0] @ a\nlet r = a - model.name\n"
    model = {"w": np.ones(4, np.float32), "layers": [np.ones((2, 5), np.float32)], "name": "large"}
    with pytest.raises(tw.UserError) as caught:
        tw.load(text).run(a=np.ones(3, np.float32), model=model)
    assert [(d.code, d.span.line) for d in caught.value.diagnostics] == [("TW004", 1), ("TW004", 2), ("TW009", 3)]
