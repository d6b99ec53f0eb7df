"""What tiles become: the typed tree of a kernel, from both front ends."""

from __future__ import annotations

import textwrap

from tilewright.base.dtypes import f32
from tilewright.frontend.python.kernels import parse_python_file
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree import syntax
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.typed import ArrayArg
from tilewright.tree.typed_text import show

PYTHON = """
import tilewright as tw

@tw.kernel
def k(x):
    rows, cols = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(range(0, rows, 4)):
        m = -tw.inf
        for j in range(0, cols, 8):
            part = x[i:i + 4, j:j + 8]
            m = max(m, tw.row_max(part * 2.0))
        out[i:i + 4] = m
    return out
"""

ZYNML = """
let y = compute(x) {
    for i in 0..rows step 4:
        var m = -inf
        for j in 0..cols step 8:
            let part = x[i:i+4, j:j+8]
            m = max(m, row_max(part * 2.0))
        out[i:i+4] = m
}
"""

TREE = """
    parallel i in 0..rows step 4, t1 in 0..4:
        if t1 < (rows - i):
            var m: f32 = -inf
            reduce j in 0..cols step 8:
                var max2: f32 = -inf
                reduce t3 in 0..min(8, cols - j):
                    max2 max= x[i + t1, j + t3] * 2.0
                m max= max2
            out[i + t1] = m
"""


def body(function: syntax.Function, *ranks: int) -> str:
    text = show(check_kernel(function, [ArrayArg(f32, rank) for rank in ranks]))
    return "\n" + "".join(line for line in text.splitlines(keepends=True)[1:] if "@kernel" not in line)


def compute(text: str) -> syntax.Function:
    (statement,) = parse_module(text.strip() + "\n").body
    assert isinstance(statement, syntax.Let) and isinstance(statement.value, syntax.Compute)
    block = statement.value
    params = tuple(syntax.Param(i.id) for i in block.inputs if isinstance(i, syntax.Name))
    return syntax.Function("k", params, None, block.body, "compute", block.attributes)


def test_both_front_ends_make_the_same_tree_of_tiles() -> None:
    (function,) = parse_python_file(PYTHON, "k.py")
    assert body(function, 2) == TREE
    assert body(compute(ZYNML), 2) == TREE


def test_different_short_ends_are_guarded_apart() -> None:
    text = """
    let y = compute(x, w) {
        for i in 0..40 step 4:
            var a = x[i:i+4]
            var b = w[i:i+4]
            a += 1.0
            b += 1.0
            out_a[i:i+4] = a
            out_b[i:i+4] = b
    }
    """
    found = body(compute(textwrap.dedent(text)), 1, 1)
    assert found.count("if t1 < (w$0 - i):") == 2
    assert found.count("if t1 < (x$0 - i):") == 2


def test_shared_is_declared_alike() -> None:
    source = "import tilewright as tw\n@tw.kernel\ndef k(x):\n    for i in tw.grid(len(x)):\n        s = tw.shared((4, 8), tw.f32)\n"
    (function,) = parse_python_file(source, "k.py")
    loop = function.body[0]
    assert isinstance(loop, syntax.For)
    extents = syntax.Tuple((syntax.Number(4), syntax.Number(8)))
    assert loop.body == (syntax.Let(("s",), None, mutable=True, type=syntax.Name("f32"), shared=True, extents=(extents,)),)
