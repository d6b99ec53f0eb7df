"""Elements of a ZynML result that no statement writes are zero; results that are written whole get no zeros first."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import f32
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree import syntax
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.typed import ArrayArg, ArrayAssign

PARTIAL = {
    "steps": ("for i in 0..n step 2: out[i] = x[i]", lambda x: np.where(np.arange(len(x)) % 2 == 0, x, 0)[: len(x) - 1 + len(x) % 2]),
    "guard": ("for i in 0..n: if x[i] > 3: out[i] = x[i]", lambda x: np.where(x > 3, x, 0)),
    "from two on": ("for i in 0..n: out[i + 2] = x[i]", lambda x: np.concatenate([[0, 0], x])),
    "gaps": ("for i in 0..n: out[3 * i] = x[i]", lambda x: np.pad(x[:, None], ((0, 0), (0, 2))).reshape(-1)[: max(3 * len(x) - 2, 0)]),
    "triangle": ("for i in 0..n, j in 0..n: if j <= i: out[i, j] = x[j]", lambda x: np.tril(np.tile(x, (len(x), 1)))),
    "diagonal": ("for i in 0..n: out[i, i] = x[i]", np.diag),
    "one branch of two": ("for i in 0..n:\n    if x[i] > 3:\n        out[i] = x[i]\n    elif x[i] > 2:\n        out[i] = 2", lambda x: np.where(x > 3, x, np.where(x > 2, 2, 0))),
    "add after": ("for i in 0..n:\n    if x[i] > 3:\n        out[i] = x[i]\n    out[i] += 1", lambda x: np.where(x > 3, x, 0) + 1),
    "two results": ("for i in 0..n:\n    out_a[i] = x[i]\n    if x[i] > 3: out_b[i] = x[i]", lambda x: (x, np.where(x > 3, x, 0))),
}  # fmt: skip
WHOLE = [
    "for i in 0..n: out[i] = x[i]",
    "for i in n - 1..-1 step -1: out[i] = x[i]",
    "for i in 0..n: out[n - 1 - i] = x[i]",
    "for i in 0..n, j in 0..4: out[4 * i + j] = x[i]",
    "for i in 0..n, j in 0..4: out[i + n * j] = x[i]",
    "for i in 0..n, j in 0..n: out[j, i] = x[i]",
    "for i in 0..n:\n    out[2 * i] = x[i]\n    out[2 * i + 1] = -x[i]",
    "for i in 0..n:\n    out[i] = x[i]\n    out[i + n] = -x[i]",
    "for i in 0..n:\n    out[i] = x[i]\nfor i in 0..3: out[i + n] = 1",
    "for i in 0..n step 16: out[i:i+16] = x[i:i+16] * 2",
    "for i in 0..n:\n    if x[i] > 0:\n        out[i] = 1\n    else:\n        out[i] = 0",
    "for i in 0..n:\n    if x[i] > 0:\n        out[i] = 1\n    elif x[i] < -1:\n        out[i] = -1\n    else:\n        out[i] = 0",
    "for i in 0..n: out[i, 0] = x[i]",
    "for i in 0..n:\n    out[i] = 0\n    for j in 0..n: if x[j] > x[i]: out[i] += 1",
]


def block(body: str) -> str:
    indented = "\n".join("    " + line for line in body.splitlines())
    names = "(a, b)" if "out_b" in body else "y"
    return f"let {names} = compute(x) {{\n{indented}\n}}\n"


def is_filled(body: str) -> bool:
    """Whether the checked block begins with zeros."""
    (statement,) = parse_module(block(body)).body
    assert isinstance(statement, syntax.Let)
    compute = statement.value
    assert isinstance(compute, syntax.Compute)
    function = syntax.Function("y", (syntax.Param("x"),), None, compute.body, "compute", compute.attributes)
    kernel = check_kernel(function, [ArrayArg(f32, 1)])
    return isinstance(kernel.body[0], ArrayAssign)


@pytest.mark.parametrize("device", ["cpu", "emulator:loop", "emulator:tile", "emulator:thread"])
@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.filterwarnings("ignore::tilewright.PerformanceWarning")
def test_elements_nobody_writes_are_zero(name: str, device: str) -> None:
    body, expected = PARTIAL[name]
    program = tw.load(block(body))
    sizes = (1, 5, 33) if device == "cpu" else (5,)
    for n in sizes:
        x = np.arange(1, n + 1, dtype=np.float32)[::-1].copy()[::-1]
        results = program.run(device=device, x=x)
        wanted = expected(x)
        for result, want in zip(results.values(), wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            np.testing.assert_array_equal(np.asarray(result), want)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int64, np.uint32, np.float16, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_zeros_have_the_type_of_the_result(dtype: type) -> None:
    x = np.ones(7, dtype)
    found = tw.load(block("for i in 0..n step 3: out[i] = x[i]")).run(x=x)["y"]
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found.astype(np.float32), [1, 0, 0, 1, 0, 0, 1])


@pytest.mark.parametrize("body", WHOLE)
def test_results_that_are_written_whole_are_not_filled(body: str) -> None:
    assert not is_filled(body)


@pytest.mark.parametrize("name", PARTIAL)
def test_results_that_are_not_are(name: str) -> None:
    assert is_filled(PARTIAL[name][0])
