"""Products and convolutions with functions after the sum, on CPUs: what follows the sum is a function of its own, and the innermost loop keeps its registers."""

from __future__ import annotations

import re

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import parse_target
from tilewright.codegen.llvm.native import emit_assembly
from tilewright.compile.build import llvm_text

TARGETS = ("x86-64-avx512", "x86-64-avx2", "aarch64-neon")


@tw.kernel
def activated(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total * 0.5 * (1.0 + tw.tanh(0.75 * (total + 0.05 * total * total * total)))
    return out


@tw.kernel
def of_functions(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += tw.exp(-a[i, p] * a[i, p]) * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def gated_image(x: tw.Array, w: tw.Array) -> tw.Array:
    batch, channels, height, width = x.shape
    filters = w.shape[0]
    out = tw.empty((batch, filters, height - 2, width - 2), x.dtype)
    for b, f, i, j in tw.grid(batch, filters, height - 2, width - 2):
        total = 0.0
        for c in range(channels):
            for r in range(3):
                for s in range(3):
                    total += x[b, c, i + r, j + s] * w[f, c, r, s]
        out[b, f, i, j] = total / (1.0 + tw.exp(-total))
    return out


def gelu(t: np.ndarray) -> np.ndarray:
    return t * 0.5 * (1.0 + np.tanh(0.75 * (t + 0.05 * t**3)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (31, 33, 1), (33, 97, 600), (127, 257, 61), (0, 5, 3), (5, 7, 0)])
def test_functions_after_a_sum(m: int, n: int, k: int, dtype: type) -> None:
    rng = np.random.default_rng(m)
    a, b = rng.standard_normal((m, k)).astype(dtype), (rng.standard_normal((k, n)) * 0.2).astype(dtype)
    wide = a.astype(np.float64), b.astype(np.float64)
    bound = {"rtol": 2e-5, "atol": 1e-4} if dtype is np.float32 else {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(np.asarray(activated(a, b)), gelu(wide[0] @ wide[1]), **bound)
    np.testing.assert_allclose(np.asarray(of_functions(a, b)), np.exp(-wide[0] ** 2) @ wide[1], **bound)


@pytest.mark.parametrize(("batch", "channels", "size", "filters"), [(1, 1, 3, 1), (2, 5, 17, 33), (1, 16, 31, 64)])
def test_functions_after_a_convolution(batch: int, channels: int, size: int, filters: int) -> None:
    rng = np.random.default_rng(size)
    x = rng.standard_normal((batch, channels, size, size + 2)).astype(np.float32)
    w = (rng.standard_normal((filters, channels, 3, 3)) * 0.2).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), axis=(2, 3))
    total = np.einsum("bcijrs,fcrs->bfij", windows, w.astype(np.float64))
    np.testing.assert_allclose(np.asarray(gated_image(x, w)), total / (1 + np.exp(-total)), rtol=2e-5, atol=1e-4)


def test_what_is_no_number_stays_in_its_results() -> None:
    a, b = np.ones((40, 50), np.float32), np.ones((50, 60), np.float32)
    a[7, 3], b[2, 11] = np.nan, np.inf
    found = np.asarray(activated(a, b))
    assert np.isnan(found[7]).all()
    assert np.isinf(found[np.arange(40) != 7, 11]).all()
    assert np.isfinite(np.delete(np.delete(found, 7, 0), 11, 1)).all()


@pytest.mark.parametrize("target", TARGETS)
def test_functions_have_registers_of_their_own(target: str) -> None:
    a, b = np.ones((64, 512), np.float32), np.ones((512, 512), np.float32)
    for kernel, arguments in ((activated, (a, b)), (of_functions, (a, b)), (gated_image, (np.ones((2, 16, 20, 20), np.float32), np.ones((32, 16, 3, 3), np.float32)))):
        text, _ = llvm_text(kernel.stages(*arguments, target=target).stages.thread, parse_target(target))
        assert "outlined" in text
        assembly = emit_assembly(text, parse_target(target))
        functions = re.split(r"\n(?=[A-Za-z_][\w.$]*:)", assembly)
        (body,) = (f for f in functions if re.match(r"[\w.]*\.body:", f))
        spilled = max(map(spills, innermost(body)), default=0)
        assert spilled == 0, f"{spilled} sums of the innermost loop of {kernel} lie on the stack"


def innermost(function: str) -> list[str]:
    """Loops without a jump inside that have at least a dozen multiply-adds."""
    found = []
    for label, code in re.findall(r"\n(\.?L\w+):[^\n]*\n((?:\t[^\n]*\n|\s*#[^\n]*\n)+)", function):
        multiplied = re.findall(r"\t(?:vfmadd\w+|fmla)\b", code)
        if len(multiplied) >= 12 and re.search(rf"\t(?:j\w+|b\.\w+|cbn?z|tbn?z)\t[^\n]*{re.escape(label)}\b", code):
            found.append(code)
    return found


def spills(code: str) -> int:
    """Stores of vector registers to the stack."""
    return len(re.findall(r"\tvmov\w+\t%[xyz]mm\d+, [^\n]*\(%rsp\)|\tst[rp]\tq\d+,[^\n]*\[sp", code))
