from __future__ import annotations

import textwrap

import pytest

from tilewright.analysis.alias import alias_safe
from tilewright.base.dtypes import f32, f64
from tilewright.frontend.python.kernels import parse_python_file
from tilewright.passes.from_tree.lower_tree import lower_kernel
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.typed import ArrayArg

HEAD = "import tilewright as tw\n@tw.kernel\ndef k(x, y):\n    n = len(x)\n    out = tw.empty((n,), tw.f32)\n"


def safe(body: str, *args: ArrayArg) -> bool:
    (function,) = parse_python_file(HEAD + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n", "k.py")
    return alias_safe(lower_kernel(check_kernel(function, args or [ArrayArg(f32, 1), ArrayArg(f32, 1)])))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("for i in range(n):\n    out[i] = x[i] + y[i]\nreturn out", True),
        ("for i in range(n):\n    out[i] = x[n - 1 - i]\nreturn out", False),
        ("for i in range(1, n):\n    out[i] = x[i - 1]\nreturn out", False),
        ("for i in range(1, n):\n    out[i] = x[i]\nreturn out", True),
        ("t = tw.max(x)\nfor i in range(n):\n    out[i] = x[i] - t\nreturn out", True),
        ("for i in range(n):\n    out[i] = x[i]\nreturn out, tw.sum(y)", False),
        ("for i in range(n):\n    t = 0.0\n    for j in range(n):\n        t += x[j]\n    out[i] = t\nreturn out", False),
        ("two = tw.empty((n,), tw.f32)\nfor i in range(n):\n    out[i] = 1.0\n    two[i] = x[i]\nreturn out, two", False),
        ("for i in range(n):\n    if x[i] > 0:\n        out[i] = x[i]\n    else:\n        out[i] = 0.0\nreturn out", True),
    ],
)
def test_same_place_only(body: str, expected: bool) -> None:
    assert safe(body) is expected


def test_what_cannot_be_the_same_array_does_not_matter() -> None:
    body = "for i in range(n):\n    out[i] = x[i] + y[n - 1 - i]\nreturn out"
    assert safe(body, ArrayArg(f32, 1), ArrayArg(f64, 1))
    assert not safe("for i in range(n):\n    out[i] = x[i]\nreturn out", ArrayArg(f32, 1, (None,)), ArrayArg(f32, 1))
