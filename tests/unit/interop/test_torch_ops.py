"""Kernels as operators of PyTorch, on CPU tensors: eager, compiled, checked by PyTorch's own tests, differentiated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import tilewright as tw
from tilewright.base.errors import UserError

torch: Any = pytest.importorskip("torch")


@tw.kernel
def axpy(a: float, x: tw.Array, y: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows, cols), x.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = a * x[i, j] + y[j]
    return out


@tw.kernel
def axpy_gradients(a: float, x: tw.Array, y: tw.Array, g: tw.Array) -> tw.Array:
    rows, cols = x.shape
    dx = tw.empty((rows, cols), x.dtype)
    dy = tw.empty((cols,), x.dtype)
    for i, j in tw.grid(rows, cols):
        dx[i, j] = a * g[i, j]
    for j in tw.grid(cols):
        dy[j] = tw.sum(g[:, j])
    return dx, dy


@tw.kernel
def halves(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    low = tw.empty((n // 2,), x.dtype)
    total = tw.empty((), tw.f32)
    for i in tw.grid(n // 2):
        low[i] = x[i]
    total = tw.sum(x)
    return low, total


_numbers = itertools.count()


def fresh(kernel: Any, **options: Any) -> Any:
    return tw.torch_op(kernel, f"tilewright_tests::op{next(_numbers)}", **options)


def test_eager() -> None:
    op = fresh(axpy)
    x, y = torch.randn(5, 7), torch.randn(7)
    torch.testing.assert_close(op(2.0, x, y), 2 * x + y)
    torch.testing.assert_close(op(2.0, x.t().contiguous().t(), y), 2 * x + y)
    half = x.to(torch.bfloat16)
    assert op(2.0, half, y.to(torch.bfloat16)).dtype is torch.bfloat16


def test_the_same_operator_again() -> None:
    op = tw.torch_op(axpy, "tilewright_tests::again")
    assert tw.torch_op(axpy, "tilewright_tests::again") is op
    assert torch.ops.tilewright_tests.again is op
    with pytest.raises(UserError, match="there is an operator 'tilewright_tests::again' already"):
        tw.torch_op(axpy_gradients, "tilewright_tests::again")
    with pytest.raises(UserError, match="there is an operator 'aten::add' already"):
        tw.torch_op(axpy, "aten::add")
    with pytest.raises(UserError, match="no name of an operator"):
        tw.torch_op(axpy, "add")


@pytest.mark.parametrize("backward", [None, axpy_gradients], ids=["plain", "backward"])
def test_pytorchs_own_checks(backward: Any) -> None:
    op = fresh(axpy, backward=backward)
    for grad in (False, True) if backward else (False,):
        arguments = (2.0, torch.randn(4, 6, requires_grad=grad), torch.randn(6, requires_grad=grad))
        torch.library.opcheck(op.default, arguments)


def test_several_results_with_other_shapes() -> None:
    op = fresh(halves)
    x = torch.randn(10)
    low, total = op(x)
    torch.testing.assert_close(low, x[:5])
    torch.testing.assert_close(total, x.sum())
    torch.library.opcheck(op.default, (x,))


def test_compiled_whole() -> None:
    op = fresh(axpy)

    def function(x: Any, y: Any) -> Any:
        return torch.relu(op(3.0, x.sin(), y)) + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 8, 5):
        x, y = torch.randn(rows, 4), torch.randn(4)
        torch.testing.assert_close(compiled(x, y), function(x, y))


def test_gradients_by_a_kernel() -> None:
    op = fresh(axpy, backward=axpy_gradients)
    x, y = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y: op(2.5, x, y), (x, y))


def test_gradients_by_a_function() -> None:
    def backward(ctx: Any, gradient: Any) -> Any:
        (a,) = ctx.numbers
        return None, a * gradient, gradient.sum(0)

    op = fresh(axpy, backward=backward)
    x, y = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y: op(2.5, x, y), (x, y))


def test_errors() -> None:
    op = fresh(axpy)
    with pytest.raises(UserError, match="axis 0"):
        op(1.0, torch.randn(3, 4), torch.randn(5))
    with pytest.raises(UserError, match="no kernel"):
        tw.torch_op(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="backward= is a int"):
        fresh(axpy, backward=3)


def test_without_backward_gradients_raise() -> None:
    op = fresh(axpy)
    x, y = torch.ones(2, 3, requires_grad=True), torch.ones(3)
    for result in (op(2.0, x, y), op(2.0, x, y) * x):
        with pytest.raises(UserError, match="has no backward"):
            result.sum().backward()
        assert x.grad is None
    with torch.no_grad():
        assert not op(2.0, x, y).requires_grad
    assert not op(2.0, x.detach(), y).requires_grad
    assert op(2.0, x, y).requires_grad
