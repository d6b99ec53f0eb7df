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
    for text, words in (("let m = mean(x, 0, 1)", "mean() takes an array and an axis, got 3"), ("let m = var(x, keep=1)", "takes no keywords but axis="), ("let m = std(x, axis=2)", "axis 2")):
        with pytest.raises(UserError) as error:
            tw.load(text).run(x=X)
        assert words in str(error.value), str(error.value)
