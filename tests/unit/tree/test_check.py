"""Types, shapes and sizes that the checker finds. What kernels compute is tested with the lowering."""

from __future__ import annotations

import textwrap

import pytest

from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.frontend.python.kernels import parse_python_file
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree import syntax
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.typed import ArgSpec, ArrayArg, ArrayInfo, ScalarArg, TypedKernel, TypedLoop
from tilewright.tree.typed_text import show
from tilewright.tree.typed_walk import walk

F32 = dtypes.f32


def python(text: str, *args: ArgSpec) -> TypedKernel:
    body = "from typing import Annotated\nimport tilewright as tw\n\n@tw.kernel\n" + textwrap.dedent(text).lstrip()
    (function,) = parse_python_file(body, "k.py")
    return check_kernel(function, args)


def compute(text: str, *args: ArgSpec) -> TypedKernel:
    statement = parse_module(textwrap.dedent(text).strip() + "\n", "k.zyn").body[0]
    assert isinstance(statement, syntax.Let)
    block = statement.value
    assert isinstance(block, syntax.Compute)
    params = tuple(syntax.Param(i.id) for i in block.inputs if isinstance(i, syntax.Name))
    return check_kernel(syntax.Function("k", params, None, block.body, "compute", block.attributes), args)


def a(rank: int, dtype: DType = F32) -> ArrayArg:
    return ArrayArg(dtype, rank)


def shapes(kernel: TypedKernel) -> list[str]:
    return [str(p) for p in (*kernel.inputs, *kernel.outputs) if isinstance(p, ArrayInfo)]


def elementwise(expression: str, *args: ArgSpec, names: str = "x, y") -> DType:
    """The dtype ZynML's `out` has when that expression is assigned to it."""
    text = f"let r = compute({', '.join(names.split(', ')[: len(args)])}) {{\n    for i in 0..n: out[i] = {expression}\n}}"
    return compute(text, *args).outputs[0].dtype


@pytest.mark.parametrize(
    ("expression", "left", "right", "expected"),
    [
        ("x[i] + 1", "i8", "i8", "i8"),
        ("x[i] + 1.0", "i8", "i8", "f64"),
        ("x[i] * 0.5", "bf16", "bf16", "bf16"),
        ("x[i] + y[i]", "bf16", "f32", "f32"),
        ("x[i] + y[i]", "i8", "u8", "i16"),
        ("x[i] + y[i]", "bool", "bool", "i64"),
        ("x[i] + i", "i32", "i32", "i64"),
        ("x[i] + i", "f32", "f32", "f32"),
        ("x[i] / n", "f32", "f32", "f32"),
        ("x[i] / 2", "i32", "i32", "i32"),
        ("x[i] / y[i]", "i32", "f64", "f64"),
        ("x[i] < y[i]", "i32", "i64", "bool"),
        ("sqrt(x[i])", "i32", "i32", "f64"),
        ("sqrt(x[i])", "f16", "f16", "f16"),
        ("x[i] / sqrt(n)", "f32", "f32", "f32"),
        ("x[i] / sqrt(n)", "f64", "f64", "f64"),
        ("i * 0.5 + x[i] - x[i]", "f64", "f64", "f64"),
        ("f16(x[i])", "f32", "f32", "f16"),
        ("1.0 + x[i] * 0", "f8e4m3", "f8e4m3", "f8e4m3"),
        ("max(x[i], 0)", "u8", "u8", "u8"),
    ],
)
def test_dtypes(expression: str, left: str, right: str, expected: str) -> None:
    args = [a(1, dtypes.by_name(left)), a(1, dtypes.by_name(right))]
    assert elementwise(expression, *(args if "y" in expression else args[:1])).name == expected


@pytest.mark.parametrize(
    ("expression", "dtype", "expected"),
    [("x[0] / x[0]", "i32", "f64"), ("x[0] // 2", "i32", "i32"), ("x[0] ** 2", "i16", "i16"), ("1.5", "f32", "f64"), ("len(x)", "f32", "i64")],
)
def test_python_dtypes(expression: str, dtype: str, expected: str) -> None:
    kernel = python(f"def k(x):\n    return {expression}\n", a(1, dtypes.by_name(dtype)))
    assert [(o.name, o.dtype.name) for o in kernel.outputs] == [("result", expected)]


@pytest.mark.parametrize(
    ("start", "dtype", "expected"),
    [("0.0", "f32", "f32"), ("0", "f32", "f32"), ("0", "i8", "i64"), ("0", "u8", "u64"), ("0.0", "i32", "f64"), ("0.0", "i64", "f64"), ("0", "bool", "i64"),
     ("0.0", "bf16", "bf16"), ("tw.i32(0)", "i8", "i32"), ("x[0]", "i8", "i64"), ("tw.f64(0)", "f32", "f64")],
)  # fmt: skip
def test_accumulators(start: str, dtype: str, expected: str) -> None:
    kernel = python(
        f"def k(x):\n    total = {start}\n    for i in range(len(x)):\n        total += x[i]\n    return total\n",
        a(1, dtypes.by_name(dtype)),
    )
    assert kernel.outputs[0].dtype.name == expected


def test_weak_numbers_take_the_dtype_they_meet() -> None:
    text = "let r = compute(x, s) {\n    for i in 0..n: out[i] = x[i] * s\n}"
    assert compute(text, a(1), ScalarArg(dtypes.f64, weak=True)).outputs[0].dtype is F32
    assert compute(text, a(1), ScalarArg(dtypes.f64)).outputs[0].dtype is dtypes.f64
    assert compute(text, a(1), ScalarArg(dtypes.i64, weak=True)).outputs[0].dtype is F32


def test_names_bind_sizes_of_every_input() -> None:
    kernel = compute(
        """
        let C = compute(A, B) {
            @kernel matmul
            for i in 0..M, j in 0..N:
                var sum = 0.0
                for k in 0..K:
                    sum += A[i, k] * B[k, j]
                out[i, j] = sum
        }""",
        a(2), a(2),
    )  # fmt: skip
    assert shapes(kernel) == ["f32[M, K]", "f32[K, N]", "f32[M, N]"]
    assert not kernel.checks


def test_a_range_of_a_multiple() -> None:
    kernel = compute(
        """
        let qkv = compute(x, w) {
            @kernel matmul
            for s in 0..seq, h in 0..3*hidden:
                var sum = 0.0
                for i in 0..hidden:
                    sum += x[s, i] * w[i, h]
                out[s, h] = sum
        }""",
        a(2), a(2),
    )  # fmt: skip
    assert shapes(kernel) == ["f32[seq, hidden]", "f32[hidden, 3*hidden]", "f32[seq, 3*hidden]"]


def test_python_names_sizes_after_variables() -> None:
    kernel = python(
        """
        def k(m, v):
            rows, cols = m.shape
            out = tw.empty((rows, cols), m.dtype)
            for i, j in tw.grid(rows, cols):
                out[i, j] = m[i, j] + v[j]
            return out
        """,
        a(2), a(1),
    )  # fmt: skip
    assert shapes(kernel) == ["f32[rows, cols]", "f32[cols]", "f32[rows, cols]"]


def test_one_name_for_two_sizes_does_not_join_them() -> None:
    kernel = python(
        """
        def k(x, y):
            a = 0.0
            for i in range(len(x)):
                n = len(x)
                a += x[i] / n
            for i in range(len(y)):
                n = len(y)
                a += y[i] / n
            return a
        """,
        a(1), a(1),
    )  # fmt: skip
    assert shapes(kernel) == ["f32[n]", "f32[y$0]", "f32[]"]


def test_whole_arrays_make_extents_equal() -> None:
    kernel = python("def k(x, y):\n    return x + y * 2\n", a(2), a(1))
    assert shapes(kernel) == ["f32[x$0, x$1]", "f32[x$1]", "f32[x$0, x$1]"]


def test_annotations_bind_and_check() -> None:
    text = 'def k(x: Annotated[tw.Array, "f32[rows, 4]"], y: Annotated[tw.Array, "f32[rows]"]):\n    return tw.sum(x), tw.sum(y)\n'
    assert shapes(python(text, a(2), a(1)))[:2] == ["f32[rows, 4]", "f32[rows]"]
    with pytest.raises(UserError, match=r"TW003.*'x' must have rank 2, got 1"):
        python(text, a(1), a(1))
    with pytest.raises(UserError, match=r"TW009.*'x' must be f32, got f64"):
        python(text, a(2, dtypes.f64), a(1))


def test_strides_and_alignment() -> None:
    kernel = python("def k(x):\n    return tw.sum(x)\n", ArrayArg(F32, 3, (None, 1, 0), 32))
    (x,) = kernel.inputs
    assert isinstance(x, ArrayInfo)
    assert [str(s) for s in x.strides] == ["x$s0", "1", "0"]
    assert x.align == 32


def kinds(kernel: TypedKernel) -> list[str]:
    return [f"{s.kind} {' '.join(v.name for v in s.vars)}" for s in walk(kernel.body) if isinstance(s, TypedLoop)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("for i in range(n):\n    for j in range(n):\n        out[i, j] = m[j, i]", ["parallel i j"]),
        ("for i in range(n):\n    for j in range(i, n):\n        out[i, j] = m[j, i]", ["parallel i", "each j"]),
        ("for i in range(1, n):\n    for j in range(n):\n        out[i, j] = out[i - 1, j]", ["parallel j", "serial i"]),
        ("for i in range(n):\n    for j in range(1, n):\n        out[i, j] = out[i, j - 1]", ["parallel i", "serial j"]),
        ("for i in range(n):\n    out[i, 0] = 1.0\n    out[i, 1] = 2.0", ["parallel i"]),
        ("for i in range(n):\n    out[0, 0] += m[i, 0]", ["reduce i"]),
        ("for i in range(n):\n    out[0, 0] = m[i, 0]", ["serial i"]),
        ("for i in range(n):\n    for j in range(n):\n        out[i, 0] += m[i, j]", ["parallel i", "reduce j"]),
        ("s = 0.0\nfor i in range(n):\n    for j in range(n):\n        s = max(s, m[i, j])\nout[0, 0] = s", ["reduce i j"]),
        ("s = 0.0\nfor i in range(n):\n    s += m[i, 0] * s\nout[0, 0] = s", ["serial i"]),
        ("s = 0.0\nfor i in range(n):\n    s += m[i, 0]\n    s *= 2\nout[0, 0] = s", ["serial i"]),
    ],
)
def test_loop_kinds(body: str, expected: list[str]) -> None:
    text = f"def k(m):\n    n = len(m)\n    out = tw.zeros((n, n), tw.f32)\n{textwrap.indent(body, '    ')}\n    return out\n"
    assert kinds(python(text, a(2))) == expected


def test_checks_only_for_what_is_not_proven() -> None:
    text = """
        def k(x, y):
            n = len(x)
            out = tw.empty((n,), tw.f32)
            for i in range(n):
                out[i] = x[n - 1 - i] + y[i // 2] + x[i % n]
                if i < 3:
                    out[i] = y[i + 100]
            return out
        """
    kernel = python(text, a(1), a(1))
    assert [(str(c.left), c.relation, str(c.right), c.code) for c in kernel.checks] == [
        ("floordiv(n - 1, 2)", "lt", "y$0", "TW013"),
    ]


def test_typed_tree_as_text() -> None:
    kernel = compute(
        """
        let r = compute(x) {
            @kernel fused
            @workgroup(64)
            for b in 0..rows:
                var s = 0.0
                for i in 0..cols:
                    if x[b, i] > 0.0:
                        s += x[b, i]
                for i in 0..cols:
                    out[b, i] = x[b, i] / (s + 1.0)
        }""",
        a(2, dtypes.bf16),
    )
    assert show(kernel) == textwrap.dedent("""\
        kernel k(x: bf16[rows, cols]) -> out: bf16[rows, cols]
            @kernel fused
            @workgroup(64, 1, 1)
            parallel b in 0..rows:
                var s: bf16 = 0.0
                reduce i in 0..cols:
                    if x[b, i] > 0.0:
                        s add= x[b, i]
                each i in 0..cols:
                    out[b, i] = x[b, i] / (s + 1.0)
        """)
