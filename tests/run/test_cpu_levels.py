"""Kernels of every family at the levels of CPUs this machine may not be: scalar code runs natively, SVE and NEON under qemu, all against NumPy in f64.

Sizes are one, odd ones around a register, a prime, and none at all. Floats have NaN, infinities and zeros of both signs among them where a reference can follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from other_machines import Calls, native_lacks, run
from support import as_wide, assert_close
from tilewright.base.dtypes import from_numpy
from tilewright.base.target import parse_target
from tilewright.codegen.llvm.native import emit_assembly
from tilewright.compile.build import llvm_text

SIZES = (1, 31, 33, 127, 0)
SHAPES = ((1, 1), (31, 33), (5, 127), (33, 8), (0, 7), (7, 0))
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 88.0, 91.0, -104.0)


# -- kernels ----------------------------------------------------------------------------------------------------------


@tw.kernel
def growth(x: tw.Array) -> tw.Array:
    return tw.exp(x) * 0.5 - x


@tw.kernel
def row_sums(x: tw.Array) -> tw.Array:
    return tw.sum(x, axis=1)


@tw.kernel
def column_sums(x: tw.Array) -> tw.Array:
    return tw.sum(x, axis=0)


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        most = tw.max(x[i, :])
        total = tw.sum(tw.exp(x[i, :] - most))
        for j in tw.grid(columns):
            out[i, j] = tw.exp(x[i, j] - most) / total
    return out


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    return a @ b


@tw.kernel
def product_of_rows(a: tw.Array, b: tw.Array) -> tw.Array:
    return a @ b.T


@tw.kernel
def filtered(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters, _, kh, kw = w.shape
    out = tw.empty((n, filters, height, width), x.dtype)
    for b, o, i, j in tw.grid(n, filters, height, width):
        total = x.dtype(0)
        for c in range(channels):
            for k in range(kh):
                for m in range(kw):
                    y = i + k - 1
                    z = j + m - 1
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, c, y, z] * w[o, c, k, m]
        out[b, o, i, j] = total
    return out


@tw.kernel
def pooled(x: tw.Array) -> tw.Array:
    n, height, width = x.shape
    out = tw.empty((n, height // 2, width // 2), x.dtype)
    for b, i, j in tw.grid(n, height // 2, width // 2):
        most = x.dtype(-tw.inf)
        for k in range(2):
            for m in range(2):
                most = tw.max(most, x[b, 2 * i + k, 2 * j + m])
        out[b, i, j] = most
    return out


@tw.kernel
def smoothed(u: tw.Array, steps: int) -> tw.Array:
    n, m = u.shape
    a = u * 1.0
    b = u * 1.0
    for _ in range(steps):
        for i, j in tw.grid(n - 2, m - 2):
            b[i + 1, j + 1] = (a[i, j + 1] + a[i + 2, j + 1] + a[i + 1, j] + a[i + 1, j + 2]) / 4
        a, b = b, a
    return a


@tw.kernel
def running_sums(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        total = x.dtype(0)
        for j in range(columns):
            total += x[i, j]
            out[i, j] = total
    return out


@tw.kernel
def medians(x: tw.Array) -> tw.Array:
    """Rows are sorted."""
    return tw.median(x, axis=1)


@tw.kernel
def solved(lower: tw.Array, right: tw.Array) -> tw.Array:
    """Forward substitution with a lower triangular matrix."""
    n = lower.shape[0]
    x = right * 1.0
    for k in range(n):
        x[k] = x[k] / lower[k, k]
        for i in range(k + 1, n):
            x[i] = x[i] - lower[i, k] * x[k]
    return x


@tw.kernel
def largest_places(x: tw.Array) -> tw.Array:
    return tw.argmax(x, axis=1)


@tw.kernel
def checksum(x: tw.Array) -> tw.Array:
    n, m = x.shape
    out = tw.empty((n,), tw.u32)
    for i in tw.grid(n):
        total = tw.u32(0)
        for j in range(m):
            total += (x[i, j] ^ (x[i, j] >> tw.u32(7))) * tw.u32(2654435761)
        out[i] = total
    return out


@tw.kernel
def chosen(x: tw.Array, keep: tw.Array) -> tw.Array:
    """Sixteen bits in memory, and masks from another array."""
    n, m = x.shape
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        if keep[i, j]:
            out[i, j] = x[i, j] * 2.0 + 1.0
        else:
            out[i, j] = 0.0
    return out


# -- inputs and what is expected --------------------------------------------------------------------------------------

Arguments = tuple[object, ...]


@dataclass(frozen=True)
class Case:
    name: str
    kernel: tw.Kernel
    arguments: Callable[[], Sequence[Arguments]]
    reference: Callable[..., np.ndarray]
    ulp: float = 4.0
    scale: Callable[..., np.ndarray] | None = None
    """The magnitude that errors are relative to, where results can cancel."""


def floats(dtype: str, *shape: int, special: bool = False) -> np.ndarray:
    rng = np.random.default_rng(sum(n * 31**k for k, n in enumerate(shape)))
    made = rng.standard_normal(shape) * 2
    if special:
        flat = made.reshape(-1)
        few = SPECIAL[: flat.size // 2]
        flat[rng.permutation(flat.size)[: len(few)]] = few
    return made.astype(dtype)


def matrices(dtype: str, special: bool = False) -> Callable[[], list[Arguments]]:
    return lambda: [(floats(dtype, *shape, special=special),) for shape in SHAPES]


def factors(dtype: str, turned: bool = False) -> Callable[[], list[Arguments]]:
    sizes = ((33, 31, 33), (1, 1, 1), (127, 65, 31), (5, 0, 7), (0, 3, 5), (17, 131, 70))

    def make() -> list[Arguments]:
        pairs = [(floats(dtype, n, k), floats(dtype, *((m, k) if turned else (k, m)))) for n, k, m in sizes]
        pairs[0][0][3, 5], pairs[0][1][2, 2], pairs[2][0][1, 7] = np.inf, np.nan, -np.inf
        return pairs

    return make


def filters() -> list[Arguments]:
    shapes = (((1, 3, 13, 31), 5), ((2, 1, 1, 1), 1), ((1, 4, 7, 33), 17), ((0, 2, 5, 5), 3))
    return [(floats("f4", *shape), floats("f4", count, shape[1], 3, 3)) for shape, count in shapes]


def planes() -> list[Arguments]:
    return [(floats("f4", *shape, special=True),) for shape in ((1, 2, 2), (3, 31, 33), (2, 8, 127), (1, 1, 1), (0, 4, 4))]


def systems() -> list[Arguments]:
    return [(np.tril(floats("f8", n, n)) * 0.1 + 3 * np.eye(n), floats("f8", n)) for n in (1, 31, 33, 67, 0)]


def exact_filtered(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.einsum("bcijkm,ockm->boij", windows, w)


def exact_pooled(x: np.ndarray) -> np.ndarray:
    n, height, width = x.shape
    return x[:, : height // 2 * 2, : width // 2 * 2].reshape(n, height // 2, 2, width // 2, 2).max((2, 4), initial=-np.inf)


def exact_smoothed(u: np.ndarray, steps: int) -> np.ndarray:
    a, b = u.copy(), u.copy()
    for _ in range(steps):
        b[1:-1, 1:-1] = (a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:]) / 4
        a, b = b, a
    return a


def exact_solved(lower: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.linalg.solve(lower, right) if len(right) else right


def exact_softmax(x: np.ndarray) -> np.ndarray:
    shares = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
    return shares / shares.sum(-1, keepdims=True)


def exact_checksum(x: np.ndarray) -> np.ndarray:
    return ((x ^ (x >> np.uint32(7))) * np.uint32(2654435761)).sum(1, dtype=np.uint32)


def _sizes_of(axis: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.abs(np.nan_to_num(x, posinf=0, neginf=0)).sum(axis) + 1


def _largest(x: np.ndarray) -> np.ndarray:
    return x.argmax(1) if x.shape[1] else np.zeros(len(x), np.int64)


def _products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.abs(np.nan_to_num(a, posinf=0, neginf=0)) @ np.abs(np.nan_to_num(b, posinf=0, neginf=0)) + 1


RNG = np.random.default_rng(5)
CASES = (
    Case("exp_f32", growth, lambda: [(floats("f4", n, special=True),) for n in SIZES], lambda x: np.exp(x) * 0.5 - x, scale=lambda x: np.abs(x)),
    Case("exp_f64", growth, lambda: [(floats("f8", n, special=True),) for n in SIZES], lambda x: np.exp(x) * 0.5 - x, scale=lambda x: np.abs(x)),
    Case("row_sums", row_sums, matrices("f4", special=True), lambda x: x.sum(1), 8, _sizes_of(1)),
    Case("column_sums", column_sums, matrices("f8", special=True), lambda x: x.sum(0), 8, _sizes_of(0)),
    Case("softmax", softmax, lambda: matrices("f4")()[:5], exact_softmax, 16),
    Case("product_f32", product, factors("f4"), np.matmul, 8, _products),
    Case("product_f64", product, factors("f8"), np.matmul, 8, _products),
    Case("product_of_rows", product_of_rows, factors("f4", turned=True), lambda a, b: a @ b.T, 8, lambda a, b: _products(a, b.T)),
    Case("convolution", filtered, filters, exact_filtered, 8, lambda x, w: exact_filtered(np.abs(x), np.abs(w))),
    Case("max_pooling", pooled, planes, exact_pooled, 0),
    Case("stencil", smoothed, lambda: [(floats("f4", *s), 5) for s in ((31, 33), (3, 3), (7, 131))], exact_smoothed, 8, lambda u, steps: np.full(u.shape, 8.0)),
    Case("stencil_f64", smoothed, lambda: [(floats("f8", *s), 4) for s in ((31, 33), (3, 3), (7, 131))], exact_smoothed, 8, lambda u, steps: np.full(u.shape, 8.0)),
    Case("scan", running_sums, lambda: matrices("f8")()[:5], lambda x: np.cumsum(x, 1), 8, lambda x: np.cumsum(np.abs(x), 1) + 1),
    Case("sort", medians, lambda: [(floats("f4", *s),) for s in ((31, 33), (1, 1), (5, 128), (0, 3))], lambda x: np.median(x, 1)),
    Case("triangular_solve", solved, systems, exact_solved, 64, lambda a, b: np.full(b.shape, 4.0)),
    Case("argmax", largest_places, lambda: [a for a in matrices("f4", special=True)() if np.asarray(a[0]).shape[1]], _largest),
    Case("checksum", checksum, lambda: [(RNG.integers(0, 2**32, s, np.uint32),) for s in SHAPES], exact_checksum),
    Case("masks_f16", chosen, lambda: [(floats("f2", *s), RNG.random(s) < 0.5) for s in SHAPES], lambda x, keep: np.where(keep, x * 2 + 1, 0)),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
FEW = ("exp_f32", "row_sums", "product_f64", "max_pooling", "scan")

LEVELS = (
    *(pytest.param("x86-64-scalar", case, id=f"x86-64-scalar-{case.name}") for case in CASES),
    *(pytest.param("aarch64-sve256", case, id=f"aarch64-sve256-{case.name}", marks=pytest.mark.requires("qemu")) for case in CASES),
    *(
        pytest.param(target, BY_NAME[name], id=f"{target}-{name}", marks=pytest.mark.requires("qemu"))
        for target in ("aarch64-sve512", "aarch64-neon", "aarch64-scalar")
        for name in FEW
    ),
)  # fmt: skip


@pytest.mark.parametrize(("target", "case"), LEVELS)
def test_results(target: str, case: Case, tmp_path: Path) -> None:
    if target.startswith("x86") and native_lacks():
        pytest.skip(native_lacks())
    given = list(case.arguments())
    with np.errstate(all="ignore"):
        wide = [[as_wide(a) if isinstance(a, np.ndarray) else a for a in arguments] for arguments in given]
        wanted = [case.reference(*arguments) for arguments in wide]
        scales = [case.scale(*arguments) if case.scale else None for arguments in wide]
    first = np.asarray(given[0][0]).dtype
    kind = {"argmax": np.dtype(np.int64)}.get(case.name, first)
    results = [[np.empty(want.shape, kind)] for want in wanted]
    found = run({"f": Calls(case.kernel, given, results)}, target, tmp_path)["f"]
    dtype = from_numpy(kind)
    assert dtype is not None
    for arguments, (got,), want, scale in zip(given, found, wanted, scales, strict=True):
        assert_close(got, want, dtype, case.ulp, scale, f"{case.name}{[np.shape(a) for a in arguments]} for {target}")


# -- the code ---------------------------------------------------------------------------------------------------------


def assembly(kernel: tw.Kernel, target: str, *arguments: object) -> str:
    text, _ = llvm_text(kernel.stages(*arguments, target=target).stages.thread, parse_target(target))
    return emit_assembly(text, parse_target(target))


@pytest.mark.parametrize("target", ["aarch64-sve256", "aarch64-sve512"])
def test_a_vector_is_one_sve_register(target: str) -> None:
    """Whole registers are loaded, exponentials are predicated, and no pairs of short registers stand for one."""
    text = assembly(growth, target, floats("f4", 1000))
    assert re.search(r"\bfm(la|ad)\s+z\d+\.s, p\d+/m", text)
    assert re.search(r"\bldr\s+z\d+, \[|\bld1w\s+\{ z\d+\.s }", text)
    assert not re.search(r"\bq\d+\b|\bv\d+\.(4s|16b)", text)


def test_products_multiply_sve_registers() -> None:
    text = assembly(product, "aarch64-sve256", floats("f4", 100, 100), floats("f4", 100, 100))
    assert len(re.findall(r"\bfmla\s+z\d+\.s, p\d+/m", text)) >= 24
    assert not re.search(r"\bfmla\s+v\d+\.4s", text)


def test_scalar_code_is_narrow() -> None:
    """Nothing beyond the instructions that every x86-64 has."""
    text = assembly(growth, "x86-64-scalar", floats("f4", 1000))
    assert not re.search(r"%[yz]mm|\bv[a-z]+ps\b|\bpblendv|\bround[ps]s", text)
