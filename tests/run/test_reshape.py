"""Arrays under another shape inside kernels, against NumPy; shapes that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from kernel_table import from_text
from tilewright.base.sizes import ONE, Size
from tilewright.tree.check.indexing.reshapes import groups, quotient

X = np.random.default_rng(4).normal(0, 1, (4, 6)).astype(np.float32)
CUBE = np.random.default_rng(4).normal(0, 1, (2, 3, 8)).astype(np.float32)
HEAD = "def reshaped(x: tw.Array, k: int = 2) -> tw.Array:\n"
CASES: list[tuple[str, np.ndarray, Callable[[np.ndarray], np.ndarray]]] = [
    ("return x.reshape(2, 12) * 2", X, lambda x: x.reshape(2, 12) * 2),
    ("return x.reshape((-1, k)) * 2", X, lambda x: x.reshape(-1, 2) * 2),
    ("return tw.reshape(x, (k, -1)).sum(axis=0)", X, lambda x: x.reshape(2, -1).sum(0)),
    ("return x.T.reshape(-1) + 1", X, lambda x: x.T.reshape(-1) + 1),
    ("return x[1:, ::2].reshape(-1) + 1", X, lambda x: x[1:, ::2].reshape(-1) + 1),
    ("return (x * 2).reshape(3, 8)[:, ::-1]", X, lambda x: (x * 2).reshape(3, 8)[:, ::-1]),
    ("return x.reshape(-1, 3) @ x.reshape(3, -1)", X, lambda x: x.reshape(-1, 3) @ x.reshape(3, -1)),
    ("return x.ravel()[x.ravel() > 0].sum() + x.flatten()", X, lambda x: x[x > 0].sum() + x.ravel()),
    ("return x.reshape(-1, 1, *x.shape[1:])" if False else "return x.reshape(x.shape[0], 1, -1) * 3", X, lambda x: x[:, None] * 3),
    ("a, b, c = x.shape\n    return x.reshape(a, b, k, -1).max(axis=-1)", CUBE, lambda x: x.reshape(2, 3, 2, 4).max(-1)),
    ("a, b, c = x.shape\n    return x.reshape(b, a, c).sum(axis=0)", CUBE, lambda x: x.reshape(3, 2, 8).sum(0)),
    ("a, b, c = x.shape\n    return x.reshape(a * b, c).mean(axis=0)", CUBE, lambda x: x.reshape(6, 8).mean(0)),
    ("a, b, c = x.shape\n    return x.reshape(a * 3, -1, c // 2).reshape(-1)", CUBE, lambda x: x.reshape(-1) * 1),
    ("n, d = x.shape\n    out = tw.zeros((n, d), x.dtype)\n    for i in tw.grid(n):\n        out[i] = x[i].reshape(k, -1)[::-1].ravel()\n    return out", X,
     lambda x: x.reshape(4, 2, 3)[:, ::-1].reshape(4, 6)),
    ("y = x.reshape(12, 2)\n    out = tw.zeros(12, x.dtype)\n    for i in tw.grid(12):\n        for j in range(2):\n            out[i] += y[i, j]\n    return out", X,
     lambda x: x.reshape(12, 2).sum(1)),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize(("body", "given", "reference"), CASES, ids=[c[0][-40:] for c in CASES])
def test_against_numpy(body: str, given: np.ndarray, reference: Callable[[np.ndarray], np.ndarray], device: str) -> None:
    got, want = from_text(f"{HEAD}    {body}\n")(given, device=device), reference(given)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_strides_do_not_matter(device: str) -> None:
    kernel = from_text(f"{HEAD}    return x.reshape(-1, k)\n")
    for x in (X.T, X[::2], X[:, 1:3], X[::-1], np.broadcast_to(X[0], (4, 6)), X[:0]):
        np.testing.assert_array_equal(kernel(x, device=device), x.reshape(-1, 2))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return x.reshape(5, -1)", r"an array of \[x.shape\[0\], x.shape\[1\]\] \(24 elements\) cannot have shape \[5, -1\], which has 20"),
        ("return x.reshape(4, 7)", r"cannot have shape \[4, 7\], which has 28"),
        ("return x.reshape(-1, -1)", "reshape\\(\\) can find one extent, and more than one is -1"),
        ("return x.reshape(-2, 3)", "-2"),
        ("return x.reshape()", r"reshape\(\) takes an array and a shape, got 1 argument"),
        ("return x.reshape(2, 12, order='F')", "order"),
        ("return x[0, 0].reshape(1)", r"reshape\(\) takes an array, got a number \(f32\)"),
        ("return x[x > 0].reshape(-1)", "known only when the kernel runs"),
        ("y = x * 1\n    z = y.reshape(-1)\n    z[0] = 1\n    return y", "'z' and 'y' may be two names of one array"),
    ],
)
def test_refused(body: str, message: str) -> None:
    with pytest.raises(tw.UserError, match=message):
        from_text(f"{HEAD}    {body}\n")(X, device="cpu")


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_zynml_blocks(device: str, tmp_path: Path) -> None:
    path = tmp_path / "shapes.zyn"
    path.write_text(
        "let a = compute(x) {\n    let y = x.reshape(2, -1)\n    for i in 0..2, j in 0..12: out[i, j] = y[i, j] * 2\n}\n"
        "let b = compute(x) {\n    let y = reshape(x, [8, 3])\n    for i in 0..8: out[i] = reduce(+, y[i, :])\n}\n"
    )
    got = tw.load(str(path)).run(x=X, device=device)
    np.testing.assert_allclose(got["a"], X.reshape(2, -1) * 2)
    np.testing.assert_allclose(got["b"], X.reshape(8, 3).sum(1), rtol=1e-5, atol=1e-6)
    path.write_text("let a = compute(x) {\n    let y = x.reshape(5, -1)\n    for i in 0..5, j in 0..4: out[i, j] = y[i, j]\n}\n")
    with pytest.raises(tw.UserError, match=r"cannot have shape \[5, -1\]"):
        tw.load(str(path)).run(x=X, device=device)


def test_axes_in_groups() -> None:
    n, d, h = Size.of("n"), Size.of("d"), Size.of("h")
    assert groups((n, d), (n, h, d)) == [(range(1), range(1)), (range(1, 1), range(1, 2)), (range(1, 2), range(2, 3))]
    assert groups((n * d, h), (n, d, h)) == [(range(1), range(2)), (range(1, 2), range(2, 3))]
    assert groups((n, d, h), (d, n, h)) == [(range(2), range(2)), (range(2, 3), range(2, 3))]
    assert quotient(n * d, n) == d
    assert quotient(n * 6, n * 2) == Size.of(3)
    assert quotient(n, ONE) == n


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("shapes", [((3, 1), (3, 4)), ((3, 4), (3, 4)), ((1, 4), (3, 1)), ((1,), (5,))])
@pytest.mark.parametrize(
    "block", ["out = x * 2 + y", "let z = x * 2 + y\n    out = z", "let z = x * 2\n    let w = z + y\n    out = w * 1"]
)
def test_axes_of_extent_one_repeat_in_compute_blocks(block: str, shapes: tuple[tuple[int, ...], ...], device: str, tmp_path: Path) -> None:
    x, y = (np.random.default_rng(7).normal(0, 1, shape).astype(np.float32) for shape in shapes)
    path = tmp_path / "repeat.zyn"
    path.write_text(f"let b = compute(x, y) {{\n    {block}\n}}\n")
    np.testing.assert_allclose(tw.load(str(path)).run(x=x, y=y, device=device)["b"], x * 2 + y, rtol=1e-6)
