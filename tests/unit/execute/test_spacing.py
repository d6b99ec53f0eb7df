"""What is known of the strides of a view on a GPU: enough for the copy engine to read it as it lies."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import bf16, f32
from tilewright.base.target import parse_target
from tilewright.compile.driver import Signature, compile_stages
from tilewright.execute.calls.arguments import ReadArgument, signature
from tilewright.tree.typed import ArrayArg


@tw.kernel
def attend(q: tw.Array, k: tw.Array, v: tw.Array, scale: float) -> tw.Array:
    batch, heads, length, depth = q.shape
    out = tw.empty((batch, length, heads, depth), q.dtype)
    for b, h, i in tw.grid(batch, heads, length):
        most = -tw.inf
        for j in range(length):
            score = 0.0
            for d in range(depth):
                score += q[b, h, i, d] * k[b, h, j, d]
            most = max(most, score * scale)
        total = 0.0
        for j in range(length):
            score = 0.0
            for d in range(depth):
                score += q[b, h, i, d] * k[b, h, j, d]
            total += tw.exp(score * scale - most)
        for e in range(depth):
            mixed = 0.0
            for j in range(length):
                score = 0.0
                for d in range(depth):
                    score += q[b, h, i, d] * k[b, h, j, d]
                mixed += tw.exp(score * scale - most) * v[b, h, j, e]
            out[b, i, h, e] = mixed / total
    return out


def seen_on_a_gpu(features: int) -> Signature:
    """The signature of heads that are views of one array of queries, keys and values, as arrays of a device have it."""
    heads = np.zeros((2, 64, 3, 4, features), ml_dtypes.bfloat16).transpose(2, 0, 3, 1, 4)
    spec = ArrayArg(bf16, 4, (None, None, None, 1), 16)
    arrays = [ReadArgument(name, view, spec) for name, view in zip("qkv", heads, strict=True)]
    plain = attend._signature((*heads, 0.5), {}, parse_target("sm_90a"))
    return replace(signature(arrays, gpu=True), args=(spec, spec, spec, plain.args[3]))


def test_strides_have_divisors() -> None:
    assert ("q", 0, 64) in seen_on_a_gpu(64).spacing
    assert ("q", 1, 64) in seen_on_a_gpu(64).spacing
    assert all(axis != 1 for _, axis, _ in seen_on_a_gpu(65).spacing)


def test_rows_of_two_byte_elements_may_be_words() -> None:
    """An even number of them is known as such; of wider elements nothing is gained by it."""
    for dtype, known in ((bf16, 2), (f32, 1)):
        array = np.zeros((7, 10), dtype.numpy)
        seen = signature([ReadArgument("x", array, ArrayArg(dtype, 2, (None, 1), 16))], gpu=True)
        divisors, spacing = ({axis: divisor for _, axis, divisor in facts} for facts in (seen.divisors, seen.spacing))
        assert divisors.get(1, 1) == spacing.get(0, 1) == known and 0 not in divisors


@pytest.mark.parametrize(("features", "family"), [(64, "family=attention"), (65, "tiles")])
def test_views_of_one_array_are_read_as_they_lie(features: int, family: str) -> None:
    stages = compile_stages(attend.function, seen_on_a_gpu(features), parse_target("sm_90a")).stages
    assert stages.schedules[0].describe().startswith(family)
