"""Which products of a program are put side by side, which are not and why, what the report says, and that results stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import UserError
from tilewright.passes.common.fusion_report import FusionReport


def given(*shapes: tuple[int, ...], dtype: Any = ml_dtypes.bfloat16) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def report(kernel: tw.Kernel[..., Any], *args: np.ndarray, target: str = "sm_90a") -> FusionReport:
    return kernel.stages(*args, target=target).fusion


def reasons(kernel: tw.Kernel[..., Any], *args: np.ndarray) -> list[str]:
    return [refused.reason for refused in report(kernel, *args).refused]


@tw.kernel
def kept(x: tw.Array, u: tw.Array, v: tw.Array) -> tuple[tw.Array, tw.Array]:
    """The first product is a result, too."""
    n, k = x.shape
    m = u.shape[1]
    t = tw.empty((n, m), tw.f32)
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * u[p, j]
        t[i, j] = total
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * v[p, j]
        out[i, j] = total - t[i, j]
    return t, out


@tw.kernel
def across(x: tw.Array, u: tw.Array, v: tw.Array) -> tw.Array:
    """The second product needs the first at other places than where it is made."""
    n, k = x.shape
    t = tw.empty((n, n), tw.f32)
    for i, j in tw.grid(n, n):
        total = 0.0
        for p in range(k):
            total += x[i, p] * u[p, j]
        t[i, j] = total
    out = tw.empty((n, n), tw.f32)
    for i, j in tw.grid(n, n):
        total = 0.0
        for p in range(k):
            total += x[i, p] * v[p, j]
        out[i, j] = total + t[j, i]
    return out


@tw.kernel
def between(x: tw.Array, u: tw.Array, v: tw.Array) -> tuple[tw.Array, tw.Array]:
    """What is between the products reads the first and is read by the second."""
    n, k = x.shape
    m = u.shape[1]
    t = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * u[p, j]
        t[i, j] = total
    rows = tw.empty(n, tw.f32)
    for i in tw.grid(n):
        total = 0.0
        for j in range(m):
            total += t[i, j]
        rows[i] = total
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * v[p, j]
        out[i, j] = total - rows[i]
    return t, out


@tw.kernel
def uneven(x: tw.Array, u: tw.Array, v: tw.Array) -> tuple[tw.Array, tw.Array]:
    """Fewer keys than queries."""
    n, k = x.shape
    m, h = u.shape[1], v.shape[1]
    q = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * u[p, j]
        q[i, j] = total
    keys = tw.empty((n, h), x.dtype)
    for i, j in tw.grid(n, h):
        total = 0.0
        for p in range(k):
            total += x[i, p] * v[p, j]
        keys[i, j] = total
    return q, keys


@tw.kernel
def twice(x: tw.Array, u: tw.Array) -> tuple[tw.Array, tw.Array]:
    """The same product for two purposes."""
    n, k = x.shape
    m = u.shape[1]
    a = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * u[p, j]
        a[i, j] = total
    b = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * u[p, j]
        b[i, j] = total * 2.0
    return a, b


SHAPES = ((512, 256), (256, 512), (256, 512))
SQUARE = ((256, 128), (128, 256), (128, 256))


def test_a_product_that_is_a_result_is_written_once() -> None:
    found = report(kept, *given(*SHAPES))
    assert found.after == 1
    assert [(f.array, f.how, str(f.saved)) for f in found.fused] == [("t", "beside", "4*m*n"), ("x", "shared", "2*k*n")]
    assert not found.refused


def test_a_product_needed_elsewhere_stays_apart() -> None:
    found = report(across, *given(*SQUARE))
    assert found.after == 2
    assert any("'t' is needed at other places than where it is made" in reason for reason in reasons(across, *given(*SQUARE)))


def test_what_comes_between_keeps_products_apart() -> None:
    found = report(between, *given(*SHAPES))
    assert found.after == 3
    assert any("between them has to do with what is read or written here" in r.reason for r in found.refused)


def test_other_columns_stay_apart() -> None:
    found = report(uneven, *given((512, 256), (256, 512), (256, 128)))
    assert found.after == 2
    assert [r.reason for r in found.refused] == ["not one product beside the other: one has n x m results, the other n x h"]


def test_the_same_product_twice_stays_as_written() -> None:
    found = report(twice, *given((256, 128), (128, 256)))
    assert found.after == 2
    assert [r.reason for r in found.refused] == ["not one product beside the other: both multiply with 'u'"]


def test_without_tiles_for_several_products_nothing_is_joined() -> None:
    found = report(kept, *given((4, 4), (4, 4), (4, 4)), target="sm_75")
    assert found.after == 2
    assert [r.reason for r in found.refused if r.array == "x"] == ["no tiles of sm_75 hold 2 products side by side"]


def test_the_cost_model_decides() -> None:
    """Sums that many blocks share are faster apart."""
    found = report(kept, *given((64, 16384), (16384, 64), (16384, 64)))
    assert found.after >= 2
    assert any("by the cost model" in r.reason for r in found.refused)


WANTED: dict[str, Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]] = {
    "kept": lambda first, second: (first, second - first),
    "across": lambda first, second: (second + first.T,),
    "between": lambda first, second: (first, second - first.sum(1, keepdims=True)),
    "uneven": lambda first, second: (first, second),
}
SMALL = {"kept": (80, 70), "across": (80, 80), "between": (80, 70), "uneven": (70, 40)}


@pytest.mark.parametrize("kernel", [kept, across, between, uneven], ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_results(kernel: tw.Kernel[..., Any], device: str) -> None:
    columns = SMALL[kernel.__name__]
    x, u, v = given((80, 33), (33, columns[0]), (33, columns[1 if kernel is uneven else 0]), dtype=np.float32)
    found = kernel(x, u, v, device=device)
    wanted = WANTED[kernel.__name__](x.astype(np.float64) @ u, x.astype(np.float64) @ v)
    for result, want in zip(found if isinstance(found, tuple) else (found,), wanted, strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-3)


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    args = given(*SHAPES)
    for text in (
        "family=wgmma m=128 n=128 k=64 stages=4 math_warpgroups=2 horizontal=3",
        "family=wgmma m=128 n=256 k=64 stages=4 math_warpgroups=2 horizontal=2",
        "family=wgmma m=128 n=128 k=64 stages=4 math_warpgroups=2 horizontal=2 split_k=2",
    ):
        with pytest.raises(UserError, match="does not fit kept"):
            tw.kernel(schedule=text)(kept.python).stages(*args, target="sm_90a")


def test_one_product_may_be_asked_for() -> None:
    apart = tw.kernel(schedule="family=wgmma m=128 n=128 k=64 stages=4 math_warpgroups=2")(kept.python)
    done = apart.stages(*given(*SHAPES), target="sm_90a")
    assert len(done.stages.thread.calls) == 2
