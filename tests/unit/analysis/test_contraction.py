"""Which loop nests are contractions, what each factor is and how it lies in memory: by structure, in any order of indices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from kernel_table import from_text
from kernels_matrix import convolution_kernel, nest, product_kernel
from tilewright.analysis.contraction import (
    Contraction,
    Factor,
    Image,
    Plane,
    find_contraction,
    image,
    plane,
    restates_bounds,
)
from tilewright.base.dtypes import DType, bf16, f8e4m3, f16, f32, f64, i8, i32
from tilewright.base.sizes import Size
from tilewright.compile.driver import front_end
from tilewright.ir.nodes import Kernel
from tilewright.passes.routes import prepare
from tilewright.passes.runner import Trace

MatrixKernel = tw.Kernel[..., Any]


def zeros(*shape: int, dtype: DType = f32) -> np.ndarray:
    return np.zeros(shape, dtype.numpy)


def loops(kernel: MatrixKernel, *arguments: object, gpu: bool = True) -> Kernel:
    """The kernel as schedules are chosen for it."""
    runner = kernel.runner
    signature = runner.signature(runner.arguments(kernel.bound(*arguments), gpu), gpu)
    call, *repairs = prepare(front_end(kernel.function, signature)[1], Trace()).calls
    assert len(repairs) == ("repaired" in call.kernel.attrs), "a triangle has a second kernel, and nothing else has"
    return call.kernel


def contraction(kernel: MatrixKernel, *arguments: object, gpu: bool = True) -> Contraction:
    found = find_contraction(loops(kernel, *arguments, gpu=gpu))
    assert found is not None
    return found


def names(found: Contraction) -> tuple[str, str, str]:
    """The indices of batch, m and n, by name."""
    batch, m, n = ("".join(found.indices[p].name for p in side) for side in (found.batch, found.m, found.n))
    return batch, m, n


def reads(factor: Factor) -> str:
    """The array a plain factor loads."""
    assert factor.load is not None
    return factor.load.operands[0].name


A, B = zeros(24, 40), zeros(40, 56)


# -- products of matrices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "term", "store"),
    list(itertools.product(["i, j", "j, i"], ["a[i, p] * b[p, j]", "b[p, j] * a[i, p]"], ["i, j", "j, i"])),
)
def test_a_product_in_every_order(grid: str, term: str, store: str) -> None:
    extents = {"i": "m", "j": "n"}
    order, shape = (", ".join(extents[x] for x in text.split(", ")) for text in (grid, store))
    kernel = from_text(
        f"def product(a: tw.Array, b: tw.Array) -> tw.Array:\n    m, k = a.shape\n    n = b.shape[1]\n"
        f"    out = tw.empty(({shape}), a.dtype)\n"
        f"    for {grid} in tw.grid({order}):\n        acc = tw.f32(0)\n        for p in range(k):\n            acc += {term}\n"
        f"        out[{store}] = acc\n    return out\n"
    )
    found = contraction(kernel, A, B)
    # Results lie side by side along n, so which factor is first follows from the store alone.
    across, down = store[-1], store[0]
    assert names(found) == ("", down, across)
    assert (reads(found.a), reads(found.b)) == (("a", "b") if across == "j" else ("b", "a"))
    assert found.accumulator is f32
    assert found.size(found.m) == Size.of("m" if across == "j" else "n")
    assert found.k_size == Size.of("k")
    assert names(found.swapped()) == ("", across, down)


@pytest.mark.parametrize(
    ("layout", "first", "second"),
    [
        ("kn", Plane(0, 1), Plane(1, 0)),
        ("nk", Plane(0, 1), Plane(0, 1)),
        ("tn", Plane(1, 0), Plane(1, 0)),
        ("tt", Plane(1, 0), Plane(0, 1)),
    ],
)
def test_either_factor_may_lie_either_way(layout: str, first: Plane, second: Plane) -> None:
    a = zeros(40, 24) if layout[0] == "t" else A
    b = zeros(56, 40) if layout in ("nk", "tt") else B
    found = contraction(product_kernel(layout), a, b)
    assert (plane(found, found.a), plane(found, found.b)) == (first, second)


def test_strides_do_not_matter() -> None:
    views = zeros(24, 80)[:, ::2], zeros(40, 56)[::-1]
    found = contraction(product_kernel("kn"), *views, gpu=False)
    assert (plane(found, found.a), plane(found, found.b)) == (Plane(0, 1), Plane(1, 0))
    turned = contraction(product_kernel("kn"), zeros(40, 24).T, zeros(56, 40).T, gpu=False)
    assert names(turned) == names(found)


def test_an_index_with_an_offset_walks_but_one_with_a_step_does_not() -> None:
    half = nest(
        "a, b",
        "m, k = a.shape; n = b.shape[1]; h = k // 2",
        "m, n",
        "a.dtype",
        "i: m, j: n",
        [("p", "h")],
        "a[i, 2 * p] * b[p + 1, j]",
    )
    found = contraction(half, A, B)
    assert plane(found, found.a) is None
    assert plane(found, found.b) == Plane(1, 0)


@pytest.mark.parametrize(
    ("dtype", "zero", "sums"), [(bf16, "tw.f32(0)", f32), (f16, "tw.f32(0)", f32), (f64, "tw.f64(0)", f64)], ids=str
)
def test_the_accumulator_has_a_dtype_of_its_own(dtype: DType, zero: str, sums: DType) -> None:
    found = contraction(product_kernel("kn", zero), A.astype(dtype.numpy), B.astype(dtype.numpy))
    assert (found.a.dtype, found.b.dtype, found.accumulator) == (dtype, dtype, sums)


def test_casts_that_only_widen_are_no_part_of_a_factor() -> None:
    whole = contraction(
        product_kernel("kn", "tw.i32(0)", "tw.i32", "tw.i32({a}) * tw.i32({b})"),
        zeros(24, 40, dtype=i8),
        zeros(40, 56, dtype=i8),
    )
    assert (whole.a.dtype, whole.b.dtype, whole.accumulator) == (i8, i8, i32)
    assert (reads(whole.a), reads(whole.b)) == ("a", "b")
    narrow = contraction(product_kernel("kn", dtype="tw.bf16"), zeros(24, 40, dtype=f8e4m3), zeros(40, 56, dtype=f8e4m3))
    assert (narrow.a.dtype, narrow.b.dtype) == (f8e4m3, f8e4m3)
    mixed = contraction(product_kernel("kn"), A, zeros(40, 56, dtype=bf16))
    assert (mixed.a.dtype, mixed.b.dtype) == (f32, bf16)


# -- batches --------------------------------------------------------------------------------------------------------


def batched(term: str, last: str, grid: str = "h: t, i: m, j: n", shape: str = "t, m, n") -> MatrixKernel:
    return nest("a, b", f"t, m, k = a.shape; n = {last}", shape, "a.dtype", grid, [("p", "k")], term)


def test_an_index_both_factors_have_is_a_batch() -> None:
    found = contraction(batched("a[h, i, p] * b[h, p, j]", "b.shape[2]"), zeros(3, 24, 40), zeros(3, 40, 56))
    assert names(found) == ("h", "i", "j")
    assert (plane(found, found.a), plane(found, found.b)) == (Plane(1, 2), Plane(2, 1))
    inside = contraction(
        batched("a[h, i, p] * b[h, p, j]", "b.shape[2]", "i: m, h: t, j: n", "m, t, n"), zeros(3, 24, 40), zeros(3, 40, 56)
    )
    assert names(inside) == ("h", "i", "j")


def test_rows_of_a_batch_that_share_the_other_factor_are_one_side() -> None:
    found = contraction(batched("a[h, i, p] * b[p, j]", "b.shape[1]"), zeros(3, 24, 40), zeros(40, 56))
    batch, m, n = names(found)
    assert (batch, n) == ("", "j")
    assert found.size(found.m) == Size.of("t") * Size.of("m")
    assert len(m) >= 1


# -- prologues, epilogues, guards -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "extra", "plain"),
    [
        ("{a} * tw.cast(tw.f32({b}) * s[j], tw.bf16)", ", s", (True, False)),
        ("({a} * s[p]) * {b}", ", s", (False, True)),
        ("tw.relu({a}) * tw.exp({b})", "", (False, False)),
        ("{a} * tw.where({b} > 0.0, {b}, 0.0)", "", (True, False)),
    ],
)
def test_a_factor_may_be_computed(term: str, extra: str, plain: tuple[bool, bool]) -> None:
    b = zeros(40, 40, dtype=i8) if "tw.f32(" in term else zeros(40, 40)
    a = zeros(24, 40, dtype=bf16 if b.dtype == np.int8 else f32)
    found = contraction(product_kernel("kn", term=term, extra=extra), a, b, *([zeros(40)] if extra else []))
    assert (found.a.load is not None, found.b.load is not None) == plain
    assert names(found) == ("", "i", "j")
    assert [plane(found, f) is not None for f in (found.a, found.b)] == list(plain)
    if "tw.bf16" in term:
        assert found.b.dtype is bf16


def test_a_product_of_three_has_two_factors() -> None:
    found = contraction(product_kernel("kn", term="({a} * r[i]) * {b}", extra=", r"), A, B, zeros(24))
    assert found.a.load is None
    assert reads(found.b) == "b"


@pytest.mark.parametrize(
    "result", ["acc + c[j]", "tw.gelu(acc + c[j])", "acc * c[j] + tw.exp(acc)", "tw.where(acc > 0.0, acc, c[j])"]
)
def test_what_is_done_to_results_does_not_matter(result: str) -> None:
    found = contraction(product_kernel("kn", result=result, extra=", c"), A, B, zeros(56))
    assert names(found) == ("", "i", "j")
    assert (reads(found.a), reads(found.b)) == ("a", "b")


@pytest.mark.parametrize("form", ["if", "select"])
@pytest.mark.parametrize(("test", "sides"), [("p <= i", (True, False)), ("p != j", (False, True)), ("p != 3", (True, True))])
def test_a_guard_belongs_to_the_factor_whose_indices_it_tests(form: str, test: str, sides: tuple[bool, bool]) -> None:
    inside = [f"if {test}:"] if form == "if" else []
    term = "{a} * {b}" if form == "if" else f"tw.where({test}, {{a}} * {{b}}, 0.0)"
    found = contraction(product_kernel("kn", term=term, inside=inside), A, B)
    assert (found.a.guard is not None, found.b.guard is not None) == sides
    assert [restates_bounds(found, f) for f in (found.a, found.b)] == [not s for s in sides]
    assert [plane(found, f) is None for f in (found.a, found.b)] == list(sides)


def test_a_triangle_is_a_contraction_with_a_guard() -> None:
    found = contraction(pairs("a[i, p] * b[p, j]", k="i"), A, B)
    assert found.a.guard is not None
    assert found.b.guard is None
    assert (reads(found.a), reads(found.b)) == ("a", "b")


# -- convolutions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", [False, True], ids=["if", "select"])
@pytest.mark.parametrize(("stride", "pad", "dilation"), [(1, 1, 1), (2, 1, 1), (1, 2, 2), (3, 4, 2)])
def test_a_convolution_with_channels_last_reads_an_image(stride: int, pad: int, dilation: int, select: bool) -> None:
    found = contraction(convolution_kernel(True, stride, pad, dilation, select), zeros(2, 9, 11, 32), zeros(48, 3, 3, 32))
    assert names(found) == ("", "bij", "o")
    assert restates_bounds(found, found.a)
    assert found.b.guard is None
    assert image(found, found.a) == Image((stride, stride), (dilation, dilation), (-pad, -pad), (0, 1), 2, (1, 2))
    assert image(found, found.b) is None
    assert plane(found, found.b, inner=2) == Plane(0, 3)
    assert plane(found, found.b) is None, "three indices are summed over"


def test_a_convolution_with_channels_first_is_one_but_no_image() -> None:
    found = contraction(convolution_kernel(False), zeros(2, 32, 9, 11), zeros(48, 32, 3, 3))
    # Neighbouring results are pixels, so these are the columns.
    assert names(found) == ("", "o", "bij")
    assert restates_bounds(found, found.b)
    assert image(found, found.b) is None


def test_a_convolution_without_a_border_needs_no_guard() -> None:
    found = contraction(convolution_kernel(True, pad=0), zeros(2, 9, 11, 32), zeros(48, 3, 3, 32))
    lies = image(found, found.a)
    assert lies is not None
    assert lies.lower == (0, 0)


@pytest.mark.parametrize(
    "test", ["y >= 1 and y < h", "y >= 0 and y < h - 1", "y >= 0 and y < w", "z >= 0 and y < h", "i + u >= 1 and h > y"]
)
def test_a_guard_that_says_more_than_the_bounds_is_one(test: str) -> None:
    kernel = nest(
        "x, f",
        "n, h, w, c = x.shape; k, r, s, d = f.shape",
        "n, h, w, k",
        "x.dtype",
        "b: n, i: h, j: w, o: k",
        [("u", "r"), ("v", "s"), ("q", "c")],
        "x[b, y, z, q] * f[o, u, v, q]",
        inside=["y = i + u - 1", "z = j + v - 1", f"if z >= 0 and z < w and y >= 0 and y < h and {test}:"],
    )
    found = contraction(kernel, zeros(2, 9, 11, 32), zeros(48, 3, 3, 32))
    # A test that follows from the others is not one more.
    says_more = test not in ("z >= 0 and y < h", "i + u >= 1 and h > y")
    assert restates_bounds(found, found.a) is not says_more
    assert (image(found, found.a) is None) is says_more


def test_groups_are_a_batch() -> None:
    kernel = nest(
        "x, f",
        "n, g, c, h, w = x.shape; g2, k, c2, r, s = f.shape",
        "n, g, k, h, w",
        "x.dtype",
        "b: n, e: g, o: k, i: h, j: w",
        [("q", "c"), ("u", "r"), ("v", "s")],
        "x[b, e, q, y, z] * f[e, o, q, u, v]",
        inside=["y = i + u - 1", "z = j + v - 1", "if y >= 0 and y < h and z >= 0 and z < w:"],
    )
    found = contraction(kernel, zeros(2, 3, 8, 9, 11), zeros(3, 16, 8, 3, 3))
    assert names(found) == ("e", "o", "bij")


# -- what is not one ------------------------------------------------------------------------------------------------


def twice(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        first = tw.f32(0)
        for p in range(k):
            first += a[i, p] * b[p, j]
        second = tw.f32(0)
        for p in range(k):
            second += a[i, p]
        out[i, j] = first / second
    return out


def side_by_side(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        first = tw.f32(0)
        second = tw.f32(0)
        for p in range(k):
            first += a[i, p] * b[p, j]
            second += a[i, p] + b[p, j]
        out[i, j] = first * second
    return out


def largest(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        best = tw.f32(0)
        for p in range(k):
            best = max(best, a[i, p] * b[p, j])
        out[i, j] = best
    return out


SQUARE = "m, k = a.shape; n = b.shape[1]"


def pairs(term: str, sizes: str = SQUARE, extra: str = "", k: str = "k", inside: tuple[str, ...] = ()) -> MatrixKernel:
    return nest(f"a, b{extra}", sizes, "m, n", "tw.f32", "i: m, j: n", [("p", k)], term, inside=inside)


NOT_CONTRACTIONS: dict[str, tuple[MatrixKernel, tuple[np.ndarray, ...]]] = {
    "matrix by vector": (
        nest("a, b", "m, k = a.shape", "m", "a.dtype", "i: m", [("p", "k")], "a[i, p] * b[p]"),
        (A, zeros(40)),
    ),
    "matrices by vectors": (
        nest("a, b", "t, m, k = a.shape", "t, m", "a.dtype", "h: t, i: m", [("p", "k")], "a[h, i, p] * b[p]"),
        (zeros(3, 24, 40), zeros(40)),
    ),
    "rows by rows": (nest("a, b", "m, k = a.shape", "m", "a.dtype", "i: m", [("p", "k")], "a[i, p] * b[i, p]"), (A, A)),
    "depthwise": (
        nest(
            "x, f",
            "n, c, h, w = x.shape; c2, r, s = f.shape",
            "n, c, h, w",
            "x.dtype",
            "b: n, q: c, i: h, j: w",
            [("u", "r"), ("v", "s")],
            "x[b, q, y, z] * f[q, u, v]",
            inside=["y = i + u - 1", "z = j + v - 1", "if y >= 0 and y < h and z >= 0 and z < w:"],
        ),
        (zeros(2, 3, 9, 9), zeros(3, 3, 3)),
    ),
    "largest product": (tw.kernel(largest), (A, B)),
    "sum of sums": (pairs("a[i, p] + b[p, j]"), (A, B)),
    "sum of quotients": (pairs("a[i, p] / b[p, j]"), (A, B)),
    "sum of distances": (pairs("(a[i, p] - b[p, j]) * (a[i, p] - b[p, j])"), (A, B)),
    "a factor with both indices": (
        pairs("a[i, p] * b[p, j] * a[j, p]", "m, k = a.shape; n = b.shape[1]"),
        (zeros(40, 40), zeros(40, 40)),
    ),
    "a bound that another array gives": (
        pairs("a[i, p] * b[p, j]", SQUARE, ", c", "tw.cast(c[i], tw.i64)"),
        (A, B, zeros(24, dtype=i32)),
    ),
    "half a triangle": (pairs("a[i, p] * b[p, j]", k="i // 2"), (A, B)),
    "a guard of both indices": (pairs("a[i, p] * b[p, j]", inside=("if i <= j:",)), (A, B)),
    "something other than zero outside": (pairs("tw.where(p <= i, a[i, p] * b[p, j], 1.0)"), (A, B)),
    "nothing that varies along the sum": (pairs("a[i, 0] * b[0, j]"), (A, B)),
    "two sums": (tw.kernel(twice), (A, B)),
    "two sums in one loop": (tw.kernel(side_by_side), (A, B)),
}


@pytest.mark.parametrize("name", NOT_CONTRACTIONS)
def test_what_is_not_a_contraction(name: str) -> None:
    kernel, arguments = NOT_CONTRACTIONS[name]
    assert find_contraction(loops(kernel, *arguments)) is None


def test_rows_looked_up_in_another_array_are_a_factor_but_no_plane() -> None:
    found = contraction(pairs("a[tw.cast(c[i], tw.i64), p] * b[p, j]", SQUARE, ", c"), A, B, zeros(24, dtype=i32))
    assert names(found) == ("", "i", "j")
    assert plane(found, found.a) is None
    assert plane(found, found.b) == Plane(1, 0)
