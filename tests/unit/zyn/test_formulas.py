"""Formulas of floats that kernels compute: one function gives what statement by statement gives, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.tree import syntax
from tilewright.zyn.host.blocks import scalar
from tilewright.zyn.host.formulas import compiled

VALUES = (0.0, -0.0, 1.5, -2.25, 3e38, float("inf"), float("-inf"), float("nan"))


def formula(text: str) -> Any:
    (statement,) = tw.load(f"let x = {text}").tree.body
    assert isinstance(statement, syntax.Let)
    return statement.value


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("text", ["sqrt(a)", "sqrt(a / b)", "-a * 2 + b", "a / 3", "2 ** a", "exp(-a) - 1.5", "rsqrt(a)", "sigmoid(a)", "tanh(a) ** 2", "abs(a)", "floor(a)", "erfc(a / 8)"])
def test_the_same_bits(text: str, kind: type) -> None:
    tree = formula(text)

    def general(*values: object) -> object:
        raise AssertionError("the function is for these")

    with np.errstate(all="ignore"):
        pairs = [(kind(a), kind(b)) for a in VALUES for b in (2.0, -0.5, 0.0)]
    made = compiled(tree, {"a": kind(1), "b": kind(2)}, general)
    assert made is not None
    for a, b in pairs:
        found, wanted = made(a, b), scalar(tree, {"a": a, "b": b})
        assert type(found) is type(wanted)
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes() or (found != found and wanted != wanted)


def test_other_types_go_the_general_way() -> None:
    made = compiled(formula("sqrt(a)"), {"a": np.float32(4)}, lambda a: ("general", a))
    assert made is not None and made(np.float32(4)) == 2
    assert made(np.float64(4)) == ("general", 4.0)


@pytest.mark.parametrize(("text", "a"), [("a / 2", np.int32(5)), ("sqrt(a)", 4.0), ("relu(a)", np.float32(1)), ("min(a, 2)", np.float32(1)), ("a < 2", np.float32(1)), ("a if a > 0 else 1", np.float32(1)), ("a * (2 + 3)", np.float32(1)), ("sqrt(a)", np.complex64(1))])
def test_what_asks_for_kinds_has_no_function(text: str, a: object) -> None:
    assert compiled(formula(text), {"a": a}, lambda a: None) is None


def test_a_program_gives_the_same_again_and_again() -> None:
    module = tw.load("let m = compute(x) {\n    @kernel reduce(+)\n    for i in 0..len:\n        yield x[i] * x[i]\n}\nlet n = sqrt(m / 3.0) - 1")
    x = np.arange(7, dtype=np.float32)
    wanted = np.sqrt(np.float32(91) / np.float32(3)) - np.float32(1)
    for _ in range(5):
        found = module.run(x=x)["n"]
        assert type(found) is np.float32 and abs(found - wanted) < 1e-5
