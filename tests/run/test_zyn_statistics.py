"""ZynML: mean, var, std and norm, in blocks and between them, against NumPy in f64."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import UserError

pytestmark = pytest.mark.requires("cpu")
X = np.random.default_rng(7).normal(3, 2, (7, 33))
BETWEEN = """
let m = mean(x, axis=1)
let v = var(x, axis=0)
let s = std(x)
let n = norm(x, 1)
"""
INSIDE = """
pipeline standard(x) {
    let y = compute(x) {
        for i in 0..rows:
            let m = mean(x[i, 0:cols])
            let s = std(x[i, 0:cols])
            for j in 0..cols: out[i, j] = (x[i, j] - m) / s
    }
    return y
}
let y = standard(x)
"""
OWN = """
fn mean(x) { return x + 1.0 }
let m = mean(x)
"""


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_statistics(device: str) -> None:
    found = tw.load(BETWEEN).run(x=X, device=device)
    for name, want in {"m": X.mean(1), "v": X.var(0), "s": X.std(), "n": np.linalg.norm(X, axis=1)}.items():
        np.testing.assert_allclose(found[name], want, rtol=1e-12)
    np.testing.assert_allclose(tw.load(INSIDE).run(x=X, device=device)["y"], (X - X.mean(1)[:, None]) / X.std(1)[:, None], rtol=1e-9, atol=1e-12)


def test_functions_and_names_of_ones_own() -> None:
    np.testing.assert_array_equal(tw.load(OWN).run(x=X)["m"], X + 1)
    found = tw.load("let y = compute(x) {\n    for i in 0..rows:\n        var mean = 0.0\n        var var = 0.0\n        for j in 0..cols: mean += x[i, j]\n        var += mean\n        out[i] = var\n}").run(x=X)
    np.testing.assert_allclose(found["y"], X.sum(1))


def test_wrong_arguments() -> None:
    for text, words in (("let m = mean(x, 0, 1)", "mean() takes an array and an axis, got 3"), ("let m = var(x, keep=1)", "takes no keywords but axis= and keepdims="), ("let m = std(x, axis=2)", "axis 2")):
        with pytest.raises(UserError) as error:
            tw.load(text).run(x=X)
        assert words in str(error.value), str(error.value)


MEDIANS = """
fn twice(x) { return median(x, axis=1) * 2.0 }
let rows = median(x, axis=1)
let kept = median(x, axis=0, keepdims=true)
let piped = x |> median(axis=-1)
let doubled = twice(x)
let both = median(x, (0, 1)) + median(median(x, 0))
let means = mean(x, axis=1, keepdims=true)
"""
CENTRED = """
pipeline centred(x) {
    let y = compute(x) {
        for i in 0..rows:
            let m = median(x[i, 0:cols])
            for j in 0..cols: out[i, j] = x[i, j] - m
    }
    return y
}
let y = centred(x)
let z = compute(x) {
    let m = median(x, axis=1, keepdims=true)
    for i in 0..rows, j in 0..cols: out[i, j] = x[i, j] - m[i, 0]
}
"""


@pytest.mark.filterwarnings("ignore::tilewright.PerformanceWarning")
@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_medians(device: str) -> None:
    x = X[:, :9]
    found = tw.load(MEDIANS).run(x=x, device=device)
    rows = np.median(x, 1)
    want = {"rows": rows, "kept": np.median(x, 0, keepdims=True), "piped": rows, "doubled": 2 * rows, "both": np.median(x) + np.median(np.median(x, 0)), "means": x.mean(1, keepdims=True)}
    for name, value in want.items():
        assert np.shape(found[name]) == np.shape(value), name
        np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)
    found = tw.load(CENTRED).run(x=x, device=device)
    np.testing.assert_array_equal(found["y"], x - rows[:, None])
    np.testing.assert_array_equal(found["z"], x - rows[:, None])


def test_medians_of_ones_own() -> None:
    np.testing.assert_array_equal(tw.load("fn median(x) { return x + 1.0 }\nlet m = median(x)").run(x=X)["m"], X + 1)
    found = tw.load("let y = compute(x) {\n    for i in 0..rows:\n        var median = 0.0\n        for j in 0..cols: median += x[i, j]\n        out[i] = median\n}").run(x=X)
    np.testing.assert_allclose(found["y"], X.sum(1))


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("let m = median(x, 0, 1)", 1, "median() takes an array, an axis and keepdims=, got 3 argument(s)"), ("let m = median(x, keep=1)", 1, "got 2 argument(s)"),
        ("let m = median(x, axis=2)", 1, "axis 2 of an array of rank 2"), ("let n = 1\nlet m = median(x, axis=n)", 2, "axis must be a constant integer"),
        ("let m = median(x, keepdims=3)", 1, "keepdims must be true or false"), ("let m = std(x, keepdims=3)", 1, "keepdims must be true or false"),
        ("let y = compute(x) {\n    for i in 0..rows: out[i] = median(x[i, 0:cols], 0, 1)\n}", 2, "got 3 argument(s)"),
    ],
)  # fmt: skip
def test_wrong_medians(text: str, line: int, words: str) -> None:
    with pytest.raises(UserError) as error:
        tw.load(text).run(x=X)
    assert words in str(error.value) and error.value.diagnostics[0].span.line == line, str(error.value)
