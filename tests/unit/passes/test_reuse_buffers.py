"""Scratch arrays in common memory: which may, which may not, and that results stay."""

from __future__ import annotations

import numpy as np

import tilewright as tw
from tilewright.base.target import host_cpu
from tilewright.compile.driver import compile_kernel
from tilewright.passes.program.reuse_buffers import reuse_buffers


@tw.kernel
def chain(x, a, b, c):
    """Three products; what passes between them is never needed three at a time."""
    n, k = x.shape
    p = tw.empty((n, a.shape[1]), tw.f32)
    for i, j in tw.grid(n, a.shape[1]):
        total = 0.0
        for m in range(k):
            total += x[i, m] * a[m, j]
        p[i, j] = total
    q = tw.empty((n, b.shape[1]), tw.f32)
    for i, j in tw.grid(n, b.shape[1]):
        total = 0.0
        for m in range(a.shape[1]):
            total += p[i, m] * b[m, j]
        q[i, j] = total
    r = tw.empty((n, c.shape[1]), tw.f32)
    for i, j in tw.grid(n, c.shape[1]):
        total = 0.0
        for m in range(b.shape[1]):
            total += q[i, m] * c[m, j]
        r[i, j] = total
    out = tw.empty((n, n), tw.f32)
    for i, j in tw.grid(n, n):
        total = 0.0
        for m in range(c.shape[1]):
            total += r[i, m] * r[j, m]
        out[i, j] = total
    return out


@tw.kernel
def needed_later(x, a):
    """The first product is read again at the end, so nothing is free in between."""
    n = x.shape[0]
    p = tw.empty((n, n), tw.f32)
    for i, j in tw.grid(n, n):
        total = 0.0
        for m in range(n):
            total += x[i, m] * a[m, j]
        p[i, j] = total
    q = tw.empty((n, n), tw.f32)
    for i, j in tw.grid(n, n):
        total = 0.0
        for m in range(n):
            total += p[i, m] * a[m, j]
        q[i, j] = total
    out = tw.empty((n, n), tw.f32)
    for i, j in tw.grid(n, n):
        total = 0.0
        for m in range(n):
            total += q[i, m] * p[m, j]
        out[i, j] = total
    return out


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def test_arrays_take_turns() -> None:
    arguments = numbers(40, 24), numbers(24, 33), numbers(33, 70), numbers(70, 51)
    done = chain.stages(*arguments, target="cpu")
    assert [a.name for a in done.stages.thread.scratch] == ["p", "q", "r"]
    shared = reuse_buffers(done.stages.thread, done.stages.loop)
    assert [a.name for a in shared.scratch] == ["p", "q"]
    assert "max(" in str(shared.scratch[0].type.shape[0])
    x, *others = (a.astype(np.float64) for a in arguments)
    for other in others:
        x = x @ other
    np.testing.assert_allclose(chain(*arguments, device="cpu"), x @ x.T, rtol=1e-3, atol=1e-2)
    assert len(compile_kernel(chain.function, chain._signature(arguments, {}, host_cpu()), host_cpu()).scratch) == 2


def test_what_is_read_later_keeps_its_memory() -> None:
    x, a = numbers(40, 40), numbers(40, 40).T.copy()
    done = needed_later.stages(x, a, target="cpu")
    assert reuse_buffers(done.stages.thread, done.stages.loop) == done.stages.thread
    p = x.astype(np.float64) @ a
    np.testing.assert_allclose(needed_later(x, a, device="cpu"), p @ a @ p, rtol=1e-3, atol=1e-2)
