"""Calls with tensors in host memory that go from Python straight to machine code."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.execute import kernel as kernels
from tilewright.runtime.exchange import tensor_calls, torch_tensors

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.requires("cpu")


@tw.kernel
def mixed(x: tw.Array, y: tw.Array) -> tw.Array:
    return x * 2 + y


@tw.kernel
def scaled(x: tw.Array, factor: float = 2.0, shift: float = 1.0) -> tw.Array:
    return x * factor + shift


@tw.kernel
def several(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    return x + 1, x * 2


@tw.kernel
def total(x: tw.Array) -> float:
    return tw.sum(x)


@tw.kernel
def shifted(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[n - 1 - i]
    return out


def fresh(kernel: Any) -> Any:
    """The same kernel before its first call."""
    return tw.kernel(kernel.python)


@contextmanager
def straight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No call inside takes the way through Python."""

    def fail(*values: object) -> None:
        raise AssertionError("the call went through Python")

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "as_array", fail)
        patch.setattr(kernels.Kernel, "_bind", fail)
        yield


@pytest.fixture(autouse=True)
def _known() -> None:
    access = torch_tensors.tensor_access()
    if access is None or not access.keys or not access.gradients_on:
        pytest.skip("this PyTorch is not known well enough")


@pytest.mark.parametrize(
    "name", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "uint8"]
)
def test_dtypes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, kernel = getattr(torch, name), fresh(mixed)
    x, y = torch.arange(8).reshape(2, 4).to(dtype), torch.ones(2, 4).to(dtype)
    slow = kernel(x, y)
    with straight(monkeypatch):
        found = kernel(x, y)
        out = torch.zeros(2, 4, dtype=dtype)
        assert kernel(x, y, out=out) is out
    for tensor in (found, out):
        assert type(tensor) is torch.Tensor
        assert tensor.dtype is dtype
        assert not tensor.requires_grad
        assert torch.equal(tensor.double(), slow.double())


def test_numbers_keywords_and_several_results(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(5.0)
    scaled(x, 3.0, 1.0)
    several(x)
    total(x)
    with straight(monkeypatch):
        assert torch.equal(scaled(x, 4.0, 0.5), x * 4 + 0.5)
        assert torch.equal(scaled(x, shift=0.5), x * 2 + 0.5)
        assert torch.equal(scaled(shift=0.5, x=x), x * 2 + 0.5)
        a, b = several(x)
        assert torch.equal(a, x + 1)
        assert torch.equal(b, x * 2)
        outs = torch.empty(5), torch.empty(5)
        assert several(x, out=outs) is outs
        assert torch.equal(outs[1], x * 2)
        mixed_outs = torch.empty(5), np.empty(5, np.float32)
        assert several(x, out=mixed_outs) is mixed_outs
        assert mixed_outs[1].tolist() == b.tolist()
        sums = total(x)
    assert type(sums) is torch.Tensor
    assert sums.shape == ()
    assert sums.item() == 10
    sums += 1  # nobody else has that memory
    assert total(x).item() == 10


def test_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = fresh(mixed), torch.arange(12.0).reshape(3, 4)
    kernel(x.t(), x.t())
    with straight(monkeypatch):
        assert torch.equal(kernel(x.t(), x.t()), x.t() * 3)
    wide = torch.zeros(3, 8)
    kernel(x, x, out=wide[:, ::2])
    assert torch.equal(wide[:, ::2], x * 3)
    assert not wide[:, 1::2].any()
    single = torch.zeros(3, 8)[:, :1]  # strides of axes with one element say nothing
    assert torch.equal(kernel(single, single), single * 3)
    assert kernel(torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0, 4)
    nine = torch.ones((1,) * 9)
    assert torch.equal(kernel(nine, nine), nine * 3)


def test_arrays_and_tensors_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = fresh(mixed), torch.arange(4.0)
    array = np.ones(4, np.float32)
    kernel(x, x)
    with straight(monkeypatch):
        assert type(kernel(x, array)) is torch.Tensor
        assert type(kernel(array, x)) is torch.Tensor
        assert type(kernel(array, array)) is np.ndarray
        out = np.empty(4, np.float32)
        assert kernel(x, x, out=out) is out
        assert out.tolist() == [0, 3, 6, 9]
        into = torch.empty(4)
        assert kernel(array, array, out=into) is into
        assert into.tolist() == [3, 3, 3, 3]


def test_results_that_overlap() -> None:
    kernel, x = fresh(shifted), torch.arange(6.0)
    kernel(x, out=torch.empty(6))
    kernel(x, out=x)
    assert x.tolist() == [5, 4, 3, 2, 1, 0]


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, plain = fresh(mixed), torch.ones(3)
    parameter, wanting = torch.nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    kernel(plain, plain)
    with straight(monkeypatch), torch.no_grad():
        assert kernel(parameter, wanting).tolist() == [3, 3, 3]
        assert not kernel(parameter, wanting).requires_grad
        assert kernel(plain, plain, out=parameter) is parameter
    with torch.inference_mode():
        inside = torch.ones(3)
    with straight(monkeypatch):
        assert kernel(inside, wanting.detach()).tolist() == [3, 3, 3]
    parameter.data.fill_(1)
    for given in ((parameter, plain), (plain, wanting), (wanting * 2, plain)):
        with pytest.raises(tw.UserError) as quick:
            kernel(*given)
        with pytest.raises(tw.UserError) as slow:
            fresh(mixed)(*given)
        assert str(quick.value) == str(slow.value)
        assert "needs gradients" in str(quick.value)
    before = parameter.tolist()
    with pytest.raises(tw.UserError):
        kernel(plain, plain, out=parameter)
    assert parameter.tolist() == before


def said(kernel: Any, *given: Any, **keywords: Any) -> Any:
    try:
        return kernel(*given, **keywords).tolist()
    except Exception as error:
        return type(error), str(error)


def test_what_is_not_plain_memory() -> None:
    """Each answer, or error, is that of a kernel that never saw a tensor."""
    x, complexes = torch.arange(3.0), torch.complex(torch.ones(3), torch.ones(3))
    kinds = [
        torch._neg_view(x), complexes.conj().imag, complexes.conj().real, x.to_sparse(), torch.zeros(3, device="meta"), x.to(torch.complex64), x[:2],
        x.double(), torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), torch.nn.Buffer(torch.ones(3)) if hasattr(torch.nn, "Buffer") else x,
    ]  # fmt: skip
    kernel = fresh(mixed)
    for value in kinds:
        kernel(x, x)
        assert said(kernel, x, value) == said(fresh(mixed), x, value)
        assert said(kernel, value, x) == said(fresh(mixed), value, x)
    for out in (torch.zeros(4), torch.zeros(3, dtype=torch.int32), torch.zeros(3, device="meta"), torch.zeros(3).to_sparse(), None):
        kernel(x, x)
        assert said(kernel, x, x, out=out) == said(fresh(mixed), x, x, out=out)
    assert kernel(x, x).tolist() == [0, 3, 6]


class Special(torch.Tensor):  # type: ignore[misc]
    """A tensor of another class."""


def test_other_classes() -> None:
    x = torch.arange(3.0)
    kernel = fresh(mixed)
    kernel(x, x)
    assert kernel(x.as_subclass(Special), x).tolist() == [0, 3, 6]


def test_memory_is_given_back() -> None:
    kernel, x = fresh(mixed), torch.ones(3)
    kernel(x, x)
    code = tensor_calls._code()
    assert code is not None
    if not torch_tensors.tensor_access().adopt:  # type: ignore[union-attr]
        pytest.skip("this PyTorch has no exchange functions")
    array = np.ones(7, np.float32)
    known, tensor = weakref.ref(array), code.adopt(array)
    del array
    gc.collect()
    assert known() is not None
    view = tensor[2:]
    del tensor
    assert known() is not None
    holder = [view]
    del view
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert known() is None
    counts = [sys.getrefcount(x)]
    for _ in range(100):
        kernel(x, x)
        kernel(x, x, out=torch.empty(3))
    assert sys.getrefcount(x) == counts[0]


def test_threads() -> None:
    kernel, wrong = fresh(mixed), []
    kernel(torch.ones(4), torch.ones(4))

    def work(seed: int) -> None:
        x, out = torch.full((50_000,), float(seed)), torch.empty(50_000)
        for _ in range(20):
            kernel(x, x, out=out)
            if not torch.equal(out, x * 3) or not torch.equal(kernel(x, x), out):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_unknown_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_calls, "tensor_access", lambda: None)
    kernel, x = fresh(mixed), torch.arange(3.0)
    for _ in range(3):
        assert kernel(x, x).tolist() == [0, 3, 6]
        assert kernel(x, x, out=torch.empty(3)).tolist() == [0, 3, 6]


def test_while_a_call_is_watched() -> None:
    kernel, x = fresh(mixed), torch.arange(3.0)
    kernel(x, x)
    with tw.profile() as seen:
        kernel(x, x)
    assert "mixed" in str(seen)
    assert kernel(x, x).tolist() == [0, 3, 6]
