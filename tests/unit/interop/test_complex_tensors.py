"""Complex tensors of PyTorch in host memory: arguments, results, `out=`, in place."""

from __future__ import annotations

from typing import Any

import pytest

import tilewright as tw
from tilewright.base.errors import UserError

torch: Any = pytest.importorskip("torch")


@tw.kernel
def multiply(x: tw.Array, y: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] * y[i]
    return out


@tw.kernel
def turned(x: tw.Array) -> tw.Array:
    return x * 2j


@tw.kernel
def turn(x: tw.InOut, s: complex) -> None:
    for i in tw.grid(len(x)):
        x[i] *= s


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_arguments_and_results(name: str) -> None:
    dtype = getattr(torch, name)
    for n in (0, 1, 33):
        x, y = torch.randn(n, dtype=dtype), torch.randn(n, dtype=dtype)
        for _ in range(3):
            found = multiply(x, y)
            assert isinstance(found, torch.Tensor)
            torch.testing.assert_close(found, x * y)
            out = torch.zeros(n, dtype=dtype)
            assert multiply(x, y, out=out) is out
            torch.testing.assert_close(out, x * y)
            torch.testing.assert_close(turned(x.real.contiguous()), x.real * 2j)
            torch.testing.assert_close(multiply(x[::2], y[::2]), x[::2] * y[::2])
        torch.testing.assert_close(multiply(x, y, device="emulator"), x * y)
        z = x.clone()
        turn(z, 2j)
        torch.testing.assert_close(z, x * 2j)
    x = torch.randn(5)
    torch.testing.assert_close(multiply(x, x), x * x)


def test_what_is_refused() -> None:
    x = torch.randn(5, dtype=torch.complex64)
    with pytest.raises(UserError, match="conjugate bit"):
        multiply(x, x.conj())
    with pytest.raises(UserError, match="has dtype float32, and the result is complex64"):
        multiply(x, x, out=torch.zeros(5))
    x.requires_grad_()
    with pytest.raises(UserError, match="needs gradients"):
        multiply(x, x)
    with torch.no_grad():
        torch.testing.assert_close(multiply(x, x), x * x)
