"""Complex arrays in the memory of a device: made, copied, viewed, filled, shared, and given to kernels, on the null driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from copy_kernels import register_copies
from kernel_table import from_text
from null_cuda import NullCuda
from null_cuda.install import installed
from tilewright.base.errors import UserError
from tilewright.runtime.memory.device_array import DeviceArray

DTYPES = {tw.complex64: np.complex64, tw.complex128: np.complex128}


@pytest.fixture
def driver() -> Iterator[NullCuda]:
    with installed(count=2, mode="lazy") as made:
        register_copies(made)
        yield made
        assert made.violations == []


def numbers(*shape: int, dtype: Any = np.complex64) -> np.ndarray:
    rng = np.random.default_rng(3)
    return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_and_views(driver: NullCuda, dtype: tw.DType) -> None:
    values = numbers(5, 6, dtype=DTYPES[dtype])
    array = tw.to_device(values, "cuda")
    assert array.dtype is dtype and array.shape == (5, 6) and array.nbytes == values.nbytes
    np.testing.assert_array_equal(array.numpy(), values)
    np.testing.assert_array_equal(array[::2, ::-2].numpy(), values[::2, ::-2])
    np.testing.assert_array_equal(array.T.copy().numpy(), values.T)
    np.testing.assert_array_equal(tw.to_device(array, "cuda:1").numpy(), values)
    np.testing.assert_array_equal(tw.to_device(array, "cpu"), values)
    assert array[1, 2].item() == values[1, 2]
    assert tw.to_device(values[:0], "cuda").numpy().shape == (0, 6)
    into = np.empty_like(values)
    np.testing.assert_array_equal(array.to_host(into), values)


def test_making_and_filling(driver: NullCuda) -> None:
    for said in (tw.complex64, "complex64", np.complex64):
        assert tw.allocate((2, 3), said, "cuda").dtype is tw.complex64
        assert tw.allocate((2, 3), said).dtype == np.complex64
    array = tw.array([[1, 2], [3, 4]], tw.complex128, "cuda")
    array[0] = 2 - 1j
    array[1, 0] = 0.5
    array[1, 1] = np.complex64(3j)
    np.testing.assert_array_equal(array.numpy(), [[2 - 1j, 2 - 1j], [0.5, 3j]])
    array[0] = [1j, 2]
    array[1] = np.array([1.5, 2], np.float32)
    np.testing.assert_array_equal(array.numpy(), [[1j, 2], [1.5, 2]])
    array.fill(0)
    assert not array.numpy().any()
    assert tw.array([1j], device="cuda").dtype is tw.complex128
    wide = tw.to_device(np.zeros((2, 2)), "cuda")
    wide[1, 0] = 0.3
    np.testing.assert_array_equal(wide.numpy(), [[0, 0], [0.3, 0]])


def test_conversions(driver: NullCuda) -> None:
    values = numbers(4, 3)
    array = tw.to_device(values, "cuda")
    np.testing.assert_array_equal(array.astype(tw.complex128).numpy(), values.astype(np.complex128))
    np.testing.assert_array_equal(tw.to_device(values.real.copy(), "cuda").astype(tw.complex64).numpy(), values.real.astype(np.complex64))
    with pytest.raises(UserError, match="complex"):
        array.astype(tw.f32)


@tw.kernel
def rotate(z: tw.Array, w: tw.Array) -> tw.Array:
    rows, cols = z.shape
    out = tw.empty((rows, cols), z.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = z[i, j] * w[j] + 1j
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_take_and_return_them(driver: NullCuda, dtype: tw.DType) -> None:
    z, w = numbers(5, 6, dtype=DTYPES[dtype]), numbers(6, dtype=DTYPES[dtype])
    want = z * w + 1j
    there, other = tw.to_device(z, "cuda"), tw.to_device(w, "cuda")
    for _ in range(3):
        found = rotate(there, other)
        assert isinstance(found, DeviceArray) and found.dtype is dtype and found.shape == (5, 6)
        np.testing.assert_allclose(found.numpy(), want, rtol=1e-5)
    np.testing.assert_allclose(rotate(found, other).numpy(), want * w + 1j, rtol=1e-5)
    out = tw.allocate((5, 6), dtype, "cuda")
    assert rotate(there, other, out=out) is out
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-5)
    np.testing.assert_allclose(rotate(there[:, ::-1], other[::-1]).numpy(), (z * w)[:, ::-1] + 1j, rtol=1e-5)
    np.testing.assert_allclose(rotate(there, w).numpy(), want, rtol=1e-5)


@pytest.mark.parametrize(
    ("form", "want"), [("tw.abs(z)", np.abs), ("z.real + z.imag", lambda z: z.real + z.imag), ("tw.sum(z, axis=1)", lambda z: z.sum(1)), ("tw.exp(z)", np.exp), ("tw.sum(z * tw.conj(z), axis=0) / 2", lambda z: (z * z.conj()).sum(0) / 2)]
)  # fmt: skip
def test_functions_and_sums(driver: NullCuda, form: str, want: Any) -> None:
    z = numbers(4, 6)
    found = from_text(f"def made(z: tw.Array):\n    return {form}\n")(tw.to_device(z, "cuda"))
    assert isinstance(found, DeviceArray) and found.dtype.numpy == want(z).dtype
    np.testing.assert_allclose(found.numpy(), want(z), rtol=1e-4, atol=1e-5)


def test_complex_results_of_floats(driver: NullCuda) -> None:
    x = np.arange(6, dtype=np.float32)
    found = from_text("def made(x: tw.Array):\n    return x + 2j * x\n")(tw.to_device(x, "cuda"))
    assert found.dtype.is_complex
    np.testing.assert_allclose(found.numpy(), x + 2j * x)


def test_dlpack(driver: NullCuda) -> None:
    values = numbers(3, 4)
    array = tw.to_device(values, "cuda")
    back = tw.from_dlpack(array)
    assert isinstance(back, DeviceArray) and back.dtype is tw.complex64 and back.pointer == array.pointer
    np.testing.assert_array_equal(back[:, ::2].numpy(), values[:, ::2])
    assert array.__cuda_array_interface__["typestr"] == "<c8"


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda z: z.__setitem__(0, "x"), "a str cannot be assigned"),
        (lambda z: tw.to_device(np.zeros(3), "cuda").__setitem__(0, 1j), "1j to an array of f64 would lose data"),
        (lambda z: tw.to_device(np.zeros(3, np.int32), "cuda").__setitem__(0, [1j]), "complex128 to an array of i32 would lose"),
        (lambda z: tw.to_device(np.zeros((3, 4)), "cuda").assign(z), "complex64 to an array of f64 would lose data"),
        (lambda z: rotate(z, z[0], out=tw.allocate((3, 4), tw.complex128, "cuda")), "has dtype complex128, and the result is complex64"),
        (lambda z: rotate(z, z[0], out=tw.allocate((3, 4, 2), tw.f32, "cuda")), "has dtype f32, and the result is complex64"),
        (lambda z: tw.scan(z), "complex"), (lambda z: tw.gpu_sort(z), "complex"),
        (lambda z: tw.random.normal(1, shape=3, dtype=tw.complex64, device="cuda"), "complex"),
        (lambda z: tw.to_device(np.zeros(3, [("a", np.float32)]), "cuda"), "are not supported"),
    ],
)  # fmt: skip
def test_refused(driver: NullCuda, do: Any, message: str) -> None:
    with pytest.raises((UserError, TypeError), match=message):
        do(tw.to_device(numbers(3, 4), "cuda"))


def test_explicit_kernels_refuse_them(driver: NullCuda) -> None:
    @tw.gpu
    def double(x: tw.GpuBuffer[tw.f32], n: tw.i32) -> None:
        if tw.grid.x < n:
            x[tw.grid.x] += x[tw.grid.x]

    with pytest.raises(UserError, match="complex"):
        double[1, 32](tw.to_device(numbers(4), "cuda"), 4)


PROGRAM = """
pipeline turned(z, w) {
    let a = compute(z, w) { for i in 0..n: out[i] = z[i] * w[i] }
    let b = compute(a) { for i in 0..n: out[i] = a[i] + a[i] }
    return b
}
let b = turned(z, w)
let c = b * 2.0
"""


def test_programs_take_them(driver: NullCuda) -> None:
    z, w = numbers(6), numbers(6)[::-1].copy()
    program = tw.load(PROGRAM)
    for _ in range(3):
        found = program.run(z=tw.to_device(z, "cuda"), w=tw.to_device(w, "cuda"))
        np.testing.assert_allclose(np.asarray(found["b"]), 2 * z * w, rtol=1e-5)
        np.testing.assert_allclose(np.asarray(found["c"]), 4 * z * w, rtol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_devices_without_memory_of_their_own(device: str) -> None:
    z, w = numbers(5, 6), numbers(6)
    there = tw.to_device(z, device)
    assert isinstance(there, np.ndarray) and there.dtype == np.complex64
    np.testing.assert_allclose(rotate(there, tw.to_device(w, device), device=device), z * w + 1j, rtol=1e-5)
