"""Attention is recognised however it is written, and nothing else is taken for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels_attention as text
import tilewright as tw
from tilewright.analysis.attention import Attention, find_attention

Q = np.zeros((2, 4, 24, 16), np.float16)
K = np.zeros((2, 4, 40, 16), np.float16)
HALF = np.zeros((2, 2, 40, 16), np.float16)


def find(kernel: tw.Kernel[..., Any], *arguments: object) -> Attention | None:
    return find_attention(kernel.stages(*arguments, target="cpu").stages.loop.calls[0].kernel)


def test_the_parts_of_a_plain_one() -> None:
    found = find(text.plain, Q, K, K, 0.5)
    assert found is not None
    assert [found.indices[p].name for p in (*found.batch, found.row)] == ["bh", "i"]
    assert found.column.name == "e" and found.loop is not None
    assert (str(found.keys), str(found.depth), str(found.column_extent)) == ("T", "D", "E")
    assert found.reach is None and not found.conditions and not found.scales
    assert found.exponential == "exp"


def test_limits_of_rows() -> None:
    causal = find(text.grouped_causal, Q, HALF, HALF, 0.5)
    assert causal is not None and causal.reach is not None and causal.reach.constant == 1 and causal.strict
    assert [s.divides for s in causal.scales] == [True]
    ranged = find(text.ranged, Q, Q, Q)
    assert ranged is not None and ranged.reach is not None and ranged.reach.constant == 1 and ranged.loop is None
    before = find(text.before, Q, K, K)
    assert before is not None and before.reach is not None and before.reach.constant == 0


def test_other_conditions_are_kept() -> None:
    masked = find(text.masked, Q, K, K, np.zeros((24, 40), np.uint8), 0.5)
    assert masked is not None and masked.reach is None and len(masked.conditions) == 1 and not masked.strict


@tw.kernel
def other_maximum(q: tw.Array, k: tw.Array, v: tw.Array) -> tw.Array:
    """What is subtracted is not the maximum of what is exponentiated."""
    S, D = q.shape
    T = k.shape[0]
    E = v.shape[1]
    out = tw.empty((S, E), q.dtype)
    for i in tw.grid(S):
        m = -tw.inf
        for j in range(T):
            s = tw.f32(0)
            for d in range(D):
                s += q[i, d] * k[j, d]
            m = max(m, s * 2.0)
        for e in range(E):
            o = tw.f32(0)
            for j in range(T):
                s = tw.f32(0)
                for d in range(D):
                    s += q[i, d] * k[j, d]
                o += tw.exp(s * 3.0 - m) * v[j, e]
            out[i, e] = o
    return out


@tw.kernel
def other_condition(q: tw.Array, k: tw.Array, v: tw.Array) -> tw.Array:
    """The maximum is of other terms than the sum."""
    S, D = q.shape
    T = k.shape[0]
    E = v.shape[1]
    out = tw.empty((S, E), q.dtype)
    for i in tw.grid(S):
        m = -tw.inf
        for j in range(T):
            if j <= i:
                s = tw.f32(0)
                for d in range(D):
                    s += q[i, d] * k[j, d]
                m = max(m, s)
        for e in range(E):
            o = tw.f32(0)
            for j in range(T):
                s = tw.f32(0)
                for d in range(D):
                    s += q[i, d] * k[j, d]
                o += tw.exp(s - m) * v[j, e]
            out[i, e] = o
    return out


@tw.kernel
def values_of_the_row(q: tw.Array, k: tw.Array, v: tw.Array) -> tw.Array:
    """The values depend on the row: no product of matrices."""
    S, D = q.shape
    T = k.shape[0]
    E = v.shape[1]
    out = tw.empty((S, E), q.dtype)
    for i in tw.grid(S):
        m = -tw.inf
        for j in range(T):
            s = tw.f32(0)
            for d in range(D):
                s += q[i, d] * k[j, d]
            m = max(m, s)
        for e in range(E):
            o = tw.f32(0)
            for j in range(T):
                s = tw.f32(0)
                for d in range(D):
                    s += q[i, d] * k[j, d]
                o += tw.exp(s - m) * v[i + j, e]
            out[i, e] = o
    return out


@pytest.mark.parametrize("kernel", [other_maximum, other_condition, values_of_the_row])
def test_what_is_none(kernel: tw.Kernel[..., Any]) -> None:
    q, k = np.zeros((24, 16), np.float16), np.zeros((40, 16), np.float16)
    assert find(kernel, q, k, np.zeros((80, 16), np.float16)) is None
