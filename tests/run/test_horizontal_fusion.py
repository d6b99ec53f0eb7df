"""Products of the same rows that one kernel computes side by side: executed by the emulator at every stage against float64, for
warp-group instructions, warp instructions and plain arithmetic, at sizes that no tile divides, with forced schedules too."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from support import as_wide
from tilewright.ir.emulator import run_program


@tw.kernel
def gated(x: tw.Array, gate: tw.Array, up: tw.Array) -> tw.Array:
    """silu(x @ gate) * (x @ up)."""
    n, k = x.shape
    m = gate.shape[1]
    opened = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * gate[p, j]
        opened[i, j] = total
    wide = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * up[p, j]
        wide[i, j] = total
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        out[i, j] = tw.silu(opened[i, j]) * wide[i, j]
    return out


@tw.kernel
def three(x: tw.Array, first: tw.Array, second: tw.Array, third: tw.Array, bias: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array]:
    """x @ first + bias, x @ second^T, x @ third: the second lies the other way, so it stays apart."""
    n, k = x.shape
    m = first.shape[1]
    q = tw.empty((n, m), x.dtype)
    r = tw.empty((n, m), x.dtype)
    s = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * first[p, j]
        q[i, j] = total + bias[j]
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * second[j, p]
        r[i, j] = total
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * third[p, j]
        s[i, j] = total
    return q, r, s


@tw.kernel
def heads(x: tw.Array, wq: tw.Array, wk: tw.Array, wv: tw.Array, bias: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array]:
    """Queries, keys and values; rows of the weights run along the sum."""
    n, k = x.shape
    m = wq.shape[0]
    q = tw.empty((n, m), x.dtype)
    keys = tw.empty((n, m), x.dtype)
    v = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * wq[j, p]
        q[i, j] = total + bias[j]
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * wk[j, p]
        keys[i, j] = total
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * wv[j, p]
        v[i, j] = total * 0.5
    return q, keys, v


DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-20}


def numbers(seed: int, dtype: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(np.float32).astype(DTYPES[dtype]) for shape in shapes]


def run(kernel: tw.Kernel[..., Any], target: str, arguments: list[np.ndarray]) -> tuple[dict[str, list[np.ndarray]], Any]:
    done = kernel.stages(*arguments, target=target)
    found = {}
    for stage in ("loop", "tile", "thread"):
        outputs = run_program(getattr(done.stages, stage), kernel.bound(*arguments))
        found[stage] = list(outputs.values())
    return found, done


def near(found: np.ndarray, want: np.ndarray, dtype: str) -> None:
    assert found.shape == want.shape
    bound = UNIT[dtype] * np.abs(want) + 2.0**-20 * max(1.0, np.abs(want).max(initial=0.0))
    assert (np.abs(as_wide(found) - want) <= bound).all()


def check_gated(kernel: tw.Kernel[..., Any], target: str, dtype: str, sizes: tuple[int, int, int]) -> Any:
    n, k, m = sizes
    arguments = numbers(n * k + m, dtype, (n, k), (k, m), (k, m))
    x, gate, up = (as_wide(a) for a in arguments)
    found, done = run(kernel, target, arguments)
    opened = x @ gate
    want = opened / (1 + np.exp(-opened)) * (x @ up)
    for results in found.values():
        near(results[0], want, dtype)
    return done


SIZES = [(128, 128, 128), (200, 72, 136), (64, 64, 64)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("target", "dtype"), [("sm_90a", "bf16"), ("sm_80", "f16"), ("sm_75", "f32")])
def test_gate_and_up(target: str, dtype: str, sizes: tuple[int, int, int]) -> None:
    done = check_gated(gated, target, dtype, sizes)
    assert len(done.stages.thread.calls) == 1


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("sizes", [*SIZES, (7, 5, 9), (65, 1000, 130), (3, 0, 4), (0, 8, 8)], ids=str)
def test_on_the_cpu(sizes: tuple[int, int, int], dtype: str) -> None:
    n, k, m = sizes
    x, first, second, third, bias = numbers(m, dtype, (n, k), (m, k), (m, k), (m, k), (m,))
    wide = [as_wide(a) for a in (x, first, second, third, bias)]
    found = heads(x, first, second, third, bias)
    for result, want in zip(found, (wide[0] @ wide[1].T + wide[4], wide[0] @ wide[2].T, wide[0] @ wide[3].T * 0.5), strict=True):
        near(result, want, dtype)
    assert heads.last is not None and len(heads.last.launches) == 1
    gate, up = np.ascontiguousarray(first.T), np.ascontiguousarray(second.T)
    opened = wide[0] @ wide[1].T
    with np.errstate(over="ignore"):
        near(gated(x, gate, up), opened / (1 + np.exp(-opened)) * (wide[0] @ wide[2].T), dtype)
    assert gated.last is not None and len(gated.last.launches) == 1


@pytest.mark.parametrize("target", ["x86-64-avx512", "x86-64-avx2"])
def test_stages_of_the_cpu(target: str) -> None:
    done = check_gated(gated, target, "f32", (30, 17, 70))
    assert [s.horizontal for s in done.stages.schedules] == [2]


SCHEDULES = {
    "cooperative": "family=wgmma m=128 n=128 k=64 stages=3 math_warpgroups=2 horizontal=2",
    "turns": "family=wgmma m=128 n=64 k=64 stages=3 math_warpgroups=2 pingpong=1 mma_in_flight=1 horizontal=2 pdl=1",
    "one group": "family=wgmma m=64 n=64 k=64 stages=2 horizontal=2",
    "three buffers": "family=wgmma m=192 n=64 k=64 stages=2 math_warpgroups=3 epilogue_stages=3 horizontal=2",
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_two(name: str) -> None:
    kernel = tw.kernel(schedule=SCHEDULES[name])(gated.python)
    done = check_gated(kernel, "sm_90a", "bf16", (200, 136, 136))
    assert [s.horizontal for s in done.stages.schedules] == [2]


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("sizes", [(130, 72, 72), (256, 128, 64)], ids=str)
def test_queries_keys_values(target: str, sizes: tuple[int, int, int]) -> None:
    n, k, m = sizes
    arguments = numbers(m, "bf16", (n, k), (m, k), (m, k), (m, k), (m,))
    x, wq, wk, wv, bias = (as_wide(a) for a in arguments)
    found, done = run(heads, target, arguments)
    for results in found.values():
        for result, want in zip(results, (x @ wq.T + bias, x @ wk.T, x @ wv.T * 0.5), strict=True):
            near(result, want, "bf16")
    assert len(done.stages.thread.calls) == 1


def test_what_lies_the_other_way_stays_apart() -> None:
    arguments = numbers(3, "bf16", (128, 64), (64, 128), (128, 64), (64, 128), (128,))
    x, first, second, third, bias = (as_wide(a) for a in arguments)
    found, done = run(three, "sm_90a", arguments)
    for results in found.values():
        for result, want in zip(results, (x @ first + bias, x @ second.T, x @ third), strict=True):
            near(result, want, "bf16")
    assert len(done.stages.thread.calls) == 2
    assert any("different ways" in refused.reason for refused in done.fusion.refused)


def test_empty_sums() -> None:
    arguments = numbers(3, "bf16", (64, 0), (64, 0), (64, 0), (64, 0), (64,))
    found, _ = run(heads, "sm_90a", arguments)
    for results in found.values():
        np.testing.assert_array_equal(as_wide(results[0]), np.broadcast_to(as_wide(arguments[4]), (64, 64)))
        assert not as_wide(results[1]).any() and not as_wide(results[2]).any()
