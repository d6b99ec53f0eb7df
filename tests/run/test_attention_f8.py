"""Attention of 8-bit floats: copied to 16 bits, then computed by the matrix units of Hopper or of other GPUs, as the emulator and ptxas see it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels_attention as text
import tilewright as tw
from assembled import assemble
from kernels_attention import attend, scores
from tilewright.base.dtypes import bf16, f8e4m3, f8e5m2
from tilewright.ir.emulator import run_program

FAMILIES = {"sm_90a": "family=attention ", "sm_80": "family=attention_mma "}


def arrays(dtypes: tuple[Any, Any, Any], *shape: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.standard_normal(shape).astype(dtype) for dtype in dtypes]


def check(kernel: tw.Kernel[..., Any], arguments: tuple[object, ...], want: np.ndarray, target: str, copies: int, error: float) -> None:
    stages = kernel.stages(*arguments, target=target).stages
    names = [call.kernel.name for call in stages.thread.calls]
    assert [name.endswith(".wide") for name in names] == [True] * copies + [False]
    assert FAMILIES[target] in str(stages.thread.calls[-1].kernel.attrs["schedule"])
    for stage in ("loop", "tile", "thread"):
        (found,) = run_program(getattr(stages, stage), kernel.bound(*arguments)).values()
        np.testing.assert_allclose(np.asarray(found).astype(np.float64), want, rtol=error, atol=error, err_msg=stage)


@pytest.mark.parametrize("target", FAMILIES)
@pytest.mark.parametrize("dtype", [f8e4m3, f8e5m2], ids=["e4m3", "e5m2"])
def test_all_of_8_bits(dtype: Any, target: str) -> None:
    """With a result of f32: only weights are rounded, to f16."""
    q, k, v = arrays((dtype.numpy,) * 3, 1, 40, 2, 64)
    limit = np.where(np.tri(40, k=3, dtype=bool), 0.0, -np.inf)
    turned = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    want = attend(scores(turned[0], turned[1], 0.125) + limit, turned[2]).transpose(0, 2, 1, 3)
    check(text.rows_first, (q, k, v), want, target, 1, 2e-3)


@pytest.mark.parametrize("target", FAMILIES)
def test_keys_and_values_of_8_bits(target: str) -> None:
    """A cache of keys and values: they become what the queries are."""
    q, k, v = arrays((bf16.numpy, f8e4m3.numpy, f8e4m3.numpy), 1, 2, 33, 64)
    check(text.plain, (q, k, v, 0.2), attend(scores(q, k, 0.2), v), target, 1, 1e-2)


def test_one_array_is_copied_once() -> None:
    q, k, _ = arrays((np.float16, f8e4m3.numpy, f8e4m3.numpy), 1, 2, 33, 64)

    @tw.kernel
    def shared(q, k):
        B, H, S, D = q.shape
        T = k.shape[2]
        out = tw.empty((B, H, S, D), q.dtype)
        for b, h, i in tw.grid(B, H, S):
            m = -tw.inf
            for j in range(T):
                m = max(m, tw.dot(q[b, h, i], k[b, h, j]) * 0.2)
            total = 0.0
            for j in range(T):
                total += tw.exp(tw.dot(q[b, h, i], k[b, h, j]) * 0.2 - m)
            for e in range(D):
                o = 0.0
                for j in range(T):
                    o += tw.exp(tw.dot(q[b, h, i], k[b, h, j]) * 0.2 - m) * k[b, h, j, e]
                out[b, h, i, e] = o / total
        return out

    check(shared, (q, k), attend(scores(q, k, 0.2), k), "sm_90a", 1, 2e-3)


def test_two_kinds_of_16_bits_are_three_kernels() -> None:
    q, k, v = arrays((bf16.numpy, f8e4m3.numpy, np.float16), 1, 2, 9, 64)
    stages = text.plain.stages(q, k, v, 0.2, target="sm_90a").stages
    assert [call.kernel.name for call in stages.thread.calls] == ["plain.scores", "plain.weights", "plain"]
    found = np.asarray(next(iter(run_program(stages.thread, dict(text.plain.bound(q, k, v, 0.2))).values())))
    np.testing.assert_allclose(found.astype(np.float64), attend(scores(q, k, 0.2), v), rtol=2e-2, atol=2e-2)


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", FAMILIES)
def test_it_assembles(target: str) -> None:
    q, k, v = (np.zeros((4, 8, 1024, 128), dtype) for dtype in (bf16.numpy, f8e4m3.numpy, f8e4m3.numpy))
    done = assemble(text.plain.compile(q, k, v, 0.1, target=target).code.decode(), target)
    assert done.spills == 0, done.log
