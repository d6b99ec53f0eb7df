"""Functions that are the same but for numbers call one body."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bench.families.convolutions import transposed3d

import tilewright as tw
from support import add_2d, scale_2d, stages_of
from tilewright.base.target import host_cpu
from tilewright.codegen.cpu.emitter import function_parts
from tilewright.codegen.cpu.same_bodies import shape, shared_text
from tilewright.compile.build import llvm_text

STEP = 3


@tw.kernel
def spread(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, length = x.shape
    _, filters, taps = w.shape
    size = (length - 1) * STEP + taps
    out = tw.empty((n, filters, size), x.dtype)
    for b, o, i in tw.grid(n, filters, size):
        total = tw.f32(0)
        for c in range(channels):
            for k in range(taps):
                at = i - k
                if at % STEP == 0 and 0 <= at // STEP < length:
                    total += x[b, c, at // STEP] * w[c, o, k]
        out[b, o, i] = total
    return out


def test_phases_of_a_sum_call_one_body() -> None:
    x, w = np.random.default_rng(0).standard_normal((2, 9, 12)), np.random.default_rng(1).standard_normal((9, 10, 4))
    x32, w32 = x.astype(np.float32), w.astype(np.float32)
    text, _ = llvm_text(spread.stages(x32, w32, target="cpu").stages.thread, host_cpu())
    bodies, functions = text.count("define internal void"), text.count("define void")
    assert bodies < functions and functions >= STEP, (bodies, functions)
    wanted = np.zeros((2, 10, 11 * STEP + 4))
    for i in range(12):
        for k in range(4):
            wanted[:, :, i * STEP + k] += x[:, :, i] @ w[:, :, k]
    np.testing.assert_allclose(spread(x32, w32), wanted, rtol=1e-4, atol=1e-4)


def test_phases_with_unlike_numbers_of_terms_call_one_body() -> None:
    """Of three taps, one or two count along each axis."""
    x, w = np.random.default_rng(0).standard_normal((8, 3, 4, 9)), np.random.default_rng(1).standard_normal((8, 12, 3, 3, 3))
    x32, w32 = x.astype(np.float32)[None], w.astype(np.float32)
    spread_3d = transposed3d(2, 1)
    text, _ = llvm_text(spread_3d.stages(x32, w32, target="cpu").stages.thread, host_cpu())
    bodies, functions = text.count("define internal void"), text.count("define void")
    # One body for the phases, and one for the copy of the image that all of them read, where the target makes one.
    assert functions in (8, 9) and bodies == functions - 7, (bodies, functions)
    whole = np.zeros((12, 7, 9, 19))
    for at in np.ndindex(3, 4, 9):
        here = tuple(slice(2 * n, 2 * n + 3) for n in at)
        whole[(slice(None), *here)] += np.tensordot(x[(slice(None), *at)], w, (0, 0))
    np.testing.assert_allclose(spread_3d(x32, w32)[0], whole[:, 1:-1, 1:-1, 1:-1], rtol=1e-4, atol=1e-4)


def test_shapes_tell_functions_apart() -> None:
    one = function_parts(stages_of(add_2d(), "cpu").thread.calls[0].kernel, "one")
    two, three, other = (replace(one, lines=(line, *one.lines)) for line in ("  %o = add i64 %begin, 2", "  %o = add i64 %begin, 3", "  %o = xor i64 %begin, 2"))
    assert shape(two) == shape(three)
    assert len({shape(one), shape(two), shape(other)}) == 3


def test_numbers_become_arguments() -> None:
    one = function_parts(stages_of(add_2d(), "cpu").thread.calls[0].kernel, "one")
    number = "  %other = add nsw i64 %begin, {}"
    functions = [replace(one, entry=f"f{n}", lines=(number.format(n), *one.lines)) for n in range(3)]
    texts = shared_text(functions)
    assert texts is not None and len(texts) == 3
    assert texts[0].count("define internal void @f0.body") == 1 and "add nsw i64 %begin, %n0" in texts[0]
    assert [text.count("call void @f0.body(") for text in texts] == [1, 1, 1]
    assert ", i64 2, " in texts[2] and "define internal" not in texts[2]


def test_others_are_not_joined() -> None:
    one, other = (function_parts(stages_of(kernel, "cpu").thread.calls[0].kernel, "f") for kernel in (add_2d(), scale_2d()))
    assert shared_text([one, other]) is None
    assert shared_text([one, replace(one, lines=("  %other = fadd float 1.0, 2.0", *one.lines[1:]))]) is None


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 5), (0, 3, 2)])
def test_joined_phases_of_short_and_empty_axes(shape: tuple[int, int, int]) -> None:
    batch, height, width = shape
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((batch, 8, 2, height, width)).astype(np.float32), rng.standard_normal((8, 9, 3, 3, 3)).astype(np.float32)
    x.flat[:1] = np.nan
    whole = np.zeros((batch, 9, 5, 2 * height + 1, 2 * width + 1))
    for d, i, j in np.ndindex(2, height, width):
        whole[:, :, 2 * d : 2 * d + 3, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3] += np.einsum("nc,cfqrs->nfqrs", x[:, :, d, i, j].astype(np.float64), w)
    np.testing.assert_allclose(transposed3d(2, 1)(x, w), whole[:, :, 1:-1, 1:-1, 1:-1], rtol=1e-4, atol=1e-4)
