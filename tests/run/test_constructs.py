"""Every construct of the body language, in Python and in ZynML: the same typed tree, and on the CPU and in the emulator NumPy's result."""

from __future__ import annotations

import linecache
import math
import textwrap
from collections.abc import Callable

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import f32, i32
from tilewright.frontend.python.kernels import parse_python_file
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree import syntax
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.typed import ArrayArg
from tilewright.tree.typed_text import show

DEVICES = ["cpu", "emulator:thread"]
X = np.random.default_rng(0).standard_normal(40).astype(np.float32)
M = np.random.default_rng(1).standard_normal((9, 13)).astype(np.float32)
N = np.random.default_rng(2).integers(1, 100, 40).astype(np.int32)
K = np.random.default_rng(3).integers(1, 7, 40).astype(np.int32)


def python_kernel(text: str, name: str, decorator: str = "@tw.kernel") -> tw.Kernel[..., object]:
    """A live kernel `k` from text."""
    source = f"import tilewright as tw\n\n{decorator}\ndef k({name}):\n{textwrap.indent(textwrap.dedent(text).strip(), '    ')}\n"
    path = f"<constructs {hash(source)}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    space: dict[str, tw.Kernel[..., object]] = {}
    exec(compile(source, path, "exec"), space)
    return space["k"]


def zyn(text: str, name: str) -> str:
    return f"let y = compute({name}) {{\n{textwrap.indent(textwrap.dedent(text).strip(), '    ')}\n}}\n"


def results(kernel: tw.Kernel[..., object], text: str, arrays: dict[str, np.ndarray], device: str) -> list[np.ndarray]:
    return [np.asarray(kernel(*arrays.values(), device=device)), np.asarray(tw.load(text).run(device=device, **arrays)["y"])]


# -- expressions ------------------------------------------------------------------------------------------------------

FLOATS: dict[str, tuple[str, Callable[[np.ndarray], object]]] = {
    "x[i] + 2 * x[i] - 1": ("", lambda x: 3 * x - 1),
    "-x[i] / 3": ("", lambda x: -x / 3),
    "exp(x[i])": ("tw.exp(x[i])", np.exp),
    "exp2(x[i])": ("tw.exp2(x[i])", np.exp2),
    "log(abs(x[i]) + 1)": ("tw.log(abs(x[i]) + 1)", lambda x: np.log(abs(x) + 1)),
    "log2(abs(x[i]) + 1)": ("tw.log2(tw.abs(x[i]) + 1)", lambda x: np.log2(abs(x) + 1)),
    "sqrt(abs(x[i]))": ("tw.sqrt(abs(x[i]))", lambda x: np.sqrt(abs(x))),
    "rsqrt(abs(x[i]) + 1)": ("tw.rsqrt(abs(x[i]) + 1)", lambda x: 1 / np.sqrt(abs(x) + 1)),
    "sin(x[i])": ("tw.sin(x[i])", np.sin),
    "cos(x[i])": ("tw.cos(x[i])", np.cos),
    "tan(x[i])": ("tw.tan(x[i])", np.tan),
    "sinh(x[i])": ("tw.sinh(x[i])", np.sinh),
    "cosh(x[i])": ("tw.cosh(x[i])", np.cosh),
    "tanh(x[i])": ("tw.tanh(x[i])", np.tanh),
    "erf(x[i])": ("tw.erf(x[i])", lambda x: np.vectorize(math.erf)(x)),
    "floor(x[i])": ("tw.floor(x[i])", np.floor),
    "ceil(x[i])": ("tw.ceil(x[i])", np.ceil),
    "trunc(x[i])": ("tw.trunc(x[i])", np.trunc),
    "round(x[i])": ("tw.round(x[i])", np.round),
    "relu(x[i])": ("tw.relu(x[i])", lambda x: np.maximum(x, 0)),
    "sigmoid(x[i])": ("tw.sigmoid(x[i])", lambda x: 1 / (1 + np.exp(-x))),
    "silu(x[i])": ("tw.silu(x[i])", lambda x: x / (1 + np.exp(-x))),
    "gelu(x[i])": ("tw.gelu(x[i])", lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    "gelu(x[i], false)": ("tw.gelu(x[i], False)", lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))),
    "softplus(x[i])": ("tw.softplus(x[i])", lambda x: np.log1p(np.exp(x))),
    "pow(abs(x[i]), 1.5)": ("pow(abs(x[i]), 1.5)", lambda x: abs(x) ** 1.5),
    "abs(x[i]) ** 1.5 + x[i] ** 2": ("", lambda x: abs(x) ** 1.5 + x**2),
    "min(x[i], 0.5, x[i] * 2)": ("", lambda x: np.minimum(np.minimum(x, 0.5), x * 2)),
    "max(x[i], 0.5, x[i] * 2)": ("", lambda x: np.maximum(np.maximum(x, 0.5), x * 2)),
    "clamp(x[i], -0.5, 0.5)": ("tw.clamp(x[i], -0.5, 0.5)", lambda x: np.clip(x, -0.5, 0.5)),
    "fma(x[i], x[i], 1.0)": ("tw.fma(x[i], x[i], 1.0)", lambda x: x * x + 1),
    "where(x[i] > 0, x[i], 0.0)": ("tw.where(x[i] > 0, x[i], 0.0)", lambda x: np.maximum(x, 0)),
    "x[i] if x[i] > 0 else -x[i] if x[i] > -1 else 0.0": ("", lambda x: np.where(x > 0, x, np.where(x > -1, -x, 0))),
    "1.0 if x[i] > 0 and not x[i] > 1 or x[i] < -1 else 0.0": ("", lambda x: (x > 0) & ~(x > 1) | (x < -1)),
    "1.0 if -1 < x[i] <= 0.5 else 0.0": ("", lambda x: (x > -1) & (x <= 0.5)),
    "1.0 if x[i] == x[i] and x[i] != 0 else 0.0": ("", lambda x: x != 0),
    "f32(i32(x[i] * 10))": ("tw.f32(tw.i32(x[i] * 10))", lambda x: np.trunc(x.astype(np.float32) * np.float32(10))),
    "cast(cast(x[i], f16), f32)": ("tw.cast(tw.cast(x[i], tw.f16), tw.f32)", lambda x: x.astype(np.float16)),
    "1.0 if isnan(x[i]) else 0.0": ("1.0 if tw.isnan(x[i]) else 0.0", lambda x: x * 0),
    "i * x[i] + len": ("i * x[i] + len(x)", lambda x: np.arange(len(x)) * x + len(x)),
}
INTEGERS: dict[str, tuple[str, Callable[[np.ndarray, np.ndarray], object]]] = {
    "n[i] / k[i]": ("n[i] // k[i]", lambda n, k: n // k),
    "(-n[i]) / k[i]": ("(-n[i]) // k[i]", lambda n, k: -n // k),
    "(-n[i]) % k[i]": ("", lambda n, k: -n % k),
    "n[i] << k[i]": ("", lambda n, k: n << k),
    "n[i] >> 1": ("", lambda n, k: n >> 1),
    "(n[i] ^ k[i]) | (n[i] & 12)": ("", lambda n, k: (n ^ k) | (n & 12)),
    "~k[i] & 3": ("", lambda n, k: ~k & 3),
    "n[i] * k[i] - 7": ("", lambda n, k: n * k - 7),
    "min(n[i], k[i])": ("", lambda n, k: np.minimum(n, k)),
    "abs(3 - k[i])": ("", lambda n, k: abs(3 - k)),
}


def texts(table: dict[str, tuple[str, Callable[..., object]]], first: str, dtype: str) -> tuple[str, str]:
    """One kernel that computes every expression of a table, in both languages."""
    python = [f"out = tw.empty(({len(table)}, len({first})), tw.{dtype})", f"for i in tw.grid(len({first})):"]
    python += [f"    out[{row}, i] = {own or expression}" for row, (expression, (own, _)) in enumerate(table.items())]
    return "\n".join([*python, "return out"]), "\n".join(
        ["for i in 0..len:", *(f"    out[{row}, i] = {expression}" for row, expression in enumerate(table))]
    )


@pytest.mark.parametrize("device", DEVICES)
def test_float_expressions(device: str) -> None:
    python, text = texts(FLOATS, "x", "f32")
    for found in results(python_kernel(python, "x"), zyn(text, "x"), {"x": X}, device):
        for row, (expression, (_, expected)) in zip(found, FLOATS.items(), strict=True):
            np.testing.assert_allclose(row, expected(X.astype(np.float64)), rtol=2e-5, atol=2e-6, err_msg=expression)


@pytest.mark.parametrize("device", DEVICES)
def test_integer_expressions(device: str) -> None:
    python, text = texts(INTEGERS, "n", "i32")
    for found in results(python_kernel(python, "n, k"), zyn(text, "n, k"), {"n": N, "k": K}, device):
        for row, (expression, (_, expected)) in zip(found, INTEGERS.items(), strict=True):
            np.testing.assert_array_equal(row, expected(N.astype(np.int64), K.astype(np.int64)), err_msg=expression)


def typed_lines(function: syntax.Function, args: list[ArrayArg]) -> list[str]:
    """The body of the typed tree; an axis and a result that nothing names are called the same."""
    lines = show(check_kernel(function, args)).replace("m$1", "cols").replace("result[", "out[").splitlines()[1:]
    return [line for line in lines if "@kernel" not in line and " = empty" not in line]


def trees(python: str, text: str, name: str, args: list[ArrayArg]) -> tuple[list[str], list[str]]:
    source = f"import tilewright as tw\n\n@tw.kernel\ndef k({name}):\n{textwrap.indent(textwrap.dedent(python).strip(), '    ')}\n"
    (function,) = parse_python_file(source, "k.py")
    (statement,) = parse_module(zyn(text, name)).body
    assert isinstance(statement, syntax.Let)
    block = statement.value
    assert isinstance(block, syntax.Compute)
    params = tuple(syntax.Param(n) for n in name.split(", "))
    compute = syntax.Function("k", params, None, block.body, "compute", block.attributes)
    return typed_lines(function, args), typed_lines(compute, args)


@pytest.mark.parametrize("expression", FLOATS)
def test_float_trees(expression: str) -> None:
    own = FLOATS[expression][0] or expression
    python = f"len_ = len(x)\nout = tw.empty((len_,), tw.f32)\nfor i in tw.grid(len_):\n    out[i] = {own}\nreturn out"
    one, other = trees(python, f"for i in 0..len_:\n    out[i] = {expression.replace('len', 'len_')}", "x", [ArrayArg(f32, 1)])
    assert one == other


@pytest.mark.parametrize("expression", INTEGERS)
def test_integer_trees(expression: str) -> None:
    own = INTEGERS[expression][0] or expression
    python = f"len_ = len(n)\nout = tw.empty((len_,), tw.i32)\nfor i in tw.grid(len_):\n    out[i] = {own}\nreturn out"
    one, other = trees(python, f"for i in 0..len_:\n    out[i] = {expression}", "n, k", [ArrayArg(i32, 1), ArrayArg(i32, 1)])
    assert one == other


# -- statements -------------------------------------------------------------------------------------------------------

Case = tuple[str, str, dict[str, np.ndarray], object]
ROWS = "rows, cols = m.shape\nout = tw.empty((rows,), tw.f32)\nfor i in tw.grid(rows):\n"
LINE = "len_ = len(x)\nout = tw.empty((len_,), tw.f32)\nfor i in tw.grid(len_):\n"


def rows_of(python: str, text: str, expected: object) -> Case:
    """A case whose body fills `out[i]` from row i of a matrix."""
    return ROWS + textwrap.indent(python, "    ") + "\nreturn out", "for i in 0..rows:\n" + textwrap.indent(text, "    "), {"m": M}, expected


def line_of(python: str, text: str, expected: object) -> Case:
    """The same for the elements of a vector."""
    return LINE + textwrap.indent(python, "    ") + "\nreturn out", "for i in 0..len_:\n" + textwrap.indent(text, "    "), {"x": X}, expected


D = X.astype(np.float64)
SOFTMAX = np.exp(M.astype(np.float64)) / np.exp(M.astype(np.float64)).sum(1, keepdims=True)
CASES: dict[str, Case] = {
    "several indices": (
        "rows, cols = m.shape\nout = tw.empty((rows, cols), tw.f32)\nfor i, j in tw.grid(rows, cols):\n    out[i, j] = m[i, j] + i * 2 + j\nreturn out",
        "for i in 0..rows, j in 0..cols:\n    out[i, j] = m[i, j] + i * 2 + j",
        {"m": M}, M + 2 * np.arange(9)[:, None] + np.arange(13),
    ),
    "step and end": rows_of(
        "s = 0.0\nfor j in range(1, cols - 1 + 1, 3):\n    s += m[i, j]\nout[i] = s",
        "var s = 0.0\nfor j in 1..=cols - 1 step 3:\n    s += m[i, j]\nout[i] = s", M[:, 1::3].sum(1),
    ),
    "backwards": (
        "len_ = len(x)\nout = tw.empty((len_,), tw.f32)\ns = 0.0\nfor i in range(len_ - 1, -1, -1):\n    s += x[i]\n    out[i] = s\nreturn out",
        "var s = 0.0\nfor i in len_ - 1..-1 step -1:\n    s += x[i]\n    out[i] = s", {"x": X}, np.cumsum(D[::-1])[::-1],
    ),
    "if, elif, else": line_of(
        "if x[i] > 1:\n    out[i] = 1.0\nelif x[i] > 0:\n    out[i] = 2.0\nelif x[i] > -1:\n    out[i] = 3.0\nelse:\n    out[i] = 4.0",
        "if x[i] > 1:\n    out[i] = 1.0\nelif x[i] > 0:\n    out[i] = 2.0\nelse if x[i] > -1:\n    out[i] = 3.0\nelse:\n    out[i] = 4.0",
        np.select([X > 1, X > 0, X > -1], [1, 2, 3], 4),
    ),
    "minus infinity": rows_of(
        "t = -tw.inf\nfor j in range(cols):\n    t = max(t, m[i, j])\nout[i] = t",
        "var t = -inf\nfor j in 0..cols:\n    t = max(t, m[i, j])\nout[i] = t", M.max(1),
    ),
    "compound assignment": line_of(
        "t = x[i] + 3\nt += 1\nt -= 2\nt *= 3\nt /= 2\nt **= 2\nout[i] = t\nout[i] += 1\nout[i] -= x[i]\nout[i] *= 2\nout[i] /= 4",
        "var t = x[i] + 3\nt += 1\nt -= 2\nt *= 3\nt /= 2\nt **= 2\nout[i] = t\nout[i] += 1\nout[i] -= x[i]\nout[i] *= 2\nout[i] /= 4",
        (((D + 2) * 1.5) ** 2 + 1 - D) / 2,
    ),
    "typed variable": rows_of(
        "s: tw.f64 = 0.0\nfor j in range(cols):\n    s += m[i, j]\nout[i] = tw.f32(s)",
        "var s: f64 = 0.0\nfor j in 0..cols:\n    s += m[i, j]\nout[i] = f32(s)", M.sum(1),
    ),
    "several at once": line_of(
        "a, b = x[i], 2.0\na, b = b + 1, a\nout[i] = a - b",
        "var a = x[i]\nvar b = 2.0\n(a, b) = (b + 1, a)\nout[i] = a - b", 3 - D,
    ),
    "dot of slices": rows_of("out[i] = tw.dot(m[i, 2:cols], m[i, :cols - 2])", "out[i] = dot(m[i, 2:cols], m[i, :cols - 2])", (M[:, 2:] * M[:, :-2]).sum(1)),
    "reduce of a slice": rows_of(
        'out[i] = tw.reduce("+", m[i, 1:cols]) * tw.reduce("max", m[i]) + tw.f32(tw.reduce("argmin", m[i]))',
        "out[i] = reduce(+, m[i, 1:cols]) * reduce(max, m[i]) + f32(reduce(argmin, m[i]))", M[:, 1:].sum(1) * M.max(1) + M.argmin(1),
    ),
    "reduce along an axis": ('return tw.reduce("*", m, axis=0)', "out = reduce(*, m, axis=0)", {"m": M}, M.prod(0)),
    "whole arrays": (
        "e = tw.exp(x - tw.max(x))\nreturn e / tw.sum(e)", "let e = exp(x - reduce(max, x))\nout = e / reduce(+, e)", {"x": X},
        np.exp(D - D.max()) / np.exp(D - D.max()).sum(),
    ),
    "tiles": (
        "rows, cols = m.shape\nout = tw.empty((rows, cols), tw.f32)\nfor i in tw.grid(range(0, rows, 4)):\n    s = m[i:i + 4]\n"
        "    p = tw.exp(s - tw.row_max(s))\n    out[i:i + 4] = p / tw.row_sum(p)\nreturn out",
        "for i in 0..rows step 4:\n    let s = m[i:i+4]\n    let p = exp(s - row_max(s))\n    out[i:i+4] = p / row_sum(p)", {"m": M}, SOFTMAX,
    ),
    "a product of tiles": (
        "rows, cols = m.shape\nout = tw.empty((rows, rows), tw.f32)\nfor i in tw.grid(range(0, rows, 4)):\n"
        "    out[i:i + 4] = m[i:i + 4] @ tw.transpose(m)\nreturn out",
        "for i in 0..rows step 4:\n    out[i:i+4] = m[i:i+4] @ transpose(m)", {"m": M}, M @ M.T,
    ),
    "shared": (
        "rows, cols = m.shape\nout = tw.empty((rows, cols), tw.f32)\nfor i in tw.grid(rows):\n    s = tw.shared((cols,), tw.f32)\n"
        "    for j in range(cols):\n        s[j] = m[i, j] * 2\n    tw.barrier()\n    for j in range(cols):\n        out[i, j] = s[cols - 1 - j]\nreturn out",
        "for i in 0..rows:\n    shared var s[cols]: f32\n    for j in 0..cols: s[j] = m[i, j] * 2\n    barrier()\n"
        "    for j in 0..cols: out[i, j] = s[cols - 1 - j]",
        {"m": M}, M[:, ::-1] * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_statements(name: str, device: str) -> None:
    python, text, arrays, expected = CASES[name]
    for found in results(python_kernel(python, ", ".join(arrays)), zyn(text, ", ".join(arrays)), arrays, device):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_statement_trees(name: str) -> None:
    python, text, arrays, _ = CASES[name]
    one, other = trees(python, text, ", ".join(arrays), [ArrayArg(f32, a.ndim) for a in arrays.values()])
    assert one == other


# -- yield ------------------------------------------------------------------------------------------------------------

YIELDS: dict[str, tuple[str, str, str, str, object]] = {
    "all": ('reduce="+"', "reduce(+)", "rows, cols = m.shape\nfor i, j in tw.grid(rows, cols):\n    yield m[i, j] * m[i, j]",
            "for i in 0..rows, j in 0..cols:\n    yield m[i, j] * m[i, j]", (M * M).sum()),
    "axis": ('reduce="max", axis=1', "reduce(max, axis=1)", "rows, cols = m.shape\nfor i, j in tw.grid(rows, cols):\n    yield m[i, j]",
             "for i in 0..rows, j in 0..cols:\n    yield m[i, j]", M.max(1)),
    "axes": ('reduce="min", axis=(0, -1)', "reduce(min, axis=[0, -1])", "rows, cols = m.shape\nfor i, j in tw.grid(rows, cols):\n    yield m[i, j]",
             "for i in 0..rows, j in 0..cols:\n    yield m[i, j]", M.min()),
    "condition": ('reduce="+", axis=0', "reduce(+, axis=0)",
                  "rows, cols = m.shape\nfor i, j in tw.grid(rows, cols):\n    if m[i, j] > 0:\n        yield m[i, j]",
                  "for i in 0..rows, j in 0..cols:\n    if m[i, j] > 0:\n        yield m[i, j]", np.maximum(M, 0).sum(0)),
    "place": ('reduce="argmax", axis=1', "reduce(argmax, axis=1)", "rows, cols = m.shape\nfor i, j in tw.grid(rows, cols):\n    yield m[i, j], j * 2",
              "for i in 0..rows, j in 0..cols:\n    yield (m[i, j], j * 2)", M.argmax(1) * 2),
    "any": ('reduce="or", axis=1', "reduce(or, axis=1)", "rows, cols = m.shape\nfor i, j in tw.grid(rows, cols):\n    yield m[i, j] > 1.5",
            "for i in 0..rows, j in 0..cols:\n    yield m[i, j] > 1.5", (M > 1.5).any(1)),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", YIELDS)
def test_yield(name: str, device: str) -> None:
    options, kind, python, text, expected = YIELDS[name]
    kernel = python_kernel(python, "m", f"@tw.kernel({options})")
    for found in results(kernel, zyn(f"@kernel {kind}\n{text}", "m"), {"m": M}, device):
        np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize("name", YIELDS)
def test_yield_trees(name: str) -> None:
    options, kind, python, text, _ = YIELDS[name]
    (function,) = parse_python_file(f"import tilewright as tw\n\n@tw.kernel({options})\ndef k(m):\n{textwrap.indent(python, '    ')}\n", "k.py")
    (statement,) = parse_module(zyn(f"@kernel {kind}\n{text}", "m")).body
    assert isinstance(statement, syntax.Let)
    block = statement.value
    assert isinstance(block, syntax.Compute)
    compute = syntax.Function("k", (syntax.Param("m"),), None, block.body, "compute", block.attributes)
    assert function.attributes == compute.attributes
    assert function == parse_function_of(python_kernel(python, "m", f"@tw.kernel({options})"))
    assert typed_lines(function, [ArrayArg(f32, 2)]) == typed_lines(compute, [ArrayArg(f32, 2)])


def parse_function_of(kernel: tw.Kernel[..., object]) -> syntax.Function:
    return kernel.function


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reduce": "plus"}, "reduce='plus' is no reduction"),
        ({"axis": 1}, "axis=1 without reduce="),
        ({"reduce": "+", "axis": ()}, r"axis=\(\) is no axis"),
        ({"reduce": "+", "axis": "rows"}, "axis='rows' is no axis"),
    ],
)
def test_yield_options(options: dict[str, object], expected: str) -> None:
    with pytest.raises(tw.UserError, match=f"TW016.*{expected}"):
        tw.kernel(**options)(lambda x: x)  # type: ignore[call-overload]
