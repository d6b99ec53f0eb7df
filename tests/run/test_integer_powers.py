"""`a ** b` of integers that only the run knows, against NumPy: every dtype, exponents that wrap, and negative ones."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

import tilewright as tw
from kernel_table import from_text
from tilewright.ir.text import print_program

DTYPES = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)


@tw.kernel
def element_powers(x: tw.Array, y: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] ** y[i]
    return out


@tw.kernel
def whole_powers(x: tw.Array, y: tw.Array) -> tw.Array:
    return x**y


@tw.kernel
def powers_of_two(x: tw.Array) -> tw.Array:
    return 2**x


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_numpy_has_them(dtype: type, device: str) -> None:
    rng = np.random.default_rng(0)
    limits = np.iinfo(dtype)
    for n in (0, 1, 33):
        x = rng.integers(limits.min, limits.max, n, dtype, endpoint=True)
        y = rng.integers(0, limits.max, n, dtype, endpoint=True)
        x[: n // 2] %= dtype(9)
        y[: n // 2] %= dtype(40)
        want = x**y
        for kernel in (element_powers, whole_powers) if dtype is np.int32 else (whole_powers,):
            got = kernel(x, y, device=device)
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_negative_exponents_leave_no_fraction(device: str) -> None:
    x = np.arange(-3, 4, dtype=np.int32)
    np.testing.assert_array_equal(whole_powers(x, np.full(7, -3, np.int32), device=device), [0, 0, -1, 0, 1, 0, 0])
    np.testing.assert_array_equal(whole_powers(x, np.full(7, -2, np.int32), device=device), [0, 0, 1, 0, 1, 0, 0])
    lowest = np.full(7, np.iinfo(np.int32).min, np.int32)
    np.testing.assert_array_equal(whole_powers(x, lowest, device=device), [0, 0, 1, 0, 1, 0, 0])
    np.testing.assert_array_equal(powers_of_two(np.arange(5), device=device), [1, 2, 4, 8, 16])


@pytest.mark.parametrize("target", ["sm_90a", "wgsl", "msl", "spirv-vulkan", "gfx942"])
def test_code_for_every_target(target: str) -> None:
    x = np.zeros(33, np.int32)
    assert whole_powers.compile(x, x, target=target).code


CONTEXTS: dict[str, Callable[[np.ndarray, np.ndarray], object]] = {
    "tw.sum(x ** y)": lambda x, y: np.sum(x**y, dtype=x.dtype), "tw.max(x ** y, axis=0)": lambda x, y: np.max(x**y, axis=0), "(x ** y) @ tw.transpose(y)": lambda x, y: (x**y) @ y.T,
    "tw.where(y > 2, x ** y, x)": lambda x, y: np.where(y > 2, x**y, x), "(x ** y) ** y": lambda x, y: (x**y) ** y, "x ** y[0] + 1": lambda x, y: x ** y[0] + 1,
    "tw.cast(x ** y, tw.f32) / 2": lambda x, y: (x**y).astype(np.float32) / 2, "tw.any(x ** y > 100)": lambda x, y: np.any(x**y > 100),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("form", CONTEXTS)
def test_inside_expressions(form: str, device: str) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.integers(-3, 4, (5, 16)).astype(np.int32), rng.integers(0, 6, (5, 16)).astype(np.int32)
    kernel = from_text(f"def powers(x: tw.Array, y: tw.Array):\n    return {form}\n")
    np.testing.assert_array_equal(kernel(x, y, device=device), CONTEXTS[form](x, y))
    assert kernel.compile(x, y, target="sm_90a").code


@pytest.mark.parametrize(("exponent", "products"), [(2, 1), (3, 2), (4, 2)])
def test_constant_exponents_are_products(exponent: int, products: int) -> None:
    x = np.arange(-5, 60)
    kernel = from_text(f"def powers(x: tw.Array):\n    return x ** {exponent}\n")
    np.testing.assert_array_equal(kernel(x, device="cpu"), x**exponent)
    text = print_program(kernel.stages(x, target="sm_90a").stages.loop)
    assert text.count("= mul ") == products and "while " not in text and "= pow " not in text, text


def test_small_exponents_take_few_products() -> None:
    """In turns with NumPy, the least time of each: taking all bits of the exponent took twenty times as long as NumPy."""
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 100, 200_000), rng.integers(0, 6, 200_000)
    out = np.empty_like(x)
    ways: list[Callable[[], object]] = [lambda: np.power(x, y), lambda: whole_powers(x, y, out=out, device="cpu")]
    times: list[list[float]] = [[], []]
    for _ in range(12):
        for way, taken in zip(ways, times, strict=True):
            begin = time.process_time()
            way()
            taken.append(time.process_time() - begin)
    assert min(times[1]) < 5 * min(times[0]), times
