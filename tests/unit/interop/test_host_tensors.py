"""Tensors of PyTorch in host memory as arguments and results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw

torch: Any = pytest.importorskip("torch")


@tw.kernel
def mixed(x: tw.Array, y: tw.Array) -> tw.Array:
    return x * 2 + y


@tw.kernel
def two(x: tw.Array) -> tuple[tw.Array, float]:
    return x + 1, tw.sum(x)


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "uint8"])
def test_results_are_tensors(name: str) -> None:
    dtype = getattr(torch, name)
    x, y = torch.arange(6).reshape(2, 3).to(dtype), torch.ones(2, 3).to(dtype)
    for _ in range(3):  # the first call compiles, later ones take the short way
        found = mixed(x, y)
        assert type(found) is torch.Tensor
        assert found.dtype is dtype
        assert found.tolist() == [[1, 3, 5], [7, 9, 11]] if name != "float8_e5m2" else found.shape == (2, 3)
        out = torch.empty(2, 3, dtype=dtype)
        assert mixed(x, y, out=out) is out
        assert torch.equal(out.to(torch.float64), found.to(torch.float64))


def test_views_and_ones() -> None:
    x = torch.arange(12.0).reshape(4, 3)
    for _ in range(2):
        assert torch.equal(mixed(x.t(), torch.ones(3, 1)), x.t() * 2 + 1)
        assert torch.equal(mixed(x[::2, 1:], x[:2, :1]), x[::2, 1:] * 2 + x[:2, :1])
        assert torch.equal(mixed(x, np.ones((4, 3), np.float32)), x * 2 + 1)
    array, total = two(torch.ones(0))
    assert array.shape == (0,)
    assert float(total) == 0


def test_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        for _ in range(2):
            assert mixed(parameter, torch.ones(3)).tolist() == [3, 3, 3]
    with pytest.raises(tw.UserError) as error:
        mixed(parameter, torch.ones(3))
    assert "needs gradients" in str(error.value)


def test_what_is_wrong() -> None:
    mixed(torch.ones(3), torch.ones(3))
    with pytest.raises(tw.UserError):
        mixed(torch.ones(3), torch.ones(4))
    with pytest.raises(tw.UserError):
        mixed(torch.ones(3), torch.ones(3), out=torch.ones(4))
    with pytest.raises(tw.UserError):
        mixed(torch.ones(3).to_sparse(), torch.ones(3))
    assert torch.equal(mixed(torch.ones(3), torch.ones(3)), torch.full((3,), 3.0))
