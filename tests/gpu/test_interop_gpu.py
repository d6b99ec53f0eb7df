"""Kernels as operators of PyTorch on a GPU: eager, compiled, captured, differentiated. Skipped where there is no GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import tilewright as tw
from tilewright.base.errors import UserError

pytestmark = pytest.mark.requires("cuda")
torch: Any = pytest.importorskip("torch")
_numbers = itertools.count()


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


def fresh(kernel: Any, **options: Any) -> Any:
    return tw.torch_op(kernel, f"tilewright_gpu_tests::op{next(_numbers)}", **options)


def inputs(rows: int = 33, **options: Any) -> tuple[Any, Any]:
    return torch.randn(rows, 64, device="cuda", **options), torch.randn(64, device="cuda", **options)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_eager(name: str) -> None:
    op = fresh(axpy)
    x, y = inputs(dtype=getattr(torch, name))
    result = op(2.0, x, y)
    assert result.is_cuda
    torch.testing.assert_close(result, 2 * x + y)
    torch.testing.assert_close(op(2.0, x.t().contiguous().t(), y), 2 * x + y)


def test_pytorchs_own_checks() -> None:
    op = fresh(axpy, backward=axpy_gradients)
    for grad in (False, True):
        torch.library.opcheck(op.default, (2.0, *inputs(5, requires_grad=grad)))


def test_on_the_current_stream() -> None:
    op = fresh(axpy)
    x, y = inputs()
    op(1.0, x, y)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        result = op(2.0, x, y)
        expected = 2 * x + y
    stream.synchronize()
    torch.testing.assert_close(result, expected)
    assert bool((x == 3).all())


def test_captured_in_a_graph() -> None:
    op = fresh(axpy)
    x, y = inputs()
    op(2.0, x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(2.0, op(3.0, x, y), y)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(result, 2 * (3 * x + y) + y)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole(backend: str) -> None:
    op = fresh(axpy)

    def function(x: Any, y: Any) -> Any:
        return torch.relu(op(3.0, x.sin(), y)) + 1

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for rows in (33, 8):
        x, y = inputs(rows)
        torch.testing.assert_close(compiled(x, y), function(x, y))


def test_gradients() -> None:
    op = fresh(axpy, backward=axpy_gradients)
    x, y = inputs(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y: op(2.5, x, y), (x, y))


def test_tensors_on_two_devices() -> None:
    op = fresh(axpy)
    x, y = inputs()
    with pytest.raises(UserError, match="cuda:0 and cpu"):
        op(2.0, x, y.cpu())
