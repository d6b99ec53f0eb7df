"""`tw.median` along axes, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from kernel_table import from_text

RNG = np.random.default_rng(8)
X = RNG.normal(0, 3, (4, 5, 6)).astype(np.float32)
FORMS = {
    "tw.median(x)": {}, "x.median(axis=0)": {"axis": 0}, "tw.median(x, 1)": {"axis": 1}, "tw.median(x, axis=-1, keepdims=True)": {"axis": -1, "keepdims": True},
    "tw.median(x, axis=(0, 2))": {"axis": (0, 2)}, "x.median(keepdims=True)": {"keepdims": True},
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("form", FORMS)
def test_against_numpy(form: str, device: str) -> None:
    got = from_text(f"def middle(x: tw.Array):\n    return {form}\n")(X, device=device)
    want = np.median(X.astype(np.float64), **FORMS[form])  # type: ignore[call-overload]
    assert np.shape(got) == np.shape(want) and got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6)


@tw.kernel
def centred(x: tw.Array) -> tw.Array:
    spread = tw.median(tw.abs(x - x.median(axis=1, keepdims=True)), axis=1, keepdims=True)
    return (x - x.median(axis=1, keepdims=True)) / spread


@tw.kernel
def row_by_row(x: tw.Array) -> tw.Array:
    n, _ = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = tw.median(x[i]) * 2
    return out


def test_in_loops() -> None:
    np.testing.assert_allclose(row_by_row(X[0], device="cpu"), np.median(X[0], axis=1) * 2, rtol=1e-6)


def test_in_expressions() -> None:
    x = X[0].astype(np.float64)
    away = x - np.median(x, axis=1, keepdims=True)
    np.testing.assert_allclose(centred(x, device="cpu"), away / np.median(np.abs(away), axis=1, keepdims=True), rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.uint16])
def test_dtypes(dtype: type[np.generic]) -> None:
    kernel = from_text("def middle(x: tw.Array):\n    return tw.median(x)\n")
    for count in (1, 2, 7, 64):
        x = (RNG.normal(0, 40, count) if np.dtype(dtype).kind != "u" else RNG.integers(0, 60000, count)).astype(dtype)
        np.testing.assert_allclose(kernel(x, device="cpu"), np.median(x.astype(np.float64)), rtol=2e-3 if dtype is np.float16 else 1e-6)


def test_special_values() -> None:
    kernel = from_text("def middle(x: tw.Array):\n    return tw.median(x, axis=1)\n")
    x = np.array([[1, np.inf, 2], [-np.inf, np.nan, 0], [-np.inf, -np.inf, 5], [-0.0, 0.0, 0.0], [7, 7, 7]])
    np.testing.assert_array_equal(kernel(x, device="cpu"), np.median(x, axis=1))
    assert np.isnan(kernel(np.zeros((2, 0)), device="cpu")).all()


@pytest.mark.parametrize(("form", "message"), [("tw.median(x, axis=k)", "axis must be a constant integer"), ("tw.median(x, axis=3)", "axis 3|3 of"), ("x.median(ddof=1)", "ddof")])
def test_refused(form: str, message: str) -> None:
    with pytest.raises(tw.UserError, match=message):
        from_text(f"def middle(x: tw.Array, k: int):\n    return {form}\n")(X, 1, device="cpu")
